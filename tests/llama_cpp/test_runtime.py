"""llama.cpp in a process of its own: it loads, splits texts, computes, refuses, is ended, and takes too long."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.compressors.ggml import library_file
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.llama_cpp.runtime import LlamaError, NoAnswer, ask

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model in 16 bits, and its file."""
    place = tmp_path_factory.mktemp("file") / "out"
    model = zoo.build("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=2048)
    save_gguf(model, lb.load_tokenizer("demo"), place)
    return model, place / "model.gguf"


def test_tokens_and_logits_are_those_of_transformers(written):
    model, file = written
    texts, tokenizer = ("def read(path):", "", "naïve 東京"), lb.load_tokenizer("demo")
    ids = tuple(tokenizer("import numpy as np")["input_ids"])
    tokens, raw = ask(library_file(), file, texts=texts, ids=ids)
    assert tokens == [tokenizer(text)["input_ids"] for text in texts]
    theirs = torch.from_numpy(np.frombuffer(raw, np.float32).copy().reshape(len(ids), -1))
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(theirs, ours, atol=0.02) and ours.std() > 0.05


def test_what_llama_cpp_says_of_a_file_is_the_error(written, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(written[1].read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_ap.weight"))
    with pytest.raises(LlamaError, match=r"'blk\.0\.ffn_up\.weight' not found"):
        ask(library_file(), broken)
    with pytest.raises(LlamaError, match="ended"):
        ask(tmp_path / "none.so", written[1])


def test_a_child_that_takes_too_long_is_given_up(written):
    with pytest.raises(NoAnswer, match="more than 0 s"):
        ask(library_file(), written[1], seconds=0.001)
