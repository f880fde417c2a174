"""``layerbudget plan structured``, and what ``prune`` does with plans that make matrices smaller."""

from __future__ import annotations

import argparse
from typing import Any

from ..decisions.shapes.parts import WAYS
from ..decisions.shapes.zeros import ZEROS
from ..plan import Plan
from .progress import progress_bar
from .shared import add_data_options, add_out, batch_of, load, refuse

SMALLER = ("structured", "depth")


def register(verbs: Any) -> None:
    """Add the parser of ``plan structured``."""
    p = verbs.add_parser("structured", help="heads, MLP widths and layers to remove: smaller matrices, measured on the model")
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
        "--zeros", choices=tuple(ZEROS),
        help="directional: zeros in what remains, in the same program: none (default), 2:4 (FLOPs and bytes), packed (bytes)",
    )  # fmt: skip
    p.add_argument("--context", type=int, default=0, help="mean tokens attended to, to count attention scores in FLOPs")
    p.add_argument(
        "--search", choices=("curves", "directional"), default="curves",
        help="curves: measure every part alone (default); directional: predict along what removal does, step by step",
    )  # fmt: skip
    p.add_argument("--points", type=int, help="curves: numbers of units measured per layer and kind (default: 4)")
    p.add_argument("--trials", type=int, help="curves: plans that are measured as a whole (default: 8)")
    p.add_argument("--passes", type=float, help="directional: most forward equivalents (default: 46)")
    p.add_argument("--resume", metavar="DIR", help="curves: keep finished measurements here until the plan is there")
    add_data_options(p, samples=16)
    add_out(p)
    p.set_defaults(handler=run)


def run(a: argparse.Namespace) -> dict[str, Any]:
    """``plan structured``."""
    from pathlib import Path

    from ..decisions.shapes.directional import plan_shapes_directional
    from ..decisions.shapes.search import plan_structured
    from ..errors import AlreadyExists, InvalidInput
    from ..execution.processes import is_main
    from ..records import to_jsonable
    from ..storage.parts import clear

    if a.out and Path(a.out).exists() and not a.overwrite:
        raise AlreadyExists(f"{a.out} exists already.", "", "Choose another file or pass --overwrite.")
    if a.depth < 0:
        raise InvalidInput(f"--depth is {a.depth}.", "It must be at least 0.", "Leave it out to keep all layers.")
    kinds = tuple(k.strip() for k in a.kinds.split(","))
    if kinds in (("heads",), ("mlp",)):
        refuse(a, ("multiple",) if kinds == ("heads",) else ("heads",), f"--kinds {a.kinds}")
    directional = a.search == "directional"
    refuse(a, ("points", "trials", "resume") if directional else ("passes", "zeros"), f"--search {a.search}")
    model, _, data = load(a)
    _expect(a, model, data)
    shared: dict[str, Any] = {
        "kinds": kinds, "by": a.heads or "auto", "multiple": 8 if a.multiple is None else a.multiple,
        "max_removed": a.max_removed, "depth": a.depth, "compensate": a.compensate, "context": a.context, "even": a.even,
        "batch_size": batch_of(a, model, data),
    }  # fmt: skip
    with progress_bar(a, "measuring heads and widths, " + ("passes" if directional else "layers")) as progress:
        if directional:
            own: dict[str, Any] = {"passes": 46.0 if a.passes is None else a.passes, "zeros": a.zeros or "none"}
            plan = plan_shapes_directional(model, data, a.save, progress=progress, **own, **shared)
        else:
            plan = plan_structured(
                model, data, a.save, points=4 if a.points is None else a.points,
                trials=8 if a.trials is None else a.trials, resume=a.resume, progress=progress, **shared,
            )  # fmt: skip
    if a.out and is_main():
        plan.save(a.out, overwrite=a.overwrite)
    if a.resume:
        clear(a.resume)
    _show(a, plan)
    return to_jsonable(plan.to_dict())


def _expect(a: argparse.Namespace, model: Any, data: Any) -> None:
    """Say what the measurements will cost."""
    from ..doctor.cost import searching
    from .outlook import expect, text_of, words_of

    text = text_of(data, a)
    expect(a, f"{a.search} on {words_of(data)}", model, lambda shape: searching(text, a.passes or 46.0))


def _show(a: argparse.Namespace, plan: Plan) -> None:
    from .files import say, show_table

    shapes = plan.extra["shapes"]
    gone = plan.extra["dropped"]
    rows = [(n, s["by"], s["units"], "whole layer" if s["layer"] in gone else s["removed"]) for n, s in shapes.items()]
    show_table(a, "units to remove", ("part", "unit", "units", "removed"), rows)
    b = plan.budget
    saved = f"Saves {b['spent']:.6g} {b['unit']}, {b['spent'] / b['base']:.2%} of the layers"
    lines = [f"{saved} ({b['limit']:.6g} were asked for)."]
    if plan.rule == "directional":
        spent = f"{plan.extra['forward_passes']:.0f} forward equivalents"
        lines.append(f"Measured, cut and refitted: {plan.extra['measured']:.4g} nats per token, after {spent}.")
    else:
        lines.append(f"Predicted damage {plan.extra['predicted']:.4g} nats per token, if the damages of the parts add up.")
    if plan.rule != "directional" and plan.extra["measured"] is not None:
        lines.append(f"Measured as a whole: {plan.extra['measured']:.4g}, the best of {len(plan.extra['candidates'])} plans.")
    left = [s for s in shapes.values() if s["layer"] not in gone]
    if any(len({s["removed"] for s in left if s["kind"] == k}) > 1 for k in ("heads", "mlp")):
        lines.append("Layers differ: the model works in memory, a plain config cannot describe it. --even plans one that can.")
    say(a, lines + ([f"Written to {a.out}."] if a.out else []))


def prune_smaller(a: argparse.Namespace, plan: Plan, model: Any, tokenizer: Any, data: Any) -> dict[str, Any]:
    """Apply a plan of rule ``structured`` or ``depth``, recount, and save an ordinary smaller checkpoint.

    Raises:
        UnknownStructure: A plain config cannot describe the result; nothing is written.
    """
    from ..decisions.shapes.checkpoint import apply_depth, apply_structured, check_exportable, save_smaller
    from ..execution.processes import is_main
    from ..report.page import runtime_box

    check_exportable(model, plan)
    before = sum(p.numel() for p in model.parameters())
    if plan.kind == "depth":
        apply_depth(model, plan)
        done: dict[str, Any] = {"unit": "parameters", "saved": int(plan.counts.sum()), "planned": int(plan.counts.sum())}
    else:
        with progress_bar(a, "remove heads and widths, layers") as progress:
            done = dict(apply_structured(model, plan, data, batch_size=batch_of(a, model, data), progress=progress))
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
