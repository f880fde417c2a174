"""The types that llama.cpp's own mixes (``Q4_K_M``, ``IQ3_XS``, ...) give every tensor of a model. No torch.

A mix is a base type and exceptions. These depend on what a tensor is for, on its place among the layers, on the query heads
that share a key, on the number of experts, and on whether there is an importance matrix. They are the rules of
``llama_tensor_get_type`` in llama.cpp's ``src/llama-quant.cpp`` (November 2026), written here as a table.

>>> model = LlamaModel(architecture="llama", layers=8, heads=4)
>>> tensors = [Tensor(name=f"blk.{i}.attn_v.weight", d_out=64, d_in=256) for i in range(8)]
>>> types_of("Q4_K_M", model, tensors)
['Q6_K', 'Q4_K', 'Q4_K', 'Q6_K', 'Q4_K', 'Q4_K', 'Q6_K', 'Q6_K']
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..compressors.formats import TYPES
from ..errors import InvalidInput

_BASES = {
    "IQ2_S": "IQ2_XS",
    "IQ2_M": "IQ2_S",
    "Q2_K_S": "Q2_K",
    "IQ3_XS": "IQ3_S",
    "IQ3_M": "IQ3_S",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "MXFP4_MOE": "MXFP4",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
}
MIXES = {  # base type of every mix, the smallest first
    name: _BASES.get(name, name)
    for name in (
        "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M Q2_K_S Q2_K IQ3_XXS IQ3_XS IQ3_S IQ3_M Q3_K_S Q3_K_M Q3_K_L IQ4_XS "
        "IQ4_NL Q4_0 MXFP4_MOE Q4_K_S Q4_K_M Q4_1 Q5_0 Q5_K_S Q5_K_M Q5_1 Q6_K Q8_0"
    ).split()
}
_TYPES = {t.name: t for t in TYPES}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NEED_MATRIX = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")  # types, except of embedding and head
_SEVENTY = (("llama", 80), ("qwen2", 80), ("deci", 80), ("olmo", 80), ("jais2", 68))  # "70B": architecture and layers
_FALLBACK = {  # of rows that a block of 256 does not divide
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **{"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaModel:
    """The numbers of a model that the rules read.

    Attributes:
        architecture: As llama.cpp names it.
        layers: Their number.
        heads: Query heads per key head, rounded down.
        experts: Of a layer.
        imatrix: Whether there is an importance matrix.
        beside: Tensors that mixes round and plans leave, ``[name, d_out, d_in, copies]``: keys and values of latent attention.
    """

    architecture: str
    layers: int
    heads: int
    experts: int = 0
    imatrix: bool = True
    beside: Sequence[Sequence[Any]] = ()

    @property
    def mixes(self) -> tuple[str, ...]:
        """The mixes that differ, the smallest first. Without experts MXFP4_MOE is Q8_0."""
        return tuple(mix for mix in MIXES if self.experts or mix != "MXFP4_MOE")

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors ``beside``."""
        return [Tensor(name=name, d_out=d_out, d_in=d_in, copies=copies) for name, d_out, d_in, copies in self.beside]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor as the GGUF file names it: ``copies`` matrices ``(d_out, d_in)``."""

    name: str
    d_out: int
    d_in: int
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class _Case:
    """A tensor to which a rule may apply: ``place`` of so many of its kind."""

    model: LlamaModel
    place: int
    many: int


_CONDITIONS: dict[str, Callable[[_Case], bool]] = {
    "always": lambda c: True,
    "shared keys": lambda c: c.model.heads >= 4,
    "4 experts": lambda c: c.model.experts >= 4,
    "8 experts": lambda c: c.model.experts == 8,
    "not 8 experts": lambda c: c.model.experts != 8,
    "70B": lambda c: _seventy(c.model),
    "falcon": lambda c: c.model.architecture == "falcon",
    "not falcon": lambda c: c.model.architecture != "falcon",
    "imatrix": lambda c: c.model.imatrix,
    "no imatrix": lambda c: not c.model.imatrix,
    "first 2": lambda c: c.place < 2,
    "first 4": lambda c: c.place < 4,
    "sixteenth": lambda c: c.place < c.many // 16,
    "eighth": lambda c: c.place < c.many // 8,
    "middle": lambda c: c.many // 8 <= c.place < 7 * c.many // 8,
    "often": lambda c: c.place < c.many // 8 or c.place >= 7 * c.many // 8 or (c.place - c.many // 8) % 3 == 2,
}
_TINY, _SMALL = "IQ1_S IQ1_M IQ2_XXS IQ2_XS", "IQ2_S IQ2_M"
_LOW = f"{_TINY} {_SMALL}"
_EIGHT = "Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS"
# Part of the model, mixes, conditions that hold together, type. Of a part the first row that applies is taken.
_RULES = (
    ("head", "MXFP4_MOE Q8_0", "always", "Q8_0"),
    ("head", "*", "falcon", "Q8_0"),
    ("head", f"{_LOW} IQ3_XXS", "always", "Q5_K"),
    ("head", "*", "always", "Q6_K"),
    ("embedding", _TINY, "always", "Q2_K"),
    ("embedding", f"{_SMALL} IQ3_XXS", "always", "IQ3_S"),
    ("v", _LOW, "shared keys", "Q4_K"),
    ("v", _LOW, "4 experts", "Q4_K"),
    ("v", _SMALL, "always", "IQ3_S"),
    ("v", _TINY, "always", "Q2_K"),
    ("v", "*", "8 experts", "Q8_0"),
    ("v", "Q2_K Q2_K_S IQ3_XXS IQ3_XS IQ3_S", "shared keys, 70B", "Q5_K"),
    ("v", "Q2_K Q2_K_S IQ3_XXS IQ3_XS IQ3_S", "shared keys", "Q4_K"),
    ("v", "Q2_K Q3_K_S IQ3_M Q3_K_M Q4_K_S", "70B", "Q5_K"),
    ("v", "Q2_K", "always", "Q3_K"),
    ("v", "IQ3_XXS", "no imatrix", "IQ3_S"),
    ("v", "Q3_K_M", "first 2", "Q5_K"),
    ("v", "IQ3_M Q3_K_M", "always", "Q4_K"),
    ("v", "Q3_K_L", "always", "Q5_K"),
    ("v", "IQ4_NL IQ4_XS", "shared keys", "Q5_K"),
    ("v", "Q4_K_M Q5_K_M", "often", "Q6_K"),
    ("v", "Q4_K_M", "70B", "Q5_K"),
    ("v", "Q4_K_S", "first 4", "Q5_K"),
    ("k", _LOW, "8 experts", "Q4_K"),
    ("k", "*", "8 experts", "Q8_0"),
    ("k q", "IQ3_XS", "always", "IQ3_XXS"),
    ("k q", "IQ3_XXS", "always", "IQ2_S"),
    ("down", _SMALL, "eighth", "IQ3_S"),
    ("down", _TINY, "eighth", "Q2_K"),
    ("down", "Q2_K", "always", "Q3_K"),
    ("down", "Q2_K_S", "eighth", "Q4_K"),
    ("down", "IQ3_XXS", "no imatrix, eighth", "Q4_K"),
    ("down", "IQ3_XXS", "no imatrix", "Q3_K"),
    ("down", "Q3_K_M", "sixteenth", "Q5_K"),
    ("down", "Q3_K_M", "not falcon", "Q4_K"),
    ("down", "Q3_K_M", "often", "Q4_K"),
    ("down", "IQ3_M", "eighth", "Q4_K"),
    ("down", "IQ3_M", "8 experts, often", "Q4_K"),
    ("down", "Q3_K_L", "falcon", "Q4_K"),
    ("down", "Q3_K_L", "always", "Q5_K"),
    ("down", "Q4_K_M", "falcon, sixteenth", "Q6_K"),
    ("down", "Q4_K_M", "falcon, often", "Q5_K"),
    ("down", "Q4_K_M", "not falcon, often", "Q6_K"),
    ("down", "IQ4_NL IQ4_XS", "no imatrix, eighth", "Q5_K"),
    ("down", "Q5_K_M", "often", "Q6_K"),
    ("down", "Q4_K_S", "not falcon, eighth", "Q5_K"),
    ("down", "Q4_0", "imatrix, eighth", "Q4_1"),
    ("down", "Q5_0", "imatrix, eighth", "Q5_1"),
    ("output", f"{_LOW}", "8 experts", "Q5_K"),
    ("output", "IQ1_S IQ1_M", "always", "IQ2_XXS"),
    ("output", _SMALL, "always", "IQ3_S"),
    ("output", "Q3_K_L", "falcon", "Q4_K"),
    ("output", _EIGHT, "not falcon, 8 experts", "Q5_K"),
    ("output", "Q2_K", "not falcon, not 8 experts", "Q3_K"),
    ("output", "IQ3_XXS", "not falcon, not 8 experts", "IQ3_S"),
    ("output", "Q3_K_M IQ3_M", "not falcon, not 8 experts", "Q4_K"),
    ("output", "Q3_K_L", "not falcon, not 8 experts", "Q5_K"),
    ("gate up", "IQ3_XS", "middle", "IQ3_XXS"),
)
# Parts of the model by what names contain; the first that is found.
_PARTS = (
    ("v", "attn_qkv.weight"),
    ("v", "attn_kv_b.weight"),
    ("v", "attn_v.weight"),
    ("k", "attn_k.weight"),
    ("q", "attn_q.weight"),
    ("output", "attn_output.weight"),
    ("up", "ffn_up"),
    ("gate", "ffn_gate"),
    ("down", "ffn_down"),
)
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
# Matrices that every mix leaves as they are.
_LEFT = re.compile(
    r"_norm\.weight|ffn_gate_(inp|tid2eid)\.weight|altup|laurel|per_layer_model_proj|position_embd|token_types|ssm_conv1d"
    r"|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)"
    r"\.weight|attn_rel_b\.weight"
)
_LAYER = re.compile(r"blk\.(\d+)\.")


def find_mix(name: str) -> str:
    """Return the name of a mix as llama.cpp writes it: ``q4_k`` is ``Q4_K_M``.

    Raises:
        InvalidInput: There is none of that name.
    """
    mix = _ALIASES.get(name.upper(), name.upper())
    if mix not in MIXES:
        raise InvalidInput(f"llama.cpp has no mix {name!r}.", f"Its mixes are {', '.join(MIXES)}.", "Choose one of those.")
    return mix


def types_of(mix: str, model: LlamaModel, tensors: Sequence[Tensor]) -> list[str]:
    """Return the type of every tensor in a mix, one each; ``F16`` where a mix quantises none, or no type divides its rows.

    Args:
        mix: One of ``MIXES``.
        model: What the rules read of it.
        tensors: All matrices of the model in any order, those of the ends among them: places are counted over them.
    """
    tied = all(t.name != "output.weight" for t in tensors)
    parts = [_part(t.name, tied) for t in tensors]
    values = sum(p == "v" for p in parts)
    seen: dict[str, int] = collections.Counter()
    types = [""] * len(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: (_layer(tensors[i].name), tensors[i].name)):
        tensor, part = tensors[i], parts[i]
        if not _quantised(tensor):
            types[i] = "F16"
            continue
        place = seen[part]
        seen[part] += 1
        if model.experts > 1 and part in ("down", "gate", "up") and mix not in _LOW.split():
            place = _layer(tensor.name)  # stacks of experts beside shared ones: the layer counts
        case = _Case(model, place, values if part == "v" else model.layers)
        types[i] = _fitting(_type(mix, part, tensor, case), tensor)
    return types


def needs_matrix(mix: str, tensors: Sequence[Tensor], types: Sequence[str]) -> bool:
    """Whether llama.cpp refuses to make a mix of these types without an importance matrix."""
    inside = [kind for t, kind in zip(tensors, types, strict=True) if t.name not in (*_EMBEDDINGS, "output.weight")]
    return any(kind in NEED_MATRIX or (mix == "Q2_K_S" and kind == "Q2_K") for kind in inside)


def _type(mix: str, part: str, tensor: Tensor, case: _Case) -> str:
    """The type by the rules, whether or not its blocks divide the rows."""
    if part == "head" and not _TYPES[MIXES[mix]].fits(tensor.d_in):
        return "Q8_0"
    if mix == "MXFP4_MOE" and part != "head":
        return "MXFP4" if tensor.copies > 1 else "Q8_0"
    holds = (kind for conditions, kind in _rules(mix, part) if all(holds(case) for holds in conditions))
    return next(holds, MIXES[mix])


@functools.cache
def _rules(mix: str, part: str) -> list[tuple[list[Callable[[_Case], bool]], str]]:
    """Conditions and type of every exception of a mix in a part of the model."""
    rules = [r for r in _RULES if part in r[0].split() and mix in (r[1] if r[1] != "*" else mix).split()]
    return [([_CONDITIONS[name] for name in conditions.split(", ")], kind) for _, _, conditions, kind in rules]


def _fitting(kind: str, tensor: Tensor) -> str:
    """The type, or the one with smaller blocks that llama.cpp takes in its place."""
    for name in (kind, _FALLBACK.get(kind, kind)):
        if _TYPES[name].fits(tensor.d_in):
            return name
    return "F16"


def _part(name: str, tied: bool) -> str:
    if name in _EMBEDDINGS:
        return "head" if tied else "embedding"
    return "head" if name == "output.weight" else next((part for part, word in _PARTS if word in name), "other")


def _quantised(tensor: Tensor) -> bool:
    return tensor.d_out * tensor.copies > 1 and tensor.name.endswith("weight") and not _LEFT.search(tensor.name)


def _layer(name: str) -> int:
    match = _LAYER.match(name)
    return -1 if match is None else int(match.group(1))


def _seventy(model: LlamaModel) -> bool:
    return (model.architecture, model.layers) in _SEVENTY and (model.architecture != "llama" or model.heads > 1)
