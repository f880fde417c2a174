"""What people fine-tune on, in one form: prompts and answers, and which characters are learned.

Four formats are known by their columns: ``messages`` (roles and contents), ``conversations`` (ShareGPT: ``from`` and
``value``), ``prompt`` and ``completion`` (texts or messages), ``instruction``, ``input`` and ``output`` (Alpaca). Messages are
written with the tokenizer's own chat template, as TRL does; without one, as headed paragraphs, and that is said. Each becomes
a :class:`Dialogue`: a text and the spans of it that are answers. The mean loss is taken on those:

    L = -(1/N) sum over learned tokens t of log p(t | what stands before it)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidInput
from .turns import Message, answers

logger = logging.getLogger(__name__)

FORMATS = ("messages", "conversations", "prompt and completion", "instruction and output")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant"}
_HEADER = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_HEADER_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A text with the spans that are learned.

    Attributes:
        text: All of it, as the tokenizer reads it.
        learned: ``(start, end)`` of the answers, in characters.
        special: Whether the tokenizer adds its own beginning (a chat template has written everything already).
        ended: Whether an end-of-text token follows the text (a template has its own).
    """

    text: str
    learned: tuple[tuple[int, int], ...]
    special: bool
    ended: bool


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
    """Turn one row into a text and its learned spans.

    Args:
        row: The row.
        kind: Its format, from :func:`format_of`.
        tokenizer: Its chat template writes messages.
        where: Named in errors.

    Raises:
        InvalidInput: A row without an answer, of another format than ``kind``, or a template that cannot be followed.
    """
    try:
        if kind in ("messages", "conversations"):
            return _written(_messages(row[kind]), tokenizer, where)
        if kind == FORMATS[2]:
            return _completion(row["prompt"], row["completion"], tokenizer, where)
        return _instruction(row, tokenizer, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"A row of {where} is no {kind} ({type(error).__name__}: {error}).", f"Formats are {', '.join(FORMATS)}, or text.",
            "Correct or drop the row.",
        ) from error  # fmt: skip


def _messages(turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Roles as chat templates call them; ShareGPT's ``from`` and ``value`` become ``role`` and ``content``."""
    found: list[Message] = []
    for turn in turns:
        named = {k: v for k, v in turn.items() if v is not None and k not in ("from", "value")}
        role = turn["role"] if "role" in turn else turn["from"]
        content = turn["content"] if "content" in turn else turn["value"]
        found.append({**named, "role": _ROLES.get(role, role), "content": content})
    return found


def _completion(prompt: Any, completion: Any, tokenizer: Any, where: str) -> Dialogue:
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        _something(completion, where)
        return Dialogue(text, ((len(prompt), len(text)),), special=True, ended=True)
    asked, said = _messages(prompt), _messages(completion)
    return _written(asked + said, tokenizer, where, first=len(asked))


def _instruction(row: Mapping[str, Any], tokenizer: Any, where: str) -> Dialogue:
    asked, given, said = str(row["instruction"]), str(row.get("input") or ""), str(row["output"])
    if getattr(tokenizer, "chat_template", None):
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        user = {"role": "user", "content": asked + (f"\n{given}" if given else "")}
        return _written([*system, user, {"role": "assistant", "content": said}], tokenizer, where)
    header = _HEADER_INPUT if given else _HEADER
    middle = f"\n\n### Input:\n{given}" if given else ""
    prompt = f"{header}\n\n### Instruction:\n{asked}{middle}\n\n### Response:\n"
    _something(said, where)
    return Dialogue(prompt + said, ((len(prompt), len(prompt) + len(said)),), special=True, ended=True)


def _something(text: str, where: str) -> None:
    if not text.strip():
        raise InvalidInput(f"An answer in {where} is empty.", "Every row needs a text to learn.", "Drop the row.")


def _written(messages: list[Message], tokenizer: Any, where: str, first: int = 0) -> Dialogue:
    """A conversation as the tokenizer's chat template writes it; the assistant's turns from ``first`` on are learned."""
    turns = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
    if not turns or not any(str(messages[i]["content"]).strip() for i in turns):
        raise InvalidInput(f"A conversation in {where} has no answer.", "One turn at least is the assistant's.", "Drop it.")
    if getattr(tokenizer, "chat_template", None):
        text, found = answers(messages, turns, tokenizer, where, prompted=first > 0)
        return Dialogue(text, found, special=False, ended=False)
    _say_headed()
    end = getattr(tokenizer, "eos_token", None) or ""
    text, spans = "", list[tuple[int, int]]()
    for i, message in enumerate(messages):
        text += f"### {message['role'].capitalize()}:\n"
        start = len(text)
        text += str(message["content"])
        if message["role"] == "assistant" and i + 1 < len(messages) and not text.endswith(end):
            text += end  # the stop that generation needs; the last one follows the text
        if i in turns:
            spans.append((start, len(text)))
        text += "\n\n" if i + 1 < len(messages) else ""
    return Dialogue(text, tuple(spans), special=True, ended=turns[-1] == len(messages) - 1)


@functools.cache
def _say_headed() -> None:
    """Once, not for every row."""
    logger.warning("The tokenizer has no chat template: turns are written under headings (### User:, ### Assistant:).")
