"""Comparing scores and rules: equal budgets, controls, tests, resumption, and what it leaves."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.comparison import bench as benches
from layerbudget.comparison import grid, run
from layerbudget.comparison.bench import counted
from layerbudget.comparison.names import by_name
from layerbudget.comparison.run import _on_budget, _on_second, compare_scores
from layerbudget.data.calibration import CalibrationSet
from layerbudget.data.folders import say_once
from layerbudget.decisions.rules import shuffled
from layerbudget.errors import InvalidInput, NotFound
from layerbudget.evaluation import statistics
from layerbudget.records import Block, Module
from layerbudget.scores import Scores
from layerbudget.storage.parts import standing_of


@pytest.fixture
def bench(tokenizer):
    text = ["the quick brown fox jumps over the lazy dog and runs away. " * 40]
    model = zoo.speaker("llama")
    ids = torch.tensor(tokenizer(text[0])["input_ids"][1:641]).reshape(20, 32)
    windows = CalibrationSet(input_ids=ids)
    return benches.TextBench(model=model, tokenizer=tokenizer, source=text, windows=windows, samples=6, length=32)


def deeper(problem):
    return problem.share + 0.1 * np.linspace(-1, 1, len(problem.blocks))


def test_every_pair_is_measured_at_one_budget_and_the_model_is_put_back(bench):
    before = {k: v.clone() for k, v in bench.model.state_dict().items()}
    own = {b.name: float(i + 1) for i, b in enumerate(bench.blocks)}
    found = compare_scores(
        bench, {"gain": "fisher-gram", "own": own}, ["mdl", "layerif", "size", deeper], [0.3, 0.5], seeds=(0, 1)
    )
    assert all(torch.equal(v, before[k]) for k, v in bench.model.state_dict().items())
    for b in found.budgets:
        names = {r["name"] for r in b["rows"]}
        assert {"uniform", "size", "deeper", "mdl(own)", "mdl(own, permuted)", "layerif(gain)"} <= names
        assert b["equal_budget"] and set(b["ignoring"]) == {"size", "deeper"}
        means = [r["mean"] for r in b["rows"]]
        assert means == sorted(means)
        for r in b["rows"]:
            assert (r["versus_uniform"] is None) == (r["name"] == "uniform")
            assert r["rank_low"] <= r["rank_high"] and 0 <= r["first"] <= 1
    assert found.cost["own"] == {"forward": 0.0, "backward": 0.0, "seconds": 0.0}
    assert found.cost["gain"]["forward"] == found.cost["gain"]["backward"] == 6
    assert any("ignore the score: size, deeper" in s for s in found.sentences)
    assert all("be told from the second" in s for s in found.sentences if s.startswith("First is") and "1 to 1" in s)


def test_a_sentence_says_whether_the_first_can_be_told_from_the_second():
    def row(name, low, high):
        return {"name": name, "rank_low": low, "rank_high": high}

    for rows, twins, said in (
        ([row("a", 1, 1), row("b", 2, 3), row("c", 2, 3)], [], " It can be told from the second, b."),
        ([row("a", 1, 2), row("b", 1, 3), row("c", 2, 3)], [], " It cannot be told from the second, b."),
        ([row("a", 1, 1), row("b", 1, 1), row("c", 2, 3)], [["a", "b"]], " It can be told from the second, c."),
        ([row("a", 1, 1), row("b", 1, 1)], [], " It cannot be told from the second, b."),  # equal values
        ([row("a", 1, 2), row("b", 2, 3), row("c", 1, 3)], [], ""),
        ([row("a", 1, 1)], [], ""),
    ):
        assert _on_second({"rows": rows, "twins": twins}) == said


def test_a_control_that_does_as_well_stands_in_the_verdict():
    """The verdict called a plan better than uniform, while a shuffled score was first in the table."""

    def row(name, mean, difference, holm, *, control="", permuted=None):
        rule, _, score = name.partition("(")
        test = None if permuted is None else {"difference": permuted[0], "holm": permuted[1]}
        versus = None if name == "uniform" else {"difference": difference, "holm": holm}
        row = {"name": name, "mean": mean, "rule": rule, "score": score.rstrip(")"), "control": control}
        return {**row, "versus_uniform": versus, "versus_permuted": test}

    uniform = row("uniform", 3.0, None, None, control="uniform")
    shuffled = row("owl(gain, permuted)", 2.8, -0.2, 0.001, control="permuted")
    own = row("owl(owl, permuted)", 2.95, -0.05, 0.9, control="permuted")
    better = row("owl(owl)", 2.9, -0.1, 0.01, permuted=(-0.05, 0.01))
    small = row("mdl(owl)", 2.9999, -0.0001, 1e-9, permuted=(-0.0001, 0.9))
    behind = row("mdl(gain)", 3.1, 0.1, 0.01, permuted=(0.1, 0.9))
    told = _on_budget({"budget": 0.5, "rows": [shuffled, better, own, small, uniform, behind]})
    assert "better than uniform: owl(owl), but a shuffled score does as well: owl(gain, permuted);" in told
    assert "worse: mdl(gain); level: mdl(owl) (paired" in told
    alone = _on_budget({"budget": 0.5, "rows": [better, own, uniform]})
    assert "better than uniform: owl(owl); worse: none (paired" in alone and "level" not in alone
    level = row("owl(owl)", 2.9, -0.1, 0.01, permuted=(-0.05, 0.3))
    assert "does as well: owl(owl, permuted)" in _on_budget({"budget": 0.5, "rows": [level, own, uniform]})


def test_a_measurement_is_what_pruning_by_hand_gives(bench):
    plan = lb.plan_sparsity(bench.blocks, sparsity=0.4, rule="uniform")
    cell = bench.measure(plan, 0)
    lb.prune(bench.model, plan, bench.data(0), "wanda")
    assert cell["values"] == pytest.approx(list(lb.perplexity(bench.model, bench.windows, batch_size=8).nll), rel=1e-6)
    assert cell["spent"] == int(plan.counts.sum())


def test_a_second_run_reads_its_cells_and_parts_share_a_folder(bench, tmp_path):
    arguments = (bench, ["gain"], ["mdl"], [0.4])
    parts = [compare_scores(*arguments, folder=tmp_path, part=(i, 2)) for i in (2, 1, 2)]
    assert not parts[0].complete
    with pytest.raises(InvalidInput, match="not complete.*Call compare_scores again with this folder"):
        lb.write_comparison(parts[0], tmp_path)
    files = set((tmp_path / "cells").iterdir())
    last = compare_scores(*arguments, folder=tmp_path)
    assert last.complete and len(list((tmp_path / "cells").iterdir())) >= len(files)
    stamps = {f: f.stat().st_mtime_ns for f in (tmp_path / "cells").iterdir()}
    again = compare_scores(*arguments, folder=tmp_path)
    assert {f: f.stat().st_mtime_ns for f in stamps} == stamps and again.budgets == last.budgets
    with pytest.raises(NotFound, match="in Python, give what compare_scores returns to layerbudget.write_comparison"):
        lb.write_report(tmp_path, tmp_path / "page.html")
    lb.write_comparison(again, tmp_path)  # as this remedy says
    assert "plans of sparsity compared" in lb.write_report(tmp_path, tmp_path / "page.html").read_text(encoding="utf-8")
    next(iter(stamps)).write_text("{")  # a broken cell is measured again
    assert compare_scores(*arguments, folder=tmp_path).budgets == last.budgets


def test_permuted_keeps_values_and_a_constant_score_is_not_called_ignored():
    scores = zoo.scores(np.arange(1.0, 6.0))
    other = grid.moved(scores, shuffled(5, 3))
    assert sorted(other.values()) == sorted(scores.values()) and (other.values() != scores.values()).any()
    assert not grid.ignores("sparsity", scores, "mdl", 0.5, {})
    assert grid.ignores("sparsity", scores, "uniform", 0.5, {})
    assert not grid.ignores("sparsity", zoo.scores(np.ones(5)), "mdl", 0.5, {})
    made = grid.make_grid("sparsity", {"a": scores}, ["layerif", "alphapruning"], 0.5)
    assert ["layerif(a)", "alphapruning(a)"] in made.twins()  # one map under two names
    with pytest.raises(InvalidInput, match="No rule here reads width"):
        grid.make_grid("sparsity", {"a": scores}, ["mdl"], 0.5, options={"width": 0.1})
    with pytest.raises(InvalidInput, match="The seed 0 is named twice"):  # the error counted it as another draw
        compare_scores(None, {"a": scores}, ["mdl"], [0.5], seeds=[0, 1, 0])
    with pytest.raises(InvalidInput, match="No score makes a plan"):
        grid.make_grid("ranks", {"a": scores}, ["by-rank"], 4)  # one number per block


def test_scores_are_compared_at_the_damping_that_is_asked_for():
    gain = ((1.0, 2.0, 4.0), (None, 1.0, 2.0), (4.0, 2.0, 1.0))
    scores = Scores(blocks=zoo.scores([1.0, 2.0, 3.0]).blocks, gain=gain, damping=(0.1, 1.0, 10.0), estimator="hessian")
    with pytest.raises(InvalidInput, match="have no score at damping 1 "):
        grid.make_grid("sparsity", {"a": scores}, ["mdl"], 0.5)
    made = grid.make_grid("sparsity", {"a": scores}, ["mdl"], 0.5, options={"damping": 10})
    assert {entry.name for entry in made.entries} == {"uniform", "mdl(a)", "mdl(a, permuted)"} and not made.impossible


def test_difference_counts_seeds_and_items(rng):
    noise = rng.normal(size=(4, 50))
    a = noise + 1.0 + np.array([0.5, -0.5, 0.3, -0.3])[:, None]
    found = statistics.difference(a, noise)
    assert found["difference"] == pytest.approx(1.0) and found["low"] < 1 < found["high"]
    alone = statistics.difference(a[:1], noise[:1])
    assert alone["error"] < found["error"]  # one seed knows nothing of the spread over seeds
    one = statistics.difference(noise[:1] + rng.normal(size=(1, 50)), noise[:1])
    d = one["difference"] / one["error"]
    assert one["df"] == 49 and one["p"] == pytest.approx(2 * __import__("scipy.stats").stats.t.sf(abs(d), 49))
    assert statistics.difference(noise, noise)["p"] == 1.0


def test_false_alarms_keep_their_level(rng):
    """Two plans that differ by nothing but seeds and items are told apart in at most about 5 % of experiments."""
    alarms = 0
    for _ in range(400):
        s, i = rng.normal(size=(4, 1)), rng.normal(size=(1, 30))
        alarms += statistics.difference(s + i + 0.3 * rng.normal(size=(4, 30)), np.zeros((4, 30)))["p"] < 0.05
    assert alarms / 400 < 0.075


def test_ranking_knows_what_it_cannot_tell(rng):
    base = rng.normal(size=(3, 40))
    tables = {"a": base, "b": base + 1e-3 * rng.normal(size=base.shape), "c": base + 2.0}
    rows = statistics.ranking(tables)
    assert rows[-1]["name"] == "c" and rows[-1]["rank_low"] == rows[-1]["rank_high"] == 3
    assert rows[0]["rank_high"] == 2 and sum(r["first"] for r in rows) == pytest.approx(1.0)
    assert statistics.holm([0.01, 0.02, 0.04]) == pytest.approx([0.03, 0.04, 0.04])


def test_passes_are_counted(bench):
    data = bench.data(0)
    with counted(bench.model) as passes:
        lb.score(bench.model, data, bench.blocks, "gradient-norm")
    assert passes == {"forward": 6.0, "backward": 6.0}
    with counted(bench.model) as passes:
        lb.score(bench.model, data, bench.blocks, "ablation")
    assert passes["backward"] == 0 and passes["forward"] > 6  # one more for every block


def test_a_task_bench_trains_ranks(tokenizer, tmp_path):
    rows = [{"text": "ab" * (1 + i % 3) if i % 2 else "xy" * (1 + i % 4), "label": i % 2} for i in range(60)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({**r, "text": r["text"] + str(i)}) for i, r in enumerate(rows)))
    from layerbudget.data.tasks import load_task
    from layerbudget.finetuning.protocol import Protocol

    task = load_task(str(tmp_path / "t.jsonl"))
    bench = benches.TaskBench(
        load=lambda seed: zoo.speaker("llama"), tokenizer=tokenizer, task=task, samples=8,
        protocol=Protocol(epochs=1, batch=16, cutoff=60),
    )  # fmt: skip
    found = compare_scores(bench, ["gradient"], ["mdl"], [4], kind="ranks", controls=False)
    names = {r["name"] for r in found.budgets[0]["rows"]}
    assert names == {"uniform", "mdl(gradient)"} and found.unit == "mistakes per question"
    assert all(0 <= r["mean"] <= 1 for r in found.budgets[0]["rows"])


def test_fields_of_benches_are_looked_at_when_they_are_made(bench, tokenizer, tmp_path):
    """A KeyError, and errors of torch, came from inside the comparison."""
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": "ab" * (1 + i), "label": i % 2}) for i in range(60)))
    fields = {"load": lambda seed: zoo.speaker("llama"), "tokenizer": tokenizer, "task": str(path)}
    made = benches.TaskBench(**fields)
    assert made.split in made.task.evaluation and len(made.task.labels) == 2
    assert lb.partition(benches.TaskBench(**{**fields, "load": "demo"}).model) == lb.partition(lb.load_model("demo"))
    for wrong, match in (
        ({"split": "zzz"}, "no split 'zzz'. It has .*Name one"),
        ({"load": 3}, "load is of type int.*'demo'"),
        ({"task": 3}, "task is of type int.*load_task"),
        ({"samples": "8"}, "samples is '8'"),
    ):
        with pytest.raises(InvalidInput, match=match):
            benches.TaskBench(**{**fields, **wrong})
    for wrong, match in (
        ({"windows": bench.windows.input_ids}, "windows is of type Tensor.*a calibration set"),
        ({"model": "demo"}, "model is 'demo'.*a loaded model"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(InvalidInput, match=match):
            dataclasses.replace(bench, **wrong)


def test_the_command_leaves_its_files(folder, capsys):
    own = folder / "own.csv"
    own.write_text("name,score\n" + "".join(f"model.layers.{i},{3 - i}\n" for i in range(9)))
    model = lb.load_model(str(folder / "model"))
    names = [b.name for b in lb.partition(model)]
    own.write_text("name,score\n" + "".join(f"{n},{i + 1}\n" for i, n in enumerate(names)))
    text, out = str(folder / "text.txt"), folder / "out"
    words = ["compare", str(folder / "model"), "--data", text, "--scores", f"gain,{own}",
             "--rules", "mdl,owl", "--sparsity", "0.4", "--samples", "4", "--length", "16", "--windows", "6", "--out", str(out),
             "--quiet"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {r["name"] for r in record["budgets"][0]["rows"]} >= {"mdl(own)", "owl(gain)", "uniform"}
    assert (out / "comparison.csv").read_text().startswith("budget,place,name")
    written = {p: p.stat().st_mtime_ns for p in out.rglob("*.*")}
    assert main(words) == 0  # there already: printed again
    said = capsys.readouterr().out
    assert "nothing was measured" in said and "Better than the same rule on permuted scores" in said and "\u2026" not in said
    assert [f"{r['mean']:.4f}" in said for r in record["budgets"][0]["rows"]].count(False) == 0
    own.write_text("name,score\n" + "".join(f"{n},{9 - i}\n" for i, n in enumerate(names)))
    for other in (["--sparsity", "0.3"], ["--seeds", "1"], []):  # the last with other numbers in its file
        assert main([*words, *other]) == 2 and "another comparison" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.*")} == written
    assert main([*words[:-1], "--overwrite", "--quiet", "--no-controls"]) == 0
    said = capsys.readouterr().out
    assert "permuted scores" not in said and f"Written: {out / 'comparison.csv'} and " in said
    for extra in (["--task", "cola"], ["--width", "0.1", "--overwrite", "--rules", "mdl"]):
        assert main([*words, *extra]) == 2


@pytest.mark.parametrize(
    "more", [["--scores", "own.csv"], ["--rules", "directional"], ["--sparsity", "1.5"], ["--scores", "no.csv"]]
)
def test_what_is_refused_leaves_no_folder(folder, capsys, more):
    (folder / "own.csv").write_text("name,score\nghost,1\n")
    words = ["compare", str(folder / "model"), "--data", str(folder / "text.txt"), "--scores", "gain", "--sparsity", "0.4",
             "--samples", "4", "--length", "16", "--windows", "6", "--out", str(folder / "deep" / "out")]  # fmt: skip
    more = [str(folder / w) if w.endswith(".csv") else w for w in more]
    assert main([*words, *more]) == 2 and not (folder / "deep" / "out").exists()
    said = capsys.readouterr().err
    assert "about" not in said  # the cost of work that will not begin
    assert more[1] != "directional" or "plan sparsity MODEL -o plan.json" in said


@pytest.mark.parametrize(
    ("data", "judge", "told"),
    [
        ("text.txt", None, True),
        ("text.txt", "copy/text.txt", True),
        ("text.txt,more.txt", "more.txt", True),
        ("text.txt", "other/text.txt", False),  # of that name alone
        ("parts", None, False),  # a folder with a part for evaluation
    ],
)
def test_a_text_that_decides_and_measures_is_named_before_the_work(folder, capsys, monkeypatch, data, judge, told):
    monkeypatch.chdir(folder)
    words = (folder / "text.txt").read_text()
    texts = {"copy/text": words, "more": words[40:], "other/text": words[80:], "parts/train": words, "parts/test": words[60:]}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_text(text)
    say_once.cache_clear()
    more = ["--evaluate", judge] if judge else []
    command = [
        "compare",
        "model",
        "--scores",
        "gain",
        "--sparsity",
        "0.4",
        "--samples",
        "2",
        "--length",
        "16",
        "--windows",
        "2",
    ]
    assert main([*command, "-o", "out", "--dry-run", "--data", data, *more]) == 0
    sentence = f"{judge or data} decided every plan here, which flatters it: judge it on other text."
    assert [sentence] * told == [line for line in capsys.readouterr().err.splitlines() if "flatters" in line]


def test_rows_have_the_names_of_their_scores(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    a, b = str(tmp_path / "a" / "m.csv"), str(tmp_path / "b" / "m.csv")
    assert by_name(["gain", "my.py:kurt", "other.py:skew"]) == {
        "gain": "fisher-gram", "kurt": "my.py:kurt", "skew": "other.py:skew"
    }  # fmt: skip
    assert by_name([a, b, a]) == {"a/m": a, "b/m": b}  # the same file twice is one score
    assert by_name(["m.csv", "m.json", "v1.2.csv"]) == {"m.csv": "m.csv", "m.json": "m.json", "v1.2": "v1.2.csv"}
    assert set(by_name(["my.py:kurt", "kurt.csv"]).values()) == {"my.py:kurt", "kurt.csv"}
    for same in (["my.py:kurt", "its.py:kurt"], ["my.py:owl", "owl"]):
        with pytest.raises(InvalidInput, match="have the same name"):
            by_name(same)


def test_a_plan_is_compared_as_it_is(bench, tmp_path):
    plan = lb.plan_sparsity(bench.blocks, sparsity=0.4, rule=deeper)
    plan.save(tmp_path / "mine.json")
    found = compare_scores(bench, [str(tmp_path / "mine.json")], ["mdl"], [0.4, 0.3], controls=False)
    first, second = found.budgets
    assert {r["name"] for r in first["rows"]} == {"uniform", "mine"} and first["equal_budget"] and not first["impossible"]
    row = next(r for r in first["rows"] if r["name"] == "mine")
    assert row["mean"] == pytest.approx(np.average(bench.measure(plan, 0)["values"], weights=bench.weights))
    assert {r["name"] for r in second["rows"]} == {"uniform"} and "uniform spends" in second["impossible"]["mine"]
    with pytest.raises(InvalidInput, match="mine fits no budget"):
        compare_scores(bench, [str(tmp_path / "mine.json")], ["mdl"], [0.3])
    dataclasses.replace(plan, hyperparameters={"method": "sparsegpt"}).save(tmp_path / "other.json")
    with pytest.raises(InvalidInput, match="--method sparsegpt"):
        compare_scores(bench, [str(tmp_path / "other.json")], ["mdl"], [0.4])
    ranks = lb.plan_ranks(bench.blocks, mean_rank=4, rule="uniform")
    ranks.save(tmp_path / "ranks.json")
    with pytest.raises(InvalidInput, match="plan of ranks"):
        compare_scores(bench, [str(tmp_path / "ranks.json")], ["mdl"], [0.4])


def test_a_method_under_another_rule_is_called_so(bench):
    own = {"owl": {b.name: float(i + 1) for i, b in enumerate(bench.blocks)}}
    for rules, said in ((["mdl"], True), (["mdl", "owl"], False)):
        sentences = " ".join(compare_scores(bench, own, rules, [0.4], controls=False).sentences)
        assert ("OWL itself needs --rules mdl,owl." in sentences) == said
        assert "permuted" not in sentences  # no control was run


def test_csv_quotes_names(bench):
    found = compare_scores(bench, {"a_b": {b.name: 1.0 + i for i, b in enumerate(bench.blocks)}}, ["mdl"], [0.4])
    assert '"mdl(a_b, permuted)"' in run.to_csv(found)


GRID = ["compare", "demo", "--scores", "owl", "--sparsity", "0.4", "--samples", "2", "--length", "32", "--windows", "2"]


@pytest.mark.slow
def test_parts_fill_one_folder(tmp_path, capsys):
    out = tmp_path / "grid"
    for _ in range(2):  # scores first, then what is planned from them
        for part in ("1/2", "2/2"):
            assert main([*GRID, "--no-controls", "--part", part, "-o", str(out)]) == 0
    capsys.readouterr()
    assert main([*GRID, "--no-controls", "-o", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    alone = tmp_path / "alone"
    assert main([*GRID, "--no-controls", "-o", str(alone), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budgets"] == record["budgets"]
    assert "3 measurements were there from an earlier run" in record["sentences"][-1]


def test_the_command_that_ends_a_comparison_of_parts_is_without_one(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "made_by", lambda: "layerbudget compare demo --part 2/2 --out grid")
    given = {"mine": {b.name: 1.0 + i for i, b in enumerate(bench.blocks)}}
    assert not compare_scores(bench, given, ["mdl"], [0.4], folder=tmp_path, part=(2, 2)).complete
    assert standing_of(tmp_path / "cells").command == "layerbudget compare demo --out grid"


def test_windows_of_unequal_lengths_count_by_their_tokens(bench):
    """A plan that helps short rows only is not ahead."""
    ids, labels = bench.windows.input_ids, bench.windows.input_ids.clone()
    labels[::2, : ids.shape[1] - 2] = -100
    rows = dataclasses.replace(bench, windows=CalibrationSet(input_ids=ids, labels=labels))
    weights = rows.weights
    assert set(weights.tolist()) == {2, 31} and bench.weights.tolist() == [31] * 20
    found = lb.perplexity(bench.model, rows.windows)
    assert found.counts == tuple(weights)
    a = np.where(weights == 2, -0.4, 0.1) + np.zeros((3, 1))
    a += 0.01 * np.random.default_rng(0).normal(size=a.shape)
    zero = np.zeros_like(a)
    test = statistics.difference(a, zero, weights)
    assert test["difference"] == pytest.approx((a.mean(0) @ weights) / weights.sum()) and test["low"] > 0 > a.mean()
    assert [r["name"] for r in statistics.ranking({"a": a, "zero": zero}, weights)] == ["zero", "a"]
    uniform = compare_scores(rows, ["block-influence"], ["mdl"], [0.4], controls=False).budgets[0]["rows"]
    plan = lb.plan_sparsity(bench.blocks, sparsity=0.4, rule="uniform")
    mean = np.average(rows.measure(plan, 0)["values"], weights=weights)
    assert next(r["mean"] for r in uniform if r["name"] == "uniform") == pytest.approx(mean)


def test_intervals_are_corrected_as_their_p_values_are():
    x, times = np.linspace(-1, 1, 30), 5
    test = statistics.difference((x / x.std(ddof=1) + 2.3 / 30**0.5)[None], np.zeros((1, 30)))
    assert test["p"] < 0.05 < times * test["p"] and test["low"] > 0
    wide = statistics.corrected(test, times * test["p"], times)
    assert wide["low"] < 0 < wide["high"] and wide["p"] == test["p"] and wide["holm"] == times * test["p"]
    assert statistics.corrected(test, test["p"], times)["low"] == pytest.approx(test["low"])
    for holm in (0.049, 0.051):
        assert (statistics.corrected(test, holm, times)["low"] > 0) == (holm < 0.05)


def test_plans_by_every_further_rank_are_compared_with_their_own_control():
    blocks = [Block(name=f"l.{i}", modules=(Module(name=f"l.{i}", d_in=64, d_out=64),)) for i in range(6)]
    rows = [[(6.0 - i) / (r + 1) for r in range(16)] for i in range(6)]
    extra = {"increments": [rows], "increments_floor": [[[0.01] * 16] * 6]}
    scores = Scores.from_values(blocks, [sum(r) for r in rows], estimator="rank-gain", extra=extra)
    made = grid.make_grid("ranks", {"g": scores}, ["by-rank", "mdl"], 4, seed=3)
    found = {e.name: e.plan for e in made.entries}
    assert not made.impossible and not made.ignoring
    for name, rule, options in (("by-rank(g)", "by-rank", {}), ("by-rank(g, permuted)", "by-rank-permuted", {"seed": 3})):
        assert found[name].counts.tolist() == lb.plan_ranks(scores, mean_rank=4, rule=rule, **options).counts.tolist()
    assert found["by-rank(g)"].counts.tolist() != found["by-rank(g, permuted)"].counts.tolist()
    flat = dataclasses.replace(scores, extra={"increments": [[rows[0]] * 6]})
    assert grid.make_grid("ranks", {"g": flat}, ["by-rank"], 4).ignoring == ("by-rank",)
