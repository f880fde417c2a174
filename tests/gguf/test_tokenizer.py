"""The tokenizer that a GGUF file gives back: the tokens of the one it was written from, or of llama.cpp where they differ."""

import pytest
from tests.vocabularies import MADE, TEXTS, by_llama_cpp, file_of

from layerbudget.errors import BadModel
from layerbudget.gguf.header import open_gguf
from layerbudget.gguf.tokenizer import tokenizer_of

pytest.importorskip("gguf")
NONE = ("words, BERT", "unigrams, T5", "pieces, lower case", "pieces, unknown apart")  # no file holds them
CASES = ("bytes, tekken", "bytes, gpt-4o")  # llama.cpp tells capital letters from small ones in ASCII only
OVERLAP = "bytes, added, overlapping"  # the writer says that llama.cpp finds other ones of these


@pytest.mark.parametrize("name", [name for name in MADE if name not in NONE])
def test_tokens_are_those_of_the_tokenizer_or_of_llama_cpp_where_the_file_cannot_say_it(name, tmp_path):
    tokenizer, file = MADE[name](), tmp_path / "m.gguf"
    notes = file_of(tokenizer, file)
    made = tokenizer_of(open_gguf(file))
    found = [made(text)["input_ids"] for text in TEXTS]
    if not notes or name in CASES:
        assert found == [tokenizer(text)["input_ids"] for text in TEXTS]
    elif name != OVERLAP:
        pytest.importorskip("xllamacpp")
        assert found == by_llama_cpp(file, TEXTS)[0]


def test_a_run_of_spaces_is_cut_as_llama_cpp_cuts_it_where_tokens_have_one_score(tmp_path):
    pytest.importorskip("xllamacpp")
    texts = [" " * count + "\u2603" for count in range(1, 12)]  # no token joins a space with what follows
    file_of(MADE["pieces, Gemma, added"](), tmp_path / "m.gguf")
    made = tokenizer_of(open_gguf(tmp_path / "m.gguf"))
    assert [made(text)["input_ids"] for text in texts] == by_llama_cpp(tmp_path / "m.gguf", texts)[0]


@pytest.mark.parametrize("name", NONE)
def test_a_file_without_a_vocabulary_is_refused_with_a_remedy(name, tmp_path):
    file_of(MADE[name](), tmp_path / "m.gguf")
    with pytest.raises(BadModel, match="no vocabulary") as refused:
        tokenizer_of(open_gguf(tmp_path / "m.gguf"))
    assert "beside the GGUF file" in str(refused.value)


@pytest.mark.parametrize("lost", ["tokens", "token_type"])
def test_a_vocabulary_that_lacks_words_of_its_merges_is_refused_with_a_remedy(lost, tmp_path):
    file_of(MADE["bytes, tekken"](), tmp_path / "m.gguf")
    opened = open_gguf(tmp_path / "m.gguf")
    opened.fields[f"tokenizer.ggml.{lost}"] = list(opened.fields[f"tokenizer.ggml.{lost}"])[:-40]
    with pytest.raises(BadModel, match=r"The vocabulary of .*m.gguf does not read: .*tokenizer\.json"):
        tokenizer_of(opened)
