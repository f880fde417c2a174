"""A recipe from the command line: one limit, a written base, adapters trained on it, loaded again."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests import zoo
from transformers import AutoModelForCausalLM

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.data.text import read_texts
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.joint.recipe import base_of, gains_of, plan_recipe, sentences, split_recipe
from layerbudget.errors import InvalidInput, ModelMismatch
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.finetuning.rows import TextRows
from layerbudget.models.blocks import partition
from layerbudget.models.loading import unpacked
from layerbudget.plan import Plan

pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory, request):
    """A model, its two records, and rows of text."""
    folder = tmp_path_factory.mktemp("recipe")
    model, data = zoo.tiny("llama", attention="sdpa", **WIDE), zoo.tokens(6, 16, vocabulary=90)
    model.save_pretrained(folder / "model")
    request.getfixturevalue("tokenizer").save_pretrained(folder / "model")
    model = lb.load_model(str(folder / "model"))
    rounding_damage(model, data, group=32, draws=1).save(folder / "formats.json")
    lb.score(model, data, partition(model, "linear"), "rank-gain").save(folder / "ranks.json")
    said = [{"prompt": f"say {chr(97 + i % 20)}:", "completion": f" {chr(97 + i % 20) * 3}"} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, said)))
    return folder


def command(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def limit(place):
    held = lb.Scores.load(place / "formats.json").extra["choices"]
    return int(held["fixed"] + 1.6 * sum(row[0] for row in held["size"]))


def test_one_limit_a_written_base_and_an_adapter_that_loads_again(place, limit, tokenizer, capsys):
    words = ("plan", "joint", place / "ranks.json", "--formats", place / "formats.json", "--budget", f"{limit} bytes")
    plan = command(capsys, *words, "--set", "max_capacity=6", "--set", "exchange=0.02", "-o", place / "recipe.json")
    assert plan["kind"] == "recipe" and plan["budget"]["spent"] <= limit
    told = command(capsys, "explain", place / "recipe.json")["sentences"]
    assert any("bits per weight for the base" in s for s in told)
    done = command(capsys, "apply", place / "model", place / "recipe.json", "-o", place / "base", "--quiet")
    assert done["tensors"] == plan["budget"]["base"]
    train = ("--data", place / "rows.jsonl", "--epochs", 1, "--batch", 36, "--lr", 1e-2, "--dtype", "float32", "--quiet")
    results = {}
    for name, model in (("written", place / "base"), ("rounded", place / "model")):
        results[name] = command(capsys, "finetune", model, place / "recipe.json", *train, "-o", place / name)
        counted = results[name]["recipe"]
        assert counted["spent"] == plan["budget"]["spent"] <= counted["limit"] == limit
        assert 4 * results[name]["trained_parameters"] == counted["adapter"] == plan["budget"]["adapter"]
        file = place / name / "seed-0" / "adapter" / "adapter_model.safetensors"
        held = sum(t.numel() * t.element_size() for t in load_file(file).values())
        assert held == counted["adapter"] and file.stat().st_size < held + 100 * 2**10
    losses = [results[n]["metrics"]["held_out"]["loss"]["value"] for n in ("written", "rounded")]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)  # norms and embeddings of the file are in bfloat16
    base = unpacked(AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32))
    texts = read_texts(str(place / "rows.jsonl"), tokenizer, limit=64)
    rows, held = TextRows(texts, tokenizer), texts.evaluation["held_out"]
    weight = np.array(rows.kept(held))
    before = rows.losses(base, held) @ weight / weight.sum()
    again = rows.losses(PeftModel.from_pretrained(base, place / "written" / "seed-0" / "adapter").eval(), held)
    assert again @ weight / weight.sum() == pytest.approx(losses[0], rel=1e-5) and losses[0] < before
    assert main([*map(str, ("finetune", place / "base", place / "recipe.json", *train, "--four-bit", "-o", place / "no"))]) == 2
    assert "has no meaning for a recipe" in " ".join(capsys.readouterr().err.split())
    assert not (place / "no").exists()


def test_a_recipe_says_what_it_is_and_what_it_cannot_be(place, limit, capsys):
    ranks, formats = (lb.Scores.load(place / f"{n}.json") for n in ("ranks", "formats"))
    plan = plan_recipe(ranks, formats, budget=limit, max_capacity=4, min_capacity=1)
    bits, adapters = split_recipe(plan)
    assert (bits.kind, adapters.kind) == ("bits", "ranks") and adapters.counts.min() >= 1 and adapters.counts.max() <= 4
    assert bits.budget["file"] + adapters.budget["spent"] == plan.budget["spent"]
    worth = sum(g[:r].sum() for g, r in zip(gains_of(ranks), adapters.counts, strict=True))
    assert plan.extra["adapter"]["gain"] == pytest.approx(plan.extra["adapter"]["scale"] * worth)
    richer = plan_recipe(ranks, formats, budget=limit, max_capacity=4, min_capacity=1, exchange=50.0)
    assert richer.extra["adapter"]["gain"] >= plan.extra["adapter"]["gain"]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).to_dict() == plan.to_dict()
    with pytest.raises(InvalidInput, match="is no recipe"):
        split_recipe(bits)
    other = zoo.tiny("llama", seed=1, attention="sdpa", **WIDE)
    with pytest.raises(ModelMismatch):
        base_of(plan, place / "nowhere", other)
    model = lb.load_model(str(place / "model"))
    reads = Plan.from_dict({**plan.to_dict(), "extra": {**plan.to_dict()["extra"], "method": "gptq"}})
    with pytest.raises(InvalidInput, match="which reads text"):
        base_of(reads, place / "model", model)
    words = ["plan", "joint", str(place / "ranks.json"), "--formats", str(place / "formats.json"), "--budget"]
    for more, sentence in (
        (["900 bytes"], "smallest recipe takes"),
        (["3M params"], "not in bytes"),
        ([str(limit), "--set", "eta=2"], "has no option eta"),
        ([f"{limit}", "--set", "gain=-1"], "gain is -1"),
    ):
        assert main([*words, *more, "-o", str(place / "bad.json")]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split()) and not (place / "bad.json").exists()


def test_no_ranks_gain_more_than_there_is_to_gain(place, limit):
    """A gain of 10 nats was predicted where the loss is 3, and bought ranks with bits."""
    ranks, formats = (lb.Scores.load(place / f"{n}.json") for n in ("ranks", "formats"))
    model, data = lb.load_model(str(place / "model")), zoo.tokens(6, 16, vocabulary=90)
    assert ranks.extra["loss"] == pytest.approx(math.log(perplexity(model, data).value), rel=1e-5)
    assert lb.score(model, data, ranks.blocks, "rank-gain", walk="layers").extra["loss"] == pytest.approx(ranks.extra["loss"])
    steep = {**ranks.extra, "increments": [[[1e4 * g for g in row] for row in rows] for rows in ranks.extra["increments"]]}
    promising = dataclasses.replace(ranks, extra=steep)
    assert sum(row.sum() for row in gains_of(promising)) > 100 * ranks.extra["loss"]
    plan = plan_recipe(promising, formats, budget=limit)
    assert 0 < plan.extra["adapter"]["gain"] <= ranks.extra["loss"] and plan.extra["adapter"]["scale"] < 0.01
    assert "bounds what all ranks together may gain" in " ".join(sentences(plan))
    first = plan_recipe(promising, formats, budget=limit, gain=0.01)
    assert 0 < first.extra["adapter"]["gain"] <= 0.01 and first.extra["bits"] >= plan.extra["bits"]
    silent = dataclasses.replace(promising, extra={k: v for k, v in steep.items() if k != "loss"})
    assert plan_recipe(silent, formats, budget=limit).extra["adapter"]["scale"] == 1.0
