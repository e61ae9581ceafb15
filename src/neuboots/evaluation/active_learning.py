"""Active learning: which rows should be labelled next, and what do labels chosen so come to?

    next rows = argmax over A ⊂ pool, |A| = k, of Σ_{x ∈ A} score(x)

`select_for_labeling` is the single step that a person with unlabelled data needs, `run_active_learning` the whole loop of the
paper's section 4.2, `ACQUISITION_FUNCTIONS` the ways to choose.

How much a label would tell, row by row.

    score(x) = H(p̄)                          entropy
             = −(p̄₍₁₎ − p̄₍₂₎)                margin: the two likeliest classes
             = H(p̄) − 1/B Σ_b H(p_b)         bald: what the replicates disagree about
             = Σ_c std_b p_bc                std; for regression the standard deviation of the outputs

with p_b = softmax f_b(x) and p̄ their mean. The paper's released code ranks by `std`. These look at one row at a time,
so that the k best may be k copies of one row; `batch` looks at the rows together.

Houlsby, Huszár, Ghahramani and Lengyel, Bayesian active learning for classification and preference learning,
arXiv:1112.5745, 2011 (bald); Gal, Islam and Ghahramani, Deep Bayesian active learning with image data, ICML 2017.

Rows chosen together: the k whose outputs vary most over replicates, each in its own way.

    argmax over A of log det(I + K_A / ε),   K(x, x') = Σ_c cov_b(p_bc(x), p_bc(x'))

Once a row is chosen, a copy of it has almost no variance left. The choice is greedy, which reaches at least 1 − 1/e of
the best, since the objective is monotone and submodular.

Kirsch, van Amersfoort and Gal, BatchBALD, NeurIPS 2019; Kirsch, Black-box batch active learning for regression, TMLR
2023 (the determinant of the replicates' covariance); Mahabadi, Indyk, Oveis Gharan and Rezaei, Composable core-sets for
determinant maximization, ICML 2019 (the k best of each part hold a set almost as good as the best of the whole).

One step of active learning: the k rows of a pool to label next, with their scores.

The loop of the paper's section 4.2: start from random labelled rows, train, choose, label, train anew.

Moon, Kim, Shin and Hwang, Confidence-aware learning for deep neural networks, ICML 2020 (the protocol).
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from neuboots._prng import derive_keys, derive_seed, draw_uniform, hash_to_range
from neuboots._streaming import class_probabilities
from neuboots._validation import check_int
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    align_labels,
    align_targets,
    check_predictor,
    format_table,
    iter_batches,
    iter_inputs,
    mean_per_input,
    num_rows,
)
from neuboots.evaluation._parallel import (
    cached_result,
    check_repeated_fit,
    fingerprint,
    make_reference_net,
    run_jobs,
    student_t_interval,
)
from neuboots.loading import check_length
from neuboots.losses import BinaryCrossEntropy, BrierLoss, CrossEntropy, GaussianNLL, SquaredError
from neuboots.metrics import ClassificationMetrics, SegmentationMetrics, rmse
from neuboots.prediction import Method, Moments, Prediction, Predictor, SampleStream, Summary
from neuboots.training import TrainingConfig, progress_bar

AcquisitionFunction = Callable[[Summary], Tensor]  # figures of N rows → (N,), the largest to be labelled first
OutputKind = Literal["classes", "regression", "gaussian"]  # gaussian: the outputs are k means, then k values of log σ²


_ROUNDING = 16  # machine epsilons; the std of 5,000 equal numbers comes to 4.5


def random_scores(figures: Summary) -> Tensor:
    """All rows alike: the seed decides, as it does in every tie."""
    return figures.mean.new_zeros(len(figures.mean))


def _entropy(figures: Summary) -> Tensor:
    return mean_per_input(figures.entropy)


def _margin(figures: Summary) -> Tensor:
    first, second = figures.probs.topk(2, 1).values.unbind(1)
    return mean_per_input(second - first)


def _bald(figures: Summary) -> Tensor:
    return mean_per_input(figures.mutual_information)


def _spread(figures: Summary | Prediction) -> Tensor:
    """std over replicates, and 0 where it is the rounding of a mean of equal numbers: (N, C, *)."""
    mean, std = figures.mean, figures.std
    eps = min(torch.finfo(std.dtype).eps, torch.finfo(torch.float32).eps)  # half precision is summed in float32
    return std.masked_fill(std <= _ROUNDING * eps * mean.abs(), 0.0)  # NaN stays NaN


def _std(figures: Summary) -> Tensor:
    return mean_per_input(_spread(figures).sum(1))


def total_variance(figures: Summary | Prediction) -> Tensor:
    return _spread(figures).square().flatten(1).sum(1)


ACQUISITION_FUNCTIONS: dict[str, AcquisitionFunction] = {
    "random": random_scores,
    "entropy": _entropy,
    "margin": _margin,
    "bald": _bald,
    "std": _std,
    "batch": total_variance,  # of a row by itself; the rows are then chosen together
}
PROBABILITY_STRATEGIES = ("std", "batch")  # figures of the class probabilities, where the others are of the outputs
_OF_CLASSES = ("entropy", "margin", "bald")


def check_strategy(strategy: str | AcquisitionFunction, kind: OutputKind) -> str:
    """The strategy's name, or a sentence."""
    if kind not in get_args(OutputKind):
        raise ValueError(f"got kind={kind!r}; expected one of {', '.join(get_args(OutputKind))}")
    if callable(strategy):
        return str(getattr(strategy, "__qualname__", type(strategy).__qualname__))
    if not isinstance(strategy, str) or strategy not in ACQUISITION_FUNCTIONS:
        raise ValueError(
            f"got strategy={strategy!r}; expected one of {', '.join(ACQUISITION_FUNCTIONS)}, or a function of a Summary that "
            "gives a score for each row"
        )
    if kind != "classes" and strategy in _OF_CLASSES:
        raise ValueError(
            f"got strategy={strategy!r} for a regression, which has no classes; expected 'std', 'batch' or 'random'"
        )
    return strategy


@dataclass(frozen=True)
class ProbabilityView(Predictor):
    """Another predictor, giving what its rows are compared by: class probabilities, or the regression function."""

    inner: Predictor
    kind: OutputKind

    @property
    def net(self) -> nn.Module | None:
        return self.inner.net

    def _of(self, chunk: Tensor) -> Tensor:
        if self.kind == "classes":
            return class_probabilities(chunk, 2)
        if self.kind == "regression":
            return chunk
        if chunk.shape[2] % 2:
            raise ValueError(
                f"got {chunk.shape[2]} outputs for kind='gaussian'; expected k means, then k values of log σ²"
            )
        return chunk[:, :, : chunk.shape[2] // 2]

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        inner = self.inner.stream(x, num_samples, seed=seed)

        def chunks(size: int) -> Iterator[Tensor]:
            return map(self._of, inner.chunks(size))

        moments = None  # exact ones are of the outputs, not of the probabilities
        if inner.moments is not None and self.kind != "classes":
            mean, std = (self._of(part[None])[0] for part in (inner.moments.mean, inner.moments.std))
            moments = Moments(mean, std)
        return SampleStream(num_samples, inner.replicate_bytes, chunks, moments)

    def config(self) -> dict[str, Any]:
        return self.inner.config()


_WIDTH = 1024  # numbers kept of a row; more are hashed into as many
_RIDGE = 1e-6  # ε, as a share of the largest variance in the pool


def replicate_vectors(prediction: Prediction, seed: int) -> Tensor:
    """v(x) with v(x)·v(x') ≈ Σ_c cov_b(z_bc(x), z_bc(x')), and = for x = x': (N, at most 1024).

    Longer vectors are hashed: each number is added to one of 1024 sums, which keeps inner products on average, without
    the usual random signs since they sum to 0 (Weinberger et al., Feature hashing for large scale multitask learning,
    ICML 2009).
    """
    samples = prediction.samples
    vectors = (samples - samples.mean(0)).movedim(1, 0).flatten(1)  # (N, B·C·*)
    length = vectors.shape[1]
    if length > _WIDTH:
        where = hash_to_range(torch.arange(length), _WIDTH, seed, "cell").to(vectors.device)
        vectors = vectors.new_zeros(len(vectors), _WIDTH).index_add_(1, where, vectors)
    norms = torch.linalg.vector_norm(vectors, dim=1).clamp_min(torch.finfo(vectors.dtype).tiny)
    scale: Tensor = total_variance(prediction).sqrt() / norms
    return vectors * scale[:, None]


def select_jointly(
    view: Predictor, inputs: Iterator[Any], k: int, num_samples: int, seed: int, size: int, *, progress: bool
) -> tuple[Tensor, Tensor, int]:
    """k row numbers, the variance left as each was chosen, and how many rows there are in all: (k,), (k,), N.

    Whenever `size` rows are held, the k that are best together stay: what is good in the whole is good in its part.
    """
    rows = torch.zeros(0, dtype=torch.int64)
    vectors, total = torch.zeros(0, 0), 0
    for x in inputs:
        prediction = view.predict(x, num_samples, seed=seed)
        check_finite(prediction.mean)
        new = replicate_vectors(prediction, seed).cpu()
        rows = torch.cat([rows, torch.arange(total, total + len(new))])
        vectors = torch.cat([vectors, new]) if total else new
        total += len(new)
        while len(rows) > size:
            stay, _ = greedy_logdet_selection(vectors[:size], k, row_uniforms(rows[:size], seed, "tie"), progress=False)
            stay = torch.cat([stay, torch.arange(size, len(rows))])
            rows, vectors = rows[stay], vectors[stay]
    check_pool_size(k, total)
    places, scores = greedy_logdet_selection(vectors, k, row_uniforms(rows, seed, "tie"), progress=progress)
    return rows[places], scores, total


def greedy_logdet_selection(vectors: Tensor, k: int, ties: Tensor, *, progress: bool) -> tuple[Tensor, Tensor]:
    """Greedily argmax log det(I + V_A V_Aᵀ / ε): places (k,), and the variance left as each was chosen (k,).

    The variance left in row i is ε vᵢᵀ (ε I + Σ_{a ∈ A} v_a v_aᵀ)⁻¹ vᵢ; a copy of a chosen row has less than ε left.
    The inverse is updated by Sherman and Morrison's rule. Among equals the one with the least of `ties` comes first.
    """
    order = ties.argsort()
    vectors = vectors[order].double()  # (M, D)
    largest = float(vectors.square().sum(1).max())
    vectors = vectors / largest**0.5 if largest > 0 else vectors
    inverse = torch.eye(vectors.shape[1], dtype=vectors.dtype) / _RIDGE  # (D, D)
    left = vectors.square().sum(1)  # (M,)
    places, scores = [], []
    with progress_bar("choosing rows", k, enabled=progress) as advance:
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
            advance("choosing rows")
    return order[places], torch.tensor(scores, dtype=torch.float64)


def row_uniforms(rows: Tensor, *name: int | str) -> Tensor:
    """A uniform number for each row, a function of its number and the name: (N,)."""
    keys = derive_keys(rows, *name)
    return draw_uniform(keys, torch.zeros_like(keys))


def check_pool_size(k: int, total: int) -> None:
    if k > total:
        raise ValueError(f"got k={k} for a pool of {total} rows; expected at most {total}")


def check_finite(outputs: Tensor) -> None:
    bad = int((~outputs.isfinite()).flatten(1).any(1).sum())
    if bad:
        raise ValueError(
            f"the predictor gave NaN or infinite outputs for {bad} of {len(outputs)} rows; expected numbers: look for "
            "a training that went astray"
        )


_SHOWN = 10  # rows of a choice that are printed


@dataclass(frozen=True, eq=False)
class QueryResult:
    """What `select_for_labeling` chose: row numbers, the best first, and their scores (larger is better)."""

    rows: Tensor  # (k,)
    scores: Tensor  # (k,); for batch the variance that was left when the row was chosen
    strategy: str
    pool_size: int
    num_samples: int
    seed: int

    def __str__(self) -> str:
        header = (
            f"{len(self.rows)} of {self.pool_size:,} rows by {self.strategy}, B = {self.num_samples}, seed {self.seed}"
        )
        shown = [
            {"rank": rank, "row": row, "score": score}
            for rank, (row, score) in enumerate(zip(self.rows.tolist(), self.scores.tolist(), strict=True), 1)
        ]
        rest = len(shown) - _SHOWN
        more = f"\n… and {rest} more" if rest > 0 else ""
        return f"{header}\n{format_table(shown[:_SHOWN])}{more}"


def select_for_labeling(
    predictor: Predictor,
    pool: InputData,
    k: int,
    *,
    strategy: str | AcquisitionFunction = "entropy",
    task: OutputKind = "classes",
    num_samples: int = 100,
    seed: int = 0,
    max_candidates: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> QueryResult:
    """The k rows of the pool to label next, best first, with their scores.

    The pool is a tensor of inputs (a dict or tuple of them for a net of several), a data set, or a loader; labels are
    passed over. Rows are numbered in the order in which the pool gives them, and a DataLoader must give them in that
    of its data set. A strategy is one of `ACQUISITION_FUNCTIONS`, or a
    function of a Summary that gives N scores. `kind` says what the outputs are; of a regression the spread of the
    function itself counts. Equal scores are put in order by the seed.

    `batch` reads the pool once and holds at most `shortlist` rows of it (max(1000, 4k)): of each so many, the k best
    stay.

    >>> from neuboots import DeterministicPredictor
    >>> net = torch.nn.Linear(1, 1)  # one logit, x itself
    >>> _ = net.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    >>> pool = torch.tensor([[-3.0], [0.1], [2.0], [-0.5]])
    >>> choice = select_for_labeling(DeterministicPredictor(net), pool, 2, num_samples=1, progress=False)
    >>> print(choice)
    2 of 4 rows by entropy, B = 1, seed 0
    rank  row   score
       1    1  0.6919
       2    3  0.6628
    """
    check_predictor(predictor)
    name = check_strategy(strategy, task)
    _check_order(pool)
    k, num_samples = check_int("k", k, minimum=1), check_int("num_samples", num_samples, minimum=1)
    seed = check_int("seed", seed)
    size = max(1000, 4 * k) if max_candidates is None else check_int("shortlist", max_candidates)
    if strategy == "batch" and size < 2 * k:
        raise ValueError(
            f"got shortlist={size} for k={k}; expected at least {2 * k}, twice as many as are to be chosen"
        )
    if predictor.num_distinct is not None:
        num_samples = min(num_samples, predictor.num_distinct)  # each member once
    batches = iter_inputs(pool, batch_size, title="scoring the pool", progress=progress)
    with closing(batches) as inputs:  # a traceback would keep it open, and its bar on the screen
        if strategy == "batch":
            view = ProbabilityView(predictor, task)
            rows, scores, total = select_jointly(view, inputs, k, num_samples, seed, size, progress=progress)
        else:
            every = _scores(predictor, inputs, strategy, task, num_samples, seed)  # (N,)
            total = len(every)
            check_pool_size(k, total)
            rows = _best(every, seed)[:k]
            scores = every[rows]
    return QueryResult(rows, scores, name, total, num_samples, seed)


def _check_order(pool: InputData) -> None:
    """Refuse a DataLoader whose k-th row is not the k-th of its data set."""
    if not isinstance(pool, DataLoader) or isinstance(pool.dataset, IterableDataset):
        return
    order = pool.sampler if pool.batch_sampler is None else getattr(pool.batch_sampler, "sampler", pool.batch_sampler)
    if not isinstance(order, SequentialSampler):
        raise ValueError(
            f"got a loader that shuffles, by a {type(order).__name__}; expected rows in their order: make it with "
            "shuffle=False, or give its data set"
        )


def _scores(
    predictor: Predictor,
    inputs: Iterator[Any],
    strategy: str | AcquisitionFunction,
    kind: OutputKind,
    num_samples: int,
    seed: int,
) -> Tensor:
    """The score of every row of the pool: (N,)."""
    score = strategy if callable(strategy) else ACQUISITION_FUNCTIONS[strategy]
    view = ProbabilityView(predictor, kind) if strategy in PROBABILITY_STRATEGIES else predictor
    parts = [torch.zeros(0, dtype=torch.float64)]
    for x in inputs:
        size = num_rows(x)
        if score is random_scores:  # no need to ask the predictor
            parts.append(torch.zeros(size, dtype=torch.float64))
            continue
        figures = view.summarize(x, num_samples, seed=seed)
        check_finite(figures.mean)
        part = torch.as_tensor(score(figures)).detach()
        if part.shape != (size,):
            raise ValueError(
                f"the strategy gave scores of shape {tuple(part.shape)}; expected ({size},), one for each row"
            )
        if bool(part.isnan().any()):
            raise ValueError(f"the strategy gave NaN for {int(part.isnan().sum())} of {size} rows; expected numbers")
        parts.append(part.double().cpu())
    return torch.cat(parts)


def _best(scores: Tensor, seed: int) -> Tensor:
    """Row numbers, the largest score first; the seed decides among equals: (N,)."""
    anyhow = row_uniforms(torch.arange(len(scores)), seed, "tie").argsort()
    return anyhow[scores[anyhow].argsort(descending=True, stable=True)]


@dataclass(frozen=True, eq=False)
class ActiveLearningResult:
    """What `run_active_learning` found: the learning curve of T trials over R = rounds + 1 sizes of the labelled set."""

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
        return student_t_interval(self._of(figure), level=level)

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
        return f"{header}, B = {self.num_samples}, seed {self.seed}\n{format_table(self.rows())}"


def run_active_learning(
    method: Method,
    model: Callable[[], nn.Module] | None,
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
    """Train on `start` random rows of the pool, then `rounds` times: label `query` rows more and train anew.

    Figures are those of the test set after each training. The first rows depend on the seed and the trial alone, so
    that methods and strategies with one seed are compared in pairs; so do the first weights of each round. The last
    query takes what is left of the pool, and the loop ends there. `kind` is found from the method's loss, or else from
    the targets of the test set. Trials run in `num_workers` processes. With a folder, every finished round is kept
    there, and a run that was cut short goes on where it stopped, to the same end; a folder made with other settings or
    other data is refused. `model` must make a new net at each call.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Deterministic
    >>> x = torch.linspace(-1, 1, 60)[:, None]
    >>> rows = TensorDataset(x, (x[:, 0] > 0.2).long())
    >>> config = TrainingConfig(epochs=2, progress=False)
    >>> model = lambda: nn.Linear(1, 2)
    >>> options = {"start": 10, "query": 40, "rounds": 5, "trials": 2, "num_samples": 1, "progress": False}
    >>> found = run_active_learning(Deterministic(), model, rows, rows, config, **options)
    >>> found.num_labels.tolist(), found.accuracy.shape
    ([10, 50, 60], torch.Size([2, 3]))
    """
    check_repeated_fit(method, config, test_data, task="active_learning")
    n = check_length(pool)
    initial_size, query_size = check_int("start", initial_size, minimum=1), check_int("query", query_size, minimum=1)
    num_rounds, num_trials = check_int("rounds", num_rounds, minimum=0), check_int("trials", num_trials, minimum=1)
    num_samples, seed = check_int("num_samples", num_samples, minimum=1), check_int("seed", seed)
    if initial_size > n:
        raise ValueError(f"got start={initial_size} for a pool of {n} rows; expected at most {n}")
    task = task or _kind_of(method, test_data)
    name = check_strategy(strategy, task)
    net = make_reference_net(model, config.seed)
    sizes = [initial_size]
    while len(sizes) <= num_rounds and sizes[-1] < n:
        sizes.append(min(n, sizes[-1] + query_size))
    identity = ""
    if folder is not None:
        identity = fingerprint(
            method=method,
            net=net,
            config=config,
            strategy=strategy,
            sizes=sizes,
            kind=task,
            num_samples=num_samples,
            seed=seed,
            pool=pool,
            test=test_data,
        )
    shown = progress and num_workers == 1
    loop = _Loop(
        method=method,
        model=model,
        pool=pool,
        test=test_data,
        config=replace(config, progress=config.progress and shown),
        strategy=strategy,
        sizes=tuple(sizes),
        kind=task,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        folder=None if folder is None else Path(folder),
        progress=shown,
    )
    results = run_jobs(
        loop.trial,
        num_trials,
        num_workers=num_workers,
        folder=loop.folder,
        key=identity,
        description="trials",
        progress=progress,
    )
    figures = {
        figure: torch.tensor(
            [[point[figure] for point in result["figures"]] for result in results], dtype=torch.float64
        )
        for figure in results[0]["figures"][0]
    }
    labelled = torch.tensor([result["labelled"] for result in results])
    return ActiveLearningResult(type(method).__name__, name, torch.tensor(sizes), figures, labelled, num_samples, seed)


def _kind_of(method: Method, test: LabeledData) -> OutputKind:
    """What the outputs are, by the loss where it is known, else by the targets."""
    loss = getattr(method, "loss", None)
    classes = (CrossEntropy, BrierLoss, BinaryCrossEntropy, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.NLLLoss)
    if isinstance(loss, classes):
        return "classes"
    if isinstance(loss, GaussianNLL):
        return "gaussian"
    if isinstance(loss, SquaredError | nn.MSELoss | nn.L1Loss | nn.HuberLoss | nn.SmoothL1Loss):
        return "regression"
    with closing(iter_batches(test, 1, title="", progress=False)) as batches:
        _, y = next(batches)
    return "regression" if y.is_floating_point() else "classes"


@dataclass(frozen=True)
class _Loop:
    """All that a trial needs to know."""

    method: Method
    model: Callable[[], nn.Module] | None
    pool: Dataset[Any]
    test: LabeledData
    config: TrainingConfig
    strategy: str | AcquisitionFunction
    sizes: tuple[int, ...]
    kind: OutputKind
    num_samples: int
    seed: int
    batch_size: int
    folder: Path | None
    progress: bool

    def trial(self, trial: int) -> dict[str, Any]:
        """One learning curve: the figures after each training, and the rows in the order they were labelled."""
        n = check_length(self.pool)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(self.seed, "start", trial)))
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
        return cached_result(file, lambda folder: self._done(trial, r, labelled, folder))

    def _done(self, trial: int, r: int, labelled: list[int], folder: Path | None) -> dict[str, Any]:
        seeds = {what: derive_seed(self.seed, what, trial, r) for what in ("predict", "query")}
        fit_seed = derive_seed(self.seed, self.config.seed, "fit", trial, r)
        data = Subset(self.pool, labelled)
        predictor = self.method.fit(self.model, data, replace(self.config, seed=fit_seed, folder=folder))
        figures = self._figures(predictor, seeds["predict"])
        following: list[int] = []
        if r + 1 < len(self.sizes):
            taken = set(labelled)
            rest = [i for i in range(check_length(self.pool)) if i not in taken]
            choice = select_for_labeling(
                predictor,
                Subset(self.pool, rest),
                self.sizes[r + 1] - self.sizes[r],
                strategy=self.strategy,
                task=self.kind,
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
        batches = iter_batches(self.test, self.batch_size, title="testing", progress=self.progress)
        with closing(batches):  # a traceback would keep it open
            return measure(predictor, seed, batches)

    def _of_classes(self, predictor: Predictor, seed: int, batches: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        total = sum(self._tally(predictor.summarize(x, self.num_samples, seed=seed), y) for x, y in batches)
        assert isinstance(total, ClassificationMetrics | SegmentationMetrics), "batches_of gives at least one batch"
        names = ("accuracy", "error", "ece", "nll", "brier", *["mean_iou"] * isinstance(total, SegmentationMetrics))
        return {name: float(getattr(total, name)) for name in names}

    def _rmse(self, predictor: Predictor, seed: int, batches: Iterator[tuple[Any, Tensor]]) -> dict[str, float]:
        view = ProbabilityView(predictor, self.kind)
        squares, count = 0.0, 0
        for x, y in batches:
            mean = view.summarize(x, self.num_samples, seed=seed).mean
            squares += float(rmse(mean, align_targets(mean, y))) ** 2 * mean.numel()
            count += mean.numel()
        return {"rmse": (squares / count) ** 0.5}

    def _tally(self, figures: Summary, y: Tensor) -> ClassificationMetrics | SegmentationMetrics:
        """Of rows, or of pixels but for those that the loss ignores."""
        ignore_index = getattr(getattr(self.method, "loss", None), "ignore_index", 255)
        if figures.probs.ndim == 2:
            return ClassificationMetrics.of(figures.probs, align_labels(figures.probs, y))
        labels = align_labels(figures.probs, y, ignore_index=ignore_index)
        return SegmentationMetrics.of(figures.probs, labels, ignore_index=ignore_index)
