"""``layerbudget evaluate``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import NotRequired, TypedDict

from ..errors import LayerbudgetError
from ..reporting.decided import is_same_text, on_flattery, texts_of_folder
from ..requests import TEXT, PlaceRequest, four_bit_option, model_option, option, out_option, resume_option
from ..verdicts import CONVENTION, plus_minus
from .display import named_text
from .session import Session, split_revision


@dataclasses.dataclass(kw_only=True)
class EvaluateRequest(PlaceRequest):
    """Measure perplexity and task accuracy."""

    command: ClassVar[str] = "evaluate"
    unread: ClassVar[tuple[str, ...]] = ("table",)

    model: str = model_option()
    perplexity: tuple[str, ...] | None = option(
        None, metavar="TEXT", role="reads", several=True, help="texts to report perplexity on (default: stdlib)"
    )
    tasks: str | None = option(
        None, help="comma-separated: rte, boolq, arc_easy, arc_challenge, hellaswag, winogrande, openbookqa"
    )
    against: str | None = option(
        None, metavar="B", role="reads", help="paired tests against another model, or a result that --out wrote (.json)"
    )
    out: str | None = out_option("also write the result to this JSON file")
    adapter: str | None = option(
        None, metavar="DIR", role="reads", help="a saved adapter to put on the model: LoRA ranks or experts"
    )
    length: int | None = option(None, group=TEXT, help="tokens per window (default: 256)")
    windows: int | None = option(None, group=TEXT, help="at most so many windows (default: all of the text)")
    batch_size: int | None = option(
        None, group=TEXT, help="sequences per forward pass (default: 16, fewer where memory is short)"
    )
    data_dir: str | None = option(
        None, metavar="DIR", role="reads", help="folder with the tasks' local files; without it the hub is asked"
    )
    limit: int | None = option(None, help="at most so many examples of each task")
    four_bit: bool = four_bit_option()
    resume: str | None = resume_option()

    @property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return list(dict.fromkeys(t.strip() for t in (self.tasks or "").split(",") if t.strip()))

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts."""
        return self.perplexity or (() if self.names else ("stdlib",))

    def check(self) -> None:
        """Refuse options of tasks without tasks, and of texts without texts."""
        super().check()
        self.refuse(() if self.names else ("data_dir", "limit"), "perplexity alone")
        self.refuse(() if self.texts else ("length", "windows"), "tasks alone")


def run(session: Session) -> dict[str, Any]:
    """Evaluate, show what was measured, with its parameters, and compare where asked."""
    from ..canonical import dumps
    from ..evaluation.statistics import check_texts, compare_results
    from ..execution.processes import is_main, one_process
    from ..models.loading import resolve
    from ..storage.writing import check_output, write_text

    request: EvaluateRequest = session.request
    model, against, adapter = request.model, request.against, request.adapter
    if request.names:
        one_process("Tasks are evaluated by lm-eval")
    if request.out:
        check_output(request.out, overwrite=request.overwrite)
    if request.data_dir:
        from ..evaluation.harness import local_rows

        for name in request.names:
            local_rows(name, request.data_dir)  # what does not read is refused before the work
    other = _read(against) if against and against.endswith(".json") else {}  # before the work
    for name in (model, *([against] if against and not other else [])):
        resolve(*split_revision(name))  # what cannot be loaded is refused before the work
    sets, second, others = _sets(session), None, dict[str, Any]()
    if against:
        if not other:
            second = copy.copy(session)
            second.request = dataclasses.replace(request, model=against, adapter=None)
            others = _sets(second)
        check_texts(_planned(request, sets), other or _planned(request, others))  # before the work
    result, learned, kept = _measured(session, sets, 2.0 if second else 1.0)
    parts = [kept]
    if against:
        if second is not None:
            other, _, kept = _measured(second, others)
            parts.append(kept)
        if request.out and is_main():  # a comparison that fails loses nothing
            write_text(request.out, dumps(result), overwrite=request.overwrite)
        compared = compare_results(result, other, (adapter or model, against))
        compared["verdict"] += _on_text((model, str(other["model"])), compared["perplexity"]) + _on_rows(learned)
        result["against"] = {"model": other["model"], "dtype": other.get("dtype"), **compared}
        session.say(*_on_precision(model, against, result, other), *compared["sentences"], f"Verdict: {compared['verdict']}")
    if request.out and is_main():
        write_text(request.out, dumps(result), overwrite=request.overwrite or bool(against))
    for kept in parts:
        kept.clear()
    if adapter and not against:
        session.say("Verdict: the adapter was compared with nothing.")
        texts = ["--perplexity", *request.texts] if request.texts else []
        tasks = ["--tasks", request.tasks or ""] if request.names else []
        session.follow("evaluate", model, "--adapter", adapter, *texts, *tasks, "--against", model)
    return result


def _on_text(folders: Sequence[str], texts: Iterable[str]) -> str:
    """Words on texts that decided the plan of one of the folders: they flatter it, and are no judge. Empty without any."""
    said = []
    for folder in folders:
        decided = texts_of_folder(_folder_of(folder))
        for text in texts:
            if is_same_text(text, decided):
                said.append(f" But {on_flattery(text, f'the plan of {folder}')}")
    return "".join(said)


def _on_rows(learned: Sequence[str]) -> str:
    """Words on texts that hold the rows which trained the adapter. Empty without any."""
    return "".join(f" But {text} holds the rows that trained the adapter: judge it on other rows." for text in learned)


def _folder_of(name: str) -> Path:
    """Folder that apply wrote, which may be named by its ``model.gguf``."""
    from ..storage.checkpoint import GGUF_FILE

    path = Path(name).expanduser()
    return path.parent if path.name == GGUF_FILE else path


def _on_precision(model: str, against: str, result: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """A sentence on two models that were not computed in the same precision; of a result of before it may not be known."""
    ours, theirs = result["dtype"], other.get("dtype", result["dtype"])
    if ours == theirs:
        return []
    remedy = "--dtype float32 computes both alike"
    if against.endswith(".json"):  # that one is not computed again
        remedy = f"--dtype {theirs} computes both alike" if " " not in theirs else "evaluate both models with --dtype float32"
    return [f"{model} was computed in {ours} and {against} in {theirs}, which is a part of the difference; {remedy}."]


class _Text(TypedDict):
    digest: NotRequired[str | None]
    nll: NotRequired[list[float]]


class _Task(TypedDict):
    digest: NotRequired[str | None]
    correct: NotRequired[list[float]]


class _Result(TypedDict):
    """The part of a result that a comparison needs."""

    model: str
    tasks: dict[str, _Task]
    perplexity: dict[str, _Text]


def _read(path: str) -> dict[str, Any]:
    """A result that ``--out`` wrote."""
    from ..errors import CorruptFile
    from ..storage import reading

    record: dict[str, Any] = reading.read(Path(path), "JSON")
    try:
        reading.converted(record, _Result)
    except ValueError as error:
        what = f"{path} is no evaluation ({error})."
        raise CorruptFile(what, "It needs tasks and perplexity.", "Make one: evaluate --out FILE.json.") from error
    return record


def _sets(session: Session) -> dict[str, Any]:
    """The windows of every text, as the model's tokenizer cuts them."""
    from ..evaluation.perplexity import evaluation_set

    request: EvaluateRequest = session.request
    tokenizer, length = session.load_tokenizer(), request.length or 256
    return {s: evaluation_set(s, tokenizer, length=length, windows=request.windows) for s in request.texts}


def _planned(request: EvaluateRequest, sets: dict[str, Any]) -> dict[str, Any]:
    """A result in which nothing is measured yet: the names of its tasks, and the windows of its texts."""
    from ..evaluation.perplexity import predicted

    counts = {source: predicted(data).tolist() for source, data in sets.items()}
    texts = {source: {"digest": sets[source].digest, "nll": each, "counts": each} for source, each in counts.items()}
    return {"tasks": dict.fromkeys(request.names), "perplexity": texts}


def _measured(session: Session, sets: dict[str, Any], models: float = 1.0) -> tuple[dict[str, Any], list[str], Any]:
    """Evaluate one model, of so many; also which texts hold the rows that trained its adapter, and the finished parts."""
    from ..cost.sizes import Text
    from ..cost.work import WorkItem
    from ..evaluation.perplexity import perplexity
    from ..models.precision import precision_of

    request: EvaluateRequest = session.request
    lean = not request.adapter and not request.names  # what works on the weights themselves has them in memory
    model = session.load_model(lean=lean)
    options = Text(samples=4 * (request.limit or 1000), length=80, batch=session.batch(most=16))  # a forward for every option
    texts = [Text(samples=d.samples, length=d.length, batch=min(options.batch, d.samples)) for d in sets.values()]
    named = {source: named_text(source, "--perplexity") for source in sets}
    windows = [f"{data.samples} windows of {data.length} tokens of {named[source]}" for source, data in sets.items()]
    parts = [WorkItem("forward", text, times=models) for text in (*texts, *(options for _ in request.names))]
    session.expect(", ".join([*windows, *request.names]), model, parts)
    precision, learned = precision_of(model), list[str]()
    called = f"{request.model} with the adapter {request.adapter}" if request.adapter else request.model
    if request.adapter:
        from ..finetuning.adapters import load_adapter

        model = load_adapter(model, request.adapter)
        sentences, learned = _on_adapter(request.adapter, sets)
        session.say(*sentences)
    result: dict[str, Any] = {"model": request.model, "dtype": precision, "adapter": request.adapter}
    result |= {"perplexity": {}, "tasks": {}}
    kept = _parts(session, model)

    def measure(data: Any, progress: Any) -> dict[str, Any]:
        """A perplexity with the likelihoods of its windows, which pair with another model's."""
        measured = perplexity(model, data, batch_size=session.batch(model, data, most=16), progress=progress)
        return {**measured.to_dict(), "nll": list(measured.nll), "counts": list(measured.counts)}

    for source, data in sets.items():
        with session.progress(f"perplexity on {source}") as progress:
            record = kept.json(f"text-{data.digest}", partial(measure, data, progress))
        result["perplexity"][source] = record
        error, windows = record["standard_error"], record["windows"]
        size = f"{record['tokens']} tokens, {windows} window{'s' * (windows > 1)} of {record['length']}"
        value = f"{record['value']:.3f}{plus_minus(error, '.3f')}"
        session.say(f"{called}: perplexity on {source} {value} ({f'{CONVENTION}; ' if error else ''}{size})")
        session.say(*([] if request.against else filter(None, [_on_text((request.model,), [source]).strip()])))
    if request.names:
        result |= _tasks(session, model, session.load_tokenizer(), kept)
    session.say(*_on_cache(request.model))
    return result, learned, kept


def _on_adapter(adapter: str, sets: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Sentences on the rows that trained the adapter, and the texts that hold those."""
    from ..finetuning.finetune import trained_on

    if (trained := trained_on(adapter)) is None:
        return [], []
    learned = [source for source, data in sets.items() if data.text is not None and data.text == trained["text"]]
    sentences = [f"The adapter {adapter} was trained on {trained['rows']} rows of {trained['source']}."]
    sentences += [f"{source} holds the rows that trained this adapter: that is no held-out figure." for source in learned]
    return sentences, learned


def _on_cache(name: str) -> list[str]:
    """Sentences on a folder that has the plan of a cache, which is no part of what is measured here."""
    from ..decision import decision_of
    from ..plan import Plan

    file = _folder_of(name) / "cache.json"
    if not file.is_file():
        return []
    with contextlib.suppress(LayerbudgetError):
        plan = Plan.load(file)
        return [f"{name}: {sentence}" for sentence in decision_of(plan).on_evaluation(plan)]
    return []


def _tasks(session: Session, model: Any, tokenizer: Any, kept: Any) -> dict[str, Any]:
    """Accuracy of every task, and their mean."""
    from ..evaluation.harness import evaluate_tasks
    from ..evaluation.statistics import mean_accuracy

    request: EvaluateRequest = session.request
    options: dict[str, Any] = {**request.given("data_dir", "limit"), "batch_size": session.batch(most=16)}
    accuracies: dict[str, Any] = {}
    with session.progress("tasks") as progress:
        measure = partial(evaluate_tasks, model, tokenizer, progress=progress, **options)
        for group in [[name] for name in request.names] if request.resume else [request.names]:
            accuracies |= kept.json("tasks-" + "-".join(group), partial(measure, group))
    for name, row in accuracies.items():
        value, normed = f"{row['acc']:.4f}{plus_minus(row['stderr'], '.4f')}", ""
        if "acc_norm" in row:
            normed = f", by length (acc_norm) {row['acc_norm']:.4f}{plus_minus(row['acc_norm_stderr'], '.4f')}"
        session.say(f"{name}: accuracy (acc) {value}{normed} ({CONVENTION}; {row['samples']} examples)")
        if row["one_class"] is not None:
            chosen = f"option {row['one_class'] + 1} was chosen for every question"
            session.say(f"{name}: {chosen}; the accuracy is that option's share.")
    if len(accuracies) < 2:
        return {"tasks": accuracies}
    mean = mean_accuracy(accuracies)
    session.say(f"mean of {len(accuracies)} tasks: {mean['acc']:.4f}{plus_minus(mean['stderr'], '.4f')} ({CONVENTION})")
    return {"tasks": accuracies, "mean": mean}


def _parts(session: Session, model: Any) -> Any:
    """Finished texts and tasks of a run that was stopped; none where ``--resume`` was not given."""
    from ..canonical import digest
    from ..models.blocks import fingerprint
    from ..models.machine import PACKAGES, computation, versions
    from ..storage.folders import checksum
    from ..storage.parts import Parts

    asked = session.request
    if asked.resume is None:
        return Parts(None)
    rows = sorted(f for f in Path(asked.data_dir).rglob("*") if f.is_file()) if asked.data_dir else []
    request = {
        "model": fingerprint(model),
        "computation": computation(model),
        "versions": versions((*PACKAGES, "lm-eval", "peft")),
        "batch_size": session.batch(most=16),
        "limit": asked.limit,
        "rows": {str(f): checksum(f) for f in rows},
    }
    own = digest([asked.model, asked.adapter])  # of two models, of which one may be the other with an adapter
    return Parts(Path(asked.resume) / own if asked.against else Path(asked.resume), request)
