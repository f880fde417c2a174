"""Payload of plans of smaller shapes: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...storage.reading import Count, Size
from ..describe import EvenUneven


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapedPart:
    """Units that go from the heads or from the MLP of one layer.

    Attributes:
        layer: Full name of the layer.
        kind: ``heads`` or ``mlp``.
        by: What a unit is: ``groups``, ``queries`` or ``8 channels``.
        units: How many there are.
        removed: How many go; none where the whole layer does.
    """

    layer: str
    kind: str
    by: str
    units: Count
    removed: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapesPayload:
    """Fields of ``extra`` in the file of a plan of smaller shapes; damages are in nats per token.

    Attributes:
        shapes: What goes, by part.
        dropped: Layers that go whole.
        predicted: Damage that is expected; on other text where it was ``crossed``.
        gap: How far the last step's program is from its bound.
        measured: Damage of the model that was really cut, on the text that decided; not known while a search goes on.
        crossed: Whether parts of the text judged refits to the others, so that the predicted damage is that of other text;
            not known while a search goes on.
        path: Every accepted point: ``divergence``, ``passes``, ``predicted``, ``measured``, ``share`` and ``values``.
        forward_passes: Forward equivalents that planning took.
        beside: Damage of the budget as the dense model predicts it, with equal layers and with any; None where unknown.
        experts_differ: Whether the layers of the model keep different numbers of experts.
        prices: Nanoseconds of a request by rate, under a budget of latency.
        speed: The rates that were measured, under a budget of latency.
        tokens_per_second: What they predict, ``read`` and ``written``, ``before`` and ``after``.
    """

    shapes: Mapping[str, ShapedPart]
    dropped: Sequence[str]
    predicted: float | None = None
    gap: float | None = None
    measured: float | None = None
    crossed: bool | None = None
    path: Sequence[Mapping[str, Any]] = ()
    forward_passes: float | None = None
    beside: EvenUneven | None = None
    experts_differ: bool = False
    prices: Mapping[str, int] | None = None
    speed: Mapping[str, Any] | None = None
    tokens_per_second: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapesSettings:
    """Those hyperparameters of a plan that applying it reads."""

    by: str
    multiple: Size
    compensate: str
    bytes_per_parameter: float
    damping: float | None = None
