"""Mutated files and odd flags through the command line: 0 tracebacks, 0 hangs, 0 partial outputs.

    python -m benchmarks.robustness fuzz [--files 10000] [--flags 5000] [--seed 0] [--out FOLDER]

Every case runs one command without starting Python again: workers are forked for some cases each, with a time limit per case, a limit on
memory, and a watchdog outside that ends a worker which no signal of its own can end. Files are mutated as JSON (a value becomes
one of another type, range or depth, a key goes) or as bytes (cut, flipped, emptied, replaced). Flags are drawn from the parser of
each command, with values of every kind. A case fails when an exception leaves the command line, when its time is over, or when a
command that failed has left an output. ``--only KIND`` runs one kind, ``--case N`` one case again, with what it said.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import os
import random
import resource
import select
import shutil
import signal
import tempfile
import time
import typing
from pathlib import Path

from benchmarks.robustness.small import Outcome, make_model, make_task, run, say, text
from benchmarks.stamp import RESULTS, write_section

from layerbudget.cli.commands import requests_of_all
from layerbudget.requests import flag_of, kind_of, positional

ODD = [
    None, True, False, 0, -1, 1, 2, 1.5, -0.5, 1e308, -1e308, 5e-324, 10**40, 2**63, -(2**63), 2**31, "", "x", "nan", "1", "../../etc", "\x00",
    [], {}, [None], [[]], {"": None}, [1, "a", None], "w" * 5000, "\ud83d\ude00", [0] * 1000, {"a": {"b": {}}},
]  # fmt: skip


def deep(n: int = 3000) -> str:
    """JSON that nests."""
    return "[" * n + "]" * n


def spots(value, path=()):
    """Paths to every value of a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from spots(inner, (*path, key))


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """One to three values changed, or keys gone."""
    record = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = [p for p in spots(record) if p]
        if not places:
            break
        shallow = [p for p in places if len(p) <= 2]
        path = rng.choice(shallow if rng.random() < 0.5 else places)
        holder = record
        for key in path[:-1]:
            holder = holder[key]
        kind = rng.random()
        if kind < 0.2:
            del holder[path[-1]]
        elif kind < 0.25:
            holder[path[-1]] = "@deep@"
        elif kind < 0.3:
            holder[path[-1]] = "@nan@"
        elif kind < 0.4 and isinstance(holder[path[-1]], (int, float)):
            holder[path[-1]] = holder[path[-1]] * rng.choice((-1, 1000, 10**18, 0.5))
        elif kind < 0.45 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        else:
            holder[path[-1]] = copy.deepcopy(rng.choice(ODD))
    text_ = json.dumps(record)
    return (
        text_.replace('"@deep@"', deep())
        .replace('"@nan@"', rng.choice(("NaN", "Infinity", "1e999")))
        .encode("utf-8", "surrogatepass")
    )


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, emptied, doubled, replaced."""
    kind = rng.randrange(9)
    at = rng.randrange(len(content) + 1)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return b""
    if kind == 2:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 8, 64))):
            if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 3:
        return content[:at] + rng.randbytes(rng.choice((1, 16, 256))) + content[at:]
    if kind == 4:
        return content + content
    if kind == 5:
        return rng.randbytes(rng.choice((1, 100, 5000)))
    if kind == 6:
        return b"\xef\xbb\xbf" + content
    if kind == 7:
        return content.decode("utf-8", "replace").encode("utf-16")
    return rng.choice((deep().encode(), b'{"a":' * 3000 + b"1" + b"}" * 3000, b"null", b"[]", b"{}", b"0", b'"x"', b"1" * 5000))


def mutate(path: Path, rng: random.Random) -> None:
    """Change a file."""
    content = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.75:
        path.write_bytes(mutate_json(content, rng))
    elif path.suffix == ".safetensors" and rng.random() < 0.5:
        size = int.from_bytes(content[:8], "little")
        header = mutate_json(content[8 : 8 + size], rng) if rng.random() < 0.7 else mutate_bytes(content[8 : 8 + size], rng)
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    else:
        path.write_bytes(mutate_bytes(content, rng))


# What is mutated, and the command that reads it: (weight, file, arguments). O is an output that must not be left half made.
FILES = {
    "scores, sparsity": (14, "scores.json", "plan sparsity scores.json -o O"),
    "scores, other rules": (6, "scores.json", "plan sparsity scores.json --rule R -o O"),
    "scores, experts": (6, "scores.json", "plan lora-experts scores.json --total 9 -o O"),
    "scores, ranks": (8, "ranks.json", "plan ranks ranks.json --mean-rank 4 -o O"),
    "scores, by rank": (8, "ranks.json", "plan ranks ranks.json --mean-rank 4 --rule by-rank -o O"),
    "scores, joint": (4, "scores.json", "plan joint scores.json --budget=-1kB -o O"),
    "scores, sweep": (5, "scores.json", "explain sweep scores.json --budgets 0.3 0.5"),
    "scores, transfer": (4, "scores.json", "explain transfer scores.json scores.json"),
    "scores, import": (4, "own.json", "score model --import own.json -o O"),
    "scores with shapes, csv": (3, "shapes.csv", "plan ranks shapes.csv --mean-rank 2 -o O"),
    "scores with shapes, json": (3, "shapes.json", "plan sparsity shapes.json -o O"),
    "scores, columns": (5, "large.json", "plan sparsity large.json -o O"),
    "plan, columns": (5, "large_plan.json", "explain large_plan.json"),
    "scores, import csv": (3, "own.csv", "score model --import own.csv -o O"),
    "curves": (6, "curves.json", "plan sparsity scores.json --curves curves.json -o O"),
    "latency": (4, "latency.json", "plan ranks scores.json --mean-rank 2 --latency latency.json -o O"),
    "config, plan": (10, "model/config.json", "plan sparsity model --rule uniform -o O"),
    "config, ranks": (5, "model/config.json", "plan ranks model --mean-rank 2 --rule uniform -o O"),
    "config, model": (6, "model/config.json", "apply model plan.json --method magnitude -o O"),
    "weights": (6, "model/model.safetensors", "apply model plan.json --method magnitude -o O"),
    "generation": (2, "model/generation_config.json", "apply model plan.json --method magnitude -o O"),
    "tokenizer": (5, "model/tokenizer.json", "evaluate model --perplexity text.txt --length 16 --windows 2 -o O"),
    "tokenizer config": (5, "model/tokenizer_config.json", "evaluate model --perplexity text.txt --length 16 --windows 2 -o O"),
    "text": (2, "text.txt", "evaluate model --perplexity text.txt --length 16 --windows 2 -o O"),
    "text, json lines": (3, "text.jsonl", "evaluate model --perplexity text.jsonl --length 16 --windows 2 -o O"),
    "plan, explain": (10, "plan.json", "explain plan.json"),
    "plan, ranks, explain": (4, "plan_ranks.json", "explain plan_ranks.json"),
    "plan, diff": (6, "plan.json", "explain diff plan.json other.json"),
    "plan, prune": (8, "plan.json", "apply model plan.json --method magnitude -o O"),
    "plan, smaller": (4, "smaller.json", "apply model smaller.json --data text.txt --samples 4 --length 8 -o O"),
    "plan, finetune": (3, "plan_ranks.json", "finetune model plan_ranks.json --task task.jsonl --train-rows 8 --epochs 1 --batch 8 -o O"),
    "task": (2, "task.jsonl", "finetune model plan_ranks.json --task task.jsonl --train-rows 8 --epochs 1 --batch 8 -o O"),
    "adapter config": (6, "adapter/adapter_config.json", "evaluate model --adapter adapter --perplexity text.txt --length 16 --windows 2 -o O"),
    "adapter": (4, "adapter/adapter_model.safetensors", "evaluate model --adapter adapter --perplexity text.txt --length 16 --windows 2 -o O"),
    "results": (4, "results/*", "report results -o O"),
    "stage": (5, "stage/**/*", "score model --data text.txt --samples 4 --length 8 --resume stage -o O"),
    "finetuned": (3, "kept/seed-0/*.json", "finetune model plan_ranks.json --task task.jsonl --train-rows 8 --epochs 1 --batch 8 --resume kept -o O"),
    "prune, resume": (5, "resume/*", "apply model plan.json --data text.txt --samples 4 --length 8 --resume resume -o O"),
}  # fmt: skip
RULES = ("uniform", "mdl", "owl", "alphapruning", "permuted", "linear", "nonsense")


def prepare(folder: Path) -> None:
    """Sound files of every kind."""
    make_model(folder / "model")
    (folder / "text.txt").write_text(text())
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text(300, k)}) for k in range(1, 6)))
    make_task(folder / "task.jsonl")
    os.chdir(folder)
    data = ["--data", "text.txt", "--samples", "4", "--length", "8"]
    steps = [
        ["score", "model", *data, "-o", "scores.json", "--resume", "stage"],
        ["score", "model", *data, "--estimator", "rank-gain", "-o", "ranks.json"],
        ["plan", "sparsity", "scores.json", "-o", "plan.json"],
        ["plan", "sparsity", "scores.json", "--rule", "uniform", "-o", "other.json"],
        ["plan", "ranks", "scores.json", "--mean-rank", "2", "-o", "plan_ranks.json"],
        ["plan", "shapes", "model", *data, "--save", "10% flops", "--even", "-o", "smaller.json"],
        ["plan", "sparsity", "model", *data, "-o", "measured.json"],
        ["finetune", "model", "plan_ranks.json", "--task", "task.jsonl", "--train-rows", "8", "--epochs", "1", "--batch", "8", "--resume", "kept", "-o", "tuned"],
        ["evaluate", "model", "--perplexity", "text.txt", "--length", "16", "--windows", "2", "-o", "result.json"],
    ]  # fmt: skip
    for step in steps:
        done = run([*step, "--quiet"], 300)
        if done.code != 0:
            raise SystemExit(f"{' '.join(step)} ended with {done.code}: {done.trouble} {done.said}")
    scores = json.loads((folder / "scores.json").read_text())
    names = [b["name"] for b in scores["blocks"]]
    (folder / "curves.json").write_text(json.dumps({n: [[0.0, 0.4, 0.9], [0.0, 0.1, 0.5]] for n in names}))
    (folder / "own.json").write_text(json.dumps({n: 1.0 + i for i, n in enumerate(names)}))
    (folder / "own.csv").write_text("name,score\n" + "".join(f"{n},{1.0 + i}\n" for i, n in enumerate(names)))
    (folder / "latency.json").write_text(json.dumps({n: 1e-5 for n in names}))
    shutil.copytree(folder / "tuned" / "seed-0" / "adapter", folder / "adapter")
    (folder / "results").mkdir()
    for name in ("scores.json", "plan.json", "result.json"):
        shutil.copy(folder / name, folder / "results" / name)
    _half_pruned(folder, data)
    _columns(folder)


def _columns(folder: Path) -> None:
    """Tables with shapes, and scores and a plan."""
    from layerbudget.decisions.sparsity.plan import plan_sparsity
    from layerbudget.plan import Plan
    from layerbudget.scores import Scores
    from layerbudget.sensitivity.importing import COLUMNS

    rows = [(f"layers.{i}", 1.0 + i, 8 + i, 16) for i in range(6)]
    (folder / "shapes.csv").write_text("\n".join(",".join(map(str, r)) for r in [COLUMNS, *rows]) + "\n")
    (folder / "shapes.json").write_text(json.dumps([dict(zip(COLUMNS, r, strict=True)) for r in rows]))
    scores = Scores.load(folder / "scores.json")
    scores.save(folder / "large.json")
    plan: Plan = plan_sparsity(scores)
    plan.save(folder / "large_plan.json")


def _half_pruned(folder: Path, data: list[str]) -> None:
    """Parts of a pruning run that could not be saved."""
    from layerbudget.decisions.sparsity import save

    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    held, save.save_pruned = save.save_pruned, refuse
    run(["apply", "model", "plan.json", *data, "--resume", "resume", "-o", "nothing", "--quiet"], 300)
    save.save_pruned = held
    if not list((folder / "resume").glob("block-*")):
        raise SystemExit("no parts of a pruning run were kept")


def refill(sound: Path, work: Path, names: set[str]) -> None:
    """Copies of sound files, and nothing else."""
    for old in work.iterdir():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    for source in (sound / name for name in names):
        shutil.copytree(source, work / source.name) if source.is_dir() else shutil.copy(source, work / source.name)


def one_file(kind: str, number: int, sound: Path, work: Path):
    """Mutate a copy of one file, run the command that reads it; ``(outcome, what was changed)``."""
    rng = random.Random(f"{kind}/{number}")
    _, pattern, command = FILES[kind]
    roots = {part.split("/")[0] for part in [pattern, *command.split()]} & {p.name for p in sound.iterdir()}
    refill(sound, work, roots)
    os.chdir(work)
    files = sorted(f for f in work.glob(pattern) if f.is_file())
    chosen = rng.choice(files)
    mutate(chosen, rng)
    words = [rng.choice(RULES) if w == "R" else w for w in command.split()]
    before = {p.name for p in work.iterdir()}
    outcome = run([*words, "--quiet"], LIMIT)
    _check_left(outcome, work, before)
    return outcome, f"{chosen.relative_to(work)}; {' '.join(words)}"


def _check_left(outcome, work: Path, before: set[str]) -> None:
    """A command that failed leaves no output, one that did not leaves nothing temporary."""
    left = {p.name for p in work.iterdir()} - before
    strays = [n for n in left if n.endswith(".layerbudget")]
    if outcome.trouble is None and (strays or (outcome.code == 2 and "O" in left and not (work / "O").is_dir())):
        outcome.trouble = f"left behind: {sorted(left)}"


VALUES = {
    int: ["-1", "0", "1", "2", "3", "4", "1.5", "nan", "", "x", "99999999999999999999", "9223372036854775808", "1000000000"],
    float: ["-1", "0", "0.5", "0.3", "1", "1.5", "nan", "inf", "-inf", "1e308", "1e-320", "", "x", "2"],
    str: ["", "x", "model", "scores.json", "plan.json", "missing.json", "pipe", "folder", "text.txt", "stdlib", "meta", "nan", "-1", "0.5",
          "10%", "64M params", "1e999 params", "-5 params", "w=1", "=", "a=[1", "(", "\u00e9", "a\x00b", "/dev/null", "../x", "float32", "int8", "cpu",
          "layer", "linear", "2:4", "n:8", "9:4", "0:0", "x:y"],
}  # fmt: skip
SMALL = {"--samples": ["1", "2", "4", "0", "-1", "x", "99999999999999999999"], "--length": ["2", "8", "64", "65", "100000", "0", "-1", "1"],
         "--data": ["text.txt", "text.jsonl", "missing.txt", "stdlib:x", "folder", "", "pipe", "scores.json"]}  # fmt: skip
LEAST = {"--samples": "2", "--length": "8", "--data": "text.txt"}
VERBS = [
    ("score",), ("plan", "sparsity"), ("plan", "lora-experts"), ("plan", "ranks"), ("plan", "joint"), ("plan", "shapes"), ("plan", "bits"),
    ("explain", "diff"), ("explain", "plan"), ("explain", "sweep"), ("explain", "transfer"), ("explain", "certify"), ("apply",), ("finetune",),
    ("evaluate",), ("report",), ("export",), ("doctor",), ("compare",),
]  # fmt: skip
POSITIONAL = {"model": ["model"] * 6 + ["missing", "folder", "scores.json", "", "no/such", "pipe"],
              "plan": ["plan.json"] * 5 + ["plan_ranks.json", "smaller.json", "scores.json", "missing.json", "pipe", "folder"],
              "scores": ["scores.json"] * 5 + ["ranks.json", "model", "plan.json", "missing.json", "pipe", ""],
              "folder": ["results"] * 3 + ["missing", "folder", "pipe", "scores.json"]}  # fmt: skip
for _same, _as in (("first", "plan"), ("second", "plan"), ("source", "scores"), ("target", "scores")):
    POSITIONAL[_same] = POSITIONAL[_as]


def options(verb: tuple[str, ...]):
    """The request of a command, and the types of its options: those between ``tuple`` and None aside."""
    request = requests_of_all()[" ".join(verb)]
    kinds = {}
    for name in request.options():
        declared = kind_of(request, name)
        inner = [kind for kind in typing.get_args(declared) or (declared,) if kind not in (type(None), Ellipsis)]
        kinds[name] = next((k for k in (bool, int, float) if k in inner or (typing.get_args(inner[0]) or (0,))[0] is k), str)
    return request, kinds


def value(field, kind: type, flag: str, rng: random.Random) -> str:
    """Some value for a flag."""
    if flag in SMALL and rng.random() < 0.95:
        return rng.choice(SMALL[flag])
    if field.metadata["choices"] is not None and rng.random() < 0.8:
        return str(rng.choice(list(field.metadata["choices"]())))
    if flag == "--out":
        return rng.choice(
            ["O", "O", "O", "O/deeper", "folder", "pipe", ".", "link", "/dev/null", "scores.json", "", "/proc/x", "n" * 300]
        )
    if flag == "--task":
        return rng.choice(["task.jsonl", "task.jsonl", "cola", "missing.jsonl", "text.txt", "pipe", "folder"])
    return rng.choice(VALUES[kind])


def one_flags(number: int, sound: Path, work: Path):
    """Draw a command with its flags, run it."""
    rng = random.Random(f"flags/{number}")
    refill(sound, work, {p.name for p in sound.iterdir()} - {"stage", "resume", "kept"})
    (work / "folder").mkdir()
    (work / "elsewhere").mkdir()
    os.symlink(work / "elsewhere", work / "link")
    os.mkfifo(work / "pipe")
    os.chdir(work)
    verb = rng.choice([verb for verb in VERBS if " ".join(verb) in requests_of_all()])
    words: list[str] = list(verb)
    request, kinds = options(verb)
    for name, field in request.options().items():
        if positional(name, field):
            words.append(rng.choice(POSITIONAL[name]))
            continue
        flag = flag_of(request, name)
        needed = field.default is dataclasses.MISSING or flag in LEAST
        if flag in LEAST and rng.random() < 0.8:
            words += [flag, LEAST[flag]]
        elif needed or rng.random() < 0.12:
            many = typing.get_origin(kind_of(request, name)) is tuple and kinds[name] in (int, float)
            words.append(flag)
            if kinds[name] is not bool:
                words += [value(field, kinds[name], flag, rng) for _ in range(rng.choice((1, 2)) if many else 1)]
    if verb == ("finetune",):
        words += ["--train-rows", "8"]
    if not {"-o", "--out"} & set(words) and verb[0] == "score":
        words += ["-o", "O"]
    before = {p.name for p in work.iterdir()}
    outcome = run([*words, "--quiet"], LIMIT)
    _check_left(outcome, work, before)
    return outcome, " ".join(w if w else "''" for w in words)


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--flags", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--only", help="one kind of file, or flags")
    parser.add_argument("--case", type=int, help="one case of --only, with what it said")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB of address space")
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (int(a.memory * 2**30), int(a.memory * 2**30)))
    out = a.out.resolve()
    with tempfile.TemporaryDirectory() as base:
        sound, work = Path(base) / "sound", Path(base) / "work"
        sound.mkdir()
        work.mkdir()
        prepare(sound)
        if a.case is not None:
            outcome, what = one_flags(a.case, sound, work) if a.only == "flags" else one_file(a.only, a.case, sound, work)
            say(f"{what}\n{outcome.code} {outcome.trouble} {outcome.seconds:.2f} s\n{outcome.said}")
            return
        record = fuzz(a, sound, work)
        os.chdir("/")
    write_section("robustness", f"Mutated files and odd flags, from case {a.seed}", table(record), out=out)


LIMIT = 60.0  # seconds of one case
AT_ONCE = 50  # cases of one worker
WAIT = 90.0  # seconds without a word from a worker after which it is ended


def outcomes(jobs: list[tuple[str, int]], sound: Path, work: Path):
    """What every case gave, in order: ``(kind, number, outcome, what was run)``."""
    at = 0
    while at < len(jobs):
        ends, told = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(ends)
            _work(jobs[at : at + AT_ONCE], sound, work, told)
        os.close(told)
        due = min(AT_ONCE, len(jobs) - at)
        with os.fdopen(ends, "rb") as words:
            while due:
                ready, _, _ = select.select([words], [], [], WAIT)
                line = words.readline() if ready else b""
                if not line:  # it hangs where no signal reaches it, or it died
                    os.kill(worker, signal.SIGKILL)
                    kind, number = jobs[at]
                    trouble = "hang" if not ready else "the process died"
                    yield kind, number, Outcome(None, WAIT, trouble), f"case {number}"
                    at += 1
                    break
                found = json.loads(line)
                yield *jobs[at], Outcome(found["code"], found["seconds"], found["trouble"], ""), found["what"]
                at, due = at + 1, due - 1
        os.waitpid(worker, 0)


def _work(jobs: list[tuple[str, int]], sound: Path, work: Path, told: int) -> None:
    """A worker: run some cases, tell of each on a line, end without cleaning up."""
    for kind, number in jobs:
        outcome, what = one_flags(number, sound, work) if kind == "flags" else one_file(kind, number, sound, work)
        said = {"code": outcome.code, "seconds": outcome.seconds, "trouble": outcome.trouble, "what": what}
        os.write(told, json.dumps(said).encode() + b"\n")
    os._exit(0)


def fuzz(a: argparse.Namespace, sound: Path, work: Path) -> dict:
    """All cases: counts by kind, and every trouble."""
    total, jobs = sum(w for w, _, _ in FILES.values()), []
    for kind, (weight, _, _) in FILES.items():
        jobs += [(kind, a.seed + i) for i in range(-(-a.files * weight // total))]
    jobs = jobs[: a.files] if a.files else []
    jobs += [("flags", a.seed + i) for i in range(a.flags)]
    jobs = [j for j in jobs if a.only in (None, j[0])]
    random.Random(0).shuffle(jobs)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    troubles, slowest, began = [], [], time.perf_counter()
    for done, (kind, number, outcome, what) in enumerate(outcomes(jobs, sound, work), 1):
        row = counts[kind]
        row["cases"] += 1
        row["accepted" if outcome.code == 0 else "refused"] += outcome.trouble is None
        if outcome.trouble is not None:
            sort = (
                "hangs"
                if outcome.trouble == "hang"
                else "partial outputs"
                if "left behind" in outcome.trouble
                else "tracebacks"
            )
            row[sort] += 1
            troubles.append({"kind": kind, "case": number, "what": what, "trouble": outcome.trouble})
            say(f"{kind} {number}: {outcome.trouble}   [{what[:200]}]")
        slowest = sorted([*slowest, (round(outcome.seconds, 2), kind, number)], reverse=True)[:5]
        if done % 500 == 0:
            say(f"{done} of {len(jobs)}, {len(troubles)} in trouble, {time.perf_counter() - began:.0f} s")
    return {
        "cases": len(jobs), "first_case": a.seed, "kinds": {k: dict(v) for k, v in sorted(counts.items())}, "troubles": troubles,
        "slowest_seconds": slowest, "limit_seconds": LIMIT, "limit_gib": a.memory,
    }  # fmt: skip


def table(record: dict) -> str:
    """The counts as Markdown."""
    names = ("cases", "accepted", "refused", "tracebacks", "hangs", "partial outputs")
    total = collections.Counter()
    lines = ["| what is mutated | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
    for kind, row in record["kinds"].items():
        total.update(row)
        lines.append(f"| {kind} | " + " | ".join(str(row.get(n, 0)) for n in names) + " |")
    lines.append("| **all** | " + " | ".join(str(total.get(n, 0)) for n in names) + " |")
    slow = ", ".join(f"{s:.1f} s ({kind} {number})" for s, kind, number in record["slowest_seconds"])
    return (
        "\n".join(lines) + f"\n\n{record['cases']} commands in forked workers, at most {record['limit_seconds']:g} s and "
        f"{record['limit_gib']:g} GiB each; the slowest took {slow}. *Accepted* means that the change did no harm (a note, a number of "
        "the right kind), *refused* one sentence and exit code 2 (1 from a doctor)."
    )  # fmt: skip


if __name__ == "__main__":
    main()
