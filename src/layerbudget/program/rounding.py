"""Integers under a budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .inputs import Vector


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
