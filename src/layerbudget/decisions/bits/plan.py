"""A plan of bits of a model: measure what formats cost, decide, and check the plan as a whole.

The program's certificate is of an additive model. So every plan is put into the model as a whole, and its output is compared
with the dense model's on held-out sequences that decided nothing. Differences between plans are paired by sequence. The plan
*is* the baseline where that is better.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arguments import checked
from ...canonical import digest, to_jsonable
from ...compressors.base import find_quantiser
from ...compressors.formats import BY_MOMENTS, GGUF, PACKED
from ...data.calibration import CalibrationSet
from ...errors import InvalidInput
from ...execution.kept import KeptLayers
from ...execution.processes import is_main, process_group
from ...execution.sharing import SharedParts, from_main
from ...gguf.names import is_written
from ...llama_cpp.imatrix import imatrix_digest
from ...llama_cpp.writer import head_bytes
from ...models.blocks import config_of, text_config
from ...plan import Plan, payload_of
from ...progress import Progress, say
from ...registry import options_of
from ...scores import Scores
from ...sensitivity.sequences import per_token
from ...storage.parts import Parts
from ...storage.writing import check_output
from ...verdicts import CONVENTION, SAME, outcome, plus_minus
from ..formats.baselines import PEER, check_mixes, types_like
from ..formats.limits import Limits
from ..formats.payload import Check, CheckRow
from ..formats.program import formats_of_rules, is_allowed, other_plan, plan_from_table
from ..formats.table import FormatTable
from .apply import request_of
from .blocks import formats_table, in_formats
from .counted import header_bytes
from .payload import BitsPayload
from .sensitivity import DenseOutput, rounding_damage

if TYPE_CHECKING:
    from torch import nn

BESIDE = ("uniform", "mix")
_FAR = 1.5  # a mix of so many times the predicted damage is not rounded with feedback to see whether it is below the plan
_OF_BYTES = tuple(options_of(formats_table))
_OPTIONS = (*_OF_BYTES, *options_of(rounding_damage, without=(*_OF_BYTES, "batch_size", "table", "progress", "finished")))


@checked
def plan_bits(
    source: nn.Module | Scores,
    data: CalibrationSet | None = None,
    check: CalibrationSet | None = None,
    *,
    bits: float | None = None,
    budget: str | float | None = None,
    like: str | None = None,
    forbid: Sequence[str] = (),
    keep: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    rule: str = "exact",
    batch_size: int = 8,
    resume: Path | str | None = None,
    save_scores: Path | str | None = None,
    overwrite: bool = False,
    unwritten: str = "refuse",
    progress: Progress | None = None,
    **options: Any,
) -> Plan:
    """A plan that gives every block a format, with the least total damage within a budget of bytes.

    Args:
        source: A model, which is left as it was; or a record of the damage of every format.
        data: Calibration tokens, where a model is given.
        check: Held-out tokens; without them nothing is checked.
        bits: Mean bits per weight of the blocks, scales and padding counted.
        budget: Bytes of the file instead, such as ``"1.2 GiB"``: all of a GGUF file, the tensors of others.
        like: A mix of llama.cpp instead, such as ``"Q4_K_M"``: its bytes for this model, for a GGUF file.
        forbid: Formats that are not used, or classes of slow ones: ``slow-cpu``, ``slow-gpu``.
        keep: Formats of some matrices, by regular expressions that are searched in their names: ``{"lm_head": "Q8_0"}``.
        tokenizer: The one that goes into the GGUF file: its vocabulary counts.
        rule: ``exact`` (the exact program); others need no program, and without ``check`` and ``save_scores`` only the
            formats that they use are measured: ``uniform`` (one format for all, what is left is spread evenly),
            ``protect-ends`` (a better format for the first and last layers) or, for GGUF, ``mix`` (the mix of llama.cpp that
            ``like`` names, else the best one that fits).
        batch_size: Sequences per forward.
        resume: Folder that keeps what is finished: every layer's damages while they are measured (by one process, of a model
            that is walked layer by layer), then all of them, and every plan's check. Other budgets may use it too.
        save_scores: File that keeps what was measured, for other budgets.
        overwrite: Replace that file.
        unwritten: See :func:`~layerbudget.decisions.bits.blocks.formats_table`.
        progress: Called with (steps done, steps).
        **options: Other options of :func:`~layerbudget.decisions.bits.sensitivity.rounding_damage`.

    Its payload has the format of every matrix, the predicted damage with its error, near ties, what the rules without a
    program would have given at the same budget, and the check.

    Raises:
        InfeasibleBudget: A budget below the smallest plan; said before anything is measured.
    """
    limits = Limits(bits=bits, budget=budget, like=like, forbid=forbid, keep=keep or {})
    if isinstance(source, Scores):
        refuse_measuring(data, check, resume, save_scores, tokenizer, options)
        return plan_from_table(source, limits, rule)
    if data is None:
        raise InvalidInput("A model is planned on calibration tokens.", "", "Pass data.")
    limits.check()
    if save_scores is not None:
        check_output(save_scores, overwrite=overwrite)
    need_sequences(data, check, str(options.get("method", "rtn")))
    options |= {"unwritten": unwritten} | ({} if like is None or "family" in options else {"family": GGUF})
    table = from_main(lambda: empty_table(source, tokenizer, options))
    check_mixes(rule, like, table.family)
    if like is not None and options.get("formats") is None:  # also what the menu leaves out, such as IQ1_S
        options["formats"] = types_like(table, like)
        table = in_formats(table, options["formats"], options.get("group"))
    limits.bytes(limits.restrict(table))
    alone = rule != "exact" and check is None and save_scores is None  # nothing but the rules needs a damage
    if alone:
        options |= {"formats": formats_of_rules(table, limits), "group": None}  # their names have their groups
        table = in_formats(table, options["formats"])
    measuring = {"batch_size": batch_size, **options}
    parts, scores = measured_formats(source, data, check, resume, table, measuring, progress)
    if save_scores is not None and is_main():
        scores.save(save_scores, overwrite=overwrite)
    plan = plan_from_table(scores, limits, rule)
    plan = plan.with_payload(passes=scores.extra["formats"]["passes"])
    if alone:  # the program would have chosen among all formats
        others = {name: row for name, row in payload_of(plan, BitsPayload).baselines.items() if name != "exact"}
        plan = plan.with_payload(baselines=others, curve=[])
    if check is None:
        return plan
    return check_plan(source, plan, scores, data, check, batch_size, parts, progress)


def need_sequences(data: CalibrationSet, check: CalibrationSet | None, method: str) -> None:
    """Refuse texts with too few sequences for the processes of the run; error feedback needs two of the first for each.

    Raises:
        InvalidInput: One of them is too short.
    """
    group = process_group()
    needed = group.size * (2 if find_quantiser(method).statistic == "gram" else 1)
    if group.size > 1 and data.samples < needed:
        raise InvalidInput(
            f"The text has {data.samples} sequences, and {group.size} processes share them.",
            f"{method} needs {needed} or more.",
            "Give more of them (--samples), or use fewer processes.",
        )
    if check is not None and check.samples < group.size:
        raise InvalidInput(
            f"The text that checks the plan has {check.samples} sequences, and {group.size} processes share them.",
            "Every process needs one.",
            "Give more of them (--check), --check 0, or use fewer processes.",
        )


def measured_formats(
    model: nn.Module,
    data: CalibrationSet,
    check: CalibrationSet | None,
    resume: Path | str | None,
    table: FormatTable,
    measuring: Mapping[str, Any],
    progress: Progress | None,
) -> tuple[Parts, Scores]:
    """Return the finished parts of a run, and the damage of every format of the weights, which is one of them.

    Args:
        model: Is left as it was.
        data: Tokens that decide.
        check: Tokens that the plan is checked on, if it is.
        resume: Folder of the parts.
        table: Bytes of all formats, with those of the file's metadata.
        measuring: Arguments of :func:`~layerbudget.decisions.bits.sensitivity.rounding_damage`, which finished parts are of.
        progress: Called with (steps done, steps).
    """
    digests = {"data": data.digest, "check": None if check is None else check.digest}
    if measuring.get("imatrix") is not None:
        digests["imatrix"] = imatrix_digest(measuring["imatrix"])
    parts = SharedParts(resume, {**request_of(model, computing=True), **digests, "options": dict(measuring)})

    kept = None if resume is None else KeptLayers(parts, "damages")

    def measure() -> Any:
        """The damages as they are kept."""
        return to_jsonable(rounding_damage(model, data, table=table, progress=progress, finished=kept, **measuring).to_dict())

    scores = Scores.from_dict(parts.json("damages", measure))
    if kept is not None:
        kept.drop()
    return parts, dataclasses.replace(
        scores, extra={**scores.extra, "formats": {**scores.extra["formats"], "head": table.head}}
    )


def refuse_measuring(*options: Any) -> None:
    """Refuse text and options of measuring beside scores, which were measured."""
    if any(each is not None and each != {} for each in options):
        raise InvalidInput(
            "Scores are planned as they are.", "Text and options of measuring are for a model.", "Leave them out."
        )


def empty_table(model: nn.Module, tokenizer: Any, options: Mapping[str, Any]) -> FormatTable:
    """Return the bytes of all formats before anything is measured, with those of the files' metadata where they are written.

    Raises:
        InvalidInput: An option that neither the table nor the measurement reads.
    """
    for name in (n for n in options if n not in _OPTIONS):
        known = f"Its options: {', '.join(_OPTIONS)}."
        raise InvalidInput(f"The measurement of formats has no option {name}.", known, "Correct the name.")
    table = formats_table(model, **{k: v for k, v in options.items() if k in _OF_BYTES})
    if table.family == PACKED:
        names = np.array(table.formats)
        formats = {block.name: names[has].tolist() for block, has in zip(table.blocks, table.has, strict=True)}
        return dataclasses.replace(table, head=header_bytes(model, table.blocks, formats, table.runtime))
    written = table.llama is not None and is_written(text_config(config_of(model)))
    return dataclasses.replace(table, head=head_bytes(model, tokenizer) if written else 0)


def check_plan(
    model: nn.Module,
    plan: Plan,
    scores: Scores,
    data: CalibrationSet,
    check: CalibrationSet,
    batch_size: int = 8,
    parts: Parts | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Return a plan with the check of it as a whole on held-out tokens, or the baseline that beat it, which then says so."""
    parts, payload = parts or SharedParts(None), payload_of(plan, BitsPayload)
    plans = {plan.rule: plan} | {n: other_plan(plan, scores, n) for n in BESIDE if n in payload.baselines and n != plan.rule}
    dense, method = DenseOutput(model, check, batch_size, progress), payload.method
    peer = plans.get("mix") if method in BY_MOMENTS else None  # that llama-quantize rounds
    if peer is not None and peer is not plan and payload_of(peer, BitsPayload).predicted > _FAR * payload.predicted:
        del plans["mix"]
    formats = {name: payload_of(each, BitsPayload).formats for name, each in plans.items()}
    imatrix = plan.hyperparameters.get("imatrix")
    text, options = (data, {}) if imatrix is None else (None, {"imatrix": imatrix})
    measured: dict[str, np.ndarray] = {}  # plans that are the same are measured once
    dense.heard = peer is not None and text is not None

    def rounded(formats: Mapping[str, str], method: str) -> list[list[float]]:
        """Rows of the text under a plan by a method, or under one of llama-quantize."""
        if method == PEER and text is not None:
            return dense.rows_as_quantised(model, formats, text).tolist()
        return dense.rows_of(model, formats, text, "weighted" if method == PEER else method, **options).tolist()

    def measure(formats: Mapping[str, str], method: str = method) -> np.ndarray:
        key = f"check-{digest([formats, method])}"
        if key not in measured:
            say(progress, f"the check: plan {len(measured) + 1} of {len(plans) + (peer is not None)} at most")
            measured[key] = np.array(parts.json(key, lambda: rounded(formats, method)), dtype=np.float64)
        return measured[key]

    rows = {name: measure(each) for name, each in formats.items()}
    if peer is not None:
        rows[PEER] = measure(payload_of(peer, BitsPayload).formats, PEER)
    sized = plans if peer is None else plans | {"mix": peer}
    excluded = [n for n, each in sized.items() if not is_allowed(each, scores)]
    spent = {n: int((payload.baselines[n] if n in excluded else p.budget)["spent"]) for n, p in sized.items()}
    spent |= {PEER: spent["mix"]} if peer is not None else {}
    same = [n for n, each in formats.items() if each == payload.formats]
    record = check_record(dense, plan.rule, rows, spent, same, excluded)
    chosen = plans[record.taken]
    kept = {"passes": payload.passes, "curve": payload.curve, "check": record, "asked": plan.rule}
    return chosen.with_payload(**kept)


def check_record(
    dense: DenseOutput,
    rule: str,
    rows: Mapping[str, np.ndarray],
    spent: Mapping[str, int],
    same: Sequence[str],
    excluded: Sequence[str] = (),
) -> Check:
    """Return the record of whole plans on held-out text: ``rows``, the one that is ``taken``, and the ``verdict``.

    The differences of the rows are from the one that is taken, paired by sequences.

    Args:
        dense: The dense model's output on the text.
        rule: The rule that was asked for; ``exact`` gives way to a better one.
        rows: Of every rule's plan, as :meth:`DenseOutput.rows` gives them.
        spent: Its bytes.
        same: Rules whose plan is the one of ``rule``.
        excluded: Rules whose plans are compared and never taken: they have formats that were not to be used.
    """
    kl = {n: per_token(r[:, 0], r[:, 1])[0] for n, r in rows.items()}
    best = min((n for n in kl if n not in (PEER, *excluded)), key=lambda n: (kl[n], n != rule)) if rule == "exact" else rule
    table = {n: describe_rows(r, None if n == best else rows[best]) for n, r in rows.items()}
    for name, row in table.items():
        row |= {"bytes": spent[name], "same": name != rule and name in same}
    perplexity = float(describe_rows(dense.own)["perplexity"])
    typed = {name: CheckRow(**row) for name, row in table.items()}
    return Check(data=dense.text, dense_perplexity=perplexity, rows=typed, taken=best, verdict=verdict(rule, best, table))


def describe_rows(rows: np.ndarray, reference: np.ndarray | None = None) -> dict[str, Any]:
    """KL per token and perplexity with standard errors; against another plan's rows the paired difference of KL."""
    kl, error = per_token(rows[:, 0], rows[:, 1])
    loss, spread = per_token(rows[:, 2], rows[:, 3])
    row = {"kl": kl, "kl_error": error, "perplexity": math.exp(loss), "perplexity_error": math.exp(loss) * spread}
    if reference is not None:
        difference, difference_error = per_token(rows[:, 0] - reference[:, 0], rows[:, 1])
        row |= {"difference": difference, "difference_error": difference_error}
    return row


def verdict(rule: str, best: str, table: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence on the check: the KL of the plan and of the baselines, or which baseline is better."""
    kl = table[best]["kl"]
    words = {"mix": "the mix", "uniform-cache": "one format for the whole cache", PEER: "the mix by llama-quantize"}
    parts = [f"{words.get(n, n)} {r['kl']:.4g} ({_difference(r)})" for n, r in table.items() if n != best and not r["same"]]
    parts[-1:] = [f"{each} ({CONVENTION})" if any("+-" in part for part in parts) else each for each in parts[-1:]]
    if best != rule:
        others = ", ".join(parts)
        taken = words.get(best, best)
        sentence = f"{taken[0].upper()}{taken[1:]} has the lowest KL on held-out text, {kl:.4g} nats per token"
        return f"{sentence}; beside it {others}. The plan is {taken}."
    clauses = [f"beside it {', '.join(parts)}"] if parts else []
    if alike := [words.get(n, n) for n, r in table.items() if r["same"]]:
        clauses.append(f"{' and '.join(alike)} {'choose' if len(alike) > 1 else 'chooses'} the same formats")
    return f"Measured on held-out text: KL {kl:.4g} nats per token; {'; '.join(clauses)}."


def _difference(row: Mapping[str, Any]) -> str:
    """The paired difference of KL from the plan that is taken, with two standard errors, which one sequence does not have."""
    if not (error := row["difference_error"]):
        return f"difference {row['difference']:+.2g}"
    level = outcome(row["difference"], error=error, small=SAME * row["kl"]) == "level"
    return f"difference {row['difference']:+.2g}{plus_minus(error)}{', level' if level else ''}"
