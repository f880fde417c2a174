"""Data of the page's charts of a plan of sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...plan import Plan, payload_of
from ...scores import Scores
from ...verdicts import less_than
from ..charts import by_step, forecast, solved_grid, values_of, walked_grid
from .payload import SparsityPayload
from .plan import default_cap, plan_sparsity

_BUDGETS = [round(0.05 * i, 2) for i in range(1, 18)]


def charts_of(plan: Plan | None, scores: Scores | None) -> dict[str, Any]:
    """Return ``grid``, ``water`` and ``forecast`` of a plan, or of the scores that plans can be made from."""
    charts: dict[str, Any] = {}
    if scores is not None:
        wanted = None if plan is None else plan.hyperparameters.get("sparsity")
        charts["grid"] = solved_grid(
            scores,
            plan,
            kind="sparsity",
            unit="sparsity",
            budgets=_BUDGETS,
            solve=lambda share: _solved(scores, share),
            wanted=wanted,
        )
    if plan is None:
        return charts
    payload, water = payload_of(plan, SparsityPayload), _water(plan)
    charts["grid"] = charts.get("grid") or walked_grid(plan, payload.path, _labels(payload), water, from_uniform=True)
    charts["forecast"] = forecast("on the text that decided, step by step", by_step(payload.path))
    charts["water"] = {**water, "share": None}
    if payload.measured is not None and payload.path:
        change = less_than(payload.measured, payload.path[0]["divergence"], "uniform")
        charts["water"] = {**water, "told": f"{payload.measured:.3g} nats per token, {change}"}
    return charts


def _solved(scores: Scores, share: float) -> dict[str, Any]:
    plan = plan_sparsity(scores, sparsity=share)
    return {"values": [float(f"{v:.4g}") for v in plan.values], "cap": default_cap(share), "uniform": share, "share": None}


def _water(plan: Plan) -> Mapping[str, Any]:
    """Cap of every block, and what uniform would give."""
    cap, values, numel = plan.hyperparameters.get("max_sparsity"), np.array(values_of(plan)), plan.numel.astype(np.float64)
    whole = isinstance(cap, (int, float)) or (isinstance(cap, (list, tuple)) and len(cap) == len(values))
    return {"cap": cap if whole else None, "uniform": float(values @ numel / numel.sum())}


def _labels(payload: SparsityPayload) -> list[str]:
    """Words on every step that keeps its values."""
    damage = [step["divergence"] for step in payload.path if "values" in step]
    labels = [f"{each:.3g} nats per token" for each in damage]
    first = [f"{labels[0]}: this is uniform"] if labels else []
    return [*first, *(f"{w}, {less_than(d, damage[0], 'uniform')}" for w, d in zip(labels[1:], damage[1:], strict=True))]
