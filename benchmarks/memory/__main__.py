"""Weights and cache decided in one program. Writes results/memory.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "plans": "KL beside deciding one after the other, at equal total bytes",
}

if __name__ == "__main__":
    run_parts("memory", __doc__, PARTS)
