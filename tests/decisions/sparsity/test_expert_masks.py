"""Wanda's masks on experts of every layout, against plain code: routing, inputs and the metric are computed here by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests import zoo

from layerbudget.decisions.sparsity.apply import prune

LAYOUTS = {
    "gpt-oss": "mlp", "llama4": "feed_forward", "phimoe": "mlp", "mixtral": "mlp", "qwen3-moe": "mlp",
}  # fmt: skip


def chosen(name, block, x):
    """Which experts every token of ``(T, d)`` is given, ``(T, E)``, and what it is scaled by before they see it."""
    router = block.router if hasattr(block, "router") else block.gate
    logits = F.linear(x, router.weight, getattr(router, "bias", None))
    if name == "phimoe":  # the best, and then the best of the others
        first = logits.argmax(-1)
        second = logits.scatter(1, first[:, None], -torch.inf).argmax(-1)
        index = torch.stack([first, second], 1)
    else:
        index = logits.topk(1 if name == "llama4" else 2).indices
    given = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, True)
    return given, logits.sigmoid() if name == "llama4" else torch.ones_like(logits)


def first_and_last(name, experts, e):
    """Both matrices of an expert as ``(outputs, inputs)``, and what the second reads of tokens ``(T, d)``."""
    first, last = experts.gate_up_proj[e], experts.down_proj[e]
    if name in ("gpt-oss", "llama4"):
        first, last = first.T, last.T

    def between(x):
        both = x @ first.T
        if name == "gpt-oss":  # gate and up by turns, clamped
            both = both + experts.gate_up_proj_bias[e]
            gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        return F.silu(gate) * up

    return first, last, between


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_masks_of_every_expert_are_wandas_on_its_own_tokens(name):
    changes = {"interleave_moe_layer_step": 1} if name == "llama4" else {}
    model, data = zoo.build(name, num_hidden_layers=2, **changes), zoo.tokens(8, 16)
    if name == "gpt-oss":
        for n, p in model.named_parameters():
            if n.endswith("_bias") or n.endswith("router.bias"):
                p.normal_(0, 0.1)
    dense = zoo.build(name, num_hidden_layers=2, **changes)
    dense.load_state_dict(model.state_dict())
    plan = zoo.plan(model)
    prune(model, plan, data, "wanda", 4)
    pruned, checked = model.state_dict(), 0
    for layer in range(2):
        block = getattr(dense.model.layers[layer], LAYOUTS[name])
        seen = {}
        handle = block.register_forward_pre_hook(lambda m, a, seen=seen: seen.update(x=a[0].flatten(0, 1).clone()))
        dense(**next(data.batches(data.samples)))
        handle.remove()
        wanted = plan.blocks[layer].value
        given, scale = chosen(name, block, seen["x"])
        now = getattr(model.model.layers[layer], LAYOUTS[name]).experts
        for e in range(block.experts.down_proj.shape[0]):
            x = seen["x"][given[:, e]] * scale[given[:, e], e, None]
            assert len(x) > 1
            first, last, between = first_and_last(name, block.experts, e)
            new = first_and_last(name, now, e)[:2]
            for w, inputs, after in ((first, x, new[0]), (last, between(x), new[1])):
                metric, zero = w.abs() * inputs.norm(dim=0), after == 0
                count = zero.sum(1)
                assert int(count.max() - count.min()) <= 1 and count.sum() == pytest.approx(wanted * zero.numel(), abs=1)
                ranks = metric.argsort(1).argsort(1)
                assert torch.equal(zero, ranks < count[:, None]), (layer, e)
                assert torch.equal(after[~zero], w[~zero]), "what stays is as it was"
                checked += zero.numel()
        for key in (k for k in pruned if f"layers.{layer}." in k):  # later layers read what the pruned ones return
            dense.state_dict()[key].copy_(pruned[key])
    assert checked == sum(p.numel() for n, p in model.named_parameters() if p.ndim == 3)
