"""Walk a model block by block, each block called by the model's own forward with the model's own arguments.

No block is ever called with hand-made arguments. To run block k on a stored input, the whole model is called with the
blocks before k replaced by identities, the stored input put in front of block k, and the call ended behind it by a
private exception. Masks, position embeddings, sliding windows and cache flags are therefore whatever this model and this
version of transformers pass; what is repeated per call is the embedding lookup and the mask, no block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blocks import layers
from ..data.calibration import CalibrationSet
from ..errors import CoverageError, InvalidInput
from .store import Store


class StopForward(Exception):
    """Ends a forward early. Private to this package: no library can swallow it by accident."""

    def __init__(self, output: Any = None) -> None:
        super().__init__("forward ended early")
        self.output = output


@contextlib.contextmanager
def replaced(replacements: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily give modules another ``forward`` (hooks of the module, and of accelerate, stay in place)."""
    previous = {m: m.__dict__.get("forward") for m in replacements}
    for module, forward in replacements.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in previous.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no key-value cache; everything is put back afterwards."""
    configs = [c for c in _configs(getattr(model, "config", None)) if getattr(c, "use_cache", None)]
    modes = {m: m.training for m in model.modules()}
    for config in configs:
        config.use_cache = False
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for config in configs:
            config.use_cache = True
        for module, mode in modes.items():
            module.training = mode


def _configs(config: Any) -> list[Any]:
    if config is None:
        return []
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {}]
    return [config, *(c for c in nested if c is not None)]


def _split(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    hidden = arguments[0] if arguments else keywords.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise CoverageError(
            "A block was called without hidden states as its first argument.", "", "Report the model: its walk is not known."
        )
    return hidden


def _exchange(hidden: torch.Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if arguments:
        return (hidden, *arguments[1:]), keywords
    return arguments, {**keywords, "hidden_states": hidden}


def first(output: Any) -> torch.Tensor:
    """Hidden states in a block's output, which is a tensor or a tuple that starts with one."""
    return output[0] if isinstance(output, tuple | list) else output


def check_autocast(precision: str | None) -> None:
    """Refuse a precision that autocast does not know.

    Raises:
        InvalidInput: Neither None, ``bfloat16`` nor ``float16``.
    """
    if precision not in (None, "bfloat16", "float16"):
        raise InvalidInput(f"autocast is {precision!r}.", "It is bfloat16 or float16, or left out.", "Use bfloat16.")


class Walk:
    """The replay engine.

    Use it inside :func:`inference`. After :meth:`capture` the store holds the inputs of block 0; :meth:`advance` moves it
    to the next block.

    Args:
        model: Any transformers model with one list of layers.
        data: Calibration tokens.
        batch_size: Sequences per forward.
        store: Where activations live: ``device``, ``cpu`` or ``disk``.
        folder: Parent of the temporary folder for ``disk``.
        autocast: ``bfloat16`` or ``float16``: matrix products of the forwards in that precision, weights untouched.

    Raises:
        InvalidInput: A batch size below one, or an unknown precision.
        UnknownStructure: The model has no list of layers, or several.
    """

    def __init__(
        self,
        model: nn.Module,
        data: CalibrationSet,
        *,
        batch_size: int = 8,
        store: str = "device",
        folder: Path | str | None = None,
        autocast: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise InvalidInput(f"batch_size is {batch_size}.", "It must be at least 1.", "Use 8.")
        check_autocast(autocast)
        self.model, self.data, self.batch_size, self.autocast = model, data, batch_size, autocast
        self.layers = layers(model)
        self.device = next(model.parameters()).device
        self.sizes = [min(batch_size, data.samples - s) for s in range(0, data.samples, batch_size)]
        self.store = Store(store, folder)
        self.position = -1
        self.forwards = 0
        self._rest: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self.sizes)

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model for one batch."""
        start = batch * self.batch_size
        return next(self.data.select(slice(start, start + self.sizes[batch])).batches(self.batch_size, self.device))

    def token_mask(self, batch: int) -> torch.Tensor | None:
        """Which tokens of a batch are real, shape ``(sequences, length)``; None when all are."""
        mask = self.inputs(batch).get("attention_mask")
        return None if mask is None or bool(mask.all()) else mask.bool()

    def capture(self) -> None:
        """Fill the store with the inputs of block 0.

        Raises:
            CoverageError: The model did not reach its first block.
        """
        self._rest = self._probe()

        def record(*arguments: Any, **keywords: Any) -> Any:
            raise StopForward(_split(arguments, keywords))

        for batch in range(self.batches):
            with replaced({self.layers[0][1]: record}):
                self.store.put(batch, self._call(batch))
        self.position = 0

    def _probe(self) -> tuple[Any, ...] | None:
        """What a block returns behind its hidden states: None for a bare tensor."""
        seen: list[Any] = []

        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            seen.append(output)
            raise StopForward

        handle = self.layers[0][1].register_forward_hook(look)
        try:
            tiny = {k: v[:1, : min(4, v.shape[1])] for k, v in self.inputs(0).items()}
            with contextlib.suppress(StopForward), self._precision():
                self.model(**tiny)
        finally:
            handle.remove()
        if not seen:
            raise CoverageError(f"{type(self.model).__name__} did not call {self.layers[0][0]}.", "", "Report the model.")
        return (None,) * (len(seen[0]) - 1) if isinstance(seen[0], tuple | list) else None

    def _call(self, batch: int) -> torch.Tensor:
        try:
            with self._precision():
                self.model(**self.inputs(batch))
        except StopForward as stop:
            return stop.output
        raise CoverageError("A block of the model was not called.", "", "Switch layer dropping off.")

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.autocast))

    def _shape(self, hidden: torch.Tensor) -> Any:
        return hidden if self._rest is None else (hidden, *self._rest)

    def _patches(self, index: int, hidden: torch.Tensor) -> dict[nn.Module, Callable[..., Any]]:
        def identity(*arguments: Any, **keywords: Any) -> Any:
            return self._shape(_split(arguments, keywords))

        patches: dict[nn.Module, Callable[..., Any]] = {layer: identity for _, layer in self.layers[:index]}
        block = self.layers[index][1]
        own = block.forward

        def inject(*arguments: Any, **keywords: Any) -> Any:
            given = _split(arguments, keywords)
            arguments, keywords = _exchange(hidden.to(given.device), arguments, keywords)
            return own(*arguments, **keywords)

        patches[block] = inject
        return patches

    def forward(self, index: int, batch: int, hidden: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run one block on one batch.

        Args:
            index: Block.
            batch: Batch.
            hidden: Input of the block; the stored one by default.

        Returns:
            The block's output, or None when a hook inside the block ended the forward with :class:`StopForward`.
        """
        hidden = self.store.get(batch) if hidden is None else hidden

        def end(module: nn.Module, arguments: Any, output: Any) -> None:
            raise StopForward(first(output))

        handle = self.layers[index][1].register_forward_hook(end)
        self.forwards += 1
        try:
            with replaced(self._patches(index, hidden)):
                return self._call(batch)
        finally:
            handle.remove()

    def advance(self) -> None:
        """Replace the stored inputs of the current block by its outputs."""
        for batch in range(self.batches):
            output = self.forward(self.position, batch)
            if output is None:
                raise CoverageError(
                    f"{self.layers[self.position][0]} gave no output.", "", "Remove hooks that end the forward."
                )
            self.store.put(batch, output)
        self.position += 1

    def tail(self, index: int, batch: int, hidden: torch.Tensor | None = None) -> Any:
        """The model's own output for one batch, with the forward restarted at block ``index``."""
        hidden = self.store.get(batch) if hidden is None else hidden
        self.forwards += len(self.layers) - index
        with replaced(self._patches(index, hidden)), self._precision():
            return self.model(**self.inputs(batch))

    def head(self, batch: int, hidden: torch.Tensor) -> Any:
        """The model's own output for the hidden states behind the last block; no block is run."""
        patches = self._patches(len(self.layers) - 1, hidden)

        def give(*arguments: Any, **keywords: Any) -> Any:
            return self._shape(hidden.to(_split(arguments, keywords).device))

        patches[self.layers[-1][1]] = give
        with replaced(patches), self._precision():
            return self.model(**self.inputs(batch))

    def close(self) -> None:
        """Drop the stored activations."""
        self.store.close()
