"""Where a block keeps its MLP: which matrices make the inner units and which one reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import UnknownBlock, UnknownStructure
from ...models.blocks import is_conv1d, matrix_of

# names of the producing matrices, of the consuming one, and how many inner vectors the producer stacks (gate and up in one)
_LAYOUTS = (
    (("gate_proj", "up_proj"), "down_proj", 1),
    (("gate_up_proj",), "down_proj", 2),
    (("c_fc",), "c_proj", 1),
    (("fc1",), "fc2", 1),
    (("dense_h_to_4h",), "dense_4h_to_h", 1),
    (("intermediate.dense",), "output.dense", 1),
)
_WIDTH_FIELDS = ("intermediate_size", "ffn_dim", "n_inner")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    """One MLP.

    Attributes:
        name: Full name of its parent module.
        producers: Full names of the matrices that make the inner units.
        consumer: Full name of the matrix that reads them.
        stacked: 2 when one producer holds gate and up.
        width: Inner units.
    """

    name: str
    producers: tuple[str, ...]
    consumer: str
    stacked: int
    width: int


def inputs_of(linear: nn.Module) -> int:
    """Inputs of a Linear or Conv1D."""
    return int(matrix_of(linear).shape[1])


def check_layers(fraction: object, known: Mapping[str, object]) -> None:
    """Refuse fractions for layers that are not there.

    Raises:
        UnknownBlock: Names the first one.
    """
    unknown = [name for name in fraction if name not in known] if isinstance(fraction, Mapping) else []
    if unknown:
        raise UnknownBlock(f"There is no layer {unknown[0]!r}.", f"Layers are {', '.join(list(known)[:3])}, ...", "Correct it.")


def find_mlp(layer: nn.Module, name: str) -> Mlp:
    """Find the MLP of one layer.

    Raises:
        UnknownStructure: A mixture of experts, or a layout that is not known.
    """
    for path, parent in layer.named_modules():
        for producers, consumer, stacked in _LAYOUTS:
            found = [_get(parent, n) for n in (*producers, consumer)]
            if all(isinstance(m, nn.Linear) or (m is not None and is_conv1d(m)) for m in found) and _fits(path, consumer):
                full = ".".join(p for p in (name, path) if p)
                return Mlp(
                    name=full,
                    producers=tuple(f"{full}.{p}" for p in producers),
                    consumer=f"{full}.{consumer}",
                    stacked=stacked,
                    width=inputs_of(found[-1]),
                )
    raise UnknownStructure(
        f"{name} ({type(layer).__name__}) has no plain MLP.",
        "Known are gate/up/down, fused gate_up/down, c_fc/c_proj, fc1/fc2, dense_h_to_4h/dense_4h_to_h and BERT's.",
        "Mixtures of experts: remove whole blocks (depth) or prune weights instead.",
    )


def _fits(path: str, consumer: str) -> bool:
    return "experts" not in path and not (consumer == "c_proj" and path.endswith("attn"))


def _get(parent: nn.Module, name: str) -> Any:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        return None


def keep_units(model: nn.Module, mlp: Mlp, keep: torch.Tensor, weight: torch.Tensor) -> None:
    """Shrink an MLP to some of its inner units.

    Args:
        model: The model, changed in place.
        mlp: Which.
        keep: Indices of the inner units that stay, increasing.
        weight: New ``(d_out, kept)`` weight of the consumer.
    """
    rows = torch.cat([keep + i * mlp.width for i in range(mlp.stacked)])
    for name in mlp.producers:
        take_outputs(model.get_submodule(name), rows)
    put_weight(model.get_submodule(mlp.consumer), weight)


def take_outputs(module: Any, rows: torch.Tensor) -> None:
    """Keep some outputs of a Linear or Conv1D, in the given order."""
    axis = 1 if is_conv1d(module) else 0
    module.weight = nn.Parameter(module.weight.data.index_select(axis, rows), module.weight.requires_grad)
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.data[rows], module.bias.requires_grad)
    _sizes(module)


def put_weight(module: Any, weight: torch.Tensor) -> None:
    """Give a Linear or Conv1D another ``(d_out, d_in)`` weight; precision and bias stay."""
    value = weight.to(module.weight.dtype)
    module.weight = nn.Parameter((value.T if is_conv1d(module) else value).contiguous(), module.weight.requires_grad)
    _sizes(module)


def _sizes(module: Any) -> None:
    if is_conv1d(module):
        module.nx, module.nf = module.weight.shape
    else:
        module.out_features, module.in_features = module.weight.shape


def set_width(config: Any, old: int, new: int) -> None:
    """Write the width into a config, wherever it holds the old one.

    Raises:
        UnknownStructure: The config has no field for it.
    """
    fields = [f for f in _WIDTH_FIELDS if getattr(config, f, None) == old]
    if hasattr(config, "n_inner") and config.n_inner is None:
        fields.append("n_inner")
    if not fields:
        raise UnknownStructure(f"{type(config).__name__} has no field for the width of its MLPs.", "", "Remove blocks instead.")
    for field in fields:
        setattr(config, field, new)
