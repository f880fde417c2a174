"""Prune a model in place under a plan."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...compressors.base import Treatment, find_treatment
from ...compressors.treating import Job, Treating
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.modes import inference
from ...execution.processes import process_group
from ...execution.walk import Walk, check_autocast
from ...kinds import check_kind
from ...models.blocks import check_finite, describe, layers
from ...models.offload import mapped
from ...models.provenance import computation, versions
from ...plan import Plan
from ...progress import Progress, Steps
from .jobs import Options, plan_jobs
from .receipt import Receipt, check_recount, recount, recount_rows
from .resume import Resume


def prune(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet | None = None,
    method: str | None = None,
    batch_size: int | None = None,
    parity: bool = False,
    pattern: str | None = None,
    progress: Progress | None = None,
    *,
    true_sequential: bool = False,
    store: str | None = None,
    folder: Path | str | None = None,
    resume: Path | str | None = None,
    autocast: str | None = None,
    **own: Any,
) -> Receipt:
    """Prune a model in place.

    By default every block loses exactly the planned number of weights, split over its matrices in proportion to their
    size. One statistics pass per block with the dense block, one propagation pass with the pruned block.

    Args:
        model: Any transformers model with one list of layers. Changed in place; no copy is made.
        plan: A sparsity plan of this model, per block or per Linear.
        data: Calibration tokens; not needed for ``magnitude``.
        method: ``magnitude``, ``wanda``, ``sparsegpt``, or a treatment of your own (:mod:`layerbudget.compressors.base`).
            Without one it is the plan's own, with the options that it was measured with; ``wanda`` where none was measured.
        batch_size: Sequences per forward, 8 by default. Speed and memory only, up to rounding.
        parity: Reproduce the masks of the reference implementations (locuslab/wanda, IST-DASLab/sparsegpt): their
            counts are off by one and take ties along, their statistics are running means over single sequences.
        pattern: ``n:m``: n of every m consecutive inputs are zeroed; the plan must ask for n/m everywhere. ``n:8`` with a
            literal n lets every block have the n nearest to its planned ratio.
        progress: Called with (blocks done, blocks).
        true_sequential: Recollect inputs for every group of matrices that share one (q/k/v, o, gate/up, down).
        store: Where activations live: ``device`` (default), ``cpu`` or ``disk``.
        folder: Where ``disk`` puts its temporary files.
        resume: Folder for per-block checkpoints; a run that was interrupted continues from it. They stay there until
            :func:`~layerbudget.decisions.sparsity.resume.clear_checkpoints`, to be called once the pruned model is saved.
        autocast: ``bfloat16`` or ``float16``: run the calibration forwards in that precision. Statistics, factorisations and
            weights stay in their own; entries near the threshold may change places. Several times faster on CPUs with AMX.
        **own: Options of the method; of SparseGPT ``damping`` (relative to the mean of its Hessian's diagonal, 0.01).

    Returns:
        The receipt, with zeros recounted.

    Raises:
        ModelMismatch: The plan belongs to another model.
        InvalidInput: Unknown method, missing data, a pattern that does not fit, or an option that the method does not read.
        BadModel: Weights that are not finite.
        UnknownBlock: The plan names matrices that the model does not have.
        CurvatureFailure: Second moments that cannot be factorised.
    """
    method, own = method_of(plan, method, own)
    treatment = find_treatment(method).with_options(own)
    _check_read(treatment, true_sequential=true_sequential, autocast=autocast, resume=resume)
    options = Options(
        treatment=treatment, own=treatment.resolve_options(own),
        batch_size=1 if parity else 8 if batch_size is None else batch_size,
        parity=parity, pattern=pattern, store=store or "device", true_sequential=true_sequential,
        folder=None if folder is None else Path(folder), autocast=autocast,
    )  # fmt: skip
    _check_precision(options)
    identity = describe(model)
    _check(plan, data, treatment, identity)
    check_finite(model)
    jobs = plan_jobs(model, plan, options)
    treating = Treating(model, treatment, parity=parity, true_sequential=true_sequential)
    started = time.monotonic()
    if data is not None:
        treating.begin(data, options.batch_size)
    with _kept(model, resume, folder) as kept:
        if treatment.statistic == "none" or data is None:
            forwards, notes = _without_data(treating, jobs, Resume(kept, {}), progress)
        else:
            key = {"plan": plan.digest, "model": identity["digest"], "data": data.digest, **options.settings()}
            key.pop("store")  # where activations live changes no number
            checkpoint = Resume(kept, {**key, "computation": computation(model), "versions": versions()})
            forwards, notes = _over_layers(treating, jobs, _share(data), options, checkpoint, progress)
    seconds = time.monotonic() - started
    notes += other_pruner(plan, method)
    return _receipt(model, plan, data, jobs, options, identity=identity, forwards=forwards, seconds=seconds, notes=notes)


def method_of(plan: Plan, method: str | None, own: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The pruner and its options: what was asked for, else what the plan was measured with, else ``wanda``."""
    measured, options = plan.pruner
    chosen = method or measured or "wanda"
    return chosen, {**(options if chosen == measured else {}), **own}


def other_pruner(plan: Plan, method: str) -> tuple[str, ...]:
    """A sentence where a plan is applied by another pruner than the one whose damage decided it, else nothing."""
    measured, _ = plan.pruner
    if measured in (None, method):
        return ()
    return (
        f"The plan was measured with {measured} and is applied by {method}: measure with --method {method} to plan for it.",
    )


def _receipt(
    model: nn.Module, plan: Plan, data: CalibrationSet | None, jobs: Mapping[str, Job], options: Options, *,
    notes: tuple[str, ...], **record: Any,
) -> Receipt:  # fmt: skip
    """Recount, compare with the plan, and write down what was done."""
    found = recount(model, plan.blocks)
    planned = {b.name: sum(jobs[m].level.zeros for m in b.modules) for b in plan.blocks}
    if not options.parity:
        notes += check_recount(found, {name: t.level.zeros for name, t in jobs.items()})
    return Receipt(
        method=options.treatment.name,
        settings=options.settings(),
        plan_digest=plan.digest,
        model={**record["identity"], "computation": computation(model)},
        data=data.describe() if data is not None and options.treatment.statistic != "none" else {},
        blocks={name: {**block, "planned": planned[name]} for name, block in found["blocks"].items()},
        modules=found["modules"],
        sparsity=found["sparsity"],
        planned=sum(planned.values()) / found["numel"],
        forwards=record["forwards"],
        seconds=record["seconds"],
        notes=notes,
        versions=versions(),
        rows=recount_rows(model, plan),
    )


def _check_read(treatment: Treatment, **given: Any) -> None:
    """Refuse options of the passes over data where the method makes none.

    Raises:
        InvalidInput: Names the option.
    """
    for name, value in given.items():
        if treatment.statistic == "none" and value is not None and value is not False:
            raise InvalidInput(
                f"The method {treatment.name} does not read {name}.", "It would have no effect.", "Leave it out."
            )


def _check(plan: Plan, data: CalibrationSet | None, treatment: Treatment, identity: Mapping[str, Any]) -> None:
    check_kind(plan.kind, ("sparsity",), "cannot be pruned")
    if data is None and treatment.statistic != "none":
        raise InvalidInput(f"{treatment.name} needs calibration data.", "", "Pass data, or use method magnitude.")
    plan.validate(identity)


def _check_precision(options: Options) -> None:
    check_autocast(options.autocast)
    if options.autocast and options.parity:
        raise InvalidInput("parity and autocast exclude each other.", "The references run in the model's own precision.", "")


def _share(data: CalibrationSet) -> CalibrationSet:
    """The sequences of this process, where there are several."""
    together = process_group()
    return data if together is None else data.select(together.shard(range(data.samples)))


@contextlib.contextmanager
def _kept(model: nn.Module, resume: Path | str | None, folder: Path | str | None) -> Iterator[Path | str | None]:
    """Where finished layers are kept: weights that lie in files go to new ones, which vanish when nothing maps them."""
    if resume is not None or mapped(model) is None:
        yield resume
        return
    together = process_group()
    if together is None:
        with tempfile.TemporaryDirectory(prefix="layerbudget-", dir=folder) as temporary:
            yield temporary
        return
    shared = together.broadcast(lambda: tempfile.mkdtemp(prefix="layerbudget-", dir=folder))
    try:
        yield shared
    finally:
        together.barrier()
        if together.is_main:
            shutil.rmtree(shared, ignore_errors=True)


def _without_data(
    treating: Treating, jobs: Mapping[str, Job], kept: Resume, progress: Progress | None
) -> tuple[int, tuple[str, ...]]:
    """Every matrix by itself."""
    active = [t for t in jobs.values() if not t.level.idle]
    tick = Steps(progress, len(active))
    for done, job in enumerate(active, 1):
        treating.jobs([job], {})
        kept.save(treating.model, done, [job.module.name])
        kept.settle(treating.model, done, [job.module.name])
        tick()
    return 0, ()


def _over_layers(
    treating: Treating,
    jobs: Mapping[str, Job],
    data: CalibrationSet,
    options: Options,
    checkpoint: Resume,
    progress: Progress | None,
) -> tuple[int, tuple[str, ...]]:
    """Layer after layer, each with the inputs that the pruned layers below it give."""
    model = treating.model
    active = [t for t in jobs.values() if not t.level.idle]
    by_layer = [[t for t in active if t.module.name.startswith(f"{name}.")] for name, _ in layers(model)]
    last = max((i for i, work in enumerate(by_layer) if work), default=-1)
    notes: list[str] = []
    with inference(model):
        walk = Walk(
            model, data, batch_size=options.batch_size, store=options.store, folder=options.folder, autocast=options.autocast
        )
        try:
            tick = Steps(progress, last + 1)
            if last >= 0:
                walk.capture()
            for i in range(last + 1):
                names = [t.module.name for t in by_layer[i]]
                if not checkpoint.load(model, i, names):
                    notes += treating.layer(walk, by_layer[i])
                    checkpoint.save(model, i, names)
                    checkpoint.settle(model, i, names)
                if i < last:
                    walk.advance()
                tick()
        finally:
            walk.close()
    return walk.forwards, tuple(notes)
