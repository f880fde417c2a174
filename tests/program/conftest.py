"""Put this folder's helpers on the path (tests are imported by path)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def rng():
    """A seeded generator."""
    return np.random.default_rng(20240501)
