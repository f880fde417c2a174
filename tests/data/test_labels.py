"""Labels of task files: known ones are read in every spelling, unknown ones are refused, one class only is said."""

from __future__ import annotations

import json

import pytest

from layerbudget.data.tasks import load_task
from layerbudget.errors import CorruptFile
from layerbudget.evaluation import harness
from layerbudget.evaluation.harness import local_rows

CHOICES = [{"text": t, "label": k} for k, t in zip("ABCD", ("one", "two", "three", "four"), strict=True)]
ASKED = {"id": "1", "question": {"stem": "Which?", "choices": CHOICES}, "answerKey": "B"}
ENDS = {"ind": 1, "activity_label": "x", "ctx_a": "a", "ctx_b": "b", "ctx": "a b", "endings": ["1", "2", "3", "4"], "label": 3}
BLANK = {"sentence": "_ is.", "option1": "x", "option2": "y", "answer": "2"}
# task: (file, a row, the column with the label, spellings that are known, values that are not)
JSON = {
    "boolq": ("boolq/val.jsonl", {"question": "q", "passage": "p", "label": "false"}, "label",
              {"false": 0, "true": 1, "False": 0, False: 0, True: 1, "0": 0, "1": 1}, ("maybe", 2, None, [], "")),
    "arc_easy": ("arc_easy/ARC-Easy-Test.jsonl", ASKED, "answerKey", {"B": "B", "D": "D"}, ("E", "", None, 0)),
    "openbookqa": ("openbookqa/test.jsonl", ASKED, "answerKey", {"A": "A", "C": "C"}, ("G", None)),
    "hellaswag": ("hellaswag/hellaswag_val.jsonl", ENDS, "label", {0: "0", "3": "3"}, (4, "-1", "", None)),
    "winogrande": ("winogrande/dev.jsonl", BLANK, "answer", {"1": "1", "2": "2", 1: "1"}, ("3", "", 0, None)),
}  # fmt: skip


def write(folder, name, rows):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(r) for r in rows))


@pytest.mark.parametrize("task", JSON)
def test_labels_of_the_harness(task, tmp_path):
    """BoolQ scored 0.0: bool("false") is true."""
    name, row, column, known, unknown = JSON[task]
    for value, expected in known.items():
        write(tmp_path, name, [{**row, column: value}])
        assert local_rows(task, tmp_path)[0][column if column != "label" else "label"] == expected
    for value in unknown:
        write(tmp_path, name, [row, {**row, column: value}])
        with pytest.raises(CorruptFile, match="row 2 has the label"):
            local_rows(task, tmp_path)


def test_boolq_as_it_was_released_and_as_a_list(tmp_path):
    row = {"question": "q", "passage": "p", "answer": True}
    write(tmp_path, "boolq/val.jsonl", [row, {**row, "answer": False}])
    assert [r["label"] for r in local_rows("boolq", tmp_path)] == [1, 0]
    (tmp_path / "boolq/val.jsonl").write_text(json.dumps([row]))
    assert [r["label"] for r in local_rows("boolq", tmp_path)] == [1]
    write(tmp_path, "boolq/val.jsonl", [{"question": "q", "passage": "p"}])
    with pytest.raises(CorruptFile, match="does not parse"):
        local_rows("boolq", tmp_path)


def test_boolq_of_the_released_file_has_both_answers(shared_data):
    labels = [r["label"] for r in local_rows("boolq", shared_data)]
    assert set(labels) == {0, 1} and 0.5 < sum(labels) / len(labels) < 0.7


@pytest.mark.parametrize("label", ["entailed", "", "2", "true"])
def test_rte_of_the_harness(label, tmp_path):
    (tmp_path / "rte").mkdir()
    lines = ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tnot_entailment", "1\ta\tb\tentailment"]
    (tmp_path / "rte/dev.tsv").write_text("\n".join(lines))
    assert {r["label"] for r in local_rows("rte", tmp_path)} == {0, 1}
    (tmp_path / "rte/dev.tsv").write_text("\n".join([*lines, f"2\ta\tb\t{label}"]))
    with pytest.raises(CorruptFile, match="row 3 has the label"):
        local_rows("rte", tmp_path)


def files_of(task, wrong):
    """A task's files with one row of label ``wrong``."""
    asked = {**ASKED, "fact1": "f", "answerKey": wrong}
    options = "\n".join(json.dumps(asked) for _ in range(2))
    return {
        "cola": {f"{n}.tsv": f"x\t{wrong}\t\tA.\n" for n in ("in_domain_train", "in_domain_dev", "out_of_domain_dev")},
        "mrpc": {n: f"Quality\t#1 ID\t#2 ID\ta\tb\n{wrong}\t1\t2\tx\ty\n" for n in ("train.tsv", "dev.tsv", "test.tsv")},
        "rte": {n: f"index\tsentence1\tsentence2\tlabel\n0\ta\tb\t{wrong}\n" for n in ("train.tsv", "dev.tsv")},
        "commonsenseqa": dict.fromkeys(("train_rand_split.jsonl", "dev_rand_split.jsonl"), options),
        "openbookqa": dict.fromkeys(("train.jsonl", "dev.jsonl", "test.jsonl"), options),
    }[task]


@pytest.mark.parametrize("task", ["cola", "mrpc", "rte", "commonsenseqa", "openbookqa"])
def test_unknown_labels_of_training_tasks(task, tmp_path):
    for name, text in files_of(task, "yes?").items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CorruptFile, match=r"has the label 'yes\?'"):
        load_task(task, tmp_path)


def test_one_class_is_said():
    assert harness.one_class([1, 1, 1], [2, 2, 2]) == 1
    assert harness.one_class([1, 0, 1], [2, 2, 2]) is None
    assert harness.one_class([0], [2]) is None and harness.one_class([1, 1], [4, 5]) is None
