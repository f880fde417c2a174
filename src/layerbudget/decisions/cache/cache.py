"""A cache of transformers whose keys and values are rounded as they come, and what a model keeps in it.

Every forward sees rounded keys and values, also those of the tokens that it adds: as llama.cpp and vLLM, which write a token
before they read it. The numbers stay in the model's own type: it computes what a runtime computes, and saves no memory.
A packed cache (:mod:`layerbudget.decisions.cache.hqq`) saves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ...decision import check_kind
from ...errors import InvalidInput
from ...execution.loss import head_of
from ...execution.modes import inference
from ...models.blocks import config_of, describe, layers
from ...plan import Plan, payload_of
from .formats import CachedTensor, CacheFormat, find_cache
from .hqq import off_grid, on_grid, packed_layers
from .llama import hadamard, piece, written
from .payload import CachePayload

Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_LARGEST = 448.0  # of e4m3


class PlannedCache(DynamicCache):
    """A ``DynamicCache`` whose keys and values, ``(B, heads, T, channels)``, a function of the layer changes as they come."""

    def __init__(self, config: Any, change: Change) -> None:
        super().__init__(config=config)
        self.change = change

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Take new keys and values, changed; see ``transformers.Cache.update``."""
        return super().update(*self.change(layer_idx, key_states, value_states), layer_idx, *args, **kwargs)


@contextlib.contextmanager
def caching(model: nn.Module, change: Change) -> Iterator[None]:
    """Every forward of the model begins with an empty :class:`PlannedCache`."""

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "past_key_values": PlannedCache(config_of(model), change), "use_cache": True}

    handle = model.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def rounded(x: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """Return ``(..., channels)`` rounded by the function that the runtime has for a format, channels as they come."""
    if form.plain:
        return x
    if form.name == "fp8":
        return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).to(x.dtype)
    if form.name.startswith("int"):
        return off_grid(*on_grid(x, form)).to(x.dtype)
    rows = x.detach().float().reshape(-1, x.shape[-1]).cpu().numpy()
    return torch.from_numpy(written(rows, form.name)).to(x.device).reshape(x.shape).to(x.dtype)


def read_back(x: torch.Tensor, form: CacheFormat, part: int) -> torch.Tensor:
    """Return what a runtime reads back of keys (part 0) or values (1), ``(..., channels)``.

    llama.cpp rounds channels in the order of its file, and rotated. Both are undone here, because it computes queries and
    outputs of attention in the same order and rotation.
    """
    neighbours, size = form.interleaved and part == 0, piece(x.shape[-1], part) if form.rotated else 0
    if form.plain or not (neighbours or size):
        return rounded(x, form)
    matrix = torch.from_numpy(hadamard(size)).to(x.device) if size else None

    def rotated(y: torch.Tensor) -> torch.Tensor:
        return y if matrix is None else (y.unflatten(-1, (-1, size)) @ matrix).flatten(-2)

    y = x.detach().float()
    y = y.unflatten(-1, (2, -1)).mT.flatten(-2) if neighbours else y
    y = rotated(rounded(rotated(y), form))
    y = y.unflatten(-1, (-1, 2)).mT.flatten(-2) if neighbours else y
    return y.to(x.dtype)


def rounding(formats: Mapping[int, tuple[CacheFormat, CacheFormat]]) -> Change:
    """Return the change that rounds keys and values of layers to formats; layers without stay as they are."""

    def change(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in formats:
            return keys, values
        return read_back(keys, formats[layer][0], 0), read_back(values, formats[layer][1], 1)

    return change


def kept(model: nn.Module) -> list[CachedTensor]:
    """Return what a model keeps, from one forward of one token.

    Layers with a sliding window keep no more than it, layers that share another one's keys and values keep none, nor do those
    without attention.

    Raises:
        InvalidInput: A model without a cache of keys and values.
    """
    if head_of(model) != "causal":
        raise _none(model)
    kept_states: list[CachedTensor] = []
    names = [name for name, _ in layers(model)]
    windows: dict[int, int | None] = {}

    def listen(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for part, x in enumerate((keys, values)):
            name, window = names[min(layer, len(names) - 1)], windows.get(layer)
            kept_states.append(
                CachedTensor(layer=layer, name=name, part=part, heads=x.shape[1], channels=x.shape[3], window=window)
            )
        return keys, values

    try:
        for i, each in enumerate(PlannedCache(config_of(model), listen).layers):
            windows[i] = int(getattr(each, "sliding_window", 0)) or None
        with inference(model), caching(model, listen):
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _none(model) from error
    if not kept_states:
        raise _none(model)
    return kept_states


def _none(model: nn.Module) -> InvalidInput:
    what = f"{type(model).__name__} keeps no keys and values in a cache of transformers."
    return InvalidInput(what, "Decoders with attention do.", "Plan the bits of its weights: layerbudget plan bits.")


def planned_cache(model: nn.Module, plan: Plan, *, packed: bool = False, residual: int = 128) -> DynamicCache:
    """Return an empty cache that rounds as a plan of kind ``cache`` says, for ``model.generate(past_key_values=...)``.

    Args:
        model: The model that the plan was made for.
        plan: The plan.
        packed: Keep the numbers packed by HQQ, which saves the memory; otherwise they are rounded and keep their type.
        residual: Newest tokens that a packed cache keeps as they came.

    Raises:
        ModelMismatch: The plan belongs to another model.
        InvalidInput: A plan of another kind, or one that HQQ cannot pack.
        MissingDependency: ``packed`` without the package hqq.
    """
    check_kind(plan.kind, ("cache",), "decides nothing about a cache")
    plan.validate(describe(model))
    formats = layer_formats(model, plan)
    if not packed:
        return PlannedCache(config_of(model), rounding(formats))
    cache = DynamicCache(config=config_of(model))
    cache.layers = packed_layers(cache.layers, formats, residual)
    return cache


def layer_formats(model: nn.Module, plan: Plan) -> dict[int, tuple[CacheFormat, CacheFormat]]:
    """Return the formats of keys and values of every layer, by its index."""
    tensors, payload = kept(model), payload_of(plan, CachePayload)
    names = sorted(set(payload.formats.values()))
    channels = [tensor.channels for tensor in tensors]
    formats = find_cache(payload.runtime).formats(channels, names, payload.group, bool(payload.rotated))
    known = {f.name: dataclasses.replace(f, interleaved=bool(payload.interleaved)) for f in formats}
    chosen = {(tensor.layer, tensor.part): known[payload.formats[tensor.module]] for tensor in tensors}
    return {tensor.layer: (chosen[tensor.layer, 0], chosen[tensor.layer, 1]) for tensor in tensors}
