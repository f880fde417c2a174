"""What may not change a score: batch size, padding side, order of samples and blocks, checkpointing, kernels, dtype."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.sensitivity.gain import score

ESTIMATORS = ("gradient-norm", "fisher-diagonal", "fisher-gram", "fisher-mc", "kfac", "ekfac", "ggn", "adapter", "rank-gain")
OPTIONS = {"fisher-gram": {"replicates": 3}, "ggn": {"tolerance": 1e-6}, "adapter": {"replicates": 3}}


def values(name, model, data, blocks, **more):
    dampings = {} if name == "gradient-norm" else {"damping": [0.01, 0.5]}
    return np.array(score(model, data, blocks, name, **dampings, **OPTIONS.get(name, {}), **more).gain)


@pytest.fixture(scope="module")
def case():
    model = zoo.dense("mistral")
    return model, zoo.labelled("mistral"), zoo.partition(model, "mistral")


@pytest.fixture(scope="module")
def reference(case):
    return {name: values(name, *case) for name in ESTIMATORS}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_batch_size_order_and_padding_side_do_not_matter(case, reference, name):
    model, data, blocks = case
    assert np.allclose(values(name, model, data, blocks, batch_size=2), reference[name], rtol=1e-6)
    assert np.allclose(values(name, model, data.select([3, 0, 5, 1, 4, 2]), blocks), reference[name], rtol=1e-6)
    ids, mask = data.input_ids.clone(), data.attention_mask.clone()
    for i, n in enumerate(mask.sum(1).tolist()):
        ids[i], mask[i] = data.input_ids[i].roll(-n), data.attention_mask[i].roll(-n)
    assert not torch.equal(mask, data.attention_mask)
    left = CalibrationSet(input_ids=ids, attention_mask=mask)
    assert np.allclose(values(name, model, left, blocks), reference[name], rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_block_order_does_not_matter(case, reference, name):
    model, data, blocks = case
    assert np.allclose(values(name, model, data, blocks[::-1])[:, ::-1], reference[name], rtol=1e-8)


@pytest.mark.parametrize("name", ("fisher-gram", "kfac", "ggn"))
def test_padding_tokens_do_not_matter(case, reference, name):
    model, data, blocks = case
    other = dataclasses.replace(data, input_ids=torch.where(data.attention_mask.bool(), data.input_ids, 7))
    assert np.allclose(values(name, model, other, blocks), reference[name], rtol=1e-6)


@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("name", ("fisher-gram", "fisher-diagonal"))
def test_gradient_checkpointing_does_not_matter(case, reference, name, reentrant):
    _, data, blocks = case
    model = zoo.dense("mistral")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert np.allclose(values(name, model, data, blocks), reference[name], rtol=1e-8)
    for layer in model.model.layers:  # the library runs in eval mode, which switches it off: checkpoint by hand as well
        own = layer.forward
        layer.forward = lambda *a, own=own, **k: torch.utils.checkpoint.checkpoint(own, *a, use_reentrant=reentrant, **k)
    if reentrant:
        return  # reentrant checkpoints do not take keyword arguments
    assert np.allclose(values(name, model, data, blocks), reference[name], rtol=1e-8)


@pytest.mark.parametrize("name", ("fisher-gram", "kfac", "ggn", "hessian"))
def test_attention_kernel_does_not_matter(case, name):
    model, data, blocks = case
    other = zoo.dense("mistral")
    other.set_attn_implementation("sdpa")
    more = {"damping": [3.0]}
    a = score(model, data, blocks[:2], name, **more).gain
    b = score(other, data, blocks[:2], name, **more).gain
    assert np.allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("name", ("fisher-gram", "kfac", "gradient-norm"))
def test_bf16_is_near_fp32(name):
    """Within 10 % on a random tiny model, whose weights themselves move by the cast."""
    data = zoo.labelled("mistral")
    single = zoo.dense("mistral", torch.float32)
    rounded = zoo.dense("mistral", torch.bfloat16)
    blocks = zoo.partition(single, "mistral")
    a, b = values(name, single, data, blocks), values(name, rounded, data, blocks)
    assert np.abs(b / a - 1).max() < 0.1


def test_training_mode_and_dropout_do_not_matter():
    model, data = zoo.dense("gpt2"), zoo.labelled("gpt2")
    blocks = zoo.partition(model, "gpt2")
    quiet = values("fisher-gram", model, data, blocks)
    assert np.array_equal(values("fisher-gram", model.train(), data, blocks), quiet) and model.training


def test_linear_blocks_add_up_to_the_layer_gram(case):
    from layerbudget.models.blocks import partition
    from layerbudget.sensitivity.curvature import gram

    model, data, blocks = case
    linear = partition(model, by="linear")
    whole, _ = gram.gram_matrices(model, data, blocks)
    parts, _ = gram.gram_matrices(model, data, linear)
    for k, block in enumerate(blocks):
        mine = [i for i, b in enumerate(linear) if b.name.startswith(block.name + ".")]
        assert np.allclose(parts[mine].sum(0), whole[k], rtol=1e-10)


def test_a_weight_shared_by_two_layers_gets_both_gradients():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    blocks = zoo.partition(model, "mistral")
    assert len(blocks[2].modules) == len(blocks[0].modules) - 1
    from layerbudget.sensitivity.curvature import gram

    found, _ = gram.gram_matrices(model, data, blocks)
    for k, s in enumerate(zoo.rows(model, data, blocks)):
        assert np.allclose(found[k], (s @ s.T).numpy(), rtol=1e-6)
    scores = score(model, data, blocks[:1], "fisher-diagonal", damping=[0.1])
    s, n = zoo.rows(model, data, blocks[:1])[0], float(data.attention_mask[:, 1:].sum())
    g, d = s.sum(0) / n, s.square().sum(0) / n
    assert scores.gain[0][0] == pytest.approx(float((g**2 / (d + 0.1 * d.max())).sum()), rel=1e-6)
