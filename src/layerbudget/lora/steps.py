"""How far a training is, step by step, with its loss."""

from __future__ import annotations

from collections.abc import Callable
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
