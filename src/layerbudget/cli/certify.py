"""``layerbudget certify``: which pairs of blocks the gain orders for certain, and whether the loss agrees."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .files import say, show_table
from .progress import progress_bar
from .shared import add_data_options, add_partition_options, batch_of, load


def register(subparsers: Any) -> None:
    """Add the parser of ``certify``."""
    p = subparsers.add_parser("certify")
    p.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(p, samples=32, length=128)
    add_partition_options(p)
    p.add_argument(
        "--curvature", choices=("fisher", "diagonal", "ggn", "hessian"), default="fisher",
        help="hessian is the paper's own; ggn and hessian solve by conjugate gradients (default: fisher)",
    )  # fmt: skip
    p.add_argument("--damping", type=float, nargs="+", help="one or more dampings (default: 0.1 1 10)")
    p.add_argument(
        "--damping-unit", choices=("max", "mean", "absolute"), default="max",
        help="relative to each block's largest or mean eigenvalue, or absolute (default: max)",
    )  # fmt: skip
    p.add_argument("--steps", type=int, help="largest number of products of conjugate gradients (default 200)")
    p.add_argument("-o", "--out", metavar="FILE", help="write table and certificates as JSON")
    p.set_defaults(handler=handler)


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Take each block's Newton step, compare, certify, and say what was certified."""
    from ..doctor.cost import scoring
    from ..models.blocks import describe, partition
    from ..records import check_output, dumps, to_jsonable, write_text
    from ..sensitivity.certificate import certify_ranking, direct_check
    from .outlook import expect, text_of, words_of
    from .shared import refuse

    if a.curvature in ("fisher", "diagonal"):
        refuse(a, ("steps",), f"the curvature {a.curvature}, which needs no products")
    if a.out:
        check_output(a.out, overwrite=a.overwrite)
    model, _, data = load(a)
    priced, text = {"fisher": "fisher-gram", "diagonal": "fisher-diagonal"}.get(a.curvature, a.curvature), text_of(data, a)
    what = f"direct check, curvature {a.curvature}, on {words_of(data)}"
    expect(a, what, model, lambda shape: scoring(priced, text, shape))
    blocks = partition(model, a.by, include=a.include, exclude=a.exclude)
    steps = {} if a.steps is None else {"steps": a.steps}
    with progress_bar(a, "direct check") as progress:
        table = direct_check(
            model, data, blocks, curvature=a.curvature, damping=a.damping, damping_unit=a.damping_unit,
            batch_size=batch_of(a, model, data), progress=progress, **steps,
        )  # fmt: skip
    pairs = {name: certify_ranking(table, with_gap=gap) for name, gap in (("paper", False), ("with_gap", True))}
    result = {
        "schema_version": 1, "curvature": a.curvature, "damping_unit": a.damping_unit, "model": describe(model),
        "data": data.describe(), "table": table, "pairs": pairs["with_gap"], "summary": summary(table, pairs),
    }  # fmt: skip
    _show(a, result)
    if a.out:
        say(a, [f"Written to {write_text(a.out, dumps(result), overwrite=a.overwrite)}."])
    return to_jsonable(result)


def summary(table: Sequence[Mapping[str, Any]], pairs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Counts per damping: blocks that have a step, pairs of them, and how many of those each rule certifies.

    ``paper`` is the rule of appendix B.3 taken by its letter, which holds where the curvature is the Hessian;
    ``paper_with_gap`` adds what another curvature leaves out; ``exact`` is the expansion with the exact Hessian, of which only
    the remainder is unknown. A certified pair that the measured losses contradict is counted: there is none where the
    Lipschitz constant was not too small.
    """
    rows = []
    for tau in dict.fromkeys(r["relative_damping"] for r in table):
        own = [r for r in table if r["relative_damping"] == tau]
        gap = [p for p in pairs["with_gap"] if p["relative_damping"] == tau]
        letter = [p for p in pairs["paper"] if p["relative_damping"] == tau]
        chosen = {
            "paper": [p for p in letter if p["certified"]], "paper_with_gap": [p for p in gap if p["certified"]],
            "exact": [p for p in gap if p["sharp"]],
        }  # fmt: skip
        rows.append({
            "damping": tau, "blocks": len(own), "ok": sum(r["status"] == "ok" for r in own),
            "not_ok": {r["block"]: r["status"] for r in own if r["status"] != "ok"}, "pairs": len(gap),
            **{name: len(found) for name, found in chosen.items()}, "agree": sum(p["agrees"] for p in gap),
            "contradicted": {name: sum(not p["agrees"] for p in found) for name, found in chosen.items()},
        })  # fmt: skip
    return rows


def _show(a: argparse.Namespace, result: Mapping[str, Any]) -> None:
    head = ("damping", "blocks ok", "pairs", "paper (B.3)", "with the curvature gap", "exact expansion", "losses agree")
    rows = [
        (f"{r['damping']:g}", f"{r['ok']} of {r['blocks']}", str(r["pairs"]), str(r["paper"]), str(r["paper_with_gap"]),
         str(r["exact"]), str(r["agree"]))
        for r in result["summary"]
    ]  # fmt: skip
    show_table(a, f"pairs of blocks ordered for certain, curvature {result['curvature']}", head, rows)
    for r in result["summary"]:
        for block, status in r["not_ok"].items():
            say(a, [f"Damping {r['damping']:g}: {block} is not ok ({status}) and certifies nothing."])
        wrong = {k: n for k, n in r["contradicted"].items() if n}
        if wrong:
            text = ", ".join(f"{n} of {k}" for k, n in wrong.items())
            say(a, [f"Damping {r['damping']:g}: the measured losses contradict {text}."])
    if result["curvature"] != "hessian":
        say(a, ["The paper's rule is for the Hessian; for another curvature read the column with the gap, or the exact one."])
