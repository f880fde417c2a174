"""Work that several processes divide: who does which part, refusals that all hear, and the store behind ``--resume``."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import LayerbudgetError
from ..storage.parts import Parts
from .processes import ProcessGroup, broadcast, process_group

T = TypeVar("T")


class Part(NamedTuple):
    """A part of some work: what it costs, what it needs made first, and what making that costs; in one unit."""

    cost: float
    needs: Hashable = None
    made_for: float = 0.0


def deal(parts: Sequence[Part], group: ProcessGroup) -> list[int]:
    """Return the process of every part, the same in all processes.

    The largest part goes first, and to the process that has least to do so far. What a part needs is made once in every process
    that has such parts, so parts of the same needs stay together where that is worth it.
    """
    load, has, owner = [0.0] * group.size, [set[Hashable]() for _ in range(group.size)], [0] * len(parts)
    for k in sorted(range(len(parts)), key=lambda i: -(parts[i].cost + parts[i].made_for)):
        part = parts[k]
        more = [0.0 if part.needs in has[r] else part.made_for for r in range(group.size)]
        owner[k] = min(range(group.size), key=lambda r: load[r] + 2 * more[r])  # work that is done twice is nobody's gain
        load[owner[k]] += part.cost + more[owner[k]]
        has[owner[k]].add(part.needs)
    return owner


def together(work: Callable[[], T]) -> T:
    """Do this process's part of some work; what one process refuses, all refuse, so that none waits for another.

    Raises:
        LayerbudgetError: The refusal of the first process that has one.
    """
    group, made, error = process_group(), None, None
    if group.size == 1:
        return work()
    try:
        made = work()
    except (LayerbudgetError, OSError) as refusal:
        error = refusal
    for each in group.gather(error):
        if each is not None:
            raise each
    return made  # type: ignore[return-value]


class SharedParts(Parts):
    """The parts of one run of several processes: the main one reads and writes them, and all of them have what it has.

    So a run continues with another number of processes. What arguments are and what is raised is said by
    :class:`~layerbudget.storage.parts.Parts`.
    """

    def __init__(self, folder: Path | str | None, request: Any = None) -> None:
        main = process_group().is_main
        together(lambda: super(SharedParts, self).__init__(folder if main else None, request))

    def json(self, name: str, make: Callable[[], Any]) -> Any:
        """See :meth:`Parts.json`; what is not there is made by all processes together."""
        if process_group().size == 1:
            return super().json(name, make)

        def stored() -> str | None:
            """The text of a finished part."""
            file = self.find(name)
            return None if file is None else file.read_text(encoding="utf-8")

        text = broadcast(stored)
        if text is None:
            made = make()
            text = broadcast(lambda: json.dumps(made, ensure_ascii=True))
            together(lambda: self.put(name, "json", lambda path: path.write_text(text, encoding="utf-8")))
        return json.loads(text)
