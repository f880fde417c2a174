"""``layerbudget measure``: what pruning each block costs, and the plan that follows from it."""

from __future__ import annotations

import argparse
from typing import Any

from ..treatments.base import TREATMENTS
from .shared import add_data_options, announce, batch_of, load, progress_bar


def register(subparsers: Any) -> None:
    """Add the parser of ``measure``."""
    parser = subparsers.add_parser("measure")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(parser, samples=16)
    parser.add_argument(
        "--by", default="layer", help="layer, linear (better, about three times the passes), or a regular expression"
    )
    parser.add_argument("--method", choices=TREATMENTS.names(), default="wanda")
    parser.add_argument("--metric", choices=("kl", "loss"), default="kl")
    parser.add_argument("--sparsity", type=float, default=0.5, help="target around which is measured (default %(default)s)")
    parser.add_argument("--max-sparsity", type=float, help="cap per block (default: 0.9, and always room above the target)")
    parser.add_argument("--iterations", type=int, default=1, help="how often to measure again around the plan")
    parser.add_argument("--curves", metavar="FILE", help="also write the measured curves: plan sparsity --curves FILE")
    parser.add_argument("-o", "--out", default="plan.json", help="the calibrated plan (default %(default)s)")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, plan, write both files."""
    from ..blocks import partition
    from ..damage.by_curves import plan_by_curves
    from ..planning.sparsity import default_cap
    from ..records import check_fraction, check_output, dumps, write_text
    from ..report.tables import plan_table

    check_fraction(arguments.sparsity, "sparsity")
    cap = max(0.9, default_cap(arguments.sparsity)) if arguments.max_sparsity is None else arguments.max_sparsity
    check_fraction(cap, "max_sparsity", low=arguments.sparsity)
    for path in filter(None, (arguments.out, arguments.curves)):
        check_output(path, overwrite=arguments.overwrite)
    model, _, data = load(arguments)
    announce(arguments, f"{arguments.method} on {data.samples} samples of {data.length} tokens of {data.source}.")
    with progress_bar(arguments, f"measuring {arguments.method}, blocks") as progress:
        plan, curves = plan_by_curves(
            model, data, partition(model, arguments.by), sparsity=arguments.sparsity, max_sparsity=cap,
            method=arguments.method, metric=arguments.metric, iterations=arguments.iterations,
            batch_size=batch_of(arguments), progress=progress,
        )  # fmt: skip
    plan.save(arguments.out, overwrite=arguments.overwrite)
    if arguments.curves:
        record = {"method": arguments.method, "metric": arguments.metric, "curves": curves[0].penalty()}
        write_text(arguments.curves, dumps(record), overwrite=arguments.overwrite)
    arguments.console.print(plan_table(plan))
    arguments.console.print(f"written to {arguments.out}")
    return plan.to_dict()
