"""Score once, decide many times: a grid of budgets and exponents in milliseconds, and its Pareto front."""

import layerbudget as lb

model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
data = lb.calibration("stdlib", tokenizer, samples=8, length=64)
scores = lb.score(model, data, lb.partition(model), estimator="fisher-gram")
grid = lb.sweep(scores, kind="sparsity", budgets=[0.3, 0.5, 0.7], exponents=[0.5, 1.0, 2.0])
for row in grid["rows"]:
    mark = "front" if row["front"] else ""
    print(f"{row['budget']:.0%} exponent {row['exponent']:g}: from {row['smallest']:.2f} to {row['largest']:.2f} {mark}")
