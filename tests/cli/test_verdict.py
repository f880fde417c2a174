"""Every plan ends with what it comes to in one sentence and the command that follows; long tables are shown where asked."""

import dataclasses
import json
import math
import re
import shlex
import types
from pathlib import Path

import numpy as np
import pytest
from tests import zoo
from tests.cli.helpers import command_result, parsed

from layerbudget.cli import display, main
from layerbudget.cli.session import Session
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.frozen import fields_in_file
from layerbudget.models.blocks import partition
from layerbudget.plan import Plan
from layerbudget.reporting import tables
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.verdict import expected, verdict
from layerbudget.scores import Scores
from layerbudget.sensitivity.noise import remedy

TEXT = ["--data", "text.txt", "--samples", "4", "--length", "16"]
FEW = [*TEXT, "--draws", "1"]
PLANS = {
    "sparsity": ["MODEL", "--sparsity", "0.5", "--passes", "6", *TEXT],
    "bits": ["MODEL", "--bits", "4.5", "--group", "16", "--check", "2", *FEW],
    "cache": ["MODEL", "--bits", "7", "--context", "32", "--group", "8", "--check", "2", *FEW],
    "memory": ["SMALL", "--memory", "1100 KiB", "--context", "32", "--check", "2", *FEW],
    "shapes": ["SMALL", "--save", "20%flops", "--even", "--passes", "32", *TEXT],
    "expert-pruning": ["MIXTURE", "--keep", "0.5", *TEXT, "--draws", "1"],
    "ranks": ["scores.json", "--mean-rank", "2"],
    "lora-experts": ["scores.json", "--total", "200"],
    "joint": ["scores.json", "--budget=-8KiB"],
}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # heads of 32 channels, for caches of llama.cpp
SIX = ("sparsity", "bits", "cache", "shapes", "expert-pruning", "ranks")


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """A model of 12 layers and 84 matrices, one with experts, scores with the gain of every further rank, and a text."""
    folder, rng = tmp_path_factory.mktemp("verdict"), np.random.default_rng(0)
    deep = zoo.speaker("llama", num_hidden_layers=12)
    for name, model in (("MODEL", deep), ("SMALL", zoo.speaker("llama", **WIDE)), ("MIXTURE", zoo.speaker("qwen3-moe"))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    blocks = partition(deep, "linear")
    rows = np.sort(rng.gamma(1.0, size=(len(blocks), 8)))[:, ::-1] * rng.random((len(blocks), 1))
    Scores(estimator="rank-gain", blocks=blocks, gain=[rows.sum(1).tolist()], extra={"increments": [rows.tolist()]}).save(
        folder / "scores.json"
    )
    (folder / "text.txt").write_text("".join(chr(33 + (7 * i * i + 3 * i) % 80) for i in range(4000)))
    return folder


@pytest.fixture(scope="module")
def made(place):
    """A function that makes a plan once: the record, what was shown, and the plan."""
    found = {}

    def make(kind):
        if kind not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(place)
                result, shown = command_result("plan", kind, *PLANS[kind], "-o", f"{kind}.json")
                found[kind] = result, shown.strip().splitlines(), Plan.load(f"{kind}.json")
        return found[kind]

    return make


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_ends_with_its_verdict_and_the_command_that_follows(made, kind):
    result, lines, plan = made(kind)
    assert lines[-2] == verdict(plan) and lines[-2].startswith("Verdict: ") and lines[-2].endswith(".")
    if kind == "cache":  # of transformers: an object of Python, no file of another tool
        assert lines[-1].startswith("Next, in Python: layerbudget.apply_plan(model, layerbudget.Plan.load('cache.json')).cache")
        return
    words = shlex.split(lines[-1].removeprefix("Next: "))
    assert lines[-1].startswith("Next: layerbudget ") and f"{kind}.json" in words and parsed(words[1:])
    most = 44 if kind == "memory" else 32  # 84 matrices: a grid of 12 layers; a fit has two grids and a curve
    assert len(lines) < most and result["kind"] == kind
    assert len(re.findall(r"(?<![\w.])\d[\d,.]*(?:e-\d+)?", lines[-2])) <= 4  # a person reads no more in one sentence
    if kind in SIX:
        assert "uniform" in lines[-2] or "nats per token" in lines[-2]


def test_the_verdict_has_the_numbers_of_the_plan(made):
    _, lines, plan = made("sparsity")
    own, start = plan.payload.measured, plan.payload.path[0]["divergence"]
    share = 100 * (1 - own / start)
    told = f"{share:.{0 if share >= 10 else 1}f} % less than uniform" if share > 0.5 else "level with uniform"
    assert told in lines[-2] and own <= start
    assert "50 % of the weights" in lines[-2] and f"{own:.3g} nats" in lines[-2]
    _, lines, plan = made("bits")
    beside = "\n".join(lines[:-2])
    check = plan.payload.check.rows
    assert f"{check[plan.rule].kl:.3g} nats per token" in lines[-2] and "held-out" in lines[-2]
    assert f"{check['uniform'].kl:.3g}" in beside or plan.rule == "uniform" or check["uniform"].same
    _, lines, plan = made("ranks")
    assert f"have {plan.payload.uniform_share:.1%} of the plan's gain" in lines[-2]
    _, lines, plan = made("expert-pruning")
    assert f"{plan.counts.sum()} of 24 experts stay" in lines[-2] and f"{plan.payload.measured:.3g} nats" in lines[-2]
    _, lines, plan = made("shapes")
    assert "Every runtime loads" in lines[-2] and "layers that differ" in lines[-2]


def test_one_damage_of_smaller_shapes_leads_and_says_of_which_text_it_is(made):
    """A plan had three damages, forecast, measured and predicted; that of its verdict was of the text that decided."""
    _, lines, plan = made("shapes")
    payload = plan.payload
    assert payload.crossed and f"{payload.predicted:.3g} nats per token to be expected on other text" in lines[-2]
    shown = "\n".join(lines)
    assert f"{payload.measured:.3g}" not in shown and "predicted of the first plan" not in shown
    assert f"planned to cost {payload.predicted:.3g} nats per token to be expected on other text" in expected(plan)
    told = " ".join(explain_plan(plan)["sentences"])
    assert f"On the text that decided, cut and refitted, it costs {payload.measured:.4g}" in told
    assert f"On other text expect {payload.predicted:.4g}" in told
    alone = zoo.saying(plan, crossed=False)
    assert f"{payload.measured:.3g} nats per token on the text that decided" in verdict(alone)


def test_one_damage_of_fewer_experts_leads_and_says_of_which_text_it_is(made):
    """A plan had four damages: forecast, measured, predicted, and that of the text that chose; the first two had one name."""
    _, lines, plan = made("expert-pruning")
    payload, shown = plan.payload, "\n".join(lines)
    leads = f"{payload.measured:.3g} nats per token measured with the others masked, on other text"
    assert payload.crossed and leads in lines[-2] and leads in expected(plan)
    assert "forecast" not in shown and not any(f"{v:.3g}" in shown for v in (payload.beside.even, payload.beside.uneven))
    told = explain_plan(plan)["sentences"]
    first = next(i for i, s in enumerate(told) if f"expect {payload.measured:.4g}" in s)
    assert "On other text of this kind" in told[first] and "forecast" not in " ".join(told)
    assert (
        f"predicts {payload.predicted:.4g}" in told[first + 1] and f"measured as {payload.measured_here:.4g}" in told[first + 1]
    )
    assert all(f"expect {f['measured']:.4g}" in " ".join(told) for f in payload.forecast)
    alone = zoo.saying(plan, crossed=False)
    assert "masked, on the text that chose" in verdict(alone) and "on other text" not in verdict(alone)
    assert "too low for other text" in " ".join(explain_plan(alone)["sentences"])


@pytest.mark.parametrize(("kind", "alike"), [("expert-pruning", False), ("shapes", True)])
def test_the_verdict_compares_the_forecast_with_that_of_equal_layers(made, kind, alike):
    plan = made(kind)[2]
    known = plan.payload.beside
    assert known.uneven <= known.even * (1 + 1e-9) or known.error
    for even, uneven, error, words in (
        (
            0.2,
            0.1,
            0.0,
            "damage of layers that differ is 50 % less than that of this plan"
            if alike
            else "50 % less than that of equal layers",
        ),
        (
            0.2,
            0.19,
            0.1,
            "sees nothing to gain from layers that differ" if alike else "level with that of equal layers",
        ),
    ):
        beside = {"even": even, "uneven": uneven, "error": error}
        if kind == "expert-pruning" and len(set(plan.counts.tolist())) == 1:
            plan = dataclasses.replace(plan, blocks=(dataclasses.replace(plan.blocks[0], count=1), *plan.blocks[1:]))
        assert words in verdict(zoo.saying(plan, beside=beside))
    assert "predict" not in verdict(zoo.saying(plan, beside=None))


def test_a_plan_of_ranks_that_is_advised_against_is_followed_by_uniform(tmp_path, monkeypatch, capsys):
    """The last line does what the verdict says; following it ends with a plan that is trained."""
    monkeypatch.chdir(tmp_path)
    for noise, decay, uniform in ((0.01, (8.0, 7.0), True), (0.01, (20.0, 1.0), False), (0.95, (20.0, 1.0), True)):
        rows = [[math.exp(-i / d) for i in range(48)] for d in decay]
        floor = [[noise * x for x in row] for row in rows]
        extra = {"increments": [rows], "increments_floor": [floor]}
        zoo.scores([sum(row) for row in rows], estimator="rank-gain", extra=extra).save("s.json", overwrite=True)
        words = ["plan", "ranks", "s.json", "--mean-rank", "8", "-o", "p.json", "--overwrite"]
        told = []
        while not told or told[-1].startswith("Next: layerbudget plan"):
            assert main(words) == 0
            told += capsys.readouterr().out.splitlines()[-2:]
            words = shlex.split(told[-1])[2:]
        assert ("take uniform" in told[0], len(told)) == (uniform, 4 if uniform else 2)
        assert main(["explain", "p.json"]) == 0
        explained = capsys.readouterr().out.splitlines()
        assert explained[-1] == told[0] and sum("niform ranks with as many" in line for line in explained) == (noise < 0.9)
        assert "finetune" in words and ("this is uniform" in told[-2]) == uniform
        Path("uniform.json").unlink(missing_ok=True)
        swept = command_result("explain", "sweep", "s.json", "--kind", "ranks", "--budgets", "4", "8")[1]
        assert "noise alone has" in swept
        assert ("At 4, 8, noise alone would give 95% of the gain, so it decides nothing" in swept) == (noise > 0.9)


@pytest.mark.parametrize(("cap", "rest"), [(4, True), (8, False)])
def test_a_cap_that_leaves_a_part_of_the_budget_unused_is_named(tmp_path, monkeypatch, capsys, cap, rest):
    monkeypatch.chdir(tmp_path)
    rows = [[math.exp(-i / 8) for i in range(48)]] * 2
    extra = {"increments": [rows], "increments_floor": [[[0.01 * x for x in row] for row in rows]]}
    zoo.scores([1.0, 1.0], estimator="rank-gain", extra=extra).save("s.json")
    assert main(["plan", "ranks", "s.json", "--mean-rank", "8", "--max-rank", str(cap), "-o", "p.json"]) == 0
    told, plan = " ".join(capsys.readouterr().out.split()), Plan.load("p.json")
    assert set(plan.counts) == {cap}
    unused = f"as much as --max-rank allows: this is uniform, and {plan.budget['limit'] - plan.budget['spent']:,.0f} of"
    assert (unused in told) == rest and plan.budget["limit"] == plan.budget["spent"] * 8 / cap


def test_a_difference_within_the_noise_is_none(made):
    plan = made("bits")[2]
    rows = {"exact": {"kl": 0.01}, "uniform": {"kl": 0.011, "difference": 0.001, "difference_error": 0.002, "same": False}}
    check = {**fields_in_file(plan.payload.check), "rows": rows}
    plan = zoo.saying(dataclasses.replace(plan, rule="exact"), check=check)
    assert "level with uniform" in verdict(plan)
    rows["uniform"]["difference_error"] = 1e-5
    assert "9.1 % less than uniform" in verdict(zoo.saying(plan, check=check))
    rows["exact"]["kl"] = 0.022
    assert "100 % more than uniform" in verdict(zoo.saying(plan, check=check))


def test_a_table_shows_every_row_and_every_sentence(place, monkeypatch):
    monkeypatch.chdir(place)
    words = ["plan", "ranks", *PLANS["ranks"]]
    (plain, short), (told, long) = command_result(*words), command_result(*words, "--table")
    assert "self_attn.q_proj" not in short and long.count("self_attn.q_proj") >= 12
    assert len(long.splitlines()) > 84 > len(short.splitlines())
    assert {k: v for k, v in plain.items() if k != "made_by"} == {k: v for k, v in told.items() if k != "made_by"}
    few = command_result("explain", "diff", "ranks.json", "ranks.json")[1] if (place / "ranks.json").exists() else ""
    assert len(few.splitlines()) < display.FEW + 8
    assert main(["export", "scores.json", "--table"]) == 2


def test_a_deep_grid_loses_its_middle(monkeypatch):
    monkeypatch.setattr(tables, "LAYERS", 4)
    blocks = partition(zoo.speaker("llama", num_hidden_layers=5), "linear")
    table = tables.grid_table(blocks, ["7"] * len(blocks), "title")
    assert [list(c.cells) for c in table.columns][0] == ["0", "1", "... 1 more", "3", "4"]


def test_the_terminal_of_a_score_is_short(place, monkeypatch):
    monkeypatch.chdir(place)
    result, shown = command_result("score", "MODEL", "--estimator", "spectral-tail", "--by", "linear", "-o", "tail.json")
    lines = shown.strip().splitlines()
    assert len(lines) < 24 and lines[-2].startswith("Verdict: ") and lines[-1].startswith("Next: layerbudget plan ")
    assert (
        "--rule alphapruning" in lines[-1]
    )  # a published score is planned by its own rule, not by one that it was not made for
    values = dict(zip([b["name"] for b in result["blocks"]], result["gain"][0], strict=True))
    assert max(values, key=values.get) in lines[-2]
    json.dumps(result)


def test_a_published_score_under_another_rule_says_so(place, monkeypatch):
    monkeypatch.chdir(place)
    command_result("score", "MODEL", "--estimator", "outlier-ratio", *TEXT, "-o", "owl.json")
    shown = command_result("plan", "sparsity", "owl.json", "-o", "mdl.json")[1]
    assert "outlier-ratio is the score of OWL, and mdl is not its rule: --rule owl is OWL as published." in shown
    for own in (("--rule", "owl"), ("--rule", "uniform")):
        assert "as published" not in command_result("plan", "sparsity", "owl.json", *own, "-o", f"by-{own[1]}.json")[1]
    command_result("score", "MODEL", "--estimator", "gradient-norm", *TEXT, "-o", "norm.json")
    shown = command_result("plan", "sparsity", "norm.json", "--rule", "owl", "-o", "other.json")[1]
    assert "owl is the rule of OWL, whose score is outlier-ratio; these scores are gradient-norm." in shown


def test_scores_that_need_more_text_are_not_planned_next(place, monkeypatch):
    """``Next:`` planned from a ranking that the sentence above it had called noise."""
    monkeypatch.chdir(place)
    lines = command_result("score", "MODEL", *TEXT, "-o", "gram.json")[1].strip().splitlines()
    need = remedy(Scores.load("gram.json"))
    words = shlex.split(lines[-1].removeprefix("Next: "))[1:]
    assert parsed(words)
    if need.isdigit():
        assert f"about {int(need):,} sequences would do)" in lines[-2] and words[words.index("--samples") + 1] == need
    else:
        assert {"excess": "--excess", "uniform": "uniform", "": "plan"}[need] in words


def test_the_verdict_of_ranks_says_what_noise_alone_would_give(place, monkeypatch):
    monkeypatch.chdir(place)
    shown = command_result("score", "MODEL", "--estimator", "rank-gain", *TEXT, "--largest", "12", "-o", "gains.json")[1]
    found = re.search(r"Verdict: .* of average loss; at mean rank 8, noise alone would give (\d+)% of the gain", shown)
    assert int(found[1]) == round(100 * plan_ranks(Scores.load("gains.json"), mean_rank=8).payload.noise_share)
    assert "4 scored rows, fewer than 64, do not tell ranks apart: the plan says which uniform rank to take." in shown


def test_the_verdict_of_imported_scores_names_no_unit_that_there_is_not(place, monkeypatch):
    monkeypatch.chdir(place)
    Path("mine.csv").write_text("layer,score\n" + "".join(f"{i},{i + 1}\n" for i in range(12)))
    shown = command_result("score", "MODEL", "--import", "mine.csv", "-o", "mine.json")[1]
    assert "Verdict: most at model.layers.11 (12), least at model.layers.0 (1), in the unit of the file." in shown


def test_the_text_that_checks_is_beside_the_text_that_decides(place, monkeypatch, capsys):
    """The recorded command names the samples that decide: those of the check come on top when it runs again."""
    monkeypatch.chdir(place)
    words = [
        "plan",
        "bits",
        "MODEL",
        "--bits",
        "4.5",
        "--group",
        "16",
        "--draws",
        "1",
        "--data",
        "text.txt",
        "--length",
        "16",
    ]
    assert main([*words, "--dry-run"]) == 0
    assert "on 32 samples of 16 tokens of text.txt, checked on 16 more" in " ".join("".join(capsys.readouterr()).split())
    assert main([*words, "-o", "first.json", "--quiet"]) == 0
    first = Plan.load("first.json")
    assert "--samples 32" in first.made_by and first.payload.check.data["samples"] == 16
    assert main([*shlex.split(first.made_by.replace("first.json", "second.json"))[1:], "--quiet"]) == 0
    assert Plan.load("second.json").digest == first.digest
    assert main([*words, "--samples", "0", "-o", "none.json"]) == 2
    assert "--samples is 0. It is a whole number from 1" in " ".join(capsys.readouterr().err.split())
    stored = first.to_dict()["extra"]["check"]
    rows = {n: {k: v for k, v in r.items() if k != "kl"} for n, r in stored["rows"].items()}
    for check in ({}, [None], {**stored, "rows": rows}):
        first.with_payload(check=check).save("damaged.json", overwrite=True)
        assert main(["explain", "damaged.json"]) == 2 and "part extra of this plan does not read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("have", "samples", "count", "parts"),
    [(12, 4, 8, (4, 8)), (5, 4, 8, (3, 2)), (30, 32, 16, (20, 10)), (30, 32, 1, (29, 1)), (2, 4, 8, (1, 1)), (4, 4, 0, (4, 0))],
)
def test_of_a_short_text_what_decides_comes_first(monkeypatch, have, samples, count, parts):
    """Of five sequences four were asked to decide, and one did: the check, which nobody asked for, had the others."""
    session = Session(types.SimpleNamespace(command="plan", json=False, samples=samples, dtype=None, stream=True, usual={}))
    monkeypatch.setattr(session, "load", lambda lean: (None, None, zoo.tokens(have)))
    _, _, data, check = session.load_checked(count)
    assert (data.samples, 0 if check is None else check.samples) == parts
