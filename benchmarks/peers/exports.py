"""Exported plans of bits, read by the tools that they are for: which format every planned matrix gets from the tool itself.

    python -m benchmarks.peers exports [FOLDER/WITH/PACKAGES ...] [--tools torchao mlx ...] [--page]

A dense model and a mixture with random weights are planned and written into a folder; every export is given to the tool's own
released package. Some tools quantise the model on a processor, and the formats are read back from what they made (*executed*);
of others the own parser and matcher give every module its format (*parsed*). The table has one row for each tool and model: a
matrix counts if the tool gave it the planned format, and *else* are modules beside the plan that it rounded.

Packages (``pip install --no-deps --target FOLDER``, PyTorch and transformers stay those that are there): torchao, llmcompressor and
loguru, gptqmodel (from its source) with device-smi, pypcre, tokenicer, logbar and defuser, mlx, mlx-cpu and mlx-lm with
sentencepiece, nvidia-modelopt with omegaconf, antlr4-python3-runtime, pulp and nvidia-ml-py, auto-round with py-cpuinfo.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.compressors.formats import find_format
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.exports import EXPORTS
from layerbudget.plan import Plan
from layerbudget.records import stacks

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
MIXTURE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": {}, "qwen3_moe": MIXTURE}
Found = dict[str, tuple[int, int | None]]  # bits and group size, None for a whole row, of every module that was rounded


def make_model(kind: str) -> Any:
    """A random model; the vocabulary is that of the embedded tokenizer."""
    torch.manual_seed(0)
    names = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM")}
    config, model = (getattr(transformers, name) for name in names[kind])
    return model(config(vocab_size=len(lb.load_tokenizer("demo")), **SIZES, **MODELS[kind])).eval()


def make_plan(model: Any, formats: list[str], bits: float = 5.0, **options: Any) -> Plan:
    """A plan among some formats."""
    text = lb.calibration("stdlib", lb.load_tokenizer("demo"), samples=2, length=32)
    scores = rounding_damage(model, text, draws=1, formats=formats, unwritten="plan", **options)
    return lb.plan_bits(scores, bits=bits)


def wanted(plan: Plan, names: Callable[[str], list[str]] = lambda name: [name]) -> Found:
    """What a plan says, under the names that a tool has for a matrix."""
    forms = {name: find_format(form) for name, form in plan.payload.formats.items()}
    return {own: (f.bits, f.group) for name, f in forms.items() if not f.plain for own in names(name)}


def experts_apart(name: str) -> list[str]:
    """Names of the matrices of every expert, for tools that take each for a module."""
    if not stacks([name]):
        return [name]
    head, _, leaf = name.rpartition(".")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    return [f"{head}.{i}.{leaf}" for i in range(MIXTURE["num_experts"]) for leaf in leaves]


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
    """llm-compressor quantises without data, and its scheme of every module is read."""
    from llmcompressor import oneshot

    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "recipe.yaml"
        recipe.write_text(EXPORTS.find("llm-compressor").text(plan, {"method": "rtn"}))
        model = oneshot(model=str(folder), recipe=str(recipe), pipeline="datafree", precision="float32")
    found: Found = {}
    for name, module in model.named_modules():
        weights = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if weights is not None:
            found[name] = weights.num_bits, weights.group_size
    return wanted(plan, experts_apart), found


def gptqmodel(folder: Path, kind: str, plan: Plan) -> tuple[Found, Found]:
    """GPTQModel's QuantizeConfig answers for every Linear of the model with experts apart."""
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
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "num_experts": MIXTURE["num_experts"]}
    (folder / "config.json").write_text(json.dumps(config))  # names of transformers 4, which mlx_lm reads
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


def linears(folder: Path) -> list[str]:
    """Names of all matrices but the embedding that the checkpoint of a folder has."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [n.removesuffix(".weight") for n in file.keys() if len(file.get_slice(n).get_shape()) == 2]  # noqa: SIM118
    return [n for n in names if not n.endswith("embed_tokens")]


TOOLS: dict[str, tuple[Callable[[Path, str, Plan], tuple[Found, Found]], str, str, list[str]]] = {
    "torchao": (torchao, "torchao", "executed", ["w2-g32", "w4-g32", "w6-g64", "w8-channel", "fp8"]),
    "llm-compressor": (llm_compressor, "llmcompressor", "executed", ["w3-g32", "w4-g64", "w6-g32", "w8-channel"]),
    "gptqmodel": (gptqmodel, "gptqmodel", "parsed", ["w2-g32", "w3-g32", "w5-g64", "w8-channel"]),
    "mlx": (mlx, "mlx-lm", "executed", ["w2-g32", "w3-g64", "w5-g32", "w8-g64"]),
    "modelopt": (modelopt, "nvidia-modelopt", "executed", ["nvfp4", "mxfp4", "fp8", "w4-g64"]),
    "auto-round": (auto_round, "auto-round", "executed", ["w2-g32", "w3-g32", "w4-g64", "w8-g32"]),
}

REFUSED = {("torchao", "qwen3_moe"): "its configurations of integers take matrices, no stacks of experts"}


def version(package: str) -> str:
    """The version of a tool; GPTQModel is read from its source, which has no metadata."""
    if package == "gptqmodel":
        return str(importlib.import_module("gptqmodel.version").__version__)
    return importlib.metadata.version(package)


def measure(tool: str, kind: str) -> dict[str, Any]:
    """Give a plan for a model to a tool; returns how many modules there are in the plan, and how many got its format."""
    run, package, how, formats = TOOLS[tool]
    model = make_model(kind)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder)
        lb.load_tokenizer("demo").save_pretrained(folder)
        plan = make_plan(copy.deepcopy(model), formats)
        planned, found = run(folder, kind, plan)
    same = sum(found.get(name) == form for name, form in planned.items())
    wrong = {n: (form, found.get(n)) for n, form in planned.items() if found.get(n) != form}
    return {
        "tool": tool, "version": version(package), "how": how, "model": kind, "planned": len(planned),
        "same": same, "else": sorted(found.keys() - planned.keys()), "formats": len(set(planned.values())), "wrong": wrong,
    }  # fmt: skip


def row(tool: str, kind: str, packages: list[Path]) -> dict[str, Any]:
    """Measure in a process of its own: the tools change PyTorch and transformers when they are imported."""
    words = [sys.executable, "-m", "benchmarks.peers", "exports", *map(str, packages), "--one", tool, kind]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tool"')]
    if not lines:
        raise SystemExit(f"{tool}, {kind}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(lines[-1]))


def main() -> None:
    """One row for each tool and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="*", help="folders with packages of the tools")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "MODEL"), help="measure one, print it as JSON and end")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    sys.path.extend(map(str, given.packages))
    if given.one:
        print("\n" + json.dumps(measure(*given.one)), flush=True)
        return
    rows = [row(tool, kind, given.packages) for tool in given.tools for kind in MODELS if (tool, kind) not in REFUSED]
    lines = [
        "| tool | version | how | model | modules in the plan | with the planned format | formats | rounded beside the plan |"
    ]
    lines += ["|---|---|---|---|---:|---:|---:|---:|"]
    lines += [
        f"| {r['tool']} | {r['version']} | {r['how']} | {r['model']} | {r['planned']} | {r['same']} | {r['formats']} | {len(r['else'])} |"
        for r in rows
    ]
    for (tool, kind), why in REFUSED.items():
        lines.append(f"| {tool} | | refused | {kind} | | | | {why} |")
    write_section(
        "peers", "Exports of bits, read by their tools", lines, out=given.out, peers=[TOOLS[t][1] for t in given.tools]
    )
