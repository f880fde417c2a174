"""Begin a model's forward at any layer and end it behind any other, every layer called by the model's own forward.

No layer is ever called with hand-made arguments. To begin at layer k with some hidden states, the whole model is called with
the layers before k replaced by identities and the hidden states put in front of layer k; to end behind layer j, a private
exception leaves it there. Masks, position embeddings, sliding windows and cache flags are therefore whatever this model and
this version of transformers pass; what is repeated per call is the embedding lookup and the mask, no layer.

What a layer hands to the next one beside its hidden states (ZAYA's routers read the state of the router before) stands behind
them in the same tensor, ``(B, T, d + more)``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CoverageError, UnknownStructure
from ..models.blocks import layers
from ..models.offload import mapped
from .loss import Batch
from .modes import inference

Inputs = Mapping[str, torch.Tensor]
_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
_FAITHFUL: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()


class StopForward(Exception):
    """Ends a forward early. Private to this package: no library can swallow it by accident."""

    def __init__(self, output: Any = None) -> None:
        super().__init__("forward ended early")
        self.output = output


@contextlib.contextmanager
def _replaced(replacements: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another ``forward`` for a while (hooks of the module, and of accelerate, stay in place)."""
    previous = {m: m.__dict__.get("forward") for m in replacements}
    for module, forward in replacements.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, override in previous.items():
            if override is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = override


def _hidden_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> torch.Tensor:
    hidden = arguments[0] if arguments else keywords.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise CoverageError(
            "A block was called without hidden states as its first argument.", "", "Report the model: its walk is not known."
        )
    return hidden


def _first(output: Any) -> torch.Tensor:
    """Hidden states in a layer's output, which is a tensor or a tuple that starts with one."""
    return output[0] if isinstance(output, tuple | list) else output


class Replay:
    """A model whose forward begins and ends where it is told; ``layers`` are ``(name, layer)`` in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.look()
        # Dtype and width of the hidden states that a layer returns, then of what it hands on beside them (None: it does not);
        # empty where it returns a bare tensor.
        self.parts: list[tuple[torch.dtype, int] | None] = []

    def look(self) -> None:
        """Find the layers that the model has now."""
        self.layers = layers(self.model)

    def probe(self, inputs: Inputs) -> None:
        """See what a layer returns, on a piece of one sequence."""
        seen: list[Any] = []

        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            seen.append(output)
            raise StopForward

        handle = self.layers[0][1].register_forward_hook(look)
        try:
            with contextlib.suppress(StopForward):
                self.model(**{k: v[:1, : min(4, v.shape[1])] for k, v in inputs.items()})
        finally:
            handle.remove()
        if not seen:
            raise CoverageError(f"{type(self.model).__name__} did not call {self.layers[0][0]}.", "", "Report the model.")
        self.parts = []
        if isinstance(seen[0], tuple | list):
            like = seen[0][0].shape[:2]
            alike = (
                isinstance(t, torch.Tensor) and t.ndim == 3 and t.shape[:2] == like and t.is_floating_point() for t in seen[0]
            )
            self.parts = [(t.dtype, t.shape[-1]) if fits else None for t, fits in zip(seen[0], alike, strict=True)]

    @property
    def hands_more(self) -> bool:
        """Whether a layer hands on more than hidden states."""
        return sum(part is not None for part in self.parts) > 1

    def state(self, output: Any) -> torch.Tensor:
        """Return the state that a layer hands on, in one tensor."""
        if not self.hands_more:
            return _first(output)
        return torch.cat([t for t, part in zip(output, self.parts, strict=True) if part], dim=-1)

    def _output(self, state: torch.Tensor) -> Any:
        """Return a state as a layer returns it; nothing stands beside the hidden states in front of the first layer."""
        if not self.parts:
            return state
        widths = [part[1] for part in self.parts if part]
        if not self.hands_more or state.shape[-1] != sum(widths):
            return (state, *(None for _ in self.parts[1:]))
        handed = iter(state.split(widths, dim=-1))
        return tuple(next(handed).to(part[0]) if part else None for part in self.parts)

    def _identity(self, *arguments: Any, **keywords: Any) -> Any:
        return self._output(_hidden_of(arguments, keywords))

    _identity.skips = True  # type: ignore[attr-defined]  # a streamed layer need not come for it

    @contextlib.contextmanager
    def begin(self, index: int, state: torch.Tensor) -> Iterator[None]:
        """Make the model's forward begin at layer ``index`` with what :meth:`run` gave; behind the last one: at the head."""
        patches: dict[nn.Module, Callable[..., Any]] = {layer: self._identity for _, layer in self.layers[:index]}
        if index:

            def give(*arguments: Any, **keywords: Any) -> Any:
                return self._output(state.to(_hidden_of(arguments, keywords).device))

            give.skips = True  # type: ignore[attr-defined]
            patches[self.layers[index - 1][1]] = give
        if index < len(self.layers):
            forward, hidden = self.layers[index][1].forward, _first(self._output(state))

            def inject(*arguments: Any, **keywords: Any) -> Any:
                moved = hidden.to(_hidden_of(arguments, keywords).device)
                if arguments:
                    return forward(moved, *arguments[1:], **keywords)
                return forward(**{**keywords, "hidden_states": moved})

            patches[self.layers[index][1]] = inject
        with _replaced(patches):
            yield

    @contextlib.contextmanager
    def end(self, index: int) -> Iterator[None]:
        """End the model's forward behind layer ``index``; :meth:`run` gives what it hands on."""

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            raise StopForward(self.state(output))

        handle = self.layers[index][1].register_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def end_at_head(self) -> Iterator[None]:
        """End the model's forward in front of its head, when all hooks of the head have seen what it is given."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()

        def leave(module: nn.Module, arguments: Any) -> None:
            raise StopForward

        handle = None if head is None else head.register_forward_pre_hook(leave)
        try:
            with contextlib.suppress(StopForward):
                yield
        finally:
            if handle is not None:
                handle.remove()

    def run(self, inputs: Inputs) -> Any:
        """Return the state where :meth:`end` ends the forward, or what a hook ended it with."""
        try:
            self.model(**inputs)
        except StopForward as stop:
            return stop.output
        raise CoverageError("A block of the model was not called.", "", "Switch layer dropping off.")

    def first_inputs(self, inputs: Inputs) -> torch.Tensor:
        """Hidden states in front of layer 0."""

        def leave(*arguments: Any, **keywords: Any) -> Any:
            raise StopForward(_hidden_of(arguments, keywords))

        leave.skips = True  # type: ignore[attr-defined]
        with _replaced({self.layers[0][1]: leave}):
            return self.run(inputs)


@contextlib.contextmanager
def recorded(
    stack: Sequence[nn.Module], state: Callable[[Any], torch.Tensor] = _first
) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Hidden states before every layer and ``state`` of its output, ``(B, T, d)`` by its index, once the model has run."""
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def listen(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            states[i] = _hidden_of(arguments, keywords), state(output)

        return hook

    with contextlib.ExitStack() as hooks:
        for i, layer in enumerate(stack):
            hooks.callback(layer.register_forward_hook(listen(i), with_kwargs=True).remove)
        yield states


def unwalkable(model: nn.Module, names: Iterable[str], runs: Sequence[Batch]) -> str:
    """Why this model cannot be run one layer at a time, or an empty string.

    Layers that share state (key and value caches, inputs per layer) are found by running a piece of one sequence both ways.
    ``names`` are the matrices that are asked for, ``runs`` what it will run on.
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
    stack = tuple(id(layer) for _, layer in replay.layers)
    if _FAITHFUL.get(model) == stack:
        return ""
    try:
        reason = _unfaithful(replay, runs[0])
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, CoverageError) as error:
        return f"a layer does not run alone ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    if not reason and mapped(model) is not None:  # all layers came from their files for it: once is enough
        _FAITHFUL[model] = stack
    return reason


def _unfaithful(replay: Replay, batch: Batch) -> str:
    """Where a piece of one sequence gives other values layer by layer than as a whole."""
    tiny = {k: v[:1, : min(8, v.shape[1])] for k, v in batch.kwargs.items() if v.ndim == 2}
    with inference(replay.model):
        replay.probe(tiny)
        expected = _logits(replay.model(**tiny))
        hidden = replay.first_inputs(tiny)
        for i in range(len(replay.layers)):
            with replay.begin(i, hidden), replay.end(i):
                hidden_after = replay.run(tiny)
            if hidden_after is None or _first(replay._output(hidden_after)).shape != _first(replay._output(hidden)).shape:
                return f"{replay.layers[i][0]} changes the shape of its hidden states"
            hidden = hidden_after
        with replay.begin(len(replay.layers), hidden):
            logits = _logits(replay.model(**tiny))
    scale = float(expected.abs().max().clamp_min(1e-6))
    if not float((logits - expected).abs().max()) <= _CLOSE.get(hidden.dtype, 5e-2) * scale:
        return "its layers give other values one at a time than all together: they share state"
    return ""


def _logits(output: Any) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.logits).float()
