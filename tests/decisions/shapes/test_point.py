"""A model of masked units: masks equal cuts, and terms are derivatives, each by refits that have not seen the sequence."""

from __future__ import annotations

import itertools
import tempfile

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.decisions.shapes import point as point_module
from layerbudget.decisions.shapes.apply import drop_layers, preserved
from layerbudget.decisions.shapes.point import ShapePoint
from layerbudget.decisions.shapes.program import GONE, HEADS, MLP, ShapeSpace
from layerbudget.decisions.shapes.units import cut, find_parts, where_is
from layerbudget.errors import InvalidInput
from layerbudget.execution import inputs

CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def point_of(model, data, by="groups", budget="20% flops", **options):
    parts = find_parts(model, by=by, multiple=4)
    return ShapePoint(model, data, ShapeSpace(parts, budget, bytes_per_parameter=8.0, **options), 0.01, 8)


@pytest.mark.parametrize(("name", "by"), [("llama", "groups"), ("llama", "queries"), ("gpt2", "auto"), ("phi3", "auto")])
def test_a_mask_gives_what_the_cut_gives(name, by):
    model, data = zoo.build(name).double(), zoo.tokens()
    point = point_of(model, data, by)
    with torch.no_grad():
        dense = model(input_ids=data.input_ids).logits
        for k, side in ((0, HEADS), (0, MLP), (2, MLP)):
            state, part = point.space.start(), point.space.pair[k][side]
            state[k, side] = min(2, part.units - 1)
            point.move(state, point.dense[0])
            masked = model(input_ids=data.input_ids).logits
            point.restore()
            with preserved(model):
                where = where_is(model, part)
                cut(model, where, point.dense[0][where.consumer].value, int(state[k, side]), part.by)
                assert torch.allclose(masked, model(input_ids=data.input_ids).logits, **CLOSE)
            assert not torch.allclose(masked, dense, **CLOSE)
        assert torch.equal(model(input_ids=data.input_ids).logits, dense)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "gpt-neox"])
def test_a_masked_layer_is_a_layer_that_went(name):
    model, data = zoo.build(name).double(), zoo.tokens()
    with torch.no_grad():
        for p in model.parameters():  # biases that do something
            p.add_(0.1 * torch.randn_like(p) if p.ndim == 1 else 0.0)
        point = point_of(model, data, depth=2)
        dense, state = model(input_ids=data.input_ids).logits, point.space.start()
        state[1, GONE] = 1
        point.move(state, point.dense[0])
        masked = model(input_ids=data.input_ids).logits
        point.restore()
        assert torch.equal(model(input_ids=data.input_ids).logits, dense)
        with preserved(model):
            drop_layers(model, [point.space.layers[1]])
            assert torch.allclose(masked, model(input_ids=data.input_ids).logits, **CLOSE)


def changed(point, name, alternative, grams):
    return point.become(name, grams[name], [point._wanted(name, alternative.tolist())])[0]


def test_terms_are_the_derivatives_of_the_divergence():
    """First term: the slope of D along the change of all matrices of a layer, its removal too, by finite differences and by
    autograd's own gradient; second: half the Fisher form of that whole change, cross terms of heads and MLP included."""
    model, data = zoo.build("llama").double(), zoo.tokens(samples=3)
    point = point_of(model, data, depth=1, budget="20% bytes")
    state = point.space.start()
    state[:, MLP], state[2, HEADS] = 2, 1
    rows = [(0, 4, 0), (1, 1, 0), (0, 0, 1)]
    alternatives = np.stack([np.array([tuple(row), *rows]) for row in state.tolist()])
    (reference,), (grams,) = point.references.values(), point.dense.values()  # so few sequences are one fold
    seen = point.evaluate(state, alternatives, {0: grams}, draws=1, seed=0)
    assert seen.divergence == pytest.approx(reference.measure(), rel=1e-4) and seen.divergence > 0
    assert (seen.forms.first[:, 0] == 0).all() and (seen.forms.second[:, 0] == 0).all()
    clean = torch.cat([reference.clean(i) for i in range(1)]).double()
    for k, j in itertools.product((0, 2), range(1, alternatives.shape[1])):
        mine = [n for n, m in point.matrices.items() if m.layer == k]
        weights = [model.get_submodule(n).weight for n in mine]
        present = [w.data.clone() for w in weights]
        deltas = [changed(point, n, alternatives[k, j], grams) - w for n, w in zip(mine, present, strict=True)]
        values = []
        for step in (3e-3, -3e-3):
            for w, old, delta in zip(weights, present, deltas, strict=True):
                w.data.copy_(old + step * delta)
            with torch.no_grad():  # in float64: a measurement is in float32, too coarse for a difference
                now = torch.log_softmax(model(input_ids=data.input_ids).logits, -1)
            values.append(float((clean.exp() * (clean - now)).sum()) / data.input_ids.numel())
        for w, old in zip(weights, present, strict=True):
            w.data.copy_(old)
        assert seen.forms.first[k, j] == pytest.approx((values[0] - values[1]) / 6e-3, rel=2e-2, abs=2e-6), (k, j)
    log_p = torch.log_softmax(model(input_ids=data.input_ids).logits, -1)
    loss = (clean.exp() * (clean - log_p)).sum() / data.input_ids.numel()
    name = point.space.pair[1][MLP].modules[-1]
    for p in model.parameters():
        p.requires_grad_(True)
    names = [n for n, m in point.matrices.items() if m.layer == 1]
    slopes = torch.autograd.grad(loss, [model.get_submodule(n).weight for n in names])
    along = sum(
        float((s * (changed(point, n, alternatives[1, 3], grams) - model.get_submodule(n).weight.detach())).sum())
        for n, s in zip(names, slopes, strict=True)
    )  # fmt: skip
    assert name in names and seen.forms.first[1, 3] == pytest.approx(along, rel=1e-4, abs=1e-9)


def test_sequences_are_judged_by_refits_that_have_not_seen_them():
    """Four folds: each with the moments of the others, at equal passes; what comes out is the mean over the folds."""
    model, data = zoo.build("llama").double(), zoo.tokens(samples=8)
    point = point_of(model, data)
    state = point.space.start()
    state[:, MLP] = 4
    around = point.space.around(state, 0.2, 3)
    seen = point.evaluate(state, around, point.dense, draws=1, seed=0)
    assert point.passes == 1.0 + 5.0 and len(seen.moments()) == len(point.references) == 4
    name = next(iter(point.matrices))
    each, second = [], []
    for fold in range(4):
        test = data.select([fold, fold + 4])
        (alone,) = point_of(model, data.select([i for i in range(8) if i % 4 != fold][:3])).dense.values()
        (rest,) = point_of(model, data.select([i for i in range(8) if i % 4 != fold][3:])).dense.values()
        total = alone[name].value + rest[name].value
        assert torch.allclose(point.dense[fold][name].value, total, rtol=1e-4, atol=1e-4)
        point.move(state, point.dense[fold])
        with torch.no_grad():
            now = torch.log_softmax(model(input_ids=test.input_ids).logits, -1)
            point.restore()
            clean = torch.log_softmax(model(input_ids=test.input_ids).logits, -1)
        each.append(float((clean.exp() * (clean - now)).sum() / test.input_ids.numel()))
        second.append(point._evaluate(point.references[fold], around, point.dense[fold], 1, 0, None, dense=True)[0].second)
    assert seen.divergence == pytest.approx(np.mean(each), rel=1e-4)
    assert point.measure(state, point.dense).divergence == pytest.approx(seen.divergence, rel=1e-6)
    dense = point.evaluate(point.space.start(), around, point.dense, draws=1, seed=0)
    assert np.allclose(dense.forms.second, np.mean(second, axis=0))


def test_the_fisher_form_of_a_layer_has_its_cross_terms():
    """Half the form along heads, along MLP and along both: a parallelogram only with what they do to each other."""
    model, data = zoo.build("llama").double(), zoo.tokens(samples=8)
    point = point_of(model, data, depth=1)
    rows = [(1, 0, 0), (0, 4, 0), (1, 4, 0)]
    alternatives = np.stack([np.array(rows)] * len(point.space.layers))
    seen = point.evaluate(point.space.start(), alternatives, point.dense, draws=3, seed=0)
    heads, mlp, both = seen.forms.second.T
    assert (seen.forms.first == 0).all() and (heads > 0).all() and (mlp > 0).all()
    assert (np.abs(both - heads - mlp) <= 2 * np.sqrt(heads * mlp) + 1e-12).all() and not np.allclose(both, heads + mlp)


def test_moments_that_would_fill_the_memory_lie_in_files(tmp_path, monkeypatch):
    """With rows of 4,864 inputs, those of four folds of 24 layers took 9 GiB at every state."""
    model, data, places, zeros = zoo.build("llama"), zoo.tokens(samples=8), list(), inputs.zeros_in_file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (point_module, inputs):
        monkeypatch.setattr(
            module, "zeros_in_file", lambda shape, folder, *kind: places.append(folder) or zeros(shape, folder, *kind)
        )
    seen = []
    for most in (1 << 28, 0):
        monkeypatch.setattr(point_module, "_IN_MEMORY", most)
        point = point_of(model, data)
        state = point.space.start()
        state[:, MLP] = 4
        around = point.space.around(state, 0.2, 3)
        there = point.evaluate(state, around, point.dense, draws=1, seed=0)
        moments = [each for grams in (point.dense, there.moments()) for fold in grams.values() for each in fold.values()]
        assert all((each.value.untyped_storage().filename is None) == bool(most) for each in moments)
        seen.append((there.forms, [each.value.clone() for each in moments]))
        point.restore()
    assert tmp_path in places and not list(tmp_path.iterdir())
    (whole, held), (filed, read) = seen
    assert np.array_equal(whole.total, filed.total) and whole.divergence == filed.divergence
    assert all(torch.equal(a, b) for a, b in zip(held, read, strict=True))
    monkeypatch.setattr("layerbudget.storage.writing.shutil.disk_usage", lambda where: type("Disk", (), {"free": 10})())
    with pytest.raises(InvalidInput, match="are free in"):
        point_of(model, data)
