"""The work of ``plan sparsity``: looks along masks, and the pruner."""

from __future__ import annotations

import torch

from ...cost import timing
from ...cost.sizes import Shape, Text
from ...cost.work import WorkItem, derivatives_bytes, norms_bytes, pruning_job
from .directional import NESTED_LEVELS


def searching(text: Text, passes: float) -> list[WorkItem]:
    """Parts of ``plan sparsity``: looks of three passes, each of which masks every matrix and takes derivatives along masks."""

    def job(shape: Shape, text: Text) -> float:
        """Return seconds of the whole model."""
        make, meet = timing.nested_seconds(NESTED_LEVELS)
        batches = -(-text.samples // text.batch)
        product = text.tokens / timing.rate(torch.float32, torch.device("cpu"))  # of the gradient of every matrix
        one = shape.over(lambda rows, columns: rows * columns * (make + meet * batches + product)) + pruning_job("wanda")(
            shape, text
        )
        return passes / 3.0 * one

    def sent(shape: Shape, text: Text) -> float:
        """Derivatives and norms of every point, and norms of the dense model and of the plan that the pruner applies."""
        points, looks = max(1.0, passes / 3.0 - 1.0), passes / 3.0
        return (points * derivatives_bytes(NESTED_LEVELS, 0)(shape, text) + (points + 2.0) * norms_bytes(shape, text)) / looks

    return [WorkItem("directional", text, passes, job=job, sent=sent)]
