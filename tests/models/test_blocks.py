import dataclasses
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import zoo
from torch import nn

import layerbudget as lb
from layerbudget.errors import BadModel, CorruptFile, CoverageError, InvalidInput, ModelMismatch, UnknownBlock, UnknownStructure
from layerbudget.models.blocks import check_finite, describe, fingerprint, layers, left_out, partition, weight_of
from layerbudget.models.loading import DEMO_MODEL, load_model
from layerbudget.plan import Plan, PlanBlock

EXPECTED = {  # matrices per layer, prunable parameters per layer, computed by hand from the tiny config
    "llama": (7, 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48),
    "mistral": (7, 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48),
    "gemma": (7, 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48),
    "qwen2": (7, 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48),
    "opt": (6, 32 * 32 * 4 + 2 * 32 * 48),
    "gpt2": (4, 32 * 96 + 32 * 32 + 2 * 32 * 128),
    "bert": (6, 32 * 32 * 4 + 2 * 32 * 48),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_partition_by_layer_counts_prunable_parameters(kind):
    model = zoo.speaker(kind)
    blocks = partition(model)
    matrices, numel = EXPECTED[kind]
    assert len(blocks) == 3
    assert [len(b.modules) for b in blocks] == [matrices] * 3
    assert [b.numel for b in blocks] == [numel] * 3
    assert all(b.flops_per_token == 2 * b.numel for b in blocks)
    assert [b.name.rsplit(".", 1)[1] for b in blocks] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", [*EXPECTED, "mixtral"])
def test_every_named_matrix_is_found_again_with_its_shape(kind):
    model = zoo.speaker(kind)
    for block in partition(model, "linear"):
        (module,) = block.modules
        assert block.name == module.name
        _, weight = weight_of(model, module.name)
        assert weight.numel() == module.numel


def test_fused_experts_count_every_copy_but_only_active_flops():
    block = partition(zoo.speaker("mixtral"))[0]
    experts = [m for m in block.modules if "experts" in m.name]
    assert {m.copies for m in experts} == {4}
    assert sum(m.numel for m in experts) == 4 * 3 * 32 * 48
    assert sum(m.flops_per_token for m in experts) == 2 * 2 * 3 * 32 * 48


def test_include_exclude_and_pattern():
    model = zoo.speaker("llama")
    assert {m.name.rsplit(".", 1)[1] for b in partition(model, include="mlp") for m in b.modules} == {
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not [
        m for b in partition(model, exclude=r"\.0\.|down_proj") for m in b.modules if "down" in m.name or ".0." in m.name
    ]
    names = [b.name for b in partition(model, by=r"layers\.\d+\.(?:self_attn|mlp)")]
    assert len(names) == 6 and names == sorted(names)


def test_natural_order_beyond_nine_layers():
    import transformers as t

    config = t.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=12, num_attention_heads=2, num_key_value_heads=2
    )
    names = [b.name for b in partition(t.LlamaForCausalLM(config))]
    assert names == [f"model.layers.{i}" for i in range(12)]


def test_unknown_structure_lists_what_was_found():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(UnknownStructure, match=r"Sequential has no list of layers; its children are 0 \(Linear\)"):
        layers(model)
    assert [b.name for b in partition(model, "linear")] == ["0", "2"]


def test_two_stacks_are_refused_by_layer_but_not_by_linear():
    import transformers as t

    config = t.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4)
    model = t.T5ForConditionalGeneration(config)
    with pytest.raises(UnknownStructure, match="2 lists of layers"):
        partition(model)
    assert partition(model, "linear")


def test_tied_weights_are_counted_once():
    model = zoo.speaker("llama")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    blocks = partition(model)
    assert "model.layers.0.mlp.up_proj" in [m.name for m in blocks[0].modules]
    assert "model.layers.2.mlp.up_proj" not in [m.name for m in blocks[2].modules]


def test_a_head_tied_to_the_embedding_is_never_prunable():
    model = zoo.speaker("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not [b for b in partition(model, "linear") if "lm_head" in b.name]


def test_bad_expressions():
    with pytest.raises(InvalidInput, match="not a regular expression"):
        partition(zoo.speaker("llama"), include="(")
    with pytest.raises(UnknownBlock, match="No weight matrix is left"):
        partition(zoo.speaker("llama"), include="nothing")
    with pytest.raises(UnknownBlock, match="no weight matrix 'model.nope'"):
        weight_of(zoo.speaker("llama"), "model.nope")


def test_fingerprint_sees_a_changed_weight_and_survives_a_cast():
    model = zoo.speaker("llama")
    before = fingerprint(model)
    assert fingerprint(zoo.speaker("llama").to(torch.bfloat16)) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert fingerprint(model) != before
    assert describe(model)["digest"] == fingerprint(model)


def test_nan_weights_are_named():
    model = zoo.speaker("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(BadModel, match=r"model.layers.1.mlp.up_proj.weight holds 1 values"):
        check_finite(model)


def test_the_kernel_of_a_convolution_is_no_stack_of_experts():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.conv = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, groups=4)

    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    assert [m.name for b in partition(model) for m in b.modules] == ["layers.0.mix", "layers.1.mix"]


def test_what_says_which_keys_are_seen_is_no_matrix_of_a_block():
    """No gradient comes through DeepSeek's indexer: scores of all else are there without an option."""
    sizes = {**zoo.PLAIN, **zoo.EIGHT, **zoo.SHARED, "num_hidden_layers": 2, "num_key_value_heads": 4,
             "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
             "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}  # fmt: skip
    model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes)).eval()
    assert any("indexer" in n for n, _ in model.named_parameters())
    blocks = lb.partition(model)
    assert not any("indexer" in m.name for b in blocks for m in b.modules)
    assert len(lb.score(model, zoo.tokens(2, 8), blocks).names) == 2


def test_a_truncated_checkpoint_and_a_missing_device_end_in_a_sentence(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "broken")
    weights = next((tmp_path / "broken").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CorruptFile, match="model.safetensors does not read as safetensors"):
        load_model(str(tmp_path / "broken"))
    with pytest.raises(InvalidInput, match="nowhere"):
        load_model("demo", device="nowhere")


def test_a_checkpoint_that_lacks_a_tensor_is_not_filled_with_random_numbers(tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "part")
    weights = next((tmp_path / "part").glob("*.safetensors"))
    tensors = load_file(weights)
    del tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(BadModel, match="lacks 1 tensors, first model.layers.3.mlp.down_proj.weight"):
        load_model(str(tmp_path / "part"))


def test_transposed_experts_have_their_sides_the_right_way_round():
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
        )  # fmt: skip
    )
    found = {m.name.rsplit(".", 1)[1]: (m.d_in, m.d_out, m.copies) for b in partition(model) for m in b.modules}
    assert found["gate_up_proj"] == (16, 48, 4) and found["down_proj"] == (24, 16, 4)


def packed(model):
    """Weights of all matrices in the layers as packed bytes, as quantisers leave them."""
    for _, layer in layers(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    return model


def test_a_quantised_model_is_known_by_its_skeleton():
    plain, held = zoo.speaker("llama"), packed(zoo.speaker("llama"))
    a, b = describe(plain), describe(held)
    assert not a["quantised"] and b["quantised"] and a["digest"] != b["digest"] and a["skeleton"] == b["skeleton"]
    assert describe(packed(zoo.speaker("llama")))["digest"] == b["digest"]
    rows = (PlanBlock(name="q", value=1.0, count=1, numel=4, modules=("q",)),)
    plan = Plan(kind="ranks", rule="uniform", blocks=rows, budget={"unit": "params", "limit": 1, "spent": 1}, model=a)
    plan.validate(b)
    dataclasses.replace(plan, model=b).validate(a)
    other = zoo.speaker("llama")
    with torch.no_grad():
        next(p for n, p in other.named_parameters() if n.endswith("norm.weight")).add_(1.0)
    with pytest.raises(ModelMismatch, match="or use the model that the plan names"):
        plan.validate(describe(packed(other)))
    with pytest.raises(ModelMismatch, match="or use the model that the plan names"):
        plan.validate(describe(other, "another"))
    with pytest.raises(ModelMismatch, match="Another precision rounds the weights. If these weights were changed since, score"):
        plan.validate(describe(zoo.speaker("llama").to(torch.float16)))


def test_quantised_values_are_not_read():
    model = packed(zoo.speaker("llama"))
    name = partition(model, "linear")[0].modules[0].name
    with pytest.raises(CoverageError, match="is quantised"):
        weight_of(model, name)
    assert weight_of(model, name, packed=True)[0].in_features > 0


def test_a_matrix_whose_rows_belong_to_groups_of_its_inputs_is_in_no_block():
    """DeepSeek V4's first output matrix, which looks like a Linear: neither masks nor adapters would be right there."""
    model = nn.Sequential(nn.Linear(8, 8), grouped := nn.Linear(4, 8))
    grouped.n_groups = 2
    blocks = partition(model, "linear")
    assert [b.name for b in blocks] == ["0"] and left_out(model, blocks) == {"1.weight": 32}


def test_a_model_without_values_is_refused(tmp_path):
    with torch.device("meta"):
        model = zoo.build("llama")
    with pytest.raises(BadModel, match="has no values: it is on the device meta"):
        lb.plan_sparsity(model, zoo.tokens(2, 8), sparsity=0.5)
    with pytest.raises(BadModel, match="has no values: it is on the device meta"):
        lb.score(model, zoo.tokens(2, 8), partition(model), "gradient-norm")
