"""Walk a model layer by layer over a calibration set: one layer's inputs are kept, and become its outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.calibration import CalibrationSet, check_fits
from ..errors import CoverageError, InvalidInput
from .memory import Store
from .replay import Replay


class Walk:
    """The walk forwards, inside :func:`~layerbudget.execution.modes.inference`.

    After :meth:`capture` the store holds the inputs of layer 0; :meth:`advance` moves it to the next layer. Activations live
    where ``store`` says: ``device``, ``cpu`` or ``disk`` (in ``folder``). With ``autocast`` the matrix products of the forwards
    are in ``bfloat16`` or ``float16``; weights are untouched.

    Attributes:
        batches: Number of batches.
        position: The layer whose inputs are stored.
        forwards: Forwards of one layer on one batch so far.
    """

    def __init__(
        self,
        model: nn.Module,
        data: CalibrationSet,
        *,
        batch_size: int = 8,
        store: str = "device",
        folder: Path | str | None = None,
        autocast: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise InvalidInput(f"batch_size is {batch_size}.", "It must be at least 1.", "Use 8.")
        if autocast not in (None, "bfloat16", "float16"):
            raise InvalidInput(f"autocast is {autocast!r}.", "It is bfloat16 or float16, or left out.", "Use bfloat16.")
        check_fits(model, data)
        self.model, self.data, self.batch_size = model, data, batch_size
        self.replay = Replay(model)
        self.device = next(model.parameters()).device
        self.batches = -(-data.samples // batch_size)
        self.store = Store(store, folder)
        self.position, self.forwards = -1, 0
        self._precision: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        if autocast is not None:
            self._precision = functools.partial(torch.autocast, self.device.type, getattr(torch, autocast))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def layers(self) -> list[tuple[str, nn.Module]]:
        """Names and layers in order."""
        return self.replay.layers

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model for one batch."""
        start = batch * self.batch_size
        return next(self.data.select(slice(start, start + self.batch_size)).batches(self.batch_size, self.device))

    def token_mask(self, batch: int) -> torch.Tensor | None:
        """Which tokens of a batch are real, shape ``(sequences, length)``; None when all are."""
        mask = self.inputs(batch).get("attention_mask")
        return None if mask is None or bool(mask.all()) else mask.bool()

    def capture(self) -> None:
        """Fill the store with the inputs of layer 0."""
        with self._precision():
            self.replay.probe(self.inputs(0))
            for batch in range(self.batches):
                self.store.put(batch, self.replay.first_inputs(self.inputs(batch)))
        self.position = 0

    def forward(self, index: int, batch: int, hidden: torch.Tensor | None = None) -> torch.Tensor | None:
        """Output of one layer on one batch, from the stored input or another; None when a hook inside it ended the forward."""
        hidden = self.store.get(batch) if hidden is None else hidden
        self.forwards += 1
        with self.replay.begin(index, hidden), self.replay.end(index), self._precision():
            return self.replay.run(self.inputs(batch))

    def _output(self, index: int, batch: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
        output = self.forward(index, batch, hidden)
        if output is None:
            raise CoverageError(f"{self.layers[index][0]} gave no output.", "", "Remove hooks that end the forward.")
        return output

    def advance(self) -> None:
        """Replace the stored inputs of the current layer by its outputs."""
        for batch in range(self.batches):
            self.store.put(batch, self._output(self.position, batch))
        self.position += 1

    def meet_head(self, batch: int, hidden: torch.Tensor) -> None:
        """Give the head what it reads of one batch, for those who listen, and end the forward in front of it."""
        with self.replay.begin(len(self.layers), hidden), self.replay.end_at_head(), self._precision():
            self.model(**self.inputs(batch))

    def finals(self, during: Callable[[int], AbstractContextManager[Any]] = contextlib.nullcontext) -> list[torch.Tensor]:
        """Hidden states behind the last layer, by batch; a batch runs through a layer in the context ``during(batch)``."""
        hidden = [self.store.get(batch) for batch in range(self.batches)]
        for i in range(self.position, len(self)):
            for batch in range(self.batches):
                with during(batch):
                    hidden[batch] = self._output(i, batch, hidden[batch])
        return hidden

    def close(self) -> None:
        """Drop the stored activations."""
        self.store.close()
