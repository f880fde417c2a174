"""Storage of what a walk keeps, and whether a computation fits: bytes free on a device, bytes that a backward pass needs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InvalidInput
from ..models.blocks import layer_lists
from ..models.machine import ROOM, SHARE, free_bytes
from ..models.offload import mapped
from ..storage.writing import Scratch, check_space
from .loss import Batch

HEAD = 1 << 26  # of logits in float32 are made at a time at least, where a model can be asked for some of its positions
GRAPHS = 5 << 28  # of the graphs of all layers are kept without their weights, where every layer would run twice otherwise
TOGETHER = 512  # tokens of short sequences that go through the layers together: those of a streamed model come once for all
_STORES = ("device", "cpu", "disk")


class Store:
    """Activations by key, on the ``device`` where the model put them, on the ``cpu``, or on ``disk`` below a folder."""

    def __init__(self, where: str = "device", folder: Path | str | None = None) -> None:
        if where not in _STORES:
            raise InvalidInput(f"Activations cannot be kept on {where!r}.", f"Choose one of {', '.join(_STORES)}.", "")
        self.where = where
        self._activations: dict[Any, torch.Tensor] = {}
        self._scratch = Scratch(folder) if where == "disk" else None

    def put(self, key: Any, value: torch.Tensor) -> None:
        """Keep activations; those of the same shape that are there are overwritten in place."""
        value = value.detach()
        if self._scratch is not None:
            torch.save(value.cpu().contiguous(), self._file(self._scratch.path, key))
            return
        stored = self._activations.get(key)
        if stored is not None and stored.shape == value.shape and stored.dtype == value.dtype:
            stored.copy_(value)
        else:
            device = "cpu" if self.where == "cpu" else value.device
            self._activations[key] = torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)

    def get(self, key: Any) -> torch.Tensor:
        """Activations, on the device where they are kept."""
        return (
            self._activations[key]
            if self._scratch is None
            else torch.load(self._file(self._scratch.path, key), weights_only=True)
        )

    def drop(self, key: Any) -> None:
        """Forget activations."""
        self._activations.pop(key, None)
        if self._scratch is not None:
            self._file(self._scratch.path, key).unlink(missing_ok=True)

    @staticmethod
    def _file(folder: Path, key: Any) -> Path:
        return folder / f"{key}.pt"

    def close(self) -> None:
        """Free the memory, or the disk."""
        self._activations.clear()
        if self._scratch is not None:
            self._scratch.close()


def room(device: torch.device | str = "cpu") -> float:
    """Return the bytes that may be planned for on a device: half of what is free, and of main memory ``ROOM`` at most."""
    free = SHARE * free_bytes(device)
    return min(free, ROOM) if torch.device(device).type == "cpu" else free


def room_for(model: nn.Module, runs: Sequence[Batch], layers: int) -> str:
    """Where the inputs of so many layers go: the first of ``device``, ``cpu`` and ``disk`` that has room for them.

    Of main memory they take no more than half of what is planned for; a graph needs the other half.
    """
    need = hidden_bytes(model, runs) * layers
    device = next(iter(runs[0].kwargs.values())).device
    if need < min(room(device), SHARE * ROOM if device.type == "cpu" else math.inf):
        return "device"
    if device.type != "cpu" and need < SHARE * room():
        return "cpu"
    check_space({tempfile.gettempdir(): need})
    return "disk"


def hidden_bytes(model: nn.Module, runs: Sequence[Batch]) -> int:
    """Bytes of the hidden states in front of one layer, for all batches."""
    config = getattr(model, "config", None)
    width = int(getattr(config, "hidden_size", None) or getattr(config, "n_embd", None) or getattr(config, "d_model", 0) or 0)
    return sum(b.size * b.length for b in runs) * width * _number_bytes(model)


def fitting(model: nn.Module, length: int, batch_size: int) -> int:
    """The batch, halved until one layer's graph and the logits fit into the :func:`room`; numbers do not depend on it."""
    lists = layer_lists(model)
    layer = _graph_bytes(model, length) / max((len(stack) for _, stack in lists), default=1)
    free = room(next(model.parameters()).device)
    while (
        batch_size > 1 and batch_size * layer + _logits_bytes(model, min(batch_size * length, positions_at_once(model))) > free
    ):
        batch_size //= 2
    return batch_size


def fits_whole(model: nn.Module, runs: Sequence[Batch], state: int) -> bool:
    """Whether a graph of the whole model and ``state`` bytes beside it fit into the :func:`room`."""
    device = next(iter(runs[0].kwargs.values())).device if runs and runs[0].kwargs else torch.device("cpu")
    positions = max((b.size * b.length for b in runs), default=0)
    return _graph_bytes(model, positions) + _logits_bytes(model, positions) + state < room(device)


def positions_at_once(model: nn.Module) -> int:
    """Return the positions whose logits are made together, of all sequences of a batch: ``HEAD`` bytes in float32 or just more.

    Less would lie where :func:`~layerbudget.models.machine.keep_freed` keeps what is freed. There the heap grew from piece to
    piece (glibc 2.36): by 1.4 GiB in a check of 152,000 tokens.
    """
    return -(-HEAD // (4 * max(_vocabulary(model), 1)))


def pieces_of(model: nn.Module, batch: Batch) -> Iterator[tuple[Batch, slice]]:
    """Yield a batch in pieces of positions whose logits are made together; whole where they are few or not one per position."""
    step = -(-positions_at_once(model) // batch.size)
    whole = batch.targets.ndim != 2 or not batch.kwargs or batch.length <= step
    if whole or any(value.shape != batch.targets.shape for value in batch.kwargs.values()):
        yield batch, slice(None)
        return
    for start in range(0, batch.length, step):
        places = slice(start, min(start + step, batch.length))
        yield batch.at(places), places


def _graph_bytes(model: nn.Module, positions: int) -> float:
    """Bytes that a graph keeps of the layers: about what goes into and comes out of every matrix, twice."""
    wide = sum(sum(p.shape[-2:]) for p in model.parameters() if p.ndim >= 2)
    return 2.0 * positions * wide * _number_bytes(model)


def _logits_bytes(model: nn.Module, positions: int) -> float:
    """Bytes that a graph keeps of the logits: three copies in float32."""
    return 12.0 * positions * _vocabulary(model)


def _vocabulary(model: nn.Module) -> int:
    weight = getattr(getattr(model, "get_output_embeddings", lambda: None)(), "weight", None)
    return 0 if weight is None else int(weight.shape[0])


def _number_bytes(model: nn.Module) -> int:
    """Bytes of a number that layers compute with."""
    files = mapped(model)
    return next(model.parameters()).element_size() if files is None else files.dtype.itemsize
