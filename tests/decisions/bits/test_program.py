"""Plans of bits from invented damages: exact, within the budget, and never behind what needs no program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerbudget.compressors.formats import find_format
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.program import RULES, Table
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput, UnknownUnit
from layerbudget.plan import Plan
from layerbudget.plans.compare import diff_plans, sweep
from layerbudget.plans.explain import explain_plan
from layerbudget.records import Block, Module
from layerbudget.report.page import plan_details
from layerbudget.scores import Scores

NAMES = ["w2-g32", "w3-g32", "w4-g32", "w8-g32", "bf16"]


def record(layers=4, seed=0, gap=False):
    rng = np.random.default_rng(seed)
    parts = (("self_attn.v_proj", 32, 64), ("self_attn.o_proj", 64, 64), ("mlp.down_proj", 64, 96))
    modules = [Module(name=f"model.layers.{i}.{n}", d_out=a, d_in=b) for i in range(layers) for n, a, b in parts]
    blocks = [Block(name=m.name, modules=(m,)) for m in modules]
    size = [[find_format(n).bytes(m.d_out, m.d_in) for n in NAMES] for m in modules]
    damage = np.exp(rng.normal(size=(len(blocks), 1))) * np.array([1.0, 0.2, 0.05, 0.001, 0.0])
    damage = damage.tolist()
    if gap:
        damage[1][1] = None
    error = [[0.05 * (x or 0) for x in row] for row in damage]
    own = {"fixed": 1000, "family": "compressed-tensors", "runtime": "transformers", "method": "rtn"}
    rest = [[[e] for e in row] for row in error]
    choices = {"formats": NAMES, "size": size, "damage": damage, "error": error, "rest": rest, **own}
    gain = {b.name: row[0] for b, row in zip(blocks, damage, strict=True)}
    return Scores.from_values(blocks, gain, estimator="rounding", extra={"choices": choices})


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(2.6, 16), st.booleans(), st.sampled_from(RULES))
def test_every_rule_keeps_the_budget_and_none_beats_the_program(seed, bits, gap, rule):
    scores = record(seed=seed, gap=gap)
    plan, best = plan_bits(scores, bits=bits, rule=rule), plan_bits(scores, bits=bits)
    numel = sum(b.numel for b in plan.blocks)
    assert plan.budget["spent"] == plan.counts.sum() <= plan.budget["limit"] == int(bits * numel // 8)
    assert best.extra["predicted"] <= plan.extra["predicted"] + 1e-12
    assert all(best.extra["predicted"] <= row["predicted"] + 1e-12 for row in best.extra["baselines"].values())
    for block in plan.blocks:
        m = next(b for b in scores.blocks if b.name == block.name).modules[0]
        assert block.count == find_format(plan.extra["formats"][m.name]).bytes(m.d_out, m.d_in)
        assert block.value == pytest.approx(8 * block.count / block.numel)


def test_baselines_spend_what_they_can():
    scores = record(layers=12)
    for bits in (3.0, 3.6, 4.2, 5.0):
        limit = plan_bits(scores, bits=bits).budget["limit"]
        for rule in ("uniform", "mix", "ends"):
            assert plan_bits(scores, bits=bits, rule=rule).budget["spent"] > 0.97 * limit
    even = plan_bits(scores, bits=3.5, rule="uniform").extra["formats"]
    table = Table.of(scores)
    exact = int(table.size[:, 1].sum())
    same = plan_bits(scores, budget=f"{exact + 1000} bytes", rule="uniform")
    assert set(same.extra["formats"].values()) == {"w3-g32"} and same.budget["spent"] == exact
    assert set(even.values()) == {"w2-g32", "w3-g32"}
    ends = plan_bits(scores, budget=f"{exact + 1000 + 3072} bytes", rule="ends").extra["formats"]
    assert {n.split(".")[2] for n, f in ends.items() if f != "w3-g32"} == {"0", "11"}
    mix = plan_bits(scores, budget=f"{exact + 1000 + 3072} bytes", rule="mix").extra["formats"]
    assert {n.split(".")[-1] for n, f in mix.items() if f != "w3-g32"} <= {"v_proj", "down_proj"}


def test_bits_per_weight_lie_within_what_a_plan_can_have():
    for bits in (99, 0, -1, float("nan")):
        with pytest.raises(InvalidInput, match="above 0 and at most 16"):
            plan_bits(record(), bits=bits)


def test_a_plan_is_a_file_and_is_explained_compared_swept_and_reported(tmp_path):
    scores = record()
    plan = plan_bits(scores, bits=4.0)
    assert Plan.load(plan.save(tmp_path / "bits.json")).to_dict() == Plan.from_dict(plan.to_dict()).to_dict()
    said = " ".join(explain_plan(plan)["sentences"])
    assert "bits per weight" in said and "KKT" not in said and "No choice within" in said
    assert "no certificate" in " ".join(explain_plan(plan_bits(scores, bits=4.0, rule="uniform"))["sentences"])
    moved = diff_plans(plan, plan_bits(scores, bits=3.0))
    assert not moved["same"] and moved["moved"] > 0
    rows = sweep(scores, kind="bits", budgets=[3.0, 4.0, 5.0])["rows"]
    assert [r["front"] for r in rows] == [True] * 3
    assert rows[0]["value"] > rows[1]["value"] > rows[2]["value"] and rows[1]["value"] == plan.extra["predicted"]
    assert "Certificate" in plan_details(plan, "bits")
    broken = plan.to_dict()
    del broken["extra"]["formats"]
    with pytest.raises(CorruptFile, match="extra of this plan"):
        Plan.from_dict(broken)


def test_bad_input_is_one_sentence():
    scores = record()
    with pytest.raises(InfeasibleBudget, match=r"The smallest plan takes \d+ bytes \(2\.5"):
        plan_bits(scores, bits=2.0)
    with pytest.raises(InfeasibleBudget, match="0 bytes for 12 blocks"):
        plan_bits(scores, budget="10 bytes")
    with pytest.raises(UnknownUnit, match="not in bytes"):
        plan_bits(scores, budget="3M params")
    with pytest.raises(InvalidInput, match="either bits or a budget"):
        plan_bits(scores)
    with pytest.raises(InvalidInput, match="above 0 and at most 16"):
        plan_bits(scores, bits=float("nan"))
    with pytest.raises(InvalidInput, match="no rule 'mdl' for bits"):
        plan_bits(scores, bits=4, rule="mdl")
    with pytest.raises(InvalidInput, match="has no option exponent"):
        sweep(scores, kind="bits", budgets=[4.0], exponents=[2.0])
    with pytest.raises(InvalidInput, match="planned as they are"):
        plan_bits(scores, bits=4, group=32)
    with pytest.raises(InvalidInput, match="say nothing of formats"):
        plan_bits(Scores.from_values(scores.blocks, {b.name: 1.0 for b in scores.blocks}), bits=4)
