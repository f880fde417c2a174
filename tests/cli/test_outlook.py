"""Long verbs say what they expect before they start and what they took; the doctor prices all of them, also without weights."""

from __future__ import annotations

import json

import pytest
import torch
from tests import zoo
from transformers import LlamaConfig

from layerbudget.cli import main
from layerbudget.doctor.forecast import VERBS, Speed, forecast
from layerbudget.doctor.pace import pace, shape_in_memory
from layerbudget.doctor.pricing import Part, Text, comparing, long_verbs, price, scoring, structuring
from layerbudget.doctor.watch import MemoryMonitor

SMALL = ("--samples", "4", "--length", "16")
LONG = (
    "score fisher-gram", "score ggn", "measure", "measure --pattern 2:4", "prune wanda",
    "prune sparsegpt", "finetune", "evaluate", "plan structured", "plan bits", "quantize rtn", "quantize gptq",
)  # fmt: skip


def test_quiet_says_nothing_and_a_record_has_no_figures_of_the_clock(saved_model, tmp_path, capsys):
    scores = tmp_path / "s.json"
    assert main(["score", str(saved_model("llama")), *SMALL, "--quiet", "-o", str(scores)]) == 0
    said = capsys.readouterr().err
    assert "took" not in said and "parameters in" not in said and "took" not in json.loads(scores.read_text())


def test_the_doctor_prices_every_long_verb(saved_model, capsys):
    folder = str(saved_model("llama"))
    assert main(["doctor", folder, *SMALL, "--json"]) == 0
    found = {f["verb"]: f for f in json.loads(capsys.readouterr().out)["forecast"]}
    assert set(LONG) | set(VERBS) <= set(found) and "demo" not in found
    assert all(f["seconds"] > 0 and f["memory"] > 0 and f["fits"] and f["samples"] <= 16 for f in found.values())
    assert found["score ggn"]["seconds"] > found["score fisher-gram"]["seconds"] > found["evaluate"]["seconds"]


def test_the_doctor_prices_a_configuration_alone(tmp_path, capsys):
    LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=80, num_attention_heads=4,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    for name in (tmp_path, tmp_path / "config.json"):
        assert main(["doctor", str(name), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["layers"] == 80 and set(LONG) <= {f["verb"] for f in record["forecast"]}
        assert {f["samples"] for f in record["forecast"]} > {16, 128}, "every verb at its own defaults"
    assert main(["doctor", str(tmp_path)]) == 0
    assert "plan structured" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--estimator", "kfac", "--json"]) == 0
    assert [f["verb"] for f in json.loads(capsys.readouterr().out)["forecast"]] == ["score kfac"]
    for wrong in (["--data", "stdlib"], ["--estimator", "magic"]):
        assert main(["doctor", str(tmp_path), *wrong]) == 2
    (tmp_path / "other.json").write_text("[1]")
    assert main(["doctor", str(tmp_path / "other.json")]) == 2


SPEED = Speed(token=1e-4, single=1e11, double=5e10)


def test_prices_are_sums_of_forecasts():
    shape, text = shape_in_memory(zoo.tiny("llama")), Text(samples=8, length=32)
    one = forecast(shape, SPEED, samples=8, length=32, batch_size=8, verbs=["prune wanda"], machine=1 << 34)[0]
    whole = price("prune wanda", [Part(verb="prune wanda", text=text)], shape, SPEED, 1 << 34)
    assert whole == one
    twice = [Part(verb="prune wanda", text=text, times=2.0), Part(verb="evaluate", text=text, forwards=3.0)]
    found = price("both", twice, shape, SPEED, 1 << 34)
    per_forward = forecast(shape, SPEED, samples=8, length=32, batch_size=8, verbs=["evaluate"], machine=1 << 34)[0].seconds
    assert found.seconds == pytest.approx(2 * one.seconds + 3 * per_forward) and found.forwards == 7.0
    assert scoring("nobody's", text, shape) is None
    few, many = (price("c", comparing(text, text, shape, ["kfac"], seeds=n), shape, SPEED, 1 << 34) for n in (1, 3))
    assert many.seconds == pytest.approx(3 * few.seconds)
    assert price("s", structuring(text, "curves", shape), shape, SPEED).seconds > one.seconds
    assert "demo" in long_verbs(shape, demo=True)
    small = price("c", comparing(text, text, shape, ["kfac"]), shape, SPEED, 1000)
    assert small.how == "layers" and not small.fits and small.memory > shape.weights, "a comparison holds the model"


def test_timing_leaves_the_random_numbers_alone():
    model = zoo.tiny("llama")
    shape = shape_in_memory(model)
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    found = pace(shape, torch.float32, model=model, length=16)
    assert torch.equal(torch.rand(4), wanted) and 0 < found.token < 1 and found.single > 1e7
    assert 0 < pace(shape, torch.float32).token < 1


def test_the_watch_sees_what_was_held():
    watch = MemoryMonitor()
    held = torch.ones(40_000_000)
    first = watch.end()
    assert first[1] >= held.numel() * 4 and first[0] > 0
