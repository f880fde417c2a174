"""Plans of sparsity beside other rules. Writes results/sparsity.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "rules": "perplexity of every rule at equal recounted sparsity",
    "ingredients": "directional damage one ingredient at a time; predicted beside measured",
    "divergence": "KL on held-out text beside perplexity",
    "real": "KL and perplexity of a real model by every rule, paired by window",
    "tasks": "accuracy of a real model on tasks by every rule, paired by question",
}

if __name__ == "__main__":
    run_parts("sparsity", __doc__, PARTS)
