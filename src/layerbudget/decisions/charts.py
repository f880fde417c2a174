"""Data of the page's charts that several decisions draw: plans at several budgets, and predicted beside measured damage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import LayerbudgetError
from ..plan import Plan
from ..scores import Scores

LARGEST = 400  # blocks; beyond them plans at other budgets would make the page heavy


def values_of(plan: Plan, *, whole: bool = False) -> list[float]:
    """Return what every block gets, as a page holds it: counts of ``whole`` numbers, else values."""
    return [float(f"{v:.6g}") for v in (plan.counts if whole else plan.values)]


def counted_water(plan: Plan, even: float | None = None) -> dict[str, Any]:
    """Return ``{cap, uniform}`` of a plan of whole numbers: no cap, and ``even``, else the mean."""
    return {"cap": None, "uniform": float(even or plan.counts.mean())}


def even_water(plan: Plan) -> dict[str, Any]:
    """Return ``{cap, uniform, share}`` of a plan without caps: uniform is the mean over the parameters."""
    numel = plan.numel.astype(np.float64)
    return {"cap": None, "uniform": float(np.array(values_of(plan)) @ numel / numel.sum()), "share": None}


def solved_grid(
    scores: Scores,
    plan: Plan | None,
    *,
    kind: str,
    unit: str,
    budgets: Sequence[float],
    solve: Callable[[float], Mapping[str, Any]],
    wanted: float | None = None,
) -> dict[str, Any] | None:
    """Return ``{kind, unit, budgets, plans, start}``: plans at several budgets for the slider, which starts at ``plan``.

    None where these scores make no such plans, or too many blocks would make the page heavy.

    Args:
        scores: What the plans are made from.
        plan: The plan of the page, where there is one.
        kind: Kind of the plans.
        unit: Of the budgets, in words.
        budgets: Budgets that are tried; those that cannot be planned have no place on the slider.
        solve: Gives ``values``, ``cap``, ``uniform`` and ``share`` of the plan at a budget.
        wanted: Where the slider starts; the middle by default.
    """
    if not 1 < len(scores.blocks) <= LARGEST:
        return None
    plans: dict[float, Mapping[str, Any]] = {}
    for budget in budgets:
        try:
            plans[budget] = solve(budget)
        except LayerbudgetError:  # beyond the ranks that were measured, or below the floors: no place on the slider
            continue
    if len(plans) < 2:
        return None
    known = list(plans)
    usual = known[len(known) // 2] if plan is None else plan.counts.mean()
    start = int(np.argmin([abs(budget - (wanted or usual)) for budget in known]))
    return {"kind": kind, "unit": unit, "budgets": known, "plans": list(plans.values()), "start": start}


def curved_grid(
    plan: Plan,
    rows: Sequence[Mapping[str, Any]],
    budgets: Sequence[float],
    unit: str,
    plan_budget: float,
    labels: Iterable[str],
) -> dict[str, Any] | None:
    """Return the best plans of other budgets, which a plan keeps, for the slider; None of fewer than two.

    Args:
        plan: The plan.
        rows: The kept plans, each with its ``values``.
        budgets: Their budgets.
        unit: Of the budgets, in words.
        plan_budget: Budget of the plan itself.
        labels: A few words on the damage at each.
    """
    if len(rows) < 2:
        return None
    empty = {"cap": None, "uniform": None, "share": None}
    plans = [{"values": row["values"], **empty, "told": words} for row, words in zip(rows, labels, strict=True)]
    shown = [float(f"{budget:.4g}") for budget in (*budgets, plan_budget)]
    start = int(np.argmin([abs(budget - plan_budget) for budget in budgets]))
    grid = {"kind": plan.kind, "unit": unit, "place": "At", "budgets": shown[:-1], "plans": plans}
    return {**grid, "start": start, "own": shown[-1]}


def walked_grid(
    plan: Plan, path: Sequence[Mapping[str, Any]], labels: Sequence[str], water: Mapping[str, Any], *, from_uniform: bool
) -> dict[str, Any] | None:
    """Return the steps of a measured plan for the slider; None without their values.

    Args:
        plan: The plan.
        path: Its steps, of which those with ``values`` are shown.
        labels: A few words on each of these.
        water: ``{cap, uniform}`` that every step is drawn with.
        from_uniform: Whether the first step is uniform, and called step 0.
    """
    steps = [step for step in path if "values" in step]
    if len(steps) < 2:
        return None
    plans = [{"values": s["values"], **water, "share": None, "told": words} for s, words in zip(steps, labels, strict=True)]
    first = int(not from_uniform)
    unit = "step, from uniform to the plan" if from_uniform else "step"
    budgets = list(range(first, len(steps) + first))
    grid = {"kind": plan.kind, "unit": unit, "place": "Step", "budgets": budgets, "plans": plans}
    return {**grid, "start": len(steps) - 1}


def point(label: str, predicted: float | None, measured: float, error: float | None = None) -> dict[str, Any]:
    """Return one predicted and measured damage, with two standard errors of it."""
    return {"label": label, "predicted": predicted, "measured": measured, "error": error and 2 * error}


def forecast(note: str, points: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the chart of predicted and measured damages; None where there is nothing to compare."""
    known = len(points) > 1 and any(p["predicted"] is not None for p in points)
    return {"note": f"nats per token {note}", "points": list(points)} if known else None


def by_step(path: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of a measured plan; the first plans of shapes are predicted whole, later steps as a change."""
    points, first = list[dict[str, Any]](), int(bool(path) and "share" in path[0])
    for number, step in enumerate(path):
        change, whole = step.get("predicted"), "share" in step
        before = 0.0 if whole or not number else path[number - 1]["divergence"]
        label = f"step {number + first}" if number + first else "uniform"
        points.append(point(label, None if change is None else before + change, step["divergence"]))
    return points
