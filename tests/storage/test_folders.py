"""Folders of results: whole or not at all, wherever a run is killed; the user's files stay."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from tests.killing import killed_at

from layerbudget.errors import AlreadyExists, InvalidInput
from layerbudget.storage import folders
from layerbudget.storage.writing import left_behind, new_temporary, release, write_text

OLD = {"config.json": "old", "old.bin": "gone", "sub/a": "1"}
NEW = {"config.json": "new", "sub/b": "2", "notes.md": "ours"}


def save(out, files, **options):
    with folders.new_folder(out, **options) as temporary:
        for name, text in files.items():
            (temporary / name).parent.mkdir(exist_ok=True, parents=True)
            (temporary / name).write_text(text)


def content(out):
    return {f.relative_to(out).as_posix(): f.read_text() for f in out.rglob("*") if f.is_file() and f.name != folders.MANIFEST}


def test_a_folder_appears_whole_with_a_manifest_of_it(tmp_path):
    save(tmp_path / "out", NEW)
    assert content(tmp_path / "out") == NEW and folders.broken(tmp_path / "out") == []
    assert set(folders.manifest(tmp_path / "out")) == set(NEW)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "sub" / "b").write_text("x")
    assert folders.broken(tmp_path / "out") == ["sub/b"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_have_the_mode_of_new_files_whoever_wrote_them(tmp_path, umask):
    """safetensors, and temporary files, leave files that their owner alone reads."""
    before = os.umask(umask)
    try:
        with folders.new_folder(tmp_path / "out") as temporary:
            save_file({"a": torch.zeros(2)}, temporary / "model.safetensors")
            (temporary / "sub").mkdir(mode=0o700)
            (temporary / "sub" / "a").touch(0o600)
        write_text(tmp_path / "text", "x")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "out", *tmp_path.rglob("*"))}
    assert len(modes) == 6 and all(m == (0o777 if p.is_dir() else 0o666) & ~umask for p, m in modes.items())


def test_overwriting_removes_what_was_written_and_nothing_of_the_user(tmp_path):
    out = tmp_path / "out"
    save(out, OLD)
    (out / "notes.md").write_text("mine")
    (out / "sub" / "a").write_text("mine now")
    with pytest.raises(AlreadyExists, match="exists already.*pass overwrite=True"):
        save(out, NEW)
    with pytest.raises(InvalidInput, match="no place to write to: it is empty"):
        save("", NEW)
    save(out, NEW, overwrite=True)
    assert content(out) == {**NEW, "notes.md.yours": "mine", "sub/a": "mine now"}
    assert not left_behind(out) and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_without_a_manifest_is_the_users(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "receipt.json").write_text("{}")
    with pytest.raises(AlreadyExists, match="no manifest.json"):
        save(tmp_path / "out", NEW, overwrite=True)
    assert content(tmp_path / "out") == {"receipt.json": "{}"}


@pytest.mark.parametrize("kind", ["link", "here", "empty", "chain"])
def test_odd_targets_are_written_to_where_they_lead(tmp_path, monkeypatch, kind):
    real = tmp_path / "real"
    real.mkdir()
    out = {"link": tmp_path / "link", "here": ".", "empty": real, "chain": tmp_path / "chain"}[kind]
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "chain").symlink_to(tmp_path / "link")
    monkeypatch.chdir(real)
    save(out, NEW)
    assert content(real) == NEW and (tmp_path / "link").is_symlink()
    save(out, OLD, overwrite=True)
    assert content(real) == OLD


def test_what_cannot_be_written_to_is_refused_before(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "circle", "file/below", "pipe"):
        with pytest.raises((InvalidInput, AlreadyExists)):
            folders.check_folder(tmp_path / name, overwrite=True)


def test_a_result_is_kept_when_its_name_was_taken_meanwhile(tmp_path):
    for taken in (tmp_path / "out", tmp_path / "empty"):
        if taken.name == "empty":
            taken.mkdir()
        with pytest.raises(AlreadyExists, match="the result is in"), folders.new_folder(taken) as temporary:
            (temporary / "a").write_text("work of a night")
            taken.mkdir(exist_ok=True)
            (taken / "theirs").write_text("x")
        assert (taken / "theirs").read_text() == "x"
    assert {p.read_text() for p in tmp_path.rglob("a")} == {"work of a night"} and len(list(tmp_path.rglob("a"))) == 2


@pytest.mark.parametrize("before", [None, OLD])
def test_a_kill_anywhere_leaves_the_old_result_or_the_new_one_after_the_next_run(tmp_path, before):
    step, seen = 0, set()
    while True:
        step += 1
        out = tmp_path / str(step) / "out"
        out.parent.mkdir()
        if before:
            save(out, before)
            (out / "mine").write_text("mine")
        if not killed_at(step, lambda out=out: save(out, NEW, overwrite=True)):
            break
        folders.recover(out)
        found = content(out) if out.exists() else {}
        kept = {"mine": "mine"} if before else {}
        assert found in ({**NEW, **kept}, {**(before or {}), **kept}), step
        seen.add("config.json" in found and found["config.json"])
        assert [p.name for p in out.parent.iterdir()] in ([], ["out"]) and not (out.exists() and left_behind(out)), step
        save(out, NEW, overwrite=True)
        assert content(out) == {**NEW, **kept}
    assert step > 15 and "new" in seen and len(seen) == 2


def test_what_somebody_is_writing_now_is_left_alone(tmp_path):
    temporary, lock = new_temporary(tmp_path, "out")
    folders.check_folder(tmp_path / "out")
    assert temporary.exists()
    release(lock)
    folders.check_folder(tmp_path / "out")
    assert not temporary.exists()


def test_a_manifest_leads_nowhere_else(tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    save(out, OLD)
    other.mkdir()
    (other / "file").write_text("x")
    row = {"bytes": 1, "checksum": folders.checksum(other / "file")}
    (out / folders.MANIFEST).write_text(json.dumps({"files": {"../other/file": row}}))
    with pytest.raises(AlreadyExists, match="no manifest"):
        save(out, NEW, overwrite=True)
    (out / folders.COMMIT).mkdir()
    folders.recover(out)
    assert (other / "file").exists() and content(out) == OLD
