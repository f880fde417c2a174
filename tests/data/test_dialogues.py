"""What is learned of a conversation, a completion or an instruction: by hand, against TRL, and from every kind of file."""

import copy
import json
from pathlib import Path

import pytest
import torch
from tests import zoo

from layerbudget.data.dialogues import dialogue, format_of
from layerbudget.data.encoding import IGNORE, encode
from layerbudget.data.text import calibration
from layerbudget.decisions.sparsity.apply import prune
from layerbudget.decisions.sparsity.plan import plan_sparsity
from layerbudget.errors import InvalidInput, NotEnoughText
from layerbudget.evaluation.perplexity import evaluation_set, perplexity
from layerbudget.execution.divergence import Reference
from layerbudget.execution.loss import targets_of
from layerbudget.models.blocks import partition

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "seven"},
]  # fmt: skip
SHARED = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "four"}]
ROWS = {
    "messages": {"messages": CHAT},
    "conversations": {"conversations": SHARED},
    "prompt and completion": {"prompt": "2 + 2 =", "completion": " four"},
    "instruction and output": {"instruction": "Add.", "input": "2 2", "output": "four"},
}


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = CHATML
    yield tokenizer
    tokenizer.chat_template = None


def learned(tokenizer, rows, **options):
    """The text that is learned, row by row."""
    return [tokenizer.decode([i for i in r.labels if i != IGNORE]) for r in encode(rows, tokenizer, limit=400, **options)]


@pytest.mark.parametrize("kind", list(ROWS))
def test_answers_are_learned_and_nothing_else(tokenizer, kind):
    assert format_of(ROWS[kind]) == kind
    said = learned(tokenizer, [(ROWS[kind], "here")])[0]
    assert said in ("four</s>", " four</s>", "four</s>seven</s>")
    everything = learned(tokenizer, [(ROWS[kind], "here")], everything=True)[0]
    assert "2" in everything and len(everything) > len(said)


def test_a_chat_template_is_followed_turn_by_turn(chatty):
    made = dialogue(ROWS["messages"], "messages", chatty)
    assert made.text == chatty.apply_chat_template(CHAT, tokenize=False) and not made.special
    assert [made.text[a:b] for a, b in made.learned] == ["four</s>", "seven</s>"]
    asked = dialogue({"prompt": CHAT[:2], "completion": CHAT[2:3]}, "prompt and completion", chatty)
    assert [asked.text[a:b] for a, b in asked.learned] == ["four</s>"]
    instructed = dialogue(ROWS["instruction and output"], "instruction and output", chatty)
    assert instructed.text == "<|user|>Add.\n2 2</s><|assistant|>four</s>"


def test_a_template_that_rewrites_earlier_turns_still_shows_the_answers(chatty):
    chatty.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made = dialogue(ROWS["messages"], "messages", chatty)
    assert [made.text[a:b] for a, b in made.learned] == ["four</s>", "<think></think>seven</s>"]
    chatty.chat_template = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    with pytest.raises(InvalidInput, match="leaves out the content of message 1"):
        dialogue(ROWS["messages"], "messages", chatty)
    chatty.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInput, match="roles must alternate"):
        dialogue(ROWS["messages"], "messages", chatty)


def test_every_kind_of_file_gives_the_same_tokens(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    found = [calibration(str(tmp_path / f), tokenizer, samples=4, length=32) for f in ("a.jsonl", "a.json", "a.parquet")]
    assert len({d.digest for d in found}) == 1 and found[0].samples == 4
    assert calibration(rows, tokenizer, samples=4, length=32).digest == found[0].digest


def test_the_completion_tokens_of_all_rows_are_counted(tokenizer):
    """The table of ranks knew only the tokens of the scored rows, and of those cut as the scores cut them."""
    rows = [{"prompt": "ab", "completion": "c" * (5 * n)} for n in range(1, 9)]
    whole = calibration(rows, tokenizer, samples=None, length=256)
    learned = int((whole.labels[:, 1:] >= 0).sum())
    assert whole.of_rows() == {"rows": 8, "completion_tokens": learned}
    assert calibration(rows, tokenizer, samples=2, length=6).of_rows() == whole.of_rows()
    assert calibration(["some text " * 9], tokenizer, samples=1, length=4).of_rows() == {}


def test_fewer_rows_than_asked_are_used_and_long_ones_cut_both_said(tmp_path, tokenizer, caplog):
    rows = [{"prompt": "p" * 8, "completion": "c" * n} for n in (2, 3, 40)] + [{"prompt": "p" * 40, "completion": "c"}]
    data = calibration(rows, tokenizer, samples=128, length=20)
    assert data.samples == 3 and data.length == 20
    assert "2 of 4 rows are longer than 20 tokens" in caplog.text and "1 of them kept no answer" in caplog.text
    assert "3 rows; 128 were asked for" in caplog.text
    with pytest.raises(NotEnoughText, match="keeps an answer within 6"):
        calibration(rows, tokenizer, samples=2, length=6)
    with pytest.raises(InvalidInput, match="several formats"):
        calibration([rows[0], {"text": "x"}], tokenizer, samples=1, length=8)
    with pytest.raises(InvalidInput, match="no answer"):
        calibration([{"messages": CHAT[:2]}], tokenizer, samples=1, length=8)
    with pytest.raises(
        InvalidInput, match="Message 1 in row 1 of your list has no role: its keys are rolle. .* Did you mean role"
    ):
        calibration([{"messages": [{"rolle": "user"}]}], tokenizer, samples=1, length=8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"mesages": CHAT},
            "messages in line 1 .* text in line 4 of .*a.jsonl.* Did you mean messages in the place of mesages",
        ),
        ({"messages": "hello"}, "column messages in line 4 of .*a.jsonl is 'hello', which is not JSON"),
        (
            {"messages": [{"role": "user", "contents": "hi"}]},
            "Message 1 in line 4 of .* has no content: its keys are role, contents",
        ),
        (
            {"messages": [*CHAT[:1], {"role": "assistent", "content": "hi"}]},
            "Message 2 in line 4 .* 'assistent'.* mean assistant",
        ),
        ({"messages": CHAT[:1]}, "in line 4 of .*a.jsonl has no answer"),
        ({"messages": ["hello"]}, "Message 1 in line 4 of .*a.jsonl is 'hello'"),
    ],
)
def test_a_row_that_does_not_read_is_named_by_its_line(wrong, said, tmp_path, tokenizer):
    """Empty lines count; the first rows are right."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"messages": CHAT}), "", json.dumps({"messages": CHAT}), json.dumps(wrong)]))
    with pytest.raises(InvalidInput, match=said):
        calibration(str(path), tokenizer, samples=2, length=64)
    with pytest.raises(
        InvalidInput, match=said.replace("line 4", "row 3").replace("line 1 ", "row 1 ").replace("a.jsonl", "a.json")
    ):
        (tmp_path / "a.json").write_text(json.dumps([{"messages": CHAT}, {"messages": CHAT}, wrong]))
        calibration(str(tmp_path / "a.json"), tokenizer, samples=2, length=64)


def test_a_misspelt_column_is_no_text_to_learn(tokenizer):
    """A row of conversations under another name is not trained on its identifier; a role of the template is no mistake."""
    with pytest.raises(
        InvalidInput, match="no text in row 1 of your list: its columns are id, mesages.* Did you mean messages"
    ):
        calibration([{"id": "chat-1", "mesages": CHAT}], tokenizer, samples=1, length=8)
    rows = [{"messages": [{"role": "critic", "content": "no"}, *CHAT[1:]]}]
    with pytest.raises(InvalidInput, match="the role 'critic'"):
        encode([(rows[0], "here")], tokenizer, limit=64)
    knows = copy.deepcopy(tokenizer)
    knows.chat_template = "{% for m in messages %}{{ 'C' if m.role == 'critic' else m.role }}:{{ m.content }};{% endfor %}"
    assert encode([(rows[0], "here")], knows, limit=640)


def test_scores_and_losses_are_taken_on_answers_only(tokenizer):
    """The perplexity of a file of answers is that of the answer tokens, one by one; padding changes nothing."""
    model = zoo.speaker("llama")
    rows = [{"prompt": "a b", "completion": " c"}, {"prompt": "abc", "completion": " d e f g"}]
    data = evaluation_set_of(rows, tokenizer)
    assert (targets_of(model, data) != IGNORE).sum() == 3 + 9
    total = count = 0.0
    for row in encode([(r, "") for r in rows], tokenizer, limit=64):
        with torch.no_grad():
            logp = model(torch.tensor([row.input_ids])).logits[0].double().log_softmax(-1)
        for t, label in enumerate(row.labels[1:]):
            if label != IGNORE:
                total, count = total - float(logp[t, label]), count + 1
    found = perplexity(model, data)
    assert found.tokens == count == 12 and found.value == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-5)


def evaluation_set_of(rows, tokenizer):
    return calibration(rows, tokenizer, samples=None, length=64, group="evaluation", shuffle=False)


def test_a_file_of_answers_is_an_evaluation_set(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": "a", "completion": w}) for w in ("bc", "de", "f")))
    assert evaluation_set(str(tmp_path / "a.jsonl"), tokenizer, length=32).samples == 3


def test_measuring_compares_the_answers_only(tokenizer):
    """The damage of a treatment on rows with answers is the mean divergence over answer tokens."""
    model, rows = zoo.speaker("llama"), [{"prompt": "p" * n, "completion": "abcd"} for n in (3, 9, 6)]
    data = calibration(rows, tokenizer, samples=3, length=32)
    blocks = partition(model)
    plan = plan_sparsity(blocks, sparsity=0.5, rule="uniform")
    reference = Reference(model, data, 8)
    pairs = {"input_ids": data.input_ids, "attention_mask": data.attention_mask}
    with torch.no_grad():
        before = model(**pairs).logits.double().log_softmax(-1)
        prune(model, plan, None, "magnitude")
        after = model(**pairs).logits.double().log_softmax(-1)
    each = (before.exp() * (before - after)).sum(-1)[:, :-1]
    assert reference.measure() == pytest.approx(float(each[data.labels[:, 1:] != IGNORE].mean()), rel=2e-3)


def test_a_refusal_says_how_many_rows_have_the_fault(tokenizer):
    rows = [
        {"messages": CHAT},
        {"messages": CHAT, "images": ["a"]},
        {"messages": CHAT, "images": ["b"]},
        {"messages": CHAT[:2]},
    ]
    with pytest.raises(InvalidInput, match="Row 2 of your list .* images, .* 2 of 4 rows have this fault, 1 another one"):
        calibration(rows, tokenizer, samples=1, length=8)
    with pytest.raises(InvalidInput, match="Row 1 of your list .* body, .* 2 of 2 rows have this fault"):
        calibration([{"text": "one", "body": "two"}] * 2, tokenizer, samples=1, length=8)


TOOL = {"type": "function", "function": {"name": "of \udc00", "parameters": {}}}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "completion": "b \ud83d"}, "The completion in row 1 of a.json"),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": "\ud83d"}]}, "The content of message 3 in row 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}, *CHAT[1:]]},
            "The content of message 1 in row 1 of a.json",
        ),
        ({"text": "\ud83d"}, "The column text in row 1 of a.json"),
        ("\ud83d", "The text in row 1 of a.json"),
        ({"prompt": [CHAT[0]], "completion": "\ud83d"}, "A conversation in row 1 of a.json"),
        ({"messages": CHAT, "tools": [TOOL]}, "A conversation in row 1 of a.json"),
    ],
)
def test_half_a_character_is_a_fault_of_its_row(row, what, tmp_path, chatty, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = {"prompt": "a", "completion": "\U0001f600"} if "prompt" in row else {"text": "\U0001f600"}
    rows = [row, row, {"messages": CHAT} if "messages" in row else whole]
    Path("a.json").write_text(json.dumps(rows).replace("\\ud83d", "\\ud83e", 1))
    chatty.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with pytest.raises(InvalidInput, match=rf"{what}.* holds half a character \(.u\w+\)\. 2 of 3 rows have this fault\."):
        calibration("a.json", chatty, samples=1, length=200)
    assert calibration([rows[2]] * 200, chatty, samples=1, length=200).samples == 1


def test_rows_are_checked_before_anything_is_loaded(tmp_path):
    """Whatever needs no chat template is refused by the command line at once."""
    from layerbudget.decisions.files import check_rows

    path = tmp_path / "a.jsonl"
    for row, fault in (
        ({"prompt": "a", "completion": None}, "completion in line 2 .* is empty"),
        ({"messages": [*CHAT[:2], {**CHAT[2], "weight": 2}]}, "weight 2"),
        ({"text": "a", "summary": "b"}, "column summary"),
    ):
        path.write_text("\n" + json.dumps(row))
        with pytest.raises(InvalidInput, match=fault):
            check_rows(str(path))


def test_a_table_with_nulls_for_absent_keys_reads_as_the_rows_that_it_was_made_of(chatty, tmp_path, caplog):
    """Arrow gives every message and every call all keys of all others."""
    datasets = pytest.importorskip("datasets")
    chatty.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )

    def row(name, **arguments):
        tools = [{"type": "function", "function": {"name": name, "parameters": {key: {"type": "x"} for key in arguments}}}]
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        return {"tools": tools, "messages": [CHAT[1], call]}

    rows = [row("time", zone="CET"), row("weather", city="Rome")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    made = [
        calibration(source, chatty, samples=None, length=400, shuffle=False) for source in (rows, str(tmp_path / "a.parquet"))
    ]
    assert made[0].digest == made[1].digest
    assert "In 2 of 2 rows a null argument of a call is read as one that is not given" in caplog.text
    text = [{**rows[0], "messages": json.dumps([CHAT[1], {"role": "assistant", "tool_calls": [
        {"function": {"name": "time", "arguments": json.dumps({"zone": None})}}]}])}]  # fmt: skip
    assert '{"zone": null' in chatty.decode(calibration(text, chatty, samples=None, length=400).input_ids[0])
