"""Plans and other scores: a plan made again from them, and what a plan made on one task costs on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..decisions.sparsity.plan import default_cap
from ..errors import InvalidInput, ModelMismatch
from ..plan import Plan
from ..planning.capacity import Terms, decide
from ..planning.costs import UNITS, Budget, amount_of, parse_budget, rank_parameters, unit_cost
from ..planning.rule import find_rule
from ..scores import Scores
from ..solvers.inputs import choice
from ..solvers.transfer import Transfer, transfer_allocation, transfer_sparsity


def plan_again(
    plan: Plan,
    scores: Scores,
    *,
    rule: str | None = None,
    lower: ArrayLike = 0.0,
    fixed: Mapping[str, int] | None = None,
) -> Plan:
    """Return a plan of ranks or experts made again from other scores of the same blocks; only the scores differ.

    Budget, price, floors, caps, multiples, fixed blocks and the options of the rule are those that the plan records; a plan
    made by hand keeps what its counts cost. A damping names a row of the plan's own scores; new scores of one row are read as
    they are. What the caps cannot take of the budget is left.

    Args:
        plan: The plan in force.
        scores: New scores, one per block of the plan.
        rule: Another rule; by default the plan's own, or ``mdl`` where that does not read these scores.
        lower: Floors on top of the plan's own, a scalar or shape ``(K,)``.
        fixed: Counts of blocks on top of those that the plan fixes, whatever its floors and caps.

    Raises:
        InvalidInput: A plan of another kind.
        ModelMismatch: Scores of other blocks.
        InfeasibleBudget: The floors cost more than the budget.
    """
    if plan.kind not in ("ranks", "experts"):
        raise InvalidInput(f"A plan of kind {plan.kind!r} cannot be made again.", "Ranks and experts can.", "Plan anew.")
    if scores.names != plan.names:
        told = f"The plan has {len(plan.blocks)} blocks and the scores {len(scores.names)}, not the same ones."
        raise ModelMismatch(told, "", "Score the blocks of the plan.")
    held = plan.hyperparameters
    terms = Terms.of(plan) if held else Terms(kind=plan.kind, floor=np.minimum(plan.counts, 1))
    floor = np.maximum(np.array(terms.floor, dtype=float), lower)
    terms = dataclasses.replace(terms, floor=floor, fixed={**(terms.fixed or {}), **(fixed or {})})
    chosen = find_rule(plan.kind, rule or _rule_for(plan, scores))
    budget = _budget(plan, scores)
    problem = terms.problem(scores, budget)
    budget = dataclasses.replace(budget, amount=min(budget.amount, float(problem.amount @ problem.high)))
    given = {name: held[name] for name in chosen.options if held.get(name) is not None}
    if len(scores.damping) == 1 and not np.isclose(scores.damping[0], given.get("damping", scores.damping[0])):
        del given["damping"]
    new = decide(scores, terms, budget, chosen.name, given)
    return dataclasses.replace(new, budget={**new.budget, "limit": problem.target})


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


def transfer_scores(
    source: Scores,
    target: Scores,
    *,
    program: str = "sparsity",
    sparsity: float | None = None,
    max_sparsity: ArrayLike | None = None,
    penalty: str | None = None,
    budget: str | float | None = None,
    max_experts: float | None = None,
    utility: str | None = None,
    exponent: float = 1.0,
    exponent_on: str = "density",
    damping: float | None = None,
    smoothing: float = 0.0,
) -> Transfer:
    """Return what deciding on the source's scores costs under the target's objective, beside deciding on its own.

    Args:
        source: Scores that the decision is made from.
        target: Scores of the task that it is used on; the same blocks.
        program: ``sparsity`` or ``experts``.
        sparsity: Global sparsity, 0.5 by default.
        max_sparsity: Its cap, :func:`layerbudget.decisions.sparsity.plan.default_cap` by default.
        penalty: Of sparsity, ``quadratic`` by default.
        budget: Of experts, see :func:`layerbudget.planning.costs.parse_budget`; 160 experts by default.
        max_experts: Their cap, none by default; every block has one expert at least.
        utility: Of experts, ``log`` by default.
        exponent: Exponent of the weights.
        exponent_on: ``density`` or ``block``.
        damping: Which row of the scores.
        smoothing: Added to every score, in units of the mean score; the bounds need positive weights.

    Raises:
        ModelMismatch: The records hold different blocks.
        InvalidInput: An option of the other program.
        UnknownUnit, InfeasibleBudget: As the programs raise them.
    """
    choice(program, "program", ("sparsity", "experts"))
    own = {"sparsity": {"sparsity": sparsity, "max_sparsity": max_sparsity, "penalty": penalty}}
    own["experts"] = {"budget": budget, "max_experts": max_experts, "utility": utility}
    other = own["experts" if program == "sparsity" else "sparsity"]
    for name in (n for n, value in other.items() if value is not None):
        known = f"It reads {', '.join(own[program])}."
        raise InvalidInput(f"The program {program} does not read {name}.", known, f"Leave {name} out.")
    if source.names != target.names or (source.numel != target.numel).any():
        raise ModelMismatch(
            f"The source has {len(source.names)} blocks and the target {len(target.names)}, not the same ones.",
            "Both records need the same blocks of one model.",
            "Score both tasks with one model and one partition.",
        )
    q, r = source.weights(damping, smoothing=smoothing), target.weights(damping, smoothing=smoothing)
    shared: dict[str, Any] = {"exponent": exponent, "exponent_on": exponent_on, "spend": "exactly"}
    if program == "sparsity":
        share = 0.5 if sparsity is None else sparsity
        cap = default_cap(share) if max_sparsity is None else max_sparsity
        shared |= {} if penalty is None else {"penalty": penalty}
        return transfer_sparsity(q, r, source.numel, sparsity=share, max_sparsity=cap, **shared)
    wanted = parse_budget("160 experts" if budget is None else budget, default="experts")
    cost = unit_cost(source.blocks, wanted.unit, capacity="experts", expert_rank=8)
    upper = None if max_experts is None else np.full(cost.size, float(max_experts))
    shared |= {} if utility is None else {"utility": utility}
    return transfer_allocation(q, r, cost, amount_of(wanted, source.blocks), base=1.0, upper=upper, **shared)
