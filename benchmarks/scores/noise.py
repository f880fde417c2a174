"""How much of a gain is noise on the embedded model: gain, floor, excess and z per block for n = 16, 64, 256 sequences.

    python -m benchmarks.scores noise --model FOLDER [--out FOLDER] [--length 256]

One pass computes the Gram matrices of all 256 sequences; smaller n are its leading submatrices. Rank stability is the Kendall
tau between the rankings of two disjoint sets of n sequences (of halves, for the largest n).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from benchmarks.stamp import RESULTS, write_section

from layerbudget.data import stdlib
from layerbudget.data.calibration import CalibrationSet
from layerbudget.models import blocks as model_blocks
from layerbudget.sensitivity import noise
from layerbudget.sensitivity.curvature import common, gram

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
SIZES = (16, 64, 256)


def calibration(tokenizer, samples: int, length: int, seed: int = 0) -> CalibrationSet:
    """Random non-overlapping windows of the standard library's calibration group, each behind the BOS token."""
    documents, _ = stdlib.read("calibration")
    ids = np.concatenate([tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in documents])
    starts = np.arange(0, len(ids) - length, length - 1)
    chosen = np.random.default_rng(seed).permutation(starts)[:samples]
    rows = np.stack([np.concatenate([[tokenizer.bos_token_id], ids[s : s + length - 1]]) for s in chosen])
    return CalibrationSet(input_ids=torch.from_numpy(rows.astype(np.int64)), source="stdlib", seed=seed)


def dampings_of(spectra: list[noise.Spectrum]) -> np.ndarray:
    """``(D, K)`` absolute dampings, relative to each block's largest eigenvalue."""
    return np.array(DAMPINGS)[:, None] * np.array([s.largest for s in spectra])[None]


def disjoint_stability(grams: np.ndarray, tokens: np.ndarray, tau: np.ndarray, n: int, pairs: int = 12) -> list[float]:
    """Kendall tau of the rankings by excess of two disjoint sets of n sequences drawn from all, per damping."""
    rng = np.random.default_rng(0)
    found = np.zeros((2, pairs, *tau.shape))
    for p in range(pairs):
        order = rng.permutation(len(tokens))
        for side in range(2):
            weights = np.zeros(len(tokens))
            weights[order[side * n : (side + 1) * n]] = 1.0
            for k, g in enumerate(grams):
                found[side, p, :, k] = noise.gain_of(g, weights, tokens, tau[:, k])
                found[side, p, :, k] -= noise.floor_of(g, weights > 0, tokens, tau[:, k])
    return [noise.rank_stability(found[0, :, i], found[1, :, i]) for i in range(len(tau))]


def study(grams: np.ndarray, tokens: np.ndarray) -> dict[str, dict]:
    """Summaries for every n, with the dampings of the largest n throughout."""
    tau = dampings_of([noise.Spectrum(g, tokens.sum()) for g in grams])
    out = {}
    for n in [n for n in SIZES if n <= len(tokens)]:
        summary = noise.summarise(grams[:, :n, :n], tokens[:n], tau, seed=0, replicates=50)
        summary["bound"] = n / float(tokens[:n].sum())
        summary["disjoint_stability"] = disjoint_stability(grams, tokens, tau, min(n, len(tokens) // 2))
        out[str(n)] = summary
    out["tau"] = tau
    return out


def table(result: dict, names: list[str]) -> list[str]:
    """The markdown table at the middle damping, the stabilities and the verdicts."""
    i = len(DAMPINGS) // 2
    sizes = [str(n) for n in SIZES if str(n) in result]
    lines = [
        f"Empirical Fisher, damping {DAMPINGS[i]} of each block's largest eigenvalue at n = {sizes[-1]}; values times 1000 "
        "(the gain cannot exceed n/N). Excess = gain - floor; z = excess over its deviation under random signs.", "",
        "| block | " + " | ".join(f"n={n} gain | se | floor | excess | z" for n in sizes) + " |",
        "|---" * (1 + 5 * len(sizes)) + "|",
    ]  # fmt: skip
    for k, name in enumerate(names):
        cells = []
        for n in sizes:
            s = result[n]
            values = [s[key][i][k] * 1e3 for key in ("gain", "standard_error", "floor", "excess")]
            cells.append(" | ".join(f"{v:.3f}" for v in values) + f" | {s['z'][i][k]:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Kendall tau, by excess, between disjoint sets of n sequences (128 for the largest n), by damping:", ""]
    lines += ["| n | " + " | ".join(f"{d:g}" for d in DAMPINGS) + " | top from bottom third needs |", "|---" * 7 + "|"]
    for n in sizes:
        s = result[n]
        needed = s["samples_needed"][i]
        lines.append(f"| {n} | " + " | ".join(f"{t:.2f}" for t in s["disjoint_stability"]) + f" | {needed:.0f} sequences |")
    lines += ["", "Share of the mean gain that is noise floor, and Kendall tau between the raw gain and the excess:", ""]
    lines += ["| n | " + " | ".join(f"{d:g}" for d in DAMPINGS) + " |", "|---" * 6 + "|"]
    for n in sizes:
        pairs = zip(result[n]["noise_share"], result[n]["rank_agreement"], strict=True)
        lines.append(f"| {n} | " + " | ".join(f"{100 * a:.0f} %, {b:.2f}" for a, b in pairs) + " |")
    return [*lines, "", *(f"- n = {n}: {result[n]['verdict']}" for n in sizes)]


def main() -> None:
    """Run the study."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=max(SIZES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model.set_attn_implementation("eager")
    data = calibration(AutoTokenizer.from_pretrained(arguments.model), arguments.samples, arguments.length)
    blocks = model_blocks.partition(model)
    grams, _ = gram.gram_matrices(model, data, blocks, max_bytes=4 << 30)
    result = study(grams, common.token_counts(model, data))
    title = f"Noise of the Gram gain: {Path(arguments.model).name}"
    write_section("scores", title, table(result, [b.name for b in blocks]), out=arguments.out)


if __name__ == "__main__":
    main()
