"""One self-contained HTML page of a results folder: the decision as a picture, what it rests on, what came of it.

No request leaves the page: style, script and data are in the file, and its content policy forbids everything else. Without a
script it still holds every sentence and number.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from ..arguments import checked
from ..canonical import dumps
from ..decision import decision_of
from ..plan import Plan
from ..scores import Scores
from ..storage.writing import write_text
from .data import charts_of
from .records import FolderResults, cards_of, commands_of, explained, gather, headline_of, others_of, tables_of
from .tables import contest_sheets, facts, plan_table, scores_table, sheet_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_CHARTS = (
    (
        "network",
        "The network",
        "Layers downwards, matrices across; the stronger the colour, the more. Point at a cell, or use the arrow keys.",
    ),
    (
        "memory",
        "The memory",
        "What the best plan of every memory gives to weights, cache and the rest, and the damage that is predicted for it. "
        "The plan of this folder is marked.",
    ),
    ("water", "The water level", "What every block gets (filled), its cap (outline) and uniform (line)."),
    (
        "forecast",
        "Predicted and measured",
        "What the plan expected (ring), and what was measured afterwards (dot).",
    ),
    ("results", "What came of it", "Measured on held-out text; bars are two standard errors."),
    ("paired", "Differences, paired", "On the same text or seeds, 95 % intervals. Across zero: level."),
    ("gains", "What each block can still gain", "Bars with two standard errors; the mark is the noise floor."),
)
_COARSEST = ("gains", "What the smallest format costs each block", "Bars with two standard errors.")


@checked
def write_report(folder: Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write :func:`build_page` atomically."""
    return write_text(out, build_page(folder), overwrite=overwrite)


def build_page(folder: Path | str) -> str:
    """Return the HTML of every result in a folder: scores, plans, receipts, fine-tunings, demos, comparisons, figures."""
    results = gather(folder)
    title, verdict = (html.escape(text) for text in headline_of(results))
    data = charts_of(results)
    cards = "".join(
        f"<div class='card'><b>{html.escape(v)}</b><span>{html.escape(n)}</span></div>" for n, v in cards_of(results)
    )
    charts = _CHARTS if results.scores is None or "formats" not in results.scores.extra else (*_CHARTS[:-1], _COARSEST)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>',
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<header><p class='kicker'>layerbudget · {html.escape(results.folder)}</p><h1>{title}</h1>",
        f"<p class='verdict'>{verdict}</p><div class='cards'>{cards}</div></header><main>",
        *(_chart(*chart, _slider(data.get("grid")) if chart[0] == "water" else "") for chart in charts if data.get(chart[0])),
    ]
    if results.contest is not None:
        parts += [
            f"<section><h2>{html.escape(sheet.title)}</h2>{sheet.html()}</section>" for sheet in contest_sheets(results.contest)
        ]
        parts.append(_sentences("In words", results.contest["sentences"]))
    if results.plan is not None:
        parts.append(_sentences("The plan in words", [*explained(results.plan), *filter(None, [results.left_out])]))
        pattern = ((results.receipt or {}).get("settings") or {}).get("pattern")
        if runs := decision_of(results.plan).runs(pattern):
            parts.append(f"<aside class='honest'><h2>What runs faster, and where</h2><p>{html.escape(runs)}</p></aside>")
    if others := others_of(results):
        parts.append(_sentences("Other plans of this folder", others))
    if lines := commands_of(results):
        text = html.escape("\n".join(lines))
        parts.append(f'<section id="repeat"><h2>Repeat it</h2><pre tabindex="0"><code>{text}</code></pre></section>')
    numbers = json.dumps(json.loads(dumps(data))).replace("</", "<\\/")
    parts += [
        f"<section id='details'><h2>All numbers</h2>{_details(results)}</section></main>",
        f'<script type="application/json" id="data">{numbers}</script><script>{_asset("page.js")}</script></body></html>\n',
    ]
    return "".join(parts)


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _slider(grid: dict[str, Any] | None) -> str:
    if not grid:
        return ""
    return (
        f"<div class='controls'><label>{html.escape(grid['unit'])} <input id='budget' type='range' min='0' "
        f"max='{len(grid['budgets']) - 1}' step='1' value='{grid['start']}'><output for='budget'></output></label>"
        "<button id='own' type='button' hidden>the plan itself</button><p id='said' aria-live='polite'></p></div>"
    )


def _chart(name: str, title: str, note: str, controls: str) -> str:
    """A figure that the script draws."""
    return (
        f'<section id="{name}"><h2>{title}</h2><p>{note}</p>{controls}'
        f'<figure data-chart="{name}" role="img" aria-label="{title}"></figure></section>'
    )


def _sentences(title: str, lines: Iterable[str]) -> str:
    body = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<section><h2>{title}</h2><ul>{body}</ul></section>"


def _details(results: FolderResults) -> str:
    """Every number of every record, folded, and the figures."""
    parts = [_scores_details(scores, name) for name, scores in results.scored.items()]
    parts += [plan_details(plan, name) for name, plan in results.plans.items()]
    records = {"result.json": results.result, "receipt.json": results.receipt, "fine-tuning": results.tuned}
    for name, record in (records | {"comparison.json": results.contest, **results.others}).items():
        if record is not None:
            plain = {k: v for k, v in record.items() if not isinstance(v, (dict, list))}
            lists = {k: v for k, v in record.items() if record is not results.contest or k != "budgets"}  # its tables are above
            shown = "".join(f"<h3>{html.escape(n)}</h3>{sheet_of(rows).html()}" for n, rows in tables_of(lists))
            parts.append(_folded(name, (facts(plain).html() if plain else "") + shown))
    for path in results.figures:
        data = base64.b64encode(path.read_bytes()).decode()
        image = f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'
        parts.append(_folded(f"Figure {path.name}", image))
    return "".join(parts)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _scores_details(scores: Scores, name: str) -> str:
    made = {**scores.model, **scores.data, "digest": scores.digest, **scores.versions}
    table = scores_table(scores)
    return _folded(f"{name}: scores by {table.title}", table.html() + facts(made).html())


def plan_details(plan: Plan, name: str) -> str:
    """Every number of a plan, folded."""
    certificate = f"<h3>Certificate</h3>{facts(plan.certificate).html()}" if plan.certificate else ""
    curve = [{k: v for k, v in row.items() if k != "values"} for row in getattr(plan.payload, "curve", None) or ()]
    more = f"<h3>Best plans of other budgets</h3>{sheet_of(curve).html()}" if curve else ""
    body = facts(plan.budget).html() + certificate + more + plan_table(plan).html()
    return _folded(f"{name}: {plan.kind}, rule {plan.rule}", body)
