"""Comparisons and reproduced experiments on the page: headline, paired differences, and the measure over budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..plan import Plan
from ..scores import Scores
from .gather import Found

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
    """What a comparison found, or where the shape of the paper's result was met."""
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
    """What was measured at several budgets, one line per plan: ``{unit, budget, series: [{name, points}]}``."""
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
