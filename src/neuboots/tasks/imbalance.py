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
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots.batches import check_rows, classes_in
from neuboots.keys import seed_named, whole
from neuboots.metrics import confusion_matrix
from neuboots.metrics.confusion import Confusion
from neuboots.metrics.tally import Tally
from neuboots.prediction import Method, Prediction, Predictor, class_probabilities
from neuboots.tasks.common import Rows, batches_of, check_predictor, labels_for, table
from neuboots.tasks.identity import identity_of, net_of
from neuboots.tasks.repeated import check_fits, kept
from neuboots.tasks.units import run_units
from neuboots.training import Recipe

# -- one predictor ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Counts(Tally):
    """n_tg of the predictive mean, and of each replicate."""

    mean: Confusion
    replicates: Tensor  # (B, C, C)

    @classmethod
    def of(cls, prediction: Prediction, y: Tensor, void: int | None) -> Self | None:
        """Of the labels that are not void; None where there are none."""
        probs = prediction.probs  # (N, C, *)
        labels = labels_for(probs, y, void=void)
        counted = torch.ones_like(labels, dtype=torch.bool) if void is None else labels != void  # (N, *)
        if not bool(counted.any()):
            return None
        labels = labels[counted]  # (M,), M rows or pixels
        mean = Confusion(confusion_matrix(probs.movedim(1, -1)[counted], labels).cpu())
        classes, B = probs.shape[1], prediction.num_samples
        guesses = class_probabilities(prediction.samples, 2).argmax(2)[:, counted]  # (B, M)
        first = torch.arange(B, device=guesses.device)[:, None] * classes**2
        cells = first + labels * classes + guesses
        counted = torch.bincount(cells.flatten(), minlength=B * classes**2)
        return cls(mean, counted.reshape(B, classes, classes).cpu())


@dataclass(frozen=True, eq=False)
class Imbalance:
    """What `imbalance` found; C classes, B replicates."""

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
        return f"{header}\n{table(self.rows())}"


def imbalance(
    predictor: Predictor,
    data: Rows,
    *,
    train_counts: Sequence[int] | None = None,
    num_samples: int = 100,
    seed: int = 0,
    void: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> Imbalance:
    """F1, precision and recall of each class over rows (x, y), and the spread of F1 over replicates.

    The minor and the major class are those of `train_counts`, the number of training rows of each class; without it,
    those of the data. A method of K members has K replicates. A class that is neither there nor guessed has F1 = 0.
    Pixels count as rows of their own; those labelled `void` are passed over. A batch of samples, (B, N, C, *), is held
    at a time.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> rows = TensorDataset(torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 0, 1, 1]))
    >>> print(imbalance(PlainPredictor(torch.nn.Identity()), rows, progress=False))
    N = 4, B = 1, seed 0; F1 of the predictive mean (macro 0.7333), std over replicates
    class      rows      F1  std  precision  recall
    0 (minor)     1  0.6667    0        0.5       1
    1 (major)     3     0.8    0          1  0.6667
    """
    check_predictor(predictor)
    num_samples, seed = whole("num_samples", num_samples, least=1), whole("seed", seed)
    B = num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)
    total: _Counts | int = 0
    for x, y in batches_of(data, batch_size, title="imbalance", progress=progress):
        part = _Counts.of(predictor.predict(x, B, seed=seed), y, void)
        total = total if part is None else total + part
    if not isinstance(total, _Counts):
        raise ValueError(f"got data whose labels are all void ({void}); expected some that count")
    support = total.mean.matrix.sum(1)
    minor, major = _extremes(support if train_counts is None else train_counts, len(support))
    return Imbalance(
        f1=total.mean.f1,
        precision=total.mean.precision,
        recall=total.mean.recall,
        f1_replicates=torch.stack([Confusion(matrix).f1 for matrix in total.replicates]),
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
    numbers[: len(counts)] = torch.tensor([whole(f"train_counts[{c}]", n, least=0) for c, n in enumerate(counts)])
    there = numbers.where(numbers > 0, numbers.max() + 1)  # a class that is not there is not the rarest
    return int(there.argmin()), int(numbers.argmax())


def _with_role(c: int, minor: int, major: int) -> str:
    role = {minor: " (minor)"} | {major: " (major)"} if minor != major else {}
    return f"{c}{role.get(c, '')}"


def _std(values: Tensor) -> Tensor:
    return values.std(0) if len(values) > 1 else torch.zeros_like(values[0])


# -- several seeds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImbalanceOverSeeds:
    """What `over_seeds` found: C classes, a training for each seed."""

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
        return f"{header}\n{table(self.rows())}"


def over_seeds(
    method: Method,
    make_net: Callable[[], nn.Module] | None,
    train: Dataset[Any],
    test: Rows,
    recipe: Recipe,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    num_samples: int = 100,
    batch_size: int = 256,
    num_workers: int = 1,
    folder: Path | None = None,
    progress: bool = True,
) -> ImbalanceOverSeeds:
    """Train once with each seed (in place of the recipe's) and gather the F1 of each class on the test rows.

    Trainings run in `num_workers` processes. With a folder each finished one is kept there by its seed, so that other
    seeds may be asked for, in any order, and one that was cut short goes on where it stopped; a folder made with other
    settings or other data is refused. `make_net` must make a new net at each call.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Plain
    >>> x = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
    >>> rows = TensorDataset(x, (x[:, 0] > 1).long())
    >>> recipe = Recipe(epochs=2, progress=False)
    >>> found = over_seeds(Plain(), lambda: nn.Linear(2, 2), rows, rows, recipe, seeds=(0, 1), progress=False)
    >>> found.f1.shape, found.minor
    (torch.Size([2, 2]), 1)
    """
    check_fits(method, recipe, test, task="over_seeds")
    seeds = _checked_seeds(seeds)
    num_samples = whole("num_samples", num_samples, least=1)
    check_rows(train)
    counts = classes_in(train).bincount()
    net = net_of(make_net, 0)
    where = None if folder is None else Path(folder)
    if where is not None:
        plain = replace(recipe, seed=0)  # each training has its own
        identity = identity_of(method=method, net=net, recipe=plain, num_samples=num_samples, train=train, test=test)
        # A unit of its own holds what all seeds share, and with it the folder: seeds are kept by their names.
        run_units(lambda _: {"train_counts": counts.tolist()}, 1, folder=where, identity=identity, progress=False)
    quiet = replace(recipe, progress=recipe.progress and progress and num_workers == 1)

    def fit(seed: int, checkpoints: Path | None) -> dict[str, Any]:
        predictor = method.fit(make_net, train, replace(quiet, seed=seed, folder=checkpoints))
        found = imbalance(
            predictor,
            test,
            train_counts=counts.tolist(),
            num_samples=num_samples,
            seed=seed_named(seed, "imbalance"),
            batch_size=batch_size,
            progress=False,
        )
        return {"num_samples": found.num_samples, "f1": found.f1.tolist(), "replicate_std": found.f1_std.tolist()}

    def run(k: int) -> dict[str, Any]:
        return kept(None if where is None else where / f"seed-{seeds[k]}.json", partial(fit, seeds[k]))

    results = run_units(run, len(seeds), num_workers=num_workers, title="seeds", progress=progress)
    f1 = torch.tensor([result["f1"] for result in results], dtype=torch.float64)
    classes = f1.shape[1]
    minor, major = _extremes(counts, classes)
    return ImbalanceOverSeeds(
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
    found = tuple(whole("seed", seed) for seed in seeds)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"got seeds={found}; expected at least one, and none twice")
    return found
