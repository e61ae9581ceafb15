"""The loop of the paper's section 4.2: start from random labelled rows, train, choose, label, train anew.

Moon, Kim, Shin and Hwang, Confidence-aware learning for deep neural networks, ICML 2020 (the protocol).
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from neuboots.batches import check_rows
from neuboots.keys import seed_named, whole
from neuboots.losses import BinaryCrossEntropy, Brier, CrossEntropy, GaussianNLL, SquaredError
from neuboots.metrics import Classification, Segmentation, rmse
from neuboots.prediction import Method, Predictor, Summary
from neuboots.tasks.active.choice import next_to_label
from neuboots.tasks.active.strategies import Compared, Kind, Score, check_strategy
from neuboots.tasks.common import Rows, batches_of, labels_for, table, targets_for
from neuboots.tasks.identity import identity_of, net_of
from neuboots.tasks.repeated import check_fits, kept, student_interval
from neuboots.tasks.units import run_units
from neuboots.training import Recipe


@dataclass(frozen=True, eq=False)
class ActiveLearning:
    """What `active_learning` found: the learning curve of T trials over R = rounds + 1 sizes of the labelled set."""

    method: str
    strategy: str
    num_labels: Tensor  # (R,)
    figures: dict[str, Tensor]  # on the test set, by name: (T, R) each
    labelled: Tensor  # row numbers in the order in which they were labelled: (T, num_labels[-1])
    num_samples: int
    seed: int

    @property
    def trials(self) -> int:
        return len(self.labelled)

    @property
    def accuracy(self) -> Tensor:
        """Of the predictive mean on the test set: (T, R)."""
        return self._of("accuracy")

    @property
    def main(self) -> str:
        """The figure that the curve is about: accuracy, or RMSE for a regression."""
        return next(iter(self.figures))

    def mean(self, figure: str = "accuracy") -> Tensor:
        """Over trials: (R,)."""
        return self._of(figure).mean(0)

    def interval(self, figure: str = "accuracy", *, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """mean ± t s/√T: Student's interval of the mean over trials: (R,) each."""
        if self.trials < 2:
            raise ValueError("got one trial, which has no spread; expected at least 2: run active_learning(trials=5)")
        return student_interval(self._of(figure), level=level)

    def _of(self, figure: str) -> Tensor:
        if figure not in self.figures:
            raise ValueError(f"got the figure {figure!r}; expected one of {', '.join(self.figures)}")
        return self.figures[figure]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each size of the labelled set: means over trials, and the 95 % interval of the main figure."""
        found: list[dict[str, Any]] = []
        for r, count in enumerate(self.num_labels.tolist()):
            row: dict[str, Any] = {"labels": count, self.main: float(self.mean(self.main)[r])}
            if self.trials > 1:
                low, high = self.interval(self.main)
                row |= {"low": float(low[r]), "high": float(high[r])}
            found.append(row | {name: float(self.mean(name)[r]) for name in self.figures if name != self.main})
        return found

    def __str__(self) -> str:
        trials = f"means of {self.trials} trials (low, high: 95 % interval of the mean)"
        header = f"{self.method} by {self.strategy}: {trials if self.trials > 1 else 'one trial'}"
        return f"{header}, B = {self.num_samples}, seed {self.seed}\n{table(self.rows())}"


def active_learning(
    method: Method,
    make_net: Callable[[], nn.Module] | None,
    pool: Dataset[Any],
    test: Rows,
    recipe: Recipe,
    *,
    strategy: str | Score = "entropy",
    start: int = 2000,
    query: int = 2000,
    rounds: int = 10,
    trials: int = 5,
    kind: Kind | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    num_workers: int = 1,
    folder: Path | None = None,
    progress: bool = True,
) -> ActiveLearning:
    """Train on `start` random rows of the pool, then `rounds` times: label `query` rows more and train anew.

    Figures are those of the test set after each training. The first rows depend on the seed and the trial alone, so
    that methods and strategies with one seed are compared in pairs; so do the first weights of each round. The last
    query takes what is left of the pool, and the loop ends there. `kind` is found from the method's loss, or else from
    the targets of the test set. Trials run in `num_workers` processes. With a folder, every finished round is kept
    there, and a run that was cut short goes on where it stopped, to the same end; a folder made with other settings or
    other data is refused. `make_net` must make a new net at each call.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Plain
    >>> x = torch.linspace(-1, 1, 60)[:, None]
    >>> rows = TensorDataset(x, (x[:, 0] > 0.2).long())
    >>> recipe = Recipe(epochs=2, progress=False)
    >>> make_net = lambda: nn.Linear(1, 2)
    >>> options = {"start": 10, "query": 40, "rounds": 5, "trials": 2, "num_samples": 1, "progress": False}
    >>> found = active_learning(Plain(), make_net, rows, rows, recipe, **options)
    >>> found.num_labels.tolist(), found.accuracy.shape
    ([10, 50, 60], torch.Size([2, 3]))
    """
    check_fits(method, recipe, test, task="active_learning")
    n = check_rows(pool)
    start, query = whole("start", start, least=1), whole("query", query, least=1)
    rounds, trials = whole("rounds", rounds, least=0), whole("trials", trials, least=1)
    num_samples, seed = whole("num_samples", num_samples, least=1), whole("seed", seed)
    if start > n:
        raise ValueError(f"got start={start} for a pool of {n} rows; expected at most {n}")
    kind = kind or _kind_of(method, test)
    name = check_strategy(strategy, kind)
    net = net_of(make_net, recipe.seed)
    sizes = [start]
    while len(sizes) <= rounds and sizes[-1] < n:
        sizes.append(min(n, sizes[-1] + query))
    identity = ""
    if folder is not None:
        identity = identity_of(
            method=method,
            net=net,
            recipe=recipe,
            strategy=strategy,
            sizes=sizes,
            kind=kind,
            num_samples=num_samples,
            seed=seed,
            pool=pool,
            test=test,
        )
    shown = progress and num_workers == 1
    loop = _Loop(
        method=method,
        make_net=make_net,
        pool=pool,
        test=test,
        recipe=replace(recipe, progress=recipe.progress and shown),
        strategy=strategy,
        sizes=tuple(sizes),
        kind=kind,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        folder=None if folder is None else Path(folder),
        progress=shown,
    )
    results = run_units(
        loop.trial,
        trials,
        num_workers=num_workers,
        folder=loop.folder,
        identity=identity,
        title="trials",
        progress=progress,
    )
    figures = {
        figure: torch.tensor(
            [[point[figure] for point in result["figures"]] for result in results], dtype=torch.float64
        )
        for figure in results[0]["figures"][0]
    }
    labelled = torch.tensor([result["labelled"] for result in results])
    return ActiveLearning(type(method).__name__, name, torch.tensor(sizes), figures, labelled, num_samples, seed)


def _kind_of(method: Method, test: Rows) -> Kind:
    """What the outputs are, by the loss where it is known, else by the targets."""
    loss = getattr(method, "loss", None)
    classes = (CrossEntropy, Brier, BinaryCrossEntropy, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.NLLLoss)
    if isinstance(loss, classes):
        return "classes"
    if isinstance(loss, GaussianNLL):
        return "gaussian"
    if isinstance(loss, SquaredError | nn.MSELoss | nn.L1Loss | nn.HuberLoss | nn.SmoothL1Loss):
        return "regression"
    with closing(batches_of(test, 1, title="", progress=False)) as batches:
        _, y = next(batches)
    return "regression" if y.is_floating_point() else "classes"


@dataclass(frozen=True)
class _Loop:
    """All that a trial needs to know."""

    method: Method
    make_net: Callable[[], nn.Module] | None
    pool: Dataset[Any]
    test: Rows
    recipe: Recipe
    strategy: str | Score
    sizes: tuple[int, ...]
    kind: Kind
    num_samples: int
    seed: int
    batch_size: int
    folder: Path | None
    progress: bool

    def trial(self, trial: int) -> dict[str, Any]:
        """One learning curve: the figures after each training, and the rows in the order they were labelled."""
        n = check_rows(self.pool)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed_named(self.seed, "start", trial)))
        labelled = order[: self.sizes[0]].tolist()
        figures = []
        for r in range(len(self.sizes)):
            result = self._round(trial, r, labelled)
            figures.append(result["figures"])
            labelled += result["next"]
        return {"figures": figures, "labelled": labelled}

    def _round(self, trial: int, r: int, labelled: list[int]) -> dict[str, Any]:
        """Train, measure, and choose the rows of the next round; kept in the folder, and found there again."""
        file = None if self.folder is None else self.folder / f"trial-{trial:04d}" / f"round-{r:03d}.json"
        return kept(file, lambda folder: self._done(trial, r, labelled, folder))

    def _done(self, trial: int, r: int, labelled: list[int], folder: Path | None) -> dict[str, Any]:
        seeds = {what: seed_named(self.seed, what, trial, r) for what in ("predict", "query")}
        fit_seed = seed_named(self.seed, self.recipe.seed, "fit", trial, r)
        data = Subset(self.pool, labelled)
        predictor = self.method.fit(self.make_net, data, replace(self.recipe, seed=fit_seed, folder=folder))
        figures = self._figures(predictor, seeds["predict"])
        following: list[int] = []
        if r + 1 < len(self.sizes):
            taken = set(labelled)
            rest = [i for i in range(check_rows(self.pool)) if i not in taken]
            choice = next_to_label(
                predictor,
                Subset(self.pool, rest),
                self.sizes[r + 1] - self.sizes[r],
                strategy=self.strategy,
                kind=self.kind,
                num_samples=self.num_samples,
                seed=seeds["query"],
                batch_size=self.batch_size,
                progress=self.progress,
            )
            following = [rest[i] for i in choice.rows.tolist()]
        return {"figures": figures, "next": following}

    def _figures(self, predictor: Predictor, seed: int) -> dict[str, float]:
        """Of the test set."""
        measure = self._of_classes if self.kind == "classes" else self._rmse
        batches = batches_of(self.test, self.batch_size, title="testing", progress=self.progress)
        with closing(batches):  # a traceback would keep it open
            return measure(predictor, seed, batches)

    def _of_classes(self, predictor: Predictor, seed: int, batches: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        total = sum(self._tally(predictor.summarize(x, self.num_samples, seed=seed), y) for x, y in batches)
        assert isinstance(total, Classification | Segmentation), "batches_of gives at least one batch"
        names = ("accuracy", "error", "ece", "nll", "brier", *["mean_iou"] * isinstance(total, Segmentation))
        return {name: float(getattr(total, name)) for name in names}

    def _rmse(self, predictor: Predictor, seed: int, batches: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        view = Compared(predictor, self.kind)
        squares, count = 0.0, 0
        for x, y in batches:
            mean = view.summarize(x, self.num_samples, seed=seed).mean
            squares += float(rmse(mean, targets_for(mean, y))) ** 2 * mean.numel()
            count += mean.numel()
        return {"rmse": (squares / count) ** 0.5}

    def _tally(self, figures: Summary, y: Tensor) -> Classification | Segmentation:
        """Of rows, or of pixels but for those that the loss ignores."""
        void = getattr(getattr(self.method, "loss", None), "ignore_index", 255)
        if figures.probs.ndim == 2:
            return Classification.of(figures.probs, labels_for(figures.probs, y))
        labels = labels_for(figures.probs, y, void=void)
        return Segmentation.of(figures.probs, labels, void=void)
