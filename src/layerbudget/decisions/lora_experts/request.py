"""Options of ``plan lora-experts``."""

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
    known = "; ".join(f"{name}: {rule.summary}" for name, rule in rules_of("lora-experts").items())
    return f"{known} (default: mdl)"


@dataclasses.dataclass(kw_only=True)
class LoraExpertsRequest(ScoresRequest):
    """LoRA experts for every block."""

    command: ClassVar[str] = "plan lora-experts"

    total: int | None = option(None, help="budget: experts in all")
    budget: str | None = option(None, help="or in any unit: '64M params', '1.2 GiB', '3% flops', ...")
    max_experts: int | None = option(None, help="cap of every block (default: none)")
    min_experts: int = option(1, group=ADVANCED, help="experts that every block has anyway, which earn nothing (default: 1)")
    lower: int = option(
        0, group=ADVANCED, help="smallest number of experts; what it has above --min-experts earns utility (default: 0)"
    )
    expert_rank: int = option(8, group=ADVANCED, help="rank of one expert (default: 8)")
    rule: str = option("mdl", help=_rules)
    fix: tuple[str, ...] = option((), metavar="BLOCK=COUNT", help=FIX)
    latency: str | None = option(None, metavar="FILE", role="reads", group=ADVANCED, help=LATENCY)
    bytes_per_parameter: float | None = option(
        None, group=ADVANCED, help="bytes of a parameter of the experts, for a budget in bytes (default: 2)"
    )

    @classmethod
    def more_options(cls, typed: Mapping[str, str]) -> dict[str, Option]:
        """Return the options of the rule that is named."""
        known = cls.options()
        return {name: o for name, o in find_rule("lora-experts", typed.get("rule", "mdl")).options.items() if name not in known}

    def check(self) -> None:
        """Refuse no budget, or two.

        Raises:
            InvalidInput: Not exactly one was given.
        """
        super().check()
        check_budgets(self, "total", "budget")
