"""Sequential plans by directional damage: what is predicted comes, what is measured is what is applied."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.compressors.base import find_treatment
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.decisions.sparsity.treated import TreatedModel, Units
from layerbudget.errors import InfeasibleBudget, InvalidInput, ModelMismatch
from layerbudget.models.blocks import describe, weight_of
from layerbudget.plan import Plan


def kl(model, pruned, data):
    total = tokens = 0.0
    with torch.no_grad():
        for batch in data.batches(len(data)):
            p, q = (torch.log_softmax(m(**batch).logits.double(), -1) for m in (model, pruned))
            mask = batch.get("attention_mask", torch.ones(p.shape[:2]))
            total += float(((p.exp() * (p - q)).sum(-1) * mask).sum())
            tokens += float(mask.sum())
    return total / tokens


def uneven(name="llama"):
    """A model in which one layer hardly matters."""
    model = zoo.build(name)
    with torch.no_grad():
        for w in (model.model.layers[1].self_attn.o_proj.weight, model.model.layers[1].mlp.down_proj.weight):
            w.mul_(0.02)
    return model


@pytest.mark.parametrize(
    ("by", "method"),
    [
        ("layer", "wanda"),
        ("linear", "magnitude"),
        ("linear", "sparsegpt"),
        ("rows:5", "wanda"),
    ],
)
def test_a_plan_is_better_than_uniform_and_does_what_it_says(by, method):
    model, data = uneven(), zoo.tokens(samples=8)
    before = copy.deepcopy(model.state_dict())
    plan = plan_sparsity(model, data, sparsity=0.5, by=by, method=method, passes=18, batch_size=8)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert plan.counts.sum() == round(0.5 * sum(b.numel for b in plan.blocks)) and plan.rule == "directional"
    pruned, even = copy.deepcopy(model), copy.deepcopy(model)
    receipt = prune(pruned, plan, data, method, 4)
    assert receipt.sparsity == pytest.approx(0.5, abs=1e-4)
    assert kl(model, pruned, data) == pytest.approx(plan.payload.measured, rel=1e-3)
    prune(even, zoo.plan(model, spread=0), data, method, 4)
    assert kl(model, pruned, data) < kl(model, even, data)
    log = plan.payload.path
    assert plan.payload.forward_passes <= 20 and len(log) > 2  # two more where the last step is refused
    assert all(b["divergence"] < a["divergence"] for a, b in zip(log, log[1:], strict=False))
    assert plan.payload.predicted == pytest.approx(log[-2]["divergence"] + log[-1]["predicted"])
    assert (plan.rows is None) == (not by.startswith("rows"))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_transposed_weights_and_experts_are_decided_too(name):
    model, data = zoo.build(name), zoo.tokens()
    plan = plan_sparsity(model, data, sparsity=0.5, by="linear", passes=12, batch_size=4)
    pruned = copy.deepcopy(model)
    assert prune(pruned, plan, data, "wanda", 1).sparsity == pytest.approx(0.5, abs=1e-4)
    assert kl(model, pruned, data) == pytest.approx(plan.payload.measured, rel=2e-3)
    assert len({b.value for b in plan.blocks}) > 1


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("by", ["linear", "rows:8"])
def test_the_prediction_is_the_slope_along_the_pruners_own_change(method, by):
    """Finite differences of the divergence, at a treated point, towards what the pruner makes of single units."""
    model, data = zoo.build("llama"), zoo.tokens(samples=4)
    units = Units.by(model, by)
    point = TreatedModel(model, data, units, find_treatment(method), batch_size=4)
    lines = np.array([8 if by != "linear" else m.d_out for m in units.modules for _ in range(units.groups[m.name])])
    counts = lines * np.rint(0.4 * units.numel / lines).astype(int)
    levels = np.stack([counts - 4 * lines, counts, counts + 4 * lines], 1) / units.numel[:, None]
    seen = point.evaluate(counts, point.dense, levels)
    assert seen.passes == 3 and abs(seen.first[:, 1]).max() < 1e-6
    here = {m.name: weight_of(model, m.name)[1].detach().clone() for m in units.modules}
    names = [m.name for m in units.modules for _ in range(units.groups[m.name])]
    for k in range(0, len(units), max(1, len(units) // 5)):
        for side, sign in ((0, -1), (2, 1)):
            moved = counts.copy()
            moved[k] += sign * 4 * lines[k]
            point.move(moved, point.dense)
            weight = weight_of(model, names[k])[1].data
            change, values = weight - here[names[k]], []
            for scale in (0.05, -0.05):
                point.move(counts, point.dense)
                weight.add_(change, alpha=scale)
                values.append(point.reference.measure())
            slope = (values[0] - values[1]) / 0.1
            assert slope == pytest.approx(seen.first[k, side], rel=0.03, abs=1e-4), (names[k], side)
    point.restore()


def test_padding_and_batches_change_nothing():
    model, data = uneven(), zoo.tokens(samples=6, padded=True)
    plans = [plan_sparsity(model, data, by="linear", passes=15, batch_size=b) for b in (6, 2)]
    assert np.abs(plans[0].values - plans[1].values).max() < 0.01
    assert plans[0].payload.measured == pytest.approx(plans[1].payload.measured, rel=1e-2)


@pytest.mark.parametrize(("method", "by"), [("wanda", "rows:4"), pytest.param("sparsegpt", "linear", marks=pytest.mark.slow)])
def test_an_interrupted_run_continues_to_the_same_plan(tmp_path, monkeypatch, method, by):
    model, data = uneven(), zoo.tokens()
    before = copy.deepcopy(model.state_dict())
    options = {"by": by, "passes": 19, "batch_size": 8, "method": method}
    whole = plan_sparsity(model, data, **options)
    look, calls = TreatedModel.evaluate, []

    def stop(*arguments, **more):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return look(*arguments, **more)

    monkeypatch.setattr(TreatedModel, "evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        plan_sparsity(model, data, resume=str(tmp_path / "kept"), **options)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    monkeypatch.setattr(TreatedModel, "evaluate", look)
    again = plan_sparsity(model, data, resume=str(tmp_path / "kept"), **options)
    assert again.digest == whole.digest and again.rows == whole.rows
    with pytest.raises(ModelMismatch):
        plan_sparsity(model, data, resume=str(tmp_path / "kept"), **{**options, "sparsity": 0.6})


def test_a_plan_of_rows_is_saved_loaded_and_applied_exactly(tmp_path):
    model, data = uneven(), zoo.tokens()
    plan = plan_sparsity(model, data, by="rows:3", passes=15)
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size < 40_000
    again = Plan.load(tmp_path / "plan.json")
    assert again.digest == plan.digest and again.rows.counts.keys() == plan.rows.counts.keys()
    assert again.model["digest"] == describe(model)["digest"]
    receipt = prune(model, again, data, "wanda")
    assert receipt.rows["exact"] == receipt.rows["groups"] == sum(len(c) for c in plan.rows.counts.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"passes": 3}, "passes"),
        ({"by": "rows:0"}, "rows:G"),
        ({"trust": 0.0}, "trust"),
        ({"sparsity": 0.6, "max_sparsity": 0.5}, "max_sparsity"),
        ({"sparsity": 0.97}, r"max_sparsity, 0.95.*Use max_sparsity=0.985"),
        ({"method": "sparsegpt", "wrong": 1}, "wrong"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises((InvalidInput, InfeasibleBudget), match=says):
        plan_sparsity(zoo.build("llama"), zoo.tokens(), **options)
