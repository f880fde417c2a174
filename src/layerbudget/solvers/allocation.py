r"""Capacity allocation by water-filling (paper section 4, Theorem 1; :doc:`/theory`, section 3).

    minimise   sum_k  alpha c_k e_k - gamma w_k phi(e_k)
    subject to sum_k  c_k e_k <= B,    0 <= e_k <= u_k                    phi(e) = log(1 + e)

Stationarity gives ``e_k = clip(t w_k / c_k - 1, 0, u_k)`` with ``t = gamma / (alpha + lambda)``: a water level over the ground
``c_k / w_k``. Spending is piecewise linear in t, so the level is found exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DegenerateScores, InfeasibleBudget
from .inputs import Vector, bound_vector, choice, cost_vector, filled, is_constant, number, renamed, weight_vector
from .separable import Program, solve
from .solution import Solution
from .utilities import Function, resolve

_ROUNDING = 1e-12
_NAMES = ("alpha", "gamma")


@renamed("rule", "spend")
def allocate(
    weights: ArrayLike,
    cost: ArrayLike,
    budget: float,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    alpha: float = 0.5,
    gamma: float = 0.9,
    base: ArrayLike = 0.0,
    lower: ArrayLike = 0.0,
    upper: ArrayLike | None = None,
    utility: str | Function = "log",
    spend: str = "at_most",
    units: str = "relative",
) -> Solution:
    r"""Divide a budget over blocks so that the last unit is worth the same everywhere.

    Minimises ``sum_k alpha c_k e_k - gamma w_k phi(e_k - base_k)`` subject to ``sum_k c_k e_k <= budget`` and
    ``max(lower_k, base_k) <= e_k <= upper_k``.

    Args:
        weights: Layer weights ``q_k >= 0`` (any scale), shape ``(K,)``.
        cost: Budget that one unit of capacity of block k takes, ``c_k > 0``, shape ``(K,)`` or a scalar.
        budget: What may be spent, in the unit of ``cost``.
        exponent: beta. ``exponent_on="density"`` uses ``w = c (q / c)^beta``, under which cutting a block in two changes
            nothing; ``"block"`` is the paper's ``w = q^beta``. They agree at 1.
        exponent_on: ``density`` or ``block``.
        alpha: Price per unit of cost. gamma: Weight of the utility. Both cancel when the budget binds.
        gamma: See ``alpha``.
        base: Capacity that every block has anyway; it is paid from the budget and earns no utility.
        lower: Smallest capacity. upper: Largest capacity (none by default).
        upper: See ``lower``.
        utility: ``log``, ``power``, ``saturating`` or an object of :mod:`layerbudget.solvers.utilities`.
        spend: ``at_most`` (the theorem, lambda >= 0) or ``exactly`` (spend all of it, lambda > -alpha).
        units: ``relative`` measures costs and weights in units of their means, so that alpha and gamma have a meaning;
            ``literal`` takes the numbers as they are, as the paper's text does.

    Returns:
        The solution, with its certificate.

    Raises:
        NotFinite, NegativeValue, LengthMismatch, InvalidCost: An input outside its domain.
        DegenerateScores: All weights are zero.
        InfeasibleBudget: The budget is below what base and floors cost, or (``exactly``) above what the caps can take.

    >>> allocate([4.0, 2.0, 1.0], cost=1.0, budget=4.0, spend="exactly").value
    array([3., 1., 0.])
    """
    q, w_low, w_high = weight_vector(weights)
    k = q.size
    c = cost_vector(cost, k)
    total = number(budget, "budget")
    choice(spend, "spend", ("at_most", "exactly"))
    choice(units, "units", ("relative", "literal"))
    alpha, gamma = number(alpha, "alpha"), number(gamma, "gamma", positive=True)
    f = resolve(utility, concave=True)
    choice(exponent_on, "exponent_on", ("density", "block"))
    w = weigh(q, c, number(exponent, "exponent"), exponent_on, w_low, literal=units == "literal")
    floor, low, high = _bounds(base, lower, upper, k)
    paid = 0.0 if isinstance(floor, float) else float(np.dot(c, floor))
    target = _feasible_target(c, total, paid, low, high, exactly=spend == "exactly")
    if units == "relative":
        alpha, gamma = alpha * k / float(np.add.reduce(c)), gamma * k / float(np.add.reduce(w))
    program = Program(
        sign=-1, function=f, scale=w, factor=gamma, amount=c, price=alpha, low=low, high=high, base=floor, budget=total,
        target=target, exact_budget=spend == "exactly", names=_NAMES, weights=q,
        settings=(exponent, exponent_on, spend, units),
    )  # fmt: skip
    return solve(program)


def weigh(q: Vector, size: Vector, exponent: float, exponent_on: str, smallest: float, *, literal: bool = False) -> Vector:
    """Weights of the programs: ``n (q / n)^beta`` (density) or ``q^beta`` (block), positive, shape ``(K,)``.

    A zero weight becomes the limit of a vanishing one, so that "spend all of it" stays solvable. Unless ``literal``, the
    result is known up to one common factor only (which keeps large exponents in range).
    """
    if exponent != 1.0:
        d = q / size if exponent_on == "density" else q
        d = d**exponent if literal else _powers(d / np.maximum.reduce(d), exponent)
        q = size * d if exponent_on == "density" else d
        smallest = float(np.minimum.reduce(q))
    if smallest > 0.0:
        return q
    if not (q > 0.0).any():
        raise DegenerateScores(
            "No weight is left: scores, costs or the exponent are beyond what floating point counts.", "",
            "Use an exponent near 1, and costs in a larger unit.",
        )  # fmt: skip
    least = float(q[q > 0.0].min())
    return np.where(q > 0.0, q, least * 2.0**-80 if least > 1e-280 else least)


def _powers(d: Vector, exponent: float) -> Vector:
    """``d^exponent`` for d in [0, 1]; what comes near to underflow is zero."""
    d = d**exponent
    return np.where(d < 1e-260, 0.0, d)


def _bounds(base: ArrayLike, lower: ArrayLike, upper: ArrayLike | None, size: int) -> tuple[Vector | float, Vector, Vector]:
    """Base, and the bounds of what comes on top of it."""
    floor = bound_vector(base, size, "base", 0.0)
    least, most = bound_vector(lower, size, "lower", 0.0), bound_vector(upper, size, "upper", np.inf)
    if isinstance(floor, float) and floor > 0.0:
        floor = np.full(size, floor)
    if isinstance(least, float) and least == 0.0:
        low = filled(size, 0.0)
    else:
        low = np.maximum(np.full(size, 1.0) * least - floor, 0.0)
    if isinstance(most, float) and (most == np.inf or isinstance(floor, float)):
        high = filled(size, most)
    else:
        high = np.asarray(most - floor)
    if is_constant(high, np.inf) or np.logical_and.reduce(low <= high):
        return floor, low, high
    k = int(np.argmax(low > high))
    raise InfeasibleBudget(
        f"Block {k} needs at least {float((low + floor)[k]):g} and may have at most {float((high + floor)[k]):g}.",
        "Every floor and base must lie below its cap.",
        f"Raise the cap of block {k} or lower its floor.",
    )


def _feasible_target(c: Vector, total: float, paid: float, low: Vector, high: Vector, *, exactly: bool) -> float:
    least = paid if is_constant(low, 0.0) else paid + float(np.dot(c, low))
    if total < least * (1.0 - _ROUNDING):
        raise InfeasibleBudget(
            f"The budget {total:g} is below the {least:g} that base and floors cost.",
            f"It must be at least {least:g}.",
            "Raise the budget or lower the floors.",
        )
    if exactly:
        most = paid + float(np.dot(c, high))
        if total > most * (1.0 + _ROUNDING):
            raise InfeasibleBudget(
                f"The caps can take {most:g} and the budget {total:g} is to be spent exactly.",
                f"Under spend='exactly' it must lie in [{least:g}, {most:g}].",
                "Raise the caps, lower the budget, or spend at most the budget (at_most).",
            )
        return min(max(total, least), most) - paid
    return max(total, least) - paid
