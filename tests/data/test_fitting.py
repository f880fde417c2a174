"""Tokens that a model cannot read are refused before anything is computed."""

import pytest
import torch
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.errors import InvalidInput
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.running.walk import Walk
from layerbudget.scores.gain import score


@pytest.mark.parametrize("length, token, match", [(65, 1, "positions for 64"), (8, 97, "embeddings for tokens below 97")])
def test_tokens_that_do_not_fit_are_refused(length, token, match):
    model, data = zoo.build("llama"), CalibrationSet(input_ids=torch.full((2, length), token))
    for read in (
        lambda: perplexity(model, data),
        lambda: Walk(model, data),
        lambda: score(model, data, zoo.B.partition(model)),
    ):
        with pytest.raises(InvalidInput, match=match):
            read()
