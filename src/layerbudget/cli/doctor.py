"""``layerbudget doctor``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..decisions.bits.memory import read_context
from ..decisions.bits.program import read_bytes
from ..records import unit_of
from .display import announce, say, show_table
from .files import refuse_long
from .options import add, add_place, add_verb, load, refuse, split_revision

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def register(subparsers: Any) -> None:
    """Add the parser of ``doctor``."""
    p = add_verb(subparsers, "doctor", handler)
    add(p, "model", help="demo, a local folder, a hub id, or a config.json (prices only)")
    p.add_argument(
        "--card",
        metavar="SIZE",
        help='price the long commands for a card or machine of so much memory, "24 GiB" (default: this one); loads no weights',
    )
    p.add_argument("--context", metavar="TOKENS", help="with --card: also say how many bits fit it at 8192 or 32k tokens")
    add(p, "--data", "--length")
    add(p, "--samples", help="price every command for so many sequences (default: its own number)")
    add(p, "--batch-size", help="sequences per forward pass (default: 8)")
    p.set_defaults(seed=0, data_defaults={"data": "stdlib", "samples": 128, "length": 256, "seed": 0})
    add_place(p)


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Examine the model, price every long command; exit code 1 where something will fail."""
    from ..errors import InvalidInput

    if a.context and not a.card:
        raise InvalidInput("--context needs a memory.", "The cache lies in it.", "Give --card '8 GiB'.")
    if a.context:
        refuse_long(a.model, a.context)  # at once: PyTorch and transformers take seconds to load
    from rich.table import Table
    from rich.text import Text as Words

    from ..doctor import diagnose
    from ..doctor.cost import Text, place_of
    from ..doctor.diagnosis import refusals
    from ..errors import UnknownStructure
    from ..models.loading import describe_place

    if a.card or not _has_weights(a.model):
        why = "--card, which reads no text and no weights" if a.card else "a configuration without weights"
        refuse(a, ("data", "stream"), why)
        return _unloaded(a)
    model, tokenizer, data = load(a)
    announce(a, f"{a.model}: {describe_place(model)}.")
    diagnosis = diagnose(model, tokenizer, data)
    table = Table("check", "", "finding", "what to do", box=None, pad_edge=False)
    for f in diagnosis.findings:
        table.add_row(f.check, Words(f.severity, _STYLES[f.severity]), f.what, f.remedy)
    a.console.print(table)
    result = {**diagnosis.to_dict(), "model": a.model, "exit_code": 0 if diagnosis.ok else 1}
    if not diagnosis.ok:
        return result
    result["reach"] = _reached(a, model, data)
    refused, batch = refusals(model), a.batch_size or 8
    try:
        place = place_of(model, Text(samples=batch, length=data.length, batch=batch))
    except UnknownStructure:
        return {**result, "forecast": []}
    where = f"on this machine's {next(model.parameters()).device.type}"
    return {**result, "refused": refused, "forecast": _priced(a, place, where, refused)}


def _reached(a: argparse.Namespace, model: Any, data: Any) -> list[dict[str, Any]]:
    """Show what of the model every verb reaches."""
    from rich.table import Table

    from ..doctor.diagnosis import sample_of
    from ..doctor.reach import reached
    from ..errors import LayerbudgetError

    try:
        found = reached(model, sample_of(model, data))
    except LayerbudgetError:  # without blocks, as a finding has said
        return []
    title = "what every verb reaches of the matrices' weights, embeddings and output head aside"
    table = Table("verb", "share", "what it leaves", box=None, pad_edge=False, title=title, title_justify="left")
    for row in found:
        table.add_row(row.verb, f"{row.share:.1%}", row.left)
    a.console.print(table)
    return [dataclasses.asdict(row) for row in found]


def _has_weights(name: str) -> bool:
    """Whether there is more than a configuration; what is no local folder is left to the loader."""
    path = Path(name).expanduser()
    endings = (".safetensors", ".bin", ".index.json", ".pt", ".gguf")
    return (
        path.suffix == ".gguf"
        or not path.is_file()
        and (not path.is_dir() or any(f.name.endswith(endings) for f in path.iterdir()))
    )


def _unloaded(a: argparse.Namespace) -> dict[str, Any]:
    """Prices from a configuration, on a machine that may be another one: as fast as this one."""
    from ..doctor.cost import shape_of_config, time_token
    from ..models.loading import DTYPES, find_device, held_dtype, quick_dtype
    from ..models.machine import free_bytes

    config = configuration(a)
    device = find_device(a.device or "auto")
    dtype = DTYPES.get(a.dtype) or quick_dtype(held_dtype(config), device)
    machine, where = free_bytes(device), "this machine"
    if a.card:
        machine, where = read_bytes(a.card, "A card", "24 GiB"), a.card
    shape = shape_of_config(config, dtype)
    more = {"fits": _fits(a, config, machine, shape.experts)} if a.context else {}
    title = f"in {where}, {str(dtype).removeprefix('torch.')}, as fast as this machine's {device.type}; no weights were read"
    forecast = _priced(a, (shape, time_token(shape, dtype, device), machine), title, {})
    return {"model": a.model, "layers": shape.layers, "weights": shape.weights, **more, "forecast": forecast, "exit_code": 0}


def _fits(a: argparse.Namespace, config: Any, memory: int, experts: bool) -> list[dict[str, Any]]:
    """Show what fits the memory at the context."""
    from ..doctor.fits import what_fits

    rows = what_fits(config, memory, context := read_context(a.context))
    unit, name = unit_of(memory)
    head, shown = ("cache", f"its {name}", f"{name} for weights", "bits per weight", "largest mix"), []
    for r in rows:
        sizes = (f"{r[n] / unit:.2f}" if r[n] >= 0.1 * unit else f"{r[n] / unit:.2g}" for n in ("cache_bytes", "left"))
        shown.append((r["cache"], *sizes, r["bits"] or "none", r["mix"] or ("-" if r["cache"] == "fp8" else "none")))
    show_table(a, f"what fits {a.card} at {context} tokens, beside buffers", head, shown)
    mixes = [r["mix"] for r in rows if r["mix"]]
    for runtime, part in dict.fromkeys((r["runtime"], r["share"]) for r in rows if r["share"] < 1.0):
        say(a, f"{runtime} takes {part:.0%} of a memory, which is what counts there.")
    ways = {(r["runtime"], r["method"]): None for r in rows if r["bits"]}
    if ways:
        usual = {("llama.cpp", "rtn"): "", ("llama.cpp", "weighted"): " --method weighted"}
        own = next((words for way, words in usual.items() if way in ways), " --runtime vllm")
        say(a, f"layerbudget plan fit MODEL --memory '{a.card}' --context {a.context}{own} chooses both together.")
    elif mixes:
        fewer = " Or keep fewer experts (plan kept-experts)." if experts else ""
        say(a, f"Only a mix fits: layerbudget plan bits MODEL --like {mixes[-1]} has its bytes, for less damage.{fewer}")
    else:
        say(a, f"Nothing fits {a.card} at {context} tokens: take a shorter context or a larger card.")
    return rows


def configuration(a: argparse.Namespace) -> Any:
    """Return the configuration of a model, or of a file that is one."""
    from transformers import AutoConfig

    from ..models.loading import foreign, resolve

    name, revision = split_revision(a.model)
    path = Path(name).expanduser()
    where = str(path) if path.suffix == ".json" and path.is_file() else resolve(name, revision)
    with foreign(f"{a.model} is no configuration", "It is a transformers config.json.", "Point to a model folder."):
        return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)


def _priced(a: argparse.Namespace, place: tuple[Any, ...], title: str, refused: dict[str, str]) -> list[dict[str, Any]]:
    """Price every long verb but those that refuse the model, and show it."""
    from rich.table import Table
    from rich.text import Text

    from ..doctor.cost import duration, long_verbs, price

    own = {"samples": a.samples, "length": a.length or 256, "batch": a.batch_size or 8}
    verbs = long_verbs(**own, demo=a.model == "demo", experts=place[0].experts, widest=max(place[0].inputs))
    title = f"what the long verbs take {title}; finetune: one epoch"
    head = ("verb", "text", "how", "memory", "time", "forwards", "fits")
    table, found = Table(*head, box=None, pad_edge=False, title=title, title_justify="left"), []
    for verb, parts in verbs.items():
        if verb in refused:
            continue
        cost, text = price(verb, parts, *place), parts[0].text
        found.append({**dataclasses.asdict(cost), "samples": text.samples, "length": text.length})
        row = (verb, f"{text.samples} x {text.length}", cost.how, f"{cost.memory / 2**30:.2f} GiB", duration(cost.seconds))
        table.add_row(*row, f"{cost.forwards:.1f}", "yes" if cost.fits else Text("no", "bold red"))
    a.console.print(table)
    for why in dict.fromkeys(why for verb, why in refused.items() if verb in verbs):
        say(a, f"refused: {', '.join(verb for verb in verbs if refused.get(verb) == why)}. {why}")
    return found
