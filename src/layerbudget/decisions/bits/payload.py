"""Payload of plans of bits: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..formats.payload import WeightsPayload


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsPayload(WeightsPayload):
    """Fields of ``extra`` in the file of a plan of bits; what is None does not stand there.

    Attributes:
        mix: The mix of llama.cpp that the plan is compared with.
        curve: The best plans of other budgets, in a plan that is no part of another.
    """

    mix: str | None = None
    curve: Sequence[Mapping[str, Any]] | None = None
