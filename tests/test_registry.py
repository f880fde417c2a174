"""Options are the keyword-only parameters of a function, or the fields of a dataclass, with the types that they declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import pytest

from layerbudget.errors import InvalidInput
from layerbudget.registry import Option, options_of

if TYPE_CHECKING:
    from decimal import Decimal
    from fractions import Fraction


def test_types_and_help_are_those_that_are_written():
    def rule(
        problem: Fraction, *, names: Annotated[Sequence[str] | None, "which"] = None, slope: float = 1.0, free=3, any=None
    ):
        """A positional parameter is no option: its type may be one for type checkers only."""

    assert options_of(rule, without=("slope",)) == {
        "names": Option(name="names", type=Sequence[str] | None, help="which", default=None),
        "free": Option(name="free", type=int, default=3),
        "any": Option(name="any", type=Any, default=None),
    }

    @dataclasses.dataclass
    class Numbers:
        rate: float = 0.5

    assert options_of(Numbers) == {"rate": Option(name="rate", type=float, default=0.5)}


def test_a_type_that_is_not_there_at_run_time_is_refused():
    def rule(*, amount: Decimal | None = None):
        """No option of it could be checked."""

    with pytest.raises(InvalidInput, match=r"'Decimal' is not defined.*TYPE_CHECKING"):
        options_of(rule)
