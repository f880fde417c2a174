"""Trace of the empirical Fisher of each block, from one backward pass without weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..records import Block
from ..running.loss import IGNORE, Data
from ..running.sites import Collector, Site
from .ablation import over_sequences
from .curvature.common import Progress, Ticker, backward, check_inputs, walk
from .record import Scores


def square_norms(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared Frobenius norm of ``S_i = B_i' A_i`` for each sequence, shape ``(B,)``, float64.

    ``|S_i|^2 = sum_ts (A_i A_i')_ts (B_i B_i')_ts`` where the sequence is short beside the matrix, else from ``S_i`` itself.
    """
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (a, b))
    length, d_in, d_out = a.shape[1], a.shape[2], b.shape[2]
    if length * (d_in + d_out) < d_in * d_out:
        return ((a @ a.mT) * (b @ b.mT)).double().sum((1, 2))
    return (b.mT @ a).double().square().sum((1, 2))


def fisher_trace(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Scores:
    """``tr F_k = (1/N) sum_i |s_i|^2``, ``s_i`` the gradient of the summed loss of sequence i in block k, N tokens.

    The same normalisation as every curvature of this package (that of the mean token loss), so the value is the sum of
    the eigenvalues that the dampings refer to. Orientation ``gain``.

    Args:
        model: The model.
        data: Calibration set.
        blocks: Blocks to score.
        batch_size: Sequences per pass; the result does not depend on it.
        progress: Called with sequences done and in total.

    Raises:
        CoverageError: A matrix of a block was never seen.
        UnknownStructure: The model has no head.
    """
    place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
    table = torch.zeros(len(blocks), data.samples, dtype=torch.float64)
    counts = torch.zeros(data.samples, dtype=torch.float64)
    rows = slice(0, 0)

    def consume(site: Site) -> None:
        for name, b in site.b.items():
            table[place[name], rows] += square_norms(site.a, b).cpu()

    check_inputs(data, batch_size)
    with Collector(model, blocks, consume) as collector:
        for batch, logits in walk(model, data, collector, batch_size, Ticker(progress, data.samples)):
            rows = batch.rows
            backward(collector, batch, logits, batch.targets)
            for name, parameter in collector.direct.items():
                if parameter.grad is not None:
                    table[place[name], rows] += parameter.grad.double().square().sum().cpu()
            counts[rows] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().double()
        collector.check_coverage()
    unit = "nats^2 per parameter^2"
    return over_sequences(model, data, blocks, "fisher-trace", table.numpy(), counts.numpy(), unit=unit)
