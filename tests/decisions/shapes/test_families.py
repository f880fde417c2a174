"""Smaller shapes of families whose layers or configurations are not like Llama's: they work, or are refused before any work."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.shapes.apply import apply_shapes, drop_layers
from layerbudget.decisions.shapes.compensation import ways_of
from layerbudget.decisions.shapes.layouts import find_attention, find_mlp
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.shapes.save import check_depth, check_exportable, save_smaller
from layerbudget.errors import InvalidInput, UnknownStructure
from layerbudget.models.blocks import layers
from layerbudget.models.experts import cut_experts, find_experts
from layerbudget.models.loading import load_model
from layerbudget.reporting.verdict import verdict

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
FAMILIES = {
    "gemma3n": ("Gemma3nTextConfig", {
        "intermediate_size": [48, 48], "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
        "activation_sparsity_pattern": [0.0, 0.0]}),
    "falcon-h1": ("FalconH1Config", {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 4, "n_inner": 48}),
    "gpt-neo": ("GPTNeoConfig", {
        "num_layers": 2, "num_heads": 4, "window_size": 8, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]]}),
    "falcon": ("FalconConfig", {"ffn_hidden_size": 48}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "qwen2-moe": ("Qwen2MoeConfig", MIXTURE),
    "llama4": ("Llama4TextConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 16, "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 32}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1}),
}  # fmt: skip


def build(name, **changes):
    config, fields = FAMILIES[name]
    fields = {**SIZES, **fields, **changes}
    for field in {"gpt-neo": ("num_hidden_layers",), "falcon": ("head_dim",)}.get(name, ()):
        del fields[field]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields)).float().eval()


def seeing(layers=1):
    """A model that reads images too: its language model's configuration lies in another."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**SIZES), vision_config=vision, image_token_index=5)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


def evenly(model, data, kinds=("mlp",), **options):
    return plan_shapes(model, data, "2% params", kinds=kinds, even=True, multiple=4, passes=20, strides=1, draws=1, **options)


@pytest.mark.parametrize("name", ["gemma3n", "falcon-h1", "gptj", "gpt-neo", "falcon", "qwen2-moe", "llava"])
def test_narrower_mlps_are_written_where_the_family_keeps_their_width(name, tmp_path):
    data = zoo.tokens(4, 12)
    model = seeing() if name == "llava" else build(name)
    plan = evenly(model, data)
    check_exportable(model, plan)
    apply_shapes(model, plan, data)
    save_smaller(model, None, tmp_path / "out", plan=plan)
    back = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert [find_mlp(m, n).width for n, m in layers(back)] == [find_mlp(m, n).width for n, m in layers(model)]
    batch = next(data.batches(2))
    with torch.no_grad():
        torch.testing.assert_close(back(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


def test_layers_with_several_streams_are_refitted_each_for_itself():
    assert ways_of(build("gemma3n"), zoo.tokens(1, 8)) == "refit"


def test_what_no_configuration_can_hold_is_refused_before_anything_is_measured(monkeypatch):
    model, data = build("bloom"), zoo.tokens(4, 12)
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(UnknownStructure, match="No smaller width .*BloomConfig has no field") as width:
        evenly(model, data)
    with pytest.raises(UnknownStructure, match="BloomAttention") as heads:
        evenly(model, data, kinds=("heads", "mlp"))
    for error in (width.value, heads.value):  # neither kind works, so neither sends to the other
        assert "Prune its weights instead" in error.remedy and "--parts" not in error.remedy
    with pytest.raises(UnknownStructure, match="--parts mlp"):
        plan_shapes(model, data, "2% params", kinds=("heads", "mlp"))  # layers that differ need no configuration


@pytest.mark.parametrize(("name", "changes"), [("llama4", {"interleave_moe_layer_step": 1}), ("hunyuan-moe", {})])
def test_a_width_that_routed_experts_have_too_is_refused_and_heads_are_written(name, changes, monkeypatch, tmp_path):
    """Their shared expert became narrower, and the checkpoint did not load: experts of that width were looked for."""
    model, data = build(name, **changes), zoo.tokens(4, 12)
    with monkeypatch.context() as patched:
        patched.setattr("layerbudget.decisions.shapes.path.ShapePoint", lambda *a, **k: pytest.fail("it was measured"))
        with pytest.raises(UnknownStructure, match="cannot say width .* without another shape of .*experts.*--parts heads"):
            evenly(model, data)
    plan = evenly(model, data, kinds=("heads", "mlp"), compensate="refit")
    assert not any(s.removed for s in plan.payload.shapes.values() if s.kind == "mlp")
    apply_shapes(model, plan, data)
    save_smaller(model, None, tmp_path / "out", plan=plan)
    back = load_model(str(tmp_path / "out"))
    with torch.no_grad():
        torch.testing.assert_close(back(data.input_ids).logits, model(data.input_ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["smollm3", "gpt-neo", "llava"])
def test_what_a_configuration_says_of_every_layer_goes_with_a_layer(name, tmp_path):
    """Layers got another's position embedding or window when they were loaded, and towers of as many layers lost one."""
    changes = {"smollm3": {"num_hidden_layers": 4}, "gpt-neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}}
    model, ids = seeing(2) if name == "llava" else build(name, **changes[name]), zoo.tokens(4, 16).input_ids
    check_depth(model)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2, generator=torch.Generator().manual_seed(p.numel()))
        drop_layers(model, [layers(model)[1][0]])
        save_smaller(model, None, tmp_path / "out")
        back = load_model(str(tmp_path / "out"))
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert [p.shape for p in back.parameters()] == [p.shape for p in model.parameters()]
    if name == "gpt-neo":
        assert [layer.attn.attention.layer_id for _, layer in layers(model)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (build("gemma3n"), "embed_tokens_per_layer.weight would be another"),
        (zoo.tiny("gpt2", scale_attn_by_inverse_layer_idx=True), "transformer.h.0.attn.scaling would be another"),
        (build("llama4"), "model.layers.0.feed_forward would be another"),
    ],
)
def test_layers_that_are_others_without_one_are_refused_before_anything_is_measured(model, said, monkeypatch):
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(UnknownStructure, match=f"cannot say that a layer of this model is gone .*{said}.*leave --depth out"):
        plan_shapes(model, zoo.tokens(4, 12), "20% flops", depth=1)


def test_layers_that_differ_are_refused_before_anything_is_measured_and_the_remedy_works(monkeypatch, tmp_path):
    model, data = build("llama4"), zoo.tokens(4, 12)
    with monkeypatch.context() as patched:
        patched.setattr("layerbudget.decisions.shapes.path.ShapePoint", lambda *a, **k: pytest.fail("it was measured"))
        with pytest.raises(InvalidInput, match="layers differ in their MLPs.*Remove heads .--parts heads"):
            plan_shapes(model, data, "2% params", even=True)
    plan = evenly(model, data, kinds=("heads",), compensate="refit")
    check_exportable(model, plan)
    apply_shapes(model, plan, data)
    save_smaller(model, None, tmp_path / "out", plan=plan)


def test_a_gate_of_attention_outputs_is_refused_by_name():
    config = transformers.AfmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                      num_dense_layers=1, num_shared_experts=1, sliding_window=8)  # fmt: skip
    model = transformers.AfmoeForCausalLM(config)
    with pytest.raises(UnknownStructure, match=r"has a matrix beside queries, keys, values and output \(gate_proj\)"):
        find_attention(*layers(model)[0][::-1])


def test_a_plan_that_no_checkpoint_can_hold_is_refused_before_the_model_runs(tmp_path, monkeypatch, capsys, tokenizer):
    model, data = build("bloom"), zoo.tokens(4, 12)
    plan = plan_shapes(model, data, "2% params", kinds=("mlp",), passes=20, strides=1, draws=1)
    model.save_pretrained(tmp_path / "model")
    plan.save(tmp_path / "plan.json")
    (tmp_path / "text.txt").write_text("in the year of the flood " * 200)
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("it ran"))
    words = ["--data", str(tmp_path / "text.txt"), "--samples", "2", "--length", "16", "--quiet"]
    assert main(["apply", str(tmp_path / "model"), str(tmp_path / "plan.json"), *words, "-o", str(tmp_path / "out")]) == 2
    assert "BloomConfig has no field for the width of its MLPs" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_equal_heads_beside_experts_that_differ_are_not_said_to_load_everywhere(tmp_path):
    model, data = zoo.build("qwen3-moe"), zoo.tokens(4, 12)
    cut_experts(model, {e.name: list(range(8 - i)) for i, e in enumerate(find_experts(model))})
    model.save_pretrained(tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    plan = evenly(model, data, kinds=("heads",))
    assert "only layerbudget.load_model loads the result" in verdict(plan) and "Every runtime" not in verdict(plan)
    with pytest.raises(InvalidInput, match="different numbers of experts, which vllm does not load"):
        evenly(model, data, kinds=("heads",), runtime="vllm")
    apply_shapes(model, plan, data)
    save_smaller(model, None, tmp_path / "out", plan=plan)
    assert "lb.load_model('.')" in (tmp_path / "out" / "README.md").read_text()
    with torch.no_grad():
        torch.testing.assert_close(load_model(str(tmp_path / "out"))(data.input_ids).logits, model(data.input_ids).logits)
