"""A plan as a command shows it: a picture of the network, a table, or the reasons for every format."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..kinds import KINDS
from ..plan import Plan
from .display import say, show_table
from .measured import show_shapes

BLOCKS = 2000  # of a plan that is drawn layer by layer


def show_plan(a: argparse.Namespace, plan: Plan, price: Any = None) -> None:
    """Show the decision as a picture of the network, as a table where that would be too wide, or by ``--table``."""
    from ..decisions.bits.reasons import reasons
    from ..report.tables import path_table, plan_grid

    if a.table and plan.extra.get("path") and plan.kind == "sparsity":
        a.console.print(path_table(plan))
    if plan.kind == "shapes":
        show_shapes(a, plan)
        return
    if a.table and plan.kind == "bits" and plan.extra.get("reasons"):
        show_reasons(a, plan, reasons(plan))
        return
    title = f"{plan.kind}, rule {plan.rule}{', in percent' if plan.kind == 'sparsity' else ''}"
    title += "" if price is None else f": {plan.counts @ price:,.0f} adapter parameters"
    formats = plan.extra["formats"] if plan.kind in ("bits", "cache") else {}
    said = [formats[b.modules[0]] for b in plan.blocks] if formats else None
    grid = plan_grid(plan, title, price=price, said=said) if len(plan.blocks) <= BLOCKS and not a.table else None
    if grid is not None:
        a.console.print(grid)
        return
    if price is not None:
        ranks = ("block", "rank", "adapter parameters")
        _show_rows(a, title, ranks, [(b.name, b.count, int(b.count * p)) for b, p in zip(plan.blocks, price, strict=True)])
        return
    more = dict(zip(plan.names, said, strict=True)) if said else plan.extra.get("capacity", {}).get("counts", {})
    what = KINDS.find(plan.kind)
    named = ("bits", "bytes", "numbers", "format") if said else (what.decides, what.counts, "parameters", "capacity")
    head = ("block", *named[: 4 if more else 3])
    rows = [(b.name, b.value, b.count, b.numel) + ((more[b.name],) if more else ()) for b in plan.blocks]
    _show_rows(a, f"{plan.kind}, rule {plan.rule}", head, rows)


def _show_rows(a: argparse.Namespace, title: str, head: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Show a row for every block, or without ``--table`` one row where all blocks get the same."""
    if len({row[1:] for row in rows}) == 1 and len(rows) > 1 and not a.table:
        rows = [(f"each of {len(rows)}", *rows[0][1:])]
    show_table(a, title, head, rows)


def show_reasons(a: argparse.Namespace, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show the format of every block, its damage, and what the next smaller and larger format would change."""
    if any("damage" not in row for row in rows):
        show_table(
            a, "formats", ("block", "format", "bits", "bytes"), [(r["name"], r["format"], r["bits"], r["bytes"]) for r in rows]
        )
        return
    price, total = plan.certificate.get("price") or 0.0, sum(row["damage"] for row in rows)
    cells = []
    for row in rows:
        error = f" +-{2 * row['error'] / row['damage']:.0%}" if row.get("error") and row["damage"] > 0 else ""
        share = f"{row['damage'] / total:.1%}" if total > 0 else "–"
        steps = (_step(row, name, price) for name in ("smaller", "larger"))
        cells.append(
            (
                _ALIKE.sub("", row["name"]),
                row["format"],
                f"{row['damage']:.2e}{error}",
                share,
                *steps,
            )
        )
    head = ("block", "format", "damage", "share", "smaller", "larger")
    show_table(a, "predicted damage (nats per token) of every block, and what another format would change", head, cells)
    if price > 0:
        say(
            a,
            f"Why: at this limit a KiB is worth {1024 * price:.2e} nats, the price. x says, in prices, what the smaller "
            "format loses for each KiB that it spares, and the larger one saves for each KiB that it takes. Above 1 left and "
            "below 1 right the format is the best one; the last bytes of the limit make a few exceptions.",
        )
    else:
        say(a, "smaller and larger: nats that the next format loses or saves for each KiB.")


_ALIKE = re.compile(r"^model\.(layers\.)?|(?<=\d\.)(self_attn|mlp)\.")  # what names in this table have in common


def _step(row: Mapping[str, Any], name: str, price: float) -> str:
    """The next format, and its change of damage for each KiB: in multiples of the price, where there is one."""
    other = row[name]
    if other is None:
        return "–"
    change = abs((other["damage"] - row["damage"]) / (other["bytes"] - row["bytes"]))
    return f"{other['format']} x{change / price:.2g}" if price > 0 else f"{other['format']} {1024 * change:.1e}"
