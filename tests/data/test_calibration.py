"""Calibration sets of one's own tensors: what no model can read is refused when the set is made, or before it is read."""

from __future__ import annotations

import pytest
import torch

import layerbudget as lb
from layerbudget.data.calibration import CalibrationSet
from layerbudget.errors import InvalidInput, NotEnoughText

from .. import zoo

IDS = torch.arange(3, 27).reshape(2, 12)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"input_ids": IDS.tolist()}, "input_ids is of type list. It should be a tensor"),
        ({"input_ids": IDS.numpy()}, "input_ids is of type ndarray"),
        ({"input_ids": None}, "input_ids is of type NoneType"),
        ({"input_ids": IDS.float()}, "input_ids is of type torch.float32. It should hold whole numbers"),
        ({"input_ids": IDS - 9}, "input_ids has the token -6. Tokens are 0 or more"),
        ({"attention_mask": torch.ones(2, 11)}, r"attention_mask has shape \(2, 11\) for input_ids of shape \(2, 12\)"),
        ({"attention_mask": torch.ones(2)}, r"attention_mask has shape \(2,\)"),
        ({"attention_mask": torch.full((2, 12), 0.5)}, "attention_mask is of type torch.float32"),
        ({"attention_mask": 2 * torch.ones(2, 12)}, "attention_mask has values from 2 to 2. It is 1 for real tokens"),
        ({"labels": IDS[:, :11]}, r"labels has shape \(2, 11\).*must have shape \(2, 12\) or \(2,\)"),
        ({"labels": IDS[:1]}, "labels has shape"),
        ({"labels": IDS.float()}, "labels is of type torch.float32"),
        ({"labels": torch.full((2, 12), -1)}, "labels has the value -1. Labels are 0 or more, or -100 for no loss"),
    ],
)
def test_tensors_that_no_model_reads_are_refused_by_name(given, match):
    with pytest.raises(InvalidInput, match=match):
        CalibrationSet(**{"input_ids": IDS, **given})


def test_whole_numbers_of_another_width_become_int64():
    labels = IDS.masked_fill(IDS < 9, -100)
    expected = CalibrationSet(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=labels)
    for mask in (torch.ones(2, 12), torch.ones(2, 12, dtype=torch.bool), torch.ones(2, 12, dtype=torch.int32)):
        made = CalibrationSet(input_ids=IDS.int(), attention_mask=mask, labels=labels.short())
        assert made.digest == expected.digest
        assert {made.input_ids.dtype, made.attention_mask.dtype, made.labels.dtype} == {torch.int64}
    model = zoo.build("llama")
    assert lb.perplexity(model, CalibrationSet(input_ids=IDS.int())).tokens == 22


def test_labels_that_a_model_has_no_output_for_are_refused():
    model, blocks = zoo.build("llama"), zoo.B.partition(zoo.build("llama"))
    beyond, classes = CalibrationSet(input_ids=IDS, labels=IDS + 97), CalibrationSet(input_ids=IDS, labels=IDS[:, 0])
    for read in (lambda data: lb.perplexity(model, data), lambda data: lb.score(model, data, blocks, "gradient-norm")):
        with pytest.raises(InvalidInput, match="has the label 123. LlamaForCausalLM has outputs for labels below 97"):
            read(beyond)
        with pytest.raises(InvalidInput, match=r"The labels have shape \(2,\)"):
            read(classes)


def test_classes_that_a_head_does_not_have_are_refused_and_labels_of_tokens_where_it_learns_classes():
    model = zoo.dense("bert")
    blocks, ids = zoo.partition(model, "bert"), zoo.labelled("bert").input_ids
    for labels, match in ((ids[:, 0], "outputs for labels below 3"), (ids, "learns one per sample")):
        with pytest.raises(InvalidInput, match=match):
            lb.score(model, CalibrationSet(input_ids=ids, labels=labels), blocks, "gradient-norm")


@pytest.mark.parametrize("given", [{"input_ids": IDS[:, :1]}, {"input_ids": IDS, "labels": torch.full((2, 12), -100)}])
def test_windows_in_which_nothing_is_predicted_have_no_perplexity(given):
    with pytest.raises(NotEnoughText, match=r"No token of this text is predicted.*Use windows of 2 tokens or more"):
        lb.perplexity(zoo.build("llama"), CalibrationSet(**given), progress=lambda *_: pytest.fail("the model ran"))


def test_a_seed_and_a_tokenizer_that_are_none_are_refused(tokenizer):
    with pytest.raises(InvalidInput, match="seed is -1. It must be 0 or more"):
        lb.calibration("stdlib", tokenizer, seed=-1)
    with pytest.raises(InvalidInput, match="tokenizer is None. It should be a loaded tokenizer"):
        lb.calibration("stdlib", None)
