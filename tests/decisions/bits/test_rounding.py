"""Damage of formats: measured against the plainest loop, predicted against measured; plans checked as a whole."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests import zoo

from layerbudget.compressors.base import Level, find_quantiser
from layerbudget.compressors.formats import find_format
from layerbudget.decisions.bits import sensitivity as R
from layerbudget.decisions.bits.items import end_modules, items_of
from layerbudget.decisions.bits.jointly import Joint, plan_formats
from layerbudget.decisions.bits.plan import Table, plan_bits
from layerbudget.decisions.bits.rounding_bench import mean_and_error, mean_and_rest
from layerbudget.decisions.bits.runtimes import RUNTIMES
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import describe, weight_of

pytest.importorskip("gguf")


def kl(model, dense, data):
    """Mean KL per real token, or per token of an answer, by a plain loop over sequences."""
    total = count = 0.0
    for i in range(data.samples):
        one = data.select(slice(i, i + 1))
        mask = torch.ones_like(one.input_ids) if one.attention_mask is None else one.attention_mask
        with torch.no_grad():
            p, q = (torch.log_softmax(m(input_ids=one.input_ids, attention_mask=mask).logits, -1) for m in (dense, model))
        if one.labels is not None:
            mask = torch.nn.functional.pad(one.labels[:, 1:] != -100, (0, 1))
        total += float(((p.exp() * (p - q)).sum(-1) * mask).sum())
        count += float(mask.sum())
    return total / count


def answers(data):
    """Rows of chat: of every second one only the last three tokens are learned."""
    labels = data.input_ids.clone()
    labels[:, :4] = -100
    labels[::2, :-3] = -100
    return dataclasses.replace(data, labels=labels)


@pytest.mark.parametrize(("name", "family"), [("llama", "gguf"), ("llama-tied", "gguf"), ("gpt2", "compressed-tensors")])
def test_measured_damage_is_that_of_a_plain_loop(name, family):
    data = answers(zoo.tokens(4, 12)) if name == "llama-tied" else zoo.tokens(4, 12, padded=name == "llama")
    model, dense = zoo.build(name), zoo.build(name)
    before = describe(model)
    options = {} if family == "gguf" else {"formats": ["w3-channel", "w4-g32"]}
    table = Table.of(rounding_damage(model, data, family=family, damage="measured", batch_size=3, **options))
    assert describe(model) == before
    rng = np.random.default_rng(0)
    ends = [i for i, b in enumerate(table.blocks) if "layers" not in b.name and ".h." not in b.name]
    assert len(ends) == {"llama": 2, "llama-tied": 1, "gpt2": 0}[name]
    for i in [*ends, *rng.choice(len(table.blocks), 3, replace=False)]:
        j = int(rng.choice(np.flatnonzero(np.isfinite(table.damage[i]))))
        changed = zoo.build(name)
        for module in table.blocks[i].modules:
            weight = weight_of(changed, module.name)[1]
            view = weight.data.T if weight.shape[0] == module.d_in and weight.shape[0] != module.d_out else weight.data
            view = weight.data.T if name == "gpt2" else view
            view.copy_(find_quantiser("rtn").apply(view, None, Level(format=table.formats[j])))
        assert table.damage[i, j] == pytest.approx(kl(changed, dense, data), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("method", ["rtn", "weighted", "gptq"])
def test_the_fisher_form_along_the_rounding_error_predicts_what_is_measured(method):
    data, options = zoo.tokens(16, 16), {"formats": ["w4-g32", "w5-g32", "w8-g32"], "method": method, "runtime": "transformers"}
    found = {
        how: Table.of(rounding_damage(zoo.build("llama", intermediate_size=64), data, damage=how, **options))
        for how in ("measured", "directional")
    }
    a, b = (found[h].damage[:, :3] for h in ("measured", "directional"))
    there = np.isfinite(a) & (a > 1e-9)
    assert np.corrcoef(np.log(a[there]), np.log(b[there]))[0, 1] > 0.95
    assert 0.8 < np.median(b[there] / a[there]) < 1.2
    error = found["directional"].error[:, :3][there]
    assert (error > 0).all() and np.median(error / b[there]) < 0.5


def test_errors_made_again_are_errors_kept(monkeypatch):
    """Large models keep nothing and round some rows at a time; a matrix that a format does not divide has no error there."""
    found = []
    for keep, cached in ((1 << 30, R.CACHED), (0, R.CACHED), (0, 100)):
        monkeypatch.setattr(R, "KEEP_BYTES", keep)
        monkeypatch.setattr(R, "CACHED", cached)
        found.append(
            Table.of(rounding_damage(zoo.build("mixtral"), zoo.tokens(4, 8), formats=["w3-g32", "w4-channel"], draws=2))
        )
    assert all(np.allclose(found[0].damage, other.damage, rtol=1e-5) for other in found[1:])
    assert np.isinf(found[0].damage).any()


def test_runtimes_say_what_must_agree():
    model = zoo.build("llama")
    names = {r: [b.name for b in items_of(model, RUNTIMES[r])] for r in RUNTIMES}
    assert "model.layers.0.self_attn.qkv" in names["vllm"] and "model.layers.0.mlp.gate_up" in names["vllm"]
    assert "lm_head" in names["llama.cpp"] and "lm_head" not in names["transformers"]
    assert [m.name for m in end_modules(zoo.build("llama-tied"))] == ["model.embed_tokens"]
    experts = [b.name for b in items_of(zoo.build("mixtral"), RUNTIMES["vllm"])]
    assert "model.layers.0.mlp.experts" in experts
    scores = rounding_damage(zoo.build("llama", intermediate_size=64), zoo.tokens(2, 8), runtime="vllm", group=32, draws=1)
    plan = plan_bits(scores, bits=6.5)
    formats = plan.extra["formats"]
    assert scores.extra["choices"]["formats"] == ["w4-g32", "w8-g32", "bf16"]
    for i in range(3):
        assert len({formats[f"model.layers.{i}.self_attn.{p}_proj"] for p in "qkv"}) == 1
        assert len({formats[f"model.layers.{i}.mlp.{p}_proj"] for p in ("gate", "up")}) == 1


def test_matrices_that_blocks_do_not_divide_stay_in_sixteen_bits():
    table = Table.of(rounding_damage(zoo.build("llama"), zoo.tokens(2, 8), family="gguf", draws=1))
    odd = [i for i, b in enumerate(table.blocks) if b.name.endswith("down_proj")]  # 48 inputs
    assert (np.isfinite(table.damage[odd]).sum(1) == 1).all() and np.isfinite(table.damage[:, -1]).all()
    formats = plan_bits(rounding_damage(zoo.build("llama"), zoo.tokens(2, 8), family="gguf", draws=1), bits=9).extra["formats"]
    assert {f for n, f in formats.items() if n.endswith("down_proj")} == {"F16"}


def test_a_layer_is_decided_as_one():
    scores = rounding_damage(zoo.build("llama", intermediate_size=64), zoo.tokens(2, 8), by="layer", group=32, draws=1)
    formats = plan_bits(scores, bits=4.0).extra["formats"]
    assert all(len({f for n, f in formats.items() if n.startswith(f"model.layers.{i}.")}) == 1 for i in range(3))


def test_the_check_is_of_the_whole_plan_and_leaves_the_model_alone():
    model, dense = zoo.build("llama", intermediate_size=64), zoo.build("llama", intermediate_size=64)
    data = zoo.tokens(12, 16)
    plan, scores = plan_formats(model, data.select(slice(0, 8)), data.select(slice(8, 12)), bits=4.0, group=32, method="gptq")
    check = plan.extra["check"]
    assert describe(model) == describe(dense) and set(check["rows"]) == {"choices", "uniform", "mix"}
    assert check["rows"][check["taken"]]["kl"] == min(r["kl"] for r in check["rows"].values())
    assert plan.rule == check["taken"] and plan.extra["asked"] == "choices"
    from layerbudget.decisions.bits.apply import apply_bits

    changed = zoo.build("llama", intermediate_size=64)
    apply_bits(changed, plan, data.select(slice(0, 8)))
    assert kl(changed, dense, data.select(slice(8, 12))) == pytest.approx(check["rows"][plan.rule]["kl"], rel=1e-3)


def test_where_a_baseline_wins_the_plan_is_the_baseline(monkeypatch):
    """Damages that say the opposite of the truth: the check finds out."""
    model, data = zoo.build("llama", intermediate_size=64), zoo.tokens(12, 16)
    fit, check = data.select(slice(0, 8)), data.select(slice(8, 12))
    scores = rounding_damage(model, fit, formats=["w2-g32", "w4-g32", "w8-g32"])
    held = scores.extra["choices"]
    held = {**held, "damage": [[1 / (d + 1e-6) if d else 1e9 for d in row] for row in held["damage"]]}
    scores = dataclasses.replace(scores, extra={**scores.extra, "choices": held})
    plan, _ = plan_formats(model, fit, check, bits=5.0, scores=scores)
    assert plan.rule in ("uniform", "mix") and plan.extra["asked"] == "choices"
    assert f"The plan is {plan.rule}." in plan.extra["check"]["verdict"] and not plan.certificate


def test_a_check_says_where_baselines_are_the_same_plan():
    model, data = zoo.build("llama", intermediate_size=64), zoo.tokens(4, 16)
    plan, _ = plan_formats(model, data.select(slice(0, 2)), data.select(slice(2, 4)), bits=16, formats=["w4-g32", "w8-g32"])
    assert plan.extra["check"]["verdict"].endswith("uniform and mix choose the same formats.")
    assert plan.extra["forced"]["format"] == "largest"


def test_joint_counts_padding_out():
    model = zoo.build("llama")
    whole, padded = zoo.tokens(4, 16), zoo.tokens(4, 16, padded=True)
    rows = Joint(model, padded, 3).rows(zoo.build("llama", seed=1))
    assert rows[:, 1].tolist() == padded.attention_mask.sum(1).tolist()
    assert Joint(model, whole).rows(model)[:, 0] == pytest.approx(0, abs=1e-4)


def test_every_damage_of_a_table_is_of_the_answers():
    """Blocks, embedding and head, predicted or measured, and the check: one knapsack has one average."""
    data, model = answers(zoo.tokens(6, 12)), zoo.build("llama", intermediate_size=64)
    other = dataclasses.replace(data, labels=data.labels.masked_fill(torch.arange(12) < 9, -100))
    tables = {}
    for how in ("measured", "directional"):
        for which, text in (("all", data), ("last", other)):
            tables[how, which] = Table.of(rounding_damage(model, text, family="gguf", damage=how, draws=8)).damage
    there = np.all([np.isfinite(t) & (t > 1e-9) for t in (tables["measured", "all"], tables["measured", "last"])], axis=0)
    moved = {how: np.log(tables[how, "last"][there] / tables[how, "all"][there]) for how in ("measured", "directional")}
    assert (np.abs(moved["measured"]) > 1e-3).mean() > 0.9, "other answers, other damages: of ends and of blocks"
    assert np.abs(np.median(moved["measured"] - moved["directional"])) < 0.15
    joint = Joint(model, data, 4)
    rows = joint.rows(zoo.build("llama", intermediate_size=64, seed=1))
    learned = (data.labels[:, 1:] != -100).sum(1).tolist()
    assert rows[:, 1].tolist() == rows[:, 3].tolist() == learned
    changed = zoo.build("llama", intermediate_size=64, seed=1)
    assert rows[:, 0].sum() / rows[:, 1].sum() == pytest.approx(kl(changed, model, data), rel=1e-4)
    with torch.no_grad():
        loss = changed(input_ids=data.input_ids, labels=data.labels).loss
    assert rows[:, 2].sum() / rows[:, 3].sum() == pytest.approx(float(loss), rel=1e-4)


def table_of(rows):
    """A table of one format from ``(K, sequences, 2)`` sums and tokens."""
    damage, rest = zip(*(mean_and_rest(r) for r in rows), strict=True)
    rest = np.array(rest)[:, None]
    return Table(
        blocks=[None] * len(rows), formats=("w4",), size=np.ones((len(rows), 1), int), damage=np.array(damage)[:, None],
        error=np.linalg.norm(rest, axis=-1), fixed=0, family="", runtime="", method="rtn", rest=rest,
    )  # fmt: skip


@pytest.mark.parametrize("blocks", [2, 40])
def test_the_error_of_a_sum_of_blocks_knows_that_they_share_sequences(blocks):
    """Truth known: hard sequences are hard for every block; intervals hold the sum as often as they say."""
    rng, held, apart = np.random.default_rng(blocks), 0, 0
    truth = np.linspace(0.5, 1.5, blocks) / blocks
    for _ in range(400):
        tokens = rng.integers(10, 60, 40)
        each = truth[:, None] * np.exp(0.5 * rng.normal(size=40) - 0.125) + 0.02 / blocks * rng.normal(size=(blocks, 40))
        table = table_of(np.stack([each * tokens, np.broadcast_to(tokens, each.shape)], -1))
        off = abs(table.damage.sum() - truth.sum())
        held += off <= 1.96 * table.error_of(np.zeros(blocks, int))
        apart += off <= 1.96 * np.sqrt((table.error**2).sum())
    assert held / 400 > 0.92 and apart / 400 < (0.87 if blocks == 2 else 0.3)


@pytest.mark.parametrize("how", ["measured", "directional"])
def test_the_error_of_a_plan_is_that_of_its_damage_by_sequence(how):
    """The oracle takes every sequence alone: labels are drawn by content, so a sequence gives the same there."""
    data, model = answers(zoo.tokens(5, 12)), zoo.build("llama", intermediate_size=64)
    options = {"formats": ["w3-g32", "w4-g32"], "damage": how}
    scores = rounding_damage(model, data, **options)
    plan = plan_bits(scores, bits=5.0)
    table = Table.of(scores)
    chosen = np.array([table.formats.index(plan.extra["formats"][b.modules[0].name]) for b in table.blocks])
    assert len(set(chosen)) > 1
    np.testing.assert_allclose(np.linalg.norm(table.rest, axis=-1), table.error, rtol=1e-3)
    alone, tokens = [], (data.labels[:, 1:] != -100).sum(1).numpy()
    for s in range(5):
        one = R.directional if how == "directional" else R.measured
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(R, "pooled", lambda damage, error, norm: (damage, 1.0))
            found = one(model, data.select([s]), table.blocks, [find_format(n) for n in table.formats])
        alone.append(found.damage[np.arange(len(chosen)), chosen].sum())
    wanted = mean_and_error(np.stack([np.array(alone) * tokens, tokens], 1))[1]
    assert plan.extra["predicted_error"] == pytest.approx(wanted, rel=2e-3)
    assert plan.extra["predicted_error"] > 1.2 * np.sqrt((table.error[np.arange(len(chosen)), chosen] ** 2).sum())
    held = {k: v for k, v in scores.extra["choices"].items() if k != "rest"}  # of an earlier release: the most that it can be
    older = plan_bits(dataclasses.replace(scores, extra={"choices": held}), bits=5.0)
    assert older.extra["predicted_error"] >= plan.extra["predicted_error"]


def test_bad_input_is_one_sentence():
    model, data = zoo.build("llama"), zoo.tokens(2, 8)
    with pytest.raises(InvalidInput, match="no damage 'guess'"):
        rounding_damage(model, data, damage="guess")
    with pytest.raises(InvalidInput, match="vllm has no kernel for w3-g32"):
        rounding_damage(model, data, runtime="vllm", formats=["w3-g32"])
    with pytest.raises(InvalidInput, match="32 inputs, which w4-g128 cannot store"):
        rounding_damage(model, data, formats=["w4-g128"])
    with pytest.raises(InvalidInput, match="llama.cpp does not read compressed-tensors"):
        rounding_damage(model, data, runtime="llama.cpp")
    with pytest.raises(InvalidInput, match="no runtime 'mlx'"):
        rounding_damage(model, data, runtime="mlx")
    with pytest.raises(InvalidInput, match="by is 'row'"):
        rounding_damage(model, data, by="row")
