"""A decision that gives formats: what is alike for weights, for a cache, and for both. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...decision import Decision
from ...plan import Plan
from ...scores import Scores
from .reasons import reasons, types_of_blocks


class FormatsDecision(Decision):
    """A decision whose plans give every block a format, by the damage that each format does."""

    predicts = True
    from_gains = False

    def labels(self, plan: Plan) -> list[str] | None:
        """Return the format of every block."""
        return types_of_blocks(plan)

    def matrices(self, plan: Plan, scores: Scores | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the format of every block, and why it has that, see :func:`~layerbudget.decisions.formats.reasons.reasons`."""
        return super().matrices(plan, scores) or reasons(plan)
