"""Plans of sparsity, and the rules that decide them from scores: the program of the paper, measured curves, and controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import checked
from ...errors import InvalidInput
from ...plan import Plan
from ...records import Block, check_fraction
from ...scores import Scores
from ...solvers.dual import piecewise_root
from ...solvers.inputs import Vector, bound_vector
from ...solvers.programs import sparsify
from ...solvers.rounding import round_parameters
from ...solvers.separable import Function
from ...solvers.utilities import CalibratedPenalty
from ..making import blocks_of, constants_of, make_plan, matching, record_of, recorded
from ..rules import Problem, RuleResult, find_rule, rule
from . import maps as _maps  # noqa: F401 - registers the rules

if TYPE_CHECKING:
    from torch import nn

    from ...data.calibration import CalibrationSet

Curves: TypeAlias = Mapping[str, tuple[Sequence[float], Sequence[float]]]
_BY_CURVES = {"mdl": "calibrated", "permuted": "calibrated-permuted"}


@checked
def plan_sparsity(
    source: Scores | Sequence[Block] | nn.Module, data: CalibrationSet | None = None, *, sparsity: float = 0.5, **options: Any
) -> Plan:
    """Return a plan that gives every block its own sparsity.

    Over all blocks together it prunes ``sparsity`` of the prunable parameters, rounded to a whole number.

    Args:
        source: Scores or a model; blocks alone are enough for a rule that reads no scores. From scores or blocks a rule
            decides, by default the program of the paper: see :func:`plan_by_scores`. From a model decides the damage that
            the pruner does to its output: see :func:`layerbudget.decisions.sparsity.directional.plan_by_damage`.
        data: Calibration tokens, with a model.
        sparsity: Pruned parameters over prunable parameters of all blocks.
        **options: Passed on to that function.

    Raises:
        InvalidInput: A model without data, scores with data, or an option that is not read.
    """
    if isinstance(source, (Scores, Sequence)):
        if data is not None:
            raise InvalidInput("Scores and data were given.", "A plan from scores reads no text.", "Give scores, or a model.")
        return plan_by_scores(source, sparsity=sparsity, **options)
    if data is None:
        raise InvalidInput("A model was given without data.", "The pruner's damage is measured on text.", "Give data.")
    from .directional import plan_by_damage

    return plan_by_damage(source, data, sparsity=sparsity, **options)


def default_cap(sparsity: float) -> float:
    """Return the largest sparsity of one block where none is named: 0.7, and always room above the target.

    >>> default_cap(0.5), default_cap(0.7), default_cap(0.9)
    (0.7, 0.85, 0.95)
    """
    return max(0.7, round(min(sparsity + 0.2, (1.0 + sparsity) / 2.0), 12))


def plan_by_scores(
    scores: Scores | Sequence[Block],
    *,
    sparsity: float = 0.5,
    max_sparsity: ArrayLike | None = None,
    min_sparsity: ArrayLike = 0.0,
    rule: str | Callable[..., Any] = "mdl",
    penalty: str | Function | Curves | None = None,
    fixed: Mapping[str, float] | None = None,
    exclude: str | None = None,
    **options: Any,
) -> Plan:
    """Return a plan of a sparsity for every block, decided by a rule from scores.

    Args:
        scores: The scores; blocks alone suffice for the rules ``uniform`` and ``size`` and for measured curves.
        sparsity: Pruned parameters over prunable parameters of all blocks, fixed and excluded ones included.
        max_sparsity: Cap per block (a scalar or one value per block); :func:`default_cap` by default.
        min_sparsity: Floor per block.
        rule: ``mdl`` (the program), ``permuted`` (the program on shuffled scores), ``uniform``, ``size``, ``layerif``,
            ``alphapruning``, ``owl``, a rule of your own (:mod:`layerbudget.decisions.rules`), or a function of a
            problem that returns one value per block.
        penalty: Penalty of the program, see :func:`layerbudget.solvers.sparsify`; or measured curves
            ``{block name: (ratios, losses)}``, which replace the scores and cap every block at its last ratio: the rule is then
            ``calibrated``. How far they were from convex is in ``plan.payload.convexified``.
        fixed: Sparsity of some blocks, by name or regular expression.
        exclude: Regular expression: blocks that must stay dense.
        **options: Of the rule, see :doc:`/options`; what the rule does not read is refused.

    Returns:
        A plan of kind ``sparsity``. ``count`` is the whole number of parameters to prune per block; the counts sum to
        ``round(sparsity * total)``, or to what caps equal to the target allow.
    """
    blocks = blocks_of(scores)
    check_fraction(sparsity, "sparsity")
    rule_options = {"penalty": penalty, **options}
    if isinstance(penalty, Mapping):
        rule = _BY_CURVES.get(rule, rule) if isinstance(rule, str) else rule
        rule_options |= {"penalty": None, "curves": penalty}
    chosen = find_rule("sparsity", rule)
    read = chosen.resolve_options(rule_options)
    cap = default_cap(sparsity) if max_sparsity is None else max_sparsity
    numel = np.array([b.numel for b in blocks], dtype=np.float64)
    low, high, pinned = _bounds(blocks, min_sparsity, cap, fixed, exclude)
    total = _total(sparsity, numel, low, high)
    problem = Problem(
        kind="sparsity",
        blocks=blocks,
        scores=record_of(scores),
        amount=numel,
        target=float(total),
        low=low,
        high=high,
        held=pinned,
    )
    decision = chosen.decide(problem, read)
    _check_result(chosen.name, problem, decision)
    if decision.target is not None:
        total, high = decision.target, np.maximum(high, decision.value)
    elif decision.solution is None:
        decision = dataclasses.replace(decision, value=_fitted(problem, decision.value))
    counts = round_parameters(decision.value, numel, total, high)
    budget = {"unit": "parameters", "limit": total, "spent": int(counts.sum())}
    hyper: dict[str, Any] = {"sparsity": sparsity, "max_sparsity": cap, "min_sparsity": min_sparsity}
    hyper |= recorded({k: v for k, v in read.items() if (k, v) != ("spend", "exactly")})
    hyper |= {"fixed": dict(fixed or {}), "exclude": exclude}
    return make_plan(scores, "sparsity", chosen.name, decision, counts, budget, hyper)


def _check_result(name: str, problem: Problem, decision: RuleResult) -> None:
    """Refuse counts, which sparsities are not, and values that are to stand as they are and do not keep bounds and target.

    Raises:
        InvalidInput: The rule gave them.
    """
    remedy = "Correct the rule, or return values alone: they are fitted."
    if decision.counts is not None:
        what = f"The rule {name} gave counts, which rules of ranks and experts have."
        raise InvalidInput(what, "A rule of sparsity gives one value per block.", remedy)
    if decision.target is None and decision.solution is None:
        return
    wrong = (decision.value < problem.low - 1e-9) | (decision.value > problem.high + 1e-9)
    if wrong.any():
        k = int(np.argmax(wrong))
        feasible = f"Its bounds are {problem.low[k]:g} and {problem.high[k]:g}."
        raise InvalidInput(f"The rule {name} gave {problem.blocks[k].name} {decision.value[k]:g}.", feasible, remedy)
    target = problem.target if decision.target is None else decision.target
    pruned = float(np.dot(problem.amount, decision.value))
    if abs(pruned - target) > 1.0 or target < problem.target - 1.0:
        what = f"The values of the rule {name} prune {pruned:,.0f} parameters."
        raise InvalidInput(what, f"They must prune {max(target, problem.target):,.0f}.", remedy)


def _total(sparsity: float, numel: Vector, low: Vector, high: Vector) -> int:
    """Parameters that go: the nearest whole number, within what floors and caps allow where that is less than one away."""
    total = int(round(sparsity * float(numel.sum())))
    least, most = float(np.dot(numel, low)), float(np.dot(numel, high))
    if most < total < most + 1.0:
        return int(np.floor(most + 1e-9))
    if least - 1.0 < total < least:
        return int(np.ceil(least - 1e-9))
    return total


def _fitted(problem: Problem, value: Vector) -> Vector:
    """The values of a rule, shifted by one number and cut to the bounds where they do not meet the target."""
    n = problem.amount
    inside = (value >= problem.low - 1e-12).all() and (value <= problem.high + 1e-12).all()
    if inside and abs(float(np.dot(n, value)) - problem.target) <= 0.5:
        return value
    shift, _, _ = piecewise_root(n, n * value, n * problem.low, n * problem.high, problem.target)
    return np.minimum(np.maximum(value + shift, problem.low), problem.high)


def _bounds(
    blocks: Sequence[Block], least: ArrayLike, most: ArrayLike, fixed: Mapping[str, float] | None, exclude: str | None
) -> tuple[Vector, Vector, np.ndarray]:
    """Bounds with held blocks pinned, and the mask of those."""
    size = len(blocks)
    low = np.full(size, 1.0) * bound_vector(least, size, "min_sparsity", 0.0)
    high = np.full(size, 1.0) * bound_vector(most, size, "max_sparsity", 1.0)
    pinned = np.zeros(size, dtype=bool)
    for pattern, value in [*(fixed or {}).items(), *([(exclude, 0.0)] if exclude else [])]:
        indices = matching(blocks, pattern)
        low[indices] = high[indices] = check_fraction(value, f"fixed sparsity of {pattern}")
        pinned[indices] = True
    if (low > high).any() or (high > 1.0).any():
        k = int(np.argmax((low > high) | (high > 1.0)))
        raise InvalidInput(
            f"{blocks[k].name} has min_sparsity {low[k]:g} and max_sparsity {high[k]:g}.",
            "They need 0 <= min_sparsity <= max_sparsity <= 1.",
            "Correct the bounds.",
        )
    return low, high, pinned


def _solve(problem: Problem, weights: Any, spend: str = "exactly", **options: Any) -> RuleResult:
    solution = sparsify(
        weights, problem.amount, problem.target, max_sparsity=problem.high, min_sparsity=problem.low, spend=spend, **options
    )
    more = None if spend == "exactly" else max(int(round(solution.spent)), int(round(problem.target)))
    return RuleResult(value=solution.value, solution=solution, target=more)


@rule("sparsity", "permuted", control=True, summary="the same on shuffled scores: a control")
@rule("sparsity", "mdl", summary="the program of the paper on the scores")
def _by_program(
    problem: Problem,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    damping: float | None = None,
    smoothing: float = 0.0,
    penalty: Any = "quadratic",
    spend: str = "exactly",
    bits: float | None = None,
    eta: float | None = None,
    units: str | None = None,
) -> RuleResult:
    chosen = {"exponent": exponent, "exponent_on": exponent_on, "penalty": penalty, "spend": spend}
    return _solve(problem, problem.weights(damping, smoothing), **chosen, **constants_of(bits=bits, eta=eta, units=units))


@rule("sparsity", "calibrated-permuted", control=True, summary="the same on shuffled curves: a control")
@rule("sparsity", "calibrated", summary="the program on measured curves, which replace the scores")
def _by_curves(
    problem: Problem,
    *,
    spend: str = "exactly",
    bits: float | None = None,
    eta: float | None = None,
    units: str | None = None,
    curves: Any = None,
) -> RuleResult:
    names = [b.name for b in problem.blocks]
    if not isinstance(curves, Mapping):
        raise InvalidInput("The rule calibrated needs measured curves.", "", "Give them: plan sparsity --curves FILE.")
    if problem.order is not None:
        curves = {n: curves[names[i]] for n, i in zip(names, problem.order, strict=True)}
    penalty = CalibratedPenalty.from_curves(curves, names)
    decision = _solve(problem, np.ones(len(names)), spend, penalty=penalty, **constants_of(bits=bits, eta=eta, units=units))
    bent = {name: float(v) for name, v in zip(names, penalty.change, strict=True) if v > 0}
    return dataclasses.replace(decision, payload={"convexified": bent})
