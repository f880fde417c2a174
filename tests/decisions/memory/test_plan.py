"""Weights and cache under one memory: the program against all choices, bytes against files, the check against a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.compressors.formats import find_format
from layerbudget.decisions.bits.apply import apply_bits
from layerbudget.decisions.bits.plan import check_record
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.cache.cache import caching, layer_formats, rounding
from layerbudget.decisions.cache.export import vllm_options
from layerbudget.decisions.memory.fitted import Fitted
from layerbudget.decisions.memory.parts import parts_of
from layerbudget.decisions.memory.plan import apply_memory, joint_rows, plan_memory, settled, write_memory
from layerbudget.decisions.memory.program import GIB, MIX, RULES, UNIFORM, MemoryLimits, fit_of
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput, ModelMismatch, UnknownUnit
from layerbudget.exports import EXPORTS, format_for
from layerbudget.models.memory import cache_of
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.records import gather
from layerbudget.reporting.verdict import comparison_table, verdict
from layerbudget.scores import Scores
from layerbudget.sensitivity.sequences import per_token

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, "num_hidden_layers": 2}
BUFFERS = zoo.buffers()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("context", "batch"), [(64, 1), (300, 3)])
def test_one_program_is_the_best_of_all_choices(seed, context, batch):
    """Every choice of four matrices and four parts of the cache, 6,561 of them, by loops."""
    scores = zoo.fit_scores(seed)
    fit = fit_of(scores, MemoryLimits(memory="1 GiB", context=context, batch=batch))
    table = fit.table
    size = [table.size[i][table.has[i]].tolist() for i in range(8)]
    damage = [table.damage[i][table.has[i]].tolist() for i in range(8)]
    every = list(itertools.product(range(3), repeat=8))
    low, high = sum(map(min, size)), sum(map(max, size))
    for share in (0.0, 0.2, 0.5, 0.8):
        limit = int(low + share * (high - low))
        memory = limit + 1024 + zoo.buffers(context, batch)
        plan = plan_memory(scores, memory=f"{memory} bytes", context=context, batch=batch)
        sums = [(sum(damage[i][j] for i, j in enumerate(c)), sum(size[i][j] for i, j in enumerate(c))) for c in every]
        assert plan.payload.predicted == pytest.approx(min(d for d, s in sums if s <= limit), rel=1e-12)
        assert plan.budget["spent"] == sum(p["bytes"] for p in plan.payload.parts.values()) <= plan.budget["limit"] == memory
        assert plan.payload.predicted == pytest.approx(sum(plan.payload.parts[n]["predicted"] for n in ("weights", "cache")))
        assert all(plan.payload.predicted <= row["predicted"] + 1e-15 for row in plan.payload.baselines.values())
        one_by_one(plan, damage, size, limit)
    curve = plan.payload.curve
    assert curve[0]["memory"] == fit.least and curve[-1]["predicted"] == 0 and len(curve) == 8
    assert all(a["predicted"] >= b["predicted"] for a, b in itertools.pairwise(curve))
    for row, after in itertools.pairwise(curve):  # the price is what a GiB saves on the way to the next row
        assert after["predicted"] == pytest.approx(row["predicted"] - row["price"] / GIB * (after["memory"] - row["memory"]))
    assert curve[-1]["price"] == 0
    with pytest.raises(InfeasibleBudget, match=f"The smallest plan takes {fit.least:,}"):
        plan_memory(scores, memory=f"{fit.least - 1} bytes", context=context, batch=batch)
    assert plan.payload.more.bytes == GIB >> 10 and plan.payload.more.predicted == 0.0
    assert [len(row["values"]) for row in curve] == [8] * 8


def one_by_one(plan, damage, size, limit):
    """The two ways to decide one part after the other, by loops over the same numbers."""
    weights = list(itertools.product(range(3), repeat=4))

    def best(rows, costs, room):
        sums = [(sum(rows[i][j] for i, j in enumerate(c)), sum(costs[i][j] for i, j in enumerate(c))) for c in weights]
        return min((d for d, s in sums if s <= room), default=np.inf)

    even = {"uniform-cache": (damage[4:], size[4:], damage[:4], size[:4]), "mix": (damage[:4], size[:4], damage[4:], size[4:])}
    for rule, (d, s, other, costs) in even.items():
        found = [sum(r[j] for r in d) + best(other, costs, limit - sum(r[j] for r in s)) for j in range(3)]
        if rule in plan.payload.baselines:
            assert plan.payload.baselines[rule]["predicted"] == pytest.approx(min(found), rel=1e-12)
        else:
            assert min(found) == np.inf


def test_a_plan_says_what_little_more_memory_takes_away():
    """A price is of small changes: the best plans of a few shares more memory are solved."""
    scores, seen = zoo.fit_scores(0), set()
    low = fit_of(scores, MemoryLimits(memory="1 GiB", context=300)).least
    for memory in range(low, low + 120000, 12000):
        plan = plan_memory(scores, memory=f"{memory} bytes", context=300)
        more, said, damage = plan.payload.more, " ".join(explain_plan(plan)["sentences"]), plan.payload.predicted
        near = {row["memory"]: row["predicted"] for row in more.near}
        assert list(near) == [int(memory * s) for s in (1.01, 1.02, 1.05)]
        assert list(near.values()) == [plan_memory(scores, memory=f"{m} bytes", context=300).payload.predicted for m in near]
        half = next((m for m, predicted in near.items() if predicted <= damage / 2 and damage), None)
        assert (f"more memory ({half:,} bytes)" in said) if half else ("more memory" not in said)
        assert f"With one MiB more the best plan is predicted to cost {more.predicted:.4g} nats per token in all" in said
        seen.add(half is None)
    assert seen == {True, False}


def test_a_plan_is_the_program_and_its_parts_stand_alone():
    scores = zoo.fit_scores(3)
    terms = MemoryLimits(memory=f"{BUFFERS + 30000} bytes", context=64)
    found = Fitted.of(scores, terms)
    for rule in RULES:
        plan = found.plan(rule)
        weights, cache = parts_of(plan).values()
        assert (weights.kind, cache.kind) == ("bits", "cache")
        assert weights.payload.bits == pytest.approx(8 * weights.budget["spent"] / weights.numel.sum())
        assert weights.budget["spent"] + cache.budget["spent"] == plan.counts.sum()
        assert weights.budget["tensors"] == weights.budget["spent"] + 1000 and weights.payload.head_bytes == 24
        assert {**weights.payload.formats, **cache.payload.formats} == plan.payload.formats
        table, chosen = found.decision.table, found.decision.choices[rule]
        rest = sum(table.rest[i, j] for i, j in enumerate(chosen))  # what the sequences add, for both parts on the same ones
        assert plan.payload.predicted_error == pytest.approx(np.linalg.norm(rest))
        for part in (plan, weights, cache):
            assert any("nats per token" in s for s in explain_plan(part)["sentences"])
    assert len({*found.decision.choices["uniform-cache"][4:]}) == 1
    sixteen = plan_memory(scores, memory=terms.memory, context=64, cache=[])
    assert set(sixteen.payload.cache_formats.values()) == {"bf16"}
    with pytest.raises(InvalidInput, match="kind bits decides no memory"):
        parts_of(parts_of(plan)["bits"])


@pytest.mark.parametrize("name", ["formats", "context", "parts", "part_errors", "cache_formats", "named", "more", "curve"])
def test_a_damaged_plan_is_refused_where_it_is_read(tmp_path, name):
    plan = plan_memory(zoo.fit_scores(3), memory=f"{BUFFERS + 30000} bytes", context=64)
    for part in (plan, *parts_of(plan).values()):
        assert Plan.load(part.save(tmp_path / f"{part.kind}.json")).payload == part.payload
    plan.with_payload(**{name: [None]}).save(tmp_path / "other.json")
    with pytest.raises(CorruptFile, match=f"extra of this plan does not read.*{name}"):
        Plan.load(tmp_path / "other.json")


def test_formats_that_a_part_of_a_plan_cannot_have_are_refused_where_it_is_read():
    plan = plan_memory(zoo.fit_scores(3), memory=f"{BUFFERS + 30000} bytes", context=64)
    both = {"w": next(n for n in plan.payload.formats if n not in plan.payload.cache_formats)}
    both["c"] = next(iter(plan.payload.cache_formats))
    for place, form, said in (("w", "Q4_0", "has no kernel for Q4_0"), ("c", "Q4_0", "which transformers does not keep")):
        for part in (plan, parts_of(plan)["bits" if place == "w" else "cache"]):
            record = part.with_payload(formats={**part.payload.formats, both[place]: form}).to_dict()
            with pytest.raises(CorruptFile, match=f"gives {both[place]} the format Q4_0.*{said}"):
                Plan.from_dict(record)


def test_a_fit_is_exported_as_the_types_of_its_weights_where_no_format_is_named(tmp_path):
    """The default was a table of blocks, which no runtime reads."""
    plan = plan_memory(zoo.fit_scores(3), memory=f"{BUFFERS + 30000} bytes", context=64)
    weights, cache = parts_of(plan).values()
    assert format_for(plan) == format_for(weights) and "bits" in EXPORTS.find(format_for(plan)).kinds
    assert format_for(cache) in {e.name for e in EXPORTS.all().values() if "cache" in e.kinds}


def test_a_longer_context_takes_bytes_from_the_weights():
    """Damages are measured once; bytes of the cache are those of any context."""
    scores = zoo.fit_scores(1)
    shares = []
    for context, buffers in ((n, zoo.buffers(n)) for n in (16, 128, 512)):
        plan = plan_memory(scores, memory=f"{buffers + 55000} bytes", context=context)
        shares.append(plan.payload.parts["weights"]["bytes"])
        assert sum(b.numel for b in plan.blocks[-4:]) == 4 * context * 32
    assert shares[0] > shares[1] > shares[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A model, its texts, the plan for llama.cpp and the file of what was measured."""
    model, data, held = zoo.build("llama", **WIDE), zoo.tokens(4, 24, vocabulary=96), zoo.tokens(3, 24, vocabulary=96, seed=9)
    path = tmp_path_factory.mktemp("fit") / "scores.json"
    own = {"memory": f"{zoo.buffers(batch=2, inner=48) + 120000} bytes", "context": 64, "batch": 2}
    plan = plan_memory(model, data, held, **own, draws=2, save_scores=path)
    return model, data, held, own, plan, path


def test_bytes_are_those_of_the_file_and_of_the_cache(measured, tmp_path):
    pytest.importorskip("gguf")
    model, _, _, own, plan, _ = measured
    parts = plan.payload.parts
    receipt = write_memory(zoo.build("llama", **WIDE), plan, tmp_path / "out")
    file = (tmp_path / "out" / "model.gguf").stat().st_size
    assert file == receipt.file == parts["weights"]["bytes"] + parts["rest of the file"]["bytes"]
    per = {n: find_format(f, "gguf") for n, f in plan.payload.cache_formats.items()}
    assert parts["cache"]["bytes"] == sum(2 * 256 * 32 // (f.group or 1) * f.block_bytes for f in per.values())  # steps of 256
    assert parts["buffers"]["bytes"] == zoo.buffers(batch=2, inner=48) == cache_of(model.config).buffers(64, 2)
    assert plan.budget["spent"] == file + parts["cache"]["bytes"] + zoo.buffers(batch=2, inner=48) <= plan.budget["limit"]
    cache = Plan.load(tmp_path / "out" / "cache.json")
    assert cache.kind == "cache" and cache == parts_of(plan)["cache"]
    words = (tmp_path / "out" / "cache.txt").read_text()
    assert "$(cat cache.txt)" in (tmp_path / "out" / "README.md").read_text()
    bits, cost = gather(tmp_path / "out").plan, plan.payload.check.rows[plan.rule].kl
    said = f"a part of a plan of memory that costs {cost:.3g} in all, measured on held-out"
    assert bits.kind == "bits" and said in verdict(bits)
    assert "a part of a plan of memory, which decides all its parts at once" in " ".join(explain_plan(bits)["sentences"])
    assert words == EXPORTS.find("llama-cache").text(plan, {}) and "--ctx-size 128 --parallel 2" in words
    assert EXPORTS.find("tensor-types").text(plan, {}) == (tmp_path / "out" / "tensor-types.txt").read_text()


def test_the_check_rounds_both_at_once(measured):
    """The KL of the record is that of a model whose weights were rounded, run with the cache of the plan."""
    model, _, held, own, plan, _ = measured
    weights, cache = parts_of(plan).values()
    dense, other = DenseOutput(model, held), zoo.build("llama", **WIDE)
    apply_bits(other, weights)
    with caching(other, rounding(layer_formats(model, cache))):
        kl = per_token(*dense.rows(other)[:, :2].T)[0]
    rows = plan.payload.check.rows
    assert rows[plan.rule].kl == pytest.approx(kl, rel=1e-5) and plan.payload.check.taken == plan.rule
    assert rows[plan.rule].kl == min(r.kl for r in rows.values()) and set(rows) == {"exact", "uniform-cache", "mix"}
    alone = per_token(*DenseOutput(model, held).rows(other)[:, :2].T)[0]
    assert alone != pytest.approx(kl, rel=1e-3)
    third = zoo.build("llama", **WIDE)
    cached = lb.apply_plan(third, plan).cache
    with torch.no_grad():
        a = third(held.input_ids, past_key_values=cached, use_cache=True).logits
        with caching(other, rounding(layer_formats(model, cache))):
            assert torch.equal(a, other(held.input_ids).logits)
    with pytest.raises(ModelMismatch):
        lb.apply_plan(zoo.build("llama", seed=5, **WIDE), plan)


@pytest.mark.parametrize("method", ["weighted", "gptq", "descent"])
def test_a_quantiser_that_reads_inputs_rounds_alike_in_the_check_and_when_it_is_applied(measured, method):
    model, data, held, own, _, _ = measured
    plan = plan_memory(model, data, held, **own, draws=1, formats=["Q4_0", "Q8_0"], method=method)
    dense, other = DenseOutput(model, held), zoo.build("llama", **WIDE)
    apply_memory(other, plan, data)
    with caching(other, rounding(layer_formats(model, parts_of(plan)["cache"]))):
        kl = per_token(*dense.rows(other)[:, :2].T)[0]
    assert plan.payload.check.rows[plan.rule].kl == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("factor", [1.4, 1.6])
def test_more_plans_of_a_rule_are_measured_where_the_program_loses_more_than_predicted(factor):
    """The third uniform cache and the second mix are the best measured ones, and they stand for their rules."""
    found = Fitted.of(zoo.fit_scores(3), MemoryLimits(memory=f"{BUFFERS + 40000} bytes", context=64))
    held = {UNIFORM: found.fit.uniform_caches(found.limit), MIX: found.fit.mixes(found.limit)}
    order = {rule: sorted(c, key=lambda n: found.fit.table.totals(c[n])["predicted"]) for rule, c in held.items()}
    assert len(order[UNIFORM]) == 3 and len(order[MIX]) > 1
    predicted, calls = found.decision.totals["exact"]["predicted"], []

    def measured(picks):
        calls.append(picks)
        rows = {}
        for name, pick in picks.items():
            rule = name.split(",")[0]
            assert rule == "exact" or np.array_equal(pick.chosen, held[rule][pick.name])
            last = {UNIFORM: order[UNIFORM][2], MIX: order[MIX][1]}.get(rule, "none")
            kl = factor * predicted * (0.5 if pick.name == last else 0.8 if pick.name else 1.0)
            rows[name] = np.array([[10 * kl, 10.0, 0.0, 10.0]] * 2)
        return rows

    after, rows = settled(found, measured)
    assert len(calls) == (1 if factor < 1.5 else 2) and set(rows) == set(RULES)
    best = {UNIFORM: order[UNIFORM][2], MIX: order[MIX][1]} if factor > 1.5 else {r: order[r][0] for r in order}
    assert {r: after.picks[r].name for r in order} == best == after.plan(UNIFORM).payload.named
    assert after.plan(UNIFORM).payload.formats == after.fit.table.formats_of(held[UNIFORM][best[UNIFORM]])
    totals = found.fit.table.totals(held[MIX][best[MIX]])
    assert after.plan("exact").payload.baselines[MIX]["predicted"] == totals["predicted"]
    for rule in order:
        assert per_token(*rows[rule][:, :2].T)[0] == pytest.approx(factor * predicted * (0.5 if factor > 1.5 else 0.8))


def test_the_plan_of_a_lost_model_is_the_best_of_all_that_were_measured(tmp_path, monkeypatch):
    """With no trust in predictions: each rule's row is the least of its plans, measured one by one; a stopped run agrees."""
    monkeypatch.setattr("layerbudget.decisions.memory.plan.TRUSTED", 0.0)
    wide = {**WIDE, "intermediate_size": 64}
    model, data, held = zoo.build("llama", **wide), zoo.tokens(2, 16, vocabulary=96), zoo.tokens(2, 16, vocabulary=96, seed=9)
    own = {"memory": f"{zoo.buffers(batch=8, inner=64) + 110000} bytes", "context": 64, "batch": 8, "runtime": "transformers"}
    own |= {"formats": ["w2-g32", "w4-g32", "w8-g32"], "draws": 1}
    plan = plan_memory(model, data, held, **own, save_scores=tmp_path / "scores.json", resume=tmp_path / "parts")
    found = Fitted.of(Scores.load(tmp_path / "scores.json"), MemoryLimits(memory=own["memory"], context=64, batch=8))
    dense = DenseOutput(model, held)
    for rule, most in ((UNIFORM, 3), (MIX, 2)):
        picks = [found.picks[rule], *found.near[rule]]
        assert 1 < len(picks) <= most
        kl = {p.name: per_token(*joint_rows(model, dense, {"one": p}, data)["one"][:, :2].T)[0] for p in picks}
        assert plan.payload.check.rows[rule].kl == pytest.approx(min(kl.values()), rel=1e-6)
        assert plan.payload.named[rule] == min(kl, key=kl.__getitem__)
    assert plan_memory(model, data, held, **own, resume=tmp_path / "parts").digest == plan.digest


def test_a_fit_for_transformers_keeps_its_cache_packed_if_it_is_told_to():
    """With the newest tokens apart as they came: the option of the cache, which is none of rounding weights."""
    pytest.importorskip("hqq")
    pytest.importorskip("compressed_tensors")
    model, text = zoo.build("llama", **WIDE), zoo.tokens(2, 24, vocabulary=96)
    own = {"context": 64, "runtime": "transformers", "method": "rtn"}
    plan = plan_memory(model, text, text, memory=f"{plan_fit_least(model, **own) + 20000} bytes", draws=1, **own)
    held = lb.apply_plan(model, plan, packed=True, residual=8).cache
    assert {type(layer).__name__ for layer in held.layers} == {"PackedLayer"} and held.layers[0].residual_length == 8
    model(text.input_ids[:1], past_key_values=held)
    assert sum(layer.stored_bytes() for layer in held.layers) > 0


def test_a_plan_that_the_check_takes_stands_beside_the_others_with_paired_errors():
    """Rows of the mix are the lowest: the differences of the others are from it, and one is within its error."""
    rng = np.random.default_rng(0)
    rows = {n: np.stack([rng.normal(kl, 0.01, 64), np.ones(64), rng.random(64), np.ones(64)], 1)
            for n, kl in (("exact", 0.301), ("uniform-cache", 0.5), ("mix", 0.3))}  # fmt: skip
    rows["exact"][:, 0] = rows["mix"][:, 0] + rng.normal(0.001, 0.02, 64)
    rows["exact"][:, 0] += 0.001 - (rows["exact"][:, 0] - rows["mix"][:, 0]).mean()
    dense = SimpleNamespace(own=rows["mix"], text={"source": "text"})
    record = check_record(dense, "exact", rows, dict.fromkeys(rows, 100), ["exact"])
    assert record.taken == "mix" and record.rows["mix"].difference is None
    for name in ("exact", "uniform-cache"):
        apart = rows[name][:, 0] - rows["mix"][:, 0]
        assert record.rows[name].difference == pytest.approx(apart.mean())
        assert record.rows[name].difference_error == pytest.approx(apart.std(ddof=1) / 8, rel=0.02)
    said = record.verdict
    assert said.startswith("The mix has the lowest KL on held-out text, 0.29") and said.count(", level)") == 1
    found = Fitted.of(zoo.fit_scores(3), MemoryLimits(memory=f"{BUFFERS + 30000} bytes", context=64)).plan("mix")
    plan = zoo.saying(found, check=record, asked="exact")
    assert "program's choice, though they are level, so it was taken." in verdict(plan)
    alike = {n: {"kl": 0.3, **({} if n == "exact" else {"difference_error": 0.1})} for n in rows}
    alike = zoo.saying(
        dataclasses.replace(plan, rule="exact"),
        asked="exact",
        check={"taken": record.taken, "verdict": record.verdict, "rows": alike},
    )
    assert "token, level with one format for the whole cache or " in verdict(alike)
    _, head, table = comparison_table(plan)
    cells = dict((row[0], row[-1]) for row in table)
    assert head[-1] == "against one format for the whole cache" and "+-" in cells["this plan"]
    assert "level" not in cells["this plan"]
    rows["exact"][:, 0] += 0.1
    record = check_record(dense, "exact", rows, dict.fromkeys(rows, 100), ["exact"])
    assert "level" not in verdict(zoo.saying(plan, check=record))
    rows["exact"] = rows["uniform-cache"]  # the program chose one format for the whole cache, and no mix fits
    own = {name: rows[name] for name in ("exact", "uniform-cache")}
    record = check_record(dense, "exact", own, dict.fromkeys(own, 100), ["uniform-cache"])
    plan = zoo.saying(dataclasses.replace(plan, rule="exact"), check=record)
    assert comparison_table(plan) is None and "(one format for the whole cache is the best choice here)" in verdict(plan)


def test_a_memory_in_no_unit_of_bytes_is_answered_with_those(capsys):
    for memory in ("14 parsecs", "14 experts", "3% bytes"):
        assert main(["plan", "memory", "demo", "--memory", memory, "--context", "64"]) == 2
        said = capsys.readouterr().err
        assert "Units: bytes, kB, MB, GB, TB, KiB, MiB, GiB, TiB. Write '8 GiB'." in said and "ranks" not in said
    for words in (["bits", "no-such-model"], ["cache", "no-such-model", "--context", "64"]):  # refused before it is loaded
        assert main(["plan", *words, "--budget", "14 parsecs"]) == 2
        assert "Units: bytes, kB" in capsys.readouterr().err


def test_a_choice_with_the_same_prediction_is_not_named_as_another_one():
    scores = zoo.fit_scores(3)
    plan = plan_memory(scores, memory="1 GiB", context=64, cache=[])
    assert plan.payload.baselines["uniform-cache"]["predicted"] == plan.payload.predicted
    assert "one format for the whole cache" not in verdict(plan)


def test_what_was_measured_serves_other_memories(measured):
    model, data, held, own, plan, path = measured
    again = plan_memory(Scores.load(path), **own)
    assert again.blocks == plan.blocks or plan.rule != "exact"
    longer = plan_memory(Scores.load(path), memory="2 MiB", context=64, batch=8, cache=["Q8_0"])
    assert set(longer.payload.cache_formats.values()) <= {"Q8_0", "F16"} and longer.payload.batch == 8
    assert longer.names[-2:] == ["keys", "values"]
    for given in ({"data": data}, {"runtime": "llama.cpp"}):
        with pytest.raises(InvalidInput, match="Scores are planned as they are"):
            plan_memory(Scores.load(path), **given, **own)
    with pytest.raises(InvalidInput, match="'int4' was not measured for the cache. Measured were Q4_0, .*F16"):
        plan_memory(Scores.load(path), **own, cache=["Q8_0", "int4"])
    bits = dataclasses.replace(Scores.load(path), extra={"formats": Scores.load(path).extra["formats"]})
    with pytest.raises(InvalidInput, match="say nothing of the cache"):
        plan_memory(bits, **own)


def test_an_interrupted_run_continues_to_the_same_plan(measured, tmp_path, monkeypatch):
    model, data, held, own, plan, _ = measured
    own = {**own, "draws": 2, "resume": tmp_path / "parts"}

    def stop(*_):
        raise KeyboardInterrupt

    for late in ("cache_damage", "joint_rows"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"layerbudget.decisions.memory.plan.{late}", stop)
            plan_memory(model, data, held, **own)
        monkeypatch.setattr("layerbudget.decisions.bits.plan.rounding_damage", stop)  # kept: not measured again
    monkeypatch.setattr("layerbudget.decisions.memory.plan.cache_damage", stop)
    assert plan_memory(model, data, held, **own).digest == plan.digest
    with pytest.raises(ModelMismatch):
        plan_memory(model, data.select([0, 1]), held, **own)


def test_a_streamed_model_gets_the_plan_of_the_one_in_memory(tmp_path):
    """It was refused, and so a model of half a billion parameters was held in float32 twice."""
    zoo.build("llama", **WIDE).to(torch.bfloat16).save_pretrained(tmp_path)
    data, held = (zoo.tokens(4, 16, vocabulary=96, seed=seed) for seed in (0, 9))
    plans = []
    for stream in (False, True):
        model = lb.load_model(str(tmp_path), dtype="float32", stream=stream)
        memory = f"{int(1.1 * plan_fit_least(model, 64, batch=8, draws=1))} bytes"
        plans.append(plan_memory(model, data, held, memory=memory, context=64, batch=8, draws=1))
    whole, streamed = (plan.payload for plan in plans)
    assert whole.formats == streamed.formats and whole.predicted == pytest.approx(streamed.predicted, rel=1e-5)
    for rule, row in whole.check.rows.items():
        assert row.kl == pytest.approx(streamed.check.rows[rule].kl, rel=1e-4)


def test_a_check_is_not_kept_for_other_formats_in_the_same_places(tmp_path):
    """Q8_0 and Q4_0 each stand first where the cache has one of them beside 16 bits."""
    model, data, held = zoo.build("llama", **WIDE), zoo.tokens(2, 16, vocabulary=96), zoo.tokens(2, 16, vocabulary=96, seed=9)
    own = {"context": 64, "formats": ["Q4_0"], "draws": 1}
    for form in ("Q8_0", "Q4_0"):
        memory = f"{plan_fit_least(model, 64, cache=[form], formats=['Q4_0'], draws=1)} bytes"
        resumed, fresh = (
            plan_memory(model, data, held, memory=memory, cache=[form], **own, resume=folder)
            for folder in (tmp_path / "parts", None)
        )
        assert set(fresh.payload.cache_formats.values()) == {form} and resumed.payload.check == fresh.payload.check


def test_a_cache_differs_by_layer_where_the_runtime_lets_it(tmp_path):
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 16, vocabulary=96)
    memory = f"{zoo.buffers(batch=8, inner=48) + 200000} bytes"
    plan = plan_memory(model, data, memory=memory, context=64, batch=8, runtime="vllm", draws=1, utilization=1,
                    formats=["w4-g32", "w8-g32"])  # fmt: skip
    names = [n for n in plan.names if n.count(".") == 2]
    assert names == ["model.layers.0", "model.layers.1"] and plan.payload.runtime == "vllm"
    assert json.loads(EXPORTS.find("vllm-cache").text(plan, {}))["kv_cache_dtype"] == "fp8"
    with pytest.raises(InvalidInput, match="This plan is for vllm"):
        EXPORTS.find("llama-cache").text(plan, {})
    with pytest.raises(InvalidInput, match="no format for a plan of kind memory.*auto-round(?!.*(tensor-types|llama-cache))"):
        EXPORTS.find("lora").text(plan, {})


def test_bad_input_is_one_sentence_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("layerbudget.decisions.bits.plan.rounding_damage", lambda *a, **k: pytest.fail("measured"))
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    for wrong, said in (
        ({"context": 65}, "reads at most 64"),
        ({"context": 8, "batch": 0}, "batch is 0"),
        ({"context": "8 pages"}, "no number of tokens"),
        ({"context": 8, "memory": "3% flops"}, "not in bytes"),
        ({"context": 8, "rule": "protect-ends"}, "no rule 'protect-ends'"),
        ({"context": 8, "runtime": "exllama"}, "no runtime 'exllama'"),
        ({"context": 8, "cache": ["int4"]}, "llama.cpp keeps no int4"),
        ({"context": 8, "forbid": ["Q9_0"]}, "no format 'Q9_0'"),
        ({"context": 8, "data": None}, "planned on calibration tokens"),
    ):
        with pytest.raises((InvalidInput, UnknownUnit), match=said):
            plan_memory(model, **{"data": data, "memory": "1 GiB", **wrong})
    with pytest.raises(InfeasibleBudget, match="The smallest plan takes.*No context fits"):
        plan_memory(model, data, memory="100 KB", context=8)
    long = zoo.build("llama", **WIDE, max_position_embeddings=8192)
    known = plan_fit_least(long, 2048)
    with pytest.raises(InfeasibleBudget, match="At most 2048 tokens fit"):
        plan_memory(long, data, memory=f"{known} bytes", context=4096)
    for other in (zoo.build("bert"), _mamba()):
        with pytest.raises(InvalidInput, match="keeps no keys and values"):
            plan_memory(other, data, memory="1 GiB", context=8)


def test_a_refusal_advises_other_formats_only_where_they_fit():
    wide = {**WIDE, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 256}  # K types have groups of 256
    model, data = zoo.build("llama", **wide), zoo.tokens(2, 8, vocabulary=96)
    own = {"context": 64, "batch": 8}
    least = {name: plan_fit_least(model, **own, **given) for name, given in (
        ("usual", {}), ("large", {"formats": ["Q8_0"]}), ("weighted", {"method": "weighted"}), ("cache", {"cache": []}),
    )}  # fmt: skip
    assert least["weighted"] < least["usual"] < min(least["large"], least["cache"])
    weighted = "take --method weighted, which has smaller formats."
    for memory, given, advised in (
        (least["usual"], {"formats": ["Q8_0"]}, "or leave out --formats."),
        (least["usual"], {"cache": []}, "or leave out --cache."),
        (least["usual"], {"formats": ["Q8_0"], "cache": [], "forbid": ["slow-cpu"]},
         "or leave out --formats and --forbid and --cache."),
        (least["weighted"], {}, weighted),
        (least["weighted"] - 1, {}, None),
        (least["weighted"] - 1, {"formats": ["Q8_0"], "cache": []}, None),
    ):  # fmt: skip
        with pytest.raises(InfeasibleBudget) as refused:
            plan_memory(model, data, memory=f"{memory} bytes", **own, **given)
        said = str(refused.value)
        assert said.endswith(advised) if advised else not ("--formats" in said or "--cache" in said or "--method" in said), said
    scores = zoo.fit_scores(1)
    low = fit_of(scores, MemoryLimits(memory="1 GiB", context=64)).least
    with pytest.raises(InfeasibleBudget, match="or leave out --cache.$"):
        plan_memory(scores, memory=f"{low} bytes", context=64, cache=[])
    with pytest.raises(InfeasibleBudget) as refused:
        plan_memory(scores, memory=f"{low - 1} bytes", context=64, cache=[])
    assert "--cache" not in str(refused.value) and "--formats" not in str(refused.value)


def test_a_rule_that_has_no_plan_is_refused():
    """It ended in a KeyError where the plan was checked."""
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    own = {"context": 8, "formats": ["Q4_0", "Q8_0"], "draws": 1, "rule": "mix"}
    with pytest.raises(InvalidInput, match="No plan of the rule mix fits.*Leave the rule out"):
        plan_memory(model, data, data, memory=f"{plan_fit_least(model, 8, formats=['Q4_0', 'Q8_0'])} bytes", **own)


def test_the_remedy_for_narrow_heads_works_for_a_fit():
    """It named the group size of the cache alone, which a fit does not read."""
    model, data = zoo.build("llama", **WIDE | {"head_dim": 24}), zoo.tokens(2, 8, vocabulary=96)
    own = {"memory": "0.81 MiB", "context": 8, "runtime": "transformers", "formats": ["w8-g16"], "draws": 1}
    with pytest.raises(InvalidInput, match="24 channels, which int2.*plan cache: --group 8.*plan memory: --cache bf16"):
        plan_memory(model, data, **own)
    assert plan_memory(model, data, **own, cache=["bf16"]).payload.parts["cache"]["bits"] == 16
    assert lb.plan_cache(model, data, context=8, bits=9, draws=1, group=8).payload.bits <= 9
    with pytest.raises(InvalidInput, match="int4-g32 cannot keep in groups of 32. Plan in 16 bits"):
        plan_memory(model, data, **own, cache=["int4-g32"])


def test_a_memory_that_is_named_is_enough():
    """Four digits of large ones were too few, and the table rounded the smallest memory down."""
    scores = zoo.fit_scores()
    for batch in (1, 40, 1000, *range(3_000_000, 3_000_020)):
        with pytest.raises(InfeasibleBudget) as refused:
            plan_memory(scores, memory="1 KB", context=3000, batch=batch)
        least = re.search(r"Raise the memory \(to (.*?)\)", str(refused.value))[1]
        fit = fit_of(scores, MemoryLimits(memory=least, context=3000, batch=batch))
        assert fit.least <= MemoryLimits(memory=least, context=3000).bytes <= 1.01 * fit.least + 2**20 / 50


def test_the_smallest_memory_of_the_table_is_enough(tmp_path, capsys):
    zoo.fit_scores().save(tmp_path / "scores.json")
    words = ["plan", "memory", str(tmp_path / "scores.json"), "--context", "64", "--memory"]
    assert main([*words, "1 MiB"]) == 0
    table = capsys.readouterr().out.split("KL less per MiB")[-1]
    first = re.search(r"\d+\.\d\d", table)[0]
    assert main([*words, f"{first} MiB"]) == 0


def test_the_longest_context_is_counted_as_the_runtime_allocates():
    """Steps of 16 tokens for vLLM, single ones for transformers: fewer than 256 tokens are a context too."""
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    for runtime, longest in (("vllm", 48), ("transformers", 50)):
        own = {"batch": 64, "runtime": runtime, "formats": ["w4-g32", "w8-g32"]}
        share = 0.9 if runtime == "vllm" else 1  # of a card, what vLLM takes
        room = f"{(plan_fit_least(model, longest, **own) + 100) / share:.0f} bytes"
        with pytest.raises(InfeasibleBudget, match=f"At most {longest} tokens fit"):
            plan_memory(model, data, memory=room, context=64, **own)


def test_a_cache_of_sixteen_bits_alone_is_not_measured(recwarn):
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    own = {"context": 64, "draws": 1, "formats": ["Q4_0", "Q8_0"]}
    plan = plan_memory(model, data, memory="930000 bytes", cache=["F16"], **own)
    assert set(plan.payload.cache_formats.values()) == {"F16"} and plan.payload.parts["cache"]["predicted"] == 0
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


def plan_fit_least(model, context, **own):
    """Bytes of the smallest plan, from the refusal."""
    with pytest.raises(InfeasibleBudget) as refused:
        plan_memory(model, zoo.tokens(2, 8, vocabulary=96), memory="1 KB", context=context, **own)
    return int(str(refused.value).split("The smallest plan takes ")[1].split(":")[0].replace(",", ""))


def _mamba():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def test_the_command_plans_plans_again_and_applies(folder, monkeypatch, capsys):
    zoo.build("llama", **{**WIDE, "vocab_size": 97}).save_pretrained(folder / "model")
    monkeypatch.chdir(folder)
    model = "model"
    small = ["--data", "text.txt", "--samples", "2", "--length", "16", "--check", "1", "--draws", "1", "--quiet"]
    given = ["--context", "32", "--batch", "2", "--formats", "Q4_0,Q8_0", "--resume", "parts"]
    assert main(["plan", "memory", model, "--memory", "2 MiB", *given, *small, "--save-scores", "sizes.json"]) == 0
    assert not (folder / "parts" / "resume.json").exists()  # finished: nothing to go on from
    plan, said = Plan.load("plan.json"), " ".join(capsys.readouterr().out.split())
    assert plan.kind == "memory" and plan.payload.context == 32 and plan.made_by.startswith("layerbudget plan memory model ")
    assert "best plans over memory" in said and "With one MiB more the best plan" in said and "apply model plan.json" in said
    again = ["--memory", "3 MiB", "--context", "64", "--cache", "Q4_0,Q8_0", "--quiet", "-o", "more.json"]
    assert main(["plan", "memory", "sizes.json", *again]) == 0
    assert Plan.load("more.json").hyperparameters["cache"] == ["Q4_0", "Q8_0"]
    held = ["--forbid", "slow-cpu,Q8_0", "--keep", "lm_head=Q4_0", "--quiet", "-o", "held.json"]
    assert main(["plan", "memory", "sizes.json", "--memory", "2 MiB", "--context", "64", *held]) == 0
    formats = Plan.load("held.json").payload.formats
    assert formats["lm_head"] == "Q4_0" and "Q8_0" not in [f for name, f in formats.items() if "proj" in name]
    assert Plan.load("more.json").payload.context == 64
    capsys.readouterr()
    assert main(["apply", model, "plan.json", "-o", "out", "--quiet"]) == 0
    assert " --kl-divergence --cache-type-k " in " ".join(capsys.readouterr().out.split())
    assert Plan.load("out/cache.json").kind == "cache" and Plan.load("out/plan.json").kind == "bits"
    assert main(["report", ".", "-o", "page.html", "--quiet"]) == 0
    assert main(["export", "plan.json", "--to", "llama-cache", "-o", "words.txt"]) == 0
    capsys.readouterr()
    cost = plan.payload.check.rows[plan.rule].kl
    assert (
        f"| weights and cache together | {plan.payload.predicted:.4g} predicted, {cost:.4g} measured nats per token |"
        in (folder / "out" / "README.md").read_text()
    )
    shutil.copytree(model, "served")
    cache = Plan.load("out/cache.json")
    dataclasses.replace(cache, blocks=tuple(dataclasses.replace(b, value=4.5) for b in cache.blocks)).save("served/cache.json")
    assert main(["evaluate", "served", "--perplexity", "text.txt", "--windows", "1", "--length", "16", "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"not the rounded cache, which is in 16 bits here; the {cost:.3g} nats per token that were measured" in said
    dataclasses.replace(cache, blocks=tuple(dataclasses.replace(b, value=16) for b in cache.blocks)).save(
        "served/cache.json", overwrite=True
    )
    assert main(["evaluate", "served", "--perplexity", "text.txt", "--windows", "1", "--length", "16", "--quiet"]) == 0
    assert "cache" not in capsys.readouterr().out
    for words, wrong in (
        ([model, "--memory", "1 KiB", "--context", "64"], "The smallest plan takes"),
        ([model, "--memory", "8 MiB", "--context", "1k"], "reads at most 64 tokens"),
        (["sizes.json", "--memory", "8 MiB", "--context", "1k"], "reads at most 64"),
        (["size.json", "--memory", "8 MiB", "--context", "64"], "measure first: layerbudget plan memory MODEL --memory"),
        (["sizes.json", "--memory", "8 MiB", "--context", "64", "--runtime", "vllm"], "with --runtime llama.cpp, not vllm"),
        (
            ["sizes.json", "--memory", "8 MiB", "--context", "64", "--draws", "8"],
            "--draws has no meaning for scores that were measured before",
        ),
        (
            ["sizes.json", "--memory", "8 MiB", "--context", "64", "--keep", "lm_head"],
            "--keep lm_head names no format. It is REGEX=FORMAT.",
        ),
        ([model, "--bits", "4", "--memory", "1 MiB", "--context", "64"], "Unknown option: --bits"),
    ):
        assert main(["plan", "memory", *words, "--quiet", "-o", "none.json"]) == 2
        assert wrong in " ".join(capsys.readouterr().err.split()) and not (folder / "none.json").exists()


def test_the_difference_of_two_fits_counts_what_lies_beside_their_blocks(folder, capsys, monkeypatch):
    """A longer context takes more for buffers, which are in no block."""
    monkeypatch.chdir(folder)
    plans = [plan_memory(zoo.fit_scores(), memory="1 GiB", context=context) for context in (300, 3000)]
    for name, plan in zip(("short.json", "long.json"), plans, strict=True):
        plan.save(name)
    assert main(["explain", "diff", "short.json", "long.json"]) == 0
    more, blocks = plans[1].budget["spent"] - plans[0].budget["spent"], plans[1].counts.sum() - plans[0].counts.sum()
    assert more > blocks > 0
    assert f"takes {more:,} bytes of file, cache and buffers more" in " ".join(capsys.readouterr().out.split())


def test_a_memory_in_which_everything_fits_in_sixteen_bits_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("layerbudget.decisions.bits.plan.rounding_damage", lambda *a, **k: pytest.fail("measured"))
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    for runtime in ("llama.cpp", "transformers", "vllm"):
        with pytest.raises(InvalidInput, match=r"Everything fits in 16 bits.*nothing to plan") as refused:
            plan_memory(model, data, memory="1 GiB", context=8, runtime=runtime)
        below = re.search(r"needed below (\S+ \w+),", str(refused.value))[1]
        with pytest.raises(InvalidInput, match="Everything fits"):
            plan_memory(model, data, memory=below, context=8, runtime=runtime)
    with pytest.raises(pytest.fail.Exception, match="measured"):  # for other memories it is measured all the same
        plan_memory(model, data, memory="1 GiB", context=8, save_scores=tmp_path / "scores.json")


def test_a_plan_that_rounds_nothing_names_no_other_quantiser(tmp_path, capsys, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    zoo.build("llama", vocab_size=len(tokenizer), hidden_size=64, head_dim=16).save_pretrained("model")
    tokenizer.save_pretrained("model")
    words = [
        "--runtime",
        "vllm",
        "--context",
        "32",
        "--save-scores",
        "s.json",
        "--draws",
        "1",
        "--samples",
        "2",
        "--length",
        "16",
    ]
    assert main(["plan", "memory", "model", "--memory", "1 GiB", *words, "--check", "0", "-o", "all.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "16.000 bits per weight" in said and "gptq" not in said


def test_of_a_card_vllm_takes_the_share_that_is_counted_and_said():
    scores = zoo.fit_scores(3)
    cache = {**scores.extra["cache"], "runtime": "vllm", "formats": ["fp8", "bf16"], "group": None}
    for name in ("damage", "rest"):
        cache[name] = [[row[0], row[2]] for row in cache[name][::2]]  # a block for every layer
    scores = dataclasses.replace(scores, extra={**scores.extra, "cache": cache})
    plan, whole = (plan_memory(scores, memory="1100000 bytes", context=64, **more) for more in ({}, {"utilization": 1}))
    assert plan.budget["limit"] == 990_000 and whole.budget["limit"] == 1_100_000
    assert "vllm takes 0.9 of the memory given, 990,000 bytes" in " ".join(explain_plan(plan).sentences)
    assert "of the memory given" not in " ".join(explain_plan(whole).sentences)
    assert "--gpu-memory-utilization 0.9" in vllm_options(parts_of(plan)["cache"])
    assert "utilization" not in vllm_options(parts_of(whole)["cache"])
    with pytest.raises(InfeasibleBudget, match="0.9 of the memory given") as refused:
        plan_memory(scores, memory="1 KB", context=64)
    assert plan_memory(scores, memory=re.search(r"Raise the memory \(to (.*?)\)", str(refused.value))[1], context=64)
    for share in (0.0, 1.5):
        with pytest.raises(InvalidInput, match="at most 1"):
            plan_memory(scores, memory="1 GiB", context=64, utilization=share)
    with pytest.raises(InvalidInput, match="no meaning for transformers"):
        plan_memory(zoo.fit_scores(3), memory="1 GiB", context=64, utilization=0.9)
