"""vLLM's own rules on a folder written here: which kernel's scheme it gives every layer, and what it reads ``nvfp4`` back as.

    python benchmarks/vllm_schemes.py PATH/TO/FOLDER/WITH/vllm [--model demo] [--bits 5.5 7] [--out benchmarks/results]

A plan among nvfp4, fp8, w4-g32 and w8-g32 for the runtime vllm is made and written. The Python files of a vLLM wheel parse its
config.json, find the scheme of every fused layer (they raise where members differ), and their reference code makes numbers of
fp4. No GPU and no compiled part of vLLM is needed: packages that are not installed are replaced by empty ones.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from safetensors.torch import load_file

import layerbudget as lb
from layerbudget.decisions.bits.sensitivity import rounding_damage

FORMATS = ["nvfp4", "fp8", "w4-g32", "w8-g32"]
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ABSENT = ("zmq", "cbor2", "einops", "openai", "openai_harmony")


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


def schemes(folder: Path, modules: list[str]) -> dict[str, str]:
    """Return the scheme that vLLM gives every layer as it fuses them."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a16_fp8 as fp8

    record = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = CompressedTensorsConfig.from_config(record)
    config.packed_modules_mapping = FUSED
    members = {m: f for f, names in FUSED.items() for m in names}
    fused = {f"{n.rpartition('.')[0]}.{members.get(n.rpartition('.')[2], n.rpartition('.')[2])}" for n in (*modules, "lm_head")}
    with patch(f"{fp8.__name__}.get_current_vllm_config"):
        found = {n: config.get_scheme(torch.nn.Linear(1, 1), n) for n in sorted(f.lstrip(".") for f in fused)}
    return {n: "unquantised" if s is None else type(s).__name__ for n, s in found.items()}


def check_fp4(tensors: dict[str, torch.Tensor], model: torch.nn.Module, formats: dict[str, str]) -> tuple[int, int, int]:
    """Matrices in nvfp4, those that vLLM's reference code reads back to the bit, and fused ones with several global scales."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    names = [n for n, f in formats.items() if f == "nvfp4"]
    same, scales = 0, dict[str, set[float]]()
    for name in names:
        packed, scale, unit = (tensors[f"{name}.weight_{k}"] for k in ("packed", "scale", "global_scale"))
        back = dequantize_to_dtype(packed, scale, 1 / unit, torch.bfloat16, 16, swizzle=False)
        same += torch.equal(back.float(), model.get_submodule(name).weight.float())
        fused = next((f for f, m in FUSED.items() if name.rpartition(".")[2] in m), name.rpartition(".")[2])
        scales.setdefault(f"{name.rpartition('.')[0]}.{fused}", set()).add(float(unit))
    return len(names), same, sum(len(s) > 1 for s in scales.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", type=float, nargs="+", default=[4.6, 5.5, 7.0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    sys.path.insert(0, str(given.vllm))
    sys.meta_path.append(Absent())
    text = lb.calibration("stdlib", lb.load_tokenizer(given.model), samples=8, length=64)
    scores = rounding_damage(lb.load_model(given.model), text, runtime="vllm", formats=FORMATS, draws=2)
    lines = [
        "# vLLM's own rules on folders written here", "", "Schemes by its `CompressedTensorsConfig`, numbers by its reference code.",
        "", "| model | bits | layers by scheme | nvfp4 | read back to the bit | fused with several global scales |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for bits in given.bits:
        plan, model = lb.plan_bits(scores, bits=bits), lb.load_model(given.model)
        with tempfile.TemporaryDirectory() as folder:
            lb.write_bits(model, plan, Path(folder) / "out")
            kinds = Counter(schemes(Path(folder) / "out", list(plan.extra["formats"])).values())
            read = {n: t for f in (Path(folder) / "out").glob("*.safetensors") for n, t in load_file(f).items()}
            count, same, several = check_fp4(read, model, dict(plan.extra["formats"]))
        told = ", ".join(f"{c} {k}" for k, c in sorted(kinds.items()))
        lines.append(f"| {given.model} | {plan.extra['bits']:.3f} | {told} | {count} | {same} | {several} |")
    (given.out / "vllm_schemes.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
