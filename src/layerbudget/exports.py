"""Plans in the files of other tools: one function per format, and the table of them. No torch here.

A function ``(plan, *, options) -> text`` with the decorator :func:`export` is a format too; so is what an installed package
registers in a module that its entry point of the group ``layerbudget.exports`` names.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .decision import EXPORTS, Export, decision_of, exports_of
from .errors import InvalidInput, NotFound
from .plan import Plan

Call = Callable[..., str]


def export(name: str, **fields: Any) -> Callable[[Call], Call]:
    """Register a function ``(plan, *, ...) -> text`` as a format; fields are those of :class:`~layerbudget.decision.Export`."""

    def add(call: Call) -> Call:
        EXPORTS.add(name, Export(name=name, call=call, **fields))
        return call

    return add


def format_for(plan: Plan) -> str:
    """Return the format of a plan where none is named: the first for its kind that takes it, else for one of its parts."""
    kinds = dict.fromkeys((plan.kind, *decision_of(plan).parts(plan)))
    made = [each for kind in kinds for each in EXPORTS.all().values() if kind in each.kinds]
    return next((each.name for each in made if each.takes(plan)), made[0].name if made else "csv")


def find_export(name: str | None, plan: Plan) -> Export:
    """Return the format of a name (``my.py:name`` runs that file first), or the plan's own where none is named.

    Raises:
        InvalidInput: There is none; the message lists those that this plan can be written as.
    """
    name = name or format_for(plan)
    if name not in EXPORTS.names() and ".py:" not in name:
        known = ", ".join(f"{e.name} ({e.summary})" for e in exports_of(plan))
        there = f"For a plan of {plan.kind} there are {known}."
        raise InvalidInput(f"There is no export format {name!r}.", there, "Choose one of those.")
    return EXPORTS.find(name)


def find_plan(path: Path | str) -> Plan:
    """Return the plan in a file, or in the folder of a result (``plan.json``).

    Raises:
        NotFound: The folder holds none.
    """
    file = Path(path) / "plan.json" if Path(path).is_dir() else Path(path)
    if not file.is_file() and Path(path).is_dir():
        raise NotFound(f"{path} holds no plan.json.", "Folders of demo and apply hold one.", "Name the plan's own file.")
    return Plan.load(file)


@export("layers", file="layers.json", summary="{module: value} as JSON", use="One number per module, by its full name.")
def layers_json(plan: Plan) -> str:
    """Return ``{module: value}`` in the model's own order."""
    whole = decision_of(plan).whole
    values = {m: b.count if whole else b.value for b in plan.blocks for m in b.modules}
    return json.dumps(values, indent=1) + "\n"


@export("csv", file="plan.csv", summary="one row per block", use="One row per block, for a spreadsheet.")
def blocks_csv(plan: Plan) -> str:
    """Return ``block,value,count,parameters,modules``, one row per block; modules are separated by blanks.

    Plans of formats also have ``format``, its ``damage`` (nats per token), and format, bytes and damage of the next smaller and
    the next larger one, as :meth:`~layerbudget.decision.Decision.matrices` gives them; what is not known is empty.
    """
    text = io.StringIO()
    rows, why = csv.writer(text, lineterminator="\n"), decision_of(plan).matrices(plan)
    steps = [(side, name) for side in ("smaller", "larger") for name in ("format", "bytes", "damage")]
    more = ("format", "damage", *(f"{side}_{name}" for side, name in steps)) if why else ()
    rows.writerow(("block", "value", "count", "parameters", "modules", *more))
    for k, b in enumerate(plan.blocks):
        matrix = why[k] if why else {}
        others = [(matrix.get(side) or {}).get(name) for side, name in steps]
        cells = (matrix["format"], matrix.get("damage"), *others) if matrix else ()
        rows.writerow((b.name, repr(b.value), b.count, b.numel, " ".join(b.modules), *cells))
    return text.getvalue()
