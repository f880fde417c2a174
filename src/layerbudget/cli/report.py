"""``layerbudget demo``, ``export`` and ``report``: what is left in a folder for people and for other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .display import expect, progress_bar, say, say_next
from .options import add, add_out, add_set, add_verb, settings


def register(subparsers: Any) -> None:
    """Add the parsers of ``demo``, ``export`` and ``report``."""
    from ..exports import EXPORTS

    p = add_verb(subparsers, "demo", run_demo)
    add_out(p, "folder of the results (default: layerbudget-demo)", default="layerbudget-demo")
    add(p, "--seed", default=0, help="seed of the draw of the text (default: 0)")
    p = add_verb(subparsers, "export", run_export)
    p.add_argument("plan", metavar="PLAN|DIR", help="plan.json, or the folder of a result that holds one")
    known = "; ".join(f"{e.name}: {e.summary}" for e in EXPORTS.all().values())
    p.add_argument("--to", metavar="FORMAT", help=f"{known} (default: by the plan's kind)")
    add_set(p, "an option of the format: method, pattern or levels of a recipe, alpha_policy or dropout of lora")
    add_out(p, "file to write (default: the format's usual name)", metavar="FILE")
    p = add_verb(subparsers, "report", run_report)
    p.add_argument("folder", metavar="DIR", help="folder with scores.json, plan.json, result.json, figures")
    add_out(p, "file to write (default: report.html)", default="report.html")


def run_demo(a: argparse.Namespace) -> dict[str, Any]:
    """Run the main job and say where the results are."""
    from ..demo import run
    from ..doctor.cost import demonstrating
    from ..models.loading import load_model
    from ..models.machine import keep_freed
    from ..report.tables import demo_table

    keep_freed()
    a.model = "demo"
    expect(a, "four plans at two targets, pruned and measured", load_model("demo"), demonstrating())
    with progress_bar(a, "demo") as progress:
        result = run.run_demo(Path(a.out), seed=a.seed, overwrite=a.overwrite, progress=progress)
    a.console.print(demo_table(result))
    saved = f"plan.json (the {result['saved']['model']} at {result['saved']['target']:.0%}, the best of the table)"
    say(
        a,
        f"{result['seconds']:.0f} s, {result['peak_memory_mib']:.0f} MiB. Results are in {a.out}: scores.json, {saved}, "
        "pruned/ (its model, a transformers checkpoint), result.json, overview.png.",
        result["verdict"],
    )
    say_next(a, "report", a.out, "-o", f"{a.out}/report.html")
    return result


def run_export(a: argparse.Namespace) -> dict[str, Any]:
    """Write the file and say how it is used."""
    from ..exports import EXPORTS, find_plan, format_for
    from ..records import check_output, write_text
    from ..storage.writing import check_apart

    plan = find_plan(a.plan)
    chosen = EXPORTS.find(a.to or format_for(plan))
    own, out = settings(a, chosen.call), a.out or chosen.file
    check_apart(out, a.plan)
    check_output(out, overwrite=a.overwrite)
    path = write_text(out, chosen.text(plan, own), overwrite=a.overwrite)
    say(a, f"The plan of {plan.kind} (rule {plan.rule}) is written to {path}. {chosen.sentence(plan, path)}".strip())
    return {"format": chosen.name, "kind": plan.kind, "output": str(path)}


def run_report(a: argparse.Namespace) -> dict[str, Any]:
    """Write the page and say where it is."""
    from ..report.page import write_report

    path = write_report(a.folder, a.out, overwrite=a.overwrite)
    say(a, f"Written to {path}.")
    return {"output": str(path)}
