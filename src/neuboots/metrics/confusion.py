"""Which class was taken for which: the counts n_tg of inputs with true class t and guess g.

    precision_c = n_cc / Σ_t n_tc,   recall_c = n_cc / Σ_g n_cg,   F1_c = 2 n_cc / (Σ_t n_tc + Σ_g n_cg)
    IoU_c = n_cc / (Σ_t n_tc + Σ_g n_cg − n_cc),   Dice_c = F1_c

Where such a ratio is 0 / 0, as for a class that occurs nowhere, it is 0 (scikit-learn's `zero_division=0`).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics.checks import at_least, in_range, rows, whole_numbers
from neuboots.metrics.tally import Tally, some


@dataclass(frozen=True, eq=False)
class Confusion(Tally):
    """n_tg: a row for each true class, a column for each guess.

    >>> one, two = torch.tensor([0, 1, 1]), torch.tensor([0])
    >>> tally = Confusion.of(one, torch.tensor([0, 1, 0]), classes=2) + Confusion.of(two, two, classes=2)
    >>> tally.matrix.tolist(), tally.recall
    ([[2, 1], [0, 1]], tensor([0.6667, 1.0000], dtype=torch.float64))
    """

    matrix: Tensor  # (C, C)

    @classmethod
    def of(cls, guess: Tensor, truth: Tensor, *, classes: int) -> Self:
        """Of whole numbers (N,) in 0 … C − 1."""
        at_least("classes", classes, 1)
        whole_numbers(guess=guess, truth=truth)
        in_range("guesses", guess, classes)
        in_range("labels", truth, classes)
        row, column = truth.flatten().to(guess.device).long(), guess.flatten().long()
        cells = torch.bincount(row * classes + column, minlength=classes**2)
        return cls(cells.reshape(classes, classes))

    @property
    def counts(self) -> Tensor:
        """n_tg, of at least one input: (C, C)."""
        some(self.matrix.sum())
        return self.matrix

    @property
    def occurs(self) -> Tensor:
        """Whether class c is the truth or the guess of any input: (C,)."""
        return self._sizes > 0

    @property
    def precision(self) -> Tensor:
        return self._hits / self.matrix.sum(0).clamp_min(1)

    @property
    def recall(self) -> Tensor:
        return self._hits / self.matrix.sum(1).clamp_min(1)

    @property
    def f1(self) -> Tensor:
        return 2 * self._hits / self._sizes.clamp_min(1)

    @property
    def iou(self) -> Tensor:
        return self._hits / (self._sizes - self._hits).clamp_min(1)

    @property
    def mean_iou(self) -> Tensor:
        return self.iou[self.occurs].mean()

    @property
    def _hits(self) -> Tensor:
        """n_cc: (C,); the ratios above have at least 1 below, so that 0 / 0 is 0."""
        return self.counts.diagonal().double()

    @property
    def _sizes(self) -> Tensor:
        return self.matrix.sum(0) + self.matrix.sum(1)


def confusion_matrix(probs: Tensor, labels: Tensor) -> Tensor:
    """n_tg = number of inputs with y = t and argmax p = g: (C, C), a row for each true class.

    >>> confusion_matrix(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([[1, 0],
            [1, 1]])
    """
    return _confusion(probs, labels).counts


def precision(probs: Tensor, labels: Tensor) -> Tensor:
    """n_cc / Σ_t n_tc: of the inputs taken for class c, how many are: (C,); 0 where none was.

    >>> precision(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    return _confusion(probs, labels).precision


def recall(probs: Tensor, labels: Tensor) -> Tensor:
    """n_cc / Σ_g n_cg: of the inputs of class c, how many are taken for it: (C,); 0 where there are none.

    >>> recall(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return _confusion(probs, labels).recall


def f1(probs: Tensor, labels: Tensor) -> Tensor:
    """2 n_cc / (Σ_t n_tc + Σ_g n_cg), the harmonic mean of precision and recall: (C,).

    >>> f1(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([0.6667, 0.6667], dtype=torch.float64)
    """
    return _confusion(probs, labels).f1


def _confusion(probs: Tensor, labels: Tensor) -> Confusion:
    p, y = rows(probs, labels)
    return Confusion.of(p.argmax(1), y, classes=p.shape[1])
