"""GGUF files of every architecture that is written, in llama.cpp itself: the probabilities that transformers computes."""

from __future__ import annotations

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
import transformers
from tests import vocabularies, zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.compressors import ggml
from layerbudget.decisions.bits import requantise as R
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.blocks import formats_table, narrow_rows
from layerbudget.decisions.bits.card import model_card
from layerbudget.decisions.bits.export import llama_cpp
from layerbudget.decisions.bits.payload import BitsPayload
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.receipt import QuantisationReceipt
from layerbudget.decisions.bits.requantise import requantise
from layerbudget.decisions.formats.program import of_weights, plan_blocks
from layerbudget.decisions.shapes.program import layers_differ
from layerbudget.decisions.shapes.save import check_gguf, save_gguf
from layerbudget.errors import CorruptFile, CoverageError, InvalidInput, ModelMismatch
from layerbudget.gguf.architectures import ARCHITECTURES
from layerbudget.gguf.names import Names, architecture
from layerbudget.llama_cpp.vocabulary import name_in_file
from layerbudget.llama_cpp.writer import head_bytes
from layerbudget.models.blocks import describe, layers

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
    budget = {"unit": "bytes", "limit": spent, "spent": spent, "tensors": spent + table.fixed}
    nothing = {"predicted": 0.0, "predicted_error": 0.0, "baselines": {}, "near_ties": []}
    payload = BitsPayload(**of_weights(table, chosen), bits=8 * spent / table.numel, **nothing)
    return lb.Plan(kind="bits", rule="exact", model=describe(model), blocks=blocks, budget=budget, payload=payload)


@pytest.fixture(scope="module")
def letters():
    """A tokenizer whose vocabulary takes bytes of a GGUF file."""
    return vocabularies.letters()


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


def test_a_model_whose_name_has_phi3_in_it_loads_without_tokens_of_phi_3(tmp_path, letters):
    """llama.cpp goes by the name, looks for four tokens, and ends where one is missing."""
    model = build("llama")
    plan = planned(model, ["Q8_0"])
    plan = dataclasses.replace(plan, model={**plan.model, "id": "here/my-Phi-3-style"})
    receipt = write_bits(model, plan, tmp_path / "out", tokenizer=letters)
    assert receipt.llama_cpp.startswith("llama.cpp loads the file; ")
    assert name_in_file("my-Phi-3-style", None) == "model" and name_in_file("Llama-3", letters) == "Llama-3"
    own = copy.deepcopy(letters)
    own.add_tokens(["<unk>", "<|endoftext|>"])
    assert name_in_file("phi3", own) == "phi3"


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
    known = head_bytes(model, letters) + plan.budget["tensors"]
    write_bits(model, plan, tmp_path / "out", tokenizer=letters)
    file = tmp_path / "out" / "model.gguf"
    assert known == file.stat().st_size
    read = gguf.GGUFReader(file)
    tensors, most = {t.name: t for t in read.tensors}, gguf.LlamaFileType(read.fields["general.file_type"].contents()).name
    assert read.fields["tokenizer.chat_template"].contents() == letters.chat_template
    assert most.removeprefix("MOSTLY_") in ("Q8_0", "Q4_0", "Q5_1") and "output.weight" not in tensors
    kinds = {n: t.tensor_type.name for n, t in tensors.items()}
    assert ("rope_freqs.weight" in kinds) == (kind == "llama")
    lines = [line.split("=") for line in (tmp_path / "out" / "tensor-types.txt").read_text().splitlines() if line[0] == "^"]
    for pattern, name in lines:
        assert [kinds[n] for n in kinds if re.search(pattern, n)] == [name.upper()]
    assert len(lines) == len(plan.payload.formats) + (3 if kind == "qwen3_moe" else 0)
    for i, layer in enumerate(model.model.layers if kind == "qwen3_moe" else ()):
        experts, stem = layer.mlp.experts, f"model.layers.{i}.mlp.experts"
        gate, up = experts.gate_up_proj.detach().chunk(2, 1)
        for short, long, rounded in (("gate", "gate_up", gate), ("up", "gate_up", up), ("down", "down", experts.down_proj)):
            written = tensors[f"blk.{i}.ffn_{short}_exps.weight"]
            assert written.tensor_type.name == plan.payload.formats[f"{stem}.{long}_proj"] != "F16"
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


@pytest.mark.parametrize(
    ("kind", "remedy"), [("mimo_v2_flash", "Convert it by llama.cpp's convert_hf_to_gguf"), ("qwen3", "Plan with --even")]
)
def test_layers_that_differ_by_design_are_no_matter_of_the_plan(kind, remedy):
    with pytest.raises(InvalidInput, match=remedy):
        architecture(transformers.AutoConfig.for_model(kind), uneven=True)


def test_an_architecture_that_is_not_written_is_planned_all_the_same(tmp_path):
    model = zoo.build("gpt-neox", hidden_size=64, intermediate_size=64)
    plan = plan_bits(model, zoo.tokens(2, 8), bits=7.0, family="gguf", draws=1)
    with pytest.raises(InvalidInput, match="gpt_neox model is not written"):
        write_bits(model, plan, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def types_and_bytes(file):
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(file).tensors}


@pytest.fixture(scope="module")
def converted(tmp_path_factory, letters):
    """Files in 16 bits with metadata that nobody knows: of a model with permuted rows, and of one with experts."""
    place = tmp_path_factory.mktemp("converted")
    for kind in ("llama", "qwen3_moe"):
        model = build(kind)
        write_bits(model, planned(model, ["F16"]), place / kind, tokenizer=letters)
        reader = gguf.GGUFReader(place / kind / "model.gguf")
        writer = gguf.GGUFWriter(place / f"{kind}.gguf", reader.fields["general.architecture"].contents())
        for key, f in reader.fields.items():
            if not key.startswith("GGUF.") and key not in ("general.architecture", "general.quantization_version"):
                writer.add_key_value(key, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
        writer.add_array("own.words", ["a", "\u00e4\u4e2d", ""])
        writer.add_array("own.numbers", [1.5, -2.0])
        writer.add_uint64("own.large", 2**40)
        writer.add_int8("own.small", -3)
        writer.add_bool("own.yes", True)
        writer.add_custom_alignment(64)
        for t in reader.tensors:
            writer.add_tensor(t.name, t.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return place


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_file_that_gets_a_plans_types_has_the_tensors_of_the_written_model(tmp_path, converted, letters, monkeypatch, kind):
    monkeypatch.setattr(R, "_ROWS", 500)  # seven rows at a time
    model, source = build(kind), converted / f"{kind}.gguf"
    plan = planned(model, ["Q8_0", "Q4_0", "F16", "Q5_1"])
    write_bits(model, plan, tmp_path / "out", tokenizer=letters)
    steps = []
    receipt = requantise(source, plan, tmp_path / "planned.gguf", progress=lambda done, total: steps.append((done, total)))
    mine, theirs = types_and_bytes(tmp_path / "out" / "model.gguf"), types_and_bytes(tmp_path / "planned.gguf")
    assert mine == theirs and len({k for k, _ in theirs.values()}) > 3 and steps[-1] == (len(theirs), len(theirs))
    assert receipt.bytes == receipt.planned == plan.budget["spent"]
    assert receipt.file == (tmp_path / "planned.gguf").stat().st_size
    before, after = (gguf.GGUFReader(f).fields for f in (source, tmp_path / "planned.gguf"))
    changed = {"general.file_type", "general.quantization_version"}
    kept = {k: f.contents() for k, f in before.items() if not k.startswith("GGUF.") and k not in changed}
    assert {k: after[k].contents() for k in kept} == kept and kept["own.words"] == ["a", "\u00e4\u4e2d", ""]
    assert all(after[k].types == before[k].types for k in kept) and after["general.quantization_version"].contents() == 2
    assert gguf.LlamaFileType(after["general.file_type"].contents()).name != "MOSTLY_F16"
    assert np.isfinite(log_probabilities(tmp_path / "planned.gguf", [[3, 4, 5]])).sum() > 90
    again = requantise(tmp_path / "planned.gguf", plan, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "planned.gguf").read_bytes() and not again.notes


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("method", ["descent", "gptq", "weighted"])
def test_a_file_is_rounded_with_the_inputs_of_its_model(tmp_path, converted, letters, kind, method):
    """As the model itself is written: rows of q and k change places, gate and up are apart; some tensors stay in 16 bits."""
    source, text = converted / f"{kind}.gguf", zoo.tokens(4, 24, vocabulary=96)
    plan = planned(build(kind), ["Q8_0", "Q4_0", "F16", "Q5_1"])
    write_bits(build(kind), plan, tmp_path / "out", text, tokenizer=letters, method=method)
    receipt = requantise(source, plan, tmp_path / "planned.gguf", method=method, inputs=build(kind), data=text)
    mine, theirs = types_and_bytes(tmp_path / "out" / "model.gguf"), types_and_bytes(tmp_path / "planned.gguf")
    assert mine == theirs and receipt.method == method and receipt.bytes == receipt.planned == plan.budget["spent"]
    requantise(source, plan, tmp_path / "plain.gguf", method="rtn")
    assert types_and_bytes(tmp_path / "plain.gguf") != theirs
    assert {p.name for p in tmp_path.iterdir()} == {"out", "planned.gguf", "plain.gguf"}, "what lay aside is gone"


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_folder_has_the_importance_matrix_that_its_card_names(tmp_path, converted, letters, kind):
    """As the model's own folder has it: from the inputs of the model, and where a file of them is given."""
    source, text, weighted = converted / f"{kind}.gguf", zoo.tokens(4, 24, vocabulary=96), {"method": "weighted"}
    plan, own = planned(build(kind), ["Q8_0", "Q4_0", "F16", "Q5_1"]), tmp_path / "own" / "imatrix.gguf"
    write_bits(build(kind), plan, tmp_path / "own", text, tokenizer=letters, **weighted)
    requantise(source, plan, tmp_path / "inputs", inputs=build(kind), data=text, **weighted)
    requantise(source, plan, tmp_path / "file", imatrix=str(own))
    write_bits(build(kind), plan, tmp_path / "again", tokenizer=letters, imatrix=str(own), **weighted)
    for name in ("inputs", "file", "again"):
        assert "--imatrix imatrix.gguf" in (tmp_path / name / "README.md").read_text()
        assert (tmp_path / name / "imatrix.gguf").read_bytes() == own.read_bytes()
    requantise(source, plan, tmp_path / "plain", method="rtn")
    assert not (tmp_path / "plain" / "imatrix.gguf").exists()


def moved(file, out, name, change):
    """The file with one tensor's rows changed."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, f in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.alignment"):
            writer.add_key_value(key, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
    for t in reader.tensors:
        writer.add_tensor(t.name, np.ascontiguousarray(change(t.data)) if t.name == name else t.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_rows_are_found_wherever_a_converter_put_them(tmp_path, converted):
    """Interleaved, doubled, and of experts; rows with other values, and a file that was quantised, are refused."""
    name, text = "blk.1.ffn_down_exps.weight", zoo.tokens(2, 16, vocabulary=96)
    plan = planned(build("qwen3_moe"), ["Q4_0", "Q8_0"])
    own = {"method": "gptq", "inputs": build("qwen3_moe"), "data": text}
    requantise(converted / "qwen3_moe.gguf", plan, tmp_path / "a.gguf", **own)
    turn = moved(converted / "qwen3_moe.gguf", tmp_path / "turned.gguf", name, lambda rows: rows[:, ::-1])
    own["inputs"] = build("qwen3_moe")
    requantise(turn, plan, tmp_path / "b.gguf", **own)
    a, b = ({t.name: t.data for t in gguf.GGUFReader(tmp_path / f).tensors} for f in ("a.gguf", "b.gguf"))
    assert all(np.array_equal(a[n], b[n][:, ::-1] if n == name else b[n]) for n in a) and not np.array_equal(a[name], b[name])
    other = moved(converted / "qwen3_moe.gguf", tmp_path / "other.gguf", name, lambda rows: rows * np.float16(2))
    own["inputs"] = build("qwen3_moe")
    with pytest.raises(ModelMismatch, match=f"Rows of {name} .* are in no row of .*down_proj"):
        requantise(other, plan, tmp_path / "no.gguf", **own)
    requantise(converted / "qwen3_moe.gguf", plan, tmp_path / "q.gguf", method="rtn")
    with pytest.raises(InvalidInput, match="rows cannot be told any more"):
        requantise(tmp_path / "q.gguf", plan, tmp_path / "no.gguf", **own)
    with pytest.raises(InvalidInput, match="gptq needs calibration data"):
        requantise(converted / "qwen3_moe.gguf", plan, tmp_path / "no.gguf", **{**own, "data": None})
    with pytest.raises(InvalidInput, match="rtn reads no inputs"):
        requantise(converted / "qwen3_moe.gguf", plan, tmp_path / "no.gguf", **{**own, "method": "rtn"})
    assert not (tmp_path / "no.gguf").exists() and not list(tmp_path.glob(".rounded*"))


def test_keys_and_values_of_latent_attention_stay_as_the_converter_wrote_them(tmp_path):
    """It writes both apart, the keys of every head turned around; a plan leaves them, and gives all else its types."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32}
    model = zoo.build("deepseek-v3", **wide)
    plan, own = planned(model, ["Q8_0", "Q4_0"]), dict(model.named_parameters())
    assert not any("kv_b_proj" in m for m in plan.payload.formats) and any("kv_a_proj" in m for m in plan.payload.formats)
    writer, names = gguf.GGUFWriter(tmp_path / "source.gguf", "deepseek2"), Names("deepseek2", 3)
    writer.add_block_count(3)
    for matrix in plan.payload.formats:
        weight, tensors = own.get(f"{matrix}.weight", own.get(matrix)).detach().half().numpy(), names.find(matrix)
        for tensor, part in zip(tensors, np.split(weight, len(tensors), -2), strict=True):
            writer.add_tensor(f"{tensor}.weight", np.ascontiguousarray(part))
    for i in range(3):
        both = own[f"model.layers.{i}.self_attn.kv_b_proj.weight"].detach().half().numpy().reshape(4, 16, 32)
        writer.add_tensor(f"blk.{i}.attn_k_b.weight", np.ascontiguousarray(both[:, :8].swapaxes(1, 2)))
        writer.add_tensor(f"blk.{i}.attn_v_b.weight", np.ascontiguousarray(both[:, 8:]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    receipt = requantise(tmp_path / "source.gguf", plan, tmp_path / "planned.gguf")
    before, after = types_and_bytes(tmp_path / "source.gguf"), types_and_bytes(tmp_path / "planned.gguf")
    kept = {n for n in after if after[n] == before[n]}
    assert receipt.bytes == plan.budget["spent"] and {n for n in before if "_b.weight" in n and "q_b" not in n} <= kept
    assert {after[n][0] for n in set(after) - kept} == {"Q8_0", "Q4_0"} and kept < set(after)
    assert "attn_[kv]_b\\.weight=f16" in llama_cpp(plan).splitlines()
    old = dataclasses.replace(plan.blocks[-1], name="x", modules=("model.layers.0.self_attn.kv_b_proj",))
    formats = {**plan.payload.formats, old.modules[0]: "Q8_0"}
    older = zoo.saying(dataclasses.replace(plan, blocks=(*plan.blocks, old)), formats=formats)
    with pytest.raises(InvalidInput, match="two tensors in the file.*Make the plan again"):
        requantise(tmp_path / "source.gguf", older, tmp_path / "no.gguf")


def test_an_importance_matrix_and_a_source_that_is_quantised(tmp_path, converted):
    """Experts have importances of their own, and rounding twice is said."""
    model = build("qwen3_moe")
    source, plan = converted / "qwen3_moe.gguf", planned(model, ["Q4_0", "Q5_1"])
    writer, rng = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "imatrix"), np.random.default_rng(0)
    name, sums = "blk.1.ffn_down_exps.weight", np.float32(rng.uniform(0.1, 9.0, (4, 32)))
    sums[2] = 0.0  # no token reached this expert
    writer.add_type("imatrix")
    writer.add_tensor(f"{name}.in_sum2", sums)
    writer.add_tensor(f"{name}.counts", np.float32([[5], [3], [0], [2]]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    receipt = requantise(source, plan, tmp_path / "out", imatrix=str(tmp_path / "imatrix.gguf"))
    assert receipt.method == "weighted" and "Without importances" in receipt.notes[0]
    kind, data = types_and_bytes(tmp_path / "out" / "model.gguf")[name]
    weights = model.model.layers[1].mlp.experts.down_proj.detach().half().float().numpy()
    ones = np.ones(32, np.float32)
    importances = (sums[0] / 5, sums[1] / 3, ones, sums[3] / 2)
    expected = [ggml.quantise(w, kind, h).tobytes() for w, h in zip(weights, importances, strict=True)]
    assert data == b"".join(expected)
    assert "#25716" in (tmp_path / "out" / "README.md").read_text()
    other = planned(model, ["Q8_0"])
    assert (
        "was quantised before (Q4_0, Q5_1)" in requantise(tmp_path / "out" / "model.gguf", other, tmp_path / "b.gguf").notes[0]
    )
    with pytest.raises(InvalidInput, match="gptq needs the inputs.*inputs MODEL"):
        requantise(source, plan, tmp_path / "no.gguf", method="gptq")
    with pytest.raises(InvalidInput, match="weighted needs an importance matrix"):
        requantise(source, plan, tmp_path / "no.gguf", method="weighted")


def test_an_importance_matrix_that_lacks_what_a_type_needs_is_refused_before_anything_is_written(tmp_path):
    model = build("llama", hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=64)
    source, plan = tmp_path / "source.gguf", planned(model, ["Q8_0"])
    write_bits(model, plan, tmp_path / "folder")
    (tmp_path / "folder" / "model.gguf").rename(source)
    formats = {m: "IQ2_XXS" if m.endswith("up_proj") else f for m, f in plan.payload.formats.items()}
    coarse = zoo.saying(plan, formats=formats)
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "imatrix")
    writer.add_type("imatrix")
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(f"{name}.in_sum2", np.ones((1, 256), np.float32))
        writer.add_tensor(f"{name}.counts", np.float32([[1]]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelMismatch, match=r"nothing for 2 tensors whose types need it, first blk.1.ffn_up.weight \(IQ2_XXS"):
        requantise(source, coarse, tmp_path / "out.gguf", imatrix=str(tmp_path / "imatrix.gguf"))
    with pytest.raises(InvalidInput, match="IQ2_XXS is rounded with an importance matrix only"):
        requantise(source, coarse, tmp_path / "out.gguf", method="rtn")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path, converted, share):
    whole = (converted / "llama.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CorruptFile, match="is no GGUF file, or it is cut off"):
        requantise(tmp_path / "cut.gguf", planned(build("llama"), ["Q8_0"]), tmp_path / "out.gguf")
    assert [f.name for f in tmp_path.iterdir()] == ["cut.gguf"]


@pytest.mark.parametrize(("kind", "largest"), [("F16", 1e5), ("Q4_0", 1e6), ("Q5_1", 3e6)])
def test_weights_that_a_type_does_not_reach_are_refused_with_one_that_does(tmp_path, converted, kind, largest):
    name, matrix = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj"

    def larger(rows):
        rows = rows.astype(np.float32)
        rows[5, 3] = largest
        return rows

    source = moved(converted / "llama.gguf", tmp_path / "large.gguf", name, larger)
    with pytest.raises(CoverageError, match=f"{name} has weights that are too large for {kind}.*--keep '{name}=Q8_0'"):
        requantise(source, planned(build("llama"), [kind]), tmp_path / "no.gguf")
    broken = moved(converted / "llama.gguf", tmp_path / "broken.gguf", name, lambda rows: rows + np.float16(np.inf))
    with pytest.raises(CoverageError, match="broken.gguf holds numbers that are not finite"):
        requantise(broken, planned(build("llama"), [kind]), tmp_path / "no.gguf")
    plan = planned(build("llama"), ["Q8_0"])
    requantise(source, plan, tmp_path / "kept.gguf")
    kept = next(t for t in gguf.GGUFReader(tmp_path / "kept.gguf").tensors if t.name == name)
    assert gguf.dequantize(kept.data, kept.tensor_type)[5, 3] == pytest.approx(largest, rel=0.01)
    assert plan.payload.formats[matrix] == "Q8_0" and not (tmp_path / "no.gguf").exists()


def test_a_plan_of_another_model_is_refused(tmp_path, converted, capsys):
    wide = planned(build("llama", intermediate_size=160), ["Q8_0"])
    with pytest.raises(ModelMismatch, match=r"another model.*mlp.down_proj has 10240 weights in the plan and 6144"):
        requantise(converted / "llama.gguf", wide, tmp_path / "out.gguf")
    deep = planned(build("llama", num_hidden_layers=4), ["Q8_0"])
    deep.save(tmp_path / "plan.json")
    asked = ["apply", str(converted / "llama.gguf"), str(tmp_path / "plan.json"), "-o", str(tmp_path / "o.gguf"), "--quiet"]
    assert main(asked) == 2 and "model.layers.3.mlp.down_proj is not in it" in " ".join(capsys.readouterr().err.split())
    said = "--samples has no meaning for a GGUF file. It would be ignored. Leave it out: what is known of the inputs is in"
    assert main([*asked, "--samples", "3"]) == 2 and said in " ".join(capsys.readouterr().err.split())
    plan = planned(build("llama"), ["Q8_0"])
    plan.save(tmp_path / "plan.json", overwrite=True)
    assert main(asked) == 0 and main(asked) == 2
    size = (tmp_path / "o.gguf").stat().st_size
    counted = plan.budget["spent"] + plan.payload.fixed_bytes + 1
    small = zoo.saying(plan, head_bytes=1)
    noted = requantise(converted / "llama.gguf", small, tmp_path / "o.gguf", overwrite=True).notes
    assert f"The whole file has {size - counted:,} bytes more than the plan counted ({counted:,})" in noted[0]
    large = zoo.saying(plan, head_bytes=size)
    assert not requantise(converted / "llama.gguf", large, tmp_path / "o.gguf", overwrite=True).notes
    assert sorted(f.name for f in tmp_path.iterdir()) == ["o.gguf", "plan.json"]


def test_a_file_with_the_tokens_of_the_tokenizer_alone_takes_the_plan(tmp_path, converted):
    """As llama.cpp writes Gemma 3: rows that no token has are left out, and not counted."""
    plan = planned(build("llama"), ["Q8_0", "Q4_0"])
    file = moved(converted / "llama.gguf", tmp_path / "short.gguf", "token_embd.weight", lambda rows: rows[:72])
    receipt = requantise(file, plan, tmp_path / "planned.gguf")
    assert (
        receipt.planned
        == receipt.bytes
        == plan.budget["spent"] - 24 * 64 // 32 * {"Q8_0": 34, "Q4_0": 18}[plan.payload.formats["model.embed_tokens"]]
    )
    assert receipt.bits < 16 and "token_embd.weight has 24 tokens fewer than the plan" in receipt.notes[0]
    requantise(converted / "llama.gguf", plan, tmp_path / "whole.gguf")
    short, whole = types_and_bytes(tmp_path / "planned.gguf"), types_and_bytes(tmp_path / "whole.gguf")
    assert {n for n in whole if short[n] != whole[n]} == {"token_embd.weight"}
    assert whole["token_embd.weight"][1].startswith(short["token_embd.weight"][1])
    own = {"method": "gptq", "inputs": build("llama"), "data": zoo.tokens(2, 16, vocabulary=72)}
    assert requantise(file, plan, tmp_path / "fed.gguf", **own).bytes == receipt.bytes
    other = moved(file, tmp_path / "other.gguf", "token_embd.weight", lambda rows: rows[::-1])
    with pytest.raises(ModelMismatch, match="its embedding holds other values"):
        requantise(other, plan, tmp_path / "no.gguf")
    longer = moved(file, tmp_path / "longer.gguf", "token_embd.weight", lambda rows: np.concatenate([rows, rows]))
    with pytest.raises(ModelMismatch, match="model.embed_tokens has 6144 weights in the plan and 9216 in the file"):
        requantise(longer, plan, tmp_path / "no.gguf")


def test_a_file_of_another_model_of_the_same_sizes_is_refused_by_its_values(tmp_path, converted):
    other = build("llama")
    with torch.no_grad():
        weight = other.model.embed_tokens.weight  # as of a model that began with the same numbers: cosine .95
        weight.add_(weight.flip(0), alpha=0.3)
    with pytest.raises(ModelMismatch, match="another model.*its embedding holds other values"):
        requantise(converted / "llama.gguf", planned(other, ["Q8_0"]), tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())
    coarse = requantise(converted / "llama.gguf", planned(build("llama"), ["Q4_0"]), tmp_path / "coarse.gguf")
    assert coarse.modules["model.embed_tokens"]["format"] == "Q4_0"
    again = requantise(tmp_path / "coarse.gguf", planned(build("llama"), ["Q8_0"]), tmp_path / "again.gguf")
    assert "costs more than the plan says" in again.notes[0]


@pytest.mark.parametrize(
    ("method", "form", "words", "silent"),
    [
        ("rtn", "IQ2_S", "For IQ2_S llama-quantize asks for an importance matrix", "--imatrix imatrix.gguf"),
        ("rtn", "Q4_K", "model-f16.gguf out.gguf", "imatrix"),
        ("weighted", "IQ2_S", "--imatrix imatrix.gguf model-f16.gguf", "asks for an importance matrix"),
    ],
)
def test_the_card_says_when_llama_quantize_needs_an_importance_matrix(method, form, words, silent):
    plan = planned(build("llama"), ["Q8_0"])
    rows = {m: {"format": form, "bytes": 1} for m in plan.payload.formats}
    numbers = {"plan_digest": plan.digest, "bytes": 1, "planned": 1, "tensors": 1, "file": 2, "bits": 4.5}
    receipt = QuantisationReceipt(method=method, family="gguf", identity=plan.model, modules=rows, versions={}, **numbers)
    card = model_card(plan, receipt)
    assert words in card and silent not in card
    other = "" if method == "rtn" else f". Damage and KL that the plan names are of rtn: what {method} costs was not measured."
    assert f"| rounded by | {method}{other} |" in card, "the figures of a plan are those of its own method"


@pytest.mark.parametrize(("runtime", "use"), [("transformers", "AutoModelForCausalLM.from_"), ("vllm", "vllm serve .")])
def test_the_card_names_the_runtime_that_was_planned_for(runtime, use):
    """It named vLLM for formats that vLLM does not read."""
    plan = planned(build("llama"), ["Q8_0"])
    plan = zoo.saying(plan, runtime=runtime, family="compressed-tensors")
    rows = {m: {"format": "w3-g32", "bytes": 1} for m in plan.payload.formats}
    numbers = {"plan_digest": plan.digest, "bytes": 1, "planned": 1, "tensors": 1, "file": 2, "bits": 4.5}
    receipt = QuantisationReceipt(method="rtn", family="compressed-tensors", identity=plan.model, modules=rows, **numbers)
    card = model_card(plan, receipt)
    assert use in card and ("vllm" in card) == (runtime == "vllm")


@pytest.mark.parametrize("name", ["someone/model-1b", "/models/mine"])
def test_the_card_says_what_a_model_was_made_from(name):
    from huggingface_hub import ModelCard

    plan = planned(build("llama"), ["Q8_0", "Q4_0"])
    named = dataclasses.replace(plan, model={**plan.model, "id": name})
    rows = {m: {"format": f, "bytes": 1} for m, f in plan.payload.formats.items()}
    numbers = {"plan_digest": plan.digest, "bytes": 1, "planned": 1, "tensors": 1, "file": 2, "bits": 4.5}
    receipt = QuantisationReceipt(method="rtn", family="gguf", identity=named.model, modules=rows, **numbers)
    card = ModelCard(model_card(named, receipt), ignore_metadata_errors=False)
    held = card.data.to_dict()
    on_hub = {"base_model": name, "base_model_relation": "quantized"} if name[0] != "/" else {}
    assert held == {**on_hub, "quantized_by": "layerbudget", "pipeline_tag": "text-generation", "tags": ["gguf"]}
    assert "| bits per weight | 4.5000 " in card.text and "llama-quantize --pure" in card.text


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_llama_cpp_computes_layers_that_differ(tmp_path, letters, kind):
    """Heads, key-value heads and widths of each layer's own, and planned types on top of them."""
    model = build(kind, num_attention_heads=4, num_hidden_layers=4, head_dim=16)
    data = zoo.tokens(6, 24, vocabulary=90)
    names = [n for n, _ in layers(model)]
    lb.remove_units(model, data, dict(zip(names, (0.0, 0.5, 0.0, 0.5), strict=True)), kind="heads", by="groups")
    lb.remove_units(model, data, dict(zip(names, (0.0, 0.25, 0.5, 0.75), strict=True)), kind="mlp")
    save_gguf(model, letters, tmp_path / "out")
    assert [m.up_proj.out_features for _, m in named(model, "mlp")] == [96, 72, 48, 24]
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    lengths = (1, 9, 40)

    def compare(file, most):
        with torch.no_grad():
            mine = torch.log_softmax(model(ids).logits[0].float(), -1).numpy()[[n - 1 for n in lengths]]
        theirs = log_probabilities(file, [ids[0, :n].tolist() for n in lengths])
        seen = np.isfinite(theirs)
        assert seen.sum() > 3 * 95 - 5 and mine.std() > 0.5 and np.abs(theirs - mine)[seen].max() < most

    compare(tmp_path / "out" / "model.gguf", 0.03)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert reader.fields["general.architecture"].contents() == "deci"
    assert reader.fields["deci.feed_forward_length"].contents() == [m.up_proj.out_features for _, m in named(model, "mlp")]
    receipt = write_bits(model, planned(model, ["Q8_0", "F16"]), tmp_path / "bits", tokenizer=letters)
    assert receipt.bytes == receipt.planned
    compare(tmp_path / "bits" / "model.gguf", 0.3)  # llama.cpp rounds the inputs of products with Q8_0


def named(model, ending):
    return [(n, m) for n, m in model.named_modules() if n.endswith(f".{ending}")]


def test_layers_that_differ_of_other_families_are_refused_before_anything_is_removed():
    model = build("gemma")
    plan = lb.plan_shapes(model, zoo.tokens(4, 12, vocabulary=90), "20% flops", kinds=("mlp",), passes=20, draws=1)
    assert layers_differ(plan)
    with pytest.raises(InvalidInput, match="gemma model whose layers differ.*Plan with --even"):
        check_gguf(model, plan)


@pytest.mark.parametrize(("kind", "said"), [("starcoder2", "--parts mlp"), ("qwen2", None), ("qwen3", None)])
def test_fewer_heads_are_refused_before_they_go_where_all_heads_are_as_wide_as_the_model(kind, said):
    config = build(kind).config
    if said is None:
        assert architecture(config, fewer=True).name == {"qwen2": "deci"}.get(kind, kind)
        return
    with pytest.raises(InvalidInput, match=said):
        architecture(config, fewer=True)
    with pytest.raises(InvalidInput, match=said):
        lb.plan_shapes(build(kind), zoo.tokens(2, 8, vocabulary=90), "20% flops", runtime="llama.cpp", even=True)


def test_rows_that_256_does_not_divide_are_named():
    assert narrow_rows(build("llama")).startswith("Rows of 64, 96 hold no K and IQ types")
    said = narrow_rows(build("llama", hidden_size=32, intermediate_size=48))  # each width has types of its own
    assert "types for 32 are MXFP4, Q4_0" in said and said.endswith("types for 48 are F16.")
    assert narrow_rows(build("llama", hidden_size=256, intermediate_size=512)) == ""
