"""Logits are made some positions at a time: 64 MiB of them or just more, whatever the text and the vocabulary are."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.sparsity.payload import SparsityPayload
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution import backward, divergence, memory
from layerbudget.execution.loss import Batch
from layerbudget.plan import payload_of


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
@pytest.mark.parametrize("sequences", [1, 5, 8])
def test_logits_are_so_large_that_their_memory_is_given_back(vocabulary, sequences, monkeypatch):
    """Pieces of 60 MiB stayed in the process, each beside the last: 1.4 GiB in one check of a vocabulary of 151,936."""
    monkeypatch.setattr(memory, "_vocabulary", lambda _: vocabulary)
    ids = torch.zeros(sequences, 1024, dtype=torch.long)
    batch = Batch(rows=slice(0, sequences), args=(), kwargs={"input_ids": ids}, targets=ids, keys=tuple(range(sequences)))
    places = [places for _, places in memory.pieces_of(types.SimpleNamespace(), batch)]
    sizes = [4 * sequences * vocabulary * (each.stop - each.start) for each in places]
    assert sum(each.stop - each.start for each in places) == 1024 and len(places) > 2
    assert all(memory.HEAD <= size < memory.HEAD + 4 * (sequences + 1) * vocabulary for size in sizes[:-1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_perplexity_makes_few_logits_at_a_time_and_nothing_changes(family, monkeypatch):
    """Of 6 sequences 3 positions at once, where all of them were made together before."""
    model, data = zoo.build(family), zoo.tokens(samples=6)
    vocabulary, made = model.get_output_embeddings().weight.shape[0], list[int]()
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: made.append(output.numel()))
    whole = perplexity(model, data)
    assert max(made) == data.input_ids.numel() * vocabulary
    monkeypatch.setattr(memory, "HEAD", 4 * 18 * vocabulary)
    pieces = perplexity(model, data)
    rows = len(range(0, data.length, 3))
    assert made[-rows:] == [6 * 3 * vocabulary] * (data.length // 3) + [6 * (data.length % 3) * vocabulary] * (
        rows - data.length // 3
    )
    np.testing.assert_allclose(pieces.nll, whole.nll, rtol=1e-5)


@pytest.mark.parametrize(("family", "kept"), [("llama", True), ("gemma3", False)])
def test_a_plan_of_zeros_makes_few_logits_at_a_time_and_nothing_changes(family, kept, monkeypatch):
    """Of 6 sequences 3 positions at once, also of the dense model's output, which is kept or made again."""
    model, data = zoo.build(family), zoo.tokens(samples=6)
    monkeypatch.setattr(divergence, "_KEEP_BYTES", 1 << 28 if kept else 0)
    monkeypatch.setattr(backward, "fits_whole", lambda *_: False)
    vocabulary, made = model.get_output_embeddings().weight.shape[0], list[int]()
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: made.append(output.numel()))
    plans = []
    for positions in (data.length, 3):
        made.clear()
        monkeypatch.setattr(memory, "HEAD", 4 * 6 * positions * vocabulary)
        plans.append(plan_sparsity(model, data, sparsity=0.5, method="wanda", passes=9))
        assert max(made) == 6 * positions * vocabulary
    whole, pieces = (payload_of(plan, SparsityPayload) for plan in plans)
    assert pieces.measured == pytest.approx(whole.measured, rel=1e-5)
    assert plans[1].values == pytest.approx(plans[0].values, rel=1e-4)


def test_a_model_that_returns_tuples_is_refused_with_the_remedy():
    model, data = zoo.build("llama"), zoo.tokens()
    model.config.return_dict = False
    for read in (lambda: lb.perplexity(model, data), lambda: lb.score(model, data, lb.partition(model), "gradient-norm")):
        with pytest.raises(InvalidInput, match="return_dict=False.*Set model.config.return_dict = True"):
            read()
    model.config.return_dict = True
    assert lb.perplexity(model, data).windows == data.samples
