"""Plans of LoRA ranks. Writes results/ranks.md, and of experts results/lora_experts.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "training": "ranks and experts by every rule at equal parameters, paired over seeds",
    "samples": "how many sequences a plan of ranks needs",
}

if __name__ == "__main__":
    run_parts("ranks", __doc__, PARTS)
