"""``layerbudget measure``: what pruning costs the model's output, and the plan that follows from it."""

from __future__ import annotations

import argparse
from typing import Any

from ..compressors.base import TREATMENTS
from .progress import progress_bar
from .shared import add_data_options, batch_of, load, say_share


def register(subparsers: Any) -> None:
    """Add the parser of ``measure``."""
    parser = subparsers.add_parser("measure")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(parser, samples=16)
    parser.add_argument("--sparsity", type=float, help="pruned share of all weights (default 0.5)")
    parser.add_argument("--max-sparsity", type=float, help="cap of every unit (default 0.95)")
    parser.add_argument("--method", choices=TREATMENTS.names(), default="wanda", help="the pruner (default %(default)s)")
    parser.add_argument(
        "--by", help="linear (default), layer, rows:G or a regular expression; linear,rows:16 lets half of the text choose"
    )
    parser.add_argument("--passes", type=float, help="forward equivalents to spend, a backward counts two (default 24)")
    parser.add_argument("--trust", type=float, help="largest change of one unit's sparsity in the first step (default 0.06)")
    parser.add_argument("--resume", metavar="DIR", help="keep finished steps here until the plan is saved")
    parser.add_argument(
        "--set", dest="own", action="append", default=[], metavar="NAME=VALUE",
        help="an option of the method, for example --set damping=0.1 (may be repeated)",
    )  # fmt: skip
    parser.add_argument("-o", "--out", default="plan.json", help="the plan (default %(default)s)")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan, write, show."""
    from ..records import check_fraction, check_output
    from ..report.tables import path_table, plan_table

    arguments.sparsity = 0.5 if arguments.sparsity is None else arguments.sparsity
    check_fraction(arguments.sparsity, "sparsity")
    check_output(arguments.out, overwrite=arguments.overwrite)
    plan = _directional(arguments)
    figures: dict[str, Any] = {k: plan.extra.get(k) for k in ("forward_passes", "predicted", "measured", "held_out")}
    predicted, uniform = plan.extra["predicted"], plan.extra["path"][0]["divergence"]  # where the steps begin
    arguments.console.print(plan_table(plan))
    arguments.console.print(path_table(plan))
    against: dict[str, Any] = {"predicted": predicted, "uniform": uniform, "measured": figures["measured"]}
    arguments.console.print(against_uniform(**against))
    arguments.console.print(f"written to {arguments.out}")
    return {**plan.to_dict(), **figures, "against_uniform": against}


def against_uniform(predicted: float, uniform: float, measured: float | None) -> str:
    """What a plan is predicted to cost beside uniform, and what it cost where that was measured.

    >>> against_uniform(0.2, 0.25, 0.21)
    'Predicted damage 0.2000 nats per token, uniform 0.2500: 20 % less. Measured: 0.2100.'
    """
    less = 100.0 * (1.0 - predicted / uniform) if uniform > 0 else 0.0
    word = f"{less:.0f} % less" if less >= 0.5 else "take uniform" if less < -0.5 else "no difference: take uniform"
    found = "" if measured is None else f" Measured: {measured:.4f}."
    return f"Predicted damage {predicted:.4f} nats per token, uniform {uniform:.4f}: {word}.{found}"


def _expect(arguments: argparse.Namespace, model: Any, data: Any, passes: float | None) -> None:
    """Say what the search reaches and what it will cost."""
    from ..doctor.cost import searching
    from ..models.blocks import partition
    from .outlook import expect, text_of, words_of

    by = arguments.by or "linear"
    known = all(name in ("layer", "linear") or name.startswith("rows:") for name in by.split(","))
    say_share(arguments, model, partition(model, "linear" if known else by))
    text, what = text_of(data, arguments), f"{arguments.method} (directional) on {words_of(data)}"
    expect(arguments, what, model, lambda shape: searching(text, passes))


def _directional(arguments: argparse.Namespace) -> Any:
    from ..decisions.sparsity.plan import plan_sparsity
    from ..execution.processes import is_main
    from ..storage.parts import clear
    from .shared import named_values

    options = {name: getattr(arguments, name) for name in ("passes", "trust", "resume", "max_sparsity")}
    given = {name: value for name, value in options.items() if value is not None}
    arguments.by = by = arguments.by or "linear"
    several = by.split(",")
    known = all(name in ("layer", "linear") or name.startswith("rows:") for name in several)
    model, _, data = load(arguments)
    _expect(arguments, model, data, arguments.passes)
    with progress_bar(arguments, f"stepping down, {arguments.method}") as progress:
        chosen = {**given, **named_values(arguments.own), "method": arguments.method}
        chosen["by"] = several if known and len(several) > 1 else by
        batch_size = batch_of(arguments, model, data)
        plan = plan_sparsity(model, data, sparsity=arguments.sparsity, batch_size=batch_size, progress=progress, **chosen)
    if is_main():
        plan.save(arguments.out, overwrite=arguments.overwrite)
        if arguments.resume:
            clear(arguments.resume)
    return plan
