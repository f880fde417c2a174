"""Which experiment reproduces which table or figure: one entry per experiment, one row per item of the paper."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from layerbudget.errors import InvalidInput

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
        keeps: Whether finished cells are kept in ``--out``, so that a run that was stopped goes on.
    """

    name: str
    items: tuple[str, ...]
    summary: str
    home: str
    small: str
    full: str
    reads: tuple[str, ...] = ()
    keeps: bool = False

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return f"python -m paper run {self.name}{' --data-dir DIR' if 'data_dir' in self.reads else ''}"

    def open(self) -> Callable[..., Outcome]:
        """Return the function that runs it."""
        module, function = self.home.split(":")
        return getattr(importlib.import_module(module, __package__), function)


_FULL = "all five tasks and rows, the paper's protocol (five epochs, batch 128, rank 8, 3e-4), bfloat16"
EXPERIMENTS = (
    Experiment(
        name="histogram", items=("figure-1",), summary="gains of a model's layers with errors and noise floor",
        home=".histogram:run_histogram", reads=("model", "data_dir"),
        small="64 windows of 128 tokens of C4 (without its file: of Python's standard library); part (b) is a diagram",
        full="128 windows of 2048 tokens of C4",
    ),
    Experiment(
        name="pruning", items=("table-1", "table-2"), summary="seven zero-shot tasks after pruning by MDL and LayerIF",
        home=".pruning_run:run_pruning", reads=("model", "data_dir", "paper"), keeps=True,
        small="30 questions per task, 16 windows of 128 tokens, influences of 48 on 12 rows of CoLA and MRPC",
        full="all questions, 128 windows of 2048 tokens of C4, influences of 300 on 50 rows, bfloat16",
    ),
    Experiment(
        name="experts", items=("table-5", "table-6", "figure-2", "figure-3"),
        summary="fine-tuned LoRA experts: MDL and LayerIF, All and +ve",
        home=".experts_run:run_experts", reads=("model", "data_dir", "paper"), keeps=True,
        small="CoLA and CommonsenseQA, 64 training rows, one epoch, 80 questions", full=_FULL,
    ),
    Experiment(
        name="strategies", items=("table-7",), summary="MoLA's shapes, AlphaLoRA, Fisher, LayerIF and MDL at one total",
        home=".experts_run:run_strategies", reads=("model", "data_dir"), keeps=True,
        small="as experts", full=_FULL,
    ),
    Experiment(
        name="beta", items=("figure-4",), summary="beta 1 to 3, each fine-tuned", home=".experts_run:run_beta",
        reads=("model", "data_dir"), keeps=True, small="as experts", full=_FULL,
    ),
    Experiment(
        name="kappa", items=("figure-5",), summary="kappa 1 to 4, each pruned and asked", home=".pruning_run:run_kappa",
        reads=("model", "data_dir"), keeps=True, small="as pruning, calibrated on CoLA",
        full="as pruning, calibrated on all five tasks",
    ),
    Experiment(
        name="drift", items=("table-3",), summary="drift, true regret and its bounds beside the difference of accuracies",
        home=".drift_run:run_drift", reads=("model", "data_dir"), keeps=True, small="as experts", full=_FULL,
    ),
    Experiment(
        name="released", items=("table-4",), summary="the expert lists and sparsity ratios released for Mistral-7B, recomputed",
        home=".released:run_released", reads=("files",), small="three packaged tasks: no model is needed",
        full="the same; --files: every task whose released files a folder holds",
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
# Items of experiments that have a table for either model.
GEMMA = ("table-2", "table-6", "figure-3")
# What no experiment reproduces, and why.
NOT_APPLICABLE: Mapping[str, str] = {}


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
    """Run time, finding and shape of every experiment at small scale, as measured for this release.

    Keys are names of experiments, with `` --paper gemma`` after those of the items in ``GEMMA``.
    """
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
        own = " --paper gemma" if name in GEMMA else ""
        found, command = known.get(entry.name + own, {}), entry.command + own
        rows.append({
            **row, "experiment": entry.name, "command": command, "small": entry.small, "full": entry.full,
            **{k: found.get(k) for k in ("seconds", "finding", "shape")}, "reason": None,
        })  # fmt: skip
    return rows
