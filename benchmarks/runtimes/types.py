"""Tokens per second of llama.cpp's types, and what they predict for files that mix them.

    python -m benchmarks.runtimes types [--layers 12] [--mixes 6] [--rounds 3] [--threads 1] [--out FOLDER]

Files of one model of Llama's kind (rows of 1,024 and 2,816, random weights) are run: one in every type, and some whose matrices
have three types at random. Speed depends on types and shapes alone, so every matrix repeats a few rounded rows. Seconds of a token
are predicted as those of the types' own files, by their shares of the weights that a token meets (all but the embedding). All files
take turns, least times count.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section
from transformers import LlamaConfig, LlamaForCausalLM

import layerbudget as lb
from layerbudget.compressors import ggml
from layerbudget.compressors.quantisers import Rounded
from layerbudget.decisions.shapes.speed import request_seconds
from layerbudget.llama_cpp.writer import GgufWriter

TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "IQ4_XS", "IQ4_NL", "Q3_K", "IQ3_S", "Q2_K", "IQ2_S")
ROWS = 8


def write(model: torch.nn.Module, formats: dict[str, str], folder: Path) -> Path:
    """A file with such types; 16 bits for all others."""
    folder.mkdir()
    made = {}
    for name, kind in formats.items():
        weight = model.get_submodule(name).weight.data
        rows = ggml.quantise(np.random.default_rng(0).normal(size=(ROWS, weight.shape[1])), kind, np.ones(weight.shape[1]))
        data = np.tile(rows, (len(weight) // ROWS, 1))
        weight.copy_(torch.from_numpy(ggml.dequantise(data, kind)))
        made[name] = [Rounded(weight=weight, data=data)]
    writer = GgufWriter(model, lb.load_tokenizer("demo"), formats, folder)
    for piece in writer.head.pieces:
        writer.add(writer.tensors(piece, made))
    writer.close()
    return folder / "model.gguf"


def main() -> None:
    """Time all files, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("mixes", 6), ("rounds", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=a.layers, vocab_size=len(lb.load_tokenizer("demo"))))
    sizes = {n: m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    rng, plans = random.Random(0), [dict.fromkeys(sizes, kind) for kind in TYPES]
    for _ in range(a.mixes):
        three = rng.sample(TYPES, 3)
        plans.append({name: rng.choice(three) for name in sizes})
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, plan in enumerate(plans):
            planned = {n: kind for n, kind in plan.items() if kind != "F16"}
            files.append(write(model, planned, Path(folder) / str(i)))
        mib = [f.stat().st_size / 2**20 for f in files]
        times = request_seconds(files, threads=a.threads, rounds=a.rounds)
    own = dict(zip(TYPES, times, strict=False))
    lines = [
        f"One thread's processor time, {sum(sizes.values()) / 1e6:.0f} million weights that a token meets.", "",
        "| type | MiB | reading | writing | billions of weights a second, writing |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for kind, size, (read, written) in zip(TYPES, mib, times.tolist(), strict=False):
        lines.append(
            f"| {kind} | {size:.0f} | {1 / read:.0f} | {1 / written:.1f} | {sum(sizes.values()) * 1e-9 / written:.1f} |"
        )
    lines += [
        "", "Types at random, predicted from the files above by their shares:", "",
        "| types | MiB | reading: measured | predicted | ratio | writing: measured | predicted | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for plan, size, found in list(zip(plans, mib, times, strict=True))[len(TYPES) :]:
        told = sum(own[kind] * sizes[n] for n, kind in plan.items()) / sum(sizes.values())
        cells = [f"{1 / m:.1f} | {1 / p:.1f} | {m / p:.2f}" for m, p in zip(found.tolist(), told.tolist(), strict=True)]
        lines.append(f"| {', '.join(sorted(set(plan.values())))} | {size:.0f} | {' | '.join(cells)} |")
    write_section("runtimes", "Tokens per second of llama.cpp's types", lines, out=a.out, peers=("xllamacpp",))


if __name__ == "__main__":
    main()
