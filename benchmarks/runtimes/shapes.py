"""Tokens per second that measured rates predict for layers of different shapes, beside what llama.cpp then does.

    python -m benchmarks.runtimes shapes MODEL ... [--shapes 6] [--rounds 9] [--threads 1] [--out FOLDER]

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
from benchmarks.stamp import RESULTS, write_section

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


def table(name: str, a: argparse.Namespace) -> str:
    """Measure the rates, then the held-out shapes, of one model."""
    model, tokenizer, rng = lb.load_model(name, dtype="float32"), lb.load_tokenizer(name), random.Random(0)
    speed = lb.measure_speed(model, threads=a.threads, rounds=a.rounds)
    with tempfile.TemporaryDirectory() as folder:
        files, sizes = [], []
        for i in range(a.shapes):
            made = drawn(model, rng, 0.8 * i / max(1, a.shapes - 1))  # the first is the model itself
            save_gguf(made, tokenizer, Path(folder) / str(i))
            files.append(Path(folder) / str(i) / "model.gguf")
            sizes.append(sizes_of_layers(made))
        times = request_seconds(files, threads=a.threads, rounds=a.rounds)
        dense = files[0].stat().st_size / 2**20
    lines = [
        f"### {Path(name).name}, {dense:.0f} MiB", "",
        "| key-value heads | widths | reading: measured | predicted | ratio | writing: measured | predicted | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row, (read, written) in zip(sizes, times.tolist(), strict=True):
        told = speed.seconds(row)
        cells = [f"{1 / m:.0f} | {1 / p:.0f} | {m / p:.2f}" for m, p in zip((read, written), told, strict=True)]
        spread = [f"{min(v)} to {max(v)}" for v in ([g for _, g, _ in row], [w for _, _, w in row])]
        lines.append(f"| {' | '.join((*spread, *cells))} |")
    print("\n".join(lines), flush=True)
    return "\n".join(lines)


def main() -> None:
    """One table a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    for name, default in (("shapes", 6), ("rounds", 9), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "Tokens per second in llama.cpp, 16 bits, one thread's processor time: rates from four files of random weights, asked about shapes drawn "
        "at random. Ratios are predicted over measured.",
    ]  # fmt: skip
    for name in a.models:
        lines += ["", table(name, a)]
    write_section("runtimes", "Tokens per second that rates predict", lines, out=a.out, peers=("xllamacpp",))


if __name__ == "__main__":
    main()
