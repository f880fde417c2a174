"""The empirical Fisher, its diagonal and the gradient norm against dense linear algebra."""

import functools
import math

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.errors import CoverageError, InvalidInput, UnknownStructure
from layerbudget.execution import loss as L
from layerbudget.execution import sites as hooks
from layerbudget.scores import Scores
from layerbudget.sensitivity import noise
from layerbudget.sensitivity.curvature import common, gram
from layerbudget.sensitivity.gain import score

NAMES = ("mistral", "gemma", "gpt2", "bert", "bert-mlm", "mixtral", "mlp")
# Norms and softmax of transformers run in fp32 even in an fp64 model; the MLP has neither.
DENSE = 1000  # widest curvature whose matrix is made
TOLERANCE = {"mlp": 1e-11, "gpt2": 1e-10}


@functools.cache
def case(name):
    """A model, its data, its blocks and the gradient of every sequence."""
    model, data = zoo.dense(name), zoo.labelled(name)
    blocks = zoo.partition(model, name)
    return model, data, blocks, zoo.rows(model, data, blocks), L.token_count(model, data)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "gpt2" else n for n in NAMES])
def test_gram_gain_and_floor_equal_the_dense_matrix(name):
    model, data, blocks, rows, n = case(name)
    scores = score(model, data, blocks, batch_size=4, replicates=4)
    for k, s in enumerate(rows):
        if s.shape[1] <= DENSE:
            values, vectors = torch.linalg.eigh(s.T @ s / n)
        else:  # the same nonzero eigenvalues
            vectors, root, _ = torch.linalg.svd(s.T / n**0.5, full_matrices=False)
            values = root.flip(0) ** 2
            vectors = vectors.flip(1)
        turned, values = vectors.T @ s.sum(0) / n, values.clamp_min(0)
        for i, d in enumerate(scores.damping):
            tau = d * float(values[-1])
            assert scores.gain[i][k] == pytest.approx(float((turned**2 / (values + tau)).sum()), rel=TOLERANCE.get(name, 1e-6))
            assert scores.noise_floor[i][k] == pytest.approx(float((values / (values + tau)).sum()) / n, rel=1e-6)
    assert scores.extra["mean_loss"] == pytest.approx(
        sum(L.summed_loss(L.logits_of(model, b), b.targets).item() for b in L.batches(model, data, 1)) / n, rel=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_diagonal_gain_and_floor_equal_the_dense_sum(name):
    model, data, blocks, rows, n = case(name)
    scores = score(model, data, blocks, "fisher-diagonal", batch_size=4, damping=[0.01, 1.0])
    for k, s in enumerate(rows):
        g, d = s.sum(0) / n, s.square().sum(0) / n
        for i, relative in enumerate(scores.damping):
            tau = relative * float(d.max())
            assert scores.gain[i][k] == pytest.approx(float((g**2 / (d + tau)).sum()), rel=1e-6)
            assert scores.noise_floor[i][k] == pytest.approx(float((d / (d + tau)).sum()) / n, rel=1e-6)
            left_out = []
            owner = np.arange(len(s)) * 4 // len(s)
            counts = L.targets_of(model, data).reshape(len(s), -1).ne(L.IGNORE).sum(1).numpy()
            for j in range(4):  # delete one of four groups of sequences
                rest = torch.as_tensor(owner != j)
                m = float(counts[owner != j].sum())
                gj, dj = s[rest].sum(0) / m, s[rest].square().sum(0) / m
                left_out.append(float((gj**2 / (dj + tau)).sum()))
            assert scores.standard_error[i][k] == pytest.approx(np.sqrt(3 * np.var(left_out)), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_norm_is_that_of_autograd_and_its_unbiased_form_drops_the_diagonal(name):
    model, data, blocks, rows, n = case(name)
    scores = score(model, data, blocks, "gradient-norm", batch_size=1)
    counts = common.token_counts(model, data)
    for k, s in enumerate(rows):
        inner = s @ s.T
        assert scores.gain[0][k] == pytest.approx(float(inner.sum()) / n**2, rel=1e-9)
        off = float(inner.sum() - inner.trace()) / (n**2 - float((counts**2).sum()))
        assert scores.extra["unbiased"][k] == pytest.approx(off, rel=1e-6)


def test_the_floor_is_the_mean_gain_under_random_signs():
    model, data, blocks, rows, n = case("mistral")
    scores, s = score(model, data, blocks, damping=0.3), rows[0]
    damped = s.T @ s / n + scores.extra["absolute_damping"][0][0] * torch.eye(s.shape[1], dtype=s.dtype)
    between = s @ torch.linalg.solve(damped, s.T) / n**2
    signs = [torch.tensor([1.0 if (b >> i) & 1 else -1.0 for i in range(6)], dtype=torch.float64) for b in range(64)]
    values = np.array([float(e @ between @ e) for e in signs])
    assert scores.noise_floor[0][0] == pytest.approx(values.mean(), rel=1e-6)
    assert scores.extra["null_deviation"][0][0] == pytest.approx(values.std(), rel=1e-5)


def test_bootstrap_weights_equal_repeated_rows():
    s = np.random.default_rng(0).normal(size=(5, 9))
    tokens, weights = np.array([3.0, 2, 4, 3, 3]), np.array([2, 0, 1, 1, 1])
    rows = np.repeat(s, weights, axis=0)
    n = np.repeat(tokens, weights).sum()
    g, c = rows.sum(0) / n, rows.T @ rows / n
    dense = g @ np.linalg.solve(c + 0.1 * np.eye(9), g)
    assert noise.gain_of(s @ s.T, weights, tokens, np.array([0.1]))[0] == pytest.approx(dense, rel=1e-10)


def test_same_seed_gives_the_same_bytes(tmp_path):
    model, data = zoo.dense("mistral", torch.float32), zoo.labelled("mistral")
    blocks = zoo.partition(model, "mistral")
    for name, own in (("fisher-gram", {"seed": 3}), ("kfac", {"seed": 3}), ("fisher-diagonal", {}), ("gradient-norm", {})):
        paths = [score(model, data, blocks, name, **own).save(tmp_path / f"{name}.{i}.json") for i in range(2)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_fp32_agrees_with_fp64():
    data = zoo.labelled("mistral")
    double, single = zoo.dense("mistral"), zoo.dense("mistral", torch.float32)
    blocks = zoo.partition(double, "mistral")
    a = score(double, data, blocks, damping=[0.01, 1.0])
    b = score(single, data, blocks, damping=[0.01, 1.0])
    assert zoo.relative(b.gain, a.gain) < 1e-5


def test_several_passes_equal_one():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks = zoo.partition(model, "mistral")
    one, _ = gram.gram_matrices(model, data, blocks)
    many, _ = gram.gram_matrices(model, data, blocks, max_bytes=max(m.numel for m in blocks[0].modules) * 16)
    assert np.allclose(one, many, rtol=1e-10)


@pytest.mark.parametrize("sketch", (None, (12, 12)))
def test_factors_in_the_place_of_gradients_give_the_same(monkeypatch, sketch):
    """Where text is short and gradients do not fit; products of them are then made some rows or columns at a time."""
    model, data = zoo.dense("mistral"), zoo.labelled("mistral", length=3, padded=False)
    blocks = zoo.partition(model, "mistral")
    few, chosen, by = {"max_bytes": max(m.numel for m in blocks[0].modules) * 16}, [], gram.InnerProducts._by_factors
    monkeypatch.setattr(gram.InnerProducts, "_by_factors", lambda *given: chosen.append(by(*given)) or chosen[-1])
    one, _ = gram.gram_matrices(model, data, blocks, sketch=sketch)
    assert not any(chosen)
    many, _ = gram.gram_matrices(model, data, blocks, sketch=sketch, **few)
    assert any(chosen) and np.allclose(one, many, rtol=1e-10)
    lying, zeros = [], gram.zeros_in_file
    monkeypatch.setattr(gram, "_FACTORS", 0)  # at the defaults 1.5 GB of a layer of half a billion weights waited in memory
    monkeypatch.setattr(gram, "zeros_in_file", lambda shape, *more: lying.append(shape) or zeros(shape, *more))
    filed, _ = gram.gram_matrices(model, data, blocks, sketch=sketch, **few)
    assert lying and np.array_equal(many, filed)


def test_coordinates_are_dealt_equally_and_by_the_longer_side():
    sides = [(64, 64), (16, 64), (64, 16), (176, 64), (64, 176)]
    for size in (1, 2, 3, 7):
        load = np.zeros(size)
        for (d_out, d_in), (side, runs) in zip(sides, gram._dealt(sides, size), strict=True):
            ends = [0, *(run.stop for run in runs)]
            assert [run.start for run in runs] == ends[:-1] and ends[-1] == (d_out, d_in)[side] == max(d_out, d_in)
            load += [(run.stop - run.start) * min(d_out, d_in) for run in runs]
        assert np.ptp(load) <= 2 * 64


@pytest.mark.parametrize("name", ("mistral", "mixtral"))
def test_full_rank_sketch_is_exact_and_a_small_one_is_near(name):
    model, data = zoo.dense(name), zoo.labelled(name, samples=8, length=20)
    blocks = zoo.partition(model, name)
    exact, _ = gram.gram_matrices(model, data, blocks)
    full, _ = gram.gram_matrices(model, data, blocks, sketch=(64, 64))
    small, _ = gram.gram_matrices(model, data, blocks, sketch=(12, 12))
    assert np.allclose(exact, full, rtol=1e-10)
    error = np.linalg.norm(small - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.5


def test_hooks_and_flags_are_restored_after_an_exception():
    model, data = zoo.dense("mistral").train(), zoo.labelled("mistral")
    blocks = zoo.partition(model, "mistral")
    next(iter(model.parameters())).grad = torch.ones_like(next(iter(model.parameters())))

    def explode(site):
        raise RuntimeError("consumer")

    before = [(p.requires_grad, p.grad) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="consumer"), hooks.Collector(model, blocks, explode) as collector:
        batch = next(L.batches(model, data, 2))
        collector.backward(L.summed_loss(L.logits_of(model, batch), batch.targets), size=2, length=9)
    assert model.training and all(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.requires_grad == f and p.grad is g for p, (f, g) in zip(model.parameters(), before, strict=True))


def test_a_matrix_that_never_runs_is_refused():
    model, data = zoo.dense("mlp"), zoo.labelled("mlp")
    model.extra = torch.nn.Linear(3, 3).double()
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
    blocks = zoo.partition(model, "mlp")
    with pytest.raises(CoverageError, match="extra"):
        score(model, data, blocks)


def test_errors_say_what_to_do():
    from transformers import BertConfig, BertModel

    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks = zoo.partition(model, "mistral")
    for bad in ({"damping": -1.0}, {"damping": [0.1, 0.1]}, {"damping_unit": "x"}, {"batch_size": 0}, {"estimator": "nope"}):
        with pytest.raises(InvalidInput):
            score(model, data, blocks, **bad)
    bare = BertModel(BertConfig(vocab_size=37, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(UnknownStructure, match="head"):
        score(bare, data, zoo.partition(bare, "bert"))
    with pytest.raises(InvalidInput, match="labels"):
        score(zoo.dense("bert"), data, zoo.partition(zoo.dense("bert"), "bert"))


def test_the_verdict_warns_when_gain_and_excess_disagree_and_the_floor_can_be_taken_off():
    z, n = np.array([9.0, 8.0, 3.0]), 16
    assert "(score --excess)" in noise.verdict(n, z, 0.9, 0.8, 4.0, -0.3)
    assert "about 100 sequences" in noise.verdict(n, z * 0, 0.9, 0.2, 99.5, 1.0)
    assert "no ranking" in noise.verdict(n, z[:1], 0.9, float("nan"), 4.0, float("nan"))
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    scores = score(model, data, zoo.partition(model, "mistral"), damping=[0.5])
    bare = noise.subtract_floor(scores)
    assert "score --excess" not in bare.extra["verdict"]
    assert np.allclose(bare.gain, scores.extra["excess"], rtol=1e-12)
    with pytest.raises(InvalidInput, match="no noise floor"):
        noise.subtract_floor(bare)


@pytest.mark.parametrize(
    ("needed", "agreement", "excess", "remedy", "says"),
    [
        (4.0, -0.3, False, "excess", "score --excess"),
        (4.0, -0.3, True, "", "can be told from"),
        (99.5, -0.3, False, "100", "about 100 sequences"),
        (99.5, 1.0, True, "100", "about 100 sequences"),
        (9999.0, 1.0, False, "uniform", "about 9,999 sequences"),
        (math.inf, 1.0, False, "uniform", "no number of sequences"),
        (4.0, 1.0, False, "", "can be told from"),
    ],
)
def test_what_scores_need_is_what_their_verdict_says(needed, agreement, excess, remedy, says):
    """The floor was subtracted, and the verdict still asked for it; or raw scores were called wrong, and then planned from."""
    found = {
        "z": [[2.5, 1.0, 0.5]],
        "noise_share": [0.9],
        "rank_stability_excess": [0.2],
        "samples_needed": [needed],
        "rank_agreement": [agreement],
        "verdict": noise.verdict(16, np.array([2.5, 1.0, 0.5]), 0.9, 0.2, needed, agreement),
    }
    blocks = zoo.partition(zoo.dense("mlp"), "mlp")
    row = [tuple(float(k) for k in range(len(blocks)))]
    scores = Scores(
        estimator="fisher-gram", blocks=blocks, gain=row, noise_floor=[(0.0,) * len(blocks)], data={"samples": 16}, extra=found
    )
    scores = noise.subtract_floor(scores) if excess else scores
    assert noise.remedy(scores) == remedy and says in scores.extra["verdict"]
    assert excess is False or "--excess" not in scores.extra["verdict"]


def test_random_gradients_have_no_excess_on_average():
    rng = np.random.default_rng(0)
    grams = np.stack([(s := rng.normal(size=(40, 300))) @ s.T for _ in range(60)])
    found = noise.summarise(grams, np.full(40, 7.0), np.full((1, 60), 30.0), replicates=2, splits=2)
    z = np.array(found["z"][0])
    assert abs(z.mean()) < 3 / 60**0.5 and 0.7 < z.std() < 1.4


def test_gain_and_floor_of_a_subset_are_those_of_its_own_gram():
    s = np.random.default_rng(1).normal(size=(8, 20))
    tokens, keep, tau = np.arange(3.0, 11.0), np.array([1, 0, 1, 1, 0, 1, 0, 0], bool), np.array([0.3, 2.0])
    own = noise.Spectrum(s[keep] @ s[keep].T, tokens[keep].sum())
    assert np.allclose(noise.gain_of(s @ s.T, keep.astype(float), tokens, tau), [own.gain(t) for t in tau])
    assert np.allclose(noise.floor_of(s @ s.T, keep, tokens, tau), [own.null(t)[0] for t in tau])


def test_no_grad_around_a_score_does_not_matter():
    model, data = zoo.dense("mlp"), zoo.labelled("mlp")
    blocks = zoo.partition(model, "mlp")
    with torch.no_grad():
        inside = [score(model, data, blocks, name).gain for name in ("fisher-gram", "gradient-norm", "ggn")]
    assert inside == [score(model, data, blocks, name).gain for name in ("fisher-gram", "gradient-norm", "ggn")]


def test_heads_without_a_suitable_loss_are_refused():
    from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

    small = {"vocab_size": 37, "num_hidden_layers": 1, "num_attention_heads": 2}
    one = BertForSequenceClassification(BertConfig(hidden_size=8, intermediate_size=8, num_labels=1, **small))
    with pytest.raises(InvalidInput, match="regression"):
        L.head_of(one)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=37, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2))
    with pytest.raises(UnknownStructure, match="encoder-decoder"):
        L.head_of(t5)


def test_a_sketch_without_sides_is_refused():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    with pytest.raises(InvalidInput, match="sketch"):
        score(model, data, zoo.partition(model, "mistral"), sketch=0)


def test_gradient_norm_adds_up_in_half_precision():
    """300 equal batches: a bfloat16 sum stops growing at 256 times its summand."""
    model, data = zoo.dense("mistral", torch.bfloat16), zoo.labelled("mistral", samples=1, padded=False)
    blocks = zoo.partition(model, "mistral")
    many = data.select([0] * 300)
    one, all_ = (score(model, d, blocks, "gradient-norm", batch_size=1).values() for d in (data, many))
    assert np.allclose(one, all_, rtol=1e-3)
