"""What a folder must hold before its weights are read: all parts, under their own names, as numbers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo

from layerbudget.errors import BadModel, CorruptFile, NotFound
from layerbudget.models.loading import load_model

UP = "model.layers.0.mlp.up_proj.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model in one file, and in parts."""
    folder, model = tmp_path_factory.mktemp("whole"), zoo.speaker("llama")
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "parts", max_shard_size="10KB")
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of one of them that a test may change."""
    return lambda name: shutil.copytree(whole / name, tmp_path / name)


def tensors(folder, change):
    """Change the tensors of a folder."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def entry(folder, **fields):
    """Change entries of a folder's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("_orig_mod.", "begin with '_orig_mod.', such as _orig_mod.lm_head.weight"),
        ("module.", "Save the model within the wrapper"),
    ],
)
def test_names_of_a_wrapper_are_said(copied, prefix, words, stream):
    folder = copied("one")
    tensors(folder, lambda held: {prefix + name: value for name, value in held.items()})
    with pytest.raises(BadModel, match=words):
        load_model(folder, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_codes_without_a_configuration_that_reads_them_are_refused(copied, stream):
    folder = copied("one")
    before = load_file(folder / "model.safetensors")
    tensors(folder, lambda held: held | {UP: (held[UP] * 100).to(torch.int8)})
    with pytest.raises(BadModel, match=rf"{UP} in the checkpoint of .* is stored as I8"):
        load_model(folder, stream=stream)
    few = {UP: before[UP].to(torch.float8_e4m3fn)}
    tensors(folder, lambda held: held | few | {f"{UP}_scale": torch.ones(1)})
    with pytest.raises(BadModel, match=rf"is stored as F8_E4M3, and {UP}_scale beside it is not read"):
        load_model(folder, stream=stream)
    tensors(folder, lambda held: before | few)
    assert torch.equal(load_model(folder).get_parameter(UP), few[UP].float()), (
        "of eight bits without a scale the numbers are meant"
    )
    torch.save(before | {UP: (before[UP] * 100).to(torch.int8)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="is stored as int8"):
        load_model(folder)
    torch.save(before, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_model(folder).get_parameter(UP), before[UP]), "the older form of a pickle"


@pytest.mark.parametrize(
    ("said", "words"),
    [({"quant_method": "exl2"}, "names exl2"), ({"group_size": 64, "bits": 4}, "does not say by which quant_method, as MLX")],
)
def test_weights_that_transformers_cannot_unpack_are_refused(copied, said, words):
    folder = copied("one")
    entry(folder, quantization_config=said)
    with pytest.raises(BadModel, match=rf"{words}.*\n?.*delete that entry"):
        load_model(folder)


def test_parts_that_are_missing_are_named(copied):
    folder = copied("parts")
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    assert len(files) > 2 and load_model(folder).get_parameter(UP).shape
    (folder / files[1]).rename(folder / "kept")
    with pytest.raises(NotFound, match=f"lacks 1 of the {len(files)} files of its weights, first {files[1]}"):
        load_model(folder)
    (folder / files[1]).write_text(POINTER)
    for stream in (False, True):
        with pytest.raises(CorruptFile, match=f"{files[1]} is a pointer of Git LFS, not the weights.*git lfs pull"):
            load_model(folder, stream=stream)
    (folder / "kept").rename(folder / files[1])
    index.write_text("{")
    with pytest.raises(CorruptFile, match="index.json is not a weight index file"):
        load_model(folder)
    index.unlink()
    with pytest.raises(NotFound, match=f"has {files[0]} and no model.safetensors.index.json"):
        load_model(folder)
    for name in files:
        (folder / name).rename(folder / f"pytorch_{name.replace('safetensors', 'bin')}")
    with pytest.raises(NotFound, match=r"has pytorch_model-00001-of-.*\.bin and no pytorch_model\.bin\.index\.json"):
        load_model(folder)


def test_a_model_of_an_unknown_type_is_said_so(copied):
    folder = copied("one")
    entry(folder, model_type="later", architectures=["LaterForCausalLM"])
    with pytest.raises(BadModel, match=r"knows no model type later\. Install a later transformers"):
        load_model(folder)
