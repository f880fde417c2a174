r"""Smaller shapes by directional damage: heads, MLP channels and whole layers, decided together.

Everything that a layer may lose is a change of its matrices (:mod:`layerbudget.decisions.shapes.point`), so its damage is
predicted as for any treatment (:mod:`layerbudget.sensitivity.directional.terms`): at the dense model by the second term,
at treated points by both. The budget is approached in a few strides, each planned where the last one has put the model; then
steps within a trust region go on while the measured divergence falls. Every one of them is an exact program over whole units
(:mod:`layerbudget.decisions.shapes.program`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...arguments import checked
from ...budget import parse_budget
from ...canonical import to_jsonable
from ...compressors.formats import RUNTIMES
from ...data.calibration import CalibrationSet
from ...errors import InfeasibleBudget, InvalidInput, UnknownStructure
from ...execution.processes import Teams, alone, broadcast
from ...execution.sharing import SharedParts
from ...gguf.names import architecture
from ...models.blocks import check_finite, config_of, describe, text_config
from ...models.experts import EXPERTS_KEPT
from ...models.machine import computation, versions
from ...models.offload import need_settled
from ...plan import Plan
from ...progress import Progress, Steps, say
from .apply import measure_plan
from .compensation import ways_of
from .nemotron import check_config
from .path import Search, best_start
from .point import PARTS, folds_of
from .program import DAMPING, KINDS, PASSES, ShapeSpace
from .save import allowed_units, check_depth, described_smaller
from .speed import Speed, measure_speed, sizes_of_layers
from .units import find_parts, head_units

if TYPE_CHECKING:
    from torch import nn

_MEASURING = 5.0  # dense, three times through every layer to cut it, and the smaller model; the stream needs one more


@checked
def plan_shapes(
    model: nn.Module,
    data: CalibrationSet,
    budget: str | float,
    *,
    kinds: Sequence[str] = KINDS,
    by: str = "auto",
    multiple: int = 8,
    max_removed: float = 0.75,
    depth: int = 0,
    even: bool = False,
    runtime: str | None = None,
    compensate: str = "auto",
    passes: float = PASSES,
    strides: int = 2,
    trust: float = 0.12,
    draws: int = 2,
    damping: float = DAMPING,
    threads: int = 1,
    speed: Speed | None = None,
    bytes_per_parameter: float | None = None,
    batch_size: int = 8,
    seed: int = 0,
    resume: Path | str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide heads, MLP widths and layers together by directional damage: at least ``budget`` is saved.

    Args:
        model: The model; left as it was.
        data: Calibration tokens.
        budget: What is to be saved: ``"25% flops"``, ``"100 MB"``, ``"2M params"`` (of the layers' matrices), or
            ``"25% latency"`` of a request with 256 tokens read and 64 written in llama.cpp, measured on this machine first.
        kinds: ``heads``, ``mlp`` or both.
        by: Units of heads, see :func:`layerbudget.decisions.shapes.units.find_parts`; ``auto`` looks at both where both are
            possible and takes those whose first plan is predicted to do less damage. Only ``groups`` make the key-value cache
            smaller.
        multiple: Channels of one MLP unit.
        max_removed: Largest share of the units of one part.
        depth: So many whole layers may go. The search without them comes first, where it can meet the budget. Then plans with
            layers gone, and with no other cuts than these leave to be saved, are measured within the same ``passes``. The plan
            is the best of all that were measured, so that its predicted damage is no more than without ``depth``.
        even: The same numbers of heads and MLP units in all layers that stay, so that a plain config can describe the model.
        runtime: Plans only what it loads, and refuses what it does not compute. ``transformers``: as with ``even``.
            ``llama.cpp``: anything, of Llama, Mistral and Qwen2. ``vllm``: of these, the same heads in all layers and MLPs of
            any width. With ``even`` the result is an ordinary checkpoint for all of them.
        compensate: What the matrices behind become: ``refit``, ``stream``, or ``auto``; see
            :mod:`layerbudget.decisions.shapes.compensation`.
        passes: Most forward equivalents of the whole text, the last measurement included.
        strides: In so many equal parts of the budget the first plan is made.
        trust: Largest change of a part, as a share of its units, in the first step at a treated point.
        draws: Draws of labels.
        damping: Relative to the mean of the second moments' diagonal.
        threads: Of llama.cpp, where latency is measured.
        speed: What :func:`~layerbudget.decisions.shapes.speed.measure_speed` found before; then it is not measured again.
        bytes_per_parameter: For budgets in bytes; those of the model as it is by default.
        batch_size: Sequences per forward.
        seed: Of the draws.
        resume: Folder that keeps what was measured; an interrupted run continues from it.
        progress: Called with (forward equivalents spent, most).

    Returns:
        A plan of kind ``shapes`` and rule ``directional``; its payload has the ``path``, ``forward_passes``, ``predicted``
        damage and what was ``measured`` on the model that was really cut, on all of the text, in nats per token. Where
        ``crossed``, of four or more samples, the predicted damage is that of parts of the text that the others refit: expect
        it on other text. Under a budget of latency there are also the ``speed`` that was measured and the
        ``tokens_per_second`` that it predicts, before and after.

    Raises:
        UnknownStructure: A layer without heads or MLP of a known layout.
        InfeasibleBudget: The caps do not allow it.
        InvalidInput: Passes that allow no step, an option outside its domain, a model that the runtime does not compute with
            layers that differ, or a text with fewer sequences in one of its parts than processes work on it.
        CoverageError: Layers of a streamed model that come and go.
        ModelMismatch: The folder holds another run.
    """
    alike = _alike(model, even, runtime, kinds)
    _check_model(model, depth)
    Teams.check([fold.samples for fold in folds_of(model, data)], PARTS)
    speed = _speed(model, budget, runtime, threads, resume) if speed is None else speed
    spaces = _spaces(
        model,
        by,
        multiple,
        None if speed is None else speed.prices(),
        budget=budget,
        kinds=kinds,
        max_removed=max_removed,
        depth=depth,
        even=alike,
        bytes_per_parameter=bytes_per_parameter or float(next(model.parameters()).element_size()),
    )
    way = ways_of(model, data, compensate)
    last = _MEASURING + (way == "stream")
    own: dict[str, Any] = {"trust": trust, "strides": strides, "draws": draws, "passes": passes}
    search = Search(**own, damping=damping, seed=seed, batch_size=batch_size)
    search.check(depth, last, len(spaces))
    hyper = {"multiple": multiple, "compensate": way, **own}
    asked = {**hyper, **spaces[0].hyper, "by": by, "seed": seed, "damping": damping, "batch_size": batch_size}
    identity = describe(model)
    run = {"data": data.digest, "versions": versions(), "computation": computation(model), "model": identity["digest"]}
    parts, tick = SharedParts(resume, {**asked, **run}), Steps(progress, int(passes), "forward equivalents")
    path = best_start(model, data, spaces, search, tick, parts)
    others = path.even_and_uneven()
    try:
        here, solution = path.run(passes - last)
    finally:
        path.point.restore()
    hyper |= {} if runtime is None else {"runtime": runtime}
    hyper |= {} if damping == DAMPING else {"damping": damping}
    hyper |= {"by": next((p.by for p in path.space.parts if p.kind == "heads"), by), "seed": seed}
    plan = path.space.plan(here.state, here.divergence, solution, hyper, identity)
    plan = plan if speed is None else _with_speed(model, plan, speed)
    say(progress, "cut and refitted, layers")
    return plan.with_payload(
        beside=others,
        path=to_jsonable(path.log),
        forward_passes=float(path.point.passes + last),
        experts_differ=hasattr(config_of(model), EXPERTS_KEPT),
        crossed=path.point.folds > 1,  # the predicted damage is on text that did not refit
        measured=_measured(model, plan, data, batch_size, progress),
    )


def _measured(model: nn.Module, plan: Plan, data: CalibrationSet, batch_size: int, progress: Progress | None) -> float:
    """See :func:`measure_plan`; every process runs all of the text, for refits to sums of another order give other digits."""
    with alone():
        measured = measure_plan(model, plan, data, batch_size=batch_size, progress=progress)
    return broadcast(lambda: measured)


def _alike(model: nn.Module, even: bool, runtime: str | None, kinds: Sequence[str]) -> bool | tuple[str, ...]:
    """Kinds that are equal in all layers, for a runtime; refused is a model that it does not compute with uneven layers."""
    if runtime is not None and runtime not in RUNTIMES:
        raise InvalidInput(f"There is no runtime {runtime!r}.", f"There are {', '.join(RUNTIMES)}.", "Choose one of those.")
    if runtime is not None and hasattr(config_of(model), EXPERTS_KEPT):
        raise InvalidInput(
            f"The layers of this model keep different numbers of experts, which {runtime} does not load.",
            "layerbudget.load_model does.",
            "Leave runtime out, or take a model of plan expert-pruning --even.",
        )
    if runtime == "llama.cpp":
        architecture(text_config(config_of(model)), uneven=not even, fewer="heads" in kinds)
    if even or runtime == "transformers":
        return True
    if runtime != "vllm":
        return False
    check_config(config_of(model))
    return ("heads",)


def _check_model(model: nn.Module, depth: int) -> None:
    """Refuse a model that cannot be measured here, or whose config cannot say that layers are gone."""
    need_settled(model, "measuring")
    check_finite(model)
    if depth > 0:
        check_depth(model)


def _speed(model: nn.Module, budget: str | float, runtime: str | None, threads: int, resume: Any) -> Speed | None:
    """Rates of llama.cpp for the layers, where the budget is one of latency."""
    if parse_budget(budget).unit != "latency":
        return None
    if runtime != "llama.cpp" or resume is not None:
        raise InvalidInput(
            f"A budget of latency is measured in llama.cpp, at once{' and not resumed' * (resume is not None)}.",
            "Other runtimes are not timed; flops stand for them.",
            'Add --runtime llama.cpp (runtime="llama.cpp"), without --resume.',
        )
    return broadcast(lambda: measure_speed(model, threads=threads))


def _spaces(
    model: nn.Module, by: str, multiple: int, prices: Any, *, kinds: Sequence[str], even: bool | tuple[str, ...], **options: Any
) -> list[ShapeSpace]:
    """The program for every unit of heads that is looked at, without those that cannot save enough."""
    able = partial(described_smaller, model) if even is True else lambda kind: True
    find_parts(model, kinds=kinds, by=by, multiple=multiple, able=able)  # refuses layers that lack a kind
    spaces, refused = list[ShapeSpace](), list[InfeasibleBudget]()
    for word in head_units(model, kinds, by):
        parts = find_parts(model, kinds=kinds, by=word, multiple=multiple, prices=prices)
        allowed = allowed_units(model, parts, kinds) if even is True else None
        try:
            spaces.append(
                ShapeSpace(parts, kinds=kinds, even=even, allowed=allowed, droppable=partial(_may_go, model), **options)
            )
        except InfeasibleBudget as error:
            refused.append(error)
    if not spaces:
        raise refused[0]
    return spaces


def _may_go(model: nn.Module) -> bool:
    """Whether the config can say that a layer of this model is gone."""
    try:
        check_depth(model)
    except UnknownStructure:
        return False
    return True


def _with_speed(model: nn.Module, plan: Plan, speed: Speed) -> Plan:
    """The plan with the measured speed, its prices, and the tokens per second that it predicts, read and written."""
    plan = plan.with_payload(prices=speed.prices())
    before, after = (speed.seconds(sizes_of_layers(model, p)) for p in (None, plan))
    rates = {name: {"before": 1 / b, "after": 1 / a} for name, b, a in zip(("read", "written"), before, after, strict=True)}
    return plan.with_payload(speed=to_jsonable(dict(speed)), tokens_per_second=rates)
