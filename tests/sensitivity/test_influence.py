"""LayerIF against the loop over pairs that the paper's code runs, layer by layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.influence import aggregate, influence, influence_table, score_layerif


def plain_tables(model, train, validation):
    """Gradients by autograd, one sample at a time; then the double loop over pairs with explicit inverses."""
    parameters = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "proj" in n and ".layers." in n}

    def gradients(data):
        rows = []
        for i in range(data.samples):
            model.zero_grad()
            ids, mask = data.input_ids[i : i + 1], None
            if data.attention_mask is not None:
                mask = data.attention_mask[i : i + 1]
            labels = ids.clone() if mask is None else ids.masked_fill(mask == 0, -100)
            model(ids, attention_mask=mask, labels=labels).loss.backward()
            rows.append({n: p.grad.detach().clone() for n, p in parameters.items()})
        return rows

    g, v = gradients(train), gradients(validation)
    tables = {}
    for layer in range(model.config.num_hidden_layers):
        table = np.zeros((len(v), len(g)))
        for name in [n for n in parameters if f".{layer}." in n]:
            lam = np.mean([x[name].square().mean().item() for x in g]) / 10
            for j, vj in enumerate(v):
                h = torch.zeros_like(vj[name])
                for x in g:
                    c = (vj[name] * x[name]).sum() / (lam + x[name].square().sum())
                    h += (vj[name] - c * x[name]) / (len(g) * lam)
                table[j] -= [(h * x[name]).sum().item() for x in g]
        tables[f"model.layers.{layer}"] = table
    return tables


def test_equals_the_loop_over_pairs(mistral):
    mistral = mistral.double()
    train, validation = zoo.text(samples=7, padded=True), zoo.text(samples=3, seed=9, padded=True)
    found = influence(mistral, train, validation, partition(mistral), batch_size=4)
    for name, table in plain_tables(mistral, train, validation).items():
        assert found[name][0] == pytest.approx(table, rel=1e-6, abs=1e-6 * np.abs(table).max())


def test_padding_batch_size_and_memory_do_not_matter(mistral, monkeypatch):
    train, validation = zoo.text(samples=7, padded=True), zoo.text(samples=3, seed=9)
    garbage = dataclasses.replace(train, input_ids=torch.where(train.attention_mask.bool(), train.input_ids, 7))
    a = score_layerif(mistral, train, partition(mistral), batch_size=1, validation=validation).values()
    monkeypatch.setattr("layerbudget.sensitivity.influence.MEMORY", 1 << 14)
    b = score_layerif(mistral, garbage, partition(mistral), batch_size=5, validation=validation).values()
    assert a == pytest.approx(b, rel=1e-4)


def test_influence_does_not_change_with_the_scale_of_the_loss():
    rng = np.random.default_rng(0)
    g, v = rng.normal(size=(6, 40)), rng.normal(size=(3, 40))
    a = influence_table(g @ g.T, v @ g.T, 40)[0]
    b = influence_table(9 * g @ g.T, 9 * v @ g.T, 40)[0]
    assert a == pytest.approx(b, rel=1e-12)


def test_zero_gradients_give_zero_not_nan():
    table, lam = influence_table(np.zeros((3, 3)), np.zeros((2, 3)), 10)
    assert not table.any() and lam == 0


def test_sign_of_the_aggregations():
    table = np.array([[-5.0, 2.0, 0.0], [-1.0, 1.0, 0.0]])
    assert aggregate(table, "all") == 3.0 and aggregate(table, "positive") == 6.0


def test_helpful_copies_raise_the_score(mistral):
    """Training on the validation text itself is helpful in every layer: its scores are positive."""
    data = zoo.text(samples=4)
    scores = score_layerif(mistral, data, partition(mistral), validation=data)
    assert (scores.values() > 0).all()


def test_influence_is_the_change_of_the_validation_loss(mistral):
    """A step along the averaged inverse times a sample's gradient changes the validation loss by the influence: sign, size."""
    mistral = mistral.double()
    train, validation = zoo.text(samples=5), zoo.text(samples=1, seed=9)
    block = partition(mistral)[1]
    found = influence(mistral, train, validation, [block])[block.name]
    parameters = [mistral.get_submodule(m.name).weight for m in block.modules]

    def loss(data, row):
        ids = data.input_ids[row : row + 1]
        return torch.nn.functional.cross_entropy(mistral(ids).logits[0, :-1].double(), ids[0, 1:])

    gradients = [torch.autograd.grad(loss(train, k), parameters) for k in range(5)]
    for k in range(5):
        rate = 1e-5 / abs(found[0][0, k])
        change = []
        for sign in (1, -1):
            with torch.no_grad():
                steps = []
                for w, (p, module) in enumerate(zip(parameters, block.modules, strict=True)):
                    lam, g = found[1][module.name], gradients[k][w]
                    others = [x[w] for x in gradients]
                    step = sum(g - (x * g).sum() / (lam + x.square().sum()) * x for x in others) / (5 * lam)
                    steps.append(-sign * rate * step)
                    p += steps[-1]
                change.append(loss(validation, 0).item())
                for p, step in zip(parameters, steps, strict=True):
                    p -= step
        assert (change[0] - change[1]) / 2 / rate == pytest.approx(found[0][0, k], rel=0.02)


def test_without_validation_the_last_seventh_is_held_out(mistral):
    data = zoo.text(samples=14)
    scores = score_layerif(mistral, data, partition(mistral))
    same = score_layerif(mistral, data.select(slice(0, 12)), partition(mistral), validation=data.select(slice(12, 14)))
    assert scores.extra["train_samples"] == 12 and np.array_equal(scores.values(), same.values())


def test_an_unknown_aggregation_is_refused(mistral, data):
    with pytest.raises(InvalidInput, match="option aggregation .* It is all, positive"):
        score(mistral, data, partition(mistral), "layerif", aggregation="+ve")
