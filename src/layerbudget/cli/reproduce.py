"""``layerbudget reproduce``: the paper's figures and tables as commands."""

from __future__ import annotations

import argparse
from typing import Any

from .files import show_table

AVAILABLE = {
    "released": "the expert lists and sparsity ratios that the paper released for Mistral-7B, recomputed",
    "mlp": "the 8-layer MLP on digits, a corrected version of the released script (its page says in what): gain and proxies",
}


def register(subparsers: Any) -> None:
    """Add the parser of ``reproduce``."""
    names = subparsers.add_parser("reproduce").add_subparsers(dest="name", required=True, metavar="NAME")
    listing = names.add_parser("list", help="what can be reproduced")
    listing.set_defaults(handler=run_list)
    names.add_parser("released", help=AVAILABLE["released"]).set_defaults(handler=run_released)
    mlp = names.add_parser("mlp", help=AVAILABLE["mlp"])
    mlp.add_argument("--scale", choices=("small", "full"), default="small", help="small: one seed, two dampings, width 32")
    mlp.set_defaults(handler=run_mlp)


def run_list(arguments: argparse.Namespace) -> dict[str, Any]:
    """Say what can be reproduced."""
    for name, text in AVAILABLE.items():
        arguments.console.print(f"{name}: {text}")
    return {"available": AVAILABLE}


def run_released(a: argparse.Namespace) -> dict[str, Any]:
    """``reproduce released``."""
    from ..reproduction.released import reproduce_released

    result = reproduce_released()
    rows = []
    for name, task in result["tasks"].items():
        rows.append((name, "sparsity", f"largest difference {task['sparsity']['largest_difference']:.1e}"))
        for variant, experts in task["experts"].items():
            rows.append((name, f"experts, {variant}", f"{experts['equal']}/32 equal, {experts['total']} in all"))
            rows.append(("", "  file order", " ".join(map(str, experts["counts_file_order"]))))
            rows.append(("", "  layer order", " ".join(map(str, experts["counts"]))))
    show_table(a, "released artefacts, recomputed", ("task", "artefact", "result"), rows)
    return result


def run_mlp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the MLPs, compute every proxy, show the tables."""
    from rich.markdown import Markdown

    from ..reproduction.mlp import DAMPINGS, Setting, render, tables
    from .shared import progress_bar

    full = arguments.scale == "full"
    with progress_bar(arguments, "seeds") as progress:
        result = tables(
            seeds=(0, 1, 2) if full else (0,), dampings=DAMPINGS if full else DAMPINGS[2:4],
            setting=None if full else Setting(width=32, epochs=8, calibration=128), progress=progress,
        )  # fmt: skip
    arguments.console.print(Markdown(render(result)))
    return result
