"""How fast a model runs here: a real forward where that takes no more than a second, products of one matrix where it would.

Timing draws random numbers; the generators of the process stay as they were, since what follows may be seeded by them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from typing import Any

import torch
from torch import nn

from ..data.fitting import check_reads_text
from ..errors import UnknownStructure
from ..execution.modes import inference
from ..models.blocks import layers, partition
from ..records import Module
from .forecast import Shape, Speed, shape_of, time_layer

MOST = 1e10  # operations that are spent on timing a real forward
LARGE = 1 << 22  # entries of a matrix whose products run as fast, per entry, as those of any larger one


def pace(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", *, model: nn.Module | None = None,
         batch: int = 8, length: int = 256) -> Speed:  # fmt: skip
    """Seconds of a token in one layer, and products per second.

    Args:
        shape: The model's sizes.
        dtype: Precision of its weights.
        device: Where they are.
        model: The model itself, where it is in memory: a small one spends more on starting operations than on products.
        batch: Sequences of the timed forward, at most.
        length: Tokens of each.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _pace(shape, dtype, device, model, batch, length)


def shape_in_memory(model: nn.Module) -> Shape:
    """Sizes of a loaded model.

    Raises:
        UnknownStructure: It takes no tokens, has no single list of layers, or one without matrices.
    """
    check_reads_text(model)
    if hasattr(model.config, "quantization_config"):  # its matrices may be packed in ways of other libraries
        return _unpacked(model)
    stack = layers(model)
    middle = stack[len(stack) // 2][0]
    inside = tuple(m for b in partition(model, "layer") if b.name == middle for m in b.modules)
    if not inside:
        raise UnknownStructure(f"{type(model).__name__} has layers without matrices.", "", "Report the model.")
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    within = sum(p.numel() * p.element_size() for _, layer in stack for p in layer.parameters())
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0
    return Shape(
        matrices=inside, layers=len(stack), weights=held, outside=held - within, hidden=int(hidden),
        vocabulary=int(getattr(text, "vocab_size", 0)), width=max(1, next(model.parameters()).element_size()),
    )  # fmt: skip


def _unpacked(model: nn.Module) -> Shape:
    """Sizes of a model in a few bits: those of the plain one, in the bytes that it holds."""
    config: Any = copy.deepcopy(model.config)
    del config.quantization_config
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return dataclasses.replace(shape_of(config, torch.float32), weights=held)


def _pace(
    shape: Shape, dtype: torch.dtype, device: torch.device, model: nn.Module | None, batch: int, length: int
) -> Speed:  # fmt: skip
    every = 2.0 * length * (shape.layers * sum(m.numel for m in shape.matrices) + shape.hidden * shape.vocabulary)
    rows = min(batch, int(MOST / max(every, 1.0)))
    if model is not None and rows:
        single, double = (_products(kind, device) for kind in (torch.float32, torch.float64))
        return Speed(token=_forward(model, shape, rows, length), single=single, double=double)
    single, double = _large_products(device)
    return Speed(token=_layer(shape.matrices, dtype, device), single=single, double=double)


def _forward(model: nn.Module, shape: Shape, rows: int, length: int) -> float:
    """From the faster of two forwards, the head counted in proportion."""
    first = next(model.parameters())
    ids = torch.randint(0, max(1, min(shape.vocabulary, 100)), (rows, length), device=first.device)
    seconds = []
    with inference(model):
        for some in (ids[:1], ids):
            start = time.perf_counter()
            found = model(input_ids=some)
            found[0].reshape(-1)[0].item()  # waits for an accelerator
            seconds.append((time.perf_counter() - start) / some.numel())
    layer = sum(m.d_in * m.d_out for m in shape.matrices)
    return min(seconds) / (shape.layers + shape.hidden * shape.vocabulary / layer)


@functools.lru_cache(maxsize=8)
def _products(dtype: torch.dtype, device: torch.device) -> float:
    """Products per second of matrices as small as a small model's."""
    square, best = torch.rand(256, 256, dtype=dtype, device=device), float("inf")
    for _ in range(4):
        start = time.perf_counter()
        (square @ square)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2.0 * 256**3 / best


@functools.lru_cache(maxsize=8)
def _large_products(device: torch.device) -> tuple[float, float]:
    bare = Shape(matrices=(), layers=0, weights=0, outside=0, hidden=0, vocabulary=0, width=4)
    found = time_layer(bare, torch.float32, device)
    return found.single, found.double


@functools.lru_cache(maxsize=64)
def _layer(matrices: tuple[Module, ...], dtype: torch.dtype, device: torch.device) -> float:
    """Time all matrices of a layer, or on a CPU the smallest large one for all: those of a large model would take minutes."""
    large = sorted((m for m in matrices if m.d_in * m.d_out >= LARGE), key=lambda m: m.d_in * m.d_out)
    chosen = (large[0],) if device.type == "cpu" and large else matrices
    bare = Shape(matrices=chosen, layers=1, weights=0, outside=0, hidden=0, vocabulary=0, width=dtype.itemsize)
    share = sum(m.d_in * m.d_out for m in matrices) / sum(m.d_in * m.d_out for m in chosen)
    return time_layer(bare, dtype, device).token * share
