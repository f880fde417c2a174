r"""One monotone equation in one dual variable, solved exactly.

Both programs of the paper (and every separable program with one budget) lead to

    S(t) = sum_k clip(a_k t + b_k, l_k, h_k) = B,      a_k > 0,

a continuous, nondecreasing, piecewise linear function of one number ``t``. On the right piece its root is one division,
so there is no tolerance and no iteration cap:

- few blocks: evaluate S at all 2K knots at once (K x 2K numbers), take the piece that brackets B, divide;
- many blocks: walk over the pieces with Newton steps, safeguarded by the median knot of the remaining bracket, which halves
  the number of knots left: O(log K) passes over the data.

Sums are of nonnegative terms taken afresh at every t, never differences of prefix sums, so weights may span
1e-300..1e300. The paper (section 3.2) bisects to a tolerance instead.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from .inputs import Vector

_Part: TypeAlias = "tuple[Vector, Vector | None, Vector | None, Vector | None, Vector, Vector]"
DENSE = 48
CHUNK = 8192
_EPS = 2.220446049250313e-16
_STEP = 2.0**-40  # well inside a flat stretch that has no other end


def _is_constant(v: Vector, value: float) -> bool:
    """Return whether a vector is known (by its zero stride) to hold ``value`` everywhere."""
    return v.strides == (0,) and float(v[0]) == value


def piecewise_root(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float) -> tuple[float, float, float]:
    """Solve ``sum clip(slope t + offset, low, high) = target`` for ``t``.

    Args:
        slope: Positive slopes, shape ``(K,)``.
        offset: Offsets, shape ``(K,)``.
        low: Lower clips, finite.
        high: Upper clips, ``inf`` allowed.
        target: A value between ``sum(low)`` and ``sum(high)``; outside it the nearest end is returned.

    Returns:
        ``(t, t_low, t_high)``: a root and the interval of all roots (one point unless S has a plateau at the target).

    >>> import numpy as np
    >>> piecewise_root(np.array([1.0, 3.0]), np.array([-1.0, -1.0]), np.zeros(2), np.full(2, 9.0), 2.0)
    (1.0, 1.0, 1.0)
    """
    with np.errstate(all="ignore"):
        return _search(slope, offset, low, high, target)


def _search(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float) -> tuple[float, float, float]:
    """:func:`piecewise_root` under the caller's ``np.errstate``."""
    floor = 0.0 if _is_constant(low, 0.0) else float(np.add.reduce(low))
    if target <= floor * (1.0 + 4.0 * _EPS):
        first = float(np.minimum.reduce((low - offset) / slope))
        return first - abs(first) * _STEP, -math.inf, first
    if not _is_constant(high, math.inf) and target >= float(np.add.reduce(high)) * (1.0 - 4.0 * _EPS):
        last = float(np.maximum.reduce((high - offset) / slope))
        return last + abs(last) * _STEP, last, math.inf
    return (_dense if slope.size <= DENSE else _walk)(slope, offset, low, high, target)


def _dense(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float) -> tuple[float, float, float]:
    flat, capped, lowest = _is_constant(offset, 0.0), not _is_constant(high, math.inf), -math.inf
    lower_knots = low if flat and _is_constant(low, 0.0) else (low - offset) / slope
    upper_knots = (high if flat else high - offset) / slope if capped else high
    if not capped:
        knots = lower_knots
    elif lower_knots is low:
        knots, lowest = upper_knots, 0.0
    else:
        knots = np.concatenate((lower_knots, upper_knots))
    total = np.multiply.outer(knots, slope)
    if not flat:
        total += offset
    if lower_knots is not low:
        np.maximum(total, low, out=total)
    if capped:
        np.minimum(total, high, out=total)
    total = np.add.reduce(total, 1)
    a = float(np.maximum.reduce(knots, where=total <= target, initial=lowest))
    b = float(np.minimum.reduce(knots, where=total >= target, initial=math.inf))
    return _finish(slope, offset, low, high, target, lower_knots, upper_knots, (a, b))


def _finish(
    slope: Vector,
    offset: Vector,
    low: Vector,
    high: Vector,
    target: float,
    lower_knots: Vector,
    upper_knots: Vector,
    bracket: tuple[float, float],
) -> tuple[float, float, float]:
    """Root on the piece between two neighbouring knots (or the plateau there)."""
    a, b = bracket
    if a >= b:  # the target is met at a knot, or (b < a) on a flat stretch between two knots
        return _inside(b, a), b, a
    inside = (lower_knots <= a) & (upper_knots >= b)
    steep = float(np.dot(slope, inside))
    if steep == 0.0:
        return _inside(a, b), a, b
    fixed = np.where(lower_knots >= b, low, np.where(inside, offset, high))
    t = (target - float(np.add.reduce(fixed))) / steep
    t = min(max(t, a), b)
    return t, t, t


def _inside(a: float, b: float) -> float:
    """A finite point of ``[a, b]``: geometric middle where both are positive."""
    if math.isinf(a) or math.isinf(b):
        return a if math.isfinite(a) else (b if math.isfinite(b) else 0.0)
    if a > 0.0:
        return min(max(math.sqrt(a) * math.sqrt(b), a), b)
    return a + (b - a) / 2.0


def _measure(t: float, parts: list[_Part]) -> tuple[float, float]:
    """S(t) and its slope, over chunks that stay in the processor's cache."""
    total = steep = 0.0
    for slope, offset, low, high, z, y in parts:
        np.multiply(slope, t, out=z)
        if offset is not None:
            np.add(z, offset, out=z)
        clipped = z
        if low is not None:
            clipped = np.maximum(z, low, out=y)
        if high is not None:
            clipped = np.minimum(clipped, high, out=y)
        total += float(np.add.reduce(clipped))
        np.equal(clipped, z, out=z)
        steep += float(np.dot(slope, z))
    return total, steep


def _parts(slope: Vector, offset: Vector, low: Vector, high: Vector) -> list[_Part]:
    """Chunks with two buffers; bounds that never cut are left out."""
    size = slope.size
    z, y = np.empty(min(CHUNK, size)), np.empty(min(CHUNK, size))
    level = None if _is_constant(offset, 0.0) else offset
    floor = None if level is None and _is_constant(low, 0.0) else low
    roof = None if _is_constant(high, math.inf) else high

    def cut(v: Vector | None, i: int) -> Vector | None:
        return None if v is None else v[i : i + CHUNK]

    starts = range(0, size, CHUNK)
    return [(slope[i : i + CHUNK], cut(level, i), cut(floor, i), cut(roof, i), z[: size - i], y[: size - i]) for i in starts]


def _start(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float) -> float:
    """Where to begin: the root of every 64th block, or the root if nothing were clipped."""
    t = math.nan
    if slope.size >= 64 * DENSE:
        every = (slope[::64].copy(), offset[::64], low[::64], high[::64])
        t = _search(*every, target * every[0].size / slope.size)[0]
    if not (math.isfinite(t) and t > 0.0):
        t = (target - float(np.add.reduce(offset))) / float(np.add.reduce(slope))
    return t if math.isfinite(t) else 0.0


def _walk(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float) -> tuple[float, float, float]:
    parts = _parts(slope, offset, low, high)
    a, b = -math.inf, math.inf
    t = _start(slope, offset, low, high, target)
    misses = [math.inf] * 3
    while True:
        total, steep = _measure(t, parts)
        miss = target - total
        if abs(miss) <= 2 * _EPS * abs(target):
            break
        a, b = (max(a, t), b) if miss > 0.0 else (a, min(b, t))
        step = t + miss / steep if steep > 0.0 else math.nan
        if abs(step - t) <= 2 * _EPS * abs(t):  # the next number is the same number
            break
        if not a < step < b or abs(miss) > 0.5 * misses[-3]:
            knot = _median_knot(slope, offset, low, high, a, b)
            if knot is None:
                lower_knots, upper_knots = (low - offset) / slope, (high - offset) / slope
                return _finish(slope, offset, low, high, target, lower_knots, upper_knots, (a, b))
            step = knot
            misses += [math.inf] * 3
        else:
            misses.append(abs(miss))
        t = step
    if steep > 0.0:
        return t, t, t
    lower_knots, upper_knots = (low - offset) / slope, (high - offset) / slope
    knots = np.concatenate((lower_knots, upper_knots))
    below, above = knots[knots <= t], knots[knots >= t]
    a = float(below.max()) if below.size else -math.inf
    b = float(above.min()) if above.size else math.inf
    return _inside(a, b), a, b


def _median_knot(slope: Vector, offset: Vector, low: Vector, high: Vector, a: float, b: float) -> float | None:
    knots = np.concatenate(((low - offset) / slope, (high - offset) / slope))
    knots = knots[(knots > a) & (knots < b)]
    if knots.size == 0:
        return None
    middle = knots.size // 2
    return float(np.partition(knots, middle)[middle])


def monotone_root(spend: Callable[[float], float], knots: Vector, target: float) -> tuple[float, float, float]:
    """Solve ``spend(p) = target`` for a continuous nondecreasing function of ``p > 0`` that is smooth between knots.

    The piece is found by bisection over the sorted knots (a proven bracket), the root inside it by Brent's method in ``log p``
    down to rounding.

    ``knots`` are prices at which some block leaves its floor or reaches its cap; zeros and infinities are dropped.

    Returns:
        ``(p, p_low, p_high)`` as in :func:`piecewise_root`.
    """
    from scipy.optimize import brentq

    knots = np.unique(knots[(knots > 0.0) & np.isfinite(knots)])
    at = functools.cache(lambda i: spend(float(knots[i])))
    first = bisect.bisect_left(range(knots.size), target, key=at)
    stop = bisect.bisect_right(range(knots.size), target, key=at)
    a = float(knots[first - 1]) if first > 0 else _expand(spend, float(knots[0]) if knots.size else 1.0, target, 0.5)
    b = float(knots[first]) if first < knots.size else _expand(spend, float(knots[-1]) if knots.size else 1.0, target, 2.0)
    if first < knots.size and at(first) == target:
        top = float(knots[min(stop, knots.size) - 1])
        return _inside(b, top), b, top
    ends = math.log(a), math.log(b)

    def over(u: float) -> float:  # at exp(log(a)), which may be no longer a
        return spend(math.exp(u)) - target

    if a >= b or over(ends[0]) >= 0.0:
        p = a
    elif over(ends[1]) <= 0.0:
        p = b
    else:
        p = math.exp(brentq(over, *ends, xtol=1e-300, rtol=4 * _EPS, maxiter=300))
        p = min(max(p, a), b)
    return p, p, p


def _expand(spend: Callable[[float], float], start: float, target: float, factor: float) -> float:
    """A price below (``factor < 1``) or above ``start`` at which ``spend`` is on the other side of the target."""
    p = start
    while 0.0 < p < math.inf:
        value = spend(p)
        if (factor < 1.0 and value <= target) or (factor > 1.0 and value >= target):
            return p
        p *= factor
        factor *= factor if 1e-8 < factor < 1e8 else 1.0
    return max(min(p, 1e308), 1e-308)
