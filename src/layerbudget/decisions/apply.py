"""How plans of every kind are made from scores, and how a model is given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..decision import DECISIONS
from ..errors import InvalidInput
from ..plan import Plan


def maker(kind: str) -> Callable[..., Plan]:
    """Return ``(scores, **{budget: ...}, **options) -> Plan`` of a kind."""
    call = DECISIONS.find(kind).planner()
    if call is None:
        raise InvalidInput(f"A plan of kind {kind} cannot be made from scores by one call.", "", DECISIONS.find(kind).summary)
    return call


def applier(kind: str) -> Callable[..., Any]:
    """Return ``(model, plan, ...)`` that gives a model what a plan of this kind says."""
    call = DECISIONS.find(kind).applier()
    if call is None:
        raise InvalidInput(f"A plan of kind {kind} cannot be applied by one call.", "", DECISIONS.find(kind).summary)
    return call


def apply_plan(model: Any, plan: Plan, *arguments: Any, **options: Any) -> Any:
    """Give a model what a plan of any kind says: ``prune``, ``apply_shapes``, ``add_ranks``, ..., by the plan's kind.

    Further arguments are those of that function. A kind that is applied in more than one step is refused.
    """
    return applier(plan.kind)(model, plan, *arguments, **options)
