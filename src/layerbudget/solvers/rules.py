"""The baselines as rules: from layer values to sparsities or expert counts, vectors in, vectors out.

Each function writes down one published rule. ``parity=True`` keeps the original's behaviour where ours differs (no clamp,
no minimum, its repair loop); the default clamps to the caps and redistributes what was cut off, so that the budget is met.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DegenerateScores, InfeasibleBudget, InvalidInput
from .dual import piecewise_root
from .inputs import Vector, bound_vector, cost_vector, number


def uniform_sparsity(
    numel: ArrayLike, sparsity: float, *, max_sparsity: ArrayLike = 1.0, min_sparsity: ArrayLike = 0.0
) -> Vector:
    """Return the same sparsity everywhere, as far as caps and floors allow, shape ``(K,)``."""
    n = cost_vector(numel, np.size(numel), "numel")
    return _scaled(np.ones(n.size), n, sparsity, min_sparsity, max_sparsity)


def size_sparsity(numel: ArrayLike, sparsity: float, *, max_sparsity: ArrayLike = 1.0, min_sparsity: ArrayLike = 0.0) -> Vector:
    """Return sparsities in proportion to a block's size (large blocks are pruned more), clamped and redistributed."""
    n = cost_vector(numel, np.size(numel), "numel")
    return _scaled(n / n.mean(), n, sparsity, min_sparsity, max_sparsity)


def stretched_sparsity(
    metric: ArrayLike,
    numel: ArrayLike,
    sparsity: float,
    *,
    width: float = 0.3,
    max_sparsity: ArrayLike = 1.0,
    min_sparsity: ArrayLike = 0.0,
    parity: bool = False,
) -> Vector:
    r"""Return the map of AlphaPruning and LayerIF: the metric stretched to ``[1 - width, 1 + width]``, rescaled to the budget.

    ``r = (m - min m) / (max m - min m) 2 width + (1 - width)``, ``rho = r s sum(n) / sum(n r)``. A larger metric means more
    pruning; a flat one gives the uniform plan (the originals divide 0 by 0). The published scripts use widths of 0.1 to 0.3.
    ``parity`` leaves ratios above the cap as they are, as AlphaPruning does (LayerIF cuts at 0.99 without redistributing).

    >>> stretched_sparsity([0.0, 1.0], [10, 10], 0.5, width=0.1)
    array([0.45, 0.55])
    """
    m, n = _finite(metric), cost_vector(numel, np.size(metric), "numel")
    spread = m.max() - m.min()
    r = (m - m.min()) / spread * 2.0 * number(width, "width") + (1.0 - width) if spread > 0 else np.ones(m.size)
    if parity:
        return r * sparsity * n.sum() / float(np.dot(n, r))
    return _scaled(np.maximum(r, 0.0), n, sparsity, min_sparsity, max_sparsity)


def owl_sparsity(
    outliers: ArrayLike,
    numel: ArrayLike,
    sparsity: float,
    *,
    width: float = 0.08,
    max_sparsity: ArrayLike = 1.0,
    min_sparsity: ArrayLike = 0.0,
    parity: bool = False,
) -> Vector:
    r"""Return the map of OWL: ``d = (o - min o) / (max o - min o) 2 width``, ``rho = s + mean(d) - d``.

    More outliers, fewer zeros. The original's mean is over blocks, not parameters, and only a floor of 0.01 is applied
    (``parity``); ours shifts all ratios by one number until the parameter-weighted budget is met under the caps.

    >>> owl_sparsity([1.0, 3.0], [10, 10], 0.5).round(2)
    array([0.58, 0.42])
    """
    o, n = _finite(outliers), cost_vector(numel, np.size(outliers), "numel")
    spread = o.max() - o.min()
    d = (o - o.min()) / spread * 2.0 * number(width, "width") if spread > 0 else np.zeros(o.size)
    rho = sparsity + d.mean() - d
    if parity:
        return np.where(rho <= 0.0, 0.01, rho)
    low, high = _caps(min_sparsity, max_sparsity, n, sparsity)
    t, _, _ = piecewise_root(n, n * rho, n * low, n * high, sparsity * float(n.sum()))
    return np.minimum(np.maximum(rho + t, low), high)


def layerif_experts(values: ArrayLike, total: int, *, exponent: float = 2.0) -> np.ndarray:
    r"""Return LayerIF's expert heuristic: one expert each, the rest in proportion to ``(max v - v)^p``.

    ``v`` is the summed influence (negative = helpful), p is 2 for all influences and 3 for positive ones in published runs.
    The fraction's floor is taken and the remainder goes to the largest fractional parts, the later block first on ties.

    Raises:
        InfeasibleBudget: Fewer experts than blocks.

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


def alphalora_experts(alpha: ArrayLike, total: int, *, exponent: float = 2.5, parity: bool = False) -> np.ndarray:
    r"""Return AlphaLoRA's experts, in proportion to ``alpha^exponent``: a larger tail exponent earns more.

    At least one each, the rest by largest remainder. ``parity`` is the original: round to even, no minimum of one, and a repair
    loop that compares raw powers with counts, so that the smallest alpha receives what is missing.

    Raises:
        InfeasibleBudget: Fewer experts than blocks (not under parity).
        InvalidInput: A negative exponent.

    >>> alphalora_experts([2.0, 4.0, 4.0], 9, exponent=1.0).tolist()
    [2, 4, 3]
    """
    values = _finite(alpha)
    if values.min() < 0.0:
        raise InvalidInput(f"An exponent is {values.min():g}.", "They are zero or more.", "Score with spectral-tail.")
    scaled = values**exponent
    if parity:
        counts = np.round(scaled / scaled.sum() * total).astype(np.int64)
        while counts.sum() != total:
            short = counts.sum() < total
            counts[np.argmin(scaled - counts) if short else np.argmax(scaled - counts)] += 1 if short else -1
        return counts
    return apportion(scaled, total)


def mola_experts(layers: int, shape: str | tuple[int, ...] = "2468", total: int | None = None) -> np.ndarray:
    """Return MoLA's shapes for any depth: the digits are experts per group of neighbouring layers, in order of depth.

    Where the depth does not divide, earlier groups are one layer longer. With a total, counts are rescaled to it (largest
    remainder, at least one each).

    Raises:
        InvalidInput: Not a shape, or fewer layers than groups.
        InfeasibleBudget: Fewer experts than layers.

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
    if total < size * minimum:
        raise InfeasibleBudget(
            f"{total} experts cannot give {minimum} to each of {size} blocks.",
            f"At least {size * minimum} are needed.",
            "Raise the total or lower the minimum.",
        )


def _caps(low: ArrayLike, high: ArrayLike, n: Vector, sparsity: float) -> tuple[Vector, Vector]:
    a, b = bound_vector(low, n.size, "min_sparsity", 0.0), bound_vector(high, n.size, "max_sparsity", 1.0)
    least, most = float(np.dot(n, a) / n.sum()), float(np.dot(n, b) / n.sum())
    if not least - 1e-12 <= sparsity <= most + 1e-12:
        raise InfeasibleBudget(
            f"The global sparsity {sparsity:g} does not fit the caps.",
            f"It must lie in [{least:.4g}, {most:.4g}].",
            f"Raise max_sparsity to at least {sparsity:g}, or prune less.",
        )
    return a, b


def _scaled(r: Vector, n: Vector, sparsity: float, low: ArrayLike, high: ArrayLike) -> Vector:
    """``clip(t r, low, high)`` with t such that the parameter-weighted mean is ``sparsity``."""
    a, b = _caps(low, high, n, sparsity)
    r = np.maximum(r, 1e-12 * r.max())
    t, _, _ = piecewise_root(n * r, np.zeros(n.size), n * a, n * b, sparsity * float(n.sum()))
    return np.minimum(np.maximum(t * r, a), b)
