"""Every table and figure of the paper as data: what was published, and where it stands. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from layerbudget.errors import InvalidInput

MLP_TABLES = {1e-3: "table-8", 1e-2: "table-9", 1e-1: "table-10", 1.0: "table-11", 2.0: "table-12"}


@functools.cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """All items by name (``figure-1`` ... ``table-13``), in the paper's order.

    Returns:
        ``{name: {number, title, label, section, unit, origin, columns[], rows{row: {column: value}}, notes[]}}``. A value is a
        number, or ``[mean, deviation]``. ``origin`` says where the figures were read: the paper's source or, for the two
        figures that print no table, the authors' plotting script.
    """
    text = (resources.files(__package__) / "data" / "published.json").read_text(encoding="utf-8")
    return json.loads(text)["items"]


def item(name: str) -> Mapping[str, Any]:
    """One table or figure.

    Raises:
        InvalidInput: There is none of that name.

    >>> item("table-5")["rows"]["Average"]["MDL (All)"]
    83.07
    """
    known = published()
    if name not in known:
        raise InvalidInput(f"The paper has no {name!r}.", f"It has {', '.join(known)}.", "Name one of those.")
    return known[name]


def column(name: str, title: str, *, averages: bool = False) -> dict[str, float]:
    """One column of a table by row, by default without the rows that average others.

    >>> column("table-6", "LayerIF")["MRPC"]
    84.41
    """
    rows = item(name)["rows"]
    return {r: values[title] for r, values in rows.items() if averages or not r.startswith(("Average", "LayerIF"))}


def mlp_entries() -> dict[float, dict[str, dict[str, tuple[float, float]]]]:
    """The 30 correlations of tables 8 to 12: ``{tau: {proxy: {spearman: (mean, deviation), kendall: (mean, deviation)}}}``."""
    return {
        tau: {
            proxy: {"spearman": tuple(row["Spearman"]), "kendall": tuple(row["Kendall"])}
            for proxy, row in item(name)["rows"].items()
        }
        for tau, name in MLP_TABLES.items()
    }
