"""Options of ``plan expert-pruning``; ``apply`` of such a plan has no options of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from ...errors import InvalidInput
from ...requests import ADVANCED, TEXT, option, out_option
from ...session import PlanRequest
from .program import DRAWS, RULES, parse_limit


@dataclasses.dataclass(kw_only=True)
class ExpertPruningRequest(PlanRequest):
    """Which experts of a model stay, and how many of each layer."""

    command: ClassVar[str] = "plan expert-pruning"
    usual: ClassVar[Mapping[str, object]] = {**PlanRequest.usual, "samples": 16}
    resume: ClassVar[None] = None  # type: ignore[misc]  # it keeps no parts, so there is no such option

    source: str = option(metavar="MODEL", role="reads", help="a model with routed experts")
    budget: str | None = option(
        None,
        flag="--keep",
        short="--budget",
        help="what stays: a share of all experts (0.5), '96 experts', or the model's bytes: '12 GiB'",
    )
    damage: float | None = option(
        None, help="or what it may cost, in nats per token: so few experts stay that one step fewer costs more"
    )
    even: bool = option(False, help="the same number in all layers: what every runtime loads")
    rule: str = option("directional", choices=lambda: RULES, help="scores that decide who goes (default: directional)")
    samples: int | None = option(None, group=TEXT, help="number of calibration sequences (default: 16)")
    draws: int = option(DRAWS, group=ADVANCED, help=f"draws of labels (default: {DRAWS})")
    out: str | None = out_option("write the plan here (default: plan.json)", metavar="PLAN")

    def check(self) -> None:
        """Refuse a budget that does not read, and two limits or none.

        Raises:
            InvalidInput: Not exactly one of ``--keep`` and ``--damage``, or an unknown unit.
        """
        super().check()
        if (self.budget is None) == (self.damage is None):
            raise InvalidInput("Give either --keep or --damage.", "One of them is the limit.", "For example --keep 0.5.")
        if self.budget is not None:
            parse_limit(self.budget)
