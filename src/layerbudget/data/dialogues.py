"""Conversations and instructions in one form: prompts and answers, and which characters are learned.

Four formats are known by their columns: ``messages`` (roles and contents), ``conversations`` (ShareGPT: ``from`` and
``value``), ``prompt`` and ``completion`` (texts or messages), ``instruction``, ``input`` and ``output`` (Alpaca). Messages are
written with the tokenizer's own chat template, as TRL does; without one, as headed paragraphs, and that is said. Each becomes
a :class:`Dialogue`: a text and the spans of it that are answers. The mean loss is taken on those:

    L = -(1/N) sum over learned tokens t of log p(t | what stands before it)

A template that marks its answers (``{% generation %}``) is believed. Of any other, every answer is written once more with a
mark before and behind it: characters that no text has. Where the marks change nothing else, they show the answer wherever the
template puts it. The answer's turn begins behind the words that name the speaker. It ends with what the template writes behind
it if nothing follows, as far as that stands here too, and at least with a special token that stands directly behind it.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from ..errors import InvalidInput

logger = logging.getLogger(__name__)

_Message = dict[str, Any]
_Spans = tuple[tuple[int, int], ...]
_MARK = 0xF0000  # the first character of a plane for private use
_MARKS = re.compile("[\U000f0000-\U000ffffd]")
FORMATS = ("messages", "conversations", "prompt and completion", "instruction and output")
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text")
_KNOWN = ("system", "user", "assistant", "tool", "function", "developer", "ipython", "observation", "function_call")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant"}
_HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_HEADER_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
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
    learned: _Spans  #: (start, end) of the answers, in characters
    special: bool  #: whether the tokenizer adds its own beginning (a chat template has written everything already)
    ended: bool  #: whether an end-of-text token follows the text (a template has its own)


def format_of(row: Any) -> str | None:
    """Which of ``FORMATS`` a row has; ``None`` for plain text.

    >>> format_of({"prompt": "2 + 2 =", "completion": " 4"}), format_of({"text": "four"})
    ('prompt and completion', None)
    """
    if not isinstance(row, Mapping):
        return None
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), (list, tuple)):
            return name
    if "prompt" in row and "completion" in row:
        return FORMATS[2]
    return FORMATS[3] if "instruction" in row and "output" in row else None


def dialogue(row: Mapping[str, Any], kind: str, tokenizer: Any, where: str = "the data") -> Dialogue:
    """Text of one row of a format (:func:`format_of`) and its learned spans; the tokenizer's chat template writes messages."""
    try:
        if kind in ("messages", "conversations"):
            return _written(_messages(row[kind], where), tokenizer, where)
        if kind == FORMATS[2]:
            return _completion(row["prompt"], row["completion"], tokenizer, where)
        return _instruction(row, tokenizer, where)
    except (KeyError, TypeError, AttributeError) as error:
        told = f"There is no {kind} in {where} ({type(error).__name__}: {error})."
        raise InvalidInput(told, f"Formats are {', '.join(FORMATS)}, or text.", "Correct or drop the row.") from error


def meant(names: Iterable[Any], known: Sequence[str]) -> str:
    """A question whether a name that is nearly a known one is that one; empty where none is."""
    for name in map(str, names):
        if name not in known and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
            return f"Did you mean {close[0]} in the place of {name}?"
    return ""


def _messages(turns: Sequence[Mapping[str, Any]], where: str) -> list[_Message]:
    """Roles as chat templates call them; ShareGPT's ``from`` and ``value`` become ``role`` and ``content``."""
    found: list[_Message] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            told = f"Message {number} in {where} is {turn!r:.40}."
            raise InvalidInput(told, "A message has role and content (or from and value).", "Correct or drop the row.")
        named = {k: v for k, v in turn.items() if v is not None and k not in ("from", "value")}
        role = _part(turn, ("role", "from"), number, where)
        content = _part(turn, ("content", "value"), number, where)
        found.append({**named, "role": _ROLES.get(role, role), "content": content})
    return found


def _part(turn: Mapping[str, Any], names: tuple[str, str], number: int, where: str) -> Any:
    """Role or content of a message under either of its names."""
    held = next((name for name in names if name in turn), None)
    if held is not None:
        return turn[held]
    told = f"Message {number} in {where} has no {names[0]}: its keys are {', '.join(map(str, turn)) or 'none'}."
    remedy = meant(turn, ("role", "content", "from", "value")) or "Correct or drop the row."
    raise InvalidInput(told, "A message has role and content (or from and value).", remedy)


def check_messages(rows: Iterable[tuple[Any, str]]) -> None:
    """Refuse rows whose messages lack a role or a content; each comes with its place."""
    for row, where in rows:
        kind = format_of(row)
        if kind in ("messages", "conversations"):
            _messages(row[kind], where)


def _check_roles(messages: Sequence[_Message], tokenizer: Any, where: str) -> None:
    """Refuse a role that is neither usual nor in the chat template: its turn would be learned or left out by mistake."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _KNOWN and f"'{role}'" not in template and f'"{role}"' not in template:
            told, known = f"Message {number} in {where} has the role {role!r}.", f"Known roles are {', '.join(_KNOWN[:4])}, ..."
            raise InvalidInput(told, known, meant([role], (*_KNOWN, *_ROLES)) or "Correct the role, or drop the row.")


def _completion(prompt: Any, completion: Any, tokenizer: Any, where: str) -> Dialogue:
    if isinstance(prompt, str) and isinstance(completion, str):
        return _answered(prompt, completion, where)
    asked, said = _messages(prompt, where), _messages(completion, where)
    return _written(asked + said, tokenizer, where, first=len(asked))


def _instruction(row: Mapping[str, Any], tokenizer: Any, where: str) -> Dialogue:
    asked, given, said = str(row["instruction"]), str(row.get("input") or ""), str(row["output"])
    if getattr(tokenizer, "chat_template", None):
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        user = {"role": "user", "content": asked + (f"\n{given}" if given else "")}
        return _written([*system, user, {"role": "assistant", "content": said}], tokenizer, where)
    header = _HEADER_INPUT if given else _HEADER
    middle = f"\n\n### Input:\n{given}" if given else ""
    return _answered(f"{header}\n\n### Instruction:\n{asked}{middle}\n\n### Response:\n", said, where)


def _answered(prompt: str, answer: str, where: str) -> Dialogue:
    if not answer.strip():
        raise InvalidInput(f"An answer in {where} is empty.", "Every row needs a text to learn.", "Drop the row.")
    text = prompt + answer
    return Dialogue(text, ((len(prompt), len(text)),), special=True, ended=True)


def _written(messages: list[_Message], tokenizer: Any, where: str, first: int = 0) -> Dialogue:
    """A conversation as the tokenizer's chat template writes it; the assistant's turns from ``first`` on are learned."""
    _check_roles(messages, tokenizer, where)
    turns = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
    if not turns or not any(str(messages[i]["content"]).strip() for i in turns):
        raise InvalidInput(f"A conversation in {where} has no answer.", "One turn at least is the assistant's.", "Drop it.")
    if getattr(tokenizer, "chat_template", None):
        text, found = _answers(messages, turns, tokenizer, where, prompted=first > 0)
        return Dialogue(text, found, special=False, ended=False)
    _say_headed()
    text, found = _generated(messages, tokenizer, _HEADINGS)
    return Dialogue(text, found[-len(turns) :], special=True, ended=turns[-1] == len(messages) - 1)


@functools.cache
def _say_headed() -> None:
    """Once, not for every row."""
    logger.warning("The tokenizer has no chat template: turns are written under headings (### User:, ### Assistant:).")


def _answers(
    messages: list[_Message], turns: Sequence[int], tokenizer: Any, where: str, *, prompted: bool
) -> tuple[str, _Spans]:
    """A conversation as the tokenizer's template writes it, and ``(start, end)`` of every answer with its stop, in characters.

    Where ``prompted``, the first answer follows a prompt as it is given for generation: what that prompt already holds of the
    answer (an empty thought, say) is not learned. Otherwise every answer begins behind the words that name the speaker.
    """
    try:
        template = tokenizer.get_chat_template()
        if not prompted and re.search(r"{%-?\s*generation\b", template):
            text, spans = _generated(messages, tokenizer, template)
            if spans:
                return text, spans
        return _as_marks_show(messages, turns, tokenizer, where, prompted)
    except jinja2.TemplateError as error:
        said = str(error).rstrip(".")
        raise InvalidInput(
            f"The chat template refuses a conversation in {where}: {said}.", "", "Correct the roles, or drop the row."
        ) from error


def _generated(messages: list[_Message], tokenizer: Any, template: str) -> tuple[str, _Spans]:
    """A conversation by a template that marks its answers itself."""
    from transformers.utils.chat_template_utils import render_jinja_template

    made: Any = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    return str(made[0][0]), tuple((int(low), int(high)) for low, high in made[1][0])


def _as_marks_show(
    messages: list[_Message], turns: Sequence[int], tokenizer: Any, where: str, prompted: bool
) -> tuple[str, _Spans]:
    header, special = _manner(tokenizer, tokenizer.get_chat_template(), len(tokenizer))
    text = _render(tokenizer, messages)
    marked, places = _marked(messages, turns, tokenizer, text)
    spans: list[tuple[int, int]] = []
    for n, i in enumerate(turns):
        low, high = places.get(2 * n), places.get(2 * n + 1)
        if high is None and not messages[i]["content"]:
            continue
        start = None
        if high is not None:
            prompt = _render(tokenizer, messages[:i], add_generation_prompt=True) if prompted and not spans else ""
            start = _start(text[: high if low is None else low], low, spans[-1][1] if spans else 0, prompt, header)
        if high is None or start is None:
            raise InvalidInput(
                f"The chat template writes turn {i + 1} of a conversation in {where} so that it cannot be found.",
                "Templates that drop or change an answer hide which tokens it is.",
                "Give the data as prompt and completion, both as text.",
            )
        last = i == len(messages) - 1
        spans.append((start, len(text) if last else high + _stop(text[high:], marked[: i + 1], 2 * n + 1, tokenizer, special)))
    return text, tuple(spans)


def _render(tokenizer: Any, messages: list[_Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _marked(messages: list[_Message], turns: Sequence[int], tokenizer: Any, text: str) -> tuple[list[_Message], dict[int, int]]:
    """The messages with marks around their answers, and where each mark stands in ``text``.

    Marks go around all of an answer; where the template trims answers, inside their outer spaces; where it looks whether one is
    empty, around none that is.
    """
    for inside, empty in ((False, True), (True, True), (False, False), (True, False)):
        found = list(messages)
        for n, i in enumerate(turns):
            said = messages[i]["content"]
            if isinstance(said, str) and (said or empty):
                core = said.strip() if inside else said
                front, back = said.split(core, 1) if core else ("", "")
                found[i] = {**messages[i], "content": f"{front}{chr(_MARK + 2 * n)}{core}{chr(_MARK + 2 * n + 1)}{back}"}
        written = _render(tokenizer, found)
        if _MARKS.sub("", written) == text:
            marks = [(ord(m.group()) - _MARK, m.start() - k) for k, m in enumerate(_MARKS.finditer(written))]
            times = collections.Counter(n for n, _ in marks)
            return found, {n: place for n, place in marks if times[n] == 1}
    return list(messages), {}


def _start(head: str, low: int | None, since: int, prompt: str, header: str) -> int | None:
    """Where an answer begins, given the text in front of it; ``low``: its first own character, where that is known."""
    if prompt and head.startswith(prompt):
        return len(prompt)
    named = head.rfind(header, since) if header else -1
    return named + len(header) if named >= 0 else low


def _stop(tail: str, marked: list[_Message], mark: int, tokenizer: Any, special: str) -> int:
    """How many characters behind an answer still belong to its turn."""
    try:
        alone = _render(tokenizer, marked)
    except jinja2.TemplateError:  # a template that wants a question first
        alone = _render(tokenizer, [{"role": "user", "content": "?"}, marked[-1]])
    direct = re.match(rf"\s*(?:{special})", tail)
    return max(_shared(tail, alone.partition(chr(_MARK + mark))[2], special), direct.end() if direct else 0)


def _shared(text: str, other: str, special: str) -> int:
    """Length of the beginning that two texts share; where both go on, it ends with a special token or a space."""
    shared = len(os.path.commonprefix([text, other]))
    if shared == len(other):
        return shared
    return max((m.end() for m in re.finditer(rf"{special}|\s", text) if m.end() <= shared), default=0)


@functools.lru_cache(maxsize=8)
def _manner(tokenizer: Any, template: str, size: int) -> tuple[str, str]:
    """How a template writes around answers: the words that name the speaker, and what matches a special token.

    ``template`` and ``size`` are keys: a changed tokenizer is looked at again. The words that name the speaker stand between a
    question and its answer, and in the prompt for one, and are no part of the question's end. A thought that the prompt opens
    is the answer's.
    """
    words = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
    special = "|".join(re.escape(w) for w in words if w) or r"(?!)"
    asked, said, next_asked = ({"role": r, "content": chr(_MARK + k)} for k, r in enumerate(("user", "assistant", "user")))
    try:
        prompt, alone = (_render(tokenizer, [asked], add_generation_prompt=on).partition(chr(_MARK))[2] for on in (True, False))
        written = _render(tokenizer, [asked, said, next_asked]).partition(chr(_MARK))[2].partition(chr(_MARK + 1))[0]
    except jinja2.TemplateError:
        return "", special
    lead = os.path.commonprefix([prompt, written])
    return lead[_shared(lead, alone, special) :].partition("<think>")[0], special
