"""A model in llama.cpp's words: the table of architectures, numbers of the header, names of tensors. No torch.

An architecture that the table has is written here. One that it lacks can still be planned if the package ``gguf`` has names for
its matrices: llama.cpp's own converter writes the file, and :mod:`layerbudget.decisions.bits.requantise` gives it the types.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput, need_package
from .architectures import ARCHITECTURES, CONVERT, UNEVEN, UNEVEN_TYPES, Architecture, Odd, head_width, layer_configs, rope_of


def need_gguf() -> Any:
    """Return the package ``gguf``, or say that it is missing."""
    return need_package("gguf", "GGUF formats need the package gguf.", "use compressed-tensors")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Query heads, key-value heads and MLP width of every layer."""

    heads: tuple[int, ...]
    groups: tuple[int, ...]
    widths: tuple[int, ...]


_SIZED = re.compile(r"\.layers\.(\d+)\.(?:self_attn\.(q|k)_proj|mlp\.(up)_proj)\.weight$")


def sizes_of(config: Any, shapes: Mapping[str, Sequence[int]]) -> Sizes | None:
    """Return the sizes of the layers where they differ; None where one number says each of them.

    Args:
        config: It has the width of the heads.
        shapes: Of all parameters, by full name.
    """
    rows: dict[str, dict[int, int]] = {"q": {}, "k": {}, "up": {}}
    for name, shape in shapes.items():
        if match := _SIZED.search(name):
            rows[match[2] or match[3]][int(match[1])] = int(shape[0])
    if all(len(set(of.values())) <= 1 for of in rows.values()):
        return None
    width = [head_width(c) for c in layer_configs(config)]
    heads, groups = (tuple(rows[kind][i] // width[i] for i in sorted(rows[kind])) for kind in ("q", "k"))
    return Sizes(heads, groups, tuple(rows["up"][i] for i in sorted(rows["up"])))


def architecture(config: Any, *, uneven: bool = False, fewer: bool = False) -> Architecture:
    """Return what a model is in llama.cpp's words; one that is not written here, or is computed otherwise, is refused.

    ``uneven`` says that its layers will differ in heads or widths, ``fewer`` that heads of it will go.
    """
    kind = str(config.model_type)
    if uneven and kind in ARCHITECTURES and kind not in UNEVEN_TYPES:
        raise InvalidInput(
            f"A {kind} model whose layers differ is not written as GGUF.",
            f"llama.cpp computes layers that differ as {UNEVEN.name}: of {', '.join(UNEVEN_TYPES)}.",
            "Plan with --even.",
        )
    if kind not in ARCHITECTURES:
        raise InvalidInput(
            f"A {kind} model is not written as GGUF here.", _WRITTEN, f"{CONVERT} Or plan for compressed-tensors."
        )
    arch = ARCHITECTURES[kind]
    uneven |= fewer and arch.square and kind in UNEVEN_TYPES
    if fewer and arch.square and not uneven:
        raise InvalidInput(
            f"A {kind} model with fewer heads is not written as GGUF.",
            f"llama.cpp takes all heads of {arch.name} together to be as wide as the model.",
            "Remove MLP units alone (--parts mlp).",
        )
    if uneven or (kind in UNEVEN_TYPES and arch.against(config)):  # it takes other heads, and factors of the frequencies
        arch = UNEVEN
    if odd := arch.against(config):
        raise _refusal(config, odd)
    return arch


_WRITTEN = f"Written are {', '.join(ARCHITECTURES)}, as llama.cpp computes them."


def _refusal(config: Any, odd: Sequence[Odd]) -> InvalidInput:
    remedy = f"{odd[0].remedy} Or plan for compressed-tensors." if odd[0].computed else odd[0].remedy
    return InvalidInput(f"A {config.model_type} model with {odd[0].what} is not written as GGUF here.", _WRITTEN, remedy)


def check_computed(config: Any) -> None:
    """Refuse a model of a known architecture with a field that no file of llama.cpp can say, whoever writes it."""
    kind = str(config.model_type)
    if kind in ARCHITECTURES:
        odd = (UNEVEN if kind in UNEVEN_TYPES else ARCHITECTURES[kind]).against(config)
        if lost := [each for each in odd if not each.computed]:
            raise _refusal(config, lost)


def is_written(config: Any) -> bool:
    """Return whether :func:`architecture` has a model."""
    try:
        architecture(config)
    except InvalidInput:
        return False
    return True


# ---- numbers of the header


_NUMBERS: tuple[
    tuple[str, tuple[str, ...]], ...
] = (  # method of the writer: fields of the configuration, the first that is set
    ("context_length", ("max_position_embeddings",)),
    ("embedding_length", ("hidden_size",)),
    ("block_count", ("num_hidden_layers",)),
    ("feed_forward_length", ("intermediate_size",)),
    ("head_count", ("num_attention_heads",)),
    ("head_count_kv", ("num_key_value_heads",)),
    ("layer_norm_rms_eps", ("rms_norm_eps",)),
    ("layer_norm_eps", ("layer_norm_eps", "norm_epsilon")),
    ("vocab_size", ("vocab_size",)),
    ("expert_count", ("num_local_experts", "num_experts")),
    ("expert_used_count", ("num_experts_per_tok",)),
    ("expert_feed_forward_length", ("moe_intermediate_size",)),
    ("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",)),
    ("attn_logit_softcapping", ("attn_logit_softcapping",)),
    ("final_logit_softcapping", ("final_logit_softcapping",)),
    ("attention_scale", ("attention_multiplier",)),
    ("embedding_scale", ("embedding_multiplier",)),
    ("residual_scale", ("residual_multiplier",)),
    ("logit_scale", ("logits_scaling",)),
    ("parallel_residual", ("use_parallel_residual",)),
)


def _read(config: Any, field: str) -> Any:
    """A field that the class of a configuration declares: what it does not declare, its model does not read."""
    aliases = {field, *(name for pair in getattr(config, "attribute_map", {}).items() if field in pair for name in pair)}
    declared = not dataclasses.is_dataclass(config) or aliases & {f.name for f in dataclasses.fields(config)}
    return getattr(config, field, None) if declared else None


def add_numbers(writer: Any, config: Any, arch: Architecture, sizes: Sizes | None = None) -> None:
    """Add the numbers of a configuration to a header, with the sizes of layers that differ."""
    layer_sizes: dict[str, Any] = {}
    if sizes is not None:
        layer_sizes = {"head_count": sizes.heads, "head_count_kv": sizes.groups, "feed_forward_length": sizes.widths}
    for method, fields in _NUMBERS:
        value = layer_sizes.get(method) or next((v for f in fields if (v := _read(config, f)) is not None), None)
        if value is not None:
            getattr(writer, f"add_{method}")(value)
    width = head_width(config)
    writer.add_key_length(width)
    writer.add_value_length(width)
    ropes = rope_of(config)
    full = ropes["full"]
    writer.add_rope_dimension_count(int(width * float(full.get("partial_rotary_factor") or 1.0)))
    writer.add_rope_freq_base(float(full.get("rope_theta") or 10000.0))
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(need_gguf().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(full["factor"]))
    if arch.windows:
        if getattr(config, "sliding_window", None):
            writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if "sliding" in ropes:
            writer.add_rope_freq_base_swa(float(ropes["sliding"].get("rope_theta") or 10000.0))


def rope_factors(config: Any) -> np.ndarray | None:
    """Return what llama.cpp divides the frequencies by, ``(channels / 2,)`` float32: Llama 3 stretches slow ones alone."""
    rope = rope_of(config)["full"]
    if rope.get("rope_type") != "llama3":
        return None
    width, base, factor = head_width(config), float(rope.get("rope_theta") or 10000.0), float(rope["factor"])
    low, high, length = (float(rope[k]) for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    turns = length / (2 * math.pi * base ** (np.arange(0, width, 2) / width))  # of every frequency within the length
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)  # of the frequency as it is
    factors: np.ndarray = (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)
    return factors


# ---- names of tensors


_ALIASES = (  # names of transformers, and names that the package knows
    (re.compile(r"^model\.(language_model|text_model)\."), "model."),  # of models that see: SmolVLM, Idefics, Emu 3
    (re.compile(r"^language_model\.(?=model\.|lm_head)"), ""),  # Llama 4
    (re.compile(r"\.block_sparse_moe\.experts\."), ".mlp.experts."),
    (re.compile(r"\.block_sparse_moe\.router$"), ".block_sparse_moe.router.layer"),
    (re.compile(r"\.mixer\.experts\."), ".mlp.experts."),  # Nemotron-H
    (re.compile(r"\.self_attn\.forget_gate\."), ".self_attn."),  # Kimi Linear
    (re.compile(r"\.experts\.\d+\."), ".experts."),
    (re.compile(r"^model\.layers\.(\d+)\.mixer\."), r"backbone.layers.\1.mixer."),
)
_GATE_UP = ".experts.gate_up_proj"
ROUTERS = re.compile(r"\.ffn_gate_inp(_shexp)?$")  # llama.cpp keeps them in 32 bits
ACROSS = re.compile(r"\.attn_k_b$")  # the converter turns it around, head by head: its rows are no rows of a matrix
LATENT = ".kv_b_proj"  # keys and values of latent attention


class Names:
    """Names in the files of one architecture, by names of matrices in transformers.

    Args:
        arch: llama.cpp's name of it.
        layers: How many it has.
    """

    def __init__(self, arch: str, layers: int) -> None:
        gguf = need_gguf()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        if arch not in kinds:
            raise InvalidInput(f"The package gguf knows no architecture {arch}.", "", "Install a later version of it.")
        # Arctic's map writes into the class's (0.19)
        namespace = {"block_mappings_cfg": dict(gguf.TensorNameMap.block_mappings_cfg)}
        self.arch, self.known = arch, type("Map", (gguf.TensorNameMap,), namespace)(kinds[arch], layers)

    def find(self, matrix: str) -> tuple[str, ...]:
        """Return the tensors of a matrix: none, one, or two that are one in transformers.

        These are gate and up of a stack of experts, and keys and values of latent attention.

        >>> Names("qwen3moe", 2).find("model.layers.1.mlp.experts.gate_up_proj")
        ('blk.1.ffn_gate_exps', 'blk.1.ffn_up_exps')
        >>> Names("deepseek2", 2).find("model.layers.1.self_attn.kv_b_proj")
        ('blk.1.attn_k_b', 'blk.1.attn_v_b')
        """
        for pattern, name in _ALIASES:
            matrix = pattern.sub(name, matrix)
        if matrix.endswith(_GATE_UP):
            stem = matrix.removesuffix("gate_up_proj")
            tensors = tuple(self.known.get_name(f"{stem}{part}_proj") for part in ("gate", "up"))
            return tensors if all(tensors) else ()
        if matrix.endswith(LATENT):
            tensors = tuple(self.known.get_name(matrix.replace(LATENT, f".{part}_b_proj")) for part in "kv")
            if all(tensors):
                return tensors
        name = self.known.get_name(matrix)
        return (name,) if name else ()


_map = functools.cache(Names)


def find_architecture(matrices: Iterable[str], kind: str = "") -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the first architecture of llama.cpp that has some matrices, and the tensors of every one of them.

    Args:
        matrices: Names in transformers.
        kind: transformers' model type, where it is known: that architecture comes first.

    Raises:
        InvalidInput: No architecture has them all.
    """
    wanted = list(matrices)
    layers = 1 + max((int(n) for m in wanted for n in re.findall(r"\.(\d+)\.", m)), default=0)
    of_kind = [ARCHITECTURES[kind].name] if kind in ARCHITECTURES else []
    every = need_gguf().MODEL_ARCH_NAMES.values()
    near = [name for name in every if kind and name.replace("-", "") == kind.replace("_", "")]
    for arch in dict.fromkeys((*of_kind, *near, *(a.name for a in ARCHITECTURES.values()), "deepseek2", *every)):
        names = _map(arch, layers)
        tensors = {m: names.find(m) for m in wanted}
        if all(tensors.values()):
            return arch, tensors
    what = f"GGUF has no architecture with all of these matrices, {wanted[0]} among them."
    raise InvalidInput(what, "", "Plan for compressed-tensors.")


def find_names(matrices: Iterable[str], kind: str = "") -> dict[str, tuple[str, ...]]:
    """Return the tensors of every matrix: see :func:`find_architecture`."""
    return find_architecture(matrices, kind)[1]


def split_stacks(matrix: str, copies: int) -> int:
    """Return how many tensors of a file a matrix becomes: gate and up of a stack of experts are apart."""
    return 2 if copies > 1 and matrix.endswith(_GATE_UP) else 1
