"""What a run of an experiment leaves: a result with its environment, a table, a figure, and where the paper's shape was met."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerbudget.canonical import dumps
from layerbudget.errors import AlreadyExists
from layerbudget.models.machine import versions
from layerbudget.storage.writing import check_writable, write_text

RESULT, TABLE, FIGURE = "result.json", "table.csv", "figure.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that the paper's figures say, and whether ours say it too.

    Attributes:
        claim: In words.
        met: Whether; None where this run cannot tell.
        detail: The numbers.
    """

    claim: str
    met: bool | None
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an experiment found.

    Attributes:
        name: Of the experiment.
        items: Tables and figures of the paper that it reproduces.
        setting: Everything that it was given.
        result: Its figures.
        rows: A flat table of them.
        claims: The paper's shape, point by point.
        finding: One line.
        seconds: Run time.
        draw: Draws the figure into a file.
    """

    name: str
    items: Sequence[str]
    setting: Mapping[str, Any]
    result: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim]
    finding: str
    seconds: float
    draw: Callable[[Path], Any] | None = None

    @property
    def line(self) -> str:
        """Where the paper's shape was met and where not."""
        words = {True: "met", False: "not met", None: "open"}
        parts = [f"{words[c.met]}: {c.claim}" + (f" ({c.detail})" if c.detail else "") for c in self.claims]
        return "; ".join(parts) + "."

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema_version": 1, "experiment": self.name, "items": list(self.items), "setting": dict(self.setting),
            "finding": self.finding, "shape": self.line, "claims": [dataclasses.asdict(c) for c in self.claims],
            "result": dict(self.result), "seconds": round(self.seconds, 1), "environment": environment(),
        }  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions, processor and threads of this run."""
    found = versions(("torch", "transformers", "peft", "numpy", "scipy", "scikit-learn", "lm_eval"))
    return {**found, "machine": platform.machine(), "threads": os.environ.get("OMP_NUM_THREADS")}


def check_folder(out: Path | str, *, overwrite: bool = False) -> Path:
    """Refuse a folder that holds a result, before any work is done.

    Raises:
        AlreadyExists: It does, and ``overwrite`` is false.
        InvalidInput: It cannot be written.
    """
    out = Path(out)
    if (out / RESULT).exists() and not overwrite:
        raise AlreadyExists(f"{out} holds a result already.", "", "Choose another --out or pass --overwrite.")
    check_writable(out / RESULT)
    return out


def leave(outcome: Outcome, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write ``result.json``, ``table.csv`` and, where matplotlib is installed, ``figure.png``.

    Raises:
        AlreadyExists: The folder holds a result and ``overwrite`` is false.
    """
    out = check_folder(out, overwrite=overwrite)
    write_text(out / TABLE, to_csv(outcome.rows), overwrite=True)
    if outcome.draw is not None:
        outcome.draw(out / FIGURE)
    write_text(out / RESULT, dumps(outcome.to_dict()), overwrite=True)
    return out


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV of rows that need not have the same columns; columns in the order in which they appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()
