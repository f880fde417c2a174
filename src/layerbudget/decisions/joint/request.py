"""Options of ``plan joint``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ...requests import ADVANCED, option
from ...session import ScoresRequest


@dataclasses.dataclass(kw_only=True)
class JointRequest(ScoresRequest):
    """One byte budget for pruning and adapting."""

    command: ClassVar[str] = "plan joint"

    source: str = option(
        metavar="SCORES", role="reads", help="scores.json; or a .csv or .json table of name, score, d_in and d_out"
    )
    budget: str = option(flag="--budget", help="net bytes, negative to shrink: --budget=-2GiB")
    capacity: str = option("ranks", choices=lambda: ("ranks", "lora-experts"), help="what is added (default: ranks)")
    expert_rank: int | None = option(None, group=ADVANCED, help="rank of one expert, of lora-experts (default: 8)")
    min_capacity: int = option(0, group=ADVANCED, help="ranks or experts that every block gets (default: 0)")
    max_capacity: int | None = option(None, group=ADVANCED, help="cap of every block; a rank never exceeds the smallest side")
    max_sparsity: float = option(0.7, group=ADVANCED, help="largest pruned share of a block (default: 0.7)")
    exponent: float = option(1.0, group=ADVANCED, help="exponent of the adapting weights (default: 1)")
    exponent_on: str = option(
        "density", group=ADVANCED, choices=lambda: ("density", "block"), help="what the exponent is taken of (default: density)"
    )
    alpha: float = option(0.5, group=ADVANCED, help="price of capacity (default: 0.5)")
    gamma: float = option(0.9, group=ADVANCED, help="weight of the utility (default: 0.9)")
    eta: float = option(2.0, group=ADVANCED, help="weight of the penalty; gamma / eta decides how much is pruned (default: 2)")
    spend: str = option(
        "exactly", group=ADVANCED, choices=lambda: ("exactly", "at_most"), help="how the budget is met (default: exactly)"
    )
    damping: float | None = option(None, group=ADVANCED, help="which row of the scores (default: the middle one)")
    bytes_per_parameter: float = option(2.0, group=ADVANCED, help="bytes of a parameter of weights and adapters (default: 2)")
