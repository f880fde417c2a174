"""``layerbudget score``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from ..decision import DECISIONS, ScoresAdvice
from ..decisions.files import check_rows
from ..errors import InvalidInput
from ..registry import Option, options_of
from ..requests import READING, TextRequest, four_bit_option, line_of, model_option, option, out_option, resume_option
from ..scores import Scores
from ..sensitivity.estimators import ESTIMATORS, Estimator
from .session import Session

_FILLED = ("batch_size", "seed", "model", "estimator")  # options of estimators that have flags, or are filled in
_USUAL = ("sparsity", "--sparsity", "0.5")  # the plan that follows where no decision knows better


def _estimators() -> str:
    known = "; ".join(f"{e.name}: {e.summary}" for e in ESTIMATORS.all().values())
    return f"{known} (default: fisher-gram)"


@dataclasses.dataclass(kw_only=True)
class ScoreRequest(TextRequest):
    """Measure what each layer can still gain, and write scores.json."""

    command: ClassVar[str] = "score"

    model: str = model_option()
    out: str = out_option("write the scores here (default: scores.json)", default="scores.json")
    estimator: str | None = option(None, metavar="NAME", help=_estimators)
    by: str = option("layer", help="blocks: layer (default), linear, or a regular expression")
    include: str | None = option(None, metavar="REGEX", help="take only matrices whose full name matches")
    exclude: str | None = option(None, metavar="REGEX", help="leave out matrices whose full name matches")
    damping: tuple[float, ...] | None = option(None, help="one or more dampings (default: a sweep)")
    excess: bool = option(False, help="subtract the noise floor: rank by what noise does not explain")
    four_bit: bool = four_bit_option()
    resume: str | None = resume_option()
    imported: str | None = option(
        None,
        flag="--import",
        metavar="FILE",
        role="reads",
        help="take scores of your own from a CSV or JSON file instead",
    )

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the estimator that is named, or of scores of one's own."""
        if "import" in typed:
            from ..sensitivity.importing import import_scores

            known = options_of(import_scores)
        else:
            known = ESTIMATORS.find(typed.get("estimator", "fisher-gram")).options
        text = {"validation": "text that influence is counted on, as --data names one"}
        return {
            name: dataclasses.replace(option, type=str, help=text[name]) if name in text else option
            for name, option in known.items()
            if name not in cls.options() and name not in _FILLED
        }

    def check(self) -> None:
        """Refuse what the estimator, or scores of one's own, would not read."""
        super().check()
        if self.imported:
            names = ("estimator", "damping", "excess", "resume", "four_bit", *READING, "dtype", "device")
            self.refuse(names, "imported scores")
            return
        chosen = ESTIMATORS.find(self.estimator or "fisher-gram")
        if not chosen.data:
            self.refuse(READING, chosen.name)


def run(session: Session) -> dict[str, Any]:
    """Score, write the file, show the table."""
    from ..execution.processes import is_main
    from ..storage.writing import check_output

    request: ScoreRequest = session.request
    check_output(request.out, overwrite=request.overwrite)
    check_rows(request.data)
    scores = _imported(session) if request.imported else _measured(session)
    path = scores.save(request.out, overwrite=request.overwrite) if is_main() else request.out
    if not request.json:
        _show(session, scores)
    session.say(f"Written to {path}.", *_sentences(scores))
    _say_what_follows(session, scores, path)
    return scores.written()


def _say_what_follows(session: Session, scores: Scores, path: Any) -> None:
    """Say the command that follows: scores that are trusted are planned, others are mended first, or leave uniform."""
    from ..decisions.describe import PUBLISHED
    from ..sensitivity.noise import remedy

    shown, whole = scores.damping[scores.index()], scores.whole()
    if not whole:
        usual: dict[str, Any] = {"out": "fisher-gram.json", "estimator": "fisher-gram", "damping": None, "more": {}}
        session.follow(*shlex.split(line_of(dataclasses.replace(session.request, **usual)))[1:])
        return
    if shown not in whole:
        session.follow("plan", _USUAL[0], path, *_USUAL[1:], "--damping", f"{whole[0]:.10g}", "-o", "plan.json")
        return
    needs = remedy(scores)
    if needs == "excess" or needs.isdigit():
        other = (
            {"out": f"scores-{needs}.json", "samples": int(needs)}
            if needs.isdigit()
            else {"out": "excess.json", "excess": True}
        )
        again = line_of(dataclasses.replace(session.request, **other))
        session.follow(*shlex.split(again)[1:])
        return
    advice = _advice_on(scores)
    kind = _USUAL if advice is None else advice.command
    rule = PUBLISHED.get(scores.estimator)
    if needs or (advice is not None and advice.only_noise):
        rule = "uniform"
    elif session.request.imported and scores.orientation == "gain" and scores.values().max() <= 0:
        session.say("No score is above zero, which the default rule needs. Add a constant to all, or plan by how they differ:")
        rule = "owl"
    session.follow("plan", kind[0], path, *kind[1:], *(("--rule", rule) if rule else ()), "-o", "plan.json")


def _show(session: Session, scores: Scores) -> None:
    """Show scores of single matrices as a picture of the network, others as a table; ``--table`` shows every row."""
    from ..reporting.tables import cell, scores_grid, scores_table

    sheet, grid = scores_table(scores), None if session.request.table else scores_grid(scores)
    if grid is not None:
        session.console.print(grid)
    else:
        session.show(sheet.title, sheet.header, sheet.rows, lambda row: [cell(value) for value in row])


def _sentences(scores: Scores) -> list[str]:
    """The blocks at either end, and the verdict: whether the ranking can be trusted, where the estimator says it."""
    try:
        values, verdict = scores.values(), scores.extra.get("verdict")
    except InvalidInput as no_score:  # the file is written: the verdict says at which damping it can be used
        return [f"Verdict: {no_score}"]
    names = [scores.names[i] for i in (int(values.argmax()), int(values.argmin()))]
    ends = f"most at {names[0]} ({values.max():.3g}), least at {names[1]} ({values.min():.3g}), in "
    ends += "the unit of the file" if scores.unit == "arbitrary" else scores.unit
    advice = _advice_on(scores)
    ends += "." if advice is None else f"{advice.words}."
    loss, sentences = scores.extra.get("loss"), list[str]()
    if loss is not None and values.max() > 2 * loss:  # half of a gain is what the quadratic model promises
        more = f"Gains are larger than the loss itself ({loss:.3g}): the steps of the quadratic model have no limit."
        sentences.append(f"{more} Compare them within this file only.")
    return [*sentences, f"{ends[0].upper()}{ends[1:]}", f"Verdict: {verdict}"] if verdict else [*sentences, f"Verdict: {ends}"]


def _advice_on(scores: Scores) -> ScoresAdvice | None:
    """Return what the decision that scores were measured for says of them."""
    decision = next((d for d in DECISIONS.all().values() if d.measured_by(scores)), None)
    return None if decision is None else decision.on_scores(scores)


def _imported(session: Session) -> Any:
    from ..models.blocks import describe, partition
    from ..sensitivity.importing import import_scores

    request, model = session.request, session.load_model()
    blocks = partition(model, request.by, include=request.include, exclude=request.exclude)
    return import_scores(request.imported, blocks, model=describe(model), **request.more)


def _measured(session: Session) -> Any:
    from ..cost.work import scoring
    from ..data.text import calibration
    from ..models.blocks import partition
    from ..sensitivity.gain import score
    from ..sensitivity.noise import subtract_floor

    request: ScoreRequest = session.request
    chosen: Estimator = ESTIMATORS.find(request.estimator or "fisher-gram")
    seed = request.seed
    options = {**request.given("damping", "batch_size"), **request.more}
    validation = options.pop("validation", None)
    chosen.resolve_options(options)
    model, tokenizer, data = session.load(data=chosen.data)
    if validation is not None:
        size = {"samples": max(1, data.samples // 4), "length": data.length, "seed": data.seed}
        options["validation"] = calibration(validation, tokenizer, group="evaluation", **size)
    if data is not None and type(model).__name__.endswith("ForMaskedLM"):
        data = _masked(data, tokenizer)
    blocks = partition(model, request.by, include=request.include, exclude=request.exclude)
    if "seed" in chosen.options and seed is not None and options.get("labels") != "data":
        options["seed"] = seed  # it always seeds the draw of the text
    session.share(model, blocks)
    session.expect(f"{chosen.name}{session.on_text(data)}", model, scoring(chosen.name, session.size(data), len(blocks)))
    request.estimator = chosen.name
    with session.progress(f"scoring by {chosen.name}") as progress:
        scores = score(model, data, blocks, chosen.name, progress=progress, resume=request.resume, **options)
    return subtract_floor(scores) if request.excess else scores


def _masked(data: Any, tokenizer: Any) -> Any:
    from ..execution.loss import mask_tokens

    if tokenizer.mask_token_id is None:
        raise InvalidInput(
            "The tokenizer has no mask token.",
            "A masked language model is scored on masked tokens.",
            "Save the model's own tokenizer beside it, or use --estimator outlier-ratio, which masks nothing.",
        )
    return mask_tokens(data, tokenizer.mask_token_id, seed=data.seed)
