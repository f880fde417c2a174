r"""Compensation: what the matrix behind removed units becomes, so that the model misses them less.

Of ``W``, ``(d_out, d_in)``, the columns ``S`` stay. Its inputs are ``x`` in the model that has been cut so far; ``s`` is the
dense model's residual stream behind this part, ``r`` the present model's stream without what this part adds. Then

    none      V = W_S
    refit     V_0 = argmin_V E || V x_S - W x ||^2
    stream    argmin_V E || V x_S - (s - r) ||^2 + rho || V - V_0 ||^2
              = V_0 + (C - V_0 H_SS) (H_SS + rho)^-1,     H = sum x x',  C = sum (s - r) x_S',

``rho`` relative to the mean of the diagonal of ``H_SS``. It, and the damping of ``V_0``, are chosen for every matrix by the
error on sequences that the fit has not seen (four folds; ``inf``, which is ``V_0``, is among the candidates): a short text
overfits the stream easily. ``refit`` gives what the matrix itself would have given *now*; ``stream`` aims at what the dense
model had, so that a layer also makes up for what the layers before it have lost. Where the matrix has a bias, moments are
centred and the bias takes the mean of what is left. Shapes do not change. The stream needs layers that add their parts to it as
they are: ``h + attention + MLP``, in sequence or side by side.

The first is the layer-wise objective of SparseGPT (arXiv 2301.00774) for whole units; the second corrects for the inputs' own
error as GPTAQ (arXiv 2504.02692) does for quantisation, one step further out, at the stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from ...data.calibration import CalibrationSet
from ...errors import CoverageError, InvalidInput, UnknownStructure
from ...execution.modes import inference
from ...execution.processes import process_group
from ...execution.replay import StopForward
from ...execution.walk import Walk
from ...models.blocks import layers
from .attention import Attention, find_attention
from .mlp import Mlp, find_mlp
from .parts import WAYS
from .width import Remake, damped, kept, refitted

STIFFNESS = (math.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
DAMPINGS = (1.0, 10.0, 30.0)  # times the damping that was asked for
FOLDS = 4
_NEAR = 2e-2  # half precision


REMAKES: dict[str, Remake] = {"none": kept, "refit": refitted}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Sums over tokens of a matrix's present inputs ``x`` and of what it should give, ``y``; in double precision.

    Attributes:
        gram: ``sum x x'``, ``(d_in, d_in)``.
        cross: ``sum y x'``, ``(d_out, d_in)``.
        inputs, outputs: ``sum x`` and ``sum y``.
        tokens: How many.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    inputs: torch.Tensor
    outputs: torch.Tensor
    tokens: int

    @classmethod
    def of(cls, x: torch.Tensor, y: torch.Tensor) -> Moments:
        """Of tokens, ``(tokens, d_in)`` and ``(tokens, d_out)``."""
        x, y = x.double(), y.double()
        return cls(gram=x.T @ x, cross=y.T @ x, inputs=x.sum(0), outputs=y.sum(0), tokens=len(x))

    def plus(self, other: Moments, sign: int = 1) -> Moments:
        """The sum with others, or what is left without them."""
        return Moments(**{
            f.name: getattr(self, f.name) + sign * getattr(other, f.name) for f in dataclasses.fields(self)
        })  # fmt: skip

    def columns(self, keep: torch.Tensor, *, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """``C`` and ``H_SS``, ``(d_out, kept)`` and ``(kept, kept)``."""
        cross, inner = self.cross[:, keep], self.gram[keep][:, keep]
        if not centred:
            return cross, inner
        mean = self.inputs[keep] / self.tokens
        return cross - torch.outer(self.outputs, mean), inner - self.tokens * torch.outer(mean, mean)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Aim:
    """What a matrix should give: moments of some folds of the sequences."""

    folds: list[Moments]

    @property
    def total(self) -> Moments:
        """Of all sequences."""
        first, *others = self.folds
        for other in others:
            first = first.plus(other)
        return first

    def remake(self, module: nn.Module, dampings: Sequence[float], stiffness: Sequence[float] = STIFFNESS) -> Remake:
        """The way of ``stream``; a bias is replaced when it is taken.

        Args:
            module: The matrix.
            dampings: Candidates for the damping of ``V_0``, relative to the mean of the diagonal of ``H``.
            stiffness: Candidates for ``rho``, relative to the mean of the diagonal of ``H_SS``.
        """
        bias = cast("nn.Parameter | None", module.bias)

        def make(weight: torch.Tensor, h: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            total = self.total
            damping, rho = self.best(weight, keep, dampings, stiffness, centred=bias is not None)
            made = next(_ways(weight, total, keep, damping, [rho], bias is not None))
            if bias is not None:
                moved = (total.outputs - made @ total.inputs[keep]) / total.tokens
                module.bias = nn.Parameter(moved.to(bias), bias.requires_grad)
            return made

        return make

    def best(
        self, weight: torch.Tensor, keep: torch.Tensor, dampings: Sequence[float], stiffness: Sequence[float], *, centred: bool
    ) -> tuple[float, float]:
        """The damping and stiffness with the least error on folds that their fit has not seen; the first of each without."""
        if len(self.folds) < 2 or len(dampings) * len(stiffness) < 2:
            return dampings[0], stiffness[0]
        total, errors = self.total, torch.zeros(len(dampings), len(stiffness), dtype=torch.float64)
        for fold in self.folds:
            fit = total.plus(fold, -1)
            cross, inner = fold.columns(keep, centred=centred)
            for i, damping in enumerate(dampings):
                for j, v in enumerate(_ways(weight, fit, keep, damping, stiffness, centred)):
                    errors[i, j] += float(((v @ inner - 2 * cross) * v).sum())
        i, j = divmod(int(errors.argmin()), len(stiffness))
        return dampings[i], stiffness[j]


def _ways(
    weight: torch.Tensor, fit: Moments, keep: torch.Tensor, damping: float, stiffness: Sequence[float], centred: bool
) -> Iterator[torch.Tensor]:
    """``V`` for every stiffness; one eigendecomposition serves all."""
    start = refitted(weight, damped(fit.gram, damping), keep)
    cross, inner = fit.columns(keep, centred=centred)
    values, vectors = torch.linalg.eigh(inner)
    missing, scale = (cross - start @ inner) @ vectors, float(inner.diagonal().mean())
    for rho in stiffness:
        yield start if math.isinf(rho) else start + missing / (values + rho * scale + 1e-12) @ vectors.T


class Stream:
    """The dense model's residual stream beside a walk whose layers are cut one after the other.

    Args:
        walk: After ``capture``; nothing is cut yet.

    Raises:
        CoverageError: Several processes.
    """

    def __init__(self, walk: Walk) -> None:
        if process_group() is not None:
            raise CoverageError("The residual stream is matched in one process.", "", "Use one, or --compensate refit.")
        self.walk = walk
        self.dense = [walk.store.get(batch).clone() for batch in range(walk.batches)]
        self.middle: list[torch.Tensor] = []
        self.end: list[torch.Tensor] = []

    def look(self, attention: Attention, mlp: Mlp) -> None:
        """Run the walk's present layer, while it is whole, on what the dense model gives it.

        Raises:
            UnknownStructure: The layer adds something else than what its two parts give.
        """
        self.middle, self.end = [], []
        for batch, before in enumerate(self.dense):
            (a, m), out = self._run(batch, before, attention.consumer, mlp.consumer)
            middle = before.float() + a
            if batch == 0 and (middle + m - out).norm() > _NEAR * (a + m).norm():
                raise _not_added(attention.owner)
            self.middle.append(middle)
            self.end.append(out)
            self.dense[batch] = out.to(before.dtype)

    def _run(self, batch: int, hidden: torch.Tensor | None, *names: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Outputs of some matrices, and of the layer."""
        seen: dict[str, torch.Tensor] = {}
        modules = {name: self.walk.model.get_submodule(name) for name in names}
        handles = [
            m.register_forward_hook(lambda _, __, y, n=n: cast(None, seen.__setitem__(n, y.float())))
            for n, m in modules.items()
        ]
        try:
            out = self.walk.forward(self.walk.position, batch, hidden)
        finally:
            for handle in handles:
                handle.remove()
        if out is None or len(seen) < len(names):
            raise CoverageError(f"{names[0]} was not called.", "", "Report the model.")
        if any(y.numel() != out.numel() for y in seen.values()):  # Gemma 3n carries several streams
            raise _not_added(names[0])
        return [seen[n].reshape(out.shape) for n in names], out.float()  # OPT's MLP sees its tokens in one row

    def aim(self, where: Attention | Mlp) -> Aim:
        """What the matrix behind a part should give in the model as it has been cut so far."""
        module = self.walk.model.get_submodule(where.consumer)
        folds: dict[int, Moments] = {}
        for batch in range(self.walk.batches):
            x, y = self._wanted(batch, module, isinstance(where, Attention))
            mask = self.walk.token_mask(batch)
            for row in range(len(x)):
                real = slice(None) if mask is None else mask[row]
                found, fold = Moments.of(x[row][real], y[row][real]), (batch * self.walk.batch_size + row) % FOLDS
                folds[fold] = folds[fold].plus(found) if fold in folds else found
        return Aim(folds=list(folds.values()))

    def _wanted(self, batch: int, module: nn.Module, attention: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of a matrix, and what it should give."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def look(_: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            seen.append((arguments[0], output))
            if attention:
                raise StopForward

        handle = module.register_forward_hook(look)
        try:
            out = self.walk.forward(self.walk.position, batch)
        finally:
            handle.remove()
        x, given = seen[0]
        end = self.end[batch]
        if attention:
            wanted = self.middle[batch] - self.walk.store.get(batch).float()
        else:
            wanted = end - (cast(torch.Tensor, out).float() - given.float().reshape(end.shape))
        return x.reshape(*end.shape[:2], -1), wanted


def _not_added(name: str) -> UnknownStructure:
    return UnknownStructure(
        f"The layer of {name} does not add its attention and its MLP to the stream as they are.",
        "Compensation of the stream needs layers that do (not Gemma 2 or 3, whose norms stand between).",
        "Use --compensate refit (compensate='refit').",
    )


def ways_of(model: nn.Module, data: CalibrationSet, word: str = "auto") -> str:
    """A way by name; ``auto`` is ``stream`` where the layers allow it, else ``refit``.

    Raises:
        InvalidInput: Another name.
    """
    if word != "auto":
        if word not in WAYS:
            raise InvalidInput(f"There is no compensation {word!r}.", f"Ways are auto, {', '.join(WAYS)}.", "Use auto.")
        return word
    if process_group() is not None:
        return "refit"
    with inference(model):
        walk = Walk(model, data.select(slice(0, 1)), batch_size=1)
        walk.capture()
        try:
            stream = Stream(walk)
            for i, (name, layer) in enumerate(layers(model)):
                walk.position = i
                stream.look(find_attention(layer, name), find_mlp(layer, name))
        except UnknownStructure:
            return "refit"
        finally:
            walk.close()
    return "stream"
