"""Smaller shapes by directional damage: masks that equal cuts, exact steps, plans that are applied and recounted."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.blocks import layers
from layerbudget.cli import main
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.planning.shape_steps import ShapeSpace
from layerbudget.running.divergence import kl_sum
from layerbudget.shrinking.checkpoint import apply_structured, find_parts
from layerbudget.shrinking.directional import _Shapes, plan_shapes_directional
from layerbudget.shrinking.parts import cut, where_is
from layerbudget.shrinking.shrink import measure_plan, preserved

CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def free_parts(model, by="groups"):
    return [p for p in find_parts(model, by=by, multiple=4) if p.kind != "rest"]


@pytest.mark.parametrize(("name", "by"), [("llama", "groups"), ("llama", "queries"), ("gpt2", "auto"), ("phi3", "auto")])
def test_a_mask_gives_what_the_cut_gives(name, by):
    model, data = zoo.build(name).double(), zoo.tokens()
    parts = free_parts(model, by)
    shapes = _Shapes(model, data, parts, 0.01, 4)
    with torch.no_grad():
        dense = model(input_ids=data.input_ids).logits
        for k in (0, 1, len(parts) - 1):
            counts = np.zeros(len(parts), dtype=np.int64)
            counts[k] = min(2, parts[k].units - 1)
            shapes.move(counts, shapes.dense)
            masked = model(input_ids=data.input_ids).logits
            shapes.held.restore()
            with preserved(model):
                where = where_is(dict(layers(model))[parts[k].layer], parts[k])
                cut(model, parts[k], where, shapes.dense[where.consumer].value, int(counts[k]), 0.01)
                assert torch.allclose(masked, model(input_ids=data.input_ids).logits, **CLOSE)
            assert not torch.allclose(masked, dense, **CLOSE)
        assert torch.equal(model(input_ids=data.input_ids).logits, dense)


def test_terms_are_the_derivatives_of_the_divergence():
    """First term: the slope of D along the change; both terms at the dense model: D itself, for small changes."""
    model, data = zoo.build("llama").double(), zoo.tokens(samples=24)
    parts = free_parts(model)
    shapes = _Shapes(model, data, parts, 0.01, 8)
    counts = np.array([0, 2] * (len(parts) // 2))
    levels = np.stack([counts, np.array([1, 4] * (len(parts) // 2))], 1)
    shapes.move(counts, shapes.dense)
    seen = shapes.look(levels, shapes.dense, draws=1, seed=0)
    assert seen.divergence == pytest.approx(shapes.reference.measure(), rel=1e-4) and seen.divergence > 0
    for k in (0, 1):
        weight = model.get_submodule(shapes.names[k]).weight
        present, delta = (
            weight.data.clone(),
            shapes.become(k, shapes.dense[shapes.names[k]], [int(levels[k, 1])])[0] - weight.data,
        )
        values = []
        for step in (1e-3, -1e-3):
            weight.data.copy_(present + step * delta)
            values.append(shapes.reference.measure())
        weight.data.copy_(present)
        assert seen.forms.first[k, 1] == pytest.approx((values[0] - values[1]) / 2e-3, rel=2e-2, abs=1e-6)
    assert (seen.forms.first[:, 0] == 0).all() and (seen.forms.second[:, 0] == 0).all()


def test_a_step_is_the_best_of_all(rng):
    parts = find_parts(zoo.build("llama"), by="queries", multiple=4)
    space = ShapeSpace(parts, "20% flops", kinds=("heads", "mlp"), max_removed=0.75)
    present = space.top // 2
    levels = space.reach(present, 0.3, 3)
    assert (levels == present[:, None]).any(1).all() and (levels >= 0).all() and (levels <= space.top[:, None]).all()
    damage = rng.normal(size=levels.shape)
    best = min(
        (sum(damage[k, j] for k, j in enumerate(pick)), pick) for pick in itertools.product(range(3), repeat=len(levels))
        if sum(int(space.each[k]) * levels[k, j] for k, j in enumerate(pick)) >= space.need
    )  # fmt: skip
    found, solution = space.step(levels, damage)
    assert solution.damage == pytest.approx(best[0]) and int(space.each @ found) >= space.need


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_plans_are_applied_recounted_and_measured(name):
    model, data = zoo.build(name), zoo.tokens()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plan = plan_shapes_directional(model, data, "25% flops", multiple=4, passes=40, batch_size=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    log = plan.extra["path"]
    assert all(a["divergence"] > b["divergence"] for a, b in itertools.pairwise(log))
    assert plan.rule == "directional" and plan.extra["forward_passes"] <= 40 and plan.budget["spent"] >= plan.budget["limit"]
    assert plan.extra["measured"] == pytest.approx(measure_plan(model, plan, data, batch_size=4))
    with torch.no_grad():
        clean = torch.log_softmax(model(input_ids=data.input_ids).logits.float(), -1)
        receipt = apply_structured(model, plan, data)
        total, tokens = kl_sum(model(input_ids=data.input_ids).logits, clean, data.attention_mask)
    assert receipt.saved == plan.budget["spent"] and total / tokens == pytest.approx(plan.extra["measured"], rel=1e-3)


def test_refusals(capsys):
    model, data = zoo.build("llama"), zoo.tokens()
    with pytest.raises(InvalidInput, match="one step needs"):
        plan_shapes_directional(model, data, "20% flops", passes=3)
    with pytest.raises(InfeasibleBudget, match="save at most"):
        plan_shapes_directional(model, data, "90% flops")
    space = ShapeSpace(find_parts(model, multiple=4), "20% flops", kinds=("mlp",), max_removed=0.75)
    with pytest.raises(InfeasibleBudget, match="save too little"):
        space.plan(np.zeros(len(space.free), dtype=np.int64), 0.0, dataclasses.replace, {}, {})
    command = ["plan", "structured", "demo", "--save", "10% flops", "--search", "directional"]
    assert main([*command, "--points", "3"]) == 2 and "--points has no meaning" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "structured", "demo", "--save", "10% flops", "--passes", "9"]) == 2
