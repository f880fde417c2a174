"""Which experts of a mixture stay. Writes results/expert_pruning.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "rules": "KL and perplexity of every rule; predicted beside measured",
    "files": "masks and files of 44 families beside plain code",
    "size": "memory and time by layer at the shapes of a 30 B mixture",
}

if __name__ == "__main__":
    run_parts("expert_pruning", __doc__, PARTS)
