"""``layerbudget score``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..sensitivity.estimators import ESTIMATORS, Estimator
from .display import expect, progress_bar, say, say_share, text_of, words_of
from .options import DATA, add, add_data, add_out, add_set, add_verb, given, load, load_model, refuse, settings


def register(subparsers: Any) -> None:
    """Add the parser of ``score``."""
    p = add_verb(subparsers, "score", handler)
    add(p, "model")
    add_out(p, "write the scores here (default: scores.json)", default="scores.json")
    known = "; ".join(f"{e.name}: {e.summary}" for e in ESTIMATORS.all().values())
    p.add_argument("--estimator", help=f"{known} (default: fisher-gram)")
    add(p, "--by", "--exclude")
    p.add_argument("--include", metavar="REGEX", help="take only matrices whose full name matches")
    add(p, "--damping", help="one or more dampings (default: a sweep)")
    p.add_argument("--excess", action="store_true", help="subtract the noise floor: rank by what noise does not explain")
    add_data(p)
    add(p, "--four-bit")
    advanced = p.add_argument_group("advanced")
    add_set(advanced, "an option of the estimator, for example damping_unit=absolute or draws=4")
    add(advanced, "--resume")
    advanced.add_argument(
        "--import", dest="given", metavar="FILE", help="take scores of your own from a CSV or JSON file instead"
    )


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Score, write the file, show the table."""
    from ..execution.processes import is_main
    from ..records import check_output
    from ..report.tables import scores_table

    chosen = ESTIMATORS.find(a.estimator or "fisher-gram")
    if a.given:
        refuse(a, ("estimator", "damping", "excess", "resume", "four_bit", *DATA, "dtype", "device"), "imported scores")
    elif not chosen.data:
        refuse(a, DATA, chosen.name)
    check_output(a.out, overwrite=a.overwrite)
    scores = _imported(a) if a.given else _measured(a, chosen)
    path = scores.save(a.out, overwrite=a.overwrite) if is_main() else a.out
    a.console.print(scores_table(scores))
    verdict = scores.extra.get("verdict")
    say(a, *([str(verdict)] if verdict else []), f"written to {path}")
    return scores.to_dict()


def _imported(a: argparse.Namespace) -> Any:
    from ..models.blocks import describe, partition
    from ..sensitivity.importing import import_scores

    own, model = settings(a, import_scores), load_model(a)
    blocks = partition(model, a.by, include=a.include, exclude=a.exclude)
    return import_scores(a.given, blocks, model=describe(model), **own)


def _measured(a: argparse.Namespace, chosen: Estimator) -> Any:
    from ..data.text import calibration
    from ..doctor.cost import scoring
    from ..models.blocks import partition
    from ..sensitivity.gain import score
    from ..sensitivity.noise import subtract_floor

    known = {n: dataclasses.replace(o, type=str) if n == "validation" else o for n, o in chosen.options.items()}
    options = given(a, "damping", "batch_size") | settings(a, known, what=f"the estimator {chosen.name}")
    validation = options.pop("validation", None)
    chosen.resolve_options(options)
    model, tokenizer, data = load(a, data=chosen.data)
    if validation is not None:
        size = {"samples": max(1, data.samples // 4), "length": data.length, "seed": data.seed}
        text = calibration(validation, tokenizer, group="evaluation", **size)
        options["validation"] = text
    if data is not None and type(model).__name__.endswith("ForMaskedLM"):
        data = _masked(data, tokenizer)
    blocks = partition(model, a.by, include=a.include, exclude=a.exclude)
    if "seed" in chosen.options and a.seed is not None and options.get("labels") != "data":
        options["seed"] = a.seed  # it always seeds the draw of the text
    say_share(a, model, blocks)
    expect(a, words_of(chosen.name, data), model, scoring(chosen.name, text_of(data, a)))
    a.estimator = chosen.name
    with progress_bar(a, f"scoring by {chosen.name}") as progress:
        scores = score(model, data, blocks, chosen.name, progress=progress, resume=a.resume, **options)
    return subtract_floor(scores) if a.excess else scores


def _masked(data: Any, tokenizer: Any) -> Any:
    from ..errors import InvalidInput
    from ..execution.loss import mask_tokens

    if tokenizer.mask_token_id is None:
        raise InvalidInput(
            "The tokenizer has no mask token.",
            "A masked language model is scored on masked tokens.",
            "Save the model's own tokenizer beside it, or use --estimator outlier-ratio, which masks nothing.",
        )
    return mask_tokens(data, tokenizer.mask_token_id, seed=data.seed)
