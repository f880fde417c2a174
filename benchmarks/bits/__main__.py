"""Plans of bits at equal bytes. Writes results/bits.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "groups": "formats in groups: KL of every rule beside uniform",
    "ggml_types": "llama.cpp's types: KL at the bytes of its own mixes (needs llama-quantize)",
    "feedback": "time of error feedback inside ggml's grids beside SparseGPT",
    "whole": "whole plans of a real model at the bytes of mixes, by every way to round",
    "tasks": "accuracy of a real model on tasks: dense, mix, uniform and plan at equal bytes, paired",
    "texts": "KL on other texts by what text decides the rounding, and how much of it",
    "rounding": "ways to round at equal formats: KL of nearest, weighted, gptq and descent, and parts of descent",
    "limits": "how much better codes can be at the same steps: searches, and what none can pass",
}

if __name__ == "__main__":
    run_parts("bits", __doc__, PARTS)
