"""Whether a model can be run one layer at a time: its layers must give alone what they give together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CoverageError, UnknownStructure
from ..models.offload import converting, mapped
from .loss import Batch
from .memory import fits_whole
from .modes import inference
from .replay import Replay

logger = logging.getLogger(__name__)
_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
_FAITHFUL: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()


def chosen_way(model: nn.Module, names: Sequence[str], runs: Sequence[Batch], walk: str, state: int) -> tuple[str, str]:
    """``whole`` or ``layers``, and why.

    Raises:
        CoverageError: ``layers`` was asked for and cannot be had.
    """
    if walk == "whole" and converting(model):
        raise CoverageError(
            "Layers come to the device one at a time, so no graph of the whole model exists.", "Streamed models are walked.",
            "Use walk='layers', or load without --stream.",
        )  # fmt: skip
    if walk == "whole" or (walk == "auto" and not converting(model) and fits_whole(model, runs, state)):
        return "whole", ""
    reason = unwalkable(model, names, runs)
    if not reason:
        return "layers", ""
    if walk == "layers" or converting(model):
        raise CoverageError(f"{type(model).__name__} cannot be walked layer by layer: {reason}.", "", "Use walk='whole'.")
    logger.warning("%s cannot be walked layer by layer (%s): the whole graph is used.", type(model).__name__, reason)
    return "whole", reason


def unwalkable(model: nn.Module, names: Iterable[str], runs: Sequence[Batch]) -> str:
    """Why this model cannot be walked, or an empty string.

    Args:
        model: The model.
        names: Matrices that are asked for.
        runs: What it will run on.
    """
    try:
        replay = Replay(model)
    except UnknownStructure as error:
        return str(error).splitlines()[0].rstrip(".")
    if not runs or not runs[0].kwargs:
        return "it takes no tokens"
    inside = tuple(f"{name}." for name, _ in replay.layers)
    outside = [n for n in names if not n.startswith(inside)]
    if outside:
        return f"{outside[0]} lies outside its layers"
    try:
        return _once(replay, runs[0])
    except (
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RuntimeError,
        CoverageError,
    ) as error:
        return f"a layer does not run alone ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


def _once(replay: Replay, batch: Batch) -> str:
    """Ask :func:`unfaithful`; of weights in files, whose every layer has to come for it, once."""
    layers = tuple(id(layer) for _, layer in replay.layers)
    if _FAITHFUL.get(replay.model) == layers:
        return ""
    reason = unfaithful(replay, batch)
    if not reason and mapped(replay.model) is not None:
        _FAITHFUL[replay.model] = layers
    return reason


def unfaithful(replay: Replay, batch: Batch) -> str:
    """Run a piece of one sequence as a whole and layer by layer; say where they differ, or return an empty string.

    Layers that share state (key and value caches, inputs per layer) are found this way, and gradients that flow beside the
    hidden states as well.
    """
    tiny = {k: v[:1, : min(8, v.shape[1])] for k, v in batch.kwargs.items() if v.ndim == 2}
    with inference(replay.model):
        replay.probe(tiny)
        expected = _logits(replay.model(**tiny))
        hidden = replay.first_inputs(tiny)
        for i in range(len(replay.layers)):
            with replay.begin(i, hidden), replay.end(i):
                found = replay.run(tiny)
            if found is None or found.shape != hidden.shape:
                return f"{replay.layers[i][0]} changes the shape of its hidden states"
            hidden = found
        with replay.begin(len(replay.layers), hidden):
            found = _logits(replay.model(**tiny))
    scale = float(expected.abs().max().clamp_min(1e-6))
    if not float((found - expected).abs().max()) <= _CLOSE.get(hidden.dtype, 5e-2) * scale:
        return "its layers give other values one at a time than all together: they share state"
    return ""


def _logits(output: Any) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.logits).float()
