"""What experts become, in plain code that shares nothing with layerbudget: masks, cuts for llama.cpp, packed integers."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

NEAR = 1e-5  # relative distance from its row's threshold within which an entry is a tie
STACK = re.compile(r"\.(gate_up_proj|up_proj|down_proj)$")
TURNED = ("gpt_oss", "llama4", "llama4_text", "aria_text")  # experts are (inputs, outputs)
BY_TURNS = ("gpt_oss",)  # rows of gate and up by turns


def stacks(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters that hold experts of a layer, by full name."""
    return {n: p for n, p in model.named_parameters() if p.ndim == 3 and "conv" not in n}


class Products(TorchFunctionMode):
    """Sees every product with a weight of a model, wherever its code multiplies.

    Attributes:
        squares: By weight and expert (0 for a plain matrix): sums of squared inputs, float64.
        turned: Weights whose inputs are not their last axis.
        removed: By full name of a router's weight: experts whose scores it makes minus infinity.
    """

    def __init__(self, model: torch.nn.Module, removed: Mapping[str, Sequence[int]] | None = None) -> None:
        super().__init__()
        weights = [(p.data_ptr(), n, p) for n, p in model.named_parameters() if p.ndim in (2, 3)]
        self.weights = sorted(weights, key=lambda w: w[0])
        self.starts = [start for start, _, _ in self.weights]
        self.squares, self.turned, self.removed = dict[tuple[str, int], torch.Tensor](), set[str](), dict(removed or {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a function of torch, and call it."""
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("linear", "matmul", "__matmul__", "bmm", "mm") and len(args) > 1:
            found = self._which(args[1])
            if found is not None:
                self._add(args[0], args[1], *found, name == "linear")
                if found[0] in self.removed:
                    out = out.clone()
                    out[..., list(self.removed[found[0]])] = -torch.inf
        return out

    def _which(self, weight: torch.Tensor) -> tuple[str, torch.Tensor, int] | None:
        """The parameter that a tensor is a view of, and where in it."""
        place = bisect.bisect_right(self.starts, weight.data_ptr()) - 1
        if place < 0:
            return None
        start, name, parameter = self.weights[place]
        offset = (weight.data_ptr() - start) // parameter.element_size()
        return (name, parameter, offset) if offset < parameter.numel() else None

    def _add(self, x: torch.Tensor, weight: torch.Tensor, name: str, whole: torch.Tensor, offset: int, linear: bool) -> None:
        if weight.stride(-1 if linear else -2) != 1:
            self.turned.add(name)
        each = x if weight.ndim == 3 else x.reshape(1, -1, x.shape[-1])
        first = offset // whole[0].numel() if whole.ndim == 3 else 0
        for i, tokens in enumerate(each):
            found = tokens.detach().double().square().sum(0)
            key = (name, first + i)
            self.squares[key] = self.squares.get(key, 0) + found if found.any() else self.squares.get(key, found)


# --- masks --------------------------------------------------------------------------------------------------------------------


def matrices(weight: torch.Tensor, turned: bool) -> list[torch.Tensor]:
    """Views ``(outputs, inputs)`` of a weight, one for each expert."""
    each = list(weight.data) if weight.ndim == 3 else [weight.data]
    return [m.T for m in each] if turned else each


@torch.no_grad()
def prune_by_hand(model: Any, tokens: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Wanda at one half, in place; returns by name which entries are as near to their threshold as rounding errors."""
    ties, parameters = dict[str, torch.Tensor](), dict(model.named_parameters())
    layers = {n: int(re.findall(r"layers\.(\d+)\.", n)[0]) for n in names}
    for layer in sorted(set(layers.values())):
        with Products(model) as seen:
            for part in tokens.split(4):
                model(input_ids=part)
        for name in (n for n in names if layers[n] == layer):
            weight, near = parameters[name], torch.zeros_like(parameters[name], dtype=torch.bool)
            turned = name in seen.turned
            for e, (w, close) in enumerate(zip(matrices(weight, turned), matrices(near, turned), strict=True)):
                squares = seen.squares.get((name, e), torch.zeros(1))
                metric = w.abs().double() * (squares.sqrt() if squares.any() else 1)  # no token: by magnitude
                order = metric.sort(dim=1, stable=True)
                half = w.shape[1] // 2
                low, high = order.values[:, half - 1 : half], order.values[:, half : half + 1]
                close.copy_(((metric == low) | (metric == high)) & (high - low < NEAR * high))
                w.scatter_(1, order.indices[:, :half], 0)
            ties[name] = near
    return ties


# --- llama.cpp ----------------------------------------------------------------------------------------------------------------


def cut_by_hand(kind: str, model: Any) -> dict[str, tuple[str, np.ndarray]]:
    """Experts as llama.cpp has them, ``(experts, outputs, inputs)`` by its name, with the name in transformers.

    ``kind`` is the family's name in transformers.
    """
    found = {}
    for name, parameter in stacks(model).items():
        layer, leaf = re.findall(r"layers\.(\d+)\.", name)[0], STACK.search(name)[1]
        each = parameter.detach().transpose(1, 2) if kind in TURNED else parameter.detach()
        half = each.shape[1] // 2
        gate, up = (each[:, ::2], each[:, 1::2]) if kind in BY_TURNS else (each[:, :half], each[:, half:])
        parts = {"gate_up_proj": {"gate": gate, "up": up}, "up_proj": {"up": each}, "down_proj": {"down": each}}[leaf]
        for part, tensor in parts.items():
            found[f"blk.{layer}.ffn_{part}_exps.weight"] = (name, tensor.contiguous().numpy())
    return found


# --- compressed-tensors -------------------------------------------------------------------------------------------------------


def words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers from words of 32 bits, the lowest bits first, along the last axis."""
    numbers = packed.long()[..., None] >> (bits * torch.arange(32 // bits))
    return ((numbers & (2**bits - 1)) - 2 ** (bits - 1)).flatten(-2)


def unpacked(tensors: Mapping[str, torch.Tensor], name: str, scheme: Mapping[str, Any]) -> torch.Tensor:
    """A packed matrix by plain arithmetic."""
    numbers, scale = words(tensors[f"{name}.weight_packed"], scheme["num_bits"]), tensors[f"{name}.weight_scale"].float()
    group = scheme["group_size"]
    if not scheme["symmetric"]:
        zero = words(tensors[f"{name}.weight_zero_point"].T.contiguous(), scheme["num_bits"]).T
        numbers = numbers - zero.repeat_interleave(group, 1)
    return numbers.float() * scale.repeat_interleave(group, 1)


def rounded(weight: torch.Tensor, scheme: Mapping[str, Any]) -> torch.Tensor:
    """A matrix rounded to the nearest integers of its groups, by the formula of compressed-tensors."""
    groups = weight.float().reshape(len(weight), -1, scheme["group_size"])
    least, most = -(2 ** (scheme["num_bits"] - 1)), 2 ** (scheme["num_bits"] - 1) - 1
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    if scheme["symmetric"]:
        scale, zero = torch.maximum(-low, high) / ((most - least) / 2), torch.zeros_like(low)
    else:
        scale = (high - low) / (most - least)
        zero = (least - low / scale).round().clamp(least, most)
    scale = scale.bfloat16().float()
    return (((groups / scale).round() + zero).clamp(least, most).sub(zero) * scale).reshape(weight.shape)


def scheme_of(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What ``config.json`` says of a matrix; None where it is left alone."""
    groups = [
        g["weights"] for g in config["config_groups"].values()
        for t in g["targets"] if (re.match(t[3:], name) if t.startswith("re:") else t == name)
    ]  # fmt: skip
    return groups[0] if groups else None
