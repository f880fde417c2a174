"""Smaller shapes in a fit: the program against all choices, bytes against files, what is loaded against the model in memory."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.cli import main
from layerbudget.data.text import calibration
from layerbudget.decisions.bits.plan import empty_table
from layerbudget.decisions.bits.sensitivity import DenseOutput, mean_and_error
from layerbudget.decisions.cache.cache import caching, layer_formats, rounding
from layerbudget.decisions.cache.plan import cache_space
from layerbudget.decisions.fit.cutting import cutting_for, sized
from layerbudget.decisions.fit.parts import parts_of
from layerbudget.decisions.fit.plan import apply_fit, plan_fit, write_fit
from layerbudget.decisions.fit.program import Fitted, Terms, fits_of
from layerbudget.decisions.shapes.apply import apply_shapes
from layerbudget.decisions.shapes.plan import plans_at_once
from layerbudget.decisions.shapes.program import layers_differ
from layerbudget.errors import CoverageError, InfeasibleBudget, InvalidInput
from layerbudget.exports import EXPORTS
from layerbudget.models.blocks import describe
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.plan import Plan
from layerbudget.plans.explain import explain_plan
from layerbudget.plans.verdict import verdict
from layerbudget.report.data import charts_of
from layerbudget.report.records import gather
from layerbudget.scores import Scores

SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 96}
FORMATS = {"llama.cpp": ["Q4_0", "Q8_0"], "transformers": ["w4-g32", "w8-g32"], "vllm": ["w4-g32", "w8-g32"]}


def build(name="llama", **changes):
    """A model whose layers have four heads in two groups, and wide MLPs."""
    return zoo.build(name, **{**SMALL, **changes})


def shape_plan(model, share):
    """A plan of shapes in a record."""
    blocks = [
        {"name": "model.layers.0.mlp", "value": 1 - share, "count": 10, "numel": 100, "modules": ["model.layers.0.mlp.up"]}
    ]
    hyper = {"by": "groups", "multiple": 32, "compensate": "refit", "bytes_per_parameter": 4.0}
    own = {"unit": "flops", "base": 100.0, "limit": 10.0, "spent": 100 * (1 - share)}
    extra = {"shapes": {}, "dropped": [], "predicted": 0.1, "samples": 4}
    plan = Plan.from_dict({"schema_version": 1, "kind": "shapes", "rule": "directional", "model": dict(model), "blocks": blocks,
                           "budget": own, "hyperparameters": hyper, "extra": extra})  # fmt: skip
    return plan.to_dict()


def scores_of_shapes(seed):
    """Scores of a fit with two models that were cut: damages of their own, smaller matrices, and in one a smaller cache."""
    whole, rng = zoo.fit_scores(seed), np.random.default_rng(seed + 50)
    sizes = {"heads": [[4, 4], [4, 3]]}
    rows = [{"share": 1.0, "sizes": sizes, "measured": 0.0, "measured_error": 0.0}]
    for i, (share, damage) in enumerate(zip((0.9, 0.7), np.cumsum(rng.random(2) ** 3), strict=True), 1):
        own = zoo.fit_scores(100 * i + seed)
        choices = {**own.extra["choices"], "fixed": 1000 - 8 * i}
        choices["size"] = [[int(s * share) // 4 * 4 for s in row] for row in choices["size"]]
        cache = dict(own.extra["cache"])
        cache["kept"] = [{**k, "heads": 1, "channels": 32 if i == 1 else 16} for k in cache["kept"]]
        cache["group"] = 16 if i == 2 else 32
        own = dataclasses.replace(own, extra={**own.extra, "choices": choices, "cache": cache})
        told = {"share": share, "sizes": sizes, "measured": float(damage), "measured_error": 0.1 * float(damage)}
        rows.append({**told, "plan": shape_plan(whole.model, share), "scores": own.to_dict()})
    held = {"candidates": rows, "crossed": True, "samples": 4, "passes": 60.0}
    return dataclasses.replace(whole, extra={**whole.extra, "shapes": held})


@pytest.mark.parametrize("seed", range(3))
def test_one_program_is_the_best_of_all_choices_with_every_set_of_shapes(seed):
    """Every choice of four matrices, four parts of the cache and three sets of shapes, 19,683 of them, by loops."""
    scores = scores_of_shapes(seed)
    fits = fits_of(scores, Terms(memory="1 GiB", context=300, shapes=True))
    every = list(itertools.product(range(3), repeat=8))
    damage, sizes = [], []
    for row, fit in zip(scores.extra["shapes"]["candidates"], fits, strict=True):
        own = scores.to_dict()["extra"] if "scores" not in row else row["scores"]["extra"]
        rows = [*own["choices"]["damage"], *own["cache"]["damage"]]
        held = [*own["choices"]["size"], *fit.cache.size.tolist()]
        damage.append(np.array([sum(rows[i][j] for i, j in enumerate(c)) for c in every]) + row["measured"])
        beside = own["choices"]["fixed"] + own["choices"]["head"] + zoo.buffers(300)
        sizes.append(np.array([sum(held[i][j] for i, j in enumerate(c)) for c in every]) + beside)
    low, high = min(s.min() for s in sizes), sizes[0].max()
    seen = set()
    for share in (0.0, 0.15, 0.4, 1.0):
        memory = int(low + share * (high - low))
        plan = plan_fit(scores, memory=f"{memory} bytes", context=300, shapes=True)
        best = [d[s <= memory].min(initial=np.inf) for d, s in zip(damage, sizes, strict=True)]
        e = plan.extra["shapes"]
        assert plan.extra["predicted"] == pytest.approx(min(best), rel=1e-12)
        assert e["share"] == (1.0, 0.9, 0.7)[int(np.argmin(best))]
        assert plan.certificate["lower_bound"] == pytest.approx(plan.extra["predicted"]) and plan.certificate["gap"] < 1e-9
        assert plan.budget["spent"] == sum(p["bytes"] for p in plan.extra["parts"].values()) <= memory
        whole = plan.extra["baselines"].get("all-shapes", {"predicted": np.inf})["predicted"]
        assert whole == pytest.approx(best[0], rel=1e-12)
        assert list(parts_of(plan)) == ["bits", "cache", *(["shapes"] if e["share"] < 1 else [])]
        said = EXPORTS.find("auto-round").sentence(plan, "file.json")
        assert ("in which fewer heads or channels stay, not for the original" in said) == (e["share"] < 1)
        seen.add(e["share"])
    assert len(seen) > 1 and plan.extra["curve"][0]["memory"] == low and plan.extra["curve"][-1]["shapes"] == 1.0
    assert plan.extra["passes"] == 60 + 9
    with pytest.raises(InfeasibleBudget, match=f"The smallest plan takes {low:,}"):
        plan_fit(scores, memory=f"{low - 1} bytes", context=300, shapes=True)


def test_what_a_plan_is_compared_with_says_that_it_is_smaller_too():
    """Where all shapes do not fit, neither does the mix of the whole model."""
    plan = plan_fit(scores_of_shapes(1), memory=f"{zoo.buffers(300) + 20000} bytes", context=300, shapes=True)
    part = plan.extra["smaller"]["mix"]
    assert "all-shapes" not in plan.extra["baselines"] and part < 1
    said = f"{plan.extra['named']['mix']} with {part:.1%} of the FLOPs"
    assert said in verdict(plan) and said in " ".join(explain_plan(plan)["sentences"])
    assert "smaller" not in plan_fit(scores_of_shapes(1), memory="8 MiB", context=300).extra


def test_shapes_are_decided_only_where_they_are_asked_for():
    scores, own = scores_of_shapes(1), {"memory": f"{zoo.buffers(300) + 60000} bytes", "context": 300}
    plan = plan_fit(scores, **own)
    assert "shapes" not in plan.extra and "shapes" not in plan.extra["curve"][0]
    whole = Fitted.of(scores, Terms(**own, shapes=True)).plan("all-shapes")
    assert whole.extra["formats"] == plan.extra["formats"] and list(parts_of(whole)) == ["bits", "cache"]
    assert "Shapes: all stay" in " ".join(explain_plan(whole)["sentences"])
    for wrong, said in (
        ({"rule": "all-shapes"}, "no rule 'all-shapes'"),
        ({"experts": True, "shapes": True}, "not decided together"),
        ({"shapes": True, "multiple": 8}, "Scores are planned as they are"),
        ({"experts": True}, "say nothing of fewer experts"),
    ):
        with pytest.raises(InvalidInput, match=said):
            plan_fit(scores, **own, **wrong)
    with pytest.raises(InvalidInput, match="say nothing of smaller shapes.*shapes=true"):
        plan_fit(zoo.fit_scores(), **own, shapes=True)


@pytest.mark.parametrize(("name", "runtime"), [("llama", "llama.cpp"), ("qwen2", "llama.cpp"), ("llama", "transformers")])
def test_bytes_before_anything_is_cut_are_those_of_the_model_that_is(name, runtime):
    model, data = build(name), zoo.tokens(4, 12, vocabulary=96)
    family = "gguf" if runtime == "llama.cpp" else "compressed-tensors"
    options = {"family": family, "runtime": runtime}
    cutting = cutting_for(model, options)
    assert cutting.multiple == (32 if runtime == "llama.cpp" else 64) and cutting.even == (runtime != "llama.cpp")
    terms, before = Terms(memory="1 GiB", context=64, shapes=True), describe(model)
    plans, passes = plans_at_once(model, data, ["5% flops", "25% flops"], **cutting.way, draws=1)
    assert len(plans) == 2 and passes > 0 and describe(model) == before
    for plan in plans.values():
        table, space = sized(model, plan, None, terms, cutting.options)
        assert describe(model) == before and (runtime == "llama.cpp" or not layers_differ(plan))
        small = build(name)
        apply_shapes(small, plan, data)
        real, kept = empty_table(small, None, cutting.options), cache_space(small, 64, 1, runtime)
        assert np.array_equal(table.size, real.size) and (table.fixed, table.head) == (real.fixed, real.head)
        assert table.blocks == real.blocks and np.array_equal(space.table().size, kept.table().size)


def least_of(model, data, **own):
    """Bytes of the smallest plan with all shapes."""
    with pytest.raises(InfeasibleBudget) as refused:
        plan_fit(model, data, memory="1 KB", **own)
    return int(str(refused.value).split("The smallest plan takes ")[1].split(":")[0].replace(",", ""))


@pytest.fixture(scope="module", params=["llama.cpp", "transformers"])
def measured(request, tmp_path_factory):
    """A model, its texts, a plan in which shapes must go, and the file of what was measured."""
    model, data, held = build(), zoo.tokens(4, 16, vocabulary=96), zoo.tokens(2, 16, vocabulary=96, seed=9)
    path = tmp_path_factory.mktemp("fit") / "scores.json"
    own = {"context": 64, "batch": 2, "runtime": request.param, "draws": 1, "formats": FORMATS[request.param]}
    memory, before = f"{least_of(model, data, **own) - 1} bytes", describe(model)
    kept = {"save_scores": path, "resume": path.parent / "parts"}
    plan = plan_fit(model, data, held, memory=memory, **own, shapes=True, **kept)
    assert describe(model) == before
    return model, data, held, {"memory": memory, **own, "shapes": True}, plan, path


def test_an_interrupted_run_continues_to_the_same_plan(measured, monkeypatch):
    model, data, held, own, plan, path = measured
    for late in ("candidates", "measure_cut", "cache_record", "joint_rows"):
        monkeypatch.setattr(f"layerbudget.decisions.fit.plan.{late}", lambda *a, **k: pytest.fail("measured again"))
    assert plan_fit(model, data, held, **own, resume=path.parent / "parts").digest == plan.digest


def test_metadata_of_another_tokenizer_are_counted_again_in_every_smaller_model(measured, monkeypatch):
    """Who resumes with a tokenizer that was not there before gets the bytes of a run that has it from the start."""
    model, data, held, own, _, path = measured
    if own["runtime"] != "llama.cpp":
        pytest.skip("its files hold no tokenizer")
    monkeypatch.setattr("layerbudget.decisions.bits.plan.head_bytes", lambda *_: 20000)
    own = {**own, "memory": f"{int(own['memory'].split()[0]) + 20000} bytes"}
    again = plan_fit(model, data, held, **own, resume=path.parent / "parts")
    assert again.extra["shapes"]["share"] < 1 and again.extra["head_bytes"] == 20000


def test_one_sequence_has_no_standard_error():
    model, data, own = build(), zoo.tokens(1, 12, vocabulary=96), {"context": 64, "draws": 1, "formats": ["Q4_0"]}
    memory = f"{least_of(model, data, **own) * 9 // 10} bytes"
    plan = plan_fit(model, data, zoo.tokens(1, 12, vocabulary=96, seed=9), memory=memory, **own, shapes=True)
    said = " ".join(explain_plan(plan)["sentences"])
    assert "The cut costs" in said and "difference +" in said and "+- 0 " not in said and "+- 0)" not in said


def test_the_file_is_cut_loads_and_has_the_planned_bytes(measured, tmp_path):
    model, data, _, _, plan, _ = measured
    e, parts = plan.extra["shapes"], plan.extra["parts"]
    assert e["share"] < 1 and plan.budget["spent"] <= plan.budget["limit"] and "all-shapes" not in plan.extra["baselines"]
    receipt = write_fit(build(), plan, tmp_path / "out", data)
    assert receipt.bytes == parts["weights"]["bytes"]
    shapes = Plan.load(tmp_path / "out" / "shapes.json")
    small = build()
    apply_shapes(small, shapes, data)
    space = cache_space(small, 64, 2, plan.extra["runtime"])
    formats = [space.table().formats.index(plan.extra["formats"][b.modules[0].name]) for b in space.blocks]
    assert parts["cache"]["bytes"] == space.table().totals(np.array(formats))["spent"]
    apply_fit(mine := build(), plan, data)
    ids = torch.arange(2, 14)[None]
    if plan.extra["runtime"] == "llama.cpp":
        gguf = pytest.importorskip("gguf")
        file = tmp_path / "out" / "model.gguf"
        assert file.stat().st_size == receipt.file == receipt.bytes + parts["rest of the file"]["bytes"]
        reader, widths = gguf.GGUFReader(file), e["sizes"]["channels of the MLP"][1]
        own = {t.name: t for t in reader.tensors}
        assert [int(own[f"blk.{i}.ffn_up.weight"].shape[1]) for i in range(2)] == widths
        read = gguf.dequantize(own["blk.0.ffn_down.weight"].data, own["blk.0.ffn_down.weight"].tensor_type)
        np.testing.assert_allclose(read, mine.model.layers[0].mlp.down_proj.weight.detach().numpy(), atol=1e-6)
    else:
        loaded = load_model(str(tmp_path / "out"), dtype="float32")
        assert loaded.config.intermediate_size == e["sizes"]["channels of the MLP"][1][0]
        with torch.no_grad():
            wanted = mine(ids).logits
            assert (loaded(ids).logits - wanted).norm() < 0.01 * wanted.norm()  # what is not rounded lies there in bfloat16
    for part in (plan, shapes):
        assert verdict(part) and explain_plan(part)["sentences"]
    assert "step by step" not in " ".join(explain_plan(shapes)["sentences"])  # from one look at the model
    assert gather(tmp_path / "out").plan.kind == "bits"
    with pytest.raises(InvalidInput, match="refitted on text"):
        write_fit(build(), plan, tmp_path / "none")


def test_the_check_is_of_what_applying_makes(measured):
    model, data, held, _, plan, _ = measured
    dense, small = DenseOutput(model, held), build()
    formats = layer_formats(build(), parts_of(plan)["cache"])
    apply_fit(small, plan, data)
    with caching(small, rounding(formats)):
        kl = mean_and_error(dense.rows(small)[:, :2])[0]
    rows = plan.extra["check"]["rows"]
    assert rows[plan.rule]["kl"] == pytest.approx(kl, rel=1e-4) and rows[plan.rule]["kl"] == min(r["kl"] for r in rows.values())


def test_what_was_measured_serves_other_memories_and_pages(measured, tmp_path):
    model, _, _, own, plan, path = measured
    scores = Scores.load(path)
    own = {name: own[name] for name in ("memory", "context", "batch", "shapes")}
    again = plan_fit(scores, **own, rule=plan.rule)
    assert again.blocks == plan.blocks and again.extra["shapes"] == plan.extra["shapes"]
    more = plan_fit(scores, **{**own, "memory": "8 MiB"})
    assert more.extra["shapes"]["share"] == 1 and "Shapes: all stay" in " ".join(explain_plan(more)["sentences"])
    assert "all-shapes" in more.extra["baselines"]
    said = " ".join(explain_plan(plan)["sentences"])
    assert "The cut costs" in said and "did not choose them" in said and "passes" in said and "of the layers' FLOPs go" in said
    plan.save(tmp_path / "page" / "plan.json")
    charts = charts_of(gather(tmp_path / "page"))
    assert len(charts["memory"]["points"]) == 9 and len(charts["grid"]["plans"]) == 8


def test_bad_input_with_shapes_is_one_sentence_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("layerbudget.decisions.fit.plan.measured_formats", lambda *a, **k: pytest.fail("measured"))
    data, own = zoo.tokens(2, 8, vocabulary=96), {"memory": "1 GiB", "context": 8, "shapes": True}
    for model, changes, said in (
        (zoo.build("qwen3-moe", hidden_size=64, head_dim=32), {}, "has experts.*experts=true"),
        (build(), {"experts": True}, "not decided together.*Leave one"),
        (build(), {"shapes": False, "multiple": 16}, "no meaning without shapes"),
        (build(), {"multiple": 0}, "multiple is 0"),
        (build(), {"imatrix": "any.gguf", "method": "weighted"}, "importance matrix.*Leave it out"),
        (build(), {"context": 65}, "reads at most 64"),
        (
            zoo.build("opt", hidden_size=64, num_attention_heads=2, word_embed_proj_dim=64),
            {},
            "apply writes no file of OPT.*heads and widths go.*plan shapes",
        ),
    ):
        with pytest.raises(InvalidInput, match=said):
            plan_fit(model, data, **{**own, **changes})


def test_runtimes_without_layers_that_differ_get_equal_ones():
    for name, runtime, even in (("qwen3", "llama.cpp", True), ("mistral", "llama.cpp", False), ("llama", "vllm", True)):
        family = "gguf" if runtime == "llama.cpp" else "compressed-tensors"
        assert cutting_for(build(name), {"family": family, "runtime": runtime}).even == even
    wide = zoo.tiny("llama", hidden_size=256, intermediate_size=2048, head_dim=64)
    packed, given = {"family": "compressed-tensors", "runtime": "transformers"}, {"family": "gguf", "runtime": "llama.cpp"}
    assert cutting_for(wide, given).multiple == 256 and cutting_for(wide, given, 64).multiple == 64
    assert cutting_for(wide, packed).multiple == 128 and cutting_for(wide, {**packed, "group": 64}).multiple == 64


def test_a_streamed_model_is_refused(tmp_path):
    build().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), stream=True)
    with pytest.raises(CoverageError, match="--no-stream"):
        plan_fit(model, zoo.tokens(2, 8, vocabulary=96), memory="1 GiB", context=8, shapes=True)


def test_the_command_plans_applies_and_explains_with_shapes(folder, monkeypatch, capsys):
    build(vocab_size=97).save_pretrained(folder / "model")
    monkeypatch.chdir(folder)
    given = ["--context", "32", "--formats", "Q4_0,Q8_0", "--quiet"]
    text = ["--data", "text.txt", "--samples", "4", "--length", "16", "--seed", "3", "--set", "check=2", "--set", "draws=1"]
    assert main(["plan", "fit", "model", "--memory", "1 KiB", *given, *text, "-o", "none.json"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    memory = ["--memory", f"{int(said.split('The smallest plan takes ')[1].split(':')[0].replace(',', '')) - 1} bytes"]
    shapes = ["--set", "shapes=true"]
    assert main(["plan", "fit", "model", *memory, *given, *text, *shapes, "--save-scores", "sizes.json"]) == 0
    plan, said = Plan.load("plan.json"), " ".join(capsys.readouterr().out.split())
    assert plan.extra["shapes"]["share"] < 1 and "of the layers' FLOPs go" in said and "FLOPs" in said
    assert main(["plan", "fit", "sizes.json", *memory, "--context", "32", *shapes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["extra"]["shapes"]["tried"][0] == 1.0
    assert main(["apply", "model", "plan.json", "-o", "out", "--quiet"]) == 0
    assert "shapes.json is their plan" in " ".join(capsys.readouterr().out.split())
    for words in (["report", "."], ["explain", "plan", "plan.json"], ["export", "plan.json", "--to", "llama-cache"]):
        assert main([*words, *(["-o", f"{words[0]}.out"] if words[0] != "explain" else []), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["apply", "out/model.gguf", "plan.json", "-o", "file.gguf"]) == 2
    assert "lets heads or widths go" in " ".join(capsys.readouterr().err.split())
    seen = list[str]()

    def stop(model, plan, data, **_):
        seen.append(data.digest)
        raise InvalidInput("seen", "", "")

    monkeypatch.setattr("layerbudget.decisions.fit.plan.apply_shapes", stop)
    for words in ([], ["--data", "text.txt"]):  # also where the text is named: as much of it, from the same draw
        assert main(["apply", "model", "plan.json", "-o", "again", *words, "--quiet"]) == 2
    data = calibration("text.txt", load_tokenizer("model"), samples=6, length=16, seed=3)
    assert seen == [data.select(slice(0, 4)).digest] * 2
