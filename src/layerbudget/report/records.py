"""Results of a folder, by kind: scores, plans, receipts, fine-tunings, comparisons and anything else with rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LayerbudgetError, NotFound
from ..plan import Plan
from ..scores import Scores
from ..storage import reading

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
class Found:
    """The results of a folder.

    Attributes:
        folder: Its name.
        scores: The first scores file.
        plan: The first plan.
        plans: All plans by file.
        receipt: Of ``prune``.
        result: ``result.json`` of a demo, or what else was measured.
        tuned: ``result.json`` of a fine-tuning.
        contest: ``comparison.json`` of scores and rules.
        others: Further records by file.
        seeds: Records of single seeds.
        figures: PNG files.
    """

    folder: str
    scores: Scores | None = None
    plan: Plan | None = None
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    receipt: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    tuned: dict[str, Any] | None = None
    contest: dict[str, Any] | None = None
    others: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    seeds: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    figures: list[Path] = dataclasses.field(default_factory=list)


def gather(folder: Path | str) -> Found:
    """Read every result of a folder.

    Raises:
        NotFound: The folder does not exist or holds none.
        CorruptFile: One of them does not parse.
    """
    folder = Path(folder)
    found = Found(folder=folder.resolve().name)
    for path, record in _records(folder):
        _sort(found, path, record)
    if found.tuned is not None:
        found.tuned.setdefault("against", found.others.pop("against.json", None))
        found.seeds = [r for _, r in _records(folder, "seed-*/result.json")]
    found.figures = sorted(folder.glob("*.png")) if folder.is_dir() else []
    if found == Found(folder=found.folder):
        raise NotFound(
            f"{folder} holds no results.", "It should hold scores.json, plan.json, receipt.json, result.json or figures.",
            "Run demo, score, plan, prune, finetune or compare first.",
        )  # fmt: skip
    return found


def _records(folder: Path, pattern: str = "*.json") -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob(pattern)) if folder.is_dir() else []:
        if path.name.startswith(_PASSED) or path.name.endswith(".index.json"):
            continue
        record = reading.read(path, "result", remedy="Make it again, or move it away.")
        if isinstance(record, dict):
            yield path, record


def _sort(found: Found, path: Path, record: dict[str, Any]) -> None:
    if "estimator" in record and "gain" in record:
        found.scores = found.scores or Scores.load(path)
    elif "kind" in record and "blocks" in record and "budget" in record:
        found.plans[path.name] = Plan.load(path)
        found.plan = found.plan or found.plans[path.name]
    elif "plan_digest" in record and "modules" in record:
        found.receipt = record
    elif "trained_parameters" in record and "metrics" in record:
        found.tuned = record
    elif {"budgets", "held_out", "sentences", "seeds"} <= set(record):
        found.contest = found.contest or record
    elif path.name == "result.json" or "rows" in record:
        found.result = found.result or record
        if found.result is not record:
            found.others[path.name] = record
    else:
        found.others[path.name] = record


def tables_of(record: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Lists of objects in a record, at any depth: what can be shown as a table."""
    for name, value in record.items():
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            yield name, value
        elif isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            flat = [{"": k, **v} for k, v in value.items()]
            if all(not isinstance(x, (dict, list)) for row in flat for x in row.values()):
                yield name, flat
            else:
                yield from ((f"{name}: {inner}", rows) for inner, rows in tables_of(value))
        elif isinstance(value, dict):
            yield from ((f"{name}: {inner}", rows) for inner, rows in tables_of(value))


def explained(plan: Plan) -> list[str]:
    """A plan in sentences; for kinds that cannot be explained, their budget."""
    from ..plans.explain import explain_plan

    try:
        return list(explain_plan(plan).sentences)
    except (LayerbudgetError, KeyError):
        return [
            f"The rule {plan.rule} spends {plan.budget.get('spent')} of {plan.budget.get('limit')} {plan.budget.get('unit')}."
        ]


Record = Mapping[str, Any]
_MOST = 40


def contest_headline(record: Record) -> tuple[str, str]:
    """Title and sentence of a comparison of scores and rules."""
    kind, seeds = record["kind"], len(record["seeds"])
    if not record["budgets"]:
        return f"A comparison of {kind}, not finished", " ".join(record["sentences"])
    first = record["budgets"][-1]["rows"][0]["name"]
    title = f"{sum(len(b['rows']) for b in record['budgets'])} plans of {kind} compared: {first} is first"
    said = [s for s in record["sentences"] if s.startswith(("At ", "First is "))]
    return title, f"{seeds} {'seed' if seeds == 1 else 'seeds'}, {record['held_out']} held-out items. {' '.join(said)}"


def experiment_headline(record: Record) -> tuple[str, str]:
    """Title and sentence of an experiment of the paper."""
    items = " and ".join(str(i).replace("-", " ").capitalize() for i in record.get("items", ()))
    finding = str(record.get("finding", ""))
    return f"{items or record['experiment']} of the paper, reproduced", finding[:1].upper() + finding[1:] + "."


def said_of(found: Found) -> list[str]:
    """Sentences of a comparison, or where the shape of the paper's result was met."""
    if found.contest is not None:
        return list(found.contest["sentences"])
    words = {True: "Met", False: "Not met", None: "Open"}
    claims = (found.result or {}).get("claims") or []
    return [f"{words[c['met']]}: {c['claim']} ({c['detail']})." for c in claims if isinstance(c, dict) and "met" in c]


def commands_of(found: Found) -> list[str]:
    """The commands that made the results, as the records hold them; a note for what Python made, which has none."""
    result = found.result or {}
    demo = "saved" in result
    records: list[tuple[str, Any]] = [] if demo else [("scores", found.scores), ("plan", found.plan)]
    records += [("receipt", found.receipt), ("fine-tuning", found.tuned), ("comparison", found.contest)]
    records += [("demo", result)] if demo else []
    lines = []
    for what, record in records:
        if record is not None:
            made = record.made_by if isinstance(record, (Plan, Scores)) else record.get("made_by")
            lines.append(made or f"# The {what}: made from Python, or by an older release. No command is recorded.")
    if "experiment" in result:
        held = result.get("setting") or {}
        named = "".join(f" --{k.replace('_', '-')} {held[k]}" for k in ("scale", "model", "paper") if k in held)
        lines.append(f"python -m paper run {result['experiment']}{named} -o {found.folder}")
    return lines


def contest_paired(record: Record) -> dict[str, Any] | None:
    """Differences to uniform with their intervals, contenders before their controls."""
    many = len(record["budgets"]) > 1
    items = [
        {"label": f"{r['name']} at {b['budget']:g}" if many else r["name"], "value": u["difference"], "low": u["low"],
         "high": u["high"], "sentence": ""}
        for b in record["budgets"] for r in b["rows"] if (u := r["versus_uniform"]) and not r["control"]
    ]  # fmt: skip
    return {"unit": f"{record['unit']}, against uniform", "items": items[:_MOST]} if items else None


def curve_of(found: Found) -> dict[str, Any] | None:
    """Measurements at several budgets, one line per plan: ``{unit, budget, series: [{name, points}]}``."""
    rows: list[tuple[str, float, float]] = []
    unit, budget = "perplexity", "target"
    if found.contest is not None:
        unit, budget = found.contest["unit"], found.contest["kind"]
        rows = [
            (r["name"], b["budget"], r["mean"])
            for b in found.contest["budgets"]
            for r in b["rows"]
            if r["control"] != "permuted"
        ]
    elif found.result is not None:
        rows = [
            (r["model"], r["target"], r["perplexity"])
            for r in found.result.get("rows") or [] if _point(r)
        ]  # fmt: skip
    series: dict[str, list[list[float]]] = {}
    for name, x, y in rows:
        series.setdefault(name, []).append([x, y])
    lines = [{"name": n, "points": sorted(p)} for n, p in series.items() if len({x for x, _ in p}) > 1]
    return {"unit": unit, "budget": budget, "series": _best(lines)} if lines else None


def _point(row: Record) -> bool:
    return all(isinstance(row.get(k), (int, float)) for k in ("target", "perplexity")) and "model" in row


def _best(lines: Sequence[dict[str, Any]], most: int = 8) -> list[dict[str, Any]]:
    """The lowest lines, and uniform wherever it is."""
    ordered = sorted(lines, key=lambda line: line["points"][-1][1])
    kept = ordered[:most]
    return kept + [line for line in ordered[most:] if line["name"] == "uniform"]
