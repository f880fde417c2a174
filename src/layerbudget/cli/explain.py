"""``layerbudget explain``: what a plan does, how plans and scores differ, and what the gain orders for certain."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..decisions.apply import makers
from ..errors import InvalidInput
from ..exports import find_plan
from ..kinds import KINDS
from ..plan import Plan
from ..records import to_jsonable
from .display import ending, expect, most_rows, progress_bar, say, say_next, show_table, text_of, words_of
from .files import need_scores
from .options import (
    COMMANDS,
    add,
    add_data,
    add_out,
    add_set,
    add_verb,
    batch_of,
    given,
    load,
    options_for,
    refuse,
    settings,
    share,
)

if TYPE_CHECKING:
    from ..plans.rank_table import RankTable

_SECONDS = "files: only certify runs a model"
QUESTIONS = ("plan", "diff", "sweep", "transfer", "certify")


def complete(words: Sequence[str]) -> list[str]:
    """Return the words of ``explain``, with the question ``plan`` where none is asked.

    >>> complete(["explain", "bits.json"]), complete(["explain", "diff", "a.json", "b.json"])
    (['explain', 'plan', 'bits.json'], ['explain', 'diff', 'a.json', 'b.json'])
    """
    at = words.index("explain") + 1
    asked = at < len(words) and words[at] not in (*QUESTIONS, "-h", "--help")
    return [*words[:at], "plan", *words[at:]] if asked else list(words)


def register(subparsers: Any) -> None:
    """Add the parsers of ``explain`` and its questions."""
    summary = COMMANDS["explain"][1]
    parser = subparsers.add_parser("explain", help=summary, description=summary)
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    p = add_verb(questions, "plan", run_plan, "what a plan does and what it rests on (the word plan may be left out)")
    p.add_argument("plan", metavar="PLAN", help="plan.json, or a folder that holds one")
    words = "the scores that it was made from: their gains in bits; of bits the damage of every matrix with its error"
    p.add_argument("--scores", metavar="SCORES", help=words)
    p.add_argument("--tokens", type=int, help="completion tokens of your training rows (default: those of the scored text)")
    p = add_verb(questions, "diff", run_diff, "what differs between two plans")
    p.add_argument("first", metavar="PLAN")
    p.add_argument("second", metavar="PLAN")
    p = add_verb(questions, "sweep", run_sweep, "a grid of budgets and exponents, solved in one call")
    p.add_argument("scores", metavar="SCORES", help="scores.json")
    words = "sparsities, totals, mean ranks or bits; of bits also mixes of llama.cpp (default: the bytes of all mixes)"
    p.add_argument("--budgets", type=_budget, nargs="+", help=words)
    p.add_argument("--kind", choices=tuple(makers()), default="sparsity", help="of the plans (default: sparsity)")
    p.add_argument("--exponents", type=float, nargs="+", help="exponents of the weights (default: the rule's)")
    p.add_argument("--rule", help="a rule of that kind of plan, such as by-rank (default: mdl; of bits: choices)")
    add_set(p, "an option of the plans: max_sparsity, damping, smoothing, ...")
    p = add_verb(questions, "transfer", run_transfer, "what a plan made on one set of scores costs on another")
    p.add_argument("source", metavar="SOURCE", help="scores.json that the plan is made from")
    p.add_argument("target", metavar="TARGET", help="scores.json of the task that it is used on")
    p.add_argument("--program", choices=("sparsity", "experts"), default="sparsity", help="what is planned (default: sparsity)")
    p.add_argument("--sparsity", type=share, help="global sparsity of the sparsity program (default: 0.5)")
    p.add_argument("--budget", help="budget of the experts program (default: 160 experts)")
    add_set(p, "a number of the program: max_sparsity, exponent, damping, smoothing, utility, penalty, ...")
    summary = "which pairs of blocks the gain orders for certain, and whether the loss agrees"
    p = add_verb(questions, "certify", run_certify, summary)
    add(p, "model", "--by")
    curvatures = ("fisher", "ggn", "hessian")
    words = "hessian is the paper's own; ggn and hessian solve by conjugate gradients (default: fisher)"
    p.add_argument("--curvature", choices=curvatures, default="fisher", help=words)
    add(p, "--damping", help="one or more dampings (default: 0.1 1 10)")
    add_out(p, "write table and certificates as JSON", metavar="FILE")
    add_set(p, "damping_unit (max, absolute) or steps, the most products of conjugate gradients")
    add_data(p, samples=32, length=128, dtype="float32")


def run_plan(a: argparse.Namespace) -> dict[str, Any]:
    """Say what a plan does."""
    from ..decisions.fit.parts import parts_of
    from ..decisions.joint.recipe import bits_of
    from ..plans.explain import explain_plan
    from ..plans.verdict import standing, verdict
    from .shown import show_plan, show_reasons

    refuse(a, ("dry_run",), _SECONDS)
    if a.tokens is not None and a.scores is None:
        raise InvalidInput("--tokens has no meaning without --scores.", "Bits are those of gains.", "Name the scores.")
    plan, scores = find_plan(a.plan), None if a.scores is None else need_scores(a.scores)
    result = explain_plan(plan, scores, tokens=a.tokens)
    told: dict[str, Any] = to_jsonable(result)
    if scores is not None and result.matrices:
        show_reasons(a, plan, result.matrices)
    elif result.matrices and not a.json:
        for part in parts_of(bits_of(plan)).values():
            show_plan(a, part)
        if not a.table and "damage" in result.matrices[0]:
            say(a, "Why a matrix has its format: --table shows its damage, and what the next format would change.")
    few = None if result.ranks is None or not result.ranks.few_rows else result.ranks.recommendation
    ends = f"Verdict: {few}" if few else verdict(plan)  # whose advice rests on the gains of these rows
    sentences = result["sentences"] if a.table or result.codelengths is None else result["sentences"][:-1]  # bits: in a table
    say(a, *(s for s in sentences if s[1:].rstrip(".") not in ends))  # what the verdict says is said once
    if result.matrices and (beside := standing(plan)):
        show_table(a, *beside)
    if result.ranks is None:
        say(a, ends)
        return {**told, **ending(ends, None)}
    _show_ranks(a, scores, result.ranks)
    say(a, ends)
    return {**told, **ending(ends, say_rank(a, plan, told["ranks"], a.plan, a.scores))}


def say_rank(a: argparse.Namespace, plan: Plan, ranks: Mapping[str, Any], path: str, scores: str) -> str:
    """Say and return the command of the recommendation: another plan of ranks, or the training of this one, the recommended."""
    given, rank = plan.hyperparameters, ranks["rank"]
    if (plan.rule == "uniform") is ranks["uniform"] and given.get("mean_rank") == rank:
        model = plan.model.get("id") or "MODEL"
        return say_next(a, "finetune", model, path, "--data", "FILE", "-o", "DIR")
    words = ["--rule", "uniform"] if ranks["uniform"] else []
    words += ["--mean-rank", str(rank)]
    words += ["--max-rank", str(given["max_rank"])] if isinstance(given.get("max_rank"), int) else []
    for name, value in (given.get("fixed") or {}).items():
        words += ["--fix", f"{name}={value}"]
    for name, usual in (("min_rank", 1), ("multiple", 1), ("damping", None)):
        if isinstance(given.get(name), (int, float)) and given[name] != usual and not (ranks["uniform"] and name == "damping"):
            words += ["--set", f"{name}={given[name]:g}"]
    return say_next(a, "plan", "ranks", scores, *words, "-o", "uniform.json" if ranks["uniform"] else f"ranks-{rank}.json")


def _show_ranks(a: argparse.Namespace, scores: Any, found: RankTable) -> None:
    """Show what every mean rank is expected to bring, beside uniform, and say what is recommended."""
    from ..plans.verdict import share_of_uniform

    most = max(r["gain"] for r in found.rows) or 1.0  # its nats are those of steps without a limit: shares are what they say
    head = ("mean rank", "parameters", "per token", "gain", "without noise", "uniform has", "largest rank")
    rows = [
        (
            str(r["rank"]),
            r["parameters"],
            f"{r['parameters_per_token']:.2f}",
            f"{r['gain'] / most:.1%}",
            f"{(r['gain'] - r['floor']) / most:.1%}" if "floor" in r else "-",
            "-" if r["uniform_share"] is None else share_of_uniform(r["uniform_share"]),
            f"{r['largest']}{' (all measured)' if r['at_measured'] else ''}",
        )
        for r in found.rows
    ]
    of = "" if a.tokens is None else " (--tokens)"
    of_all = scores.data.get("completion_tokens") if a.tokens is None else None
    show_table(a, f"how much rank for {found.tokens:,} completion tokens{of}", head, rows)
    if of_all:
        say(a, f"These are the tokens of all {scores.data['rows']:,} rows, {scores.data['samples']:,} of which were scored.")
    elif a.tokens is None:
        say(a, "These are the tokens of the scored text: with --tokens N the table is for N completion tokens.")
    if ends := next((r for r in found.rows if r["at_measured"]), None):
        say(a, f"From mean rank {ends['rank']} on, blocks have all ranks that were measured and might earn more with others.")
    for why in dict.fromkeys(found.left_out.values()):
        missing = ", ".join(str(rank) for rank, reason in found.left_out.items() if reason == why)
        say(a, f"Not in the table is mean rank {missing}: {why[0].lower()}{why[1:]}")
    say(a, *([] if found.few_rows else [found.recommendation]))  # it is the verdict


def run_diff(a: argparse.Namespace) -> dict[str, Any]:
    """Show what differs between two plans."""
    from ..plans.compare import diff_plans

    refuse(a, ("dry_run",), _SECONDS)
    result = diff_plans(find_plan(a.first), find_plan(a.second))
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
        title = f"{a.first} ({result['rules'][0]}) against {a.second} ({result['rules'][1]}), the largest difference first"
        changed.sort(key=lambda r: -abs(r["count_difference"] if typed else r["difference"]))
        show_table(a, title, head, [(r["name"], *(r[n] for n in read)) for r in changed])
    say(a, _on_difference(result, len(changed), typed))
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
        what = KINDS.find(result["kind"]).bytes_of
        return (
            f"{said}; the second plan takes {abs(more):,} bytes{f' of {what}' * bool(what)} {'more' if more >= 0 else 'less'}."
        )
    what = KINDS.find(result["kind"]).counts
    return f"{said}; {result['moved']:,g} units ({what}) change hands; rank correlation {result['rank_correlation']:.3f}."


def run_sweep(a: argparse.Namespace) -> dict[str, Any]:
    """Solve a grid of budgets and exponents."""
    from ..decisions.apply import maker
    from ..plans.compare import sweep

    refuse(a, ("dry_run",), _SECONDS)
    options = given(a, "rule") | settings(a, maker(a.kind))
    budgets = [int(b) if isinstance(b, float) else b for b in a.budgets or ()] if a.kind == "experts" else a.budgets
    result = sweep(need_scores(a.scores), kind=a.kind, budgets=budgets, exponents=a.exponents, **options)
    solved = [r for r in result["rows"] if "why" not in r]
    unsolved = [f"At {_named(r['budget'])}: {r['why']}" for r in result["rows"] if "why" in r]
    if a.kind == "bits":
        _show_sizes(a, solved, unsolved, options)
        return to_jsonable(result)
    names = {n: n for n in ("budget", "exponent", "value", "smallest", "largest", "spread", "status", "front")}
    if all("uniform_share" in r for r in solved):
        names |= {"uniform_share": "uniform has", "noise_share": "noise alone has"}
    # A rule without an exponent has no column of it.
    found = [n for n in names if any(r.get(n) is not None for r in result["rows"])]
    shown = {"front": lambda v: "yes" if v else "no"} | dict.fromkeys(("uniform_share", "noise_share"), _share)
    rows = [[shown.get(n, lambda v: v)(r[n]) if n in r else "-" for n in found] for r in result["rows"]]
    show_table(a, f"{a.kind}: {_worth(a.kind, solved)} by budget", [names[n] for n in found], rows)
    say(a, *unsolved, *_on_noise(solved))
    say(a, _on_sweep(a.kind, solved))
    return to_jsonable(result)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _on_noise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on the budgets at which noise alone would give most of the gain."""
    from ..plans.verdict import MOSTLY_NOISE, noise_alone

    noisy = [r for r in rows if (r.get("noise_share") or 0.0) > MOSTLY_NOISE]
    at = ", ".join(dict.fromkeys(_named(r["budget"]) for r in noisy))
    return [f"At {at}, {noise_alone(*(r['noise_share'] for r in noisy))}."] if noisy else []


_USUAL = "IQ2_M Q2_K IQ3_XXS IQ3_M Q3_K_M IQ4_XS Q4_K_S Q4_K_M Q5_K_M Q6_K Q8_0".split()  # mixes that people publish


def _show_sizes(
    a: argparse.Namespace, rows: Sequence[Mapping[str, Any]], unsolved: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Show the predicted damage of plans by size beside the mixes of llama.cpp; without ``--table`` at the sizes in use.

    Sentences of ``unsolved`` budgets follow, and the command of one plan with the ``options`` of the sweep.
    """
    shown = rows
    if a.budgets is None and len(rows) > most_rows(a):
        shown = [r for r in rows if r["budget"] in _USUAL] or rows
    mixes = any(r["mix"] for r in rows)
    head = ("size", "bytes of the file", "bits", "plan loses", *(("mix", "mix loses", "change") if mixes else ()))
    cells = [
        (r["budget"], f"{r['bytes']:,}", f"{r['bits']:.4g}", f"{r['value']:.3g}", *(_mix_cells(r) if mixes else ()))
        for r in shown
    ]
    show_table(a, "bits: predicted damage (KL, nats per token) by size of the file", head, cells)
    if len(shown) < len(rows):
        say(a, f"{len(rows) - len(shown)} other sizes of mixes: --table.")
    if mixes and any(r["mix"] != r["budget"] for r in shown if isinstance(r["budget"], str)):
        say(
            a,
            "Not measured: the mix has types that no damage was measured for, or llama.cpp makes it only with an importance "
            "matrix (plan bits MODEL --method weighted).",
        )
    say(a, *unsolved, _on_sizes(rows, mixes))
    if len(rows) > 1:
        row = _enough(rows) or rows[len(rows) // 2]
        size = ("--like", row["budget"]) if isinstance(row["budget"], str) else ("--bits", f"{row['budget']:g}")
        more = ["--rule", options["rule"]] if "rule" in options else []
        more += ["--forbid", ",".join(options["forbid"])] if options.get("forbid") else []
        more += [word for pattern, form in (options.get("keep") or {}).items() for word in ("--keep", f"{pattern}={form}")]
        say_next(a, "plan", "bits", a.scores, *size, *more, "-o", "plan.json")


def _mix_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The mix that a plan is compared with, its damage, and the change by the plan: of a size without a name the best mix."""
    mix = row["mix"]
    if mix is None or (isinstance(row["budget"], str) and mix != row["budget"]):
        return "not measured", "–", "–"
    return mix, f"{row['mix_value']:.3g}", f"{row['value'] / row['mix_value'] - 1:+.0%}" if row["mix_value"] > 0 else "–"


def _reference(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the mix that most people take, where it was measured, else of the largest one."""
    own = [r for r in rows if r["mix"] is not None]
    return next((r for r in own if r["mix"] == "Q4_K_M"), own[-1] if own else None)


def _enough(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The smallest plan with no more predicted damage than the mix of reference; None without one."""
    reference = _reference(rows)
    fit = [r for r in rows if reference is not None and r["value"] <= reference["mix_value"]]
    return min(fit, key=lambda r: float(r["spent"]), default=None)


def _on_sizes(rows: Sequence[Mapping[str, Any]], mixes: bool) -> str:
    """The size that has no more damage than a usual mix, or where damage rises fastest."""
    reference, row = _reference(rows), _enough(rows)
    if mixes and reference is not None and row is not None:
        return (
            f"Verdict: a plan with a file of {row['bytes']:,} bytes is predicted to lose {row['value']:.3g} nats per token, no "
            f"more than llama.cpp's {reference['mix']} with {reference['mix_value']:.3g} and a file of "
            f"{reference['mix_bytes']:,} bytes; nothing was checked."
        )
    if len(rows) < 2:
        return f"Verdict: {rows[0]['value']:.3g} nats per token are predicted at {rows[0]['bits']:.4g} bits per weight."
    ordered = sorted(rows, key=lambda r: float(r["spent"]))
    steps = [(s, b) for s, b in itertools.pairwise(ordered) if b["value"] > 0 and s["spent"] < b["spent"]]
    if not steps:
        return f"Verdict: {ordered[0]['value']:.3g} nats per token are predicted at {ordered[0]['bits']:.4g} bits per weight."
    small, big = max(steps, key=lambda s: math.log(s[0]["value"] / s[1]["value"]) / math.log(s[1]["spent"] / s[0]["spent"]))
    times, less = small["value"] / big["value"], 1 - small["spent"] / big["spent"]
    return (
        f"Verdict: damage rises fastest from {big['bits']:.4g} bits per weight to {small['bits']:.4g}, {times:.3g} times for "
        f"{less:.0%} fewer bytes of the planned matrices; nothing was checked."
    )


def _on_sweep(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Value of the best plan of the smallest budget beside that of the largest."""
    what = KINDS.find(kind)
    costs = what.harms or what.predicts
    best = min if costs else max
    (low, few), (high, many) = (
        (end["budget"], best(r["value"] for r in rows if r["spent"] == end["spent"]))
        for end in (at(rows, key=lambda r: r["spent"]) for at in (min, max))
    )
    share = f", {few / many:.0%} of it" if many > 0 and not costs else ""
    at_high, at_low = (_ASKED.get(kind, "{}").format(_named(budget)) for budget in (high, low))
    return f"Verdict: at {at_high} the {_worth(kind, rows)} is {many:.3g}, at {at_low} {few:.3g}{share}."


_ASKED = {"sparsity": "sparsity {}", "ranks": "mean rank {}", "experts": "{} experts in all"}


def _worth(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What the value of a row is, with its unit."""
    what = KINDS.find(kind)
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


def _budget(text: str) -> float | str:
    """A number, or the name of a mix."""
    try:
        return float(text)
    except ValueError:
        return text


def run_transfer(a: argparse.Namespace) -> dict[str, Any]:
    """Show what a plan made on one task costs on another."""
    from ..plans.compare import transfer_scores

    refuse(a, ("dry_run",), _SECONDS)
    found = transfer_scores(need_scores(a.source), need_scores(a.target), **options_for(a, transfer_scores))
    result = {"program": a.program, **found.to_dict()}
    show_table(a, "transfer", ("quantity", "value"), [(k, v) for k, v in result.items() if k != "program"])
    return to_jsonable(result)


def run_certify(a: argparse.Namespace) -> dict[str, Any]:
    """Take each block's Newton step, compare, certify, and say what was certified."""
    from ..doctor.cost import certifying
    from ..models.blocks import describe, partition
    from ..records import check_output, dumps, write_text
    from ..sensitivity.certificate import DAMPINGS, certify_ranking, direct_check

    own = options_for(a, direct_check)
    if "steps" in own and a.curvature == "fisher":
        raise InvalidInput("steps has no meaning for fisher.", "It needs no products.", "Leave it out.")
    if a.out:
        check_output(a.out, overwrite=a.overwrite)
    a.dtype = a.dtype or "float32"  # the losses of two blocks differ by less than the noise of bfloat16
    model, _, data = load(a)
    blocks, dampings = partition(model, a.by), len(a.damping or DAMPINGS)
    what = words_of(f"direct check, curvature {a.curvature},", data)
    expect(a, what, model, certifying(a.curvature, text_of(data, a), len(blocks), dampings))
    with progress_bar(a, "direct check") as progress:
        own |= {"batch_size": batch_of(a, model, data), "progress": progress}
        table = direct_check(model, data, blocks, **own)
    pairs = {name: certify_ranking(table, with_gap=gap) for name, gap in (("paper", False), ("with_gap", True))}
    result = {
        "schema_version": 1,
        "curvature": a.curvature,
        "damping_unit": own.get("damping_unit", "max"),
        "model": describe(model),
        "data": data.describe(),
        "table": table,
        "pairs": pairs["with_gap"],
        "summary": summary(table, pairs),
    }
    _show_certified(a, result)
    if a.out:
        say(a, f"Written to {write_text(a.out, dumps(result), overwrite=a.overwrite)}.")
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
        own = [r for r in table if r["relative_damping"] == tau]
        gap = [p for p in pairs["with_gap"] if p["relative_damping"] == tau]
        chosen = {
            "paper": [p for p in pairs["paper"] if p["relative_damping"] == tau and p["certified"]],
            "paper_with_gap": [p for p in gap if p["certified"]],
            "exact": [p for p in gap if p["sharp"]],
        }
        row = {"damping": tau, "blocks": len(own), "ok": sum(r["status"] == "ok" for r in own), "pairs": len(gap)}
        row["not_ok"] = {r["block"]: r["status"] for r in own if r["status"] != "ok"}
        row |= {name: len(found) for name, found in chosen.items()} | {"agree": sum(p["agrees"] for p in gap)}
        row["contradicted"] = {name: sum(not p["agrees"] for p in found) for name, found in chosen.items()}
        rows.append(row)
    return rows


def _show_certified(a: argparse.Namespace, result: Mapping[str, Any]) -> None:
    head = ("damping", "blocks ok", "pairs", "paper (B.3)", "with the curvature gap", "exact expansion", "losses agree")
    counts = ("pairs", "paper", "paper_with_gap", "exact", "agree")
    rows = [(f"{r['damping']:g}", f"{r['ok']} of {r['blocks']}", *(str(r[c]) for c in counts)) for r in result["summary"]]
    show_table(a, f"pairs of blocks ordered for certain, curvature {result['curvature']}", head, rows)
    for r in result["summary"]:
        start = f"Damping {r['damping']:g}:"
        say(a, *(f"{start} {block} is not ok ({status}) and certifies nothing." for block, status in r["not_ok"].items()))
        wrong = ", ".join(f"{n} of {k}" for k, n in r["contradicted"].items() if n)
        say(a, *([f"{start} the measured losses contradict {wrong}."] if wrong else []))
    if result["curvature"] != "hessian":
        say(a, "The paper's rule is for the Hessian; for another curvature read the column with the gap, or the exact one.")
