"""``layerbudget score``."""

from __future__ import annotations

import argparse
from typing import Any

from ..sensitivity.estimators import Estimator, estimators, find_estimator
from .display import expect, progress_bar, say_share, text_of, words_of
from .options import (
    DATA,
    add_data,
    add_model,
    add_partition,
    add_resume,
    add_set,
    add_verb,
    given,
    load,
    load_model,
    refuse,
    settings,
)


def register(subparsers: Any) -> None:
    """Add the parser of ``score``."""
    p = add_verb(subparsers, "score", handler)
    add_model(p)
    p.add_argument("-o", "--out", default="scores.json", help="write the scores here (default: scores.json)")
    known = "; ".join(f"{e.name}: {e.summary}" for e in estimators().values())
    p.add_argument("--estimator", help=f"{known} (default: fisher-gram)")
    add_partition(p)
    p.add_argument("--damping", type=float, nargs="+", help="one or more dampings (default: a sweep)")
    p.add_argument("--excess", action="store_true", help="subtract the noise floor: rank by what noise does not explain")
    add_data(p)
    p.add_argument("--four-bit", action="store_true", help="hold the model's matrices in 4 bits (NF4, needs bitsandbytes)")
    advanced = p.add_argument_group("advanced")
    add_set(advanced, "an option of the estimator, for example damping_unit=absolute or draws=4")
    add_resume(advanced, "finished parts")
    advanced.add_argument(
        "--import", dest="given", metavar="FILE", help="take scores of your own from a CSV or JSON file instead"
    )


def handler(a: argparse.Namespace) -> dict[str, Any]:
    """Score, write the file, show the table."""
    from ..execution.processes import is_main
    from ..records import check_output
    from ..report.tables import scores_table

    chosen, own = find_estimator(a.estimator or "fisher-gram"), settings(a)
    if a.given:
        refuse(a, ("estimator", "damping", "excess", "resume", "four_bit", *DATA, "dtype", "device"), "imported scores")
    elif not chosen.data:
        refuse(a, DATA, chosen.name)
    check_output(a.out, overwrite=a.overwrite)
    scores = _imported(a, own) if a.given else _measured(a, chosen, own)
    path = scores.save(a.out, overwrite=a.overwrite) if is_main() else a.out
    a.console.print(scores_table(scores))
    if scores.extra.get("verdict"):
        a.console.print(str(scores.extra["verdict"]))
    a.console.print(f"written to {path}")
    return scores.to_dict()


def _imported(a: argparse.Namespace, own: dict[str, Any]) -> Any:
    from ..errors import InvalidInput
    from ..models.blocks import describe, partition
    from ..sensitivity.importing import import_scores

    strange = next((name for name in own if name != "orientation"), None)
    if strange is not None:
        raise InvalidInput(f"Imported scores do not read {strange}.", "They read orientation.", "Leave it out.")
    model = load_model(a)
    blocks = partition(model, a.by, include=a.include, exclude=a.exclude)
    return import_scores(a.given, blocks, model=describe(model), **own)


def _measured(a: argparse.Namespace, chosen: Estimator, own: dict[str, Any]) -> Any:
    from ..data.text import calibration
    from ..doctor.cost import scoring
    from ..models.blocks import partition
    from ..sensitivity.gain import score
    from ..sensitivity.noise import subtract_floor

    options = given(a, "damping", "batch_size") | own
    named = "validation" in chosen.options and isinstance(own.get("validation"), str)  # a text, which is read below
    chosen.resolve_options({name: v for name, v in options.items() if not named or name != "validation"})
    model, tokenizer, data = load(a, data=chosen.data)
    if named:
        options["validation"] = calibration(
            options["validation"],
            tokenizer,
            samples=max(1, data.samples // 4),
            length=data.length,
            seed=data.seed,
            group="evaluation",
        )
    if data is not None and type(model).__name__.endswith("ForMaskedLM"):
        data = _masked(data, tokenizer, data.seed)
    blocks = partition(model, a.by, include=a.include, exclude=a.exclude)
    if "seed" in chosen.options and a.seed is not None and own.get("labels") != "data":
        options["seed"] = a.seed  # it always seeds the draw of the text
    say_share(a, model, blocks)
    what = f"{chosen.name} on {words_of(data)}" if data is not None else chosen.name
    text = text_of(data, a)
    expect(a, what, model, lambda shape: scoring(chosen.name, text, shape))
    a.estimator = chosen.name
    with progress_bar(a, f"scoring by {chosen.name}") as progress:
        scores = score(model, data, blocks, chosen.name, progress=progress, resume=a.resume, **options)
    return subtract_floor(scores) if a.excess else scores


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
