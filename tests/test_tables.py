"""Blocks as columns: the same numbers as an object per block, in every program and through every file."""

import csv
import dataclasses
import json

import numpy as np
import pytest

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decisions.experts.plan import plan_experts
from layerbudget.decisions.ranks.plan import plan_ranks
from layerbudget.decisions.ranks.serving import serving_hint
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CorruptFile, InvalidInput
from layerbudget.exports.tables import blocks_csv, layers_json
from layerbudget.plan import Plan
from layerbudget.plan_blocks import PlanTable
from layerbudget.plans.compare import diff_plans
from layerbudget.plans.explain import explain_plan
from layerbudget.records import Block, Module
from layerbudget.scores import Scores
from layerbudget.sensitivity.with_shapes import COLUMNS, scores_with_shapes
from layerbudget.storage import columns
from layerbudget.tables import BlockTable

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


def as_table(scores: Scores) -> Scores:
    return dataclasses.replace(scores, blocks=BlockTable.of_rows([scores.blocks[:7], scores.blocks[7:]]))


PROGRAMS = {
    "sparsity": lambda s: plan_sparsity(s, sparsity=0.5, exclude=r"\.1\d", fixed={s.names[0]: 0.2}),
    "sparsity by size": lambda s: plan_sparsity(s, rule="size"),
    "ranks": lambda s: plan_ranks(s, mean_rank=6),
    "ranks in flops": lambda s: plan_ranks(s, budget="30% flops", rule="size"),
    "experts": lambda s: plan_experts(s, budget="300% params", router=True),
    "experts by size": lambda s: plan_experts(s, total=3 * K, rule="size"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("inner", [1, 3])
def test_every_program_decides_the_same_on_columns(name, inner):
    scores = scores_of(inner)
    plain, table = PROGRAMS[name](scores), PROGRAMS[name](as_table(scores))
    assert isinstance(table.blocks, PlanTable) and isinstance(plain.blocks, tuple)
    assert tuple(table.blocks) == plain.blocks and table.blocks == plain.blocks and table.by_module() == plain.by_module()
    assert dict(table.budget) == dict(plain.budget) and table.certificate == plain.certificate
    assert explain_plan(table).sentences == explain_plan(plain).sentences
    assert diff_plans(table, plain).same
    if plain.kind == "ranks":
        assert serving_hint(table) == serving_hint(plain)


@pytest.mark.parametrize("inner", [1, 3])
def test_many_blocks_are_written_as_columns_and_come_back(tmp_path, monkeypatch, inner):
    before = scores_of(inner)
    before.save(tmp_path / "rows.json")  # an object per block, as earlier releases wrote a million of them
    monkeypatch.setattr("layerbudget.scores.LARGE", 10)
    monkeypatch.setattr("layerbudget.plan.LARGE", 10)
    scores = Scores.load(tmp_path / "rows.json")
    assert isinstance(scores.blocks, BlockTable) and scores.blocks == before.blocks and scores.gain == before.gain
    scores.save(tmp_path / "scores.json")
    again = Scores.load(tmp_path / "scores.json")
    assert again.digest == scores.digest and again.blocks == scores.blocks and again.status == before.status
    assert (tmp_path / "scores.json").stat().st_size < (tmp_path / "rows.json").stat().st_size / 3
    plan = plan_ranks(again, mean_rank=6)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.blocks == plan.blocks and read.digest == plan.digest and read.scores_digest == scores.digest
    assert Plan.from_dict(json.loads(json.dumps(read.to_dict()))).digest == plan.digest
    monkeypatch.setattr("layerbudget.records._MANY", 100)  # files that are read some blocks at a time
    monkeypatch.setattr("layerbudget.storage.columns._AT_ONCE", 16)
    assert Scores.load(tmp_path / "rows.json").digest == scores.digest == Scores.load(tmp_path / "scores.json").digest
    assert Plan.load(tmp_path / "plan.json").digest == plan.digest


@pytest.mark.parametrize(
    "harm",
    [
        {"value": [0.5]}, {"count": [1] * K}, {"name": ["a"] * K}, {"digest": "x"}, {"length": K - 1}, {"sizes": [2] * K},
        {"module": ["a"]}, {"value": None}, {"count": [-1] * K}, {"length": 10**40},
    ],
)  # fmt: skip
@pytest.mark.parametrize("many", [1, 1 << 25])
def test_columns_that_contradict_each_other_are_one_sentence(tmp_path, monkeypatch, harm, many):
    monkeypatch.setattr("layerbudget.records._MANY", many)
    record = json.loads(json.dumps(plan_sparsity(as_table(scores_of(1))).to_dict()))
    record["blocks"].update(harm)
    (tmp_path / "plan.json").write_text(json.dumps(record))
    with pytest.raises((CorruptFile, InvalidInput)):
        Plan.load(tmp_path / "plan.json")


def test_a_flipped_number_is_found(tmp_path):
    plan = plan_sparsity(as_table(scores_of(1)))
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    value = json.dumps(plan.blocks[5].count)
    (tmp_path / "plan.json").write_text(text.replace(value, str(plan.blocks[5].count + 1), 1))
    with pytest.raises(CorruptFile, match="digest"):
        Plan.load(tmp_path / "plan.json")


def test_a_model_is_pruned_by_columns_as_by_rows(tmp_path, monkeypatch):
    plain = lb.plan_sparsity(lb.partition(lb.load_model("demo"), by="linear"), sparsity=0.5, rule="size")
    monkeypatch.setattr("layerbudget.plan.LARGE", 10)
    columned = dataclasses.replace(plain)
    columned.save(tmp_path / "plan.json")
    models = [lb.load_model("demo") for _ in range(2)]
    receipts = [
        lb.prune(m, p, method="magnitude") for m, p in zip(models, (plain, Plan.load(tmp_path / "plan.json")), strict=True)
    ]
    assert isinstance(columned.blocks, PlanTable) and receipts[0].blocks == receipts[1].blocks
    assert blocks_csv(columned) == blocks_csv(plain) and layers_json(columned) == layers_json(plain)


def table_files(folder, rows):
    """The same rows in every form that is read."""
    with (folder / "s.csv").open("w", newline="") as f:
        csv.writer(f).writerows([COLUMNS, *rows])
    (folder / "rows.json").write_text(json.dumps([dict(zip(COLUMNS, r, strict=True)) for r in rows]))
    (folder / "columns.json").write_text(json.dumps({n: [r[i] for r in rows] for i, n in enumerate(COLUMNS)}))
    np.save(folder / "s.npy", np.array(rows, dtype=[("name", "S9"), ("score", "f8"), ("d_in", "i8"), ("d_out", "i4")]))
    return [folder / n for n in ("s.csv", "rows.json", "columns.json", "s.npy")]


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
    assert counts == [plan_sparsity(found[0]).counts.tolist()] * 4


@pytest.mark.parametrize(
    "row", [("a", float("nan"), 3, 3), ("a", 1.0, 0, 3), ("a", 1.0, 2.5, 3), ("b", 1.0, 3, 3), ("", 1, 3, 3)]
)
def test_broken_tables_are_one_sentence(tmp_path, row):
    with (tmp_path / "s.csv").open("w", newline="") as f:
        csv.writer(f).writerows([COLUMNS, ("b", 1.0, 3, 3), row])
    with pytest.raises((CorruptFile, InvalidInput)):
        scores_with_shapes(tmp_path / "s.csv")


def test_a_long_table_is_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("layerbudget.scores.LARGE", 10)
    monkeypatch.setattr("layerbudget.cli.files.ROWS", 6)
    scores_of(1).save(tmp_path / "scores.json")
    assert main(["plan", "sparsity", str(tmp_path / "scores.json")]) == 0
    shown = capsys.readouterr().out
    assert f"... {K - 6} more" in shown and "layers.59.w" in shown and "layers.30.w" not in shown


def test_the_hash_of_columns_knows_where_names_end():
    assert columns.hashed(["ab", "c"]) != columns.hashed(["a", "bc"]) and columns.hashed(["é"]) != columns.hashed(["e"])
