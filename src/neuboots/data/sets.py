"""A data set: its parts, and what a net must know of them.

x̂ = (x − mean) / std,   a mean and a std for each channel
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from neuboots.data.corruptions import CORRUPTIONS, ROTATION, Corrupted
from neuboots.data.imbalance import long_tailed
from neuboots.data.parts import Augment, Normalise, Part, Stream

Task = Literal["classification", "regression", "segmentation"]


@dataclass(frozen=True)
class Normalisation:
    """x̂ = (x − mean) / std, with a pair of numbers for each channel; `axes` pixel axes follow the channels.

    >>> import torch
    >>> normalise = Normalisation((0.5, 0.0), (0.25, 1.0), axes=0)
    >>> normalise(torch.tensor([[1.0, 3.0]]))
    tensor([[2., 3.]])
    >>> normalise.inverse(torch.tensor([2.0, 3.0]))
    tensor([1., 3.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    axes: int = 2

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"got {len(self.mean)} means and {len(self.std)} standard deviations; expected one for each channel"
            )
        if not all(map(math.isfinite, self.mean)) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ValueError(f"got mean={self.mean}, std={self.std}; expected finite numbers, standard deviations > 0")

    @classmethod
    def of(cls, x: Tensor, *, axes: int = 0) -> "Normalisation":
        """That of these inputs (n, C, *); a constant channel is only shifted."""
        others = [0, *range(2, x.ndim)]
        mean, std = x.double().mean(others), x.double().std(others, correction=0)
        varies = x.amin(others) < x.amax(others)  # the computed spread of a constant is rounding
        return cls(tuple(mean.tolist()), tuple(std.where(varies & (std > 0), 1.0).tolist()), axes)

    def __call__(self, x: Tensor) -> Tensor:
        mean, std = self._shaped(x)
        return (x - mean) / std

    def inverse(self, x: Tensor) -> Tensor:
        """x from x̂."""
        mean, std = self._shaped(x)
        return x * std + mean

    def _shaped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim <= self.axes or x.shape[-1 - self.axes] != len(self.mean):
            raise ValueError(
                f"got an input of shape {tuple(x.shape)}; expected {len(self.mean)} channels before its last "
                f"{self.axes} axes"
            )
        shape = (len(self.mean), *[1] * self.axes)
        return x.new_tensor(self.mean).view(shape), x.new_tensor(self.std).view(shape)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Parts of rows (x, y), and what a net and a task must know of them.

    x is floating point and normalised: (C, H, W), (C, D, H, W) or (C,) for a row of a table; or the numbers of words,
    (T,). y is a class, a mask (H, W) or (D, H, W) whose `void` pixels count nowhere, or a number, standardised by
    `target`.
    """

    name: str
    task: Task
    train: Dataset[Any]
    validation: Dataset[Any] | None  # None where none of the training rows were to be kept apart
    test: Dataset[Any] | None  # None where the labels of a set's test rows are not public
    channels: int  # of an image or a volume; columns of a table; words of a vocabulary
    classes: tuple[str, ...] = ()  # their names; none in regression
    normalisation: Normalise | None = None
    augmentation: Augment | None = None
    void: int | None = None
    target: Normalisation | None = None  # of the targets of a regression: target.inverse gives them in their units
    vocabulary: Any = None  # of a set of texts: vocabulary.encode(sentence) gives x
    schema: Any = None  # of a table: what was made of each column; schema.encode(frame) gives x

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def augmented(self) -> Dataset[Any]:
        """The training part with the set's augmentation, drawn anew at each reading; train itself without one."""
        return self.train if self.augmentation is None else _augmented(self.train, self.augmentation)

    def imbalanced(self, counts: Sequence[int] | Mapping[int, int], *, seed: int = 0) -> "DataSet":
        """The same set with counts[c] training rows of class c, drawn by the seed (paper, section 4.5: 50 … 500)."""
        self._must_be("classification", "imbalanced")
        rows = long_tailed(self.train, counts, seed=seed)
        train = self.train.take(rows.indices) if isinstance(self.train, Part) else rows
        return replace(self, train=train)

    def corrupted(self, corruption: str, severity: int, *, seed: int = 0) -> "DataSet":
        """The same set with corrupted test images: before they are normalised, as a camera would."""
        known = CORRUPTIONS | ROTATION
        if corruption not in known:
            raise ValueError(f"got corruption={corruption!r}; expected one of {', '.join(known)}")
        if not isinstance(self.normalisation, Normalisation) or self.normalisation.axes != 2:
            raise ValueError(f"got {self.name}, whose inputs are no images; expected images to corrupt")
        if corruption in ROTATION and self.task == "segmentation":
            raise ValueError(
                f"got {corruption} of {self.name}, whose masks would not turn with their images; expected one of "
                f"{', '.join(CORRUPTIONS)}"
            )
        if self.test is None or isinstance(self.test, IterableDataset):
            raise ValueError(f"got {self.name} without test rows that can be read by number; expected some")
        raw = _Raw(self.test, self.normalisation)
        test = Corrupted(raw, known[corruption], severity, seed=seed, prepare=self.normalisation)
        return replace(self, test=test)

    def _must_be(self, task: Task, what: str) -> None:
        if self.task != task or isinstance(self.train, IterableDataset):
            kind = "a stream" if isinstance(self.train, IterableDataset) else self.task
            raise ValueError(f"got {self.name}, which is {kind}; expected {task} with rows to count for .{what}(…)")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {_size(getattr(self, name))}" for name in ("train", "validation", "test"))
        kind = f"{self.num_classes} classes" if self.classes else "numbers"
        return f"DataSet({self.name!r}, {self.task}, {kind}, {self.channels} channels; {sizes})"


def _augmented(train: Dataset[Any], augment: Augment) -> Dataset[Any]:
    if isinstance(train, Subset):  # random_split's, too
        return Subset(_augmented(train.dataset, augment), train.indices)
    if not isinstance(train, Part | Stream):
        raise ValueError(
            f"got training rows of type {type(train).__name__}, which take no augmentation; expected a Part, a Stream, "
            "or a Subset of a Part"
        )
    return replace(train, augment=augment)


def _size(part: Dataset[Any] | None) -> str:
    if part is None:
        return "none"
    return f"{len(part):,}" if hasattr(part, "__len__") else "streamed"


@dataclass(frozen=True, eq=False)
class _Raw(Dataset[Any]):
    """The images of a part as they were before they were normalised, in [0, 1]."""

    data: Dataset[Any]
    normalisation: Normalisation

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x, y = self.data[i]
        return self.normalisation.inverse(x).clamp(0.0, 1.0), y
