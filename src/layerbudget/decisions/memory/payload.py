"""Payload of plans of weights and cache: all that they say beside their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..formats.payload import CachedPayload, Number, WeightsPayload


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartErrors:
    """Standard errors of the predicted damage of the two parts."""

    weights: float
    cache: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class More:
    """Gains of more memory.

    Attributes:
        bytes: One unit of memory.
        predicted: Damage of the best plan with so much more.
        near: The same with a few ``share`` more: ``share``, ``memory`` and ``predicted``.
    """

    bytes: int
    predicted: float
    near: Sequence[Mapping[str, Number]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """Bytes of one of two memories: of weights with what else the file has, of the cache with states, and of buffers."""

    weights: int
    cache: int
    buffers: int

    @property
    def bytes(self) -> int:
        """Return all of them."""
        return self.weights + self.cache + self.buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Tensors that lie in the processor's memory, and the bytes of both sides; see the module ``placement``.

    Attributes:
        gpu, ram: Bytes of the card and of the processor's memory that were given.
        layers: Decoder layers, from the first on, that lie with the processor.
        of: All decoder layers.
        whole: Whether these lie there whole, with their cache, or by their experts alone.
        card, processor: Bytes that the plan takes of each; an embedding that is the head too is in both.
        others: The best plan of every number of layers: ``layers``, ``gpu_bytes``, ``ram_bytes``, ``predicted``, and of the
            next fewer ``given``: whether it is the plan where so many bytes are all that the processor has.
    """

    gpu: int
    ram: int
    layers: int
    of: int
    whole: bool
    card: Side
    processor: Side
    others: Sequence[Mapping[str, Number]] = ()

    @property
    def options(self) -> str:
        """Return llama-server's options that place the tensors."""
        if self.whole:
            return f"--n-gpu-layers {self.of + 1 - self.layers}"
        return f"--n-gpu-layers 999 --n-cpu-moe {self.layers}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPayload(WeightsPayload, CachedPayload):
    """Fields of ``extra`` in the file of a plan of weights and cache.

    Attributes:
        parts: ``bytes`` of every part of the memory, and ``bits`` and ``predicted`` damage of ``weights`` and ``cache``.
        part_errors: Standard errors of the two damages.
        cache_formats: The formats of the cache, which ``formats`` has too.
        named: The format or mix of a rule without a program, by rule.
        more: What more memory would bring.
        curve: The best plans of other memories.
        uniform_caches: Damage of one format for the whole cache, by format.
        placement: What lies with the processor, where there are two memories.
    """

    parts: Mapping[str, Mapping[str, Number]]
    part_errors: PartErrors
    cache_formats: Mapping[str, str]
    named: Mapping[str, str]
    more: More
    curve: Sequence[Mapping[str, Any]]
    uniform_caches: Mapping[str, Mapping[str, Number]]
    placement: Placement | None = None
