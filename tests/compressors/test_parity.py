"""SparseGPT and the parity rules against the plainest dense versions of what the papers and BASELINES say."""

from __future__ import annotations

import pytest
import torch
from tests import zoo

from layerbudget.compressors.base import Level
from layerbudget.compressors.pruners import Magnitude, Wanda
from layerbudget.compressors.sparsegpt import inverse_factor, reference_factor, sparsegpt_update
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.errors import CurvatureFailure
from layerbudget.models.blocks import weight_of


def problem(rows=6, columns=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * columns, columns, generator=g) @ torch.randn(columns, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x


def plain_sparsegpt(weight, gram, ratio, block):
    """Column by column, with the inverse of the trailing Hessian written out instead of a Cholesky factor."""
    h = gram.double().clone()
    h += 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    w = weight.double().clone()
    columns = w.shape[1]
    inverse = [torch.linalg.inv(h[i:, i:]) for i in range(columns)]
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        score = torch.stack([w[:, j] ** 2 / inverse[j][0, 0] for j in range(start, stop)], dim=1)
        threshold = score.flatten().sort().values[int(score.numel() * ratio)]
        mask = score <= threshold
        for j in range(start, stop):
            error = w[:, j] * mask[:, j - start] / inverse[j][0, 0]
            w[:, j:] -= error[:, None] * inverse[j][0][None]
            w[mask[:, j - start], j] = 0
    return w


@pytest.mark.parametrize("block", [20, 7])
def test_sparsegpt_by_the_definition(block):
    weight, gram = problem()
    wanted = plain_sparsegpt(weight, gram, 0.5, block)
    for factor in (inverse_factor, reference_factor):
        found = sparsegpt_update(weight, *factor(gram), 0, ratio=0.5, columns=block)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)
        assert torch.equal(found == 0, wanted == 0)


def test_factor_reads_the_upper_triangle_only_and_inverts():
    _, gram = problem()
    upper, dead = inverse_factor(gram.triu())
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram))
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(len(gram)), rtol=1e-3, atol=1e-3)
    assert torch.equal(upper, upper.triu()) and not dead.any()
    torch.testing.assert_close(upper, reference_factor(gram)[0], rtol=1e-3, atol=1e-3)


def test_dead_inputs_go_first_and_the_count_stays_exact():
    weight, gram = problem()
    gram[3], gram[:, 3] = 0, 0
    found = sparsegpt_update(weight, *inverse_factor(gram), 30)
    assert bool((found[:, 3] == 0).all()) and int((found == 0).sum()) == 30
    few = sparsegpt_update(weight, *inverse_factor(gram), 2)
    assert int((few == 0).sum()) == 2 and int((few[:, 3] == 0).sum()) == 2


def test_compensation_beats_masking_and_hopeless_moments_are_refused():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 40, generator=g) + torch.randn(200, 1, generator=g)
    weight, gram = torch.randn(16, 40, generator=g), x.T @ x
    found = sparsegpt_update(weight, *inverse_factor(gram), 320)
    masked = Wanda().apply(weight, gram.diagonal(), Level(zeros=320))
    error = [float(((w - weight) @ gram * (w - weight)).sum()) for w in (found, masked)]
    assert error[0] < error[1]
    with pytest.raises(CurvatureFailure, match="positive definite"):
        inverse_factor(-gram)


def test_reference_rules_are_off_by_one_and_take_ties():
    weight = torch.tensor([[1.0, -1.0, 2.0, 3.0], [1.0, 4.0, 5.0, 6.0]])
    for level, count in ((Level(zeros=2), 2), (Level(zeros=2, ratio=0.25), 3), (Level(ratio=0.0), 3)):
        assert int((Magnitude().apply(weight, None, level) == 0).sum()) == count
    for ratio, counts in ((0.3, [1, 1]), (0.0, [0, 0])):
        assert (Wanda().apply(weight, torch.ones(4), Level(ratio=ratio)) == 0).sum(1).tolist() == counts


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_parity_mode_counts_as_the_references_do(method):
    model = zoo.build("llama")
    plan = zoo.plan(model, spread=0.0)
    receipt = prune(model, plan, zoo.tokens(), method, parity=True)
    for name, record in receipt.modules.items():
        w = weight_of(model, name)[1]
        blocks = -(-w.shape[1] // 128)
        extra = {"magnitude": 1, "wanda": 0, "sparsegpt": blocks}[method]
        assert record["zeros"] == w.numel() // 2 + extra, name
