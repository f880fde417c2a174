"""Every pruner that is registered does what its level says; one that does not is refused, whoever calls it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.compressors.base import TREATMENTS, Level, Treatment, find_treatment
from layerbudget.compressors.treating import check, treated
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import CoverageError

LEVELS = [
    Level(zeros=0), Level(zeros=1), Level(zeros=77), Level(zeros=160), Level(zeros=80, pattern=(2, 4)),
    Level(zeros=60, pattern=(3, 8)), Level(zeros=26, rows=(3, np.array([5, 0, 20, 1]))),
]  # fmt: skip


def matrix(seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(10, 16, generator=g)
    weight[0] = weight[0].sign() * weight[0].abs().ceil()  # ties
    return weight, torch.randn(64, 16, generator=g)


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", TREATMENTS.names())
def test_every_pruner_keeps_shape_count_pattern_and_finite_values(method, dtype, seen):
    weight, x = matrix()
    treatment, weight = find_treatment(method), weight.to(dtype)
    moment = {"none": None, "diagonal": x.square().sum(0), "gram": x.T @ x}[treatment.statistic]
    prepared = None if moment is None or not seen else treatment.prepare(moment)
    for level in LEVELS:
        before = weight.clone()
        made = treated(treatment, weight, prepared, level)
        assert torch.equal(weight, before)
        gone = made == 0
        assert int(gone.sum()) == level.zeros
        if level.pattern is not None:
            assert set(gone.reshape(-1, level.pattern[1]).sum(1).tolist()) == {level.pattern[0]}
        if level.rows is not None:
            assert [int(g.sum()) for g in gone.split(level.rows[0])] == level.rows[1].tolist()


@pytest.mark.parametrize("method", TREATMENTS.names())
def test_a_matrix_of_one_row_is_left_as_it_was(method):
    """One row is its own transpose: a copy that is none writes into the model."""
    treatment, (weight, x) = find_treatment(method), matrix()
    weight = weight[:1].contiguous()
    moment = {"none": None, "diagonal": x.square().sum(0), "gram": x.T @ x}[treatment.statistic]
    prepared = None if moment is None else treatment.prepare(moment)
    before = weight.clone()
    treated(treatment, weight, prepared, Level(zeros=8))
    assert torch.equal(weight, before)


def first(weight, level):
    """The first entries go, whatever pattern or groups of rows are asked for."""
    made = weight.clone()
    made.view(-1)[: level.zeros] = 0
    return made


def spoilt(weight, level):
    made = first(weight, level)
    made[-1, -1] = float("nan")
    return made


BROKEN = {
    "shape": (lambda w, v: first(w, v)[1:], "of a matrix"),
    "nothing": (lambda w, v: None, "made NoneType"),
    "few": (lambda w, v: w.clone(), "0 zeros in .*, [0-9]+ were asked for"),
    "many": (lambda w, v: w * 0, "were asked for"),
    "nan": (spoilt, "not finite"),
    "pattern": (first, "groups of 4 inputs with fewer than 2 zeros.*smallest_per_group"),
    "in place": (lambda w, v: w.zero_(), "wrote into the matrix"),
}


def broken(how):
    class Broken(Treatment):
        name = "broken"

        def apply(self, weight, prepared, level):
            return BROKEN[how][0](weight, level)

    return Broken


@pytest.mark.parametrize("how", BROKEN)
def test_a_pruner_that_does_something_else_is_refused_before_its_weights_are_taken(how):
    model, data = zoo.build("llama"), zoo.tokens(samples=2)
    plan, before = zoo.plan(model, spread=0.0), {n: p.clone() for n, p in model.named_parameters()}
    with TREATMENTS.kept():
        TREATMENTS.add("broken", broken(how))
        with pytest.raises(CoverageError, match=BROKEN[how][1]):
            prune(model, plan, data, method="broken", pattern="2:4" if how == "pattern" else None)
        if how not in ("pattern", "in place"):
            assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
            with pytest.raises(CoverageError, match=BROKEN[how][1]):
                plan_sparsity(model, data, sparsity=0.5, method="broken", passes=12)
        if how in ("few", "many", "nan"):
            with pytest.raises(CoverageError, match=BROKEN[how][1]):
                plan_sparsity(model, data, sparsity=0.5, by="rows:8", method="broken", passes=12)


def test_zeros_that_were_there_and_a_few_that_rounding_makes_are_not_the_pruners():
    weight = torch.randn(100, 200)
    weight[:50] = 0
    magnitude = find_treatment("magnitude")
    treated(magnitude, weight, None, Level(zeros=10))  # among those that were there
    made = torch.ones(100, 200)
    made.view(-1)[:13] = 0
    check(magnitude, torch.ones(100, 200), made, Level(zeros=10))
    with pytest.raises(CoverageError, match="14 zeros in a matrix, 10 were asked for"):
        made.view(-1)[13] = 0
        check(magnitude, torch.ones(100, 200), made, Level(zeros=10))
