"""One of two processes is killed at a random moment: how the other one ends, what is left, and what a new start makes of it.

    python -m benchmarks.robustness processes [--kills 60] [--seed 0] [--only VERB] [--out FOLDER]

Every command that shares its work runs once undisturbed, in one process. Then two processes are started without a launcher, which
would end the second one itself. One of them is killed: after a random time, or at a random change of the file system. The command is
run again in one, two or three processes, with what resumes it, and its result is compared with the undisturbed one.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
from benchmarks.robustness import kill
from benchmarks.robustness.kill import DATA, Verb, again, plain, run_kills, start
from benchmarks.robustness.small import say
from tests.killing import count_changes

LONGEST = 60.0  # seconds within which the other process ends
PARTS = ["--resume", "parts", "-o", "out.json"]
DEMO = ["--samples", "6", "--length", "32", "--quiet"]
BITS = ["--group", "16", "--draws", "1", "--check", "3", *DATA]
TUNE = ["--task", "task.jsonl", "--train-rows", "18", "--epochs", "3", "--batch", "6", "--quiet"]  # divided by 2 and by 3
MIX = ["--draws", "1", "--data", "text.txt", "--samples", "8", "--length", "16", "--quiet"]
ASIDE = ("made_by", "processes", "digest", "plan_digest", "scores_digest", "next", "verdict")  # they follow from other fields
TOLERANCE = {"finetune": 2e-2}  # steps follow the gradient of another order of sums
VERBS = {
    "score": Verb(["score", "model", *DATA, "--resume", "stage", "-o", "out.json"], ["--overwrite"], "out.json"),
    "score, demo": Verb(["score", "demo", *DEMO, "--estimator", "fisher-trace", "-o", "out.json"], ["--overwrite"], "out.json"),
    "plan sparsity": Verb(["plan", "sparsity", "model", *DATA, *PARTS], ["--overwrite"], "out.json"),
    "plan bits": Verb(["plan", "bits", "model", "--bits", "5", *BITS, *PARTS], ["--overwrite"], "out.json"),
    "plan bits, gptq": Verb(
        ["plan", "bits", "model", "--bits", "5", "--method", "gptq", *BITS, *PARTS], ["--overwrite"], "out.json"
    ),
    "plan cache": Verb(
        ["plan", "cache", "demo", *DEMO, "--bits", "6", "--context", "64", "--check", "3", "--draws", "1", "-o", "out.json"],
        ["--overwrite"], "out.json",
    ),
    "plan memory": Verb(
        ["plan", "memory", "demo", *DEMO, "--check", "3", "--draws", "1", "--memory", "8MiB", "--context", "512", *PARTS],
        ["--overwrite"], "out.json",
    ),
    "plan expert-pruning": Verb(["plan", "expert-pruning", "mixture", "--keep", "0.75", *MIX, "-o", "out.json"], ["--overwrite"], "out.json"),
    "plan shapes": Verb(["plan", "shapes", "model", "--save", "10% flops", *DATA, *PARTS], ["--overwrite"], "out.json"),
    "apply": Verb(["apply", "model", "plan.json", "--method", "wanda", *DATA, "--resume", "parts", "-o", "out"], ["--overwrite"], "out"),
    "apply, smaller": Verb(["apply", "model", "smaller.json", *DATA, "-o", "out"], ["--overwrite"], "out"),
    "finetune": Verb(["finetune", "model", "ranks.json", *TUNE, "--resume", "parts", "-o", "out"], ["--overwrite"], "out"),
    "evaluate": Verb(["evaluate", "model", "--perplexity", "text.txt", "--length", "16", "--quiet", "-o", "out.json"], ["--overwrite"], "out.json"),
}  # fmt: skip


def prepare(folder: Path) -> None:
    """What :func:`kill.prepare` makes, and a mixture of experts."""
    import torch
    import transformers

    kill.prepare(folder)
    shutil.copytree(folder / "model", folder / "mixture")
    config = json.loads((folder / "model" / "config.json").read_text())
    torch.manual_seed(0)
    sizes = {k: v for k, v in config.items() if k.endswith(("_size", "_id", "_heads", "_layers", "_embeddings"))}
    mixture = transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    transformers.MixtralForCausalLM(mixture).save_pretrained(folder / "mixture")


class Run:
    """Processes that run one command together in a folder; ``kill`` is ``(rank, "time" or "step", when)``."""

    def __init__(self, words: list[str], folder: Path, size: int, kill: tuple[int, str, float] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.folder, self.began, self.codes, self.ends = folder, time.monotonic(), dict[int, int](), dict[int, float]()
        self.children = {}
        for rank in range(size):
            child = os.fork()
            if child == 0:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                os.environ.update(zip(names, map(str, (rank, rank, size, "localhost", port)), strict=True))
                mine = kill is not None and kill[0] == rank and kill[1] == "step"
                _work(words, folder, rank, int(kill[2]) if kill and mine else 0)
            self.children[child] = rank
        if kill and kill[1] == "time":
            self.watch(lambda: time.monotonic() - self.began > kill[2])
            for child, rank in self.children.items():
                if rank == kill[0] and rank not in self.codes:
                    os.kill(child, signal.SIGKILL)

    def watch(self, until) -> None:
        """Note who ends, until something holds or all have ended."""
        while len(self.codes) < len(self.children) and not until():
            for child, rank in self.children.items():
                if rank not in self.codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                    self.codes[rank], self.ends[rank] = os.waitstatus_to_exitcode(found[1]), time.monotonic()
            time.sleep(0.005)

    def end(self, seconds: float) -> bool:
        """Wait for all; those that have not ended so long after the first one are killed. Whether none was."""
        self.watch(lambda: self.codes and time.monotonic() - min(self.ends.values()) > seconds)
        late = [child for child, rank in self.children.items() if rank not in self.codes]
        for child in late:
            os.kill(child, signal.SIGKILL)
        self.watch(lambda: False)
        return not late

    def said(self, rank: int) -> str:
        """What a process printed."""
        return (self.folder / f"log-{rank}.txt").read_text()


def _work(words: list[str], folder: Path, rank: int, step: int) -> None:
    """The child: run the command, and die at a change of the file system."""
    import torch

    count = count_changes(step)
    torch.set_num_threads(1)
    os.chdir(folder)
    log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from layerbudget.cli import main
    from layerbudget.execution.processes import shutdown

    code = 3
    try:
        code = main(words)
        shutdown()
    finally:
        (folder / f"steps-{rank}.txt").write_text(str(count[0]))
        os._exit(code)


def alike(found, expected, tolerance: float) -> bool:
    """Whether two records agree: words exactly, numbers to a share of their size."""
    if isinstance(expected, dict) and isinstance(found, dict):
        a, b = ({k: v for k, v in record.items() if k not in ASIDE} for record in (found, expected))
        return a.keys() == b.keys() and all(alike(a[k], b[k], tolerance) for k in b)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(alike(*pair, tolerance) for pair in zip(found, expected, strict=True))
    if isinstance(expected, float) or isinstance(found, float):
        return isinstance(found, int | float) and math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    return found == expected


def compare(found: Path, expected: Path, tolerance: float) -> str:
    """Compare a result with the undisturbed one, and return ``equal``, ``close``, or what differs."""
    if found.is_dir() != expected.is_dir() or not found.exists():
        return f"{found.name} is not there"
    files = {f.relative_to(expected): f for f in ([expected] if expected.is_file() else expected.rglob("*")) if f.is_file()}
    worst = "equal"
    for name, file in files.items():
        other = found / name if expected.is_dir() else found
        if "checkpoints" in name.parts or file.suffix not in (".json", ".safetensors") or file.name == "manifest.json":
            continue
        if not other.is_file():
            return f"{name} is missing"
        if file.suffix == ".json":
            a, b = (plain(json.loads(f.read_text())) for f in (other, file))
            same, near = {**a, "made_by": ""} == {**b, "made_by": ""}, alike(a, b, tolerance)
        else:
            same = other.read_bytes() == file.read_bytes()
            near = same or _near(other, file, tolerance)
        if not near:
            return f"{name if expected.is_dir() else found.name} differs"
        worst = worst if same else "close"
    return worst


def _near(found: Path, expected: Path, tolerance: float) -> bool:
    """Whether all but a thousandth of the numbers of two files of tensors agree."""
    from safetensors.torch import load_file

    a, b = ({name: tensor.double().numpy() for name, tensor in load_file(file).items()} for file in (found, expected))
    if a.keys() != b.keys():
        return False
    far = [np.abs(a[n] - b[n]) > tolerance * (np.abs(b[n]).max(initial=0) + 1e-12) for n in b]
    return sum(int(f.sum()) for f in far) <= max(2, sum(f.size for f in far) / 1000)


def one_kill(name: str, verb: Verb, truth: dict, rng: random.Random, sound: Path, work: Path) -> dict:
    """Kill one of two processes, look how the other one ends and what is there, and run the command again."""
    tolerance, victim, size = TOLERANCE.get(name, 1e-3), rng.randrange(2), rng.choice((1, 2, 3))
    start(sound, work, verb)
    when = (
        ("time", rng.uniform(0.02, 0.8) * truth["seconds"])
        if rng.random() < 0.6
        else ("step", rng.randint(1, max(1, truth["steps"][victim])))
    )
    run = Run(verb.first, work, 2, (victim, *when))
    ended = run.end(LONGEST)
    row = {
        "verb": name,
        "kill": [victim, *when],
        "killed": run.codes[victim] == -signal.SIGKILL,
        "again": size,
        "trouble": None,
    }
    other, said = run.codes[1 - victim], run.said(1 - victim)
    row |= {"code": other, "waited": max(0.0, run.ends[1 - victim] - run.ends[victim])}
    row["sentence"] = row["killed"] and other == 1 and "layerbudget: " in said and "Traceback" not in said
    if not ended:
        row["trouble"] = f"hangs: {said[-300:]}"
    elif row["killed"] and other != 0 and not row["sentence"]:
        row["trouble"] = f"ended with {other}: {said[-600:]}"
    elif (work / verb.result).exists() and compare(work / verb.result, truth["result"], tolerance) not in ("equal", "close"):
        row["trouble"] = f"after the kill: {compare(work / verb.result, truth['result'], tolerance)}"
    if row["trouble"]:
        return row
    run = Run(again(verb, work), work, size)
    ended, row["result"] = run.end(300.0), "none"
    if not ended or set(run.codes.values()) != {0}:
        row["trouble"] = f"again in {size}: {run.codes}: {' | '.join(run.said(r)[-300:] for r in range(size))}"
        return row
    row["result"] = compare(work / verb.result, truth["result"], tolerance)
    if row["result"] not in ("equal", "close"):
        row["trouble"] = f"again in {size}: {row['result']}"
    elif list(work.rglob("*.layerbudget")) and "stage" not in str(next(work.rglob("*.layerbudget"))):
        row["trouble"] = f"a file lies around: {next(work.rglob('*.layerbudget'))}"
    return row


def main() -> None:
    """Run the kills and write the table."""
    run_kills(__doc__, 60, VERBS, "kills among two processes", (prepare, undisturbed, one_kill, table))


def undisturbed(name: str, verb: Verb, sound: Path, work: Path, place: Path) -> dict:
    """The result of one process, kept in ``place``, and how long two take and how often they change the file system."""
    for size in (1, 2):
        start(sound, work, verb)
        run = Run(verb.first, work, size)
        if not run.end(300.0) or set(run.codes.values()) != {0}:
            raise SystemExit(
                f"{name} in {size} undisturbed ended with {run.codes}: {run.said(0)[-800:]} {run.said(size - 1)[-800:]}"
            )
        if size == 1:
            place.mkdir()
            shutil.move(work / verb.result, place / verb.result)
    seconds, result = max(run.ends.values()) - run.began, place / verb.result
    found = compare(work / verb.result, result, TOLERANCE.get(name, 1e-3))
    say(f"{name}: {seconds:.1f} s in two processes, whose result is {found}")
    if found not in ("equal", "close"):
        raise SystemExit(f"{name}: two processes undisturbed: {found}")
    return {"seconds": seconds, "steps": [int((work / f"steps-{r}.txt").read_text()) for r in (0, 1)], "result": result}


def table(rows: list[dict], verbs: list[str]) -> list[str]:
    """Counts by verb as Markdown, and every trouble in a line of its own."""
    lines = [
        "Two processes run a command, and one is killed with SIGKILL: at a random time, or at a random rename, removal or sync. The command is then",
        "run again by one, two or three processes. Its result is *equal* to that of one undisturbed process (seconds and the command left out), or",
        "*close*: numbers agree to a thousandth (fine-tuning: to two hundredths of the largest weight), as sums in another order do. A kill that came",
        "after the other process had done its work leaves nothing to say.", "",
        "| command | runs | killed | other ended with a sentence | it was through | longest wait, s | again: 1, 2, 3 processes | equal | close | trouble |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]  # fmt: skip
    for name in [*verbs, "all"]:
        mine = [r for r in rows if name in (r["verb"], "all")]
        killed = [r for r in mine if r["killed"]]
        counts = [len(mine), len(killed), sum(r["sentence"] for r in killed), sum(r["code"] == 0 for r in killed)]
        longest = f"{max((r['waited'] for r in killed), default=0):.1f}"
        sizes = ", ".join(str(sum(r["again"] == n for r in mine)) for n in (1, 2, 3))
        ends = [sum(r.get("result") == word for r in mine) for word in ("equal", "close")] + [
            sum(r["trouble"] is not None for r in mine)
        ]
        lines.append(f"| {'**all**' if name == 'all' else name} | {' | '.join(map(str, [*counts, longest, sizes, *ends]))} |")
    troubles = [f"- {r['verb']}, kill {r['kill']}: {' '.join(r['trouble'].split())[:400]}" for r in rows if r["trouble"]]
    return [*lines, *(["", *troubles] if troubles else [])]


if __name__ == "__main__":
    main()
