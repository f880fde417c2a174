"""The base of a recipe: a model in the planned formats, rounded when it is loaded or written by ``apply`` before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...compressors.base import find_quantiser
from ...errors import CoverageError, InvalidInput, ModelMismatch
from ...models.blocks import describe
from ...plan import Plan
from ..bits.apply import QuantisationReceipt, round_matrices
from ..bits.packed import recount_safetensors
from ..bits.program import formats_of_plan
from .recipe import split_recipe

_WRITTEN = 4  # bytes of a parameter: adapters are trained and written in float32


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
        if not self.written:
            round_matrices(model, formats_of_plan(self.bits), method=str(self.bits.extra["method"]))

    def recount(self, adapter_folder: Path) -> dict[str, int]:
        """Bytes of the base as planned, and of the adapter in its file.

        Raises:
            CoverageError: The adapter is not as large as planned.
        """
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
    """The base of a recipe: the folder from which the model was loaded, or the model, which is still to be rounded.

    Raises:
        ModelMismatch: The model is another one, or was written by another plan.
        InvalidInput: Formats that need text to be rounded to, and a model that is not in them; an adapter counted in other
            numbers than it is written in.
        CoverageError: A written file that is not as large as planned.
    """
    bits, ranks = split_recipe(plan)
    each = plan.hyperparameters["bytes_per_parameter"]
    if each != _WRITTEN:
        raise InvalidInput(
            f"The recipe counts {each:g} bytes per parameter of the adapter.",
            f"It is trained and written in {_WRITTEN}.",
            f"Plan it again: layerbudget plan joint ... --set bytes_per_parameter={_WRITTEN}.",
        )
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
