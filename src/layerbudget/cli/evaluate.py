"""``layerbudget evaluate``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .progress import progress_bar
from .shared import add_place_options, add_skip, batch_of, load_named, refuse


def register(subparsers: Any) -> None:
    """Add the parser of ``evaluate``."""
    parser = subparsers.add_parser("evaluate")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    parser.add_argument("--adapter", metavar="DIR", help="a saved adapter to put on the model: LoRA ranks or experts")
    parser.add_argument("--perplexity", nargs="+", metavar="DATA", help="texts to report perplexity on (default: stdlib)")
    add_skip(parser)
    parser.add_argument(
        "--tasks", help="comma-separated tasks: rte, boolq, arc_easy, arc_challenge, hellaswag, winogrande, openbookqa"
    )
    parser.add_argument("--data-dir", help="folder with the tasks' local files; without it the hub is asked")
    parser.add_argument("--limit", type=int, help="at most so many examples of each task")
    parser.add_argument("--length", type=int, help="tokens per window (default 256)")
    parser.add_argument("--windows", type=int, help="at most so many windows (default: all of the text)")
    parser.add_argument("--batch-size", type=int, help="sequences per forward pass (default 16, fewer where memory is short)")
    parser.add_argument("--four-bit", action="store_true", help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
    add_place_options(parser)
    parser.add_argument(
        "--against", metavar="B", help="paired tests against another model, or against a result that --out wrote (.json)"
    )
    parser.add_argument("--resume", metavar="DIR", help="keep finished texts and tasks here until all are done")
    parser.add_argument("-o", "--out", help="also write the result to this JSON file")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, show what was measured, with its parameters, and compare where asked."""
    from ..execution.processes import is_main, process_group
    from ..records import check_output, dumps, write_text

    if arguments.tasks and process_group() is not None:
        raise InvalidInput(
            "Tasks are evaluated by lm-eval in one process.", "Perplexity is shared between processes.", "Leave torchrun out."
        )
    if arguments.out:
        check_output(arguments.out, overwrite=arguments.overwrite)
    sources = arguments.perplexity or ([] if arguments.tasks else ["stdlib"])
    refuse(arguments, () if arguments.tasks else ("data_dir", "limit"), "perplexity alone")
    refuse(arguments, () if sources else ("length", "windows", "skip_bad_rows"), "tasks alone")
    if arguments.against and arguments.against.endswith(".json"):
        other = _read(arguments.against)  # before the work
    result = _measured(arguments, arguments.model, arguments.adapter, sources)
    if arguments.against:
        from ..evaluation.statistics import compare_results

        if not arguments.against.endswith(".json"):
            other = _measured(arguments, arguments.against, None, sources)
        names = (str(arguments.model), str(arguments.against))
        result["against"] = {"model": other["model"], **compare_results(result, other, names)}
        for text in result["against"]["sentences"]:
            arguments.console.print(text)
    if arguments.out and is_main():
        write_text(arguments.out, dumps(result), overwrite=arguments.overwrite)
    return result


def _read(path: str) -> dict[str, Any]:
    """A result that ``evaluate --out`` wrote.

    Raises:
        NotFound, CorruptFile: No such file, or another one.
    """
    from ..errors import CorruptFile
    from .files import read_any

    record = read_any(Path(path))
    if not isinstance(record, dict) or not {"model", "tasks", "perplexity"} <= set(record):
        raise CorruptFile(f"{path} is no evaluation.", "It needs tasks and perplexity.", "Make one: evaluate --out FILE.json.")
    return record


def _measured(arguments: argparse.Namespace, name: str, adapter: str | None, sources: list[str]) -> dict[str, Any]:
    """Evaluate one model."""
    from ..evaluation.perplexity import evaluation_set, perplexity
    from ..models.loading import load_tokenizer

    named = argparse.Namespace(**{**vars(arguments), "model": name})
    tokenizer = load_tokenizer(name, revision=arguments.revision)
    wanted = {"length": arguments.length or 256, "windows": arguments.windows, "skip_bad_rows": arguments.skip_bad_rows}
    sets = {s: evaluation_set(s, tokenizer, **wanted) for s in sources}
    model = load_named(named, four_bit=arguments.four_bit)
    _expect(arguments, named, model, sets)
    if adapter:
        from ..finetuning.adapters import load_adapter

        model = load_adapter(model, adapter)
    result: dict[str, Any] = {"model": name, "adapter": adapter, "perplexity": {}, "tasks": {}}
    kept = _parts(arguments, model, name)
    for source, data in sets.items():
        with progress_bar(arguments, f"perplexity on {source}") as progress:
            measure = partial(perplexity, model, data, batch_size=batch_of(arguments, model, data, most=16), progress=progress)
            found = kept.json(f"text-{data.digest}", lambda measure=measure: _told(measure()))  # type: ignore[misc]
        result["perplexity"][source] = found
        arguments.console.print(
            f"perplexity on {source}: {found['value']:.3f} +- {found['standard_error']:.3f} "
            f"({found['tokens']} tokens, {found['windows']} windows of {found['length']})"
        )
    if arguments.tasks:
        result |= _tasks(arguments, model, tokenizer, kept)
    kept.clear()
    return result


def _expect(arguments: argparse.Namespace, named: argparse.Namespace, model: Any, sets: dict[str, Any]) -> None:
    """Say what the evaluation will cost: twice as much where another model follows."""
    import dataclasses

    from ..doctor.cost import evaluating
    from .outlook import expect, text_of

    texts = [text_of(data, arguments) for data in sets.values()]
    tasks = [t.strip() for t in (arguments.tasks or "").split(",") if t.strip()]
    times = 2.0 if arguments.against and not arguments.against.endswith(".json") else 1.0

    def parts(shape: Any) -> list[Any]:
        found = evaluating(texts, tasks, arguments.limit, batch_of(arguments, most=16))
        return [dataclasses.replace(p, times=p.times * times) for p in found]

    windows = [f"{data.samples} windows of {data.length} tokens of {source}" for source, data in sets.items()]
    expect(named, ", ".join([*windows, *tasks]), model, parts)
    arguments.outlook = getattr(named, "outlook", None)  # one for both models


def _told(found: Any) -> dict[str, Any]:
    """A perplexity with the likelihoods of its windows, which pair with another model's."""
    return {**found.to_dict(), "nll": list(found.nll), "counts": list(found.counts)}


def _tasks(arguments: argparse.Namespace, model: Any, tokenizer: Any, kept: Any) -> dict[str, Any]:
    """Accuracy of every task, and their mean."""
    from ..evaluation.harness import evaluate_tasks
    from ..evaluation.statistics import mean_accuracy

    names = [t.strip() for t in arguments.tasks.split(",") if t.strip()]
    with progress_bar(arguments, "tasks") as progress:
        measure = partial(
            evaluate_tasks, model, tokenizer, data_dir=arguments.data_dir, limit=arguments.limit,
            batch_size=batch_of(arguments, most=16), progress=progress,
        )  # fmt: skip
        found: dict[str, Any] = {}
        for group in [[name] for name in names] if arguments.resume else [names]:
            found |= kept.json("tasks-" + "-".join(group), partial(measure, group))
    for name, row in found.items():
        normed = f", by length (acc_norm) {row['acc_norm']:.4f} +- {row['acc_norm_stderr']:.4f}" if "acc_norm" in row else ""
        arguments.console.print(
            f"{name}: accuracy (acc) {row['acc']:.4f} +- {row['stderr']:.4f}{normed} ({row['samples']} examples)"
        )
        if row["one_class"] is not None:
            arguments.console.print(
                f"{name}: option {row['one_class'] + 1} was chosen for every question; the accuracy is that option's share."
            )
    if len(found) < 2:
        return {"tasks": found}
    mean = mean_accuracy(found)
    arguments.console.print(f"mean of {len(found)} tasks: {mean['acc']:.4f} +- {mean['stderr']:.4f}")
    return {"tasks": found, "mean": mean}


def _parts(arguments: argparse.Namespace, model: Any, name: str) -> Any:
    """Finished texts and tasks of a run that was stopped; none where ``--resume`` was not given.

    Raises:
        ModelMismatch: The folder holds another evaluation.
    """
    from ..storage.folders import checksum
    from ..storage.parts import Parts

    if arguments.resume is None:
        return Parts(None)
    from ..models.blocks import fingerprint
    from ..models.machine import PACKAGES, computation, versions
    from ..records import digest

    rows = sorted(f for f in Path(arguments.data_dir).rglob("*") if f.is_file()) if arguments.data_dir else []
    request = {
        "model": fingerprint(model), "computation": computation(model), "versions": versions((*PACKAGES, "lm-eval", "peft")),
        "batch_size": batch_of(arguments, most=16), "limit": arguments.limit, "rows": {str(f): checksum(f) for f in rows},
    }  # fmt: skip
    folder = Path(arguments.resume)
    return Parts(folder / digest(name) if arguments.against else folder, request)
