"""Time from a clone to a first result: clone, install, demo, then a score and a plan of one's own.

    python -m benchmarks.robustness first_result [REPOSITORY] [--keep FOLDER]

Every stage says its wall clock and the processor seconds of its own, which other work on the machine does not change much.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.stamp import RESULTS, ROOT, write_section

STAGES = {
    "`make install`": "make install",
    "`make demo`: the main job, a plan, a pruned model, a verdict": "make demo",
    "`layerbudget score demo`": ".venv/bin/layerbudget score demo -o scores.json",
    "`layerbudget plan sparsity scores.json --sparsity 0.5`": ".venv/bin/layerbudget plan sparsity scores.json --sparsity 0.5 -o plan.json",
}


def stage(command: str, folder: Path) -> tuple[float, float]:
    """Seconds and processor seconds of a command; its last lines end the run where it fails."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit("\n".join([f"{command} failed:", *done.stdout.splitlines()[-20:]]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the stages and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--keep", type=Path, help="keep the folder that the demo leaves here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "clone"
        rows = {"`git clone`": stage(f"git clone -q {a.repository.resolve()} {clone}", Path(place))}
        for name, command in STAGES.items():
            rows[name] = stage(command, clone)
        if a.keep:
            shutil.copytree(clone / "layerbudget-demo", a.keep)
    rows["together"] = tuple(map(sum, zip(*rows.values(), strict=True)))
    lines = ["| stage | seconds | processor seconds |", "|---|---:|---:|"]
    lines += [f"| {name} | {seconds:.0f} | {used:.0f} |" for name, (seconds, used) in rows.items()]
    write_section("robustness", "From a clone to a first result", lines, out=a.out)


if __name__ == "__main__":
    main()
