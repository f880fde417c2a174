"""A hundred kills: every verb ended with SIGKILL at a random moment and run again gives what an undisturbed run gives.

    python -m benchmarks.robustness kill [--kills 100] [--seed 0] [--out FOLDER]

Every command runs once undisturbed; its result is hashed. Then it is started again and killed: after a random time, or at a random
change of the file system (a rename, a removal, a sync), so that saves and checkpoints are hit too. It is run again with what
resumes it, as often as it takes, and the result, the user's files in its folders, and what lies around are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.robustness.small import make_model, make_task, say, text
from benchmarks.stamp import RESULTS, write_section
from tests.killing import count_changes

DATA = ["--data", "text.txt", "--samples", "8", "--length", "16", "--batch-size", "2", "--quiet"]
TUNE = ["--task", "task.jsonl", "--train-rows", "16", "--epochs", "3", "--batch", "8", "--quiet"]
STRAY = 1 << 20  # bytes of what may lie around after the next run


@dataclasses.dataclass
class Verb:
    """One command: how it is run, how it is run again, and where its result lies."""

    first: list[str]
    again: list[str]
    result: str
    mine: tuple[str, ...] = ()  # files of the user's, in folders that the command writes to
    before: tuple[list[str], ...] = ()  # commands whose results lie there already


DEMO = {"SAMPLES": 6, "LENGTH": 24, "WINDOWS": 6, "MEASURED": 3, "PASSES": 8, "TARGETS": (0.5,)}
KEPT = ["--resume", "parts"]
PRUNE = ["apply", "model", "plan.json", "--method", "sparsegpt", *DATA, "--resume", "parts", "-o", "out"]
VERBS = {
    "score": Verb(["score", "model", *DATA, "--resume", "stage", "-o", "out.json"], ["--overwrite"], "out.json", ("stage/notes",)),
    "score, kfac": Verb(
        ["score", "model", *DATA, "--estimator", "kfac", "--walk", "layers", "--resume", "stage", "-o", "out.json"],
        ["--overwrite"], "out.json", ("stage/notes",),
    ),
    "plan sparsity": Verb(["plan", "sparsity", "model", *DATA, "--resume", "parts", "-o", "out.json"], ["--overwrite"], "out.json", ("parts/notes",)),
    "plan shapes": Verb(
        ["plan", "shapes", "model", *DATA, "--save", "10% flops", "--even", "-o", "out.json"], ["--overwrite"], "out.json",
    ),
    "apply, bits": Verb(
        ["apply", "model", "bits.json", "--quiet", "--resume", "parts", "-o", "out"], ["--overwrite"], "out", ("parts/notes",)
    ),
    "compare": Verb(
        ["compare", "model", "--scores", "fisher-gram,gradient-norm", "--sparsity", "0.5", "--data", "text.txt", "--samples", "4", "--length",
         "16", "--windows", "6", "--quiet", "-o", "out"], ["--overwrite"], "out", ("out/notes",),
    ),
    "demo": Verb(["demo", "--out", "out", "--quiet"], ["--overwrite"], "out"),
    "plan": Verb(["plan", "sparsity", "scores.json", "-o", "out.json"], ["--overwrite"], "out.json"),
    "apply": Verb(PRUNE, ["--overwrite"], "out", ("parts/notes",)),
    "apply, overwriting": Verb(
        [*PRUNE, "--overwrite"], [], "out", ("parts/notes", "out/notes", "out/sub/notes"),
        (["apply", "model", "plan.json", "--method", "magnitude", "-o", "out"],),
    ),
    "apply, smaller": Verb(["apply", "model", "smaller.json", *DATA, "-o", "out"], ["--overwrite"], "out"),
    "finetune": Verb(["finetune", "model", "ranks.json", *TUNE, *KEPT, "-o", "out"], ["--overwrite"], "out", ("parts/notes",)),
    "finetune, overwriting": Verb(
        ["finetune", "model", "ranks.json", *TUNE, "--overwrite", "-o", "out"], [], "out", ("out/notes", "out/seed-0/notes"),
        (["finetune", "model", "ranks.json", *TUNE, "--lr", "0.5", "--overwrite", "-o", "out"],),
    ),
    "evaluate": Verb(["evaluate", "model", "--perplexity", "text.txt", "--length", "16", "--quiet", "-o", "out.json"], ["--overwrite"], "out.json"),
    "report": Verb(["report", "results", "-o", "out.html"], ["--overwrite"], "out.html"),
}  # fmt: skip


def prepare(folder: Path) -> None:
    """A model, a text, a task, scores and plans."""
    make_model(folder / "model")
    (folder / "text.txt").write_text(text())
    make_task(folder / "task.jsonl", rows=40)
    for words in (
        ["score", "model", *DATA, "-o", "scores.json"],
        ["plan", "sparsity", "scores.json", "-o", "plan.json"],
        ["plan", "ranks", "scores.json", "--mean-rank", "3", "-o", "ranks.json"],
        ["plan", "shapes", "model", *DATA, "--save", "10% flops", "--even", "-o", "smaller.json"],
        [
            "plan",
            "bits",
            "model",
            *DATA,
            "--bits",
            "5",
            "--group",
            "16",
            "--draws",
            "1",
            "--check",
            "2",
            "-o",
            "bits.json",
        ],
    ):
        if child(words, folder, None)[0] != 0:
            raise SystemExit(f"{' '.join(words)} failed")
    (folder / "results").mkdir()
    for name in ("scores.json", "plan.json"):
        shutil.copy(folder / name, folder / "results" / name)


def child(words: list[str], folder: Path, kill: tuple[str, float] | None) -> tuple[int, float, int]:
    """Run a command in a forked process that may be killed: ``("time", seconds)`` or ``("step", n)``.

    Returns:
        Exit code (negative: the signal), seconds, and how many changes of the file system it made.
    """
    began = time.perf_counter()
    ends, told = os.pipe()
    process = os.fork()
    if process == 0:
        _work(words, folder, told, int(kill[1]) if kill and kill[0] == "step" else 0)
    os.close(told)
    if kill and kill[0] == "time":
        time.sleep(kill[1])
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with os.fdopen(ends) as f:
        steps = f.read()
    return code, time.perf_counter() - began, int(steps or 0)


def _work(words: list[str], folder: Path, told: int, step: int) -> None:
    """The child: count changes of the file system, and die at one of them."""
    import torch

    count = count_changes(step)
    torch.set_num_threads(1)
    os.chdir(folder)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from layerbudget.cli import main

    if words[0] == "demo":  # the same job on less text
        from layerbudget.demo import run as demo

        for name, value in DEMO.items():
            setattr(demo, name, value)
    code = 3
    try:
        code = main(words)
    finally:
        os.write(told, str(count[0]).encode())
        os._exit(code)


_TIMES = ("seconds", "forwards", "peak_memory_mib", "sequences_spent", "passes_spent")


def plain(value):
    """A record without what differs from run to run: how long it took, and how much was left to do."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in _TIMES}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return re.sub(r" \d+ measurements? (was|were) there from an earlier run\.", "", value) if isinstance(value, str) else value


def digest(path: Path, mine: tuple[str, ...]) -> str:
    """Hash of a result: every file but checkpoints, manifests and the user's own."""
    found = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    for file in files:
        name = file.relative_to(path.parent).as_posix()
        if "cells" in file.parts:  # the checksum in its name counts the seconds
            name = name.split(".")[0]
        if name in mine or "checkpoints/" in name or file.name == "manifest.json":
            continue
        content = file.read_bytes()
        if file.suffix == ".json":
            content = json.dumps(plain(json.loads(content)), sort_keys=True).encode()
        found.update(name.encode() + b"\0" + content)
    return found.hexdigest()[:16]


def start(sound: Path, work: Path, verb: Verb) -> None:
    """A fresh folder with the user's files and older results in place."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sound, work)
    for words in verb.before:
        code, _, _ = child(words, work, None)
        if code != 0:
            raise SystemExit(f"{' '.join(words)} ended with {code}")
    for name in verb.mine:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("mine")


def strays(work: Path) -> int:
    """Bytes below names that begin with a dot."""
    found = {f for f in work.rglob("*") if f.is_file() and any(p.startswith(".") for p in f.relative_to(work).parts)}
    return sum(f.stat().st_size for f in found)


def one_kill(name: str, verb: Verb, truth: dict, rng: random.Random, sound: Path, work: Path) -> dict:
    """Kill a command once or twice, run it to its end, and compare."""
    start(sound, work, verb)
    row = {"verb": name, "kills": [], "trouble": None}
    words = verb.first
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.5:
            kill = ("time", rng.uniform(0.02, 0.98) * truth["seconds"])
        else:
            kill = ("step", rng.randint(1, max(1, truth["steps"])))
        code, _, _ = child(words, work, kill)
        row["kills"].append([*kill, code])
        if code != -signal.SIGKILL:
            break
        words = again(verb, work)
    if code == -signal.SIGKILL:
        code, row["seconds"], _ = child(words, work, None)
    row["code"] = code
    if code != 0:
        row["trouble"] = f"ended with {code}: {(work / 'log.txt').read_text()[-400:]}"
    elif digest(work / verb.result, verb.mine) != truth["digest"]:
        row["trouble"] = "another result"
    elif any(not (work / m).is_file() or (work / m).read_text() != "mine" for m in verb.mine):
        row["trouble"] = "a file of the user's is gone"
    elif strays(work) > STRAY or [f for f in work.rglob("*.layerbudget") if "stage" not in f.parts]:
        row["trouble"] = f"{strays(work)} bytes lie around: {[str(f.relative_to(work)) for f in work.rglob('.*')][:5]}"
    return row


def again(verb: Verb, work: Path) -> list[str]:
    """The command that goes on: an output that exists is replaced, where a kill came after it was written."""
    if verb.again == ["--overwrite"] and not (work / verb.result).exists():
        return verb.first
    return [*verb.first, *[w for w in verb.again if w not in verb.first]]


def main() -> None:
    """Run the kills and write the table."""
    run_kills(__doc__, 100, VERBS, "kills", (prepare, undisturbed, one_kill, table))


def run_kills(description: str | None, kills: int, verbs: dict[str, Verb], title: str, steps: tuple[Callable, ...]) -> None:
    """Run every verb undisturbed and then killed, and write the table.

    Args:
        description: What ``--help`` says.
        kills: How many without ``--kills``.
        verbs: The commands, in turn.
        title: The title of the section, behind the number of kills.
        steps: What prepares a folder, runs a verb undisturbed, runs a killed one, and makes the table.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one verb")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    import peft  # noqa: F401  (the children are forked: libraries are loaded once)
    import torch.distributed  # noqa: F401
    import transformers

    import layerbudget.decisions.sparsity.apply  # noqa: F401

    transformers.utils.logging.set_verbosity_error()
    prepared, first, killed, lines = steps
    verbs = {n: v for n, v in verbs.items() if a.only in (None, n)}
    rng, rows, truths = random.Random(a.seed), [], {}
    with tempfile.TemporaryDirectory() as base:
        sound, work = Path(base) / "sound", Path(base) / "work"
        sound.mkdir()
        prepared(sound)
        for name, verb in verbs.items():
            truths[name] = first(name, verb, sound, work, Path(base) / f"truth {name}")
        for i in range(a.kills):
            name = list(verbs)[i % len(verbs)]
            row = killed(name, verbs[name], truths[name], rng, sound, work)
            rows.append(row)
            say(f"{i} {name}: {row['trouble'] or 'as undisturbed'}")
    write_section("robustness", f"{len(rows)} {title}, seed {a.seed}", lines(rows, list(truths)), out=a.out, peers=("peft",))


def undisturbed(name: str, verb: Verb, sound: Path, work: Path, _: Path) -> dict:
    """The digest of what an undisturbed run writes, how long it takes and how often it changes the file system."""
    start(sound, work, verb)
    code, seconds, steps = child(verb.first, work, None)
    if code != 0:
        raise SystemExit(f"{name} undisturbed ended with {code}: {(work / 'log.txt').read_text()[-800:]}")
    say(f"{name}: {seconds:.1f} s, {steps} changes of the file system")
    return {"digest": digest(work / verb.result, verb.mine), "seconds": seconds, "steps": steps}


def table(rows: list[dict], verbs: list[str]) -> list[str]:
    """Counts by verb as Markdown."""
    lines = [
        "A run is killed once or twice with SIGKILL, at a random time or at a random rename, removal or sync, and run again to its",
        "end. Compared are the digest of the result with that of an undisturbed run (times left out), files of the user's in the",
        "folders that were written to, and what lies around under names that begin with a dot (at most 1 MB, no temporary file).", "",
        "| command | runs | killed | inside a change of the file system | same result, files kept, nothing left |",
        "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    total = [0, 0, 0, 0]
    for name in verbs:
        mine = [r for r in rows if r["verb"] == name]
        killed = [k for r in mine for k in r["kills"] if k[2] == -signal.SIGKILL]
        counts = [len(mine), len(killed), sum(k[0] == "step" for k in killed), sum(r["trouble"] is None for r in mine)]
        total = [x + y for x, y in zip(total, counts, strict=True)]
        lines.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
    return [*lines, "| **all** | " + " | ".join(map(str, total)) + " |"]


if __name__ == "__main__":
    main()
