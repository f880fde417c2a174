"""The difference of two plans, and a grid of plans over budgets and exponents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..decisions.apply import maker, makers
from ..decisions.ranks.plan import increments_of
from ..errors import ModelMismatch
from ..kinds import KINDS, Kind
from ..plan import Plan
from ..records import Result
from ..registry import options_of, resolve_options
from ..scores import Scores
from ..solvers.inputs import Vector, choice
from ..solvers.transfer import spearman


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanDifference(Result):
    """How two plans differ.

    Attributes:
        kind: Of both plans.
        rules: Of the first and the second.
        budgets: Of the first and the second.
        moved: Half the sum of absolute differences of counts: what would have to change hands.
        largest: The row of ``blocks`` that differs most.
        rank_correlation: Spearman's, of the values.
        same: Whether all counts are equal.
        blocks: ``{name, first, second, difference, count_difference}`` by block.
    """

    kind: str
    rules: tuple[str, str]
    budgets: tuple[Mapping[str, Any], Mapping[str, Any]]
    moved: float
    largest: Mapping[str, Any]
    rank_correlation: float
    same: bool
    blocks: Sequence[Mapping[str, Any]]


def diff_plans(first: Plan, second: Plan) -> PlanDifference:
    """Return what differs between two plans for the same blocks.

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
    return PlanDifference(
        kind=first.kind,
        rules=(first.rule, second.rule),
        budgets=(dict(first.budget), dict(second.budget)),
        moved=float(np.abs(counts).sum() / 2),
        largest=rows[int(np.argmax(np.abs(change)))],
        rank_correlation=spearman(first.values, second.values),
        same=bool((counts == 0).all()),
        blocks=rows,
    )


def sweep(
    scores: Scores,
    *,
    kind: str = "sparsity",
    budgets: Sequence[float],
    exponents: Sequence[float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return ``{kind, budgets, exponents, rows}``, a plan for every point of a grid of budgets and exponents.

    A row has the ``budget`` asked for and what was ``spent``; the ``exponent``; ``status`` and ``shadow_price`` of the program;
    ``smallest``, ``largest`` and ``spread`` of the values of the blocks; and ``front``, whether no other row beats it in both
    spending and value. Its ``value`` is the predicted penalty (kinds that harm) or utility under one yardstick, the scores
    themselves at exponent 1; by rank it is the measured gain of the ranks that are bought, and of bits the damage in nats.

    Args:
        scores: The scores.
        kind: ``sparsity`` (budgets are global sparsities), ``experts`` (totals), ``ranks`` (mean ranks) or ``bits``.
        budgets: Budgets.
        exponents: Exponents of the weights; the rule's own by default. A rule that reads none refuses them.
        **options: Passed on to the ``plan_*`` function.
    """
    what = KINDS.find(choice(kind, "kind", tuple(makers())))
    make = maker(what.name)
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    if what.predicts:
        resolve_options(f"A plan of kind {kind}", options_of(make), {**options, "exponent": exponents})
    damping, smoothing = options.get("damping"), options.get("smoothing") or 0.0
    q = np.zeros(0) if what.predicts else scores.weights(damping, smoothing=smoothing)
    rows = []
    for budget in budgets:
        for exponent in exponents or (None,):
            own = options if exponent is None else {**options, "exponent": exponent}
            plan = make(scores, **{what.budget: budget}, **own)
            worth = increments_of(scores, damping) if plan.rule.startswith("by-rank") else None
            rows.append({"budget": budget, **_row(plan, what, q, worth)})
    more, better = (1.0 if what.harms else -1.0), (-1.0 if what.harms or what.predicts else 1.0)
    points = np.array([[r["spent"] * more, r["value"] * better] for r in rows])
    for row, p in zip(rows, points, strict=True):
        row["front"] = not ((points >= p).all(1) & (points > p).any(1)).any()
    return {"kind": kind, "budgets": list(budgets), "exponents": list(exponents or ()), "rows": rows}


def _row(plan: Plan, kind: Kind, q: Vector, worth: Sequence[Sequence[float]] | None) -> dict[str, Any]:
    value, c = plan.counts / plan.numel if kind.harms else plan.counts, plan.certificate
    if kind.predicts:
        value, predicted = plan.values, plan.extra["predicted"]
    elif worth is not None:
        predicted = sum(sum(row[:n]) for row, n in zip(worth, plan.counts, strict=True))
        price = plan.extra["rounding"]["price"]
        c = {"status": "binding" if price else "slack", "shadow_price": price}
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
    }
