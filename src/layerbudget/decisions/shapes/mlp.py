"""Where a block keeps its MLP: which matrices make the inner units and which one reads them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ...errors import UnknownBlock, UnknownStructure
from ...models.blocks import config_of, is_conv1d, layers, matrix_of, text_config

# names of the producing matrices, of the consuming one, and how many inner vectors the producer stacks (gate and up in one)
_LAYOUTS = (
    (("gate_proj", "up_proj"), "down_proj", 1),
    (("gate_up_proj",), "down_proj", 2),
    (("c_fc",), "c_proj", 1),
    (("fc1",), "fc2", 1),
    (("fc_in",), "fc_out", 1),
    (("dense_h_to_4h",), "dense_4h_to_h", 1),
    (("intermediate.dense",), "output.dense", 1),
)
_WIDTH_FIELDS = ("intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_BY_DEFAULT = ("intermediate_size", "n_inner")  # four times the hidden size where they are None


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
        "Known are gate/up/down, fused gate_up/down, c_fc/c_proj, fc1/fc2, fc_in/fc_out, dense_h_to_4h/dense_4h_to_h, BERT's.",
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
    held = {f: getattr(config, f) for f in _WIDTH_FIELDS if hasattr(config, f)}
    fields: dict[str, Any] = {f: new for f, value in held.items() if value == old or (value is None and f in _BY_DEFAULT)}
    fields |= {f: [new] * len(value) for f, value in held.items() if isinstance(value, list) and set(value) == {old}}
    if not fields:
        raise UnknownStructure(f"{type(config).__name__} has no field for the width of its MLPs.", "", "Remove blocks instead.")
    for field, value in fields.items():
        setattr(config, field, value)


def described(model: nn.Module, change: Callable[[Any], None] = lambda config: None) -> list[nn.Module] | str:
    """The layers of a model that is built, without values, from its configuration after a change: what would be loaded.

    Args:
        model: The model; left as it was.
        change: Changes the part of the configuration that describes the language model.

    Returns:
        The layers; or why the installed transformers builds no such model.
    """
    config = copy.deepcopy(config_of(model))
    try:
        change(text_config(config))
        with torch.device("meta"):
            made: Any = type(model)(type(config).from_dict(config.to_dict()))
        return [layer for _, layer in layers(made)]
    except UnknownStructure as error:
        return error.what.rstrip(".")
    except (StrictDataclassError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[-1].strip()


def first_layer(model: nn.Module, change: Callable[[Any], None]) -> nn.Module | str:
    """The first of :func:`described`, built alone where the configuration allows that: a change for all layers alike."""

    def alone(config: Any) -> None:
        change(config)
        config.num_hidden_layers = 1
        if isinstance(config.__dict__.get("layer_types"), list | tuple):
            config.layer_types = list(config.layer_types[:1])

    found = described(model, alone)
    if isinstance(found, str):  # some configurations list their layers, or refuse the change itself
        found = described(model, change)
    return found if isinstance(found, str) else found[0]


def undescribed(model: nn.Module, old: int, new: int) -> str | None:
    """Why a plain config cannot describe a model whose MLPs all have a width; None where it can.

    Args:
        model: The model.
        old: The width that its config says.
        new: The width.
    """
    made = first_layer(model, lambda config: set_width(config, old, new) if new != old else None)
    if isinstance(made, str):
        return made
    found = find_mlp(made, "layer").width
    return None if found == new else f"{type(config_of(model)).__name__} makes MLPs of width {found}, not {new}"
