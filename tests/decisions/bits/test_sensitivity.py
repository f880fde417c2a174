"""Damage of formats, against the plainest loop and what is measured; plans checked as a whole."""

from __future__ import annotations

import dataclasses
import functools
import gc
import shutil
import types

import numpy as np
import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.compressors import quantisers
from layerbudget.compressors.base import Level, find_quantiser
from layerbudget.compressors.formats import BY_MOMENTS, RUNTIMES
from layerbudget.decisions.bits import pieces, rounding
from layerbudget.decisions.bits import plan as planning
from layerbudget.decisions.bits import sensitivity as R
from layerbudget.decisions.bits.apply import apply_bits, round_matrices
from layerbudget.decisions.bits.blocks import blocks_of, formats_table, in_formats
from layerbudget.decisions.bits.plan import check_plan, check_record, plan_bits
from layerbudget.decisions.bits.sensitivity import DenseOutput, rounding_damage
from layerbudget.decisions.formats.baselines import PEER
from layerbudget.decisions.formats.table import FormatTable
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.errors import InfeasibleBudget, InvalidInput
from layerbudget.execution import backward, memory
from layerbudget.execution.inputs import InputMoments
from layerbudget.execution.walk import Walk
from layerbudget.models.blocks import describe, end_modules, partition, weight_of
from layerbudget.models.offload import mapped
from layerbudget.reporting.verdict import comparison_table, passes_of, verdict
from layerbudget.scores import Scores
from layerbudget.sensitivity.directional.terms import quadratic_terms
from layerbudget.sensitivity.sequences import deviations, per_token

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


def measured(model, data, table, i, j):
    """Damage of one block in one format, all else dense, with the quantiser of the table."""
    formats = {m.name: table.formats[j] for m in table.blocks[i].modules}
    return per_token(*DenseOutput(model, data).rows_of(model, formats, data, table.method)[:, :2].T)[0]


@pytest.mark.parametrize(
    ("walk", "name"), [("whole", "llama"), ("whole", "llama-tied"), ("layers", "llama-tied"), ("layers", "gemma3")]
)
def test_the_damage_of_the_ends_is_that_of_a_plain_loop(name, walk, monkeypatch):
    """Embedding, head, and both in one matrix: its two effects add up before they are squared."""
    data = answers(zoo.tokens(24, 12)) if name == "llama-tied" else zoo.tokens(24, 12, padded=True)
    model, dense = zoo.build(name), zoo.build(name)
    before = describe(model)
    monkeypatch.setattr(R, "quadratic_terms", functools.partial(quadratic_terms, walk=walk))
    table = FormatTable.of(rounding_damage(model, data, family="gguf", draws=32, batch_size=5))
    assert describe(model) == before
    ends = [i for i, b in enumerate(table.blocks) if "layers" not in b.name]
    assert len(ends) == (2 if name == "llama" else 1)
    for i in ends:
        changed, j = zoo.build(name), table.formats.index("Q8_0")
        weight = weight_of(changed, table.blocks[i].name)[1].data
        weight.copy_(find_quantiser("rtn").apply(weight, None, Level(format="Q8_0")))
        assert table.damage[i, j] == pytest.approx(kl(changed, dense, data), rel=0.15)


@pytest.mark.parametrize("method", ["rtn", "weighted", "gptq", pytest.param("descent", marks=pytest.mark.slow)])
def test_the_fisher_form_along_the_rounding_error_predicts_what_is_measured(method):
    """Of codes chosen by inputs on text that they did not see, and there from half of the inputs that the file is made with."""
    by_moments = method in BY_MOMENTS
    model, data = zoo.build("llama", intermediate_size=64), zoo.tokens(16, 16)
    other = zoo.tokens(64, 16, seed=7) if by_moments else data
    scores = rounding_damage(model, data, formats=["w4-g32", "w5-g32", "w8-g32"], method=method)
    table, dense = FormatTable.of(scores), DenseOutput(model, other)
    formats = [[{m.name: form for m in b.modules} for form in table.formats[:3]] for b in table.blocks]
    rows = [[dense.rows_of(model, each, data, method)[:, :2] for each in row] for row in formats]
    found = np.array([[per_token(*each.T)[0] for each in row] for row in rows])
    there, predicted = found > 1e-9, table.damage[:, :3]
    assert np.corrcoef(np.log(found[there]), np.log(predicted[there]))[0, 1] > 0.95
    assert 0.8 < np.median(predicted[there] / found[there]) < (1.5 if by_moments else 1.2)
    assert scores.extra["formats"]["passes"] == {"rtn": 9.0, "weighted": 10.0}.get(method, 0.5 * 17 + 1.0)
    error = table.error[:, :3][there]
    assert (error > 0).all() and np.median(error / predicted[there]) < 0.5


def test_of_much_text_no_more_than_24_sequences_tell_the_damage_of_error_feedback(monkeypatch):
    """The others show the inputs, which is cheaper, and the damages are those that half of the text tells."""
    model, data = zoo.build("llama", intermediate_size=64), zoo.tokens(60, 16)
    options = {"formats": ["w4-g32", "w5-g32"], "method": "gptq"}
    found = rounding_damage(model, data, **options)
    few = FormatTable.of(found)
    assert np.flatnonzero(np.abs(few.rest).sum((0, 1))).tolist() == [*range(2, 60, 3)]
    assert found.extra["formats"]["passes"] == pytest.approx((20 * 17 + 40 * 2) / 60)
    monkeypatch.setattr(R, "_JUDGES", 30)
    half = FormatTable.of(rounding_damage(model, data, **options))
    off = (few.damage[:, :2] - half.damage[:, :2]) / np.hypot(few.error[:, :2], half.error[:, :2])
    assert (np.abs(half.rest).sum((0, 1)) > 0).sum() == 30 and 0.3 < np.sqrt(np.mean(off**2)) < 2.0
    assert abs(np.log(few.damage[:, :2] / half.damage[:, :2]).mean()) < 0.2


@pytest.mark.parametrize(("name", "method"), [("llama", "rtn"), ("llama", "gptq"), ("mixtral", "weighted")])
def test_damages_from_some_rows_are_those_of_all_rows(name, method):
    model, data = zoo.build(name, hidden_size=128, intermediate_size=128, num_hidden_layers=2), zoo.tokens(4, 16)
    options = {"family": "gguf", "formats": ["Q4_0", "IQ4_NL", "Q5_1"], "method": method, "draws": 2}
    some, every = (FormatTable.of(rounding_damage(model, data, rows=rows, **options)) for rows in (16, 10**6))
    inside = [i for i, b in enumerate(some.blocks) if "layers" in b.name]
    off = np.log(some.damage[inside, :3] / every.damage[inside, :3])
    spread = [
        np.sqrt(np.maximum(t.error**2 - (t.rest**2).sum(-1), 0.0))[inside, :3] / t.damage[inside, :3] for t in (some, every)
    ]
    assert np.abs(off).max() < 0.3 and off.std() < 0.1
    assert (np.abs(off) < 2 * spread[0]).mean() > 0.8, "the error of the sample says how far it is off"
    assert spread[1].max() < 0.03, "no row was left out; a record rounds what sequences add"


@pytest.mark.parametrize(("name", "method"), [("llama", "weighted"), ("qwen3-moe", "rtn")])
def test_large_matrices_are_measured_along_some_rows(name, method, monkeypatch):
    """A fifth of the rows or less, of all experts alike; what they leave open is in the error. Small matrices have all rows."""
    wide = {"intermediate_size": 512} if name == "llama" else {"moe_intermediate_size": 64}
    model, data = zoo.build(name, hidden_size=64, num_hidden_layers=2, **wide), zoo.tokens(8, 16, padded=True)
    options = {"family": "gguf", "formats": ["Q4_0", "Q5_1", "Q8_0"], "method": method, "draws": 8}
    every = FormatTable.of(rounding_damage(model, data, **options))
    monkeypatch.setattr(rounding, "ROWS", 96)
    some = FormatTable.of(rounding_damage(model, data, **options))
    sizes = {b.name: sum(m.copies * m.d_out for m in b.modules) for b in some.blocks}
    large = [i for i, n in enumerate(sizes) if "layers" in n and sizes[n] > 96]
    small = [i for i in range(len(sizes)) if i not in large]
    off = np.log(some.damage[:, :3] / every.damage[:, :3])
    assert len(large) >= 3 and np.abs(off[small]).max() < 0.1, "pooling knows the others"
    assert np.abs(off[large]).max() < 0.7 and abs(np.median(off[large])) < 0.25
    more = np.sqrt(np.maximum(some.error**2 - (some.rest**2).sum(-1), 0.0))[large, :3] / some.damage[large, :3]
    assert (np.abs(off[large]) < 2 * more).mean() > 0.8 and np.median(more) < 0.3
    again = FormatTable.of(rounding_damage(model, data, batch_size=3, **options))
    off = np.abs(np.log(again.damage / some.damage))[:, :3]
    assert off.max() < 0.3 and np.median(off) < 0.02, "a code at a tie of two changes all behind it"


@pytest.mark.parametrize(
    ("tied", "method", "way"), [(True, "gptq", "layers"), (False, "weighted", "whole"), (False, "gptq", "layers")]
)
def test_heads_of_many_rows_are_measured_along_the_labels_that_are_drawn(tied, method, way, monkeypatch):
    """Other matrices have the same damages, the head nearly; and it does not depend on batches."""
    monkeypatch.setattr(backward, "fits_whole", lambda *args: way == "whole")
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    model, data = zoo.build("llama", tie_word_embeddings=tied, **wide), zoo.tokens(8, 16, padded=True)
    options = {"family": "gguf", "formats": ["Q4_0", "Q5_1", "Q8_0"], "method": method, "draws": 16}
    every = FormatTable.of(rounding_damage(model, data, **options))
    monkeypatch.setattr(rounding, "HEAD_ROWS", 500)
    made, of_labels = [], rounding.RoundingErrors.of_labels
    monkeypatch.setattr(
        rounding.RoundingErrors, "of_labels", lambda self, name, rows: made.append(name) or of_labels(self, name, rows)
    )
    some = FormatTable.of(rounding_damage(model, data, **options))
    ends = [i for i, b in enumerate(some.blocks) if made[0] == b.modules[0].name]
    off = np.abs(np.log(some.damage / every.damage))[:, :3]
    assert len(ends) == len(made) == 1 and np.delete(off, ends, 0).max() < 0.05, "pooling knows the others"
    assert off[ends].max() < 0.25
    for more in ({"batch_size": 3}, {"rows": 16}):
        again = FormatTable.of(rounding_damage(model, data, **options, **more))
        assert np.abs(np.log(again.damage / some.damage))[ends, :3].max() < 0.02


def test_rows_are_sampled_without_a_bias_whatever_their_number(monkeypatch):
    """No row twice: nearly all rows give what all rows give."""
    model, data = zoo.build("llama", hidden_size=128, intermediate_size=128, num_hidden_layers=2), zoo.tokens(8, 16)
    options = {"family": "gguf", "formats": ["Q4_0", "Q8_0"], "draws": 8}
    every = FormatTable.of(rounding_damage(model, data, **options)).damage
    for rows in (127, 120, 100):
        monkeypatch.setattr(rounding, "ROWS", rows)
        off = np.log(FormatTable.of(rounding_damage(model, data, **options)).damage / every)
        assert abs(off[np.isfinite(off)].mean()) < 0.1


@pytest.mark.parametrize("method", ["rtn", "weighted"])
def test_what_scales_all_weights_is_taken_apart(method):
    """Types of 256 that make weights smaller or larger, none of them an anchor: as if each had been measured itself."""
    model, data = zoo.build("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2), zoo.tokens(12, 16)
    options = {"family": "gguf", "formats": ["Q2_K", "IQ3_S", "Q5_K", "Q6_K"], "method": method, "draws": 8}
    table, every = (FormatTable.of(rounding_damage(model, data, whole=w, **options)) for w in (False, True))
    inside = [i for i, b in enumerate(table.blocks) if "layers" in b.name]
    off = np.log(table.damage[inside] / every.damage[inside])[:, :4]
    assert np.abs(off.mean(0)).max() < 0.2 and off.std(0).max() < 0.4


@pytest.mark.slow
def test_with_feedback_two_lattices_are_measured():
    """The errors of codes that say several weights do not follow from those of single numbers."""
    model, data = zoo.build("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1), zoo.tokens(12, 16)
    options = {"family": "gguf", "formats": ["IQ2_XS", "IQ2_S", "Q2_K", "IQ3_S", "Q4_K"], "method": "gptq", "draws": 8}
    scores, every = (rounding_damage(model, data, whole=w, **options) for w in (False, True))
    assert {"IQ2_S", "IQ3_S"} <= set(scores.extra["formats"]["anchors"])
    table, every = FormatTable.of(scores), FormatTable.of(every)
    inside = [i for i, b in enumerate(table.blocks) if "layers" in b.name]
    off = np.log(table.damage[inside] / every.damage[inside])[:, :5]
    assert np.abs(off.mean(0)).max() < 0.25


def test_the_damage_of_every_format_can_be_measured_along_its_own_error():
    """Formats whole, and one at a time, when it is its own only anchor: the same but for what pooling takes."""
    model, data = zoo.build("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2), zoo.tokens(8, 16)
    menu, own = ["Q4_0", "IQ4_NL", "Q5_1", "Q8_0"], {"family": "gguf", "draws": 16, "whole": True}
    scores = rounding_damage(model, data, formats=menu, **own)
    assert scores.extra["formats"]["anchors"] == tuple(scores.extra["formats"]["formats"])
    found = FormatTable.of(scores)
    for form in menu:
        alone = FormatTable.of(rounding_damage(model, data, formats=[form], **own))
        ratio = found.damage[:, found.formats.index(form)] / alone.damage[:, 0]
        assert np.abs(np.log(ratio)).max() < 0.4 and abs(np.log(np.median(ratio))) < 0.1


def test_streamed_models_and_batches_of_any_size_give_the_same(tmp_path):
    model, data = zoo.build("llama", hidden_size=64, intermediate_size=64), zoo.tokens(6, 12, padded=True)
    model.save_pretrained(tmp_path / "model")
    streamed = lb.load_model(tmp_path / "model", stream=True)
    options = {"family": "gguf", "formats": ["Q4_0", "Q5_1"], "draws": 2}
    for method in ("weighted", "gptq"):
        one = FormatTable.of(rounding_damage(model, data, method=method, batch_size=6, **options)).damage
        other = FormatTable.of(rounding_damage(streamed, data, method=method, batch_size=2, **options)).damage
        off = np.abs(np.log(one / other))[np.isfinite(one)]
        assert off.max() < (0.1 if method == "weighted" else 0.3), "a code at a tie of two changes all behind it"
        assert np.median(off) < (0.01 if method == "weighted" else 0.02)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_streamed_model_is_as_it_was_after_every_plan_that_is_checked(name, tmp_path):
    """Also where experts were stacked while they were read, which no file has, and layers compute as they are stored."""
    model, text = zoo.build(name, hidden_size=64, intermediate_size=64), zoo.tokens(8, 12)
    model.save_pretrained(tmp_path / "model")
    streamed = lb.load_model(tmp_path / "model", stream=True)
    files = mapped(streamed)
    assert not files.converts and (name == "llama") == (set(files.parameters) == set(files.places))
    before = {n: t.clone() for n, t in streamed.state_dict().items()}
    formats = dict.fromkeys((m.name for b in partition(model) for m in b.modules), "Q4_0")
    wanted = DenseOutput(model, text).rows_of(model, formats, None, "rtn")
    for _ in range(2):
        assert np.allclose(DenseOutput(streamed, text).rows_of(streamed, formats, None, "rtn"), wanted, rtol=1e-5)
        assert all(torch.equal(t, before[n]) for n, t in streamed.state_dict().items())
    assert (wanted > 0).all()


def test_a_layer_is_not_held_while_its_errors_are_made_with_feedback(tmp_path, monkeypatch):
    zoo.build("llama", hidden_size=64, intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path)
    found, at_hand, make = [], [], rounding.RoundingErrors._make
    for stream in (False, True):
        model = lb.load_model(tmp_path, dtype="float32", stream=stream)

        def making(self, names, files=mapped(model)):
            if names[0].startswith("model.layers."):
                at_hand.extend(files is not None and files.at_hand(i) for i in range(3))
            make(self, names)

        monkeypatch.setattr(rounding.RoundingErrors, "_make", making)
        options = {"family": "gguf", "formats": ["Q4_0", "Q5_1"], "draws": 2, "method": "gptq", "batch_size": 6}
        found.append(FormatTable.of(rounding_damage(model, zoo.tokens(6, 12), **options)))
    assert at_hand and not any(at_hand)
    assert np.allclose(*(table.damage for table in found), rtol=1e-5)


def test_runtimes_say_what_must_agree():
    model = zoo.build("llama")
    names = {r: [b.name for b in blocks_of(model, RUNTIMES[r])] for r in RUNTIMES}
    assert "model.layers.0.self_attn.qkv" in names["vllm"] and "model.layers.0.mlp.gate_up" in names["vllm"]
    assert "lm_head" in names["llama.cpp"] and "lm_head" not in names["transformers"]
    assert [m.name for m in end_modules(zoo.build("llama-tied"))] == ["model.embed_tokens"]
    experts = [b.name for b in blocks_of(zoo.build("mixtral"), RUNTIMES["vllm"])]
    assert "model.layers.0.mlp.experts" in experts
    scores = rounding_damage(zoo.build("llama", intermediate_size=64), zoo.tokens(2, 8), runtime="vllm", group=32, draws=1)
    plan = plan_bits(scores, bits=6.5)
    formats = plan.payload.formats
    assert scores.extra["formats"]["formats"] == [*(f"w{b}-g32" for b in (2, 3, 4, 5, 6, 8)), "bf16"]
    for i in range(3):
        assert len({formats[f"model.layers.{i}.self_attn.{p}_proj"] for p in "qkv"}) == 1
        assert len({formats[f"model.layers.{i}.mlp.{p}_proj"] for p in ("gate", "up")}) == 1


def test_matrices_that_blocks_do_not_divide_stay_in_sixteen_bits():
    table = FormatTable.of(rounding_damage(zoo.build("llama"), zoo.tokens(2, 8), family="gguf", draws=1))
    odd = [i for i, b in enumerate(table.blocks) if b.name.endswith("down_proj")]  # 48 inputs
    assert (np.isfinite(table.damage[odd]).sum(1) == 1).all() and np.isfinite(table.damage[:, -1]).all()
    formats = plan_bits(rounding_damage(zoo.build("llama"), zoo.tokens(2, 8), family="gguf", draws=1), bits=9).payload.formats
    assert {f for n, f in formats.items() if n.endswith("down_proj")} == {"F16"}


def test_a_layer_is_decided_as_one():
    scores = rounding_damage(zoo.build("llama", intermediate_size=64), zoo.tokens(2, 8), by="layer", group=32, draws=1)
    formats = plan_bits(scores, bits=4.0).payload.formats
    assert all(len({f for n, f in formats.items() if n.startswith(f"model.layers.{i}.")}) == 1 for i in range(3))


def test_the_check_is_of_the_whole_plan_and_leaves_the_model_alone(tmp_path):
    model, dense = zoo.build("llama", intermediate_size=64), zoo.build("llama", intermediate_size=64)
    fit, held_out = (zoo.tokens(12, 16).select(rows) for rows in (slice(0, 8), slice(8, 12)))
    plan = plan_bits(model, fit, held_out, bits=4.0, group=32, method="gptq", save_scores=tmp_path / "scores.json")
    check = plan.payload.check
    assert describe(model) == describe(dense) and set(check.rows) == {"exact", "uniform"}
    assert check.rows[check.taken].kl == min(r.kl for r in check.rows.values())
    assert plan.rule == check.taken and plan.payload.asked == "exact"
    apply_bits(model, plan, fit)
    assert kl(model, dense, held_out) == pytest.approx(check.rows[plan.rule].kl, rel=1e-3)
    scores = Scores.load(tmp_path / "scores.json")
    held = scores.extra["formats"]  # damages that say the opposite of the truth: the check finds out
    held = {**held, "damage": [[None if d is None else 1 / (d + 1e-6) if d else 1e9 for d in row] for row in held["damage"]]}
    scores = dataclasses.replace(scores, extra={"formats": held})
    asked = plan_bits(scores, bits=5.0)
    asked = zoo.saying(asked, passes=7.0)
    wrong = check_plan(dense, asked, scores, fit, held_out)
    assert wrong.payload.curve == asked.payload.curve != [] and passes_of(wrong) == 7.0
    assert wrong.payload.formats != asked.payload.formats and wrong.payload.predicted > asked.payload.predicted
    assert wrong.rule == "uniform" and wrong.payload.asked == "exact"
    assert f"The plan is {wrong.rule}." in wrong.payload.check.verdict and not wrong.certificate


class Said:
    """Progress that remembers its phases."""

    def __init__(self):
        self.phases = []

    def say(self, phase):
        """Remember it."""
        self.phases.append(phase)

    def __call__(self, done, total):
        assert 0 <= done <= total


def test_a_plan_with_feedback_stands_beside_the_file_that_llama_quantize_writes(monkeypatch):
    """The mix with ggml's own rounding, by our importances: said and never taken, however low it is.

    With feedback the mix is rounded only where its prediction is near the plan's: that is a whole plan's time.
    """
    model, text = zoo.build("llama", hidden_size=64, intermediate_size=64), zoo.tokens(24, 16)
    fit, held_out = text.select(slice(0, 16)), text.select(slice(16, 24))
    said = Said()
    asked = {"like": "Q4_K_M", "family": "gguf", "method": "gptq", "draws": 2}
    plan = plan_bits(model, fit, held_out, **asked, progress=said)
    checks = [phase for phase in said.phases if phase.startswith("the check: plan")]
    assert 2 <= len(checks) <= 3 and checks == [f"the check: plan {k} of 3 at most" for k in range(1, len(checks) + 1)]
    far, predicted = plan.payload.check.rows, plan.payload.baselines["mix"]["predicted"]
    assert set(far) == {"exact", "uniform", PEER} and predicted > 1.5 * plan.payload.predicted
    assert "than Q4_K_M by llama-quantize within" in verdict(plan) and "mix by llama-quantize" in plan.payload.check.verdict
    monkeypatch.setattr("layerbudget.decisions.bits.plan._FAR", 2 * predicted / plan.payload.predicted)
    plan = plan_bits(model, fit, held_out, **asked)
    rows, mix = plan.payload.check.rows, plan_bits(model, fit, like="Q4_K_M", method="gptq", rule="mix", draws=1)
    assert set(rows) == {"exact", "uniform", "mix", PEER} and rows[PEER].bytes == rows["mix"].bytes
    assert rows[PEER] == far[PEER] and rows["uniform"] == far["uniform"]
    written = DenseOutput(model, held_out).rows_as_quantised(model, mix.payload.formats, fit)
    assert rows[PEER].kl == pytest.approx(per_token(*written[:, :2].T)[0], rel=1e-6) and rows[PEER].kl > rows["mix"].kl
    assert "than Q4_K_M by llama-quantize within" in verdict(plan) and "llama.cpp's" not in verdict(plan)
    head, table = comparison_table(plan)[1:]
    assert head[-1] == "against llama-quantize" and [r[0] for r in table][2:] == [
        "the types of Q4_K_M with gptq",
        "Q4_K_M by llama-quantize",
    ]
    low = {n: r * ([[0.1, 1, 1, 1]] if n == PEER else 1) for n, r in dict.fromkeys(rows, written).items()}
    record = check_record(DenseOutput(model, held_out), "exact", low, dict.fromkeys(rows, 1), ["exact"])
    assert record.taken != PEER and record.rows[PEER].difference < 0


def test_the_file_of_llama_quantize_is_weighed_by_the_inputs_of_the_dense_model():
    """As its importance matrix is: not by those that rounded layers below give."""
    model, text = zoo.build("llama", hidden_size=64, intermediate_size=64, tie_word_embeddings=False), zoo.tokens(12, 16)
    fit, held_out = text.select(slice(0, 8)), text.select(slice(8, 12))
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    seen, hooks = {n: InputMoments("diagonal") for n in names}, []
    for n in names:
        hooks.append(model.get_submodule(n).register_forward_pre_hook(lambda m, x, n=n: seen[n].add(x[0].flatten(0, 1))))
    with torch.no_grad():
        model(input_ids=fit.input_ids)
    for hook in hooks:
        hook.remove()
    formats, dense = dict.fromkeys(["model.embed_tokens", *names], "Q4_0"), DenseOutput(model, held_out)
    rows = dense.rows_as_quantised(model, formats, fit)
    wanted = dense.rows_of(model, formats, None, "weighted", importances={n: [m] for n, m in seen.items()})
    assert np.allclose(rows, wanted, rtol=1e-4)
    assert not np.allclose(rows, dense.rows_of(model, formats, fit, "weighted"), rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "method", "family"),
    [
        ("llama", "rtn", "compressed-tensors"),
        ("llama-tied", "weighted", "gguf"),
        ("llama-tied", "gptq", "gguf"),
        ("qwen3", "gptq", "gguf"),
        ("mixtral", "gptq", "gguf"),
    ],
)
def test_a_walk_that_was_stopped_goes_on_from_its_last_layer_to_the_same_damages(name, method, family, tmp_path, monkeypatch):
    monkeypatch.setattr(backward, "fits_whole", lambda *_: False)
    monkeypatch.setattr(rounding, "HEAD_ROWS", 64)  # so that a tied head is measured by its labels
    model, data = zoo.build(name, hidden_size=64, intermediate_size=64), zoo.tokens(10, 12)
    asked = {"family": family, "method": method, "draws": 2, "bits": 5.0, "batch_size": 4}
    start, started, most = rounding.RoundingErrors.start, [], 99

    def counted(errors, names):
        if inside := [n for n in names if ".layers." in n]:
            started.append(inside)
            if len(started) > most:
                raise KeyboardInterrupt
        start(errors, names)

    monkeypatch.setattr(rounding.RoundingErrors, "start", counted)
    whole = plan_bits(model, data, save_scores=tmp_path / "whole.json", **asked)
    every, most = list(started), 1
    assert len(every) == model.config.num_hidden_layers
    for finished in (0, 1):  # each run finishes one layer more
        started.clear()
        with pytest.raises(KeyboardInterrupt):
            plan_bits(model, data, resume=tmp_path / "parts", **asked)
        assert started == every[finished : finished + 2]
    kept = sorted(file.name.split(".")[0] for file in (tmp_path / "parts").iterdir())
    assert sum(name.startswith("damages-layer-") for name in kept) == 2
    assert {name.rpartition("-")[0] for name in kept if "gradients" in name} == {f"damages-gradients-{len(every) - 2:04d}"}
    started.clear()
    most = 99
    again = plan_bits(model, data, save_scores=tmp_path / "again.json", resume=tmp_path / "parts", **asked)
    assert started == every[2:]
    assert again == whole and (tmp_path / "again.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert {file.name.split(".")[0] for file in (tmp_path / "parts").iterdir()} == {"damages", "resume"}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_walk_that_was_stopped_behind_its_last_layer_repeats_no_layer(method, tmp_path, monkeypatch):
    """The tied embedding is what is measured last: where it is read, behind all layers."""
    monkeypatch.setattr(backward, "fits_whole", lambda *_: False)
    model, data = zoo.build("llama-tied", hidden_size=64, intermediate_size=64), zoo.tokens(10, 12)
    asked = {"family": "gguf", "method": method, "draws": 2, "bits": 5.0, "batch_size": 4}
    whole = plan_bits(model, data, save_scores=tmp_path / "whole.json", **asked)

    def stop(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(backward._Layers, "_lookup", stop)
        with pytest.raises(KeyboardInterrupt):
            plan_bits(model, data, resume=tmp_path / "parts", **asked)
    monkeypatch.setattr(backward._Layers, "_layer", lambda *_, **__: pytest.fail("a layer was measured again"))
    assert plan_bits(model, data, save_scores=tmp_path / "again.json", resume=tmp_path / "parts", **asked) == whole
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_a_walk_that_is_kept_needs_room_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(backward, "fits_whole", lambda *_: False)
    model, text = zoo.build("llama"), zoo.tokens(4, 8)
    asked = {"bits": 9, "method": "gptq", "family": "gguf", "draws": 2, "resume": tmp_path / "parts"}
    needed = 2 * (2 * 8 * 32 * 4) * 4  # two layers, of 2 sequences that judge, 8 tokens, 32 channels, and twice 2 draws
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=needed - 1))
    with pytest.raises(InvalidInput, match="will take about .* are free"):
        plan_bits(model, text, **asked)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=needed))
    assert plan_bits(model, text, **asked).payload.formats


def test_a_mix_with_formats_that_may_not_be_used_is_compared_and_not_taken():
    model, text = zoo.build("llama", hidden_size=64, intermediate_size=64), zoo.tokens(8, 16)
    own = {"family": "gguf", "draws": 1, "formats": ["Q4_0", "Q8_0"], "keep": {"mlp": "Q4_0"}}
    plan = plan_bits(model, text.select(slice(0, 4)), text.select(slice(4, 8)), like="Q8_0", **own)
    rows = plan.payload.check.rows
    assert plan.payload.mix == "Q8_0" and rows["mix"].kl < 0.5 * rows[plan.rule].kl and plan.rule != "mix"
    assert {f for m, f in plan.payload.formats.items() if "mlp" in m} == {"Q4_0"}


def test_a_check_says_where_baselines_are_the_same_plan():
    model, data = zoo.build("llama", intermediate_size=64), zoo.tokens(4, 16)
    plan = plan_bits(model, data.select(slice(0, 2)), data.select(slice(2, 4)), bits=16, formats=["w4-g32", "w8-g32"])
    assert plan.payload.check.verdict.endswith("uniform chooses the same formats.")


def test_with_feedback_sequences_with_answers_tell_the_damage():
    table = FormatTable.of(
        rounding_damage(zoo.build("llama", intermediate_size=64), zoo.half_answered(6, 12), family="gguf", method="gptq")
    )
    assert np.isfinite(table.damage[table.has]).all() and table.damage[:, 0].max() > 0


def test_padding_is_not_counted():
    model = zoo.build("llama")
    whole, padded = zoo.tokens(4, 16), zoo.tokens(4, 16, padded=True)
    rows = DenseOutput(model, padded, 3).rows(zoo.build("llama", seed=1))
    assert rows[:, 1].tolist() == padded.attention_mask.sum(1).tolist()
    assert DenseOutput(model, whole).rows(model)[:, 0] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("padded", (False, True))
def test_logits_are_looked_at_some_positions_at_a_time(padded, monkeypatch):
    """Of 4 sequences three positions at once; the dense model runs once, and what is kept lies in files."""
    model, other, data = zoo.build("llama"), zoo.build("llama", seed=1), zoo.tokens(4, 16, padded=padded)
    whole = DenseOutput(model, data, 4)
    assert not whole.outputs.pieced
    wanted, vocabulary = whole.rows(other), model.config.vocab_size
    monkeypatch.setattr(memory, "HEAD", 4 * 4 * 3 * vocabulary)
    monkeypatch.setattr(R, "_KEPT", 0)
    sizes, calls = [], []
    handles = [m.lm_head.register_forward_hook(lambda m, given, out: sizes.append(out[0].numel())) for m in (model, other)]
    handles.append(model.model.layers[0].register_forward_hook(lambda m, given, out: calls.append(given[0].shape)))
    dense = DenseOutput(model, data, 4)
    assert dense.outputs.pieced and sum(shape == (4, 16, model.config.hidden_size) for shape in calls) == 1
    folder = dense._clean._scratch.path
    assert len(list(folder.iterdir())) == 6
    sizes.clear()
    np.testing.assert_allclose(dense.rows(other), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dense.own, whole.own, rtol=1e-6)
    assert max(sizes[-6:]) == 3 * vocabulary
    for handle in handles:
        handle.remove()
    del dense
    gc.collect()
    assert not folder.exists()


def test_damages_are_those_of_a_head_that_runs_some_positions_at_a_time(monkeypatch):
    """Labels are drawn alike, and the head's statistics are of the same inputs."""
    model, data = zoo.build("llama", intermediate_size=64), zoo.tokens(4, 16, padded=True)
    own = {"family": "gguf", "draws": 2, "batch_size": 4, "method": "weighted"}
    monkeypatch.setattr("layerbudget.execution.backward.fits_whole", lambda *_: False)
    wanted = FormatTable.of(rounding_damage(model, data, **own))
    monkeypatch.setattr(memory, "HEAD", 4 * 4 * 5 * model.config.vocab_size)
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda m, given, out: sizes.append(given[0].shape[1]))
    found = FormatTable.of(rounding_damage(model, data, **own))
    handle.remove()
    assert sizes.count(5) >= 3 and sizes[-1] == 1, "five positions at a time, then what is left"
    np.testing.assert_allclose(found.damage[found.has], wanted.damage[found.has], rtol=1e-3)
    np.testing.assert_allclose(found.error[found.has], wanted.error[found.has], rtol=1e-3)


@pytest.mark.parametrize(
    ("method", "form"),
    [(m, f) for m in ("rtn", "weighted", "gptq") for f in ("Q4_0", "w4-g32", "nvfp4") if (m, f) != ("gptq", "Q4_0")],
)
def test_a_matrix_is_rounded_some_rows_at_a_time_to_the_same_weights(method, form, monkeypatch):
    if form == "nvfp4":
        pytest.importorskip("compressed_tensors")
    data, found, sizes = None if method == "rtn" else zoo.tokens(4, 16), [], []
    for piece in (1 << 20, 64 * 8):
        monkeypatch.setattr(pieces, "_PIECE", piece)
        monkeypatch.setattr(quantisers, "_FED_BACK", piece)
        model = zoo.build("llama", hidden_size=64, intermediate_size=64)
        quantise = type(find_quantiser(method)).quantise
        with monkeypatch.context() as patched:
            patched.setattr(
                type(find_quantiser(method)), "quantise", lambda s, w, *a, q=quantise: sizes.append(w.numel()) or q(s, w, *a)
            )
            names = [m.name for b in blocks_of(model, RUNTIMES["vllm"]) for m in b.modules]
            round_matrices(model, dict.fromkeys(names, form), data, method=method)
        found.append({name: weight_of(model, name)[1].detach() for name in names})
        assert max(sizes) <= piece
        sizes.clear()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("method", ("rtn", "weighted", "gptq"))
def test_what_plans_have_in_common_is_made_once(method, monkeypatch):
    """Without inputs every matrix once per type; else both ends, whose inputs are those of the dense model."""
    model, text = zoo.build("llama", hidden_size=64, intermediate_size=64), zoo.tokens(6, 16)
    data, check = None if method == "rtn" else text.select(slice(0, 4)), text.select(slice(4, 6))
    names = [m.name for b in blocks_of(model, RUNTIMES["llama.cpp"]) for m in b.modules]
    plans = [dict.fromkeys(names, "Q4_0"), {**dict.fromkeys(names, "Q4_0"), names[0]: "Q8_0"}]
    alone = [DenseOutput(model, check).rows_of(model, plan, data, method) for plan in plans]
    rounded, heads, cls = [], [], type(find_quantiser(method))
    quantise, finals = cls.quantise, Walk.finals
    monkeypatch.setattr(cls, "quantise", lambda s, w, p, level: rounded.append(level.format) or quantise(s, w, p, level))
    monkeypatch.setattr(Walk, "finals", lambda *a: heads.append(1) or finals(*a))
    dense = DenseOutput(model, check)
    together = [dense.rows_of(model, plan, data, method) for plan in (*plans, plans[0])]
    assert [r.tolist() for r in together] == [r.tolist() for r in (*alone, alone[0])]
    ends = {m.name for m in end_modules(model)}
    each = len(names) if method == "rtn" else len(ends)
    assert len(rounded) == 3 * (len(names) - each) + each + (names[0] in ends or method == "rtn")
    assert len(heads) == (method != "rtn")


def test_every_damage_of_a_table_is_of_the_answers():
    """Blocks, embedding and head, and the check: one knapsack has one average."""
    data, model = answers(zoo.tokens(6, 12)), zoo.build("llama", intermediate_size=64)
    other = dataclasses.replace(data, labels=data.labels.masked_fill(torch.arange(12) < 9, -100))
    rows = []
    for text in (data, other):
        table = FormatTable.of(rounding_damage(model, text, family="gguf", draws=8))
        rows.append((table.damage[:, 0], [measured(model, text, table, i, 0) for i in range(len(table.blocks))]))
    predicted, found = (np.log(np.array(b) / np.array(a)) for a, b in zip(*rows, strict=True))
    there = np.isfinite(predicted) & np.isfinite(found)
    assert (np.abs(found[there]) > 1e-3).mean() > 0.9, "other answers, other damages: of ends and of blocks"
    assert np.abs(np.median(found[there] - predicted[there])) < 0.15
    rows = DenseOutput(model, data, 4).rows(zoo.build("llama", intermediate_size=64, seed=1))
    learned = (data.labels[:, 1:] != -100).sum(1).tolist()
    assert rows[:, 1].tolist() == rows[:, 3].tolist() == learned
    changed = zoo.build("llama", intermediate_size=64, seed=1)
    assert rows[:, 0].sum() / rows[:, 1].sum() == pytest.approx(kl(changed, model, data), rel=1e-4)
    with torch.no_grad():
        loss = changed(input_ids=data.input_ids, labels=data.labels).loss
    assert rows[:, 2].sum() / rows[:, 3].sum() == pytest.approx(float(loss), rel=1e-4)


def table_of(rows):
    """A table of one format from ``(K, sequences, 2)`` sums and tokens."""
    damage = [sums.sum() / counts.sum() for sums, counts in np.moveaxis(rows, 2, 1)]
    rest = np.array([deviations(*r.T, mean) for r, mean in zip(rows, damage, strict=True)])[:, None]
    return FormatTable(
        blocks=[None] * len(rows), formats=("w4",), size=np.ones((len(rows), 1), int), damage=np.array(damage)[:, None],
        error=np.linalg.norm(rest, axis=-1), rest=rest, fixed=0, family="", runtime="", method="rtn",
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


def test_the_error_of_a_plan_is_that_of_its_damage_by_sequence(monkeypatch):
    """The oracle takes every sequence alone: labels are drawn by content, so a sequence gives the same there."""
    data, model = answers(zoo.tokens(5, 12)), zoo.build("llama", intermediate_size=64)
    scores = rounding_damage(model, data, formats=["w3-g32", "w4-g32"])
    plan, table = plan_bits(scores, bits=5.0), FormatTable.of(scores)
    k, chosen = np.arange(len(table.blocks)), [table.formats.index(plan.payload.formats[b.name]) for b in table.blocks]
    assert len(set(chosen)) > 1
    np.testing.assert_allclose(np.linalg.norm(table.rest, axis=-1)[:, :2], table.error[:, :2], rtol=1e-3)
    monkeypatch.setattr(R, "pooled", lambda damage, error, norm: (damage, 1.0))
    alone = [FormatTable.of(rounding_damage(model, data.select([s]), formats=["w3-g32", "w4-g32"])).damage for s in range(5)]
    tokens = (data.labels[:, 1:] != -100).sum(1).numpy()
    wanted = per_token(np.array([d[k, chosen].sum() for d in alone]) * tokens, tokens)[1]
    assert plan.payload.predicted_error == pytest.approx(wanted, rel=3e-2), "each alone is pooled by itself"
    assert plan.payload.predicted_error > 1.2 * np.sqrt((table.error[k, chosen] ** 2).sum())


def test_too_few_bits_names_rows_that_no_format_takes():
    """Neither --formats nor --method is advised where no type of llama.cpp is small enough for these rows."""
    data = zoo.tokens(2, 8)
    for hidden, rows in ((240, 240), (256, 300)):
        model = zoo.build("llama", hidden_size=hidden, intermediate_size=300)
        with pytest.raises(InfeasibleBudget, match=rf"stay in F16, first .*rows of {rows} .*--budget \d+\)\.$"):
            plan_bits(model, data, bits=3.0, family="gguf")
    asked = {"family": "gguf", "formats": ["Q6_K"]}
    model = zoo.build("llama", hidden_size=256, intermediate_size=256, num_attention_heads=4)
    for bits, how in ((3.0, " (--formats)."), (2.3, " (--formats, --method weighted)."), (1.0, "")):
        with pytest.raises(InfeasibleBudget) as error:
            plan_bits(model, data, bits=bits, **asked)
        assert str(error.value).partition(", or measure the model with smaller ones")[2] == how
    with pytest.raises(InvalidInput, match="is to be kept in Q5_0, which is not among .*--formats Q5_0,Q6_K"):
        plan_bits(model, data, bits=7, keep={"q_proj": "Q5_0"}, **asked)


def test_bad_input_is_one_sentence():
    model, data = zoo.build("llama"), zoo.tokens(2, 8)
    with pytest.raises(InvalidInput, match="vllm has no kernel for w3-g8.*of 2 to 8 bits in groups of 16, 32"):
        rounding_damage(model, data, runtime="vllm", formats=["w3-g8"])
    with pytest.raises(
        InvalidInput,
        match="No matrix can be stored in w4-g128. .* the matrices have 32, 48 inputs. Name others, such as w4-g32",
    ):
        rounding_damage(model, data, formats=["w4-g128"])
    with pytest.raises(InvalidInput, match="llama.cpp does not read compressed-tensors"):
        rounding_damage(model, data, runtime="llama.cpp")
    with pytest.raises(InvalidInput, match="no runtime 'mlx'"):
        rounding_damage(model, data, runtime="mlx")
    with pytest.raises(InvalidInput, match="by is 'row'"):
        rounding_damage(model, data, by="row")


@pytest.mark.parametrize(
    ("rule", "family", "limit", "left_out"),
    [
        ("mix", "gguf", {"like": "Q4_0"}, "MXFP4"),
        ("uniform", "gguf", {"like": "Q4_0"}, "MXFP4"),
        ("uniform", "compressed-tensors", {"bits": 6.0}, "w2-g32"),
        ("protect-ends", "compressed-tensors", {"bits": 6.0}, "w2-g32"),
    ],
)
def test_a_rule_without_a_program_measures_its_own_formats_alone(rule, family, limit, left_out, monkeypatch, tmp_path):
    measured, measure = [], R.rounding_damage
    own = {"rule": rule, "family": family, "draws": 1, **limit, **({"group": 32} if family != "gguf" else {})}

    @functools.wraps(measure)
    def seen(model, data, **options):
        scores = measure(model, data, **options)
        measured.append(scores.extra["formats"]["formats"])
        return scores

    monkeypatch.setattr("layerbudget.decisions.bits.plan.rounding_damage", seen)
    model, data = zoo.build("llama", hidden_size=64, intermediate_size=64), zoo.tokens(2, 8)
    alone = plan_bits(model, data, **own)
    everything = plan_bits(model, data, save_scores=tmp_path / "s.json", **own)
    few, many = measured
    assert set(few) < set(many) and left_out in set(many) - set(few)
    assert alone.payload.formats == everything.payload.formats and alone.budget == everything.budget
    beside = {n: row["spent"] for n, row in everything.payload.baselines.items() if n != "exact"}
    assert {n: row["spent"] for n, row in alone.payload.baselines.items()} == beside
    assert alone.payload.curve == [], "the best plans would have other formats"
    assert "the exact program" not in str(comparison_table(alone)) and "nats per token" in verdict(alone)


FEW_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 channels, for caches of llama.cpp


@pytest.mark.parametrize(
    "own",
    [
        {"like": "Q4_K_M"},
        {"bits": 5.0, "family": "gguf", "method": "weighted", "formats": ["Q3_K", "Q4_K", "Q6_K"]},
        pytest.param({"like": "IQ1_S", "method": "weighted"}, marks=pytest.mark.slow),  # ggml prepares lattices for seconds
        {"bits": 9.0, "rule": "uniform"},
    ],
)
def test_the_table_of_formats_is_built_once_for_a_plan(tmp_path, monkeypatch, own):
    """It was built up to three times, and the header of a GGUF file was written as often to know its bytes."""
    built = []

    @functools.wraps(formats_table)
    def counted(*words, **options):
        built.append(options)
        return formats_table(*words, **options)

    for module in (planning, R):
        monkeypatch.setattr(module, "formats_table", counted)
    model, data = zoo.build("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1), zoo.tokens(2, 8)
    plan_bits(model, data, draws=1, rows=2, tokenizer=None, **own)
    assert len(built) == 1
    plan_memory(zoo.build("llama", **FEW_HEADS), data, memory="0.9 MiB", context=32, draws=1, save_scores=tmp_path / "s")
    assert len(built) == 2


def test_the_same_blocks_in_other_formats_are_those_of_a_table_of_their_own():
    model, names = zoo.build("llama", hidden_size=256, intermediate_size=256), ["Q4_K", "IQ4_NL", "F16"]
    usual, other = (formats_table(model, family="gguf", formats=f).record() for f in (None, names))
    assert in_formats(formats_table(model, family="gguf"), names).record() == other != usual


@pytest.mark.parametrize("own", [{"bits": 16.0, "rule": "mix"}, {"like": "Q4_K_M", "family": "compressed-tensors"}])
def test_mixes_of_llama_cpp_are_refused_for_other_files_before_the_measurement(own, monkeypatch):
    monkeypatch.setattr(planning, "rounding_damage", None)
    with pytest.raises(InvalidInput, match="llama.cpp, and this plan is for compressed-tensors.*Plan for family='gguf'"):
        plan_bits(zoo.build("llama"), zoo.tokens(2, 8), **own)


def test_an_option_that_no_measurement_reads_is_refused_before_it_begins():
    with pytest.raises(InvalidInput, match="has no option drawz. Its options: formats, family"):
        plan_bits(zoo.build("llama"), zoo.tokens(2, 8), bits=6.0, drawz=2)
