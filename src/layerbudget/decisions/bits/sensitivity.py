r"""What every format of every block costs the output: measured, or by the Fisher form along the rounding error.

For block i in format j, with ``Delta_ij`` what the format makes of its matrices less what they are,

    measured      d_ij = mean over tokens of KL(p_0 || p with Delta_ij), forwards begun at the block's own layer;
    directional   d_ij = 1/2 (1/N) sum_s E_y [ (sum_t b_st(y)' Delta_ij a_st)^2 ], all i and j from ``1 + 2 draws`` passes
                  (:mod:`layerbudget.sensitivity.directional.directional`): rounding is so small a step that the dense point is
                  enough.

Predictions of one matrix are pooled over its formats (:mod:`layerbudget.sensitivity.directional.pooling`): draws of labels are
noise, and a plan
picks what is small by chance. Both are of the quantiser that will write the file. Embedding and head are measured in both: they
are few, and an embedding has no inputs. Standard errors are over sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...compressors.base import Level
from ...compressors.formats import Format, find_format, formats_of
from ...compressors.rounding import Quantiser
from ...compressors.treating import Found, matrices
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput
from ...execution.modes import inference
from ...models.blocks import describe, weight_of
from ...models.offload import Mapped, mapped
from ...models.provenance import versions
from ...progress import Progress, Steps
from ...records import Block, natural_key
from ...scores import Scores
from ...sensitivity.directional.directional import forms_along
from ...sensitivity.directional.directions import Directions, Written
from ...sensitivity.directional.pooling import pooled
from ...sensitivity.directional.sums import Unit
from .items import fixed_bytes, items_of, layer_index
from .plan import ESTIMATOR, Table, check_limit, sizes_of
from .rounding_bench import Bench, Damages, has, measured
from .runtimes import Runtime, find_runtime
from .storing import quantiser_of
from .written import apart

KEEP_BYTES = 1 << 30
CACHED = 1 << 17  # entries of a matrix that are rounded together
MEASURES = ("directional", "measured", "relative")


def rounding_damage(
    model: nn.Module,
    data: CalibrationSet,
    *,
    formats: Sequence[str] | None = None,
    family: str = "compressed-tensors",
    runtime: str | None = None,
    by: str = "linear",
    group: int | None = None,
    damage: str = "directional",
    method: str = "rtn",
    draws: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    unwritten: str = "plan",
    progress: Progress | None = None,
) -> Scores:
    """Bytes and damage of every block in every format; the model is left as it was.

    Args:
        model: Any transformers model with one list of layers.
        data: Calibration tokens.
        formats: Names; by default those of the family that the runtime reads. Sixteen bits are always among them.
        family: ``compressed-tensors`` or ``gguf``.
        runtime: ``transformers``, ``vllm`` or ``llama.cpp``: which matrices must agree, and which formats run.
        by: ``linear`` or ``layer``.
        group: Group size of compressed-tensors.
        damage: ``directional``, ``measured``, or ``relative``: ``|Delta|^2 / |W|^2`` to nearest, no damage yet and no pass, to
            be weighed by a score.
        method: The quantiser that will write the file: ``rtn``, ``weighted`` or ``gptq``.
        draws: Draws of labels (directional).
        batch_size: Sequences per forward.
        seed: Of the draws.
        unwritten: What becomes of matrices that no file holds here: ``plan`` (they are measured like all others), ``16-bit``
            (they stay so, and count), or ``refuse`` before anything is measured, the default of ``plan_formats``.
        progress: Called with (steps done, steps).

    Returns:
        A record of the estimator ``rounding`` for :func:`~layerbudget.decisions.bits.plan.plan_bits`.

    Raises:
        CoverageError: A streamed model with measured damages, or with a quantiser that reads inputs.
        InvalidInput: An unknown name, a format that the runtime does not read, or one that fits no matrix; a matrix that
            cannot be written.
    """
    if damage not in MEASURES:
        raise InvalidInput(f"There is no damage {damage!r}.", f"There are {', '.join(MEASURES)}.", "Choose one of those.")
    if mapped(model) is not None:
        _check_streamed(damage, method)
    target = find_runtime(runtime, family)
    blocks, kept, reasons = apart(model, items_of(model, target, by), target, unwritten)
    chosen = candidates(blocks, target, formats, group)
    if damage == "measured":
        found = measured(model, data, blocks, chosen, method=method, batch_size=batch_size, progress=progress)
    elif damage == "relative":
        found = relative(model, blocks, chosen)
    else:
        found = directional(
            model, data, blocks, chosen, method=method, batch_size=batch_size, progress=progress, draws=draws, seed=seed
        )
    blocks, found = _with_kept(blocks, found, kept)
    how = {"method": method, "measure": damage, "seed": seed} | ({"unwritten": reasons} if reasons else {})
    return _record(model, data, blocks, chosen, found, target, how)


def check_budget(
    model: nn.Module, *, bits: float | None = None, budget: str | None = None, formats: Sequence[str] | None = None,
    family: str = "compressed-tensors", runtime: str | None = None, by: str = "linear", group: int | None = None,
    unwritten: str = "refuse", **others: Any,
) -> None:  # fmt: skip
    """Refuse, before anything is measured, what could not be planned or written; options of :func:`rounding_damage`.

    Raises:
        InfeasibleBudget: The smallest plan is larger.
        InvalidInput: See :func:`rounding_damage`.
    """
    target = find_runtime(runtime, family)
    blocks, kept, _ = apart(model, items_of(model, target, by), target, unwritten)
    chosen = candidates(blocks, target, formats, group)
    there = np.array([[has(b, f) and (b not in kept or f.plain) for f in chosen] for b in (*blocks, *kept)])
    size = np.array([[sizes_of([b], {"": f.bytes})[0, 0] if has(b, f) else 0 for f in chosen] for b in (*blocks, *kept)])
    table = Table(
        blocks=(*blocks, *kept), formats=tuple(f.name for f in chosen), size=size, damage=np.where(there, 0.0, np.inf),
        error=np.zeros(there.shape), fixed=fixed_bytes(model, (*blocks, *kept), family), family=family, runtime=target.name,
        method="",
    )  # fmt: skip
    check_limit(table, table.limit(bits, budget))


def _with_kept(blocks: tuple[Block, ...], found: Damages, kept: tuple[Block, ...]) -> tuple[tuple[Block, ...], Damages]:
    """All blocks in natural order: those that stay have sixteen bits (the last format), which is what they are."""
    if not kept:
        return blocks, found
    every = (*blocks, *kept)
    order = sorted(range(len(every)), key=lambda i: natural_key(every[i].name))
    rows = np.full((len(kept), found.damage.shape[1]), np.inf)
    rows[:, -1] = 0.0
    nothing = np.zeros((len(kept), *found.rest.shape[1:]))
    damage, rest = np.vstack([found.damage, rows])[order], np.concatenate([found.rest, nothing])[order]
    return tuple(every[i] for i in order), dataclasses.replace(found, damage=damage, rest=rest)


def _check_streamed(damage: str, method: str) -> None:
    """Refuse what would hold copies of a streamed model's weights.

    Raises:
        CoverageError: Measured damages, or a quantiser that reads inputs.
    """
    if damage == "measured":
        raise CoverageError(
            "Measured damages write every format into the weights, and those of a streamed model stay in their files.", "",
            "Use --damage directional, or --no-stream.",
        )  # fmt: skip
    if quantiser_of(method).statistic != "none":
        raise CoverageError(
            f"The rounding errors of {method} depend on inputs: all of them would be held, a copy of the model per format.",
            "A streamed model is planned by rounding errors that are made again when they are needed.",
            "Plan with --method rtn, or use --no-stream.",
        )  # fmt: skip


def candidates(blocks: Sequence[Block], target: Runtime, names: Sequence[str] | None, group: int | None) -> tuple[Format, ...]:
    """Formats to choose among, the smallest first; sixteen bits last.

    Raises:
        InvalidInput: A format that the runtime does not read, or that no block can take.
    """
    widths = sorted({m.d_in for b in blocks for m in b.modules})
    usual = formats_of(target.family, widths, group=group)
    if names is None:
        return tuple(f for f in usual if target.reads(f))
    chosen = [target.check(find_format(n)) for n in dict.fromkeys(names)]
    for form in chosen:
        if not any(form.fits(w) for w in widths):
            form.check("Every matrix", widths[0])
    return (*sorted((f for f in chosen if not f.plain), key=lambda f: (f.bits, f.group or 0)), usual[-1])


def _record(
    model: nn.Module, data: CalibrationSet, blocks: Sequence[Block], formats: Sequence[Format], found: Damages, target: Runtime,
    how: Mapping[str, object],
) -> Scores:  # fmt: skip
    none = np.isinf(found.damage)
    size = np.stack([[sizes_of([b], {f.name: f.bytes})[0, 0] if has(b, f) else -1 for f in formats] for b in blocks])

    def rows(values: np.ndarray) -> list[list[float | None]]:
        return [
            [None if n else float(v) for v, n in zip(row, gone, strict=True)] for row, gone in zip(values, none, strict=True)
        ]

    first = np.argmin(none, axis=1)
    k = np.arange(len(blocks))
    choices = {
        "formats": [f.name for f in formats], "size": rows(size), "damage": rows(found.damage), "error": rows(found.error),
        "fixed": fixed_bytes(model, blocks, target.family), "family": target.family, "runtime": target.name,
        "passes": found.passes, "kept": found.kept, **how,
        "rest": [[[float(f"{v:.4g}") for v in each] for each in row] for row in found.rest],
    }  # fmt: skip
    return Scores(
        estimator=ESTIMATOR, blocks=tuple(blocks), gain=(tuple(found.damage[k, first]),), unit="nats per token",
        standard_error=(tuple(found.error[k, first]),), model=describe(model), data=data.describe(), versions=versions(),
        extra={"choices": choices},
    )  # fmt: skip


def directional(
    model: nn.Module,
    data: CalibrationSet,
    blocks: Sequence[Block],
    formats: Sequence[Format],
    *,
    method: str = "rtn",
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Damages:
    """All blocks in all formats from one forward and ``draws`` backwards; embedding and head measured. See the module."""
    found = Damages.none(len(blocks), len(formats), data.samples)
    bench = Bench(model, data, formats, method, batch_size)
    place = [layer_index(model, b) for b in blocks]
    inside = [i for i, p in enumerate(place) if p is not None]
    units: dict[str, Unit] = {}
    lies = mapped(model)
    keep = bench.quantiser.statistic != "none" or lies is None and 4 * sum(b.numel for b in blocks) * len(formats) <= KEEP_BYTES
    with inference(model), bench:
        for i in (i for i, p in enumerate(place) if p is None):
            found.damage[i], found.rest[i] = bench.end(blocks[i])
        if lies is not None:
            lies.leave()
        tick = Steps(progress, len(bench.walk), "rounding layers")
        for layer in range(len(bench.walk)):
            mine = [i for i in inside if place[i] == layer]
            statistics = bench.statistics(layer, [blocks[i] for i in mine])
            for i in mine:
                units |= _units(bench, blocks[i], inside.index(i), statistics, keep)
            if bench.quantiser.statistic != "none":
                bench.walk.advance()
            tick()
    if inside:
        forms = forms_along(model, data, units, draws=draws, seed=seed, batch_size=batch_size, progress=progress, apart=True)
        there = np.array([[has(blocks[i], f) for f in formats] for i in inside])
        predicted = np.where(there, forms.second, np.inf)
        found.rest[inside] = np.where(there[..., None], forms.rest, 0.0)
        norm = np.stack([sum(_norms(units[m.name].directions) for m in blocks[i].modules) for i in inside])
        found.damage[inside], found.kept = pooled(predicted, forms.error, norm)
        found.passes = forms.passes
    found.passes += bench.passes
    return found


def relative(model: nn.Module, blocks: Sequence[Block], formats: Sequence[Format]) -> Damages:
    """Squared rounding errors to nearest over the squared weights, of every block in every format that it has."""
    out = np.full((len(blocks), len(formats)), np.inf)
    for i, block in enumerate(blocks):
        names = [f.name if has(block, f) else None for f in formats]
        held = [matrices(*weight_of(model, m.name)) for m in block.modules]
        errors = sum((Rounding(v, quantiser_of("rtn"), names, mapped(model)).norms() for v in held), np.zeros(len(names)))
        weights = sum(float(v.detach().float().square().sum()) for views in held for v in views)
        out[i] = np.where([n is None for n in names], np.inf, errors / max(weights, np.finfo(float).tiny))
    return Damages(damage=out, rest=np.zeros((*out.shape, 0)))


class Rounding(Directions):
    """Rounding errors that are made again whenever they are needed: nothing is kept of a large model.

    Args:
        views: The matrix, its copies one by one, ``(d_out, d_in)`` each.
        quantiser: One that looks at no inputs.
        names: Formats; None where the block does not have it.
        lies: The files that the views are mapped from; the weights are what layers compute with.
    """

    def __init__(
        self, views: Sequence[torch.Tensor], quantiser: Quantiser, names: Sequence[str | None], lies: Mapped | None = None
    ) -> None:
        self.views, self.quantiser, self.names, self.lies = list(views), quantiser, list(names), lies
        self.groups, self.levels = 1, len(self.names)
        self._norms: dict[str, float] = {}

    def along(self, gradient: torch.Tensor) -> torch.Tensor:
        """See :meth:`Directions.along`."""
        return torch.stack([self._one(gradient, name) for name in self.names], -1)[:, None]

    def _one(self, gradient: torch.Tensor, name: str | None) -> torch.Tensor:
        found, norm, start = gradient.new_zeros(len(gradient), dtype=torch.float64), 0.0, 0
        for errors in self._errors(name) if name is not None else ():
            rows = gradient[:, start : start + len(errors)]
            found += torch.einsum("boi,oi->bo", rows, errors.to(gradient)).double().sum(1)
            norm += 0.0 if name in self._norms else float(errors.square().sum())
            start += len(errors)
        if name is not None:  # they were there, and making them is what takes the time
            self._norms.setdefault(name, norm)
        return found

    def _errors(self, name: str) -> Iterator[torch.Tensor]:
        """Some rows at a time: as many as stay in the processor's cache through all that rounding does to them."""
        level = Level(format=name)
        for view in self.views:
            for rows in view.detach().split(max(1, CACHED // view.shape[1])):
                held = rows if self.lies is None else rows.to(self.lies.device, self.lies.dtype)
                yield self.quantiser.apply(held, None, level) - held

    def norms(self) -> np.ndarray:
        """Squared norms of the rounding errors, ``(levels,)``."""
        for name in (n for n in self.names if n is not None and n not in self._norms):
            self._norms[name] = sum(float(errors.square().sum()) for errors in self._errors(name))
        return np.array([0.0 if n is None else self._norms[n] for n in self.names])


def _units(bench: Bench, block: Block, first: int, statistics: Found, keep: bool) -> dict[str, Unit]:
    """The rounding errors of a block's matrices in every format, none where it does not have one."""
    views = {m.name: matrices(*weight_of(bench.model, m.name)) for m in block.modules}
    if not keep:
        names = [f.name if has(block, f) else None for f in bench.formats]
        again = {n: Rounding(v, bench.quantiser, names, mapped(bench.model)) for n, v in views.items()}
        return {n: Unit(directions=d, first=first) for n, d in again.items()}
    dense = {name: torch.cat([v.detach() for v in held]).clone() for name, held in views.items()}
    deltas = {name: [torch.zeros_like(w) for _ in bench.formats] for name, w in dense.items()}
    for j, changed in bench.trials(block, statistics):
        for name, held in views.items() if changed else ():
            deltas[name][j] = torch.cat([v.detach() for v in held]) - dense[name]
    return {name: Unit(directions=Written(d), first=first) for name, d in deltas.items()}


def _norms(directions: Directions) -> np.ndarray:
    """Squared norms of the errors of a matrix, ``(levels,)``."""
    if isinstance(directions, Rounding):
        return directions.norms()
    deltas = directions.deltas if isinstance(directions, Written) else []
    return np.array([float(d.square().sum()) for d in deltas])
