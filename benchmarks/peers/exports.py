"""Exported plans, read by the tools that they are for: what every planned module gets from the tool itself.

    LAYERBUDGET_TOOLS=FOLDER:FOLDER python -m benchmarks.peers exports [--tools torchao mlx ...]

A dense model and a mixture with random weights are planned and written into a folder; every export is given to the tool's own
released package. Some tools change the model on a processor, and what they made is read back (*executed*); of others the own
parser and matcher say what every module gets (*parsed*). The table has one row for each tool and model: a module counts if the
tool gave it what the plan says, and *beside the plan* are other modules that it changed.

LAYERBUDGET_TOOLS names folders of packages, separated as in PATH; CONTRIBUTING says how they are made.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import tools_of_bits, tools_of_cache, tools_of_ranks
from benchmarks.peers.exported import MODELS, make_model
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb

TOOLS = {**tools_of_bits.TOOLS, **tools_of_cache.TOOLS, **tools_of_ranks.TOOLS}
VARIABLE = "LAYERBUDGET_TOOLS"


def packages() -> list[str]:
    """Folders of packages that the environment names."""
    return [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


def version(tool: str) -> str | None:
    """The version of a tool's package, None where there is none; GPTQModel is read from its source, which has no metadata."""
    name = TOOLS[tool].package
    if name == "gptqmodel":
        files = [Path(folder) / name / "version.py" for folder in (*packages(), *sys.path)]
        lines = [line for file in files if file.is_file() for line in file.read_text().splitlines() if "__version__ =" in line]
        return lines[0].split('"')[1] if lines else None
    found = importlib.metadata.distributions(name=name, path=[*sys.path, *packages()])
    return next((each.version for each in found), None)


def measure(tool: str, kind: str) -> dict[str, Any]:
    """Give a plan for a model to a tool; returns how many modules there are in the plan, and how many got what it says."""
    if tool != "gptqmodel":
        sys.modules["gptqmodel"] = None  # type: ignore[assignment]  # PEFT would use it wherever it finds it
    model = make_model(kind)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder)
        lb.load_tokenizer("demo").save_pretrained(folder)
        planned, found = TOOLS[tool].run(folder, kind, TOOLS[tool].plan(copy.deepcopy(model)))
    return {
        "tool": tool, "model": kind, "planned": len(planned), "same": sum(found.get(n) == own for n, own in planned.items()),
        "different": len(set(planned.values())), "beside": sorted(found.keys() - planned.keys()),
        "wrong": {n: (own, found.get(n)) for n, own in planned.items() if found.get(n) != own},
    }  # fmt: skip


def row(tool: str, kind: str) -> dict[str, Any]:
    """Measure in a process of its own: the tools change PyTorch and transformers when they are imported."""
    words = [sys.executable, "-m", "benchmarks.peers", "exports", "--one", tool, kind]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tool"')]
    if not lines:
        raise SystemExit(f"{tool}, {kind}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(lines[-1]))


def table(tools: list[str]) -> list[str]:
    """A row for each tool and model, and below it what was run of each tool."""
    head = ("tool", "version", "how", "model", "modules in the plan", "that got it", "different", "beside the plan")
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---:|---:|---:|---:|"]
    for name in tools:
        tool, number = TOOLS[name], version(name)
        for kind in MODELS:
            first = f"| {name} ({tool.gives}) |"
            if number is None:
                lines.append(f"{first} not here | not run | {kind} | | | | |")
            elif kind in tool.refused:
                lines.append(f"{first} {number} | refused: {tool.refused[kind]} | {kind} | | | | |")
            else:
                r = row(name, kind)
                figures = (r["planned"], r["same"], r["different"], len(r["beside"]))
                lines.append(f"{first} {number} | {tool.how} | {kind} | {' | '.join(map(str, figures))} |")
    return [*lines, "", *notes(tools)]


def notes(tools: list[str]) -> list[str]:
    """What was run of each tool, and what was not."""
    said = [(name, " ".join((TOOLS[name].run.__doc__ or "").split())) for name in tools]
    return ["What was run:", "", *(f"- `{name}`: {about}" for name, about in said)]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, metavar="TOOL", default=list(TOOLS), help=", ".join(TOOLS))
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "MODEL"), help="measure one, print it as JSON and end")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    sys.path.extend(packages())
    if given.one:
        print("\n" + json.dumps(measure(*given.one)), flush=True)
        return
    peers = sorted({TOOLS[name].package for name in given.tools})
    write_section("peers", "Exports, read by their tools", table(given.tools), out=given.out, peers=peers)
