"""Payload of plans of zeros and adapters: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...storage import reading
from ..capacity import Rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Capacity that is added beside the zeros that pay for it."""

    kind: str  #: ``ranks`` or ``lora-experts``.
    values: Mapping[str, float]  #: By block, before rounding.
    counts: Mapping[str, reading.Count]  #: Whole ranks or experts by block.
    bytes: float  #: What it takes in all.
    expert_rank: int | None  #: Rank of one expert.


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointPayload:
    """Fields of ``extra`` in the file of a joint plan.

    Attributes:
        capacity: What is added.
        rounding: How whole ranks or experts were found.
    """

    capacity: Capacity
    rounding: Rounding | None = None
