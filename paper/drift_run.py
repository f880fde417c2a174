"""Table 3: drift of the scores, the true regret of the surrogate and its bound, beside the difference of accuracies.

The paper's third column is not the regret that its theorem bounds, and may be negative. Here both stand side by side: the exact
regret of the program with the bounds whose constants are computed, and what the fine-tuned allocations differ by. Drift is the
squared norm, as in the paper, of scores that sum to one (its text) and that have mean one (its script).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerbudget.evaluation.statistics import compare_means
from layerbudget.progress import Progress, Steps
from layerbudget.reporting.sweep import transfer_scores
from layerbudget.solvers.transfer import spearman

from .expert_bench import BETAS, ExpertRuns, accuracy_row
from .outcome import Claim, Outcome
from .published import item
from .setting import TASKS

SOURCE = "commonsenseqa"


def run_drift(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None, out: Path | str | None = None,
    part: tuple[int, int] = (1, 1), progress: Progress | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """Plan on CommonsenseQA, use on the others.

    Raises:
        Elsewhere: Another part of the grid has cells to measure.
        NotFound: The tasks' files are not there.
    """
    runs = ExpertRuns(scale=scale, model=model, data_dir=data_dir, out=out, part=part)
    beta, theirs = BETAS["gemma"], item("table-3")["rows"]
    plans = {task: functools.partial(runs.mdl, task, "positive", beta) for task in (SOURCE, *runs.setting.tuned)}
    trained = {}
    tick = Steps(progress, len(runs.setting.tuned))
    for task in runs.setting.tuned:
        trained[task] = [runs.wrong(plans[of], task) for of in (task, SOURCE)]
        tick()
    runs.cells.check()
    source = runs.influence(SOURCE, "positive")
    rows = []
    for task, wrong in trained.items():
        target = runs.influence(task, "positive")
        t = transfer_scores(
            source, target, program="lora-experts", budget=f"{runs.total} experts", exponent=beta, exponent_on="block",
            smoothing=1e-6,
        )  # fmt: skip
        own, moved = (accuracy_row(w) for w in wrong if w is not None)
        test = compare_means({task: own}, {task: moved})
        label = TASKS[task] + (" (source)" if task == SOURCE else "")
        printed = theirs.get(label, {})
        rows.append({
            "task": label, "drift, sum one": t.squared_drift, "drift, mean one": t.squared_drift * len(runs.blocks) ** 2,
            "drift, published": printed.get("drift"), "regret": t.regret, "sharp bound": t.sharp_bound, "bound": t.bound,
            "uniform regret": t.uniform_regret, "accuracy difference": 100 * test.difference, "low": 100 * test.low,
            "high": 100 * test.high, "accuracy difference, published": printed.get("accuracy difference"),
        })  # fmt: skip
    return Outcome(
        name="drift", items=("table-3",), setting={**runs.setting_record, "beta": beta}, result={"rows": rows}, rows=rows,
        claims=_claims(rows), finding=_finding(rows), seconds=runs.cells.seconds, draw=lambda path: _draw(rows, path),
    )  # fmt: skip


def _claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    others = [r for r in rows if "source" not in r["task"]]
    claims = [Claim(
        claim="regret lies between zero and the bounds",
        met=all(0 <= r["regret"] <= r["sharp bound"] <= r["bound"] for r in rows),
        detail="; ".join(f"{r['task']} {r['regret']:.3g} <= {r['sharp bound']:.3g} <= {r['bound']:.3g}" for r in others),
    )]  # fmt: skip
    for r in others:
        gap = r["accuracy difference, published"]
        claims.append(Claim(
            claim=f"own minus carried accuracy {gap:+.2f} on {r['task']}", met=r["low"] <= gap <= r["high"],
            detail=f"ours {r['accuracy difference']:+.2f}, 95 % {r['low']:+.2f} to {r['high']:+.2f}",
        ))  # fmt: skip
    if len(others) > 2:
        drift, loss = (np.array([r[k] for r in others]) for k in ("drift, sum one", "accuracy difference"))
        rho = spearman(drift, loss)
        claims.append(Claim(claim="more drift, more accuracy lost", met=rho > 0.9, detail=f"rank correlation {rho:.2f}"))
    return claims


def _finding(rows: Sequence[Mapping[str, Any]]) -> str:
    others = [r for r in rows if "source" not in r["task"]]
    worse = [r["task"] for r in others if r["regret"] > r["uniform regret"]]
    text = "; ".join(f"{r['task']}: regret {r['regret']:.2g} within {r['sharp bound']:.2g}" for r in others)
    return f"{text}; the carried plan is worse than uniform by the surrogate on {', '.join(worse) or 'none'}"


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    from layerbudget.reporting.figures import ACCENT, ALERT, new_figure, save_figure

    figure = new_figure(8.0, 3.0)
    first, second = figure.subplots(1, 2)
    others = [r for r in rows if "source" not in r["task"]]
    x = [r["drift, sum one"] for r in others]
    for name, color, marker in (("regret", ACCENT, "o"), ("sharp bound", ALERT, "^"), ("bound", "0.6", "s")):
        first.plot(x, [max(r[name], 1e-12) for r in others], marker, color=color, label=name)
    first.set(yscale="log", xlabel="squared drift (scores sum to one)", ylabel="surrogate objective")
    first.legend(frameon=False, fontsize=8)
    for r in others:
        spread = [[r["accuracy difference"] - r["low"]], [r["high"] - r["accuracy difference"]]]
        second.errorbar(r["drift, sum one"], r["accuracy difference"], yerr=spread, fmt="o", color=ACCENT, capsize=2)
        second.annotate(r["task"], (r["drift, sum one"], r["accuracy difference"]), fontsize=8)
    second.axhline(0, color="0.7", linewidth=0.8)
    second.set(xlabel="squared drift (scores sum to one)", ylabel="own - carried accuracy, points")
    return save_figure(figure, path)
