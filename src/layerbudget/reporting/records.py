"""Results of a folder, by kind: what they are, what they say in words, and the commands that made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..decision import DECISIONS, decision_of
from ..errors import LayerbudgetError, NotFound
from ..plan import Plan
from ..scores import Scores
from ..storage import reading
from ..storage.parts import standing_of
from ..verdicts import named, outcome, plus_minus
from .verdict import passes_of, verdict

# Files of a checkpoint or of a run that are no results.
_PASSED = (
    "config",
    "tokenizer",
    "generation_config",
    "special_tokens",
    "vocab",
    "added_tokens",
    "chat_template",
    "labels",
    "identity",
)


@dataclasses.dataclass
class FolderResults:
    """The results of a folder: all scores and plans by file, and records by what made them.

    ``receipt`` is of ``apply`` of the plan, ``result`` of a demo or of what else was measured, ``tuned`` of a fine-tuning,
    ``contest`` of a comparison; ``others`` are further records by file, ``figures`` PNG files.
    """

    folder: str
    scored: dict[str, Scores] = dataclasses.field(default_factory=dict)
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    receipt: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    tuned: dict[str, Any] | None = None
    contest: dict[str, Any] | None = None
    others: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    figures: list[Path] = dataclasses.field(default_factory=list)

    @property
    def plan(self) -> Plan | None:
        """The folder's plan, which is ``plan.json`` or else the first one."""
        return self.plans.get("plan.json") or next(iter(self.plans.values()), None)

    @property
    def decisive(self) -> Scores | None:
        """The scores that the plan was made from; None where it was made from none, or from scores that are not here."""
        digest = None if self.plan is None else self.plan.scores_digest
        return next((scores for scores in self.scored.values() if digest is not None and scores.digest == digest), None)

    @property
    def scores(self) -> Scores | None:
        """The scores of the plan; where there is no plan, or one that was made from no scores, the first ones."""
        if self.plan is not None and self.plan.scores_digest is not None:
            return self.decisive
        return next(iter(self.scored.values()), None)

    @property
    def left_out(self) -> str:
        """A sentence where the plan was made from scores that are not in the folder; empty where they are, or it measured."""
        if self.plan is None or self.plan.scores_digest is None or self.decisive is not None:
            return ""
        return "" if passes_of(self.plan) else "The scores of this plan are not in this folder."


def gather(folder: Path | str) -> FolderResults:
    """Read every result of a folder."""
    folder = Path(folder)
    results = FolderResults(folder=folder.resolve().name, figures=sorted(folder.glob("*.png")))
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith(_PASSED) or path.name.endswith(".index.json"):
            continue
        record = reading.read(path, "result", remedy="Make it again, or move it away.")
        if isinstance(record, dict):
            _sort(results, path, record)
    plan_digests = (
        None
        if results.plan is None
        else {results.plan.digest, *(part.digest for part in decision_of(results.plan).parts(results.plan).values())}
    )
    for name in [name for name, record in results.others.items() if _is_receipt(record)]:
        if plan_digests is None or results.others[name]["plan_digest"] in plan_digests:
            results.receipt = results.others.pop(name)
    if results.tuned is not None:
        results.tuned.setdefault("against", results.others.pop("against.json", None))
    if results == FolderResults(folder=results.folder):
        _check_finished(folder)
        raise NotFound(
            f"{folder} holds no results.",
            "It should hold scores.json, plan.json, receipt.json, result.json or figures.",
            "Run demo, score, plan, apply, finetune or compare first.",
        )
    return results


def _check_finished(folder: Path) -> None:
    """Say of a comparison that was stopped how far it is."""
    state = standing_of(folder / "cells")
    if state is None:
        return
    many = "no plan is" if state.total is None else f"{state.done} of {state.total} plans are"
    again = f"Run the same compare command again: {state.command}"
    if not state.command:
        again = "Run it again; in Python, give what compare_scores returns to layerbudget.write_comparison, with this folder."
    if state.total is not None and state.done == state.total:
        problem = f"All {state.total} plans of this comparison are measured, but its result is not in {folder}."
        raise NotFound(problem, "comparison.json holds it.", again)
    raise NotFound(f"This comparison is not finished: {many} measured.", "What was measured is kept.", again)


def _sort(results: FolderResults, path: Path, record: dict[str, Any]) -> None:
    if "estimator" in record and "gain" in record:
        results.scored[path.name] = Scores.load(path)
    elif "kind" in record and "blocks" in record and "budget" in record:
        results.plans[path.name] = Plan.load(path)
    elif _is_receipt(record):
        results.others[path.name] = record  # until all plans are known
    elif "trained_parameters" in record and "metrics" in record:
        results.tuned = record
    elif {"budgets", "held_out", "sentences", "seeds"} <= set(record):
        results.contest = results.contest or record
    elif results.result is None and (path.name == "result.json" or "rows" in record):
        results.result = record
    else:
        results.others[path.name] = record


def _is_receipt(record: Mapping[str, Any]) -> bool:
    return "plan_digest" in record and "modules" in record


def tables_of(record: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Lists of objects in a record, at any depth: what can be shown as a table."""
    for name, value in record.items():
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            yield name, value
        elif isinstance(value, dict):
            flat = [{"": k, **v} for k, v in value.items() if isinstance(v, dict)]
            if flat and len(flat) == len(value) and not any(isinstance(x, (dict, list)) for row in flat for x in row.values()):
                yield name, flat
            else:
                yield from ((f"{name}: {inner}", rows) for inner, rows in tables_of(value))


# ---- in words


def headline_of(results: FolderResults) -> tuple[str, str]:
    """A title, and what is to be known in one sentence."""
    result = results.result or {}
    said = str(result.get("verdict") or result.get("sentence") or "")
    if results.tuned is not None:
        return _tuned_headline(results.tuned, results.plan)
    if results.contest is not None:
        return _contest_headline(results.contest)
    if results.plan is not None:
        return _titled(results.plan), said or _plan_verdict(results.plan, results.receipt)
    if results.scores is not None:
        of = str(results.scores.model.get("id") or "the model").rpartition("/")[2]
        said = said or str(results.scores.extra.get("verdict") or f"{len(results.scores.blocks)} blocks scored.")
        return f"What the layers of {of} can still gain", said[:1].upper() + said[1:]
    return f"Results of {results.folder}", said


def _tuned_headline(tuned: Mapping[str, Any], plan: Plan | None) -> tuple[str, str]:
    metrics = next(iter(tuned["metrics"].values()))
    metric, seeds = metrics[tuned["metric"]], len(tuned["seeds"])
    error, over = plus_minus(metric["stderr"] or 0.0, ".2g"), f"{seeds} seeds" if seeds > 1 else "one seed"
    said = [f"Held-out {tuned['metric']} {metric['value']:.4f}{error} over {over}{named(metric['stderr'])}."]
    if metrics.get("loss_before") is not None:
        said.append(f"Before: {metrics['loss_before']['value']:.4f}.")
    against = [split["verdict"] for split in (tuned.get("against") or {}).values() if split.get("verdict")][:1]
    advised = plan is not None and not against and decision_of(plan).describe(plan).advises_other
    said += [f"The plan: {verdict(plan).removeprefix('Verdict: ')}"] if plan is not None and advised else against
    return f"{tuned['task'].rpartition('/')[2]}: {tuned['kind']}, rule {tuned['rule']}", " ".join(said)


def _contest_headline(record: Mapping[str, Any]) -> tuple[str, str]:
    kind, seeds = record["kind"], len(record["seeds"])
    if not record["budgets"]:
        return f"A comparison of {kind}, not finished", " ".join(record["sentences"])
    title = f"{sum(len(b['rows']) for b in record['budgets'])} plans of {kind} compared: {_first(record['budgets'][-1])}"
    title += f" at {record['budgets'][-1]['budget']:g}" * (len(record["budgets"]) > 1)
    said = [s for s in record["sentences"] if s.startswith(("At ", "First is "))]
    return title, f"{seeds} {'seed' if seeds == 1 else 'seeds'}, {record['held_out']} held-out items. {' '.join(said)}"


def _first(budget: Mapping[str, Any]) -> str:
    """Who leads at a budget, in the words of the verdict: the first row alone is no winner."""
    rows = budget["rows"]
    if rows[0]["control"] == "permuted":
        return "a shuffled score is first"
    tests = {r["name"]: r["versus_uniform"] for r in rows if not r["control"] and r["versus_uniform"] is not None}
    ahead = [name for name, test in tests.items() if outcome(test["difference"], p=test["holm"]) == "lower"]
    return f"{ahead[0]} is better than uniform" if ahead else "none is better than uniform"


def _titled(plan: Plan) -> str:
    of = str(plan.model.get("id") or "the model").rpartition("/")[2]
    return f"{decision_of(plan).describe(plan).title} {of}"


def others_of(results: FolderResults) -> list[str]:
    """The plans beside the folder's own, each with its file and its verdict."""
    others = {name: plan for name, plan in results.plans.items() if plan is not results.plan}
    return [f"{name}: {_titled(plan)}. {verdict(plan)}" for name, plan in others.items()]


def _plan_verdict(plan: Plan, receipt: Mapping[str, Any] | None) -> str:
    if receipt is not None and "bits" in receipt:
        bits = f"{receipt['bits']:.4f} bits per weight in {receipt['family']}"
        recount = f"Recounted: {receipt['bytes']:,} bytes of the planned matrices, {bits}, by {receipt['method']}. "
    elif receipt is not None:
        recount = f"Recounted: {receipt['sparsity']:.4%} zeros, {receipt['planned']:.4%} planned, by {receipt['method']}. "
    else:
        recount = ""
    return recount + verdict(plan)


def cards_of(results: FolderResults) -> list[tuple[str, str]]:
    """Short facts beside the headline."""
    cards: list[tuple[str, str]] = []
    if (plan := results.plan) is not None:
        values = plan.counts if decision_of(plan).whole else plan.values
        cards += [("blocks", f"{len(plan.blocks)}"), (DECISIONS.find(plan.kind).decides, _range(values))]
        cards.append(("rule", plan.rule))
        cards += [("forward equivalents of planning", f"{passes:.0f}")] if (passes := passes_of(plan)) else []
        rounding = getattr(plan.payload, "rounding", None) or {}
        status = plan.certificate.get("status") or ("optimal" if rounding.get("exact") else None)
        cards += [("certificate", str(status))] if status else []
    if (scores := results.scores if results.plan is None else results.decisive) is not None:
        cards.append(("scores", scores.estimator))
    if results.receipt is not None and "bits" in results.receipt:
        cards.append(("recounted bits per weight", f"{results.receipt['bits']:.4f}"))
    elif results.receipt is not None:
        cards.append(("recounted zeros", f"{results.receipt['sparsity']:.3%}"))
    if results.tuned is not None:
        cards.append(("trained parameters", f"{results.tuned['trained_parameters']:,}"))
    if results.result is not None and results.result.get("seconds"):
        cards.append(("run time", f"{results.result['seconds']:.0f} s"))
    return cards


def _range(values: Any) -> str:
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return low if low == high else f"{low} – {high}"


def explained(plan: Plan) -> list[str]:
    """A plan in sentences; for kinds that cannot be explained, their budget."""
    from .explain import explain_plan

    try:
        return list(explain_plan(plan).sentences)
    except (LayerbudgetError, KeyError):
        spent, limit, unit = (plan.budget.get(k) for k in ("spent", "limit", "unit"))
        return [f"The rule {plan.rule} spends {spent} of {limit} {unit}."]


def commands_of(results: FolderResults) -> list[str]:
    """The commands that made the results, as the records hold them; a note for what Python made, which has none."""
    demo = results.result if "saved" in (results.result or {}) else None
    records: dict[str, Any] = {"demo": demo} if demo else {"scores": results.scores, "plan": results.plan}
    for name, plan in results.plans.items():
        plan_scores = {f"scores of {name}": s for s in results.scored.values() if s.digest == plan.scores_digest}
        records |= {} if plan is results.plan else {**plan_scores, f"plan {name}": plan}
    records |= {"receipt": results.receipt, "fine-tuning": results.tuned, "comparison": results.contest}
    lines = [f"# {results.left_out}"] if results.left_out and not demo else []
    for what, record in records.items():
        if record is not None:
            made = record.made_by if isinstance(record, (Plan, Scores)) else record.get("made_by")
            lines.append(made or f"# The {what}: made from Python, or by an older release. No command is recorded.")
    return list(dict.fromkeys(lines))  # one command may make scores and a plan
