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
    """It recommended the measured plan and saved the curvature plan and its model."""
    for name, value in {"SAMPLES": 6, "LENGTH": 24, "WINDOWS": 6, "MEASURED": 3}.items():
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


@pytest.mark.slow
def test_a_stopped_demo_goes_on_where_it_was(tmp_path, monkeypatch):
    rules = {k: demo.RULES[k] for k in ("uniform", "directional")}
    small = {"SAMPLES": 3, "LENGTH": 16, "WINDOWS": 3, "MEASURED": 3, "PASSES": 6, "TARGETS": (0.5,), "RULES": rules}
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)
    demo.run_demo(tmp_path / "whole")
    plain, calls = demo.perplexity, []

    def stopping(model, data):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(model, data)

    monkeypatch.setattr(demo, "perplexity", stopping)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(tmp_path / "out", resume=tmp_path / "parts")
    assert not (tmp_path / "out").exists()
    demo.run_demo(tmp_path / "out", resume=tmp_path / "parts")
    assert len(calls) == 1 + len(demo.RULES) + 1 and not (tmp_path / "parts").exists()
    for name in ("scores.json", "plan.json", "pruned/model.safetensors", "overview.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    told = [json.loads((tmp_path / f / "result.json").read_text()) for f in ("whole", "out")]
    for record in told:
        for name in ("seconds", "peak_memory_mib", "output"):
            del record[name]
    assert told[0] == told[1]
