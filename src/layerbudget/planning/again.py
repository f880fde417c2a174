"""Make a plan again from other scores: the same kind, budget, price and constraints; only the scores differ."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from ..costs import UNITS, Budget, rank_parameters
from ..errors import InvalidInput, ModelMismatch
from ..plan import Plan
from ..scores.record import Scores
from .capacity import decide
from .rule import find_rule
from .terms import Terms


def plan_again(
    plan: Plan, scores: Scores, *, rule: str | None = None, lower: ArrayLike = 0.0, upper: ArrayLike | None = None
) -> Plan:
    """Make a plan of ranks or experts again from other scores of the same blocks.

    Budget (in the plan's own unit), price, floors, caps, multiples, fixed blocks and the options of the rule are those that
    the plan records. A plan without such a record (made by hand) keeps what its counts cost: parameters for ranks, experts
    for experts.

    Args:
        plan: The plan in force.
        scores: New scores, one per block of the plan.
        rule: Another rule; options that it does not read are then left behind. By default the plan's own; ``mdl`` where that
            reads no scores, or other scores than these (by rank).
        lower: Floors on top of the plan's own, a scalar or shape ``(K,)``.
        upper: Caps on top of the plan's own.

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
    chosen = find_rule(plan.kind, rule or _rule_for(plan, scores))
    given = {name: held[name] for name in chosen.options if held.get(name) is not None}
    return decide(scores, terms, _budget(plan, scores), chosen.name, given)


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
