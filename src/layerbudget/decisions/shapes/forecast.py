"""The work of ``plan shapes``: forwards, backwards and refits at every point."""

from __future__ import annotations

from ...cost.sizes import Shape, Text
from ...cost.work import WorkItem, collecting_seconds
from ...execution.panels import count_numbers


def shaping(text: Text, passes: float) -> list[WorkItem]:
    """Parts of ``plan shapes``: its forwards and backwards, and at every point the refits of what stays."""

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        return passes / 7.0 * collecting_seconds("gram", shape, text)

    def sent(shape: Shape, text: Text) -> float:
        """Moments of each of four parts of the text, for others to refit by: at every point, and of the dense model twice.

        They are of what heads and MLPs give, in float32; two starts are looked at, heads one by one and in groups.
        """
        behind = [m for m in shape.matrices if m.d_out == shape.hidden and not m.name.rpartition(".")[2].startswith("q")]
        each = 4.0 * min(4, text.samples) * shape.layers * sum(m.copies * count_numbers(m.d_in) for m in behind)
        return each * (passes // 7.0 + 2.0) / (passes / 7.0)

    return [WorkItem("directional", text, passes, losses=2, job=job), WorkItem("refit", text, times=passes / 7.0, sent=sent)]
