"""K-FAC and EK-FAC, one Kronecker-factored curvature per weight matrix, damped exactly: :func:`score_kfac`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from ...errors import CoverageError, InvalidInput
from ...execution.backward import feed
from ...execution.loss import Batch, Data, token_count
from ...execution.processes import ProcessGroup
from ...execution.sites import Site
from ...progress import Progress, Steps
from ...records import Block, Module
from ...scores import Scores
from ..stored import Finished
from . import common
from .common import Damping, Dampings, Unit
from .kronecker import Factors, Sums, Tokens

_GROUPS = 4


@dataclasses.dataclass(eq=False)
class Rotated:
    """One matrix's gradients, group by group, ``(J, p, q)`` float64, and the eigenvalues ``(p, q)``, in its eigenbasis."""

    parts: torch.Tensor
    eigenvalues: torch.Tensor

    def form(self, weights: torch.Tensor, tau: float) -> float:
        """``v'(C + tau I)^-1 v`` of the weighted sum v of the groups."""
        v = torch.tensordot(weights.to(self.parts), self.parts, 1)
        return float((v.square() / (self.eigenvalues + tau)).sum())

    def forms(self, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gain ``(D,)``, noise floor ``(D,)`` and leave-one-group-out gains ``(D, J)``.

        The floor is ``J/(J-1) sum_j (g_j - g/J)'(C + tau I)^-1 (g_j - g/J)``.
        """
        count = len(self.parts)
        unit, one = torch.eye(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        correction = count / max(count - 1, 1)
        gain = [self.form(one, float(t)) for t in tau]
        floor = [sum(self.form(unit[j] - one / count, float(t)) for j in range(count)) * correction for t in tau]
        jack = [[self.form((one - unit[j]) * correction, float(t)) for j in range(count)] for t in tau]
        return np.array(gain), np.array(floor), np.array(jack)


def rotate(sums: Sums) -> Rotated:
    """Rotate the gradients of one matrix into the eigenbasis of its factors."""
    (g, qg), (a, qa) = sums.eigen()
    parts = torch.stack([qg.T @ part.double() @ qa for part in sums.parts])
    return Rotated(parts, torch.outer(g.clamp_min(0), a.clamp_min(0)))


def score_kfac(
    model: nn.Module,
    data: Data,
    blocks: Sequence[Block],
    *,
    damping: Damping = None,
    damping_unit: Unit = "max",
    batch_size: int = 8,
    seed: int | None = None,
    progress: Progress | None = None,
    labels: Literal["sampled", "data"] = "sampled",
    draws: int | None = None,
    walk: str = "auto",
    finished: Finished | None = None,
    corrected: bool = False,
) -> Scores:
    """Gain under K-FAC, or EK-FAC (``corrected``), with exact damping.

    The curvature of a matrix is ``C = G (x) A`` (expand setting) with ``A = mean_t a_t a_t'`` over positions and
    ``G = (1/N) sum_t b_t b_t'``, b the output gradients of the summed loss. With ``A = Q_A diag(l_A) Q_A'``,
    ``G = Q_G diag(l_G) Q_G'`` and the gradient in their eigenbasis, ``M = Q_G' dW Q_A``,

        g'(C + tau I)^-1 g = sum_ij M_ij^2 / (L_ij + tau),   L = l_G l_A':

    the damping is added to C itself, not to its factors. EK-FAC has the second moments in that basis instead,
    ``L = (1/N) sum_i (Q_G' S_i Q_A)^2`` with the gradients S_i of the sequences (George et al. 2018). Gains of a block add over
    its matrices: coupling between matrices is dropped.

    The gradient is kept in J = 4 groups of sequences. The noise floor is
    ``sum_j (g_j - g)'(C + tau I)^-1 (g_j - g) / (J(J-1))`` over their mean gradients, the standard error a jackknife over them,
    both with the curvature held fixed.

    By layers one layer's factors exist at a time, all of them with dampings that wait for the last block (``median``, or the
    absolute default sweep).

    Arguments are those of :func:`~layerbudget.sensitivity.gain.score`; its own are:

    - ``seed``: of the sampled labels.
    - ``labels``: ``sampled`` from the model (the Fisher), or the ``data``'s own (the empirical Fisher).
    - ``draws``: sampled labels per token, 1 by default, from the content of a sequence and the seed.
    - ``finished``: blocks that an earlier run has finished.
    - ``corrected``: eK-FAC.

    Returns:
        Gains per block; ``extra['by_module']`` has them per weight matrix.
    """
    if labels == "data" and (seed is not None or draws is not None):
        raise InvalidInput(
            f"{'seed' if seed is not None else 'draws'} was given with labels='data'.",
            "Only sampled labels read it.",
            "Leave it out.",
        )
    seed, draws = seed or 0, 1 if draws is None else draws
    drawing: dict[str, Any] = {"labels": labels, "draws": draws, "seed": seed}
    damped_by: dict[str, Any] = {"damping": damping, "unit": damping_unit, "finished": finished}
    factors = (_EKFac if corrected else _KFac)(model, data, blocks, groups=_GROUPS, **drawing, **damped_by)
    feed(model, data, blocks, factors, batch_size=batch_size, walk=walk, tick=Steps(progress, data.samples))
    damped = factors.dampings()
    if unseen := [m.name for b in blocks for m in b.modules if m.name not in factors.forms]:
        raise CoverageError(
            f"No gradient reached {len(unseen)} weight matrices, first {unseen[0]}.",
            "Longer sequences may reach them.",
            "Use a larger --length, or leave them out with --exclude.",
        )
    gain, floor, error = (np.zeros_like(damped.tau) for _ in range(3))
    for k, block in enumerate(blocks):
        left_out: Any = 0.0
        for m in block.modules:
            whole, noise, jack = factors.forms[m.name]
            gain[:, k] += whole
            floor[:, k] += noise
            left_out = left_out + jack
        count = left_out.shape[1]
        error[:, k] = np.sqrt((count - 1) * left_out.var(1)) if count > 1 else np.nan
        floor[:, k] = floor[:, k] if count > 1 else np.nan
    name = "EK-FAC" if corrected else "K-FAC"
    curvature = f"{name}, {labels} labels" + (f", {draws} draws" if labels == "sampled" else "")
    by_module = {m.name: factors.forms[m.name][0].tolist() for b in blocks for m in b.modules}
    extra = {"tokens": token_count(model, data), "trace": factors.trace, "excess": gain - floor, "by_module": by_module}
    fields = {"standard_error": error, "noise_floor": floor, "seed": seed}
    return damped.record(blocks, name.replace("-", "").lower(), gain, curvature, **fields, extra=extra)


class _KFac(Factors):
    """Forms of every matrix as soon as the damping of its block is known."""

    def __init__(self, *arguments: Any, damping: Damping, unit: str, finished: Finished | None, **options: Any) -> None:
        self.damping, self.unit, self.local = damping, unit, common.is_local(damping, unit)
        super().__init__(*arguments, finished=finished if self.local else None, **options)
        self.rotated: list[dict[str, Rotated]] = [{} for _ in self.blocks]
        self.largest, self.trace = np.zeros((2, len(self.blocks)))
        self.forms: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for k, record in ({} if self.finished is None else self.finished.records).items():
            self.largest[k], self.trace[k] = record["largest"], record["trace"]
            for name, forms in record["forms"].items():
                whole, noise, jack = (np.array(form) for form in forms)
                self.forms[name] = (whole, noise, jack)

    def by_tokens(self, module: Module) -> bool:
        """Never: the eigenbasis needs the sums."""
        return False

    def settle(self, name: str, factors: Sums | Tokens) -> None:
        self.add(name, rotate(cast(Sums, factors)))

    def add(self, name: str, rotated: Rotated) -> None:
        """Keep the factors of a matrix; a block that is complete is settled."""
        k = self.place[name]
        self.rotated[k][name] = rotated
        self.largest[k] = max(self.largest[k], float(rotated.eigenvalues.max()))
        self.trace[k] += float(rotated.eigenvalues.sum())
        self.waiting[k] -= 1
        if self.local and not self.waiting[k]:
            self._form(k, self._dampings(slice(k, k + 1)).tau[:, 0])
            if self.finished is not None:
                forms = {m.name: [form.tolist() for form in self.forms[m.name]] for m in self.blocks[k].modules}
                self.finished.put(k, {"largest": float(self.largest[k]), "trace": float(self.trace[k]), "forms": forms})

    def _dampings(self, selected: slice) -> Dampings:
        mean = self.trace / np.array([b.numel for b in self.blocks])
        return Dampings.of(self.damping, self.unit, self.largest[selected], mean[selected])

    def _form(self, k: int, tau: np.ndarray) -> None:
        for name, rotated in self.rotated[k].items():
            self.forms[name] = rotated.forms(tau)
        self.rotated[k] = {}

    def merge(self, group: ProcessGroup) -> None:
        self.largest, self.trace = group.sum(self.largest), group.sum(self.trace)
        if self.local:
            self.forms = {name: forms for of_process in group.gather(self.forms) for name, forms in of_process.items()}
        else:
            everything = group.gather(self.rotated)
            self.rotated = [{n: r for by_block in everything for n, r in by_block[k].items()} for k in range(len(self.blocks))]

    def dampings(self) -> Dampings:
        """Dampings of all blocks; those that waited for the last block are formed."""
        damped = self._dampings(slice(None))
        for k in range(len(self.blocks)):
            self._form(k, damped.tau[:, k])
        return damped


class _EKFac(_KFac):
    """A second pass over the matrices, for the second moments in their eigenbasis.

    Every process settles every matrix: their second moments are added up, so there is nothing to bring together.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._again: dict[str, tuple[Sums, torch.Tensor]] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self._second = False

    def settle(self, name: str, factors: Sums | Tokens) -> None:
        sums = cast(Sums, factors)
        self._again[name] = (sums, torch.zeros(sums.parts.shape[1:], dtype=torch.float64, device=sums.g.device))

    def needs(self, loss: int) -> bool:
        return super().needs(loss) and (not self._second or loss > 0 or self.empirical)

    def update(self, site: Site) -> None:
        if not self._second:
            super().update(site)
            return
        for name in [n for n in site.names if n in self._again]:
            qg, qa = (vectors.to(self.dtype) for _, vectors in self._again[name][0].eigen())
            rows = torch.bmm((site.b[name].to(self.dtype) @ qg).transpose(1, 2), site.a.to(self.dtype) @ qa)
            self._rows[name] = self._rows[name] + rows if name in self._rows else rows

    def finish(self, batch: Batch, loss: int) -> None:
        for name, rows in self._rows.items():
            self._again[name][1].add_(rows.square_().sum(0, dtype=torch.float64))
        self._rows = {}

    def share(self, names: Sequence[str], group: ProcessGroup) -> None:
        if not self._second:
            super().share(names, group)
        else:
            group.reduce([moments for _, moments in self._again.values()])

    def owns(self, name: str) -> bool:
        return True

    def merge(self, group: ProcessGroup) -> None:
        """Nothing: every process has every matrix."""

    def finalize(self, names: Sequence[str]) -> bool:
        """See :meth:`Accumulator.finalize`."""
        if not self._second:
            super().finalize(names)
            self._second = bool(self._again)
            return self._second
        for name, (sums, moments) in self._again.items():
            turned = rotate(sums)
            turned.eigenvalues = moments / self._scale
            self.add(name, turned)
        self._again, self._second = {}, False
        return False
