"""Sums by panels: what they leave out is what symmetry gives."""

import numpy as np
import pytest
import torch

from layerbudget.execution.panels import PANEL, add_products, count_numbers, pack, panels, symmetric, unpack

WIDTHS = (1, 7, PANEL, PANEL + 1, 3 * PANEL - 5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_panels_have_the_whole_of_a_symmetric_sum(width, dtype):
    rng = np.random.default_rng(width)
    first, second = (torch.from_numpy(rng.integers(-3, 4, (5, width))).float() for _ in range(2))
    sums = torch.zeros(width, width, dtype=dtype)
    add_products(sums, first)
    add_products(sums, second)
    wanted = (first.T @ first + second.T @ second).double()
    assert torch.equal(symmetric(sums), wanted)
    assert torch.equal(sums.double().triu(), wanted.triu())


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_loses_nothing_and_sends_little_more_than_half(width):
    sums = torch.zeros(width, width)
    add_products(sums, torch.from_numpy(np.random.default_rng(width).normal(size=(4, width))).float())
    numbers = pack(sums)
    assert torch.equal(unpack(numbers, width), sums)
    assert len(numbers) == count_numbers(width) == sum(panel.numel() for panel in panels(sums))
    assert len(numbers) <= width * (width + PANEL) / 2
