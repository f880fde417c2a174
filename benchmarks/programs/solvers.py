"""How long a certified solve takes, as ratios within one run.

Both programs through their public functions (validation and certificate included) against CVXPY + Clarabel, against the
paper's bisection (to a relative budget error of 1e-12) and against ``np.sort`` of K floats.

    python -m benchmarks.programs solvers [--sizes 32 1000 100000 1000000] [--clarabel-up-to 100000] [--seconds 2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.stamp import RESULTS, write_section

from layerbudget.solvers import allocate, sparsify


def fastest(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Best time of each call, taken in turns so that a busy machine hurts all alike."""
    repeat = {}
    for name, call in calls.items():
        start = time.process_time()
        call()
        repeat[name] = max(1, int(2e-4 / max(time.process_time() - start, 1e-7)))
    best = dict.fromkeys(calls, float("inf"))
    stop, rounds = time.process_time() + seconds * len(calls), 0
    while time.process_time() < stop or rounds < 3:
        rounds += 1
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeat[name]):
                call()
            best[name] = min(best[name], (time.process_time() - start) / repeat[name])
    return best


def bisect_allocation(w: np.ndarray, c: np.ndarray, budget: float, alpha: float = 0.5, gamma: float = 0.9) -> np.ndarray:
    """The paper's algorithm: bisection on lambda in [0, max gamma w / c - alpha]."""
    a, g = alpha / c.mean(), gamma / w.mean()
    low, high = 0.0, max(0.0, float((g * w / c).max()) - a)
    for _ in range(200):
        middle = (low + high) / 2
        e = np.maximum(g * w / ((a + middle) * c) - 1, 0)
        spent = float(c @ e)
        if abs(spent - budget) <= 1e-12 * budget or middle in (low, high):
            break
        low, high = (middle, high) if spent > budget else (low, middle)
    return e


def bisect_sparsity(w: np.ndarray, n: np.ndarray, target: float, cap: float, eta: float = 2.0) -> np.ndarray:
    """The paper's algorithm with b = 0: bisection on lambda in [0, max 2 eta w cap / n]."""
    h = eta / w.mean()
    low, high = 0.0, float((2 * h * w * cap / n).max())
    for _ in range(200):
        middle = (low + high) / 2
        rho = np.clip(middle * n / (2 * h * w), 0, cap)
        gone = float(n @ rho)
        if abs(gone - target) <= 1e-12 * target or middle in (low, high):
            break
        low, high = (middle, high) if gone < target else (low, middle)
    return rho


def clarabel(kind: str, w: np.ndarray, c: np.ndarray, budget: float) -> tuple[float, float, np.ndarray]:
    """Seconds in all, seconds inside Clarabel, and its answer."""
    import cvxpy as cp

    start = time.process_time()
    x = cp.Variable(w.size)
    if kind == "allocation":
        goal = 0.5 * ((c / c.mean()) @ x) - 0.9 * ((w / w.mean()) @ cp.log1p(x))
        problem = cp.Problem(cp.Minimize(goal), [c @ x <= budget, x >= 0])
    else:
        problem = cp.Problem(cp.Minimize((w / w.mean()) @ cp.square(x)), [c @ x == budget, x >= 0, x <= 0.6])
    data, chain, inverse = problem.get_problem_data(cp.CLARABEL, solver_opts={})
    middle = time.process_time()
    solution = chain.solve_via_data(problem, data, solver_opts={})
    inside = time.process_time() - middle
    problem.unpack_results(solution, chain, inverse)
    return time.process_time() - start, inside, np.asarray(x.value)


def measure(size: int, seconds: float, with_clarabel: bool) -> list[dict[str, Any]]:
    """One row per program."""
    rng = np.random.default_rng(size)
    w, c = rng.random(size) ** 2 + 1e-6, rng.random(size) + 0.1
    budgets = {"allocation": 0.5 * float(c.sum()), "sparsity": 0.4 * float(c.sum())}
    ours = {
        "allocation": lambda: allocate(w, c, budgets["allocation"]),
        "sparsity": lambda: sparsify(w, c, budgets["sparsity"], max_sparsity=0.6, spend="exactly"),
    }
    theirs = {
        "allocation": lambda: bisect_allocation(w, c, budgets["allocation"]),
        "sparsity": lambda: bisect_sparsity(w, c, budgets["sparsity"], 0.6),
    }
    rows = []
    for kind, call in ours.items():
        s = call()
        found = fastest({"ours": call, "bisection": theirs[kind], "sort": lambda: np.sort(w)}, seconds)
        row = {"program": kind, "blocks": size, "microseconds": found["ours"] * 1e6, "sort_microseconds": found["sort"] * 1e6}
        row |= {"sorts": found["ours"] / found["sort"], "bisection_over_ours": found["bisection"] / found["ours"]}
        row |= {"gap": s.gap, "kkt_residual": s.kkt_residual, "status": s.status}
        row["bisection_difference"] = float(np.abs(theirs[kind]() - s.value).max())
        if with_clarabel:
            runs = [clarabel(kind, w, c, budgets[kind]) for _ in range(5 if size <= 1000 else 1)]
            total, inside, answer = min(r[0] for r in runs), min(r[1] for r in runs), runs[0][2]
            row |= {"clarabel_over_ours": total / found["ours"], "clarabel_alone_over_ours": inside / found["ours"]}
            row["clarabel_difference"] = float(np.abs(answer - s.value).max())
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = [
        "Times are through the public functions, validation and certificate included.",
        "Processor time of one thread, best of interleaved rounds.",
    ]
    lines += ["Peers are multiples of our time; Clarabel alone is without CVXPY's own work.", ""]
    lines += ["| program | blocks | us | sort us | in sorts | bisection | CVXPY+Clarabel | Clarabel alone | gap | KKT |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        ratio = [f"{r[k]:,.0f}x" if k in r else "-" for k in ("clarabel_over_ours", "clarabel_alone_over_ours")]
        head = f"| {r['program']} | {r['blocks']:,} | {r['microseconds']:,.1f} | {r['sort_microseconds']:,.2f} |"
        lines.append(
            f"{head} {r['sorts']:.1f} | "
            f"{r['bisection_over_ours']:.1f}x | {ratio[0]} | {ratio[1]} | {r['gap']:.1e} | {r['kkt_residual']:.1e} |"
        )
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", type=int, nargs="+", default=[32, 1000, 100_000, 1_000_000])
    p.add_argument("--clarabel-up-to", type=int, default=100_000)
    p.add_argument("--seconds", type=float, default=2.0)
    p.add_argument("--out", type=Path, default=RESULTS)
    a = p.parse_args()
    rows = [row for size in a.sizes for row in measure(size, a.seconds, size <= a.clarabel_up_to)]
    write_section("programs", "Certified solves", table(rows), out=a.out, peers=("scipy", "cvxpy", "clarabel"))


if __name__ == "__main__":
    main()
