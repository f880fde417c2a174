"""``plan diff``, ``plan explain``, ``plan sweep`` and ``transfer``."""

from __future__ import annotations

import argparse
from typing import Any

from ..decisions.apply import makers
from ..errors import InvalidInput
from ..plan import Plan
from ..records import to_jsonable
from ..solvers.utilities import PENALTIES, UTILITIES
from .files import need_scores, say, show_table


def register(verbs: Any) -> None:
    """Add ``plan diff``, ``plan explain`` and ``plan sweep``."""
    p = verbs.add_parser("diff", help="what differs between two plans")
    p.add_argument("first", metavar="PLAN")
    p.add_argument("second", metavar="PLAN")
    p.set_defaults(handler=run_diff)
    p = verbs.add_parser("explain", help="say what a plan does and what it rests on")
    p.add_argument("plan", metavar="PLAN")
    p.add_argument("--scores", metavar="SCORES", help="the scores that it was made from: says their gains in bits")
    p.add_argument("--tokens", type=int, help="predicted tokens n of n zeta^2 / (2 ln 2) (default: the calibration set's)")
    p.set_defaults(handler=run_explain)
    p = verbs.add_parser("sweep", help="a grid of budgets and exponents in one call")
    p.add_argument("scores", metavar="SCORES", help="scores.json")
    p.add_argument("--kind", choices=tuple(makers()), default="sparsity")
    p.add_argument("--budgets", type=float, nargs="+", required=True, help="sparsities, totals, mean ranks or bits")
    p.add_argument("--exponents", type=float, nargs="+", help="exponents of the weights (default: the rule's)")
    p.add_argument("--rule", help="a rule of that kind of plan, such as by-rank (default: mdl; of bits: choices)")
    p.add_argument("--max-sparsity", type=float, default=None)
    p.add_argument("--damping", type=float, default=None)
    p.add_argument("--smoothing", type=float)
    p.set_defaults(handler=run_sweep)


def register_transfer(subparsers: Any) -> None:
    """Add ``transfer``."""
    p = subparsers.add_parser("transfer", help="what a plan made on one task costs on another")
    p.add_argument("source", metavar="SOURCE", help="scores.json that the plan is made from")
    p.add_argument("target", metavar="TARGET", help="scores.json of the task that it is used on")
    p.add_argument("--program", choices=("sparsity", "experts"), default="sparsity")
    p.add_argument("--sparsity", type=float, help="global sparsity of the sparsity program (default: 0.5)")
    p.add_argument("--max-sparsity", type=float, help="its cap (default: 0.7, and always room above the target)")
    p.add_argument("--budget", help="budget of the experts program (default: 160 experts)")
    p.add_argument("--exponent", type=float, default=1.0)
    p.add_argument("--exponent-on", choices=("density", "block"), default="density")
    p.add_argument("--damping", type=float, default=None)
    p.add_argument("--smoothing", type=float, default=0.0)
    p.add_argument("--utility", choices=tuple(UTILITIES), help="utility of the experts program (default: log)")
    p.add_argument("--penalty", choices=tuple(PENALTIES), help="penalty of the sparsity program (default: quadratic)")
    p.set_defaults(handler=run_transfer)


def run_diff(a: argparse.Namespace) -> dict[str, Any]:
    """``plan diff``."""
    from ..plans.compare import diff_plans

    result = diff_plans(Plan.load(a.first), Plan.load(a.second))
    rows = [(r["name"], r["first"], r["second"], r["difference"], r["count_difference"]) for r in result["blocks"]]
    show_table(
        a, f"{result['rules'][0]} against {result['rules'][1]}", ("block", "first", "second", "difference", "count"), rows
    )
    say(a, [f"{result['moved']:g} units change hands; rank correlation {result['rank_correlation']:.3f}."])
    return to_jsonable(result)


def run_explain(a: argparse.Namespace) -> dict[str, Any]:
    """``plan explain``."""
    from ..plans.explain import codelengths, explain_plan

    if a.tokens is not None and a.scores is None:
        raise InvalidInput("--tokens has no meaning without --scores.", "Bits are those of gains.", "Name the scores.")
    plan, scores = Plan.load(a.plan), None if a.scores is None else need_scores(a.scores)
    result = explain_plan(plan, scores, tokens=a.tokens)
    say(a, result["sentences"])
    bits = {} if scores is None else {"bits": codelengths(plan, scores, a.tokens)}
    return to_jsonable({**result, **bits})


def run_sweep(a: argparse.Namespace) -> dict[str, Any]:
    """``plan sweep``."""
    from ..plans.compare import sweep

    options: dict[str, Any] = {"damping": a.damping, "smoothing": a.smoothing} | ({"rule": a.rule} if a.rule else {})
    if a.kind != "sparsity" and a.max_sparsity is not None:
        raise InvalidInput(f"--max-sparsity has no meaning for --kind {a.kind}.", "", "Leave it out.")
    if a.kind == "sparsity" and a.max_sparsity is not None:
        options["max_sparsity"] = a.max_sparsity
    budgets = [int(b) for b in a.budgets] if a.kind == "experts" else a.budgets
    result = sweep(need_scores(a.scores), kind=a.kind, budgets=budgets, exponents=a.exponents, **options)
    names = ("budget", "exponent", "value", "smallest", "largest", "spread", "status", "front")
    show_table(a, f"{a.kind}: predicted value by budget and exponent", names, [[r[n] for n in names] for r in result["rows"]])
    return to_jsonable(result)


def run_transfer(a: argparse.Namespace) -> dict[str, Any]:
    """``transfer``."""
    from ..plans.again import transfer_scores

    found = transfer_scores(
        need_scores(a.source), need_scores(a.target), program=a.program, sparsity=a.sparsity, max_sparsity=a.max_sparsity,
        budget=a.budget, exponent=a.exponent, exponent_on=a.exponent_on, damping=a.damping, smoothing=a.smoothing,
        utility=a.utility, penalty=a.penalty,
    )  # fmt: skip
    result = {"program": a.program, **found.to_dict()}
    show_table(a, "transfer", ("quantity", "value"), [(k, v) for k, v in result.items() if k != "program"])
    return to_jsonable(result)
