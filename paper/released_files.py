r"""The paper's released files, from a folder that a user has: raw scores per layer recovered from the ratios that they made.

``mdl/data`` of the paper's repository holds ratios and multipliers, no scores. Every family of files is a formula in the score
q of a position, solved for it wherever the ratio is neither capped nor zero:

    rho_l_*_0.51.json                 kappa 1:  rho = (b - lambda) n / (2 eta q)
    rho_l_*_0.55[...]*.json           kappa 2:  rho = (b - lambda) n / (2 eta q^2)
    data_dp/*_tau_{+-4}_mean_*.json   rho = (b + lambda + tau d_l) / (2 eta (q / mean q)^2),   d_l = mean(l) / (L-1) - l / (L-1)

The third gives relative scores, for nearly all positions, and since they have mean one, what is missing of the sum. One
position that every file caps follows from the sum; two follow from the sum and the multiplier of the released list of experts;
of more than two the files do not say enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from layerbudget.errors import CorruptFile, NotFound
from layerbudget.storage.reading import read

BITS, ETA, GAMMA = 16.0, 2.0, 0.9
# Names of the tasks in those files.
NAMES: Mapping[str, str] = {
    "cola": "cola", "mrpc": "mrpc", "openbookqa": "openbook", "commonsenseqa": "commonq",
    "scienceqa": "text_science_q_rebuttal",
}  # fmt: skip
_VARIANTS: Mapping[str, str] = {"all": "all-if-values", "neg": "negative-if"}


def read_released(folder: Path | str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as the packaged one, of every task whose files are in a folder.

    Args:
        folder: The checkout of the paper's repository, its ``mdl``, or ``mdl/data``.
        record: The packaged record: numbers of the model (``blocks``, ``numel_per_block``, ``file_order``, ...).

    Raises:
        NotFound: No such files.
        CorruptFile: A file that does not hold what its name says, or a task whose positions cannot all be recovered.
    """
    root = Path(folder)
    data = next((d for d in (root / "mdl" / "data", root / "data", root) if list(d.glob("rho_l_*_mdl_minmax_0.51.json"))), None)
    if data is None:
        raise NotFound(
            f"{root} holds no rho_l_*_mdl_minmax_0.51.json.",
            "They lie in mdl/data of the paper's repository.",
            "Name that folder.",
        )
    tasks = {}
    for task, name in NAMES.items():
        if list(data.glob(f"rho_l_*_{name}_mdl_minmax_0.51.json")):
            tasks[task] = _read_task(data, name, record)
    return {**record, "tasks": tasks, "source": str(root)}


def _read_task(data: Path, name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    size, n = int(record["blocks"]), float(record["numel_per_block"])
    first = next(iter(sorted(data.glob(f"rho_l_*_{name}_mdl_minmax_0.51.json"))))
    ratios, multiplier, caps = _ratios(first, size)
    q = np.full(size, np.nan)
    known = ratios < caps - 1e-12
    q[known] = (BITS - multiplier) * n / (2 * ETA * ratios[known])
    for path in sorted(data.glob(f"rho_l_*_{name}_mdl_minmax_0.55*.json")):
        other, lam, bound = _ratios(path, size)
        more = np.isnan(q) & (other < bound - 1e-12)
        q[more] = np.sqrt((BITS - lam) * n / (2 * ETA * other[more]))
    experts = {v: _experts(data / "max-1" / where / f"{name}.json", size) for v, where in _VARIANTS.items()}
    q = _fill(
        q, [p for p in sorted((data.parent / "data_dp").glob(f"rho_l_*_{name}_mdl_tau_*_mean_*.json"))], experts, record, name
    )
    truth = np.empty(size)
    truth[np.array(record["file_order"])] = q
    return {
        "influence_scores": truth.tolist(),
        "sparsity": {"multiplier_b_minus_lambda": multiplier, "ratios_file_order": ratios.tolist(), "exponent": 1.0,
                     "max_sparsity": float(caps.max())},
        "experts": {v: e for v, e in experts.items() if e is not None},
    }  # fmt: skip


def _fill(q: np.ndarray, depth: Sequence[Path], experts: Mapping[str, Any], record: Mapping[str, Any], name: str) -> np.ndarray:
    """The positions that the plain files cap."""
    size = len(q)
    relative = np.full(size, np.nan)
    for path in depth:
        ratios, lam, caps = _ratios(path, size)
        tau = 4.0 if "_tau_4_" in path.name else -4.0
        prior = -np.arange(1, size + 1) / (size - 1)
        free = (ratios > 1e-12) & (ratios < caps - 1e-12) & np.isnan(relative)
        top = BITS + lam + tau * (prior - prior.mean())
        relative[free] = np.sqrt(top[free] / (2 * ETA * ratios[free]))
    both = ~np.isnan(q) & ~np.isnan(relative)
    if not np.isnan(q).any():
        return q
    if not both.any():
        raise CorruptFile(*_lost(name, q))
    mean = float(np.median(q[both] / relative[both]))
    q = np.where(np.isnan(q), relative * mean, q)
    missing = np.flatnonzero(np.isnan(q))
    left = mean * size - float(np.nansum(q))
    if len(missing) > 2 or (len(missing) == 2 and experts.get("all") is None):
        raise CorruptFile(*_lost(name, q))
    if len(missing) == 1:
        q[missing] = left
    elif len(missing) == 2:
        q[missing] = _split(q, missing, left, experts["all"], record, name)
    return q


def _lost(name: str, q: np.ndarray) -> tuple[str, str, str]:
    gone = ", ".join(str(i) for i in np.flatnonzero(np.isnan(q)))
    return (
        f"The files of {name} cap the positions {gone}: their scores are not in them.",
        "Two can be found where the experts tell them apart.", "Add the files of mdl/data_dp and mdl/data/max-1.",
    )  # fmt: skip


def _split(
    q: np.ndarray, missing: np.ndarray, left: float, experts: Mapping[str, Any], record: Mapping[str, Any], name: str
) -> np.ndarray:
    """Two scores by their sum and the multiplier of the released experts: the root of a monotone function.

    With ``w = (q + .05 median q)^2`` and all of ``f = gamma w / (lambda c)`` above one, ``lambda = gamma sum w / (B - sum c)``;
    a wider split of a fixed sum raises ``sum w``. The file does not say which of the two is larger; its list of experts does.
    """
    from scipy.optimize import brentq

    cost, target = float(record["expert_flops_as_released"]), float(experts["multiplier"])
    budget = experts["sigma"] * record["base_flops_per_token"]

    def miss(share: float) -> float:
        full = q.copy()
        full[missing] = share * left, (1 - share) * left
        w = (full + 0.05 * np.median(full[full > 0])) ** 2
        spent = np.sum(cost * (1 + np.maximum(GAMMA * w / (target * cost), 1.0)))
        return float(spent - budget)

    low = brentq(miss, 0.0, 0.5, xtol=1e-15, rtol=1e-14) if miss(0.0) * miss(0.5) < 0 else 0.5
    counts = np.array(experts["counts_file_order"])[missing]
    if counts[0] == counts[1] and low < 0.5:
        raise CorruptFile(*_lost(name, q))
    return np.array([1 - low, low] if counts[0] > counts[1] else [low, 1 - low]) * left


class _RatioFile(msgspec.Struct):
    rho_l: list[float]
    minmax: list[float]
    multiplier: float = msgspec.field(name="lambda")


class _ExpertFile(msgspec.Struct):
    number_experts: list[int]
    lambda_avg: float
    rho: float


_REMEDY = "Take it from the paper's repository."


def _ratios(path: Path, size: int) -> tuple[np.ndarray, float, np.ndarray]:
    held = read(path, "list of released ratios", as_type=_RatioFile, remedy=_REMEDY)
    if not len(held.rho_l) == len(held.minmax) == size:
        raise CorruptFile(
            f"{path} has {len(held.rho_l)} ratios and {len(held.minmax)} caps.", f"It is {size} of each.", _REMEDY
        )
    return np.array(held.rho_l), held.multiplier, np.array(held.minmax)


def _experts(path: Path, size: int) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    held = read(path, "list of released experts", as_type=_ExpertFile, remedy=_REMEDY)
    if len(held.number_experts) != size:
        raise CorruptFile(f"{path} has {len(held.number_experts)} counts.", f"It is {size}.", _REMEDY)
    return {"sigma": held.rho, "multiplier": held.lambda_avg, "counts_file_order": held.number_experts}
