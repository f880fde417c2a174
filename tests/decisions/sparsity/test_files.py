"""Recipes name every matrix once; a folder that cannot be made is refused."""

from __future__ import annotations

import dataclasses

import pytest
from tests import zoo

from layerbudget.decisions.sparsity.save import recipe
from layerbudget.errors import InvalidInput
from layerbudget.storage.folders import check_folder


def test_recipe_has_one_modifier_per_distinct_ratio():
    yaml = pytest.importorskip("yaml")
    model = zoo.build("llama")
    plan = zoo.plan(model)
    stages = yaml.safe_load(recipe(plan, "sparsegpt"))
    assert len(stages) == 3
    seen = []
    for stage in stages.values():
        (modifiers,) = stage.values()
        assert list(modifiers) == ["SparseGPTModifier"]
        chosen = modifiers["SparseGPTModifier"]
        block = next(b for b in plan.blocks if chosen["targets"][0] in b.modules)
        assert chosen["sparsity"] == pytest.approx(block.count / block.numel, abs=1e-4)
        seen += chosen["targets"]
    assert sorted(seen) == sorted(m for b in plan.blocks for m in b.modules)
    assert len(yaml.safe_load(recipe(zoo.plan(model, spread=0.0), "wanda"))) == 1
    with pytest.raises(InvalidInput, match="magnitude"):
        recipe(plan, "magnitude")
    assert recipe(plan).count("WandaPruningModifier") == 3
    assert "dampening" not in recipe(plan, "sparsegpt")
    damped = dataclasses.replace(plan, hyperparameters={"method": "sparsegpt", "own": {"damping": 0.5}})
    for stage in yaml.safe_load(recipe(damped, "sparsegpt")).values():
        assert next(iter(stage.values()))["SparseGPTModifier"]["dampening_frac"] == 0.5
    assert "dampening" not in recipe(damped, "wanda")  # another pruner than the one that was measured


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        check_folder(tmp_path / "file" / "out")
    assert check_folder(tmp_path / "new" / "out") == tmp_path / "new" / "out"
