"""Payload of plans of LoRA experts: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses

from ..capacity import Rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraExpertsPayload:
    """Fields of ``extra`` in the file of a plan of LoRA experts; what is None does not stand there.

    Attributes:
        rounding: How whole experts were found.
        flat_scores: By how much the scores differ, as a share of their mean, where that is little.
    """

    rounding: Rounding | None = None
    flat_scores: float | None = None
