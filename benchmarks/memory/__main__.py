"""Weights and cache decided in one program, and two memories. Writes results/memory.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "plans": "KL beside deciding one after the other, at equal total bytes",
    "sides": "bytes of a card and of the processor's memory, beside what llama.cpp says that it allocates",
}

if __name__ == "__main__":
    run_parts("memory", __doc__, PARTS)
