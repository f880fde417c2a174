"""Which matrices no file of a family holds here, known before anything is measured.

compressed-tensors packs plain Linear layers; transformers loads these but where a model reads the weight itself while it is set
up, which a packed layer does not have. GGUF is written for the architectures that are listed here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compressors.formats import GGUF, find_format
from ...compressors.rounding_packages import need_gguf
from ...errors import InvalidInput
from ...models.blocks import config_of, pretrained, weight_of
from ...records import Block
from .runtimes import Runtime

# transformers' model types, and the architecture of llama.cpp that computes the same.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
PERMUTED = ("llama",)  # rotary embeddings of neighbours: rows of q and k change places


UNWRITTEN = ("refuse", "16-bit", "plan")  # what becomes of matrices that `quantize` cannot write


def unwritten(model: nn.Module, names: Iterable[str], target: Runtime) -> dict[str, str]:
    """Matrices that `quantize` cannot write in a format of this runtime.

    Args:
        model: The model.
        names: Full names of matrices.
        target: The runtime.

    Returns:
        The reason by full name; empty where all can be written.

    Raises:
        MissingDependency: GGUF without the package gguf.
    """
    names = list(names)
    if target.family == GGUF:
        try:
            tensor_names(need_gguf(), architecture(config_of(model)), config_of(model).num_hidden_layers, _parameters(model))
        except InvalidInput as error:
            return dict.fromkeys(names, error.what.rstrip("."))
        return {}
    found = {}
    for name in names:
        owner = weight_of(model, name)[0]
        if not isinstance(owner, nn.Linear):
            found[name] = f"it is {'a Conv1D' if type(owner).__name__ == 'Conv1D' else 'a stack of experts'}, no plain Linear"
        elif not _plain(owner):
            found[name] = f"it is a {type(owner).__name__}, which gives something else than a plain Linear"
    if target.name == "transformers":
        plain = [n for n in names if n not in found]
        found |= dict.fromkeys(
            _read_at_start(model, plain), "transformers reads its weight while it loads, and packed it has none"
        )
    return {n: found[n] for n in names if n in found}


def apart(
    model: nn.Module, blocks: Sequence[Block], target: Runtime, what: str = "refuse"
) -> tuple[tuple[Block, ...], tuple[Block, ...], dict[str, str]]:
    """What a plan of formats decides about, and what stays in 16 bits because no file holds it in fewer.

    Args:
        model: The model.
        blocks: Blocks of a plan of formats.
        target: The runtime.
        what: Becomes of matrices that cannot be written: ``refuse``, ``16-bit`` (they stay so, and count), or ``plan`` (they
            are planned like all others, for a tool that writes them).

    Returns:
        Blocks that are decided about; one block per matrix that stays; the reason by name of these.

    Raises:
        InvalidInput: Matrices that cannot be written, and that was to be refused, or there is nothing else.
    """
    if what not in UNWRITTEN:
        raise InvalidInput(f"unwritten is {what!r}.", f"It is one of {', '.join(UNWRITTEN)}.", "Use 16-bit.")
    matrices = [m for b in blocks for m in b.modules]
    reasons = {} if what == "plan" else unwritten(model, [m.name for m in matrices], target)
    kept = tuple(Block(name=m.name, modules=(m,)) for m in matrices if m.name in reasons)
    held = [(b, tuple(m for m in b.modules if m.name not in reasons)) for b in blocks]
    free = tuple(dataclasses.replace(b, modules=left) for b, left in held if left)
    if not kept or free and what == "16-bit":
        return free, kept, reasons
    share = sum(b.numel for b in kept) / sum(m.numel for m in matrices)
    tool = "tensor-types" if target.family == GGUF else "auto-round"
    other = f"plan for a tool that writes them (--unwritten plan, then export --to {tool})"
    raise InvalidInput(
        f"quantize cannot write {len(kept)} of {len(matrices)} matrices ({share:.0%} of the weights), first {kept[0].name}: "
        f"{reasons[kept[0].name]}.",
        f"In 16 bits they take {16 * share:.2f} bits per weight of all that is planned." if free else "None is left to plan.",
        f"Keep them so (--unwritten 16-bit), or {other}." if free else f"{other[0].upper()}{other[1:]}.",
    )


def check_written(model: nn.Module, formats: Mapping[str, str], target: Runtime) -> None:
    """Refuse a plan that gives formats to matrices which no file holds in them.

    Args:
        model: The model.
        formats: Format by matrix.
        target: The runtime of the plan.

    Raises:
        InvalidInput: There are some; such plans are for other tools.
    """
    small = [n for n, form in formats.items() if not find_format(form).plain]
    reasons = unwritten(model, small, target)
    if not reasons:
        return
    first = next(iter(reasons))
    tool = "tensor-types" if target.family == GGUF else "auto-round"
    plan = f"the plan for a tool that writes them (layerbudget export PLAN --to {tool})"
    raise InvalidInput(
        f"quantize cannot write {len(reasons)} of {len(small)} matrices in the formats of this plan, first {first}: "
        f"{reasons[first]}.",
        "Nothing was done.",
        f"Plan again with --unwritten 16-bit, or export {plan}." if len(reasons) < len(small) else f"Export {plan}.",
    )


def _parameters(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters()]


@torch.no_grad()
def _plain(layer: nn.Linear) -> bool:
    """Whether a layer gives what a Linear of its weight gives: packed, it is computed as one (Llama 4's router is more)."""
    if type(layer).forward is nn.Linear.forward:
        return True
    x = torch.ones(1, layer.in_features).to(layer.weight)
    found = type(layer).forward(layer, x)
    if not isinstance(found, torch.Tensor):
        return False
    return found.is_meta or torch.allclose(found, nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-2, atol=1e-2)


def _read_at_start(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Linear layers whose weight the model's own initialisation reads: it runs at every load, also over packed layers.

    Tried on the model without values: the weight is taken away from one layer of each kind, and what is above it initialised.
    """
    if not hasattr(model, "_init_weights"):
        return []
    with torch.device("meta"):
        skeleton: Any = pretrained(type(model)(copy.deepcopy(config_of(model))))
    known: dict[tuple[str, str], bool] = {}
    found = []
    for name in names:
        parent, _, leaf = name.rpartition(".")
        kind = (type(skeleton.get_submodule(parent)).__name__, leaf)
        if kind not in known:
            known[kind] = _needed(skeleton, name)
        if known[kind]:
            found.append(name)
    return found


def _needed(skeleton: Any, name: str) -> bool:
    layer = skeleton.get_submodule(name)
    weight = layer._parameters.pop("weight")
    try:
        parts = name.split(".")
        model = skeleton
        with torch.no_grad():
            for depth in range(len(parts) + 1):
                module = skeleton.get_submodule(".".join(parts[:depth]))
                model = module if hasattr(module, "_init_weights") else model  # a model inside initialises its own modules
                model._init_weights(module)
    except AttributeError as error:
        if "'weight'" not in str(error):
            raise
        return True
    finally:
        layer._parameters["weight"] = weight
    return False


def architecture(config: Any) -> str:
    """llama.cpp's name of a model's architecture.

    Raises:
        InvalidInput: One that is not written here, or a variant that llama.cpp computes differently.
    """
    kind = str(config.model_type)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    odd = [
        f"{name} = {value}"
        for name, value in (
            ("rope_type", rope.get("rope_type", "default") if rope.get("rope_type", "default") != "default" else None),
            (
                "sliding_window",
                getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None,
            ),
        )
        if value is not None
    ]
    if kind not in ARCHITECTURES or odd:
        raise InvalidInput(
            f"A {kind} model{f' with {odd[0]}' if odd else ''} is not written as GGUF here.",
            f"Written are {', '.join(ARCHITECTURES)}, with plain rotary embeddings and whole attention.",
            "Plan with --unwritten plan and export it (--to tensor-types): llama.cpp converts and quantises by that; or "
            "plan for compressed-tensors.",
        )
    return ARCHITECTURES[kind]


def tensor_names(gguf: Any, arch: str, layers: int, names: list[str]) -> dict[str, str]:
    """Names in the file by full parameter name.

    Raises:
        InvalidInput: A parameter that the architecture has no place for.
    """
    kinds = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(kinds[arch], layers)
    found: dict[str, str] = {}
    for name in names:
        stem, _, ending = name.rpartition(".")
        other = known.get_name(stem)
        if other is None:
            raise InvalidInput(f"GGUF's {arch} has no tensor for {name}.", "", "Plan for compressed-tensors.")
        found[name] = f"{other}.{ending}"
    return found
