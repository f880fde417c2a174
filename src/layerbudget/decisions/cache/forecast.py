"""The work of measuring the damage of a cache: forwards and backwards of one sequence after the other."""

from __future__ import annotations

import dataclasses

from ...cost.sizes import Shape, Text
from ...cost.work import WorkItem
from ...execution.memory import GRAPHS, TOGETHER


def measuring(text: Text, *, draws: int = 4) -> list[WorkItem]:
    """Parts of the damage of a cache: ``1 + 2 draws`` passes, one sequence at a time; graphs of layers are kept."""

    def held(shape: Shape) -> float:
        """Of a streamed model; where the weights are in memory, so is the whole graph."""
        tokens = max(text.length, min(TOGETHER, text.tokens))
        graphs = 2.0 * tokens * shape.layers * sum(m.copies * m.d_out for m in shape.matrices) * shape.width
        return graphs if shape.converts and graphs < GRAPHS else 0.0

    return [WorkItem("directional", dataclasses.replace(text, batch=1), 1.0 + 2.0 * draws, losses=draws, held=held)]
