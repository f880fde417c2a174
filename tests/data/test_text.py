import copy
import json
import math

import numpy as np
import pytest
import torch
import transformers
from tests import zoo
from tokenizers import processors

from layerbudget.cost.sizes import shape_in_memory
from layerbudget.data import stdlib
from layerbudget.data.calibration import CalibrationSet
from layerbudget.data.text import calibration, column_rows, read_documents, token_stream
from layerbudget.decisions.files import check_rows
from layerbudget.errors import InvalidInput, NotEnoughText, NotFound, UnknownStructure
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.execution.loss import head_of
from layerbudget.execution.walk import Walk
from layerbudget.sensitivity.gain import score


def test_stdlib_groups_are_disjoint_by_name_and_by_content():
    assert not set(stdlib.CALIBRATION) & set(stdlib.EVALUATION)
    assert not (set(stdlib.CALIBRATION) | set(stdlib.EVALUATION)) & set(stdlib.training_names())
    texts = {g: {t for _, t in stdlib.read(g)[0]} for g in ("calibration", "evaluation", "training")}
    assert not texts["calibration"] & texts["evaluation"]
    assert not texts["training"] & (texts["calibration"] | texts["evaluation"])


def test_a_missing_module_is_skipped_and_said(monkeypatch, caplog):
    monkeypatch.setattr(stdlib, "CALIBRATION", ("csv", "no_such_module"))
    assert read_documents("stdlib") and "no_such_module" in caplog.text


def test_calibration_is_seeded_and_hashed(tokenizer, monkeypatch):
    monkeypatch.setattr(stdlib, "CALIBRATION", ("csv", "statistics"))
    a = calibration("stdlib", tokenizer, samples=5, length=32, seed=3)
    b = calibration("stdlib", tokenizer, samples=5, length=32, seed=3)
    c = calibration("stdlib", tokenizer, samples=5, length=32, seed=4)
    assert torch.equal(a.input_ids, b.input_ids) and a.digest == b.digest
    assert a.digest != c.digest
    known = {"source": "stdlib", "samples": 5, "length": 32, "digest": a.digest, "seed": 3, "text": a.text}
    assert a.describe() == known and a.text == c.text != calibration("stdlib:evaluation", tokenizer, samples=5, length=32).text


def test_windows_do_not_overlap(tokenizer):
    text = "".join(chr(48 + i % 60) for i in range(200))
    data = calibration([text], tokenizer, samples=6, length=32)
    stream = token_stream([text], tokenizer)
    starts = sorted(
        next(s for s in range(0, len(stream), 32) if np.array_equal(stream[s + 1 : s + 32], row[1:].numpy()))
        for row in data.input_ids
    )
    assert starts == [0, 32, 64, 96, 128, 160]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_window_begins_as_the_tokenizer_begins_a_text(tokenizer, shuffle):
    """In place of the token there, whose only use is to predict others; once where a document begins behind it."""
    texts = ["ab" * 48, "c" * 26, "d" * 80]
    stream = token_stream(texts, tokenizer)
    data = calibration(texts, tokenizer, samples=None, length=16, shuffle=shuffle)
    begin = tokenizer.bos_token_id
    whole = stream[: len(stream) // 16 * 16].reshape(-1, 16)
    behind = whole[:, 1] == begin
    assert behind.sum() == 1 and whole[behind, 0] != begin
    expected = [[row[0] if row[1] == begin else begin, *row[1:]] for row in whole.tolist()]
    assert (sorted(data.input_ids.tolist()) == sorted(expected)) if shuffle else (data.input_ids.tolist() == expected)


def test_windows_are_the_bare_text_where_the_tokenizer_adds_nothing(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    data = evaluation_set("stdlib", tokenizer, length=16, windows=3)
    assert (
        data.input_ids.flatten().tolist() == token_stream(read_documents("stdlib", group="evaluation"), tokenizer)[:48].tolist()
    )


def test_local_files(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "a.txt").write_text("alpha " * 40)
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "beta " * 40}) + "\n\n" + json.dumps({"content": "gamma " * 40}) + "\n"
    )
    parquet.write_table(pyarrow.table({"text": ["delta " * 40]}), tmp_path / "c.parquet")
    texts = read_documents(str(tmp_path))
    assert [t.split()[0] for t in texts] == ["alpha", "beta", "gamma", "delta"]
    assert len(calibration(f"{tmp_path / 'a.txt'},{tmp_path / 'c.parquet'}", tokenizer, samples=3, length=64)) == 3


def test_errors_say_how_much_there_was(tmp_path, tokenizer, caplog):
    (tmp_path / "a.txt").write_text("x" * 99)
    assert len(calibration(str(tmp_path / "a.txt"), tokenizer, samples=4, length=32)) == 3
    assert "has 100 tokens: 3 samples of 32 are used instead of 4" in caplog.text
    with pytest.raises(NotEnoughText, match=r"has 100 tokens, one sample needs 101. Give more text, or a length up to 100"):
        calibration(str(tmp_path / "a.txt"), tokenizer, samples=4, length=101)
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(InvalidInput, match="holds no text"):
        calibration(str(tmp_path / "empty.txt"), tokenizer, samples=1, length=8)
    with pytest.raises(NotFound, match="no text file"):
        calibration(str(tmp_path / "nope.txt"), tokenizer, samples=1, length=8)
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(InvalidInput, match="Line 1"):
        read_documents(str(tmp_path / "bad.jsonl"))
    with pytest.raises(InvalidInput, match="samples is 0"):
        calibration("stdlib", tokenizer, samples=0, length=8)
    with pytest.raises(NotFound, match="cannot be reached|switched off"):
        read_documents("no-such-owner/no-such-dataset")


def test_perplexity_equals_a_plain_loop_and_ignores_batch_size(tokenizer):
    model = zoo.speaker("llama")
    data = evaluation_set("stdlib", tokenizer, length=16, windows=7)
    total = 0.0
    for row in data.input_ids:
        with torch.no_grad():
            logp = torch.log_softmax(model(row[None]).logits[0].double(), dim=-1)
        total -= sum(float(logp[t, row[t + 1]]) for t in range(15))
    found = perplexity(model, data, batch_size=3)
    assert found.value == pytest.approx(math.exp(total / (7 * 15)), rel=1e-6)
    assert found.value == pytest.approx(perplexity(model, data, batch_size=7).value, rel=1e-6)
    assert (found.tokens, found.length, found.windows) == (105, 16, 7)
    assert found.value < 96 * 1.3, "an untrained model is near the uniform one"


def test_harness_reads_local_rows(shared_data):
    from layerbudget.evaluation.harness import LOCAL, local_rows

    for task in LOCAL:
        rows = local_rows(task, shared_data)
        assert len(rows) > 250 and all(r.keys() == rows[0].keys() for r in rows)
    with pytest.raises(NotFound):
        local_rows("rte", shared_data / "nowhere")
    with pytest.raises(InvalidInput):
        local_rows("mmlu", shared_data)


@pytest.mark.slow
def test_tasks_run_through_the_harness(shared_data, tokenizer):
    from layerbudget.evaluation.harness import LOCAL, evaluate_tasks

    model = zoo.speaker("llama")
    model.config.max_position_embeddings = 2048
    rows = evaluate_tasks(model, tokenizer, list(LOCAL), data_dir=shared_data, limit=4)
    assert set(rows) == set(LOCAL)
    assert all(row["samples"] == 4 and 0 <= row["acc"] <= 1 for row in rows.values())


def test_a_file_that_is_there_is_no_list_of_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("my,rows.jsonl", "mine"), ("my.txt", "first"), ("rows.txt", "second")):
        (tmp_path / name).write_text(json.dumps({"text": text}) if name.endswith("l") else text)
    check_rows("my,rows.jsonl")
    assert read_documents("my,rows.jsonl") == ["mine"]
    assert read_documents("my.txt, rows.txt") == ["first", "second"]
    assert read_documents(", ".join(["my.txt"] * 99)) == ["first"] * 99  # longer than a name can be


def test_json_lines_may_hold_any_line_separator(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one\u2028two\x85three"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_documents(str(path)) == ["one\u2028two\x85three"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b"123\n"), ("b.jsonl", b'{"text": "\xff"}\n'), ("c.json", b"[1, 2]"), ("d.parquet", b"no parquet")],
)
def test_files_that_hold_no_text_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=name):
        read_documents(str(tmp_path / name))


def test_a_named_column_is_read_or_refused_never_replaced():
    rows = [{"body": "short", "text": "a longer text"}, {"body": None, "text": "x"}]
    assert column_rows(rows, "body", "mine", None) == ["short"]
    assert column_rows([{"url": "site.example", **rows[1]}], "", "mine", 1) == ["x"]
    with pytest.raises(InvalidInput, match="has the column body, which a row of text does not read"):
        column_rows(rows, "", "mine", 1)
    with pytest.raises(InvalidInput, match="no column 'bodyy'"):
        column_rows(rows, "bodyy", "mine", None)


def test_perplexity_refuses_padding():
    ids = torch.randint(3, 90, (2, 8))
    mask = torch.ones_like(ids)
    assert perplexity(zoo.speaker("llama"), CalibrationSet(input_ids=ids, attention_mask=mask)).windows == 2
    mask[1, 5:] = 0
    with pytest.raises(InvalidInput, match="padding"):
        perplexity(zoo.speaker("llama"), CalibrationSet(input_ids=ids, attention_mask=mask))


@pytest.mark.parametrize("length, token, match", [(65, 1, "positions for 64"), (8, 97, "embeddings for tokens below 97")])
def test_tokens_that_a_model_cannot_read_are_refused_before_anything_is_computed(length, token, match):
    model, data = zoo.build("llama"), CalibrationSet(input_ids=torch.full((2, length), token))
    for read in (
        lambda: perplexity(model, data),
        lambda: Walk(model, data),
        lambda: score(model, data, zoo.B.partition(model)),
    ):
        with pytest.raises(InvalidInput, match=match):
            read()


def test_a_model_of_images_is_refused_in_one_sentence():
    """Not by ``'NoneType' object has no attribute 'dtype'`` from inside its forward."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    data = CalibrationSet(input_ids=torch.full((2, 4), 1))
    for read in (
        lambda: perplexity(model, data),
        lambda: Walk(model, data),
        lambda: score(model, data, zoo.B.partition(model)),
        lambda: shape_in_memory(model),
        lambda: head_of(model),
    ):
        with pytest.raises(UnknownStructure, match="ViTForImageClassification reads pixel_values, no tokens"):
            read()
