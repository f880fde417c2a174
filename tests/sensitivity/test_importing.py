"""Own scores from files: every accepted form, every refusal."""

from __future__ import annotations

import json

import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.errors import CorruptFile, InvalidInput, NotFound
from layerbudget.models.blocks import partition
from layerbudget.scores import Scores
from layerbudget.sensitivity.importing import import_scores


@pytest.fixture
def blocks(mistral):
    return partition(mistral)


def test_every_form_gives_the_same_record(tmp_path, blocks):
    values = {b.name: 1.5 + i for i, b in enumerate(blocks)}
    shuffled = dict(reversed(values.items()))
    (tmp_path / "a.json").write_text(json.dumps(shuffled))
    (tmp_path / "c.json").write_text(json.dumps([{"name": k, "score": v} for k, v in shuffled.items()]))
    (tmp_path / "d.csv").write_text("layer,value,numel\n" + "".join(f"{k},{v},7\n" for k, v in shuffled.items()))
    for name in ("a.json", "c.json", "d.csv"):
        scores = import_scores(tmp_path / name, blocks, orientation="redundancy")
        assert scores.values().tolist() == [1.5, 2.5, 3.5] and scores.orientation == "redundancy"


def test_matrix_scores_are_averaged_over_blocks(tmp_path, blocks):
    values = {m.name: float(i) for i, m in enumerate(m for b in blocks for m in b.modules)}
    (tmp_path / "alpha.json").write_text(json.dumps(values))
    assert import_scores(tmp_path / "alpha.json", blocks).values().tolist() == [3.0, 10.0, 17.0]


def test_own_score_files_pass_through(tmp_path, blocks):
    (tmp_path / "a.json").write_text(json.dumps({b.name: 1.0 for b in blocks}))
    scores = import_scores(tmp_path / "a.json", blocks)
    scores.save(tmp_path / "scores.json")
    assert import_scores(tmp_path / "scores.json", blocks) == scores


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.json", "{", CorruptFile, "does not parse"),
        ("a.json", "[1, 2, 3]", InvalidInput, "without names"),
        ("a.json", '{"x": 1}', InvalidInput, "unknown blocks"),
        ("a.json", '{"x": "high"}', InvalidInput, "finite numbers"),
        ("a.csv", "name,score\nx,1\nx,2\n", InvalidInput, "2 times"),
        ("a.csv", "foo,bar\n1,2\n", InvalidInput, "no name column"),
        ("a.csv", "name,score\n", CorruptFile, "no rows"),
        ("a.json", "{}", CorruptFile, "no rows"),
        ("a.txt", "1", InvalidInput, "come as"),
        ("a.csv", "name,score,orientation\nx,1,redundancy\n", InvalidInput, "column orientation, .*--orientation redundancy"),
        ("a.csv", "name,layer,score\nx,1,1\n", InvalidInput, "column layer, which is not read. Read are name, score"),
        ("a.csv", "name,score,score\nx,1,2\n", CorruptFile, "column score twice"),
        ("a.csv", "name,score\nx,1,2\n", CorruptFile, "more cells"),
        ("a.json", '{"x": 1, "x": 2}', CorruptFile, "key x twice"),
        ("a.json", '[{"name": "x", "score": true}]', InvalidInput, "is True.*finite numbers"),
    ],
)
def test_refusals(tmp_path, blocks, name, text, error, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        import_scores(tmp_path / name, blocks)


def test_infinite_and_missing(tmp_path, blocks):
    (tmp_path / "a.json").write_text(json.dumps({b.name: float("inf") for b in blocks}))
    with pytest.raises(CorruptFile, match="does not parse"):  # JSON knows no infinity
        import_scores(tmp_path / "a.json", blocks)
    (tmp_path / "a.csv").write_text("name,score\n" + "".join(f"{b.name},inf\n" for b in blocks))
    with pytest.raises(InvalidInput, match="finite"):
        import_scores(tmp_path / "a.csv", blocks)
    with pytest.raises(NotFound):
        import_scores(tmp_path / "none.json", blocks)


def test_a_table_saved_by_a_spreadsheet_is_read(tmp_path, blocks):
    rows = "name,score\n" + "".join(f"{b.name},{i + 1}\n" for i, b in enumerate(blocks))
    (tmp_path / "a.csv").write_text(rows, encoding="utf-8-sig")
    assert import_scores(tmp_path / "a.csv", blocks).values().tolist() == [1.0, 2.0, 3.0]
    (tmp_path / "b.csv").write_bytes(rows.encode("utf-16"))
    with pytest.raises(CorruptFile):
        import_scores(tmp_path / "b.csv", blocks)


def test_a_scores_file_of_other_blocks_is_refused(tmp_path, blocks, mistral):
    path = Scores.from_values(blocks, {b.name: 1.0 for b in blocks}).save(tmp_path / "scores.json")
    with pytest.raises(InvalidInput, match="partition"):
        import_scores(path, partition(mistral, by="linear"))


def test_numbers_of_layers_are_names(tmp_path, capsys):
    """``layer,score`` with 0, 1, 2, ... in any order; a number that no block has, or several, is refused by number."""
    model = zoo.mistral()
    blocks = partition(model)
    order = list(range(len(blocks)))[::-1]
    (tmp_path / "a.csv").write_text("layer,score\n" + "".join(f"{i},{i + 0.5}\n" for i in order))
    assert import_scores(tmp_path / "a.csv", blocks).values().tolist() == [i + 0.5 for i in range(len(blocks))]
    with pytest.raises(InvalidInput, match="scores layer 2, which is 7 blocks"):
        import_scores(tmp_path / "a.csv", partition(model, "linear", exclude="lm_head"))
    (tmp_path / "b.csv").write_text("layer,score\n99,1\n")
    with pytest.raises(InvalidInput, match="scores layer 99, which is no block"):
        import_scores(tmp_path / "b.csv", blocks)
    model.save_pretrained(tmp_path / "model")
    words = ["score", str(tmp_path / "model"), "--import", str(tmp_path / "a.csv"), "-o", str(tmp_path / "s.json"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["gain"] == [[i + 0.5 for i in range(len(blocks))]]


def test_scores_without_a_positive_number_are_sent_to_a_rule_that_reads_differences(tmp_path, capsys):
    model, scores, out = zoo.mistral(), str(tmp_path / "s.json"), str(tmp_path / "plan.json")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "a.csv").write_text("layer,score\n" + "".join(f"{i},{-i - 1}\n" for i in range(len(partition(model)))))
    assert main(["score", str(tmp_path / "model"), "--import", str(tmp_path / "a.csv"), "-o", scores]) == 0
    assert "No score is above zero" in (said := capsys.readouterr().out) and said.rstrip().endswith("--rule owl -o plan.json")
    assert main(["plan", "sparsity", scores, "--sparsity", "60%", "-o", out]) == 2
    assert "--rule owl" in (said := capsys.readouterr().err) and "more samples" not in said
    assert main(["plan", "sparsity", scores, "--sparsity", "60%", "--rule", "owl", "-o", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hyperparameters"]["sparsity"] == 0.6
    assert main(["plan", "sparsity", scores, "--sparsity", "much"]) == 2
    assert "Did you mean" not in capsys.readouterr().err
