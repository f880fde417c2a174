"""Gains while training, from the optimiser's running moments: whether a plan still fits (the paper's future work iii).

Adam keeps a running mean m of every trainable parameter's gradient and v of its square: a mean gradient and a diagonal Fisher
for nothing. Bias-corrected,

    gain(tau) = sum m^2 / (v + tau),        floor(tau) = r sum v / (v + tau),

where r, the sum of the squared weights of the running mean, makes the floor what pure noise would give (flipping the signs of
gradients leaves v alone). What is left above the floor is what layers may be compared by. Gains are in units of the Fisher of
*one step's* mean gradient, as the optimiser gets it, after clipping.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from ..errors import CoverageError, InvalidInput
from ..models.blocks import describe, layers
from ..records import Block, Module
from ..scores import Scores
from ..solvers import allocate
from ..solvers.inputs import number, whole_number
from ..solvers.rounding import round_capacity
from ..solvers.transfer import transfer_allocation

logger = logging.getLogger(__name__)


@torch.no_grad()
def moment_gain(optimizer: Any, parameters: Sequence[nn.Parameter], damping: float) -> tuple[float, float]:
    """Return gain and noise floor of a group of parameters, from Adam's state.

    Parameters without moments count nothing. The damping, tau, is in units of the group's mean of v.
    """
    betas = {id(p): g.get("betas", (0.9, 0.999)) for g in optimizer.param_groups for p in g["params"]}
    moments = []
    for p in parameters:
        state = optimizer.state.get(p, {})
        if "exp_avg_sq" in state:
            (b1, b2), t = betas[id(p)], float(state.get("step", 1))
            noise = (1 - b1) * (1 + b1**t) / ((1 + b1) * (1 - b1**t))
            moments.append((state["exp_avg"].float() / (1 - b1**t), state["exp_avg_sq"].float() / (1 - b2**t), noise))
    mean = float(sum(v.sum() for _, v, _ in moments)) / max(sum(v.numel() for _, v, _ in moments), 1)
    tau = max(damping * mean, 1e-30)
    gain = sum((m.square() / (v + tau)).sum() for m, v, _ in moments)
    floor = sum(noise * (v / (v + tau)).sum() for _, v, noise in moments)
    return float(gain), float(floor)


def excess_weights(gain: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Return what stands above the noise floor; the gains themselves where nothing does. Shape ``(K,)``, not negative."""
    excess = np.maximum(gain - floor, 0.0)
    return excess if excess.any() else gain


class GainTracker(TrainerCallback):
    """Callback of a transformers ``Trainer`` that tracks the gain of every block and the regret of the plan made at the start.

    Args:
        blocks: Blocks by whose names trainable parameters are grouped (LoRA factors below ``model.layers.3`` belong to it);
            the decoder layers of the model when left out.
        every: Optimizer steps between two updates.
        damping: tau in units of each block's mean Fisher entry.
        initial: Scores that the plan was made from; the first update otherwise.
        budget: Capacity that the plan divides (experts or ranks); the number of blocks times 5 by default.
        tolerance: Share of the best plan's gain that the first plan may miss (``relative_regret`` of
            :class:`layerbudget.solvers.Transfer`) before the tracker says that the plan should be made again.

    Attributes:
        history: One record per update: ``step, gain, floor, weights, regret, relative_regret, counts, moved``.

    Raises:
        InvalidInput: An option outside its domain; at the start, other ``initial`` blocks, or an optimiser without moments.
        CoverageError: At the start, a block without a trainable parameter.
    """

    def __init__(
        self,
        blocks: Sequence[Block] | None = None,
        *,
        every: int = 10,
        damping: float = 1.0,
        initial: Scores | None = None,
        budget: float | None = None,
        tolerance: float = 0.02,
    ) -> None:
        whole_number(every, "every")
        number(damping, "damping", positive=True)
        number(tolerance, "tolerance")
        if budget is not None:
            number(budget, "budget", positive=True)
        self.blocks = None if blocks is None else tuple(blocks)
        self.every, self.damping, self.initial, self.budget, self.tolerance = every, damping, initial, budget, tolerance
        self.history: list[dict[str, Any]] = []
        self.model: dict[str, Any] = {}
        self._groups: dict[str, list[nn.Parameter]] = {}
        self._planned: np.ndarray | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Group the trainable parameters by block."""
        if model is None:
            return
        optimizer = kwargs.get("optimizer")
        if optimizer is not None and not any("betas" in group for group in optimizer.param_groups):
            raise InvalidInput("The optimiser keeps no squares of gradients.", "The tracker reads Adam's.", "Use AdamW.")
        layer_names = [n.removeprefix("module.").removeprefix("base_model.model.") for n, _ in layers(model)]
        names = [b.name for b in self.blocks] if self.blocks else layer_names
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in names}
        for name, p in model.named_parameters():
            block = next((n for n in names if f".{n}." in f".{name}."), None)
            if p.requires_grad and block is not None:
                groups[block].append((name, p))
        empty = [name for name, group in groups.items() if not group]
        if empty:
            problem = f"{len(empty)} blocks have no trainable parameter, first {empty[0]}."
            raise CoverageError(
                problem, "Every tracked block needs one.", "Track only the blocks that are trained, with blocks=."
            )
        if self.blocks is None:
            self.blocks = tuple(
                Block(name=n, modules=tuple(Module(name=q, d_in=p.shape[-1], d_out=p.numel() // p.shape[-1]) for q, p in g))
                for n, g in groups.items()
            )
        self._groups, self.model = {n: [p for _, p in g] for n, g in groups.items()}, describe(model)
        if self.initial is not None:
            if self.initial.names != names:
                what = f"The initial scores name {len(self.initial.names)} blocks, other {len(names)} are tracked."
                raise InvalidInput(what, "Both need the same blocks in the same order.", "Pass blocks=initial.blocks.")
            self._planned = self.initial.weights()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Append a record of now to the history, every N steps."""
        if state.global_step % self.every:
            return
        gain, floor = np.array([moment_gain(kwargs["optimizer"], group, self.damping) for group in self._groups.values()]).T
        weights = excess_weights(gain, floor)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(gain), 1.0 / len(gain))
        planned = self._planned = weights if self._planned is None else self._planned
        budget = 5.0 * len(weights) if self.budget is None else float(self.budget)
        transfer = transfer_allocation(planned, weights, 1.0, budget, spend="exactly")
        counts = [round_capacity(allocate(w, 1.0, budget, spend="exactly")).counts for w in (planned, weights)]
        record = {
            "step": state.global_step,
            "gain": gain.tolist(),
            "floor": floor.tolist(),
            "weights": weights.tolist(),
            "regret": transfer.regret,
            "relative_regret": transfer.relative_regret,
            "rank_correlation": transfer.rank_correlation,
            "counts": counts[1].tolist(),
            "moved": int(np.abs(counts[0] - counts[1]).sum() // 2),
        }
        self.history.append(record)
        if record["relative_regret"] > self.tolerance:
            message = "step %d: the plan made at the start is %.1f %% short of what these gains allow; %d units would move"
            logger.info(message, state.global_step, 100 * record["relative_regret"], record["moved"])

    def scores(self) -> Scores:
        """Return what stands above the noise floor now as scores, from which a plan can be made again.

        Raises:
            InvalidInput: No update has happened yet.
        """
        if not self.history or self.blocks is None:
            raise InvalidInput("The tracker has no update yet.", f"It updates every {self.every} steps.", "Train longer.")
        last = self.history[-1]
        gain, floor = np.array(last["gain"]), np.array(last["floor"])
        return Scores(
            estimator="tracked-fisher-diagonal",
            blocks=self.blocks,
            gain=(tuple(excess_weights(gain, floor).tolist()),),
            damping=(self.damping,),
            damping_unit="mean",
            unit="gain of one step's mean gradient above its noise",
            model=self.model,
            extra={
                **{name: last[name] for name in ("step", "relative_regret", "gain", "floor")},
                "floor_subtracted": bool((gain > floor).any()),
            },
        )
