"""One self-contained HTML page of a results folder: the decision as a picture, what it rests on, what came of it.

No request leaves the page: style, script and data are in the file, and its content policy forbids everything else. Without a
script it still holds every sentence and number.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..plan import Plan
from ..records import dumps, write_text
from ..scores import Scores
from .data import cards_of, charts_of, headline_of, versions_of
from .records import Found, commands_of, explained, gather, said_of, tables_of

RUNTIME_NOTE = (
    "What gets smaller, what gets faster: unstructured zeros are stored dense, so neither the file nor the forward pass "
    "changes; a plan of ranks or experts changes what is trained and served beside the base model; depth- and width-pruned "
    "checkpoints are ordinary dense models with fewer parameters and run faster everywhere."
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def build_page(folder: Path | str) -> str:
    """Return the HTML of every result in a folder: scores, plans, receipts, fine-tunings, demos, comparisons, figures.

    Raises:
        NotFound: The folder does not exist or holds none.
        CorruptFile: One of them does not parse.
    """
    found = gather(folder)
    title, verdict = headline_of(found)
    data = charts_of(found)
    cards = "".join(
        f"<div class='card'><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in cards_of(found)
    )
    parts = [f"<header><p class='kicker'>layerbudget · {html.escape(found.folder)}</p><h1>{html.escape(title)}</h1>"]
    parts.append(f"<p class='verdict'>{html.escape(verdict)}</p><div class='cards'>{cards}</div></header><main>")
    parts += _charts(data)
    said = said_of(found)
    if said:
        parts.append(sentences("In words", said, "words"))
        parts += [] if found.contest else [f"<section>{_figure(path)}</section>" for path in found.figures]
    if found.plan is not None:
        parts.append(sentences("The plan in words", explained(found.plan), "words"))
    if found.plan is not None or found.receipt is not None or not said:
        parts.append(_honest(found))
    parts.append(commands(_commands(found)))
    parts.append(_details(found))
    text = json.dumps(json.loads(dumps(data))).replace("</", "<\\/")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_asset('page.css')}</style></head><body>"
    )
    script = f'<script type="application/json" id="data">{text}</script><script>{_asset("page.js")}</script>'
    tail = f"</main>{script}</body></html>\n"
    return head + "".join(parts) + tail


def _charts(data: dict[str, Any]) -> list[str]:
    titles = {
        "network": (
            "The network",
            "Layers downwards, matrices across; the stronger the colour, the more. Point at a cell, or use the arrow keys.",
        ),
        "water": ("The water level", "What every block gets (filled), its cap (outline) and uniform (line)."),
        "results": ("What came of it", "Measured on held-out text; bars are one standard error."),
        "paired": ("Differences, paired", "On the same text or seeds, 95 % intervals. Across zero: cannot be told apart."),
        "curve": ("Over the budget", "What was measured at each budget; uniform is dashed. Lower is better."),
        "gains": ("What each block can still gain", "Bars with their standard errors; the mark is the noise floor."),
        "predicted": ("Predicted against measured", "On the line, the prediction was right."),
    }  # fmt: skip
    made = []
    for name, (title, note) in titles.items():
        if not data.get(name):
            continue
        made.append(chart(name, title, note, _controls(data) if name == "water" else ""))
    return made


def _controls(data: dict[str, Any]) -> str:
    grid = data.get("grid")
    if not grid:
        return ""
    exponent = ""
    if len(grid["exponents"]) > 1:
        start = grid["start"][0]
        exponent = (
            f"<label>exponent <input id='exponent' type='range' min='0' max='{len(grid['exponents']) - 1}' step='1' "
            f"value='{start}'><output for='exponent'></output></label>"
        )
    return (
        f"<div class='controls'><label>{html.escape(grid['unit'])} <input id='budget' type='range' min='0' "
        f"max='{len(grid['budgets']) - 1}' step='1' value='{grid['start'][1]}'><output for='budget'></output></label>"
        f"{exponent}<button id='own' type='button' hidden>the plan itself</button>"
        "<p id='said' aria-live='polite'></p></div>"
    )


def _honest(found: Found) -> str:
    plan = found.plan
    text = RUNTIME_NOTE
    if found.receipt is not None:
        kind = "shapes" if plan is not None and plan.kind == "shapes" else "unstructured"
        text = f"{runtime_box(kind, pattern=(found.receipt.get('settings') or {}).get('pattern'))} {RUNTIME_NOTE}"
    return f"<aside class='honest'><h2>What runs faster, and where</h2><p>{html.escape(text)}</p></aside>"


def _commands(found: Found) -> list[str]:
    lines = commands_of(found)
    made = versions_of(found)
    return lines + ([f"# {', '.join(f'{k} {v}' for k, v in made.items())}"] if made else [])


def _details(found: Found) -> str:
    parts = [scores_details(found.scores)] if found.scores is not None else []
    parts += [plan_details(plan, name) for name, plan in found.plans.items()]
    records = {"result.json": found.result, "receipt.json": found.receipt, "fine-tuning": found.tuned}
    records |= {"comparison.json": found.contest, **found.others}
    for name, record in records.items():
        if record is None:
            continue
        plain = {k: v for k, v in record.items() if not isinstance(v, (dict, list))}
        shown = "".join(f"<h3>{html.escape(n)}</h3>{rows_table(rows)}" for n, rows in tables_of(record))
        parts.append(folded(name, (facts(plain) if plain else "") + shown))
    for path in found.figures if found.contest or not said_of(found) else []:  # a comparison's are drawn above
        parts.append(folded(f"Figure {path.name}", _figure(path)))
    return f"<section id='details'><h2>All numbers</h2>{''.join(parts)}</section>"


def _figure(path: Path) -> str:
    text = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{text}"></figure>'


def write_report(folder: Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write :func:`build_page` atomically."""
    return write_text(out, build_page(folder), overwrite=overwrite)


def cell(value: Any) -> str:
    """A value as it is read in a table."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return html.escape(json.dumps(value) if isinstance(value, (list, dict)) else str(value))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that scrolls sideways where the page is narrow."""
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(v)}</td>" for v in row) + "</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(record: Mapping[str, Any]) -> str:
    """Names and values of a record."""
    return table(("field", "value"), list(record.items()))


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A list of objects, one column per name that any of them has."""
    names = list(dict.fromkeys(k for row in rows for k in row))
    return table(names, [[row.get(n) for n in names] for row in rows])


def folded(title: str, body: str) -> str:
    """Details that open on request."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def chart(name: str, title: str, note: str = "", controls: str = "") -> str:
    """A figure that the script draws."""
    said = f"<p>{html.escape(note)}</p>" if note else ""
    return (
        f'<section id="{name}"><h2>{html.escape(title)}</h2>{said}{controls}'
        f'<figure data-chart="{name}" role="img" aria-label="{html.escape(title)}"></figure></section>'
    )


def sentences(title: str, lines: Iterable[str], name: str = "") -> str:
    """A heading and sentences."""
    body = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<section id="{name}"><h2>{html.escape(title)}</h2><ul>{body}</ul></section>' if body else ""


def commands(lines: Sequence[str]) -> str:
    """Commands to repeat it."""
    if not lines:
        return ""
    text = html.escape("\n".join(lines))
    return f'<section id="repeat"><h2>Repeat it</h2><pre tabindex="0"><code>{text}</code></pre></section>'


def scores_details(scores: Scores) -> str:
    """Every number of the scores, folded."""
    row = scores.index()
    rows = [
        (b.name, b.numel, scores.gain[row][k], scores.standard_error[row][k], scores.noise_floor[row][k], scores.status[row][k])
        for k, b in enumerate(scores.blocks)
    ]
    title = f"Scores by {scores.estimator}, damping {scores.damping[row]:g} ({scores.damping_unit}), {scores.unit}"
    body = table(("block", "parameters", "score", "standard error", "noise floor", "status"), rows)
    return folded(title, body + facts({**scores.model, **scores.data, "digest": scores.digest, **scores.versions}))


def plan_details(plan: Plan, name: str) -> str:
    """Every number of a plan, folded."""
    rows = [(b.name, b.numel, b.value, b.count) for b in plan.blocks]
    body = table(("block", "parameters", "value", "count"), rows)
    certificate = f"<h3>Certificate</h3>{facts(plan.certificate)}" if plan.certificate else ""
    return folded(f"{name}: {plan.kind} by {plan.rule}", facts(plan.budget) + certificate + body)


_ROWS = {
    "unstructured": (
        "unstructured zeros, stored densely",
        "file and memory: unchanged; time: unchanged in every common runtime",
    ),
    "n:m": (
        "n:m zeros, stored densely",
        "file and memory: unchanged; time: unchanged unless your runtime has kernels for exactly this pattern on your GPU "
        "(2:4 only; vLLM removed its 2:4 kernels)",
    ),
    "shapes": (
        "heads, MLP width or whole blocks removed",
        "file and memory: smaller by the removed parameters; time: less, by somewhat under the removed FLOPs' share, everywhere"
        "; key-value cache: smaller by the removed key-value groups and blocks only",
    ),
}


def runtime_box(kind: str = "unstructured", *, pattern: str | None = None) -> str:
    """One honest paragraph about a pruned checkpoint.

    Args:
        kind: ``unstructured`` or ``shapes``.
        pattern: The n:m pattern, when there is one.

    >>> runtime_box("shapes").split(". ")[0]
    'What you have: heads, MLP width or whole blocks removed'
    """
    what, effect = _ROWS["n:m" if pattern else kind]
    return f"What you have: {what}. What it changes: {effect}."
