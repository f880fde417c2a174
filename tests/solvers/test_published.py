"""Published rules against published numbers and their edge cases."""

import numpy as np
import pytest
from paper.released import released

from layerbudget.errors import DegenerateScores, InfeasibleBudget, InvalidInput
from layerbudget.solvers import published

ORDER_LAYERIF = {
    ("mrpc", 2): "2 6 8 5 6 9 9 9 9 9 8 8 6 7 6 5 6 5 4 2 5 5 2 1 5 3 2 3 1 2 1 1",
    ("mrpc", 3): "1 6 8 5 6 11 10 10 10 10 8 10 6 7 6 4 6 4 3 1 5 5 2 1 5 2 1 3 1 1 1 1",
    ("cola", 3): "1 14 10 7 9 11 10 7 8 8 9 7 5 9 6 3 7 3 3 2 3 4 2 1 4 1 1 1 1 1 1 1",
}
ALPHAS = [
    2.1351, 3.1293, 3.7148, 3.3989, 3.6941, 3.8885, 3.4063, 3.5072, 3.0578, 3.3086, 2.9472, 2.7571, 2.8589, 2.9203, 3.2058,
    3.5891, 4.7149, 3.4514, 4.4717, 4.1243, 4.2098, 4.2885, 4.4310, 4.2816, 4.5308, 4.3364, 4.1002, 4.4903, 3.7633, 4.1410,
    3.4184, 2.9660,
]  # fmt: skip


@pytest.mark.parametrize("case", ORDER_LAYERIF)
def test_layerif_lists_are_the_published_ones(case):
    task, power = case
    influence = -np.array(released()["tasks"][task]["influence_scores"])
    assert published.layerif_experts(influence, 160, exponent=power).tolist() == [int(x) for x in ORDER_LAYERIF[case].split()]


def test_layerif_edges():
    assert published.layerif_experts([3.0, 3.0, 3.0], 9).tolist() == [3, 3, 3]
    assert published.layerif_experts([0.0, 0.0, -1.0], 5).tolist() == [1, 1, 3]
    with pytest.raises(InfeasibleBudget):
        published.layerif_experts([1.0, 2.0], 1)


def test_every_block_gets_one_expert_of_alphalora():
    counts = published.alphalora_experts(ALPHAS, 160)
    assert counts.sum() == 160 and counts.min() >= 1 and np.argmax(counts) == np.argmax(ALPHAS)
    assert published.alphalora_experts([0.1, 9.0, 9.0], 4).min() == 1


def test_mola_shapes():
    assert published.mola_experts(32, "2468").tolist() == [2] * 8 + [4] * 8 + [6] * 8 + [8] * 8
    assert published.mola_experts(28, "3578", 160).sum() == 160
    assert published.mola_experts(6, "5555").tolist() == [5] * 6 and published.mola_experts(5, (1, 2)).tolist() == [
        1,
        1,
        1,
        2,
        2,
    ]
    for shape, layers in (("abc", 8), ("20", 8), ("2468", 3)):
        with pytest.raises(InvalidInput):
            published.mola_experts(layers, shape)


def test_apportion():
    assert published.apportion([0.0, 1.0], 5).tolist() == [1, 4]
    assert published.apportion(np.ones(3), 8).tolist() == [3, 3, 2]
    with pytest.raises(DegenerateScores):
        published.apportion([0.0, 0.0], 5)
