"""Fast selection says what the plain one says."""

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.compressors import select
from layerbudget.compressors.select import ranked, smallest_per_row, spread_over_rows
from layerbudget.models.blocks import partition
from layerbudget.models.machine import in_threads
from layerbudget.sensitivity.gain import score


@pytest.mark.parametrize("seed", range(12))
def test_entries_are_ranked_and_marked_as_by_a_stable_sort(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randint(1, 40, (2,), generator=generator).tolist()
    ties = torch.randint(-3, 6, (rows, columns), generator=generator).float() * -0.5
    scores = ties if seed % 2 else torch.randn(rows, columns, generator=generator)
    scores = scores.abs() if seed % 3 == 0 else scores
    width = int(torch.randint(1, columns + 1, (1,), generator=generator))
    low = torch.randint(0, columns - width + 1, (rows,), generator=generator)
    for start in (low, low[:1].expand(rows).clone()):
        expected = scores.argsort(dim=1, stable=True).gather(1, start[:, None] + torch.arange(width))
        assert torch.equal(ranked(scores, start, width), expected)
    for count in {0, rows * columns, int(torch.randint(0, rows * columns + 1, (1,), generator=generator))}:
        counts, base = spread_over_rows(scores, rows, torch.tensor([count])), count // rows
        more = scores.sort(dim=1).values[:, min(base, columns - 1)].sort(stable=True).indices[: count % rows]
        assert torch.equal(counts, torch.full((rows,), base).index_fill(0, more, base + 1))
        order = scores.argsort(dim=1, stable=True).argsort(dim=1)
        assert torch.equal(smallest_per_row(scores, counts), order < counts[:, None])


def test_threads_change_nothing_and_their_errors_are_heard(monkeypatch):
    scores, low = torch.rand(64, 50), torch.full((64,), 7)
    own = torch.get_num_threads()
    counts = torch.full((64,), 19)
    expected = ranked(scores, low, 9), smallest_per_row(scores, counts)
    monkeypatch.setattr(select, "CHUNK", 200)
    try:
        torch.set_num_threads(2)
        assert torch.equal(ranked(scores, low, 9), expected[0])
        assert torch.equal(smallest_per_row(scores, counts), expected[1])
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda i: 1 // i, [1, 0, 2])
    finally:
        torch.set_num_threads(own)


def test_rank_gain_in_threads_is_rank_gain():
    model, data = zoo.dense("mistral"), zoo.labelled("mistral")
    blocks, own, found = partition(model, "layer"), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(score(model, data, blocks, "rank-gain", walk="layers", largest=4))
    finally:
        torch.set_num_threads(own)
    assert np.allclose(found[0].gain, found[1].gain, rtol=1e-5)
    assert np.allclose(found[0].extra["increments"], found[1].extra["increments"], rtol=1e-4)
