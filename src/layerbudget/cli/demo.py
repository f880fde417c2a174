"""``layerbudget demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .progress import progress_bar


def register(subparsers: Any) -> None:
    """Add the parser of ``demo``."""
    parser = subparsers.add_parser("demo")
    parser.add_argument("-o", "--out", default="layerbudget-demo", help="folder of the results (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", metavar="DIR", help="keep scores and measured models' figures here until all are saved")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the main job and say where the results are."""
    from ..demo.run import run_demo
    from ..report.tables import demo_table

    _expect(arguments)
    with progress_bar(arguments, "demo") as progress:
        result = run_demo(
            Path(arguments.out), seed=arguments.seed, overwrite=arguments.overwrite, resume=arguments.resume, progress=progress
        )
    arguments.console.print(demo_table(result))
    arguments.console.print(result["verdict"])
    arguments.console.print(
        f"{result['seconds']:.0f} s, {result['peak_memory_mib']:.0f} MiB. Results are in {arguments.out}: scores.json, "
        f"plan.json (the {result['saved']['model']} at {result['saved']['target']:.0%}, the best of the table), pruned/ "
        "(its model, a transformers checkpoint), result.json, overview.png."
    )
    return result


def _expect(arguments: argparse.Namespace) -> None:
    """Say what the demo will cost on this machine."""
    from ..doctor.cost import demonstrating
    from ..models.loading import load_model
    from .outlook import expect

    arguments.model = "demo"
    expect(arguments, "four plans at two targets, pruned and measured", load_model("demo"), demonstrating)
