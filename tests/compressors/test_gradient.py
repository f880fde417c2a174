"""The gradient-weighted pruner: gradients by autograd, sequence by sequence, and the rows that follow."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.compressors.base import find_treatment
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput


def gradients(model, data, name):
    """Root of the sum over sequences of squared gradients of a matrix."""
    total = 0.0
    weight = model.get_submodule(name).weight
    for i in range(data.samples):
        ids = data.input_ids[i : i + 1]
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum")
        total = total + torch.autograd.grad(loss, weight)[0].double().square()
    return total.sqrt()


def test_scores_are_weight_times_both_norms(mistral, data):
    name = "model.layers.1.mlp.down_proj"
    treatment = find_treatment("gradient").with_options({"alpha": 0.5})
    treatment.begin(mistral, data, batch_size=3)
    wanted = gradients(mistral, data, name)
    assert torch.allclose(treatment.norms[name][0].double(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.max()))
    weight, moment = mistral.get_submodule(name).weight.detach(), torch.rand(mistral.get_submodule(name).weight.shape[1])
    root = moment.sqrt() / moment.mean().sqrt() + 0.5 * wanted / wanted.square().mean().sqrt()
    assert torch.allclose(treatment.order(weight, treatment.of(name, 0, moment)).double(), weight.abs() * root, rtol=1e-3)


def test_prunes_the_counts_and_alpha_zero_is_wanda(mistral, data):
    plan = lb.plan_sparsity(lb.partition(mistral), sparsity=0.4, rule="uniform")
    models = [copy.deepcopy(mistral) for _ in range(3)]
    receipts = [
        lb.prune(models[0], plan, data, "wanda"), lb.prune(models[1], plan, data, "gradient", alpha=0.0),
        lb.prune(models[2], plan, data, "gradient"),
    ]  # fmt: skip
    assert {r.sparsity for r in receipts} == {receipts[0].sparsity}
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    with pytest.raises(InvalidInput, match="alpha"):
        lb.prune(copy.deepcopy(mistral), plan, data, "gradient", alpha=-1.0)
    with pytest.raises(InvalidInput, match="No reference"):
        lb.prune(copy.deepcopy(mistral), plan, data, "gradient", parity=True)


@pytest.mark.parametrize("by", ["linear", "rows:2"])
def test_a_plan_follows_its_order_and_says_what_it_cost(mistral, data, by):
    plan = plan_sparsity(mistral, data, sparsity=0.5, by=by, method="gradient", passes=15)
    pruned = copy.deepcopy(mistral)
    receipt = lb.prune(pruned, plan, data, "gradient")
    assert receipt.sparsity == pytest.approx(0.5, abs=1e-3) and np.ptp(plan.values) > 0
    wanda = plan_sparsity(mistral, data, sparsity=0.5, by=by, method="wanda", passes=15)
    assert plan.extra["path"][0]["passes"] == wanda.extra["path"][0]["passes"] + 3  # its gradients


def test_patterns_and_experts(mistral, data):
    for model in (mistral, zoo.tiny("mixtral")):
        plan = lb.plan_sparsity(lb.partition(model), sparsity=0.5, rule="uniform")
        pruned = copy.deepcopy(model)
        receipt = lb.prune(pruned, plan, data, "gradient", pattern="2:4" if model is mistral else None)
        assert receipt.sparsity == pytest.approx(0.5, abs=1e-3)
