"""Names, paths and other things in the place of models, texts, scores, plans, blocks and tokenizers."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import layerbudget as lb
from layerbudget.arguments import kinds_of
from layerbudget.errors import InvalidInput, LayerbudgetError, NotFound

from . import zoo

DOORS = [
    (name, parameter)
    for name in lb.__all__
    if inspect.isfunction(function := getattr(lb, name))
    for parameter, p in inspect.signature(function).parameters.items()
    if kinds_of(parameter, str(p.annotation))
]
#: What can be a name or a list, and is looked at by the function itself.
OTHERS = [
    ("calibration", {"source": None, "tokenizer": str.split}, "source is None"),
    ("calibration", {"source": [], "tokenizer": str.split}, "The list of texts is empty"),
    ("calibration", {"source": [Path("a.txt")], "tokenizer": str.split}, "Row 1 of your list is of type PosixPath"),
    ("score", {"model": zoo.build("llama"), "data": None, "blocks": []}, "No block was given"),
    ("calibration", {"source": 3, "tokenizer": str.split}, "source is 3"),
    ("certify_ranking", {"table": "a.json"}, "no table of losses"),
]


class Strange:
    """What no function takes."""


@pytest.mark.parametrize(("name", "parameter"), DOORS)
def test_a_public_function_refuses_by_name_what_is_of_another_type(name, parameter):
    with pytest.raises(InvalidInput, match=f"^{parameter} is of type Strange. It should be .*\\. [A-Z].*\\.$"):
        getattr(lb, name)(**{parameter: Strange()})


USUAL = [
    (
        "score",
        {"model": "demo"},
        "model is 'demo', of type str. It should be a loaded model. Make it with layerbudget.load_model",
    ),
    ("perplexity", {"data": ["a"]}, "data is of type list. It should be a calibration set."),
    (
        "prune",
        {"plan": Path("plan.json")},
        "plan is of type PosixPath. It should be a plan. Read it with layerbudget.Plan.load",
    ),
    ("plan_sparsity", {"sparsity": "50%"}, "sparsity is '50%', of type str. It should be a number. For example 0.5."),
    ("plan_sparsity", {"sparsity": True}, "sparsity is True, of type bool. It should be a number."),
    ("plan_cache", {"context": 64.0}, "context is 64.0, of type float. It should be a whole number."),
    ("plan_cache", {"formats": "int4,int8"}, "formats is 'int4,int8', of type str. It should be a list of strings."),
    ("evaluate_tasks", {"tasks": "boolq"}, "tasks is 'boolq', of type str. It should be a list of strings."),
    ("sweep", {"budgets": 0.5}, "budgets is 0.5, of type float. It should be a list."),
    ("explain_plan", {"plan": "a" * 200}, f"plan is '{'a' * 39}..., of type str."),
    (
        "load_model",
        {"name": None},
        "name is None, of type NoneType. It should be the name, folder or file of a model.",
    ),
    ("calibration", {"tokenizer": "demo"}, "tokenizer is 'demo', of type str. It should be a loaded tokenizer."),
]


@pytest.mark.parametrize(("name", "given", "said"), USUAL)
def test_the_usual_mistakes_are_told_what_to_do(name, given, said):
    with pytest.raises(InvalidInput, match=f"^{re.escape(said)}"):
        getattr(lb, name)(**given)


def test_files_are_read_from_paths_alone():
    for read in (lb.Plan.load, lb.Scores.load):
        with pytest.raises(InvalidInput, match="path is of type dict"):
            read({"kind": "sparsity"})


def test_every_function_that_takes_a_model_is_among_them():
    seen = dict.fromkeys(name for name, _ in DOORS)
    assert len(seen) > 40
    assert {"score", "plan_bits", "prune", "perplexity", "load_model", "calibration"} <= set(seen)


@pytest.mark.parametrize(("name", "given", "said"), OTHERS)
def test_what_has_other_types_refuses_too(name, given, said):
    with pytest.raises(LayerbudgetError, match=said):
        getattr(lb, name)(**given)


def test_blocks_are_looked_at_one_by_one_and_what_is_left_out_is_none():
    scores = zoo.scores([3.0, 1.0])
    assert lb.plan_sparsity(list(scores.blocks), sparsity=0.5, rule="uniform").blocks == (
        lb.plan_sparsity(scores.blocks, None, sparsity=0.5, rule="uniform").blocks
    )
    with pytest.raises(InvalidInput, match=r"source is of type list\. It should be scores or blocks or a loaded model"):
        lb.plan_sparsity([*scores.blocks, 1.0], sparsity=0.5)


def test_a_path_is_a_source_and_the_name_of_a_model(tmp_path):
    tokenizer = lb.load_tokenizer("demo")
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"number {n} is one of many numbers"}) + "\n" for n in range(40)))
    made, named = (lb.calibration(source, tokenizer, samples=2, length=8) for source in (file, str(file)))
    assert made.digest == named.digest
    lb.load_model("demo").save_pretrained(tmp_path / "model")
    assert lb.load_model(Path(tmp_path / "model")).config.model_type == "mistral"
    with pytest.raises(NotFound, match="nowhere"):
        lb.load_tokenizer(Path("nowhere"))


def test_numbers_of_numpy_and_types_of_torch_are_taken():
    scores = zoo.scores([3.0, 1.0])
    plans = [lb.plan_sparsity(scores, sparsity=half) for half in (0.5, np.float32(0.5), np.float64(0.5))]
    assert plans[0].blocks == plans[1].blocks == plans[2].blocks
    ranks = [lb.plan_ranks(scores.blocks, budget=size, rule="uniform") for size in ("9000", 9000, np.int64(9000))]
    assert ranks[0].blocks == ranks[1].blocks == ranks[2].blocks
    model = lb.load_model("demo", dtype=torch.bfloat16, device=torch.device("cpu"))
    assert next(model.parameters()).dtype == torch.bfloat16


def test_what_is_called_in_inference_mode_is_as_outside():
    """Gradients were zero there, and every matrix got the smallest type."""
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    data, blocks = lb.calibration("stdlib", tokenizer, samples=2, length=32), lb.partition(model)
    calls = {
        "gradients": lambda: lb.score(model, data, blocks, "gradient-norm").gain,
        "influences": lambda: lb.score(model, data, blocks, "layerif").gain,
        "bits": lambda: lb.plan_bits(model, data, bits=4).values.tolist(),
        "steps": lambda: lb.direct_check(model, data, blocks[:1]),
    }
    for name, call in calls.items():
        outside = call()
        with torch.inference_mode():
            assert call() == outside, name
            assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize(("wrap", "inside"), [(torch.compile, "_orig_mod"), (torch.nn.DataParallel, "module")])
def test_a_model_inside_a_wrapper_is_refused_and_what_is_inside_is_taken(wrap, inside):
    model = zoo.build("llama")
    wrapped = wrap(model)
    with pytest.raises(InvalidInput, match=rf"Give the model itself: model\.{inside}\."):
        lb.partition(wrapped)
    assert lb.partition(getattr(wrapped, inside)) == lb.partition(model)
