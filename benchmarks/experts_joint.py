"""Fewer experts and lower types in one program of bytes, beside one after the other: held-out KL at equal bytes of file.

    python benchmarks/experts_joint.py --model FOLDER --out benchmarks/results/experts_joint.md

FOLDER has calibration.txt and evaluation.txt beside the model, as benchmarks/train_second_model.py leaves them. Types are ggml's
K types with an importance matrix. A budget is what the types alone take at so many bits per weight. Whatever loses experts is
measured again, as it is left, for its types.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch

import layerbudget as lb
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.sensitivity import DenseOutput, mean_and_error, rounding_damage
from layerbudget.decisions.bits.table import Table
from layerbudget.decisions.kept_experts.plan import plan_kept_experts
from layerbudget.models.experts import cut_experts, find_experts

TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
WAY = {"family": "gguf", "formats": TYPES, "method": "weighted"}


def measured(dense, model, formats, data):
    """KL from the whole model on held-out text, and its standard error."""
    return mean_and_error(dense.rows_of(model, formats, data, "weighted")[:, :2])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bits", type=float, nargs="+", default=[2.75, 3.5])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75], help="kept where experts go first and types follow")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    model, tokenizer = lb.load_model(a.model), lb.load_tokenizer(a.model)
    data = lb.calibration(f"{a.model}/calibration.txt", tokenizer, samples=a.samples, length=a.length, seed=0)
    held = lb.calibration(f"{a.model}/evaluation.txt", tokenizer, samples=a.windows, length=a.length, seed=0)
    dense, scores = DenseOutput(model, held), rounding_damage(model, data, **WAY)
    table, cuts = Table.of(scores), {}

    def cut(kept):
        """The model with these experts, and what types cost it."""
        key = str(kept)
        if key not in cuts:
            small = copy.deepcopy(model)
            cut_experts(small, kept)
            cuts[key] = small, rounding_damage(small, data, **WAY), mean_and_error(dense.rows(small)[:, :2])
        return cuts[key]

    fixed = {share: plan_kept_experts(model, data, share, even=True) for share in a.shares}
    found = find_experts(model)
    lines = [f"# Experts and types in one program: {Path(a.model).name}", "",
             f"{len(found)} layers of {found[0].count} experts, {found[0].top_k} per token; types {', '.join(TYPES)} with an importance "
             f"matrix; {a.samples} x {a.length} calibration tokens, held-out {a.windows} x {a.length}. "
             "All layers have the same number of experts, as a GGUF file has one expert_count in its header.", "",
             "| budget | what decides | experts left | bytes | removal alone, KL | KL | predicted: removal + rounding, assumed | rounding measured again |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    short = 0  # bytes that types could not fill, the most of all files
    for bits in a.bits:
        limit = int(bits * table.numel / 8) + table.beside
        try:
            plan = plan_bits(scores, budget=f"{limit} bytes")
            short = max(short, limit - plan.budget["spent"] - table.beside)
            kl, error = measured(dense, model, plan.extra["formats"], data)
            lines.append(f"| {limit:,} | types alone | {sum(e.count for e in found)} | {plan.budget['spent'] + table.beside:,} | 0 | "
                         f"{kl:.4g} +- {error:.2g} | {plan.extra['predicted']:.4g} | |")  # fmt: skip
        except lb.InfeasibleBudget:
            lines.append(f"| {limit:,} | types alone | {sum(e.count for e in found)} | too few | | | | |")
        joint = plan_kept_experts(model, data, f"{limit} bytes", types=scores, even=True)
        rows = {f"{100 * (1 - s):g} % removed, then types": (p, None) for s, p in fixed.items()}
        for name, (kept, typed) in {**rows, "**one program**": (joint, joint.extra["typed"])}.items():
            small, own, (alone, _) = cut(kept.extra["kept"])
            left = Table.of(own)
            try:
                plan = plan_bits(own, budget=f"{limit} bytes")
            except lb.InfeasibleBudget:
                lines.append(f"| {limit:,} | {name} | {int(kept.counts.sum())} | too few | | | | |")
                continue
            short = max(short, limit - plan.budget["spent"] - left.beside)
            kl, error = measured(dense, small, plan.extra["formats"], data)
            said = again = ""
            if typed:
                formats = typed["formats"]
                chosen = np.array([left.formats.index(formats[b.modules[0].name]) for b in left.blocks])
                said, again = f"{typed['removal']:.4g} + {typed['rounding']:.4g}", f"{left.totals(chosen)['predicted']:.4g}"
            lines.append(f"| {limit:,} | {name} | {int(kept.counts.sum())} | {plan.budget['spent'] + left.beside:,} | {alone:.4g} | "
                         f"{kl:.4g} +- {error:.2g} | {said} | {again} |")  # fmt: skip
        a.out.write_text("\n".join(lines) + "\n")
    lines += [
        "",
        f"The files of a budget are equal in bytes within {short:,}.",
        "",
        f"{time.process_time() - started:.0f} s of one core (`benchmarks/experts_joint.py`).",
        "",
    ]
    a.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
