"""``layerbudget plan cache MODEL``: formats of cached keys and values, by directional damage."""

from __future__ import annotations

import argparse
from typing import Any

from ..decisions.bits.program import check_bits
from ..decisions.cache.formats import CACHES, RULES
from ..errors import InvalidInput
from ..plan import Plan
from ..records import check_output
from ..registry import Option
from .display import expect, progress_bar, text_of, words_of
from .options import add_data, add_set, add_verb, batch_of, load, options_for


def add(kinds: Any, handler: Any) -> argparse.ArgumentParser:
    """Return the parser of ``plan cache``."""
    p = add_verb(kinds, "cache", handler, "a format for the cached keys and values of every layer, within a budget of bytes")
    p.add_argument("source", metavar="MODEL", help="a decoder")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--bits", type=float, help="mean bits per cached number, scales counted: 3.5")
    budget.add_argument("--budget", help="bytes of the whole cache: '1.5 GiB'")
    p.add_argument("--context", type=int, required=True, help="tokens of a sequence, prompt and answer")
    p.add_argument("--batch", type=int, default=1, help="sequences at a time (default: 1)")
    p.add_argument("--runtime", choices=tuple(CACHES), default="transformers", help="who keeps it (default: transformers)")
    p.add_argument("--formats", metavar="LIST", help="choose among these: int2,int3,int4,int8 or Q4_0,Q8_0; default: all")
    p.add_argument("--rule", choices=RULES, default="choices", help="choices: the exact program (default)")
    add_set(p.add_argument_group("advanced"), "group (channels), draws (of labels), or check (sequences, 0: none)")
    add_data(p, samples=16, length=512, dtype="float32")
    return p


def plan(a: argparse.Namespace) -> Plan:
    """Return the plan of the cache by the damage to a model, checked as a whole and written."""
    from ..decisions.cache.plan import CacheSpace, plan_cache
    from ..doctor.cost import Part

    a.model, a.out = a.source, a.out or "plan.json"
    check_output(a.out, overwrite=a.overwrite)
    check_bits(a.bits)
    a.formats = a.formats.split(",") if a.formats else None
    own = options_for(a, plan_cache, {"check": Option(name="check", type=int, default=8)})
    count, samples = own.pop("check", 8), a.data_defaults["samples"] if a.samples is None else a.samples
    if count < 0:
        raise InvalidInput(f"check is {count}.", "It is a number of sequences; 0 checks nothing.", "Leave it out.")
    a.samples, a.dtype = samples + count, a.dtype or "float32"
    model, _, text = load(a)
    CacheSpace.of(model, a.context, a.batch, a.runtime, a.formats, own.get("group")).limit(a.bits, a.budget)
    decides = max(1, text.samples * samples // (samples + count))
    data, check = text.select(slice(0, decides)), text.select(slice(decides, None)) if decides < text.samples else None
    parts = [Part("directional", text_of(data, a), 1.0 + 2.0 * own.get("draws", 4))]
    parts += [] if check is None else [Part("forward", text_of(check, a), times=5.0)]
    expect(a, words_of("the cache", data), model, parts)
    with progress_bar(a, "measuring keys and values") as progress:
        batch = batch_of(a, model, data, most=1)
        found = plan_cache(model, data, check, batch_size=batch, progress=progress, **own)
    found.save(a.out, overwrite=a.overwrite)
    return found
