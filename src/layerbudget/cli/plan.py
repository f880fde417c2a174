"""Command line of the decision core: ``plan ...`` and ``transfer``. No torch.

``register`` adds the parsers. Each sets ``handler``: a function of the parsed arguments that returns what ``--json`` prints and
shows a table on ``arguments.console`` where that is a ``rich`` console.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..decisions.apply import rules_of
from ..errors import InvalidInput
from ..plan import Plan
from ..planning.costs import rank_parameters
from ..planning.rule import OPTIONS
from ..records import to_jsonable
from ..scores import Scores
from . import bits, compare, structured
from .files import ROWS, Leaves, load_scores, need_scores, read_any, read_curves, read_fixed, read_latency, say, show_table
from .shared import add_out, named_values, refuse

_WEIGHTS = ("exponent", "exponent_on", "damping", "smoothing")


def register(subparsers: Any, *, parents: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Add ``plan`` and ``transfer`` to ``subparsers``; every command gets the options of ``parents``."""
    plan = subparsers.add_parser("plan", help="decide: experts, ranks, sparsity or both, from a scores file")
    verbs = Leaves(plan.add_subparsers(dest="plan_command", required=True, metavar="KIND"), parents)
    _register_sparsity(verbs)
    _register_experts(verbs)
    _register_ranks(verbs)
    _register_joint(verbs)
    structured.register(verbs)
    bits.register(verbs)
    compare.register(verbs)
    compare.register_transfer(Leaves(subparsers, parents))


_SCORES = (
    "scores.json; or a .csv, .npy or .json table of name, score, d_in and d_out; for rules without scores a model's config.json"
)


def _scores_argument(p: argparse.ArgumentParser) -> None:
    p.add_argument("scores", metavar="SCORES", help=_SCORES)


# Where the flag is not called as the option: --method is a pruner or a quantiser everywhere else.
_FLAGS = {"method": "--rounding"}


def _rules(p: argparse.ArgumentParser, kind: str) -> None:
    """``--rule`` and a flag for every shared option that some rule of this kind reads; a rule refuses what it does not."""
    rules = rules_of(kind)
    known = "; ".join(f"{n}: {r.summary}" for n, r in rules.items())
    default = None if kind == "ranks" else next(iter(rules))  # of ranks it follows the scores
    p.add_argument("--rule", default=default, help=f"{known} (default: {default or 'by-rank on rank-gain scores, else mdl'})")
    p.add_argument(
        "--set", dest="own", action="append", default=[], metavar="NAME=VALUE", help="an option of a rule of your own"
    )
    for name in OPTIONS:
        readers = [n for n, r in rules.items() if name in r.options]
        if readers:
            add_option(p, name, f"read by {', '.join(readers)}")
    add_out(p)


def add_option(p: argparse.ArgumentParser, name: str, who: str = "") -> None:
    """A flag for a shared option of rules; what is not given is not passed on."""
    option, flag = OPTIONS[name], _FLAGS.get(name, f"--{name.replace('_', '-')}")
    text = "; ".join(filter(None, (option.help, f"default: {option.default}" if option.default else "", who)))
    if option.type is bool:
        p.add_argument(flag, action="store_true", help=text)
    else:
        reads = str if option.choices else int if option.type is int else float
        p.add_argument(flag, dest=name, type=reads, choices=option.choices or None, help=text)


def _register_sparsity(verbs: Any) -> None:
    p = verbs.add_parser("sparsity", help="a sparsity for every block")
    _scores_argument(p)
    p.add_argument("--sparsity", type=float, default=0.5, help="global sparsity (default: 0.5)")
    p.add_argument("--max-sparsity", type=float, help="cap per block (default: 0.7, and always room above the target)")
    p.add_argument("--min-sparsity", type=float, default=0.0)
    p.add_argument("--curves", default=None, metavar="FILE", help="measured damage: {block: [ratios, losses]}")
    p.add_argument("--exclude", default=None, metavar="REGEX", help="blocks that stay dense")
    p.add_argument("--fix", action="append", default=[], metavar="BLOCK=SPARSITY")
    _rules(p, "sparsity")
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
    _capacity(p)
    _rules(p, "experts")
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
    _rules(p, "ranks")
    p.set_defaults(handler=run_ranks)


def _capacity(p: argparse.ArgumentParser) -> None:
    p.add_argument("--latency", default=None, metavar="FILE", help="seconds per unit of capacity: {block: seconds}")
    p.add_argument("--fix", action="append", default=[], metavar="BLOCK=COUNT")


def _register_joint(verbs: Any) -> None:
    p = verbs.add_parser("joint", help="one byte budget for pruning and adapting")
    _scores_argument(p)
    p.add_argument(
        "--bytes",
        required=True,
        dest="budget",
        help="net bytes, negative to shrink: --bytes=-2GiB; of file and adapter of a recipe",
    )
    p.add_argument(
        "--formats", metavar="FILE", help="what `plan bits --save-scores` wrote: decide formats instead of zeros, a recipe"
    )
    p.add_argument(
        "--exchange", type=float, help="a recipe's: what a nat gained by training is worth in nats of damage (default 1)"
    )
    p.add_argument(
        "--gain", type=float, help="a recipe's: nats per token that training gains at most (default: the loss of the text)"
    )
    p.add_argument("--multiple", type=int, help="a recipe's: ranks are multiples of this (default 1)")
    p.add_argument("--capacity", choices=("ranks", "experts"), help="what is added (default: ranks)")
    p.add_argument("--expert-rank", type=int, help="rank of one expert, for --capacity experts (default: 8)")
    p.add_argument("--max-sparsity", type=float, help="cap per block (default 0.7)")
    p.add_argument("--min-sparsity", type=float, help="floor per block (default 0)")
    p.add_argument("--min-capacity", type=float, help="ranks or experts that every block gets (default 0)")
    p.add_argument("--max-capacity", type=float, help="cap per block")
    p.add_argument("--bytes-per-parameter", type=float, help="2 for bf16 (default); of a recipe's adapter 4, as written")
    p.add_argument("--alpha", type=float, help="price of capacity (default 0.5)")
    p.add_argument("--gamma", type=float, help="weight of adapting (default 0.9)")
    p.add_argument("--eta", type=float, help="weight of damage (default 2)")
    p.add_argument("--prune-exponent", type=float, help="exponent of the pruning weights (paper: kappa; default 1)")
    add_option(p, "utility")
    add_option(p, "penalty")
    p.add_argument("--curves", metavar="FILE", help="measured damage in the place of a penalty: {block: [ratios, losses]}")
    p.add_argument("--spend", choices=("exactly", "at_most"), help="default: exactly")
    for name in _WEIGHTS:
        add_option(p, name)
    add_out(p)
    p.set_defaults(handler=run_joint)


def run_sparsity(a: argparse.Namespace) -> dict[str, Any]:
    """``plan sparsity``."""
    from ..decisions.sparsity.plan import plan_sparsity

    plan = plan_sparsity(
        load_scores(a.scores), sparsity=a.sparsity, max_sparsity=a.max_sparsity, min_sparsity=a.min_sparsity,
        exclude=a.exclude, fixed=read_fixed(a.fix), **{**_rule_options(a), "penalty": _penalty(a)},
    )  # fmt: skip
    method = read_any(Path(a.curves)).get("method") if a.curves else None
    if method is not None:  # the pruner that the curves are of
        plan = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "method": str(method)})
    return _finish(a, plan)


def run_experts(a: argparse.Namespace) -> dict[str, Any]:
    """``plan experts``."""
    from ..decisions.experts.plan import plan_experts

    plan = plan_experts(
        load_scores(a.scores), total=a.total, budget=a.budget, flops_fraction=a.flops_fraction, min_experts=a.min_experts,
        max_experts=a.max_experts, expert_rank=a.expert_rank, router=a.router, **_rule_options(a), **_capacity_options(a),
    )  # fmt: skip
    return _finish(a, plan)


def run_ranks(a: argparse.Namespace) -> dict[str, Any]:
    """``plan ranks``."""
    from ..decisions.ranks.plan import plan_ranks

    scores = load_scores(a.scores)
    plan = plan_ranks(
        scores, mean_rank=a.mean_rank, budget=a.budget or a.params, multiple=a.multiple,
        min_rank=a.min_rank, max_rank=a.max_rank, **_rule_options(a), **_capacity_options(a),
    )  # fmt: skip
    blocks = scores.blocks if isinstance(scores, Scores) else scores
    return _finish(a, plan, rank_parameters(blocks))


_ADAPTING = (
    "capacity",
    "expert_rank",
    "max_sparsity",
    "min_sparsity",
    "alpha",
    "gamma",
    "eta",
    "prune_exponent",
    "spend",
    "utility",
)
_BOTH = ("min_capacity", "max_capacity", "bytes_per_parameter")


def run_joint(a: argparse.Namespace) -> dict[str, Any]:
    """``plan joint``: zeros and adapters, or formats and ranks."""
    from ..decisions.joint.plan import plan_joint
    from ..decisions.joint.recipe import plan_recipe

    def given(*names: str) -> dict[str, Any]:
        return {k: getattr(a, k) for k in names if getattr(a, k) is not None}

    if a.formats:
        refuse(a, (*_ADAPTING, *(n for n in _WEIGHTS if n != "damping"), "penalty", "curves"), "a recipe of formats and ranks")
        options = given(*_BOTH, "exchange", "gain", "multiple", "damping")
        return _finish(a, plan_recipe(need_scores(a.scores), need_scores(a.formats), budget=a.budget, **options))
    refuse(a, ("exchange", "gain", "multiple"), "zeros and adapters: it is of recipes (--formats)")
    options = given(*_ADAPTING, *_BOTH, *_WEIGHTS) | {"penalty": _penalty(a) or "quadratic"}
    return _finish(a, plan_joint(need_scores(a.scores), budget=a.budget, **options))


def _rule_options(a: argparse.Namespace) -> dict[str, Any]:
    own, taken = named_values(a.own), set(vars(a)) - {"own", "handler", "console"}
    double = next((name for name in own if name in taken), None)
    if double is not None:
        flag = "--" + double.replace("_", "-")
        raise InvalidInput(
            f"--set {double} has a flag of its own.", "--set is for options of a rule of your own.", f"Use {flag}."
        )
    return {"rule": a.rule, **{name: getattr(a, name) for name in OPTIONS if hasattr(a, name)}, **own}


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
        "latency": latency,
        "fixed": {k: int(v) for k, v in fixed.items()},
    }


def _finish(a: argparse.Namespace, plan: Plan, price: Any = None) -> dict[str, Any]:
    if a.out:
        plan.save(a.out, overwrite=a.overwrite)
    from ..plans.explain import explain_plan

    if not getattr(a, "json", False):
        _show(a, plan, price)
    say(a, explain_plan(plan)["sentences"] + ([f"Written to {a.out}."] if a.out else []))
    return to_jsonable(plan.to_dict())


def _show(a: argparse.Namespace, plan: Plan, price: Any) -> None:
    """The decision as a picture of the network, or as a table where that would be too wide or too long."""
    from ..report.tables import plan_grid

    title = f"{plan.kind} by {plan.rule}{', in percent' if plan.kind == 'sparsity' else ''}"
    grid = plan_grid(plan, title, price=price) if len(plan.blocks) <= ROWS else None
    if grid is not None and getattr(a, "console", None) is not None:
        a.console.print(grid)
        return
    extra = plan.extra.get("capacity", {}).get("counts", {})
    head = ("block", "value", "count", "parameters") + (("capacity",) if extra else ())
    show_table(
        a, f"{plan.kind} by {plan.rule}", head, plan.blocks,
        lambda b: (b.name, b.value, b.count, b.numel) + ((extra[b.name],) if extra else ()),
    )  # fmt: skip
