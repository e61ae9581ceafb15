"""Active learning: acquisition functions, selection of the inputs to label next, and the learning loop.

    score(x) = H(p̄)                          entropy
             = −(p̄₍₁₎ − p̄₍₂₎)                margin between the two most probable classes
             = H(p̄) − 1/B Σ_b H(p_b)         bald: mutual information of label and replicate
             = Σ_c std_b p_bc                std; for regression the standard deviation of the outputs

with p_b = softmax f_b(x) and p̄ their mean. The paper's released code ranks by `std`. These functions score one input at
a time, so that the k best may be k copies of one input. There are two remedies: `diverse` multiplies the score by the
distance to the inputs chosen before, and the strategy `batch` maximizes the joint variance

    argmax over A of log det(I + K_A / ε),   K(x, x') = Σ_c cov_b(p_bc(x), p_bc(x')),

greedily, which reaches at least 1 − 1/e of the maximum since the objective is monotone and submodular.

Houlsby, Huszár, Ghahramani and Lengyel, Bayesian active learning for classification and preference learning,
arXiv:1112.5745, 2011 (bald); Gal, Islam and Ghahramani, Deep Bayesian active learning with image data, ICML 2017;
Kirsch, van Amersfoort and Gal, BatchBALD, NeurIPS 2019; Kirsch, Black-box batch active learning for regression, TMLR
2023 (the determinant of the replicates' covariance); Mahabadi, Indyk, Oveis Gharan and Rezaei, Composable core-sets for
determinant maximization, ICML 2019 (the k best of each chunk hold a set almost as good as the best of all); Moon, Kim,
Shin and Hwang, Confidence-aware learning for deep neural networks, ICML 2020 (the protocol of the loop).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from neuboots._prng import derive_keys, derive_seed, draw_uniform, hash_to_range
from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    align_labels,
    align_targets,
    check_predictor,
    exclusive_probs,
    format_columns,
    format_table,
    input_tensors,
    iter_batches,
    iter_inputs,
    mean_per_input,
)
from neuboots.evaluation._parallel import (
    cached_result,
    check_repeated_fit,
    make_reference_net,
    run_jobs,
    student_t_interval,
)
from neuboots.head import count_rows
from neuboots.loading import check_length
from neuboots.losses import BrierLoss, GaussianNLL
from neuboots.metrics import RunningMean, SegmentationMetrics
from neuboots.metrics.classification import check_tensors
from neuboots.prediction import (
    Method,
    Moments,
    Prediction,
    Predictor,
    SampleStream,
    Summary,
    class_probabilities,
    collect_samples,
    summarize_stream,
)
from neuboots.training import TrainingConfig

AcquisitionFunction = Callable[[Summary], Tensor]  # statistics of N inputs → scores (N,), the largest labeled first
OutputKind = Literal["classification", "regression", "gaussian"]  # gaussian: k means, then k values of log σ²
Column = np.ndarray[Any, Any]

_ROUNDING = 16  # machine epsilons; the std of 5,000 equal numbers is 4.5
_MAX_VECTOR_LENGTH = 1024  # values stored for an input; longer vectors are hashed to this length
_RIDGE = 1e-6  # ε, as a fraction of the largest variance in the pool
_CANDIDATES_PER_ROW = 10  # for each row of a diverse selection
_MAX_SELECTION_WORK = 1 << 42  # rows × candidates × features: about an hour of one core
_MAX_DISTANCE_FEATURES = 512
_POOLED_PIXELS = 8  # per side of an image, for distances
_MAX_ABS_FEATURE = 3.0  # standard deviations; farther values do not add to a distance
_PRINTED_ROWS = 10


# -- acquisition functions -----------------------------------------------------------------------------


def _margin(summary: Summary) -> Tensor:
    probs = exclusive_probs(summary)
    first, *second = probs.topk(min(2, probs.shape[1]), 1).values.unbind(1)
    return mean_per_input(sum(second) - first)


def _rounded_std(summary: Summary | Prediction) -> Tensor:
    """Standard deviation over replicates, 0 where it is the rounding error of equal numbers: (N, C, *)."""
    mean, std = summary.mean, summary.std
    eps = min(torch.finfo(std.dtype).eps, torch.finfo(torch.float32).eps)  # half precision is summed in float32
    return std.masked_fill(std <= _ROUNDING * eps * mean.abs(), 0.0)  # NaN stays NaN


def _total_variance(summary: Summary | Prediction) -> Tensor:
    return _rounded_std(summary).square().flatten(1).sum(1)


ACQUISITION_FUNCTIONS: dict[str, AcquisitionFunction] = {
    "random": lambda summary: summary.mean.new_zeros(len(summary.mean)),  # the seed decides, as in every tie
    "entropy": lambda summary: mean_per_input(summary.entropy),
    "margin": _margin,
    "bald": lambda summary: mean_per_input(summary.mutual_information),
    "std": lambda summary: mean_per_input(_rounded_std(summary).sum(1)),
    "batch": _total_variance,  # of one input; `batch` then selects inputs jointly
}
_TASK_OF_LOSS: dict[tuple[type, ...], OutputKind] = {
    (nn.CrossEntropyLoss, BrierLoss, nn.BCEWithLogitsLoss, nn.NLLLoss): "classification",
    (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss): "regression",
    (GaussianNLL,): "gaussian",
}
_CLASS_STRATEGIES = ("entropy", "margin", "bald")


def _compared_outputs(outputs: Tensor, task: OutputKind, *, independent: bool) -> Tensor:
    """What replicates are compared by: class probabilities, or the regression function, (B, N, C, *)."""
    if task == "classification":
        return class_probabilities(outputs, 2, independent=independent)
    if task == "regression":
        return outputs
    if outputs.shape[2] % 2:
        raise ArgumentError("task", task, f"k means and k values of log σ², not {outputs.shape[2]} outputs")
    return outputs[:, :, : outputs.shape[2] // 2]


def _compared_stream(predictor: Predictor, x: Any, num_samples: int, seed: int, task: OutputKind) -> SampleStream:
    inner = predictor._checked_stream(x, num_samples, seed)
    compared = partial(_compared_outputs, task=task, independent=inner.independent)

    def chunks(size: int) -> Iterator[Tensor]:
        return map(compared, inner.chunks(size))

    moments = None  # exact moments are known of the outputs, not of the probabilities
    if inner.moments is not None and task != "classification":
        mean, std = (compared(part[None])[0] for part in (inner.moments.mean, inner.moments.std))
        moments = Moments(mean, std)
    return replace(inner, chunks=chunks, moments=moments)


# -- selection -----------------------------------------------------------------------------------------


class RowSelector:
    """Selects k rows of a stream by score, holding at most k of them (10 k if they are to be diverse).

    Rows with equal scores are ordered by the seed.

    Args:
        k: Number of rows to select.
        seed: Seed of the order of ties.
        diverse: Select rows one after the other by score × distance to the nearest row selected before.

    Example:
        >>> selector = RowSelector(2)
        >>> selector.add(torch.tensor([0.25, 0.75]))
        >>> selector.add(torch.tensor([0.5]))
        >>> rows, scores, _ = selector.select()
        >>> rows.tolist(), scores.tolist()
        ([1, 2], [0.75, 0.5])
    """

    def __init__(self, k: int, *, seed: int = 0, diverse: bool = False) -> None:
        self.k, self.seed, self.diverse = check_int("k", k, minimum=1), check_int("seed", seed), diverse
        self.num_rows = 0
        self._capacity = _CANDIDATES_PER_ROW * self.k if diverse else self.k
        self._stored: list[Column] = []  # row, score, tie, features, columns
        self._names: list[str] = []  # of the columns

    def add(
        self, scores: Tensor | Column, features: Tensor | None = None, columns: Mapping[str, Column] | None = None
    ) -> None:
        """Add the next N rows of the stream.

        Args:
            scores: Scores, the larger the better: (N,).
            features: What distances between rows are computed from: (N, D); see `distance_features`.
            columns: Further values of the rows, which `select` returns for the selected ones: (N,) each.

        Raises:
            ArgumentError: If a score is NaN.
        """
        score = torch.as_tensor(scores).detach().double().cpu()
        bad = ~score.isfinite() if self.diverse else score.isnan()
        if bool(bad.any()):
            raise ArgumentError("scores", f"{int(bad.sum())} NaN or infinite values of {len(score)}", "finite numbers")
        row = torch.arange(self.num_rows, self.num_rows + len(score))
        tie = row_uniforms(row, self.seed, "tie")
        places = torch.zeros(len(score), 0) if features is None else features
        columns = columns or {}
        stored = [*(part.numpy() for part in (row, score, tie, places)), *columns.values()]
        if self.num_rows:
            stored = [np.concatenate(pair) for pair in zip(self._stored, stored, strict=True)]
        best = np.lexsort((stored[2], -stored[1]))[: self._capacity]
        self._stored, self._names = [part[best] for part in stored], list(columns)
        self.num_rows += len(score)

    def select(self) -> tuple[Tensor, Tensor, dict[str, Column]]:
        """Return the numbers and scores of the selected rows, the best first, and their columns: (k,) each."""
        row, score, _, features = map(torch.from_numpy, self._stored[:4])
        size = min(self.k, len(row))
        order = greedy_diverse_selection(score, features, size) if self.diverse else torch.arange(size)
        columns = {name: part[order.numpy()] for name, part in zip(self._names, self._stored[4:], strict=True)}
        return row[order], score[order], columns


def greedy_diverse_selection(scores: Tensor, features: Tensor, k: int) -> Tensor:
    """Select k rows, one after the other: argmax of score (scaled to [0, 1]) × distance to the nearest selected row.

    Args:
        scores: (N,).
        features: (N, D).
        k: Number of rows.

    Returns:
        Row numbers; the first has the highest score: (k,).

    Example:
        >>> greedy_diverse_selection(
        ...     torch.tensor([1.0, 0.99, 0.5, 0.0]), torch.tensor([[0.0], [0.001], [2.0], [9.0]]), 2
        ... )
        tensor([0, 2])
    """
    check_tensors(scores=scores, features=features)
    if scores.ndim != 1 or features.shape[:1] != scores.shape or features.ndim != 2:
        raise ArgumentError("features.shape", tuple(features.shape), f"(N, D) with scores (N,) = {tuple(scores.shape)}")
    if not 1 <= check_int("k", k) <= len(scores):
        raise ArgumentError("k", k, f"1 … {len(scores)}, the number of scores")
    _check_selection(k, features)
    scores = scores.double()
    weights = (scores - scores.min()) / max(float(scores.max() - scores.min()), 1e-300) + 1e-9
    nearest = torch.full_like(weights, torch.inf)
    left = weights.clone()
    selected: list[int] = []
    for _ in range(k):
        selected.append(int(left.argmax()))
        nearest = torch.minimum(nearest, (features - features[selected[-1]]).norm(dim=1).double())
        left = weights * nearest
        left[selected] = -1.0
    return torch.tensor(selected)


def _check_selection(k: int, features: Tensor) -> None:
    """Raise ArgumentError if k rows, each compared with all others, are too much work."""
    work = k * features.numel()
    if work > _MAX_SELECTION_WORK:
        expected = f"at most {_MAX_SELECTION_WORK:.1e} comparisons of features; {len(features):,} rows need {work:.1e}"
        raise ArgumentError("k", k, expected, hint="select fewer rows, or by another strategy")


def distance_features(x: Any) -> Tensor:
    """Inputs as vectors for distances; images are averaged to 8 × 8 pixels: (N, at most 512).

    Args:
        x: A batch of inputs: a tensor, or a tuple or dict of tensors.

    Returns:
        Values clipped to [−3, 3]. Longer vectors are folded by summation, which keeps copies identical.
    """
    parts = []
    for part in input_tensors(x):
        part = part.detach().float().cpu()
        if part.ndim == 4:
            part = torch.nn.functional.adaptive_avg_pool2d(part, _POOLED_PIXELS)
        parts.append(part.flatten(1).clamp(-_MAX_ABS_FEATURE, _MAX_ABS_FEATURE))
    flat = torch.cat(parts, 1)
    if flat.shape[1] <= _MAX_DISTANCE_FEATURES:
        return flat
    places = torch.arange(flat.shape[1]) % _MAX_DISTANCE_FEATURES
    return flat.new_zeros(len(flat), _MAX_DISTANCE_FEATURES).index_add_(1, places, flat)


def row_uniforms(rows: Tensor, *name: int | str) -> Tensor:
    """Draw a uniform number in (0, 1) for each row, a function of its number and the name.

    Args:
        rows: Row numbers: (N,).
        *name: Seed and name of the draw.

    Returns:
        The numbers: (N,).
    """
    keys = derive_keys(rows, *name)
    return draw_uniform(keys, torch.zeros_like(keys))


@dataclass(frozen=True, eq=False)
class QueryResult:
    """Rows to label next, the best first, as returned by `select_for_labeling`.

    Attributes:
        rows: Row numbers: (k,).
        scores: Scores, larger is better; for `batch` the variance left when the row was selected: (k,).
        strategy: Name of the strategy.
        pool_size: Number of rows in the pool.
        num_samples: Number of replicates B.
        seed: Seed.
    """

    rows: Tensor
    scores: Tensor
    strategy: str
    pool_size: int
    num_samples: int
    seed: int

    def __str__(self) -> str:
        header = f"{len(self.rows)} of {self.pool_size:,} rows by {self.strategy}, B = {self.num_samples}"
        rows, scores = self.rows[:_PRINTED_ROWS], self.scores[:_PRINTED_ROWS]
        table = format_columns({"rank": range(1, len(rows) + 1), "row": rows, "score": scores})
        more = f"\n… and {len(self.rows) - _PRINTED_ROWS} more" if len(self.rows) > _PRINTED_ROWS else ""
        return f"{header}, seed {self.seed}\n{table}{more}"


@torch.no_grad()
def select_for_labeling(
    predictor: Predictor,
    pool: InputData,
    k: int,
    *,
    strategy: str | AcquisitionFunction = "entropy",
    task: OutputKind = "classification",
    diverse: bool = False,
    num_samples: int = 100,
    seed: int = 0,
    max_candidates: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> QueryResult:
    """Select the k rows of a pool to label next.

    Args:
        predictor: Predictor of any method.
        pool: Inputs: a tensor (a tuple or dict of them for a net of several), a data set, or a loader in the order of
            its data set. Labels are ignored.
        k: Number of rows.
        strategy: One of `ACQUISITION_FUNCTIONS`, or a function of a Summary that returns N scores.
        task: What the outputs are: logits, values, or means and log variances.
        diverse: Avoid similar rows: multiply the score by the distance to the rows selected before.
        num_samples: Number of replicates B.
        seed: Seed of the replicates, and of the order of rows with equal scores.
        max_candidates: Rows that `batch` holds at a time, by default max(1000, 4k).
        batch_size: Rows per batch.
        progress: Whether to show a progress bar.

    Returns:
        Row numbers in the order of the pool, and their scores.

    Raises:
        ArgumentError: If the strategy does not fit the task, the pool is smaller than k, a loader shuffles, or
            predictions or scores are NaN.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> net = torch.nn.Linear(1, 1)  # one logit, x itself
        >>> _ = net.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
        >>> pool = torch.tensor([[-3.0], [0.1], [2.0], [-0.5]])
        >>> print(select_for_labeling(DeterministicPredictor(net), pool, 2, num_samples=1, progress=False))
        2 of 4 rows by entropy, B = 1, seed 0
        rank  row   score
           1    1  0.6919
           2    3  0.6628
    """
    check_predictor(predictor)
    name = _check_strategy(strategy, task)
    _check_order(pool)
    num_samples = check_int("num_samples", num_samples, minimum=1)
    selector = RowSelector(k, seed=seed, diverse=diverse)
    size = max(1000, 4 * selector.k) if max_candidates is None else check_int("max_candidates", max_candidates)
    if strategy == "batch" and size < 2 * selector.k:
        raise ArgumentError("max_candidates", size, f"at least {2 * selector.k}, twice k")
    if predictor.num_distinct is not None:
        num_samples = min(num_samples, predictor.num_distinct)  # each member once
    with closing(iter_inputs(pool, batch_size, title="scoring the pool", progress=progress)) as inputs:
        if strategy == "batch":
            streams = (_compared_stream(predictor, x, num_samples, seed, task) for x in inputs)
            rows, scores, total = _select_jointly(streams, selector.k, seed, size)
        else:
            score = strategy if callable(strategy) else ACQUISITION_FUNCTIONS[strategy]
            for x in inputs:
                if strategy == "random":  # needs no prediction
                    scores = torch.zeros(count_rows(x), dtype=torch.float64)
                elif strategy == "std":
                    scores = score(summarize_stream(_compared_stream(predictor, x, num_samples, seed, task)))
                else:
                    scores = torch.as_tensor(score(predictor.summarize(x, num_samples, seed=seed)))
                if scores.shape != (count_rows(x),):
                    raise ArgumentError("strategy", tuple(scores.shape), f"{count_rows(x)} scores, one for each row")
                selector.add(scores, distance_features(x) if diverse else None)
            rows, scores, _ = selector.select()
            total = selector.num_rows
    if total < selector.k:
        raise ArgumentError("k", k, f"at most {total}, the size of the pool")
    return QueryResult(rows, scores, name, total, num_samples, seed)


def _check_strategy(strategy: str | AcquisitionFunction, task: OutputKind) -> str:
    """Name of the strategy."""
    check_choice("task", task, get_args(OutputKind))
    if callable(strategy):
        return str(getattr(strategy, "__qualname__", type(strategy).__qualname__))
    check_choice("strategy", strategy, tuple(ACQUISITION_FUNCTIONS))
    if task != "classification" and strategy in _CLASS_STRATEGIES:
        raise ArgumentError("strategy", strategy, "'std', 'batch' or 'random' for a regression")
    return strategy


def _check_order(pool: InputData) -> None:
    """Reject a DataLoader whose k-th row is not the k-th of its data set."""
    if not isinstance(pool, DataLoader) or isinstance(pool.dataset, IterableDataset):
        return
    order = pool.sampler if pool.batch_sampler is None else getattr(pool.batch_sampler, "sampler", pool.batch_sampler)
    if not isinstance(order, SequentialSampler):
        raise ArgumentError("pool", type(order).__name__, "a loader that does not shuffle", hint="pass its data set")


# -- joint selection -----------------------------------------------------------------------------------


def _select_jointly(streams: Iterator[SampleStream], k: int, seed: int, size: int) -> tuple[Tensor, Tensor, int]:
    """Row numbers (k,), the variance left as each was selected (k,), and the size of the pool.

    Whenever more than `size` rows are held, the first `size` are reduced to the k that are best jointly.
    """
    rows, vectors, total = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0), 0
    for stream in streams:
        prediction = collect_samples(stream)
        new = _replicate_vectors(prediction, seed).cpu()
        if not bool(new.isfinite().all()):
            raise ArgumentError("scores", "NaN or infinite outputs of the predictor", "finite numbers")
        rows = torch.cat([rows, torch.arange(total, total + len(new))])
        vectors = torch.cat([vectors, new]) if total else new
        total += len(new)
        while len(rows) > size:
            kept, _ = _greedy_logdet_selection(vectors[:size], k, row_uniforms(rows[:size], seed, "tie"))
            kept = torch.cat([kept, torch.arange(size, len(rows))])
            rows, vectors = rows[kept], vectors[kept]
    order, scores = _greedy_logdet_selection(vectors, min(k, total), row_uniforms(rows, seed, "tie"))
    return rows[order], scores, total


def _replicate_vectors(prediction: Prediction, seed: int) -> Tensor:
    """Vectors v(x) with v(x)·v(x') ≈ Σ_c cov_b(z_bc(x), z_bc(x')), and = for x = x': (N, at most 1024).

    Longer vectors are hashed: each value is added to one of 1024 sums, which keeps inner products on average, without
    the usual random signs since the values sum to 0 (Weinberger et al., Feature hashing for large scale multitask
    learning, ICML 2009).
    """
    samples = prediction.samples
    vectors = (samples - samples.mean(0)).movedim(1, 0).flatten(1)  # (N, B·C·*)
    length = vectors.shape[1]
    if length > _MAX_VECTOR_LENGTH:
        where = hash_to_range(torch.arange(length), _MAX_VECTOR_LENGTH, seed, "cell").to(vectors.device)
        vectors = vectors.new_zeros(len(vectors), _MAX_VECTOR_LENGTH).index_add_(1, where, vectors)
    norms = torch.linalg.vector_norm(vectors, dim=1).clamp_min(torch.finfo(vectors.dtype).tiny)
    scale: Tensor = _total_variance(prediction).sqrt() / norms
    return vectors * scale[:, None]


def _greedy_logdet_selection(vectors: Tensor, k: int, ties: Tensor) -> tuple[Tensor, Tensor]:
    """Greedily maximize log det(I + V_A V_Aᵀ / ε): places (k,), and the variance left as each was selected (k,).

    The variance left in row i is ε vᵢᵀ (ε I + Σ_{a ∈ A} v_a v_aᵀ)⁻¹ vᵢ; a copy of a selected row has less than ε left.
    The inverse is updated by the Sherman–Morrison formula. Of equal rows, the one with the smallest tie comes first.
    """
    _check_selection(k, vectors)
    order = ties.argsort()
    vectors = vectors[order].double()  # (M, D)
    largest = float(vectors.square().sum(1).max())
    vectors = vectors / largest**0.5 if largest > 0 else vectors
    inverse = torch.eye(vectors.shape[1], dtype=vectors.dtype) / _RIDGE  # (D, D)
    left = vectors.square().sum(1)  # (M,)
    places, scores = [], []
    for _ in range(k):
        place = int(left.argmax())
        places.append(place)
        scores.append(largest * float(left[place]))
        direction = inverse @ vectors[place]  # (D,)
        along = vectors @ direction  # (M,)
        scale = 1 + along[place]
        left = (left - _RIDGE * along.square() / scale).clamp_min(0)
        left[places] = -1.0
        inverse -= torch.outer(direction, direction) / scale
    return order[places], torch.tensor(scores, dtype=torch.float64)


# -- the loop ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ActiveLearningResult:
    """Learning curves of T trials over R = rounds + 1 sizes of the labeled set, from `run_active_learning`.

    Attributes:
        method: Name of the method.
        strategy: Name of the strategy.
        num_labels: Sizes of the labeled set: (R,).
        metrics: Metrics on the test set by name: (T, R) each.
        labeled: Row numbers in the order in which they were labeled: (T, num_labels[-1]).
        num_samples: Number of replicates B.
        seed: Seed.
    """

    method: str
    strategy: str
    num_labels: Tensor
    metrics: dict[str, Tensor]
    labeled: Tensor
    num_samples: int
    seed: int

    @property
    def num_trials(self) -> int:
        """Number of trials T."""
        return len(self.labeled)

    @property
    def accuracy(self) -> Tensor:
        """Accuracy of the predictive mean on the test set: (T, R)."""
        return self.metrics["accuracy"]

    @property
    def main_metric(self) -> str:
        """Name of the metric that the curve shows: accuracy, or RMSE for a regression."""
        return next(iter(self.metrics))

    def mean(self, metric: str = "accuracy") -> Tensor:
        """Return the mean of a metric over trials: (R,)."""
        return self.metrics[metric].mean(0)

    def interval(self, metric: str = "accuracy", *, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return Student's t interval of the mean of a metric over trials: (R,) each."""
        return student_t_interval(self.metrics[metric], level=level)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each size of the labeled set: means over trials, and the interval of the main metric."""
        columns = {"labels": self.num_labels, self.main_metric: self.mean(self.main_metric)}
        if self.num_trials > 1:
            columns["low"], columns["high"] = self.interval(self.main_metric)
        columns |= {name: self.mean(name) for name in self.metrics}
        return [{name: column[r].item() for name, column in columns.items()} for r in range(len(self.num_labels))]

    def __str__(self) -> str:
        trials = f"means of {self.num_trials} trials (low, high: 95 % interval of the mean)"
        header = f"{self.method} by {self.strategy}: {trials if self.num_trials > 1 else 'one trial'}"
        return f"{header}, B = {self.num_samples}, seed {self.seed}\n{format_table(self.rows())}"


def run_active_learning(
    method: Method,
    model: Callable[[], nn.Module] | nn.Module,
    pool: Dataset[Any],
    test_data: LabeledData,
    config: TrainingConfig,
    *,
    strategy: str | AcquisitionFunction = "entropy",
    initial_size: int = 2000,
    query_size: int = 2000,
    num_rounds: int = 10,
    num_trials: int = 5,
    task: OutputKind | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    num_workers: int = 1,
    folder: Path | None = None,
    progress: bool = True,
) -> ActiveLearningResult:
    """Train on random rows of a pool, then repeatedly label the rows that a strategy selects and train anew.

    The initial rows and the initial weights of each round depend on the seed and the trial alone, so that methods and
    strategies with one seed are compared in pairs. The last query takes what is left of the pool.

    Args:
        method: Method to fit.
        model: Net, which is copied for each fit, or function that makes one.
        pool: Labeled data set from which rows are drawn.
        test_data: Data on which metrics are computed after each training.
        config: Training options of each fit.
        strategy: One of `ACQUISITION_FUNCTIONS`, or a function of a Summary that returns N scores.
        initial_size: Number of labeled rows at the start.
        query_size: Number of rows labeled in each round.
        num_rounds: Number of rounds.
        num_trials: Number of repetitions with other initial rows and weights.
        task: What the outputs are; by default inferred from the method's loss, or else from the test targets.
        num_samples: Number of replicates B.
        seed: Seed of the whole loop.
        batch_size: Rows per batch in prediction.
        num_workers: Number of trials at a time.
        folder: Folder in which every finished round is stored, so that an interrupted run resumes.
        progress: Whether to show a progress bar.

    Returns:
        The learning curves.

    Raises:
        ArgumentError: If sizes do not fit the pool, or the folder holds a run with other settings or data.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import Deterministic
        >>> x = torch.linspace(-1, 1, 60)[:, None]
        >>> data, config = TensorDataset(x, (x[:, 0] > 0.2).long()), TrainingConfig(epochs=2, progress=False)
        >>> options = {"initial_size": 10, "query_size": 40, "num_rounds": 5, "num_trials": 2, "num_samples": 1}
        >>> result = run_active_learning(
        ...     Deterministic(), lambda: nn.Linear(1, 2), data, data, config, progress=False, **options
        ... )
        >>> result.num_labels.tolist(), result.accuracy.shape
        ([10, 50, 60], torch.Size([2, 3]))
    """
    check_repeated_fit(config, test_data)
    n = check_length(pool)
    check_int("query_size", query_size, minimum=1)
    if not 1 <= check_int("initial_size", initial_size) <= n:
        raise ArgumentError("initial_size", initial_size, f"1 to {n}, the size of the pool")
    rounds = range(check_int("num_rounds", num_rounds, minimum=0) + 1)
    sizes = sorted({min(n, initial_size + r * query_size) for r in rounds})
    task = task or _infer_task(method, test_data)
    strategy_name = _check_strategy(strategy, task)
    num_samples, seed = check_int("num_samples", num_samples, minimum=1), check_int("seed", seed)
    net = make_reference_net(model, config.seed)
    settings: dict[str, Any] = {"method": method, "net": net, "config": config, "pool": pool, "test_data": test_data}
    settings |= {"strategy": strategy, "sizes": sizes, "task": task, "num_samples": num_samples, "seed": seed}
    show = progress and num_workers == 1
    options: dict[str, Any] = {"num_samples": num_samples, "batch_size": batch_size, "progress": show}
    quiet = replace(config, progress=config.progress and show)
    ignore_index: int = getattr(getattr(method, "loss", None), "ignore_index", 255)

    def run_round(trial: int, r: int, labeled: list[int], checkpoints: Path | None) -> dict[str, Any]:
        """Train, compute metrics, and select the rows of the next round."""
        fit_seed = derive_seed(seed, config.seed, "fit", trial, r)
        round_config = replace(quiet, seed=fit_seed, folder=checkpoints)
        net = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        predictor = method.fit(net, Subset(pool, labeled), round_config)
        predict_seed = derive_seed(seed, "predict", trial, r)
        with closing(iter_batches(test_data, batch_size, title="testing", progress=show)) as batches:
            metrics = _compute_metrics(predictor, batches, task, num_samples, predict_seed, ignore_index)
        selected: list[int] = []
        if r + 1 < len(sizes):
            rest = sorted({*range(n)} - {*labeled})
            count, query_seed = sizes[r + 1] - sizes[r], derive_seed(seed, "query", trial, r)
            query = select_for_labeling(
                predictor, Subset(pool, rest), count, strategy=strategy, task=task, seed=query_seed, **options
            )
            selected = [rest[i] for i in query.rows.tolist()]
        return {"metrics": metrics, "next": selected}

    def run_trial(trial: int) -> dict[str, Any]:
        """One learning curve: the metrics after each training, and the rows in the order they were labeled."""
        rng = torch.Generator().manual_seed(derive_seed(seed, "start", trial))
        labeled = torch.randperm(n, generator=rng)[:initial_size].tolist()
        metrics = []
        for r in range(len(sizes)):
            file = None if folder is None else Path(folder) / f"trial-{trial:04d}" / f"round-{r:03d}.json"
            result = cached_result(file, partial(run_round, trial, r, labeled))
            metrics.append(result["metrics"])
            labeled = labeled + result["next"]
        return {"metrics": metrics, "labeled": labeled}

    check_int("num_trials", num_trials, minimum=1)
    jobs: dict[str, Any] = {"num_workers": num_workers, "folder": folder, "settings": settings, "progress": progress}
    results = run_jobs(run_trial, num_trials, description="trials", **jobs)
    metrics = {
        name: torch.tensor([[point[name] for point in result["metrics"]] for result in results], dtype=torch.float64)
        for name in results[0]["metrics"][0]
    }
    labeled = torch.tensor([result["labeled"] for result in results])
    method_name = type(method).__name__
    return ActiveLearningResult(method_name, strategy_name, torch.tensor(sizes), metrics, labeled, num_samples, seed)


def _infer_task(method: Method, test_data: LabeledData) -> OutputKind:
    """What the outputs are, by the loss where it is known, else by the targets."""
    for losses, task in _TASK_OF_LOSS.items():
        if isinstance(getattr(method, "loss", None), losses):
            return task
    with closing(iter_batches(test_data, 1, title="", progress=False)) as batches:
        _, y = next(batches)
    return "regression" if y.is_floating_point() else "classification"


@torch.no_grad()
def _compute_metrics(
    predictor: Predictor, batches: Iterator[Any], task: OutputKind, num_samples: int, seed: int, ignore_index: int
) -> dict[str, float]:
    """RMSE of a regression; of classes accuracy, ECE, NLL and Brier score, and the mean IoU of pixels."""
    total: Any = 0
    for x, y in batches:
        if task == "classification":
            probs = exclusive_probs(predictor.summarize(x, num_samples, seed=seed))
            labels = align_labels(probs, y, ignore_index=ignore_index)
            total = total + SegmentationMetrics.from_batch(probs, labels, ignore_index=ignore_index)
        else:
            mean = summarize_stream(_compared_stream(predictor, x, num_samples, seed, task)).mean
            total = total + RunningMean.from_batch((mean - align_targets(mean, y)).double().square())
    if task != "classification":
        return {"rmse": float(total.value) ** 0.5}
    names = ("accuracy", "error", "ece", "nll", "brier", *["mean_iou"] * (probs.ndim > 2))
    return {name: float(getattr(total, name)) for name in names}
