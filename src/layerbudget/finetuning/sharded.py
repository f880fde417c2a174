"""The Trainer under FSDP: it shares weights between processes and keeps the checkpoints that one process would keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from .sharding import like, trained, whole
from .together import SharedTrainer

_OPTIMIZER, _SCHEDULER, _WEIGHTS = "optimizer.pt", "scheduler.pt", "adapter_model.safetensors"


class ShardedTrainer(SharedTrainer):
    """A Trainer whose processes share the weights too; checkpoints are those of one process."""

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate shares weights between accelerators alone, and says nothing where processes run on the CPU."""
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:
            plugin = FullyShardedDataParallelPlugin(**cast("dict[str, Any]", self.args.fsdp_plugin_args))
            if state.mixed_precision != "no":
                plugin.set_mixed_precision(state.mixed_precision)
            state.distributed_type, state.fsdp_plugin, self.is_fsdp_enabled = DistributedType.FSDP, plugin, True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather what is trained; process 0 writes it."""
        state = trained(cast("nn.Module", self.model))
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, scheduler = cast("Any", self.optimizer), cast("Any", self.lr_scheduler)
        held = optimizer.state_dict()
        held["state"] = {k: {n: whole(v) for n, v in row.items()} for k, row in held["state"].items()}
        if self.args.should_save:
            torch.save(held, Path(output_dir) / _OPTIMIZER)
            torch.save(scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        from peft import get_peft_model_state_dict
        from safetensors.torch import load_file

        own = cast("nn.Module", self.model)
        named = get_peft_model_state_dict(own, state_dict={name: p for name, p in own.named_parameters() if p.requires_grad})
        with torch.no_grad():
            for name, value in load_file(Path(resume_from_checkpoint) / _WEIGHTS).items():
                named[name].copy_(like(named[name], value))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        held = torch.load(Path(checkpoint) / _OPTIMIZER, map_location="cpu", weights_only=True)
        optimizer, scheduler = cast("Any", self.optimizer), cast("Any", self.lr_scheduler)
        order = [p for group in optimizer.param_groups for p in group["params"]]
        for k, row in held["state"].items():
            held["state"][k] = {n: like(order[k], v) if v.shape == order[k].shape else v for n, v in row.items()}
        optimizer.load_state_dict(held)
        scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))
