"""Every table and figure of the paper: held as data, consistent with itself, and named by the listing."""

import json

import numpy as np
import pytest

from layerbudget.errors import AlreadyExists, InvalidInput
from paper import catalogue, outcome, published, significance


def test_every_table_and_figure_is_there():
    names = list(published.published())
    assert names == [f"figure-{i}" for i in range(1, 6)] + [f"table-{i}" for i in range(1, 14)]
    for what in published.published().values():
        assert what["number"] and what["title"] and what["label"] and what["unit"] and what["origin"]
        for values in what["rows"].values():
            assert set(values) == set(what["columns"])


@pytest.mark.parametrize("name", ["table-1", "table-2", "table-5", "table-6", "figure-4", "figure-5"])
def test_averages_are_those_of_the_rows(name):
    rows = published.item(name)["rows"]
    average = next(r for r in rows if r.startswith("Average"))
    for title in published.item(name)["columns"]:
        mean = float(np.mean(list(published.column(name, title).values())))
        if (name, title) == ("figure-5", "SparseGPT, kappa 4"):  # its note says so
            assert abs(rows[average][title] - mean) > 0.03
            continue
        assert rows[average][title] == pytest.approx(mean, abs=0.0101), title


def test_the_notes_tell_what_does_not_fit():
    table, figure = published.item("table-2"), published.item("figure-5")
    assert table["rows"]["CommonsenseQA"]["SparseGPT"] == table["rows"]["CoLA"]["SparseGPT"]
    assert figure["rows"]["CommonsenseQA"]["SparseGPT, kappa 1"] != table["rows"]["CommonsenseQA"]["SparseGPT"]
    means = {c: np.mean(list(published.column("table-7", c).values())) for c in published.item("table-7")["columns"]}
    assert means["MoLA 5555"] > means["MDL"]  # what its note says
    drift = published.column("table-3", "drift")
    assert max(drift.values()) > 0.25  # two sum-one vectors of 28 near-equal scores are never so far apart


def test_thirty_mlp_entries():
    entries = published.mlp_entries()
    assert sum(len(m) for rows in entries.values() for m in rows.values()) == 30
    assert entries[2.0]["grad_norm"]["spearman"] == (0.929, 0.034)


def test_published_p_values_are_one_sided():
    found = significance.run_tests()
    assert [round(r["one_sided"], 4) for r in found.rows] == [0.1906, 0.1917, 0.4162]
    assert [round(r["two_sided"], 3) for r in found.rows] == [0.381, 0.383, 0.832]
    assert all(c.met for c in found.claims)


def test_every_item_has_a_row_with_a_command_or_a_reason():
    rows = catalogue.listing()
    assert [r["item"] for r in rows] == list(published.published())
    assert all((r["command"] is None) == (r["reason"] is not None) for r in rows)
    for entry in catalogue.EXPERIMENTS:
        assert callable(entry.open()) and set(entry.items) <= set(published.published())
    names = {e.name for e in catalogue.EXPERIMENTS}
    assert {n.removesuffix(" --paper gemma") for n in catalogue.small_results()} <= names
    for found in catalogue.small_results().values():
        assert found["seconds"] >= 0 and found["finding"] and found["shape"]


def test_a_run_leaves_its_files(tmp_path):
    found = significance.run_tests()
    folder = outcome.leave(found, tmp_path / "tests")
    record = json.loads((folder / "result.json").read_text())
    assert record["environment"]["numpy"] and record["shape"] == found.line and record["shape"].startswith("met: p = 0.1906")
    assert (folder / "table.csv").read_text().count("\n") == 4
    assert (folder / "figure.png").stat().st_size > 1000
    with pytest.raises(AlreadyExists):
        outcome.leave(found, folder)


def test_unknown_names():
    for call in (published.item, catalogue.find_experiment):
        with pytest.raises(InvalidInput, match="table-14"):
            call("table-14")
