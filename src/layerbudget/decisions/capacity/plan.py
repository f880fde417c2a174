"""From scores to a plan of ranks or LoRA experts, by any rule. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...budget import OWN_UNITS, Budget
from ...errors import InvalidInput
from ...plan import Plan
from ...records import Block
from ...scores import Scores
from ...solvers.inputs import spoken_amount
from ...solvers.rounding import round_capacity
from ..making import make_plan, recorded
from ..rules import Problem, RuleResult, find_rule
from .bounds import CapacityBounds, check_floors
from .rules import in_proportion

_NEAR = 1e-9  # how far a bound that is no whole number is rounded


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
    check_floors(problem, terms, wanted, record or {})
    decision = chosen.decide(problem, options)
    if decision.counts is None:
        decision = _whole(chosen.name, problem, decision)
    counts = _checked(chosen.name, problem, decision, OWN_UNITS[terms.kind])
    spent = min(float(problem.amount @ counts), problem.target)  # a sum of seconds may be the last digit above it
    budget = {"unit": wanted.unit, "limit": problem.target, "text": wanted.text, "spent": spent}
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
