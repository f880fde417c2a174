"""Plans of bits in the words of other tools: every planned matrix and no other, and refusals."""

from __future__ import annotations

import fnmatch
import json
import re

import pytest
import yaml

from layerbudget.decisions.bits.payload import BitsPayload
from layerbudget.errors import InvalidInput
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan, PlanBlock

FORMS = {
    "model.layers.0.self_attn.q_proj": "w3-g32",
    "model.layers.0.self_attn.k_proj": "w8-channel",
    "model.layers.0.self_attn.o_proj": "bf16",
    "model.layers.10.self_attn.q_proj": "w4-g64-asym",
}
MIXED = {**FORMS, "model.layers.1.mlp.experts.gate_up_proj": "w2-g64", "model.layers.1.mlp.experts.down_proj": "w5-g64"}
EXPERTS = [f"model.layers.1.mlp.experts.{i}.{leaf}" for i in (0, 17) for leaf in ("gate_proj", "up_proj", "down_proj")]
BESIDE = [
    "model.layers.100.self_attn.q_proj",
    "xmodel.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.q_proj.x",
    "lm_head",
]


def plan_of(forms, method="rtn"):
    blocks = tuple(PlanBlock(name=n, value=4.0, count=4, numel=64, modules=(n,)) for n in forms)
    nothing = {"fixed_bytes": 0, "bits": 8.0, "predicted": 0.0, "predicted_error": 0.0, "baselines": {}, "near_ties": []}
    payload = BitsPayload(formats=forms, family="compressed-tensors", runtime="transformers", method=method, **nothing)
    return Plan(kind="bits", rule="by-hand", model={}, blocks=blocks, budget={}, payload=payload)


def text(name, forms, **options):
    return EXPORTS.find(name).text(plan_of(forms), options)


def matched(patterns, names):
    """How many expressions match each name from its start, as the tools match them."""
    return {n: sum(bool(re.match(p, n)) for p in patterns) for n in names}


def test_a_recipe_of_llm_compressor_has_a_group_for_every_format():
    stage = yaml.safe_load(text("llm-compressor", MIXED))["quantization_stage"]["quantization_modifiers"]
    groups = stage["QuantizationModifier"]["config_groups"]
    assert set(groups) == set(MIXED.values()) - {"bf16"} and groups["w3-g32"]["weights"]["num_bits"] == 3
    assert groups["w8-channel"]["weights"]["strategy"] == "channel" and not groups["w4-g64-asym"]["weights"]["symmetric"]
    patterns = [t.removeprefix("re:") for g in groups.values() for t in g["targets"]]
    rounded = [n for n, f in FORMS.items() if f != "bf16"]
    assert set(matched(patterns, [*rounded, *EXPERTS]).values()) == {1}
    assert set(matched(patterns, [*BESIDE, "model.layers.0.self_attn.o_proj"]).values()) == {0}
    gptq = EXPORTS.find("llm-compressor").text(plan_of(FORMS, "gptq"), {})
    assert "GPTQModifier" in gptq
    with pytest.raises(InvalidInput, match="AutoRoundModifier finds no matrix.*--to auto-round"):
        text("llm-compressor", FORMS, method="autoround")
    assert "nvfp4" in text("llm-compressor", {"a": "nvfp4"}) and "torch.float8_e4m3fn" in text("llm-compressor", {"a": "nvfp4"})
    with pytest.raises(InvalidInput, match="has no wanda.*rtn, gptq"):
        text("llm-compressor", FORMS, method="wanda")


def test_gptqmodel_rounds_what_is_named_and_nothing_else():
    """Its negative expressions come first, and modules that none names get the whole configuration's bits."""
    config = json.loads(text("gptqmodel", MIXED))
    (negative, nothing), *positive = config["dynamic"].items()
    assert nothing == {} and negative.startswith("-:")
    patterns = {p.removeprefix("+:"): own for p, own in positive}
    for name in [*(n for n, f in FORMS.items() if f != "bf16"), *EXPERTS]:
        assert matched(patterns, [name]) == {name: 1} and not re.match(negative[2:], name)
    for name in [*BESIDE, "model.layers.0.self_attn.o_proj"]:
        assert re.match(negative[2:], name) and not any(re.match(p, name) for p in patterns)
    own = patterns[re.escape("model.layers.0.self_attn.k_proj").join("^$")]
    assert own == {"bits": 8, "group_size": -1, "sym": True} and config["desc_act"] is False
    with pytest.raises(InvalidInput, match="keeps all matrices in 16 bits"):
        text("gptqmodel", {"a": "bf16"})


def test_auto_round_names_also_what_stays():
    table = json.loads(text("auto-round", MIXED))
    assert table["model.layers.0.self_attn.o_proj"] == {"bits": 16, "data_type": "float"}
    assert table["model.layers.0.self_attn.k_proj"] == {"bits": 8, "group_size": -1, "sym": True, "data_type": "int"}
    patterns = [key.replace(".", r"\.") for key in table if key.startswith("^")]  # AutoRound escapes dots itself
    assert set(matched(patterns, EXPERTS).values()) == {1} and len(table) == len(MIXED)
    assert r"^model.layers.1.mlp.experts.\d+.(?:down_proj)$" in table


def test_torchao_and_modelopt_name_modules_and_refuse_what_they_do_not_have():
    held = json.loads(text("torchao", {**FORMS, "lm_head": "fp8"}))["_data"]["fqn_to_config"]
    assert set(held) == {*(n for n, f in FORMS.items() if f != "bf16"), "lm_head"}
    assert held["model.layers.10.self_attn.q_proj"]["_data"]["mapping_type"]["_data"] == "ASYMMETRIC"
    assert held["lm_head"]["_type"] == "Float8WeightOnlyConfig"
    with pytest.raises(InvalidInput, match="gate_up_proj is a stack of experts, which torchao.*--runtime vllm or llama.cpp"):
        text("torchao", MIXED)
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        with pytest.raises(InvalidInput, match=f"gets {name}"):
            text("torchao", {"a": name})
    rows = yaml.safe_load(text("modelopt", {"a.b": "nvfp4", "c": "bf16", "d": "fp8", "x.experts.down_proj": "w4-g32"}))[
        "quant_cfg"
    ]
    names = [row["quantizer_name"] for row in rows]
    assert names == ["*", "a.b.weight_quantizer", "d.weight_quantizer", "x.experts.down_proj_weight_quantizer"]
    assert rows[0] == {"quantizer_name": "*", "enable": False} and rows[2]["cfg"] == {"num_bits": [4, 3], "axis": 0}
    assert rows[3]["cfg"] == {"num_bits": 4, "block_sizes": {-1: 32}}
    grids = [yaml.safe_load(text("modelopt", {"a": n}))["quant_cfg"][1]["cfg"] for n in ("nvfp4", "mxfp4", "mxfp8")]
    assert [g["num_bits"] for g in grids] == [[2, 1], [2, 1], [4, 3]]
    assert [(b[-1], b["scale_bits"]) for b in (g["block_sizes"] for g in grids)] == [(16, [4, 3]), (32, [8, 0]), (32, [8, 0])]
    with pytest.raises(InvalidInput, match="w4-g64-asym, and ModelOpt's grids are symmetric"):
        text("modelopt", FORMS)


def test_exllamav3_has_bits_for_every_tensor_and_the_head_apart():
    """The last line that matches decides, and a name that matches nothing is an error there."""
    recipe = yaml.safe_load(text("exllamav3", {**MIXED, "lm_head": "w6-g64"}))
    assert (recipe["head_bits"], recipe["target_bpw"]) == (6, round((3 + 8 + 16 + 4 + 2 + 5 + 6) / 7, 3))
    (first, whole), *lines = recipe["tensors"].items()
    assert (first, whole) == ("*", 16)
    bits = {n: [b for pattern, b in lines if fnmatch.fnmatchcase(n, pattern)] for n in [*FORMS, *EXPERTS, *BESIDE]}
    assert [bits[n] for n in FORMS] == [[3], [8], [16], [4]] and not any(bits[n] for n in BESIDE)
    assert [bits[n] for n in EXPERTS] == [[2], [2], [5]] * 2
    assert yaml.safe_load(text("exllamav3", FORMS))["head_bits"] == 16


def test_onnx_has_an_exact_override_for_every_matrix_and_one_group_size():
    forms = {
        "model.layers.0.self_attn.q_proj": "w8-g32",
        "model.layers.1.self_attn.o_proj": "bf16",
        "model.layers.10.mlp.down_proj": "w4-g32",
        "model.layers.1.mlp.experts.down_proj": "bf16",
    }
    config = json.loads(text("onnx", forms))["quant_config"]
    assert (config["weights"]["block_size"], config["weights"]["symmetric"], config["moe"]) == (32, True, {"type": "none"})
    assert [(o["match"]["name"], o.get("type", o.get("exclude"))) for o in config["weights"]["overrides"]] == [
        ("/model/layers.0/attn/q_proj/MatMul", "int8"),
        ("/model/layers.1/attn/o_proj/MatMul", True),
        ("/model/layers.10/mlp/down_proj/MatMul", "int4"),
        ("/lm_head/MatMul", True),
    ]
    headed = json.loads(text("onnx", {**forms, "lm_head": "w8-g32"}))["quant_config"]["weights"]["overrides"]
    assert headed[-1] == {"match": {"name": "/lm_head/MatMul"}, "type": "int8"}
    q = "model.layers.0.self_attn.q_proj"
    for wrong, said in (
        ({**forms, q: "w8-g64"}, "groups of one size.*w4-g32, w8-g64"),
        ({q: "w8-channel"}, "groups of one size"),
        ({q: "bf16"}, "no rounded matrix"),
        ({q: "w3-g32"}, "gets w3-g32, which ONNX Runtime GenAI does not take"),
        ({"model.layers.1.mlp.experts.down_proj": "w4-g32"}, "experts.down_proj has no node of its own"),
        ({"model.layers.1.self_attn.qkv_proj": "w4-g32"}, "qkv_proj has no node of its own"),
    ):
        with pytest.raises(InvalidInput, match=said):
            text("onnx", wrong)


def test_mlx_names_experts_by_the_architecture():
    forms = {n: f for n, f in MIXED.items() if f not in ("w8-channel", "w4-g64-asym")}
    table = json.loads(text("mlx", forms, model_type="mixtral"))["quantization"]
    names = [f"model.layers.1.block_sparse_moe.switch_mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    assert [table[n]["bits"] for n in names] == [2, 2, 5] and not any("experts" in n for n in table)
    qwen = json.loads(text("mlx", forms, model_type="qwen3_moe"))["quantization"]
    assert "model.layers.1.mlp.switch_mlp.down_proj" in qwen and qwen["group_size"] == 32
    for options in ({}, {"model_type": "llama"}):
        with pytest.raises(InvalidInput, match="which MLX names by the architecture.*--model-type"):
            text("mlx", forms, **options)


def test_layers_of_a_model_that_sees_have_the_names_of_the_tool():
    """mlx_lm builds the language model as a whole model; exllamav3 names it as its checkpoint does, in one of two ways."""
    q, own = "model.language_model.layers.1.self_attn.q_proj", "language_model.model.layers.1.self_attn.q_proj"
    forms = {q: "w4-g64", "model.language_model.layers.11.self_attn.q_proj": "w8-g64", "lm_head": "w6-g64"}
    table = json.loads(text("mlx", forms))["quantization"]
    assert table[own]["bits"] == 4 and table["language_model.lm_head"]["bits"] == 6 and q not in table
    nano = json.loads(text("mlx", {**forms, "model.language_model.layers.1.laurel.linear_left": "w4-g64"}))["quantization"]
    assert nano[q]["bits"] == 4 and nano["lm_head"]["bits"] == 6  # Gemma 3n's is one model there too
    recipe = yaml.safe_load(text("exllamav3", forms))
    lines = list(recipe["tensors"].items())[1:]
    for name in (q, own):
        assert [bits for pattern, bits in lines if fnmatch.fnmatchcase(name, pattern)] == [4]
    assert not any(fnmatch.fnmatchcase("model.vision_tower.encoder.layers.1.self_attn.q_proj", p) for p, _ in lines)


@pytest.mark.parametrize("name", ["auto-round", "gptqmodel", "exllamav3"])
def test_floating_point_is_refused_by_tools_of_integers(name):
    with pytest.raises(InvalidInput, match="a gets nvfp4, which .* does not take.*integers of (1, )?2, 3"):
        text(name, {"a": "nvfp4"})
