"""Tools that quantise by a plan of bits: what each made of an exported plan."""

from __future__ import annotations

import importlib.machinery
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import transformers
import yaml
from benchmarks.peers.exported import Found, Tool, experts_apart, name_as_before, stand_in, text

import layerbudget as lb
from layerbudget.compressors.formats import find_format
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan


def among(*formats: str) -> Callable[[Any], Plan]:
    """How a plan among some formats is made, of 5 bits a weight."""

    def make(model: Any) -> Plan:
        return lb.plan_bits(rounding_damage(model, text(), draws=1, formats=formats, unwritten="plan"), bits=5.0)

    return make


def wanted(plan: Plan, names: Callable[[str], list[str]] = lambda name: [name]) -> Found:
    """What a plan says, under the names that a tool has for a matrix."""
    forms = {name: find_format(form) for name, form in plan.payload.formats.items()}
    return {own: (f.bits, f.group) for name, f in forms.items() if not f.plain for own in names(name)}


def torchao(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """Quantise by torchao, and its tensors say their type and block."""
    from torchao.core.config import config_from_dict
    from torchao.quantization import quantize_

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    quantize_(model, config_from_dict(json.loads(EXPORTS.find("torchao").text(plan, {}))), filter_fn=None)
    found: Found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "block_size"):
            group = weight.block_size[-1]
            bits = 8 if "Float8" in type(weight).__name__ else int(re.sub(r"\D", "", str(weight.target_dtype)))
            found[name] = bits, None if group == weight.shape[-1] else group
    return wanted(plan), found


def llm_compressor(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """llm-compressor quantises without text by QuantizationModifier, and its scheme of every module is read."""
    return _llm_compressor(folder, plan, "rtn", pipeline="datafree")


def llm_compressor_gptq(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """llm-compressor quantises on a few tokens by GPTQModifier, and its scheme of every module is read."""
    rows = datasets.Dataset.from_dict({"input_ids": text().input_ids.tolist()})
    return _llm_compressor(folder, plan, "gptq", dataset=rows, max_seq_length=32)


def _llm_compressor(folder: Path, plan: Plan, method: str, **options: Any) -> tuple[Found, Found]:
    from llmcompressor import oneshot

    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "recipe.yaml"
        recipe.write_text(EXPORTS.find("llm-compressor").text(plan, {"method": method}))
        model = oneshot(model=str(folder), recipe=str(recipe), precision="float32", **options)
    found: Found = {}
    for name, module in model.named_modules():
        weights = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if weights is not None:
            found[name] = weights.num_bits, weights.group_size
    return wanted(plan, experts_apart), found


def gptqmodel(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """GPTQModel's QuantizeConfig answers for every Linear of the model with experts apart; it was not run on a model."""
    from gptqmodel.quantization.config import QuantizeConfig

    config = QuantizeConfig(**json.loads(EXPORTS.find("gptqmodel").text(plan, {})))
    found: Found = {}
    for name in linears(folder):
        own = config.dynamic_get(name)
        if own is not False:
            own = own or {}
            group = own.get("group_size", config.group_size)
            found[name] = own.get("bits", config.bits), None if group == -1 else group
    return wanted(plan, experts_apart), found


def mlx(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """mlx_lm converts the folder, and its layers say their bits and group size."""
    from mlx_lm import convert, load

    table = json.loads(EXPORTS.find("mlx").text(plan, {"model_type": kind}))["quantization"]
    name_as_before(folder)
    with tempfile.TemporaryDirectory() as place:
        convert(
            str(folder), str(Path(place) / "out"), quantize=True, q_group_size=table["group_size"],
            quant_predicate=lambda path, _: table.get(path, False),
        )  # fmt: skip
        model, _ = load(str(Path(place) / "out"))
    found: Found = {n: (m.bits, m.group_size) for n, m in model.named_modules() if hasattr(m, "bits")}

    def names(name: str) -> list[str]:
        own = experts_apart(name)
        return own if own == [name] else sorted({re.sub(r"\.experts\.\d+\.", ".switch_mlp.", n) for n in own})

    return wanted(plan, names), found


def modelopt(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """ModelOpt quantises (it rounds in the forward), and its quantisers that are on are read."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import TensorQuantizer

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    mtq.quantize(model, yaml.safe_load(EXPORTS.find("modelopt").text(plan, {})))
    found: Found = {}
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            own = re.sub(r"(\.|_)weight_quantizers?(\.\d+)?$", "", name)
            sizes = module.block_sizes or {}
            bits = module.num_bits if isinstance(module.num_bits, int) else sum(module.num_bits) + 1
            found[own] = bits, sizes.get(-1)
    return wanted(plan), found


def auto_round(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """AutoRound rounds without tuning (RTN), and the bits that its layers were given are read."""
    from auto_round import AutoRound

    table = json.loads(EXPORTS.find("auto-round").text(plan, {}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rounder = AutoRound(model, tokenizer, scheme="W4A16", layer_config=table, iters=0, disable_opt_rtn=True)
    rounder.quantize()
    held = {n: c for n, c in rounder.layer_config.items() if c.get("bits", 16) < 16}
    found: Found = {n: (c["bits"], None if c["group_size"] == -1 else c["group_size"]) for n, c in held.items()}
    return wanted(plan, experts_apart), found


def exllamav3(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """exllamav3 builds its modules from the folder, and its own parser of recipes says the bits of each.

    Its kernels need a GPU and stand empty here, as Triton does: nothing was rounded.
    """
    stand_in("triton", "triton.language")
    stand_in("exllamav3_ext", suffix=importlib.machinery.EXTENSION_SUFFIXES[0])
    from exllamav3 import Config, Model
    from exllamav3.conversion.allocation import create_q_strategy_from_recipe

    name_as_before(folder)
    recipe = yaml.safe_load(EXPORTS.find("exllamav3").text(plan, {}))
    config = Config.from_directory(str(folder))
    strategy, _ = create_q_strategy_from_recipe(
        Model.from_config(config), None, config, recipe["tensors"], recipe["head_bits"], 16
    )
    bits = {name: form[0] for name, form in wanted(plan, experts_apart).items()}
    return bits, {name: own for name, own in strategy.items() if own < 16}


def onnxruntime_genai(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """The model builder of ONNX Runtime GenAI writes an ONNX model, and the bits and block of its nodes are read."""
    import onnx
    import onnxruntime_genai

    sys.path.insert(0, str(Path(onnxruntime_genai.__file__).parent / "models"))
    import builder

    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "target.json"
        target.write_text(EXPORTS.find("onnx").text(plan, {}))
        place_of = (str(folder), str(folder), place, None, "cpu", place)
        builder.create_model(*place_of, **builder.parse_extra_options(*place_of, [], target_options=str(target)))
        nodes = onnx.load(str(Path(place) / "model.onnx"), load_external_data=False).graph.node
    found: Found = {}
    for node in nodes:
        own = {a.name: a.i for a in node.attribute}
        if node.op_type == "MatMulNBits":
            found[node.name.removesuffix(f"_Q{own['bits']}")] = own["bits"], own["block_size"]

    def names(name: str) -> list[str]:
        layer, _, leaf = name.removeprefix("model.layers.").partition(".")
        return [f"/model/layers.{layer}/{leaf.removeprefix('self_').replace('.', '/')}/MatMul"]

    return wanted(plan, names), found


def linears(folder: Path) -> list[str]:
    """Names of all matrices but the embedding that the checkpoint of a folder has."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [n.removesuffix(".weight") for n in file.keys() if len(file.get_slice(n).get_shape()) == 2]  # noqa: SIM118
    return [n for n in names if not n.endswith("embed_tokens")]


TOOLS = {
    "exllamav3": Tool(exllamav3, "exllamav3", "parsed", among("w2-g32", "w3-g32", "w5-g64", "w8-channel"), "bits"),
    "onnx": Tool(
        onnxruntime_genai, "onnxruntime-genai", "executed", among("w4-g32", "w8-g32"),
        refused={"qwen3_moe": "overrides name no experts: one type serves those of all layers"},
    ),
    "torchao": Tool(
        torchao, "torchao", "executed", among("w2-g32", "w4-g32", "w6-g64", "w8-channel", "fp8"),
        refused={"qwen3_moe": "its configurations of integers take matrices, no stacks of experts"},
    ),
    "llm-compressor": Tool(llm_compressor, "llmcompressor", "executed", among("mxfp4", "mxfp8", "w3-g32", "w4-g64", "w6-g32")),
    "llm-compressor, --method gptq": Tool(
        llm_compressor_gptq, "llmcompressor", "executed", among("w3-g32", "w4-g64", "w6-g32", "w8-channel")
    ),
    "gptqmodel": Tool(gptqmodel, "gptqmodel", "parsed", among("w2-g32", "w3-g32", "w5-g64", "w8-channel")),
    "mlx": Tool(mlx, "mlx-lm", "executed", among("w2-g32", "w3-g64", "w5-g32", "w8-g64")),
    "modelopt": Tool(modelopt, "nvidia-modelopt", "executed", among("nvfp4", "mxfp4", "mxfp8", "fp8", "w4-g64")),
    "auto-round": Tool(auto_round, "auto-round", "executed", among("w2-g32", "w3-g32", "w4-g64", "w8-g32")),
}  # fmt: skip
