"""Plans in the user's unit: within the budget, whole numbers, comparable, explained."""

import functools
import json
import re
import shlex

import numpy as np
import pytest
import torch
from tests import zoo
from tests.cli.helpers import command_result

import layerbudget as lb
from layerbudget.budget import rank_parameters, unit_cost
from layerbudget.decision import decision_of
from layerbudget.decisions.capacity import smallest_sides
from layerbudget.decisions.joint.plan import plan_joint, split_joint
from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.rules import rules_of
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput, ModelMismatch, UnknownUnit
from layerbudget.models.loading import blocks_from_config
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.sweep import diff_plans, sweep, transfer_scores
from layerbudget.scores import Scores
from layerbudget.solvers import published

MISTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8}  # fmt: skip


@pytest.fixture
def mistral(rng):
    blocks = blocks_from_config(MISTRAL)
    return Scores.from_values(blocks, {b.name: float(v) for b, v in zip(blocks, rng.random(32) + 0.2, strict=True)})


@pytest.fixture
def matrices(rng):
    blocks = blocks_from_config({**MISTRAL, "num_hidden_layers": 8}, by="linear")
    return Scores.from_values(blocks, {b.name: float(v) for b, v in zip(blocks, rng.random(56) + 0.1, strict=True)})


@pytest.mark.parametrize("rule", rules_of("lora-experts"))
def test_every_rule_spends_160_experts(rule, mistral):
    plan = plan_lora_experts(mistral, total=160, rule=rule)
    assert plan.counts.sum() == 160 == plan.budget["spent"] and plan.counts.min() >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "64M params"},
        {"budget": "250 MiB"},
        {"budget": "1.5% flops"},
        {"budget": "1% params"},
    ],
)
def test_experts_in_the_users_unit_never_exceed_it(options, mistral):
    plan = plan_lora_experts(mistral, **options)
    cost = unit_cost(mistral.blocks, plan.budget["unit"], capacity="lora-experts")
    assert cost @ plan.counts == pytest.approx(plan.budget["spent"]) and plan.budget["spent"] <= plan.budget["limit"]
    assert plan.budget["limit"] - plan.budget["spent"] < cost.min()
    for rule in ("uniform", "layerif", "mola-2468"):
        other = plan_lora_experts(mistral, rule=rule, **options)
        assert other.counts.sum() == plan.counts.sum() and other.budget["spent"] <= plan.budget["limit"]


def test_bounds_that_leave_a_block_nothing_are_named_before_the_budget():
    """A budget was advised that the same bounds refused then, and a fixed rank was called a floor above a cap of zero."""
    scores = zoo.scores([3.0, 2.0])
    name, ranks = scores.blocks[1].name, functools.partial(plan_ranks, scores, mean_rank=4)
    for plan, options, said in (
        (ranks, {"min_rank": 5, "max_rank": 3}, "needs at least 5 and may have at most 3. Lower min_rank, or raise max_rank."),
        (
            ranks,
            {"multiple": 4, "fixed": {name: 3}},
            f"{name} is fixed at 3, which is no multiple of 4. .*Fix a multiple of 4.",
        ),
        (ranks, {"multiple": 4, "min_rank": 5, "max_rank": 7}, "may have 5 to 7, and no multiple of 4 lies there"),
        (
            functools.partial(plan_lora_experts, scores, total=8),
            {"min_experts": 4, "max_experts": 2},
            "needs at least 4 and may have at most 2. Lower min_experts or lower, or raise max_experts",
        ),
    ):
        with pytest.raises(InfeasibleBudget, match=said):
            plan(**options)


def test_seconds_that_add_up_to_the_last_digit_above_a_budget_are_within_it():
    blocks = zoo.scores(np.arange(1.0, 22.0))
    plan = lb.plan_ranks(blocks, budget="1 ms", latency={b.name: 1e-5 for b in blocks.blocks})
    assert plan.budget["spent"] <= plan.budget["limit"] == pytest.approx(float(plan.counts.sum() * 1e-5))


def test_latency_caps_and_fixed_blocks(mistral):
    seconds = {b.name: 1e-5 * (1 + i % 3) for i, b in enumerate(mistral.blocks)}
    plan = plan_lora_experts(
        mistral, budget="2 ms", latency=seconds, max_experts=6, fixed={"model.layers.0": 2, r"layers\.31$": 0}
    )
    assert plan.counts[0] == 2 and plan.counts[31] == 0 and plan.counts.max() <= 6
    assert plan.budget["spent"] <= 2e-3 * (1 + 1e-12) and plan.payload.rounding["exact"]


@pytest.mark.parametrize(("multiple", "low"), [(1, 1), (8, 0), (8, 8), (4, 4)])
def test_ranks_meet_a_uniform_adapters_size(multiple, low, matrices):
    plan = plan_ranks(matrices, mean_rank=16, multiple=multiple, min_rank=low, max_rank=64)
    size = rank_parameters(matrices.blocks)
    assert plan.budget["spent"] == size @ plan.counts <= 16 * size.sum()
    assert 16 * size.sum() - size @ plan.counts < size.max() * multiple
    assert not (plan.counts % multiple).any() and plan.counts.min() >= low and plan.counts.max() <= 64
    assert set(plan_ranks(matrices, mean_rank=16, rule="uniform").counts.tolist()) == {16}


def test_a_rank_never_exceeds_the_smallest_side(rng):
    blocks = blocks_from_config({"hidden_size": 8, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2})
    scores = Scores.from_values(blocks, {b.name: float(v) for b, v in zip(blocks, (9.0, 1.0, 1.0), strict=True)})
    assert plan_ranks(scores, mean_rank=6).counts.max() <= 8
    with pytest.raises(InfeasibleBudget):
        plan_ranks(scores, mean_rank=9)


@pytest.mark.parametrize("held", [None, {"kind": "ranks", "bytes": 8.0}])
def test_a_damaged_joint_plan_is_refused_where_it_is_read(mistral, tmp_path, held):
    plan = plan_joint(mistral, budget="-2GiB")
    path = plan.save(tmp_path / "joint.json")
    assert Plan.load(path).payload == plan.payload
    record = json.loads(path.read_text())
    del record["extra"]["capacity"]
    record["extra"] |= {"capacity": held} if held else {}
    (tmp_path / "other.json").write_text(json.dumps(record))
    with pytest.raises(CorruptFile, match="extra of this plan does not read"):
        Plan.load(tmp_path / "other.json")


def test_joint_meets_the_net_bytes(mistral):
    plan = plan_joint(mistral, budget="-2GiB", min_capacity=4)
    prune, adapt = split_joint(plan)
    net = unit_cost(mistral.blocks, "bytes") @ adapt.counts - 2 * prune.counts.sum()
    assert net == pytest.approx(plan.budget["spent"]) and -(2**31) - 2e6 < net <= -(2**31)
    assert adapt.kind == "ranks" and adapt.counts.min() >= 4 and prune.kind == "sparsity"
    assert plan.certificate["gap"] <= 1e-9 and Plan.from_dict(plan.to_dict()).digest == plan.digest
    with pytest.raises(InvalidInput, match="layerbudget.split_joint gives the two plans"):
        lb.apply_plan(torch.nn.Linear(1, 1), plan)
    assert lb.split_joint(plan) == (prune, adapt)
    with pytest.raises(UnknownUnit):
        plan_joint(mistral, budget="3% flops")
    with pytest.raises(InfeasibleBudget):
        plan_joint(mistral, budget="-20GiB")


def test_a_joint_budget_that_the_caps_just_take_is_spent(mistral):
    """Not left over by the price of capacity."""
    most = float(unit_cost(mistral.blocks, "bytes").sum()) * 4
    plan = plan_joint(mistral, budget=most, max_capacity=4)
    assert set(plan.payload.capacity.counts.values()) == {4} and plan.budget["spent"] == most


def test_budgets_are_given_once(mistral):
    for options in ({}, {"total": 160, "budget": "3% flops"}):
        with pytest.raises(InvalidInput, match="exactly one"):
            plan_lora_experts(mistral, **options)
    with pytest.raises(UnknownUnit):
        plan_lora_experts(mistral, budget="5 apples")
    with pytest.raises(InfeasibleBudget):
        plan_lora_experts(mistral, total=31)


def test_diff_and_explain(mistral):
    first, second = plan_lora_experts(mistral, total=160), plan_lora_experts(mistral, total=160, rule="uniform")
    found = diff_plans(first, second)
    assert found["moved"] == np.abs(first.counts - second.counts).sum() / 2 and len(found["blocks"]) == 32
    with pytest.raises(ModelMismatch):
        diff_plans(first, plan_sparsity(mistral))
    text = " ".join(explain_plan(first)["sentences"])
    assert "160" in text and "proven optimal" in text and "cannot change" not in text, "nobody set anything"
    idle = explain_plan(plan_lora_experts(mistral, total=160, alpha=2.0))["sentences"]
    assert "These settings cannot change this plan: alpha." in idle
    assert "no certificate" in " ".join(explain_plan(second)["sentences"])


def test_one_percent_more_budget_buys_what_the_price_says(mistral):
    a, b = (plan_sparsity(mistral, sparsity=s) for s in (0.4, 0.404))
    price = a.certificate["shadow_price"]
    penalty = [
        p.certificate["primal"] + (p.certificate["shadow_price"] - p.certificate["multiplier"]) * p.budget["spent"]
        for p in (a, b)
    ]
    assert penalty[1] - penalty[0] == pytest.approx(price * (b.budget["limit"] - a.budget["limit"]), rel=0.02)
    text = " ".join(explain_plan(a)["sentences"])
    scaled = "where the weights of the blocks have the mean"
    said = re.search(rf"With one percent more zeros the penalty is about (\S+) higher, {scaled} 2\.", text)
    assert said and float(said[1]) == pytest.approx(penalty[1] - penalty[0], rel=0.02)
    more = " ".join(explain_plan(plan_lora_experts(mistral, total=160))["sentences"])
    assert re.search(rf"With one percent more budget the utility is about \S+ higher, {scaled} 0.9\.", more)


def test_a_plan_from_nearly_equal_scores_says_that_costs_decide_it(mistral):
    """Just below and above the threshold."""
    blocks, wave = mistral.blocks, np.where(np.arange(len(mistral.blocks)) % 2, 1.0, -1.0)
    for spread, flat in ((0.09, True), (0.11, False)):
        scores = Scores.from_values(blocks, 1.0 + spread * wave)
        plan = plan_ranks(scores, mean_rank=8)
        assert plan.payload.flat_scores == (pytest.approx(spread) if flat else None)
        assert ("this plan follows what ranks cost" in " ".join(decision_of(plan).describe(plan).advice)) == flat
        assert Plan.from_dict(plan.to_dict()) == plan


def test_a_uniform_plan_is_explained_in_a_word(mistral):
    sentences = explain_plan(plan_ranks(mistral, mean_rank=8, rule="uniform"))["sentences"]
    assert "Every block gets 8." in sentences and not any("Most goes to" in s for s in sentences)
    assert any("Most goes to" in s for s in explain_plan(plan_ranks(mistral, mean_rank=8))["sentences"])


def test_sweep_marks_the_front(mistral):
    found = sweep(mistral, kind="ranks", budgets=[4, 8], exponents=[0.5, 1.0, 3.0])
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        beaten = any(r["spent"] <= row["spent"] and r["value"] > row["value"] for r in found["rows"])
        assert row["front"] != beaten


def test_transfer_needs_the_same_blocks(mistral, matrices, rng):
    other = Scores.from_values(mistral.blocks, {n: float(v) for n, v in zip(mistral.names, rng.random(32) + 0.2, strict=True)})
    for program in ("sparsity", "lora-experts"):
        t = transfer_scores(mistral, other, program=program)
        assert 0 < t.regret <= t.sharp_bound <= t.bound and t.drift > 0
    with pytest.raises(ModelMismatch):
        transfer_scores(mistral, matrices)


@pytest.mark.parametrize("budget", ["512 ranks", "2M params", "3 MB", "4M flops"])
def test_uniform_ranks_are_uniform_and_size_ranks_grow_in_every_unit(budget, matrices):
    counts = plan_ranks(matrices, budget=budget, rule="uniform").counts
    assert counts.max() - counts.min() <= 1
    grown = plan_ranks(matrices, budget=budget, rule="size", min_rank=0)
    assert np.all(np.diff(grown.values[np.argsort(matrices.numel, kind="stable")]) >= -1e-9)


@pytest.mark.parametrize("rule", ["uniform", "size", "layerif", "alphalora", "mola-2468"])
def test_published_rules_keep_fixed_blocks_and_minima(rule, mistral):
    plan = plan_lora_experts(mistral, total=160, rule=rule, fixed={"model.layers.3": 20, "model.layers.5": 2})
    assert plan.counts[3] == 20 and plan.counts[5] == 2 and plan.counts.sum() == 160
    try:
        assert plan_lora_experts(mistral, total=160, rule=rule, min_experts=3).counts.min() >= 3
    except InfeasibleBudget as error:
        assert "minimum is 3" in str(error)


def test_a_published_rule_takes_the_exponent_that_was_asked_for(mistral):
    linear, usual = (plan_lora_experts(mistral, total=160, rule="alphalora", exponent=e).counts for e in (1.0, None))
    assert linear.tolist() == published.apportion(mistral.values(), 160).tolist() != usual.tolist()


@pytest.mark.parametrize("rule", ["mdl", "uniform"])
def test_a_budget_that_is_no_number_is_refused(rule, mistral):
    with pytest.raises(InvalidInput):
        plan_lora_experts(mistral, total=float("nan"), rule=rule)
    with pytest.raises(InvalidInput):
        plan_joint(mistral, budget="-1GB", capacity="rank")


def test_joint_with_every_capacity_at_its_cap_is_still_a_plan(matrices):
    for total in (-1e6, -1.5, 0.0, 100_001.0, 5e5):
        plan = plan_joint(matrices, budget=total, max_capacity=1, gamma=100.0, max_sparsity=0.9)
        assert plan.budget["spent"] <= total + 1e-6


def test_alphalora_takes_the_spectral_tail_as_it_is(mistral, rng):
    alpha = dict(zip(mistral.names, 2.0 + rng.random(32), strict=True))
    tail = Scores.from_values(mistral.blocks, alpha, orientation="redundancy")
    plan = plan_lora_experts(tail, total=160, rule="alphalora", min_experts=0)
    assert plan.counts.tolist() == published.alphalora_experts(list(alpha.values()), 160).tolist()
    assert np.all(np.diff(plan.counts[np.argsort(list(alpha.values()))]) >= -1)
    with pytest.raises(InvalidInput, match="spectral-tail"):
        published.alphalora_experts([-1.0, 2.0], 8)


def tiny(rng, by):
    """Scores of a model whose matrices are small."""
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    blocks = blocks_from_config(small, by=by)
    values = rng.random(len(blocks)) ** 3 + 1e-3
    return Scores.from_values(blocks, {b.name: float(v) for b, v in zip(blocks, values, strict=True)})


@pytest.mark.parametrize("count", [80, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_joint_plans(count):
    rng, made, refused = np.random.default_rng(4), 0, 0
    while made < count:
        scores = tiny(rng, str(rng.choice(["layer", "linear"])))
        sides, capacity = smallest_sides(scores.blocks), str(rng.choice(["ranks", "lora-experts"]))
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
        counts = np.array(list(plan.payload.capacity.counts.values()))
        assert plan.budget["spent"] <= plan.budget["limit"] + 1e-6
        assert (counts >= least["min_capacity"]).all() and (counts <= most.get("max_capacity", np.inf)).all()
        assert capacity == "lora-experts" or (counts <= sides).all()
        pruned, added = split_joint(plan)
        assert (pruned.counts <= np.floor(0.7 * scores.numel)).all() and added.counts.tolist() == counts.tolist()


def test_ranks_of_a_joint_plan_fit_their_matrices():
    """Four blocks of 64 x 64 had rank 361."""
    with pytest.raises(InfeasibleBudget):
        plan_joint(zoo.scores([30, 30, 6.5, 6.5]), budget="200 KB")
    plan = plan_joint(zoo.scores([30, 30, 6.5, 6.5]), budget="200 KB", spend="at_most")
    assert max(plan.payload.capacity.counts.values()) <= 64
    with pytest.raises(InvalidInput, match="Experts have one"):
        plan_joint(zoo.scores([3, 2]), budget="1 KB", expert_rank=4)


def test_ranks_above_a_side_are_refused():
    with pytest.raises((InvalidInput, InfeasibleBudget)):
        plan_ranks(zoo.scores([3, 2]), mean_rank=65)
    with pytest.raises((InvalidInput, InfeasibleBudget)):
        plan_ranks(zoo.scores([3, 2]), mean_rank=8, fixed={"model.layers.0": 65})
    with pytest.raises(InfeasibleBudget, match="Lower the budget to 512, or raise max_rank") as refused:
        plan_ranks(zoo.scores([3, 2]), mean_rank=4, max_rank=2)
    assert "at_most" not in refused.value.remedy, "that plan has the smallest rank everywhere"


@pytest.mark.parametrize("rank", [0, 65])
def test_experts_of_a_rank_that_no_matrix_can_have_are_refused(rank):
    scores, says = zoo.scores([3, 2]), f"expert_rank is {rank}. It is a whole number from 1 to 64.*Use expert_rank=8"
    with pytest.raises(InvalidInput, match=says):
        plan_lora_experts(scores, total=4, expert_rank=rank)
    with pytest.raises(InvalidInput, match=says):
        plan_joint(scores, budget="100 KB", capacity="lora-experts", expert_rank=rank)


@pytest.mark.parametrize("kind", ["ranks", "joint"])
def test_ranks_that_no_matrix_allows_are_refused_where_a_plan_is_read(kind):
    scores = zoo.scores([3, 2])
    plan = plan_ranks(scores, mean_rank=8) if kind == "ranks" else plan_joint(scores, budget="-1 kB")
    record = plan.to_dict()
    assert Plan.from_dict(record) == plan
    if kind == "ranks":
        record["blocks"][0]["count"] = 65
    else:
        record["extra"]["capacity"]["counts"]["model.layers.0"] = 65
    with pytest.raises(CorruptFile, match=r"layers\.0 has the rank 65 .* No rank of theirs is above 64"):
        Plan.from_dict(record)
    if kind == "joint":
        del record["extra"]["capacity"]["counts"]["model.layers.0"]
        with pytest.raises(CorruptFile, match=r"gives model\.layers\.0 no ranks"):
            Plan.from_dict(record)


def test_a_budget_below_the_floors_is_refused_with_commands_that_work(tmp_path, rng):
    """Both remedies are taken as they are printed; the smallest budget is the smallest."""
    gains = np.sort(rng.random((4, 12)))[:, ::-1]
    scores = zoo.scores([3.0, 2.0, 5.0, 1.0], [64, 64, 128, 256], extra={"increments": [gains.tolist()]})
    scores.save(tmp_path / "s.json")
    for kind, given in (
        ("ranks", ("--mean-rank", "0.5")), ("ranks", ("--budget", "300 params")), ("ranks", ("--budget", "600 bytes")),
        ("ranks", ("--mean-rank", "1", "--fix", "model.layers.0=3")), ("lora-experts", ("--total", "3")),
        ("ranks", ("--budget", "300 params", "--rule", "uniform")), ("ranks", ("--mean-rank", ".6", "--rule", "mdl")),
    ):  # fmt: skip
        words, rest = ["plan", kind, tmp_path / "s.json"], given[2:]
        with pytest.raises(InfeasibleBudget) as refused:
            command_result(*words, *given)
        least = shlex.split(re.search(r"The smallest budget is (--\S+ (?:'.*?'|\S+))\.( |$)", str(refused.value))[1])
        assert command_result(*words, *least, *rest)[0]["blocks"], "the smallest budget works"
        short = re.sub(r"[\d.]+", lambda m: f"{float(m[0]) - (0.01 if least[0] == '--mean-rank' else 1):g}", least[1])
        with pytest.raises(InfeasibleBudget):
            command_result(*words, least[0], short, *rest)
        free = re.search(r"(--\S+) (0)\.", str(refused.value)).groups()
        assert command_result(*words, *given, *free)[0]["budget"]["spent"] > 0
    with pytest.raises(InfeasibleBudget, match=r"600 parameters, and the smallest ranks .* take 768\.") as refused:
        command_result("plan", "ranks", tmp_path / "s.json", "--budget", "600")
    assert "--fix" not in str(refused.value)
    with pytest.raises(InfeasibleBudget, match="or fix less: the blocks of --fix alone take 1,152"):
        command_result("plan", "ranks", tmp_path / "s.json", "--budget", "600", "--fix", "model.layers.0=9")
