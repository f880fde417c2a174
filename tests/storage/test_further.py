"""Layers that predict further tokens: in every folder that a verb writes they are kept bit for bit, or left out and named."""

import dataclasses
import json

import pytest
import torch
from benchmarks.peers import further
from tests import zoo

import layerbudget as lb
from layerbudget.decision import decision_of
from layerbudget.decisions.bits.requantise import requantise
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.shapes.nemotron import save_nemotron
from layerbudget.decisions.shapes.save import save_gguf
from layerbudget.gguf.names import find_names
from layerbudget.models.blocks import describe

LEFT_OUT = ("fewer experts", "smaller shapes")
FAST = [
    ("glm4_moe", "fewer experts"),
    ("mimo_v2_flash", "adapter merged"),
    ("deepseek_v3", "bits (vLLM)"),
    ("glm4_moe", "zeros"),
    ("qwen2", "smaller shapes"),
]
REST = [pytest.param(m, v, marks=pytest.mark.slow) for m in further.MODELS for v in further.VERBS if (m, v) not in FAST]


@pytest.mark.parametrize(("name", "verb"), [*FAST, *REST])
def test_they_are_kept_or_left_out_by_name(tmp_path, name, verb):
    row = further.measure(name, verb, tmp_path)
    if "refused" in row:
        assert verb in LEFT_OUT and any(word in row["refused"] for word in ("no plain MLP", "no routed experts"))
        return
    assert row["read"] and row["changed"] == 0 and row["before"] > 10
    before, after = row["counts"]
    if verb in LEFT_OUT:
        assert row["left out"] == row["before"] and set(after.values()) <= {0} and before.keys() == after.keys()
        assert any(f"its {row['before']} tensors do not fit" in line for line in row["said"])
    else:
        assert row["equal"] == row["before"] and before == after
        assert ("lb.write_model" in " ".join(row["said"])) == (verb == "adapter merged")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A folder of a dense model with a layer further on, and the names of its tensors."""
    folder = tmp_path_factory.mktemp("dense") / "source"
    return folder, further.write_source("qwen2", folder)


def test_plans_of_every_kind_name_them(dense):
    folder, names = dense
    model = lb.load_model(str(folder), quiet=True)
    size = sum(t.nbytes for n, t in torch_tensors(folder).items() if n in names)
    assert describe(model)["further"] == {"tensors": len(names), "bytes": size}
    told = f"Not planned: {len(names)} tensors of layers that predict further tokens (MTP), {size:,} bytes;"
    text = further.tokens()
    blocks = lb.partition(model, "linear", exclude="lm_head")
    kept = dataclasses.replace(lb.plan_sparsity(blocks, sparsity=0.5, rule="uniform"), model=describe(model))
    smaller = lb.plan_shapes(model, text, "10 %", kinds=("mlp",), passes=20, draws=1)
    for plan, end in ((kept, "copies them as they are"), (smaller, "leaves them out")):
        summary = decision_of(plan).describe(plan)
        assert any(told in line and end in line for line in summary.sentences), summary.sentences
        assert any(told in line for line in summary.advice)


def torch_tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_files_of_other_architectures_leave_them_out_and_say_so(dense, tmp_path, caplog):
    folder, names = dense
    for write in (save_nemotron, save_gguf):
        model = lb.load_model(str(folder), quiet=True)
        lb.remove_units(model, zoo.tokens(2, 8, vocabulary=96), {"model.layers.0": 0.5}, kind="mlp", multiple=32)
        write(model, None, tmp_path / write.__name__)
    config = json.loads((tmp_path / "save_nemotron" / "config.json").read_text())
    assert config[further.COUNT] == 0 and f"its {len(names)} tensors do not fit" in caplog.text
    assert not set(names) & set(torch_tensors(tmp_path / "save_nemotron"))
    notes = json.loads((tmp_path / "save_gguf" / "receipt.json").read_text())["notes"]
    assert any(note.startswith(f"{len(names)} tensors of the checkpoint") and "not in the file" in note for note in notes)
    assert torch.is_tensor(next(iter(torch_tensors(folder).values())))


def test_a_converted_gguf_file_keeps_them_as_they_are(tmp_path):
    """llama.cpp counts the layer further on among its blocks; its tensors have names that no plan has."""
    import gguf

    names = further.write_source("glm4_moe", tmp_path / "source")
    model = lb.load_model(str(tmp_path / "source"), quiet=True)
    damage = rounding_damage(model, further.tokens(), family="gguf", formats=["Q8_0", "Q4_0"], draws=1, unwritten="plan")
    plan = lb.plan_bits(damage, bits=7.0)
    assert any("MTP" in line or "does not load" in line for line in decision_of(plan).describe(plan).advice)
    file, count = tmp_path / "converted.gguf", further.SIZES["num_hidden_layers"]
    writer, weights = gguf.GGUFWriter(file, "glm4moe"), model.state_dict()
    writer.add_block_count(count + 1)
    writer.add_nextn_predict_layers(1)
    for matrix, places in find_names(plan.payload.formats).items():
        whole = weights.get(f"{matrix}.weight", weights.get(matrix))
        for place, part in zip(places, whole.chunk(len(places), -2), strict=True):
            writer.add_tensor(f"{place}.weight", part.contiguous().float().numpy())
    stored = torch_tensors(tmp_path / "source")
    further_on = {f"blk.{count}.{n.split(f'.{count}.')[1]}": stored[n].float().numpy() for n in names}
    for name, values in further_on.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    requantise(file, plan, tmp_path / "planned.gguf")
    after = {t.name: t for t in gguf.GGUFReader(tmp_path / "planned.gguf").tensors}
    assert {after[n].tensor_type.name for n in further_on} == {"F32"} and len(after) > len(further_on)
    assert all((after[n].data == values).all() for n, values in further_on.items())
    assert {"Q8_0", "Q4_0"} & {t.tensor_type.name for t in after.values()}
