"""Published rules for experts: from layer values to whole numbers that sum to a total."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DegenerateScores, InfeasibleBudget, InvalidInput
from .dual import piecewise_root
from .inputs import Vector, whole_number


def layerif_experts(values: ArrayLike, total: int, *, exponent: float = 2.0) -> np.ndarray:
    r"""Return LayerIF's expert heuristic: one expert each, the rest in proportion to ``(max v - v)^p``.

    ``v`` is the summed influence (negative = helpful), p is 2 for all influences and 3 for positive ones in published runs.
    The fraction's floor is taken and the remainder goes to the largest fractional parts, the later block first on ties.

    >>> layerif_experts([-3.0, -1.0, 0.0], 8).tolist()
    [6, 1, 1]
    """
    v = _finite(values)
    _enough(total, v.size)
    inverse = v.max() - v
    inverse = inverse / inverse.max() if inverse.max() > 0 else np.ones(v.size)
    share = inverse**exponent
    fraction = share / share.sum() * (total - v.size)
    counts = np.floor(fraction).astype(np.int64) + 1
    order = np.lexsort((-np.arange(v.size), -(fraction - np.floor(fraction))))
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def alphalora_experts(alpha: ArrayLike, total: int, *, exponent: float = 2.5) -> np.ndarray:
    r"""Return AlphaLoRA's experts, in proportion to ``alpha^exponent``: a larger tail exponent earns more.

    At least one each, the rest by largest remainder. (The original has no minimum, and gives what is missing to the smallest.)

    >>> alphalora_experts([2.0, 4.0, 4.0], 9, exponent=1.0).tolist()
    [2, 4, 3]
    """
    values = _finite(alpha)
    if values.min() < 0.0:
        raise InvalidInput(f"An exponent is {values.min():g}.", "They are zero or more.", "Score with spectral-tail.")
    return apportion(values**exponent, total)


def mola_experts(layers: int, shape: str | tuple[int, ...] = "2468", total: int | None = None) -> np.ndarray:
    """Return MoLA's shapes for any depth: the digits are experts per group of neighbouring layers, in order of depth.

    Where the depth does not divide, earlier groups are one layer longer. With a total, counts are rescaled to it (largest
    remainder, at least one each).

    >>> mola_experts(8, "2468").tolist()
    [2, 2, 4, 4, 6, 6, 8, 8]
    """
    digits = tuple(int(d) for d in shape) if isinstance(shape, str) and shape.isdigit() else shape
    if isinstance(digits, str) or not digits or any(d < 1 for d in digits) or len(digits) > layers:
        raise InvalidInput(
            f"The MoLA shape {shape!r} does not fit {layers} layers.",
            "It has one count >= 1 per group, and no more groups than layers.",
            "Use '2468' or '5555' from four layers on, else uniform.",
        )
    groups = np.array_split(np.arange(layers), len(digits))
    counts = np.concatenate([np.full(len(g), d) for g, d in zip(groups, digits, strict=True)])
    return counts.astype(np.int64) if total is None else apportion(counts, total)


def apportion(share: ArrayLike, total: int, *, minimum: int = 1) -> np.ndarray:
    """Return integers in proportion to ``share`` that sum to ``total``: a minimum each, then largest remainders.

    >>> apportion([1.0, 1.0, 2.0], 8).tolist()
    [2, 2, 4]
    """
    s = np.maximum(_finite(share), 0.0)
    _enough(total, s.size, minimum)
    if not s.sum() > 0:
        raise DegenerateScores(f"All {s.size} shares are zero.", "At least one must be positive.", "Use rule='uniform'.")
    s = np.maximum(s / s.max(), 1e-300)
    floor, cap = np.full(s.size, float(minimum)), np.full(s.size, np.inf)
    t, _, _ = piecewise_root(s, np.zeros(s.size), floor, cap, float(total))
    ideal = np.maximum(s * t, minimum)
    counts = np.floor(ideal + 1e-9).astype(np.int64)
    order = np.argsort(-(ideal - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def _finite(values: ArrayLike) -> Vector:
    v = np.array(values, dtype=np.float64)
    if v.ndim != 1 or v.size == 0 or not np.isfinite(v).all():
        raise InvalidInput(f"The values {v.tolist() if v.size < 9 else v.shape} are not a finite vector.", "", "Score again.")
    return v


def _enough(total: int, size: int, minimum: int = 1) -> None:
    whole_number(total, "total")
    if total < size * minimum:
        raise InfeasibleBudget(
            f"{total} experts cannot give {minimum} to each of {size} blocks.",
            f"At least {size * minimum} are needed.",
            "Raise the total or lower the minimum.",
        )
