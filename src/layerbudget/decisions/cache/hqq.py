"""Layers of a cache of transformers that keep keys and values as packed whole numbers, by HQQ: less memory.

A layer of transformers gives keys and values the same number of bits. These take a format for each. The newest tokens stay as
they came; when there are ``residual`` of them, HQQ rounds and packs all tokens of the layer. The groups, steps and minima are
those of :func:`~layerbudget.decisions.cache.cache.rounded`.

HQQ packs 1, 2, 4 and 8 bits without a loss of space. Three bits are two and one here, five are four and one, six four and two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import HQQQuantizedLayer

from ...errors import InvalidInput, MissingDependency
from .formats import CacheFormat

_SPLIT = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # low bits last
_STORED = torch.float16  # steps and zero points, as bytes are counted
_ROWS = 8  # HQQ packs numbers of up to eight rows in one byte


class PackedLayer(HQQQuantizedLayer):
    """A layer that keeps keys in one format and values in another; those of 16 bits as they are.

    Args:
        keys, values: Formats.
        residual: Newest tokens that stay as they came.
    """

    axis_key: Any  # the formats: all that transformers says when it packs keys or values
    axis_value: Any

    def __init__(self, keys: CacheFormat, values: CacheFormat, residual: int) -> None:
        super().__init__(axis_key=1, axis_value=1, residual_length=residual)
        self.axis_key, self.axis_value = keys, values

    def _quantize(self, tensor: torch.Tensor, axis: Any = None) -> Any:
        if axis.plain:
            return tensor
        rows = tensor.reshape(-1, axis.group)
        numbers, meta = self.quantizer.quantize(
            nn.functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS)),
            nbits=axis.bits,
            group_size=axis.group,
            axis=1,
            optimize=False,
            bitpack=False,
            compute_dtype=_STORED,
            device=str(tensor.device),
        )
        meta["compute_dtype"] = _STORED
        numbers, meta = self.quantizer.to_inplace(numbers.to(torch.uint8), meta, tensor.device)
        packed, left = [], axis.bits
        for bits in _SPLIT[axis.bits]:
            left -= bits
            packed.append(self.quantizer.pack[f"{bits}bit_u8"]((numbers >> left) & ((1 << bits) - 1)))
        return packed, meta, tensor.shape

    def _dequantize(self, qtensor: Any) -> torch.Tensor:
        if isinstance(qtensor, torch.Tensor):
            return qtensor
        packed, meta, shape = qtensor
        numbers = torch.zeros((), dtype=torch.uint8)
        for bits, part in zip(_SPLIT[meta["nbits"]], packed, strict=True):
            numbers = (numbers << bits) | self.quantizer.unpack[f"{bits}bit_u8"](part)
        rows = self.quantizer.dequantize(numbers, meta).flatten()[: shape.numel()]
        return rows.to(self.dtype).reshape(shape)

    def stored_bytes(self) -> int:
        """Return the bytes of packed numbers, steps and zero points; the newest tokens are not among them."""
        held = (each for q in (self._quantized_keys, self._quantized_values) for each in _tensors(q))
        return sum(t.numel() * t.element_size() for t in held)


def _tensors(held: Any) -> list[torch.Tensor]:
    return [held] if isinstance(held, torch.Tensor) else [*held[0], held[1]["scale"], held[1]["zero"]]


def packed_layers(layers: list[Any], formats: Mapping[int, tuple[CacheFormat, CacheFormat]], residual: int = 128) -> list[Any]:
    """Return the layers of a cache, those with formats below 16 bits as :class:`PackedLayer`.

    Raises:
        InvalidInput: A layer with a sliding window, or a plan for another runtime.
        MissingDependency: HQQ is not installed.
    """
    made = list(layers)
    for i, pair in formats.items():
        if all(form.plain for form in pair):
            continue
        wrong = [form.name for form in pair if not form.plain and not form.name.startswith("int")]
        if wrong:
            raise InvalidInput(f"HQQ packs no {wrong[0]}.", "It packs int2 to int8.", "Plan with --runtime transformers.")
        if getattr(layers[i], "sliding_window", None):
            raise InvalidInput(
                f"Layer {i} has a sliding window, which the packed caches of transformers have not.",
                "",
                "Leave packed out: the cache then rounds as planned, and keeps 16 bits.",
            )
        try:
            made[i] = PackedLayer(*pair, residual)
        except ImportError as error:
            raise MissingDependency("A packed cache needs hqq.", "", 'pip install "layerbudget[cache]".') from error
    return made
