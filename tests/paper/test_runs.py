"""The experiments that prune, train and ask, on a tiny model and a few rows of every task."""

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from paper.__main__ import main
from paper.cells import Cells, NotThisWorker
from tests import task_rows, zoo

import layerbudget as lb
from layerbudget.errors import NotFound
from layerbudget.finetuning.protocol import Protocol
from paper import drift_run, expert_bench, experts_run, histogram, influences, pruning_run, setting


def speaker():
    """A model of letters that can read a whole prompt."""
    own = {
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "max_position_embeddings": 512,
        "num_hidden_layers": 4,
    }
    return zoo.tiny("llama", seed=0, attention="sdpa", **own)


@pytest.fixture
def tiny(monkeypatch, tokenizer, tmp_path):
    """A saved model, the tasks' files, and a setting of minutes made one of seconds."""
    data = tmp_path / "data"
    data.mkdir()
    task_rows.zero_shot(data)
    task_rows.labelled(data)
    small = dataclasses.replace(
        setting.SETTINGS["small"], influence_train=6, influence_validation=3, cutoff=240, samples=4, length=32, limit=3,
        calibrations=("cola", "commonsenseqa"), swept=("cola",), tuned=("cola", "commonsenseqa"), train_rows=8, test_rows=6,
        protocol=Protocol(epochs=1, batch=4, warmup=1, cutoff=260),
    )  # fmt: skip
    for module in (setting, pruning_run, expert_bench, histogram):
        monkeypatch.setattr(module, "SETTINGS", {**setting.SETTINGS, "small": small})
    speaker().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return {"model": str(tmp_path / "model"), "data_dir": str(data), "out": str(tmp_path / "out")}


def test_influences_of_a_task_are_those_of_its_rows(tiny, tokenizer):
    model, small = speaker(), setting.SETTINGS["small"]
    blocks, cells = tuple(lb.partition(model)), Cells(None)
    found = {
        way: influences.influence_scores(model, tokenizer, blocks, "cola", setting.need_data(tiny["data_dir"]), small, cells,
                                         aggregation=way)
        for way in ("all", "positive")
    }  # fmt: skip
    assert cells.made == 1 and cells.kept == 0  # both aggregations come from one table of influences
    extra = found["all"].extra
    assert found["all"].gain[0] == tuple(extra["all"][b.name] for b in blocks)
    assert found["positive"].gain[0] == tuple(extra["positive"][b.name] for b in blocks)
    assert all(p >= a - 1e-6 * abs(a) for a, p in zip(found["all"].gain[0], found["positive"].gain[0], strict=True))


@pytest.mark.slow
def test_pruning_and_kappa(tiny):
    found = pruning_run.run_pruning(**tiny)
    assert [r["row"] for r in found.rows] == ["CoLA", "CommonsenseQA", "Average (MDL)", "LayerIF", "uniform", "dense"]
    for title in setting.METHODS.values():
        mean = np.mean([r[title] for r in found.rows[:2]])
        assert found.rows[2][title] == pytest.approx(mean) and found.rows[2][f"{title}, published"] is not None
    assert len(found.claims) == 4 and "cannot be told apart" in found.finding
    runs = pruning_run.PruningRuns(
        scale="small", model=tiny["model"], data_dir=tiny["data_dir"], out=tiny["out"], paper="mistral"
    )
    plan = runs.mdl("cola")
    assert plan.values.max() <= 0.51 + 1e-12 and plan.sparsity == pytest.approx(0.5, abs=1e-3)
    assert plan.hyperparameters["exponent_on"] == "block"
    made = runs.cells.made
    runs.ask(lambda: plan, "wanda")
    assert runs.cells.made == made  # kept from the run before
    study = pruning_run.run_kappa(**tiny)
    assert len(study.rows) == 3 * 6 and [c.met for c in study.claims].count(None) == 0
    assert {r["published"] for r in study.rows if r["plan"] == "kappa 4"} == {33.136, 48.63, 48.83}


@pytest.mark.slow
def test_experts_and_drift(tiny):
    found = experts_run.run_experts(**tiny)
    assert [r["task"] for r in found.rows] == ["CoLA", "CommonsenseQA", "Average"]
    published = [found.rows[i]["MDL (All), published"] for i in range(2)]
    assert published == [87.44, 80.43] and found.rows[2]["MDL (All), published"] == pytest.approx(np.mean(published))
    assert "MDL (+ve) - LayerIF (+ve) = -0.71 points over CoLA, CommonsenseQA" in found.line  # over the tasks that ran
    moved = drift_run.run_drift(**tiny)
    shared = {**tiny, "out": tiny["out"] + "-parts"}
    for _ in range(2):  # scores, then what is planned from them
        for i in (1, 2):
            with contextlib.suppress(NotThisWorker):
                drift_run.run_drift(**shared, part=(i, 2))
    runs = expert_bench.ExpertRuns(
        scale="small", model=tiny["model"], data_dir=tiny["data_dir"], out=shared["out"], part=(3, 99)
    )
    assert all(runs.wrong(lambda task=t: runs.mdl(task, "positive", 3.0), t) for t in ("cola", "commonsenseqa"))
    assert drift_run.run_drift(**shared).rows == moved.rows
    first = next(r for r in moved.rows if "source" in r["task"])
    assert first["drift, sum one"] == first["regret"] == first["accuracy difference"] == 0.0
    other = next(r for r in moved.rows if "source" not in r["task"])
    assert 0 < other["regret"] <= other["sharp bound"] <= other["bound"]
    assert other["drift, mean one"] == pytest.approx(other["drift, sum one"] * 4**2) and moved.claims[0].met


@pytest.mark.slow
def test_strategies_and_beta(tiny):
    found = experts_run.run_strategies(**tiny)
    assert set(found.result["tests"]) == {"MoLA 5555", "MoLA 2468", "MoLA 8642", "AlphaLoRA", "Fisher (grad. norm)", "LayerIF"}
    assert "uniform is ahead" in found.line
    beta = experts_run.run_beta(**tiny)
    assert {"LayerIF", "beta 1", "beta 2", "beta 3"} <= set(beta.rows[0])


def test_the_command_leaves_a_run(tiny, capsys, monkeypatch):
    monkeypatch.setattr(histogram, "text_source", lambda *_: "stdlib")
    words = ["run", "histogram", "--model", tiny["model"], "--out", tiny["out"]]
    assert main(words) == 0
    record = json.loads((Path(tiny["out"]) / "result.json").read_text())
    assert record["items"] == ["figure-1"] and len(record["result"]["scores"]["blocks"]) == 4
    assert main(words) == 2  # holds a result
    assert main(["run", "pruning", "--model", tiny["model"], "--data-dir", "/nowhere/at/all"]) == 2
    with pytest.raises(NotFound, match="--data-dir"):
        setting.need_data(None)
    capsys.readouterr()
    assert main(["list"]) == 0 and main(["published", "table-7"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Table 13" in shown and "uniform is ahead of MDL" in shown
    assert main(["run", "released"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "192 of 192" in shown and "file-name order" in shown


def test_parts_share_a_folder(tiny):
    words = ["run", "drift", "--model", tiny["model"], "--data-dir", tiny["data_dir"]]
    with pytest.raises(SystemExit):
        main(["run", "tests", "--part", "1/2"])  # which keeps no cells
    assert main([*words, "--part", "1/2"]) == 2  # no folder
    assert main([*words, "--part", "1/2", "--out", tiny["out"]]) == 0
    assert not (Path(tiny["out"]) / "result.json").exists()
