"""A cache as llama.cpp keeps it, beside the llama.cpp that is installed: its logits with quantised keys and values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerbudget as lb
from layerbudget.compressors.ggml import dequantise, quantise
from layerbudget.decisions.cache import llama
from layerbudget.decisions.cache.cache import caching, read_back, rounded, rounding
from layerbudget.decisions.cache.export import llama_build
from layerbudget.decisions.cache.formats import find_cache
from layerbudget.decisions.cache.plan import cache_space, plan_cache
from layerbudget.decisions.cache.space import CacheSpace
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan

pytest.importorskip("xllamacpp")
IDS = torch.randint(3, 90, (1, 48), generator=torch.Generator().manual_seed(1))


def model_of(head, tokenizer):
    """A random Llama whose keys have a few large channels, as those of trained models have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head,
        attention_bias=False,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_((torch.randn_like(p) * 0.08 if p.ndim > 1 else p).half())
            if "k_proj" in name or "v_proj" in name:
                p[3::32] *= 12
    return model


@pytest.mark.parametrize("head", [32, 64, 128, 192])
def test_logits_with_a_rounded_cache_are_those_of_llama_cpp(tmp_path, head):
    """Of heads that 64 divides, keys and values are rotated; of all, they are rounded as a runtime rounds."""
    from benchmarks.cache.llama_cpp import Llama

    tokenizer = lb.load_tokenizer("demo")
    model = model_of(head, tokenizer)
    save_gguf(model, tokenizer, tmp_path / "file")
    file = Llama(next((tmp_path / "file").glob("*.gguf")))
    space = cache_space(model, 48, 1, "llama.cpp", ["Q4_0", "IQ4_NL", "Q5_1"])
    assert space.rotated and all(f.rotated != f.plain for f in space.formats)

    def ours(keys, values):
        with torch.no_grad(), caching(model, rounding({i: (keys, values) for i in range(2)})):
            return model(IDS).logits[0].numpy()

    forms = {f.name: f for f in space.formats}
    dense = ours(forms["F16"], forms["F16"])
    for keys, values in (("Q4_0", "F16"), ("F16", "Q4_0"), ("IQ4_NL", "Q5_1")):
        chosen = forms[keys], forms[values]
        still = [dataclasses.replace(f, rotated=False) for f in chosen]
        for rotate, own, other in ((True, chosen, still), (False, still, chosen)):
            theirs = file.logits(IDS[0].tolist(), keys, values, rotate=rotate)
            effect = np.square(ours(*own) - dense).mean()
            assert np.square(theirs - ours(*own)).mean() < 0.1 * effect, (keys, values, rotate)
            apart = np.square(theirs - ours(*other)).mean()
            assert apart > 0.3 * effect if head % 64 == 0 else apart < 0.1 * effect, (keys, values, rotate)
    file.close()


@pytest.mark.parametrize("name", ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_runtime_rounds_without_the_search_that_files_get(name):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    file, cache = dequantise(quantise(x, name), name), llama.written(x, name)
    form = find_cache("llama.cpp").formats([64], [name])[0]
    assert form.rotated and np.array_equal(cache, rounded(torch.from_numpy(x), form).numpy())
    assert np.array_equal(file, cache) == (name != "IQ4_NL")
    assert np.square(cache - x).mean() >= np.square(file - x).mean()


def test_pieces_are_rotated_as_their_part_and_width_say():
    assert [llama.piece(w, 0) for w in (32, 64, 80, 96, 128, 192, 256)] == [0, 64, 0, 0, 128, 64, 256]
    assert [llama.piece(w, 1) for w in (32, 64, 80, 96, 128, 192, 256)] == [0, 64, 0, 0, 64, 64, 64]
    for size in (64, 128):
        assert np.allclose(llama.hadamard(size) @ llama.hadamard(size), np.eye(size), atol=1e-6)
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    x[:, 7] += 12.0
    form = next(f for f in find_cache("llama.cpp").formats([128]) if f.name == "Q4_0")
    by_hand = llama.written(x.numpy() @ llama.hadamard(128), "Q4_0") @ llama.hadamard(128)
    assert np.allclose(read_back(x, form, 0).numpy(), by_hand, atol=1e-5)
    halves = (x.numpy().reshape(-1, 64) @ llama.hadamard(64)).reshape(-1, 128)
    by_hand = (llama.written(halves, "Q4_0").reshape(-1, 64) @ llama.hadamard(64)).reshape(-1, 128)
    assert np.allclose(read_back(x, form, 1).numpy(), by_hand, atol=1e-5)
    assert (read_back(x, form, 0) - x).square().mean() < 0.4 * (rounded(x, form) - x).square().mean()
    still = dataclasses.replace(form, rotated=False)
    assert torch.equal(read_back(x, still, 0), rounded(x, form)) and torch.equal(read_back(x, still, 1), rounded(x, form))


@pytest.mark.parametrize(("value", "off"), [("1", True), ("0", False), ("", False), ("yes", False)])
def test_the_switch_of_llama_cpp_is_read_as_it_reads_it(monkeypatch, value, off):
    monkeypatch.setenv(llama.SWITCH, value)
    assert llama.rotates() != off
    assert all(f.rotated != off for f in find_cache("llama.cpp").formats([64]) if not f.plain)


def test_a_library_without_the_switch_does_not_rotate(tmp_path, monkeypatch):
    (tmp_path / "old.abi3.so").write_bytes(b"\0" * 64 + b"LLAMA_KV_CACHE_DEBUG" + b"\0" * 64)
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(llama.importlib.util, "find_spec", lambda name: spec)
    llama._able.cache_clear()
    assert not llama.rotates()
    llama._able.cache_clear()


def test_a_plan_keeps_and_says_which_llama_cpp_it_was_measured_for(tmp_path, monkeypatch):
    tokenizer = lb.load_tokenizer("demo")
    model, data = model_of(64, tokenizer), lb.calibration("stdlib", tokenizer, samples=2, length=24)
    options = {"context": 256, "bits": 5, "runtime": "llama.cpp", "formats": ["Q4_0", "Q5_0"], "draws": 1}
    found = {}
    for value in ("0", "1"):
        monkeypatch.setenv(llama.SWITCH, value)
        plan = plan_cache(model, data, **options)
        plan.save(tmp_path / f"{value}.json")
        found[value] = Plan.load(tmp_path / f"{value}.json")
    monkeypatch.delenv(llama.SWITCH)
    assert found["0"].payload.predicted < found["1"].payload.predicted
    for value, words in (("0", "April 2026 or later"), ("1", "set LLAMA_ATTN_ROT_DISABLE=1")):
        plan = found[value]
        assert plan.payload.rotated == (value == "0") and words in llama_build(plan)
        assert words in " ".join(explain_plan(plan)["sentences"])
        assert words in EXPORTS.find("llama-cache").sentence(plan, "cache.txt")
        assert "--cache-type-k" in EXPORTS.find("llama-cache").text(plan, {})
    record = cache_space(model, 256, 1, "llama.cpp").record()
    assert CacheSpace.read({**record, "rotated": False}, 256, 1).rotated is False and CacheSpace.read(record, 256, 1).rotated
