"""The vocabulary of a GGUF file: byte-level BPE, or SentencePiece's BPE with a byte for what it does not know. No torch.

llama.cpp merges SentencePiece's symbols by the score of what comes out, tokenizers by the place of the pair in a list. So the
score is minus the first place of a token in the list. The two agree where the list has every pair that makes a token, as it has
in conversions of SentencePiece's files. A text that begins with a space gets another one from llama.cpp, and none from the step
``Metaspace`` of tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens; OWN is a user's
_SPACE = "\u2581"
_LOW = -10_000.0  # the score of tokens that no merge makes
# Added tokens that steer a model although their tokenizer does not call them special: llama.cpp's converter knows these.
_STEERING = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# llama.cpp's names of what splits a text before the merges, by the whole regular expression that tokenizer.json holds.
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "gpt-4o",
}


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> list[str]:
    """Write the vocabulary of a tokenizer, with what llama.cpp needs to split texts as it does; returns notes.

    Args:
        writer: Of the package ``gguf``.
        tokenizer: A fast tokenizer of transformers; others, and None, are left out.
        size: Tokens of the model; those that the tokenizer does not have are unused.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    held: Mapping[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model = held.get("model") or {}
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges") or ()]
    notes: list[str] = []
    if model.get("type") == "BPE" and any(step["type"] == "ByteLevel" for step in _steps(held)):
        notes += _add_byte_level(writer, held, merges, size)
    elif model.get("type") == "BPE" and model.get("byte_fallback") and (prefix := _prefix(held)) is not None:
        notes += _add_pieces(writer, held, merges, prefix, size)
        if getattr(tokenizer, "unk_token_id", None) is not None:
            writer.add_unk_token_id(tokenizer.unk_token_id)
    else:
        writer.add_tokenizer_model("no_vocab")
        return [
            "The tokenizer is no byte-level BPE and none of SentencePiece; the file holds no vocabulary, and llama.cpp is to "
            "be given token numbers."
        ]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (number := getattr(tokenizer, name, None)) is not None:
            getattr(writer, f"add_{name}")(number)
    found = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(found[:1] == [tokenizer.bos_token_id]))
    if found[-1:] == [tokenizer.eos_token_id]:
        writer.add_add_eos_token(True)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)
    return notes


def _tokens(held: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every token's text and kind. llama.cpp finds added tokens as they are written, before it splits a text."""
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    added = held.get("added_tokens", [])
    for token, i in {**held["model"]["vocab"], **{t["content"]: t["id"] for t in added}}.items():
        if i < size:
            tokens[i], kinds[i] = token, _NORMAL
    for each in added:
        i, token = each["id"], each["content"]
        if i < size and (each.get("special") or _STEERING.fullmatch(token)):
            kinds[i] = _CONTROL
        elif i < size:
            tokens[i], kinds[i] = token.replace(_SPACE, " "), _OWN
    return tokens, kinds


def _add_byte_level(writer: Any, held: Mapping[str, Any], merges: Sequence[tuple[str, ...]], size: int) -> list[str]:
    """Tokens and merges of a byte-level BPE."""
    tokens, kinds = _tokens(held, size)
    known = _split_of(_steps(held))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known or "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(m) for m in merges])
    if known is None:
        return [
            "llama.cpp splits texts as GPT-2 does here, the tokenizer by a rule of its own: some words become other tokens."
        ]
    return []


def _steps(held: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps that split a text before the merges."""
    step = held.get("pre_tokenizer")
    return [] if step is None else list(step["pretokenizers"]) if step["type"] == "Sequence" else [step]


def _split_of(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """llama.cpp's name of the steps; None where it has none. ``ByteLevel`` splits as GPT-2 does unless told not to."""
    regex = [s["pattern"].get("Regex") for s in steps if s["type"] == "Split"]
    splits = [s["type"] for s in steps if s["type"] != "ByteLevel" or s.get("use_regex", True)]
    return "gpt-2" if splits == ["ByteLevel"] else _SPLITS.get(regex[0]) if splits == ["Split"] else None


def _add_pieces(writer: Any, held: Mapping[str, Any], merges: Sequence[tuple[str, ...]], prefix: bool, size: int) -> list[str]:
    """Tokens of SentencePiece's BPE with their scores and kinds."""
    tokens, kinds = _tokens(held, size)
    model, scores = held["model"], [_LOW] * size
    for place, pair in enumerate(merges):
        made = model["vocab"].get("".join(pair), size)
        if made < size and scores[made] == _LOW:
            scores[made] = -float(place)
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[i] = _BYTE
    unknown = model["vocab"].get(model.get("unk_token"), size)
    if unknown < size:
        kinds[unknown] = _UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(prefix)
    listed, whole = set(merges), {t for t in model["vocab"] if len(t) > 1}
    pairs = ((t[:i], t[i:]) for t in whole for i in range(1, len(t)) if t[:i] in model["vocab"] and t[i:] in model["vocab"])
    made = {a + b for a, b in listed}
    if any(pair not in listed for pair in pairs if "".join(pair) in made):
        return [
            "The tokenizer does not list every pair that makes a token, and llama.cpp joins them all: some words become others."
        ]
    return []


def _prefix(held: Mapping[str, Any]) -> bool | None:
    """Whether a space comes before a text; None where spaces do not become SentencePiece's sign alone."""
    normal, split = held.get("normalizer") or {}, held.get("pre_tokenizer") or {}
    steps = normal.get("normalizers", [normal] if normal else [])
    kinds = [s.get("type") for s in steps]
    if kinds in (["Prepend", "Replace"], ["Replace"]) and split.get("type") in (None, "Split"):
        marks = [s.get("prepend", s.get("content")) for s in steps]
        return len(steps) == 2 if set(marks) == {_SPACE} else None
    if split.get("type") == "Metaspace" and not steps and not split.get("split") and split.get("replacement") == _SPACE:
        return bool(split.get("prepend_scheme") != "never")
    return None
