"""60,000 blocks through the command line: seconds and peak memory of every verb that reads or writes plans.

    python -m benchmarks.robustness large --blocks 60000

That is every matrix of every expert of the largest models. Scores come as a CSV and a JSON table with shapes, and as a
scores file. Every command is a process of its own; what it took is what the system says of it (`wait4`).
"""

import argparse
import csv
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.stamp import RESULTS, write_section

from layerbudget.canonical import digest
from layerbudget.plan import Plan
from layerbudget.sensitivity.importing import COLUMNS, scores_with_shapes

LIMIT_S, LIMIT_MB = 10.0, 1024.0


def write_inputs(folder: Path, count: int) -> dict[str, Path]:
    """The same scores in every form."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i // 256}.mlp.experts.{i % 256}.up_proj" for i in range(count)]
    gain, sides = rng.lognormal(size=count).tolist(), rng.choice([1024, 2048, 4096, 11008], size=(count, 2)).tolist()
    rows = [(n, g, a, b) for n, g, (a, b) in zip(names, gain, sides, strict=True)]
    with (folder / "scores.csv").open("w", newline="") as f:
        csv.writer(f).writerows([COLUMNS, *rows])
    (folder / "table.json").write_text(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows]))
    scores_with_shapes(folder / "scores.csv").save(folder / "scores.json")
    kinds = ("scores.csv", "table.json", "scores.json")
    return {name: folder / name for name in kinds}


def all_same(folder: Path) -> bool:
    """Whether the plans of one kind are the same, block by block, whatever file their scores came from."""
    found: dict[str, set[str]] = {}
    for path in folder.glob("*.plan.json"):
        found.setdefault(path.name.split("-")[0], set()).add(digest([b.to_dict() for b in Plan.load(path).blocks]))
    return all(len(digests) == 1 for digests in found.values())


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a process of its own: the system counts the parent's memory as the child's until it starts a program."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, given)


def measured(folder: Path, words: list[str]) -> dict[str, float | int | str]:
    """Run a command; seconds, processor seconds, MB, and what it printed."""
    start = time.perf_counter()
    with (folder / "printed").open("wb") as out, (folder / "said").open("wb") as err:
        process = os.posix_spawn(
            sys.executable, [sys.executable, "-m", "layerbudget", *words], os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, err.fileno(), 2)],
        )  # fmt: skip
        _, status, used = os.wait4(process, 0)
    wall = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(words)}: {(folder / 'said').read_text()[-2000:]}")
    return {
        "seconds": wall, "processor": used.ru_utime + used.ru_stime, "megabytes": used.ru_maxrss / 1024,
        "printed_megabytes": (folder / "printed").stat().st_size / 1e6,
    }  # fmt: skip


def commands(inputs: dict[str, Path], folder: Path) -> dict[str, list[str]]:
    """What is run, by what is said of it."""
    found: dict[str, list[str]] = {}
    for name, path in inputs.items():
        for kind, budget in (("sparsity", ["--sparsity", "0.5"]), ("ranks", ["--mean-rank", "8"])):
            plan = str(folder / f"{kind}-{name}.plan.json")
            found[f"plan {kind} {name} --json -o plan.json"] = ["plan", kind, str(path), *budget, "--json", "-o", plan]
    found["plan sparsity scores.csv (a table for the terminal)"] = ["plan", "sparsity", str(inputs["scores.csv"])]
    plans = [str(folder / f"sparsity-{name}.plan.json") for name in ("scores.csv", "scores.json")]
    found["explain plan.json --json"] = ["explain", plans[0], "--json"]
    found["explain diff plan.json plan.json"] = ["explain", "diff", *plans]
    found["export plan.json --to csv"] = ["export", plans[0], "--to", "csv", "-o", str(folder / "plan.csv")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        inputs = apart(write_inputs, folder, a.blocks)
        sizes = {name: path.stat().st_size / 1e6 for name, path in inputs.items()}
        rows = []
        for said, words in commands(inputs, folder).items():
            load = os.getloadavg()[0]
            rows.append({"command": said, **measured(folder, words), "load": load})
            print(rows[-1], flush=True)
        same = apart(all_same, folder)
        sizes["plan.json"] = (folder / "sparsity-scores.csv.plan.json").stat().st_size / 1e6
    write_section("robustness", f"{a.blocks:,} blocks through the command line", table(rows, sizes, same), out=a.out)


def table(rows: list[dict], sizes: dict[str, float], same: bool) -> list[str]:
    """The result as Markdown."""
    lines = [
        "Wall time on two cores (load: runnable processes when it began), processor "
        "time of the command alone, one thread, and its largest resident memory. The bar is "
        f"{LIMIT_S:g} s and {LIMIT_MB:g} MB for `plan sparsity` and `plan ranks`.", "",
        "| command | wall s | processor s | peak MB | load |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| `{x['command']}` | {x['seconds']:.1f} | {x['processor']:.1f} | {x['megabytes']:,.0f} | {x['load']:.1f} |"
        for x in rows
    ]
    files = ", ".join(f"{name} {size:,.0f} MB" for name, size in sizes.items())
    said = "The blocks of the plans from all files have one digest." if same else "PLANS DIFFER."
    return [*lines, "", f"Files: {files}. {said}"]


if __name__ == "__main__":
    main()
