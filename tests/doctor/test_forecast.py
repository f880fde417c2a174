"""Forecasts come from shapes and one timed layer; nothing is loaded, and the shapes are those of the model."""

import json

import pytest
import torch
from tests import zoo
from transformers import LlamaConfig

from layerbudget.cli import main
from layerbudget.doctor.forecast import VERBS, Speed, forecast, shape_of, time_layer
from layerbudget.doctor.pricing import long_verbs, price
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import partition

SEVEN = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, architectures=["LlamaForCausalLM"],
)  # fmt: skip
SPEED = Speed(token=1e-4, single=1e11, double=5e10)


def test_shapes_are_those_of_the_model():
    model = zoo.tiny("mistral")
    model.config.architectures = ["MistralForCausalLM"]
    shape = shape_of(model.config, torch.float32)
    assert shape.weights == sum(p.numel() * 4 for p in model.parameters()) and shape.layers == 3
    assert sum(m.numel for m in shape.matrices) == partition(model, "layer")[0].numel
    assert shape.inputs == 32 + 32 + 32 + 48  # q/k/v, o, gate/up, down
    assert time_layer(shape, torch.float32).token > 0


def test_a_model_of_seven_billion_fits_where_its_layers_do():
    shape = shape_of(SEVEN, torch.bfloat16)
    assert 13e9 < shape.weights < 15e9
    small = {f.verb: f for f in forecast(shape, SPEED, samples=4, length=256, batch_size=4, machine=4 << 30)}
    assert set(small) == set(VERBS)
    assert all(small[v].how == "streamed" for v in VERBS if v != "finetune")
    assert all(small[v].fits for v in VERBS if v not in ("finetune", "prune sparsegpt"))  # its Hessian is 14336 wide
    assert not small["finetune"].fits
    large = {f.verb: f for f in forecast(shape, SPEED, samples=4, length=256, batch_size=4, machine=256 << 30)}
    assert all(f.fits and f.how == "whole" for f in large.values())
    longer = forecast(shape, SPEED, samples=16, length=256, machine=4 << 30)
    assert all(a.seconds > small[a.verb].seconds for a in longer)
    with pytest.raises(InvalidInput, match="no forecast"):
        forecast(shape, SPEED, samples=1, length=8, verbs=["dance"])


def test_seven_billion_fit_into_sixteen_gigabytes_at_the_default_sizes():
    """What has no room in memory is on disk; factors of a wide matrix's two sides are never there together."""
    shape = shape_of(SEVEN, torch.bfloat16)
    found = {v: price(v, parts, shape, SPEED, 16 << 30) for v, parts in long_verbs(shape).items()}
    small = {v: price(v, parts, shape, SPEED, 8 << 30) for v, parts in long_verbs(shape).items()}
    fitting = ["score fisher-gram", "score adapter", "score layerif", "measure", "plan bits", "prune sparsegpt", "evaluate"]
    for verb in fitting:
        assert found[verb].fits and small[verb].fits, verb
    assert found["score rank-gain"].fits and found["score rank-gain"].memory < 14 * 2**30
    assert not small["score rank-gain"].fits and not found["score kfac"].fits  # the eigenbasis of a factor 14336 wide
    assert not found["score ekfac"].fits


def test_the_command_reads_no_weights(tmp_path, capsys):
    SEVEN.save_pretrained(tmp_path)  # a configuration alone
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 256, "intermediate_size": 512}))
    assert main(["doctor", str(tmp_path), "--machine", "4 GiB", "--samples", "4", "--length", "64", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {f["verb"] for f in record["forecast"]} >= set(VERBS) and record["layers"] == 32
    for wrong in (["--machine", "plenty"], ["--machine", "3% flops"], ["--machine", "4 GiB", "--data", "stdlib"]):
        assert main(["doctor", str(tmp_path), *wrong]) == 2
