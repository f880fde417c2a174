"""``layerbudget doctor``."""

from __future__ import annotations

import argparse
from typing import Any

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def register(subparsers: Any) -> None:
    """Add the parser of ``doctor``."""
    from .shared import add_data_options

    parser = subparsers.add_parser("doctor")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(parser)
    parser.add_argument("--estimator", help="estimate the cost of this one only (default: of all)")
    parser.add_argument(
        "--machine",
        metavar="SIZE",
        help='only what the long verbs would take on a machine with so much memory, for example "24 GiB"; loads no weights',
    )
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Examine the model and print findings and costs; exit code 1 where something will fail."""
    from rich.table import Table

    from ..doctor import diagnose
    from ..doctor.diagnosis import duration
    from .shared import batch_of, load, refuse

    if arguments.machine:
        refuse(arguments, ("estimator", "data", "seed", "stream"), "--machine, which reads no text and no weights")
        return _forecast(arguments)
    model, tokenizer, data = load(arguments)
    diagnosis = diagnose(model, tokenizer, data, estimator=arguments.estimator, batch_size=batch_of(arguments))
    table = Table("check", "", "finding", "what to do", box=None, pad_edge=False)
    for f in diagnosis.findings:
        table.add_row(f.check, f"[{_STYLES[f.severity]}]{f.severity}[/]", f.what, f.remedy)
    arguments.console.print(table)
    if diagnosis.efforts:
        title = f"cost on {diagnosis.samples} samples of {diagnosis.length} tokens (estimated from one timed sample)"
        costs = Table("estimator", "passes", "time", "peak memory", box=None, pad_edge=False, title=title, title_justify="left")
        for e in diagnosis.efforts:
            costs.add_row(e.estimator, f"{e.passes:.2f}", duration(e.seconds), f"{e.memory / 2**30:.2f} GiB")
        arguments.console.print(costs)
    return {**diagnosis.to_dict(), "model": arguments.model, "exit_code": 0 if diagnosis.ok else 1}


def _forecast(arguments: argparse.Namespace) -> dict[str, Any]:
    """The long verbs on a machine that may be another one: memory, time (as fast as this one), and whether it fits."""
    import dataclasses

    from rich.table import Table
    from transformers import AutoConfig

    from ..costs import parse_budget
    from ..doctor.diagnosis import duration
    from ..doctor.forecast import forecast, shape_of, time_layer
    from ..errors import UnknownUnit
    from ..loading import find_device, held_dtype, resolve

    wanted = parse_budget(arguments.machine)
    if wanted.unit != "bytes" or wanted.amount <= 0:
        raise UnknownUnit(f"A machine of {arguments.machine} is not in bytes.", "Memory is meant.", "Write '24 GiB'.")
    config = AutoConfig.from_pretrained(resolve(arguments.model, arguments.revision), revision=arguments.revision)
    dtype, device = held_dtype(config, arguments.dtype or "auto"), find_device(arguments.device or "auto")
    shape = shape_of(config, dtype)
    samples, length = arguments.samples or 128, arguments.length or 256
    found = forecast(
        shape, time_layer(shape, dtype, device), samples=samples, length=length, batch_size=arguments.batch_size or 8,
        machine=int(wanted.amount),
    )  # fmt: skip
    title = f"{samples} samples of {length} tokens in {arguments.machine}, as fast as this machine's {device.type}"
    table = Table(
        "verb", "how", "memory", "time", "forwards", "fits", box=None, pad_edge=False, title=title, title_justify="left"
    )
    for f in found:
        row = (f.verb, f.how, f"{f.memory / 2**30:.2f} GiB", duration(f.seconds), f"{f.forwards:.1f}")
        table.add_row(*row, "yes" if f.fits else "[bold red]no[/]")
    arguments.console.print(table)
    record = {"layers": shape.layers, "weights": shape.weights, "forecast": [dataclasses.asdict(f) for f in found]}
    return {"model": arguments.model, **record, "exit_code": 0}
