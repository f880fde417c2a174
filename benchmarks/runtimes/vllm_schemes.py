"""vLLM's own rules on a folder written here: which kernel's scheme it gives every layer, and what it reads floats in groups back as.

    python -m benchmarks.runtimes vllm_schemes PATH/TO/FOLDER/WITH/vllm [FOLDER/WITH/ITS/PACKAGES] [--model demo] [--bits 5.5 7]

Plans among nvfp4, fp8, w4-g32 and w8-g32, and among nvfp4, mxfp8 and w4-g32, for the runtime vllm are made and written, for the model and for a random Qwen3-MoE of
three layers (``--experts``: its bits). The Python files of a vLLM wheel parse its config.json, find the scheme of every fused
layer and of every layer's experts (they raise where members differ), and their reference code makes numbers of nvfp4 and mxfp8. No GPU and
no compiled part of vLLM is needed: some packages that are not installed are replaced by empty ones. For vLLM 0.33 these must be there:
fastapi, starlette, openai, jiter, distro, sniffio, httpx, httpcore, h11, anyio, openai-harmony, cachetools and opentelemetry's api,
sdk and semantic-conventions (``pip install --no-deps --target FOLDER``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import transformers
from benchmarks.stamp import RESULTS, write_section
from safetensors.torch import load_file

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.records import stacks

MENUS = (["nvfp4", "fp8", "w4-g32", "w8-g32"], ["nvfp4", "mxfp8", "w4-g32"])
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LEAVES = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
ABSENT = (
    "zmq", "cbor2", "einops", "openai", "openai_harmony", "cachetools", "uvloop", "cpuinfo", "prometheus_client", "xgrammar", "lark",
    "outlines_core", "llguidance", "depyf", "watchfiles", "mistral_common", "lmformatenforcer", "partial_json_parser", "blake3",
    "prometheus_fastapi_instrumentator", "setproctitle", "model_hosting_container_standards", "flashinfer", "pycountry",
    "tiktoken", "sentencepiece", "diskcache", "numba", "pybase64",
)  # fmt: skip


class Empty(types.ModuleType):
    """A package of which everything can be imported."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that vLLM imports and that are not installed; it comes last."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class RoutedExperts(torch.nn.Module):
    """What vLLM's rules ask of the experts of a layer: the names that a checkpoint has for their matrices."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = LEAVES
    moe_config = None


def schemes(folder: Path, modules: list[str]) -> dict[str, str]:
    """Return the scheme that vLLM gives every layer as it fuses them, and every layer's experts."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe as moe
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes as known
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    record = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = CompressedTensorsConfig.from_config(record)
    config.packed_modules_mapping = FUSED
    members = {m: f for f, names in FUSED.items() for m in names}
    whole = {n.rpartition(".")[0] for n in stacks(modules)}
    modules = [n for n in modules if n.rpartition(".")[0] not in whole]
    fused = {f"{n.rpartition('.')[0]}.{members.get(n.rpartition('.')[2], n.rpartition('.')[2])}" for n in (*modules, "lm_head")}
    with contextlib.ExitStack() as held:  # the kernels, which need a GPU, are not built
        for place in [m for n, m in list(sys.modules.items()) if n.startswith(known.__name__)]:
            for own in [n for n in vars(place) if n == "get_current_vllm_config" or re.fullmatch(r"init_\w+_kernel", n)]:
                held.enter_context(patch.object(place, own))
        found = {n: config.get_scheme(torch.nn.Linear(1, 1), n) for n in sorted(f.lstrip(".") for f in fused)}
    kinds = {
        n: "unquantised" if s is None else type(s).__name__ + " in 16 bits" * bool(getattr(s, "use_a16", False))
        for n, s in found.items()
    }
    return kinds | {n: method(config, n, moe) for n in sorted(whole)}


def method(config: Any, name: str, moe: types.ModuleType) -> str:
    """Name the class that vLLM computes the experts of a layer with; its kernels, which need a GPU, are not built."""
    rules = importlib.import_module(f"{moe.__name__}.compressed_tensors_moe")
    with contextlib.ExitStack() as held:
        for place, kind in {
            f"{moe.__name__}.compressed_tensors_moe_wna16": "CompressedTensorsWNA16MoEMethod",
            f"{moe.__name__}.compressed_tensors_moe_w4a4_nvfp4": "CompressedTensorsW4A4Nvfp4MoEMethod",
            f"{moe.__name__}.compressed_tensors_moe_w8a8_mxfp8": "CompressedTensorsW8A8Mxfp8MoEMethod",
            rules.__name__: "UnquantizedFusedMoEMethod",
        }.items():
            importlib.import_module(place)
            held.enter_context(
                patch(f"{place}.{kind}", lambda *_, kind=kind, **given: kind + " in 16 bits" * given.get("use_a16", 0))
            )
        return str(rules.CompressedTensorsMoEMethod.get_moe_method(config, RoutedExperts(), name))


def check_floats(tensors: dict[str, torch.Tensor], model: torch.nn.Module, formats: dict[str, str]) -> tuple[int, int, int]:
    """Matrices in nvfp4 or mxfp8, those that vLLM's reference code reads back to the bit, fused ones with several global scales."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    given = [n for n, f in formats.items() if f in ("nvfp4", "mxfp8")]
    held = {n: model.get_submodule(n).weight for n in given if n not in stacks(given)}
    for stack in stacks(given):
        for i, own in enumerate(model.get_parameter(stack)):
            parts = {"down_proj": own} if stack.endswith("down_proj") else dict(zip(LEAVES, own.chunk(2), strict=False))
            held |= {f"{stack.rpartition('.')[0]}.{i}.{leaf}": part for leaf, part in parts.items()}
    same, scales = 0, dict[str, set[float]]()
    for name, weight in held.items():
        if f"{name}.weight_global_scale" not in tensors:
            back = dequant_mxfp8_to_bf16(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"])
            same += torch.equal(back.float(), weight.float())
            continue
        packed, scale, unit = (tensors[f"{name}.weight_{k}"] for k in ("packed", "scale", "global_scale"))
        back = dequantize_to_dtype(packed, scale, 1 / unit, torch.bfloat16, 16, swizzle=False)
        same += torch.equal(back.float(), weight.float())
        fused = next((f for f, m in FUSED.items() if name.rpartition(".")[2] in m), name.rpartition(".")[2])
        scales.setdefault(f"{name.rpartition('.')[0]}.{fused}", set()).add(float(unit))
    return len(held), same, sum(len(s) > 1 for s in scales.values())


def rows(name: str, scores: Any, budgets: list[float], fresh: Callable[[], torch.nn.Module]) -> list[str]:
    """One line of the table for each budget."""
    lines = []
    for bits in budgets:
        plan, model = lb.plan_bits(scores, bits=bits), fresh()
        with tempfile.TemporaryDirectory() as folder:
            lb.write_bits(model, plan, Path(folder) / "out")
            kinds = Counter(schemes(Path(folder) / "out", list(plan.payload.formats)).values())
            read = {n: t for f in (Path(folder) / "out").glob("*.safetensors") for n, t in load_file(f).items()}
            count, same, several = check_floats(read, model, dict(plan.payload.formats))
        told = ", ".join(f"{c} {k}" for k, c in sorted(kinds.items()))
        lines.append(f"| {name} | {plan.payload.bits:.3f} | {told} | {count} | {same} | {several} |")
    return lines


def random_experts() -> torch.nn.Module:
    """A Qwen3-MoE of three layers with random weights."""
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("packages", type=Path, nargs="*", help="folders with packages that vLLM imports")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", type=float, nargs="+", default=[4.6, 5.5, 7.0])
    parser.add_argument("--experts", type=float, nargs="+", default=[4.6, 6.5, 12.0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    sys.path.insert(0, str(given.vllm))
    sys.path.extend(map(str, given.packages))
    sys.meta_path.append(Absent())
    text = lb.calibration("stdlib", lb.load_tokenizer(given.model), samples=8, length=64)
    told = list[str]()
    for formats in MENUS:
        scores = rounding_damage(lb.load_model(given.model), text, runtime="vllm", formats=formats, draws=2)
        told += rows(given.model, scores, given.bits, lambda: lb.load_model(given.model))
        routed = rounding_damage(random_experts(), text, runtime="vllm", formats=formats, draws=2)
        told += rows("random Qwen3-MoE, 3 layers of 4 experts", routed, given.experts, random_experts)
    version = importlib.import_module("vllm.version").__version__
    lines = [
        f"vLLM {version}: schemes by its `CompressedTensorsConfig`, those of experts by its "
        "`CompressedTensorsMoEMethod` (the kernels are not built), numbers by its reference code.",
        "", "| model | bits | layers by scheme | nvfp4 or mxfp8 | read back to the bit | fused with several global scales |",
        "|---|---|---|---|---|---|",
        *told,
    ]  # fmt: skip
    write_section("runtimes", "vLLM's own rules on folders written here", lines, out=given.out, peers=("compressed-tensors",))


if __name__ == "__main__":
    main()
