"""Terms of the bytes of a planned file: every term of the sum that a limit counts. No torch."""

from __future__ import annotations

from ...compressors.formats import GGUF
from ...plan import Plan, payload_of
from .payload import BitsPayload

OTHERS = "other tensors"
HEAD = "metadata, vocabulary, names and places of tensors"
HEADERS = "headers: names, types, shapes and places of tensors (at most)"


def terms_of(plan: Plan) -> dict[str, int]:
    """Return the bytes of the file that a plan of bits makes, by what they are, the planned matrices by their formats first.

    Their sum is what a limit in bytes counts. What is no tensor is not among them where the plan does not know it.
    """
    payload, terms = payload_of(plan, BitsPayload), dict[str, int]()
    for block in plan.blocks:
        name = " and ".join(dict.fromkeys(payload.formats[m] for m in block.modules))
        terms[f"matrices in {name}"] = terms.get(f"matrices in {name}", 0) + block.count
    terms |= payload.fixed_terms or {OTHERS: payload.fixed_bytes}
    return terms | ({HEAD if payload.family == GGUF else HEADERS: payload.head_bytes} if payload.head_bytes else {})


def whole_bytes(plan: Plan) -> int:
    """Return the sum of :func:`terms_of`: exactly those of a GGUF file, at most those of a folder's weights."""
    return sum(terms_of(plan).values())
