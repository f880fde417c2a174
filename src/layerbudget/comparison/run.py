"""Compare scores and rules: every plan measured at an equal recounted budget, over seeds, with tests and a ranking."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import checked
from ..canonical import digest, dumps, to_jsonable
from ..errors import InvalidInput
from ..evaluation.statistics import corrected, difference, holm, ranking
from ..models.machine import versions
from ..plan import Plan
from ..progress import Progress, Steps
from ..records import Result, made_by
from ..scores import Scores
from ..sensitivity.estimators import ESTIMATORS
from ..sensitivity.gain import score
from ..storage.parts import Cells
from ..storage.writing import write_text
from ..verdicts import by_chance, outcome
from .bench import Bench, counted
from .grid import UNIFORM, PlanGrid, check_request, make_grid
from .names import METHODS, Given, by_name, read_given

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
        complete: False where other parts of the run are still to come; there are then no rows.
    """

    kind: str
    unit: str
    seeds: Sequence[int]
    held_out: int = 0
    budgets: Sequence[Mapping[str, Any]] = ()
    cost: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    sentences: Sequence[str] = ()
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    complete: bool = False


def _scored(bench: Bench, cells: Cells, name: str, source: Given, seed: int) -> tuple[Scores, Mapping[str, float]] | None:
    """A score record of one seed and what it cost; ``None`` where the cell is left to another part."""
    if isinstance(source, Scores):
        return source, _FREE
    if not isinstance(source, str):
        return Scores.from_values(bench.blocks, source, estimator=name), _FREE
    data = bench.data(seed) if ESTIMATORS.find(source).data else None

    def make() -> dict[str, Any]:
        started = time.monotonic()
        with counted(bench.model) as passes:
            record = score(bench.model, data, bench.blocks, source)
        return {"scores": record.to_dict(), **passes, "seconds": time.monotonic() - started}

    key = {"score": source, "options": {}, **bench.identity, "data": None if data is None else data.digest}
    if (file := Path(source.rpartition(":")[0])).suffix == ".py":  # a function that was changed is measured again
        key["file"] = digest(file.read_text(encoding="utf-8"))
    cell = cells.get({"what": "score", **key}, make)
    return None if cell is None else (Scores.from_dict(cell["scores"]), {k: cell[k] for k in _COST})


def check_all(
    bench: Bench,
    kind: str,
    named: Mapping[str, Given],
    rules: Sequence[str | Callable[..., Any]],
    budgets: Sequence[float],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Given | Plan]:
    """Return the scores with their files read, once all that can be refused before any work was checked.

    Args:
        bench: What measures the plans.
        kind: Kind of plan.
        named: Estimators, files, records or ``{block: value}`` by name.
        rules: Names of rules, or functions of one's own.
        budgets: In the unit of the kind.
        options: Bounds of the plans and options of rules.
    """
    read = read_given(bench, kind, named)
    check_request(kind, bench.blocks, rules, budgets, options, {n: p for n, p in read.items() if isinstance(p, Plan)})
    return read


@checked
def compare_scores(
    bench: Bench,
    scores: Mapping[str, Given] | Sequence[str],
    rules: Sequence[str | Callable[..., Any]],
    budgets: Sequence[float],
    *,
    kind: str = "sparsity",
    seeds: Sequence[int] = (0,),
    controls: bool = True,
    options: Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    part: tuple[int, int] = (1, 1),
    again: bool = False,
    progress: Progress | None = None,
) -> ScoreComparison:
    """Measure every score under every rule, beside uniform and permuted controls.

    Args:
        bench: A :class:`~layerbudget.comparison.bench.TextBench` or :class:`~layerbudget.comparison.bench.TaskBench`.
        scores: By the name that they go by: estimators, files (.csv, .json), records or ``{block: value}``; or a list of names
            and files, see :func:`~layerbudget.comparison.names.by_name`. A file of a plan is measured as it is.
        rules: Names of rules, or functions of one's own.
        budgets: In the unit of the kind: global sparsities, mean ranks, totals of experts.
        kind: Kind of plan.
        seeds: Seeds of the calibration draw (or of the training), and of the controls.
        controls: Add a permuted control of every pair that reads its score.
        options: Bounds of the plans and options of rules.
        folder: Keep finished cells here; a run that was stopped goes on. :func:`write_comparison` writes the result beside
            them, for :func:`~layerbudget.reporting.page.write_report`.
        part: ``(i, n)``: measure every n-th missing cell only, so that n processes share the folder.
        again: Measure nothing: the result of a finished run, from the cells in the folder.
        progress: Called with cells done and in total.

    Tests against uniform and against the permuted control are Holm-corrected over the contenders of a budget: p-values and
    intervals become wider the more rows there are.

    Raises:
        AlreadyExists: ``again``, and a cell is not there.
    """
    named = scores if isinstance(scores, Mapping) else by_name(scores)
    for what, values in (("score", named), ("rule", rules), ("budget", budgets), ("seed", seeds)):
        if not len(values):
            raise InvalidInput(f"There is no {what} to compare.", "At least one is needed.", f"Name a {what}.")
    if twice := [seed for seed, count in Counter(seeds).items() if count > 1]:
        raise InvalidInput(f"The seed {twice[0]} is named twice.", "Every seed is another draw.", "Name each one once.")
    read = check_all(bench, kind, named, rules, budgets, options)
    plans = {name: source for name, source in read.items() if isinstance(source, Plan)}
    measured = {name: source for name, source in read.items() if not isinstance(source, Plan)}
    cells = Cells(None if folder is None else Path(folder) / "cells", part, complete=again)
    settings = {
        "scores": {n: Path(v).name if isinstance(v, str) else "given" for n, v in named.items()},
        "budgets": list(budgets),
        "rules": [r if isinstance(r, str) else getattr(r, "__name__", str(r)) for r in rules],
        "controls": controls,
        "options": dict(options or {}),
        **bench.identity,
    }
    result = ScoreComparison(kind=kind, unit=bench.unit, seeds=list(seeds), settings=settings, versions=versions())
    records: dict[int, dict[str, Scores]] = {seed: {} for seed in seeds}
    spent: dict[str, list[Mapping[str, float]]] = {name: [] for name in measured}
    tick = Steps(progress, len(seeds) * len(measured), "scores")
    for seed, (name, source) in itertools.product(seeds, measured.items()):
        scored = _scored(bench, cells, name, source, seed)
        tick()
        if scored is not None:
            records[seed][name] = scored[0]
            spent[name].append(scored[1])
    if cells.missing:
        return _unfinished(result, cells)
    made = functools.partial(make_grid, kind, controls=controls, options=options, blocks=bench.blocks, plans=plans)
    grids = {b: {seed: made(records[seed], rules, b, seed=seed) for seed in seeds} for b in budgets}
    total = sum(len(grid.entries) for by_seed in grids.values() for grid in by_seed.values())
    tables = _measured(bench, cells, grids, Steps(progress, total, "plans"))
    if cells.missing:
        return _unfinished(result, cells)
    result = dataclasses.replace(
        result,
        cost={name: {k: float(np.mean([c[k] for c in each])) for k in _COST} for name, each in spent.items()},
        budgets=[_budget(b, grids[b], tables[b], bench.weights) for b in budgets],
        held_out=len(tables[budgets[0]][UNIFORM]["values"][0]),
        complete=True,
    )
    return dataclasses.replace(result, sentences=(*_sentences(result), _on_cells(total, cells.kept)))


def _on_cells(plans: int, kept: int) -> str:
    """How many plans were measured, and what was there from an earlier run."""
    again = f" {kept} measurement{'s were' if kept > 1 else ' was'} there from an earlier run." if kept else ""
    return f"{plans} plans were compared.{again}"


def _unfinished(result: ScoreComparison, cells: Cells) -> ScoreComparison:
    text = f"{cells.made} cells were measured here, {cells.missing} are left to other parts; run again after them."
    return dataclasses.replace(result, sentences=(text,))


def _measured(
    bench: Bench, cells: Cells, grids: Mapping[float, Mapping[int, PlanGrid]], tick: Steps
) -> dict[float, dict[str, dict[str, list[Any]]]]:
    """``{budget: {entry: {values[seeds][items], spent[seeds]}}}``, without the cells that are left to other parts."""
    tables: dict[float, dict[str, dict[str, list[Any]]]] = {budget: {} for budget in grids}
    identity = bench.identity
    each = [
        (budget, seed, entry, {"what": "plan", "decision": entry.decision, "seed": seed, "data": bench.data(seed).digest})
        for budget, by_seed in grids.items()
        for seed, grid in by_seed.items()
        for entry in grid.entries
    ]
    whole = re.sub(r" --part[ =]\S+", "", made_by())  # one process of several leaves the others' cells, and no table
    cells.expect(({**key, **identity} for *_, key in each), whole)
    for budget, seed, entry, key in each:
        cell = cells.get({**key, **identity}, functools.partial(bench.measure, entry.plan, seed))
        tick()
        row = tables[budget].setdefault(entry.name, {"values": [], "spent": []})
        if cell is not None:
            row["values"].append(cell["values"])
            row["spent"].append(cell["spent"])
    return tables


def _budget(
    budget: float, grids: Mapping[int, PlanGrid], cells: Mapping[str, Mapping[str, Any]], weights: np.ndarray | None
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
        rows.append(
            {
                **place,
                "rule": entry.rule,
                "score": entry.score,
                "control": entry.control,
                "spent": cells[entry.name]["spent"],
                "versus_uniform": versus,
                "versus_permuted": paired,
            }
        )
    for test in ("versus_uniform", "versus_permuted"):
        _correct([r for r in rows if r[test] is not None and not r["control"]], test, tables)
    everything = [amount for c in cells.values() for amount in c["spent"]]
    return {
        "budget": budget,
        "rows": rows,
        "twins": first.twins(),
        "ignoring": list(first.ignoring),
        "impossible": dict(first.impossible),
        "equal_budget": max(everything) - min(everything) <= 1e-3 * max(everything),
        "spent": [min(everything), max(everything)],
    }


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
        lines.append(_on_budget(b))
        matter = [r["name"] for r in b["rows"] if r["versus_permuted"] and _outcome(r["versus_permuted"]) == "lower"]
        if any(r["versus_permuted"] for r in b["rows"]):
            lines.append(f"Better than the same rule on permuted scores: {', '.join(matter) or 'none'}.")
        best = b["rows"][0]
        shuffled = ", a shuffled score," if best["control"] == "permuted" else ""
        lines.append(
            f"First is {best['name']}{shuffled} (in {best['first']:.0%} of the resamples; place {best['rank_low']:.0f} to "
            f"{best['rank_high']:.0f}).{_on_second(b)}"
        )
        if b["ignoring"]:
            lines.append(f"These rules ignore the score: {', '.join(b['ignoring'])}.")
        lines += [f"The same plan: {', '.join(group)}." for group in b["twins"]]
        lines += [f"No plan: {name}: {reason}" for name, reason in b["impossible"].items()]
        if not b["equal_budget"]:
            lines.append(f"The plans do not spend the same: {b['spent'][0]:g} to {b['spent'][1]:g}.")
    scores, rules = result.settings["scores"], result.settings["rules"]
    for name, called in METHODS.items():
        if name in scores and name not in rules:
            each, every = " and ".join(f"{rule}({name})" for rule in rules), ",".join([*rules, name])
            lines.append(f"{each} takes the score of {called} under another rule. {called} itself needs --rules {every}.")
    if max(len(b["rows"]) for b in result.budgets) > 2:
        lines.append("Intervals and p-values are corrected for the number of plans, so they change with the rows of the table.")
    if len(result.seeds) == 1:
        lines.append("One seed: the error counts held-out items only, not the draw of the calibration text.")
    free = [n for n, c in result.cost.items() if not c["forward"]]
    spent = ", ".join(f"{n} {c['forward']:.0f} forward and {c['backward']:.0f} backward" for n, c in result.cost.items())
    lines.append(f"Sequences through the model per seed: {spent}.")
    return lines + ([f"{', '.join(free)} needed none here."] if free and len(free) < len(result.cost) else [])


def _outcome(test: Mapping[str, Any]) -> str:
    """How a row stands in a paired test that was corrected for the number of rows."""
    return outcome(test["difference"], p=test["holm"])


def _on_budget(budget: Mapping[str, Any]) -> str:
    """The verdict at one budget: who is better than uniform, which control does as well, who is worse, who is level."""
    words: dict[str, list[str]] = {"lower": [], "higher": [], "level": [], "open": []}
    for row in budget["rows"]:
        if row["control"]:
            continue
        side = _outcome(row["versus_uniform"])
        words[side].append(row["name"] + (by_chance(_as_good(budget, row)) if side == "lower" else ""))
    ahead, behind, level, unsure = ("; ".join(w) if k == "lower" else ", ".join(w) for k, w in words.items())
    sentence = f"At {budget['budget']:g}: better than uniform: {ahead or 'none'}; worse: {behind or 'none'}"
    sentence += f"; level: {level}" if level else ""
    sentence += f"; not told apart: {unsure}" if unsure else ""
    return f"{sentence} (paired over seeds and items, Holm, 5 %)."


def _as_good(budget: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Controls that a row does not beat: its own, where the test does not tell them apart, and any that measured no more."""
    controls = [r for r in budget["rows"] if r["control"] == "permuted"]
    control_name = f"{row['rule']}({row['score']}, permuted)"
    alike = row["versus_permuted"] is not None and _outcome(row["versus_permuted"]) != "lower"
    return [r["name"] for r in controls if r["mean"] <= row["mean"] or (alike and r["name"] == control_name)]


def _on_second(budget: Mapping[str, Any]) -> str:
    """Whether the first plan can be told from the next one that is another plan, by their places in the paired resamples."""
    best, *others = budget["rows"]
    alike = next((group for group in budget["twins"] if best["name"] in group), [best["name"]])
    second = next((r for r in others if r["name"] not in alike), None)
    if second is None or (best["rank_high"] > 1 and second["rank_low"] > 1):
        return ""
    apart = best["rank_high"] <= 1 < second["rank_low"]  # equal values share a place
    return f" It {'can' if apart else 'cannot'} be told from the second, {second['name']}."


def flat(result: ScoreComparison) -> list[dict[str, Any]]:
    """One flat row per plan and budget, best first."""
    rows = []
    for b in result.budgets:
        for place, r in enumerate(b["rows"], 1):
            u, c = r["versus_uniform"] or {}, r["versus_permuted"] or {}
            cost = result.cost.get(r["score"], {}) if r["score"] else {}
            rows.append(
                {
                    "budget": b["budget"],
                    "place": place,
                    **{k: r[k] for k in ("name", "rule", "score", "control", "mean")},
                    **{k: u.get(k) for k in ("difference", "low", "high", "p", "holm")},
                    "versus_permuted": c.get("difference"),
                    "p_permuted": c.get("holm"),
                    **{k: r[k] for k in ("rank_low", "rank_high", "first")},
                    "forward": cost.get("forward"),
                    "backward": cost.get("backward"),
                    "spent": r["spent"][0],
                }
            )
    return rows


def to_csv(result: ScoreComparison) -> str:
    """The rows of :func:`flat` as CSV with a header."""
    rows, text = flat(result), io.StringIO()
    table = csv.DictWriter(text, rows[0], lineterminator="\n")
    table.writeheader()
    table.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def holds(result: ScoreComparison, record: Mapping[str, Any]) -> bool:
    """Return whether the content of a ``comparison.json`` is this comparison."""
    parts = ("kind", "seeds", "settings", "budgets")
    return digest({n: to_jsonable(result[n]) for n in parts}) == digest({n: record.get(n) for n in parts})


@checked
def write_comparison(result: ScoreComparison, out: Path | str, *, overwrite: bool = False) -> Mapping[str, str]:
    """Paths by ending of ``comparison.json`` and ``comparison.csv``, which are written; ``write_report`` draws their folder.

    Raises:
        InvalidInput: The comparison is not complete.
        AlreadyExists: A file is there and is not replaced.
    """
    if not isinstance(result, ScoreComparison):
        made = "Give what layerbudget.compare_scores returns."
        raise InvalidInput(f"result is of type {type(result).__name__}.", "It should be a comparison.", made)
    if not result.complete:
        problem = "The comparison is not complete: other parts of the run are still to come."
        raise InvalidInput(problem, "A table needs all of them.", "Call compare_scores again with this folder after them.")
    texts = {"json": dumps({"schema_version": 1, **result, "made_by": made_by()}), "csv": to_csv(result)}
    return {k: str(write_text(Path(out) / f"comparison.{k}", text, overwrite=overwrite)) for k, text in texts.items()}
