"""The plans in a plan of weights and cache. No torch."""

from __future__ import annotations

import dataclasses

from ...decision import DECISIONS
from ...errors import InvalidInput
from ...plan import Plan, payload_of
from ..formats.payload import Whole
from ..formats.program import sizes_of
from .payload import MemoryPayload
from .program import KIND

_OF_WEIGHTS = ("runtime", "family", "method", "fixed_bytes", "fixed_terms", "head_bytes", "signature")
_OF_CACHE = ("runtime", "context", "batch", "group", "rotated", "interleaved", "utilization")


def parts_of(plan: Plan) -> dict[str, Plan]:
    """Return the plan of bits and the plan of the cache in a plan of memory, by kind, each as if it had been made alone.

    Raises:
        InvalidInput: A plan of another kind.
    """
    if plan.kind != KIND:
        raise InvalidInput(f"A plan of kind {plan.kind} decides no memory.", "", "Make one: layerbudget plan memory MODEL.")
    payload = payload_of(plan, MemoryPayload)
    measured = payload.check.rows[plan.rule].kl if payload.check is not None else None
    whole = Whole(predicted=payload.predicted, measured=measured)
    parts = dict[str, Plan]()
    for name, kind, names in (("weights", "bits", _OF_WEIGHTS), ("cache", "cache", _OF_CACHE)):
        blocks = tuple(b for b in plan.blocks if (b.modules[0] in payload.cache_formats) == (kind == "cache"))
        spent = int(sum(b.count for b in blocks))
        sizes, size, placed = {}, spent, {}
        if kind == "bits":
            size = spent + payload.fixed_bytes
            sizes = sizes_of(spent, payload.family, payload.fixed_bytes, payload.head_bytes)
        elif payload.placement:
            placed = {"placed": payload.placement.options}
        parts[kind] = dataclasses.replace(
            plan,
            kind=kind,
            blocks=blocks,
            budget={"unit": "bytes", "limit": spent, "spent": spent, **sizes},
            hyperparameters={"bits": None, "budget": f"{size} bytes", "rule": plan.rule, "part": True},
            certificate={},
            payload=DECISIONS.find(kind).Payload(
                formats={m: payload.formats[m] for b in blocks for m in b.modules},
                bits=payload.parts[name]["bits"],
                predicted=payload.parts[name]["predicted"],
                predicted_error=getattr(payload.part_errors, name),
                baselines={},
                near_ties=[],
                whole=whole,
                **{field: getattr(payload, field) for field in names},
                **placed,
            ),
        )
    return parts
