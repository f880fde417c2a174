"""``layerbudget evaluate``."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from .display import expect, progress_bar, say, text_of
from .options import (
    add_model,
    add_place,
    add_resume,
    add_verb,
    batch_of,
    load_model,
    load_tokenizer,
    one_process,
    refuse,
)


def register(subparsers: Any) -> None:
    """Add the parser of ``evaluate``."""
    p = add_verb(subparsers, "evaluate", handler)
    add_model(p)
    p.add_argument("--perplexity", nargs="+", metavar="DATA", help="texts to report perplexity on (default: stdlib)")
    p.add_argument("--tasks", help="comma-separated: rte, boolq, arc_easy, arc_challenge, hellaswag, winogrande, openbookqa")
    p.add_argument("--against", metavar="B", help="paired tests against another model, or a result that --out wrote (.json)")
    p.add_argument("-o", "--out", metavar="FILE", help="also write the result to this JSON file")
    p.add_argument("--adapter", metavar="DIR", help="a saved adapter to put on the model: LoRA ranks or experts")
    p.add_argument("--length", type=int, help="tokens per window (default: 256)")
    p.add_argument("--windows", type=int, help="at most so many windows (default: all of the text)")
    p.add_argument("--data-dir", metavar="DIR", help="folder with the tasks' local files; without it the hub is asked")
    p.add_argument("--limit", type=int, help="at most so many examples of each task")
    p.add_argument("--batch-size", type=int, help="sequences per forward pass (default: 16, fewer where memory is short)")
    add_place(p)
    p.add_argument("--four-bit", action="store_true", help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
    add_resume(p, "finished texts and tasks")


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, show what was measured, with its parameters, and compare where asked."""
    from ..execution.processes import is_main
    from ..records import check_output, dumps, write_text

    if a.tasks:
        one_process("Tasks are evaluated by lm-eval")
    if a.out:
        check_output(a.out, overwrite=a.overwrite)
    a.texts = a.perplexity or ([] if a.tasks else ["stdlib"])
    refuse(a, () if a.tasks else ("data_dir", "limit"), "perplexity alone")
    refuse(a, () if a.texts else ("length", "windows"), "tasks alone")
    saved = a.against is not None and a.against.endswith(".json")
    other = _read(a.against) if saved else None  # before the work
    result = _measured(a)
    if a.against:
        from ..evaluation.statistics import compare_results

        if other is None:
            second = argparse.Namespace(**{**vars(a), "model": a.against, "adapter": None})
            other = _measured(second)
        found = compare_results(result, other, (a.model, a.against))
        result["against"] = {"model": other["model"], **found}
        say(a, found["sentences"])
    if a.out and is_main():
        write_text(a.out, dumps(result), overwrite=a.overwrite)
    return result


def _read(path: str) -> dict[str, Any]:
    """A result that ``--out`` wrote."""
    from ..errors import CorruptFile
    from ..storage import reading

    record = reading.read(Path(path), "JSON")
    if not isinstance(record, dict) or not {"model", "tasks", "perplexity"} <= set(record):
        raise CorruptFile(f"{path} is no evaluation.", "It needs tasks and perplexity.", "Make one: evaluate --out FILE.json.")
    return record


def _measured(a: argparse.Namespace) -> dict[str, Any]:
    """Evaluate one model."""
    from ..evaluation.perplexity import evaluation_set, perplexity

    tokenizer = load_tokenizer(a)
    wanted = {"length": a.length or 256, "windows": a.windows}
    sets = {s: evaluation_set(s, tokenizer, **wanted) for s in a.texts}
    model = load_model(a)
    _expect(a, model, sets)
    if a.adapter:
        from ..finetuning.adapters import load_adapter

        model = load_adapter(model, a.adapter)
    result: dict[str, Any] = {"model": a.model, "adapter": a.adapter, "perplexity": {}, "tasks": {}}
    kept = _parts(a, model)
    for source, data in sets.items():
        with progress_bar(a, f"perplexity on {source}") as progress:
            measure = partial(perplexity, model, data, batch_size=batch_of(a, model, data, most=16), progress=progress)
            found = kept.json(f"text-{data.digest}", lambda measure=measure: _record(measure()))  # type: ignore[misc]
        result["perplexity"][source] = found
        a.console.print(
            f"perplexity on {source}: {found['value']:.3f} +- {found['standard_error']:.3f} "
            f"({found['tokens']} tokens, {found['windows']} windows of {found['length']})"
        )
    if a.tasks:
        result |= _tasks(a, model, tokenizer, kept)
    kept.clear()
    return result


def _expect(a: argparse.Namespace, model: Any, sets: dict[str, Any]) -> None:
    """Say what the evaluation will cost: twice as much where another model follows."""
    from ..doctor.cost import evaluating

    texts = [text_of(data, a) for data in sets.values()]
    times = 2.0 if a.against and not a.against.endswith(".json") else 1.0
    parts = [dataclasses.replace(p, times=p.times * times) for p in evaluating(texts, _names(a), a.limit, batch_of(a, most=16))]
    windows = [f"{data.samples} windows of {data.length} tokens of {source}" for source, data in sets.items()]
    expect(a, ", ".join([*windows, *_names(a)]), model, lambda _: parts)


def _names(a: argparse.Namespace) -> list[str]:
    return [t.strip() for t in (a.tasks or "").split(",") if t.strip()]


def _record(found: Any) -> dict[str, Any]:
    """A perplexity with the likelihoods of its windows, which pair with another model's."""
    return {**found.to_dict(), "nll": list(found.nll), "counts": list(found.counts)}


def _tasks(a: argparse.Namespace, model: Any, tokenizer: Any, kept: Any) -> dict[str, Any]:
    """Accuracy of every task, and their mean."""
    from ..evaluation.harness import evaluate_tasks
    from ..evaluation.statistics import mean_accuracy

    batch, found = batch_of(a, most=16), dict[str, Any]()
    with progress_bar(a, "tasks") as progress:
        measure = partial(
            evaluate_tasks, model, tokenizer, data_dir=a.data_dir, limit=a.limit, batch_size=batch, progress=progress
        )
        for group in [[name] for name in _names(a)] if a.resume else [_names(a)]:
            found |= kept.json("tasks-" + "-".join(group), partial(measure, group))
    for name, row in found.items():
        normed = f", by length (acc_norm) {row['acc_norm']:.4f} +- {row['acc_norm_stderr']:.4f}" if "acc_norm" in row else ""
        accuracy = f"accuracy (acc) {row['acc']:.4f} +- {row['stderr']:.4f}"
        a.console.print(f"{name}: {accuracy}{normed} ({row['samples']} examples)")
        if row["one_class"] is not None:
            chosen = f"option {row['one_class'] + 1} was chosen for every question"
            a.console.print(f"{name}: {chosen}; the accuracy is that option's share.")
    if len(found) < 2:
        return {"tasks": found}
    mean = mean_accuracy(found)
    a.console.print(f"mean of {len(found)} tasks: {mean['acc']:.4f} +- {mean['stderr']:.4f}")
    return {"tasks": found, "mean": mean}


def _parts(a: argparse.Namespace, model: Any) -> Any:
    """Finished texts and tasks of a run that was stopped; none where ``--resume`` was not given."""
    from ..storage.folders import checksum
    from ..storage.parts import Parts

    if a.resume is None:
        return Parts(None)
    from ..models.blocks import fingerprint
    from ..models.machine import PACKAGES, computation, versions
    from ..records import digest

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
