"""Data of the page's charts of a plan of ranks."""

from __future__ import annotations

from typing import Any

from ...plan import Plan, payload_of
from ...scores import Scores
from ..charts import counted_water, solved_grid
from .payload import RanksPayload
from .plan import plan_ranks

_BUDGETS = [1, 2, 4, 8, 16, 32, 64]


def charts_of(plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
    """Return ``grid`` and ``water`` of a plan, or of the scores that plans can be made from."""
    mean = None if plan is None else plan.hyperparameters.get("mean_rank")
    charts: dict[str, Any] = {"forecast": None} if plan is not None else {}
    if scores is not None:
        charts["grid"] = solved_grid(
            scores,
            plan,
            kind="ranks",
            unit="mean rank",
            budgets=_BUDGETS,
            solve=lambda rank: _solved(scores, rank),
            wanted=mean,
        )
    if plan is not None:
        charts["grid"] = charts.get("grid")
        charts["water"] = {**counted_water(plan, mean), "share": payload_of(plan, RanksPayload).uniform_share}
    return charts


def _solved(scores: Scores, rank: float) -> dict[str, Any]:
    plan = plan_ranks(scores, mean_rank=rank)
    values = [float(f"{v:.4g}") for v in plan.counts.astype(float)]
    return {"values": values, "cap": None, "uniform": rank, "share": payload_of(plan, RanksPayload).uniform_share}
