"""Command line of the decision core: ``plan ...`` and ``transfer``. No torch.

``register`` adds the parsers. Each sets ``handler``: a function of the parsed arguments that returns what ``--json`` prints and
shows a table on ``arguments.console`` where that is a ``rich`` console.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidInput
from ..plan import Plan
from ..planning.rule import rules_of
from ..program.rounding import METHODS
from ..program.utilities import PENALTIES, UTILITIES
from ..records import to_jsonable
from . import structured
from .files import Leaves, load_scores, need_scores, read_curves, read_fixed, read_latency, say, show_table
from .shared import named_values


def register(subparsers: Any, *, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Add ``plan`` and ``transfer`` to ``subparsers``; every command gets the options of ``parents``."""
    plan = subparsers.add_parser("plan", help="decide: experts, ranks, sparsity or both, from a scores file")
    verbs = Leaves(plan.add_subparsers(dest="plan_command", required=True, metavar="KIND"), parents)
    _register_sparsity(verbs)
    _register_experts(verbs)
    _register_ranks(verbs)
    _register_joint(verbs)
    structured.register(verbs)
    _register_compare(verbs)
    _register_transfer(Leaves(subparsers, parents))


def _scores_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("scores", metavar="SCORES", help="scores.json; for rules without scores a model's config.json will do")


def _shared(p: argparse.ArgumentParser, kind: str | None) -> None:
    """Options of rules; what is not given is not passed on, so that a rule can refuse what it does not read."""
    if kind is not None:
        rules = rules_of(kind)
        p.add_argument("--rule", default=next(iter(rules)), help="; ".join(f"{n}: {r.summary}" for n, r in rules.items()))
        p.add_argument("--seed", type=int, help="seed of the permuted controls (default: 0)")
        p.add_argument(
            "--set", dest="own", action="append", default=[], metavar="NAME=VALUE", help="an option of a rule of your own"
        )
    p.add_argument("--exponent", type=float, help="exponent of the weights (paper: beta, kappa; default: the rule's)")
    p.add_argument("--exponent-on", choices=("density", "block"), help="default: density")
    p.add_argument("--damping", type=float, help="row of the scores (default: the middle one)")
    p.add_argument("--smoothing", type=float, help="added to every score, in units of the mean score (default: 0)")
    _output(p)


def _output(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--output", default=None, metavar="PLAN", help="write plan.json")
    p.add_argument("--overwrite", action="store_true", help="replace an existing output")


def _register_sparsity(verbs: Any) -> None:
    p = verbs.add_parser("sparsity", help="a sparsity for every block")
    _scores_argument(p)
    p.add_argument("--sparsity", type=float, default=0.5, help="global sparsity (default: 0.5)")
    p.add_argument("--max-sparsity", type=float, help="cap per block (default: 0.7, and always room above the target)")
    p.add_argument("--min-sparsity", type=float, default=0.0)
    p.add_argument("--penalty", choices=tuple(PENALTIES), help="default: quadratic")
    p.add_argument("--curves", default=None, metavar="FILE", help="measured damage: {block: [ratios, losses]}")
    p.add_argument("--width", type=float, default=None, help="width of the maps of layerif, alphapruning and owl")
    p.add_argument("--parity", action="store_true", help="those maps exactly as published")
    p.add_argument("--exclude", default=None, metavar="REGEX", help="blocks that stay dense")
    p.add_argument("--fix", action="append", default=[], metavar="BLOCK=SPARSITY")
    _shared(p, "sparsity")
    p.set_defaults(handler=run_sparsity)


def _register_experts(verbs: Any) -> None:
    p = verbs.add_parser("experts", help="LoRA experts for every block")
    _scores_argument(p)
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--total", type=int, help="experts in all")
    budget.add_argument("--flops-fraction", type=float, help="fraction of the base blocks' FLOPs per token")
    budget.add_argument("--budget", help="'64M params', '1.2 GiB', '3%% flops', ...")
    p.add_argument("--min-experts", type=int, default=1)
    p.add_argument("--max-experts", type=int, default=None)
    p.add_argument("--expert-rank", type=int, default=8)
    p.add_argument("--router", action="store_true", help="count router outputs in the cost")
    p.add_argument("--parity", action="store_true", help="AlphaLoRA exactly as published")
    _capacity(p)
    _shared(p, "experts")
    p.set_defaults(handler=run_experts)


def _register_ranks(verbs: Any) -> None:
    p = verbs.add_parser("ranks", help="a LoRA rank for every block")
    _scores_argument(p)
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--mean-rank", type=float, help="as many parameters as this rank everywhere")
    budget.add_argument("--params", help="adapter parameters, such as 20M")
    budget.add_argument("--budget", help="'20M params', '40 MB', '0.5%% flops', ...")
    p.add_argument("--multiple", type=int, default=1, help="ranks are multiples of this")
    p.add_argument("--min-rank", type=int, default=1)
    p.add_argument("--max-rank", type=int, default=None)
    _capacity(p)
    _shared(p, "ranks")
    p.set_defaults(handler=run_ranks)


def _capacity(p: argparse.ArgumentParser) -> None:
    p.add_argument("--utility", choices=tuple(UTILITIES), help="default: log")
    p.add_argument("--spend", choices=("exactly", "at_most"), help="default: exactly")
    p.add_argument("--method", choices=METHODS, help="how counts are rounded (default: auto)")
    p.add_argument("--latency", default=None, metavar="FILE", help="seconds per unit of capacity: {block: seconds}")
    p.add_argument("--fix", action="append", default=[], metavar="BLOCK=COUNT")


def _register_joint(verbs: Any) -> None:
    p = verbs.add_parser("joint", help="one byte budget for pruning and adapting")
    _scores_argument(p)
    p.add_argument("--bytes", required=True, dest="budget", help="net bytes, negative to shrink: --bytes=-2GiB")
    p.add_argument("--capacity", choices=("ranks", "experts"), default="ranks")
    p.add_argument("--expert-rank", type=int, help="rank of one expert, for --capacity experts (default: 8)")
    p.add_argument("--max-sparsity", type=float, default=0.7)
    p.add_argument("--gamma", type=float, default=0.9, help="weight of adapting")
    p.add_argument("--eta", type=float, default=2.0, help="weight of damage")
    p.add_argument("--spend", choices=("exactly", "at_most"), default="exactly")
    _shared(p, None)
    p.set_defaults(handler=run_joint)


def _register_compare(verbs: Any) -> None:
    p = verbs.add_parser("diff", help="what differs between two plans")
    p.add_argument("first", metavar="PLAN")
    p.add_argument("second", metavar="PLAN")
    p.set_defaults(handler=run_diff)
    p = verbs.add_parser("explain", help="say what a plan does and what it rests on")
    p.add_argument("plan", metavar="PLAN")
    p.set_defaults(handler=run_explain)
    p = verbs.add_parser("sweep", help="a grid of budgets and exponents in one call")
    _scores_argument(p)
    p.add_argument("--kind", choices=("sparsity", "experts", "ranks"), default="sparsity")
    p.add_argument("--budgets", type=float, nargs="+", required=True, help="sparsities, totals or mean ranks")
    p.add_argument("--exponents", type=float, nargs="+", help="exponents of the weights (default: the rule's)")
    p.add_argument("--rule", default="mdl", help="a rule of that kind of plan, such as by-rank (default: mdl)")
    p.add_argument("--max-sparsity", type=float, default=None)
    p.add_argument("--damping", type=float, default=None)
    p.add_argument("--smoothing", type=float)
    p.set_defaults(handler=run_sweep)


def _register_transfer(subparsers: Any) -> None:
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
    p.set_defaults(handler=run_transfer)


def run_sparsity(a: argparse.Namespace) -> dict[str, Any]:
    """``plan sparsity``."""
    from ..planning import plan_sparsity

    plan = plan_sparsity(
        load_scores(a.scores), sparsity=a.sparsity, max_sparsity=a.max_sparsity, min_sparsity=a.min_sparsity,
        penalty=_penalty(a), width=a.width, parity=a.parity, exclude=a.exclude,
        fixed=read_fixed(a.fix), **_weights(a), **_rule_options(a),
    )  # fmt: skip
    return _finish(a, plan)


def run_experts(a: argparse.Namespace) -> dict[str, Any]:
    """``plan experts``."""
    from ..planning import plan_experts

    plan = plan_experts(
        load_scores(a.scores), total=a.total, budget=a.budget, flops_fraction=a.flops_fraction, min_experts=a.min_experts,
        max_experts=a.max_experts, expert_rank=a.expert_rank, router=a.router, parity=a.parity,
        **_weights(a), **_rule_options(a), **_capacity_options(a),
    )  # fmt: skip
    return _finish(a, plan)


def run_ranks(a: argparse.Namespace) -> dict[str, Any]:
    """``plan ranks``."""
    from ..planning import plan_ranks

    scores = load_scores(a.scores)
    if a.rule == "mdl" and "increments" in getattr(scores, "extra", {}):
        say(a, ["These scores hold the gain of every further rank: --rule by-rank plans with it, without a surrogate utility."])
    plan = plan_ranks(
        scores, mean_rank=a.mean_rank, budget=a.budget or a.params, multiple=a.multiple,
        min_rank=a.min_rank, max_rank=a.max_rank, **_weights(a), **_rule_options(a), **_capacity_options(a),
    )  # fmt: skip
    return _finish(a, plan)


def run_joint(a: argparse.Namespace) -> dict[str, Any]:
    """``plan joint``."""
    from ..planning import plan_joint

    plan = plan_joint(
        need_scores(a.scores), budget=a.budget, capacity=a.capacity, expert_rank=a.expert_rank, gamma=a.gamma, eta=a.eta,
        max_sparsity=a.max_sparsity, spend=a.spend, **{k: v for k, v in _weights(a).items() if v is not None},
    )  # fmt: skip
    return _finish(a, plan)


def run_diff(a: argparse.Namespace) -> dict[str, Any]:
    """``plan diff``."""
    from ..planning import diff_plans

    result = diff_plans(Plan.load(a.first), Plan.load(a.second))
    rows = [(r["name"], r["first"], r["second"], r["difference"], r["count_difference"]) for r in result["blocks"]]
    show_table(
        a, f"{result['rules'][0]} against {result['rules'][1]}", ("block", "first", "second", "difference", "count"), rows
    )
    say(a, [f"{result['moved']:g} units change hands; rank correlation {result['rank_correlation']:.3f}."])
    return result


def run_explain(a: argparse.Namespace) -> dict[str, Any]:
    """``plan explain``."""
    from ..planning import explain_plan

    result = explain_plan(Plan.load(a.plan))
    say(a, result["sentences"])
    return result


def run_sweep(a: argparse.Namespace) -> dict[str, Any]:
    """``plan sweep``."""
    from ..planning import sweep

    options: dict[str, Any] = {"damping": a.damping, "smoothing": a.smoothing, "rule": a.rule}
    if a.kind != "sparsity" and a.max_sparsity is not None:
        raise InvalidInput(f"--max-sparsity has no meaning for --kind {a.kind}.", "", "Leave it out.")
    if a.kind == "sparsity" and a.max_sparsity is not None:
        options["max_sparsity"] = a.max_sparsity
    budgets = [int(b) for b in a.budgets] if a.kind == "experts" else a.budgets
    result = sweep(need_scores(a.scores), kind=a.kind, budgets=budgets, exponents=a.exponents, **options)
    names = ("budget", "exponent", "value", "smallest", "largest", "spread", "status", "front")
    show_table(a, f"{a.kind}: predicted value by budget and exponent", names, [[r[n] for n in names] for r in result["rows"]])
    return result


def run_transfer(a: argparse.Namespace) -> dict[str, Any]:
    """``transfer``."""
    from ..planning import transfer_scores

    found = transfer_scores(
        need_scores(a.source), need_scores(a.target), program=a.program, sparsity=a.sparsity, max_sparsity=a.max_sparsity,
        budget=a.budget, **_weights(a),
    )  # fmt: skip
    result = {"program": a.program, **found.to_dict()}
    show_table(a, "transfer", ("quantity", "value"), [(k, v) for k, v in result.items() if k != "program"])
    return to_jsonable(result)


def _weights(a: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(a, name) for name in ("exponent", "exponent_on", "damping", "smoothing")}


def _rule_options(a: argparse.Namespace) -> dict[str, Any]:
    own, taken = named_values(a.own), set(vars(a)) - {"own", "handler", "console"}
    double = next((name for name in own if name in taken), None)
    if double is not None:
        flag = "--" + double.replace("_", "-")
        raise InvalidInput(
            f"--set {double} has a flag of its own.", "--set is for options of a rule of your own.", f"Use {flag}."
        )
    return {"rule": a.rule, "seed": a.seed, **own}


def _penalty(a: argparse.Namespace) -> Any:
    """The named penalty, or measured curves.

    Raises:
        InvalidInput: Both were given.
    """
    if a.curves and a.penalty:
        raise InvalidInput("--curves and --penalty were given together.", "Curves are the penalty.", "Leave one out.")
    return read_curves(a.curves) if a.curves else a.penalty


def _capacity_options(a: argparse.Namespace) -> dict[str, Any]:
    fixed = read_fixed(a.fix)
    broken = next((k for k, v in fixed.items() if v != v // 1), None)
    if broken is not None:
        raise InvalidInput(f"--fix {broken}={fixed[broken]:g} is no whole number.", "", "Ranks and experts are counted.")
    latency = read_latency(a.latency) if a.latency else None
    return {
        "utility": a.utility,
        "spend": a.spend,
        "method": a.method,
        "latency": latency,
        "fixed": {k: int(v) for k, v in fixed.items()},
    }


def _finish(a: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    if a.output:
        plan.save(a.output, overwrite=a.overwrite)
    from ..planning import explain_plan

    extra = plan.extra.get("capacity", {}).get("counts", {})
    head = ("block", "value", "count", "parameters") + (("capacity",) if extra else ())
    rows = [(b.name, b.value, b.count, b.numel) + ((extra[b.name],) if extra else ()) for b in plan.blocks]
    show_table(a, f"{plan.kind} by {plan.rule}", head, rows)
    say(a, explain_plan(plan)["sentences"] + ([f"Written to {a.output}."] if a.output else []))
    return to_jsonable(plan.to_dict())
