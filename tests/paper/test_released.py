"""The paper's released lists, recomputed from the recovered scores."""

import numpy as np
import pytest

from layerbudget.errors import UnknownBlock
from paper import released as r

TASKS = ("cola", "mrpc", "openbookqa")


@pytest.mark.parametrize("task", TASKS)
def test_sparsity_ratios_to_one_in_a_billion(task):
    found = r.recompute_sparsity(task)
    assert found["largest_difference"] < 1e-9
    assert found["multiplier"] == pytest.approx(found["released_multiplier"], rel=1e-8)
    assert found["gap"] <= 1e-9 and found["kkt_residual"] <= 1e-9
    assert np.mean(found["ratios"]) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("variant", ["all", "neg"])
@pytest.mark.parametrize("task", TASKS)
def test_expert_counts_32_of_32(task, variant):
    found = r.recompute_experts(task, variant)
    assert found["equal"] == 32 and found["counts"] == found["released"]
    assert found["multiplier"] == pytest.approx(found["released_multiplier"], rel=1e-9 if variant == "all" else 5e-3)


def test_both_orders_are_shown_and_differ():
    found = r.reproduce_released()
    assert found["all_counts_equal"] and found["largest_ratio_difference"] < 1e-9
    experts = found["tasks"]["cola"]["experts"]["all"]
    assert sorted(experts["counts"]) == sorted(experts["counts_file_order"])
    assert experts["counts"] != experts["counts_file_order"]
    assert experts["counts"][10] == experts["counts_file_order"][2]  # file position 2 is layer 10


def test_nineteen_of_32_layers_sit_at_the_cap():
    found = r.recompute_sparsity("cola")
    assert found["at_cap"] == 19 == sum(x == 0.51 for x in found["ratios"])


def test_unknown_task():
    with pytest.raises(UnknownBlock, match="cola, mrpc, openbookqa"):
        r.recompute_sparsity("sst2")
