"""The plans in a plan of weights and cache, and what it says in sentences. No torch."""

from __future__ import annotations

import dataclasses

from ...errors import InvalidInput
from ...plan import Plan
from ...records import unit_of
from ...verdicts import nats
from .program import KIND, MIX, UNIFORM
from .smaller import ALL, of_rule, plans_of
from .smaller import sentences as of_smaller


def split_fit(plan: Plan) -> tuple[Plan, Plan]:
    """The plan of bits and the plan of the cache in a fit, each as if it had been made alone."""
    if plan.kind != KIND:
        raise InvalidInput(f"A plan of kind {plan.kind} is no fit.", "", "Make one: layerbudget plan fit MODEL.")
    e = plan.extra
    kept = set(e["cache_formats"])
    measured = e["check"]["rows"][plan.rule]["kl"] if "check" in e else None
    parts = []
    for name, own in (("weights", False), ("cache", True)):
        blocks = tuple(b for b in plan.blocks if (b.modules[0] in kept) == own)
        formats = {m: e["formats"][m] for b in blocks for m in b.modules}
        spent = int(sum(b.count for b in blocks))
        file = {} if own else {"file": spent + e["fixed_bytes"]}
        said = {"formats": formats, "predicted_error": e["part_errors"][name], "baselines": {}, "near_ties": []}
        said |= {k: e["parts"][name][k] for k in ("bits", "predicted")}
        said |= {"whole": {"predicted": e["predicted"], "measured": measured}}
        names = (
            ("runtime", "context", "batch", "group", *(n for n in ("rotated", "interleaved", "utilization") if n in e))
            if own
            else ("runtime", "family", "method", "fixed_bytes", "head_bytes", "signature")
        )
        parts.append(
            dataclasses.replace(
                plan,
                kind="cache" if own else "bits",
                blocks=blocks,
                budget={"unit": "bytes", "limit": spent, "spent": spent, **file},
                hyperparameters={"bits": None, "budget": f"{file.get('file', spent)} bytes", "rule": plan.rule, "fit": True},
                certificate={},
                extra={**said, **{k: e[k] for k in ("runtime", *names) if k in e}},
            )
        )
    return parts[0], parts[1]


def parts_of(plan: Plan) -> dict[str, Plan]:
    """Return the plans in a plan, by kind: of a fit two, or three where experts or shapes go, of any other itself."""
    if plan.kind != KIND:
        return {plan.kind: plan}
    return {p.kind: p for p in (*split_fit(plan), *plans_of(plan))}


def shares(plan: Plan) -> list[str]:
    """Sentences that say what each part got, and what more memory would bring."""
    e, parts = plan.extra, plan.extra["parts"]
    w, c = parts["weights"], parts["cache"]
    beside = ", ".join(f"{p['bytes']:,.0f} {name}" for name, p in parts.items() if name not in ("weights", "cache"))
    said = [
        f"For {e['runtime']} at {e['context']} tokens x {e['batch']}: weights {w['bytes']:,.0f} bytes ({w['bits']:.3f} bits "
        f"per weight, {w['predicted']:.4g} nats per token), cache {c['bytes']:,.0f} bytes ({c['bits']:.3f} bits per number, "
        f"{c['predicted']:.4g} nats), {beside}.{_of_memory(plan)}",
        *of_smaller(plan),
    ]
    return [*said, *_on_more(plan)]


def _of_memory(plan: Plan) -> str:
    """The share of the memory that the runtime takes, where it is not all."""
    if not (share := plan.extra.get("utilization")):
        return ""
    return (
        f" {plan.extra['runtime']} takes {share:g} of the memory given, {plan.budget['limit']:,} bytes; "
        "--set utilization=1 counts all of it."
    )


def _on_more(plan: Plan) -> list[str]:
    """What one unit of memory more would bring, and how little more takes away half of the damage, where so little does."""
    e, more = plan.extra, plan.extra["more"]
    this, own = "this one", e["predicted"]
    if (best := e["baselines"].get("choices")) and plan.rule != "choices":
        this, own = "the best plan of this memory", best["predicted"]
    _, unit = unit_of(more["bytes"])
    said = [
        f"With one {unit} more the best plan is predicted to cost {more['predicted']:.4g} nats per token in all, "
        f"{max(own - more['predicted'], 0):.4g} less than {this}."
    ]
    near = next((row for row in more.get("near", ()) if row["predicted"] <= own / 2 and own > 0), None)
    if near:
        left = near["predicted"] / own
        share = f"{left:.0%}" if left >= 0.01 else "less than 1%"
        said.append(
            f"The best plan of only {near['share']:.0%} more memory ({near['memory']:,} bytes) is predicted to cost "
            f"{near['predicted']:.4g} nats per token, {share} of {this}."
        )
    return said


def sentences(plan: Plan) -> list[str]:
    """Sentences that say what a fit decides and what it rests on."""
    e = plan.extra
    damage = f"{nats(e['predicted'], e['predicted_error'])}{_others(plan)}"
    check = [e["check"]["verdict"]] if "check" in e else []
    return [*shares(plan), f"Damages of single blocks add up to {damage}.", *check]


def _others(plan: Plan) -> str:
    """The totals of rules without a joint program, in brackets."""
    e = plan.extra
    words = {UNIFORM: "one format for the whole cache ({})", MIX: "the weights as {}", "choices": "the program"}
    words |= {rule: f"all {name}" for name, rule in ALL.items()}
    words = {n: f"{words[n].format(e['named'].get(n))}{of_rule(plan, n)}" for n in e["baselines"] if n != plan.rule}
    rows = [f"{told} {e['baselines'][n]['predicted']:.4g}" for n, told in words.items()]
    return f" ({'; '.join(rows)})" if rows else ""
