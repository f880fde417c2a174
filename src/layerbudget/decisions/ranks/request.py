"""Options of ``plan ranks``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from ...registry import Option
from ...requests import ADVANCED, option
from ...session import ScoresRequest
from ..capacity import FIX, LATENCY, check_budgets
from ..rules import find_rule, rules_of


def _rules() -> str:
    known = "; ".join(f"{name}: {rule.summary}" for name, rule in rules_of("ranks").items())
    return f"{known} (default: by-rank on rank-gain scores, else mdl)"


@dataclasses.dataclass(kw_only=True)
class RanksRequest(ScoresRequest):
    """A LoRA rank for every matrix."""

    command: ClassVar[str] = "plan ranks"

    mean_rank: float | None = option(None, help="budget: as many parameters as this rank everywhere")
    budget: str | None = option(None, help="or in any unit: '20M params', '40 MB', '0.5% flops', ...")
    max_rank: int | None = option(None, help="cap of every matrix (default: its smallest side)")
    min_rank: int = option(1, group=ADVANCED, help="smallest rank; 0 lets a matrix go without an adapter (default: 1)")
    multiple: int = option(1, group=ADVANCED, help="ranks are multiples of this (default: 1)")
    rule: str | None = option(None, help=_rules)
    fix: tuple[str, ...] = option((), metavar="BLOCK=RANK", help=FIX)
    latency: str | None = option(None, metavar="FILE", role="reads", group=ADVANCED, help=LATENCY)
    bytes_per_parameter: float | None = option(
        None, group=ADVANCED, help="bytes of a parameter of the adapter, for a budget in bytes (default: 2)"
    )

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the rule that is named; without one, those of the rules that the scores may choose."""
        known = cls.options()
        rules = (typed["rule"],) if "rule" in typed else ("by-rank", "mdl")
        return {name: o for rule in rules for name, o in find_rule("ranks", rule).options.items() if name not in known}

    def check(self) -> None:
        """Refuse no budget, or two.

        Raises:
            InvalidInput: Not exactly one was given.
        """
        super().check()
        check_budgets(self, "mean_rank", "budget")
