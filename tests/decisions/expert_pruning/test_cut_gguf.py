"""Experts cut out of a GGUF file at the bytes: the file of the model that was cut before it was rounded, in llama.cpp too."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
from tests import vocabularies, zoo
from tests.llama_cpp.test_writer import build, planned

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.compressors.ggml import library_file
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.expert_pruning.cut_gguf import cut_gguf
from layerbudget.decisions.expert_pruning.payload import ExpertPruningPayload
from layerbudget.errors import AlreadyExists, InvalidInput, ModelMismatch
from layerbudget.llama_cpp.runtime import ask
from layerbudget.models.blocks import describe
from layerbudget.models.experts import cut_experts, find_experts
from layerbudget.plan import PlanBlock

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
TYPES = ["Q4_K", "Q6_K", "Q3_K", "Q8_0", "IQ4_XS", "Q5_1", "Q2_K", "F16"]
MIXTURES = ("mixtral", "granitemoe", "qwen2_moe", "qwen3_moe", "olmoe")
IDS = tuple(3 + (7 * i) % 80 for i in range(24))


def keeping(model, kept):
    """A plan that keeps these experts, by layer; nothing was measured."""
    nothing = {"forecast": [], "forward_passes": 0.0, "beside": None, "curve": [], "crossed": False, "measured_here": 0.0}
    nothing |= dict.fromkeys(("predicted", "predicted_error", "measured", "measured_error"), 0.0)
    layers = find_experts(model)
    chosen = {layer.name: experts for layer, experts in zip(layers, kept, strict=True)}
    blocks = tuple(
        PlanBlock(
            name=layer.name,
            value=len(chosen[layer.name]) / layer.count,
            count=len(chosen[layer.name]),
            numel=layer.count * layer.numel,
            modules=layer.modules,
        )
        for layer in layers
    )
    spent = sum(b.count for b in blocks)
    return lb.Plan(
        kind="expert-pruning",
        rule="directional",
        model=describe(model),
        blocks=blocks,
        budget={"unit": "experts", "limit": spent, "spent": spent},
        payload=ExpertPruningPayload(kept=chosen, **nothing),
    )


def written(model, place, types=TYPES):
    """The file of a model whose matrices take these types in turn."""
    write_bits(model, planned(model, types), place, tokenizer=vocabularies.letters())
    return place / "model.gguf"


def content(file):
    return {t.name: (t.tensor_type.name, [int(n) for n in t.shape], t.data.tobytes()) for t in gguf.GGUFReader(file).tensors}


def logits(file):
    return np.frombuffer(ask(library_file(), file, ids=IDS)[1], np.float32)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture, and its file in several types."""
    model = build("qwen3_moe", **WIDE)
    return model, written(copy.deepcopy(model), tmp_path_factory.mktemp("mixture") / "out")


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_file_that_is_cut_is_the_file_of_the_model_that_was_cut_before_it_was_rounded(tmp_path, kind):
    model, kept = build(kind, **WIDE), [[0, 2], [1, 3]]
    whole, plan, smaller = written(copy.deepcopy(model), tmp_path / "whole"), keeping(model, kept), copy.deepcopy(model)
    receipt = cut_gguf(whole, plan, tmp_path / "fewer.gguf")
    cut_experts(smaller, plan.payload.kept)
    before = written(smaller, tmp_path / "before")
    assert content(tmp_path / "fewer.gguf") == content(before)  # names, types, shapes and every byte
    assert len({kind for kind, *_ in content(before).values()}) > 3
    assert np.array_equal(logits(tmp_path / "fewer.gguf"), logits(before))
    assert not np.allclose(logits(before), logits(whole), atol=0.05)
    assert receipt.experts == {"before": 8, "after": 4} and receipt.bytes["after"] < receipt.bytes["before"]
    assert receipt.parameters["after"] == sum(p.numel() for p in smaller.parameters())


def test_metadata_stay_as_they_are_but_for_the_number_of_experts(tmp_path, mixture):
    model, file = mixture
    cut_gguf(file, keeping(model, [[1, 2, 3], [0, 1, 2]]), tmp_path / "fewer.gguf")
    before, after = ({k: f.contents() for k, f in gguf.GGUFReader(f).fields.items()} for f in (file, tmp_path / "fewer.gguf"))
    assert {k: (before[k], after[k]) for k in before if before[k] != after[k]} == {"qwen3moe.expert_count": (4, 3)}
    assert list(before) == list(after)


def test_the_file_of_all_experts_is_the_same_file(tmp_path, mixture):
    model, file = mixture
    cut_gguf(file, keeping(model, [[0, 1, 2, 3]] * 2), tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == file.read_bytes()


def test_apply_cuts_a_file_into_a_file_or_a_folder(tmp_path, monkeypatch, capsys, mixture):
    model, file = mixture
    monkeypatch.chdir(tmp_path)
    keeping(model, [[0, 1], [2, 3]]).save("plan.json")
    assert main(["apply", str(file), "plan.json", "-o", "fewer.gguf"]) == 0
    said = capsys.readouterr().out
    assert "4 of 8 experts stay" in said and "none was rounded again" in said and "loaded by llama.cpp" in said
    assert main(["apply", str(file), "plan.json", "-o", "folder", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == {"before": 8, "after": 4}
    assert (tmp_path / "folder" / "model.gguf").read_bytes() == (tmp_path / "fewer.gguf").read_bytes()
    assert {f.name for f in (tmp_path / "folder").iterdir()} >= {"model.gguf", "plan.json", "receipt.json", "README.md"}
    assert "llama-cli -m model.gguf" in (tmp_path / "folder" / "README.md").read_text()
    assert main(["apply", str(file), "plan.json", "-o", "other.gguf", "--dtype", "float32"]) == 2
    assert "nothing is computed" in capsys.readouterr().err and not (tmp_path / "other.gguf").exists()


def test_what_a_file_cannot_have_is_refused_by_name(tmp_path, mixture):
    model, file = mixture
    plan, out = keeping(model, [[0, 1], [2, 3]]), tmp_path / "no.gguf"
    with pytest.raises(InvalidInput, match="keep 2 to 3 experts.*one number for all.*--even"):
        cut_gguf(file, keeping(model, [[0, 1], [1, 2, 3]]), out)
    with pytest.raises(ModelMismatch, match="a token is given 2 experts, and the plan keeps 1"):
        cut_gguf(file, keeping(model, [[0], [1]]), out)
    with pytest.raises(InvalidInput, match="Layer 1 of .* has experts that this plan does not decide"):
        cut_gguf(file, dataclasses.replace(plan, blocks=plan.blocks[:1]), out)
    narrow = build("qwen3_moe", **{**WIDE, "moe_intermediate_size": 128})
    with pytest.raises(ModelMismatch, match="weights in the plan and"):
        cut_gguf(file, keeping(narrow, [[0, 1], [2, 3]]), out)
    more = build("qwen3_moe", **WIDE, num_experts=8, num_local_experts=8)
    with pytest.raises(ModelMismatch, match="has 8 experts in the plan and 4 in the file"):
        cut_gguf(file, keeping(more, [[0, 1], [6, 7]]), out)
    dense = written(build("qwen3"), tmp_path / "dense", ["F16"])
    with pytest.raises(ModelMismatch, match="it has no experts"):
        cut_gguf(dense, plan, out)
    with pytest.raises(InvalidInput, match="is read, and the output"):
        cut_gguf(file, plan, file, overwrite=True)
    single = tmp_path / "single.gguf"
    single.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_up.3.w_weight_"))
    with pytest.raises(InvalidInput, match=r"How blk\.1\.ffn_up\.3\.w_weight_ depends on single experts is not known"):
        cut_gguf(single, plan, out)
    assert not out.exists()
    out.write_bytes(b"")
    with pytest.raises(AlreadyExists):
        cut_gguf(file, plan, out)


def test_biases_and_corrections_of_a_file_that_others_wrote_go_with_their_experts(tmp_path):
    """GLM-4's router has corrections, which are no parameters in transformers; here they are numbered by expert."""
    model, rng = zoo.build("glm4-moe"), np.random.default_rng(0)
    layer = find_experts(model)[0]
    number, (width, inner) = int(layer.name.split(".")[2]), (model.config.hidden_size, model.config.moe_intermediate_size)
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "glm4moe")
    writer.add_block_count(model.config.num_hidden_layers)
    writer.add_expert_count(layer.count)
    stacks = {
        "ffn_gate_exps.weight": (inner, width),
        "ffn_up_exps.weight": (inner, width),
        "ffn_down_exps.weight": (width, inner),
    }
    tensors = {}
    for each in find_experts(model):
        at = f"blk.{each.name.split('.')[2]}"
        tensors |= {f"{at}.{n}": rng.normal(size=(each.count, *shape)).astype(np.float16) for n, shape in stacks.items()}
        tensors |= {f"{at}.ffn_gate_inp.weight": rng.normal(size=(each.count, width)).astype(np.float32)}
        tensors |= {f"{at}.exp_probs_b.bias": np.arange(each.count, dtype=np.float32)}
        tensors |= {f"{at}.ffn_up_shexp.weight": rng.normal(size=(each.count, width)).astype(np.float16)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half = list(range(1, layer.count, 2))
    receipt = cut_gguf(tmp_path / "whole.gguf", keeping(model, [half] * len(find_experts(model))), tmp_path / "fewer.gguf")
    after = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "fewer.gguf").tensors}
    for name, values in tensors.items():
        assert np.array_equal(after[name], values if "_shexp" in name else values[half]), name
    assert after[f"blk.{number}.exp_probs_b.bias"].tolist() == half
    assert receipt.layers == {each.name: len(half) for each in find_experts(model)}
