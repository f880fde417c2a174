"""The command line end to end, in a fresh process, on folders holding tiny models of several architectures."""

import json
import subprocess
import sys

import pytest
import torch
from tests import zoo

from layerbudget.cli import main


def run(*argv, cwd=None, code=0):
    command = [sys.executable, "-m", "layerbudget", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == code, done.stderr + done.stdout
    return done


def sentence(*argv, cwd=None):
    """Run a mistake; return its one sentence."""
    done = run(*argv, cwd=cwd, code=2)
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


SMALL = ("--samples", "6", "--length", "24", "--quiet")


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gemma", "qwen2", "opt"))]
)
def test_score_plan_prune_evaluate_on_other_architectures(saved_model, tmp_path, kind):
    folder = saved_model(kind)
    scores = json.loads(run("score", folder, *SMALL, "--json", "-o", tmp_path / "s.json").stdout)
    assert scores["estimator"] == "fisher-gram" and len(scores["blocks"]) == 3
    plan = json.loads(
        run("plan", "sparsity", tmp_path / "s.json", "--sparsity", "0.5", "--json", "-o", tmp_path / "p.json").stdout
    )
    assert plan["kind"] == "sparsity" and plan["certificate"]["status"]
    pruned = json.loads(
        run("apply", folder, tmp_path / "p.json", "--method", "wanda", *SMALL, "--json", "-o", tmp_path / "out").stdout
    )
    total = sum(b["numel"] for b in plan["blocks"])
    assert pruned["sparsity"] == pytest.approx(sum(b["count"] for b in plan["blocks"]) / total, abs=1e-12)
    for block in plan["blocks"]:
        assert pruned["blocks"][block["name"]] == pytest.approx(block["count"] / block["numel"], abs=1e-12)
    found = json.loads(run("evaluate", tmp_path / "out", "--length", "16", "--windows", "4", "--quiet", "--json").stdout)
    assert found["perplexity"]["stdlib"]["tokens"] == 60


def test_scores_and_plans_are_byte_identical_twice(saved_model, tmp_path):
    folder = saved_model("llama")
    first, second = tmp_path / "1", tmp_path / "2"
    for work in (first, second):
        work.mkdir()
        run("score", folder, *SMALL, "-o", "s.json", cwd=work)
        run("plan", "sparsity", "s.json", "--sparsity", "0.5", "-o", "p.json", cwd=work)
    for name in ("s.json", "p.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_encoder_is_scored(saved_model, tmp_path):
    scores = json.loads(run("score", saved_model("bert"), *SMALL, "--json", "-o", tmp_path / "s.json").stdout)
    assert [b["name"] for b in scores["blocks"]] == [f"bert.encoder.layer.{i}" for i in range(3)]


def test_mistakes_are_one_sentence_and_leave_nothing(saved_model, tmp_path):
    folder = saved_model("llama")
    work = tmp_path / "work"
    work.mkdir()
    assert "There is no model folder" in sentence("score", "./nowhere", cwd=work)
    (tmp_path / "empty.txt").write_text("")
    assert "holds no text" in sentence("score", folder, "--data", tmp_path / "empty.txt", cwd=work)
    assert "tokens, one sample needs 10000000" in sentence("score", folder, "--length", "10000000", cwd=work)
    assert "no estimator" in sentence("score", folder, *SMALL, "--estimator", "magic", cwd=work).lower()
    run("score", folder, *SMALL, "-o", tmp_path / "s.json")
    text = sentence("plan", "sparsity", tmp_path / "s.json", "--sparsity", "1.2", cwd=work)
    assert "1.2" in text and "[0, 1]" in text
    run("plan", "sparsity", tmp_path / "s.json", "--sparsity", "0.5", "-o", tmp_path / "p.json")
    other = saved_model("gemma")
    assert "was made for" in sentence("apply", other, tmp_path / "p.json", *SMALL, "-o", work / "out", cwd=work)
    assert "not a plan file" in sentence("apply", folder, tmp_path / "s.json", *SMALL, "-o", work / "out", cwd=work)
    assert "exists already" in sentence("score", folder, *SMALL, "-o", tmp_path / "s.json", cwd=work)
    assert list(work.iterdir()) == []


def test_nan_weights_are_refused_by_name(tmp_path, tokenizer):
    model = zoo.speaker("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    tokenizer.save_pretrained(tmp_path / "nan")
    text = sentence("score", tmp_path / "nan", *SMALL, cwd=tmp_path)
    assert "model.layers.1.mlp.up_proj.weight holds 1 values that are not finite" in text
    assert not (tmp_path / "scores.json").exists()


def test_json_keeps_stdout_to_one_document(saved_model, tmp_path):
    done = run("evaluate", saved_model("llama"), "--length", "16", "--windows", "3", "--json")
    assert json.loads(done.stdout)["perplexity"]["stdlib"]["windows"] == 3
    assert "perplexity on stdlib" in done.stderr


def test_a_long_path_is_printed_whole_and_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = tmp_path / "a folder [bold] with a name" / "that is longer than the terminal is wide" / "page.html"
    path.parent.mkdir(parents=True)
    zoo.scores([3.0, 1.0]).save(tmp_path / "scores.json")
    assert main(["report", str(tmp_path), "-o", str(path)]) == 0
    assert f"written to {path}" in capsys.readouterr().out.splitlines()


def test_ranks_by_the_gain_of_every_further_rank(saved_model, tmp_path, capsys):
    model, scores, plan = saved_model("llama"), str(tmp_path / "s.json"), str(tmp_path / "p.json")
    words = ["score", str(model), "--estimator", "rank-gain", "--by", "linear", "--exclude", "lm_head", *SMALL, "-o", scores]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["plan", "ranks", scores, "--mean-rank", "4", "-o", plan]) == 0
    assert "Verdict: uniform" in " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["rule"] == "by-rank" and written["extra"]["rounding"]["price"] > 0
    assert len({b["count"] for b in written["blocks"]}) > 1
    capsys.readouterr()
    assert main(["explain", "sweep", scores, "--kind", "ranks", "--budgets", "2", "4", "--rule", "by-rank", "--json"]) == 0
    swept = json.loads(capsys.readouterr().out)["rows"]
    assert swept[1]["value"] == pytest.approx(written["extra"]["rounding"]["value"])
    assert swept[1]["value"] > swept[0]["value"] and {row["status"] for row in swept} == {"binding"}
    assert main(["score", str(model), "--by", "linear", *SMALL, "-o", scores, "--overwrite"]) == 0
    assert main(["plan", "ranks", scores, "--mean-rank", "4", "--rule", "by-rank"]) == 2
    assert "--estimator rank-gain --by linear" in capsys.readouterr().err


def answer(capsys, *argv, code=0):
    """What a command prints with ``--json``, or its one sentence, without a process of its own."""
    assert main([str(a) for a in argv]) == code
    out, err = capsys.readouterr()
    return " ".join(err.split()) if code else json.loads(out)


def test_measure_steps_down_and_says_what_it_spent(saved_model, tmp_path, capsys):
    folder = saved_model("llama")
    options = ("plan", "sparsity", folder, *SMALL, "--sparsity", "0.6", "--json")
    plan = answer(capsys, *options, "--passes", "12", "-o", tmp_path / "p.json", "--resume", tmp_path / "kept")
    assert plan["rule"] == "directional" and plan["forward_passes"] <= 14
    path = plan["extra"]["path"]
    assert plan["predicted"] < path[0]["divergence"] and plan["measured"] < path[0]["divergence"]
    assert not (tmp_path / "kept").exists() and {len(b["modules"]) for b in plan["blocks"]} == {1}
    plan = answer(capsys, *options, "--by", "rows:2", "-o", tmp_path / "s.json")
    assert (tmp_path / "s.rows.safetensors").exists() and plan["extra"]["rows"]["size"] == 2
    done = answer(capsys, "apply", folder, tmp_path / "s.json", *SMALL, "--json", "-o", tmp_path / "out")
    assert abs(done["sparsity"] - 0.6) < 1e-3
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["rows"]["exact"] == receipt["rows"]["groups"] and (tmp_path / "out" / "plan.rows.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--passes", "2"), "needs 6"),
        (("--by", "rows:x"), "rows:G"),
    ],
)
def test_what_measure_would_ignore_is_refused(saved_model, tmp_path, capsys, options, says):
    assert says in answer(capsys, "plan", "sparsity", saved_model("llama"), *SMALL, *options, "-o", tmp_path / "p.json", code=2)


def test_outputs_that_cannot_be_written_are_refused_before_the_work(saved_model, tmp_path):
    folder = saved_model("llama")
    (tmp_path / "file").write_text("")
    (tmp_path / "old.json").write_text("{}")
    assert "cannot be written" in sentence("score", folder, *SMALL, "-o", tmp_path / "file" / "s.json")
    done = run("evaluate", folder, "--length", "16", "--windows", "2", "--quiet", "-o", tmp_path / "old.json", code=2)
    assert "perplexity" not in done.stdout and "exists already" in done.stderr


def test_a_file_that_the_system_refuses_and_an_unknown_option_are_one_sentence(tmp_path, capsys):
    zoo.scores([1.0, 2.0, 3.0]).save(tmp_path / "s.json")
    (tmp_path / "file").write_text("")
    assert main(["plan", "sparsity", str(tmp_path / "s.json"), "-o", str(tmp_path / "file" / "p.json")]) == 2
    assert "choose another one" in " ".join(capsys.readouterr().err.split())
    words = ["score", "demo", "--samples", "2", "--length", "8", "--quiet", "--set", "drawz=2", "-o", str(tmp_path / "t.json")]
    assert main(words) == 2
    assert "has no option drawz" in " ".join(capsys.readouterr().err.split())
    assert main(["score", "demo", "--import", str(tmp_path / "s.json"), "--excess", "-o", str(tmp_path / "t.json")]) == 2
    assert "--excess has no meaning" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["plan", "sparsity", "s.json", "--sparcity", ".5"], "--sparsity"),
        (["plan", "bits", "demo", "--bit-s=4"], "--bits"),
        (["apply", "demo", "p.json", "--metod", "wanda", "-o", "out"], "--method"),
        (["score", "demo", "--zzz"], None),
    ],
)
def test_a_misspelt_option_is_answered_with_the_right_one(words, meant, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and (f"Did you mean {meant}?" in said if meant else "Did you mean" not in said)
