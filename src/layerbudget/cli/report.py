"""``layerbudget demo``, ``export`` and ``report``: what is left in a folder for people and for other tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..registry import Option, options_of
from ..requests import Request, option, out_option
from .session import Session


@dataclasses.dataclass(kw_only=True)
class DemoRequest(Request):
    """Run the main job on the embedded model: score, plan, prune, evaluate, and compare with uniform."""

    command: ClassVar[str] = "demo"
    unread: ClassVar[tuple[str, ...]] = ("table",)

    out: str = out_option("folder of the results (default: layerbudget-demo)", metavar="DIR", default="layerbudget-demo")
    seed: int = option(0, help="seed of the draw of the text (default: 0)")

    @property
    def model(self) -> str:
        """Name of the embedded model."""
        return "demo"


def _formats() -> str:
    from ..exports import EXPORTS

    return f"{'; '.join(f'{e.name}: {e.summary}' for e in EXPORTS.all().values())} (default: by the plan's kind)"


@dataclasses.dataclass(kw_only=True)
class ExportRequest(Request):
    """Write a plan in the files of other tools: LoraConfig, llm-compressor, CSV, and others."""

    command: ClassVar[str] = "export"
    unread: ClassVar[tuple[str, ...]] = ("table", "dry_run")

    plan: str = option(metavar="PLAN|DIR", role="reads", help="plan.json, or the folder of a result that holds one")
    to: str | None = option(None, metavar="FORMAT", help=_formats)
    out: str | None = out_option("file to write (default: the format's usual name)")

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the format that is named, or of the usual one of the plan; of all where there is no plan."""
        from ..exports import EXPORTS, find_export, find_plan

        name, plan = typed.get("to"), typed.get("", "")
        if plan and Path(plan).exists():
            formats = [find_export(name, find_plan(plan))]
        else:
            formats = [EXPORTS.find(each) for each in (EXPORTS.names() if name is None else (name,))]
        return {n: option for each in formats for n, option in options_of(each.call).items()}


@dataclasses.dataclass(kw_only=True)
class ReportRequest(Request):
    """Write one HTML page of a results folder."""

    command: ClassVar[str] = "report"
    unread: ClassVar[tuple[str, ...]] = ("table", "dry_run")

    folder: str = option(metavar="DIR", role="reads", help="folder with scores.json, plan.json, result.json, figures")
    out: str = out_option("file to write (default: report.html)", default="report.html")


def run_demo(session: Session) -> dict[str, Any]:
    """Run the main job and say where the results are."""
    from ..demo import run
    from ..diagnosis.verbs import demonstrating
    from ..models.loading import load_model
    from ..models.machine import keep_freed
    from ..reporting.tables import demo_table

    keep_freed()
    request: DemoRequest = session.request
    session.expect("four plans at two targets, pruned and measured", load_model("demo"), demonstrating())
    with session.progress("demo") as progress:
        result = run.run_demo(Path(request.out), seed=request.seed, overwrite=request.overwrite, progress=progress)
    session.console.print(demo_table(result))
    saved = f"plan.json (the {result['saved']['model']} at {result['saved']['target']:.0%}, the best of the table)"
    session.say(
        f"{result['seconds']:.0f} s, {result['peak_memory_mib']:.0f} MiB. Results are in {request.out}: scores.json, {saved}, "
        "pruned/ (its model, a transformers checkpoint), result.json, overview.png.",
        result["verdict"],
    )
    session.follow("report", request.out, "-o", f"{request.out}/report.html")
    return result


def run_export(session: Session) -> dict[str, Any]:
    """Write the file and say how it is used."""
    from ..exports import find_export, find_plan
    from ..storage.writing import check_apart, check_output, write_text

    request: ExportRequest = session.request
    plan = find_plan(request.plan)
    chosen = find_export(request.to, plan)
    out = request.out or chosen.file
    check_apart(out, request.plan)
    check_output(out, overwrite=request.overwrite)
    path = write_text(out, chosen.text(plan, request.more), overwrite=request.overwrite)
    session.say(f"The plan of {plan.kind} (rule {plan.rule}) is written to {path}. {chosen.sentence(plan, path)}".strip())
    return {"format": chosen.name, "kind": plan.kind, "output": str(path)}


def run_report(session: Session) -> dict[str, Any]:
    """Write the page and say where it is."""
    from ..reporting.page import write_report

    request: ReportRequest = session.request
    path = write_report(request.folder, request.out, overwrite=request.overwrite)
    session.say(f"Written to {path}.")
    return {"output": str(path)}
