"""The difference of two plans, grids of plans over budgets and exponents, and what a plan made on one task costs on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arguments import checked
from ..budget import amount_of, parse_budget, unit_cost
from ..decision import DECISIONS, Decision, decision_of
from ..decisions.apply import maker
from ..decisions.sparsity import default_cap
from ..errors import InfeasibleBudget, InvalidInput, ModelMismatch
from ..plan import Plan
from ..registry import options_of, resolve_options
from ..scores import Scores
from ..solvers.inputs import Vector, choice
from ..solvers.transfer import Transfer, spearman, transfer_allocation, transfer_sparsity


@checked
def diff_plans(first: Plan, second: Plan) -> dict[str, Any]:
    """Return ``{kind, rules, budgets, moved, largest, rank_correlation, same, blocks}``: how two plans of one kind differ.

    ``moved`` is half the sum of absolute differences of counts: what would have to change hands. ``blocks`` has a row ``{name,
    first, second, difference, count_difference}`` by block, of which ``largest`` differs most; the rank correlation is
    Spearman's, of the values. Rows of plans of formats also have ``first_format`` and ``second_format``.

    Raises:
        ModelMismatch: The plans name different blocks or are of different kinds.
    """
    if first.names != second.names or first.kind != second.kind:
        only = sorted(set(first.names) ^ set(second.names))[:4]
        raise ModelMismatch(
            f"A {first.kind} plan of {len(first.blocks)} blocks and a {second.kind} plan of {len(second.blocks)} do not compare"
            + (f" (only in one: {', '.join(only)})." if only else "."),
            "Both need the same kind and the same blocks.",
            "Make both plans from scores with one partition.",
        )
    change, counts = second.values - first.values, second.counts - first.counts
    rows = [
        {"name": n, "first": float(a), "second": float(b), "difference": float(d), "count_difference": int(c)}
        for n, a, b, d, c in zip(first.names, first.values, second.values, change, counts, strict=True)
    ]
    one, two = (decision_of(plan).labels(plan) for plan in (first, second))
    if one is not None and two is not None:
        rows = [{**row, "first_format": a, "second_format": b} for row, a, b in zip(rows, one, two, strict=True)]
    return {
        "kind": first.kind,
        "rules": (first.rule, second.rule),
        "budgets": (dict(first.budget), dict(second.budget)),
        "moved": float(np.abs(counts).sum() / 2),
        "largest": rows[int(np.argmax(np.abs(change)))],
        "rank_correlation": spearman(first.values, second.values),
        "same": bool((counts == 0).all()),
        "blocks": rows,
    }


def swept() -> tuple[str, ...]:
    """Return the kinds whose plans at many budgets are made from one measurement."""
    return tuple(name for name, decision in DECISIONS.all().items() if decision.swept)


@checked
def sweep(
    scores: Scores,
    *,
    kind: str = "sparsity",
    budgets: Sequence[float | str] | None = None,
    exponents: Sequence[float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return ``{kind, budgets, exponents, rows}``, a plan for every point of a grid of budgets and exponents.

    A row has the ``budget`` asked for and what was ``spent``; the ``exponent``; ``status`` and ``shadow_price`` of the program;
    ``smallest``, ``largest`` and ``spread`` of the values of the blocks; and ``front``, whether no other row beats it in both
    spending and value. Its ``value`` is the predicted penalty (kinds that harm) or utility under one yardstick, the scores
    themselves at exponent 1; by rank it is the measured gain of the ranks that are bought, and of bits the damage in nats.
    Rows by rank have ``uniform_share`` and ``noise_share``, rows of bits ``bits``, ``bytes`` of the file, the ``mix`` of
    llama.cpp that is named, else the best one that fits, with ``mix_value`` and ``mix_bytes``. A budget that cannot be planned
    has a row of ``budget``, ``exponent``, ``status`` ``infeasible`` and ``why``, unless none can.

    Args:
        scores: The scores.
        kind: ``sparsity`` (budgets are global sparsities), ``lora-experts`` (totals), ``ranks`` (mean ranks) or ``bits``.
        budgets: Budgets; of bits also mixes of llama.cpp, whose bytes they are, by default all of them.
        exponents: Exponents of the weights; the rule's own by default. A rule that reads none refuses them.
        **options: Passed on to the ``plan_*`` function.
    """
    what = DECISIONS.find(choice(kind, "kind", swept()))
    make = maker(what.name)
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in {what.budget, "budget", "like"} & set(options):
        problem = f"{name} was given to a sweep, whose plans have the budgets of its grid."
        raise InvalidInput(problem, "", f"Leave {name} out, and name the grid: budgets, or --budgets on the command line.")
    if what.predicts:
        resolve_options(f"A plan of kind {kind}", options_of(make), {**options, "exponent": exponents})
    damping, smoothing = options.get("damping"), options.get("smoothing") or 0.0
    q = np.zeros(0) if what.predicts else scores.weights(damping, smoothing=smoothing)
    rows, last = list[dict[str, Any]](), None
    asked = [what.budget_option(budget) for budget in (what.budgets(scores) if budgets is None else budgets)]
    for keyword in asked:
        (budget,) = keyword.values()
        for exponent in exponents or (None,):
            point_options = options if exponent is None else {**options, "exponent": exponent}
            try:
                plan = make(scores, **keyword, **point_options)
            except InfeasibleBudget as error:
                last, status = error, {"status": "infeasible", "why": str(error)}
                rows.append({"budget": budget, "exponent": exponent, **status, "front": False})
                continue
            rows.append({"budget": budget, **_row(plan, what, q, what.worth_of(plan, scores, damping))})
    more, better = (1.0 if what.harms else -1.0), (-1.0 if what.harms or what.predicts else 1.0)
    solved = [row for row in rows if "why" not in row]
    if last is not None and not solved:
        raise last
    points = np.array([[r["spent"] * more, r["value"] * better] for r in solved])
    for row, p in zip(solved, points, strict=True):
        row["front"] = not ((points >= p).all(1) & (points > p).any(1)).any()
    return {
        "kind": kind,
        "budgets": [b for keyword in asked for b in keyword.values()],
        "exponents": list(exponents or ()),
        "rows": rows,
    }


def _row(plan: Plan, kind: Decision, q: Vector, worth: Mapping[str, Any] | None) -> dict[str, Any]:
    value, c = plan.counts / plan.numel if kind.harms else plan.counts, plan.certificate
    if kind.predicts:
        value, predicted = plan.values, plan.payload.predicted
    elif worth is not None:
        predicted = worth["value"]
    else:
        predicted = q @ value**2 if kind.harms else q @ np.log1p(value)
    return {
        "exponent": plan.hyperparameters.get("exponent"),
        "spent": float(plan.budget["spent"]),
        "value": float(predicted),
        "status": c.get("status"),
        "shadow_price": c.get("shadow_price"),
        "smallest": float(value.min()),
        "largest": float(value.max()),
        "spread": float(value.std()),
        **kind.swept_row(plan),
        **(worth or {}),
    }


@checked
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
        program: ``sparsity`` or ``lora-experts``.
        sparsity: Global sparsity, 0.5 by default.
        max_sparsity: Its cap, :func:`layerbudget.decisions.sparsity.plan.default_cap` by default.
        penalty: Of sparsity, ``quadratic`` by default.
        budget: Of experts, see :func:`layerbudget.budget.parse_budget`; 160 experts by default.
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
    choice(program, "program", ("sparsity", "lora-experts"))
    program_options = {"sparsity": {"sparsity": sparsity, "max_sparsity": max_sparsity, "penalty": penalty}}
    program_options["lora-experts"] = {"budget": budget, "max_experts": max_experts, "utility": utility}
    other = program_options["lora-experts" if program == "sparsity" else "sparsity"]
    for name in (n for n, value in other.items() if value is not None):
        known = f"It reads {', '.join(program_options[program])}."
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
    cost = unit_cost(source.blocks, wanted.unit, capacity="lora-experts", expert_rank=8)
    upper = None if max_experts is None else np.full(cost.size, float(max_experts))
    shared |= {} if utility is None else {"utility": utility}
    return transfer_allocation(q, r, cost, amount_of(wanted, source.blocks), base=1.0, upper=upper, **shared)
