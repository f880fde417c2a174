"""Names of columns and keys: which are read, which are harmless, and a refusal for every other one.

Nothing of a row is dropped in silence. A column is taken by what reads the row; it is harmless by its name (an id, a URL, a
date, a score, a count, a source, metadata); it is empty; it says again what is read anyway; or the row is refused.
"""

from __future__ import annotations

import collections
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import InvalidInput

TURNS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input")
GIVEN = ("input", "context")
ANSWERS = ("output", "response", "answer", "completion", "solution")
PAIRS = ("chosen", "rejected")
TEXTS = ("text", "content", "document", "sentence")
SYSTEM = ("system", "system_prompt")
COLUMNS = tuple(dict.fromkeys((*TURNS, *QUESTIONS, *GIVEN, *ANSWERS, *PAIRS, *TEXTS, *SYSTEM, "history", "tools")))
LABELS = ("label", "kto_tag")
_MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios", "pixel", "pixels"))
_HARMLESS = frozenset(  # the last word of a name
    "id ids uid uuid guid idx index hash sha md5 hexsha digest url urls uri link links path paths file filename name names "
    "source sources src origin dataset subset split config dump domain domains topic topics category categories subject type "
    "kind task style format lang language languages locale license licenses licence author authors creator annotator "
    "date dates time timestamp datetime created updated added modified at year version revision meta metadata info attributes "
    "score scores rating ratings rank quality difficulty level ppl perplexity toxicity toxic moderation redacted confidence "
    "count counts tokens length len size number num turn turns views likes stars copies upvotes downvotes votes tag tags title "
    "titles model models generator judge unnamed parallel_tool_calls".split()
)
_FIRST_WORDS = frozenset(("num", "score", "meta"))
_HARMLESS_KEYS = frozenset(("cache_control", "annotations", "end_turn"))
_MESSAGES = re.compile(r"""\s*(\{\s*["'](messages|conversations)["']\s*:\s*)?\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
_HALF = re.compile("[\ud800-\udfff]")
_Read = TypeVar("_Read")


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing: null, not a number, a blank text, or a list or an object without entries."""
    if isinstance(value, (str, list, tuple, Mapping)):
        return not (value.strip() if isinstance(value, str) else value)
    return value is None or (isinstance(value, float) and value != value)


def is_harmless(name: str, extra: frozenset[str] = frozenset()) -> bool:
    """Whether a column or a key of this name says something about the row, and is no part of it.

    >>> [is_harmless(name) for name in ("prompt_id", "avatarUrl", "score_chosen", "weight", "images")]
    [True, True, True, False, False]
    """
    words = _words(name)
    if _MEDIA.intersection(words):
        return False
    return not words or name in extra or words[-1] in _HARMLESS or words[0] in _FIRST_WORDS or "_".join(words) in _HARMLESS


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d?|[A-Z]+", name)]


def is_harmless_key(name: str) -> bool:
    """Whether a key of a message is harmless."""
    return is_harmless(name, _HARMLESS_KEYS)


def suggestion(names: Iterable[Any], known: Sequence[str]) -> str:
    """A question whether a name that is nearly a known one is that one; empty where none is."""
    for name in map(str, names):
        if name not in known and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
            return f"Did you mean {close[0]} in the place of {name}?"
    return ""


def lowered(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """A row with its names in small letters."""
    named = {str(name).strip().lower(): value for name, value in row.items()}
    if len(named) < len(row):
        twice = [name for name, n in collections.Counter(str(k).strip().lower() for k in row).items() if n > 1]
        raise InvalidInput(f"{_upper(where)} has the column {twice[0]} twice.", "Capitals make no other name.", "Rename one.")
    return named


class Columns:
    """The columns of one row, of which each is taken, harmless or refused."""

    def __init__(self, row: Mapping[Any, Any], where: str) -> None:
        self.row, self.where = lowered(row, where), where
        self.names = {str(name).strip().lower(): str(name).strip() for name in row}
        self.taken: set[str] = set()

    def first(self, names: Sequence[str]) -> str | None:
        """The first of several names that the row has, one with a value before one without."""
        return next((n for n in names if self.row.get(n) is not None), next((n for n in names if n in self.row), None))

    def take(self, name: str) -> Any:
        """The value of a column, which is then read; ``None`` where there is none."""
        self.taken.add(name)
        return self.row.get(name)

    def text(self, name: str) -> str:
        """A column of text; an empty cell is an empty text."""
        return text_cell(self.take(name), f"The column {name} in {self.where}")

    def finish(self, kind: str, *used: str) -> None:
        """Refuse the columns that were not taken and are not harmless; ``used`` are the texts that are read."""
        left = {n: v for n, v in self.row.items() if n not in self.taken and not is_empty(v)}
        left = {n: v for n, v in left.items() if _has_messages(v) or not is_harmless(self.names[n])}
        everything = "\n".join(used)
        for name in [n for n in left if n in COLUMNS]:
            texts = list(strings(messages_cell(left[name], f"The column {name} in {self.where}"), roles=False))
            again = all(t.strip() in everything for t in texts)
            whole = len(texts) == 1 and all(t.strip() in texts[0] for t in used if t.strip())
            if again or whole:
                del left[name]
        if left:
            raise InvalidInput(*self._refusal(left, kind))

    def _refusal(self, left: Mapping[str, Any], kind: str) -> tuple[str, str, str]:
        names, many = ", ".join(self.names[n] for n in left), len(left) > 1
        what = f"{_upper(self.where)} has the column{'s' * many} {names}, which {kind} does not read."
        known = "Ids, URLs, dates, scores, counts, sources and metadata are passed over; nothing else is."
        if any(_MEDIA.intersection(_words(name)) for name in left):
            return (
                what,
                "Only text is read.",
                "Drop rows that have images, audio or video, or the column where it has no meaning.",
            )
        if any(name in LABELS for name in left):
            return what, known, "Use --task for rows with a label, or drop the column."
        unknown = [name for name in left if name not in COLUMNS]
        return what, known, suggestion(unknown, COLUMNS) or "Drop the column, or rename it to metadata."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _has_messages(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and isinstance(value[0], Mapping)
        and {"role", "from"} & set(value[0]) != set()
    )


def text_cell(value: Any, where: str) -> str:
    """A cell as text; numbers are written out, an empty cell is empty."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, str):
        if _MESSAGES.match(value):
            problem = f"{where} holds messages written as text: {value:.40}..."
            raise InvalidInput(problem, "Messages stand in a column messages.", "Rename the column, or parse it.")
        return whole_text(value, where)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise InvalidInput(f"{where} is {value!r:.60}.", "It is a text.", "Write it as text, or drop the row.")


def whole_text(text: str, where: str) -> str:
    """The same text; JSON may also hold one half of a character that it writes as two, which no tokenizer reads."""
    if half := _HALF.search(text):
        problem = f"{_upper(where)} holds half a character ({ascii(half[0])[1:-1]})."
        raise InvalidInput(problem, "JSON writes it as two halves, and one is missing.", "Correct the text, or drop the row.")
    return text


def messages_cell(value: Any, where: str) -> Any:
    """A list of messages, also where it is kept as JSON text; a text that is none comes back as it is."""
    return json_cell(value, where) if isinstance(value, str) and _MESSAGES.match(value) else value


def json_cell(value: Any, where: str) -> Any:
    """A value that may be kept as JSON text; an empty text is no value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        problem = f"{where} is {value!r:.40}, which is not JSON ({error})."
        raise InvalidInput(problem, "It is a list or an object, or one as JSON text.", "Write it with json.dumps.") from error


def strings(value: Any, *, roles: bool = True) -> Iterable[str]:
    """All texts in a value, however deep; without ``roles``, not those that say who speaks."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if roles or key not in ("role", "from", "type"):
                yield from strings(inner, roles=roles)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings(inner, roles=roles)


def without_nulls(value: Any) -> Any:
    """A nested value without the keys that are null: Arrow writes null for a key that an object does not have."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, (list, tuple)) else value


def of_every_row(rows: Iterable[tuple[Any, str]], read: Callable[[Any, str], _Read]) -> list[_Read]:
    """``read(row, where)`` of every row.

    Raises:
        InvalidInput: Rows that ``read`` refuses: what is wrong with the first one, and how many rows have the same fault.
    """
    made: list[_Read] = []
    faults: dict[str, list[InvalidInput]] = {}
    total = 0
    for row, where in rows:
        total += 1
        try:
            made.append(read(row, where))
        except InvalidInput as error:
            what = re.sub(re.escape(where), "", error.what, flags=re.IGNORECASE)
            faults.setdefault(re.sub(r"\\u\w{4}|\d+", "#", what), []).append(error)
    if not faults:
        return made
    same, *others = faults.values()
    many = f" {len(same)} of {total} rows {'have' if len(same) > 1 else 'has'} this fault" if total > 1 else ""
    more = f", {sum(map(len, others))} another one" if others else ""
    raise type(same[0])(same[0].what + many + more + "." * (total > 1), same[0].feasible, same[0].remedy) from same[0]
