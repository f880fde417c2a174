"""Scores that come with the shapes of their blocks, and long tables."""

import csv
import json

import numpy as np
import pytest

from layerbudget.cli import main
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CorruptFile, InvalidInput
from layerbudget.records import Block, Module
from layerbudget.scores import Scores
from layerbudget.sensitivity.importing import COLUMNS, scores_with_shapes

K = 60


def blocks_of(inner: int) -> tuple[Block, ...]:
    """Blocks of one matrix each, or of several, some of them stacks of experts."""
    rng = np.random.default_rng(3)

    def matrix(name: str) -> Module:
        d_in, d_out, copies = (int(v) for v in (*rng.integers(4, 90, size=2), rng.integers(1, 4)))
        return Module(name=name, d_in=d_in, d_out=d_out, copies=copies, active=1)

    if inner == 1:
        return tuple(Block(name=f"layers.{i}.w", modules=(matrix(f"layers.{i}.w"),)) for i in range(K))
    return tuple(
        Block(name=f"layers.{i}", modules=tuple(matrix(f"layers.{i}.{j}") for j in range(i % 3 + 1))) for i in range(K)
    )


def scores_of(inner: int) -> Scores:
    gain = np.random.default_rng(4).lognormal(size=K)
    return Scores(estimator="x", blocks=blocks_of(inner), gain=(tuple(gain.tolist()),), model={"id": "m", "digest": "d"})


def table_files(folder, rows):
    """The same rows in every form that is read."""
    with (folder / "s.csv").open("w", newline="") as f:
        csv.writer(f).writerows([COLUMNS, *rows])
    (folder / "rows.json").write_text(json.dumps([dict(zip(COLUMNS, r, strict=True)) for r in rows]))
    return [folder / n for n in ("s.csv", "rows.json")]


def test_tables_with_shapes_need_no_model(tmp_path, capsys):
    rows = [(f"layers.{i}", 1.0 + i % 5, 30 + i, 40) for i in range(20)]
    found = [scores_with_shapes(f) for f in table_files(tmp_path, rows)]
    assert all(s.blocks == found[0].blocks and s.gain == found[0].gain for s in found)
    assert found[0].blocks[3] == Block(name="layers.3", modules=(Module(name="layers.3", d_in=33, d_out=40),))
    counts = []
    for file in table_files(tmp_path, rows):
        assert main(["plan", "sparsity", str(file), "--json"]) == 0
        counts.append([b["count"] for b in json.loads(capsys.readouterr().out)["blocks"]])
        assert main(["plan", "ranks", str(file), "--mean-rank", "4", "--json"]) == 0
        capsys.readouterr()
    assert counts == [plan_sparsity(found[0]).counts.tolist()] * 2


@pytest.mark.parametrize(
    "row", [("a", float("nan"), 3, 3), ("a", 1.0, 0, 3), ("a", 1.0, 2.5, 3), ("b", 1.0, 3, 3), ("", 1, 3, 3)]
)
def test_broken_tables_are_one_sentence(tmp_path, row):
    with (tmp_path / "s.csv").open("w", newline="") as f:
        csv.writer(f).writerows([COLUMNS, ("b", 1.0, 3, 3), row])
    with pytest.raises((CorruptFile, InvalidInput)):
        scores_with_shapes(tmp_path / "s.csv")


def test_a_column_that_is_not_read_is_refused_beside_shapes(tmp_path):
    (tmp_path / "s.csv").write_text("name,score,d_in,d_out,numel,orientation\nb,1,3,3,9,redundancy\n")
    with pytest.raises(InvalidInput, match=r"has the column orientation, .* layerbudget score MODEL --import FILE"):
        scores_with_shapes(tmp_path / "s.csv")


def test_a_long_table_is_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("layerbudget.cli.display.FEW", 6)
    scores_of(1).save(tmp_path / "scores.json")
    assert main(["plan", "sparsity", str(tmp_path / "scores.json")]) == 0
    shown = capsys.readouterr().out
    assert f"... {K - 6} more" in shown and "layers.59.w" in shown and "layers.30.w" not in shown
