"""The damage of a head of many rows, from the rows of the labels that were drawn."""

import numpy as np
import torch

from layerbudget.sensitivity.directional.directions import Written
from layerbudget.sensitivity.directional.drawn import DrawnLabels

ROWS, WIDTH, SEQUENCES, LENGTH = 20_000, 12, 3, 4


class _Rows(Written):
    """Changes of all rows, of which some are asked for."""

    def looked_up(self, rows, b):
        return torch.stack([(d[rows] * b).sum(-1).double().sum(-1) for d in self.deltas], -1)[:, None]


def _setting(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, generator=generator)
    deltas = [0.1 * torch.randn(ROWS, WIDTH, generator=generator), 0.02 * weight]
    a = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=generator)
    return deltas, a, (scale * (a @ weight.T)).softmax(-1)


def _by_labels(deltas, a, p, draws, seed, scale=1.0, pieces=1):
    generator, held, asked = torch.Generator().manual_seed(seed), DrawnLabels(), []
    labels = torch.stack([torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(p.shape[:2]) for _ in range(draws)])
    for places in torch.arange(LENGTH).chunk(pieces):
        for d in range(draws):
            b = scale * p[:, places].scatter_add(2, labels[d][:, places, None], -torch.ones(SEQUENCES, len(places), 1))
            held.add(a[:, places], b, [4, 2, 7], last=d == draws - 1)

    def make(rows):
        """Remember what was asked for."""
        asked.append(rows)
        return _Rows(deltas)

    sequences, squares = held.squares(make)
    assert len(asked) <= 1 and set(sequences.tolist()) <= {4, 2, 7}
    assert not asked or set(asked[0].tolist()) <= set(labels.flatten().tolist()) and len(asked[0]) <= labels.numel()
    return sequences, squares


def test_damage_from_the_rows_of_labels_is_that_of_all_rows():
    """Without bias over seeds, for changes at random and along the weights, and with few rows of 20,000."""
    for scale in (1.0, 0.5):
        deltas, a, p = _setting(scale)
        moved = torch.stack([scale * (a @ d.T) for d in deltas]).double()
        exact = ((p * moved**2).sum(-1) - (p * moved).sum(-1) ** 2).sum((1, 2))
        each = np.array([_by_labels(deltas, a, p, 8, seed, scale)[1].sum(0).numpy() for seed in range(20)])
        error = each.std(0, ddof=1) / np.sqrt(len(each))
        assert (np.abs(each.mean(0) - exact.numpy()) < 3 * error).all() and (error < 0.1 * exact.numpy()).all()
        assert (np.abs(each / exact.numpy() - 1).mean(0) < 0.25).all()


def test_pieces_of_positions_give_the_same_and_sequences_stay_apart():
    deltas, a, p = _setting()
    whole, parts = (_by_labels(deltas, a, p, 4, 1, pieces=n) for n in (1, 3))
    for s in (4, 2, 7):
        one, other = (squares[sequences == s].sum(0) for sequences, squares in (whole, parts))
        assert torch.allclose(one, other, rtol=1e-5) and (one > 0).all()


def test_positions_that_always_draw_one_label_have_no_damage():
    deltas, a, _ = _setting()
    p = torch.zeros(SEQUENCES, LENGTH, ROWS)
    p[..., 5] = 1.0
    sequences, squares = _by_labels(deltas, a, p, 4, 0)
    assert len(sequences) == len(squares) == 0
