"""Plans of ranks in PEFT: exact keys, alpha policies, recount, refusals by name, saving, serving."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tests import zoo
from torch import nn

import layerbudget as lb
from layerbudget.data.calibration import CalibrationSet
from layerbudget.decisions.lora_experts.method import add_lora_experts
from layerbudget.decisions.ranks.apply import adapted_ranks, add_ranks, fold_scales, lora_layers, pad_ranks, to_lora_config
from layerbudget.decisions.ranks.export import lora_json
from layerbudget.decisions.ranks.plan import serving_note
from layerbudget.decisions.ranks.start import initialise_from_gradients
from layerbudget.errors import CoverageError, InvalidInput, ModelMismatch, UnknownBlock
from layerbudget.finetuning.adapters import load_adapter
from layerbudget.gguf.tensors import permute
from layerbudget.records import stacks
from layerbudget.reporting.explain import explain_plan
from layerbudget.sensitivity.adapter_space import accumulated_gradients


def ranks_of(name: str) -> int:
    """Ranks that differ by layer and by kind, some zero."""
    layer = int(name.split(".layers.")[1].split(".")[0])
    return {"q_proj": 2 + layer, "v_proj": 3, "down_proj": 8 * (layer % 2)}.get(name.rpartition(".")[2], 0)


def ids():
    return torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(2))


def test_every_module_gets_its_rank_and_the_count_is_the_plan():
    model = zoo.adaptable()
    plan = zoo.linears(model, ranks_of)
    adapted = add_ranks(model, plan)
    expected = {b.name: b.count for b in plan.blocks if b.count}
    assert adapted_ranks(adapted) == expected
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shapes = {n: m for n, m in zoo.adaptable().named_modules() if n in expected}
    assert trained == sum(r * (shapes[n].in_features + shapes[n].out_features) for n, r in expected.items())
    assert not any(b.name in adapted_ranks(adapted) for b in plan.blocks if b.count == 0)


@pytest.mark.parametrize(("policy", "power"), [("constant-ratio", 0.0), ("rslora", 0.5), ("constant-alpha", 1.0)])
def test_alpha_policies_give_the_stated_scale(policy, power):
    """Scale = ratio (mean rank / rank)^power."""
    plan = zoo.linears(zoo.adaptable(), ranks_of)
    ranks = [b.count for b in plan.blocks if b.count]
    adapted = add_ranks(zoo.adaptable(), plan, alpha_policy=policy, ratio=3.0)
    layers = [m for m in adapted.modules() if hasattr(m, "lora_A") and "default" in m.lora_A]
    assert len(layers) == len(ranks)
    for module in layers:
        rank = module.lora_A["default"].weight.shape[0]
        assert module.scaling["default"] == pytest.approx(3.0 * (sum(ranks) / len(ranks) / rank) ** power)


@pytest.mark.parametrize("policy", ["rslora", "constant-alpha"])
def test_a_uniform_plan_has_one_scale_under_every_policy(policy):
    model = add_ranks(zoo.adaptable(), zoo.linears(zoo.adaptable(), 6), alpha_policy=policy, ratio=1.5)
    assert {round(m.scaling["default"], 9) for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A} == {1.5}


@pytest.mark.parametrize("policy", ["rslora", "constant-alpha"])
def test_folded_scales_are_one_and_change_nothing(policy, tmp_path):
    model = add_ranks(zoo.adaptable().double(), zoo.linears(zoo.adaptable(), ranks_of), alpha_policy=policy).double().eval()
    zoo.perturb(model)
    with torch.no_grad():
        expected = model(input_ids=ids()).logits
    fold_scales(model, 1.5)
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A]
    assert {m.scaling["default"] for m in layers} == {1.5}
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(zoo.adaptable().double(), tmp_path).double().eval()
    config = loaded.peft_config["default"]
    assert not config.use_rslora and config.lora_alpha == 1.5 * config.r
    for again in (model, loaded):
        with torch.no_grad():
            assert torch.allclose(again(input_ids=ids()).logits, expected, atol=1e-12)
    assert {m.scaling["default"] for m in loaded.modules() if hasattr(m, "lora_A") and "default" in m.lora_A} == {1.5}
    with pytest.raises(InvalidInput, match="positive"):
        fold_scales(model, 0.0)


@pytest.mark.parametrize("policy", ["constant-ratio", "rslora", "constant-alpha"])
def test_padded_ranks_are_one_and_change_nothing(policy, tmp_path):
    model = add_ranks(zoo.adaptable().double(), zoo.linears(zoo.adaptable(), ranks_of), alpha_policy=policy).double().eval()
    zoo.perturb(model)
    with torch.no_grad():
        expected = model(input_ids=ids()).logits
    assert pad_ranks(model, 1.5) == 8
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(zoo.adaptable().double(), tmp_path).double().eval()
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 12, False) and not config.rank_pattern
    assert set(adapted_ranks(loaded).values()) == {8}
    for again in (model, loaded):
        with torch.no_grad():
            assert torch.allclose(again(input_ids=ids()).logits, expected, atol=1e-12)


def test_the_configuration_has_the_task_of_the_exported_file():
    plan = zoo.linears(zoo.adaptable(1), 2)
    assert to_lora_config(plan).task_type == json.loads(lora_json(plan))["task_type"] == "CAUSAL_LM"
    encoder = zoo.classifier(1)
    assert add_ranks(encoder, zoo.linears(encoder, lambda n: 2 * ("query" in n))).peft_config["default"].task_type is None


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
@pytest.mark.parametrize("change", [fold_scales, pad_ranks])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "rank_pattern": {"q_proj": 5}},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True, "use_dora": True},
        {"target_modules": ["q_proj", "down_proj"], "alpha_pattern": {"down_proj": 5}, "rank_pattern": {"down_proj": 2}},
        {"target_modules": ["q_proj"], "lora_bias": True, "use_rslora": True},
    ],
)
def test_embeddings_biases_and_patterns_are_folded_too(change, options, tmp_path):
    """An embedding kept its scale while the configuration lost it; an older pattern came before those that were added."""

    def make():
        return zoo.tiny("llama", attention_bias=True).double()

    model = get_peft_model(make(), LoraConfig(r=3, lora_alpha=7, **options)).double().eval()
    zoo.perturb(model)
    row = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(input_ids=row).logits
        change(model)
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(make(), tmp_path).double().eval()
        for found in (model, again):
            assert torch.allclose(found(input_ids=row).logits, expected, atol=1e-10)
    scales = {m.scaling["default"] for m in again.modules() if isinstance(getattr(m, "scaling", None), dict)}
    assert scales == {2.0}


@pytest.mark.parametrize("change", [fold_scales, pad_ranks])
def test_adapters_whose_scale_cannot_move_are_refused(change):
    def model(config, **changes):
        return get_peft_model(zoo.tiny("llama", **changes), config)

    one = model(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(InvalidInput, match=r"no adapter 'other'.*adapters are default"):
        change(one, adapter_name="other")
    with pytest.raises(InvalidInput, match="is no PeftModel"):
        change(zoo.tiny("llama"))
    with pytest.raises(InvalidInput, match="of the type IA3"):
        change(model(IA3Config(target_modules=["v_proj"], feedforward_modules=[])))
    with pytest.raises(InvalidInput, match="ALoraLinear"):
        change(model(LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")))
    shared = LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(InvalidInput, match="share the tensors"):
        change(model(shared, tie_word_embeddings=True))


def test_llama_cpp_applies_padded_ranks_as_peft_does(tmp_path):
    """A file with one alpha: llama.cpp divides it by the rank of each tensor, which is right only where ranks are one."""
    llama, gguf = pytest.importorskip("xllamacpp"), pytest.importorskip("gguf")
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    text = lb.calibration("stdlib", tokenizer, samples=2, length=32)
    whole = lb.plan_bits(model, text, bits=16, family="gguf", formats=["F16"], draws=1)
    lb.write_bits(model, whole, tmp_path / "base", tokenizer=tokenizer)
    plan = zoo.linears(model, lambda n: {"q_proj": 2, "v_proj": 5, "down_proj": 8}.get(n.rpartition(".")[2], 0))
    adapted = add_ranks(model, plan).eval()
    zoo.perturb(adapted, scale=0.05)
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)

    def write(file, alpha):
        writer = gguf.GGUFWriter(tmp_path / file, "llama")
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        for module, layer in lora_layers(adapted).items():
            a, b = (part["default"].weight.detach() for part in (layer.lora_A, layer.lora_B))
            b = permute(b, heads) if module.endswith("q_proj") else b
            for end, tensor in (("lora_a", a), ("lora_b", b)):
                writer.add_tensor(f"{names.get_name(module)}.weight.{end}", tensor.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        adapter = llama.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = str(tmp_path / file), 1.0
        options = llama.CommonParams()
        options.model.path, options.n_ctx, options.lora_adapters = str(tmp_path / "base/model.gguf"), 128, [adapter]
        options.cpuparams.n_threads, options.warmup = 1, False
        asked = {"prompt": "def read(path):", "max_tokens": 1, "temperature": 0, "logprobs": 20}
        answer = llama.Server(options).handle_completions(asked)
        held = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in held[:20]}

    with torch.no_grad():
        logits = adapted(**tokenizer("def read(path):", return_tensors="pt")).logits[0, -1]
        mine = torch.log_softmax(logits, -1)

    def farthest(found):
        return max(abs(value - float(mine[i])) for i, value in found.items())

    uneven = farthest(write("uneven.gguf", 2.0 * 8))
    rank = pad_ranks(adapted)
    padded = farthest(write("padded.gguf", 2.0 * rank))
    assert padded < 0.05 < uneven


def test_ten_layers_and_more_are_not_confused():
    model = zoo.adaptable(12, hidden_size=16, intermediate_size=16, head_dim=4)
    plan = zoo.linears(model, lambda n: 1 + int(n.split(".")[2]) if n.endswith("q_proj") else 0)
    assert adapted_ranks(add_ranks(model, plan))["model.layers.11.self_attn.q_proj"] == 12


def test_saved_and_loaded_ranks_are_the_same_and_merge_exactly(tmp_path):
    base = zoo.adaptable().double()
    plan = zoo.linears(base, ranks_of)
    model = add_ranks(base, plan).double().eval()
    zoo.perturb(model)
    with torch.no_grad():
        expected = model(input_ids=ids()).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(zoo.adaptable().double(), tmp_path).double().eval()
    assert adapted_ranks(loaded) == adapted_ranks(model)
    with torch.no_grad():
        # PEFT stores adapters as they are; the logits must not move by one bit
        assert torch.equal(loaded(input_ids=ids()).logits, expected)
        merged = loaded.merge_and_unload()(input_ids=ids()).logits
    assert (merged - expected).abs().max() < 1e-12
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert stored["rank_pattern"]["model\\.layers\\.3\\.self_attn\\.q_proj"] == 5


def rename(plan, old, new):
    blocks = tuple(
        dataclasses.replace(b, name=b.name.replace(old, new), modules=tuple(m.replace(old, new) for m in b.modules))
        for b in plan.blocks
    )
    return dataclasses.replace(plan, blocks=blocks)


def test_a_typo_is_refused_with_the_name():
    model = zoo.adaptable()
    plan = rename(zoo.linears(model, ranks_of), "layers.1.self_attn.q_proj", "layers.1.self_attn.q_porj")
    with pytest.raises(UnknownBlock, match=r"model\.layers\.1\.self_attn\.q_porj"):
        add_ranks(model, plan)


def test_a_typo_in_a_pattern_of_ones_own_is_refused_with_the_name():
    model = zoo.adaptable()
    plan = zoo.linears(model, ranks_of)
    config = to_lora_config(plan)
    config.rank_pattern = {k.replace("q_proj", "q_porj"): v for k, v in config.rank_pattern.items()}
    with pytest.warns(RuntimeWarning, match="did not match"):
        with pytest.raises(CoverageError, match=r"model\.layers\.0\.self_attn\.q_proj got rank 8; the plan gives it rank 2"):
            add_ranks(model, plan, config=config)


def test_a_fused_projection_is_refused_with_the_name():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from layerbudget.plan import Plan, PlanBlock

    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    )
    name = "gpt_neox.layers.0.attention.q_proj"
    plan = Plan(
        kind="ranks",
        rule="by-hand",
        model={},
        budget={},
        blocks=(PlanBlock(name=name, value=2.0, count=2, numel=256, modules=(name,)),),
    )
    with pytest.raises(UnknownBlock, match=r"q_proj'; it holds that projection fused in .*query_key_value"):
        add_ranks(model, plan)


@pytest.mark.filterwarnings("error:.*keys did not match")
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "llama4", "nemotron-h"])
def test_every_expert_of_a_stack_gets_its_rank(name, tmp_path):
    """Logits are those of the model with B_e A_e added to every expert by hand; also padded, and loaded again."""
    model, batch = zoo.build(name), next(zoo.tokens(2, 9).batches(2))
    ranks = {m: 1 + i % 3 for i, m in enumerate(n for b in lb.partition(model) for n in stacks(m.name for m in b.modules))}
    plain, shapes = copy.deepcopy(model), {n: p.shape for n, p in model.named_parameters() if n in ranks}
    adapted = add_ranks(model, zoo.linears(model, lambda n: ranks.get(n, 0)))
    assert len(ranks) >= 2 and adapted_ranks(adapted) == ranks
    trained = sum(p.numel() for n, p in adapted.named_parameters() if "lora_" in n)
    assert trained == sum(r * shapes[m][0] * (shapes[m][1] + shapes[m][2]) for m, r in ranks.items())
    layers = lora_layers(adapted)
    with torch.no_grad():
        for m, layer in layers.items():
            torch.nn.init.normal_(layer.lora_B["default"].weight, 0, 0.3)
            parameter, (count, *_) = plain.get_parameter(m), shapes[m]
            a = layer.lora_A["default"].weight.view(count, ranks[m], -1)
            b = layer.lora_B["default"].weight.view(-1, ranks[m], count)
            for e in range(count):
                change = layer.scaling["default"] * b[:, :, e] @ a[e]
                parameter[e] += change if change.shape == parameter[e].shape and not turned(layer) else change.T
        wanted = plain(**batch).logits
        assert not torch.allclose(wanted, zoo.build(name)(**batch).logits, atol=1e-3)
        torch.testing.assert_close(adapted(**batch).logits, wanted, rtol=1e-4, atol=1e-4)
        assert {pad_ranks(adapted)} == {max(ranks.values())} == set(adapted_ranks(adapted).values())
        torch.testing.assert_close(adapted(**batch).logits, wanted, rtol=1e-4, atol=1e-4)
        adapted.save_pretrained(tmp_path)
        again = load_adapter(zoo.build(name), tmp_path)
        torch.testing.assert_close(again(**batch).logits, wanted, rtol=1e-4, atol=1e-4)


def turned(layer):
    """Whether PEFT keeps a stack as (experts, inputs, outputs)."""
    return not layer._did_swap_in_out_features


def test_stacks_of_experts_have_no_dropout_and_other_parameters_no_ranks():
    model = zoo.build("qwen3-moe")
    plan = zoo.linears(model, lambda n: 2 if n.endswith("down_proj") else 0)
    with pytest.raises(InvalidInput, match=r"PEFT has none on stacks of experts such as model.*Set dropout=0"):
        add_ranks(model, plan, dropout=0.1)
    with pytest.raises(CoverageError, match=r"layers\.0\.mlp\.experts\.\w+ is a parameter .* several experts"):
        add_lora_experts(model, dataclasses.replace(plan, kind="lora-experts", payload=None))
    model = zoo.build("llama4")
    with pytest.raises(CoverageError, match=r"feed_forward\.router is a router.*--exclude 'router\$'"):
        add_ranks(model, zoo.linears(model, lambda n: 2 if n.endswith("router") else 0))


def test_a_tied_module_is_refused_with_the_name():
    from layerbudget.plan import Plan, PlanBlock

    model = zoo.adaptable(tie_word_embeddings=True)
    plan = Plan(
        kind="ranks",
        rule="by-hand",
        model={},
        budget={},
        blocks=(PlanBlock(name="lm_head", value=2.0, count=2, numel=1, modules=("lm_head",)),),
    )
    with pytest.raises(CoverageError, match=r"lm_head shares its weight with model\.embed_tokens"):
        add_ranks(model, plan)


def test_another_model_another_kind_and_an_empty_plan_are_refused():
    model = zoo.adaptable()
    plan = zoo.linears(model, ranks_of)
    with pytest.raises(ModelMismatch):
        add_ranks(zoo.adaptable(num_hidden_layers=3), plan)
    with pytest.raises(InvalidInput, match="kind lora-experts gives no ranks"):
        to_lora_config(zoo.layers(model, [1, 1, 1, 1]))
    with pytest.raises(InvalidInput, match="zero"):
        to_lora_config(zoo.linears(model, 0))
    with pytest.raises(InvalidInput, match="alpha_policy"):
        to_lora_config(plan, alpha_policy="other")


def test_conv1d_of_gpt2_is_counted_in_the_right_direction():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    plan = zoo.linears(model, 3)
    adapted = add_ranks(model, plan, fan_in_fan_out=True)
    assert set(adapted_ranks(adapted).values()) == {3}


def test_what_a_server_must_reserve():
    model = zoo.adaptable()
    note = serving_note(zoo.linears(model, lambda n: 20 if n.endswith("q_proj") else 4))
    used = f"vLLM reserves rank 32 for every matrix; the plan uses {(20 + 6 * 4) / (7 * 32):.0%} of it."
    assert note == f"--enable-lora --max-lora-rank 32. {used}"
    told = {n: " ".join(explain_plan(zoo.linears(model, n))["sentences"]) for n in (8, ranks_of)}
    assert ["llama.cpp applies one scale" in told[n] for n in told] == [False, True]
    assert "merge the adapter" in serving_note(zoo.linears(model, 600))
    assert any("--max-lora-rank 8." in s for s in explain_plan(zoo.linears(model, 8))["sentences"])
    config = to_lora_config(zoo.linears(model, ranks_of))
    assert config.r == 8 and config.lora_alpha / config.r == 2.0


def test_gradient_directions_start_at_the_base_and_capture_the_gradient():
    model = zoo.adaptable()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    gradients = accumulated_gradients(model, CalibrationSet(input_ids=ids()), names)
    plain = zoo.adaptable()
    with torch.no_grad():
        before = plain(input_ids=ids()).logits
    adapted = add_ranks(plain, zoo.linears(zoo.adaptable(), 4))
    initialise_from_gradients(adapted, gradients)
    with torch.no_grad():
        assert torch.equal(adapted(input_ids=ids()).logits, before)
    for name in names:
        a = adapted.get_submodule(f"base_model.model.{name}").lora_A["default"].weight.double()
        assert torch.allclose(a @ a.T, torch.eye(4, dtype=torch.float64) / 3, atol=1e-6)
        captured = (gradients[name].double() @ a.T).square().sum().item() * 3
        assert captured == pytest.approx(torch.linalg.svdvals(gradients[name].double())[:4].square().sum().item(), rel=1e-4)


def test_the_gradients_directions_give_as_much_as_the_start_that_they_replace():
    """Whatever the inputs: one factor for each module, over real tokens alone."""
    model, tokens = zoo.adaptable(), ids()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    gradients = accumulated_gradients(model, CalibrationSet(input_ids=tokens), names)
    plan, padded = zoo.linears(zoo.adaptable(), 4), torch.cat((tokens, torch.zeros_like(tokens)), dim=1)
    mask = torch.cat((torch.ones_like(tokens), torch.zeros_like(tokens)), dim=1)
    found, inputs = [], dict[str, torch.Tensor]()
    for batches in (
        [],
        [{"input_ids": tokens}],
        [{"input_ids": row[None]} for row in tokens],
        [{"input_ids": padded, "attention_mask": mask}],
    ):
        torch.manual_seed(0)
        adapted = add_ranks(zoo.adaptable(), plan)
        leaves = {n: adapted.get_submodule(f"base_model.model.{n}").lora_A["default"] for n in names}
        own = {n: leaf.weight.detach().clone() for n, leaf in leaves.items()}
        initialise_from_gradients(adapted, gradients, batches)
        found.append({n: leaf.weight.detach().clone() for n, leaf in leaves.items()})
    for name, leaf in leaves.items():
        leaf.register_forward_pre_hook(lambda module, arguments, name=name: inputs.update({name: arguments[0]}))
    with torch.no_grad():
        adapted(input_ids=tokens)
    for name in names:
        plain, *matched = (each[name] for each in found)
        size = (inputs[name] @ own[name].T).norm() / (inputs[name] @ plain.T).norm()
        assert not size.isclose(torch.tensor(1.0), rtol=0.1)
        for each in matched:
            torch.testing.assert_close(each, plain * size, rtol=1e-4, atol=1e-6)


def test_a_module_without_a_gradient_is_named():
    adapted = get_peft_model(zoo.adaptable(), to_lora_config(zoo.linears(zoo.adaptable(), 2)))
    with pytest.raises(CoverageError, match="no gradient for model.layers.0"):
        initialise_from_gradients(adapted, {})


def test_dora_is_counted_by_its_ranks():
    model = zoo.adaptable()
    plan = zoo.linears(model, ranks_of)
    adapted = add_ranks(model, plan, use_dora=True)
    assert adapted_ranks(adapted) == {b.name: b.count for b in plan.blocks if b.count}


def test_what_peft_refuses_is_one_sentence():
    """PEFT takes no ``out_proj`` of a Mamba mixer: not a traceback, and the remedy that is named works."""
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(vocab_size=96, num_hidden_layers=2, **ids, **sizes))
    with pytest.raises(CoverageError, match=r"PEFT refuses this plan's modules.*out_proj.*--exclude"):
        add_ranks(model, zoo.linears(model, 2))
    model = transformers.Mamba2ForCausalLM(model.config)
    assert add_ranks(model, zoo.linears(model, lambda name: 0 if name.endswith("out_proj") else 2))


@pytest.mark.parametrize("estimator", ["rank-gain", "adapter"])
def test_scores_of_adapters_leave_out_what_no_adapter_can_go_on(estimator, caplog):
    """A plan of ranks from such scores is one that PEFT takes."""
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(vocab_size=96, num_hidden_layers=2, **ids, **sizes))
    scores = lb.score(model, zoo.tokens(4, 8, vocabulary=96), lb.partition(model, by="linear"), estimator)
    assert scores.names and not any("out_proj" in name for name in scores.names)
    assert "2 matrices are left out, the first backbone.layers.0.mixer.out_proj" in caplog.text
    assert add_ranks(model, lb.plan_ranks(scores, mean_rank=2))


def test_plain_mlps_beside_fused_experts_are_left_out_as_peft_takes_their_names_for_the_experts(caplog):
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    config = transformers.Glm4MoeConfig(vocab_size=96, num_hidden_layers=2, **ids, **sizes, **experts)
    torch.manual_seed(0)
    model = transformers.Glm4MoeForCausalLM(config)
    blocks = lb.partition(model, by="linear", exclude="experts[.]")
    assert any(b.name.endswith("layers.0.mlp.down_proj") for b in blocks)
    scores = lb.score(model, zoo.tokens(4, 8, vocabulary=96), blocks, "rank-gain")
    assert "matrices are left out, the first model.layers.0.mlp" in caplog.text
    assert scores.names and not any(".mlp." in name for name in scores.names)
    assert add_ranks(model, lb.plan_ranks(scores, mean_rank=2))
    model = transformers.Glm4MoeForCausalLM(config)
    every = zoo.linears(model, lambda name: 0 if "experts" in name else 2)
    with pytest.raises(
        CoverageError,
        match=r"no adapter on model.layers.0.mlp.*'experts\[.\]\|\(mlp\|shared_experts\)\[.\]\(down_proj\|gate_proj\|up",
    ):
        add_ranks(model, every)
