"""``layerbudget compare``: every score under every rule, measured at equal budgets."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidInput
from .files import say, show_table
from .progress import progress_bar
from .shared import named_values, refuse

# What a budget flag plans, and whether that is trained (on a task) or applied (and measured on text).
_KINDS = ("sparsity", "ranks", "experts", "bits")
_TEXT = ("data", "evaluate", "windows", "length", "method", "dtype", "device")
_TASK = ("task", "data_dir", "train_rows", "test_rows", "epochs", "lr", "split")


def register(subparsers: Any) -> None:
    """Add the parser of ``compare``."""
    p = subparsers.add_parser("compare")
    p.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    p.add_argument("--scores", required=True, help="comma-separated: estimators, gain, owl, alphapruning, or .csv/.json files")
    p.add_argument("--rules", help="comma-separated rules of that kind of plan (default: mdl; of bits: choices)")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--sparsity", type=float, nargs="+", help="global sparsities")
    budget.add_argument(
        "--bits", type=float, nargs="+", help="mean bits per weight, scales counted; score rounding: its damage"
    )
    budget.add_argument("--ranks", type=float, nargs="+", help="mean ranks of LoRA adapters, trained on --task")
    budget.add_argument("--experts", type=int, nargs="+", help="totals of LoRA experts, trained on --task")
    p.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the calibration draw or the training (default 0)")
    p.add_argument("--by", default="layer", help="layer, linear, or a regular expression (default %(default)s)")
    p.add_argument("--samples", type=int, default=64, help="calibration sequences, or training rows scored (default 64)")
    p.add_argument("--data", help="calibration text (default: stdlib)")
    p.add_argument("--evaluate", metavar="DATA", help="held-out text (default: the evaluation part of --data)")
    p.add_argument("--windows", type=int, help="held-out windows (default 96)")
    p.add_argument("--length", type=int, help="tokens per sequence and window (default 256)")
    p.add_argument("--method", help="pruner (default: wanda) or quantiser (default: rtn)")
    p.add_argument("--dtype", help="precision in which the model is loaded (default float32)")
    p.add_argument("--device", help="cpu, cuda, ...; auto (default): the accelerator where there is one")
    p.add_argument("--task", help="cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a file: for ranks and experts")
    p.add_argument("--data-dir", metavar="DIR", help="folder with the task's original files")
    p.add_argument("--split", help="held-out rows that count (default: the task's first split)")
    p.add_argument("--train-rows", type=int, help="use so many training rows only")
    p.add_argument("--test-rows", type=int, help="use so many held-out rows only")
    p.add_argument("--epochs", type=float, help="passes over the training rows (default 3)")
    p.add_argument("--lr", type=float, help="peak learning rate (default 0.001)")
    p.add_argument("--set", dest="own", action="append", default=[], metavar="NAME=VALUE",
                   help="an option of rules (exponent, max_sparsity, ...); rules that do not read it go without")  # fmt: skip
    p.add_argument("--no-controls", action="store_true", help="leave the permuted controls out")
    p.add_argument("--part", default="1/1", metavar="I/N", help="make every N-th missing cell: N processes share --out")
    p.add_argument("--cells-only", action="store_true", help="make and keep cells, leave table and figure to a later run")
    p.add_argument("-o", "--out", required=True, metavar="DIR", help="cells (kept, resumed), table, LaTeX and figure")
    p.set_defaults(handler=handler)


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Compare, show the ranking and the sentences, leave the files."""
    from ..comparison.run import compare_scores, flat, leave
    from ..kinds import KINDS
    from ..records import check_output
    from ..storage.parts import parse_part

    kind = next(k for k in _KINDS if getattr(a, k) is not None)
    KINDS.find(kind)
    part = parse_part(a.part)
    check_output(f"{a.out}/comparison.json", overwrite=a.overwrite)
    bench = _task_bench(a) if kind in ("ranks", "experts") else _text_bench(a, kind)
    given = a.rules or ("choices" if kind == "bits" else "mdl")
    names, rules = ([w.strip() for w in text.split(",") if w.strip()] for text in (a.scores, given))
    _expect(a, bench, kind, names, rules)
    with progress_bar(a, "compare") as progress:
        result = compare_scores(
            bench, names, rules, getattr(a, kind), kind=kind, seeds=a.seeds, controls=not a.no_controls,
            options=named_values(a.own), folder=a.out, part=part, progress=progress,
        )  # fmt: skip
    if not result.complete or a.cells_only:
        say(a, result.sentences)
        return {**result}
    head = ("budget", "place", "plan", result.unit, "against uniform", "Holm p", "places", "first")
    rows = [
        (f"{r['budget']:g}", str(r["place"]), r["name"], f"{r['mean']:.4f}",
         "-" if r["difference"] is None else f"{r['difference']:+.4f} [{r['low']:+.4f}, {r['high']:+.4f}]",
         "-" if r["holm"] is None else f"{r['holm']:.3f}", f"{r['rank_low']:.0f}-{r['rank_high']:.0f}", f"{r['first']:.0%}")
        for r in flat(result)
    ]  # fmt: skip
    show_table(a, f"{kind}, {len(result.seeds)} seeds, {result.held_out} held-out items", head, rows)
    say(a, result.sentences)
    files = leave(result, a.out, overwrite=a.overwrite)
    say(a, [f"Written to {a.out}: {', '.join(sorted(files))}."])
    return {**result, "files": files}


def _expect(a: argparse.Namespace, bench: Any, kind: str, names: Sequence[str], rules: Sequence[str]) -> None:
    """Say what the cells of a comparison on text will cost; trainings are said by the number of plans alone."""
    from ..comparison.run import ALIASES
    from ..doctor.cost import Text, comparing
    from .outlook import begin, expect

    count = len(getattr(a, kind)) * len(a.seeds)
    what = f"{kind} by {', '.join(names)} under {', '.join(rules)}, {count} budgets and seeds"
    if kind in ("ranks", "experts"):
        begin(a, f"{a.model}: {what}, {len(bench.task.train)} rows to train on each", None)
        return
    text = Text(samples=bench.samples, length=bench.length, batch=bench.batch_size)
    held = Text(samples=bench.windows.samples, length=bench.windows.length, batch=bench.batch_size)
    found: dict[str, Any] = {"rules": len(rules), "budgets": len(getattr(a, kind)), "seeds": len(a.seeds)}
    scores = [ALIASES.get(name, name) for name in names]
    found |= {"method": bench.method, "controls": not a.no_controls}
    expect(a, what, bench.model, lambda shape: comparing(text, held, shape, scores, **found))


def _text_bench(a: argparse.Namespace, kind: str) -> Any:
    from ..comparison.bench import FormatBench, TextBench
    from ..evaluation.perplexity import evaluation_set
    from ..models.loading import load_model, load_tokenizer

    refuse(a, _TASK, f"a comparison of {kind}, which is measured on text")
    a.read = {"data": a.data or "stdlib", "length": a.length or 256, "windows": a.windows or 96, "rules": a.rules}
    source, length = a.read["data"], a.read["length"]
    tokenizer = load_tokenizer(a.model)
    windows = evaluation_set(a.evaluate or source, tokenizer, length=length, windows=a.windows or 96)
    model = load_model(a.model, dtype=a.dtype or "float32", device=a.device or "auto")
    bench = FormatBench if kind == "bits" else TextBench
    return bench(
        model=model, tokenizer=tokenizer, source=source, windows=windows, samples=a.samples, length=length, by=a.by,
        **({"method": a.method} if a.method else {}),
    )  # fmt: skip


def _task_bench(a: argparse.Namespace) -> Any:
    from ..comparison.bench import TaskBench
    from ..data.tasks import load_task
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.protocol import Protocol
    from ..models.loading import load_tokenizer

    if not a.task:
        raise InvalidInput("Ranks and experts are compared by training them.", "They need a --task.", "Name one.")
    refuse(a, _TEXT, "a comparison on a task")
    task = load_task(a.task, a.data_dir).limited(a.train_rows, a.test_rows)
    if a.split is not None and a.split not in task.evaluation:
        raise InvalidInput(f"{a.task} has no split {a.split!r}.", f"It has {', '.join(task.evaluation)}.", "Name one of those.")
    given = {k: getattr(a, k) for k in ("epochs", "lr") if getattr(a, k) is not None}
    load = classifier_loader(a.model, len(task.labels))
    return TaskBench(
        load=load, tokenizer=load_tokenizer(a.model), task=task, split=a.split, samples=a.samples, by=a.by,
        protocol=dataclasses.replace(Protocol(), **given),
    )  # fmt: skip
