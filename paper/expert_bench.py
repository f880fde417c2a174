"""Plans of LoRA experts, each fine-tuned once per task and seed: what the expert experiments of the paper share.

Every plan of a run has the same total, five experts per layer, as uniform MoLA has: budgets are equal. MDL is the program of
the paper in block form, rounded with a proven gap; its beta is that of the released lists (2 for Mistral, 3 for Gemma).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerbudget.comparison.bench import TaskBench
from layerbudget.data.tasks import load_task
from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.evaluation.statistics import compare_means
from layerbudget.finetuning.adapters import classifier_loader
from layerbudget.models.blocks import describe, partition
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.plan import Plan
from layerbudget.scores import Scores
from layerbudget.sensitivity.gain import score

from .cells import Cells
from .influences import drawn, influence_scores, text_rows
from .setting import PER_LAYER, SETTINGS, TASKS, need_data

BETAS: Mapping[str, float] = {"mistral": 2.0, "gemma": 3.0}
EXPONENTS: Mapping[str, float] = {"all": 2.0, "positive": 3.0}  # of LayerIF's heuristic, as released


class ExpertRuns:
    """Scores, plans and fine-tunings of one model; finished ones are kept in ``out/cells``."""

    def __init__(
        self, *, scale: str, model: str, data_dir: Path | str | None, out: Path | str | None, part: tuple[int, int] = (1, 1)
    ) -> None:
        self.setting, self.name, self.folder = SETTINGS[scale], model, need_data(data_dir)
        self.model, self.tokenizer = load_model(model, dtype=self.setting.dtype), load_tokenizer(model)
        self.blocks = tuple(partition(self.model))
        self.total = PER_LAYER * len(self.blocks)
        self.cells = Cells(None if out is None else Path(out) / "cells", part)
        self.setting_record = {
            "scale": scale, "model": model, "digest": describe(self.model)["digest"], "experts": self.total,
            "tasks": list(self.setting.tuned), "train_rows": self.setting.train_rows, "test_rows": self.setting.test_rows,
            "seeds": list(self.setting.seeds), "protocol": vars(self.setting.protocol),
        }  # fmt: skip
        self._benches: dict[str, TaskBench] = {}

    def influence(self, task: str, aggregation: str) -> Scores:
        """LayerIF's scores of a task."""
        return influence_scores(
            self.model, self.tokenizer, self.blocks, task, self.folder, self.setting, self.cells, aggregation=aggregation
        )  # fmt: skip

    def gradients(self, task: str) -> Scores:
        """Squared gradient norms on the same rows."""
        loaded = load_task(task, self.folder)
        rows = text_rows(loaded, drawn(loaded, self.setting.influence_train, 0), self.tokenizer, self.setting.cutoff)
        return score(self.model, rows, self.blocks, "gradient-norm")

    def mdl(self, task: str, aggregation: str, beta: float) -> Plan:
        """The program on LayerIF's scores."""
        return plan_lora_experts(self.influence(task, aggregation), total=self.total, exponent=beta, exponent_on="block")

    def layerif(self, task: str, aggregation: str) -> Plan:
        """LayerIF's heuristic on them."""
        scores = self.influence(task, aggregation)
        return plan_lora_experts(scores, total=self.total, rule="layerif", exponent=EXPONENTS[aggregation])

    def free(self, rule: str) -> Plan:
        """A plan that reads no score of the task."""
        scores = score(self.model, None, self.blocks, "spectral-tail") if rule == "alphalora" else self.blocks
        return plan_lora_experts(scores, total=self.total, rule=rule, min_experts=0 if rule == "alphalora" else 1)

    def wrong(self, make: Callable[[], Plan], task: str) -> list[list[float]] | None:
        """Mistakes of the fine-tuned plan, ``[seed][question]``; None where another part of the grid finds some of them."""
        plan = self.cells.here(make)
        if plan is None:
            return None
        found = [self.cells.here(functools.partial(self._measured, plan, task, seed)) for seed in self.setting.seeds]
        return None if None in found else [f for f in found if f is not None]

    def _measured(self, plan: Plan, task: str, seed: int) -> list[float]:
        bench = self._bench(task)
        key = {"what": "experts", "counts": plan.counts.tolist(), "seed": seed, **bench.identity}
        found: list[float] = self.cells.own(key, functools.partial(bench.measure, plan, seed))["values"]
        return found

    def _bench(self, task: str) -> TaskBench:
        if task not in self._benches:
            loaded = load_task(task, self.folder).limited(self.setting.train_rows, self.setting.test_rows)
            load = classifier_loader(self.name, len(loaded.labels), dtype=self.setting.dtype)
            self._benches[task] = TaskBench(
                load=load, tokenizer=self.tokenizer, task=loaded, protocol=self.setting.protocol
            )  # fmt: skip
        return self._benches[task]


def accuracy_row(wrong: Sequence[Sequence[float]]) -> dict[str, Any]:
    """``{acc, stderr, correct}`` of one cell, in the form that paired tests read (mean over seeds of every question)."""
    right = 1.0 - np.asarray(wrong, dtype=float).mean(0)
    return {"acc": float(right.mean()), "stderr": float(right.std(ddof=1) / np.sqrt(len(right))), "correct": right.tolist()}


def table(
    cells: Mapping[str, Mapping[str, Mapping[str, Any]]], theirs: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Accuracy by task and column in percent, with errors and the published figures, and the average.

    Args:
        cells: ``{column: {task: accuracy_row}}``.
        theirs: Rows of the published table.
    """
    tasks = list(next(iter(cells.values())))
    rows: list[dict[str, Any]] = []
    for task in tasks:
        row: dict[str, Any] = {"task": TASKS[task]}
        for name, by_task in cells.items():
            row |= {name: 100 * by_task[task]["acc"], f"{name}, error": 100 * by_task[task]["stderr"]}
            row[f"{name}, published"] = theirs.get(TASKS[task], {}).get(name)
        rows.append(row)
    average: dict[str, Any] = {"task": "Average"}
    labels = [TASKS[t] for t in tasks]
    for name in cells:
        errors = np.array([r[f"{name}, error"] for r in rows])
        published = [theirs[label][name] for label in labels if label in theirs and name in theirs[label]]
        average |= {
            name: float(np.mean([r[name] for r in rows])),
            f"{name}, error": float(np.sqrt((errors**2).sum()) / len(rows)),
        }
        average[f"{name}, published"] = float(np.mean(published)) if published else None
    return [*rows, average]


def versus(cells: Mapping[str, Mapping[str, Mapping[str, Any]]], first: str, second: str) -> dict[str, Any]:
    """Difference of mean accuracies of two columns in points, paired over questions."""
    test = compare_means(cells[first], cells[second])
    return {"difference": 100 * test.difference, "low": 100 * test.low, "high": 100 * test.high, "p": test.p, "n": test.n}
