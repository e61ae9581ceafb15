"""Imbalance: how well are the rare classes found, and how far do replicates and seeds differ on them?

    F1_c = 2 n_cc / (Σ_t n_tc + Σ_g n_cg),   n_tg: rows of class t taken for g by the predictive mean
    spread of F1_c = std over b of the F1_c of replicate b, or over seeds of that of the mean

Paper, section 4.5 and figure 5: training sets with counts[c] rows of class c, F1 of the rarest (minor) and the most
frequent (major) class. Counts of replicates are gathered batch by batch: (B, C, C) numbers, however many the data; the
samples of one batch, (B, N, C, *), are held at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_seed
from neuboots._validation import check_int
from neuboots.evaluation._batching import LabeledData, align_labels, check_predictor, format_table, iter_batches
from neuboots.evaluation._parallel import cached_result, check_repeated_fit, fingerprint, make_reference_net, run_jobs
from neuboots.loading import check_length, load_class_labels
from neuboots.metrics import confusion_matrix
from neuboots.metrics._base import MetricState
from neuboots.metrics.classification import ConfusionMatrix
from neuboots.prediction import Method, Prediction, Predictor, class_probabilities
from neuboots.training import TrainingConfig

# -- one predictor ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Counts(MetricState):
    """n_tg of the predictive mean, and of each replicate."""

    mean: ConfusionMatrix
    replicates: Tensor  # (B, C, C)

    @classmethod
    def of(cls, prediction: Prediction, y: Tensor, ignore_index: int | None) -> Self | None:
        """Of the labels that are not void; None where there are none."""
        probs = prediction.probs  # (N, C, *)
        labels = align_labels(probs, y, ignore_index=ignore_index)
        counted = (
            torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
        )  # (N, *)
        if not bool(counted.any()):
            return None
        labels = labels[counted]  # (M,), M rows or pixels
        mean = ConfusionMatrix(confusion_matrix(probs.movedim(1, -1)[counted], labels).cpu())
        classes, B = probs.shape[1], prediction.num_samples
        guesses = class_probabilities(prediction.samples, 2).argmax(2)[:, counted]  # (B, M)
        first = torch.arange(B, device=guesses.device)[:, None] * classes**2
        cells = first + labels * classes + guesses
        counted = torch.bincount(cells.flatten(), minlength=B * classes**2)
        return cls(mean, counted.reshape(B, classes, classes).cpu())


@dataclass(frozen=True, eq=False)
class ImbalanceReport:
    """What `evaluate_imbalance` found; C classes, B replicates."""

    f1: Tensor  # of the predictive mean: (C,)
    precision: Tensor  # (C,)
    recall: Tensor  # (C,)
    f1_replicates: Tensor  # (B, C)
    support: Tensor  # rows of each class in the data: (C,)
    minor: int  # the rarest class
    major: int  # the most frequent class
    num_samples: int
    seed: int

    @property
    def f1_std(self) -> Tensor:
        """Over replicates: (C,); zero for a single one."""
        return _std(self.f1_replicates)

    @property
    def macro_f1(self) -> float:
        """The mean over classes."""
        return float(self.f1.mean())

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class."""
        columns = {"F1": self.f1, "std": self.f1_std, "precision": self.precision, "recall": self.recall}
        return [
            {"class": _with_role(c, self.minor, self.major), "rows": int(self.support[c])}
            | {name: float(values[c]) for name, values in columns.items()}
            for c in range(len(self.f1))
        ]

    def __str__(self) -> str:
        header = (
            f"N = {int(self.support.sum()):,}, B = {self.num_samples}, seed {self.seed}; F1 of the predictive mean "
            f"(macro {self.macro_f1:.4g}), std over replicates"
        )
        return f"{header}\n{format_table(self.rows())}"


def evaluate_imbalance(
    predictor: Predictor,
    data: LabeledData,
    *,
    train_counts: Sequence[int] | None = None,
    num_samples: int = 100,
    seed: int = 0,
    ignore_index: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> ImbalanceReport:
    """F1, precision and recall of each class over rows (x, y), and the spread of F1 over replicates.

    The minor and the major class are those of `train_counts`, the number of training rows of each class; without it,
    those of the data. A method of K members has K replicates. A class that is neither there nor guessed has F1 = 0.
    Pixels count as rows of their own; those labelled `ignore_index` are passed over. A batch of samples, (B, N, C, *), is held
    at a time.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> rows = TensorDataset(torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 0, 1, 1]))
    >>> print(evaluate_imbalance(DeterministicPredictor(torch.nn.Identity()), rows, progress=False))
    N = 4, B = 1, seed 0; F1 of the predictive mean (macro 0.7333), std over replicates
    class      rows      F1  std  precision  recall
    0 (minor)     1  0.6667    0        0.5       1
    1 (major)     3     0.8    0          1  0.6667
    """
    check_predictor(predictor)
    num_samples, seed = check_int("num_samples", num_samples, minimum=1), check_int("seed", seed)
    B = num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)
    total: _Counts | int = 0
    for x, y in iter_batches(data, batch_size, title="imbalance", progress=progress):
        part = _Counts.of(predictor.predict(x, B, seed=seed), y, ignore_index)
        total = total if part is None else total + part
    if not isinstance(total, _Counts):
        raise ValueError(f"got data whose labels are all void ({ignore_index}); expected some that count")
    support = total.mean.matrix.sum(1)
    minor, major = _extremes(support if train_counts is None else train_counts, len(support))
    return ImbalanceReport(
        f1=total.mean.f1,
        precision=total.mean.precision,
        recall=total.mean.recall,
        f1_replicates=torch.stack([ConfusionMatrix(matrix).f1 for matrix in total.replicates]),
        support=support,
        minor=minor,
        major=major,
        num_samples=B,
        seed=seed,
    )


def _extremes(counts: Sequence[int] | Tensor, classes: int) -> tuple[int, int]:
    """The rarest and the most frequent class, the first of several."""
    if len(counts) > classes or len(counts) == 0:
        raise ValueError(f"got counts of {len(counts)} classes for a net with {classes}; expected one for each")
    numbers = torch.zeros(classes, dtype=torch.int64)
    numbers[: len(counts)] = torch.tensor([check_int(f"train_counts[{c}]", n, minimum=0) for c, n in enumerate(counts)])
    there = numbers.where(numbers > 0, numbers.max() + 1)  # a class that is not there is not the rarest
    return int(there.argmin()), int(numbers.argmax())


def _with_role(c: int, minor: int, major: int) -> str:
    role = {minor: " (minor)"} | {major: " (major)"} if minor != major else {}
    return f"{c}{role.get(c, '')}"


def _std(values: Tensor) -> Tensor:
    return values.std(0) if len(values) > 1 else torch.zeros_like(values[0])


# -- several seeds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImbalanceOverSeedsReport:
    """What `evaluate_imbalance_over_seeds` found: C classes, a training for each seed."""

    method: str
    f1: Tensor  # of the predictive mean of each training: (num_seeds, C)
    replicate_std: Tensor  # std of F1 over the replicates of each training: (num_seeds, C)
    train_counts: Tensor  # (C,)
    minor: int
    major: int
    seeds: tuple[int, ...]
    num_samples: int

    @property
    def mean(self) -> Tensor:
        """Over seeds: (C,)."""
        return self.f1.mean(0)

    @property
    def std(self) -> Tensor:
        """Over seeds: (C,); zero for a single one."""
        return _std(self.f1)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class."""
        return [
            {
                "class": _with_role(c, self.minor, self.major),
                "train rows": int(self.train_counts[c]),
                "F1": float(self.mean[c]),
                "std (seeds)": float(self.std[c]),
                "std (replicates)": float(self.replicate_std[:, c].mean()),
            }
            for c in range(self.f1.shape[1])
        ]

    def __str__(self) -> str:
        header = (
            f"{self.method}: F1 of the predictive mean, {len(self.seeds)} seeds, B = {self.num_samples} "
            f"(macro {float(self.f1.mean()):.4g})"
        )
        return f"{header}\n{format_table(self.rows())}"


def evaluate_imbalance_over_seeds(
    method: Method,
    model: Callable[[], nn.Module] | None,
    train_data: Dataset[Any],
    test_data: LabeledData,
    config: TrainingConfig,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    num_samples: int = 100,
    batch_size: int = 256,
    num_workers: int = 1,
    folder: Path | None = None,
    progress: bool = True,
) -> ImbalanceOverSeedsReport:
    """Train once with each seed (in place of the recipe's) and gather the F1 of each class on the test rows.

    Trainings run in `num_workers` processes. With a folder each finished one is kept there by its seed, so that other
    seeds may be asked for, in any order, and one that was cut short goes on where it stopped; a folder made with other
    settings or other data is refused. `model` must make a new net at each call.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Deterministic
    >>> x = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
    >>> rows = TensorDataset(x, (x[:, 0] > 1).long())
    >>> config = TrainingConfig(epochs=2, progress=False)
    >>> found = evaluate_imbalance_over_seeds(
    ...     Deterministic(), lambda: nn.Linear(2, 2), rows, rows, config, seeds=(0, 1), progress=False
    ... )
    >>> found.f1.shape, found.minor
    (torch.Size([2, 2]), 1)
    """
    check_repeated_fit(config, test_data)
    seeds = _checked_seeds(seeds)
    num_samples = check_int("num_samples", num_samples, minimum=1)
    check_length(train_data)
    counts = load_class_labels(train_data).bincount()
    net = make_reference_net(model, 0)
    where = None if folder is None else Path(folder)
    if where is not None:
        plain = replace(config, seed=0)  # each training has its own
        identity = fingerprint(
            method=method, net=net, config=plain, num_samples=num_samples, train=train_data, test=test_data
        )
        # A unit of its own holds what all seeds share, and with it the folder: seeds are kept by their names.
        run_jobs(lambda _: {"train_counts": counts.tolist()}, 1, folder=where, key=identity, progress=False)
    quiet = replace(config, progress=config.progress and progress and num_workers == 1)

    def fit(seed: int, checkpoints: Path | None) -> dict[str, Any]:
        predictor = method.fit(cast(Any, model), train_data, replace(quiet, seed=seed, folder=checkpoints))
        found = evaluate_imbalance(
            predictor,
            test_data,
            train_counts=counts.tolist(),
            num_samples=num_samples,
            seed=derive_seed(seed, "imbalance"),
            batch_size=batch_size,
            progress=False,
        )
        return {"num_samples": found.num_samples, "f1": found.f1.tolist(), "replicate_std": found.f1_std.tolist()}

    def run(k: int) -> dict[str, Any]:
        return cached_result(None if where is None else where / f"seed-{seeds[k]}.json", partial(fit, seeds[k]))

    results = run_jobs(run, len(seeds), num_workers=num_workers, description="seeds", progress=progress)
    f1 = torch.tensor([result["f1"] for result in results], dtype=torch.float64)
    classes = f1.shape[1]
    minor, major = _extremes(counts, classes)
    return ImbalanceOverSeedsReport(
        method=type(method).__name__,
        f1=f1,
        replicate_std=torch.tensor([result["replicate_std"] for result in results], dtype=torch.float64),
        train_counts=torch.nn.functional.pad(counts, (0, classes - len(counts))),
        minor=minor,
        major=major,
        seeds=seeds,
        num_samples=results[0]["num_samples"],
    )


def _checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(seeds, Iterable):
        raise ValueError(f"got seeds={seeds!r}; expected several, such as range(5)")
    found = tuple(check_int("seed", seed) for seed in seeds)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"got seeds={found}; expected at least one, and none twice")
    return found
