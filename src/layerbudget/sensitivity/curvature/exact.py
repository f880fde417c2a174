"""Gain under the exact Gauss-Newton matrix, in a certified bracket, and under the exact Hessian, a diagnostic.

Both come from one Lanczos run per block, started at the gradient. With ``T_m`` the tridiagonal matrix after m products,
``(theta_j, w_j)`` its eigenvalues and squared first eigenvector entries, ``zeta^2(tau) ~ |g|^2 sum_j w_j/(theta_j + tau)``
(Golub and Meurant): one run serves every damping. For a positive semidefinite curvature this Gauss rule is a lower bound and
the Gauss-Radau rule with a node at 0 an upper one. Losing orthogonality only delays convergence, so three vectors suffice
(Golub and Strakos 1994).

Blocks of transformers have strongly indefinite Hessians. The gain is twice the largest decrease of the damped quadratic model
``g'd + d'(H + tau I)d / 2``. Where ``H + tau I`` has a negative eigenvalue the model falls without end, and there is no gain:
``g'(H + tau I)^-1 g`` then belongs to a saddle, may be negative, and grows without bound as tau nears any eigenvalue of ``-H``.
A Ritz value at or below ``-tau`` proves this. The entry is then null, and its status names the damping to take.
``absolute=True`` uses ``|H|`` instead, which always exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.autograd.forward_ad as fwad
from torch import nn
from torch.func import functional_call

from ...errors import CoverageError, CurvatureFailure, InvalidInput
from ...execution.loss import IGNORE, Batch, Data, batches, logits_of, summed_loss, token_count
from ...execution.modes import prepared, twice_differentiable
from ...models.blocks import weight_of
from ...models.offload import converting
from ...progress import Progress, Steps
from ...records import Block
from ...scores import Scores
from . import common
from .common import Damping, Dampings, Unit

MARGIN = 1.5  # an eigenvalue may lie so far below the smallest Ritz value
_SETTLED = 0.01


class BlockProducts:
    """Products of one block's curvature with flat vectors ``(p,)``, over a fixed data set; a context manager.

    Second derivatives of attention are needed, which the fused kernels lack: the math kernel is used inside.
    ``C = (1/N) sum_tokens J' (diag(p) - pp') J`` for the GGN, the exact second derivative for the Hessian.
    """

    def __init__(self, model: nn.Module, data: Data, block: Block, batch_size: int) -> None:
        if converting(model):
            raise CoverageError(
                "Products of second order need the graph of the whole model, and this one is streamed layer by layer.",
                "Curvatures that are local to a layer: fisher-gram, kfac, ekfac, rank-gain.",
                "Choose one of those, or load without --stream.",
            )
        self.model, self.block, self.count = model, block, 0
        self.tokens = token_count(model, data)
        names = {id(p): n for n, p in model.named_parameters()}
        self.parameters = [weight_of(model, m.name)[1] for m in block.modules]
        self.names = [names[id(p)] for p in self.parameters]
        self.batches = list(batches(model, data, batch_size))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> BlockProducts:
        with self._stack:
            self._stack.enter_context(prepared(self.model))
            self._stack.enter_context(twice_differentiable(self.model))
            for p in self.model.parameters():
                p.requires_grad_(False)
            for p in self.parameters:
                p.requires_grad_(True)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Flat vector as one tensor per parameter."""
        parts = vector.split([p.numel() for p in self.parameters])
        return [v.view(p.shape) for v, p in zip(parts, self.parameters, strict=True)]

    def gradient(self) -> torch.Tensor:
        """Gradient of the mean token loss."""
        first = self.parameters[0]
        total = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        for b in self.batches:
            loss = summed_loss(logits_of(self.model, b), b.targets) / self.tokens
            total += _flat(torch.autograd.grad(loss, self.parameters, allow_unused=True), self.parameters)
        square = float(total.double().square().sum())
        if not np.isfinite(square):
            raise CurvatureFailure(
                f"The squared gradient of {self.block.name} is {square}.",
                "It must be finite.",
                "Score the model in float32 instead of half precision.",
            )
        return total

    def ggn(self, vector: torch.Tensor) -> torch.Tensor:
        """``C v`` for the generalised Gauss-Newton matrix: one dual forward pass, one backward pass."""
        self.count += 1
        out = torch.zeros_like(vector)
        tangents = self.split(vector)
        for b in self.batches:
            logits, moved = self._dual_logits(b, tangents)
            if moved is None:
                continue
            with torch.no_grad():
                p, change = logits.detach().softmax(-1), moved.detach()
                change = p * change
                change = change - p * change.sum(-1, keepdim=True)
                keep = (b.targets != IGNORE).reshape(*logits.shape[:-1], 1)
                cotangent = change * (keep.to(change.dtype) / self.tokens)
            grads = torch.autograd.grad(logits, self.parameters, cotangent, allow_unused=True)
            out += _flat(grads, self.parameters)
        return out

    def hessian(self, vector: torch.Tensor) -> torch.Tensor:
        """``H v`` by differentiating the gradient (reverse over reverse)."""
        self.count += 1
        out = torch.zeros_like(vector)
        v = self.split(vector)
        for b in self.batches:
            loss = summed_loss(logits_of(self.model, b), b.targets) / self.tokens
            grads = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
            inner = sum((g * t).sum() for g, t in zip(grads, v, strict=True) if g is not None)
            if isinstance(inner, torch.Tensor) and inner.requires_grad:
                out += _flat(torch.autograd.grad(inner, self.parameters, allow_unused=True), self.parameters)
        return out

    def _dual_logits(self, batch: Batch, tangents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, and how they move with the parameters along the tangents."""
        pairs = zip(self.names, self.parameters, tangents, strict=True)
        with fwad.dual_level():
            duals = {name: fwad.make_dual(p, t.to(p.dtype)) for name, p, t in pairs}
            out = functional_call(self.model, duals, batch.args, batch.kwargs)
            logits = out if isinstance(out, torch.Tensor) else out.logits
            return fwad.unpack_dual(logits if logits.dtype == torch.float64 else logits.float())


def _flat(grads: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(grads, like, strict=True)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tridiagonal:
    """A Lanczos run: ``|g|^2``, diagonal, and off-diagonal, which is one entry longer: the residual."""

    square: float
    diagonal: np.ndarray
    off: np.ndarray

    @property
    def steps(self) -> int:
        """Products taken."""
        return len(self.diagonal)

    def _matrix(self, corner: float | None = None) -> np.ndarray:
        """The tridiagonal matrix; with one more row and column that end in ``corner``."""
        diagonal, off = (self.diagonal, self.off[:-1]) if corner is None else (np.append(self.diagonal, corner), self.off)
        return np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)

    def _rule(self, theta: np.ndarray, vectors: np.ndarray, tau: np.ndarray) -> np.ndarray:
        """``|g|^2 sum_j w_j/(theta_j + tau)``."""
        with np.errstate(divide="ignore"):
            return self.square * (vectors[0] ** 2 / (theta + np.asarray(tau)[:, None])).sum(1)

    def ritz(self) -> np.ndarray:
        """Ritz values, ascending: the last bounds the largest eigenvalue from below, the first the smallest from above."""
        return np.linalg.eigh(self._matrix())[0]

    @property
    def largest_error(self) -> float:
        """Residual of the largest Ritz pair; an eigenvalue lies within this distance of it."""
        return float(self.off[-1] * abs(np.linalg.eigh(self._matrix())[1][-1, -1]))

    def gauss(self, tau: np.ndarray, *, absolute: bool = False) -> np.ndarray:
        """Lower bound of the gain (PSD curvature); ``absolute`` uses ``|theta|``."""
        theta, vectors = np.linalg.eigh(self._matrix())
        return self._rule(np.abs(theta) if absolute else theta, vectors, tau)

    def radau(self, tau: np.ndarray) -> np.ndarray:
        """Upper bound of the gain for a positive semidefinite curvature: one more node, fixed at 0."""
        if self.off[-1] <= 0:
            return self.gauss(tau)
        last = np.zeros(self.steps)
        last[-1] = self.off[-1] ** 2
        try:
            corner = float(np.linalg.solve(self._matrix(), last)[-1])
        except np.linalg.LinAlgError:
            return np.full(len(tau), np.inf)
        theta, vectors = np.linalg.eigh(self._matrix(corner))
        if theta[0] < -1e-6 * max(theta[-1], 1e-300):
            return np.full(len(tau), np.inf)
        return self._rule(theta.clip(0.0), vectors, tau)


def lanczos(
    product: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    steps: int,
    stop: Callable[[Tridiagonal], bool] | None = None,
) -> Tridiagonal:
    """Run Lanczos from ``start`` for at most ``steps`` products ``v -> C v``; ``stop`` is asked after each."""
    if steps < 1:
        raise InvalidInput(f"steps is {steps}.", "At least one product is needed.", "Use 30 or more.")
    square, diagonal, off = float(start.double().square().sum()), list[float](), list[float]()
    if square <= 0:
        return Tridiagonal(square=0.0, diagonal=np.zeros(1), off=np.zeros(1))
    v, previous, beta = start / square**0.5, torch.zeros_like(start), 0.0
    for _ in range(min(steps, start.numel())):
        w = product(v) - beta * previous
        alpha = float(torch.dot(w.double(), v.double()))
        w -= alpha * v
        beta = float(torch.linalg.vector_norm(w.double()))
        diagonal.append(alpha)
        off.append(beta)
        result = Tridiagonal(square=square, diagonal=np.array(diagonal), off=np.array(off))
        scale = max(np.abs(diagonal).max(), max(off[:-1], default=0.0))
        if beta <= 1e-14 * scale:
            return dataclasses.replace(result, off=np.append(result.off[:-1], 0.0))
        if stop is not None and stop(result):
            break
        previous, v = v, w / beta
    return result


def _absolute(values: Sequence[float], unit: str, run: Tridiagonal) -> np.ndarray:
    """Dampings of a block in loss/parameter^2, ``max`` taken from the largest Ritz value in size."""
    scale = float(np.abs(run.ritz()).max()) if unit == "max" else 1.0
    return np.asarray(values, dtype=np.float64) * (scale if scale > 0 else 1.0)


def _dampings(damping: Damping, unit: str) -> tuple[float, ...]:
    values = common.check_damping(damping, unit)
    if unit in ("mean", "median") or (unit == "absolute" and values is None):
        raise InvalidInput(
            f"damping_unit={unit!r} with damping={damping} needs what Lanczos on one block does not know: the trace of the "
            "curvature, or the other blocks.",
            "Use 'max', or 'absolute' with values.",
            "Leave damping_unit at 'max'.",
        )
    return common.SWEEPS[unit] if values is None else values


def score_ggn(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    steps: int = 60,
    tolerance: float = 0.01,
) -> Scores:
    """``zeta^2 = g'(GGN + tau I)^-1 g``, from a bracket that narrows with every product.

    Gains are the Gauss (lower) values; ``extra`` has ``lower``, ``upper``, ``products`` and the largest Ritz values. The status
    is ``bracket 3 %`` where the tolerance was not met.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``damping_unit``: ``max`` (times the largest Ritz value) or ``absolute``.
    - ``steps``: largest number of products per block; about ``0.8 sqrt(1/damping)`` are needed.
    - ``tolerance``: relative width of the bracket at which a block is done.
    """
    values = _dampings(damping, damping_unit)

    def narrow(run: Tridiagonal) -> bool:
        if damping_unit == "max" and run.largest_error > _SETTLED * abs(run.ritz()[-1]):
            return False  # the damping itself is measured in this eigenvalue
        t = _absolute(values, damping_unit, run)
        low, high = run.gauss(t), run.radau(t)
        return bool((high - low <= tolerance * high).all())

    lower, upper, tau = (np.zeros((len(values), len(blocks))) for _ in range(3))
    status, largest, products = [["ok"] * len(blocks) for _ in values], np.zeros(len(blocks)), []
    tick = Steps(progress, len(blocks))
    for k, block in enumerate(blocks):
        with BlockProducts(model, data, block, batch_size) as p:
            run = lanczos(p.ggn, p.gradient(), steps, narrow)
        products.append(p.count)
        largest[k] = run.ritz()[-1]
        tau[:, k] = t = _absolute(values, damping_unit, run)
        lower[:, k], upper[:, k] = run.gauss(t), run.radau(t)
        for i, (low, high) in enumerate(zip(lower[:, k], upper[:, k], strict=True)):
            width = (high - low) / high if high > 0 else 0.0
            status[i][k] = "zero gradient" if run.square <= 0 else f"bracket {width:.1%}" if width > tolerance else "ok"
        tick(1)
    extra = {"lower": lower, "upper": upper, "products": products}
    damped = Dampings(values, damping_unit, tau, largest)
    return damped.record(blocks, "ggn", lower, "GGN, Lanczos", status=status, extra=extra)


def score_hessian(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    progress: Progress | None = None,
    steps: int = 30,
    tolerance: float = 1e-3,
    absolute: bool = False,
) -> Scores:
    """``zeta^2 = g'(H + tau I)^-1 g``, null where ``H + tau I`` is indefinite.

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``damping_unit``: ``max`` (times the largest ``|Ritz value|``) or ``absolute``.
    - ``steps``: largest number of products per block; with fewer than 10 a negative eigenvalue may be missed.
    - ``tolerance``: relative change of the gains over the last two products at which a block is done, after 10.
    - ``absolute``: use ``|H|``.

    Returns:
        Gains. Null where a Ritz value shows that there is none, with a status such as ``negative curvature -0.4 in
        model.layers.0: absolute damping above 0.6 is safe``: 1.5 times the most negative Ritz value, because an eigenvalue may
        lie below it. Between the two the status begins with ``near`` and the value is twice the decrease within the Krylov
        space that was searched: a lower bound of the gain, where that exists. ``extra`` has ``smallest_eigenvalue``
        (the smallest Ritz value) and ``safe_damping`` (absolute) per block.
    """
    values = _dampings(damping, damping_unit)
    gain: list[list[float | None]] = [[None] * len(blocks) for _ in values]
    status = [["ok"] * len(blocks) for _ in values]
    tau, products = np.zeros((len(values), len(blocks))), []
    smallest, largest = np.zeros((2, len(blocks)))
    tick = Steps(progress, len(blocks))
    for k, block in enumerate(blocks):
        with BlockProducts(model, data, block, batch_size) as p:
            run = lanczos(p.hessian, p.gradient(), steps, _settled(values, damping_unit, tolerance, absolute))
        products.append(p.count)
        smallest[k], largest[k] = run.ritz()[[0, -1]]
        tau[:, k] = _absolute(values, damping_unit, run)
        for i, (t, estimate) in enumerate(zip(tau[:, k], run.gauss(tau[:, k], absolute=absolute), strict=True)):
            status[i][k] = "ok" if absolute else _status(block.name, smallest[k], t)
            if not status[i][k].startswith("negative"):
                gain[i][k] = float(estimate)
        tick(1)
    safe = [max(0.0, -MARGIN * low) for low in smallest.tolist()]
    extra = {"smallest_eigenvalue": smallest, "safe_damping": safe, "products": products}
    name = "|Hessian|, Lanczos" if absolute else "Hessian, Lanczos"
    return Dampings(values, damping_unit, tau, largest).record(blocks, "hessian", gain, name, status=status, extra=extra)


def _status(name: str, smallest: float, tau: float) -> str:
    if tau >= -MARGIN * smallest:
        return "ok"
    word = "negative" if smallest <= -tau else "near negative"
    return f"{word} curvature {smallest:.3g} in {name}: absolute damping above {-MARGIN * smallest:.3g} is safe"


def _settled(values: Sequence[float], unit: str, tolerance: float, absolute: bool) -> Callable[[Tridiagonal], bool]:
    last: list[np.ndarray] = []

    def stop(run: Tridiagonal) -> bool:
        t = _absolute(values, unit, run)
        now = run.gauss(t, absolute=absolute)
        usable = np.ones(len(t), bool) if absolute else t > -MARGIN * run.ritz()[0]
        done = run.steps >= 10 and len(last) > 0
        done = done and bool((np.abs(now[usable] - last[-1][usable]) <= tolerance * np.abs(now[usable])).all())
        last.append(now)
        return done

    return stop
