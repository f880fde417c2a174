"""Compensation: exact least squares on real activations, the dense stream, biases, and which models allow it."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from tests import zoo

from layerbudget.decisions.shapes.apply import apply_shapes, measure_plan
from layerbudget.decisions.shapes.compensation import Stream, ways_of
from layerbudget.decisions.shapes.layouts import find_attention, find_mlp, put_weight
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.shapes.units import damped
from layerbudget.errors import InvalidInput, UnknownStructure
from layerbudget.execution.modes import inference
from layerbudget.execution.walk import Walk

TIGHT = {"rtol": 1e-5, "atol": 1e-7}


def streams(model, data, where, *, damage=True):
    """A walk in front of layer 1 whose layer 0 is damaged, with the dense stream beside it."""
    walk = Walk(model, data, batch_size=4)
    walk.capture()
    stream = Stream(walk)
    for i, (name, layer) in enumerate(walk.layers[:2]):
        walk.position = i
        stream.look()
        if i == 0:
            if damage:
                module = model.get_submodule(find_mlp(layer, name).consumer)
                put_weight(module, torch.zeros(model.config.hidden_size, find_mlp(layer, name).width, dtype=torch.float64))
            walk.advance()
    return stream, where(walk.layers[1][1], walk.layers[1][0])


@pytest.mark.parametrize("where", [find_attention, find_mlp])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_the_stream_is_met_by_least_squares(name, where):
    """Without stiffness: torch's own least squares on what the columns see and the dense stream misses, bias included."""
    model, data = zoo.build(name).double(), zoo.tokens(samples=16)
    dense = copy.deepcopy(model)
    with inference(model), inference(dense):
        stream, part = streams(model, data, where)
        module = model.get_submodule(part.consumer)
        aim, width = stream.aim(part), module.weight.numel() // model.config.hidden_size
        keep = torch.arange(0, width, 2)
        weight = (module.weight.T if name == "gpt2" else module.weight).detach().double()
        made = aim.remake(module, 0.01, [0.0])(weight, damped(aim.total.gram.triu(), 0.01), keep)
        states, was = ([s.double() for s in m(data.input_ids, output_hidden_states=True).hidden_states] for m in (model, dense))
        seen = []
        handle = module.register_forward_hook(lambda m, a, y: seen.append((a[0], y)))
        after = model(data.input_ids, output_hidden_states=True).hidden_states[2]
        handle.remove()
        x, given = (v.flatten(0, 1) for v in seen[0])
        if where is find_mlp:
            wanted = was[2].flatten(0, 1) - (after.flatten(0, 1) - given)
        else:
            outs = []
            handle = dense.get_submodule(part.consumer).register_forward_hook(lambda m, a, y: outs.append(y))
            dense(data.input_ids)
            handle.remove()
            wanted = (was[1] + outs[0] - states[1]).flatten(0, 1)
    ones = torch.ones(len(x), 1, dtype=x.dtype)
    biased = getattr(module, "bias", None) is not None
    inputs = torch.cat((x[:, keep], ones), 1) if biased else x[:, keep]
    best = torch.linalg.lstsq(inputs, wanted).solution.T
    miss = lambda v, c: float(((x[:, keep] @ v.T + c - wanted) ** 2).sum())  # noqa: E731
    offset = module.bias.detach() if biased else 0.0
    least = miss(best[:, : len(keep)], best[:, -1] if biased else 0.0)
    assert miss(made, offset) == pytest.approx(least, rel=1e-5) and least < 0.9 * miss(weight[:, keep], 0.0)
    if not biased:
        assert torch.allclose(made, best, **TIGHT)


def test_an_undamaged_model_is_refitted_as_before():
    """The dense stream adds nothing where nothing was lost before: stiffness does not matter to what is optimal."""
    model, data = zoo.build("llama").double(), zoo.tokens(samples=8)
    with inference(model):
        stream, part = streams(model, data, find_mlp, damage=False)
        aim, module = stream.aim(part), model.get_submodule(part.consumer)
        weight, keep = module.weight.detach().double(), torch.arange(10, 48)
        h = damped(aim.total.gram.triu(), 1e-9)
        free, stiff = (aim.remake(module, 1e-9, [s])(weight, h, keep) for s in (0.0, math.inf))
    assert torch.allclose(free, stiff, rtol=1e-3, atol=1e-5)
    assert len(aim.folds) == 4 and aim.total.tokens == data.input_ids.numel()


def test_stiffness_is_chosen_on_unseen_sequences():
    model, data = zoo.build("llama").double(), zoo.tokens(samples=8)
    with inference(model):
        stream, part = streams(model, data, find_mlp)
        aim, keep = stream.aim(part), torch.arange(0, 48, 2)
        weight = model.get_submodule(part.consumer).weight.detach().double()
        chosen = aim.best(weight, keep, (0.01, 0.1), (math.inf, 1.0, 0.0), centred=False)[1]
        noise = dataclasses.replace(aim.folds[0], cross=torch.randn_like(aim.folds[0].cross) * 1e3)
        wild = dataclasses.replace(aim, folds=[noise, *aim.folds[1:]])
        assert chosen < math.inf  # a whole MLP before it is gone: there is something to make up for
        assert wild.best(weight, keep, (0.01, 0.1), (math.inf, 1.0, 0.0), centred=False)[1] == math.inf


@pytest.mark.parametrize(("name", "way"), [("llama", "stream"), ("gpt-neox", "stream"), ("opt", "stream"), ("gemma2", "refit")])
def test_auto_takes_the_stream_where_layers_add_up(name, way):
    model, data = zoo.build(name), zoo.tokens()
    assert ways_of(model, data) == way
    with pytest.raises(InvalidInput, match="no compensation"):
        ways_of(model, data, "prayer")


def test_plans_say_how_they_compensate():
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    plan = plan_shapes(model, data, "35% flops", by="groups", multiple=4, passes=15, strides=1, draws=1)
    assert plan.hyperparameters["compensate"] == "stream"
    damage = {}
    for way in ("refit", "stream"):
        bare = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "compensate": way})
        damage[way] = measure_plan(model, bare, data)
    assert damage["stream"] != damage["refit"]
    again = copy.deepcopy(model)
    apply_shapes(again, plan, data)
    gemma = zoo.build("gemma2")
    plan = plan_shapes(gemma, data, "35% flops", by="groups", multiple=4, passes=14, strides=1, draws=1)
    forced = dataclasses.replace(plan, hyperparameters={**plan.hyperparameters, "compensate": "stream"})
    with pytest.raises(UnknownStructure, match="does not add"):
        apply_shapes(gemma, forced, data)
