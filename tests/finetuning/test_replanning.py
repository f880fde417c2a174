"""Re-planning in the middle of training: what stays keeps its values and optimiser state, the function does not jump."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests import zoo

from layerbudget.decisions.experts.method import adapted_experts, add_experts
from layerbudget.decisions.experts.plan import plan_experts
from layerbudget.decisions.ranks.apply import adapted_ranks, add_ranks
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.errors import CoverageError, InfeasibleBudget, InvalidInput
from layerbudget.finetuning.tracking import Replan, replanned, resize, tracked_gains
from layerbudget.scores import Scores


def ids():
    return torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(2))


def trained(kind="ranks", steps=4):
    model = zoo.adaptable(2)
    if kind == "ranks":
        plan = zoo.linears(model, lambda n: 4 if "attn" in n else 0)
        adapted = add_ranks(model, plan)
    else:
        plan = zoo.layers(model, [3, 3])
        adapted = add_experts(model, plan, rank=2)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    step(adapted, optimizer, steps)
    return adapted, optimizer, plan


def step(model, optimizer, count=1):
    for _ in range(count):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def output(model):
    with torch.no_grad():
        return model(input_ids=ids()).logits


def test_growing_ranks_changes_nothing_and_then_trains(tmp_path):
    model, optimizer, plan = trained()
    name = "model.layers.0.self_attn.q_proj"
    module = model.get_submodule(f"base_model.model.{name}")
    before, a = output(model), module.lora_A["default"].weight.detach().clone()
    moment = optimizer.state[module.lora_A["default"].weight]["exp_avg"].clone()
    resize(model, optimizer, {name: 7})
    assert torch.allclose(output(model), before, atol=1e-6)
    new = module.lora_A["default"].weight
    assert torch.equal(new[:4], a) and new.shape[0] == 7
    assert torch.equal(optimizer.state[new]["exp_avg"][:4], moment) and not optimizer.state[new]["exp_avg"][4:].any()
    assert module.scaling["default"] == 2.0
    step(model, optimizer, 2)
    assert module.lora_B["default"].weight[:, 4:].abs().max() > 0
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(zoo.adaptable(2), tmp_path).eval()
    assert torch.equal(output(loaded), output(model)) and adapted_ranks(loaded)[name] == 7


def test_shrinking_keeps_the_strongest_ranks_and_their_state():
    model, optimizer, _ = trained()
    name = "model.layers.1.self_attn.v_proj"
    module = model.get_submodule(f"base_model.model.{name}")
    a, b = (getattr(module, f"lora_{x}")["default"].weight.detach().clone() for x in "AB")
    moment = optimizer.state[module.lora_B["default"].weight]["exp_avg_sq"].clone()
    kept = (a.norm(dim=1) * b.norm(dim=0)).topk(2).indices.sort().values
    resize(model, optimizer, {name: 2})
    assert torch.equal(module.lora_A["default"].weight, a[kept])
    assert torch.equal(module.lora_B["default"].weight, b[:, kept])
    assert torch.equal(optimizer.state[module.lora_B["default"].weight]["exp_avg_sq"], moment[:, kept])
    step(model, optimizer)


def test_experts_grow_and_shrink_with_their_routers(tmp_path):
    model, optimizer, plan = trained("experts")
    counts = {m: (2 if i == 0 else 5) for i, b in enumerate(plan.blocks) for m in b.modules}
    resize(model, optimizer, counts)
    assert adapted_experts(model) == counts
    step(model, optimizer, 2)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(PeftModel.from_pretrained(zoo.adaptable(2), tmp_path).eval()), output(model))
    with pytest.raises(InvalidInput, match="keeps its router"):
        resize(model, optimizer, {plan.blocks[0].modules[0]: 1})


def test_tracked_gain_is_the_diagonal_formula_and_refuses_what_has_no_state():
    model, optimizer, _ = trained(steps=1)
    gains = tracked_gains(model, optimizer, damping=0.5)
    # after one step m equals the gradient and v its square, so that the sum runs over g^2 / (g^2 + tau)
    fresh = add_ranks(zoo.adaptable(2), zoo.linears(zoo.adaptable(2), lambda n: 4 if "attn" in n else 0))
    torch.manual_seed(0)
    squares = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            squares[name] = optimizer.state[parameter]["exp_avg"].square() / (0.1**2)
    tau = 0.5 * sum(s.sum() for s in squares.values()) / sum(s.numel() for s in squares.values())
    for module, (gain, floor) in gains.items():
        assert floor > 0
        own = [s for n, s in squares.items() if f".{module}." in n]
        assert gain == pytest.approx(sum((s / (s + tau)).sum().item() for s in own), rel=1e-3)
    with pytest.raises(CoverageError, match="running moments of model.layers.0"):
        tracked_gains(fresh, torch.optim.AdamW(fresh.parameters()))
    with pytest.raises(CoverageError, match="no adapter"):
        resize(model, optimizer, {"model.layers.0.mlp.up_proj": 2})


def test_replanning_keeps_the_budget_and_follows_the_gain():
    model, optimizer, plan = trained()
    names = [b.name for b in plan.blocks if b.count]
    shapes = {n: (m.in_features, m.out_features) for n, m in zoo.adaptable(2).named_modules() if n in names}
    gains = {n: (11.0, 1.0) if n.endswith("v_proj") else (2.0, 1.0) for n in names}
    new = replanned(plan, gains, shapes)
    budget = sum(4 * sum(shapes[n]) for n in names)
    spent = sum(r * sum(shapes[n]) for n, r in new.items())
    assert budget - max(map(sum, shapes.values())) < spent <= budget
    assert min(new[n] for n in names if n.endswith("v_proj")) > max(new[n] for n in names if n.endswith("q_proj"))
    assert min(new.values()) >= 1


def test_the_callback_replans_once_inside_the_trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = zoo.adaptable(2)
    plan = zoo.linears(model, lambda n: 4 if "attn" in n else 0)
    adapted = add_ranks(model, plan)
    callback = Replan(plan, fraction=0.4)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids()]
    trainer = Trainer(model=adapted, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert callback.counts == adapted_ranks(adapted)
    assert len(set(callback.counts.values())) > 1
    with pytest.raises(InvalidInput, match="strictly between"):
        Replan(plan, fraction=1.0)


def test_replanning_experts_leaves_a_block_with_one_expert_alone():
    model = zoo.adaptable(2)
    plan = zoo.layers(model, [1, 5])
    adapted = add_experts(model, plan, rank=2)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    step(adapted, optimizer, 2)
    first, second = (list(b.modules) for b in plan.blocks)
    gains = dict.fromkeys(first, (100.0, 0.0)) | dict.fromkeys(second, (1.0, 0.0))
    shapes = dict.fromkeys(gains, (16, 16))
    new = replanned(plan, gains, shapes, 2)
    assert {new[m] for m in first} == {1} and {new[m] for m in second} == {5}
    resize(adapted, optimizer, new)
    assert replanned(plan, dict.fromkeys(gains, (0.0, 0.0)), shapes, 2) == new
    assert replanned(plan, dict.fromkeys(gains, (float("nan"), 0.0)), shapes, 2) == new


def test_the_largest_rank_of_the_configuration_follows():
    model, optimizer, plan = trained()
    names = [b.name for b in plan.blocks if b.count]
    resize(model, optimizer, {n: 9 if i == 0 else 2 for i, n in enumerate(names)})
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (9, 18.0)
    assert adapted_ranks(model)[names[0]] == 9


def random_plan(rng):
    """Under any terms that a user may give; raises where they cannot be met."""
    k, cap, share = int(rng.integers(2, 8)), int(rng.integers(2, 12)), float(rng.uniform(0.1, 0.999))
    rows, sizes = rng.random((3, k)) ** 3 + 1e-3, [int(d) for d in rng.choice([32, 64, 96], k)]
    scores = Scores(
        blocks=zoo.scores(rows[0].tolist(), sizes).blocks, gain=rows.tolist(), damping=(0.1, 1.0, 10.0), estimator="e", unit="x"
    )
    kind, rules = ("ranks", ("mdl", "uniform")) if rng.random() < 0.6 else ("experts", ("mdl", "alphalora", "uniform"))
    rule = str(rng.choice(rules))
    options = {"damping": float(rng.choice(scores.damping))} if rule != "uniform" else {}
    options |= {"parity": bool(rng.random() < 0.5)} if rule == "alphalora" else {}
    options |= {"spend": str(rng.choice(["exactly", "at_most"]))} if rule == "mdl" else {}
    options["fixed"] = {scores.names[0]: int(rng.integers(0, 3)) * 2} if rng.random() < 0.3 else None
    if kind == "ranks":
        bounds = {"min_rank": int(rng.integers(0, 2)), "max_rank": cap, "multiple": int(rng.choice([1, 2]))}
        return scores, plan_ranks(scores, mean_rank=share * cap, rule=rule, **bounds, **options)
    bounds = {"min_experts": int(rng.integers(0, 3)), "max_experts": cap}
    return scores, plan_experts(scores, total=max(1, int(share * cap * k)), rule=rule, **bounds, **options)


def test_no_plan_that_holds_is_lost_in_training(caplog):
    """Plans with a damping of their own died in mid-training, and so did some that spend all of their budget at their caps."""
    rng, made = np.random.default_rng(0), 0
    while made < 150:
        try:
            scores, plan = random_plan(rng)
        except (InfeasibleBudget, InvalidInput):
            continue
        made += 1
        shapes = {m.name: (m.d_in, m.d_out) for b in scores.blocks for m in b.modules}
        gains = {
            n: (g, g * float(rng.random())) for n, g in zip(shapes, rng.lognormal(0, 1.5, len(shapes)).tolist(), strict=True)
        }
        new = replanned(plan, gains, shapes, 1 if plan.kind == "ranks" else 2)
        price = {m: sum(shapes[m]) if plan.kind == "ranks" else 1 for m in shapes}
        spent = sum(price[m] * c for m, c in new.items())
        assert spent <= max(plan.budget["limit"], plan.budget["spent"]) * (1 + 1e-9)
        fixed = plan.hyperparameters["fixed"] or {}
        cap = plan.hyperparameters["max_rank" if plan.kind == "ranks" else "max_experts"]
        for block in plan.blocks:
            count = new.get(block.modules[0], 0)
            assert (count > 0) == (block.count > 0)
            assert count == block.count if block.name in fixed else count <= cap
    assert not caplog.records


def test_terms_that_no_plan_meets_leave_the_counts_and_say_so(caplog):
    scores = zoo.scores([3, 2, 1])
    plan = plan_ranks(scores, mean_rank=4)
    plan = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "utility": "one of their own"})
    shapes = {m.name: (m.d_in, m.d_out) for b in scores.blocks for m in b.modules}
    with caplog.at_level(logging.WARNING):
        new = replanned(plan, dict.fromkeys(shapes, (9.0, 1.0)), shapes)
    assert new == {m: b.count for b in plan.blocks for m in b.modules}
    assert "re-plan changes nothing: There is no utility 'one of their own'" in caplog.text
