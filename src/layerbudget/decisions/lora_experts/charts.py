"""Data of the page's charts of a plan of LoRA experts."""

from __future__ import annotations

from typing import Any

from ...plan import Plan
from ...scores import Scores
from ..charts import counted_water, solved_grid
from .plan import plan_lora_experts

_BUDGETS = [1, 2, 3, 4, 5, 6, 8, 10]


def charts_of(plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
    """Return ``grid`` and ``water`` of a plan, or of the scores that plans can be made from."""
    charts: dict[str, Any] = {"forecast": None} if plan is not None else {}
    if scores is not None:
        unit, kind = "experts per block", "lora-experts"
        charts["grid"] = solved_grid(
            scores, plan, kind=kind, unit=unit, budgets=_BUDGETS, solve=lambda each: _solved(scores, each)
        )
    if plan is not None:
        charts["grid"] = charts.get("grid")
        charts["water"] = {**counted_water(plan), "share": None}
    return charts


def _solved(scores: Scores, each: float) -> dict[str, Any]:
    plan = plan_lora_experts(scores, total=int(each * len(scores.blocks)))
    values = [float(f"{v:.4g}") for v in plan.counts.astype(float)]
    return {"values": values, "cap": None, "uniform": each, "share": None}
