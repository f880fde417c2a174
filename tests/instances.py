"""Random instances and the plainest possible oracles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st


@st.composite
def instances(draw):
    """A seed's instance: sizes, skew, ties and zeros vary; drawing a seed keeps 10,000 instances cheap."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    k = int(rng.choice([1, 2, 3, 5, 8, 32, 47, 48, 49, 64, 200], p=[0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.05, 0.05, 0.05, 0.1, 0.05]))
    style = rng.integers(6)
    if style == 0:
        q = np.full(k, 0.3)
    elif style == 1:
        q = rng.integers(1, 4, k).astype(float)
    elif style == 2:
        q = 10.0 ** rng.uniform(-300, 300, k)
    elif style == 3:
        q = np.where(rng.random(k) < 0.4, 0.0, rng.random(k))
        q[rng.integers(k)] = 1.0
    else:
        q = rng.random(k) ** rng.integers(1, 6) + 1e-12
    size = np.ones(k) if rng.random() < 0.3 else np.exp(rng.normal(0, rng.random() * 2, k)) * 10.0 ** rng.integers(-3, 10)
    if rng.random() < 0.2:
        size = rng.integers(1, 4, k).astype(float)
    low = np.where(rng.random(k) < 0.3, rng.random(k) * 0.3, 0.0)
    high = low + np.where(rng.random(k) < 0.1, 0.0, rng.random(k) * 0.7 * rng.choice([1.0, 1e-3]))
    return {"q": q, "size": size, "low": low, "high": high, "part": float(rng.choice([0.0, 1.0, rng.random()])), "rng": rng}


def dense_bisection(spend, target, low, high, steps=4000):
    """Root of a nondecreasing function by bisection in the log domain: slow, obvious."""
    a, b = np.log(low), np.log(high)
    for _ in range(steps):
        middle = (a + b) / 2
        if middle in (a, b):
            break
        a, b = (middle, b) if spend(np.exp(middle)) < target else (a, middle)
    return np.exp((a + b) / 2)


@pytest.fixture
def bisect():
    """The function above."""
    return dense_bisection
