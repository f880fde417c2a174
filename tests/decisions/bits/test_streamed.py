"""Written layer by layer: the same bytes whether the model is in memory or in its files, at once or in two runs."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from tests import zoo
from transformers import AutoModelForCausalLM

from layerbudget.decisions.bits import shards
from layerbudget.decisions.bits.apply import apply_bits
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.save import save_quantised
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.bits.write import quantise
from layerbudget.errors import ModelMismatch
from layerbudget.models.loading import load_model
from layerbudget.models.offload import mapped

pytest.importorskip("gguf")
pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
CASES = [("compressed-tensors", "rtn", 4.2), ("compressed-tensors", "gptq", 9.0), ("gguf", "weighted", 6.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bfloat16, so that float32 is another precision; its head is the embedding."""
    place = tmp_path_factory.mktemp("streamed") / "model"
    zoo.build("llama-tied", **WIDE).bfloat16().save_pretrained(place)
    return place


def data():
    return zoo.tokens(3, 12, vocabulary=96)


def planned(model, family, method, bits):
    own = {} if family == "gguf" else {"group": 32}
    return plan_bits(rounding_damage(model, data(), family=family, method=method, draws=1, **own), bits=bits)


def digests(place):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(place.iterdir())}


@pytest.mark.parametrize(("family", "method", "bits"), CASES)
def test_streamed_interrupted_and_in_memory_write_the_same_bytes(folder, tmp_path, monkeypatch, family, method, bits):
    monkeypatch.setattr(shards, "LIMIT", 20_000)
    whole = load_model(str(folder), dtype="float32")
    plan = planned(whole, family, method, bits)
    text = None if method == "rtn" else data()
    stored = apply_bits(whole, plan, data())
    save_quantised(whole, None, plan, stored, tmp_path / "old")
    receipt = quantise(load_model(str(folder), dtype="float32"), None, plan, tmp_path / "memory", text)
    assert receipt.bytes == receipt.planned and digests(tmp_path / "old") == digests(tmp_path / "memory")

    streamed = load_model(str(folder), dtype="float32", stream=True)
    assert mapped(streamed).converts
    before = {n: t.clone() for n, t in streamed.model.layers.state_dict().items()}
    quantise(streamed, None, plan, tmp_path / "streamed", text)
    assert digests(tmp_path / "streamed") == digests(tmp_path / "memory")
    mapped(streamed).leave()
    assert all(torch.equal(t, before[n]) for n, t in streamed.model.layers.state_dict().items())

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == total - 1:
            raise Stop

    again = {"resume": tmp_path / "kept"}
    with pytest.raises(Stop):
        quantise(
            load_model(str(folder), dtype="float32", stream=True), None, plan, tmp_path / "two", text, progress=stop, **again
        )
    assert not (tmp_path / "two").exists() and len(list((tmp_path / "kept").glob("*.safetensors"))) == 3
    quantise(load_model(str(folder), dtype="float32", stream=True), None, plan, tmp_path / "two", text, **again)
    assert digests(tmp_path / "two") == digests(tmp_path / "memory")
    if family == "compressed-tensors":
        assert len(list((tmp_path / "two").glob("model-*-of-*.safetensors"))) > 1
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32).eval()
        ids = zoo.tokens(2, 14, vocabulary=96).input_ids
        halved = {n: t.bfloat16().float() for n, t in whole.state_dict().items()}
        kept = {f"{n}.weight": t for n, t in ((m, whole.state_dict()[f"{m}.weight"]) for m in plan.extra["formats"])}
        whole.load_state_dict({**halved, **kept})
        with torch.no_grad():
            assert torch.allclose(back(ids).logits, whole(ids).logits, atol=1e-5)


def test_a_run_continues_only_as_itself(folder, tmp_path):
    model = load_model(str(folder), dtype="float32")
    plan, other = (planned(model, "compressed-tensors", "rtn", bits) for bits in (4.2, 5.2))
    quantise(model, None, plan, tmp_path / "out", resume=tmp_path / "kept")
    kept = sorted((tmp_path / "kept").glob("layer-*.safetensors"))
    assert json.loads((tmp_path / "kept" / "resume.json").read_text())["request"]["plan"] == plan.digest
    with pytest.raises(ModelMismatch):
        quantise(load_model(str(folder), dtype="float32"), None, other, tmp_path / "no", resume=tmp_path / "kept")
    assert not (tmp_path / "no").exists()
    kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"?")  # a flipped bit: made again
    again = load_model(str(folder), dtype="float32")
    quantise(again, None, plan, tmp_path / "again", resume=tmp_path / "kept")
    assert digests(tmp_path / "again") == digests(tmp_path / "out")
