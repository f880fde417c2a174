r"""The two programs of the paper, solved exactly: capacity by water-filling, sparsity by water-filling from the other side.

**Capacity** (paper, Theorem 2; :doc:`/theory`, section 3), ``phi(e) = log(1 + e)``:

    minimise   sum_k  alpha c_k e_k - gamma w_k phi(e_k)
    subject to sum_k  c_k e_k <= B,    0 <= e_k <= u_k

Stationarity gives ``e_k = clip(t w_k / c_k - 1, 0, u_k)`` with ``t = gamma / (alpha + lambda)``: a water level over the ground
``c_k / w_k``. Spending is piecewise linear in t, so the level is found exactly.

**Sparsity** (paper, Theorem 3; :doc:`/theory`, section 4), ``psi(rho) = rho^2``:

    minimise   sum_k  b n_k (1 - rho_k) + eta w_k psi(rho_k)
    subject to sum_k  n_k rho_k >= S,   rho_min_k <= rho_k <= rho_max_k

Stationarity gives ``rho_k = clip(t n_k / (2 eta w_k), rho_min_k, rho_max_k)`` with ``t = b + lambda``; pruned parameters are
piecewise linear in t, so t is found exactly.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DegenerateScores, InfeasibleBudget, InvalidInput, LengthMismatch
from .dual import piecewise_root
from .inputs import Vector, bound_vector, choice, cost_vector, number, spoken_amount, weight_vector
from .separable import Function, Program, Solution, solve
from .utilities import CalibratedPenalty, resolve

_ROUNDING, _LEAST = 1e-12, 1e-150


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
        exponent: beta, see :func:`weigh`.
        exponent_on: ``density`` or ``block``.
        alpha: Price per unit of cost. It cancels when the budget binds, and so does ``gamma``.
        gamma: Weight of the utility.
        base: Capacity that every block has anyway; it is paid from the budget and earns no utility.
        lower: Smallest capacity.
        upper: Largest capacity (none by default).
        utility: ``log``, ``power`` or an object of :mod:`layerbudget.solvers.utilities`.
        spend: ``at_most`` (the theorem, lambda >= 0) or ``exactly`` (spend all of it, lambda > -alpha).
        units: ``relative`` measures costs and weights in units of their means, so that alpha and gamma have a meaning;
            ``literal`` takes the numbers as they are, as the paper's text does.

    Raises:
        NotFinite, NegativeValue, LengthMismatch, InvalidCost: An input outside its domain.
        DegenerateScores: All weights are zero.
        InfeasibleBudget: The budget is below what base and floors cost, or (``exactly``) above what the caps can take.

    >>> allocate([4.0, 2.0, 1.0], cost=1.0, budget=4.0, spend="exactly").value
    array([3., 1., 0.])
    """
    q = weight_vector(weights)
    c, total, k = cost_vector(cost, q.size), number(budget, "budget"), q.size
    choice(spend, "spend", ("at_most", "exactly"))
    choice(units, "units", ("relative", "literal"))
    alpha, gamma = number(alpha, "alpha"), number(gamma, "gamma", positive=True)
    f = resolve(utility, concave=True)
    w = weigh(q, c, exponent, exponent_on, literal=units == "literal")
    floor, low, high = capacity_bounds(base, lower, upper, k)
    paid = float(np.dot(c, floor))
    target = _capacity_target(c, total, paid, low, high, exactly=spend == "exactly")
    if units == "relative":
        alpha, gamma = alpha * k / float(np.add.reduce(c)), gamma * k / float(np.add.reduce(w))
    return solve(Program(-1, f, w * gamma, c, alpha, low, high, floor, total, target, spend == "exactly", ("alpha", "gamma")))


def sparsify(
    weights: ArrayLike,
    numel: ArrayLike,
    pruned_parameters: float | None = None,
    *,
    sparsity: float | None = None,
    max_sparsity: ArrayLike = 0.55,
    min_sparsity: ArrayLike = 0.0,
    exponent: float = 1.0,
    exponent_on: str = "density",
    bits: float = 16.0,
    eta: float = 2.0,
    penalty: str | Function = "quadratic",
    spend: str = "at_least",
    units: str = "relative",
) -> Solution:
    r"""Choose each block's sparsity so that the last pruned parameter hurts the same everywhere.

    Minimises ``sum_k b n_k (1 - rho_k) + eta w_k psi(rho_k)`` subject to ``sum_k n_k rho_k >= pruned_parameters`` and
    ``min_sparsity_k <= rho_k <= max_sparsity_k``. The solution's ``slack`` is what is pruned beyond S.

    Args:
        weights: Layer weights ``q_k >= 0``, as in :func:`allocate`.
        numel: Prunable parameters ``n_k > 0``.
        pruned_parameters: S, how many are to go; else give ``sparsity``.
        sparsity: The same as a fraction of ``sum(numel)``.
        max_sparsity: Caps, in [0, 1].
        min_sparsity: Floors, in [0, 1].
        exponent: kappa, see :func:`weigh`.
        exponent_on: ``density`` or ``block``.
        bits: b, the description length saved per pruned parameter. It cancels when S binds, and so does ``eta``.
        eta: Weight of the penalty.
        penalty: ``quadratic``, ``log-barrier`` (caps are then ``1 - 2^-20`` at the most), or an object of
            :mod:`layerbudget.solvers.utilities`, such as measured curves.
        spend: ``at_least`` (the theorem, lambda >= 0) or ``exactly`` (prune S and no more, lambda > -b).
        units: As in :func:`allocate`.

    Raises:
        InvalidInput: An input outside its domain, as in :func:`allocate`.
        InfeasibleBudget: S is above what the caps allow, or (``exactly``) below what the floors demand.

    >>> sparsify([1.0, 2.0], [100, 100], 75, max_sparsity=0.8, spend="exactly").value
    array([0.5 , 0.25])
    """
    q = weight_vector(weights)
    n, k = cost_vector(numel, q.size, "numel"), q.size
    if (pruned_parameters is None) == (sparsity is None):
        raise InvalidInput(
            f"pruned_parameters is {pruned_parameters} and sparsity is {sparsity}.",
            "Exactly one of them says how much is to go.",
            "Give sparsity=0.5, for example.",
        )
    if sparsity is not None:
        wanted = number(sparsity, "sparsity") * float(np.add.reduce(n))
    else:
        wanted = number(pruned_parameters, "pruned_parameters")
    choice(spend, "spend", ("at_least", "exactly"))
    choice(units, "units", ("relative", "literal"))
    bits, eta = number(bits, "bits"), number(eta, "eta", positive=True)
    f = resolve(penalty, concave=False)
    low, high = sparsity_bounds(min_sparsity, max_sparsity, k, f)
    target = _sparsity_target(n, wanted, low, high, _limits(f, k), exactly=spend == "exactly")
    w = weigh(q, n, exponent, exponent_on, literal=units == "literal")
    if units == "relative":
        bits, eta = bits * k / float(np.add.reduce(n)), eta * k / float(np.add.reduce(w))
    return solve(Program(1, f, w * eta, n, bits, low, high, np.zeros(k), target, target, spend == "exactly", ("bits", "eta")))


def weigh(q: Vector, size: Vector, exponent: float, exponent_on: str, *, literal: bool = False) -> Vector:
    """Return the weights of the programs, positive, shape ``(K,)``.

    ``exponent_on="density"`` gives ``n (q / n)^beta``, under which cutting a block in two changes nothing; ``"block"`` is the
    paper's ``q^beta``. They agree at 1. Unless ``literal``, the result is known up to one common factor, which keeps large
    exponents in range. A zero weight becomes the limit of a vanishing one, so that "spend all of it" stays solvable, and
    no weight is more than 150 decades below the largest.
    """
    exponent = number(exponent, "exponent")
    choice(exponent_on, "exponent_on", ("density", "block"))
    if exponent != 1.0:
        d = q / size if exponent_on == "density" else q
        d = d**exponent if literal else (d / d.max()) ** exponent
        q = size * d if exponent_on == "density" else d
    if not (q > 0.0).any():
        raise DegenerateScores(
            "No weight is left: scores, costs or the exponent are beyond what floating point counts.",
            "",
            "Use an exponent near 1, and costs in a larger unit.",
        )
    vanishing = max(float(q[q > 0.0].min()) * 2.0**-80, float(q.max()) * _LEAST)
    return np.maximum(np.where(q > 0.0, q, vanishing), float(q.max()) * _LEAST)


def capacity_bounds(base: ArrayLike, lower: ArrayLike, upper: ArrayLike | None, size: int) -> tuple[Vector, Vector, Vector]:
    """Return the base, and the bounds of what comes on top of it; a floor above its cap is refused."""
    floor, low = bound_vector(base, size, "base", 0.0), bound_vector(lower, size, "lower", 0.0)
    high = bound_vector(upper, size, "upper", np.inf)
    low, high = np.maximum(low - floor, 0.0), high - floor
    if (low <= high).all():
        return floor, low, high
    k = int(np.argmax(low > high))
    raise InfeasibleBudget(
        f"Block {k} needs at least {float((low + floor)[k]):g} and may have at most {float((high + floor)[k]):g}.",
        "Every floor and base must lie below its cap.",
        f"Raise the cap of block {k} or lower its floor.",
    )


def sparsity_bounds(low: ArrayLike, high: ArrayLike, size: int, penalty: Function) -> tuple[Vector, Vector]:
    """Return floors and caps, ``0 <= floor <= cap <= 1``; the end of measured curves, or of a barrier, is a cap too."""
    a, b = bound_vector(low, size, "min_sparsity", 0.0), bound_vector(high, size, "max_sparsity", 1.0)
    if not ((a <= b).all() and b.max() <= 1.0):
        k = int(np.argmax((a > b) | (b > 1.0)))
        raise InvalidInput(
            f"Block {k} has min_sparsity {a[k]:g} and max_sparsity {b[k]:g}.",
            "They need 0 <= min_sparsity <= max_sparsity <= 1.",
            f"Correct the bounds of block {k}.",
        )
    limit = _limits(penalty, size)
    if (a > limit).any():
        k = int(np.argmax(a > limit))
        why, remedy = "To prune all of a block costs infinitely much there.", "use penalty='quadratic'"
        ends = f"the {penalty.name} goes to {float(limit[k])!r}"
        if isinstance(penalty, CalibratedPenalty):
            ends, why, remedy = f"its curve ends at {limit[k]:g}", "Nothing is assumed beyond it.", "measure further"
        raise InvalidInput(
            f"Block {k} has min_sparsity {float(a[k])!r}, and {ends}.", why, f"Lower the floor of block {k}, or {remedy}."
        )
    return a, np.minimum(b, limit)


def _limits(penalty: Function, size: int) -> Vector:
    """How far a penalty goes, ``(K,)``: to 1, to the end of a barrier, or to the last ratio of every measured curve."""
    if isinstance(penalty, CalibratedPenalty) and penalty.blocks != size:
        raise LengthMismatch(
            f"There are {penalty.blocks} calibrated curves for {size} blocks.",
            "One curve per block is needed.",
            "Measure again.",
        )
    return np.broadcast_to(np.asarray(getattr(penalty, "limit", 1.0), dtype=np.float64), (size,))


def _capacity_target(c: Vector, total: float, paid: float, low: Vector, high: Vector, *, exactly: bool) -> float:
    least = paid + float(np.dot(c, low))
    if total < least * (1.0 - _ROUNDING):
        raise InfeasibleBudget(
            f"The budget {total:g} is below the {least:.15g} that base and floors cost.",
            f"It must be at least {least:.15g}.",
            "Raise the budget or lower the floors.",
        )
    if not exactly:
        return max(total, least) - paid
    most = paid + float(np.dot(c, high))
    if total > most * (1.0 + _ROUNDING):
        raise InfeasibleBudget(
            f"The caps can take {most:.15g} and the budget {total:g} is to be spent exactly.",
            f"Under spend='exactly' it must lie in [{least:.15g}, {most:.15g}].",
            f"Raise the caps, or lower the budget to {most:.15g}.",
        )
    return min(max(total, least), most) - paid


def _sparsity_target(n: Vector, target: float, low: Vector, high: Vector, limit: Vector, *, exactly: bool) -> float:
    everything, least, most = (float(np.dot(n, v)) for v in (np.ones(n.size), low, high))
    lowest, highest = math.ceil(least / everything * 1e4) / 1e4, math.floor(most / everything * 1e4) / 1e4  # as they are typed
    floor = math.floor(target / everything * 1e4) / 1e4
    if target > most * (1.0 + _ROUNDING):
        top = np.where(low == high, high, limit)
        level, _, _ = piecewise_root(n, np.zeros(n.size), n * low, n * top, min(target, float(np.dot(n, top))))
        cap = math.ceil(level * 1e4 - 1e-9) / 1e4
        more = f"Raise max_sparsity to at least {cap:.4g}, or prune less."
        if target > float(np.dot(n, top)) * (1.0 + _ROUNDING):
            ends = top[low < high]
            more = "Prune less." if not ends.size or ends.min() >= 1.0 else f"Prune less: the penalty goes to {ends.min():.6g}."
        raise InfeasibleBudget(
            f"{spoken_amount(target)} parameters ({target / everything:.4g} of all) are to go and the caps allow "
            f"{spoken_amount(most)} ({most / everything:.4g}).",
            f"The global sparsity must lie in [{lowest:.4g}, {highest:.4g}].",
            more,
        )
    if exactly and target < least * (1.0 - _ROUNDING):
        raise InfeasibleBudget(
            f"{spoken_amount(target)} parameters are to go and the floors alone prune {spoken_amount(least)}.",
            f"Under spend='exactly' the global sparsity must lie in [{lowest:.4g}, {highest:.4g}].",
            f"Lower min_sparsity to {floor:.4g}, or prune {lowest:.4g} or more.",
        )
    return min(max(target, least), most) if exactly else min(target, most)
