"""The main job on the embedded model: score, plan, prune, re-measure, compare with uniform and permuted plans."""

from __future__ import annotations

import copy
import logging
import math
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..data.text import calibration
from ..decisions.sparsity.apply import prune
from ..decisions.sparsity.plan import plan_sparsity
from ..decisions.sparsity.save import save_pruned
from ..errors import AlreadyExists, MissingDependency
from ..evaluation.perplexity import Evaluation, evaluation_set, perplexity
from ..evaluation.statistics import ratio
from ..models.blocks import fingerprint, partition
from ..models.loading import load_model, load_tokenizer
from ..models.machine import computation, versions
from ..plan import Plan
from ..progress import Progress, Steps, say
from ..records import dumps, made_by, to_jsonable, write_text
from ..report.figures import overview
from ..scores import Scores
from ..sensitivity.gain import score
from ..storage.parts import Parts

logger = logging.getLogger(__name__)

TARGETS = (0.5, 0.6)
RULES = {"uniform": "uniform", "permuted": "permuted", "mdl": "curvature plan", "directional": "directional plan"}
SAMPLES, LENGTH, WINDOWS = 64, 256, 96
MEASURED, PASSES = 16, 20  # sequences that decide the directional plan, and forward equivalents of them
MAX_SPARSITY_ABOVE_TARGET = 0.1


def paired_difference(a: Evaluation, b: Evaluation) -> tuple[float, float]:
    """Mean and standard error of ``log perplexity(a) - log perplexity(b)``, paired by window."""
    return ratio(np.array(a.nll) - np.array(b.nll), np.array(a.counts, dtype=float))[:2]


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
    out: Path, *, seed: int = 0, overwrite: bool = False, resume: Path | str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the main job and write ``scores.json``, ``plan.json``, ``result.json``, ``overview.png`` and ``pruned/``.

    Plan and model that are saved are the ones with the lowest held-out perplexity at the first target. Nothing is written into
    ``out`` before everything is measured.

    Args:
        out: Folder of the results.
        seed: Of the draw of the text and of the permuted plans.
        overwrite: Write into a folder that holds files.
        resume: Folder that keeps the scores and every measured model's figures until the results are saved.
        progress: Called with steps done and in total.

    Raises:
        AlreadyExists: ``out`` holds files and ``overwrite`` is false.
        ModelMismatch: ``resume`` holds a run with another seed or version.
    """
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise AlreadyExists(f"{out} is not empty.", "", "Choose another --out or pass --overwrite.")
    began = time.perf_counter()
    tick = Steps(progress, 3 + 2 * len(TARGETS) * len(RULES), "loading")
    job = _Job(seed, resume)
    tick()
    say(progress, "scoring")
    scores = Scores.from_dict(job.parts.json("scores", lambda: to_jsonable(job.scored().to_dict())))
    tick()
    say(progress, "the dense model")
    dense = _evaluation(job.parts.json("dense", lambda: _told(perplexity(job.model, job.held_out))))
    tick()
    rows, plans = [_row("dense", None, 0.0, dense, None)], {}
    kept: tuple[float, str, Plan] | None = None
    for target in TARGETS:
        base: Evaluation | None = None
        for rule, label in RULES.items():
            say(progress, f"{label}, {target:.0%}")
            cell = job.parts.json(f"cell-{round(1000 * target)}-{rule}", partial(job.cell, scores, target, rule))
            tick(2)
            plan, found = Plan.from_dict(cell["plan"]), _evaluation(cell["found"])
            plans[target, rule] = plan
            base = base or found
            rows.append(_row(label, target, cell["sparsity"], found, base))
            if target == TARGETS[0] and (kept is None or found.value < kept[0]):
                kept = (found.value, label, plan)
    scores.save(out / "scores.json", overwrite=True)
    result = {
        "saved": _saved(out, job, kept), "rows": rows, "verdict": verdict(rows),
        "seconds": time.perf_counter() - began, "peak_memory_mib": peak_memory_mib(),
        "method": "wanda", "data": job.data.describe(), "missing_modules": job.data.missing, "seed": seed, "output": str(out),
    }  # fmt: skip
    write_text(out / "result.json", dumps({**result, "made_by": made_by()}), overwrite=True)
    try:
        overview(scores, [plans[TARGETS[0], r] for r in RULES], rows, out / "overview.png")
    except MissingDependency as error:
        logger.warning("There is no overview.png: %s", error)  # the numbers are there
    job.parts.clear()
    return result


class _Job:
    """The model, the texts, and what is measured with them."""

    def __init__(self, seed: int, resume: Path | str | None) -> None:
        self.seed, self.tokenizer, self.model = seed, load_tokenizer("demo"), load_model("demo")
        self.data = calibration("stdlib", self.tokenizer, samples=SAMPLES, length=LENGTH, seed=seed)
        self.held_out = evaluation_set("stdlib", self.tokenizer, length=LENGTH, windows=WINDOWS)
        request = {
            "model": fingerprint(self.model), "data": self.data.digest, "held_out": self.held_out.digest, "seed": seed,
            "measured": MEASURED, "passes": PASSES, "computation": computation(self.model), "versions": versions(),
        }  # fmt: skip
        self.parts = Parts(resume, request)
        self._pruned: dict[str, tuple[Any, Any]] = {}

    def scored(self) -> Scores:
        """The gain of every layer."""
        return score(
            self.model, self.data, partition(self.model, "layer"), estimator="fisher-gram", batch_size=4, seed=self.seed
        )

    def cell(self, scores: Scores, target: float, rule: str) -> dict[str, Any]:
        """One plan and what the model pruned by it gives."""
        if rule == "directional":
            plan = plan_sparsity(self.model, self.data.select(slice(0, MEASURED)), sparsity=target, passes=PASSES)
        else:
            cap = min(1.0, target + MAX_SPARSITY_ABOVE_TARGET)
            seed = self.seed if rule == "permuted" else None
            plan = plan_sparsity(scores, sparsity=target, max_sparsity=cap, rule=rule, seed=seed)
        pruned, receipt = self.pruned(plan)
        return {
            "plan": to_jsonable(plan.to_dict()),
            "sparsity": receipt.sparsity,
            "found": _told(perplexity(pruned, self.held_out)),
        }

    def pruned(self, plan: Plan) -> tuple[Any, Any]:
        """The model pruned by a plan, and its receipt; those of the first target are held."""
        if plan.digest in self._pruned:
            return self._pruned[plan.digest]
        model = copy.deepcopy(self.model)
        found = (model, prune(model, plan, self.data, method="wanda"))
        if plan.hyperparameters.get("sparsity") == TARGETS[0]:
            self._pruned[plan.digest] = found
        return found


def _told(found: Evaluation) -> dict[str, Any]:
    return {**found.to_dict(), "nll": list(found.nll), "counts": list(found.counts)}


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(**{**record, "nll": tuple(record["nll"]), "counts": tuple(record["counts"])})


def _saved(out: Path, job: _Job, kept: tuple[float, str, Plan] | None) -> dict[str, Any]:
    """Write the plan and the model with the lowest perplexity at the first target, and say which they are."""
    if kept is None:
        raise ValueError("no model was pruned")
    _, label, plan = kept
    pruned, receipt = job.pruned(plan)
    plan.save(out / "plan.json", overwrite=True)
    save_pruned(pruned, job.tokenizer, plan, receipt, out / "pruned", overwrite=True)
    return {"model": label, "target": TARGETS[0], "rule": plan.rule}


def _row(label: str, target: float | None, sparsity: float, found: Evaluation, base: Evaluation | None) -> dict[str, Any]:
    row = {"model": label, "target": target, "sparsity": sparsity, **found.to_dict()}
    row["perplexity"] = row.pop("value")
    mean, error = paired_difference(found, base) if base is not None and base is not found else (None, None)
    row.update(log_difference=mean, log_difference_error=error, vs_uniform=None if mean is None else math.expm1(mean))
    return row
