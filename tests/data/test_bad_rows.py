"""Rows that cannot be read: the first is refused with the way around it, or all are left out and counted."""

import json

import pytest

from layerbudget.cli import build_parser
from layerbudget.data.encoding import IGNORE
from layerbudget.data.text import calibration, read_texts
from layerbudget.errors import InvalidInput, NotEnoughText
from layerbudget.evaluation.perplexity import evaluation_set

GOOD = [json.dumps({"prompt": f"{i} + {i} =", "completion": f" {2 * i}"}) for i in range(30)]
BAD = {
    "no JSON": '{"prompt": "1', "no answer": '{"prompt": "a", "completion": " "}', "another format": '{"text": "abc"}',
    "no row": "17", "no text": '{"number": 3}', "no roles": '{"messages": [{"rolle": "user"}]}',
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """A function that writes good rows with bad ones among them."""

    def write(*bad, name="a.jsonl", good=GOOD):
        lines = [*good[:7], *bad, *good[7:]]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("what", list(BAD))
def test_one_bad_row_is_refused_or_left_out_and_counted(written, tokenizer, caplog, what):
    source, whole = written(BAD[what]), calibration(written(name="whole.jsonl"), tokenizer, samples=None, length=40)
    with pytest.raises(InvalidInput, match="Or leave such rows out: --skip-bad-rows"):
        calibration(source, tokenizer, samples=None, length=40)
    assert calibration(source, tokenizer, samples=None, length=40, skip_bad_rows=True).digest == whole.digest
    assert "1 of 31 rows cannot be read and are left out. The first: " in caplog.text
    assert evaluation_set(source, tokenizer, length=40, skip_bad_rows=True).samples == 30
    texts = read_texts(source, tokenizer, limit=40, skip_bad_rows=True)
    assert len(texts.train) + len(texts.evaluation["held_out"]) == 30


def test_all_of_them_are_counted_and_nothing_left_is_an_error(written, tokenizer, caplog):
    data = calibration(written(*BAD.values()), tokenizer, samples=None, length=40, skip_bad_rows=True)
    assert data.samples == 30 and (data.labels != IGNORE).any()
    assert f"{len(BAD)} of {30 + len(BAD)} rows" in caplog.text
    with pytest.raises(NotEnoughText, match="None of 3 rows keeps an answer"):
        calibration(written(*[BAD["no answer"]] * 3, good=[]), tokenizer, samples=None, length=40, skip_bad_rows=True)


def test_texts_without_a_format_are_counted_too(written, tokenizer, caplog):
    source = written(BAD["no text"], BAD["no JSON"], good=[json.dumps({"text": "abc " * 9})] * 9)
    with pytest.raises(InvalidInput, match="--skip-bad-rows"):
        calibration(source, tokenizer, samples=2, length=16)
    assert calibration(source, tokenizer, samples=2, length=16, skip_bad_rows=True).samples == 2
    assert "2 of 11 rows" in caplog.text


@pytest.mark.parametrize(
    "words",
    ["score", "plan sparsity", "plan bits", "plan shapes", "apply", "finetune", "evaluate", "explain certify", "doctor"],
)
def test_every_verb_that_reads_rows_has_the_option(words, capsys):
    with pytest.raises(SystemExit):
        build_parser(words.split()[0]).parse_args([*words.split(), "--help"])
    assert "--skip-bad-rows" in capsys.readouterr().out
