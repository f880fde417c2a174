"""Logits of a model on batches, some positions at a time.

With 152,000 tokens to predict, the logits of 4,096 positions take 2.3 GiB in float32, and a loss as much again. The head
looks at every position by itself. So all layers run on the whole batch, and the head on as many positions as make 64 MiB of
logits or just more (``HEAD`` in :mod:`layerbudget.execution.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .loss import Batch
from .memory import pieces_of
from .replay import Replay, unwalkable


class Outputs:
    """Logits of a model on batches, in float32 and in pieces where the head can be asked for some positions.

    Args:
        model: In evaluation mode, within :func:`~layerbudget.execution.modes.inference`.
        runs: Batches that it will be asked for.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Batch]) -> None:
        self.model: Any = model
        several = any(batch.length > piece.length for batch in runs for piece, _ in pieces_of(model, batch))
        self.pieced = several and not unwalkable(model, (), runs)
        self.replay = Replay(model)
        if self.pieced:
            self.replay.probe(runs[0].kwargs)

    def of(self, batch: Batch) -> Iterator[tuple[slice, Any]]:
        """Yield places of positions in the sequences of a batch, and logits there ``(B, positions, V)``.

        They are None where the model gives no ``logits``.
        """
        if not self.pieced:
            logits = getattr(self.model(**batch.kwargs), "logits", None)
            yield slice(0, batch.length), None if logits is None else logits.float()
            return
        self.replay.look()  # layers may have gone since
        with self.replay.end(len(self.replay.layers) - 1):
            hidden = self.replay.run(batch.kwargs)
        yield from self.behind(self.replay, batch, hidden)

    def behind(self, replay: Replay, batch: Batch, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the same from the hidden states of a batch behind the last layer."""
        for piece, places in pieces_of(self.model, batch) if self.pieced else [(batch, slice(None))]:
            with replay.begin(len(replay.layers), hidden[:, places]):
                logits = replay.model(**piece.kwargs).logits
            yield slice(*places.indices(batch.length)), logits.float()
