"""What a GGUF file says of a model: architecture, names of tensors, numbers of the configuration, vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput

# transformers' model types, and the architecture of llama.cpp that computes the same.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
PERMUTED = ("llama",)  # rotary embeddings of neighbours: rows of q and k change places
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
# What splits a text before the merges, by the regular expression that tokenizers.json holds.
_SPLITS = {"{1,3}| ?[^\\s": "llama-bpe", "\\p{N}| ?[^\\s": "qwen2"}


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
            "Write its --tensor-type-file and let llama.cpp convert and quantise it, or plan for compressed-tensors.",
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


def names_by_map(gguf: Any, modules: list[str]) -> dict[str, str]:
    """Names in a GGUF file by full name of the matrix, from the names alone: the first architecture that has them all.

    Raises:
        InvalidInput: None has.
    """
    layers = 1 + max((int(n) for m in modules for n in re.findall(r"\.(\d+)\.", m)), default=0)
    for arch in (*dict.fromkeys(ARCHITECTURES.values()), *gguf.MODEL_ARCH_NAMES.values()):
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        known = gguf.get_tensor_name_map(kind, layers)
        found = {m: known.get_name(m) for m in modules}
        if all(found.values()):
            return {m: str(name) for m, name in found.items()}
    raise InvalidInput("GGUF has no architecture with all of these matrices.", f"The first is {modules[0]}.", "")


def add_numbers(writer: Any, config: Any, head_dim: int) -> None:
    """Sizes, rotary base and epsilon."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> list[str]:
    """Vocabulary and merges of a byte-level BPE tokenizer; others are left out. Returns notes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    held: Mapping[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model = held.get("model") or {}
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(held.get("pre_tokenizer")):
        writer.add_tokenizer_model("no_vocab")
        return ["The tokenizer is no byte-level BPE; the file holds no vocabulary, and llama.cpp is to be given token numbers."]
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    special = {t["id"] for t in held.get("added_tokens", []) if t.get("special")}
    for token, i in {**model["vocab"], **{t["content"]: t["id"] for t in held.get("added_tokens", [])}}.items():
        if i < size:
            tokens[i], kinds[i] = token, _CONTROL if i in special else _NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(held))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            add(number)
    begins = bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    writer.add_add_bos_token(begins)
    return []


def _split(held: Mapping[str, Any]) -> str:
    """llama.cpp's name of what splits the text before the merges."""
    text = json.dumps(held.get("pre_tokenizer"), ensure_ascii=False).replace("\\\\", "\\")
    return next((name for part, name in _SPLITS.items() if part in text), "gpt-2")
