"""What all detectors share: a score for each input, larger where the input is further out of distribution.

    s : x ↦ R,   x is taken to be out of distribution where s(x) > τ

A detector stands around a predictor. `fit` gives a fitted one, `score` its scores, `evaluate` every figure of the
scores of two data sets. What a detector was fitted on, the training data or a validation part of both kinds, must not
be among what it is tested on, so it remembers those rows, by a hash of eight bytes each, and `evaluate` refuses them.

Detectors that read their score off the predictive distribution, with nothing to fit.

    −max_c p_c,   H(p),   I = H(p) − 1/B Σ_b H(p_b),   −T log Σ_c exp(f̄_c / T),   mean_c std_b f_b,c

where p = 1/B Σ_b softmax f_b(x) and f̄ = 1/B Σ_b f_b(x). The score of an image whose pixels are classified is the mean
over its pixels.

Hendrycks and Gimpel, A baseline for detecting misclassified and out-of-distribution examples in neural networks, ICLR
2017 (maximum softmax); Liu, Wang, Owens and Li, Energy-based out-of-distribution detection, NeurIPS 2020.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from neuboots._prng import derive_seed
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    check_predictor,
    hash_rows,
    input_tensors,
    is_input_batch,
    iter_inputs,
    mean_per_input,
    num_rows,
    take_rows,
)
from neuboots.loading import dataset_length
from neuboots.metrics import DetectionMetrics
from neuboots.metrics.ranking import check_positive_class
from neuboots.prediction import Predictor, Summary

_TOLERATED = 0.01  # share of the rows fitted on, and of those tested, that may be the same: images that a set has twice


@dataclass(frozen=True, eq=False)
class Detector(ABC):
    """A score for each input, from B = `num_samples` replicates of the predictor under `seed`."""

    predictor: Predictor
    _: KW_ONLY
    num_samples: int = 100
    seed: int = 0
    fitted_on: Tensor = field(default_factory=lambda: empty_hashes(), repr=False)  # of rows, rising: (n,)

    def __post_init__(self) -> None:
        check_predictor(self.predictor)
        B = self.num_samples
        if isinstance(B, bool) or not isinstance(B, int) or B < 1:
            raise ValueError(f"got num_samples={B!r}; expected a whole number, at least 1")

    @abstractmethod
    def scores(self, x: Any) -> Tensor:
        """The scores of one batch of inputs: (N,)."""

    def fit(
        self,
        id_data: InputData | None = None,
        ood_data: InputData | None = None,
        *,
        train_data: LabeledData | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """The detector fitted to a validation part of inputs in and out of distribution, or to the training data.

        Every detector takes the same arguments and uses those it needs; this one has nothing to fit.
        """
        return self

    @final
    def score(self, data: InputData, *, batch_size: int = 256, progress: bool = True) -> Tensor:
        """s(x) for each input, larger = further out of distribution: (N,)."""
        return self._scored(data, "", batch_size, progress)

    @final
    def evaluate(
        self,
        id_data: InputData,
        ood_data: InputData,
        *,
        positive: Literal["in", "out"] = "in",
        batch_size: int = 256,
        progress: bool = True,
    ) -> DetectionMetrics:
        """Every figure of the scores of inputs in and out of distribution; the paper's positive class is "in"."""
        check_positive_class(positive)
        ours = self._scored(id_data, ", inside", batch_size, progress, fresh=True)
        theirs = self._scored(ood_data, ", outside", batch_size, progress, fresh=True)
        return DetectionMetrics.of(ours, theirs, positive=positive)

    def _scored(
        self,
        data: InputData,
        title: str,
        batch_size: int,
        progress: bool,
        fresh: bool = False,
    ) -> Tensor:
        """(N,); if `fresh`, of inputs that the detector was not fitted on."""
        check_batch_axis(data)
        found, done, shared = [], 0, empty_hashes()
        for x in iter_inputs(data, batch_size, title=type(self).__name__ + title, progress=progress):
            if fresh and len(self.fitted_on):
                done += num_rows(x)
                names = row_hash_tensor(x)
                shared = unique_hashes([shared, names[torch.isin(names, self.fitted_on)]])
                self._check_fresh(len(shared), len(self.fitted_on))  # at once, not after an hour of scores
            scores = self.scores(x)
            _check_each(scores.shape, 0, x)
            found.append(scores)
        self._check_fresh(len(shared), min(done, len(self.fitted_on)))
        scores = torch.cat(found)
        if scores.isnan().any():
            raise ValueError(
                f"{int(scores.isnan().sum())} of {len(scores)} scores are NaN; expected numbers: check the net"
            )
        return scores

    def _check_fresh(self, shared: int, of: int) -> None:
        if shared > _TOLERATED * of:
            raise ValueError(
                f"of the {len(self.fitted_on)} inputs that the detector was fitted on, {shared} or more are among "
                "those to test it on; expected others: part the data with split(data, num), fit on one part and "
                "evaluate on the other; where rows repeat by nature, take Detection.of(score(inside), score(outside))"
            )

    def _summary(self, x: Any) -> Summary:
        return self.predictor.summarize(x, self.num_samples, seed=self.seed)

    def _measured(
        self,
        inside: InputData | None,
        outside: InputData | None,
        measure: Callable[[Any], Tensor],
        size: int,
        progress: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """measure(x), (G, N, K), over both validation parts: (G, n, K), (G, m, K), and the names of their rows."""
        if inside is None or outside is None:
            raise ValueError(
                f"{type(self).__name__} is fitted on a validation part of both kinds; expected fit(inside, outside): "
                "split(data, num) parts a data set"
            )
        check_batch_axis(inside)
        check_batch_axis(outside)
        names, parts = [], []
        for data, title in ((inside, "inside"), (outside, "outside")):
            found = []
            for x in iter_inputs(data, size, title=f"fitting {type(self).__name__}, {title}", progress=progress):
                measured = measure(x)
                _check_each(measured.shape, 1, x)
                found.append(measured)
                names.append(row_hash_tensor(x))
            parts.append(torch.cat(found, 1))
        return parts[0], parts[1], unique_hashes(names)


# -- inputs --------------------------------------------------------------------------------------------


def to_double(tensor: Tensor) -> Tensor:
    """In double precision; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def row_hash_tensor(x: Any) -> Tensor:
    """A name for each row of a batch of inputs, as one number: (N,)."""
    return torch.frombuffer(bytearray(b"".join(hash_rows(x))), dtype=torch.int64)


def unique_hashes(names: list[Tensor]) -> Tensor:
    """Each name once, rising."""
    return torch.from_numpy(np.unique(torch.cat(names).numpy()))


def empty_hashes() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def check_batch_axis(data: Any) -> None:
    """Refuse tensors without a common first axis, and data sets of unknown length that are no streams."""
    if is_input_batch(data):
        shapes = [tuple(part.shape) for part in input_tensors(data)]
        if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
            got = " and ".join(map(str, shapes))
            raise ValueError(
                f"got inputs of shape {got}; expected the batch on the first axis, (N, …), with as many rows in each "
                "tensor: x[None] makes a batch of one input"
            )
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
        raise ValueError(
            f"got a {type(data).__name__} without a length; expected a data set with __len__, or an IterableDataset"
        )


def _check_each(shape: torch.Size, axis: int, x: Any) -> None:
    """Refuse figures that are not one for each row."""
    if len(shape) <= axis or shape[axis] != num_rows(x):
        got = " and ".join(str(tuple(part.shape)) for part in input_tensors(x))
        raise ValueError(
            f"got scores of shape {tuple(shape)[axis:]} for inputs of shape {got}; expected one for each row of inputs "
            "(N, …), the batch on the first axis: x[None] makes a batch of one input"
        )


def holdout_split(data: InputData, size: int, *, seed: int = 0) -> tuple[Any, Any]:
    """A validation part of `num` rows, drawn at random, to fit a detector on; and the rest, to test it on.

    >>> val_data, rest = holdout_split(torch.arange(10.0)[:, None], 3)
    >>> len(val_data), sorted(torch.cat([val_data, rest]).flatten().tolist()) == list(range(10))
    (3, True)
    """
    check_batch_axis(data)
    whole = is_input_batch(data)
    if not whole and not isinstance(data, Dataset):
        dataset_length(data)  # a loader gets a sentence of its own
        raise ValueError(f"got a {type(data).__name__}; expected tensors of inputs, or a data set with a length")
    n = num_rows(data) if whole else dataset_length(data)
    if n is None:
        raise ValueError("got a stream of unknown length; expected a data set with a length")
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < n:
        raise ValueError(f"got size={size!r}; expected a whole number from 1 to {n - 1}, so that both parts have rows")
    rng = torch.Generator().manual_seed(derive_seed(seed, "ood split"))
    order = torch.randperm(n, generator=rng)
    parts = [rows.sort().values for rows in (order[:size], order[size:])]
    if whole:
        return take_rows(data, parts[0]), take_rows(data, parts[1])
    return Subset(data, parts[0].tolist()), Subset(data, parts[1].tolist())


# -- choosing ------------------------------------------------------------------------------------------


def select_best_candidate(inside: Tensor, outside: Tensor) -> int:
    """Which of G candidates has the largest TNR at 95 % TPR, inside positive, as in Lee et al. 2018; among equals the
    largest AUROC, then the first. Scores are (G, n) and (G, m)."""
    tallies = [DetectionMetrics.of(ours, theirs, positive="in") for ours, theirs in zip(inside, outside, strict=True)]
    return max(range(len(tallies)), key=lambda g: (float(tallies[g].tnr_at_95_tpr), float(tallies[g].auroc), -g))


@dataclass(frozen=True, eq=False)
class LogisticRule:
    """log P(out) / P(in) = w · (t − centre) / scale + intercept, of K statistics t."""

    weights: Tensor  # (K,)
    intercept: float
    centre: Tensor  # (K,)
    scale: Tensor  # (K,)

    @classmethod
    def of(cls, inside: Tensor, outside: Tensor) -> "LogisticRule":
        """Logistic regression on standardised statistics, (n, K) and (m, K), with scikit-learn's ridge penalty.

        >>> rule = LogisticRule.of(torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [5.0]]))
        >>> rule(torch.tensor([[1.0], [4.0]])) > 0
        tensor([False,  True])
        """
        from sklearn.linear_model import LogisticRegression

        if inside.ndim != 2 or inside.shape[1:] != outside.shape[1:] or not len(inside) or not len(outside):
            raise ValueError(
                f"got statistics of shapes {tuple(inside.shape)} and {tuple(outside.shape)}; expected (n, K) and "
                "(m, K), with at least one input of each kind"
            )
        both = to_double(torch.cat([inside, outside])).cpu()
        if not bool(both.isfinite().all()):
            raise ValueError(
                f"got {int((~both.isfinite()).sum())} NaN or infinite statistics of {both.numel()}; expected numbers: "
                "check the net"
            )
        centre, scale = both.mean(0), both.std(0, correction=0)
        scale = scale.where(scale > 1e-12 * both.abs().amax(0), 1.0)  # a statistic that never changes tells nothing
        is_out = torch.arange(len(both)) >= len(inside)
        model = LogisticRegression(max_iter=1000).fit(((both - centre) / scale).numpy(), is_out.numpy())
        return cls(torch.from_numpy(model.coef_[0]), float(model.intercept_[0]), centre, scale)

    def __call__(self, statistics: Tensor) -> Tensor:
        """The log-odds that each input is out of distribution: (N, K) → (N,)."""
        weights, centre, scale = (part.to(statistics.device) for part in (self.weights, self.centre, self.scale))
        return ((to_double(statistics) - centre) / scale) @ weights + self.intercept


def select_logistic_rule(inside: Tensor, outside: Tensor, *, seed: int) -> tuple[int, LogisticRule]:
    """The best of G candidates and its rule, from statistics (G, n, K) and (G, m, K).

    Each candidate's rule is fitted on one half and judged on the other; the winner's is then fitted on both.
    """
    best = 0
    if len(inside) > 1:
        if min(inside.shape[1], outside.shape[1]) < 2:
            raise ValueError("got a validation part of one row; expected at least two of each kind, to choose ε with")
        halves = [_halves(part.shape[1], seed) for part in (inside, outside)]
        judged = []
        for ours, theirs in zip(inside, outside, strict=True):
            rule = LogisticRule.of(ours[halves[0][0]], theirs[halves[1][0]])
            judged.append((rule(ours[halves[0][1]]), rule(theirs[halves[1][1]])))
        best = select_best_candidate(torch.stack([a for a, _ in judged]), torch.stack([b for _, b in judged]))
    return best, LogisticRule.of(inside[best], outside[best])


def _halves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(derive_seed(seed, "halves"))
    order = torch.randperm(n, generator=rng)
    return order[: n // 2], order[n // 2 :]


def check_epsilons(epsilons: tuple[float, ...]) -> None:
    """ε are distances in the units of the inputs."""
    several = isinstance(epsilons, tuple | list) and len(epsilons) > 0
    if not several or not all(isinstance(e, int | float) and 0 <= e < float("inf") for e in epsilons):
        raise ValueError(f"got ε = {epsilons!r}; expected a tuple of distances ≥ 0, in the units of the inputs")


@dataclass(frozen=True, eq=False)
class MaxSoftmax(Detector):
    """s = −max_c p_c: the baseline.

    >>> import torch
    >>> from neuboots import DeterministicPredictor
    >>> detector = MaxSoftmax(DeterministicPredictor(torch.nn.Identity()))  # the inputs are the logits
    >>> print(detector.evaluate(3 * torch.eye(2), torch.zeros(2, 2), progress=False))
    positive class: in-distribution (2 in, 2 out)
    AUROC               1.0000
    AUPR-in             1.0000
    AUPR-out            1.0000
    TNR at 95 % TPR     1.0000
    FPR at 95 % TPR     0.0000
    detection accuracy  1.0000
    """

    def scores(self, x: Any) -> Tensor:
        return mean_per_input(-self._summary(x).confidence)


@dataclass(frozen=True, eq=False)
class Entropy(Detector):
    """s = H(p), the entropy of the predictive distribution, in nats.

    >>> import torch
    >>> from neuboots import DeterministicPredictor
    >>> Entropy(DeterministicPredictor(torch.nn.Identity())).score(torch.zeros(1, 4), progress=False)  # log 4
    tensor([1.3863])
    """

    def scores(self, x: Any) -> Tensor:
        return mean_per_input(self._summary(x).entropy)


@dataclass(frozen=True, eq=False)
class MutualInformation(Detector):
    """s = H(p) − 1/B Σ_b H(p_b): how far the replicates disagree, in nats.

    >>> import torch
    >>> from neuboots import DeterministicPredictor
    >>> MutualInformation(DeterministicPredictor(torch.nn.Identity())).score(
    ...     torch.zeros(1, 4), progress=False
    ... )  # equal ones
    tensor([0.])
    """

    def scores(self, x: Any) -> Tensor:
        return mean_per_input(self._summary(x).mutual_information)


@dataclass(frozen=True, eq=False)
class PredictiveStd(Detector):
    """s = mean over the outputs of their standard deviation over the replicates; for regression too.

    >>> import torch
    >>> from neuboots import DeterministicPredictor
    >>> PredictiveStd(DeterministicPredictor(torch.nn.Identity())).score(
    ...     torch.ones(1, 4), progress=False
    ... )  # equal replicates
    tensor([0.])
    """

    def scores(self, x: Any) -> Tensor:
        return mean_per_input(self._summary(x).std.mean(1))


@dataclass(frozen=True, eq=False, kw_only=True)
class Energy(Detector):
    """s = −T log Σ_c exp(f̄_c / T), the free energy at the mean logits f̄.

    At the mean, not averaged over replicates: log Σ exp is convex, so replicates that disagree raise the energy, as
    they should, and where a method knows its exact mean it is free of the noise of B draws.

    >>> import torch
    >>> from neuboots import DeterministicPredictor
    >>> detector = Energy(DeterministicPredictor(torch.nn.Identity()))
    >>> detector.score(torch.tensor([[5.0, 0.0], [0.1, 0.0]]), progress=False)  # −log(e⁵ + 1), −log(e^0.1 + 1)
    tensor([-5.0067, -0.7444], dtype=torch.float64)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)

    def scores(self, x: Any) -> Tensor:
        logits = to_double(self._summary(x).mean)  # (N, C, *)
        if logits.shape[1] == 1:
            raise ValueError(
                "got a net with one output, whose energy depends on which class it stands for; expected a logit for "
                "each class: take MaxSoftmax or Entropy"
            )
        return mean_per_input(-self.temperature * (logits / self.temperature).logsumexp(1))


def check_temperature(temperature: float) -> None:
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < math.inf:
        raise ValueError(f"got temperature={temperature!r}; expected a positive number")
