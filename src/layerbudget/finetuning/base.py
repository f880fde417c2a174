"""The model that a fine-tuning starts from: its head, its precision and where it lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import InvalidInput
from ..models.loading import auto_class, check_quantised, four_bit_config, held_dtype, resolve, unpacked
from .protocol import DEVICES
from .sharding import wanted

Loader = Callable[[int], nn.Module]


@dataclasses.dataclass(frozen=True)
class NamedLoader:
    """``seed -> model`` that can say what it loads before it does.

    Attributes:
        load: The loader.
        settings: Precision and revision of the base: a part of the identity of what is trained on it.
    """

    load: Loader
    settings: Mapping[str, Any]

    def __call__(self, seed: int) -> nn.Module:
        """The model of that seed."""
        return self.load(seed)


PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_named(name: str) -> torch.device:
    """``cpu`` or ``cuda``; ``auto`` is the accelerator where there is one.

    Raises:
        InvalidInput: Another name, or a machine without a usable accelerator.
    """
    if name not in DEVICES:
        raise InvalidInput(
            f"The device is {name!r}.", f"It is one of {', '.join(DEVICES)}.", "Choose a card with CUDA_VISIBLE_DEVICES."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("No CUDA device can be used here.", "Devices are cpu and cuda.", "Use cpu.")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")


def classifier_loader(
    name: str, labels: int, *, dtype: str = "float32", device: str = "cpu", revision: str | None = None, four_bit: bool = False,
    prepare: Callable[[nn.Module], object] | None = None, prepared: Mapping[str, Any] | None = None,
) -> NamedLoader:  # fmt: skip
    """``seed -> model``: a causal LM as it is, any other checkpoint with a fresh classification head.

    Args:
        name: ``demo``, a local folder or a hub id.
        labels: Outputs of the head.
        dtype: Type of the base's weights, ``float32``, ``bfloat16`` or ``auto``: what the checkpoint holds, bfloat16 for
            16 bits of either kind; what is trained is float32 in any case.
        device: ``cpu``, ``cuda`` or ``auto``.
        revision: Hub revision.
        four_bit: Hold the base's Linear weights in 4 bits (NF4), as QLoRA does; computes in ``dtype``.
        prepare: Called with every model that was loaded: puts a base into the formats of a recipe.
        prepared: What it does, for the identity of what is trained on it.

    Raises:
        InvalidInput: Another precision or device, or 4 bits without bitsandbytes.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        set_seed,
    )

    if dtype not in (*PRECISIONS, "auto"):
        raise InvalidInput(f"dtype is {dtype!r}.", f"Bases are held in {' or '.join(PRECISIONS)}.", "Use bfloat16.")
    place, where = device_named(device), resolve(name, revision)
    config = AutoConfig.from_pretrained(where, revision=revision)
    check_quantised(name, config, None, four_bit)
    if dtype == "auto":
        dtype = "bfloat16" if held_dtype(config).itemsize == 2 else "float32"
    options: dict[str, Any] = {"dtype": PRECISIONS[dtype], "revision": revision}
    if four_bit:
        options |= {"quantization_config": four_bit_config(PRECISIONS[dtype]), "device_map": {"": place.type}}
    auto: Any = auto_class(config)
    fresh = auto not in (AutoModelForCausalLM, AutoModelForImageTextToText)
    if fresh:  # a head of the checkpoint may have another number of labels
        auto, options = AutoModelForSequenceClassification, {**options, "num_labels": labels, "ignore_mismatched_sizes": True}

    def load(seed: int) -> nn.Module:
        """The base, with the random parts of a seed."""
        set_seed(seed)
        model: nn.Module = auto.from_pretrained(where, **options)
        unpacked(model)
        if prepare is not None:
            prepare(model)
        return model if four_bit or wanted() else model.to(place)

    return NamedLoader(load, {"dtype": dtype, "quantised": four_bit, "revision": revision, **(prepared or {})})
