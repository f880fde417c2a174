"""How long integers take that are proven best, against HiGHS on the same integer program, in one run.

The program is a plan of ranks: K matrices with 64 steps each, gains ``w log(1 + r)`` with random weights, a budget of mean rank 8.
Costs are the parameters of a 7B-class model's matrices (they share a unit), or latencies (they share none). HiGHS gets the
program with the concave gains as increments, whole, through scipy with its gap set to zero and without its presolve, which costs more here than it saves.

    python -m benchmarks.programs integers [--blocks 32 224 1000] [--limit 60] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.stamp import RESULTS, write_section
from scipy.optimize import Bounds, LinearConstraint, milp

from layerbudget.solvers import allocate, round_capacity

STEPS = 64


def highs(w: np.ndarray, c: np.ndarray, budget: float, limit: float) -> tuple[float, float, float, str]:
    """Seconds, value, proven relative gap and what HiGHS says."""
    gain = (w[:, None] * np.diff(np.log1p(np.arange(STEPS + 1)))).ravel()
    cost = np.repeat(c, STEPS)
    start = time.process_time()
    answer = milp(
        -gain / gain.max(), constraints=LinearConstraint((cost / cost.max())[None, :], -np.inf, budget / cost.max()),
        bounds=Bounds(0, 1), integrality=np.ones(gain.size), options={"mip_rel_gap": 0.0, "time_limit": limit, "presolve": False},
    )  # fmt: skip
    seconds = time.process_time() - start
    if answer.fun is None:
        return seconds, np.nan, np.nan, "found nothing"
    value, bound = -answer.fun * gain.max(), -answer.mip_dual_bound * gain.max()
    return seconds, value, (bound - value) / bound, "optimal" if answer.status == 0 else "stopped"


def measure(blocks: int, kind: str, limit: float) -> dict[str, Any]:
    """One row: the rounding through its public function, and HiGHS."""
    rng = np.random.default_rng(blocks)
    shapes = np.resize(np.array([8192.0] * 4 + [15104.0] * 3), blocks)
    w, c = rng.gamma(2.0, 1.0, blocks), shapes if kind == "parameters" else rng.random(blocks) + 0.5
    budget = 8.0 * float(c.sum())
    solution = allocate(w, c, budget, upper=float(STEPS), spend="exactly")
    start, rounds = time.process_time(), 0
    while time.process_time() - start < 0.5:
        found, rounds = round_capacity(solution), rounds + 1
    ours = (time.process_time() - start) / rounds
    seconds, value, gap, status = highs(w, c, budget, limit)
    return {
        "costs": kind, "blocks": blocks, "milliseconds": ours * 1e3, "exact": found.exact, "gap": found.gap,
        "highs_over_ours": seconds / ours, "highs_gap": gap, "highs_status": status,
        "value_over_highs": float(w @ np.log1p(found.counts)) / value - 1,
    }  # fmt: skip


def table(rows: list[dict[str, Any]], limit: float) -> list[str]:
    """The rows as Markdown."""
    lines = [
        f"{STEPS} steps per block; processor time. HiGHS is a multiple of our time, stopped after {limit:g} s.",
        "",
    ]
    lines += ["| costs | blocks | ms | proven | gap | HiGHS | HiGHS says | its gap | our value over its |", "|" + "---|" * 9]
    for r in rows:
        lines.append(
            f"| {r['costs']} | {r['blocks']:,} | {r['milliseconds']:.1f} | {'yes' if r['exact'] else 'no'} | {r['gap']:.0e} | "
            f"{r['highs_over_ours']:,.0f}x | {r['highs_status']} | {r['highs_gap']:.0e} | {r['value_over_highs']:+.0e} |"
        )
    return lines


def main() -> None:
    """Parse and run."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--blocks", type=int, nargs="+", default=[32, 224, 1000])
    p.add_argument("--limit", type=float, default=60.0)
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    rows = [measure(k, kind, a.limit) for k in a.blocks for kind in ("parameters", "latency")]
    write_section("programs", "Integers that are proven best", table(rows, a.limit), out=a.out, peers=("scipy",))


if __name__ == "__main__":
    main()
