"""``layerbudget export``: plans in the files of other tools."""

from __future__ import annotations

import argparse
from typing import Any

from ..exports import EXPORTS
from .shared import named_values, refuse


def register(subparsers: Any) -> None:
    """Add the parser of ``export``."""
    parser = subparsers.add_parser("export")
    parser.add_argument("plan", metavar="PLAN|DIR", help="plan.json, or the folder of a result that holds one")
    known = "; ".join(f"{e.name}: {e.summary}" for e in EXPORTS.all().values())
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help=f"{known}; packed: DIR's checkpoint with its zeros left out (default: by the plan's kind)",
    )
    parser.add_argument("--method", help="recipe: wanda or sparsegpt (default: what the plan was measured with, else wanda)")
    parser.add_argument("--pattern", metavar="N:M", help="recipe: the n:m pattern of all blocks")
    parser.add_argument("--levels", type=int, help="recipe: at most so many distinct sparsities, the total kept")
    parser.add_argument("--alpha-policy", help="lora: how alpha follows the rank")
    parser.add_argument("--dropout", type=float, help="lora: LoRA dropout")
    parser.add_argument(
        "--set", dest="own", action="append", default=[], metavar="NAME=VALUE", help="an option of a format of your own"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="file to write (default: the format's usual name)")
    parser.set_defaults(handler=handler)


_OPTIONS = ("method", "pattern", "levels", "alpha_policy", "dropout")


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the file and say how it is used."""
    from ..exports import find_plan, format_for
    from ..records import check_output, write_text

    if arguments.to == "packed":
        return _packed(arguments)
    plan = find_plan(arguments.plan)
    chosen = EXPORTS.find(arguments.to or format_for(plan.kind))
    out = arguments.out or chosen.file
    check_output(out, overwrite=arguments.overwrite)
    given = {name: getattr(arguments, name) for name in _OPTIONS} | named_values(arguments.own)
    path = write_text(out, chosen.text(plan, given), overwrite=arguments.overwrite)
    arguments.console.print(f"{plan.kind} by {plan.rule} written to {path}. {chosen.use.format(file=path)}".strip())
    return {"format": chosen.name, "kind": plan.kind, "output": str(path)}


def _packed(arguments: argparse.Namespace) -> dict[str, Any]:
    from ..decisions.sparsity.save import pack

    refuse(arguments, (*_OPTIONS, "own"), "packed")
    out = arguments.out or "packed.safetensors"
    sizes = pack(arguments.plan, out)
    arguments.console.print(
        f"{sizes['dense']:,} bytes packed into {sizes['packed']:,} ({sizes['packed'] / sizes['dense']:.0%}): {out}. For "
        "storage only: no runtime reads it; layerbudget.decisions.sparsity.save.unpack gives every tensor back."
    )
    return {"format": "packed", **sizes, "output": str(out)}
