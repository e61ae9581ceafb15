"""Metrics of each class under class imbalance, and their spread over replicates and seeds.

    F1_c = 2 n_cc / (Σ_t n_tc + Σ_g n_cg),   n_tg: inputs of class t predicted as g by the predictive mean
    spread of F1_c = std over b of the F1_c of replicate b, or over seeds of that of the mean

Paper, section 4.5 and figure 5: training sets with counts[c] examples of class c, F1 of the rarest (minor) and the most
frequent (major) class. Counts of replicates, (B, C, C), are summed batch by batch; only the samples of one batch,
(B, N, C, *), are in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_seed
from neuboots._validation import ArgumentError, check_int
from neuboots.evaluation._batching import (
    LabeledData,
    align_labels,
    check_any_counted,
    check_predictor,
    exclusive_probs,
    format_table,
    is_counted,
    iter_batches,
)
from neuboots.evaluation._parallel import (
    cached_result,
    check_repeated_fit,
    make_reference_net,
    run_jobs,
)
from neuboots.loading import check_length, load_class_labels
from neuboots.metrics import ConfusionMatrix
from neuboots.prediction import Method, Prediction, Predictor, class_probabilities
from neuboots.training import TrainingConfig

# -- one predictor -------------------------------------------------------------------------------------


def _count_confusions(prediction: Prediction, y: Tensor, ignore_index: int | None) -> Tensor:
    """n_tg of the predictive mean, then of each replicate, over labels that are not `ignore_index`: (1 + B, C, C)."""
    labels = align_labels(exclusive_probs(prediction), y, ignore_index=ignore_index)
    counted = is_counted(labels, ignore_index)
    samples = class_probabilities(prediction.samples, 2)  # (B, N, C, *)
    preds = torch.cat([prediction.probs.argmax(1)[None], samples.argmax(2)])[:, counted]  # (1 + B, M)
    K, C = len(preds), samples.shape[2]
    cells = torch.arange(K, device=preds.device)[:, None] * C**2 + labels[counted] * C + preds
    return torch.bincount(cells.flatten(), minlength=K * C**2).reshape(K, C, C).cpu()


@dataclass(frozen=True, eq=False)
class ImbalanceReport(ConfusionMatrix):
    """Result of `evaluate_imbalance` for C classes and B replicates: the confusion matrix of the predictive mean.

    Its properties are F1, precision and recall of each class; `matrix` is (C, C).

    Args:
        replicates: Confusion matrix of each replicate, (B, C, C).
        minor: The rarest class.
        major: The most frequent class.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
    """

    replicates: Tensor
    minor: int
    major: int
    num_samples: int
    seed: int

    @property
    def support(self) -> Tensor:
        """Number of inputs of each class, (C,)."""
        return self.matrix.sum(1)

    @property
    def f1_replicates(self) -> Tensor:
        """F1 of each replicate, (B, C)."""
        return torch.stack([ConfusionMatrix(matrix).f1 for matrix in self.replicates])

    @property
    def f1_std(self) -> Tensor:
        """Standard deviation over replicates, (C,); zero for a single one."""
        return _std(self.f1_replicates)

    @property
    def macro_f1(self) -> float:
        """Mean of F1 over classes."""
        return float(self.f1.mean())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of the table for each class."""
        columns = {"N": self.support, "F1": self.f1, "std": self.f1_std}
        return _class_rows(self, columns | {"precision": self.precision, "recall": self.recall})

    def __str__(self) -> str:
        header = (
            f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}; F1 of the predictive mean "
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
    ignore_index: int | None = -100,
    batch_size: int = 256,
    progress: bool = True,
) -> ImbalanceReport:
    """Compute F1, precision and recall of each class, and the spread of F1 over replicates.

    Args:
        predictor: Predictor of a classifier; pixels count as inputs of their own.
        data: Data set of examples (x, y), or a loader of batches.
        train_counts: Number of training examples of each class, which define the minor and the major class; None: those
            of the data.
        num_samples: Number of replicates B; a method of K members uses at most K.
        seed: Seed of the replicates.
        ignore_index: Label of inputs that do not count; None if all do.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table. A class that is neither a label nor predicted has F1 = 0.

    Raises:
        ArgumentError: If labels or counts do not fit the outputs, or no label counts.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> logits = torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
        >>> data = TensorDataset(logits, torch.tensor([1, 0, 1, 1]))
        >>> print(evaluate_imbalance(DeterministicPredictor(torch.nn.Identity()), data, progress=False))
        N = 4, B = 1, seed 0; F1 of the predictive mean (macro 0.7333), std over replicates
        class      N      F1  std  precision  recall
        0 (minor)  1  0.6667    0        0.5       1
        1 (major)  3     0.8    0          1  0.6667
    """
    check_predictor(predictor)
    num_samples, seed = check_int("num_samples", num_samples, minimum=1), check_int("seed", seed)
    B = num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)
    confusions = torch.zeros(1, 1, 1, dtype=torch.int64)
    for x, y in iter_batches(data, batch_size, title="imbalance", progress=progress):
        confusions = confusions + _count_confusions(predictor.predict(x, B, seed=seed), y, ignore_index)
    support = confusions[0].sum(1)
    check_any_counted(int(support.sum()), ignore_index)
    minor, major = _rarest_and_most_frequent(support if train_counts is None else train_counts, len(support))
    return ImbalanceReport(confusions[0], confusions[1:], minor, major, B, seed)


def _rarest_and_most_frequent(counts: Sequence[int] | Tensor, num_classes: int) -> tuple[int, int]:
    """The first of several in a tie; a class without examples is not the rarest."""
    if len(counts) > num_classes or len(counts) == 0:
        raise ArgumentError("train_counts", f"{len(counts)} counts", f"one for each of {num_classes} classes")
    values = torch.zeros(num_classes, dtype=torch.int64)
    values[: len(counts)] = torch.tensor([check_int("train_counts", n, minimum=0) for n in counts])
    return int(values.where(values > 0, values.max() + 1).argmin()), int(values.argmax())


def _class_rows(
    report: "ImbalanceReport | ImbalanceOverSeedsReport", columns: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """A row for each class, from columns of C values."""
    minor, major = report.minor, report.major
    role = {minor: " (minor)", major: " (major)"} if minor != major else {}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [{"class": f"{c}{role.get(c, '')}"} | dict(zip(columns, row, strict=True)) for c, row in enumerate(rows)]


def _std(values: Tensor) -> Tensor:
    return values.std(0) if len(values) > 1 else torch.zeros_like(values[0])


# -- several seeds -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImbalanceOverSeedsReport:
    """Result of `evaluate_imbalance_over_seeds` for C classes and one training per seed.

    Args:
        method: Class name of the method.
        f1: F1 of the predictive mean of each training, (num_seeds, C).
        replicate_std: Standard deviation of F1 over the replicates of each training, (num_seeds, C).
        train_counts: Number of training examples of each class, (C,).
        minor: The rarest class.
        major: The most frequent class.
        seeds: Seeds of the trainings.
        num_samples: Number of replicates B.
    """

    method: str
    f1: Tensor
    replicate_std: Tensor
    train_counts: Tensor
    minor: int
    major: int
    seeds: tuple[int, ...]
    num_samples: int

    @property
    def mean(self) -> Tensor:
        """Mean of F1 over seeds: (C,)."""
        return self.f1.mean(0)

    @property
    def std(self) -> Tensor:
        """Standard deviation of F1 over seeds, (C,); zero for a single one."""
        return _std(self.f1)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of the table for each class."""
        spread = {"std (seeds)": self.std, "std (replicates)": self.replicate_std.mean(0)}
        return _class_rows(self, {"N (train)": self.train_counts, "F1": self.mean} | spread)

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
    """Train once with each seed and compute the F1 of each class on the test data.

    Args:
        method: The method.
        model: Function that returns a new net at each call; None for a method without a net.
        train_data: Training data set.
        test_data: Data set of examples (x, y), or a loader of batches.
        config: Training options; its seed is replaced.
        seeds: Seeds of the trainings.
        num_samples: Number of replicates B.
        batch_size: Number of test inputs at a time.
        num_workers: Number of processes.
        folder: Folder for the results by seed, from which an interrupted run resumes and to which other seeds can be
            added; a folder of other settings or data is an error.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table.

    Raises:
        ArgumentError: If an option is invalid, or the folder is of other settings.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import Deterministic
        >>> x = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
        >>> data, config = TensorDataset(x, (x[:, 0] > 1).long()), TrainingConfig(epochs=2, progress=False)
        >>> report = evaluate_imbalance_over_seeds(
        ...     Deterministic(), lambda: nn.Linear(2, 2), data, data, config, seeds=(0, 1), progress=False
        ... )
        >>> report.f1.shape, report.minor
        (torch.Size([2, 2]), 1)
    """
    check_repeated_fit(config, test_data)
    if isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a function that returns a new net for each seed")
    seeds = tuple(check_int("seeds", seed) for seed in seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ArgumentError("seeds", seeds, "at least one, without repetition")
    num_samples = check_int("num_samples", num_samples, minimum=1)
    check_length(train_data)
    counts = load_class_labels(train_data).bincount()
    net = make_reference_net(model, 0)
    results_folder = None if folder is None else Path(folder)
    if results_folder is not None:
        settings: dict[str, Any] = {"method": method, "net": net, "config": replace(config, seed=0)}
        settings |= {"num_samples": num_samples, "train": train_data, "test": test_data}
        # One job stores the fingerprint of the settings in the folder; the results are stored by seed.
        run_jobs(lambda _: counts.tolist(), 1, folder=results_folder, settings=settings, progress=False)
    base_config = replace(config, progress=config.progress and progress and num_workers == 1)
    options: dict[str, Any] = {"num_samples": num_samples, "batch_size": batch_size, "progress": False}

    def fit(seed: int, checkpoints: Path | None) -> dict[str, Any]:
        predictor = method.fit(cast(Any, model), train_data, replace(base_config, seed=seed, folder=checkpoints))
        report = evaluate_imbalance(predictor, test_data, seed=derive_seed(seed, "imbalance"), **options)
        return {"num_samples": report.num_samples, "f1": report.f1.tolist(), "replicate_std": report.f1_std.tolist()}

    def run(k: int) -> Any:
        file = None if results_folder is None else results_folder / f"seed-{seeds[k]}.json"
        return cached_result(file, partial(fit, seeds[k]))

    results = run_jobs(run, len(seeds), num_workers=num_workers, description="seeds", progress=progress)
    f1, replicate_std = (
        torch.tensor([result[key] for result in results], dtype=torch.float64) for key in ("f1", "replicate_std")
    )
    counts = nn.functional.pad(counts, (0, f1.shape[1] - len(counts)))
    minor, major = _rarest_and_most_frequent(counts, len(counts))
    B = results[0]["num_samples"]
    return ImbalanceOverSeedsReport(type(method).__name__, f1, replicate_std, counts, minor, major, seeds, B)
