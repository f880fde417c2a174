r"""Cost on one task of a decision made for another: drift, exact regret and bounds with computed constants.

``Regret = J_B(x_A; q_B) - J_B(x_B; q_B) >= 0``, where ``x_A`` solves the program for the weights ``q_A``.

- The paper's bound (Appendix "Transfer Stability Under Score Drift"): ``L^2 ||q_A - q_B||^2 / (2 sigma)`` with a Lipschitz
  constant L of the gradient in q and a modulus sigma of strong convexity, both of them the worst over blocks.
- Sharper, by the same proof: only the gradient difference at ``x_A`` enters and the objective is separable, so
  ``Regret <= sum_k Delta_k^2 / (2 sigma_k)``, ``Delta_k = |dJ/dx_k(x_A; q_B) - dJ/dx_k(x_A; q_A)|``.

Both moduli are those of the utility or penalty at hand, ``h_k min |f''|`` over what block k can have at all under floors,
caps and the budget. Where that minimum is zero (measured curves) the bounds are infinite: true, and empty.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import LengthMismatch
from .dual import piecewise_root
from .inputs import Vector, cost_vector, number, weight_vector
from .programs import allocate, sparsify, weigh
from .separable import Program, Solution

_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Transfer of one decision.

    Attributes:
        drift: ``||q_A - q_B||_2`` of the weights normalised to sum 1; squared_drift: its square, the paper's "drift".
        regret: Exact loss of objective from using A's decision on B, zero or more.
        relative_regret: Prices left out. Allocation: the share of the utility of B's own plan (above the floors) that A's plan
            misses. Sparsity: by what share A's plan does more damage than B's own. Null where the two plans use different
            amounts of the budget, for which utilities do not compare.
        uniform_regret: Exact loss of objective from the same capacity, or the same sparsity, everywhere (within the bounds):
            a ``regret`` above it says that planning on A is worse for B than not planning.
        bound: The paper's bound.
        sharp_bound: The bound block by block; ``regret <= sharp_bound <= bound``.
        rank_correlation: Spearman correlation of the two weight vectors.
        source, target: The two solutions.
    """

    drift: float
    squared_drift: float
    regret: float
    relative_regret: float | None
    uniform_regret: float
    bound: float
    sharp_bound: float
    rank_correlation: float
    source: Solution
    target: Solution

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers without the two solutions."""
        return {name: value for name, value in self.__dict__.items() if name not in ("source", "target")}


def transfer_allocation(
    source: ArrayLike,
    target: ArrayLike,
    cost: ArrayLike,
    budget: float,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    alpha: float = 0.5,
    gamma: float = 0.9,
    **options: Any,
) -> Transfer:
    """Return the transfer of an allocation from some weights to others.

    Args:
        source: Weights that the decision is made from, ``(K,)``.
        target: Weights of the task that it is used on, ``(K,)``.
        cost: As in :func:`layerbudget.solvers.allocate`, like all that follow.
        budget: What may be spent.
        exponent: Of the weights.
        exponent_on: ``density`` or ``block``.
        alpha: Price per unit of cost.
        gamma: Weight of the utility.
        **options: Further arguments of ``allocate``, but for ``units``: both sides have one objective.

    >>> t = transfer_allocation([1.0, 2.0], [2.0, 1.0], 1.0, 4.0, spend="exactly")
    >>> 0 <= t.regret <= t.sharp_bound <= t.bound
    True
    """
    pair = _pair(source, target)
    c = cost_vector(cost, pair[0].size)
    factor = number(gamma, "gamma", positive=True) * _unit(c, exponent, exponent_on)
    price = number(alpha, "alpha") / float(c.mean())
    options |= {"exponent": exponent, "exponent_on": exponent_on}
    a, b = (allocate(q, c, budget, alpha=price, gamma=factor, units="literal", **options) for q in pair)
    return _transfer(a, b, pair, factor * _sensitivity(pair, c, exponent, exponent_on))


def transfer_sparsity(
    source: ArrayLike,
    target: ArrayLike,
    numel: ArrayLike,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    bits: float = 16.0,
    eta: float = 2.0,
    spend: str = "exactly",
    **options: Any,
) -> Transfer:
    """Return the transfer of a sparsity plan from some weights to others.

    Args:
        source: Weights that the decision is made from, ``(K,)``.
        target: Weights of the task that it is used on, ``(K,)``.
        numel: As in :func:`layerbudget.solvers.sparsify`, like all that follow.
        exponent: Of the weights.
        exponent_on: ``density`` or ``block``.
        bits: Description length saved per pruned parameter.
        eta: Weight of the penalty.
        spend: ``at_least`` or ``exactly``.
        **options: Further arguments of ``sparsify``, but for ``units``.

    >>> t = transfer_sparsity([1.0, 2.0], [2.0, 1.0], 1.0, sparsity=0.2, min_sparsity=0.05)
    >>> 0 <= t.regret <= t.sharp_bound <= t.bound
    True
    """
    pair = _pair(source, target)
    n = cost_vector(numel, pair[0].size, "numel")
    factor = number(eta, "eta", positive=True) * _unit(n, exponent, exponent_on)
    price = number(bits, "bits per parameter") / float(n.mean())
    options |= {"exponent": exponent, "exponent_on": exponent_on, "spend": spend}
    a, b = (sparsify(q, n, bits=price, eta=factor, units="literal", **options) for q in pair)
    return _transfer(a, b, pair, factor * _sensitivity(pair, n, exponent, exponent_on))


def _pair(source: ArrayLike, target: ArrayLike) -> tuple[Vector, Vector]:
    q, r = weight_vector(source, "source"), weight_vector(target, "target")
    if q.size != r.size:
        raise LengthMismatch(
            f"The source has {q.size} weights and the target {r.size}.",
            "Both need one per block.",
            "Score both on the same blocks.",
        )
    return q / q.sum(), r / r.sum()


def _unit(size: Vector, exponent: float, exponent_on: str) -> float:
    """Factor that gives equal weights ``1 / K`` a mean of one: one objective for both sides, of order one."""
    q = np.full(size.size, 1.0 / size.size)
    return float(1.0 / weigh(q, size, exponent, exponent_on, literal=True).mean())


def _sensitivity(pair: tuple[Vector, Vector], size: Vector, exponent: float, exponent_on: str) -> float:
    """Largest ``|dw_k / dq_k|`` between the two weight vectors: ``exponent q^(exponent - 1)``, times ``n^(1 - exponent)``."""
    if exponent == 0.0:
        return 0.0  # every weight is one, whatever q is
    ends = np.array(pair)
    with np.errstate(all="ignore"):
        edge = np.where(exponent >= 1.0, ends.max(0), ends.min(0)) ** (exponent - 1.0)
    sizes = size ** (1.0 - exponent) if exponent_on == "density" else 1.0
    return exponent * float(np.max(edge * sizes))


def _transfer(a: Solution, b: Solution, pair: tuple[Vector, Vector], sensitivity: float) -> Transfer:
    """Compare two solutions under the second one's objective; ``sensitivity`` is that of its weights to ``q``."""
    first: Program = a.program
    second: Program = b.program
    x_a, x_b = a.value - first.base, b.value - second.base
    f, (least, most) = second.function, _reach(second)
    modulus = f.modulus(least, most)
    with np.errstate(all="ignore"):
        difference = np.abs(first.scale - second.scale) * f.derivative(x_a)
        each = np.where(difference > 0, difference**2 / (2.0 * second.scale * modulus), 0.0)
        drift = float(np.linalg.norm(pair[0] - pair[1]))
        lipschitz = sensitivity * float(np.max(f.derivative(least if second.sign < 0 else most)))
        sigma = float((second.scale * modulus).min())
        bound = float(np.float64(lipschitz * drift) ** 2 / (2.0 * sigma)) if drift > 0 and lipschitz > 0 else 0.0
    return Transfer(
        drift=drift,
        squared_drift=drift**2,
        regret=_loss(second, x_a, x_b),
        relative_regret=_relative(a, b, x_a, x_b),
        uniform_regret=_loss(second, _uniform(second, float(np.dot(second.amount, x_b))), x_b),
        bound=bound,
        sharp_bound=float(np.sum(each)),
        rank_correlation=spearman(*pair),
        source=a,
        target=b,
    )


def _reach(program: Program) -> tuple[Vector, Vector]:
    """Smallest and largest ``x_k`` of any feasible point: the bounds, tightened by what the budget leaves for block k.

    An allocation can give block k at most what is left when all others are at their floors; a program that must spend (or
    prune) its whole budget gives it at least what is left when all others are at their caps.
    """
    a, low, high, target = program.amount, program.low, program.high, program.target
    with np.errstate(all="ignore"):
        most, least = np.array(high), np.array(low)
        if program.sign < 0 or program.exact_budget:
            left = target - (np.dot(a, low) - a * low)
            most = np.minimum(high, np.maximum(left + _ROUNDING * abs(target), 0.0) / a)
        if program.sign > 0 or program.exact_budget:
            caps = float(np.dot(a, high))
            left = target - np.where(np.isinf(caps), np.inf, caps - a * high)
            least = np.maximum(low, (left - _ROUNDING * (abs(target) + caps)) / a)
    return np.minimum(least, high), np.maximum(most, low)


def _relative(a: Solution, b: Solution, x_a: Vector, x_b: Vector) -> float | None:
    program: Program = b.program
    if abs(a.spent - b.spent) > 1e-9 * max(abs(a.spent), abs(b.spent)):
        return None
    theirs, ours = (float(np.add.reduce(program.terms(x))) for x in (x_a, x_b))
    nothing = float(np.add.reduce(program.terms(program.low))) if program.sign < 0 else 0.0
    return max(theirs - ours, 0.0) / abs(ours - nothing) if ours != nothing else 0.0


def _uniform(program: Program, used: float) -> Vector:
    """The same ``x`` everywhere within the bounds, using this much of the budget, shape ``(K,)``."""
    a, low, high = program.amount, program.low, program.high
    t, _, _ = piecewise_root(a, np.zeros(a.size), a * low, a * high, used)
    return np.minimum(np.maximum(t, low), high)


def _loss(program: Program, x: Vector, best: Vector) -> float:
    """Objective at ``x`` minus objective at ``best``, summed block by block, zero or more."""
    each = program.terms(x) - program.terms(best) - program.sign * program.price * program.amount * (x - best)
    return max(float(np.add.reduce(each)), 0.0)


def spearman(q: Vector, r: Vector) -> float:
    """Spearman's rank correlation; values that differ by rounding are ties.

    Where one side ranks nothing it is 0, where neither does 1.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([8.0, 8.0, 8.0]))
    0.0
    """
    from scipy.stats import rankdata

    ranks = []
    for x in (q, r):
        unit = 1e-12 * float(np.abs(x).max(initial=0.0)) or 1.0
        rank = rankdata(np.round(x / unit))
        ranks.append(rank - rank.mean())
    one, other = (float(np.linalg.norm(x)) for x in ranks)
    if one == 0.0 or other == 0.0:
        return float(one == other)
    return float(ranks[0] @ ranks[1]) / (one * other)
