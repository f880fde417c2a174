"""Fine-tune ranks or experts by a plan on a labelled task or on text, over seeds, and compare two of them by paired tests.

A result is a folder: of every seed the adapter, the predictions for every held-out row and its metrics; the summary over seeds,
the plan, and what the held-out rows are. It appears whole, or not at all. Meanwhile ``resume`` keeps a checkpoint per epoch and
every finished seed in a folder of its own, from which a run that was stopped continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from typing_extensions import NotRequired, TypedDict

from ..arguments import checked
from ..canonical import dumps, to_jsonable
from ..data.files import Row
from ..data.folders import say_once
from ..data.tasks import Task
from ..data.text import Texts, read_texts
from ..decision import decision_of
from ..errors import CorruptFile, InvalidInput, LayerbudgetError, NotFound
from ..evaluation import statistics
from ..execution.modes import own_random_numbers
from ..execution.processes import broadcast, is_main
from ..models.card import hub_name, loading, model_card
from ..models.loading import load_tokenizer
from ..models.machine import computation, versions
from ..plan import Plan
from ..records import made_by, read_json
from ..storage import folders, reading
from ..storage.parts import Parts
from ..storage.writing import check_space, real, whole, write_text
from . import training
from .adapters import Loader, check_trained, classifier_loader, started
from .protocol import PRESETS, Protocol
from .rows import answers_of, rows_of

logger = logging.getLogger(__name__)
_RESULT, _CHECKPOINTS = "result.json", "checkpoints"


@checked
@own_random_numbers()
def finetune(
    model: Path | str | Loader,
    plan: Plan,
    task: Path | str | Sequence[Row] | Task | Texts,
    out: Path | str,
    *,
    tokenizer: Any = None,
    protocol: Protocol = PRESETS["default"],
    seeds: Sequence[int] = (0,),
    resume: Path | str | None = None,
    overwrite: bool = False,
    bf16: bool = False,
    checkpointing: bool = False,
    against: Path | str | None = None,
    report_to: Sequence[str] = (),
    callbacks: Sequence[Any] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Fine-tune a plan over seeds; return the record that is also written to ``result.json``.

    It has per split and metric the mean, the standard error and the values by seed; ``change`` of the loss of held-out rows by
    training, with its standard error over the rows; trained parameters; the plan's and the
    task's digests; ``against``, see :func:`compare`.

    Args:
        model: ``demo``, a folder, a hub id, or ``seed -> model`` (:func:`layerbudget.finetuning.adapters.classifier_loader`).
        plan: A plan of ranks or experts.
        task: A source of rows of text or a list of rows (:func:`layerbudget.data.text.read_texts`), what that returns, or a
            labelled task (:func:`layerbudget.data.tasks.load_task`).
        out: Folder of the results; one sub-folder per seed.
        tokenizer: The model's tokenizer; it is found where the model is named, and needed where a function loads it.
        protocol: Numbers of the run.
        seeds: Seeds; each sets the head, the adapters' start and the order of rows.
        resume: Folder that keeps finished seeds, and a checkpoint per epoch of the others; a run continues with what is there.
        overwrite: Replace the results of an earlier run in ``out`` when the new ones are complete.
        bf16: Autocast in bfloat16; always on where the base is held in it.
        checkpointing: Compute activations again in the backward pass instead of keeping them.
        against: Another result folder, for paired tests; that they can be made is checked before the training.
        report_to: Trackers of transformers that get the loss while it trains: ``wandb``, ``trackio``, ...
        callbacks: Further callbacks of the Trainer; they must not change numbers.
        progress: Called with steps done, steps in total, and what is at work.

    Raises:
        AlreadyExists: ``out`` holds something that is not replaced.
        ModelMismatch: ``resume`` holds seeds of another plan, task, protocol, base or version.
        InvalidInput: An argument is of another type, a seed is named twice, a tracker is not known or would keep nothing, a
            number of the protocol that the plan does not read, what several processes cannot share, or too little to pair with
            ``against``.
        NotFound, CorruptFile: ``against`` lacks a result, or holds one that does not read.
        MissingDependency: The package of a tracker is not installed.
        CoverageError: The recount differs from the plan.
        NotFinite: The training diverged: its loss or weights are not finite.
    """
    model = str(model) if isinstance(model, Path) else model
    _check_arguments(model, task, tokenizer, protocol)
    training.check_reporters(report_to)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise InvalidInput(
            f"The seeds are {list(seeds)}.", "At least one, each once: a repeated run is no sample.", "Drop some."
        )
    check_trained(plan)
    protocol.check(plan)
    tokenizer = load_tokenizer(model) if tokenizer is None and isinstance(model, str) else tokenizer
    if not isinstance(task, Task | Texts):
        task = read_texts(task, tokenizer, limit=protocol.cutoff, everything=protocol.on_prompt)
    load = classifier_loader(model, len(getattr(task, "labels", ()))) if isinstance(model, str) else model
    settings = getattr(load, "settings", None)
    training.check(protocol, settings or {}, bf16=bf16)
    if against is not None:
        ours = {"task": task.name, "metric": task.metric, "rule": plan.rule, "seeds": list(seeds)}
        names = (Path(out).name, Path(against).name)
        _partner({**ours, "identity": {"task": task.digest}}, answers_of(task), against, names)
    learned = set[Any](task.train)
    for split, rows in task.evaluation.items():
        if shared := sum(row in learned for row in rows):
            what = f"{task.name}: {shared} of {len(rows)} rows of {split} train the adapter too"
            say_once(f"{what}, which flatters it: judge it on other rows.")
    broadcast(lambda: folders.check_folder(out, overwrite=overwrite))
    base = computation(load(seeds[0])) if settings is None else dict(settings)
    identity = _identity(plan, task, protocol, base, bf16=bf16)
    options = {
        "bf16": bf16,
        "checkpointing": checkpointing,
        "callbacks": (*decision_of(plan).callbacks(protocol), *callbacks),
        "progress": progress,
        "report_to": report_to,
    }
    run = _Run(load, plan, task, tokenizer, protocol, identity, options)
    with contextlib.ExitStack() as stack:
        staging = broadcast(lambda: stack.enter_context(folders.new_folder(out, overwrite=overwrite)))
        place = staging if resume is None else real(resume)
        if resume is not None:
            broadcast(lambda: Parts(place, identity).names())  # refuses the folder of another run
        phases = [f"seed {i + 1} of {len(seeds)}" for i in range(len(seeds))]
        results = [run.seed(place, s, resume is not None, phase) for s, phase in zip(seeds, phases, strict=True)]
        record = run.record(results, seeds)
        if is_main():
            for seed in seeds if place != staging else ():
                _copy_seed(place / f"seed-{seed}", staging / f"seed-{seed}")
            run.write(record, staging)
            if against is not None and (tests := _compared(staging, out, against)) is not None:
                record["against"] = tests
                write_text(staging / "against.json", dumps(tests))
    return record


def _check_arguments(model: Any, task: Any, tokenizer: Any, protocol: Any) -> None:
    """Refuse what nothing can be trained with: arguments of another type, and a function that loads without a tokenizer."""
    if isinstance(model, nn.Module) or not (isinstance(model, str) or callable(model)):
        problem = f"model is of type {type(model).__name__}."
        known = "Every seed loads its own: it is a name, a folder, or a function from a seed to a model."
        raise InvalidInput(problem, known, "Save the model with its tokenizer, and give the folder.")
    if not isinstance(model, str) and tokenizer is None:
        make = "Give tokenizer=layerbudget.load_tokenizer(NAME)."
        raise InvalidInput("model is a function, and there is no tokenizer.", "It is found where the model is named.", make)
    if not isinstance(task, Path | str | Sequence | Task | Texts):
        problem, known = f"task is of type {type(task).__name__}.", "It is a name or a path of text, a list of rows, or a task."
        raise InvalidInput(problem, known, "Name one, for example 'stdlib'.")
    if not isinstance(protocol, Protocol):
        made = "Take one of layerbudget.finetuning.protocol.PRESETS, for example PRESETS['default']."
        raise InvalidInput(f"protocol is of type {type(protocol).__name__}.", "It should be a Protocol.", made)


def _identity(plan: Plan, task: Task | Texts, protocol: Protocol, base: Mapping[str, Any], *, bf16: bool) -> dict[str, Any]:
    """Identity of a finished seed, all that it depends on: a seed of another identity is not taken up again."""
    return {
        "plan": plan.digest,
        "task": task.digest,
        "protocol": dataclasses.asdict(protocol),
        "bf16": bf16,
        "base": base,
        "versions": versions(("torch", "transformers", "peft")),
    }


def _copy_seed(source: Path, target: Path) -> None:
    """Copy adapter and result of a finished seed."""
    target.mkdir(exist_ok=True)
    shutil.copytree(source / "adapter", target / "adapter")
    shutil.copyfile(source / _RESULT, target / _RESULT)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Everything that the seeds of one fine-tuning share."""

    load: Loader
    plan: Plan
    task: Task | Texts
    tokenizer: Any
    protocol: Protocol
    identity: dict[str, Any]
    options: dict[str, Any]  # of training.train

    def seed(self, place: Path, seed: int, keep: bool, phase: str) -> dict[str, Any]:
        """Return the record of a seed, which lies finished in a folder, or is trained into it."""
        folder = place / f"seed-{seed}"
        result = broadcast(lambda: _finished(folder, self.identity)) if keep else None
        if result is not None:
            return result
        plain = self.load(seed)
        architecture = type(plain).__name__
        rows = rows_of(self.task, self.tokenizer, plain, self.protocol)
        model = started(plain, self.plan, self.protocol, rows, self.task)
        check_space({folder: _room(model, keep)})
        checkpoint = broadcast(lambda: _last_checkpoint(folder)) if keep else None
        with whole(folder):
            result = training.train(
                model,
                rows,
                self.protocol,
                seed,
                folder / _CHECKPOINTS,
                keep=keep,
                checkpoint=checkpoint,
                phase=phase,
                **self.options,
            )
            decision_of(self.plan).before_saving(model, self.protocol)
            _save(model, folder)
        judged = training.judge(model, rows, bf16=self.options["bf16"])
        if not all(math.isfinite(value) for metrics in judged["metrics"].values() for value in metrics.values()):
            raise training.diverged(self.protocol, f"with seed {seed}")
        record = {"seed": seed, **result, **judged, "identity": self.identity}
        record["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if is_main():
            write_text(folder / _RESULT, dumps(record), overwrite=True)
            card = adapter_card(self.plan, self.task, record, architecture)
            write_text(folder / "adapter" / "README.md", card, overwrite=True)
            if keep:
                folders.seal(folder, ("adapter", _RESULT))
            else:
                shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)
        return record

    def record(self, results: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
        """Return the record of a fine-tuning from the results of its seeds."""
        task, plan = self.task, self.plan
        record = {
            "schema_version": 1,
            "task": task.name,
            "metric": task.metric,
            "data": {"source": task.name, "text": getattr(task, "text", None)},
            "rows": {"train": len(task.train), **{split: len(rows) for split, rows in task.evaluation.items()}},
            "kind": plan.kind,
            "rule": plan.rule,
            "trained_parameters": results[-1]["trained_parameters"],
            "seeds": list(seeds),
            "identity": self.identity,
            "metrics": _summary(results),
        }
        changes = _changes(results, answers_of(task))
        return {**record, "change": changes} if changes else record

    def write(self, record: Mapping[str, Any], folder: Path) -> None:
        """Write the record, the plan, and the labels that paired tests need."""
        write_text(folder / _RESULT, dumps({**record, "made_by": made_by()}))
        write_text(folder / "labels.json", dumps(answers_of(self.task)))
        self.plan.save(folder / "plan.json")


def adapter_card(plan: Plan, task: Task | Texts, record: Mapping[str, Any], architecture: str) -> str:
    """The model card of the adapter of one seed: its ranks or experts, and what was measured on held-out rows.

    ``architecture`` is the name of the base's class.
    """
    low, high = int(plan.counts.min()), int(plan.counts.max())
    rows = {
        plan.kind: f"{low} to {high}" if low < high else f"{low}",
        "trained parameters": f"{record['trained_parameters']:,}",
        "trained on": f"{len(task.train)} rows of {Path(task.name).name}, seed {record['seed']}",
    }
    rows |= {
        f"held-out {name} ({split})": f"{value:.4f}"
        for split, metrics in record["metrics"].items()
        for name, value in metrics.items()
    }
    load = loading(architecture, labels=getattr(task, "labels", ())).replace("'.'", repr(hub_name(plan) or "BASE"))
    by_peft = f"{load}\nfrom peft import PeftModel\nmodel = PeftModel.from_pretrained(model, '.')"
    use = "layerbudget evaluate BASE --adapter ." if decision_of(plan).adapter_type else by_peft
    what = "left as they are, with an adapter beside them whose size differs from matrix to matrix."
    return model_card(
        plan, "adapter", f"adapted by {plan.kind}", what, rows, use, architecture=architecture, library="peft", tags=("lora",)
    )


def _room(model: nn.Module, keep: bool) -> int:
    """Bytes that one seed may take at once: the adapter, and three checkpoints of it with the moments of the optimiser."""
    checkpoints = 3 if keep else 0
    return sum(p.numel() * (4 + checkpoints * (p.element_size() + 8)) for p in model.parameters() if p.requires_grad)


def _last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a seed whose files are what was written; later ones are removed."""
    checkpoints = [f for f in (folder / _CHECKPOINTS).glob("checkpoint-*") if f.is_dir() and f.name[11:].isdigit()]
    for checkpoint in sorted(checkpoints, key=lambda f: -int(f.name[11:])):
        if folders.broken(checkpoint) == []:
            return checkpoint
        logger.warning("%s is half written or broken, and removed.", checkpoint)
        shutil.rmtree(checkpoint)
    if checkpoints:
        logger.warning("%s has no whole checkpoint: the seed begins anew.", folder)
    return None


def _finished(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Record of a finished seed; ``None`` where there is none, or one that is broken or of another run."""
    if not (folder / _RESULT).is_file():
        return None
    if folders.broken(folder) == []:
        record: dict[str, Any] = reading.read(folder / _RESULT, "finetune", as_type=dict[str, Any])
        if record.get("identity") == json.loads(dumps(identity)):
            return record
    logger.warning("%s is not whole: the seed is trained again.", folder)
    return None


def _save(model: Any, folder: Path) -> None:
    state = training.trained(model) if training.shares_weights() else None
    if is_main():
        model.save_pretrained(str(folder / "adapter"), state_dict=state)


def _summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for split, metrics in results[0]["metrics"].items():
        summary[split] = {}
        for name in metrics:
            values = [r["metrics"][split][name] for r in results]
            mean, error = statistics.mean_and_error(values)
            summary[split][name] = {"value": mean, "stderr": error, "by_seed": values}
    return summary


def _changes(results: Sequence[dict[str, Any]], tokens: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """How training changed the loss per token of held-out rows, mean over seeds, and its paired standard error over rows."""
    changes: dict[str, Any] = {}
    for split, weights in tokens.items():
        if len(weights) < 2 or not all(split in r.get("losses_before", {}) for r in results):
            continue
        each = np.mean([np.subtract(r["losses"][split], r["losses_before"][split]) for r in results], axis=0)
        difference, error, _ = statistics.ratio(each, np.asarray(weights, dtype=float))
        changes[split] = {"difference": difference, "stderr": error, "rows": len(weights)}
    return changes


def trained_on(adapter: Path | str) -> dict[str, Any] | None:
    """Return ``{source, text, rows}`` of what trained an adapter; ``None`` where it does not lie in a fine-tuning folder.

    ``text`` is the content hash of the source, as that of a calibration set; it is null for a labelled task.
    """
    try:
        record = read_result(Path(adapter).expanduser().resolve().parents[1])
    except (NotFound, CorruptFile, IndexError):
        return None
    return {"source": record["task"], "text": None, **record.get("data", {}), "rows": record["rows"]["train"]}


def read_result(folder: Path | str) -> dict[str, Any]:
    """Return the summary of a fine-tuning folder."""
    path, remedy = Path(folder) / _RESULT, "Point to a folder that `layerbudget finetune` wrote."
    if not path.is_file():
        raise NotFound(f"{folder} has no {_RESULT}.", "", remedy)
    record: dict[str, Any] = read_json(path, "finetune") if path.stat().st_size else {}
    try:
        reading.converted(record, _Summary)
    except ValueError as error:
        raise CorruptFile(f"{path} holds no fine-tuning ({error}).", "", remedy) from error
    return record


class _Trained(TypedDict):
    task: str


class _Summary(TypedDict):
    """The part of a folder's summary that a comparison needs."""

    seeds: list[int]
    identity: _Trained
    task: str
    metric: str
    rule: str


class _Judged(TypedDict):
    """The part of a seed's result that a comparison needs."""

    metrics: dict[str, dict[str, float]]
    losses: NotRequired[dict[str, list[float]]]
    predictions: NotRequired[dict[str, list[int]]]


def _judged(folder: Path, seed: int, metric: str, truth: Mapping[str, Sequence[int]]) -> _Judged:
    """Return the result of a seed, which has the metric and every held-out row of a comparison."""
    path, remedy = folder / f"seed-{seed}" / _RESULT, "Train that folder again, or leave out --against."
    if not path.is_file():
        raise NotFound(f"{folder} has no seed-{seed}/{_RESULT}.", "A comparison needs it.", remedy)
    judged: _Judged = reading.read(path, "finetune", as_type=_Judged, remedy=remedy)
    rows: Mapping[str, Any] = (judged.get("losses") if metric == "loss" else judged.get("predictions")) or {}
    for split, answers in truth.items():
        if metric not in judged["metrics"].get(split, {}) or len(rows.get(split, ())) != len(answers):
            what = f"{path} does not have the {metric} and the {len(answers)} rows of {split}."
            raise CorruptFile(what, "A comparison needs them.", remedy)
    return judged


def _partner(
    ours: Mapping[str, Any], truth: Mapping[str, Sequence[int]], folder: Path | str, names: tuple[str, str]
) -> tuple[list[int], list[_Judged], tuple[str, str]]:
    """Return the seeds that a summary shares with that of a folder, the folder's results of those, and how both are called.

    ``truth`` is that of :func:`answers_of`.

    Raises:
        NotFound, CorruptFile: The folder lacks a result, or holds one that does not read.
        InvalidInput: Another task, no seed in common, or too few held-out rows.
    """
    theirs = read_result(folder)
    shared = [s for s in ours["seeds"] if s in theirs["seeds"]]
    one, other = (ours["rule"], theirs["rule"]) if ours["rule"] != theirs["rule"] else names
    if ours["identity"]["task"] != theirs["identity"]["task"] or not shared:
        same = "" if ours["identity"]["task"] == theirs["identity"]["task"] else ", of other rows"
        raise InvalidInput(
            f"{one} holds {ours['task']} with seeds {ours['seeds']}, "
            f"{other} holds {theirs['task']} with seeds {theirs['seeds']}{same}.",
            "The same rows to train on and held out, and at least one shared seed, are needed.",
            "Run both with the same --task, or --data and --held-out, and the same --seeds.",
        )
    few = next((split for split, rows in truth.items() if len(rows) < 2), None) if ours["metric"] == "loss" else None
    if few is not None:
        raise InvalidInput(
            f"{ours['task']} has one row in {few}.",
            "A paired test over rows needs two at least.",
            "Train both with more rows, or leave out --against.",
        )
    return shared, [_judged(Path(folder), s, ours["metric"], truth) for s in shared], (one, other)


def _compared(staging: Path, out: Path | str, against: Path | str) -> dict[str, Any] | None:
    """Return the paired tests of a finished training; None, and a sentence, where the other folder changed meanwhile."""
    try:
        return compare(staging, against, names=(Path(out).name, Path(against).name))
    except LayerbudgetError as error:
        logger.warning("%s holds the adapters without the comparison with %s: %s", out, against, error)
        return None


def compare(first: Path | str, second: Path | str, names: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return paired tests between two result folders of the same task, called ``names`` where their rules are the same.

    By split: ``seeds`` (paired t over shared seeds, the task's metric; null below two), ``samples`` (McNemar over all questions
    of the first shared seed; for text a paired t over its held-out rows), each with a sentence, and ``verdict``, from the test
    over seeds alone: only they can say whether another training would do the same.

    Raises:
        NotFound, CorruptFile: A folder lacks a result, or holds one that does not read.
        InvalidInput: They are of other tasks, share no seed, or have too few held-out rows.
    """
    places = [Path(first), Path(second)]
    a = read_result(first)
    truths: dict[str, list[int]] = reading.read(places[0] / "labels.json", "labels", as_type=dict[str, list[int]])
    shared, theirs_by_seed, (one, other) = _partner(a, truths, second, names or (places[0].name, places[1].name))
    runs = [[_judged(places[0], s, a["metric"], truths) for s in shared], theirs_by_seed]
    outcome: dict[str, Any] = {}
    for split, truth in truths.items():
        values = [[r["metrics"][split][a["metric"]] for r in side] for side in runs]
        over_seeds = statistics.paired_t(*values) if len(shared) > 1 else None
        lower = a["metric"] == "loss"
        if lower:
            mine, theirs = (side[0]["losses"][split] for side in runs)
            over_samples = statistics.paired_t(mine, theirs, truth)
        else:
            mine, theirs = (np.asarray(side[0]["predictions"][split]) == np.asarray(truth) for side in runs)
            over_samples = statistics.mcnemar((mine, theirs))
        size = over_samples.size(one, other, "nats per token" if lower else "accuracy")
        samples = f"The trainings of seed {shared[0]} alone, over held-out rows: {size}. That says nothing of another training."
        seeds = over_seeds and over_seeds.sentence(one, other, a["metric"], lower_is_better=lower)
        verdict = "One training each: whether another would do the same cannot be said. Train both with two seeds or more."
        if over_seeds is not None:
            who = over_seeds.outcome(one, other, lower_is_better=lower)
            verdict = f"Over {len(shared)} trainings each, {who} ({a['metric']} {over_seeds.difference:+.4f})."
        outcome[split] = {
            "metric": a["metric"],
            "verdict": verdict,
            "seeds": {**vars(over_seeds), "sentence": seeds} if over_seeds else None,
            "samples": {**vars(over_samples), "sentence": samples},
        }
    return to_jsonable(outcome)  # as the file has it: an interval without an end is null
