"""The heads, MLP units and other matrices of a model's layers, and taking units out of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InvalidInput, UnknownStructure
from ...models.blocks import layers, partition
from ...records import Block
from .attention import Attention, describable, find_attention
from .heads import cut_heads, unit_of
from .mlp import Mlp, find_mlp, undescribed
from .parts import KINDS, Part
from .width import Remake, cut_units, refitted


def find_parts(
    model: nn.Module, *, kinds: Sequence[str] = KINDS, by: str = "auto", multiple: int = 8, even: bool = False
) -> list[Part]:  # fmt: skip
    """The attention, MLP and other matrices of every layer, with the units that they can lose.

    Args:
        model: Any transformers model with one list of layers.
        kinds: Kinds that must be there.
        by: ``groups`` (key-value heads with their query heads), ``queries`` (one query head of every group) or ``auto``.
        multiple: Channels of one MLP unit; a remainder always stays.
        even: Whether a plain config must describe what is left: what a refusal advises then does too.

    Returns:
        Parts in the order of the layers; matrices that cannot lose units are in ``<layer>.rest``.

    Raises:
        UnknownStructure: A layer lacks one of ``kinds`` in a layout that is known.
        InvalidInput: A multiple below 1, or an unknown unit.
    """
    if not isinstance(multiple, int) or multiple < 1:
        raise InvalidInput(f"multiple is {multiple}.", "It must be a whole number of at least 1.", "Use 8.")
    blocks = {b.name: b for b in partition(model)}
    parts = []
    for name, layer in layers(model):
        left = {m.name: m for m in blocks[name].modules}
        for kind, find in (("heads", find_attention), ("mlp", find_mlp)):
            try:
                where = find(layer, name)
            except UnknownStructure as error:
                if kind in kinds:
                    raise UnknownStructure(error.what, error.feasible, _instead(model, kind, even)) from error
                continue
            mine = [left.pop(n) for n in (*where.producers, where.consumer)]
            shape = (
                _heads(where, mine[0].d_in, mine[-1].d_out, by) if isinstance(where, Attention) else _mlp(where, mine, multiple)
            )
            parts.append(_part(f"{name}.{kind}", name, kind, Block(name=name, modules=tuple(mine)), **shape))
        if left:
            parts.append(_part(f"{name}.rest", name, "rest", Block(name=name, modules=tuple(left.values()))))
    return parts


def _instead(model: nn.Module, kind: str, even: bool) -> str:
    """What can be done where one kind of part has no known layout: the other kind, where every layer has it."""
    weights = "Prune its weights instead: layerbudget measure, then prune."
    other, find = ("mlp", find_mlp) if kind == "heads" else ("heads", find_attention)
    try:
        found = [find(layer, name) for name, layer in layers(model)]
    except UnknownStructure:
        return weights
    sizes = {(a.heads, a.groups) if isinstance(a, Attention) else a.width for a in found}
    if even and (len(sizes) > 1 or not _describable(model, found[0])):
        return weights
    return f"Plan with --kinds {other}."


def _describable(model: nn.Module, where: Attention | Mlp) -> bool:
    """Whether a plain config can describe less of it in all layers."""
    if isinstance(where, Attention):
        return bool(describable(model, where, unit_of(where, "auto"))[0])
    return undescribed(model, where.width, where.width - 1) is None


def _part(name: str, layer: str, kind: str, block: Block, **shape: Any) -> Part:
    return Part(
        name=name, layer=layer, kind=kind, parameters=block.numel, flops=block.flops_per_token,
        modules=tuple(m.name for m in block.modules), **shape,
    )  # fmt: skip


def _heads(a: Attention, d_in: int, d_out: int, by: str) -> dict[str, Any]:
    by = unit_of(a, by)
    queries = a.per_group if by == "groups" else a.groups
    keys = 2 * d_in * a.head_dim if by == "groups" else 0
    return {
        "by": by, "units": a.groups if by == "groups" else a.per_group,
        "unit_parameters": (d_in + d_out) * queries * a.head_dim + keys,
        "unit_channels": queries * a.head_dim, "channels": a.heads * a.head_dim,
    }  # fmt: skip


def _mlp(mlp: Mlp, mine: Sequence[Any], multiple: int) -> dict[str, Any]:
    each = sum(m.d_in * mlp.stacked for m in mine[:-1]) + mine[-1].d_out
    return {"by": f"{multiple} channels", "units": mlp.width // multiple, "unit_parameters": each * multiple}


def where_is(layer: nn.Module, part: Part) -> Attention | Mlp:
    """The matrices of a part, as they are now."""
    return find_attention(layer, part.layer) if part.kind == "heads" else find_mlp(layer, part.layer)


def inner_width(where: Attention | Mlp) -> int:
    """Inputs of the matrix that reads the units."""
    return where.heads * where.head_dim if isinstance(where, Attention) else where.width


def cut(
    model: nn.Module, part: Part, where: Attention | Mlp, gram: torch.Tensor, units: int, damping: float,
    remake: Remake = refitted,
) -> None:  # fmt: skip
    """Take units out, in place, given the second moments at the matrix that reads them."""
    if isinstance(where, Attention):
        cut_heads(model, where, gram, units, by=part.by, damping=damping, remake=remake)
    else:
        cut_units(model, where, gram, where.width - units * int(part.by.split()[0]), damping, remake)
