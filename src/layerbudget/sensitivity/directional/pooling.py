r"""Predicted damages of one matrix in several formats, made steadier by what they share. No torch.

Draws of labels are noise, and nearly independent along the rounding errors of different formats: a plan picks what is small by
chance. But rounding errors of one matrix are nearly random directions of the same space, so its damage per squared error is
nearly the same number in every format:

    log d_ij  =  log ||Delta_ij||^2 + level_i + format_j + rest_ij.

The additive part is fitted by least squares; of the rest, which is noise and what is peculiar to a format, the share
``w = max(0, 1 - noise / scatter)`` is kept (empirical Bayes: noise from the standard errors, scatter as it is found).
"""

from __future__ import annotations

import numpy as np

_SWEEPS = 50


def pooled(damage: np.ndarray, error: np.ndarray, norm: np.ndarray) -> tuple[np.ndarray, float]:
    """Steadier damages.

    Args:
        damage: Nats per token, ``(K, m)``; infinite or zero entries stay as they are.
        error: Standard errors.
        norm: ``||Delta_ij||^2``.

    Returns:
        Damages, ``(K, m)``, and the share ``w`` that was kept of what the formats do not share.
    """
    there = np.isfinite(damage) & (damage > 0) & (norm > 0)
    rows, columns = there.any(1).sum(), there.any(0).sum()
    free = int(there.sum() - rows - columns + 1)
    if free < 1:
        return damage, 1.0
    safe = np.where(there, damage, 1.0)
    log = np.where(there, np.log(safe / np.where(there, norm, 1.0)), 0.0)
    rest = _rest(log, there)
    scatter = float((rest[there] ** 2).sum() / free)
    noise = float(np.mean((error[there] / damage[there]) ** 2))
    kept = max(0.0, 1.0 - noise / scatter) if scatter > 0 else 1.0
    return np.where(there, safe * np.exp((kept - 1.0) * rest), damage), kept


def _rest(log: np.ndarray, there: np.ndarray) -> np.ndarray:
    """What rows and columns leave of a table with gaps (alternating means)."""
    rest = np.where(there, log, 0.0)
    for _ in range(_SWEEPS):
        for axis in (1, 0):
            mean = rest.sum(axis, keepdims=True) / np.maximum(there.sum(axis, keepdims=True), 1)
            rest = np.where(there, rest - mean, 0.0)
    return rest
