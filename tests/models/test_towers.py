"""Language models inside models that also see or hear: planned, written whole, and read again by transformers itself."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from layerbudget.cli import main
from layerbudget.llama_cpp.writer import GgufWriter
from layerbudget.models.blocks import partition
from layerbudget.models.loading import load_model

TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 2, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
SEES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}  # fmt: skip
PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32,
           "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
ROTATED = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
HEARS = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8,
         "max_source_positions": 8}  # fmt: skip
TOWERS = {
    "gemma3": ("Gemma3Config", {"text_config": {**TEXT, "sliding_window": 8}, "vision_config": SEES, "image_token_index": 5,
                                "mm_tokens_per_image": 4, "boi_token_index": 6, "eoi_token_index": 7}),
    "llava": ("LlavaConfig", {"text_config": {"model_type": "llama", **TEXT}, "image_token_index": 5,
                              "vision_config": {"model_type": "clip_vision_model", **SEES}}),
    "qwen3-vl": ("Qwen3VLConfig", {"text_config": {**TEXT, **ROTATED}, "vision_config": PATCHES, **IDS}),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", {"text_config": {**TEXT, **ROTATED, **EXPERTS}, "vision_config": PATCHES, **IDS}),
    "qwen2-audio": ("Qwen2AudioConfig", {"text_config": {"model_type": "qwen2", **TEXT}, "audio_token_index": 5,
                                         "audio_config": HEARS}),
}  # fmt: skip
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
IMAGE = {
    "input_ids": torch.tensor([[9, 5, 5, 5, 5, 12, 13]]),
    "pixel_values": torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28),
}


@pytest.fixture
def tower(tmp_path, tokenizer):
    """A function that saves a tiny model in bfloat16 with tokenizer, processors and a text, and returns the folder."""

    def save(name):
        config, fields = TOWERS[name]
        torch.manual_seed(0)
        several = transformers.AutoModelForMultimodalLM
        several.from_config(getattr(transformers, config)(**fields)).bfloat16().save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        for file in PROCESSORS:
            (tmp_path / "model" / file).write_text(json.dumps({"of": file}))
        (tmp_path / "text.txt").write_text("a few words of text " * 60)
        return tmp_path

    return save


def run(*words):
    assert main([str(w) for w in (*words, "--quiet")]) == 0


def text(place):
    return ["--data", place / "text.txt", "--samples", 4, "--length", 16]


def stored(folder):
    """Tensors by the names that they have in the model: files of Gemma 3 and LLaVA keep older ones."""
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in found.items()}


def check_rest(place, out, inside):
    """All that the plan does not name is as it was, bit for bit, and so are the processors."""
    before, after = stored(place / "model"), stored(place / out)
    rest = [name for name in before if not any(f"{m}." in f"{name}." for m in inside)]
    assert any(word in name for name in rest for word in ("vision", "visual", "audio"))
    for name in rest:
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]), name
    for file in PROCESSORS:
        assert (place / out / file).read_bytes() == (place / "model" / file).read_bytes()


def logits(model, **given):
    with torch.no_grad():
        return model.eval()(**(given or {"input_ids": torch.arange(9, 25)[None]})).logits


def reloaded(place, out, **options):
    """The folder, read by the class that its config names."""
    made = json.loads((place / "model" / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, made).from_pretrained(
        place / out, dtype="float32", output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", TOWERS)
def test_layers_of_the_language_model_are_pruned_and_all_else_is_saved_as_it_was(name, tower):
    place = tower(name)
    model = load_model(str(place / "model"))
    inside = {m.name for b in partition(model) for m in b.modules}
    assert inside and not any(word in m for m in inside for word in ("vision", "visual", "audio"))
    run("score", place / "model", *text(place), "-o", place / "s.json")
    run("plan", "sparsity", place / "s.json", "--sparsity", 0.5, "-o", place / "p.json")
    run("apply", place / "model", place / "p.json", *text(place), "-o", place / "out")
    check_rest(place, "out", inside)
    own = reloaded(place, "out")
    weights = dict(own.named_parameters())
    held = [weights[n] if n in weights else weights[f"{n}.weight"] for n in inside]
    assert sum(int((w == 0).sum()) for w in held) == sum(w.numel() for w in held) // 2
    assert torch.equal(logits(own), logits(load_model(str(place / "out"))))
    if name in ("gemma3", "llava"):
        assert not torch.equal(logits(own, **IMAGE), logits(model, **IMAGE)), "it sees, and answers otherwise"


@pytest.mark.parametrize("name", ["gemma3"])
def test_layers_of_the_language_model_are_packed_and_all_else_stays_in_16_bits(name, tower):
    place = tower(name)
    run("plan", "bits", place / "model", "--bits", 7, "--check", "0", *text(place), "-o", place / "b.json")
    run("apply", place / "model", place / "b.json", "-o", place / "out")
    planned = json.loads((place / "b.json").read_text())["blocks"]
    check_rest(place, "out", [m for b in planned for m in b["modules"]])
    there = load_model(str(place / "out"))
    assert torch.allclose(logits(there), logits(load_model(str(place / "model"))), atol=0.1)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_the_gguf_file_holds_the_language_model_as_that_of_the_language_model_alone_does(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    config, fields = TOWERS[name]
    text = {**fields["text_config"], "query_pre_attn_scalar": 8} if name == "gemma3" else fields["text_config"]
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(
        getattr(transformers, config)(**fields | {"text_config": text})
    )
    alone = transformers.AutoModelForCausalLM.from_config(whole.config.text_config)
    inner = {n.removeprefix("model.language_model."): p for n, p in whole.state_dict().items() if "language_model." in n}
    alone.model.load_state_dict(inner)
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    found = []
    for kind, model in (("whole", whole), ("alone", alone)):
        (tmp_path / kind).mkdir()
        writer = GgufWriter(model, None, {}, tmp_path / kind)
        for piece in writer.head.pieces:
            writer.add(writer.tensors(piece, {}))
        assert any("--mmproj" in note for note in writer.close()) == (kind == "whole")
        reader = gguf.GGUFReader(tmp_path / kind / "model.gguf")
        found.append({t.name: t.data.tobytes() for t in reader.tensors})
    assert found[0] == found[1] and len(found[0]) > 15


@pytest.mark.parametrize("even", [True, False])
def test_experts_of_the_language_model_go_and_transformers_reads_even_plans(even, tower):
    place = tower("qwen3-vl-moe")
    run(
        "plan",
        "expert-pruning",
        place / "model",
        "--keep",
        "6 experts",
        *["--even"][:even],
        *text(place),
        "-o",
        place / "k.json",
    )
    run("apply", place / "model", place / "k.json", "-o", place / "out")
    check_rest(place, "out", [f"model.language_model.layers.{i}.mlp" for i in range(2)])
    there = load_model(str(place / "out"))
    if even:
        assert json.loads((place / "out" / "config.json").read_text())["text_config"]["num_local_experts"] == 3
        assert torch.equal(logits(reloaded(place, "out")), logits(there))
    kept = json.loads((place / "k.json").read_text())["extra"]["kept"]
    model = load_model(str(place / "model"))
    for name, index in kept.items():
        block, cut = model.get_submodule(name), there.get_submodule(name)
        assert torch.equal(block.experts.gate_up_proj[index], cut.experts.gate_up_proj)
        assert torch.equal(block.gate.weight[index], cut.gate.weight)


@pytest.mark.parametrize("kind", ["bart", "t5", "whisper", "florence2", "t5gemma2"])
def test_what_reads_one_text_and_writes_another_is_refused_from_its_configuration(kind, tmp_path, tokenizer, capsys):
    own = {"bart": "Bart", "t5": "T5", "whisper": "Whisper", "florence2": "Florence2", "t5gemma2": "T5Gemma2"}[kind]
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [f"{own}ForConditionalGeneration"]}))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    for verb in (["score"], ["plan", "bits", "--bits", "4"], ["plan", "expert-pruning", "--keep", "0.5"]):
        assert main([*verb, str(tmp_path), "-o", str(tmp_path / "o.json"), "--quiet"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{own}ForConditionalGeneration is an encoder-decoder. Take a decoder or an encoder" in said
