"""Run experiments at small scale, keep what they leave, and note run time, finding and shape for ``python -m paper list``.

python benchmarks/reproduce_small.py NAME ... [--data-dir DIR] [--model MODEL] [--paper mistral|gemma]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paper.catalogue import EXPERIMENTS, find_experiment
from paper.outcome import leave

from layerbudget.records import dumps, write_text

HERE = Path(__file__).parent
NOTES = HERE.parent / "paper/data/small.json"


def main() -> None:
    """Run, keep, note."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[e.name for e in EXPERIMENTS])
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--paper", choices=("mistral", "gemma"), default="mistral")
    parser.add_argument("--cells", type=Path, default=Path("reproduce-cells"), help="finished cells, for a second start")
    a = parser.parse_args()
    for name in a.names:
        entry = find_experiment(name)
        own = {"model": a.model, "data_dir": a.data_dir, "paper": a.paper}
        given = {k: v for k, v in own.items() if k in entry.reads}
        key = name + (" --paper gemma" if "paper" in entry.reads and a.paper == "gemma" else "")
        found = entry.open()(scale="small", out=a.cells / name, progress=None, **given)
        leave(found, HERE / "results" / "reproduce" / key.replace(" --paper ", "-"), overwrite=True)
        notes = json.loads(NOTES.read_text())
        notes["experiments"][key] = {
            "items": list(found.items), "seconds": round(found.seconds, 1), "finding": found.finding, "shape": found.line,
        }  # fmt: skip
        order = [name for e in EXPERIMENTS for name in (e.name, e.name + " --paper gemma")]
        notes["experiments"] = {k: notes["experiments"][k] for k in order if k in notes["experiments"]}
        write_text(NOTES, dumps(notes), overwrite=True)


if __name__ == "__main__":
    main()
