"""What smaller shapes cost a model, and what formats cost the models that were cut, for several savings.

All shapes come from one look at the dense model (:func:`~layerbudget.decisions.shapes.plan.plans_at_once`). For each of them
the model is cut and refitted for real, and put back. The damage of the cut is measured by halves of the text: shapes and refit
of one half are judged on the other. Damages of formats, of matrices and cache, are measured anew on the model that was cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...compressors.formats import PACKED, PACKED_GROUPS, PLAIN, find_format
from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput, UnknownStructure
from ...execution.divergence import Reference
from ...execution.loss import answers
from ...execution.processes import process_group
from ...models.blocks import config_of, layers, text_config
from ...models.experts import find_experts
from ...plan import Plan
from ...progress import Progress
from ...records import to_jsonable
from ..bits.gguf_names import architecture
from ..bits.plan import empty_table
from ..bits.sensitivity import rounding_damage
from ..bits.table import Table
from ..cache.plan import cache_space
from ..cache.sensitivity import cache_damage
from ..cache.space import CacheSpace
from ..kept_experts.program import per_token
from ..kept_experts.sensitivity import folds_of
from ..shapes.apply import apply_shapes, preserved
from ..shapes.layouts import Attention, find_attention, find_mlp
from ..shapes.plan import plans_at_once
from ..shapes.program import KINDS
from ..shapes.save import follow
from ..shapes.units import find_parts, where_is
from .program import Fit, Terms, smallest
from .removal import check_written

if TYPE_CHECKING:
    from torch import nn

SAVINGS = ("5% flops", "10% flops", "15% flops", "20% flops", "30% flops")
LOOK = 24.0  # forward equivalents of all looks: two units of heads, the whole text and its halves
EACH = 10.0  # of one set of shapes beside those of its formats: cuts with all text and with halves (3 each), and their damage
_UNITS = 6  # of an MLP at least: wider steps come too far apart
_OUT = "Leave shapes out (--set shapes=false)."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cutting:
    """How the shapes of a model are planned for a runtime.

    Attributes:
        multiple: Channels of one MLP unit.
        even: Whether all layers stay alike.
        kinds: What may go: ``heads`` and ``mlp``, or ``mlp``.
        options: Of the formats, in the whole model and in those that are cut.
    """

    multiple: int
    even: bool
    kinds: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def way(self) -> dict[str, Any]:
        """Arguments of a plan of shapes."""
        return {"multiple": self.multiple, "even": self.even, "kinds": self.kinds}


def cutting_for(model: nn.Module, options: Mapping[str, Any], multiple: int | None = None) -> Cutting:
    """Return how a model's shapes are planned, before anything is measured.

    Layers may differ where llama.cpp computes such a model; elsewhere all stay alike, as a plain configuration says them.
    Widths are multiples of the formats' groups, where an MLP has enough of these.

    Raises:
        InvalidInput: A model with experts or of unknown layers, or that ``apply`` does not write; an importance matrix.
        CoverageError: Several processes.
    """
    if process_group().size > 1:
        raise CoverageError("Shapes are planned in one process.", "", "Use one, or leave shapes out.")
    if options.get("imatrix") is not None:
        what = "An importance matrix is of the whole model, and shapes change what it is about."
        raise InvalidInput(what, "", "Leave it out: without it importances are of the text. Or leave shapes out.")
    with contextlib.suppress(UnknownStructure):
        if find_experts(model):
            what = f"{type(model).__name__} has experts, whose shapes are not decided here."
            raise InvalidInput(what, "", "Let experts go instead (--set experts=true).")
    try:
        found = [(find_attention(layer, name), find_mlp(layer, name)) for name, layer in layers(model)]
    except UnknownStructure as error:
        raise InvalidInput(error.what, error.feasible, _OUT) from error
    if multiple is not None and (not isinstance(multiple, int) or multiple < 1):
        raise InvalidInput(f"multiple is {multiple}.", "It is a whole number of at least 1.", "Use 32.")
    config, gguf = text_config(config_of(model)), options["runtime"] == "llama.cpp"
    even = not gguf or not _fits(config, uneven=True)  # of another family, whose layers are alike in a file
    kinds = KINDS if not gguf or _fits(config, uneven=not even, fewer=True) else ("mlp",)
    names = [n for pair in found for where in pair for n in (*where.producers, where.consumer)]
    check_written(model, options, names, "heads and widths go", "shapes")
    options, widths = dict(options), [mlp.inputs for _, mlp in found]
    packed = options["family"] == PACKED
    if packed and options.get("group") is None and options.get("formats") is None:
        hidden = int(text_config(config_of(model)).hidden_size)
        steps = [hidden, *widths, *(heads.head_dim * n for heads, _ in found for n in (heads.per_group, heads.groups))]
        options["group"] = next((g for g in PACKED_GROUPS if all(s % g == 0 for s in steps)), None)
    table = empty_table(model, None, options)
    if packed and options.get("formats") is None:  # a cut would have others by itself
        options |= {"formats": [f for f in table.formats if f != PLAIN[PACKED].name], "group": None}
    groups = {find_format(f, table.family).group or 1 for f in table.formats}
    able = [g for g in groups if all(w % g == 0 and w >= _UNITS * g for w in widths)]
    suits = max(max(able, default=0), 8 if max(groups) == 1 else min(g for g in groups if g > 1))
    return Cutting(multiple=multiple or suits, even=even, kinds=kinds, options=options)


def _fits(config: Any, **what: bool) -> bool:
    """Whether llama.cpp has an architecture for a model with such layers."""
    try:
        architecture(config, **what)
    except InvalidInput:
        return False
    return True


@contextlib.contextmanager
def cut(model: nn.Module, plan: Plan, data: CalibrationSet, batch_size: int = 8) -> Iterator[None]:
    """Within it a model is cut and refitted as a plan of shapes says; afterwards it is as it was."""
    with preserved(model):
        apply_shapes(model, plan, data, batch_size=batch_size)
        yield


def sized(model: nn.Module, plan: Plan, tokenizer: Any, terms: Terms, options: Mapping[str, Any]) -> tuple[Table, CacheSpace]:
    """Return the bytes of all formats of a model's matrices and cache after a plan of shapes, without damages."""
    shapes, hyper = plan.extra["shapes"], plan.hyperparameters
    parts = find_parts(model, by=hyper["by"], multiple=hyper["multiple"])
    with preserved(model), torch.no_grad():
        for kind in ("heads", "mlp"):
            mine = [p for p in parts if p.kind == kind]
            before, after = [where_is(model, p) for p in mine], []
            for part, where in zip(mine, before, strict=True):
                left = where.without(int(shapes[part.name]["removed"]), part.by)
                keep = torch.arange(left.inputs)
                if isinstance(where, Attention) and isinstance(left, Attention):  # the first of every group that stays
                    keep = torch.arange(where.heads).reshape(where.groups, -1)[: left.groups, : left.per_group].flatten()
                after.append(where.cut(model, keep))
            follow(model, before, after)
        space = cache_space(model, terms.tokens, terms.batch, str(options["runtime"]), terms.cache)
        return empty_table(model, tokenizer, options), space


def cache_record(
    model: nn.Module, data: CalibrationSet, space: CacheSpace, draws: int, seed: int, progress: Progress | None
) -> dict[str, Any]:
    """Return what scores hold of a cache: its space, and the damage of every format."""
    damage, rest, passes = cache_damage(model, data, space, draws, seed, 1, progress)
    return {**space.record(), "damage": damage.tolist(), "rest": rest.tolist(), "passes": passes}


def candidates(
    model: nn.Module, data: CalibrationSet, cutting: Cutting, *, seed: int = 0, batch_size: int = 8
) -> dict[str, Any]:
    """Return the plans of shapes by saving, those of every half of the text, and the forward equivalents of the looks.

    Raises:
        InvalidInput: The model can save none of them.
    """
    own: dict[str, Any] = {**cutting.way, "seed": seed, "batch_size": batch_size}
    try:
        plans, passes = plans_at_once(model, data, SAVINGS, **own)
        halves = []
        for judges in folds_of(answers(model, data)):
            mine, more = plans_at_once(model, data.select(torch.from_numpy(~judges)), list(plans), **own)
            halves.append(mine)
            passes += more * float((~judges).mean())
    except UnknownStructure as error:
        raise InvalidInput(error.what, error.feasible, _OUT) from error
    if not plans:
        what = f"No layer of this model can lose heads or {cutting.multiple} channels of its MLP for 5 to 30 % of the FLOPs."
        raise InvalidInput(what, "", "Take smaller steps (--set multiple=8). Or leave shapes out.")
    unique = {p.counts.tobytes(): saving for saving, p in reversed(plans.items())}  # of equal shapes the first
    kept = [saving for saving in plans if saving in unique.values()]
    told = {s: [half[s].to_dict() if s in half else None for half in halves] for s in kept}
    return {"passes": passes, "plans": [{"plan": plans[s].to_dict(), "halves": told[s]} for s in kept]}


def measure_cut(
    model: nn.Module,
    data: CalibrationSet,
    row: Mapping[str, Any],
    terms: Terms,
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    draws: int,
    seed: int,
    batch_size: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Return what a set of shapes costs, and scores of the model that was cut.

    Args:
        model: Is left as it was.
        data: Tokens that decide and refit.
        row: One of :func:`candidates`.
        terms: Context, batch and formats of the cache.
        tokenizer: Its vocabulary counts in a GGUF file.
        options: Of :func:`~layerbudget.decisions.bits.sensitivity.rounding_damage`.
        draws: Labels drawn for every token.
        seed: Of these.
        batch_size: Sequences per forward.
        progress: Called with (steps done, steps).
    """
    plan, folds, judged = Plan.from_dict(row["plan"]), folds_of(answers(model, data)), []
    for judges, half in zip(folds, row["halves"], strict=True):
        other = data.select(torch.from_numpy(judges))
        reference, chosen = Reference(model, other, batch_size), plan if half is None else Plan.from_dict(half)
        with cut(model, chosen, data.select(torch.from_numpy(~judges)), batch_size):
            judged.append(reference.measure_sequences())
    before, reference = _sizes(model), Reference(model, data, batch_size)
    with cut(model, plan, data, batch_size):
        after, here = _sizes(model), reference.measure_sequences()
        table = empty_table(model, tokenizer, options)
        scores = rounding_damage(model, data, draws=draws, seed=seed, batch_size=batch_size, progress=progress, **options)
        space = cache_space(model, terms.tokens, terms.batch, str(options["runtime"]), terms.cache)
        held = cache_record(model, data, space, draws, seed, progress)
    choices = {**scores.extra["choices"], "head": table.head}
    scores = dataclasses.replace(scores, extra={**scores.extra, "choices": choices, "cache": held})
    damage, error = per_token(*(np.concatenate(part) for part in zip(*(judged or [here]), strict=True)))
    told = {"measured": damage, "measured_error": error}
    own = {"measured": per_token(*here)[0], "crossed": bool(judged), "samples": data.samples}
    own |= {"predicted": damage} if judged else {}  # what to expect on other text
    plan = dataclasses.replace(plan, extra={**plan.extra, **own})
    share = 1 - float(plan.budget["spent"]) / float(plan.budget["base"])
    passes = choices["passes"] + held["passes"] + EACH + 2.0 * (plan.hyperparameters["compensate"] == "stream")
    sizes = {name: (before[name], after[name]) for name in before}
    return to_jsonable(
        {"plan": plan.to_dict(), "share": share, "sizes": sizes, "scores": scores.to_dict(), "passes": passes, **told}
    )


def _sizes(model: nn.Module) -> dict[str, list[int]]:
    """Query heads, key-value heads and MLP widths of all layers."""
    found = [(find_attention(layer, name), find_mlp(layer, name).width) for name, layer in layers(model)]
    rows = {"heads": [a.heads for a, _ in found], "key-value heads": [a.groups for a, _ in found]}
    return {**rows, "channels of the MLP": [width for _, width in found]}


def whole(model: nn.Module) -> dict[str, Any]:
    """Return the row of the model as it is."""
    return {"share": 1.0, "sizes": {n: (v, v) for n, v in _sizes(model).items()}, "measured": 0.0, "measured_error": 0.0}


def check_fits(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    dense: Fit,
    terms: Terms,
    tokenizer: Any,
    options: Mapping[str, Any],
    others: Callable[[], Iterable[tuple[str, Fit]]] = tuple,
) -> None:
    """Refuse a memory in which neither the whole model nor one of those that are cut has a plan."""
    cuts = [Fit.of(*sized(model, Plan.from_dict(row["plan"]), tokenizer, terms, options), terms) for row in rows]
    smallest([dense, *cuts]).limit(terms.bytes, others, terms.utilization)
