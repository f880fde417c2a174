"""Measured penalties: against direct measurement, and better than uniform where blocks differ."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.by_curves import plan_by_curves
from layerbudget.decisions.sparsity.curves import Curves
from layerbudget.decisions.sparsity.measure import damage_curves, plan_damage
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import describe, partition
from layerbudget.plan import Plan, PlanBlock


def only(model, chosen, ratio):
    blocks = tuple(
        PlanBlock(
            name=b.name, value=ratio, count=round(ratio * b.numel) if b.name == chosen else 0, numel=b.numel,
            modules=tuple(m.name for m in b.modules),
        )
        for b in partition(model)
    )  # fmt: skip
    return Plan(kind="sparsity", rule="one", model=describe(model), blocks=blocks, budget={})


def kl(model, pruned, data):
    with torch.no_grad():
        batch = next(data.batches(len(data)))
        p = torch.log_softmax(model(**batch).logits, -1)
        q = torch.log_softmax(pruned(**batch).logits, -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_curves_equal_pruning_one_block_and_comparing_outputs(name, method):
    model, data = zoo.build(name), zoo.tokens()
    before = copy.deepcopy(model.state_dict())
    curves = damage_curves(model, data, ratios=(0.4, 0.8), method=method, batch_size=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for i, block in enumerate(partition(model)):
        for j, ratio in enumerate((0.4, 0.8)):
            pruned = copy.deepcopy(model)
            prune(pruned, only(model, block.name, ratio), data, method, 4)
            assert curves.damage[block.name][j] == pytest.approx(kl(model, pruned, data), rel=1e-3), i


def test_around_a_plan_the_middle_point_is_the_plan_itself():
    model, data = zoo.build("llama"), zoo.tokens()
    plan = zoo.plan(model)
    before = copy.deepcopy(model.state_dict())
    ratios = {b.name: (b.value - 0.1, b.value, b.value + 0.1) for b in plan.blocks}
    curves = damage_curves(model, data, ratios=ratios, around=plan, batch_size=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    pruned = copy.deepcopy(model)
    prune(pruned, plan, data, "wanda", 4)
    for values in curves.damage.values():
        assert values[1] == pytest.approx(kl(model, pruned, data), rel=1e-3)


@pytest.mark.parametrize("batch_size", [6, 1])
def test_loss_metric_counts_real_tokens_only(batch_size):
    model, data = zoo.build("llama"), zoo.tokens(padded=True)
    curves = damage_curves(model, data, ratios=(0.9,), metric="loss", batch_size=batch_size)
    block = partition(model)[0].name
    pruned = copy.deepcopy(model)
    prune(pruned, only(model, block, 0.9), data, "wanda", 6)
    labels = data.input_ids.masked_fill(data.attention_mask == 0, -100)
    with torch.no_grad():
        losses = [m(data.input_ids, attention_mask=data.attention_mask, labels=labels).loss for m in (model, pruned)]
    assert curves.damage[block][0] == pytest.approx(float(losses[1] - losses[0]), rel=1e-3)


def test_calibration_protects_the_block_that_matters():
    """A block whose output is scaled down hardly matters: it must take most of the pruning, and the KL must fall."""
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    with torch.no_grad():
        for w in (model.model.layers[1].self_attn.o_proj.weight, model.model.layers[1].mlp.down_proj.weight):
            w.mul_(0.02)
    plan, curves = plan_by_curves(model, data, sparsity=0.5, iterations=1, batch_size=8)
    assert len(curves) == 2
    assert plan.sparsity == pytest.approx(0.5, abs=1e-4)
    assert int(np.argmax(plan.values)) == 1
    found = {}
    for name, p in (("calibrated", plan), ("uniform", zoo.plan(model, spread=0))):
        pruned = copy.deepcopy(model)
        receipt = prune(pruned, p, data, "wanda", 8)
        assert receipt.sparsity == pytest.approx(0.5, abs=1e-4)
        found[name] = kl(model, pruned, data)
    assert found["calibrated"] < found["uniform"]


def test_smoothed_curves_pass_through_the_points():
    curves = Curves(ratios={"a": (0.3, 0.5, 0.8)}, damage={"a": (0.01, 0.1, 1.0)}, metric="kl", method="wanda")
    x, y = (np.array(v) for v in curves.penalty(0.01)["a"])
    assert np.interp([0.3, 0.5, 0.8], x, y) == pytest.approx([0.01, 0.1, 1.0], rel=1e-6)
    assert y[0] == 0 and (np.diff(y) > 0).all()
    around = Curves(ratios={"a": (0.4, 0.5, 0.6)}, damage={"a": (2.0, 2.1, 2.4)}, metric="kl", method="wanda", relative=True)
    x, y = (np.array(v) for v in around.penalty(0.01)["a"])
    assert np.interp(0.6, x, y) - np.interp(0.4, x, y) == pytest.approx(0.4)
    assert (np.diff(np.diff(y) / np.diff(x)) >= -1e-9).all()


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_damage_of_a_plan_is_that_of_pruning_by_it(method):
    model, data = zoo.build("llama"), zoo.tokens()
    before = copy.deepcopy(model.state_dict())
    plans = [zoo.plan(model, spread=s) for s in (0.0, 0.3)]
    found, forwards = plan_damage(model, data, partition(model), plans, method=method, batch_size=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and forwards > 0
    for plan, damage in zip(plans, found, strict=True):
        pruned = copy.deepcopy(model)
        prune(pruned, plan, data, method, 4)
        assert damage == pytest.approx(kl(model, pruned, data), rel=1e-3)


def test_a_step_is_taken_only_as_far_as_the_whole_plan_gains():
    model, data = zoo.build("llama"), zoo.tokens()
    start, _ = plan_by_curves(model, data, sparsity=0.6, iterations=0, batch_size=8)
    plan, curves = plan_by_curves(model, data, sparsity=0.6, iterations=3, trust=0.3, batch_size=8)
    damage, _ = plan_damage(model, data, partition(model), [start, plan], batch_size=8)
    assert damage[1] <= damage[0] and plan.extra["damage"] == pytest.approx(damage[1], rel=1e-5)
    assert sum(b.count for b in plan.blocks) == sum(b.count for b in start.blocks)
    assert len(curves) <= 4 and plan.extra["search_forwards"] > 0


@pytest.mark.parametrize("ratios", [(0.7, 0.3), (0.3, 0.3), (0.3, 1.2), ()])
def test_ratios_that_do_not_increase_are_refused_before_anything_is_measured(ratios):
    model = zoo.build("llama")
    with pytest.raises(InvalidInput, match="ncrease within"):
        damage_curves(model, zoo.tokens(), ratios=ratios)
    with pytest.raises(InvalidInput):
        Curves(ratios={"a": ratios}, damage={"a": tuple(ratios)}, metric="kl", method="wanda")


def test_a_block_that_spans_layers_is_refused():
    model = zoo.build("llama")
    with pytest.raises(InvalidInput, match="within one layer"):
        damage_curves(model, zoo.tokens(), partition(model, "q_proj|down_proj"))


def test_blocks_may_be_measured_at_ratios_of_their_own():
    model = zoo.build("llama")
    blocks = partition(model)
    ratios = {b.name: (0.3, 0.5 + 0.1 * i) for i, b in enumerate(blocks)}
    curves = damage_curves(model, zoo.tokens(), ratios=ratios, batch_size=4)
    plan = plan_sparsity(blocks, sparsity=0.5, max_sparsity=0.9, penalty=curves.penalty())
    assert plan.counts.sum() == round(0.5 * sum(b.numel for b in blocks))
    assert all(b.value <= ratios[b.name][-1] + 1e-9 for b in plan.blocks)


@pytest.mark.parametrize("around", [False, True])
def test_an_interrupted_measurement_leaves_the_model_as_it_was(around):
    model = zoo.build("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == 6:  # the dense outputs, and some damages
            raise KeyboardInterrupt

    model.lm_head.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        damage_curves(model, zoo.tokens(), batch_size=4, around=zoo.plan(model) if around else None)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
