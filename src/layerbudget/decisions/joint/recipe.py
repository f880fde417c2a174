"""A recipe: a format for every matrix and a rank for every adapter, under one limit in bytes; and the base to train on.

From two records of one model: what every format costs (``plan bits --save-scores``) and what every further rank is worth
(``score --estimator rank-gain --by linear``). Damage is the KL from the dense model in nats per token. A rank's worth is half
of its squared singular value in the whitened gradient, the fall of the quadratic model of the loss, less what noise alone gives
it. That model has no floor: where all ranks together would gain more than the loss itself (or than a first run showed), all of
them are scaled down to that. ``exchange`` says what a nat of gain counts. Zeros are no part of it:
packed integers store a zero in as many bits as any other weight, so that they free no bytes there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ...compressors.base import find_quantiser
from ...errors import CoverageError, InfeasibleBudget, InvalidInput, ModelMismatch, UnknownUnit
from ...plan import Plan, PlanBlock
from ...planning.capacity import Terms, smallest_sides
from ...planning.costs import parse_budget, rank_parameters
from ...records import to_jsonable
from ...scores import Scores
from ...solvers.inputs import number
from ...solvers.mixed import mix_recipe
from ...verdicts import nats
from ..bits.program import extra_of, formats_of_plan, plan_blocks
from ..bits.table import Table
from ..ranks.plan import increments_of

if TYPE_CHECKING:
    from torch import nn

KIND = "recipe"
_WRITTEN = 4.0  # bytes of a parameter: adapters are trained and written in float32


def plan_recipe(
    ranks: Scores,
    formats: Scores,
    *,
    budget: str | float,
    min_capacity: ArrayLike = 0,
    max_capacity: ArrayLike | None = None,
    multiple: int = 1,
    exchange: float = 1.0,
    gain: float | None = None,
    damping: float | None = None,
) -> Plan:
    """A plan of bits and ranks together: the model's file and its adapter within one limit.

    Args:
        ranks: Scores of ``rank-gain``, by linear.
        formats: A record of the damage of every format, of the same model.
        budget: Bytes of all tensors of the file and of the adapter: ``"1.2 GiB"``.
        min_capacity: Rank that every matrix gets.
        max_capacity: Cap per matrix.
        multiple: Ranks are multiples of this.
        exchange: What a nat gained by training is worth in nats of damage.
        gain: Nats per token that all ranks within the caps gain at most: the fall of the held-out loss in a first run; by
            default the loss of the text that was scored.
        damping: Which row of the scores.

    Values are bits per weight, counts bytes of the base; ``extra`` is that of a plan of bits and has the ``adapter``.
    """
    mine, theirs = ranks.model.get("digest"), formats.model.get("digest")
    if mine and theirs and mine != theirs:
        raise ModelMismatch(
            f"The ranks were scored on {ranks.model.get('id')} ({mine}), the formats on {formats.model.get('id')} ({theirs}).",
            "Both belong to one model.",
            "Score both on the model that is to be trained.",
        )
    wanted = parse_budget(budget, default="bytes")
    if wanted.unit != "bytes" or wanted.relative:
        raise UnknownUnit(f"A limit of {budget} is not in bytes.", "File and adapter are planned.", "Write '1.2 GiB'.")
    table, limit = Table.of(formats), int(wanted.amount)
    cost = (rank_parameters(ranks.blocks) * _WRITTEN).astype(np.int64)
    sides = smallest_sides(ranks.blocks)
    high = sides if max_capacity is None else np.minimum(sides, max_capacity)
    low = np.minimum(np.broadcast_to(np.asarray(min_capacity), sides.shape), sides)
    least = int(table.smallest.sum()) + table.fixed + int((cost * low).sum())
    if limit < least:
        raise InfeasibleBudget(
            f"{limit:,} bytes for file and adapter are too few.",
            f"The smallest recipe takes {least:,} bytes, {table.fixed:,} of them what no plan changes.",
            "Raise the limit, lower min_capacity, or allow smaller formats.",
        )
    worth, most = gains_of(ranks, damping), ranks.extra.get("loss") if gain is None else gain
    total = sum(float(row[: int(top)].sum()) for row, top in zip(worth, high, strict=True))
    scale = 1.0 if most is None or total <= number(most, "gain") else most / total
    worth = [scale * row for row in worth]
    found = mix_recipe(
        table.damage, table.size, worth, cost, limit - table.fixed, lower=low, upper=high, multiple=multiple, exchange=exchange
    )
    hyper: dict[str, Any] = {"budget": budget, "min_capacity": min_capacity, "max_capacity": max_capacity, "multiple": multiple}
    hyper |= {"exchange": exchange, "gain": gain, "damping": damping, "bytes_per_parameter": _WRITTEN}
    blocks, adapter = plan_blocks(table, found.chosen), int((cost * found.ranks).sum())
    own = [PlanBlock.of(b, float(r), int(r)).to_dict() for b, r in zip(ranks.blocks, found.ranks, strict=True)]
    base = sum(b.count for b in blocks)
    extra = {
        **extra_of(table, found.chosen),
        "bits": 8 * base / table.numel,
        "predicted": found.damage,
        "baselines": {},
        "near_ties": [],
        "adapter": {
            "blocks": [{**b, "modules": list(b["modules"])} for b in own],
            "bytes": adapter,
            "gain": found.gain,
            "scale": scale,
            "parameters": int((rank_parameters(ranks.blocks) * found.ranks).sum()),
            "scores": ranks.digest,
        },
    }
    base += table.fixed
    return Plan(
        kind=KIND,
        rule="choices",
        model=dict(formats.model),
        blocks=blocks,
        hyperparameters=to_jsonable({**hyper, "method": table.method}),
        budget={"unit": "bytes", "limit": limit, "spent": base + adapter, "base": base, "adapter": adapter},
        certificate=found.choice.certificate(),
        scores_digest=formats.digest,
        extra=extra,
    )


def gains_of(ranks: Scores, damping: float | None = None) -> list[np.ndarray]:
    """Nats of the first, second, ... rank of every block: half the squared singular value less that of noise alone."""
    rows = increments_of(ranks, damping)
    floor = ranks.extra.get("increments_floor")
    noise = rows if floor is None else floor[ranks.index(damping)]
    less = [np.zeros(len(r)) if floor is None else np.asarray(n, dtype=np.float64) for r, n in zip(rows, noise, strict=True)]
    return [0.5 * np.maximum(np.asarray(r, dtype=np.float64) - n, 0.0) for r, n in zip(rows, less, strict=True)]


def split_recipe(plan: Plan) -> tuple[Plan, Plan]:
    """The plan of bits and the plan of ranks of a recipe, each as if it had been made alone."""
    if plan.kind != KIND or "adapter" not in plan.extra:
        raise InvalidInput(f"A plan of kind {plan.kind} is no recipe.", "", "Make one: layerbudget plan joint --formats FILE.")
    adapter, base = plan.extra["adapter"], int(plan.counts.sum())
    extra = {k: v for k, v in plan.extra.items() if k != "adapter"}
    bits = dataclasses.replace(
        plan,
        kind="bits",
        extra=extra,
        budget={"unit": "bytes", "limit": base, "spent": base, "file": plan.budget["base"]},
        hyperparameters={"bits": None, "budget": f"{plan.budget['base']} bytes", "rule": "choices", "recipe": True},
    )
    blocks = tuple(PlanBlock(**{**b, "modules": tuple(b["modules"])}) for b in adapter["blocks"])
    money = {"unit": "bytes", "limit": adapter["bytes"], "spent": adapter["bytes"]}
    held = plan.hyperparameters
    terms = Terms(
        kind="ranks",
        floor=held["min_capacity"],
        cap=held["max_capacity"],
        multiple=held["multiple"],
        bytes_per_parameter=_WRITTEN,
    )
    ranks = dataclasses.replace(
        plan,
        kind="ranks",
        rule="recipe",
        blocks=blocks,
        budget=money,
        certificate={},
        extra={},
        hyperparameters={**terms.record(), "damping": held["damping"]},
        scores_digest=adapter["scores"],
    )
    return bits, ranks


def bits_of(plan: Plan) -> Plan:
    """Return the plan of bits in a recipe; another plan as it is."""
    return split_recipe(plan)[0] if plan.kind == KIND else plan


def sentences(plan: Plan) -> Sequence[str]:
    """Sentences that say what a recipe decides."""
    a, b, e = plan.extra["adapter"], plan.budget, plan.extra
    ranks, scale = np.array([r["count"] for r in a["blocks"]]), a.get("scale", 1.0)
    scaled = "" if scale == 1.0 else f" times {scale:.2g}, which bounds what all ranks together may gain"
    return [
        f"A recipe: {e['bits']:.4f} bits per weight for the base ({b['base']:,} bytes with what stays as it is) and ranks from "
        f"{ranks.min()} to {ranks.max()}, {ranks.mean():.2f} on average ({a['parameters']:,} parameters, {b['adapter']:,} "
        f"bytes): {b['spent']:,} of {b['limit']:,} bytes.",
        f"Rounding costs {nats(e['predicted'], e['predicted_error'])}; training along the best directions of these "
        f"ranks would gain up to {a['gain']:.4g} by the quadratic model{scaled}.",
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """The base that the adapters of a recipe are trained on."""

    bits: Plan
    ranks: Plan
    written: bool  # whether the model comes from a folder that ``apply`` wrote by this recipe
    limit: int  # bytes of file and adapter

    @property
    def identity(self) -> Mapping[str, Any]:
        """Settings that tell results on this base from others."""
        return {"formats": self.bits.digest, "written": self.written}

    def prepare(self, model: nn.Module) -> None:
        """Put a model that was just loaded into the planned formats: its folder may hold them already."""
        from ..bits.apply import round_matrices

        if not self.written:
            round_matrices(model, formats_of_plan(self.bits), method=str(self.bits.extra["method"]))

    def recount(self, adapter_folder: Path) -> dict[str, int]:
        """Bytes of the base as planned, and of the adapter in its file, which must be the planned ones."""
        from ..bits.packed import recount_safetensors

        tensors = recount_safetensors(adapter_folder)
        adapter, ranks = sum(tensors.values()), sum(size for name, size in tensors.items() if ".lora_" in name)
        if ranks != self.ranks.budget["spent"]:
            raise CoverageError(
                f"The ranks take {ranks} bytes in the adapter's file, {self.ranks.budget['spent']} were planned.",
                "",
                "Report this.",
            )
        base = int(self.bits.budget["file"])
        return {"base": base, "adapter": adapter, "spent": base + adapter, "limit": self.limit}


def base_of(plan: Plan, folder: Path | str, model: nn.Module) -> Base:
    """The base of a recipe: the folder from which the model was loaded, or the model, which is still to be rounded."""
    from ...models.blocks import describe
    from ..bits.apply import QuantisationReceipt

    bits, ranks = split_recipe(plan)
    base = Base(bits=bits, ranks=ranks, written=True, limit=int(plan.budget["limit"]))
    receipt = Path(folder) / "receipt.json"
    held = Plan.load(Path(folder) / "plan.json") if (Path(folder) / "plan.json").is_file() and receipt.is_file() else None
    if held is not None and held.kind == "bits":
        if held.digest != bits.digest:
            raise ModelMismatch(
                "This folder was written by another plan than this recipe.",
                "Adapters belong on the base of their recipe.",
                "Write it: layerbudget apply MODEL RECIPE -o BASE.",
            )
        tensors = QuantisationReceipt.load(receipt).tensors
        if tensors != bits.budget["file"]:
            raise CoverageError(f"The base takes {tensors} bytes, {bits.budget['file']} were planned.", "", "Write it again.")
        return base
    bits.validate(describe(model, str(folder)))
    method = str(bits.extra["method"])
    if find_quantiser(method).statistic != "none":
        raise InvalidInput(
            f"The recipe rounds by {method}, which reads text.",
            "Its base is written first.",
            "Write it: layerbudget apply MODEL RECIPE -o BASE, and finetune BASE.",
        )
    return dataclasses.replace(base, written=False)
