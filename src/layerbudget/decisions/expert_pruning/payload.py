"""Payload of plans of experts that stay: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...storage.reading import Count
from ..describe import EvenUneven


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPruningPayload:
    """Fields of ``extra`` in the file of a plan of experts that stay; damages are in nats per token.

    Attributes:
        kept: Indices of the experts that stay, by layer.
        predicted: Damage that the look alone predicts, on text that did not choose where there was some.
        predicted_error: Its standard error over sequences.
        measured: Damage with the other experts masked, on the same text.
        measured_error: Its standard error over sequences.
        measured_here: Damage with the other experts masked, on the text that chose.
        crossed: Whether halves of the text judged each other, so that the damages hold for other text.
        forecast: ``keep``, ``experts``, and the four damages above, at several shares of the experts.
        forward_passes: Forward equivalents that planning took.
        beside: Predicted damage of as many experts with equal layers, and with any; None where equal layers cannot be had.
        curve: Plans at the shares of the forecast: ``keep``, ``forecast`` and the ``values`` of the blocks.
    """

    kept: Mapping[str, Sequence[Count]]
    predicted: float
    predicted_error: float
    measured: float
    measured_error: float
    measured_here: float
    crossed: bool
    forecast: Sequence[Mapping[str, int | float]]
    forward_passes: float
    beside: EvenUneven | None
    curve: Sequence[Mapping[str, Any]]
