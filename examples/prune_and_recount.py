"""Prune by a plan and by uniform at one recounted budget, and compare window by window."""

import numpy as np

import layerbudget as lb

tokenizer = lb.load_tokenizer("demo")
data = lb.calibration("stdlib", tokenizer, samples=8, length=128)
held_out = lb.evaluation_set("stdlib", tokenizer, length=128, windows=8)
model = lb.load_model("demo")
scores = lb.score(model, data, lb.partition(model), estimator="fisher-gram")
losses = {}
for rule in ("mdl", "uniform"):
    pruned = lb.load_model("demo")
    receipt = lb.prune(pruned, lb.plan_sparsity(scores, sparsity=0.6, rule=rule), data, method="wanda")
    found = lb.perplexity(pruned, held_out)
    losses[rule] = np.array(found.nll)
    print(f"{rule}: {receipt.sparsity:.4%} zeros, perplexity {found.value:.2f}")
difference = losses["mdl"] - losses["uniform"]
error = difference.std(ddof=1) / np.sqrt(len(difference))
print(f"paired over windows: {difference.mean():+.4f} nats, standard error {error:.4f}")
