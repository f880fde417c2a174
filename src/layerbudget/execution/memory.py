"""Whether a computation fits: bytes free on a device, bytes that a backward through the whole graph needs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..models.blocks import layer_lists
from ..models.machine import SHARE, free_bytes
from ..storage.writing import check_space
from .loss import Batch


def hidden_bytes(model: nn.Module, runs: Sequence[Batch]) -> int:
    """Bytes of the hidden states in front of one layer, for all batches."""
    config = getattr(model, "config", None)
    width = int(getattr(config, "hidden_size", None) or getattr(config, "n_embd", None) or getattr(config, "d_model", 0) or 0)
    positions = sum(b.targets.numel() if b.targets.ndim == 2 else b.size * _length(b) for b in runs)
    return positions * width * next(model.parameters()).element_size()


def _length(batch: Batch) -> int:
    return int(next(iter(batch.kwargs.values())).shape[1]) if batch.kwargs else 1


def room_for(model: nn.Module, runs: Sequence[Batch], losses: int, layers: int, folder: Path | str | None = None) -> str:
    """Where the layers' inputs go: the first of ``device``, ``cpu`` and ``disk`` that has room for them.

    Raises:
        InvalidInput: None has.
    """
    need = hidden_bytes(model, runs) * (layers + 1 + 2 * losses)
    device = next(iter(runs[0].kwargs.values())).device
    if need < SHARE * free_bytes(device):
        return "device"
    if device.type != "cpu" and need < SHARE * free_bytes():
        return "cpu"
    check_space({folder or tempfile.gettempdir(): need})
    return "disk"


def graph_bytes(model: nn.Module, runs: Sequence[Batch]) -> int:
    """Bytes that the whole graph of one batch keeps: about what goes into and comes out of every matrix, twice; and logits."""
    parameter = next(model.parameters())
    positions = max((b.size * _length(b) for b in runs), default=0)
    wide = sum(sum(p.shape[-2:]) for p in model.parameters() if p.ndim >= 2)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    vocabulary = 0 if output is None or getattr(output, "weight", None) is None else int(output.weight.shape[0])
    return positions * (2 * wide * parameter.element_size() + 12 * vocabulary)


def fitting(model: nn.Module, length: int, batch_size: int) -> int:
    """The batch, halved until one layer's graph and the logits fit into half of what is free; numbers do not depend on it."""
    parameter = next(model.parameters())
    layers = max(len(found[1]) for found in layer_lists(model)) if layer_lists(model) else 1
    wide = sum(sum(p.shape[-2:]) for p in model.parameters() if p.ndim >= 2) / layers
    output = getattr(model, "get_output_embeddings", lambda: None)()
    vocabulary = 0 if output is None or getattr(output, "weight", None) is None else int(output.weight.shape[0])
    one = length * (2 * wide * parameter.element_size() + 12 * vocabulary)
    free = SHARE * free_bytes(parameter.device)
    while batch_size > 1 and batch_size * one > free:
        batch_size //= 2
    return batch_size


def fits_whole(model: nn.Module, runs: Sequence[Batch], state: int) -> bool:
    """Whether a graph of the whole model and ``state`` bytes beside it fit into half of what is free."""
    device = next(iter(runs[0].kwargs.values())).device if runs and runs[0].kwargs else torch.device("cpu")
    return graph_bytes(model, runs) + state < SHARE * free_bytes(device)
