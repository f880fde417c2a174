"""What a folder of results holds, by kind: scores, plans, receipts, fine-tunings, comparisons and anything else with rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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
