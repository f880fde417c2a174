"""Every architecture, end to end: the recount equals the plan, the walk equals the model."""

from __future__ import annotations

import copy

import pytest
import torch
from tests import zoo

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.receipt import recount
from layerbudget.execution.modes import inference
from layerbudget.execution.walk import Walk
from layerbudget.models.blocks import layers

NAMES = [
    "llama", "llama-tied", "mistral", "mistral-sliding", "gemma", "gemma2", "gemma3", "qwen2", "qwen3", "phi3", "opt", "gpt2",
    "gpt-neox", "olmo2", "starcoder2", "mixtral", "phimoe", "gpt-oss", "llama4", "nemotron-h", "zaya",
    "bert", "roberta-classifier",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True])
def test_walk_gives_every_block_the_inputs_that_the_model_gives_it(name, padded):
    model, data = zoo.build(name), zoo.tokens(padded=padded)
    seen = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda m, a, k, i=i: seen.update({i: (a[0] if a else k["hidden_states"]).clone()}), with_kwargs=True
        )
        for i, (_, layer) in enumerate(layers(model))
    ]
    with inference(model):
        logits = model(**next(data.batches(len(data)))).logits
        for h in handles:
            h.remove()
        walk = Walk(model, data, batch_size=4)
        walk.capture()
        for i in range(len(walk)):
            stored = torch.cat([walk.store.get(b) for b in range(walk.batches)])
            if name != "zaya" or i == 0:  # behind its first layer the states of the router before stand beside the hidden ones
                assert stored.shape == seen[i].shape
            torch.testing.assert_close(stored[..., : seen[i].shape[-1]], seen[i], rtol=1e-5, atol=1e-5)
            restarted = []
            for b in range(walk.batches):
                with walk.replay.begin(i, walk.store.get(b)):
                    restarted.append(model(**walk.inputs(b)).logits)
            torch.testing.assert_close(torch.cat(restarted), logits, rtol=1e-4, atol=1e-4)
            if i + 1 < len(walk):
                walk.advance()
        walk.close()
    assert all("forward" not in layer.__dict__ for _, layer in layers(model))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_recount_equals_plan(name, method):
    model, data = zoo.build(name), zoo.tokens()
    before = copy.deepcopy(model.state_dict())
    plan = zoo.plan(model)
    receipt = prune(model, plan, data, method, 4)
    found = recount(model, plan.blocks)
    assert {b.name: b.count for b in plan.blocks} == {n: r["zeros"] for n, r in found["blocks"].items()}
    assert receipt.sparsity == found["sparsity"] == receipt.planned
    assert bool(torch.isfinite(model(**next(data.batches(2))).logits).all())
    planned = {m for b in plan.blocks for m in b.modules}
    for key, value in model.state_dict().items():
        if key not in planned and key.removesuffix(".weight") not in planned:
            assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_linear_granularity(name, method):
    model = zoo.build(name)
    plan = zoo.plan(model, by="linear")
    prune(model, plan, zoo.tokens(), method, 4)
    found = recount(model, plan.blocks)
    assert {b.name: b.count for b in plan.blocks} == {n: r["zeros"] for n, r in found["blocks"].items()}
