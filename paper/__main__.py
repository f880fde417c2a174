"""Every table and figure of the paper as a command: ``python -m paper list | published ITEM | run NAME``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from layerbudget.errors import InvalidInput, LayerbudgetError
from layerbudget.storage.parts import parse_part

from .catalogue import EXPERIMENTS, Experiment, find_experiment, listing
from .cells import NotThisWorker
from .outcome import check_folder, leave
from .published import item

SCALES = ("small", "full")
_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "variant": {"choices": ("both", "released", "corrected"), "default": "both", "help": "default: both, side by side"},
    "model": {"default": "demo", "metavar": "MODEL", "help": "demo, a local folder, or a hub id (default: demo)"},
    "files": {"metavar": "DIR", "help": "the paper's repository or its mdl/data: recompute every task whose files are there"},
    "data_dir": {"metavar": "DIR", "help": "folder with the original files of the tasks"},
    "paper": {"choices": ("mistral", "gemma"), "default": "mistral", "help": "whose table and constants (default: mistral)"},
}
console = Console()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m paper", description="The paper's tables and figures.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="every table and figure: command, run time, finding").set_defaults(handler=show_list)
    show = commands.add_parser("published", help="what the paper printed")
    show.add_argument("item", metavar="ITEM", help="table-1 ... table-13, figure-1 ... figure-5")
    show.set_defaults(handler=show_published)
    names = commands.add_parser("run", help="run an experiment").add_subparsers(required=True, metavar="NAME")
    for entry in EXPERIMENTS:
        p = names.add_parser(entry.name, help=entry.summary)
        p.add_argument("--scale", choices=SCALES, default="small", help=f"small: {entry.small}; full: {entry.full}")
        for flag in entry.reads:
            p.add_argument(f"--{flag.replace('_', '-')}", **_FLAGS[flag])
        kept = ", and keep finished cells: a run that was stopped goes on" if entry.keeps else ""
        p.add_argument("-o", "--out", metavar="DIR", help=f"leave result.json, table.csv and figure.png here{kept}")
        p.add_argument("--overwrite", action="store_true", help="replace existing output files")
        if entry.keeps:
            p.add_argument("--part", default="1/1", metavar="I/N", help="make every N-th missing cell: N processes share --out")
        p.set_defaults(handler=run_experiment, experiment=entry)
    return parser


def _show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    console.print(table)


def show_list(arguments: argparse.Namespace) -> None:
    """Print a row for every table and figure of the paper, and a line for every experiment."""
    rows = [
        (r["number"], r["title"], r["command"] or "-", "-" if r["seconds"] is None else f"{r['seconds']:.0f} s",
         r["finding"] or r["reason"] or "not run for this release: the command is ready")
        for r in listing()
    ]  # fmt: skip
    _show("the paper's tables and figures", ("item", "what", "command", "small scale", "finding"), rows)
    for entry in EXPERIMENTS:
        console.print(f"{entry.name}: {entry.summary}. Small: {entry.small}. Full: {entry.full}.")


def show_published(arguments: argparse.Namespace) -> None:
    """Print what the paper printed in one table or figure."""
    found = item(arguments.item)
    rows = [(row, *(_cell(values.get(c)) for c in found["columns"])) for row, values in found["rows"].items()]
    _show(f"{found['number']}: {found['title']} ({found['unit']})", ("", *found["columns"]), rows)
    console.print(f"Read from {found['origin']} ({found['label']}).")
    for note in found["notes"]:
        console.print(note)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:g} +- {value[1]:g}"
    return "" if value is None else f"{value:g}"


def run_experiment(arguments: argparse.Namespace) -> None:
    """Run one experiment, print its table, finding and shape, and leave its files.

    Raises:
        InvalidInput: Parts without a folder that they share.
    """
    entry: Experiment = find_experiment(arguments.experiment.name)
    given: dict[str, Any] = {name: getattr(arguments, name) for name in entry.reads}
    if entry.keeps:
        given["part"] = parse_part(arguments.part)
        if given["part"][1] > 1 and arguments.out is None:
            raise InvalidInput("Parts share the folder of --out, and none was named.", "Cells are kept in it.", "Name one.")
    if arguments.out:
        check_folder(arguments.out, overwrite=arguments.overwrite)
    try:
        outcome = entry.open()(scale=arguments.scale, out=arguments.out, **given)
    except NotThisWorker as others:
        console.print(f"Part {arguments.part}: {others}. The table is made when all are there.")
        return
    columns = tuple(dict.fromkeys(name for row in outcome.rows for name in row))
    _show(entry.summary, columns, [["" if r.get(c) is None else r[c] for c in columns] for r in outcome.rows])
    for sentence in (
        f"Finding: {outcome.finding}.",
        f"The paper's shape: {outcome.line}",
        *outcome.result.get("sentences", ()),
    ):
        console.print(sentence)
    if arguments.out:
        console.print(f"Written to {leave(outcome, arguments.out, overwrite=arguments.overwrite)}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for a mistake of the user."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.handler(arguments)
    except LayerbudgetError as error:
        Console(stderr=True).print(f"paper: {error}", style="red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
