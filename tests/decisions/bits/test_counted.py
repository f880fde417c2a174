"""Every byte of a written file is one that the plan counted."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests import vocabularies, zoo

import layerbudget as lb
from layerbudget.compressors.base import Level, find_quantiser
from layerbudget.compressors.formats import FLOATING, find_format
from layerbudget.decisions.bits.apply import write_bits
from layerbudget.decisions.bits.counted import AHEAD, ENDS, NOT_THERE, VECTORS, Counted, parts_of
from layerbudget.decisions.bits.packed import _pack
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.terms import HEAD, HEADERS, terms_of, whole_bytes
from layerbudget.errors import CoverageError, InvalidInput

SHAPES = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, vocab_size=96)


@pytest.fixture(scope="module")
def letters():
    """A tokenizer whose vocabulary takes bytes of a GGUF file."""
    return vocabularies.letters()


def source(folder, change=None, tied=True):
    """A small model in 16 bits as a folder, of which one can change tensors."""
    zoo.build("llama-tied" if tied else "llama", **SHAPES).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return lb.load_model(str(folder), dtype="float32")


@pytest.mark.parametrize("name", [*(f.name for f in FLOATING), "w3-g32", "w4-g32-asym", "w8-channel"])
def test_a_matrix_is_the_tensors_that_are_counted(name, tmp_path):
    form, quantiser = find_format(name), find_quantiser("rtn")
    got = quantiser.quantise(torch.randn(96, 64, generator=torch.Generator().manual_seed(0)), None, Level(format=name))
    save_file(_pack(got.weight, got, form, "some"), tmp_path / "some.safetensors")
    with safe_open(tmp_path / "some.safetensors", "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - a file is no mapping
        stored = {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    assert stored == parts_of(form, 96, 64)


def further(tensors):
    for name in ("eh_proj", "shared_head"):
        tensors[f"model.layers.3.mtp.{name}.weight"] = torch.randn(64, 640).bfloat16()


def wide_norms(tensors):
    for name in filter(lambda n: "norm" in n, list(tensors)):
        tensors[name] = tensors[name].float()


def planned(model, **options):
    settings = {"draws": 1, "rule": "uniform", "group": 32, **options}
    return plan_bits(model, zoo.tokens(2, 12, vocabulary=96), **settings)


def weights_of(folder):
    return sum(f.stat().st_size for f in (*folder.glob("*.safetensors"), *folder.glob("*.gguf")))


@pytest.mark.parametrize("change", [None, further, wide_norms])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_has_the_bytes_that_were_counted(tmp_path, change, tied):
    """Layers for further tokens, tensors in 32 bits, and a head of its own among them; headers take a few bytes less."""
    model = source(tmp_path / "source", change, tied)
    plan = planned(model, bits=5.0)
    receipt = write_bits(model, plan, tmp_path / "out", check=False)
    terms = terms_of(plan)
    assert receipt.tensors == plan.budget["tensors"] == whole_bytes(plan) - terms[HEADERS]
    assert "file" not in plan.budget
    assert receipt.file == weights_of(tmp_path / "out")
    assert whole_bytes(plan) - 400 < receipt.file <= whole_bytes(plan)
    assert not any("Report this" in note for note in receipt.notes)
    assert terms.get(AHEAD, 0) == (2 * 2 * 64 * 640 if change is further else 0)
    assert terms[ENDS] == 2 * 96 * 64 * (1 if tied else 2)
    assert terms[VECTORS] % (4 if change is wide_norms else 2) == 0


def test_a_size_is_of_the_whole_folder(tmp_path):
    """Copied layers are part of it: the least size that is named is enough, and the folder is not larger."""
    model = source(tmp_path / "source", further)
    with pytest.raises(lb.errors.InfeasibleBudget, match=r"--budget (\d+)"):
        planned(model, budget="74 kB")
    plan = planned(model, budget="215 kB")
    receipt = write_bits(model, plan, tmp_path / "out", check=False)
    assert 163_840 < receipt.file <= whole_bytes(plan) <= 215_000
    assert any("163,840 bytes, which the plan counted" in note for note in receipt.notes)
    assert any(s.startswith("Not planned: layers that predict further tokens") for s in lb.explain_plan(plan).sentences)


def test_a_gguf_file_has_the_bytes_that_were_counted(tmp_path, letters):
    """To the byte, with the vocabulary; layers for further tokens are said to be left out."""
    model = source(tmp_path / "source", further)
    plan = plan_bits(
        model, zoo.tokens(2, 12, vocabulary=96), tokenizer=letters, bits=6.0, family="gguf", draws=1, rule="uniform"
    )
    receipt = write_bits(model, plan, tmp_path / "out", tokenizer=letters, check=False)
    assert receipt.file == plan.budget["file"] == whole_bytes(plan) == weights_of(tmp_path / "out")
    assert receipt.tensors == plan.budget["tensors"] == whole_bytes(plan) - terms_of(plan)[HEAD]
    assert terms_of(plan)["norms and biases in F32"] == 7 * 64 * 4 and terms_of(plan)[NOT_THERE] == 0
    assert any("that transformers does not load" in note and "are not in the file" in note for note in receipt.notes)


def test_a_tokenizer_that_the_size_did_not_count_is_refused_before_anything_is_written(tmp_path, letters):
    """Of a plan in bits per weight it is a note."""
    model = zoo.build("llama-tied", **SHAPES)
    data = zoo.tokens(2, 12, vocabulary=96)
    options = {"family": "gguf", "draws": 1, "rule": "uniform"}
    plan = plan_bits(model, data, budget="70 kB", **options)
    with pytest.raises(InvalidInput, match="bytes more than the plan counted, of metadata and vocabulary"):
        write_bits(model, plan, tmp_path / "out", tokenizer=letters, check=False)
    assert not (tmp_path / "out").exists()
    free = plan_bits(model, data, bits=8.0, **options)
    receipt = write_bits(model, free, tmp_path / "out", tokenizer=letters, check=False)
    more = receipt.file - free.budget["file"]
    assert more > 0 and any(f"takes {more:,} bytes more than were planned" in note for note in receipt.notes)


@pytest.mark.parametrize(
    ("tensors", "file", "note"), [(0, 0, ""), (8, 8, "All tensors take"), (0, 8, "What is no tensor takes")]
)
def test_a_file_is_compared_with_what_was_counted(tensors, file, note):
    """Other bytes are a note; more than the size that was asked for are an error."""
    model, data = zoo.build("llama-tied", **SHAPES), zoo.tokens(2, 12, vocabulary=96)
    plans = [
        plan_bits(model, data, family="gguf", draws=1, rule="uniform", **size) for size in ({"bits": 8.0}, {"budget": "70 kB"})
    ]
    free, sized = ((plan, Counted.of(model, plan, None)) for plan in plans)
    plan, counted = free
    notes = counted.check(plan, plan.budget["tensors"] + tensors, plan.budget["file"] + file)
    assert [n.startswith(note) and n.endswith("Report this.") for n in notes] == [True] * bool(note)
    plan, counted = sized
    if note:
        with pytest.raises(CoverageError, match=note):
            counted.check(plan, plan.budget["tensors"] + tensors, plan.budget["file"] + file)
    else:
        assert not counted.check(plan, plan.budget["tensors"], plan.budget["file"])
