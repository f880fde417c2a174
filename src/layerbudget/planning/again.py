"""Make a plan again from other scores: the same kind, budget, price and constraints; only the scores differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..costs import UNITS, rank_parameters
from ..errors import InvalidInput, ModelMismatch
from ..plan import Plan
from ..scores.record import Scores
from .capacity import plan_experts, plan_ranks
from .rule import find_rule

# What a plan records of the options of its maker; the budget is taken from the plan itself.
_SHARED = ("fixed", "bytes_per_parameter", "latency")
_CAPACITY: Mapping[str, tuple[str, ...]] = {
    "ranks": ("multiple", "min_rank", "max_rank", *_SHARED),
    "experts": ("min_experts", "lower", "max_experts", "expert_rank", "router", *_SHARED),
}
_FLOOR = {"ranks": "min_rank", "experts": "lower"}
_CAP = {"ranks": "max_rank", "experts": "max_experts"}


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
    if plan.kind not in _CAPACITY:
        raise InvalidInput(f"A plan of kind {plan.kind!r} cannot be made again.", "Ranks and experts can.", "Plan anew.")
    if scores.names != plan.names:
        raise ModelMismatch(
            f"The plan has {len(plan.blocks)} blocks and the scores {len(scores.names)}, not the same ones.", "",
            "Score the blocks of the plan.",
        )  # fmt: skip
    hyper = plan.hyperparameters
    options: dict[str, Any] = {name: hyper[name] for name in _CAPACITY[plan.kind] if hyper.get(name) is not None}
    floor = options.get(_FLOOR[plan.kind], 0.0) if hyper else np.minimum(plan.counts, 1)
    options[_FLOOR[plan.kind]] = np.maximum(np.array(floor, dtype=float), lower)
    if upper is not None:
        options[_CAP[plan.kind]] = np.minimum(np.array(options.get(_CAP[plan.kind], np.inf), dtype=float), upper)
    chosen = find_rule(plan.kind, rule or _rule_for(plan, scores))
    options |= {name: hyper[name] for name in chosen.options if hyper.get(name) is not None}
    budget = _budget(plan, scores)
    if plan.kind == "ranks":
        return plan_ranks(scores, rule=chosen.name, budget=budget, **options)
    return plan_experts(scores, rule=chosen.name, budget=budget, **options)


def _rule_for(plan: Plan, scores: Scores) -> str:
    names = ("layerif", "alphalora") if plan.kind == "experts" else ()
    by_rank = plan.rule == "by-rank" and "increments" in scores.extra
    return plan.rule if plan.rule in (*names, "mdl") or by_rank else "mdl"


def _budget(plan: Plan, scores: Scores) -> str:
    unit, limit = plan.budget.get("unit"), plan.budget.get("limit")
    if unit in UNITS and limit is not None and plan.hyperparameters:
        return f"{float(limit)!r} {'s' if unit == 'latency' else unit}"
    cost = rank_parameters(scores.blocks) if plan.kind == "ranks" else np.ones(len(plan.blocks))
    return f"{float(cost @ plan.counts)!r} {'params' if plan.kind == 'ranks' else 'experts'}"
