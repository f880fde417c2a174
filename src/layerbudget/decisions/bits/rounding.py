r"""How far rounding moves a matrix: the errors along which damage is measured, and what they are in every format.

ggml takes as long for the types of a menu as for a hundred passes of a small text. But rounding errors of all formats are made
of two parts, ``Delta = c W + R``. The first scales all weights alike: a type whose largest code lies at the end of its range
makes weights smaller (``Q2_K`` by 3 %), another one larger (``IQ3_S`` by 2 %). All rows of it push the output the same way, so
it counts for more than its squared error says. What is left, R, is nearly a random direction, and its damage per squared error
is nearly one number for a matrix. So the damage of a format is

    d  =  c^2 d_W  +  k |R|^2

with ``d_W`` of the weights themselves, and k from the R of few formats, the *anchors*, whose own damage is measured. These are
made once per matrix, of 4,096 of its rows (all rows where it has no more), and kept in one byte per weight while gradients
come. Of every format some rows are rounded, which tell c and the squared error of R: the same rows for all, so that what one
row has more of, it has more of in every format. Of an embedding all these are rows of tokens of the text.

Error feedback changes the weights of all rows by the same inputs, so that R of different rows have much to do with each other:
there all rows are made.

A head has as many rows as there are tokens. Where these are more than 16,384, the rows of the labels that were drawn are enough
(:mod:`layerbudget.sensitivity.directional.drawn`).

Squared errors are weighted as the quantiser weighs them, by the second moments of the inputs
(:meth:`layerbudget.compressors.quantisers.Quantiser.weigh`): with error feedback, what counts is the error of the output.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.formats import GGUF, HEAD_ROWS, PLAIN, ROWS, find_format
from ...compressors.quantisers import Quantiser
from ...compressors.treating import LayerCompressor, matrices
from ...data.calibration import CalibrationSet
from ...execution.inputs import InputMoments, InputStatistics, moments_of_sites, share_statistics
from ...execution.loss import Batch
from ...execution.processes import process_group
from ...execution.sharing import Part, deal, together
from ...execution.sites import Site
from ...llama_cpp.imatrix import importances
from ...models.blocks import end_modules, reader_of, weight_of
from ...models.offload import mapped
from ...records import Block, Module
from ...sensitivity.directional.directions import Apart, Directions, Elsewhere, Int8Directions, Itself, spread
from ...sensitivity.directional.terms import Watch
from .blocks import peaks

_PIECE = 1 << 20  # weights that are rounded together: their errors take 4 MB
_FED_BACK = 1 << 23  # with error feedback, which is quicker on many rows at once
_ANCHORS = (("Q2_K", "Q3_K", "Q4_K", "Q6_K"), ("MXFP4", "Q5_0", "Q8_0"))  # of GGUF, where 256 divides rows and else; quick
_Sample = tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, float]]
_LATTICES = ("IQ2_S", "IQ3_S")  # with feedback these too: a code says several weights, and leaves other errors


def anchors_of(formats: Sequence[str], family: str, *, feedback: bool = False) -> tuple[str, ...]:
    """Return the formats along whose errors damage is measured, then plain numbers.

    Of compressed-tensors they are the first, middle and last of the menu, which span its bits: it comes by bits.
    """
    if family == GGUF:
        return (*_ANCHORS[0], *(_LATTICES if feedback else ()), *_ANCHORS[1], PLAIN[GGUF].name)
    small = [f for f in formats if not find_format(f).plain]
    return (*dict.fromkeys(small[k * (len(small) - 1) // 2] for k in range(3 if small else 0)), PLAIN[family].name)


class RoundingErrors(Watch):
    """The errors of blocks in all formats, made while their gradients are measured.

    ``has`` says which of ``formats`` a block has, ``(K, m)``. ``rows`` of every matrix are sampled. With ``whole`` every format
    is an anchor with all rows, and none is taken apart. ``draws`` of labels are made.

    Afterwards there is of every matrix, by name:

    Attributes:
        factors: The factor c of every format and anchor, ``(m + anchors,)``.
        sampled: Weighted squares of R of its sampled rows, ``(rows, m + anchors)``, which add up to an estimate for the matrix,
            and the share of its rows that were not sampled.
        measured: Sums of its squared derivatives along the R of anchors, and the variances that rows which were not measured
            leave in them, ``(2, anchors)``; zeros for embedding and head.
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
        draws: int = 1,
    ) -> None:
        self.model, self.data, self.quantiser, self.rows, self.seed = model, data, quantiser, rows, seed
        self.draws, self._draws = draws, 1
        self.treating, self.offloaded = LayerCompressor(model, quantiser), mapped(model)
        feedback = quantiser.statistic == "gram"
        self.formats, self.whole = tuple(formats), whole
        self.anchors = self.formats if whole else anchors_of(formats, family, feedback=feedback)
        self.most = len(formats) if whole else len(_ANCHORS[0]) + feedback * len(_LATTICES)  # anchors of a matrix
        self.modules = {m.name: m for b in blocks for m in b.modules}
        menu = [[f if available else None for f, available in zip(formats, row, strict=True)] for row in has]
        self.names = {m.name: [*menu[i], *self._fitting(b.modules)] for i, b in enumerate(blocks) for m in b.modules}
        self.factors, self.measured = dict[str, np.ndarray](), dict[str, np.ndarray]()
        self.sampled = dict[str, tuple[np.ndarray, float]]()
        self._drawn, self._directions = dict[str, list[_Rows]](), dict[str, Int8Directions]()
        imatrix = quantiser.imatrix
        self._moments = {} if imatrix is None else importances(imatrix, model, list(self.modules.values()))
        self._statistics: InputStatistics | None = None
        self._made: dict[InputMoments, Any] = {}
        self.lookups = {n for n in self.modules if isinstance(weight_of(model, n)[0], nn.Embedding)}
        self.heads = {m.name for m in end_modules(model)} - self.lookups
        large = {m.name for m in end_modules(model) if m.d_out > HEAD_ROWS and draws > 1}
        self._labelled = {name for name in large & set(self.modules) if reader_of(model, name) is not None}
        united = any(find_format(f).united for f in {*formats, *self.anchors})
        self.peaks = peaks(model, self.modules) if united else {}
        self._add = moments_of_sites(self._moments, "diagonal")
        self._beside, self._owner = dict[str, list[str]](), dict[str, int]()
        self._loads = dict[str, list[int]]()

    def _fitting(self, members: Sequence[Module]) -> list[str | None]:
        """The anchors of a block: the first that it can have; plain numbers only where it has no other."""
        fits = [f for f in map(find_format, self.anchors) if all(f.fits(m.d_in) for m in members)]
        chosen = [f.name for f in fits if not f.plain][: self.most] or [f.name for f in fits]
        return [name if name in chosen else None for name in self.anchors]

    def start(self, names: Sequence[str]) -> None:
        """See :meth:`Watch.start`."""
        self._take()  # of a head, which is rounded when its embedding has been there
        self._draws = self.draws if len(names) < len(self.modules) else 1  # outputs of all layers at once take much memory
        inside = [name for name in names if name not in self.lookups | self.heads]
        self._beside |= dict.fromkeys(inside, inside)
        if self.quantiser.reads_text:
            modules, quantiser = [self.modules[n] for n in names], self.quantiser
            self._statistics = InputStatistics(self.model, modules, quantiser.statistic, equal_tokens=quantiser.equal_tokens)

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

    @property
    def ahead(self) -> bool:
        """See :meth:`Watch.ahead`: errors with feedback depend on the inputs alone. Several processes share them."""
        return self.quantiser.statistic == "gram" and self.quantiser.reads_text and process_group().size == 1

    @property
    def levels(self) -> int:
        """Directions of every matrix. They are the anchors, or their rests, the matrix itself, and both."""
        return len(self.anchors) if self.whole else 2 * len(self.anchors) + 1

    def of(self, name: str) -> Directions:
        """The errors of a matrix in the anchors, from the rows that are measured, and the matrix itself."""
        if name not in self._directions:
            self._take()
            beside = self._beside.get(name, [name]) if process_group().size > 1 else [name]
            ahead = self.ahead and name not in self.lookups | self.heads
            if ahead and self.offloaded is not None and self.offloaded.device.type == "cpu":
                self.offloaded.leave()  # until gradients come, its stored weights will do: a layer's copy is memory that counts
            self._make([n for n in beside if n not in self._directions])
            if ahead:
                self._keep([self._sample([name])])
                self._forget(name)
        return self._apart(name, self._directions[name])

    def by_labels(self, name: str) -> bool:
        """See :meth:`Watch.by_labels`: of heads whose rows are far more than the labels of a text."""
        return name in self._labelled

    def of_labels(self, name: str, rows: torch.Tensor) -> Directions:
        """See :meth:`Watch.of_labels`."""
        self._take()
        if name not in self.factors:
            drawn = self._draw(name, lambda form, size: True)
            self.factors[name] = self._factor(drawn)
            if process_group().size == 1:
                self._drawn[name] = drawn
        shape = len(rows), self.modules[name].d_in
        pieces = self._pieces(name, rows, lambda form, size: True)  # other labels come in every process
        return self._apart(name, Int8Directions(shape, pieces, rows, 1.0, self._draws))

    def _make(self, names: Sequence[str]) -> None:
        """Make the directions of matrices. Several processes divide what is rounded, of all matrices that come together."""
        group = process_group()
        owners, whole = self._owners(names), self.quantiser.statistic == "gram"
        factors: dict[str, np.ndarray] = {}

        def draw() -> None:
            """Sample this process's part of the matrices."""
            for name in (n for n in names if not whole or owners[n] == group.rank):
                self._drawn[name] = self._draw(name, self._samples(name))
                factors[name] = self._factor(self._drawn[name])

        together(draw)
        self.factors |= _united(group.gather(factors))
        for name in names:
            rows, share = self._measured(name)
            module, mine = self.modules[name], owners[name] == group.rank
            dealt = (lambda form, size, mine=mine: mine) if whole else self._is_mine
            shape = module.copies * module.d_out if rows is None else len(rows), module.d_in
            pieces = self._pieces(name, rows, dealt)
            directions = Int8Directions(shape, pieces, rows, share, self._draws, shared=group.size > 1)
            self._directions[name] = directions

    def _samples(self, name: str) -> Callable[[str, int], bool]:
        """Which formats of a matrix this process samples: some of each, or with error feedback all of its own matrices."""
        if self.quantiser.statistic == "gram":
            mine = self._owners([name])[name] == process_group().rank
            return lambda form, size: mine
        return lambda form, size: self._is_mine(f"{form}, some rows", size)

    def _owners(self, names: Sequence[str]) -> dict[str, int]:
        """The process that rounds each of some matrices with error feedback.

        A matrix costs a step for each pair of its inputs and every row, and the factor of the inputs as many rows more.
        """
        parts, new = [], [n for n in names if n not in self._owner]
        for module in (self.modules[n] for n in new):
            rows, columns = module.copies * module.d_out, float(module.d_in)
            moments = self._moments.get(module.name)
            needs = None if moments is None else id(moments[0])
            parts.append(Part(rows * len(self.anchors) * columns**2, needs, module.copies * columns**3))
        self._owner |= zip(new, deal(parts, process_group()), strict=True)
        return self._owner

    def _is_mine(self, form: str, size: int) -> bool:
        """Whether this process is the one that rounds the next weights to a format: each has as many of every format."""
        group = process_group()
        loads = self._loads.setdefault(form, [0] * group.size)
        turn = list(self._loads).index(form)
        taken = min(range(group.size), key=lambda r: (loads[r], (r + turn) % group.size))
        loads[taken] += size
        return taken == group.rank

    def _apart(self, name: str, directions: Int8Directions) -> Directions:
        """The rests of errors, the matrix itself, and both."""
        if self.whole:
            return directions
        itself = Itself(lambda: [view for view, _ in self._views(name)])
        return Apart(directions, itself, self.factors[name][len(self.formats) :].tolist())

    def _measured(self, name: str) -> tuple[torch.Tensor | None, float]:
        """The rows of a matrix along whose errors its damage is measured, None for all, and their share of those that count.

        Of an embedding these are the tokens of the text. A head has all, as few of its rows have nearly all of the damage, or
        those of :meth:`of_labels`.
        """
        if name in self.lookups:
            tied = reader_of(self.model, name) is not None and name not in self._labelled
            return (None if tied else self.data.input_ids.unique().cpu(), 1.0)
        total = self.modules[name].copies * self.modules[name].d_out
        if self.whole or total <= ROWS or name in self.heads or self.quantiser.statistic == "gram":
            return None, 1.0
        start = np.random.default_rng([self.seed, zlib.crc32(name.encode()), 1]).random()
        rows = ((np.arange(ROWS) + start) * total / ROWS).astype(np.int64)  # at equal distances: all experts have as many
        return torch.from_numpy(rows), ROWS / total

    def settle(self, names: Sequence[str]) -> None:
        """See :meth:`Watch.settle`: sample the matrices, and forget their inputs."""
        self._take()
        if self.quantiser.statistic == "none":
            share_statistics({name: self._moments[name] for name in names if name in self._moments})
        rest = [name for name in names if name not in self.sampled]
        self._keep(process_group().gather(together(lambda: self._sample(rest))))
        for name in names:
            self._moments.pop(name, None)
            self.measured[name] = np.zeros((2, len(self.anchors)))
            if (directions := self._directions.pop(name, None)) is not None:
                squares = process_group().sum(directions.squares)
                self.measured[name] = np.stack((squares.sum(0), spread(squares, directions.share)))
        self._made.clear()

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        """See :meth:`Watch.record`: what there is of every matrix afterwards."""
        each = ((n, self.factors[n], *self.sampled[n], self.measured[n]) for n in names)
        return {n: [factors.tolist(), rows.tolist(), left, measured.tolist()] for n, factors, rows, left, measured in each}

    def restore(self, names: Sequence[str], recorded: Any) -> None:
        """See :meth:`Watch.restore`."""
        for name in names:
            factors, rows, left, measured = recorded[name]
            self.factors[name], self.measured[name] = np.array(factors), np.array(measured)
            self.sampled[name] = np.array(rows), left

    def _keep(self, parts: Sequence[_Sample]) -> None:
        """Keep what :meth:`_sample` gives in all processes."""
        factors, squares, left = zip(*parts, strict=True)
        self.factors |= _united(factors)
        shares = {name: share for each in left for name, share in each.items()}
        self.sampled |= {name: (each, shares[name]) for name, each in _united(squares).items()}

    def _sample(self, names: Sequence[str]) -> _Sample:
        """This process's part of a sample: factors that were not known, squared errors, and the share of rows without any."""
        factors, squares, left = dict[str, np.ndarray](), dict[str, np.ndarray](), dict[str, float]()
        whole, owners = self.quantiser.statistic == "gram", self._owners(names)
        for name in names:
            drawn = self._drawn.pop(name, None)
            if whole and owners[name] != process_group().rank:
                continue
            if drawn is None or self.quantiser.statistic == "none":  # inputs came later
                drawn = self._draw(name, self._samples(name))
            if name not in self.factors:
                factors[name] = self._factor(drawn)
            squares[name], left[name] = self._squares(drawn, factors.get(name, self.factors.get(name, np.zeros(0))))
        return factors, squares, left

    def _forget(self, name: str) -> None:
        """Drop the inputs of a matrix, and what was made of them, where no other matrix has the same: they are wide."""
        for moments in self._moments.pop(name, ()):
            if not any(each is moments for others in self._moments.values() for each in others):
                self._made.pop(moments, None)

    def _take(self) -> None:
        """Take the statistics that are complete, from all processes."""
        statistics = self._statistics
        if statistics is not None:
            share_statistics(statistics.found)
            self._moments.update(statistics.found)
            self._statistics = None

    def _views(self, name: str) -> Iterator[tuple[torch.Tensor, InputMoments | None]]:
        owner, parameter = weight_of(self.model, name)
        if self.offloaded is not None and name in self.lookups | self.heads:  # a head comes and goes, and directions stay
            parameter = nn.Parameter(self.offloaded.stored(parameter), requires_grad=False)
        views, moments = matrices(owner, parameter), self._moments.get(name)
        for i, view in enumerate(views):
            yield view.detach(), moments[i] if moments is not None else None

    def _errors(
        self, name: str, rows: torch.Tensor, prepared: Any, formats: Sequence[str | None]
    ) -> dict[str | None, torch.Tensor | None]:
        """The change of some rows by rounding to formats, float32; of offloaded weights, of what layers compute with."""
        weights = rows if self.offloaded is None else rows.to(self.offloaded.device, self.offloaded.dtype)
        wanted = [form for form in dict.fromkeys(formats) if form is not None]
        levels = [Level(format=form, peak=self.peaks.get(name)) for form in wanted]
        made, plain = self.quantiser.quantise_each(weights, prepared, levels), weights.to(torch.float32)
        errors: dict[str | None, torch.Tensor | None] = {None: None}
        for form in wanted:
            errors[form] = made.pop(0).weight - plain  # of large matrices no two copies are held
        return errors

    def _prepared(self, moments: InputMoments | None) -> Any:
        return None if self.quantiser.statistic == "none" else self.treating.prepared(moments, self._made)

    def _pieces(
        self, name: str, chosen: torch.Tensor | None, is_mine: Callable[[str, int], bool]
    ) -> Iterator[list[torch.Tensor | Elsewhere | None]]:
        """Errors of a matrix in its anchors, some rows at a time, of those that this process makes."""
        first, count = 0, len(self.formats)
        formats, factors = self.names[name][count:], self.factors[name][count:]
        for view, moments in self._views(name):
            start, first = first, first + len(view)
            if chosen is not None:
                view = view[chosen[(chosen >= start) & (chosen < first)].to(view.device) - start]
            prepared = self._prepared(moments)
            size = max(1, (_FED_BACK if self.quantiser.statistic == "gram" else _PIECE) // view.shape[1])
            for rows in view.split(size):
                mine = [form if form is not None and is_mine(form, rows.numel()) else None for form in formats]
                errors = self._errors(name, rows, prepared, mine) if any(mine) else {}
                device = rows.device if self.offloaded is None else self.offloaded.device
                made = [errors.pop(form) if form is not None else None for form in mine]
                yield [
                    _apart(error, rows, c) if error is not None else None if form is None else Elsewhere(len(rows), device)
                    for error, form, c in zip(made, formats, factors, strict=True)
                ]

    def _draw(self, name: str, is_mine: Callable[[str, int], bool]) -> list[_Rows]:
        """Some rows of a matrix, rounded to every format that is this process's."""
        menu, size = dict.fromkeys(form for form in self.names[name] if form is not None), self.modules[name].d_in
        mine = {form for form in menu if is_mine(form, size)}
        names = [form if form in mine else None for form in self.names[name]]
        views = list(self._views(name))
        if any(moments is not None for _, moments in views):  # experts that no token reached have no part in the damage
            views = [(view, moments) for view, moments in views if moments is not None and moments.value is not None]
        chosen, total = self._chosen(name, [len(view) for view, _ in views])
        parts = []
        for (view, statistics), places in zip(views, chosen, strict=True):
            if len(places):
                rows, prepared = view[torch.from_numpy(places)], self._prepared(statistics)
                importance = statistics.value if statistics is not None and statistics.kind == "diagonal" else prepared
                errors = self._errors(name, rows, prepared, names)
                each = [errors[f] for f in names]  # an anchor is among the formats too
                parts.append(_Rows(rows=rows.to(torch.float32), errors=each, importance=importance, total=total))
        return parts

    def _factor(self, drawn: Sequence[_Rows]) -> np.ndarray:
        """The factor by which every format changes all weights of a matrix alike: ``<Delta, W> / <W, W>``, weighted."""
        products = np.zeros((2, len(self.formats) + len(self.anchors)))
        for part in [] if self.whole else drawn:
            w, there = part.rows, [(j, e) for j, e in enumerate(part.errors) if e is not None]
            moved = [each for _, e in there for each in (w + e, w - e)]
            plain, *sums = (squares.sum() for squares in self._weigh_each([w, *moved], part.importance))
            products[1] += plain
            for k, (j, _) in enumerate(there):
                products[0, j] += (sums[2 * k] - sums[2 * k + 1]) / 4
        return products[0] / np.where(products[1] > 0, products[1], 1.0)

    def _squares(self, drawn: Sequence[_Rows], factors: np.ndarray) -> tuple[np.ndarray, float]:
        parts = []
        for part in drawn:
            errors = [_apart(e, part.rows, c) for e, c in zip(part.errors, factors, strict=True) if e is not None]
            weighed = iter(self._weigh_each(errors, part.importance))
            each = [np.zeros(len(part.rows)) if e is None else next(weighed) for e in part.errors]
            parts.append(np.stack(each, 1))
        squares, total = np.concatenate(parts), drawn[0].total
        return squares * (total / len(squares)), max(0.0, 1.0 - len(squares) / total)

    def _weigh_each(self, errors: Sequence[torch.Tensor], importance: Any) -> list[np.ndarray]:
        """Weighted squares of several errors of the same rows; with error feedback one product is that of all of them."""
        if self.quantiser.statistic != "gram" or not errors:
            return [self._weighed(each, importance) for each in errors]
        return np.split(self._weighed(torch.cat(list(errors)), importance), len(errors))

    def _weighed(self, errors: torch.Tensor, importance: Any) -> np.ndarray:
        plain = errors.square().sum(1) if importance is None else self.quantiser.weigh(errors, importance)
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


def _united(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Sums of arrays by name, of which every process has some columns and zeros in the others."""
    sums = dict[str, np.ndarray]()
    for name, values in (item for each in parts for item in each.items()):
        sums[name] = sums[name] + values if name in sums else values
    return sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Sampled rows of one copy of a matrix, of ``total`` rows of all copies: their errors, and what weighs them."""

    rows: torch.Tensor
    errors: list[torch.Tensor | None]
    importance: Any
    total: int


def _apart(errors: torch.Tensor, rows: torch.Tensor, factor: float) -> torch.Tensor:
    """The rest R of rounding errors."""
    return errors if factor == 0.0 else errors - float(factor) * rows.to(errors)
