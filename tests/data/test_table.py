"""A labelled table of one's own: every column is read or named, labels are told apart by what they mean."""

from __future__ import annotations

import json

import pytest

from layerbudget.data.tasks import load_task
from layerbudget.errors import CorruptFile, InvalidInput, LayerbudgetError, NotEnoughText

FILMS = [f"film number {i}" for i in range(40)]


@pytest.fixture
def task_of(tmp_path):
    """The task of rows in a file."""

    def read(rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return load_task(str(tmp_path / "rows.jsonl"))

    return read


@pytest.mark.parametrize(
    "columns",
    [
        ("instruction", "input", "output"), ("question", "sentence", "label"), ("question", "passage", "answer"),
        ("premise", "hypothesis", "label"), ("title", "description", "class"), ("context", "question", "completion"),
        ("question", "answer", "label"),
    ],
)  # fmt: skip
def test_all_texts_of_a_row_are_in_its_prompt(task_of, columns):
    first, second, label = columns
    task = task_of([{first: f"the same {first}", second: film, label: i % 2} for i, film in enumerate(FILMS)])
    rows = [*task.train, *task.evaluation["held_out"]]
    assert len(rows) == 40 and task.evaluation["held_out"]
    assert all(f"the same {first}" in row.prompt and "film number" in row.prompt for row in rows)


def test_harmless_columns_are_passed_over_and_others_refused(task_of):
    rows = [{"text": film, "label": i % 2, "idx": i, "source_url": "x", "label_text": "no yes".split()[i % 2], "empty": None}
            for i, film in enumerate(FILMS)]  # fmt: skip
    assert "x" not in task_of(rows).train[0].prompt.split()
    with pytest.raises(InvalidInput, match="column speaker, which would not be read"):
        task_of([{**row, "speaker": row["text"][::-1]} for row in rows])
    with pytest.raises(InvalidInput, match="column image"):
        task_of([{**row, "image": {"bytes": row["text"]}} for row in rows])


def test_spellings_of_a_label_are_one_and_numbers_are_what_they_are(task_of, caplog):
    task = task_of([{"text": film, "label": ("yes", "Yes", "yes ", "no")[i % 4]} for i, film in enumerate(FILMS)])
    assert task.labels == ("no", "yes") and "yes also as Yes" in caplog.text
    assert task_of([{"text": film, "label": (1, 1.0, "0")[i % 3]} for i, film in enumerate(FILMS)]).labels == ("0", "1")
    assert task_of([{"text": film, "label": bool(i % 2)} for i, film in enumerate(FILMS)]).labels == ("False", "True")


def test_hidden_labels_are_no_class(task_of):
    for hidden in (-1, "-1", -1.0):
        with pytest.raises(InvalidInput, match="13 of 40 rows of .* have the label -1, the first is line 3"):
            task_of([{"text": film, "label": hidden if i % 3 == 2 else i % 2} for i, film in enumerate(FILMS)])


@pytest.mark.parametrize("label", [None, "", float("nan"), [0, 1]])
def test_rows_without_one_label_are_named(task_of, label):
    with pytest.raises(CorruptFile, match="Line 7 of "):
        task_of([{"text": film, "label": label if i == 6 else i % 2} for i, film in enumerate(FILMS)])


def test_rows_without_a_text_and_tables_that_are_too_small_are_named(task_of):
    with pytest.raises(CorruptFile, match="Line 1 of .* has no text"):
        task_of([{"text": " ", "label": 0}, {"text": "b", "label": 1}])
    with pytest.raises(NotEnoughText, match="has 1 texts"):
        task_of([{"text": "a", "label": 0}, {"text": "a", "label": 1}])
    assert len(task_of([{"text": "a", "label": 0}, {"text": "b", "label": 1}]).evaluation["held_out"]) == 1


def test_half_a_character_is_named(task_of):
    with pytest.raises(InvalidInput, match=r"^The column text in line 2 of .* holds half a character \(.udc00\)"):
        task_of([{"text": "a \udc00" if i == 1 else film, "label": i % 2} for i, film in enumerate(FILMS)])


def test_splits_of_a_folder_are_those_of_the_task(tmp_path, caplog):
    for name, shift in {"train": 0, "validation": 1, "test": 2}.items():
        rows = [{"text": f"{name} {film}", "label": -1 if name == "test" else i % 2} for i, film in enumerate(FILMS[shift:])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_task(str(tmp_path))
    assert (len(task.train), {k: len(v) for k, v in task.evaluation.items()}) == (40, {"validation": 39})
    assert "labels of test" in caplog.text and all("train film" in row.prompt for row in task.train)
    (tmp_path / "validation.jsonl").unlink()
    assert set(load_task(str(tmp_path)).evaluation) == {"held_out"}


def test_names_of_classes_are_the_answers(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    rows = datasets.Dataset.from_dict({"text": FILMS, "label": [i % 2 for i in range(40)]}, features=features)
    rows.save_to_disk(tmp_path / "saved")
    task = load_task(str(tmp_path / "saved"))
    assert task.labels == ("bad", "good") and task.answers == ("Answer: bad", "Answer: good")


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "rows.xlsx").write_text("0")
    with pytest.raises(LayerbudgetError, match="xlsx"):
        load_task(str(tmp_path / "rows.xlsx"))
