"""LSA's reconstruction error against a loop that removes one entry after the other, and its map."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CoverageError, InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.records import Block
from layerbudget.sensitivity.baselines import reconstruction, removal_error
from layerbudget.sensitivity.gain import score


def plain(weight, x, share, width):
    """Remove, in every row and block of inputs, the entry that raises ``|x (w - kept)|^2`` least, again and again."""
    total = 0.0
    for row in weight.double():
        gone = torch.zeros_like(row)
        for start in range(0, len(row), width):
            place = list(range(start, min(start + width, len(row))))
            for _ in range(int(share * len(place))):
                tried = {}
                for j in place:
                    if gone[j] == 0:
                        now = gone.clone()
                        now[j] = row[j]
                        tried[j] = float((x.double() @ now).square().sum())
                best = min(tried, key=tried.get)
                gone[best] = row[best]
        total += float((x.double() @ gone).square().sum())
    return total


@pytest.mark.parametrize(("share", "width"), [(0.5, 4), (0.5, 7), (0.34, 3), (1.0, 20)])
def test_equals_removing_one_entry_after_the_other(share, width):
    torch.manual_seed(0)
    weight, x = torch.randn(3, 10), torch.randn(30, 10) @ torch.randn(10, 10)
    assert removal_error(weight, x.T @ x, share, width) == pytest.approx(plain(weight, x, share, width), rel=1e-4)


def inputs_of(model, data, module):
    seen = []
    handle = module.register_forward_hook(lambda m, inputs, out: seen.append(inputs[0][0]))
    with torch.no_grad():
        for i in range(data.samples):
            model(data.input_ids[i : i + 1, : int(data.attention_mask[i].sum())])
    handle.remove()
    return torch.cat(seen)


def test_scores_and_map_follow_the_recipe(mistral, padded):
    """Layers: mean over their matrices. Single matrices: shifts in parameters, so that the budget holds before any fitting."""
    errors = {}
    for block in partition(mistral, "linear"):
        x = inputs_of(mistral, padded, mistral.get_submodule(block.name))
        errors[block.name] = removal_error(mistral.get_submodule(block.name).weight.detach(), x.T @ x, 0.5, 8)
    layers = partition(mistral)
    means = np.array([np.mean([errors[m.name] for m in b.modules]) for b in layers])
    found = score(mistral, padded, layers, "reconstruction", width=8, batch_size=4)
    assert found.values() == pytest.approx(1 - means / means.sum(), rel=1e-4)
    plan = plan_sparsity(found, sparsity=0.7, max_sparsity=1.0, rule="lsa")
    assert np.ptp(plan.values) == pytest.approx(0.3, abs=1e-3) and int(np.argmax(plan.values)) == int(np.argmax(means))
    blocks = partition(mistral, "linear")
    each = score(mistral, padded, blocks, "reconstruction", width=8)
    raw = 1 - np.array(list(errors.values())) / sum(errors.values())
    d, n = (raw - raw.min()) / np.ptp(raw) * 0.04, np.array([b.numel for b in blocks])
    plan = plan_sparsity(each, sparsity=0.5, max_sparsity=1.0, rule="lsa", width=0.02)
    assert plan.values == pytest.approx(0.5 + (d.mean() - d) * n.mean() / n, abs=1e-3)


def test_refusals(mistral, padded):
    head = Block(name="lm_head", modules=(partition(mistral)[0].modules[0].__class__(name="lm_head", d_in=4, d_out=4),))
    with pytest.raises(CoverageError, match="outside the layers"):
        reconstruction(mistral, padded, [head])
    with pytest.raises(InvalidInput, match="width"):
        reconstruction(mistral, padded, partition(mistral), width=1)
