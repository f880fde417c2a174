"""Random models of real shapes, written shard by shard: 7 billion parameters take 14 GB of disk and 1 GB of memory.

python -m benchmarks.size random_models llama-1b OUT
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

import layerbudget as lb

_LLAMA = {"vocab_size": 32000, "max_position_embeddings": 4096}
SHAPES: dict[str, PretrainedConfig] = {
    "tiny": LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ),
    "llama-1b": LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, **_LLAMA
    ),
    "mistral-7b": MistralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        sliding_window=None, **_LLAMA,
    ),
    "llama-3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    ),
}  # fmt: skip


def write(shape: str, out: Path, seed: int = 0, depth: int | None = None) -> None:
    """One file per layer and one for the rest, bfloat16, normal with standard deviation .02."""
    config = SHAPES[shape]
    config.num_hidden_layers = depth or config.num_hidden_layers
    config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
    config.dtype = "bfloat16"
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest", []).append(name)
    out.mkdir(parents=True, exist_ok=True)
    generator, files = torch.Generator().manual_seed(seed), {}
    for i, names in enumerate(groups.values(), 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        tensors = {n: torch.ones(shapes[n], dtype=torch.bfloat16) for n in names if len(shapes[n]) == 1}
        for n in (n for n in names if len(shapes[n]) > 1):
            tensors[n] = torch.empty(shapes[n], dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        save_file(tensors, out / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(names, file))
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config.save_pretrained(out)
    lb.load_tokenizer("demo").save_pretrained(out)


def main() -> None:
    """Write a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="so many of its layers; all by default")
    given = parser.parse_args()
    write(given.shape, given.out, depth=given.layers)


if __name__ == "__main__":
    main()
