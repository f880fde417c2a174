"""Importance matrices: what llama-quantize would make of ours, what is made of theirs, and files of other models."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from tests import zoo

import layerbudget as lb
from layerbudget.cli import main
from layerbudget.compressors import ggml
from layerbudget.decisions.bits.apply import apply_bits, write_bits
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.requantise import requantise
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.errors import InvalidInput, ModelMismatch
from layerbudget.execution.inputs import InputStatistics
from layerbudget.gguf.names import find_names
from layerbudget.llama_cpp.imatrix import IMATRIX_FILE, entries, importances, read_imatrix, write_imatrix
from layerbudget.models.blocks import end_modules, partition

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
WIDE = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
TEXT = zoo.tokens(3, 12, vocabulary=96)


def planned(model, **options):
    own = {"family": "gguf", "draws": 1, "formats": ["Q4_0", "Q4_1", "Q5_1"], **options}
    return plan_bits(rounding_damage(model, TEXT, **own), bits=4.7)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, its plan, and the folder that method weighted wrote."""
    place = tmp_path_factory.mktemp("imatrix")
    model = zoo.build("llama-tied", **WIDE)
    model.save_pretrained(place / "model")
    plan = planned(model)
    plan.save(place / "plan.json")
    receipt = write_bits(model, plan, place / "out", TEXT, method="weighted")
    assert not any("model.embed_tokens" in n for n in receipt.notes)  # it is the head, which reads the last hidden states
    return place, plan


def test_ours_holds_what_the_rounded_layers_below_give(made):
    place, plan = made
    model, seen = zoo.build("llama-tied", **WIDE), {}
    apply_bits(model, plan, TEXT, method="weighted")
    down = model.get_submodule("model.layers.1.mlp.down_proj")
    model.get_submodule("model.layers.1.self_attn").v_proj.register_forward_pre_hook(lambda m, x: seen.update(v=x[0]))
    with torch.no_grad():
        model(TEXT.input_ids)
    held = read_imatrix(place / "out" / IMATRIX_FILE)
    assert len(held) == 3 * 7 + 1 and all(c.tolist() == [36] for _, c in held.values())
    sums, _ = held["blk.1.attn_v.weight"]
    np.testing.assert_allclose(sums[0], seen["v"].square().sum((0, 1)).numpy(), rtol=1e-4)
    fields = gguf.GGUFReader(place / "out" / IMATRIX_FILE).fields
    assert fields["general.type"].contents() == "imatrix" and fields["imatrix.chunk_count"].contents() == 3
    assert fields["imatrix.chunk_size"].contents() == 12 and isinstance(fields["imatrix.datasets"].contents(), list)
    origin = zoo.build("llama-tied", **WIDE)
    with torch.no_grad():  # the tied head is rounded before the layers: its inputs are the dense model's
        last = origin.model(TEXT.input_ids).last_hidden_state
    np.testing.assert_allclose(held["token_embd.weight"][0][0], last.square().sum((0, 1)).numpy(), rtol=1e-4)
    # what llama-quantize does: one tensor at a time, sums over counts
    dense = dict(zoo.build("llama-tied", **WIDE).named_parameters())
    tensors = {t.name: t for t in gguf.GGUFReader(place / "out" / "model.gguf").tensors}
    for name, module in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
        weight, entry = dense[f"{module}.weight"].detach().numpy(), held.get(f"{name}.weight")
        mean = None if entry is None else entry[0][0] / entry[1][0]
        theirs = ggml.quantise(weight, plan.payload.formats[module], mean)
        assert np.array_equal(tensors[f"{name}.weight"].data, theirs)
    assert torch.equal(down.weight, model.model.layers[1].mlp.down_proj.weight)


def test_theirs_makes_the_same_file_without_text(made, capsys):
    place, plan = made
    own = ["apply", str(place / "model"), str(place / "plan.json"), "--method", "weighted", "--no-stream", "--quiet"]
    file = place / "out" / IMATRIX_FILE
    assert main([*own, "--imatrix", str(file), "-o", str(place / "again")]) == 0
    a, b = ({t.name: t for t in gguf.GGUFReader(place / n / "model.gguf").tensors} for n in ("out", "again"))
    assert a.keys() == b.keys() and all(np.array_equal(a[n].data, b[n].data) for n in a)
    assert (place / "again" / IMATRIX_FILE).read_bytes() == file.read_bytes(), "the model card names it"
    held = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors if not t.name.startswith("token_embd")}
    bare = write(place / "bare.gguf", held)  # as llama-imatrix writes it without --process-output
    receipt = write_bits(zoo.build("llama-tied", **WIDE), plan, place / "bare", method="weighted", imatrix=str(bare))
    assert "model.embed_tokens has no importances; it was rounded to nearest." in receipt.notes
    assert main([*own, "--imatrix", str(file), "--samples", "2", "-o", str(place / "no")]) == 2
    assert main([*own[:4], "gptq", "--quiet", "--imatrix", str(file), "-o", str(place / "no")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "with an importance matrix" in said and "The method gptq has no option imatrix" in said


def write(file, tensors, kind="imatrix"):
    writer = gguf.GGUFWriter(file, kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_files_that_do_not_serve_are_refused_in_a_sentence(made, tmp_path):
    place, plan = made
    ours, model = place / "out" / IMATRIX_FILE, zoo.build("llama-tied", **WIDE)
    held = {t.name: np.array(t.data) for t in gguf.GGUFReader(ours).tensors}
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(ours.read_bytes()[:-2000])
    old = tmp_path / "old.dat"
    old.write_bytes(struct.pack("<i", 1) + b"blk.0.attn_q.weight")
    wide = {n: np.tile(t, (1, 2)) if n.endswith("sum2") else t for n, t in held.items()}
    cases = {
        "There is no file": tmp_path / "none.gguf",
        "another format before August 2025.*--in-file": old,
        "is cut off": cut,
        "holds no importance matrix": place / "out" / "model.gguf",
        "another model: .*.weight has 128 values, the model 1 x 64": write(tmp_path / "wide.gguf", wide),
        "another model: it has a layer 7, the model has 3": write(
            tmp_path / "deep.gguf", {n.replace("blk.2", "blk.7"): t for n, t in held.items()}
        ),
        "another model: it has blk.1.ffn_up_exps.weight, the model blk.1.ffn_up.weight": write(
            tmp_path / "experts.gguf", {n.replace("blk.1.ffn_up.", "blk.1.ffn_up_exps."): t for n, t in held.items()}
        ),
        "another model: it names none": write(tmp_path / "other.gguf", {f"other.{n}": t for n, t in held.items()}),
        "not finite": write(tmp_path / "nan.gguf", {n: t * np.float32("nan") for n, t in held.items()}),
    }
    for what, file in cases.items():
        with pytest.raises(InvalidInput, match=what):
            write_bits(model, plan, tmp_path / "out", method="weighted", imatrix=str(file))
    with pytest.raises(InvalidInput, match="Leave one out"):
        write_bits(model, plan, tmp_path / "out", TEXT, method="weighted", imatrix=str(ours))
    assert not (tmp_path / "out").exists()
    some = write(tmp_path / "some.gguf", {n: t for n, t in held.items() if "blk.2" not in n})
    notes = apply_bits(model, plan, method="weighted", imatrix=str(some)).notes
    assert sum(n.startswith("model.layers.2.") and "has no importances" in n for n in notes) == 7
    assert lb.partition(model) and importances(some, model, [m for b in partition(model)[:1] for m in b.modules])


def test_a_plan_is_measured_with_the_importances_that_the_file_will_have(made, tmp_path, capsys):
    """With the inputs of the dense model in a file, damages are those that the text itself gives; other inputs give others."""
    place, _ = made
    model, quantiser = zoo.build("llama-tied", **WIDE), {"method": "weighted", "family": "gguf", "draws": 1}
    modules = [*(m for b in partition(model, "linear") for m in b.modules), *end_modules(model)]
    found = InputStatistics(model, modules, "diagonal")
    with found.listening(None), torch.no_grad():
        model(TEXT.input_ids)
    names = {n: f"{t[0]}.weight" for n, t in find_names(found.found, "llama").items()}
    sums = {k: v for n, own in found.found.items() for k, v in entries(own, len(own[0].value), [names[n]]).items()}
    write_imatrix(tmp_path / "own.gguf", sums, TEXT.describe())
    tilted = {k: v * (1 + torch.arange(v.shape[1])) ** 2 if k.endswith("sum2") else v for k, v in sums.items()}
    write_imatrix(tmp_path / "other.gguf", tilted, TEXT.describe())
    own = {**quantiser, "formats": ["Q4_0", "Q4_1", "Q5_1"]}
    by_text, by_file, by_other = (
        rounding_damage(model, TEXT, **own, **more)
        for more in ({}, {"imatrix": str(tmp_path / "own.gguf")}, {"imatrix": str(tmp_path / "other.gguf")})
    )
    damage = [np.array(s.extra["formats"]["damage"], dtype=float) for s in (by_text, by_file, by_other)]
    np.testing.assert_allclose(damage[0], damage[1], rtol=1e-4)
    assert not np.allclose(damage[0], damage[2], rtol=1e-2)
    assert by_text.extra["formats"]["passes"] == by_file.extra["formats"]["passes"] + 1
    with pytest.raises(InvalidInput, match="There is no file"):
        plan_bits(model, TEXT, bits=4.7, imatrix=str(tmp_path / "none.gguf"), **own)


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (".in_sum2", float("nan"), "values are not finite"),
        (".in_sum2", float("inf"), "values are not finite"),
        (".in_sum2", -1.0, "are negative"),
        (".counts", float("nan"), "values are not finite"),
        (".counts", float("inf"), "values are not finite"),
        (".counts", -2.0, "are negative"),
        (".counts", 0.0, "no token was counted"),
        (".counts", 0.25, "no token was counted"),
    ],
)
def test_numbers_that_no_text_gives_are_refused_on_both_roads(made, tmp_path, where, value, why):
    place, plan = made
    held = {
        n + e: torch.from_numpy(t)
        for n, both in read_imatrix(place / "out" / IMATRIX_FILE).items()
        for e, t in ((".in_sum2", both[0].copy()), (".counts", both[1].copy()[:, None]))
    }
    held["blk.1.attn_v.weight" + where][0, 0] = value
    file = tmp_path / "bad.gguf"
    write_imatrix(file, held, {"source": "text", "samples": 1, "length": 8})
    with pytest.raises(InvalidInput, match=why) as folder:
        write_bits(zoo.build("llama-tied", **WIDE), plan, tmp_path / "out", method="weighted", imatrix=str(file))
    with pytest.raises(InvalidInput, match=why) as single:
        requantise(place / "out" / "model.gguf", plan, tmp_path / "out.gguf", method="weighted", imatrix=str(file))
    assert str(folder.value) == str(single.value) and "blk.1.attn_v.weight" in str(single.value)
    assert [f.name for f in tmp_path.iterdir()] == ["bad.gguf"]


def test_experts_that_no_token_reached_are_no_fault(tmp_path):
    sums, counts = torch.ones(3, 4), torch.tensor([[2.0], [0.0], [1.0]])
    sums[1] = 0
    file = tmp_path / "experts.gguf"
    text = {"source": "text", "samples": 1, "length": 8}
    write_imatrix(file, {"e.in_sum2": sums, "e.counts": counts}, text)
    assert read_imatrix(file)["e"][1].tolist() == [2, 0, 1]
    write_imatrix(file, {"e.in_sum2": torch.ones(3, 4), "e.counts": counts}, text)
    with pytest.raises(InvalidInput, match="sums have no count"):
        read_imatrix(file)
    write_imatrix(file, {"e.in_sum2": torch.ones(2, 4), "e.counts": counts}, text)
    with pytest.raises(InvalidInput, match="8 sums are not for 3 counts"):
        read_imatrix(file)


def test_an_importance_matrix_of_other_shapes_is_refused_before_a_file_is_written(made, tmp_path):
    place, plan = made
    entry = {"blk.0.attn_q.weight.in_sum2": torch.ones(1, 32), "blk.0.attn_q.weight.counts": torch.ones(1, 1)}
    write_imatrix(tmp_path / "narrow.gguf", entry, {"source": "text", "samples": 1, "length": 8})
    own = {"method": "weighted", "imatrix": str(tmp_path / "narrow.gguf")}
    with pytest.raises(ModelMismatch, match="another model: blk.0.attn_q.weight has 32 values there, the file 1 x 64"):
        requantise(place / "out" / "model.gguf", plan, tmp_path / "out.gguf", **own)
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_that_is_read_is_not_the_output(made, tmp_path):
    place, plan = made
    source, file = tmp_path / "folder" / "model.gguf", tmp_path / "imatrix.gguf"
    source.parent.mkdir()
    source.write_bytes((place / "out" / "model.gguf").read_bytes())
    file.write_bytes((place / "out" / IMATRIX_FILE).read_bytes())
    (tmp_path / "link.gguf").symlink_to(source)
    own = {"method": "weighted", "imatrix": str(file), "overwrite": True}
    for out in (source, tmp_path / "link.gguf", source.parent, file):
        with pytest.raises(InvalidInput, match="is read, and the output"):
            requantise(source, plan, out, **own)
    assert source.read_bytes() == (place / "out" / "model.gguf").read_bytes()
