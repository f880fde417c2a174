"""Data of the page's charts of a plan of smaller shapes."""

from __future__ import annotations

from typing import Any

from ...plan import Plan, payload_of
from ..charts import by_step, even_water, forecast, walked_grid
from .payload import ShapesPayload


def charts_of(plan: Plan) -> dict[str, Any]:
    """Return ``grid``, the steps of the search; ``forecast``, predicted and measured damage of each; and ``water``."""
    path = payload_of(plan, ShapesPayload).path
    labels = [f"{step['divergence']:.3g} nats per token" for step in path if "values" in step]
    return {
        "grid": walked_grid(plan, path, labels, {"cap": None, "uniform": None}, from_uniform=False),
        "forecast": forecast("on the text that decided, step by step", by_step(path)),
        "water": even_water(plan),
    }
