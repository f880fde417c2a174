"""Plans of smaller shapes on real tiny models: measured, applied, recounted, saved."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.shapes.checkpoint import (  # fmt: skip
    apply_structured,
    check_exportable,
    find_parts,
    narrow,
    plan_depth,
    plan_structured,
    remove_heads,
    save_smaller,
    shape_curves,
)
from layerbudget.errors import CoverageError, InfeasibleBudget, InvalidInput, ModelMismatch, UnknownStructure
from layerbudget.models.blocks import layers, partition
from layerbudget.models.loading import load_model
from layerbudget.plan import Plan
from layerbudget.planning.costs import base_amount

WITH_BOTH = [
    "llama",
    "mistral-sliding",
    "gemma",
    "gemma2",
    "gemma3",
    "qwen2",
    "qwen3",
    "phi3",
    "opt",
    "gpt2",
    "gpt-neox",
    "starcoder2",
]


def again(plan):
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


def frozen(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", [*WITH_BOTH, "bert", "roberta-classifier"])
def test_planned_flops_are_the_recounted_flops(name):
    model, data = zoo.build(name), zoo.tokens()
    before = base_amount(partition(model), "flops")
    weights = frozen(model)
    plan = plan_structured(model, data, "20% flops", multiple=4, points=2)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert plan.budget["base"] == before and plan.budget["spent"] >= plan.budget["limit"] == pytest.approx(0.2 * before)
    done = apply_structured(model, again(plan), data)
    assert before - base_amount(partition(model), "flops") == plan.budget["spent"] == done["saved"]
    assert sum(b.numel for b in partition(model)) == sum(b.numel - b.count for b in plan.blocks)
    with torch.no_grad():
        assert torch.isfinite(model(**next(data.batches(2))).logits).all()


@pytest.mark.parametrize("unit", ["params", "bytes"])
def test_other_units_and_long_contexts_recount_too(unit):
    model, data = zoo.build("gemma"), zoo.tokens()
    shapes = [p.numel() for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    plan = plan_structured(model, data, f"20% {unit}", multiple=4, points=2)
    assert plan.budget["base"] == sum(shapes) * (4 if unit == "bytes" else 1)
    apply_structured(model, plan, data)
    long = plan_structured(zoo.build("gemma"), data, "20% flops", context=4096, multiple=4, points=2)
    removed = sum(s["removed"] for s in long.extra["shapes"].values() if s["kind"] == "heads")
    assert removed and long.budget["base"] == 2 * sum(shapes) + 4 * 4096 * 32 * 3
    apply_structured(zoo.build("gemma"), long, data)


@pytest.mark.parametrize(("name", "by"), [("llama", "groups"), ("llama", "queries"), ("gpt2", "groups"), ("bert", "groups")])
def test_curves_are_the_damage_of_what_is_then_removed(name, by):
    """Applying one measured point gives exactly the KL divergence that was measured."""
    model, data = zoo.build(name), zoo.tokens()
    parts = find_parts(model, by=by, multiple=8)
    curves = shape_curves(model, data, parts, max_removed=0.5, points=2)
    batch = next(data.batches(len(data)))
    with torch.no_grad():
        clean = torch.log_softmax(model(**batch).logits, -1)
    second = layers(model)[1][0]
    for kind in ("heads", "mlp"):
        units, damage = curves[f"{second}.{kind}"]
        smaller = copy.deepcopy(model)
        share = units[-1] / next(p.units for p in parts if p.kind == kind)
        if kind == "heads":
            remove_heads(smaller, data, {second: share}, by=by)
        else:
            narrow(smaller, data, {second: share}, multiple=8)
        with torch.no_grad():
            now = torch.log_softmax(smaller(**batch).logits, -1)
        assert damage[-1] == pytest.approx(float((clean.exp() * (clean - now)).sum(-1).mean()), rel=1e-3)
        assert damage[-1] > 0


def test_idle_heads_and_units_are_what_goes():
    """One layer's second group and another layer's last half of the MLP do nothing: exactly they are planned away."""
    model, data = zoo.build("llama"), zoo.tokens()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 16:] = 0
        model.model.layers[2].mlp.down_proj.weight[:, 24:] = 0
        before = model(data.input_ids).logits
    saved = 2 * (16 * 32 * 2 + 2 * 8 * 32 + 3 * 24 * 32)
    plan = plan_structured(model, data, f"{saved} flops", by="groups", points=6)
    removed = {n: s["removed"] for n, s in plan.extra["shapes"].items() if s["removed"]}
    assert removed == {"model.layers.0.heads": 1, "model.layers.2.mlp": 3}
    assert plan.extra["predicted"] < 1e-6
    apply_structured(model, plan, data)
    with torch.no_grad():
        torch.testing.assert_close(model(data.input_ids).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen3", "mistral-sliding"])
def test_even_plans_with_depth_load_in_plain_transformers(name, tmp_path):
    model, data = zoo.build(name), zoo.tokens()
    with torch.no_grad():
        for module in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            module.weight.mul_(1e-3)
    plan = plan_structured(model, data, "55% flops", depth=1, even=True, max_removed=0.5, multiple=4, points=2)
    assert plan.extra["dropped"] == ["model.layers.1"]
    done = apply_structured(model, again(plan), data)
    assert list(done["layers"]) == ["model.layers.0", "model.layers.2"] and len(layers(model)) == 2
    save_smaller(model, None, tmp_path / "out", plan=plan, record=done)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    batch = next(data.batches(2))
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["plan_digest"] == plan.digest
    assert Plan.load(tmp_path / "out" / "plan.json") == plan


def test_even_plans_keep_the_heads_that_a_config_cannot_lose():
    data = zoo.tokens()
    for name in ("gpt2", "opt", "bert"):
        model = zoo.build(name)
        plan = plan_structured(model, data, "15% flops", even=True, multiple=4, points=2)
        assert not any(s["removed"] for s in plan.extra["shapes"].values() if s["kind"] == "heads")
        apply_structured(model, plan, data)
        check_exportable(model)
        with pytest.raises(UnknownStructure, match="No smaller number of heads.*Remove MLP units"):
            plan_structured(zoo.build(name), data, "15% flops", kinds=("heads",), even=True)


def test_the_plan_that_is_best_as_a_whole_is_kept_and_its_damage_is_the_real_one():
    model, data = zoo.build("llama"), zoo.tokens()
    weights, config = frozen(model), model.config.to_dict()
    plan = plan_structured(model, data, "30% flops", depth=1, even=True, multiple=4, points=2)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items()) and model.config.to_dict() == config
    tried = [c["measured"] for c in plan.extra["candidates"] if c["measured"] is not None]
    assert len(tried) > 1 and plan.extra["measured"] == min(tried)
    seen = [(c["by"], c["dropped"], c["predicted"]) for c in plan.extra["candidates"]]
    assert seen == sorted(set(seen), key=lambda c: c[2])
    total = 0.0
    for fold in ([0, 4], [1, 5], [2], [3]):
        smaller = copy.deepcopy(model)
        apply_structured(smaller, plan, data.select([i for i in range(6) if i not in fold]))
        batch = next(data.select(fold).batches(2))
        with torch.no_grad():
            p, q = (torch.log_softmax(m(**batch).logits, -1) for m in (model, smaller))
        total += float((p.exp() * (p - q)).sum(-1).mean()) * len(fold) / 6
    assert plan.extra["measured"] == pytest.approx(total, rel=1e-4)
    first = plan_structured(model, data, "30% flops", depth=1, even=True, multiple=4, points=2, trials=1)
    assert first.extra["measured"] is None and first.extra["predicted"] == min(c[2] for c in seen)


def test_mixtures_lose_heads_and_keep_their_experts():
    model, data = zoo.build("mixtral"), zoo.tokens()
    plan = plan_structured(model, data, "5% flops", kinds=("heads",), points=1)
    assert any(b.name.endswith(".rest") and b.count == 0 for b in plan.blocks)
    apply_structured(model, plan, data)
    with pytest.raises(UnknownStructure, match="no plain MLP"):
        plan_structured(zoo.build("mixtral"), data, "5% flops")


def test_refusals(tmp_path):
    model, data = zoo.build("llama"), zoo.tokens()
    weights = frozen(model)
    with pytest.raises(InfeasibleBudget, match="save at most"):
        plan_structured(model, data, "90% flops", points=1)
    with pytest.raises(InvalidInput, match="points is 0"):
        plan_structured(model, data, "10% flops", points=0)
    with pytest.raises(InvalidInput, match="multiple is 0"):
        plan_structured(model, data, "10% flops", multiple=0)
    plan = plan_structured(model, data, "20% flops", points=1)
    shapes = {n: {**s, "removed": min(s["removed"] + 1, s["units"] - 1)} for n, s in plan.extra["shapes"].items()}
    with pytest.raises(CoverageError, match="were planned"):
        apply_structured(copy.deepcopy(model), dataclasses.replace(plan, extra={**plan.extra, "shapes": shapes}), data)
    with pytest.raises(InvalidInput, match="holds no shapes"):
        apply_structured(model, zoo.plan(model), data)
    with pytest.raises(ModelMismatch):
        apply_structured(zoo.build("llama", num_hidden_layers=2), plan, data)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_command_line(folder, capsys):
    text = ["--data", str(folder / "text.txt"), "--samples", "4", "--length", "16", "--quiet", "--json"]
    model, plan, out = (str(folder / n) for n in ("model", "plan.json", "out"))

    def plan_it(*more):
        width = [] if "heads" in more else ["--multiple", "4"]
        return main(["plan", "structured", model, *width, "--points", "2", "-o", plan, *text, *more])

    assert plan_it("--save", "25% flops", "--even") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["kind"] == "structured" and made["budget"]["spent"] >= made["budget"]["limit"]
    assert main(["prune", model, plan, "-o", out, *text]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["saved"] == done["planned"] == made["budget"]["spent"]
    smaller = load_model(out)
    assert sum(p.numel() for p in smaller.parameters()) == done["parameters_after"] < done["parameters_before"]
    assert plan_it("--save", "25% flops") == 2
    assert "exists already" in capsys.readouterr().err
    assert plan_it("--save", "95% flops", "--overwrite") == 2
    assert "save at most" in capsys.readouterr().err
    assert plan_it("--save", "25% flops", "--overwrite", "--kinds", "tails") == 2
    assert "Kinds are heads, mlp" in capsys.readouterr().err
    assert plan_it("--save", "12% flops", "--overwrite", "--kinds", "heads", "--multiple", "4") == 2
    assert "--multiple has no meaning" in capsys.readouterr().err
    assert plan_it("--save", "12% flops", "--overwrite", "--kinds", "heads") == 0
    capsys.readouterr()
    assert main(["prune", model, plan, "-o", str(folder / "uneven"), *text]) == 2
    assert "even=True" in capsys.readouterr().err
    assert not (folder / "uneven").exists()


def test_depth_plans_really_remove_layers_from_the_command_line(folder, capsys):
    plan_depth(load_model(str(folder / "model")), zoo.tokens(), remove=1).save(folder / "depth.json")
    assert (
        main(
            [
                "prune",
                str(folder / "model"),
                str(folder / "depth.json"),
                "-o",
                str(folder / "out"),
                "--quiet",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["saved"] > 0
    assert load_model(str(folder / "out")).config.num_hidden_layers == 2


def test_a_stopped_measurement_goes_on_where_it_was(tmp_path, monkeypatch):
    from layerbudget.decisions.shapes import search as shapes

    model, data = zoo.build("llama"), zoo.text(samples=4)
    options = {"depth": 1, "even": True, "multiple": 4, "points": 2}
    whole, plain, done = plan_structured(model, data, "30% flops", **options), shapes.shape_curves, []

    def stopping(*arguments, **given):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(plain(*arguments, **given))
        return done[-1]

    monkeypatch.setattr(shapes, "shape_curves", stopping)
    with pytest.raises(KeyboardInterrupt):
        plan_structured(model, data, "30% flops", resume=tmp_path / "parts", **options)
    monkeypatch.setattr(shapes, "shape_curves", lambda *a, **g: done.append(None) or plain(*a, **g))
    resumed = plan_structured(model, data, "30% flops", resume=tmp_path / "parts", **options)
    assert resumed.digest == whole.digest and len(done) % 4 == 0
    count = len(done)
    assert plan_structured(model, data, "30% flops", resume=tmp_path / "parts", **options).digest == whole.digest
    assert len(done) == count
    with pytest.raises(ModelMismatch):
        plan_structured(model, data, "30% flops", resume=tmp_path / "parts", **{**options, "points": 3})
