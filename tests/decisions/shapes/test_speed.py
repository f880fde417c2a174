"""Latency as a cost of shapes: the rates that llama.cpp's times say, plans under them, and their recount."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests import zoo

import gguf
from layerbudget.decisions.shapes import speed as S
from layerbudget.decisions.shapes.apply import apply_shapes
from layerbudget.decisions.shapes.layouts import find_attention, find_mlp
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.errors import InvalidInput, UnknownUnit
from layerbudget.models.blocks import layers
from layerbudget.plan import Plan

QUICK = {"multiple": 4, "passes": 20.0, "strides": 1, "draws": 1, "batch_size": 4}
READ = {"beside": 3e-6, "layer": 5e-7, "attention": 2e-7, "channel": 4e-8}
WRITTEN = {"beside": 9e-6, "layer": 2e-6, "attention": 6e-7, "channel": 5e-8}


def table(**other):
    return S.Speed(read={**READ, **other}, written={**WRITTEN, **other}, threads=1)


def by_hand(model, rate):
    """Seconds of a token, layer after layer."""
    total = rate["beside"]
    for name, layer in layers(model):
        a, mlp = find_attention(layer, name), find_mlp(layer, name)
        total += rate["layer"] + rate["attention"] * (a.heads + a.groups) + rate["channel"] * mlp.width
    return total


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_times_that_follow_the_rates_give_them_back(name, monkeypatch):
    """The sizes are read from the files that llama.cpp would run, so what was meant to be written was written."""

    def told(files, **_):
        times = []
        for file in files:
            fields = {k.partition(".")[2]: f for k, f in gguf.GGUFReader(file).fields.items()}
            read = {
                k: fields[k].contents()
                for k in ("block_count", "attention.head_count", "attention.head_count_kv", "feed_forward_length")
            }
            count, heads, groups, width = read.values()
            row = {"beside": 1, "layer": count, "attention": count * (heads + groups), "channel": count * width}
            times.append([sum(rate[k] * row[k] for k in row) for rate in (READ, WRITTEN)])
        return np.array(times)

    monkeypatch.setattr(S, "request_seconds", told)
    found = S.measure_speed(zoo.build(name, intermediate_size=96))
    assert found.read == pytest.approx(READ, rel=1e-6) and found.written == pytest.approx(WRITTEN, rel=1e-6)


def test_plans_save_measured_time_and_the_recount_agrees():
    model, data, speed = zoo.build("llama"), zoo.tokens(4, 12), table()
    before = [by_hand(model, rate) for rate in (READ, WRITTEN)]
    plan = plan_shapes(model, data, "30% latency", runtime="llama.cpp", speed=speed, depth=1, **QUICK)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    done = apply_shapes(model, again, data)
    assert plan.budget["unit"] == "nanoseconds" and done.saved == plan.budget["spent"] >= 0.3 * plan.budget["base"]
    after = [by_hand(model, rate) for rate in (READ, WRITTEN)]
    for told, b, a in zip(plan.payload.tokens_per_second.values(), before, after, strict=True):
        assert told == pytest.approx({"before": 1 / b, "after": 1 / a})
    spared = sum(n * (b - a) for n, b, a in zip((256, 64), before, after, strict=True))
    assert done.saved == pytest.approx(1e9 * spared, rel=1e-3)  # prices are whole nanoseconds


def test_what_takes_the_time_is_what_goes():
    """A fifth of the time is a fifth of the only units that take any, rounded up."""
    model, data = zoo.build("llama"), zoo.tokens(4, 12)
    for free, kind in (({"attention": 0.0, "layer": 0.0}, "mlp"), ({"channel": 0.0, "layer": 0.0}, "heads")):
        plan = plan_shapes(model, data, "20% latency", runtime="llama.cpp", speed=table(**free), **QUICK)
        units = [(s.removed, s.units) for s in plan.payload.shapes.values() if s.kind == kind]
        assert sum(gone for gone, _ in units) >= 0.2 * sum(there for _, there in units)


def test_a_budget_of_latency_is_refused_where_nothing_is_timed(tmp_path):
    model, data = zoo.build("llama"), zoo.tokens(4, 12)
    with pytest.raises(InvalidInput, match=r"measured in llama.cpp.*Add --runtime llama.cpp"):
        plan_shapes(model, data, "20% latency")
    with pytest.raises(InvalidInput, match="not resumed.*without --resume"):
        plan_shapes(model, data, "20% latency", runtime="llama.cpp", resume=tmp_path)
    with pytest.raises(UnknownUnit, match="not priced in ranks"):
        plan_shapes(model, data, "20 ranks", runtime="llama.cpp")


def test_llama_cpp_says_seconds():
    pytest.importorskip("xllamacpp")
    found = S.measure_speed(zoo.build("llama", hidden_size=64, intermediate_size=256), rounds=1)
    assert all(rate >= 0 for rate in (*found.read.values(), *found.written.values()))
    read, written = found.seconds([(4, 2, 256)] * 3)
    assert 0 < read < 1 and 0 < written < 1


@pytest.mark.parametrize("options", [{"threads": 0}, {"rounds": 0}, {"threads": -1}])
def test_counts_below_one_are_refused_before_llama_cpp_ends_the_process(options):
    with pytest.raises(InvalidInput, match="is (0|-1).*at least 1.*=1"):
        S.measure_speed(zoo.build("llama"), **options)
