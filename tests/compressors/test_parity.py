"""SparseGPT and the rules of the reference implementations against the plainest dense versions of what the papers say."""

from __future__ import annotations

import pytest
import torch
from tests import zoo
from tests.reference_pruning import (
    RunningMoments,
    magnitude_mask,
    prune_as_reference,
    reference_factor,
    sparsegpt_weights,
    threshold_inclusive,
    wanda_mask,
)

from layerbudget.compressors.base import Level
from layerbudget.compressors.pruners import Magnitude, Wanda
from layerbudget.compressors.sparsegpt import inverse_factor, sparsegpt_update
from layerbudget.errors import CurvatureFailure
from layerbudget.models.blocks import weight_of


def problem(rows=6, columns=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * columns, columns, generator=g) @ torch.randn(columns, columns, generator=g)
    return torch.randn(rows, columns, generator=g), x.T @ x


def plain_sparsegpt(weight, gram, extra, block):
    """Column by column, with the inverse of the trailing Hessian written out instead of a Cholesky factor.

    Half the entries of every block of columns go, and ``extra`` more.
    """
    h = gram.double().clone()
    h += 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    w = weight.double().clone()
    columns = w.shape[1]
    inverse = [torch.linalg.inv(h[i:, i:]) for i in range(columns)]
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        score = torch.stack([w[:, j] ** 2 / inverse[j][0, 0] for j in range(start, stop)], dim=1)
        threshold = score.flatten().sort().values[score.numel() // 2 + extra - 1]
        mask = score <= threshold
        for j in range(start, stop):
            error = w[:, j] * mask[:, j - start] / inverse[j][0, 0]
            w[:, j:] -= error[:, None] * inverse[j][0][None]
            w[mask[:, j - start], j] = 0
    return w


@pytest.mark.parametrize("block", [20, 7])
def test_sparsegpt_by_the_definition(block):
    weight, gram = problem()
    for result, extra in (
        (sparsegpt_update(weight, *inverse_factor(gram), 60, columns=block), 0),
        (sparsegpt_weights(weight, *reference_factor(gram), 0.5, block), 1),
    ):
        wanted = plain_sparsegpt(weight, gram, extra, block)
        torch.testing.assert_close(result.double(), wanted, rtol=2e-3, atol=2e-3)
        assert torch.equal(result == 0, wanted == 0)


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
    assert int((Magnitude().apply(weight, None, Level(zeros=2)) == 0).sum()) == 2
    assert [int(magnitude_mask(weight, ratio).sum()) for ratio in (0.0, 0.25)] == [3, 3]
    assert int(threshold_inclusive(weight, 0.125).sum()) == 3  # position 1 of -1, 1, 1, 2, 3, 4, 5, 6: both ones go
    for ratio, counts in ((0.3, [1, 1]), (0.0, [0, 0])):
        assert wanda_mask(weight.abs(), ratio).sum(1).tolist() == counts


def test_running_means_are_over_sequences_and_dead_inputs_go_whole():
    sequences = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    diagonal, gram = RunningMoments("diagonal"), RunningMoments("gram")
    for x in sequences:
        diagonal.add(x)
        gram.add(x)
    flat = sequences.reshape(-1, 8)
    torch.testing.assert_close(diagonal.value, flat.square().sum(0) / 3)
    torch.testing.assert_close(gram.value, 2 * flat.T @ flat / 3)
    gram.value[3], gram.value[:, 3] = 0, 0
    weights = sparsegpt_weights(torch.ones(4, 8), *reference_factor(gram.value), 0.0)
    assert bool((weights[:, 3] == 0).all())


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_counts_are_those_of_the_references(method):
    model = zoo.build("llama")
    plan = zoo.plan(model, spread=0.0)
    prune_as_reference(model, plan, zoo.tokens(), method)
    for name in (name for block in plan.blocks for name in block.modules):
        w = weight_of(model, name)[1]
        blocks = -(-w.shape[1] // 128)
        extra = {"magnitude": 1, "wanda": 0, "sparsegpt": blocks}[method]
        assert int((w == 0).sum()) == w.numel() // 2 + extra, name
