"""Plans of bits from invented damages: exact, within the budget, and never behind what needs no program."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerbudget.compressors.formats import find_format
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.request import BitsRequest
from layerbudget.decisions.formats.baselines import BASELINES
from layerbudget.decisions.formats.program import is_allowed, other_plan
from layerbudget.decisions.formats.table import FormatTable
from layerbudget.errors import CorruptFile, InfeasibleBudget, InvalidInput, UnknownUnit
from layerbudget.llama_cpp.mixes import MIXES, LlamaModel, Tensor, types_of
from layerbudget.models.memory import cache_of
from layerbudget.plan import Plan
from layerbudget.records import Block, Module
from layerbudget.reporting.explain import explain_plan
from layerbudget.reporting.page import plan_details
from layerbudget.reporting.sweep import diff_plans, sweep
from layerbudget.reporting.verdict import verdict
from layerbudget.scores import Scores

NAMES = ["w2-g32", "w3-g32", "w4-g32", "w8-g32", "bf16"]


def record(layers=4, seed=0, gap=False):
    rng = np.random.default_rng(seed)
    parts = (("self_attn.v_proj", 32, 64), ("self_attn.o_proj", 64, 64), ("mlp.down_proj", 64, 96))
    modules = [Module(name=f"model.layers.{i}.{n}", d_out=a, d_in=b) for i in range(layers) for n, a, b in parts]
    blocks = [Block(name=m.name, modules=(m,)) for m in modules]
    size = [[find_format(n).bytes(m.d_out, m.d_in) for n in NAMES] for m in modules]
    damage = np.exp(rng.normal(size=(len(blocks), 1))) * np.array([1.0, 0.2, 0.05, 0.001, 0.0])
    damage = damage.tolist()
    if gap:
        damage[1][1] = None
    error = [[0.05 * (x or 0) for x in row] for row in damage]
    own = {"fixed": 1000, "family": "compressed-tensors", "runtime": "transformers", "method": "rtn"}
    rest = [[[e] for e in row] for row in error]
    choices = {"formats": NAMES, "size": size, "damage": damage, "error": error, "rest": rest, **own}
    gain = {b.name: row[0] for b, row in zip(blocks, damage, strict=True)}
    return Scores.from_values(blocks, gain, estimator="rounding", extra={"formats": choices})


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(2.6, 16), st.booleans(), st.sampled_from(["exact", *BASELINES]))
def test_every_rule_keeps_the_budget_and_none_beats_the_program(seed, bits, gap, rule):
    scores = record(seed=seed, gap=gap)
    plan, best = plan_bits(scores, bits=bits, rule=rule), plan_bits(scores, bits=bits)
    numel = sum(b.numel for b in plan.blocks)
    assert plan.budget["spent"] == plan.counts.sum() <= plan.budget["limit"] == int(bits * numel // 8)
    assert best.payload.predicted <= plan.payload.predicted + 1e-12
    assert all(best.payload.predicted <= row["predicted"] + 1e-12 for row in best.payload.baselines.values())
    for block in plan.blocks:
        m = next(b for b in scores.blocks if b.name == block.name).modules[0]
        assert block.count == find_format(plan.payload.formats[m.name]).bytes(m.d_out, m.d_in)
        assert block.value == pytest.approx(8 * block.count / block.numel)


def test_baselines_spend_what_they_can():
    scores = record(layers=12)
    for bits in (3.0, 3.6, 4.2, 5.0):
        limit = plan_bits(scores, bits=bits).budget["limit"]
        for rule in ("uniform", "protect-ends"):
            assert plan_bits(scores, bits=bits, rule=rule).budget["spent"] > 0.97 * limit
    even = plan_bits(scores, bits=3.5, rule="uniform").payload.formats
    table = FormatTable.of(scores)
    exact = int(table.size[:, 1].sum())
    same = plan_bits(scores, budget=f"{exact + 1000} bytes", rule="uniform")
    assert set(same.payload.formats.values()) == {"w3-g32"} and same.budget["spent"] == exact
    assert set(even.values()) == {"w2-g32", "w3-g32"}
    ends = plan_bits(scores, budget=f"{exact + 1000 + 3072} bytes", rule="protect-ends").payload.formats
    assert {n.split(".")[2] for n, f in ends.items() if f != "w3-g32"} == {"0", "11"}


def test_bits_per_weight_lie_within_what_a_plan_can_have():
    for bits in (99, 0, -1, float("nan")):
        with pytest.raises(InvalidInput, match="above 0 and at most 16"):
            plan_bits(record(), bits=bits)


def test_a_plan_is_a_file_and_is_explained_compared_swept_and_reported(tmp_path):
    scores = record()
    plan = plan_bits(scores, bits=4.0)
    assert Plan.load(plan.save(tmp_path / "bits.json")).to_dict() == Plan.from_dict(plan.to_dict()).to_dict()
    said = " ".join(explain_plan(plan)["sentences"])
    assert "bits per weight" in said and "KKT" not in said and "no other choice within" in said
    assert "no certificate" in " ".join(explain_plan(plan_bits(scores, bits=4.0, rule="uniform"))["sentences"])
    moved = diff_plans(plan, plan_bits(scores, bits=3.0))
    assert not moved["same"] and moved["moved"] > 0
    rows = sweep(scores, kind="bits", budgets=[3.0, 4.0, 5.0])["rows"]
    assert [r["front"] for r in rows] == [True] * 3
    assert rows[0]["value"] > rows[1]["value"] > rows[2]["value"] and rows[1]["value"] == plan.payload.predicted
    assert "Certificate" in plan_details(plan, "bits")
    broken = plan.to_dict()
    del broken["extra"]["formats"]
    with pytest.raises(CorruptFile, match="extra of this plan"):
        Plan.from_dict(broken)


def test_bad_input_is_one_sentence():
    scores = record()
    with pytest.raises(InfeasibleBudget, match=r"The smallest plan takes [\d,]+ bytes \(2\.5"):
        plan_bits(scores, bits=2.0)
    with pytest.raises(InfeasibleBudget, match="0 bytes for 12 blocks"):
        plan_bits(scores, budget="10 bytes")
    with pytest.raises(UnknownUnit, match="not in bytes"):
        plan_bits(scores, budget="3M params")
    with pytest.raises(InvalidInput, match="Give one of bits, budget and like"):
        plan_bits(scores)
    with pytest.raises(InvalidInput, match="above 0 and at most 16"):
        plan_bits(scores, bits=float("nan"))
    with pytest.raises(InvalidInput, match="no rule 'mdl' for bits"):
        plan_bits(scores, bits=4, rule="mdl")
    with pytest.raises(InvalidInput, match="has no option exponent"):
        sweep(scores, kind="bits", budgets=[4.0], exponents=[2.0])
    with pytest.raises(InvalidInput, match="planned as they are"):
        plan_bits(scores, bits=4, group=32)
    with pytest.raises(InvalidInput, match="say nothing of formats"):
        plan_bits(Scores.from_values(scores.blocks, {b.name: 1.0 for b in scores.blocks}), bits=4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"formats": {}}, r"gives {name} no format"),
        ({"kind": "w4-g32"}, r"gives {name} the format w4-g32\. llama\.cpp has no kernel"),
        ({"kind": "Q99"}, r"gives {name} the format Q99\. There is no format"),
        ({"kind": "F16"}, r"{name} has the format F16 in this plan, and [\d,]+ bytes for .* contradict each other.*--keep"),
        ({"family": "compressed-tensors"}, r"llama\.cpp does not read compressed-tensors"),
    ],
)
def test_a_plan_whose_formats_cannot_be_is_refused_where_it_is_read(change, said):
    record = plan_bits(gguf_record(layers=2), bits=4.0).to_dict()
    name = record["blocks"][0]["modules"][0]
    assert record["extra"]["formats"][name] != "F16"
    record["extra"] |= {"formats": {**record["extra"]["formats"], name: change["kind"]}} if "kind" in change else change
    with pytest.raises(CorruptFile, match=said.format(name=re.escape(name))):
        Plan.from_dict(record)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("x", "say nothing of formats"),
        ({"size": None}, "do not read"),
        ({"formats": NAMES[:-1]}, "not of 12 blocks and 4 formats"),
    ],
)
def test_damaged_scores_of_formats_are_refused(change, said):
    scores = record()
    formats = change if isinstance(change, str) else {**scores.extra["formats"], **change}
    broken = dataclasses.replace(scores, extra={"formats": formats})
    with pytest.raises((CorruptFile, InvalidInput), match=said):
        (BitsRequest(source="x.json", bits=5.0).check_measured(broken), plan_bits(broken, bits=5.0))


# --- GGUF: llama.cpp's mixes, forbidden and kept formats ---------------------------------------------------------------------

TYPES = ["IQ2_S", "Q2_K", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", "Q8_0", "F16"]
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_record(layers=8, seed=0, formats=TYPES, imatrix=True, width=512, heads=2):
    """Damages that fall with the bytes, and differ by matrix."""
    rng = np.random.default_rng(seed)
    modules = [Module(name="model.embed_tokens", d_out=1024, d_in=width), Module(name="lm_head", d_out=1024, d_in=width)]
    stored = [["token_embd.weight"], ["output.weight"]]
    for i in range(layers):
        modules += [Module(name=f"model.layers.{i}.{n}", d_out=256, d_in=width) for n in PARTS]
        stored += [[f"blk.{i}.{n}.weight"] for n in PARTS.values()]
    blocks = [Block(name=m.name, modules=(m,)) for m in modules]
    fits = [[find_format(f).fits(m.d_in) for f in formats] for m in modules]
    size = [
        [find_format(f).bytes(m.d_out, m.d_in) if ok else None for f, ok in zip(formats, row)] for m, row in zip(modules, fits)
    ]
    weight = np.exp(2 * rng.normal(size=len(modules)))
    damage = [[None if b is None else w * 4.0 ** (-8 * b / m.numel) for b in row] for m, w, row in zip(modules, weight, size)]
    own = {"fixed": 4096, "family": "gguf", "runtime": "llama.cpp", "method": "weighted" if imatrix else "rtn"}
    own |= {"llama": {"architecture": "llama", "layers": layers, "heads": heads, "experts": 0, "imatrix": imatrix}}
    error = [[0.05 * (x or 0) for x in row] for row in damage]
    choices = {"formats": formats, "size": size, "damage": damage, "error": error, "stored": stored}
    cache = {"layers": [[256, 0]] * layers, "state": 0, "vocabulary": 1024, "hidden": width, "inner": width, "positions": 4096}
    choices |= {"rest": [[[e] for e in row] for row in error], "head": 1000, "cache": cache, **own}
    gain = {b.name: max(d for d in row if d is not None) for b, row in zip(blocks, damage, strict=True)}
    return Scores.from_values(blocks, gain, estimator="rounding", extra={"formats": choices})


def mix_bytes(scores, mix):
    """Bytes of a mix, and its types, from the rules and the sizes of its types alone."""
    held = scores.extra["formats"]
    modules = [b.modules[0] for b in scores.blocks]
    tensors = [Tensor(name=n, d_out=m.d_out, d_in=m.d_in) for (n,), m in zip(held["stored"], modules, strict=True)]
    types = types_of(mix, LlamaModel(**held["llama"]), tensors)
    return sum(find_format(t).bytes(m.d_out, m.d_in) for t, m in zip(types, modules, strict=True)), types


@pytest.mark.parametrize(
    "mix", ["Q2_K", "IQ3_M", "Q3_K_S", "Q3_K_L", "IQ4_XS", "Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
)
def test_a_plan_like_a_mix_has_its_bytes_at_most_and_less_damage(mix):
    scores = gguf_record()
    size, types = mix_bytes(scores, mix)
    plan, own = plan_bits(scores, like=mix.lower()), plan_bits(scores, like=mix, rule="mix")
    assert plan.budget["limit"] == size >= plan.budget["spent"] and plan.hyperparameters["like"] == mix.lower()
    assert list(own.payload.formats.values()) == types and own.budget["spent"] == size
    assert plan.payload.mix == own.payload.mix == mix
    beside = plan.payload.baselines["mix"]
    assert (beside["predicted"], beside["spent"]) == (own.payload.predicted, size)
    assert plan.payload.predicted <= own.payload.predicted
    assert Plan.from_dict(plan.to_dict()).to_dict() == plan.to_dict()


def test_a_plan_is_compared_with_the_best_mix_that_fits():
    scores = gguf_record()
    limit = mix_bytes(scores, "Q4_K_M")[0] + 5000
    plan = plan_bits(scores, budget=f"{limit + 4096 + 1000} bytes")
    fitting = {m: plan_bits(scores, like=m, rule="mix") for m in MIXES if mix_bytes(scores, m)[0] <= limit and
               set(mix_bytes(scores, m)[1]) <= set(TYPES)}  # fmt: skip
    best = min(fitting, key=lambda m: fitting[m].payload.predicted)
    assert plan.payload.mix == best and plan.payload.baselines["mix"]["predicted"] == fitting[best].payload.predicted
    blind = plan_bits(gguf_record(imatrix=False), like="IQ2_M")  # llama.cpp makes none without an importance matrix
    assert blind.budget["limit"] == mix_bytes(scores, "IQ2_M")[0] and blind.payload.mix != "IQ2_M"
    assert plan_bits(gguf_record(formats=["Q4_0", "F16"]), bits=6).payload.mix is None


def test_forbidden_formats_are_not_used_and_kept_ones_are():
    scores = gguf_record()
    keep = {"lm_head": "Q8_0", r"blk\.0\.ffn": "Q6_K"}
    plan = plan_bits(scores, like="Q3_K_M", forbid=["slow-cpu", "Q2_K"], keep=keep)
    formats = plan.payload.formats
    assert not {"IQ2_S", "IQ3_S", "Q2_K"} & set(formats.values()) and formats["lm_head"] == "Q8_0"
    assert {f for n, f in formats.items() if ".layers.0.mlp." in n} == {"Q6_K"}
    assert plan.hyperparameters["forbid"] == ["slow-cpu", "Q2_K"] and plan.hyperparameters["keep"] == keep
    mixed = plan_bits(scores, like="Q5_K_M", keep=keep, rule="mix").payload
    types = dict(zip(scores.names, mix_bytes(scores, mixed.mix)[1], strict=True))
    changed = {n for n, f in mixed.formats.items() if types[n] != f}
    assert "lm_head" in changed and changed <= {"lm_head", *(f"model.layers.0.{p}" for p in PARTS)}
    for bad, words in (
        ({"forbid": ["slow"]}, "no format 'slow'"),
        ({"keep": {"lm_head": "slow-cpu"}}, "no format 'slow-cpu'"),
        (
            {"keep": {"head": "IQ2_XXS"}},
            "lm_head is to be kept in IQ2_XXS, .*Measure it too .plan bits MODEL --formats IQ2_XXS,IQ2_S,",
        ),
        ({"keep": {"nothing": "Q8_0"}}, "no matrix matches"),
        ({"keep": {"(": "Q8_0"}}, "no regular expression"),
        ({"forbid": [*TYPES]}, "may not have any format"),
    ):
        with pytest.raises(InvalidInput, match=words):
            plan_bits(scores, bits=4.0, **bad)
    with pytest.raises(InfeasibleBudget, match=r"The smallest plan takes [\d,]+ bytes \(3\..*forbid and keep less"):
        plan_bits(scores, bits=3.2, forbid=["slow-cpu", "Q2_K"])


def test_a_mix_beside_a_plan_is_llama_cpps_own_whatever_the_plan_keeps_and_forbids():
    scores, asked = gguf_record(), {"like": "Q4_K_M", "keep": {"lm_head": "Q8_0"}, "forbid": ["Q6_K"]}
    plan, free = plan_bits(scores, **asked).payload, plan_bits(scores, like="Q4_K_M").payload
    assert "Q6_K" in mix_bytes(scores, "Q4_K_M")[1] and plan.mix == free.mix == "Q4_K_M"
    assert all(plan.baselines["mix"][key] == free.baselines["mix"][key] for key in ("predicted", "spent"))
    assert plan.formats["lm_head"] == "Q8_0" and "Q6_K" not in plan.formats.values()
    assert plan.baselines["uniform"]["predicted"] >= plan.predicted > free.predicted


def test_a_mix_saves_keys_and_values_of_latent_attention_that_plans_leave():
    scores, keys, values = gguf_record(), ["blk.0.attn_k_b.weight", 512, 128, 4], ["blk.0.attn_v_b.weight", 128, 512, 4]
    held = scores.extra["formats"]
    latent = {**held, "llama": {**held["llama"], "architecture": "deepseek2", "beside": [keys, values]}}
    scores = dataclasses.replace(scores, extra={"formats": latent})
    spared = 4 * 512 * 128 * 4 - 4 * 512 * 128 // 32 * 22 - 4 * 512 * 128 // 256 * 144  # Q5_0 for rows of 128, Q4_K for 512
    plan, free = plan_bits(scores, like="Q4_K_M"), plan_bits(gguf_record(), like="Q4_K_M")
    assert plan.budget["limit"] == free.budget["limit"] - spared == plan.payload.baselines["mix"]["spent"]
    assert plan.payload.mix == "Q4_K_M" and plan.budget["spent"] == plan.counts.sum() <= plan.budget["limit"]
    assert is_allowed(plan, scores) and not is_allowed(other_plan(plan, scores, "mix"), scores)
    smaller = plan_bits(scores, like="Q4_K_M", rule="mix")
    assert smaller.payload.mix != "Q4_K_M" and smaller.budget["spent"] <= smaller.budget["limit"]


def test_budgets_like_a_mix_are_for_files_of_llama_cpp():
    with pytest.raises(InvalidInput, match="no mix 'Q4_K_XL'"):
        plan_bits(gguf_record(), like="Q4_K_XL")
    with pytest.raises(InvalidInput, match="The bytes of Q4_K_M cannot be counted"):
        plan_bits(record(), like="q4_k")
    with pytest.raises(InvalidInput, match="bits and like were given together"):
        plan_bits(gguf_record(), like="Q4_K_M", bits=4)
    with pytest.raises(InvalidInput, match="The rule mix takes .* and this plan is for compressed-tensors"):
        plan_bits(record(), bits=4, rule="mix")
    with pytest.raises(InfeasibleBudget, match="The smallest plan takes"):
        plan_bits(gguf_record(), like="IQ1_S")


def test_a_sweep_without_budgets_is_at_the_bytes_of_all_mixes():
    scores = gguf_record()
    rows = sweep(scores, kind="bits")["rows"]
    sizes = {m: mix_bytes(scores, m)[0] for m in MIXES}
    alike = {tuple(mix_bytes(scores, m)[1]): m for m in MIXES}  # without experts MXFP4_MOE and Q8_0 are one
    own = sorted(alike.values(), key=sizes.__getitem__)
    assert [r["budget"] for r in rows] == [m for m in own if sizes[m] >= rows[0]["spent"]] and "MXFP4_MOE" not in own
    assert len(rows) > 20 and all(r["spent"] <= sizes[r["budget"]] and r["bytes"] == r["spent"] + 5096 for r in rows)
    own = {r["budget"]: r for r in rows}
    assert own["Q4_K_M"]["mix"] == "Q4_K_M" and own["Q4_K_M"]["value"] < own["Q4_K_M"]["mix_value"]
    assert sweep(scores, kind="bits", budgets=["Q4_K_M", 5.0])["rows"][0] == own["Q4_K_M"]
    assert sweep(scores, kind="bits", budgets=["q4_k_m"])["rows"][0] == own["Q4_K_M"]
    assert sweep(record(), kind="bits", budgets=[4.0])["rows"][0]["mix"] is None
    with pytest.raises(InvalidInput, match="cannot be counted"):
        sweep(record(), kind="bits")
    with pytest.raises(InvalidInput, match="sparsity needs budgets"):
        sweep(record(), kind="sparsity")
    with pytest.raises(InvalidInput, match="'Q4_K_M' is no number"):
        sweep(record(), kind="sparsity", budgets=["Q4_K_M"])
    with pytest.raises(InvalidInput, match="bits was given to a sweep"):
        sweep(record(), kind="bits", budgets=[4.0], bits=5.0)
    with pytest.raises(InvalidInput, match="like was given to a sweep"):
        sweep(record(), kind="bits", budgets=[4.0], like="Q4_K_M")


# --- memory beside the weights ------------------------------------------------------------------------------------------------

SMOL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "vocab_size": 49152}
SMOL["intermediate_size"] = 1536
WAIT = 512 * 4 * (8 * 576 + 2 * 1536) + 4 * 49152  # bytes of a forward beside the mask


def test_cache_and_buffers_are_those_that_llama_server_reports():
    cache = cache_of(SimpleNamespace(**SMOL, max_position_embeddings=8192))
    for context, held, buffers in ((512, 11.25, 15.14), (2048, 45.0, 16.64), (8192, 180.0, 22.64)):  # its lines, in MiB
        assert cache.held(context) == held * 2**20 and 1 <= cache.buffers(context) / (buffers * 2**20) < 1.04
    llama = {
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "vocab_size": 4096,
    }
    small = cache_of(SimpleNamespace(**llama, intermediate_size=768))
    experts = cache_of(SimpleNamespace(**llama, moe_intermediate_size=256, num_experts_per_tok=2, intermediate_size=768))
    for found, context, buffers in ((small, 256, 3.63), (small, 512, 7.52), (experts, 256, 2.88), (experts, 512, 6.02)):
        assert 0.999 <= found.buffers(context) / (buffers * 2**20) < 1.1
    assert 1 <= cache.buffers(512, 4) / (15.14 * 2**20) < 1.1 and cache.buffers(256) < 0.52 * cache.buffers(512)
    for room, longest in ((cache.bytes(5000), 5120), (cache.bytes(4096) - 1, 3840), (10, 0)):
        assert cache.longest(lambda tokens, room=room: cache.bytes(tokens) <= room) == longest
    long = cache_of(SimpleNamespace(**SMOL))
    assert long.bytes(131072) == 5.625 * 512 * 2**20 + WAIT + 512 * 2 * 131072


def test_caches_of_windows_latents_and_states():
    kinds = ["sliding_attention", "full_attention", "linear_attention"] * 10
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    config = {**SMOL, "layer_types": kinds, "sliding_window": 128, **linear, "linear_conv_kernel_dim": 4}
    cache = cache_of(SimpleNamespace(**config))
    state = 10 * 4 * (4 * 8 * 16 + 4 * (2 * 2 * 8 + 4 * 16))
    assert cache.bytes(4096) - cache.buffers(4096) == 10 * 768 * (4096 + 768) + state  # 128 + 512 tokens in steps of 256
    latent = cache_of(SimpleNamespace(**SMOL, kv_lora_rank=512, qk_rope_head_dim=64))
    assert latent.bytes(1024) - latent.buffers(1024) == 30 * 2 * 576 * 1024
    shared = cache_of(SimpleNamespace(**SMOL, num_kv_shared_layers=10))
    assert shared.bytes(1024) - shared.buffers(1024) == 20 * 768 * 1024
    assert cache_of(SimpleNamespace(**SMOL, layer_types=["mamba"] * 30)) is None


@pytest.mark.parametrize(
    ("method", "samples", "said"), [("gptq", 3, True), ("gptq", 4, False), ("weighted", 1, False), ("padded", 4, True)]
)
def test_a_text_that_is_too_short_for_error_feedback_is_said(method, samples, said):
    """Rows of 96: 4 x 96 tokens are enough. Padding is no text."""
    mask = torch.ones(samples, 96, dtype=torch.int64)
    mask[:, 72:] = method != "padded"
    text, choices = CalibrationSet(input_ids=mask, attention_mask=mask), record().extra["formats"]
    own = {"data": text.describe(), "extra": {"formats": {**choices, "method": method.replace("padded", "gptq")}}}
    plan = plan_bits(dataclasses.replace(record(), **own), bits=4.5)
    assert ("288 tokens, rows of 96" in verdict(plan) and "384 tokens or more" in verdict(plan)) == said
    assert Plan.from_dict(plan.to_dict()).payload.few_tokens == plan.payload.few_tokens
