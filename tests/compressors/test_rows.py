"""Every group of rows at a count of its own: the quick ways against one group after the other."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.canonical import dumps
from layerbudget.compressors.base import Treatment, find_treatment
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.payload import SparsityPayload
from layerbudget.decisions.sparsity.save import recipe
from layerbudget.errors import CorruptFile, InvalidInput, NotFound
from layerbudget.plan import Plan, RowGroups, row_groups_file

METHODS = ("magnitude", "wanda", "sparsegpt")


def case(method, rows, size, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(rows, 20, generator=g), torch.randn(64, 20, generator=g)
    weight[0] = weight[0].sign() * weight[0].abs().ceil()  # ties
    treatment = find_treatment(method)
    moments = {"none": None, "diagonal": x.square().sum(0), "gram": x.T @ x}
    moment = moments[treatment.statistic]
    sizes = [len(range(rows)[i : i + size]) for i in range(0, rows, size)]
    zeros = np.array([int(torch.randint(0, 20 * m + 1, (1,), generator=g)) for m in sizes])
    return treatment, weight, None if moment is None else treatment.prepare(moment), zeros


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rows", "size"), [(9, 1), (9, 2), (8, 4), (7, 7), (5, 9)])
def test_groups_are_treated_as_matrices_of_their_own(method, rows, size):
    treatment, weight, prepared, zeros = case(method, rows, size)
    quick = treatment.apply_rows(weight, prepared, size, zeros)
    plain = Treatment.apply_rows(treatment, weight, prepared, size, zeros)
    assert torch.allclose(quick.float(), plain.float(), atol=1e-5)
    counted = [int((quick[i : i + size] == 0).sum()) for i in range(0, rows, size)]
    assert counted == zeros.tolist()


def of_rows(model, size, sparsity=0.5, seed=0):
    plan, rng, counts, blocks = zoo.linears(model, 0, "sparsity"), np.random.default_rng(seed), {}, []
    for block in plan.blocks:
        d_out = model.get_submodule(block.name).weight.shape[0]
        groups = -(-d_out // size)
        room = np.minimum(size, d_out - size * np.arange(groups)) * (block.numel // d_out)
        counts[block.name] = np.minimum(rng.binomial(room, sparsity), room).astype(np.int64)
        count = int(counts[block.name].sum())
        blocks.append(type(block)(**{**block.to_dict(), "count": count, "value": count / block.numel}))
    return Plan(
        kind="sparsity", rule="by-hand", model=plan.model, blocks=tuple(blocks),
        budget={**plan.budget, "spent": sum(b.count for b in blocks)},
        payload=SparsityPayload(rows=RowGroups(size=size, counts=counts)),
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 5])
def test_receipts_recount_every_group(method, size):
    model = zoo.build("llama")
    plan = of_rows(model, size)
    receipt = prune(model, plan, zoo.tokens(), method, 4 if method != "magnitude" else None)
    assert receipt.rows["groups"] == sum(len(c) for c in plan.rows.counts.values()) and receipt.rows["size"] == size
    assert receipt.rows["exact"] == receipt.rows["groups"] and receipt.rows["digest"] == plan.rows.digest
    for name, zeros in plan.rows.counts.items():
        weight = model.get_submodule(name).weight
        assert [int((part == 0).sum()) for part in weight.split(size)] == zeros.tolist()


def test_counts_lie_beside_the_plan_and_belong_to_it(tmp_path):
    model = zoo.build("llama")
    plan, other = of_rows(model, 2), of_rows(model, 2, seed=1)
    plan.save(tmp_path / "a.json")
    other.save(tmp_path / "b.json")
    assert Plan.load(tmp_path / "a.json").digest == plan.digest != other.digest
    row_groups_file(tmp_path / "a.json").replace(tmp_path / "kept")
    with pytest.raises(NotFound, match="missing"):
        Plan.load(tmp_path / "a.json")
    row_groups_file(tmp_path / "b.json").replace(row_groups_file(tmp_path / "a.json"))
    with pytest.raises(CorruptFile, match="other counts"):
        Plan.load(tmp_path / "a.json")
    row_groups_file(tmp_path / "a.json").write_bytes(b"no tensors")
    with pytest.raises(CorruptFile):
        Plan.load(tmp_path / "a.json")
    bare = Plan.from_dict(json.loads(dumps(plan.to_dict())))
    assert bare.digest == plan.digest
    for use in (lambda: prune(model, bare, zoo.tokens()), lambda: bare.save(tmp_path / "c.json")):
        with pytest.raises(NotFound, match="not at hand"):
            use()


def test_what_would_overrule_the_rows_is_refused():
    model = zoo.build("llama")
    with pytest.raises(InvalidInput, match="groups of 4 rows"):
        prune(model, of_rows(model, 4), zoo.tokens(), pattern="2:4")
    with pytest.raises(InvalidInput, match="recipe"):
        recipe(of_rows(model, 4))


def test_counts_that_do_not_fit_are_refused():
    model = zoo.build("llama")
    plan = of_rows(model, 4)
    name = plan.names[0]
    counts = {**plan.rows.counts, name: plan.rows.counts[name][:-1]}
    wrong = plan.with_payload(rows=RowGroups(size=4, counts=counts))
    with pytest.raises(InvalidInput, match="do not fit"):
        prune(model, wrong, zoo.tokens())
