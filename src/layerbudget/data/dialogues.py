"""Meaning of a row: a conversation, a prompt with its answer, or a text.

Formats are known by their columns, whatever their capitals: ``messages`` or ``conversations`` (roles and contents, or
ShareGPT's ``from`` and ``value``), ``prompt`` and ``completion`` (texts or messages), a question and an answer (Alpaca, Dolly,
GSM8K), and ``chosen`` beside ``rejected``, of which the chosen answer is learned. Columns may be kept as JSON text. Every
column, key, role and part is read, harmless by its name (:mod:`layerbudget.data.columns`), or a reason to refuse the row. How
a conversation is written, and which characters of it are learned: :mod:`layerbudget.data.templates`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InvalidInput
from .columns import (
    ANSWERS,
    COLUMNS,
    GIVEN,
    LABELS,
    PAIRS,
    QUESTIONS,
    SYSTEM,
    TEXTS,
    TURNS,
    Columns,
    is_empty,
    is_harmless_key,
    json_cell,
    lowered,
    messages_cell,
    of_every_row,
    strings,
    suggestion,
    text_cell,
    whole_text,
    without_nulls,
)
from .templates import Conversation, Dialogue, Message, template_of, written

FORMATS = ("messages", "conversations", "prompt and completion", "instruction and output", "chosen and rejected")
_HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_HEADER_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_KNOWN = ("system", "user", "assistant", "tool", "function", "developer", "ipython", "observation", "function_call")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant"}
_USUAL = {"developer": "system", "function": "tool", "ipython": "tool", "observation": "tool"}  # where no template names them
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_NULLS = "a null argument of a call is read as one that is not given (arguments as JSON text keep it)"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_FLAGS = ("weight", "train", "training")
_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = frozenset(
    "messages conversation tools chat_template tokenize add_generation_prompt continue_final_message return_dict "
    "return_tensors return_assistant_tokens_mask padding truncation max_length tokenizer_kwargs sanitize_control_tokens".split()
)


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Messages, which of them are not learned, and whether an argument of a call was null."""

    messages: list[Message] = dataclasses.field(default_factory=list)
    silent: frozenset[int] = frozenset()
    nulls: bool = False


def format_of(row: Any) -> str | None:
    """Which of ``FORMATS`` a row has; ``None`` for plain text.

    >>> format_of({"prompt": "2 + 2 =", "completion": " 4"}), format_of({"text": "four"})
    ('prompt and completion', None)
    """
    if not isinstance(row, Mapping):
        return None
    named = {str(name).strip().lower(): value for name, value in row.items()}
    filled = {name for name, value in named.items() if value is not None}
    return _format(filled) or (None if filled.intersection(TEXTS) else _format(set(named)))


def _format(names: set[str]) -> str | None:
    for name in TURNS:
        if name in names:
            return FORMATS[0] if name == "messages" else FORMATS[1]
    if names.issuperset(PAIRS):
        return FORMATS[4]
    if names.issuperset(("prompt", "completion")):
        return FORMATS[2]
    return FORMATS[3] if names.intersection(QUESTIONS) and names.intersection(ANSWERS) else None


def text_of(row: Any, where: object, column: str = "") -> str:
    """The text of a row: itself, a named column, or the column with a usual name; empty where the cell is."""
    if isinstance(row, str):
        return whole_text(row, f"The text in {where}")
    if column:
        if column not in row:
            raise InvalidInput(f"{where} has no column {column!r}.", f"It has {', '.join(row)}.", "Name one of those.")
        return whole_text(row[column], f"The column {column} in {where}") if isinstance(row[column], str) else ""
    columns = Columns(row, str(where))
    name = columns.first(TEXTS)
    if name is None:
        problem = f"There is no text in {where}: its columns are {', '.join(map(str, row)) or 'none'}."
        known = f"Known columns are {', '.join(TEXTS)}; formats {', '.join(FORMATS)}."
        raise InvalidInput(problem, known, suggestion(columns.row, COLUMNS) or "Rename one.")
    text = columns.text(name)
    columns.finish(f"a row of {name}", text)
    return text


def dialogue(row: Mapping[str, Any], kind: str, tokenizer: Any, where: str = "the data") -> Dialogue:
    """Text of one row of a format (:func:`format_of`) and its learned spans; the tokenizer's chat template writes messages.

    Raises:
        InvalidInput: A column, key, role or part that is not known, or that the chat template leaves out.
    """
    read = _read(row, kind, where)
    if isinstance(read, Dialogue):
        return read
    if read.plain is not None and not getattr(tokenizer, "chat_template", None):
        return read.plain
    template = template_of(tokenizer, read.tools)
    return written(dataclasses.replace(read, messages=_named(read.messages, template, where)), template, tokenizer, where)


def check_messages(rows: Iterable[tuple[Any, str]]) -> None:
    """Refuse rows that cannot be read, whatever the tokenizer; each comes with its place."""

    def check(row: Any, where: str) -> None:
        kind = format_of(row)
        if kind is None:
            text_of(row, where)
        else:
            _read(row, kind, where)

    of_every_row(rows, check)


def _read(row: Mapping[str, Any], kind: str, where: str) -> Conversation | Dialogue:
    columns = Columns(row, where)
    if kind in FORMATS[:2]:
        return _turns(columns, kind)
    if kind == FORMATS[3]:
        return _instruction(columns)
    return _completion(columns, "chosen" if kind == FORMATS[4] else "completion", kind)


def _turns(columns: Columns, kind: str) -> Conversation:
    name = columns.first(TURNS) or kind
    turns = _messages(columns.take(name), name, columns.where)
    if columns.row.get("chosen") is not None:
        columns.take("rejected")
    return _conversation(columns, turns, kind)


def _completion(columns: Columns, answer: str, kind: str) -> Conversation | Dialogue:
    """A prompt and what follows it; of a preference pair the chosen answer."""
    where = columns.where
    _check_label(columns, LABELS)
    said = messages_cell(columns.take(answer), f"The column {answer} in {where}")
    asked = messages_cell(columns.take("prompt"), f"The column prompt in {where}")
    other = messages_cell(columns.take("rejected"), f"The column rejected in {where}") if answer == "chosen" else None
    if said is None or (answer == "completion" and asked is None):
        empty = answer if said is None else "prompt"
        raise InvalidInput(f"The {empty} in {where} is empty (null).", "A prompt and its answer are needed.", "Drop the row.")
    if not isinstance(said, (list, tuple)) and not isinstance(asked, (list, tuple)):
        if asked is None:
            problem = f"{where[:1].upper()}{where[1:]} has the prompt within chosen and rejected, as text."
            raise InvalidInput(
                problem, "Where a prompt ends cannot be told from text.", "Give the prompt in a column of its own."
            )
        question, text = text_cell(asked, f"The prompt in {where}"), text_cell(said, f"The {answer} in {where}")
        columns.finish(f"{kind} as text", question, text)
        return _answered(question, text, where)
    prompt = _messages(asked, "prompt", where, "user") if not is_empty(asked) else _Turns()
    whole = _messages(said, answer, where, "assistant")
    size = len(prompt.messages)
    if whole.messages[:size] != prompt.messages:  # chosen and rejected may hold the prompt too
        silent = frozenset(i + size for i in whole.silent)
        whole = _Turns([*prompt.messages, *whole.messages], silent, prompt.nulls or whole.nulls)
    if not size and not is_empty(other):
        pairs = zip(whole.messages, _messages(other, "rejected", where, "assistant").messages, strict=False)
        size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if size == len(whole.messages):
            raise InvalidInput(f"chosen and rejected in {where} are equal.", "The chosen answer is learned.", "Drop the row.")
    return _conversation(columns, whole, kind, first=size)


def _check_label(columns: Columns, names: Sequence[str]) -> None:
    """Refuse an answer that a row of unpaired preferences calls undesirable."""
    for name in names:
        value = columns.take(name)
        if value is not None and value not in (True, False):
            problem = f"The column {name} in {columns.where} is {value!r:.40}."
            raise InvalidInput(
                problem, "Beside a completion it is true or false.", "Use --task for rows with a label, or drop the column."
            )
        if value is not None and not value:
            problem = f"The completion in {columns.where} is an undesirable one: {name} is false."
            raise InvalidInput(problem, "Every completion that is read is learned.", "Drop the rows with false.")


def _instruction(columns: Columns) -> Conversation:
    """A question, what belongs to it, and its answer (Alpaca, and the names that other data have for the same)."""
    where = columns.where
    _check_label(columns, LABELS[1:])
    asking, answering = str(columns.first(QUESTIONS)), str(columns.first(ANSWERS))
    asked, said = columns.text(asking), columns.text(answering)
    details_column = next((n for n in GIVEN if n != asking and not is_empty(columns.row.get(n))), None)
    details = columns.text(details_column) if details_column else ""
    if not said.strip():
        raise InvalidInput(f"The {answering} in {where} is empty.", "Every row needs a text to learn.", "Drop the row.")
    if not asked.strip() and not details.strip():
        raise InvalidInput(f"The {asking} in {where} is empty.", "An answer needs a question.", "Drop the row.")
    question = "\n".join(text for text in (asked, details) if text)
    past = [m for pair in _history(columns) for m in pair]
    messages = [*past, {"role": "user", "content": question}, {"role": "assistant", "content": said}]
    header = _HEADER_INPUT if details and asked else _HEADER
    middle = f"\n\n### Input:\n{details}" if details and asked else ""
    text = f"{header}\n\n### Instruction:\n{asked or details}{middle}\n\n### Response:\n"
    simple = not past and all(
        is_empty(columns.row.get(name)) for name in (*SYSTEM, "tools", "functions", "chat_template_kwargs")
    )
    plain = _answered(text, said, where) if simple else None
    return _conversation(columns, _Turns(messages), f"{asking} and {answering}", plain=plain)


def _history(columns: Columns) -> list[list[Message]]:
    """Earlier questions and answers (LLaMA-Factory); their answers are learned too, as there."""
    where = f"The column history in {columns.where}"
    pairs = json_cell(columns.take("history"), where) or []
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(p, (list, tuple)) and len(p) == 2 and all(isinstance(t, str) for t in p) for p in pairs
    ):
        raise InvalidInput(
            f"{where} is {pairs!r:.60}.", "It is a list of pairs: question and answer.", "Correct or drop the row."
        )
    return [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]


def _answered(prompt: str, answer: str, where: str) -> Dialogue:
    if not answer.strip():
        raise InvalidInput(f"An answer in {where} is empty.", "Every row needs a text to learn.", "Drop the row.")
    text = prompt + answer
    return Dialogue(text, ((len(prompt), len(text)),), special=True, ended=True)


def _conversation(columns: Columns, turns: _Turns, kind: str, *, first: int = 0, plain: Dialogue | None = None) -> Conversation:
    """Messages with what other columns say about them."""
    where, messages, silent = columns.where, turns.messages, turns.silent
    system = next((s for s in map(columns.take, SYSTEM) if not is_empty(s)), None)
    if system is not None:
        system_message = {"role": "system", "content": text_cell(system, f"The column system in {where}")}
        if messages[0]["role"] != "system":
            messages, first, silent = [system_message, *messages], first + (first > 0), frozenset(i + 1 for i in silent)
        elif messages[0] != system_message:
            both = f"A conversation in {where} has a system message and another text in the column system."
            raise InvalidInput(both, "It has one system prompt.", "Drop one of them.")
    tools = [t for name in ("tools", "functions") for t in _tools(columns.take(name), f"The column {name} in {where}")]
    options = _options(columns.take("chat_template_kwargs"), f"The column chat_template_kwargs in {where}")
    columns.finish(kind, *(text for m in messages for text in strings(m, roles=False)))
    notes = (_NULLS,) if turns.nulls else ()
    return Conversation(messages, first=first, silent=silent, tools=tools, options=options, plain=plain, notes=notes)


def _tools(value: Any, where: str) -> list[Message]:
    """Tools as chat templates want them; a list of those, or the same as JSON text."""
    value = json_cell(value, where)
    if is_empty(value):
        return []
    parsed = [json_cell(tool, where) for tool in value] if isinstance(value, (list, tuple)) else [None]
    if not all(isinstance(t, Mapping) and isinstance(t.get("function") or t, Mapping) for t in parsed):
        raise InvalidInput(f"{where} is {value!r:.60}.", "It is a list of tools, each an object.", "Correct or drop the row.")
    tools = [without_nulls(t) for t in parsed]
    tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    if not all(isinstance(t["function"].get("name"), str) for t in tools):
        raise InvalidInput(f"{where} has a tool without a name.", "Every tool has one.", "Correct or drop the row.")
    return tools


def _options(value: Any, where: str) -> dict[str, Any]:
    """Arguments of the chat template."""
    options = json_cell(value, where) or {}
    if not isinstance(options, Mapping) or not _RESERVED.isdisjoint(options):
        known = f"It is an object with arguments of the chat template; none is {', '.join(sorted(_RESERVED)[:3])}, ..."
        raise InvalidInput(f"{where} is {value!r:.60}.", known, "Correct or drop the row.")
    return {name: without_nulls(v) for name, v in options.items() if v is not None}


def _messages(turns: Any, name: str, where: str, role: str = "") -> _Turns:
    """Messages with ``role`` and ``content``; a bare text is one of ``role``."""
    if role and isinstance(turns, str):
        return _Turns([{"role": role, "content": turns}])
    turns = json_cell(turns, f"The column {name} in {where}")
    if not isinstance(turns, (list, tuple)) or not turns:
        problem = f"The column {name} in {where} is {'empty' if is_empty(turns) else f'{turns!r:.40}'}."
        raise InvalidInput(problem, "It is a list of messages, or one as JSON text.", "Correct or drop the row.")
    parsed = [_message(turn, f"Message {number} in {where}") for number, turn in enumerate(turns, 1)]
    silent = frozenset(i for i, (_, learned, _) in enumerate(parsed) if not learned)
    return _Turns([m for m, _, _ in parsed], silent, any(nulls for _, _, nulls in parsed))


def _message(turn: Any, where: str) -> tuple[Message, bool, bool]:
    """One message, whether its row lets it be learned, and whether an argument of a call was null."""
    if not isinstance(turn, Mapping):
        problem = f"{where} is {turn!r:.40}."
        raise InvalidInput(problem, "A message has role and content (or from and value).", "Correct or drop the row.")
    keys = {name: value for name, value in lowered(turn, where).items() if not is_empty(value) or isinstance(value, str)}
    role = str(_part(keys, ("role", "from"), turn, where)).strip()
    role = role.lower() if role.lower() in (*_KNOWN, *_ROLES) else role
    role = _ROLES.get(role, role)
    learned = _learned(keys, role, where)
    thoughts = {text for name in _THOUGHTS if (text := text_cell(keys.pop(name, None), f"{name} of {where}"))}
    if len(thoughts) > 1:
        raise InvalidInput(f"{where} has two thoughts: {', '.join(_THOUGHTS)} differ.", "It has one.", "Drop one of them.")
    calls, nulls = _calls(keys.pop("tool_calls", None), keys.pop("function_call", None), where)
    if role != "assistant" and (thoughts or calls):
        raise InvalidInput(
            f"{where} is of {role} and has a call or a thought.", "Those are the assistant's.", "Correct the role."
        )
    bare = bool(calls or thoughts) and all(keys.get(name) is None for name in ("content", "value"))
    content = "" if bare else _content(_part(keys, ("content", "value"), turn, where), where)
    message = {n: v for n, v in keys.items() if n not in ("role", "from", "content", "value", *_FLAGS) and not is_empty(v)}
    message.update(role=role, content=content, **({"tool_calls": calls} if calls else {}))
    return message | ({"reasoning_content": thoughts.pop()} if thoughts else {}), learned, nulls


def _part(keys: Mapping[str, Any], names: tuple[str, str], turn: Mapping[str, Any], where: str) -> Any:
    """Role or content of a message under either of its names."""
    values = [keys[name] for name in names if keys.get(name) is not None]
    if values:
        return values[0]
    known = "A message has role and content (or from and value)."
    if any(str(name).strip().lower() in names for name in turn):
        raise InvalidInput(f"{where} has an empty {names[0]} (null).", known, "Drop the row, or write what is missing.")
    problem = f"{where} has no {names[0]}: its keys are {', '.join(map(str, turn)) or 'none'}."
    raise InvalidInput(problem, known, suggestion(turn, ("role", "content", "from", "value")) or "Correct or drop the row.")


def _content(value: Any, where: str) -> str:
    """The content as text; parts of text are joined, as chat templates join them."""
    if not isinstance(value, (list, tuple)):
        return text_cell(value, f"The content of {where[:1].lower()}{where[1:]}")
    parts = [{"type": "text", "text": p} if isinstance(p, str) else without_nulls(p) for p in value]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            problem = (
                f"{where} has a part of the type {kind!r}."
                if isinstance(part, Mapping)
                else f"{where} has the part {part!r:.40}."
            )
            raise InvalidInput(problem, "Only parts of text are read: type text and text.", "Drop rows with other parts.")
        if more := [name for name in part if name not in ("type", "text", "cache_control", "annotations", "index", "id")]:
            raise InvalidInput(f"{where} has a part with {', '.join(more)}.", "A part has type and text.", "Drop those keys.")
    return whole_text("".join(part["text"] for part in parts), f"The content of {where[:1].lower()}{where[1:]}")


def _learned(keys: Mapping[str, Any], role: str, where: str) -> bool:
    """Whether a turn is learned, by the keys that say so (OpenAI's ``weight``, axolotl's ``train`` and ``training``)."""
    for name in _FLAGS:
        value = keys.get(name)
        if value is not None and value not in (0, 1):
            problem = f"{where} has the {name} {value!r:.40}."
            raise InvalidInput(problem, "A turn is learned (1) or not (0).", "Use 0 or 1, or drop the key.")
        if value and role not in ("assistant", "function_call"):
            problem = f"{where} is of {role}, and {name} says that it is learned."
            raise InvalidInput(problem, "Turns of the assistant are learned; --on-prompt learns all.", "Drop the key.")
    return all(keys.get(name) in (None, 1) for name in _FLAGS)


def _calls(value: Any, single: Any, where: str) -> tuple[list[Message], bool]:
    """Calls of tools as chat templates want them (the arguments are an object), and whether an argument was null."""
    where = f"tool_calls of {where[:1].lower()}{where[1:]}"
    calls = json_cell(value, where) or []
    if not isinstance(calls, (list, tuple)):
        raise InvalidInput(f"The {where} are {calls!r:.60}.", "They are a list of calls.", "Correct or drop the row.")
    made = [_call(call, where) for call in (calls if is_empty(single) else [*calls, {"function": single}])]
    return [call for call, _ in made], any(nulls for _, nulls in made)


def _call(call: Any, where: str) -> tuple[Message, bool]:
    """One call with its name and its arguments, which may be JSON text."""
    call = json_cell(call, where)
    function = json_cell(call.get("function") or call, where) if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    raw_arguments = function.get("arguments", function.get("parameters"))
    arguments = json_cell({} if raw_arguments is None else raw_arguments, f"The arguments in {where}")
    name = function.get("name")
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        problem = f"The {where} are {call!r:.60}."
        raise InvalidInput(problem, "A call has a name, and arguments (an object).", "Correct or drop the row.")
    kept = arguments if isinstance(raw_arguments, str) else without_nulls(arguments)
    outer = {k: v for k, v in call.items() if k == "id" and v is not None}
    return {**outer, "type": "function", "function": {"name": name, "arguments": dict(kept)}}, kept != arguments


def _named(messages: Sequence[Message], template: str, where: str) -> list[Message]:
    """Messages under the roles that a chat template names; one that no template could know is refused, and so is such a key."""

    def knows(word: str) -> bool:
        return re.search(rf"""['"]{re.escape(word)}['"]""", template) is not None

    named = []
    for number, message in enumerate(messages, 1):
        role, here = message["role"], f"Message {number} in {where}"
        if role not in _KNOWN and not knows(role):
            known = f"Known roles are {', '.join(_KNOWN[:4])}, ..."
            raise InvalidInput(f"{here} has the role {role!r}.", known, suggestion([role], (*_KNOWN, *_ROLES)) or "Correct it.")
        unknown = [
            n for n in message if n not in _KEYS and not is_harmless_key(n) and not re.search(rf"\b{re.escape(n)}\b", template)
        ]
        if unknown:
            problem = f"{here} has the key{'s' * (len(unknown) > 1)} {', '.join(unknown)}."
            known = "Keys are read by name, or are ids, dates and metadata, or the chat template names them."
            raise InvalidInput(problem, known, suggestion(unknown, (*_KEYS, *_THOUGHTS, *_FLAGS)) or "Drop the key.")
        if role == "function_call" and not knows(role):
            calls = json_cell(message["content"], f"The function_call of {here[:1].lower()}{here[1:]}")
            called, _ = _calls(calls if isinstance(calls, list) else [calls], None, here)
            message = {**message, "role": "assistant", "content": "", "tool_calls": called}
        named.append({**message, "role": _USUAL[role] if role in _USUAL and not knows(role) else message["role"]})
    return named
