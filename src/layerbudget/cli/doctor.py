"""``layerbudget doctor``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..doctor.cost import Cost, Shape

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_LENGTH, _BATCH = 256, 8


def register(subparsers: Any) -> None:
    """Add the parser of ``doctor``."""
    from .shared import add_data_options

    parser = subparsers.add_parser("doctor")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, a hub id, or a config.json (prices only)")
    add_data_options(parser)
    parser.add_argument("--estimator", help="price this one only (default: every long verb)")
    parser.add_argument(
        "--machine",
        metavar="SIZE",
        help='price the long verbs for a machine with so much memory, say "24 GiB" (default: this one); loads no weights',
    )
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Examine the model, price every long verb; exit code 1 where something will fail."""
    from rich.table import Table

    from ..doctor import diagnose
    from ..models.loading import describe_place
    from .shared import announce, load, refuse

    if arguments.machine or not _has_weights(arguments.model):
        why = "--machine, which reads no text and no weights" if arguments.machine else "a configuration without weights"
        refuse(arguments, ("data", "seed", "stream"), why)
        return _unloaded(arguments)
    model, tokenizer, data = load(arguments)
    announce(arguments, f"{arguments.model}: {describe_place(model)}.")
    diagnosis = diagnose(model, tokenizer, data)
    table = Table("check", "", "finding", "what to do", box=None, pad_edge=False)
    for f in diagnosis.findings:
        table.add_row(f.check, f"[{_STYLES[f.severity]}]{f.severity}[/]", f.what, f.remedy)
    arguments.console.print(table)
    record = _loaded(arguments, model) if diagnosis.ok else {}
    return {**diagnosis.to_dict(), **record, "model": arguments.model, "exit_code": 0 if diagnosis.ok else 1}


def _has_weights(name: str) -> bool:
    """Whether there is more than a configuration; what is no local folder is left to the loader."""
    path = Path(name).expanduser()
    if path.is_file():
        return False
    endings = (".safetensors", ".bin", ".index.json", ".pt", ".gguf")
    return not path.is_dir() or any(f.name.endswith(endings) for f in path.iterdir())


def _loaded(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
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
    text = Text(samples=_BATCH, length=arguments.length or _LENGTH, batch=arguments.batch_size or _BATCH)
    token = time_token(shape, first.dtype, first.device, model=model if lies is None else None, text=text)
    machine = free_bytes(first.device) + (shape.weights if lies is None else 0)
    refused = refusals(model)
    record = _priced(arguments, shape, token, machine, f"on this machine's {first.device.type}", refused)
    return {**record, "refused": refused}


def _unloaded(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prices from a configuration, on a machine that may be another one: as fast as this one."""
    from ..doctor.cost import shape_of_config, time_token
    from ..errors import UnknownUnit
    from ..models.loading import find_device, held_dtype
    from ..models.machine import free_bytes
    from ..planning.costs import parse_budget

    machine, where = None, "this machine"
    if arguments.machine:
        wanted, where = parse_budget(arguments.machine), arguments.machine
        if wanted.unit != "bytes" or wanted.amount <= 0:
            raise UnknownUnit(f"A machine of {arguments.machine} is not in bytes.", "Memory is meant.", "Write '24 GiB'.")
        machine = int(wanted.amount)
    config = _configuration(arguments)
    dtype, device = held_dtype(config, arguments.dtype or "auto"), find_device(arguments.device or "auto")
    shape = shape_of_config(config, dtype)
    title = f"in {where}, {str(dtype).removeprefix('torch.')}, as fast as this machine's {device.type}; no weights were read"
    record = _priced(arguments, shape, time_token(shape, dtype, device), machine or free_bytes(device), title)
    return {"model": arguments.model, "layers": shape.layers, "weights": shape.weights, **record, "exit_code": 0}


def _configuration(arguments: argparse.Namespace) -> Any:
    """The configuration of a model, or a file that is one.

    Raises:
        NotFound, CorruptFile: No such file, or no configuration in it.
    """
    from transformers import AutoConfig

    from ..models.loading import foreign, resolve
    from ..storage import reading

    path = Path(arguments.model).expanduser()
    where = str(path)
    if path.is_file():
        reading.read(path, "configuration", limit=1 << 26, remedy="Point to config.json.")
    else:
        where = resolve(arguments.model, arguments.revision)
    with foreign(f"{arguments.model} is no configuration", "It is a transformers config.json.", "Point to a model folder."):
        return AutoConfig.from_pretrained(where, revision=arguments.revision)


def _priced(
    a: argparse.Namespace, shape: Shape, token: float, machine: int, title: str, refused: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Price every long verb but those that refuse the model, and show it."""
    from ..doctor.cost import long_verbs, price
    from ..errors import InvalidInput

    verbs = long_verbs(
        shape, samples=a.samples, length=a.length or _LENGTH, batch=a.batch_size or _BATCH,
        demo=a.model == "demo",
    )  # fmt: skip
    if a.estimator is not None:
        wanted = f"score {a.estimator}"
        if wanted not in verbs:
            known = ", ".join(v.removeprefix("score ") for v in verbs if v.startswith("score "))
            raise InvalidInput(f"There is no price for {a.estimator!r}.", f"There is one for {known}.", "Choose one.")
        verbs = {wanted: verbs[wanted]}
    refusing = {verb: why for verb, why in refused.items() if verb in verbs}
    found = [
        (price(verb, parts, shape, token, machine), parts[0].text) for verb, parts in verbs.items() if verb not in refusing
    ]
    _show(a, found, title)
    for why in dict.fromkeys(refusing.values()):
        a.console.print(f"refused: {', '.join(verb for verb in refusing if refusing[verb] == why)}. {why}")
    return {"forecast": [{**dataclasses.asdict(f), "samples": t.samples, "length": t.length} for f, t in found]}


def _show(arguments: argparse.Namespace, found: Sequence[tuple[Cost, Any]], title: str) -> None:
    from rich.table import Table

    from ..doctor.cost import duration

    head = ("verb", "text", "how", "memory", "time", "forwards", "fits")
    title = f"what the long verbs take {title}; finetune: one epoch"
    table = Table(*head, box=None, pad_edge=False, title=title, title_justify="left")
    for f, text in found:
        row = (f.verb, f"{text.samples} x {text.length}", f.how, f"{f.memory / 2**30:.2f} GiB", duration(f.seconds))
        table.add_row(*row, f"{f.forwards:.1f}", "yes" if f.fits else "[bold red]no[/]")
    arguments.console.print(table)
