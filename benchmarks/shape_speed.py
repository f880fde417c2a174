"""Tokens per second that measured rates predict for layers of different shapes, beside what llama.cpp then does.

    python benchmarks/shape_speed.py MODEL [--shapes 6] [--rounds 9] [--threads 1] [--name NAME] [--out benchmarks/results]

The rates come from four files of random weights (``lb.measure_speed``). The shapes that they are asked about are drawn at random,
heads and width of every layer for itself, and none of them was run before. All files take turns, least times count.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from pathlib import Path

import torch

import layerbudget as lb
from layerbudget.decisions.shapes.layouts import find_attention, find_mlp
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.decisions.shapes.speed import request_seconds, sizes_of_layers
from layerbudget.models.blocks import layers


def drawn(model: torch.nn.Module, rng: random.Random, share: float) -> torch.nn.Module:
    """A copy whose layers keep widths at random and lose half of their key-value heads with some chance."""
    made = copy.deepcopy(model)
    for name, layer in layers(made):
        mlp, a = find_mlp(layer, name), find_attention(layer, name)
        mlp.cut(made, torch.arange(max(32, int(mlp.width * rng.uniform(1 - share, 1)) // 16 * 16)))
        if a.groups > 1 and rng.random() < share:
            a.cut(made, torch.arange(a.per_group * (a.groups // 2)))
    return made


def main() -> None:
    """Measure the rates, then the held-out shapes, and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name")
    for name, default in (("shapes", 6), ("rounds", 9), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    a = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer, rng = lb.load_model(a.model, dtype="float32"), lb.load_tokenizer(a.model), random.Random(0)
    speed = lb.measure_speed(model, threads=a.threads, rounds=a.rounds)
    with tempfile.TemporaryDirectory() as folder:
        files, sizes = [], []
        for i in range(a.shapes):
            made = drawn(model, rng, 0.8 * i / max(1, a.shapes - 1))  # the first is the model itself
            save_gguf(made, tokenizer, Path(folder) / str(i))
            files.append(Path(folder) / str(i) / "model.gguf")
            sizes.append(sizes_of_layers(made))
        times = request_seconds(files, threads=a.threads, rounds=a.rounds)
    lines = [
        f"## {a.name or Path(a.model).name}", "",
        "Tokens per second in llama.cpp, 16 bits, one thread's processor time: rates from four files of random weights, asked about shapes drawn "
        "at random. Made by `benchmarks/shape_speed.py`.", "",
        "| key-value heads | widths | reading: measured | predicted | ratio | writing: measured | predicted | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row, (read, written) in zip(sizes, times.tolist(), strict=True):
        told = speed.seconds(row)
        cells = [f"{1 / m:.0f} | {1 / p:.0f} | {m / p:.2f}" for m, p in zip((read, written), told, strict=True)]
        spread = [f"{min(v)} to {max(v)}" for v in ([g for _, g, _ in row], [w for _, _, w in row])]
        lines.append(f"| {' | '.join((*spread, *cells))} |")
    (a.out / "shape_speed.md").write_text("# Tokens per second that rates predict\n\n" + "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
