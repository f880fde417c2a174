"""A plan of weights and cache under one memory: measure both, decide once, and check the plan as a whole.

The check rounds weights and cache at once and runs held-out text, for the plan and for two that decide one part after the
other: one format for the whole cache beside planned weights, and a mix of llama.cpp (or one format) beside a planned cache.
Where the plan loses much more than was predicted, several formats and mixes are tried.
The plan *is* one of those where that is better.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arguments import checked
from ...budget import rounded_up, unit_of
from ...canonical import digest, dumps, to_jsonable
from ...compressors.base import find_quantiser
from ...compressors.formats import GGUF, RUNTIMES
from ...data.calibration import CalibrationSet
from ...decision import check_kind
from ...errors import InvalidInput, LayerbudgetError
from ...execution.processes import is_main
from ...execution.sharing import from_main
from ...plan import Plan, payload_of
from ...progress import Progress, say
from ...records import Receipt
from ...scores import Scores
from ...sensitivity.sequences import per_token
from ...storage.parts import Parts
from ...storage.writing import check_output
from ..bits import (
    DenseOutput,
    QuantisationReceipt,
    apply_bits,
    check_record,
    empty_table,
    measured_formats,
    need_sequences,
    refuse_measuring,
    write_bits,
)
from ..cache import cache_damage, cache_space, caching, llama_cache, planned_cache, rounding, vllm_options
from ..formats.payload import CachedPayload
from .fitted import Fitted, Pick
from .parts import parts_of
from .program import KIND, Fit, MemoryLimits, measured_for, share_of
from .splits import check_memories, splits_of

if TYPE_CHECKING:
    from torch import nn

    from ..cache import CacheSpace

TRUSTED = 1.5  # times the predicted damage


@checked
def plan_memory(
    source: nn.Module | Scores,
    data: CalibrationSet | None = None,
    check: CalibrationSet | None = None,
    *,
    memory: str | float | None = None,
    context: str | int,
    gpu: str | float | None = None,
    ram: str | float | None = None,
    batch: int = 1,
    runtime: str | None = None,
    cache: Sequence[str] | None = None,
    utilization: float | None = None,
    forbid: Sequence[str] = (),
    keep: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    rule: str = "exact",
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 8,
    resume: Path | str | None = None,
    save_scores: Path | str | None = None,
    overwrite: bool = False,
    unwritten: str = "refuse",
    progress: Progress | None = None,
    **options: Any,
) -> Plan:
    """A plan that gives weights and cache formats, with the least total damage within one memory.

    Args:
        source: A model, which is left as it was; or a record of the damage of every format.
        data: Calibration tokens, where a model is given; the longer the windows, the more of the cache is read.
        check: Held-out tokens; without them nothing is checked.
        memory: Bytes for the file, the cache and the buffers of a forward, such as ``"8 GiB"``.
        context: Tokens of a sequence, prompt and answer, such as ``"32k"``.
        gpu: In place of ``memory``, for llama.cpp: bytes of a card.
        ram: With ``gpu``: bytes of the processor's memory, which takes the first layers, or of a mixture their experts.
            How many layers these are is decided too; see :mod:`layerbudget.decisions.memory.placement`.
        batch: Sequences at a time.
        runtime: ``llama.cpp`` (a GGUF file; one type for all keys, one for all values; a model's default), ``transformers`` or
            ``vllm``. Scores were measured for one.
        cache: Formats of the cache to choose among; by default all of the runtime. Sixteen bits are always among them.
        utilization: Share of the memory that vLLM takes (its ``--gpu-memory-utilization``); .9 by default.
        forbid: Formats of the weights that are not used, or classes of slow ones: ``slow-cpu``, ``slow-gpu``.
        keep: Formats of some matrices, by regular expressions that are searched in their names.
        tokenizer: The one that goes into a GGUF file: its vocabulary counts.
        rule: ``exact`` (the exact program), ``uniform-cache`` or ``mix``.
        draws: Labels drawn for every token.
        seed: Of these draws.
        batch_size: Sequences per forward; the damage of the cache is measured one sequence at a time.
        resume: Folder that keeps both damages and the check as they are finished; other memories may use it too.
        save_scores: File that keeps what was measured, for other memories and contexts.
        overwrite: Replace that file.
        unwritten: See :func:`~layerbudget.decisions.bits.blocks.formats_table`.
        progress: Called with (steps done, steps).
        **options: Other options of :func:`~layerbudget.decisions.bits.sensitivity.rounding_damage`.

    Its payload has what each part got, what more memory would bring, and the curve over memory.

    Raises:
        InfeasibleBudget: A memory below the smallest plan; said before anything is measured.
        CoverageError: A streamed model whose layers do not run alone.
        InvalidInput: A model without a cache, or a context beyond the model's.
    """
    wanted: dict[str, Any] = {"memory": memory, "gpu": gpu, "ram": ram, "context": context, "batch": batch, "cache": cache}
    share = share_of(measured_for(source, runtime or "llama.cpp"), utilization)
    terms = MemoryLimits(**wanted, forbid=forbid, keep=keep or {}, utilization=share)
    terms.check(rule)
    if isinstance(source, Scores):
        refuse_measuring(data, check, resume, save_scores, tokenizer, runtime, options)
        return Fitted.of(source, terms).plan(rule)
    if data is None:
        raise InvalidInput("A model is planned on calibration tokens.", "", "Pass data.")
    if save_scores is not None:
        check_output(save_scores, overwrite=overwrite)
    need_sequences(data, check, str(options.get("method", "rtn")))
    runtime = runtime or "llama.cpp"
    if runtime not in RUNTIMES:
        raise InvalidInput(f"There is no runtime {runtime!r}.", f"There are {', '.join(RUNTIMES)}.", "Choose one of those.")
    options |= {"unwritten": unwritten, "runtime": runtime, "family": RUNTIMES[runtime].family}
    space = _space(source, terms, options)
    table = from_main(lambda: empty_table(source, tokenizer, options))
    fit = Fit.of(table, space, terms)
    if terms.ram is not None:
        check_memories(fit, terms.bytes, terms.beside)
    else:
        fit.limit(terms.bytes, partial(_other_formats, source, terms, tokenizer, options), terms.utilization)
    if save_scores is None:
        check_needed(fit, terms)
    measuring = {"draws": draws, "seed": seed, "batch_size": batch_size, **options}
    parts, scores = measured_formats(source, data, check, resume, table, measuring, progress)
    damage_of_cache = partial(cache_damage, source, data, fit.space, draws, seed, 1, progress)
    scores = _with_cache(scores, fit.space, parts, damage_of_cache)
    if save_scores is not None and is_main():
        scores.save(save_scores, overwrite=overwrite)
    fitted = Fitted.of(scores, terms)
    return fitted.plan(rule) if check is None else _checked(source, fitted, rule, data, check, batch_size, parts, progress)


def _with_cache(scores: Scores, space: CacheSpace, parts: Parts, damage: Callable[[], tuple[Any, Any, float]]) -> Scores:
    """The scores with the space of a cache and the damage of every format, as they are read from a file."""

    def measure() -> Any:
        found, rest, passes = damage()
        return {"damage": found.tolist(), "rest": rest.tolist(), "passes": passes}

    kept = space.record()
    measured = {**kept, **parts.json(f"cache-{digest(kept)}", measure)}
    return Scores.from_dict(to_jsonable(dataclasses.replace(scores, extra={**scores.extra, "cache": measured}).to_dict()))


def _space(model: nn.Module, terms: MemoryLimits, options: Mapping[str, Any]) -> CacheSpace:
    """Bytes of all formats of the cache."""
    return cache_space(model, terms.tokens, terms.batch, str(options["runtime"]), terms.cache)


def check_needed(fit: Fit, terms: MemoryLimits) -> None:
    """Refuse a memory in which everything fits in 16 bits, which no plan can better.

    Raises:
        InvalidInput: It does.
    """
    if not fit.weights.has[:, -1].all() or terms.keep:
        return
    needed = int(fit.weights.size[:, -1].sum() + fit.cache.size[:, -1].sum()) + fit.beside
    if terms.ram is not None:
        if any(card <= terms.bytes and beside <= terms.beside for card, beside in (split.most for split in splits_of(fit))):
            what = "Everything fits in 16 bits, with some layers or their experts at the processor. There is nothing to plan."
            raise InvalidInput(what, "A plan is needed with less memory, or at a longer context.", "Run the model as it is.")
    elif needed <= terms.bytes:
        unit, name = unit_of(needed)
        raise InvalidInput(
            f"Everything fits in 16 bits: {needed:,} bytes of {terms.bytes:,}. There is nothing to plan.",
            f"A plan is needed below {rounded_up(needed / terms.utilization / unit)} {name}, or at a longer context.",
            "Run the model as it is, or give less memory. To measure for other memories, add --save-scores FILE.",
        )


def _other_formats(
    model: nn.Module, terms: MemoryLimits, tokenizer: Any, options: Mapping[str, Any]
) -> Iterator[tuple[str, Fit]]:
    """Decisions with all formats, and with those that need the inputs of a matrix; each with what leads to it."""
    named = [*(["--formats"] if options.get("formats") else []), *([terms.given] if terms.given else [])]
    ways: list[tuple[str, MemoryLimits, dict[str, str | None]]] = []
    if named:
        ways.append((f"leave out {' and '.join(named)}", terms.free, {"formats": None}))
    if options["family"] == GGUF and find_quantiser(str(options.get("method", "rtn"))).statistic == "none":
        ways.append(("take --method weighted, which has smaller formats", terms, {"method": "weighted"}))
    for words, freed, changed in ways:
        with contextlib.suppress(LayerbudgetError):
            others = {**options, **changed}
            yield words, Fit.of(empty_table(model, tokenizer, others), _space(model, freed, others), freed)


def _checked(
    model: nn.Module,
    fitted: Fitted,
    rule: str,
    data: CalibrationSet,
    check: CalibrationSet,
    batch_size: int,
    parts: Parts,
    progress: Progress | None,
) -> Plan:
    """The plan of a rule with the check of all on held-out tokens, or the one that beat it, which then says so."""
    fitted.pick(rule)
    dense = DenseOutput(model, check, batch_size, progress)

    def measured(picks: Mapping[str, Pick]) -> dict[str, np.ndarray]:
        """Rows of some choices."""

        def measure() -> Any:
            rows = joint_rows(model, dense, picks, data, fitted.scores.extra["formats"].get("imatrix"))
            return {name: each.tolist() for name, each in rows.items()}

        kept = parts.json(f"check-{digest({n: p.key for n, p in picks.items()})}", measure)
        return {name: np.array(each, dtype=np.float64) for name, each in kept.items()}

    fitted, rows = settled(fitted, measured)
    asked, picks = fitted.pick(rule), fitted.picks
    spent = {n: p.spent for n, p in picks.items()}
    same = [n for n, p in picks.items() if p.same(asked)]
    record = check_record(dense, rule, rows, spent, same)
    return fitted.plan(record.taken).with_payload(check=record, asked=rule)


def settled(
    fitted: Fitted, measured: Callable[[Mapping[str, Pick]], dict[str, np.ndarray]]
) -> tuple[Fitted, dict[str, np.ndarray]]:
    """Return a decision whose plans were measured as a whole, and the rows of the plan of every rule.

    Where the program's plan loses more than ``TRUSTED`` times what was predicted, sums of damages do not tell which plan of
    a rule is best. There several plans of each rule are measured, and the best one stands for it.
    """
    rows = measured(fitted.picks)

    def kl(each: np.ndarray) -> float:
        return per_token(each[:, 0], each[:, 1])[0]

    if kl(rows["exact"]) <= TRUSTED * fitted.picks["exact"].totals["predicted"]:
        return fitted, rows
    further = {f"{rule}, {pick.name}": (rule, pick) for rule, picks in fitted.near.items() for pick in picks}
    picks = dict(fitted.picks)
    for name, each in measured({name: pick for name, (_, pick) in further.items()}).items() if further else ():
        rule, pick = further[name]
        if kl(each) < kl(rows[rule]):
            rows[rule], picks[rule] = each, pick
    return dataclasses.replace(fitted, picks=picks), rows


def joint_rows(
    model: nn.Module,
    dense: DenseOutput,
    picks: Mapping[str, Pick],
    data: CalibrationSet,
    imatrix: str | None = None,
) -> dict[str, np.ndarray]:
    """Rows of several choices, as :meth:`DenseOutput.rows` gives them, with weights and cache rounded at once.

    Weights that several choices share are rounded once.
    """
    rows_by_name: dict[str, np.ndarray] = {}
    text, options = (data, {}) if imatrix is None else (None, {"imatrix": imatrix})
    by_weights: dict[bytes, list[str]] = {}
    for name, pick in picks.items():
        by_weights.setdefault(pick.fit.apart(pick.chosen)[0].tobytes(), []).append(name)
    for number, names in enumerate(by_weights.values(), 1):
        say(dense.progress, f"the check: weights {number} of {len(by_weights)}")
        fit = picks[names[0]].fit
        weights = fit.weights.formats_of(fit.apart(picks[names[0]].chosen)[0])
        caches = [partial(caching, model, rounding(fit.space.by_layer(fit.apart(picks[n].chosen)[1]))) for n in names]
        rows = dense.rows_within(model, weights, caches, text, fit.weights.method, **options)
        rows_by_name |= dict(zip(names, rows, strict=True))
    return {n: rows_by_name[n] for n in picks}


def apply_memory(
    model: nn.Module,
    plan: Plan,
    data: CalibrationSet | None = None,
    *,
    packed: bool = False,
    residual: int = 128,
    **options: Any,
) -> Receipt:
    """Round a model by a plan of memory, in place; the receipt has an empty cache that rounds as it says.

    ``receipt.cache`` is for ``model.generate(past_key_values=...)``; ``packed`` and ``residual`` are those of
    :func:`~layerbudget.decisions.cache.cache.planned_cache`. Further arguments are those of
    :func:`~layerbudget.decisions.bits.apply.apply_bits`.
    """
    check_kind(plan.kind, (KIND,), "decides no memory")
    parts = parts_of(plan)
    cache = planned_cache(model, parts["cache"], packed=packed, residual=residual)
    rounded = apply_bits(model, parts["bits"], data, **options)
    return dataclasses.replace(rounded, plan_digest=plan.digest, cache=cache)


@checked
def write_memory(
    model: nn.Module, plan: Plan, out_dir: Path | str, data: CalibrationSet | None = None, **options: Any
) -> QuantisationReceipt:
    """Write the weights of a fit as :func:`~layerbudget.decisions.bits.apply.write_bits` does, and beside them the cache.

    ``cache.json`` is the plan of the cache; for llama.cpp and vLLM ``cache.txt`` has the options of their servers.
    """
    check_kind(plan.kind, (KIND,), "decides no memory")
    parts = parts_of(plan)
    return write_bits(model, parts["bits"], out_dir, data, text_files=files_of(plan), **options)


def files_of(plan: Plan) -> dict[str, str]:
    """Return the files beside the weights of a plan of memory, by name: the plan of its cache, and the server's options."""
    cache = parts_of(plan)["cache"]
    options = {"llama.cpp": llama_cache, "vllm": vllm_options}.get(payload_of(cache, CachedPayload).runtime)
    more = {"cache.txt": options(cache)} if options else {}
    return {"cache.json": dumps(cache.to_dict()), **more}
