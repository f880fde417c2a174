"""Expert pruning as one decision: what it is asked, what its file holds, what is said of it."""

import dataclasses

import pytest
from tests import zoo

from layerbudget.canonical import to_jsonable
from layerbudget.cli import main
from layerbudget.decisions.expert_pruning.apply import keep_experts
from layerbudget.decisions.expert_pruning.decision import DECISION
from layerbudget.decisions.expert_pruning.payload import ExpertPruningPayload
from layerbudget.decisions.expert_pruning.plan import plan_expert_pruning
from layerbudget.decisions.expert_pruning.request import ExpertPruningRequest
from layerbudget.errors import CorruptFile, InvalidInput
from layerbudget.plan import Plan, payload_of
from layerbudget.registry import options_of
from layerbudget.requests import PLACING, READING, Request


@pytest.fixture(scope="module")
def plan():
    return plan_expert_pruning(zoo.build("qwen3-moe"), zoo.tokens(4, 8), 0.5, draws=1)


def test_the_planner_and_the_command_have_the_same_options():
    fields = ExpertPruningRequest.options()
    aside = {*Request.options(), *READING, *PLACING, "source", "out", "budget"}
    asked = {name: field.default for name, field in fields.items() if name not in aside}
    taken = {name: option.default for name, option in options_of(plan_expert_pruning).items()}
    filled = {"batch_size", "seed", "progress", "bytes_per_parameter"}  # by the text, the session, the checkpoint
    assert asked == {name: default for name, default in taken.items() if name not in filled}
    assert fields["budget"].default is None and set(taken) & set(fields) == {*asked, "batch_size", "seed"}


def test_what_the_file_holds_is_the_payload(plan):
    payload = payload_of(plan, ExpertPruningPayload)
    stored = plan.to_dict()["extra"]
    assert to_jsonable(dataclasses.asdict(payload)) == stored
    again = Plan.from_dict(plan.to_dict())
    assert again.payload == payload and again.digest == plan.digest
    for broken in ({**stored, "kept": {"layer": [-1]}}, {k: v for k, v in stored.items() if k != "measured"}):
        with pytest.raises(CorruptFile, match="extra of this plan"):
            Plan.from_dict({**plan.to_dict(), "extra": broken})


def test_what_is_said_of_a_plan(plan):
    summary = DECISION.describe(plan)
    assert summary.title == f"{plan.counts.sum()} experts stay in" and summary.passes == plan.payload.forward_passes
    assert f"{plan.counts.sum()} of 24 experts stay" in summary.verdict and "masked, on other text" in summary.expected
    assert f"keeps {plan.counts.sum()} of 24 experts." in summary.sentences[0] and "for 3 layers" in summary.sentences[0]
    assert summary.comparison is not None and summary.comparison.head == ("plan", "predicted", "against equal layers")
    charts = DECISION.charts(plan, None)
    assert len(charts["grid"]["plans"]) == len(plan.payload.curve) and charts["water"]["uniform"] == pytest.approx(0.5)
    assert DECISION.charts(None, None) == {} and DECISION.runs() == ""


def test_the_receipt_says_whose_plan_it_is_and_what_was_counted(plan):
    model, told = zoo.build("qwen3-moe"), []
    receipt = keep_experts(model, plan, progress=lambda done, total: told.append((done, total)))
    assert receipt.plan_digest == plan.digest and receipt.identity["digest"] == plan.model["digest"] and receipt.notes == ()
    assert set(receipt.counted()) == {"experts", "layers", "parameters", "active", "bytes", "even", "loads"}
    assert receipt.experts == {"before": 24, "after": 12} and told == [(0, 3), (3, 3)]


@pytest.mark.parametrize(("words", "shown"), [("--help", "--keep"), ("--help-all", "--draws")])
def test_help_names_the_options(words, shown, capsys):
    assert main(["plan", "expert-pruning", words]) == 0
    said = capsys.readouterr().out
    assert shown in said and ("--draws" in said) is (words == "--help-all") and "--resume" not in said


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ({}, InvalidInput, "Give either --keep or --damage"),
        ({"budget": "0.5", "damage": 0.1}, InvalidInput, "Give either --keep or --damage"),
        ({"budget": "half"}, InvalidInput, "half"),
    ],
)
def test_a_command_without_one_limit_is_refused_before_anything_is_loaded(words, error, match):
    with pytest.raises(error, match=match):
        ExpertPruningRequest(source="gone", **words).check()


def test_both_names_of_the_budget_are_read(capsys):
    for name in ("--keep", "--budget"):
        assert main(["plan", "expert-pruning", "demo", name, "half"]) == 2
        assert "The budget is 'half'. It is a share of all experts" in " ".join(capsys.readouterr().err.split())
