"""Active learning: acquisition functions, selection, and a loop that resumes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import Composed, Stored, noise
from _reference import figures, softmax, standard_errors
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset

from neuboots import ArgumentError, DeepEnsemble, Deterministic, NeuBoots, Prediction, Predictor, TrainingConfig
from neuboots.evaluation import active_learning
from neuboots.evaluation.active_learning import (
    ACQUISITION_FUNCTIONS,
    ActiveLearningResult,
    RowSelector,
    _greedy_logdet_selection,
    _replicate_vectors,
    distance_features,
    greedy_diverse_selection,
    run_active_learning,
    select_for_labeling,
)
from neuboots.losses import GaussianNLL
from neuboots.methods import DeterministicPredictor
from neuboots.prediction import Moments, SampleStream

UNCERTAINTY = [name for name in ACQUISITION_FUNCTIONS if name != "random"]
QUIET: dict[str, Any] = {"progress": False}


def numbers(count: int) -> Tensor:
    """Inputs that are their own row numbers: (N, 1)."""
    return torch.arange(float(count))[:, None]


def select(predictor: Stored, pool: Any, k: int, **options: Any) -> list[int]:
    return select_for_labeling(predictor, pool, k, num_samples=len(predictor.samples), **options, **QUIET).rows.tolist()


# -- acquisition functions -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", UNCERTAINTY)
@pytest.mark.parametrize(("outputs", "pixels"), [(1, ()), (3, ()), (3, (2, 2))])
def test_uncertain_row_is_selected_first(strategy: str, outputs: int, pixels: tuple[int, ...]) -> None:
    samples = 0.1 * noise(8, 12, outputs, *pixels)
    samples[:, :, 0] += 6.0
    samples[:, 7] = 4 * noise(8, outputs, *pixels, seed=1)
    assert select(Stored(samples), numbers(12), 3, strategy=strategy, batch_size=5)[0] == 7


@pytest.mark.parametrize("outputs", [1, 4])
def test_scores_match_their_definitions(outputs: int) -> None:
    samples = 2 * noise(6, 9, outputs)
    slow = figures(samples.double().numpy())
    probs = np.array([[softmax(z.tolist()) for z in replicate] for replicate in samples.double()])  # (B, N, C)
    ordered = np.sort(slow["probs"], 1)
    expected = {
        "entropy": slow["entropy"],
        "margin": ordered[:, -2] - ordered[:, -1],
        "bald": slow["mutual_information"],
        "std": probs.std(0, ddof=1).sum(1),
    }
    for strategy, scores in expected.items():
        query = select_for_labeling(
            Stored(samples), numbers(9), 9, strategy=strategy, num_samples=6, batch_size=4, **QUIET
        )
        assert query.rows.tolist() == np.argsort(-scores).tolist()
        np.testing.assert_allclose(query.scores, np.sort(scores)[::-1], rtol=1e-4, atol=1e-6)  # float32 statistics


def test_own_acquisition_function() -> None:
    def confidence(summary: Any) -> Tensor:
        return summary.confidence

    samples = noise(6, 30, 3)
    query = select_for_labeling(
        Stored(samples), numbers(30), 30, strategy=confidence, num_samples=6, batch_size=7, **QUIET
    )
    assert query.rows.tolist() == samples.softmax(2).mean(0).amax(1).argsort(descending=True).tolist()
    assert query.strategy.endswith("confidence")
    lines = str(query).splitlines()
    assert "30 of 30 rows" in lines[0]
    assert lines[2].split()[:2] == ["1", str(int(query.rows[0]))]


def test_random_rows_are_uniform_without_prediction() -> None:
    class Silent(Stored):
        def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
            raise AssertionError

    equal = Silent(torch.zeros(1, 8, 2))
    draws = torch.tensor([select(equal, numbers(8), 3, strategy="random", seed=seed) for seed in range(800)])
    assert all(len(set(rows)) == 3 for rows in draws.tolist())
    for counts, p in ((draws[:, 0].bincount(minlength=8), 1 / 8), (draws.flatten().bincount(minlength=8), 3 / 8)):
        assert float((counts - 800 * p).abs().max()) < standard_errors(16) * (800 * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("strategy", list(ACQUISITION_FUNCTIONS))
def test_ties_are_ordered_by_the_seed(strategy: str) -> None:
    equal, state = Stored(torch.ones(4, 50, 3)), torch.get_rng_state()
    first, again, other = (select(equal, numbers(50), 5, strategy=strategy, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first != [0, 1, 2, 3, 4]
    assert len(set(first)) == 5
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("strategy", ["std", "batch"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rounding_is_no_spread(strategy: str, task: Any) -> None:
    """The mean of two hundred equal numbers is not quite theirs."""
    for dtype in (torch.float32, torch.float64):
        equal = Stored((3 * noise(1, 50, 3)).to(dtype).expand(200, 50, 3))
        options: dict[str, Any] = {"strategy": strategy, "task": task, "num_samples": 200, **QUIET}
        queries = [select_for_labeling(equal, numbers(50), 8, batch_size=b, **options) for b in (3, 50)]
        assert queries[0].scores.tolist() == queries[1].scores.tolist() == 8 * [0.0]
        random = select(equal, numbers(50), 8, strategy="random")
        assert queries[0].rows.tolist() == queries[1].rows.tolist() == random


@pytest.mark.parametrize("strategy", ["std", "batch"])
def test_small_spread_counts(strategy: str) -> None:
    """A millionth in float64, and 3 % in bfloat16, which is four of its epsilons."""
    for size, dtype in ((1e-6, torch.float64), (0.03, torch.bfloat16)):
        samples = torch.ones(4, 12, 1, dtype=torch.float64)
        samples[:, 7, 0] += size * torch.tensor([1.0, -1.0, 1.0, -1.0])
        options: dict[str, Any] = {"strategy": strategy, "task": "regression", "num_samples": 4, **QUIET}
        query = select_for_labeling(Stored(samples.to(dtype)), numbers(12), 2, **options)
        assert int(query.rows[0]) == 7
        assert query.scores[0] > 0 == query.scores[1]


def test_regression_uses_the_spread_of_the_function() -> None:
    samples = noise(8, 12, 2) * 0.01
    samples[:, 3, 0] += 100.0
    samples[:, 5, 0] += noise(8, seed=1)
    samples[:, 8, 1] += 5 * noise(8, seed=2)  # the log variance of a Gaussian head
    for strategy in ("std", "batch"):
        assert select(Stored(samples), numbers(12), 2, strategy=strategy, task="gaussian")[0] == 5
        assert select(Stored(samples), numbers(12), 2, strategy=strategy, task="regression") == [8, 5]


def test_exact_moments_are_used_for_regression() -> None:
    class Exact(Stored):
        def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
            moments = Moments(torch.zeros(12, 1), torch.arange(12.0)[:, None])
            return replace(super().stream(x, num_samples, seed=seed), moments=moments)

    predictor = Exact(torch.zeros(4, 12, 1))
    options: dict[str, Any] = {"strategy": "std", "num_samples": 4, "batch_size": 12, **QUIET}
    assert select_for_labeling(predictor, numbers(12), 3, task="regression", **options).rows.tolist() == [11, 10, 9]
    assert select_for_labeling(predictor, numbers(12), 12, **options).scores.tolist() == 12 * [0.0]


@pytest.mark.parametrize("strategy", ["std", "batch", "entropy"])
def test_missing_values_in_the_pool_are_errors(strategy: str) -> None:
    predictor = DeterministicPredictor(Composed(lambda net, x: x.nan_to_num()))
    with pytest.raises(ArgumentError, match="x="):
        select_for_labeling(predictor, torch.full((5, 3), torch.nan), 2, strategy=strategy, **QUIET)


def test_members_are_used_once() -> None:
    predictor = Stored(3 * noise(3, 12, 3), num_distinct=3)  # has no fourth replicate
    for strategy in UNCERTAINTY:
        query = select_for_labeling(predictor, numbers(12), 4, strategy=strategy, num_samples=100, **QUIET)
        assert query.num_samples == 3
        assert query.rows.tolist() == select(Stored(predictor.samples), numbers(12), 4, strategy=strategy)


# -- pools ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": list(range(22))[::-1]},
        {"batch_sampler": BatchSampler(RandomSampler(range(22)), 5, False)},
        {"batch_sampler": [[3, 2], [1, 0]]},
    ],
)
def test_shuffled_loader_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="pool"):
        select(Stored(noise(3, 22, 3)), DataLoader(TensorDataset(numbers(22)), **options), 2)


@pytest.mark.parametrize("strategy", ["entropy", "batch"])
def test_failure_closes_the_pool(strategy: str) -> None:
    closed: list[bool] = []

    class Batches:
        def __iter__(self) -> Iterator[Tensor]:
            try:
                yield from numbers(22).split(4)
            finally:
                closed.append(True)

    samples = noise(3, 22, 3)
    samples[:, 5] = torch.nan
    with pytest.raises(ArgumentError, match="scores") as error:
        select(Stored(samples), Batches(), 2, strategy=strategy)
    assert error.tb is not None  # which holds the local variables
    assert closed == [True]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"k": 0}, "k"),
        ({"k": 13}, "k"),
        ({"k": 13, "strategy": "batch"}, "k"),
        ({"num_samples": 0}, "num_samples"),
        ({"seed": 1.5}, "seed"),
        ({"strategy": "entorpy"}, "strategy"),
        ({"strategy": "bald", "task": "regression"}, "strategy"),
        ({"strategy": lambda s: s.probs}, "strategy"),
        ({"strategy": lambda s: s.entropy * torch.nan}, "scores"),
        ({"task": "classes"}, "task"),
        ({"strategy": "std", "task": "gaussian"}, "task"),
        ({"strategy": "batch", "k": 4, "max_candidates": 7}, "max_candidates"),
    ],
)
def test_invalid_selection_is_rejected(change: dict[str, Any], name: str) -> None:
    call = {"predictor": Stored(noise(3, 12, 3)), "pool": numbers(12), "k": 2, "num_samples": 3, **QUIET, **change}
    with pytest.raises(ArgumentError) as error:
        select_for_labeling(call.pop("predictor"), call.pop("pool"), call.pop("k"), **call)
    assert error.value.name == name


# -- selection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_row_selector_keeps_the_best_rows_and_their_columns(batch_size: int) -> None:
    scores = noise(100).round(decimals=1)  # with ties
    selector = RowSelector(9, seed=3)
    for rows in torch.arange(100).split(batch_size):
        selector.add(scores[rows], columns={"name": np.array([f"row {i}" for i in rows.tolist()], dtype=object)})
    rows, best, columns = selector.select()
    assert best.tolist() == scores.double().sort(descending=True).values[:9].tolist()
    assert best.tolist() == scores.double()[rows].tolist()
    assert columns["name"].tolist() == [f"row {i}" for i in rows.tolist()]
    assert selector.num_rows == 100
    few = RowSelector(200)
    few.add(scores)
    assert len(few.select()[0]) == 100


def test_diverse_selection_avoids_copies() -> None:
    x = torch.cat([torch.zeros(30, 2), 4 * noise(10, 2)])
    samples = torch.cat([torch.zeros(1, 30, 1), 0.5 * torch.ones(1, 10, 1)], 1)  # the copies are most uncertain
    similar, diverse = (select(Stored(samples), numbers(40), 5, diverse=flag) for flag in (False, True))
    assert all(row < 30 for row in similar)
    selector = RowSelector(5, diverse=True)
    selector.add(torch.cat([torch.full((30,), 0.69), torch.full((10,), 0.6)]), distance_features(x))
    rows, _, _ = selector.select()
    assert sum(row < 30 for row in rows.tolist()) == 1
    assert len(set(diverse)) == 5
    with pytest.raises(ArgumentError, match="scores"):
        selector.add(torch.tensor([torch.inf]), torch.zeros(1, 2))


def test_distance_features_are_bounded_in_length_and_value() -> None:
    images = noise(3, 3, 32, 32) * 9
    assert distance_features(images).shape == (3, 192)
    long = distance_features((noise(3, 700), noise(3, 600, seed=1)))
    assert long.shape == (3, 512)
    assert float(distance_features(9 * noise(3, 4)).abs().max()) == 3.0
    assert greedy_diverse_selection(torch.zeros(3), torch.zeros(3, 1), 3).sort().values.tolist() == [0, 1, 2]


def with_copies(copies: int) -> Stored:
    """The most uncertain row many times, then ten others, each uncertain in its own way."""
    samples = 0.7 * noise(40, copies + 10, 3)
    samples[:, :, 0] += 1.0
    samples[:, :copies] = 2 * noise(40, 1, 3, seed=1)
    return Stored(samples)


@pytest.mark.parametrize("batch_size", [16, 300])
def test_copies_do_not_fill_the_candidates(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def recorded(vectors: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        sizes.append(len(vectors))
        return _greedy_logdet_selection(vectors, *arguments, **options)

    monkeypatch.setattr(active_learning, "_greedy_logdet_selection", recorded)
    assert max(select(with_copies(300), numbers(310), 8, strategy="bald")) < 300
    rows = select(with_copies(300), numbers(310), 11, strategy="batch", max_candidates=50, batch_size=batch_size)
    assert sum(row < 300 for row in rows) == 1
    assert {row for row in rows if row >= 300} == set(range(300, 310))
    assert max(sizes) == 50


def test_batch_selection_does_not_depend_on_batches() -> None:
    options: dict[str, Any] = {"strategy": "batch", "max_candidates": 40}
    picks = [select(Stored(noise(6, 300, 3)), numbers(300), 7, batch_size=b, **options) for b in (1, 11, 300)]
    assert picks[0] == picks[1] == picks[2]


def test_greedy_selection_maximizes_the_determinant() -> None:
    """Against log det(I + K_A / ε) itself; scores are the variance given the rows selected before."""
    vectors = noise(14, 6).double()
    places, scores = _greedy_logdet_selection(vectors, 9, torch.rand(14))  # more rows than dimensions
    covariance = vectors @ vectors.T
    ridge = 1e-6 * float(covariance.diagonal().max())

    def log_det(rows: list[int]) -> float:
        return float(torch.linalg.slogdet(torch.eye(len(rows)) + covariance[rows][:, rows] / ridge)[1])

    taken: list[int] = []
    for place, score in zip(places.tolist(), scores.tolist(), strict=True):
        assert place == max(set(range(14)) - set(taken), key=lambda i: log_det([*taken, i]))
        known = covariance[taken][:, taken] + ridge * torch.eye(len(taken))
        cross = covariance[place, taken]
        assert score == pytest.approx(
            float(covariance[place, place] - cross @ torch.linalg.solve(known, cross)), rel=1e-4
        )
        taken.append(place)
    best = max(log_det(list(rows)) for rows in itertools.combinations(range(14), 3))
    assert log_det(taken[:3]) >= (1 - np.exp(-1)) * best


@pytest.mark.parametrize("length", [8192, 1024])
def test_replicate_vectors_have_the_products_of_the_covariance(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, or hashed from 3,000 values to 1,024: then within the standard error of the cosine, 2/√1024."""
    monkeypatch.setattr(active_learning, "_MAX_VECTOR_LENGTH", length)
    samples = noise(1000, 12, 3).double() + noise(1000, 1, 3, seed=1)
    vectors = _replicate_vectors(Prediction(samples), seed=0)
    centered = samples - samples.mean(0)
    covariance = torch.einsum("bic,bjc->ij", centered, centered) / 999
    size = covariance.diagonal().sqrt()
    gap = (vectors @ vectors.T - covariance) / torch.outer(size, size)
    assert vectors.shape[1] == min(length, 3000)
    assert float(gap.diagonal().abs().max()) < 1e-12
    assert float(gap.abs().max()) < (1e-12 if length > 3000 else standard_errors(66) * 2 / length**0.5)


# -- the loop ------------------------------------------------------------------------------------------

CONFIG = TrainingConfig(epochs=2, batch_size=32, progress=False, optimizer=partial(torch.optim.Adam, lr=0.02))
SMALL: dict[str, Any] = {"initial_size": 20, "query_size": 15, "num_rounds": 2, "num_trials": 2, "num_samples": 4}


def digits(count: int = 240) -> tuple[TensorDataset, TensorDataset]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(x[:count], y[:count]), TensorDataset(x[count : 2 * count], y[count : 2 * count])


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))


def loop(
    method: Any = None, config: TrainingConfig = CONFIG, model: Any = make_net, **options: Any
) -> ActiveLearningResult:
    pool, test = digits()
    pool, test = options.pop("pool", pool), options.pop("test_data", test)
    return run_active_learning(method or Deterministic(), model, pool, test, config, **{**SMALL, **QUIET, **options})


def assert_same(a: ActiveLearningResult, b: ActiveLearningResult) -> None:
    assert torch.equal(a.labeled, b.labeled)
    assert a.metrics.keys() == b.metrics.keys()
    assert all(torch.equal(a.metrics[name], b.metrics[name]) for name in a.metrics)


@dataclass(frozen=True)
class Recorded:
    """Another method, whose fits are recorded."""

    inner: Any
    fits: list[Any] = field(default_factory=list, compare=False)
    predictors: list[Predictor] = field(default_factory=list, compare=False)
    fail_at: int = field(default=99, compare=False)

    @property
    def loss(self) -> Any:
        return self.inner.loss

    def fit(self, model: Any, data: Any, config: Any = None, *, val_data: Any = None) -> Predictor:
        self.fits.append((list(data.indices), config))
        if len(self.fits) == self.fail_at + 1:
            raise InterruptedError
        self.predictors.append(self.inner.fit(model, data, config))
        return self.predictors[-1]


@pytest.mark.parametrize("method", [NeuBoots(), DeepEnsemble(num_members=2)], ids=["neuboots", "ensemble"])
@pytest.mark.parametrize("strategy", ["bald", "batch"])
def test_loop_of_any_method_has_all_metrics(method: Any, strategy: str) -> None:
    state = torch.get_rng_state()
    found = loop(method, strategy=strategy, num_trials=1)
    assert found.num_labels.tolist() == [20, 35, 50]
    assert len(set(found.labeled[0].tolist())) == 50
    assert list(found.metrics) == ["accuracy", "error", "ece", "nll", "brier"]
    assert all(values.shape == (1, 3) for values in found.metrics.values())
    assert torch.equal(torch.get_rng_state(), state)


def test_metrics_and_queries_are_those_of_the_trained_net() -> None:
    method = Recorded(Deterministic())
    found = loop(method, num_trials=1)
    (before, config), (rows, last_config) = method.fits[-2:]
    assert rows == found.labeled[0].tolist()
    assert len({config.seed for _, config in method.fits}) == 3
    pool, test = digits()
    x, y = test.tensors
    predictor = Deterministic().fit(make_net, Subset(pool, rows), last_config)
    accuracy = float((predictor.predict(x, 1).labels == y).double().mean())
    assert float(found.accuracy[0, -1]) == pytest.approx(accuracy, rel=1e-12)
    rest = [i for i in range(240) if i not in before]
    entropy = Deterministic().fit(make_net, Subset(pool, before), config).predict(pool.tensors[0][rest], 1).entropy
    assert set(rows[len(before) :]) == {rest[i] for i in entropy.argsort(descending=True)[:15].tolist()}


def test_strategies_with_one_seed_are_paired() -> None:
    runs = [loop(strategy="random"), loop(strategy="bald"), loop(strategy="random", seed=1)]
    starts = [run.labeled[:, :20] for run in runs]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0][0], starts[0][1])
    assert not torch.equal(starts[0], starts[2])
    assert torch.equal(runs[0].accuracy[:, 0], runs[1].accuracy[:, 0])


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_given_net_is_copied_for_each_fit(num_workers: int) -> None:
    net = make_net()
    weights = net[0].weight.clone()
    found = loop(model=net)
    assert torch.equal(net[0].weight, weights)
    assert_same(loop(model=net, num_workers=num_workers), found)


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_interrupted_loop_resumes_bit_for_bit(tmp_path: Path, fail_at: int) -> None:
    whole = loop(Recorded(Deterministic()), strategy="batch")
    first, second, third = (Recorded(Deterministic(), fail_at=k) for k in (fail_at, 99, 99))
    with pytest.raises(InterruptedError):
        loop(first, strategy="batch", folder=tmp_path)
    assert_same(loop(second, strategy="batch", folder=tmp_path), whole)
    assert len(first.fits) - 1 + len(second.fits) == 6  # two trials of three trainings
    assert_same(loop(third, strategy="batch", folder=tmp_path), whole)
    assert third.fits == []


def test_interrupted_training_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    epochs: list[int] = []

    def count(report: Any) -> None:
        epochs.append(report.epoch)
        if len(epochs) == 3:  # the first epoch of the second round
            raise InterruptedError

    config = replace(CONFIG, on_epoch=count)
    with pytest.raises(InterruptedError):
        loop(config=config, folder=tmp_path)
    resumed = loop(config=config, folder=tmp_path)
    assert len(epochs) == 2 * 3 * CONFIG.epochs
    assert_same(resumed, loop())
    assert not list(tmp_path.rglob("*.ckpt"))
    (tmp_path / "job-0001.json").unlink()
    (tmp_path / "trial-0001" / "round-001.json").write_text('{"metrics": {"acc')
    assert_same(loop(folder=tmp_path), resumed)


def test_folder_accepts_more_trials_and_no_other_settings(tmp_path: Path) -> None:
    loop(folder=tmp_path, num_trials=1)
    assert_same(loop(folder=tmp_path), loop())
    pool, test = digits()
    changed = TensorDataset(pool.tensors[0], (pool.tensors[1] + 1) % 10)
    changes: list[dict[str, Any]] = [
        {"strategy": "bald"},
        {"query_size": 10},
        {"seed": 1},
        {"config": replace(CONFIG, epochs=3)},
        {"model": lambda: nn.Linear(64, 10)},
        {"test_data": Subset(test, range(200))},
        {"method": NeuBoots()},
        {"pool": changed},
    ]
    for change in changes:
        with pytest.raises(ArgumentError, match="folder"):
            loop(folder=tmp_path, **change)


def test_last_query_takes_what_is_left() -> None:
    found = loop(initial_size=200, query_size=30, num_rounds=10, num_trials=1)
    assert found.num_labels.tolist() == [200, 230, 240]
    assert sorted(found.labeled[0].tolist()) == list(range(240))
    assert loop(num_rounds=0, num_trials=1).num_labels.tolist() == [20]


@pytest.mark.parametrize(
    ("method", "outputs"), [(NeuBoots.regression(), 1), (DeepEnsemble(loss=GaussianNLL(), num_members=2), 2)]
)
def test_regression_is_measured_by_rmse(method: Any, outputs: int) -> None:
    x = noise(60, 3)
    data, recorded = TensorDataset(x, x[:, 0] * 2), Recorded(method)
    found = loop(recorded, model=lambda: nn.Linear(3, outputs), pool=data, test_data=data, strategy="std", num_trials=1)
    assert list(found.metrics) == ["rmse"]
    mean = recorded.predictors[-1].predict(x, 4).mean[:, 0]  # members, or exact moments, for any seed
    expected = float((mean - data.tensors[1]).square().mean().sqrt())
    assert float(found.metrics["rmse"][0, -1]) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(KeyError, match="accuracy"):
        found.mean()


@pytest.mark.parametrize(
    ("loss", "targets", "expected"),
    [
        (nn.MSELoss(), torch.arange(8), "rmse"),
        (nn.BCEWithLogitsLoss(), (torch.arange(8) % 2).float()[:, None], "accuracy"),
        (lambda z, y: (z[:, 0] - y).square(), torch.rand(8), "rmse"),
        (lambda z, y: (z[:, 0] - y).square(), torch.arange(8) % 2, "accuracy"),
    ],
)
def test_task_is_inferred_from_loss_and_targets(loss: Any, targets: Tensor, expected: str) -> None:
    data = TensorDataset(noise(8, 2), targets)
    options: dict[str, Any] = {"initial_size": 4, "query_size": 2, "num_rounds": 1, "strategy": "std"}
    options |= {"model": lambda: nn.Linear(2, 1), "pool": data, "test_data": data}
    assert loop(Deterministic(loss), **options).main_metric == expected
    assert loop(Deterministic(loss), task="regression", **options).main_metric == "rmse"


@pytest.mark.filterwarnings("ignore:with 1 block")
def test_ignored_pixels_are_not_measured() -> None:
    x = noise(12, 1, 4, 4)
    y = (x[:, 0] > 0).long()
    masked = y.clone()
    masked[:, 0] = 9
    recorded, data = Recorded(NeuBoots(nn.CrossEntropyLoss(ignore_index=9))), TensorDataset(x, masked)
    options: dict[str, Any] = {"initial_size": 4, "query_size": 4, "num_rounds": 1, "num_trials": 1, "num_samples": 200}
    found = loop(recorded, model=lambda: nn.Conv2d(1, 2, 1), pool=data, test_data=data, strategy="bald", **options)
    correct = recorded.predictors[-1].predict(x, 200).labels == y
    assert list(found.metrics)[-1] == "mean_iou"
    # replicates of another seed may differ in a few pixels
    assert float(found.accuracy[0, -1]) == pytest.approx(float(correct[:, 1:].double().mean()), abs=0.02)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"initial_size": 241}, "initial_size"),
        ({"query_size": 0}, "query_size"),
        ({"num_rounds": -1}, "num_rounds"),
        ({"num_trials": 0}, "num_trials"),
        ({"num_workers": 0}, "num_workers"),
        ({"strategy": "bold"}, "strategy"),
        ({"method": NeuBoots.regression()}, "strategy"),
        ({"config": replace(CONFIG, folder=Path("here"))}, "config"),
        ({"test_data": iter([])}, "test_data"),
    ],
)
def test_invalid_loop_is_rejected(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        loop(**change)
    assert error.value.name == name


def curve(values: Tensor) -> ActiveLearningResult:
    labeled = torch.zeros(len(values), 30, dtype=torch.long)
    metrics = {"accuracy": values, "ece": values / 2}
    return ActiveLearningResult("Deterministic", "bald", torch.tensor([10, 30]), metrics, labeled, 7, 3)


def test_result_has_means_and_intervals_over_trials() -> None:
    found = curve(torch.tensor([[0.5, 0.75], [0.6, 0.85]]).double())
    row = found.rows()[1]
    assert row["labels"] == 30
    assert (row["accuracy"], row["ece"]) == pytest.approx((0.8, 0.4))
    assert row["low"] < 0.8 < row["high"]
    lines = str(found).splitlines()
    assert "2 trials" in lines[0]
    assert lines[1].split() == ["labels", "accuracy", "low", "high", "ece"]
    single = curve(torch.tensor([[0.5, 0.75]]).double())
    assert "low" not in single.rows()[0]
    with pytest.raises(ArgumentError):
        single.interval()


def test_diverse_selection_rejects_what_it_cannot_select() -> None:
    scores, features = torch.rand(5), torch.rand(5, 2)
    for name, arguments in (
        ("scores", (None, features, 2)),
        ("features", (scores, None, 2)),
        ("features.shape", (scores, features[:4], 2)),
        ("k", (scores, features, 0)),
        ("k", (scores, features, 6)),
    ):
        with pytest.raises(ArgumentError) as raised:
            greedy_diverse_selection(*arguments)
        assert raised.value.name == name
