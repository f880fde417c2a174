"""The main job on the embedded model: score, plan, prune, re-measure, compare with uniform and permuted plans."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..canonical import dumps
from ..data.calibration import CalibrationSet
from ..data.text import calibration
from ..decisions.sparsity import plan_sparsity, prune, save_pruned
from ..diagnosis.watch import MemoryMonitor
from ..errors import AlreadyExists, MissingDependency
from ..evaluation.perplexity import Evaluation, evaluation_set, perplexity
from ..evaluation.statistics import ratio
from ..models.blocks import partition
from ..models.loading import load_model, load_tokenizer
from ..plan import Plan
from ..progress import Progress, Steps, say
from ..records import made_by
from ..reporting.figures import overview
from ..scores import Scores
from ..sensitivity.gain import score
from ..storage.writing import write_text
from ..verdicts import LEVEL_WITH, outcome

logger = logging.getLogger(__name__)

TARGETS = (0.5, 0.6)
# What every plan is called, in the table, the picture and the README.
RULES = {
    "uniform": "uniform",
    "permuted": "gain, permuted",
    "mdl": "gain, per layer",
    "directional": "directional damage",
}
SAMPLES, LENGTH, WINDOWS = 64, 256, 96
MEASURED, PASSES = 16, 20  # sequences that decide the plan by directional damage, and forward equivalents of them
MAX_SPARSITY_ABOVE_TARGET = 0.1


def verdict(rows: list[dict[str, Any]]) -> str:
    """One sentence on the plan by directional damage, which ``plan sparsity MODEL`` makes, beside uniform at every target."""
    said = [f"{_difference(row)} at {row['target']:.0%} sparsity" for row in rows if row["model"] == RULES["directional"]]
    return f"Verdict: the perplexity of the plan by directional damage is {' and '.join(said)}."


def _difference(row: dict[str, Any]) -> str:
    mean = row["log_difference"]
    side = outcome(mean, error=row["log_difference_error"])
    return f"{LEVEL_WITH}uniform's" if side == "level" else f"{abs(math.expm1(mean)):.1%} {side} than uniform's"


def run_demo(out: Path, *, seed: int = 0, overwrite: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Run the main job and write ``scores.json``, ``plan.json``, ``result.json``, ``overview.png`` and ``pruned/``.

    Plan and model that are saved are the ones with the lowest held-out perplexity at the first target. Nothing is written into
    ``out`` before everything is measured. The seed is that of the draw of the text and of the permuted plans.
    """
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise AlreadyExists(f"{out} is not empty.", "", "Choose another output, or pass overwrite=True.")
    monitor = MemoryMonitor()
    tick = Steps(progress, 3 + 2 * len(TARGETS) * len(RULES), "loading")
    tokenizer, dense = load_tokenizer("demo"), load_model("demo")
    data = calibration("stdlib", tokenizer, samples=SAMPLES, length=LENGTH, seed=seed)
    held_out = evaluation_set("stdlib", tokenizer, length=LENGTH, windows=WINDOWS)
    tick()
    say(progress, "scoring")
    scores = score(dense, data, partition(dense, "layer"), estimator="fisher-gram", batch_size=4, seed=seed)
    tick()
    say(progress, "the dense model")
    rows = [_row("dense", None, 0.0, perplexity(dense, held_out), None)]
    tick()
    plans: list[Plan] = []  # of the first target
    best: tuple[float, str, Plan, Any, Any] | None = None
    for target in TARGETS:
        base: Evaluation | None = None
        for rule, label in RULES.items():
            say(progress, f"{label}, {target:.0%}")
            plan = _plan(rule, target, dense, data, scores, seed)
            model = copy.deepcopy(dense)
            receipt = prune(model, plan, data, method="wanda")
            evaluation = perplexity(model, held_out)
            tick(2)
            base = base or evaluation
            rows.append(_row(label, target, receipt.sparsity, evaluation, base))
            if target == TARGETS[0]:
                plans.append(plan)
                if best is None or evaluation.value < best[0]:
                    best = (evaluation.value, label, plan, model, receipt)
    if best is None:
        raise ValueError("no model was pruned")
    _, label, plan, model, receipt = best
    scores.save(out / "scores.json", overwrite=True)
    plan.save(out / "plan.json", overwrite=True)
    save_pruned(model, tokenizer, plan, receipt, out / "pruned", overwrite=True)
    seconds, memory = monitor.end()
    result = {
        "saved": {"model": label, "target": TARGETS[0], "rule": plan.rule},
        "rows": rows,
        "verdict": verdict(rows),
        "seconds": seconds,
        "peak_memory_mib": memory / 2**20,
        "method": "wanda",
        "data": data.describe(),
        "seed": seed,
        "output": str(out),
    }
    write_text(out / "result.json", dumps({**result, "made_by": made_by()}), overwrite=True)
    try:
        overview(scores, dict(zip(RULES.values(), plans, strict=True)), rows, out / "overview.png")
    except MissingDependency as error:
        logger.warning("There is no overview.png: %s", error)  # the numbers are there
    return result


def _plan(rule: str, target: float, model: Any, data: CalibrationSet, scores: Scores, seed: int) -> Plan:
    if rule == "directional":
        return plan_sparsity(model, data.select(slice(0, MEASURED)), sparsity=target, passes=PASSES)
    cap = min(1.0, target + MAX_SPARSITY_ABOVE_TARGET)
    return plan_sparsity(scores, sparsity=target, max_sparsity=cap, rule=rule, seed=seed if rule == "permuted" else None)


def _row(label: str, target: float | None, sparsity: float, evaluation: Evaluation, base: Evaluation | None) -> dict[str, Any]:
    """A row of the table; its difference to uniform is that of log perplexities, paired by window."""
    row = {"model": label, "target": target, "sparsity": sparsity, **evaluation.to_dict()}
    row["perplexity"] = row.pop("value")
    mean = error = None
    if base is not None and base is not evaluation:
        mean, error = ratio(np.array(evaluation.nll) - np.array(base.nll), np.array(evaluation.counts, dtype=float))[:2]
    row.update(log_difference=mean, log_difference_error=error, vs_uniform=None if mean is None else math.expm1(mean))
    return row
