r"""Start LoRA in the gain's own directions.

Let ``G`` be the gradient of the mean loss with respect to a weight, accumulated over a calibration set, and
``G = U S V'``. Of all rank-r updates with a given norm, ``-U_r S_r V_r'`` lowers the linearised loss most (Eckart-Young).
With ``B = 0`` the first gradient of ``B`` is ``G A'``; rows of ``A`` equal to the top right singular vectors let it reach
exactly that subspace, and the model starts unchanged. EVA (Paischer et al. 2024) takes the top directions of the *inputs*
instead. The gradients come from :func:`layerbudget.sensitivity.adapter_space.accumulated_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.calibration import CalibrationSet
from ..decisions.ranks.apply import lora_layers
from ..errors import CoverageError
from .rows import Rows
from .text_rows import TextRows

START_SAMPLES = 128


def initialise_from_gradients(
    model: nn.Module, gradients: dict[str, Tensor], adapter_name: str = "default", *, norm: float = 3**-0.5
) -> None:
    """Set ``A`` of every LoRA module to the top right singular vectors of its gradient; ``B`` stays zero.

    Args:
        model: A model with LoRA ranks.
        gradients: Gradient ``(d_out, d_in)`` by module.
        adapter_name: Name of the adapter.
        norm: Norm of each row of A. ``1/sqrt(3)``, the default, is that of PEFT's own start, so that only the directions
            differ from it; EVA uses 1, which also makes the first steps of B larger.

    Raises:
        CoverageError: An adapted module without a gradient.
    """
    for plain, module in lora_layers(model, adapter_name).items():
        if plain not in gradients:
            raise CoverageError(f"There is no gradient for {plain}.", "", "Accumulate gradients for every module of the plan.")
        a = module.lora_A[adapter_name].weight
        _, _, right = torch.linalg.svd(gradients[plain].double(), full_matrices=False)
        rows = right[: a.shape[0]] * norm
        with torch.no_grad():
            a[: len(rows)] = rows.to(a.dtype)


def task_gradients(
    model: nn.Module, rows: Rows | TextRows, examples: Sequence[Any], modules: Sequence[str], *, samples: int = START_SAMPLES
) -> dict[str, Tensor]:
    """Gradient of a task's mean loss for every named module, over a fixed random sample of its training rows.

    Args:
        model: The model before any adapter, with its head. Left in evaluation mode, unchanged.
        rows: The encoder of the task's rows.
        examples: Training rows.
        modules: Names of the modules that will be adapted.
        samples: How many rows, at most.

    Returns:
        ``{name: (d_out, d_in)}``.

    Raises:
        CoverageError: A module that is not a Linear or Conv1D, or was never reached.
        UnknownBlock: The model has no such module.
    """
    from ..sensitivity.adapter_space import accumulated_gradients

    chosen = np.random.default_rng(0).permutation(len(examples))[:samples]
    batch = rows.collate(rows.encoded([examples[i] for i in chosen]))
    data = CalibrationSet(
        source=rows.task.name, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]
    )
    model.eval()
    return accumulated_gradients(model, data, list(modules))
