"""How plans of every kind are made from scores, and how a model is given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..arguments import checked
from ..decision import DECISIONS, decision_of
from ..errors import InvalidInput
from ..plan import Plan
from ..records import Receipt

if TYPE_CHECKING:
    from torch import nn

    from ..data.calibration import CalibrationSet


def maker(kind: str) -> Callable[..., Plan]:
    """Return ``(scores, **{budget: ...}, **options) -> Plan`` of a kind."""
    call = DECISIONS.find(kind).planner()
    if call is None:
        raise InvalidInput(f"A plan of kind {kind} cannot be made from scores by one call.", "", DECISIONS.find(kind).summary)
    return call


@checked
def apply_plan(model: nn.Module, plan: Plan, data: CalibrationSet | None = None, **options: Any) -> Receipt:
    """Give a model in memory what a plan of any kind says, and return the receipt, by the plan's kind.

    ``receipt.model`` is the model that has it, and ``receipt.cache`` the empty cache of a plan that decides a cache. Options
    are those of ``prune``, ``apply_bits``, ``apply_shapes``, ``add_ranks``, ...: the function of the plan's kind.

    Raises:
        InvalidInput: A kind that is applied in more than one step.
    """
    return decision_of(plan).apply(model, plan, data, **options)
