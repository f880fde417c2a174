"""Table of a sweep of sizes: the predicted damage of plans beside the mixes of llama.cpp."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...session import Session

_FEW = 15  # rows of a table that was not asked for
_USUAL = "IQ2_M Q2_K IQ3_XXS IQ3_M Q3_K_M IQ4_XS Q4_K_S Q4_K_M Q5_K_M Q6_K Q8_0".split()  # mixes that people publish


def show_sizes(
    session: Session, rows: Sequence[Mapping[str, Any]], unsolved: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Show the predicted damage of plans by size beside the mixes of llama.cpp; without ``--table`` at the sizes in use.

    Sentences of ``unsolved`` budgets follow, and the command of one plan with the ``options`` of the sweep.
    """
    request: Any = session.request
    shown = rows
    if request.budgets is None and not request.table and len(rows) > _FEW:
        shown = [r for r in rows if r["budget"] in _USUAL] or rows
    mixes = any(r["mix"] for r in rows)
    head = ("size", "bytes of the file", "bits", "plan loses", *(("mix", "mix loses", "change") if mixes else ()))
    cells = [
        (r["budget"], f"{r['bytes']:,}", f"{r['bits']:.4g}", f"{r['value']:.3g}", *(_mix_cells(r) if mixes else ()))
        for r in shown
    ]
    session.show("bits: predicted damage (KL, nats per token) by size of the file", head, cells)
    if len(shown) < len(rows):
        session.say(f"{len(rows) - len(shown)} other sizes of mixes: --table.")
    if mixes and any(r["mix"] != r["budget"] for r in shown if isinstance(r["budget"], str)):
        session.say(
            "Not measured: the mix has types that no damage was measured for, or llama.cpp makes it only with an importance "
            "matrix (plan bits MODEL --method weighted).",
        )
    session.say(*unsolved, _on_sizes(rows, mixes))
    if len(rows) > 1:
        row = _enough(rows) or rows[len(rows) // 2]
        size = ("--like", row["budget"]) if isinstance(row["budget"], str) else ("--bits", f"{row['budget']:g}")
        more = ["--rule", options["rule"]] if "rule" in options else []
        more += ["--forbid", ",".join(options["forbid"])] if options.get("forbid") else []
        more += [word for pattern, form in (options.get("keep") or {}).items() for word in ("--keep", f"{pattern}={form}")]
        session.follow("plan", "bits", request.scores, *size, *more, "-o", "plan.json")


def _mix_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The mix that a plan is compared with, its damage, and the change by the plan: of a size without a name the best mix."""
    mix = row["mix"]
    if mix is None or (isinstance(row["budget"], str) and mix != row["budget"]):
        return "not measured", "–", "–"
    return mix, f"{row['mix_value']:.3g}", f"{row['value'] / row['mix_value'] - 1:+.0%}" if row["mix_value"] > 0 else "–"


def _reference(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the mix that most people take, where it was measured, else of the largest one."""
    mix_rows = [r for r in rows if r["mix"] is not None]
    return next((r for r in mix_rows if r["mix"] == "Q4_K_M"), mix_rows[-1] if mix_rows else None)


def _enough(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The smallest plan with no more predicted damage than the mix of reference; None without one."""
    reference = _reference(rows)
    fit = [r for r in rows if reference is not None and r["value"] <= reference["mix_value"]]
    return min(fit, key=lambda r: float(r["spent"]), default=None)


def _on_sizes(rows: Sequence[Mapping[str, Any]], mixes: bool) -> str:
    """The size that has no more damage than a usual mix, or where damage rises fastest."""
    reference, row = _reference(rows), _enough(rows)
    if mixes and reference is not None and row is not None:
        return (
            f"Verdict: a plan with a file of {row['bytes']:,} bytes is predicted to lose {row['value']:.3g} nats per token, no "
            f"more than llama.cpp's {reference['mix']} with {reference['mix_value']:.3g} and a file of "
            f"{reference['mix_bytes']:,} bytes; nothing was checked."
        )
    if len(rows) < 2:
        return f"Verdict: {rows[0]['value']:.3g} nats per token are predicted at {rows[0]['bits']:.4g} bits per weight."
    ordered = sorted(rows, key=lambda r: float(r["spent"]))
    steps = [(s, b) for s, b in itertools.pairwise(ordered) if b["value"] > 0 and s["spent"] < b["spent"]]
    if not steps:
        return f"Verdict: {ordered[0]['value']:.3g} nats per token are predicted at {ordered[0]['bits']:.4g} bits per weight."
    small, big = max(steps, key=lambda s: math.log(s[0]["value"] / s[1]["value"]) / math.log(s[1]["spent"] / s[0]["spent"]))
    times, less = small["value"] / big["value"], 1 - small["spent"] / big["spent"]
    return (
        f"Verdict: damage rises fastest from {big['bits']:.4g} bits per weight to {small['bits']:.4g}, {times:.3g} times for "
        f"{less:.0%} fewer bytes of the planned matrices; nothing was checked."
    )
