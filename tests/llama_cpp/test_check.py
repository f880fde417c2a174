"""llama.cpp loads what was written, splits texts and computes: what differs is an error, and no file is left."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests import zoo
from tests.llama_cpp.test_writer import build, planned

import layerbudget as lb
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.requantise import requantise
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.errors import CoverageError
from layerbudget.gguf import names as names
from layerbudget.llama_cpp import check as gguf_check
from layerbudget.llama_cpp.writer import GgufHead, Stored
from layerbudget.models.blocks import fingerprint

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


@pytest.mark.parametrize(
    ("kind", "formats"),
    [("llama", ["F16"]), ("gemma3_text", ["Q4_0"]), ("qwen3_moe", ["Q5_1", "Q8_0"]), ("phi3", ["MXFP4"])],
)
def test_the_receipt_says_that_llama_cpp_computes_the_rounded_model(tmp_path, kind, formats):
    model = build(kind)
    receipt = write_bits(model, planned(model, formats), tmp_path / "out")
    assert receipt.llama_cpp.startswith("llama.cpp loads the file; on 32 tokens its log-probabilities differ by at most")
    assert write_bits(model, planned(model, formats), tmp_path / "two", check=False).llama_cpp == ""


def test_tokens_are_compared_too(tmp_path):
    model, tokenizer = zoo.build("llama", hidden_size=32, intermediate_size=32, vocab_size=2048), lb.load_tokenizer("demo")
    receipt = write_bits(model, planned(model, ["F16"]), tmp_path / "out", tokenizer=tokenizer)
    assert "the tokens of 3 texts are equal" in receipt.llama_cpp


def test_a_file_that_was_made_from_another_one_is_loaded_too(tmp_path, monkeypatch):
    model, source, whole = build("llama"), tmp_path / "source.gguf", tmp_path / "whole.gguf"
    write_bits(model, planned(model, ["F16"]), tmp_path / "out", check=False)
    (tmp_path / "out" / "model.gguf").rename(source)
    plan = planned(model, ["Q8_0"])
    said = "llama.cpp loads the file; what it computes on 32 tokens is finite. No probabilities were compared."
    assert requantise(source, plan, whole).llama_cpp == said
    assert requantise(source, plan, tmp_path / "two.gguf", check=False).llama_cpp == ""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-4096])
    with pytest.raises(CoverageError, match=r"llama.cpp takes source.gguf, and not .* made from it: it does not load \("):
        gguf_check.check_alike(cut, source, 96)
    assert "cut.gguf is not taken either" in gguf_check.check_alike(cut, cut, 96)
    monkeypatch.setattr(gguf_check, "free_bytes", lambda: 0)
    assert gguf_check.check_alike(whole, source, 96) == "llama.cpp loads the file. No probabilities were compared."
    monkeypatch.setattr(gguf_check, "library_file", lambda: None)
    assert "xllamacpp is not installed" in gguf_check.check_alike(whole, source, 96)


def spoil(monkeypatch, how):
    """Write another file than the plan says, as a fault of the writer would."""
    if how == "loads not":
        monkeypatch.setattr(names, "_NUMBERS", tuple(row for row in names._NUMBERS if row[0] != "layer_norm_rms_eps"))
    elif how == "computes":
        monkeypatch.setattr(Stored, "take", lambda self, tensor: Stored.take.whole(dataclasses.replace(self, heads=0), tensor))
    else:
        monkeypatch.setattr("layerbudget.llama_cpp.writer.add_vocabulary", swapped(how))


def swapped(how):
    from layerbudget.llama_cpp.vocabulary import add_vocabulary

    def add(writer, *known):
        notes = add_vocabulary(writer, *known)
        if field := writer.kv_data[0].get("tokenizer.ggml.merges"):  # not in a header that is counted without a vocabulary
            field.value = field.value[: len(field.value) // 2]
        return notes

    return add


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("loads not", "llama.cpp does not load the file: .*layer_norm_rms_epsilon"),
        ("computes", "llama.cpp computes something else from the file"),
        ("tokens", "llama.cpp splits .* into other tokens than the tokenizer"),
    ],
)
def test_a_file_that_is_something_else_is_an_error_and_is_not_kept(tmp_path, monkeypatch, how, said):
    model = build("llama", vocab_size=2048)
    plan, whole = planned(model, ["F16"]), Stored.take
    spoil(monkeypatch, how)
    if how == "computes":
        Stored.take.whole = whole
    with pytest.raises(CoverageError, match=said):
        write_bits(model, plan, tmp_path / "out", tokenizer=lb.load_tokenizer("demo"))
    with pytest.raises(CoverageError, match=said):
        save_gguf(model, lb.load_tokenizer("demo"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_without_the_package_or_an_answer_the_receipt_says_so(tmp_path, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(gguf_check, "library_file", lambda: None)
    assert "xllamacpp is not installed" in write_bits(model, planned(model, ["F16"]), tmp_path / "a").llama_cpp
    monkeypatch.undo()
    monkeypatch.setattr(gguf_check, "ask", lambda *a, **k: (_ for _ in ()).throw(gguf_check.NoAnswer("it took more than 9 s")))
    receipt = write_bits(model, planned(model, ["F16"]), tmp_path / "b")
    assert receipt.llama_cpp == "llama.cpp did not check the file: it took more than 9 s."


def test_a_streamed_model_and_a_large_file_are_loaded_alone(tmp_path, monkeypatch):
    build("llama").save_pretrained(tmp_path / "model")
    streamed = lb.load_model(str(tmp_path / "model"), dtype="float32", stream=True)
    monkeypatch.setattr(gguf_check, "unwalkable", lambda *_: "its layers share state")
    receipt = write_bits(streamed, planned(streamed, ["Q8_0"]), tmp_path / "a")
    said = "of a streamed model whose layers do not run alone no probabilities were compared"
    assert receipt.llama_cpp == f"llama.cpp loads the file; {said}."
    model = build("llama")
    monkeypatch.setattr(gguf_check, "free_bytes", lambda: 1000)
    assert "larger than the free memory" in write_bits(model, planned(model, ["Q8_0"]), tmp_path / "b").llama_cpp


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_streamed_model_says_the_same_as_one_in_memory(tmp_path, method):
    """Its tokens go through every layer while that is rounded; also where a run goes on, and afterwards nothing is rounded."""
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    data = None if method == "rtn" else CalibrationSet(input_ids=zoo.tokens(4, 32).input_ids % 96)
    said = []
    for number, (stream, resume) in enumerate([(False, None), (True, tmp_path / "kept"), (True, tmp_path / "kept")]):
        model = lb.load_model(str(tmp_path / "model"), dtype="float32", stream=stream)
        digest = fingerprint(model)
        options = {"method": method, "resume": resume, "overwrite": True}
        said.append(write_bits(model, planned(model, ["Q4_0", "Q8_0"]), tmp_path / f"out-{number}", data, **options).llama_cpp)
        assert not stream or fingerprint(model) == digest
    assert "log-probabilities differ" in said[0] and said[1:] == said[:1] * 2
    files = [(tmp_path / f"out-{n}" / "model.gguf").read_bytes() for n in range(3)]
    assert files[1:] == files[:1] * 2


def test_a_run_that_goes_on_compares_the_rounded_model(tmp_path):
    """Matrices that were written before are in the model again, though no later inputs depend on them."""
    model, plan = build("llama"), planned(build("llama"), ["Q4_0"])
    write_bits(model, plan, tmp_path / "a", resume=tmp_path / "kept")
    again = build("llama")
    receipt = write_bits(again, plan, tmp_path / "b", resume=tmp_path / "kept")
    assert "log-probabilities" in receipt.llama_cpp
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert GgufHead(model, None, {}, tmp_path / "x.gguf").has_vocabulary is False
