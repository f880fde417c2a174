"""Steps of llama.cpp on a text before its tokens, beside what a tokenizer does: names that it has, and notes. No torch.

llama.cpp looks for added tokens in the text as it is written, the longest ones first. What is left it splits by the rule that
the file names, and merges. It changes no characters, and puts a space before a text of SentencePiece's kind alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "\u2581"
_GPT2, _MARKS, _WORDS = "GPT-2", "marks", r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT, _REST = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DIGIT, _ASCII = r"\p{N}", "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
# llama.cpp's names of what splits a text before the merges, by the steps that tokenizer.json holds.
_SPLITS: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    (_DIGIT, _GPT2): "starcoder",
    (rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",): "llama-bpe",
    (rf"{_SHORT}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",): "qwen2",
    (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",): "qwen35",
    (rf"{_SHORT}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}",): "seed-coder",
    (rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",): "tekken",
    (
        rf"{_UPPER}*{_LOWER}+{_SHORT}?|{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    ): "gpt-4o",
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
    ): "deepseek-v3",
    (_MARKS, _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT): "deepseek-coder",
}
#: Other names that llama.cpp has for the same steps.
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("smollm", "refact", "command-r"), "starcoder"),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen"), "qwen2"),
    **dict.fromkeys(("gpt2", "phi-2", "olmo", "roberta-bpe"), "gpt-2"),
    "llama4": "gpt-4o",
}
WHOLE_WORDS = ("llama-bpe", "tekken")  # llama.cpp takes a word that is a token as it is: the tokenizer's ignore_merges
_ASCII_CASES = ("tekken", "gpt-4o")  # it tells capital letters from small ones in ASCII only, and takes no marks for letters
_RULE = "llama.cpp splits texts as GPT-2 does here, the tokenizer by a rule of its own: some words become other tokens."


def steps_of(
    tokenizer_json: Mapping[str, Any], name: str = "pre_tokenizer", inside: str = "pretokenizers"
) -> list[Mapping[str, Any]]:
    """Return the steps of one stage of a tokenizer, by default of what splits a text before the merges."""
    step = tokenizer_json.get(name)
    return [] if step is None else [s for s in step[inside] or ()] if step["type"] == "Sequence" else [step]


def normalizers_of(tokenizer_json: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the steps that change the characters of a text."""
    return steps_of(tokenizer_json, "normalizer", "normalizers")


def split_of(tokenizer_json: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of what splits a text; None where it has none."""
    steps = [_split_step(s) for s in steps_of(tokenizer_json)]
    return None if None in steps else _SPLITS.get(tuple(s for s in steps if s))


def steps_named(name: str) -> list[dict[str, Any]] | None:
    """Return the steps of that name in llama.cpp, as ``tokenizer.json`` has them; None where they are not known."""
    steps: list[dict[str, Any]] = []
    words = next((words for words, known in _SPLITS.items() if known == name), None)
    for word in words or ():
        if word == _GPT2:
            steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True})
        elif word == _DIGIT:
            steps.append({"type": "Digits", "individual_digits": True})
        elif word == _MARKS:
            steps.append({"type": "Punctuation", "behavior": "Contiguous"})
        else:
            steps.append({"type": "Split", "pattern": {"Regex": word}, "behavior": "Isolated", "invert": False})
    if steps and _GPT2 not in (words or ()):
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return steps or None


def _split_step(step: Mapping[str, Any]) -> str | None:
    """A step in the words of the table; empty where it splits nothing, None where the table has no word for it."""
    kind = step["type"]
    if kind == "ByteLevel":
        return _GPT2 if step.get("use_regex", True) else ""
    if kind == "Digits" and step.get("individual_digits"):
        return _DIGIT
    if kind == "Punctuation" and step.get("behavior") == "Contiguous":
        return _MARKS
    isolated = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    if kind == "Split" and isolated:
        return step["pattern"].get("Regex")
    return None


def byte_level_notes(tokenizer_json: Mapping[str, Any], backend: Any, name: str) -> list[str]:
    """Return what llama.cpp does otherwise with a byte-level BPE.

    Args:
        tokenizer_json: The tokenizer, as ``tokenizer.json`` has it.
        backend: The same as an object of tokenizers.
        name: Of the model: llama.cpp reads it.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    notes, known = [], split_of(tokenizer_json)
    if known is None:
        notes.append(_RULE)
    if known in _ASCII_CASES:
        notes.append(
            "llama.cpp knows capital letters of ASCII alone where it splits words, and takes no combining marks for letters: "
            "some words of other alphabets become other tokens."
        )
    if any(s["type"] == "ByteLevel" and s.get("add_prefix_space") for s in steps_of(tokenizer_json)):
        notes.append("The tokenizer puts a space before a text, and llama.cpp does not: the first word becomes another token.")
    if kinds := [s["type"] for s in normalizers_of(tokenizer_json)]:
        notes.append(
            f"The tokenizer changes characters before it splits a text ({', '.join(kinds)}), and llama.cpp does not: "
            "texts that it changes become other tokens."
        )
    vocab = tokenizer_json["model"]["vocab"]
    if tokenizer_json["model"].get("unk_token") and (lacks := [c for c in ByteLevel.alphabet() if c not in vocab]):
        notes.append(
            f"The vocabulary has no token for {len(lacks)} of 256 bytes: the tokenizer makes unknown ones, llama.cpp none."
        )
    whole = bool(tokenizer_json["model"].get("ignore_merges"))
    if whole != (known in WHOLE_WORDS) and (words := _unmerged(tokenizer_json, backend)):
        does, other = ("The tokenizer", "llama.cpp") if whole else ("llama.cpp", "the tokenizer")
        notes.append(f"{does} takes {len(words)} words whole that {other} merges into others, the first {words[0]!r}.")
    return [*notes, *merging_notes(tokenizer_json), *added_notes(tokenizer_json, name)]


def _unmerged(tokenizer_json: Mapping[str, Any], backend: Any) -> list[str]:
    """The words of a vocabulary that its merges do not make."""
    from tokenizers import Tokenizer

    model = {**tokenizer_json["model"], "ignore_merges": False, "dropout": None}
    bare = Tokenizer.from_str(json.dumps({**tokenizer_json, "model": model, "added_tokens": [], "post_processor": None})).model
    added = {t["content"] for t in tokenizer_json.get("added_tokens", ())}
    return [w for w in tokenizer_json["model"]["vocab"] if w not in added and len(w) > 1 and len(bare.tokenize(w)) != 1]


def merging_notes(tokenizer_json: Mapping[str, Any]) -> list[str]:
    """Return what llama.cpp leaves out of merging."""
    model, notes = tokenizer_json["model"], []
    if model.get("dropout"):
        notes.append(
            f"The tokenizer leaves out merges at random (dropout {model['dropout']:g}), and llama.cpp makes all of them."
        )
    if marks := [m for m in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(m)]:
        notes.append(
            f"The tokenizer marks parts of words ({', '.join(marks)}), and llama.cpp does not: words become other tokens."
        )
    return notes


def added_notes(tokenizer_json: Mapping[str, Any], name: str) -> list[str]:
    """Return what llama.cpp does otherwise with added tokens, which it finds in the text as it is written."""
    added, notes = tokenizer_json.get("added_tokens", ()), []
    takes = "phi-3" in name.lower() or "phi3" in name.lower()  # llama.cpp's own rule, by the name of the model
    for key, words in (
        ("lstrip", "take the spaces before them"),
        ("rstrip", "take the spaces after them"),
        ("single_word", "are found as whole words only"),
    ):
        which = [t["content"] for t in added if t.get(key)]
        if which and not (key == "rstrip" and takes):
            notes.append(f"In the tokenizer {_first(which)} {words}, and in llama.cpp they do not: texts with them differ.")
    if normalizers_of(tokenizer_json) and (
        late := [t["content"] for t in added if t.get("normalized") and not t.get("special")]
    ):
        notes.append(f"The tokenizer looks for {_first(late)} after it changed characters, and llama.cpp before.")
    if pair := _overlap([t["content"] for t in added]):
        notes.append(
            f"Added tokens overlap, such as {pair[0]!r} and {pair[1]!r}. llama.cpp takes the longest one first, the tokenizer "
            "the one that begins first."
        )
    return notes


def _first(words: Sequence[str]) -> str:
    return f"{words[0]!r}" if len(words) == 1 else f"{len(words)} added tokens, the first {words[0]!r},"


def _overlap(words: Sequence[str]) -> tuple[str, str] | None:
    """Two words of which the second begins inside the first and ends behind it; runs of one character are read alike."""
    begins: dict[str, str] = {}
    for word in words:
        for stop in range(1, len(word)):
            kept = begins.setdefault(word[:stop], word)
            if len(word) > len(kept):
                begins[word[:stop]] = word
    for word in words:
        for start in range(1, len(word)):
            other = begins.get(word[start:])
            if other is not None and len(set(word) | set(other)) > 1:
                return word, other
    return None


def prefix_of(tokenizer_json: Mapping[str, Any]) -> bool | None:
    """Return whether a space comes before a text; None where spaces do not become SentencePiece's sign alone."""
    split, steps = tokenizer_json.get("pre_tokenizer") or {}, normalizers_of(tokenizer_json)
    kinds = [s.get("type") for s in steps]
    if kinds in (["Prepend", "Replace"], ["Replace"]) and split.get("type") in (None, "Split"):
        marks = [s.get("prepend", s.get("content")) for s in steps]
        if split and not (split.get("pattern") == {"String": " "}):  # no space is left then
            return None
        return len(steps) == 2 if set(marks) == {SPACE} and steps[-1].get("pattern") == {"String": " "} else None
    if split.get("type") == "Metaspace" and not steps and split.get("replacement") == SPACE:
        if split.get("split", True) and any(SPACE in t[1:] for t in _merged(tokenizer_json)):
            return None
        return bool(split.get("prepend_scheme") != "never")
    return None


def _merged(tokenizer_json: Mapping[str, Any]) -> list[str]:
    """Return the tokens that the merges of a vocabulary make."""
    return [m.replace(" ", "", 1) if isinstance(m, str) else "".join(m) for m in tokenizer_json["model"].get("merges") or ()]


def piece_notes(tokenizer_json: Mapping[str, Any], merges: Sequence[tuple[str, ...]], name: str) -> list[str]:
    """Return what llama.cpp does otherwise with SentencePiece's BPE; arguments as those of :func:`byte_level_notes`."""
    notes, model = [], tokenizer_json["model"]
    listed, whole = set(merges), {t for t in model["vocab"] if len(t) > 1}
    pairs = ((t[:i], t[i:]) for t in whole for i in range(1, len(t)) if t[:i] in model["vocab"] and t[i:] in model["vocab"])
    made = {a + b for a, b in listed}
    if any(pair not in listed for pair in pairs if "".join(pair) in made):
        notes.append(
            "The tokenizer does not list every pair that makes a token, and llama.cpp joins them all: some words become others."
        )
    scheme = (tokenizer_json.get("pre_tokenizer") or {}).get("prepend_scheme", "never")
    if scheme != "never":
        notes.append("Before a text that begins with a space llama.cpp puts another one, the tokenizer none.")
    if scheme == "first" and tokenizer_json.get("added_tokens"):
        notes.append("Behind an added token llama.cpp puts a space before the text, the tokenizer at the beginning alone.")
    if model.get("ignore_merges"):
        notes.append("The tokenizer takes a text that is a token as it is, and llama.cpp merges it.")
    lacks = [b for b in range(256) if f"<0x{b:02X}>" not in model["vocab"]]
    if lacks:
        notes.append(
            f"The vocabulary has no token for {len(lacks)} of 256 bytes, and llama.cpp ends at a text that needs them."
        )
    if lost := [t["content"] for t in tokenizer_json.get("added_tokens", ()) if hidden(t) and t["content"] not in made]:
        notes.append(f"The tokenizer never makes {_first(lost)} of a text, and llama.cpp does.")
    effective = {**tokenizer_json, "normalizer": None} if not _prepends(tokenizer_json) else tokenizer_json
    return [*notes, *merging_notes(tokenizer_json), *added_notes(effective, name)]


def _prepends(tokenizer_json: Mapping[str, Any]) -> bool:
    return any(s["type"] == "Prepend" for s in normalizers_of(tokenizer_json))


def hidden(token: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer does not find an added token in a text: it has SentencePiece's sign for a space, and the text
    still has spaces. Merges may make it.
    """
    return SPACE in token["content"] and not token.get("normalized")


def steering(token: str) -> bool:
    """Return whether an added token steers a model although its tokenizer does not call it special: llama.cpp's converter
    knows these.
    """
    return _STEERING.fullmatch(token) is not None


_STEERING = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
