"""The mixture as a PEFT method: save and load, Trainer, checkpointing, bf16, merging, deleting."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from peft import PeftModel, get_peft_model
from tests import zoo
from torch import nn

from layerbudget.decisions.lora_experts.layer import ExpertsLinear
from layerbudget.decisions.lora_experts.method import ExpertsConfig, adapted_experts, add_lora_experts, to_experts_config
from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.reporting.explain import explain_plan

COUNTS = [2, 3, 0, 5]


def config_for(model, counts=COUNTS, **options) -> ExpertsConfig:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layer" in n]
    layer_of = {n: int(re.search(r"layers?\.(\d+)", n).group(1)) for n in names}
    used = [n for n in names if counts[layer_of[n]]]
    pattern = {re.escape(n): counts[layer_of[n]] for n in used}
    return ExpertsConfig(r=4, lora_alpha=8, target_modules=used, experts_pattern=pattern, **options)


def ids(rows=3, length=9):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(2))


def logits_of(model, **batch):
    with torch.no_grad():
        return model(input_ids=ids(), **batch).logits


def test_a_layers_count_goes_to_each_of_its_modules():
    plan = zoo.layers(zoo.adaptable(), COUNTS)
    adapted = add_lora_experts(zoo.adaptable(), plan, rank=4, lora_alpha=16)
    expected = {m: b.count for b in plan.blocks for m in b.modules if b.count}
    assert adapted_experts(adapted) == expected
    planned = 0
    for name, count in expected.items():
        module = adapted.get_submodule(f"base_model.model.{name}")
        assert isinstance(module, ExpertsLinear) and module.lora_experts_A["default"].weight.shape == (count * 4, module.d_in)
        planned += count * 4 * (module.d_in + module.d_out) + count * module.d_in
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == planned


def test_a_configuration_that_misses_a_module_another_kind_and_an_empty_plan_are_refused():
    model = zoo.adaptable()
    plan = zoo.layers(model, [2, 2, 2, 2])
    config = to_experts_config(plan)
    del config.experts_pattern["model\\.layers\\.2\\.mlp\\.up_proj"]
    with pytest.raises(CoverageError, match=r"model\.layers\.2\.mlp\.up_proj was not adapted; the plan gives it experts 2"):
        add_lora_experts(model, plan, config=config)
    with pytest.raises(InvalidInput, match="kind ranks gives no experts"):
        to_experts_config(zoo.linears(model, 2))
    with pytest.raises(InvalidInput, match="zero experts"):
        to_experts_config(zoo.layers(model, [0, 0, 0, 0]))


def test_starts_equal_to_the_base_and_disables():
    base = zoo.adaptable()
    expected = logits_of(base)
    model = get_peft_model(zoo.adaptable(), config_for(base)).eval()
    assert torch.equal(logits_of(model), expected)
    zoo.perturb(model)
    assert not torch.allclose(logits_of(model), expected, atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("make", [zoo.adaptable, zoo.classifier])
def test_a_saved_adapter_gives_the_same_on_its_saved_base(make, tmp_path):
    base = make()
    base.save_pretrained(tmp_path / "base")
    options = {} if make is zoo.adaptable else {"task_type": "SEQ_CLS", "modules_to_save": ["pooler"]}
    model = get_peft_model(base, config_for(base, [2, 1, 0, 5], **options)).eval()
    zoo.perturb(model)
    zoo.perturb(model, "modules_to_save", scale=0.2)
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA_EXPERTS"
    loaded = PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_transformers_loads_the_adapter_too(tmp_path):
    model = get_peft_model(zoo.adaptable(), config_for(zoo.adaptable())).eval()
    zoo.perturb(model)
    model.save_pretrained(tmp_path)
    other = zoo.adaptable()
    other.load_adapter(str(tmp_path))
    assert torch.equal(logits_of(other), logits_of(model))


def test_second_adapter_delete_copy_and_low_memory_load(tmp_path):
    model = get_peft_model(zoo.adaptable(), config_for(zoo.adaptable())).eval()
    zoo.perturb(model)
    first = logits_of(model)
    model.add_adapter("other", config_for(zoo.adaptable(), [1, 1, 4, 2]))
    model.set_adapter("other")
    assert not torch.allclose(logits_of(model), first)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin), logits_of(model))
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits_of(model), first)
    model.save_pretrained(tmp_path)
    light = PeftModel.from_pretrained(zoo.adaptable(), tmp_path, low_cpu_mem_usage=True, adapter_name="renamed").eval()
    assert torch.equal(logits_of(light), first)


def test_merging_is_refused_before_anything_changes():
    mixture = get_peft_model(zoo.adaptable(), config_for(zoo.adaptable()))
    before = {n: p.clone() for n, p in mixture.named_parameters()}
    for merge in (mixture.merge_and_unload, mixture.merge_adapter):
        with pytest.raises(InvalidInput, match="depends on the token"):
            merge()
    assert all(torch.equal(before[n], p) for n, p in mixture.named_parameters())
    assert torch.equal(logits_of(mixture.unload()), logits_of(zoo.adaptable()))


def test_padding_does_not_move_the_balance_gradient():
    """Left-over padding columns change neither the outputs of real tokens nor the router's balance gradient.

    In float64: the perturbed model amplifies float32 rounding a thousandfold, and kernels differ between processors.
    """

    def gradient(padding):
        model = (
            get_peft_model(zoo.classifier(), config_for(zoo.classifier(), [3, 3, 3, 3], balance_coefficient=1.0))
            .train()
            .double()
        )
        zoo.perturb(model)
        batch = torch.cat([ids(), torch.zeros(3, padding, dtype=torch.long)], 1)
        mask = torch.cat([torch.ones(3, 9, dtype=torch.long), torch.zeros(3, padding, dtype=torch.long)], 1)
        model(input_ids=batch, attention_mask=mask).logits.mul(0).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if "router" in n}

    none, some = gradient(0), gradient(4)
    assert max(g.abs().max() for g in none.values()) > 1e-4
    for name in none:
        assert torch.allclose(none[name], some[name], rtol=0, atol=1e-10), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    def gradients(checkpoint):
        model = get_peft_model(zoo.adaptable(), config_for(zoo.adaptable(), balance_coefficient=0.1)).train()
        zoo.perturb(model)
        if checkpoint:
            model.enable_input_require_grads()
            zoo.checkpoint_activations(model, reentrant=reentrant)
        model(input_ids=ids(), labels=ids()).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    assert all(torch.equal(plain[n], checkpointed[n]) for n in plain)


def test_bf16_base_and_autocast_stay_close_to_float32():
    model = get_peft_model(zoo.adaptable(), config_for(zoo.adaptable(), [1, 1, 1, 1])).eval()
    zoo.perturb(model, scale=0.1)
    expected = logits_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        low = logits_of(model)
    assert (low.float() - expected).norm() / expected.norm() < 0.05
    half = get_peft_model(zoo.adaptable().bfloat16(), config_for(zoo.adaptable(), [2, 2, 2, 2]))
    assert {p.dtype for n, p in half.named_parameters() if p.requires_grad} == {torch.float32}
    half(input_ids=ids(), labels=ids()).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters() if p.requires_grad)


def test_unknown_module_kind_is_refused_by_name():
    with pytest.raises(InvalidInput, match="embed_tokens is a Embedding"):
        get_peft_model(zoo.adaptable(), ExpertsConfig(target_modules=["embed_tokens"], experts=2))


@pytest.mark.parametrize("wrong", [{"r": 0}, {"top_k": 0}, {"lora_dropout": 1.0}, {"experts_pattern": {"a": -1}}])
def test_impossible_options_are_refused(wrong):
    with pytest.raises(InvalidInput):
        ExpertsConfig(target_modules=["x"], **wrong)


def test_one_expression_leaves_out_all_that_gets_no_expert():
    """Each of two errors advised an expression that brought the other one back."""
    model = zoo.build("glm4-moe")
    for exclude in (None, r"experts[.]", r"(mlp|shared_experts)[.](down_proj|gate_proj|up_proj)$"):
        plan = plan_lora_experts(partition(model, "layer", exclude=exclude), total=6, rule="uniform", expert_rank=2)
        with pytest.raises(CoverageError) as error:
            add_lora_experts(model, plan)
        advised = re.search("Score with --exclude '(.*)' and plan again", str(error.value))[1]
        plan = plan_lora_experts(partition(model, "layer", exclude=advised), total=6, rule="uniform", expert_rank=2)
        assert sum(adapted_experts(add_lora_experts(zoo.build("glm4-moe"), plan), "default").values()) >= 6


def test_a_budget_in_parameters_says_that_routers_come_on_top():
    scores = zoo.scores([3.0, 1.0])
    plan = plan_lora_experts(scores, budget="100k params", expert_rank=2)
    said = " ".join(explain_plan(plan).sentences)
    assert plan.counts.max() > 1 and "Routers come on top of the budget" in said
    assert "Routers" not in " ".join(explain_plan(plan_lora_experts(scores, total=4)).sentences)
