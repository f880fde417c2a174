"""Where no batch is named, as many sequences run at a time as fit; what comes out does not depend on it."""

import json

import numpy as np
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.cli.session import Session
from layerbudget.decisions.sparsity.request import SparsityRequest
from layerbudget.execution import memory
from layerbudget.plan import Plan

FEW = ["--samples", "6", "--length", "24", "--quiet", "--json"]


@pytest.fixture
def scarce(monkeypatch):
    """Memory that one sequence fills; returns the batches that were chosen."""
    chosen, fitting = [], memory.fitting

    def seen(*given):
        chosen.append(fitting(*given))
        return chosen[-1]

    def switch():
        monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 1 << 12)
        monkeypatch.setattr(memory, "fitting", seen)
        return chosen

    return switch


def test_a_batch_that_was_given_stays(scarce):
    model, data = zoo.mistral(2), zoo.tokens(4, 8, vocabulary=61)
    assert Session(SparsityRequest(source="demo")).batch(model, data) == 8
    assert Session(SparsityRequest(source="demo")).batch(model, data, most=16) == 16
    scarce()
    assert Session(SparsityRequest(source="demo", batch_size=5)).batch(model, data) == 5
    assert Session(SparsityRequest(source="demo")).batch(model, data) == 1
    assert Session(SparsityRequest(source="demo")).batch() == 8


def test_verbs_give_the_same_in_little_memory(saved_model, tmp_path, scarce, capsys):
    plan, folder = tmp_path / "uniform.json", str(saved_model("llama"))
    lb.plan_sparsity(lb.partition(lb.load_model(folder)), sparsity=0.5, rule="uniform").save(plan)
    found: list[dict[str, object]] = []
    for way in ("room", "none"):
        out = tmp_path / way
        out.mkdir()
        chosen = scarce() if way == "none" else []
        jobs = (
            ["score", folder, *FEW, "--estimator", "fisher-gram", "-o", str(out / "scores.json")],
            ["plan", "sparsity", folder, *FEW, "--passes", "6", "--sparsity", "0.5", "-o", str(out / "plan.json")],
            ["apply", folder, str(plan), *FEW, "-o", str(out / "pruned")],
            ["evaluate", str(out / "pruned"), "--windows", "6", "--length", "24", "--quiet", "--json"],
        )
        for job in jobs:
            capsys.readouterr()
            assert main(job) == 0, job
        last = capsys.readouterr().out
        weights = lb.load_model(str(out / "pruned")).state_dict()
        found.append({
            "chosen": chosen, "plan": Plan.load(out / "plan.json"),
            "scores": lb.Scores.load(out / "scores.json").values(),
            "zeros": {name: (tensor == 0).tolist() for name, tensor in weights.items() if tensor.ndim == 2},
            "perplexity": json.loads(last)["perplexity"],
        })  # fmt: skip
    room, none = found
    assert none["chosen"] and set(none["chosen"]) == {1}
    plans = room["plan"], none["plan"]
    moved = np.abs(plans[0].counts - plans[1].counts).sum() / plans[0].counts.sum()
    # A search takes its steps by measured numbers: where two are near each other, their last digit decides, on some processors.
    assert plans[0].counts.sum() == plans[1].counts.sum() and moved < 0.01
    assert plans[0].payload.measured == pytest.approx(plans[1].payload.measured, rel=0.05)
    assert room["zeros"] == none["zeros"]
    assert none["scores"] == pytest.approx(room["scores"], rel=1e-5)
    a, b = (next(iter(f["perplexity"].values())) for f in found)
    assert b["value"] == pytest.approx(a["value"], rel=1e-5)
