"""Prune a model in place under a plan, layer after layer, each with the inputs that the pruned layers below it give."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ...arguments import checked
from ...compressors.base import Level, Treatment, find_treatment
from ...compressors.select import check_group, parse_pattern, share
from ...compressors.treating import Job, LayerCompressor
from ...data.calibration import CalibrationSet
from ...decision import check_kind
from ...errors import InvalidInput, ModelMismatch, UnknownBlock
from ...execution.inputs import check_experts
from ...execution.modes import inference
from ...execution.processes import broadcast, is_main, process_group, shard
from ...execution.walk import Walk
from ...models.blocks import check_finite, describe, layers, partition, weight_of
from ...models.machine import computation, versions
from ...models.offload import mapped
from ...plan import Plan, members
from ...progress import Progress, Steps
from ...records import Module
from ...storage.parts import Parts
from ...storage.writing import Scratch
from .receipt import PruningReceipt, check_recount, recount, recount_rows


@checked
def prune(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet | None = None,
    method: str | None = None,
    batch_size: int | None = None,
    pattern: str | None = None,
    progress: Progress | None = None,
    *,
    true_sequential: bool = False,
    store: str | None = None,
    resume: Path | str | None = None,
    autocast: str | None = None,
    **options: Any,
) -> PruningReceipt:
    """Prune a model in place under a plan, and return the receipt.

    Every block loses exactly the planned number of weights, unless ``pattern`` is given, split over its matrices in proportion
    to their size. A layer first runs dense, to collect the statistics of its inputs, then pruned, to give the next layer its
    inputs.

    Args:
        model: Any transformers model with one list of layers.
        plan: A sparsity plan of this model.
        data: Calibration tokens; not needed for ``magnitude``.
        method: ``magnitude``, ``wanda``, ``sparsegpt``, or a treatment of your own (:mod:`layerbudget.compressors.base`).
            Without one it is the plan's own, with the options that it was measured with; ``wanda`` where none was measured.
        batch_size: Sequences per forward, 8 by default. Speed and memory only, up to rounding.
        pattern: ``2:4`` zeroes 2 of every 4 consecutive inputs; other numbers work too. Every block of the plan must then ask
            for that ratio. ``n:8`` with the letter n gives every block the number of 8 that is nearest to its planned ratio.
        progress: Called with (layers done, layers up to the last one that is pruned); without data with matrices.
        true_sequential: Recollect inputs for every group of matrices that share one (q/k/v, o, gate/up, down).
        store: Where activations live: ``device`` (default), ``cpu`` or ``disk``.
        resume: Folder for per-block checkpoints; a run that was interrupted continues from it. They stay there until
            :func:`layerbudget.storage.parts.clear`, to be called once the pruned model is saved.
        autocast: ``bfloat16`` or ``float16``: run the calibration forwards in that precision. Statistics, factorisations and
            weights stay in their own; entries near the threshold may change places. Several times faster on CPUs with AMX.
        **options: Options of the method; of SparseGPT ``damping`` (relative to the mean of its Hessian's diagonal, 0.01).

    Raises:
        ModelMismatch: The plan belongs to another model.
        InvalidInput: Unknown method, missing data, a pattern that does not fit, or an option that the method does not read.
        BadModel: Weights that are not finite.
        UnknownBlock: The plan names matrices that the model does not have.
        CurvatureFailure: Second moments that cannot be factorised.
    """
    method, options = method_of(plan, method, options)
    treatment = find_treatment(method).with_options(options)
    blind = treatment.statistic == "none"
    _refuse(treatment, plan, data, {"true_sequential": true_sequential, "autocast": autocast, "resume": resume})
    identity = describe(model)
    plan.validate(identity)
    check_finite(model)
    jobs = _jobs(model, plan, pattern)
    if not blind:
        check_experts(model, jobs, "Use --method magnitude without --data: it reads no inputs.")
    batch_size = 8 if batch_size is None else batch_size
    settings = {"method": treatment.name, "batch_size": batch_size, "pattern": pattern}
    settings |= {"true_sequential": true_sequential, "autocast": autocast, **treatment.resolve_options(options)}
    identity["computation"] = computation(model)
    request: dict[str, Any] = {"plan": plan.digest, "model": identity["digest"], **settings, "versions": versions()}
    request |= {"data": "" if blind or data is None else data.digest, "computation": identity["computation"]}
    started, forwards = time.monotonic(), 0
    treating = LayerCompressor(model, treatment, true_sequential=true_sequential)
    with _parts_folder(model, resume) as folder:
        checkpoints = _Checkpoints(model, folder, request)
        if blind or data is None:
            notes = _matrices(treating, jobs, checkpoints, progress)
        else:
            walking = {"batch_size": batch_size, "store": store or "device", "autocast": autocast}
            notes, forwards = _layers(treating, jobs, checkpoints, progress, shard(data), walking)
    seconds = time.monotonic() - started
    recounted = recount(model, plan.blocks)
    notes += check_recount(recounted, {name: job.level.zeros for name, job in jobs.items()})
    notes += other_pruner(plan, method, pattern)
    planned = {b.name: sum(jobs[m].level.zeros for m in b.modules) for b in plan.blocks}
    return PruningReceipt(
        method=treatment.name,
        settings={**settings, "store": store or "device"},
        plan_digest=plan.digest,
        identity=identity,
        model=model,
        data={} if blind or data is None else data.describe(),
        blocks={name: {**block, "planned": planned[name]} for name, block in recounted.blocks.items()},
        modules=recounted.modules,
        sparsity=recounted.sparsity,
        planned=sum(planned.values()) / recounted.numel,
        forwards=forwards,
        seconds=seconds,
        notes=notes,
        versions=versions(),
        rows=recount_rows(model, plan),
    )


def _refuse(treatment: Treatment, plan: Plan, data: CalibrationSet | None, of_inputs: Mapping[str, object]) -> None:
    """Refuse options that a treatment does not read (``of_inputs``: those that only matter where inputs are read), or lacks."""
    blind = treatment.statistic == "none"
    for name, value in of_inputs.items():
        if blind and value:
            what = f"The method {treatment.name} does not read {name}."
            raise InvalidInput(what, "It would have no effect.", "Leave it out.")
    check_kind(plan.kind, ("sparsity",), "cannot be pruned")
    if data is None and not blind:
        raise InvalidInput(f"{treatment.name} needs calibration data.", "", "Pass data, or use method magnitude.")


def method_of(plan: Plan, method: str | None, overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The pruner and its options: what was asked for, else what the plan was measured with, else ``wanda``."""
    measured, options = plan.pruner
    chosen = method or measured or "wanda"
    return chosen, {**(options if chosen == measured else {}), **overrides}


def other_pruner(plan: Plan, method: str, pattern: str | None = None) -> tuple[str, ...]:
    """Sentences where a plan is applied by another pruner than the one whose damage decided it, or in a pattern."""
    measured, _ = plan.pruner
    if measured is None:
        return ()
    remedy = f"measure with --method {method} to plan for it"
    other = f"The plan was measured with {measured} and is applied by {method}: {remedy}."
    bound = f"The plan was measured without the pattern {pattern}: what that costs more is not known before evaluate."
    return (*([other] if measured != method else []), *([bound] if pattern else []))


@contextlib.contextmanager
def _parts_folder(model: nn.Module, resume: Path | str | None) -> Iterator[Path | str | None]:
    """Where finished layers are kept: weights that lie in files go to new ones, which vanish when nothing maps them."""
    if resume is not None or mapped(model) is None:
        yield resume
        return
    scratch = Scratch() if is_main() else None
    try:
        yield broadcast(lambda: scratch.path if scratch else None)
    finally:
        process_group().barrier()
        if scratch is not None:
            scratch.close()


class _Checkpoints:
    """The pruned weights of every finished layer, as parts of a run."""

    def __init__(self, model: nn.Module, folder: Path | str | None, request: Mapping[str, Any]) -> None:
        self.model, self.files, self.off = model, mapped(model), folder is None
        self.parts = Parts(folder if is_main() else None, request)

    def load(self, index: int, names: Sequence[str]) -> bool:
        """Take the weights of a finished layer from its file, or map them there; false when it is not finished, or broken."""
        file = None if self.off else broadcast(lambda: self.parts.find(f"block-{index}"))
        if file is None:
            return False
        weights = {name: weight_of(self.model, name)[1] for name in names}
        if self.files is not None:
            self.files.remap(weights, file)
            return True
        from safetensors.torch import load_file

        for name, tensor in load_file(file).items():
            weights[name].data.copy_(tensor)
        return True

    def save(self, index: int, names: Sequence[str]) -> None:
        """Keep the weights of a finished layer, and let them lie there where the model's weights lie in files."""
        from safetensors.torch import save_file

        if self.parts.folder is not None:
            tensors = {n: weight_of(self.model, n)[1].detach().cpu().contiguous() for n in names}
            self.parts.put(f"block-{index}", "safetensors", lambda path: save_file(tensors, path))
        if self.files is not None:
            self.load(index, names)


def _matrices(
    treating: LayerCompressor, jobs: Mapping[str, Job], checkpoints: _Checkpoints, progress: Progress | None
) -> tuple[str, ...]:
    """Treat every matrix by itself, without data."""
    active = [job for job in jobs.values() if not job.level.idle]
    tick = Steps(progress, len(active))
    for done, job in enumerate(active, 1):
        treating.jobs([job], {})
        checkpoints.save(done, [job.module.name])
        tick()
    return ()


def _layers(
    treating: LayerCompressor,
    jobs: Mapping[str, Job],
    checkpoints: _Checkpoints,
    progress: Progress | None,
    data: CalibrationSet,
    walking: Mapping[str, Any],
) -> tuple[tuple[str, ...], int]:
    """Treat layer after layer, up to the last one that loses something; notes, and forwards."""
    active = [job for job in jobs.values() if not job.level.idle]
    by_layer = [[job for job in active if job.module.name.startswith(f"{name}.")] for name, _ in layers(treating.model)]
    while by_layer and not by_layer[-1]:
        by_layer.pop()
    notes: list[str] = []
    tick = Steps(progress, len(by_layer))
    with inference(treating.model), contextlib.closing(Walk(treating.model, data, **walking)) as walk:
        if by_layer:
            walk.capture()
        for i, work in enumerate(by_layer):
            names = [job.module.name for job in work]
            if not checkpoints.load(i, names):
                notes += treating.layer(walk, work)
                checkpoints.save(i, names)
            if i + 1 < len(by_layer):
                walk.advance()
            tick()
    return tuple(notes), walk.forwards


def _jobs(model: nn.Module, plan: Plan, pattern: str | None) -> dict[str, Job]:
    """The level of each weight matrix: the plan split over the model's matrices."""
    known = {m.name: m for b in partition(model, "linear") for m in b.modules}
    if plan.rows is not None and pattern:
        raise InvalidInput(
            f"The plan decides groups of {plan.rows.size} rows, and a pattern was given.",
            "It fixes every group's count.",
            "Leave it out, or plan by linear.",
        )
    zeroed, group = parse_pattern(pattern) if pattern else (None, 0)
    per_block = _zeroed_per_block(plan, zeroed, group) if group else {}
    jobs: dict[str, Job] = {}
    for block in plan.blocks:
        missing = [m for m in block.modules if m not in known]
        if missing:
            what = f"The plan's {block.name} names {missing[0]!r}, which the model does not have."
            raise UnknownBlock(what, "", "Plan again.")
        modules = [known[m] for m in block.modules]
        numel = [m.numel for m in modules]
        if sum(numel) != block.numel:
            what = f"{block.name} has {block.numel} weights in the plan and {sum(numel)} in the model."
            raise ModelMismatch(what, "", "Plan this model.")
        for m in modules if group else ():
            check_group(m.d_in, group, m.name)
        counts = [n // group * per_block[block.name] for n in numel] if group else share(block.count, numel)
        for m, count in zip(modules, counts, strict=True):
            level = Level(
                zeros=count,
                pattern=(per_block[block.name], group) if group else None,
                rows=_rows_of(plan, m, count),
            )
            jobs[m.name] = Job(module=m, level=level)
    return jobs


def _rows_of(plan: Plan, module: Module, count: int) -> tuple[int, np.ndarray] | None:
    """Zeros of every group of rows of a matrix, where the plan says so."""
    if plan.rows is None:
        return None
    size, zeros = plan.rows.size, plan.rows.counts.get(module.name)
    if zeros is None:
        raise UnknownBlock(f"The plan has no counts for the rows of {module.name}.", "", "Plan again.")
    room = np.tile(members(module.d_out, size) * module.d_in, module.copies)
    if zeros.shape != room.shape or (zeros < 0).any() or (zeros > room).any() or int(zeros.sum()) != count:
        raise InvalidInput(
            f"The counts of the rows of {module.name} do not fit: {zeros.size} groups, {int(zeros.sum())} entries.",
            f"It has {room.size} groups of {size} rows and loses {count} entries.",
            "Plan again.",
        )
    return size, zeros


def _zeroed_per_block(plan: Plan, zeroed: int | None, group: int) -> dict[str, int]:
    """N of every block: given, or the nearest to the plan with the total kept as near as whole numbers allow."""
    if zeroed is not None:
        off = [b for b in plan.blocks if abs(b.count / b.numel - zeroed / group) > 0.5 / group]
        if off:
            raise InvalidInput(
                f"The plan asks {off[0].name} for {off[0].count / off[0].numel:.3f}, the pattern gives {zeroed / group:.3f}.",
                f"With {zeroed}:{group} every block is pruned to {zeroed / group:.3f}.",
                f"Plan uniformly at {zeroed / group:g}, or use the pattern n:{group} to follow the plan.",
            )
        return {b.name: zeroed for b in plan.blocks}
    chosen = {b.name: b.count * group // b.numel for b in plan.blocks}
    missing = sum(b.count for b in plan.blocks) - sum(chosen[b.name] * b.numel / group for b in plan.blocks)
    for block in sorted(plan.blocks, key=lambda b: -(b.count * group / b.numel % 1)):
        step = block.numel / group
        if missing >= step / 2 and block.count * group % block.numel:
            chosen[block.name] += 1
            missing -= step
    return chosen
