"""Hessian and GGN: products, Lanczos, bracket and refusals against dense matrices."""

import functools

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.errors import InvalidInput
from layerbudget.execution import loss as L
from layerbudget.models.blocks import weight_of
from layerbudget.sensitivity.curvature import exact
from layerbudget.sensitivity.curvature.exact import BlockProducts
from layerbudget.sensitivity.gain import score

CASES = ("mlp", "mistral", "gemma", "gpt2", "bert", "mixtral")


def dense_ggn(model, data, block):
    """GGN of one block from the full Jacobian of the logits, token by token."""
    parameters = [weight_of(model, m.name)[1] for m in block.modules]
    p = sum(q.numel() for q in parameters)
    total, n = torch.zeros(p, p, dtype=torch.float64), L.token_count(model, data)
    for batch in L.batches(model, data, 1):
        logits = L.logits_of(model, batch).double()
        flat, targets = logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1)
        for t in (targets != L.IGNORE).nonzero()[:, 0]:
            eye = torch.eye(flat.shape[1], dtype=flat.dtype)
            grads = torch.autograd.grad(
                flat[t], parameters, eye, retain_graph=True, allow_unused=True, is_grads_batched=True, materialize_grads=True
            )
            j, prob = torch.cat([g.flatten(1) for g in grads], 1).double(), flat[t].softmax(-1)
            total += j.T @ (torch.diag(prob) - torch.outer(prob, prob)) @ j / n
    return total.detach()


def dense_hessian(model, data, block):
    """Hessian of one block by differentiating every gradient entry."""
    parameters = [weight_of(model, m.name)[1] for m in block.modules]
    batch = next(L.batches(model, data, data.samples))
    loss = L.summed_loss(L.logits_of(model, batch), batch.targets) / L.token_count(model, data)
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in grads])
    pieces = [
        torch.autograd.grad(flat, parameters, rows, retain_graph=True, is_grads_batched=True)
        for rows in torch.eye(len(flat), dtype=flat.dtype).split(256)
    ]
    return torch.cat([torch.cat([h.flatten(1) for h in piece], 1) for piece in pieces]).detach().double()


def small(name):
    model = zoo.dense(name)
    data = zoo.labelled(name, samples=4 if name == "mlp" else 2, length=5)
    return model, data, zoo.partition(model, name)[1]


@functools.cache
def with_ggn(name):
    model, data, block = small(name)
    return model, data, block, dense_ggn(model, data, block)


@pytest.mark.parametrize("name", CASES)
def test_ggn_products_and_bracket_against_the_dense_matrix(name):
    model, data, block, dense = with_ggn(name)
    with BlockProducts(model, data, block, 1) as p:
        v = torch.randn(block.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        got, g = p.ggn(v), p.gradient()
    assert torch.allclose(got, dense @ v, rtol=1e-6, atol=1e-6 * float((dense @ v).abs().max()))
    scores = score(model, data, [block], "ggn", batch_size=2, damping=[1e-3, 1e-2, 0.1, 1.0], tolerance=1e-3)
    for i in range(4):
        tau = scores.extra["absolute_damping"][i][0]
        truth = zoo.gain(g, dense, tau)
        low, high = scores.extra["lower"][i][0], scores.extra["upper"][i][0]
        assert low <= truth * (1 + 1e-6) and truth <= high * (1 + 1e-6)
        assert scores.status[i][0] == "ok" and low == pytest.approx(truth, rel=2e-3)


@pytest.mark.parametrize("name", ("mlp", "mistral"))
def test_bracket_contains_the_truth_after_every_product_and_the_eigenvalue_of_the_damping_is_settled(name):
    model, data, block, dense = with_ggn(name)
    with BlockProducts(model, data, block, 2) as p:
        g = p.gradient()
        runs = [exact.lanczos(p.ggn, g, m) for m in (1, 2, 4, 7, 12)]
    largest = float(torch.linalg.eigvalsh(dense)[-1])
    tau = np.array([1e-4, 1e-2, 1.0]) * largest
    truth = np.array([zoo.gain(g, dense, t) for t in tau])
    for run in runs:
        assert (run.gauss(tau) <= truth * (1 + 1e-6)).all() and (run.radau(tau) >= truth * (1 - 1e-6)).all()
    scores = score(model, data, [block], "ggn", batch_size=2, damping=[1.0])
    assert scores.extra["largest_eigenvalue"][0] == pytest.approx(largest, rel=0.02)


@pytest.mark.parametrize("name", ("mlp", "mistral", pytest.param("gpt2", marks=pytest.mark.slow)))
def test_hessian_products_against_the_dense_matrix_and_indefiniteness_is_named(name):
    model, data, block = small(name)
    dense = dense_hessian(model, data, block)
    with BlockProducts(model, data, block, 1) as p:
        v = torch.randn(block.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        got, g = p.hessian(v), p.gradient()
    assert torch.allclose(got, dense @ v, rtol=1e-6, atol=1e-6 * float((dense @ v).abs().max()))
    low, high = (float(x) for x in torch.linalg.eigvalsh(dense)[[0, -1]])
    assert low < 0
    scores = score(model, data, [block], "hessian", damping=[-0.5 * low, -3 * low], damping_unit="absolute", steps=60)
    assert scores.gain[0][0] is None and block.name in scores.status[0][0] and "safe" in scores.status[0][0]
    assert scores.gain[1][0] == pytest.approx(zoo.gain(g, dense, -3 * low), rel=1e-3)
    with pytest.raises(InvalidInput, match="negative curvature"):
        scores.values(-0.5 * low)
    value, vector = torch.linalg.eigh(dense)
    magnitude = vector @ torch.diag(value.abs()) @ vector.T
    both = score(model, data, [block], "hessian", damping=0.3 * high, damping_unit="absolute", steps=80, absolute=True)
    assert both.gain[0][0] == pytest.approx(zoo.gain(g, magnitude, 0.3 * high), rel=2e-2)


def test_the_gain_under_the_hessian_is_refused_where_the_model_falls_without_end_and_a_lower_bound_near_it():
    """Nothing said what the number of an indefinite block is, and the remedy named no damping."""
    model, data, block = small("mlp")
    dense = dense_hessian(model, data, block)
    with BlockProducts(model, data, block, 1) as p:
        g = p.gradient()
    values, vectors = torch.linalg.eigh(dense)
    low, down = float(values[0]), vectors[:, 0] * -torch.sign(vectors[:, 0] @ g)
    inside, near, safe = -0.9 * low, -1.2 * low, -2 * low

    def lowered(tau, d):
        return -float(2 * g @ d + d @ dense @ d + tau * d @ d)

    assert lowered(inside, 1e3 * down) > 50 * lowered(inside, 1e2 * down) > 0  # no largest decrease: no gain
    options = {"damping": [inside, near, safe], "damping_unit": "absolute"}
    few, many = (score(model, data, [block], "hessian", steps=steps, **options) for steps in (4, 60))
    assert many.gain[0][0] is None and many.status[0][0].startswith("negative curvature")
    best = lowered(near, -torch.linalg.solve(dense + near * torch.eye(len(g), dtype=g.dtype), g))
    assert 0 < few.gain[1][0] <= best * (1 + 1e-6) and many.gain[1][0] == pytest.approx(best, rel=1e-3)
    assert many.status[1][0].startswith("near negative curvature") and many.status[2][0] == "ok"
    with pytest.raises(InvalidInput, match=f"every block: {near:.10g}, {safe:.10g}. Choose damping {near:.10g}"):
        many.values(inside)
    assert many.values(near)[0] == many.gain[1][0]
    with pytest.raises(InvalidInput, match="none in this record. Score again with a larger damping"):
        score(model, data, [block], "hessian", damping=inside, damping_unit="absolute", steps=60).values()


def test_last_linear_layer_has_equal_hessian_and_ggn():
    model, data = zoo.dense("mlp"), zoo.labelled("mlp")
    block = zoo.partition(model, "mlp")[-1]
    a, b = (score(model, data, [block], name, tolerance=1e-9, steps=40) for name in ("ggn", "hessian"))
    assert zoo.relative(a.gain, b.gain) < 1e-6


def test_products_restore_the_model_and_its_attention():
    model, data = zoo.dense("mistral").train(), zoo.labelled("mistral")
    block = zoo.partition(model, "mistral")[2]
    with pytest.raises(RuntimeError, match="stop"), BlockProducts(model, data, block, 2) as p:
        p.gradient()
        raise RuntimeError("stop")
    assert all(m.training and "forward" not in vars(m) for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    model.set_attn_implementation("sdpa")
    score(model, data, [block], "ggn", damping=[1.0])
    assert model.config._attn_implementation == "sdpa"


def test_mean_damping_is_refused_by_krylov_estimators():
    model, data, block = small("mlp")
    with pytest.raises(InvalidInput, match="trace"):
        score(model, data, [block], "ggn", damping_unit="mean")


@pytest.mark.parametrize("estimator", ("ggn", "hessian"))
def test_a_dead_block_has_no_gain_and_no_steps_are_refused(estimator):
    model, data = zoo.dense("mlp"), zoo.labelled("mlp")
    with torch.no_grad():
        model[4].weight.zero_()
    blocks = zoo.partition(model, "mlp")
    found = np.array(score(model, data, blocks, estimator).gain, dtype=float)
    assert (found[:, :2] == 0).all() and (found[:, 2] > 0).all()
    with pytest.raises(InvalidInput, match="steps is 0"):
        score(model, data, blocks, estimator, steps=0)
