"""``layerbudget plan kept-experts MODEL``, and how ``apply`` writes such a plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..compressors.formats import GGUF
from ..decisions.kept_experts.program import RULES
from ..plan import Plan
from ..records import check_output
from ..registry import Option, options_of
from .display import end_dry_run, ending, expect, progress_bar, say, say_next, text_of, words_of
from .files import need_scores, on_text
from .options import DATA, add_data, add_set, add_verb, batch_of, load, one_process, options_for, refuse, written_bytes

_TYPES = {"types": Option(name="types", type=str, default=None)}


def add(kinds: Any, handler: Any) -> argparse.ArgumentParser:
    """Return the parser of ``plan kept-experts``."""
    p = add_verb(kinds, "kept-experts", handler, "which experts of a model stay, and how many of each layer")
    p.add_argument("source", metavar="MODEL", help="a model with routed experts")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--keep", help="what stays: a share of all experts (0.5), '96 experts', or the model's bytes: '12 GiB'")
    budget.add_argument("--damage", type=float, help="or what it may cost, in nats per token: as few experts as that allows")
    p.add_argument("--even", action="store_true", help="the same number in all layers: what every runtime loads")
    p.add_argument("--rule", choices=RULES, default="directional", help="scores that decide who goes (default: directional)")
    add_set(p, "draws (of labels), or types=FILE: what plan bits --save-scores wrote; --keep is then the whole file's bytes")
    add_data(p, samples=16)
    return p


def plan(a: argparse.Namespace) -> Plan:
    """Return the plan by the damage to a model, written."""
    from ..decisions.kept_experts.plan import plan_kept_experts
    from ..doctor.cost import removing
    from ..execution.processes import is_main

    a.model, a.out = a.source, a.out or "plan.json"
    check_output(a.out, overwrite=a.overwrite)
    known = {name: option for name, option in options_of(plan_kept_experts).items() if name != "bytes_per_parameter"}
    own = options_for(a, known, _TYPES)
    if "types" in own:
        own["types"] = need_scores(str(own["types"]), "plan bits MODEL --bits N --save-scores FILE")
    keep = None if a.keep is None else float(a.keep) if _is_number(a.keep) else a.keep
    model, _, data = load(a)
    expect(a, words_of("experts", data), model, removing(text_of(data, a), draws=own.get("draws", 4)))
    with progress_bar(a, "looking at experts") as progress:
        own |= {"batch_size": batch_of(a, model, data), "progress": progress, "bytes_per_parameter": written_bytes(a)}
        found = plan_kept_experts(model, data, keep, **own)
    if is_main():
        found.save(a.out, overwrite=a.overwrite)
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def write(a: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Remove the experts that a plan lets go, recount, and save a checkpoint."""
    from ..decisions.kept_experts.apply import expert_card, keep_experts
    from ..decisions.sparsity.save import check_room
    from ..models.blocks import describe, pretrained
    from ..models.machine import versions
    from ..plans.verdict import expected
    from ..records import SCHEMA_VERSION, dumps, write_text
    from ..storage.folders import write_model

    one_process("Experts are removed")
    refuse(a, ("method", "pattern", "set", "resume", *DATA), f"a plan of kind {plan.kind}")
    model, tokenizer, _ = load(a, data=False)
    check_room(model, a.out, plan=plan)
    if a.dry_run:
        plan.validate(describe(model))
        expect(a, "experts go, no text is read", model)
        end_dry_run(a)
    receipt = dict(keep_experts(model, plan))
    record = dumps({"schema_version": SCHEMA_VERSION, "plan_digest": plan.digest, **receipt, "versions": versions()})
    card = expert_card(plan, receipt, type(pretrained(model)).__name__)
    beside: dict[str, Callable[[Path], object]] = {"plan.json": plan.save, "receipt.json": partial(write_text, text=record)}
    beside["README.md"] = partial(write_text, text=card)
    write_model(pretrained(model), tokenizer, a.out, beside, overwrite=a.overwrite)
    experts, size = receipt["experts"], receipt["parameters"]
    say(
        a,
        f"{experts['after']} of {experts['before']} experts stay; parameters {size['before']:,} -> {size['after']:,}, of which "
        f"a token passes through {receipt['active']['after']:,}; saved to {a.out}.",
        f"It is loaded by {receipt['loads']}.",
        expected(plan),
    )
    if typed := plan.extra.get("typed"):
        own = ["--format", "gguf"] if typed["family"] == GGUF else []
        size = f"{plan.budget['limit']:.0f} bytes"
        follows = say_next(a, "plan", "bits", a.out, *own, "--method", typed["method"], "--budget", size)
    else:
        follows = say_next(a, "evaluate", a.out, "--against", a.model, *on_text(a, plan))
    return {**receipt, "output": str(a.out), **ending(expected(plan), follows)}
