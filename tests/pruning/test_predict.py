"""The second-order prediction against its definition, and against measured damage where damage is small."""

from __future__ import annotations

import pytest
import torch

from layerbudget.blocks import partition
from layerbudget.errors import CoverageError
from layerbudget.pruning.measure import damage_curves
from layerbudget.pruning.predict import second_order_curves


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_prediction_tracks_small_measured_damage(kit, name):
    """Per Linear, at mild ratios: right within a factor of three in the median, and the same order of blocks."""
    model, data = kit.build(name), kit.tokens(samples=16)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(0.5)
    blocks = partition(model, "linear")
    predicted = second_order_curves(model, data, blocks, ratios=(0.2,), method="magnitude")
    measured = damage_curves(model, data, blocks, ratios=(0.2,), method="magnitude", batch_size=16)
    a = torch.tensor([predicted.damage[b.name][0] for b in blocks]).double()
    b = torch.tensor([measured.damage[b.name][0] for b in blocks]).double()
    ratio = (a / b).log()
    assert abs(float(ratio.median())) < 1.1
    rank = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    assert float(torch.corrcoef(rank)[0, 1]) > 0.6
    assert all(p.requires_grad for p in model.parameters()) and all(p.grad is None for p in model.parameters())


def test_one_matrix_by_the_definition(kit):
    """For a model that is one Linear and a softmax, A and G are moments that can be written down."""
    model, data = kit.build("llama", num_hidden_layers=1), kit.tokens(samples=4)
    for method in ("wanda", "sparsegpt"):
        curves = second_order_curves(model, data, ratios=(0.1, 0.5, 0.9), method=method)
        values = curves.damage["model.layers.0"]
        assert 0 < values[0] < values[1] < values[2]
    same = second_order_curves(model, data, ratios=(0.5,), method="sparsegpt").damage["model.layers.0"][0]
    assert same == pytest.approx(values[1])
    assert same < second_order_curves(model, data, ratios=(0.5,), method="magnitude").damage["model.layers.0"][0]


def test_fused_experts_are_refused(kit):
    with pytest.raises(CoverageError, match="damage_curves"):
        second_order_curves(kit.build("mixtral"), kit.tokens())
