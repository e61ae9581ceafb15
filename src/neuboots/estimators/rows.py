"""Rows with weights as rows: what is learned depends on the rows alone, not on their order.

A whole weight is a frequency: a row of weight 3 is three rows, one of weight 0 is none. Other weights multiply the loss
(eq. 2.3 with weights that are given instead of drawn). Rows are put in an order of their own before a seed deals them
to parts and batches; the copies of a row go to one part, or it would be held out from a net that knows it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots.losses import CrossEntropy, Loss

Array = np.ndarray[Any, Any]
MOST_COPIES = 20  # of all rows together, as a multiple of n: beyond, whole weights multiply the loss as well


def frequencies(weights: Array) -> Array | None:
    """The weights as numbers of copies (n,), if they are whole and not too many.

    >>> frequencies(np.array([1.0, 0.0, 3.0])), frequencies(np.array([0.5, 1.0]))
    (array([1, 0, 3]), None)
    """
    whole = bool((weights == np.floor(weights)).all()) and weights.sum() <= MOST_COPIES * len(weights)
    return weights.astype(np.int64) if whole else None


def in_own_order(X: Array, *more: Array) -> Array:
    """The places of the rows in an order that depends on what they hold alone; rows that are the same stand together.

    It is by X; what else they hold decides among rows of the same X only: targets have no say in who is held out.

    >>> x = np.array([[1.0], [2.0], [1.0]])
    >>> bool((x[in_own_order(x)] == x[::-1][in_own_order(x[::-1])]).all())
    True
    """
    by_x = _word(np.zeros(len(X), dtype=np.uint64), X)
    word = by_x
    for columns in more:
        word = _word(word, columns)
    return np.lexsort((word, by_x))


def twins(X: Array, y: Array, most: float) -> Array:
    """The number of the unit that each row belongs to (n,), for rows in their own order.

    Rows are one unit if they have one X and one y: copies. Where an X has several y a net cannot know them by heart,
    and of more than `most` rows a part would hold little else: then each row is a unit.

    >>> twins(np.array([[3.0], [3.0], [1.0], [1.0], [2.0]]), np.array([[7.0], [7.0], [7.0], [8.0], [7.0]]), 2)
    array([0, 0, 1, 2, 3])
    """
    first = np.append(True, (X[1:] != X[:-1]).any(1))
    group = np.cumsum(first) - 1
    several = np.append(False, (y[1:] != y[:-1]).any(1)) & ~first
    alone = (np.bincount(group, several) > 0) | (np.bincount(group) > most)
    return np.cumsum(first | alone[group]) - 1


def _word(word: Array, columns: Array) -> Array:
    """A hash of the word and what the columns (n,) or (n, k) hold: (n,)."""
    with np.errstate(over="ignore"):
        for values in np.atleast_2d(columns.T):
            word = _mixed(word ^ (values + 0.0).astype(np.float64).view(np.uint64))  # −0 is 0
    return word


def _mixed(word: Array) -> Array:
    """splitmix64's finaliser: one bit of the input moves half of the output's."""
    word = (word + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(word ^ (word >> np.uint64(31)))


def mean_and_spread(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column: (k,) each; the latter 0 where rounding is all that it shows.

    >>> mean_and_spread(np.array([[1e200, 0.1], [3e200, 0.1]]))
    (array([2.e+200, 1.e-001]), array([1.e+200, 0.e+000]))
    """
    exponent = np.clip(np.frexp(np.abs(values).max(0))[1], -1000, 1000)  # squares of 1e200 are no numbers
    small = np.ldexp(values, -exponent)
    mean, spread = small.mean(0), small.std(0)
    spread = np.where(spread > 1e-12 * np.abs(mean), spread, 0.0)
    return np.ldexp(mean, exponent), np.ldexp(spread, exponent)


@dataclass(frozen=True)
class RowWeighted:
    """w ℓ(z, y) for targets (N, k + 1): those of the loss, and the weight of the row."""

    loss: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y, w = targets[:, :-1], targets[:, -1]
        losses = self.loss(outputs, y[:, 0].long() if isinstance(self.loss, CrossEntropy) else y)
        return losses * w.to(losses).view(-1, *[1] * (losses.ndim - 1))


def with_weights(y: Tensor, weights: Array) -> Tensor:
    """Targets for `RowWeighted`: (n, k + 1), weights of mean 1."""
    w = torch.from_numpy(weights / weights.mean())
    return torch.cat([y.reshape(len(y), -1).double(), w[:, None]], 1)
