"""Written files, read by the runtimes: the same numbers, types and bytes, streamed or in memory, at once or in two runs."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from transformers import AutoModelForCausalLM

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.compressors import formats as F
from layerbudget.compressors.formats import FLOATING, find_format, find_runtime
from layerbudget.decisions.bits import apply as A
from layerbudget.decisions.bits import packed
from layerbudget.decisions.bits.apply import apply_bits, write_bits
from layerbudget.decisions.bits.blocks import blocks_of
from layerbudget.decisions.bits.counted import header_bytes
from layerbudget.decisions.bits.export import auto_round, llama_cpp, mlx
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.receipt import QuantisationReceipt
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import AlreadyExists, CoverageError, InvalidInput, MissingDependency, ModelMismatch
from layerbudget.exports import EXPORTS
from layerbudget.finetuning.adapters import classifier_loader
from layerbudget.llama_cpp import writer
from layerbudget.llama_cpp.writer import GgufWriter, Stored
from layerbudget.models.offload import mapped
from layerbudget.models.precision import describe_place

gguf = pytest.importorskip("gguf")
pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}


def wide(name):
    """Rows that blocks divide; Qwen3 with the head size that transformers assumes of a GGUF file."""
    return zoo.build(name, **WIDE, **({"head_dim": 128} if name == "qwen3" else {}))


def data():
    return zoo.tokens(3, 12, vocabulary=96)


#: Descent takes long for each, so it has few formats.
SLOWLY = {"gguf": ["Q4_0", "Q5_1", "Q8_0"], "compressed-tensors": ["w3-g32", "w4-g32", "w8-g32"]}


def planned(model, family, bits, method="rtn", **options):
    if method == "descent":
        options = {"formats": SLOWLY.get(family), **options}
    own = {"rows": 4, **({} if family == "gguf" or "formats" in options else {"group": 32})}  # what is written counts here
    return plan_bits(
        rounding_damage(model, data(), family=family or "compressed-tensors", draws=1, method=method, **own, **options),
        bits=bits,
    )


def written(out, name, family, bits, method="rtn", **options):
    """A model that was rounded as it was written, its plan, and the receipt."""
    model = wide(name)
    plan = planned(model, family, bits, method, **options)
    return model, plan, write_bits(model, plan, out, data())


def logits(model):
    with torch.no_grad():
        return model(zoo.tokens(2, 14, vocabulary=96).input_ids).logits


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "weighted"), ("llama-tied", "gptq"), ("mistral", "rtn"), ("qwen2", "gptq"), ("qwen3", "descent")],
)
def test_a_gguf_file_is_the_rounded_model(tmp_path, name, method):
    model, plan, receipt = written(tmp_path / "out", name, "gguf", 6.0, method)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    assert torch.allclose(logits(back), logits(model), atol=2e-4, rtol=1e-4)
    assert receipt.bytes == receipt.planned == plan.budget["spent"] and receipt.tensors == plan.budget["tensors"]
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    names = {"self_attn.q_proj": "attn_q", "mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output"}
    for i in range(3):
        for long, short in names.items():
            assert types[f"blk.{i}.{short}.weight"] == plan.payload.formats[f"model.layers.{i}.{long}"]
    assert types["token_embd.weight"] == plan.payload.formats["model.embed_tokens"]
    assert len(set(types.values()) - {"F32"}) > 1
    assert ("output.weight" in types) == (name != "llama-tied")
    lines = (tmp_path / "out" / "tensor-types.txt").read_text().splitlines()
    for pattern, kind in (line.split("=") for line in lines):
        assert [types[n] for n in types if re.search(pattern, n)] == [kind.upper()]
    assert EXPORTS.find("tensor-types").text(plan, {}).splitlines() == lines
    assert QuantisationReceipt.load(tmp_path / "out" / "receipt.json").bytes == receipt.bytes


@pytest.mark.parametrize(
    ("name", "runtime", "method"),
    [
        ("llama", "transformers", "gptq"),
        ("mistral", "transformers", "descent"),
        ("qwen2", "vllm", "rtn"),
        ("llama-tied", "transformers", "weighted"),
    ],
)
def test_a_compressed_tensors_folder_is_the_rounded_model(tmp_path, name, runtime, method, caplog):
    bits = 6.0 if runtime == "vllm" else 4.2
    model, plan, receipt = written(tmp_path / "out", name, "compressed-tensors", bits, method, runtime=runtime)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    read = lb.load_model(str(tmp_path / "out"), dtype="float32")
    assert "rounded before (compressed-tensors): damage is measured beside the rounded model" in caplog.text
    assert describe_place(read).startswith(f"{model.num_parameters() / 1e6:,.1f} M parameters in float32 on cpu")
    assert torch.equal(logits(read), logits(back))  # every matrix is a plain one, and no forward rounds again
    assert lb.partition(read) == lb.partition(model) and not hasattr(read.config, "quantization_config")
    halved = zoo.build(name, **WIDE)  # what is not planned is written in sixteen bits
    halved.load_state_dict({n: t.bfloat16().float() for n, t in halved.state_dict().items()})
    for module in plan.payload.formats:
        halved.get_submodule(module).weight.data.copy_(model.get_submodule(module).weight)
    assert torch.allclose(logits(back), logits(halved), atol=1e-5)
    assert receipt.bytes == receipt.planned and receipt.tensors == plan.budget["tensors"]
    assert len(set(plan.payload.formats.values())) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    bits = {g["weights"]["num_bits"] for g in config["config_groups"].values()}
    assert config["format"] == "pack-quantized" and len(bits) > 1
    assert any("vllm 0.25 or later" in note for note in receipt.notes) == (runtime == "vllm" and not bits <= {4, 8})


def test_loading_draws_no_bar_and_reports_nothing_and_restores_both(tmp_path, capfd):
    """A packed folder drew four bars of compressed-tensors, one of transformers and its report of the loading."""
    from tqdm import tqdm
    from transformers.utils import logging

    written(tmp_path / "out", "llama", "compressed-tensors", 4.2)
    logging.enable_progress_bar()
    drawn, level = vars(tqdm)["__init__"], logging.get_verbosity()
    capfd.readouterr()
    lb.load_model(str(tmp_path / "out"), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert vars(tqdm)["__init__"] is drawn and logging.get_verbosity() == level and logging.is_progress_bar_enabled()
    list(tqdm(range(2)))
    assert "100%" in capfd.readouterr().err


@pytest.mark.parametrize("method", ["rtn", "gptq", "descent"])
@pytest.mark.parametrize("eight", [f.name for f in FLOATING if f.bits == 8])
@pytest.mark.parametrize("four", [f.name for f in FLOATING if f.bits == 4])
def test_floating_point_and_integers_in_one_folder(tmp_path, four, eight, method):
    """transformers reads the planned weights to the bit; what vLLM fuses shares a format and a global scale."""
    formats = [four, eight, "w4-g32"]
    model, plan, receipt = written(tmp_path / "out", "qwen2", "", 6.6, method, runtime="vllm", formats=formats)
    assert receipt.bytes == receipt.planned and receipt.tensors == plan.budget["tensors"] and not receipt.notes
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    packings = {name: find_format(name).packing for name in formats}
    used = set(plan.payload.formats.values()) - {"bf16"}
    assert config["format"] == "mixed-precision" and {four, eight} <= used
    assert {g["format"] for g in config["config_groups"].values()} == {packings[f] for f in used}
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()  # transformers makes numbers at the first forward
    read, ids = lb.load_model(str(tmp_path / "out"), dtype="float32"), zoo.tokens(2, 14, vocabulary=96).input_ids
    with torch.no_grad():
        back(ids)
    for name, form in plan.payload.formats.items():
        weight = model.get_submodule(name).weight
        assert torch.equal(read.get_submodule(name).weight, weight), name
        assert form == "w4-g32" or torch.equal(back.get_submodule(name).weight.float(), weight), name
    stored = {n: t for f in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    scales: dict = {}
    for name, value in stored.items():
        if name.endswith("global_scale"):
            scales.setdefault(find_runtime("vllm").together(name.removesuffix(".weight_global_scale")), set()).add(value.item())
    assert bool(scales) == find_format(four).united and all(len(s) == 1 for s in scales.values())
    with pytest.raises(InvalidInput, match=f"gets {eight}|gets {four}"):
        auto_round(plan)
    assert not (tmp_path / "out" / "autoround-layer_config.json").exists()


def test_a_format_is_one_row(tmp_path, monkeypatch):
    """A row that the table does not have is planned, rounded by error feedback, written, counted, and read by transformers."""
    floats = F.Floats(packing="float-quantized", mantissa=3, least=-6, top=448, scale="bfloat16", kernel="none")
    row = F.Format(name="fp8-g32", family=F.PACKED, bits=8, group=32, floats=floats)
    monkeypatch.setattr(F, "FLOATING", (*FLOATING, row))
    find_format.cache_clear()
    try:
        formats = {"formats": ["w4-g32", "fp8-g32"]}
        model, plan, receipt = written(tmp_path / "out", "qwen2", "", 6.0, "gptq", runtime="vllm", **formats)
        assert set(plan.payload.formats.values()) == {"w4-g32", "fp8-g32"} and receipt.bytes == receipt.planned
        assert not any("Report this" in note for note in receipt.notes)
        back = lb.load_model(str(tmp_path / "out"), dtype="float32")
        for name, form in plan.payload.formats.items():
            assert torch.equal(back.get_submodule(name).weight, model.get_submodule(name).weight), (name, form)
        assert "fp8-g32" in F.spoken_formats()
    finally:
        find_format.cache_clear()


def test_mlx_gets_bits_and_groups_by_module():
    plan = planned(wide("llama"), "", 5.0, formats=["w2-g64", "w4-g32", "w6-g64"])
    held = json.loads(mlx(plan))["quantization"]
    kinds = {"w2-g64": (64, 2), "w4-g32": (32, 4), "w6-g64": (64, 6)}
    for name, form in plan.payload.formats.items():
        assert held.pop(name) == (False if form == "bf16" else dict(zip(("group_size", "bits"), kinds[form], strict=True)))
    assert held == {"group_size": 32, "bits": 2} and EXPORTS.find("mlx").text(plan, {}) == mlx(plan)
    with pytest.raises(InvalidInput, match="MLX has no (fp8|nvfp4)"):
        mlx(planned(wide("llama"), "", 6.0, formats=["nvfp4", "fp8"]))


def test_zero_points_are_written_as_the_package_reads_them(tmp_path):
    formats = {"formats": ["w3-g32-asym", "w4-g32-asym"]}
    *_, receipt = written(tmp_path / "out", "llama", "compressed-tensors", 4.2, **formats)  # packing reads everything back
    assert receipt.bytes == receipt.planned and any("zero points" in n for n in receipt.notes)


def test_models_in_half_precision(tmp_path):
    """Packed all the same: the integers are found again. GGUF finds its grid in the weights, and asks for all their digits."""
    whole = zoo.build("llama", **WIDE)
    whole.load_state_dict({n: t.bfloat16().float() for n, t in whole.state_dict().items()})
    half = copy.deepcopy(whole).bfloat16()
    with pytest.raises(InvalidInput, match="held in bfloat16"):
        write_bits(half, planned(whole, "gguf", 6.0), tmp_path / "gguf")
    plan = planned(whole, "compressed-tensors", 5.0)
    for name, model in (("half", half), ("whole", whole)):
        write_bits(model, plan, tmp_path / name)
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("half", "whole")]
    assert files[0] == files[1]


@pytest.mark.parametrize("method", ["rtn", pytest.param("descent", marks=pytest.mark.slow)])
def test_llama_cpp_computes_the_same(tmp_path, method):
    """The embedded model in mixed types, in llama.cpp itself: next-token probabilities of the rounded model."""
    llama = pytest.importorskip("xllamacpp")
    model, tokenizer = lb.load_model("demo"), lb.load_tokenizer("demo")
    text = lb.calibration("stdlib", tokenizer, samples=2, length=64)
    plan = plan_bits(model, text, bits=5.5, family="gguf", draws=1)
    write_bits(model, plan, tmp_path / "out", text, tokenizer=tokenizer, method=method)
    options = llama.CommonParams()
    options.model.path, options.n_ctx = str(tmp_path / "out/model.gguf"), 256
    options.cpuparams.n_threads, options.warmup = 1, False
    server = llama.Server(options)
    text = 'def read(path):\n    """Return the text of a file."""\n    with open('
    answer = server.handle_completions({"prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 20})
    held = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    with torch.no_grad():
        mine = torch.log_softmax(model(**tokenizer(text, return_tensors="pt")).logits[0, -1], -1)
    theirs = np.array([entry["logprob"] for entry in held[:20]])
    ours = np.array([float(mine[entry["id"]]) for entry in held[:20]])
    # llama.cpp rounds activations to 8 bits for quantised products
    assert held[0]["id"] == int(mine.argmax()) and np.abs(theirs - ours).max() < 0.3
    assert np.abs(np.exp(theirs) - np.exp(ours)).max() < 0.02


@pytest.mark.parametrize(
    ("formats", "bits"),
    [
        (("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 4.6),
        pytest.param(("IQ2_XS", "IQ3_S", "IQ4_XS", "MXFP4"), 3.6, marks=pytest.mark.slow),
    ],
)
def test_the_types_that_people_download(tmp_path, formats, bits):
    """Rows that 256 divides: K, IQ and FP4 types, codes by error feedback; transformers reads the rounded model."""
    size = {**WIDE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model, dense, text = zoo.build("llama", **size), zoo.build("llama", **size), zoo.tokens(24, 24, vocabulary=96)
    own = {"family": "gguf", "draws": 1, "method": "gptq", "formats": formats}
    plan = plan_bits(rounding_damage(model, text, **own), bits=bits)
    used = set(plan.payload.formats.values())
    assert len(used) > 1 and used <= {*formats, "F16"}
    receipt = write_bits(model, plan, tmp_path / "out", text)
    assert receipt.bytes == receipt.planned == plan.budget["spent"]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    assert torch.allclose(logits(back), logits(model), atol=2e-4, rtol=1e-4)
    nearest = zoo.build("llama", **size)
    apply_bits(nearest, plan, text, method="weighted")
    far, near = (float((logits(m) - logits(dense)).square().sum()) for m in (nearest, model))
    assert near < 0.9 * far
    with pytest.raises(InvalidInput, match="IQ2_XS needs to know the inputs"):
        rounding_damage(dense, text, family="gguf", formats=["IQ2_XS"])


@pytest.mark.parametrize(
    ("formats", "bits"),
    [
        (["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"], 4.6),
        pytest.param(["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"], 2.9, marks=pytest.mark.slow),
    ],
)
def test_super_blocks_whose_scales_were_improved_are_read_by_transformers(tmp_path, formats, bits):
    """Codes and scales of K types and lattices by descent, from a plan that was measured by importances."""
    size = {**WIDE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model, text = zoo.build("llama", **size), zoo.tokens(24, 24, vocabulary=96)
    plan = plan_bits(rounding_damage(model, text, family="gguf", draws=1, method="weighted", formats=formats), bits=bits)
    assert len(set(plan.payload.formats.values())) > 2
    write_bits(model, plan, tmp_path / "out", text, method="descent")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    assert torch.allclose(logits(back), logits(model), atol=2e-4, rtol=1e-4)


def test_recipes_for_other_tools():
    model = wide("llama")
    plan = planned(model, "compressed-tensors", 4.2)
    formats, made = plan.payload.formats, json.loads(auto_round(plan))
    assert {n: f"w{w['bits']}-g{w['group_size']}" for n, w in made.items()} == dict(formats)
    with pytest.raises(InvalidInput, match="holds no gguf formats"):
        llama_cpp(plan)
    experts = planned(zoo.build("mixtral", **WIDE), "compressed-tensors", 4.2, unwritten="plan")
    stack, matrix = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.3.down_proj"
    (pattern,) = [key for key in json.loads(auto_round(experts)) if re.search(key, matrix)]
    assert stack in experts.payload.formats and not re.search(pattern, matrix.replace("layers.0", "layers.10"))


def test_nothing_half_written(tmp_path, monkeypatch):
    out, plan = tmp_path / "out", planned(wide("llama"), "gguf", 6.0)
    with monkeypatch.context() as patch, pytest.raises(CoverageError, match="takes 1 bytes in the file"):
        patch.setattr(A, "recount_gguf", lambda file: {t.name: 1 for t in gguf.GGUFReader(file).tensors})
        write_bits(wide("llama"), plan, out)
    with monkeypatch.context() as patch, pytest.raises(CoverageError, match="reads back as other weights"):
        patch.setattr(Stored, "take", lambda self, tensor: tensor + 0.01 if tensor.is_floating_point() else tensor)
        write_bits(wide("llama"), plan, out)

    def last_row(stored, tensor):
        """Only the last row is another one: it is read apart from the others."""
        return torch.cat((tensor[:-1], tensor[-1:] + 0.01)) if tensor.is_floating_point() and tensor.ndim > 1 else tensor

    with monkeypatch.context() as patch, pytest.raises(CoverageError, match="reads back as other weights"):
        patch.setattr(writer, "_READ", 1)
        patch.setattr(Stored, "take", last_row)
        write_bits(wide("llama"), plan, out)
    assert not list(tmp_path.iterdir())
    out.mkdir()
    (out / "mine.txt").write_text("x")
    with pytest.raises(AlreadyExists):
        write_bits(wide("llama"), plan, out)


def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    out = tmp_path / "out"
    gpt2, sliding, llama = wide("gpt2"), wide("mistral-sliding"), wide("llama")
    with pytest.raises(InvalidInput, match="gpt2 model is not written as GGUF"):
        GgufWriter(gpt2, None, {}, tmp_path)
    plan = planned(sliding, "gguf", 6.0, unwritten="plan")
    with pytest.raises(InvalidInput, match="with sliding_window = 8"):
        write_bits(sliding, plan, out)
    with pytest.raises(ModelMismatch):
        apply_bits(zoo.build("llama", seed=3, **WIDE), plan)
    with pytest.raises(InvalidInput, match="gptq needs calibration data"):
        apply_bits(sliding, plan, method="gptq")
    with pytest.raises(InvalidInput, match="gives no formats"):
        apply_bits(sliding, zoo.plan(sliding))
    plan = planned(llama, "compressed-tensors", 5.0)
    name = next(n for n, f in plan.payload.formats.items() if f != "w8-g32")
    with pytest.raises(InvalidInput, match=f"{name} takes .* they contradict each other. Nothing was done"):
        write_bits(llama, plan.with_payload(formats={**plan.payload.formats, name: "w8-g32"}), out)
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", None)
    with pytest.raises(MissingDependency, match=r"pip install .\.\[bits\]"):
        write_bits(llama, plan, out)
    assert not list(tmp_path.iterdir())


CASES = [
    ("compressed-tensors", "rtn", 4.2),
    ("compressed-tensors", "gptq", 9.0),
    ("gguf", "weighted", 6.0),
    ("gguf", "descent", 6.0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bfloat16, so that float32 is another precision; its head is the embedding."""
    place = tmp_path_factory.mktemp("streamed") / "model"
    zoo.build("llama-tied", **WIDE).bfloat16().save_pretrained(place)
    return place


def digests(place):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(place.iterdir())}


@pytest.mark.parametrize(("family", "method", "bits"), CASES)
def test_streamed_interrupted_and_in_memory_write_the_same_bytes(folder, tmp_path, monkeypatch, family, method, bits):
    monkeypatch.setattr(packed, "SHARD", 20_000)
    whole = lb.load_model(str(folder), dtype="float32")
    plan = planned(whole, family, bits, method)
    text = None if method == "rtn" else data()
    receipt = write_bits(whole, plan, tmp_path / "memory", text, check=False)  # its receipt would say more
    assert receipt.bytes == receipt.planned
    if family != "gguf":
        assert len(list((tmp_path / "memory").glob("*.safetensors"))) > 2
        blocks = blocks_of(whole, find_runtime("transformers"))
        formats = {b.name: {plan.payload.formats[m.name] for m in b.modules} for b in blocks}
        assert 0 < receipt.file - receipt.tensors <= header_bytes(whole, blocks, formats, "transformers")

    streamed = lb.load_model(str(folder), dtype="float32", stream=True)
    assert mapped(streamed).converts
    before = {n: t.clone() for n, t in streamed.model.layers.state_dict().items()}
    write_bits(streamed, plan, tmp_path / "streamed", text, check=False)
    assert digests(tmp_path / "streamed") == digests(tmp_path / "memory")
    mapped(streamed).leave()
    assert all(torch.equal(t, before[n]) for n, t in streamed.model.layers.state_dict().items())

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == total - 1:
            raise Stop

    again = {"resume": tmp_path / "kept", "check": False}
    streamed = lb.load_model(str(folder), dtype="float32", stream=True)
    with pytest.raises(Stop):
        write_bits(streamed, plan, tmp_path / "two", text, progress=stop, **again)
    assert not (tmp_path / "two").exists() and len(list((tmp_path / "kept").glob("*.safetensors"))) == 3
    write_bits(lb.load_model(str(folder), dtype="float32", stream=True), plan, tmp_path / "two", text, **again)
    assert digests(tmp_path / "two") == digests(tmp_path / "memory")
    if family == "compressed-tensors":
        assert len(list((tmp_path / "two").glob("model-*-of-*.safetensors"))) > 1
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32).eval()
        ids = zoo.tokens(2, 14, vocabulary=96).input_ids
        halved = {n: t.bfloat16().float() for n, t in whole.state_dict().items()}
        kept = {f"{n}.weight": t for n, t in ((m, whole.state_dict()[f"{m}.weight"]) for m in plan.payload.formats)}
        whole.load_state_dict({**halved, **kept})
        with torch.no_grad():
            assert torch.allclose(back(ids).logits, whole(ids).logits, atol=1e-5)


def test_a_run_continues_only_as_itself(folder, tmp_path):
    model = lb.load_model(str(folder), dtype="float32")
    plan, other = (planned(model, "compressed-tensors", bits) for bits in (4.2, 5.2))
    write_bits(model, plan, tmp_path / "out", resume=tmp_path / "kept")
    kept = sorted((tmp_path / "kept").glob("layer-*.safetensors"))
    assert json.loads((tmp_path / "kept" / "resume.json").read_text())["request"]["plan"] == plan.digest
    with pytest.raises(ModelMismatch):
        write_bits(lb.load_model(str(folder), dtype="float32"), other, tmp_path / "no", resume=tmp_path / "kept")
    assert not (tmp_path / "no").exists()
    kept[0].write_bytes(kept[0].read_bytes()[:-1] + b"?")  # a flipped bit: made again
    again = lb.load_model(str(folder), dtype="float32")
    write_bits(again, plan, tmp_path / "again", resume=tmp_path / "kept")
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


def test_a_packed_folder_serves_every_verb_and_refuses_by_name_what_it_cannot(tmp_path, tokenizer, capsys):
    """Its matrices are numbers as soon as it is loaded, whoever runs the first forward."""
    out, small = tmp_path / "out", ("--samples", "2", "--length", "12", "--quiet")
    model = wide("llama")
    write_bits(model, planned(model, "compressed-tensors", 4.2), out, tokenizer=tokenizer)
    assert main(["score", str(out), *small, "-o", str(tmp_path / "s.json")]) == 0
    zoo.plan(lb.load_model(str(out))).save(tmp_path / "p.json")
    assert main(["apply", str(out), str(tmp_path / "p.json"), *small, "-o", str(tmp_path / "pruned")]) == 0
    capsys.readouterr()
    for option in ("--stream", "--four-bit"):
        assert main(["evaluate", str(out), option, "--quiet"]) == 2
        assert f"Leave {option} out." in " ".join(capsys.readouterr().err.split())
    with pytest.raises(InvalidInput, match="Leave --four-bit out"):
        classifier_loader(str(out), 2, four_bit=True)
