"""What may not change a score: padding tokens, checkpointing, kernels, dtype, and where matrices are shared or fused."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests import zoo
from transformers import MixtralConfig, MixtralForCausalLM

from layerbudget.errors import CoverageError
from layerbudget.execution.loss import FeatureSet
from layerbudget.models.blocks import partition, weight_of
from layerbudget.sensitivity.curvature import gram
from layerbudget.sensitivity.gain import score

OPTIONS = {"fisher-gram": {"replicates": 3}, "ggn": {"tolerance": 1e-6}}


def values(name, model, data, blocks, **more):
    dampings = {} if name == "gradient-norm" else {"damping": [0.01, 0.5]}
    return np.array(score(model, data, blocks, name, **dampings, **OPTIONS.get(name, {}), **more).gain)


@pytest.fixture(scope="module")
def case():
    model = zoo.dense("mistral")
    return model, zoo.labelled("mistral"), zoo.partition(model, "mistral")


@pytest.fixture(scope="module")
def reference(case):
    return {name: values(name, *case) for name in ("fisher-gram", "fisher-diagonal", "kfac", "ggn")}


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
    zoo.checkpoint_activations(model, reentrant=reentrant)
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
    found, _ = gram.gram_matrices(model, data, blocks)
    for k, s in enumerate(zoo.rows(model, data, blocks)):
        assert np.allclose(found[k], (s @ s.T).numpy(), rtol=1e-6)
    scores = score(model, data, blocks[:1], "fisher-diagonal", damping=[0.1])
    s, n = zoo.rows(model, data, blocks[:1])[0], float(data.attention_mask[:, 1:].sum())
    g, d = s.sum(0) / n, s.square().sum(0) / n
    assert scores.gain[0][0] == pytest.approx(float((g**2 / (d + 0.1 * d.max())).sum()), rel=1e-6)
    trace = score(model, data, blocks, "fisher-trace").values()
    assert trace == pytest.approx([float(s.square().sum()) / n for s in zoo.rows(model, data, blocks)], rel=1e-6)


SIGNALS = ("fisher-trace", "outlier-ratio", "spectral-tail", "ablation", "block-influence", "layerif")


def signal(model, data, name, blocks=None):
    return score(model, data, blocks or partition(model), name).values()


@pytest.mark.parametrize("name", SIGNALS)
def test_half_precision_keeps_the_values_within_a_few_percent(mistral, padded, name):
    exact, half = signal(mistral, padded, name), signal(copy.deepcopy(mistral).bfloat16(), padded, name)
    scale = np.abs(exact).max()
    tolerance = {"ablation": 0.2, "layerif": 0.2, "spectral-tail": 0.15}.get(name, 0.05)  # the best threshold may be another
    assert np.abs(half - exact).max() / scale < tolerance


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
    assert signal(mixtral, data, "fisher-trace") == pytest.approx(expected, rel=1e-4)
    assert np.isfinite(signal(mixtral, data, "layerif")).all()
    assert np.isfinite(signal(mixtral, data, "spectral-tail")).all()
    with pytest.raises(CoverageError, match="inputs are formed inside"):
        signal(mixtral, data, "outlier-ratio")


def test_plain_classifier():
    """An MLP on features, one block per Linear: ablation zeroes a layer's output, bias included."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)
    )
    data = FeatureSet(inputs=torch.randn(12, 5), labels=torch.arange(12) % 3)
    blocks = partition(model, by="linear")
    for name in SIGNALS[:4]:
        assert np.isfinite(signal(model, data, name, blocks)).all()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight.zero_()
        other[2].bias.zero_()
        change = F.cross_entropy(other(data.inputs), data.labels) - F.cross_entropy(model(data.inputs), data.labels)
    assert signal(model, data, "ablation", blocks)[1] == pytest.approx(change.item(), abs=1e-6)
    assert np.isfinite(signal(model, data, "layerif", blocks)).all()
