"""The honest check of plans of formats: all matrices at once, on text that decided nothing, beside what needs no program.

The program's certificate is of an additive model. Here every plan is put into the model as a whole and its output compared with
the dense model's on held-out sequences; differences between plans are paired by sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError
from ...execution.divergence import next_tokens, sequence_losses
from ...execution.loss import IGNORE, pad_right, unlabelled
from ...execution.modes import inference
from ...models.blocks import describe
from ...models.offload import mapped
from ...models.provenance import computation, versions
from ...plan import Plan
from ...progress import Progress, say
from ...records import Block, digest, to_jsonable
from ...scores import Scores
from ...sensitivity.directional.originals import Originals
from ...storage.parts import Parts
from .items import modules_by_name
from .plan import BASELINES, check_bits, plan_bits, plan_of_formats
from .rounding_bench import mean_and_error
from .rounding_steps import stepped
from .sensitivity import check_budget, rounding_damage
from .storing import store

BESIDE = ("uniform", "mix")


class Joint:
    """The dense model's output on some text, and how far another one's is from it.

    Args:
        model: The dense model.
        data: The text.
        batch_size: Sequences per forward.
    """

    def __init__(self, model: nn.Module, data: CalibrationSet, batch_size: int = 8) -> None:
        self.data, self.batch_size = cast(CalibrationSet, pad_right(data)), batch_size
        self.device = next(model.parameters()).device
        self.compared = [b.targets != IGNORE for b in unlabelled(model, data, batch_size)]
        with inference(model):
            self.clean = [torch.log_softmax(model(**b).logits.float(), dim=-1) for b in self._batches()]

    def _batches(self) -> Any:
        return self.data.batches(self.batch_size, self.device)

    def rows(self, model: nn.Module) -> np.ndarray:
        """``(sequences, 4)``: summed KL in nats, compared tokens, summed next-token loss, predicted tokens.

        Where the data has answers, both are of the answers only, as damages are.
        """
        out = []
        with inference(model):
            for batch, clean, compared in zip(self._batches(), self.clean, self.compared, strict=True):
                logits = model(**batch).logits.float()
                each = (clean.exp() * (clean - torch.log_softmax(logits, dim=-1))).sum(-1)
                mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                target = next_tokens(batch["input_ids"], mask)
                if self.data.labels is not None:
                    target = target.masked_fill(~compared[:, :-1], IGNORE)
                losses = sequence_losses(logits[:, :-1], target)
                columns = (each * compared).double().sum(1), compared.sum(1), losses, (target != IGNORE).sum(1)
                out.append(torch.stack([c.double() for c in columns], 1).cpu().numpy())
        return np.concatenate(out)

    def of_plan(
        self, model: nn.Module, formats: Mapping[str, str], data: CalibrationSet | None, method: str, **own: Any
    ) -> np.ndarray:
        """The same with a plan's formats in the model, which is afterwards as it was."""
        held = Originals(model, [Block(name="all", modules=tuple(modules_by_name(model, formats).values()))])
        try:
            store(model, formats, data, method=method, batch_size=self.batch_size, **own)
            return self.rows(model)
        finally:
            held.restore()


def describe_rows(rows: np.ndarray, beside: np.ndarray | None = None) -> dict[str, Any]:
    """KL per token and perplexity with standard errors; against another plan's rows the paired difference of KL."""
    kl, error = mean_and_error(rows[:, :2])
    loss, spread = mean_and_error(rows[:, 2:])
    found = {"kl": kl, "kl_error": error, "perplexity": math.exp(loss), "perplexity_error": math.exp(loss) * spread}
    if beside is not None:
        difference, own = mean_and_error(np.stack((rows[:, 0] - beside[:, 0], rows[:, 1]), 1))
        found |= {"difference": difference, "difference_error": own}
    return found


def plan_formats(
    model: nn.Module,
    data: CalibrationSet,
    check: CalibrationSet | None = None,
    *,
    bits: float | None = None,
    budget: str | None = None,
    rule: str = "choices",
    batch_size: int = 8,
    progress: Progress | None = None,
    scores: Scores | None = None,
    resume: Path | str | None = None,
    steps: int = 0,
    **options: Any,
) -> tuple[Plan, Scores]:
    """Measure formats on a model, plan, and check the plan as a whole: the plan *is* the baseline where that is better.

    Args:
        model: Left as it was.
        data: Calibration tokens.
        check: Held-out tokens; without them nothing is checked.
        bits: See :func:`~layerbudget.decisions.bits.plan.plan_bits`.
        budget: See there.
        rule: See there.
        batch_size: Sequences per forward.
        progress: Called with (steps done, steps).
        scores: What was measured before, with the same options.
        resume: Folder that keeps the damages and every plan's check as they are finished; other budgets may use it too.
        steps: Steps from there at the quantised point (:mod:`layerbudget.decisions.bits.rounding_steps`).
        **options: Of :func:`~layerbudget.decisions.bits.sensitivity.rounding_damage`.

    Returns:
        The plan (``extra["check"]`` has joint KL and perplexity of plan and baselines) and the record of the damages.

    Raises:
        InfeasibleBudget: A budget below the smallest plan; said before anything is measured.
        CoverageError: A check of a streamed model, whose weights stay in their files.
    """
    if check is not None and mapped(model) is not None:
        raise CoverageError(
            "The check puts whole plans into the model, and the weights of a streamed model stay in their files.", "",
            "Leave the check out (--check 0), or use --no-stream.",
        )  # fmt: skip
    check_bits(bits)
    if scores is None:
        check_budget(model, bits=bits, budget=budget, **options)
    parts = _parts(resume, model, data, check, {"batch_size": batch_size, **options})
    if scores is None:

        def measure() -> Any:
            found = rounding_damage(model, data, batch_size=batch_size, progress=progress, **options)
            return to_jsonable(found.to_dict())

        scores = Scores.from_dict(parts.json("damages", measure))
    plan = plan_bits(scores, bits=bits, budget=budget, rule=rule)
    if steps:
        draws = {k: options[k] for k in ("draws", "seed") if k in options}
        plan = stepped(model, data, scores, plan, steps=steps, batch_size=batch_size, kept=parts, progress=progress, **draws)
    say(progress, "plans as a whole" if check is not None else "")
    return (plan if check is None else checked(model, plan, scores, data, check, batch_size, parts)), scores


def _parts(
    folder: Path | str | None, model: nn.Module, data: CalibrationSet, check: CalibrationSet | None, options: Mapping[str, Any]
) -> Parts:
    """What is kept of a run: everything but the budget decides whose it is."""
    if folder is None:
        return Parts(None)
    lies = mapped(model)
    told = {
        "model": describe(model)["digest"], "data": data.digest, "check": check.digest if check is not None else None,
        "options": dict(options), "versions": versions(), "computation": computation(model),
        "streamed": None if lies is None else str(lies.dtype),
    }  # fmt: skip
    return Parts(folder, told)


def checked(
    model: nn.Module, plan: Plan, scores: Scores, data: CalibrationSet, check: CalibrationSet, batch_size: int = 8,
    parts: Parts | None = None,
) -> Plan:  # fmt: skip
    """The plan with its joint check, or the baseline that beat it, which then says so."""
    plans = {plan.rule: plan} | {n: plan_of_formats(plan, scores, n) for n in BESIDE if n in BASELINES and n != plan.rule}
    joint, method = Joint(model, check, batch_size), str(plan.extra["method"])
    kept = parts or Parts(None)

    def rows_of(formats: Mapping[str, str]) -> np.ndarray:
        found = kept.json(f"check-{digest(formats)}", lambda: joint.of_plan(model, formats, data, method).tolist())
        return np.array(found, dtype=np.float64)

    distinct = {digest(p.extra["formats"]): p.extra["formats"] for p in plans.values()}
    measured = {key: rows_of(formats) for key, formats in distinct.items()}
    rows = {n: measured[digest(p.extra["formats"])] for n, p in plans.items()}
    table = {n: describe_rows(r, None if n == plan.rule else rows[plan.rule]) for n, r in rows.items()}
    for name, row in table.items():
        row["bytes"] = int(plans[name].budget["spent"])
        row["same"] = name != plan.rule and plans[name].extra["formats"] == plan.extra["formats"]
    best = min(table, key=lambda n: table[n]["kl"]) if plan.rule == "choices" else plan.rule
    record = {"data": check.describe(), "dense_perplexity": _dense(model, joint), "rows": table, "taken": best}
    record["verdict"] = _verdict(plan.rule, best, table)
    chosen = plans[best]
    return dataclasses.replace(chosen, extra={**chosen.extra, "check": record, "asked": plan.rule})


def _dense(model: nn.Module, joint: Joint) -> float:
    return float(describe_rows(joint.rows(model))["perplexity"])


def _verdict(rule: str, best: str, table: Mapping[str, Mapping[str, Any]]) -> str:
    """What the check found, in a sentence."""
    mine = table[rule]["kl"]
    if best != rule:
        row = table[best]
        return (
            f"{best} is better here: KL {row['kl']:.4g} against {mine:.4g} of {rule} on held-out text "
            f"(difference {row['difference']:+.2g} +- {row['difference_error']:.1g}). The plan is {best}."
        )
    parts = [
        f"{n} {r['kl']:.4g} ({r['difference']:+.2g} +- {r['difference_error']:.1g} nats, {r['bytes']} bytes)"
        for n, r in table.items()
        if n != rule and not r["same"]
    ]
    alike = [n for n, r in table.items() if r["same"]]
    beside = [f"beside it {', '.join(parts)}"] if parts else []
    beside += [f"{' and '.join(alike)} {'choose' if len(alike) > 1 else 'chooses'} the same formats"] if alike else []
    return f"On held-out text KL {mine:.4g} with {table[rule]['bytes']} bytes; {'; '.join(beside)}."
