"""Logits are made some positions at a time: no more of them than 64 MiB, whatever the text and the vocabulary are."""

from __future__ import annotations

import numpy as np
import pytest
from tests import zoo

from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution import memory


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
