"""Options, terms and fields of plans that ranks and LoRA experts share. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import NotRequired, TypedDict

from ...budget import Budget, parse_budget
from ...errors import InvalidInput
from ...requests import Request, flag_of
from ..files import read_fixed, read_latency

#: How the scale of an adapter follows its rank, see :mod:`layerbudget.decisions.ranks.apply`.
ALPHA_POLICIES = ("constant-ratio", "constant-alpha", "rslora")
#: Help of options that ranks and experts share.
FIX = "what blocks of this name or regular expression get in any case, as in 'layers.0.*=2' (repeatable)"
LATENCY = "seconds per unit of capacity, for a budget in seconds: {block: seconds}"


class Rounding(TypedDict):
    """How whole numbers were found, as plans keep it."""

    exact: bool
    gap: float | None
    method: str
    value: float
    bound: float
    optimum: float
    spent: float
    budget: float
    price: NotRequired[float | None]


def counted_options(fix: Sequence[str], latency: str | None) -> dict[str, Any]:
    """Return what blocks get in any case and the seconds of a unit, as planners read them, from what was typed.

    Raises:
        InvalidInput: A fixed count that is no whole number, or a text that does not parse.
    """
    fixed = read_fixed(fix)
    broken = next((name for name, value in fixed.items() if value != value // 1), None)
    if broken is not None:
        raise InvalidInput(f"--fix {broken}={fixed[broken]:g} is no whole number.", "", "Ranks and experts are counted.")
    return {"latency": read_latency(latency) if latency else None, "fixed": {k: int(v) for k, v in fixed.items()}}


def check_budgets(request: Request, *names: str) -> None:
    """Refuse a request without a budget, or with two.

    Raises:
        InvalidInput: Not exactly one of the options was given.
    """
    budgets, flags = request.given(*names), " or ".join(flag_of(request, name) for name in names)
    if len(budgets) != 1:
        what = (
            f"{' and '.join(flag_of(request, name) for name in budgets)} were given together"
            if budgets
            else "No budget was given"
        )
        raise InvalidInput(f"{what}.", f"A plan has one: {flags}.", "Give exactly one.")


def one_budget(budgets: Mapping[str, Any], default: str) -> Budget:
    """Return the one budget that was given; none or several are refused."""
    named = {k: v for k, v in budgets.items() if v is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{len(named)} budgets were given ({', '.join(named) or 'none'}).",
            f"Give exactly one of {', '.join(budgets)}.",
            "For example budget='64M params'.",
        )
    ((name, value),) = named.items()
    if name != "budget" and value < 0:
        raise InvalidInput(f"{name} is {value:g}.", "It is a positive number.", "Give one, for example 8.")
    return parse_budget(value, default=default)
