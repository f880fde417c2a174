"""From scores to one page: the network coloured by decision, a slider for the budget, the commands that repeat it."""

import tempfile
from pathlib import Path

import layerbudget as lb
from layerbudget.reporting.page import write_report

folder = Path(tempfile.mkdtemp())
model = lb.load_model("demo")
scores = lb.score(model, None, lb.partition(model), "spectral-tail")
scores.save(folder / "scores.json")
lb.plan_sparsity(scores, sparsity=0.5).save(folder / "plan.json")
print(write_report(folder, folder / "report.html"))
