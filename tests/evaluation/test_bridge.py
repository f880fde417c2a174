"""The bridge to lm-evaluation-harness: requests are those of its stock tasks, scores those of its own command line."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from paper.zero_shot import ZeroShot
from tests import task_rows

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.errors import InvalidInput, ModelMismatch
from layerbudget.evaluation import harness, statistics
from layerbudget.evaluation.statistics import mcnemar

pytest.importorskip("lm_eval")
SEVEN = tuple(harness.LOCAL)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A few rows of each task."""
    folder = tmp_path_factory.mktemp("tasks")
    task_rows.zero_shot(folder)
    return folder


@pytest.fixture(scope="module")
def stock(files, tmp_path_factory):
    """The harness's own definitions, in a folder for --include_path, reading the same rows through its own file loader."""
    index, d = harness._task_manager(list(harness.LOCAL)).task_index, tmp_path_factory.mktemp("stock")
    for task in SEVEN:
        rows, split = harness.local_rows(task, files), harness.LOCAL[task][2]
        (d / f"{task}.json").write_text("\n".join(json.dumps(r) for r in rows))
        own = {"include": str(index[task].yaml_path), "task": f"stock_{task}", "dataset_path": "json", "dataset_name": None}
        own |= {f"{s}_split": split if s == split else None for s in ("training", "validation", "test")}
        own |= {"dataset_kwargs": {"data_files": {split: str(d / f"{task}.json")}}, "tag": None}
        (d / f"stock_{task}.yaml").write_text(yaml.safe_dump(own))
    return d


def requests_of(task):
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [(r.doc_id, r.idx, r.arguments, r.request_type) for r in task.instances]


@pytest.fixture(scope="module")
def built(files, stock, tmp_path_factory):
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    theirs = TaskManager(include_path=str(stock), include_defaults=False).load([f"stock_{t}" for t in SEVEN])["tasks"]
    return harness.local_tasks(SEVEN, files), theirs


@pytest.mark.parametrize("task", SEVEN)
def test_requests_are_those_of_the_stock_task(built, task):
    ours, theirs = built[0][task], built[1][f"stock_{task}"]
    assert type(ours) is type(theirs)  # the harness's own class
    a, b = requests_of(ours), requests_of(theirs)
    assert a == b and len(a) >= 16


def test_requests_by_hand(built):
    """Written down from the templates of the harness's documentation."""
    first = {t: requests_of(task)[0][2] for t, task in built[0].items()}
    assert first["rte"] == ("Dogs 0 bark.\nQuestion: A dog 0 is loud. True or False?\nAnswer:", " True")
    assert first["boolq"] == ("The number 0.\nQuestion: is 0 odd?\nAnswer:", " no")
    assert first["arc_easy"] == ("Question: What is 0?\nAnswer:", " a stone")
    assert first["openbookqa"] == ("Item 0 is", " hot")
    assert first["hellaswag"] == ("Baking: A man bakes. He", " sings.")
    assert first["winogrande"] == ("Ann saw Bea because Ann", " waved 0 times.")


@pytest.mark.slow
def test_scores_are_those_of_the_harness_command_line(files, stock, saved_model, tmp_path):
    folder = saved_model("llama")
    chosen = ("boolq", "arc_easy", "hellaswag", "winogrande")
    words = ["--model", "hf", "--model_args", f"pretrained={folder},dtype=float32", "--include_path", str(stock),
             "--device", "cpu",
             "--tasks", ",".join(f"stock_{t}" for t in chosen), "--batch_size", "4",
             "--output_path", str(tmp_path / "o")]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "lm_eval", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(next((tmp_path / "o").rglob("results*.json")).read_text())["results"]
    model, tokenizer = lb.load_model(str(folder)), lb.load_tokenizer(str(folder))
    ours = harness.evaluate_tasks(model, tokenizer, chosen, data_dir=files, batch_size=4)
    for task in chosen:
        theirs = record[f"stock_{task}"]
        assert ours[task]["acc"] == theirs["acc,none"] and ours[task]["stderr"] == theirs["acc_stderr,none"]
        assert ours[task].get("acc_norm") == theirs.get("acc_norm,none"), task
        assert ours[task].get("acc_norm_stderr") == theirs.get("acc_norm_stderr,none"), task
    assert len({row["digest"] for row in ours.values()}) == len(chosen)


def test_tasks_prepared_once_give_the_same(files, saved_model):
    folder = saved_model("llama")
    model, tokenizer = lb.load_model(str(folder)), lb.load_tokenizer(str(folder))
    chosen = ("boolq", "arc_easy", "winogrande")
    prepared = ZeroShot(files, 5, tasks=chosen)
    torch.manual_seed(11)
    drawn = torch.rand(3)
    torch.manual_seed(11)
    theirs = harness.evaluate_tasks(model, tokenizer, chosen, data_dir=files, limit=5)
    assert torch.equal(torch.rand(3), drawn), "the caller's random numbers go on"
    for _ in range(2):  # a second model would find the same requests
        ours = prepared.ask(model, tokenizer)
        for name in chosen:
            assert {k: ours[name][k] for k in ("acc", "stderr", "correct")} == {
                k: theirs[name][k] for k in ("acc", "stderr", "correct")
            }


def rows(*correct):
    a = np.array(correct, dtype=float)
    return {"acc": a.mean(), "stderr": a.std(ddof=1) / len(a) ** 0.5, "correct": a.tolist(), "digest": "x"}


def test_mean_of_tasks_and_its_test(rng):
    x = {t: rows(*(rng.random(400) < 0.6)) for t in "abc"}
    y = {t: rows(*(np.array(r["correct"]).astype(bool) & (rng.random(400) < 0.85))) for t, r in x.items()}
    test = statistics.compare_means(x, y)
    d = [np.array(x[t]["correct"]) - np.array(y[t]["correct"]) for t in "abc"]
    error = np.sqrt(sum((v**2).mean() / 400 for v in d)) / 3  # of fair signs on the discordant pairs
    assert test.difference == pytest.approx(np.mean([v.mean() for v in d]))
    assert test.high - test.low == pytest.approx(2 * 1.96 * error, rel=0.06) and test.p <= 1e-4 and test.n == 1200
    same = statistics.compare_means(x, x)
    assert same.difference == 0 and same.p == 1.0


def test_answers_that_flip_either_way_leave_the_accuracy(rng):
    a, b = {"tasks": {"t": rows(1, 0, 1, 1, 0)}}, {"tasks": {"t": rows(0, 1, 1, 1, 0)}}
    found = statistics.compare_results(a | {"perplexity": {}}, b | {"perplexity": {}}, ("small", "whole"))
    assert found["tasks"]["t"]["difference"] == 0 and found["tasks"]["t"]["flips"] == 0.4
    assert "2 of 5 answers flipped: 1 are right in small alone, 1 in whole alone." in found["sentences"][0]
    assert statistics.flipped(a["tasks"], b["tasks"])["t"].tolist() == [True, True, False, False, False]


def test_two_results(rng):
    a = {
        "model": "A",
        "tasks": {"t": rows(1, 1, 1, 0), "u": rows(1, 0, 1, 1)},
        "perplexity": {"s": {"nll": [1.0, 2.0, 1.5], "counts": [7, 7, 7], "digest": "d"}},
    }
    b = {
        "model": "B",
        "tasks": {"t": rows(0, 1, 0, 0), "u": rows(1, 0, 0, 1)},
        "perplexity": {"s": {"nll": [1.2, 2.1, 1.9], "counts": [7, 7, 7], "digest": "d"}},
    }
    found = statistics.compare_results(a, b)
    assert found["tasks"]["t"] == {**vars(mcnemar(([1, 1, 1, 0], [0, 1, 0, 0]))), "flips": 0.5}
    assert found["mean"]["flips"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert "2 of 4 answers flipped: 2 are right in A alone, 0 in B alone." in found["sentences"][0]
    assert "37.5% of the answers flipped" in found["verdict"]
    assert found["mean"]["difference"] == pytest.approx(0.375) and found["perplexity"]["s"]["difference"] < 0
    assert len(found["sentences"]) == 4
    text = a["perplexity"]["s"]
    longer = {"tasks": {}, "perplexity": {"s": {**text, "nll": [1.4, 1.9, 1.4], "counts": [2, 90, 90]}}}
    ahead = statistics.compare_results(longer, {"tasks": {}, "perplexity": {"s": text}})["perplexity"]["s"]
    assert ahead["difference"] == pytest.approx((2 * 0.4 - 90 * 0.1 - 90 * 0.1) / 182)
    del longer["perplexity"]["s"]["counts"]
    with pytest.raises(InvalidInput, match="Evaluate again"):
        statistics.compare_results(longer, b)
    b["tasks"]["t"]["digest"] = "y"
    with pytest.raises(ModelMismatch, match="other questions"):
        statistics.compare_results(a, b)
    with pytest.raises(InvalidInput, match="share no task"):
        statistics.compare_results(a, {"tasks": {}, "perplexity": {}})


def test_accuracy_by_length_is_told_where_the_task_has_it(files, saved_model, capsys):
    words = ["--tasks", "boolq,arc_easy", "--data-dir", str(files), "--limit", "12"]
    assert main(["evaluate", str(saved_model("llama")), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert "acc_norm" not in found["boolq"] and 0 <= found["arc_easy"]["acc_norm"] <= 1
    assert main(["evaluate", str(saved_model("llama")), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    row = found["arc_easy"]
    assert f"accuracy (acc) {row['acc']:.4f} +- {2 * row['stderr']:.4f}, by length (acc_norm) {row['acc_norm']:.4f}" in said
    assert said.count("acc_norm") == 1


def test_evaluate_against_a_model_and_against_a_file(files, saved_model, tmp_path, capsys):
    first, second = saved_model("llama"), saved_model("mistral")
    common = ["--tasks", "boolq,winogrande", "--data-dir", str(files), "--limit", "8", "--quiet"]
    assert main(["evaluate", str(second), *common, "--out", str(tmp_path / "b.json")]) == 0
    capsys.readouterr()
    found = []
    for other in (str(second), str(tmp_path / "b.json")):
        assert main(["evaluate", str(first), *common, "--against", other, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["against"]["tasks"] == found[1]["against"]["tasks"] and len(found[0]["mean"]["tasks"]) == 2
    assert found[0]["against"]["mean"]["difference"] == pytest.approx(
        found[0]["mean"]["acc"] - found[0]["against"]["mean"]["second"]["acc"]
    )
    assert found[0]["dtype"] == found[0]["against"]["dtype"] == "float32"
    (tmp_path / "c.json").write_text("{}")
    assert main(["evaluate", str(first), *common, "--against", str(tmp_path / "c.json")]) == 2


def test_two_precisions_are_said(saved_model, tmp_path, capsys, monkeypatch):
    """A folder in bfloat16 was compared with a reference in float32 without a word."""
    monkeypatch.setattr("layerbudget.models.loading.quick_dtype", lambda held, place: held)
    whole, half = saved_model("llama"), tmp_path / "half"
    lb.load_model(str(whole), dtype="bfloat16").save_pretrained(half)
    lb.load_tokenizer(str(whole)).save_pretrained(half)
    common = ["--windows", "2", "--length", "16", "--quiet"]
    words = f"{half} was computed in bfloat16 and {whole} in float32, which is a part of the difference"
    assert main(["evaluate", str(half), *common, "--against", str(whole)]) == 0
    assert f"{words}; --dtype float32 computes both alike." in " ".join(capsys.readouterr().out.split())
    kept = tmp_path / "mixed.json"  # of a model with parameters in two precisions
    assert main(["evaluate", str(whole), *common, "--out", str(kept)]) == 0
    kept.write_text(kept.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16 and float32"'))
    assert main(["evaluate", str(half), *common, "--against", str(kept)]) == 0
    assert "evaluate both models with --dtype float32." in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", str(half), *common, "--against", str(whole), "--dtype", "float32", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "was computed in" not in told.err and found["dtype"] == found["against"]["dtype"] == "float32"
    assert main(["evaluate", str(half), *common, "--against", str(whole), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dtype"], found["against"]["dtype"]) == ("bfloat16", "float32")
