"""The parts of the page as HTML; charts are empty figures that the script fills from the data."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..plan import Plan
from ..scores import Scores


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
