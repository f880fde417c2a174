"""Fewer experts in a fit: their damage, the bytes of what is left, and the plan of experts in a plan. No torch.

Every layer keeps the same number of experts, because a GGUF file and a configuration have one number for all layers. For
every such number there is a table of bytes: fewer copies of the experts' matrices, and fewer rows of the routers. Rounding is
taken to cost what it costs with all experts: a token passes as many of them, in the same types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InvalidInput
from ...plan import Plan, PlanBlock
from ...records import Block
from ...scores import Scores
from ..bits.table import Table

_TOLD = ("predicted", "predicted_error", "measured", "measured_error", "measured_here")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fewer:
    """One number of experts that all layers keep.

    Attributes:
        left: How many stay in every layer.
        held: What was measured of every number; see :func:`~layerbudget.decisions.fit.removal.measure_removal`.
    """

    left: int
    held: Mapping[str, Any]

    @property
    def own(self) -> Mapping[str, Any]:
        """What was measured of this number."""
        return next(row for row in self.held["numbers"] if row["left"] == self.left)

    @property
    def experts(self) -> int:
        """How many a layer had."""
        return int(self.held["numbers"][0]["left"])

    @property
    def modules(self) -> set[str]:
        """Full names of the experts' matrices."""
        return {name for layer in self.held["layers"] for name in layer["modules"]}

    def block(self, like: Table) -> Table:
        """Return the damage of the removal as a table of one block without matrices, beside a table of formats."""
        return dataclasses.replace(
            like,
            blocks=(Block(name="experts", modules=()),),
            formats=(f"{self.left} of {self.experts}",),
            size=np.zeros((1, 1), dtype=np.int64),
            damage=np.array([[self.own["measured"]]]),
            error=np.array([[self.own["measured_error"]]]),
            rest=np.zeros((1, 1, like.rest.shape[-1])),
            fixed=0,
            stored=(),
        )

    def record(self, weights: Table, chosen: np.ndarray) -> dict[str, Any]:
        """Return what a plan says of its experts; ``bytes`` are those of blocks of experts alone, in a choice of formats."""
        inside = [i for i, b in enumerate(weights.blocks) if {m.name for m in b.modules} <= self.modules]
        numbers = [row["left"] for row in self.held["numbers"]]
        forecast = [
            {"keep": row["left"] / self.experts, "experts": row["left"] * len(self.held["layers"])}
            | {name: row[name] for name in _TOLD[:4]}
            for row in self.held["numbers"][1:]
        ]
        return {
            "left": self.left,
            "of": self.experts,
            "numbers": numbers,
            "bytes": int(weights.size[inside, chosen[inside]].sum()),
            "kept": self.own["kept"],
            "layers": self.held["layers"],
            "crossed": self.held["crossed"],
            "forward_passes": self.held["passes"],
            "forecast": forecast,
            **{name: self.own[name] for name in _TOLD},
        }


def numbers_of(scores: Scores) -> list[Fewer]:
    """Return the numbers of experts that were measured, all of them first.

    Raises:
        InvalidInput: Nothing was measured of experts.
    """
    held = scores.extra.get("experts")
    if not isinstance(held, Mapping):
        what = "These scores say nothing of fewer experts."
        raise InvalidInput(what, "", "Measure them: layerbudget plan fit MODEL --set experts=true --save-scores FILE.")
    return [Fewer(left=int(row["left"]), held=held) for row in held["numbers"]]


def with_experts(table: Table, fewer: Fewer) -> Table:
    """Return the table of a model with fewer experts, in the formats and with the damages of the one with all."""
    own, modules = fewer.own, fewer.modules

    def cut(block: Block) -> Block:
        left = (dataclasses.replace(m, copies=fewer.left) if m.name in modules else m for m in block.modules)
        return dataclasses.replace(block, modules=tuple(left))

    llama = None if table.llama is None else dataclasses.replace(table.llama, experts=fewer.left)
    size = np.where(table.has, np.array(own["size"], dtype=np.int64), 0)
    blocks = tuple(cut(b) for b in table.blocks)
    return dataclasses.replace(table, blocks=blocks, size=size, fixed=own["fixed"], head=own["head"], llama=llama)


def goes(plan: Plan) -> bool:
    """Whether a fit lets experts go."""
    e = plan.extra.get("experts")
    return e is not None and e["left"] < e["of"]


def plan_of_experts(plan: Plan) -> Plan:
    """Return the plan of the experts that stay in a fit, as if it had been made alone."""
    e = plan.extra["experts"]
    left, of, count = e["left"], e["of"], len(e["layers"])
    own = ("kept", "crossed", "forward_passes", "forecast", *_TOLD)
    blocks = (
        PlanBlock(name=o["name"], value=left / of, count=left, numel=of * o["numel"], modules=tuple(o["modules"]))
        for o in e["layers"]
    )
    return Plan(
        kind="kept-experts",
        rule="directional",
        model=plan.model,
        blocks=tuple(blocks),
        budget={"unit": "experts", "limit": left * count, "spent": left * count},
        hyperparameters={"even": True, "fit": True},
        extra={name: e[name] for name in own},
        made_by=plan.made_by,
    )


def sentences(plan: Plan) -> list[str]:
    """A sentence on the experts of a fit; none where they were not asked for."""
    if not (e := plan.extra.get("experts")):
        return []
    numbers: Sequence[int] = e["numbers"]
    tried = f"{len(numbers)} numbers from {min(numbers)} to {max(numbers)} were tried"
    held = f", in {e['bytes']:,} of the bytes of the weights" if e["bytes"] else ""
    if e["left"] == e["of"]:
        return [f"Experts: all {e['of']} stay in every layer{held} ({tried})."]
    where = "text that did not choose them" if e["crossed"] else "the text that chose them"
    return [
        f"Experts: {e['left']} of {e['of']} stay in every layer{held} ({tried}). The removal of the others costs "
        f"{e['measured']:.4g} +- {e['measured_error']:.2g} nats per token, measured on {where}."
    ]
