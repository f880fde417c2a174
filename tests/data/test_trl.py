"""The same rows through TRL's own preparation: the same tokens, the same tokens learned.

Its trainer takes long to import, so what needs it stands in this file.
"""

import types

import pytest
from tests import zoo
from tests.data.test_dialogues import CHAT, chatty  # noqa: F401
from tests.data.test_dialogues import ROWS as KINDS
from tests.data.test_rows import READ, tokenizer_of
from tests.data.test_turns import ROWS, letters, shipped  # noqa: F401

from layerbudget.data.encoding import encode

datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")


def test_tokens_and_mask_are_trls(chatty, tmp_path):  # noqa: F811
    rows = [{"prompt": CHAT[:2], "completion": CHAT[2:3]}, {"prompt": CHAT[:4], "completion": CHAT[4:]}]
    plain = [KINDS["prompt and completion"], {"prompt": "one two", "completion": " three"}]
    for kind in (rows, plain):
        config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=400)
        trainer = trl.SFTTrainer(
            model=zoo.speaker("llama"), args=config, train_dataset=datasets.Dataset.from_list(kind), processing_class=chatty
        )
        ours = encode([(r, "here") for r in kind], chatty, limit=400)
        for mine, theirs in zip(ours, trainer.train_dataset, strict=True):
            assert list(mine.input_ids) == theirs["input_ids"]
            assert list(mine.labels) == theirs["labels"]


def test_labels_are_those_of_trls_trainer(shipped, tmp_path):  # noqa: F811
    tokenizer = letters(shipped("phi3"))
    rows = [{"messages": ROWS[what]} for what in ("several turns", "ends with a question", "begins with an answer")]
    config = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=400, assistant_only_loss=True
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=zoo.speaker("llama"), args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    for mine, theirs in zip(encode([(r, "here") for r in rows], tokenizer, limit=400), trainer.train_dataset, strict=True):
        assert list(mine.input_ids) == theirs["input_ids"] and list(mine.labels) == theirs["labels"]


def as_trl_prepares(row, tokenizer):
    """Tokens and labels of ``SFTTrainer``, without the model that a whole trainer needs."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    chat = "messages" in row
    swapped = chat and not has_generation_markers(tokenizer.chat_template)
    trainer = types.SimpleNamespace(
        _tokenizer=tokenizer, completion_only_loss="prompt" in row,
        chat_template=get_training_chat_template(tokenizer) if swapped else None,
    )  # fmt: skip
    config = types.SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=chat, max_length=None, shuffle_dataset=False
    )
    data = datasets.Dataset.from_list([row])
    (made,) = trl.SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, False, None, "rows")
    return list(made["input_ids"]), list(made["labels"])


@pytest.mark.parametrize("name", [name for name, (_, _, theirs, *_) in READ.items() if theirs is not None])
def test_a_row_is_read_as_trl_reads_it(name, shipped):  # noqa: F811
    row, _, theirs, template, *_ = (*READ[name], "qwen3_instruct_2507")
    tokenizer = tokenizer_of(shipped, template)
    (mine,) = encode([(row, "row 1")], tokenizer, limit=4000)
    assert (list(mine.input_ids), list(mine.labels)) == as_trl_prepares(row if theirs is ... else theirs, tokenizer)
