"""Ablation and block influence against models that really lack the block."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests import zoo
from transformers import MixtralConfig, MixtralForCausalLM

from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.models.blocks import layers, partition
from layerbudget.sensitivity.ablation import ablation, block_influence
from layerbudget.sensitivity.curvature.diagonal import score_trace as fisher_trace


def mean_loss(model, data):
    """Mean token loss, one sequence at a time, real tokens only."""
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(data.samples):
            real = data.length if data.attention_mask is None else int(data.attention_mask[i].sum())
            ids = data.input_ids[i : i + 1, :real]
            total += F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
            count += real - 1
    return total / count


@pytest.mark.parametrize("family", ["mistral", "gemma", "gpt2"])
def test_equals_a_model_without_the_layer(request, family, data, padded):
    model = request.getfixturevalue(family)
    for d in (data, padded):
        scores = ablation(model, d, partition(model), batch_size=4)
        for k in range(3):
            shorter = copy.deepcopy(model)
            stack = shorter.transformer.h if family == "gpt2" else shorter.model.layers
            del stack[k]
            shorter.config.num_hidden_layers, shorter.config.use_cache = 2, False
            expected = mean_loss(shorter, d) - mean_loss(model, d)
            assert scores.values()[k] == pytest.approx(expected, abs=2e-6)


def test_single_matrix_is_silenced(mistral, data):
    blocks = partition(mistral, by="linear")
    scores = ablation(mistral, data, blocks)
    other = copy.deepcopy(mistral)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.zero_()
    name = "model.layers.1.mlp.down_proj"
    assert scores.values()[scores.names.index(name)] == pytest.approx(
        mean_loss(other, data) - mean_loss(mistral, data), abs=2e-6
    )


def test_encoder_with_classes(bert, data):
    import dataclasses

    labelled = dataclasses.replace(data, labels=torch.arange(data.samples) % 3)
    scores = ablation(bert, labelled, partition(bert))
    shorter = copy.deepcopy(bert)
    del shorter.bert.encoder.layer[2]
    with torch.no_grad():
        losses = [F.cross_entropy(m(data.input_ids).logits, labelled.labels).item() for m in (shorter, bert)]
    assert scores.values()[2] == pytest.approx(losses[0] - losses[1], abs=1e-6)


def test_standard_error_is_that_of_independent_sequences(mistral):
    """Ratio estimator against a bootstrap over sequences."""
    data = zoo.text(samples=40, length=12, padded=True)
    scores = ablation(mistral, data, partition(mistral))
    rng = np.random.default_rng(0)
    rows = [ablation(mistral, data.select([i]), partition(mistral)).values() for i in range(40)]
    n = data.attention_mask.sum(1).numpy() - 1
    d = np.array(rows) * n[:, None]
    draws = [d[pick].sum(0) / n[pick].sum() for pick in rng.integers(0, 40, (2000, 40))]
    assert np.array(scores.standard_error[0]) == pytest.approx(np.std(draws, axis=0), rel=0.15)


def test_model_is_left_as_it_was(mistral, data):
    mistral.train()
    before = mean_loss(mistral.eval(), data)
    mistral.train()
    ablation(mistral, data, partition(mistral))
    assert mistral.training and not any("forward" in vars(layer) for _, layer in layers(mistral))
    assert mean_loss(mistral.eval(), data) == before


def test_patches_are_removed_after_an_exception(mistral, data):
    calls = []

    def fail_later(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("interrupted")
        return type(mistral.model.norm).forward(mistral.model.norm, *args, **kwargs)

    mistral.model.norm.forward = fail_later
    with pytest.raises(RuntimeError, match="interrupted"):
        ablation(mistral, data, partition(mistral))
    assert not any("forward" in vars(layer) or layer._forward_hooks for _, layer in layers(mistral))


def test_block_influence_equals_the_definition(mistral, padded):
    scores = block_influence(mistral, padded, partition(mistral), batch_size=4)
    total, count = np.zeros(3), 0
    with torch.no_grad():
        for i in range(padded.samples):
            real = int(padded.attention_mask[i].sum())
            seen = []
            handles = [
                layer.register_forward_hook(lambda m, a, out, seen=seen: seen.append((a[0], out)))
                for layer in mistral.model.layers
            ]
            mistral(padded.input_ids[i : i + 1, :real])
            for handle in handles:
                handle.remove()
            total += [(1 - F.cosine_similarity(a, b, dim=-1)).sum().item() for a, b in seen]
            count += real
    assert scores.values() == pytest.approx(total / count, abs=1e-6)


def test_block_influence_needs_layers(mistral, data):
    with pytest.raises(InvalidInput, match="whole layer"):
        block_influence(mistral, data, partition(mistral, by="linear"))


@pytest.mark.parametrize("family", ["mistral", "gemma", "gpt2"])
def test_fisher_trace_equals_a_loop_over_sequences(request, family, padded):
    model = request.getfixturevalue(family)
    blocks = partition(model)
    scores = fisher_trace(model, padded, blocks, batch_size=4)
    expected, count = np.zeros(3), 0
    for i in range(padded.samples):
        real = int(padded.attention_mask[i].sum())
        ids = padded.input_ids[i : i + 1, :real]
        model.zero_grad()
        F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").backward()
        for k, block in enumerate(blocks):
            expected[k] += sum(model.get_submodule(m.name).weight.grad.square().sum().item() for m in block.modules)
        count += real - 1
    assert scores.values() == pytest.approx(expected / count, rel=1e-5)


def test_fisher_trace_of_an_encoder(bert, data):
    """One class label per sequence: N counts sequences."""
    import dataclasses

    labelled = dataclasses.replace(data, labels=torch.arange(data.samples) % 3)
    blocks = partition(bert)
    expected = np.zeros(3)
    for ids, label in zip(data.input_ids, labelled.labels, strict=True):
        bert.zero_grad()
        F.cross_entropy(bert(ids[None]).logits, label[None]).backward()
        for k, block in enumerate(blocks):
            expected[k] += sum(bert.get_submodule(m.name).weight.grad.square().sum().item() for m in block.modules)
    assert fisher_trace(bert, labelled, blocks, batch_size=4).values() == pytest.approx(expected / 6, rel=1e-5)


def test_fused_experts_cannot_be_left_out_one_by_one(data):
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=61, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=3, max_position_embeddings=64,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    assert len(ablation(model, data, partition(model)).values()) == 2
    with pytest.raises(CoverageError, match="experts"):
        ablation(model, data, partition(model, by="linear"))
