"""Where the parameters of a model lie in a GGUF file: names, and the order of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidInput
from .architectures import CONVERT, Architecture, head_width
from .names import Names


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of q or k as llama.cpp's rotary embedding reads them: halves of a head become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return them the other way round."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of the file: some rows of a parameter, in the order of the file.

    Attributes:
        name: In the file.
        part: Which of ``parts`` equal runs of rows of every matrix.
        heads: Of how many heads the halves become neighbours, as llama.cpp's rotary embedding reads them; 0 leaves them.
        turned: The file has the transpose: GPT-2's matrices have a row for every input.
    """

    name: str
    part: int = 0
    parts: int = 1
    heads: int = 0
    turned: bool = False

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its rows of a parameter, of a stack of matrices, or of their bytes."""
        axis = max(0, tensor.ndim - 2)
        rows = tensor.chunk(self.parts, axis)[self.part]
        rows = permute(rows, self.heads) if self.heads else rows
        return rows.T if self.turned else rows

    def put(self, parameter: torch.Tensor, rows: torch.Tensor) -> None:
        """Write them back into the parameter."""
        values = unpermute(rows, self.heads) if self.heads else rows
        parameter.chunk(self.parts, max(0, parameter.ndim - 2))[self.part].copy_(values.T if self.turned else values)


def stored_tensors(config: Any, shapes: Mapping[str, Sequence[int]], arch: Architecture) -> dict[str, tuple[Stored, ...]]:
    """Return the tensors of the file by full parameter name."""
    names, stored = Names(arch.name, config.num_hidden_layers), {}
    width = head_width(config) if arch.permuted else 0
    for name, shape in shapes.items():
        stack = len(shape) == 3
        stem, ending = (name, "weight") if stack else name.rsplit(".", 1)
        tensors = names.find(stem)
        if not tensors:
            raise InvalidInput(
                f"GGUF's {arch.name} has no tensor for {name}.", "", f"{CONVERT} Or plan for compressed-tensors."
            )
        turn = shape[0] // width if width and stem.endswith((".q_proj", ".k_proj")) else 0
        stored[name] = tuple(
            Stored(name=f"{t}.{ending}", part=i, parts=len(tensors), heads=turn) for i, t in enumerate(tensors)
        )
    return stored
