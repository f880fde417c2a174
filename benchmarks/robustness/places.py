"""Full disks, missing rights, odd targets and two writers: what each command says, and what lies there afterwards.

    python -m benchmarks.robustness places [--out FOLDER]

A full disk is a limit on the size of files (RLIMIT_FSIZE, which fails with "File too large" where a disk fails with "No space left"), and,
where this process may mount, a file system of 48 KiB. Rights do not bind root: what may not be written to is a read-only mount and a
folder marked immutable (`chattr +i`), where this process may make them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.robustness.kill import DATA, TUNE, prepare
from benchmarks.robustness.small import run
from benchmarks.stamp import RESULTS, write_section

COMMANDS = {
    "score": ["score", "model", *DATA, "-o", "OUT"],
    "score --resume": ["score", "model", *DATA, "--resume", "OUT.stage", "-o", "OUT"],
    "plan sparsity of a model": ["plan", "sparsity", "model", *DATA, "-o", "OUT"],
    "plan sparsity of scores": ["plan", "sparsity", "scores.json", "-o", "OUT"],
    "apply, sparsity": ["apply", "model", "plan.json", *DATA, "-o", "OUT"],
    "apply --resume": ["apply", "model", "plan.json", *DATA, "--resume", "OUT.parts", "-o", "OUT"],
    "apply, shapes": ["apply", "model", "smaller.json", *DATA, "-o", "OUT"],
    "finetune": ["finetune", "model", "ranks.json", *TUNE, "-o", "OUT"],
    "evaluate": ["evaluate", "model", "--perplexity", "text.txt", "--length", "16", "--quiet", "-o", "OUT"],
    "plan shapes": ["plan", "shapes", "model", *DATA, "--save", "10% flops", "--even", "-o", "OUT"],
    "apply, bits": ["apply", "model", "bits.json", "--quiet", "-o", "OUT"],
    "compare": [
        "compare",
        "model",
        "--scores",
        "gradient-norm",
        "--sparsity",
        "0.5",
        "--data",
        "text.txt",
        "--samples",
        "4",
        "--length",
        "16",
        "--windows",
        "6",
        "--quiet",
        "-o",
        "OUT",
    ],
    "report": ["report", "results", "-o", "OUT"],
}


def forked(words: list[str], folder: Path, limit: int | None = None) -> dict:
    """Run a command in a forked process, where files may not grow beyond ``limit`` bytes."""
    ends, told = os.pipe()
    process = os.fork()
    if process == 0:
        os.chdir(folder)
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        done = run(words, 120)
        lines = [line.strip() for line in done.said.replace("\n", " ").split("layerbudget: ") if line.strip()]
        record = {"code": done.code, "trouble": done.trouble, "said": lines[-1][:160] if done.code and lines else ""}
        os.write(told, json.dumps(record).encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(ends) as f:
        record = json.loads(f.read() or '{"code": null, "trouble": "died", "said": ""}')
    os.waitpid(process, 0)
    return record


def left(folder: Path, name: str) -> str:
    """What begins with the output's name, or is temporary."""
    found = sorted(p.name for p in folder.iterdir() if p.name.startswith(name) or p.name.endswith(".layerbudget"))
    return ", ".join(found) or "nothing"


@contextlib.contextmanager
def special(folder: Path) -> Iterator[dict[str, Path]]:
    """Places that take nothing, or little: those that this process may make."""
    made: dict[str, Path] = {}
    wanted = {
        "a full disk of 48 KiB": ("small", [["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", "PLACE"]], [["umount", "PLACE"]]),
        "a read-only mount": (
            "locked", [["mount", "--bind", "PLACE", "PLACE"], ["mount", "-o", "remount,ro,bind", "PLACE"]], [["umount", "PLACE"]],
        ),
        "an immutable folder": ("immutable", [["chattr", "+i", "PLACE"]], [["chattr", "-i", "PLACE"]]),
    }  # fmt: skip
    undo = []
    try:
        for weather, (name, steps, back) in wanted.items():
            place = folder / name
            place.mkdir()
            undo += [[w.replace("PLACE", str(place)) for w in words] for words in back]
            if all(command([w.replace("PLACE", str(place)) for w in words]) for words in steps):
                made[weather] = place
        yield made
    finally:
        for words in undo:
            command(words)


def command(words: list[str]) -> bool:
    """Run a program of the system; whether it could."""
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def cases(folder: Path, places: dict[str, Path]) -> list[dict]:
    """Every command under every weather."""
    rows = []
    for k, (name, words) in enumerate(COMMANDS.items()):
        for limit in (2_000, 40_000):
            out = f"full-{k}-{limit}"
            done = forked([w.replace("OUT", out) for w in words], folder, limit)
            rows.append({"command": name, "weather": f"files of at most {limit:,} bytes", **done, "left": left(folder, out)})
        for weather, out in odd(folder, k).items():
            done = forked([w.replace("OUT", out) for w in words], folder)
            rows.append({"command": name, "weather": weather, **done, "left": ""})
        for weather, place in places.items():
            out = f"out-{k}"
            done = forked([w.replace("OUT", f"{place.name}/{out}") for w in words], folder)
            rows.append({"command": name, "weather": weather, **done, "left": left(place, out)})
            if weather.startswith("a full"):
                for entry in place.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        rows.append({"command": name, "weather": "two writers", **two(words, folder, f"two-{k}")})
    return rows


def odd(folder: Path, k: int) -> dict[str, str]:
    """Targets that are no plain new names."""
    real = folder / f"real-{k}"
    real.mkdir()
    (folder / f"link-{k}").symlink_to(real)
    (folder / f"circle-{k}").symlink_to(folder / f"circle-{k}")
    os.mkfifo(folder / f"pipe-{k}")
    return {
        "a link to an empty folder": f"link-{k}", "a link to itself": f"circle-{k}", "a pipe": f"pipe-{k}", "/dev/null": "/dev/null",
        "below a file": f"text.txt/{k}", "a read-only place": f"/proc/none-{k}", "the working directory": ".", "a name of 300 letters": "n" * 300,
    }  # fmt: skip


def two(words: list[str], folder: Path, out: str) -> dict:
    """The same command twice at once."""
    processes = []
    for i in range(2):
        process = os.fork()
        if process == 0:
            os.chdir(folder)
            done = run([w.replace("OUT", out) for w in words], 120)
            (folder / f"{out}.said{i}").write_text(json.dumps([done.code, done.trouble, done.said[-160:]]))
            os._exit(0)
        processes.append(process)
    for process in processes:
        os.waitpid(process, 0)
    said = [json.loads((folder / f"{out}.said{i}").read_text()) for i in range(2)]
    for i in range(2):
        (folder / f"{out}.said{i}").unlink()
    trouble = next((s[1] for s in said if s[1]), None)
    return {"code": "/".join(str(s[0]) for s in said), "trouble": trouble, "said": "", "left": left(folder, out)}


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    import peft  # noqa: F401  (the children are forked: libraries are loaded once)
    import transformers

    import layerbudget.finetuning.finetune  # noqa: F401

    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as base:
        prepare(Path(base))
        with special(Path(base)) as places:
            rows = cases(Path(base), places)
    for row in rows:
        row["said"] = row["said"].replace(base, "...")
    bad = [r for r in rows if r["trouble"] or ".layerbudget" in r["left"]]
    write_section("robustness", "Disks, rights, targets, two writers", table(rows, bad), out=a.out)


def table(rows: list[dict], bad: list[dict]) -> str:
    """The cases as Markdown."""
    lines = ["| command | weather | exit code | what is said | what lies there |", "|---|---|---:|---|---|"]
    for r in rows:
        said = " ".join((r["trouble"] or r["said"]).replace("|", "/").split())
        lines.append(f"| {r['command']} | {r['weather']} | {r['code']} | {said} | {r['left']} |")
    head = f"{len(rows)} cases; {len(bad)} ended with a traceback, a hang, or a temporary file left behind."
    return f"{head}\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
