"""No curvature at all: the squared gradient norm ``|g|^2``, plain and unbiased."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ...execution.backward import Accumulator, feed
from ...execution.loss import IGNORE, Batch, Data
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .gram import real_type


class _Gradients(Accumulator):
    """``|sum_b G_b|^2`` and ``sum_b |G_b|^2`` of every block, ``G_b`` the gradient of a batch's summed loss."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.square, self.squares = np.zeros(len(blocks)), np.zeros(len(blocks))
        self.counts: dict[int, int] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self._batch: dict[str, torch.Tensor] = {}
        self._key = 0

    def bytes(self, blocks: Sequence[Block]) -> int:
        """One gradient per matrix."""
        return sum(b.numel for b in blocks) * self.dtype.itemsize

    def begin(self, batch: Batch, loss: int) -> None:
        """Count the target tokens of a batch once."""
        self.counts[batch.rows.start] = int((batch.targets != IGNORE).sum())

    def update(self, site: Site) -> None:
        """Add what a site contributes to the gradients of the batch."""
        a = site.a.to(self.dtype).flatten(0, 1)
        for name in site.names:
            g = site.b[name].to(self.dtype).flatten(0, 1).T @ a
            g = self._batch.pop(name).add_(g) if name in self._batch else g
            if site.open.get(name, 0) > 0:
                self._batch[name] = g
            else:
                self._add(name, g)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient that is read from autograd."""
        self._add(name, gradient.to(self.dtype, copy=True))

    def finish(self, batch: Batch, loss: int) -> None:
        """Add what is left of the batch."""
        for name, g in self._batch.items():
            self._add(name, g)
        self._batch = {}

    def _add(self, name: str, g: torch.Tensor) -> None:
        self.squares[self.place[name]] += float(torch.linalg.vector_norm(g)) ** 2
        self.sums[name] = g if name not in self.sums else self.sums[name].add_(g)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Add gradients up; squares of batches are added at the end."""
        group.reduce([self.sums[n] for n in names if n in self.sums])

    def merge(self, group: ProcessGroup) -> None:
        """Squares and tokens of all batches."""
        self.squares = group.sum(self.squares)
        self.counts = {k: v for found in group.gather(self.counts) for k, v in found.items()}

    def finalize(self, names: Sequence[str]) -> bool:
        """Square the sums."""
        for name in [n for n in names if n in self.sums]:
            self.square[self.place[name]] += float(torch.linalg.vector_norm(self.sums.pop(name))) ** 2
        return False


def score_gradient_norm(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    batch_size: int = 8,
    walk: str = "auto",
    progress: Progress | None = None,
) -> Scores:
    """``|g_k|^2`` of the mean token loss; one forward and backward pass (``walk``: through the whole graph, by layers, or
    whole where it fits).

    The plain value is inflated by ``tr(Sigma)/n``; ``extra['unbiased']`` removes that by pairing different batches only,
    ``(|sum_b G_b|^2 - sum_b |G_b|^2) / (N^2 - sum_b N_b^2)``, ``G_b`` the summed gradient of batch b with ``N_b`` tokens. The
    difference of the two is the noise floor.

    Raises:
        InvalidInput: A batch size below one.
        UnknownBlock: A block that the model does not have.
    """
    common.check_inputs(data, batch_size)
    sums = _Gradients(blocks, real_type(model)[0])
    tick = Steps(progress, data.samples)
    total = feed(model, data, blocks, sums, batch_size=batch_size, walk=walk, tick=tick).loss
    counts = np.array(list(sums.counts.values()))
    n = float(counts.sum())
    pairs = n**2 - float(np.square(counts).sum())
    unbiased = (sums.square - sums.squares) / pairs if pairs > 0 else np.full(len(blocks), np.nan)
    plain = sums.square / n**2
    floor = [None if np.isnan(u) else p - u for p, u in zip(plain, unbiased, strict=True)]
    extra = {"unbiased": unbiased.tolist(), "tokens": int(n), "mean_loss": total / n}
    return common.record(
        model, data, blocks, "gradient-norm", gain=[plain.tolist()], noise_floor=[floor], unit="(nats per parameter)^2",
        extra=extra,
    )  # fmt: skip
