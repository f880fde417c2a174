"""Rows as TRL, axolotl, LLaMA-Factory and OpenAI document them, whole and spoiled one at a time.

Each is read as TRL prepares the same row (``test_trl.py`` compares tokens and labels), or by hand where TRL has no such format,
or it is refused with a sentence that says what is wrong. ``pytest tests/data/test_rows.py -rP`` prints the table.
"""

import json

import pytest
from tests.data.test_turns import letters, shipped  # noqa: F401

from layerbudget.data.encoding import IGNORE, encode
from layerbudget.errors import InvalidInput

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}]
SYSTEM, ASK, SAY = ({"role": r, "content": c} for r, c in (("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "four")))
MORE, LAST = {"role": "user", "content": "and 3?"}, {"role": "assistant", "content": "seven"}
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
CALL, SEEN = {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "12 C"}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HUMAN, GPT = {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "four"}
FUNCTION = {"from": "function_call", "value": json.dumps(CALLS[0]["function"])}
OBSERVED = {"from": "observation", "value": "12 C"}
THINKS = {"role": "assistant", "content": "four", "reasoning_content": "two pairs"}
END = "<|im_end|>\n"
CHAT, TOOL_CHAT = [ASK, SAY], [ASK, CALL, SEEN, SAY]
PAIR, PROMPTED = {"prompt": "2 + 2 =", "completion": " four"}, {"prompt": [ASK], "completion": [SAY]}


def part(**more):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}, more]}, SAY]}


READ = {  # a row, what is learned, the same row as TRL wants it (None: TRL has no such thing), the template
    "text": ({"text": "one two", "id": 7, "url": "site.example"}, "one two</s>", {"text": "one two"}),
    "messages": ({"messages": [*CHAT, MORE, LAST]}, f"four{END}seven{END}", ...),
    "messages, harmless columns": (
        {"messages": CHAT, "prompt_id": "a", "source": "b", "images": [], "score": 1},
        f"four{END}",
        {"messages": CHAT},
    ),
    "messages as JSON text": ({"messages": json.dumps(CHAT)}, f"four{END}", {"messages": CHAT}),
    "messages, and their prompt again (UltraChat)": ({"messages": CHAT, "prompt": "2 + 2?"}, f"four{END}", {"messages": CHAT}),
    "messages with keys that Arrow leaves null": (
        {"messages": [{**m, "tool_calls": None, "name": None} for m in CHAT], "tools": None},
        f"four{END}",
        {"messages": CHAT},
    ),
    "prompt and completion": (PAIR, " four</s>", ...),
    "prompt and completion, capitals": ({"Prompt": "2 + 2 =", "Completion": " four"}, " four</s>", PAIR),
    "prompt and completion, conversational": (PROMPTED, f"four{END}", ...),
    "prompt as text, completion as messages": ({"prompt": "2 + 2?", "completion": [SAY]}, f"four{END}", PROMPTED),
    "preference": ({"prompt": "2 + 2 =", "chosen": " four", "rejected": " a much longer one"}, " four</s>", PAIR),
    "preference, conversational": ({"prompt": [ASK], "chosen": [SAY], "rejected": [LAST]}, f"four{END}", PROMPTED),
    "preference, prompt within": ({"chosen": CHAT, "rejected": [ASK, LAST]}, f"four{END}", PROMPTED),
    "preference, prompt twice (UltraFeedback)": (
        {"prompt": "2 + 2?", "chosen": CHAT, "rejected": [ASK, LAST], "score_chosen": 9.0},
        f"four{END}",
        PROMPTED,
    ),
    "KTO, desirable": ({**PAIR, "label": True}, " four</s>", PAIR),
    "tools": (
        {"messages": TOOL_CHAT, "tools": TOOLS},
        f"{CALLED}{END}four{END}",
        {"messages": TOOL_CHAT, "tools": json.dumps(TOOLS)},
    ),
    "tools and calls as JSON text": (
        {
            "tools": json.dumps(TOOLS),
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
                },
                {**SEEN, "tool_call_id": "c1"},
                SAY,
            ],
        },
        f"{CALLED}{END}four{END}",
        {"messages": TOOL_CHAT, "tools": json.dumps(TOOLS)},
    ),
    "a call is the answer": ({"messages": [ASK, CALL]}, f"{CALLED}{END}", ...),
    "OpenAI's older function_call": (
        {"messages": [ASK, {"role": "assistant", "function_call": CALLS[0]["function"]}], "functions": [TOOLS[0]["function"]]},
        f"{CALLED}{END}",
        {"messages": [ASK, CALL], "tools": json.dumps(TOOLS)},
    ),
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, f"four{END}", {"messages": CHAT}),
    "ShareGPT with system, tools and calls (LLaMA-Factory)": (
        {"conversations": [HUMAN, FUNCTION, OBSERVED, GPT], "system": "Be brief.", "tools": json.dumps([TOOLS[0]["function"]])},
        f"{CALLED}{END}four{END}",
        {"messages": [SYSTEM, *TOOL_CHAT], "tools": json.dumps(TOOLS)},
    ),
    "Alpaca": ({"instruction": "2 + 2?", "input": "", "output": "four"}, f"four{END}", {"messages": CHAT}),
    "Alpaca with input, system and history (LLaMA-Factory)": (
        {"instruction": "and", "input": "3?", "output": "seven", "system": "Be brief.", "history": [["2 + 2?", "four"]]},
        f"four{END}seven{END}",
        {"messages": [SYSTEM, *CHAT, {"role": "user", "content": "and\n3?"}, LAST]},
    ),
    "Alpaca, null instruction": ({"instruction": None, "input": "2 + 2?", "output": "four"}, f"four{END}", {"messages": CHAT}),
    "question and answer": ({"question": "2 + 2?", "answer": "four", "id": 1}, f"four{END}", {"messages": CHAT}),
    "axolotl: train false": ({"messages": [ASK, {**SAY, "train": False}, MORE, {**LAST, "train": True}]}, f"seven{END}", None),
    "OpenAI: weight 0": (
        {"messages": [ASK, {**SAY, "weight": 0}, MORE, {**LAST, "weight": 1}], "parallel_tool_calls": False},
        f"seven{END}",
        None,
    ),
    "a weight of 0 where the template marks answers": (
        {"messages": [ASK, {**SAY, "weight": 0}, MORE, LAST]},
        f"seven{END}",
        None,
        "qwen3_instruct_2507_training",
    ),
    "a call of weight 0": (
        {"messages": [ASK, {**CALL, "weight": 0}, SEEN, SAY]},
        f"four{END}",
        None,
        "qwen3_instruct_2507_training",
    ),
    "reasoning": ({"messages": [ASK, THINKS]}, f"<think>\ntwo pairs\n</think>\n\nfour{END}", ..., "qwen3"),
    "reasoning under the name thinking": (
        {"messages": [ASK, {**SAY, "thinking": "two pairs"}]},
        f"<think>\ntwo pairs\n</think>\n\nfour{END}",
        {"messages": [ASK, THINKS]},
        "qwen3",
    ),
    "a thought beside a call": (
        {"messages": [ASK, {**CALL, "reasoning_content": "two pairs"}, SEEN, SAY]},
        f"<think>\ntwo pairs\n</think>\n\n{CALLED}{END}<think>\n\n</think>\n\nfour{END}",
        ...,
        "qwen3",
    ),
    "reasoning with a template that keeps it": (
        {"messages": [ASK, {**SAY, "content": "<think>\nhm\n</think>\n\nfour"}]},
        "<｜Assistant｜><think>\nhm\n</think>\n\nfour<｜end▁of▁sentence｜>",
        ...,
        "deepseek_r1_distill_training",
    ),
    "chat_template_kwargs": (
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
        f"<think>\n\n</think>\n\nfour{END}",
        ...,
        "qwen3",
    ),
    "parts": (part(type="text", text="", cache_control=None, image_url=None), f"four{END}", {"messages": CHAT}),
    "contents as parts where the template wants those": ({"messages": CHAT}, " four<end_of_utterance>\n", None, "smolvlm"),
}

REFUSED = {  # a row, and what is said of it
    "text beside a label": ({"text": "one", "label": 1}, "has the column label, .* Use --task"),
    "text that is messages": ({"text": json.dumps(CHAT)}, "column text in row .* holds messages written as text"),
    "a text of no known name": ({"id": 1, "body": "one two"}, "no text in row .*: its columns are id, body"),
    "two texts": ({"text": "one", "summary": "two"}, "has the column summary, which a row of text does not read"),
    "messages beside images": ({"messages": CHAT, "images": ["a.png"]}, "column images, .* Only text is read"),
    "messages beside an unknown column": (
        {"messages": CHAT, "loss_mask": [0]},
        "has the column loss_mask, .* rename it to metadata",
    ),
    "messages beside another prompt": (
        {"messages": CHAT, "prompt": "Another?"},
        "has the column prompt, which messages does not read",
    ),
    "no messages": ({"messages": []}, "column messages in row .* is empty"),
    "messages as Python writes them": ({"messages": str(CHAT)}, "column messages in row .* is not JSON .* json.dumps"),
    "a null answer": (
        {"messages": [ASK, {"role": "assistant", "content": None}]},
        r"Message 2 in row .* has an empty content \(null\)",
    ),
    "an unknown role": ({"messages": [ASK, {"role": "robot", "content": "x"}]}, "Message 2 in row .* has the role 'robot'"),
    "an unknown key": (
        {"messages": [ASK, {**SAY, "train_detail": [{"begin_offset": 0}]}]},
        "Message 2 in row .* has the key train_detail",
    ),
    "a null completion": ({"prompt": "a", "completion": None}, r"completion in row .* is empty \(null\)"),
    "a blank completion": ({"prompt": "a", "completion": " "}, "answer in row .* is empty"),
    "a completion without an answer": ({"prompt": [ASK], "completion": [MORE]}, "has no answer"),
    "a system prompt beside a text": (
        {**PAIR, "system": "Be brief."},
        "has the column system, which prompt and completion as text",
    ),
    "preference as one text": (
        {"chosen": "Q: a A: b", "rejected": "Q: a A: c"},
        "prompt within chosen and rejected.* column of its own",
    ),
    "only what is rejected": ({"prompt": "a", "rejected": "b"}, "no text in row .* columns are prompt, rejected"),
    "KTO, undesirable": ({**PAIR, "label": False}, "undesirable one: label is false.* Drop the rows with false"),
    "KTO with another label": ({**PAIR, "label": "spam"}, "column label in row .* is 'spam'"),
    "KTO of LLaMA-Factory, undesirable": ({"instruction": "a", "output": "b", "kto_tag": False}, "kto_tag is false"),
    "TRL's stepwise supervision": (
        {"prompt": "a", "completions": ["b"], "labels": [True]},
        "no text in row .* completions, labels",
    ),
    "a tool without a name": (
        {"messages": TOOL_CHAT, "tools": [{"type": "function", "function": {}}]},
        "a tool without a name",
    ),
    "arguments that are no JSON": (
        {"messages": [ASK, {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{city"}}]}]},
        "arguments in tool_calls of message 2 .* not JSON",
    ),
    "calls and a template without them": (
        {"messages": TOOL_CHAT},
        r"template leaves out a call of message 2 \(assistant\) in row .*: weather",
        "llama3",
    ),
    "tools and a template without them": ({"messages": CHAT, "tools": TOOLS}, "template leaves out the tools in row", "llama3"),
    "calls without a template": ({"messages": TOOL_CHAT}, "no chat template, and the headings leave out a call", None),
    "what a tool said, and a template without it": (
        {"messages": [ASK, SAY, SEEN, LAST]},
        r"leaves out the content of message 3 \(tool\)",
        "phi3",
    ),
    "ShareGPT with two system prompts": (
        {"system": "Be long.", "conversations": [{"from": "system", "value": "Be brief."}, HUMAN, GPT]},
        "system message and another text in the column system",
    ),
    "ShareGPT with a call that is no JSON": (
        {"conversations": [HUMAN, {"from": "function_call", "value": "weather(Rome)"}, OBSERVED, GPT]},
        "function_call of message 2 .* not JSON",
    ),
    "turns of another name": ({"id": "row-1", "items": [HUMAN, GPT]}, "no text in row .* columns are id, items"),
    "Alpaca, null output": ({"instruction": "a", "input": None, "output": None}, "output in row .* is empty"),
    "Alpaca, two answers": (
        {"instruction": "a", "output": "b", "response": "c"},
        "has the column response, which instruction and output",
    ),
    "Alpaca, history of another form": (
        {"instruction": "a", "output": "b", "history": ["c"]},
        "column history .* list of pairs",
    ),
    "axolotl: the user's turn is learned": (
        {"messages": [{**ASK, "train": True}, SAY]},
        "is of user, and train says that it is learned",
    ),
    "OpenAI: half a weight": ({"messages": [ASK, {**SAY, "weight": 0.5}]}, "Message 2 in row .* has the weight 0.5"),
    "OpenAI: every weight 0": ({"messages": [ASK, {**SAY, "weight": 0}]}, "has no answer that is learned: all have weight 0"),
    "two thoughts": ({"messages": [ASK, {**THINKS, "thinking": "other"}]}, "has two thoughts"),
    "a thought and a template without it": (
        {"messages": [ASK, THINKS]},
        r"leaves out the thought of message 2 .*two pairs.*get_training_chat_template",
        "qwen2_5",
    ),
    "a thought that the template cuts": (
        {"messages": [ASK, {**SAY, "content": "<think>\nhm\n</think>\n\nfour"}]},
        "leaves out the thought of message 2",
        "deepseek_r1_distill",
    ),
    "an image among the parts": (
        part(type="image_url", image_url={"url": "a.png"}),
        "Message 1 in row .* has a part of the type 'image_url'",
    ),
    "an argument that the template has not": (
        {"messages": CHAT, "chat_template_kwargs": {"tools": []}},
        "column chat_template_kwargs in row",
    ),
}


def tokenizer_of(shipped, template):  # noqa: F811
    tokenizer = letters(shipped(template or "qwen3"))
    tokenizer.chat_template = tokenizer.chat_template if template else None
    return tokenizer


@pytest.mark.parametrize("name", READ)
def test_what_is_learned_of_a_row(name, shipped):  # noqa: F811
    row, learned, theirs, template, *_ = (*READ[name], "qwen3_instruct_2507")
    tokenizer = tokenizer_of(shipped, template)
    (mine,) = encode([(row, "row 1")], tokenizer, limit=4000)
    found = tokenizer.decode([v for v in mine.labels if v != IGNORE])
    print(f"{name}: learned {found!r}, {'by hand' if theirs is None else 'as TRL'}")
    assert found == learned


@pytest.mark.parametrize("name", REFUSED)
def test_a_spoiled_row_is_refused_by_name(name, shipped):  # noqa: F811
    row, fault, template, *_ = (*REFUSED[name], "qwen3_instruct_2507")
    with pytest.raises(InvalidInput, match=fault) as caught:
        encode([(row, "row 1")], tokenizer_of(shipped, template), limit=4000)
    print(f"{name}: {caught.value}")
