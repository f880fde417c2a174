import dataclasses
import io

import pytest
from rich.console import Console
from tests import zoo

from layerbudget.canonical import dumps
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CorruptFile, NotFound
from layerbudget.reporting.data import charts_of
from layerbudget.reporting.figures import overview, save_figure
from layerbudget.reporting.page import build_page, write_report
from layerbudget.reporting.records import cards_of, commands_of, gather
from layerbudget.reporting.tables import plan_table, scores_table
from layerbudget.storage.parts import Cells
from layerbudget.storage.writing import write_text

ROWS = [
    {"model": "dense", "target": None, "sparsity": 0.0, "perplexity": 3.0, "standard_error": 0.1, "vs_uniform": None},
    {"model": "uniform", "target": 0.5, "sparsity": 0.5, "perplexity": 4.0, "standard_error": 0.1, "vs_uniform": None},
]


def test_page_holds_scores_plan_results_and_figures(tmp_path):
    scores = zoo.scores([1.0, 2.0, 3.0])
    plan = plan_sparsity(scores, sparsity=0.5)
    scores.save(tmp_path / "scores.json")
    plan.save(tmp_path / "plan.json")
    write_text(tmp_path / "result.json", dumps({"rows": ROWS, "verdict": "cannot be told apart"}))
    overview(scores, {"gain, per layer": plan}, ROWS, tmp_path / "overview.png")
    text = build_page(tmp_path)
    for part in ("model.layers.2", "Certificate", "cannot be told apart", "data:image/png;base64,", "stored densely"):
        assert part in text
    assert "http://" not in text and "https://" not in text, "the page must be self-contained"
    assert write_report(tmp_path, tmp_path / "r.html").read_text() == text


def test_a_page_says_what_every_plan_of_a_folder_decides_and_which_command_made_it(tmp_path):
    for name, share in (("plan", 0.5), ("smaller", 0.75)):
        scores = zoo.scores([1.0, 2.0, 3.0 + share], made_by=f"layerbudget score {name}")
        made = dataclasses.replace(plan_sparsity(scores, sparsity=share), made_by=f"layerbudget plan {name}")
        made.save(tmp_path / f"{name}.json")
        scores.save(tmp_path / f"{name}-scores.json")
    text = build_page(tmp_path)
    assert text.count("Other plans of this folder") == 1 and "smaller.json: 75% sparsity for" in text
    said = [f"layerbudget {verb} {name}" for name in ("plan", "smaller") for verb in ("score", "plan")]
    assert [line for line in commands_of(gather(tmp_path))] == said and "\n".join(said) in text
    (tmp_path / "smaller.json").unlink()
    assert "Other plans of this folder" not in build_page(tmp_path)


def test_a_plan_of_bits_that_measured_lacks_no_scores(tmp_path):
    """Its page said that the scores are not in the folder, which nobody had kept."""
    data = zoo.tokens(4, 12)
    plan = plan_bits(zoo.build("llama"), data, bits=6, draws=2)
    plan.save(tmp_path / "plan.json")
    found = gather(tmp_path)
    assert plan.payload.passes == 5 and ("forward equivalents of planning", "5") in cards_of(found)
    assert plan.scores_digest is not None and not found.left_out


def test_page_of_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(NotFound, match="holds no results"):
        build_page(tmp_path)


def test_figures_are_written_and_deterministic(tmp_path):
    plan = plan_sparsity(zoo.scores([1.0, 2.0, 3.0]), sparsity=0.5)
    for name in ("a", "b"):
        overview(zoo.scores([1.0, 2.0, 3.0]), {"gain, per layer": plan}, ROWS, tmp_path / f"{name}.png")
    for suffix in ("png", "svg"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert "<text" in (tmp_path / "a.svg").read_text()  # words, not outlines


def test_a_page_passes_over_other_json_and_names_what_does_not_parse(tmp_path):
    zoo.scores([1.0, 2.0, 3.0]).save(tmp_path / "scores.json")
    (tmp_path / "number.json").write_text("5")
    assert "model.layers.2" in build_page(tmp_path)
    (tmp_path / "broken.json").write_text("nothing")
    with pytest.raises(CorruptFile, match="broken.json"):
        build_page(tmp_path)


def test_a_figure_that_fails_leaves_no_file(tmp_path):
    class Broken:
        def savefig(self, *_, **__):
            raise ValueError("no")

    with pytest.raises(ValueError):
        save_figure(Broken(), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_tables_show_whole_names_of_layers_on_a_narrow_terminal():
    scores = zoo.scores([1.0] * 12)
    for table in (scores_table(scores), plan_table(plan_sparsity(scores, sparsity=0.5))):
        out = io.StringIO()
        Console(file=out, width=52).print(table)
        assert all(f"{name} " in out.getvalue() for name in scores.names)


def test_a_page_takes_the_scores_that_its_plan_was_made_from(tmp_path):
    """Not the first file of the folder by name; where they are missing, none."""
    others = dataclasses.replace(zoo.scores([3.0, 2.0, 1.0]), estimator="rank-gain", made_by="layerbudget score demo")
    mine = dataclasses.replace(zoo.scores([1.0, 2.0, 3.0]), estimator="imported", made_by="layerbudget score --import m.csv")
    plan = dataclasses.replace(plan_sparsity(mine, sparsity=0.5, rule="owl"), made_by="layerbudget plan sparsity mine.json")
    others.save(tmp_path / "gains.json")
    plan.save(tmp_path / "owlmine.json")
    found, said = gather(tmp_path), "The scores of this plan are not in this folder."
    assert found.scores is None and "gains" not in charts_of(found) and build_page(tmp_path).count(said) == 2
    assert commands_of(found) == [f"# {said}", plan.made_by] and "scores" not in dict(cards_of(found))
    mine.save(tmp_path / "mine.json")
    found = gather(tmp_path)
    assert commands_of(found) == [mine.made_by, plan.made_by] and ("scores", "imported") in cards_of(found)
    assert charts_of(found)["gains"]["gain"] == mine.gain[0] and said not in (page := build_page(tmp_path))
    assert "gains.json: scores by rank-gain" in page and "mine.json: scores by imported" in page


def test_a_page_of_a_comparison_that_was_stopped_says_how_far_it_is(tmp_path):
    cells = Cells(tmp_path / "cells")
    cells.expect([{"i": 0}, {"i": 1}], "layerbudget compare demo --out here")
    cells.get({"i": 1}, lambda: {"x": 1})
    told = "not finished: 1 of 2 plans are measured.*Run the same compare command again: layerbudget compare demo"
    with pytest.raises(NotFound, match=told):
        build_page(tmp_path)
    cells.get({"i": 0}, lambda: {"x": 1})
    with pytest.raises(NotFound, match="^All 2 plans of this comparison are measured, but its result is not in"):
        build_page(tmp_path)
