"""How do accuracy and calibration hold when inputs drift from the training data? By corruption and severity.

    figures(corruption, severity) of p(y | prepare(corrupt(x, severity))),   x ∈ [0, 1]

Paper, appendix B (calibration under distributional shift); Ovadia, Fertig, Ren, Nado, Sculley, Nowozin, Dillon,
Lakshminarayanan and Snoek, Can you trust your model's uncertainty? NeurIPS 2019. Data are read once, batch by batch,
and every batch is corrupted in every way; `neuboots.data.corruptions` has the ten of CIFAR-C, and rotation.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from neuboots.evaluation._batching import LabeledData, align_labels, check_predictor, format_table, iter_batches
from neuboots.metrics import SegmentationMetrics
from neuboots.prediction import Predictor

CORRUPTION_METRICS = ("accuracy", "ece", "nll", "brier")


class CorruptionFunction(Protocol):
    """Images (N, C, H, W) in [0, 1] to others; `index` are the row numbers (N,) that name, with the seed, its draws."""

    def __call__(self, images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class CorruptionReport:
    """What `evaluate_corruptions` found: each figure by corruption and severity, (K, S), and on clean data."""

    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    clean: dict[str, float]  # figure → value
    accuracy: Tensor
    ece: Tensor
    nll: Tensor
    brier: Tensor
    count: int
    num_samples: int
    seed: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for the clean data and one for each corruption and severity."""
        found: list[dict[str, Any]] = [{"corruption": "clean", "severity": 0, **self.clean}]
        for k, name in enumerate(self.corruptions):
            for s, severity in enumerate(self.severities):
                figures = {figure: float(getattr(self, figure)[k, s]) for figure in CORRUPTION_METRICS}
                found.append({"corruption": name, "severity": severity, **figures})
        return found

    @property
    def by_severity(self) -> list[dict[str, Any]]:
        """The mean over corruptions, one row for each severity; severity 0 is the clean data."""
        found: list[dict[str, Any]] = [{"severity": 0, **self.clean}]
        for s, severity in enumerate(self.severities):
            found.append(
                {"severity": severity, **{name: float(getattr(self, name)[:, s].mean()) for name in CORRUPTION_METRICS}}
            )
        return found

    def __str__(self) -> str:
        what = f"mean over {len(self.corruptions)} corruptions" if len(self.corruptions) > 1 else self.corruptions[0]
        head = f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}; {what}, severity 0 is clean"
        return f"{head}\n{format_table(self.by_severity)}"


def evaluate_corruptions(
    predictor: Predictor,
    data: LabeledData,
    corruptions: Mapping[str, CorruptionFunction],
    *,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    num_samples: int = 100,
    seed: int = 0,
    num_bins: int = 15,
    ignore_index: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> CorruptionReport:
    """Accuracy, ECE, NLL and Brier on clean and corrupted images, from rows (x, y) with x in [0, 1].

    `prepare` is what the net's images go through after the corruption, such as normalisation. A corruption is any
    function of (images, severity, seed=…, index=…), where `index` counts the rows as they come: give data in a fixed
    order, not shuffled, for the same noise on the same image. Pixels that are classified count as inputs of their own;
    `ignore_index` is the label of those that have none.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> x = torch.rand(100, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, x.flatten(1).argmax(1))  # which pixel is brighter?
    >>> fade = lambda images, severity, seed, index: images * (1 - severity / 5)
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Identity())
    >>> print(
    ...     evaluate_corruptions(
    ...         DeterministicPredictor(net), data, {"fade": fade}, severities=(1, 4), num_samples=1, progress=False
    ...     )
    ... )
    N = 100, B = 1, seed 0; fade, severity 0 is clean
    severity  accuracy     ece     nll   brier
           0         1  0.4306  0.5678  0.3772
           1         1   0.444  0.5902  0.3985
           4         1  0.4858  0.6654  0.4723
    """
    check_predictor(predictor)
    if not isinstance(corruptions, Mapping) or not all(map(callable, corruptions.values())):
        kinds = corruptions.values() if isinstance(corruptions, Mapping) else [corruptions]
        got = " and ".join(dict.fromkeys(type(kind).__name__ for kind in kinds))
        raise ValueError(f"got corruptions of type {got}; expected a dict of functions by name, as CORRUPTIONS is")
    levels = _levels(severities)
    if not corruptions or not levels or len(set(levels)) < len(levels):
        raise ValueError(
            f"got {len(corruptions)} corruptions and severities {levels}; expected at least one of each, and none twice"
        )
    cases: list[tuple[str | None, int]] = [(None, 0), *((name, level) for name in corruptions for level in levels)]
    tallies: dict[tuple[str | None, int], SegmentationMetrics] = {}  # which keeps nothing for an input
    done = 0
    for x, y in iter_batches(data, batch_size, title="shift", progress=progress):
        if not isinstance(x, Tensor):
            raise ValueError(f"got inputs of type {type(x).__name__}; expected one tensor of images, (N, C, H, W)")
        index = torch.arange(done, done + len(x))
        done += len(x)
        for name, severity in cases:
            images = x if name is None else corruptions[name](x, severity, seed=seed, index=index)
            if not isinstance(images, Tensor) or images.shape != x.shape:
                shape = f"images of shape {tuple(images.shape)}" if isinstance(images, Tensor) else repr(images)
                raise ValueError(f"the corruption {name!r} made {shape} of {tuple(x.shape)}; expected the same")
            probs = predictor.summarize(prepare(images), num_samples, seed=seed).probs
            labels = align_labels(probs, y, ignore_index=ignore_index)
            part = SegmentationMetrics.from_batch(
                probs, labels, ignore_index=-1 if ignore_index is None else ignore_index, num_bins=num_bins
            )
            before = tallies.get((name, severity))
            tallies[name, severity] = part if before is None else before + part

    def figures(figure: str) -> Tensor:
        rows = [[float(getattr(tallies[name, level], figure)) for level in levels] for name in corruptions]
        return torch.tensor(rows, dtype=torch.float64)  # (K, S)

    return CorruptionReport(
        corruptions=tuple(corruptions),
        severities=levels,
        clean={figure: float(getattr(tallies[None, 0], figure)) for figure in CORRUPTION_METRICS},
        count=done,
        num_samples=num_samples,
        seed=seed,
        **{figure: figures(figure) for figure in CORRUPTION_METRICS},
    )


def _levels(severities: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(level) for level in severities)
    except TypeError:
        raise ValueError(f"got severities={severities!r}; expected whole numbers, such as (1, 3, 5)") from None
