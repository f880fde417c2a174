"""``layerbudget reproduce``: every table and figure of the paper as a command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from ..running.cells import Elsewhere, parse_part
from .files import say, show_table
from .parts import add_parts, asked_for_parts, launch_parts
from .progress import progress_bar

SCALES = ("small", "full")
_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "variant": {"choices": ("both", "released", "corrected"), "default": "both", "help": "default: both, side by side"},
    "model": {"default": "demo", "metavar": "MODEL", "help": "demo, a local folder, or a hub id (default: demo)"},
    "files": {"metavar": "DIR", "help": "the paper's repository or its mdl/data: recompute every task whose files are there"},
    "data_dir": {"metavar": "DIR", "help": "folder with the original files of the tasks"},
    "paper": {"choices": ("mistral", "gemma"), "default": "mistral", "help": "whose table and constants (default: mistral)"},
}


def register(subparsers: Any) -> None:
    """Add the parser of ``reproduce``."""
    from ..reproduction.catalogue import EXPERIMENTS

    names = subparsers.add_parser("reproduce").add_subparsers(dest="name", required=True, metavar="NAME")
    listing = names.add_parser("list", help="every table and figure of the paper: command, run time, finding")
    listing.set_defaults(handler=run_list)
    show = names.add_parser("published", help="what the paper printed")
    show.add_argument("item", metavar="ITEM", help="table-1 ... table-13, figure-1 ... figure-5")
    show.set_defaults(handler=run_published)
    for entry in EXPERIMENTS:
        p = names.add_parser(entry.name, help=entry.summary)
        p.add_argument("--scale", choices=SCALES, default="small", help=f"small: {entry.small}; full: {entry.full}")
        for flag in entry.reads:
            p.add_argument(f"--{flag.replace('_', '-')}", **_FLAGS[flag])
        kept = ", and keep finished cells: a run that was stopped goes on" if entry.keeps else ""
        p.add_argument("-o", "--out", metavar="DIR", help=f"leave result.json, table.csv and figure.png here{kept}")
        if entry.keeps:
            add_parts(p)
        p.set_defaults(handler=run_experiment, experiment=entry.name)


def run_list(a: argparse.Namespace) -> dict[str, Any]:
    """``reproduce list``."""
    from ..reproduction.catalogue import EXPERIMENTS, listing

    rows = listing()
    table = [
        (r["number"], r["title"], r["command"] or "-", "-" if r["seconds"] is None else f"{r['seconds']:.0f} s",
         r["finding"] or r["reason"] or "not run for this release: the command is ready")
        for r in rows
    ]  # fmt: skip
    show_table(a, "the paper's tables and figures", ("item", "what", "command", "small scale", "finding"), table)
    for entry in EXPERIMENTS:
        say(a, [f"{entry.name}: {entry.summary}. Small: {entry.small}. Full: {entry.full}."])
    return {"items": rows, "available": {e.name: e.summary for e in EXPERIMENTS}}


def run_published(a: argparse.Namespace) -> dict[str, Any]:
    """``reproduce published``."""
    from ..reproduction.published import item

    found = item(a.item)
    rows = [(row, *(_cell(values.get(c)) for c in found["columns"])) for row, values in found["rows"].items()]
    show_table(a, f"{found['number']}: {found['title']} ({found['unit']})", ("", *found["columns"]), rows)
    say(a, [f"Read from {found['origin']} ({found['label']})."])
    say(a, found["notes"])
    return {"item": a.item, **found}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:g} +- {value[1]:g}"
    return "" if value is None else f"{value:g}"


def _parts(a: argparse.Namespace) -> tuple[int, int]:
    """The part of this run; those of ``--workers`` have ended when it begins.

    Raises:
        InvalidInput: Parts without a folder that they share.
    """
    part = parse_part(a.part)
    if a.out is None and (a.workers is not None or a.cells_only or part[1] > 1):
        raise InvalidInput("Parts share the folder of --out, and none was named.", "Cells are kept in it.", "Name one.")
    if asked_for_parts(a):
        launch_parts(a)
    return part


def run_experiment(a: argparse.Namespace) -> dict[str, Any]:
    """Run one experiment, show its table, finding and shape, and leave its files."""
    from ..reproduction.catalogue import find_experiment
    from ..reproduction.outcome import check_folder, leave

    entry = find_experiment(a.experiment)
    if a.out:
        check_folder(a.out, overwrite=a.overwrite)
    given: dict[str, Any] = {name: getattr(a, name) for name in entry.reads}
    if entry.keeps:
        given["part"] = _parts(a)
    _expect(a, entry)
    try:
        with progress_bar(a, entry.name) as progress:
            outcome = entry.open()(scale=a.scale, out=a.out, progress=progress, **given)
    except Elsewhere as others:
        say(a, [f"Part {a.part}: {others}. The table is made when all are there."])
        return {"experiment": entry.name, "part": a.part, "complete": False, "cells": str(others)}
    if getattr(a, "cells_only", False):
        say(a, ["All cells are there; the table is left to a run without --cells-only."])
        return {"experiment": entry.name, "part": a.part, "complete": True}
    columns = tuple(dict.fromkeys(name for row in outcome.rows for name in row))
    show_table(a, entry.summary, columns, [["" if r.get(c) is None else r[c] for c in columns] for r in outcome.rows])
    say(a, [f"Finding: {outcome.finding}.", f"The paper's shape: {outcome.line}"])
    for text in outcome.result.get("sentences", ()):
        say(a, [text])
    if a.out:
        say(a, [f"Written to {leave(outcome, a.out, overwrite=a.overwrite)}."])
    return {**outcome.result, **outcome.to_dict()} if entry.name == "released" else outcome.to_dict()


def _expect(a: argparse.Namespace, entry: Any) -> None:
    """Say what it took for this release, where it was run; another machine takes another time."""
    from ..doctor.diagnosis import duration
    from ..reproduction.catalogue import listing
    from .outlook import begin

    known = [r["seconds"] for r in listing() if r["command"] == entry.command and r["seconds"] is not None]
    took = f"; it took {duration(max(known))} when this release was made" if known and a.scale == "small" else ""
    begin(a, f"{entry.name} at {a.scale} scale{took}", None)
