"""Folders for vLLM with packed experts: its names, one format for a layer's experts, and the rounded weights to the bit."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from transformers import AutoModelForCausalLM

import layerbudget as lb
from layerbudget.compressors.formats import FLOATING, find_format, find_runtime
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.blocks import blocks_of, unwritable
from layerbudget.decisions.bits.counted import header_bytes
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import BadModel, InvalidInput
from layerbudget.records import stacks

pytest.importorskip("compressed_tensors")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
NAMES = {
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3-moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "glm4-moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
FLOATS = [[f.name, "w4-g32" if f.bits == 8 else "w8-g32", "fp8"] for f in FLOATING if f.floats.experts]
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def made(name):
    return zoo.build(name, **WIDE, **({} if name == "mixtral" else {"moe_intermediate_size": 64}))


def data():
    return zoo.tokens(3, 12, vocabulary=96)


def planned(model, bits, formats, **options):
    scores = rounding_damage(model, data(), draws=1, formats=formats, runtime="vllm", **options)
    return plan_bits(scores, bits=bits)


def read(tensors, name, form):
    """A packed matrix by arithmetic: integers from the low end of words of 32 bits, fp8, or two codes of fp4 in a byte."""
    form = find_format(form)
    if form.plain:
        return tensors[f"{name}.weight"].float()
    packed = tensors[f"{name}.weight" if form.floating and form.bits == 8 else f"{name}.weight_packed"]
    scale = tensors[f"{name}.weight_scale"].float()
    if form.floating and form.floats.scale == "uint8":
        scale = 2.0 ** (scale - 127)  # e8m0: exponents of powers of two
    if form.floating and form.bits == 8:
        numbers = packed.float()
    elif form.floating:
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        numbers = FP4[codes & 7] * (1 - 2 * (codes >> 3)) / tensors.get(f"{name}.weight_global_scale", 1.0)
    else:
        bits = form.bits
        words = packed.long()[..., None] >> (bits * torch.arange(32 // bits))
        numbers = ((words & (2**bits - 1)) - 2 ** (bits - 1)).flatten(1).float()
        assert tensors[f"{name}.weight_shape"].tolist() == list(numbers.shape)
    return numbers * scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)


def check(out, model, formats, name):
    """Every expert of the folder is a matrix of the model, under the names of the first checkpoints; returns the tensors."""
    tensors = {n: t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    middle, gate, up, down = NAMES[name]
    parameters = dict(model.named_parameters())
    for stack in stacks(formats):
        layer = stack.split(".mlp.")[0]
        for e, whole in enumerate(parameters[stack].detach().float()):
            parts = {down: whole} if stack.endswith("down_proj") else dict(zip((gate, up), whole.chunk(2), strict=True))
            for leaf, wanted in parts.items():
                assert torch.equal(read(tensors, f"{layer}.{middle}.{e}.{leaf}", formats[stack]), wanted)
    return tensors


@pytest.mark.parametrize(
    ("name", "bits", "formats", "method"),
    [
        ("mixtral", 9.0, ["w4-g32"], "rtn"),
        *(("qwen3-moe", 6.5, formats, "gptq") for formats in FLOATS),
        ("glm4-moe", 9.0, ["w4-g32"], "weighted"),
    ],
)
def test_every_expert_has_its_own_packed_tensors(tmp_path, name, bits, formats, method):
    model = made(name)
    plan = planned(model, bits, formats, method=method)
    receipt = write_bits(model, plan, tmp_path / "out", data(), resume=tmp_path / "parts")
    held = dict(plan.payload.formats)
    tensors = check(tmp_path / "out", model, held, name)
    assert receipt.bytes == receipt.planned == plan.budget["spent"] and receipt.tensors == plan.budget["tensors"]
    blocks = blocks_of(model, find_runtime("vllm"))
    bound = header_bytes(model, blocks, {b.name: {held[m.name] for m in b.modules} for b in blocks}, "vllm")
    assert 0 < receipt.file - receipt.tensors <= bound
    by_layer = {
        n.split(".mlp.")[0]: {held[s] for s in stacks(held) if s.startswith(n.split(".mlp.")[0] + ".")} for n in stacks(held)
    }
    assert all(len(kinds) == 1 and "fp8" not in kinds for kinds in by_layer.values())
    kinds = set.union(*by_layer.values())
    assert len(kinds) > 1 or name == "glm4-moe"  # one format there, which transformers reads too

    record = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = {t: g for g in record["config_groups"].values() for t in g["targets"]}
    middle, *leaves = NAMES[name]
    for layer, (form,) in by_layer.items():  # vLLM asks for the names of a layer's first expert
        for leaf in leaves:
            own = [g for t, g in targets.items() if re.match(t.removeprefix("re:"), f"{layer}.{middle}.0.{leaf}")]
            left = [t for t in record["ignore"] if t.startswith("re:") and re.match(t[3:], f"{layer}.{middle}.0.{leaf}")]
            assert (len(own), len(left)) == ((0, 1) if form == "bf16" else (1, 0))
            assert form == "bf16" or own[0]["weights"]["num_bits"] == find_format(form).bits
    assert not [n for n in tensors if n in held or n.endswith("gate_up_proj")]
    assert any("transformers" in n and "vLLM" in n for n in receipt.notes) == (len(kinds) > 1)
    if len(kinds) > 1:
        with pytest.raises(BadModel, match="is a folder for vLLM alone. transformers .* misreads these.*vllm serve"):
            lb.load_model(tmp_path / "out")

    again = made(name)  # what was kept is written again, and put into the model as it was
    second = write_bits(again, plan, tmp_path / "again", data(), resume=tmp_path / "parts")
    assert second.bytes == receipt.bytes and check(tmp_path / "again", model, held, name).keys() == tensors.keys()
    if method != "rtn":
        assert all(torch.equal(p.bfloat16(), again.get_parameter(n).bfloat16()) for n, p in model.named_parameters())


def test_transformers_reads_experts_in_one_format(tmp_path):
    model = made("mixtral")
    plan = planned(model, 4.6, ["w4-g32"])
    receipt = write_bits(model, plan, tmp_path / "out", data())
    assert not receipt.notes
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name in stacks(plan.payload.formats):  # it multiplies in bfloat16
        assert torch.equal(back.get_parameter(name), model.get_parameter(name).bfloat16().float())


def test_experts_that_are_saved_whole_are_refused_and_the_remedy_for_transformers_is_vllm():
    model = zoo.build("granite-moe", **WIDE)
    names = [m.name for b in zoo.B.partition(model, "linear") for m in b.modules]
    found = unwritable(model, names, find_runtime("vllm"))
    assert list(found) == stacks(names) and "saved whole" in next(iter(found.values()))
    with pytest.raises(InvalidInput, match=r"llama.cpp \(--runtime llama.cpp\)"):
        plan_bits(model, data(), bits=6.0, runtime="vllm")
    with pytest.raises(InvalidInput, match=r"or plan for vLLM \(--runtime vllm\) or llama.cpp \(--runtime llama.cpp\)"):
        plan_bits(made("mixtral"), data(), bits=6.0)
