"""Both ways backwards give the same numbers: every estimator, architectures, stores, losses, forms, and refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo
from torch import nn

from layerbudget.errors import CoverageError, CurvatureFailure, InvalidInput
from layerbudget.execution import backward, memory
from layerbudget.execution.backward import Accumulator, SampledLoss, data_loss, feed
from layerbudget.models.blocks import end_modules, partition
from layerbudget.records import Block, Module
from layerbudget.sensitivity.curvature.kronecker import Factors, Sums, Tokens
from layerbudget.sensitivity.gain import score
from layerbudget.sensitivity.rank_gain import largest_squared, whitened

ESTIMATORS = {
    "gradient-norm": {}, "fisher-diagonal": {}, "fisher-gram": {}, "fisher-gram sketch": {"sketch": 8}, "fisher-mc": {},
    "kfac": {}, "ekfac": {}, "adapter": {"rank": 4}, "rank-gain": {}, "layerif": {},
    "fisher-trace": {},
}  # fmt: skip
DENSE_ONLY = ("kfac", "ekfac", "adapter", "rank-gain")
MODELS = ("llama-tied", "gemma2", "gpt2", "phi3", "bert")


def data_for(model, name, **given):
    data = zoo.tokens(padded=True, **given)
    return dataclasses.replace(data, labels=data.input_ids) if "bert" in name else data


def numbers(scores):
    """Every number that a record is about, in a row."""

    def flat(value):
        if isinstance(value, dict):
            value = list(value.values())
        return [x for v in value for x in flat(v)] if isinstance(value, list | tuple) else [value]

    found = [scores.gain, scores.noise_floor, scores.extra.get("increments", []), scores.extra.get("by_module", {})]
    return np.array([np.nan if x is None else x for x in flat(found)], dtype=float)


@pytest.mark.parametrize("name", MODELS)
def test_every_estimator_both_ways(name):
    model = zoo.build(name)
    data = data_for(model, name)
    blocks = partition(model, "linear", include=r"layers?\.|\.h\.")
    for label, options in ESTIMATORS.items():
        estimator = label.split()[0]
        whole = score(model, data, blocks, estimator, walk="whole", batch_size=4, **options)
        walked = score(model, data, blocks, estimator, walk="layers", batch_size=3, **options)
        if label == "gradient-norm":  # its floor compares batches
            assert np.allclose(whole.gain, walked.gain, rtol=2e-5), label
            continue
        a, b = numbers(whole), numbers(walked)
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6 * np.nanmax(np.abs(a)), equal_nan=True), label


@pytest.mark.parametrize("name", ("mistral", "gpt2", "bert"))
def test_both_ways_agree_to_rounding_in_double_precision(name):
    model, data = zoo.dense(name if name != "bert" else "bert"), zoo.labelled(name)
    blocks = partition(model, "layer")
    for label, options in ESTIMATORS.items():
        whole, walked = (
            numbers(score(model, data, blocks, label.split()[0], walk=w, batch_size=2, **options)) for w in ("whole", "layers")
        )
        assert np.allclose(whole, walked, rtol=1e-9, atol=1e-12 * np.nanmax(np.abs(whole)), equal_nan=True), label


def test_fused_experts_are_read_layer_by_layer_too():
    model, data = zoo.build("mixtral", experts_implementation="eager"), zoo.tokens(4, 8)
    blocks = partition(model, "layer")
    for estimator in ("fisher-gram", "fisher-trace", "fisher-diagonal", "gradient-norm", "fisher-mc"):
        whole, walked = (score(model, data, blocks, estimator, walk=w, batch_size=1) for w in ("whole", "layers"))
        assert np.allclose(whole.gain, walked.gain, rtol=1e-4), estimator
    for estimator in DENSE_ONLY:
        with pytest.raises(CoverageError, match="experts"):
            score(model, data, blocks, estimator.split()[0], walk="layers")


class Keep(Accumulator):
    """Every site, by loss."""

    def __init__(self, losses):
        self.losses, self.found, self.order = losses, {}, []

    def start(self, names):
        self.order.append(("open", tuple(names)))

    def begin(self, batch, loss):
        self.key = (loss, batch.rows.start)

    def update(self, site):
        for name in site.names:
            self.found[(name, *self.key)] = (site.a.clone(), site.b[name].clone())

    def finalize(self, names):
        self.order.append(("close", tuple(names)))
        return False


@pytest.mark.parametrize("store", ("device", "cpu", "disk"))
def test_sites_are_those_of_autograd_for_every_loss_and_store(store, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(backward, "room_for", lambda *given: store)
    model, data = zoo.mistral(3), zoo.tokens(5, 12, vocabulary=61)
    blocks = partition(model, "layer")
    losses = (data_loss, SampledLoss(3), lambda logits, batch: logits.square().sum())
    whole, walked = Keep(losses), Keep(losses)
    feed(model, data, blocks, whole, batch_size=2, walk="whole")
    fed = feed(model, data, blocks, walked, batch_size=2, walk="layers")
    assert fed.way == "layers" and whole.found.keys() == walked.found.keys() and len(whole.found) == 3 * 7 * 3 * 3
    for key, (a, b) in whole.found.items():
        assert torch.allclose(a, walked.found[key][0], atol=1e-6) and torch.allclose(b, walked.found[key][1], atol=1e-5), key
    assert [kind for kind, _ in walked.order] == ["open", "close"] * 3  # one layer at a time, the last one first
    assert walked.order[0][1][0].startswith("model.layers.2.") and not list(tmp_path.iterdir())


def test_layers_below_the_first_block_are_not_walked_backwards():
    model, data = zoo.mistral(4), zoo.tokens(2, 8, vocabulary=61)
    walked = Keep((data_loss,))
    feed(model, data, partition(model, "layer")[2:], walked, walk="layers")
    assert {k[0].split(".")[2] for k in walked.found} == {"2", "3"}


def test_embedding_and_head_are_walked_too():
    model, data = zoo.mistral(2), zoo.tokens(5, 12, vocabulary=61)
    ends = [Block(name=m.name, modules=(m,)) for m in end_modules(model)]
    whole, walked = Keep((data_loss, SampledLoss(3))), Keep((data_loss, SampledLoss(3)))
    for keep, walk in ((whole, "whole"), (walked, "layers")):
        feed(model, data, ends, keep, walk=walk, batch_size=2)
    assert set(walked.found) == set(whole.found) and len(whole.found) == 2 * 2 * 3
    for key, (a, b) in whole.found.items():
        assert torch.allclose(walked.found[key][0], a, rtol=1e-4, atol=1e-6)
        assert torch.allclose(walked.found[key][1], b, rtol=1e-3, atol=1e-7), key


def test_what_cannot_be_walked_is_refused_or_falls_back(monkeypatch, caplog):
    model, data = zoo.mistral(2), zoo.tokens(2, 8, vocabulary=61)
    head = [Block(name="head", modules=(Module(name="lm_head", d_out=61, d_in=24),))]
    with pytest.raises(InvalidInput, match="walk"):
        feed(model, data, head, Keep((data_loss,)), walk="backwards")
    plain, features = zoo.dense("mlp"), zoo.labelled("mlp")
    with pytest.raises(CoverageError, match="cannot be walked"):
        score(plain, features, zoo.partition(plain, "mlp"), "fisher-trace", walk="layers")

    class Shared(nn.Module):
        """A layer that adds what the first one saw."""

        def __init__(self, inner, seen):
            super().__init__()
            self.inner, self.seen = inner, seen

        def forward(self, hidden, **keywords):
            self.seen.append(hidden)
            return self.inner(hidden, **keywords) + sum(h.mean() for h in self.seen[:-1])

    seen: list = []
    for i in range(2):
        model.model.layers[i] = Shared(model.model.layers[i], seen)
    model.register_forward_pre_hook(lambda *given: seen.clear())
    blocks = partition(model, "layer")
    with pytest.raises(CoverageError, match="share state"):
        feed(model, data, blocks, Keep((data_loss,)), walk="layers")
    monkeypatch.setattr(backward, "fits_whole", lambda *given: False)
    with caplog.at_level("WARNING"):
        assert feed(model, data, blocks, Keep((data_loss,))).way == "whole" and "share state" in caplog.text


def test_a_loss_that_is_not_finite_names_its_sequences():
    model, data = zoo.mistral(2), zoo.tokens(4, 8, vocabulary=61)
    blocks = partition(model, "layer")
    for walk in ("whole", "layers"):
        with pytest.raises(CurvatureFailure, match="sequences 2 to 3"):
            losses = (lambda logits, batch: logits.sum() * (float("nan") if batch.rows.start == 2 else 1.0),)
            feed(model, data, blocks, Keep(losses), batch_size=2, walk=walk)


def test_the_way_follows_the_memory(monkeypatch):
    model, data = zoo.mistral(2), zoo.tokens(4, 8, vocabulary=61)
    assert memory.fitting(model, 8, 8) == 8
    blocks = partition(model, "layer")
    assert feed(model, data, blocks, Keep((data_loss,))).way == "whole"
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 1 << 12)
    assert feed(model, data, blocks, Keep((data_loss,))).way == "layers"
    assert memory.fitting(model, 8, 8) == 1
    ticks: list[int] = []
    feed(model, data, blocks, Keep((data_loss,)), tick=ticks.append)
    assert sum(ticks) == 4


# --- factors from tokens and from sums -----------------------------------------------------------------------------------


def both(model, data, blocks, **options):
    return (zoo.factors(model, data, blocks, tokens=t, batch_size=2, groups=2, **options) for t in (False, True))


@pytest.mark.parametrize("options", ({}, {"draws": 2}, {"labels": "data"}, {"interleaved": True}))
def test_tokens_and_sums_say_the_same(options):
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks = partition(model, "linear")[:7]
    sums, tokens = both(model, data, blocks, **options)
    assert sums.keys() == tokens.keys()
    for name, found in sums.items():
        own = tokens[name]
        assert isinstance(found, Sums) and isinstance(own, Tokens)
        a, b = (whitened(x, 0.3 * float(found.a.trace()), 0.2 * float(found.g.trace()), 5) for x in (found, own))
        for (s, rank), (t, other) in zip(a, b, strict=True):
            assert s == pytest.approx(t, rel=1e-8) and np.allclose(rank[:5], other[: len(rank)], rtol=1e-8, atol=1e-10 * s)


def test_rank_gain_chooses_tokens_where_they_are_fewer():
    """One short sequence pair: tokens are fewer than the width, and the numbers stay those of the sums."""
    model, data = zoo.tiny("mistral", hidden_size=64, intermediate_size=96), zoo.tokens(4, 5)
    model = model.double()
    blocks = partition(model, "linear")
    factors = Factors(model, data, blocks)
    assert any(factors.by_tokens(m) for b in blocks for m in b.modules)
    whole, walked = (score(model, data, blocks, "rank-gain", walk=w) for w in ("whole", "layers"))
    assert np.allclose(numbers(whole), numbers(walked), rtol=1e-8, atol=1e-12)


def test_the_top_of_a_large_spectrum_is_found_without_the_rest(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(300, 400, generator=generator, dtype=torch.float64)
    steep = flat * torch.logspace(0, -3, 300, dtype=torch.float64)[:, None]
    for matrix in (flat, steep, flat.T):
        exact = torch.linalg.svdvals(matrix).square()
        monkeypatch.setattr("layerbudget.sensitivity.rank_gain.SMALL", 16)
        found, error = largest_squared(matrix, 8)
        assert torch.allclose(found, exact[:8], rtol=1e-4) and error < 1e-3
