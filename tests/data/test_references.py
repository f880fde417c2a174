"""The texts of papers are cut as the code of the papers cuts them. The hub is replaced by a few rows."""

from __future__ import annotations

import numpy as np
import pytest

from layerbudget.data import text as source
from layerbudget.data.text import calibration, read_texts
from layerbudget.errors import NotEnoughText
from layerbudget.evaluation.perplexity import evaluation_set

LINES = ["", " = A heading = \n", "", *(f" The line number {i} of an article. \n" for i in range(40)), ""]


@pytest.fixture
def hub(monkeypatch):
    """Rows by what was asked for; it says which splits were."""
    datasets = pytest.importorskip("datasets")
    rows, asked = {"texts": LINES}, []
    monkeypatch.setattr(source, "check_id", lambda *names, **options: None)

    def load(name, config, *, split, streaming):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"text": rows["texts"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    return rows, asked


def test_wikitext_is_one_text_with_its_empty_rows(hub, tokenizer, caplog):
    """As GPTQ, SparseGPT and Wanda: two line breaks between rows, one tokenisation, whole windows in order."""
    whole = tokenizer("\n\n".join(LINES))["input_ids"]
    data = evaluation_set("wikitext2", tokenizer, length=32)
    assert data.input_ids.tolist() == np.reshape(whole[: len(whole) // 32 * 32], (-1, 32)).tolist()
    assert evaluation_set("wikitext2", tokenizer, length=32, windows=3).input_ids.tolist() == data.input_ids[:3].tolist()
    drawn = calibration("wikitext2", tokenizer, samples=4, length=32)
    assert {tuple(row) for row in drawn.input_ids.tolist()} <= {tuple(row) for row in data.input_ids.tolist()}
    assert [split for _, _, split in hub[1]] == ["test", "test", "train"]
    assert "The windows of wikitext2 do not begin with <s>, as in the code of the papers." in caplog.text


def test_wikitext_as_rows_to_learn_has_no_empty_ones(hub, tokenizer):
    found = read_texts("wikitext2", tokenizer, limit=64)
    assert len(found.train) + len(found.evaluation["held_out"]) == 41


def test_c4_windows_lie_within_documents_and_its_test_is_one_text(hub, tokenizer):
    hub[0]["texts"] = ["short", *(chr(65 + i) * (40 + i) for i in range(8)), "short again"]
    data = calibration("c4", tokenizer, samples=5, length=32, seed=1)
    assert data.samples == 5
    for row in data.input_ids:
        letters = set(row.tolist()) - {tokenizer.bos_token_id}
        assert len(letters) == 1, "a window of two documents"
    assert len({tuple(row) for row in data.input_ids.tolist()}) == 5
    whole = tokenizer(" ".join(hub[0]["texts"]))["input_ids"]
    assert evaluation_set("c4", tokenizer, length=32).input_ids.flatten().tolist() == whole[: len(whole) // 32 * 32]
    with pytest.raises(NotEnoughText, match="None of 10 documents"):
        calibration("c4", tokenizer, samples=5, length=64)


def test_a_text_has_one_digest_whatever_is_drawn_of_it(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("x" * 99)
    draws = [calibration(str(tmp_path / "a.txt"), tokenizer, samples=1, length=n, seed=n) for n in (8, 16)]
    assert draws[0].text == draws[1].text == evaluation_set(str(tmp_path / "a.txt"), tokenizer, length=32).text
    assert draws[0].describe()["text"] == draws[0].text
    (tmp_path / "b.txt").write_text("x" * 98 + "y")
    assert calibration(str(tmp_path / "b.txt"), tokenizer, samples=1, length=8).text != draws[0].text
