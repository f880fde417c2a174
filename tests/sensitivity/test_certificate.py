"""Certificates against dense steps, exact expansions and loss functions whose constants are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import zoo
from torch import nn

from layerbudget.errors import InvalidInput
from layerbudget.execution.loss import FeatureSet
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.certificate import _row, certify_ranking, conjugate_gradients, direct_check
from layerbudget.sensitivity.curvature.exact import BlockProducts, score_ggn
from layerbudget.sensitivity.curvature.fisher import score_gram


@pytest.fixture
def net():
    """A smooth two-layer classifier in double precision, one block per Linear."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = FeatureSet(inputs=torch.randn(20, 5).double(), labels=torch.arange(20) % 3)
    return model, data, partition(model, by="linear")


def dense(model, data, block):
    """Gradient, Hessian and empirical Fisher of the mean loss in one weight matrix."""
    p = model.get_submodule(block.name).weight
    loss = nn.functional.cross_entropy

    def f(w):
        return loss(torch.func.functional_call(model, {block.name + ".weight": w}, (data.inputs,)), data.labels)

    h = torch.autograd.functional.hessian(f, p.detach()).reshape(p.numel(), p.numel())
    s = torch.stack([
        torch.autograd.grad(loss(model(x[None]), y[None]), p)[0].reshape(-1)
        for x, y in zip(data.inputs, data.labels, strict=True)
    ])  # fmt: skip
    return s.mean(0), h, s.T @ s / len(s), f, p.detach()


@pytest.mark.parametrize("curvature", ["fisher", "hessian"])
def test_every_number_equals_its_dense_version(net, curvature):
    model, data, blocks = net
    table = direct_check(model, data, blocks, curvature=curvature, damping=[2.0], damping_unit="absolute", batch_size=7)
    for row, block in zip(table, blocks, strict=True):
        g, h, fisher, f, p = dense(model, data, block)
        c = {"fisher": fisher, "hessian": h}[curvature]
        d = -torch.linalg.solve(c + 2.0 * torch.eye(len(g)), g)
        assert row["gain"] == pytest.approx(float(-g @ d), rel=1e-6)
        assert row["step_norm"] == pytest.approx(float(d.norm()), rel=1e-6)
        assert row["actual"] == pytest.approx((f(p + d.view_as(p)) - f(p)).item(), rel=1e-6)
        assert row["quadratic"] == pytest.approx((g @ d + d @ h @ d / 2).item(), rel=1e-6)
        assert row["curvature_gap"] == pytest.approx(float(d @ (h - c) @ d / 2), abs=1e-8)
        assert row["predicted"] == pytest.approx(float(g @ d / 2 - d @ d), rel=1e-6)


def test_gains_are_those_of_the_estimators(mistral):
    data, blocks = zoo.text(samples=8, length=12), partition(mistral)
    own = direct_check(mistral, data, blocks, damping=[0.1, 1.0])
    scores = score_gram(mistral, data, blocks, damping=[0.1, 1.0])
    assert np.array([r["gain"] for r in own]).reshape(3, 2).T == pytest.approx(np.array(scores.gain), rel=1e-4)
    options = {"damping": [0.5], "damping_unit": "absolute"}
    ggn = direct_check(mistral, data, blocks, curvature="ggn", **options)
    assert [r["gain"] for r in ggn] == pytest.approx(list(score_ggn(mistral, data, blocks, **options).gain[0]), rel=5e-3)


def test_expansion_holds_within_the_remainder(mistral):
    """actual = predicted + gap + R, and |R| is of the size that M says."""
    data = zoo.text(samples=8, length=12)
    for row in direct_check(mistral, data, partition(mistral), curvature="ggn", damping=[0.3, 3.0]):
        remainder = row["actual"] - row["predicted"] - row["curvature_gap"]
        assert abs(remainder) <= 1.5 * row["lipschitz"] / 6 * row["step_norm"] ** 3 + 2e-6


def test_large_damping_makes_prediction_and_loss_agree(mistral):
    rows = direct_check(mistral, zoo.text(samples=8, length=12), partition(mistral), curvature="fisher", damping=[300.0])
    for row in rows:
        assert row["actual"] == pytest.approx(-row["gain"], rel=0.05)  # first order: the whole gain, half of it damping bias
        assert row["predicted"] == pytest.approx(row["actual"], rel=0.05)


def test_conv1d_steps_are_the_right_way_round(gpt2):
    """With the transpose forgotten the step would not be a descent direction."""
    rows = direct_check(gpt2, zoo.text(samples=8, length=12), partition(gpt2), damping=[100.0])
    assert all(row["actual"] == pytest.approx(-row["gain"], rel=0.1) for row in rows)


def test_weights_come_back_bit_for_bit(mistral, monkeypatch):
    before = {k: v.clone() for k, v in mistral.state_dict().items()}
    direct_check(mistral, zoo.text(samples=4), partition(mistral), damping=[1.0])
    assert all(torch.equal(before[k], v) for k, v in mistral.state_dict().items())
    monkeypatch.setattr("layerbudget.sensitivity.curvature.exact.BlockProducts.hessian", lambda self, v: v.missing)
    with pytest.raises(AttributeError):
        direct_check(mistral, zoo.text(samples=4), partition(mistral), damping=[1.0])
    assert all(torch.equal(before[k], v) for k, v in mistral.state_dict().items())


def test_negative_curvature_is_named(mistral):
    rows = direct_check(
        mistral, zoo.text(samples=4), partition(mistral), curvature="hessian", damping=[1e-6], damping_unit="absolute"
    )
    assert {r["status"] for r in rows} == {"negative curvature"}


def row(block, gain, epsilon, actual, gap=0.0):
    return {
        "block": block, "gain": gain, "epsilon": epsilon, "epsilon_with_gap": epsilon + gap, "actual": actual,
        "relative_damping": 1.0, "status": "ok", "quadratic": actual, "lipschitz": 0.06, "step_norm": 1.0,
    }  # fmt: skip


def test_pairs_are_certified_by_the_papers_rule():
    table = [row("a", 1.0, 0.1, -0.4), row("b", 0.5, 0.1, -0.3), row("c", 0.4, 0.1, -0.35, gap=0.15)]
    pairs = {(r["above"], r["below"]): r for r in certify_ranking(table, with_gap=False)}
    assert pairs["a", "b"]["certified"] and pairs["a", "c"]["certified"] and not pairs["b", "c"]["certified"]
    assert not pairs["b", "c"]["agrees"] and pairs["a", "b"]["agrees"]
    assert not {(r["above"], r["below"]): r for r in certify_ranking(table)}["a", "c"]["certified"]
    assert pairs["a", "b"]["sharp"] and pairs["a", "c"]["sharp"] and not pairs["b", "c"]["sharp"]


def test_a_certified_pair_has_the_order_of_its_losses(net):
    """Blocks of very different gain are certified, and then the measured losses agree."""
    model, data, blocks = net
    with torch.no_grad():
        model[2].weight *= 0.02  # starves the first layer of gradient
    table = direct_check(model, data, blocks, curvature="hessian", damping=[1.0, 10.0], damping_unit="absolute")
    pairs = certify_ranking(table)
    assert len(pairs) == 2 and all(p["agrees"] for p in pairs if p["certified"] or p["sharp"])
    assert all(p["sharp"] for p in pairs)


def test_conjugate_gradients_equal_the_dense_solve():
    torch.manual_seed(0)
    a = torch.randn(9, 9).double()
    a = a @ a.T
    b = torch.randn(9).double()
    x, status = conjugate_gradients(lambda v: a @ v, b, 0.3, tolerance=1e-10)
    assert torch.allclose(x, torch.linalg.solve(a + 0.3 * torch.eye(9), b), rtol=1e-7)
    assert status == "ok"
    assert conjugate_gradients(lambda v: -a @ v, b, 0.3) == (None, "negative curvature")
    few, status = conjugate_gradients(lambda v: a @ v, b, 0.3, steps=2, tolerance=1e-10)
    assert few is not None and status.startswith("not converged: residual")


def test_refusals(net):
    with pytest.raises(InvalidInput, match="curvature"):
        direct_check(*net, curvature="kfac")
    with pytest.raises(InvalidInput, match="mean"):
        direct_check(*net, damping_unit="mean")


@pytest.mark.parametrize("curvature", ["fisher", "ggn", "hessian"])
def test_a_block_without_any_gradient_leaves_the_model_as_it_was(net, curvature):
    model, data, blocks = net
    with torch.no_grad():
        model[2].weight.zero_()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    table = direct_check(model, data, blocks, curvature=curvature)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [r["gain"] for r in table if r["block"] == "0"] == [0.0] * 3


def test_weights_come_back_even_from_a_step_that_is_no_number(net):
    model, data, blocks = net
    before = model[0].weight.detach().clone()
    with BlockProducts(model, data, blocks[0], 20) as p:
        _row(p, 1.0, (torch.full_like(p.gradient(), float("nan")), "ok"), 0.0, p.gradient())
    assert torch.equal(model[0].weight, before)
