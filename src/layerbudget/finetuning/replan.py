r"""Plan while training: once, after a fraction of the steps, move ranks or experts to where the gain is now.

The gain is read from the optimiser, at no cost (:mod:`layerbudget.sensitivity.moments`): the damped gain with the diagonal
empirical
Fisher in adapter space, one damping for all modules, *above its noise floor*. The plan is then made again as it was made
(:func:`layerbudget.plans.again.plan_again`): same budget in the same unit, same floors, caps, multiples, fixed blocks and
exponents.

Ranks and experts are moved in place. What stays keeps its values *and* its optimiser state. A new rank starts with a random row
of A and a zero column of B, so the model's function does not move; a dropped rank is the one with the smallest
``|B_i| |A_i|``. A new expert has a zero update and a zero router row (the routing of others shifts a little); the
dropped one has the smallest norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..decisions.ranks.apply import adapter_config, base_name, pattern
from ..errors import CoverageError, InvalidInput, LayerbudgetError
from ..plan import Plan, PlanBlock
from ..plans.again import plan_again
from ..records import Block, Module, dumps, write_text
from ..scores import Scores
from ..sensitivity.moments import Moments, excess_weights, moment_gains, optimizer_moments
from ..storage import reading

logger = logging.getLogger(__name__)
_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def tracked_gains(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, damping: float = 1e-2
) -> dict[str, tuple[float, float]]:
    """Diagonal gain ``sum m^2 / (v + tau)`` and noise floor per adapted module, from Adam's state.

    Args:
        model: The adapted model.
        optimizer: An Adam-type optimiser that has taken steps.
        damping: ``tau`` relative to the mean of ``v`` over all adapter parameters.

    Raises:
        CoverageError: The optimiser keeps no such state for an adapter.
    """
    moments: dict[str, list[Moments]] = {}
    for name, leaves in adapter_leaves(model).items():
        parameters = [leaf.weight for leaf in leaves.values()]
        moments[name] = optimizer_moments(optimizer, parameters)
        if len(moments[name]) < len(parameters):
            raise CoverageError(f"The optimiser has no running moments of {name}.", "", "Use AdamW, after at least one step.")
    return moment_gains(moments, damping, shared=True)


def adapter_leaves(model: nn.Module, adapter: str = "default") -> dict[str, dict[str, nn.Linear]]:
    """Leaves ``A``, ``B`` and ``router`` of every adapted module, by plain name."""
    found: dict[str, dict[str, nn.Linear]] = {}
    for name, module in model.named_modules():
        for kind in ("lora_experts_", "lora_"):
            holder = getattr(module, f"{kind}A", None)
            if isinstance(holder, nn.ModuleDict) and adapter in holder:
                leaves = {
                    part: getattr(module, f"{kind}{part}") for part in ("A", "B", "router") if hasattr(module, kind + part)
                }
                found[base_name(name)] = {k: v[adapter] for k, v in leaves.items() if adapter in v}
                break
    return found


def resize(model: nn.Module, optimizer: torch.optim.Optimizer, counts: Mapping[str, int], adapter: str = "default") -> None:
    """Give every adapted module a new rank or number of experts, in place, with the optimiser's state.

    Args:
        model: A model adapted by :func:`~layerbudget.decisions.ranks.apply.add_ranks` or
            :func:`~layerbudget.decisions.experts.method.add_experts`.
        optimizer: The optimiser that trains it.
        counts: New rank or experts by module, at least 1 (a module that PEFT never wrapped cannot gain an adapter here).
        adapter: Name of the adapter.

    Raises:
        InvalidInput: A count below one, or experts of a module that has no router (or would need to lose it).
        CoverageError: A module without an adapter.
    """
    modules: dict[str, Any] = {base_name(n): m for n, m in model.named_modules()}
    leaves = adapter_leaves(model, adapter)
    for name, count in counts.items():
        if name not in leaves:
            raise CoverageError(
                f"{name} has no adapter to resize.", "", "Re-plan only what the first plan adapted (minimum 1)."
            )
        module = modules[name]
        routed = hasattr(module, "lora_experts_r")
        smallest = 2 if routed and "router" in leaves[name] else 1
        if count < smallest or (routed and "router" not in leaves[name] and count != 1):
            raise InvalidInput(
                f"{name} cannot go to {count}.",
                "A rank is at least 1; a module keeps its router, so one expert stays one and more stay at least two.",
                "Re-plan with a minimum of 2 experts.",
            )
        unit = module.lora_experts_r[adapter] if routed else 1
        _resize_one(leaves[name], optimizer, count, unit)
        if routed:
            module.lora_experts_count[adapter] = count
            module.lora_experts_top_k[adapter] = min(adapter_config(model, adapter).top_k, count)
        else:
            _rescale(module, adapter, count)
    _rewrite_config(adapter_config(model, adapter), counts, modules, adapter)
    _rewrite_largest(adapter_config(model, adapter), leaves)


def _rescale(module: Any, adapter: str, rank: int) -> None:
    """Keep the module's scale: alpha follows the rank."""
    scale = module.scaling[adapter]
    module.r[adapter] = rank
    module.lora_alpha[adapter] = scale * (math.sqrt(rank) if getattr(module, "use_rslora", {}).get(adapter) else rank)


def _rewrite_config(config: Any, counts: Mapping[str, int], modules: Mapping[str, Any], adapter: str) -> None:
    """Make the configuration say what is there, so that a saved adapter loads."""
    for name, count in counts.items():
        key = pattern(name)
        if hasattr(config, "experts_pattern"):
            config.experts_pattern[key] = count
        else:
            config.rank_pattern[key] = count
            config.alpha_pattern[key] = modules[name].lora_alpha[adapter]


def _rewrite_largest(config: Any, adapted: Collection[str]) -> None:
    """Keep ``r`` the largest rank (a server that reads it alone reserves enough), where no module takes it as its own."""
    ranks = getattr(config, "rank_pattern", None) or {}
    if ranks and all(pattern(name) in ranks for name in adapted):
        key = max(ranks, key=lambda k: ranks[k])
        config.r, config.lora_alpha = ranks[key], config.alpha_pattern.get(key, config.lora_alpha)


def _resize_one(leaves: Mapping[str, nn.Linear], optimizer: torch.optim.Optimizer, count: int, unit: int) -> None:
    """Keep the ``count`` strongest units (ranks, or experts of ``unit`` ranks) and add what is missing."""
    a, b = leaves["A"].weight, leaves["B"].weight
    have = a.shape[0] // unit
    with torch.no_grad():
        strength = (a.view(have, unit, -1).norm(dim=-1) * b.T.reshape(have, unit, -1).norm(dim=-1)).sum(-1)
    kept = strength.topk(min(count, have)).indices.sort().values
    rows = (kept.unsqueeze(-1) * unit + torch.arange(unit, device=kept.device)).flatten()
    fresh = count * unit - len(rows)
    new_a = torch.empty(fresh, a.shape[1], device=a.device, dtype=a.dtype)
    if fresh:
        nn.init.kaiming_uniform_(new_a, a=math.sqrt(5))
    _replace(leaves["A"], optimizer, rows, new_a, 0)
    _replace(leaves["B"], optimizer, rows, b.new_zeros(b.shape[0], fresh), 1)
    if "router" in leaves:
        router = leaves["router"].weight
        _replace(leaves["router"], optimizer, kept, router.new_zeros(count - len(kept), router.shape[1]), 0)


def _replace(leaf: nn.Linear, optimizer: torch.optim.Optimizer, keep: Tensor, fresh: Tensor, dim: int) -> None:
    """Swap a leaf's weight for its kept part and fresh units, in the module and in the optimiser."""
    old = leaf.weight
    new = nn.Parameter(torch.cat([old.detach().index_select(dim, keep), fresh], dim), requires_grad=old.requires_grad)
    leaf.weight = new
    leaf.out_features, leaf.in_features = new.shape
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = optimizer.state.pop(old, None)
    if state:
        for key in _STATE:
            if key in state:
                state[key] = torch.cat(
                    [state[key].index_select(dim, keep), torch.zeros_like(fresh, dtype=state[key].dtype)], dim
                )
        optimizer.state[new] = state


def replanned(
    plan: Plan, gains: Mapping[str, tuple[float, float]], shapes: Mapping[str, tuple[int, int]], minimum: int = 1
) -> dict[str, int]:
    """New counts by module under the plan's own budget and constraints, from the gains that training shows now.

    What has no adapter keeps none, and a block with one expert has no router and keeps its one. Gains that are not finite, or
    of which nothing is positive, leave every count as it is, and so do terms that no other plan meets: training goes on.

    Args:
        plan: The plan in force.
        gains: Gain and noise floor by module.
        shapes: ``(d_in, d_out)`` by module.
        minimum: Smallest count of what has an adapter, where the plan's own floor is below it.
    """
    held = {m: b.count for b in plan.blocks for m in b.modules if b.count > 0}
    kept = [b for b in plan.blocks if b.count > 0]
    gain, floor = (np.array([sum(gains[m][i] for m in b.modules) for b in kept]) for i in (0, 1))
    value = excess_weights(gain, floor)
    if not (np.isfinite(value).all() and value.sum() > 0):
        return held
    found = dict(zip((b.name for b in kept), value.tolist(), strict=True))
    blocks = [
        Block(name=b.name, modules=tuple(Module(name=m, d_in=shapes[m][0], d_out=shapes[m][1]) for m in b.modules))
        if b.count
        else Block(name=b.name, modules=tuple(Module(name=m, d_in=1, d_out=1) for m in b.modules))  # of no size that is known
        for b in plan.blocks
    ]
    scores = Scores.from_values(blocks, {b.name: found.get(b.name, 0.0) for b in blocks}, estimator="tracked-fisher-diagonal")
    still = (plan.counts == 0) | ((plan.counts < 2) & (plan.kind == "experts"))
    pinned = {b.name: b.count for b, stays in zip(plan.blocks, still, strict=True) if stays}
    try:
        new = plan_again(plan, scores, rule="mdl", lower=np.minimum(minimum, plan.counts), fixed=pinned)
    except LayerbudgetError as error:  # a run that trains is worth more than another plan for the rest of it
        logger.warning("The re-plan changes nothing: %s", error)
        return held
    return {m: b.count for b in new.blocks for m in b.modules if m in held}


_STATE_FILE = "replan.json"


class _Planned(msgspec.Struct):
    """What a checkpoint keeps of a re-plan."""

    counts: dict[str, reading.Count]
    gains: dict[str, tuple[float, float]] | None


class Replan(TrainerCallback):
    """Callback of the Trainer: re-plan once after a fraction of the steps.

    Args:
        plan: The plan in force.
        fraction: When, as a fraction of all steps, in (0, 1).
        damping: Relative damping of the tracked gain.

    Raises:
        InvalidInput: A fraction outside (0, 1), or training in several processes, when it begins.
    """

    def __init__(self, plan: Plan, *, fraction: float = 0.3, damping: float = 1e-2) -> None:
        if not 0.0 < fraction < 1.0:
            raise InvalidInput(f"The re-plan fraction is {fraction}.", "It lies strictly between 0 and 1.", "Try 0.3.")
        self.plan, self.fraction, self.damping = plan, fraction, damping
        self.trainer: Any = None
        self.gains: dict[str, tuple[float, float]] | None = None
        self.counts: dict[str, int] | None = None

    def describe(self) -> dict[str, Any]:
        """What belongs to the identity of a run."""
        return {"replan": self.fraction, "damping": self.damping}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep with a checkpoint what was planned before it: its tensors have those shapes."""
        if self.counts is not None:
            place = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / _STATE_FILE
            write_text(place, dumps({"schema_version": 1, "counts": self.counts, "gains": self.gains}), overwrite=True)

    def restore(self, model: nn.Module, checkpoint: Path) -> None:
        """Give a fresh model the shapes that a checkpoint after the re-plan has.

        Raises:
            CorruptFile: The checkpoint's record of them does not read.
        """
        if not (checkpoint / _STATE_FILE).is_file():
            return
        found = reading.read(checkpoint / _STATE_FILE, "re-plan", as_type=_Planned)
        self.counts, self.gains = found.counts, found.gains
        trained = [p for p in model.parameters() if p.requires_grad]
        resize(model, torch.optim.AdamW(trained), found.counts)  # the Trainer makes its own optimiser and loads its state

    def attach(self, trainer: Any) -> None:
        """Remember the trainer, whose optimiser is resized."""
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse several processes: parameters that take another shape leave the reducer of the others waiting."""
        if args.world_size > 1:
            raise InvalidInput(
                f"Training runs in {args.world_size} processes.",
                "Capacity moves in place in one process only.",
                "Train in one process, or plan before and leave --replan out.",
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Re-plan when the fraction is reached."""
        if self.counts is not None or state.global_step < self.fraction * state.max_steps:
            return
        from .adapt import fit_names

        plain = getattr(model, "module", model)
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        fitted = fit_names(self.plan, plain.get_base_model())
        here = {own: m for a, b in zip(self.plan.blocks, fitted.blocks, strict=True) for own, m in _pairs(a, b)}
        there = {m: own for own, m in here.items()}
        leaves = {there[n]: part for n, part in adapter_leaves(plain).items()}
        shapes = {n: (part["A"].in_features, part["B"].out_features) for n, part in leaves.items()}
        self.gains = {there[n]: found for n, found in tracked_gains(plain, optimizer, damping=self.damping).items()}
        counts = replanned(self.plan, self.gains, shapes, 1 if self.plan.kind == "ranks" else 2)
        self.counts = {here[n]: count for n, count in counts.items()}
        resize(plain, optimizer, self.counts)


def _pairs(own: PlanBlock, fitted: PlanBlock) -> Iterator[tuple[str, str]]:
    """Names of a block's modules in the plan, and in the model at hand (an encoder with a head has a prefix more)."""
    return zip(own.modules, fitted.modules, strict=True)
