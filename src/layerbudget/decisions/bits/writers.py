"""What writes a family of formats: asked for the tensors of a piece while its weights are at hand, then given them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...compressors.formats import GGUF
from ...compressors.rounding import Rounded
from ...plan import Plan
from .gguf_file import GgufWriter
from .packed import PackedWriter
from .plans import formats_of_plan
from .storing import Piece

GGUF_FILE = "model.gguf"
Tensors = Mapping[str, torch.Tensor]


class Writer(Protocol):
    """What writes a family of formats."""

    def tensors(self, piece: Piece, rounded: Mapping[str, Sequence[Rounded]]) -> dict[str, torch.Tensor]:
        """What the file holds of a piece whose weights are at hand."""

    def back(self, piece: Piece, tensors: Tensors) -> None:
        """Put a finished piece into the model again."""

    def add(self, tensors: Tensors) -> None:
        """Write a piece."""

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names in the file of every planned matrix's weights; those that are not there count nothing."""

    def close(self) -> list[str]:
        """Finish the files; returns notes."""


def writer_of(model: nn.Module, tokenizer: Any, plan: Plan, folder: Path) -> Writer:
    """The writer of a plan's family."""
    formats = formats_of_plan(plan)
    if plan.extra["family"] == GGUF:
        return GgufWriter(model, tokenizer, formats, folder / GGUF_FILE)
    return PackedWriter(model, formats, folder)
