"""A text that decided a plan is not its judge."""

import dataclasses

import numpy as np
import pytest
from tests import zoo

from layerbudget.cli.evaluate import _on_text
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.reporting.decided import texts_of_folder


@pytest.mark.parametrize(
    ("command", "read", "warned"),
    [
        ("layerbudget plan sparsity moe --data my.txt -o p.json", "my.txt", True),
        ("layerbudget plan sparsity moe --data 'a dir/my.txt' -o p.json", "elsewhere/my.txt", True),
        ("layerbudget plan sparsity moe --data a.txt,b.txt -o p.json", "b.txt", True),
        ("layerbudget plan sparsity moe --data my.txt -o p.json", "other.txt", False),
        ("layerbudget plan sparsity moe --data stdlib -o p.json", "stdlib", False),  # it has a part for evaluation
        ("layerbudget plan sparsity moe --data stdlib:training -o p.json", "stdlib:training", True),
        ("", "my.txt", False),  # Python made it
    ],
)
def test_a_text_that_decided_the_plan_is_named_beside_the_verdict(tmp_path, command, read, warned):
    plan = plan_sparsity(zoo.scores(np.arange(1.0, 4.0)), sparsity=0.5)
    dataclasses.replace(plan, made_by=command).save(tmp_path / "plan.json")
    told = _on_text((str(tmp_path), "moe"), [read])
    assert told == (f" But {read} decided the plan of {tmp_path}, which flatters it: judge it on other text." if warned else "")


def test_the_text_of_scores_decided_a_plan_that_is_made_from_them(tmp_path):
    scores = dataclasses.replace(zoo.scores(np.arange(1.0, 4.0)), data={"source": "my.txt", "samples": 4, "length": 16})
    plan_sparsity(scores, sparsity=0.5).save(tmp_path / "plan.json")
    assert texts_of_folder(tmp_path) == {"my.txt"}


def test_a_folder_without_a_plan_or_with_a_broken_one_says_nothing(tmp_path):
    assert texts_of_folder(tmp_path) == set() == texts_of_folder(tmp_path / "none")
    (tmp_path / "plan.json").write_text("{")
    assert texts_of_folder(tmp_path) == set()
