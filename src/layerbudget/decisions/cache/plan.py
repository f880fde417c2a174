r"""A plan of the cache: a format for keys and values, by the damage to the output, in exact bytes at a context.

With ``g_st(y)`` the gradient of the loss at the cached keys (or values) of token t, and ``delta_st`` what a format makes of
them less what they are, the damage of block i (some layers' keys, values or both) in format j is half the Fisher form

    d_ij = 1/2 (1/N) sum_s E_y [ (sum_t g_st(y)' delta_st)^2 ],

all from ``1 + 2 draws`` passes, and made steadier by what formats share
(:func:`~layerbudget.sensitivity.directional.terms.pooled`). The choice is exact (:mod:`layerbudget.solvers.choices`). Held-out
text is then run with everything rounded, beside plans without a program; the plan is the one with the least divergence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InfeasibleBudget, InvalidInput
from ...execution.backward import SampledLoss
from ...execution.loss import IGNORE, logits_of, unlabelled
from ...execution.modes import prepared
from ...models.blocks import config_of, describe
from ...models.offload import mapped
from ...plan import Plan, PlanBlock
from ...planning.costs import parse_budget
from ...progress import Progress, Steps, say
from ...records import Block, Module
from ...sensitivity.directional.terms import pooled
from ...solvers.choices import choose, near_ties
from ..bits.plan import describe_rows, verdict
from ..bits.program import BASELINES, Table, check_bits
from ..bits.sensitivity import DenseOutput
from .cache import PARTS, Kept, caching, kept, rounded, rounding
from .formats import RULES, CacheFormat, CacheRuntime, find_cache

_TIES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpace:
    """The decisions: blocks of kept keys and values, and formats to choose among."""

    runtime: CacheRuntime
    formats: list[CacheFormat]
    members: list[list[Kept]]
    blocks: list[Block]
    context: int
    batch: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        context: int,
        batch: int = 1,
        runtime: str = "transformers",
        formats: Sequence[str] | None = None,
        group: int | None = None,
    ) -> CacheSpace:
        """Return what may be decided for a model; arguments as of :func:`plan_cache`."""
        target, config = find_cache(runtime), config_of(model)
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context < 1 or batch < 1 or (longest and context > longest):
            feasible = f"Both are 1 or more{f', and the model reads at most {longest} tokens' if longest else ''}."
            raise InvalidInput(f"context is {context} and batch {batch}.", feasible, "Choose them within that.")
        if runtime != "transformers" and getattr(config, "kv_lora_rank", None):
            what = f"{runtime} keeps one latent vector per token of this model, transformers its keys and values."
            raise InvalidInput(what, "", "Plan for transformers (--runtime transformers).")
        held, groups = kept(model), dict[str, list[Kept]]()
        for k in held:
            layer, part = k.name if target.layers else "", PARTS[k.part] if target.parts else ""
            groups.setdefault(".".join(filter(None, (layer, part))), []).append(k)
        blocks = [Block(name=n, modules=tuple(_module(k, context, batch) for k in each)) for n, each in groups.items()]
        chosen = target.formats(sorted({k.channels for k in held}), formats, group)
        return cls(runtime=target, formats=chosen, members=list(groups.values()), blocks=blocks, context=context, batch=batch)

    def table(self, damage: np.ndarray | None = None, rest: np.ndarray | None = None) -> Table:
        """Return bytes and damages of every block in every format; without damages they are zero."""
        size = np.array([[sum(self._bytes(k, f) for k in each) for f in self.formats] for each in self.members], dtype=np.int64)
        damage = np.zeros(size.shape) if damage is None else damage
        rest = np.zeros((*size.shape, 0)) if rest is None else rest
        return Table(
            blocks=self.blocks,
            formats=tuple(f.name for f in self.formats),
            size=size,
            damage=damage,
            error=np.linalg.norm(rest, axis=-1),
            rest=rest,
            fixed=0,
            family="cache",
            runtime=self.runtime.name,
            method="",
        )

    def _bytes(self, k: Kept, form: CacheFormat) -> int:
        return self.batch * k.tokens(self.context) * k.heads * (k.channels // form.group) * form.bytes

    def by_layer(self, chosen: np.ndarray) -> dict[int, tuple[CacheFormat, CacheFormat]]:
        """Return the formats of keys and values of every layer of a choice, ``(K,)``."""
        found = {(k.layer, k.part): self.formats[j] for each, j in zip(self.members, chosen, strict=True) for k in each}
        return {layer: (found[layer, 0], found[layer, 1]) for layer, part in found if part == 0}

    def limit(self, bits: float | None, budget: str | None) -> int:
        """Return the bytes that the cache may take; a budget below the smallest plan is refused."""
        if (bits is None) == (budget is None):
            raise InvalidInput("Give either bits or a budget.", "", "For example bits=4, or budget='1.5 GiB'.")
        numel = sum(b.numel for b in self.blocks)
        if bits is not None:
            check_bits(bits)
            limit = int(bits * numel // 8)
        else:
            wanted = parse_budget(str(budget), default="bytes")
            if wanted.unit != "bytes" or wanted.relative:
                raise InvalidInput(
                    f"A budget of {budget} is not in bytes.", "The size of the cache is planned.", "Write '1.5 GiB'."
                )
            limit = int(wanted.amount)
        least = int(self.table().smallest.sum())
        if limit < least:
            raise InfeasibleBudget(
                f"{limit} bytes ({8 * limit / numel:.3f} bits per number) are too few at {self.context} tokens x {self.batch}.",
                f"The smallest cache takes {least} bytes ({8 * least / numel:.4f} bits per number).",
                f"Raise the budget to that (--bits {math.ceil(8e4 * least / numel) / 1e4:g}, or --budget {least}), "
                "or plan for a shorter context.",
            )
        return limit


def _module(k: Kept, context: int, batch: int) -> Module:
    return Module(name=f"{k.name}.{PARTS[k.part]}", d_in=batch * k.tokens(context), d_out=k.heads * k.channels)


def plan_cache(
    model: nn.Module,
    data: CalibrationSet,
    check: CalibrationSet | None = None,
    *,
    context: int,
    batch: int = 1,
    bits: float | None = None,
    budget: str | None = None,
    rule: str = "choices",
    runtime: str = "transformers",
    formats: Sequence[str] | None = None,
    group: int | None = None,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> Plan:
    """A plan that gives keys and values formats, with the least total damage within a budget of bytes.

    Args:
        model: A decoder, left as it was.
        data: Calibration tokens; the longer the windows, the more of the cache is read.
        check: Held-out tokens; without them nothing is checked.
        context: Tokens of a sequence, prompt and answer, for which bytes are counted.
        batch: Sequences at a time.
        bits: Mean bits per cached number, scales counted.
        budget: Bytes of the whole cache instead, such as ``"1.5 GiB"``.
        rule: ``choices`` (the exact program), ``uniform`` or ``ends`` (more for the first and last layers).
        runtime: ``transformers``, ``vllm`` or ``llama.cpp``: its formats, and what it tells apart.
        formats: Names of some of the runtime's formats.
        group: Channels that share a scale, for transformers; by default 64, 32 or 16.
        draws: Labels drawn for every token.
        seed: Of these draws.
        batch_size: Sequences per forward.
        progress: Called with (steps done, steps).

    Raises:
        InfeasibleBudget: A budget below the smallest cache; said before anything is measured.
        CoverageError: A streamed model.
        InvalidInput: A model without a cache, a context beyond the model's, or formats that the runtime has not.
    """
    if mapped(model) is not None:
        what = "The gradients of keys and values run through the whole model, and the weights of a streamed one stay in files."
        raise CoverageError(what, "", "Use --no-stream.")
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} for a cache.", f"There are {', '.join(RULES)}.", "Choose one of those.")
    space = CacheSpace.of(model, context, batch, runtime, formats, group)
    limit = space.limit(bits, budget)
    damage, rest, passes = cache_damage(model, data, space, draws, seed, batch_size, progress)
    table = space.table(damage, rest)
    found = choose(table.damage, table.size, limit)
    choices = {name: BASELINES[name](table, limit) for name in RULES[1:]} | {"choices": found.chosen}
    record, taken = _checked(model, space, table, choices, rule, check, batch_size, progress)
    chosen, k = choices[taken], np.arange(len(space.blocks))
    spent = table.size[k, chosen]
    names = [space.formats[j].name for j in chosen]
    extra: dict[str, Any] = {
        "formats": {m.name: n for b, n in zip(space.blocks, names, strict=True) for m in b.modules},
        "runtime": runtime,
        "context": context,
        "batch": batch,
        "group": group,
        "passes": passes,
        "bits": 8 * int(spent.sum()) / table.numel,
        "predicted": float(table.damage[k, chosen].sum()),
        "predicted_error": table.error_of(chosen),
        "baselines": {n: _total(table, c) for n, c in choices.items() if n != taken},
        "near_ties": _ties(table, found) if taken == "choices" else [],
        **record,
    }
    return Plan(
        kind="cache",
        rule=taken,
        model=describe(model),
        blocks=tuple(PlanBlock.of(b, 8 * s / b.numel, s) for b, s in zip(space.blocks, spent, strict=True)),
        hyperparameters={"bits": bits, "budget": budget, "rule": rule, "draws": draws, "seed": seed, "formats": formats},
        budget={"unit": "bytes", "limit": limit, "spent": int(spent.sum())},
        certificate=found.certificate() if taken == "choices" else {},
        extra=extra,
    )


def _total(table: Table, chosen: np.ndarray) -> dict[str, Any]:
    k = np.arange(len(chosen))
    return {"predicted": float(table.damage[k, chosen].sum()), "spent": int(table.size[k, chosen].sum())}


def _ties(table: Table, found: Any) -> list[dict[str, Any]]:
    names = table.formats
    return [
        {"block": table.blocks[i].name, "chosen": names[found.chosen[i]], "instead": names[j], "excess": e, "noise": n}
        for i, j, e, n in near_ties(found, table.error)[:_TIES]
    ]


def cache_damage(
    model: nn.Module,
    data: CalibrationSet,
    space: CacheSpace,
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Damage of every block in every format, ``(K, m)`` nats per token; sixteen bits cost nothing.

    With it what every sequence adds beside its share, ``(K, m, sequences)``, and the passes.
    """
    where = {(k.layer, k.part): i for i, each in enumerate(space.members) for k in each}
    rows = np.zeros((len(space.members), len(space.formats), data.samples))
    norm, counts = np.zeros(rows.shape[:2]), np.zeros(data.samples)
    tick = Steps(progress, data.samples, "gradients of keys and values")
    held: dict[tuple[int, int], torch.Tensor] = {}

    def listen(layer: int, *states: torch.Tensor) -> Any:
        for part, x in enumerate(states):
            held[layer, part] = x if x.requires_grad else x.requires_grad_(True)
        return states

    with prepared(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for batch in unlabelled(model, data, batch_size):
            held.clear()
            with caching(model, listen):
                logits = logits_of(model, batch)
            places, tensors = list(held), list(held.values())
            gradients = [
                torch.autograd.grad(
                    SampledLoss(1009 * seed + draw)(logits, batch), tensors, retain_graph=draw < draws - 1, allow_unused=True
                )
                for draw in range(draws)
            ]
            along = torch.zeros(draws, len(space.members), len(space.formats), batch.size, dtype=torch.float64)
            for n, place in enumerate(places):
                x, i = tensors[n].detach(), where[place]
                for j, form in enumerate(space.formats):
                    if form.plain:
                        continue
                    delta = rounded(x, form) - x
                    norm[i, j] += float(delta.square().sum())
                    for draw, each in enumerate(gradients):
                        if each[n] is not None:
                            along[draw, i, j] += (each[n] * delta).flatten(1).sum(1).double().cpu()
            rows[:, :, batch.rows] = along.square().mean(0).numpy()
            counts[batch.rows] = (batch.targets != IGNORE).reshape(batch.size, -1).sum(1).cpu().numpy()
            for _ in range(batch.size):
                tick()
    tokens = counts.sum()
    second = rows.sum(-1) / (2 * tokens)
    rest = (rows / 2 - second[..., None] * counts) * (np.sqrt(len(counts) / max(len(counts) - 1, 1)) / tokens)
    return pooled(second, np.linalg.norm(rest, axis=-1), norm)[0], rest, 1.0 + 2.0 * draws


def _checked(
    model: nn.Module,
    space: CacheSpace,
    table: Table,
    choices: Mapping[str, np.ndarray],
    rule: str,
    check: CalibrationSet | None,
    batch_size: int,
    progress: Progress | None,
) -> tuple[dict[str, Any], str]:
    """The record of all choices on held-out text, really rounded, and the one that is taken."""
    if check is None:
        return {}, rule
    say(progress, "plans as a whole")
    dense, measured = DenseOutput(model, check, batch_size), dict[bytes, np.ndarray]()
    for chosen in choices.values():
        if chosen.tobytes() not in measured:
            with caching(model, rounding(space.by_layer(chosen))):
                measured[chosen.tobytes()] = dense.rows(model)
    rows = {n: measured[c.tobytes()] for n, c in choices.items()}
    found = {n: describe_rows(r, None if n == rule else rows[rule]) for n, r in rows.items()}
    for name, row in found.items():
        row["bytes"] = _total(table, choices[name])["spent"]
        row["same"] = name != rule and bool(np.array_equal(choices[name], choices[rule]))
    best = min(found, key=lambda n: (found[n]["kl"], n != rule)) if rule == "choices" else rule
    perplexity = float(describe_rows(dense.rows(model))["perplexity"])
    record = {"data": check.describe(), "dense_perplexity": perplexity, "rows": found, "taken": best}
    record["verdict"] = verdict(rule, best, found)
    return {"check": record, "asked": rule}, best
