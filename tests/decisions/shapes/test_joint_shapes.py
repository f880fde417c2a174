"""Heads, widths, layers and zeros in one program: what is planned is what is applied, written and counted again."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.shapes.checkpoint import apply_structured, find_parts, save_smaller
from layerbudget.decisions.shapes.directional import plan_shapes_directional
from layerbudget.decisions.shapes.parts import amount
from layerbudget.decisions.shapes.shrink import preserved
from layerbudget.decisions.shapes.sparse import saved_by_zeros
from layerbudget.decisions.shapes.zeros import ZEROS, left
from layerbudget.decisions.sparsity.export import pack
from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.models.blocks import layers, weight_of
from layerbudget.models.loading import load_model

OPTIONS = {"by": "groups", "multiple": 4, "passes": 22.0, "strides": 1, "batch_size": 4, "draws": 1}


def written(model, plan, data, folder):
    """Apply a plan, save the result, and load it from its folder."""
    receipt = apply_structured(model, plan, data)
    save_smaller(model, None, folder, plan=plan, record=receipt)
    return receipt, load_model(str(folder))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_go_with_heads_and_widths(name, tmp_path):
    """A model whose middle layer does next to nothing: it goes, and the folder holds what the program counted."""
    model, data = zoo.build(name), zoo.tokens(samples=8)
    with torch.no_grad():
        for part in find_parts(model, multiple=4)[2:4]:
            module = model.get_submodule(part.modules[-1])
            module.weight.mul_(1e-3)
    plan = plan_shapes_directional(model, data, "38% flops", depth=2, even=True, **OPTIONS)
    assert plan.extra["dropped"] == [layers(model)[1][0]] and plan.hyperparameters["even"] is True
    assert any(s["removed"] for s in plan.extra["shapes"].values())
    assert plan.budget["limit"] <= plan.budget["spent"] < plan.budget["base"]
    before = sum(amount(p, "flops")[1] for p in find_parts(model))
    receipt, again = written(model, plan, data, tmp_path / "out")
    after = sum(amount(p, "flops")[1] for p in find_parts(again))
    assert before - after == plan.budget["spent"] == receipt.saved and len(layers(again)) == 2
    with torch.no_grad():
        assert torch.allclose(again(data.input_ids).logits, model(data.input_ids).logits, atol=1e-4)


@pytest.mark.parametrize(("zeros", "budget"), [("2:4", "30% flops"), ("2:4", "35% bytes"), ("packed", "35% bytes")])
def test_zeros_are_counted_again_from_the_folder(zeros, budget, tmp_path):
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    plan = plan_shapes_directional(model, data, budget, zeros=zeros, even=True, **OPTIONS)
    planned = plan.extra["zeros"]
    assert planned["pattern"] == zeros and planned["parts"] and planned["runtime"] == ZEROS[zeros].runtime
    sizes = {p.name: p.parameters for p in find_parts(model)}
    _, again = written(model, plan, data, tmp_path / "out")
    hyper, unit = plan.hyperparameters, plan.budget["unit"]
    cost = {"context": hyper["context"], "bytes_per_parameter": hyper["bytes_per_parameter"]}
    parts = find_parts(again)
    now = sum(amount(p, unit, **cost)[1] for p in parts) - saved_by_zeros(again, parts, planned, unit, **cost)
    assert plan.budget["base"] - now == plan.budget["spent"] >= plan.budget["limit"]
    for name, found in planned["parts"].items():
        part = next(p for p in parts if p.name == name)
        weights = [weight_of(again, n)[1] for n in part.modules]
        assert sum(int((w == 0).sum()) for w in weights) == found["zeros"] == int(found["share"] * part.parameters)
        if zeros == "2:4":
            assert all((w.unflatten(1, (-1, 4)) == 0).sum(2).eq(2).all() for w in weights)
        assert part.parameters <= sizes[name]
    if zeros == "packed":  # the bytes are those of the packed file
        pack(tmp_path / "out", tmp_path / "packed.safetensors", minimum=0.01)
        with safe_open(tmp_path / "packed.safetensors", framework="pt") as file:
            held = sum(file.get_tensor(k).nbytes for k in file.keys() if ".layers." in k and "norm" not in k)
        assert held == now


def test_zeros_that_are_not_there_are_noticed():
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    plan = plan_shapes_directional(model, data, "30% flops", zeros="2:4", **OPTIONS)
    with preserved(model):
        apply_structured(model, plan, data)
        name = next(iter(plan.extra["zeros"]["parts"]))
        part = next(p for p in find_parts(model) if p.name == name)
        weight = weight_of(model, part.modules[0])[1]
        weight.data[0] = 1.0
        with pytest.raises(CoverageError, match="were planned"):
            saved_by_zeros(model, [part], plan.extra["zeros"], "flops", context=0, bytes_per_parameter=4.0)


def test_money_of_zeros():
    part = find_parts(zoo.build("llama"), multiple=4)[1]
    for unit in ("flops", "bytes"):
        each, whole = amount(part, unit, context=7, bytes_per_parameter=4.0)
        found = left(part, unit, 2, ZEROS["none"], 0, context=7, bytes_per_parameter=4.0)
        assert found == whole - 2 * each
    for zeros, unit, match in (
        ("packed", "flops", "save no flops"),
        ("2:4", "params", "save no params"),
        ("3:5", "bytes", "no zeros"),
    ):
        with pytest.raises(InvalidInput, match=match):
            plan_shapes_directional(zoo.build("llama"), zoo.tokens(), f"20% {unit}", zeros=zeros)


def test_options_are_heard_or_refused(capsys):
    command = ["plan", "structured", "demo", "--save", "10% flops"]
    assert main([*command, "--zeros", "2:4"]) == 2 and "--zeros has no meaning" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--search", "directional", "--zeros", "packed"]) == 2
    assert "save no flops" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--search", "directional", "--depth", "-1"]) == 2
