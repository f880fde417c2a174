r"""How far rounding moves a matrix: the errors along which damage is measured, and the squared errors of every format.

ggml takes as long for the types of a menu as for a hundred passes of a small text. But the damage of a matrix per squared error
is nearly one number. So damage is measured along the errors of few formats, the *anchors*. These are made once per matrix, of
2,048 of its rows (all rows where it has no more), and kept in one byte per weight while gradients come. Of every format some
rows are rounded, the same rows for all: what one row has more of, it has more of in every format, and of what is needed, a
ratio, it leaves little. Of an embedding all these are rows of tokens of the text.

Squared errors are weighted as the quantiser weighs them, by the second moments of the inputs
(:meth:`layerbudget.compressors.quantisers.Quantiser.weigh`): with error feedback, what counts is the error of the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.formats import GGUF, PLAIN, find_format
from ...compressors.quantisers import Quantiser
from ...compressors.treating import Treating, matrices
from ...data.calibration import CalibrationSet
from ...execution.inputs import InputMoments, InputStatistics, moments_of_sites, share_statistics
from ...execution.loss import Batch
from ...execution.processes import process_group
from ...execution.sites import Site
from ...models.blocks import end_modules, reader_of, weight_of
from ...models.offload import mapped
from ...records import Block, Module
from ...sensitivity.directional.directions import InBytes, spread
from ...sensitivity.directional.terms import Watch
from .blocks import peaks
from .imatrix import importances

_PIECE = 1 << 20  # weights that are rounded together: their errors take 4 MB
ROWS = 2048  # of a matrix, along whose errors its damage is measured
# Of GGUF: where 256 divides rows, and else. Quick in ggml but IQ3_S, which like Q2_K has half as much again of damage per error
# as its neighbours: interpolated, both were taken too often.
_ANCHORS = (("Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ3_S"), ("MXFP4", "Q5_0", "Q8_0"))
_MOST = len(_ANCHORS[0])  # anchors of a matrix


def anchors_of(formats: Sequence[str], family: str) -> tuple[str, ...]:
    """Return the formats along whose errors damage is measured: some that span a menu, then plain numbers."""
    if family == GGUF:
        return (*_ANCHORS[0], *_ANCHORS[1], PLAIN[GGUF].name)
    small = [f for f in formats if not find_format(f).plain]
    return (*dict.fromkeys(small[k * (len(small) - 1) // 2] for k in range(3 if small else 0)), PLAIN[family].name)


class RoundingErrors(Watch):
    """The errors of blocks in all formats, made while their gradients are measured.

    ``has`` says which of ``formats`` a block has, ``(K, m)``. ``rows`` of every matrix are sampled. Afterwards ``sampled`` has
    for every matrix the weighted squared errors of its sampled rows, ``(rows, m + anchors)``, which add up to an estimate for
    the matrix, and the share of its rows that were not sampled. ``measured`` has the sums of its squared derivatives along the
    anchors, and the variances that rows which were not measured leave in them, ``(2, anchors)``; zeros for embedding and head.
    With ``whole`` every format is an anchor, and all rows are measured.
    """

    def __init__(
        self,
        model: nn.Module,
        data: CalibrationSet,
        quantiser: Quantiser,
        blocks: Sequence[Block],
        formats: Sequence[str],
        has: np.ndarray,
        *,
        family: str,
        rows: int,
        seed: int,
        whole: bool = False,
    ) -> None:
        self.model, self.data, self.quantiser, self.rows, self.seed = model, data, quantiser, rows, seed
        self.treating, self.offloaded = Treating(model, quantiser), mapped(model)
        self.formats, self.anchors = tuple(formats), tuple(formats) if whole else anchors_of(formats, family)
        self.most, self.whole = len(formats) if whole else _MOST, whole
        self.modules = {m.name: m for b in blocks for m in b.modules}
        menu = [[f if held else None for f, held in zip(formats, row, strict=True)] for row in has]
        self.names = {m.name: [*menu[i], *self._fitting(b.modules)] for i, b in enumerate(blocks) for m in b.modules}
        self.sampled: dict[str, tuple[np.ndarray, float]] = {}
        self.measured: dict[str, np.ndarray] = {}
        self._directions: dict[str, InBytes] = {}
        given = quantiser.imatrix
        self._found = {} if given is None else importances(given, model, list(self.modules.values()))
        self._statistics: InputStatistics | None = None
        self._made: dict[InputMoments, Any] = {}
        self.lookups = {n for n in self.modules if isinstance(weight_of(model, n)[0], nn.Embedding)}
        self.heads = {m.name for m in end_modules(model)} - self.lookups
        self.peaks = peaks(model, dict.fromkeys(self.modules, "nvfp4")) if "nvfp4" in {*formats, *self.anchors} else {}
        self._add = moments_of_sites(self._found, "diagonal")

    def _fitting(self, members: Sequence[Module]) -> list[str | None]:
        """The anchors of a block: the first that it can have; plain numbers only where it has no other."""
        fits = [f for f in map(find_format, self.anchors) if all(f.fits(m.d_in) for m in members)]
        chosen = [f.name for f in fits if not f.plain][: self.most] or [f.name for f in fits]
        return [name if name in chosen else None for name in self.anchors]

    def start(self, names: Sequence[str]) -> None:
        """See :meth:`Watch.start`."""
        if self.quantiser.reads_text:
            self._statistics = InputStatistics(self.model, [self.modules[n] for n in names], self.quantiser.statistic)

    def watching(self, batch: Batch) -> AbstractContextManager[Any] | None:
        """See :meth:`Watch.watching`: the inputs that the quantiser reads."""
        if self._statistics is None:
            return None
        mask = batch.kwargs.get("attention_mask")
        return self._statistics.listening(None if mask is None or bool(mask.all()) else mask.bool())

    def listen(self, site: Site, batch: Batch) -> None:
        """Where the quantiser reads no inputs they are no more than weights of the errors, and come with the gradients."""
        if self.quantiser.statistic == "none" and self.lookups.isdisjoint(site.names):
            self._add(site, batch)

    def of(self, name: str) -> InBytes:
        """The errors of a matrix in the anchors, made from the rows that are measured."""
        self._take()
        module = self.modules[name]
        rows, share = self._measured(name)
        shape = module.copies * module.d_out if rows is None else len(rows), module.d_in
        pieces = self._pieces(name, self.names[name][len(self.formats) :], rows)
        self._directions[name] = InBytes(shape, pieces, rows, share)
        return self._directions[name]

    def _measured(self, name: str) -> tuple[torch.Tensor | None, float]:
        """The rows of a matrix along whose errors its damage is measured, None for all, and their share of those that count.

        Of an embedding these are the tokens of the text. A head has all: few of its rows have nearly all of the damage.
        """
        if name in self.lookups:
            tied = reader_of(self.model, name) is not None
            return (None if tied else self.data.input_ids.unique().cpu(), 1.0)
        total = self.modules[name].copies * self.modules[name].d_out
        if self.whole or total <= ROWS or name in self.heads:
            return None, 1.0
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode()), 1])
        edges = np.linspace(0, total, ROWS + 1)  # one row of every part, so that all experts have as many
        rows = (edges[:-1] + generator.random(ROWS) * np.diff(edges)).astype(np.int64)
        return torch.from_numpy(rows), ROWS / total

    def settle(self, names: Sequence[str]) -> None:
        """See :meth:`Watch.settle`: sample the matrices, and forget their inputs."""
        self._take()
        if self.quantiser.statistic == "none":
            share_statistics({name: self._found[name] for name in names if name in self._found})
        for name in names:
            self.sampled[name] = self._sample(name)
            self._found.pop(name, None)
            if (held := self._directions.pop(name, None)) is not None:
                squares = process_group().sum(held.squares)
                self.measured[name] = np.stack((squares.sum(0), spread(squares, held.share)))
        self._made.clear()

    def _take(self) -> None:
        """Take the statistics that are complete, from all processes."""
        found = self._statistics
        if found is not None:
            share_statistics(found.found)
            self._found.update(found.found)
            self._statistics = None

    def _views(self, name: str) -> Iterator[tuple[torch.Tensor, InputMoments | None]]:
        views, found = matrices(*weight_of(self.model, name)), self._found.get(name)
        for i, view in enumerate(views):
            yield view.detach(), found[i] if found is not None else None

    def _errors(self, name: str, rows: torch.Tensor, prepared: Any, form: str | None) -> torch.Tensor | None:
        """The change of some rows by rounding to a format, float32; of offloaded weights, of what layers compute with."""
        if form is None:
            return None
        held = rows if self.offloaded is None else rows.to(self.offloaded.device, self.offloaded.dtype)
        level = Level(format=form, peak=self.peaks.get(name))
        return self.quantiser.quantise(held, prepared, level).weight - held.to(torch.float32)

    def _prepared(self, found: InputMoments | None) -> Any:
        return None if self.quantiser.statistic == "none" else self.treating.prepared(found, self._made)

    def _pieces(
        self, name: str, formats: Sequence[str | None], chosen: torch.Tensor | None
    ) -> Iterator[list[torch.Tensor | None]]:
        first = 0
        for view, found in self._views(name):
            start, first = first, first + len(view)
            if chosen is not None:
                view = view[chosen[(chosen >= start) & (chosen < first)].to(view.device) - start]
            prepared = self._prepared(found)
            size = max(1, len(view) if self.quantiser.statistic == "gram" else _PIECE // view.shape[1])
            for rows in view.split(size):
                yield [self._errors(name, rows, prepared, f) for f in formats]

    def _sample(self, name: str) -> tuple[np.ndarray, float]:
        views = list(self._views(name))
        if any(found is not None for _, found in views):  # experts that no token reached have no part in the damage
            views = [(view, found) for view, found in views if found is not None and found.value is not None]
        chosen, total = self._chosen(name, [len(view) for view, _ in views])
        parts = []
        for (view, statistics), places in zip(views, chosen, strict=True):
            if len(places):
                rows, prepared = view[torch.from_numpy(places)], self._prepared(statistics)
                given = statistics.value if statistics is not None and statistics.kind == "diagonal" else prepared
                errors = (self._errors(name, rows, prepared, f) for f in self.names[name])
                none = np.zeros(len(places))
                parts.append(np.stack([none if e is None else self._weighed(e, given) for e in errors], 1))
        found = np.concatenate(parts)
        return found * (total / len(found)), max(0.0, 1.0 - len(found) / total)

    def _weighed(self, errors: torch.Tensor, given: Any) -> np.ndarray:
        plain = errors.square().sum(1) if given is None else self.quantiser.weigh(errors, given)
        return np.asarray(plain.double().cpu().numpy())

    def _chosen(self, name: str, sizes: Sequence[int]) -> tuple[list[np.ndarray], int]:
        """Places of the sampled rows in every copy of a matrix, and the number of those that they are drawn from."""
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if name in self.lookups:
            ids, mask = self.data.input_ids, self.data.attention_mask
            seen = (ids if mask is None else ids[mask.bool()]).flatten().cpu().numpy()
            return [np.sort(generator.choice(seen, min(len(seen), 4 * self.rows), replace=False))], len(seen)
        total, ends = sum(sizes), np.cumsum([0, *sizes])
        chosen = np.sort(generator.choice(total, min(total, self.rows), replace=False))
        return [chosen[(chosen >= a) & (chosen < b)] - a for a, b in zip(ends[:-1], ends[1:], strict=True)], total
