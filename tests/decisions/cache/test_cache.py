"""Plans of the cache: damage against plain loops and what is measured, bytes against a filled cache, words for runtimes."""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex

import numpy as np
import pytest
import torch
import transformers
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.decisions.bits.sensitivity import DenseOutput
from layerbudget.decisions.cache import cache, sensitivity
from layerbudget.decisions.cache.cache import caching, kept, rounded, rounding
from layerbudget.decisions.cache.export import llama_cache, modelopt_cache, vllm_cache
from layerbudget.decisions.cache.formats import CachedTensor, find_cache
from layerbudget.decisions.cache.hqq import PackedLayer
from layerbudget.decisions.cache.plan import cache_space, plan_cache
from layerbudget.decisions.cache.sensitivity import cache_damage
from layerbudget.decisions.cache.space import CacheSpace
from layerbudget.errors import CorruptFile, CoverageError, InfeasibleBudget, InvalidInput, ModelMismatch, UnknownUnit
from layerbudget.execution import memory
from layerbudget.execution.loss import logits_of, sampled_targets, summed_loss, unlabelled
from layerbudget.exports import EXPORTS, format_for
from layerbudget.models.blocks import describe
from layerbudget.models.memory import cache_of
from layerbudget.models.offload import mapped
from layerbudget.plan import Plan
from layerbudget.reporting.explain import explain_plan
from layerbudget.sensitivity.sequences import per_token

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}  # heads of 32 channels


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int4-g16", "int8", "fp8", "Q4_0", "Q8_0", "IQ4_NL"])
def test_what_is_read_back_is_the_nearest_that_the_format_has(name):
    """Whole numbers and e4m3 by trying all of them; llama.cpp's types by its own package, their bytes too."""
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 0
    x[1, 1, 1] += 100
    runtime = find_cache("transformers" if name[:3] == "int" else "vllm" if name == "fp8" else "llama.cpp")
    form = runtime.formats([64], [name], 32 if name[:3] == "int" else None)[0]
    got = rounded(x, form)
    if name[:3] == "int":
        groups = x.unflatten(-1, (-1, 16 if name == "int4-g16" else 32))
        low = groups.amin(-1, keepdim=True).half().float()
        step = ((groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**form.bits - 1)).half().float()
        points = low[..., None] + step[..., None] * torch.arange(2**form.bits)
        best = (points - groups[..., None]).abs().amin(-1)
        assert torch.allclose((got.reshape(groups.shape) - groups).abs(), best, atol=1e-6)
        assert form.bytes == groups.shape[-1] * form.bits // 8 + 4
    elif name == "fp8":
        points = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        assert torch.equal(
            (got.abs()[..., None] - x.abs()[..., None]).abs(), (points - x.abs()[..., None]).abs().amin(-1, True)
        )
    else:
        gguf = pytest.importorskip("gguf")
        kind = gguf.GGMLQuantizationType[name]
        assert form.bytes == gguf.GGML_QUANT_SIZES[kind][1] and form.group == gguf.GGML_QUANT_SIZES[kind][0]
        assert form.rotated and (got - x).abs().max() < 13
        assert torch.equal(rounded(got, form)[0, 0], got[0, 0])
        if name != "IQ4_NL":
            rows = x.reshape(-1, 64).numpy()
            assert np.array_equal(got.reshape(-1, 64).numpy(), gguf.dequantize(gguf.quantize(rows, kind), kind))


def one_by_one(model, data, space, seed, draws):
    """The Fisher form by a plain loop: every sequence, block and format alone, the derivative by a small step both ways."""
    plain = np.full(len(space.blocks), len(space.formats) - 1)
    total, tokens, step = np.zeros((len(space.blocks), len(space.formats))), 0, 0.005
    for batch in unlabelled(model, data, 1):
        tokens += int((batch.targets != -100).sum())
        dense = logits_of(model, batch)
        labels = [sampled_targets(dense, batch, 1009 * seed + draw) for draw in range(draws)]
        for i, j in np.ndindex(len(space.blocks), len(space.formats) - 1):
            chosen = plain.copy()
            chosen[i] = j
            whole = rounding(space.by_layer(chosen))

            def part(layer, *states, sign, whole=whole):
                new = whole(layer, *states)
                return tuple(x + sign * step * (y - x) for x, y in zip(states, new, strict=True))

            sides = []
            for sign in (1.0, -1.0):
                with caching(model, functools.partial(part, sign=sign)):
                    logits = logits_of(model, batch).double()
                sides.append([float(summed_loss(logits, each)) for each in labels])
            total[i, j] += np.square(np.subtract(*sides) / (2 * step)).mean()
    return total / (2 * tokens)


def test_gradients_of_keys_and_values_need_few_logits_at_a_time(monkeypatch):
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 10, vocabulary=96, padded=True)
    space, sizes = cache_space(model, 10, 1, "transformers", ["int2", "int4"]), []
    wanted, rest, _ = cache_damage(model, data, space, 2, 3, batch_size=2)
    monkeypatch.setattr(memory, "HEAD", 4 * 96 * 2 * 3)
    handle = model.lm_head.register_forward_hook(lambda m, given, out: sizes.append(out[..., 0].numel()))
    found, more, _ = cache_damage(model, data, space, 2, 3, batch_size=2)
    handle.remove()
    assert max(sizes[-4:]) == 6
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    np.testing.assert_allclose(more, rest, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("graphs", [1 << 30, 0])
@pytest.mark.parametrize(("name", "runtime"), [("llama", "transformers"), ("gemma3", "vllm"), ("qwen3", "llama.cpp")])
def test_a_streamed_model_gets_the_plan_of_the_one_in_memory(tmp_path, monkeypatch, name, runtime, graphs):
    """Its graphs remember which weights they need, or every layer runs again. Streamed models were refused."""
    more = {} if name == "llama" else {"head_dim": 32}
    zoo.build(name, **WIDE, **more).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(sensitivity, "GRAPHS", graphs)
    monkeypatch.setattr(sensitivity, "TOGETHER", 24)  # two sequences go through the layers together
    padded, check = zoo.tokens(5, 12, vocabulary=96, padded=True), zoo.tokens(3, 12, vocabulary=96, seed=9)
    plans = []
    for stream in (False, True):
        model = lb.load_model(str(tmp_path), dtype="float32", stream=stream)
        options = {"context": 12, "runtime": runtime, "bits": 9.0, "draws": 2, "batch_size": 1}
        plans.append(plan_cache(model, padded, check, **options))
    whole, streamed = (dataclasses.asdict(plan.payload) for plan in plans)
    assert mapped(model).converts and plans[0].payload.formats == plans[1].payload.formats
    assert whole["predicted"] == streamed["predicted"] and whole["baselines"] == streamed["baselines"]
    for rule, row in plans[0].payload.check.rows.items():
        assert row.kl == pytest.approx(plans[1].payload.check.rows[rule].kl, rel=1e-5, abs=1e-9)


def test_a_streamed_model_whose_layers_share_state_is_refused(tmp_path, monkeypatch):
    zoo.build("llama", **WIDE).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(sensitivity, "unwalkable", lambda *_: "its layers share state")
    model = lb.load_model(str(tmp_path), dtype="float32", stream=True)
    with pytest.raises(CoverageError, match=r"its layers share state.*--no-stream"):
        plan_cache(model, zoo.tokens(2, 12, vocabulary=96), context=12, bits=6.0, draws=1)


@pytest.mark.parametrize(("name", "runtime"), [("llama", "transformers"), ("gemma3", "vllm"), ("qwen3", "llama.cpp")])
def test_damage_is_the_fisher_form_of_a_plain_loop(name, runtime, monkeypatch):
    monkeypatch.setattr("layerbudget.decisions.cache.sensitivity.pooled", lambda damage, *_: (damage, 1.0))
    more = {} if name == "llama" else {"head_dim": 32}
    model, data = zoo.build(name, **WIDE, **more).double(), zoo.tokens(2, 10, vocabulary=96, padded=name == "llama")
    names = {"transformers": ["int2"], "vllm": ["fp8"], "llama.cpp": ["Q4_0"]}[runtime]
    space = cache_space(model, 10, 1, runtime, names)
    before = describe(model)["digest"]
    found, rest, passes = cache_damage(model, data, space, 2, 3, batch_size=2)
    assert describe(model)["digest"] == before and passes == 5.0 and (found[:, -1] == 0).all()
    with torch.no_grad():
        np.testing.assert_allclose(found, one_by_one(model, data, space, 3, 2), rtol=1e-2, atol=1e-9)
    alone = cache_damage(model, data, space, 2, 3, batch_size=1)
    np.testing.assert_allclose(found, alone[0], rtol=1e-6)
    np.testing.assert_allclose(rest.sum(-1), 0, atol=1e-9 * found.max())


def test_damage_predicts_what_is_measured():
    model, data = zoo.build("llama", **WIDE), zoo.tokens(8, 24, vocabulary=96)
    space = cache_space(model, 24, 1, "transformers", ["int3", "int4"])
    found = cache_damage(model, data, space, 16)[0]
    dense, told = DenseOutput(model, data), []
    for i in range(len(space.blocks)):
        chosen = np.full(len(space.blocks), 2)
        chosen[i] = 0
        with caching(model, rounding(space.by_layer(chosen))):
            told.append(per_token(*dense.rows(model)[:, :2].T)[0])
    ratio = found[:, 0] / np.array(told)
    assert 0.7 < np.median(ratio) < 1.4 and np.corrcoef(np.log(found[:, 0]), np.log(told))[0, 1] > 0.9


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding", "gpt2", "mixtral"])
def test_bytes_are_those_of_a_cache_that_was_filled(name):
    """Sliding windows keep no more than their tokens; counted from transformers' own cache after a forward."""
    model, ids = zoo.build(name), zoo.tokens(2, 20).input_ids
    space = cache_space(model, 20, 2, "transformers", ["bf16"])
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    slides = [bool(getattr(layer, "is_sliding", False)) for layer in cache.layers]
    # transformers keeps one token less than the window: the next one completes it
    numbers = [(x.shape[2] + s, x) for layer, s in zip(cache.layers, slides, strict=True) for x in (layer.keys, layer.values)]
    wanted = sum(2 * tokens * x.shape[0] * x.shape[1] * x.shape[3] for tokens, x in numbers)
    assert int(space.table().size[:, -1].sum()) == wanted
    paged = cache_space(model, 32, 2, "vllm").table().size.sum(0)  # whole blocks of 16 tokens
    assert paged[1] == 2 * paged[0] >= wanted


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("context", [20, 600, 3000])
def test_llama_cpp_allocates_what_the_configuration_says(name, context):
    """Two counts of one thing: from a forward of one token, and from the configuration alone."""
    model = zoo.build(name, max_position_embeddings=4096)
    known = cache_of(model.config)
    found = int(cache_space(model, context, 1, "llama.cpp", ["F16"]).table().size.sum())
    assert found == known.held(context) == known.bytes(context) - known.buffers(context) - known.state


@pytest.mark.parametrize("name", ["mistral-sliding", "phi3", "gemma2", "gpt-oss"])
def test_llama_cpp_keeps_all_tokens_of_windows_that_it_does_not_compute(name):
    """They were counted as one window and a batch: a context of 4,096 tokens took five times the budget."""
    model = zoo.tiny(name, sliding_window=8, max_position_embeddings=4096)
    layers, found = model.config.num_hidden_layers, cache_space(model, 4096, 1, "llama.cpp", ["F16"])
    tokens = [m.d_in for b in found.blocks for m in b.modules]
    assert min(tokens) == (768 if name in ("gemma2", "gpt-oss") else 4096) and len(tokens) == 2 * layers
    again = CacheSpace.read(json.loads(json.dumps(found.record())), 4096, 1)
    assert np.array_equal(again.table().size, found.table().size)
    assert {k.window for each in cache_space(model, 32, 1, "vllm", ["bf16"]).members for k in each} >= {8}


@pytest.mark.parametrize(("context", "blocks"), [(20, 3), (600, 34), (3000, 34)])
def test_vllm_reserves_a_window_with_the_tokens_of_a_forward(context, blocks):
    """``min(window - 1 + 512, context)`` tokens in blocks of 16, and one block more."""
    model = zoo.tiny("mistral-sliding", sliding_window=8, max_position_embeddings=4096)
    space = cache_space(model, context, 3, "vllm", ["bf16"])
    assert {m.d_in for b in space.blocks for m in b.modules} == {3 * 16 * blocks}


def test_a_plan_is_checked_kept_and_used(tmp_path):
    model, data = zoo.build("llama", **WIDE), zoo.tokens(6, 24, vocabulary=96)
    held = zoo.tokens(4, 24, vocabulary=96, seed=9)
    plan = plan_cache(model, data, held, context=24, batch=3, bits=5.3, draws=2)
    assert plan.budget["spent"] <= plan.budget["limit"] and plan.kind == "cache" and len(plan.blocks) == 6
    assert sum(b.numel for b in plan.blocks) == 3 * 24 * 32 * 6 and plan.payload.check.taken == plan.rule
    rows = plan.payload.check.rows
    assert rows[plan.rule].kl == min(r.kl for r in rows.values())
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again == plan and any("5." in s and "24 tokens x 3" in s for s in explain_plan(again)["sentences"])
    cache = lb.apply_plan(model, again).cache
    with torch.no_grad():
        got = model(held.input_ids, past_key_values=cache, use_cache=True).logits
        with caching(model, rounding(cache_space(model, 24, 3).by_layer(_chosen(plan)))):
            assert torch.equal(model(held.input_ids).logits, got)
        # token by token it is the same cache: what is rounded once is not rounded again
        cache, steps = lb.apply_plan(model, again).cache, []
        for t in range(held.length):
            steps.append(model(held.input_ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
        assert torch.allclose(torch.cat(steps, 1), got, atol=0.02)  # the 16 bits of a minimum may go either way
    with pytest.raises(ModelMismatch):
        lb.apply_plan(zoo.build("llama", seed=5, **WIDE), plan)


def _chosen(plan):
    names = ["int2", "int3", "int4", "int5", "int6", "int8", "bf16"]
    return np.array([names.index(plan.payload.formats[b.modules[0]]) for b in plan.blocks])


@pytest.mark.parametrize(
    ("widths", "group", "names"),
    [
        ([64], None, ["int2", "int2-g32", "int3", "int3-g32", "int4", "int4-g32", "int5", "int4-g16", "int6", "int8", "bf16"]),
        ([64, 32], None, ["int2", "int3", "int4", "int5", "int6", "int8", "bf16"]),
        ([64], 16, ["int2", "int3", "int4", "int5", "int6", "int8", "bf16"]),
        ([80], None, ["int2", "int3", "int4", "int5", "int6", "int8", "bf16"]),
        ([8], 8, ["int2", "int3", "int4", "int5", "int6", "int8", "bf16"]),
    ],
)
def test_groups_are_a_choice_where_they_are_smaller_than_the_others(widths, group, names):
    formats = find_cache("transformers").formats(widths, None, group)
    assert [f.name for f in formats] == names
    sizes = [f.bytes / f.group for f in formats]
    assert sizes == sorted(set(sizes)) and all(w % f.group == 0 for w in widths for f in formats)


@pytest.mark.parametrize("names", [None, ["int2-g32", "int4"], ["int4-g32", "int4-g16"]])
def test_formats_keep_their_groups_in_records_and_at_other_contexts(names):
    held = [CachedTensor(layer=0, name="a", part=part, heads=2, channels=64, window=None) for part in (0, 1)]
    space = CacheSpace.of(held, 24, formats=names)
    for other in (space.at(48, 1), CacheSpace.read(json.loads(json.dumps(space.record())), 48, 1)):
        assert other.formats == space.formats
        assert np.array_equal(other.table().size, 2 * space.table().size)
    with pytest.raises(InvalidInput, match="too many to be counted"):
        space.at(1 << 30, 1 << 30)


@pytest.mark.parametrize("name", ["formats", "runtime", "context", "batch", "predicted", "baselines", "bits"])
def test_a_damaged_plan_is_refused_where_it_is_read(tmp_path, name):
    model = zoo.build("llama", **WIDE)
    plan = plan_cache(model, zoo.tokens(2, 12, vocabulary=96), context=12, bits=6.0, draws=1)
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    record = json.loads((tmp_path / "plan.json").read_text())
    del record["extra"][name]
    (tmp_path / "without.json").write_text(json.dumps(record))
    plan.with_payload(**{name: [None]}).save(tmp_path / "other.json")
    for broken in ("without.json", "other.json"):
        with pytest.raises(CorruptFile, match=f"extra of this plan does not read.*{name}"):
            Plan.load(tmp_path / broken)


def test_runtimes_get_their_own_words(monkeypatch):
    model = zoo.build("llama", **WIDE)
    plans = {r: plan_cache(model, zoo.tokens(2, 12, vocabulary=96), context=12, bits=b, runtime=r, draws=1)
             for r, b in (("vllm", 11.0), ("llama.cpp", 7.0), ("transformers", 6.0))}  # fmt: skip
    skipped = json.loads(vllm_cache(plans["vllm"]))
    wide = [b.name.rpartition(".")[2] for b in plans["vllm"].blocks if b.value == 16]
    assert skipped == {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": wide} and len(wide) == 1
    layers = json.loads(modelopt_cache(plans["vllm"]))["quantization"]["kv_cache_quantized_layers"]
    assert len(layers) == 2 and all(n.endswith(".self_attn") and n.split(".")[2] not in wide for n in layers)
    words = llama_cache(plans["llama.cpp"]).split()
    types = {b.name: plans["llama.cpp"].payload.formats[b.modules[0]].lower() for b in plans["llama.cpp"].blocks}
    assert words[1::2] == [types["keys"], types["values"], "on", "12", "1"]
    # two blocks, all pairs: the program finds the best
    assert plans["llama.cpp"].certificate["status"] in ("optimal", "slack")
    assert EXPORTS.find("vllm-cache").text(plans["vllm"], {}) == vllm_cache(plans["vllm"])
    with pytest.raises(InvalidInput, match=r"This plan is for transformers.* In Python, layerbudget.apply_plan\("):
        vllm_cache(plans["transformers"])
    with pytest.raises(InvalidInput, match="Add --to llama-cache; or plan with --runtime vllm"):
        vllm_cache(plans["llama.cpp"])
    assert [format_for(plans[r]) for r in ("vllm", "llama.cpp")] == ["vllm-cache", "llama-cache"]


def test_bad_input_is_one_sentence():
    model, data = zoo.build("llama", **WIDE), zoo.tokens(2, 8, vocabulary=96)
    longest = model.config.max_position_embeddings
    for wrong, said in (
        ({"context": longest + 1, "bits": 4.0}, f"reads at most {longest:,} tokens"),
        ({"context": 8, "batch": 0, "bits": 4.0}, "batch 0"),
        ({"context": 8, "bits": 4.0, "budget": "1 MB"}, "bits and budget were given together"),
        ({"context": 8}, "Give one of bits and budget. For example"),
        ({"context": 8, "bits": 4.0, "formats": ["Q4_0"]}, "transformers keeps no Q4_0"),
        ({"context": 8, "bits": 4.0, "group": 24}, "32 channels, which int2 cannot keep in groups of 24"),
        ({"context": 8, "bits": 4.0, "group": 0}, "group is 0"),
        ({"context": 8, "bits": 4.0, "group": -8}, "group is -8"),
        ({"context": 8, "bits": 4.0, "draws": 0}, "draws is 0"),
        ({"context": 8, "bits": 4.0, "group": 32, "runtime": "vllm"}, "groups of its own"),
        ({"context": 8, "budget": "3% flops"}, "not in bytes"),
        ({"context": 8, "bits": 4.0, "rule": "mix"}, "no rule 'mix'"),
        ({"context": 8, "bits": 4.0, "runtime": "exllama"}, "no runtime 'exllama'"),
    ):
        with pytest.raises((InvalidInput, UnknownUnit), match=said):
            plan_cache(model, data, **wrong)
    with pytest.raises(InfeasibleBudget, match="The smallest cache takes 576 bytes") as refused:
        plan_cache(model, data, context=8, bits=2.0)
    least = float(str(refused.value).split("--bits ")[1].split(",")[0])
    assert plan_cache(model, data, context=8, bits=least, draws=1).budget["spent"] == 576
    for other in (zoo.build("bert"), _mamba()):
        with pytest.raises(InvalidInput, match="keeps no keys and values"):
            kept(other)


def _mamba():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def test_the_command_plans_and_names(tmp_path, capsys, monkeypatch):
    out, text = str(tmp_path / "cache.json"), tmp_path / "text.txt"
    text.write_text("It was a bright day and the clocks were late. " * 40)
    small = ["--data", str(text), "--samples", "2", "--length", "16", "--quiet"]
    given = ["--context", "128", "--bits", "9", "--runtime", "vllm", *small]
    assert main(["plan", "cache", "demo", *given, "--check", "1", "--draws", "1", "-o", out]) == 0
    assert Plan.load(out).payload.context == 128
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Next: layerbudget export {out} --to vllm-cache"
    monkeypatch.chdir(tmp_path)  # the command that follows writes beside the plan, not over it
    assert main(shlex.split(last)[2:]) == 0
    words = json.loads((tmp_path / "vllm-cache.json").read_text())
    assert words["kv_cache_dtype"] == "fp8" and words["kv_cache_dtype_skip_layers"]
    skipped = " ".join(words["kv_cache_dtype_skip_layers"])
    options = f"--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers {skipped} --max-model-len 128 --max-num-seqs 1"
    options += " --max-num-batched-tokens 512"
    assert f"vllm serve MODEL {options}" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "cache", "demo", "--context", "128", "--bits", "1", *small, "-o", str(tmp_path / "no.json")]) == 2
    assert "are too few" in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "no.json").exists()


def _filled(model, cache, ids, chunk=7):
    """Run a text in pieces, as a chat does; return the logits of the last piece."""
    with torch.no_grad():
        return [model(input_ids=ids[:, i : i + chunk], past_key_values=cache).logits for i in range(0, ids.shape[1], chunk)][-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [("int2", "int3", "int8", "bf16"), ("int5", "int6", "int4", "int4-g16")])
def test_a_packed_cache_keeps_what_the_plan_rounds_to_in_its_bytes(dtype, chosen):
    """Keys and values of every layer, formats apart, three bits and plain ones among them; what is allocated."""
    pytest.importorskip("hqq")
    model = zoo.build("llama", **WIDE).to(dtype).eval()
    ids = torch.arange(2 * 49).reshape(2, 49) % 96
    plan = lb.plan_cache(
        zoo.build("llama", **WIDE),
        zoo.tokens(4, 32, vocabulary=96),
        zoo.tokens(2, 32, vocabulary=96),
        context=49,
        batch=2,
        bits=5,
        group=32,
        draws=2,
    )
    names = sorted(plan.payload.formats)
    formats = dict(zip(names, (*chosen, *chosen), strict=False))
    plan = plan.with_payload(formats=plan.payload.formats | formats)
    packed, plain = lb.apply_plan(model, plan, packed=True, residual=8).cache, transformers.DynamicCache(config=model.config)
    _filled(model, plain, ids[:, :48], chunk=48)
    _filled(model, packed, ids[:, :48], chunk=48)
    pairs, stored = cache.layer_formats(model, plan), 0
    for i, (layer, whole) in enumerate(zip(packed.layers, plain.layers, strict=True)):
        assert layer.get_seq_length() == 48
        if all(form.plain for form in pairs[i]):
            assert type(layer) is type(whole)
            continue
        for held, x, form in zip(
            (layer._quantized_keys, layer._quantized_values), (whole.keys, whole.values), pairs[i], strict=True
        ):
            got, want = layer._dequantize(held).float(), rounded(x, form).float()
            assert torch.equal(got, want)
            stored += x.numel() * (x.element_size() if form.plain else form.bytes / form.group)
    assert sum(layer.stored_bytes() for layer in packed.layers if hasattr(layer, "stored_bytes")) == pytest.approx(
        stored, rel=0.02
    )
    read = transformers.DynamicCache(config=model.config)  # what the packed layers give back, as plain keys and values
    for i, (layer, whole) in enumerate(zip(packed.layers, plain.layers, strict=True)):
        held = (whole.keys, whole.values)
        if hasattr(layer, "stored_bytes"):
            held = (layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values))
        read.update(*held, i)
    got, want = _filled(model, packed, ids[:, 48:]), _filled(model, read, ids[:, 48:])
    assert torch.allclose(got, want, atol=1e-4 if dtype == torch.float32 else 0.05)
    answer = model.generate(
        ids[:1, :9], past_key_values=lb.apply_plan(model, plan, packed=True).cache, max_new_tokens=4, do_sample=False
    )
    assert answer.shape == (1, 13)


def _packed(bits, residual, keys="int5", values="int3"):
    """A layer of a packed cache, two sequences of eleven tokens in it, and what was given to it."""
    forms = find_cache("transformers").formats([32], [keys, values])
    layer = PackedLayer(*(next(f for f in forms if f.name == n) for n in (keys, values)), residual)
    x = torch.randn(2, 2, 3, 11, 32, generator=torch.Generator().manual_seed(bits))
    layer.update(x[0, :, :, :6], x[1, :, :, :6])
    layer.update(x[0, :, :, 6:], x[1, :, :, 6:])
    return layer, x


def _read(layer):
    """Keys and values that a layer gives back, packed ones and newest."""
    held = ((layer._quantized_keys, layer.keys), (layer._quantized_values, layer.values))
    return torch.stack(
        [torch.cat([layer._dequantize(q), new] if new.numel() else [layer._dequantize(q)], -2) for q, new in held]
    )


@pytest.mark.parametrize("values", ["int3", "bf16"])
@pytest.mark.parametrize("residual", [4, 8])
def test_sequences_and_tokens_of_a_packed_cache_are_moved_as_those_of_a_plain_one(residual, values):
    """Beam search and assisted decoding do so. Packed tokens stayed where they were."""
    pytest.importorskip("hqq")
    for change, want in (
        (lambda c: c.batch_repeat_interleave(3), lambda x: x.repeat_interleave(3, dim=1)),
        (lambda c: c.batch_select_indices(torch.tensor([1])), lambda x: x[:, [1]]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1])), lambda x: x[:, [1, 1]]),
        (lambda c: c.crop(-2), lambda x: x[..., :9, :]),
        (lambda c: c.crop(-7), lambda x: x[..., :4, :]),
        (lambda c: c.crop(-11), lambda x: x[..., :0, :]),
        (lambda c: c.crop(8), lambda x: x[..., :8, :]),
        (lambda c: c.crop(0), lambda x: x),
    ):
        layer, _ = _packed(1, residual, values=values)
        before = _read(layer)
        change(layer)
        found = _read(layer)
        assert torch.equal(found, want(before)) and layer.get_seq_length() == found.shape[-2]
        more = torch.zeros(*found.shape[1:3], 1, 32)
        assert layer.update(more, more)[0].shape[-2] == found.shape[-2] + 1 == layer.get_seq_length()
    empty = PackedLayer(layer.axis_key, layer.axis_value, residual)
    empty.crop(-1)
    empty.batch_repeat_interleave(2)
    assert empty.get_seq_length() == 0


def test_a_packed_cache_serves_beams_and_assistants():
    pytest.importorskip("hqq")
    model = zoo.build("llama", **WIDE)
    plan = lb.plan_cache(model, zoo.tokens(2, 16, vocabulary=96), context=32, bits=9, draws=1)
    ids = torch.arange(9)[None]
    for own in ({"num_beams": 3}, {"assistant_model": zoo.build("llama", **WIDE)}, {"prompt_lookup_num_tokens": 2}):
        cached = lb.apply_plan(model, plan, packed=True, residual=2).cache
        answer = model.generate(ids, past_key_values=cached, max_new_tokens=8, do_sample=False, **own)
        assert answer.shape == (1, 17)


@pytest.mark.parametrize("offset", [0.0, 50.0, 3000.0])
def test_large_offsets_are_packed_as_they_are_planned(offset):
    """The place of zero on the grid was kept in 16 bits, in which it is far off where the numbers are."""
    pytest.importorskip("hqq")
    form = find_cache("transformers").formats([32], ["int8"])[0]
    layer = PackedLayer(form, form, 1)
    x = offset + torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(0))
    layer.update(x, x)
    assert torch.equal(layer._dequantize(layer._quantized_keys), rounded(x, form))


def test_a_cache_that_cannot_be_packed_is_refused():
    """Types of llama.cpp have no packing."""
    pytest.importorskip("hqq")
    model, text = zoo.build("llama", **WIDE), zoo.tokens(2, 32, vocabulary=96)
    plan = lb.plan_cache(model, text, text, context=32, bits=6.5, runtime="llama.cpp", draws=1)
    with pytest.raises(InvalidInput, match="HQQ packs no .*--runtime transformers"):
        lb.apply_plan(model, plan, packed=True)


def test_layers_with_a_sliding_window_stay_in_16_bits_where_nothing_packs_them():
    """Such plans were counted in bytes that no cache of transformers reaches."""
    pytest.importorskip("hqq")
    model, text = zoo.build("gemma2", **WIDE), zoo.tokens(2, 32, vocabulary=96)
    asked = {"context": 32, "group": 8, "draws": 1}
    plan = lb.plan_cache(model, text, text, bits=10, **asked)
    slides = [i for i, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
    small = {name for name, form in plan.payload.formats.items() if form != "bf16"}
    assert slides and small and not any(f".{i}." in name for name in small for i in slides)
    assert plan.budget["spent"] <= plan.budget["limit"]
    cache = lb.apply_plan(model, plan, packed=True).cache
    assert [isinstance(layer, PackedLayer) for layer in cache.layers] == [
        any(f".{i}." in name for name in small) for i in range(len(cache.layers))
    ]
    with pytest.raises(
        InfeasibleBudget, match=r"of the blocks stay in bf16, first model\.layers\.\d\.keys: transformers packs no"
    ):
        lb.plan_cache(model, text, bits=4, **asked)
    assert {f for f in lb.plan_cache(model, text, bits=8, context=32, runtime="vllm", draws=1).payload.formats.values()} == {
        "fp8"
    }
