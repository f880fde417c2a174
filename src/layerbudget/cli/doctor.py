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
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Examine the model and print findings and costs; exit code 1 where something will fail."""
    from rich.table import Table

    from ..doctor import diagnose
    from ..doctor.diagnosis import duration
    from .shared import batch_of, load

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
