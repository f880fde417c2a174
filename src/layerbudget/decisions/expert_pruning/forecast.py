"""The work of ``plan expert-pruning``: a look, and forwards with experts masked."""

from __future__ import annotations

from ...cost.sizes import Text
from ...cost.work import WorkItem, derivatives_bytes


def removing(text: Text, *, draws: int = 4) -> list[WorkItem]:
    """Parts of ``plan expert-pruning``: a look, and forwards with experts masked: the plan, its rivals, halves of the text."""
    return [WorkItem("directional", text, 1.0 + 2.0 * draws + 36.0, sent=derivatives_bytes(17, text.samples))]
