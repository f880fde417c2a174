"""A recipe for llm-compressor with four distinct sparsities and the same total as the plan."""

import layerbudget as lb
from layerbudget.decisions.sparsity.export import llm_compressor, with_levels

model = lb.load_model("demo")
scores = lb.score(model, None, lb.partition(model, "linear", exclude="lm_head"), "spectral-tail")
plan = lb.plan_sparsity(scores, sparsity=0.5)
fewer, change = with_levels(plan, 4)
print(
    f"{len(set(plan.values))} sparsities become {len({round(v, 9) for v in fewer.values})}; the largest change is {change:.3f}"
)
print(llm_compressor(plan, levels=4).split("targets")[0])
