"""Routed experts: where a layer has them, which of them a token is given, and the same layer with fewer of them.

transformers keeps the experts of a layer in one module and calls it in one of two ways. ``CALLS`` has both::

    chosen     experts(x, index, weights)    x (T, d); each token names its experts and their weights, (T, k)
    all        experts(x)                    x (E T, d): every expert is given all tokens, zeros for those of another

What else has an entry per expert (rows of the router, biases, correction biases) is found by its length beside the experts.
A layer is tried on a few random tokens before it is trusted, and one that is called in another way is refused by name.

Experts are masked by a router without their rows, which is what a model without them has. Where the router first chooses
groups of experts, all groups must stay equally large for that; there the correction bias rules single experts out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..errors import UnknownStructure
from .blocks import config_of, configs_of, is_convolution, layers, text_config, transposed

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
FIRST, LAST = ("gate_up_proj", "up_proj"), "down_proj"
GROUPS = ("num_group", "n_group")
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
EXPERTS_KEPT = "experts_kept"  # of a config: experts by layer, where they differ
NEVER = -1e4  # added to a score between 0 and 1 plus a correction: never among the best
_TRIED = 6
_REMEDY = "Prune its weights instead: layerbudget plan sparsity MODEL, then apply."


class _Called(Exception):
    """Ends a block's forward where it calls its experts."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLayer:
    """The routed experts of one layer.

    Attributes:
        name: Full name of the block that has router and experts, such as ``model.layers.3.mlp``.
        layer: Full name of the decoder layer.
        count: E, the experts.
        top_k: Experts that a token is given.
        groups: Into which the router divides them; a token is given experts of ``best_groups`` of them.
        d: Width of a token.
    """

    name: str
    layer: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    count: int
    top_k: int
    groups: int
    best_groups: int
    d: int

    @property
    def floor(self) -> int:
        """The fewest experts that its routing works with, the same number in every group."""
        if self.groups == 1:
            return self.top_k
        return self.groups * max(2, -(-self.top_k // self.best_groups))  # groups are judged by their two best

    @property
    def modules(self) -> tuple[str, ...]:
        """Full names of the experts' matrices."""
        child = next(n for n, m in self.block.named_children() if m is self.experts)
        return tuple(f"{self.name}.{child}.{n}" for n, p in self.experts.named_parameters(recurse=False) if p.ndim == 3)

    @property
    def numel(self) -> int:
        """Parameters of one expert, with its row of the router."""
        per_expert = sum(t.numel() for _, _, t in self._per_expert() if isinstance(t, nn.Parameter))
        return (sum(p.numel() for p in self.experts.parameters()) + per_expert) // self.count

    def _per_expert(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Tensors outside the experts that have an entry per expert: owner, name, tensor."""
        owners = [self.block, *self.router.modules()]
        tensors = [(o, n, t) for o in owners for n, t in (*o._parameters.items(), *o._buffers.items())]
        shaped = [(o, n, t) for o, n, t in tensors if t is not None and t.ndim]
        return [(o, n, t) for o, n, t in shaped if len(t) == self.count or (n in CORRECTIONS and t.shape[-1] == self.count)]

    def _corrections(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        return [(o, n, t) for o, n, t in self._per_expert() if n in CORRECTIONS]

    # --- masks ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def only(self, kept: torch.Tensor) -> Iterator[None]:
        """Inside, the router may choose these experts only, indices in increasing order; weights are not copied."""
        if len(kept) == self.count:
            yield
            return
        with contextlib.ExitStack() as undo:
            if self.groups > 1:
                gone = torch.ones(self.count, dtype=torch.bool)
                gone[kept] = False
                for owner, name, tensor in self._corrections():
                    _put(owner, name, torch.where(gone.to(tensor.device), NEVER, tensor.detach()), undo)
            else:
                for owner, name, tensor in self._per_expert():
                    _put(owner, name, self._some(tensor, kept), undo)
                for owner, name in self._numbers((self.block, self.router)):
                    undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, len(kept))
                before, behind = _renamed(kept, self.count)
                undo.callback(self.experts.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                undo.callback(self.experts.register_forward_hook(behind, with_kwargs=True, prepend=True).remove)
            yield

    def _some(self, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The entries of some experts, along the first axis that has one for each."""
        return tensor.detach().index_select(list(tensor.shape).index(self.count), index.to(tensor.device))

    def _numbers(self, owners: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
        return [(o, name) for o in owners for name in COUNTS if getattr(o, name, None) == self.count]

    def call(self, x: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the block hands its experts for tokens ``(T, d)``."""

        def leave(module: nn.Module, arguments: Any, keywords: Any) -> None:
            raise _Called(arguments, keywords)

        handle = self.experts.register_forward_pre_hook(leave, with_kwargs=True)
        try:
            self.block(x[None])
        except _Called as called:
            return called.args[0], called.args[1]
        finally:
            handle.remove()
        raise UnknownStructure(f"{self.name} ({type(self.block).__name__}) did not call its experts.", "", _REMEDY)

    @torch.no_grad()
    def gates(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Weights of the experts for tokens ``(T, d)``, ``(T, E)``; zero for those that are not chosen."""
        with self.only(torch.arange(self.count) if kept is None else kept):
            arguments, keywords = self.call(x)
        values = [*arguments, *keywords.values()]
        if len(values) == 1:
            return values[0].view(self.count, len(x), -1).any(-1).T.float()
        index, weights = _choice(values)
        return torch.zeros(len(x), self.count, device=x.device).scatter_add_(1, index, weights.float())

    @torch.no_grad()
    def odds(self, x: torch.Tensor) -> torch.Tensor | None:
        """Weights ``(T, E)`` of all experts for tokens ``(T, d)`` that are given all; None where the router has no such."""
        try:
            with self._choosing_all():
                weights = self.gates(x)
        except (RuntimeError, ValueError, IndexError, AssertionError):  # it chooses a number of its own
            return None
        return weights if bool(weights.isfinite().all() and (weights >= 0).all()) else None

    @torch.no_grad()
    def outputs(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return what every expert alone makes of the tokens with weight one, ``(T, d)`` each, in their order."""
        arguments, keywords = self.call(x)
        values = [*arguments, *keywords.values()]
        if len(values) == 1:  # its input is scaled by a score that does not depend on the others
            yield from self.experts(self._scaled(x)).view(self.count, len(x), -1)
            return
        index, weights = _choice(values)
        for expert in range(self.count):
            swapped = {id(index): torch.full_like(index[:, :1], expert), id(weights): torch.ones_like(weights[:, :1])}
            swapped_arguments = [swapped.get(id(v), v) for v in arguments]
            yield self.experts(*swapped_arguments, **{k: swapped.get(id(v), v) for k, v in keywords.items()})

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Every token as every expert would be given it, ``(E T, d)``: the router chooses all."""
        with self._choosing_all():
            return cast(torch.Tensor, self.call(x)[0][0])

    @contextlib.contextmanager
    def _choosing_all(self) -> Iterator[None]:
        router, top_k = cast(Any, self.router), cast(Any, self.router).top_k
        router.top_k = self.count
        try:
            yield
        finally:
            router.top_k = top_k

    def check(self) -> None:
        """Refuse a layer whose experts are called in a way that is not known, or that do not add up."""
        kind = f"{self.name} ({type(self.block).__name__})"
        if self.groups > 1 and not self._corrections():
            raise UnknownStructure(
                f"The router of {kind} chooses among {self.groups} groups and has no correction bias.",
                "Single experts of a group cannot be ruled out there.",
                _REMEDY,
            )
        parameter = next(self.experts.parameters())
        x = torch.randn(_TRIED, self.d, generator=torch.Generator().manual_seed(0)).to(parameter)
        try:
            with torch.no_grad():
                arguments, keywords = self.call(x)
                expected = self.experts(*arguments, **keywords).float()
            gates, size = self.gates(x), self.count // self.groups
            fewest = torch.tensor([e for e in range(self.count) if e % size < self.floor // self.groups])
            if self.gates(x, fewest).sum(0).count_nonzero() > len(fewest):
                raise ValueError("A router without some experts chooses others.")
            made = sum(g[:, None] * y.float() for g, y in zip(gates.T, self.outputs(x), strict=True))
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, StopIteration) as error:
            raise UnknownStructure(f"The experts of {kind} are called in a way that is not known.", "", _REMEDY) from error
        expected = expected.view(-1, len(x), self.d).sum(0)
        if not torch.allclose(expected, torch.as_tensor(made), rtol=3e-2, atol=3e-2 * float(expected.abs().max())):
            raise UnknownStructure(f"The experts of {kind} do not add up by the weights of its router.", "", _REMEDY)

    # --- fewer of them ------------------------------------------------------------------------------------------------------

    def cut(self, kept: Sequence[int]) -> None:
        """Remove all other experts, their rows of the router and their biases, in place."""
        index = torch.tensor(sorted(kept))
        owned = [(self.experts, n, p) for n, p in self.experts.named_parameters(recurse=False) if len(p) == self.count]
        for owner, name, tensor in (*owned, *self._per_expert()):
            _put(owner, name, self._some(tensor, index).clone())
        for owner, name in self._numbers((self.block, self.router, self.experts)):
            setattr(owner, name, len(index))
        if isinstance(self.router, nn.Linear):
            self.router.out_features = len(index)


def _put(owner: nn.Module, name: str, tensor: torch.Tensor, undo: contextlib.ExitStack | None = None) -> None:
    """Give a module another parameter or buffer of a name; ``undo`` puts the old one back."""
    tensors: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    if undo is not None:
        undo.callback(tensors.__setitem__, name, tensors[name])
    if tensors is owner._parameters:
        tensor = nn.Parameter(tensor, requires_grad=undo is None and tensors[name].requires_grad)
    tensors[name] = tensor


def _choice(values: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and the weights, ``(T, k)``, among what experts are given."""
    index = next(v for v in values if isinstance(v, torch.Tensor) and not v.is_floating_point())
    return index, next(v for v in values[1:] if isinstance(v, torch.Tensor) and v.shape == index.shape and v is not index)


def _renamed(kept: torch.Tensor, count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks of all experts, behind a router that knows only some: they put its names, and tokens, in their places."""

    def before(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Put the router's names for experts into the places that these have."""
        values = [*arguments, *keywords.values()]
        if len(values) == 1:
            tokens = arguments[0].view(len(kept), -1, arguments[0].shape[-1])
            all_of = tokens.new_zeros(count, *tokens.shape[1:])
            all_of[kept.to(tokens.device)] = tokens
            return (all_of.view(-1, tokens.shape[-1]),), keywords
        index, _ = _choice(values)
        named = kept.to(index.device)[index].to(index.dtype)
        keywords = {k: named if v is index else v for k, v in keywords.items()}
        return tuple(named if v is index else v for v in arguments), keywords

    def behind(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: torch.Tensor) -> Any:
        if len(arguments) + len(keywords) > 1:
            return None
        return output.view(count, -1, output.shape[-1])[kept.to(output.device)].reshape(-1, output.shape[-1])

    return before, behind


# --- of a model ---------------------------------------------------------------------------------------------------------------


def find_experts(model: nn.Module) -> tuple[ExpertLayer, ...]:
    """Routed experts of every layer that has some, in order.

    Raises:
        UnknownStructure: There are none, or they are kept in a way that is not known.
    """
    experts = [e for name, layer in layers(model) for e in _of_layer(name, layer)]
    if not experts:
        raise UnknownStructure(
            f"{type(model).__name__} has no routed experts.",
            "Models with experts have a router in some layers.",
            "Remove heads and widths instead: layerbudget plan shapes MODEL.",
        )
    return tuple(experts)


def _of_layer(layer_name: str, layer: nn.Module) -> Iterator[ExpertLayer]:
    parents = {child: (name, module) for name, module in layer.named_modules() for child in module.children()}
    for name, module in layer.named_modules():
        several = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts" and len(module) > 1
        stacks = {n: p for n, p in module._parameters.items() if p is not None and p.ndim == 3 and not is_convolution(module)}
        if several or stacks:
            place, block = parents[module]
            full = ".".join(filter(None, (layer_name, place)))
            routers = [m for m in block.children() if m is not module and isinstance(getattr(m, "top_k", None), int)]
            if several or len(routers) != 1 or LAST not in stacks or not set(FIRST) & set(stacks):
                raise UnknownStructure(
                    f"{full} ({type(block).__name__}) keeps its experts in a way that is not known.",
                    f"Known are {LAST} and one of {' and '.join(FIRST)}, three-dimensional, beside a router with a top_k.",
                    _REMEDY,
                )
            yield _described(full, layer_name, block, routers[0], module)


def _described(name: str, layer: str, block: nn.Module, router: Any, experts: Any) -> ExpertLayer:
    last = experts.down_proj
    said = (getattr(m, n, None) for n in GROUPS for m in (router, block))
    groups = next((n for n in said if isinstance(n, int) and n > 1), 1)
    best = next((n for m in (router, block) if isinstance(n := getattr(m, "topk_group", None), int)), groups)
    return ExpertLayer(
        name=name,
        layer=layer,
        block=block,
        router=router,
        experts=experts,
        count=len(last),
        top_k=router.top_k,
        groups=groups,
        best_groups=min(best, groups),
        d=last.shape[2 if transposed(experts) else 1],
    )


def check_experts(experts: Sequence[ExpertLayer]) -> None:
    """Try one layer of every kind; errors as of :meth:`ExpertLayer.check`."""
    for layer in {type(e.block): e for e in reversed(experts)}.values():
        layer.check()


@contextlib.contextmanager
def masked(experts: Sequence[ExpertLayer], kept: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Inside, the routers of these layers may choose the experts of these indices only, by :attr:`ExpertLayer.name`.

    Nothing is changed but what each block does while it runs, so that layers may come and go.
    """
    with contextlib.ExitStack() as undo:
        for layer in experts:
            if layer.name in kept and len(kept[layer.name]) < layer.count:
                _mask(layer, torch.tensor(sorted(kept[layer.name])), undo)
        yield


def _mask(layer: ExpertLayer, kept: torch.Tensor, undo: contextlib.ExitStack) -> None:
    original, override = layer.block.forward, layer.block.__dict__.get("forward")

    def forward(*arguments: Any, **keywords: Any) -> Any:
        with layer.only(kept):
            return original(*arguments, **keywords)

    layer.block.forward = forward
    undo.callback(layer.block.__dict__.pop, "forward", None)
    if override is not None:
        undo.callback(setattr, layer.block, "forward", override)


def cut_experts(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> None:
    """Remove all experts but those of these indices, by :attr:`ExpertLayer.name`, in place; the config follows.

    Where the layers are left with different numbers, the config says them as ``experts_kept``, which
    :func:`~layerbudget.models.loading.load_model` reads.
    """
    experts = find_experts(model)
    before = max(e.count for e in experts)
    for layer in experts:
        if layer.name in kept:
            layer.cut(kept[layer.name])
    left = {e.name: e.count for e in find_experts(model)}
    config, most = text_config(config_of(model)), max(left.values())
    for each in {id(c): c for c in (config, *configs_of(model))}.values():
        for name in COUNTS:
            if getattr(each, name, None) == before:
                setattr(each, name, most)
    for module in model.modules():
        for name in COUNTS:
            if name in module.__dict__ and module.__dict__[name] == before and not any(module in e for e in _inside(experts)):
                setattr(module, name, most)
    uneven = len(set(left.values())) > 1
    if uneven:
        setattr(config_of(model), EXPERTS_KEPT, left)
    elif hasattr(config_of(model), EXPERTS_KEPT):
        delattr(config_of(model), EXPERTS_KEPT)


def _inside(experts: Sequence[ExpertLayer]) -> list[set[nn.Module]]:
    return [set(e.block.modules()) for e in experts]


def uneven(model_class: Any, counts: Mapping[str, int]) -> Any:
    """The same class of models, made with so many experts per layer: what ``from_pretrained`` fills with a checkpoint's."""

    def make(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        model_class.__init__(self, config, *arguments, **keywords)
        for layer in find_experts(self):
            layer.cut(range(counts[layer.name]))

    return type(model_class.__name__, (model_class,), {"__init__": make, "__module__": model_class.__module__})
