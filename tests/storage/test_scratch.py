"""Temporary folders: each goes with its run, and what a killed run left goes with the next one."""

import subprocess
import sys

import pytest

from layerbudget.execution.memory import Store
from layerbudget.storage.writing import Scratch

LIVES = """
import sys, tempfile
from layerbudget.storage.writing import Scratch
tempfile.tempdir = sys.argv[1]
scratch = Scratch()
(scratch.path / "moments").write_bytes(bytes(1000))
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of files there")
def test_what_a_killed_run_left_goes_with_the_next_one_and_what_a_living_one_uses_stays(place):
    run = [sys.executable, "-c", LIVES, str(place)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        left = other.stdout.readline().strip()
        with Scratch() as own:
            assert {str(own), left} == {str(path) for path in place.iterdir()}
        assert [str(path) for path in place.iterdir()] == [left]
        other.kill()
    assert [str(path) for path in place.iterdir()] == [left]
    with Scratch() as own:
        assert list(place.iterdir()) == [own]
    assert not list(place.iterdir())


def test_activations_on_disk_go_with_their_store(place):
    import torch

    store = Store("disk")
    store.put("x", torch.ones(3))
    assert len(list(place.iterdir())) == 1 and torch.equal(store.get("x"), torch.ones(3))
    store.close()
    assert not list(place.iterdir())
    Store("disk").put("x", torch.ones(3))  # one that nobody closes goes too
    assert not list(place.iterdir())
