"""The spectral tail against the loop that the sources describe, and against matrices with a known exponent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from layerbudget.models.blocks import partition
from layerbudget.sensitivity.baselines import alpha_peak, eigenvalues, hill, spectral_tail


def plain_peak(eigs):
    """Steps 1 to 5 of the sources, one scalar at a time."""
    logs = [math.log10(e) for e in eigs]
    width = (max(logs) - min(logs)) / 100
    counts = [0] * 100
    for x in logs:
        counts[min(int((x - min(logs)) / width), 99)] += 1
    peak = 10 ** (min(logs) + width * counts.index(max(counts)))
    low = math.log10(0.95 * peak)
    best, smallest = 0.0, 1.0
    n_all = len(eigs)
    for i in range(n_all - 1):
        if eigs[i] < low:
            continue
        if eigs[i] > 1.5 * peak:
            break
        n = n_all - i
        alpha = 1 + n / (sum(math.log(e) for e in eigs[i:]) - n * math.log(eigs[i]))
        if alpha > 1:
            distance = max(abs(1 - (eigs[i + t] / eigs[i]) ** (1 - alpha) - t / n) for t in range(n))
            if distance < smallest:
                best, smallest = alpha, distance
    return best


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_peak_equals_the_plain_loop(scale):
    torch.manual_seed(4)
    values = eigenvalues(torch.randn(48, 70) * scale)
    assert alpha_peak(values) == pytest.approx(plain_peak(list(values)), rel=1e-9)


def test_power_law_exponent_is_recovered():
    rng = np.random.default_rng(0)
    for exponent in (2.0, 3.5):
        values = np.sort((1 - rng.random(3000)) ** (-1 / (exponent - 1)))
        assert hill(values)[len(values) // 2] == pytest.approx(exponent, rel=0.1)


def test_rank_deficient_weight_has_no_zeros_left():
    w = torch.randn(30, 8) @ torch.randn(8, 30)
    values = eigenvalues(w)
    assert len(values) == 8 and values.min() > 0


def test_scores_average_the_matrices_of_a_block(mistral):
    blocks = partition(mistral)
    scores = spectral_tail(mistral, None, blocks)
    assert scores.orientation == "redundancy"
    own = [scores.extra["modules"][m.name] for m in blocks[1].modules]
    weight = mistral.model.layers[1].self_attn.q_proj.weight
    assert own[0] == pytest.approx(plain_peak(list(eigenvalues(weight))), rel=1e-9)
    assert scores.values()[1] == pytest.approx(np.mean(own))


def test_heavier_tail_is_pruned_less(mistral):
    """A low-rank spike (a trained layer) has a smaller exponent and, as redundancy, a larger weight."""
    with torch.no_grad():
        for p in mistral.model.layers[2].parameters():
            if p.ndim == 2:
                u, s, v = torch.linalg.svd(p, full_matrices=False)
                p.copy_(u @ torch.diag(torch.arange(1, len(s) + 1).float() ** -1.5) @ v)
    scores = spectral_tail(mistral, None, partition(mistral))
    assert np.argmin(scores.values()) == 2 and np.argmax(scores.weights()) == 2
