r"""A start of ranks in the gain's own directions.

Let ``G = U S V'`` be the gradient of the mean loss with respect to a weight, accumulated
over a calibration set. Of all rank-r updates with a given norm, ``-U_r S_r V_r'`` lowers the linearised loss most
(Eckart-Young). With ``B = 0`` the first gradient of ``B`` is ``G A'``; rows of ``A`` equal to the top right singular vectors
let it reach exactly that subspace, and the model starts unchanged. EVA (Paischer et al. 2024) takes the top directions of the
*inputs* instead.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...errors import CoverageError
from .apply import lora_layers


def initialise_from_gradients(
    model: nn.Module, gradients: Mapping[str, Tensor], adapter_name: str = "default", *, norm: float = 3**-0.5
) -> None:
    """Set ``A`` of every LoRA module to the top right singular vectors of its gradient ``(d_out, d_in)``; ``B`` stays zero.

    ``norm`` is that of each row of A. ``1/sqrt(3)``, the default, is that of PEFT's own start, so that only the directions
    differ from it; EVA uses 1, which also makes the first steps of B larger.
    """
    for name, module in lora_layers(model, adapter_name).items():
        if name not in gradients:
            raise CoverageError(f"There is no gradient for {name}.", "", "Accumulate gradients for every module of the plan.")
        a = module.lora_A[adapter_name].weight
        _, _, right = torch.linalg.svd(gradients[name].double(), full_matrices=False)
        rows = right[: a.shape[0]] * norm
        with torch.no_grad():
            a[: len(rows)] = rows.to(a.dtype)
