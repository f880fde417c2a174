"""What every decision must do, ours and those of others: a plan that is given here is saved, read, said, shown and exported."""

from __future__ import annotations

import dataclasses
import json

from torch import nn

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decision import DECISIONS, Decision, Summary
from layerbudget.errors import InvalidInput
from layerbudget.exports import EXPORTS, format_for
from layerbudget.records import Receipt
from layerbudget.reporting.page import write_report
from layerbudget.requests import Request


def check_declared(decision):
    """It says what it is, and asks for nothing without a sentence."""
    assert decision.name in DECISIONS.names() and isinstance(decision, Decision)
    assert decision.summary and decision.decides and decision.counts and not decision.summary.endswith(".")
    assert dataclasses.is_dataclass(decision.Payload) and decision.Payload.__dataclass_params__.frozen
    for asked in (decision.Request, decision.Write):
        assert issubclass(asked, Request)
        for name, field in asked.options().items():
            said = field.metadata["help"]
            said = said() if callable(said) else said
            assert said and (not said.endswith(".") or said.endswith("...")), (decision.name, name)
    assert decision.Request.command == f"plan {decision.name}" and (decision.Request.__doc__ or "").strip()


def check_help(decision, capsys):
    """Its help names every option, and the short help fewer."""
    seen = {}
    for flag in ("--help", "--help-all"):
        assert main(["plan", decision.name, flag]) == 0
        seen[flag] = capsys.readouterr().out
    for name, field in decision.Request.options().items():
        typed = field.metadata["flag"] or (f"--{name.replace('_', '-')}" if field.default is not dataclasses.MISSING else "")
        assert typed in seen["--help-all"], name
    assert "--json" in seen["--help-all"] and "--json" not in seen["--help"]


def check_plan(plan, folder, capsys):
    """A plan of it is read as it was written; what is said of it is the same everywhere."""
    decision = DECISIONS.find(plan.kind)
    again = lb.Plan.load(plan.save(folder / "plan.json"))
    assert again == plan and again.digest == plan.digest and again.payload == plan.payload
    summary = decision.describe(plan)
    assert isinstance(summary, Summary) and summary.title and summary.verdict and "Verdict" not in summary.verdict
    assert not summary.expected or summary.expected.startswith("Verdict: ")
    assert summary.sentences and all(sentence[:1].strip() for sentence in summary.sentences)
    assert list(lb.explain_plan(plan).sentences)[: len(summary.sentences)] == list(summary.sentences)
    assert main(["explain", str(folder / "plan.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " ".join(summary.verdict.split()) in shown
    page = write_report(folder, folder / "page.html").read_text(encoding="utf-8")
    assert summary.title.split()[0] in page and "<h1>" in page
    assert set(decision.parts(plan)) >= {plan.kind} or len(decision.parts(plan)) > 1
    for block in plan.blocks:
        assert decision.word(block)
    labels = decision.labels(plan)
    assert labels is None or len(labels) == len(plan.blocks)
    json.dumps(decision.charts(plan, None))
    for export in decision.exports:
        assert EXPORTS.find(export.name).kinds == export.kinds and export.summary and export.use
    try:
        text = EXPORTS.find(format_for(plan)).text(plan, {})
    except InvalidInput:  # this plan is not what that tool takes; the refusal has a remedy
        return
    assert text.strip()


def check_applied(plan, model, data=None, *, cached=False, **options):
    """Applying it gives a receipt with the model, and a cache where one is planned; neither is in its JSON."""
    receipt = lb.apply_plan(model, plan, data, **options)
    assert isinstance(receipt, Receipt) and isinstance(receipt.model, nn.Module)
    assert receipt.plan_digest == plan.digest and receipt.identity["digest"] == plan.model["digest"]
    assert (receipt.cache is not None) == cached and (not cached or receipt.cache.get_seq_length() == 0)
    record = json.loads(json.dumps(receipt.to_dict()))
    assert record["model"]["digest"] == plan.model["digest"] and not {"cache", "identity"} & set(record)
    assert set(receipt.counted()) <= set(record)
    again = type(receipt).from_dict(record)
    assert again == receipt and again.model is None
    return receipt
