"""A plan made again keeps what the user asked for: budget and its unit, floors, caps, multiples, fixed blocks, exponents."""

import dataclasses

import numpy as np
import pytest
from tests import zoo

from layerbudget.decisions.experts.plan import plan_experts
from layerbudget.decisions.joint.plan import plan_joint, split_joint
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InfeasibleBudget, InvalidInput, ModelMismatch
from layerbudget.models.loading import blocks_from_config
from layerbudget.planning.capacity import smallest_sides
from layerbudget.planning.costs import rank_parameters
from layerbudget.plans.again import plan_again
from layerbudget.scores import Scores

CONFIG = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
BUDGETS = {"ranks": ("params", "bytes", "flops"), "experts": ("experts", "params", "bytes", "flops")}


def scored(rng, by="layer"):
    blocks = blocks_from_config(CONFIG, by=by)
    values = rng.random(len(blocks)) ** 3 + 1e-3
    return Scores.from_values(blocks, {b.name: float(v) for b, v in zip(blocks, values, strict=True)})


def test_the_constraints_of_the_issue():
    """Re-planned ranks were [4, 8, 13, 39]: no cap, no multiple, nothing fixed."""
    first = plan_ranks(zoo.scores([30, 30, 6.5, 6.5]), mean_rank=16, multiple=8, max_rank=24, fixed={"model.layers.3": 8})
    again = plan_again(first, zoo.scores([1, 2, 30, 90]))
    assert again.counts[3] == 8 and again.counts.max() <= 24 and not (again.counts % 8).any()
    assert again.budget["unit"] == first.budget["unit"] and again.budget["limit"] == first.budget["limit"]


def test_unchanged_scores_change_nothing():
    """Experts moved from [8, 6, 4, 2] to [9, 6, 4, 1] under the same gains."""
    scores = zoo.scores([9.0, 5.0, 2.0, 0.5])
    plan = plan_experts(scores, total=20, exponent=0.7, min_experts=1)
    assert plan_again(plan, scores).counts.tolist() == plan.counts.tolist()


def random_plan(rng, kind, scores):
    k = len(scores.blocks)
    fixed = {scores.names[int(rng.integers(k))]: int(rng.integers(1, 4)) * 2} if rng.random() < 0.4 else None
    options = {"exponent": float(rng.choice([0.5, 1.0, 2.0])), "exponent_on": str(rng.choice(["density", "block"]))}
    options |= {"spend": str(rng.choice(["exactly", "at_most"])), "method": str(rng.choice(["auto", "floor"]))}
    options |= {"utility": str(rng.choice(["log", "power"])), "smoothing": float(rng.choice([0.0, 0.3])), "fixed": fixed}
    if kind == "ranks":
        multiple = int(rng.choice([1, 2]))
        bounds = {"multiple": multiple, "min_rank": int(rng.integers(0, 3)), "max_rank": int(rng.integers(10, 30))}
        budget = {"mean_rank": float(rng.uniform(4, 9))} if rng.random() < 0.3 else {"budget": None}
    else:
        bounds = {"min_experts": int(rng.integers(1, 3)), "max_experts": int(rng.integers(9, 20)), "expert_rank": 4}
        budget = {"total": int(rng.integers(5 * k, 8 * k))} if rng.random() < 0.3 else {"budget": None}
    if "budget" in budget:
        unit = str(rng.choice(BUDGETS[kind]))
        trial = plan_ranks(scores, mean_rank=6.5) if kind == "ranks" else plan_experts(scores, total=6 * k, expert_rank=4)
        params = float(rank_parameters(scores.blocks) @ trial.counts) * (1 if kind == "ranks" else 4)
        amount = {"params": params, "bytes": 2 * params, "flops": 2 * params, "experts": 6 * k}[unit]
        budget = {"budget": f"{amount * rng.uniform(0.9, 1.3):.0f} {unit}"}
    maker = plan_ranks if kind == "ranks" else plan_experts
    return maker(scores, **budget, **bounds, **options), {**bounds, **options}


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ranks", "experts"])
def test_random_plans_made_again(kind, count):
    rng, made = np.random.default_rng(3), 0
    while made < count:
        scores = scored(rng)
        try:
            plan, asked = random_plan(rng, kind, scores)
        except InfeasibleBudget:
            continue
        made += 1
        assert plan_again(plan, scores).counts.tolist() == plan.counts.tolist()
        again = plan_again(plan, scored(rng))
        assert again.budget["spent"] <= plan.budget["limit"] * (1 + 1e-12) and again.budget["unit"] == plan.budget["unit"]
        fixed = {**(asked["fixed"] or {})}
        free = np.array([n not in fixed for n in plan.names])
        low = asked["min_rank"] if kind == "ranks" else asked["min_experts"]
        high = asked["max_rank"] if kind == "ranks" else asked["max_experts"]
        assert (again.counts[free] >= low).all() and (again.counts[free] <= high).all()
        assert not (again.counts[free] % asked.get("multiple", 1)).any()
        assert all(again.counts[plan.names.index(n)] == c for n, c in fixed.items())
        for name in ("exponent", "exponent_on", "utility", "spend", "method", "smoothing"):
            assert again.hyperparameters[name] == plan.hyperparameters[name] == asked[name]


def test_floors_come_on_top():
    plan = plan_ranks(zoo.scores([30, 30, 6.5, 6.5]), mean_rank=16, min_rank=2, max_rank=40)
    again = plan_again(plan, zoo.scores([1, 1, 1, 90]), lower=[0, 6, 0, 0])
    assert again.counts[1] >= 6 and again.counts.max() <= 40 and again.counts.min() >= 2


def test_refusals():
    plan = plan_ranks(zoo.scores([3, 2, 1]), mean_rank=4)
    with pytest.raises(ModelMismatch, match="not the same"):
        plan_again(plan, zoo.scores([3, 2, 1, 1]))
    with pytest.raises(InvalidInput, match="cannot be made again"):
        plan_again(plan_sparsity(zoo.scores([3, 2, 1]), sparsity=0.5), zoo.scores([3, 2, 1]))
    with pytest.raises(InfeasibleBudget):
        plan_again(plan, zoo.scores([3, 2, 1]), lower=50)


def test_a_damping_names_a_row_of_the_plans_own_scores():
    """A plan made with ``--damping`` died when it was made again from gains that training shows, which have one row."""
    blocks = zoo.scores([3, 2, 1]).blocks
    scores = Scores(blocks=blocks, gain=((3.0, 2.0, 1.0), (1.0, 2.0, 3.0)), damping=(0.1, 1.0), estimator="test", unit="x")
    plan = plan_ranks(scores, mean_rank=4, damping=0.1)
    again = plan_again(plan, zoo.scores([1, 1, 9]))
    assert again.counts.argmax() == 2 and again.budget["limit"] == plan.budget["limit"]
    assert plan_again(plan, scores).hyperparameters["damping"] == 0.1
    with pytest.raises(InvalidInput, match="no damping 0.1"):
        plan_again(plan, Scores(blocks=blocks, gain=((3.0, 2.0, 1.0),) * 2, damping=(1.0, 2.0), estimator="test", unit="x"))


def test_what_the_caps_cannot_take_is_left():
    """The block of no rank pinned, the others at their caps, all to be spent: nothing was feasible, not the plan itself."""
    plan = plan_ranks(zoo.scores([9, 9, 1]), budget=f"{8.4 * 128} params", max_rank=4, min_rank=0)
    assert plan.counts.tolist() == [4, 4, 0] and plan.hyperparameters["spend"] == "exactly"
    again = plan_again(plan, zoo.scores([1, 9, 1]), fixed={"model.layers.2": 0})
    assert again.counts.tolist() == [4, 4, 0] and again.budget["limit"] == plan.budget["limit"]
    assert plan_again(plan, zoo.scores([1, 9, 1]), fixed={"model.layers.0": 2}).counts.tolist() == [2, 4, 2]


def test_a_plan_made_by_hand_keeps_what_its_counts_cost():
    plan = plan_ranks(zoo.scores([3, 2, 1]), mean_rank=4)
    bare = dataclasses.replace(plan, hyperparameters={}, budget={"unit": "hand"})
    again = plan_again(bare, zoo.scores([1, 2, 9]))
    assert again.budget["unit"] == "params" and again.counts.min() >= 1
    assert again.budget["spent"] <= float(rank_parameters(zoo.scores([3, 2, 1]).blocks) @ plan.counts)


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_joint_plans(count):
    rng, made, refused = np.random.default_rng(4), 0, 0
    while made < count:
        scores = scored(rng, str(rng.choice(["layer", "linear"])))
        sides, capacity = smallest_sides(scores.blocks), str(rng.choice(["ranks", "experts"]))
        most = {"max_capacity": int(rng.integers(4, 40))} if rng.random() < 0.5 else {}
        least = {"min_capacity": int(rng.integers(0, 3))}
        size = float(scores.numel.sum()) * 2
        try:
            plan = plan_joint(
                scores, budget=f"{rng.uniform(-0.6, 0.7) * size:.0f} bytes", capacity=capacity, max_sparsity=0.7, **most,
                **least, spend=str(rng.choice(["exactly", "at_most"])), exponent=float(rng.choice([0.5, 1.0, 2.0])),
            )  # fmt: skip
        except InfeasibleBudget:
            refused += 1
            assert refused < 20 * count
            continue
        made += 1
        counts = np.array(list(plan.extra["capacity"]["counts"].values()))
        assert plan.budget["spent"] <= plan.budget["limit"] + 1e-6
        assert (counts >= least["min_capacity"]).all() and (counts <= most.get("max_capacity", np.inf)).all()
        assert capacity == "experts" or (counts <= sides).all()
        pruned, added = split_joint(plan)
        assert (pruned.counts <= np.floor(0.7 * scores.numel)).all() and added.counts.tolist() == counts.tolist()
        assert plan_again(added, scores).counts.tolist() == added.counts.tolist()
        values = dict(zip(scores.names, (rng.random(len(scores.blocks)) ** 3 + 1e-3).tolist(), strict=True))
        again = plan_again(added, Scores.from_values(scores.blocks, values))
        assert (again.counts >= least["min_capacity"]).all() and again.budget["spent"] <= added.budget["limit"]
        assert (again.counts <= most.get("max_capacity", np.inf)).all() and (
            capacity == "experts" or (again.counts <= sides).all()
        )


def test_ranks_of_a_joint_plan_fit_their_matrices():
    """Four blocks of 64 x 64 had rank 361."""
    with pytest.raises(InfeasibleBudget):
        plan_joint(zoo.scores([30, 30, 6.5, 6.5]), budget="200 KB")
    plan = plan_joint(zoo.scores([30, 30, 6.5, 6.5]), budget="200 KB", spend="at_most")
    assert max(plan.extra["capacity"]["counts"].values()) <= 64
    with pytest.raises(InvalidInput, match="Experts have one"):
        plan_joint(zoo.scores([3, 2]), budget="1 KB", expert_rank=4)


def test_ranks_above_a_side_are_refused():
    with pytest.raises((InvalidInput, InfeasibleBudget)):
        plan_ranks(zoo.scores([3, 2]), mean_rank=65)
    with pytest.raises((InvalidInput, InfeasibleBudget)):
        plan_ranks(zoo.scores([3, 2]), mean_rank=8, fixed={"model.layers.0": 65})
