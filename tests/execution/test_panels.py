"""Sums by panels: what they leave out is what symmetry gives."""

import numpy as np
import pytest
import torch

from layerbudget.execution.panels import PANEL, add_products, count_numbers, panels, symmetric

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
def test_panels_are_little_more_than_half_of_a_wide_matrix(width):
    sums = torch.zeros(width, width)
    assert count_numbers(width) == sum(panel.numel() for panel in panels(sums)) <= width * (width + PANEL) / 2
    for panel in panels(sums):
        panel.fill_(1.0)  # views of one matrix
    assert int(sums.sum()) == count_numbers(width) and bool(sums.triu().sum() == width * (width + 1) / 2)
