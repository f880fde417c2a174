"""The commands of the decision core, run as the command line runs them."""

import json
import shlex

import numpy as np
import pytest
from tests import zoo
from tests.cli.helpers import command_result as run
from tests.cli.helpers import parsed

from layerbudget.errors import CorruptFile, InvalidInput, ModelMismatch, NotFound
from layerbudget.plan import Plan


@pytest.fixture
def files(rng, tmp_path):
    for name in ("a", "b"):
        zoo.scores(rng.random(8) + 0.1, [64] * 8).save(tmp_path / f"{name}.json")
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_sparsity_writes_the_plan_that_it_prints(files):
    result, shown = run("plan", "sparsity", files / "a.json", "--sparsity", 0.5, "-o", files / "plan.json")
    plan = Plan.load(files / "plan.json")
    assert result["kind"] == "sparsity" and sum(b["count"] for b in result["blocks"]) == plan.counts.sum() == 8 * 64 * 64 // 2
    assert set(result["budget"]) >= {"unit", "limit", "spent"}
    assert set(result["certificate"]) >= {"status", "multiplier", "gap", "kkt_residual", "inert"}
    assert "model.layers.7" in shown and "The budget binds" not in shown
    price = f"{plan.certificate['shadow_price']:.3g}"
    said = f"The budget binds: one more unit of it raises the penalty by {price} (the shadow price)."
    assert said in run("plan", "sparsity", files / "a.json", "--sparsity", 0.5, "--table")[1]


@pytest.mark.parametrize(
    "words",
    [
        ("lora-experts", "--total", 40), ("lora-experts", "--budget", "90% flops"),
        ("lora-experts", "--budget", "50k params", "--rule", "size"),
        ("lora-experts", "--total", 40, "--rule", "mola-2468"), ("ranks", "--mean-rank", 4), ("ranks", "--budget", "4k params"),
        ("ranks", "--budget", "16 KiB", "--multiple", "2", "--min-rank", "0"), ("joint", "--budget=-8KiB"),
        ("sparsity", "--rule", "owl", "--width", "0.05"),
        ("sparsity", "--fix", "model.layers.0=0.1", "--exclude", r"layers\.7$"),
    ],
)  # fmt: skip
def test_every_kind_stays_within_its_budget(files, words):
    result, shown = run("plan", words[0], files / "a.json", *words[1:])
    assert result["budget"]["spent"] <= result["budget"]["limit"] * (1 + 1e-12) or result["budget"]["limit"] < 0
    if result["budget"]["limit"] < 0:
        assert result["budget"]["spent"] <= result["budget"]["limit"]
    assert shown


def test_a_plan_with_the_same_for_all_blocks_has_one_row(files):
    words = ("plan", "ranks", files / "a.json", "--mean-rank", 4, "--rule", "uniform")
    short, whole = run(*words)[1], run(*words, "--table")[1]
    assert "each of 8" in short and "model.layers.0" not in short
    assert "each of" not in whole and "model.layers.0" in whole


def test_parameters_of_adapters_are_named_apart_from_those_of_the_layer(files):
    plan, shown = run("plan", "ranks", files / "a.json", "--mean-rank", 4, "--table")
    assert "│ adapter parameters │" in shown.replace("┃", "│") and f"{plan['budget']['spent']:,.0f} adapter parameters" in shown
    first = next(line for line in shown.splitlines() if "model.layers.0" in line)
    assert first.split("│")[3].strip() == f"{plan['blocks'][0]['count'] * (64 + 64):,}"


def test_rules_without_scores_need_only_a_configuration(files):
    result, _ = run("plan", "ranks", files / "config.json", "--mean-rank", 8, "--rule", "uniform")
    assert {b["count"] for b in result["blocks"]} == {8}
    with pytest.raises(InvalidInput, match="needs scores"):
        run("plan", "ranks", files / "config.json", "--mean-rank", 8)


def test_curves_replace_scores(files):
    curves = {f"model.layers.{i}": [[0.3, 0.6], [0.1 * (i + 1), 0.5 * (i + 1)]] for i in range(8)}
    (files / "curves.json").write_text(json.dumps({"curves": curves}))
    result, _ = run("plan", "sparsity", files / "a.json", "--sparsity", 0.4, "--curves", files / "curves.json")
    values = [b["value"] for b in result["blocks"]]
    assert values == sorted(values, reverse=True) and values[0] == pytest.approx(0.6)
    (files / "curves.json").write_text("[1]")
    with pytest.raises(CorruptFile):
        run("plan", "sparsity", files / "a.json", "--curves", files / "curves.json")


def test_diff_explain_sweep_transfer(files):
    for name, rule in (("one", "mdl"), ("two", "uniform")):
        run("plan", "sparsity", files / "a.json", "--rule", rule, "-o", files / f"{name}.json")
    result, _ = run("explain", "diff", files / "one.json", files / "two.json")
    assert not result["same"] and result["moved"] > 0
    same, _ = run("explain", "diff", files / "one.json", files / "one.json")
    assert same["same"] and same["moved"] == 0
    result, shown = run("explain", files / "one.json")
    assert "With one percent more zeros" in shown and not any(
        "cannot change this plan" in s for s in result["sentences"]
    )  # nothing was given
    result, _ = run("explain", "sweep", files / "a.json", "--budgets", 0.3, 0.5, "--exponents", 1, 2)
    front = [r for r in result["rows"] if r["front"]]
    assert len(result["rows"]) == 4 and {r["exponent"] for r in front} == {1.0}
    result, shown = run("explain", "sweep", files / "a.json", "--kind", "lora-experts", "--budgets", 16, 40)
    few, many = (r["value"] for r in result["rows"])
    worth = "the utility (mean of log(1 + experts), weighted by the scores)"
    told = f"Verdict: at 40 experts in all {worth} is {many:.3g}, at 16 experts in all {few:.3g}, {few / many:.0%} of it."
    assert " ".join(shown.split()).endswith(told)
    assert [r["spent"] for r in result["rows"]] == [16, 40]
    for program, own in (("sparsity", ()), ("lora-experts", ("--budget", "40 experts"))):
        result, _ = run("explain", "transfer", files / "a.json", files / "b.json", "--program", program, *own)
        assert 0 < result["regret"] <= result["sharp_bound"] <= result["bound"]
        assert result["squared_drift"] == pytest.approx(result["drift"] ** 2)  # the paper's table has the square
        nothing, _ = run("explain", "transfer", files / "a.json", files / "a.json", "--program", program, *own)
        assert nothing["regret"] == nothing["bound"] == 0.0


def test_mistakes(files):
    zoo.scores(np.ones(3)).save(files / "other.json")
    for words, kind in (
        (("explain", files / "nothing.json"), NotFound),
        (("plan", "sparsity", files / "a.json", "--fix", "x"), InvalidInput),
        (("plan", "sparsity", files / "a.json", "--fix", r"layers\.0=0.1", "--fix", r"layers\.0=0.2"), InvalidInput),
        (("plan", "lora-experts", files / "a.json", "--total", 40, "--fix", "layers.0=2.5"), InvalidInput),
        (("plan", "lora-experts", files / "a.json", "--budget", "1 ms", "--latency", files / "a.json"), CorruptFile),
        (("explain", "transfer", files / "a.json", files / "other.json"), ModelMismatch),
    ):
        with pytest.raises(kind):
            run(*words)


@pytest.mark.parametrize(("kind", "words"), [("sparsity", ["--sparsity", 0.5]), ("ranks", ["--mean-rank", 4])])
def test_a_plan_ends_with_the_command_that_follows(files, kind, words):
    _, shown = run("plan", kind, files / "a.json", *words, "-o", files / "a plan.json")
    said = shlex.split(shown.strip().splitlines()[-1])
    assert said[:2] == ["Next:", "layerbudget"] and str(files / "a plan.json") in said
    assert parsed(said[2:]).plan == str(files / "a plan.json")
    assert "-o plan.json keeps the plan" in run("plan", kind, files / "a.json", *words)[1]
