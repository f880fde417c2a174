r"""One monotone equation in one dual variable, solved exactly.

Both programs of the paper (and every separable program with one budget) lead to

    S(t) = sum_k clip(a_k t + b_k, l_k, h_k) = B,      a_k > 0,

a continuous, nondecreasing, piecewise linear function of one number ``t``. On the right piece its root is one division, so
there is no tolerance. The piece is found by Newton steps and, where one did not halve the knots that are left, the median knot:
O(log K) passes over the data. Sums are of nonnegative terms taken afresh at every t, never differences of prefix sums, so
weights may span hundreds of decades. The paper (section 5) bisects to a tolerance instead.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable

import numpy as np

from .inputs import Vector

_EPS = 2.220446049250313e-16
_STEP = 2.0**-40  # well inside a flat stretch that has no other end


def piecewise_root(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float) -> tuple[float, float, float]:
    """Solve ``sum clip(slope t + offset, low, high) = target`` for ``t``.

    Slopes are positive, lower clips finite, and beyond ``sum(low)`` and ``sum(high)`` the nearest end is returned.

    Returns:
        ``(t, t_low, t_high)``: a root and the interval of all roots (one point unless S has a plateau at the target).

    >>> piecewise_root(np.array([1.0, 3.0]), np.array([-1.0, -1.0]), np.zeros(2), np.full(2, 9.0), 2.0)
    (1.0, 1.0, 1.0)
    """
    with np.errstate(all="ignore"):
        leave, reach = (low - offset) / slope, (high - offset) / slope
        if target <= float(np.add.reduce(low)) * (1.0 + 4.0 * _EPS):
            first = float(leave.min())
            return first - abs(first) * _STEP, -math.inf, first
        if target >= float(np.add.reduce(high)) * (1.0 - 4.0 * _EPS):
            last = float(reach.max())
            return last + abs(last) * _STEP, last, math.inf
        knots = np.concatenate((leave, reach))
        a, b = _bracket(slope, offset, low, high, target, knots)
        if a == b:  # the target is met here, and S may be flat to either side
            up, down = ((leave <= a) & (reach > a)).any(), ((leave < a) & (reach >= a)).any()
            if not (up and down):
                a = a if down else float(knots[knots < a].max(initial=-math.inf))
                b = b if up else float(knots[knots > b].min(initial=math.inf))
                return _inside(a, b), a, b
        a, b = float(knots[knots <= a].max(initial=-math.inf)), float(knots[knots >= b].min(initial=math.inf))
        moving = (leave <= a) & (reach >= b)
        steep = float(np.dot(slope, moving))
        if a == b or steep == 0.0:
            return _inside(a, b), a, b
        fixed = np.where(leave >= b, low, np.where(moving, offset, high))
        t = min(max((target - float(np.add.reduce(fixed))) / steep, a), b)
        return t, t, t


def _bracket(slope: Vector, offset: Vector, low: Vector, high: Vector, target: float, knots: Vector) -> tuple[float, float]:
    """Points below and above the root without a knot between them; equal where one of them is the root."""
    a, b = -math.inf, math.inf
    knots = knots[np.isfinite(knots)]
    t = (target - float(np.add.reduce(offset))) / float(np.add.reduce(slope))  # the root, if nothing were clipped
    while knots.size and a < b:
        if not a < t < b:
            t = float(np.partition(knots, knots.size // 2)[knots.size // 2])
        line = slope * t + offset
        clipped = np.minimum(np.maximum(line, low), high)
        miss = target - float(np.add.reduce(clipped))
        a, b = t if miss >= 0.0 else a, t if miss <= 0.0 else b
        left = knots[(knots > a) & (knots < b)]
        steep = float(np.dot(slope, clipped == line))
        t = t + miss / steep if steep > 0.0 and 2 * left.size <= knots.size else math.nan
        knots = left
    return a, b


def _inside(a: float, b: float) -> float:
    """A finite point of ``[a, b]``: geometric middle where both are positive."""
    if math.isinf(a) or math.isinf(b):
        return a if math.isfinite(a) else (b if math.isfinite(b) else 0.0)
    if a > 0.0:
        return min(max(math.sqrt(a) * math.sqrt(b), a), b)
    return a + (b - a) / 2.0


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
    if a >= b or spend(a) >= target:
        p = a
    elif spend(b) <= target:
        p = b
    else:
        ends = math.log(a), math.log(b)
        p = math.exp(brentq(lambda u: spend(math.exp(u)) - target, *ends, xtol=1e-300, rtol=4 * _EPS, maxiter=300))
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
