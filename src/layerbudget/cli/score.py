"""``layerbudget score``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from typing import Any

from ..scores import Scores
from ..sensitivity.estimators import ESTIMATORS, Estimator
from .display import expect, progress_bar, say, say_next, say_share, show_table, text_of, words_of
from .files import check_rows
from .options import DATA, add, add_data, add_out, add_set, add_verb, given, line_of, load, load_model, refuse, settings

_RANK = 8  # mean rank of the plan that follows scores of ranks


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

    chosen, parsed = ESTIMATORS.find(a.estimator or "fisher-gram"), dict(vars(a))
    if a.given:
        refuse(a, ("estimator", "damping", "excess", "resume", "four_bit", *DATA, "dtype", "device"), "imported scores")
    elif not chosen.data:
        refuse(a, DATA, chosen.name)
    if "help" not in a.set:
        check_output(a.out, overwrite=a.overwrite)
        check_rows(a.data)
    scores = _imported(a) if a.given else _measured(a, chosen)
    path = scores.save(a.out, overwrite=a.overwrite) if is_main() else a.out
    if not a.json:
        _show(a, scores)
    say(a, f"Written to {path}.", *_sentences(scores))
    _say_what_follows(a, scores, path, parsed)
    return scores.written()


def _say_what_follows(a: argparse.Namespace, scores: Scores, path: Any, parsed: dict[str, Any]) -> None:
    """Say the command that follows: scores that are trusted are planned, others are mended first, or leave uniform."""
    from ..plans.verdict import MOSTLY_NOISE, PUBLISHED
    from ..sensitivity.noise import remedy

    needs = remedy(scores)
    if needs == "excess" or needs.isdigit():
        other = {"out": "excess.json", "excess": True}
        other = {"out": f"scores-{needs}.json", "samples": int(needs)} if needs.isdigit() else other
        again = line_of(argparse.Namespace(**{**vars(a), **other}), {**parsed, **other})
        say_next(a, *shlex.split(again)[1:])
        return
    by_rank = "increments" in scores.extra
    kind: tuple[str, ...] = ("ranks", "--mean-rank", f"{_RANK}") if by_rank else ("sparsity", "--sparsity", "0.5")
    own = PUBLISHED.get(scores.estimator)
    if needs or (_noise(scores) or 0.0) > MOSTLY_NOISE:
        own = "uniform"
    elif a.given and scores.orientation == "gain" and scores.values().max() <= 0:
        say(a, "No score is above zero, which the default rule needs. Add a constant to all, or plan by how they differ:")
        own = "owl"
    say_next(a, "plan", kind[0], path, *kind[1:], *(("--rule", own) if own else ()), "-o", "plan.json")


def _show(a: argparse.Namespace, scores: Scores) -> None:
    """Show scores of single matrices as a picture of the network, others as a table; ``--table`` shows every row."""
    from ..report.tables import cell, scores_grid, scores_table

    sheet, grid = scores_table(scores), None if a.table else scores_grid(scores)
    if grid is not None:
        a.console.print(grid)
    else:
        show_table(a, sheet.title, sheet.header, sheet.rows, lambda row: [cell(value) for value in row])


def _sentences(scores: Scores) -> list[str]:
    """The blocks at either end, and the verdict: whether the ranking can be trusted, where the estimator says it."""
    values, own = scores.values(), scores.extra.get("verdict")
    names = [scores.names[i] for i in (int(values.argmax()), int(values.argmin()))]
    ends = f"most at {names[0]} ({values.max():.3g}), least at {names[1]} ({values.min():.3g}), in "
    ends += "the unit of the file" if scores.unit == "arbitrary" else scores.unit
    ends += f"{_on_noise(scores)}."
    loss, told = scores.extra.get("loss"), list[str]()
    if loss is not None and values.max() > 2 * loss:  # half of a gain is what the quadratic model promises
        more = f"Gains are larger than the loss itself ({loss:.3g}): the steps of the quadratic model have no limit."
        told.append(f"{more} Compare them within this file only.")
    return [*told, f"{ends[0].upper()}{ends[1:]}", f"Verdict: {own}"] if own else [*told, f"Verdict: {ends}"]


def _on_noise(scores: Scores) -> str:
    """Words on how much of the gain of ranks is noise, in the plan that the command which follows makes."""
    from ..decisions.ranks.plan import FEW
    from ..plans.verdict import MOSTLY_NOISE, noise_alone

    noise, scored = _noise(scores), scores.data.get("samples", FEW)
    told = "" if noise is None else f"; at mean rank {_RANK}, {noise_alone(noise)}"
    if "increments" not in scores.extra or scored >= FEW or (noise or 0.0) > MOSTLY_NOISE:
        return told
    return f"{told}. {scored} scored rows, fewer than {FEW}, do not tell ranks apart: the plan says which uniform rank to take"


def _noise(scores: Scores) -> float | None:
    """The share of the gain of ranks that noise alone would give in a plan of the usual mean rank; None where none is known."""
    from ..decisions.ranks.plan import plan_ranks
    from ..errors import LayerbudgetError

    if "increments_floor" not in scores.extra:
        return None
    try:
        share: float | None = plan_ranks(scores, mean_rank=_RANK).extra["noise_share"]
    except LayerbudgetError:  # fewer ranks were measured than that plan needs
        return None
    return share


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
