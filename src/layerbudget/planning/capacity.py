"""From scores to whole capacities per block, in the user's unit: what plans of experts and of ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..plan import Plan
from ..records import Block
from ..scores import Scores
from .common import make_plan, recorded
from .costs import Budget, parse_budget
from .rule import Decision, as_rule
from .rules.capacity import in_proportion
from .terms import Terms


def decide(
    scores: Scores | Sequence[Block], terms: Terms, wanted: Budget, rule: str | Callable[..., Any], given: Mapping[str, Any],
    record: Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """Let a rule decide under terms and a budget, and bind its decision into a plan.

    Args:
        scores: Scores, or blocks alone for rules that need none.
        terms: What binds the plan.
        wanted: The budget.
        rule: Name of the rule, or a function.
        given: Options for it; None means not given.
        record: What the plan shall record beside terms and options.

    Raises:
        InvalidInput: An option that the rule does not read, or a decision that is none.
        InfeasibleBudget: The budget is below the floors, or cannot be spent under the caps.
    """
    chosen = as_rule(terms.kind, rule)
    options = chosen.resolve_options(given)
    problem = terms.problem(scores, wanted)
    decision: Decision = chosen.decide(problem, options)
    if decision.counts is None:
        value = np.asarray(decision.value, dtype=np.float64)
        if value.shape != problem.amount.shape or not np.isfinite(value).all():
            raise InvalidInput(
                f"The rule {chosen.name} gave values of shape {value.shape}.",
                f"It must give {problem.amount.size} finite ones.",
                "Correct it.",
            )
        decision = in_proportion(problem, value)
    counts = np.asarray(decision.counts)
    budget = {"unit": wanted.unit, "limit": problem.target, "text": wanted.text, "spent": float(problem.amount @ counts)}
    hyper = {**(record or {}), **terms.record(), **recorded(options)}
    return make_plan(scores, terms.kind, chosen.name, decision.value, counts, budget, hyper, decision.solution, decision.extra)


def one_budget(given: Mapping[str, Any], default: str) -> Budget:
    """The one budget that was given.

    Raises:
        InvalidInput: None was, or several.
    """
    named = {k: v for k, v in given.items() if v is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{len(named)} budgets were given ({', '.join(named) or 'none'}).",
            f"Give exactly one of {', '.join(given)}.",
            "For example budget='64M params'.",
        )
    name, value = next(iter(named.items()))
    if name == "flops_fraction":
        return Budget(amount=float(value), unit="flops", relative=True, text=f"{float(value):.4%} flops")
    return parse_budget(value, default=default)
