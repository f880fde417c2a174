"""The tokenizer that a GGUF file holds: byte-level BPE, or SentencePiece's BPE, which splits texts as llama.cpp does.

It is the way back of :mod:`.vocabulary`. What a file does not say, such as the Unicode form of Qwen's texts, is known of the
architectures that always have it; a rule for splitting texts that is not in the table of :mod:`.token_steps` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BadModel
from .header import GgufFile
from .token_steps import ALIASES, SPACE, WHOLE_WORDS, steps_named

_UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens; OWN is a user's
_BESIDE = "Save the tokenizer's files (tokenizer.json and its like) beside the GGUF file: they are read in its place."
_NFC = re.compile(r"qwen[23](moe)?")  # architectures whose texts have one Unicode form, which no file says
_BEGINS = ("llama-bpe", "tekken")  # llama.cpp begins a text of these where the file does not say it


def tokenizer_of(gguf_file: GgufFile) -> Any:
    """Return the fast tokenizer of transformers that a file's vocabulary makes.

    Raises:
        BadModel: The file has no vocabulary, or one that is not read.
    """
    kind, tokens = gguf_file.fields.get("tokenizer.ggml.model"), gguf_file.fields.get("tokenizer.ggml.tokens")
    if tokens is None or kind not in ("gpt2", "llama"):
        what = f"a vocabulary of the kind {kind}" if tokens is not None else "no vocabulary"
        raise gguf_file.refuse(what, _BESIDE)
    try:
        return _made(gguf_file, kind, tokens)
    except BadModel:
        raise
    except Exception as error:  # tokenizers has no class of its own
        raise BadModel(f"The vocabulary of {gguf_file.path} does not read: {error}.", "", _BESIDE) from error


def _made(gguf_file: GgufFile, kind: str, tokens: Sequence[str]) -> Any:
    """The tokenizer of a vocabulary."""
    from tokenizers import Tokenizer

    kinds = list(gguf_file.fields.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    record = (_bytes if kind == "gpt2" else _pieces)(gguf_file, tokens, kinds)
    record["added_tokens"] = [
        {"id": i, "content": tokens[i], "special": kinds[i] != _OWN, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i in _added(tokens, kinds, pieces=kind == "llama")
    ]
    record["post_processor"] = _around(gguf_file, tokens, kind)
    return _named(
        gguf_file, Tokenizer.from_str(_json({"version": "1.0", "truncation": None, "padding": None, **record})), tokens
    )


def _json(record: Mapping[str, Any]) -> str:
    import json

    return json.dumps(record)


def _added(tokens: Sequence[str], kinds: Sequence[int], *, pieces: bool) -> list[int]:
    """Tokens that are found in a text as it is written; SentencePiece's sign for a space is not in it: merges make these."""
    return [
        i for i, kind in enumerate(kinds) if kind in (_CONTROL, _OWN) or (pieces and kind == _UNKNOWN) if SPACE not in tokens[i]
    ]


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    return {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}


def _bytes(gguf_file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """A byte-level BPE."""
    name = gguf_file.fields.get("tokenizer.ggml.pre")
    name = ALIASES.get(str(name), str(name))
    if (steps := steps_named(name)) is None:
        raise gguf_file.refuse(f"tokenizer.ggml.pre = {gguf_file.fields.get('tokenizer.ggml.pre')}", _BESIDE)
    merges = [merge.split(" ", 1) for merge in gguf_file.fields.get("tokenizer.ggml.merges") or ()]
    model = {"type": "BPE", "vocab": _vocabulary(tokens, kinds), "merges": merges, "ignore_merges": name in WHOLE_WORDS}
    model |= dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" and _NFC.fullmatch(gguf_file.arch) else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": level,
        "model": {**model, "fuse_unk": False, "byte_fallback": False},
    }


def _pieces(gguf_file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """SentencePiece's BPE: llama.cpp joins whatever makes a token, the one with the best score first.

    Of equal scores llama.cpp takes the leftmost, so that it goes on with a token that it has begun, such as a run of spaces.
    Ranks cannot say "leftmost": the longer of two tokens with one score comes first, which does the same for runs.
    """
    scores = gguf_file.fields.get("tokenizer.ggml.scores")
    if scores is None:
        raise gguf_file.refuse("no tokenizer.ggml.scores", _BESIDE)
    vocab = _vocabulary(tokens, kinds)
    whole = [(token, i) for token, i in vocab.items() if kinds[i] not in (_BYTE, _CONTROL, _UNKNOWN) and len(token) > 1]
    pairs = []
    for token, i in whole:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        inside = [(a, b) for a, b in halves if a in vocab and b in vocab]
        pairs += [(-scores[i], -len(token), i, pair) for pair in sorted(inside, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    merges = [list(pair) for *_, pair in sorted(pairs, key=lambda p: p[:3])]
    prefix = gguf_file.fields.get("tokenizer.ggml.add_space_prefix", True)
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": False, "unk_token": unknown}
    model |= dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {**model, "fuse_unk": True, "byte_fallback": True},
    }


def _around(gguf_file: GgufFile, tokens: Sequence[str], kind: str) -> dict[str, Any] | None:
    """Return the post-processor that puts the tokens that begin and end a text around it."""
    begins = kind == "llama" or gguf_file.fields.get("tokenizer.ggml.pre") in _BEGINS
    ends, template, special = {"bos": begins, "eos": False}, [{"Sequence": {"id": "A", "type_id": 0}}], {}
    for name, usual in ends.items():
        token = _special(gguf_file, name, tokens)
        if token is not None and gguf_file.fields.get(f"tokenizer.ggml.add_{name}_token", usual):
            word = {"SpecialToken": {"id": tokens[token], "type_id": 0}}
            template = [word, *template] if name == "bos" else [*template, word]
            special[tokens[token]] = {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
    if not special:
        return None
    pair = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": template, "pair": pair, "special_tokens": special}


def _special(gguf_file: GgufFile, name: str, tokens: Sequence[str]) -> int | None:
    token = gguf_file.fields.get(f"tokenizer.ggml.{name}_token_id")
    return int(token) if token is not None and token < len(tokens) else None


def _named(gguf_file: GgufFile, backend: Any, tokens: Sequence[str]) -> Any:
    """The tokenizer of transformers around one of tokenizers, with its special tokens and templates of chats."""
    from transformers import PreTrainedTokenizerFast

    kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
    named = {f"{kind}_token": _special(gguf_file, name, tokens) for kind, name in kinds.items()}
    more: dict[str, Any] = {kind: tokens[token] for kind, token in named.items() if token is not None}
    templates = {
        n: gguf_file.fields.get(f"tokenizer.chat_template.{n}") for n in gguf_file.fields.get("tokenizer.chat_templates") or ()
    }
    default = gguf_file.fields.get("tokenizer.chat_template")
    if templates:
        more["chat_template"] = {**({"default": default} if default else {}), **templates}
    elif default:
        more["chat_template"] = default
    length = gguf_file.said.get("context_length")
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **({"model_max_length": length} if length else {}), **more
    )
    if max(made("a")["input_ids"], default=0) >= len(tokens):
        raise BadModel(f"{gguf_file.path} has a vocabulary that makes tokens beyond it.", "", _BESIDE)
    return made
