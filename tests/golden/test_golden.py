"""What scores, plans and masks were when ``digests.json`` was written is what they are.

Exactly, where two sources are compared on one machine (``make.py``); here to rounding, for kernels differ between processors.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        return module.make()["entries"]
    finally:
        torch.use_deterministic_algorithms(before)


def near(now, then, tolerance=2e-3) -> bool:
    if not isinstance(now, dict) or "about" not in now:
        if isinstance(now, dict) and isinstance(then, dict) and now.keys() == then.keys():
            return all(near(now[k], then[k]) for k in now)
        return now == then
    if now["digest"] == then["digest"]:
        return True
    a, b = np.array(now["about"]), np.array(then["about"])
    return now["size"] == then["size"] and np.allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_nothing_moved(made):
    then = json.loads((HERE / "digests.json").read_text())["entries"]
    assert made.keys() == then.keys()
    moved = [name for name in then if not near(made[name], then[name])]
    assert not moved, moved
