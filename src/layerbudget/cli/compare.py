"""``layerbudget compare``: every score under every rule, measured at equal budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import AlreadyExists, InvalidInput
from ..registry import Option
from ..requests import ADVANCED, PLACE, Request, model_option, names, option, out_option, share
from ..storage import reading
from .session import Session

if TYPE_CHECKING:
    from ..comparison.run import ScoreComparison

_KINDS = {"sparsity": "sparsity", "ranks": "ranks", "experts": "lora-experts"}  # by their budgets; the last two are trained
_ON_TEXT, _ON_TASK = "sparsity, measured on text", "ranks and experts, trained on a task"
_TEXT = ("data", "evaluate", "windows", "length", "method", "device")
_TASK = ("task", "data_dir", "epochs", "lr", "train_rows", "test_rows", "split")


@dataclasses.dataclass(kw_only=True)
class CompareRequest(Request):
    """Measure every score under every rule at equal budgets, beside uniform and permuted controls."""

    command: ClassVar[str] = "compare"

    model: str = model_option()
    out: str = out_option(
        "folder of the cells (kept, resumed), and of the table as JSON and CSV", metavar="DIR", default=dataclasses.MISSING
    )
    scores: str = option(
        flag="--scores",
        metavar="NAMES",
        help="comma-separated: estimators, gain, FILE.py:NAME, tables (.csv, .json), or plan.json of plan sparsity MODEL",
    )
    rules: str | None = option(None, metavar="NAMES", help="comma-separated rules of that kind of plan (default: mdl)")
    sparsity: tuple[float, ...] | None = option(None, read=share, help="global sparsities")
    ranks: tuple[float, ...] | None = option(None, help="mean ranks of LoRA adapters, trained on --task")
    experts: tuple[int, ...] | None = option(None, help="totals of LoRA experts, trained on --task")
    seeds: tuple[int, ...] = option((0,), help="one run per seed, of the calibration draw or the training (default: 0)")
    by: str = option("layer", help="blocks: layer (default), linear, or a regular expression")
    samples: int = option(64, help="calibration sequences, or training rows scored (default: 64)")
    data: str | None = option(
        None, group=_ON_TEXT, role="reads", metavar="TEXT", help="stdlib (default), c4, wikitext2, or local files"
    )
    evaluate: str | None = option(
        None, group=_ON_TEXT, role="reads", metavar="TEXT", help="held-out text (default: the evaluation part of --data)"
    )
    windows: int | None = option(None, group=_ON_TEXT, help="held-out windows (default: 96)")
    length: int | None = option(None, group=_ON_TEXT, help="tokens per sequence and window (default: 256)")
    method: str | None = option(None, group=_ON_TEXT, help="pruner (default: wanda)")
    device: str | None = option(
        None, group=PLACE, help="cpu, cuda, cuda:1, ...; auto (default): the accelerator where there is one"
    )
    task: str | None = option(None, group=_ON_TASK, help="cola, mrpc, rte, commonsenseqa, openbookqa, scienceqa, or a file")
    data_dir: str | None = option(
        None, group=_ON_TASK, metavar="DIR", role="reads", help="folder with the tasks' original files"
    )
    epochs: float | None = option(None, group=_ON_TASK, help="passes over the training rows (default: 3)")
    lr: float | None = option(None, group=_ON_TASK, help="peak learning rate (default: 0.001)")
    train_rows: int | None = option(None, group=ADVANCED, help="at most so many training rows of the task (default: all)")
    test_rows: int | None = option(None, group=ADVANCED, help="at most so many held-out rows of the task (default: all)")
    split: str | None = option(None, group=ADVANCED, help="held-out rows of the task that count (default: the task's own)")
    controls: bool = option(
        True, group=ADVANCED, help="measure the permuted controls too; --no-controls leaves them out (default: --controls)"
    )
    part: str = option(
        "1/1",
        group=ADVANCED,
        metavar="I/N",
        role="aside",
        help="make every N-th missing cell and no table: N processes share --out (default: 1/1)",
    )

    @property
    def budgets(self) -> tuple[float, ...]:
        """The budgets, in the unit of the kind."""
        return next(values for name in _KINDS if (values := getattr(self, name)) is not None)

    @property
    def kind(self) -> str:
        """The kind of the plans that are compared."""
        return next(kind for name, kind in _KINDS.items() if getattr(self, name) is not None)

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of plans of the kind whose budgets are named, and of the rules."""
        from ..comparison.grid import BOUNDS
        from ..decisions.rules import find_rule

        kind = next((kind for name, kind in _KINDS.items() if name in typed), "sparsity")
        known = {name: Option(name=name, type=float, help="bound of every block in every plan") for name in BOUNDS}
        for rule in names(typed.get("rules", "mdl")):
            known |= find_rule(kind, rule).options
        return {name: option for name, option in known.items() if name not in cls.options()}

    def reads(self) -> list[str]:
        """Return the files of scores too; names of estimators are no files."""
        files = [name for name in names(self.scores) if Path(name.partition(":")[0]).suffix.lower() in (".csv", ".json", ".py")]
        return [*files, *super().reads()]

    def check(self) -> None:
        """Refuse all but one kind of budgets, and options of the other kind."""
        super().check()
        named = [f"--{name}" for name in _KINDS if getattr(self, name) is not None]
        if len(named) != 1:
            what = f"{' and '.join(named)} were given together." if named else "No budget was given."
            raise InvalidInput(what, "One comparison is of one kind.", "Name --sparsity, --ranks or --experts.")
        if self.sparsity is not None:
            self.refuse(_TASK, "a comparison of sparsities, which is measured on text")
            return
        if not self.task:
            raise InvalidInput("Ranks and experts are compared by training them.", "They need a --task.", "Name one.")
        self.refuse(_TEXT, "a comparison on a task")


def run(session: Session) -> dict[str, Any]:
    """Compare, show the ranking and the sentences, leave the files."""
    from ..comparison.names import by_name
    from ..comparison.run import check_all, compare_scores, holds
    from ..storage.parts import parse_part

    request: CompareRequest = session.request
    kind, budgets, part = request.kind, request.budgets, parse_part(request.part)
    finished = Path(request.out, "comparison.json")
    again = finished.exists() and not request.overwrite
    bench = _text_bench(session) if kind == "sparsity" else _task_bench(session)
    scores, rules, options = names(request.scores), names(request.rules or "mdl"), dict(request.more)
    check_all(bench, kind, by_name(scores), rules, budgets, options)  # before the cost is said
    if not again:
        _expect(session, bench, scores, rules)
    with session.progress("compare") as progress:
        asked: dict[str, Any] = {"kind": kind, "seeds": request.seeds, "controls": request.controls, "options": options}
        asked |= {"folder": request.out, "part": part}
        try:
            result = compare_scores(bench, scores, rules, budgets, progress=progress, again=again, **asked)
            if again and not holds(result, reading.read(finished, "comparison")):
                raise AlreadyExists("")
        except AlreadyExists:
            raise AlreadyExists(
                f"{finished} exists already, and is of another comparison.",
                "The command that made it prints it again.",
                "Choose another output or pass --overwrite; what was measured is kept.",
            ) from None
    if not result.complete or part[1] > 1:
        session.say(*result.sentences)
        return {**result}
    return {**result, "files": _show(session, result, again=again)}


def _show(session: Session, result: ScoreComparison, *, again: bool) -> dict[str, str]:
    """Show the tables, leave the files unless they are there, and end with the verdict; returns the files."""
    from ..comparison.run import write_comparison
    from ..reporting.tables import contest_sheets

    request = session.request
    for sheet in contest_sheets(result):
        session.show(sheet.title, sheet.header, sheet.rows)
    if again:
        files = {end: str(Path(request.out, f"comparison.{end}")) for end in ("json", "csv")}
    else:
        files = dict(write_comparison(result, request.out, overwrite=request.overwrite))
    ends = [line for line in result.sentences if line.startswith("At ")]
    details = [line for line in result.sentences if line not in ends]
    done = (
        f"{request.out} holds this comparison; nothing was measured."
        if again
        else f"Written: {' and '.join(files[end] for end in sorted(files))}."
    )
    session.say(done, *details, f"Verdict: {' '.join(ends)}")
    session.follow("report", request.out, "-o", f"{request.out}/report.html")
    return files


def _expect(session: Session, bench: Any, scores: Sequence[str], rules: Sequence[str]) -> None:
    """Say what the cells of a comparison on text will cost; trainings are said by the number of plans alone."""
    from ..comparison.names import ALIASES, is_file
    from ..cost.sizes import Text
    from ..cost.verbs import comparing

    request: CompareRequest = session.request
    budgets, seeds = len(request.budgets), len(request.seeds)
    count = budgets * seeds
    size = f"{budgets} budget{'s' * (budgets > 1)} x {seeds} seed{'s' * (seeds > 1)}"
    what = f"{request.kind} by {', '.join(scores)} under {', '.join(rules)}, {size}"
    if request.sparsity is None:
        session.expect(f"{what}, {len(bench.task.train)} rows to train on each", None, ())
        return
    text = Text(samples=bench.samples, length=bench.length, batch=bench.batch_size)
    held_out = Text(samples=bench.windows.samples, length=bench.windows.length, batch=bench.batch_size)
    plans = count * (1 + len(scores) * len(rules) * (2 if request.controls else 1))  # uniform and controls too
    measured = [ALIASES.get(name, name) for name in scores if not is_file(name)]
    cost = comparing(text, held_out, measured, bench.method, seeds=seeds, plans=plans)
    session.expect(f"{what}{session.on_text(bench)}", bench.model, cost)


def _text_bench(session: Session) -> Any:
    from ..comparison.bench import TextBench
    from ..data.folders import say_once
    from ..evaluation.perplexity import evaluation_set
    from ..reporting.decided import is_same_text, on_flattery

    request: CompareRequest = session.request
    # What was not given is filled in, so that the command that repeats this one names it.
    source = request.data = request.data or "stdlib"
    length = request.length = request.length or 256
    windows = request.windows = request.windows or 96
    tokenizer = session.load_tokenizer()
    held_out = evaluation_set(request.evaluate or source, tokenizer, length=length, windows=windows)
    options = {"samples": request.samples, "length": length, "by": request.by, **request.given("method")}
    model = session.load_model(dtype="float32")
    bench = TextBench(model=model, tokenizer=tokenizer, source=source, windows=held_out, **options)
    judge = request.evaluate or source
    listed = judge != source and "," in source + judge and is_same_text(judge, {source})
    if listed or held_out.text == bench.data(request.seeds[0]).text:  # content of the whole source, however it is drawn
        say_once(on_flattery(judge, "every plan here"))
    return bench


def _task_bench(session: Session) -> Any:
    from ..comparison.bench import TaskBench
    from ..data.tasks import load_task
    from ..finetuning.adapters import classifier_loader
    from ..finetuning.protocol import Protocol

    request: CompareRequest = session.request
    task = load_task(request.task or "", request.data_dir).limited(request.train_rows, request.test_rows)
    split = request.split
    if split is not None and split not in task.evaluation:
        what = f"{request.task} has no split {split!r}."
        raise InvalidInput(what, f"It has {', '.join(task.evaluation)}.", "Name one of those.")
    return TaskBench(
        load=classifier_loader(request.model, len(task.labels)),
        tokenizer=session.load_tokenizer(),
        task=task,
        split=split,
        samples=request.samples,
        by=request.by,
        protocol=dataclasses.replace(Protocol(), **request.given("epochs", "lr")),
    )
