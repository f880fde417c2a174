"""The plan: a decision keyed by module name, with its budget, its certificate and its provenance. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self

from .errors import CorruptFile, InvalidInput, ModelMismatch
from .kinds import KINDS, by_name, count_of
from .records import Block, Record, digest
from .row_groups import RowGroups
from .storage import reading
from .storage.schemas import Certificate, Extra, Formats, PlanBudget, RecipeExtra, Structured, StructuredSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanBlock:
    """What one block gets.

    Attributes:
        name: Block name as in the model (``model.layers.3`` or a Linear's full name).
        value: Sparsity in [0, 1], or the continuous number of experts or ranks.
        count: Pruned parameters (sparsity), experts, or rank of every module of the block.
        numel: Prunable parameters of the block.
        modules: Full names of the block's weight matrices: what applying the plan touches.
    """

    name: reading.Name
    value: float
    count: reading.Count
    numel: reading.Count
    modules: tuple[reading.Name, ...]

    @classmethod
    def of(cls, block: Block, value: float, count: int) -> PlanBlock:
        """What a block of a model gets."""
        names = tuple(m.name for m in block.modules)
        return cls(name=block.name, value=float(value), count=int(count), numel=block.numel, modules=names)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dict(self.__dict__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """A decision for every block.

    Attributes:
        kind: ``sparsity``, ``experts``, ``ranks`` or ``joint``.
        rule: Name of the rule that made it (``mdl``, ``uniform``, ``owl``, ...).
        model: ``{id, revision, digest}`` of the model that it belongs to.
        blocks: What each block gets, in natural order.
        budget: ``{unit, limit, spent}``.
        hyperparameters: Everything that the rule was given.
        certificate: ``{status, multiplier, gap, kkt_residual, inert[], ...}``; empty for rules without a program.
        scores_digest: Content hash of the scores file, null for rules that use none.
        made_by: The command that made it; empty where Python did.
    """

    what: ClassVar[str] = "plan"
    makers: ClassVar[tuple[str, ...]] = ("plan", "measure")

    kind: str
    rule: str
    model: Mapping[str, Any]
    blocks: tuple[PlanBlock, ...]
    budget: Mapping[str, Any]
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    certificate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scores_digest: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    made_by: str = ""

    def __post_init__(self) -> None:
        KINDS.find(self.kind)
        object.__setattr__(self, "blocks", tuple(self.blocks))
        names = self.names
        if not names or len(set(names)) != len(names):
            raise InvalidInput(
                f"The plan names {len(names)} blocks, {len(set(names))} of them distinct.", "", "Name each once."
            )

    @property
    def names(self) -> list[str]:
        """Block names, in order."""
        return [b.name for b in self.blocks]

    @property
    def values(self) -> np.ndarray:
        """The decision as a vector, shape ``(K,)``."""
        return self._column("value", np.float64)

    @property
    def counts(self) -> np.ndarray:
        """The integer decision as a vector, shape ``(K,)``."""
        return self._column("count", np.int64)

    @property
    def numel(self) -> np.ndarray:
        """Prunable parameters per block, shape ``(K,)``."""
        return self._column("numel", np.int64)

    @property
    def matrices(self) -> np.ndarray:
        """Weight matrices per block, shape ``(K,)``."""
        return np.array([len(b.modules) for b in self.blocks], dtype=np.int64)

    @property
    def pruner(self) -> tuple[str | None, dict[str, Any]]:
        """Method and options of the pruner whose damage decided a plan of sparsities; None where no pruner was measured."""
        if self.kind != "sparsity" or "method" not in self.hyperparameters:
            return None, {}
        return str(self.hyperparameters["method"]), dict(self.hyperparameters.get("own") or self.extra.get("own") or {})

    def _column(self, name: str, dtype: Any) -> np.ndarray:
        return np.array([getattr(b, name) for b in self.blocks], dtype=dtype)

    @property
    def digest(self) -> str:
        """Content hash of the plan, without its command."""
        return digest({k: v for k, v in self.to_dict().items() if k != "made_by"})

    @property
    def sparsity(self) -> float:
        """Pruned parameters over prunable parameters (sparsity plans)."""
        return int(self.counts.sum()) / int(self.numel.sum())

    @property
    def rows(self) -> RowGroups | None:
        """What every group of rows loses, where the plan decides groups of rows; ``count`` is then the sum of a matrix."""
        found = self.extra.get("rows")
        if isinstance(found, Mapping):
            return RowGroups(size=int(found["size"]), counts={}, stored=found)
        return found

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write the file, atomically, and the counts of its groups of rows beside it.

        Raises:
            AlreadyExists: The file exists with another content and ``overwrite`` is false.
            NotFound: The plan decides groups of rows and their counts are not at hand.
        """
        if self.rows is not None:
            self.rows.require()
        written = super().save(path, overwrite=overwrite)
        if self.rows is not None:
            self.rows.save(path)
        return written

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the file, and the counts of its groups of rows.

        Raises:
            NotFound: No such file.
            CorruptFile: Not such a file, or counts that are not its own.
        """
        plan = super().load(path)
        if plan.rows is None:
            return plan
        rows = RowGroups.load(path, plan.rows.stored)
        return dataclasses.replace(plan, extra={**plan.extra, "rows": rows})

    def by_module(self) -> dict[str, PlanBlock]:
        """Map every module's full name to its block's decision."""
        return {m: b for b in self.blocks for m in b.modules}

    def validate(self, model: Mapping[str, Any]) -> None:
        """Refuse a model that the plan was not made for.

        Args:
            model: ``{id, revision, digest, ...}`` of the model at hand (:func:`layerbudget.models.blocks.describe`). Where one
            of the
                two is quantised, the skeletons are compared: a plan made in bfloat16 serves the model in 4 bits and back.

        Raises:
            ModelMismatch: The content digests differ.
        """
        key = "skeleton" if self.model.get("quantised") or model.get("quantised") else "digest"
        mine, theirs = self.model.get(key), model.get(key)
        if mine and theirs and mine != theirs:
            raise ModelMismatch(
                f"The plan was made for {self.model.get('id')} ({mine}); this model is {model.get('id')} ({theirs}).",
                "Names, shapes and weights must be the same.",
                "Score this model and plan again, or use the model that the plan names.",
            )

    @classmethod
    def from_values(
        cls, blocks: Sequence[Block], values: Mapping[str, float] | Sequence[float], *, kind: str = "sparsity",
        rule: str = "given", model: Mapping[str, Any] | None = None,
    ) -> Self:  # fmt: skip
        """A plan of one's own: values by block name, or in the order of the blocks.

        Args:
            blocks: The blocks.
            values: Sparsities in [0, 1], or whole numbers of experts or ranks (or of what the kind counts).
            kind: Kind of plan whose values are one number per block.
            rule: What to call where the values come from.
            model: ``{id, revision, digest}`` of the model; without it the plan is not checked against one.

        Raises:
            InvalidInput: Values that are missing, unknown, not finite or outside the kind's domain.

        >>> from layerbudget.records import Block, Module
        >>> b = Block(name="layers.0", modules=(Module(name="layers.0.q", d_in=4, d_out=5),))
        >>> Plan.from_values([b], {"layers.0": 0.5}).counts
        array([10])
        """
        numbers = by_name(blocks, values)
        if kind in ("joint", "structured", "depth", "bits", "recipe"):
            raise InvalidInput(f"A plan of kind {kind} is more than one number per block.", "", "Use its own plan function.")
        rows = tuple(PlanBlock.of(b, v, count_of(kind, b, v)) for b, v in zip(blocks, numbers, strict=True))
        spent, unit = sum(r.count for r in rows), "parameters" if kind == "sparsity" else KINDS.find(kind).counts
        if kind == "ranks":
            spent = sum(r.count * sum(m.d_in + m.d_out for m in b.modules) for r, b in zip(rows, blocks, strict=True))
            unit = "params"
        return cls(
            kind=kind, rule=rule, model=dict(model or {}), blocks=rows, budget={"unit": unit, "limit": spent, "spent": spent}
        )

    @classmethod
    def _upgraded(cls, fields: dict[str, Any]) -> dict[str, Any]:
        shapes = {"budget": PlanBudget, **({"certificate": Certificate} if fields["certificate"] else {}), "extra": Extra}
        if fields["kind"] == "structured":
            shapes |= {"extra": Structured, "hyperparameters": StructuredSettings}
        if fields["kind"] in ("bits", "recipe"):
            shapes |= {"extra": Formats if fields["kind"] == "bits" else RecipeExtra}
        for name, shape in shapes.items():
            try:
                reading.converted(fields[name], shape)
            except ValueError as error:
                raise CorruptFile(f"The {name} of this plan does not read ({error}).", "", "Make the plan again.") from error
        return fields
