"""A written folder has all of its source that no decision touched: fields, files, bytes, precision, unloaded layers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo

from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.shapes.apply import remove_units
from layerbudget.decisions.shapes.nemotron import save_nemotron
from layerbudget.decisions.shapes.save import save_smaller
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.save import save_pruned
from layerbudget.models.experts import cut_experts, find_experts
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.storage.folders import write_model
from layerbudget.storage.unread import on_unread

THREE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIDE = {
    "chat_template.jinja": "{{ messages }}",
    "preprocessor_config.json": '{"size":  3}',
    "added_tokens.json": '{"<x>": 95}',
    "special_tokens_map.json": '{"bos_token":  "<s>"}',
    "modeling_own.py": "x = 1\n",
    "words/list.txt": "one\n",
    "LICENSE": "free",
}
NEVER = {
    "pytorch_model.bin": "x",
    "consolidated.00.pth": "x",
    "quantize_config.json": "{}",
    "hf_quant_config.json": "{}",
    "plan.json": "{}",
    "onnx/model.onnx": "x",
    ".cache/x": "x",
    "optimizer.pt": "x",
    "tf_model.h5": "x",
    "params.json": "{}",
    "README.md": "theirs",
}
WIDE = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96}
CHANGES = {"llama": WIDE, "qwen2": WIDE, "glm4-moe": {**WIDE, "moe_intermediate_size": 32}, "gpt2": {"vocab_size": 96}}
MTP = "num_nextn_predict_layers"


def source(place, name, tokenizer, **fields):
    """A checkpoint as they are published: bfloat16, some tensors in float32, older names of fields, and files of its own."""
    folder = place / f"{name} source"
    zoo.build(name, **CHANGES[name]).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for n, t in tensors.items():
        if "correction_bias" in n:
            tensors[n] = 6.94 + 0.12 * torch.rand(t.shape, generator=g)
        elif n.endswith("layers.1.input_layernorm.weight"):
            tensors[n] = 1 + 0.01 * torch.rand(t.shape, generator=g)
    if name == "glm4-moe":
        tensors |= {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
        tensors["model.layers.3.eh_proj.weight"] = torch.randn(32, 64, generator=g).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if config.pop("rope_parameters", None) is not None:
        fields |= {"rope_theta": 500000.0, "rope_scaling": THREE if name == "llama" else None}
    config.pop("dtype")
    fields |= {"torch_dtype": "bfloat16", "of_its_own": {"a": [1, 2]}, "transformers_version": "4.51.3"}
    fields |= {MTP: 1} if name == "glm4-moe" else {}
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6,  "top_p": 0.9}')
    for file, text in {**SIDE, **NEVER}.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    return folder


def by_sparsity(model, tokenizer, out):
    plan = zoo.plan(model)
    save_pruned(model, tokenizer, plan, prune(model, plan, None, "magnitude"), out)
    return {m for b in plan.blocks for m in b.modules}


def by_bits(model, tokenizer, out):
    damage = rounding_damage(model, zoo.tokens(2, 8, vocabulary=96), runtime="vllm", formats=["w8-g32"], draws=1)
    plan = plan_bits(damage, bits=9.0)
    write_bits(model, plan, out, tokenizer=tokenizer)
    return {m for b in plan.blocks for m in b.modules}


def by_experts(model, tokenizer, out):
    cut_experts(model, {e.name: range(4) for e in find_experts(model)})
    write_model(model, tokenizer, out, {})
    return {n for n, _ in model.named_modules() if ".mlp" in n}


def by_shapes(model, tokenizer, out):
    remove_units(model, zoo.tokens(2, 8, vocabulary=96), 0.5, kind="mlp", multiple=4)
    save_smaller(model, tokenizer, out)
    return {n for n, _ in model.named_modules() if ".mlp." in n}


def by_uneven_shapes(model, tokenizer, out):
    remove_units(model, zoo.tokens(2, 8, vocabulary=96), {"model.layers.0": 0.5}, kind="mlp", multiple=4)
    save_nemotron(model, tokenizer, out)
    return {n for n, _ in model.named_modules() if ".mlp." in n}


OTHERWISE = {  # fields that a verb is asked to change
    by_sparsity: set(),
    by_bits: {"torch_dtype"},
    by_experts: {"n_routed_experts", MTP},
    by_shapes: {"intermediate_size"},
    by_uneven_shapes: {"intermediate_size", "architectures", "model_type", "auto_map"},
}
REFITTED = (by_shapes, by_uneven_shapes)  # in the precision that the model was loaded in
CASES = [
    (by_sparsity, "llama"),
    (by_sparsity, "glm4-moe"),
    (by_sparsity, "gpt2"),
    (by_bits, "llama"),
    (by_bits, "glm4-moe"),
    (by_experts, "glm4-moe"),
    (by_shapes, "llama"),
    (by_shapes, "qwen2"),
    (by_uneven_shapes, "llama"),
    (by_uneven_shapes, "qwen2"),
]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(("verb", "name"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_what_a_verb_does_not_touch_leaves_as_it_came(tmp_path, tokenizer, verb, name, dtype):
    folder, out = source(tmp_path, name, tokenizer), tmp_path / "out"
    touched = verb(load_model(str(folder), dtype=dtype), load_tokenizer(str(folder)), out)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    same = before.keys() - OTHERWISE[verb] - ({"torch_dtype"} if dtype == "float32" and verb in REFITTED else set())
    assert {n: after.get(n, "gone") for n in same} == {n: before[n] for n in same}
    for file in [*SIDE, "generation_config.json", "tokenizer.json", "tokenizer_config.json"]:
        assert (out / file).read_bytes() == (folder / file).read_bytes(), file
    for file in NEVER:
        assert not (out / file).exists() or (out / file).read_text() != NEVER[file], file
    left, made = (load_file(f / "model.safetensors") for f in (folder, out))
    gone = verb in (by_experts,)
    touched = {t.partition(".experts.")[0] + ".experts." if ".experts." in t else t for t in touched}
    free = {n for n in left if n.rpartition(".")[0] not in touched and not n.startswith(tuple(touched))}
    free -= {n for n in left if gone and ".layers.3." in n}
    if name == "glm4-moe":
        free |= {n for n in left if n.endswith("correction_bias") and not gone}
        free |= {n for n in left if ".layers.3." in n and not gone}
    assert len(free) > 5
    for n in free:
        assert made[n].dtype == left[n].dtype and torch.equal(made[n], left[n]), n


@pytest.mark.parametrize("verb", [by_sparsity, by_bits, by_experts])
def test_layers_for_tokens_further_on_are_there_or_counted_as_none(tmp_path, tokenizer, verb, caplog):
    folder, out = source(tmp_path, "glm4-moe", tokenizer), tmp_path / "out"
    model = load_model(str(folder), dtype="auto")
    assert "multi-token prediction" in caplog.text and "no verb reads them" in on_unread(model)
    verb(model, load_tokenizer(str(folder)), out)
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    layers = {int(n.split(".")[2]) for n in tensors if ".layers." in n}
    assert len(layers) == config["num_hidden_layers"] + config[MTP]
    assert config[MTP] == (0 if verb is by_experts else 1)
    assert ("is not in the folder" in caplog.text) == (verb is by_experts)
    if verb is by_bits:
        assert {r"re:^model\.layers\.3\..*", "model.layers.3.eh_proj"} <= set(config["quantization_config"]["ignore"])
    assert load_model(str(out), dtype="auto") is not None


@pytest.mark.parametrize("spelt", ["num_mtp_modules", "mtp_num_hidden_layers", "mtp_num_layers"])
def test_a_count_of_layers_that_are_nowhere_becomes_zero_under_every_name(tmp_path, tokenizer, spelt, caplog):
    folder = source(tmp_path, "llama", tokenizer, **{spelt: 1, "mtp_use": True})
    by_sparsity(load_model(str(folder)), None, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[spelt] == 0 and config["mtp_use"] is True and f"{spelt} of config.json is 0" in caplog.text


def test_a_tokenizer_of_the_users_is_written_and_not_that_of_the_source(tmp_path, tokenizer):
    folder = source(tmp_path, "llama", tokenizer)
    own = load_tokenizer(str(folder))
    own.add_special_tokens({"additional_special_tokens": ["<more>"]})
    by_sparsity(load_model(str(folder)), own, tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).convert_tokens_to_ids("<more>") == own.convert_tokens_to_ids("<more>")
    assert not (tmp_path / "out" / "added_tokens.json").exists() and (tmp_path / "out" / "LICENSE").exists()


def test_sharded_and_pickled_sources_and_folders(tmp_path, tokenizer):
    """Several files, with an index that counts what is in them; and a source that torch.save wrote."""
    folder = source(tmp_path, "glm4-moe", tokenizer)
    left = load_file(folder / "model.safetensors")
    half = len(left) // 2
    parts = {"model-00001-of-00002.safetensors": list(left)[:half], "model-00002-of-00002.safetensors": list(left)[half:]}
    for file, names in parts.items():
        save_file({n: left[n] for n in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, names in parts.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    model = load_model(str(folder))
    write_model(model, None, tmp_path / "out", {}, max_shard_size="20KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    made = {n: load_file(tmp_path / "out" / file)[n] for n, file in index["weight_map"].items()}
    assert made.keys() == left.keys() and all(torch.equal(made[n], left[n]) and made[n].dtype == left[n].dtype for n in left)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in left.values())
    torch.save(left, folder / "pytorch_model.bin")
    for file in (*parts, "model.safetensors.index.json"):
        (folder / file).unlink()
    write_model(load_model(str(folder)), None, tmp_path / "again", {})
    made = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(made[n], left[n]) and made[n].dtype == left[n].dtype for n in left)


def test_a_model_that_was_trained_after_it_was_loaded_keeps_its_values_and_one_without_source_is_written(tmp_path, tokenizer):
    folder = source(tmp_path, "llama", tokenizer)
    model = load_model(str(folder), dtype="float32")
    with torch.no_grad():
        model.model.norm.weight.add_(1e-6)
    write_model(model, None, tmp_path / "out", {})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], model.model.norm.weight)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    shutil.rmtree(folder)
    write_model(model, tokenizer, tmp_path / "alone", {})
    assert load_model(str(tmp_path / "alone")) is not None and load_tokenizer(str(tmp_path / "alone")) is not None
