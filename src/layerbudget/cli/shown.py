"""A plan as a command shows it: a picture of the network, or a table; a decision may show it in a way of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..decision import decision_of
from ..plan import Plan
from .session import Session

BLOCKS = 2000  # of a plan that is drawn layer by layer


def show_plan(session: Session, plan: Plan, price: Any = None) -> None:
    """Show the decision as a picture of the network, as a table where that would be too wide, or by ``--table``."""
    from ..reporting.tables import plan_grid

    kind, table = decision_of(plan), session.request.table
    if kind.show(session, plan):
        return
    title = f"{plan.kind}, rule {plan.rule}{f', {kind.shown_in}' if kind.shown_in else ''}"
    title += "" if price is None else f": {plan.counts @ price:,.0f} {kind.priced}"
    labels = kind.labels(plan)
    grid = plan_grid(plan, title, price=price, said=labels) if len(plan.blocks) <= BLOCKS and not table else None
    if grid is not None:
        session.console.print(grid)
        return
    if price is not None:
        head = ("block", kind.decides, kind.priced)
        _show_rows(session, title, head, [(b.name, b.count, int(b.count * p)) for b, p in zip(plan.blocks, price, strict=True)])
        return
    named = ("bits", "bytes", "numbers") if labels else (kind.decides, kind.counts, "parameters")
    column = ("format", labels) if labels else kind.column(plan)
    head = ("block", *named, *(() if column is None else column[:1]))
    more = [()] * len(plan.blocks) if column is None else [(cell,) for cell in column[1]]
    rows = [(b.name, b.value, b.count, b.numel, *cells) for b, cells in zip(plan.blocks, more, strict=True)]
    _show_rows(session, f"{plan.kind}, rule {plan.rule}", head, rows)


def _show_rows(session: Session, title: str, head: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Show a row for every block, or without ``--table`` one row where all blocks get the same."""
    if len({row[1:] for row in rows}) == 1 and len(rows) > 1 and not session.request.table:
        rows = [(f"each of {len(rows)}", *rows[0][1:])]
    session.show(title, head, rows)
