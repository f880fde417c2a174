"""Compare scores and rules: every plan measured at an equal recounted budget, over seeds, with tests and a ranking."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..decisions.bits.program import ESTIMATOR
from ..errors import InvalidInput
from ..evaluation.statistics import corrected, difference, holm, ranking
from ..models.machine import versions
from ..plan import Plan
from ..progress import Progress, Steps
from ..records import Result, digest, dumps, made_by, write_text
from ..scores import Scores
from ..sensitivity.estimators import find_estimator
from ..sensitivity.importing import import_scores
from ..storage.parts import Cells
from .bench import Bench, counted
from .grid import UNIFORM, Grid, make_grid, twins

# Short names for what people call their scores.
ALIASES: Mapping[str, str] = {
    "gain": "fisher-gram", "owl": "outlier-ratio", "alphapruning": "spectral-tail", "gradient": "gradient-norm",
    "shortgpt": "block-influence",
}  # fmt: skip


_COST = ("forward", "backward", "seconds")
_FREE = dict.fromkeys(_COST, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoreComparison(Result):
    """Result of a comparison.

    Attributes:
        kind: Kind of plan.  unit: Of the measurements.  seeds: Of calibration or training.  held_out: Held-out items.
        budgets: One record per budget: ``{budget, rows[], twins[], ignoring[], impossible{}, equal_budget, spent{}}``; a row is
            ``{name, rule, score, control, mean, versus_uniform, versus_permuted, rank, ...}``, best first.
        cost: ``{score: {forward, backward, seconds}}`` in sequences through the model, per seed.
        sentences: What it says, in words.
        settings: What was asked for.  versions: Of the packages.
        complete: False where other parts of the run are still to come; there are then no rows.
    """

    kind: str
    unit: str
    seeds: Sequence[int]
    held_out: int
    budgets: Sequence[Mapping[str, Any]]
    cost: Mapping[str, Mapping[str, float]]
    sentences: Sequence[str]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    complete: bool = True


@dataclasses.dataclass(kw_only=True)
class _Run:
    bench: Bench
    kind: str
    cells: Cells
    scores: Mapping[str, str | Scores | Mapping[str, float]]
    score_options: Mapping[str, Mapping[str, Any]]

    def scored(self, name: str, seed: int) -> tuple[Scores, dict[str, Any]] | None:
        """A score record of one seed, and what it cost."""
        given = self.scores[name]
        if isinstance(given, Scores):
            return given, _FREE
        if isinstance(given, Mapping):
            return Scores.from_values(self.bench.blocks, given, estimator=name), _FREE
        if Path(given).suffix in (".csv", ".json"):
            return import_scores(given, self.bench.blocks, estimator=name), _FREE
        options = dict(self.score_options.get(name, {}))
        data = self.bench.data(seed) if given == ESTIMATOR or find_estimator(given).data else None
        key = {"score": given, "options": options, **self.bench.identity, "data": data.digest if data is not None else None}

        def make() -> dict[str, Any]:
            started = time.monotonic()
            with counted(self.bench.model) as passes:
                record = self.bench.score(given, data, options)
            return {"scores": record.to_dict(), **passes.to_dict(), "seconds": time.monotonic() - started}

        cell = self.cells.get({"what": "score", **key}, make)
        if cell is None:
            return None
        return Scores.from_dict(cell["scores"]), {k: cell[k] for k in _COST}

    def measured(self, plan: Plan, decision: str, seed: int) -> dict[str, Any] | None:
        """The measurement of one decision under one seed."""
        data = self.bench.data(seed)
        key = {"what": "plan", "decision": decision, "seed": seed, "data": data.digest, **self.bench.identity}
        return self.cells.get(key, lambda: self.bench.measure(plan, seed))


def compare_scores(
    bench: Bench,
    scores: Mapping[str, str | Scores | Mapping[str, float]] | Sequence[str],
    rules: Sequence[str | Callable[..., Any]],
    budgets: Sequence[float],
    *,
    kind: str = "sparsity",
    seeds: Sequence[int] = (0,),
    controls: bool = True,
    options: Mapping[str, Any] | None = None,
    score_options: Mapping[str, Mapping[str, Any]] | None = None,
    folder: Path | str | None = None,
    part: tuple[int, int] = (1, 1),
    progress: Progress | None = None,
) -> ScoreComparison:
    """Measure every score under every rule, beside uniform and permuted controls.

    Args:
        bench: A :class:`~layerbudget.comparison.bench.TextBench` or :class:`~layerbudget.comparison.bench.TaskBench`.
        scores: By the name that they go by: estimators, files (.csv, .json), records or ``{block: value}``; or names alone.
        rules: Names of rules, or functions of one's own.
        budgets: In the unit of the kind: global sparsities, mean ranks, totals of experts, mean bits.
        kind: Kind of plan.
        seeds: Seeds of the calibration draw (or of the training), and of the controls.
        controls: Add a permuted control of every pair that reads its score.
        options: Bounds of the plans and options of rules.
        score_options: Options of estimators, by the name of the score.
        folder: Keep finished cells here; a run that was stopped goes on.
        part: ``(i, n)``: measure every n-th missing cell only, so that n processes share the folder.
        progress: Called with cells done and in total.

    Returns:
        Tests against uniform and against the permuted control (Holm-corrected over the contenders of a budget), the ranking
        with its uncertainty, what each score cost, which rules ignore the score, which plans are the same.

    Raises:
        InvalidInput: No score, rule, budget or seed, or none that makes a plan.
    """
    named = scores if isinstance(scores, Mapping) else {s: ALIASES.get(s, s) for s in scores}
    named = {Path(n).stem if isinstance(v, str) and Path(v).suffix else n: v for n, v in named.items()}
    for what, values in (("score", named), ("rule", rules), ("budget", budgets), ("seed", seeds)):
        if not len(values):
            raise InvalidInput(f"There is no {what} to compare.", "At least one is needed.", f"Name a {what}.")
    run = _Run(
        bench=bench, kind=kind, scores=named, score_options=score_options or {},
        cells=Cells(None if folder is None else Path(folder) / "cells", part),
    )  # fmt: skip
    tick, found = Steps(progress, len(seeds) * len(named), "scores"), []
    for seed in seeds:
        found.append((seed, {name: _ticked(tick, run.scored(name, seed)) for name in named}))
    settings = {
        "scores": {n: Path(v).name if isinstance(v, str) else "given" for n, v in named.items()}, "budgets": list(budgets),
        "rules": [r if isinstance(r, str) else getattr(r, "__name__", str(r)) for r in rules], "controls": controls,
        "options": dict(options or {}), **bench.identity,
    }  # fmt: skip
    if any(one is None for _, by_name in found for one in by_name.values()):
        return _unfinished(run, settings, seeds)
    records = [(seed, {n: one[0] for n, one in by_name.items() if one}) for seed, by_name in found]
    grids = {
        (b, seed): make_grid(
            kind, by_name, rules, b, seed=seed, controls=controls, options=options, weighed=bench.weighed
        )
        for b in budgets for seed, by_name in records
    }  # fmt: skip
    tables, total = _measure(run, grids, progress), sum(len(g.entries) for g in grids.values())
    if tables is None:
        return _unfinished(run, settings, seeds)
    spent = {n: [one[1] for _, by in found if (one := by[n]) is not None] for n in named}
    cost = {n: {k: float(np.mean([c[k] for c in each])) for k in _COST} for n, each in spent.items()}
    made = [_budget(b, {s: grids[b, s] for s in seeds}, tables[b], bench.weights) for b in budgets]
    items = len(next(iter(next(iter(tables.values())).values()))["values"][0])
    result = ScoreComparison(
        kind=kind, unit=bench.unit, seeds=list(seeds), held_out=items, budgets=made, cost=cost, sentences=(), settings=settings,
        versions=versions(),
    )  # fmt: skip
    return dataclasses.replace(result, sentences=(*_sentences(result), f"{total} plans, {run.cells.kept} cells found again."))


def _unfinished(run: _Run, settings: Mapping[str, Any], seeds: Sequence[int]) -> ScoreComparison:
    text = f"{run.cells.made} cells were measured here, {run.cells.missing} are left to other parts; run again after them."
    return ScoreComparison(
        kind=run.kind, unit=run.bench.unit, seeds=list(seeds), held_out=0, budgets=(), cost={}, sentences=(text,),
        settings=settings, versions=versions(), complete=False,
    )  # fmt: skip


def _ticked(tick: Steps, found: Any) -> Any:
    """Count one step; return what was found."""
    tick()
    return found


def _measure(
    run: _Run, grids: Mapping[tuple[float, int], Grid], progress: Progress | None
) -> dict[float, dict[str, dict[str, Any]]] | None:
    """``{budget: {entry: {values[seeds][items], spent[seeds], passes[seeds]}}}``, or None where cells are left to others."""
    tables: dict[float, dict[str, dict[str, Any]]] = {}
    tick, whole = Steps(progress, sum(len(g.entries) for g in grids.values()), "plans"), True
    for (budget, seed), grid in grids.items():
        for entry in grid.entries:
            cell = run.measured(entry.plan, entry.decision, seed)
            tick()
            if cell is None:
                whole = False
                continue
            row = tables.setdefault(budget, {}).setdefault(entry.name, {"values": [], "spent": [], "passes": []})
            for name in row:
                row[name].append(cell[name])
    return tables if whole else None


def _budget(
    budget: float, grids: Mapping[int, Grid], cells: Mapping[str, Mapping[str, Any]], weights: np.ndarray | None
) -> dict[str, Any]:
    """Tests and ranking at one budget; an entry counts where every seed has it."""
    first = next(iter(grids.values()))
    known = {e.name: e for g in grids.values() for e in g.entries}
    tables = {n: np.array(c["values"]) for n, c in cells.items() if len(c["values"]) == len(grids)}
    rows = []
    for place in ranking(tables, weights, seed=int(digest({"budget": budget})[:8], 16)):
        entry = known[place["name"]]
        versus = None if entry.name == UNIFORM else difference(tables[entry.name], tables[UNIFORM], weights)
        control = f"{entry.rule}({entry.score}, permuted)"
        paired = difference(tables[entry.name], tables[control], weights) if not entry.control and control in tables else None
        rows.append({
            **place, "rule": entry.rule, "score": entry.score, "control": entry.control, "spent": cells[entry.name]["spent"],
            "versus_uniform": versus, "versus_permuted": paired,
        })  # fmt: skip
    for test in ("versus_uniform", "versus_permuted"):
        _correct([r for r in rows if r[test] is not None and not r["control"]], test, tables)
    spent = {n: c["spent"] for n, c in cells.items()}
    everything = [s for values in spent.values() for s in values]
    return {
        "budget": budget, "rows": rows, "twins": twins(first.entries), "ignoring": list(first.ignoring),
        "impossible": dict(first.impossible), "equal_budget": max(everything) - min(everything) <= 1e-3 * max(everything),
        "spent": [min(everything), max(everything)],
    }  # fmt: skip


def _correct(rows: Sequence[dict[str, Any]], test: str, tables: Mapping[str, np.ndarray]) -> None:
    """Holm's correction of p-values and intervals in place, over what was measured: rules of the same plan are one test."""
    same = {r["name"]: (tables[r["name"]].tobytes(), r[test]["p"]) for r in rows}
    distinct = list(dict.fromkeys(same.values()))
    adjusted = dict(zip(distinct, holm([p for _, p in distinct]), strict=True))
    for row in rows:
        row[test] = corrected(row[test], adjusted[same[row["name"]]], len(distinct))


def _sentences(result: ScoreComparison) -> list[str]:
    lines = []
    for b in result.budgets:
        better = [r for r in b["rows"] if not r["control"] and r["versus_uniform"]["holm"] < 0.05]
        ahead = [r["name"] for r in better if r["versus_uniform"]["difference"] < 0]
        behind = [r["name"] for r in better if r["versus_uniform"]["difference"] > 0]
        text = f"At {b['budget']:g}: better than uniform: {', '.join(ahead) or 'none'}; worse: {', '.join(behind) or 'none'}"
        lines.append(f"{text} (paired over seeds and items, Holm, 5 %).")
        matter = [r["name"] for r in b["rows"] if r["versus_permuted"] and r["versus_permuted"]["holm"] < 0.05
                  and r["versus_permuted"]["difference"] < 0]  # fmt: skip
        lines.append(f"Better than the same rule on permuted scores: {', '.join(matter) or 'none'}.")
        best = b["rows"][0]
        lines.append(
            f"First is {best['name']} (in {best['first']:.0%} of the resamples; place {best['rank_low']:.0f} to "
            f"{best['rank_high']:.0f})."
        )
        if b["ignoring"]:
            lines.append(f"These rules ignore the score: {', '.join(b['ignoring'])}.")
        lines += [f"The same plan: {', '.join(group)}." for group in b["twins"]]
        lines += [f"No plan: {name}: {reason}" for name, reason in b["impossible"].items()]
        if not b["equal_budget"]:
            lines.append(f"The plans do not spend the same: {b['spent'][0]:g} to {b['spent'][1]:g}.")
    if len(result.seeds) == 1:
        lines.append("One seed: the error counts held-out items only, not the draw of the calibration text.")
    free = [n for n, c in result.cost.items() if not c["forward"]]
    spent = ", ".join(f"{n} {c['forward']:.0f} forward and {c['backward']:.0f} backward" for n, c in result.cost.items())
    lines.append(f"Sequences through the model per seed: {spent}.")
    return lines + ([f"{', '.join(free)} needed none here."] if free and len(free) < len(result.cost) else [])


COLUMNS = ("budget", "place", "name", "rule", "score", "control", "mean", "difference", "low", "high", "p", "holm",
           "versus_permuted", "p_permuted", "rank_low", "rank_high", "first", "forward", "backward", "spent")  # fmt: skip


def flat(result: ScoreComparison) -> list[dict[str, Any]]:
    """One flat row per plan and budget, best first."""
    rows = []
    for b in result.budgets:
        for place, r in enumerate(b["rows"], 1):
            u, c = r["versus_uniform"] or {}, r["versus_permuted"] or {}
            cost = result.cost.get(r["score"], {}) if r["score"] else {}
            rows.append({
                "budget": b["budget"], "place": place, **{k: r[k] for k in ("name", "rule", "score", "control", "mean")},
                **{k: u.get(k) for k in ("difference", "low", "high", "p", "holm")}, "versus_permuted": c.get("difference"),
                "p_permuted": c.get("holm"), **{k: r[k] for k in ("rank_low", "rank_high", "first")},
                "forward": cost.get("forward"), "backward": cost.get("backward"), "spent": r["spent"][0],
            })  # fmt: skip
    return rows


def to_csv(result: ScoreComparison) -> str:
    """CSV with a header."""

    def cell(v: Any) -> str:
        text = "" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v)
        return f'"{text}"' if "," in text else text

    lines = [",".join(COLUMNS), *(",".join(cell(r[c]) for c in COLUMNS) for r in flat(result))]
    return "\n".join(lines) + "\n"


def to_latex(result: ScoreComparison) -> str:
    """A booktabs table: mean, difference to uniform with its interval, Holm-corrected p, places."""
    lines = [
        r"\begin{tabular}{llrrrr}", r"\toprule",
        rf"budget & plan & {result.unit} & $\Delta$ uniform (95\,\%) & $p_\mathrm{{Holm}}$ & place \\",
    ]  # fmt: skip
    for b in result.budgets:
        lines.append(r"\midrule")
        for r in b["rows"]:
            u = r["versus_uniform"]
            delta = "--" if u is None else f"${u['difference']:+.4f}$ [${u['low']:+.4f}$, ${u['high']:+.4f}$]"
            p = "--" if u is None or "holm" not in u else f"{u['holm']:.3f}"
            name = r["name"].replace("_", r"\_").replace("%", r"\%")
            place = f"{r['rank_low']:.0f}--{r['rank_high']:.0f}"
            lines.append(rf"{b['budget']:g} & {name} & {r['mean']:.4f} & {delta} & {p} & {place} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def draw(result: ScoreComparison, path: Path | str) -> Path:
    """Difference to uniform with its 95 % interval, one panel per budget; permuted controls are pale.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    from ..report.figures import ACCENT, INK, MUTED, new_figure, save_figure

    shown = [[r for r in b["rows"] if r["versus_uniform"]] for b in result.budgets]
    figure = new_figure(1.5 + 3.6 * len(shown), 1.0 + 0.24 * max(map(len, shown)))
    for axes, b, rows in zip(figure.subplots(1, len(shown), squeeze=False)[0], result.budgets, shown, strict=True):
        for i, r in enumerate(reversed(rows)):
            u = r["versus_uniform"]
            spread = [[u["difference"] - u["low"]], [u["high"] - u["difference"]]]
            axes.errorbar(u["difference"], i, xerr=spread, fmt="o", markersize=4, color=MUTED if r["control"] else ACCENT)
        axes.set_yticks(range(len(rows)), [r["name"] for r in reversed(rows)], fontsize=7)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_title(f"budget {b['budget']:g}", loc="left", fontsize=10)
        axes.set_xlabel(f"against uniform, {result.unit}; left is better", fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def leave(result: ScoreComparison, out: Path | str, *, overwrite: bool = False) -> Mapping[str, str]:
    """Write ``comparison.json``, ``comparison.csv``, ``comparison.tex`` and ``comparison.png``.

    Raises:
        AlreadyExists: A file is there with other content and ``overwrite`` is false.
    """
    out = Path(out)
    texts = {
        "json": dumps({"schema_version": 1, **result, "made_by": made_by()}),
        "csv": to_csv(result),
        "tex": to_latex(result),
    }
    made = {k: str(write_text(out / f"comparison.{k}", text, overwrite=overwrite)) for k, text in texts.items()}
    return {**made, "png": str(draw(result, out / "comparison.png"))}
