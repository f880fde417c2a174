"""Large plans are laid out in one walk over their blocks, and not at all where JSON was asked for."""

import json

from layerbudget.cli import main
from layerbudget.records import Block, Module
from layerbudget.reporting.tables import grid_of
from layerbudget.scores import Scores


def blocks(count, matrices=1):
    made = []
    for i in range(count):
        modules = tuple(Module(name=f"model.layers.{i}.m{j}", d_in=4, d_out=4) for j in range(matrices))
        made.append(Block(name=f"model.layers.{i}", modules=modules))
    return tuple(made)


def test_a_grid_is_whole_where_every_row_is_one_block():
    assert grid_of(blocks(3, 2)).whole
    single = tuple(Block(name=m.name, modules=(m,)) for b in blocks(3, 2) for m in b.modules)
    assert not grid_of(single).whole and len(grid_of(single).cells) == 6


def test_many_rows_are_laid_out():
    grid = grid_of(blocks(20_000))
    assert grid.whole and len(grid.rows) == 20_000


def test_json_draws_no_table(tmp_path, capsys):
    many = blocks(500)
    Scores.from_values(many, {b.name: 1.0 + i for i, b in enumerate(many)}, estimator="own").save(tmp_path / "s.json")
    assert (
        main(["plan", "sparsity", str(tmp_path / "s.json"), "--sparsity", "0.5", "--json", "-o", str(tmp_path / "p.json")]) == 0
    )
    out = capsys.readouterr()
    assert len(json.loads(out.out)["blocks"]) == 500 and "layer" not in out.err.splitlines()[0].split()[:1]
    assert len(out.err.splitlines()) < 30


def test_columns_stand_in_the_order_in_which_a_layer_runs_them():
    names = [f"model.layers.0.{n}" for n in ("mlp.down_proj", "mlp.gate_proj", "mlp.norm_like", "mlp.up_proj")]
    names += [f"model.layers.0.self_attn.{n}_proj" for n in "koqv"]
    found = grid_of([Block(name=n, modules=(Module(name=n, d_in=2, d_out=2),)) for n in names])
    assert [c.removesuffix("_proj") for c in found.columns] == ["q", "k", "v", "o", "gate", "up", "down", "norm_like"]
    for (_, column), k in found.cells.items():
        assert names[k].endswith(found.columns[column])
