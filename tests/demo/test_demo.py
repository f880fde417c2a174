"""The demo at a small size: what it saves is what it recommends."""

import json

import pytest

from layerbudget.cli import main
from layerbudget.decisions.sparsity.receipt import recount
from layerbudget.demo import run as demo
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model
from layerbudget.plan import Plan


def test_the_best_row_is_the_one_that_is_saved(tmp_path, monkeypatch, capsys):
    """It recommended the plan by directional damage and saved the one by gain and its model."""
    for name, value in {"SAMPLES": 6, "LENGTH": 24, "WINDOWS": 6, "MEASURED": 3, "PASSES": 6, "TARGETS": (0.5,)}.items():
        monkeypatch.setattr(demo, name, value)
    assert main(["demo", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = [r for r in result["rows"] if r["target"] == demo.TARGETS[0]]
    best = min(rows, key=lambda r: r["perplexity"])
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert len(rows) == len(demo.RULES) and result["saved"]["model"] == best["model"] == demo.RULES[plan.rule]
    assert best["model"] in said and "the best of the table" in said
    model = load_model(str(tmp_path / "out" / "pruned"))
    assert recount(model, partition(model))["zeros"] == plan.counts.sum()
    assert best["sparsity"] == pytest.approx(plan.counts.sum() / sum(b.numel for b in plan.blocks))
