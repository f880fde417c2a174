"""What no file holds here is refused before anything is measured, or stays in 16 bits where that is asked."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from tests import zoo

import layerbudget as lb
from layerbudget.compressors.formats import find_runtime
from layerbudget.decisions.bits import packed
from layerbudget.decisions.bits import plan as planning
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.blocks import formats_table, unwritable
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import CoverageError, InfeasibleBudget, InvalidInput
from layerbudget.gguf.names import find_names
from layerbudget.reporting.explain import explain_plan

pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "vocab_size": 96}


def mamba2():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    config = transformers.Mamba2Config(
        vocab_size=96, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )
    return transformers.Mamba2ForCausalLM(config).eval()


def modernbert():
    torch.manual_seed(0)
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = transformers.ModernBertConfig(num_hidden_layers=2, num_attention_heads=4, **{**WIDE, **ids})
    return transformers.ModernBertForMaskedLM(config).eval()


def mixtral():
    return zoo.build("mixtral", **WIDE)


@pytest.mark.parametrize(
    ("make", "family", "said"),
    [
        (mixtral, "compressed-tensors", "6 of 18 matrices .*a stack of experts.*--unwritten 16-bit.*--runtime vllm"),
        (lambda: zoo.build("opt"), "gguf", "19 of 19 matrices .*GGUF has no architecture.*--format compressed-tensors"),
        (
            lambda: zoo.build("gpt2"),
            "compressed-tensors",
            "12 of 12 matrices .*Conv1D.*--unwritten plan; then export --to auto-round",
        ),
        (mamba2, "compressed-tensors", "2 of 4 matrices .*out_proj: transformers reads its weight"),
        (modernbert, "compressed-tensors", "8 of 8 matrices .*None is left to plan"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, make, family, said):
    model, data = make(), zoo.tokens(2, 8, vocabulary=96)
    monkeypatch.setattr(planning, "rounding_damage", lambda *a, **k: pytest.fail("it was measured"))
    with pytest.raises(InvalidInput, match=said):
        plan_bits(model, data, bits=6.0, family=family)
    with pytest.raises(InvalidInput, match="unwritten is 'maybe'"):
        plan_bits(model, data, bits=6.0, unwritten="maybe")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2", "phi3", "opt", "gpt-neox", "olmo2", "starcoder2"])
def test_plain_layers_can_all_be_written(name):
    model = zoo.build(name)
    names = [b.name for b in zoo.B.partition(model, "linear")]
    assert unwritable(model, names, find_runtime("transformers")) == {}


@pytest.mark.parametrize(("make", "bits", "by"), [(mixtral, 14.2, "linear"), (mixtral, 14.2, "layer"), (mamba2, 9.0, "linear")])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_rest_stays_in_16_bits_and_is_counted(tmp_path, make, bits, by, method):
    model, data = make(), zoo.tokens(3, 12, vocabulary=96)
    options = {"draws": 1, "method": method, "by": by, "unwritten": "16-bit", "group": 32}
    with pytest.raises(InfeasibleBudget, match="The smallest plan takes"):
        plan_bits(model, data, bits=3.0, **options)
    plan = plan_bits(model, data, data, bits=bits, **options)
    kept = plan.payload.unwritten
    assert kept and {plan.payload.formats[n] for n in kept} == {"bf16"} and set(plan.payload.formats.values()) > {"bf16"}
    sizes = {n: 2 * zoo.B.weight_of(model, n)[1].numel() for n in kept}
    assert all(b.count == sizes[b.name] for b in plan.blocks if b.name in kept) and sum(sizes.values()) < plan.budget["spent"]
    assert any(f"{len(kept)} matrices stay in 16 bits and count" in s for s in explain_plan(plan).sentences)
    receipt = write_bits(model, plan, tmp_path / "out", data, resume=tmp_path / "parts")
    assert receipt.bytes == receipt.planned == plan.budget["spent"] and receipt.tensors == plan.budget["tensors"]
    assert receipt.tensors < receipt.file <= plan.budget["tensors"] + plan.payload.head_bytes
    assert any(f"{len(kept)} matrices stay in 16 bits ({sum(sizes.values()):,} of the bytes" in n for n in receipt.notes)
    back = lb.load_model(str(tmp_path / "out"), dtype="float32")
    same = make()
    same.load_state_dict({n: t.bfloat16().float() for n, t in same.state_dict().items()})
    for name in plan.payload.formats:
        weight = zoo.B.weight_of(model, name)[1].detach()
        zoo.B.weight_of(same, name)[1].data.copy_(weight.bfloat16() if name in kept else weight)
    with torch.no_grad():
        ids = zoo.tokens(2, 8, vocabulary=96).input_ids
        assert torch.allclose(back(ids).logits, same(ids).logits, atol=1e-4)
    again = write_bits(make(), plan, tmp_path / "again", data, resume=tmp_path / "parts")
    assert again.bytes == receipt.bytes
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("out", "again")]
    assert files[0] == files[1]
    json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=lambda word: pytest.fail(f"bare {word}"))


def test_nothing_is_called_saved_that_does_not_load(tmp_path, monkeypatch):
    model, data = mamba2(), zoo.tokens(2, 8, vocabulary=96)
    plans = {
        r: plan_bits(rounding_damage(model, data, draws=1, group=32, unwritten="plan", runtime=r), bits=6.0)
        for r in ("transformers", "vllm")
    }
    with (
        monkeypatch.context() as patch,
        pytest.raises(CoverageError, match="transformers does not load what was written: 'Linear' object has no attribute"),
    ):
        patch.setattr("layerbudget.decisions.bits.apply.check_writable", lambda *a: None)
        write_bits(model, plans["transformers"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    receipt = write_bits(mamba2(), plans["vllm"], tmp_path / "vllm")
    assert any("transformers does not load it" in n and "vLLM" in n for n in receipt.notes)
    plain = zoo.build("llama", **WIDE)
    plan = plan_bits(rounding_damage(plain, data, draws=1), bits=6.0)
    monkeypatch.setattr(packed, "free_bytes", lambda device: 1)
    receipt = write_bits(plain, plan, tmp_path / "large")
    assert any("was not loaded again" in n for n in receipt.notes)


def gemma3n():
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        **{**WIDE, "intermediate_size": [64, 64]}, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, laurel_rank=4, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], activation_sparsity_pattern=[0.0, 0.0], sliding_window=8,
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config).eval()


def test_a_model_inside_a_model_initialises_its_own_modules():
    model = gemma3n()
    names = [b.name for b in zoo.B.partition(model, "linear")]
    assert unwritable(model, names, find_runtime("transformers")) == {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (mamba2, r"2 of 4 matrices.*out_proj: transformers.*--unwritten 16-bit, or export.*auto-round"),
        (modernbert, "8 of 8 matrices.*Nothing was done.*Export the plan for a tool that writes them"),
        (lambda: zoo.build("gpt2", n_embd=64), "12 of 12 matrices.*Conv1D.*Export the plan"),
    ],
)
def test_a_plan_for_another_tool_is_refused_before_anything_is_rounded(monkeypatch, tmp_path, make, said):
    model, data = make(), zoo.tokens(2, 8, vocabulary=96)
    plan = plan_bits(rounding_damage(model, data, group=32, unwritten="plan"), bits=6.0)
    monkeypatch.setattr("layerbudget.decisions.bits.pieces.ModelRounding.run", lambda *a, **k: pytest.fail("it was rounded"))
    with pytest.raises(InvalidInput, match=said):
        write_bits(model, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_budget_that_a_refusal_names_is_enough():
    model, data = mixtral(), zoo.tokens(2, 8, vocabulary=96)
    options = {"unwritten": "16-bit", "group": 32}
    with pytest.raises(InfeasibleBudget, match="--bits") as refused:
        plan_bits(model, data, bits=6.0, **options)
    bits, size = re.search(r"--bits ([\d.]+), or --budget (\d+)\)", str(refused.value)).groups()
    by_bits, by_bytes = (plan_bits(model, data, **{**options, **b}) for b in ({"bits": float(bits)}, {"budget": size}))
    assert by_bits.budget["tensors"] == by_bytes.budget["tensors"] == int(size) - by_bits.payload.head_bytes


def test_experts_that_transformers_unrolls_in_packed_folders_are_refused_for_it_alone():
    model = zoo.build("llama4", vocab_size=96)
    with pytest.raises(InvalidInput, match=r"every expert of a packed Llama4TextExperts by itself.*Plan for llama.cpp"):
        plan_bits(model, zoo.tokens(2, 8), bits=8.0)
    assert not unwritable(model, ["model.layers.0.self_attn.q_proj"], find_runtime("vllm"))


def test_a_router_that_stays_in_16_bits_keeps_its_name_and_loads(tmp_path):
    """transformers saves PhiMoE's router under another name than the model has."""
    model = zoo.build("phimoe", hidden_size=64, intermediate_size=64, vocab_size=96)
    plan = plan_bits(model, zoo.tokens(2, 8), bits=15.0, unwritten="16-bit")
    receipt = write_bits(model, plan, tmp_path / "packed")
    assert receipt.bytes == receipt.planned and receipt.modules["model.layers.0.mlp.router"]["format"] == "bf16"
    again, batch = lb.load_model(str(tmp_path / "packed"), dtype="float32"), next(zoo.tokens(2, 8).batches(2))
    with torch.no_grad():  # what is not planned is held in 16 bits
        wanted = model.to(torch.bfloat16).float()(**batch).logits
        torch.testing.assert_close(again(**batch).logits, wanted, rtol=2e-2, atol=2e-2)


def test_a_linear_whose_inputs_have_another_shape_is_no_plain_one():
    """DeepSeek V4's first output matrix takes groups: doctor and plans say so, and go on."""

    class Grouped(torch.nn.Linear):
        def forward(self, x):
            return x.reshape(-1, 2, self.in_features)

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Grouped(8, 8))
    assert unwritable(model, ["0", "1"], find_runtime("vllm")) == {
        "1": "it is a Grouped, which gives something else than a plain Linear"
    }


def test_the_language_model_inside_llama_4_has_the_names_of_the_one_alone():
    pytest.importorskip("gguf")
    names = ["model.layers.1.feed_forward.experts.gate_up_proj", "model.layers.0.self_attn.q_proj", "lm_head"]
    alone = find_names(names, "llama4_text")
    assert find_names([f"language_model.{n}" for n in names], "llama4_text") == {
        f"language_model.{n}": tensors for n, tensors in alone.items()
    }
    assert alone["lm_head"] == ("output",)


@pytest.mark.parametrize("wrapper", ["model.language_model.", "model.text_model.", "model."])
def test_the_language_model_of_one_that_sees_has_the_names_of_the_one_alone(wrapper):
    """SmolVLM, Idefics and Emu 3 call it text_model."""
    names = [f"{wrapper}layers.1.{m}" for m in ("self_attn.q_proj", "mlp.down_proj")]
    assert [*find_names([*names, "lm_head"], "llama").values()] == [("blk.1.attn_q",), ("blk.1.ffn_down",), ("output",)]


def test_biases_of_experts_take_32_bits_in_a_file_that_llama_cpp_converts():
    """They are matrices, one row for each expert: gpt-oss."""
    model = zoo.build("gpt-oss", hidden_size=64, intermediate_size=64)
    table = formats_table(model, family="gguf", formats=["F16"])
    planned = {m.name for b in table.blocks for m in b.modules}
    rest = {n: p for n, p in model.named_parameters() if n not in planned and n.removesuffix(".weight") not in planned}
    wide = [n for n, p in rest.items() if p.ndim == 1 or n.endswith("bias")]
    assert any(rest[n].ndim == 2 for n in wide)
    assert table.fixed == sum(-(-p.numel() * (4 if n in wide else 2) // 32) * 32 for n, p in rest.items())
