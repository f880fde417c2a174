"""No network for local arguments: names are looked up in a process that counts every attempt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import zoo

from layerbudget.errors import NotFound
from layerbudget.models import loading

COUNTING = """
import json, os, socket, sys
calls = []
def refuse(*arguments, **options):
    calls.append(str(arguments[:1]))
    raise OSError("there is no network here")
socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = refuse
from layerbudget.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    before = len(calls)
    codes.append((main(words), len(calls) - before))
json.dump(codes, open(sys.argv[2], "w"))
"""


def counted(tmp_path, *commands):
    """Exit code and network attempts of every command."""
    source = str(Path(loading.__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "https", "HTTPS", "ALL_", "all_"))}
    environment |= {"PYTHONPATH": source, "HF_HOME": str(tmp_path / "cache")}
    words = json.dumps([[str(w) for w in c] for c in commands])
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, words, str(tmp_path / "codes.json")], env=environment, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return [tuple(c) for c in json.loads((tmp_path / "codes.json").read_text())], done.stderr


def test_local_arguments_make_no_call_and_an_id_makes_one(folder, tmp_path):
    from layerbudget.decisions.ranks.apply import add_ranks
    from layerbudget.models.loading import load_model

    model = load_model(str(folder / "model"))
    model.config._name_or_path = "somebody/else"
    adapted = add_ranks(model, zoo.linears(model, lambda n: 2))
    adapted.peft_config["default"].base_model_name_or_path = "somebody/else"
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    text = ["--perplexity", folder / "text.txt", "--length", 16]
    codes, said = counted(
        tmp_path,
        ["evaluate", folder / "model", "--adapter", tmp_path / "adapter", *text],
        ["evaluate", "modle", *text],
        ["evaluate", "model/typo", *text],
        ["evaluate", "model", "--perplexity", "txet", "--length", 16],
        ["evaluate", "somebody/else", *text],
    )
    assert codes == [(0, 0), (2, 0), (2, 0), (2, 0), (2, 1)]
    assert "no hub id" in said and "cannot be reached" in said


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/typo", "lama", "a b/c", "/x/y", ""):
        with pytest.raises(NotFound, match="no hub id"):
            loading.check_id(name, "model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="switched off"):
        loading.check_id("org/name", "model", file="config.json")
