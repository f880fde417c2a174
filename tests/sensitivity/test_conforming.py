"""What every estimator keeps to; with ``LAYERBUDGET_ESTIMATOR=my.py:my-score`` in the environment, one of yours too."""

import os

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.cli import main
from layerbudget.data.calibration import CalibrationSet
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import partition
from layerbudget.scores import Scores
from layerbudget.sensitivity.estimators import ESTIMATORS
from layerbudget.sensitivity.gain import score

NAMES = (*ESTIMATORS.all(), *os.environ.get("LAYERBUDGET_ESTIMATOR", "").split())
OPTIONS = {
    **dict.fromkeys(("fisher-gram", "adapter"), {"replicates": 3}),
    "ggn": {"tolerance": 1e-6, "damping": [0.5]},
    "hessian": {"damping": [3.0]},
    "outlier-ratio": {"multiple": 2.0},
}
EXACT = ("gradient-norm", "fisher-diagonal", "fisher-gram", "fisher-mc", "kfac", "ekfac", "ggn", "adapter", "rank-gain")


def values(name, model, data, blocks, **more):
    return np.array(score(model, data, blocks, name, **OPTIONS.get(name, {}), **more).gain, dtype=float)


def same(name, found, expected):
    """Double precision moves by rounding; signals that are made in single precision move more."""
    return np.allclose(found, expected, rtol=1e-5 if name in EXACT else 2e-3, atol=0 if name in EXACT else 1e-6, equal_nan=True)


@pytest.fixture(scope="module")
def case():
    model = zoo.dense("mistral")
    return model, zoo.labelled("mistral"), zoo.partition(model, "mistral")


@pytest.fixture(scope="module")
def reference(case):
    held = {}
    return lambda name: held[name] if name in held else held.setdefault(name, values(name, *case))


@pytest.mark.parametrize("name", NAMES)
def test_batches_padding_and_the_order_of_samples_and_blocks_do_not_matter(case, reference, name):
    model, data, blocks = case
    expected = reference(name)
    assert np.isfinite(expected).any() and np.ptp(expected[np.isfinite(expected)]) > 0
    assert same(name, values(name, model, data, blocks[::-1])[:, ::-1], expected)
    if not ESTIMATORS.find(name).data:
        return
    if "batch_size" in ESTIMATORS.find(name).options and name != "gradient-norm":
        assert same(name, values(name, model, data, blocks, batch_size=2), expected)
    ids, mask = data.input_ids.clone(), data.attention_mask.clone()
    for i, n in enumerate(mask.sum(1).tolist()):
        ids[i], mask[i] = data.input_ids[i].roll(-n), data.attention_mask[i].roll(-n)
    assert not torch.equal(mask, data.attention_mask)
    assert same(name, values(name, model, CalibrationSet(input_ids=ids, attention_mask=mask), blocks), expected)
    if name != "layerif":  # its validation rows are chosen by place
        assert same(name, values(name, model, data.select([3, 0, 5, 1, 4, 2]), blocks), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_left_as_it_was_and_the_record_says_where_it_comes_from(case, tmp_path, name):
    _, data, blocks = case
    model = zoo.dense("mistral").train()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.grad = torch.ones_like(weight)
    model.model.layers[1].requires_grad_(False)
    before, flags = {k: v.clone() for k, v in model.state_dict().items()}, [p.requires_grad for p in model.parameters()]
    found = score(model, data, blocks, name, **OPTIONS.get(name, {}))
    assert model.training and [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert found.names == [b.name for b in blocks] and found.orientation in ("gain", "redundancy") and found.unit
    assert found.model["digest"] and found.model["computation"] and found.versions
    assert Scores.load(found.save(tmp_path / "scores.json")).digest == found.digest
    with pytest.raises(InvalidInput, match="has no option drawz"):
        score(model, data, blocks, name, drawz=4)


def test_an_estimator_in_a_file_is_named_with_it(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import layerbudget as lb\nfrom layerbudget.models.blocks import weight_of\n"
        "from layerbudget.sensitivity.estimators import estimator\n\n\n"
        '@estimator("file-norm", summary="norm of the weights", data=False)\n'
        "def norm(model, data, blocks, *, power: float = 2.0):\n"
        "    values = {b.name: sum(weight_of(model, m.name)[1].norm().item() ** power for m in b.modules) for b in blocks}\n"
        '    return lb.Scores.from_values(blocks, values, estimator="file-norm", unit="weights^power")\n'
    )
    model = zoo.dense("mistral")
    with ESTIMATORS.kept():
        found = score(model, None, partition(model), f"{file}:file-norm", power=1)
        assert found.estimator == "file-norm" and min(found.values()) > 0
        out = tmp_path / "scores.json"
        assert main(["score", "demo", "--estimator", f"{file}:file-norm", "--power", "1.5", "-o", str(out)]) == 0
        assert Scores.load(out).estimator == "file-norm"
        assert (
            main(["score", "demo", "--estimator", f"{file}:file-norm", "--power", "high", "-o", str(tmp_path / "b.json")]) == 2
        )
        said = " ".join(capsys.readouterr().err.split())
        assert "The option power of score is 'high'. It is a number." in said
        with pytest.raises(InvalidInput, match="There is no estimator 'other'"):
            ESTIMATORS.find(f"{file}:other")
