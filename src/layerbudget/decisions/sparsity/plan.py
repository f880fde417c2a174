"""From scores to a sparsity per block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ...errors import InvalidInput
from ...plan import Plan
from ...planning.common import blocks_of, make_plan, matching, record_of, recorded
from ...planning.rule import Decision, Problem, as_rule
from ...planning.rules import maps as _maps  # noqa: F401 - registers the rules
from ...records import Block, check_fraction
from ...scores import Scores
from ...solvers.dual import piecewise_root
from ...solvers.inputs import Vector, bound_vector
from ...solvers.rounding import round_parameters
from ...solvers.utilities import Function
from . import rule as _rules  # noqa: F401 - registers the rules

Curves: TypeAlias = "Mapping[str, tuple[Sequence[float], Sequence[float]]]"
_BY_CURVES = {"mdl": "calibrated", "permuted": "calibrated-permuted"}


def default_cap(sparsity: float) -> float:
    """Largest sparsity of one block where none is named: 0.7, and always room above the target.

    >>> default_cap(0.5), default_cap(0.7), default_cap(0.9)
    (0.7, 0.85, 0.95)
    """
    return max(0.7, round(min(sparsity + 0.2, (1.0 + sparsity) / 2.0), 12))


def plan_sparsity(
    scores: Scores | Sequence[Block],
    *,
    sparsity: float = 0.5,
    max_sparsity: ArrayLike | None = None,
    min_sparsity: ArrayLike = 0.0,
    exponent: float | None = None,
    exponent_on: str | None = None,
    rule: str | Callable[..., Any] = "mdl",
    penalty: str | Function | Curves | None = None,
    damping: float | None = None,
    smoothing: float | None = None,
    spend: str | None = None,
    bits: float | None = None,
    eta: float | None = None,
    units: str | None = None,
    seed: int | None = None,
    width: float | None = None,
    parity: bool = False,
    fixed: Mapping[str, float] | None = None,
    exclude: str | None = None,
    **own: Any,
) -> Plan:
    """Choose a sparsity for every block so that the whole model reaches ``sparsity`` exactly.

    An option that the rule does not read is refused; what is left out has the rule's own default.

    Args:
        scores: The scores; blocks alone suffice for the rules ``uniform`` and ``size`` and for measured curves.
        sparsity: Pruned parameters over prunable parameters of all blocks, fixed and excluded ones included.
        max_sparsity: Cap per block (a scalar or one value per block); :func:`default_cap` by default.
        min_sparsity: Floor per block.
        exponent: kappa, see :func:`layerbudget.solvers.sparsify`; 1 by default.
        exponent_on: ``density`` (default) or ``block``.
        rule: ``mdl`` (the program), ``permuted`` (the program on shuffled scores), ``uniform``, ``size``, ``layerif``,
            ``alphapruning``, ``owl``, a rule of your own (:mod:`layerbudget.planning.rule`), or a function of a
            problem that returns one value per block.
        penalty: Penalty of the program, see :func:`layerbudget.solvers.sparsify`; or measured curves
            ``{block name: (ratios, losses)}``, which replace the scores (damage is measured, not predicted) and cap every block
            at its last ratio: the rule is then ``calibrated``. How far they were from convex is in
            ``plan.extra["convexified"]``.
        damping: Which row of the scores; the middle one by default.
        smoothing: Added to every score, in units of the mean score; 0 by default.
        spend: ``exactly`` (default), or ``at_least``: the theorem, under which bits alone may prune more than asked for.
        bits: b of the program, bits saved per pruned parameter; 16 by default. Inert where the target binds.
        eta: Weight of its penalty; 2 by default. Inert where the target binds.
        units: ``relative`` (default), or ``literal``: sizes and weights as they are, as the paper's text has it.
        seed: Seed of ``permuted``; 0 by default.
        width: Width of the maps of ``layerif``, ``alphapruning`` (0.3) and ``owl`` (0.08).
        parity: The published behaviour of those maps, see :mod:`layerbudget.solvers.rules`.
        fixed: Sparsity of some blocks, by name or regular expression.
        exclude: Regular expression: blocks that must stay dense.
        **own: Options of a rule of your own.

    Returns:
        A plan of kind ``sparsity``. ``count`` is the whole number of parameters to prune per block; the counts sum to
        ``round(sparsity * total)``, or to what caps equal to the target allow.

    Raises:
        InvalidInput: An option outside its domain, or one that the rule does not read.
        InfeasibleBudget: Caps, floors and fixed blocks do not allow the sparsity.
        DegenerateScores: No score is positive.
        UnknownBlock: ``fixed`` or ``exclude`` matches nothing.
    """
    blocks = blocks_of(scores)
    check_fraction(sparsity, "sparsity")
    given: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "penalty": penalty, "damping": damping}
    given |= {"spend": spend, "bits": bits, "eta": eta, "units": units}
    given |= {"smoothing": smoothing, "seed": seed, "width": width, "parity": parity, **own}
    if isinstance(penalty, Mapping):
        rule = _BY_CURVES.get(rule, rule) if isinstance(rule, str) else rule
        given |= {"penalty": None, "curves": penalty}
    chosen = as_rule("sparsity", rule)
    options = chosen.resolve_options(given)
    cap = default_cap(sparsity) if max_sparsity is None else max_sparsity
    numel = np.array([b.numel for b in blocks], dtype=np.float64)
    low, high, held = _bounds(blocks, min_sparsity, cap, fixed, exclude)
    total = _total(sparsity, numel, low, high)
    problem = Problem(
        kind="sparsity", blocks=blocks, scores=record_of(scores), amount=numel, target=float(total), low=low, high=high,
        held=held,
    )  # fmt: skip
    decision = chosen.decide(problem, options)
    value = decision.value
    if decision.target is not None:
        total, high = decision.target, np.maximum(high, value)
    elif decision.solution is None:
        value = _fitted(problem, decision)
    counts = round_parameters(value, numel, total, high)
    budget = {"unit": "parameters", "limit": total, "spent": int(counts.sum())}
    hyper: dict[str, Any] = {
        "sparsity": sparsity,
        "max_sparsity": cap,
        "min_sparsity": min_sparsity,
        **recorded(_told(options)),
    }
    hyper |= {"fixed": dict(fixed or {}), "exclude": exclude}
    return make_plan(scores, "sparsity", chosen.name, value, counts, budget, hyper, decision.solution, decision.extra)


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options to record: how the target is met is said where it is not met exactly."""
    return {k: v for k, v in options.items() if (k, v) != ("spend", "exactly")}


def _total(sparsity: float, numel: Vector, low: Vector, high: Vector) -> int:
    """Parameters that go: the nearest whole number, within what floors and caps allow where that is less than one away."""
    total = int(round(sparsity * float(numel.sum())))
    least, most = float(np.dot(numel, low)), float(np.dot(numel, high))
    if most < total < most + 1.0:
        return int(np.floor(most + 1e-9))
    if least - 1.0 < total < least:
        return int(np.ceil(least - 1e-9))
    return total


def _fitted(problem: Problem, decision: Decision) -> Vector:
    """The values of a rule, shifted by one number and cut to the bounds where they do not meet the target."""
    value, n = np.asarray(decision.value, dtype=np.float64), problem.amount
    if value.shape != n.shape or not np.isfinite(value).all():
        raise InvalidInput(
            f"The rule gave values of shape {value.shape}.", f"It must give {n.size} finite ones.", "Correct it."
        )
    inside = (value >= problem.low - 1e-12).all() and (value <= problem.high + 1e-12).all()
    if inside and abs(float(np.dot(n, value)) - problem.target) <= 0.5:
        return value
    shift, _, _ = piecewise_root(n, n * value, n * problem.low, n * problem.high, problem.target)
    return np.minimum(np.maximum(value + shift, problem.low), problem.high)


def _bounds(
    blocks: Sequence[Block], least: ArrayLike, most: ArrayLike, fixed: Mapping[str, float] | None, exclude: str | None
) -> tuple[Vector, Vector, np.ndarray]:
    """Bounds with held blocks pinned, and the mask of those.

    Raises:
        InvalidInput: A cap above one, or below the floor.
    """
    size = len(blocks)
    low = np.full(size, 1.0) * bound_vector(least, size, "min_sparsity", 0.0)
    high = np.full(size, 1.0) * bound_vector(most, size, "max_sparsity", 1.0)
    held = np.zeros(size, dtype=bool)
    for pattern, value in [*(fixed or {}).items(), *([(exclude, 0.0)] if exclude else [])]:
        found = matching(blocks, pattern)
        low[found] = high[found] = check_fraction(value, f"fixed sparsity of {pattern}")
        held[found] = True
    if (low > high).any() or (high > 1.0).any():
        k = int(np.argmax((low > high) | (high > 1.0)))
        raise InvalidInput(
            f"{blocks[k].name} has min_sparsity {low[k]:g} and max_sparsity {high[k]:g}.",
            "They need 0 <= min_sparsity <= max_sparsity <= 1.",
            "Correct the bounds.",
        )
    return low, high, held
