"""Bases held in 4 bits: scored, planned for, and refused where their values would have to be read."""

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.ranks.apply import add_ranks
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.errors import CoverageError, ModelMismatch
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model
from layerbudget.sensitivity.gain import score

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def test_a_plan_made_in_one_precision_serves_the_other(tmp_path):
    """Scores of a 4-bit base rank matrices as those of the plain one do; either plan fits either model, and no other model."""
    zoo.adaptable(2, hidden_size=128, intermediate_size=128, head_dim=32, num_key_value_heads=4).save_pretrained(tmp_path)
    data, plans = CalibrationSet(input_ids=torch.randint(3, 61, (8, 12), generator=torch.Generator().manual_seed(0))), []
    for four_bit in (False, True):
        model = load_model(str(tmp_path), four_bit=four_bit)
        blocks = partition(model, "linear", exclude="lm_head")
        plans.append(plan_ranks(score(model, data, blocks, estimator="rank-gain"), mean_rank=4, rule="by-rank"))
    assert np.corrcoef(plans[0].counts, plans[1].counts)[0, 1] > 0.8
    for plan in plans:
        for four_bit in (False, True):
            assert add_ranks(load_model(str(tmp_path), four_bit=four_bit), plan, task_type="CAUSAL_LM")
    other = load_model(str(tmp_path))
    with torch.no_grad():
        other.model.norm.weight.add_(1.0)
    with pytest.raises(ModelMismatch):
        add_ranks(other, plans[1])
    for estimator in ("gradient-norm", "spectral-tail", "outlier-ratio", "ggn"):
        with pytest.raises(CoverageError, match="quantised"):
            score(load_model(str(tmp_path), four_bit=True), data, blocks, estimator=estimator)
