"""Sizes of a model and of a text, from which everything that a verb takes is counted."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ..data.calibration import check_reads_text
from ..errors import UnknownStructure
from ..models.blocks import end_modules, layers, partition, text_config
from ..models.experts import find_experts
from ..models.offload import mapped
from ..records import Module


def _is_routed(matrix: Module) -> bool:
    """Whether a router decides which tokens a matrix, or each of its copies, sees."""
    return matrix.copies > 1 or ".experts." in matrix.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model by its sizes."""

    matrices: tuple[Module, ...]  # of one layer
    ends: tuple[Module, ...]  # embedding and head; one where they are tied
    layers: int
    weights: int  # bytes of all of them
    hidden: int  # width of the residual stream
    vocabulary: int
    width: int  # bytes of a number that layers compute with
    converts: bool = False  # whether a layer, or the head, is converted into these when it comes from its file
    routed: float = 1.0  # share of a layer's experts that its router gives to a token

    @property
    def numel(self) -> int:
        """Weights in the matrices of one layer."""
        return sum(m.numel for m in self.matrices)

    @property
    def tied(self) -> int:
        """Columns of the matrix that is embedding and head; 0 where these are two."""
        return self.ends[0].d_in if len(self.ends) == 1 else 0

    @property
    def inputs(self) -> list[int]:
        """Widths of the distinct inputs of a layer; q, k and v share theirs, gate and up too."""
        return [width for width, _ in self.sites]

    @property
    def sites(self) -> list[tuple[int, int]]:
        """Widths of the distinct inputs of a layer, and how many matrices of one stack have such an input of their own."""
        shared = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
        return list({shared.get(n := m.name.rsplit(".", 1)[-1], n): (m.d_in, m.copies) for m in self.matrices}.values())

    @property
    def experts(self) -> bool:
        """Whether a router chooses among matrices of one layer."""
        return any(_is_routed(m) for m in self.matrices)

    @property
    def met(self) -> float:
        """Weights of one layer that a token meets."""
        return sum(m.numel * (self.routed if _is_routed(m) else 1.0) for m in self.matrices)

    def over(self, each: Callable[[int, int], float], *, ends: bool = False) -> float:
        """Sum of what rows and columns of every matrix of every layer take, and of embedding and head where they count."""
        inside = self.layers * sum(m.copies * each(m.d_out, m.d_in) for m in self.matrices)
        return inside + sum(each(m.d_out, m.d_in) for m in self.ends if ends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """How much text: ``samples`` sequences of ``length`` tokens, ``batch`` at a time; a part of ``drawn`` ones where named."""

    samples: int
    length: int = 256
    batch: int = 8
    drawn: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.samples * self.length

    @property
    def whole(self) -> int:
        """Sequences that were drawn, of which these are all or a part."""
        return self.drawn or self.samples


def shape_of(model: nn.Module) -> Shape:
    """The sizes of a loaded model.

    Raises:
        UnknownStructure: It takes no tokens, has no single list of layers, or layers without matrices.
    """
    config: Any = model.config
    stack = layers(model)
    middle = stack[len(stack) // 2][0]
    matrices = tuple(m for b in partition(model, "layer") if b.name == middle for m in b.modules)
    if not matrices:
        raise UnknownStructure(f"{type(model).__name__} has layers without matrices.", "", "Report the model.")
    text = text_config(config)
    return Shape(
        matrices=matrices,
        ends=tuple(end_modules(model)),
        layers=len(stack),
        weights=sum(p.numel() * p.element_size() for p in model.parameters()),
        hidden=int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0),
        vocabulary=int(getattr(text, "vocab_size", 0)),
        width=next(model.parameters()).element_size(),
        routed=_routed(model, middle),
    )


def _routed(model: nn.Module, layer: str) -> float:
    """Share of a layer's experts that its router gives to a token; all of them where they are not known."""
    try:
        return next((e.top_k / e.count for e in find_experts(model) if e.layer == layer), 1.0)
    except UnknownStructure:
        return 1.0


def shape_of_config(config: Any, dtype: torch.dtype) -> Shape:
    """The sizes of a configuration's model in a precision; nothing is allocated."""
    from ..models.loading import from_config

    with torch.device("meta"):
        return shape_of(from_config(config, dtype=dtype))


def shape_in_memory(model: nn.Module) -> Shape:
    """The sizes of a loaded model that reads text, in the bytes that it holds: its weights may be packed, or stay in files."""
    check_reads_text(model)
    config, files = cast(Any, model.config), mapped(model)
    if not hasattr(config, "quantization_config"):
        shape = shape_of(model)
        return shape if files is None else dataclasses.replace(shape, width=files.dtype.itemsize, converts=files.converts)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    stored = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return dataclasses.replace(shape_of_config(plain, torch.float32), weights=stored)
