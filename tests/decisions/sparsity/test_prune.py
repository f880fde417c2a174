"""The plan is obeyed, or refused; a run can be interrupted; the result is a plain checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from tests import zoo
from tests.cards import card_of

from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.receipt import PruningReceipt, recount
from layerbudget.decisions.sparsity.save import save_pruned
from layerbudget.errors import AlreadyExists, InvalidInput, ModelMismatch
from layerbudget.execution.walk import Walk
from layerbudget.models.blocks import weight_of
from layerbudget.plan import Plan
from layerbudget.storage.parts import clear


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_the_place_of_activations_changes_nothing(tmp_path, monkeypatch, where):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    results = []
    for store in ("device", where):
        model = zoo.build("llama")
        prune(model, zoo.plan(model), zoo.tokens(), "sparsegpt", 4, store=store)
        results.append(state(model))
    assert same(*results)
    assert not list(tmp_path.iterdir())


def test_wanda_by_the_definition():
    """First block against a dense computation: metric |W| * norm of inputs, rows equal to within one."""
    model, data = zoo.build("llama"), zoo.tokens()
    captured = {}
    name = "model.layers.0.mlp.down_proj"
    handle = weight_of(model, name)[0].register_forward_pre_hook(lambda m, a: captured.update(x=a[0].clone()))
    with torch.no_grad():
        model(**next(data.batches(len(data))))
    handle.remove()
    w = weight_of(model, name)[1].detach().clone()
    metric = w.abs() * captured["x"].reshape(-1, w.shape[1]).norm(dim=0)
    plan = zoo.plan(model)
    receipt = prune(model, plan, data, "wanda", 3)
    zero = weight_of(model, name)[1] == 0
    per_row = zero.sum(1)
    assert int(per_row.sum()) == receipt.modules[name]["zeros"]
    assert int(per_row.max() - per_row.min()) <= 1
    for r in range(w.shape[0]):
        assert set(metric[r].argsort()[: per_row[r]].tolist()) == set(torch.nonzero(zero[r]).flatten().tolist())


def test_padding_is_not_counted():
    """Padded calibration rows and the same rows without padding give the same masks."""
    padded = zoo.tokens(samples=1, padded=True)
    real = int(padded.attention_mask.sum())
    short = dataclasses.replace(padded, input_ids=padded.input_ids[:, :real], attention_mask=None)
    masks = []
    for data in (padded, short):
        model = zoo.build("llama")
        prune(model, zoo.plan(model), data, "wanda", 4)
        masks.append({k: v == 0 for k, v in model.state_dict().items()})
    assert same(*masks)


def test_true_sequential_sees_pruned_inputs():
    plain, sequential = zoo.build("llama"), zoo.build("llama")
    one = prune(plain, zoo.plan(plain), zoo.tokens(), "sparsegpt", 4)
    two = prune(sequential, zoo.plan(sequential), zoo.tokens(), "sparsegpt", 4, true_sequential=True)
    assert one.sparsity == two.sparsity
    q, down = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    assert torch.equal(weight_of(plain, q)[1], weight_of(sequential, q)[1])
    assert not torch.equal(weight_of(plain, down)[1], weight_of(sequential, down)[1])
    assert two.forwards > one.forwards


def test_an_interrupted_run_continues(tmp_path):
    whole = zoo.build("llama")
    prune(whole, zoo.plan(whole), zoo.tokens(), "sparsegpt", 4)

    class Interrupted(RuntimeError):
        pass

    def stop(done, total):
        if done == 2:
            raise Interrupted

    model = zoo.build("llama")
    plan = zoo.plan(model)
    with pytest.raises(Interrupted):
        prune(model, plan, zoo.tokens(), "sparsegpt", 4, progress=stop, resume=tmp_path / "state")
    with pytest.raises(ModelMismatch, match="another plan"):
        fresh = zoo.build("llama")
        prune(fresh, plan, zoo.tokens(), "wanda", 4, resume=tmp_path / "state")
    again = zoo.build("llama")
    prune(again, plan, zoo.tokens(), "sparsegpt", 4, resume=tmp_path / "state")
    assert same(state(whole), state(again))
    once_more = zoo.build("llama")  # saving failed, say: nothing is computed twice
    prune(once_more, plan, zoo.tokens(), "sparsegpt", 4, resume=tmp_path / "state")
    assert same(state(whole), state(once_more))
    clear(tmp_path / "state")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_n_of_m(method):
    model = zoo.build("llama")
    receipt = prune(model, zoo.plan(model, spread=0), zoo.tokens(), method, 4, pattern="2:4")
    assert receipt.sparsity == 0.5
    for name in receipt.modules:
        w = weight_of(model, name)[1]
        assert bool(((w.reshape(-1, 4) == 0).sum(1) == 2).all())
    model = zoo.build("llama")
    receipt = prune(model, zoo.plan(model), zoo.tokens(), method, 4, pattern="n:8")
    assert [round(b["sparsity"] * 8) for b in receipt.blocks.values()] == [2, 4, 6]
    with pytest.raises(InvalidInput, match="n:4"):
        model = zoo.build("llama")
        prune(model, zoo.plan(model), zoo.tokens(), method, 4, pattern="2:4")


def test_refusals():
    model = zoo.build("llama")
    plan = zoo.plan(model)
    with pytest.raises(InvalidInput, match="calibration data"):
        prune(model, plan)
    with pytest.raises(InvalidInput, match="obs"):
        prune(model, plan, zoo.tokens(), "obs")
    with pytest.raises(InvalidInput, match="tape"):
        Walk(model, zoo.tokens(), store="tape")
    other = zoo.build("mistral", hidden_size=16)
    with pytest.raises(ModelMismatch):
        prune(other, plan, zoo.tokens())


def test_zeros_that_were_there_are_noted_not_hidden():
    model = zoo.build("llama")
    weight_of(model, "model.layers.0.mlp.up_proj")[1].data.zero_()
    receipt = prune(model, zoo.plan(model), zoo.tokens(), "wanda", 4)
    assert any("model.layers.0.mlp.up_proj" in n for n in receipt.notes)
    assert receipt.sparsity > receipt.planned


def test_model_is_left_as_it_was_found():
    model = zoo.build("llama").train()
    model.config.use_cache = True
    prune(model, zoo.plan(model), zoo.tokens(), "wanda", 4)
    assert model.training and model.config.use_cache
    assert all(not m._forward_hooks and not m._forward_pre_hooks and "forward" not in m.__dict__ for m in model.modules())


def test_saved_checkpoint_is_plain(tmp_path):
    model = zoo.build("llama")
    plan = zoo.plan(model)
    receipt = prune(model, plan, zoo.tokens(), "wanda", 4)
    out = save_pruned(model, None, plan, receipt, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert same(state(model), state(loaded))
    assert recount(loaded, plan.blocks)["sparsity"] == plan.sparsity
    assert Plan.load(out / "plan.json").digest == plan.digest
    assert PruningReceipt.load(out / "receipt.json").sparsity == receipt.sparsity
    assert "| zeros | 50.0000% of" in card_of(out).text and card_of(out).data.tags == ["pruned"]
    config = json.loads((out / "config.json").read_text())
    assert "sparsity_config" not in json.dumps(config) and "quantization_config" not in config
    with pytest.raises(AlreadyExists):
        save_pruned(model, None, plan, receipt, out)
    save_pruned(model, None, plan, receipt, out, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    with pytest.raises(AlreadyExists, match="no manifest"):
        save_pruned(model, None, plan, receipt, tmp_path / "other", overwrite=True)
    (tmp_path / "other" / "mine.txt").unlink()
    (tmp_path / "other").rmdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_batch_size_and_half_precision():
    masks = []
    for batch in (1, 6):
        model = zoo.build("mixtral")
        prune(model, zoo.plan(model), zoo.tokens(), "wanda", batch)
        masks.append({k: v == 0 for k, v in model.state_dict().items()})
    assert same(*masks)
    model = zoo.build("llama").to(torch.bfloat16)
    plan = zoo.plan(model)
    receipt = prune(copy.deepcopy(model), plan, zoo.tokens(), "sparsegpt", 4)
    assert receipt.sparsity == plan.sparsity


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_half_precision_forwards_keep_the_count_and_nearly_all_entries(method):
    exact, fast = zoo.build("llama"), zoo.build("llama")
    before = state(exact)
    receipts = [prune(m, zoo.plan(m), zoo.tokens(), method, 4, autocast=a) for m, a in ((exact, None), (fast, "bfloat16"))]
    assert receipts[0].planned == receipts[1].planned and receipts[0].sparsity == receipts[1].sparsity
    assert receipts[1].settings["autocast"] == "bfloat16"
    names = list(receipts[0].modules)
    equal = [((weight_of(exact, n)[1] == 0) == (weight_of(fast, n)[1] == 0)).float().mean() for n in names]
    assert 0.97 < min(equal) and min(equal) < 1  # it did run in another precision
    assert all(weight_of(fast, n)[1].dtype == torch.float32 for n in names)
    if method == "wanda":
        kept = [(weight_of(fast, n)[1], before[f"{n}.weight"]) for n in names]
        assert all(torch.equal(w[w != 0], b[w != 0]) for w, b in kept)


def test_precisions_that_cannot_be_are_refused():
    model = zoo.build("llama")
    before = state(model)
    with pytest.raises(InvalidInput, match="int8"):
        prune(model, zoo.plan(model), zoo.tokens(), autocast="int8")
    assert same(before, state(model))


def test_clearing_removes_the_checkpoints_and_nothing_of_the_users(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    model = zoo.build("llama")
    prune(model, zoo.plan(model), zoo.tokens(), "wanda", 4, resume=tmp_path)
    assert len(list(tmp_path.glob("block-*"))) > 1  # they wait until the caller has saved
    clear(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]
