"""Vocabularies of SentencePiece's kind: llama.cpp splits texts into the tokens of transformers."""

from __future__ import annotations

import json

import pytest
import transformers
from tests import vocabularies, zoo
from tests.vocabularies import SPLITS, compared, file_of

from layerbudget.llama_cpp.vocabulary import add_vocabulary
from layerbudget.llama_cpp.writer import head_bytes

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
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


def by_llama_cpp(file, texts):
    """The tokens of texts by llama.cpp itself."""
    return vocabularies.by_llama_cpp(file, texts)[0]


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
    assert len(receipt.notes) == (2 if scheme == "metaspace" else 0)  # spaces at the beginning, and behind added tokens
    file = tmp_path / "out" / "model.gguf"
    assert file.stat().st_size == head_bytes(model, tokenizer) + plan.budget["tensors"]
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
    from tests.llama_cpp.test_writer import planned

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


@pytest.mark.parametrize("name", [n for n, steps in SPLITS.items() if len(steps) == 1])
def test_llama_cpp_splits_texts_as_the_tokenizer_does(tmp_path, name):
    texts = ["I don't know, it's there", "x\n'type'\n'data'", "iPhone 12345 and a/b//\n", "d['self'] = 'test'"]
    tokenizer = bytes_of_text(SPLITS[name][0], 340, [*texts, "self' 'data 'type' don't it's 123 234 PhoneX //\n\n"] * 9)
    file, notes = written(tmp_path / "out", tokenizer)
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == name
    assert bool(notes) == (name in ("tekken", "gpt-4o"))  # llama.cpp tells capital letters of ASCII only
    for text, theirs in zip(texts, by_llama_cpp(file, texts), strict=True):
        ours = tokenizer(text)["input_ids"]
        assert theirs[-len(ours) :] == ours, text


def test_splits_that_llama_cpp_has_no_name_for_are_said(tmp_path):
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel
    whole, digits = byte_level(use_regex=False), pre_tokenizers.Digits(individual_digits=True)
    seed = bytes_of_text(SPLITS["qwen2"][0].replace(r"]+[\r\n]*|", r"\r\n]+|"))  # another rule with a part of a known one
    others = [seed.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence([byte_level(), digits]), whole]
    others.append(pre_tokenizers.Sequence([bytes_of_text(SPLITS["qwen2"][0]).backend_tokenizer.pre_tokenizer, digits]))
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


QUICK = (
    *("bytes, NFC", "bytes, a space first", "bytes, another end", "bytes, two in front", "bytes, words taken whole"),
    *("bytes, added, left", "bytes, added, overlapping", "bytes, Falcon", "bytes, deepseek-v3", "bytes, some missing"),
    *("pieces, Metaspace words", "pieces, Gemma, added", "pieces, Gemma, runs", "pieces, added, normalised"),
)
EQUAL = (
    *("bytes, GPT-2", "bytes, StarCoder", "bytes, Falcon", "pieces, Llama 2", "pieces, Gemma", "pieces, Gemma, runs"),
    *(f"bytes, {name}" for name in SPLITS if name not in ("tekken", "gpt-4o")),
)


@pytest.mark.parametrize("name", QUICK)
def test_tokens_are_equal_or_a_note_says_otherwise(tmp_path, name):
    outcome = compared(vocabularies.MADE[name](), tmp_path)
    assert outcome.verdict == ("equal" if name in EQUAL or name == "bytes, another end" else "noted"), outcome.other[:2]
    assert bool(outcome.other) == bool(outcome.notes)  # no note is idle


@pytest.mark.slow
def test_the_table_of_all_tokenizers_has_nothing_wrong(tmp_path):
    """With ``-s`` the table: tokenizers by what became of their tokens in llama.cpp."""
    found = {name: compared(make(), tmp_path) for name, make in vocabularies.MADE.items()}
    for name, outcome in found.items():
        print(f"{outcome.verdict:6} {name:32} {len(outcome.other):2} texts differ, {len(outcome.notes)} notes")
    assert not [name for name, outcome in found.items() if outcome.verdict == "WRONG"]
    assert not [name for name in EQUAL if found[name].other or found[name].notes]


def fields(file):
    return {k: f.contents() for k, f in gguf.GGUFReader(file).fields.items()}


class _Config:
    """A configuration with the special tokens that are given."""

    def __init__(self, **values):
        self.__dict__.update(values)


def test_the_configuration_names_what_the_tokenizer_does_not(tmp_path):
    file = tmp_path / "model.gguf"
    tokenizer = vocabularies.of_bytes(bos_token=None, eos_token=None)
    config = _Config(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    assert not file_of(tokenizer, file, [config])
    assert [fields(file)[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos", "padding")] == [0, 1, 2]
    _, ends = vocabularies.by_llama_cpp(file, [], tokens=len(tokenizer))
    assert ends == [1]


def test_tokens_around_a_text_are_those_of_the_tokenizer(tmp_path):
    file = tmp_path / "model.gguf"
    bare = {"bos_token": None, "eos_token": None}
    assert not file_of(vocabularies.around(vocabularies.of_bytes(**bare), "<s> $A"), file, [_Config(eos_token_id=1)])
    assert fields(file)["tokenizer.ggml.bos_token_id"] == 0 and fields(file)["tokenizer.ggml.add_bos_token"] is True
    assert by_llama_cpp(file, ["x"])[0][0] == 0
    file_of(vocabularies.around(vocabularies.of_bytes(), "$A <pad>"), file)
    found = fields(file)
    assert found["tokenizer.ggml.eos_token_id"] == 2 and found["tokenizer.ggml.add_eos_token"] is True
    _, ends = vocabularies.by_llama_cpp(file, [], tokens=700)
    assert set(ends) == {1, 2}  # the tokenizer's own end is there too


def test_every_token_at_which_transformers_ends_is_in_the_file(tmp_path):
    file = tmp_path / "model.gguf"
    tokenizer = vocabularies.with_tokens(vocabularies.of_bytes(), "<|im_end|>", "<stop>", "<done>", "<over>", "<end>")
    ids = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>", "<stop>", "<done>", "<over>", "<end>"])
    notes = file_of(tokenizer, file, [_Config(eos_token_id=1)], _Config(eos_token_id=ids))
    found = fields(file)
    assert [found[f"tokenizer.ggml.{n}_token_id"] for n in ("eos", "eot", "eom")] == [ids[0], ids[2], ids[3]]
    assert len(notes) == 1 and "'<over>'" in notes[0].replace("<over>", "'<over>'") and "<end>" in notes[0]
    _, ends = vocabularies.by_llama_cpp(file, [], tokens=len(tokenizer))
    assert set(ends) == set(ids[:4])


def test_a_text_without_a_named_end_ends_at_no_ordinary_token(tmp_path):
    file = tmp_path / "model.gguf"
    tokenizer = vocabularies.of_bytes(bos_token=None, eos_token=None)
    for spare in (3, 0):
        notes = file_of(tokenizer, file, spare=spare)
        assert len(notes) == 1 and "Set eos_token_id" in notes[0]
        assert fields(file)["tokenizer.ggml.eos_token_id"] == len(tokenizer) + spare - 1


def test_sampling_of_the_folder_is_in_the_file(tmp_path):
    file, prefix = tmp_path / "model.gguf", "general.sampling."
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.05, "do_sample": True}
    file_of(vocabularies.of_bytes(), file, (), _Config(**values))
    found = {k.removeprefix(prefix): v for k, v in fields(file).items() if k.startswith(prefix)}
    wanted = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "penalty_repeat": 1.05, "penalty_last_n": -1}
    assert found == pytest.approx(wanted)
    file_of(vocabularies.of_bytes(), file, (), transformers.GenerationConfig())
    assert not [k for k in fields(file) if k.startswith(prefix)]
    file_of(vocabularies.of_bytes(), file, (), transformers.GenerationConfig(do_sample=False))
    assert fields(file)[f"{prefix}temp"] == 0


def test_chat_templates_are_written_by_name(tmp_path):
    file, tokenizer = tmp_path / "model.gguf", vocabularies.of_bytes()
    tokenizer.chat_template = {"default": "one", "tool_use": "two", "rag": "three"}
    assert not file_of(tokenizer, file)
    found = fields(file)
    assert found["tokenizer.chat_template"] == "one" and found["tokenizer.chat_templates"] == ["rag", "tool_use"]
    assert found["tokenizer.chat_template.tool_use"] == "two" and found["tokenizer.chat_template.rag"] == "three"
    tokenizer.chat_template = {"tool_use": "two"}
    assert "ChatML" in file_of(tokenizer, file)[0] and "tokenizer.chat_template" not in fields(file)
    tokenizer.chat_template = None
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    file_of(tokenizer, file)
    assert fields(file)["tokenizer.chat_template"] == "of the processor"


def test_no_text_is_twice_in_the_vocabulary(tmp_path):
    """llama.cpp refuses a file with one token twice."""
    file = tmp_path / "model.gguf"
    tokenizer = vocabularies.with_tokens(vocabularies.of_bytes(), "[PAD702]", "[PAD704]", "▁a", " a", normalized=True)
    file_of(tokenizer, file, spare=6)
    assert by_llama_cpp(file, ["a [PAD704]"])[0] == tokenizer("a [PAD704]")["input_ids"]


def test_tokens_that_the_model_has_no_room_for_are_said(tmp_path):
    tokenizer = vocabularies.with_tokens(vocabularies.of_bytes(pad_token="<extra>"), "<more>")
    notes = file_of(tokenizer, tmp_path / "model.gguf", spare=-2)
    assert "2 more" in notes[0] and "tokenizer.ggml.padding_token_id" not in fields(tmp_path / "model.gguf")
