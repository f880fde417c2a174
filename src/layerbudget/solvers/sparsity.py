r"""Protected pruning: which parameters go, by water-filling from the other side (paper section 5; :doc:`/theory`, section 4).

    minimise   sum_k  b n_k (1 - rho_k) + eta w_k psi(rho_k)
    subject to sum_k  n_k rho_k >= S,   rho_min_k <= rho_k <= rho_max_k           psi(rho) = rho^2

Stationarity gives ``rho_k = clip(t n_k / (2 eta w_k), rho_min_k, rho_max_k)`` with ``t = b + lambda``; pruned parameters are
piecewise linear in t, so t is found exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InfeasibleBudget, InvalidInput, LengthMismatch
from .allocation import weigh
from .calibrated import CalibratedPenalty
from .inputs import Vector, bound_vector, choice, cost_vector, filled, number, renamed, weight_vector
from .separable import Program, solve
from .solution import Solution
from .utilities import Function, resolve

_ROUNDING = 1e-12
_NAMES = ("bits", "eta")


@renamed("rule", "spend")
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
    ``min_sparsity_k <= rho_k <= max_sparsity_k``.

    Args:
        weights: Layer weights ``q_k >= 0`` (any scale), shape ``(K,)``.
        numel: Prunable parameters ``n_k > 0``, shape ``(K,)`` or a scalar.
        pruned_parameters: How many parameters must go, S. sparsity: The same as a fraction of ``sum(numel)``.
        sparsity: See ``pruned_parameters``; give one of the two.
        max_sparsity: Cap per block, a scalar or shape ``(K,)``, in [0, 1].
        min_sparsity: Floor per block.
        exponent: kappa. ``exponent_on="density"`` uses ``w = n (q / n)^kappa``; ``"block"`` is the paper's ``w = q^kappa``.
        exponent_on: ``density`` or ``block``.
        bits: b, description length saved per pruned parameter. eta: Weight of the penalty. Both cancel when S binds.
        eta: See ``bits``.
        penalty: ``quadratic``, ``log-barrier``, ``power``, ``exponential``, an object of
            :mod:`layerbudget.solvers.utilities`, or a :class:`layerbudget.solvers.calibrated.CalibratedPenalty`.
        spend: ``at_least`` (the theorem, lambda >= 0) or ``exactly`` (prune S and no more, lambda > -b).
        units: ``relative`` measures sizes and weights in units of their means; ``literal`` takes them as they are.

    Returns:
        The solution, with its certificate. ``slack`` is what is pruned beyond S.

    Raises:
        NotFinite, NegativeValue, LengthMismatch, InvalidCost: An input outside its domain.
        DegenerateScores: All weights are zero.
        InfeasibleBudget: S is above what the caps allow, or (``exactly``) below what the floors demand.

    >>> sparsify([1.0, 2.0], [100, 100], 75, max_sparsity=0.8, spend="exactly").value
    array([0.5 , 0.25])
    """
    q, w_low, _ = weight_vector(weights)
    k = q.size
    n = cost_vector(numel, k, "numel")
    target = _pruned(pruned_parameters, sparsity, n)
    choice(spend, "spend", ("at_least", "exactly"))
    choice(units, "units", ("relative", "literal"))
    bits, eta = number(bits, "bits"), number(eta, "eta", positive=True)
    low, high = _bounds(min_sparsity, max_sparsity, k)
    f = resolve(penalty, concave=False)
    if isinstance(f, CalibratedPenalty):
        high = _measured(f, low, high)
    exactly = spend == "exactly"
    target = _feasible_target(n, target, low, high, exactly=exactly)
    choice(exponent_on, "exponent_on", ("density", "block"))
    w = weigh(q, n, number(exponent, "exponent"), exponent_on, w_low, literal=units == "literal")
    if units == "relative":
        bits, eta = bits * k / float(np.add.reduce(n)), eta * k / float(np.add.reduce(w))
    program = Program(
        sign=1, function=f, scale=w, factor=eta, amount=n, price=bits, low=low, high=high, base=0.0, budget=target,
        target=target, exact_budget=exactly, names=_NAMES, weights=q, settings=(exponent, exponent_on, spend, units),
    )  # fmt: skip
    return solve(program)


def _pruned(pruned_parameters: float | None, sparsity: float | None, n: Vector) -> float:
    if (pruned_parameters is None) == (sparsity is None):
        raise InvalidInput(
            f"pruned_parameters is {pruned_parameters} and sparsity is {sparsity}.",
            "Exactly one of them says how much is to go.",
            "Give sparsity=0.5, for example.",
        )
    if pruned_parameters is not None:
        return number(pruned_parameters, "pruned_parameters")
    return number(sparsity, "sparsity") * float(np.add.reduce(n))


def _bounds(low: ArrayLike, high: ArrayLike, size: int) -> tuple[Vector, Vector]:
    a, b = bound_vector(low, size, "min_sparsity", 0.0), bound_vector(high, size, "max_sparsity", 1.0)
    a = filled(size, a) if isinstance(a, float) else a
    b = filled(size, b) if isinstance(b, float) else b
    if np.logical_and.reduce(a <= b) and np.maximum.reduce(b) <= 1.0:
        return a, b
    k = int(np.argmax((a > b) | (b > 1.0)))
    raise InvalidInput(
        f"Block {k} has min_sparsity {a[k]:g} and max_sparsity {b[k]:g}.",
        "They need 0 <= min_sparsity <= max_sparsity <= 1.",
        f"Correct the bounds of block {k}.",
    )


def _measured(curves: CalibratedPenalty, low: Vector, high: Vector) -> Vector:
    """Caps within the measured range."""
    if curves.blocks != low.size:
        raise LengthMismatch(
            f"There are {curves.blocks} calibrated curves for {low.size} blocks.",
            "One curve per block is needed.",
            "Measure again.",
        )
    return np.maximum(np.minimum(high, curves.limit), low)


def _feasible_target(n: Vector, target: float, low: Vector, high: Vector, *, exactly: bool) -> float:
    everything = float(np.add.reduce(n))
    least, most = (float(v[0]) * everything if v.strides == (0,) else float(np.dot(n, v)) for v in (low, high))
    if target > most * (1.0 + _ROUNDING):
        raise InfeasibleBudget(
            f"{target:g} parameters ({target / everything:.4g} of all) are to go and the caps allow {most:g} "
            f"({most / everything:.4g}).",
            f"The global sparsity must lie in [{least / everything:.4g}, {most / everything:.4g}].",
            f"Raise max_sparsity to at least {target / everything:.4g}, or prune less.",
        )
    if exactly and target < least * (1.0 - _ROUNDING):
        raise InfeasibleBudget(
            f"{target:g} parameters are to go and the floors alone prune {least:g}.",
            f"Under spend='exactly' the global sparsity must lie in [{least / everything:.4g}, {most / everything:.4g}].",
            "Lower min_sparsity, or use spend='at_least'.",
        )
    return min(max(target, least), most) if exactly else min(target, most)
