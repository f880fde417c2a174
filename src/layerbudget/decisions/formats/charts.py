"""Data of the page's charts of plans of formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...plan import Plan
from ..charts import forecast, point
from .payload import FormatsPayload


def forecast_of(plan: Plan, payload: FormatsPayload, names: Mapping[str, str]) -> dict[str, Any] | None:
    """Return predicted and measured damage of every choice that was checked; ``names`` are words for them."""
    if payload.check is None:
        return None
    words = {**names, plan.rule: "this plan"}
    predicted = {n: row["predicted"] for n, row in payload.baselines.items()} | {plan.rule: payload.predicted}
    rows = {n: row for n, row in payload.check.rows.items() if not row.same}
    points = [point(words.get(n, n), predicted.get(n), row.kl, row.kl_error) for n, row in rows.items()]
    note = "on held-out text, of the plan and what it was compared with; the bar is two standard errors"
    return forecast(note, points)
