"""Data of the page's charts of a plan of experts that stay."""

from __future__ import annotations

from typing import Any

from ...plan import Plan, payload_of
from ..charts import curved_grid, even_water, forecast, point
from .payload import ExpertPruningPayload


def charts_of(plan: Plan) -> dict[str, Any]:
    """Return ``grid``, a plan for every share of the forecast; ``forecast``, the damages there; and ``water``."""
    payload = payload_of(plan, ExpertPruningPayload)
    rows = [row for row in payload.curve if "values" in row]
    share = 100 * float(plan.counts.sum()) / sum(b.count / b.value for b in plan.blocks)
    labels = (f"{row['forecast']:.3g} nats per token, measured with the others masked" for row in rows)
    unit = "% of the experts that stay"
    points = [
        point(f"{100 * r['keep']:.3g} % stay", r["predicted"], r["measured"], r["measured_error"]) for r in payload.forecast
    ]
    return {
        "grid": curved_grid(plan, rows, [100 * row["keep"] for row in rows], unit, share, labels),
        "forecast": forecast("by the share of the experts; the bar is two standard errors", points),
        "water": even_water(plan),
    }
