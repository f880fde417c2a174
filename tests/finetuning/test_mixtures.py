"""Plans of experts: counts by layer, recount, costs counted once."""

from __future__ import annotations

import pytest
import torch
from tests import zoo
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from layerbudget.decisions.experts.balance import Routing
from layerbudget.decisions.experts.method import ExpertsConfig, ExpertsLinear
from layerbudget.decisions.experts.mixtures import adapted_experts, add_experts, expert_costs, to_experts_config
from layerbudget.errors import CoverageError, InvalidInput


def test_a_layers_count_goes_to_each_of_its_modules():
    model = zoo.adaptable()
    plan = zoo.layers(model, [2, 0, 1, 5])
    adapted = add_experts(model, plan, lora_alpha=16)
    expected = {m: b.count for b in plan.blocks for m in b.modules if b.count}
    assert adapted_experts(adapted) == expected
    shapes = {n: (m.in_features, m.out_features) for n, m in zoo.adaptable().named_modules() if isinstance(m, nn.Linear)}
    planned = sum(expert_costs({n: shapes[n]}, 8, e)["parameters"] for n, e in expected.items())
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == planned


def test_works_for_an_encoder_with_a_head():
    model = zoo.classifier()
    plan = zoo.layers(model, [3, 1, 2, 0])
    adapted = add_experts(model, plan, task_type="SEQ_CLS", modules_to_save=["pooler"])
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert any("pooler" in n for n in trained) and any("classifier" in n for n in trained)
    assert adapted(input_ids=torch.randint(3, 61, (2, 5)), labels=torch.tensor([0, 1])).loss.requires_grad


def test_a_configuration_that_misses_a_module_is_refused_with_the_name():
    model = zoo.adaptable()
    plan = zoo.layers(model, [2, 2, 2, 2])
    config = to_experts_config(plan)
    del config.experts_pattern["model\\.layers\\.2\\.mlp\\.up_proj"]
    with pytest.raises(CoverageError, match=r"model\.layers\.2\.mlp\.up_proj was not adapted; the plan gives it experts 2"):
        add_experts(model, plan, config=config)


def test_another_kind_and_an_empty_plan_are_refused():
    model = zoo.adaptable()
    with pytest.raises(InvalidInput, match="kind 'ranks'"):
        to_experts_config(zoo.linears(model, 2))
    with pytest.raises(InvalidInput, match="zero experts"):
        to_experts_config(zoo.layers(model, [0, 0, 0, 0]))


@pytest.mark.parametrize("experts", [1, 2, 8])
def test_costs_are_what_runs(experts):
    """The counted FLOPs are PyTorch's own count of the fused form; parameters are the trained ones."""
    layer = ExpertsLinear(nn.Linear(16, 24), "default", experts, ExpertsConfig(r=4, target_modules=["x"]), Routing())
    x = torch.randn(5, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    costs = expert_costs({"m": (16, 24)}, 4, experts)
    spread = 2 * experts * experts * 4 if experts > 1 else 0  # the 0/1 product that repeats the gate over ranks
    assert counter.get_total_flops() == 5 * (2 * 16 * 24 + costs["flops_dense"] + spread)
    assert costs["parameters"] == sum(p.numel() for n, p in layer.named_parameters() if "lora_" in n)
    assert costs["flops_paper"] == 2 * 4 * (16 + 24) * experts
    assert costs["flops_top_k"] == 2 * 4 * (16 + 24) * min(2, experts) + (2 * 16 * experts if experts > 1 else 0)


def test_merged_execution_vanishes_for_long_sequences():
    short = expert_costs({"m": (64, 64)}, 8, 4, length=1)["flops_merged"]
    assert short == 2 * 2 * 8 * 64 * 64 + 2 * 64 * 4
    assert expert_costs({"m": (64, 64)}, 8, 4, length=4096)["flops_merged"] == pytest.approx(short / 4096)
