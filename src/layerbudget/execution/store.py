"""Where activations live between two blocks: on the device, in memory or on disk."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import InvalidInput

STORES = ("device", "cpu", "disk")


def lying(shape: Sequence[int], folder: Path | str | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros whose pages belong to a file and not to the process's own memory: the system writes them out where it needs room.

    The file has no name and goes with the tensor.

    Args:
        shape: Of the tensor.
        folder: Where there is room; None for ordinary memory, which it also is where open files cannot lose their names.
        dtype: Of the tensor.
    """
    if folder is None or os.name != "posix":
        return torch.zeros(tuple(shape), dtype=dtype)
    count = math.prod(shape)
    handle, name = tempfile.mkstemp(prefix="layerbudget-", dir=folder)
    try:
        os.ftruncate(handle, count * dtype.itemsize)
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(tuple(shape))
    finally:
        os.close(handle)
        Path(name).unlink()


class Store:
    """Activations of one position in the model, one tensor per batch, overwritten in place.

    Args:
        where: ``device`` (where the model put them), ``cpu`` or ``disk``.
        folder: Parent of the temporary folder for ``disk``.
    """

    def __init__(self, where: str = "device", folder: Path | str | None = None) -> None:
        if where not in STORES:
            raise InvalidInput(f"Activations cannot be kept on {where!r}.", f"Choose one of {', '.join(STORES)}.", "")
        self.where = where
        self._held: dict[int, torch.Tensor] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="layerbudget-", dir=folder)) if where == "disk" else None

    def put(self, index: int, value: torch.Tensor) -> None:
        """Keep the activations of one batch."""
        value = value.detach()
        if self._folder is not None:
            torch.save(value.cpu().contiguous(), self._folder / f"{index}.pt")
            return
        held = self._held.get(index)
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            held.copy_(value)
        else:
            device = "cpu" if self.where == "cpu" else value.device
            self._held[index] = torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)

    def get(self, index: int) -> torch.Tensor:
        """Activations of one batch, on the device where they are kept."""
        if self._folder is not None:
            return torch.load(self._folder / f"{index}.pt", weights_only=True)
        return self._held[index]

    def drop(self, index: int) -> None:
        """Forget the activations of one batch."""
        self._held.pop(index, None)
        if self._folder is not None:
            (self._folder / f"{index}.pt").unlink(missing_ok=True)

    def move(self, index: int, to: int) -> None:
        """Put the activations of one batch in the place of another's."""
        if self._folder is not None:
            (self._folder / f"{index}.pt").replace(self._folder / f"{to}.pt")
        else:
            self._held[to] = self._held.pop(index)

    def close(self) -> None:
        """Free the memory, or the disk."""
        self._held.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
