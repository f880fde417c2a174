"""``layerbudget plan KIND``: from scores, by an exact program (no torch here); from a model, by measured damage."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..compressors.formats import GGUF
from ..decisions.apply import find_rule, rules_of
from ..decisions.fit.parts import parts_of
from ..errors import InvalidInput
from ..exports import EXPORTS
from ..kinds import KINDS
from ..plan import Plan
from ..planning.costs import rank_parameters
from ..records import check_output, to_jsonable
from ..registry import Option, options_of
from ..scores import Scores
from . import fit, kept, measured
from .display import ending, say, say_next, show_table
from .explain import say_rank
from .files import load_scores, need_scores, read_curves, read_fixed, read_latency
from .options import (
    COMMANDS,
    DATA,
    PLACE,
    add,
    add_data,
    add_out,
    add_set,
    add_verb,
    check_measured,
    given,
    options_for,
    refuse,
    share,
)
from .shown import show_plan

if TYPE_CHECKING:
    from ..plans.rank_table import RankTable

SCORES = "scores.json; or a .csv or .json table of name, score, d_in and d_out; for rules without scores a config.json"
_CACHES = {"vllm": ("--to", "vllm-cache"), "llama.cpp": ("--to", "llama-cache")}  # where a plan of the cache goes
_SECONDS = "scores: planning from them takes seconds"
_MEASURING = ("formats", "by", "unwritten", "save_scores", "resume", "set")


def register(subparsers: Any) -> None:
    """Add the parsers of ``plan`` and its kinds."""
    parser = subparsers.add_parser("plan", help=COMMANDS["plan"][1], description=COMMANDS["plan"][1])
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    p = add_verb(kinds, "sparsity", run_sparsity, "a sparsity for every layer, matrix or group of rows")
    p.add_argument("source", metavar="MODEL|SCORES", help=f"a model, pruned and measured step by step; or {SCORES}")
    p.add_argument("--sparsity", type=share, default=0.5, help="pruned share of all weights (default: 0.5)")
    p.add_argument(
        "--max-sparsity",
        type=float,
        help="cap of every block (default: 0.95; from scores 0.7, or --sparsity + 0.2 if that is more)",
    )
    measured.add_sparsity(p)
    group = p.add_argument_group("from scores")
    _rule(group, "sparsity")
    group.add_argument("--curves", metavar="FILE", help="measured damage in place of a penalty: {block: [ratios, losses]}")
    add(group, "--exclude", help="blocks that stay dense")
    _fix(group, "BLOCK=SPARSITY")
    add_data(p, samples=16)
    measured.add_bits(kinds, run_bits)
    measured.add_shapes(kinds, run_shapes)
    kept.add(kinds, run_kept)
    fit.add(kinds, run_fit)
    p, budget = _program(kinds, "ranks", run_ranks, "a LoRA rank for every matrix")
    budget.add_argument("--mean-rank", type=float, help="as many parameters as this rank everywhere")
    budget.add_argument("--budget", help="'20M params', '40 MB', '0.5%% flops', ...")
    p.add_argument("--max-rank", type=int, help="cap of every matrix")
    p, budget = _program(kinds, "experts", run_experts, "LoRA experts for every block")
    budget.add_argument("--total", type=int, help="experts in all")
    budget.add_argument("--budget", help="'64M params', '1.2 GiB', '3%% flops', ...")
    p.add_argument("--max-experts", type=int, help="cap of every block")
    summary = "one byte budget for pruning and adapting, or for formats and ranks (a recipe)"
    p = add_verb(kinds, "joint", run_joint, summary)
    p.add_argument("source", metavar="SCORES", help=SCORES)
    p.add_argument(
        "--budget", required=True, help="net bytes, negative to shrink: --budget=-2GiB; of file and adapter of a recipe"
    )
    p.add_argument("--formats", metavar="FILE", help="what plan bits --save-scores wrote: decide formats in the place of zeros")
    p.add_argument("--capacity", choices=("ranks", "experts"), help="what is added (default: ranks)")
    add_set(p, "a number of the program: exponent, max_sparsity, min_capacity, alpha, ...; of a recipe exchange, gain, ...")
    for p in dict.fromkeys(kinds.choices.values()):
        add_out(p, "write the plan here (default: plan.json from a model, else it is shown)", metavar="PLAN")


def _program(kinds: Any, name: str, handler: Callable[..., Any], summary: str) -> tuple[argparse.ArgumentParser, Any]:
    """The parser of ranks or experts, and the group of its budget."""
    p = add_verb(kinds, name, handler, summary)
    p.add_argument("source", metavar="SCORES", help=SCORES)
    p.add_argument("--latency", metavar="FILE", help="seconds per unit of capacity, for a budget in seconds: {block: seconds}")
    _fix(p, "BLOCK=COUNT")
    _rule(p, name)
    return p, p.add_mutually_exclusive_group(required=True)


def _rule(p: Any, kind: str) -> None:
    known = "; ".join(f"{n}: {r.summary}" for n, r in rules_of(kind).items())
    default = "by-rank on rank-gain scores, else mdl" if kind == "ranks" else "mdl"
    p.add_argument("--rule", help=f"{known} (default: {default})")
    add_set(p, f"an option of the rule, as in exponent=2{', or of the search and the pruner' if kind == 'sparsity' else ''}")


def _fix(p: Any, metavar: str) -> None:
    words = "what blocks of this name or regular expression get in any case, as in 'layers.0.*=0' (repeatable)"
    p.add_argument("--fix", action="append", default=[], metavar=metavar, help=words)


# --- programs ---------------------------------------------------------------------------------------------------------------


def run_sparsity(a: argparse.Namespace) -> dict[str, Any]:
    """Plan a sparsity from scores, or by the damage to a model."""
    from ..decisions.sparsity.plan import plan_by_scores

    if measured.is_model(a):
        refuse(a, ("curves", "exclude", "fix"), "a model, whose damage is measured: they belong to scores")
        return _finish(a, measured.plan_sparsity(a))
    unread = (name for name in (*DATA, *PLACE) if name != "seed")
    what = "scores" if a.source.endswith((".json", ".csv")) else f"--rule {a.rule}, which measures no model"
    refuse(a, ("by", "method", "passes", "resume", "dry_run", *unread), f"{what}: it belongs to a model that is measured")
    shared = {name: option for name, option in options_of(plan_by_scores).items() if name != "penalty"}  # a rule's own
    own = options_for(a, shared, _options_of_rule(a)) | given(a, "seed")
    curves, method = read_curves(a.curves) if a.curves else (None, None)
    if curves and own.get("penalty") is not None:
        raise InvalidInput("--curves and a penalty were given together.", "Curves are the penalty.", "Leave one out.")
    own |= {"penalty": curves} if curves else {}
    scores = load_scores(a.source)
    plan = plan_by_scores(scores, fixed=read_fixed(a.fix), **own)
    if method is not None:
        plan = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "method": method})
    _say_published(a, plan, scores)
    return _finish(a, plan, write=True)


def _say_published(a: argparse.Namespace, plan: Plan, scores: Any) -> None:
    """Say where a published score and its rule are apart."""
    from ..plans.verdict import of_published

    if isinstance(scores, Scores) and (told := of_published(plan.rule, scores.estimator)):
        say(a, told)


def run_bits(a: argparse.Namespace) -> dict[str, Any]:
    """Plan bits from what was measured, or by the damage to a model."""
    from ..decisions.bits.plan import plan_bits

    for path in filter(None, (a.out, a.save_scores)):
        check_output(path, overwrite=a.overwrite)
    if not a.source.endswith(".json"):
        return _finish(a, measured.plan_bits(a))
    refuse(a, (*_MEASURING, "dry_run", *DATA, *PLACE), "scores that were measured before")
    scores = need_scores(a.source, "plan bits MODEL --bits N --save-scores FILE")
    check_measured(a, scores.extra.get("choices") or {}, "plan bits")
    return _finish(a, plan_bits(scores, **measured.limits_of(a), rule=a.rule), write=True)


def run_shapes(a: argparse.Namespace) -> dict[str, Any]:
    """Plan heads, widths and layers to remove by the damage to a model."""
    return _finish(a, measured.plan_shapes(a))


def run_kept(a: argparse.Namespace) -> dict[str, Any]:
    """Plan which experts stay by the damage to a model."""
    return _finish(a, kept.plan(a))


def run_fit(a: argparse.Namespace) -> dict[str, Any]:
    """Plan formats of weights and cache, or of the cache alone, by the damage to a model."""
    plan = fit.plan(a)
    if plan.kind == "fit":
        fit.show(a, plan)
    return _finish(a, plan)


def run_ranks(a: argparse.Namespace) -> dict[str, Any]:
    """Plan ranks from scores."""
    from ..decisions.ranks.plan import plan_ranks
    from ..plans.explain import how_much_rank

    refuse(a, ("dry_run",), _SECONDS)
    own = _own_options(a, plan_ranks) | _counted(a)
    scores = load_scores(a.source)
    price = rank_parameters(scores.blocks if isinstance(scores, Scores) else scores)
    plan = plan_ranks(scores, **own)
    return _finish(a, plan, price, write=True, found=how_much_rank(plan, scores))


def run_experts(a: argparse.Namespace) -> dict[str, Any]:
    """Plan experts from scores."""
    from ..decisions.experts.plan import plan_experts

    refuse(a, ("dry_run",), _SECONDS)
    own = _own_options(a, plan_experts) | _counted(a)
    scores = load_scores(a.source)
    plan = plan_experts(scores, **own)
    _say_published(a, plan, scores)
    return _finish(a, plan, write=True)


def run_joint(a: argparse.Namespace) -> dict[str, Any]:
    """Plan zeros and adapters, or formats and ranks, under one budget of bytes."""
    from ..decisions.joint.plan import plan_joint
    from ..decisions.joint.recipe import plan_recipe

    refuse(a, ("dry_run",), _SECONDS)
    scores = need_scores(a.source)
    if a.formats:
        refuse(a, ("capacity",), "a recipe of formats and ranks")
        return _finish(
            a,
            plan_recipe(
                scores, need_scores(a.formats, "plan bits MODEL --bits N --save-scores FILE"), **options_for(a, plan_recipe)
            ),
            write=True,
        )
    return _finish(a, plan_joint(scores, **options_for(a, plan_joint)), write=True)


def _own_options(a: argparse.Namespace, planner: Callable[..., Any]) -> dict[str, Any]:
    """The options of a planner and of its rule that were given; others are refused, with all that there are."""
    known = {**options_of(planner), **_options_of_rule(a)}
    found = options_for(a, planner, _options_of_rule(a))
    for name in (n for n in found if n not in known):
        takes = (n for n in known if n not in {action.dest for action in a.leaf._actions} and n != "fixed")
        raise InvalidInput(f"{a.leaf.prog} has no option {name}.", f"--set takes {', '.join(takes)}.", "Correct the name.")
    return found


def _options_of_rule(a: argparse.Namespace) -> Mapping[str, Option]:
    default = "by-rank" if a.kind == "ranks" and "help" in a.set else "mdl"
    return find_rule(a.kind, a.rule or default).options


def _counted(a: argparse.Namespace) -> dict[str, Any]:
    fixed = read_fixed(a.fix)
    broken = next((k for k, v in fixed.items() if v != v // 1), None)
    if broken is not None:
        raise InvalidInput(f"--fix {broken}={fixed[broken]:g} is no whole number.", "", "Ranks and experts are counted.")
    return {"latency": read_latency(a.latency) if a.latency else None, "fixed": {k: int(v) for k, v in fixed.items()}}


def _finish(
    a: argparse.Namespace, plan: Plan, price: Any = None, *, write: bool = False, found: RankTable | None = None
) -> dict[str, Any]:
    """Write a plan where it is not yet, show it, and end with what it comes to and the command that follows."""
    from ..plans.explain import advice, explain_plan
    from ..plans.verdict import standing, verdict

    if a.out and write:
        plan.save(a.out, overwrite=a.overwrite)
    for part in () if a.json else parts_of(plan).values():
        show_plan(a, part, price)
    say(a, *(explain_plan(plan)["sentences"] if a.table else advice(plan)))
    if a.out:
        say(a, f"Written to {a.out}; layerbudget explain {shlex.quote(a.out)} says what it rests on.")
    one = plan.kind in ("shapes", "kept-experts")  # of which the table has another damage than the verdict
    if (beside := standing(plan)) and (a.table or not one):
        show_table(a, *beside)
    told = f"Verdict: {found.recommendation}" if found is not None and found.few_rows else verdict(plan)
    say(a, told)
    return to_jsonable({**plan.written(), **ending(told, _say_what_follows(a, plan, found))})


def _tool_of(plan: Plan) -> str:
    """The format of the tool that takes a plan of bits which ``apply`` does not write."""
    try:
        EXPORTS.find("auto-round").text(plan, {})
    except InvalidInput:
        return "csv"
    return "auto-round"


def _say_what_follows(a: argparse.Namespace, plan: Plan, found: RankTable | None = None) -> str | None:
    """Say and return the command that follows: what is done with a plan of this kind, or the plan that is advised in its place.

    ``found`` says whether the scored rows tell ranks apart; where uniform is advised it has the size that was asked for.
    """
    from ..plans.verdict import advises_uniform

    command = KINDS.find(plan.kind).command or "export"
    if not a.out:
        say(a, "Nothing is written: -o plan.json keeps the plan.")
        return None
    if plan.kind == "cache" and plan.extra["runtime"] == "transformers":
        made = f"layerbudget.apply_plan(model, layerbudget.Plan.load({a.out!r}))"
        say(a, f"Next, in Python: {made} is a cache for generate; packed=True saves its memory.")
        return None
    if found is not None and found.few_rows:
        return say_rank(a, plan, to_jsonable(found), a.out, a.source)
    if plan.kind == "ranks" and advises_uniform(plan):
        size = ("--budget", a.budget) if a.mean_rank is None else ("--mean-rank", f"{a.mean_rank:g}")
        return say_next(a, "plan", "ranks", a.source, "--rule", "uniform", *size, "-o", "uniform.json")
    model = str(getattr(a, "model", None) or plan.model.get("id") or "MODEL")
    more = {"apply": (model, a.out, "-o", "DIR"), "finetune": (model, a.out, "--data", "FILE", "-o", "DIR"), "export": (a.out,)}
    given = plan.hyperparameters.get("imatrix")
    beside = ["--set", f"imatrix={given}"] if given and command == "apply" else []
    if plan.kind == "shapes" and a.written_as is None:
        say(a, "apply writes no file of this architecture whose layers differ.")
        return say_next(a, "plan", "shapes", model, "--save", a.save, "--even", "-o", "even.json")
    beside += ["--format", a.written_as] if plan.kind == "shapes" and a.written_as else []
    if getattr(a, "no_file", False):
        say(a, "apply writes no file of this plan: another tool has to.")
        return say_next(a, "export", a.out, "--to", _tool_of(plan))
    if plan.kind in ("bits", "fit") and plan.extra["family"] == GGUF:
        own = beside or ["--set", f"inputs={model}"] * (plan.extra["method"] != "rtn")
        way = ("apply", "model-f16.gguf", a.out, *own, "-o", "planned.gguf")
        if not plan.extra.get("head_bytes"):
            say(a, "apply does not write this architecture as GGUF; llama.cpp's convert_hf_to_gguf.py --outtype f16 does.")
            return say_next(a, *way)
        if plan.kind == "bits":
            say(a, f"A GGUF file that you have gets these types by {shlex.join(['layerbudget', *way])}")
    if plan.kind in ("bits", "fit") and plan.extra["runtime"] == "vllm" and plan.extra["method"] == "rtn":
        say(a, "The plan was measured with weights that are rounded to nearest (rtn). gptq loses less, and takes longer.")
        beside += ["--method", "gptq"]
    return say_next(a, command, *more[command], *(_CACHES[plan.extra["runtime"]] if plan.kind == "cache" else beside))
