r"""Gains while training, from the optimiser's running moments (the paper's future work iii), and a plan that is made again.

Adam keeps a running mean m of every trainable parameter's gradient and v of its square: a mean gradient and a diagonal Fisher
for nothing. Bias-corrected,

    gain(tau) = sum m^2 / (v + tau),        floor(tau) = r sum v / (v + tau),

where r, the sum of the squared weights of the running mean, makes the floor what pure noise would give (flipping the signs of
gradients leaves v alone). What is left above the floor is what layers may be compared by. Gains are in units of the Fisher of
*one step's* mean gradient, as the optimiser gets it, after clipping.

:class:`GainTracker` watches; :class:`Replan` acts, once: same budget in the same unit, same floors, caps, multiples, fixed
blocks and exponents (:func:`layerbudget.plans.again.plan_again`). Ranks and experts are moved in place. What stays keeps its
values *and* its optimiser state. A new rank starts with a random row of A and a zero column of B, so the model's function does
not move; a dropped rank is the one with the smallest ``|B_i| |A_i|``. A new expert has a zero update and a zero router row
(the routing of others shifts a little); the dropped one has the smallest norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..decisions.ranks.apply import adapter_config, base_name, pattern
from ..errors import CoverageError, InvalidInput, LayerbudgetError
from ..models.blocks import describe, layers
from ..plan import Plan
from ..plans.again import plan_again
from ..records import Block, Module, dumps, write_text
from ..scores import Scores
from ..solvers import allocate
from ..solvers.rounding import round_capacity
from ..solvers.transfer import transfer_allocation
from ..storage import reading
from .adapters import fit_names

logger = logging.getLogger(__name__)
_SQUARE = "exp_avg_sq"
_MOMENTS = ("exp_avg", _SQUARE, "max_exp_avg_sq")
_STATE_FILE = "replan.json"


@torch.no_grad()
def moment_gains(
    optimizer: Any, groups: Mapping[str, Sequence[Tensor]], damping: float, *, shared: bool
) -> dict[str, tuple[float, float]]:
    """Return gain and noise floor of every group of parameters, from Adam's state.

    Args:
        optimizer: An Adam-type optimiser; parameters that it keeps no moments of count nothing.
        groups: Parameters by name.
        damping: tau in units of the mean of v.
        shared: One tau for all groups (the mean over all of them), else each group's own.
    """
    betas = {id(p): g.get("betas", (0.9, 0.999)) for g in optimizer.param_groups for p in g["params"]}
    moments: dict[str, list[tuple[Tensor, Tensor, float]]] = {name: [] for name in groups}
    for name, parameters in groups.items():
        for p in parameters:
            state = optimizer.state.get(p, {})
            if _SQUARE in state:
                (b1, b2), t = betas[id(p)], float(state.get("step", 1))
                noise = (1 - b1) * (1 + b1**t) / ((1 + b1) * (1 - b1**t))
                m, v = state["exp_avg"].float() / (1 - b1**t), state[_SQUARE].float() / (1 - b2**t)
                moments[name].append((m, v, noise))
    sums = {k: (float(sum(v.sum() for _, v, _ in g)), sum(v.numel() for _, v, _ in g)) for k, g in moments.items()}
    total, count = sum(s for s, _ in sums.values()), sum(n for _, n in sums.values())
    found = {}
    for name, group in moments.items():
        scale = total / max(count, 1) if shared else sums[name][0] / max(sums[name][1], 1)
        tau = max(damping * scale, 1e-30)
        gain = sum((m.square() / (v + tau)).sum() for m, v, _ in group)
        floor = sum(noise * (v / (v + tau)).sum() for _, v, noise in group)
        found[name] = (float(gain), float(floor))
    return found


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
        if every < 1 or not damping > 0:
            raise InvalidInput(
                f"every={every}, damping={damping}.",
                "every is at least 1, damping positive.",
                "Leave them out.",
            )
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
        wrappers = ("module.", "base_model.model.")
        plain = [n.removeprefix(wrappers[0]).removeprefix(wrappers[1]) for n, _ in layers(model)]
        names = [b.name for b in self.blocks] if self.blocks else plain
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in names}
        for name, p in model.named_parameters():
            block = next((n for n in names if f".{n}." in f".{name}."), None)
            if p.requires_grad and block is not None:
                groups[block].append((name, p))
        empty = [name for name, group in groups.items() if not group]
        if empty:
            raise CoverageError(
                f"{len(empty)} blocks have no trainable parameter, first {empty[0]}.",
                "Every tracked block needs one.",
                "Track only the blocks that are trained, with blocks=.",
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
        """Update every N steps."""
        if state.global_step % self.every == 0:
            self.update(state.global_step, kwargs["optimizer"])

    def update(self, step: int, optimizer: Any) -> dict[str, Any]:
        """Return one record of now, which is appended to the history."""
        gain, floor = np.array(list(moment_gains(optimizer, self._groups, self.damping, shared=False).values())).T
        weights = excess_weights(gain, floor)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(gain), 1.0 / len(gain))
        planned = self._planned = weights if self._planned is None else self._planned
        budget = 5.0 * len(weights) if self.budget is None else float(self.budget)
        transfer = transfer_allocation(planned, weights, 1.0, budget, spend="exactly")
        counts = [round_capacity(allocate(w, 1.0, budget, spend="exactly")).counts for w in (planned, weights)]
        record = {
            "step": step,
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
            told = "step %d: the plan made at the start is %.1f %% short of what these gains allow; %d units would move"
            logger.info(told, step, 100 * record["relative_regret"], record["moved"])
        return record

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


def adapter_leaves(model: nn.Module, adapter: str = "default") -> dict[str, dict[str, nn.Linear]]:
    """Return the leaves ``A``, ``B`` and ``router`` of every adapted module, by plain name."""
    found: dict[str, dict[str, nn.Linear]] = {}
    for name, module in model.named_modules():
        for kind in ("lora_experts_", "lora_"):
            holder = getattr(module, f"{kind}A", None)
            if isinstance(holder, nn.ModuleDict) and adapter in holder:
                holders: dict[str, Any] = {part: getattr(module, kind + part, {}) for part in ("A", "B", "router")}
                found[base_name(name)] = {part: held[adapter] for part, held in holders.items() if adapter in held}
                break
    return found


def tracked_gains(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, damping: float = 1e-2
) -> dict[str, tuple[float, float]]:
    """Return gain and noise floor per adapted module, from Adam's state; the damping is relative to the mean of v over all.

    Raises:
        CoverageError: The optimiser keeps no such state for an adapter.
    """
    groups = {name: [leaf.weight for leaf in leaves.values()] for name, leaves in adapter_leaves(model).items()}
    silent = [n for n, parameters in groups.items() if any(_SQUARE not in optimizer.state.get(p, {}) for p in parameters)]
    if silent:
        what = f"The optimiser has no running moments of {silent[0]}."
        raise CoverageError(what, "", "Use AdamW, after at least one step.")
    return moment_gains(optimizer, groups, damping, shared=True)


def replanned(
    plan: Plan, gains: Mapping[str, tuple[float, float]], shapes: Mapping[str, tuple[int, int]], minimum: int = 1
) -> dict[str, int]:
    """Return new counts by module under the plan's own budget and constraints, from the gains that training shows now.

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
    sizes = {m: shapes[m] if b.count else (1, 1) for b in plan.blocks for m in b.modules}  # without an adapter: not known
    blocks = [
        Block(name=b.name, modules=tuple(Module(name=m, d_in=sizes[m][0], d_out=sizes[m][1]) for m in b.modules))
        for b in plan.blocks
    ]
    values = {b.name: found.get(b.name, 0.0) for b in blocks}
    scores = Scores.from_values(blocks, values, estimator="tracked-fisher-diagonal")
    still = (plan.counts == 0) | ((plan.counts < 2) & (plan.kind == "experts"))
    pinned = {b.name: b.count for b, stays in zip(plan.blocks, still, strict=True) if stays}
    try:
        new = plan_again(plan, scores, rule="mdl", lower=np.minimum(minimum, plan.counts), fixed=pinned)
    except LayerbudgetError as error:  # a run that trains is worth more than another plan for the rest of it
        logger.warning("The re-plan changes nothing: %s", error)
        return held
    return {m: b.count for b in new.blocks for m in b.modules if m in held}


def resize(model: nn.Module, optimizer: torch.optim.Optimizer, counts: Mapping[str, int], adapter: str = "default") -> None:
    """Give every adapted module a new rank or number of experts, in place, with the optimiser's state.

    Args:
        model: A model adapted by a plan of ranks or experts.
        optimizer: The optimiser that trains it.
        counts: New rank or experts by module, at least 1 (a module that PEFT never wrapped cannot gain an adapter here).
        adapter: Name of the adapter.

    Raises:
        InvalidInput: A count below one, or experts of a module that has no router (or would need to lose it).
        CoverageError: A module without an adapter.
    """
    modules: dict[str, Any] = {base_name(n): m for n, m in model.named_modules()}
    leaves, config = adapter_leaves(model, adapter), adapter_config(model, adapter)
    for name, count in counts.items():
        if name not in leaves:
            raise CoverageError(
                f"{name} has no adapter to resize.", "", "Re-plan only what the first plan adapted (minimum 1)."
            )
        module, key = modules[name], pattern(name)
        mixture, router = hasattr(module, "lora_experts_r"), "router" in leaves[name]
        if count < (2 if router else 1) or (mixture and not router and count != 1):
            raise InvalidInput(
                f"{name} cannot go to {count}.",
                "A rank is at least 1; a module keeps its router, so one expert stays one and more stay at least two.",
                "Re-plan with a minimum of 2 experts.",
            )
        _resize_one(leaves[name], optimizer, count, module.lora_experts_r[adapter] if mixture else 1)
        if mixture:
            module.lora_experts_count[adapter] = config.experts_pattern[key] = count
            module.lora_experts_top_k[adapter] = min(config.top_k, count)
        else:  # the module keeps its scale: alpha follows the rank
            root = getattr(module, "use_rslora", {}).get(adapter)
            module.r[adapter] = config.rank_pattern[key] = count
            alpha = module.scaling[adapter] * (math.sqrt(count) if root else count)
            module.lora_alpha[adapter] = config.alpha_pattern[key] = alpha
    ranks = getattr(config, "rank_pattern", None) or {}
    if ranks and all(pattern(name) in ranks for name in leaves):  # a server that reads r alone reserves enough
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
        for key in (k for k in _MOMENTS if k in state):
            zeros = torch.zeros_like(fresh, dtype=state[key].dtype)
            state[key] = torch.cat([state[key].index_select(dim, keep), zeros], dim)
        optimizer.state[new] = state


class _Planned(msgspec.Struct):
    """State of a re-plan in a checkpoint."""

    counts: dict[str, reading.Count]


class Replan(TrainerCallback):
    """Callback of the Trainer, in one process: re-plan once after a fraction of the steps.

    Args:
        plan: The plan in force.
        fraction: When, as a fraction of all steps, in (0, 1).

    Attributes:
        counts: Rank or experts by module of the model at hand; None before.

    Raises:
        InvalidInput: A fraction outside (0, 1).
    """

    def __init__(self, plan: Plan, *, fraction: float = 0.3) -> None:
        if not 0.0 < fraction < 1.0:
            raise InvalidInput(f"The re-plan fraction is {fraction}.", "It lies strictly between 0 and 1.", "Try 0.3.")
        self.plan, self.fraction = plan, fraction
        self.counts: dict[str, int] | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep with a checkpoint what was planned before it: its tensors have those shapes."""
        if self.counts is not None:
            place = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / _STATE_FILE
            write_text(place, dumps({"schema_version": 1, "counts": self.counts}), overwrite=True)

    def restore(self, model: nn.Module, checkpoint: Path) -> None:
        """Give a fresh model the shapes that a checkpoint after the re-plan has.

        Raises:
            CorruptFile: The checkpoint's record of them does not read.
        """
        if (checkpoint / _STATE_FILE).is_file():
            self.counts = reading.read(checkpoint / _STATE_FILE, "re-plan", as_type=_Planned).counts
            trained = [p for p in model.parameters() if p.requires_grad]
            resize(model, torch.optim.AdamW(trained), self.counts)  # the Trainer makes its own optimiser and loads its state

    def on_step_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Re-plan when the fraction is reached."""
        if self.counts is not None or state.global_step < self.fraction * state.max_steps:
            return
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        fitted = fit_names(self.plan, model.get_base_model())  # an encoder with a head has a prefix more
        pairs = [zip(a.modules, b.modules, strict=True) for a, b in zip(self.plan.blocks, fitted.blocks, strict=True)]
        own = {here: name for pair in pairs for name, here in pair}
        leaves = {own[n]: part for n, part in adapter_leaves(model).items()}
        shapes = {n: (part["A"].in_features, part["B"].out_features) for n, part in leaves.items()}
        gains = {own[n]: gain for n, gain in tracked_gains(model, optimizer).items()}
        counts = replanned(self.plan, gains, shapes, 1 if self.plan.kind == "ranks" else 2)
        self.counts = {here: counts[name] for here, name in own.items() if name in counts}
        resize(model, optimizer, self.counts)
