"""OWL's outlier ratio against the block-by-block loop of the source."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.baselines import outlier_ratio


def plain(model, data, layer, multiple):
    """Inputs of every Linear recorded sequence by sequence, real tokens only; then count in one flat vector."""
    norms = {}
    handles = []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):

            def hook(m, inputs, out, name=name):
                norms.setdefault(name, []).append(inputs[0][0])

            handles.append(module.register_forward_hook(hook))
    with torch.no_grad():
        for i in range(data.samples):
            real = data.length if data.attention_mask is None else int(data.attention_mask[i].sum())
            model(data.input_ids[i : i + 1, :real])
    for handle in handles:
        handle.remove()
    flat = []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            scaler = sum((x**2).sum(0) for x in norms[name]) / data.samples
            flat.append((module.weight.abs() * scaler.sqrt()).flatten())
    flat = torch.cat(flat)
    return 100 * (flat > multiple * flat.mean()).float().mean().item()


@pytest.mark.parametrize("multiple", [1.5, 3.0])
def test_equals_the_plain_loop(mistral, data, padded, multiple):
    for d in (data, padded):
        scores = outlier_ratio(mistral, d, partition(mistral), multiple=multiple, batch_size=4)
        expected = [plain(mistral, d, layer, multiple) for layer in mistral.model.layers]
        assert scores.values() == pytest.approx(expected, abs=1e-4)
        assert scores.orientation == "gain" and min(expected) > 0


def test_atp_is_an_arithmetic_progression(mistral):
    blocks = partition(mistral)
    plan = plan_sparsity(blocks, sparsity=0.6, max_sparsity=1.0, rule="atp", step=0.1)
    assert np.diff(plan.values) == pytest.approx(0.1, abs=1e-3) and plan.values.mean() == pytest.approx(0.6, abs=1e-3)
    with pytest.raises(InvalidInput, match="step"):
        plan_sparsity(blocks, sparsity=0.6, max_sparsity=1.0, rule="atp", step=0.5)


def test_batch_size_does_not_matter(mistral, padded):
    a, b = (outlier_ratio(mistral, padded, partition(mistral), multiple=2, batch_size=n).values() for n in (1, 6))
    assert np.array_equal(a, b)


def test_conv1d_is_read_the_right_way_round(gpt2, data):
    block = partition(gpt2, by="linear")[2]
    owner = gpt2.get_submodule(block.name)
    with torch.no_grad():
        owner.weight.copy_(torch.full_like(owner.weight, 0.01))
        owner.weight[5, :] = 1.0  # input feature 5 matters for every output
    before = outlier_ratio(gpt2, data, [block], multiple=3).values()[0]
    assert before == pytest.approx(100 / owner.weight.shape[0], rel=1e-6)


def test_unreached_matrix_is_refused(mistral, data):
    block = partition(mistral, by="linear")[0]
    mistral.model.layers[0].forward = lambda h, **k: h
    with pytest.raises(CoverageError, match="No token reached"):
        outlier_ratio(mistral, data, [block])


def test_bad_multiple_is_refused(mistral, data):
    with pytest.raises(InvalidInput, match="multiple"):
        outlier_ratio(mistral, data, partition(mistral), multiple=0)


def test_hooks_are_removed_after_an_exception(mistral, data):
    mistral.lm_head.forward = None
    with pytest.raises(TypeError):
        outlier_ratio(mistral, data, partition(mistral))
    assert not any(m._forward_pre_hooks for m in mistral.modules())
