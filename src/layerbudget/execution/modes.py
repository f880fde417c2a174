"""How a model is put while something is measured on it, and put back afterwards, also after an exception."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import BadModel
from ..models.blocks import pretrained


def overflowed(what: str, dtype: torch.dtype | str) -> BadModel:
    """Return the error of activations that are not finite in a model that computes in a precision."""
    kind = str(dtype).removeprefix("torch.")
    remedy = "Look for the layer where they begin, and at the sequences of the text."
    return BadModel(
        f"{what} are not finite in {kind}.",
        "Measuring and pruning need finite activations.",
        "Use float32 or bfloat16 (--dtype): the model overflows float16." if kind == "float16" else remedy,
    )


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no key-value cache."""
    with _settled(model), torch.no_grad():
        yield


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no key-value cache, gradients on; gradients and ``requires_grad`` flags come back at the end."""
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        for p, _, _ in flags:
            p.grad = None
        with _settled(model), torch.enable_grad():
            yield
    finally:
        for p, flag, grad in flags:
            p.requires_grad_(flag)
            p.grad = grad


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, the seeds of Python, numpy and torch may be set; afterwards the caller's go on."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextlib.contextmanager
def _settled(model: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    config = getattr(model, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {})]
    cached: list[Any] = [c for c in configs if getattr(c, "use_cache", None)]
    try:
        model.eval()
        for each in cached:
            each.use_cache = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for each in cached:
            each.use_cache = True


@contextlib.contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Use attention that can be differentiated twice; the model's own choice comes back at the end."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    switch = attention not in (None, "eager", "sdpa") and hasattr(model, "set_attn_implementation")
    try:
        if switch:
            pretrained(model).set_attn_implementation("eager")
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if switch and attention is not None:
            pretrained(model).set_attn_implementation(attention)
