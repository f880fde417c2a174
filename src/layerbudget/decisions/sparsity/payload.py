"""Payload of plans of sparsity: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsityPayload:
    """Fields of ``extra`` in the file of a plan of sparsity; what is None does not stand there.

    Attributes:
        predicted: Damage that the last step was expected to reach, nats per token.
        measured: Damage that the pruner did with this plan, nats per token, on the text that decided.
        path: A record of every step from uniform: ``divergence``, ``passes``, ``predicted`` and ``measured`` change, and the
            ``values`` of the blocks in plans of few blocks.
        forward_passes: Forward equivalents that planning took.
        held_out: Damage on text that did not decide, where there was some.
        rows: Zeros of every group of rows, see :attr:`layerbudget.plan.Plan.rows`.
        convexified: By how much a measured curve that was not convex was changed, by block.
        flat_scores: By how much the scores differ, as a share of their mean, where that is little.
        own: Options of the pruner, in plans that are made from curves.
    """

    predicted: float | None = None
    measured: float | None = None
    path: Sequence[Mapping[str, Any]] = ()
    forward_passes: float | None = None
    held_out: float | None = None
    rows: Any = None
    convexified: Mapping[str, float] | None = None
    flat_scores: float | None = None
    own: Mapping[str, Any] | None = None
