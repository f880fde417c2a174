"""Models without some layers: they load, they compute what they should, and damage is per token."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.shapes.depth import apply_depth, drop_damage, drop_layers, plan_depth
from layerbudget.decisions.shapes.save import save_smaller
from layerbudget.errors import InfeasibleBudget, UnknownBlock
from layerbudget.models.blocks import layers

CAUSAL = [
    "llama", "mistral-sliding", "gemma", "gemma2", "gemma3", "qwen2", "qwen3", "phi3", "opt", "gpt2", "gpt-neox", "olmo2",
    "starcoder2",
]  # fmt: skip


def skip_reference(model, index, batch):
    """Logits with one layer skipped, by a forward hook that puts the layer's input back."""
    held = {}
    layer = layers(model)[index][1]

    def before(m, a, k):
        held["x"] = a[0] if a else k["hidden_states"]

    def after(m, a, out):
        return (held["x"], *out[1:]) if isinstance(out, tuple) else held["x"]

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    with torch.no_grad():
        logits = model(**batch).logits
    for h in hooks:
        h.remove()
    return logits


@pytest.mark.parametrize("name", [*CAUSAL, "mixtral", "bert"])
def test_dropped_layer_equals_skipped_layer_and_loads_again(name, tmp_path):
    model, data = zoo.build(name), zoo.tokens()
    batch = next(data.batches(len(data)))
    wanted = skip_reference(model, 1, batch)
    smaller = drop_layers(copy.deepcopy(model), [layers(model)[1][0]])
    with torch.no_grad():
        torch.testing.assert_close(smaller(**batch).logits, wanted, rtol=1e-4, atol=1e-4)
    save_smaller(smaller, None, tmp_path / "out")
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert loaded.config.num_hidden_layers == 2
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, wanted, rtol=1e-4, atol=1e-4)


def test_depth_plan_removes_the_layer_that_does_nothing():
    model, data = zoo.build("llama"), zoo.tokens()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e-3)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-3)
    damage = drop_damage(model, data)
    batch = next(data.batches(len(data)))
    with torch.no_grad():
        p = torch.log_softmax(model(**batch).logits, -1)
    for i, (name, _) in enumerate(layers(model)):
        q = torch.log_softmax(skip_reference(model, i, batch), -1)
        assert damage[name] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3, abs=1e-6)
    plan = plan_depth(model, data, remove=2)
    assert plan.extra["removed"][0] == "model.layers.1"
    assert plan.counts.tolist().count(0) == 1 and len(plan.extra["damage"]) == 2
    assert all("forward" not in layer.__dict__ for _, layer in layers(model))
    assert len(layers(apply_depth(model, plan))) == 1


def test_refusals():
    model, data = zoo.build("llama"), zoo.tokens()
    with pytest.raises(UnknownBlock, match="model.layers.9"):
        drop_layers(model, ["model.layers.9"])
    with pytest.raises(InfeasibleBudget, match="Remove fewer"):
        plan_depth(model, data, remove=3)


def test_damage_is_per_token_and_not_per_sequence():
    """With rows of different lengths the two are different quantities; everything else averages over tokens."""
    model, data = zoo.build("llama"), zoo.tokens(samples=4)
    mask = (torch.arange(16)[None] < torch.tensor([3, 5, 9, 16])[:, None]).long()
    padded = CalibrationSet(input_ids=data.input_ids * mask, attention_mask=mask)
    damage = drop_damage(model, padded, batch_size=2)
    batch = {"input_ids": padded.input_ids, "attention_mask": mask}
    with torch.no_grad():
        p = torch.log_softmax(model(**batch).logits, -1)
    for i, (name, _) in enumerate(layers(model)):
        q = torch.log_softmax(skip_reference(model, i, batch), -1)
        each = (p.exp() * (p - q)).sum(-1) * mask
        assert damage[name] == pytest.approx(float(each.sum() / mask.sum()), rel=1e-3)
        assert abs(float((each.sum(1) / mask.sum(1)).mean()) / damage[name] - 1) > 0.01


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count_in_the_damage_of_a_dropped_layer(side):
    model, data = zoo.build("llama"), zoo.tokens(samples=4)
    plain = drop_damage(model, data)
    filler, blank = torch.full((4, 5), 3), torch.zeros(4, 5, dtype=torch.long)
    join = (lambda x, p: torch.cat([p, x], 1)) if side == "left" else (lambda x, p: torch.cat([x, p], 1))
    mask = torch.ones_like(data.input_ids)
    padded = CalibrationSet(input_ids=join(data.input_ids, filler), attention_mask=join(mask, blank))
    if side == "right":  # positions are those of the unpadded text
        assert drop_damage(model, padded) == pytest.approx(plain, rel=1e-4)
    else:
        assert all(v > 0 for v in drop_damage(model, padded).values())
