"""Time and memory of every estimator, as ratios to one plain forward and backward pass on the same data.

    python -m benchmarks.scores cost [--model FOLDER] [--samples 8] [--length 256] [--rounds 5] [--attention sdpa] [--out FOLDER]

Every round times the plain pass and each estimator's passes one after another, in processor seconds of one thread; the table
has the medians of the ratios within a round. Peak memory is measured in a forked process per estimator.
Without ``--model`` a randomly initialised 12-layer model of the embedded one's shape is used.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.stamp import RESULTS, write_section
from torch import nn

from layerbudget.data.calibration import CalibrationSet
from layerbudget.execution import loss as L
from layerbudget.execution.backward import feed
from layerbudget.models import blocks as model_blocks
from layerbudget.sensitivity.curvature import exact, gram, kronecker
from layerbudget.sensitivity.gain import score

TARGETS = {
    "gradient norm": 1.05, "sketched Gram 32x32": 0.9, "diagonal Fisher": 1.4, "exact Gram": 1.5, "K-FAC": 1.7,
    "EK-FAC (without eigendecompositions)": 4.5, "GGN product, mean of first, middle, last": 2.5,
    "GGN product, first block": 2.5,
}  # fmt: skip


clock = time.process_time  # one thread: what others do on the machine does not count


def load(folder: str | None, attention: str) -> nn.Module:
    """The embedded model, or its shape at random."""
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    if folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.set_attn_implementation(attention)
        return model
    config = MistralConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=320, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, sliding_window=None, tie_word_embeddings=True,
        attn_implementation=attention,
    )  # fmt: skip
    return MistralForCausalLM(config)


def cases(model: nn.Module, data: CalibrationSet, size: int) -> dict[str, Callable[[], float | None]]:
    """What is timed; a case may return seconds to take off (eigendecompositions)."""
    blocks = model_blocks.partition(model)
    part = data.select(slice(0, size))

    def plain() -> None:
        model.eval()
        for batch in L.batches(model, data, size):
            L.summed_loss(L.logits_of(model, batch), batch.targets).backward()
        for p in model.parameters():
            p.grad = None

    def ekfac() -> float:
        seconds = []
        own = torch.linalg.eigh

        def timed(matrix):
            start = clock()
            result = own(matrix)
            seconds.append(clock() - start)
            return result

        torch.linalg.eigh = timed
        try:
            score(model, data, blocks, "ekfac", batch_size=size)
        finally:
            torch.linalg.eigh = own
        return sum(seconds)

    class Factors(kronecker.Factors):
        def settle(self, name: str, found: Any) -> None:
            """Nothing: the factors alone are timed."""

    def kfac() -> None:
        feed(model, data, blocks, Factors(model, data, blocks), batch_size=size)

    def ggn(which: list[int]) -> Callable[[], float]:
        def run() -> float:
            spent = 0.0
            for k in which:
                with exact.BlockProducts(model, part, blocks[k], size) as p:
                    p.gradient()  # fills the cache of the layers in front, once per score
                    first = clock()
                    p.ggn(torch.randn(blocks[k].numel))
                    spent += clock() - first
            return -spent / len(which) * data.samples / part.samples  # negative: this is the time, whatever the call took

        return run

    def by_rank() -> None:
        linears = model_blocks.partition(model, "linear")
        score(model, data, linears, "rank-gain", batch_size=size)

    return {
        "plain forward+backward": plain,
        "gradient norm": lambda: score(model, data, blocks, "gradient-norm", batch_size=size) and None,
        "sketched Gram 32x32": lambda: gram.gram_matrices(model, data, blocks, batch_size=size, sketch=(32, 32)) and None,
        "sketched Gram 16x16": lambda: gram.gram_matrices(model, data, blocks, batch_size=size, sketch=(16, 16)) and None,
        "exact Gram": lambda: gram.gram_matrices(model, data, blocks, batch_size=size) and None,
        "exact Gram, score with noise": lambda: score(model, data, blocks, batch_size=size) and None,
        "diagonal Fisher": lambda: score(model, data, blocks, "fisher-diagonal", batch_size=size) and None,
        "K-FAC": kfac,
        "EK-FAC (without eigendecompositions)": ekfac,
        "gain by rank (K-FAC, with eigendecompositions)": by_rank,
        "GGN product, first block": ggn([0]),
        "GGN product, mean of first, middle, last": ggn([0, len(blocks) // 2, len(blocks) - 1]),
    }


def main() -> None:
    """Time all cases and write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--attention", choices=("sdpa", "eager"), default="sdpa", help="of the model (sdpa: transformers' default)"
    )
    parser.add_argument("--name", help="what the title of the section adds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = load(arguments.model, arguments.attention)
    ids = torch.randint(3, 2048, (arguments.samples, arguments.length), generator=torch.Generator().manual_seed(0))
    todo = cases(model, CalibrationSet(input_ids=ids), arguments.batch_size)
    peaks = {name: peak(run) for name, run in todo.items()}
    todo["plain forward+backward"]()
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(arguments.rounds):
        for name, run in todo.items():
            start = clock()
            off = run() or 0.0
            spent = clock() - start
            seconds[name].append(-off if off < 0 else spent - off)
    plain = seconds["plain forward+backward"]
    rows = {}
    for name, values in seconds.items():
        ratio = statistics.median(v / p for v, p in zip(values, plain, strict=True))
        rows[name] = {
            "ratio": ratio,
            "target": TARGETS.get(name),
            "seconds": statistics.median(values),
            "peak_MiB": peaks[name],
        }
    write(arguments, rows)


def peak(run: Callable[[], float | None]) -> float:
    """Growth of the peak resident set over the loaded model, in a forked process, MiB."""
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        os.write(write_end, str(grown).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return float(os.read(read, 64))


def write(arguments: argparse.Namespace, rows: dict[str, dict[str, float | None]]) -> None:
    """Write the section."""
    setting = {k: getattr(arguments, k) for k in ("samples", "length", "batch_size", "rounds", "attention")}
    lines = [
        f"12-layer Mistral (hidden 192, {setting['attention']} attention), {setting['samples']} sequences of {setting['length']} tokens, batches of "
        f"{setting['batch_size']}; medians over {setting['rounds']} rounds of the ratio, in processor time, to the plain pass "
        "of the same round. "
        "Memory: growth of the peak resident set over the loaded model.", "",
        "| | ratio | target | seconds | peak MiB |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        target = f"<= {row['target']}" if row["target"] else ""
        met = "" if not row["target"] or row["ratio"] <= row["target"] else " **missed**"
        lines.append(f"| {name} | {row['ratio']:.2f}{met} | {target} | {row['seconds']:.2f} | {row['peak_MiB']:.0f} |")
    title = f"Cost of every estimator{f': {arguments.name}' if arguments.name else ''}"
    write_section("scores", title, lines, out=arguments.out)


if __name__ == "__main__":
    main()
