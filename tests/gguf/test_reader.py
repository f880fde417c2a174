"""A header reads as the package gguf reads it, and what is cut off is an error."""

from __future__ import annotations

import numpy as np
import pytest

from layerbudget.gguf.reader import read_gguf

gguf = pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("n", 7)
    writer.add_string("word", "naïve")
    writer.add_array("tokens", ["", "東京", "a" * 300])
    writer.add_array("kinds", [1, -2, 3])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_array("flags", [True, False])
    writer.add_tensor("x", np.arange(12, dtype=np.float32).reshape(3, 4))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return tmp_path / "a.gguf"


def test_values_and_tensors_are_those_of_the_package(file):
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    wanted = {key: field.contents() for key, field in theirs.fields.items()}
    found = ours.values()
    assert found == wanted and list(found) == list(wanted)
    assert [type(v) for v in found["flags"]] == [type(v) for v in wanted["flags"]]
    assert [(t.name, t.data_offset, t.data.tolist()) for t in ours.tensors] == [
        (t.name, t.data_offset, t.data.tolist()) for t in theirs.tensors
    ]
    assert sum(len(field.parts) for field in ours.fields.values()) < sum(len(field.parts) for field in theirs.fields.values())


def test_what_is_cut_off_is_an_error(file):
    whole = file.read_bytes()
    for key in (b"tokens", b"kinds"):
        for stop in range(whole.index(key) + len(key), whole.index(key) + len(key) + 40, 3):
            file.write_bytes(whole[:stop])
            with pytest.raises((ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, TypeError)):
                read_gguf(file)
