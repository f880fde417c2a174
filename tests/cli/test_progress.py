"""Long verbs show phase, step of a total and time left from the first second; in a pipe a line now and then, or nothing."""

from __future__ import annotations

import argparse
import io
import json
import re

import pytest
from rich.console import Console
from tests import zoo

from layerbudget.cli import display, main
from layerbudget.cli.display import Progress, progress_bar
from layerbudget.progress import Steps, say
from layerbudget.sensitivity.estimators import estimators

SMALL = ("--samples", "4", "--length", "16")


@pytest.fixture
def shown(monkeypatch):
    """What every progress was told, and what the terminal saw."""
    seen = argparse.Namespace(told=[], screen=io.StringIO())

    def show(self):
        seen.told.append((self.title, self.done, self.total, self.count, self.left))
        drawn(self)

    drawn = Progress.show
    monkeypatch.setattr(Progress, "show", show)
    monkeypatch.setattr(display, "progress_console", lambda: Console(file=seen.screen, force_terminal=True, width=100))
    return seen


def check(seen, words):
    """The total was known before the first step; nothing on the screen is a question mark."""
    assert seen.told, words
    title, done, total, count, left = seen.told[0]
    assert done == 0 and total > 0 and count == f"0/{total}" and left, (words, seen.told[0])
    assert all(total > 0 for _, _, total, _, _ in seen.told) and seen.told[-1][1] == seen.told[-1][2] or "plan" in words, words
    assert "/?" not in seen.screen.getvalue() and "-:--" not in seen.screen.getvalue()
    seen.told.clear()


RARER = ("shapes", "compare")


@pytest.mark.parametrize("rarer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_long_verb_knows_its_total_and_its_cost_from_the_start(rarer, saved_model, tmp_path, shown, capsys):
    folder, kept = str(saved_model("llama")), tmp_path / "kept"
    kept.mkdir()
    sparsity, bits = str(kept / "p.json"), str(kept / "b.json")
    (kept / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"a row of text, number {i}"}) for i in range(12)))
    zoo.linears(zoo.speaker("llama"), lambda n: 2 if "mlp" in n else 0).save(kept / "ranks.json")
    for words in (
        ["plan", "sparsity", folder, *SMALL, "-o", sparsity],
        ["apply", folder, sparsity, *SMALL, "-o", str(kept / "pruned")],
        ["evaluate", folder, "--length", "16", "--windows", "4"],
        ["plan", "shapes", folder, "--save", "20% flops", *SMALL, "-o", str(kept / "s.json")],
        ["plan", "bits", folder, "--bits", "6", "--set", "group=16", *SMALL, "--set", "check=4", "--set",
         "draws=1", "-o", bits],
        ["apply", folder, bits, "-o", str(kept / "rounded")],
        ["compare", folder, "--scores", "fisher-gram", "--sparsity", "0.5", "--samples", "4", "--length", "16", "--windows",
         "4", "--set", "controls=false", "-o", str(kept / "compared")],
        ["finetune", folder, str(kept / "ranks.json"), "--data", str(kept / "rows.jsonl"), "--epochs", "1", "-o",
         str(kept / "tuned")],
    ):  # fmt: skip
        if any(word in RARER for word in words) != rarer:
            continue
        assert main([*words, "--json"]) == 0, (words, capsys.readouterr().err)
        said = capsys.readouterr()
        check(shown, words)
        check_costs(json.loads(said.out), said.err.splitlines())
        if words[:2] == ["plan", "sparsity"]:
            assert "Predicted damage " in said.err and json.loads(said.out)["against_uniform"]["uniform"] > 0


def check_costs(result, lines):
    """One line before, with device, precision and what is expected; one line after; the same as fields."""
    before = [line for line in lines if "parameters in float32 on cpu" in line]
    assert len(before) == 1 and ": about " in before[0] and "GiB, in memory." in before[0], lines
    assert any(line.startswith("took ") and "; expected " in line for line in lines), lines
    for cost in (result["took"], result["expected"]):
        assert cost["seconds"] > 0 and cost["memory"] > 50e6


QUICK = {"fisher-gram", "reconstruction", "spectral-tail", "block-influence"}  # one of each way to walk


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(set(estimators()) - {"layerif"})]
)
def test_every_estimator_knows_its_total_from_the_start(name, saved_model, tmp_path, shown):
    words = ["score", str(saved_model("llama")), "--estimator", name, *(SMALL if estimators()[name].data else ())]
    assert main([*words, "-o", str(tmp_path / "s.json")]) == 0
    if shown.told[0][4] == "":  # nobody knows what it costs
        shown.told[0] = (*shown.told[0][:4], "unknown")
    check(shown, words)


def test_a_second_pass_is_named_and_a_plain_function_stays_at_the_total():
    told, seen = Progress("kfac"), []
    for callback in (told, lambda done, total: seen.append((done, total))):
        tick = Steps(callback, 4, "gradients")
        for _ in range(3):
            tick(2)
    assert told.title == "kfac, gradients, pass 2" and told.count == "2/4"
    assert seen == [(0, 4), (2, 4), (4, 4), (4, 4)]
    say(None, "nothing")


def test_time_left_is_what_was_expected_and_then_what_the_steps_took(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    told = Progress("score", expected=100.0)
    told(0, 10)
    now[0] = 30.0
    assert told.left == "1:10" and told.count == "0/10"
    told(2, 10)
    assert told.left == "2:00"
    told(0, 4, "another phase")  # its steps are others
    now[0] = 35.0
    told(1, 4)
    assert told.left == "0:15" and told.title == "score, another phase"


def test_a_pipe_gets_a_line_every_half_minute_and_quiet_gets_none(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    lines = Progress("score by kfac", expected=100.0)
    for done in range(1, 11):
        now[0] += 10.0
        lines(done, 10)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"score by kfac: {n}/10, {clock} left" for n, clock in ((3, "1:10"), (6, "0:40"), (9, "0:10"))]
    with progress_bar(argparse.Namespace(quiet=True), "x") as bar:
        assert bar is None
    with progress_bar(argparse.Namespace(quiet=False), "x") as bar:
        assert isinstance(bar, Progress)
    assert not re.search("x", capsys.readouterr().err)
