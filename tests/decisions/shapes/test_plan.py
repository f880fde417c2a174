"""Plans of smaller shapes on real tiny models: applied, recounted, measured, saved; heads, widths and layers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import shlex

import pytest
import torch
import transformers
from tests import zoo
from tests.cards import card_of

from layerbudget.budget import base_amount
from layerbudget.cli import main
from layerbudget.decisions.shapes.apply import apply_shapes, measure_plan, remove_units
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.shapes.point import ShapePoint
from layerbudget.decisions.shapes.save import check_exportable, save_smaller
from layerbudget.decisions.shapes.units import find_parts
from layerbudget.errors import CoverageError, InfeasibleBudget, InvalidInput, ModelMismatch, UnknownStructure
from layerbudget.execution.divergence import kl_of_sequences
from layerbudget.models.blocks import layers, partition
from layerbudget.models.loading import load_model
from layerbudget.plan import Plan

QUICK = {"multiple": 4, "passes": 20.0, "strides": 1, "draws": 1, "batch_size": 4}


def again(plan):
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


def frozen(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3", "phi3", "opt", "gpt-neox", "bert"])
def test_planned_flops_are_the_recounted_flops(name):
    model, data = zoo.build(name), zoo.tokens()
    before, weights = base_amount(partition(model), "flops"), frozen(model)
    plan = plan_shapes(model, data, "20% flops", **QUICK)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert plan.budget["base"] == before and plan.budget["spent"] >= plan.budget["limit"] == pytest.approx(0.2 * before)
    done = apply_shapes(model, again(plan), data)
    assert before - base_amount(partition(model), "flops") == plan.budget["spent"] == done.saved
    assert sum(b.numel for b in partition(model)) == sum(b.numel - b.count for b in plan.blocks)
    with torch.no_grad():
        assert torch.isfinite(model(**next(data.batches(2))).logits).all()


def test_progress_moves_within_a_pass():
    """Nothing was said within a look at the model, which takes half an hour of a large one."""
    told = list[tuple[int, int]]()
    model, data = zoo.build("llama"), zoo.tokens(8)
    plan_shapes(model, data, "20% flops", **{**QUICK, "batch_size": 1}, progress=lambda done, total: told.append((done, total)))
    spent = [done for done, total in told if total == int(QUICK["passes"])]
    assert max(b - a for a, b in itertools.pairwise(spent)) <= 1 and spent[-1] >= 10
    assert [done for done, total in told if total == len(layers(model))][-1] == len(layers(model)), "and the cut at the end"


@pytest.mark.parametrize("unit", ["params", "bytes"])
def test_other_units_recount_too(unit):
    model, data = zoo.build("gemma"), zoo.tokens()
    shapes = sum(p.numel() for n, p in model.named_parameters() if "layers" in n and p.ndim == 2)
    plan = plan_shapes(model, data, f"20% {unit}", **QUICK)
    assert plan.budget["base"] == {"params": shapes, "bytes": 4 * shapes}[unit]
    assert apply_shapes(model, plan, data).saved == plan.budget["spent"] >= plan.budget["limit"]


def test_idle_heads_and_units_are_what_goes():
    """One layer's second group and another layer's last half of the MLP do nothing: exactly they are planned away."""
    model, data = zoo.build("llama"), zoo.tokens()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 16:] = 0
        model.model.layers[2].mlp.down_proj.weight[:, 24:] = 0
        before = model(data.input_ids).logits
    saved = 2 * (16 * 32 * 2 + 2 * 8 * 32 + 3 * 24 * 32)
    plan = plan_shapes(model, data, f"{saved} flops", by="groups", **{**QUICK, "multiple": 8})
    removed = {n: s.removed for n, s in plan.payload.shapes.items() if s.removed}
    assert removed == {"model.layers.0.heads": 1, "model.layers.2.mlp": 3}
    assert abs(plan.payload.predicted) < 1e-6
    apply_shapes(model, plan, data)
    with torch.no_grad():
        torch.testing.assert_close(model(data.input_ids).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_go_with_heads_and_widths_and_the_rest_loads_in_plain_transformers(name, tmp_path):
    """A model whose middle layer does next to nothing: it goes, and the folder holds what the program counted."""
    model, data = zoo.build(name), zoo.tokens(samples=8)
    with torch.no_grad():
        for part in find_parts(model, multiple=4)[2:4]:
            model.get_submodule(part.modules[-1]).weight.mul_(1e-3)
    plan = plan_shapes(model, data, "38% flops", by="groups", depth=2, even=True, **QUICK)
    assert plan.payload.dropped == [layers(model)[1][0]] and plan.hyperparameters["even"] is True
    assert any(s.removed for s in plan.payload.shapes.values())
    assert plan.budget["limit"] <= plan.budget["spent"] < plan.budget["base"]
    before = sum(p.flops for p in find_parts(model))
    receipt = apply_shapes(model, again(plan), data)
    assert [n[-1] for n in receipt.layers] == ["0", "2"]
    save_smaller(model, None, tmp_path / "out", plan=plan, record=receipt)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    after = sum(p.flops for p in find_parts(loaded))
    assert before - after == plan.budget["spent"] == receipt.saved and len(layers(loaded)) == 2
    batch = next(data.batches(2))
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["plan_digest"] == plan.digest
    assert Plan.load(tmp_path / "out" / "plan.json") == plan
    assert card_of(tmp_path / "out").data.pipeline_tag == "text-generation"


def test_even_plans_keep_the_heads_that_a_config_cannot_lose():
    data = zoo.tokens()
    model = zoo.build("gpt2")
    plan = plan_shapes(model, data, "15% flops", even=True, **QUICK)
    assert not any(s.removed for s in plan.payload.shapes.values() if s.kind == "heads")
    apply_shapes(model, plan, data)
    check_exportable(model)
    for name in ("gpt2", "bert"):
        with pytest.raises(UnknownStructure, match="No smaller number of heads.*Remove MLP units"):
            plan_shapes(zoo.build(name), data, "15% flops", kinds=("heads",), even=True)


@pytest.mark.parametrize(
    ("name", "samples", "starts"),
    [("llama", 8, 2), ("gpt2", 3, 1), pytest.param("gemma2", 8, 1, marks=pytest.mark.slow)],
)
def test_an_interrupted_run_continues_to_the_same_plan(tmp_path, monkeypatch, name, samples, starts):
    """Stopped behind both strides, and again behind the next state: what was measured is found, moments are looked at again."""
    model, data = zoo.build(name), zoo.tokens(samples=samples, padded=name != "gpt2")
    before, kept = frozen(model), tmp_path / "kept"
    options = {"multiple": 4, "passes": 45.0, "strides": 2, "draws": 1, "batch_size": 4, "trust": 0.5}
    options["by"] = "auto" if starts == 2 or name == "gpt2" else "groups"
    budget = "35% flops" if name == "gpt2" else "25% flops"
    evaluate, calls = ShapePoint.evaluate, []

    def counting(*arguments, **more):
        calls.append(1)
        if len(calls) == most:
            raise KeyboardInterrupt
        return evaluate(*arguments, **more)

    monkeypatch.setattr(ShapePoint, "evaluate", counting)
    most = 0
    whole, needed = plan_shapes(model, data, budget, **options), len(calls)
    kept_then = starts + 2  # the dense model, for every unit of heads, and both strides
    assert needed >= kept_then + 2
    for most in (kept_then + 1, 2):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            plan_shapes(model, data, budget, resume=kept, **options)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    most = 0
    calls.clear()
    again = plan_shapes(model, data, budget, resume=kept, **options)
    assert len(calls) == needed - kept_then - 1 and again.digest == whole.digest and again.payload == whole.payload
    with pytest.raises(ModelMismatch):
        plan_shapes(model, data, "20% flops", resume=kept, **options)


@pytest.mark.parametrize(("budget", "gone"), [(0.10, 23), pytest.param(0.13, 30, marks=pytest.mark.slow)])
def test_an_even_plan_removes_no_more_channels_than_it_has_to(budget, gone):
    """Widths between those that were looked at count: with the coarse ones alone 24 and 48 of 192 went."""
    model, kinds = zoo.build("llama", intermediate_size=192), ("mlp",)
    plan = plan_shapes(model, zoo.tokens(), f"{budget * 100:g}% flops", even=True, kinds=kinds, multiple=1, passes=20, draws=1)
    removed = {s.removed for s in plan.payload.shapes.values() if s.kind == "mlp"}
    least = math.ceil(plan.budget["limit"] / (2 * 3 * 32 * 3))
    assert removed == {gone} == {least}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_plans_are_applied_recounted_and_measured(name):
    model, data = zoo.build(name), zoo.tokens()
    before = frozen(model)
    plan = plan_shapes(model, data, "25% flops", multiple=4, passes=30, draws=1, batch_size=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    log = plan.payload.path
    assert [e["share"] for e in log[:2]] == [0.5, 1.0] and log[-1]["values"] == plan.values.tolist()
    assert all(a["divergence"] > b["divergence"] for a, b in itertools.pairwise(log[1:]))
    assert plan.rule == "directional" and plan.payload.forward_passes <= 30 and plan.budget["spent"] >= plan.budget["limit"]
    assert plan.payload.measured == pytest.approx(measure_plan(model, plan, data, batch_size=4))
    with torch.no_grad():
        clean = torch.log_softmax(model(input_ids=data.input_ids).logits.float(), -1)
        receipt = apply_shapes(model, plan, data)
        nats, tokens = kl_of_sequences(model(input_ids=data.input_ids).logits, clean, data.attention_mask)
    assert receipt.saved == plan.budget["spent"]
    assert float(nats.sum() / tokens.sum()) == pytest.approx(plan.payload.measured, rel=1e-3)


def test_every_part_of_the_text_that_judges_has_answers():
    plan = plan_shapes(zoo.build("llama"), zoo.half_answered(10, 12), "10% flops", **QUICK)
    assert plan.payload.crossed and math.isfinite(plan.payload.measured) and math.isfinite(plan.payload.predicted)


def test_plans_are_applied_with_the_damping_that_they_were_measured_with():
    data, plans = (
        zoo.tokens(),
        [plan_shapes(zoo.build("llama"), zoo.tokens(), "25% flops", **QUICK, damping=d) for d in (0.01, 3.0)],
    )
    assert plans[0].payload.measured != plans[1].payload.measured
    for plan in plans:
        assert measure_plan(zoo.build("llama"), again(plan), data, batch_size=4) == pytest.approx(plan.payload.measured)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gone", [0, 2])
def test_plans_that_drop_an_end_of_the_stack_are_measured_against_the_dense_model(tmp_path, gone, stream):
    """The output of the dense model was made behind layers that were gone by then; weights that stay in their files failed."""
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    with torch.no_grad():
        for matrix in (model.model.layers[gone].self_attn.o_proj, model.model.layers[gone].mlp.down_proj):
            matrix.weight.mul_(1e-3)
    model.save_pretrained(tmp_path / "model")
    model = load_model(str(tmp_path / "model"), stream=stream)
    plan = plan_shapes(model, data, "33% flops", depth=1, compensate="refit", **QUICK)
    assert plan.payload.dropped == [f"model.layers.{gone}"]
    with torch.no_grad():
        clean = torch.log_softmax(model(input_ids=data.input_ids).logits, -1)
        apply_shapes(model, plan, data)
        nats, tokens = kl_of_sequences(model(input_ids=data.input_ids).logits, clean, data.attention_mask)
    assert float(nats.sum() / tokens.sum()) == pytest.approx(plan.payload.measured, rel=1e-4)


@pytest.mark.parametrize(("name", "budget"), [("qwen2-moe", "33% params"), ("llama", "27% params"), ("llama", "20% params")])
def test_plans_with_layers_gone_are_no_worse_than_without_and_keep_what_need_not_go(name, budget):
    """The first stride's plan met the budget and was left for one of thrice its damage; a layer went and cuts stayed."""
    model, data, plans = zoo.build(name), zoo.tokens(6, 16), dict[int, Plan]()
    options = {**QUICK, "strides": 2, "passes": 32.0, "batch_size": 8, "by": "groups"}
    for depth in (0, 1):
        with contextlib.suppress(InfeasibleBudget):
            plans[depth] = plan_shapes(model, data, budget, depth=depth, **options)
    whole, payload, limit = plans.get(0), plans[1].payload, plans[1].budget["limit"]
    assert payload.predicted == payload.path[-1]["divergence"] and plans[1].budget["spent"] >= limit
    assert payload.path[-1]["values"] == plans[1].values.tolist() and payload.forward_passes <= 32
    assert payload.predicted <= min(step["divergence"] for step in payload.path if saves(plans[1], step) >= limit)
    assert (whole is None) == (name == "qwen2-moe")
    if whole is not None:
        assert payload.predicted <= whole.payload.predicted
    assert bool(payload.dropped) == (budget != "20% params")
    if payload.dropped:
        assert payload.dropped == ["model.layers.2"] and not any(s.removed for s in payload.shapes.values())


def saves(plan, step):
    return sum(value * block.numel for value, block in zip(step["values"], plan.blocks, strict=True))


def test_trials_of_layers_continue_to_the_same_plan(tmp_path, monkeypatch):
    model, data, measure, calls = zoo.build("llama"), zoo.tokens(6, 16), ShapePoint.measure, []
    options = {**QUICK, "strides": 2, "passes": 32.0, "batch_size": 8, "by": "groups", "depth": 1}

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == most:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(ShapePoint, "measure", stopping)
    most = 0
    whole, needed = plan_shapes(model, data, "33% params", **options), len(calls)
    assert needed >= 2
    calls.clear()
    most = 2
    with pytest.raises(KeyboardInterrupt):
        plan_shapes(model, data, "33% params", resume=tmp_path / "kept", **options)
    calls.clear()
    most = 0
    again = plan_shapes(model, data, "33% params", resume=tmp_path / "kept", **options)
    assert len(calls) == needed - 1 and again.digest == whole.digest and again.payload == whole.payload


def test_depth_is_advised_where_layers_can_go():
    for name, advised in (("llama", True), ("mixtral", False), ("glm4-moe", False)):
        with pytest.raises(InfeasibleBudget) as caught:
            plan_shapes(zoo.build(name), zoo.tokens(), "60% params", kinds=("heads",))
        assert ("depth" in str(caught.value)) is advised, name


def test_auto_takes_the_units_that_promise_less():
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    plans = {by: plan_shapes(model, data, "30% flops", by=by, **QUICK) for by in ("auto", "groups", "queries")}
    promised = {by: plans[by].payload.path[0]["predicted"] for by in plans}
    best = min(("groups", "queries"), key=promised.__getitem__)
    assert plans["auto"].hyperparameters["by"] == best and promised["auto"] == promised[best]
    assert plans["auto"].payload.path[0]["passes"] == plans[best].payload.path[0]["passes"] + 4.0  # the other was looked at


def test_mixtures_lose_heads_and_keep_their_experts():
    model, data = zoo.build("mixtral"), zoo.tokens()
    plan = plan_shapes(model, data, "5% flops", kinds=("heads",), **QUICK)
    assert any(b.name.endswith(".rest") and b.count == 0 for b in plan.blocks)
    apply_shapes(model, plan, data)
    with pytest.raises(UnknownStructure, match="no plain MLP"):
        plan_shapes(zoo.build("mixtral"), data, "5% flops")


def test_layers_narrower_than_one_unit_keep_their_width():
    model, data = zoo.build("llama"), zoo.tokens(samples=8)
    remove_units(model, data, {"model.layers.1": 0.5}, kind="mlp")
    plan = plan_shapes(model, data, "20% flops", **{**QUICK, "multiple": 32})
    apply_shapes(model, plan, data)
    assert model.model.layers[1].mlp.up_proj.out_features == 24


def test_refusals():
    model, data = zoo.build("llama"), zoo.tokens()
    weights = frozen(model)
    for budget, options, error, match in (
        ("90% flops", {}, InfeasibleBudget, "save at most"),
        ("10% flops", {"multiple": 0}, InvalidInput, "multiple is 0"),
        ("10% flops", {"multiple": 64}, InvalidInput, "multiple is 64, and no MLP has as many.*widest has 48 channels.*Use 8"),
        ("10% flops", {"multiple": 64, "even": True}, InvalidInput, "multiple is 64"),
        ("20% flops", {"passes": 3}, InvalidInput, "With draws=. and strides=., .* forward equivalents are needed.*--passes"),
        ("20% flops", {"depth": -1}, InvalidInput, "depth is 0 or more"),
    ):
        with pytest.raises(error, match=match):
            plan_shapes(model, data, budget, **options)
    plan = plan_shapes(model, data, "20% flops", **QUICK)
    shapes = {n: dataclasses.replace(s, removed=min(s.removed + 1, s.units - 1)) for n, s in plan.payload.shapes.items()}
    with pytest.raises(CoverageError, match="were planned"):
        apply_shapes(copy.deepcopy(model), zoo.saying(plan, shapes=shapes), data)
    with pytest.raises(InvalidInput, match="holds no shapes"):
        apply_shapes(model, zoo.plan(model), data)
    with pytest.raises(ModelMismatch):
        apply_shapes(zoo.build("llama", num_hidden_layers=2), plan, data)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_command_line(folder, capsys):
    text = ["--data", str(folder / "text.txt"), "--samples", "4", "--length", "16", "--quiet", "--json"]
    model, plan, out = (str(folder / n) for n in ("model", "plan.json", "out"))

    def plan_it(*more):
        width = [] if "heads" in more else ["--multiple", "4"]
        return main(["plan", "shapes", model, *width, "--passes", "32", "-o", plan, *text, *more])

    assert plan_it("--save", "25% flops", "--even") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["kind"] == "shapes" and made["budget"]["spent"] >= made["budget"]["limit"]
    assert main(["apply", model, plan, "-o", out, *text]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["saved"] == done["planned"] == made["budget"]["spent"]
    smaller = load_model(out)
    assert sum(p.numel() for p in smaller.parameters()) == done["parameters_after"] < done["parameters_before"]
    for words, said in (
        (["--save", "25% flops"], "exists already"),
        (["--save", "95% flops", "--overwrite"], "save at most"),
        (["--save", "25% flops", "--overwrite", "--parts", "tails"], "Kinds are heads, mlp"),
        (["--save", "12% flops", "--overwrite", "--parts", "heads", "--multiple", "4"], "multiple has no meaning"),
    ):
        assert plan_it(*words) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert plan_it("--save", "4% flops", "--overwrite", "--parts", "heads", "--by", "queries") == 0
    follows = json.loads(capsys.readouterr().out)["next"]
    assert follows == f"layerbudget apply {model} {plan} -o DIR --format gguf"
    assert main([*shlex.split(follows.replace("DIR", str(folder / "written")))[1:], *text]) == 0
    capsys.readouterr()
    assert main(["apply", model, plan, "-o", str(folder / "uneven"), *text]) == 2
    assert "even=True" in capsys.readouterr().err
    assert not (folder / "uneven").exists()
    zoo.build("gemma").save_pretrained(folder / "model")  # nobody writes one whose layers differ
    assert plan_it("--save", "4% flops", "--overwrite", "--parts", "mlp") == 0
    follows = json.loads(capsys.readouterr().out)["next"]
    assert follows == f"layerbudget plan shapes {model} --save '4% flops' --even -o even.json"
    assert main([*shlex.split(follows.replace("even.json", str(folder / "even.json")))[1:], *text, "--multiple", "4"]) == 0
