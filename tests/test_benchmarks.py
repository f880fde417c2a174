"""Parts of the scripts in ``benchmarks/`` that fail in ways of their own."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("gguf")


def test_incomplete_output_of_llama_perplexity_is_said_with_its_last_lines(monkeypatch):
    """Its standard output was cut sometimes: nothing was found in it, and the error was one of types."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    kld_of = importlib.import_module("types_quality").kld_of
    assert kld_of("a\nMean    KLD:   0.012345 ±   0.000678\nb") == (0.012345, 0.000678)
    cut = "\n".join(f"line {n}" for n in range(20)) + "\nMean    KLD:   0.01"
    with pytest.raises(SystemExit, match="printed no mean KLD: its output is incomplete") as said:
        kld_of(cut)
    assert "line 13" in str(said.value) and "line 12" not in str(said.value) and str(said.value).endswith("KLD:   0.01")
