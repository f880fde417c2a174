"""Trace of the empirical Fisher of each block, from one backward pass without weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..execution.backward import Accumulator, feed
from ..execution.loss import Batch, Data
from ..execution.processes import ProcessGroup
from ..execution.sites import Site
from ..progress import Progress, Steps
from ..records import Block
from ..scores import Scores
from .ablation import over_sequences
from .curvature.common import check_inputs
from .curvature.gram import token_counts


def square_norms(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared Frobenius norm of ``S_i = B_i' A_i`` for each sequence, shape ``(B,)``, float64.

    ``|S_i|^2 = sum_ts (A_i A_i')_ts (B_i B_i')_ts`` where the sequence is short beside the matrix, else from ``S_i`` itself.
    """
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (a, b))
    length, d_in, d_out = a.shape[1], a.shape[2], b.shape[2]
    if length * (d_in + d_out) < d_in * d_out:
        return ((a @ a.mT) * (b @ b.mT)).double().sum((1, 2))
    return (b.mT @ a).double().square().sum((1, 2))


class _Norms(Accumulator):
    """Squared norms of the gradients, ``(K, n)``."""

    def __init__(self, blocks: Sequence[Block], samples: int) -> None:
        self.place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.table = np.zeros((len(blocks), samples))
        self.rows = slice(0, 0)

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        self.rows = batch.rows

    def update(self, site: Site) -> None:
        """Add the norms of a site's matrices."""
        for name, b in site.b.items():
            self.table[self.place[name], self.rows] += square_norms(site.a, b).cpu().numpy()

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Nothing: every process fills the columns of its own sequences."""

    def merge(self, group: ProcessGroup) -> None:
        """All columns."""
        self.table = group.sum(self.table)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Add the norm of a gradient read from autograd."""
        self.table[self.place[name], self.rows] += float(gradient.double().square().sum())


def fisher_trace(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    walk: str = "auto",
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
        walk: ``whole`` graph, by ``layers``, or ``auto``.
        progress: Called with sequences done and in total.

    Raises:
        CoverageError: A matrix of a block was never seen.
        UnknownStructure: The model has no head.
    """
    check_inputs(data, batch_size)
    norms = _Norms(blocks, data.samples)
    feed(model, data, blocks, norms, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    counts, unit = token_counts(model, data), "nats^2 per parameter^2"
    return over_sequences(model, data, blocks, "fisher-trace", norms.table, counts, unit=unit)
