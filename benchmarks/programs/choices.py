"""How long an exact choice of formats takes, against HiGHS on the same integer program, in one run.

K matrices with 13 types of llama.cpp each: bytes of 7B-class shapes, damages in proportion to the squared error that ggml makes of normal weights, with
a log-normal spread over matrices and types. HiGHS gets the multiple-choice knapsack whole, through scipy, with its gap set to 1e-9.

    python -m benchmarks.programs choices [--items 32 224 1000 10000] [--limit 60] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.stamp import RESULTS, write_section
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from layerbudget.compressors import ggml
from layerbudget.compressors.formats import find_format
from layerbudget.solvers.choices import choose

SHAPES = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
FORMATS = "IQ2_XXS IQ2_XS IQ2_S Q2_K IQ3_XXS IQ3_S Q3_K IQ4_XS IQ4_NL Q4_K Q5_K Q6_K Q8_0".split()


@functools.cache
def errors() -> np.ndarray:
    """Squared error of normal weights in every type, relative to their squares, ``(types,)``."""
    weight = np.random.default_rng(0).standard_normal((32, 1024)).astype(np.float32)
    made = (ggml.dequantise(ggml.quantise(weight, f, np.ones(1024)), f) for f in FORMATS)
    return np.array([((m - weight) ** 2).sum() / (weight**2).sum() for m in made])


def instance(items: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Damages and bytes, ``(items, 13)``."""
    rng = np.random.default_rng(seed)
    size = np.array([[find_format(f).bytes(*SHAPES[i % 7]) for f in FORMATS] for i in range(items)])
    level = np.exp(rng.normal(size=(items, 1))) * np.array([[np.prod(SHAPES[i % 7])] for i in range(items)]) / 1e7
    return level * errors() * np.exp(0.2 * rng.normal(size=size.shape)), size


def highs(damage: np.ndarray, size: np.ndarray, budget: int, limit: float) -> tuple[float, float, float, str]:
    """Seconds, damage, proven relative gap and what HiGHS says."""
    k, m = damage.shape
    rows = csr_matrix((np.ones(k * m), (np.repeat(np.arange(k), m), np.arange(k * m))), shape=(k, k * m))
    scale = float(size.max())
    room = LinearConstraint(csr_matrix(size.reshape(1, -1) / scale), -np.inf, budget / scale)
    start = time.process_time()
    found = milp(
        damage.ravel() / damage.max(), constraints=[LinearConstraint(rows, 1, 1), room], integrality=np.ones(k * m),
        bounds=Bounds(0, 1), options={"mip_rel_gap": 1e-9, "time_limit": limit},
    )  # fmt: skip
    seconds = time.process_time() - start
    if found.x is None:
        return seconds, np.nan, np.nan, "found nothing"
    value = float(damage.ravel() @ np.round(found.x))
    return seconds, value, found.mip_gap, "optimal" if found.status == 0 else "stopped"


def measure(items: int, bits: float, limit: float) -> dict[str, Any]:
    damage, size = instance(items, items)
    budget = int(bits * sum(np.prod(SHAPES[i % 7]) for i in range(items)) // 8)
    start, rounds = time.process_time(), 0
    while time.process_time() - start < 0.5 or not rounds:
        found, rounds = choose(damage, size, budget), rounds + 1
    ours = (time.process_time() - start) / rounds
    seconds, value, gap, status = highs(damage, size, budget, limit)
    return {
        "items": items, "bits": bits, "milliseconds": 1e3 * ours, "status": found.status, "gap": found.gap, "left": budget - found.spent,
        "highs_seconds": seconds, "ratio": seconds / ours, "highs": status, "highs_gap": gap, "damage_over_highs": found.damage / value - 1,
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--items", type=int, nargs="+", default=[32, 224, 1000, 10000])
    p.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0])
    p.add_argument("--limit", type=float, default=60.0)
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    rows = []
    for items in a.items:
        for bits in a.bits:
            rows.append(measure(items, bits, a.limit))
            print(rows[-1], flush=True)
    text = [f"{len(FORMATS)} types per item; processor time. HiGHS is stopped after {a.limit:g} s.\n"]
    text += [
        "| items | mean bits | ms | status | gap | bytes left | HiGHS s | HiGHS / ours | HiGHS says | its gap | our damage over its |",
        "|---" * 11 + "|",
    ]
    for r in rows:
        text.append(
            f"| {r['items']:,} | {r['bits']:g} | {r['milliseconds']:.2f} | {r['status']} | {r['gap']:.0e} | {r['left']:,} | {r['highs_seconds']:.2f} | "
            f"{r['ratio']:,.0f}x | {r['highs']} | {r['highs_gap']:.0e} | {r['damage_over_highs']:+.0e} |"
        )
    write_section("programs", "Choices of formats that are proven best", text, out=a.out, peers=("scipy",))


if __name__ == "__main__":
    main()
