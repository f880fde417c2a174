"""``layerbudget evaluate``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import LayerbudgetError
from ..plans.decided import is_same_text, texts_of_folder
from ..verdicts import CONVENTION, plus_minus
from .display import expect, named_text, progress_bar, say, say_next
from .options import (
    add,
    add_out,
    add_place,
    add_verb,
    batch_of,
    load_model,
    load_tokenizer,
    one_process,
    refuse,
    split_revision,
)


def register(subparsers: Any) -> None:
    """Add the parser of ``evaluate``."""
    p = add_verb(subparsers, "evaluate", handler)
    add(p, "model", help="demo, a local folder, a hub id (owner/name[@revision]), or a GGUF file that transformers reads")
    p.add_argument("--perplexity", nargs="+", metavar="DATA", help="texts to report perplexity on (default: stdlib)")
    p.add_argument("--tasks", help="comma-separated: rte, boolq, arc_easy, arc_challenge, hellaswag, winogrande, openbookqa")
    p.add_argument("--against", metavar="B", help="paired tests against another model, or a result that --out wrote (.json)")
    add_out(p, "also write the result to this JSON file", metavar="FILE")
    p.add_argument("--adapter", metavar="DIR", help="a saved adapter to put on the model: LoRA ranks or experts")
    add(p, "--length", help="tokens per window (default: 256)")
    add(p, "--windows", help="at most so many windows (default: all of the text)")
    add(p, "--data-dir", help="folder with the tasks' local files; without it the hub is asked")
    p.add_argument("--limit", type=int, help="at most so many examples of each task")
    add(p, "--batch-size", help="sequences per forward pass (default: 16, fewer where memory is short)")
    add_place(p)
    add(p, "--four-bit", "--resume")


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, show what was measured, with its parameters, and compare where asked."""
    from ..evaluation.statistics import compare_results
    from ..execution.processes import is_main
    from ..records import check_output, dumps, write_text

    a.names = list(dict.fromkeys(t.strip() for t in (a.tasks or "").split(",") if t.strip()))
    a.texts = a.perplexity or ([] if a.names else ["stdlib"])
    if a.names:
        one_process("Tasks are evaluated by lm-eval")
    if a.out:
        check_output(a.out, overwrite=a.overwrite)
    refuse(a, () if a.names else ("data_dir", "limit"), "perplexity alone")
    refuse(a, () if a.texts else ("length", "windows"), "tasks alone")
    if a.data_dir:
        from ..evaluation.harness import local_rows

        for name in a.names:
            local_rows(name, a.data_dir)  # what does not read is refused before the work
    other = _read(a.against) if a.against and a.against.endswith(".json") else None  # before the work
    for name in (a.model, *([a.against] if a.against and other is None else [])):
        _check_model(a, name)
    result = _measured(a, 2.0 if a.against and other is None else 1.0)
    if a.against:
        other = other or _measured(argparse.Namespace(**{**vars(a), "model": a.against, "adapter": None}))
        found = compare_results(result, other, (a.adapter or a.model, a.against))
        found["verdict"] += _on_text((a.model, str(other["model"])), found["perplexity"]) + _on_rows(a)
        result["against"] = {"model": other["model"], "dtype": other.get("dtype"), **found}
        say(a, *_on_precision(a, result, other), *found["sentences"], f"Verdict: {found['verdict']}")
    if a.out and is_main():
        write_text(a.out, dumps(result), overwrite=a.overwrite)
    if a.adapter and not a.against:
        say(a, "Verdict: the adapter was compared with nothing.")
        texts, tasks = (["--perplexity", *a.texts] if a.texts else []), (["--tasks", a.tasks] if a.names else [])
        say_next(a, "evaluate", a.model, "--adapter", a.adapter, *texts, *tasks, "--against", a.model)
    return result


def _check_model(a: argparse.Namespace, name: str) -> None:
    """Refuse what cannot be loaded, before the work."""
    from ..models.gguf_file import gguf_config
    from ..models.loading import resolve
    from ..storage.checkpoint import gguf_of

    if (file := gguf_of(name)) is None:
        resolve(*split_revision(name))
        return
    refuse(a, ("stream", "four_bit"), f"{name}, whose types become numbers when it is loaded")
    gguf_config(file)


def _loaders(a: argparse.Namespace) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what loads the tokenizer and the model that the options name; a GGUF file by transformers' reader of it."""
    from ..models.gguf_file import load_gguf, load_gguf_tokenizer
    from ..storage.checkpoint import gguf_of

    if gguf_of(a.model) is None:
        return load_tokenizer, load_model
    place = {"dtype": a.dtype or "auto", "device": a.device or "auto"}
    return lambda _: load_gguf_tokenizer(a.model), lambda _: load_gguf(a.model, **place)


def _on_text(folders: Sequence[str], texts: Iterable[str]) -> str:
    """Words on texts that decided the plan of one of the folders: they flatter it, and are no judge. Empty without any."""
    said = []
    for folder in folders:
        decided = texts_of_folder(_folder_of(folder))
        for text in texts:
            if is_same_text(text, decided):
                said.append(f" But {text} decided the plan of {folder}, which flatters it: judge it on other text.")
    return "".join(said)


def _on_rows(a: argparse.Namespace) -> str:
    """Words on texts that hold the rows which trained the adapter. Empty without any."""
    return "".join(f" But {text} holds the rows that trained the adapter: judge it on other rows." for text in a.learned)


def _folder_of(name: str) -> Path:
    """Folder that apply wrote, which may be named by its ``model.gguf``."""
    from ..storage.checkpoint import GGUF_FILE

    path = Path(name).expanduser()
    return path.parent if path.name == GGUF_FILE else path


def _on_precision(a: argparse.Namespace, result: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """A sentence on two models that were not computed in the same precision; of a result of before it may not be known."""
    own, theirs = result["dtype"], other.get("dtype", result["dtype"])
    if own == theirs:
        return []
    remedy = "--dtype float32 computes both alike"
    if a.against.endswith(".json"):  # that one is not computed again
        remedy = f"--dtype {theirs} computes both alike" if " " not in theirs else "evaluate both models with --dtype float32"
    return [f"{a.model} was computed in {own} and {a.against} in {theirs}, which is a part of the difference; {remedy}."]


def _read(path: str) -> dict[str, Any]:
    """A result that ``--out`` wrote."""
    from ..errors import CorruptFile
    from ..storage import reading

    record = reading.read(Path(path), "JSON")
    if not isinstance(record, dict) or not {"model", "tasks", "perplexity"} <= set(record):
        raise CorruptFile(f"{path} is no evaluation.", "It needs tasks and perplexity.", "Make one: evaluate --out FILE.json.")
    return record


def _measured(a: argparse.Namespace, models: float = 1.0) -> dict[str, Any]:
    """Evaluate one model, of so many."""
    from ..doctor.cost import Part, Text
    from ..evaluation.perplexity import evaluation_set, perplexity
    from ..models.loading import precision_of

    tokenizer_of, model_of = _loaders(a)
    tokenizer = tokenizer_of(a)
    sets = {s: evaluation_set(s, tokenizer, length=a.length or 256, windows=a.windows) for s in a.texts}
    model = model_of(a)
    asked = Text(samples=4 * (a.limit or 1000), length=80, batch=batch_of(a, most=16))  # a forward for every option
    texts = [Text(samples=d.samples, length=d.length, batch=min(asked.batch, d.samples)) for d in sets.values()]
    named = {source: named_text(source, "--perplexity") for source in sets}
    windows = [f"{data.samples} windows of {data.length} tokens of {named[source]}" for source, data in sets.items()]
    parts = [Part("forward", text, times=models) for text in (*texts, *(asked for _ in a.names))]
    expect(a, ", ".join([*windows, *a.names]), model, parts)
    precision, a.learned = precision_of(model), []
    called = f"{a.model} with the adapter {a.adapter}" if a.adapter else a.model
    if a.adapter:
        from ..finetuning.adapters import load_adapter

        model = load_adapter(model, a.adapter)
        say(a, *_on_adapter(a, sets))
    result: dict[str, Any] = {"model": a.model, "dtype": precision, "adapter": a.adapter, "perplexity": {}, "tasks": {}}
    kept = _parts(a, model)

    def measure(data: Any, progress: Any) -> dict[str, Any]:
        """A perplexity with the likelihoods of its windows, which pair with another model's."""
        found = perplexity(model, data, batch_size=batch_of(a, model, data, most=16), progress=progress)
        return {**found.to_dict(), "nll": list(found.nll), "counts": list(found.counts)}

    for source, data in sets.items():
        with progress_bar(a, f"perplexity on {source}") as progress:
            found = kept.json(f"text-{data.digest}", partial(measure, data, progress))
        result["perplexity"][source] = found
        size = f"{found['tokens']} tokens, {found['windows']} windows of {found['length']}"
        value = f"{found['value']:.3f}{plus_minus(found['standard_error'], '.3f')}"
        say(a, f"{called}: perplexity on {source} {value} ({CONVENTION}; {size})")
        say(a, *([] if a.against else filter(None, [_on_text((a.model,), [source]).strip()])))
    if a.names:
        result |= _tasks(a, model, tokenizer, kept)
    kept.clear()
    say(a, *_on_cache(a.model))
    return result


def _on_adapter(a: argparse.Namespace, sets: dict[str, Any]) -> list[str]:
    """Sentences on the rows that trained the adapter, and on texts that hold those, which are left in ``a.learned``."""
    from ..finetuning.finetune import trained_on

    if (trained := trained_on(a.adapter)) is None:
        return []
    a.learned = [source for source, data in sets.items() if data.text is not None and data.text == trained["text"]]
    told = [f"The adapter {a.adapter} was trained on {trained['rows']} rows of {trained['source']}."]
    return told + [f"{source} holds the rows that trained this adapter: that is no held-out figure." for source in a.learned]


def _on_cache(name: str) -> list[str]:
    """A sentence on a folder that has the plan of a cache, which is no part of what is measured here."""
    from ..plan import Plan

    file = _folder_of(name) / "cache.json"
    if not file.is_file():
        return []
    with contextlib.suppress(LayerbudgetError):
        plan = Plan.load(file)
        whole = plan.extra.get("whole")
        if plan.kind == "cache" and whole and min(plan.values, default=16) < 16:
            cost, how = (whole["measured"], "measured") if whole["measured"] is not None else (whole["predicted"], "predicted")
            return [
                f"{name}: these figures have the rounded weights in them and not the rounded cache, which is in 16 bits here; "
                f"the {cost:.3g} nats per token that were {how} for the plan have both in them."
            ]
    return []


def _tasks(a: argparse.Namespace, model: Any, tokenizer: Any, kept: Any) -> dict[str, Any]:
    """Accuracy of every task, and their mean."""
    from ..evaluation.harness import evaluate_tasks
    from ..evaluation.statistics import mean_accuracy

    own, found = {"data_dir": a.data_dir, "limit": a.limit, "batch_size": batch_of(a, most=16)}, dict[str, Any]()
    with progress_bar(a, "tasks") as progress:
        measure = partial(evaluate_tasks, model, tokenizer, progress=progress, **own)
        for group in [[name] for name in a.names] if a.resume else [a.names]:
            found |= kept.json("tasks-" + "-".join(group), partial(measure, group))
    for name, row in found.items():
        value, normed = f"{row['acc']:.4f}{plus_minus(row['stderr'], '.4f')}", ""
        if "acc_norm" in row:
            normed = f", by length (acc_norm) {row['acc_norm']:.4f}{plus_minus(row['acc_norm_stderr'], '.4f')}"
        say(a, f"{name}: accuracy (acc) {value}{normed} ({CONVENTION}; {row['samples']} examples)")
        if row["one_class"] is not None:
            chosen = f"option {row['one_class'] + 1} was chosen for every question"
            say(a, f"{name}: {chosen}; the accuracy is that option's share.")
    if len(found) < 2:
        return {"tasks": found}
    mean = mean_accuracy(found)
    say(a, f"mean of {len(found)} tasks: {mean['acc']:.4f}{plus_minus(mean['stderr'], '.4f')} ({CONVENTION})")
    return {"tasks": found, "mean": mean}


def _parts(a: argparse.Namespace, model: Any) -> Any:
    """Finished texts and tasks of a run that was stopped; none where ``--resume`` was not given."""
    from ..models.blocks import fingerprint
    from ..models.machine import PACKAGES, computation, versions
    from ..records import digest
    from ..storage.folders import checksum
    from ..storage.parts import Parts

    if a.resume is None:
        return Parts(None)
    rows = sorted(f for f in Path(a.data_dir).rglob("*") if f.is_file()) if a.data_dir else []
    request = {
        "model": fingerprint(model),
        "computation": computation(model),
        "versions": versions((*PACKAGES, "lm-eval", "peft")),
        "batch_size": batch_of(a, most=16),
        "limit": a.limit,
        "rows": {str(f): checksum(f) for f in rows},
    }
    return Parts(Path(a.resume) / digest(a.model) if a.against else Path(a.resume), request)
