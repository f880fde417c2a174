"""Which experiment reproduces which table or figure: one entry per experiment, one row per item of the paper."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from ..errors import InvalidInput
from .outcome import Outcome
from .published import published


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment.

    Attributes:
        name: What users write.
        items: Tables and figures of the paper.
        summary: A line for the help.
        home: ``module:function`` of this room, called with ``scale``, ``model``, ``data_dir``, ``out``, ``progress``.
        small: What ``--scale small`` does.
        full: What ``--scale full`` does: the same code.
        reads: What it reads beside the scale: ``model``, ``data_dir``, ``variant``, ...
        reads_always: Options that must be given, such as ``out`` for a run whose cells are kept.
    """

    name: str
    items: tuple[str, ...]
    summary: str
    home: str
    small: str
    full: str
    reads: tuple[str, ...] = ()
    reads_always: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What reproduces it."""
        return f"layerbudget reproduce {self.name}"

    def open(self) -> Callable[..., Outcome]:
        """The function."""
        module, function = self.home.split(":")
        return getattr(importlib.import_module(module, __package__), function)


EXPERIMENTS = (
    Experiment(
        name="released", items=("table-4",), summary="the expert lists and sparsity ratios released for Mistral-7B, recomputed",
        home=".released:run_released", small="all of it: no model is needed", full="the same",
    ),
    Experiment(
        name="mlp", items=tuple(f"table-{i}" for i in range(8, 13)), reads=("variant",),
        summary="direct and proxy gains of an 8-layer MLP on digits, as released and corrected",
        home=".mlp_run:run_mlp", small="three seeds, all dampings: the whole experiment", full="ten seeds",
    ),
    Experiment(
        name="tests", items=("table-13",), summary="the paired tests, from the paper's own tables",
        home=".significance:run_tests", small="all of it: no model is needed", full="the same",
    ),
)  # fmt: skip
# What no experiment can reproduce, and why.
_LATER = "no run of it in this release yet; its published figures are held"
NOT_APPLICABLE: Mapping[str, str] = dict.fromkeys(
    (*(f"figure-{i}" for i in range(1, 6)), "table-1", "table-2", "table-3", "table-5", "table-6", "table-7"), _LATER
)


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        InvalidInput: There is none.
    """
    for entry in EXPERIMENTS:
        if entry.name == name:
            return entry
    raise InvalidInput(f"There is no experiment {name!r}.", f"There are {', '.join(e.name for e in EXPERIMENTS)}.", "")


@functools.cache
def small_results() -> Mapping[str, Mapping[str, Any]]:
    """Run time, finding and shape of every experiment at small scale, as measured for this release."""
    text = (resources.files(__package__) / "data" / "small.json").read_text(encoding="utf-8")
    return json.loads(text)["experiments"]


def listing() -> list[dict[str, Any]]:
    """One row per table and figure of the paper.

    Returns:
        ``{item, number, title, experiment, command, small, full, seconds, finding, shape, reason}``; ``reason`` says why an
        item has no experiment, and is null otherwise.
    """
    known, rows = small_results(), []
    for name, what in published().items():
        entry = next((e for e in EXPERIMENTS if name in e.items), None)
        row = {"item": name, "number": what["number"], "title": what["title"]}
        if entry is None:
            rows.append({**row, **dict.fromkeys(("experiment", "command", "small", "full", "seconds", "finding", "shape")),
                         "reason": NOT_APPLICABLE[name]})  # fmt: skip
            continue
        found = known.get(entry.name, {})
        rows.append({
            **row, "experiment": entry.name, "command": entry.command, "small": entry.small, "full": entry.full,
            **{k: found.get(k) for k in ("seconds", "finding", "shape")}, "reason": None,
        })  # fmt: skip
    return rows
