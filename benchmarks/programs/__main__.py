"""The exact programs. Writes results/programs.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "solvers": "certified solves beside CVXPY with Clarabel, bisection and a sort",
    "choices": "exact choice of formats beside HiGHS",
    "integers": "integers that are proven best beside HiGHS",
}

if __name__ == "__main__":
    run_parts("programs", __doc__, PARTS)
