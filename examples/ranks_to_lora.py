"""Rows of chat to a LoraConfig with a rank for every matrix: the loss is taken on the answers only."""

from chat_rows import rows

import layerbudget as lb

model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
data = lb.calibration(rows(4), tokenizer, samples=4, length=64)
scores = lb.score(model, data, lb.partition(model, "linear", exclude="lm_head"), estimator="rank-gain")
plan = lb.plan_ranks(scores, mean_rank=4)
for sentence in lb.explain_plan(plan).sentences:
    print(sentence)
config = lb.to_lora_config(plan, task_type="CAUSAL_LM")  # peft.get_peft_model(model, config)
print(sorted(config.rank_pattern.values(), reverse=True)[:5], "...")
