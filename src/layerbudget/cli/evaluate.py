"""``layerbudget evaluate``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from .shared import add_place_options, load_named, progress_bar, refuse


def register(subparsers: Any) -> None:
    """Add the parser of ``evaluate``."""
    parser = subparsers.add_parser("evaluate")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    parser.add_argument("--adapter", metavar="DIR", help="a saved adapter to put on the model: LoRA ranks or experts")
    parser.add_argument("--perplexity", nargs="+", metavar="DATA", help="texts to report perplexity on (default: stdlib)")
    parser.add_argument(
        "--tasks", help="comma-separated tasks: rte, boolq, arc_easy, arc_challenge, hellaswag, winogrande, openbookqa"
    )
    parser.add_argument("--data-dir", help="folder with the tasks' local files; without it the hub is asked")
    parser.add_argument("--limit", type=int, help="at most so many examples of each task")
    parser.add_argument("--length", type=int, help="tokens per window (default 256)")
    parser.add_argument("--windows", type=int, help="at most so many windows (default: all of the text)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--four-bit", action="store_true", help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
    add_place_options(parser)
    parser.add_argument("--resume", metavar="DIR", help="keep finished texts and tasks here until all are done")
    parser.add_argument("-o", "--out", help="also write the result to this JSON file")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate and show what was measured, with its parameters."""
    from ..evaluation.perplexity import evaluation_set, perplexity
    from ..loading import load_tokenizer
    from ..records import check_output, dumps, write_text

    if arguments.out:
        check_output(arguments.out, overwrite=arguments.overwrite)
    sources = arguments.perplexity or ([] if arguments.tasks else ["stdlib"])
    refuse(arguments, () if arguments.tasks else ("data_dir", "limit"), "perplexity alone")
    refuse(arguments, () if sources else ("length", "windows"), "tasks alone")
    tokenizer = load_tokenizer(arguments.model, revision=arguments.revision)
    sets = {s: evaluation_set(s, tokenizer, length=arguments.length or 256, windows=arguments.windows) for s in sources}
    model = load_named(arguments, four_bit=arguments.four_bit)
    if arguments.adapter:
        from ..lora.loading import load_adapter

        model = load_adapter(model, arguments.adapter)
    result: dict[str, Any] = {"model": arguments.model, "adapter": arguments.adapter, "perplexity": {}, "tasks": {}}
    kept = _parts(arguments, model)
    for source, data in sets.items():
        with progress_bar(arguments, f"perplexity on {source}") as progress:
            measure = partial(perplexity, model, data, batch_size=arguments.batch_size, progress=progress)
            found = kept.json(f"text-{data.digest}", lambda measure=measure: measure().to_dict())  # type: ignore[misc]
        result["perplexity"][source] = found
        arguments.console.print(
            f"perplexity on {source}: {found['value']:.3f} +- {found['standard_error']:.3f} "
            f"({found['tokens']} tokens, {found['windows']} windows of {found['length']})"
        )
    if arguments.tasks:
        from ..evaluation.harness import evaluate_tasks

        names = [t.strip() for t in arguments.tasks.split(",") if t.strip()]
        with progress_bar(arguments, "tasks") as progress:
            measure_tasks = partial(
                evaluate_tasks, model, tokenizer, data_dir=arguments.data_dir, limit=arguments.limit,
                batch_size=arguments.batch_size, progress=progress,
            )  # fmt: skip
            for group in [[name] for name in names] if arguments.resume else [names]:
                result["tasks"] |= kept.json("tasks-" + "-".join(group), partial(measure_tasks, group))
        for name, row in result["tasks"].items():
            arguments.console.print(f"{name}: accuracy {row['acc']:.4f} +- {row['stderr']:.4f} ({row['samples']} examples)")
            if row["one_class"] is not None:
                arguments.console.print(
                    f"{name}: option {row['one_class'] + 1} was chosen for every question; the accuracy is that option's share."
                )
    if arguments.out:
        write_text(arguments.out, dumps(result), overwrite=arguments.overwrite)
    kept.clear()
    return result


def _parts(arguments: argparse.Namespace, model: Any) -> Any:
    """Finished texts and tasks of a run that was stopped; none where ``--resume`` was not given.

    Raises:
        ModelMismatch: The folder holds another evaluation.
    """
    from ..keeping.folders import checksum
    from ..keeping.parts import Parts

    if arguments.resume is None:
        return Parts(None, "")
    from ..blocks import fingerprint
    from ..provenance import PACKAGES, computation, versions
    from ..records import digest

    rows = sorted(f for f in Path(arguments.data_dir).rglob("*") if f.is_file()) if arguments.data_dir else []
    request = {
        "model": fingerprint(model), "computation": computation(model), "versions": versions((*PACKAGES, "lm-eval", "peft")),
        "batch_size": arguments.batch_size, "limit": arguments.limit, "rows": {str(f): checksum(f) for f in rows},
    }  # fmt: skip
    return Parts(arguments.resume, digest(request), request)
