"""Tables of records, as the terminal and the page show them, and the place of every matrix in the network."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ..decision import DECISIONS, decision_of
from ..plan import Plan, PlanBlock
from ..records import Block, natural_key
from ..scores import Scores

MOST_COLUMNS = 12
LAYERS = 40  # of a grid that is shown whole
_WORDS = ("block", "status", "model", "plan")  # columns that begin at the left
_READ = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")  # matrices in the order in which a layer runs them


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
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A title, a header and rows of values; rich prints it, :meth:`html` is for a page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __rich__(self) -> Table:
        """The table for a terminal: names of blocks stay whole."""
        table = Table(title=self.title)
        for name in self.header:
            table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=name in ("block", "plan"))
        for row in self.rows:
            table.add_row(*map(cell, row))
        return table

    def html(self) -> str:
        """The table for a page, without its title; it scrolls sideways where the page is narrow."""
        head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in self.header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell(v))}</td>" for v in row) + "</tr>" for row in self.rows)
        return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(record: Mapping[str, Any]) -> Sheet:
    """Names and values of a record."""
    return Sheet("", ("field", "value"), list(record.items()))


def sheet_of(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """A list of objects, one column per name that any of them has."""
    names = list(dict.fromkeys(k for row in rows for k in row))
    return Sheet("", names, [[row.get(n) for n in names] for row in rows])


def scores_table(scores: Scores) -> Sheet:
    """One row per block: score, standard error, noise floor, status."""
    i = scores.index(None)
    read = f"{scores.data['samples']} x {scores.data['length']} tokens of {scores.data.get('source')}" if scores.data else ""
    title = ", ".join(filter(None, (scores.estimator, read, scores.unit)))
    if scores.damping_unit != "none":
        title += f", damping {scores.damping[i]:g} ({scores.damping_unit})"
    columns = (scores.gain[i], scores.standard_error[i], scores.noise_floor[i], scores.status[i])
    rows = [(b.name, b.numel, *values) for b, *values in zip(scores.blocks, *columns, strict=True)]
    return Sheet(title, ("block", "parameters", "score", "standard error", "noise floor", "status"), rows)


def scores_grid(scores: Scores) -> Table | None:
    """Scores of single matrices as :func:`grid_table`; None where every layer is one block."""
    sheet = scores_table(scores)
    return grid_table(scores.blocks, [cell(None) if row[2] is None else f"{row[2]:.3g}" for row in sheet.rows], sheet.title)


def plan_table(plan: Plan) -> Sheet:
    """One row per block: what it gets."""
    budget = plan.budget
    title = f"{plan.kind}, rule {plan.rule}: {budget.get('spent')} of {budget.get('limit')} {budget.get('unit')}"
    if rows := decision_of(plan).matrices(plan):
        head = ("block", "format", "bits", "bytes", "damage", "smaller", "its damage", "larger", "its damage")
        known = len(head) if "damage" in rows[0] else 4
        return Sheet(title, head[:known], [_reason(row)[:known] for row in rows])
    what = DECISIONS.find(plan.kind)
    return Sheet(
        title, ("block", "parameters", what.decides, what.counts), [(b.name, b.numel, b.value, b.count) for b in plan.blocks]
    )


def _reason(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A format, its damage, and the damage of the next smaller and larger one."""
    neighbours = [(row.get(side) or {}).get(name) for side in ("smaller", "larger") for name in ("format", "damage")]
    return (row["name"], row["format"], row["bits"], row["bytes"], row.get("damage"), *neighbours)


def demo_table(result: Mapping[str, Any]) -> Sheet:
    """Dense, uniform, permuted and planned models: recounted zeros, perplexity, and its change against uniform."""
    rows: list[Sequence[Any]] = []
    for row in result["rows"]:
        comparison: Sequence[Any] = (None, None)
        if (mean := row["log_difference"]) is not None:
            comparison = f"{math.expm1(mean):+.1%}", f"{2 * math.exp(mean) * row['log_difference_error']:.1%}"
        rows.append((row["model"], f"{row['sparsity']:.0%}", f"{row['perplexity']:.2f}", *comparison))
    title = "perplexity after Wanda pruning, on modules of the standard library that decided nothing"
    return Sheet(title, ("plan", "zeros", "perplexity", "against uniform", "two standard errors"), rows)


def contest_sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """A table for every budget of a comparison, best first: uniform, controls and all plans."""
    head = ("plan", record["unit"], "against uniform", "95 % interval", "Holm p", "places", "first")
    seeds, items = len(record["seeds"]), record["held_out"]
    end = f"{seeds} seed{'s' * (seeds > 1)}, {items:,} held-out items, best first"
    return [
        Sheet(f"{record['kind']} {b['budget']:g}, {end}", head, [_contest_row(r) for r in b["rows"]]) for b in record["budgets"]
    ]


def _contest_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    mean, places = f"{row['mean']:.4f}", f"{row['rank_low']:.0f}-{row['rank_high']:.0f}"
    test_cells = ("–", "–", "–")
    if (test := row["versus_uniform"]) is not None:
        p = test.get("holm")
        chance = "–" if p is None else f"{p:.3f}" if p >= 0.0005 else "<.001"
        bounded = test["low"] is not None and test["low"] > -math.inf
        interval = f"[{test['low']:+.4f}, {test['high']:+.4f}]" if bounded else "–"
        test_cells = (f"{test['difference']:+.4f}", interval, chance)
    return (row["name"], mean, *test_cells, places, f"{row['first']:.0%}")


def plan_grid(
    plan: Plan, title: str = "", *, said: Sequence[str] | None = None, price: Sequence[float] | None = None
) -> Table | None:
    """The decision of a plan as :func:`grid_table`; ``said`` is written for every block in the place of its value.

    With the ``price`` of one rank of every block, in parameters, each row ends with those of its adapters.
    """
    words = [decision_of(plan).word(block) for block in plan.blocks] if said is None else list(said)
    each = None if price is None else [b.count * p for b, p in zip(plan.blocks, price, strict=True)]
    return grid_table(plan.blocks, words, title, parameters=each)


def grid_table(
    blocks: Sequence[Block | PlanBlock],
    words: Sequence[str],
    title: str = "",
    *,
    parameters: Sequence[float] | None = None,
) -> Table | None:
    """One word for every block as a picture: layers downwards, matrices across; None where one column would say it all.

    More than ``LAYERS`` layers lose their middle. What stands in no layer is said in the title.
    """
    outside = {k: b.name.rpartition(".")[2] for k, b in enumerate(blocks) if not _PLACE.match(b.name)}
    title = "; ".join([title, *(f"{name} {words[k]}" for k, name in outside.items())])
    inside = [k for k in range(len(blocks)) if k not in outside]
    blocks, words = [blocks[k] for k in inside], [words[k] for k in inside]
    parameters = None if parameters is None else [parameters[k] for k in inside]
    grid = grid_of(blocks)
    if grid.whole or len(grid.columns) > MOST_COLUMNS:
        return None
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("layer", justify="right", no_wrap=True)
    for name in grid.columns:
        table.add_column(name.removesuffix("_proj"), justify="right", no_wrap=True)
    if parameters is not None:
        table.add_column("adapter parameters", justify="right", no_wrap=True)
    near, far = (len(grid.rows), 0) if len(grid.rows) <= LAYERS else (LAYERS // 2, len(grid.rows) - LAYERS // 2)
    for row, label in enumerate(grid.rows):
        if near <= row < far:
            if row == near:
                table.add_row(f"... {far - near} more")
            continue
        block_numbers = [grid.cells.get((row, column)) for column in range(len(grid.columns))]
        cells = ["" if k is None else words[k] for k in block_numbers]
        if parameters is not None:
            cells.append(f"{sum(parameters[k] for k in set(block_numbers) if k is not None):,.0f}")
        table.add_row(label, *cells)
    return table


_PLACE = re.compile(r"^(?P<stack>.*?)\.(?P<layer>\d+)(?:\.(?P<rest>.*))?$")


@dataclasses.dataclass(frozen=True)
class LayerGrid:
    """Where every matrix stands: labels of layers and of matrices in order, and ``(row, column) -> index of the block``."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], int]

    @property
    def whole(self) -> bool:
        """Whether every row is one block, so that one column says it all."""
        owners: dict[int, int] = {}
        return all(owners.setdefault(row, k) == k for (row, _), k in self.cells.items()) and len(owners) == len(self.rows)


def _turn(column: str) -> int:
    """Place of a matrix in the order of reading; those of other names follow as they come."""
    name = column.rpartition(".")[2].removesuffix("_proj")
    return _READ.index(name) if name in _READ else len(_READ)


def grid_of(blocks: Sequence[Block | PlanBlock]) -> LayerGrid:
    """Blocks of scores or of a plan by layer and matrix; what stands in no layer gets a row of its own."""
    places: list[tuple[str, str, int]] = []
    for k, block in enumerate(blocks):
        for module in block.modules or (block.name,):
            name = module if isinstance(module, str) else module.name
            match = _PLACE.match(name)
            row = f"{match['stack']}.{match['layer']}" if match else name
            places.append((row, (match["rest"] if match else None) or "all", k))
    rows = sorted({p[0] for p in places}, key=natural_key)
    columns = sorted(dict.fromkeys(p[1] for p in places), key=_turn)
    across, down = ({label: i for i, label in enumerate(labels)} for labels in (columns, rows))
    cells = {(down[r], across[c]): k for r, c, k in places}
    stacks = {r.rpartition(".")[0] for r in rows if _PLACE.match(r)}
    short = [r.rpartition(".")[2] if len(stacks) == 1 and _PLACE.match(r) else r for r in rows]
    return LayerGrid(tuple(short), tuple(c.rpartition(".")[2] for c in columns), cells)
