"""Tokens that a model cannot read are refused before anything is computed."""

import pytest
import torch
import transformers
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.doctor.cost import shape_in_memory
from layerbudget.errors import InvalidInput, UnknownStructure
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.execution.loss import head_of
from layerbudget.execution.walk import Walk
from layerbudget.sensitivity.gain import score


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


def test_a_model_of_images_is_refused_in_one_sentence():
    """Not by ``'NoneType' object has no attribute 'dtype'`` from inside its forward."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    data = CalibrationSet(input_ids=torch.full((2, 4), 1))
    for read in (
        lambda: perplexity(model, data),
        lambda: Walk(model, data),
        lambda: score(model, data, zoo.B.partition(model)),
        lambda: shape_in_memory(model),
        lambda: head_of(model),
    ):
        with pytest.raises(UnknownStructure, match="ViTForImageClassification reads pixel_values, no tokens"):
            read()
