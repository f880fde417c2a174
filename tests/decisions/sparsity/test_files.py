"""Packing is lossless; recipes name every matrix once; a folder that cannot be made is refused."""

from __future__ import annotations

import pytest
import torch
from tests import zoo

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.save import pack, recipe, save_pruned, unpack
from layerbudget.errors import AlreadyExists, InvalidInput, NotFound
from layerbudget.storage.folders import check_folder


def test_packing_is_lossless_and_smaller(tmp_path):
    model = zoo.build("llama").to(torch.bfloat16)
    plan = zoo.plan(model, sparsity=0.7, spread=0.0)
    receipt = prune(model, plan, method="magnitude")
    out = save_pruned(model, None, plan, receipt, tmp_path / "out")
    sizes = pack(out, tmp_path / "packed.safetensors")
    assert sizes["packed"] < 0.75 * sizes["dense"]
    tensors = unpack(tmp_path / "packed.safetensors")
    state = model.state_dict()
    assert set(tensors) == set(state)
    assert all(torch.equal(tensors[k], state[k]) and tensors[k].dtype == state[k].dtype for k in state)
    with pytest.raises(AlreadyExists):
        pack(out, tmp_path / "packed.safetensors")
    with pytest.raises(NotFound):
        pack(tmp_path / "nothing", tmp_path / "x.safetensors")


def test_packing_that_is_cut_short_leaves_no_file(tmp_path, monkeypatch):
    model = zoo.build("llama")
    plan = zoo.plan(model)
    save_pruned(model, None, plan, prune(model, plan, zoo.tokens(), "magnitude"), tmp_path / "out")

    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError):
        pack(tmp_path / "out", tmp_path / "packed.safetensors")
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


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


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        check_folder(tmp_path / "file" / "out")
    assert check_folder(tmp_path / "new" / "out") == tmp_path / "new" / "out"
