"""Diagonal Fisher: ``C = diag(D)``, ``D_p = (1/N) sum_i s_ip^2``, exact per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ...execution.backward import Accumulator, feed
from ...execution.loss import Batch, Data
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .gram import real_type, token_counts

_PIECE = 1 << 15  # entries: what a sweep reads again and again fits into the second-level cache


class _Diagonal(Accumulator):
    """Sums of gradients and of their squares by weight matrix, in a few groups of sequences; swept block by block.

    A block is swept, and its sums are forgotten, when its last matrix is whole; dampings that refer to all blocks wait.
    """

    def __init__(
        self, blocks: Sequence[Block], dtype: torch.dtype, groups: int, counts: np.ndarray,
        damping: float | Sequence[float] | None, unit: str,
    ) -> None:  # fmt: skip
        self.blocks, self.dtype, self.groups, self.samples = blocks, dtype, groups, len(counts)
        self.damping, self.unit, self.total = damping, unit, float(counts.sum())
        owner = np.arange(self.samples) * groups // self.samples
        self.tokens = np.array([counts[owner == g].sum() for g in range(groups)])
        self.place = {m.name: k for k, b in enumerate(blocks) for m in b.modules}
        self.waiting = [len(b.modules) for b in blocks]
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}
        self.largest, self.mean = np.zeros(len(blocks)), np.zeros(len(blocks))
        self.swept: dict[int, np.ndarray] = {}
        self.local = unit in ("max", "mean") or (unit == "absolute" and damping is not None)
        self._batch: dict[str, torch.Tensor] = {}
        self._start = 0

    def bytes(self, blocks: Sequence[Block]) -> int:
        """Two sums per group."""
        return 2 * self.groups * sum(b.numel for b in blocks) * self.dtype.itemsize

    def begin(self, batch: Batch, loss: int) -> None:
        """Remember whose gradients come."""
        self._start = batch.rows.start

    def update(self, site: Site) -> None:
        """Keep the gradients of the batch until all calls of a matrix have come."""
        a = site.a.to(self.dtype)
        for name in site.names:
            rows = torch.bmm(site.b[name].to(self.dtype).transpose(1, 2), a)
            rows = self._batch.pop(name) + rows if name in self._batch else rows
            if site.open.get(name, 0) > 0:
                self._batch[name] = rows
            else:
                self._add(name, rows)

    def direct(self, name: str, gradient: torch.Tensor) -> None:
        """Take the gradient of a directly read parameter (one sequence per batch)."""
        self._add(name, gradient[None].to(self.dtype))

    def finish(self, batch: Batch, loss: int) -> None:
        """Add what is left of the batch."""
        for name, rows in self._batch.items():
            self._add(name, rows)
        self._batch.clear()

    def _add(self, name: str, rows: torch.Tensor) -> None:
        if name not in self.first:
            self.first[name] = rows.new_zeros(self.groups, *rows.shape[1:])
            self.second[name] = torch.zeros_like(self.first[name])
        for i, row in enumerate(rows):  # while they are in the cache
            g = (self._start + i) * self.groups // self.samples
            self.first[name][g] += row
            self.second[name][g].addcmul_(row, row)

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        """Add sums and squares up."""
        group.reduce([table[n] for table in (self.first, self.second) for n in names if n in table])

    def finalize(self, names: Sequence[str]) -> bool:
        """Sweep the blocks that are whole."""
        for name in names:
            if name not in self.place:
                continue
            k = self.place[name]
            if name in self.second:
                d = self.second[name].sum(0)
                self.largest[k] = max(self.largest[k], float(d.max()) / self.total)
                self.mean[k] += float(d.sum(dtype=torch.float64)) / self.total / self.blocks[k].numel
            self.waiting[k] -= 1
            if self.local and not self.waiting[k]:
                own = slice(k, k + 1)
                tau = common.resolve_damping(self.damping, self.unit, self.largest[own], self.mean[own])[1]
                self._sweep(k, tau[:, 0])
        return False

    def _sweep(self, k: int, tau: np.ndarray) -> None:
        found = np.zeros((2 + self.groups, len(tau)))
        for name in [m.name for m in self.blocks[k].modules if m.name in self.first]:
            found += _sweep(self.first.pop(name).flatten(1), self.second.pop(name).flatten(1), self.tokens, tau)
        self.swept[k] = found

    def settled(self) -> tuple[tuple[float, ...], np.ndarray]:
        """Dampings, recorded and absolute; sweeps what waited for them."""
        values, tau = common.resolve_damping(self.damping, self.unit, self.largest, self.mean)
        for k in range(len(self.blocks)):
            if k not in self.swept:
                self._sweep(k, tau[:, k])
        return values, tau


def score_diagonal(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    groups: int = 4,
    walk: str = "auto",
) -> Scores:
    """Gain under the diagonal empirical Fisher, ``sum_p g_p^2 / (D_p + tau)``.

    The noise floor is exact, ``(1/N) sum_p D_p/(D_p + tau)`` (random signs of the sequences' gradients), the standard error a
    jackknife over ``groups`` groups of sequences. Memory: ``2 * groups`` times the blocks' parameters in the ``whole`` graph,
    one layer's by ``layers`` (``walk``; ``auto`` takes the whole graph where it fits).

    Raises:
        CoverageError: A weight matrix was never seen.
        InvalidInput: A damping or batch size outside its domain.
    """
    common.check_damping(damping, damping_unit)
    common.check_inputs(data, batch_size)
    groups = max(1, min(groups, data.samples))
    dtype, _ = real_type(model)
    sums = _Diagonal(blocks, dtype, groups, token_counts(model, data), damping, damping_unit)
    tick = Steps(progress, data.samples)
    total = feed(model, data, blocks, sums, batch_size=batch_size, walk=walk, tick=tick).loss
    values, tau = sums.settled()
    gain, floor, error = (np.zeros_like(tau) for _ in range(3))
    for k in range(len(blocks)):
        found = sums.swept[k]
        gain[:, k], floor[:, k] = found[0], found[1] / sums.total
        error[:, k] = np.sqrt((groups - 1) * np.var(found[2:], axis=0)) if groups > 1 else np.nan
    extra = {
        "curvature": "diagonal empirical Fisher",
        "tokens": int(sums.total),
        "mean_loss": total / sums.total,
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": sums.largest.tolist(),
        "mean_eigenvalue": sums.mean.tolist(),
        "excess": (gain - floor).tolist(),
    }
    return common.record(
        model, data, blocks, "fisher-diagonal", gain=gain.tolist(), damping=values, damping_unit=damping_unit,
        standard_error=error.tolist(), noise_floor=floor.tolist(), extra=extra,
    )  # fmt: skip


def _sweep(first: torch.Tensor, second: torch.Tensor, tokens: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Sums over the entries of one matrix at every damping, in one walk over pieces that stay in the cache.

    Args:
        first: ``(groups, P)`` sums of the gradients over the sequences of a group.
        second: ``(groups, P)`` sums of their squares.
        tokens: ``(groups,)`` target tokens.
        tau: ``(D,)`` absolute dampings.

    Returns:
        ``(2 + groups, D)``: ``sum g^2/(D+tau)``, ``sum D/(D+tau)``, and the first again with one group left out at a time.
    """
    groups, n = len(first), float(tokens.sum())
    out = np.zeros((2 + groups, len(tau)))
    for start in range(0, first.shape[1], _PIECE):
        f, s = first[:, start : start + _PIECE], second[:, start : start + _PIECE]
        f_all, s_all = f.sum(0), s.sum(0)
        for row in (0, *range(2, 2 + groups)):
            left = f_all if row == 0 else f_all - f[row - 2]
            squares = s_all if row == 0 else s_all - s[row - 2]
            m = n if row == 0 else max(n - float(tokens[row - 2]), 1.0)
            g, d = (left / m).square_(), squares / m
            for i, t in enumerate(tau):
                inverse = (d + float(t)).reciprocal_()
                out[row, i] += float(torch.dot(g, inverse))
                if row == 0:
                    out[1, i] += float(torch.dot(d, inverse))
    return out
