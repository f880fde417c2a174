"""``layerbudget score``."""

from __future__ import annotations

import argparse
from typing import Any

from .shared import add_data_options, load, named_values, progress_bar


def register(subparsers: Any) -> None:
    """Add the parser of ``score``."""
    parser = subparsers.add_parser("score")
    parser.add_argument("model", metavar="MODEL", help="demo, a local folder, or a hub id")
    add_data_options(parser)
    parser.add_argument("--estimator", default="fisher-gram", help="gradient-norm, fisher-gram, kfac, ggn, rank-gain, ...")
    parser.add_argument("--by", default="layer", help="layer, linear, or a regular expression (default %(default)s)")
    parser.add_argument("--include", help="only matrices whose full name matches this regular expression")
    parser.add_argument("--exclude", help="drop matrices whose full name matches this regular expression")
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
    parser.add_argument("--stage", metavar="DIR", help="keep finished parts here: resumes, grows with more samples, is reused")
    parser.add_argument("--import", dest="given", metavar="FILE", help="take your own scores from JSON or CSV instead")
    parser.add_argument("--orientation", choices=("gain", "redundancy"), default="gain", help="of imported scores")
    parser.add_argument("-o", "--out", default="scores.json")
    parser.set_defaults(handler=handler)


def handler(arguments: argparse.Namespace) -> dict[str, Any]:
    """Score, write the file, show the table."""
    from ..errors import InvalidInput
    from ..records import check_output
    from ..report.tables import scores_table
    from ..scores.gain import check_estimator

    check_estimator(arguments.estimator)
    ignored = [n for n in ("excess", "stage", "validation", "four_bit", "options") if getattr(arguments, n)]
    if arguments.given and ignored:
        flag = "--set" if ignored[0] == "options" else f"--{ignored[0].replace('_', '-')}"
        raise InvalidInput(f"{flag} has no meaning for imported scores.", "", "Leave it out, or score instead of importing.")
    options = named_values(arguments.options)
    check_output(arguments.out, overwrite=arguments.overwrite)
    scores = _imported(arguments) if arguments.given else _measured(arguments, options)
    path = scores.save(arguments.out, overwrite=arguments.overwrite)
    arguments.console.print(scores_table(scores))
    if scores.extra.get("verdict"):
        arguments.console.print(str(scores.extra["verdict"]))
    arguments.console.print(f"written to {path}")
    return scores.to_dict()


def _imported(arguments: argparse.Namespace) -> Any:
    from ..blocks import describe, partition
    from ..loading import load_model
    from ..scores.importing import import_scores

    model = load_model(arguments.model, dtype=arguments.dtype, revision=arguments.revision)
    blocks = partition(model, arguments.by, include=arguments.include, exclude=arguments.exclude)
    return import_scores(arguments.given, blocks, orientation=arguments.orientation, model=describe(model))


def _measured(arguments: argparse.Namespace, options: dict[str, Any]) -> Any:
    from ..blocks import partition
    from ..data.text import calibration
    from ..scores.gain import score
    from ..scores.noise import subtract_floor

    model, tokenizer, data = load(arguments)
    if arguments.validation:
        options["validation"] = calibration(
            arguments.validation, tokenizer, samples=max(1, arguments.samples // 4), length=arguments.length,
            seed=arguments.seed, group="evaluation",
        )  # fmt: skip
    if type(model).__name__.endswith("ForMaskedLM"):
        data = _masked(data, tokenizer, arguments.seed)
    blocks = partition(model, arguments.by, include=arguments.include, exclude=arguments.exclude)
    if arguments.stage:
        options["stage"] = arguments.stage
    with progress_bar(arguments, f"scoring by {arguments.estimator}") as progress:
        scores = score(
            model, data, blocks, estimator=arguments.estimator, damping=arguments.damping,
            damping_unit=arguments.damping_unit, batch_size=arguments.batch_size, seed=arguments.seed, progress=progress,
            **options,
        )  # fmt: skip
    return subtract_floor(scores) if arguments.excess else scores


def _masked(data: Any, tokenizer: Any, seed: int) -> Any:
    from ..errors import InvalidInput
    from ..scores.loss import mask_tokens

    if tokenizer.mask_token_id is None:
        raise InvalidInput(
            "The tokenizer has no mask token.", "A masked language model is scored on masked tokens.", "Add one."
        )
    return mask_tokens(data, tokenizer.mask_token_id, seed=seed)
