"""The prune command, end to end on a saved model."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.sparsity.receipt import recount
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model
from layerbudget.plan import Plan
from layerbudget.records import Block, Module
from layerbudget.scores import Scores

BLOCKS = [Block(name=n, modules=(Module(name=n, d_in=16, d_out=8),)) for n in ("a", "b", "c")]


@pytest.fixture
def saved(folder):
    zoo.plan(load_model(str(folder / "model"))).save(folder / "plan.json")
    return folder


def run(saved, *more):
    text = () if "magnitude" in more else ("--data", str(saved / "text.txt"), "--samples", "4", "--length", "16")
    return main(
        ["apply", str(saved / "model"), str(saved / "plan.json"), *text, "-o", str(saved / "out"), "--quiet", "--json", *more]
    )


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_json_is_the_recount(saved, capsys, method):
    assert run(saved, "--method", method) == 0
    result = json.loads(capsys.readouterr().out)
    plan = json.loads((saved / "plan.json").read_text())
    assert result["blocks"] == {b["name"]: b["count"] / b["numel"] for b in plan["blocks"]}
    pruned = load_model(result["output"])
    zeros = sum(b["count"] for b in plan["blocks"])
    from layerbudget.models.blocks import partition

    assert recount(pruned, partition(pruned))["zeros"] == zeros
    assert result["sparsity"] == zeros / sum(b["numel"] for b in plan["blocks"])
    assert json.loads((saved / "out" / "receipt.json").read_text())["method"] == method


def test_a_plan_from_scores_is_applied_on_the_text_of_the_scores(saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    small = ["--samples", "4", "--length", "16"]
    assert main(["score", "model", "--estimator", "gradient-norm", "--data", "text.txt", *small, "-o", "s.json"]) == 0
    assert main(["plan", "sparsity", "s.json", "--sparsity", "0.5", "-o", "p.json"]) == 0
    assert main(["apply", "model", "p.json", "-o", "out", *small]) == 0
    assert json.loads((saved / "out" / "receipt.json").read_text())["data"]["source"] == "text.txt"
    assert "Nothing names a text" not in capsys.readouterr().err


def test_a_plan_is_applied_on_the_text_that_it_was_made_on(saved, capsys):
    """Sparsity reads as much of it as always, shapes as much as their refit was measured on; a text that is gone is said."""
    text, model = saved / "text.txt", str(saved / "model")
    small = ["--samples", "4", "--length", "16"]
    made = dataclasses.replace(Plan.load(saved / "plan.json"), made_by=f"layerbudget plan sparsity {model} --data {text}")
    made.save(saved / "plan.json", overwrite=True)
    asked = ["apply", model, str(saved / "plan.json"), "-o", str(saved / "out")]
    assert main([*asked, *small]) == 0
    assert json.loads((saved / "out" / "receipt.json").read_text())["data"]["source"] == str(text)
    assert f"evaluate {saved / 'out'} --against {model} --perplexity TEXT" in " ".join(capsys.readouterr().out.split())
    dataclasses.replace(made, made_by="layerbudget plan sparsity m --data gone.txt").save(saved / "plan.json", overwrite=True)
    assert main([*asked, "--overwrite", "--dry-run", *small]) == 0
    assert "made on gone.txt, which is not here: stdlib is read" in " ".join(capsys.readouterr().err.split())
    (saved / "more.jsonl").write_text(json.dumps({"text": text.read_text()}) + "\n")
    both = f"{text},{saved / 'more.jsonl'}"  # it was taken for one file, which is not there
    for data, said in ((both, f"of {both}"), (f"{both},gone.txt", "of which gone.txt cannot be read here: stdlib is read")):
        other = dataclasses.replace(made, made_by=f"layerbudget plan sparsity m --data {data}")
        other.save(saved / "plan.json", overwrite=True)
        assert main([*asked, "--overwrite", "--dry-run", *small]) == 0
        shown = capsys.readouterr()
        assert said in " ".join((shown.out + shown.err).split())
    words = ["plan", "shapes", model, "--save", "10% flops", "--even", "--passes", "40", "--data", str(text), *small]
    assert main([*words, "-o", str(saved / "shapes.json"), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["apply", model, str(saved / "shapes.json"), "-o", str(saved / "smaller"), "--dry-run"]) == 0
    assert f"on 4 samples of 16 tokens of {text}" in " ".join(capsys.readouterr().out.split())


def test_checkpoints_outlive_a_save_that_fails(saved, capsys, monkeypatch):
    import layerbudget.decisions.sparsity.save as saving

    kept = saved / "kept"

    def refuse(*_, **__):
        raise OSError(28, "No space left on device", str(saved / "out"))

    monkeypatch.setattr(saving, "save_pruned", refuse)
    assert run(saved, "--resume", str(kept)) == 2
    assert "No space left" in capsys.readouterr().err and list(kept.glob("block-*.safetensors"))
    monkeypatch.undo()
    assert run(saved, "--resume", str(kept)) == 0
    assert not kept.exists()


def test_a_plan_of_another_kind_is_refused_before_anything_is_said_or_loaded(saved, capsys, monkeypatch):
    import layerbudget.models.loading as loading

    scores = Scores.from_values(BLOCKS, {b.name: 1.0 + i for i, b in enumerate(BLOCKS)})
    scores.save(saved / "scores.json")
    plan_ranks(scores, mean_rank=4).save(saved / "ranks.json")
    damages = dataclasses.replace(scores, estimator="rounding", extra={"formats": {}})
    damages.save(saved / "sizes.json")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    for file, wanted in (
        ("ranks.json", "kind ranks does not change.*finetune, or make another: layerbudget plan sparsity"),
        ("scores.json", "not a plan file: it holds scores.*layerbudget plan sparsity FILE"),
        ("sizes.json", "not a plan file: it holds scores.*layerbudget plan bits FILE"),
    ):
        assert main(["apply", str(saved / "model"), str(saved / file), "-o", str(saved / "none")]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(wanted, said) and "samples" not in said and "zeros" not in said
    assert main(["plan", "sparsity", str(saved / "sizes.json"), "--sparsity", "0.5"]) == 2
    assert "damages of formats: they do not plan sparsity" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "sparsity", str(saved / "ranks.json"), "--sparsity", "0.5"]) == 2
    assert "not a scores file: it is a plan" in " ".join(capsys.readouterr().err.split())


def test_a_users_mistakes_end_with_a_sentence(saved, capsys):
    (saved / "out").mkdir()
    (saved / "out" / "thesis.txt").write_text("precious")
    assert run(saved) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(saved, "--overwrite") == 2
    assert (saved / "out" / "thesis.txt").read_text() == "precious"
    (saved / "out" / "thesis.txt").unlink()
    capsys.readouterr()
    assert run(saved, "--pattern", "9:4") == 2
    assert "not a pattern" in capsys.readouterr().err
    assert not list((saved / "out").iterdir())


def test_a_plan_knows_its_pruner(saved_model, tmp_path, capsys):
    """prune and export take the method and the options that were measured; another method is taken, and it is said."""
    folder, small = saved_model("llama"), ("--samples", "2", "--length", "12", "--quiet")
    plan, curves = tmp_path / "p.json", tmp_path / "c.json"
    measured = ["plan", "sparsity", str(folder), "--sparsity", "0.5", "--method", "sparsegpt"]
    assert main([*measured, "--damping", "0.2", "--passes", "6", *small, "-o", str(plan)]) == 0
    names = [b.name for b in partition(zoo.build("llama"))]
    table = {n: [[0.0, 0.4, 0.8], [0.0, 0.1 * i, 0.5 * i]] for i, n in enumerate(names, 1)}
    curves.write_text(json.dumps({"method": "sparsegpt", "curves": table}))
    assert main(["score", str(folder), *small, "-o", str(tmp_path / "s.json")]) == 0
    planned = ["plan", "sparsity", str(tmp_path / "s.json"), "--sparsity", "0.4", "-o"]
    assert main([*planned, str(tmp_path / "d"), "--curves", str(curves)]) == 0 and main([*planned, str(tmp_path / "e")]) == 0
    assert [Plan.load(tmp_path / n).pruner for n in "de"] == [("sparsegpt", {}), (None, {})]
    said = {}
    for name, more in (("own", ()), ("other", ("--method", "wanda")), ("weaker", ("--damping", "0.3"))):
        capsys.readouterr()
        assert main(["apply", str(folder), str(plan), *more, *small, "-o", str(tmp_path / name)]) == 0
        said[name] = " ".join(capsys.readouterr().out.split())
        assert (
            main(
                [
                    "export",
                    str(plan),
                    *(("--method", "wanda") if name == "other" else ()),
                    "-o",
                    str(tmp_path / f"{name}.yaml"),
                ]
            )
            == 0
        )
    receipts = {name: json.loads((tmp_path / name / "receipt.json").read_text()) for name in said}
    assert [receipts[n]["method"] for n in said] == ["sparsegpt", "wanda", "sparsegpt"]
    assert [receipts[n]["settings"].get("damping") for n in ("own", "weaker")] == [0.2, 0.3]
    sentence = "The plan was measured with sparsegpt and is applied by wanda"
    assert said["other"].count(sentence) == 1 and sentence in receipts["other"]["notes"][-1]
    assert sentence not in said["own"] + said["weaker"]
    recipes = {name: (tmp_path / f"{name}.yaml").read_text() for name in said}
    capsys.readouterr()
    assert main(["apply", str(folder), str(plan), "--pattern", "n:4", *small, "-o", str(tmp_path / "bound")]) == 0
    bound = "The plan was measured without the pattern n:4"
    assert " ".join(capsys.readouterr().out.split()).count(bound) == 1 and bound not in said["own"]
    assert json.loads((tmp_path / "bound" / "receipt.json").read_text())["notes"][-1].startswith(bound)
    assert "SparseGPTModifier" in recipes["own"] and "WandaPruningModifier" in recipes["other"]
    assert sentence in recipes["other"] and sentence not in recipes["own"]
