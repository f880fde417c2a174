"""Layers of a cache of transformers that keep keys and values as packed whole numbers, by HQQ: less memory.

A layer of transformers gives keys and values the same number of bits. These take a format for each. The newest tokens stay as
they came; when there are ``residual`` of them, all tokens of the layer are rounded and packed. The numbers, steps and minima
are those of :func:`~layerbudget.decisions.cache.cache.rounded`. Beam search and assisted decoding repeat, reorder and remove
tokens; what is packed is not rounded again then.

HQQ packs 1, 2, 4 and 8 bits without a loss of space. Three bits are two and one here, five are four and one, six four and two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import HQQQuantizedLayer

from ...errors import InvalidInput, MissingDependency
from .formats import CacheFormat

_SPLIT = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # low bits last
_ROWS = 8  # HQQ packs numbers of up to eight rows in one byte

Change = Callable[[torch.Tensor], torch.Tensor]


def on_grid(x: torch.Tensor, form: CacheFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the whole numbers of keys or values ``(..., groups, group)``, and step and minimum of every group, in float32."""
    groups = x.float().unflatten(-1, (-1, form.group))
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    top = (1 << form.bits) - 1
    step = ((high - low) / top).half().float().clamp(min=torch.finfo(torch.float16).tiny)
    low = low.half().float()
    return ((groups - low) / step).round_().clamp_(0, top), step, low


def off_grid(numbers: torch.Tensor, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the keys or values ``(..., channels)`` of :func:`on_grid`, in float32."""
    return (numbers.float() * step.float() + low.float()).flatten(-2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """Keys or values of a layer: packed numbers, and the step and minimum of every group in 16 bits."""

    numbers: list[torch.Tensor]
    step: torch.Tensor
    low: torch.Tensor
    form: CacheFormat
    quantizer: Any

    @classmethod
    def of(cls, numbers: torch.Tensor, step: torch.Tensor, low: torch.Tensor, form: CacheFormat, quantizer: Any) -> Packed:
        """Return whole numbers packed."""
        rows = numbers.to(torch.uint8).reshape(-1, form.group)
        rows, packed, left = nn.functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS)), [], form.bits
        for bits in _SPLIT[form.bits]:
            left -= bits
            packed.append(quantizer.pack[f"{bits}bit_u8"]((rows >> left) & ((1 << bits) - 1)))
        return cls(numbers=packed, step=step.half(), low=low.half(), form=form, quantizer=quantizer)

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the whole numbers with their steps and minima."""
        rows = torch.zeros((), dtype=torch.uint8)
        for bits, part in zip(_SPLIT[self.form.bits], self.numbers, strict=True):
            rows = (rows << bits) | self.quantizer.unpack[f"{bits}bit_u8"](part)
        shape = (*self.step.shape[:-1], self.form.group)
        return rows[: self.step.numel()].reshape(shape), self.step, self.low

    def changed(self, change: Change) -> Packed:
        """Return it with other sequences or tokens."""
        numbers, step, low = map(change, self.unpacked())
        return Packed.of(numbers, step, low, self.form, self.quantizer)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        return [*self.numbers, self.step, self.low]


class PackedLayer(HQQQuantizedLayer):
    """A layer that keeps keys in one format and values in another; those of 16 bits as they are.

    Args:
        keys, values: Formats.
        residual: Newest tokens that stay as they came.
    """

    axis_key: Any  # the formats: all that transformers says when it packs keys or values
    axis_value: Any
    keys: Any  # the newest
    values: Any
    _quantized_keys: Any
    _quantized_values: Any

    def __init__(self, keys: CacheFormat, values: CacheFormat, residual: int) -> None:
        super().__init__(axis_key=1, axis_value=1, residual_length=residual)
        self.axis_key, self.axis_value = keys, values

    def _quantize(self, tensor: torch.Tensor, axis: Any = None) -> Any:
        return tensor if axis.plain else Packed.of(*on_grid(tensor, axis), axis, self.quantizer)

    def _dequantize(self, qtensor: Any) -> torch.Tensor:
        return qtensor if isinstance(qtensor, torch.Tensor) else off_grid(*qtensor.unpacked()).to(self.dtype)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove so many tokens, a number below zero; one above zero is the tokens that stay, as in older transformers."""
        length = self.get_seq_length()
        left = min(length, tokens_to_remove) if tokens_to_remove > 0 else max(0, length + tokens_to_remove)
        if left == length:
            return
        newest = self.keys.shape[-2] if self.keys.numel() else 0
        packed = length - newest
        self._change(lambda x: x[:, :, :left], packed=left < packed, newest=False)
        self._change(lambda x: x[:, :, : max(0, left - packed)], packed=False)
        self.cumulative_length = left

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self._change(lambda x: x[indices.to(x.device)])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequences in another order."""
        self.batch_select_indices(beam_idx)

    def _change(self, change: Change, packed: bool = True, newest: bool = True) -> None:
        """Change what is kept of sequences and tokens, ``(B, heads, T, ...)``: of the packed tokens, and of the newest."""
        if self.is_initialized and packed:
            packed_states = (self._quantized_keys, self._quantized_values)
            self._quantized_keys, self._quantized_values = (
                change(each) if isinstance(each, torch.Tensor) else each.changed(change) for each in packed_states
            )
        if self.is_initialized and newest and self.keys.numel():
            self.keys, self.values = change(self.keys), change(self.values)

    def stored_bytes(self) -> int:
        """Return the bytes of packed numbers, steps and minima; the newest tokens are not among them."""
        tensors = (each for q in (self._quantized_keys, self._quantized_values) for each in _tensors(q))
        return sum(t.numel() * t.element_size() for t in tensors)


def _tensors(packed: Any) -> list[torch.Tensor]:
    return [packed] if isinstance(packed, torch.Tensor) else packed.tensors


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
            raise MissingDependency("A packed cache needs hqq.", "", "pip install '.[cache]' in the clone.") from error
    return made
