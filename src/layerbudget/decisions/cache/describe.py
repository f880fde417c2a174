"""Sentences on a plan of the cache, and the data of its charts. No torch."""

from __future__ import annotations

from typing import Any

from ...decision import Summary
from ...plan import Plan, payload_of
from ..charts import even_water
from ..formats.charts import forecast_of
from ..formats.describe import (
    comparison_of,
    expected,
    figures_of,
    names_of,
    on_certificate,
    on_check,
    on_formats,
    on_more_bytes,
    on_prediction,
    on_slack,
    on_ties,
    verdict,
    within,
)
from .export import llama_build
from .payload import CachePayload

ENDS = "first and last layers in a larger format, and further ones as the bytes allow"  #: What the rule protect-ends is.


def summary_of(plan: Plan) -> Summary:
    """Return what is said of a plan of the cache."""
    payload = payload_of(plan, CachePayload)
    names = names_of(payload)
    bits = f"bits per number at {payload.context:,} tokens x {payload.batch}, for {payload.runtime}."
    bits += llama_build(plan) if payload.runtime == "llama.cpp" else ""
    return Summary(
        title=f"A cache of {payload.bits:.3g} bits per number for",
        verdict=verdict(plan, payload, f"{payload.bits:.4g} bits per cached number", names),
        expected=expected(plan, payload),
        sentences=(
            *on_formats(plan),
            *on_certificate(plan),
            on_prediction(plan, payload, bits, ENDS),
            *on_more_bytes(plan),
            *on_ties(plan, payload),
            *on_check(payload),
        ),
        advice=on_slack(plan),
        comparison=comparison_of(plan, payload, names, {"uniform": "uniform"}, within=within(plan), ends=ENDS),
        figures=figures_of(payload),
        passes=payload.passes,
    )


def charts_of(plan: Plan) -> dict[str, Any]:
    """Return ``forecast`` and ``water``."""
    payload = payload_of(plan, CachePayload)
    return {"grid": None, "forecast": forecast_of(plan, payload, names_of(payload)), "water": even_water(plan)}
