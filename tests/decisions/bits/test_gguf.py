"""GGUF files of every architecture that is written, in llama.cpp itself: the probabilities that transformers computes."""

from __future__ import annotations

import re
import string

import numpy as np
import pytest
import torch
import transformers
from tests import zoo

import layerbudget as lb
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.blocks import formats_table
from layerbudget.decisions.bits.gguf import file_bytes, head_bytes
from layerbudget.decisions.bits.gguf_names import ARCHITECTURES, architecture
from layerbudget.decisions.bits.program import extra_of, plan_blocks
from layerbudget.errors import InvalidInput
from layerbudget.models.blocks import describe

gguf = pytest.importorskip("gguf")
llama = pytest.importorskip("xllamacpp")

SIZE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
HEAD = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 64}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 1.5}
GEMMA = {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
STRETCHED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0,
             "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
LOCAL = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
MODELS = {
    "llama": ("LlamaConfig", {"rope_parameters": STRETCHED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "rope_parameters": LINEAR}),
    "mixtral": ("MixtralConfig", EXPERTS),
    "smollm3": ("SmolLM3Config", {}),
    "granite": ("GraniteConfig", SCALES),
    "granitemoe": ("GraniteMoeConfig", {**SCALES, **EXPERTS}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEAD),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, **SHARED}),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEAD, **EXPERTS, "norm_topk_prob": True}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {**LAYERS, "sliding_window": 8}),
    "olmoe": ("OlmoeConfig", {**EXPERTS, "num_key_value_heads": 4}),
    "gemma": ("GemmaConfig", HEAD),
    "gemma2": ("Gemma2Config", {**GEMMA, **LAYERS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}),
    "gemma3_text": ("Gemma3TextConfig", {**GEMMA, **LAYERS, "rope_parameters": LOCAL}),
    "phi3": ("Phi3Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
}


def build(kind, **changes):
    """A random model whose every weight matters: norms, biases and routers too."""
    torch.manual_seed(0)
    name, fields = MODELS[kind]
    config = getattr(transformers, name)(**{**SIZE, "attn_implementation": "eager", **fields, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.randn_like(p) * 0.2 if p.ndim > 1 else p + 0.2 * torch.randn_like(p)).half())
    return model


def planned(model, formats):
    """Blocks take these types in turn, or sixteen bits where their rows do not fit; no damage is measured."""
    table = formats_table(model, family="gguf", formats=formats)
    wanted = [table.formats.index(formats[i % len(formats)]) for i in range(len(table.blocks))]
    chosen = np.array([j if has[j] else len(has) - 1 for j, has in zip(wanted, table.has, strict=True)])
    blocks = plan_blocks(table, chosen)
    spent = sum(b.count for b in blocks)
    budget = {"unit": "bytes", "limit": spent, "spent": spent, "file": spent + table.fixed}
    extra = {**extra_of(table, chosen), "bits": 8 * spent / table.numel}
    return lb.Plan(kind="bits", rule="choices", model=describe(model), blocks=blocks, budget=budget, extra=extra)


@pytest.fixture(scope="module")
def letters():
    """A tokenizer whose every token is text, so that llama.cpp names the probabilities of all of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    single = [*string.ascii_letters, *string.digits]
    pairs = [(a, b) for a in "ab" for b in string.ascii_lowercase][: 94 - len(single)]
    vocabulary = {t: i for i, t in enumerate(["<s>", "</s>", *single, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def log_probabilities(file, prompts):
    """llama.cpp's log probabilities of the next token after each prompt, ``(prompts, tokens)``."""
    options = llama.CommonParams()
    options.model.path, options.n_ctx, options.verbosity = str(file), 256, -1
    options.cpuparams.n_threads, options.warmup = 1, False
    server, found = llama.Server(options), np.full((len(prompts), 96), np.nan)
    for row, prompt in zip(found, prompts, strict=True):
        asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 96, "ignore_eos": True}
        held = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        for entry in held:
            row[entry["id"]] = entry["logprob"]
    return found


def test_every_architecture_has_a_model_here():
    assert set(MODELS) == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", MODELS)
def test_llama_cpp_computes_what_transformers_computes(tmp_path, letters, kind):
    model, ids = build(kind), torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    plan = planned(model, ["F16"])  # llama.cpp rounds the inputs of products with smaller types
    receipt = write_bits(model, plan, tmp_path / "out", tokenizer=letters)
    assert receipt.bytes == receipt.planned == plan.budget["spent"]
    lengths = (1, 9, 40)
    with torch.no_grad():
        mine = torch.log_softmax(model(ids).logits[0].float(), -1).numpy()[[n - 1 for n in lengths]]
    theirs = log_probabilities(tmp_path / "out" / "model.gguf", [ids[0, :n].tolist() for n in lengths])
    seen = np.isfinite(theirs)
    assert seen.sum() > 3 * 95 - 5 and mine.std() > 0.5 and np.abs(theirs - mine)[seen].max() < 0.03


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_types_of_experts_and_the_size_of_the_whole_file(tmp_path, letters, kind):
    """One type for gate and up of all experts, which are those of the rounded model; the size is known before, to the byte."""
    model = build(kind, tie_word_embeddings=True)
    letters.chat_template = "{{ messages[0].content }}"
    plan = planned(model, ["Q8_0", "Q4_0", "Q5_1"])
    known = file_bytes(model, plan.extra["formats"], letters), head_bytes(model, letters) + plan.budget["file"]
    write_bits(model, plan, tmp_path / "out", tokenizer=letters)
    file = tmp_path / "out" / "model.gguf"
    assert known == (file.stat().st_size,) * 2
    read = gguf.GGUFReader(file)
    tensors, most = {t.name: t for t in read.tensors}, gguf.LlamaFileType(read.fields["general.file_type"].contents()).name
    assert read.fields["tokenizer.chat_template"].contents() == letters.chat_template
    assert most.removeprefix("MOSTLY_") in ("Q8_0", "Q4_0", "Q5_1") and "output.weight" not in tensors
    kinds = {n: t.tensor_type.name for n, t in tensors.items()}
    assert ("rope_freqs.weight" in kinds) == (kind == "llama")
    lines = [line.split("=") for line in (tmp_path / "out" / "tensor-types.txt").read_text().splitlines() if line[0] == "^"]
    for pattern, name in lines:
        assert [kinds[n] for n in kinds if re.search(pattern, n)] == [name.upper()]
    assert len(lines) == len(plan.extra["formats"]) + (3 if kind == "qwen3_moe" else 0)
    for i, layer in enumerate(model.model.layers if kind == "qwen3_moe" else ()):
        experts, stem = layer.mlp.experts, f"model.layers.{i}.mlp.experts"
        gate, up = experts.gate_up_proj.detach().chunk(2, 1)
        for short, long, rounded in (("gate", "gate_up", gate), ("up", "gate_up", up), ("down", "down", experts.down_proj)):
            written = tensors[f"blk.{i}.ffn_{short}_exps.weight"]
            assert written.tensor_type.name == plan.extra["formats"][f"{stem}.{long}_proj"] != "F16"
            assert np.array_equal(gguf.dequantize(written.data, written.tensor_type), rounded.detach().numpy())
        assert kinds[f"blk.{i}.ffn_gate_inp.weight"] == "F32"


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("mistral", {"sliding_window": 8}, "sliding_window = 8"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("gemma2", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar = 7"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type = dynamic"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual = True"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused_with_the_remedy(kind, changes, what):
    name, fields = MODELS[kind]
    config = getattr(transformers, name)(**{**SIZE, **fields, **changes})
    with pytest.raises(InvalidInput, match=rf"model with {what} is not written.*convert_hf_to_gguf"):
        architecture(config)


def test_an_architecture_that_is_not_written_is_planned_all_the_same(tmp_path):
    model = zoo.build("gpt-neox", hidden_size=64, intermediate_size=64)
    plan = planned(model, ["Q8_0", "Q4_0"])
    with pytest.raises(InvalidInput, match="gpt_neox model is not written"):
        write_bits(model, plan, tmp_path / "out")
    assert not list(tmp_path.iterdir())
