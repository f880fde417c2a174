"""Payload of plans of ranks: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...frozen import fields_in_file
from ...storage import reading
from ..capacity import Rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallerReserve:
    """A cap of the ranks under which a server reserves less, and most of the gain stays."""

    max_rank: int  #: The cap.
    share: float  #: What it leaves of the gain.
    reserved: int  #: The rank that a server reserves without it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksSettings:
    """Those hyperparameters of a plan that are said of it."""

    mean_rank: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksPayload:
    """Fields of ``extra`` in the file of a plan of ranks; what is None does not stand there.

    Attributes:
        rounding: How whole ranks were found.
        uniform_share: Gain of the same rank everywhere over the plan's.
        noise_share: Share of the gain that noise alone gives the same ranks.
        smaller_reserve: A cap that a server reserves less for.
        at_measured: Ranks of the blocks that have all ranks whose gains were measured, by block.
        scored_rows: Rows that were scored, where they are too few to tell ranks apart.
        flat_scores: By how much the scores differ, as a share of their mean, where that is little.
    """

    rounding: Rounding | None = None
    uniform_share: float | None = None
    noise_share: float | None = None
    smaller_reserve: SmallerReserve | None = None
    at_measured: Mapping[str, reading.Count] = dataclasses.field(default_factory=dict)
    scored_rows: reading.Count | None = None
    flat_scores: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what stands in a file; a plan by the gain of every rank has what such gains say, as null where they do not."""
        by_rank = self.rounding is not None and self.rounding["method"] == "increments"
        kept = ("uniform_share", "noise_share", "smaller_reserve") if by_rank else ()
        fields = {name: fields_in_file(value) for name, value in vars(self).items()}
        return {name: value for name, value in fields.items() if name in kept or value not in (None, {})}
