"""Tables 1 and 2, and Figure 5: zero-shot accuracy after pruning by plans that LayerIF's scores make, by task, pruner and
kappa.

MDL: the program with the paper's cap, block form, exactly half of the weights. LayerIF: its map of the same scores, of width
0.3 for magnitude and 0.1 for Wanda and SparseGPT, as its scripts have it. Uniform and the dense model stand beside them; the
paper has neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerbudget.data.text import calibration
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.evaluation.statistics import compare_means
from layerbudget.models.blocks import describe, partition, weight_of
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.plan import Plan
from layerbudget.progress import Progress, Steps
from layerbudget.scores import Scores

from .cells import Cells
from .influences import influence_scores
from .outcome import Claim, Outcome
from .published import item
from .setting import CAPS, METHODS, SETTINGS, TASKS, need_data, text_source
from .zero_shot import ZeroShot, percent

WIDTHS: Mapping[str, float] = {"magnitude": 0.3, "wanda": 0.1, "sparsegpt": 0.1}
KAPPAS = (1, 2, 3, 4)


class PruningRuns:
    """Plans, pruned and asked, each once; finished ones are kept in ``out/cells``."""

    def __init__(
        self, *, scale: str, model: str, data_dir: Path | str | None, out: Path | str | None, paper: str,
        part: tuple[int, int] = (1, 1),
    ) -> None:  # fmt: skip
        self.setting, self.paper, self.scale, self.name = SETTINGS[scale], paper, scale, model
        self.folder = need_data(data_dir)
        self.model, self.tokenizer = load_model(model, dtype=self.setting.dtype), load_tokenizer(model)
        self.blocks = tuple(partition(self.model))
        self.tasks = ZeroShot(self.folder, self.setting.limit)
        self.text = calibration(
            text_source(data_dir, scale), self.tokenizer, samples=self.setting.samples, length=self.setting.length
        )
        self.cells = Cells(None if out is None else Path(out) / "cells", part)
        self.identity = {
            "model": describe(self.model)["digest"], "text": self.text.digest, "tasks": self.tasks.identity,
            "limit": self.setting.limit,
        }  # fmt: skip

    def scores(self, task: str) -> Scores:
        """LayerIF's scores of a task, all influences."""
        return influence_scores(self.model, self.tokenizer, self.blocks, task, self.folder, self.setting, self.cells)

    def mdl(self, task: str, kappa: float = 1.0) -> Plan:
        """The paper's program on them."""
        return plan_sparsity(
            self.scores(task), sparsity=0.5, max_sparsity=CAPS[self.paper], exponent=kappa, exponent_on="block"
        )  # fmt: skip

    def layerif(self, task: str, method: str) -> Plan:
        """LayerIF's map of them."""
        return plan_sparsity(self.scores(task), sparsity=0.5, max_sparsity=0.99, rule="layerif", width=WIDTHS[method])

    def ask(self, make: Callable[[], Plan | None], method: str) -> dict[str, Any] | None:
        """Accuracy of the model pruned by a plan; of the dense one without; None where another part of the grid finds it."""
        return self.cells.here(lambda: self._ask(make(), method))

    def _ask(self, plan: Plan | None, method: str) -> dict[str, Any]:
        key = {"what": "zero-shot", **self.identity, "plan": None if plan is None else plan.counts.tolist(), "method": method}
        return self.cells.own(key, lambda: self._asked(plan, method))

    def _asked(self, plan: Plan | None, method: str) -> dict[str, Any]:
        names = [m.name for b in self.blocks for m in b.modules]
        kept = {n: weight_of(self.model, n)[1].detach().clone() for n in names}
        try:
            if plan is not None:
                prune(self.model, plan, self.text, method)
            return self.tasks.ask(self.model, self.tokenizer)
        finally:
            with torch.no_grad():
                for n, weight in kept.items():
                    weight_of(self.model, n)[1].copy_(weight)


def run_pruning(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None, out: Path | str | None = None,
    paper: str = "mistral", part: tuple[int, int] = (1, 1), progress: Progress | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """Table 1 (``paper="mistral"``) or Table 2 (``"gemma"``).

    Raises:
        Elsewhere: Another part of the grid has cells to measure.
        NotFound: The tasks' files are not there.
        MissingDependency: lm-eval is not installed.
    """
    runs = PruningRuns(scale=scale, model=model, data_dir=data_dir, out=out, paper=paper, part=part)
    asked: dict[str, dict[str, dict[str, Any]]] = {m: {} for m in METHODS}
    chosen = runs.setting.calibrations
    tick = Steps(progress, len(METHODS) * (2 * len(chosen) + 2))
    uniform = plan_sparsity(runs.blocks, sparsity=0.5, rule="uniform")
    for method in METHODS:
        plans: dict[str, Callable[[], Plan | None]] = {f"MDL, {t}": functools.partial(runs.mdl, t) for t in chosen}
        plans |= {f"LayerIF, {t}": functools.partial(runs.layerif, t, method) for t in chosen}
        for name, make in {**plans, "uniform": lambda: uniform, "dense": lambda: None}.items():
            found = runs.ask(make, "none" if name == "dense" else method)
            if found is not None:
                asked[method][name] = found
            tick()
    runs.cells.check()
    published = item("table-1" if paper == "mistral" else "table-2")
    rows = _table(asked, published["rows"])
    tests = {m: _tested(asked[m]) for m in METHODS}
    setting = {"scale": scale, "model": model, "paper": paper, **runs.identity}
    claims = _claims(tests, rows, published["rows"])
    return Outcome(
        name="pruning", items=(("table-1" if paper == "mistral" else "table-2"),), setting=setting,
        result={"accuracy": asked, "tests": tests}, rows=rows, claims=claims, finding=_finding(tests, rows),
        seconds=runs.cells.seconds, draw=lambda path: _draw(rows, path),
    )  # fmt: skip


def _pooled(asked: Mapping[str, Mapping[str, Any]], rule: str) -> dict[str, dict[str, Any]]:
    """Answers of a rule's five plans as one table: per zero-shot task the mean of each question over the plans."""
    parts = [cells for name, cells in asked.items() if name.startswith(f"{rule}, ")]
    found = {}
    for task in parts[0]:
        each = np.array([p[task]["correct"] for p in parts]).mean(0)
        error = float(each.std(ddof=1) / np.sqrt(len(each)))
        found[task] = {"acc": float(each.mean()), "stderr": error, "correct": each.tolist()}
    return found


def _tested(asked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """MDL against LayerIF and against uniform, paired over questions."""
    mdl = _pooled(asked, "MDL")
    others = {"LayerIF": _pooled(asked, "LayerIF"), "uniform": asked["uniform"]}
    return {name: vars(compare_means(mdl, other)) for name, other in others.items()}


def _table(asked: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    chosen = [n.removeprefix("MDL, ") for n in next(iter(asked.values())) if n.startswith("MDL, ")]
    names = {**{f"MDL, {t}": TASKS[t] for t in chosen}, "MDL": "Average (MDL)", "LayerIF": "LayerIF",
             "uniform": "uniform", "dense": "dense"}  # fmt: skip
    for name, label in names.items():
        row: dict[str, Any] = {"row": label}
        for method, title in METHODS.items():
            cells = asked[method][name] if name in asked[method] else _pooled(asked[method], name)
            row[title], row[f"{title}, error"] = percent(cells)
            row[f"{title}, published"] = theirs.get(label, {}).get(title)
        rows.append(row)
    return rows


def _by(rows: Sequence[Mapping[str, Any]], label: str) -> Mapping[str, Any]:
    return next(r for r in rows if r["row"] == label)


def _claims(
    tests: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], theirs: Mapping[str, Mapping[str, float]]
) -> list[Claim]:
    claims = []
    for method, title in METHODS.items():
        test = tests[method]["LayerIF"]
        gap = theirs["Average (MDL)"][title] - theirs["LayerIF"][title]
        ours = 100 * test["difference"]
        low, high = 100 * test["low"], 100 * test["high"]
        claims.append(Claim(
            claim=f"MDL - LayerIF = {gap:+.2f} points under {title}", met=low <= gap <= high,
            detail=f"ours {ours:+.2f}, 95 % {low:+.2f} to {high:+.2f}",
        ))  # fmt: skip
    ours = {t: _by(rows, "Average (MDL)")[t] for t in METHODS.values()}
    paper = {t: theirs["Average (MDL)"][t] for t in METHODS.values()}
    order, wanted = (sorted(d, key=lambda k: -d[k]) for d in (ours, paper))
    claims.append(Claim(claim=f"order of the pruners: {' > '.join(wanted)}", met=order == wanted, detail=" > ".join(order)))
    return claims


def _finding(tests: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    apart = [METHODS[m] for m in METHODS if tests[m]["LayerIF"]["p"] < 0.05]
    best = _by(rows, "dense")
    word = f"differ under {', '.join(apart)}" if apart else "cannot be told apart under any pruner"
    against = [METHODS[m] for m in METHODS if tests[m]["uniform"]["p"] < 0.05 and tests[m]["uniform"]["difference"] > 0]
    return (
        f"MDL and LayerIF {word} (mean of 7 tasks, paired over questions); MDL beats "
        f"uniform under {', '.join(against) or 'none'}; "
        f"the dense model has {best['Wanda']:.1f} +- {best['Wanda, error']:.1f} %"
    )


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    from layerbudget.reporting.figures import new_figure, save_figure

    figure = new_figure(8.0, 3.2)
    axes = figure.subplots()
    width = 0.8 / len(METHODS)
    for j, title in enumerate(METHODS.values()):
        x = np.arange(len(rows)) + (j - 1) * width
        axes.bar(x, [r[title] for r in rows], width, yerr=[r[f"{title}, error"] for r in rows], label=title)
    axes.set_xticks(range(len(rows)), [r["row"] for r in rows], rotation=20, fontsize=8)
    axes.set_ylabel("mean of 7 tasks, %")
    axes.set_ylim(bottom=max(0.0, min(r[t] for r in rows for t in METHODS.values()) - 5))
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)


def run_kappa(
    *, scale: str = "small", model: str = "demo", data_dir: Path | str | None = None, out: Path | str | None = None,
    part: tuple[int, int] = (1, 1), progress: Progress | None = None, **_: Any,
) -> Outcome:  # fmt: skip
    """Figure 5: every kappa pruned and asked, beside LayerIF and uniform (Gemma's cap).

    Raises:
        Elsewhere: Another part of the grid has cells to measure.
        NotFound: The tasks' files are not there.
        MissingDependency: lm-eval is not installed.
    """
    runs = PruningRuns(scale=scale, model=model, data_dir=data_dir, out=out, paper="gemma", part=part)
    chosen = runs.setting.swept
    rows: list[dict[str, Any]] = []
    tick = Steps(progress, len(METHODS) * (len(chosen) * (len(KAPPAS) + 1) + 1))
    asked: list[tuple[str, str, list[Plan], list[dict[str, Any]]]] = []
    for method, title in METHODS.items():
        kinds = [(f"kappa {k}", [functools.partial(runs.mdl, t, k) for t in chosen]) for k in KAPPAS]
        kinds.append(("LayerIF", [functools.partial(runs.layerif, t, method) for t in chosen]))
        kinds.append(("uniform", [functools.partial(plan_sparsity, runs.blocks, sparsity=0.5, rule="uniform")]))
        for name, makers in kinds:
            found = []
            for make in makers:
                found.append(runs.ask(make, method))
                tick()
            if None not in found:
                asked.append((title, name, [make() for make in makers], [f for f in found if f is not None]))
    runs.cells.check()
    for title, name, plans, answers in asked:
        each = [percent(f) for f in answers]
        rows.append({
            "pruner": title, "plan": name, "accuracy": float(np.mean([f[0] for f in each])),
            "error": float(np.mean([f[1] for f in each])), "spread": float(np.mean([p.values.std() for p in plans])),
            "published": _published_kappa(title, name),
        })  # fmt: skip
    claims = [_kappa_claim([r for r in rows if r["pruner"] == t], t) for t in METHODS.values()]
    best = {t: max((r for r in rows if r["pruner"] == t), key=lambda r: float(r["accuracy"]))["plan"] for t in METHODS.values()}
    return Outcome(
        name="kappa", items=("figure-5",),
        setting={"scale": scale, "model": model, "calibrations": list(chosen), **runs.identity},
        result={"rows": rows}, rows=rows, claims=claims, seconds=runs.cells.seconds,
        finding="highest by pruner: " + ", ".join(f"{t} {p}" for t, p in best.items()),
        draw=lambda path: _draw_kappa(rows, path),
    )  # fmt: skip


def _published_kappa(title: str, name: str) -> float | None:
    figure = item("figure-5")
    if name == "LayerIF":
        return float(figure["layerif"][title])
    return figure["rows"]["Average"].get(f"{title}, {name}")


def _kappa_claim(rows: Sequence[Mapping[str, Any]], title: str) -> Claim:
    """The paper: raising kappa does not help against LayerIF."""
    base = next(r for r in rows if r["plan"] == "LayerIF")
    raised = max((r for r in rows if r["plan"] in ("kappa 2", "kappa 3", "kappa 4")), key=lambda r: r["accuracy"])
    gap, error = raised["accuracy"] - base["accuracy"], float(np.hypot(raised["error"], base["error"]))
    return Claim(
        claim=f"no kappa above 1 beats LayerIF under {title}", met=gap <= 2 * error,
        detail=f"{raised['plan']}: {gap:+.2f} points, two unpaired errors {2 * error:.2f}",
    )  # fmt: skip


def _draw_kappa(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    from layerbudget.reporting.figures import new_figure, save_figure

    figure = new_figure(9.0, 2.8)
    for axes, title in zip(figure.subplots(1, len(METHODS)), METHODS.values(), strict=True):
        own = [r for r in rows if r["pruner"] == title]
        points = [r for r in own if r["plan"].startswith("kappa")]
        axes.errorbar(KAPPAS, [r["accuracy"] for r in points], yerr=[r["error"] for r in points], marker="o", capsize=2)
        for name, style in (("LayerIF", "--"), ("uniform", ":")):
            axes.axhline(next(r["accuracy"] for r in own if r["plan"] == name), linestyle=style, color="0.4", label=name)
        axes.set(title=title, xlabel="kappa")
    figure.axes[0].set_ylabel("mean of 7 tasks, %")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return save_figure(figure, path)
