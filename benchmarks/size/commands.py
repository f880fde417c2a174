"""Peak memory and processor seconds of whole commands on a real model, with their defaults, beside those of another checkout.

    python -m benchmarks.size commands MODEL --beside ../before -- --samples 8 --length 128

Every command runs in a process of its own, in turn of both checkouts; words behind ``--`` are added to each. The memory is the
largest resident size, mapped weights and libraries included. N is the size of the model's files.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.stamp import ROOT, write_section

COMMANDS = {
    "bits-rtn": "plan bits MODEL --like Q4_K_M --method rtn -o plan.json",
    "bits-weighted": "plan bits MODEL --like Q4_K_M --method weighted -o plan.json",
    "bits-gptq": "plan bits MODEL --like Q4_K_M --method gptq -o plan.json",
    "cache": "plan cache MODEL --bits 6 -o plan.json",
    "score": "score MODEL -o scores.json",
    "apply": "apply MODEL plan.json -o written",
}


def run(checkout: Path, words: list[str], folder: Path) -> tuple[float, float, str]:
    """Processor seconds and GiB at the peak of a command, and what it printed."""
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]).returncode; "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print('USED', used.ru_utime + used.ru_stime, used.ru_maxrss); sys.exit(done)"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-m", "layerbudget", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}: {done.stderr[-2000:]}")
    printed, _, used = done.stdout.rpartition("USED ")
    seconds, peak = used.split()
    return float(seconds), float(peak) / (2**30 if sys.platform == "darwin" else 2**20), printed


def main() -> None:
    """Run the commands and write a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--beside", type=Path, help="another checkout, whose figures stand first")
    words, more = sys.argv[1:], list[str]()
    if "--" in words:
        words, more = words[: words.index("--")], words[words.index("--") + 1 :]
    given = parser.parse_args(words)
    size = sum(file.stat().st_size for file in given.model.glob("*.safetensors")) / 2**30
    checkouts = [*([given.beside.resolve()] if given.beside else []), ROOT]
    rows = ["| command | processor seconds | GiB at the peak | over N |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        for name in given.commands:
            asked = [str(given.model.resolve()) if w == "MODEL" else w for w in COMMANDS[name].split()]
            asked += [] if name == "apply" else [*more, "--overwrite"]
            used = [run(checkout, asked, Path(folder)) for checkout in checkouts]
            seconds, peaks, over = (
                " -> ".join(f"{value:.{digits}f}" for value in values)
                for digits, values in (
                    (0, [s for s, *_ in used]),
                    (2, [p for _, p, _ in used]),
                    (2, [p - size for _, p, _ in used]),
                )
            )
            rows.append(f"| `{shlex.join([*COMMANDS[name].split(), *more])}` | {seconds} | {peaks} | {over} |")
    title = f"whole commands on {given.model.name}, N = {size:.2f} GiB"
    about = "Largest resident memory, mapped weights included."
    about += " The first figure is that of the checkout before." if given.beside else ""
    write_section("size", title, [about, "", *rows])


if __name__ == "__main__":
    main()
