"""Base class of out-of-distribution detectors, and the detectors that have nothing to fit.

    s : x ↦ R,   x is declared out of distribution where s(x) > τ

    −max_c p_c,   H(p),   I = H(p) − 1/B Σ_b H(p_b),   −T log Σ_c exp(f̄_c / T),   mean_c std_b f_b,c

where p = 1/B Σ_b softmax f_b(x) and f̄ = 1/B Σ_b f_b(x). The score of an image whose pixels are classified is the mean
over its pixels. Data that a detector was fitted on must not be used to evaluate it, so it stores a hash of eight bytes
of each of these rows, and `evaluate` rejects them.

Hendrycks and Gimpel, A baseline for detecting misclassified and out-of-distribution examples in neural networks, ICLR
2017 (maximum softmax); Liu, Wang, Owens and Li, Energy-based out-of-distribution detection, NeurIPS 2020.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, final

import torch
from torch import Tensor
from torch.utils.data import Subset

from neuboots._prng import derive_seed
from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    check_predictor,
    hash_rows,
    input_tensors,
    is_input_batch,
    iter_inputs,
    mean_per_input,
)
from neuboots.head import count_rows, float_tensors, map_float_tensors, take_rows
from neuboots.loading import check_length
from neuboots.metrics import DetectionMetrics
from neuboots.prediction import Predictor, Summary

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

_MAX_OVERLAP = 0.01  # fraction of the rows fitted on, and of the test rows, that may be equal: duplicates in a data set


@dataclass(frozen=True, eq=False)
class Detector(ABC):
    """Base class of detectors: a score for each input, computed from B replicates of a predictor.

    Args:
        predictor: Predictor of any method.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        fitted_on: Hashes of the rows that the detector was fitted on, sorted; set by `fit`: (n,).
    """

    predictor: Predictor
    _: KW_ONLY
    num_samples: int = 100
    seed: int = 0
    fitted_on: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False)

    def __post_init__(self) -> None:
        check_predictor(self.predictor)
        check_int("num_samples", self.num_samples, minimum=1)

    @abstractmethod
    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""

    @final
    def fit(
        self,
        id_data: InputData | None = None,
        ood_data: InputData | None = None,
        *,
        train_data: LabeledData | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """Return a fitted detector. Every detector takes the same arguments and uses those it needs.

        Args:
            id_data: Validation inputs that are in distribution (`Odin`, `ReplicateDetector`, `MahalanobisEnsemble`).
            ood_data: Validation inputs that are out of distribution.
            train_data: Labeled training data of the net (`Mahalanobis`, `MahalanobisEnsemble`).
            batch_size: Rows per batch.
            progress: Whether to show a progress bar.

        Returns:
            The fitted detector; this one does not change.

        Raises:
            ArgumentError: If data that the detector needs are missing or have NaN.
        """
        detector, hashes = self._fit_train(train_data, batch_size, progress)
        if detector._candidates:
            statistics = []
            for name, data in (("id_data", id_data), ("ood_data", ood_data)):
                if data is None:
                    raise ArgumentError(name, None, "validation inputs", hint="split data with holdout_split")
                values, rows = detector._map_rows(detector._row_statistics, data, batch_size, progress)
                statistics.append(values.movedim(0, 1))  # (G, N, K)
                hashes.append(rows)
            detector = detector._select(*statistics)
        if not hashes:
            return detector
        return replace(detector, fitted_on=torch.cat(hashes).unique())  # type: ignore[no-untyped-call]

    # Hooks of `fit`: a detector that is fitted on validation data has candidate settings, and statistics under each.

    def _fit_train(self, data: LabeledData | None, batch_size: int, progress: bool) -> tuple[Self, list[Tensor]]:
        """Detector fitted on the training data, and the hashes of their rows."""
        return self, []

    @property
    def _candidates(self) -> tuple[Any, ...]:
        """G settings to select from on validation data."""
        return ()

    def _statistics(self, x: Any, candidates: tuple[Any, ...]) -> Tensor:
        """Statistics of the inputs under each candidate: (G, N, K)."""
        raise NotImplementedError

    def _row_statistics(self, x: Any) -> Tensor:
        return self._statistics(x, self._candidates).movedim(1, 0)  # (N, G, K)

    def _select(self, id_statistics: Tensor, ood_statistics: Tensor) -> Self:
        """Detector with the best candidate, given statistics (G, n, K) and (G, m, K)."""
        raise NotImplementedError

    @final
    def score(self, data: InputData, *, batch_size: int = 256, progress: bool = True) -> Tensor:
        """Return s(x) for each input, larger = farther out of distribution: (N,).

        Args:
            data: Inputs: a tensor (a tuple or dict of them), a data set, or a loader.
            batch_size: Rows per batch.
            progress: Whether to show a progress bar.

        Returns:
            The scores.

        Raises:
            ArgumentError: If the detector is not fitted, or a score is NaN.
        """
        return self._score(data, batch_size, progress)[0]

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
        """Return the detection metrics on inputs in and out of distribution.

        Args:
            id_data: Inputs in distribution.
            ood_data: Inputs out of distribution.
            positive: Positive class; the paper's is "in".
            batch_size: Rows per batch.
            progress: Whether to show a progress bar.

        Returns:
            AUROC, AUPR, TNR at 95 % TPR and the other metrics.

        Raises:
            ArgumentError: If the detector was fitted on some of these rows, or a score is NaN.
        """
        check_choice("positive", positive, ("in", "out"))
        found = []
        for data in (id_data, ood_data):
            scores, rows = self._score(data, batch_size, progress)
            shared = len(rows[torch.isin(rows, self.fitted_on)].unique())  # type: ignore[no-untyped-call]
            if shared > _MAX_OVERLAP * min(len(rows), len(self.fitted_on)):
                got = f"{shared} rows that the detector was fitted on"
                raise ArgumentError("data", got, "other rows", hint="hold out validation data with holdout_split")
            found.append(scores)
        return DetectionMetrics.from_batch(*found, positive=positive)

    def _score(self, data: InputData, batch_size: int, progress: bool) -> tuple[Tensor, Tensor]:
        """Scores of the rows and their hashes: (N,) each."""
        scores, rows = self._map_rows(self.scores, data, batch_size, progress)
        if scores.isnan().any():
            raise ArgumentError("data", f"{int(scores.isnan().sum())} NaN scores", "finite outputs of the net")
        return scores, rows

    def _map_rows(
        self, function: Callable[[Any], Tensor], data: InputData, batch_size: int, progress: bool
    ) -> tuple[Tensor, Tensor]:
        """Values of a function of batches, (N, *), and the hashes of the rows, (N,)."""
        parts, hashes = [], []
        for x in iter_inputs(data, batch_size, title=type(self).__name__, progress=progress):
            parts.append(function(x))
            if parts[-1].shape[:1] != (count_rows(x),):
                got = f"scores {tuple(parts[-1].shape)} for {count_rows(x)} rows"
                raise ArgumentError("data", got, "one score per row", hint="make a batch: x[None]")
            hashes.append(_hash_batch(x))
        return torch.cat(parts), torch.cat(hashes)

    def _summarize(self, x: Any) -> Summary:
        return self.predictor.summarize(x, self.num_samples, seed=self.seed)


def holdout_split(data: InputData, num_rows: int, *, seed: int = 0) -> tuple[Any, Any]:
    """Split data into a random validation set, to fit a detector on, and the rest, to evaluate it on.

    Args:
        data: A tensor of inputs (a tuple or dict of them), or a data set with a length.
        num_rows: Size of the validation set.
        seed: Seed of the split.

    Returns:
        The validation set and the rest, of the same kind as the data.

    Raises:
        ArgumentError: If `num_rows` leaves one of them empty.

    Example:
        >>> validation, rest = holdout_split(torch.arange(10.0)[:, None], 3)
        >>> len(validation), sorted(torch.cat([validation, rest]).flatten().tolist()) == list(range(10))
        (3, True)
    """
    is_batch = is_input_batch(data)
    lengths = {len(tensor) for tensor in input_tensors(data)} if is_batch else {check_length(data)}
    if len(lengths) > 1:
        raise ArgumentError("data", f"tensors of {sorted(lengths)} rows", "tensors of the same length")
    n = lengths.pop()
    if not 1 <= check_int("num_rows", num_rows) < n:
        raise ArgumentError("num_rows", num_rows, f"1 to {n - 1}, so that neither set is empty")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, "ood split")))
    first, second = (rows.sort().values for rows in (order[:num_rows], order[num_rows:]))
    if is_batch:
        return take_rows(data, first), take_rows(data, second)
    return Subset(data, first.tolist()), Subset(data, second.tolist())


def _to_double(tensor: Tensor) -> Tensor:
    """Convert to double precision, on the CPU if the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _hash_batch(x: Any) -> Tensor:
    """Hash of each row of a batch of inputs: (N,)."""
    return torch.frombuffer(bytearray(b"".join(hash_rows(x))), dtype=torch.int64)


# -- selection on validation data ----------------------------------------------------------------------


def _select_best_candidate(id_scores: Tensor, ood_scores: Tensor) -> int:
    """Candidate of G with the largest TNR at 95 % TPR, in distribution positive, as in Lee et al. 2018; then by AUROC.

    Scores are (G, n) and (G, m); the first of equal candidates wins.
    """
    metrics = [DetectionMetrics.from_batch(a, b, positive="in") for a, b in zip(id_scores, ood_scores, strict=True)]
    return max(range(len(metrics)), key=lambda g: (float(metrics[g].tnr_at_tpr), float(metrics[g].auroc), -g))


def _fit_rule(id_statistics: Tensor, ood_statistics: Tensor) -> "Pipeline":
    """Logistic regression on standardized statistics, from (n, K) in distribution and (m, K) out of distribution."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    both = torch.cat([id_statistics, ood_statistics]).cpu()
    is_ood = torch.arange(len(both)) >= len(id_statistics)
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(both.numpy(), is_ood.numpy())


def _log_odds(rule: "Pipeline", statistics: Tensor) -> Tensor:
    """Log-odds that each input is out of distribution: (N, K) → (N,)."""
    return torch.from_numpy(rule.decision_function(statistics.cpu().numpy()))


@dataclass(frozen=True, eq=False, kw_only=True)
class LogisticDetector(Detector):
    """Base class of detectors whose score is a logistic regression on standardized statistics of the inputs.

    `fit` selects the ε whose regression, fitted on half of the validation data, is the best on the other half. The
    regression for this ε is then fitted on both.

    Args:
        epsilons: Candidates of the step ε of the inputs.
        epsilon: ε, set by `fit`.
        rule: StandardScaler and LogisticRegression of scikit-learn, set by `fit`.
    """

    epsilons: tuple[float, ...] = (0.0,)
    epsilon: float = 0.0
    rule: "Pipeline | None" = None

    def scores(self, x: Any) -> Tensor:
        """Return the log-odds of being out of distribution, for one batch of inputs: (N,)."""
        if self.rule is None:
            raise ArgumentError("rule", None, "a fitted detector", hint="call fit(…) first")
        return _log_odds(self.rule, self._statistics(x, (self.epsilon,))[0])

    @property
    def _candidates(self) -> tuple[Any, ...]:
        return self.epsilons

    def _select(self, id_statistics: Tensor, ood_statistics: Tensor) -> Self:
        best = 0
        if len(id_statistics) > 1:
            halves = [_split_halves(part, self.seed) for part in (id_statistics, ood_statistics)]
            fitted, judged = zip(*halves, strict=True)
            rules = [_fit_rule(*pair) for pair in zip(*fitted, strict=True)]
            scores = (torch.stack([_log_odds(rule, t) for rule, t in zip(rules, half, strict=True)]) for half in judged)
            best = _select_best_candidate(*scores)
        rule = _fit_rule(id_statistics[best], ood_statistics[best])
        return replace(self, epsilon=self._candidates[best], rule=rule)


def _split_halves(statistics: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two random halves of statistics (G, n, K)."""
    n = statistics.shape[1]
    if n < 2:
        raise ArgumentError("id_data", "one row", "at least 2 validation rows of each kind, to select ε")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(seed, "halves")))
    return statistics[:, order[: n // 2]], statistics[:, order[n // 2 :]]


# -- gradients in the inputs ---------------------------------------------------------------------------


def _make_leaves(x: Any) -> list[Tensor]:
    """Copy the floating-point inputs as leaves that require gradients."""
    leaves = [part.detach().clone().requires_grad_() for part in float_tensors(x)]
    if not leaves:
        raise ArgumentError("x", "integer inputs", "floating-point inputs", hint="use ε = 0 or another detector")
    return leaves


def _replace_float_tensors(x: Any, others: list[Tensor]) -> Any:
    """Return the inputs with other tensors in place of the floating-point ones."""
    rest = iter(others)
    return map_float_tensors(lambda part: next(rest), x)


def _input_gradients(objectives: list[Tensor], leaves: list[Tensor]) -> list[list[Tensor]]:
    """Gradient of each objective in each leaf, zero if it does not depend on it; the graph is retained."""
    slopes = [
        torch.autograd.grad(objective, leaves, retain_graph=True, allow_unused=True)
        if objective.requires_grad
        else (None,) * len(leaves)
        for objective in objectives
    ]
    if all(slope is None for row in slopes for slope in row):
        raise ArgumentError("predictor", "no gradient in the inputs", "a differentiable predictor", hint="use ε = 0")
    return [[torch.zeros_like(leaf) if s is None else s for s, leaf in zip(row, leaves, strict=True)] for row in slopes]


def _perturb(x: Any, directions: list[Tensor], epsilon: float) -> Any:
    """Return x + ε · direction, for the floating-point inputs."""
    pairs = zip(float_tensors(x), directions, strict=True)
    return _replace_float_tensors(x, [part + epsilon * direction.to(part) for part, direction in pairs])


# -- scores of the predictive distribution -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MaxSoftmax(Detector):
    """Negative maximum probability, s = −max_c p_c: the baseline.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> detector = MaxSoftmax(DeterministicPredictor(torch.nn.Identity()))  # the inputs are the logits
        >>> float(detector.evaluate(3 * torch.eye(2), torch.zeros(2, 2), progress=False).auroc)
        1.0
    """

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        return mean_per_input(-self._summarize(x).confidence)


@dataclass(frozen=True, eq=False)
class Entropy(Detector):
    """Entropy of the predictive distribution, s = H(p), in nats.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> Entropy(DeterministicPredictor(torch.nn.Identity())).score(torch.zeros(1, 4), progress=False)  # log 4
        tensor([1.3863])
    """

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        return mean_per_input(self._summarize(x).entropy)


@dataclass(frozen=True, eq=False)
class MutualInformation(Detector):
    """Mutual information of label and replicate, s = H(p) − 1/B Σ_b H(p_b), in nats.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> MutualInformation(DeterministicPredictor(torch.nn.Identity())).score(torch.zeros(1, 4), progress=False)
        tensor([0.])
    """

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        return mean_per_input(self._summarize(x).mutual_information)


@dataclass(frozen=True, eq=False)
class PredictiveStd(Detector):
    """Standard deviation over replicates, averaged over the outputs; for regression too.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> PredictiveStd(DeterministicPredictor(torch.nn.Identity())).score(torch.ones(1, 4), progress=False)
        tensor([0.])
    """

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        return mean_per_input(self._summarize(x).std.mean(1))


@dataclass(frozen=True, eq=False, kw_only=True)
class Energy(Detector):
    """Free energy of the mean logits, s = −T log Σ_c exp(f̄_c / T).

    It is computed at the mean, not averaged over replicates: log Σ exp is convex, so that disagreement of replicates
    raises the energy, and exact means are free of sampling noise.

    Args:
        temperature: T.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> detector = Energy(DeterministicPredictor(torch.nn.Identity()))
        >>> detector.score(torch.tensor([[5.0, 0.0], [0.1, 0.0]]), progress=False)  # −log(e⁵ + 1), −log(e^0.1 + 1)
        tensor([-5.0067, -0.7444], dtype=torch.float64)
    """

    temperature: float = 1.0

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        logits = _to_double(self._summarize(x).mean)  # (N, C, *)
        if logits.shape[1] == 1:
            raise ArgumentError("predictor", "one output", "a logit for each class", hint="use MaxSoftmax or Entropy")
        return mean_per_input(-self.temperature * (logits / self.temperature).logsumexp(1))
