"""How plans of every kind are made from scores, by which rules, and how a model is given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidInput
from ..kinds import KINDS
from ..planning.rule import find_rule, rules_of
from ..registry import load_function
from .experts import plan as _experts  # noqa: F401 - registers its rules
from .ranks import plan as _ranks  # noqa: F401 - registers its rules
from .sparsity import plan as _sparsity  # noqa: F401 - registers its rules

__all__ = ["applier", "apply_plan", "find_rule", "maker", "makers", "rules_of"]

# Functions of this package by kind of plan, imported when they are used: many need torch or PEFT.
_MAKE = {
    "sparsity": ".sparsity.plan:plan_sparsity",
    "experts": ".experts.plan:plan_experts",
    "ranks": ".ranks.plan:plan_ranks",
    "bits": ".bits.plan:plan_bits",
}
_APPLY = {
    "sparsity": ".sparsity.apply:prune",
    "shapes": ".shapes.apply:apply_shapes",
    "experts": ".experts.method:add_experts",
    "ranks": ".ranks.apply:add_ranks",
    "bits": ".bits.apply:apply_bits",
    "cache": ".cache.cache:planned_cache",
    "fit": ".fit.plan:apply_fit",
    "kept-experts": ".kept_experts.apply:keep_experts",
}


def makers() -> dict[str, Callable[..., Any] | str]:
    """Return what makes a plan from scores, by kind: a function, or where it is."""
    own = {name: kind.make for name, kind in KINDS.all().items() if kind.make is not None}
    return {**_MAKE, **own}


def maker(kind: str) -> Callable[..., Any]:
    """Return ``(scores, **{budget: ...}, **options) -> Plan`` of a kind."""
    return _function(kind, makers(), "made from scores by one call")


def applier(kind: str) -> Callable[..., Any]:
    """Return ``(model, plan, ...)`` that gives a model what a plan of this kind says."""
    own = {name: found.apply for name, found in KINDS.all().items() if found.apply is not None}
    return _function(kind, {**_APPLY, **own}, "applied by one call")


def _function(kind: str, table: dict[str, Any], what: str) -> Callable[..., Any]:
    found = table.get(KINDS.find(kind).name)
    if found is None:
        raise InvalidInput(f"A plan of kind {kind} cannot be {what}.", "", KINDS.find(kind).summary)
    call: Callable[..., Any] = load_function(found, __package__)
    return call


def apply_plan(model: Any, plan: Any, *arguments: Any, **options: Any) -> Any:
    """Give a model what a plan of any kind says: ``prune``, ``apply_shapes``, ``add_ranks``, ..., by the plan's kind.

    Further arguments are those of that function. A kind that is applied in more than one step is refused.
    """
    return applier(plan.kind)(model, plan, *arguments, **options)
