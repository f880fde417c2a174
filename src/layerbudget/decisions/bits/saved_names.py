"""The names that a checkpoint has for the weights of a model: for a stack of experts, one name for every expert.

transformers holds the experts of a layer in one parameter, and saves most of them one by one, gate and up apart, as their
first checkpoints had them. vLLM reads packed experts by those names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...models.blocks import pretrained, transposed, weight_of
from ...models.loading import silent
from ...records import stacks
from ...storage.writing import Scratch

_ROWS = 4  # of a tracer: gate and up are halves of it
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSlice:
    """Some rows of a matrix under a name of their own.

    Attributes:
        name: Of the module in the checkpoint.
        copy: Which matrix of a stack.
        run: Which of ``runs`` equal runs of its rows.
    """

    name: str
    copy: int = 0
    run: int = 0
    runs: int = 1

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return its rows of a matrix, or of what goes with its rows."""
        return rows.chunk(self.runs)[self.run]


def experts_of(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[CheckpointSlice, ...]]:
    """Return the parts that stacks of experts are saved as, by stack; those that are saved whole are left out.

    They are found by saving a few numbers in the place of the weights, which say where they come from.
    """
    parts_by_stack, numbered, start = dict[str, list[CheckpointSlice]](), dict[str, torch.Tensor](), 0
    first: list[tuple[int, str]] = []
    for name in stacks(names):
        owner, parameter = weight_of(model, name)
        if not transposed(owner):
            numbers = torch.arange(start, start + len(parameter) * _ROWS, dtype=torch.float64)
            numbered[name] = numbers.reshape(len(parameter), _ROWS, 1)
            first.append((start, name))
            start += numbers.numel()
    for saved, numbers in as_saved(model, numbered).items():
        low, rows = int(numbers.flatten()[0]), len(numbers)
        begin, name = max(f for f in first if f[0] <= low)
        copy, row = divmod(low - begin, _ROWS)
        whole = numbers.shape == (rows, 1) and numbers.flatten().tolist() == list(range(low, low + rows))
        if whole and row + rows <= _ROWS and row % rows == 0 and _EXPERT.fullmatch(saved.removesuffix(".weight")):
            part = CheckpointSlice(name=saved.removesuffix(".weight"), copy=copy, run=row // rows, runs=_ROWS // rows)
            parts_by_stack.setdefault(name, []).append(part)
    complete = {n: sum(1 / p.runs for p in parts) == len(numbered[n]) for n, parts in parts_by_stack.items()}
    return {n: tuple(sorted(parts_by_stack[n], key=lambda p: (p.copy, p.run))) for n in names if complete.get(n)}


def names_of(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the names in the checkpoint of matrices that are saved whole, of those that have another one there."""
    modules = dict(model.named_modules())
    keys = [f"{name}.weight" if name in modules else name for name in names]
    saved = tensor_names(model, {k: weight_of(model, name)[1].ndim for k, name in zip(keys, names, strict=True)})
    stems = {name: saved[key].removesuffix(".weight") for key, name in zip(keys, names, strict=True) if key in saved}
    return {name: stem for name, stem in stems.items() if stem != name}


def tensor_names(model: nn.Module, dimensions: Mapping[str, int]) -> dict[str, str]:
    """Return the names in the checkpoint of tensors that are saved whole, by their names in the model.

    Args:
        model: Any transformers model.
        dimensions: How many each tensor has, by its name in the model.
    """
    names, saved_by_number = list(dimensions), dict[int, list[str]]()
    numbered = {name: torch.full((_ROWS,) * dimensions[name], i, dtype=torch.float64) for i, name in enumerate(names)}
    for saved, numbers in as_saved(model, numbered).items():
        if numbers.numel() == _ROWS**numbers.ndim and bool((numbers == numbers.flatten()[0]).all()):
            saved_by_number.setdefault(int(numbers.flatten()[0]), []).append(saved)
    return {names[i]: saved[0] for i, saved in saved_by_number.items() if len(saved) == 1}


def pattern(module: str) -> str:
    """Return a regular expression of compressed-tensors for a module; for one of an expert, of all experts of its layer."""
    expert = _EXPERT.fullmatch(module)
    return f"re:^{re.escape(module)}$" if expert is None else rf"re:^{re.escape(expert[1])}\.\d+\.{expert[2]}$"


def halved(model: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not planned has 16 bits in a folder; biases of routers stay in float32."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return tensor.is_floating_point() and not (tensor.dtype == torch.float32 and any(part in name for part in strict))


def as_saved(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names, and in the shapes, that transformers saves them with."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    with Scratch() as folder:
        if state:
            with silent():  # a bar for every piece
                pretrained(model).save_pretrained(folder, state_dict=dict(state))
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
    return tensors
