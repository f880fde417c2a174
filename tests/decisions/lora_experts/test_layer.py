"""The layer against its definition, outputs and every gradient; the balance loss."""

from __future__ import annotations

import pytest
import torch
from tests import zoo
from torch import nn

from layerbudget.decisions.lora_experts.layer import ExpertsLinear, Routing, balance_loss, route
from layerbudget.decisions.lora_experts.method import ExpertsConfig


def module(experts: int, top_k: int = 2, r: int = 3, dtype=torch.float32, **options) -> ExpertsLinear:
    torch.manual_seed(experts)
    config = ExpertsConfig(r=r, lora_alpha=6, top_k=top_k, init_weights=False, target_modules=["x"], **options)
    layer = ExpertsLinear(nn.Linear(12, 10), "default", experts, config, Routing()).to(dtype)
    layer.base_layer.requires_grad_(False)
    return layer


def gradients(output, layer, x):
    weights = [layer.lora_experts_A["default"].weight, layer.lora_experts_B["default"].weight]
    if "default" in layer.lora_experts_router:
        weights.append(layer.lora_experts_router["default"].weight)
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return torch.autograd.grad((output * probe).sum(), [x, *weights])


def compare(first, second, tolerance):
    for one, two in zip(first, second, strict=True):
        scale = max(1.0, two.abs().max().item())
        assert (one - two).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("experts", [2, 5, 8, 10])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_layer_equals_definition(experts, dtype, tolerance):
    layer = module(experts, dtype=dtype)
    x = torch.randn(2, 7, 12, dtype=dtype, requires_grad=True)
    a, b, router = (layer.get_submodule(f"lora_experts_{n}.default").weight for n in ("A", "B", "router"))
    expected = layer.base_layer(x) + zoo.mixture(x, a, b, router, 3, 2, 2.0)
    compare([layer(x)], [expected], tolerance)
    compare(gradients(layer(x), layer, x), gradients(expected, layer, x), tolerance)


@pytest.mark.parametrize("top_k", [1, 3, 9])
def test_top_k(top_k):
    layer = module(4, top_k=top_k, dtype=torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64)
    a, b, router = (layer.get_submodule(f"lora_experts_{n}.default").weight for n in ("A", "B", "router"))
    compare([layer(x)], [layer.base_layer(x) + zoo.mixture(x, a, b, router, 3, top_k, 2.0)], 1e-12)


def test_a_hook_or_a_wrapper_sees_the_leaves():
    """With a forward hook on a leaf (FSDP, ZeRO-3, a score) the leaf is called, not read; the result is the same."""
    layer = module(5, dtype=torch.float64)
    x = torch.randn(4, 12, dtype=torch.float64)
    merged = layer(x)
    seen = []
    for leaf in ("A", "B", "router"):
        layer.get_submodule(f"lora_experts_{leaf}.default").register_forward_hook(lambda *_: seen.append(1))
    compare([layer(x)], [merged], 1e-13)
    assert len(seen) == 3


def test_second_derivatives_and_per_sample_gradients():
    """Curvature in adapter space differentiates twice; per-sample gradients go through torch.func."""
    layer = module(3, dtype=torch.float64)
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: layer(v), (x,))
    weights = {n: p for n, p in layer.named_parameters() if "lora_" in n}

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row,)).square().sum()

    rows = x.detach()
    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)
    for i, row in enumerate(rows):
        alone = torch.autograd.grad(loss(weights, row), list(weights.values()))
        compare([g[i] for g in together.values()], alone, 1e-12)


def test_one_expert_is_lora_without_router():
    layer = module(1, dtype=torch.float64)
    assert not list(layer.lora_experts_router)
    x = torch.randn(4, 12, dtype=torch.float64)
    a, b = layer.lora_experts_A["default"].weight, layer.lora_experts_B["default"].weight
    compare([layer(x)], [layer.base_layer(x) + 2.0 * x @ a.T @ b.T], 1e-13)


def test_starts_at_the_base_model():
    torch.manual_seed(0)
    base = nn.Linear(12, 10)
    layer = ExpertsLinear(base, "default", 4, ExpertsConfig(target_modules=["x"]), Routing())
    x = torch.randn(4, 12)
    assert torch.equal(layer(x), base(x))


def test_dropout_is_one_mask_per_module_and_spares_the_router():
    layer = module(4, lora_dropout=0.5, dtype=torch.float64).train()
    x = torch.randn(6, 12, dtype=torch.float64)
    torch.manual_seed(3)
    got = layer(x)
    torch.manual_seed(3)
    dropped = nn.functional.dropout(x, 0.5)
    a, b, router = (layer.get_submodule(f"lora_experts_{n}.default").weight for n in ("A", "B", "router"))
    gate = 2.0 * route(x @ router.T, 2).repeat_interleave(3, dim=-1)
    compare([got], [layer.base_layer(x) + (dropped @ a.T * gate) @ b.T], 1e-12)


def test_balance_loss_is_one_when_balanced_and_counts_no_padding():
    logits = torch.eye(4).repeat(3, 1) * 5
    gate = route(logits, 1)
    assert balance_loss(logits, gate).item() == pytest.approx(1.0, abs=1e-6)
    padded = torch.cat([logits, torch.tensor([[9.0, 0, 0, 0]]).repeat(5, 1)])
    mask = torch.tensor([1] * 12 + [0] * 5).bool()
    assert balance_loss(padded, route(padded, 1), mask).item() == pytest.approx(1.0, abs=1e-6)
    assert balance_loss(padded, route(padded, 1)).item() > 1.2


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_balance_gradient_reaches_the_router_through_any_loss(scale):
    layer = module(4, balance_coefficient=0.5, dtype=torch.float64).train()
    layer.routing.scale = scale
    x = torch.randn(6, 12, dtype=torch.float64)
    router = layer.lora_experts_router["default"].weight
    probe = torch.randn(6, 10, dtype=torch.float64)
    (with_balance,) = torch.autograd.grad((layer(x) * probe).sum(), router)
    layer.lora_experts_balance["default"] = 0.0
    (without,) = torch.autograd.grad((layer(x) * probe).sum(), router)
    logits = x @ router.T
    (expected,) = torch.autograd.grad(0.5 * scale * balance_loss(logits, route(logits, 2)), router)
    compare([with_balance - without], [expected], 1e-6)
    assert expected.abs().max() > 1e-4


def test_eval_mode_carries_no_balance_gradient():
    layer = module(4, balance_coefficient=0.5, dtype=torch.float64).eval()
    reference = module(4, dtype=torch.float64).eval()
    x = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    compare(gradients(layer(x), layer, x), gradients(reference(x), reference, x), 0.0)
