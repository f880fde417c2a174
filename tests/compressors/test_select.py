"""Selection against full stable sorts, counts against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerbudget.compressors.select import (
    check_group,
    kth_value,
    parse_pattern,
    share,
    smallest,
    smallest_per_group,
    smallest_per_row,
    spread_over_rows,
)
from layerbudget.errors import InvalidInput


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(0, 1))
def test_share_is_exact_and_proportional(sizes, fraction):
    count = int(fraction * sum(sizes))
    parts = share(count, sizes)
    assert sum(parts) == count
    assert all(0 <= p <= s for p, s in zip(parts, sizes, strict=True))
    if sum(sizes):
        assert all(abs(p - count * s / sum(sizes)) < 1 for p, s in zip(parts, sizes, strict=True))


def test_share_refuses_more_than_there_is():
    with pytest.raises(InvalidInput, match="0..3"):
        share(4, [1, 2])


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_rows_follow_a_stable_sort_even_with_ties(seed, rows, columns, ties):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (rows, columns), generator=g).float() if ties else torch.rand(rows, columns, generator=g)
    counts = torch.randint(0, columns + 1, (rows,), generator=g)
    mask = smallest_per_row(scores, counts)
    order = torch.sort(scores, dim=1, stable=True).indices
    for r in range(rows):
        assert set(torch.nonzero(mask[r]).flatten().tolist()) == set(order[r, : counts[r]].tolist())


def test_matrix_selection():
    scores = torch.tensor([[3.0, 1.0, 1.0], [2.0, 1.0, 5.0]])
    assert smallest(scores, 2).tolist() == [[False, True, True], [False, False, False]]


def test_the_extra_comes_from_the_cheapest_rows_of_a_group():
    scores = torch.tensor([[1.0, 9.0, 9.0], [1.0, 2.0, 9.0], [1.0, 5.0, 9.0]])
    assert spread_over_rows(scores, 3, torch.tensor([5])).tolist() == [1, 2, 2]
    assert spread_over_rows(scores, 2, torch.tensor([3, 1])).tolist() == [1, 2, 1]


def test_groups():
    scores = torch.tensor([[4.0, 3, 2, 1, 1, 1, 1, 1]])
    assert smallest_per_group(scores, 2, 4).tolist() == [[False, False, True, True, True, True, False, False]]
    assert parse_pattern("2:4") == (2, 4) and parse_pattern("n:8") == (None, 8)
    for wrong in ("2/4", "5:4", "2:0", ""):
        with pytest.raises(InvalidInput):
            parse_pattern(wrong)
    with pytest.raises(InvalidInput, match="groups of 4"):
        check_group(6, 4, "x")


def test_the_threshold_of_float64_scores_is_theirs():
    scores = 1 + torch.arange(8, dtype=torch.float64)[None] * 1e-12  # equal in float32
    assert kth_value(scores, 3).item() == scores[0, 2].item()
    assert smallest(scores, 3).sum() == 3 and smallest(scores, 3)[0, :3].all()
