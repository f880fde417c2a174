r"""Gains during fine-tuning, from gradients that are there anyway (the paper's future work iii).

Adam keeps running means of every trainable parameter's gradient and of its square: a mean gradient and a diagonal Fisher for
nothing (:mod:`layerbudget.sensitivity.moments`). Gains are in units of the Fisher of *one step's* mean gradient; the tokens of
a
step are a common factor that no weight depends on. Gradients are read as the optimizer gets them, after clipping. Without
Adam the same two means are kept by the tracker itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from ..errors import CoverageError, InvalidInput
from ..models.blocks import describe, layers
from ..records import Block, Module, to_jsonable
from ..scores import Scores
from ..sensitivity.moments import Moments, corrected, excess_weights, moment_gains, optimizer_moments
from ..solvers import allocate
from ..solvers.rounding import round_capacity
from ..solvers.transfer import transfer_allocation

logger = logging.getLogger(__name__)

SOURCES = ("auto", "optimizer", "gradients")


class GainTracker(TrainerCallback):
    """Callback of a transformers ``Trainer`` that tracks the gain of every block and the regret of the plan made at the start.

    Args:
        blocks: Blocks by whose names trainable parameters are grouped (LoRA factors below ``model.layers.3`` belong to it);
            the decoder layers of the model when left out.
        every: Optimizer steps between two updates.
        damping: tau in units of each block's mean Fisher entry.
        source: ``optimizer`` (Adam's state, free), ``gradients`` (own running means, two more tensors per trainable
            parameter) or ``auto``: the first where the optimizer has it.
        decay: Decay of the tracker's own running means.
        initial: Scores that the plan was made from; the first update otherwise.
        budget: Capacity that the plan divides (experts or ranks); the number of blocks times 5 by default.
        cost: Cost of a unit per block, scalar or ``(K,)``.
        exponent: beta of the program.
        tolerance: Share of the best plan's gain that the first plan may miss (``relative_regret`` of
            :class:`layerbudget.solvers.Transfer`) before the tracker says that the plan should be made again.
        path: JSON-lines file to which every update is appended.

    Attributes:
        history: One record per update: ``step, gain, floor, weights, regret, relative_regret, counts, moved``.

    Raises:
        InvalidInput: An option outside its domain; at the start, no moments to read or other ``initial`` blocks.
    """

    def __init__(
        self,
        blocks: Sequence[Block] | None = None,
        *,
        every: int = 10,
        damping: float = 1.0,
        source: str = "auto",
        decay: float = 0.95,
        initial: Scores | None = None,
        budget: float | None = None,
        cost: float | Sequence[float] = 1.0,
        exponent: float = 1.0,
        tolerance: float = 0.02,
        path: Path | str | None = None,
    ) -> None:
        if every < 1 or not damping > 0 or source not in SOURCES or not 0 < decay < 1:
            raise InvalidInput(
                f"every={every}, damping={damping}, source={source!r}, decay={decay}.",
                f"every is at least 1, damping positive, source one of {SOURCES}, decay between 0 and 1.",
                "Leave them out for the defaults.",
            )
        self.blocks = None if blocks is None else tuple(blocks)
        self.every, self.damping, self.source, self.decay = every, damping, source, decay
        self.initial, self.budget, self.cost, self.exponent = initial, budget, cost, exponent
        self.tolerance, self.path = tolerance, None if path is None else Path(path)
        self.history: list[dict[str, Any]] = []
        self.model: dict[str, Any] = {}
        self._groups: list[list[nn.Parameter]] = []
        self._own: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps = 0
        self._planned: np.ndarray | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Group the trainable parameters by block."""
        if model is None:
            return
        optimizer = kwargs.get("optimizer")
        if self.source == "optimizer" and optimizer is not None and not self._adam(optimizer, first=True):
            raise InvalidInput("source is 'optimizer', which keeps no squares of gradients.", "", "Use source='auto'.")
        names = [b.name for b in self.blocks] if self.blocks else [_plain(name) for name, _ in layers(model)]
        groups: list[list[tuple[str, nn.Parameter]]] = [[] for _ in names]
        for name, p in model.named_parameters():
            if p.requires_grad:
                for group, block in zip(groups, names, strict=True):
                    if f".{block}." in f".{name}.":
                        group.append((name, p))
                        break
        empty = [n for n, g in zip(names, groups, strict=True) if not g]
        if empty:
            raise CoverageError(
                f"{len(empty)} blocks have no trainable parameter, first {empty[0]}.",
                "Every tracked block needs one.",
                "Track only the blocks that are trained, with blocks=.",
            )
        if self.blocks is None:
            self.blocks = tuple(
                Block(name=n, modules=tuple(Module(name=q, d_in=p.shape[-1], d_out=p.numel() // p.shape[-1]) for q, p in g))
                for n, g in zip(names, groups, strict=True)
            )
        self._groups = [[p for _, p in g] for g in groups]
        self._own, self._steps = {}, 0
        self.model = describe(model)
        if self.initial is not None:
            if self.initial.names != [b.name for b in self.blocks]:
                what = f"The initial scores name {len(self.initial.names)} blocks, other {len(self.blocks)} are tracked."
                raise InvalidInput(what, "Both need the same blocks in the same order.", "Pass blocks=initial.blocks.")
            self._planned = self.initial.weights()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep own running means, where the optimizer keeps none."""
        if self.source == "optimizer" or (self.source == "auto" and self._adam(kwargs.get("optimizer"), first=True)):
            return
        self._steps += 1
        means, squares, gradients = [], [], []
        for p in (p for group in self._groups for p in group):
            if p.grad is None:
                continue
            if p not in self._own:
                self._own[p] = (torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32))
            means.append(self._own[p][0])
            squares.append(self._own[p][1])
            gradients.append(p.grad.float())
        torch._foreach_lerp_(means, gradients, 1 - self.decay)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - self.decay)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every N steps: gains, floors, weights, regret."""
        if (state.global_step + 1) % self.every == 0:
            self.update(state.global_step + 1, kwargs.get("optimizer"))

    def _adam(self, optimizer: Any, *, first: bool = False) -> bool:
        groups = getattr(optimizer, "param_groups", None) or []
        if first and not getattr(optimizer, "state", None):
            return any("betas" in g for g in groups)
        return any("exp_avg_sq" in s for s in (getattr(optimizer, "state", None) or {}).values())

    def _moments(self, optimizer: Any) -> dict[int, list[Moments]]:
        """Moments of every trainable parameter that has had a gradient, by place of the block."""
        if not self._own and self._adam(optimizer):
            return {k: optimizer_moments(optimizer, group) for k, group in enumerate(self._groups)}
        betas = (self.decay, self.decay)
        return {
            k: [corrected(*self._own[p], betas, self._steps) for p in group if p in self._own]
            for k, group in enumerate(self._groups)
        }

    @torch.no_grad()
    def update(self, step: int, optimizer: Any = None) -> dict[str, Any] | None:
        """Compute one record now and append it to the history; None while no gradient has been seen."""
        moments = self._moments(optimizer)
        if not moments or not all(moments.values()):
            return None
        gain, floor = np.array(list(moment_gains(moments, self.damping, shared=False).values())).T
        weights = excess_weights(gain, floor)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(gain), 1.0 / len(gain))
        if self._planned is None:
            self._planned = weights
        record = {"step": step, "gain": gain.tolist(), "floor": floor.tolist(), "weights": weights.tolist()}
        record |= self._regret(weights)
        self.history.append(record)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(to_jsonable(record)) + "\n")
        if record["relative_regret"] > self.tolerance:
            logger.info(
                "step %d: the plan made at the start is %.1f %% short of what these gains allow; %d units would move",
                step, 100 * record["relative_regret"], record["moved"],
            )  # fmt: skip
        return record

    def _regret(self, weights: np.ndarray) -> dict[str, Any]:
        """What keeping the first plan loses under the present weights, and how many whole units would move."""
        planned = self._planned if self._planned is not None else weights
        budget = float(self.budget) if self.budget is not None else 5.0 * len(weights) * float(np.mean(self.cost))
        transfer = transfer_allocation(planned, weights, self.cost, budget, exponent=self.exponent, spend="exactly")
        counts = [
            round_capacity(allocate(w, self.cost, budget, exponent=self.exponent, spend="exactly")).counts
            for w in (planned, weights)
        ]
        moved = int(np.abs(counts[0] - counts[1]).sum() // 2)
        return {
            "regret": transfer.regret, "relative_regret": transfer.relative_regret,
            "rank_correlation": transfer.rank_correlation, "counts": counts[1].tolist(), "moved": moved,
        }  # fmt: skip

    def scores(self) -> Scores:
        """Return the latest gains as a record, from which a plan can be made again with the tracker's own weights.

        The values are the excess over the noise floor (the gains themselves where nothing stands above it), as in ``weights``
        of the history; gain and floor are in ``extra``.

        Raises:
            InvalidInput: No update has happened yet.
        """
        if not self.history or self.blocks is None:
            raise InvalidInput("The tracker has no update yet.", f"It updates every {self.every} steps.", "Train longer.")
        last = self.history[-1]
        gain, floor = np.array(last["gain"]), np.array(last["floor"])
        kept = {name: last[name] for name in ("step", "relative_regret", "gain", "floor")}
        return Scores(
            estimator="tracked-fisher-diagonal",
            blocks=self.blocks,
            gain=(tuple(excess_weights(gain, floor).tolist()),),
            damping=(self.damping,),
            damping_unit="mean",
            unit="gain of one step's mean gradient above its noise",
            model=self.model,
            extra={**kept, "floor_subtracted": bool((gain > floor).any())},
        )

    def plot(self, path: Path | str) -> Path:
        """Draw the weights and the regret over the steps.

        Raises:
            MissingDependency: matplotlib is not installed.
            InvalidInput: Fewer than two updates.
        """
        from ..report.figures import new_figure, save_figure

        if len(self.history) < 2 or self.blocks is None:
            raise InvalidInput(f"There are {len(self.history)} updates.", "A line needs two.", "Train longer.")
        steps = [h["step"] for h in self.history]
        weights = np.array([h["weights"] for h in self.history])
        figure = new_figure(8.0, 6.4)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        colours = _colours(len(self.blocks))
        for k, block in enumerate(self.blocks):
            upper.plot(steps, weights[:, k], color=colours[k], linewidth=1.2, label=block.name.rsplit(".", 1)[-1])
        upper.axhline(1 / len(self.blocks), color="0.7", linewidth=0.8, linestyle=":")
        note = {"fontsize": 7, "color": "0.5", "va": "center"}
        upper.text(1.005, 1 / len(self.blocks), "equal", transform=upper.get_yaxis_transform(), **note)
        upper.set_ylabel("weight (share of the gain above noise)")
        upper.legend(title="block", ncols=2, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        lower.plot(steps, [100 * h["relative_regret"] for h in self.history], color="#d9480f", label="regret of the first plan")
        lower.axhline(100 * self.tolerance, color="0.7", linewidth=0.8, linestyle=":")
        lower.text(1.005, 100 * self.tolerance, "plan again", transform=lower.get_yaxis_transform(), **note)
        lower.set(xlabel="optimizer step", ylabel="regret (% of the\nbest plan's gain)", ylim=(0, None))
        for axis in (upper, lower):
            axis.spines[["top", "right"]].set_visible(False)
        return save_figure(figure, path)


def _plain(name: str) -> str:
    """Name of a layer without the wrappers of PEFT and distributed training."""
    for prefix in ("module.", "base_model.model."):
        name = name.removeprefix(prefix)
    return name


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0.0, 0.95, count)]
