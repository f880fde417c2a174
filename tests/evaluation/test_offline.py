"""Tasks where the hub is out of reach: one attempt, the cache, or a sentence."""

import socket
from types import SimpleNamespace

import pytest

from layerbudget.errors import NotFound
from layerbudget.evaluation import harness


@pytest.fixture
def index(tmp_path):
    """The harness's index of two tasks: one from the hub, one that makes its rows."""
    pytest.importorskip("lm_eval")
    texts = {"arc_easy": "dataset_path: allenai/none_such\ndataset_name: ARC-Easy\n", "own": "task: own\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: SimpleNamespace(yaml_path=tmp_path / f"{name}.yaml") for name in texts}


def test_an_unreachable_hub_is_tried_once_and_the_remedy_names_the_file(index, monkeypatch):
    from huggingface_hub import constants

    tried = []

    def none(*where, **_):
        tried.append(where)
        raise OSError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", none)
    with pytest.raises(NotFound, match=r"rows of arc_easy .* not in the cache.*ARC-Easy-Test.jsonl into a folder.*--data-dir"):
        harness._check_hub(["arc_easy"], index)
    assert len(tried) == 1 and not constants.HF_HUB_OFFLINE
    assert harness._check_hub(["own"], index) is True
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    assert harness._check_hub(["arc_easy"], index) is False


def test_the_file_that_the_remedy_names_is_read(tmp_path):
    assert all(harness.LOCAL[t][1][0] in harness._remedy(t) for t in harness.LOCAL)
    assert "arc_easy" in harness._remedy("another") and "into a folder" not in harness._remedy("another")
