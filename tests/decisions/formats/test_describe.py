"""What plans of formats say: every field of the file has a type, and one summary serves terminal, page and model card."""

import dataclasses

import numpy as np
import pytest
from tests import zoo
from tests.decisions.formats.test_program import gguf_record

from layerbudget.canonical import to_jsonable
from layerbudget.decision import decision_of
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.memory.parts import parts_of
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.errors import CorruptFile
from layerbudget.models.card import model_card
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.verdict import comparison_table, expected, verdict


@pytest.fixture(scope="module")
def plans():
    """A plan of memory, its two parts, and a plan of bits for a GGUF file."""
    memory = plan_memory(zoo.fit_scores(3), memory=f"{zoo.buffers() + 30000} bytes", context=64)
    weights, cache = parts_of(memory).values()
    return {"memory": memory, "weights": weights, "cache": cache, "bits": plan_bits(gguf_record(), like="Q4_K_M")}


@pytest.mark.parametrize("name", ["memory", "weights", "cache", "bits"])
def test_every_field_of_a_file_has_a_type_and_keeps_its_value(plans, name):
    plan = Plan.from_dict(plans[name].to_dict())
    stored, fields = plan.to_dict()["extra"], {field.name for field in dataclasses.fields(plan.payload)}
    assert set(stored) <= fields and stored == plans[name].to_dict()["extra"]
    values = to_jsonable(dataclasses.asdict(plan.payload))
    for key in stored:
        assert values[key] == stored[key], key


@pytest.mark.parametrize("name", ["memory", "weights", "cache", "bits"])
def test_one_summary_is_what_all_say(plans, name):
    plan = plans[name]
    summary = decision_of(plan).describe(plan)
    assert verdict(plan) == f"Verdict: {summary.verdict}" and expected(plan) == summary.expected
    assert f"{plan.payload.predicted:.3g} nats per token" in summary.verdict
    assert list(explain_plan(plan).sentences) == list(summary.sentences)
    assert comparison_table(plan) == summary.comparison and (summary.comparison is None) == (name in ("weights", "cache"))
    card = model_card(plan, "quantized", "quantised", "in formats.", {}, "use")
    assert all(f"| {row} | {text} |" in card for row, text in summary.figures.items())
    assert f"{plan.payload.predicted:.4g}" in summary.figures["predicted KL divergence"]
    assert ("weights and cache together" in summary.figures) == (name in ("weights", "cache"))


def test_types_that_descent_does_not_improve_are_said(plans):
    """Only those that the plan has, and only of this method."""
    names = plans["bits"].payload.formats
    forms = dict.fromkeys(names, "Q4_K") | dict(zip(names, ["IQ1_M", "Q4_K", "MXFP4"], strict=False))
    for method, said in (("descent", True), ("gptq", False)):
        plan = plans["bits"].with_payload(formats=forms, method=method)
        assert ("Descent does not improve IQ1_M and MXFP4: they are rounded as by gptq." in verdict(plan)) == said
        assert "Q4_K and" not in verdict(plan)


@pytest.mark.parametrize("name", ["memory", "weights", "cache", "bits"])
def test_the_water_of_the_page_is_the_mean_of_the_bits(plans, name):
    plan = plans[name]
    water = decision_of(plan).charts(plan, None)["water"]
    assert water["uniform"] == pytest.approx(np.average(plan.values, weights=plan.numel), rel=1e-5)


@pytest.mark.parametrize("part", ["weights", "cache"])
def test_a_plan_of_memory_without_one_of_its_parts_is_refused_where_it_is_read(plans, tmp_path, part):
    plan = plans["memory"]
    for parts in ({n: p for n, p in plan.payload.parts.items() if n != part}, {**plan.payload.parts, part: {"bytes": 1}}):
        path = zoo.saying(plan, parts=parts).save(tmp_path / "plan.json", overwrite=True)
        with pytest.raises(CorruptFile, match="bytes, bits and damage of the weights and of the cache"):
            Plan.load(path)
