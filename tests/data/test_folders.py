"""Folders of rows: every file is read, known to be no rows, or refused by name; splits are kept apart."""

from __future__ import annotations

import bz2
import gzip
import json

import pytest

from layerbudget.data.files import is_local, read_rows
from layerbudget.data.text import calibration, read_documents, read_texts
from layerbudget.errors import InvalidInput, LayerbudgetError, MissingDependency, NotEnoughText, NotFound
from layerbudget.evaluation.perplexity import evaluation_set

TEXTS = [f"Sentence {i} of the data." for i in range(6)]


def lines(texts):
    return "\n".join(json.dumps({"text": text}) for text in texts)


@pytest.fixture
def splits(tmp_path):
    """A download of the hub: a card, a description, and three splits."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (tmp_path / "data").mkdir()
    for split, count in {"train": 6, "validation": 3, "test": 2}.items():
        rows = datasets.Dataset.from_list([{"prompt": f"{split} {i}?", "completion": f" {split} {i}"} for i in range(count)])
        rows.to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"description": "what it is"}))
    (tmp_path / ".gitattributes").write_text("*.parquet lfs\n")
    return tmp_path


def test_splits_are_learned_and_evaluated_apart_and_said(splits, tokenizer, caplog):
    assert calibration(str(splits), tokenizer, samples=None, length=32).samples == 6
    assert evaluation_set(str(splits), tokenizer, length=32).samples == 2
    found = read_texts(str(splits), tokenizer, limit=64, held_out=str(splits))
    assert (len(found.train), len(found.evaluation["held_out"])) == (6, 2)
    assert "train is read to learn and to calibrate" in caplog.text and "test is read to evaluate" in caplog.text
    for split in ("train", "validation"):
        (splits / "data" / f"{split}-00000-of-00001.parquet").unlink()
    assert calibration(str(splits), tokenizer, samples=None, length=32).samples == 2
    assert "has no split train: test is read to learn" in caplog.text


def test_saved_data_sets_are_read_as_datasets_reads_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    rows.select([5, 1, 3]).save_to_disk(tmp_path / "one", num_proc=None)
    assert read_documents(str(tmp_path / "one")) == datasets.load_from_disk(str(tmp_path / "one"))["text"][:]
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "both")
    assert read_documents(str(tmp_path / "both")) == TEXTS
    assert read_documents(str(tmp_path / "both"), group="evaluation") == TEXTS[:1]
    assert read_documents(str(tmp_path / "both" / "test")) == TEXTS[:1]
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(NotFound, match="saved data set without data-00000"):
        read_documents(str(tmp_path / "one"))


def test_names_of_labels_are_read_in_the_place_of_their_numbers(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    rows.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "rows.parquet")
    for place in ("saved", "rows.parquet"):
        assert [row["label"] for row, _ in read_rows(str(tmp_path / place))] == ["good", "bad", -1]


@pytest.mark.parametrize(
    ("files", "read"),
    [
        ({"a.jsonl": lines(TEXTS), "README.md": "# card", "LICENSE": "mit", "load.py": "x = 1", "a.jsonl.md5": "0"}, 6),
        ({"a.txt": "one", "b.md": "two", "README.md": "# card", "c.txt": ""}, 2),
        ({"a.py": "x = 1", "__init__.py": "", "tests/test_a.py": "y = 2", "__pycache__/a.pyc": "0"}, 2),
        ({"a.jsonl": lines(TEXTS), ".ipynb_checkpoints/a.jsonl": lines(TEXTS), ".cache/b.jsonl": lines(TEXTS)}, 6),
        ({"train.csv": "text,id\none,1\n", "train.csv.lock": ""}, 1),
        ({"wiki.train.raw": "one", "wiki.test.raw": "two", "wiki.valid.raw": "three"}, 1),
        ({"how-to-test.md": "one", "plan.md": "two"}, 2),
        ({"data/train_sft-00000-of-00001.jsonl": lines(TEXTS), "data/test_sft-00000-of-00001.jsonl": lines(TEXTS[:1])}, 6),
        ({"train/a.jsonl": lines(TEXTS), "dev/a.jsonl": lines(TEXTS[:1])}, 6),
    ],
)  # fmt: skip
def test_files_that_are_rows_and_files_that_are_none(tmp_path, files, read):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert len(read_documents(str(tmp_path))) == read


CONFIGS = "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\n{}---\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.jsonl": lines(TEXTS), "more.jsonl": lines(TEXTS)}, "files of a split .train.jsonl. and of none: more.jsonl"),
        ({"a.jsonl": lines(TEXTS), "b.docx": "0"}, "cannot be read: b.docx"),
        ({"a.jsonl": lines(TEXTS), "b.zip": "0"}, "cannot be read: b.zip"),
        ({"a.jsonl": lines(TEXTS), "a.csv": "text\none\n"}, "a.csv and a.jsonl"),
        ({"a.jsonl": lines(TEXTS), "a.jsonl.gz": ""}, "a.jsonl and a.jsonl.gz"),
        ({"data/train_a-00000-of-00001.jsonl": "", "data/train_b-00000-of-00001.jsonl": ""}, "several splits of train"),
        ({"a.jsonl": lines(TEXTS), "b.jsonl": lines(TEXTS), "README.md": CONFIGS.format("")}, "several configurations .* a, b"),
        ({"README.md": "# card", "state.json": "{}"}, "without state.json|no text file|holds no text"),
        ({"a.docx": "0"}, "no text file .it holds a.docx"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(LayerbudgetError, match=words):
        read_documents(str(tmp_path))


def test_the_card_of_a_data_set_says_which_files_are_its_splits(tmp_path):
    splits = "  - split: train\n    path: one*.jsonl\n  - split: test\n    path: two.jsonl\n"
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n"
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "one-a.jsonl").write_text(lines(TEXTS))
    (tmp_path / "two.jsonl").write_text(lines(TEXTS[:1]))
    assert read_documents(str(tmp_path)) == TEXTS and read_documents(str(tmp_path), group="evaluation") == TEXTS[:1]


def test_compressed_files_tables_and_marks(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS).encode()))
    (tmp_path / "b.txt.bz2").write_bytes(bz2.compress("one".encode("utf-8-sig")))
    (tmp_path / "c.TXT").write_bytes("two\r\n".encode("utf-8-sig"))
    (tmp_path / "d.tsv").write_text('text\tid\n"three\tfour"\t1\n')
    for name, texts in (("a.jsonl.gz", TEXTS), ("b.txt.bz2", ["one"]), ("c.TXT", ["two\n"]), ("d.tsv", ["three\tfour"])):
        assert is_local(str(tmp_path / name)) and read_documents(str(tmp_path / name)) == texts
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.CompressedOutputStream(str(tmp_path / "e.jsonl.zst"), "zstd") as stream:
        stream.write(lines(TEXTS).encode())
    assert read_documents(str(tmp_path / "e.jsonl.zst")) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "caf\xe9".encode("latin-1"), "a.txt is not UTF-8"),
        ("a.txt", "text".encode("utf-16"), "a.txt is not UTF-8"),
        ("a.txt", "text".encode("utf-16-le"), "a.txt has the character NUL 4 times"),
        ("a.csv", "text\none\n".encode("utf-16-be"), "a.csv has the character NUL 9 times"),
        ("a.csv", b"text,id\none,1,2\n", "line 2 of .*a.csv has more cells"),
        ("a.csv", b'text,id\n"one,1\n', "a.csv does not parse"),
        ("a.csv", b"text;id\none;1\n", "separated by semicolons"),
        ("a.csv", b"text,text\none,two\n", "two columns of one name"),
        ("a.jsonl", b'{"text": "one"}\n{"text": {"id": 1, "id": 2}}\n', "line 2 of .*a.jsonl has the key id twice"),
        ("a.json", b'[{"text": "one", "text": "two"}]', "a.json has the key text twice"),
        ("a.jsonl.gz", b"no gzip", "does not unpack"),
        ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 9, "does not unpack"),
        ("a.arrow", b"no arrow", "does not read as Arrow"),
        ("a.tar.gz", b"0", "is an archive"),
    ],
)  # fmt: skip
def test_files_that_do_not_read_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=f"(?i){words}"):
        read_documents(str(tmp_path / name))


def test_zstd_without_its_library_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"0")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match="zstd.* need pyarrow"):
        read_documents(str(tmp_path / "a.jsonl.zst"))


def test_blank_rows_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    (tmp_path / "a.jsonl").write_text(lines([text for t in TEXTS for text in (t, "", " \n")]))
    found = read_texts(str(tmp_path / "a.jsonl"), tokenizer, limit=64)
    assert len(found.train) + len(found.evaluation["held_out"]) == len(TEXTS)
    assert "12 of 18 rows" in caplog.text and "blank" in caplog.text
    assert read_documents(str(tmp_path / "a.jsonl")) == TEXTS
    (tmp_path / "b.jsonl").write_text(lines(["", " "]))
    with pytest.raises(NotEnoughText, match="All 2 rows"):
        read_texts(str(tmp_path / "b.jsonl"), tokenizer, limit=64)
