"""How many sequences a plan of ranks needs: its gain under increments measured on many others, as a share of the best plan's.

python -m benchmarks.ranks samples --model demo --data book.txt [--sizes 16 64 256] [--draws 3] [--truth 1024] [--mean-rank 8]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from benchmarks.stamp import RESULTS, write_section

import layerbudget as lb
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.solvers import allocate
from layerbudget.solvers.rounding import round_capacity


def worth(curves: list[list[float]], counts: np.ndarray) -> float:
    """Gain of ranks under increments."""
    return float(sum(sum(row[:n]) for row, n in zip(curves, counts, strict=True)))


def by_rank(scores: lb.Scores, rank: int) -> np.ndarray:
    """Ranks by the gain of every further rank, none at least."""
    return plan_ranks(scores, mean_rank=rank, rule="by-rank", min_rank=0).counts


def main() -> None:
    """Measure, plan, and judge every plan by the large measurement."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="demo")
    p.add_argument("--data", default="stdlib")
    p.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256])
    p.add_argument("--draws", type=int, default=3)
    p.add_argument("--truth", type=int, default=1024)
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--mean-ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    model, tokenizer = lb.load_model(a.model), lb.load_tokenizer(a.model)
    blocks = lb.partition(model, "linear", exclude="lm_head")
    ids = lb.calibration(a.data, tokenizer, samples=a.truth + a.draws * sum(a.sizes), length=a.length).input_ids

    def measured(rows):
        return lb.score(model, CalibrationSet(input_ids=rows, source=a.data), blocks, estimator="rank-gain")

    truth = measured(ids[: a.truth])
    curves, first = truth.extra["increments"][0], a.truth
    cost = np.array([b.modules[0].d_in + b.modules[0].d_out for b in blocks], dtype=float)
    small = {}
    for size in a.sizes:
        small[size] = [measured(ids[first + i * size : first + (i + 1) * size]) for i in range(a.draws)]
        first += a.draws * size
    shares: dict[str, list[list[float]]] = {}
    for rank in a.mean_ranks:
        permuted = [
            plan_ranks(truth, mean_rank=rank, rule="by-rank-permuted", seed=s, min_rank=0).counts for s in range(a.draws)
        ]
        logged = round_capacity(allocate(truth.weights(), cost, rank * cost.sum(), spend="exactly")).counts
        plans = {"uniform": [np.full(len(blocks), rank)], "curves permuted": permuted}
        plans[f"one gain per matrix, log utility, {a.truth} sequences"] = [logged]
        plans |= {f"by rank, {n} sequences": [by_rank(scores, rank) for scores in found] for n, found in small.items()}
        best = worth(curves, by_rank(truth, rank))
        for name, counts in plans.items():
            shares.setdefault(name, []).append([worth(curves, c) / best for c in counts])
    lines = [
        f"Share of the best plan's gain, both under increments measured on {a.truth} other sequences of {a.length} tokens;"
    ]
    lines += [f"equal parameters, smallest of {a.draws} draws in brackets.", ""]
    lines += ["| mean rank | " + " | ".join(map(str, a.mean_ranks)) + " |", "|---|" + "---|" * len(a.mean_ranks)]
    lines += [
        f"| {name} | " + " | ".join(f"{np.mean(v):.1%} ({min(v):.1%})" for v in row) + " |" for name, row in shares.items()
    ]
    title = f"Sequences that a plan of ranks needs: {Path(a.model).name} on {Path(a.data).stem}"
    write_section("ranks", title, lines, out=a.out)


if __name__ == "__main__":
    main()
