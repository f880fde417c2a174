"""Rows of matrices that are rounded by one of several processes each, and what all of them made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...compressors.quantisers import Rounded, joined
from ...errors import LayerbudgetError
from ...execution.processes import process_group
from ...execution.sharing import Part, deal

RowsKey = tuple[str, int, int]  # a matrix, its copy, and which of the rows that are rounded together


class DealtRows:
    """The rows of one piece of a model after another: dealt, rounded in place, and given to all processes.

    Attributes:
        group: The processes.
        coded: Whether bytes, scales and zero points go to a file, which the main process writes.
    """

    def __init__(self) -> None:
        self.group, self.coded = process_group(), False
        self._owners = dict[RowsKey, int]()
        self._waiting = dict[RowsKey, tuple[int, torch.Tensor]]()
        self._made = dict[RowsKey, Rounded]()
        self._refusal: LayerbudgetError | None = None

    def deal(self, units: Callable[[], Mapping[RowsKey, Part]]) -> None:
        """Deal the rows of a piece, in the same way in all processes; of one process they are all."""
        if self.group.size > 1:
            parts = units()
            self._owners = dict(zip(parts, deal(list(parts.values()), self.group), strict=True))

    def round(self, key: RowsKey, rows: torch.Tensor, make: Callable[[], Rounded]) -> None:
        """Write what ``make`` gives over some rows, where they are this process's; the others' come by :meth:`unite`."""
        owner = self._owners.get(key, self.group.rank)
        if self._owners:
            self._waiting[key] = owner, rows
        if owner != self.group.rank or self._refusal is not None:
            return
        try:
            done = make()
        except LayerbudgetError as error:
            if not self._owners:
                raise
            self._refusal = error  # all processes hear of it before they wait for these rows
            return
        rows.copy_(done.weight)
        if self.coded:
            self._made[key] = dataclasses.replace(done, weight=rows.new_empty((0, rows.shape[1])))

    def unite(self) -> dict[str, list[Rounded]]:
        """Give all processes the rows that each has rounded; return what goes to the file, one per copy of every matrix.

        It has no weights, and is empty in all processes but the main one.

        Raises:
            LayerbudgetError: What one of the processes refused.
        """
        waiting, self._waiting, dealt, self._owners = self._waiting, {}, bool(self._owners), {}
        if dealt:
            for refusal in self.group.gather(self._refusal):
                if refusal is not None:
                    raise refusal
            for owner, rows in waiting.values():
                self.group.give(rows, owner)
            if self.coded:
                self._bring(waiting)
        made, self._made = self._made, {}
        keys: dict[str, dict[int, list[RowsKey]]] = {}
        for key in sorted(made):
            keys.setdefault(key[0], {}).setdefault(key[1], []).append(key)
        return {name: [joined([made.pop(key) for key in copy]) for copy in copies.values()] for name, copies in keys.items()}

    def _bring(self, waiting: Mapping[RowsKey, tuple[int, torch.Tensor]]) -> None:
        """Bring what goes to the file to the main process, matrix after matrix: a whole piece takes memory."""
        for name in dict.fromkeys(name for name, _, _ in waiting):
            own = {key: self._made.pop(key) for key in [key for key in self._made if key[0] == name]}
            sent = {} if self.group.is_main else {key: _moved(rounded, "cpu") for key, rounded in own.items()}
            for each in self.group.bring(sent, 0):
                own |= {key: _moved(rounded, waiting[key][1].device) for key, rounded in each.items()}
            if self.group.is_main:
                self._made |= own


def _moved(rounded: Rounded, device: torch.device | str) -> Rounded:
    """The tensors that go to the file, on a device and in memory of their own: of a part of a tensor all would be sent."""
    fields = {name: getattr(rounded, name) for name in ("weight", "scale", "zero")}
    moved: dict[str, Any] = {n: None if t is None else t.to(device, copy=True) for n, t in fields.items()}
    return dataclasses.replace(rounded, **moved)
