r"""Few distinct levels for many values: the nearest step function with at most N steps, means kept.

    minimise   sum_k n_k (rho_k - c_{s(k)})^2     over  N levels c and an assignment s.

In one dimension the groups of an optimum are intervals of the sorted values and a level is the weighted mean of its group, so
``sum n_k c_{s(k)} = sum n_k rho_k``: what the plan spends stays. Dynamic programming finds the optimum exactly, in
``O(N K^2)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from .inputs import Vector


def few_levels(values: ArrayLike, weights: ArrayLike, levels: int) -> Vector:
    """Replace values by at most so many distinct ones, with the same weighted sum.

    Args:
        values: Shape ``(K,)``.
        weights: Shape ``(K,)``, positive.
        levels: How many.

    Returns:
        The level of every value, shape ``(K,)``.

    Raises:
        InvalidInput: Fewer than one level.

    >>> few_levels([0.1, 0.5, 0.2, 0.6], [1, 1, 1, 1], 2).round(6).tolist()
    [0.15, 0.55, 0.15, 0.55]
    """
    v, n = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if levels < 1:
        raise InvalidInput(f"{levels} levels are asked for.", "At least one is needed.", "Ask for 3.")
    order = np.argsort(v, kind="stable")
    x, w = v[order], n[order]
    size, count = len(x), min(int(levels), len(np.unique(x)))
    mass, first, second = (np.concatenate([[0.0], np.cumsum(w * x**p)]) for p in (0, 1, 2))

    def spread(i: np.ndarray, j: int) -> Vector:
        """Squared distance of ``x[i:j]`` from its mean, for every start i."""
        return np.maximum(second[j] - second[i] - (first[j] - first[i]) ** 2 / (mass[j] - mass[i]), 0.0)

    best = np.full((count + 1, size + 1), np.inf)
    cut = np.zeros((count + 1, size + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for j in range(k, size + 1):
            starts = np.arange(k - 1, j)
            found = best[k - 1, starts] + spread(starts, j)
            cut[k, j] = starts[int(np.argmin(found))]
            best[k, j] = found.min()
    result, end = np.empty(size), size
    for k in range(count, 0, -1):
        start = int(cut[k, end])
        result[order[start:end]] = (first[end] - first[start]) / (mass[end] - mass[start])
        end = start
    return result
