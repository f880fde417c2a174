"""``layerbudget plan shapes``, and what ``prune`` does with plans that make matrices smaller."""

from __future__ import annotations

import argparse
from typing import Any

from ..decisions.shapes.parts import WAYS, ZEROS
from ..plan import Plan
from .progress import progress_bar
from .shared import add_data_options, add_out, batch_of, load, refuse

SMALLER = ("shapes", "depth")


def register(verbs: Any) -> None:
    """Add the parser of ``plan shapes``."""
    p = verbs.add_parser("shapes", help="heads, MLP widths and layers to remove: smaller matrices, measured on the model")
    p.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    p.add_argument("--save", required=True, metavar="BUDGET", help="'25%% flops', '1.2 GiB', '300M params'")
    p.add_argument("--kinds", default="heads,mlp", help="what may go: heads, mlp or both (default: %(default)s)")
    p.add_argument(
        "--heads", choices=("auto", "groups", "queries"),
        help="groups: key-value heads with their query heads; queries: equally many per group; auto (default): the better",
    )  # fmt: skip
    p.add_argument("--multiple", type=int, help="MLP widths shrink by multiples of this (default: 8)")
    p.add_argument("--max-removed", type=float, default=0.75, help="largest share of one layer's heads or width")
    p.add_argument("--depth", type=int, default=0, help="so many whole layers may go where that is cheaper (default: none)")
    p.add_argument("--even", action="store_true", help="the same in all layers: what an ordinary checkpoint can hold")
    p.add_argument(
        "--compensate", choices=("auto", *WAYS), default="auto",
        help="what remains makes up for what goes: none; refit: each matrix its own output; stream: the residual stream, "
        "cross-fitted; auto (default): stream where the layers allow it",
    )  # fmt: skip
    p.add_argument(
        "--zeros", choices=tuple(ZEROS), default="none",
        help="zeros in what remains, in the same program: none (default), 2:4 (FLOPs and bytes), packed (bytes)",
    )  # fmt: skip
    p.add_argument("--context", type=int, default=0, help="mean tokens attended to, to count attention scores in FLOPs")
    p.add_argument("--passes", type=float, default=46.0, help="most forward equivalents (default: 46)")
    add_data_options(p, samples=16)
    add_out(p)
    p.set_defaults(handler=run)


def run(a: argparse.Namespace) -> dict[str, Any]:
    """``plan shapes``."""
    from pathlib import Path

    from ..decisions.shapes.plan import plan_shapes
    from ..doctor.cost import searching
    from ..errors import AlreadyExists
    from ..execution.processes import is_main
    from ..records import to_jsonable
    from .outlook import expect, text_of, words_of

    if a.out and Path(a.out).exists() and not a.overwrite:
        raise AlreadyExists(f"{a.out} exists already.", "", "Choose another file or pass --overwrite.")
    kinds = tuple(k.strip() for k in a.kinds.split(","))
    if kinds in (("heads",), ("mlp",)):
        refuse(a, ("multiple",) if kinds == ("heads",) else ("heads",), f"--kinds {a.kinds}")
    model, _, data = load(a)
    text = text_of(data, a)
    expect(a, f"damage on {words_of(data)}", model, lambda shape: searching(text, a.passes))
    with progress_bar(a, "measuring heads and widths, passes") as progress:
        plan = plan_shapes(
            model, data, a.save, kinds=kinds, by=a.heads or "auto", multiple=8 if a.multiple is None else a.multiple,
            max_removed=a.max_removed, depth=a.depth, zeros=a.zeros, even=a.even, compensate=a.compensate, context=a.context,
            passes=a.passes, batch_size=batch_of(a, model, data), progress=progress,
        )  # fmt: skip
    if a.out and is_main():
        plan.save(a.out, overwrite=a.overwrite)
    _show(a, plan)
    return to_jsonable(plan.to_dict())


def _show(a: argparse.Namespace, plan: Plan) -> None:
    from .files import say, show_table

    shapes = plan.extra["shapes"]
    gone = plan.extra["dropped"]
    rows = [(n, s["by"], s["units"], "whole layer" if s["layer"] in gone else s["removed"]) for n, s in shapes.items()]
    show_table(a, "units to remove", ("part", "unit", "units", "removed"), rows)
    b = plan.budget
    saved = f"Saves {b['spent']:.6g} {b['unit']}, {b['spent'] / b['base']:.2%} of the layers"
    spent = f"{plan.extra['forward_passes']:.0f} forward equivalents"
    lines = [
        f"{saved} ({b['limit']:.6g} were asked for).",
        f"Measured, cut and refitted: {plan.extra['measured']:.4g} nats per token, after {spent}.",
    ]
    left = [s for s in shapes.values() if s["layer"] not in gone]
    if any(len({s["removed"] for s in left if s["kind"] == k}) > 1 for k in ("heads", "mlp")):
        lines.append("Layers differ: the model works in memory, a plain config cannot describe it. --even plans one that can.")
    say(a, lines + ([f"Written to {a.out}."] if a.out else []))


def prune_smaller(a: argparse.Namespace, plan: Plan, model: Any, tokenizer: Any, data: Any) -> dict[str, Any]:
    """Apply a plan of kind ``shapes`` or ``depth``, recount, and save an ordinary smaller checkpoint.

    Raises:
        UnknownStructure: A plain config cannot describe the result; nothing is written.
    """
    from ..decisions.shapes.apply import apply_shapes
    from ..decisions.shapes.depth import apply_depth
    from ..decisions.shapes.save import check_exportable, save_smaller
    from ..execution.processes import is_main
    from ..report.page import runtime_box

    check_exportable(model, plan)
    before = sum(p.numel() for p in model.parameters())
    if plan.kind == "depth":
        apply_depth(model, plan)
        done: dict[str, Any] = {"unit": "parameters", "saved": int(plan.counts.sum()), "planned": int(plan.counts.sum())}
    else:
        with progress_bar(a, "remove heads and widths, layers") as progress:
            done = dict(apply_shapes(model, plan, data, batch_size=batch_of(a, model, data), progress=progress))
    out = a.out
    if is_main():
        out = save_smaller(model, tokenizer, a.out, plan=plan, record=done, overwrite=a.overwrite)
    after = sum(p.numel() for p in model.parameters())
    a.console.print(
        f"Removed {done['saved']:.6g} {done['unit']} (planned {done['planned']:.6g}); parameters {before} -> {after} "
        f"({after / before:.3f}x, embeddings included); saved to {out}."
    )
    a.console.print(runtime_box(plan.kind))
    return {**done, "parameters_before": before, "parameters_after": after, "output": str(out)}
