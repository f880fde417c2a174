"""``layerbudget measure``: what pruning costs the model's output, and the plan that follows from it."""

from __future__ import annotations

import argparse
from typing import Any

from ..compressors.base import TREATMENTS
from ..errors import InvalidInput
from .progress import progress_bar
from .shared import add_data_options, batch_of, load, say_share

SEARCHING = ("passes", "steps", "cross_fit", "trust", "resume")


def register(subparsers: Any) -> None:
    """Add the parser of ``measure``."""
    parser = subparsers.add_parser("measure")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(parser, samples=16)
    parser.add_argument("--sparsity", type=float, help="pruned share of all weights (default 0.5)")
    parser.add_argument(
        "--pattern",
        metavar="N:M",
        help="what 2:4, say, costs beside the same share without a pattern; for prune --pattern",
    )
    parser.add_argument("--max-sparsity", type=float, help="cap of every unit (default 0.95)")
    parser.add_argument("--method", choices=TREATMENTS.names(), default="wanda", help="the pruner (default %(default)s)")
    parser.add_argument(
        "--by", help="linear (default), layer, rows:G or a regular expression; linear,rows:16 lets half of the text choose"
    )
    parser.add_argument("--passes", type=float, help="forward equivalents to spend, a backward counts two (default 24)")
    parser.add_argument("--steps", type=int, help="most steps (default: what the passes allow)")
    parser.add_argument(
        "--cross-fit", action=argparse.BooleanOptionalAction,
        help="let half of the text judge when to stop (default: where several --by are given)",
    )  # fmt: skip
    parser.add_argument("--draws", type=int, help="draws of labels for the second order, two passes each (default 0)")
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

    if arguments.pattern is not None:
        return _pattern(arguments)
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


def _pattern(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a pattern costs, and its plan."""
    from ..decisions.sparsity.patterned import check_pattern, plan_pattern
    from ..execution.processes import is_main
    from ..records import check_output
    from .files import show_table
    from .shared import named_values

    for name in ("sparsity", "max_sparsity", *sorted(SEARCHING)):
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidInput(f"{flag} has no meaning for --pattern.", "The pattern decides the share.", "Leave it out.")
    check_pattern(arguments.pattern, arguments.method, 2 if arguments.draws is None else arguments.draws)
    check_output(arguments.out, overwrite=arguments.overwrite)
    own = {**named_values(arguments.own), **({} if arguments.draws is None else {"draws": arguments.draws})}
    model, _, data = load(arguments)
    draws = 2 if arguments.draws is None else arguments.draws
    _expect(arguments, model, data, "pattern", 2.0 * draws + 7.0)
    with progress_bar(arguments, f"measuring {arguments.pattern}") as progress:
        plan = plan_pattern(
            model, data, arguments.pattern, by=arguments.by or "linear", method=arguments.method,
            batch_size=batch_of(arguments, model, data), seed=arguments.seed or 0, progress=progress, **own,
        )  # fmt: skip
    if is_main():
        plan.save(arguments.out, overwrite=arguments.overwrite)
    rows = [(kind, plan.extra["predicted"][kind], plan.extra["measured"][kind]) for kind in plan.extra["measured"]]
    title = f"damage at {plan.blocks[0].value:.0%}, nats per token, by {arguments.method}"
    show_table(arguments, title, ("zeros", "predicted", "measured"), rows)
    arguments.console.print(f"written to {arguments.out}; apply it by layerbudget prune with --pattern {arguments.pattern}")
    return {**plan.to_dict(), "predicted": plan.extra["predicted"], "measured": plan.extra["measured"]}


def _expect(arguments: argparse.Namespace, model: Any, data: Any, search: str, passes: float | None) -> None:
    """Say what the search reaches and what it will cost."""
    from ..doctor.cost import searching
    from ..models.blocks import partition
    from .outlook import expect, text_of, words_of

    by = arguments.by or "linear"
    known = all(name in ("layer", "linear") or name.startswith("rows:") for name in by.split(","))
    say_share(arguments, model, partition(model, "linear" if known else by))
    text, what = text_of(data, arguments), f"{arguments.method} ({search}) on {words_of(data)}"
    expect(arguments, what, model, lambda shape: searching(text, passes))


def _directional(arguments: argparse.Namespace) -> Any:
    from ..decisions.sparsity.sequential import plan_directional
    from ..execution.processes import is_main
    from ..storage.parts import clear
    from .shared import named_values

    options = {name: getattr(arguments, name) for name in ("passes", "steps", "draws", "trust", "resume", "max_sparsity")}
    given = {name: value for name, value in options.items() if value is not None}
    arguments.by = by = arguments.by or "linear"
    several = by.split(",")
    known = all(name in ("layer", "linear") or name.startswith("rows:") for name in several)
    model, _, data = load(arguments)
    _expect(arguments, model, data, "directional", arguments.passes)
    with progress_bar(arguments, f"stepping down, {arguments.method}") as progress:
        plan = plan_directional(
            model, data, sparsity=arguments.sparsity, by=several if known else by, method=arguments.method,
            crossfit=arguments.cross_fit, batch_size=batch_of(arguments, model, data), seed=arguments.seed or 0,
            progress=progress, **given, **named_values(arguments.own),
        )  # fmt: skip
    if is_main():
        plan.save(arguments.out, overwrite=arguments.overwrite)
        if arguments.resume:
            clear(arguments.resume)
    return plan
