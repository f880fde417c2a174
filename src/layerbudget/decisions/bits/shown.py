"""Tables of the bytes that a plan of bits counts, and of the reasons for every format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...plan import Plan, payload_of
from ...session import Session
from .payload import BitsPayload
from .terms import terms_of

_ALIKE = re.compile(r"^model\.(layers\.)?|(?<=\d\.)(self_attn|mlp)\.")  # what names in this table have in common


def show_terms(session: Session, plan: Plan) -> None:
    """Show what the bytes of the planned file are of."""
    terms = terms_of(plan)
    known = payload_of(plan, BitsPayload).head_bytes
    rows = [(name, f"{size:,}") for name, size in terms.items()]
    total = "all of it" if known else "all tensors; what is no tensor is not counted"
    session.show("bytes of the planned file", ("what", "bytes"), [*rows, (total, f"{sum(terms.values()):,}")])


def show_reasons(session: Session, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show the format of every block, its damage, and what the next smaller and larger format would change."""
    price, total = plan.certificate.get("price") or 0.0, sum(row["damage"] for row in rows)
    cells = []
    for row in rows:
        error = f" +-{2 * row['error'] / row['damage']:.0%}" if row.get("error") and row["damage"] > 0 else ""
        share = f"{row['damage'] / total:.1%}" if total > 0 else "–"
        steps = (_step(row, name, price) for name in ("smaller", "larger"))
        cells.append((_ALIKE.sub("", row["name"]), row["format"], f"{row['damage']:.2e}{error}", share, *steps))
    head = ("block", "format", "damage", "share", "smaller", "larger")
    session.show("predicted damage (nats per token) of every block, and what another format would change", head, cells)
    if price > 0:
        session.say(
            f"Why: at this limit a KiB is worth {1024 * price:.2e} nats, the price. x says, in prices, what the smaller "
            "format loses for each KiB that it spares, and the larger one saves for each KiB that it takes. Above 1 left and "
            "below 1 right the format is the best one; the last bytes of the limit make a few exceptions.",
        )
    else:
        session.say("smaller and larger: nats that the next format loses or saves for each KiB.")


def _step(row: Mapping[str, Any], name: str, price: float) -> str:
    """The next format, and its change of damage for each KiB: in multiples of the price, where there is one."""
    other = row[name]
    if other is None:
        return "–"
    change = abs((other["damage"] - row["damage"]) / (other["bytes"] - row["bytes"]))
    return f"{other['format']} x{change / price:.2g}" if price > 0 else f"{other['format']} {1024 * change:.1e}"
