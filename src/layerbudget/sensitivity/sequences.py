"""Means per token over sequences, and their standard errors: one estimator for all damages, losses and perplexities."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import NotEnoughText


def deviations(sums: np.ndarray, counts: np.ndarray, mean: ArrayLike) -> np.ndarray:
    """Return what every sequence adds to a mean per token beyond its share, in the shape of ``sums``.

    Its norm over sequences is the standard error of the mean (ratio estimator); of a sum of means it is the norm of the sum.

    Args:
        sums: Sums over the tokens of every sequence, ``(..., sequences)``.
        counts: Tokens of every sequence, ``(sequences,)``.
        mean: ``sums`` over all sequences per token, ``(...)``.
    """
    n, tokens = len(counts), counts.sum()
    spread = np.sqrt(n / (n - 1)) if n > 1 else 0.0
    return (sums - np.asarray(mean)[..., None] * counts) * (spread / tokens)


def need_predictions(counts: np.ndarray) -> None:
    """Refuse sequences of which no token is predicted.

    Raises:
        NotEnoughText: They are that.
    """
    if not counts.sum():
        problem = "No token of this text is predicted, so there is no mean over them."
        needed = "The first token of a window is never predicted, nor are labels of -100."
        raise NotEnoughText(problem, needed, "Use windows of 2 tokens or more, with labels.")


def per_token(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean per token of sums over sequences, and its standard error; of one sequence the error is zero.

    >>> mean, error = per_token(np.array([1.0, 3.0]), np.array([10.0, 10.0]))
    >>> round(mean, 12), round(error, 12)
    (0.2, 0.1)

    Raises:
        NotEnoughText: No sequence has a token that counts.
    """
    need_predictions(counts)
    mean = float(sums.sum() / counts.sum())
    return mean, float(np.linalg.norm(deviations(sums, counts, mean)))
