r"""Smaller shapes by directional damage: heads, MLP channels and whole layers, decided together.

Everything that a layer may lose is a change of its matrices (:mod:`layerbudget.decisions.shapes.point`), so its damage is
predicted as for any treatment (:mod:`layerbudget.sensitivity.directional.terms`): at the dense model by the second term,
at treated points by both. The budget is approached in a few strides, each planned where the last one has put the model; then
steps within a trust region go on while the measured divergence falls. Every one of them is an exact program over whole units
(:mod:`layerbudget.decisions.shapes.program`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...budget import parse_budget
from ...compressors.formats import RUNTIMES
from ...data.calibration import CalibrationSet
from ...errors import InfeasibleBudget, InvalidInput
from ...execution.processes import Teams, alone, broadcast
from ...execution.sharing import SharedParts
from ...gguf.names import architecture
from ...models.blocks import check_finite, config_of, describe, text_config
from ...models.experts import EXPERTS_KEPT
from ...models.machine import computation, versions
from ...models.offload import need_settled
from ...plan import Plan
from ...progress import Progress, Steps, say
from ...records import to_jsonable
from ...sensitivity.directional.terms import QuadraticTerms
from ...solvers.choices import Choice
from ...solvers.steps import Proposal, descend
from ...storage.parts import Parts
from ..describe import EvenUneven
from .apply import measure_plan
from .compensation import ways_of
from .nemotron import check_config
from .point import PARTS, Evaluation, Moments, ShapePoint, folds_of
from .program import DAMPING, GONE, KINDS, PASSES, ShapeSpace
from .save import allowed_units, check_depth, described_smaller
from .speed import Speed, measure_speed, sizes_of_layers
from .units import find_parts, head_units

if TYPE_CHECKING:
    from torch import nn

_LEVELS = 7
_KEPT = ("first", "second", "rest", "tokens", "passes", "divergence")  # of an evaluation, under resume
_MEASURING = 5.0  # dense, three times through every layer to cut it, and the smaller model; the stream needs one more


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
        depth: So many whole layers may go.
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
    _check(draws, strides, trust, depth, passes, last, len(spaces))
    identity = describe(model)
    hyper = {"multiple": multiple, "compensate": way, "trust": trust, "strides": strides, "draws": draws, "passes": passes}
    request = {**hyper, **spaces[0].hyper, "by": by, "seed": seed, "damping": damping, "batch_size": batch_size}
    hyper |= {} if runtime is None else {"runtime": runtime}
    request |= {"model": identity["digest"], "data": data.digest, "versions": versions(), "computation": computation(model)}
    parts, tick = SharedParts(resume, request), Steps(progress, int(passes), "forward equivalents")
    points = (ShapePoint(model, data, space, damping, batch_size) for space in spaces)
    path = _first([_Path(point, strides, trust, draws, seed, tick, parts, f"start-{i}") for i, point in enumerate(points)])
    others = path.even_and_uneven()
    try:
        here, solution = path.run(passes - last)
    finally:
        path.point.restore()
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
        measured=broadcast(lambda: _measured(model, plan, data, batch_size, progress)),
    )


def _measured(model: nn.Module, plan: Plan, data: CalibrationSet, batch_size: int, progress: Progress | None) -> float:
    """See :func:`measure_plan`; in one process, for refits to sums of another order would not be the same to the bit."""
    with alone():
        return measure_plan(model, plan, data, batch_size=batch_size, progress=progress)


def _every_width(space: ShapeSpace, around: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Alternatives with every number of MLP units between those that were looked at, and their damage, by straight lines."""
    layer_rows = []
    for rows, damage in zip(around, seen, strict=True):
        made, gone = list[tuple[int, int, int, float]](), rows[:, GONE] == 1
        for heads in np.unique(rows[~gone, 0]):
            same_heads = (rows[:, 0] == heads) & ~gone
            units, where = np.unique(rows[same_heads, 1], return_index=True)
            every = np.arange(units[0], units[-1] + 1)
            every = every[np.isin(every, space.allowed.get("mlp", every))]
            between = np.interp(every, units, damage[same_heads][where])
            made += [(int(heads), int(u), 0, float(d)) for u, d in zip(every, between, strict=True)]
        layer_rows.append([*made, *((0, 0, 1, float(d)) for d in damage[gone][:1])])
    longest = max(map(len, layer_rows))
    table = np.array([made + made[:1] * (longest - len(made)) for made in layer_rows])
    return table[:, :, :3].astype(np.int64), table[:, :, 3]


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
            spaces.append(ShapeSpace(parts, kinds=kinds, even=even, allowed=allowed, **options))
        except InfeasibleBudget as error:
            refused.append(error)
    if not spaces:
        raise refused[0]
    return spaces


def _first(paths: Sequence[_Path]) -> _Path:
    """The path whose first plan is predicted to do least damage; what the others spent counts as its own."""
    path = min(paths, key=_Path.promise) if len(paths) > 1 else paths[0]
    path.point.passes, path.spent_elsewhere = sum(p.point.passes for p in paths), 0
    return path


def _with_speed(model: nn.Module, plan: Plan, speed: Speed) -> Plan:
    """The plan with the measured speed, its prices, and the tokens per second that it predicts, read and written."""
    plan = plan.with_payload(prices=speed.prices())
    before, after = (speed.seconds(sizes_of_layers(model, p)) for p in (None, plan))
    rates = {name: {"before": 1 / b, "after": 1 / a} for name, b, a in zip(("read", "written"), before, after, strict=True)}
    return plan.with_payload(speed=to_jsonable(dict(speed)), tokens_per_second=rates)


def _check(draws: int, strides: int, trust: float, depth: int, passes: float, last: float, starts: int) -> None:
    """Refuse what allows no step; ``last`` forward equivalents are kept for measuring the result."""
    least = (2.0 + 2.0 * draws) * starts + strides * (3.0 + 2.0 * draws) + last
    if min(draws, strides) >= 1 and 0 < trust <= 1 and depth >= 0 and passes >= least:
        return
    if min(draws, strides) < 1 or not 0 < trust <= 1 or depth < 0:
        raise InvalidInput(
            f"draws is {draws}, strides {strides}, trust {trust:g}, depth {depth}.",
            "Draws and strides are 1 or more, trust lies in (0, 1], depth is 0 or more.",
            "Use draws=2, strides=2, trust=0.12, depth=0.",
        )
    raise InvalidInput(
        f"{passes:g} forward equivalents are too few.",
        f"With draws={draws} and strides={strides}, {least:g} forward equivalents are needed, {last:g} of them for the end.",
        f"Give more (--passes {least:g}; {PASSES:g} is usual), or take fewer draws or strides (--strides 1).",
    )


class _Path:
    """The way from the dense model to a plan, with divergence, predictions and passes of every accepted point in ``log``."""

    def __init__(
        self, point: ShapePoint, strides: int, trust: float, draws: int, seed: int, tick: Steps, parts: Parts, name: str
    ) -> None:
        self.point, self.space, self.strides, self.trust = point, point.space, strides, trust
        self.draws, self.seed, self.tick, self.parts, self.name = draws, seed, tick, parts, name
        self.tried, self.log, self.spent_elsewhere = 0, list[dict[str, Any]](), tick.done  # what other paths spent
        self.here = self._evaluate(self.space.start(), 1.0, Moments(lambda: point.dense))

    def _evaluate(self, state: np.ndarray, trust: float, before: Moments) -> Evaluation:
        """Measure at a state, by the moments of the one before, or find what was measured there.

        Second moments are too large to be kept. Those of a state that was found are made again if something has to be
        measured behind it: one forward for every state on the way there.
        """
        around, measured = self.space.around(state, trust, _LEVELS), list[Evaluation]()

        def measure() -> dict[str, Any]:
            seed = self.seed + self.tried
            measured.append(self.point.evaluate(state, around, before(), draws=self.draws, seed=seed, spent=self._spent))
            forms = measured[0].forms
            return {name: np.asarray(getattr(forms, name)).tolist() for name in _KEPT}

        kept = self.parts.json(f"{self.name}-{self.tried}", measure)
        self.tried += 1
        if measured:
            evaluation = measured[0]
        else:
            forms = QuadraticTerms(**{**kept, **{name: np.array(kept[name]) for name in ("first", "second", "rest")}})
            self.point.passes += forms.passes
            evaluation = Evaluation(
                state=state, around=around, forms=forms, moments=Moments(lambda: self.point.look(state, before()))
            )
        self._spent(self.point.passes)
        return evaluation

    def _spent(self, passes: float) -> None:
        """Tell of whole forward equivalents, where there are more than before."""
        more = self.spent_elsewhere + int(passes) - self.tick.done
        if more > 0:
            self.tick(more)

    def promise(self) -> float:
        """Damage of the budget as the dense model sees it."""
        return self.space.step(*_every_width(self.space, self.here.around, self.here.forms.total))[1].damage

    def even_and_uneven(self) -> EvenUneven | None:
        """Damage of the budget as the dense model sees it, with layers that stay alike and with any; None where they cannot."""
        damages = dict[str, float]()
        for even in (True, False):
            try:
                space = self.space.evened(even)
                damage = space.step(*_every_width(space, self.here.around, self.here.forms.total))[1].damage
            except InfeasibleBudget:
                return None
            damages["even" if even else "uneven"] = float(damage)
        return EvenUneven(**damages)

    def run(self, passes: float) -> tuple[Evaluation, Choice]:
        """Reach the budget, a part of it at a time, and go on down while that can be paid; the end, and the program there."""
        here, moments = self.here, Moments(lambda: self.point.dense)
        for number in range(1, self.strides + 1):
            share = number / self.strides
            state, solution = self.space.step(*_every_width(self.space, here.around, here.forms.total), share)
            predicted = here.divergence + solution.damage
            here = self._evaluate(state, self.trust if number == self.strides else 1.0, moments)
            moments = here.moments
            self._note(here, step=0, share=share, predicted=predicted)

        def evaluate(last: Evaluation, proposal: Proposal) -> Evaluation:
            return self._evaluate(proposal.state[0], proposal.trust, last.moments)

        def affords() -> bool:
            return self.point.passes + 3.0 + 2.0 * self.draws <= passes

        settled = np.zeros(len(here.state), dtype=bool)
        for step in descend(here, self.trust, partial(self._proposals, settled), evaluate, affords):
            here, solution = step.point, step.proposal.state[1]
            fields = {"predicted": step.proposal.promise, "measured": step.change, "trust": step.trust}
            self._note(here, step=len(self.log), **fields)
        return here, solution

    def _note(self, here: Evaluation, **fields: float) -> None:
        values = [gone / part.parameters for gone, part in zip(self.space.removed(here.state), self.space.parts, strict=True)]
        self.log.append({"divergence": here.divergence, "passes": self.point.passes, **fields, "values": values})

    def _proposals(self, settled: np.ndarray, here: Evaluation, trust: float) -> Iterator[Proposal]:
        """The best plans within reach; a layer whose going or coming back has not gained is settled from then on."""
        state, around = here.state, here.around
        while trust * self.space.units.max() >= 1:
            radius = np.maximum(np.rint(trust * self.space.units), 1)
            stays = (around[:, :, GONE] == state[:, None, GONE]) | ~settled[:, None]
            near = (np.abs(around[:, :, :2] - state[:, None, :2]) <= radius[:, None, :]).all(2)
            within = (near | (around[:, :, GONE] == 1)) & stays
            goal, choice = self.space.step(around, np.where(within, here.forms.total, np.inf))
            if (goal == state).all() or choice.damage >= 0:
                return
            yield Proposal(state=(goal, choice), promise=choice.damage, trust=trust)
            flips = goal[:, GONE] != state[:, GONE]
            settled |= flips
            trust = trust if flips.any() else trust / 2
