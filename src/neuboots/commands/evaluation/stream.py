"""A model's answers to labelled rows, chunk by chunk, and a fair sample of them.

    P(a row is in the sample) = min(1, most / N),   whatever N turns out to be

The rows with the least of numbers that the seed draws for each are kept: the same whatever the size of the chunks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from neuboots.models import Answers, Chunk, Model
from neuboots.tasks.active.together import drawn

MOST = 500_000  # rows that figures of ranks are found from: their error is then below 0.001
NOTES = 20  # sentences of a source that are passed on


@dataclass
class Seen:
    """What was met on the way: rows in all, rows without a label, and sentences for the user."""

    rows: int = 0
    unlabelled: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        return self.rows - self.unlabelled

    def add(self, notes: Iterable[str]) -> None:
        """Each sentence once; a source may repeat itself from chunk to chunk."""
        self.notes += [each for each in dict.fromkeys(notes) if each not in self.notes]
        del self.notes[NOTES:]


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows: their chunk, which of them have a label (N,), the answers to those (n ≤ N), and the labels (n, …)."""

    chunk: Chunk
    known: Tensor
    answers: Answers
    y: Tensor


def labelled(model: Model, source: str | Path, seen: Seen, *, num_samples: int, level: float) -> Iterator[Part]:
    """The rows of a source that have a label, with their answers; the others are counted."""
    for chunk in model.read(source, labelled=True):
        seen.add(chunk.notes)
        if chunk.y is None:
            raise ValueError(f"got rows of {source} without labels; expected a label for each row")
        known = has_label(chunk.y)
        seen.rows += len(chunk)
        seen.unlabelled += int((~known).sum())
        if bool(known.any()):
            answers = model.answer(chunk, num_samples=num_samples, level=level)
            yield Part(chunk, known, rows_of(answers, known), chunk.y[known])
    if not seen.counted:
        rows = "row" if seen.rows == 1 else "rows"
        raise ValueError(
            f"got {source} with no label of {model.card.target!r} in any of its {seen.rows:,} {rows}; expected some"
        )


def has_label(y: Tensor) -> Tensor:
    """Where a label is there: a class is −1 and a number NaN where it is not: (N,) or (N, 1) → (N,).

    >>> has_label(torch.tensor([2, -1])).tolist(), has_label(torch.tensor([[0.5], [float("nan")]])).tolist()
    ([True, False], [True, False])
    """
    flat = y.reshape(len(y), -1)
    return ~flat.isnan().any(1) if y.is_floating_point() else (flat >= 0).all(1)


def rows_of(answers: Answers, which: Tensor) -> Answers:
    """The answers to these rows: (N,) of True and False."""
    if bool(which.all()):
        return answers
    mask = which.numpy()
    probs = None if answers.probs is None else answers.probs[which]
    return Answers({name: column[mask] for name, column in answers.columns.items()}, probs)


class Sample:
    """At most `most` rows of a stream, each as likely as any other.

    >>> sample = Sample(3)
    >>> for start in (0, 5):
    ...     sample.add(number=torch.arange(start, start + 5))
    >>> len(sample.columns["number"]), sample.total
    (3, 10)
    """

    def __init__(self, most: int = MOST, *, seed: int = 0) -> None:
        self.most, self.seed, self.total = most, seed, 0
        self._keys = torch.zeros(0)
        self._held: dict[str, Tensor] = {}

    def add(self, **columns: Tensor) -> None:
        """Columns of N more rows, (N,) each."""
        count = len(next(iter(columns.values())))
        keys = drawn(torch.arange(self.total, self.total + count), self.seed, "sample")
        self._keys = torch.cat([self._keys, keys]) if self.total else keys
        self._held = {
            name: torch.cat([self._held[name], column]) if self.total else column for name, column in columns.items()
        }
        self.total += count
        if len(self._keys) > 2 * self.most:
            self._choose()

    def _choose(self) -> None:
        """The rows with the least keys stay, in the order of their keys."""
        order = self._keys.argsort(stable=True)[: self.most]
        self._keys = self._keys[order]
        self._held = {name: column[order] for name, column in self._held.items()}

    @property
    def columns(self) -> dict[str, Tensor]:
        """In an order that has nothing to do with the file's, so that the first n are a fair sample too."""
        self._choose()
        return self._held
