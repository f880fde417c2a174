"""``layerbudget explain``: what a plan does, how plans and scores differ, and what the gain orders for certain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..canonical import to_jsonable
from ..decision import DECISIONS, decision_of
from ..decisions.files import need_scores
from ..errors import InvalidInput
from ..exports import find_plan
from ..registry import Option, options_of
from ..requests import Request, TextRequest, model_option, option, out_option, share
from .display import ending
from .session import Session

# Parameters of planners that are no options of a sweep: its budgets, and files.
_FILLED = (
    *("budget", "like", "fixed", "tokenizer", "batch_size", "resume", "save_scores"),
    *("overwrite", "unwritten", "progress"),
)


def _swept() -> tuple[str, ...]:
    from ..reporting.sweep import swept

    return swept()


def _utilities() -> tuple[str, ...]:
    from ..solvers.utilities import UTILITIES

    return tuple(UTILITIES)


def _penalties() -> tuple[str, ...]:
    from ..solvers.utilities import PENALTIES

    return tuple(PENALTIES)


def _budget(text: str) -> float | str:
    """A number, or the name of a mix."""
    try:
        return float(text)
    except ValueError:
        return text


@dataclasses.dataclass(kw_only=True)
class PlanQuestion(Request):
    """Say what a plan does and what it rests on; the word plan may be left out."""

    command: ClassVar[str] = "explain plan"
    unread: ClassVar[tuple[str, ...]] = ("dry_run",)

    plan: str = option(metavar="PLAN", role="reads", help="plan.json, or a folder that holds one")
    scores: str | None = option(
        None,
        metavar="SCORES",
        role="reads",
        help="the scores that it was made from: their gains in bits; of bits the damage of every matrix with its error",
    )
    tokens: int | None = option(
        None, help="completion tokens of your training rows, with --scores (default: those of the scored text)"
    )

    def check(self) -> None:
        """Refuse tokens without scores."""
        super().check()
        if self.tokens is not None and self.scores is None:
            raise InvalidInput("--tokens has no meaning without --scores.", "Bits are those of gains.", "Name the scores.")


@dataclasses.dataclass(kw_only=True)
class DiffQuestion(Request):
    """Show what differs between two plans."""

    command: ClassVar[str] = "explain diff"
    unread: ClassVar[tuple[str, ...]] = ("dry_run",)

    first: str = option(metavar="PLAN", role="reads", help="plan.json, or a folder that holds one")
    second: str = option(metavar="OTHER", role="reads", help="the plan that it is compared with")


@dataclasses.dataclass(kw_only=True)
class SweepQuestion(Request):
    """Solve a grid of budgets and exponents in one call."""

    command: ClassVar[str] = "explain sweep"
    unread: ClassVar[tuple[str, ...]] = ("dry_run",)

    scores: str = option(metavar="SCORES", role="reads", help="scores.json")
    budgets: tuple[float | str, ...] | None = option(
        None,
        read=_budget,
        several=True,
        help="sparsities, totals, mean ranks or bits; of bits also mixes of llama.cpp (default: the bytes of all mixes)",
    )
    kind: str = option("sparsity", choices=_swept, help="of the plans (default: sparsity)")
    exponents: tuple[float, ...] | None = option(None, help="exponents of the weights (default: the rule's)")
    rule: str | None = option(None, help="a rule of that kind of plan, such as by-rank (default: mdl; of bits: exact)")

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of plans of the kind, and of the rule that is named."""
        from ..decisions.apply import maker
        from ..decisions.rules import find_rule, rules_of

        kind = typed.get("kind", "sparsity")
        if kind not in _swept():
            return {}
        decision, known = DECISIONS.find(kind), options_of(maker(kind))
        if rules_of(kind):
            known |= find_rule(kind, typed.get("rule", "mdl")).options
        without = {*cls.options(), *_FILLED, decision.budget, "exponent"}
        said = {name: field.metadata["help"] for name, field in decision.Request.options().items()}
        return {
            name: dataclasses.replace(option, help=option.help or said.get(name, ""))
            for name, option in known.items()
            if name not in without
        }


@dataclasses.dataclass(kw_only=True)
class TransferQuestion(Request):
    """Show what a plan that was made on one set of scores costs on another."""

    command: ClassVar[str] = "explain transfer"
    unread: ClassVar[tuple[str, ...]] = ("dry_run",)

    source: str = option(metavar="SOURCE", role="reads", help="scores.json that the plan is made from")
    target: str = option(metavar="TARGET", role="reads", help="scores.json of the task that it is used on")
    program: str = option("sparsity", choices=lambda: ("sparsity", "lora-experts"), help="what is planned (default: sparsity)")
    sparsity: float | None = option(None, read=share, help="global sparsity of the sparsity program (default: 0.5)")
    max_sparsity: float | None = option(None, help="cap of every block in the sparsity program (default: 0.7)")
    penalty: str | None = option(None, choices=_penalties, help="damage of a block by its sparsity (default: quadratic)")
    budget: str | None = option(None, help="budget of the experts program (default: 160 experts)")
    max_experts: float | None = option(None, help="most experts of a block in the experts program (default: no limit)")
    utility: str | None = option(None, choices=_utilities, help="worth of a block's experts (default: log)")
    exponent: float = option(1.0, help="power of the scores in the weights (default: 1)")
    exponent_on: str = option(
        "density",
        choices=lambda: ("density", "block"),
        help="the power of the score per parameter, or of all of it (default: density)",
    )
    damping: float | None = option(None, help="one of the dampings of the scores (default: the middle one)")
    smoothing: float = option(0.0, help="added to every score, as a share of the mean score (default: 0)")


@dataclasses.dataclass(kw_only=True)
class CertifyQuestion(TextRequest):
    """Say which pairs of blocks the gain orders for certain, and whether the loss agrees."""

    command: ClassVar[str] = "explain certify"
    usual: ClassVar[Mapping[str, Any]] = {**TextRequest.usual, "samples": 32, "length": 128}

    model: str = model_option()
    by: str = option("layer", help="blocks: layer (default), linear, or a regular expression")
    curvature: str = option(
        "fisher",
        choices=lambda: ("fisher", "ggn", "hessian"),
        help="hessian is the paper's own; ggn and hessian solve by conjugate gradients (default: fisher)",
    )
    damping: tuple[float, ...] | None = option(None, help="one or more dampings (default: 0.1 1 10)")
    damping_unit: str | None = option(
        None,
        choices=lambda: ("max", "absolute"),
        help="of the dampings: each block's largest eigenvalue (max, default), or none",
    )
    steps: int | None = option(None, help="the most products of conjugate gradients, of ggn and hessian (default: 200)")
    samples: int | None = option(None, group="text", help="number of calibration sequences (default: 32)")
    length: int | None = option(None, group="text", help="tokens per sequence (default: 128)")
    out: str | None = out_option("write table and certificates as JSON")

    def check(self) -> None:
        """Refuse products of the Fisher, which needs none."""
        super().check()
        if self.curvature == "fisher":
            self.refuse(("steps",), "fisher, which needs no products")


def run_plan(session: Session) -> dict[str, Any]:
    """Say what a plan does."""
    from ..reporting.explain import explain_plan
    from ..reporting.verdict import comparison_table, verdict
    from .shown import show_plan

    request: PlanQuestion = session.request
    plan, scores = find_plan(request.plan), None if request.scores is None else need_scores(request.scores)
    result = explain_plan(plan, scores, tokens=request.tokens)
    record: dict[str, Any] = to_jsonable(result)
    if scores is not None and result.matrices:
        decision_of(plan).show_matrices(session, plan, result.matrices)
    elif result.matrices and not request.json:
        for part in decision_of(plan).parts(plan).values():
            show_plan(session, part)
        if not request.table and "damage" in result.matrices[0]:
            session.say("Why a matrix has its format: --table shows its damage, and what the next format would change.")
    budgets = result.budgets
    instead = budgets is not None and budgets.decides
    ends = f"Verdict: {budgets.recommendation}" if budgets is not None and instead else verdict(plan)
    sentences = result["sentences"]
    sentences = sentences if request.table or result.codelengths is None else sentences[:-1]  # bits: in a table
    session.say(*(s for s in sentences if s[1:].rstrip(".") not in ends))  # what the verdict says is said once
    if result.matrices and (table := comparison_table(plan)):
        session.show(*table)
    if budgets is None or scores is None:
        session.say(ends)
        return {**record, **ending(ends, None)}
    rows, notes = budgets.shown(scores, request.tokens)
    session.show(*rows)
    session.say(*notes, ends)
    return {**record, **ending(ends, session.follow(*budgets.command(plan, request.plan, request.scores or "SCORES")))}


def run_diff(session: Session) -> dict[str, Any]:
    """Show what differs between two plans."""
    from ..reporting.sweep import diff_plans

    request: DiffQuestion = session.request
    result = diff_plans(find_plan(request.first), find_plan(request.second))
    formats = ("first_format", "second_format")
    typed = formats[0] in result["blocks"][0]
    changed = [
        r for r in result["blocks"] if r["count_difference"] or r["difference"] or (typed and len({r[n] for n in formats}) > 1)
    ]
    names = formats if typed else ("first", "second", "difference")
    counted = typed or any(r["difference"] != r["count_difference"] for r in changed)
    head = ("block", *(n.removesuffix("_format") for n in names), *(["bytes" if typed else "count"] if counted else []))
    read = (*names, "count_difference")[: len(head) - 1]
    if changed:
        first, second = (
            f"{path} ({rule})" for path, rule in zip((request.first, request.second), result["rules"], strict=True)
        )
        title = f"{first} against {second}, the largest difference first"
        changed.sort(key=lambda r: -abs(r["count_difference"] if typed else r["difference"]))
        session.show(title, head, [(r["name"], *(r[n] for n in read)) for r in changed])
    session.say(_on_difference(result, len(changed), typed))
    return to_jsonable(result)


def _on_difference(result: Mapping[str, Any], changed: int, typed: bool) -> str:
    """How many blocks differ, and by how much in all."""
    many = len(result["blocks"])
    if not changed:
        return f"All {many} blocks are equal."
    said = f"{changed} of {many} blocks differ, {many - changed} are equal"
    if typed:
        first, second = (int(budget["spent"]) for budget in result["budgets"])
        more = second - first
        what = DECISIONS.find(result["kind"]).bytes_of
        return (
            f"{said}; the second plan takes {abs(more):,} bytes{f' of {what}' * bool(what)} {'more' if more >= 0 else 'less'}."
        )
    what = DECISIONS.find(result["kind"]).counts
    return f"{said}; {result['moved']:,g} units ({what}) change hands; rank correlation {result['rank_correlation']:.3f}."


def run_sweep(session: Session) -> dict[str, Any]:
    """Solve a grid of budgets and exponents."""
    from ..reporting.sweep import sweep

    request: SweepQuestion = session.request
    options, kind = {**request.given("rule"), **request.more}, DECISIONS.find(request.kind)
    budgets = request.budgets and [kind.budget_type(b) if isinstance(b, float) else b for b in request.budgets]
    result = sweep(need_scores(request.scores), kind=request.kind, budgets=budgets, exponents=request.exponents, **options)
    solved = [r for r in result["rows"] if "why" not in r]
    unsolved = [f"At {_named(r['budget'])}: {r['why']}" for r in result["rows"] if "why" in r]
    if kind.show_sweep(session, solved, unsolved, options):
        return to_jsonable(result)
    names = {n: n for n in ("budget", "exponent", "value", "smallest", "largest", "spread", "status", "front")}
    if all("uniform_share" in r for r in solved):
        names |= {"uniform_share": "uniform has", "noise_share": "noise alone has"}
    # A rule without an exponent has no column of it.
    columns = [n for n in names if any(r.get(n) is not None for r in result["rows"])]
    shown = {"front": lambda v: "yes" if v else "no"} | dict.fromkeys(("uniform_share", "noise_share"), _share)
    rows = [[shown.get(n, lambda v: v)(r[n]) if n in r else "-" for n in columns] for r in result["rows"]]
    session.show(f"{request.kind}: {_worth(request.kind, solved)} by budget", [names[n] for n in columns], rows)
    session.say(*unsolved, *DECISIONS.find(request.kind).on_sweep(solved))
    session.say(_on_sweep(request.kind, solved))
    return to_jsonable(result)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _on_sweep(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Value of the best plan of the smallest budget beside that of the largest."""
    what = DECISIONS.find(kind)
    costs = what.harms or what.predicts
    best = min if costs else max
    (low, few), (high, many) = (
        (end["budget"], best(r["value"] for r in rows if r["spent"] == end["spent"]))
        for end in (at(rows, key=lambda r: r["spent"]) for at in (min, max))
    )
    share = f", {few / many:.0%} of it" if many > 0 and not costs else ""
    at_high, at_low = (what.asked.format(_named(budget)) for budget in (high, low))
    return f"Verdict: at {at_high} the {_worth(kind, rows)} is {many:.3g}, at {at_low} {few:.3g}{share}."


def _worth(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the value of a row, with its unit."""
    what = DECISIONS.find(kind)
    if what.predicts:
        return "predicted damage (nats per token)"
    if what.harms:
        return "penalty (mean of the squared sparsities, weighted by the scores)"
    if all("uniform_share" in r for r in rows):
        return "gain of the ranks that are bought (nats, by the quadratic model)"
    return f"utility (mean of log(1 + {what.decides}), weighted by the scores)"


def _named(budget: float | str) -> str:
    """A budget as it is typed."""
    return budget if isinstance(budget, str) else f"{budget:g}"


def run_transfer(session: Session) -> dict[str, Any]:
    """Show what a plan made on one task costs on another."""
    from ..reporting.sweep import transfer_scores

    request: TransferQuestion = session.request
    names = [name for name in TransferQuestion.options() if name not in (*Request.options(), "source", "target")]
    options = request.given(*names)
    transfer = transfer_scores(need_scores(request.source), need_scores(request.target), **options)
    result = {"program": request.program, **transfer.to_dict()}
    session.show("transfer", ("quantity", "value"), [(k, v) for k, v in result.items() if k != "program"])
    return to_jsonable(result)


def run_certify(session: Session) -> dict[str, Any]:
    """Take each block's Newton step, compare, certify, and say what was certified."""
    from ..canonical import dumps
    from ..cost.verbs import certifying
    from ..models.blocks import describe, partition
    from ..sensitivity.certificate import DAMPINGS, certify_ranking, direct_check
    from ..storage.writing import check_output, write_text

    request: CertifyQuestion = session.request
    if request.out:
        check_output(request.out, overwrite=request.overwrite)
    request.dtype = request.dtype or "float32"  # the losses of two blocks differ by less than the noise of bfloat16
    model, _, data = session.load()
    blocks, dampings = partition(model, request.by), len(request.damping or DAMPINGS)
    cost = certifying(request.curvature, session.size(data), len(blocks), dampings)
    session.expect(f"direct check, curvature {request.curvature},{session.on_text(data)}", model, cost)
    options = request.given("curvature", "damping", "damping_unit", "steps")
    with session.progress("direct check") as progress:
        batch = session.batch(model, data)
        table = direct_check(model, data, blocks, batch_size=batch, progress=progress, **options)
    pairs = {name: certify_ranking(table, with_gap=gap) for name, gap in (("paper", False), ("with_gap", True))}
    result = {
        "schema_version": 1,
        "curvature": session.request.curvature,
        "damping_unit": request.damping_unit or "max",
        "model": describe(model),
        "data": data.describe(),
        "table": table,
        "pairs": pairs["with_gap"],
        "summary": summary(table, pairs),
    }
    _show_certified(session, result)
    if session.request.out:
        session.say(f"Written to {write_text(session.request.out, dumps(result), overwrite=session.request.overwrite)}.")
    return to_jsonable(result)


def summary(table: Sequence[Mapping[str, Any]], pairs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return counts per damping: blocks that have a step, pairs of them, and how many of those each rule certifies.

    ``paper`` is the rule of appendix B.3 taken by its letter, which holds where the curvature is the Hessian;
    ``paper_with_gap`` adds what another curvature leaves out; ``exact`` is the expansion with the exact Hessian, of which only
    the remainder is unknown. A certified pair that the measured losses contradict is counted: there is none where the
    Lipschitz constant was not too small.
    """
    rows = []
    for tau in dict.fromkeys(r["relative_damping"] for r in table):
        block_rows = [r for r in table if r["relative_damping"] == tau]
        gap = [p for p in pairs["with_gap"] if p["relative_damping"] == tau]
        chosen = {
            "paper": [p for p in pairs["paper"] if p["relative_damping"] == tau and p["certified"]],
            "paper_with_gap": [p for p in gap if p["certified"]],
            "exact": [p for p in gap if p["sharp"]],
        }
        row = {"damping": tau, "blocks": len(block_rows), "ok": sum(r["status"] == "ok" for r in block_rows), "pairs": len(gap)}
        row["not_ok"] = {r["block"]: r["status"] for r in block_rows if r["status"] != "ok"}
        row |= {name: len(certified) for name, certified in chosen.items()} | {"agree": sum(p["agrees"] for p in gap)}
        row["contradicted"] = {name: sum(not p["agrees"] for p in certified) for name, certified in chosen.items()}
        rows.append(row)
    return rows


def _show_certified(session: Session, result: Mapping[str, Any]) -> None:
    head = ("damping", "blocks ok", "pairs", "paper (B.3)", "with the curvature gap", "exact expansion", "losses agree")
    counts = ("pairs", "paper", "paper_with_gap", "exact", "agree")
    rows = [(f"{r['damping']:g}", f"{r['ok']} of {r['blocks']}", *(str(r[c]) for c in counts)) for r in result["summary"]]
    session.show(f"pairs of blocks ordered for certain, curvature {result['curvature']}", head, rows)
    for r in result["summary"]:
        start = f"Damping {r['damping']:g}:"
        session.say(*(f"{start} {block} is not ok ({status}) and certifies nothing." for block, status in r["not_ok"].items()))
        wrong = ", ".join(f"{n} of {k}" for k, n in r["contradicted"].items() if n)
        session.say(*([f"{start} the measured losses contradict {wrong}."] if wrong else []))
    if result["curvature"] != "hessian":
        session.say(
            "The paper's rule is for the Hessian; for another curvature read the column with the gap, or the exact one."
        )
