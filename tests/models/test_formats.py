"""Checkpoints in the formats that people publish: whole and in one precision, or one sentence; adapters are no models."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.errors import BadModel
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution.divergence import Reference
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.sensitivity.gain import score
from layerbudget.storage.folders import write_model

BLOCK = 16


def in_fp8(folder, name, block=BLOCK):
    """A checkpoint whose projections are in FP8, in square blocks or as a whole, and what its matrices are as numbers."""
    zoo.build(name).bfloat16().save_pretrained(folder)
    stored, numbers = {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        stored[key] = numbers[key] = tensor
        if "_proj" in key:
            grid = (1, 1) if block is None else tuple(n // block for n in tensor.shape)
            scale = 0.5 + torch.rand(grid, generator=torch.Generator().manual_seed(len(key)))
            stored[key] = (tensor.float() * 8).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scale
            wide = torch.kron(scale, torch.ones(*(n // g for n, g in zip(tensor.shape, grid, strict=True))))
            numbers[key] = stored[key].float() * wide
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block] if block else None}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return numbers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_fp8_is_numbers_in_one_precision_and_is_saved_as_these(tmp_path, name, dtype, caplog):
    numbers = in_fp8(tmp_path / "fp8", name, 8)
    model = load_model(str(tmp_path / "fp8"), dtype=dtype)
    assert "rounded before (fp8): damage is measured beside these, which cost little" in caplog.text
    wanted = torch.float32 if dtype == "float32" else torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert torch.isfinite(model(torch.arange(1, 9)[None]).logits).all()
    write_model(model, None, tmp_path / "out", {})
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == numbers.keys()
    for key, number in numbers.items():
        torch.testing.assert_close(made[key].float(), number.to(wanted).float(), rtol=1e-6, atol=0)


def test_an_adapter_is_no_model_alone_or_beside_one(tmp_path, tokenizer, capsys):
    base = tmp_path / "the base"
    zoo.speaker("llama").save_pretrained(base)
    adapted = get_peft_model(load_model(str(base)), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    for folder in (tmp_path / "adapter", tmp_path / "both"):
        adapted.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    adapted.save_pretrained(tmp_path / "trained" / "seed-0" / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "both")
    no_model = "is an adapter of .*base and no model.*--adapter"
    for folder, words in (("adapter", no_model), ("trained", f"seed-0/adapter {no_model}"), ("both", "an adapter of .*beside")):
        for load in (load_model, load_tokenizer):
            with pytest.raises(BadModel, match=words):
                load(str(tmp_path / folder))
        for verb in (["doctor"], ["evaluate"], ["score"]):
            assert main([*verb, str(tmp_path / folder)]) == 2
            assert "adapter_config.json" in (said := capsys.readouterr().err) or f"evaluate '{base}' --adapter" in said


@pytest.fixture
def hot():
    """A model in float16 whose hidden states overflow, though its weights are finite."""
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(5e4)
        model.model.layers[0].mlp.up_proj.weight.mul_(5e3)
    return model.half()


def test_activations_that_overflow_name_the_precision(hot):
    data, layers = zoo.tokens(2, 8), partition(hot, "layer")
    calls = {
        **{method: lambda method=method: prune(hot, zoo.plan(hot), data, method) for method in ("wanda", "sparsegpt")},
        **{e: lambda e=e: score(hot, data, layers, estimator=e) for e in ("outlier-ratio", "block-influence")},
        "perplexity": lambda: perplexity(hot, data),
        "divergence": lambda: Reference(hot, data, 2),
    }
    for name, call in calls.items():
        with pytest.raises(BadModel, match="not finite in float16.*float32 or bfloat16"):
            call()
            pytest.fail(name)


def test_a_gguf_file_and_a_context_that_is_too_long_are_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert main(["doctor", str(tmp_path / "x.gguf")]) == 2
    assert "does not read as GGUF" in capsys.readouterr().err
    monkeypatch.setattr("layerbudget.models.loading.load_model", lambda *_, **__: pytest.fail("loaded"))
    words = ["--context", "1M", "-o", str(tmp_path / "p.json")]
    for own in (["memory", "demo", "--memory", "8 GiB"], ["cache", "demo", "--bits", "4"]):
        assert main(["plan", *own, *words]) == 2
        assert "is too long" in capsys.readouterr().err
