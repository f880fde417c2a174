"""One self-contained HTML page of a results folder: what was scored, planned, applied and measured."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import NotFound
from ..keeping import reading
from ..plan import Plan
from ..records import write_text
from ..scores.record import Scores

STYLE = (
    "body{max-width:60rem;margin:2rem auto;padding:0 1rem;font:15px/1.5 system-ui,sans-serif;color:#1f2933}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}"
    "td,th{border-bottom:1px solid #dee2e6;padding:.2rem .7rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}.note{background:#fff4e6;padding:.7rem;border-radius:4px}"
)
RUNTIME_NOTE = (
    "What gets smaller, what gets faster: unstructured zeros are stored dense, so neither the file nor the forward pass "
    "changes; a plan of ranks or experts changes what is trained and served beside the base model; depth- and width-pruned "
    "checkpoints are ordinary dense models with fewer parameters and run faster everywhere."
)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    return html.escape(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join("<tr>" + "".join(f"<td>{_cell(v)}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _facts(record: Mapping[str, Any]) -> str:
    return _table(("field", "value"), [(k, json.dumps(v) if isinstance(v, (list, dict)) else v) for k, v in record.items()])


def scores_section(scores: Scores) -> str:
    """Heading, provenance and one row per block."""
    row = scores.index()
    rows = [
        (b.name, b.numel, scores.gain[row][k], scores.standard_error[row][k], scores.noise_floor[row][k], scores.status[row][k])
        for k, b in enumerate(scores.blocks)
    ]
    title = f"Scores: {scores.estimator}, damping {scores.damping[row]:g} ({scores.damping_unit}), {scores.unit}"
    verdict = f"<p>{html.escape(str(scores.extra['verdict']))}</p>" if scores.extra.get("verdict") else ""
    table = _table(("block", "parameters", "score", "standard error", "noise floor", "status"), rows)
    return f"<h2>{html.escape(title)}</h2>{verdict}{table}{_facts({**scores.model, **scores.data, 'digest': scores.digest})}"


def plan_section(plan: Plan) -> str:
    """Heading, budget, certificate and one row per block."""
    rows = [(b.name, b.numel, b.value, b.count) for b in plan.blocks]
    title = f"Plan: {plan.kind} by {plan.rule}"
    table = _table(("block", "parameters", "value", "count"), rows)
    return f"<h2>{html.escape(title)}</h2>{_facts(plan.budget)}<h3>Certificate</h3>{_facts(plan.certificate)}{table}"


def result_section(result: Mapping[str, Any]) -> str:
    """Verdict and the table of measured models."""
    rows = result.get("rows", [])
    if not rows:
        return f"<h2>Results</h2>{_facts(result)}"
    keys = [k for k in ("model", "target", "sparsity", "perplexity", "standard_error", "vs_uniform") if k in rows[0]]
    table = _table(keys, [[r.get(k) for k in keys] for r in rows])
    return f"<h2>Results</h2><p><b>{html.escape(result.get('verdict', ''))}</b></p>{table}"


def build_page(folder: Path | str) -> str:
    """Return the HTML of every scores, plan, result and PNG file in a folder.

    Raises:
        NotFound: The folder does not exist or holds none of them.
        CorruptFile: One of them does not parse.
    """
    folder = Path(folder)
    sections: list[str] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        record = reading.read(path, "result", remedy="Make it again, or move it away.")
        if not isinstance(record, dict):
            continue
        if "estimator" in record and "gain" in record:
            sections.append(scores_section(Scores.load(path)))
        elif "kind" in record and "blocks" in record:
            sections.append(plan_section(Plan.load(path)))
        else:
            sections.insert(0, result_section(record))
    for path in sorted(folder.glob("*.png")) if folder.is_dir() else []:
        data = base64.b64encode(path.read_bytes()).decode()
        sections.insert(0, f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></figure>')
    if not sections:
        raise NotFound(
            f"{folder} holds no results.", "It should hold scores.json, plan.json, result.json or figures.", "Run one."
        )
    note = f'<p class="note">{RUNTIME_NOTE}</p>'
    title = html.escape(f"layerbudget report: {folder.name}")
    head = f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>'
    return head + note + "".join(sections) + "\n"


def write_page(folder: Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write :func:`build_page` atomically."""
    return write_text(out, build_page(folder), overwrite=overwrite)
