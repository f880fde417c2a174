"""A score of one's own - the norm of the weights - under the same program, beside a permuted control and uniform."""

import layerbudget as lb
from layerbudget.models.blocks import weight_of
from layerbudget.sensitivity.estimators import estimator


@estimator("my-norm", summary="mean square of the weights", data=False)
def my_norm(model, data, blocks, *, power=2.0):
    """One number per block; keyword-only parameters are its options (``--power 1``)."""
    values = {}
    for block in blocks:
        total = sum(weight_of(model, m.name)[1].abs().pow(power).sum().item() for m in block.modules)
        values[block.name] = total / block.numel
    return lb.Scores.from_values(blocks, values, estimator="my-norm", unit="weights^power")


if __name__ == "__main__":  # the file can also be named: layerbudget score MODEL --estimator examples/own_score.py:my-norm
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    data = lb.calibration("stdlib", tokenizer, samples=8, length=128)
    held_out = lb.evaluation_set("stdlib", tokenizer, length=128, windows=8)
    scores = lb.score(model, None, lb.partition(model), "my-norm", power=2.0)
    for rule in ("mdl", "permuted", "uniform"):
        pruned = lb.load_model("demo")
        lb.prune(pruned, lb.plan_sparsity(scores, sparsity=0.5, rule=rule), data, method="wanda")
        print(f"{rule:>9}: perplexity {lb.perplexity(pruned, held_out).value:.3f}")
