"""One set of scores, budgets in any unit: parameters, bytes, FLOPs, your own seconds. No model."""

import numpy as np

import layerbudget as lb

config = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
blocks = lb.blocks_from_config(config, by="linear")
gain = np.random.default_rng(0).gamma(2.0, size=len(blocks))
scores = lb.Scores.from_values(blocks, {b.name: g for b, g in zip(blocks, gain, strict=True)})
seconds = {b.name: 1e-6 * (b.modules[0].d_in + b.modules[0].d_out) for b in blocks}

for budget, options in (("40k params", {}), ("80 KB", {}), ("5% flops", {}), ("0.03 s", {"latency": seconds})):
    plan = lb.plan_ranks(scores, budget=budget, **options)
    spent = plan.budget["spent"] / plan.budget["limit"]
    print(f"{budget:>12}: ranks {plan.counts.min()} to {plan.counts.max()}, {spent:.1%} spent, {plan.certificate['status']}")
