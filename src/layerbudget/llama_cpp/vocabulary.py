"""The vocabulary of a GGUF file: byte-level BPE, or SentencePiece's BPE with a byte for what it does not know. No torch.

llama.cpp merges SentencePiece's symbols by the score of what comes out, tokenizers by the place of the pair in a list. So the
score is minus the first place of a token in the list. The two agree where the list has every pair that makes a token, as it has
in conversions of SentencePiece's files. Where llama.cpp makes other tokens of a text, a note says so: see
:mod:`~layerbudget.gguf.token_steps`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..gguf.token_steps import SPACE, byte_level_notes, hidden, piece_notes, prefix_of, split_of, steering, steps_of

_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens; OWN is a user's
_LOW = -10_000.0  # the score of tokens that no merge makes
# llama.cpp ends a text at tokens of these names, whatever the file says.
_ENDS = re.compile(
    r"<\|(eot_id|im_end|end|return|call|flush|calls|endoftext|eom_id|end_of_text)\|>|<end_of_turn>|</s>|_?<EOT>|\[EO[TS]\]"
    r"|<end_of_utterance>|<eos>|<turn\|>|<\|tool_response>|<｜end▁of▁sentence｜>"
)
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_PHI3 = frozenset(("</s>", "<unk>", "<s>", "<|endoftext|>"))  # those that llama.cpp looks up
_WHOLE_CONTEXT = -1  # tokens that a penalty of repetition looks back at: transformers looks at all


def add_vocabulary(writer: Any, tokenizer: Any, size: int, configs: Sequence[Any] = (), generation: Any = None) -> list[str]:
    """Write the vocabulary of a tokenizer, with what llama.cpp needs to split texts as it does; returns notes.

    Args:
        writer: Of the package ``gguf``.
        tokenizer: A fast tokenizer of transformers; others, and None, are left out.
        size: Tokens of the model; those that the tokenizer does not have are unused.
        configs: The model's configurations: their special tokens stand where the tokenizer names none.
        generation: The model's ``generation_config``: how texts are sampled, and all tokens at which a text ends.
    """
    _add_sampling(writer, generation)
    notes: list[str] = []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tokenizer_json: Mapping[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model, name = tokenizer_json.get("model") or {}, _name(writer)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges") or ()]
    if model.get("type") == "BPE" and any(step["type"] == "ByteLevel" for step in steps_of(tokenizer_json)):
        _add_byte_level(writer, tokenizer_json, merges, size)
        notes += byte_level_notes(tokenizer_json, backend, name)
    elif model.get("type") == "BPE" and model.get("byte_fallback") and (prefix := prefix_of(tokenizer_json)) is not None:
        _add_pieces(writer, tokenizer_json, merges, prefix, size)
        notes += piece_notes(tokenizer_json, merges, name)
    else:
        writer.add_tokenizer_model("no_vocab")
        return [
            "The tokenizer is no byte-level BPE and none of SentencePiece; the file holds no vocabulary, and llama.cpp is to "
            "be given token numbers.",
        ]
    notes += _Special(tokenizer, size, configs, generation).add(writer)
    return notes + _add_templates(writer, tokenizer)


def name_in_file(name: str, tokenizer: Any) -> str:
    """Return the name of a model in its file: llama.cpp loads none with phi3 in it whose vocabulary lacks tokens of Phi-3."""
    named = "phi-3" in name.lower() or "phi3" in name.lower()
    return "model" if named and not _PHI3.issubset(getattr(tokenizer, "get_vocab", dict)()) else name


def _name(writer: Any) -> str:
    """The name of the model that is in the file by now."""
    name = next((kv["general.name"].value for kv in writer.kv_data if "general.name" in kv), "")
    return str(name)


def _tokens(tokenizer_json: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every token's text and kind, no text twice. llama.cpp finds added tokens as they are written, before it splits a text."""
    added = tokenizer_json.get("added_tokens", [])
    known = {**tokenizer_json["model"]["vocab"], **{t["content"]: t["id"] for t in added}}
    tokens, kinds = [""] * size, [_UNUSED] * size
    for token, i in known.items():
        if i < size:
            tokens[i], kinds[i] = token, _NORMAL
    for each in (t for t in added if t["id"] < size):
        i, token = each["id"], each["content"]
        if each.get("special") or steering(token):
            kinds[i] = _CONTROL
        elif not hidden(each):
            written = token.replace(SPACE, " ")
            tokens[i], kinds[i] = token if written in known else written, _OWN
    for i, kind in enumerate(kinds):
        if kind == _UNUSED:
            tokens[i] = f"[PAD{i}]" if f"[PAD{i}]" not in known else f"[UNUSED{i}]"
    return tokens, kinds


def _add_byte_level(writer: Any, tokenizer_json: Mapping[str, Any], merges: Sequence[tuple[str, ...]], size: int) -> None:
    """Tokens and merges of a byte-level BPE."""
    tokens, kinds = _tokens(tokenizer_json, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_of(tokenizer_json) or "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(m) for m in merges])


def _add_pieces(
    writer: Any, tokenizer_json: Mapping[str, Any], merges: Sequence[tuple[str, ...]], prefix: bool, size: int
) -> None:
    """Tokens of SentencePiece's BPE with their scores and kinds."""
    tokens, kinds = _tokens(tokenizer_json, size)
    model, scores = tokenizer_json["model"], [_LOW] * size
    for place, pair in enumerate(merges):
        made = model["vocab"].get("".join(pair), size)
        if made < size and scores[made] == _LOW:
            scores[made] = -float(place)
    for i, token in enumerate(tokens):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
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


@dataclasses.dataclass
class _Special:
    """The special tokens of a model: of its tokenizer, else of its configuration, as transformers uses them."""

    tokenizer: Any
    size: int
    configs: Sequence[Any]
    generation: Any

    def add(self, writer: Any) -> list[str]:
        """Write them, and whether they stand around a text; returns notes. llama.cpp takes others where the file names none."""
        begin, notes = self.named("bos"), list[str]()
        before, behind = self._around()
        if before is None or behind is None or len(before) > 1 or len(behind) > 1:
            notes.append("The tokenizer puts several tokens around a text, and llama.cpp one on a side, or none.")
            before, behind = (before or [])[-1:], (behind or [])[:1]
        if before and begin is not None and begin != before[0]:
            notes.append(f"{self.word(begin)} is to begin a text, and the tokenizer puts {self.word(before[0])}.")
        begin = before[0] if before else begin
        stops = list(dict.fromkeys((*behind, *_listed(self.named("eos")), *self.stops())))
        if not stops:
            stops = [self._spare(begin)]
            notes.append(
                f"Neither tokenizer nor configuration names the token that ends a text; the file names {self.word(stops[0])}. "
                "Set eos_token_id in generation_config.json."
            )
        more = [i for i in stops[1:] if not _ENDS.fullmatch(self.word(i))]
        if more[2:]:
            notes.append(f"transformers ends a text at {', '.join(map(self.word, more[2:]))} too, and llama.cpp does not.")
        special_tokens = {
            "bos": stops[0] if begin is None else begin,
            "eos": stops[0],
            **dict(zip(("eot", "eom"), more, strict=False)),
        }
        special_tokens |= {kind: token for kind in ("unk", "sep", "pad", "mask") if (token := self.named(kind)) is not None}
        for kind, token in special_tokens.items():
            getattr(writer, f"add_{kind}_token_id")(token)
        writer.add_add_bos_token(bool(before))
        if behind:
            writer.add_add_eos_token(True)
        return notes + self._beyond()

    def named(self, kind: str) -> int | None:
        """The token of a kind that the model has: of the tokenizer, the configurations, or of generation."""
        key = f"{kind}_token_id"
        for source in (self.tokenizer, *self.configs, self.generation):
            for token in _listed(getattr(source, key, None)):
                if 0 <= token < self.size:
                    return token
        return None

    def stops(self) -> list[int]:
        """The tokens at which transformers ends a text that it makes."""
        sources = [_listed(getattr(s, "eos_token_id", None)) for s in (self.generation, *self.configs)]
        return [i for i in next(filter(None, sources), []) if 0 <= i < self.size]

    def word(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token) or f"[PAD{token}]")

    def _around(self) -> tuple[list[int] | None, list[int] | None]:
        """Return the tokens that the tokenizer puts before and behind a text; None where it changes the text between."""
        whole = self.tokenizer("a")["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
        if not starts:
            return None, None
        return whole[: starts[0]], whole[starts[0] + len(bare) :]

    def _spare(self, begin: int | None) -> int:
        """A token that ends no text by chance: an unused one, the one for padding, or the one that begins a text."""
        if self.tokenizer.convert_ids_to_tokens(self.size - 1) is None:
            return self.size - 1
        return next((i for i in (self.named("pad"), begin, self.named("unk")) if i is not None), self.size - 1)

    def _beyond(self) -> list[str]:
        """A note on tokens of the tokenizer that the model has no room for."""
        beyond = sorted(i for i in self.tokenizer.get_vocab().values() if i >= self.size)
        if not beyond:
            return []
        return [
            f"The model has {self.size:,} tokens, and the file none of {len(beyond)} more, the first {self.word(beyond[0])!r}."
        ]


def _listed(value: Any) -> list[int]:
    """A token, or several, as a list."""
    many = value if isinstance(value, (list, tuple)) else [value]
    return [i for i in many if isinstance(i, int) and not isinstance(i, bool)]


def _add_sampling(writer: Any, generation: Any) -> None:
    """How the model's texts are sampled; one that takes the likeliest token has a temperature of 0."""
    named = {n: getattr(generation, n, None) for n in _SAMPLING}
    sampling = {n: v for n, v in named.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    if getattr(generation, "do_sample", None) is False:
        sampling = {n: v for n, v in sampling.items() if n == "repetition_penalty"} | {"temperature": 0.0}
    for name, value in sampling.items():
        getattr(writer, f"add_sampling_{_SAMPLING[name]}")(value)
    if "repetition_penalty" in sampling:
        writer.add_sampling_penalty_last_n(_WHOLE_CONTEXT)


def _add_templates(writer: Any, tokenizer: Any) -> list[str]:
    """The chat templates by name, in one order; returns notes."""
    templates = getattr(tokenizer, "chat_template", None) or _processor_template(tokenizer)
    if isinstance(templates, str):
        templates = {"default": templates}
    if not isinstance(templates, Mapping):
        return []
    named = {re.sub("[^a-zA-Z0-9]", "_", str(n)): t for n, t in templates.items() if isinstance(t, str)}
    others, notes = sorted(n for n in named if n != "default"), list[str]()
    if len(named) < len(templates):
        notes.append(
            "Names of chat templates have letters and digits in a GGUF file: some are one there, and some are left out."
        )
    for name in others:
        writer.add_string(f"tokenizer.chat_template.{name}", named[name])
    if others:
        writer.add_array("tokenizer.chat_templates", others)
    if "default" in named:
        writer.add_chat_template(named["default"])
    else:
        notes.append(
            f"No chat template is the default one ({', '.join(others)}), and llama.cpp takes ChatML where none is named."
        )
    return notes


def _processor_template(tokenizer: Any) -> Any:
    """The chat template that a folder has in a file of its processor."""
    file = Path(str(getattr(tokenizer, "name_or_path", ""))) / "chat_template.json"
    if not file.is_file():
        return None
    record = json.loads(file.read_text("utf-8"))
    return record.get("chat_template") if isinstance(record, dict) else None
