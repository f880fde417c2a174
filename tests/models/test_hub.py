"""No network for local arguments: every attempt is counted, and fails."""

import socket

import pytest
from tests import zoo

from layerbudget.cli import main
from layerbudget.errors import NotFound
from layerbudget.storage import hub


def counted(monkeypatch, *commands):
    """Exit code and network attempts of every command."""
    calls = []

    def refuse(*arguments, **options):
        calls.append(arguments)
        raise OSError("there is no network here")

    for place, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(place, name, refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    codes = []
    for words in commands:
        before = len(calls)
        codes.append((main([str(w) for w in words]), len(calls) - before))
    return codes


def test_local_arguments_make_no_call_and_an_id_makes_one(folder, tmp_path, monkeypatch, capsys):
    from layerbudget.decisions.ranks.apply import add_ranks
    from layerbudget.models.loading import load_model

    model = load_model(str(folder / "model"))
    model.config._name_or_path = "somebody/else"
    adapted = add_ranks(model, zoo.linears(model, lambda n: 2))
    adapted.peft_config["default"].base_model_name_or_path = "somebody/else"
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    text = ["--perplexity", folder / "text.txt", "--length", 16]
    monkeypatch.chdir(tmp_path)
    codes = counted(
        monkeypatch,
        ["evaluate", folder / "model", "--adapter", tmp_path / "adapter", *text],
        ["evaluate", "modle", *text],
        ["evaluate", "model/typo", *text],
        ["evaluate", "model", "--perplexity", "txet", "--length", 16],
        ["evaluate", "somebody/else", *text],
    )
    assert codes == [(0, 0), (2, 0), (2, 0), (2, 0), (2, 1)]
    said = " ".join(capsys.readouterr().err.split())
    assert "no hub id" in said and "cannot be reached" in said


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/typo", "lama", "a b/c", "/x/y", ""):
        with pytest.raises(NotFound, match="no hub id"):
            hub.check_id(name, "model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="switched off"):
        hub.check_id("org/name", "model", file="config.json")
