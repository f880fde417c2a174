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
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arguments import checked
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.processes import process_group
from ...gguf.architectures import ARCHITECTURES, computes_windows
from ...models.blocks import config_of, describe
from ...models.memory import check_positions
from ...plan import Plan
from ...progress import Progress, say
from ..bits import DenseOutput, check_record
from ..formats.baselines import BASELINES
from ..formats.limits import Limits
from ..formats.program import FormatDecision, plan_blocks
from .cache import caching, kept, rounding
from .formats import RULES
from .payload import CachePayload
from .sensitivity import cache_damage
from .space import CacheSpace

if TYPE_CHECKING:
    from torch import nn


def cache_space(
    model: nn.Module,
    context: int,
    batch: int = 1,
    runtime: str = "transformers",
    formats: Sequence[str] | None = None,
    group: int | None = None,
) -> CacheSpace:
    """Alternatives of a model's cache; arguments and errors as of :func:`plan_cache`."""
    config = config_of(model)
    text = config.get_text_config(decoder=True)
    check_context(context, batch, getattr(text, "max_position_embeddings", None))
    if runtime != "transformers" and getattr(config, "kv_lora_rank", None):
        what = f"{runtime} keeps one latent vector per token of this model, transformers its keys and values."
        raise InvalidInput(what, "", "Plan for transformers (--runtime transformers).")
    kept_states = kept(model)
    if runtime == "llama.cpp" and not computes_windows(text):
        kept_states = [dataclasses.replace(k, window=None) for k in kept_states]
    if runtime == "llama.cpp" and (known := ARCHITECTURES.get(text.model_type)) and known.permuted:
        kept_states = [dataclasses.replace(k, interleaved=True) for k in kept_states]
    return CacheSpace.of(kept_states, context, batch, runtime, formats, group)


def check_context(context: int, batch: int, longest: int | None) -> None:
    """Refuse a context beyond what a model reads."""
    if context < 1 or batch < 1:
        raise InvalidInput(f"context is {context} and batch {batch}.", "Both are 1 or more.", "Choose them so.")
    check_positions(context, longest or 0)


@checked
def plan_cache(
    model: nn.Module,
    data: CalibrationSet,
    check: CalibrationSet | None = None,
    *,
    context: int,
    batch: int = 1,
    bits: float | None = None,
    budget: str | float | None = None,
    rule: str = "exact",
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
        rule: ``exact`` (the exact program), ``uniform`` or ``protect-ends`` (more for the first and last layers).
        runtime: ``transformers``, ``vllm`` or ``llama.cpp``: its formats, and what it tells apart.
        formats: Names of some of the runtime's formats.
        group: Channels that share a scale, for transformers; by default 64, 32 or 16.
        draws: Labels drawn for every token.
        seed: Of these draws.
        batch_size: Sequences per forward.
        progress: Called with (steps done, steps).

    Raises:
        InfeasibleBudget: A budget below the smallest cache; said before anything is measured.
        CoverageError: A streamed model whose layers do not run alone.
        InvalidInput: A model without a cache, a context beyond the model's, formats that the runtime has not, or a text with
            fewer sequences than there are processes.
    """
    if rule not in RULES:
        raise InvalidInput(f"There is no rule {rule!r} for a cache.", f"There are {', '.join(RULES)}.", "Choose one of those.")
    if draws < 1:
        raise InvalidInput(f"draws is {draws}.", "Labels are drawn 1 time or more.", "Use draws=4.")
    space, limits = cache_space(model, context, batch, runtime, formats, group), Limits(bits=bits, budget=budget)
    limits.check(("bits", "budget"))
    limit = limits.bytes(space.table())
    process_group().check_shares([data.samples])
    if check is not None:
        process_group().check_shares([check.samples], option="--check")
    damage, rest, passes = cache_damage(model, data, space, draws, seed, batch_size, progress)
    table = space.table(damage, rest)
    decision = FormatDecision.of(table, limit, {name: BASELINES[name](table, limit) for name in RULES[1:]})
    record, taken = _checked(model, space, decision, rule, check, batch_size, progress)
    chosen = decision.choices[taken]
    return Plan(
        kind="cache",
        rule=taken,
        model=describe(model),
        blocks=plan_blocks(table, chosen),
        hyperparameters={"bits": bits, "budget": budget, "rule": rule, "draws": draws, "seed": seed, "formats": formats},
        budget={"unit": "bytes", "limit": limit, "spent": decision.totals[taken]["spent"]},
        certificate=decision.certificate(taken),
        payload=CachePayload(
            formats=table.formats_of(chosen),
            passes=passes,
            **space.terms(group),
            **decision.record(taken),
            **record,
        ),
    )


def _checked(
    model: nn.Module,
    space: CacheSpace,
    decision: FormatDecision,
    rule: str,
    check: CalibrationSet | None,
    batch_size: int,
    progress: Progress | None,
) -> tuple[dict[str, Any], str]:
    """The record of all choices on held-out text, really rounded, and the rule that is taken."""
    if check is None:
        return {}, rule
    dense = DenseOutput(model, check, batch_size, progress)
    measured = {chosen.tobytes(): chosen for chosen in decision.choices.values()}  # plans that are the same are run once
    say(progress, f"the check: {len(measured)} plans")
    contexts = [partial(caching, model, rounding(space.by_layer(chosen))) for chosen in measured.values()]
    found = dict(zip(measured, dense.rows_within(model, {}, contexts), strict=True))
    rows = {n: found[c.tobytes()] for n, c in decision.choices.items()}
    spent = {n: t["spent"] for n, t in decision.totals.items()}
    same = [n for n, c in decision.choices.items() if np.array_equal(c, decision.choices[rule])]
    record = check_record(dense, rule, rows, spent, same)
    return {"check": record, "asked": rule}, record.taken
