"""Names, paths and other things in the place of models, texts, scores, plans, blocks and tokenizers."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import layerbudget as lb
import pytest
from layerbudget.arguments import NAMED, kinds_of
from layerbudget.errors import InvalidInput, NotFound

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
    ("calibration", {"source": 3, "tokenizer": str.split}, "source is 3"),
    ("compare_results", {"first": "a.json", "second": "b.json"}, "These are no results"),
    ("certify_ranking", {"table": "a.json"}, "no table of losses"),
]


@pytest.mark.parametrize(("name", "parameter"), DOORS)
def test_a_public_function_refuses_by_name_what_is_of_another_type(name, parameter):
    function = getattr(lb, name)
    wrong = 3 if parameter in NAMED else "demo"
    with pytest.raises(InvalidInput, match=f"^{parameter} is {wrong!r}, of type {type(wrong).__name__}. It should be "):
        function(**{parameter: wrong})


def test_every_function_that_takes_a_model_is_among_them():
    seen = dict.fromkeys(name for name, _ in DOORS)
    assert len(seen) > 40
    assert {"score", "plan_bits", "prune", "perplexity", "load_model", "calibration"} <= set(seen)


@pytest.mark.parametrize(("name", "given", "said"), OTHERS)
def test_what_has_other_types_refuses_too(name, given, said):
    with pytest.raises(InvalidInput, match=said):
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


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(InvalidInput) as raised:
        lb.explain_plan("a" * 200)
    assert len(str(raised.value)) < 200
