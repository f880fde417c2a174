"""A rule of one's own - ranks in proportion to the root of the gain - beside its permuted control and uniform.

On the command line: layerbudget plan ranks scores.json --rule examples/own_rule.py:root --mean-rank 4 -o ranks.json
"""

import layerbudget as lb
from layerbudget.decisions.rules import rule


@rule("ranks", "root-permuted", control=True, summary="the same on shuffled scores: a control")
@rule("ranks", "root", summary="ranks in proportion to a power of the gain")
def root(problem, *, power: float = 0.5):
    """One share per block: the package scales them to the budget, within the bounds, and finds whole ranks.

    ``problem.weights()`` are the scores; for the control, the same numbers on other blocks.
    """
    return problem.weights() ** power


if __name__ == "__main__":
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    data = lb.calibration("stdlib", tokenizer, samples=8, length=64)
    scores = lb.score(model, data, lb.partition(model, "linear", exclude="lm_head"), estimator="rank-gain")
    for name in ("root", "root-permuted", "uniform", "by-rank"):
        plan = lb.plan_ranks(scores, mean_rank=4, rule=name)
        ranks, spent = plan.counts, plan.budget["spent"]
        print(f"{name:>13}: ranks {ranks.min()} to {ranks.max()}, {spent:,.0f} parameters")
