"""Written files, read by the runtimes: the same numbers, the planned types, the planned bytes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from tests import zoo
from transformers import AutoModelForCausalLM

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decisions.bits import save as S
from layerbudget.decisions.bits.apply import apply_bits
from layerbudget.decisions.bits.export_recipes import dynamic, layer_config
from layerbudget.decisions.bits.gguf_file import GgufWriter
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.receipt import QuantisationReceipt
from layerbudget.decisions.bits.save import save_quantised
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import AlreadyExists, CoverageError, InvalidInput, MissingDependency, ModelMismatch
from layerbudget.exports.base import EXPORTS
from layerbudget.finetuning.base import classifier_loader
from layerbudget.models.loading import describe_place

gguf = pytest.importorskip("gguf")
pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}


def wide(name):
    """Rows that blocks divide; Qwen3 with the head size that transformers assumes of a GGUF file."""
    return zoo.build(name, **WIDE, **({"head_dim": 128} if name == "qwen3" else {}))


def made(name, family, bits, method="rtn", **options):
    """A rounded model, its plan, and what the writers need."""
    model, data = wide(name), zoo.tokens(3, 12, vocabulary=96)
    own = {} if family == "gguf" else {"group": 32}
    plan = plan_bits(rounding_damage(model, data, family=family, draws=1, method=method, **own, **options), bits=bits)
    return model, plan, apply_bits(model, plan, data)


def logits(model):
    with torch.no_grad():
        return model(zoo.tokens(2, 14, vocabulary=96).input_ids).logits


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "weighted"), ("llama-tied", "gptq"), ("mistral", "rtn"), ("qwen2", "gptq"), ("qwen3", "rtn")],
)
def test_a_gguf_file_is_the_rounded_model(tmp_path, name, method):
    model, plan, stored = made(name, "gguf", 6.0, method)
    receipt = save_quantised(model, None, plan, stored, tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    assert torch.allclose(logits(back), logits(model), atol=2e-4, rtol=1e-4)
    assert receipt.bytes == receipt.planned == plan.budget["spent"] and receipt.tensors == plan.budget["file"]
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    names = {"self_attn.q_proj": "attn_q", "mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output"}
    for i in range(3):
        for long, short in names.items():
            assert types[f"blk.{i}.{short}.weight"] == plan.extra["formats"][f"model.layers.{i}.{long}"]
    assert types["token_embd.weight"] == plan.extra["formats"]["model.embed_tokens"]
    assert len(set(types.values()) - {"F32"}) > 1
    assert ("output.weight" in types) == (name != "llama-tied")
    lines = (tmp_path / "out" / "tensor-types.txt").read_text().splitlines()
    for pattern, kind in (line.split("=") for line in lines):
        assert [types[n] for n in types if re.search(pattern, n)] == [kind.upper()]
    assert EXPORTS.find("tensor-types").text(plan, {}).splitlines() == lines
    assert QuantisationReceipt.load(tmp_path / "out" / "receipt.json").bytes == receipt.bytes


@pytest.mark.parametrize(
    ("name", "runtime", "method"),
    [("llama", "transformers", "gptq"), ("qwen2", "vllm", "rtn"), ("llama-tied", "transformers", "weighted")],
)
def test_a_compressed_tensors_folder_is_the_rounded_model(tmp_path, name, runtime, method):
    model, plan, stored = made(name, "compressed-tensors", 6.0 if runtime == "vllm" else 4.2, method, runtime=runtime)
    receipt = save_quantised(model, None, plan, stored, tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    read = lb.load_model(str(tmp_path / "out"), dtype="float32")
    assert describe_place(read).startswith(f"{model.num_parameters() / 1e6:,.1f} M parameters in float32 on cpu")
    assert torch.equal(logits(read), logits(back))  # every matrix is a plain one, and no forward rounds again
    assert lb.partition(read) == lb.partition(model) and not hasattr(read.config, "quantization_config")
    halved = zoo.build(name, **WIDE)  # what is not planned is written in sixteen bits
    halved.load_state_dict({n: t.bfloat16().float() for n, t in halved.state_dict().items()})
    for module in plan.extra["formats"]:
        halved.get_submodule(module).weight.data.copy_(model.get_submodule(module).weight)
    assert torch.allclose(logits(back), logits(halved), atol=1e-5)
    assert receipt.bytes == receipt.planned and receipt.tensors == plan.budget["file"]
    assert len(set(plan.extra["formats"].values())) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    bits = {g["weights"]["num_bits"] for g in config["config_groups"].values()}
    assert config["format"] == "pack-quantized" and (runtime != "vllm" or bits <= {4, 8})


def test_zero_points_are_written_as_the_package_reads_them(tmp_path):
    model, data = zoo.build("llama", **WIDE), zoo.tokens(3, 12, vocabulary=96)
    scores = rounding_damage(model, data, formats=["w3-g32-asym", "w4-g32-asym"], draws=1)
    plan = plan_bits(scores, bits=4.2)
    receipt = save_quantised(model, None, plan, apply_bits(model, plan), tmp_path / "out")  # packing reads everything back
    assert receipt.bytes == receipt.planned and any("zero points" in n for n in receipt.notes)


def test_models_in_half_precision(tmp_path):
    """Packed all the same: the integers are found again. GGUF finds its grid in the weights, and asks for all their digits."""
    data, whole = zoo.tokens(3, 12, vocabulary=96), zoo.build("llama", **WIDE)
    whole.load_state_dict({n: t.bfloat16().float() for n, t in whole.state_dict().items()})
    half = zoo.build("llama", **WIDE)
    half.load_state_dict(whole.state_dict())
    half = half.bfloat16()
    for family, bits in (("compressed-tensors", 5.0), ("gguf", 6.0)):
        plan = plan_bits(rounding_damage(whole, data, family=family, draws=1), bits=bits)
        stored = apply_bits(half, plan)
        if family == "gguf":
            with pytest.raises(InvalidInput, match="held in bfloat16"):
                save_quantised(half, None, plan, stored, tmp_path / family)
            break
        save_quantised(half, None, plan, stored, tmp_path / "half")
        again = zoo.build("llama", **WIDE)
        again.load_state_dict(whole.state_dict())
        save_quantised(again, None, plan, apply_bits(again, plan), tmp_path / "whole")
        files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("half", "whole")]
        assert files[0] == files[1]
        half.load_state_dict(whole.state_dict())


def test_llama_cpp_computes_the_same(tmp_path):
    """The embedded model in mixed types, in llama.cpp itself: next-token probabilities of the rounded model."""
    llama = pytest.importorskip("xllamacpp")
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    data = lb.calibration("stdlib", tokenizer, samples=2, length=64)
    plan = plan_bits(rounding_damage(model, data, family="gguf", draws=1), bits=5.5)
    stored = apply_bits(model, plan)
    save_quantised(model, tokenizer, plan, stored, tmp_path / "out")
    options = llama.CommonParams()
    options.model.path, options.n_ctx, options.cpuparams.n_threads, options.warmup = (
        str(tmp_path / "out/model.gguf"),
        256,
        1,
        False,
    )
    server = llama.Server(options)
    text = 'def read(path):\n    """Return the text of a file."""\n    with open('
    answer = server.handle_completions({"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 20})
    held = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    with torch.no_grad():
        mine = torch.log_softmax(model(**tokenizer(text, return_tensors="pt")).logits[0, -1], -1)
    theirs = np.array([entry["logprob"] for entry in held[:20]])
    ours = np.array([float(mine[entry["id"]]) for entry in held[:20]])
    # llama.cpp rounds activations to 8 bits for quantised products
    assert held[0]["id"] == int(mine.argmax()) and np.abs(theirs - ours).max() < 0.3
    assert np.abs(np.exp(theirs) - np.exp(ours)).max() < 0.02


def test_recipes_for_other_tools():
    formats = {"model.layers.0.mlp.up_proj": "w4-g32", "model.layers.0.mlp.down_proj": "bf16"}
    assert layer_config(formats)["model.layers.0.mlp.up_proj"]["group_size"] == 32
    rules = dynamic(formats)
    assert re.match(next(iter(rules))[2:], "model.layers.0.mlp.up_proj")
    with pytest.raises(InvalidInput, match="GPTQModel has no 5 bits"):
        dynamic({"a": "w5-g32"})
    with pytest.raises(InvalidInput, match="holds no compressed-tensors formats"):
        dynamic({"a": "Q4_0"})


def test_nothing_half_written(tmp_path, monkeypatch):
    model, plan, stored = made("llama", "gguf", 6.0)
    monkeypatch.setattr(S, "recount_gguf", lambda file: {t.name: 1 for t in gguf.GGUFReader(file).tensors})
    with pytest.raises(CoverageError, match="takes 1 bytes in the file"):
        save_quantised(model, None, plan, stored, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    model.model.layers[0].mlp.up_proj.weight.data.add_(0.01)
    with pytest.raises(CoverageError, match="reads back as other weights"):
        save_quantised(model, None, plan, stored, tmp_path / "out")
    model.model.layers[0].mlp.up_proj.weight.data.sub_(0.01)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(AlreadyExists):
        save_quantised(model, None, plan, stored, tmp_path / "out")


def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    model, plan, stored = made("gpt2", "compressed-tensors", 16.0, unwritten="plan")  # sixteen bits for all: nothing to pack
    with pytest.raises(InvalidInput, match="gpt2 model is not written as GGUF"):
        GgufWriter(model, None, stored.formats, tmp_path / "x.gguf")
    model, plan, stored = made("gpt2", "compressed-tensors", 5.0, unwritten="plan")
    with pytest.raises(InvalidInput, match="is no plain Linear"):
        save_quantised(model, None, plan, stored, tmp_path / "out")
    model, plan, stored = made("mistral-sliding", "gguf", 6.0, unwritten="plan")
    with pytest.raises(InvalidInput, match="with sliding_window = 8"):
        save_quantised(model, None, plan, stored, tmp_path / "out")
    with pytest.raises(ModelMismatch):
        apply_bits(zoo.build("llama", seed=3, **WIDE), plan)
    with pytest.raises(InvalidInput, match="gptq needs calibration data"):
        apply_bits(zoo.build("mistral-sliding", **WIDE), plan, method="gptq")
    with pytest.raises(InvalidInput, match="gives no formats"):
        apply_bits(model, zoo.plan(model))
    import sys

    model, plan, stored = made("llama", "compressed-tensors", 5.0)
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors.pack_quantized.base", None)
    with pytest.raises(MissingDependency, match=r"layerbudget\[bits\]"):
        save_quantised(model, None, plan, stored, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_packed_folder_serves_every_verb_and_refuses_by_name_what_it_cannot(tmp_path, tokenizer, capsys):
    """Its matrices are numbers as soon as it is loaded, whoever runs the first forward."""
    model, plan, stored = made("llama", "compressed-tensors", 4.2, "rtn")
    out, small = tmp_path / "out", ("--samples", "2", "--length", "12", "--quiet")
    save_quantised(model, tokenizer, plan, stored, out)
    assert main(["evaluate", str(out), "--windows", "2", "--length", "12", "--quiet"]) == 0
    assert main(["score", str(out), *small, "-o", str(tmp_path / "s.json")]) == 0
    assert main(["measure", str(out), "--sparsity", "0.5", *small, "-o", str(tmp_path / "p.json")]) == 0
    assert main(["prune", str(out), str(tmp_path / "p.json"), *small, "-o", str(tmp_path / "pruned")]) == 0
    capsys.readouterr()
    for option in ("--stream", "--four-bit"):
        assert main(["evaluate", str(out), option, "--quiet"]) == 2
        assert f"Leave {option} out." in " ".join(capsys.readouterr().err.split())
    with pytest.raises(InvalidInput, match="Leave --four-bit out"):
        classifier_loader(str(out), 2, four_bit=True)
