"""vLLM's own classes on folders whose layers differ: what they read of the configuration, and the logits that they give.

    python -m benchmarks.runtimes vllm_shapes PATH/TO/FOLDER/WITH/vllm [--models demo FOLDER ...] [--save '25% flops'] [--out FOLDER]

A plan for the runtime vllm is made of every model, applied and written. The Python files of a vLLM wheel then do what they do in
the engine: ``get_config`` reads the folder, the convertor of ``nemotron-nas`` counts heads, ``DeciLMForCausalLM`` is built by its
own arithmetic, ``load_weights`` takes the tensors, and a forward gives logits. No GPU and no compiled part of vLLM is needed:
its operations run as their native PyTorch, and the attention kernel is one of PyTorch. Packages that vLLM imports and that are not
installed are replaced by empty ones; openai, openai-harmony and pybase64 must be there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.runtimes import vllm_schemes as absent
from benchmarks.stamp import RESULTS, write_section
from safetensors.torch import load_file
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.shapes.nemotron import save_nemotron

TINY = ("llama", "llama-tied", "mistral", "qwen2")


class Attention(torch.nn.Module):
    """In the place of vLLM's attention layer: one sequence, without a cache."""

    def __init__(self, heads: int, width: int, scale: float, num_kv_heads: int, **other: Any) -> None:
        super().__init__()
        self.heads, self.width, self.scale, self.groups = heads, width, scale, num_kv_heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``(tokens, channels)`` of queries, keys and values to those of the output."""
        parts = [x.view(len(x), -1, self.width).transpose(0, 1) for x in (q, k, v)]
        k, v = (x.repeat_interleave(self.heads // self.groups, 0) for x in parts[1:])
        mixed = torch.nn.functional.scaled_dot_product_attention(parts[0], k, v, is_causal=True, scale=self.scale)
        return mixed.transpose(0, 1).reshape(len(q), -1)


def start(path: Path) -> Any:
    """Import vLLM from a folder, for one process on the processor; returns its configuration."""
    sys.path.insert(0, str(path))
    absent.ABSENT = (*absent.ABSENT, *("xgrammar", "partial_json_parser", "llguidance", "uvloop", "cachetools", "cpuinfo"))
    absent.ABSENT = (*absent.ABSENT, "prometheus_client", "fastapi", "msgspec", "vllm")  # compiled parts of vLLM itself
    sys.meta_path.append(absent.Absent())
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import llama

    llama.Attention = Attention
    whole = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=CompilationConfig(mode=0, custom_ops=["none"]))
    with set_current_vllm_config(whole):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/init", 0, "gloo")
        initialize_model_parallel(1, 1)
    return whole


def read(folder: Path, whole: Any, ids: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """What vLLM reads in a folder, and its logits, ``(tokens, vocabulary)``."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.nemotron_nas import DeciLMForCausalLM
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as known
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS as convertors

    config = get_config(str(folder), trust_remote_code=True)
    counted = convertors[config.model_type](config, config)
    model_config = SimpleNamespace(hf_config=config, hf_text_config=config, dtype=torch.float32)
    own = SimpleNamespace(
        model_config=model_config, cache_config=None, quant_config=None, lora_config=None,
        compilation_config=whole.compilation_config, parallel_config=whole.parallel_config,
    )  # fmt: skip
    with set_current_vllm_config(whole), torch.no_grad():
        model = DeciLMForCausalLM(vllm_config=own)
        tensors = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
        missing = {n for n, _ in model.named_parameters()} - set(model.load_weights(tensors.items()))
        logits = model.compute_logits(model(ids, torch.arange(len(ids))))
    told = {
        "class": known[config.architectures[0]][1], "heads": counted.get_total_num_attention_heads(),
        "groups": counted.get_total_num_kv_heads(), "width of a head": counted.get_head_size(),
        "widths": [layer.mlp.down_proj.input_size for layer in model.model.layers], "missing": sorted(missing),
    }  # fmt: skip
    return told, logits


def tiny(name: str) -> tuple[torch.nn.Module, Any]:
    """A random model of a family, with biases that matter, and text for it."""
    model = zoo.build(name, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    for n, p in model.named_parameters():
        if n.endswith(".bias"):
            torch.nn.init.normal_(p, 0, 0.3)
    return model, zoo.tokens(8, 24)


def main() -> None:
    """Make, write and read every model, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--models", nargs="+", default=[*TINY, "demo"], help=f"folders, demo, or random: {', '.join(TINY)}")
    parser.add_argument("--save", default="30% flops")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    whole = start(given.vllm)
    version = next(d.version for d in distributions(path=[str(given.vllm)]) if d.metadata["Name"] == "vllm")
    lines = [
        f"vLLM {version}: `get_config`, the convertor of `nemotron-nas`, `DeciLMForCausalLM`, its `load_weights` and forward. Its operations "
        f"ran as native PyTorch, attention as PyTorch's. Plans save {given.save}.", "",
        "| model | query heads, groups | widths of the MLPs | not loaded | largest difference of log probabilities |",
        "|---|---|---|---|---:|",
    ]  # fmt: skip
    for name in given.models:
        if name in TINY:
            model, text = tiny(name)
        else:
            source = "stdlib" if name == "demo" else f"{name}/calibration.txt"
            model = lb.load_model(name, dtype="float32")
            text = lb.calibration(source, lb.load_tokenizer(name), samples=4, length=64)
        plan = lb.plan_shapes(model, text, given.save, runtime="vllm", passes=26, strides=1)
        lb.apply_shapes(model, plan, text)
        ids = text.input_ids[0]
        with tempfile.TemporaryDirectory() as folder:
            save_nemotron(model, None, Path(folder) / "out", plan=plan)
            told, logits = read(Path(folder) / "out", whole, ids)
        with torch.no_grad():
            mine = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        most = float((torch.log_softmax(logits.float(), -1) - mine).abs().max())
        print(json.dumps({"model": name, **told, "difference": most}), flush=True)
        widths = ", ".join(map(str, told["widths"]))
        missing = ", ".join(told["missing"]) or "none"
        kind = "random " * (name in TINY) + Path(name).name
        lines.append(f"| {kind} | {told['heads']}, {told['groups']} | {widths} | {missing} | {most:.1e} |")
    write_section("runtimes", "vLLM's own classes on folders whose layers differ", lines, out=given.out)


if __name__ == "__main__":
    main()
