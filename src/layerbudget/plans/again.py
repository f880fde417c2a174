"""Make a plan again from other scores: the same kind, budget, price and constraints; only the scores differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput, ModelMismatch
from ..plan import Plan
from ..planning.capacity import decide
from ..planning.costs import UNITS, Budget, rank_parameters
from ..planning.rule import Rule, find_rule
from ..planning.terms import Terms
from ..scores import Scores


def plan_again(
    plan: Plan, scores: Scores, *, rule: str | None = None, lower: ArrayLike = 0.0, upper: ArrayLike | None = None,
    fixed: Mapping[str, int] | None = None,
) -> Plan:  # fmt: skip
    """Make a plan of ranks or experts again from other scores of the same blocks.

    Budget (in the plan's own unit), price, floors, caps, multiples, fixed blocks and the options of the rule are those that
    the plan records. A plan without such a record (made by hand) keeps what its counts cost: parameters for ranks, experts
    for experts. A damping names a row of the plan's own scores; new scores of one row are read as they are. What the caps
    cannot take of the budget is left.

    Args:
        plan: The plan in force.
        scores: New scores, one per block of the plan.
        rule: Another rule; options that it does not read are then left behind. By default the plan's own; ``mdl`` where that
            reads no scores, or other scores than these (by rank).
        lower: Floors on top of the plan's own, a scalar or shape ``(K,)``.
        upper: Caps on top of the plan's own.
        fixed: Counts of blocks on top of those that the plan fixes, whatever its floors and caps.

    Returns:
        The new plan.

    Raises:
        InvalidInput: A plan of another kind.
        ModelMismatch: Scores of other blocks.
        InfeasibleBudget: The floors cost more than the budget.
    """
    if plan.kind not in ("ranks", "experts"):
        raise InvalidInput(f"A plan of kind {plan.kind!r} cannot be made again.", "Ranks and experts can.", "Plan anew.")
    if scores.names != plan.names:
        raise ModelMismatch(
            f"The plan has {len(plan.blocks)} blocks and the scores {len(scores.names)}, not the same ones.", "",
            "Score the blocks of the plan.",
        )  # fmt: skip
    held = plan.hyperparameters
    terms = Terms.of(plan) if held else Terms(kind=plan.kind, floor=np.minimum(plan.counts, 1))
    terms = dataclasses.replace(terms, floor=np.maximum(np.array(terms.floor, dtype=float), lower))
    if upper is not None:
        cap = np.inf if terms.cap is None else np.array(terms.cap, dtype=float)
        terms = dataclasses.replace(terms, cap=np.minimum(cap, upper))
    terms = dataclasses.replace(terms, fixed={**(terms.fixed or {}), **(fixed or {})})
    chosen = find_rule(plan.kind, rule or _rule_for(plan, scores))
    budget = _budget(plan, scores)
    problem = terms.problem(scores, budget)
    most = float(problem.amount @ problem.high)
    new = decide(
        scores, terms, dataclasses.replace(budget, amount=min(budget.amount, most)), chosen.name, _given(held, scores, chosen)
    )
    return dataclasses.replace(new, budget={**new.budget, "limit": problem.target})


def _given(held: Mapping[str, Any], scores: Scores, chosen: Rule) -> dict[str, Any]:
    """The options of the rule that the plan records; a damping only where the scores have a choice of rows, or that one."""
    given = {name: held[name] for name in chosen.options if held.get(name) is not None}
    if len(scores.damping) == 1 and not np.isclose(scores.damping[0], given.get("damping", scores.damping[0])):
        del given["damping"]
    return given


def _rule_for(plan: Plan, scores: Scores) -> str:
    names = ("layerif", "alphalora") if plan.kind == "experts" else ()
    by_rank = plan.rule == "by-rank" and "increments" in scores.extra
    return plan.rule if plan.rule in (*names, "mdl") or by_rank else "mdl"


def _budget(plan: Plan, scores: Scores) -> Budget:
    unit, limit = plan.budget.get("unit"), plan.budget.get("limit")
    if unit in UNITS and limit is not None and plan.hyperparameters:
        return Budget(amount=float(limit), unit=unit, text=str(plan.budget.get("text", "")))
    cost = rank_parameters(scores.blocks) if plan.kind == "ranks" else np.ones(len(plan.blocks))
    return Budget(amount=float(cost @ plan.counts), unit="params" if plan.kind == "ranks" else "experts", text="as it was")
