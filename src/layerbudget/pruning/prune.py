"""Prune a model in place under a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blocks import check_finite, describe, is_conv1d, layers, weight_of
from ..data.calibration import CalibrationSet
from ..errors import InvalidInput
from ..plan import Plan
from ..provenance import computation, versions
from .magnitude import magnitude_mask
from .receipt import Receipt, check_recount, recount
from .resume import Resume, clear_checkpoints
from .save import save_pruned
from .select import share
from .sparsegpt import inverse_factor, reference_factor, sparsegpt_update
from .statistics import Collector, Statistic
from .tasks import Options, Task, plan_tasks
from .walk import Walk, check_autocast, inference
from .wanda import wanda_mask

__all__ = ["clear_checkpoints", "prune", "recount", "save_pruned"]

METHODS = ("magnitude", "wanda", "sparsegpt")
Progress = Callable[[int, int], None]


def prune(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet | None = None,
    method: str = "wanda",
    batch_size: int | None = None,
    parity: bool = False,
    pattern: str | None = None,
    progress: Progress | None = None,
    *,
    true_sequential: bool = False,
    damping: float | None = None,
    store: str | None = None,
    folder: Path | str | None = None,
    resume: Path | str | None = None,
    autocast: str | None = None,
) -> Receipt:
    """Prune a model in place.

    By default every block loses exactly the planned number of weights, split over its matrices in proportion to their
    size. One statistics pass per block with the dense block, one propagation pass with the pruned block.

    Args:
        model: Any transformers model with one list of layers. Changed in place; no copy is made.
        plan: A sparsity plan of this model, per block or per Linear.
        data: Calibration tokens; not needed for ``magnitude``.
        method: ``magnitude``, ``wanda`` or ``sparsegpt``.
        batch_size: Sequences per forward, 8 by default. Speed and memory only, up to rounding.
        parity: Reproduce the masks of the reference implementations (locuslab/wanda, IST-DASLab/sparsegpt): their
            counts are off by one and take ties along, their statistics are running means over single sequences.
        pattern: ``n:m``: n of every m consecutive inputs are zeroed; the plan must ask for n/m everywhere. ``n:8`` with a
            literal n lets every block have the n nearest to its planned ratio.
        progress: Called with (blocks done, blocks).
        true_sequential: Recollect inputs for every group of matrices that share one (q/k/v, o, gate/up, down).
        damping: Of SparseGPT's Hessian, relative to the mean of its diagonal; 0.01 by default.
        store: Where activations live: ``device`` (default), ``cpu`` or ``disk``.
        folder: Where ``disk`` puts its temporary files.
        resume: Folder for per-block checkpoints; a run that was interrupted continues from it. They stay there until
            :func:`clear_checkpoints`, to be called once the pruned model is saved.
        autocast: ``bfloat16`` or ``float16``: run the calibration forwards in that precision. Statistics, factorisations and
            weights stay in their own; entries near the threshold may change places. Several times faster on CPUs with AMX.

    Returns:
        The receipt, with zeros recounted.

    Raises:
        ModelMismatch: The plan belongs to another model.
        InvalidInput: Unknown method, missing data, a pattern that does not fit, or an option that the method does not read.
        BadModel: Weights that are not finite.
        UnknownBlock: The plan names matrices that the model does not have.
        CurvatureFailure: Second moments that cannot be factorised.
    """
    _check_read(method, true_sequential=true_sequential, damping=damping, autocast=autocast, resume=resume)
    options = Options(
        method=method, batch_size=1 if parity else 8 if batch_size is None else batch_size, parity=parity, pattern=pattern,
        store=store or "device", true_sequential=true_sequential, damping=0.01 if damping is None else damping,
        folder=None if folder is None else Path(folder), autocast=autocast,
    )  # fmt: skip
    _check_precision(options)
    identity = describe(model)
    _check(plan, data, method, identity)
    check_finite(model)
    tasks = plan_tasks(model, plan, options)
    started = time.monotonic()
    if method == "magnitude":
        forwards, notes = _magnitude(model, tasks, options, progress)
    else:
        key = {"plan": plan.digest, "model": identity["digest"], "data": data.digest, **options.settings()}
        key.pop("store")  # where activations live changes no number
        checkpoint = Resume(resume, {**key, "computation": computation(model), "versions": versions()})
        forwards, notes = _walk(model, tasks, data, options, checkpoint, progress)
    seconds = time.monotonic() - started
    return _receipt(model, plan, data, tasks, options, identity=identity, forwards=forwards, seconds=seconds, notes=notes)


def _receipt(
    model: nn.Module, plan: Plan, data: CalibrationSet | None, tasks: Mapping[str, Task], options: Options, *,
    notes: tuple[str, ...], **record: Any,
) -> Receipt:  # fmt: skip
    """Recount, compare with the plan, and write down what was done."""
    found = recount(model, plan.blocks)
    planned = {b.name: sum(tasks[m].count for m in b.modules) for b in plan.blocks}
    if not options.parity:
        notes += check_recount(found, {name: t.count for name, t in tasks.items()})
    return Receipt(
        method=options.method,
        settings=options.settings(),
        plan_digest=plan.digest,
        model={**record["identity"], "computation": computation(model)},
        data=data.describe() if data is not None and options.method != "magnitude" else {},
        blocks={name: {**block, "planned": planned[name]} for name, block in found["blocks"].items()},
        modules=found["modules"],
        sparsity=found["sparsity"],
        planned=sum(planned.values()) / found["numel"],
        forwards=record["forwards"],
        seconds=record["seconds"],
        notes=notes,
        versions=versions(),
    )


_UNREAD = {"magnitude": ("true_sequential", "damping", "autocast", "resume"), "wanda": ("damping",)}


def _check_read(method: str, **given: Any) -> None:
    """Refuse options that decide numbers, or what is kept, and that the method does not read.

    Raises:
        InvalidInput: Names the option.
    """
    for name in _UNREAD.get(method, ()):
        if given[name] is not None and given[name] is not False:
            raise InvalidInput(f"The method {method} does not read {name}.", "It would have no effect.", "Leave it out.")


def _check(plan: Plan, data: CalibrationSet | None, method: str, identity: Mapping[str, Any]) -> None:
    if method not in METHODS:
        raise InvalidInput(f"There is no pruning method {method!r}.", f"Methods are {', '.join(METHODS)}.", "Use wanda.")
    if plan.kind != "sparsity":
        raise InvalidInput(f"A plan of kind {plan.kind} cannot be pruned.", "It must be a sparsity plan.", "Plan sparsity.")
    if data is None and method != "magnitude":
        raise InvalidInput(f"{method} needs calibration data.", "", "Pass data, or use method magnitude.")
    plan.validate(identity)


def _check_precision(options: Options) -> None:
    check_autocast(options.autocast)
    if options.autocast and options.parity:
        raise InvalidInput("parity and autocast exclude each other.", "The references run in the model's own precision.", "")


def matrices(owner: nn.Module, parameter: nn.Parameter) -> list[torch.Tensor]:
    """Two-dimensional ``(d_out, d_in)`` views of a weight; writing to them changes the model."""
    data = parameter.data
    if data.ndim == 3:
        return [m.T for m in data] if getattr(owner, "is_transposed", False) else list(data)
    return [data.T] if is_conv1d(owner) else [data]


def apply_task(model: nn.Module, task: Task, statistics: list[Statistic] | None, options: Options, cache: dict) -> list[str]:
    """Prune one matrix (all its copies); return notes."""
    views = matrices(*weight_of(model, task.module.name))
    counts = share(task.count, [v.numel() for v in views])
    notes = []
    for i, (view, count) in enumerate(zip(views, counts, strict=True)):
        found = statistics[i] if statistics else None
        if options.method != "magnitude" and (found is None or found.value is None):
            notes.append(f"{task.module.name}[{i}] saw no token; its weights were ranked by magnitude.")
            found = None
        rule = {"ratio": task.ratio, "pattern": task.pattern}
        if options.method == "magnitude" or (found is None and options.method == "sparsegpt"):
            view.masked_fill_(magnitude_mask(view, count, **rule), 0)
        elif options.method == "wanda":
            view.masked_fill_(wanda_mask(view, found.value if found else None, count, **rule), 0)
        else:
            if found not in cache:
                cache[found] = (reference_factor if options.parity else inverse_factor)(found.value, options.damping)
            view.copy_(sparsegpt_update(view, *cache[found], count, **rule))
    return notes


def _by_layer(model: nn.Module, tasks: Mapping[str, Task]) -> list[list[Task]]:
    names = [name for name, _ in layers(model)]
    return [[t for t in tasks.values() if t.module.name.startswith(f"{n}.") and not t.idle] for n in names]


def _magnitude(
    model: nn.Module, tasks: Mapping[str, Task], options: Options, progress: Progress | None
) -> tuple[int, tuple[str, ...]]:
    active = [t for t in tasks.values() if not t.idle]
    for done, task in enumerate(active, 1):
        apply_task(model, task, None, options, {})
        if progress:
            progress(done, len(active))
    return 0, ()


def _walk(
    model: nn.Module,
    tasks: Mapping[str, Task],
    data: CalibrationSet,
    options: Options,
    checkpoint: Resume,
    progress: Progress | None,
) -> tuple[int, tuple[str, ...]]:
    by_layer = _by_layer(model, tasks)
    last = max((i for i, work in enumerate(by_layer) if work), default=-1)
    notes: list[str] = []
    with inference(model):
        walk = Walk(
            model, data, batch_size=options.batch_size, store=options.store, folder=options.folder, autocast=options.autocast
        )
        try:
            if last >= 0:
                walk.capture()
            for i in range(last + 1):
                names = [t.module.name for t in by_layer[i]]
                if not checkpoint.load(model, i, names):
                    notes += _prune_layer(model, walk, by_layer[i], options)
                    checkpoint.save(model, i, names)
                if i < last:
                    walk.advance()
                if progress:
                    progress(i + 1, last + 1)
        finally:
            walk.close()
    return walk.forwards, tuple(notes)


def _prune_layer(model: nn.Module, walk: Walk, work: list[Task], options: Options) -> list[str]:
    if not work:
        return []
    kind = "diagonal" if options.method == "wanda" else "gram"
    collector = Collector(model, [t.module for t in work], kind, parity=options.parity)
    collector.run(walk)
    notes: list[str] = []
    done: set[str] = set()
    by_name = {t.module.name: t for t in work}
    for turn, group in enumerate([*collector.groups(), [n for n in by_name if n not in collector.found]]):
        members = [by_name[n] for n in group]
        if options.true_sequential and turn and members:
            collector = Collector(model, [t.module for t in members], kind, parity=options.parity)
            collector.run(walk)
        cache: dict[Statistic, Any] = {}
        for task in members:
            notes += apply_task(model, task, collector.found.pop(task.module.name, None), options, cache)
            done.add(task.module.name)
    return notes
