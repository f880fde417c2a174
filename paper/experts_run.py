"""Tables 5 and 6 with Figures 2 and 3, Table 7 and Figure 4: accuracy of fine-tuned plans of LoRA experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.plan import Plan
from layerbudget.progress import Progress, Steps

from .expert_bench import BETAS, ExpertRuns, accuracy_row, table, versus
from .outcome import Claim, Outcome
from .published import item
from .setting import TASKS

Cells = dict[str, dict[str, dict[str, Any]]]
Column = Callable[[str], Plan]


def _train(runs: ExpertRuns, columns: Mapping[str, Column], progress: Progress | None) -> Cells:
    """Fine-tune every column on every task."""
    cells: Cells = {name: {} for name in columns}
    tick = Steps(progress, len(columns) * len(runs.setting.tuned))
    for task in runs.setting.tuned:
        for name, make in columns.items():
            wrong = runs.wrong(functools.partial(make, task), task)
            if wrong is not None:
                cells[name][task] = accuracy_row(wrong)
            tick()
    runs.cells.check()
    return cells


def _gap(cells: Cells, theirs: Mapping[str, Mapping[str, float]], first: str, second: str) -> Claim:
    """Whether the published difference of two averages (over the tasks that ran) lies in our interval."""
    tasks = [TASKS[t] for t in cells[first]]
    published = float(np.mean([theirs[t][first] - theirs[t][second] for t in tasks]))
    test = versus(cells, first, second)
    return Claim(
        claim=f"{first} - {second} = {published:+.2f} points over {', '.join(tasks)}",
        met=None if test["low"] == test["high"] else test["low"] <= published <= test["high"],
        detail=f"ours {test['difference']:+.2f}, 95 % {test['low']:+.2f} to {test['high']:+.2f}, p = {test['p']:.2g}",
    )  # fmt: skip


def _outcome(
    name: str, items: Sequence[str], runs: ExpertRuns, cells: Cells, claims: Sequence[Claim], finding: str,
    more: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    rows = table(cells, item(items[0])["rows"])
    return Outcome(
        name=name, items=tuple(items), setting=runs.setting_record, result={"accuracy": cells, **(more or {})}, rows=rows,
        claims=claims, finding=finding, seconds=runs.cells.seconds, draw=lambda path: _draw(rows, list(cells), path),
    )  # fmt: skip


def run_experts(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None, out: Path | str | None = None,
    paper: str = "mistral", part: tuple[int, int] = (1, 1), progress: Progress | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """LayerIF against MDL: All and +ve (``paper="mistral"``: Table 5, Figure 2) or +ve alone (``"gemma"``: Table 6, Figure 3).

    Raises:
        Elsewhere: Another part of the grid has cells to measure.
        NotFound: The tasks' files are not there.
    """
    runs = ExpertRuns(scale=scale, model=model, data_dir=data_dir, out=out, part=part)
    beta = BETAS[paper]
    columns: dict[str, Column] = {
        "LayerIF (All)": lambda t: runs.layerif(t, "all"), "MDL (All)": lambda t: runs.mdl(t, "all", beta),
        "LayerIF (+ve)": lambda t: runs.layerif(t, "positive"), "MDL (+ve)": lambda t: runs.mdl(t, "positive", beta),
    }  # fmt: skip
    items, pairs = ("table-5", "figure-2"), [("MDL (All)", "LayerIF (All)"), ("MDL (+ve)", "LayerIF (+ve)")]
    if paper == "gemma":
        columns = {"LayerIF": columns["LayerIF (+ve)"], "MDL (+ve)": columns["MDL (+ve)"]}
        items, pairs = ("table-6", "figure-3"), [("MDL (+ve)", "LayerIF")]
    cells = _train(runs, columns, progress)
    claims = [_gap(cells, item(items[0])["rows"], *pair) for pair in pairs]
    tests = {f"{a} - {b}": versus(cells, a, b) for a, b in pairs}
    words = [f"{name} {t['difference']:+.1f} points (p = {t['p']:.2g})" for name, t in tests.items()]
    return _outcome("experts", items, runs, cells, claims, ", ".join(words), {"tests": tests})


def run_strategies(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None, out: Path | str | None = None,
    part: tuple[int, int] = (1, 1), progress: Progress | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """Table 7: MoLA's shapes, AlphaLoRA, Fisher, LayerIF and MDL at one total.

    Raises:
        Elsewhere: Another part of the grid has cells to measure.
        NotFound: The tasks' files are not there.
    """
    runs = ExpertRuns(scale=scale, model=model, data_dir=data_dir, out=out, part=part)
    free = {name: runs.free(name) for name in ("mola-5555", "mola-2468", "mola-8642", "alphalora")}
    columns: dict[str, Column] = {
        "MoLA 5555": lambda t: free["mola-5555"], "MoLA 2468": lambda t: free["mola-2468"],
        "MoLA 8642": lambda t: free["mola-8642"], "AlphaLoRA": lambda t: free["alphalora"],
        "Fisher (grad. norm)": lambda t: plan_lora_experts(runs.gradients(t), total=runs.total, rule="layerif"),
        "LayerIF": lambda t: runs.layerif(t, "all"), "MDL": lambda t: runs.mdl(t, "all", BETAS["mistral"]),
    }  # fmt: skip
    cells = _train(runs, columns, progress)
    tests = {name: versus(cells, "MDL", name) for name in columns if name != "MDL"}
    apart = [f"{'above' if t['difference'] > 0 else 'below'} {name}" for name, t in tests.items() if t["p"] < 0.05 / len(tests)]
    theirs = item("table-7")["rows"]
    claims = [_gap(cells, theirs, "MDL", name) for name in tests]
    claims.append(Claim(
        claim="uniform is ahead of MDL on average (as the paper's own cells have it)",
        met=tests["MoLA 5555"]["difference"] <= 0,
        detail=f"{-tests['MoLA 5555']['difference']:+.2f} points",
    ))  # fmt: skip
    text = f"MDL is {', '.join(apart)}" if apart else "no strategy can be told from MDL (paired over questions, Bonferroni)"
    return _outcome("strategies", ("table-7",), runs, cells, claims, text, {"tests": tests})


def run_beta(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None, out: Path | str | None = None,
    part: tuple[int, int] = (1, 1), progress: Progress | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """Figure 4: beta 1, 2 and 3, trained, beside LayerIF (+ve).

    Raises:
        Elsewhere: Another part of the grid has cells to measure.
        NotFound: The tasks' files are not there.
    """
    runs = ExpertRuns(scale=scale, model=model, data_dir=data_dir, out=out, part=part)
    columns: dict[str, Column] = {"LayerIF": lambda t: runs.layerif(t, "positive")}
    for beta in (1.0, 2.0, 3.0):
        columns[f"beta {beta:g}"] = functools.partial(runs.mdl, aggregation="positive", beta=beta)
    cells = _train(runs, columns, progress)
    names = [n for n in columns if n.startswith("beta")]
    means = {n: float(np.mean([r["acc"] for r in cells[n].values()])) for n in names}
    best = max(means, key=lambda n: means[n])
    tests = {n: versus(cells, "beta 3", n) for n in names if n != "beta 3"}
    behind = all(t["high"] < 0 for t in tests.values())
    claims = [Claim(
        claim="beta 3 has the highest average", met=best == "beta 3" or (False if behind else None),
        detail=", ".join(f"{n} {100 * m:.2f}" for n, m in means.items()),
    )]  # fmt: skip
    claims += [_gap(cells, item("figure-4")["rows"], "beta 3", n) for n in tests]
    text = f"{best} is highest; beta 3 minus the others: " + ", ".join(
        f"{t['difference']:+.1f} (p = {t['p']:.2g})" for t in tests.values()
    )
    return _outcome("beta", ("figure-4",), runs, cells, claims, text, {"tests": tests})


def _draw(rows: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> Path:
    from layerbudget.reporting.figures import new_figure, save_figure

    figure = new_figure(1.5 + 1.6 * len(rows), 3.2)
    axes, width = figure.subplots(), 0.8 / len(names)
    for j, name in enumerate(names):
        x = np.arange(len(rows)) + (j - (len(names) - 1) / 2) * width
        axes.bar(x, [r[name] for r in rows], width, yerr=[r[f"{name}, error"] for r in rows], label=name)
    axes.set_xticks(range(len(rows)), [r["task"] for r in rows], fontsize=8)
    axes.set_ylabel("accuracy, %")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return save_figure(figure, path)
