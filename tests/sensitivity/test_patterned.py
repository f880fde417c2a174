"""The price of n:m: measured on the model that ``prune`` makes, predicted along the changes that it makes."""

import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.bits.plan import describe_rows
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.patterned import plan_pattern
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import partition


@pytest.mark.parametrize("method", ("magnitude", "wanda"))
def test_what_is_measured_is_the_model_that_prune_makes(method):
    model, data = zoo.build("llama-tied"), zoo.tokens()
    before = [p.clone() for p in model.parameters()]
    plan = plan_pattern(model, data, "2:4", method=method, batch_size=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    joint = DenseOutput(model, data, 3)
    for kind, pattern in (("pattern", "2:4"), ("unstructured", None)):
        pruned = zoo.build("llama-tied")
        prune(pruned, plan, None if method == "magnitude" else data, method, batch_size=3, pattern=pattern)
        assert plan.extra["measured"][kind] == pytest.approx(describe_rows(joint.rows(pruned))["kl"], rel=1e-4)


def test_small_changes_cost_what_is_predicted():
    """One weight of 32 goes from the trained model: the quadratic reaches that far."""
    model = lb.load_model("demo")
    data = lb.calibration("stdlib", lb.load_tokenizer("demo"), samples=8, length=64)
    plan = plan_pattern(model, data, "1:32", draws=8)
    for kind in ("pattern", "unstructured"):
        assert plan.extra["predicted"][kind] == pytest.approx(plan.extra["measured"][kind], rel=0.4)
    assert plan.extra["measured"]["pattern"] > plan.extra["measured"]["unstructured"]


def test_blocks_lie_within_one_layer():
    model, data = zoo.build("llama-tied"), zoo.tokens()
    layers = plan_pattern(model, data, "2:4", by="layer", draws=1)
    assert len(layers.blocks) == len(partition(model, "layer")) and layers.extra["pattern"] == "2:4"
    with pytest.raises(InvalidInput, match="measure does not search"):
        plan_pattern(model, data, "n:8")
    with pytest.raises(InvalidInput, match="draws is 0"):
        plan_pattern(model, data, "2:4", draws=0)
