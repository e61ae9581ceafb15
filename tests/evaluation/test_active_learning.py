"""Active learning: the step prefers what is uncertain, and the loop goes on where it was broken off."""

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from _reference import figures, softmax, standard_errors
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import neuboots
from neuboots import Prediction, Summary, TrainingConfig
from neuboots.evaluation.active_learning import (
    ACQUISITION_FUNCTIONS,
    ActiveLearningResult,
    greedy_logdet_selection,
    replicate_vectors,
    run_active_learning,
    select_for_labeling,
)
from neuboots.losses import GaussianNLL
from neuboots.prediction import Moments, Predictor, SampleStream
from neuboots.training import EpochReport

UNCERTAINTY = [name for name in ACQUISITION_FUNCTIONS if name != "random"]
quiet = {"progress": False}


@dataclass(frozen=True)
class Stored(Predictor):
    """Row x of the inputs is the number of a column of stored samples (B, M, C, *)."""

    samples: Tensor
    moments: Moments | None = None

    @property
    def net(self) -> None:
        return None

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        found = self.samples[:num_samples, x[:, 0].long()]
        return SampleStream(num_samples, 1, lambda size: iter(found.split(size)), self.moments)

    def config(self) -> dict[str, Any]:
        return {}


def numbered(count: int) -> Tensor:
    """Inputs that are their own row numbers: (N, 1)."""
    return torch.arange(float(count))[:, None]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chosen(predictor: Predictor, pool: Any, k: int, **options: Any) -> list[int]:
    B = len(predictor.samples) if isinstance(predictor, Stored) else 20
    return select_for_labeling(predictor, pool, k, num_samples=B, **options, **quiet).rows.tolist()


# -- one step ----------------------------------------------------------------------------------------------


def confident_but_for(row: int, *, outputs: int, pixels: tuple[int, ...] = ()) -> Stored:
    """Twelve rows, all sure of class 0 but one, about which the eight replicates differ."""
    samples = 0.1 * noise(8, 12, outputs, *pixels)
    samples[:, :, 0] += 6.0
    samples[:, row] = 4 * noise(8, outputs, *pixels, seed=1)
    return Stored(samples)


@pytest.mark.parametrize("strategy", UNCERTAINTY)
@pytest.mark.parametrize("row", [0, 7, 11])
@pytest.mark.parametrize(("outputs", "pixels"), [(1, ()), (3, ()), (3, (2, 2))])
def test_the_uncertain_row_comes_first(strategy: str, row: int, outputs: int, pixels: tuple[int, ...]) -> None:
    predictor = confident_but_for(row, outputs=outputs, pixels=pixels)
    assert chosen(predictor, numbered(12), 3, strategy=strategy, batch_size=5)[0] == row


@pytest.mark.parametrize("outputs", [1, 4])
def test_scores_are_the_definitions(outputs: int) -> None:
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
        choice = select_for_labeling(
            Stored(samples), numbered(9), 9, strategy=strategy, num_samples=6, batch_size=4, **quiet
        )
        assert choice.rows.tolist() == np.argsort(-scores).tolist()
        np.testing.assert_allclose(choice.scores, np.sort(scores)[::-1], rtol=1e-4, atol=1e-6)  # float32 figures


def test_a_function_of_your_own() -> None:
    def surest(figures: Summary) -> Tensor:
        return figures.confidence

    samples = noise(6, 30, 3)
    choice = select_for_labeling(
        Stored(samples), numbered(30), 30, strategy=surest, num_samples=6, batch_size=7, **quiet
    )
    assert choice.rows.tolist() == samples.softmax(2).mean(0).amax(1).argsort(descending=True).tolist()
    assert choice.strategy.endswith("surest")


def test_random_rows_are_uniform() -> None:
    """Each of 8 rows is the first, and is among 3, as often as chance has it, over 1,500 seeds."""
    alike = Stored(torch.zeros(1, 8, 2))
    draws = torch.tensor([chosen(alike, numbered(8), 3, strategy="random", seed=seed) for seed in range(1500)])
    assert all(len(set(rows)) == 3 for rows in draws.tolist())
    for counts, share in ((draws[:, 0].bincount(minlength=8), 1 / 8), (draws.flatten().bincount(minlength=8), 3 / 8)):
        allowed = standard_errors(16) * (1500 * share * (1 - share)) ** 0.5
        assert float((counts - 1500 * share).abs().max()) < allowed


def test_random_does_not_ask_the_predictor() -> None:
    class Silent(Stored):
        def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
            raise AssertionError

    assert len(chosen(Silent(torch.zeros(1, 8, 2)), numbered(8), 3, strategy="random")) == 3


@pytest.mark.parametrize("strategy", list(ACQUISITION_FUNCTIONS))
def test_ties_are_decided_by_the_seed(strategy: str) -> None:
    """Replicates do not differ, nor do rows: every strategy chooses as at random, and not the first rows."""
    alike = Stored(torch.ones(4, 50, 3))
    first, again, other = (chosen(alike, numbered(50), 5, strategy=strategy, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first != [0, 1, 2, 3, 4]
    assert len(set(first)) == 5


def test_ties_do_not_outweigh_scores() -> None:
    samples = torch.zeros(1, 10, 1)
    samples[:, 5:] = 3.0  # sure
    assert set(chosen(Stored(samples), numbered(10), 5, strategy="entropy", seed=3)) == {0, 1, 2, 3, 4}


class RowsOf(Dataset[Any]):
    """A data set that is no TensorDataset; its rows are x, or (x, y)."""

    def __init__(self, x: Tensor, labelled: bool) -> None:
        self.x, self.labelled = x, labelled

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return (self.x[i], 1) if self.labelled else self.x[i]


class StreamOf(IterableDataset[Any]):
    def __init__(self, x: Tensor, labelled: bool) -> None:
        self.x, self.labelled = x, labelled

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, itertools.repeat(1)) if self.labelled else self.x)


class OtherLoader:
    """A loader of another kind, with a sampler of its own, which is its business."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.sampler = x, RandomSampler(range(len(x)))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.x.split(4))


def pools(x: Tensor) -> dict[str, Any]:
    y = torch.zeros(len(x))
    every = list(range(len(x)))
    return {
        "tensor": x,
        "tensors with labels": TensorDataset(x, y),
        "tensors without": TensorDataset(x),
        "subset with labels": Subset(TensorDataset(x.flip(0), y), every[::-1]),
        "subset without": Subset(TensorDataset(x.flip(0)), every[::-1]),
        "rows with labels": RowsOf(x, True),
        "rows without": RowsOf(x, False),
        "loader with labels": DataLoader(RowsOf(x, True), batch_size=4),
        "loader without": DataLoader(RowsOf(x, False), batch_size=4),
        "loader of tensors without": DataLoader(TensorDataset(x), batch_size=4),
        "list of batches": [(batch, y[: len(batch)]) for batch in x.split(4)],
        "generator of batches": (batch for batch in x.split(4)),
        "stream with labels": StreamOf(x, True),
        "stream without": StreamOf(x, False),
    }


@pytest.mark.parametrize("strategy", ["entropy", "batch", "random"])
@pytest.mark.parametrize("name", list(pools(numbered(1))))
def test_any_kind_of_pool(name: str, strategy: str) -> None:
    predictor = Stored(3 * noise(5, 22, 3))
    expected = chosen(predictor, numbered(22), 4, strategy=strategy)
    assert chosen(predictor, pools(numbered(22))[name], 4, strategy=strategy, batch_size=6) == expected


def test_nets_of_several_inputs() -> None:
    class Sum(Stored):
        def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
            a, b = x.values() if isinstance(x, dict) else x
            return super().stream(a + b, num_samples, seed=seed)

    x = numbered(22)
    predictor = Sum(3 * noise(5, 22, 3))
    expected = chosen(Stored(predictor.samples), x, 4, strategy="bald")
    for pool in ({"a": x - 1, "b": torch.ones(22, 1)}, (x - 1, torch.ones(22, 1)), TensorDataset(x, 0 * x, x)):
        assert chosen(predictor, pool, 4, strategy="bald", batch_size=5) == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"predictor": nn.Linear(1, 1)}, "got a Linear; expected a predictor"),
        ({"k": 0}, "got k=0; expected a whole number, at least 1"),
        ({"k": 2.0}, "got k=2.0; expected a whole number"),
        ({"k": True}, "got k=True; expected a whole number"),
        ({"num_samples": "a"}, "got num_samples='a'; expected a whole number, at least 1"),
        ({"seed": 1.5}, "got seed=1.5; expected a whole number"),
        ({"seed": "a", "strategy": "random"}, "got seed='a'; expected a whole number"),
        ({"strategy": ["entropy"]}, "got strategy=['entropy']; expected one of random, entropy"),
        ({"strategy": None}, "got strategy=None; expected one of random, entropy"),
        ({"strategy": "batch", "shortlist": "a"}, "got shortlist='a'; expected a whole number"),
        ({"shortlist": 7.5}, "got shortlist=7.5; expected a whole number"),
        ({"k": 13}, "got k=13 for a pool of 12 rows; expected at most 12"),
        ({"k": 13, "strategy": "batch"}, "got k=13 for a pool of 12 rows"),
        ({"strategy": "entorpy"}, "got strategy='entorpy'; expected one of random, entropy, margin"),
        ({"strategy": "bald", "kind": "regression"}, "got strategy='bald' for a regression"),
        ({"kind": "classification"}, "got kind='classification'; expected one of classes, regression"),
        ({"strategy": "std", "kind": "gaussian"}, "got 3 outputs for kind='gaussian'"),
        ({"strategy": lambda s: s.probs}, "the strategy gave scores of shape (12, 3); expected (12,)"),
        ({"strategy": lambda s: s.entropy * torch.nan}, "the strategy gave NaN for 12 of 12 rows"),
        ({"pool": numbered(12) * torch.nan}, "NaN or infinite"),
        ({"pool": 3}, "got inputs of type int; expected a tensor"),
        ({"pool": []}, "no batch"),
        ({"strategy": "batch", "k": 4, "shortlist": 7}, "got shortlist=7 for k=4; expected at least 8"),
    ],
)
def test_bad_calls_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    call = {"predictor": Stored(noise(3, 12, 3)), "pool": numbered(12), "k": 2, "num_samples": 3, **quiet, **change}
    with pytest.raises(ValueError, match=".*") as refusal:
        select_for_labeling(call.pop("predictor"), call.pop("pool"), call.pop("k"), **call)
    assert sentence in str(refusal.value)


ROWS = RowsOf(numbered(22), True)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(ROWS)},
        {"sampler": SubsetRandomSampler(range(22))},
        {"sampler": WeightedRandomSampler(torch.ones(22), 22)},
        {"sampler": list(range(22))[::-1]},
        {"batch_sampler": BatchSampler(RandomSampler(ROWS), 5, False)},
        {"batch_sampler": [[3, 2], [1, 0]]},
    ],
)
def test_loaders_that_give_rows_in_another_order_are_refused(options: dict[str, Any]) -> None:
    """Row numbers would be those of nobody knows which rows."""
    with pytest.raises(ValueError, match="got a loader that shuffles, by a .*; expected rows in their order"):
        chosen(Stored(noise(3, 22, 3)), DataLoader(ROWS, **options), 2)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(ROWS, sampler=SequentialSampler(ROWS), batch_size=3),
        DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 5, False)),
        DataLoader(StreamOf(numbered(22), True), batch_size=4),
        OtherLoader(numbered(22)),
    ],
    ids=["sequential", "batches", "stream", "of another kind"],
)
def test_loaders_that_give_rows_in_their_order_are_taken(loader: Any) -> None:
    predictor = Stored(3 * noise(5, 22, 3))
    assert chosen(predictor, loader, 4) == chosen(predictor, numbered(22), 4)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    predictor = Stored(3 * noise(5, 22, 3))
    expected = chosen(predictor, numbered(22), 3)
    for k in (np.int64(3), torch.tensor(3)):
        choice = select_for_labeling(predictor, numbered(22), k, num_samples=np.int64(5), seed=np.int64(0), **quiet)
        assert choice.rows.tolist() == expected


def test_a_shortlist_matters_to_batch_alone() -> None:
    predictor = Stored(3 * noise(5, 22, 3))
    assert chosen(predictor, numbered(22), 4, shortlist=2) == chosen(predictor, numbered(22), 4)


@pytest.mark.parametrize("strategy", ["entropy", "batch"])
def test_a_failure_leaves_nothing_open(strategy: str) -> None:
    """Though whoever caught it may hold its traceback, and with it every local variable."""
    closed: list[bool] = []

    class Batches:
        def __iter__(self) -> Iterator[Tensor]:
            try:
                yield from numbered(22).split(4)
            finally:
                closed.append(True)

    samples = noise(3, 22, 3)
    samples[:, 5] = torch.nan
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="NaN") as failure:
        chosen(Stored(samples), Batches(), 2, strategy=strategy)
    assert failure.tb is not None
    assert closed == [True]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("strategy", ["std", "batch"])
@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_rounding_is_no_spread(strategy: str, kind: Any) -> None:
    """Two hundred equal numbers have a mean that is not quite theirs; the seed decides, and not the size of batches."""
    for dtype in (torch.float32, torch.float64):
        alike = Stored((3 * noise(1, 50, 3)).to(dtype).expand(200, 50, 3))
        options = {"strategy": strategy, "kind": kind, "num_samples": 200, **quiet}
        choices = [select_for_labeling(alike, numbered(50), 8, batch_size=b, **options) for b in (3, 50)]
        assert choices[0].scores.tolist() == choices[1].scores.tolist() == 8 * [0.0]
        assert choices[0].rows.tolist() == choices[1].rows.tolist() == chosen(alike, numbered(50), 8, strategy="random")


@pytest.mark.parametrize("strategy", ["std", "batch"])
def test_a_small_spread_is_a_spread(strategy: str) -> None:
    """A millionth in float64, and 3 % in bfloat16, which is four of its epsilons."""
    for size, dtype in ((1e-6, torch.float64), (0.03, torch.bfloat16)):
        samples = torch.ones(4, 12, 1, dtype=torch.float64)
        samples[:, 7, 0] += size * torch.tensor([1.0, -1.0, 1.0, -1.0])
        predictor = Stored(samples.to(dtype))
        choice = select_for_labeling(
            predictor, numbered(12), 2, strategy=strategy, task="regression", num_samples=4, **quiet
        )
        assert int(choice.rows[0]) == 7
        assert choice.scores[0] > 0 == choice.scores[1]


@pytest.mark.parametrize("strategy", UNCERTAINTY)
def test_nets_that_give_nan_get_a_sentence(strategy: str) -> None:
    samples = noise(3, 12, 3)
    samples[1, 4] = torch.nan
    with pytest.raises(ValueError, match="the predictor gave NaN or infinite outputs for 1 of 12 rows"):
        chosen(Stored(samples), numbered(12), 2, strategy=strategy)


def test_one_row_and_one_replicate() -> None:
    for strategy in ACQUISITION_FUNCTIONS:
        assert chosen(Stored(noise(1, 1, 3)), numbered(1), 1, strategy=strategy) == [0]


def test_regression_goes_by_the_spread_of_the_function() -> None:
    """Not by its size, nor, under a Gaussian head, by how far the replicates differ on the noise."""
    samples = noise(8, 12, 2) * 0.01
    samples[:, 3, 0] += 100.0
    samples[:, 5, 0] += noise(8, seed=1)
    samples[:, 8, 1] += 5 * noise(8, seed=2)  # the second output
    for strategy in ("std", "batch"):
        assert chosen(Stored(samples), numbered(12), 2, strategy=strategy, kind="gaussian")[0] == 5
        assert chosen(Stored(samples), numbered(12), 2, strategy=strategy, kind="regression") == [8, 5]
        assert chosen(Stored(samples[:, :, :1]), numbered(12), 2, strategy=strategy, kind="regression")[0] == 5


def test_exact_moments_are_used_where_they_are_known() -> None:
    """For the regression function; the samples, which all agree, know nothing of it."""
    std = torch.arange(12.0)[:, None]
    predictor = Stored(torch.zeros(4, 12, 1), Moments(torch.zeros(12, 1), std))
    assert chosen(predictor, numbered(12), 3, strategy="std", kind="regression", batch_size=12) == [11, 10, 9]
    classes = select_for_labeling(predictor, numbered(12), 12, strategy="std", num_samples=4, batch_size=12, **quiet)
    assert classes.scores.tolist() == 12 * [0.0]


def test_a_choice_prints_its_rows() -> None:
    choice = select_for_labeling(Stored(noise(3, 40, 3)), numbered(40), 12, num_samples=3, seed=4, **quiet)
    lines = str(choice).splitlines()
    assert lines[0] == "12 of 40 rows by entropy, B = 3, seed 4"
    assert lines[2].split()[:2] == ["1", str(int(choice.rows[0]))]
    assert lines[-1] == "… and 2 more"


def test_members_are_asked_once_each() -> None:
    class Members(Stored):
        num_distinct = 3

    predictor = Members(3 * noise(3, 12, 3))  # has no fourth replicate to give
    for strategy in UNCERTAINTY:
        choice = select_for_labeling(predictor, numbered(12), 4, strategy=strategy, num_samples=100, **quiet)
        assert choice.num_samples == 3
        assert choice.rows.tolist() == chosen(Stored(predictor.samples), numbered(12), 4, strategy=strategy)


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    for strategy in ACQUISITION_FUNCTIONS:
        chosen(Stored(noise(3, 12, 3)), numbered(12), 4, strategy=strategy)
    assert torch.equal(torch.get_rng_state(), before)


# -- rows chosen together ----------------------------------------------------------------------------------


def with_copies(copies: int) -> Stored:
    """The most uncertain row `copies` times, then ten others, each uncertain in its own way."""
    samples = 0.7 * noise(40, copies + 10, 3)
    samples[:, :, 0] += 1.0
    samples[:, :copies] = 2 * noise(40, 1, 3, seed=1)
    return Stored(samples)


@pytest.mark.parametrize("strategy", UNCERTAINTY)
def test_copies_are_labelled_once_by_batch_alone(strategy: str) -> None:
    rows = chosen(with_copies(100), numbered(110), 8, strategy=strategy, batch_size=32)
    copies = sum(row < 100 for row in rows)
    assert copies == (1 if strategy == "batch" else 8)


@pytest.mark.parametrize("copies", [100, 700])
@pytest.mark.parametrize("batch_size", [16, 300])
def test_copies_do_not_fill_the_shortlist(copies: int, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and though no more than 50 rows are looked at together, all ten others are found."""
    together: list[int] = []

    def watched(vectors: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        together.append(len(vectors))
        return greedy_logdet_selection(vectors, *arguments, **options)

    monkeypatch.setattr("neuboots.evaluation.active_learning.greedy_logdet_selection", watched)
    predictor, pool = with_copies(copies), numbered(copies + 10)
    rows = chosen(predictor, pool, 11, strategy="batch", shortlist=50, batch_size=batch_size)
    assert sum(row < copies for row in rows) == 1
    assert {row for row in rows if row >= copies} == set(range(copies, copies + 10))
    assert max(together) == 50


def test_a_shortlist_does_not_depend_on_the_batches() -> None:
    predictor = Stored(noise(6, 300, 3))
    picks = [
        chosen(predictor, numbered(300), 7, strategy="batch", shortlist=40, batch_size=b) for b in (1, 11, 40, 300)
    ]
    assert picks[0] == picks[1] == picks[2] == picks[3]


def test_greedy_is_that_of_the_determinant() -> None:
    """Against log det(I + K_A / ε) itself, and its scores against the variance given the rows chosen before."""
    vectors = noise(14, 6).double()
    places, scores = greedy_logdet_selection(vectors, 9, torch.rand(14), progress=False)  # more rows than dimensions
    covariance = vectors @ vectors.T
    ridge = 1e-6 * float(covariance.diagonal().max())
    taken: list[int] = []
    for place, score in zip(places.tolist(), scores.tolist(), strict=True):
        gains = {
            i: float(
                torch.linalg.slogdet(torch.eye(len(taken) + 1) + covariance[[*taken, i]][:, [*taken, i]] / ridge)[1]
            )
            for i in range(14)
            if i not in taken
        }
        assert place == max(gains, key=lambda i: gains[i])
        known = covariance[taken][:, taken] + ridge * torch.eye(len(taken))
        cross = covariance[place, taken]
        left = covariance[place, place] - cross @ torch.linalg.solve(known, cross)
        assert score == pytest.approx(float(left), rel=1e-4)
        taken.append(place)


def test_greedy_is_near_the_best_of_all() -> None:
    """At least 1 − 1/e of the largest log det over all sets of three."""
    vectors = noise(10, 4).double()
    places, _ = greedy_logdet_selection(vectors, 3, torch.rand(10), progress=False)
    covariance = vectors @ vectors.T / (1e-6 * vectors.square().sum(1).max())

    def value(rows: list[int]) -> float:
        return float(torch.linalg.slogdet(torch.eye(3) + covariance[rows][:, rows])[1])

    best = max(value(list(rows)) for rows in itertools.combinations(range(10), 3))
    assert value(places.tolist()) >= (1 - np.exp(-1)) * best


@pytest.mark.parametrize("width", [8192, 1024])
def test_vectors_have_the_inner_products_of_the_covariance(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, or hashed from 3,000 numbers into 1,024 sums: then within the standard error of the cosine, 2/√1024."""
    monkeypatch.setattr("neuboots.evaluation.active_learning._WIDTH", width)
    samples = noise(1000, 12, 3).double() + noise(1000, 1, 3, seed=1)  # rows go together
    vectors = replicate_vectors(Prediction(samples), seed=0)
    centred = samples - samples.mean(0)
    covariance = torch.einsum("bic,bjc->ij", centred, centred) / 999
    size = covariance.diagonal().sqrt()
    gap = (vectors @ vectors.T - covariance) / torch.outer(size, size)
    assert vectors.shape[1] == min(width, 3000)
    assert float(gap.diagonal().abs().max()) < 1e-12
    assert float(gap.abs().max()) < (1e-12 if width > 3000 else standard_errors(66) * 2 / width**0.5)


def test_hashed_vectors_choose_nearly_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 numbers a row in 1,024 sums: copies stay copies, the first choice the same, and most of the others."""
    samples = noise(500, 60, 3) * torch.linspace(0.2, 2, 60)[:, None]
    samples[:, 50] = samples[:, 59]
    hashed = chosen(Stored(samples), numbered(60), 15, strategy="batch")
    monkeypatch.setattr("neuboots.evaluation.active_learning._WIDTH", 1500)
    whole = chosen(Stored(samples), numbered(60), 15, strategy="batch")
    assert hashed[0] == whole[0]
    assert len({50, 59} & set(hashed)) == 1
    assert len(set(hashed) & set(whole)) >= 12


# -- the loop ----------------------------------------------------------------------------------------------


def digits(count: int = 240) -> tuple[TensorDataset, TensorDataset]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(x[:count], y[:count]), TensorDataset(x[count : 2 * count], y[count : 2 * count])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))


RECIPE = TrainingConfig(epochs=2, batch_size=32, progress=False, optimizer=partial(torch.optim.Adam, lr=0.02))
SMALL = {"start": 20, "query": 15, "rounds": 2, "trials": 2, "num_samples": 4, "progress": False}


def loop(
    method: Any = None, config: TrainingConfig = RECIPE, make: Any = model, **options: Any
) -> ActiveLearningResult:
    pool, test = digits()
    test = options.pop("test", test)
    return run_active_learning(method or neuboots.Plain(), make, pool, test, config, **{**SMALL, **options})


NET = model()


def assert_same(a: ActiveLearningResult, b: ActiveLearningResult) -> None:
    assert torch.equal(a.labelled, b.labelled)
    assert a.num_labels.tolist() == b.num_labels.tolist()
    assert a.figures.keys() == b.figures.keys()
    assert all(torch.equal(a.figures[name], b.figures[name]) for name in a.figures)


METHODS = {
    "deterministic": {},
    "neuboots": {},
    "mc-dropout": {},
    "deep-ensemble": {"num_members": 2},
}


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("strategy", ["bald", "batch"])
def test_any_method_and_its_figures(name: str, strategy: str) -> None:
    found = loop(neuboots.create_method(name, **METHODS[name]), strategy=strategy, trials=1)
    assert found.num_labels.tolist() == [20, 35, 50]
    assert found.labelled.shape == (1, 50)
    assert len(set(found.labelled[0].tolist())) == 50
    assert list(found.figures) == ["accuracy", "error", "ece", "nll", "brier"]
    assert all(values.shape == (1, 3) for values in found.figures.values())
    torch.testing.assert_close(found.accuracy + found.figures["error"], torch.ones(1, 3).double())


def test_figures_are_those_of_the_net_that_was_trained() -> None:
    """The last round by hand: the rows labelled by then, trained anew, measured on the test set."""
    seen: list[Any] = []

    @dataclass(frozen=True)
    class Watched:
        def fit(self, make: Any, data: Any, config: Any) -> Predictor:
            seen.append((list(data.indices), config))
            return neuboots.Plain().fit(make, data, config)

    found = loop(Watched(), trials=1)
    rows, config = seen[-1]
    assert rows == found.labelled[0].tolist()
    assert len({config.seed for _, config in seen}) == 3
    pool, test = digits()
    predictor = neuboots.Plain().fit(model, Subset(pool, rows), config)
    x, y = test.tensors
    right = predictor.predict(x, 1).labels == y
    assert float(found.accuracy[0, -1]) == pytest.approx(float(right.double().mean()), rel=1e-12)
    before, config = seen[-2]
    rest = [i for i in range(240) if i not in before]
    scores = neuboots.Plain().fit(model, Subset(pool, before), config).predict(pool.tensors[0][rest], 1).entropy
    best = {rest[i] for i in scores.argsort(descending=True)[:15].tolist()}
    assert set(rows[len(before) :]) == best


def test_methods_and_strategies_start_from_the_same_rows() -> None:
    runs = [
        loop(strategy="random"),
        loop(strategy="bald"),
        loop(neuboots.NeuBoots(), strategy="random"),
    ]
    starts = [run.labelled[:, :20] for run in runs]
    assert torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0][0], starts[0][1])  # trials differ
    assert torch.equal(runs[0].accuracy[:, 0], runs[1].accuracy[:, 0])  # one method begins from the same weights
    assert not torch.equal(starts[0], loop(strategy="random", seed=1).labelled[:, :20])


def test_workers_change_nothing() -> None:
    assert_same(loop(strategy="margin", num_workers=2), loop(strategy="margin"))


class Broken(Exception):
    pass


@dataclass(frozen=True)
class Breaking:
    """The plain net, but fit number `at` breaks."""

    at: int = field(compare=False)  # the same method, whenever it breaks
    fits: list[int] = field(default_factory=list, compare=False)

    def fit(self, make: Any, data: Any, config: Any) -> Predictor:
        self.fits.append(len(data))
        if len(self.fits) == self.at + 1:
            raise Broken
        return neuboots.Plain().fit(make, data, config)


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_loop_broken_off_ends_as_one_never_interrupted(tmp_path: Path, at: int) -> None:
    """Bit for bit, and without doing a finished round again."""
    whole = loop(Breaking(at=99), strategy="batch")
    first = Breaking(at=at)
    with pytest.raises(Broken):
        loop(first, strategy="batch", folder=tmp_path)
    second = Breaking(at=99)
    assert_same(loop(second, strategy="batch", folder=tmp_path), whole)
    assert len(first.fits) - 1 + len(second.fits) == 6  # two trials of three trainings
    third = Breaking(at=0)
    assert_same(loop(third, strategy="batch", folder=tmp_path), whole)
    assert third.fits == []


def test_a_training_broken_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    epochs: list[int] = []

    def count(report: EpochReport) -> None:
        epochs.append(report.epoch)
        if len(epochs) == 3:  # the first epoch of the second round
            raise Broken

    with pytest.raises(Broken):
        loop(config=replace(RECIPE, on_epoch=count), folder=tmp_path)
    resumed = loop(config=replace(RECIPE, on_epoch=count), folder=tmp_path)
    assert len(epochs) == 2 * 3 * RECIPE.epochs  # none twice
    assert_same(resumed, loop())
    assert not list(tmp_path.rglob("*.ckpt"))  # no checkpoint outlives its training


def test_more_trials_join_those_of_a_folder_and_other_settings_do_not(tmp_path: Path) -> None:
    loop(folder=tmp_path, trials=1)
    assert_same(loop(folder=tmp_path), loop())
    for change in ({"strategy": "bald"}, {"query": 10}, {"seed": 1}, {"method": neuboots.NeuBoots()}):
        with pytest.raises(ValueError, match="holds units of other settings"):
            loop(folder=tmp_path, **change)
    shutil.rmtree(tmp_path)


def test_a_damaged_round_is_done_again(tmp_path: Path) -> None:
    whole = loop(folder=tmp_path)
    (tmp_path / "unit-0001.json").unlink()
    (tmp_path / "trial-0001" / "round-001.json").write_text('{"figures": {"acc')
    assert_same(loop(folder=tmp_path), whole)


def scored_by(figure: str) -> Any:
    return lambda figures: getattr(figures, figure)


def test_a_folder_of_another_net_other_data_or_another_strategy_is_refused(tmp_path: Path) -> None:
    """Though all of them go by the same names."""
    pool, test = digits(60)

    def relabelled(data: TensorDataset, row: int) -> TensorDataset:
        x, y = data.tensors
        return TensorDataset(x, torch.where(torch.arange(60) == row, (y + 1) % 10, y))

    def run(**change: Any) -> ActiveLearningResult:
        call = {
            "method": neuboots.Plain(lambda z, y: nn.functional.cross_entropy(z, y, reduction="none")),
            "make": lambda: nn.Linear(64, 10),
            "pool": pool,
            "test": test,
            "strategy": scored_by("entropy"),
            "options": {},
        } | change
        options = {**SMALL, "rounds": 1, "trials": 1, "kind": "classes", **call["options"]}
        arguments = (call["method"], call["make"], call["pool"], call["test"], RECIPE)
        return run_active_learning(*arguments, strategy=call["strategy"], folder=tmp_path, **options)

    found = run()
    assert_same(run(), found)
    assert_same(run(options={"batch_size": 7, "num_workers": 2}), found)  # what changes no result may change
    changes: list[dict[str, Any]] = [
        {"make": lambda: nn.Linear(64, 10, bias=False)},
        {"make": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))},
        {"pool": relabelled(pool, 31)},
        {"pool": Subset(pool, range(59))},
        {"test": relabelled(test, 31)},
        {"test": DataLoader(relabelled(test, 31), batch_size=16)},
        {"strategy": scored_by("confidence")},
        {"method": neuboots.Plain(lambda z, y: nn.functional.multi_margin_loss(z, y, reduction="none"))},
    ]
    for change in changes:
        with pytest.raises(ValueError, match="holds units of other settings"):
            run(**change)
    assert_same(run(), found)


@pytest.mark.parametrize(("loss", "outputs"), [(nn.CrossEntropyLoss(), 10), (nn.MSELoss(), 1)])
def test_a_failing_measurement_leaves_the_test_rows_closed(loss: Any, outputs: int) -> None:
    closed: list[bool] = []

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            try:
                yield torch.zeros(3, 64), torch.zeros(3, dtype=torch.long)
                yield torch.zeros(3, 64), torch.zeros(2, dtype=torch.long)  # a label too few
            finally:
                closed.append(True)

    options = {"test": Batches(), "strategy": "random", "rounds": 0, "trials": 1}
    with pytest.raises(ValueError, match="got (labels|targets) of shape") as failure:
        loop(neuboots.Plain(loss), make=lambda: nn.Linear(64, outputs), **options)
    assert failure.tb is not None
    assert closed == [True]


def test_the_last_query_takes_what_is_left() -> None:
    found = loop(start=200, query=30, rounds=10, trials=1)
    assert found.num_labels.tolist() == [200, 230, 240]
    assert sorted(found.labelled[0].tolist()) == list(range(240))
    assert loop(start=240, trials=1).num_labels.tolist() == [240]
    assert loop(rounds=0, trials=1).num_labels.tolist() == [20]


@pytest.mark.parametrize("name", list(METHODS))
def test_a_start_with_one_class_only(name: str) -> None:
    """Rows of class 0 in the only trial, all others of class 3."""
    start = loop(start=5, rounds=0, trials=1).labelled[0]
    pool, test = digits()
    y = torch.full((240,), 3)
    y[start] = 0
    method = neuboots.create_method(name, **METHODS[name])
    options = {**SMALL, "start": 5, "trials": 1}
    found = run_active_learning(method, model, TensorDataset(pool.tensors[0], y), test, RECIPE, **options)
    assert y[found.labelled[0]].tolist() == 5 * [0] + 30 * [3]
    assert found.accuracy.shape == (1, 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"start": 241}, "got start=241 for a pool of 240 rows; expected at most 240"),
        ({"start": 0}, "got start=0; expected a whole number, at least 1"),
        ({"start": 2.5}, "got start=2.5; expected a whole number"),
        ({"seed": 1.5}, "got seed=1.5; expected a whole number"),
        ({"seed": "a"}, "got seed='a'; expected a whole number"),
        ({"num_samples": 0}, "got num_samples=0; expected a whole number, at least 1"),
        ({"num_workers": 1.5}, "got num_workers=1.5; expected a whole number"),
        ({"folder": Path(__file__)}, "which is a file; expected a folder"),
        ({"strategy": ["entropy"]}, "got strategy=['entropy']; expected one of random"),
        ({"config": None}, "got recipe of type NoneType; expected a Recipe"),
        ({"method": neuboots.NeuBoots}, "got the class NeuBoots; expected an object of it: NeuBoots()"),
        ({"make": lambda: NET}, "make_net() gave the same weights twice"),
        ({"test": iter([(torch.zeros(2, 64), torch.zeros(2))])}, "got test rows of type list_iterator, which can be"),
        ({"query": 0}, "got query=0"),
        ({"trials": 0}, "got trials=0"),
        ({"rounds": -1}, "got rounds=-1"),
        ({"strategy": "bold"}, "got strategy='bold'"),
        ({"config": replace(RECIPE, folder=Path("here"))}, "got a recipe with a folder"),
        ({"method": "neuboots"}, "got method of type str; expected a method such as NeuBoots()"),
        ({"method": neuboots.NeuBoots.regression()}, "got strategy='entropy' for a regression"),
    ],
)
def test_bad_loops_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=".*") as refusal:
        loop(**change)
    assert sentence in str(refusal.value)
    stream: Any = StreamOf(noise(5, 64), True)
    with pytest.raises(ValueError, match="got a stream of unknown length"):
        run_active_learning(neuboots.Plain(), model, stream, stream, RECIPE, **SMALL)


def test_uncertainty_finds_the_decision_boundary() -> None:
    """y = 1[x > 0.3] on [−1, 1]: what entropy asks for lies near 0.3, what chance asks for anywhere."""
    x = torch.linspace(-1, 1, 401)[:, None]
    rows = TensorDataset(x, (x[:, 0] > 0.3).long())
    config = TrainingConfig(epochs=30, batch_size=64, progress=False, optimizer=partial(torch.optim.Adam, lr=0.2))
    options = {"start": 10, "query": 10, "rounds": 3, "trials": 3, "num_samples": 1, "progress": False}

    def line() -> nn.Module:
        return nn.Linear(1, 2)

    distance: dict[str, float] = {}
    for strategy in ("entropy", "random"):
        found = run_active_learning(neuboots.Plain(), line, rows, rows, config, strategy=strategy, **options)
        last = x[found.labelled[:, -10:], 0]  # (3, 10)
        distance[strategy] = float((last - 0.3).abs().mean())
    # |x − 0.3| of a uniform x has mean 0.545 and standard deviation 0.345
    assert distance["entropy"] < 0.545 / 2
    assert abs(distance["random"] - 0.545) < standard_errors(1) * 0.345 / 30**0.5


@pytest.mark.parametrize(
    ("method", "outputs"),
    [
        (neuboots.NeuBoots.regression(), 1),
        (neuboots.DeepEnsemble(loss=GaussianNLL(), num_members=2), 2),
        (neuboots.Plain(loss=nn.MSELoss()), 1),
    ],
)
@pytest.mark.parametrize("strategy", ["std", "batch"])
def test_regression_is_measured_by_rmse(method: Any, outputs: int, strategy: str) -> None:
    x = noise(60, 3)
    rows = TensorDataset(x, x[:, 0] * 2)  # (N,)
    seen: list[Predictor] = []

    @dataclass(frozen=True)
    class Watched:
        loss: Any = method.loss

        def fit(self, make: Any, data: Any, config: Any) -> Predictor:
            seen.append(method.fit(make, data, config))
            return seen[-1]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))

    options = {**SMALL, "trials": 1, "strategy": strategy}
    found = run_active_learning(Watched(), make, rows, rows, RECIPE, **options)
    assert list(found.figures) == ["rmse"]
    mean = seen[-1].predict(x, 4).mean[:, 0]  # members, or exact moments: whatever the seed
    expected = float((mean - rows.tensors[1]).square().mean().sqrt())
    assert float(found.figures["rmse"][0, -1]) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="got the figure 'accuracy'; expected one of rmse"):
        found.mean()


@pytest.mark.parametrize(
    ("loss", "targets", "expected"),
    [
        (nn.MSELoss(), torch.arange(8), "rmse"),  # whole numbers, but a regression
        (nn.BCEWithLogitsLoss(), (torch.arange(8) % 2).float(), "accuracy"),  # floats, but classes
        (nn.BCEWithLogitsLoss(reduction="none"), (torch.arange(8) % 2).float()[:, None], "accuracy"),
        (lambda z, y: (z[:, 0] - y).square(), torch.rand(8), "rmse"),
        (lambda z, y: (z[:, 0] - y).square(), torch.arange(8) % 2, "accuracy"),
    ],
)
def test_the_loss_says_what_the_outputs_are(loss: Any, targets: Tensor, expected: str) -> None:
    rows = TensorDataset(noise(8, 2), targets)
    options = {**SMALL, "start": 4, "query": 2, "rounds": 1, "strategy": "std"}
    found = run_active_learning(neuboots.Plain(loss=loss), lambda: nn.Linear(2, 1), rows, rows, RECIPE, **options)
    assert found.main == expected
    explicit = run_active_learning(
        neuboots.Plain(loss=loss), lambda: nn.Linear(2, 1), rows, rows, RECIPE, task="regression", **options
    )
    assert explicit.main == "rmse"


def test_pixels_are_measured_without_those_that_the_loss_ignores() -> None:
    x = noise(12, 1, 4, 4)
    y = (x[:, 0] > 0).long()
    ignore_index = y.clone()
    ignore_index[:, 0] = 9
    seen: list[Predictor] = []
    method = neuboots.NeuBoots(loss=nn.CrossEntropyLoss(ignore_index=9))

    @dataclass(frozen=True)
    class Watched:
        loss: Any = method.loss

        def fit(self, make: Any, data: Any, config: Any) -> Predictor:
            seen.append(method.fit(make, data, config))
            return seen[-1]

    rows = TensorDataset(x, ignore_index)
    options = {**SMALL, "start": 4, "query": 4, "rounds": 1, "trials": 1, "num_samples": 200, "strategy": "bald"}
    found = run_active_learning(Watched(), lambda: nn.Conv2d(1, 2, 1), rows, rows, RECIPE, **options)
    right = seen[-1].predict(x, 200).labels == y
    assert found.labelled.shape == (1, 8)
    assert list(found.figures)[-1] == "mean_iou"
    # other replicates, of another seed, may see a few pixels otherwise
    assert float(found.accuracy[0, -1]) == pytest.approx(float(right[:, 1:].double().mean()), abs=0.02)


def curve(values: Tensor) -> ActiveLearningResult:
    labelled = torch.zeros(len(values), 30, dtype=torch.long)
    return ActiveLearningResult(
        "Plain", "bald", torch.tensor([10, 30]), {"accuracy": values, "ece": values / 2}, labelled, 7, 3
    )


def test_the_interval_is_students() -> None:
    values = torch.tensor([[0.5, 0.7], [0.6, 0.9], [0.4, 0.75]]).double()
    found = curve(values)
    torch.testing.assert_close(found.mean(), torch.tensor([0.5, 0.7833]).double(), rtol=0, atol=1e-4)
    for r in range(2):
        low, high = scipy.stats.t.interval(0.9, 2, values[:, r].mean(), scipy.stats.sem(values[:, r]))
        mine = [float(end[r]) for end in found.interval(level=0.9)]
        assert mine == pytest.approx([low, high])
    assert found.rows()[1] == {
        "labels": 30,
        "accuracy": pytest.approx(0.78333, abs=1e-5),
        "low": pytest.approx(float(found.interval()[0][1])),
        "high": pytest.approx(float(found.interval()[1][1])),
        "ece": pytest.approx(0.78333 / 2, abs=1e-5),
    }


@pytest.mark.parametrize("level", [0, 1, 2, -0.5, float("nan")])
def test_a_level_that_is_none_gets_a_sentence(level: float) -> None:
    with pytest.raises(ValueError, match="got level=.*; expected a number between 0 and 1"):
        curve(torch.tensor([[0.5, 0.7], [0.6, 0.9]]).double()).interval(level=level)


def test_the_table_says_what_was_done() -> None:
    lines = str(curve(torch.tensor([[0.5, 0.75], [0.5, 0.75]]).double())).splitlines()
    assert lines[0].startswith("Plain by bald: means of 2 trials")
    assert lines[0].endswith("B = 7, seed 3")
    assert lines[1].split() == ["labels", "accuracy", "low", "high", "ece"]
    assert lines[3].split() == ["30", "0.75", "0.75", "0.75", "0.375"]


def test_one_trial_has_no_interval() -> None:
    found = curve(torch.tensor([[0.5, 0.75]]).double())
    assert "low" not in found.rows()[0]
    assert str(found).splitlines()[0] == "Plain by bald: one trial, B = 7, seed 3"
    with pytest.raises(ValueError, match="got one trial, which has no spread; expected at least 2"):
        found.interval()


def test_the_loop_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    loop(trials=1, rounds=1)
    assert torch.equal(torch.get_rng_state(), before)
