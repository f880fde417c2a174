"""Fewer experts in a fit: the program against all choices, bytes against smaller models and files, the check against a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from copy import deepcopy

import numpy as np
import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.bits.plan import empty_table
from layerbudget.decisions.bits.sensitivity import DenseOutput, mean_and_error
from layerbudget.decisions.cache.cache import caching, layer_formats, rounding
from layerbudget.decisions.fit.parts import parts_of
from layerbudget.decisions.fit.plan import apply_fit, plan_fit, write_fit
from layerbudget.decisions.fit.program import GIB, Fitted, Terms, fits_of
from layerbudget.decisions.fit.removal import numbers, smaller_tables
from layerbudget.errors import InfeasibleBudget, InvalidInput, UnknownStructure
from layerbudget.models.experts import cut_experts, find_experts
from layerbudget.models.loading import load_model
from layerbudget.plan import Plan
from layerbudget.plans.explain import explain_plan
from layerbudget.plans.verdict import verdict
from layerbudget.report.data import charts_of
from layerbudget.report.records import gather
from layerbudget.scores import Scores

LEFT, ROUTER = (4, 3, 2), 8 * 64  # experts that stay; bytes of a router's row
SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "head_dim": 32}
BUFFERS = zoo.buffers(inner=64, hidden=128)


def scores_of_experts(seed):
    """Scores of a fit in which two of four matrices are stacks of four experts, and what was measured of removal."""
    scores = zoo.fit_scores(seed)
    blocks = tuple(
        dataclasses.replace(b, modules=(dataclasses.replace(b.modules[0], copies=4),)) if b.name.endswith("up") else b
        for b in scores.blocks
    )
    choices = dict(scores.extra["choices"])
    size = [[s * b.modules[0].copies for s in row] for b, row in zip(blocks, choices["size"], strict=True)]
    removal = np.append(0.0, np.cumsum(np.random.default_rng(seed + 50).random(2) ** 3))
    rows = [
        {"left": n, "kept": {f"model.layers.{i}.mlp": list(range(n)) for i in range(2)}, "measured": float(d),
         "measured_error": 0.1 * float(d), "predicted": float(d), "predicted_error": 0.0, "measured_here": float(d),
         "size": [[s * n // 4 if b.name.endswith("up") else s for s in row] for b, row in zip(blocks, size, strict=True)],
         "fixed": 1000 + n * ROUTER, "head": 24}
        for n, d in zip(LEFT, removal, strict=True)
    ]  # fmt: skip
    layers = [{"name": f"model.layers.{i}.mlp", "numel": 4096, "modules": [f"model.layers.{i}.mlp.up"]} for i in range(2)]
    held = {"layers": layers, "numbers": rows, "crossed": True, "passes": 20.0}
    extra = {**scores.extra, "choices": {**choices, "size": size, "fixed": 1000 + 4 * ROUTER}, "experts": held}
    return dataclasses.replace(scores, blocks=blocks, extra=extra)


@pytest.mark.parametrize("seed", range(4))
def test_one_program_is_the_best_of_all_choices_with_every_number_of_experts(seed):
    """Every choice of four matrices, four parts of the cache and three numbers of experts, 19,683 of them, by loops."""
    scores = scores_of_experts(seed)
    fits = fits_of(scores, Terms(memory="1 GiB", context=300, experts=True))
    cache = fits[0].cache
    rows = scores.extra["choices"]["damage"] + cache.damage.tolist()
    every = list(itertools.product(range(3), repeat=8))
    damage = np.array([sum(rows[i][j] for i, j in enumerate(c)) for c in every])
    totals, sizes = {}, {}
    for row in scores.extra["experts"]["numbers"]:
        own = row["size"] + cache.size.tolist()
        beside = row["fixed"] + row["head"] + zoo.buffers(300)
        sizes[row["left"]] = np.array([sum(own[i][j] for i, j in enumerate(c)) for c in every]) + beside
        totals[row["left"]] = damage + row["measured"]
    low, high = min(s.min() for s in sizes.values()), sizes[4].max()
    seen = set()
    for share in (0.0, 0.1, 0.3, 0.6):
        memory = int(low + share * (high - low))
        plan = plan_fit(scores, memory=f"{memory} bytes", context=300, experts=True)
        best = {n: totals[n][sizes[n] <= memory].min(initial=np.inf) for n in LEFT}
        e = plan.extra["experts"]
        assert plan.extra["predicted"] == pytest.approx(min(best.values()), rel=1e-12) and e["left"] == min(best, key=best.get)
        assert plan.certificate["lower_bound"] == pytest.approx(plan.extra["predicted"]) and plan.certificate["gap"] < 1e-9
        assert plan.budget["spent"] == sum(p["bytes"] for p in plan.extra["parts"].values()) <= memory
        assert e["bytes"] == sum(b.count for b in plan.blocks if b.name.endswith("up"))
        everything = plan.extra["baselines"].get("all-experts", {"predicted": np.inf})["predicted"]
        assert everything == pytest.approx(best[4], rel=1e-12)
        seen.add(e["left"])
    assert len(seen) > 1 and plan.extra["curve"][0]["memory"] == low
    assert [row["experts"] for row in plan.extra["curve"]][-1] == 4
    for row, after in itertools.pairwise(curve := plan.extra["curve"]):  # no price of a program with one number of experts
        assert after["predicted"] == pytest.approx(row["predicted"] - row["price"] / GIB * (after["memory"] - row["memory"]))
    assert curve[-1]["price"] == 0
    with pytest.raises(InfeasibleBudget, match=f"The smallest plan takes {low:,}"):
        plan_fit(scores, memory=f"{low - 1} bytes", context=300, experts=True)


def test_a_plan_says_what_little_more_memory_takes_away():
    """Where one number of experts gives way to another, a price says nothing: the best plans of more memory are solved."""
    scores, seen = scores_of_experts(0), set()
    own = {"context": 300, "experts": True}
    low = min(fit.least for fit in fits_of(scores, Terms(memory="1 GiB", **own)))
    for memory in range(low, low + 300000, 30000):
        plan = plan_fit(scores, memory=f"{memory} bytes", **own)
        more, said, damage = plan.extra["more"], " ".join(explain_plan(plan)["sentences"]), plan.extra["predicted"]
        near = {row["memory"]: row["predicted"] for row in more["near"]}
        assert list(near) == [int(memory * s) for s in (1.01, 1.02, 1.05)]
        assert list(near.values()) == [plan_fit(scores, memory=f"{m} bytes", **own).extra["predicted"] for m in near]
        half = next((m for m, predicted in near.items() if predicted <= damage / 2 and damage), None)
        assert (f"more memory ({half:,} bytes)" in said) if half else ("more memory" not in said)
        assert f"With one MiB more the best plan is predicted to cost {more['predicted']:.4g} nats per token in all" in said
        seen.add(half is None)
    assert seen == {True, False}


def test_experts_are_decided_only_where_they_are_asked_for():
    scores, own = scores_of_experts(1), {"memory": f"{zoo.buffers(300) + 60000} bytes", "context": 300}
    plan = plan_fit(scores, **own)
    assert "experts" not in plan.extra and len(plan.blocks) == 8 and "experts" not in plan.extra["curve"][0]
    whole = Fitted.of(scores, Terms(**own, experts=True)).plan("all-experts")
    assert whole.extra["formats"] == plan.extra["formats"] and whole.extra["experts"]["left"] == 4
    assert list(parts_of(whole)) == ["bits", "cache"] and "all 4 stay" in " ".join(explain_plan(whole)["sentences"])
    with pytest.raises(InvalidInput, match="no rule 'all-experts'"):
        plan_fit(scores, **own, rule="all-experts")
    with pytest.raises(InvalidInput, match="say nothing of fewer experts.*experts=true"):
        plan_fit(zoo.fit_scores(), **own, experts=True)


@pytest.mark.parametrize(
    ("name", "runtime"),
    [("qwen3-moe", "llama.cpp"), ("glm4-moe", "llama.cpp"), ("deepseek-v3", "llama.cpp"), ("gpt-oss", "llama.cpp"),
     ("mixtral", "vllm"), ("qwen2-moe", "transformers")],
)  # fmt: skip
def test_bytes_of_every_number_are_those_of_a_smaller_model(name, runtime):
    """Biases, correction biases and their padding, headers and metadata too: against the model whose experts were removed."""
    model = zoo.tiny(name, hidden_size=64)
    family = "gguf" if runtime == "llama.cpp" else "compressed-tensors"
    own = {"family": family, "runtime": runtime, "unwritten": "16-bit", **({} if family == "gguf" else {"group": 32})}
    tables, found = smaller_tables(model, None, own), find_experts(model)
    assert list(tables) == numbers(found) and min(tables) == found[0].floor
    for left in list(tables)[1:]:
        small = deepcopy(model)
        cut_experts(small, {e.name: range(1, left + 1) for e in found})
        real, mine = empty_table(small, None, own), tables[left]
        assert np.array_equal(mine.size, real.size) and (mine.fixed, mine.head) == (real.fixed, real.head)
        assert mine.blocks == real.blocks and mine.llama == real.llama


def build():
    """A mixture whose experts matter."""
    return zoo.build("qwen3-moe", **SMALL)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A mixture, its texts, a plan with fewer experts, and the file of what was measured."""
    model, data, held = build(), zoo.tokens(4, 24, vocabulary=96), zoo.tokens(3, 24, vocabulary=96, seed=9)
    path = tmp_path_factory.mktemp("fit") / "scores.json"
    own = {"memory": f"{zoo.buffers(batch=2, inner=64, hidden=128) + 150000} bytes", "context": 64, "batch": 2, "experts": True}
    plan = plan_fit(model, data, held, **own, draws=1, formats=["Q4_0", "Q8_0"], save_scores=path)
    return model, data, held, own, plan, path


def test_the_file_has_fewer_experts_and_the_planned_bytes(measured, tmp_path):
    gguf = pytest.importorskip("gguf")
    plan = measured[4]
    e, parts = plan.extra["experts"], plan.extra["parts"]
    assert 2 <= e["left"] < 8 and plan.budget["spent"] <= plan.budget["limit"]
    receipt = write_fit(build(), plan, tmp_path / "out")
    file = tmp_path / "out" / "model.gguf"
    assert file.stat().st_size == receipt.file == parts["weights"]["bytes"] + parts["rest of the file"]["bytes"]
    assert gguf.GGUFReader(file).fields["qwen3moe.expert_count"].contents() == e["left"]
    own = [receipt.modules[m]["bytes"] for layer in e["layers"] for m in layer["modules"]]
    assert sum(own) == e["bytes"]
    assert plan.budget["spent"] == file.stat().st_size + parts["cache"]["bytes"] + zoo.buffers(batch=2, inner=64, hidden=128)
    kept = Plan.load(tmp_path / "out" / "experts.json")
    assert kept.kind == "kept-experts" and kept.extra["kept"] == e["kept"] and set(kept.counts) == {e["left"]}
    for part in (plan, kept):
        assert verdict(part) and explain_plan(part)["sentences"]
    bits, cost = gather(tmp_path / "out").plan, plan.extra["check"]["rows"][plan.rule]["kl"]
    # its own damage leaves out the cache and the experts that went
    assert bits.kind == "bits" and f"a part of a fit that costs {cost:.3g} in all, measured on held-out" in verdict(bits)
    assert "a part of a fit, which decides all its parts at once" in " ".join(explain_plan(bits)["sentences"])


def test_a_folder_for_vllm_loads_with_fewer_experts(tmp_path):
    pytest.importorskip("compressed_tensors")
    model, data = build(), zoo.tokens(4, 16, vocabulary=96)
    own = {"context": 64, "batch": 2, "runtime": "vllm", "draws": 1, "formats": ["w4-g32", "w8-g32"]}
    with pytest.raises(InfeasibleBudget) as refused:
        plan_fit(model, data, memory="1 KB", **own)
    least = int(str(refused.value).split("The smallest plan takes ")[1].split(":")[0].replace(",", ""))  # with all experts
    plan = plan_fit(model, data, memory=f"{int((least - 1) / 0.9)} bytes", **own, experts=True)  # vLLM takes .9 of it
    e = plan.extra["experts"]
    assert e["left"] < 8
    receipt = write_fit(model, plan, tmp_path / "out")
    assert receipt.bytes == plan.extra["parts"]["weights"]["bytes"]
    assert {layer.count for layer in find_experts(load_model(str(tmp_path / "out")))} == {e["left"]}


def test_the_check_masks_what_applying_removes(measured):
    model, _, held, _, plan, _ = measured
    dense, small = DenseOutput(model, held), build()
    apply_fit(small, plan)
    with caching(small, rounding(layer_formats(build(), parts_of(plan)["cache"]))):
        kl = mean_and_error(dense.rows(small)[:, :2])[0]
    assert plan.extra["check"]["rows"][plan.rule]["kl"] == pytest.approx(kl, rel=1e-4)
    assert plan.extra["check"]["rows"][plan.rule]["kl"] == min(r["kl"] for r in plan.extra["check"]["rows"].values())


@pytest.mark.parametrize("method", ["weighted", "gptq"])
def test_the_inputs_of_a_quantiser_are_those_without_the_experts_that_go(measured, method):
    """The check lets the quantiser read its text through masked routers; applying lets it read the smaller model."""
    model, data, held, own, _, _ = measured
    plan = plan_fit(model, data, held, **own, draws=1, formats=["Q4_0", "Q8_0"], method=method)
    dense, small = DenseOutput(model, held), build()
    apply_fit(small, plan, data)
    with caching(small, rounding(layer_formats(build(), parts_of(plan)["cache"]))):
        kl = mean_and_error(dense.rows(small)[:, :2])[0]
    assert plan.extra["experts"]["left"] < 8 and plan.extra["check"]["rows"][plan.rule]["kl"] == pytest.approx(kl, rel=1e-4)


def test_what_was_measured_serves_other_memories_and_pages(measured, tmp_path):
    _, _, _, own, plan, path = measured
    scores = Scores.load(path)
    again = plan_fit(scores, **own)
    assert again.blocks == plan.blocks or plan.rule != "choices"
    more = plan_fit(scores, **{**own, "memory": "4 MiB"})
    assert more.extra["experts"]["left"] == 8 and more.extra["predicted"] < plan.extra["predicted"]
    plan.save(tmp_path / "page" / "plan.json")
    charts = charts_of(gather(tmp_path / "page"))
    assert len(charts["memory"]["points"]) == 9 and len(charts["grid"]["plans"]) == 8
    least = [row["memory"] for row in plan.extra["curve"]]
    assert least == sorted(least) and plan.extra["curve"][0]["experts"] == 2


def test_bad_input_with_experts_is_one_sentence_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("layerbudget.decisions.bits.plan.rounding_damage", lambda *a, **k: pytest.fail("measured"))
    data, own = zoo.tokens(2, 8, vocabulary=96), {"memory": "1 GiB", "context": 8, "experts": True}
    uneven = build()
    cut_experts(uneven, {"model.layers.0.mlp": [0, 1, 4]})
    for model, changes, error, said in (
        (zoo.build("llama", head_dim=32), {}, UnknownStructure, "no routed experts"),
        (uneven, {"runtime": "vllm"}, InvalidInput, "different numbers of experts.*one number for all layers"),
        (build(), {"context": 65}, InvalidInput, "reads at most 64"),
        (build(), {"memory": "100 KB"}, InfeasibleBudget, "The smallest plan takes.*No context fits"),
        (zoo.build("bert"), {}, InvalidInput, "keeps no keys and values"),
        (zoo.build("granite-moe"), {"unwritten": "plan", "runtime": "vllm"}, InvalidInput, "writes no file.*kept-experts"),
        (
            zoo.tiny("glm4-moe", head_dim=32),
            {},
            InvalidInput,
            "no file of Glm4Moe.* for llama.cpp.*kept-experts",
        ),
    ):
        with pytest.raises(error, match=said):
            plan_fit(model, data, **{**own, **changes})


def test_the_command_plans_applies_and_explains_with_experts(folder, monkeypatch, capsys):
    zoo.build("qwen3-moe", **{**SMALL, "vocab_size": 97}).save_pretrained(folder / "model")
    zoo.build("llama", **{k: v for k, v in SMALL.items() if "moe" not in k}).save_pretrained(folder / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "dense" / name).write_bytes((folder / "model" / name).read_bytes())
    monkeypatch.chdir(folder)
    given = ["--context", "32", "--formats", "Q4_0,Q8_0", "--set", "experts=true", "--quiet"]
    text = ["--data", "text.txt", "--samples", "4", "--length", "16", "--set", "check=2", "--set", "draws=1"]
    memory = ["--memory", f"{BUFFERS + 120000} bytes"]
    assert main(["plan", "fit", "model", *memory, *given, *text, "--save-scores", "sizes.json"]) == 0
    plan, said = Plan.load("plan.json"), " ".join(capsys.readouterr().out.split())
    left = plan.extra["experts"]["left"]
    assert left < 8 and f"Experts: {left} of 8 stay in every layer" in said and "removal of the others costs" in said
    assert main(["plan", "fit", "sizes.json", *memory, "--context", "32", "--set", "experts=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["extra"]["experts"]["numbers"] == [8, 7, 6, 5, 4, 3, 2]
    assert main(["apply", "model", "plan.json", "-o", "out", "--quiet"]) == 0
    assert f"{left} of 8 experts stay" in capsys.readouterr().out
    assert main(["export", "plan.json", "--to", "tensor-types", "-o", "types.txt"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the smaller file, in which {left} of 8 experts stay in every layer, not for the original" in said
    for words in (["report", "."], ["explain", "plan", "plan.json"], ["export", "plan.json", "--to", "llama-cache"]):
        assert main([*words, *(["-o", f"{words[0]}.out"] if words[0] != "explain" else []), "--quiet"]) == 0
    capsys.readouterr()
    for words, wrong in (
        (["plan", "fit", "dense", "--memory", "8 MiB", *given, *text], "no routed experts"),
        (["plan", "fit", "model", "--memory", "1 KiB", *given, *text], "The smallest plan takes"),
        (["plan", "fit", "model", "--memory", "8 MiB", *given[2:], "--context", "1k", *text], "reads at most 64"),
        (["apply", "out/model.gguf", "plan.json", "-o", "file.gguf"], "lets experts go"),
    ):
        assert main([*words, *(["-o", "none.json"] if words[0] == "plan" else [])]) == 2
        assert wrong in " ".join(capsys.readouterr().err.split()) and not (folder / "none.json").exists()


def test_an_importance_matrix_of_all_experts_is_refused_before_anything_is_measured():
    """The file that apply writes has fewer, and no importances for these."""
    model = zoo.build("mixtral", hidden_size=64, intermediate_size=64)
    options = {"family": "gguf", "runtime": "llama.cpp", "method": "weighted", "imatrix": "any.gguf"}
    with pytest.raises(InvalidInput, match="importance matrix is of all experts.*Leave it out"):
        smaller_tables(model, None, options)
