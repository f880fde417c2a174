"""TRL's SFTTrainer trains the plan's adapters on the same tokens with the same mask: same batches, losses and adapters."""

from __future__ import annotations

import json

import pytest
import torch
from tests import zoo
from transformers import Trainer

from layerbudget.cli import main
from layerbudget.data.text import read_texts
from layerbudget.errors import InvalidInput, MissingDependency
from layerbudget.finetuning import training
from layerbudget.finetuning.adapters import NamedLoader
from layerbudget.finetuning.finetune import finetune
from layerbudget.finetuning.protocol import Protocol

SFTTrainer = pytest.importorskip("trl", reason="TRL is not installed").SFTTrainer


@pytest.fixture
def rows(tmp_path):
    """Questions of which only the answer is learned."""
    path = tmp_path / "rows.jsonl"
    said = [{"prompt": f"say {chr(97 + i % 20)}{i}:", "completion": f" {chr(97 + i % 20) * (1 + i % 5)}"} for i in range(24)]
    path.write_text("\n".join(map(json.dumps, said)))
    return str(path)


def plan_for(model):
    return zoo.linears(model, lambda n: (2 if "q_proj" in n else 4) if "_proj" in n else 0)


@pytest.mark.parametrize("packing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_both_trainers_learn_the_same(packing, tokenizer, rows, tmp_path, monkeypatch):
    texts, plan = read_texts(rows, tokenizer, limit=64), plan_for(zoo.speaker("llama"))
    loader, seen, results = NamedLoader(lambda seed: zoo.speaker("llama"), {}), {}, {}
    train = Trainer.train

    def watched(trainer, *a, **k):
        name, loss = ("trl" if isinstance(trainer, SFTTrainer) else "own"), trainer.compute_loss

        def compute(model, inputs, *a, **k):
            found = loss(model, dict(inputs), *a, **k)
            seen.setdefault(name, []).append(({k: v.clone() for k, v in inputs.items()}, float(found.detach())))
            return found

        trainer.compute_loss = compute
        return train(trainer, *a, **k)

    monkeypatch.setattr(Trainer, "train", watched)
    for name in ("own", "trl"):
        protocol = Protocol(lr=1e-2, epochs=1, batch=4, warmup=2, cutoff=64, packing=packing, trainer=name)
        results[name] = finetune(loader, tokenizer, plan, texts, tmp_path / name, protocol=protocol)
    assert len(seen["own"]) == len(seen["trl"]) > (0 if packing else 4)
    for (ours, loss), (theirs, again) in zip(seen["own"], seen["trl"], strict=True):
        for column in ("input_ids", "labels"):
            assert torch.equal(ours[column], theirs[column]), column
        assert (ours["labels"] == -100).any() and (ours["labels"] != -100).any()
        assert again == pytest.approx(loss, rel=1e-5)
    assert seen["trl"][0][1] == pytest.approx(seen["own"][0][1], abs=1e-5)
    losses = {n: r["metrics"]["held_out"]["loss"]["value"] for n, r in results.items()}
    assert losses["trl"] == pytest.approx(losses["own"], rel=1e-5)
    assert results["own"]["trained_parameters"] == results["trl"]["trained_parameters"]
    assert results["own"]["identity"] != results["trl"]["identity"]


def test_what_it_does_not_take_is_refused_by_name(tokenizer, rows, tmp_path, monkeypatch):
    texts, plan = read_texts(rows, tokenizer, limit=64), plan_for(zoo.speaker("llama"))
    asked = Protocol(trainer="trl")
    for settings, replan, named in (({"quantised": True}, False, "4 bits"), ({}, True, "re-plan")):
        with pytest.raises(InvalidInput, match=named):
            training.check(asked, settings, replan=replan, bf16=False)
        training.check(Protocol(), settings, replan=replan, bf16=False)
    with monkeypatch.context() as patched:
        patched.setattr(training, "process_group", lambda: object())
        with pytest.raises(InvalidInput, match="several processes"):
            training.check(asked, {}, replan=False, bf16=False)
    with pytest.raises(InvalidInput, match="A plan of experts does not read trainer"):
        asked.check("experts")
    with pytest.raises(InvalidInput, match="one of own, trl"):
        Protocol(trainer="lightning")
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"layerbudget\[trl\]"):
        finetune(NamedLoader(lambda seed: None, {}), tokenizer, plan, texts, tmp_path / "o", protocol=asked)
    assert not (tmp_path / "o").exists()


def test_from_the_command_line(saved_model, rows, tmp_path, capsys):
    folder = str(saved_model("llama"))
    plan_for(zoo.speaker("llama")).save(tmp_path / "ranks.json")
    words = ["finetune", folder, str(tmp_path / "ranks.json"), "--epochs", "1", "--trainer", "trl"]
    assert main([*words, "--data", rows, "-o", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identity"]["protocol"]["trainer"] == "trl" and "trl" in result["identity"]["versions"]
    assert (tmp_path / "out" / "seed-0" / "adapter" / "adapter_model.safetensors").is_file()
    (tmp_path / "labels.jsonl").write_text("\n".join(json.dumps({"text": f"film {i}", "label": i % 2}) for i in range(20)))
    assert main([*words, "--task", str(tmp_path / "labels.jsonl"), "-o", str(tmp_path / "two")]) == 2
    assert "--trainer has no meaning" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--data", rows, "--replan", "0.5", "-o", str(tmp_path / "three")]) == 2
    assert "re-plan" in capsys.readouterr().err
