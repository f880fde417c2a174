"""``layerbudget compare``: every score under every rule, measured at equal budgets."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AlreadyExists, InvalidInput
from ..registry import Option
from ..storage import reading
from .display import expect, progress_bar, say, say_next, show_table, words_of
from .options import add, add_out, add_set, add_verb, given, load_model, load_tokenizer, refuse, settings, share

if TYPE_CHECKING:
    from ..comparison.run import ScoreComparison

_KINDS = ("sparsity", "ranks", "experts")  # the first is applied and measured on text, the others are trained
_TEXT = ("data", "evaluate", "windows", "length", "method", "device")
_TASK = ("task", "data_dir", "epochs", "lr")
_OWN = {  # by --set, beside the options of rules
    "controls": Option(name="controls", type=bool, default=True),
    "train_rows": Option(name="train_rows", type=int),
    "test_rows": Option(name="test_rows", type=int),
    "split": Option(name="split", type=str),
}


def register(subparsers: Any) -> None:
    """Add the parser of ``compare``."""
    p = add_verb(subparsers, "compare", handler)
    add(p, "model")
    add_out(p, "cells (kept, resumed), and the table as JSON and CSV", required=True, metavar="DIR")
    p.add_argument(
        "--scores",
        required=True,
        help="comma-separated: estimators, gain, FILE.py:NAME, tables (.csv, .json), or plan.json of plan sparsity MODEL",
    )
    p.add_argument("--rules", help="comma-separated rules of that kind of plan (default: mdl)")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--sparsity", type=share, nargs="+", help="global sparsities")
    budget.add_argument("--ranks", type=float, nargs="+", help="mean ranks of LoRA adapters, trained on --task")
    budget.add_argument("--experts", type=int, nargs="+", help="totals of LoRA experts, trained on --task")
    add(p, "--seeds", help="of the calibration draw or the training (default: 0)")
    add(p, "--by")
    add(p, "--samples", default=64, help="calibration sequences, or training rows scored (default: 64)")
    text = p.add_argument_group("sparsity, measured on text")
    add(text, "--data", "--device")
    text.add_argument("--evaluate", metavar="DATA", help="held-out text (default: the evaluation part of --data)")
    add(text, "--windows", help="held-out windows (default: 96)")
    add(text, "--length", help="tokens per sequence and window (default: 256)")
    text.add_argument("--method", help="pruner (default: wanda)")
    task = p.add_argument_group("ranks and experts, trained on a task")
    task.add_argument("--task", help="cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a file")
    add(task, "--data-dir")
    add(task, "--epochs", help="passes over the training rows (default: 3)")
    add(task, "--lr", help="peak learning rate (default: 0.001)")
    advanced = p.add_argument_group("advanced")
    add_set(
        advanced,
        "an option of rules (exponent, max_sparsity, ...; rules that do not read it go without), controls=false to leave the "
        "permuted controls out, train_rows, test_rows, or the split of held-out rows that counts",
    )
    part = "make every N-th missing cell and no table: N processes share --out"
    advanced.add_argument("--part", default="1/1", metavar="I/N", help=part)


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Compare, show the ranking and the sentences, leave the files."""
    from ..comparison.names import by_name
    from ..comparison.run import check_all, compare_scores, holds
    from ..decisions.apply import maker
    from ..storage.parts import parse_part

    kind = next(k for k in _KINDS if getattr(a, k) is not None)
    part = parse_part(a.part)
    finished = Path(a.out, "comparison.json")
    again = finished.exists() and not a.overwrite
    own = settings(a, maker(kind), _OWN)
    controls = own.pop("controls", True)
    *rows, split = (own.pop(name, None) for name in ("train_rows", "test_rows", "split"))
    bench = _text_bench(a) if kind == "sparsity" else _task_bench(a, rows, split)
    names, rules = ([w.strip() for w in text.split(",") if w.strip()] for text in (a.scores, a.rules or "mdl"))
    check_all(bench, kind, by_name(names), rules, getattr(a, kind), own)  # before the cost is said
    if not again:
        _expect(a, bench, kind, names, rules, controls)
    with progress_bar(a, "compare") as progress:
        own = {"kind": kind, "seeds": a.seeds, "controls": controls, "options": own, "folder": a.out, "part": part}
        try:
            result = compare_scores(bench, names, rules, getattr(a, kind), progress=progress, again=again, **own)
            if again and not holds(result, reading.read(finished, "comparison")):
                raise AlreadyExists("")
        except AlreadyExists:
            raise AlreadyExists(
                f"{finished} exists already, and is of another comparison.",
                "The command that made it prints it again.",
                "Choose another output or pass --overwrite; what was measured is kept.",
            ) from None
    if not result.complete or part[1] > 1:
        say(a, *result.sentences)
        return {**result}
    return {**result, "files": _show(a, result, again=again)}


def _show(a: argparse.Namespace, result: ScoreComparison, *, again: bool) -> dict[str, str]:
    """Show the tables, leave the files unless they are there, and end with the verdict; returns the files."""
    from ..comparison.run import leave
    from ..report.tables import contest_sheets

    for sheet in contest_sheets(result):
        show_table(a, sheet.title, sheet.header, sheet.rows)
    if again:
        files = {end: str(Path(a.out, f"comparison.{end}")) for end in ("json", "csv")}
    else:
        files = dict(leave(result, a.out, overwrite=a.overwrite))
    ends = [line for line in result.sentences if line.startswith("At ")]
    details = [line for line in result.sentences if line not in ends]
    done = (
        f"{a.out} holds this comparison; nothing was measured."
        if again
        else f"Written: {' and '.join(files[end] for end in sorted(files))}."
    )
    say(a, done, *details, f"Verdict: {' '.join(ends)}")
    say_next(a, "report", a.out, "-o", f"{a.out}/report.html")
    return files


def _expect(a: argparse.Namespace, bench: Any, kind: str, names: Sequence[str], rules: Sequence[str], controls: bool) -> None:
    """Say what the cells of a comparison on text will cost; trainings are said by the number of plans alone."""
    from ..comparison.names import ALIASES, is_file
    from ..doctor.cost import Text, comparing

    budgets, seeds = len(getattr(a, kind)), len(a.seeds)
    count = budgets * seeds
    size = f"{budgets} budget{'s' * (budgets > 1)} x {seeds} seed{'s' * (seeds > 1)}"
    what = f"{kind} by {', '.join(names)} under {', '.join(rules)}, {size}"
    if kind in ("ranks", "experts"):
        expect(a, f"{what}, {len(bench.task.train)} rows to train on each")
        return
    text = Text(samples=bench.samples, length=bench.length, batch=bench.batch_size)
    held = Text(samples=bench.windows.samples, length=bench.windows.length, batch=bench.batch_size)
    plans = count * (1 + len(names) * len(rules) * (2 if controls else 1))  # uniform and controls too
    scores = [ALIASES.get(name, name) for name in names if not is_file(name)]
    expect(a, words_of(what, bench), bench.model, comparing(text, held, scores, bench.method, seeds=len(a.seeds), plans=plans))


def _text_bench(a: argparse.Namespace) -> Any:
    from ..comparison.bench import TextBench
    from ..evaluation.perplexity import evaluation_set

    refuse(a, _TASK, "a comparison of sparsities, which is measured on text")
    a.read = {"data": a.data or "stdlib", "length": a.length or 256, "windows": a.windows or 96, "rules": a.rules}
    source, length, windows = a.read["data"], a.read["length"], a.read["windows"]
    tokenizer = load_tokenizer(a)
    held_out = evaluation_set(a.evaluate or source, tokenizer, length=length, windows=windows)
    own = {"samples": a.samples, "length": length, "by": a.by, **given(a, "method")}
    model = load_model(a, dtype="float32")
    return TextBench(model=model, tokenizer=tokenizer, source=source, windows=held_out, **own)


def _task_bench(a: argparse.Namespace, rows: Sequence[int | None], split: str | None) -> Any:
    from ..comparison.bench import TaskBench
    from ..data.tasks import load_task
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.protocol import Protocol

    if not a.task:
        raise InvalidInput("Ranks and experts are compared by training them.", "They need a --task.", "Name one.")
    refuse(a, _TEXT, "a comparison on a task")
    task = load_task(a.task, a.data_dir).limited(*rows)
    if split is not None and split not in task.evaluation:
        raise InvalidInput(f"{a.task} has no split {split!r}.", f"It has {', '.join(task.evaluation)}.", "Name one of those.")
    return TaskBench(
        load=classifier_loader(a.model, len(task.labels)),
        tokenizer=load_tokenizer(a),
        task=task,
        split=split,
        samples=a.samples,
        by=a.by,
        protocol=dataclasses.replace(Protocol(), **given(a, "epochs", "lr")),
    )
