"""What may not change a score: batch size, padding side, order of samples and blocks, checkpointing, precision."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from layerbudget.errors import CoverageError
from layerbudget.execution.loss import FeatureSet
from layerbudget.models.blocks import partition, weight_of
from layerbudget.sensitivity.gain import score

SIGNALS = ("fisher-trace", "outlier-ratio", "spectral-tail", "ablation", "block-influence", "layerif", "reconstruction")
OPTIONS = {"outlier-ratio": {"multiple": 2.0}}


def values(model, data, name, blocks=None, **options):
    if name == "layerif":
        options["validation"] = data.select([1, 3])
    return score(model, data, blocks or partition(model), name, **OPTIONS.get(name, {}), **options).values()


def left(data):
    """The same sequences with their padding in front."""
    ids, mask = torch.zeros_like(data.input_ids), torch.zeros_like(data.attention_mask)
    for i, n in enumerate(data.attention_mask.sum(1).tolist()):
        ids[i, -n:], mask[i, -n:] = data.input_ids[i, :n], 1
    return dataclasses.replace(data, input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("name", SIGNALS)
def test_invariances(mistral, padded, name):
    expected = values(mistral, padded, name)
    assert np.isfinite(expected).all() and np.ptp(expected) > 0
    close = {"rel": 2e-3 if name == "layerif" else 2e-4, "abs": 1e-6}
    if name != "spectral-tail":  # which reads weights only
        assert values(mistral, padded, name, batch_size=1) == pytest.approx(expected, **close)
    assert values(mistral, left(padded), name) == pytest.approx(expected, **close)
    blocks = partition(mistral)
    assert values(mistral, padded, name, blocks[::-1])[::-1] == pytest.approx(expected, **close)
    if name != "layerif":  # its validation rows are chosen by place
        assert values(mistral, padded.select([5, 3, 1, 0, 2, 4]), name) == pytest.approx(expected, **close)
    mistral.gradient_checkpointing_enable()
    assert values(mistral, padded, name) == pytest.approx(expected, **close)
    mistral.gradient_checkpointing_disable()


@pytest.mark.parametrize("name", SIGNALS)
def test_half_precision_keeps_the_values_within_a_few_percent(mistral, padded, name):
    exact, half = values(mistral, padded, name), values(copy.deepcopy(mistral).bfloat16(), padded, name)
    scale = np.abs(exact).max()
    tolerance = {"ablation": 0.2, "layerif": 0.2, "spectral-tail": 0.15}.get(name, 0.05)  # the best threshold may be another
    assert np.abs(half - exact).max() / scale < tolerance


@pytest.mark.parametrize("name", SIGNALS)
def test_everything_is_put_back(mistral, padded, name):
    mistral.train()
    mistral.model.layers[0].mlp.up_proj.weight.grad = torch.ones(40, 24)
    mistral.model.layers[1].requires_grad_(False)
    before = {k: v.clone() for k, v in mistral.state_dict().items()}
    flags = [p.requires_grad for p in mistral.parameters()]
    values(mistral, padded, name)
    assert mistral.training and [p.requires_grad for p in mistral.parameters()] == flags
    assert torch.equal(mistral.model.layers[0].mlp.up_proj.weight.grad, torch.ones(40, 24))
    assert all(torch.equal(before[k], v) for k, v in mistral.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in mistral.modules())


@pytest.fixture
def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32, initializer_range=0.15,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def test_fused_experts(mixtral, data):
    """The trace equals a loop over sequences; LayerIF and the spectra cover the experts; OWL says that it cannot."""
    blocks = partition(mixtral)
    assert any(m.copies > 1 for m in blocks[0].modules)
    parameters = [[weight_of(mixtral, m.name)[1] for m in b.modules] for b in blocks]
    expected = np.zeros(2)
    for ids in data.input_ids:
        loss = F.cross_entropy(mixtral(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        for k, group in enumerate(parameters):
            g = torch.autograd.grad(loss, group, retain_graph=True)
            expected[k] += sum(x.square().sum().item() for x in g) / (6 * 9)
    assert values(mixtral, data, "fisher-trace") == pytest.approx(expected, rel=1e-4)
    assert np.isfinite(values(mixtral, data, "layerif")).all()
    assert np.isfinite(values(mixtral, data, "spectral-tail")).all()
    with pytest.raises(CoverageError, match="inputs of"):
        values(mixtral, data, "outlier-ratio")


def test_plain_classifier():
    """An MLP on features, one block per Linear: ablation zeroes a layer's output, bias included."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)
    )
    data = FeatureSet(inputs=torch.randn(12, 5), labels=torch.arange(12) % 3)
    blocks = partition(model, by="linear")
    for name in SIGNALS[:4]:
        assert np.isfinite(values(model, data, name, blocks)).all()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight.zero_()
        other[2].bias.zero_()
        change = F.cross_entropy(other(data.inputs), data.labels) - F.cross_entropy(model(data.inputs), data.labels)
    assert values(model, data, "ablation", blocks)[1] == pytest.approx(change.item(), abs=1e-6)
    assert np.isfinite(values(model, data, "layerif", blocks)).all()
