"""Every command of benchmarks/gpu at toy size on a processor, so that the first minute on a GPU is well spent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOY = {
    "DEVICE": "cpu", "SAMPLES": "4", "LENGTH": "16", "BATCH": "2", "STEPS": "3", "WIDTH": "64", "DEPTH": "2", "ROWS": "2",
    "SPARSITIES": "0.5", "WINDOWS": "4", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable,
}  # fmt: skip


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """One command of the kit."""
    return subprocess.run(
        ["sh", "benchmarks/gpu/run.sh", *words],
        cwd=ROOT,
        env={**os.environ, **TOY},
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.slow
def test_timing(tmp_path):
    done = command("timing", str(tmp_path), "tiny")
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "size.md").read_text()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    rows = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}
    assert "## tiny-cpu: " in page
    assert set(rows) == {"walk", "perplexity", "wanda", "sparsegpt", "fisher-trace", "rank-gain", "measure"}
    for row in rows.values():
        assert float(row["over its bound"]) > 0 and 0 < float(row["of the machine's peak"].rstrip("%")) < 100


@pytest.mark.slow
def test_quality(tmp_path):
    done = command("quality", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "compare-0.5" / "comparison.json").read_text())["complete"]


@pytest.mark.slow
def test_the_tests_of_a_device_are_left_out_without_one(tmp_path):
    import torch

    done = command("tests", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    assert torch.cuda.is_available() or "skipped" in done.stdout


def test_an_unknown_command_is_refused(tmp_path):
    done = command("dance", str(tmp_path))
    assert done.returncode == 2 and "timing, quality or tests" in done.stderr
