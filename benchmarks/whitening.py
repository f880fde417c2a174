"""Gain by rank from Cholesky factors beside eigendecompositions: the same numbers, and how much longer the latter take.

python benchmarks/whitening.py --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from layerbudget.sensitivity.curvature.kronecker import Sums
from layerbudget.sensitivity.rank_gain import whitened


def factors(width: int, tokens: int) -> Sums:
    """Factors of a square matrix with the spectrum of activations: a few large directions and a tail."""
    generator = torch.Generator().manual_seed(width)
    scale = torch.logspace(1, -1.5, width, dtype=torch.float64)
    x, b, d = (torch.randn(tokens, width, generator=generator, dtype=torch.float64) * scale for _ in range(3))
    parts = torch.stack([b[h::2].T @ x[h::2] / tokens for h in (0, 1)])
    return Sums(a=x.T @ x / tokens, g=d.T @ d / tokens, parts=parts, cache={})


def by_eigenvectors(found: Sums, a: float, s: float, count: int) -> list[tuple[float, torch.Tensor]]:
    """The plainest way: rotate into both eigenbases, divide, singular values."""
    (la, qa), (ls, qs) = torch.linalg.eigh(found.a), torch.linalg.eigh(found.g)
    scale = torch.outer((ls.clamp_min(0) + s).sqrt(), (la.clamp_min(0) + a).sqrt())
    halves = [(qs.T @ part @ qa) / scale for part in found.parts]
    out = []
    for matrix in (halves[0] + halves[1], halves[0] - halves[1]):
        out.append((float(matrix.square().sum()), torch.linalg.eigvalsh(matrix @ matrix.T).flip(0)[:count]))
    return out


def main() -> None:
    """Time both at several widths and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    rows = []
    for width in given.widths:
        found = factors(width, width + width // 4)
        a, s = float(found.a.trace()) / width, float(found.g.trace()) / width
        start = time.process_time()
        ours = whitened(found, a, s, 64)
        middle = time.process_time()
        plain = by_eigenvectors(found, a, s, 64)
        end = time.process_time()
        total = max(abs(x[0] / y[0] - 1) for x, y in zip(ours, plain, strict=True))
        ranks = max(float(((x[1] - y[1]).abs() / y[1]).max()) for x, y in zip(ours, plain, strict=True))
        rows.append({
            "width": width, "total": total, "ranks": ranks, "cholesky": middle - start, "eigenvectors": end - middle,
            "ratio": (end - middle) / (middle - start),
        })  # fmt: skip
    lines = ["# Gain by rank: Cholesky factors and a block Krylov space against eigendecompositions (float64)", "",
             "| width | relative difference, sum of all ranks | the same, each of the first 64 | eigendecompositions take |",
             "|---:|---:|---:|---:|"]  # fmt: skip
    lines += [f"| {r['width']} | {r['total']:.1e} | {r['ranks']:.1e} | {r['ratio']:.1f} times as long |" for r in rows]
    lines += [
        "",
        f"{torch.get_num_threads()} threads, processor time; sums are exact, ranks above width 1024 by a search until they move by less than 1e-7.",
    ]
    (given.out / "whitening.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / "whitening.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
