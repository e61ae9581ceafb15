"""What all detectors share: a score for each input, larger where the input is further out of distribution.

    s : x ↦ R,   x is taken to be out of distribution where s(x) > τ

A detector stands around a predictor. `fit` gives a fitted one, `score` its scores, `evaluate` every figure of the
scores of two data sets. Some are trained on inputs of both kinds; these must not be among those they are tested on, so
a detector remembers the rows it was fitted on, by a hash of their numbers, and `evaluate` refuses them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from neuboots.batches import size_of
from neuboots.keys import seed_named
from neuboots.metrics import Detection
from neuboots.prediction import Predictor, Summary
from neuboots.tasks.common import Rows, check_predictor, part_of
from neuboots.tasks.inputs import Inputs, are_tensors, input_batches, row_names, rows_in

_TOLERATED = 0.01  # share of the rows fitted on that may stand among those tested: images that a data set has twice


@dataclass(frozen=True, eq=False)
class Detector(ABC):
    """A score for each input, from B = `num_samples` replicates of the predictor under `seed`."""

    predictor: Predictor
    _: KW_ONLY
    num_samples: int = 100
    seed: int = 0
    fitted_on: frozenset[bytes] = field(default=frozenset(), repr=False)  # names of rows

    def __post_init__(self) -> None:
        check_predictor(self.predictor)

    @abstractmethod
    def scores(self, x: Any) -> Tensor:
        """The scores of one batch of inputs: (N,)."""

    def fit(
        self,
        inside: Inputs | None = None,
        outside: Inputs | None = None,
        *,
        train: Rows | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """The detector fitted to a validation part of inputs in and out of distribution, or to the training data.

        Every detector takes the same arguments and uses those it needs; this one has nothing to fit.
        """
        return self

    @final
    def score(self, data: Inputs, *, batch_size: int = 256, progress: bool = True) -> Tensor:
        """s(x) for each input, larger = further out of distribution: (N,)."""
        return self._scored(data, "", batch_size, progress)

    @final
    def evaluate(
        self,
        inside: Inputs,
        outside: Inputs,
        *,
        positive: Literal["in", "out"] = "in",
        batch_size: int = 256,
        progress: bool = True,
    ) -> Detection:
        """Every figure of the scores of inputs in and out of distribution; the paper's positive class is "in"."""
        shared: set[bytes] = set()

        def check(x: Any) -> None:
            """At once, not after an hour of scores."""
            shared.update(self.fitted_on.intersection(row_names(x)) if self.fitted_on else ())
            if len(shared) > _TOLERATED * len(self.fitted_on):
                raise ValueError(
                    f"of the {len(self.fitted_on)} inputs that the detector was fitted on, {len(shared)} or more are "
                    "among those to test it on; expected others: part the data with split(data, num), fit on one part "
                    "and evaluate on the other"
                )

        ours = self._scored(inside, ", inside", batch_size, progress, check)
        theirs = self._scored(outside, ", outside", batch_size, progress, check)
        return Detection.of(ours, theirs, positive=positive)

    def _scored(
        self,
        data: Inputs,
        title: str,
        batch_size: int,
        progress: bool,
        check: Callable[[Any], None] = lambda x: None,
    ) -> Tensor:
        found = []
        for x in input_batches(data, batch_size, title=type(self).__name__ + title, progress=progress):
            check(x)
            found.append(self.scores(x))
        scores = torch.cat(found)
        if scores.isnan().any():
            raise ValueError(
                f"{int(scores.isnan().sum())} of {len(scores)} scores are NaN; expected numbers: check the net"
            )
        return scores

    def _summary(self, x: Any) -> Summary:
        return self.predictor.summarize(x, self.num_samples, seed=self.seed)

    def _measured(
        self, inside: Inputs | None, outside: Inputs | None, measure: Callable[[Any], Tensor], size: int, progress: bool
    ) -> tuple[Tensor, Tensor, frozenset[bytes]]:
        """measure(x), (G, N, K), over both validation parts: (G, n, K), (G, m, K), and the names of their rows."""
        if inside is None or outside is None:
            raise ValueError(
                f"{type(self).__name__} is fitted on a validation part of both kinds; expected fit(inside, outside): "
                "split(data, num) parts a data set"
            )
        names: set[bytes] = set()
        parts = []
        for data, title in ((inside, "inside"), (outside, "outside")):
            found = []
            for x in input_batches(data, size, title=f"fitting {type(self).__name__}, {title}", progress=progress):
                found.append(measure(x))
                names.update(row_names(x))
            parts.append(torch.cat(found, 1))
        return parts[0], parts[1], frozenset(names)


# -- inputs --------------------------------------------------------------------------------------------


def precise(tensor: Tensor) -> Tensor:
    """In double precision; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def split(data: Inputs, num: int, *, seed: int = 0) -> tuple[Any, Any]:
    """A validation part of `num` rows, drawn at random, to fit a detector on; and the rest, to test it on.

    >>> validation, rest = split(torch.arange(10.0)[:, None], 3)
    >>> len(validation), sorted(torch.cat([validation, rest]).flatten().tolist()) == list(range(10))
    (3, True)
    """
    whole = are_tensors(data)
    if not whole and not isinstance(data, Dataset):
        size_of(data)  # a loader gets a sentence of its own
        raise ValueError(f"got a {type(data).__name__}; expected tensors of inputs, or a data set with a length")
    n = rows_in(data) if whole else size_of(data)
    if n is None:
        raise ValueError("got a stream of unknown length; expected a data set with a length")
    if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num < n:
        raise ValueError(f"got num={num!r}; expected a whole number from 1 to {n - 1}, so that both parts have rows")
    rng = torch.Generator().manual_seed(seed_named(seed, "ood split"))
    order = torch.randperm(n, generator=rng)
    parts = [rows.sort().values for rows in (order[:num], order[num:])]
    if whole:
        return part_of(data, parts[0]), part_of(data, parts[1])
    return Subset(data, parts[0].tolist()), Subset(data, parts[1].tolist())


# -- choosing ------------------------------------------------------------------------------------------


def best_of(inside: Tensor, outside: Tensor) -> int:
    """Which of G candidates has the largest TNR at 95 % TPR, inside positive, as in Lee et al. 2018; among equals the
    largest AUROC, then the first. Scores are (G, n) and (G, m)."""
    tallies = [Detection.of(ours, theirs, positive="in") for ours, theirs in zip(inside, outside, strict=True)]
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

        both = precise(torch.cat([inside, outside])).cpu()
        centre, scale = both.mean(0), both.std(0, correction=0)
        scale = scale.where(scale > 1e-12 * both.abs().amax(0), 1.0)  # a statistic that never changes tells nothing
        is_out = torch.arange(len(both)) >= len(inside)
        model = LogisticRegression(max_iter=1000).fit(((both - centre) / scale).numpy(), is_out.numpy())
        return cls(torch.from_numpy(model.coef_[0]), float(model.intercept_[0]), centre, scale)

    def __call__(self, statistics: Tensor) -> Tensor:
        """The log-odds that each input is out of distribution: (N, K) → (N,)."""
        weights, centre, scale = (part.to(statistics.device) for part in (self.weights, self.centre, self.scale))
        return ((precise(statistics) - centre) / scale) @ weights + self.intercept


def choose_rule(inside: Tensor, outside: Tensor, *, seed: int) -> tuple[int, LogisticRule]:
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
        best = best_of(torch.stack([a for a, _ in judged]), torch.stack([b for _, b in judged]))
    return best, LogisticRule.of(inside[best], outside[best])


def _halves(n: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed_named(seed, "halves"))
    order = torch.randperm(n, generator=rng)
    return order[: n // 2], order[n // 2 :]


def check_step(epsilons: tuple[float, ...]) -> None:
    """ε are distances in the units of the inputs."""
    if not epsilons or not all(isinstance(e, int | float) and 0 <= e < float("inf") for e in epsilons):
        raise ValueError(f"got ε = {epsilons!r}; expected distances ≥ 0, in the units of the inputs")
