"""No curvature at all: the squared gradient norm ``|g|^2``, plain and unbiased."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ...blocks import weight_of
from ...records import Block
from ...running.loss import IGNORE, Data, batches, logits_of, summed_loss
from ...running.modes import prepared
from ..record import Scores
from . import common


def score_gradient_norm(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    progress: common.Progress | None = None,
) -> Scores:
    """``|g_k|^2`` of the mean token loss; one plain forward and backward pass.

    The plain value is inflated by ``tr(Sigma)/n``; ``extra['unbiased']`` removes that by pairing different batches only,
    ``(|sum_b G_b|^2 - sum_b |G_b|^2) / (N^2 - sum_b N_b^2)``, ``G_b`` the summed gradient of batch b with ``N_b`` tokens. The
    difference of the two is the noise floor.

    Raises:
        InvalidInput: A batch size below one.
        UnknownBlock: A block that the model does not have.
    """
    common.check_inputs(data, batch_size)
    tick = common.Ticker(progress, data.samples)
    parameters = [[weight_of(model, m.name)[1] for m in b.modules] for b in blocks]
    wanted = {id(p): p for group in parameters for p in group}
    sums: dict[int, torch.Tensor] = {}
    squares = np.zeros(len(blocks))
    counts, total = [], 0.0
    with prepared(model):
        for p in model.parameters():
            p.requires_grad_(id(p) in wanted)
        for batch in batches(model, data, batch_size):
            loss = summed_loss(logits_of(model, batch), batch.targets)
            loss.backward()
            total += float(loss.detach())
            counts.append(int((batch.targets != IGNORE).sum()))
            for k, group in enumerate(parameters):
                for p in group:
                    if p.grad is None:
                        continue
                    g = p.grad if p.grad.dtype == torch.float64 else p.grad.float()  # half precision would stop adding up
                    squares[k] += float(torch.linalg.vector_norm(g)) ** 2
                    sums[id(p)] = g if id(p) not in sums else sums[id(p)].add_(g)
            for p in wanted.values():
                p.grad = None
            tick(batch.size)
    n = float(sum(counts))
    squared = [[float(torch.linalg.vector_norm(sums[id(p)])) ** 2 for p in group if id(p) in sums] for group in parameters]
    square = np.array([sum(values) for values in squared])
    pairs = n**2 - float(np.square(counts).sum())
    unbiased = (square - squares) / pairs if pairs > 0 else np.full(len(blocks), np.nan)
    plain = square / n**2
    floor = [None if np.isnan(u) else p - u for p, u in zip(plain, unbiased, strict=True)]
    extra = {"unbiased": unbiased.tolist(), "tokens": int(n), "mean_loss": total / n}
    return common.record(
        model, data, blocks, "gradient-norm", gain=[plain.tolist()], noise_floor=[floor], unit="(nats per parameter)^2",
        extra=extra,
    )  # fmt: skip
