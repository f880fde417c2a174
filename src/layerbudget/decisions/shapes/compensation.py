r"""Compensation: what the matrix behind removed units becomes, so that the model misses them less.

Of ``W``, ``(d_out, d_in)``, the columns ``S`` stay. Its inputs are ``x`` in the model that has been cut so far; ``s`` is the
dense model's residual stream behind this part, ``r`` the present model's stream without what this part adds. Then

    refit     V_0 = argmin_V E || V x_S - W x ||^2
    stream    argmin_V E || V x_S - (s - r) ||^2 + rho || V - V_0 ||^2
              = V_0 + (C - V_0 H_SS) (H_SS + rho)^-1,     H = sum x x',  C = sum (s - r) x_S',

``rho`` relative to the mean of the diagonal of ``H_SS``. It, and the damping of ``V_0``, are chosen for every matrix by the
error on sequences that the fit has not seen (four folds; ``inf``, which is ``V_0``, is among the candidates): a short text
overfits the stream easily. Where the matrix has a bias, moments are centred and the bias takes the mean of what is left. The
stream needs layers that add their parts to it as they are: ``h + attention + MLP``, in sequence or side by side.

The first is the layer-wise objective of SparseGPT (arXiv 2301.00774) for whole units; the second corrects for the inputs' own
error as GPTAQ (arXiv 2504.02692) does for quantisation, one step further out, at the stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput, UnknownStructure
from ...execution.modes import inference
from ...execution.processes import alone, everyone, process_group
from ...execution.replay import StopForward
from ...execution.walk import Walk
from ...models.blocks import layers
from .layouts import Attention, Mlp, Where, find_attention, find_mlp
from .program import WAYS
from .units import Remake, damped, refitted

_STIFFNESS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
_DAMPINGS = (1.0, 10.0, 30.0)  # times the damping that was asked for
_FOLDS = 4
_NEAR = 2e-2  # half precision


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Sums over tokens of a matrix's present inputs ``x`` and of what it should give, ``y``; in double precision."""

    gram: torch.Tensor  # sum x x', (d_in, d_in)
    cross: torch.Tensor  # sum y x', (d_out, d_in)
    inputs: torch.Tensor  # sum x
    outputs: torch.Tensor  # sum y
    tokens: int

    @classmethod
    def of(cls, x: torch.Tensor, y: torch.Tensor) -> Moments:
        """Moments of tokens, ``(tokens, d_in)`` and ``(tokens, d_out)``."""
        x, y = x.double(), y.double()
        return cls(gram=x.T @ x, cross=y.T @ x, inputs=x.sum(0), outputs=y.sum(0), tokens=len(x))

    def plus(self, other: Moments, sign: int = 1) -> Moments:
        """The sum with others, or what is left without them."""
        return Moments(**{name: value + sign * getattr(other, name) for name, value in self.__dict__.items()})

    def columns(self, keep: torch.Tensor, *, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """``C`` and ``H_SS``, ``(d_out, kept)`` and ``(kept, kept)``."""
        cross, inner = self.cross[:, keep], self.gram[keep][:, keep]
        if not centred:
            return cross, inner
        mean = self.inputs[keep] / self.tokens
        return cross - torch.outer(self.outputs, mean), inner - self.tokens * torch.outer(mean, mean)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Aim:
    """Targets of a matrix: moments of some folds of the sequences."""

    folds: list[Moments]

    @property
    def total(self) -> Moments:
        """Moments of all sequences."""
        first, *others = self.folds
        for other in others:
            first = first.plus(other)
        return first

    def remake(self, module: nn.Module, damping: float, stiffness: Sequence[float] = _STIFFNESS) -> Remake:
        """The way of ``stream`` for a matrix; a bias is replaced when it is taken. ``damping`` is the least that is tried."""
        bias = cast("nn.Parameter | None", module.bias)

        def make(weight: torch.Tensor, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            """The weights behind the inputs ``keep``, ``(out, kept)``."""
            total = self.total
            best, rho = self.best(weight, keep, [damping * d for d in _DAMPINGS], stiffness, centred=bias is not None)
            fit = _Fit.of(total, keep, centred=bias is not None)
            made, missing = fit.missing(weight, best)
            made = made + missing * fit.shares([rho])[0] @ fit.vectors.T
            if bias is not None:
                moved = (total.outputs - made @ total.inputs[keep]) / total.tokens
                module.bias = nn.Parameter(moved.to(bias), bias.requires_grad)
            return made

        return make

    def best(
        self, weight: torch.Tensor, keep: torch.Tensor, dampings: Sequence[float], stiffness: Sequence[float], *, centred: bool
    ) -> tuple[float, float]:
        """The damping and stiffness with the least error on folds that their fit has not seen; the first of each without.

        Several processes share the folds, and have the same ones.
        """
        if len(self.folds) < 2:
            return dampings[0], stiffness[0]
        total, group, each = self.total, everyone(), dict[int, np.ndarray]()
        for number in range(group.rank, len(self.folds), group.size):
            fold, errors = self.folds[number], weight.new_zeros(len(dampings), len(stiffness), dtype=torch.float64)
            fit = _Fit.of(total.plus(fold, -1), keep, centred=centred)
            cross, inner = fold.columns(keep, centred=centred)
            cross, inner = cross @ fit.vectors, fit.vectors.T @ inner @ fit.vectors
            for i, damping in enumerate(dampings):
                start, missing = fit.missing(weight, damping)
                start, shares = start @ fit.vectors, fit.shares(stiffness)
                short = start @ inner - cross
                slope, curve = 2 * (missing * short).sum(0), (missing.T @ missing) * inner
                errors[i] = ((short - cross) * start).sum() + shares @ slope + (shares @ curve * shares).sum(1)
            each[number] = errors.cpu().numpy()
        found = {number: errors for part in group.gather(each) for number, errors in part.items()}
        least = int(np.argmin(sum(found[number] for number in range(len(self.folds)))))
        i, j = divmod(least, len(stiffness))
        return dampings[i], stiffness[j]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Fit:
    """Moments that the columns that stay are fitted to, and the basis in which those of their inputs are diagonal."""

    gram: torch.Tensor
    keep: torch.Tensor
    cross: torch.Tensor
    inner: torch.Tensor
    values: torch.Tensor
    vectors: torch.Tensor

    @classmethod
    def of(cls, moments: Moments, keep: torch.Tensor, *, centred: bool) -> _Fit:
        """One eigendecomposition for every damping and stiffness."""
        cross, inner = moments.columns(keep, centred=centred)
        values, vectors = torch.linalg.eigh(inner)
        return cls(gram=moments.gram, keep=keep, cross=cross, inner=inner, values=values, vectors=vectors)

    def missing(self, weight: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The refit alone, and what it leaves of the target, in the basis; ``(d_out, kept)`` both."""
        start = refitted(weight, damped(self.gram, damping), self.keep)
        return start, (self.cross - start @ self.inner) @ self.vectors

    def shares(self, stiffness: Sequence[float]) -> torch.Tensor:
        """The share that every direction adds of what is missing, ``(stiffness, kept)``: 0 where stiffness is infinite."""
        scale = float(self.inner.diagonal().mean()) or 1.0
        return torch.stack([1 / (self.values + rho * scale + 1e-12) for rho in stiffness])


class Stream:
    """The dense model's residual stream beside a walk, captured, whose layers will be cut one after the other."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.dense = [walk.store.get(batch).clone() for batch in range(walk.batches)]
        self.middle: list[torch.Tensor] = []
        self.end: list[torch.Tensor] = []

    def look(self) -> None:
        """Run the walk's present layer, while it is whole, on what the dense model gives it."""
        self.middle, self.end = [], []
        name, layer = self.walk.layers[self.walk.position]
        names = [find(layer, name).consumer for find in (find_attention, find_mlp)]
        for batch, before in enumerate(self.dense):
            seen: dict[str, torch.Tensor] = {}
            hooks = {n: lambda _, __, y, n=n, seen=seen: seen.__setitem__(n, y.float()) for n in names}
            out = self._run(batch, before, hooks)
            if out is None or len(seen) < len(names):
                raise CoverageError(f"{names[0]} was not called.", "", "Report the model.")
            out = out.float()
            adds = all(y.numel() == out.numel() for y in seen.values())  # Gemma 3n carries several streams
            if adds:
                a, m = (seen[n].reshape(out.shape) for n in names)  # OPT's MLP sees its tokens in one row
                middle = before.float() + a
                adds = batch > 0 or bool((middle + m - out).norm() <= _NEAR * (a + m).norm())
            if not adds:
                raise UnknownStructure(
                    f"The layer {name} does not add its attention and its MLP to the stream as they are.",
                    "Compensation of the stream needs layers that do (not Gemma 2 or 3, whose norms stand between).",
                    "Use compensate='refit'.",
                )
            self.middle.append(middle)
            self.end.append(out)
            self.dense[batch] = out.to(before.dtype)

    def _run(self, batch: int, hidden: torch.Tensor | None, hooks: dict[str, Any]) -> torch.Tensor | None:
        """Output of the present layer on a batch, with hooks on some of its matrices."""
        handles = [self.walk.model.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]
        try:
            return self.walk.forward(self.walk.position, batch, hidden)
        finally:
            for handle in handles:
                handle.remove()

    def aim(self, where: Where) -> Aim:
        """Targets of the matrix behind a part in the model as it has been cut so far."""
        folds, group = dict[int, Moments](), process_group()
        for batch in range(self.walk.batches):
            x, y = self._wanted(batch, where)
            mask = self.walk.token_mask(batch)
            for row in range(len(x)):
                real = slice(None) if mask is None else mask[row]
                place = group.rank + group.size * (batch * self.walk.batch_size + row)  # in the text of all processes
                moments, fold = Moments.of(x[row][real], y[row][real]), place % _FOLDS
                folds[fold] = folds[fold].plus(moments) if fold in folds else moments
        return Aim(folds=list(folds.values()) if group.size == 1 else _together(folds))

    def _wanted(self, batch: int, where: Where) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of a matrix, and what it should give."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def look(_: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            seen.append((arguments[0], output))
            if isinstance(where, Attention):
                raise StopForward

        out = self._run(batch, None, {where.consumer: look})
        (x, current), end = seen[0], self.end[batch]
        if isinstance(where, Mlp):
            wanted = end - (cast(torch.Tensor, out).float() - current.float().reshape(end.shape))
        else:
            wanted = self.middle[batch] - self.walk.store.get(batch).float()
        return x.reshape(*end.shape[:2], -1), wanted


def _together(folds: Mapping[int, Moments]) -> list[Moments]:
    """The folds of all processes, each of which has seen some sequences of some folds."""
    group, some = process_group(), next(iter(folds.values()))
    counts = group.sum(np.array([folds[k].tokens if k in folds else 0 for k in range(_FOLDS)], dtype=np.float64)).astype(int)
    parts = [folds.get(k) or some.plus(some, -1) for k in np.flatnonzero(counts).tolist()]
    sums = [[m.gram, m.cross, m.inputs, m.outputs] for m in parts]
    group.reduce([tensor for each in sums for tensor in each])
    return [
        Moments(gram=gram, cross=cross, inputs=inputs, outputs=outputs, tokens=int(tokens))
        for (gram, cross, inputs, outputs), tokens in zip(sums, counts[counts > 0], strict=True)
    ]


def ways_of(model: nn.Module, data: CalibrationSet, word: str = "auto") -> str:
    """A way by name; ``auto`` is ``stream`` where the layers allow it, else ``refit``."""
    if word != "auto":
        if word not in WAYS:
            raise InvalidInput(f"There is no compensation {word!r}.", f"Ways are {', '.join(WAYS)}.", "Use auto.")
        return word
    with alone(), inference(model):
        walk = Walk(model, data.select(slice(0, 1)), batch_size=1)
        walk.capture()
        try:
            stream = Stream(walk)
            for i in range(len(layers(model))):
                walk.position = i
                stream.look()
        except UnknownStructure:
            return "refit"
        finally:
            walk.close()
    return "stream"
