"""Where a model is put, and in which precision it computes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from ..errors import InvalidInput, MissingDependency
from .offload import mapped

HEADS = ["classifier", "score", r".*pooler", "pre_classifier", "lm_head", "embed_out"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def find_device(name: str) -> torch.device:
    """The device of that name, tried out before anything is loaded; ``auto`` is the accelerator where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(name)
        torch.empty(1, device=place).cpu()  # meta tensors have no values that could come back
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"The device {name!r} cannot be used: {first[:120]}.", "It is auto, cpu, cuda, cuda:1, mps, ...", "Use cpu."
        ) from error
    return place


def four_bit_config(compute: torch.dtype) -> Any:
    """Configuration of a base in 4 bits (NF4) whose products are computed in a type, as QLoRA does; heads and poolers stay."""
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependency("A base in 4 bits needs bitsandbytes.", "", "Install bitsandbytes, or use bfloat16.")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, llm_int8_skip_modules=HEADS
    )


def held_dtype(config: Any, dtype: str = "auto") -> torch.dtype:
    """The precision of that name; ``auto`` is what the checkpoint's config says it holds, float32 where it does not say."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) and stored.is_floating_point else torch.float32


def quick_dtype(stored: torch.dtype, place: torch.device) -> torch.dtype:
    """The precision that a checkpoint holds, or float32 where that has 16 bits and the processor can only emulate them.

    A forward and backward in emulated bfloat16 takes tens of times as long. x86 emulates it without AVX-512.
    """
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(stored)
    if place.type != "cpu" or asked is None or not hasattr(torch.ops.mkldnn, asked):
        return stored
    return stored if getattr(torch.ops.mkldnn, asked)() else torch.float32


def precision_of(model: nn.Module) -> str:
    """The precision that a model computes in, in words: ``bfloat16``, or several."""
    files = mapped(model)
    kinds = {p.dtype for p in model.parameters()} if files is None else {files.dtype}
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def describe_place(model: nn.Module) -> str:
    """Where a model lies and in which precision, in one clause."""
    parameters = list(model.parameters())
    count, files = f"{sum(p.numel() for p in parameters) / 1e6:,.1f} M parameters", mapped(model)
    if files is not None:
        how = f"one layer at a time in {precision_of(model)}" if files.converts else "mapped"
        return f"{count} streamed from their files, {how}, on {files.device}"
    size = sum(p.numel() * p.element_size() for p in parameters)
    size_text = f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
    return f"{count} in {precision_of(model)} on {parameters[0].device}, {size_text}"
