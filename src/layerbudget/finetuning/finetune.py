"""Fine-tune ranks or experts by a plan on a labelled task or on text, over seeds, and keep what paired tests need.

Every seed leaves a folder with the adapter, the predictions for every held-out row and its metrics; a run that was stopped
continues where it was: finished seeds are kept, an unfinished one resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..data.tasks import Task
from ..data.text import Texts
from ..decisions.ranks.apply import fold_scales
from ..errors import InvalidInput
from ..evaluation import statistics
from ..execution.processes import broadcast, is_main, process_group
from ..models.provenance import computation, versions
from ..plan import Plan
from ..records import dumps, made_by, write_text
from ..storage.writing import check_space, real, whole
from . import seeds as seeds_of
from . import sft, sharding
from .adapt import started
from .base import Loader, NamedLoader
from .protocol import Protocol
from .rows import Rows
from .steps import logging_before_saving, mean_loss
from .text_rows import TextRows, answers_of, rows_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import Trainer, TrainingArguments

logger = logging.getLogger(__name__)


def _arguments(
    folder: Path, model: nn.Module, protocol: Protocol, seed: int, steps: int, *, cpu: bool, bf16: bool, checkpointing: bool,
    quiet: bool,
) -> TrainingArguments:  # fmt: skip
    from transformers import TrainingArguments

    options: dict[str, Any] = {}
    together = process_group()
    per_device = protocol.batch // protocol.accumulation // (together.size if together else 1)
    if checkpointing:  # later releases of transformers renamed it
        new = "activation_checkpointing" in {f.name for f in dataclasses.fields(TrainingArguments)}
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        options = {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    options |= sharding.arguments(model)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"), seed=seed, data_seed=seed, num_train_epochs=protocol.epochs,
        per_device_train_batch_size=per_device, gradient_accumulation_steps=protocol.accumulation,
        learning_rate=protocol.lr, lr_scheduler_type="linear", warmup_steps=min(protocol.warmup, steps // 2),
        weight_decay=protocol.weight_decay, max_grad_norm=protocol.clip, optim="adamw_torch", bf16=bf16, use_cpu=cpu,
        save_strategy="epoch", save_total_limit=2, logging_steps=10, report_to=[], remove_unused_columns=False,
        disable_tqdm=quiet, dataloader_num_workers=0, **options,
    )  # fmt: skip
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several cards would be one DataParallel, with several times the batch
    return arguments


def train_one(
    model: nn.Module, rows: Rows | TextRows, task: Task | Texts, protocol: Protocol, seed: int, folder: Path, *,
    bf16: bool = False, checkpointing: bool = False, resume: bool = False, quiet: bool = True, callbacks: Sequence[Any] = (),
) -> dict[str, Any]:  # fmt: skip
    """Train one seed and predict every held-out row.

    Args:
        model: An adapted model.
        rows: The encoder of the task's rows.
        task: The task.
        protocol: Numbers of the run.
        seed: Seed of the order of rows and of dropout.
        folder: Where checkpoints and the adapter go.
        bf16: Autocast in bfloat16; always on where the base is held in it.
        checkpointing: Compute activations again in the backward pass instead of keeping them.
        resume: Continue from the last checkpoint where there is one.
        quiet: No progress bar.
        callbacks: Further callbacks of the Trainer (a re-plan, for instance).

    Returns:
        ``metrics`` by split with ``predictions`` (of text: ``losses`` by row), and the training loss.
    """
    from transformers import PrinterCallback, set_seed

    if not rows.causal and protocol.accumulation > 1:
        raise InvalidInput(
            f"accumulation is {protocol.accumulation} for a classification head.",
            "It is 1 there: transformers drops the item count for such heads, and gradients grow with the accumulation.",
            "Use a smaller batch, or accumulation 1.",
        )
    read = rows.training()
    steps = math.ceil(len(read) / protocol.batch) * math.ceil(protocol.epochs)
    device = sharding.place(next(model.parameters()).device)
    half = bf16 or any(p.dtype == torch.bfloat16 for p in model.parameters())
    arguments = _arguments(
        folder, model, protocol, seed, steps, cpu=device.type == "cpu", bf16=half, checkpointing=checkpointing, quiet=quiet
    )
    set_seed(seed)
    checkpoint = broadcast(lambda: seeds_of.last_whole(folder)) if resume else None
    for callback in callbacks:
        if checkpoint is not None and hasattr(callback, "restore"):
            callback.restore(model, checkpoint)
    trainer = _trainer(model, arguments, read, rows, protocol, callbacks)
    trainer.remove_callback(PrinterCallback)  # it writes to stdout, which belongs to --json
    for callback in callbacks:
        if hasattr(callback, "attach"):
            callback.attach(trainer)
    with whole(folder):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if protocol.alpha_policy != "constant-ratio":
        fold_scales(model, protocol.ratio)  # what is saved has one scale, as servers assume
    state = sharding.trained(model) if sharding.wanted() else None
    if is_main():
        with whole(folder):
            cast("PeftModel", model).save_pretrained(str(folder / "adapter"), state_dict=state)
    result: dict[str, Any] = {
        "seed": seed,
        "training_loss": mean_loss(trainer.state.log_history),
        "steps": trainer.state.global_step,
    }
    if (together := process_group()) is not None:
        result["processes"] = together.size
    with torch.autocast(device.type, torch.bfloat16, enabled=half and not bf16):
        result |= rows.judge(model)
    return result


def _trainer(
    model: nn.Module, arguments: TrainingArguments, read: Sequence[dict[str, Any]], rows: Rows | TextRows, protocol: Protocol,
    callbacks: Sequence[Any],
) -> Trainer:  # fmt: skip
    """The Trainer of one process, or of several that share its passes."""
    from transformers import Trainer

    from ..decisions.experts.method import BalanceScale
    from .together import SharedTrainer

    options: dict[str, Any] = {
        "model": model, "args": arguments, "data_collator": rows.collate,
        "callbacks": [BalanceScale(), logging_before_saving()(), *callbacks, seeds_of.sealing()],
    }  # fmt: skip
    together = process_group()
    if protocol.trainer == "trl":
        return sft.sft_trainer(model, arguments, read, cast(TextRows, rows), options["callbacks"])
    if together is None:
        return Trainer(train_dataset=cast(Any, read), **options)
    if sharding.wanted():
        from .sharded import ShardedTrainer

        return ShardedTrainer(together, read, protocol.batch // protocol.accumulation, causal=rows.causal, **options)
    return SharedTrainer(together, read, protocol.batch // protocol.accumulation, causal=rows.causal, **options)


def finetune(
    load: Loader,
    tokenizer: Any,
    plan: Plan,
    task: Task | Texts,
    out: Path | str,
    *,
    protocol: Protocol,
    seeds: Sequence[int] = (0,),
    resume: bool = False,
    overwrite: bool = False,
    bf16: bool = False,
    checkpointing: bool = False,
    quiet: bool = True,
    callbacks: Callable[[], Sequence[Any]] = tuple,
    progress: Callable[[int, int], None] | None = None,
    part: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """Fine-tune a plan over seeds.

    Args:
        load: ``seed -> model``; see :func:`layerbudget.finetuning.base.classifier_loader`.
        tokenizer: The model's tokenizer.
        plan: A plan of ranks or experts.
        task: A labelled task, or rows of text (:func:`layerbudget.data.text.read_texts`) for a language model.
        out: Folder of the results; one sub-folder per seed.
        protocol: Numbers of the run.
        seeds: Seeds; each sets the head, the adapters' start and the order of rows.
        resume: Keep finished seeds and continue unfinished ones.
        overwrite: Replace the results of an earlier run in ``out`` (what its manifests name; files of yours stay). They are
            set aside, removed when the new run is complete, and put back when it fails.
        bf16: Autocast in bfloat16; always on where the base is held in it.
        checkpointing: Compute activations again in the backward pass instead of keeping them.
        quiet: No progress bars of the Trainer.
        callbacks: Makes the callbacks of one seed.
        progress: Called with seeds done and in total.
        part: ``(i, n)``: train every n-th seed only, beginning with the i-th (from 1), and write no summary.

    Returns:
        The record that is also written to ``result.json``: per split and metric the mean, the standard error and the
        values by seed; trained parameters; the plan's and the task's digests.

    Raises:
        AlreadyExists: ``out`` holds results and neither ``resume`` nor ``overwrite`` is set, or seeds of another plan, task,
            protocol, precision or version.
        InvalidInput: A seed is named twice, ``resume`` and ``overwrite`` together, a number of the protocol that the plan
            does not read, or what several processes cannot share.
        CoverageError: The recount differs from the plan.
    """
    from .together import check

    out = real(out)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise InvalidInput(
            f"The seeds are {list(seeds)}.", "At least one, each once: a repeated run is no sample.", "Drop some."
        )
    protocol.check(plan.kind)
    if resume and overwrite:
        raise InvalidInput("resume and overwrite were given together.", "One keeps what the other removes.", "Leave one out.")
    moved = [c.describe() for c in callbacks() if hasattr(c, "describe")]
    check(protocol, load, moved, bf16=bf16)
    sharding.check()
    sft.check(protocol, load, moved)
    broadcast(lambda: seeds_of.check_free(out, resume=resume, overwrite=overwrite))
    identity = {
        "plan": plan.digest, "task": task.digest, "protocol": dataclasses.asdict(protocol), "bf16": bf16,
        "base": dict(load.settings) if isinstance(load, NamedLoader) else computation(load(seeds[0])),
        "versions": versions(("torch", "transformers", "peft", *sft.packages(protocol))),
    }  # fmt: skip
    if moved:  # they change numbers too
        identity["callbacks"] = moved
    with seeds_of.replacing(out) if overwrite and is_main() else contextlib.nullcontext():
        return _over_seeds(
            load, tokenizer, plan, task, out, protocol, seeds, identity, progress=progress, resume=resume, bf16=bf16,
            callbacks=callbacks, checkpointing=checkpointing, quiet=quiet, part=part,
        )  # fmt: skip


def _over_seeds(
    load: Loader, tokenizer: Any, plan: Plan, task: Task | Texts, out: Path, protocol: Protocol, seeds: Sequence[int],
    identity: dict[str, Any], *, callbacks: Callable[[], Sequence[Any]], progress: Callable[[int, int], None] | None,
    part: tuple[int, int], **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train what is missing, seed by seed, and write the summary."""
    results, trained = [], 0
    seeds = seeds[part[0] - 1 :: part[1]]
    for done, seed in enumerate(seeds):
        folder = out / f"seed-{seed}"
        record = broadcast(lambda folder=folder: seeds_of.kept(folder, identity))  # type: ignore[misc]
        if record is None:
            plain = load(seed)
            rows = rows_of(task, tokenizer, plain, protocol)
            protocol.check(plan.kind, causal=rows.causal)
            model = started(plain, plan, protocol, rows, task)
            check_space({folder: _room(model)})
            if is_main():
                seeds_of.begin(folder, identity)
            record = train_one(model, rows, task, protocol, seed, folder, callbacks=list(callbacks()), **options)
            record["identity"] = identity
            record["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
            if is_main():
                seeds_of.finish(folder, record)
        results.append(record)
        trained = record["trained_parameters"]
        if progress:
            progress(done + 1, len(seeds))
    summary = {
        "schema_version": 1, "task": task.name, "metric": task.metric, "rows": _counts(task), "kind": plan.kind,
        "rule": plan.rule, "trained_parameters": trained, "seeds": list(seeds), "identity": identity,
        "metrics": _summary(results), "one_class": _one_class(results),
    }  # fmt: skip
    if part[1] == 1:
        broadcast(lambda: _write_summary(out, summary, task, plan))
    return summary


def _room(model: nn.Module) -> int:
    """Bytes that one seed may take at once: the adapter, and three checkpoints of it with the moments of the optimiser."""
    return sum(p.numel() * (4 + 3 * (p.element_size() + 8)) for p in model.parameters() if p.requires_grad)


def _write_summary(out: Path, summary: dict[str, Any], task: Task | Texts, plan: Plan) -> None:
    write_text(out / "result.json", dumps({**summary, "made_by": made_by()}), overwrite=True)
    write_text(out / "labels.json", dumps(answers_of(task)), overwrite=True)
    seeds_of.seal_summary(out, plan)


def _counts(task: Task | Texts) -> dict[str, int]:
    """Rows that were trained on and held out."""
    return {"train": len(task.train), **{split: len(rows) for split, rows in task.evaluation.items()}}


def _one_class(results: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Seeds, by split, whose model gave every row the same label: its accuracy is that label's share."""
    return {
        split: [r["seed"] for r in results if r.get("one_class", {}).get(split) is not None] for split in results[0]["metrics"]
    }


def _summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for split, metrics in results[0]["metrics"].items():
        summary[split] = {}
        for name in metrics:
            values = [r["metrics"][split][name] for r in results]
            mean, error = statistics.mean_and_error(values)
            summary[split][name] = {"value": mean, "stderr": error, "by_seed": values}
    return summary
