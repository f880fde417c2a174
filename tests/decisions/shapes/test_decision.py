"""Smaller shapes as one decision: what it is asked, what its file holds, what is said of it."""

import dataclasses
import json

import pytest
from tests import zoo

from layerbudget.canonical import to_jsonable
from layerbudget.cli import main
from layerbudget.decisions.shapes.apply import apply_shapes
from layerbudget.decisions.shapes.decision import DECISION
from layerbudget.decisions.shapes.payload import ShapesPayload
from layerbudget.decisions.shapes.plan import plan_shapes
from layerbudget.decisions.shapes.request import ShapesRequest
from layerbudget.decisions.shapes.save import save_smaller
from layerbudget.errors import CorruptFile, InvalidInput, UnknownUnit
from layerbudget.frozen import fields_in_file
from layerbudget.plan import Plan, payload_of
from layerbudget.registry import options_of
from layerbudget.requests import PLACING, READING, Request


@pytest.fixture(scope="module")
def made():
    """A model, a text, and an even plan for them."""
    model, data = zoo.build("llama"), zoo.tokens(4, 8)
    return model, data, plan_shapes(model, data, "20% flops", even=True, draws=1, strides=1, passes=20)


def test_the_planner_and_the_command_have_the_same_options():
    fields = ShapesRequest.options()
    aside = {*Request.options(), *READING, *PLACING, "source", "out", "budget"}
    asked = {name: field.default for name, field in fields.items() if name not in aside}
    asked["kinds"] = ShapesRequest(source="m", budget="1% flops").parts  # typed as one word
    taken = {name: option.default for name, option in options_of(plan_shapes).items()}
    filled = {"batch_size", "seed", "progress", "bytes_per_parameter", "speed"}  # speed: an object of Python
    assert asked == {name: default for name, default in taken.items() if name not in filled}


def test_what_the_file_holds_is_the_payload(made):
    plan = made[2]
    payload = payload_of(plan, ShapesPayload)
    stored = plan.to_dict()["extra"]
    assert stored == to_jsonable(fields_in_file(payload)) and "prices" not in stored and "error" not in stored["beside"]
    again = Plan.from_dict(plan.to_dict())
    assert again.payload == payload and again.digest == plan.digest
    for name, broken in (("shapes", {"a": {"layer": "a"}}), ("dropped", 1)):
        with pytest.raises(CorruptFile, match="extra of this plan"):
            Plan.from_dict({**plan.to_dict(), "extra": {**stored, name: broken}})
    with pytest.raises(CorruptFile, match="hyperparameters of this plan"):
        Plan.from_dict({**plan.to_dict(), "hyperparameters": {**plan.hyperparameters, "multiple": 0}})


def test_what_is_said_of_a_plan(made):
    plan = made[2]
    summary = DECISION.describe(plan)
    assert "fewer flops for" in summary.title and summary.passes == plan.payload.forward_passes
    assert "to be expected on other text" in summary.verdict and f"{plan.payload.predicted:.3g} nats" in summary.expected
    assert "saves" in summary.sentences[0] and any(
        "reached step by step. Of the step that chose it" in s for s in summary.sentences
    )
    assert summary.comparison is not None and "before anything was cut" in summary.comparison.title
    assert DECISION.charts(plan, None)["water"]["uniform"] > 0 and DECISION.charts(None, None) == {}
    assert DECISION.runs().startswith("What you have: heads, MLP width or whole blocks removed.")
    early = dataclasses.replace(plan, payload=ShapesPayload(shapes=plan.payload.shapes, dropped=plan.payload.dropped))
    assert "unknown damage" in DECISION.describe(early).verdict  # before the search has measured it


def test_the_receipt_says_whose_plan_it_is_and_its_file_has_the_counts(made, tmp_path):
    _, data, plan = made
    model = zoo.build("llama")
    receipt = apply_shapes(model, plan, data)
    assert receipt.plan_digest == plan.digest and receipt.identity["digest"] == plan.model["digest"]
    save_smaller(model, None, tmp_path / "out", plan=plan, record=receipt)
    written = json.loads((tmp_path / "out" / "receipt.json").read_text())
    counted = {"unit", "before", "after", "saved", "planned", "parameters", "layers", "dropped"}
    assert set(written) == {"schema_version", "plan_digest", "versions", *counted} and set(receipt.counted()) == counted


@pytest.mark.parametrize(("words", "more"), [("--help", False), ("--help-all", True)])
def test_help_names_the_options(words, more, capsys):
    assert main(["plan", "shapes", words]) == 0
    said = capsys.readouterr().out
    assert "--save" in said and "--runtime" in said and ("--max-removed" in said) is more


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ({"budget": "9 lives"}, UnknownUnit, "9 lives"),
        ({"kinds": "heads", "multiple": 4}, InvalidInput, "--multiple has no meaning for --parts heads"),
        ({"kinds": "mlp", "by": "groups"}, InvalidInput, "--by has no meaning for --parts mlp"),
    ],
)
def test_what_no_plan_can_mean_is_refused_before_anything_is_loaded(words, error, match):
    with pytest.raises(error, match=match):
        ShapesRequest(**{"source": "gone", "budget": "20% flops", **words}).check()
    ShapesRequest(source="gone", budget="20% flops", multiple=4, by="groups").check()


def test_choices_and_missing_budgets_are_usage_errors(capsys):
    for words in (["--save", "20% flops", "--runtime", "ollama"], ["--save", "20% flops", "--by", "layers"], []):
        assert main(["plan", "shapes", "demo", *words]) == 2
        assert "layerbudget plan shapes --help says what there is" in capsys.readouterr().err
