"""Tasks from the original files: counts, labels, prompts, and refusals."""

from __future__ import annotations

import json

import pytest
from tests import conftest

from layerbudget.data.tasks import load_task
from layerbudget.errors import CorruptFile, InvalidInput, NotEnoughText, NotFound

SHARED = conftest.SHARED / "data"
COUNTS = {
    "cola": (8551, {"in_domain": 527, "out_of_domain": 516}, 2, "matthews"),
    "mrpc": (3668, {"dev": 408}, 2, "f1"),
    "rte": (2490, {"dev": 277}, 2, "accuracy"),
    "commonsenseqa": (9741, {"dev": 1221}, 5, "accuracy"),
    "openbookqa": (4957, {"dev": 500, "test": 500}, 4, "accuracy"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_counts(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not here")
    task = load_task(name, SHARED)
    train, held, labels, metric = COUNTS[name]
    assert (len(task.train), {k: len(v) for k, v in task.evaluation.items()}) == (train, held)
    assert (len(task.labels), task.metric) == (labels, metric)
    assert load_task(name, SHARED / name).digest == task.digest


def test_label_balance_of_mrpc_and_rte():
    if not (SHARED / "mrpc").is_dir():
        pytest.skip(f"{SHARED} is not here")
    assert sum(e.label for e in load_task("mrpc", SHARED).train) == 2474
    assert sum(e.label for e in load_task("rte", SHARED).train) == 1249


def test_scienceqa_without_images_has_the_prompt_of_mola():
    if not (SHARED / "scienceqa").is_dir():
        pytest.skip(f"{SHARED / 'scienceqa'} is not here")
    task = load_task("scienceqa", SHARED)
    assert (len(task.train), len(task.evaluation["val"]), len(task.evaluation["test"])) == (520, 180, 194)
    published = [json.loads(line) for line in (SHARED / "scienceqa" / "mola_sampled_train.jsonl").read_text().splitlines()]
    published += [json.loads(line) for line in (SHARED / "scienceqa" / "mola_sampled_test.jsonl").read_text().splitlines()]
    ours = {e.text: task.answers[e.label] for rows in (task.train, *task.evaluation.values()) for e in rows}
    shared = [row for row in published if row["instruction"] in ours]
    assert len(shared) > 10
    assert all(ours[row["instruction"]] == row["output"] for row in shared)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_file_of_ones_own(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    rows = [{"text": f"row {i}", "label": "yes" if i % 3 else "no"} for i in range(60)]
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(r) for r in rows))
    else:
        path.write_text("text,label\n" + "\n".join(f"{r['text']},{r['label']}" for r in rows))
    task = load_task(str(path))
    assert task.labels == ("no", "yes") and len(task.train) + len(task.evaluation["held_out"]) == 60
    assert 1 <= len(task.evaluation["held_out"]) <= 15
    small = task.limited(10, 2)
    assert (len(small.train), len(small.evaluation["held_out"])) == (10, 2)
    assert set(small.train) <= set(task.train)


def test_refusals(tmp_path):
    with pytest.raises(InvalidInput, match="no task 'glue'"):
        load_task("glue", tmp_path)
    with pytest.raises(NotFound, match="--data-dir"):
        load_task("cola")
    with pytest.raises(NotFound, match="in_domain_train.tsv"):
        load_task("cola", tmp_path)
    (tmp_path / "train.tsv").write_text("head\nonly one column\n")
    with pytest.raises(CorruptFile, match="line 2 has 1 columns"):
        load_task("rte", tmp_path)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InvalidInput, match="has the columns a"):
        load_task(str(tmp_path / "x.jsonl"))
    (tmp_path / "y.jsonl").write_text('{"text": "t", "label": 1}\n{bad\n')
    with pytest.raises(InvalidInput, match="Line 2"):
        load_task(str(tmp_path / "y.jsonl"))
    (tmp_path / "train.tsv").write_text("head\n")
    (tmp_path / "dev.tsv").write_text("head\n")
    with pytest.raises(NotEnoughText, match="0 training rows"):
        load_task("rte", tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"a": 1}'), ("b.json", "nothing"), ("c.jsonl", '{"text": "x", "label": "a"}\n{"text": "y"}\n'),
        ("d.json", "[1]"),
    ],
)  # fmt: skip
def test_tables_that_do_not_parse_are_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises((CorruptFile, InvalidInput), match=name):
        load_task(str(tmp_path / name))


def test_labels_that_a_release_does_not_have_are_named(tmp_path):
    (tmp_path / "rte").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "rte" / name).write_text("head\n1\ta\tb\tmaybe\n")
    with pytest.raises(CorruptFile, match="maybe"):
        load_task("rte", tmp_path)


def test_no_rows_at_all_cannot_be_asked_for(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"row {i}", "label": i % 2}) for i in range(60)))
    with pytest.raises(InvalidInput, match="0 rows"):
        load_task(str(path)).limited(0)
