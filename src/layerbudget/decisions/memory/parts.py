"""The plans in a plan of weights and cache. No torch."""

from __future__ import annotations

import dataclasses

from ...errors import InvalidInput
from ...plan import Plan
from ..formats.program import sizes_of
from .program import KIND


def split_fit(plan: Plan) -> tuple[Plan, Plan]:
    """The plan of bits and the plan of the cache in a plan of memory, each as if it had been made alone."""
    if plan.kind != KIND:
        raise InvalidInput(f"A plan of kind {plan.kind} decides no memory.", "", "Make one: layerbudget plan memory MODEL.")
    e = plan.extra
    kept = set(e["cache_formats"])
    measured = e["check"]["rows"][plan.rule]["kl"] if "check" in e else None
    parts = []
    for name, own in (("weights", False), ("cache", True)):
        blocks = tuple(b for b in plan.blocks if (b.modules[0] in kept) == own)
        formats = {m: e["formats"][m] for b in blocks for m in b.modules}
        spent = int(sum(b.count for b in blocks))
        size = spent if own else spent + e["fixed_bytes"]
        sizes = {} if own else sizes_of(spent, e["family"], e["fixed_bytes"], e["head_bytes"])
        said = {"formats": formats, "predicted_error": e["part_errors"][name], "baselines": {}, "near_ties": []}
        said |= {k: e["parts"][name][k] for k in ("bits", "predicted")}
        said |= {"whole": {"predicted": e["predicted"], "measured": measured}}
        names = (
            ("runtime", "context", "batch", "group", *(n for n in ("rotated", "interleaved", "utilization") if n in e))
            if own
            else ("runtime", "family", "method", "fixed_bytes", "fixed_terms", "head_bytes", "signature")
        )
        parts.append(
            dataclasses.replace(
                plan,
                kind="cache" if own else "bits",
                blocks=blocks,
                budget={"unit": "bytes", "limit": spent, "spent": spent, **sizes},
                hyperparameters={"bits": None, "budget": f"{size} bytes", "rule": plan.rule, "part": True},
                certificate={},
                extra={**said, **{k: e[k] for k in ("runtime", *names) if k in e}},
            )
        )
    return parts[0], parts[1]


def parts_of(plan: Plan) -> dict[str, Plan]:
    """Return the plans in a plan, by kind: of memory those of bits and of the cache, of any other itself."""
    if plan.kind != KIND:
        return {plan.kind: plan}
    return {p.kind: p for p in split_fit(plan)}
