r"""A start of ranks in the gain's own directions.

Let ``G = U S V'`` be the gradient of the mean loss with respect to a weight, accumulated
over a calibration set. Of all rank-r updates with a given norm, ``-U_r S_r V_r'`` lowers the linearised loss most
(Eckart-Young). With ``B = 0`` the first gradient of ``B`` is ``G A'``; rows of ``A`` equal to the top right singular vectors
let it reach exactly that subspace, and the model starts unchanged. EVA (Paischer et al. 2024) takes the top directions of the
*inputs* instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ...errors import CoverageError
from .apply import lora_layers

Batch = Mapping[str, Tensor]  #: Inputs of a forward.


def initialise_from_gradients(
    model: nn.Module, gradients: Mapping[str, Tensor], batches: Sequence[Batch] = (), adapter_name: str = "default"
) -> None:
    """Set ``A`` of every LoRA module to the top right singular vectors of its gradient ``(d_out, d_in)``; ``B`` stays zero.

    Its rows are as long as those of PEFT's own start, ``1/sqrt(3)``. With ``batches`` of the task they are scaled instead, one
    factor for each module, so that what A gives on these rows is as large as what PEFT's own A gives. Inputs are large in a
    gradient's directions, and Adam moves B as fast whatever A gives: rows of one length make steps several times as large.

    Raises:
        CoverageError: A module has no gradient.
    """
    layers, before = lora_layers(model, adapter_name), dict[str, Tensor]()
    for name, module in layers.items():
        if name not in gradients:
            raise CoverageError(f"There is no gradient for {name}.", "", "Accumulate gradients for every module of the plan.")
        a = module.lora_A[adapter_name].weight
        before[name] = a.detach().clone()
        _, _, right = torch.linalg.svd(gradients[name].double(), full_matrices=False)
        rows = right[: a.shape[0]] * 3**-0.5
        with torch.no_grad():
            a[: len(rows)] = rows.to(a.dtype)
    if batches:
        _match_outputs(model, {name: module.lora_A[adapter_name] for name, module in layers.items()}, before, batches)


@torch.no_grad()
def _match_outputs(
    model: nn.Module, matrices: Mapping[str, nn.Linear], before: Mapping[str, Tensor], batches: Sequence[Batch]
) -> None:
    """Scale each A so that the mean square of its outputs is that of the one before it, over the tokens of some batches."""
    squares = {name: torch.zeros(2, dtype=torch.float64) for name in matrices}
    mask: Tensor | None = None

    def listener(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0].float()
            x = x[mask] if mask is not None and mask.shape == x.shape[:-1] else x
            for i, weight in enumerate((before[name], matrices[name].weight)):
                squares[name][i] += (x @ weight.float().T).square().sum(dtype=torch.float64).cpu()

        return add

    with ExitStack() as stack:
        for name, matrix in matrices.items():
            stack.callback(matrix.register_forward_pre_hook(listener(name)).remove)
        for batch in batches:
            mask = batch["attention_mask"].bool() if "attention_mask" in batch else None
            model(**batch)
    for name, (old, new) in squares.items():
        if new > 0:
            matrices[name].weight.mul_(float((old / new).sqrt()))
