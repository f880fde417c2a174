"""Files from outside: bounds, types, and one sentence for what is wrong."""

import os
import shutil
import tempfile

import pytest

from layerbudget.errors import AlreadyExists, CorruptFile, InvalidInput, NotFound
from layerbudget.plan import Plan
from layerbudget.scores import Scores
from layerbudget.storage import reading, writing

DEEP = [
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '{"schema_version": 1, "model": ' + "[" * 200 + "]" * 200 + "}",
]
BAD = [
    *DEEP, "", "{", "[]", "1", "null", '{"schema_version": 1' + "0" * 40 + "}",
    '{"schema_version": 1}', '{"schema_version": "1"}',
    '{"schema_version": 1, "blocks": 3}', "\ufeff{}", '"\\ud800"',
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("kind", [Plan, Scores])
def test_a_broken_file_is_one_sentence(tmp_path, text, kind):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CorruptFile):
        kind.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    "harm", [None, {"d_in": 1.5}, {"d_in": 10**40}, {"d_in": -1}, {"d_in": "3"}, {"d_in": None}, {"name": 3}, {"name": ""}]
)
def test_every_block_has_matrices_of_whole_and_reasonable_shapes(tmp_path, harm):
    modules = [] if harm is None else [{"name": "a.w", "d_in": 3, "d_out": 4, **harm}]
    text = reading.dump({"schema_version": 1, "estimator": "x", "blocks": [{"name": "a", "modules": modules}], "gain": [[1.0]]})
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CorruptFile, match=r"blocks\[0\]\.modules"):
        Scores.load(tmp_path / "x.json")


@pytest.mark.parametrize("doubled", ["unit", "d_in"])
def test_a_key_that_is_there_twice_is_refused(tmp_path, doubled):
    module = {"name": "a.w", "d_in": 3, "d_out": 4}
    record = {
        "schema_version": 1,
        "estimator": "x",
        "blocks": [{"name": "a", "modules": [module]}],
        "gain": [[1.0]],
        "unit": "x",
    }
    (tmp_path / "x.json").write_text(reading.dump(record))
    assert Scores.load(tmp_path / "x.json").unit == "x"
    text = reading.dump(record).replace(f'"{doubled}":', f'"{doubled}": 7, "{doubled}":')
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CorruptFile, match=rf"x\.json has the key {doubled} twice\. Keep one"):
        Scores.load(tmp_path / "x.json")


def test_a_pipe_is_neither_read_nor_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFound):
        Plan.load(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="no ordinary file"):
        writing.check_output(tmp_path / "pipe", overwrite=True)
    with pytest.raises(InvalidInput, match="no ordinary file"):
        writing.write_text(tmp_path / "pipe", "x", overwrite=True)


def test_a_file_is_written_through_a_link_and_what_is_there_is_kept(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    writing.write_text(tmp_path / "link", "one")
    assert (tmp_path / "real").read_text() == "one" and (tmp_path / "link").is_symlink()
    with pytest.raises(AlreadyExists):
        writing.write_text(tmp_path / "link", "two")
    writing.write_text(tmp_path / "link", "two", overwrite=True)
    assert (tmp_path / "real").read_text() == "two"


def test_leftovers_of_a_dead_writer_go_at_the_next_run(tmp_path):
    (tmp_path / ".x.json.abcd1234.layerbudget").mkdir()
    (tmp_path / ".x.json.abcd1234.layerbudget" / "new").write_text("half")
    (tmp_path / ".x.json.mine").write_text("mine")
    writing.check_output(tmp_path / "x.json")
    assert [p.name for p in tmp_path.iterdir()] == [".x.json.mine"]


def test_a_full_disk_is_said_before(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(InvalidInput, match="GiB are free"):
        writing.check_space({tmp_path / "out": 1 << 62})
    with pytest.raises(InvalidInput, match="a and .*b.c will take"):  # each would fit
        writing.check_space({tmp_path / "a": 0.7 * free, tmp_path / "b" / "c": 0.7 * free})
    writing.check_space({tmp_path / "a": 0.5 * free})


def test_temporary_files_that_find_no_room_are_refused_with_the_name_of_their_folder():
    """An output cannot be chosen in their place; TMPDIR can."""
    with pytest.raises(InvalidInput, match="Free some space. TMPDIR=FOLDER names another folder"):
        writing.check_space({tempfile.gettempdir(): 1 << 62})
    with pytest.raises(InvalidInput, match="Free some space. Choose another output"):
        writing.check_space({tempfile.gettempdir(): 1 << 61, f"{tempfile.gettempdir()}/planned": 1 << 62})
