"""Where a conversation's answers stand in what a chat template writes.

A template that says so itself (``{% generation %}``) is believed. Of any other, every answer is written once more with a mark
before and behind it: characters that no text has. Where the marks change nothing else, they show the answer wherever the
template puts it, trimmed, or with earlier turns rewritten. The answer's turn begins behind the words that name the speaker. It
ends with what the template writes behind it if nothing follows, as far as that stands here too, and at least with a special
token that stands directly behind it: the stop that generation needs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from ..errors import InvalidInput

Message = dict[str, Any]
Spans = tuple[tuple[int, int], ...]
_MARK = 0xF0000  # the first character of a plane for private use
_MARKS = re.compile("[\U000f0000-\U000ffffd]")


@dataclasses.dataclass(frozen=True)
class _Manner:
    """How a template writes around answers: the words that name the speaker, and what matches a special token."""

    header: str
    special: str


def answers(messages: list[Message], turns: Sequence[int], tokenizer: Any, where: str, *, prompted: bool) -> tuple[str, Spans]:
    """Write a conversation with the tokenizer's template and find the answers in it.

    Args:
        messages: Roles and contents.
        turns: Which messages are answers.
        tokenizer: Its chat template writes.
        where: Named in errors.
        prompted: The first answer follows a prompt as it is given for generation: what that prompt already holds of the answer
            (an empty thought, say) is not learned. Otherwise every answer begins behind the words that name the speaker.

    Returns:
        The text, and ``(start, end)`` of every answer with its stop, in characters.

    Raises:
        InvalidInput: The template refuses the conversation, or hides an answer.
    """
    try:
        if not prompted and re.search(r"{%-?\s*generation\b", tokenizer.get_chat_template()):
            text, spans = _as_the_template_says(messages, tokenizer)
            if spans:
                return text, spans
        return _as_marks_show(messages, turns, tokenizer, where, prompted)
    except jinja2.TemplateError as error:
        said = str(error).rstrip(".")
        raise InvalidInput(
            f"The chat template refuses a conversation in {where}: {said}.", "", "Correct the roles, or drop the row."
        ) from error


def _as_the_template_says(messages: list[Message], tokenizer: Any) -> tuple[str, Spans]:
    from transformers.utils.chat_template_utils import render_jinja_template

    template, options = tokenizer.get_chat_template(), tokenizer.special_tokens_map
    made: Any = render_jinja_template([messages], chat_template=template, return_assistant_tokens_mask=True, **options)
    return str(made[0][0]), tuple((int(low), int(high)) for low, high in made[1][0])


def _as_marks_show(
    messages: list[Message], turns: Sequence[int], tokenizer: Any, where: str, prompted: bool
) -> tuple[str, Spans]:
    manner, text = _manner(tokenizer, tokenizer.get_chat_template(), len(tokenizer)), _render(tokenizer, messages)
    marked, places = _marked(messages, turns, tokenizer, text)
    spans: list[tuple[int, int]] = []
    for n, i in enumerate(turns):
        low, high = places.get(2 * n), places.get(2 * n + 1)
        if high is None and not messages[i]["content"]:
            continue
        start = None
        if high is not None:
            prompt = _render(tokenizer, messages[:i], add_generation_prompt=True) if prompted and not spans else ""
            start = _start(text[: high if low is None else low], low, spans[-1][1] if spans else 0, prompt, manner.header)
        if high is None or start is None:
            raise InvalidInput(
                f"The chat template writes turn {i + 1} of a conversation in {where} so that it cannot be found.",
                "Templates that drop or change an answer hide which tokens it is.",
                "Give the data as prompt and completion, both as text.",
            )
        last = i == len(messages) - 1
        spans.append((start, len(text) if last else high + _stop(text[high:], marked[: i + 1], 2 * n + 1, tokenizer, manner)))
    return text, tuple(spans)


def _render(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _marked(messages: list[Message], turns: Sequence[int], tokenizer: Any, text: str) -> tuple[list[Message], dict[int, int]]:
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


def _stop(tail: str, marked: list[Message], mark: int, tokenizer: Any, manner: _Manner) -> int:
    """How many characters behind an answer still belong to its turn."""
    try:
        alone = _render(tokenizer, marked)
    except jinja2.TemplateError:  # a template that wants a question first
        alone = _render(tokenizer, [{"role": "user", "content": "?"}, marked[-1]])
    direct = re.match(rf"\s*(?:{manner.special})", tail)
    return max(_shared(tail, alone.partition(chr(_MARK + mark))[2], manner.special), direct.end() if direct else 0)


def _shared(text: str, other: str, special: str) -> int:
    """Length of the beginning that two texts share; where both go on, it ends with a special token or a space."""
    shared = len(os.path.commonprefix([text, other]))
    if shared == len(other):
        return shared
    return max((m.end() for m in re.finditer(rf"{special}|\s", text) if m.end() <= shared), default=0)


@functools.lru_cache(maxsize=8)
def _manner(tokenizer: Any, template: str, size: int) -> _Manner:
    """How a template writes around answers; ``template`` and ``size`` are keys: a changed tokenizer is looked at again.

    The words that name the speaker stand between a question and its answer, and in the prompt for one, and are no part of the
    question's end. A thought that the prompt opens is the answer's.
    """
    words = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
    special = "|".join(re.escape(w) for w in words if w) or r"(?!)"
    asked, said, next_asked = ({"role": r, "content": chr(_MARK + k)} for k, r in enumerate(("user", "assistant", "user")))
    try:
        prompt, alone = (_render(tokenizer, [asked], add_generation_prompt=on).partition(chr(_MARK))[2] for on in (True, False))
        written = _render(tokenizer, [asked, said, next_asked]).partition(chr(_MARK))[2].partition(chr(_MARK + 1))[0]
    except jinja2.TemplateError:
        return _Manner("", special)
    lead = os.path.commonprefix([prompt, written])
    return _Manner(lead[_shared(lead, alone, special) :].partition("<think>")[0], special)
