"""Remove experts from a GGUF file at the bytes: nothing is read back or rounded again, whatever types the tensors have.

Every type of llama.cpp holds each row by itself, and the experts of a layer stand one after the other, outermost in their
tensors. So the bytes of the experts that stay are copied, with their rows of the router and their biases. The number of experts
in the metadata follows; all else is as it was. It is one number for all layers, so the plan has to keep the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...decision import check_kind
from ...errors import CoverageError, InvalidInput, ModelMismatch
from ...gguf.names import Names
from ...gguf.rewriting import GgufOutput, GgufSource, tensor_bytes
from ...llama_cpp.writer import recount_gguf
from ...plan import Plan, payload_of
from ...progress import Progress
from ...storage.checkpoint import GGUF_FILE
from ...storage.writing import write_text
from .apply import ExpertReceipt
from .payload import ExpertPruningPayload

COUNT, USED = "expert_count", "expert_used_count"
_CORRECTIONS = "exp_probs_b"  # no parameters of some models in transformers
_BY_EXPERT = re.compile(rf"blk\.\d+\.(ffn_(gate|up|down|gate_up)_exps|ffn_gate_inp|{_CORRECTIONS})(\.\w+)?$")
_FOR_ALL = re.compile(r"blk\.\d+\.(ffn_gate_inp_shexp|ffn_(gate|up|down)_shexp|ffn_norm_exps)\.")
_OF_EXPERTS = re.compile(r"blk\.\d+\.(ffn_(gate|up|down)\.\d+\.|\w*exp)")
_FIRST = "Apply the plan to the model itself, then write the file of that: layerbudget apply MODEL PLAN -o fewer."


def cut_gguf(
    source: Path | str, plan: Plan, out: Path | str, *, overwrite: bool = False, progress: Progress | None = None
) -> ExpertReceipt:
    """Write a GGUF file again without the experts that a plan lets go, and return its record; no weight is rounded again.

    Args:
        source: The file of a mixture, in any types. It lies in one part.
        plan: Of kind ``expert-pruning``, with the same number in all layers (``even``). It was made for this file, or for the
            model that it was converted from. Numbers of layers, of experts and of weights are compared, and no values.
        out: The file to write (``fewer.gguf``), or a folder for it with the plan, the record and a model card.
        overwrite: Replace what an earlier call wrote.
        progress: Called with (tensors done, tensors).

    Raises:
        NotFound: There is no such file.
        CorruptFile: It is no GGUF file, or is cut off.
        ModelMismatch: The plan is of another model.
        InvalidInput: A plan of another kind or with different numbers, or experts that the file keeps in an unknown way.
        CoverageError: The recount differs from the plan.
    """
    check_kind(plan.kind, ("expert-pruning",), "does not say which experts stay")
    _check_even(plan)
    cut = _Cut(GgufSource.open(source), plan)
    output = GgufOutput.checked(out, cut.size, [source], overwrite=overwrite)
    return output.write(partial(cut.write, progress=progress), partial(_write_others, plan))


def _check_even(plan: Plan) -> None:
    """Refuse a plan whose layers keep different numbers, before the file is read."""
    if len(set(plan.counts.tolist())) > 1:
        raise InvalidInput(
            f"The layers of this plan keep {min(plan.counts)} to {max(plan.counts)} experts.",
            "A GGUF file has one number for all.",
            "Plan the experts that stay with --even.",
        )


def _write_others(plan: Plan, folder: Path, receipt: ExpertReceipt) -> None:
    """Write the plan, the record and the model card beside the file."""
    from .save import card_of, record_of

    card = card_of(plan, receipt, f"llama-cli -m {GGUF_FILE}", library=None, tags=("gguf", "pruned", "moe"))
    plan.save(folder / "plan.json")
    write_text(folder / "receipt.json", record_of(receipt))
    write_text(folder / "README.md", card)


class _Cut:
    """One file, and the experts of its tensors that stay.

    Attributes:
        kept: Indices of the experts that stay, in increasing order, by tensor.
        layers: The experts' tensors of every block of the plan, by its name.
    """

    def __init__(self, source: GgufSource, plan: Plan) -> None:
        self.source, self.plan = source, plan
        self.tensors = {tensor.name: tensor for tensor in source.reader.tensors}
        self.experts = int(source.number(COUNT) or 0)
        if not self.experts:
            raise self._mismatch("it has no experts")
        self.layers = self._layers()
        self._check_layers()
        kept = payload_of(plan, ExpertPruningPayload).kept
        self.kept = {tensor: sorted(kept[block]) for block, tensors in self.layers.items() for tensor in tensors}
        self.count = int(plan.counts[0])
        if self.count < (used := int(source.number(USED) or 1)):
            raise self._mismatch(f"a token is given {used} experts, and the plan keeps {self.count}")
        numbers = {f"{source.value('general.architecture')}.{COUNT}": self.count}
        self.head = source.head(numbers, outermost=dict.fromkeys(self.kept, self.count))
        self.size = len(self.head) + sum(source.padded(self._bytes(tensor)) for tensor in self.tensors.values())

    def _layers(self) -> dict[str, list[str]]:
        """The tensors of the file that have an entry per expert, by block of the plan."""
        by_layer: dict[str, list[str]] = {}
        for name in self.tensors:
            if _BY_EXPERT.match(name):
                by_layer.setdefault(name.split(".")[1], []).append(name)
            elif _OF_EXPERTS.match(name) and not _FOR_ALL.match(name):
                raise InvalidInput(f"How {name} depends on single experts is not known here.", "", _FIRST)
        by_layer = {layer: tensors for layer, tensors in by_layer.items() if any("_exps." in name for name in tensors)}
        names = Names(str(self.source.value("general.architecture")), self.source.layers)
        layers = {}
        for block in self.plan.blocks:
            tensors = [tensor for matrix in block.modules for tensor in names.find(matrix)]
            layer = tensors[0].split(".")[1] if tensors else ""
            if layer not in by_layer:
                raise self._mismatch(f"the experts of {block.name} are not in it")
            layers[block.name] = by_layer.pop(layer)
        if by_layer:
            layer = min(by_layer, key=int)
            what = f"Layer {layer} of {self.source.path} has experts that this plan does not decide, and one number is for all."
            raise InvalidInput(what, "Such a layer predicts further tokens, as a rule, and transformers leaves it out.", _FIRST)
        return layers

    def _check_layers(self) -> None:
        """Refuse a plan whose layers have other numbers of experts or of weights than the file's."""
        for block in self.plan.blocks:
            tensors = [self.tensors[name] for name in self.layers[block.name]]
            counts = {int(tensor.shape[-1]) for tensor in tensors} | {self.experts}
            if len(counts) > 1:
                raise self._mismatch(f"{block.name} has tensors of {' and '.join(map(str, sorted(counts)))} experts")
            if round(block.count / block.value) != self.experts:
                raise self._mismatch(
                    f"{block.name} has {block.count / block.value:.0f} experts in the plan and {self.experts} in the file"
                )
            weights = sum(int(tensor.n_elements) for tensor in tensors)
            beside = sum(int(tensor.n_elements) for tensor in tensors if _CORRECTIONS in tensor.name)
            if block.numel not in (weights, weights - beside):
                raise self._mismatch(f"{block.name} has {block.numel:,} weights in the plan and {weights:,} in the file")

    def _mismatch(self, why: str) -> ModelMismatch:
        what = f"The plan is of another model than {self.source.path}: {why}."
        return ModelMismatch(what, "", "Plan for this file, or for the model that it was converted from.")

    def _bytes(self, tensor: Any) -> int:
        """Bytes of a tensor that stay, without padding."""
        shape = [int(n) for n in tensor.shape]
        shape[-1] = len(self.kept.get(tensor.name, range(shape[-1])))
        return tensor_bytes(shape, tensor.tensor_type)

    def write(self, file: Path, progress: Progress | None) -> ExpertReceipt:
        """Write the file, count it again, and return the record."""
        self.source.write(file, self.head, self._content, progress)
        return self._receipt(file)

    def _content(self, tensor: Any) -> Iterator[np.ndarray]:
        """The bytes of a tensor that stay, one expert at a time."""
        if (kept := self.kept.get(tensor.name)) is None:
            yield tensor.data
        else:
            yield from (tensor.data[expert : expert + 1] for expert in kept)

    def _receipt(self, file: Path) -> ExpertReceipt:
        """The record of a file that was written, counted in it."""
        after = GgufSource.open(file)
        tensors = {tensor.name: tensor for tensor in after.reader.tensors}
        layers = {block: {int(tensors[name].shape[-1]) for name in names} for block, names in self.layers.items()}
        counts = {block: counted.pop() if len(counted) == 1 else 0 for block, counted in layers.items()}
        sizes = (self.source.path.stat().st_size, file.stat().st_size)
        if counts != {b.name: b.count for b in self.plan.blocks} or after.number(COUNT) != self.count or sizes[1] != self.size:
            what = f"The file has {after.number(COUNT)} experts, in its layers {sorted(set(counts.values()))}."
            raise CoverageError(what, f"{self.count} were planned.", "Report this; nothing is kept.")
        before, used = _sizes(self.tensors, self.kept), int(self.source.number(USED) or self.count)
        left = _sizes(tensors, self.kept)
        return ExpertReceipt(
            plan_digest=self.plan.digest,
            identity=self.plan.model,
            experts={"before": self.experts * len(layers), "after": sum(counts.values())},
            layers=counts,
            parameters={"before": before[0], "after": left[0]},
            active={
                "before": before[0] - before[1] // self.experts * (self.experts - used),
                "after": left[0] - left[1] // self.count * (self.count - used),
            },
            bytes={"before": sum(recount_gguf(self.source.path).values()), "after": sum(recount_gguf(file).values())},
            even=True,
            loads="llama.cpp and by what reads its files",
        )


def _sizes(tensors: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> tuple[int, int]:
    """Weights of all tensors, and of those that hold the experts' matrices."""
    of_experts = sum(int(tensors[name].n_elements) for name in names if "_exps." in name)
    return sum(int(tensor.n_elements) for tensor in tensors.values()), of_experts
