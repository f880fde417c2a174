"""Sentences on a plan of weights and cache, and the data of its charts. No torch."""

from __future__ import annotations

from typing import Any

from ...budget import unit_of
from ...decision import Summary
from ...plan import Plan, payload_of
from ...verdicts import nats
from ..charts import curved_grid, even_water
from ..formats.describe import (
    comparison_of,
    damages_of,
    expected,
    figures_of,
    names_of,
    on_certificate,
    on_check,
    on_formats,
    on_slack,
    on_unread,
    on_unwritten,
    verdict,
    within,
)
from .payload import MemoryPayload, Side
from .program import MIX, UNIFORM

_NOTHING = 1e-12  # nats per token; less is left of formats that hold the weights exactly, by the arithmetic of their damage


def summary_of(plan: Plan) -> Summary:
    """Return what is said of a plan of memory."""
    payload = payload_of(plan, MemoryPayload)
    names = names_of(payload, payload.named.get(MIX))
    size = _size_of(plan, payload)
    title = f" in {size}" if payload.placement else within(plan)
    base = UNIFORM if UNIFORM in damages_of(plan, payload) else MIX
    called = "this plan" if base == plan.rule else names[base]
    shares = [*_on_parts(plan, payload), *_on_placement(payload), *_on_more(plan, payload)]
    damage = f"{nats(payload.predicted, payload.predicted_error)}{_on_others(plan, payload)}"
    asked = plan.hyperparameters
    memory = asked["memory"] if payload.placement is None else f"{asked['gpu']} and {asked['ram']} beside it"
    return Summary(
        title=f"{memory} at {payload.context} tokens x {payload.batch} for",
        verdict=verdict(plan, payload, size, names, best="is the best choice here"),
        expected=expected(plan, payload),
        sentences=(
            *on_formats(plan),
            *on_certificate(plan),
            *shares,
            f"Damages of single blocks add up to {damage}.",
            *on_unread(payload),
            *on_check(payload),
        ),
        advice=(*shares, *on_slack(plan), *on_unwritten(plan, payload), *on_unread(payload)),
        comparison=comparison_of(plan, payload, names, {base: called}, within=title),
        figures=figures_of(payload),
        passes=payload.passes,
    )


def _size_of(plan: Plan, payload: MemoryPayload) -> str:
    """The bytes that a plan takes: of two memories those of each, which both have buffers."""
    here = payload.placement
    if here is None:
        return f"file, cache and buffers in {plan.budget['spent']:,.0f} bytes"
    return f"{here.card.bytes:,} bytes of the card and {here.processor.bytes:,} of the processor's memory"


def _on_parts(plan: Plan, payload: MemoryPayload) -> list[str]:
    """A sentence on what each part got."""
    weights, cache = payload.parts["weights"], payload.parts["cache"]
    others = ", ".join(
        f"{part['bytes']:,.0f} {name}" for name, part in payload.parts.items() if name not in ("weights", "cache")
    )
    return [
        f"For {payload.runtime} at {payload.context} tokens x {payload.batch}: weights {weights['bytes']:,.0f} bytes "
        f"({weights['bits']:.3f} bits per weight, {weights['predicted']:.4g} nats per token), cache {cache['bytes']:,.0f} "
        f"bytes ({cache['bits']:.3f} bits per number, {cache['predicted']:.4g} nats), {others}."
        f"{_on_utilization(plan, payload)}"
    ]


def _on_placement(payload: MemoryPayload) -> list[str]:
    """Sentences on what lies with the processor, where there are two memories, and on fewer layers there."""
    here = payload.placement
    if here is None:
        return []
    what = "no layer" if here.whole else "no experts"
    if here.layers:
        what = f"the first {here.layers} of {here.of} layers with their cache"
        what = what if here.whole else f"the experts of the first {here.layers} layers"
    sentences = [
        f"The card holds {here.card.bytes:,} of {here.gpu:,} bytes ({_of_side(here.card)}). The processor's memory holds "
        f"{here.processor.bytes:,} of {here.ram:,} ({_of_side(here.processor)}): the embedding and {what}. "
        f"Serve so: llama-server -m FILE.gguf {here.options}."
    ]
    fewer = [row for row in here.others if row["layers"] < here.layers]
    if fewer:
        near = max(fewer, key=lambda row: row["layers"])
        which = "Layers" if here.whole else "Experts"
        needs, ram = f"{near['ram_bytes']:,}", f"--ram '{near['ram_bytes']} bytes'"
        gives = f"{ram} gives it." if near.get("given") else "A plan of more layers is better in as many, so no --ram gives it."
        sentences.append(
            f"{which} beside the card make a model slower. With those of {near['layers']} there, the best plan is predicted to "
            f"cost {near['predicted']:.4g} nats per token and takes {needs} bytes there. {gives}"
        )
    return sentences


def _of_side(side: Side) -> str:
    """The bytes of one of two memories by their parts."""
    return f"{side.weights:,} of weights, {side.cache:,} of cache, {side.buffers:,} of buffers"


def _on_utilization(plan: Plan, payload: MemoryPayload) -> str:
    """The share of the memory that the runtime takes, where it is not all."""
    if not payload.utilization:
        return ""
    return (
        f" {payload.runtime} takes {payload.utilization:g} of the memory given, {plan.budget['limit']:,} bytes; "
        "--utilization 1 counts all of it."
    )


def _on_more(plan: Plan, payload: MemoryPayload) -> list[str]:
    """Sentence on what one unit of memory more would bring, and on how little more takes away half of the damage."""
    more, this, damage = payload.more, "this one", payload.predicted
    if (best := payload.baselines.get("exact")) and plan.rule != "exact":
        this, damage = "the best plan of this memory", best["predicted"]
    _, unit = unit_of(more.bytes)
    sentences = [
        f"With one {unit} more the best plan is predicted to cost {more.predicted:.4g} nats per token in all, "
        f"{max(damage - more.predicted, 0):.4g} less than {this}."
    ]
    near = next((row for row in more.near if row["predicted"] <= damage / 2 and damage > 0), None)
    if near:
        left = near["predicted"] / damage
        share = f"{left:.0%}" if left >= 0.01 else "less than 1%"
        sentences.append(
            f"The best plan of only {near['share']:.0%} more memory ({near['memory']:,.0f} bytes) is predicted to cost "
            f"{near['predicted']:.4g} nats per token, {share} of {this}."
        )
    return sentences


def _on_others(plan: Plan, payload: MemoryPayload) -> str:
    """The totals of rules without a joint program, in brackets."""
    words = {UNIFORM: "one format for the whole cache ({})", MIX: "the weights as {}", "exact": "the program"}
    rows = [
        f"{words[name].format(payload.named.get(name))} {row['predicted']:.4g}"
        for name, row in payload.baselines.items()
        if name != plan.rule
    ]
    return f" ({'; '.join(rows)})" if rows else ""


def charts_of(plan: Plan) -> dict[str, Any]:
    """Return ``memory``, the slider over the memories whose best plans are kept, and ``water``."""
    payload, (size, unit) = payload_of(plan, MemoryPayload), unit_of(plan.budget["limit"])
    rows = [row for row in payload.curve if "values" in row]
    budgets = [row["memory"] / size for row in rows]
    labels = (f"{row['predicted']:.3g} nats per token predicted" for row in rows)
    grid = curved_grid(plan, rows, budgets, f"memory, {unit}", plan.budget["limit"] / size, labels)
    return {"memory": _memory(plan, payload), "grid": grid, "forecast": None, "water": even_water(plan)}


def _memory(plan: Plan, payload: MemoryPayload) -> dict[str, Any]:
    """Bytes by part and predicted damage of the best plans over memory, and of the plan itself."""
    size, unit = unit_of(plan.budget["limit"])
    this = {"memory": plan.budget["spent"], "predicted": payload.predicted, "own": True}
    this |= {f"{name}_bytes": part["bytes"] for name, part in payload.parts.items()}
    rows = sorted((*payload.curve, this), key=lambda row: (row["memory"], "own" in row))
    names = list(payload.parts)
    points = [
        {
            "label": f"{row['memory'] / size:.4g}",
            "parts": [row[f"{name}_bytes"] / size for name in names],
            "predicted": row["predicted"] if row["predicted"] > _NOTHING else 0.0,
            "own": "own" in row,
        }
        for row in rows
    ]
    return {"unit": unit, "names": names, "points": points}
