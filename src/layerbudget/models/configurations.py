"""Blocks from a model's ``config.json`` alone: plans without weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import CorruptFile, InvalidInput, NotFound, UnknownStructure
from ..records import Block, Module
from ..storage import reading


def blocks_from_config(config: Mapping[str, Any] | Path | str, *, by: str = "layer") -> tuple[Block, ...]:
    """Blocks of a decoder from its ``config.json``, in order of depth: plans without weights.

    Covers the Llama family (Llama, Mistral, Gemma, Qwen, Phi-3's sizes, OLMo, SmolLM, ...): q, k, v, o and gate, up, down per
    layer, with grouped-query attention and explicit head sizes; mixtures with ``num_local_experts`` have fused experts.

    Args:
        config: The configuration, or the path of the file or its folder.
        by: ``layer`` or ``linear``.

    Raises:
        NotFound, CorruptFile: No such file, or not JSON.
        UnknownStructure: A size is missing, or the layers have other matrices: not a decoder of this family.
        InvalidInput: ``by`` is neither of the two.

    >>> mistral = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    ...                num_key_value_heads=8)
    >>> blocks_from_config(mistral)[0].numel
    218103808
    """
    if by not in ("layer", "linear"):
        raise InvalidInput(f"by is {by!r}.", "From a configuration it is 'layer' or 'linear'.", "Load the model for a pattern.")
    record = _read_config(config)
    inner = record.get("text_config")
    record = {**record, **(inner if isinstance(inner, Mapping) else {})}
    try:
        reading.converted(record, _Sizes)
    except ValueError as error:
        raise CorruptFile(f"The configuration does not read: {error}.", "", "Download it again.") from error
    _check_family(record)
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [n for n in needed if not isinstance(record.get(n), int)]
    if missing:
        raise UnknownStructure(
            f"The configuration ({record.get('model_type', 'no model_type')}) lacks {', '.join(missing)}.",
            f"Needed: {', '.join(needed)}.",
            "Load the model and partition it instead.",
        )
    hidden, heads = record["hidden_size"], record["num_attention_heads"]
    head = record.get("head_dim") or hidden // heads
    keys = (hidden, (record.get("num_key_value_heads") or heads) * head)
    shapes = {"q_proj": (hidden, heads * head), "k_proj": keys, "v_proj": keys, "o_proj": (heads * head, hidden)}
    blocks = []
    for i in range(record["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        modules = [Module(name=f"{prefix}.self_attn.{n}", d_in=a, d_out=b) for n, (a, b) in shapes.items()]
        modules += _mlp(prefix, record)
        groups = [(m.name, (m,)) for m in modules] if by == "linear" else [(prefix, tuple(modules))]
        blocks += [Block(name=n, modules=group) for n, group in groups]
    if sum(b.numel for b in blocks) >= reading.WHOLE:
        raise CorruptFile("The sizes of this configuration multiply to more than 2^62 parameters.", "", "Download it again.")
    return tuple(blocks)


class _Sizes(msgspec.Struct):
    hidden_size: reading.Size | None = None
    intermediate_size: reading.Size | None = None
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=10**7)] | None = None
    num_attention_heads: reading.Size | None = None
    num_key_value_heads: reading.Size | None = None
    head_dim: reading.Size | None = None
    num_local_experts: reading.Count | None = None
    num_experts_per_tok: reading.Count | None = None
    model_type: str | None = None
    architectures: list[str] | None = None
    is_encoder_decoder: bool | None = None


# Configurations with the same keys whose layers hold other matrices (encoders, no gate, fused projections).
_OTHERS = (
    "bert roberta xlm-roberta electra deberta deberta-v2 albert modernbert camembert vit "
    "gpt_neox opt phi falcon starcoder2 nemotron gptj codegen bloom mpt"
).split()
_MIXTURES = ("num_experts", "n_routed_experts", "moe_intermediate_size", "kv_lora_rank")


def _check_family(record: Mapping[str, Any]) -> None:
    """Refuse an encoder, a decoder with other matrices, and a mixture with sizes of its own: they would be misread."""
    kind = record.get("model_type")
    masked = any("MaskedLM" in str(a) for a in record.get("architectures") or ())
    keys = [k for k in _MIXTURES if record.get(k)]
    if kind in _OTHERS or masked or keys or record.get("is_encoder_decoder"):
        raise UnknownStructure(
            f"The layers of this configuration ({kind or 'no model_type'}"
            + (f", {keys[0]} {record[keys[0]]}" if keys else "")
            + ") hold other matrices than its sizes say.",
            "Plans without weights know decoders with q, k, v, o and gate, up, down, and mixtures with num_local_experts.",
            "Load the model and partition it instead.",
        )


def _mlp(prefix: str, record: Mapping[str, Any]) -> list[Module]:
    hidden, ffn = record["hidden_size"], record["intermediate_size"]
    experts = record.get("num_local_experts") or 0
    if experts:
        active = record.get("num_experts_per_tok") or experts
        sizes = {"gate_up_proj": (hidden, 2 * ffn), "down_proj": (ffn, hidden)}
        return [
            Module(name=f"{prefix}.mlp.experts.{n}", d_in=a, d_out=b, copies=experts, active=active)
            for n, (a, b) in sizes.items()
        ]
    names = {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
    return [Module(name=f"{prefix}.mlp.{n}", d_in=a, d_out=b) for n, (a, b) in names.items()]


def _read_config(config: Mapping[str, Any] | Path | str) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFound(f"There is no configuration at {path}.", "", "Give the model's config.json or its folder.")
    record = reading.read(path, "configuration", limit=1 << 26, remedy="Download it again.")
    if not isinstance(record, dict):
        raise CorruptFile(f"{path} is not a configuration: not an object.", "", "Download it again.")
    return record
