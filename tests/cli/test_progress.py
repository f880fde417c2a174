"""Long verbs show phase, step of a total and time left from the first second; in a pipe a line now and then, or nothing."""

from __future__ import annotations

import argparse
import io
import json

import pytest
from rich.console import Console
from tests import zoo

from layerbudget.cli import display, main
from layerbudget.cli.display import Display, Progress
from layerbudget.progress import Steps, say
from layerbudget.sensitivity.estimators import ESTIMATORS

SMALL = ("--samples", "4", "--length", "16")


@pytest.fixture
def shown(monkeypatch):
    """What every progress was told, and what the terminal saw."""
    seen = argparse.Namespace(told=[], screen=io.StringIO())
    drawn = Progress.__call__

    def call(self, *given):
        drawn(self, *given)
        seen.told.append((self.task.completed, self.task.total))

    monkeypatch.setattr(Progress, "__call__", call)
    monkeypatch.setattr(display, "progress_console", lambda: Console(file=seen.screen, force_terminal=True, width=100))
    return seen


def check(seen, words):
    """The total was known before the first step; nothing on the screen is a question mark."""
    assert seen.told and seen.told[0][0] == 0, words
    assert all(total > 0 for _, total in seen.told) and seen.told[-1][0] == seen.told[-1][1] or "plan" in words, words
    assert "/?" not in seen.screen.getvalue()
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
        ["plan", "bits", folder, "--bits", "6", "--group", "16", *SMALL, "--check", "4", "--draws", "1", "-o", bits],
        ["apply", folder, bits, "-o", str(kept / "rounded")],
        ["compare", folder, "--scores", "fisher-gram", "--sparsity", "0.5", "--samples", "4", "--length", "16", "--windows",
         "4", "--no-controls", "-o", str(kept / "compared")],
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
            assert "Verdict: " in said.err


def check_costs(result, lines):
    """One line before, with device, precision and what is expected; one line after; the same as fields."""
    before = [line for line in lines if "parameters in float32 on cpu" in line]
    assert len(before) == 1 and ": about " in before[0] and "GiB, in memory." in before[0], lines
    (after,) = [line for line in lines if line.startswith("took ")]
    assert "without the start of the program" in after and "; expected " in after
    assert result["took"]["seconds"] > 0 and result["expected"]["seconds"] > 0 and result["expected"]["memory"] > 50e6


QUICK = {"fisher-gram", "ablation"}  # backwards, and forwards


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(set(ESTIMATORS.all()) - {"layerif"})]
)
def test_every_estimator_knows_its_total_from_the_start(name, saved_model, tmp_path, shown):
    words = ["score", str(saved_model("llama")), "--estimator", name, *(SMALL if ESTIMATORS.all()[name].data else ())]
    assert main([*words, "-o", str(tmp_path / "s.json")]) == 0
    check(shown, words)


def test_a_second_pass_is_named_and_a_plain_function_stays_at_the_total():
    told, seen = Progress("kfac"), []
    for callback in (told, lambda done, total: seen.append((done, total))):
        tick = Steps(callback, 4, "gradients")
        for _ in range(3):
            tick(2)
    assert told.task.description == "kfac, gradients, pass 2" and (told.task.completed, told.task.total) == (2, 4)
    assert seen == [(0, 4), (2, 4), (4, 4), (4, 4)]
    say(None, "nothing")


def test_a_step_that_is_not_whole_yet_begins_no_pass():
    """A walk counts parts of sequences, and tells of none before the first one is whole."""
    told = Progress("plan bits")
    tick = Steps(told, 4, "gradients")
    tick(0)
    assert told.task.description == "plan bits, gradients" and (told.task.completed, told.task.total) == (0, 4)


def test_a_pipe_gets_a_line_now_and_then_and_quiet_gets_none(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    lines = Progress("score by kfac")
    lines.bar.get_time = lambda: now[0]
    for done in range(11):
        lines(done, 10)
        now[0] += 20.0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in said] == [f"score by kfac: {n}/10" for n in (3, 6, 9)]
    assert said[0].endswith(" s left")
    for quiet in (True, False):
        request = argparse.Namespace(command="plan", json=False, dry_run=False, quiet=quiet)
        with Display(request).progress("x") as bar:
            assert (bar is None) == quiet
    assert "x" not in capsys.readouterr().err


def test_the_check_of_a_plan_has_steps_of_its_own(saved_model, tmp_path, monkeypatch, capsys):
    """It was silent for minutes, and "0 s left" stood before it; every step takes a minute of this clock."""
    now, phases = [0.0], []
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    begun, called = Progress.__init__, Progress.__call__

    def init(self, text):
        begun(self, text)
        self.bar.get_time = lambda: now[0]

    def call(self, done, total, phase=None):
        now[0] += 61.0
        called(self, done, total, phase)
        phases.append((self.task.description, done, total))

    monkeypatch.setattr(Progress, "__init__", init)
    monkeypatch.setattr(Progress, "__call__", call)
    own = ("--bits", "6", "--group", "16", "--check", "2", "--draws", "1", *SMALL)
    assert main(["plan", "bits", str(saved_model("llama")), *own, "-o", str(tmp_path / "b.json")]) == 0
    check_of = {(text, total) for text, _, total in phases if "the check" in text}
    assert any("the dense model" in text for text, _ in check_of) and any("plan 1 of" in text for text, _ in check_of)
    said = [line for line in capsys.readouterr().err.splitlines() if ": the check" in line or ", the check" in line]
    assert len(said) > 4 and not any(" 0 s left" in line for line in said)
