"""Why every matrix has its format: in the plan, from its scores, and in what is shown, exported and reported."""

from __future__ import annotations

import csv
import dataclasses
import io
import re

import numpy as np
import pytest
from tests import zoo
from tests.cli.helpers import command_result
from tests.decisions.formats.test_program import gguf_record, mix_bytes, record

from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.formats.reasons import reasons
from layerbudget.decisions.formats.table import FormatTable
from layerbudget.decisions.memory.parts import parts_of
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.errors import CorruptFile, InvalidInput, ModelMismatch
from layerbudget.exports import blocks_csv
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.page import build_page, plan_details
from layerbudget.reporting.sweep import diff_plans, sweep
from layerbudget.reporting.verdict import comparison_table, verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scores and two plans of them as files."""
    place, scores = tmp_path_factory.mktemp("reasons"), gguf_record()
    scores.save(place / "sizes.json")
    plan_bits(scores, like="Q4_K_M").save(place / "plan.json")
    plan_bits(scores, like="Q3_K_M").save(place / "less.json")
    return place


@pytest.mark.parametrize("forbid", [[], ["slow-cpu", "Q4_K"]])
def test_the_next_formats_are_those_of_a_search_through_all(forbid):
    """Smaller: least damage among fewer bytes; larger: fewest bytes among less damage, of the formats that are allowed."""
    scores = gguf_record()
    plan, table = plan_bits(scores, like="Q4_K_M", forbid=forbid), FormatTable.of(scores)
    gone = {f for f in table.formats if f.startswith("IQ2") or f.startswith("IQ3") or f == "Q4_K"} if forbid else set()
    rows = reasons(Plan.from_dict(plan.to_dict()))
    assert [r["name"] for r in rows] == plan.names and sum(r["bytes"] for r in rows) == plan.budget["spent"]
    assert sum(r["damage"] for r in rows) == pytest.approx(plan.payload.predicted, rel=1e-4)
    for k, row in enumerate(rows):
        every = [(f, int(table.size[k, j]), table.damage[k, j]) for j, f in enumerate(table.formats) if table.has[k, j]]
        allowed = [e for e in every if e[0] not in gone]
        own = next(e for e in allowed if e[0] == row["format"])
        below, above = [e for e in allowed if e[1] < own[1]], [e for e in allowed if e[1] > own[1] and e[2] < own[2]]
        for found, wanted in (
            (row["smaller"], min(below, key=lambda e: e[2], default=None)),
            (row["larger"], min(above, key=lambda e: e[1:], default=None)),
        ):
            assert (found is None) == (wanted is None)
            assert found is None or tuple(found.values()) == (wanted[0], wanted[1], pytest.approx(wanted[2], rel=1e-4))
    told = reasons(plan, scores)
    assert [{k: v for k, v in r.items() if k != "error"} for r in told] == rows
    assert [r["error"] for r in told] == pytest.approx([0.05 * r["damage"] for r in rows], rel=0.01)


def test_a_step_down_loses_more_than_the_price_and_a_step_up_saves_less():
    """What the certificate promises, at the budget where the filling leaves nothing over."""
    scores = gguf_record()
    plan = plan_bits(scores, like="Q4_K_M")
    exact = plan_bits(scores, budget=f"{plan.budget['spent'] + 5096} bytes")
    rows = reasons(exact)
    slack = exact.payload.predicted - exact.certificate["relaxed"]
    for row in rows:
        for name in ("smaller", "larger"):
            if other := row[name]:
                change, size = other["damage"] - row["damage"], other["bytes"] - row["bytes"]
                assert change + exact.certificate["price"] * size >= -slack - 1e-4 * abs(change), row["name"]


def test_plans_without_reasons_and_broken_ones():
    scores = record()
    plan = plan_bits(scores, bits=4.0)
    old = plan.with_payload(reasons=None)
    assert "damage" not in reasons(old)[0] and reasons(old, scores)[0]["damage"] == reasons(plan)[0]["damage"]
    rows = list(csv.DictReader(io.StringIO(blocks_csv(old))))
    assert {r["damage"] for r in rows} == {""} and [r["format"] for r in rows] == [r["format"] for r in reasons(plan)]
    assert all(f"<td>{r['format']}</td>" in plan_details(old, "x") for r in rows)
    short = dataclasses.replace(plan.payload.reasons, damage=[1.0])
    with pytest.raises(CorruptFile, match="not of its blocks"):
        reasons(zoo.saying(plan, reasons=short))
    with pytest.raises(ModelMismatch, match="from other scores"):
        reasons(plan, record(seed=1))
    with pytest.raises(InvalidInput, match="tokens has no meaning"):
        explain_plan(plan, scores, tokens=9)


def test_the_words_name_types_and_add_up_the_bytes():
    scores = gguf_record()
    plan = plan_bits(scores, like="Q4_K_M")
    said = " ".join(explain_plan(plan).sentences)
    many = dict(zip(*np.unique(list(plan.payload.formats.values()), return_counts=True), strict=True))
    assert {k: int(n) for n, k in re.findall(r"(\d+) ha(?:ve|s) (\w+)", said)} == many
    assert "1 have" not in said and "1 has" in said
    assert "Most goes to" not in said and "standard deviation" not in said
    parts = re.search(
        r"Bytes: ([\d,]+) of the planned matrices \(limit ([\d,]+)\) \+ ([\d,]+) .*? \+ ([\d,]+) .*? = ([\d,]+) bytes", said
    )
    own, limit, fixed, head, whole = (int(v.replace(",", "")) for v in parts.groups())
    assert own == plan.counts.sum() and limit == plan.budget["limit"] and own + fixed + head == whole == own + 5096
    assert not re.search(r"\d{5}", re.sub(r"\d+\.\d+(e-\d+)?|e-\d+", "", said)), "thousands are separated"
    assert "in as many bytes" not in verdict(plan) and "within the same limit" in verdict(plan)


def test_an_example_of_a_change_fits_the_limit():
    scores, seen = record(), set()
    for bits in (3.3, 3.6, 4.0, 4.7):
        plan = plan_bits(scores, bits=bits)
        left, ties = plan.budget["limit"] - plan.budget["spent"], plan.payload.near_ties
        said = " ".join(explain_plan(plan).sentences)
        fitting = [f"{t['instead']} for {t['chosen']} in {t['block']}." for t in ties if t["bytes"] <= left]
        assert ("for example" in said) == bool(fitting) and (not fitting or fitting[0] in said)
        seen.add(bool(ties) and bool(fitting))
    assert True in seen


def test_the_table_beside_the_verdict_has_bytes_and_both_comparisons():
    plan = plan_bits(gguf_record(), like="Q4_K_M")
    title, head, rows = comparison_table(plan)
    assert head == ("plan", "bytes of the file", "predicted", "against uniform", "against Q4_K_M")
    assert "ends: first and last layers" in title and "predicted" in title
    found, payload = {row[0]: row for row in rows}, plan.payload
    own, mix = found["this plan"], found["llama.cpp's Q4_K_M"]
    assert own[1] == f"{plan.budget['spent'] + 5096:,}" and mix[1] == f"{plan.budget['limit'] + 5096:,}" and mix[4] == "–"
    for cell, name in ((own[3], "uniform"), (own[4], "mix")):
        other = payload.baselines[name]["predicted"]
        assert payload.baselines[name]["difference_error"] > payload.predicted_error  # of the worse choice most of it
        assert cell.startswith(f"{payload.predicted / other - 1:+.1%} +-")
        assert float(re.search(r"\+-([\d.]+)%", cell)[1]) == pytest.approx(
            200 * payload.baselines[name]["difference_error"] / other, abs=0.51
        )
    rows = {n: {"kl": v, "difference": 0.1, "difference_error": 0.03} for n, v in (("uniform", 0.4), ("mix", 0.2))}
    check = {"rows": {"exact": {"kl": 0.1}, **rows}, "verdict": "x", "taken": "exact"}
    title, head, rows = comparison_table(zoo.saying(plan, check=check))
    assert "measured on held-out text, +- two standard errors" in title and head[2] == "measured"
    assert rows[0][3:] == ("-75.0% +-15%", "-50.0% +-30%") and rows[1][3:] == ("–", "+100.0%")
    check["rows"]["mix"] |= {"kl": 0.9, "difference": 0.8, "difference_error": 0.1}  # no damage is below none
    title, _, rows = comparison_table(zoo.saying(plan, check=check))
    assert rows[0][4] == "-88.9% (to -67%)" and "+- two standard errors (to: their upper end)" in title


def test_exports_and_pages_say_types_and_damages(folder, tmp_path):
    plan = Plan.load(folder / "plan.json")
    rows, why = list(csv.DictReader(io.StringIO(blocks_csv(plan)))), reasons(plan)
    for row, own in zip(rows, why, strict=True):
        assert (row["block"], row["format"], float(row["damage"])) == (own["name"], own["format"], own["damage"])
        assert row["larger_format"] == (own["larger"] or {"format": ""})["format"]
        assert row["smaller_bytes"] == str((own["smaller"] or {"bytes": ""})["bytes"])
    plan.save(tmp_path / "plan.json")
    page = build_page(tmp_path)
    assert all(f"<td>{kind}</td>" in page for kind in set(plan.payload.formats.values()))
    assert f'"formats": ["{why[0]["format"]}"' in page and f'"damage": [{why[0]["damage"]}' in page


def test_a_difference_names_types_and_shows_what_differs_alone(folder):
    first, second = Plan.load(folder / "plan.json"), Plan.load(folder / "less.json")
    result, shown = command_result("explain", "diff", folder / "plan.json", folder / "less.json", "--table")
    assert result == command_result("explain", "diff", folder / "plan.json", folder / "less.json")[0]
    kinds = [p.payload.formats for p in (first, second)]
    differ = {n for n in first.names if kinds[0][n] != kinds[1][n]}
    assert {r["name"] for r in diff_plans(first, second)["blocks"] if r["first_format"] != r["second_format"]} == differ
    assert all((f"│ {name} " in shown) == (name in differ) for name in first.names)
    less = first.budget["spent"] - second.budget["spent"]
    assert (
        f"{len(differ)} of {len(first.names)} blocks differ" in shown
        and f"takes {less:,} bytes of the planned matrices less" in shown
    )
    assert "blocks are equal" in command_result("explain", "diff", folder / "plan.json", folder / "plan.json")[1]


def test_explain_shows_the_types_and_why(folder):
    result, shown = command_result("explain", folder / "plan.json")
    plan = Plan.load(folder / "plan.json")
    assert result["matrices"] == reasons(plan) and "layer" in shown and "--table shows its damage" in shown
    assert verdict(plan) in shown and "against Q4_K_M" in shown
    _, told = command_result("explain", folder / "plan.json", "--table")
    _, measured = command_result("explain", "plan", folder / "plan.json", "--scores", folder / "sizes.json", "--table")
    price = plan.certificate["price"]
    for row in result["matrices"]:
        name = re.sub(r"^model\.(layers\.)?|(?<=\d\.)(self_attn|mlp)\.", "", row["name"])
        line, other = (next(text for text in each.splitlines() if f"│ {name} " in text) for each in (told, measured))
        assert f" {row['format']} " in line and f"{row['damage']:.2e}" in line and "+-10%" in other
        for name in ("smaller", "larger"):
            if found := row[name]:
                times = abs((found["damage"] - row["damage"]) / (found["bytes"] - row["bytes"])) / price
                assert f"{found['format']} x{times:.2g} " in line
    assert "Why: at this limit a KiB" in told


def test_scores_that_are_no_gains_are_refused_with_a_remedy(tmp_path):
    """Weights and cache together hold no reasons, and nobody asked for codelengths: --scores is refused, and not needed."""
    scores = zoo.fit_scores()
    scores.save(tmp_path / "fit-scores.json")
    plan_memory(scores, memory="994 KB", context=64).save(tmp_path / "fit.json")
    with pytest.raises(InvalidInput, match=r"^A plan of memory needs no scores here\. Leave out --scores"):
        command_result("explain", "plan", tmp_path / "fit.json", "--scores", tmp_path / "fit-scores.json")
    bits = parts_of(Plan.load(tmp_path / "fit.json"))["bits"]
    with pytest.raises(InvalidInput, match=r"hold no damages of formats\. Leave out --scores"):
        explain_plan(bits, zoo.scores([1.0, 2.0]))
    result, shown = command_result("explain", "plan", tmp_path / "fit.json")
    assert result["matrices"] and "damage" not in result["matrices"][0] and "layer" in shown
    assert "the weights as bf16" in shown and "llama.cpp" not in shown  # a mix of transformers is none of llama.cpp's


def test_a_sweep_shows_mixes_in_use_and_the_smallest_plan_that_is_as_good(folder):
    result, shown = command_result("explain", "sweep", folder / "sizes.json", "--kind", "bits")
    rows = {r["budget"]: r for r in result["rows"]}
    assert "MXFP4_MOE" not in rows and all(f"│ {mix} " in shown for mix in ("Q3_K_M", "Q4_K_M", "Q5_K_M", "Q8_0"))
    assert (
        "None" not in shown
        and len(rows) > shown.count("│ Q") + shown.count("│ IQ")
        and "other sizes of mixes: --table" in shown
    )
    line = next(text for text in shown.splitlines() if "│ Q4_K_M " in text)
    own, scores = rows["Q4_K_M"], gguf_record()
    assert f"{own['value'] / own['mix_value'] - 1:+.0%}" in line and own["mix_bytes"] == mix_bytes(scores, "Q4_K_M")[0] + 5096
    best = min((r for r in rows.values() if r["value"] <= own["mix_value"]), key=lambda r: r["spent"])
    assert f"a file of {best['bytes']:,} bytes" in shown and f"--like {best['budget']} -o plan.json" in shown
    missing = [m for m, r in rows.items() if r["mix"] != m]
    some = [missing[0], "Q4_K_M", "5"]
    told = command_result("explain", "sweep", folder / "sizes.json", "--kind", "bits", "--budgets", *some)[1]
    lines = [text for text in told.splitlines() if text.startswith("│ ")]
    assert ["not measured" in text for text in lines] == [True, False, False] and "Not measured: the mix has types" in told


def test_a_sweep_of_other_formats_says_where_damage_rises_fastest(tmp_path):
    scores = record()
    scores.save(tmp_path / "formats.json")
    budgets = [3.0, 4.0, 5.0, 8.0]
    shown = command_result("explain", "sweep", tmp_path / "formats.json", "--kind", "bits", "--budgets", *budgets)[1]
    rows = sweep(scores, kind="bits", budgets=budgets)["rows"]
    steep = [np.log(a["value"] / b["value"]) / np.log(b["spent"] / a["spent"]) for a, b in zip(rows, rows[1:], strict=False)]
    k = int(np.argmax(steep))
    assert f"from {rows[k + 1]['bits']:.4g} bits per weight to {rows[k]['bits']:.4g}" in shown and "mix" not in shown
    one = command_result("explain", "sweep", tmp_path / "formats.json", "--kind", "bits", "--budgets", 4)[1]
    assert f"{rows[1]['value']:.3g} nats per token are predicted" in one and "Next:" not in one
