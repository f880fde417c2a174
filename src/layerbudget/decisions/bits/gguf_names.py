"""What a GGUF file says of a model: names of tensors, numbers of the configuration, vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidInput
from .written import ARCHITECTURES

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
# What splits a text before the merges, by the regular expression that tokenizers.json holds.
_SPLITS = {"{1,3}| ?[^\\s": "llama-bpe", "\\p{N}| ?[^\\s": "qwen2"}


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
