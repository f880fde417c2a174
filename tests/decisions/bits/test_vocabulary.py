"""Vocabularies of SentencePiece's kind: llama.cpp splits texts into the tokens of transformers."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import transformers
from tests import zoo

from layerbudget.decisions.bits.gguf import file_bytes
from layerbudget.decisions.bits.vocabulary import add_vocabulary

gguf = pytest.importorskip("gguf")
llama = pytest.importorskip("xllamacpp")
TEXTS = (
    "The cat sat on the mat.",
    "  two spaces, and  more   of them",
    "a\nline and\n\n another\ttab",
    "naïve café, 東京 and \U0001f600!",
    "x",
    "the theatre, their thesis; other otherwise",
)
LEARNT = [
    *TEXTS,
    *("the thing that there is thought through then and there " * 3,) * 4,
    "some more text for merges, more merges",
]


def pieces(scheme):
    """A fast tokenizer as transformers makes it from SentencePiece's file: all pairs of every token, in the order of tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False, initial_alphabet=["▁"], limit_alphabet=40)
    learner.train_from_iterator([w for t in LEARNT for w in t.split()], trainer)
    learnt = [t for t, _ in sorted(learner.get_vocab().items(), key=lambda item: item[1])]
    vocab = {t: i for i, t in enumerate(("<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *learnt))}
    joined = [t for t in learnt if len(t) > 1]
    merges = [(t[:i], t[i:]) for t in joined for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("▁")] * (scheme == "llama") + [normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous") if scheme == "gemma" else None
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class _Options(ctypes.Structure):
    """llama.cpp's options of a model, by value: only passed on, and no longer than this."""

    _fields_ = [("held", ctypes.c_byte * 512)]


def by_llama_cpp(file, texts):
    """The tokens of texts by llama.cpp itself."""
    library = ctypes.CDLL(str(next(Path(llama.__file__).parent.glob("*.so"))))
    library.llama_model_default_params.restype = _Options
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Options]
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = library.llama_model_free.argtypes = [ctypes.c_void_p]
    number, yes = ctypes.c_int32, ctypes.c_bool
    library.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, number, ctypes.POINTER(number), number, yes, yes]
    model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
    assert model
    vocabulary, found, room = library.llama_model_get_vocab(model), [], (number * 512)()
    for text in texts:
        count = library.llama_tokenize(vocabulary, text.encode(), len(text.encode()), room, 512, True, True)
        found.append(list(room[:count]))
    library.llama_model_free(model)
    return found


@pytest.mark.parametrize("scheme", ["llama", "gemma", "metaspace"])
def test_llama_cpp_has_the_tokens_of_transformers(tmp_path, scheme):
    from layerbudget.decisions.bits.apply import write_bits
    from layerbudget.decisions.bits.plan import plan_bits

    tokenizer = pieces(scheme)
    size = len(tokenizer) + 5
    model = zoo.build("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=size)
    text = zoo.tokens(2, 8)
    plan = plan_bits(model, text, bits=16.0, family="gguf", draws=1, formats=["F16"], tokenizer=tokenizer)
    receipt = write_bits(model, plan, tmp_path / "out", tokenizer=tokenizer)
    assert not receipt.notes
    file = tmp_path / "out" / "model.gguf"
    assert file.stat().st_size == file_bytes(model, plan.extra["formats"], tokenizer)
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is (scheme != "gemma")
    assert [fields[f"tokenizer.ggml.{n}_token_id"].contents() for n in ("unknown", "bos", "eos")] == [0, 1, 2]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:4] == [2, 3, 3, 6] and kinds.count(6) == 256 and kinds[-5:] == [5] * 5
    begin = tokenizer("")["input_ids"]
    texts = [t for t in TEXTS if scheme != "metaspace" or not t.startswith(" ")]
    for text, theirs in zip(texts, by_llama_cpp(file, texts), strict=True):
        ours = tokenizer(text)["input_ids"]
        assert theirs[len(theirs) - len(ours) :] == ours and theirs[: len(theirs) - len(ours)] in ([], begin), text


def written(folder, tokenizer):
    """The file of a small model with such a vocabulary and some unused tokens, and the notes on it."""
    from tests.decisions.bits.test_gguf import planned

    from layerbudget.decisions.bits.apply import write_bits

    model = zoo.build("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=len(tokenizer) + 3)
    receipt = write_bits(model, planned(model, ["F16"]), folder, tokenizer=tokenizer)
    return folder / "model.gguf", receipt.notes


def bytes_of_text(split=None, size=300, texts=LEARNT):
    """A fast tokenizer of bytes; without a regular expression it splits texts as GPT-2 does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    learner, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    learner.pre_tokenizer, learner.decoder = byte_level(add_prefix_space=False), decoders.ByteLevel()
    if split is not None:
        steps = [pre_tokenizers.Split(Regex(split), "isolated"), byte_level(add_prefix_space=False, use_regex=False)]
        learner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    own = {"show_progress": False, "special_tokens": ["<s>", "</s>"], "initial_alphabet": byte_level.alphabet()}
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **own))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_added_tokens_are_found_in_texts(tmp_path, kind):
    """As llama.cpp's converter writes them: those that look special are, the others are a user's own."""
    tokenizer = bytes_of_text() if kind == "bytes" else pieces("gemma")
    added = {"<|im_start|>": True, "<think>": False, "</think>": False, "<|fim_prefix|>": False, "<unused7>": False}
    tokenizer.add_tokens([transformers.AddedToken(t, special=s, normalized=False) for t, s in added.items()])
    file, notes = written(tmp_path / "out", tokenizer)
    kinds = gguf.GGUFReader(file).fields["tokenizer.ggml.token_type"].contents()
    assert [kinds[tokenizer.convert_tokens_to_ids(t)] for t in added] == [3, 4, 4, 3, 3] and not notes
    text = "<|im_start|><think>the thing</think><|fim_prefix|>there"
    ours = tokenizer(text)["input_ids"]
    assert by_llama_cpp(file, [text])[0][-len(ours) :] == ours


WORDS, END = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLITS = {
    "llama-bpe": rf"{SHORT}|{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}",
    "qwen2": rf"{SHORT}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}",
    "tekken": rf"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}",
    "gpt-4o": rf"{UPPER}*{LOWER}+{SHORT}?|{UPPER}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}",
}


@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(tmp_path, name):
    texts = ["I don't know, it's there", "x\n'type'\n'data'", "iPhone 12345 and a/b//\n", "d['self'] = 'test'"]
    tokenizer = bytes_of_text(SPLITS[name], 340, [*texts, "self' 'data 'type' don't it's 123 234 PhoneX //\n\n"] * 9)
    file, notes = written(tmp_path / "out", tokenizer)
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == name and not notes
    for text, theirs in zip(texts, by_llama_cpp(file, texts), strict=True):
        ours = tokenizer(text)["input_ids"]
        assert theirs[-len(ours) :] == ours, text


def test_splits_that_llama_cpp_has_no_name_for_are_said(tmp_path):
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel
    whole, digits = byte_level(use_regex=False), pre_tokenizers.Digits(individual_digits=True)
    seed = bytes_of_text(SPLITS["qwen2"].replace(r"]+[\r\n]*|", r"\r\n]+|"))  # another rule with a part of a known one
    others = [seed.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence([digits, byte_level()]), whole]
    others.append(pre_tokenizers.Sequence([bytes_of_text(SPLITS["qwen2"]).backend_tokenizer.pre_tokenizer, digits]))
    for split in others:
        tokenizer = bytes_of_text()
        tokenizer.backend_tokenizer.pre_tokenizer = split
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        assert "by a rule of its own" in add_vocabulary(writer, tokenizer, 500)[0]
        assert writer.kv_data[0]["tokenizer.ggml.pre"].value == "gpt-2"


def test_pairs_that_are_not_listed_are_said(tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = pieces("llama")
    held = tokenizer.backend_tokenizer
    record = json.loads(held.to_str())["model"]
    rest = [tuple(m) for m in record["merges"] if m != record["merges"][-1]]
    short = Tokenizer(models.BPE(record["vocab"], rest, unk_token="<unk>", byte_fallback=True))
    short.normalizer = held.normalizer
    given = transformers.PreTrainedTokenizerFast(tokenizer_object=short, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    several = [m for m in record["merges"] if "".join(m) == "".join(record["merges"][-1])]
    assert bool(add_vocabulary(writer, given, 500)) == (len(several) > 1)


def test_other_kinds_are_left_out_with_a_note(tmp_path):
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    found = add_vocabulary(writer, transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), 4)
    assert "holds no vocabulary" in found[0]
