"""``layerbudget plan fit MODEL``: formats of weights and cache under one memory; ``plan cache``: of the cache alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..compressors.base import QUANTISERS
from ..decisions.bits.memory import read_context
from ..decisions.bits.program import Limits
from ..decisions.cache.formats import CACHES
from ..decisions.fit.program import RULES, Terms
from ..plan import Plan
from ..records import check_output, rounded_up, unit_of
from ..registry import Option
from .display import expect, on_check, progress_bar, show_table, text_of, words_of
from .files import need_scores, refuse_long
from .measured import has_no_file, load_parted, save
from .options import DATA, PLACE, add_data, add_set, add_verb, batch_of, check_measured, given, options_for, refuse, settings
from .options import add as add_option

_TRIED = 4.0  # forwards with experts masked, of every number: all text, and its halves
_CHECK = {"check": Option(name="check", type=int, default=8)}


def add(kinds: Any, handler: Callable[..., Any]) -> argparse.ArgumentParser:
    """Return the parser of ``plan fit``, which ``plan cache`` is another name of."""
    summary = "formats of the weights and of the cache under one memory; or (plan cache --bits, --budget) of the cache alone"
    p = add_verb(kinds, "fit", handler, summary, aliases=["cache"])
    p.add_argument("source", metavar="MODEL|SCORES", help="a decoder; or what --save-scores wrote before, with --memory")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--memory", help="bytes of file, cache and buffers together: '8 GiB'")
    budget.add_argument("--bits", type=float, help="of the cache alone: mean bits per cached number, scales counted: 3.5")
    budget.add_argument("--budget", help="of the cache alone: bytes of all of it: '1.5 GiB'")
    p.add_argument("--context", metavar="TOKENS", required=True, help="of a sequence, prompt and answer: 8192 or 32k")
    p.add_argument("--batch", type=int, default=1, help="sequences at a time (default: 1)")
    p.add_argument("--runtime", choices=tuple(CACHES), help="who runs it (default: llama.cpp; of the cache alone transformers)")
    p.add_argument(
        "--formats", metavar="LIST", help="choose among these for the weights; for the cache where it is planned alone"
    )
    p.add_argument("--method", choices=QUANTISERS.names(), help="quantiser that will write the weights (default: rtn)")
    p.add_argument("--save-scores", metavar="FILE", help="also write what was measured, for other memories and contexts")
    names = (
        "cache=Q8_0,Q4_0 (its formats, beside the weights), experts=true, shapes=true (some may go), rule, draws (of labels), "
        "group, or check (sequences, 0: none)"
    )
    advanced = p.add_argument_group("advanced")
    add_set(advanced, names)
    add_option(advanced, "--resume")
    add_data(p, samples=16, length=512, dtype="float32", check=8)
    return p


def plan(a: argparse.Namespace) -> Plan:
    """Return the plan that a command asks for, written where it names a file."""
    a.context = read_context(a.context)
    a.formats = a.formats.split(",") if a.formats else None
    if not a.source.endswith(".json"):
        refuse_long(a.source, a.context)  # at once: nothing is loaded before
    if a.memory is None:
        refuse(a, ("method", "save_scores", "resume"), "the cache alone")
        return _cache(a)
    for path in filter(None, (a.out, a.save_scores)):
        check_output(path, overwrite=a.overwrite)
    return _again(a) if a.source.endswith(".json") else _fit(a)


def _again(a: argparse.Namespace) -> Plan:
    """Plan from what was measured."""
    from ..decisions.fit.plan import plan_fit

    unread = ("formats", "save_scores", "resume", "dry_run", *DATA, *PLACE)
    refuse(a, unread, "scores that were measured before")
    scores = need_scores(a.source, "plan fit MODEL --memory SIZE --context TOKENS --save-scores FILE")
    check_measured(a, scores.extra.get("choices") or {}, "plan fit")
    a.model, rules = None, {"rule": Option(name="rule", type=str, default=RULES[0])}
    own = given(a, "memory", "context", "batch") | settings(a, Terms, rules, what="a plan of what was measured before")
    found = plan_fit(scores, **own)
    if a.out:
        found.save(a.out, overwrite=a.overwrite)
    return found


def _fit(a: argparse.Namespace) -> Plan:
    """Plan weights and cache by the damage to a model, checked as a whole."""
    from ..compressors.formats import RUNTIMES, find_format
    from ..decisions.bits.blocks import formats_table
    from ..decisions.bits.sensitivity import rounding_damage
    from ..decisions.fit.cutting import EACH, LOOK, SAVINGS
    from ..decisions.fit.plan import check_needed, plan_fit, prepare, share_of
    from ..decisions.fit.removal import STEPS
    from ..doctor.cost import Part, choosing

    a.model, a.out, a.runtime = a.source, a.out or "plan.json", a.runtime or "llama.cpp"
    check_output(a.out, overwrite=a.overwrite)
    own = options_for(a, plan_fit, rounding_damage, formats_table, _CHECK)
    given_terms = ("memory", "context", "batch", "forbid", "keep", "cache", "experts", "shapes")
    share = share_of(a.runtime, own.get("utilization"))
    terms = Terms(**{k: own[k] for k in given_terms if k in own}, utilization=share)
    terms.check(own.get("rule", "choices"))
    for name in a.formats or ():
        RUNTIMES[a.runtime].check(find_format(name, RUNTIMES[a.runtime].family))
    model, tokenizer, data, check = load_parted(a, own.pop("check", 8))
    options = {k: v for k, v in own.items() if k in ("formats", "by", "group", "method", "unwritten", "imatrix")}
    options |= {"runtime": a.runtime, "family": RUNTIMES[a.runtime].family}
    ready = prepare(model, terms, tokenizer, options, own.get("multiple"))
    if a.save_scores is None:
        check_needed(ready, terms)
    draws = own.get("draws", 4)
    ggml = a.runtime == "llama.cpp"
    parts = choosing(
        text_of(data, a), None if check is None else text_of(check, a), draws=draws, ggml=ggml, method=a.method or "rtn"
    )
    parts.append(Part("directional", text_of(data, a), 1.0 + 2.0 * draws))
    if terms.experts:
        parts.append(Part("directional", text_of(data, a), 1.0 + 2.0 * draws + _TRIED * STEPS))
    if terms.shapes:
        each = [EACH + 2.0 * (1.0 + 2.0 * draws), LOOK / len(SAVINGS)]
        parts += [Part("directional", text_of(data, a), sum(each))] * len(SAVINGS)
        parts += [Part("ggml", text_of(data, a), times=5.0 * len(SAVINGS))] if ggml else []
    smaller = f", and which {terms.smaller} may go," if terms.smaller else ""
    expect(a, words_of(f"weights and cache{smaller}", data) + on_check(check), model, parts)
    with progress_bar(a, "measuring formats") as progress:
        own |= {"tokenizer": tokenizer, "batch_size": batch_of(a, model, data), "progress": progress}
        found = plan_fit(model, data, check, overwrite=a.overwrite, **own)
    a.no_file = own.get("unwritten") == "plan" and has_no_file(model, found)
    return save(a, found)


def _cache(a: argparse.Namespace) -> Plan:
    """Plan the cache by the damage to a model, checked as a whole."""
    from ..decisions.cache.plan import cache_space, plan_cache
    from ..doctor.cost import Part

    a.model, a.out, a.runtime = a.source, a.out or "plan.json", a.runtime or "transformers"
    check_output(a.out, overwrite=a.overwrite)
    own = options_for(a, plan_cache, _CHECK)
    Limits(bits=a.bits, budget=a.budget).check()
    model, _, data, check = load_parted(a, own.pop("check", 8))
    space = cache_space(model, a.context, a.batch, a.runtime, a.formats, own.get("group"))
    Limits(bits=a.bits, budget=a.budget).bytes(space.table())
    parts = [Part("directional", text_of(data, a), 1.0 + 2.0 * own.get("draws", 4))]
    parts += [] if check is None else [Part("forward", text_of(check, a), times=5.0)]
    expect(a, words_of("the cache", data) + on_check(check), model, parts)
    with progress_bar(a, "measuring keys and values") as progress:
        found = plan_cache(model, data, check, batch_size=batch_of(a, model, data, most=1), progress=progress, **own)
    found.save(a.out, overwrite=a.overwrite)
    return found


def show(a: argparse.Namespace, plan: Plan) -> None:
    """Show the best plans of several memories."""
    unit, name = unit_of(plan.budget["limit"])
    smaller = [name for name in ("experts", "shapes") if name in plan.extra]
    head = (
        "memory",
        *({"experts": "experts", "shapes": "FLOPs"}[name] for name in smaller),
        "weights",
        "cache",
        "bits per weight",
        "per cached number",
        "predicted KL",
        f"KL less per {name}",
    )
    rows = []
    *_, last = plan.extra["curve"]
    for row in plan.extra["curve"]:
        saves = "-" if row is last else row["price"] * unit / 2**30
        sizes = [rounded_up(row["memory"] / unit), *(f"{row[n] / unit:.2f}" for n in ("weights_bytes", "cache_bytes"))]
        sizes[1:1] = [f"{row[n]:.1%}" if n == "shapes" else str(row[n]) for n in smaller]
        rows.append((*sizes, row["weights_bits"], row["cache_bits"], row["predicted"], saves))
    title = f"best plans over memory ({name}) at {plan.extra['context']} tokens x {plan.extra['batch']}"
    show_table(
        a, f"{title}; last column: by how much each further {name} lowers the predicted KL, up to the next row", head, rows
    )
