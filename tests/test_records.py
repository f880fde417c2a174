"""Plans and scores: frozen, hashed, short to look at, indexed by block."""

import copy
import dataclasses
import pickle

import numpy as np
import pandas
import pytest
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.ranks.payload import RanksPayload
from layerbudget.decisions.sparsity.payload import SparsityPayload
from layerbudget.errors import InvalidInput, MissingDependency, UnknownBlock
from layerbudget.frozen import fields_in_file

SCORES = zoo.scores(np.arange(1.0, 13.0))
PLAN = lb.plan_sparsity(SCORES, sparsity=0.5)


@pytest.mark.parametrize("record", [PLAN, SCORES], ids=["plan", "scores"])
def test_a_record_cannot_be_changed_and_equal_ones_have_one_hash(record):
    again = type(record).from_dict(record.to_dict())
    assert again == record and hash(again) == hash(record) and len({again, record}) == 1
    assert dataclasses.replace(record, made_by="x") != record
    for other in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        assert other == record and other.digest == record.digest
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.model = {}
    for change in (
        lambda: record.model.pop("id", None),
        lambda: record.model.update(a=1),
        lambda: record.model.setdefault("b"),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    with pytest.raises(ValueError, match="read-only"):
        record.numel[0] = 3


def test_what_a_record_was_made_from_may_change_later():
    path, own = [{"divergence": 0.1}], {"c": np.arange(3)}
    plan = dataclasses.replace(PLAN, payload=SparsityPayload(path=path, own=own))
    path.append({})
    own["d"] = 4
    assert plan.payload.path == [{"divergence": 0.1}] and list(plan.payload.own) == ["c"]
    with pytest.raises(ValueError, match="read-only"):
        plan.payload.own["c"][0] = 9
    with pytest.raises(TypeError, match="cannot be changed"):
        plan.payload.path[0]["divergence"] = 0.2
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.payload.path = ()


def test_a_plan_has_the_payload_of_its_kind():
    with pytest.raises(InvalidInput, match="kind sparsity was given RanksPayload.*Its payload is a SparsityPayload"):
        dataclasses.replace(PLAN, payload=RanksPayload())
    with pytest.raises(InvalidInput, match="kind joint was given nothing"):
        dataclasses.replace(PLAN, kind="joint", payload=None)
    assert dataclasses.replace(PLAN, kind="ranks", payload=None).payload == RanksPayload()
    assert PLAN.with_payload(measured=0.5).payload == SparsityPayload(measured=0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Said:
    always: float
    maybe: float | None = None
    some: tuple = ()
    named: dict = dataclasses.field(default_factory=dict)
    inner: "Said | None" = None


def test_what_has_its_default_is_left_out_of_a_file():
    assert fields_in_file(Said(always=0.0)) == {"always": 0.0}
    assert fields_in_file(Said(always=None, maybe=0.0, some=(1,), inner=Said(always=2, named={"a": 1}))) == {
        "always": None,
        "maybe": 0.0,
        "some": [1],
        "inner": {"always": 2, "named": {"a": 1}},
    }


@pytest.mark.parametrize("record", [PLAN, SCORES], ids=["plan", "scores"])
def test_a_record_shows_itself_in_a_few_lines(record):
    lines = repr(record).splitlines()
    assert len(lines) <= 8 and max(map(len, lines)) < 130 and "12 blocks" in lines[0] and record.names[-1] in lines[-1]
    page = record._repr_html_()
    assert page.startswith("<table>") and page.count("<tr>") == 13 and len(page) < 2000
    matrices = dataclasses.replace(
        record,
        blocks=tuple(dataclasses.replace(b, name=f"layers.{k // 3}.m{k % 3}") for k, b in enumerate(record.blocks)),
    )
    assert matrices._repr_html_().count("<tr>") == 5 and "<th>m2</th>" in matrices._repr_html_()


def test_blocks_are_found_by_name():
    name = PLAN.names[3]
    assert PLAN[name] is PLAN.blocks[3] and SCORES[name] == SCORES.values()[3]
    assert list(PLAN) == PLAN.names and name in PLAN and len(SCORES) == 12
    with pytest.raises(UnknownBlock, match="No block is called 'x'"):
        PLAN["x"]


def test_values_may_come_in_order_or_by_name():
    values = {b.name: float(i) for i, b in enumerate(SCORES.blocks, 1)}
    assert lb.Scores.from_values(SCORES.blocks, values) == lb.Scores.from_values(SCORES.blocks, list(values.values()))
    for wrong, said in (([0.5], "1 values for 12"), ({"x": 1.0}, "unknown blocks"), ([np.nan] * 12, "finite")):
        with pytest.raises(InvalidInput, match=said):
            lb.Scores.from_values(SCORES.blocks, wrong)


def test_tables_need_pandas(monkeypatch):
    pandas = pytest.importorskip("pandas")
    frame = PLAN.to_pandas()
    assert frame.loc[PLAN.names[2], "count"] == PLAN.counts[2] and list(frame.columns) == [
        "value",
        "count",
        "numel",
    ]
    assert SCORES.to_pandas()["gain"].tolist() == SCORES.values().tolist() and isinstance(frame, pandas.DataFrame)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingDependency, match="pandas"):
        PLAN.to_pandas()


def test_a_column_of_pandas_is_read_by_its_labels_and_what_has_no_order_is_refused():
    names = [b.name for b in SCORES.blocks]
    values = {name: float(i) for i, name in enumerate(names)}
    column = pandas.Series(values)[::-1]
    assert lb.Scores.from_values(SCORES.blocks, column) == lb.Scores.from_values(SCORES.blocks, values)
    plain = pandas.Series(list(values.values()))
    assert lb.Scores.from_values(SCORES.blocks, plain) == lb.Scores.from_values(SCORES.blocks, values)
    for wrong, said in (
        (column.rename({names[0]: names[1]}), "a label twice"),
        (set(values.values()), "of type set, which has no order"),
        (3.0, "of type float"),
        ([None] * len(names), f"The value of {names[0]} is None"),
        (["a"] * len(names), f"The value of {names[0]} is 'a'"),
        (np.ones((len(names), 2)), "must be a finite number"),
        (np.ones(len(names)) * 1j, "must be a finite number"),
    ):
        with pytest.raises(InvalidInput, match=said):
            lb.Scores.from_values(SCORES.blocks, wrong)
