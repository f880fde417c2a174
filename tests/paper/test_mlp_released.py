"""The released MLP script: what it computes against dense solves, its seeds, and its other parts."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

from paper import mlp_both, mlp_parts, mlp_scores
from paper import mlp_released as script

pytest.importorskip("sklearn")

SMALL = dataclasses.replace(script.RELEASED, width=10, layers=3, epochs=3, rate=1e-2)


@pytest.fixture(scope="module")
def run():
    return script.one_seed(SMALL, 0, (1e-2, 1.0, 1e4))


def dense(model, batch, block):
    """Gradient and Hessian of a block."""
    sizes = [p.numel() for p in block]
    loss = mlp_scores.loss_of(model, batch)
    g = torch.cat([x.reshape(-1) for x in torch.autograd.grad(loss, block, create_graph=True)])
    h = torch.stack([torch.cat([x.reshape(-1) for x in torch.autograd.grad(v, block, retain_graph=True)]) for v in g])
    assert h.shape == (sum(sizes), sum(sizes))
    return g.detach(), h


def test_truncated_gain_is_the_dense_one_where_the_hessian_is_positive():
    model, batch, _, _ = script.trained(SMALL, 0)
    block = script.groups(model, SMALL)[-1]
    assert [tuple(p.shape) for p in block] == [(10, 10), (10,)]  # weights and biases
    g, h = dense(model, batch, block)
    truth = float(g @ torch.linalg.solve(h + 0.5 * torch.eye(len(h)), g))
    gain, square, how = mlp_scores.truncated_gain(mlp_scores.loss_of(model, batch), block, 0.5)
    assert how == "converged" and gain == pytest.approx(truth, rel=1e-4) and square == pytest.approx(float(g @ g), rel=1e-5)


def test_negative_curvature_keeps_the_steps_before_it():
    x = torch.tensor([1.0, 1.0], requires_grad=True)
    loss = 2 * x[0] ** 2 - x[1] ** 2  # H = diag(4, -2), g = (4, -2)
    gain, _, how = mlp_scores.truncated_gain(loss, [x], 0.0)
    assert how == "negative curvature" and gain > 0
    loss = -(x**2).sum()
    assert mlp_scores.truncated_gain(loss, [x], 0.0)[0] == 0.0  # the first direction is one: nothing is kept


def test_proxies_against_dense_ones(run):
    model, batch, _, _ = script.trained(SMALL, 0)
    few = (batch[0][:96], batch[1][:96])
    rows = mlp_scores.sample_gradients(model, few, script.groups(model, SMALL))
    values = []
    for r in rows:
        g = r.mean(0)
        fisher = r.T @ r / 96
        values.append(float(g @ torch.linalg.solve(fisher + 0.01 * torch.eye(len(g)), g)))
        assert mlp_scores.diagonal_gain(r, g, 1e-3) == pytest.approx(float((g**2 / (fisher.diag() + 1e-3)).sum()), rel=1e-5)
    assert run.proxies["layerif_style"][1.0] == pytest.approx(np.array(values) / sum(values), rel=1e-3)
    assert run.proxies["diag_fisher"][1.0] == pytest.approx(run.proxies["diag_fisher"][1e-2])  # its damping is fixed


def test_rank_correlations_without_ties_are_scipys(rng):
    x, y = rng.random(8), rng.random(8)
    assert mlp_scores.spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert mlp_scores.kendall(x, y) == pytest.approx(kendalltau(x, y).statistic)


def test_a_large_damping_ranks_by_the_gradient(run):
    assert mlp_scores.spearman(run.direct[1e4], run.proxies["grad_norm"][1e4]) == pytest.approx(1.0)
    again = script.one_seed(SMALL, 0, (1.0,))
    assert again.direct[1.0] == pytest.approx(run.direct[1.0], rel=1e-6) and again.accuracy == run.accuracy


def test_parts(run):
    rows = mlp_parts.agreement(run)
    assert len(rows) == 3 * (3 + 3) and all(0 <= r["integer"] <= 2 for r in rows)
    at = [r for r in mlp_parts.sensitivity(run) if (r["alpha"], r["beta"], r["gamma_scale"]) == (0.5, 1.0, 1.0)]
    assert at[0]["integer"] == 0.0 and at[0]["top3"] == 1.0  # the reference itself
    pruned = mlp_parts.pruning(run, targets=(0.5,))
    assert len(pruned) == 1 + 3 * 2
    for row in pruned:  # the budget counts biases, the zeros are weights
        assert row["sparsity"] == pytest.approx(0.5, abs=0.03)
    q = np.array([0.1, 0.2, 0.7])
    e = mlp_parts.allocation(q, mlp_parts.calibrated_gamma(q, 20.0))
    assert e.sum() == pytest.approx(20.0) and e[2] / e[1] == pytest.approx((0.7 * (20 + 3) - 1) / (0.2 * (20 + 3) - 1))


@pytest.mark.parametrize(("name", "change"), script.SWITCHES.items())
def test_every_switch_changes_something(name, change, run):
    other = script.one_seed(dataclasses.replace(SMALL, **change), 0, (1e-2,))
    same = other.direct[1e-2] is not None and np.allclose(other.direct[1e-2], run.direct[1e-2], rtol=1e-6)
    if name == "indefinite layers without a value":
        assert (other.direct[1e-2] is None) == (run.negative[1e-2] > 0)
    elif name == "the diagonal Fisher damped by tau":
        assert not np.allclose(other.proxies["diag_fisher"][1e-2], run.proxies["diag_fisher"][1e-2])
    else:
        assert not same


def test_within_counts_and_says_what_is_outside():
    tables = {str(t): {p: {m: list(v) for m, v in row.items()} for p, row in rows.items()}
              for t, rows in mlp_both.mlp_entries().items()}  # fmt: skip
    assert mlp_both.within(tables)["count"] == 30
    tables["2.0"]["grad_norm"]["spearman"] = [0.5, 0.0]
    tables["1.0"]["grad_norm"]["kendall"] = None
    found = mlp_both.within(tables)
    assert found["count"] == 28 and {(o["tau"], o["metric"]) for o in found["outside"]} == {(2.0, "spearman"), (1.0, "kendall")}


@pytest.mark.slow
def test_the_released_script_meets_the_published_tables():
    found = mlp_both.as_released()
    assert found["within"]["count"] >= 26  # 28 as measured; CPU generations differ in rounding
    assert found["closest"] == {"0.001": "layerif_style", "0.01": "layerif_style", "0.1": "layerif_style", "1.0": "grad_norm",
                                "2.0": "grad_norm"}  # fmt: skip
