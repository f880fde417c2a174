"""The paper's tables and figures at small scale: a section for every experiment, and what ``python -m paper list`` says of it.

    python -m benchmarks.paper_tables [NAME ...] [--data-dir DIR] [--model MODEL] [--paper mistral|gemma]

Without names all experiments run. Those on tasks need ``--data-dir``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.stamp import RESULTS, ROOT, write_section

NOTES = ROOT / "paper" / "data" / "small.json"


def page(outcome: Any) -> list[str]:
    """Finding, shape and table of an experiment."""
    columns = list(outcome.rows[0])
    lines = [f"{', '.join(outcome.items)} of the paper. Found: {outcome.finding}.", "", f"Shape: {outcome.line}", ""]
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in outcome.rows:
        cells = (f"{v:.6g}" if isinstance(v, float) else "" if v is None else str(v) for v in (row.get(c) for c in columns))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def note(key: str, outcome: Any) -> None:
    """Keep what ``python -m paper list`` shows."""
    from paper.catalogue import EXPERIMENTS

    from layerbudget.canonical import dumps
    from layerbudget.storage.writing import write_text

    notes = json.loads(NOTES.read_text())
    notes["experiments"][key] = {
        "items": list(outcome.items), "seconds": round(outcome.seconds, 1), "finding": outcome.finding, "shape": outcome.line,
    }  # fmt: skip
    order = [name for e in EXPERIMENTS for name in (e.name, e.name + " --paper gemma")]
    notes["experiments"] = {k: notes["experiments"][k] for k in order if k in notes["experiments"]}
    write_text(NOTES, dumps(notes), overwrite=True)


def main() -> None:
    """Run, keep, note."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--paper", choices=("mistral", "gemma"), default="mistral")
    parser.add_argument("--cells", type=Path, default=Path("reproduce-cells"), help="finished cells, for a second start")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    from paper.catalogue import EXPERIMENTS, find_experiment

    for name in a.names or [e.name for e in EXPERIMENTS]:
        entry = find_experiment(name)
        options = {k: v for k, v in (("model", a.model), ("data_dir", a.data_dir), ("paper", a.paper)) if k in entry.reads}
        key = name + (" --paper gemma" if "paper" in entry.reads and a.paper == "gemma" else "")
        outcome = entry.open()(scale="small", out=a.cells / name, progress=None, **options)
        write_section("paper", key, page(outcome), out=a.out, peers=("peft", "scipy"))
        if a.out == RESULTS:
            note(key, outcome)


if __name__ == "__main__":
    main()
