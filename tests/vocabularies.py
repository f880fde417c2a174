"""Tokenizers of many kinds, made here, and texts that tell them apart: for comparing llama.cpp's tokens with transformers'."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXTS: tuple[str, ...] = (
    "",
    "x",
    "The cat sat on the mat.",
    "  two spaces, and  more   of them",
    " one space before",
    "a space behind ",
    "a\nline and\n\n another\ttab",
    "\n\n\nnewlines\r\nof two kinds\r\n\r\n",
    "I don't know, it's there, we'LL see, THEY'RE",
    "x\n'type'\n'data'",
    "iPhone 12345 and a/b//\n",
    "d['self'] = 'test'",
    "numbers 1 12 123 1234 12345 123456 1234567 3.14159",
    " 12 345 6789",
    "½ Ⅷ ² ٣٤٥ 三",
    "naïve café, 東京 and \U0001f600!",
    "e\u0301te\u0301 A\u030a cafe\u0301s",
    "ÉCOLE école éÉ ÀÉÎ straßE ΑΒγδ Привет МИР миР",
    "\uff21\uff22\uff23 full width, \ufb01 ligature",
    "你好，世界！这是一个测试。",
    "こんにちは世界、カタカナとひらがな",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "שלום עולם",
    "the theatre, their thesis; other otherwise",
    "HTTPServerError camelCase snake_case kebab-case",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b[i] * c; }",
    '<html><body class="x">text &amp; more</body></html>',
    "$100 + 5% = ^~|`<>",
    "(parentheses) [brackets] {braces} \"quotes\" 'single'",
    "e-mail: some.one@example.org, https://example.org/a?b=c&d=e#f",
    "... !!! ??? --- ___ ***",
    "“curly” ‘quotes’ — dash… ellipsis",
    "tabs\t\tand \t mixed \n \t\n spaces",
    "\u00a0no-break\u2003em space\u200bzero width",
    "👩‍👩‍👧‍👦 🏳️‍🌈 emoji",
    "a <tool> b<tool>c",
    "x <tool>  y",
    "<s>the thing</s> and then",
    "the thing</s>\n<s>there",
    "<|im_start|>user\nthe thing<|im_end|>\n",
    "toolbox <tool>box sub<tool>",
    "the thing that there is thought through then and there",
    "the thing that there is thought through then and there " * 4,
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor.",
    "aaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbb",
    "▁ is SentencePiece's sign, Ġ is that of bytes",
)
_LEARNT = [*TEXTS, *("the thing that there is thought through then and there, other otherwise " * 3,) * 4, *TEXTS]
_WORD, _END = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT, _ASCII = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
#: What splits a text, by the name that llama.cpp has for it; several patterns are steps one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}",),
    "qwen2": (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}",),
    "qwen35": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}",),
    "seed-coder": (rf"{_SHORT}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}",),
    "tekken": (rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}",),
    "gpt-4o": (
        rf"{_UPPER}*{_LOWER}+{_SHORT}?|{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}


def fast(backend: Any, **names: Any) -> Any:
    """A tokenizer of transformers around one of tokenizers."""
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **{"bos_token": "<s>", "eos_token": "</s>", **names})


@functools.cache
def _of_bytes(steps: tuple[str, ...] | None, size: int) -> str:
    """A tokenizer of bytes as text; without patterns it splits texts as GPT-2 does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    learner, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    splits = [pre_tokenizers.Split(Regex(s), "isolated") for s in steps or ()]
    last = byte_level(add_prefix_space=False, use_regex=steps is None)
    learner.pre_tokenizer, learner.decoder = pre_tokenizers.Sequence([*splits, last]), decoders.ByteLevel()
    if steps is None:
        learner.pre_tokenizer = last
    own = {"show_progress": False, "special_tokens": ["<s>", "</s>", "<pad>"], "initial_alphabet": byte_level.alphabet()}
    learner.train_from_iterator(_LEARNT, trainers.BpeTrainer(vocab_size=size, **own))
    return str(learner.to_str())


def of_bytes(
    steps: tuple[str, ...] | None = None, change: Callable[[dict[str, Any]], object] | None = None, **names: Any
) -> Any:
    """A fast tokenizer of bytes, with a change to its ``tokenizer.json``."""
    from tokenizers import Tokenizer

    held = json.loads(_of_bytes(steps, 700))
    if change is not None:
        change(held)
    return fast(Tokenizer.from_str(json.dumps(held)), **names)


@functools.cache
def _pieces() -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Vocabulary and merges as transformers makes them from SentencePiece's file: all pairs of every token.

    Only the commonest characters are learnt. They are chosen here: the trainer's own limit breaks ties at random.
    """
    from tokenizers import Tokenizer, models, normalizers, trainers

    words = [w for t in _LEARNT for w in t.split() if "▁" not in w]
    counts = collections.Counter("".join(words))
    rare = dict.fromkeys(map(ord, sorted(counts, key=lambda c: (-counts[c], c))[89:]), " ")

    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=["▁"])
    learner.train_from_iterator([part for w in words for part in w.translate(rare).split()], trainer)
    learnt = [t for t, _ in sorted(learner.get_vocab().items(), key=lambda item: item[1])]
    vocab = {t: i for i, t in enumerate(("<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *learnt))}
    joined = [t for t in learnt if len(t) > 1]
    merges = tuple((t[:i], t[i:]) for t in joined for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab)
    return vocab, merges


def of_pieces(scheme: str, change: Callable[[dict[str, Any]], object] | None = None, **names: Any) -> Any:
    """A fast tokenizer of SentencePiece's kind: ``llama``, ``gemma``, or ``first``, ``always``, ``words`` with Metaspace."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab, merges = _pieces()
    backend = Tokenizer(models.BPE(vocab, list(merges), unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme in ("llama", "gemma"):
        steps = [normalizers.Prepend("▁")] * (scheme == "llama") + [normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if scheme == "gemma" else None
    else:
        prepend = "always" if scheme == "words" else scheme
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=scheme == "words")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    held = json.loads(backend.to_str())
    if change is not None:
        change(held)
    made = fast(Tokenizer.from_str(json.dumps(held)), **{"unk_token": "<unk>", **names})
    return made


def of_words() -> Any:
    """A WordPiece tokenizer, as BERT's, of letters: its trainer breaks ties at random."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    letters = string.ascii_lowercase
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return fast(backend, bos_token="[CLS]", eos_token="[SEP]")


def of_unigrams() -> Any:
    """A unigram tokenizer, as T5's, of letters: what its trainer learns is another in every process."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    scores = {token: 0.0 for token in ("<pad>", "</s>", "<unk>")} | {token: -4.0 for token in ("▁", *string.ascii_lowercase)}
    backend = Tokenizer(models.Unigram(list(scores.items()), unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return fast(backend, bos_token=None, eos_token="</s>", unk_token="<unk>")


def with_tokens(tokenizer: Any, *tokens: str, **options: Any) -> Any:
    """The tokenizer with added tokens."""
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(t, **{"normalized": False, **options}) for t in tokens])
    return tokenizer


def around(tokenizer: Any, template: str) -> Any:
    """The tokenizer with tokens that it puts around a text, such as ``<s> $A </s>``."""
    from tokenizers import processors

    special = [(t, tokenizer.convert_tokens_to_ids(t)) for t in dict.fromkeys(template.split()) if t != "$A"]
    post = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = post
    return tokenizer


def _normalise(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    one = steps[0] if len(steps) == 1 else {"type": "Sequence", "normalizers": list(steps)}
    return lambda held: held.update(normalizer=one)


def _space_first(held: dict[str, Any]) -> None:
    held["pre_tokenizer"]["add_prefix_space"] = True


def _split_first(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda held: held.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, held["pre_tokenizer"]]})


def _falcon(held: dict[str, Any], *more: dict[str, Any]) -> None:
    hundreds = {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}
    steps = [{"type": "Punctuation", "behavior": "Contiguous"}, held["pre_tokenizer"], *more, hundreds]
    held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def _lacking(held: dict[str, Any]) -> None:
    """Take the characters of some bytes out of the vocabulary, and give it a token for what it does not know."""
    model, gone = held["model"], "xyzÃ"
    kept = [t for t in model["vocab"] if not set(t) & set(gone)]
    model["merges"] = [m for m in model["merges"] if not set("".join(m)) & set(gone)]
    model.update(vocab={t: i for i, t in enumerate(kept)}, unk_token="<pad>")


def _lost(held: dict[str, Any]) -> None:
    """Leave out merges, so that some words of the vocabulary are no longer made, and are taken whole."""
    held["model"].update(ignore_merges=True, merges=held["model"]["merges"][:200])


def _runs(held: dict[str, Any]) -> None:
    """Tokens of two and four spaces, with their merges."""
    model = held["model"]
    for run in ("▁▁", "▁▁▁▁"):
        model["vocab"][run] = len(model["vocab"])
        model["merges"].append([run[: len(run) // 2]] * 2)


def _with(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda held: held["model"].update(changes)


def _digits(individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


_CUT = {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}
#: What makes every tokenizer, by name.
MADE: dict[str, Callable[[], Any]] = {
    "bytes, GPT-2": of_bytes,
    "bytes, StarCoder": lambda: of_bytes(change=_split_first(_digits(True))),
    **{f"bytes, {name}": functools.partial(of_bytes, steps) for name, steps in SPLITS.items()},
    "bytes, Falcon": lambda: of_bytes(change=_falcon),
    "bytes, Falcon, digits": lambda: of_bytes(change=lambda held: _falcon(held, _digits(False))),
    "bytes, a rule of its own": lambda: of_bytes((r"\p{L}+|[^\p{L}]+",)),
    "pieces, Llama 2": lambda: of_pieces("llama"),
    "pieces, Gemma": lambda: of_pieces("gemma"),
    "pieces, Metaspace first": lambda: of_pieces("first"),
    "pieces, Metaspace always": lambda: of_pieces("always"),
    "pieces, Metaspace words": lambda: of_pieces("words"),
    "words, BERT": of_words,
    "unigrams, T5": of_unigrams,
    "bytes, a space first": lambda: of_bytes(change=_space_first),
    "bytes, lower case": lambda: of_bytes(change=_normalise({"type": "Lowercase"})),
    "bytes, NFC": lambda: of_bytes(SPLITS["qwen2"], change=_normalise({"type": "NFC"})),
    "bytes, NFD and strip": lambda: of_bytes(
        change=_normalise({"type": "NFD"}, {"type": "StripAccents"}, {"type": "Strip", "strip_left": True, "strip_right": True})
    ),
    "bytes, replace": lambda: of_bytes(change=_normalise({"type": "Replace", "pattern": {"String": "the"}, "content": "a"})),
    "bytes, no special tokens named": lambda: of_bytes(bos_token=None, eos_token=None),
    "bytes, begin": lambda: around(of_bytes(), "<s> $A"),
    "bytes, begin, not named": lambda: around(of_bytes(bos_token=None, eos_token=None), "<s> $A"),
    "bytes, begin and end": lambda: around(of_bytes(SPLITS["llama-bpe"]), "<s> $A </s>"),
    "bytes, another end": lambda: around(of_bytes(), "$A <pad>"),
    "bytes, two in front": lambda: around(of_bytes(), "<s> <pad> $A"),
    "bytes, words taken whole": lambda: of_bytes(change=_lost),
    "bytes, Llama 3, merges": lambda: of_bytes(SPLITS["llama-bpe"], change=_with(ignore_merges=True)),
    "bytes, some missing": lambda: of_bytes(change=_lacking),
    "bytes, dropout": lambda: of_bytes(change=_with(dropout=0.9)),
    "bytes, truncation": lambda: of_bytes(change=lambda held: held.update(_CUT)),
    "bytes, padding": lambda: of_bytes(
        change=lambda held: held.update(
            padding={
                "strategy": {"Fixed": 50},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 2,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        ),
    ),
    "bytes, added tokens": lambda: with_tokens(of_bytes(), "<tool>", "<|im_start|>", "<|im_end|>"),
    "bytes, added, left": lambda: with_tokens(of_bytes(), "<tool>", lstrip=True),
    "bytes, added, right": lambda: with_tokens(of_bytes(), "<tool>", rstrip=True),
    "bytes, added, whole word": lambda: with_tokens(of_bytes(), "<tool>", single_word=True),
    "bytes, added, overlapping": lambda: with_tokens(of_bytes(), "the thing", "thing there", "ing that there is"),
    "bytes, added, nested": lambda: with_tokens(of_bytes(), "the", "the thing"),
    "bytes, added, normalised": lambda: with_tokens(
        of_bytes(change=_normalise({"type": "Lowercase"})), "<TOOL>", normalized=True
    ),
    "bytes, added, spaces": lambda: with_tokens(of_bytes(), "  ", "   ", "    ", "\n\n"),
    "pieces, begin": lambda: around(of_pieces("llama"), "<s> $A"),
    "pieces, begin and end": lambda: around(of_pieces("gemma"), "<s> $A </s>"),
    "pieces, added tokens": lambda: with_tokens(of_pieces("llama"), "<tool>"),
    "pieces, added, normalised": lambda: with_tokens(of_pieces("llama"), "<tool>", normalized=True),
    "pieces, Gemma, added": lambda: with_tokens(of_pieces("gemma"), "<tool>", "▁▁", "▁▁▁", "\n\n"),
    "pieces, Gemma, runs": lambda: with_tokens(of_pieces("gemma", change=_runs), "▁▁", "▁▁▁▁", "\n\n"),
    "pieces, Gemma, normalised": lambda: with_tokens(of_pieces("gemma"), "<tool>", "the thing", normalized=True),
    "pieces, first, added": lambda: with_tokens(of_pieces("first"), "<tool>"),
    "pieces, always, added": lambda: with_tokens(of_pieces("always"), "<tool>"),
    "pieces, words, added": lambda: with_tokens(of_pieces("words"), "<tool>", lstrip=True),
    "pieces, lower case": lambda: of_pieces(
        "gemma", change=_normalise({"type": "Lowercase"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    ),
    "pieces, words taken whole": lambda: of_pieces("gemma", change=_with(ignore_merges=True)),
    "pieces, dropout": lambda: of_pieces("gemma", change=_with(dropout=0.9)),
    "pieces, unknown apart": lambda: of_pieces("llama", change=_with(byte_fallback=False)),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a tokenizer: the notes of its file, and the texts whose tokens differ with those of both."""

    notes: Sequence[str]
    other: Sequence[tuple[str, list[int], list[int]]]

    @property
    def verdict(self) -> str:
        return "equal" if not self.other else "noted" if self.notes else "WRONG"


def file_of(tokenizer: Any, file: Path, configs: Sequence[Any] = (), generation: Any = None, spare: int = 3) -> list[str]:
    """Write a GGUF file of a model of one layer, all zeros, with this vocabulary; returns the notes on it."""
    import gguf
    from layerbudget.llama_cpp.vocabulary import add_vocabulary

    size, width = len(tokenizer) + spare, 32
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("model")
    for name, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": width,
        "feed_forward_length": width,
    }.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    notes = add_vocabulary(writer, tokenizer, size, configs, generation)
    writer.add_tensor("token_embd.weight", np.zeros((size, width), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return notes


class _Options(ctypes.Structure):
    """llama.cpp's options of a model, by value: only passed on, and no longer than this."""

    _fields_ = [("held", ctypes.c_byte * 512)]


@functools.cache
def llama_cpp() -> Any:
    """llama.cpp's library, silent."""
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    number, yes, pointer = ctypes.c_int32, ctypes.c_bool, ctypes.c_void_p
    library.llama_model_default_params.restype = _Options
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Options]
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = pointer
    library.llama_model_get_vocab.argtypes = library.llama_model_free.argtypes = [pointer]
    library.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number, yes, yes]
    library.llama_vocab_is_eog.argtypes, library.llama_vocab_is_eog.restype = [pointer, number], yes
    library.llama_log_set(_QUIET, None)
    return library


_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def by_llama_cpp(file: Path, texts: Sequence[str], tokens: int = 0) -> tuple[list[list[int]], list[int]]:
    """The tokens of texts by llama.cpp itself, and which of the first ``tokens`` end a text there."""
    library, number = llama_cpp(), ctypes.c_int32
    model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
    assert model, "llama.cpp does not load the file"
    vocabulary, found, room = library.llama_model_get_vocab(model), [], (number * 2048)()
    for text in texts:
        count = library.llama_tokenize(vocabulary, text.encode(), len(text.encode()), room, 2048, True, True)
        found.append(list(room[:count]))
    ends = [i for i in range(tokens) if library.llama_vocab_is_eog(vocabulary, i)]
    library.llama_model_free(model)
    return found, ends


def compared(tokenizer: Any, folder: Path, texts: Sequence[str] = TEXTS) -> Outcome:
    """Write a file with a tokenizer, and compare the tokens of texts in llama.cpp and in transformers."""
    file = folder / "model.gguf"
    notes = file_of(tokenizer, file)
    if any("holds no vocabulary" in n for n in notes):
        return Outcome(notes, [(t, tokenizer(t)["input_ids"], []) for t in texts])
    ours = [tokenizer(t)["input_ids"] for t in texts]
    theirs, _ = by_llama_cpp(file, texts)
    return Outcome(notes, [(t, a, b) for t, a, b in zip(texts, ours, theirs, strict=True) if a != b])


def letters():
    """A tokenizer of 96 tokens whose every token is text, so that llama.cpp names the probabilities of all of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    single = [*string.ascii_letters, *string.digits]
    pairs = [(a, b) for a in "ab" for b in string.ascii_lowercase][: 94 - len(single)]
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", *single, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
