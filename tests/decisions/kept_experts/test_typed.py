"""How many experts stay and in which types: one program, against all choices; and what a file then takes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.decisions.bits.blocks import formats_table
from layerbudget.decisions.bits.gguf import check_even
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.kept_experts.plan import plan_kept_experts
from layerbudget.decisions.kept_experts.program import Removal
from layerbudget.decisions.kept_experts.typed import Rounding, TypedProgram
from layerbudget.errors import InfeasibleBudget, InvalidInput, ModelMismatch
from layerbudget.models.experts import cut_experts
from layerbudget.records import Block, Module
from layerbudget.scores import Scores

EXPERTS, FLOOR, FORMATS, BESIDE = 4, 2, ("small", "middle", "large"), 40


def record(seed):
    """Damages and bytes of two layers with two stacks each, and of one more matrix, in three formats."""
    g = np.random.default_rng(seed)
    names = [f"layers.{i}.mlp.experts.{n}" for i in range(2) for n in ("gate_up_proj", "down_proj")] + ["layers.0.q"]
    size = np.cumsum(g.integers(1, 9, (5, 3)), 1) * EXPERTS * 32
    damage = np.sort(g.random((5, 3)), 1)[:, ::-1].copy()
    damage[4, 0] = np.inf  # a matrix without the smallest format
    blocks = tuple(Block(name=n, modules=(Module(name=n, d_in=8, d_out=8),)) for n in names)
    held = {"formats": list(FORMATS), "fixed": 1000, "head": 24, "family": "gguf", "runtime": "llama.cpp", "method": "rtn"}
    for name, values in (("size", size), ("damage", damage), ("error", np.zeros_like(damage))):
        held[name] = [[None if not np.isfinite(d) else float(v) for v, d in zip(r, f, strict=True)]
                      for r, f in zip(values, damage, strict=True)]  # fmt: skip
    held["rest"] = np.zeros((5, 3, 1)).tolist()
    scores = Scores(estimator="rounding", blocks=blocks, gain=(tuple(damage[:, 2]),), unit="nats per token",
                    extra={"choices": held})  # fmt: skip
    curves = [np.append(0.0, np.cumsum(g.random(2) ** 2)) for _ in range(2)]
    removals = [
        Removal(name=f"layers.{i}.mlp", experts=EXPERTS, order=(3, 1), after=np.arange(3), terms=c[:, None], counts=np.ones(1),
                choosers=np.ones(1, dtype=bool), single=c, scores=c) for i, c in enumerate(curves)]  # fmt: skip
    own = {f"layers.{i}.mlp": tuple(names[2 * i : 2 * i + 2]) for i in range(2)}
    return removals, Rounding(scores, own, [BESIDE, BESIDE]), size, damage, curves


def every_choice(size, damage, curves):
    """``(bytes, damage, counts)`` of every choice of counts and types."""
    for gone in itertools.product(range(3), repeat=2):
        for types in itertools.product(range(3), repeat=5):
            if all(np.isfinite(damage[i, j]) for i, j in enumerate(types)):
                spent = 1024 + size[4, types[4]] + sum(
                    (size[2 * i, types[2 * i]] + size[2 * i + 1, types[2 * i + 1]]) * (EXPERTS - n) // EXPERTS - BESIDE * n
                    for i, n in enumerate(gone))  # fmt: skip
                cost = sum(damage[i, j] for i, j in enumerate(types)) + sum(c[n] for c, n in zip(curves, gone, strict=True))
                yield int(spent), float(cost), gone


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_program_is_the_best_of_all_choices(seed, even):
    removals, rounding, size, damage, curves = record(seed)
    rows = [r for r in every_choice(size, damage, curves) if not even or len(set(r[2])) == 1]
    program = TypedProgram(removals, even=even, rounding=rounding)
    least, most = min(r[0] for r in rows), max(r[0] for r in rows)
    assert rounding.least([EXPERTS] * 2, [FLOOR] * 2) == least
    for budget in np.linspace(least, most, 7).astype(int).tolist():
        steps, choice = program.within(budget, np.ones(2))
        told = program.told(budget)
        best = min(r[1] for r in rows if r[0] <= budget)
        assert choice.damage == pytest.approx(best, rel=1e-12) and choice.status in ("optimal", "slack")
        assert told["removal"] + told["rounding"] == pytest.approx(best, rel=1e-12) and told["bytes"] <= budget
        assert any(r[0] == told["bytes"] and r[2] == steps and r[1] == pytest.approx(best, rel=1e-12) for r in rows)
        assert set(told["formats"]) == {b.name for b in rounding.table.blocks}
    with pytest.raises(InfeasibleBudget, match=f"smallest takes {least:,} bytes"):
        program.within(least - 1, np.ones(2))


def test_no_gguf_file_is_planned_for_layers_with_different_numbers_of_experts():
    model = zoo.tiny("qwen3-moe")
    cut_experts(model, {"model.layers.0.mlp": [0, 1, 4]})
    with pytest.raises(InvalidInput, match="different numbers of experts.*--even"):
        formats_table(model, family="gguf")
    with pytest.raises(InvalidInput, match="different numbers of experts.*--even"):
        check_even(model)


@pytest.fixture(scope="module")
def mixture():
    """A tiny mixture, and what formats of GGUF cost it."""
    model = zoo.build("qwen3-moe", hidden_size=64, moe_intermediate_size=32)
    return model, zoo.tokens(4, 12), rounding_damage(model, zoo.tokens(4, 12), draws=1, family="gguf", formats=["Q4_0", "Q8_0"])


def test_the_file_of_the_smaller_model_takes_what_the_program_counts(mixture):
    from copy import deepcopy

    from layerbudget.decisions.kept_experts.apply import keep_experts

    model, data, scores = mixture
    whole = formats_table(model, family="gguf", formats=["Q4_0", "Q8_0"])
    middle = int(0.8 * whole.smallest.sum()) + whole.beside
    plan = plan_kept_experts(model, data, f"{middle} bytes", types=scores, even=True, draws=1)
    typed, small = plan.extra["typed"], deepcopy(model)
    assert typed["bytes"] <= middle and set(typed["formats"]) == {m.name for b in scores.blocks for m in b.modules}
    keep_experts(small, plan)
    assert plan.counts.sum() < 8 * len(plan.counts), "some go"
    table = formats_table(small, family="gguf", formats=["Q4_0", "Q8_0"])
    own = [table.formats.index(typed["formats"][b.modules[0].name]) for b in table.blocks]
    assert int(table.size[np.arange(len(own)), own].sum()) + table.fixed == typed["bytes"]
    after = plan_bits(small, data, budget=f"{middle} bytes", family="gguf", formats=["Q4_0", "Q8_0"], draws=1)
    assert after.budget["spent"] <= middle


def test_what_cannot_be_planned_with_types_is_refused_before_the_model_runs(mixture, tmp_path, tokenizer, monkeypatch, capsys):
    model, data, scores = mixture
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(InvalidInput, match="one number of experts for all layers.*--even"):
        plan_kept_experts(model, data, "1 MiB", types=scores)
    with pytest.raises(InvalidInput, match="budget is the bytes of the whole file"):
        plan_kept_experts(model, data, 0.5, types=scores, even=True)
    with pytest.raises(InfeasibleBudget, match="The smallest takes"):
        plan_kept_experts(model, data, "1000 bytes", types=scores, even=True)
    with pytest.raises(ModelMismatch, match="another model"):
        plan_kept_experts(zoo.build("mixtral"), data, "1 MiB", types=scores, even=True)
    scores.save(tmp_path / "bits.json")
    zoo.build("mixtral", vocab_size=96).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "t.txt").write_text("a few words of text " * 60)
    words = ["plan", "kept-experts", str(tmp_path / "model"), "--keep", "1 MiB", "--even",
             "--set", f"types={tmp_path}/bits.json",
             "--data", str(tmp_path / "t.txt"), "--samples", "4", "--length", "16", "-o", str(tmp_path / "p.json")]  # fmt: skip
    assert main(words) == 2 and "another model" in capsys.readouterr().err
    assert json.loads((tmp_path / "bits.json").read_text())["extra"]["choices"]["family"] == "gguf"
