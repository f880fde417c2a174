"""Diagonal Fisher: ``C = diag(D)``, ``D_p = (1/N) sum_i s_ip^2``, exact per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ...records import Block
from ..hooks import Collector, Site
from ..loss import Data
from ..record import Scores
from . import common
from .gram import token_counts


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
    seed: int = 0,
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
    return _record(model, data, blocks, sums, token_counts(model, data), damping, damping_unit, seed, total)


def _jackknife(first: torch.Tensor, second: torch.Tensor, tokens: np.ndarray, tau: float) -> float:
    """Delete-a-group standard error of the diagonal gain."""
    if len(first) < 2:
        return float("nan")
    left_out = []
    for j in range(len(first)):
        m = float(tokens.sum() - tokens[j])
        g, d = (first.sum(0) - first[j]) / m, (second.sum(0) - second[j]) / m
        left_out.append(float((g * g / (d + tau)).sum()))
    return float(np.sqrt((len(left_out) - 1) * np.var(left_out)))


def _record(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    sums: _Sums,
    counts: np.ndarray,
    damping: float | Sequence[float] | None,
    damping_unit: str,
    seed: int,
    total: float,
) -> Scores:
    n = float(counts.sum())
    owner = np.arange(data.samples) * sums.groups // data.samples
    group_tokens = np.array([counts[owner == g].sum() for g in range(sums.groups)])
    flat = [
        (
            torch.cat([sums.first[m.name].flatten(1) for m in b.modules if m.name in sums.first], 1).double(),
            torch.cat([sums.second[m.name].flatten(1) for m in b.modules if m.name in sums.first], 1).double(),
        )
        for b in blocks
    ]
    diagonals = [second.sum(0) / n for _, second in flat]
    largest = np.array([float(d.max()) for d in diagonals])
    mean = np.array([float(d.sum()) for d in diagonals]) / np.array([b.numel for b in blocks])
    values, tau = common.resolve_damping(damping, damping_unit, largest, mean)
    gain, floor, error = (np.zeros_like(tau) for _ in range(3))
    for k, (first, second) in enumerate(flat):
        g = first.sum(0) / n
        for i, t in enumerate(tau[:, k]):
            gain[i, k] = float((g * g / (diagonals[k] + t)).sum())
            floor[i, k] = float((diagonals[k] / (diagonals[k] + t)).sum() / n)
            error[i, k] = _jackknife(first, second, group_tokens, float(t))
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
        standard_error=error.tolist(), noise_floor=floor.tolist(), seed=seed, extra=extra,
    )  # fmt: skip
