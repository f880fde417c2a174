"""``layerbudget score``."""

from __future__ import annotations

import argparse
from typing import Any

from ..sensitivity.estimators import Estimator, estimators, find_estimator
from .outlook import expect, text_of, words_of
from .progress import progress_bar
from .shared import DATA, add_data_options, add_partition_options, load, named_values, refuse, say_share


def register(subparsers: Any) -> None:
    """Add the parser of ``score``."""
    parser = subparsers.add_parser("score")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(parser)
    known = "; ".join(f"{e.name}: {e.summary}" for e in estimators().values())
    parser.add_argument("--estimator", help=f"{known} (default: fisher-gram)")
    add_partition_options(parser)
    parser.add_argument("--damping", type=float, nargs="+", help="one or more dampings (default: a sweep)")
    unit = (
        "relative to each block's own largest or mean eigenvalue, to the median of the blocks' largest ones (one damping for "
        "all), or absolute (default: median for adapter, max for the others)"
    )
    parser.add_argument("--damping-unit", choices=("max", "mean", "median", "absolute"), help=unit)
    parser.add_argument(
        "--set", dest="options", action="append", default=[], metavar="NAME=VALUE",
        help="an option of the estimator, for example --set draws=4 (may be repeated)",
    )  # fmt: skip
    parser.add_argument("--four-bit", action="store_true", help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
    parser.add_argument("--validation", metavar="DATA", help="layerif: validation text (default: see the estimator)")
    parser.add_argument("--excess", action="store_true", help="subtract the noise floor: rank by what noise does not explain")
    parser.add_argument("--resume", metavar="DIR", help="keep finished parts here: resumes, grows with more samples, is reused")
    parser.add_argument("--import", dest="given", metavar="FILE", help="take your own scores from JSON, CSV or npy instead")
    parser.add_argument("--names", metavar="FILE", help="of an npy file: block names or layer numbers, one per line")
    parser.add_argument("--orientation", choices=("gain", "redundancy"), help="of imported scores (default: gain)")
    parser.add_argument("-o", "--out", default="scores.json")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score, write the file, show the table."""
    from ..records import check_output
    from ..report.tables import scores_table

    chosen = find_estimator(arguments.estimator or "fisher-gram")
    options = named_values(arguments.options)
    _refuse_unread(arguments, chosen)
    check_output(arguments.out, overwrite=arguments.overwrite)
    scores = _imported(arguments) if arguments.given else _measured(arguments, chosen, options)
    from ..execution.processes import is_main

    path = scores.save(arguments.out, overwrite=arguments.overwrite) if is_main() else arguments.out
    arguments.console.print(scores_table(scores))
    if scores.extra.get("verdict"):
        arguments.console.print(str(scores.extra["verdict"]))
    arguments.console.print(f"written to {path}")
    return scores.to_dict()


_MEASURING = ("estimator", "damping", "damping_unit", "excess", "resume", "validation", "four_bit", "options")


def _refuse_unread(arguments: argparse.Namespace, chosen: Estimator) -> None:
    """Refuse what imported scores, or an estimator that reads no data, would ignore.

    Raises:
        InvalidInput: Names the flag.
    """
    if arguments.given:
        refuse(arguments, (*_MEASURING, *DATA, "dtype", "device"), "imported scores")
        return
    refuse(arguments, ("orientation", "names"), "measured scores")
    if not chosen.data:
        refuse(arguments, (*DATA, "validation"), chosen.name)


def _imported(arguments: argparse.Namespace) -> Any:
    from ..data.text import read_documents
    from ..models.blocks import describe, partition
    from ..models.loading import load_model
    from ..sensitivity.importing import import_scores

    names = None
    if arguments.names:
        if not arguments.given.lower().endswith(".npy"):
            refuse(arguments, ("names",), "a file that has names")
        names = [line.strip() for line in read_documents(arguments.names)[0][0].splitlines() if line.strip()]
    model = load_model(arguments.model, revision=arguments.revision)
    blocks = partition(model, arguments.by, include=arguments.include, exclude=arguments.exclude)
    orientation = arguments.orientation or "gain"
    return import_scores(arguments.given, blocks, names=names, orientation=orientation, model=describe(model))


def _measured(arguments: argparse.Namespace, chosen: Estimator, options: dict[str, Any]) -> Any:
    from ..data.text import calibration
    from ..doctor.cost import scoring
    from ..models.blocks import partition
    from ..sensitivity.gain import score
    from ..sensitivity.noise import subtract_floor

    named = {"damping": arguments.damping, "damping_unit": arguments.damping_unit, "batch_size": arguments.batch_size}
    chosen.resolve_options(
        {**named, **options, **({"validation": True} if arguments.validation else {})}
    )  # before anything is loaded
    model, tokenizer, data = load(arguments, data=chosen.data)
    if arguments.validation:
        options["validation"] = calibration(
            arguments.validation, tokenizer, samples=max(1, data.samples // 4), length=data.length, seed=data.seed,
            group="evaluation", skip_bad_rows=arguments.skip_bad_rows,
        )  # fmt: skip
    if data is not None and type(model).__name__.endswith("ForMaskedLM"):
        data = _masked(data, tokenizer, data.seed)
    blocks = partition(model, arguments.by, include=arguments.include, exclude=arguments.exclude)
    if "seed" in chosen.options and arguments.seed is not None and options.get("labels") != "data":
        named["seed"] = arguments.seed  # it always seeds the draw of the text
    say_share(arguments, model, blocks)
    what = f"{chosen.name} on {words_of(data)}" if data is not None else chosen.name
    text = text_of(data, arguments)
    expect(arguments, what, model, lambda shape: scoring(chosen.name, text, shape))
    arguments.estimator = chosen.name
    with progress_bar(arguments, f"scoring by {chosen.name}") as progress:
        scores = score(
            model, data, blocks, chosen.name, progress=progress, resume=arguments.resume,
            **{k: v for k, v in named.items() if v is not None}, **options,
        )  # fmt: skip
    return subtract_floor(scores) if arguments.excess else scores


def _masked(data: Any, tokenizer: Any, seed: int) -> Any:
    from ..errors import InvalidInput
    from ..execution.loss import mask_tokens

    if tokenizer.mask_token_id is None:
        raise InvalidInput(
            "The tokenizer has no mask token.",
            "A masked language model is scored on masked tokens.",
            "Save the model's own tokenizer beside it, or use --estimator outlier-ratio, which masks nothing.",
        )
    return mask_tokens(data, tokenizer.mask_token_id, seed=seed)
