"""The sizes of a model from its configuration, and how fast one layer of them runs here: no weights are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UnknownStructure
from ..models.blocks import layers, partition
from ..records import Module

_TOKENS = 256  # of the timed layer
_BACK = 1.6  # a backward to the inputs over a forward, where it was not timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model by its sizes; bytes in the checkpoint's precision.

    Attributes:
        matrices: Of one layer.
        layers: How many.
        weights, outside: Bytes of all weights, and of those outside the layers.
        hidden: Width of the residual stream.
        vocabulary: Rows of the head.
        width: Bytes of a number.
    """

    matrices: tuple[Module, ...]
    layers: int
    weights: int
    outside: int
    hidden: int
    vocabulary: int
    width: int

    @property
    def layer(self) -> int:
        """Bytes of one layer."""
        return sum(m.d_in * m.d_out * m.copies for m in self.matrices) * self.width

    @property
    def inputs(self) -> int:
        """Widths of the distinct inputs of a layer, added up (q, k, v share theirs, gate and up too)."""
        return sum({self.group(m): m.d_in for m in self.matrices}.values())

    @staticmethod
    def group(m: Module) -> str:
        """What names the input of a matrix."""
        own = m.name.rsplit(".", 1)[-1]
        return {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(own, own)


def shape_of(config: Any, dtype: torch.dtype) -> Shape:
    """Sizes of a configuration's model.

    Raises:
        UnknownStructure: It has no single list of layers.
    """
    from ..models.loading import auto_class

    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    stack = layers(model)
    inside = [m for b in partition(model, "layer") if b.name == stack[len(stack) // 2][0] for m in b.modules]
    if not inside:
        raise UnknownStructure(f"{type(model).__name__} has layers without matrices.", "", "Report the model.")
    total = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    in_layers = sum(p.numel() for _, layer in stack for p in layer.parameters()) * dtype.itemsize
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0)
    return Shape(
        matrices=tuple(inside), layers=len(stack), weights=total, outside=total - in_layers,
        hidden=int(hidden), vocabulary=int(getattr(text, "vocab_size", 0)),
        width=dtype.itemsize,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of one token's forward through one layer, and products per second in float32 and float64.

    ``back``: of its backward to the layer's input; ``product``: of its matrix products alone. Where they were not timed they
    follow from the forward.
    """

    token: float
    single: float
    double: float
    back: float | None = None
    product: float | None = None

    @property
    def backward(self) -> float:
        """Seconds of one token's backward through one layer, to its input."""
        return _BACK * self.token if self.back is None else self.back

    @property
    def products(self) -> float:
        """Seconds of one token's matrix products in one layer."""
        return self.token if self.product is None else self.product


def time_layer(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Speed:
    """Time one layer on some tokens, forwards and backwards, and plain products; the best of four each."""
    sizes = [(m.d_out, m.d_in) for m in shape.matrices]
    pairs = [(torch.randn(_TOKENS, i, device=device).to(dtype), torch.randn(o, i, device=device).to(dtype)) for o, i in sizes]
    product = _best(lambda: [x @ w.T for x, w in pairs], device) / _TOKENS
    token, back = product, None
    if shape.hidden:
        token, back = (seconds / _TOKENS for seconds in _layer(shape, pairs, dtype, device))
    wide = torch.randn(1024, 2048, device=device)
    single = 2.0 * 1024 * 1024 * 2048 / _best(lambda: wide @ wide.T, device)
    square = torch.randn(768, 768, device=device, dtype=torch.float64)
    double = 2.0 * 768**3 / _best(lambda: square @ square, device)
    return Speed(token=token, single=single, double=double, back=back, product=product)


def _layer(shape: Shape, pairs: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> tuple[float, float]:
    """Seconds of a forward with a graph, and of its backward: every distinct input normed, every wide output gated."""
    heads = max(1, shape.hidden // 64)
    hidden = torch.randn(1, heads, _TOKENS, max(1, shape.hidden // heads), device=device).to(dtype).requires_grad_(True)
    inputs = [x.detach().clone().requires_grad_(True) for x, _ in pairs]
    normed = {shape.group(m): i for i, m in enumerate(shape.matrices)}

    def forward() -> list[torch.Tensor]:
        """All outputs of one layer."""
        found = [torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)]
        for i, (m, (_, w)) in enumerate(zip(shape.matrices, pairs, strict=True)):
            x = inputs[i]
            if normed[shape.group(m)] == i:
                wide = x.float()
                x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * x
            y = torch.nn.functional.linear(x, w)
            found.append(torch.nn.functional.silu(y) * y if m.d_out > shape.hidden else y + y)
        return found

    there = _best(forward, device)
    both = _best(lambda: torch.autograd.backward([y.sum() for y in forward()]), device)
    return there, max(both - there, 0.5 * there)


def _best(run: Any, device: torch.device | str) -> float:
    best = float("inf")
    for _ in range(4):
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
