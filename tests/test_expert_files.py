"""Experts of a few layouts beside the plain code of ``benchmarks.expert_pruning files``, which looks at every family."""

import pytest
from benchmarks.expert_pruning.files import check, silent

pytest.importorskip("gguf")
pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize(
    ("family", "columns"),
    [
        ("gpt_oss", ["masks", "experts"]),  # biases, gate and up by turns, inputs first
        ("zaya", ["masks"]),  # a router reads the state of the router before
        ("granitemoe", ["GGUF"]),
        ("nemotron_h", ["types"]),  # no gate, and names of its own
        ("hy_v3", ["vLLM", "loaded"]),  # other names in its checkpoint
    ],
)
def test_what_becomes_of_experts_equals_plain_code(family, columns, tmp_path):
    with silent():
        found = check(family, tmp_path, columns)
    assert {c: cell["state"] for c, cell in found.items()} == dict.fromkeys(columns, "equal"), found
