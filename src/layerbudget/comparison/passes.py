"""What a score or a treatment costs: sequences that went forward and backward through the layers, per layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..models.blocks import layers


@dataclasses.dataclass
class Passes:
    """Sequences through the whole model: layer passes divided by the number of layers.

    Attributes:
        layers: Layers of the model.
        forward: Sequences, summed over layers, that went forward.
        backward: The same backward.
    """

    layers: int
    forward: int = 0
    backward: int = 0

    def to_dict(self) -> dict[str, float]:
        """``{forward, backward}`` in sequences through the whole model."""
        return {"forward": self.forward / self.layers, "backward": self.backward / self.layers}


@contextlib.contextmanager
def counted(model: nn.Module) -> Iterator[Passes]:
    """Count, inside, every call of every layer and every gradient that comes back to its output."""
    found = [layer for _, layer in layers(model)]
    passes = Passes(layers=max(1, len(found)))

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        """Count the rows of one call, and those whose gradient comes back."""
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        rows = int(hidden.shape[0])
        passes.forward += rows

        def back(_: torch.Tensor) -> None:
            passes.backward += rows

        if hidden.requires_grad and hidden.grad_fn is not None:
            hidden.register_hook(back)

    handles = [layer.register_forward_hook(hook) for layer in found]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()
