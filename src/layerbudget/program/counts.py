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
        solution: What :func:`layerbudget.program.sparsify` returned.
        group: M of N:M.

    Returns:
        ``(n, gap)``: N per block, shape ``(K,)``, with ``sum n_k N_k / M >= S``, and the proven relative gap of the penalty.

    Raises:
        InfeasibleBudget: No pattern within the caps prunes enough.

    >>> from layerbudget.program import sparsify
    >>> round_pattern(sparsify([1.0, 4.0], [100, 100], sparsity=0.5, max_sparsity=1.0), 4)[0].tolist()
    [3, 1]
    """
    p, m = solution.program, int(number(group, "group", positive=True))
    top = np.floor(p.high * m + 1e-9).astype(np.int64)
    low = np.minimum(np.ceil(p.low * m - 1e-9).astype(np.int64), top)
    spare = float(np.dot(p.amount, top)) / m - p.target
    if spare < -1e-9 * p.target:
        raise InfeasibleBudget(
            f"With caps rounded down to multiples of 1/{m}, {spare + p.target:g} parameters can go; {p.target:g} should.",
            f"At most {spare + p.target:g}.",
            "Raise max_sparsity to a multiple of the pattern, or use a longer pattern.",
        )
    levels = np.arange(1, m + 1)
    penalty = np.array([p.scale * p.function.value(np.full(top.size, v / m)) for v in range(m + 1)]).T
    usable = (levels[None, :] > low[:, None]) & (levels[None, :] <= top[:, None])
    owner = np.nonzero(usable)[0]
    saved, cost = np.diff(penalty, axis=1)[usable], (p.amount / m)[owner]
    take, bound, _, _, _ = knapsack(saved, cost, max(spare, 0.0) + 1e-9 * p.target)
    counts = top - np.bincount(owner[take], minlength=top.size)
    rows = np.arange(top.size)
    value = float(penalty[rows, counts].sum())
    least = float(penalty[rows, top].sum()) - bound
    return counts, max(value - least, 0.0) / value if value > 0 else 0.0
