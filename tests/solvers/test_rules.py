"""Published rules against published numbers and their edge cases."""

import numpy as np
import pytest
from paper.released import released

from layerbudget.errors import DegenerateScores, InfeasibleBudget, InvalidInput
from layerbudget.solvers import rules

ORDER_LAYERIF = {
    ("mrpc", 2): "2 6 8 5 6 9 9 9 9 9 8 8 6 7 6 5 6 5 4 2 5 5 2 1 5 3 2 3 1 2 1 1",
    ("mrpc", 3): "1 6 8 5 6 11 10 10 10 10 8 10 6 7 6 4 6 4 3 1 5 5 2 1 5 2 1 3 1 1 1 1",
    ("cola", 3): "1 14 10 7 9 11 10 7 8 8 9 7 5 9 6 3 7 3 3 2 3 4 2 1 4 1 1 1 1 1 1 1",
}
SMOOTHED = [
    0.0328, 0.5723, 0.7624, 0.7378, 0.6498, 0.6838, 0.6919, 0.8031, 0.8723, 0.8932, 0.9228, 0.9439, 0.9428, 0.9332, 0.8999,
    0.8894, 0.8875, 0.9048, 0.8685, 0.8095, 0.7992, 0.8360, 0.8801, 0.9501, 0.9468, 0.9160, 0.8693, 0.8342, 0.8020, 0.7901,
    0.8010, 0.8401,
]  # fmt: skip
ALPHAS = [
    2.1351, 3.1293, 3.7148, 3.3989, 3.6941, 3.8885, 3.4063, 3.5072, 3.0578, 3.3086, 2.9472, 2.7571, 2.8589, 2.9203, 3.2058,
    3.5891, 4.7149, 3.4514, 4.4717, 4.1243, 4.2098, 4.2885, 4.4310, 4.2816, 4.5308, 4.3364, 4.1002, 4.4903, 3.7633, 4.1410,
    3.4184, 2.9660,
]  # fmt: skip


@pytest.mark.parametrize("case", ORDER_LAYERIF)
def test_layerif_lists_are_the_published_ones(case):
    task, power = case
    influence = -np.array(released()["tasks"][task]["influence_scores"])
    assert rules.layerif_experts(influence, 160, exponent=power).tolist() == [int(x) for x in ORDER_LAYERIF[case].split()]


def test_layerif_edges():
    assert rules.layerif_experts([3.0, 3.0, 3.0], 9).tolist() == [3, 3, 3]
    assert rules.layerif_experts([0.0, 0.0, -1.0], 5).tolist() == [1, 1, 3]
    with pytest.raises(InfeasibleBudget):
        rules.layerif_experts([1.0, 2.0], 1)


@pytest.mark.parametrize(("width", "first", "largest"), [(0.1, 0.4207, 0.5141), (0.3, 0.2894, 0.5375)])
def test_published_layerif_sparsities(width, first, largest):
    n = np.full(32, 218_103_808)
    for parity in (True, False):
        rho = rules.stretched_sparsity(SMOOTHED, n, 0.5, width=width, parity=parity)
        assert rho[0] == pytest.approx(first, abs=5e-5) and rho.max() == pytest.approx(largest, abs=5e-5)
        assert np.argmax(rho) == 23 and rho.mean() == pytest.approx(0.5)


def test_alphalora_repairs_towards_the_smallest_alpha_and_ours_does_not():
    theirs = rules.alphalora_experts(ALPHAS, 160, parity=True)
    published = [1, 3, 5, 4, 5, 5, 4, 4, 3, 4, 3, 2, 2, 3, 3, 4, 9, 4, 7, 7, 7, 7, 7, 7, 9, 7, 6, 8, 6, 7, 4, 3]
    assert theirs.sum() == 160 and np.abs(theirs - published).sum() == 10
    ours = rules.alphalora_experts(ALPHAS, 160)
    assert ours.sum() == 160 and ours.min() >= 1
    assert rules.alphalora_experts([0.1, 9.0, 9.0], 4, parity=True).tolist() == [0, 2, 2]
    assert rules.alphalora_experts([0.1, 9.0, 9.0], 4).min() == 1


def test_owl_width_mean_and_shift():
    o = np.random.default_rng(0).random(32)
    n = np.full(32, 10)
    rho = rules.owl_sparsity(o, n, 0.5, parity=True)
    assert rho.max() - rho.min() == pytest.approx(0.16) and rho.mean() == pytest.approx(0.5)
    assert np.allclose(rules.owl_sparsity(o, n, 0.4, parity=True), rho - 0.1)
    assert np.argmin(rho) == np.argmax(o)
    uneven = np.arange(1, 33)
    ours = rules.owl_sparsity(o, uneven, 0.5, max_sparsity=0.55)
    assert ours.max() <= 0.55 and uneven @ ours == pytest.approx(0.5 * uneven.sum())
    low = rules.owl_sparsity(o, n, 0.02, parity=True)
    assert low.min() > 0 and (low == 0.01).any()


def test_flat_metrics_give_the_uniform_plan():
    for function in (rules.stretched_sparsity, rules.owl_sparsity):
        for parity in (True, False):
            assert np.allclose(function([2.0, 2.0, 2.0], [1, 5, 9], 0.3, parity=parity), 0.3)


def test_caps_redistribute_what_they_cut_off():
    rho = rules.stretched_sparsity([0.0, 1.0, 5.0], [10, 10, 10], 0.7, width=0.5, max_sparsity=0.8)
    assert rho.max() <= 0.8 and rho.mean() == pytest.approx(0.7)
    assert rules.stretched_sparsity([0.0, 1.0, 5.0], [10, 10, 10], 0.7, width=0.5, parity=True).max() > 1
    assert rules.size_sparsity([1, 2, 3], 0.5, max_sparsity=0.6)[2] == 0.6
    with pytest.raises(InfeasibleBudget):
        rules.uniform_sparsity([1, 2], 0.9, max_sparsity=0.8)


def test_mola_shapes():
    assert rules.mola_experts(32, "2468").tolist() == [2] * 8 + [4] * 8 + [6] * 8 + [8] * 8
    assert rules.mola_experts(28, "3578", 160).sum() == 160
    assert rules.mola_experts(6, "5555").tolist() == [5] * 6 and rules.mola_experts(5, (1, 2)).tolist() == [1, 1, 1, 2, 2]
    for shape, layers in (("abc", 8), ("20", 8), ("2468", 3)):
        with pytest.raises(InvalidInput):
            rules.mola_experts(layers, shape)


def test_apportion():
    assert rules.apportion([0.0, 1.0], 5).tolist() == [1, 4]
    assert rules.apportion(np.ones(3), 8).tolist() == [3, 3, 2]
    with pytest.raises(DegenerateScores):
        rules.apportion([0.0, 0.0], 5)
