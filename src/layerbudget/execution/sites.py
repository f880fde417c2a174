"""See the inputs and output gradients of every weight matrix during one backward pass.

For ``y_t = W a_t`` the gradient of sequence i is ``S_i = sum_t b_it a_it'``, ``a`` seen in a forward hook and
``b = dl/dy`` in a tensor hook on the output. With all weights frozen no ``dW`` is ever computed, so a pass costs less
than a plain forward and backward. Parameters that no Linear owns (fused experts) are read from autograd itself, one
sequence per batch. Everything is put back when the pass ends, also after an exception.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CoverageError
from ..models.blocks import end_modules, is_conv1d, layer_lists, pretrained, weight_of
from ..records import Block
from .modes import prepared


@dataclasses.dataclass(eq=False)
class Site:
    """Weight matrices that were given the same input in one forward pass (q, k and v; gate and up).

    Attributes:
        a: Inputs ``(B, T, d_in)``; of an embedding the rows that are looked up, ``(B, T, 1)``, which are whole numbers.
        names: Weight matrices in order of their call.
        b: Output gradients by name, ``(B, T, d_out)``, as they arrive.
        open: By name, the calls of this forward pass that are still to come: a matrix used twice has its gradient whole at 0.
    """

    a: torch.Tensor
    source: torch.Tensor
    names: list[str]
    b: dict[str, torch.Tensor]
    open: Mapping[str, int] = dataclasses.field(default_factory=dict)


def tracked(model: nn.Module, blocks: Sequence[Block]) -> tuple[dict[nn.Module, str], dict[str, nn.Parameter]]:
    """Weight matrices of some blocks as ``({hooked module: name}, {name: parameter read from autograd})``.

    Every module that shares a tied weight is hooked under the one name that the blocks use. A name may also be that of a whole
    module without a weight of its own (an MLP, a block of experts): what it is given and what it returns are then seen.
    """
    names: dict[int, str] = {}
    direct: dict[str, nn.Parameter] = {}
    whole: dict[nn.Module, str] = {}
    for block in blocks:
        for record in block.modules:
            if (module := _whole(model, record.name)) is not None:
                whole[module] = record.name
                continue
            owner, parameter = weight_of(model, record.name, packed=True)
            if isinstance(owner, nn.Linear | nn.Embedding) or is_conv1d(owner):
                names[id(parameter)] = record.name
            else:
                direct[record.name] = parameter
    hooked: dict[nn.Module, str] = {
        module: names[id(module.weight)]
        for module in model.modules()
        if (isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)) and id(module.weight) in names
    }
    return hooked | whole, direct


def _whole(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that name, where it has no weight of its own."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return None if isinstance(getattr(module, "weight", None), torch.Tensor) else module


def refuse_direct(model: nn.Module, blocks: Sequence[Block], why: str, *, routers: bool = False) -> None:
    """Refuse matrices that no Linear owns, before anything runs, and say why.

    With ``routers`` those routers too that are a Linear and return whom they chose: nothing can be added to their output.
    """
    hooked, direct = tracked(model, blocks)
    names = [*direct, *(name for module, name in hooked.items() if routers and hasattr(module, "top_k"))]
    if names:
        raise CoverageError(
            f"{names[0]} is not a plain Linear: {why} ({len(names)} such matrices).",
            "Linear and Conv1D matrices are known here.",
            f"Leave them out: --exclude '{owners_of(names)}' (exclude= in Python), or score by another estimator: fisher-gram.",
        )


def owners_of(names: Sequence[str]) -> str:
    """A regular expression that matches matrices and those of their kind in other layers."""
    words = (f"{part[-1]}$" if part[-1] == "router" else f"{part[-2]}[.]" for part in (name.split(".") for name in names))
    return "|".join(dict.fromkeys(words))


class Collector:
    """Context manager that hands every ``(a, b)`` pair of a backward pass to ``consume``, as :class:`Site`.

    Attributes:
        direct: Parameters that are read from autograd, by name; they need batches of one sequence.
        names: All matrices, each once.
        ends: Those of them that are embedding or head.
        seen: Those that have run.
        quiet: Run backwards without handing anything over.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], consume: Callable[[Site], None]) -> None:
        self.model, self.consume = model, consume
        self.hooked, self.direct = tracked(model, blocks)
        self.names = [*dict.fromkeys(self.hooked.values()), *self.direct]
        stacks = tuple(f"{name}." for name, _ in layer_lists(model))
        outside = [name for name in self.names if not name.startswith(stacks)]
        known = {m.name for m in end_modules(model)} if outside else set()
        self.ends = [name for name in outside if name in known]
        self.seen: set[str] = set()
        self.quiet = False
        self._open: dict[str, int] = {}
        self._size, self._length, self._retain = 1, 1, False
        self._pending: list[Site] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Collector:
        with self._stack:
            self._stack.enter_context(prepared(self.model))
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
            for parameter in self.direct.values():
                parameter.requires_grad_(True)
            for module, name in self.hooked.items():
                handle = module.register_forward_hook(self._hook(name))
                self._stack.callback(handle.remove)
            if any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules()):
                handle = pretrained(self.model).get_input_embeddings().register_forward_hook(_require_grad)
                self._stack.callback(handle.remove)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pending.clear()
        self._stack.close()

    def backward(
        self, loss: torch.Tensor, *, size: int, length: int, retain: bool = False, gradient: torch.Tensor | None = None
    ) -> None:
        """Run the backward pass over ``size`` sequences of ``length`` positions; deliver every site.

        ``loss`` is a summed loss, or hidden states whose ``gradient`` is given; ``retain`` keeps the graph for another pass.
        """
        self._size, self._length, self._retain = size, length, retain
        for parameter in self.direct.values():
            parameter.grad = None
        if loss.requires_grad:
            torch.autograd.backward(loss, gradient, retain_graph=retain)
        for site in [s for s in self._pending if s.b]:
            self._deliver(site)
        if not retain:
            self.forget()

    @contextlib.contextmanager
    def aside(self, size: int, length: int) -> Iterator[None]:
        """Let others run backwards over ``size`` sequences of ``length`` positions: nothing is handed over, graphs are kept."""
        self._size, self._length, self._retain, before = size, length, True, self.quiet
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = before

    def forget(self) -> None:
        """Forget the forwards that have been there: nobody runs backwards through them any more."""
        self._pending.clear()
        self._open.clear()

    def _hook(self, name: str) -> Callable[..., Any]:
        """Forward hook of one matrix: open a site for its input, or join the open one; wait for the output's gradient."""

        def forward(module: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor | None:
            """Open a site for a matrix, or join that of the same input."""
            if not torch.is_grad_enabled():
                return None
            self.seen.add(name)
            output = result if isinstance(result, torch.Tensor) else _product(module, inputs[0], result, name)
            if not output.requires_grad:
                output.requires_grad_(True)
            source = inputs[0]
            last = self._pending[-1] if self._pending else None
            site = last if last is not None and last.source is source and name not in last.names else None
            if site is None:
                seen = source.detach() if source.is_floating_point() else source[..., None]
                site = Site(a=seen, source=source, names=[], b={})
                self._pending.append(site)
            site.names.append(name)
            self._open[name] = self._open.get(name, 0) + 1
            place = weakref.ref(output)
            factor = 1.0 if source.is_floating_point() else _factor(module, source, output)
            output.register_hook(lambda grad: self._arrive(site, name, grad * factor if factor != 1.0 else grad, place))
            return result.clone() if result is output and output.is_leaf else None  # Falcon adds to it in place: not to a leaf

        return forward

    def _arrive(self, site: Site, name: str, grad: torch.Tensor, place: Callable[[], torch.Tensor | None]) -> None:
        output = place()
        if output is not None and output.is_leaf:
            output.grad = None  # or the next backward would add to the tensor that a consumer may have kept
        site.b[name] = grad.detach()
        if len(site.b) == len(site.names):
            self._deliver(site)

    def _deliver(self, site: Site) -> None:
        a = self._rows(site.a, site.names[0])
        b = {k: self._rows(v, k) for k, v in site.b.items()}
        ready = Site(a=a, source=site.source, names=list(site.b), b=b, open=self._open)
        for name in ready.names:
            self._open[name] -= 0 if self._retain else 1
        site.b = {}
        if not self._retain:
            site.a = site.source = site.a[:0]
        if not self.quiet:
            self.consume(ready)

    def _rows(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size, length = self._size, self._length
        if size == 1:
            return x.reshape(1, -1, x.shape[-1])
        if x.shape[0] == size and (x.ndim >= 3 or (x.ndim == 2 and length == 1)):
            return x.reshape(size, -1, x.shape[-1])
        if x.ndim == 2 and x.shape[0] == size * length:
            return x.reshape(size, length, -1)
        raise CoverageError(
            f"{name} ran on a tensor of shape {tuple(x.shape)}, in which {size} sequences cannot be told apart.",
            "Rows must be sequences x positions.",
            "Pass batch_size=1.",
        )

    def check_coverage(self) -> None:
        """Refuse a result that misses weight matrices."""
        missing = sorted(set(self.hooked.values()) - self.seen)
        if missing:
            raise CoverageError(
                f"{len(missing)} weight matrices never ran as modules, gradients unknown: {', '.join(missing[:4])}.",
                "Every matrix of a block must be seen.",
                "Leave them out with exclude=, or give data that reaches them.",
            )


def _product(module: Any, x: torch.Tensor, outputs: Any, name: str) -> torch.Tensor:
    """The product ``W x`` among what a module returns with it: a router that is a Linear also returns whom it chose.

    Of a whole module the first tensor.
    """
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return next(part for part in outputs if isinstance(part, torch.Tensor))
    with torch.no_grad():
        expected = nn.functional.linear(x, module.weight, module.bias)
    for part in outputs:
        if isinstance(part, torch.Tensor) and part.shape == expected.shape and part.requires_grad:
            if torch.allclose(part.detach(), expected, rtol=1e-3, atol=1e-5):
                return part
    raise CoverageError(
        f"{name} ({type(module).__name__}) does not return its product, so its gradient is not known.",
        "A Linear returns W x, alone or among other tensors.",
        f"Leave it out: --exclude '{name.split('.')[-1]}$' (exclude= in Python).",
    )


def _factor(module: Any, rows: torch.Tensor, output: torch.Tensor) -> float:
    """Factor of the rows that an embedding looks up (Gemma's)."""
    with torch.no_grad():
        rows_of_weight = nn.functional.embedding(rows, module.weight).double()
        factor = float((rows_of_weight * output).sum() / rows_of_weight.square().sum())
    return 1.0 if abs(factor - 1.0) < 1e-3 else factor


def _require_grad(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.detach().requires_grad_(True)
