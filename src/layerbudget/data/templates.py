"""Conversations as a chat template writes them: the text, which characters are learned, and what was left out.

A template that marks its answers (``{% generation %}``) is believed. Of any other, every text of the conversation is written
once more with a mark before and behind it: characters that no text has. Where the marks change nothing else, they show where
the template puts a text, and a text without its marks is one that it leaves out. The answer's turn, with its thought and its
calls, begins behind the words that name the speaker. It ends with what the template writes behind it if nothing follows, as
far as that stands here too, and at least with a special token that stands directly behind it. The mean loss is taken on those:

    L = -(1/N) sum over learned tokens t of log p(t | what stands before it)
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from ..errors import InvalidInput
from .columns import strings

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Spans = tuple[tuple[int, int], ...]
_PLANES = (0xF0000, 0x100000)  # two planes for private use: marks are of the one that the text does not use
_GENERATION = re.compile(r"{%-?\s*generation\b")
_TODAY = datetime.datetime(2024, 7, 26)  # the date that Llama's templates write where they are given none
_HEADINGS = (  # where a tokenizer has no template; the stop of a last answer follows the text
    "{% for m in messages %}{% set said = m.content | string %}{{ '### ' + m.role | capitalize + ':\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ said }}"
    "{{ '' if loop.last or said.endswith(eos_token or '') else eos_token }}{% endgeneration %}"
    "{% else %}{{ said }}{% endif %}{{ '' if loop.last else '\n\n' }}{% endfor %}"
)


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A text with the spans that are learned."""

    text: str
    learned: Spans  #: (start, end) of the answers, in characters
    special: bool  #: whether the tokenizer adds its own beginning (a chat template has written everything already)
    ended: bool  #: whether an end-of-text token follows the text (a template has its own)
    notes: tuple[str, ...] = ()  #: what was left out or changed, to be said once with the number of rows


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, and what else a row says about them."""

    messages: list[Message]
    first: int = 0  #: the messages before it are a prompt
    silent: frozenset[int] = frozenset()  #: turns of the assistant that are not learned
    tools: list[Message] = dataclasses.field(default_factory=list)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  #: further arguments of the chat template
    plain: Dialogue | None = None  #: what is read instead where there is no chat template
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Writer:
    """A chat template with everything that it is given beside the messages."""

    tokenizer: Any
    template: str
    tools: Sequence[Message] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: bool = False  # contents are lists of parts, as templates of models with images want them
    json: bool = False  # arguments of calls are JSON text

    def __call__(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, **more: Any) -> str:
        made = self.tokenizer.apply_chat_template(
            self._adapted(messages),
            chat_template=self.template,
            tools=list(self.tools if tools is None else tools) or None,
            tokenize=False,
            **{**self.options, **more},
        )
        return str(made)

    def generated(self, messages: Sequence[Message]) -> Spans:
        """The spans that a template marks itself."""
        from transformers.utils.chat_template_utils import render_jinja_template

        made: Any = render_jinja_template(
            [self._adapted(messages)],
            tools=list(self.tools) or None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.options},
        )
        return tuple((int(low), int(high)) for low, high in made[1][0])

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        adapted = []
        for message in messages:
            changed = dict(message)
            if self.parts:
                changed["content"] = [{"type": "text", "text": message["content"]}]
            if self.json and "tool_calls" in message:
                changed["tool_calls"] = [
                    _with(c, "arguments", json.dumps(c["function"]["arguments"])) for c in message["tool_calls"]
                ]
            if "reasoning_content" in message:
                changed["thinking"] = message["reasoning_content"]
            adapted.append(changed)
        return adapted


def _with(call: Message, key: str, value: Any) -> Message:
    return {**call, "function": {**call["function"], key: value}}


def template_of(tokenizer: Any, tools: Sequence[Message]) -> str:
    """The chat template of a tokenizer, with a fixed date; headings where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        _say_once("The tokenizer has no chat template: turns are written under headings (### User:, ### Assistant:).")
        return _HEADINGS
    try:
        return _dated(str(tokenizer.get_chat_template(tools=list(tools) or None)))
    except InvalidInput:
        raise
    except ValueError as error:  # several templates by name, and none of them is the default
        problem = f"The tokenizer does not say which chat template is meant: {str(error).partition('.')[0]}."
        raise InvalidInput(problem, "One is named default.", "Set tokenizer.chat_template, and save the tokenizer.") from error


@functools.lru_cache(maxsize=8)
def _dated(template: str) -> str:
    """A template that writes the same date on all days, so that rows are the same tokens whenever they are read."""
    called = r"""strftime_now\(\s*(['"])(.*?)\1\s*\)"""
    dated = re.sub(called, lambda m: f"{m[1]}{_TODAY.strftime(m[2])}{m[1]}", template)
    if "strftime_now(" in dated:
        problem = "The chat template asks for today's date in a form that is not known."
        raise InvalidInput(problem, 'A form is a text, as in strftime_now("%d %b %Y").', "Write such a form into the template.")
    if dated != template:
        _say_once(f"The chat template writes today's date: {_TODAY:%d %b %Y} is read in its place, on every day.")
    return dated


@functools.cache
def _say_once(text: str) -> None:
    """Once, not for every row."""
    logger.warning("%s", text)


def written(conversation: Conversation, template: str, tokenizer: Any, where: str) -> Dialogue:
    """A conversation as ``template`` writes it; the assistant's turns are learned, where the row does not say otherwise.

    Raises:
        InvalidInput: No answer, or something that the template refuses, hides or leaves out.
    """
    messages = conversation.messages
    turns = [i for i, m in enumerate(messages) if i >= conversation.first and m["role"] == "assistant"]
    learned = [i for i in turns if i not in conversation.silent]
    if not any(_says(messages[i]) for i in learned):
        why = " that is learned: all have weight 0 or train false" if turns and not learned else ""
        raise InvalidInput(
            f"A conversation in {where} has no answer{why}.", "One turn at least is the assistant's.", "Drop it."
        )
    write, text, marks = _best(_Writer(tokenizer, template, conversation.tools, conversation.options), messages, where)
    notes = [*conversation.notes, *_left_out(marks, messages, text, where, headed=template is _HEADINGS)]
    for name in conversation.options:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            notes.append(f"the chat template has no argument {name}, which chat_template_kwargs gives")
    spans = _spans(conversation, turns, text, marks, write, where)
    if template is _HEADINGS:
        return Dialogue(text, spans, special=True, ended=learned[-1] == len(messages) - 1, notes=tuple(notes))
    return Dialogue(text, spans, special=False, ended=False, notes=tuple(notes))


def _says(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A text of a conversation: of which message it is (-1: of the tools), what of it, and itself."""

    turn: int
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class _Marks:
    """The same conversation with marks around its texts, and where they stand in the text without them."""

    messages: list[Message]
    leaves: tuple[_Leaf, ...] = ()
    places: Mapping[int, int] = dataclasses.field(default_factory=dict)  # of marks 2n and 2n + 1 of leaf n
    plane: int = _PLANES[0]

    def lost(self) -> Iterator[_Leaf]:
        """The texts that are not written."""
        return (leaf for n, leaf in enumerate(self.leaves) if leaf.text.strip() and not {2 * n, 2 * n + 1} & set(self.places))

    def between(self, start: int, stop: int) -> list[tuple[_Leaf, int]]:
        """The texts that begin from ``start`` on and before ``stop``, with their places."""
        places = ((leaf, self.places.get(2 * n, -1)) for n, leaf in enumerate(self.leaves))
        return [(leaf, place) for leaf, place in places if start <= place < stop]

    def of_turn(self, turn: int) -> tuple[list[int], list[int]]:
        """The marks before and behind the texts of a turn that are written and have one place."""
        numbers = [n for n, leaf in enumerate(self.leaves) if leaf.turn == turn]
        return [2 * n for n in numbers if self.places.get(2 * n, -1) >= 0], [
            2 * n + 1 for n in numbers if self.places.get(2 * n + 1, -1) >= 0
        ]


def _best(write: _Writer, messages: list[Message], where: str) -> tuple[_Writer, str, _Marks]:
    """The way to give the messages to a template that loses nothing; else the usual one, with what it loses."""
    ways = [write]
    if re.search(r"\btype\b", write.template):
        ways.append(dataclasses.replace(write, parts=True))
    if any("tool_calls" in m for m in messages):
        ways.append(dataclasses.replace(write, json=True))
    usable: list[tuple[int, tuple[_Writer, str, _Marks]]] = []
    refused: Exception | None = None
    for way in ways:
        try:
            text = way(messages)
            made = way, text, _marked(way, messages, text)
        except (jinja2.TemplateError, TypeError) as error:
            refused = refused or error
            continue
        losses = len(list(_losses(made[2], messages, text)))
        if not losses:
            return made
        usable.append((losses, made))
    if not usable:
        said = str(refused).rstrip(".")
        problem = f"The chat template refuses a conversation in {where}: {said}."
        raise InvalidInput(problem, "", "Correct the roles, or drop the row.") from refused
    return min(usable, key=lambda way: way[0])[1]


@functools.cache
def _marks(plane: int) -> re.Pattern[str]:
    return re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]")


def _marked(write: _Writer, messages: list[Message], text: str) -> _Marks:
    """The messages with marks, where those change nothing else of what is written.

    Marks go around all of a text; where the template trims texts, inside their outer spaces; where it looks whether one is
    empty, around none that is. Where it looks into other texts, only the assistant's are marked.
    """
    plane = next((p for p in _PLANES if not _marks(p).search(text)), None)
    if plane is None:
        return _Marks(messages)
    for every in (True, False):
        for inside, empty in ((False, True), (True, True), (False, False), (True, False)):
            leaves: list[_Leaf] = []
            mark = functools.partial(_mark, leaves, plane)
            tools = (
                [_with(t, "name", mark(-1, "tool", t["function"]["name"])) for t in write.tools] if every else list(write.tools)
            )
            marked = [_marked_message(mark, i, m, inside, empty, every) for i, m in enumerate(messages)]
            made = write(marked, tools=tools)
            if _marks(plane).sub("", made) == text:
                places: dict[int, int] = {}
                for k, match in enumerate(_marks(plane).finditer(made)):
                    number = ord(match.group()) - plane
                    once = number not in places or leaves[number // 2].kind not in ("content", "thought")
                    places[number] = places.get(number, match.start() - k) if once else -1  # twice: it has no one place
                return _Marks(marked, tuple(leaves), places, plane)
    return _Marks(messages)


def _mark(leaves: list[_Leaf], plane: int, turn: int, kind: str, text: str, inside: bool = False) -> str:
    core = text.strip() if inside else text
    front, back = text.split(core, 1) if core else ("", "")
    leaves.append(_Leaf(turn, kind, text))
    low = plane + 2 * (len(leaves) - 1)
    return f"{front}{chr(low)}{core}{chr(low + 1)}{back}"


def _marked_message(mark: Any, i: int, message: Message, inside: bool, empty: bool, every: bool) -> Message:
    answer = message["role"] == "assistant"
    marked = dict(message)
    if "reasoning_content" in message:
        marked["reasoning_content"] = mark(i, "thought", message["reasoning_content"], True)
    if (answer or every) and (
        message["content"] or (empty and "tool_calls" not in message and "reasoning_content" not in message)
    ):
        marked["content"] = mark(i, "content", message["content"], inside)
    if "tool_calls" in message:
        marked["tool_calls"] = [_with(c, "name", mark(i, "call", c["function"]["name"])) for c in message["tool_calls"]]
    if every and isinstance(message.get("name"), str) and message["role"] in ("system", "user", "assistant"):
        marked["name"] = mark(i, "name", message["name"])
    return marked


def _losses(marks: _Marks, messages: Sequence[Message], text: str) -> Iterator[_Leaf]:
    """The texts, or lines of texts, that are not written."""
    yield from marks.lost()
    gone = {(leaf.turn, leaf.kind) for leaf in marks.lost()}
    for i, message in enumerate(messages):
        thought, _, rest = message["content"].rpartition("</think>")
        texts = [("thought", thought), ("thought", message.get("reasoning_content", "")), ("content", rest)]
        texts += [("call", t) for c in message.get("tool_calls", ()) for t in strings(c["function"]["arguments"])]
        for kind, said in texts:
            if (i, kind) not in gone and (line := _line_lost(said, text)):
                yield _Leaf(i, kind, line)


def _line_lost(said: str, text: str) -> str:
    """The first line of a text that is not written, as it is or within JSON."""
    if said.strip() in text:
        return ""
    lines = (part.strip() for part in re.split(r"\n|</?think>", said))
    return next(
        (x for x in lines if x not in text and not any(json.dumps(x, ensure_ascii=a)[1:-1] in text for a in (False, True))), ""
    )


_NAMES = {"thought": "the thought", "call": "a call", "name": "the name", "content": "the content"}
_BY_DESIGN = {
    "thought": "the chat template leaves out thoughts of earlier answers, as it does for a model in use: they are not learned",
    "content": "the chat template leaves out words beside an earlier call, as it does for a model in use: they are not learned",
    "name": "the chat template leaves out the names of speakers",
}


def _left_out(marks: _Marks, messages: Sequence[Message], text: str, where: str, *, headed: bool) -> list[str]:
    """Return notes on texts that are not written and need not be; any other one is a reason to refuse the row."""
    notes = set()
    for leaf in _losses(marks, messages, text):
        later = any(m["role"] in ("user", "assistant") for m in messages[leaf.turn + 1 :])
        next_to_call = leaf.kind == "content" and leaf.turn >= 0 and "tool_calls" in messages[leaf.turn]
        if leaf.kind == "name" or (later and leaf.turn >= 0 and (leaf.kind == "thought" or next_to_call)):
            notes.add(_BY_DESIGN[leaf.kind])
            continue
        who = "The tokenizer has no chat template, and the headings leave" if headed else "The chat template leaves"
        what = (
            "the tools" if leaf.turn < 0 else f"{_NAMES[leaf.kind]} of message {leaf.turn + 1} ({messages[leaf.turn]['role']})"
        )
        remedy = "Take a tokenizer whose template writes it, or give the rows as prompt and completion, both as text."
        if leaf.kind == "thought":
            hint = "trl.chat_template_utils.get_training_chat_template has one for many models"
            remedy = f"Give the tokenizer a template that keeps it ({hint}), or drop the thoughts from the rows."
        raise InvalidInput(f"{who} out {what} in {where}: {leaf.text.strip():.40}", "What is left out is not learned.", remedy)
    return sorted(notes)


def _spans(conversation: Conversation, turns: Sequence[int], text: str, marks: _Marks, write: _Writer, where: str) -> Spans:
    """``(start, end)`` of every answer that is learned, with its thought, its calls and its stop, in characters.

    After a prompt, the first answer follows what is given for generation: what that prompt already holds of the answer (an
    empty thought, say) is not learned. Otherwise every answer begins behind the words that name the speaker.
    """
    spans: Spans = ()
    prompted = conversation.first > 0
    if _GENERATION.search(write.template) and (write.template is _HEADINGS or not prompted):
        spans = write.generated(conversation.messages)
    if write.template is _HEADINGS:
        span_of = dict(zip((i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"), spans, strict=True))
        return tuple(span_of[i] for i in turns if i not in conversation.silent)
    if not spans:
        by_turn = _as_marks_show(conversation.messages, turns, text, marks, write, where, prompted)
        return tuple(span for i, span in by_turn.items() if i not in conversation.silent)
    for i in conversation.silent:
        if _says(conversation.messages[i]) and not marks.of_turn(i)[0]:
            raise _hidden(i, where)
    owners = [max(marks.between(0, high), key=lambda leaf_and_place: leaf_and_place[1], default=None) for _, high in spans]
    return tuple(span for span, last in zip(spans, owners, strict=True) if not last or last[0].turn not in conversation.silent)


def _hidden(turn: int, where: str) -> InvalidInput:
    return InvalidInput(
        f"The chat template writes turn {turn + 1} of a conversation in {where} so that it cannot be found.",
        "Templates that drop or change an answer hide which tokens it is.",
        "Give the data as prompt and completion, both as text.",
    )


def _as_marks_show(
    messages: list[Message], turns: Sequence[int], text: str, marks: _Marks, write: _Writer, where: str, prompted: bool
) -> dict[int, tuple[int, int]]:
    """Where the turns of the assistant stand; one that is left out because it is empty has no place."""
    header, special = _manner(write.tokenizer, write.template, write.parts, len(write.tokenizer))
    spans: dict[int, tuple[int, int]] = {}
    since = 0
    for i in turns:
        lows, highs = marks.of_turn(i)
        if not highs:
            if not _says(messages[i]):
                continue
            raise _hidden(i, where)
        low = min((marks.places[n] for n in lows), default=None) if len(lows) >= len(highs) else None
        last_mark = max(highs, key=lambda n: marks.places[n])
        high = marks.places[last_mark]
        prompt = write(messages[:i], add_generation_prompt=True) if prompted and not spans else ""
        head, first = text[: high if low is None else low], low
        if lows and marks.leaves[min(lows) // 2].kind == "call" and not (header and header in head[since:]):
            first = _without(write, messages[:i], text, since, low)  # what opens a call is written by the model
        start = _start(head, first, since, prompt, header)
        if start is None:
            raise _hidden(i, where)
        last = i == len(messages) - 1
        stop = len(text) if last else high + _stop(text[high:], marks, i, last_mark, write, special)
        inside = [leaf.turn for leaf, place in marks.between(start, stop) if leaf.turn != i]
        if inside:
            problem = f"The chat template writes message {inside[0] + 1} within message {i + 1} in {where}."
            raise InvalidInput(
                problem, "What another one says is not learned.", "Drop the words beside the call, or drop the row."
            )
        spans[i], since = (start, stop), stop
    return spans


def _without(write: _Writer, before: list[Message], text: str, since: int, low: int | None) -> int | None:
    """Where a turn begins that no words announce: behind the same conversation without it."""
    try:
        shared = len(os.path.commonprefix([write(before), text]))
    except (jinja2.TemplateError, TypeError):
        return low
    return shared if low is not None and since <= shared <= low else low


def _start(head: str, low: int | None, since: int, prompt: str, header: str) -> int | None:
    """Where an answer begins, given the text in front of it; ``low``: its first own character, where that is known."""
    if prompt and head.startswith(prompt):
        return len(prompt)
    named = head.rfind(header, since) if header else -1
    return named + len(header) if named >= 0 else low


def _stop(tail: str, marks: _Marks, turn: int, mark: int, write: _Writer, special: str) -> int:
    """How many characters behind an answer still belong to its turn."""
    try:
        alone = write(marks.messages[: turn + 1])
    except (jinja2.TemplateError, TypeError):  # a template that wants a question first
        alone = write([{"role": "user", "content": "?"}, marks.messages[turn]])
    after = _marks(marks.plane).sub("", alone.partition(chr(marks.plane + mark))[2])
    shared = _shared(tail, after, special)
    stopped = shared < len(after) or re.search(rf"(?:{special})\s*\Z", after)  # else the next turn writes the stop
    direct = re.compile(rf"\s*(?:{special})").match(tail, 0 if stopped else shared)
    return max(shared, direct.end() if direct else 0)


def _shared(text: str, other: str, special: str) -> int:
    """Length of the beginning that two texts share; where both go on, it ends with a special token or a space."""
    shared = len(os.path.commonprefix([text, other]))
    if shared == len(other):
        return shared
    return max((m.end() for m in re.finditer(rf"{special}|\s", text) if m.end() <= shared), default=0)


@functools.lru_cache(maxsize=8)
def _manner(tokenizer: Any, template: str, parts: bool, size: int) -> tuple[str, str]:
    """How a template writes around answers: the words that name the speaker, and what matches a special token.

    ``size`` is a key: a tokenizer with more tokens is looked at again. The words that name the speaker stand between a
    question and its answer, and in the prompt for one, and are no part of the question's end. A thought that the prompt opens
    is the answer's.
    """
    words = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
    special = "|".join(re.escape(w) for w in words if w) or r"(?!)"
    first, second, third = (chr(_PLANES[0] + k) for k in range(3))
    asked, said, again = ({"role": r, "content": c} for r, c in (("user", first), ("assistant", second), ("user", third)))
    write = _Writer(tokenizer, template, parts=parts)
    try:
        prompt, alone = (write([asked], add_generation_prompt=on).partition(first)[2] for on in (True, False))
        written = write([asked, said, again]).partition(first)[2].partition(second)[0]
    except (jinja2.TemplateError, TypeError):
        return "", special
    lead = os.path.commonprefix([prompt, written])
    return lead[_shared(lead, alone, special) :].partition("<think>")[0], special


def said_of_rows(dialogues: Iterable[Dialogue]) -> None:
    """Say what was left out of rows, each once with their number."""
    rows = list(dialogues)
    for note, count in collections.Counter(note for row in rows for note in set(row.notes)).items():
        logger.warning("In %d of %d rows %s.", count, len(rows), note)
