"""Diagonal Fisher: ``C = diag(D)``, ``D_p = (1/N) sum_i s_ip^2``, exact per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ...records import Block
from ...running.loss import Data
from ...running.sites import Collector, Site
from ..record import Scores
from . import common
from .gram import token_counts

_PIECE = 1 << 15  # entries: what a sweep reads again and again fits into the second-level cache


class _Sums:
    """Sums of gradients and of their squares by weight matrix, in a few groups of sequences."""

    def __init__(self, dtype: torch.dtype, groups: int, samples: int) -> None:
        self.dtype, self.groups, self.samples = dtype, groups, samples
        self.first: dict[str, torch.Tensor] = {}
        self.second: dict[str, torch.Tensor] = {}
        self.start = 0
        self.open: dict[str, int] = {}
        self._batch: dict[str, torch.Tensor] = {}

    def __call__(self, site: Site) -> None:
        a = site.a.to(self.dtype)
        for name in site.names:
            b = site.b[name].to(self.dtype)
            rows = torch.bmm(b.transpose(1, 2), a)
            rows = self._batch.pop(name) + rows if name in self._batch else rows
            if self.open.get(name, 0) > 0:
                self._batch[name] = rows
            else:
                self._add(name, rows)

    def direct(self, name: str, grad: torch.Tensor | None) -> None:
        """Take the gradient of a directly read parameter (one sequence per batch)."""
        if grad is not None:
            self._batch[name] = grad[None].to(self.dtype)

    def finish(self, size: int) -> None:
        """Add what is left of the batch and move on."""
        for name, rows in self._batch.items():
            self._add(name, rows)
        self._batch.clear()
        self.start += size

    def _add(self, name: str, rows: torch.Tensor) -> None:
        if name not in self.first:
            self.first[name] = rows.new_zeros(self.groups, *rows.shape[1:])
            self.second[name] = torch.zeros_like(self.first[name])
        for i, row in enumerate(rows):  # while they are in the cache
            g = (self.start + i) * self.groups // self.samples
            self.first[name][g] += row
            self.second[name][g].addcmul_(row, row)


def score_diagonal(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: float | Sequence[float] | None = None,
    damping_unit: str = "max",
    batch_size: int = 8,
    progress: common.Progress | None = None,
    groups: int = 4,
) -> Scores:
    """Gain under the diagonal empirical Fisher, ``sum_p g_p^2 / (D_p + tau)``.

    The noise floor is exact, ``(1/N) sum_p D_p/(D_p + tau)`` (random signs of the sequences' gradients), the standard error a
    jackknife over ``groups`` groups of sequences. Memory: ``2 * groups`` times the blocks' parameters.

    Raises:
        CoverageError: A weight matrix was never seen.
        InvalidInput: A damping or batch size outside its domain.
    """
    common.check_damping(damping, damping_unit)
    common.check_inputs(data, batch_size)
    groups = max(1, min(groups, data.samples))
    tick = common.Ticker(progress, data.samples)
    dtype = torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
    sums = _Sums(dtype, groups, data.samples)
    total = 0.0
    with Collector(model, blocks, sums) as collector:
        sums.open = collector.open
        for batch, logits in common.walk(model, data, collector, batch_size, tick):
            total += common.backward(collector, batch, logits, batch.targets)
            for name, p in collector.direct.items():
                sums.direct(name, p.grad)
            sums.finish(batch.size)
        collector.check_coverage()
    return _record(model, data, blocks, sums, token_counts(model, data), damping, damping_unit, total)


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


def _record(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    sums: _Sums,
    counts: np.ndarray,
    damping: float | Sequence[float] | None,
    damping_unit: str,
    total: float,
) -> Scores:
    n = float(counts.sum())
    owner = np.arange(data.samples) * sums.groups // data.samples
    group_tokens = np.array([counts[owner == g].sum() for g in range(sums.groups)])
    matrices = [[m.name for m in b.modules if m.name in sums.first] for b in blocks]
    totals = [[sums.second[name].sum(0) for name in names] for names in matrices]
    largest = np.array([max((float(d.max()) for d in each), default=0.0) for each in totals]) / n
    mean = np.array([sum(float(d.sum(dtype=torch.float64)) for d in each) for each in totals]) / n
    mean /= np.array([b.numel for b in blocks])
    del totals
    values, tau = common.resolve_damping(damping, damping_unit, largest, mean)
    gain, floor, error = (np.zeros_like(tau) for _ in range(3))
    for k, names in enumerate(matrices):
        found = np.zeros((2 + sums.groups, len(tau)))
        for x in names:
            found += _sweep(sums.first[x].flatten(1), sums.second[x].flatten(1), group_tokens, tau[:, k])
        gain[:, k], floor[:, k] = found[0], found[1] / n
        error[:, k] = np.sqrt((sums.groups - 1) * np.var(found[2:], axis=0)) if sums.groups > 1 else np.nan
    extra = {
        "curvature": "diagonal empirical Fisher",
        "tokens": int(n),
        "mean_loss": total / n,
        "absolute_damping": tau.tolist(),
        "largest_eigenvalue": largest.tolist(),
        "mean_eigenvalue": mean.tolist(),
        "excess": (gain - floor).tolist(),
    }
    return common.record(
        model, data, blocks, "fisher-diagonal", gain=gain.tolist(), damping=values, damping_unit=damping_unit,
        standard_error=error.tolist(), noise_floor=floor.tolist(), extra=extra,
    )  # fmt: skip
