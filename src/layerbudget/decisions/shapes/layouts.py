"""Where a layer keeps its attention heads and its MLP, and taking units out of them.

Both are rows of the matrices that make the units and columns of the one that reads them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UnknownStructure
from ...models.blocks import config_of, is_conv1d, matrix_of

# names of the producing matrices and of the consuming one, and how the heads lie in the producers' outputs: one matrix each
# (separate), all q then all k then all v (stacked), or q, k, v of head 0, then of head 1, ... (interleaved)
_ATTENTIONS: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj", "separate"),
    (("q_proj", "k_proj", "v_proj"), "out_proj", "separate"),
    (("q_proj", "k_proj", "v_proj"), "dense", "separate"),
    (("self.query", "self.key", "self.value"), "output.dense", "separate"),
    (("c_attn",), "c_proj", "stacked"),
    (("qkv_proj",), "o_proj", "stacked"),
    (("query_key_value",), "dense", "interleaved"),
)
# the same, and how many inner vectors the producer stacks (gate and up in one)
_MLPS: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    (("gate_proj", "up_proj"), "down_proj", 1),
    (("gate_up_proj",), "down_proj", 2),
    (("c_fc",), "c_proj", 1),
    (("fc1",), "fc2", 1),
    (("fc_in",), "fc_out", 1),
    (("dense_h_to_4h",), "dense_4h_to_h", 1),
    (("intermediate.dense",), "output.dense", 1),
)
_SIZES = ("head_dim", "attention_head_size", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_CONFIG_HEADS = ("num_attention_heads", "n_head")
_WIDTHS = ("intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_WIDTHS_BY_DEFAULT = ("intermediate_size", "n_inner")  # four times the hidden size where they are None
_KNOWN = (
    "Known are q/k/v with o_proj, out_proj or dense, BERT's, GPT-2's c_attn, Phi-3's qkv_proj and GPT-NeoX's query_key_value."
)


def per_unit(by: str) -> int:
    """Channels of one MLP unit, as in ``8 channels``."""
    return int(by.split()[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The heads of one layer, by full names: the ``owner`` splits vectors into heads, the ``consumer`` reads them.

    ``producers`` make queries, keys and values, which lie there ``separate``, ``stacked`` or ``interleaved``. Query head h
    reads key-value head ``h // (heads // groups)``.
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

    @property
    def inputs(self) -> int:
        """Channels that the consumer reads."""
        return self.heads * self.head_dim

    @property
    def words(self) -> str:
        """Its description in a sentence, such as ``8 heads of 64 channels``."""
        return f"{self.heads} heads of {self.head_dim} channels"

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes that a config can have of it."""
        return self.heads, self.groups, self.head_dim

    def units(self, by: str) -> int:
        """Units that there are."""
        return self.groups if by == "groups" else self.per_group

    def without(self, units: int, by: str) -> Attention:
        """The part that is left without so many units, ``groups`` or ``queries``."""
        if by == "groups":
            return dataclasses.replace(self, heads=self.heads - units * self.per_group, groups=self.groups - units)
        return dataclasses.replace(self, heads=self.heads - units * self.groups)

    def columns(self, keep: torch.Tensor) -> torch.Tensor:
        """Channels of some query heads, in order."""
        return channels(keep, self.head_dim)

    def cut(self, model: nn.Module, keep: torch.Tensor, weight: torch.Tensor | None = None) -> Attention:
        """Keep some query heads, in place; a key-value head goes with the last query head that reads it.

        ``keep`` holds their indices, increasing, equally many of every key-value head that stays. ``weight`` is the new
        ``(d_out, kept * head_dim)`` weight of the consumer; by default it keeps its own columns.
        """
        groups = torch.unique(keep // self.per_group)
        queries, keys = self.columns(keep), self.columns(groups)
        rows = {
            "separate": [queries, keys, keys],
            "stacked": [torch.cat([queries, keys + self.inputs, keys + self.inputs + self.groups * self.head_dim])],
            "interleaved": [channels(keep, 3 * self.head_dim)],
        }[self.layout]
        _cut(model, self, rows, queries, weight)
        new = dataclasses.replace(self, heads=len(keep), groups=len(groups))
        self._resize(model.get_submodule(self.owner), new)
        return new

    def _resize(self, owner: Any, new: Attention) -> None:
        values = {n: (self.heads, new.heads) for n in _HEADS}
        values |= {"num_key_value_heads": (self.groups, new.groups), "num_key_value_groups": (self.per_group, new.per_group)}
        values |= {n: (self.inputs, new.inputs) for n in ("all_head_size", "split_size", "embed_dim")}
        for name, (before, after) in values.items():
            if isinstance(getattr(owner, name, None), int) and getattr(owner, name) == before:
                setattr(owner, name, after)
        if self.layout == "stacked" and hasattr(getattr(owner, "config", None), "num_key_value_heads"):
            owner.config = copy.copy(config_of(owner))  # Phi-3 reads the counts of its layer from the config of all layers
            owner.config.num_attention_heads, owner.config.num_key_value_heads = new.heads, new.groups

    def write(self, config: Any, old: Where) -> None:
        """Write the head counts into a config, with the head size made explicit."""
        for field in _CONFIG_HEADS:
            if isinstance(config.__dict__.get(field), int):
                setattr(config, field, self.heads)
        if isinstance(getattr(config, "num_key_value_heads", None), int):
            config.num_key_value_heads = self.groups
        if not isinstance(getattr(type(config), "head_dim", None), property):  # Falcon derives it
            config.head_dim = self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    """The MLP of one layer; names as in :class:`Attention`."""

    owner: str
    producers: tuple[str, ...]
    consumer: str
    stacked: int  # 2 when one producer holds gate and up
    width: int

    @property
    def inputs(self) -> int:
        """Channels that the consumer reads."""
        return self.width

    @property
    def words(self) -> str:
        """Its description in a sentence, such as ``8 heads of 64 channels``."""
        return f"width {self.width}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes that a config can have of it."""
        return (self.width,)

    def units(self, by: str) -> int:
        """Units that there are; a remainder always stays."""
        return self.width // per_unit(by)

    def without(self, units: int, by: str) -> Mlp:
        """The part that is left without so many units, as in ``8 channels``."""
        return dataclasses.replace(self, width=self.width - units * per_unit(by))

    def columns(self, keep: torch.Tensor) -> torch.Tensor:
        """The channels themselves."""
        return keep

    def cut(self, model: nn.Module, keep: torch.Tensor, weight: torch.Tensor | None = None) -> Mlp:
        """Keep some inner units, increasing, in place; see :meth:`Attention.cut`."""
        rows = torch.cat([keep + i * self.width for i in range(self.stacked)])
        _cut(model, self, [rows] * len(self.producers), keep, weight)
        return dataclasses.replace(self, width=len(keep))

    def write(self, config: Any, old: Where) -> None:
        """Write the width into a config, wherever it holds the old one."""
        if old.shape == self.shape:
            return
        widths = {f: getattr(config, f) for f in _WIDTHS if hasattr(config, f)}
        same = [f for f, v in widths.items() if v == old.inputs or (v is None and f in _WIDTHS_BY_DEFAULT)]
        listed = {f: len(v) for f, v in widths.items() if isinstance(v, list) and set(v) == {old.inputs}}
        if not same and not listed:
            name = type(config).__name__
            raise UnknownStructure(f"{name} has no field for the width of its MLPs.", "", "Remove blocks instead.")
        for field, value in ({f: self.width for f in same} | {f: [self.width] * n for f, n in listed.items()}).items():
            setattr(config, field, value)


Where = Attention | Mlp


def find_attention(layer: nn.Module, name: str) -> Attention:
    """The heads of one layer."""
    for path, parent, (producers, consumer, layout), matrices in _lying(layer, _ATTENTIONS):
        inner = producers[0].rpartition(".")[0]
        owner, inputs = parent.get_submodule(inner), _inputs(matrices[-1])
        head_dim = next((v for s in _SIZES if isinstance(v := getattr(owner, s, None), int)), 0)
        outputs = [m.weight.numel() // _inputs(m) for m in matrices[:-1]]
        heads = groups = 0
        if getattr(owner, "multi_query", None) is False:  # GPT-BigCode without shared keys lays heads out as GPT-NeoX does
            layout = "interleaved"
        if head_dim and layout == "separate":
            heads, groups = outputs[0] // head_dim, outputs[1] // head_dim
        elif head_dim and layout == "stacked":
            heads, groups = inputs // head_dim, (outputs[0] - inputs) // (2 * head_dim)
        elif head_dim:
            heads = groups = outputs[0] // (3 * head_dim)
        attention = Attention(
            owner=_join(name, path, inner),
            producers=tuple(_join(name, path, p) for p in producers),
            consumer=_join(name, path, consumer),
            layout=layout,
            heads=heads,
            groups=groups,
            head_dim=head_dim,
        )
        _check(attention, owner, inputs)
        return attention
    raise UnknownStructure(
        f"{name} ({type(layer).__name__}) has no attention of a known layout.", _KNOWN, "Remove MLP units or blocks instead."
    )


def find_mlp(layer: nn.Module, name: str) -> Mlp:
    """The MLP of one layer."""
    for path, parent, (producers, consumer, stacked), matrices in _lying(layer, _MLPS):
        if "experts" not in path and not (consumer == "c_proj" and path.endswith("attn")):
            inside = [n for n, m in parent.named_children() if path and "norm" in n and _wide(m, _inputs(matrices[-1]))]
            if inside:
                raise UnknownStructure(
                    f"{_join(name, path)} ({type(parent).__name__}) normalises over all of its channels ({inside[0]}), so that "
                    "removing some changes the others.",
                    "MLPs without a norm inside can lose channels.",
                    "Remove heads or blocks instead.",
                )
            return Mlp(
                owner=_join(name, path),
                producers=tuple(_join(name, path, p) for p in producers),
                consumer=_join(name, path, consumer),
                stacked=stacked,
                width=_inputs(matrices[-1]),
            )
    raise UnknownStructure(
        f"{name} ({type(layer).__name__}) has no plain MLP.",
        "Known are gate/up/down, fused gate_up/down, c_fc/c_proj, fc1/fc2, fc_in/fc_out, dense_h_to_4h/dense_4h_to_h, BERT's.",
        "Mixtures of experts: remove heads, or prune weights instead.",
    )


FIND: dict[str, Callable[[nn.Module, str], Where]] = {"heads": find_attention, "mlp": find_mlp}


def _lying(layer: nn.Module, layouts: Sequence[Any]) -> Iterator[tuple[str, nn.Module, Any, list[Any]]]:
    """Modules that have all matrices of a layout: ``(path, module, layout, matrices)``."""
    for path, parent in layer.named_modules():
        for layout in layouts:
            matrices = [_get(parent, n) for n in (*layout[0], layout[1])]
            if all(isinstance(m, nn.Linear) or (m is not None and is_conv1d(m)) for m in matrices):
                yield path, parent, layout, matrices


def _get(parent: nn.Module, name: str) -> Any:
    try:
        return parent.get_submodule(name)
    except AttributeError:
        return None


def _join(*names: str) -> str:
    return ".".join(n for n in names if n)


def _wide(norm: nn.Module, width: int) -> bool:
    """Whether a norm has a weight for each of so many channels."""
    return any(p.numel() == width for p in norm.parameters())


def _inputs(linear: nn.Module) -> int:
    return int(matrix_of(linear).shape[1])


def _check(a: Attention, owner: nn.Module, inputs: int) -> None:
    """Refuse what would compute something else with fewer heads."""
    norms = {n: m for n, m in owner.named_children() if "norm" in n}
    weights = {n: getattr(m, "weight", None) for n, m in norms.items()}
    across = [n for n, weight in weights.items() if weight is not None and weight.numel() != a.head_dim]
    single = [n for n, m in norms.items() if next(m.children(), None) is not None]
    parameters = [n for n, _ in owner.named_parameters(recurse=False)]
    known = (*a.producers, a.consumer)
    matrices = [n for n, m in owner.named_children() if isinstance(m, nn.Linear) and _join(a.owner, n) not in known]
    if not a.head_dim or a.inputs != inputs or a.groups < 1 or a.heads % a.groups:
        why = f"reads {inputs} channels, which are not {a.heads} query heads of {a.head_dim} in {a.groups} groups"
    elif across:
        why = f"normalises over all heads at once ({across[0]}), so that removing one changes the others"
    elif single:
        why = f"has a norm for every head ({single[0]})"
    elif matrices:
        why = f"has a matrix beside queries, keys, values and output ({matrices[0]}), which may belong to single heads"
    elif parameters:
        why = f"has parameters of its own ({parameters[0]}) that may belong to single heads"
    elif a.layout == "interleaved" and not type(owner).__name__.startswith(("GPTNeoX", "GPTBigCode")):
        why = "interleaves queries, keys and values in a way that is known for GPT-NeoX and GPT-BigCode only"
    else:
        return
    raise UnknownStructure(f"{a.owner} ({type(owner).__name__}) {why}.", _KNOWN, "Remove MLP units or blocks instead.")


def channels(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Channels of some heads, in order."""
    return (heads[:, None] * head_dim + torch.arange(head_dim, device=heads.device)).flatten()


def _cut(
    model: nn.Module, where: Where, rows: Sequence[torch.Tensor], columns: torch.Tensor, weight: torch.Tensor | None
) -> None:
    """Keep some outputs of every producer; the consumer keeps its columns, or gets other ones."""
    for name, chosen in zip(where.producers, rows, strict=True):
        module: Any = model.get_submodule(name)
        index = chosen.to(module.weight.device)
        made = module.weight.data.index_select(1 if is_conv1d(module) else 0, index)
        module.weight = nn.Parameter(made, module.weight.requires_grad)
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias.data[index], module.bias.requires_grad)
        _set_sizes(module)
    consumer = model.get_submodule(where.consumer)
    put_weight(consumer, matrix_of(consumer)[:, columns] if weight is None else weight)


def put_weight(module: Any, weight: torch.Tensor) -> None:
    """Give a Linear or Conv1D another ``(d_out, d_in)`` weight; precision and bias stay."""
    value = weight.to(module.weight.dtype)
    module.weight = nn.Parameter((value.T if is_conv1d(module) else value).contiguous(), module.weight.requires_grad)
    _set_sizes(module)


def _set_sizes(module: Any) -> None:
    if is_conv1d(module):
        module.nx, module.nf = module.weight.shape
    else:
        module.out_features, module.in_features = module.weight.shape
