"""Plain dense oracles and shared instances for the program tests."""

from __future__ import annotations

import numpy as np
import pytest

from layerbudget.records import Block, Module
from layerbudget.scores.record import Scores


def make_scores(values, sizes=None, **fields) -> Scores:
    """A score record over invented layers, one matrix each."""
    sizes = sizes if sizes is not None else [64] * len(values)
    blocks = [
        Block(name=f"model.layers.{i}", modules=(Module(name=f"model.layers.{i}.mlp", d_in=64, d_out=int(d)),))
        for i, d in enumerate(sizes)
    ]
    return Scores.from_values({b.name: float(v) for b, v in zip(blocks, values, strict=True)}, blocks, **fields)


@pytest.fixture
def scores_of():
    """The function above."""
    return make_scores


@pytest.fixture
def rng():
    """A seeded generator."""
    return np.random.default_rng(20240501)
