"""Two plans from the command line: a base in planned bits, and adapters of planned ranks that are trained on it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests import zoo
from transformers import AutoModelForCausalLM

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.data.text import read_texts
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.finetuning.rows import TextRows
from layerbudget.models.blocks import partition
from layerbudget.models.packed import unpacked

pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def command(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def place(tmp_path, tokenizer):
    """A model, what its formats cost, and rows of text."""
    zoo.tiny("llama", attention="sdpa", **WIDE).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model, data = lb.load_model(str(tmp_path / "model")), zoo.tokens(6, 16, vocabulary=90)
    rounding_damage(model, data, group=32, draws=1).save(tmp_path / "formats.json")
    rows = [{"prompt": f"say {chr(97 + i % 20)}:", "completion": f" {chr(97 + i % 20) * 3}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_adapters_of_planned_ranks_on_a_written_base_load_again(place, tokenizer, capsys):
    command(capsys, "plan", "bits", place / "formats.json", "--bits", 4.5, "-o", place / "bits.json")
    command(capsys, "apply", place / "model", place / "bits.json", "-o", place / "base", "--quiet")
    model = lb.load_model(str(place / "base"))
    data = zoo.tokens(6, 16, vocabulary=90)
    lb.score(model, data, partition(model, "linear"), "rank-gain").save(place / "scores.json")
    plan = command(
        capsys, "plan", "ranks", place / "scores.json", "--budget", "12 KB", "--bytes-per-parameter", "4",
        "-o", place / "ranks.json",
    )  # fmt: skip
    train = ("--data", place / "rows.jsonl", "--epochs", 1, "--batch", 36, "--lr", 1e-2, "--dtype", "float32", "--quiet")
    result = command(capsys, "finetune", place / "base", place / "ranks.json", *train, "-o", place / "adapted")
    assert 0 < 4 * result["trained_parameters"] == plan["budget"]["spent"] <= 12_000
    base = unpacked(AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32))
    texts = read_texts(str(place / "rows.jsonl"), tokenizer, limit=64)
    rows, evaluation = TextRows(texts, tokenizer), texts.evaluation["held_out"]
    weight = np.array(rows.kept(evaluation))
    before = rows.losses(base, evaluation) @ weight / weight.sum()
    adapted = PeftModel.from_pretrained(base, place / "adapted" / "seed-0" / "adapter").eval()
    after, loss = rows.losses(adapted, evaluation) @ weight / weight.sum(), result["metrics"]["held_out"]["loss"]["value"]
    assert after == pytest.approx(loss, rel=1e-5) and loss < before
