"""Whole numbers of pruned parameters, and N:M patterns."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget
from .inputs import Vector, number
from .knapsack import knapsack
from .solution import Solution


def round_parameters(values: ArrayLike, numel: ArrayLike, total: int, caps: ArrayLike = 1.0) -> np.ndarray:
    """Whole numbers of pruned parameters per block that sum to ``total``, each within one of ``values * numel``.

    Args:
        values: Sparsity per block, shape ``(K,)``.
        numel: Prunable parameters per block.
        total: Sum of the counts.
        caps: Largest sparsity per block; no count exceeds ``floor(caps * numel)`` unless the total demands it.

    Returns:
        Counts, shape ``(K,)``, int64.

    >>> round_parameters([0.25, 0.5, 0.5], [3, 3, 3], 4).tolist()
    [1, 2, 1]
    """
    n = np.asarray(numel, dtype=np.int64)
    ideal = np.asarray(values, dtype=np.float64) * n
    top = np.minimum(np.floor(np.asarray(caps, dtype=np.float64) * n * (1 + 1e-15)).astype(np.int64), n)
    counts = np.clip(np.floor(ideal).astype(np.int64), 0, top)
    while (missing := int(total) - int(counts.sum())) != 0:
        rest: Vector = ideal - counts
        step = 1 if missing > 0 else -1
        able = counts < (top if (counts < top).any() else n) if step > 0 else counts > 0
        order = np.argsort(-rest if step > 0 else rest, kind="stable")
        order = order[able[order]]
        if not order.size:
            break
        each, extra = divmod(abs(missing), order.size)
        room = (np.where(counts < top, top, n) - counts if step > 0 else counts)[order]
        counts[order] += step * np.minimum(np.where(np.arange(order.size) < extra, each + 1, each), room)
    return counts


def round_pattern(solution: Solution, group: int) -> tuple[np.ndarray, float]:
    """N:M patterns: how many of every ``group`` weights each block loses, at the least penalty that reaches the budget.

    Args:
        solution: What :func:`layerbudget.solvers.sparsify` returned.
        group: M of N:M.

    Returns:
        ``(n, gap)``: N per block, shape ``(K,)``, with ``sum n_k N_k / M >= S``, and the proven relative gap of the penalty.

    Raises:
        InfeasibleBudget: No pattern within the caps prunes enough.

    >>> from layerbudget.solvers import sparsify
    >>> round_pattern(sparsify([1.0, 4.0], [100, 100], sparsity=0.5, max_sparsity=1.0), 4)[0].tolist()
    [3, 1]
    """
    m = int(number(group, "group", positive=True))
    return round_units(solution, np.full(solution.value.size, m), f"multiples of 1/{m}")


def round_units(solution: Solution, units: ArrayLike, what: str = "whole units") -> tuple[np.ndarray, float]:
    """Whole units per block (heads, channels, n of n:m), at the least penalty that reaches the budget.

    A knapsack of the units that are put back, from every block at its cap: the penalty is convex, so the first unit put back
    relieves most, and any choice of increments is a choice of counts.

    Args:
        solution: What :func:`layerbudget.solvers.sparsify` returned.
        units: How many units the whole block k is, shape ``(K,)``; one of them is ``amount_k / units_k``.
        what: The units in the message of the error.

    Returns:
        ``(counts, gap)``: units that go, shape ``(K,)``, with ``sum amount_k counts_k / units_k >= S``, and the proven relative
        gap of the penalty.

    Raises:
        InfeasibleBudget: No counts within the caps reach the budget.

    >>> from layerbudget.solvers import sparsify
    >>> round_units(sparsify([1.0, 4.0], [100, 60], sparsity=0.5, max_sparsity=1.0), [10, 3])[0].tolist()
    [8, 0]
    """
    p, m = solution.program, np.asarray(units, dtype=np.int64)
    top = np.floor(p.high * m + 1e-9).astype(np.int64)
    low = np.minimum(np.ceil(p.low * m - 1e-9).astype(np.int64), top)
    each = p.amount / m
    spare = float(np.dot(each, top)) - p.target
    if spare < -1e-9 * p.target:
        raise InfeasibleBudget(
            f"With caps rounded down to {what}, {spare + p.target:g} can go; {p.target:g} should.",
            f"At most {spare + p.target:g}.",
            "Raise the caps to whole units, or use smaller units.",
        )
    levels = np.arange(1, int(top.max()) + 1)
    penalty = np.array([p.scale * p.function.value(np.minimum(v, top) / m) for v in range(levels.size + 1)]).T
    usable = (levels[None, :] > low[:, None]) & (levels[None, :] <= top[:, None])
    owner = np.nonzero(usable)[0]
    saved, cost = np.diff(penalty, axis=1)[usable], each[owner]
    take, bound, _, _, _ = knapsack(saved, cost, max(spare, 0.0) + 1e-9 * p.target)
    counts = top - np.bincount(owner[take], minlength=top.size)
    value = float(penalty[np.arange(top.size), counts].sum())
    least = float(penalty[np.arange(top.size), top].sum()) - bound
    return counts, max(value - least, 0.0) / value if value > 0 else 0.0
