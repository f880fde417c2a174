"""GGUF files as models: the weights, scores and logits of the folder, or a refusal that says what is not read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import zoo
from tests.llama_cpp.test_writer import LINEAR, build, planned

from layerbudget.cli import main
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.errors import BadModel, CorruptFile, NotFound
from layerbudget.llama_cpp import writer as written
from layerbudget.models.loading import load_model, load_tokenizer
from layerbudget.storage.checkpoint import gguf_of

CACHE = ["--bits", "6", "--context", "64", "--check", "2"]
SHAPES = ["--save", "15% params", "--passes", "15", "--by", "groups", "--strides", "1", "--draws", "1", "--even"]
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
READ = [
    ("llama", {}),  # Llama 3's frequencies, biases
    ("llama", {"rope_parameters": LINEAR, "attention_bias": False, "mlp_bias": False, "head_dim": 32}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 128}),
    ("qwen3", {"head_dim": 16}),
    ("phi3", {}),
    ("phi3", HALF),
    ("starcoder2", {}),
    ("starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": False}),
    ("stablelm", {}),
    ("stablelm", {**HALF, "use_qkv_bias": False}),
    ("mixtral", {}),
    ("qwen2_moe", {}),
    ("qwen3_moe", {}),
    ("olmoe", {}),
    ("granitemoe", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("olmo3", {}),
    ("smollm3", {}),
]


def file_of(model, folder, formats=("Q8_0", "Q4_0")):
    write_bits(model, planned(model, formats), folder / "out", check=False)
    return folder / "out"


def logits(model):
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize(("kind", "changes"), READ)
def test_the_logits_are_those_of_the_rounded_model(kind, changes, tmp_path):
    model = build(kind, **changes)
    dense = logits(model)
    loaded = load_model(str(file_of(model, tmp_path)), quiet=True)
    assert float((logits(loaded) - logits(model)).abs().max()) < 1e-3
    assert float((logits(model) - dense).abs().max()) > 0.01, "the file is rounded"
    assert not hasattr(loaded.config, "quantization_config")


def test_every_type_of_the_menu_reads(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16"):
        model = build("qwen2", **sizes)
        loaded = load_model(str(file_of(model, tmp_path / name, [name])), quiet=True)
        assert float((logits(loaded) - logits(model)).abs().max()) < 1e-3, name


@pytest.mark.parametrize(
    ("says", "what"),
    [
        (lambda writer: writer.add_sliding_window(8), "attention.sliding_window = 8"),
        (lambda writer: writer.add_value_length(8), "attention.value_length = 8"),
        (lambda writer: writer.add_causal_attention(False), "attention.causal = False"),
        (lambda writer: writer.add_logit_scale(2.0), "logit_scale = 2.0"),
    ],
)
def test_a_number_that_transformers_does_not_read_is_refused(says, what, tmp_path, monkeypatch):
    numbers = written.add_numbers

    def more(writer, *given):
        numbers(writer, *given)
        says(writer)

    monkeypatch.setattr(written, "add_numbers", more)
    folder = file_of(build("qwen2"), tmp_path)
    with pytest.raises(BadModel, match=f"has {what}, which is not read"):
        load_model(str(folder))


def test_a_tensor_that_no_parameter_takes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("layerbudget.gguf.header.FACTORS", "none")
    with pytest.raises(BadModel, match=r"the tensor rope_freqs.weight"):
        load_model(str(file_of(build("llama"), tmp_path)))


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CorruptFile, match="does not read as GGUF"):
        load_model(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CorruptFile, match="is a pointer of Git LFS, not the weights"):
        load_model(str(tmp_path / "x.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"")
    assert gguf_of(str(tmp_path)) == tmp_path / "model.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert gguf_of(str(tmp_path)) is None


def test_scores_and_plans_on_a_file_are_those_of_the_folder_it_was_converted_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "my.txt"
    text.write_text("the cat sat on the mat, and the dog lay by the door of the house. " * 60)
    tokenizer = load_tokenizer("demo")
    made = zoo.build("llama", hidden_size=64, intermediate_size=96, vocab_size=len(tokenizer), max_position_embeddings=64)
    made.half().save_pretrained("half")  # float16, as the file has it
    tokenizer.save_pretrained("half")
    small = ["--dtype", "float32", "--data", str(text), "--samples", "2", "--length", "64"]
    gguf = ["--format", "gguf", "--check", "0"]
    types = [*gguf, "--formats", "Q4_0,Q8_0", "--bits", "5"]
    assert main(["plan", "bits", "half", *gguf, "--formats", "F16", "--bits", "16", *small, "-o", "16.json"]) == 0
    assert main(["apply", "half", "16.json", "-o", "out", "--no-check"]) == 0
    Path("alone").mkdir()
    Path("out/model.gguf").rename("alone/model-f16.gguf")
    results = []
    for name, model in (("folder", "half"), ("file", "alone/model-f16.gguf")):
        assert main(["score", model, *small, "-o", f"{name}-scores.json"]) == 0
        assert main(["plan", "bits", model, *types, *small, "-o", f"{name}.json"]) == 0
        assert main(["plan", "sparsity", model, "--sparsity", "0.5", "--passes", "6", *small, "-o", f"{name}-zeros.json"]) == 0
        assert main(["plan", "cache", model, *CACHE, *small, "-o", f"{name}-cache.json"]) == 0
        assert main(["plan", "shapes", model, *SHAPES, *small, "-o", f"{name}-shapes.json"]) == 0
        capsys.readouterr()
        assert main(["evaluate", model, "--perplexity", str(text), "--length", "64", "--dtype", "float32", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["perplexity"][str(text)]["nll"]
        scores, *plans = (
            json.loads(Path(f"{name}{end}.json").read_text()) for end in ("-scores", "", "-zeros", "-cache", "-shapes")
        )
        decided = [(plan["blocks"], plan["model"]["digest"], plan["extra"]) for plan in plans]
        results.append((scores["gain"], scores["model"]["digest"], decided, shown))
    assert results[0] == results[1]
    assert main(["doctor", "alone/model-f16.gguf"]) == 0
    for plan in ("folder.json", "file.json"):
        assert main(["apply", "alone/model-f16.gguf", plan, "-o", f"{plan}.gguf"]) == 0
    assert Path("folder.json.gguf").read_bytes() == Path("file.json.gguf").read_bytes()


@pytest.mark.parametrize(
    ("arch", "kind", "remedy"),
    [
        ("none", "imatrix", "--imatrix takes this one"),
        ("clip", "mmproj", "the language model"),
        ("rwkv7", "model", "the folder"),
    ],
)
def test_what_is_no_language_model_is_refused_with_a_remedy(arch, kind, remedy, tmp_path, capsys):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", arch)
    writer.add_type(kind)
    writer.add_tensor("x", np.zeros((2, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    for command in (["doctor"], ["score", "-o", "s.json"], ["evaluate"]):
        assert main([command[0], str(tmp_path / "x.gguf"), *command[1:]]) == 2
        assert remedy in " ".join(capsys.readouterr().err.split())


def test_a_file_in_parts_is_read_whole_and_a_missing_part_is_named(tmp_path):
    import gguf

    model = build("qwen2")
    source = gguf.GGUFReader(file_of(model, tmp_path, ["F16"]) / "model.gguf")
    parts, half = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)], len(source.tensors) // 2
    for number, (part, tensors) in enumerate(zip(parts, (source.tensors[:half], source.tensors[half:]), strict=True)):
        writer = gguf.GGUFWriter(part, "qwen2")
        for field in source.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "tokenizer.", "general.architecture")):
                writer.add_key_value(
                    field.name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
                )
        writer.add_uint16("split.count", 2)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            step()
    assert torch.equal(logits(load_model(str(parts[0]), quiet=True)), logits(load_model(str(tmp_path / "out"), quiet=True)))
    parts[1].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CorruptFile, match=r"m-00002-of-00002.gguf is a pointer of Git LFS"):
        load_model(str(parts[0]), quiet=True)
    parts[1].unlink()
    with pytest.raises(NotFound, match="there is no m-00002-of-00002.gguf"):
        load_model(str(parts[0]), quiet=True)


def test_evaluate_reads_what_apply_wrote_and_apply_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "my.txt"
    text.write_text("the cat sat on the mat, and the dog lay by the door of the house. " * 60)
    small = ["--data", str(text), "--samples", "2", "--length", "64"]
    plan = ["plan", "bits", "demo", "--bits", "5", "--format", "gguf", "--formats", "Q4_0,Q8_0", *small]
    assert main([*plan, "--check", "0", "-o", "p.json"]) == 0
    capsys.readouterr()
    assert main(["apply", "demo", "p.json", "-o", "out", "--json", "--no-check"]) == 0
    said = json.loads(capsys.readouterr().out)["next"]
    assert said == "layerbudget evaluate out --against demo --dtype float32 --perplexity TEXT"
    words = ["--against", "demo", "--dtype", "float32", "--perplexity", str(text), "--length", "64", "--json"]
    decided = "layerbudget.cli.evaluate.texts_of_folder"
    monkeypatch.setattr(decided, lambda folder: {"my.txt"} if str(folder) == "out" else set())
    results = []
    for name in ("out", "out/model.gguf"):
        assert main(["evaluate", name, *words]) == 0
        results.append(json.loads(capsys.readouterr().out))
    first, second = (r["perplexity"][str(text)]["nll"] for r in results)
    np.testing.assert_array_equal(first, second)
    assert results[0]["against"]["perplexity"][str(text)]["difference"] > 0, "five bits cost"
    assert all("my.txt decided the plan" in r["against"]["verdict"] for r in results)
