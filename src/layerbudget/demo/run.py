"""The main job on the embedded model: score, plan, prune, re-measure, compare with uniform and permuted plans."""

from __future__ import annotations

import copy
import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..blocks import partition
from ..damage.sequential import plan_directional
from ..data.text import calibration
from ..errors import AlreadyExists, MissingDependency
from ..evaluation.perplexity import Evaluation, evaluation_set, perplexity
from ..loading import load_model, load_tokenizer
from ..plan import Plan
from ..planning import plan_sparsity
from ..pruning.apply import prune
from ..pruning.save import save_pruned
from ..records import dumps, write_text
from ..report.figures import overview
from ..scores.gain import score

logger = logging.getLogger(__name__)

TARGETS = (0.5, 0.6)
RULES = {"uniform": "uniform", "permuted": "permuted", "mdl": "curvature plan", "directional": "directional plan"}
SAMPLES, LENGTH, WINDOWS = 64, 256, 96
MEASURED, PASSES = 16, 20  # sequences that decide the directional plan, and forward equivalents of them
MAX_SPARSITY_ABOVE_TARGET = 0.1


def paired_difference(a: Evaluation, b: Evaluation) -> tuple[float, float]:
    """Mean and standard error of ``log perplexity(a) - log perplexity(b)``, paired by window."""
    d = np.array(a.nll) - np.array(b.nll)
    return float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d)))


def verdict(rows: list[dict[str, Any]]) -> str:
    """Say for each target whether the curvature plan and the directional plan differ from uniform on this text."""
    parts = []
    for row in rows:
        if row["model"] not in ("curvature plan", "directional plan"):
            continue
        mean, error = row["log_difference"], row["log_difference_error"]
        word = "cannot be told apart from"
        if abs(mean) > 2 * error:
            word = "is better than" if mean < 0 else "is worse than"
        parts.append(
            f"at {row['target']:.0%} the {row['model']} {word} uniform "
            f"(perplexity {math.expm1(mean):+.2%}, paired over windows, two standard errors {2 * math.exp(mean) * error:.2%})"
        )
    return "Verdict: " + "; ".join(parts) + "."


def peak_memory_mib() -> float:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 1024**2


def run_demo(
    out: Path, *, seed: int = 0, overwrite: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Run the main job and write ``scores.json``, ``plan.json``, ``result.json``, ``overview.png`` and ``pruned/``.

    Plan and model that are saved are the ones with the lowest held-out perplexity at the first target.

    Raises:
        AlreadyExists: ``out`` holds files and ``overwrite`` is false.
    """
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise AlreadyExists(f"{out} is not empty.", "", "Choose another --out or pass --overwrite.")
    began = time.perf_counter()
    total = 3 + 2 * len(TARGETS) * len(RULES)
    step = iter(range(1, total + 1))

    def tick() -> None:
        if progress:
            progress(next(step), total)

    tokenizer, model = load_tokenizer("demo"), load_model("demo")
    data = calibration("stdlib", tokenizer, samples=SAMPLES, length=LENGTH, seed=seed)
    held_out = evaluation_set("stdlib", tokenizer, length=LENGTH, windows=WINDOWS)
    blocks = partition(model, "layer")
    tick()
    scores = score(model, data, blocks, estimator="fisher-gram", batch_size=4, seed=seed)
    scores.save(out / "scores.json", overwrite=True)
    tick()
    dense = perplexity(model, held_out)
    rows = [_row("dense", None, 0.0, dense, None)]
    tick()
    plans: dict[tuple[float, str], Plan] = {}
    kept: tuple[float, str, Plan, Any, Any] | None = None
    for target in TARGETS:
        base: Evaluation | None = None
        for rule, label in RULES.items():
            cap = min(1.0, target + MAX_SPARSITY_ABOVE_TARGET)
            if rule == "directional":
                plan = plan_directional(model, data.select(slice(0, MEASURED)), sparsity=target, passes=PASSES)
            else:
                plan = plan_sparsity(
                    scores, sparsity=target, max_sparsity=cap, rule=rule, seed=seed if rule == "permuted" else None
                )
            plans[target, rule] = plan
            pruned = copy.deepcopy(model)
            receipt = prune(pruned, plan, data, method="wanda")
            tick()
            found = perplexity(pruned, held_out)
            base = base or found
            rows.append(_row(label, target, receipt.sparsity, found, base))
            if target == TARGETS[0] and (kept is None or found.value < kept[0]):
                kept = (found.value, label, plan, pruned, receipt)
            tick()
    result = {
        "saved": _saved(out, tokenizer, kept), "rows": rows, "verdict": verdict(rows),
        "seconds": time.perf_counter() - began, "peak_memory_mib": peak_memory_mib(),
        "method": "wanda", "data": data.describe(), "missing_modules": data.missing, "seed": seed, "output": str(out),
    }  # fmt: skip
    write_text(out / "result.json", dumps(result), overwrite=True)
    try:
        overview(scores, [plans[TARGETS[0], r] for r in RULES], rows, out / "overview.png")
    except MissingDependency as error:
        logger.warning("There is no overview.png: %s", error)  # the numbers are there
    return result


def _saved(out: Path, tokenizer: Any, kept: tuple[float, str, Plan, Any, Any] | None) -> dict[str, Any]:
    """Write the plan and the model with the lowest perplexity at the first target, and say which they are."""
    if kept is None:
        raise ValueError("no model was pruned")
    _, label, plan, pruned, receipt = kept
    plan.save(out / "plan.json", overwrite=True)
    save_pruned(pruned, tokenizer, plan, receipt, out / "pruned", overwrite=True)
    return {"model": label, "target": TARGETS[0], "rule": plan.rule}


def _row(label: str, target: float | None, sparsity: float, found: Evaluation, base: Evaluation | None) -> dict[str, Any]:
    row = {"model": label, "target": target, "sparsity": sparsity, **found.to_dict()}
    row["perplexity"] = row.pop("value")
    mean, error = paired_difference(found, base) if base is not None and base is not found else (None, None)
    row.update(log_difference=mean, log_difference_error=error, vs_uniform=None if mean is None else math.expm1(mean))
    return row
