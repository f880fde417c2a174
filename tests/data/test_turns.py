"""Which characters of a conversation are learned: against TRL's training templates, and by hand."""

import datetime
import re
from pathlib import Path

import pytest

from layerbudget.data.dialogues import dialogue
from layerbudget.data.encoding import IGNORE, encode
from layerbudget.errors import InvalidInput

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS_ONCE = (  # as Phi-3: the text ends with an end-of-text token, so that no beginning of it is a text of its own
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


ROWS = {
    "one turn": [user("2 + 2?"), says("four")],
    "several turns": [user("2 + 2?"), says("four"), user("and 3?"), says("seven"), user("and 1?"), says("eight")],
    "a system prompt": [SYSTEM, user("2 + 2?"), says("four"), user("and 3?"), says("seven")],
    "ends with a question": [user("2 + 2?"), says("four"), user("thanks")],
    "begins with an answer": [says("hello"), user("2 + 2?"), says("four")],
    "a system prompt, then an answer": [SYSTEM, says("hello"), user("2 + 2?"), says("four")],
    "an empty turn in the middle": [user("2 + 2?"), says(""), user("and 3?"), says("seven")],
    "spaces around": [user(" 2 + 2? "), says(" four \n"), user("and 3?"), says("\nseven  ")],
    "two answers in a row": [user("2 + 2?"), says("four"), says("four"), user("and 1?"), says("five")],
    "equal texts": [user("four"), says("four"), user("four"), says("four")],
    "answers that begin like markers": [user("2 < 3?"), says("<|yes"), user("<|end"), says("<|")],
    "thoughts": [user("2 + 2?"), says("<think>\nhm\n</think>\n\nfour"), user("?"), says("<think>\nah\n</think>\n\nfive")],
    "ends with end-of-text": [user("2 + 2?"), says("four</s>"), user("and 3?"), says("seven</s>")],
}
THOUGHT = re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL)
# TRL learns these words of the prompt as well; a model that is asked does not write them
HEADERS = {"deepseekv3": "<｜Assistant｜>", "gptoss": "<|start|>assistant", "qwen2_5": "\n"}
SAME = [
    "phi3", "phi3_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen2_5",
    "llama3", "gemma", "gemma3", "cohere", "cohere2", "lfm2", "deepseekv3", "gptoss", "nemotron_3_nano",
]  # fmt: skip


def letters(template):
    """A tokenizer of single letters with the special tokens that a template names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = set(re.findall(r"<[|｜]\w[\w▁]*[|｜]>|<\w+_of_turn>", template))
    words = ["<s>", "</s>", "<pad>", "<unk>", *sorted(named), *map(chr, range(32, 127)), "\n"]
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", chat_template=template,
        additional_special_tokens=sorted(named),
    )  # fmt: skip


def learned(tokenizer, messages):
    made = dialogue({"messages": messages}, "messages", tokenizer)
    return [made.text[a:b] for a, b in made.learned]


@pytest.fixture
def shipped():
    """The templates that TRL ships, by name."""
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    return lambda name: (folder / f"{name}.jinja").read_text(encoding="utf-8")


def reference(tokenizer, training, messages, text, header):
    """Tokens and labels by TRL's training template; thoughts that the model's own template leaves out, left out."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        theirs, spans = (x[0] for x in render_jinja_template(
            [messages], chat_template=training, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
        ))  # fmt: skip
    except jinja2.TemplateError:
        return None
    spans = [(a + len(header), b) if header and theirs[a:b].startswith(header) else (a, b) for a, b in spans]
    kept, at = [], 0
    while at < len(theirs):
        thought = THOUGHT.match(theirs, at)
        if thought and not text.startswith(thought.group(), len(kept)):
            at = thought.end()
        else:
            kept.append((theirs[at], any(a <= at < b for a, b in spans)))
            at += 1
    assert "".join(c for c, _ in kept) == text
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [i if kept[a][1] else IGNORE for i, (a, _) in zip(coded["input_ids"], coded["offset_mapping"], strict=True)]
    return coded["input_ids"], labels


@pytest.fixture
def on_26_july_2024(monkeypatch):
    """The day whose date rows are given, on the clock of the reference too."""
    import transformers.utils.chat_template_utils as templates

    monkeypatch.setattr(templates, "datetime", type("Clock", (), {"now": staticmethod(lambda: datetime.datetime(2024, 7, 26))}))


@pytest.mark.parametrize("name", SAME)
def test_tokens_and_labels_are_those_of_trls_training_template(shipped, name, on_26_july_2024):
    tokenizer, compared = letters(shipped(name)), 0
    for what, messages in ROWS.items():
        try:
            (mine,) = encode([({"messages": messages}, "here")], tokenizer, limit=8000)
        except InvalidInput as error:
            if what == "thoughts" and name == "deepseekv3":
                assert "leaves out the thought of message 4" in str(error)
                continue
            assert "template refuses" in str(error), what
            assert reference(tokenizer, shipped(f"{name}_training"), messages, "", "") is None, what
            continue
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        wanted = reference(tokenizer, shipped(f"{name}_training"), messages, text, HEADERS.get(name, ""))
        assert (list(mine.input_ids), list(mine.labels)) == wanted, what
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("name", ["phi3", "llama3", "gemma"])
def test_a_template_that_marks_its_answers_is_believed(shipped, name):
    """With TRL's training template as the tokenizer's own, transformers gives the mask of every token."""
    tokenizer = letters(shipped(f"{name}_training"))
    for what in ("several turns", "ends with a question", "spaces around", "an empty turn in the middle"):
        (mine,) = encode([({"messages": ROWS[what]}, "here")], tokenizer, limit=400)
        wanted = tokenizer.apply_chat_template(
            ROWS[what], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )  # fmt: skip
        assert list(mine.input_ids) == wanted["input_ids"], what
        assert [v != IGNORE for v in mine.labels] == [bool(on) for on in wanted["assistant_masks"]], what


def test_every_answer_is_learned_with_its_stop():
    for template, stop, last in ((CHATML, "<|im_end|>\n", "<|im_end|>\n"), (ENDS_ONCE, "<|end|>\n", "<|end|>\n</s>")):
        tokenizer = letters(template)
        assert learned(tokenizer, ROWS["several turns"]) == [f"four{stop}", f"seven{stop}", f"eight{last}"]
        assert learned(tokenizer, ROWS["ends with a question"]) == [f"four{stop}"]
        assert learned(tokenizer, ROWS["begins with an answer"]) == [f"hello{stop}", f"four{last}"]
        assert learned(tokenizer, ROWS["a system prompt, then an answer"]) == [f"hello{stop}", f"four{last}"]
        assert learned(tokenizer, ROWS["an empty turn in the middle"]) == [stop, f"seven{last}"]
        assert learned(tokenizer, ROWS["spaces around"]) == [f" four \n{stop}", f"\nseven  {last}"]
    trims = letters(CHATML.replace("m.content", "m.content | trim"))
    assert learned(trims, ROWS["spaces around"]) == ["four<|im_end|>\n", "seven<|im_end|>\n"]


def test_a_stop_that_only_the_next_turn_writes_is_learned():
    """As GLM: an answer ends where the next speaker is named; an answer that is left out when empty is no reason to refuse."""
    tokenizer = letters(
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
        "{{ '\n' + m.content if m.content else '' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert learned(tokenizer, ROWS["several turns"]) == ["\nfour<|user|>", "\nseven<|user|>", "\neight"]
    assert learned(tokenizer, ROWS["an empty turn in the middle"]) == ["\nseven"]


def test_turns_under_headings_have_their_stops():
    plain = letters(CHATML)
    plain.chat_template = None
    assert learned(plain, ROWS["several turns"]) == ["four</s>", "seven</s>", "eight"]
    for what, stops in (("several turns", 3), ("ends with a question", 1), ("ends with end-of-text", 2)):
        (row,) = encode([({"messages": ROWS[what]}, "here")], plain, limit=400)
        assert sum(v == plain.eos_token_id for v in row.labels) == stops == sum(v == plain.eos_token_id for v in row.input_ids)


def test_a_text_that_ends_gets_no_second_end(tokenizer, monkeypatch):
    rows = {"four": "four</s>", "four</s>": "four</s>", "four</s> ": "four</s> </s>"}
    for said, wanted in rows.items():
        (text,) = encode([(said, "here")], tokenizer, limit=40)
        (asked,) = encode([({"prompt": "2 + 2 = ", "completion": said}, "here")], tokenizer, limit=40)
        assert tokenizer.decode(text.input_ids) == f"<s>{wanted}"
        assert tokenizer.decode(asked.input_ids) == f"<s>2 + 2 = {wanted}"
        assert tokenizer.decode([v for v in asked.labels if v != IGNORE]) == wanted
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(InvalidInput, match="Use the model's fast tokenizer"):
        encode([("four", "here")], tokenizer, limit=40)


def test_outer_spaces_of_an_answer_are_learned_where_offsets_leave_them_out():
    """``ByteLevel(trim_offsets=True)`` gives a token of spaces an empty place; the labels are those without trimming."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def learned_text(row, trim):
        words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "Ġ<"]
        tok = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("Ġ", "Ġ"), ("Ġ", "<")]))
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tok.post_processor = processors.ByteLevel(trim_offsets=trim)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>")
        if "messages" in row:
            tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<{% endfor %}"
        (found,) = encode([(row, "here")], tokenizer, limit=99)
        return tokenizer.decode([v for v in found.labels if v != IGNORE])

    for row, wanted in (
        ({"prompt": "a", "completion": "  b   "}, "  b   </s>"),
        ({"prompt": "a ", "completion": "  b"}, "   b</s>"),  # one token of two spaces reaches into the answer
        ({"messages": [user("a"), says("b  "), user("c "), says(" d ")]}, "b  < d <"),
    ):
        assert learned_text(row, trim=True) == learned_text(row, trim=False) == wanted


def test_a_template_that_hides_an_answer_is_refused_with_a_remedy_that_works():
    for template, fault in (
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", "leaves out the content of message 1"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "turn 2 .* cannot be found"),
    ):
        tokenizer = letters(template)
        with pytest.raises(InvalidInput, match=f"{fault}.*prompt and completion, both as text"):
            learned(tokenizer, ROWS["one turn"])
        made = dialogue({"prompt": "2 + 2 =", "completion": " four"}, "prompt and completion", tokenizer)
        assert [made.text[a:b] for a, b in made.learned] == [" four"]


CALLS = [
    {"type": "function", "function": {"name": name, "arguments": {"city": "Rome", "days": 3}}} for name in ("weather", "time")
]
CALL, SEEN = {**says(""), "tool_calls": CALLS[:1]}, {"role": "tool", "content": "12 C", "name": "weather"}
ACTS = {
    "a call": [user("Rome?"), CALL, SEEN, says("12 degrees")],
    "a call is the answer": [user("Rome?"), CALL],
    "two rounds": [user("Rome?"), CALL, SEEN, says("12 degrees"), user("again"), CALL, SEEN, says("still")],
    "words beside a call": [user("Rome?"), {**CALL, "content": "I look."}, SEEN, says("12 degrees")],
    "two calls": [user("Rome?"), {**CALL, "tool_calls": CALLS}, SEEN, {**SEEN, "content": "noon"}, says("12 degrees")],
    "a thought": [user("2 + 2?"), {**says("four"), "reasoning_content": "two pairs"}],
    "a thought beside a call": [user("Rome?"), {**CALL, "reasoning_content": "I look"}, SEEN, says("12 degrees")],
}


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("qwen2_5", "\n"), ("qwen3", ""), ("qwen3_5_think", ""), ("qwen3_8", ""), ("nemotron_3_nano", ""), ("lfm2_v2", ""),
        ("gptoss", "<|start|>assistant"), ("muse_glimmer", "<|start|>assistant"),
    ],
)  # fmt: skip
def test_calls_and_thoughts_are_learned_as_trls_training_template_marks_them(shipped, name, header, on_26_july_2024):
    tokenizer, compared = letters(shipped(name)), 0
    for what, messages in ACTS.items():
        try:
            (mine,) = encode([({"messages": messages}, "here")], tokenizer, limit=8000)
        except InvalidInput as error:
            assert "leaves out" in str(error), what
            continue
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert (list(mine.input_ids), list(mine.labels)) == reference(
            tokenizer, shipped(f"{name}_training"), messages, text, header
        ), what
        compared += 1
    assert compared >= 5


def test_an_answer_that_ends_where_a_tool_speaks_learns_to_stop_there(shipped):
    """As GLM: behind a call stands the name of the next speaker, and nothing else says that the call has ended."""
    tokenizer = letters(shipped("glm4moe"))
    call, answer = learned(tokenizer, ACTS["a call"])
    assert call.startswith("\n<think></think>\n<tool_call>weather") and call.endswith("</tool_call><|observation|>")
    assert answer == "\n<think></think>\n12 degrees"


def test_what_a_tool_says_within_an_answer_is_never_learned(shipped):
    tokenizer = letters(shipped("diffusion_gemma"))
    with pytest.raises(InvalidInput, match="writes message 3 within message 2"):
        learned(tokenizer, ACTS["words beside a call"])
    assert "12 C" not in "".join(learned(tokenizer, ACTS["two rounds"]))


def test_arguments_are_json_text_where_a_template_wants_that():
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}",
    )
    found = learned(letters(template), ACTS["a call is the answer"])
    assert found == ['weather{"city": "Rome", "days": 3}<|im_end|>\n']


def test_icons_of_a_private_plane_are_no_marks():
    tokenizer = letters(CHATML)
    assert learned(tokenizer, [user("\U000f0123"), says("\U000f0000four")]) == ["\U000f0000four<|im_end|>\n"]


def test_a_thought_that_the_template_forgets_is_said_with_the_number_of_rows(shipped, caplog):
    tokenizer = letters(shipped("qwen3"))
    thinks = [user("2 + 2?"), {**says("four"), "reasoning_content": "two pairs"}, user("and 3?"), says("seven")]
    encode([({"messages": m}, "here") for m in (thinks, thinks, ROWS["several turns"])], tokenizer, limit=8000)
    assert "In 2 of 3 rows the chat template leaves out thoughts of earlier answers" in caplog.text


def test_a_date_in_a_template_is_the_same_on_all_days(caplog):
    """Rows were other tokens the next day: a run was not continued, and two plans were not compared."""
    from layerbudget.data import templates

    templates._say_once.cache_clear()
    dated = letters(
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {{ strftime_now( \"%Y\" ) }}{% endif %}" + CHATML
    )
    (row,) = encode([({"messages": ROWS["one turn"]}, "here")], dated, limit=400)
    assert dated.decode(row.input_ids).startswith("26 Jul 2024 2024<|im_start|>user")
    encode([({"messages": ROWS["one turn"]}, "here")] * 3, dated, limit=400)
    assert caplog.text.count("writes today's date: 26 Jul 2024") == 1
    own = letters("{% set form = '%Y' %}{{ strftime_now(form) }}" + CHATML)
    with pytest.raises(InvalidInput, match="asks for today's date in a form that is not known"):
        learned(own, ROWS["one turn"])


def test_a_row_gives_its_own_date_and_a_template_by_name_needs_a_default(shipped):
    tokenizer = letters(shipped("llama3_2"))
    for options, date in (({}, "26 Jul 2024"), ({"date_string": "1 Jan 2020"}, "1 Jan 2020")):
        made = dialogue({"messages": ROWS["one turn"], "chat_template_kwargs": options}, "messages", tokenizer)
        assert f"Today Date: {date}" in made.text
    tokenizer.chat_template = {"tool_use": CHATML, "rag": CHATML}
    with pytest.raises(InvalidInput, match="does not say which chat template is meant"):
        learned(tokenizer, ROWS["one turn"])


@pytest.mark.parametrize("name", ["deepseek_r1_distill"])
def test_the_remedy_for_a_thought_that_is_cut_works(shipped, name):
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = letters(shipped(name))
    with pytest.raises(InvalidInput, match="get_training_chat_template"):
        learned(tokenizer, ROWS["thoughts"])
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    assert "ah" in learned(tokenizer, ROWS["thoughts"])[1]


def test_a_turn_of_weight_0_is_not_learned_where_a_template_marks_it_in_pieces(shipped):
    """As Gemma 4: the stop of an answer is a piece of its own."""
    tokenizer = letters(shipped("diffusion_gemma_training"))
    silent = [{**m, "weight": 0} if m["content"] == "four" else m for m in ROWS["several turns"]]
    assert "".join(learned(tokenizer, silent)) == "seven<turn|>\neight<turn|>\n"
    last = [{**m, "weight": 0} if m["content"] == "eight" else m for m in ROWS["several turns"]]
    assert "".join(learned(tokenizer, last)) == "four<turn|>\nseven<turn|>\n"
