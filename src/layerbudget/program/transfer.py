r"""What a decision made for one task costs on another: drift, exact regret and bounds with computed constants.

``Regret = J_B(x_A; q_B) - J_B(x_B; q_B) >= 0``, where ``x_A`` solves the program for the weights ``q_A``.

- The paper's bound (section 6): ``L^2 ||q_A - q_B||^2 / (2 sigma)`` with a Lipschitz constant L of the gradient in q and a
  modulus sigma of strong convexity, both of them the worst over blocks.
- Sharper, by the same proof: only the gradient difference at ``x_A`` enters and the objective is separable, so
  ``Regret <= sum_k Delta_k^2 / (2 sigma_k)``, ``Delta_k = |dJ/dx_k(x_A; q_B) - dJ/dx_k(x_A; q_A)|``.

Nothing is fitted; a bound whose constant is fitted to the data is not a bound.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import LengthMismatch
from .allocation import allocate
from .inputs import Vector, cost_vector, weight_vector
from .separable import Program
from .solution import Solution
from .sparsity import sparsify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Transfer of one decision.

    Attributes:
        drift: ``||q_A - q_B||_2`` of the weights normalised to sum 1.
        regret: Exact loss of objective from using A's decision on B, zero or more.
        relative_regret: Regret over what B's own optimum gains against doing nothing at all.
        bound: The paper's bound.
        sharp_bound: The bound block by block; ``regret <= sharp_bound <= bound``.
        lipschitz, modulus: Constants of the paper's bound.
        rank_correlation: Spearman correlation of the two weight vectors.
        source, target: The two solutions.
    """

    drift: float
    regret: float
    relative_regret: float
    bound: float
    sharp_bound: float
    lipschitz: float
    modulus: float
    rank_correlation: float
    source: Solution
    target: Solution

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers without the two solutions."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("source", "target")}


def transfer_allocation(
    source: ArrayLike, target: ArrayLike, cost: ArrayLike, budget: float, *, exponent: float = 1.0,
    exponent_on: str = "density", alpha: float = 0.5, gamma: float = 0.9, rule: str = "at_most", **options: Any,
) -> Transfer:  # fmt: skip
    """Transfer of an allocation from the weights ``source`` to the weights ``target`` (log utility).

    Args:
        source: Weights ``q_A``, shape ``(K,)``.
        target: Weights ``q_B``, shape ``(K,)``.
        cost: As in :func:`layerbudget.program.allocate`, like all other arguments.
        budget: B.
        exponent: beta.
        exponent_on: ``density`` or ``block``.
        alpha: Price.
        gamma: Weight of the utility.
        rule: ``at_most`` or ``exactly``.
        **options: ``base``, ``lower``, ``upper``.

    Returns:
        The transfer record.

    Raises:
        LengthMismatch: Two vectors of different length.
        InvalidInput, InfeasibleBudget, DegenerateScores: As the program raises them.

    >>> t = transfer_allocation([1.0, 2.0], [2.0, 1.0], 1.0, 4.0, rule="exactly")
    >>> 0 <= t.regret <= t.sharp_bound <= t.bound
    True
    """
    q, r = _pair(source, target)
    c = cost_vector(cost, q.size)
    fixed: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "rule": rule, "units": "literal", **options}
    fixed |= {"alpha": alpha / float(c.mean()), "gamma": gamma * _unit(c, exponent, exponent_on)}
    a, b = allocate(q, c, budget, **fixed), allocate(r, c, budget, **fixed)
    p = b.program
    largest = np.minimum(p.high, p.target / c)
    modulus = p.scale / (1.0 + largest) ** 2
    return _transfer(a, b, (q, r), c, modulus, fixed["gamma"], exponent, exponent_on, steepest=1.0)


def transfer_sparsity(
    source: ArrayLike, target: ArrayLike, numel: ArrayLike, pruned_parameters: float | None = None, *,
    exponent: float = 1.0, exponent_on: str = "density", bits: float = 16.0, eta: float = 2.0, rule: str = "exactly",
    **options: Any,
) -> Transfer:  # fmt: skip
    """Transfer of a sparsity plan from the weights ``source`` to the weights ``target`` (quadratic penalty).

    Args:
        source: Weights ``q_A``, shape ``(K,)``.
        target: Weights ``q_B``, shape ``(K,)``.
        numel: As in :func:`layerbudget.program.sparsify`, like all other arguments.
        pruned_parameters: S.
        exponent: kappa.
        exponent_on: ``density`` or ``block``.
        bits: b.
        eta: Weight of the penalty.
        rule: ``at_least`` or ``exactly``.
        **options: ``sparsity``, ``min_sparsity``, ``max_sparsity``.

    Returns:
        The transfer record.

    Raises:
        LengthMismatch: Two vectors of different length.
        InvalidInput, InfeasibleBudget, DegenerateScores: As the program raises them.
    """
    q, r = _pair(source, target)
    n = cost_vector(numel, q.size, "numel")
    fixed: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "rule": rule, "units": "literal", **options}
    fixed |= {"bits": bits / float(n.mean()), "eta": eta * _unit(n, exponent, exponent_on)}
    a, b = sparsify(q, n, pruned_parameters, **fixed), sparsify(r, n, pruned_parameters, **fixed)
    modulus = 2.0 * b.program.scale
    steepest = 2.0 * float(b.program.high.max())
    return _transfer(a, b, (q, r), n, modulus, fixed["eta"], exponent, exponent_on, steepest=steepest)


def _pair(source: ArrayLike, target: ArrayLike) -> tuple[Vector, Vector]:
    q, _, _ = weight_vector(source, "source")
    r, _, _ = weight_vector(target, "target")
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
    w = size * (q / size) ** exponent if exponent_on == "density" else q**exponent
    return float(1.0 / w.mean())


def _transfer(
    a: Solution, b: Solution, pair: tuple[Vector, Vector], size: Vector, modulus: Vector, factor: float, exponent: float,
    exponent_on: str, *, steepest: float,
) -> Transfer:  # fmt: skip
    first: Program = a.program
    second: Program = b.program
    x_a, x_b = a.value - first.base, b.value - second.base
    difference = np.abs(first.scale - second.scale) * second.function.derivative(x_a)
    with np.errstate(all="ignore"):
        sharp = float(np.sum(np.where(difference > 0, difference**2 / (2.0 * modulus), 0.0)))
        ends = np.array(pair)
        edge = np.where(exponent >= 1.0, ends.max(0), ends.min(0)) ** (exponent - 1.0)
        sizes = size ** (1.0 - exponent) if exponent_on == "density" else 1.0
        lipschitz = factor * exponent * steepest * float(np.max(edge * sizes))
        drift = float(np.linalg.norm(pair[0] - pair[1]))
        sigma = float(modulus.min())
        bound = lipschitz**2 * drift**2 / (2.0 * sigma) if drift > 0 else 0.0
    regret = max(_loss(second, x_a, x_b), 0.0)
    idle = _loss(second, second.low, x_b)
    return Transfer(
        drift=drift, regret=regret, relative_regret=regret / abs(idle) if idle else 0.0, bound=bound, sharp_bound=sharp,
        lipschitz=lipschitz, modulus=sigma, rank_correlation=spearman(*pair), source=a, target=b,
    )  # fmt: skip


def _loss(program: Program, x: Vector, best: Vector) -> float:
    """Objective at ``x`` minus objective at ``best``, summed block by block."""
    each = program.terms(x) - program.terms(best) - program.sign * program.price * program.amount * (x - best)
    return float(np.add.reduce(each))


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
