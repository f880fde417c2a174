"""Does the loss fall by what the gain says? One step per block on the embedded model, and the rankings that are certified.

python -m benchmarks.scores certificates --model DIR [--samples 8] [--length 48] [--curvature fisher]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers
from benchmarks.stamp import RESULTS, write_section

from layerbudget.data.text import calibration
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.certificate import certify_ranking, direct_check


def row(tau: float, own: list[dict], pairs: list[dict], plain: list[dict]) -> str:
    """One line of the table."""
    actual, predicted = (np.array([r[k] for r in own]) for k in ("actual", "predicted"))
    ratio = predicted / actual
    gap = np.abs(np.array([r["quadratic"] for r in own]) / actual - 1)
    return (
        f"| {tau:g} | {np.median(ratio):.2f} | {ratio.min():.2f} to {ratio.max():.2f} "
        f"| {np.median(gap):.0e} | {sum(r['actual'] < 0 for r in own)}/{len(own)} "
        f"| {sum(p['certified'] for p in plain)} | {sum(p['certified'] for p in pairs)} | {sum(p['agrees'] for p in pairs)} "
        f"| {sum(p['sharp'] for p in pairs)} | {sum((p['certified'] or p['sharp']) and not p['agrees'] for p in pairs)} "
        f"| {len(pairs)} |"
    )


def main() -> None:
    """Run and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--curvature", default="fisher")
    parser.add_argument("--damping", nargs="+", type=float, help="in units of each block's largest eigenvalue")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    data = calibration("stdlib", tokenizer, samples=arguments.samples, length=arguments.length)
    blocks = partition(model)
    table = direct_check(
        model, data, blocks, curvature=arguments.curvature, damping=arguments.damping,
        progress=lambda done, total: print(f"{done}/{total}", flush=True),
    )  # fmt: skip
    lines = render(table, arguments.samples, arguments.length)
    write_section("scores", f"The gain against the loss itself: {arguments.curvature}", lines, out=arguments.out)


def render(table: list[dict], samples: int, length: int) -> list[str]:
    """The table as Markdown."""
    pairs, plain = certify_ranking(table), certify_ranking(table, with_gap=False)
    lines = [
        f"{len({r['block'] for r in table})} blocks, {samples} x {length} tokens.", "",
        "| damping / largest eigenvalue | predicted / measured, median | range | error of the quadratic with the exact "
        "Hessian, median | loss fell | pairs certified, paper's eps | with the curvature gap | order agrees | certified "
        "by the exact Hessian | certified but wrong | pairs |", "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for tau in dict.fromkeys(r["relative_damping"] for r in table):
        own = [r for r in table if r["relative_damping"] == tau and r["status"] == "ok"]
        here = [[p for p in found if p["relative_damping"] == tau] for found in (pairs, plain)]
        if own:
            lines.append(row(tau, own, *here))
    return lines


if __name__ == "__main__":
    main()
