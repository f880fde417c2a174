"""Recovery keeps zeros and helps; packing is lossless; recipes name every matrix once."""

from __future__ import annotations

import copy

import pytest
import torch
from tests import zoo

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.export import pack, recipe, unpack, write_recipe
from layerbudget.decisions.sparsity.receipt import recount
from layerbudget.decisions.sparsity.recovery import merge_keeping_zeros, recover
from layerbudget.decisions.sparsity.save import check_output, save_pruned
from layerbudget.errors import AlreadyExists, CurvatureFailure, InvalidInput, NotFound
from layerbudget.models.blocks import weight_of


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recovery_lowers_the_loss_and_keeps_every_zero(name):
    model, data = zoo.build(name), zoo.tokens(samples=8)
    plan = zoo.plan(model)
    prune(model, plan, data, "wanda", 4)
    masks = {m: weight_of(model, m)[1] == 0 for b in plan.blocks for m in b.modules}
    others = {k: v.clone() for k, v in model.state_dict().items() if k.removesuffix(".weight") not in masks}
    flags = [p.requires_grad for p in model.parameters()]
    found = recover(model, data, rank=4, steps=20, learning_rate=1e-2)
    assert found.losses[-1] < found.losses[0]
    assert found.zeros[0] == found.zeros[1]
    for m, mask in masks.items():
        assert torch.equal(weight_of(model, m)[1] == 0, mask)
    assert recount(model, plan.blocks)["sparsity"] == plan.sparsity
    assert all(torch.equal(model.state_dict()[k], v) for k, v in others.items())
    assert [p.requires_grad for p in model.parameters()] == flags
    # merged weights are the trained function: the loss on the text is what training reached, not the pruned model's
    with torch.no_grad():
        loss = float(model(data.input_ids, labels=data.input_ids).loss)
    assert loss < found.losses[0] - 0.5 * (found.losses[0] - found.losses[-1])


def test_merging_any_lora_with_zeros_kept():
    peft = pytest.importorskip("peft")
    model = zoo.build("llama")
    plan = zoo.plan(model)
    prune(model, plan, method="magnitude")
    masks = {m: weight_of(model, m)[1] == 0 for b in plan.blocks for m in b.modules}
    dense = copy.deepcopy(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    merged, lost = merge_keeping_zeros(adapted)
    for m, mask in masks.items():
        assert bool((weight_of(merged, m)[1][mask] == 0).all())
    assert len(lost) == 6 and all(0.1 < v < 1 for v in lost.values())
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(weight_of(merged, name)[1], weight_of(dense, name)[1])
    with pytest.raises(InvalidInput, match="PEFT"):
        merge_keeping_zeros(dense)


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


def test_recipe_has_one_modifier_per_distinct_ratio(tmp_path):
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
    assert write_recipe(plan, tmp_path / "recipe.yaml").read_text().count("WandaPruningModifier") == 3


def test_a_recovery_that_diverges_leaves_the_model_as_it_was():
    model = zoo.build("llama")
    prune(model, zoo.plan(model), zoo.tokens(samples=8), "wanda", 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CurvatureFailure, match="loss is"):
        recover(model, zoo.tokens(samples=8), learning_rate=1e30, steps=10)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


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


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        check_output(tmp_path / "file" / "out")
    assert check_output(tmp_path / "new" / "out") == tmp_path / "new" / "out"
