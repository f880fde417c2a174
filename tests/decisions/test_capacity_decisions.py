"""Ranks, LoRA experts and the joint plan as decisions: their requests, what their files say, and what is said of them."""

import dataclasses
import inspect
import json

import numpy as np
import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.decision import DECISIONS, Decision
from layerbudget.decisions.joint.payload import JointPayload
from layerbudget.decisions.joint.plan import plan_joint
from layerbudget.decisions.lora_experts.plan import plan_lora_experts
from layerbudget.decisions.ranks.payload import RanksPayload, SmallerReserve
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.errors import CorruptFile, InvalidInput
from layerbudget.plan import Plan, payload_of
from layerbudget.session import ScoresRequest

PLANNERS = {"ranks": plan_ranks, "lora-experts": plan_lora_experts, "joint": plan_joint}
BUDGETS = {"ranks": ("--mean-rank", "4"), "lora-experts": ("--total", "9"), "joint": ("--budget=-4KiB",)}
SIZES = [64, 64, 128]


def gains(seed=0):
    """Scores of three blocks with the gain of every further rank."""
    rows = np.sort(np.random.default_rng(seed).gamma(0.5, size=(3, 32)))[:, ::-1]
    return zoo.scores(rows.sum(1).tolist(), SIZES, estimator="rank-gain", extra={"increments": [rows.tolist()]})


@pytest.fixture(params=PLANNERS)
def plan(request):
    """A small plan of every kind."""
    terms = {"ranks": {"mean_rank": 4}, "lora-experts": {"total": 9}, "joint": {"budget": "-4KiB"}}[request.param]
    return PLANNERS[request.param](gains(), **terms)


@pytest.mark.parametrize("kind", PLANNERS)
def test_flags_and_keywords_are_the_same_and_have_the_same_defaults(kind):
    asked = DECISIONS.find(kind).Request
    flags = {name: field.default for name, field in asked.options().items() if name not in ScoresRequest.options()}
    parameters = inspect.signature(PLANNERS[kind]).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    flags.pop("fix", None)
    keywords.pop("fixed", None)
    assert set(flags) == set(keywords)
    assert {n: v for n, v in flags.items() if n != "budget"} == {n: v for n, v in keywords.items() if n != "budget"}


def test_a_plan_that_is_written_and_read_says_the_same(plan, tmp_path):
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again.digest == plan.digest and again.payload == plan.payload
    assert type(again.payload) is DECISIONS.find(plan.kind).Payload


def test_the_payload_holds_what_the_file_holds():
    plan = plan_ranks(gains(), mean_rank=4)
    payload = payload_of(plan, RanksPayload)
    assert payload.uniform_share == plan.payload.uniform_share and payload.rounding["value"] > 0
    assert payload.scored_rows is None and payload.noise_share is None
    changed = zoo.saying(plan, smaller_reserve={"max_rank": 8, "share": 0.97, "reserved": 16})
    assert payload_of(changed, RanksPayload).smaller_reserve == SmallerReserve(max_rank=8, share=0.97, reserved=16)
    joint = plan_joint(gains(), budget="-4KiB")
    assert payload_of(joint, JointPayload).capacity.counts == joint.payload.capacity.counts
    with pytest.raises(InvalidInput, match="has no RanksPayload"):
        payload_of(joint, RanksPayload)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("ranks", {"at_measured": {"a": -1}}), ("ranks", {"uniform_share": "much"}), ("ranks", {"rounding": {"exact": True}}),
        ("lora-experts", {"flat_scores": []}), ("joint", {"capacity": None}), ("joint", {"capacity": {"kind": "ranks"}}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(kind, damage, tmp_path):
    terms = {"ranks": {"mean_rank": 4}, "lora-experts": {"total": 9}, "joint": {"budget": "-4KiB"}}[kind]
    record = PLANNERS[kind](gains(), **terms).to_dict()
    (tmp_path / "plan.json").write_text(json.dumps({**record, "extra": {**record["extra"], **damage}}))
    with pytest.raises(CorruptFile, match="extra of this plan does not read"):
        Plan.load(tmp_path / "plan.json")


def test_what_is_said_of_a_plan(plan):
    summary = DECISIONS.find(plan.kind).describe(plan)
    assert summary.title.endswith(" for") and summary.verdict.endswith(".") and summary.comparison is None
    assert summary.expected.startswith("Verdict: nothing measured the damage") and summary.passes is None
    assert f"The rule {plan.rule} decides" in summary.sentences[0] and len(summary.sentences) > 2
    assert all(sentence.endswith((".", "it.")) for sentence in (*summary.sentences, *summary.advice))


@pytest.mark.parametrize("kind", PLANNERS)
def test_every_option_has_a_line_in_the_whole_help(kind, capsys):
    assert main(["plan", kind, "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["plan", kind, "--help-all"]) == 0
    whole = capsys.readouterr().out
    flags = {f"--{name.replace('_', '-')}" for name in DECISIONS.find(kind).Request.options() if name != "source"}
    assert all(flag in whole for flag in flags) and "--bytes-per-parameter" not in short


@pytest.mark.parametrize("kind", PLANNERS)
def test_a_plan_is_made_shown_and_followed(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gains().save("scores.json")
    assert main(["plan", kind, "scores.json", *BUDGETS[kind], "-o", "plan.json", "--table"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].startswith("Verdict: ") and shown[-1].startswith("Next: layerbudget ")
    first, command = Plan.load("plan.json"), shown[-1].split()[2]
    assert command in (DECISIONS.find(kind).command, "plan") and f"plan {kind} scores.json" in first.made_by
    assert main([*first.made_by.split()[1:], "--overwrite", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] and Plan.load("plan.json").digest == first.digest


def test_a_budget_is_given_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gains().save("scores.json")
    for words, said in (((), "No budget was given"), (("--mean-rank", "4", "--budget", "1 KiB"), "were given together")):
        assert main(["plan", "ranks", "scores.json", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "lora-experts", "scores.json", "--total", "9", "--dry-run"]) == 2
    assert "planning from them takes seconds" in capsys.readouterr().err
    assert main(["plan", "ranks", "scores.json", "--mean-rank", "4", "--exponent", "2"]) == 2
    assert "has no option exponent" in capsys.readouterr().err


class Signs(Decision):
    """A decision of an outsider that is trained: every matrix with a count gets a scale of its own."""

    name, summary, decides, counts = "signs", "a scale for some matrices", "scales", "scales"
    whole, trains, protocol_options = True, True, ("ratio",)

    def adapt(self, model, plan, protocol, gradients=None, **options):
        """Add a scale beside the first matrix of every block that has one."""
        from layerbudget.decisions.ranks.apply import add_ranks

        ranks = dataclasses.replace(plan, kind="ranks", payload=None)
        return add_ranks(model, ranks, validate=False, ratio=protocol.ratio, **options)


def test_a_decision_from_outside_is_trained_like_ours():
    from layerbudget.finetuning.adapters import adapt
    from layerbudget.finetuning.protocol import Protocol

    model = zoo.mistral()
    with DECISIONS.kept():
        DECISIONS.add("signs", Signs())
        plan = dataclasses.replace(zoo.linears(model, lambda n: 1 if "q_proj" in n else 0), kind="signs", payload=None)
        Protocol(ratio=3.0).check(plan)
        with pytest.raises(InvalidInput, match="A plan of signs does not read top_k"):
            Protocol(top_k=3).check(plan)
        trained = [n for n, p in adapt(model, plan, Protocol()).named_parameters() if p.requires_grad]
    assert trained and all("q_proj" in name for name in trained)
    joint = plan_joint(gains(), budget="-4KiB")
    with pytest.raises(InvalidInput, match="A plan of kind joint cannot be trained"):
        adapt(zoo.mistral(), joint, Protocol())
