"""``layerbudget prune``."""

from __future__ import annotations

import argparse
from typing import Any

from ..compressors.base import TREATMENTS, find_treatment
from .progress import progress_bar
from .shared import DATA, add_treating_options, batch_of, named_values, refuse, say_share
from .structured import SMALLER, prune_smaller


def register(subparsers: Any) -> None:
    """Add the parser of ``prune``."""
    parser = subparsers.add_parser("prune")
    add_treating_options(
        parser, "plan.json of kind sparsity, shapes or depth, made for this model", TREATMENTS.names(),
        "not for smaller shapes (default: what the plan was measured with, else wanda)",
    )  # fmt: skip
    parser.add_argument(
        "--pattern", metavar="N:M", help="zero n of every m inputs; n:8 with a literal n lets each block differ"
    )
    parser.add_argument("--true-sequential", action="store_true", help="collect inputs again for every group of matrices")
    parser.add_argument("--parity", action="store_true", help="reproduce the masks of the reference implementations")
    parser.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="precision of the calibration forwards (weights keep theirs)"
    )
    parser.add_argument("--store", choices=("device", "cpu", "disk"), help="where activations live (default: device)")
    parser.add_argument("--resume", metavar="DIR", help="keep finished blocks here until the result is saved")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the pruned checkpoint")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prune, recount, save, and say what is smaller and what is not."""
    from ..decisions.sparsity.apply import method_of, other_pruner, prune
    from ..decisions.sparsity.save import check_room, save_pruned
    from ..execution.processes import is_main
    from ..kinds import check_kind
    from ..plan import Plan
    from ..report.page import runtime_box
    from ..storage.folders import check_folder
    from ..storage.parts import clear

    plan = Plan.load(arguments.plan)
    check_kind(plan.kind, ("sparsity", *SMALLER), "cannot be pruned")
    own = named_values(arguments.own)
    if plan.kind not in SMALLER:
        arguments.method, own = method_of(plan, arguments.method, own)
    _refuse_unread(arguments, plan.kind)
    check_folder(arguments.out, overwrite=arguments.overwrite)
    model, tokenizer, data = _load(arguments, plan.kind)
    check_room(model, arguments.out, resume=arguments.resume, plan=plan)
    _expect(arguments, plan, model, data)
    if plan.kind in SMALLER:
        return prune_smaller(arguments, plan, model, tokenizer, data)
    say_share(arguments, model, plan.blocks)
    for note in (said := other_pruner(plan, arguments.method)):
        arguments.console.print(note)
    with progress_bar(arguments, f"prune by {arguments.method}") as progress:
        receipt = prune(
            model, plan, data, arguments.method, batch_of(arguments, model, data), arguments.parity, arguments.pattern,
            progress, true_sequential=arguments.true_sequential, store=arguments.store, resume=arguments.resume,
            autocast=arguments.autocast, **own,
        )  # fmt: skip
    out = arguments.out
    if is_main():
        out = save_pruned(model, tokenizer, plan, receipt, arguments.out, overwrite=arguments.overwrite)
        if arguments.resume:
            clear(arguments.resume)
    arguments.console.print(
        f"Recounted sparsity {receipt.sparsity:.6f} (planned {receipt.planned:.6f}) in {receipt.seconds:.1f} s; saved to {out}."
    )
    for note in receipt.notes[: len(receipt.notes) - len(said)]:
        arguments.console.print(note)
    arguments.console.print(runtime_box(pattern=arguments.pattern))
    blocks = {name: record["sparsity"] for name, record in receipt.blocks.items()}
    return {"sparsity": receipt.sparsity, "blocks": blocks, "output": str(out)}


def _expect(arguments: argparse.Namespace, plan: Any, model: Any, data: Any) -> None:
    """Say what pruning will cost."""
    from ..doctor.cost import treating
    from .outlook import expect, text_of, words_of

    text, again = text_of(data, arguments), 5.0 if arguments.true_sequential else 1.0
    method = {"shapes": "sparsegpt", "depth": "magnitude"}.get(plan.kind, arguments.method or "wanda")  # it refits, or cuts
    how = "smaller shapes" if plan.kind in SMALLER else f"{method} to {plan.budget['spent']:,} zeros"
    what = f"{how} with {words_of(data)}" if data is not None else how
    expect(arguments, what, model, lambda shape: treating(method, text, again=again))


_PASSES = ("true_sequential", "autocast", "store", "resume")


def _refuse_unread(arguments: argparse.Namespace, kind: str) -> None:
    """Refuse what the plan's kind, or the method, would ignore.

    Raises:
        InvalidInput: Names the flag.
    """
    if kind in SMALLER:
        refuse(arguments, ("method", "pattern", "parity", "own", *_PASSES), f"a plan of kind {kind}")
    if kind == "depth" or _blind(arguments):
        refuse(arguments, (*DATA, *_PASSES), arguments.method or f"a plan of kind {kind}")


def _blind(arguments: argparse.Namespace) -> bool:
    """Whether the method reads no data."""
    return find_treatment(arguments.method or "wanda").statistic == "none"


def _load(arguments: argparse.Namespace, kind: str) -> tuple[Any, Any, Any]:
    from ..errors import BadModel
    from ..models.loading import load_tokenizer
    from .shared import load, load_named

    if kind == "shapes" or (kind != "depth" and not _blind(arguments)):
        return load(arguments)
    try:
        tokenizer = load_tokenizer(arguments.model, revision=arguments.revision)
    except BadModel:
        tokenizer = None  # magnitude and depth need no text
    return load_named(arguments), tokenizer, None
