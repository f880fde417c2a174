"""From scores to a plan: what binds it whatever the rule, the rules that ranks and experts share, and the plan. No torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from typing_extensions import NotRequired, TypedDict

from ..budget import OWN_UNITS, Budget, amount_of, parse_budget, rank_parameters, unit_cost
from ..canonical import to_jsonable
from ..decision import DECISIONS
from ..errors import InfeasibleBudget, InvalidInput, UnknownBlock
from ..plan import Plan, PlanBlock
from ..records import Block
from ..requests import Request, flag_of
from ..scores import Scores
from ..solvers.dual import piecewise_root
from ..solvers.inputs import Vector, bound_vector, number, spoken_amount
from ..solvers.programs import allocate
from ..solvers.rounding import round_capacity
from .files import read_fixed, read_latency
from .rules import Problem, RuleResult, find_rule, rule

#: How the scale of an adapter follows its rank, see :mod:`layerbudget.decisions.ranks.apply`.
ALPHA_POLICIES = ("constant-ratio", "constant-alpha", "rslora")
_NEAR = 1e-9  # how far a bound that is no whole number is rounded
FLAT = 0.1  # standard deviation over mean of scores below which costs decide
# Constants of the programs, recorded where they were given.
_CONSTANTS = ("alpha", "gamma", "bits", "eta", "units")
# Options of the price, and the units of budgets that read them.
_PRICING: Mapping[str, tuple[str, ...]] = {
    "latency": ("latency",),
    "bytes_per_parameter": ("bytes",),
}
# Names under which users give the fields of the terms, and plans record them.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "lora-experts": {"base": "min_experts", "floor": "lower", "cap": "max_experts", "expert_rank": "expert_rank"},
    "ranks": {"multiple": "multiple", "floor": "min_rank", "cap": "max_rank"},
}


# Units of budgets in words.
_SPOKEN = {"params": "parameters", "bytes": "bytes", "flops": "FLOPs per token", "latency": "seconds"}
_SPOKEN |= {"experts": "experts", "ranks": "ranks"}


class Rounding(TypedDict):
    """How whole numbers were found, as plans keep it."""

    exact: bool
    gap: float | None
    method: str
    value: float
    bound: float
    optimum: float
    spent: float
    budget: float
    price: NotRequired[float | None]


#: Help of options that ranks and experts share.
FIX = "what blocks of this name or regular expression get in any case, as in 'layers.0.*=2' (repeatable)"
LATENCY = "seconds per unit of capacity, for a budget in seconds: {block: seconds}"


def counted_options(fix: Sequence[str], latency: str | None) -> dict[str, Any]:
    """Return what blocks get in any case and the seconds of a unit, as planners read them, from what was typed.

    Raises:
        InvalidInput: A fixed count that is no whole number, or a text that does not parse.
    """
    fixed = read_fixed(fix)
    broken = next((name for name, value in fixed.items() if value != value // 1), None)
    if broken is not None:
        raise InvalidInput(f"--fix {broken}={fixed[broken]:g} is no whole number.", "", "Ranks and experts are counted.")
    return {"latency": read_latency(latency) if latency else None, "fixed": {k: int(v) for k, v in fixed.items()}}


def check_budgets(request: Request, *names: str) -> None:
    """Refuse a request without a budget, or with two.

    Raises:
        InvalidInput: Not exactly one of the options was given.
    """
    budgets, flags = request.given(*names), " or ".join(flag_of(request, name) for name in names)
    if len(budgets) != 1:
        what = (
            f"{' and '.join(flag_of(request, name) for name in budgets)} were given together"
            if budgets
            else "No budget was given"
        )
        raise InvalidInput(f"{what}.", f"A plan has one: {flags}.", "Give exactly one.")


def blocks_of(scores: Scores | Sequence[Block]) -> Sequence[Block]:
    """Return the blocks of a score record, or the blocks themselves."""
    return scores.blocks if isinstance(scores, Scores) else tuple(scores)


def record_of(scores: Scores | Sequence[Block]) -> Scores | None:
    """Return the score record, where there is one."""
    return scores if isinstance(scores, Scores) else None


def matching(blocks: Sequence[Block], pattern: str) -> list[int]:
    """Return the indices of the blocks with this name, or else of those that the regular expression finds (one at least)."""
    names = [b.name for b in blocks]
    try:
        indices = [i for i, n in enumerate(names) if n == pattern] or [i for i, n in enumerate(names) if re.search(pattern, n)]
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is not a regular expression ({error}).", "", "Correct it.") from error
    if not indices:
        raise UnknownBlock(f"No block matches {pattern!r}.", f"The blocks are {', '.join(names[:3])}, ...", "Correct the name.")
    return indices


def make_plan(
    scores: Scores | Sequence[Block],
    kind: str,
    rule: str,
    decision: RuleResult,
    counts: np.ndarray,
    budget: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
) -> Plan:
    """Return the plan of a decision with its whole numbers.

    Args:
        scores: The scores, or blocks alone for a rule that reads none.
        kind: Of the plan.
        rule: Its name.
        decision: What the rule decided.
        counts: Whole numbers of every block, ``(K,)``.
        budget: What the plan records of its budget.
        hyperparameters: Recorded as they are.

    Raises:
        InvalidInput: The scores are damages of formats.
    """
    record, solution = record_of(scores), decision.solution
    if record is not None and "formats" in record.extra:
        raise InvalidInput(
            f"These scores are damages of formats: they do not plan {kind}.",
            "",
            "Plan bits from them: layerbudget plan bits FILE.",
        )
    return Plan(
        kind=kind,
        rule=rule,
        model=dict(record.model) if record is not None else {},
        blocks=tuple(PlanBlock.of(b, v, c) for b, v, c in zip(blocks_of(scores), decision.value, counts, strict=True)),
        budget=dict(budget),
        hyperparameters=to_jsonable(dict(hyperparameters)),
        certificate=to_jsonable(solution.certificate()) if solution is not None else {},
        scores_digest=record.digest if record is not None else None,
        data=dict(record.data) if record is not None else {},
        payload=_payload(kind, rule, decision.payload),
    )


def _payload(kind: str, rule: str, said: Mapping[str, Any]) -> Any:
    """All that a rule says beside its blocks, as the payload of its kind of plan; a field that there is not is refused."""
    payload = DECISIONS.find(kind).Payload
    known = [field.name for field in dataclasses.fields(payload)]
    for name in said.keys() - set(known):
        what = f"The rule {rule} gave a field {name}."
        raise InvalidInput(what, f"A plan of {kind} has {', '.join(known)}.", "Leave it out of the payload.")
    return payload(**said)


def constants_of(**named: Any) -> dict[str, Any]:
    """Return the constants of a program that were given; the program has the defaults of the others."""
    return {name: value for name, value in named.items() if value is not None}


def recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a plan records them: functions by their name, constants of the programs where they were given."""
    return {k: getattr(v, "name", v) for k, v in options.items() if k != "curves" and not (k in _CONSTANTS and v is None)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CapacityBounds:
    """Bounds of a plan of capacity under every rule: floors, caps, multiples, fixed blocks, and what a unit costs.

    ``kind`` is ``lora-experts`` or ``ranks``. Counts are multiples of ``multiple`` between ``floor`` and ``cap``, scalars or of
    shape ``(K,)``; ``base`` are experts that every block has anyway and that earn nothing, ``fixed`` the counts of some blocks
    by name or regular expression. The rest prices a unit; ``latency`` is in seconds by block.
    """

    kind: str
    floor: ArrayLike = 0.0
    cap: ArrayLike | None = None
    base: ArrayLike = 0.0
    multiple: int = 1
    fixed: Mapping[str, int] | None = None
    expert_rank: int = 8
    bytes_per_parameter: float | None = None
    latency: Mapping[str, float] | None = None

    def record(self) -> dict[str, Any]:
        """Return the terms as a plan records them."""
        named = {name: getattr(self, field) for field, name in _NAMES[self.kind].items()}
        return {**named, **self._pricing(), "fixed": dict(self.fixed or {})}

    def _pricing(self) -> dict[str, Any]:
        """Options of the price that were given."""
        prices = {name: getattr(self, name) for name in _PRICING}
        return {name: value for name, value in prices.items() if value is not None}

    def _priced(self, blocks: Sequence[Block], wanted: Budget) -> tuple[Vector, float]:
        """Cost per unit of every block, and the budget, in its unit."""
        pricing = self._pricing()
        for name in pricing:
            if wanted.unit not in _PRICING[name]:
                raise InvalidInput(
                    f"{name} has no meaning for a budget in {wanted.unit}.",
                    f"Budgets in {' or '.join(_PRICING[name])} read it.",
                    f"Leave {name} out, or state the budget in another unit.",
                )
        scale = {name: value for name, value in pricing.items() if name == "bytes_per_parameter"}
        cost = unit_cost(blocks, wanted.unit, capacity=self.kind, expert_rank=self.expert_rank, **pricing)
        return cost, number(amount_of(wanted, blocks, **scale), "budget")

    def problem(self, scores: Scores | Sequence[Block], wanted: Budget) -> Problem:
        """Return what a rule is to decide."""
        blocks, words = blocks_of(scores), _NAMES[self.kind]
        k = len(blocks)
        cost, limit = self._priced(blocks, wanted)
        sides = smallest_sides(blocks) if self.kind == "ranks" else np.full(k, np.inf)
        base = np.array(bound_vector(self.base, k, words.get("base", "base"), 0.0))
        low = np.minimum(sides, np.maximum(base, bound_vector(self.floor, k, words["floor"], 0.0)))
        high = np.minimum(sides, bound_vector(self.cap, k, words["cap"], np.inf))
        pinned = _pin(blocks, low, high, self.fixed, sides)
        base[pinned] = np.minimum(base, low)[pinned]
        return Problem(
            kind=self.kind,
            blocks=blocks,
            scores=record_of(scores),
            amount=cost,
            target=limit,
            low=low,
            high=high,
            held=pinned,
            base=base if self.kind == "lora-experts" else None,
            multiple=self.multiple,
        )


def smallest_sides(blocks: Sequence[Block]) -> Vector:
    """Return the largest rank that makes sense per block: the smallest side of its matrices, shape ``(K,)``."""
    return np.array([min(min(m.d_in, m.d_out) for m in b.modules) for b in blocks], dtype=np.float64)


def _pin(blocks: Sequence[Block], low: Vector, high: Vector, fixed: Mapping[str, int] | None, sides: Vector) -> np.ndarray:
    """Pin fixed blocks between equal bounds, in place; return the mask of them."""
    pinned = np.zeros(len(blocks), dtype=bool)
    for pattern, value in (fixed or {}).items():
        indices = matching(blocks, pattern)
        if number(value, f"the fixed count of {pattern}") != int(value):
            raise InvalidInput(f"{pattern} is fixed at {value}.", "Ranks and experts are counted.", "Give a whole number.")
        if (sides[indices] < value).any():
            k = indices[int(np.argmin(sides[indices]))]
            raise InvalidInput(
                f"{blocks[k].name} is fixed at rank {value}; its smallest side is {sides[k]:g}.", "", "Fix a smaller rank."
            )
        low[indices] = high[indices] = float(value)
        pinned[indices] = True
    return pinned


def one_budget(budgets: Mapping[str, Any], default: str) -> Budget:
    """Return the one budget that was given; none or several are refused."""
    named = {k: v for k, v in budgets.items() if v is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{len(named)} budgets were given ({', '.join(named) or 'none'}).",
            f"Give exactly one of {', '.join(budgets)}.",
            "For example budget='64M params'.",
        )
    (value,) = named.values()
    return parse_budget(value, default=default)


def decide(
    scores: Scores | Sequence[Block],
    terms: CapacityBounds,
    wanted: Budget,
    rule: str | Callable[..., Any],
    rule_options: Mapping[str, Any],
    record: Mapping[str, Any] | None = None,
    describer: Callable[[Problem, np.ndarray, float | None], Mapping[str, Any]] | None = None,
) -> Plan:
    """Return the plan of experts or ranks that a rule makes under terms and a budget.

    Args:
        scores: The scores, or blocks alone for a rule that reads none.
        terms: What binds every rule.
        wanted: The budget.
        rule: A rule by its name, or a function.
        rule_options: Options for the rule, None where they are not given.
        record: What the plan shall record beside terms and options.
        describer: Gives what the scores say of the whole numbers of any rule but a control, at the damping that the rule read.
    """
    chosen = find_rule(terms.kind, rule)
    options = chosen.resolve_options(rule_options)
    problem = terms.problem(scores, wanted)
    _check_floors(problem, terms, wanted, record or {})
    decision = chosen.decide(problem, options)
    if decision.counts is None:
        decision = _whole(chosen.name, problem, decision)
    counts = _checked(chosen.name, problem, decision, OWN_UNITS[terms.kind])
    budget = {"unit": wanted.unit, "limit": problem.target, "text": wanted.text, "spent": float(problem.amount @ counts)}
    hyper = {**(record or {}), **terms.record(), **recorded(options)}
    if describer is not None and not chosen.control:
        said = describer(problem, counts, options.get("damping"))
        decision = dataclasses.replace(decision, payload={**said, **decision.payload})
    return make_plan(scores, terms.kind, chosen.name, decision, counts, budget, hyper)


def _whole(name: str, problem: Problem, decision: RuleResult) -> RuleResult:
    """The decision of a rule that left whole numbers to the package: of its program, else in proportion to its values."""
    if decision.solution is None:
        fitted = in_proportion(problem, decision.value, name=name)
        return dataclasses.replace(decision, value=fitted.value, counts=fitted.counts)
    rounded = round_capacity(decision.solution, multiple=problem.multiple)
    return dataclasses.replace(decision, counts=rounded.counts, payload={"rounding": rounded.to_dict(), **decision.payload})


def _checked(name: str, problem: Problem, decision: RuleResult, units: str) -> np.ndarray:
    """Return the whole numbers of a rule, shape ``(K,)``; every rule keeps the budget and the bounds, also one of a user's own.

    Raises:
        InvalidInput: They are not whole, below zero, no multiples, outside of the bounds or above the budget.
    """
    if decision.target is not None:
        what = f"The rule {name} gave a target, which rules of sparsity have."
        raise InvalidInput(
            what, f"The budget of {units} is {spoken_amount(problem.target)}.", "Leave target out of the result."
        )
    counts = np.asarray(decision.counts, dtype=np.float64)
    expected = problem.amount.shape
    if counts.shape != expected:
        what = f"The rule {name} gave counts of shape {counts.shape}."
        raise InvalidInput(what, f"It must give {expected[0]} {units}, one number per block.", "Correct it.")
    step = problem.multiple
    for wrong, feasible in (
        (~(counts == np.round(counts)), "They are whole numbers"),
        (counts < 0, "They are zero or more"),
        (counts % step != 0, f"They are multiples of {step}"),
        (counts < problem.low - _NEAR, "The smallest that it may have are {low:g}"),
        (counts > problem.high + _NEAR, "The most that it may have are {high:g}"),
    ):
        if wrong.any():
            k = int(np.argmax(wrong))
            bounds = feasible.format(low=problem.low[k], high=problem.high[k])
            what = f"The rule {name} gave {problem.blocks[k].name} {counts[k]:g} {units}."
            raise InvalidInput(what, f"{bounds}.", "Correct the rule, or return values without counts: they are fitted.")
    spent = float(problem.amount @ counts)
    if spent > problem.target * (1 + 1e-12):
        what = f"The counts of the rule {name} cost {spoken_amount(spent)}."
        said = f"The budget is {spoken_amount(problem.target)}."
        raise InvalidInput(what, said, "Correct the rule, or return values without counts: they are fitted.")
    return counts.astype(np.int64)


def _check_floors(problem: Problem, terms: CapacityBounds, wanted: Budget, record: Mapping[str, Any]) -> None:
    """Refuse a budget that the floors do not leave anything of, with the smallest one that works, as it is typed."""
    step, cost, limit = problem.multiple, problem.amount, problem.target
    whole = np.ceil(problem.low / step - 1e-9) * step
    least = float(cost @ (whole if (whole <= problem.high).all() else problem.low))
    if limit >= least * (1 - 1e-12):
        return
    ranks, unit = terms.kind == "ranks", wanted.unit
    if ranks and record.get("mean_rank") is not None:
        smallest = f"--mean-rank {math.ceil(least / float(rank_parameters(problem.blocks).sum()) * 1e4 - 1e-6) / 1e4:g}"
    elif unit == "experts":
        smallest = f"--total {math.ceil(least)}"
    else:
        smallest = f"--budget '{least!r} s'" if unit == "latency" else f"--budget '{math.ceil(least)} {unit}'"
    fixed, free = float(cost[problem.held] @ problem.low[problem.held]), cost[~problem.held]
    words = "Give that much or more"
    if limit < fixed:
        words += f", or fix less: the blocks of --fix alone take {spoken_amount(fixed)}"
    elif free.size and limit - fixed >= float(free.min()) * step and np.max(terms.floor if ranks else terms.base) > 0:
        words += f", or let blocks go without any: --{_NAMES[terms.kind]['floor' if ranks else 'base'].replace('_', '-')} 0"
    raise InfeasibleBudget(
        f"The budget {wanted.text} is {spoken_amount(limit)} {_SPOKEN[unit]}, and the smallest {OWN_UNITS[terms.kind]} that "
        f"every block must have take {spoken_amount(least)}.",
        f"The smallest budget is {smallest}.",
        f"{words}.",
    )


def _allocated(
    problem: Problem, weights: Vector, *, method: str = "auto", spend: str = "exactly", **options: Any
) -> RuleResult:
    """Solve the program of the paper and round."""
    base = 0.0 if problem.base is None else problem.base
    solution = allocate(
        weights, problem.amount, problem.target, spend=spend, base=base, lower=problem.low, upper=problem.high, **options
    )
    rounded = round_capacity(solution, method=method, multiple=problem.multiple)
    return RuleResult(value=solution.value, counts=rounded.counts, solution=solution, payload={"rounding": rounded.to_dict()})


def in_proportion(problem: Problem, value: ArrayLike, *, method: str = "auto", name: str = "in proportion") -> RuleResult:
    """Return whole capacities in proportion to ``value``, as far as the bounds allow, that cost the budget or a little less.

    ``e_k = clip(t v_k, l_k, u_k)`` with the ``t`` at which it costs the budget: the unit of ``v`` changes nothing. All zeros
    mean the same everywhere. Whole numbers follow by the program of the paper with the log utility and the weights
    ``c_k (1 + t v_k)``, whose optimum these ``e_k`` are.

    Args:
        problem: The problem.
        value: Zero or more, shape ``(K,)``.
        method: ``auto`` (the best whole numbers) or ``floor`` (rounded down).
        name: What the rule is called in an error.

    Raises:
        InvalidInput: A value below zero.
        InfeasibleBudget: The caps cannot take the budget.
    """
    v, cost, low, high = np.asarray(value, dtype=np.float64), problem.amount, problem.low, problem.high
    if (v < 0).any():
        k = int(np.argmin(v))
        what = f"The rule {name} gave {problem.blocks[k].name} the value {v[k]:g}."
        raise InvalidInput(what, "Capacities are in proportion to values, which are zero or more.", "Correct it.")
    _check_caps(problem)
    v = np.maximum(v / v.max(), 1e-12) if v.any() else np.ones(v.size)
    level, _, _ = piecewise_root(cost * v, np.zeros(v.size), cost * low, cost * high, problem.target)
    wish = np.minimum(level * v, high.max())
    ground = 1.0 + np.maximum(wish - (0.0 if problem.base is None else problem.base), 0.0)
    decision = _allocated(problem, cost * (ground / ground.max()), method=method)
    return RuleResult(value=decision.value, counts=decision.counts)


def _check_caps(problem: Problem) -> None:
    """Refuse a budget that blocks cannot take under their caps."""
    most = float(problem.amount @ problem.high)
    if problem.target > most * (1 + 1e-12):
        sides = smallest_sides(problem.blocks) if problem.kind == "ranks" else np.inf
        raised = f", or raise {_NAMES[problem.kind]['cap']}" if ((problem.high < sides) & ~problem.held).any() else ""
        raise InfeasibleBudget(
            f"The caps can take {spoken_amount(most)} and the budget is {spoken_amount(problem.target)}.",
            f"All of it is spent in proportion, so it is at most {spoken_amount(most)}.",
            f"Lower the budget{raised}.",
        )


@rule("lora-experts", "permuted", control=True, summary="the same on shuffled scores: a control")
@rule("lora-experts", "mdl", summary="the program of the paper on the scores")
@rule("ranks", "permuted", control=True, summary="the same on shuffled scores: a control")
@rule("ranks", "mdl", summary="the program of the paper on the scores")
def _by_scores(
    problem: Problem,
    *,
    exponent: float = 1.0,
    exponent_on: str = "density",
    damping: float | None = None,
    smoothing: float = 0.0,
    utility: Any = "log",
    spend: str = "exactly",
    method: str = "auto",
    alpha: float | None = None,
    gamma: float | None = None,
    units: str | None = None,
) -> RuleResult:
    """Water-filling with the scores as weights (:func:`layerbudget.solvers.allocate`), rounded with a proven gap."""
    constants = constants_of(alpha=alpha, gamma=gamma, units=units)
    q, chosen = problem.weights(damping, smoothing), {"exponent": exponent, "exponent_on": exponent_on, "utility": utility}
    decision = _allocated(problem, q, spend=spend, method=method, **chosen, **constants)
    spread = float(q.std() / q.mean())
    if len(q) < 2 or spread >= FLAT:
        return decision
    return dataclasses.replace(decision, payload={**decision.payload, "flat_scores": spread})
