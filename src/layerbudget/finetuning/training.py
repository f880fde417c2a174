r"""One training by transformers' Trainer: in one process, in several that share every step (DDP), or that share the weights too
(FSDP2).

Every step learns the rows that one process would have learnt: a pass takes the next rows of one seeded order, process r the
r-th part of them, and behind the last rows of an epoch stand rows of which nothing is learned. With ``l_i`` the loss of a
learned token (of a row, under a head) and n their number in the whole step, over all processes and passes, the gradient is that
of ``1 / n sum_i l_i``: that of one process, up to the order of sums.

Under FSDP2 (``accelerate launch --use_fsdp --fsdp_version 2``) every process holds its part of the base and of the adapters,
and a decoder layer is whole while it runs. What is written is what one process would write: adapters and the optimiser's
moments are gathered and process 0 saves them, so a run that began under FSDP goes on under DDP or alone, or the other way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.integrations import integration_utils

from ..data.encoding import IGNORE
from ..errors import InvalidInput, MissingDependency, NotFinite
from ..execution.processes import is_main, process_group
from ..models.blocks import layers
from ..storage import folders
from .protocol import Protocol
from .rows import Rows, TextRows

_BESIDE_CHECKPOINTS = ("tensorboard", "codecarbon")  # where these trackers of transformers write

_REFUSED = {  # what a launcher asks for by its variables, and what to do instead
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "Launch plain DDP, or FSDP."),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "Launch plain DDP, or FSDP."),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("A parallelism config", "Launch plain DDP, or FSDP."),
    "FSDP_OFFLOAD_PARAMS": ("--fsdp_offload_params", "Leave it out."),
    "FSDP_ACTIVATION_CHECKPOINTING": ("--fsdp_activation_checkpointing", "Use --gradient-checkpointing."),
    "FSDP_FORWARD_PREFETCH": ("--fsdp_forward_prefetch", "Leave it out."),
}
_OPTIMIZER, _SCHEDULER, _WEIGHTS = "optimizer.pt", "scheduler.pt", "adapter_model.safetensors"


def _set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def shares_weights() -> bool:
    """Return whether the launcher asked several processes to share weights (FSDP)."""
    return _set("ACCELERATE_USE_FSDP") and process_group().size > 1


def check_reporters(names: Sequence[str]) -> None:
    """Refuse trackers that transformers does not know, that are not installed, or whose records would not outlast the training.

    Raises:
        InvalidInput: An unknown name, or a tracker that writes beside the checkpoints, which are removed.
        MissingDependency: Its package is missing.
    """
    known = sorted({*integration_utils.INTEGRATION_TO_CALLBACK} - {*_BESIDE_CHECKPOINTS})
    for name in names:
        if name in _BESIDE_CHECKPOINTS:
            reason = "It writes beside the checkpoints, which are removed at the end."
            raise InvalidInput(f"{name} would keep nothing.", reason, f"Choose among {', '.join(known)}.")
        if name not in known:
            raise InvalidInput(
                f"{name!r} is no tracker of transformers.", f"It knows {', '.join(known)}.", "Choose among them."
            )
        if name not in integration_utils.get_available_reporting_integrations():
            raise MissingDependency(f"{name} is not installed.", "", f"pip install {name}, or leave report_to out.")


def check(protocol: Protocol, settings: Mapping[str, Any], *, bf16: bool) -> None:
    """Refuse what several processes cannot share, before anything is loaded or written.

    ``settings`` is what the loader says of its base, ``bf16`` whether bfloat16 autocast was asked for.
    """
    group = process_group()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if group.size == 1:
        if processes > 1:
            raise InvalidInput(
                f"This is one of {processes} processes, which have not joined.",
                "They find one another before the model is loaded.",
                "Start `torchrun -m layerbudget finetune ...`, or call layerbudget.execution.processes.join() first.",
            )
        return
    parts = protocol.accumulation * group.size
    if protocol.batch % parts:
        passes = f" in {protocol.accumulation} passes" if protocol.accumulation > 1 else ""
        raise InvalidInput(
            f"A batch of {protocol.batch} rows{passes} does not divide between {group.size} processes.",
            f"It is a multiple of {parts}: the batch of all processes together stays what it is with one.",
            f"Use --batch {max(parts, protocol.batch // parts * parts)}, or another number of processes.",
        )
    precision, version = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), os.environ.get("FSDP_VERSION", "2")
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    other = precision != "no" and not (precision == "bf16" and bf16)
    wrapped = policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    for refused, what, remedy in (
        (protocol.balance, "The balance loss", "Leave it out: it is a product of shares of a whole batch."),
        (protocol.start != "default", "A start in the task's gradients", "Leave it out: PEFT's own start is shared."),
        (settings.get("quantised"), "A base in 4 bits (--four-bit)", "Use --dtype bfloat16."),
        (other, f"Accelerate's mixed precision {precision}", "Say --bf16."),
        (shares_weights() and version != "2", f"Version {version} of FSDP", "Add --fsdp_version 2: it holds frozen weights."),
        (shares_weights() and not wrapped, f"FSDP's policy {policy}", "Leave it out: every decoder layer is one unit."),
        *((_set(variable), name, remedy) for variable, (name, remedy) in _REFUSED.items()),
    ):
        if refused:
            raise InvalidInput(f"{what} cannot be used by several processes.", f"There are {group.size}.", remedy)


class FilledOrder(Sampler[int]):
    """The Trainer's seeded order of the rows, and behind it the row that teaches nothing until the last pass is full.

    That row stands behind the ``rows`` others; ``batch`` is the number of rows of one pass over all processes.
    """

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.order, self.fill = SeedableRandomSampler(range(rows), data_seed=seed), [rows] * (-rows % batch)

    def __len__(self) -> int:
        return len(self.order) + len(self.fill)

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from self.fill

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.order.set_epoch(epoch)


def _head_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Sum over this process's rows, divided by the rows of all."""
    total = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum", ignore_index=IGNORE)
    return total / (labels != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else total / num_items_in_batch


def _token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Sum of the next tokens' losses of this pass, divided by the learned tokens of the whole step."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)
    return total / ((targets != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


@torch.no_grad()
def counts_tokens(model: nn.Module, ids: Sequence[int], *, passes: int = 1) -> bool:
    """Return whether a model's own loss is that of the next tokens, divided by the number of tokens that it is told.

    A few tokens are looked at. Models that take a mean of their own, or the loss of another token, are trained by the loss of
    this module.

    Raises:
        InvalidInput: The model adds another loss (of a router), which several ``passes`` of a step would count several times.
    """
    device, training = next(model.parameters()).device, model.training
    ids = [*ids, *ids][: max(2, min(len(ids), 16))]
    tokens = torch.tensor([ids], device=device)
    options: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    base: Any = getattr(model, "get_base_model", lambda: model)()
    if not getattr(base, "accepts_loss_kwargs", True):
        return False
    count, model = len(ids) - 1, model.eval()
    try:
        first, second = (model(**options, num_items_in_batch=torch.tensor(n * count, device=device)) for n in (1, 2))
    except TypeError:  # of a forward that takes no such number
        return False
    finally:
        model.train(training)
    loss = float(_token_loss(first, tokens))
    if abs(float(first.loss) - float(second.loss) - loss / 2) > 0.05 * loss:
        return False
    other = getattr(first, "aux_loss", None)
    if passes > 1 and other is not None and abs(float(first.loss) - loss) > 1e-3 * loss:
        message = f"{type(base).__name__} adds a loss of its router to every pass, and a step has {passes}."
        raise InvalidInput(message, "It would count several times.", "Set output_router_logits to false in its config.json.")
    return True


class _SharedTrainer(Trainer):
    """A Trainer whose processes share every forward pass."""

    def __init__(self, rows: Sequence[dict[str, Any]], batch: int, rank: int, **options: Any) -> None:
        labels = rows[0]["labels"]
        blank = {**rows[0], "labels": IGNORE if isinstance(labels, int) else [IGNORE] * len(labels)}
        self.filled = FilledOrder(len(rows), batch, options["args"].seed)
        if isinstance(labels, int):
            options["compute_loss_func"] = _head_loss
        super().__init__(train_dataset=cast(Any, [*rows, blank]), **options)
        torch.manual_seed(options["args"].seed + 1_000_003 * rank)  # dropout differs between processes

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Read the rows in this order; accelerate gives every process its part."""
        rows, size = cast(Any, self.train_dataset), self.args.train_batch_size
        loader = DataLoader(rows, size, sampler=self.filled, collate_fn=self.data_collator)
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that was shared out, put together on the CPU; every process calls it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, shared out as another one is."""
    value = value.to(tensor.device, tensor.dtype)
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained, whole, by name; every process calls it."""
    return {name: _whole(p) for name, p in model.named_parameters() if p.requires_grad}


class _ShardedTrainer(_SharedTrainer):
    """A Trainer whose processes share the weights too; its checkpoints are those of one process.

    Three private methods are overridden: a run that continued from accelerate's own checkpoint of FSDP2 did not go on (gloo).
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Share weights also where processes run on the CPU, which accelerate leaves out in silence."""
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:
            plugin = FullyShardedDataParallelPlugin(**cast("dict[str, Any]", self.args.fsdp_plugin_args))
            if state.mixed_precision != "no":
                plugin.set_mixed_precision(state.mixed_precision)
            state.distributed_type, state.fsdp_plugin, self.is_fsdp_enabled = DistributedType.FSDP, plugin, True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather what is trained; process 0 writes it."""
        state = trained(cast(nn.Module, self.model))
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, scheduler = cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        moments = optimizer.state_dict()
        moments["state"] = {k: {n: _whole(v) for n, v in row.items()} for k, row in moments["state"].items()}
        if self.args.should_save:
            torch.save(moments, Path(output_dir) / _OPTIMIZER)
            torch.save(scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        from peft import get_peft_model_state_dict
        from safetensors.torch import load_file

        adapted: Any = self.model
        named = get_peft_model_state_dict(
            adapted, state_dict={name: p for name, p in adapted.named_parameters() if p.requires_grad}
        )
        with torch.no_grad():
            for name, value in load_file(Path(resume_from_checkpoint) / _WEIGHTS).items():
                named[name].copy_(_like(named[name], value))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        moments = torch.load(Path(checkpoint) / _OPTIMIZER, map_location="cpu", weights_only=True)
        optimizer, scheduler = cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        order = [p for group in optimizer.param_groups for p in group["params"]]
        for k, row in moments["state"].items():
            moments["state"][k] = {n: _like(order[k], v) if v.shape == order[k].shape else v for n, v in row.items()}
        optimizer.load_state_dict(moments)
        scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


class _Watch(TrainerCallback):
    """Reports every step; logs the loss before a checkpoint is saved, for the run that resumes; seals every checkpoint."""

    def __init__(self, progress: Callable[[int, int, str], None] | None, phase: str) -> None:
        self.progress, self.phase = progress, phase

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps, self.phase)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.progress is None:
            return
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        last = state.global_step == state.max_steps
        now = "held-out rows" if last else f"loss {losses[-1]:.3f}" if losses else "training"
        self.progress(state.global_step, state.max_steps, f"{self.phase}, {now}")

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_log = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        process_group().barrier()  # every process has its random state in it
        if is_main():
            folders.seal(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")


class _Diverged(TrainerCallback):
    """Ends a training whose loss or weights are not finite any more, before a checkpoint of it is written."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in kwargs["model"].parameters() if p.requires_grad]
        sums = torch.stack([p.detach().double().sum() for p in parts])
        broken = process_group().sum(np.array([float(not bool(torch.isfinite(sums).all()))]))
        if broken[0]:
            raise diverged(self.protocol, f"at step {state.global_step} of {state.max_steps}")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = (kwargs.get("logs") or {}).get("loss", 0.0)
        if not math.isfinite(float(loss)):
            raise diverged(self.protocol, f"at step {state.global_step} of {state.max_steps}")


def diverged(protocol: Protocol, place: str) -> NotFinite:
    """Return the refusal of a training whose numbers are not finite."""
    message = f"The training diverged {place}: its loss or its weights are not finite. Nothing of it is kept."
    smaller = min(protocol.lr / 10, Protocol.lr)
    remedy = f"Use a smaller one, say --lr {smaller:.1g}; a run with --resume needs another folder then."
    return NotFinite(message, f"The learning rate is {protocol.lr:g}.", remedy)


def mean_loss(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean loss over all steps from a Trainer's log, whose entries are means over the steps since the one before.

    The Trainer's own figure counts only the steps since the last resume.

    >>> mean_loss([{"loss": 4.0, "step": 10}, {"loss": 1.0, "step": 15}, {"train_loss": 9.0, "step": 15}])
    3.0
    """
    total, before = 0.0, 0
    for entry in history:
        if "loss" in entry:
            total += float(entry["loss"]) * (entry["step"] - before)
            before = entry["step"]
    return total / max(before, 1)


def _arguments(
    model: nn.Module, protocol: Protocol, seed: int, folder: Path, steps: int, device: torch.device, **options: Any
) -> TrainingArguments:
    group, report_to = process_group(), options.pop("report_to")
    if options.pop("checkpointing"):  # later releases of transformers renamed it
        new = "activation_checkpointing" in {f.name for f in dataclasses.fields(TrainingArguments)}
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        options |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    if shares_weights():
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "FULL_STATE_DICT",
            "reshard_after_forward": os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"),
            "transformer_layer_cls_to_wrap": sorted({type(layer).__name__ for _, layer in layers(model)}),
        }
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        data_seed=seed,
        num_train_epochs=protocol.epochs,
        per_device_train_batch_size=protocol.batch // protocol.accumulation // group.size,
        gradient_accumulation_steps=protocol.accumulation,
        learning_rate=protocol.lr,
        lr_scheduler_type="linear",
        warmup_steps=min(protocol.warmup, steps // 2),
        weight_decay=protocol.weight_decay,
        max_grad_norm=protocol.clip,
        optim="adamw_torch",
        use_cpu=device.type == "cpu",
        save_total_limit=2,
        logging_steps=10,
        logging_nan_inf_filter=False,
        report_to=list(report_to) if is_main() else [],
        run_name=folder.parent.name,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
        **options,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # private: no option keeps several cards from one DataParallel
    return arguments


def _first_unlearned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch whose first tokens are not counted among those that are learned: no token predicts them."""
    batch["labels"][:, 0] = IGNORE
    return batch


def train(
    model: nn.Module,
    rows: Rows | TextRows,
    protocol: Protocol,
    seed: int,
    folder: Path,
    *,
    keep: bool = False,
    checkpoint: Path | None = None,
    bf16: bool = False,
    checkpointing: bool = False,
    report_to: Sequence[str] = (),
    callbacks: Sequence[Any] = (),
    progress: Callable[[int, int, str], None] | None = None,
    phase: str = "training",
) -> dict[str, Any]:
    """Train an adapted model; return its mean training loss and the number of steps.

    Args:
        model: With its adapters.
        rows: Rows to train on and to measure.
        protocol: Numbers of the run.
        seed: Of the order of rows.
        folder: Gets the checkpoints.
        keep: Keep one checkpoint per epoch.
        checkpoint: The one to continue from.
        bf16: Autocast in bfloat16.
        checkpointing: Compute activations again in the backward pass instead of keeping them.
        report_to: Trackers of transformers; what they print goes to stderr.
        callbacks: Further callbacks of the Trainer.
        progress: Called with steps done, steps in total, and what is at work.
        phase: How progress calls it.

    Raises:
        NotFinite: The training diverged.
        InvalidInput: Accumulation for a head, or with a model that adds a loss of its own.
    """
    if not rows.causal and protocol.accumulation > 1:
        message = f"accumulation is {protocol.accumulation} for a classification head."
        reason = "It is 1 there: transformers drops the item count for such heads, and gradients grow with the accumulation."
        raise InvalidInput(message, reason, "Use a smaller batch, or accumulation 1.")
    examples: Any = rows.task.train
    group, read = process_group(), rows.encoded(examples)
    steps = math.ceil(len(read) / protocol.batch) * math.ceil(protocol.epochs)
    device = group.device if shares_weights() else next(model.parameters()).device
    half = bf16 or any(p.dtype == torch.bfloat16 for p in model.parameters())
    strategy: dict[str, Any] = {"save_strategy": "epoch" if keep else "no", "bf16": half, "checkpointing": checkpointing}
    strategy["report_to"] = report_to
    arguments = _arguments(model, protocol, seed, folder, steps, device, **strategy)
    set_seed(seed)
    watchers = [_Diverged(protocol), *callbacks, _Watch(progress, phase)]
    options: dict[str, Any] = {"model": model, "data_collator": rows.collate, "callbacks": watchers}
    if rows.causal:
        options["data_collator"] = lambda batch: _first_unlearned(rows.collate(batch))
        if not counts_tokens(model, read[0]["input_ids"], passes=protocol.accumulation * group.size):
            options["compute_loss_func"] = _token_loss
    with contextlib.redirect_stdout(sys.stderr) if report_to else contextlib.nullcontext():  # stdout belongs to --json
        if group.size == 1:
            trainer = Trainer(train_dataset=cast(Any, read), args=arguments, **options)
        else:
            kind = _ShardedTrainer if shares_weights() else _SharedTrainer
            trainer = kind(read, protocol.batch // protocol.accumulation, group.rank, args=arguments, **options)
        trainer.remove_callback(PrinterCallback)  # it writes to stdout
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if "wandb" in report_to and is_main():
            import wandb

            wandb.finish()  # its callback leaves that to the end of the program: seeds would share a run, and it prints there
    result = {"training_loss": mean_loss(trainer.state.log_history), "steps": trainer.state.global_step}
    return {**result, **({"processes": group.size} if group.size > 1 else {})}


def judge(model: nn.Module, rows: Rows | TextRows, *, bf16: bool) -> dict[str, Any]:
    """Return what a trained model does on the held-out rows, under autocast where its base is in bfloat16."""
    half = any(p.dtype == torch.bfloat16 for p in model.parameters())
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=half and not bf16):
        return rows.judge(model)
