"""Parts of a long run: whole ones are used again, broken ones and those of other runs are made again."""

import math

import pytest
from tests.killing import killed_at

from layerbudget.errors import InvalidInput, ModelMismatch
from layerbudget.storage.parts import STATE, Cells, Parts, Standing, clear, standing_of


def kept(folder, key="k", value=1):
    made = []

    def make():
        made.append(value)
        return {"value": value, "odd": [math.inf, 0.1 + 0.2]}

    found = Parts(folder, key).json("part-1", make)
    return found, bool(made)


def test_a_part_is_made_once(tmp_path):
    assert kept(tmp_path) == ({"value": 1, "odd": [math.inf, 0.1 + 0.2]}, True)
    assert kept(tmp_path, value=2) == ({"value": 1, "odd": [math.inf, 0.1 + 0.2]}, False)
    assert Parts(None, "k").json("part-1", lambda: (1, 2)) == [1, 2]


@pytest.mark.parametrize("harm", ["truncate", "empty", "flip", "remove"])
def test_a_broken_part_is_made_again(tmp_path, harm):
    kept(tmp_path)
    (file,) = tmp_path.glob("part-1.*")
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    {
        "truncate": lambda: file.write_bytes(file.read_bytes()[:-3]),
        "empty": lambda: file.write_bytes(b""),
        "flip": lambda: file.write_bytes(content),
        "remove": file.unlink,
    }[harm]()
    assert kept(tmp_path, value=2)[1]
    assert kept(tmp_path, value=3) == ({"value": 2, "odd": [math.inf, 0.1 + 0.2]}, False)


@pytest.mark.parametrize("state", [None, "", "{", "[1]", '{"key": 3}', "{}"])
def test_parts_of_another_run_are_never_used_whatever_became_of_the_state(tmp_path, state):
    kept(tmp_path, "one")
    with pytest.raises(ModelMismatch):
        kept(tmp_path, "two")
    (tmp_path / STATE).unlink()
    if state is not None:
        (tmp_path / STATE).write_text(state)
    assert kept(tmp_path, "two", 2)[1]


def test_clearing_removes_parts_only(tmp_path):
    kept(tmp_path)
    mine = ("block-0.safetensors", "notes.md", "part-1.json")
    for name in mine:
        (tmp_path / name).write_text("mine")
    clear(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(mine)
    other = tmp_path / "other"
    kept(other)
    clear(other)
    assert not other.exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput):
        Parts(tmp_path / "file", "k")


def test_a_kill_anywhere_leaves_whole_parts_or_none(tmp_path):
    step, killed, found = 0, True, set()
    while killed:
        step += 1
        folder = tmp_path / str(step)
        killed = killed_at(step, lambda folder=folder: (kept(folder), kept(folder, value=2), Parts(folder, "k").clear()))
        found.add(kept(folder, value=3)[0]["value"])
        assert len(list(folder.iterdir())) == 2  # no leftover: the state and the part
    assert step > 8 and found == {1, 3}


def test_cells_are_shared_between_processes(tmp_path):
    def made(cells):
        return [cells.get({"i": i}, lambda: {"x": i}) is not None for i in range(4)]

    assert [made(Cells(None, (i, 2))) for i in (1, 2)] == [[True, False, True, False], [False, True, False, True]]
    one = Cells(tmp_path, (1, 2))
    assert made(one) == [True, False, True, False] and (one.made, one.missing) == (2, 2)
    assert made(Cells(tmp_path)) == made(one) == [True] * 4 and one.missing == 0 and one.seconds > 0
    assert [one.get({"i": i}, dict)["x"] for i in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InvalidInput):
        Cells(None, (3, 2))


def test_only_cells_of_an_earlier_run_count_as_kept(tmp_path):
    """Two equal plans of one run were said to be measured by an earlier one."""
    first, again = Cells(tmp_path), Cells(tmp_path)
    for _ in range(2):
        assert first.get({"plan": 1}, lambda: {"value": 1.0}) == {"value": 1.0}
    again.get({"plan": 1}, lambda: {"value": 2.0})
    assert (first.made, first.kept) == (1, 0) and (again.made, again.kept) == (0, 1)


def test_a_grid_says_how_far_it_is(tmp_path):
    """Cells of another grid in the folder do not count, and the same grid again leaves the file as it is."""
    assert standing_of(tmp_path / "none") is None and standing_of(tmp_path) is None
    cells, keys = Cells(tmp_path), [{"i": i} for i in range(3)]
    cells.get({"i": "other"}, lambda: {"x": 1})
    assert standing_of(tmp_path) == Standing(done=0, total=None, command="")
    cells.expect([*keys, keys[0]], "layerbudget compare")
    cells.get(keys[1], lambda: {"x": 1})
    assert standing_of(tmp_path) == Standing(done=1, total=3, command="layerbudget compare")
    stamp = (tmp_path / "grid.json").stat().st_mtime_ns
    Cells(tmp_path).expect(keys, "layerbudget compare")
    assert (tmp_path / "grid.json").stat().st_mtime_ns == stamp
