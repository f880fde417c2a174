"""Where a block keeps its attention heads: which matrices make them, which one reads them, and how the heads lie in them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from ...errors import UnknownStructure
from ...models.blocks import config_of, is_conv1d, matrix_of
from .mlp import first_layer, inputs_of, put_weight, take_outputs

# names of the producing matrices and of the consuming one, and how the heads lie in the producers' outputs: one matrix each
# (separate), all q then all k then all v (stacked), or q, k, v of head 0, then of head 1, ... (interleaved)
_LAYOUTS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj", "separate"),
    (("q_proj", "k_proj", "v_proj"), "out_proj", "separate"),
    (("q_proj", "k_proj", "v_proj"), "dense", "separate"),
    (("self.query", "self.key", "self.value"), "output.dense", "separate"),
    (("c_attn",), "c_proj", "stacked"),
    (("qkv_proj",), "o_proj", "stacked"),
    (("query_key_value",), "dense", "interleaved"),
)
_SIZES = ("head_dim", "attention_head_size", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_CONFIG_HEADS = ("num_attention_heads", "n_head")
_KNOWN = (
    "Known are q/k/v with o_proj, out_proj or dense, BERT's, GPT-2's c_attn, Phi-3's qkv_proj and GPT-NeoX's query_key_value."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The heads of one layer.

    Attributes:
        owner: Full name of the module that splits vectors into heads.
        producers: Full names of the matrices that make queries, keys and values.
        consumer: Full name of the matrix that reads the heads.
        layout: ``separate``, ``stacked`` or ``interleaved``.
        heads: Query heads.
        groups: Key-value heads; query head h reads key-value head ``h // (heads // groups)``.
        head_dim: Channels of one head.
    """

    owner: str
    producers: tuple[str, ...]
    consumer: str
    layout: str
    heads: int
    groups: int
    head_dim: int

    @property
    def per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.groups

    def without(self, units: int, by: str) -> Attention:
        """What is left without so many units, ``groups`` or ``queries``."""
        if by == "groups":
            return dataclasses.replace(self, heads=self.heads - units * self.per_group, groups=self.groups - units)
        return dataclasses.replace(self, heads=self.heads - units * self.groups)


def find_attention(layer: nn.Module, name: str) -> Attention:
    """Find the attention of one layer.

    Raises:
        UnknownStructure: A layout that is not known, or heads that cannot be taken out one by one.
    """
    for path, parent in layer.named_modules():
        for producers, consumer, layout in _LAYOUTS:
            found = [_get(parent, n) for n in (*producers, consumer)]
            if not all(isinstance(m, nn.Linear) or (m is not None and is_conv1d(m)) for m in found):
                continue
            inner = producers[0].rpartition(".")[0]
            full = ".".join(p for p in (name, path) if p)
            owner = parent.get_submodule(inner) if inner else parent
            sizes = [v for v in (getattr(owner, s, None) for s in _SIZES) if isinstance(v, int)]
            outputs = [m.weight.numel() // inputs_of(m) for m in found[:-1]]
            heads, groups = _count(outputs, inputs_of(found[-1]), sizes[0], layout) if sizes else (0, 0)
            attention = Attention(
                owner=f"{full}.{inner}" if inner else full,
                producers=tuple(f"{full}.{p}" for p in producers),
                consumer=f"{full}.{consumer}",
                layout=layout, heads=heads, groups=groups, head_dim=sizes[0] if sizes else 0,
            )  # fmt: skip
            _check(attention, owner, inputs_of(found[-1]))
            return attention
    raise UnknownStructure(
        f"{name} ({type(layer).__name__}) has no attention of a known layout.", _KNOWN, "Remove MLP units or blocks instead."
    )


def _get(parent: nn.Module, name: str) -> Any:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        return None


def _count(outputs: list[int], inputs: int, head_dim: int, layout: str) -> tuple[int, int]:
    """Query heads and key-value heads."""
    if layout == "separate":
        return outputs[0] // head_dim, outputs[1] // head_dim
    if layout == "stacked":
        return inputs // head_dim, (outputs[0] - inputs) // (2 * head_dim)
    return (outputs[0] // (3 * head_dim),) * 2


def _check(attention: Attention, owner: nn.Module, inputs: int) -> None:
    """Refuse what would compute something else with fewer heads."""
    a, why = attention, ""
    norms = {n: getattr(m, "weight", None) for n, m in owner.named_children() if "norm" in n}
    across = [n for n, weight in norms.items() if weight is not None and weight.numel() != a.head_dim]
    if not a.head_dim or a.heads * a.head_dim != inputs or a.groups < 1 or a.heads % a.groups:
        why = f"reads {inputs} channels, which are not {a.heads} query heads of {a.head_dim} in {a.groups} groups"
    elif across:
        why = f"normalises over all heads at once ({across[0]}), so that removing one changes the others"
    elif any(True for _ in owner.parameters(recurse=False)):
        why = f"has parameters of its own ({next(owner.named_parameters(recurse=False))[0]}) that may belong to single heads"
    elif a.layout == "interleaved" and not type(owner).__name__.startswith("GPTNeoX"):
        why = "interleaves queries, keys and values in a way that is known for GPT-NeoX only"
    if why:
        raise UnknownStructure(f"{a.owner} ({type(owner).__name__}) {why}.", _KNOWN, "Remove MLP units or blocks instead.")


def keep_heads(model: nn.Module, attention: Attention, keep: torch.Tensor, weight: torch.Tensor | None = None) -> Attention:
    """Shrink an attention to some of its query heads; a key-value head goes with the last query head that reads it.

    Args:
        model: The model, changed in place.
        attention: Which.
        keep: Indices of the query heads that stay, increasing; every key-value head that stays keeps equally many.
        weight: New ``(d_out, kept * head_dim)`` weight of the consumer; its own columns by default.

    Returns:
        The attention as it is now.

    Raises:
        UnknownStructure: Groups of different sizes would be left, or no head at all.
    """
    a = attention
    sizes = torch.bincount(keep // a.per_group, minlength=a.groups)
    groups = torch.nonzero(sizes).flatten()
    if not len(keep) or len(set(sizes[groups].tolist())) > 1:
        raise UnknownStructure(
            f"{a.owner}: {len(keep)} of {a.heads} query heads would leave groups of {sizes.tolist()} per key-value head.",
            "Grouped-query attention needs the same number of query heads in every group, and at least one head.",
            "Remove whole groups, or as many query heads from every group.",
        )
    if weight is None:
        weight = matrix_of(model.get_submodule(a.consumer))[:, channels(keep, a.head_dim)]
    width = a.heads * a.head_dim
    if a.layout == "separate":
        rows = [channels(keep, a.head_dim), *(channels(groups, a.head_dim),) * 2]
    elif a.layout == "stacked":
        keys = channels(groups, a.head_dim) + width
        rows = [torch.cat([channels(keep, a.head_dim), keys, keys + a.groups * a.head_dim])]
    else:
        rows = [channels(keep, 3 * a.head_dim)]
    for name, chosen in zip(a.producers, rows, strict=True):
        module = model.get_submodule(name)
        take_outputs(module, chosen.to(matrix_of(module).device))
    put_weight(model.get_submodule(a.consumer), weight)
    new = dataclasses.replace(a, heads=len(keep), groups=len(groups))
    _set_owner(model.get_submodule(a.owner), a, new)
    return new


def channels(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Channels of some heads, in order."""
    return (heads[:, None] * head_dim + torch.arange(head_dim, device=heads.device)).flatten()


def _set_owner(owner: nn.Module, old: Attention, new: Attention) -> None:
    values = {n: (old.heads, new.heads) for n in _HEADS}
    values |= {"num_key_value_heads": (old.groups, new.groups), "num_key_value_groups": (old.per_group, new.per_group)}
    values |= {n: (old.heads * old.head_dim, new.heads * new.head_dim) for n in ("all_head_size", "split_size")}
    for name, (before, after) in values.items():
        if isinstance(getattr(owner, name, None), int) and getattr(owner, name) == before:
            setattr(owner, name, after)
    if old.layout == "stacked" and hasattr(getattr(owner, "config", None), "num_key_value_heads"):
        config = copy.copy(config_of(owner))  # Phi-3 reads the counts of its layer from the config of all layers
        config.num_attention_heads, config.num_key_value_heads = new.heads, new.groups
        owner.config = config


def set_heads(config: Any, attention: Attention) -> None:
    """Write head counts into a config, with the head size made explicit."""
    for field in _CONFIG_HEADS:
        if isinstance(config.__dict__.get(field), int):
            setattr(config, field, attention.heads)
    if isinstance(getattr(config, "num_key_value_heads", None), int):
        config.num_key_value_heads = attention.groups
    if not isinstance(getattr(type(config), "head_dim", None), property):  # Falcon derives it
        config.head_dim = attention.head_dim


def expressible(model: nn.Module, attention: Attention) -> str | None:
    """Why a plain config cannot describe a model whose layers all have these heads; None where it can.

    A model is built from the changed config without values and its heads are looked at, so that the answer is that of the
    installed transformers.
    """
    name = type(config_of(model)).__name__
    made = first_layer(model, lambda config: set_heads(config, attention))
    try:
        reason = made if isinstance(made, str) else ""
        found = attention if isinstance(made, str) else find_attention(made, "layer")
    except UnknownStructure as error:
        reason = error.what.rstrip(".")
    if reason:
        return f"{name} refuses {attention.heads} heads of {attention.head_dim} channels ({reason})"
    now, wanted = ((a.heads, a.groups, a.head_dim) for a in (found, attention))
    if now != wanted:
        return (
            f"{name} derives the size of a head from hidden_size / num_attention_heads: {wanted[0]} heads of "
            f"{wanted[2]} channels cannot be written"
        )
    return None


def describable(model: nn.Module, attention: Attention, by: str) -> tuple[set[int], str]:
    """Numbers of units of heads whose removal a plain config can describe, and why it cannot where there are none.

    Args:
        model: The model.
        attention: The heads of its layers.
        by: ``groups`` or ``queries``.
    """
    fits, why = set[int](), ""
    for units in range(1, attention.groups if by == "groups" else attention.per_group):
        reason = expressible(model, attention.without(units, by))
        why = why or reason or ""
        if reason is None:
            fits.add(units)
    return fits, why or "there is one unit only"
