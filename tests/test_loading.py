"""What auto means: the checkpoint's own precision, the accelerator where there is one; and that it is written down."""

import json

import pytest
import torch
from tests import zoo

from layerbudget.cli import main
from layerbudget.errors import InvalidInput
from layerbudget.loading import describe_place, load_model
from layerbudget.lora.base import classifier_loader


@pytest.fixture
def half(tmp_path, tokenizer):
    """A model saved in bfloat16, with its tokenizer."""
    zoo.speaker("llama").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


def test_auto_is_what_the_checkpoint_holds(half, saved_model):
    assert load_model(half, dtype="auto", device="auto").dtype == torch.bfloat16
    assert load_model(half).dtype == torch.float32, "of Python's load_model the default stays"
    assert load_model(str(saved_model("llama")), dtype="auto").dtype == torch.float32
    model = load_model(half, dtype="auto")
    assert describe_place(model).startswith("0.0 M parameters in bfloat16 on cpu")
    assert classifier_loader(half, 0, dtype="auto").settings["dtype"] == "bfloat16"
    with pytest.raises(InvalidInput, match="one of auto, float32"):
        load_model(half, dtype="half")


def test_the_precision_of_auto_is_in_the_record_and_the_pruned_checkpoint_keeps_it(half, tmp_path, capsys):
    words = ["--samples", "4", "--length", "16"]
    assert main(["score", half, *words, "--stage", str(tmp_path / "stage"), "-o", str(tmp_path / "s.json")]) == 0
    assert "in bfloat16 on cpu" in capsys.readouterr().err
    found = [json.loads(f.read_text()) for f in (tmp_path / "stage").rglob("*.json")]
    assert any("bfloat16" in json.dumps(record) for record in found), "the identity of a stage names the precision"
    assert main(["plan", "sparsity", str(tmp_path / "s.json"), "--sparsity", "0.7", "--max-sparsity", "0.7", "-o",
                 str(tmp_path / "p.json")]) == 0  # fmt: skip
    assert main(["prune", half, str(tmp_path / "p.json"), *words, "-o", str(tmp_path / "out")]) == 0
    assert load_model(str(tmp_path / "out"), dtype="auto").dtype == torch.bfloat16
    assert main(["evaluate", str(tmp_path / "out"), "--length", "16", "--windows", "3"]) == 0
    assert "in bfloat16 on cpu" in capsys.readouterr().err
