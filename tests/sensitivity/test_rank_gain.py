"""The gain resolved by rank: against autograd and a dense solve, and against a search over updates of that rank."""

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.errors import CoverageError, InfeasibleBudget, InvalidInput
from layerbudget.execution import loss as L
from layerbudget.models.blocks import is_conv1d, partition, weight_of
from layerbudget.reporting.explain import explain_plan
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.rank_gain import damping_scale

NAMES = ("mlp", "mistral", "gpt2", "bert")


def plain_gradient(model, data, name):
    """Gradient of the mean loss by autograd alone, one sequence at a time."""
    owner, weight = weight_of(model, name)
    total = 0.0
    for batch in L.batches(model, data, 1):
        total = total + torch.autograd.grad(L.summed_loss(L.logits_of(model, batch), batch.targets), weight)[0]
    gradient = total / L.token_count(model, data)
    return gradient.T if is_conv1d(owner) else gradient


def factors(model, data, blocks):
    """Sums of every matrix's factors, by name."""
    return zoo.factors(model, data, blocks, tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_together_are_the_gain_under_the_damped_factors(name):
    """``sum_i sigma_i^2 = g'((A + aI) (x) (S + sI))^-1 g``, by a dense Kronecker solve."""
    model, data = zoo.dense(name), zoo.labelled(name)
    blocks = partition(model, "linear")
    scores = score(model, data, blocks, "rank-gain", damping=[0.1, 2.0], batch_size=4)
    keys = [batch.keys[0] for batch in L.batches(model, data, 1)]
    few = factors(model, data.select([int(np.argmin(keys))]), blocks)  # a quarter of six sequences
    a = np.median([float(f.a.trace()) / len(f.a) for f in few.values()])
    s = np.median([float(f.g.trace()) / len(f.g) for f in few.values()])
    assert damping_scale(model, data, blocks) == pytest.approx((a, s), rel=1e-9)
    for row, damping in enumerate((0.1, 2.0)):
        block = blocks[0].modules[0].name
        found = factors(model, data, blocks[:1])[block]
        left = found.g + damping * s * torch.eye(len(found.g))
        right = found.a + damping * a * torch.eye(len(found.a))
        g = plain_gradient(model, data, block).double().reshape(-1)
        dense = float(g @ torch.linalg.solve(torch.kron(left, right), g))
        assert scores.gain[row][0] == pytest.approx(dense, rel=1e-6)
        assert sum(scores.extra["increments"][row][0]) == pytest.approx(dense, rel=1e-6)


def test_no_update_of_that_rank_lowers_the_quadratic_model_more():
    """Alternating exact minimisation over B and A from many starts reaches ``-zeta^2(r)/2`` and never goes below."""
    model, data = zoo.dense("mlp"), zoo.labelled("mlp")
    block = partition(model, "linear")[:1]
    scores = score(model, data, block, "rank-gain", damping=[0.3])
    name = block[0].modules[0].name
    found, (a, s) = factors(model, data, block)[name], damping_scale(model, data, block)
    right, left = found.a + 0.3 * a * torch.eye(len(found.a)), found.g + 0.3 * s * torch.eye(len(found.g))
    g = plain_gradient(model, data, name).double()
    torch.manual_seed(0)
    for rank in (1, 2, 3):
        reached = []
        for _ in range(6):
            down = torch.randn(rank, g.shape[1], dtype=torch.float64)
            for _ in range(200):
                up = -torch.linalg.solve(left, g @ down.T) @ torch.linalg.inv(down @ right @ down.T)
                down = -torch.linalg.solve(up.T @ left @ up, up.T @ g) @ torch.linalg.inv(right)
            update = up @ down
            reached.append(float((g * update).sum() + 0.5 * torch.trace(left @ update @ right @ update.T)))
        best = -0.5 * sum(scores.extra["increments"][0][0][:rank])
        assert min(reached) == pytest.approx(best, rel=1e-6)
        assert min(reached) >= best * (1 + 1e-9)


def test_halves_measure_the_noise():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral", samples=6)
    blocks = partition(model, "linear")[:2]
    scores, (a, s) = score(model, data, blocks, "rank-gain"), damping_scale(model, data, blocks)
    parts = [data.select([0, 2, 4]), data.select([1, 3, 5])]
    counts = [L.token_count(model, p) for p in parts]
    held = factors(model, data, blocks)
    for k, name in enumerate(b.modules[0].name for b in blocks):
        found = held[name]
        even, odd = (plain_gradient(model, p, name) * n / sum(counts) for p, n in zip(parts, counts, strict=True))
        left, right = found.g + s * torch.eye(len(found.g)), found.a + a * torch.eye(len(found.a))
        difference = (even - odd).double()
        expected = float((difference * (torch.linalg.solve(left, difference) @ torch.linalg.inv(right))).sum())
        assert scores.noise_floor[0][k] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("walk", ["whole", "layers"])
def test_the_scores_hold_the_mean_loss(walk):
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    scores = score(model, data, partition(model, "linear")[:2], "rank-gain", walk=walk)
    mean = sum(L.summed_loss(L.logits_of(model, b), b.targets).item() for b in L.batches(model, data, 1))
    assert scores.extra["loss"] == pytest.approx(mean / L.token_count(model, data), rel=1e-5)


def test_a_plan_by_rank_spends_the_budget_where_further_ranks_pay():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks = partition(model, "linear", exclude="lm_head")
    scores = score(model, data, blocks, "rank-gain")
    plan = plan_ranks(scores, mean_rank=3, rule="by-rank")
    control = plan_ranks(scores, mean_rank=3, rule="by-rank-permuted", seed=3)
    cost = np.array([sum(m.d_in + m.d_out for m in b.modules) for b in blocks])
    worth = [np.concatenate([[0.0], np.cumsum(r)]) for r in scores.extra["increments"][0]]

    def gained(p):
        return sum(w[b.count] for w, b in zip(worth, p.blocks, strict=True))

    assert plan.budget["spent"] == cost @ plan.counts <= 3 * cost.sum()
    assert plan.payload.rounding["gap"] < 1e-3
    assert gained(plan) == pytest.approx(plan.payload.rounding["value"])
    assert gained(plan) > max(gained(control), gained(plan_ranks(scores, mean_rank=3, rule="uniform")))
    assert any("bought in the order of gain" in s for s in explain_plan(plan)["sentences"])
    assert plan_ranks(scores, mean_rank=3, rule="by-rank", max_rank=4).counts.max() <= 4
    for wrong, said in (({"exponent": 2.0}, "exponent"), ({"utility": "power"}, "utility"), ({"damping": 9.0}, "no damping")):
        with pytest.raises(InvalidInput, match=said):
            plan_ranks(scores, mean_rank=3, rule="by-rank", **wrong)
    short = score(model, data, blocks, "rank-gain", largest=4)
    assert plan_ranks(short, mean_rank=3, rule="by-rank", max_rank=4).counts.max() == 4
    assert plan_ranks(short, mean_rank=3, rule="by-rank").counts.max() == 4
    with pytest.raises(InfeasibleBudget, match="largest 8"):
        plan_ranks(short, mean_rank=5, rule="by-rank")
    with pytest.raises(InvalidInput, match="rank-gain --by linear"):
        plan_ranks(score(model, data, blocks, "gradient-norm"), mean_rank=3, rule="by-rank")


def test_what_no_adapter_fits_and_impossible_options_are_refused():
    model, data = zoo.dense("mixtral"), zoo.labelled("mixtral")
    with pytest.raises(CoverageError, match="experts"):
        score(model, data, zoo.partition(model, "mixtral"), "rank-gain")
    dense = zoo.dense("mistral")
    for wrong in ({"curvature": "none"}, {"largest": 0}):
        with pytest.raises(InvalidInput):
            score(dense, data, partition(dense, "linear"), "rank-gain", **wrong)
    with pytest.raises(InvalidInput, match="two sequences"):
        score(dense, data.select([0]), partition(dense, "linear"), "rank-gain")
