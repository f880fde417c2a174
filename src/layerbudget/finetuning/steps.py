"""How far a training is, step by step, with its loss; and the log that a resumed run reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def step_callback(progress: Callable[[int, int, str], None], phase: str) -> TrainerCallback:
    """A callback of the Trainer that reports every step.

    Args:
        progress: Called with steps done, steps in total, and the phase with the last loss.
        phase: What is trained.
    """
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl:
            progress(state.global_step, state.max_steps, phase)
            return control

        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl:
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            last = state.global_step == state.max_steps
            said = "held-out rows" if last else f"loss {losses[-1]:.3f}" if losses else "training"
            progress(state.global_step, state.max_steps, f"{phase}, {said}")
            return control

    return Steps()


def logging_before_saving() -> type[TrainerCallback]:
    """A callback that logs the loss of every step before a checkpoint is saved, so that a resumed run knows all of them."""
    from transformers import TrainerCallback

    class LogBeforeSaving(TrainerCallback):
        def on_epoch_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl:
            control.should_log = True
            return control

    return LogBeforeSaving


def mean_loss(history: Sequence[Mapping[str, Any]]) -> float:
    """Mean loss over all steps from a Trainer's log, whose entries are means over the steps since the entry before.

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
