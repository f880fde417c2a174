"""What scores, plans and masks were when ``digests.json`` was written is what they are.

Exactly, where two sources are compared on one machine (``make.py``); here to rounding, for kernels differ between processors.
Between AMX, AVX-512, AVX2 and SSE4 scores and plans move by 8e-6 of the largest number at most. A mask decides between entries
that nearly tie, and SparseGPT carries such a choice on into later columns: masks move by 9e-4 at most.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
NUMBERS, MASKS = 1e-4, 2e-3


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(make):
    before = torch.are_deterministic_algorithms_enabled()
    try:
        return make.make()["entries"]
    finally:
        torch.use_deterministic_algorithms(before)


def near(now, then, tolerance=NUMBERS) -> bool:
    """Whether an entry is what it was: its numbers to rounding, relative to the largest, all else exactly."""
    if not isinstance(now, dict) or not isinstance(then, dict) or now.keys() != then.keys():
        return now == then
    if "about" not in now:
        return all(near(now[k], then[k], MASKS) for k in now)
    if any(now[k] != then[k] for k in now if k not in ("digest", "about")):
        return False
    a, b = np.array(now["about"]), np.array(then["about"])
    return a.shape == b.shape and bool((np.abs(a - b) <= tolerance * np.abs(b).max()).all())


def test_nothing_moved(made):
    then = json.loads((HERE / "digests.json").read_text())["entries"]
    assert made.keys() == then.keys()
    moved = [name for name in then if not near(made[name], then[name])]
    assert not moved, moved


def test_every_golden_number_is_finite(make):
    """Four entries held NaN: only their digests were compared, and digests differ between processors."""

    def refuse(word):
        raise AssertionError(f"digests.json holds {word}")

    json.loads((HERE / "digests.json").read_text(), parse_constant=refuse)
    with pytest.raises(ValueError, match="1 of 2 numbers are not finite"):
        make.entry([1.0, float("nan")])


def test_what_moves_is_seen(make):
    then = {**make.entry([3.0, 0.01]), "refused": [1]}
    assert near({**make.entry([3.0, 0.01 + 1e-4]), "refused": [1]}, then)
    assert not near({**make.entry([3.0, 0.01 + 1e-3]), "refused": [1]}, then)
    assert not near({**make.entry([3.0 + 1e-3, 0.01]), "refused": [1]}, then)
    for other in ({**then, "refused": [2]}, make.entry([3.0, 0.01]), {**make.entry([3.0]), "refused": [1]}):
        assert not near(other, then)
    assert not near({"removed": [1, 2]}, {"removed": [1, 3]})
