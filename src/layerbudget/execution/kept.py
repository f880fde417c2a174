"""The finished layers of a backward walk, kept in a folder: one that was stopped goes on below the last of them.

Of every layer there are the numbers that were settled of its matrices, and of the last one the gradients at its input. A walk
that goes on runs the model forwards and the head once more; nothing of a finished layer is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..storage.parts import Parts
from ..storage.writing import check_space


class KeptLayers:
    """The layers of one walk, from the last to the first, among the ``parts`` of a run; ``name`` begins theirs."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.parts, self.name = parts, name

    def check_space(self, size: float) -> None:
        """Refuse a walk whose gradients at the input of a layer take so many bytes, where the disk has no room for two layers.

        Raises:
            InvalidInput: It has not.
        """
        if self.parts.folder is not None:
            check_space({self.parts.folder: 2 * size})

    def reached(self, count: int, batches: int) -> int:
        """The lowest of ``count`` layers that the walk goes on from; ``count`` where none is finished."""
        reached = count
        for index in range(count - 1, -1, -1):
            if self.parts.find(self._numbers(index)) is None:
                break
            if all(self.parts.find(self._gradients(index, j)) is not None for j in range(batches)):
                reached = index
        return reached

    def put(self, index: int, numbers: Any) -> None:
        """Keep the numbers of a layer, whose gradients are there, and drop the gradients of the layer above it."""
        self.parts.json(self._numbers(index), lambda: numbers)
        self.parts.drop(self._gradients(index + 1))

    def numbers(self, index: int) -> Any:
        """Return what :meth:`put` kept."""
        return self.parts.json(self._numbers(index), dict)

    def put_gradients(self, index: int, batch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Keep the gradients of a batch at the input of a layer, of every loss."""
        from safetensors.torch import save_file

        tensors = {str(i): gradient.cpu().contiguous() for i, gradient in enumerate(gradients)}
        self.parts.put(self._gradients(index, batch), "safetensors", lambda path: save_file(tensors, path))

    def gradients(self, index: int, batch: int) -> list[torch.Tensor]:
        """Return what :meth:`put_gradients` kept."""
        from safetensors.torch import load_file

        file = self.parts.find(self._gradients(index, batch))
        tensors = {} if file is None else load_file(file)
        return [tensors[str(i)] for i in range(len(tensors))]

    def drop(self) -> None:
        """Remove all of it: the walk is done."""
        self.parts.drop(f"{self.name}-")

    def _numbers(self, index: int) -> str:
        return f"{self.name}-layer-{index:04d}"

    def _gradients(self, index: int, batch: int | None = None) -> str:
        return f"{self.name}-gradients-{index:04d}-" + ("" if batch is None else f"{batch:04d}")
