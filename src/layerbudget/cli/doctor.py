"""``layerbudget doctor``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .display import announce
from .options import add_model, add_place, add_verb, load, refuse, split_revision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..doctor.cost import Cost, Shape

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_LENGTH, _BATCH = 256, 8


def register(subparsers: Any) -> None:
    """Add the parser of ``doctor``."""
    p = add_verb(subparsers, "doctor", handler)
    add_model(p, "demo, a local folder, a hub id, or a config.json (prices only)")
    p.add_argument(
        "--machine",
        metavar="SIZE",
        help='price the long commands for a machine with so much memory, say "24 GiB" (default: this one); loads no weights',
    )
    p.add_argument("--data", help="text to look at, as for score (default: stdlib)")
    p.add_argument("--samples", type=int, help="price every command for so many sequences (default: its own number)")
    p.add_argument("--length", type=int, help="tokens per sequence (default: 256)")
    p.add_argument("--batch-size", type=int, help="sequences per forward pass (default: 8)")
    p.set_defaults(seed=0)
    p.set_defaults(data_defaults={"data": "stdlib", "samples": 128, "length": 256, "seed": 0})
    add_place(p)


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Examine the model, price every long command; exit code 1 where something will fail."""
    from rich.table import Table

    from ..doctor import diagnose
    from ..models.loading import describe_place

    if a.machine or not _has_weights(a.model):
        why = "--machine, which reads no text and no weights" if a.machine else "a configuration without weights"
        refuse(a, ("data", "stream"), why)
        return _unloaded(a)
    model, tokenizer, data = load(a)
    announce(a, f"{a.model}: {describe_place(model)}.")
    diagnosis = diagnose(model, tokenizer, data)
    table = Table("check", "", "finding", "what to do", box=None, pad_edge=False)
    for f in diagnosis.findings:
        table.add_row(f.check, f"[{_STYLES[f.severity]}]{f.severity}[/]", f.what, f.remedy)
    a.console.print(table)
    record = _loaded(a, model) if diagnosis.ok else {}
    return {**diagnosis.to_dict(), **record, "model": a.model, "exit_code": 0 if diagnosis.ok else 1}


def _has_weights(name: str) -> bool:
    """Whether there is more than a configuration; what is no local folder is left to the loader."""
    path = Path(name).expanduser()
    if path.is_file():
        return False
    endings = (".safetensors", ".bin", ".index.json", ".pt", ".gguf")
    return not path.is_dir() or any(f.name.endswith(endings) for f in path.iterdir())


def _loaded(a: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Prices for a model that is in memory, or streamed, on this machine."""
    from ..doctor.cost import Text, shape_in_memory, time_token
    from ..doctor.diagnosis import refusals
    from ..errors import UnknownStructure
    from ..models.machine import free_bytes
    from ..models.offload import mapped

    try:
        shape = shape_in_memory(model)
    except UnknownStructure:
        return {"forecast": []}
    first, lies = next(model.parameters()), mapped(model)
    text = Text(samples=_BATCH, length=a.length or _LENGTH, batch=a.batch_size or _BATCH)
    token = time_token(shape, first.dtype, first.device, model=model if lies is None else None, text=text)
    machine = free_bytes(first.device) + (shape.weights if lies is None else 0)
    refused = refusals(model)
    record = _priced(a, shape, token, machine, f"on this machine's {first.device.type}", refused)
    return {**record, "refused": refused}


def _unloaded(a: argparse.Namespace) -> dict[str, Any]:
    """Prices from a configuration, on a machine that may be another one: as fast as this one."""
    from ..doctor.cost import shape_of_config, time_token
    from ..errors import UnknownUnit
    from ..models.loading import find_device, held_dtype
    from ..models.machine import free_bytes
    from ..planning.costs import parse_budget

    machine, where = None, "this machine"
    if a.machine:
        wanted, where = parse_budget(a.machine), a.machine
        if wanted.unit != "bytes" or wanted.amount <= 0:
            raise UnknownUnit(f"A machine of {a.machine} is not in bytes.", "Memory is meant.", "Write '24 GiB'.")
        machine = int(wanted.amount)
    config = _configuration(a)
    dtype, device = held_dtype(config, a.dtype or "auto"), find_device(a.device or "auto")
    shape = shape_of_config(config, dtype)
    title = f"in {where}, {str(dtype).removeprefix('torch.')}, as fast as this machine's {device.type}; no weights were read"
    record = _priced(a, shape, time_token(shape, dtype, device), machine or free_bytes(device), title)
    return {"model": a.model, "layers": shape.layers, "weights": shape.weights, **record, "exit_code": 0}


def _configuration(a: argparse.Namespace) -> Any:
    """The configuration of a model, or a file that is one.

    Raises:
        NotFound, CorruptFile: No such file, or no configuration in it.
    """
    from transformers import AutoConfig

    from ..models.loading import foreign, resolve
    from ..storage import reading

    name, revision = split_revision(a.model)
    path = Path(name).expanduser()
    where = str(path)
    if path.is_file():
        reading.read(path, "configuration", limit=1 << 26, remedy="Point to config.json.")
    else:
        where = resolve(name, revision)
    with foreign(f"{a.model} is no configuration", "It is a transformers config.json.", "Point to a model folder."):
        return AutoConfig.from_pretrained(where, revision=revision)


def _priced(
    a: argparse.Namespace, shape: Shape, token: float, machine: int, title: str, refused: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Price every long verb but those that refuse the model, and show it."""
    from ..doctor.cost import long_verbs, price

    length, batch = a.length or _LENGTH, a.batch_size or _BATCH
    verbs = long_verbs(shape, samples=a.samples, length=length, batch=batch, demo=a.model == "demo")
    refusing = {verb: why for verb, why in refused.items() if verb in verbs}
    found = [
        (price(verb, parts, shape, token, machine), parts[0].text) for verb, parts in verbs.items() if verb not in refusing
    ]
    _show(a, found, title)
    for why in dict.fromkeys(refusing.values()):
        a.console.print(f"refused: {', '.join(verb for verb in refusing if refusing[verb] == why)}. {why}")
    return {"forecast": [{**dataclasses.asdict(f), "samples": t.samples, "length": t.length} for f, t in found]}


def _show(a: argparse.Namespace, found: Sequence[tuple[Cost, Any]], title: str) -> None:
    from rich.table import Table

    from ..doctor.cost import duration

    head = ("verb", "text", "how", "memory", "time", "forwards", "fits")
    title = f"what the long verbs take {title}; finetune: one epoch"
    table = Table(*head, box=None, pad_edge=False, title=title, title_justify="left")
    for f, text in found:
        row = (f.verb, f"{text.samples} x {text.length}", f.how, f"{f.memory / 2**30:.2f} GiB", duration(f.seconds))
        table.add_row(*row, f"{f.forwards:.1f}", "yes" if f.fits else "[bold red]no[/]")
    a.console.print(table)
