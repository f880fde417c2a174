"""Sentences on a plan of bits, and the data of its charts. No torch."""

from __future__ import annotations

from typing import Any

from ...compressors.formats import GGUF
from ...decision import Summary
from ...plan import Plan, payload_of
from ..charts import curved_grid, even_water
from ..formats.baselines import PEER
from ..formats.charts import forecast_of
from ..formats.describe import (
    comparison_of,
    damages_of,
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
    on_unread,
    on_unwritten,
    verdict,
)
from .payload import BitsPayload
from .terms import whole_bytes

ENDS = "first and last layers, embedding and head in larger formats"  #: What the rule protect-ends is.
_BITS = "bits per weight: the bytes of the planned matrices over their weights."


def summary_of(plan: Plan) -> Summary:
    """Return what is said of a plan of bits."""
    payload = payload_of(plan, BitsPayload)
    names = names_of(payload, payload.mix)
    peer = PEER if PEER in damages_of(plan, payload) else "mix"
    against = {"uniform": "uniform", **({} if plan.rule == peer else {peer: PEER if peer == PEER else str(payload.mix)})}
    counted = f"bytes of {_counted(payload)}"
    return Summary(
        title=f"{payload.bits:.3g} bits per weight for",
        verdict=verdict(plan, payload, f"{payload.bits:.4g} bits per weight", names),
        expected=expected(plan, payload),
        sentences=(
            *on_formats(plan, spent=False),
            *on_certificate(plan),
            on_prediction(plan, payload, _BITS, ENDS, without=("mix",)),
            *on_unwritten(plan, payload),
            *on_unread(payload),
            *on_more_bytes(plan),
            *on_ties(plan, payload),
            *on_check(payload),
            _on_bytes(plan, payload) + _on_mix(plan, payload),
        ),
        advice=(*on_slack(plan), *on_unwritten(plan, payload), *on_unread(payload)),
        comparison=comparison_of(plan, payload, names, against, ends=ENDS, sizes=_sizes(plan, payload), counted=counted),
        figures=figures_of(payload),
        passes=payload.passes,
    )


def _sizes(plan: Plan, payload: BitsPayload) -> dict[str, int]:
    """Bytes of a GGUF file whose metadata are counted, else of all tensors, of a plan and of the choices beside it."""
    fixed = payload.fixed_bytes + (payload.head_bytes if payload.family == GGUF else 0)
    spent = {name: row["spent"] for name, row in payload.baselines.items()} | {plan.rule: plan.budget["spent"]}
    spent |= {PEER: spent["mix"]} if "mix" in spent else {}
    return {name: int(size + fixed) for name, size in spent.items()}


def _counted(payload: BitsPayload) -> str:
    """Name of the counted thing: the file, or all tensors."""
    return "the file" if payload.family == GGUF and payload.head_bytes else "all tensors"


def _on_bytes(plan: Plan, payload: BitsPayload) -> str:
    """The bytes of the file as a sum: the matrices of the plan, the other tensors, metadata."""
    spent, fixed, head = int(plan.counts.sum()), payload.fixed_bytes, payload.head_bytes
    exact = payload.family == GGUF
    parts = [f"{spent:,} of the planned matrices (limit {plan.budget['limit']:,})", f"{fixed:,} of other tensors"]
    parts += [f"{'' if exact else 'at most '}{head:,} of metadata"] if head else []
    most = "at most " if head and not exact else ""
    total = f"Bytes: {' + '.join(parts)} = {most}{whole_bytes(plan):,} bytes of {'the whole file' if head else 'all tensors'}"
    return total if head or not exact else f"{total}; the metadata and the vocabulary of the file are not counted"


def _on_mix(plan: Plan, payload: BitsPayload) -> str:
    """The mix of llama.cpp that a plan is to be compared with; continues the sentence on bytes."""
    mix = payload.mix
    if payload.family != GGUF or (mix is None and not payload.baselines):
        return "."
    if mix is None:
        return "; no mix of llama.cpp fits in types that were measured and are allowed."
    if plan.rule == "mix":
        return f": the plan is llama.cpp's {mix}."
    row, damage = payload.baselines["mix"], payload.predicted
    less = f" ({1 - damage / row['predicted']:.0%} less)" if row["predicted"] > damage > 0 else ""
    size = int(row["spent"]) + payload.fixed_bytes + payload.head_bytes
    return (
        f". llama.cpp's {mix}, {size:,} bytes of {_counted(payload)}: predicted damage {row['predicted']:.4g} nats per token, "
        f"of the plan {damage:.4g}{less}."
    )


def charts_of(plan: Plan) -> dict[str, Any]:
    """Return the slider over the budgets whose best plans are kept, ``forecast`` and ``water``."""
    payload = payload_of(plan, BitsPayload)
    rows = [row for row in payload.curve or () if "values" in row]
    labels = (f"{row['predicted']:.3g} nats per token predicted" for row in rows)
    grid = curved_grid(plan, rows, [row["bits"] for row in rows], "bits per weight", payload.bits, labels)
    forecast = forecast_of(plan, payload, names_of(payload, payload.mix))
    return {"grid": grid, "forecast": forecast, "water": even_water(plan)}
