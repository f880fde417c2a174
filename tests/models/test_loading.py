"""What auto means: the checkpoint's own precision, the accelerator where there is one; and that it is written down."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo

from layerbudget.cli import main
from layerbudget.cost.sizes import shape_of, shape_of_config
from layerbudget.errors import BadModel, CorruptFile, InvalidInput
from layerbudget.evaluation.perplexity import perplexity
from layerbudget.finetuning.adapters import classifier_loader
from layerbudget.models.blocks import partition
from layerbudget.models.experts import cut_experts, find_experts
from layerbudget.models.loading import blocks_from_config, load_model, load_tokenizer
from layerbudget.models.offload import mapped
from layerbudget.models.precision import describe_place


@pytest.fixture(params=[True, False], ids=["computes bfloat16", "emulates it"])
def processor(request, monkeypatch):
    """A processor that computes in bfloat16, or does not; the precision that ``auto`` of the command line means there."""
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: request.param)
    return "bfloat16" if request.param else "float32"


@pytest.fixture
def half(tmp_path, tokenizer):
    """A model saved in bfloat16, with its tokenizer."""
    zoo.speaker("llama").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


def test_auto_is_what_the_checkpoint_holds(half, saved_model, processor):
    assert load_model(half, dtype="auto", device="auto").dtype == torch.bfloat16
    assert load_model(half).dtype == torch.float32, "of Python's load_model the default stays"
    assert load_model(str(saved_model("llama")), dtype="auto").dtype == torch.float32
    model = load_model(half, dtype="auto")
    assert describe_place(model).startswith("0.0 M parameters in bfloat16 on cpu")
    assert classifier_loader(half, 0, dtype="auto").settings["dtype"] == processor
    assert load_model(half, dtype="quick").dtype == getattr(torch, processor)
    assert load_model(str(saved_model("llama")), dtype="quick").dtype == torch.float32
    assert mapped(load_model(half, dtype="quick", stream=True)).converts == (processor == "float32")
    with pytest.raises(InvalidInput, match="one of auto, float32"):
        load_model(half, dtype="half")


def test_the_precision_of_auto_is_in_the_record_and_the_pruned_checkpoint_keeps_it(half, tmp_path, capsys, processor):
    words = ["--samples", "4", "--length", "16"]
    assert main(["score", half, *words, "--resume", str(tmp_path / "stage"), "-o", str(tmp_path / "s.json")]) == 0
    assert f"in {processor} on cpu" in capsys.readouterr().err
    found = [json.loads(f.read_text()) for f in (tmp_path / "stage").rglob("*.json")]
    assert any(processor in json.dumps(record) for record in found), "the identity of a stage names the precision"
    assert main(["plan", "sparsity", str(tmp_path / "s.json"), "--sparsity", "0.7", "--max-sparsity", "0.7", "-o",
                 str(tmp_path / "p.json")]) == 0  # fmt: skip
    assert main(["apply", half, str(tmp_path / "p.json"), *words, "-o", str(tmp_path / "out")]) == 0
    assert load_model(str(tmp_path / "out"), dtype="auto").dtype == torch.bfloat16
    assert main(["evaluate", str(tmp_path / "out"), "--length", "16", "--windows", "3"]) == 0
    assert f"in {processor} on cpu" in capsys.readouterr().err


LLAVA = {
    "text_config": {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    "image_token_index": 5,
}  # fmt: skip


@pytest.fixture
def seeing(tmp_path, tokenizer):
    """A model that reads text and images, and some text."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlavaConfig(**LLAVA)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a few words of text " * 60)
    return tmp_path


def test_the_language_model_of_a_model_that_sees_images_is_scored_and_pruned_and_the_share_is_said(seeing, capsys):
    text = ["--data", str(seeing / "text.txt"), "--samples", "4", "--length", "16", "--quiet"]
    model, scores, plan = (str(seeing / name) for name in ("model", "scores.json", "plan.json"))
    assert main(["score", model, *text, "-o", scores]) == 0
    said = capsys.readouterr().out
    assert "The blocks hold 54.2%" in said and "vision_tower" in said
    assert [b["name"] for b in json.loads((seeing / "scores.json").read_text())["blocks"]] == [
        f"model.language_model.layers.{i}" for i in range(2)
    ]
    assert main(["plan", "sparsity", scores, "--sparsity", "0.5", "-o", plan]) == 0
    capsys.readouterr()
    assert main(["apply", model, plan, *text, "-o", str(seeing / "pruned")]) == 0
    assert "The blocks hold 54.2%" in capsys.readouterr().out
    before, after = (load_model(str(seeing / name)).state_dict() for name in ("model", "pruned"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("language_model.layers" in name for name in changed)
    assert main(["plan", "sparsity", model, *text, "--passes", "6", "-o", str(seeing / "measured.json")]) == 0
    assert "The blocks hold 54.2%" in capsys.readouterr().out


def test_the_share_is_not_said_where_it_is_all(folder, capsys):
    text = ["--data", str(folder / "text.txt"), "--samples", "4", "--length", "16", "--quiet"]
    assert main(["score", str(folder / "model"), *text, "-o", str(folder / "scores.json")]) == 0
    assert "The blocks hold" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "Generation is an encoder-decoder"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "ViTForImageClassification reads no text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["doctor", "plan sparsity", "evaluate"])
def test_what_no_verb_can_use_is_refused_before_its_weights_are_read(config, said, verb, tmp_path, tokenizer, capsys):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "text.txt").write_text("a few words of text " * 60)
    text = ["--perplexity" if verb == "evaluate" else "--data", str(tmp_path / "text.txt"), "--length", "16"]
    more = [] if verb == "evaluate" else ["--samples", "2"]
    assert main([*verb.split(), str(tmp_path), *text, *more, "--quiet"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_classifier_with_another_number_of_labels_gets_a_fresh_head(tmp_path):
    zoo.classifier(num_labels=2).save_pretrained(tmp_path)
    assert classifier_loader(str(tmp_path), 5)(0).classifier.weight.shape[0] == 5
    assert classifier_loader(str(tmp_path), 2)(0).classifier.weight.shape[0] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_mixture_computes_in_float64_and_one_window_has_no_error(stream, tmp_path):
    """torch's grouped product of matrices does not know this precision."""
    saved = zoo.build("mixtral")
    saved.save_pretrained(tmp_path)
    exact = perplexity(load_model(str(tmp_path), dtype="float64", stream=stream), zoo.tokens(1, 12))
    assert exact.value == pytest.approx(perplexity(saved, zoo.tokens(1, 12)).value, rel=1e-5)
    assert exact.standard_error == 0.0


def test_perplexity_of_a_model_that_predicts_no_next_token_is_refused(bert, data):
    with pytest.raises(BadModel, match="predicts no next token"):
        perplexity(bert, data)


def test_the_matrix_that_the_scan_of_mamba_multiplies_by_itself_is_left_out_and_all_others_are_scored():
    import transformers

    from layerbudget import partition, score
    from layerbudget.models.blocks import left_out

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = transformers.MambaForCausalLM(config).eval()
    assert any("dt_proj" in name for name in left_out(model, partition(model)))
    assert len(score(model, zoo.tokens(3, 8), partition(model, "linear")).names) == 2 * 3  # in, x and out


def test_infinite_numbers_of_a_configuration_are_read(tmp_path):
    model = zoo.tiny("nemotron-h")
    model.config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert [b.name for b in blocks_from_config(tmp_path)] == [b.name for b in partition(model)]


def test_a_configuration_says_how_many_experts_each_layer_keeps(tmp_path):
    """All layers got as many as the one with most, and plans without weights were of another model."""
    model = zoo.tiny("qwen3-moe")
    cut_experts(model, {e.name: list(range(8 - i)) for i, e in enumerate(find_experts(model))})
    model.save_pretrained(tmp_path)
    for by in ("layer", "linear"):
        assert blocks_from_config(tmp_path, by=by) == partition(load_model(str(tmp_path)), by)
    assert shape_of_config(model.config, torch.float32) == shape_of(model)


@pytest.mark.parametrize("way", ["in memory", "streamed", "to be trained"])
def test_what_is_wrong_with_a_checkpoint_is_named(saved_model, way):
    """The tensor of another shape, the file that was cut short, and the configuration, also by what reads the tokenizer."""
    folder = saved_model("llama")
    file, config = folder / "model.safetensors", folder / "config.json"
    load = (lambda: classifier_loader(str(folder), 0)(0)) if way == "to be trained" else None
    load = load or (lambda: load_model(str(folder), stream=way == "streamed"))
    whole, right, name = file.read_bytes(), config.read_text(), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][:-8].contiguous()}, file, metadata={"format": "pt"})
    rows, columns = tensors[name].shape
    said = rf"^{name} in {file} has the shape \({rows - 8}, {columns}\), and by config.json it has \({rows}, {columns}\)\."
    with pytest.raises(BadModel, match=said):
        load()
    file.write_bytes(whole[:-1000])
    with pytest.raises(CorruptFile, match=rf"^{file} does not read as safetensors: .*\. Download or save it again\."):
        load()
    config.write_text(json.dumps({**json.loads(right), "num_attention_heads": 5}))
    for read in (load, lambda: load_tokenizer(str(folder))):
        with pytest.raises(BadModel, match=rf"^config.json of {folder} does not read: .*attention heads \(5\)"):
            read()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_folder_without_a_tokenizer_is_refused(kind, tmp_path):
    """Qwen's class loads from nothing, and knows no word: a text then had no tokens."""
    zoo.build(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(BadModel, match=r"model has no tokenizer: no file has its words\. Copy the files"):
        load_tokenizer(str(tmp_path / "model"))


def test_a_tokenizer_that_does_not_load_is_refused_with_whole_words_of_the_loader(tmp_path):
    """The loader's first line ends with a colon; what follows it is part of the reason."""
    zoo.build("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadModel) as error:
        load_tokenizer(str(tmp_path / "model"))
    assert "Save the tokenizer beside the model." in str(error.value) and "from one of:  " not in str(error.value)
    assert error.value.what.endswith((".", "...", "'"))
