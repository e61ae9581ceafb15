"""Estimators: scikit-learn's checks, interval coverage, sample weights and saving."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import scipy.stats
import torch
from _reference import standard_errors
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from torch import nn

from neuboots._validation import ArgumentError
from neuboots.estimators import (
    NeuBootsClassifier,
    NeuBootsRegressor,
    _append_weights,
    _duplicate_groups,
    _WeightedLoss,
)
from neuboots.losses import GaussianNLL
from neuboots.methods import METHODS, Deterministic, MCDropout
from neuboots.serialization import ArtifactError

QUICK: dict[str, Any] = {"epochs": 5, "widths": (32,), "learning_rate": 0.03, "random_state": 0}


def waves(n: int, seed: int = 0, features: int = 3) -> tuple[Any, Any]:
    """y = sin 2x₁ + x₂ + (0.1 + 0.4 |x₁|) ε."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, features))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] + (0.1 + 0.4 * np.abs(X[:, 0])) * rng.normal(size=n)


@parametrize_with_checks([NeuBootsRegressor(**QUICK), NeuBootsClassifier(**QUICK)])  # type: ignore[untyped-decorator]
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [NeuBootsRegressor(), NeuBootsClassifier()], ids=lambda e: type(e).__name__)
def test_scikit_learns_checks_with_all_defaults(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(estimator)


@pytest.mark.slow
def test_prediction_interval_keeps_its_level() -> None:
    """Coverage given the calibration rows is Beta(k, m + 1 − k): its mean over fits must not fall below the level."""
    found = []
    X_new, y_new = waves(4000, seed=99)
    for seed in range(12):
        X, y = waves(400, seed)
        low, high = NeuBootsRegressor(epochs=15, random_state=seed).fit(X, y).predict_interval(X_new, 0.9)
        found.append(float(np.mean((low <= y_new) & (y_new <= high))))
    m, level = 40, 0.9
    error = np.sqrt(level * (1 - level) / (m + 2) / len(found) + 0.25 / len(y_new) / len(found))
    assert level - 3 * error < np.mean(found) < level + 1 / (m + 1) + 3 * error


@pytest.mark.slow
def test_constant_is_beaten_in_likelihood_where_noise_varies() -> None:
    X, y = waves(2000)
    X_new, y_new = waves(2000, seed=1)
    regressor = NeuBootsRegressor(epochs=60, random_state=0).fit(X, y)
    mean, std = regressor.predict(X_new, return_std=True)
    error = y_new - mean

    def likelihood(s: Any) -> Any:
        return -np.log(s) - 0.5 * (error / s) ** 2

    gain = likelihood(std) - likelihood(error.std())  # even the best constant, known by the test rows
    assert gain.mean() > 3 * gain.std() / np.sqrt(len(gain))


def test_confidence_is_narrower_than_prediction_and_samples_agree() -> None:
    X, y = waves(500)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    low, high = regressor.predict_interval(X, interval="confidence")
    assert ((high - low) > 0).all()
    p_low, p_high = regressor.predict_interval(X)
    assert np.mean(high - low) < np.mean(p_high - p_low)
    new = regressor.sample(X, 400, observation_noise=True)
    _, std = regressor.predict(X, return_std=True)
    assert abs(np.mean(new.std(0) / std) - 1) < 0.05
    forecast = regressor.forecast(X)
    assert np.array_equal(forecast.low, p_low)
    assert np.allclose(forecast.confidence_high, high)
    assert np.array_equal(forecast.std, std)


@pytest.mark.slow
def test_standard_deviation_follows_noise() -> None:
    X, y = waves(3000)
    regressor = NeuBootsRegressor(epochs=60, random_state=0).fit(X, y)
    calm, wild = np.zeros((1, 3)), np.array([[1.9, 0.0, 0.0]])
    std = [float(regressor.predict(x, return_std=True)[1][0]) for x in (calm, wild)]
    assert std[1] > 1.5 * std[0]
    low, high = regressor.predict_interval(np.concatenate([calm, wild]))
    assert (high - low)[1] > 1.5 * (high - low)[0]


@pytest.mark.slow
def test_units_are_kept() -> None:
    X, y = waves(400)
    one = NeuBootsRegressor(epochs=60, random_state=0).fit(X, y)
    other = NeuBootsRegressor(epochs=60, random_state=0).fit(1000 * X + 5, 1e-3 * y - 7)
    low, high = other.predict_interval(1000 * X + 5)
    assert np.corrcoef(one.predict(X), other.predict(1000 * X + 5))[0, 1] > 0.95
    assert abs(np.mean(other.predict(1000 * X + 5)) + 7) < 1e-3
    assert 0.5 < 1e3 * np.mean(high - low) / np.mean(np.subtract(*one.predict_interval(X)[::-1])) < 2


def test_several_targets() -> None:
    X, y = waves(300)
    Y = np.stack([y, 100 * X[:, 1]], 1)
    regressor = NeuBootsRegressor(**{**QUICK, "epochs": 20}).fit(X, Y)
    found = regressor.forecast(X)
    assert found.mean.shape == found.std.shape == found.low.shape == found.confidence_low.shape == (300, 2)
    assert regressor.sample(X, 3).shape == (3, 300, 2)
    assert regressor.score(X, Y) > 0.8
    assert (np.mean((found.low <= Y) & (found.high >= Y), 0) > 0.85).all()
    assert (found.confidence_low < found.mean).all()
    assert (np.mean(found.confidence_high - found.confidence_low, 0) < np.std(Y, 0)).all()
    assert NeuBootsRegressor(**QUICK).fit(X, y[:, None]).predict(X).shape == (300, 1)


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (12, "12 rows were cross-validated, and level 0.95 needs 19"),
        (120, "12 rows were held out for calibration, and level 0.95 needs 19"),
    ],
)
def test_few_scores_give_students_quantile_and_warning(n: int, message: str) -> None:
    X, y = waves(n)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    with pytest.warns(UserWarning, match=message):
        low, high = regressor.predict_interval(X)
    ratio = (high - low) / (2 * regressor.predict(X, return_std=True)[1])
    expected = max(scipy.stats.t.ppf(0.975, 11) * np.sqrt(13 / 12), regressor.scores_.max())
    assert np.allclose(ratio, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor.predict_interval(X, level=0.8)


def coverage(n: int, problem: str, seed: int) -> float:
    """Fraction of 1,000 new y in the 95 % prediction intervals of a regressor that was fitted to n rows."""
    rng = np.random.default_rng([seed, n])
    if problem == "linear":
        X = rng.normal(size=(n + 1000, 3))
        mean, std = X @ [1.0, -2.0, 0.5], 0.5
    elif problem == "heteroscedastic":
        X = rng.uniform(-2, 2, (n + 1000, 1))
        mean, std = np.sin(3 * X[:, 0]), 0.1 + 0.3 * np.abs(X[:, 0])
    else:
        X = rng.uniform(size=(n + 1000, 5))
        mean, std = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + X[:, 3:] @ [10.0, 5.0], 1.0
    y = mean + std * rng.normal(size=n + 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low, high = NeuBootsRegressor(random_state=seed).fit(X[:n], y[:n]).predict_interval(X[n:])
    return float(np.mean((low <= y[n:]) & (y[n:] <= high)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 8, 20, 60])
def test_prediction_interval_covers_with_few_rows(n: int) -> None:
    problems = ("linear", "heteroscedastic", "Friedman")
    found = [coverage(n, problem, seed) for problem in problems for seed in range(8)]
    assert np.mean(found) > 0.92 - 3 * np.std(found) / np.sqrt(len(found))


def test_prediction_interval_contains_confidence_band() -> None:
    X, y = waves(30)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    usual = regressor.forecast(X, level=0.8)
    middle = np.median((usual.confidence_high - usual.confidence_low) / (usual.high - usual.low))
    regressor.scores_ *= middle  # the band is wider than the conformal interval at half of the rows
    found = regressor.forecast(X, level=0.8)
    assert ((found.low <= found.confidence_low) & (found.confidence_high <= found.high)).all()
    assert 0 < np.mean(found.low == found.confidence_low) < 1
    assert np.array_equal(regressor.predict_interval(X, 0.8), (found.low, found.high))


def test_scores_of_few_rows_are_cross_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has an error by a net that saw neither it nor its copies; the last net is trained on all rows."""
    splits, errors = [], []
    fit_predictor, fit_noise = NeuBootsRegressor._fit_predictor, NeuBootsRegressor._fit_noise

    def spy_on_fit(self: Any, rows: Any, *args: Any) -> Any:
        splits.append((rows.split != 0).numpy())
        return fit_predictor(self, rows, *args)

    def spy_on_noise(self: Any, error: Any, raw_std: Any, group: Any) -> None:
        errors.append((error * self.y_scale_)[:, 0])
        fit_noise(self, error, raw_std, group)

    monkeypatch.setattr(NeuBootsRegressor, "_fit_predictor", spy_on_fit)
    monkeypatch.setattr(NeuBootsRegressor, "_fit_noise", spy_on_noise)
    X, y = waves(12)
    weights = np.arange(12) % 3 + 1
    one = NeuBootsRegressor(**QUICK).fit(X, y, weights)
    assert one.scores_.shape == (24, 1)
    assert len(one.score_counts_) == 12
    assert not one.held_out_.any()
    assert np.mean(one.scores_**2) == pytest.approx(1)
    held_out, found = np.array(splits), errors[0]
    assert not held_out[0].any()
    assert (held_out[1:].sum(0) == 1).all()
    assert len(np.unique(np.round(found, 9))) == 12  # copies have one error
    NeuBootsRegressor(**QUICK).fit(X, np.where(np.arange(12) == 5, y + 7, y), weights)
    moved = errors[1] - found
    row = np.isclose(moved, 7)
    fold = held_out[1:][held_out[1:, row].any(1)][0]
    assert row.sum() == weights[5]
    assert np.allclose(moved[fold & ~row], 0)
    assert (np.abs(moved[~fold]) > 1e-3).all()


def test_fewer_than_four_rows_are_refused() -> None:
    X, y = waves(5)
    for rows, weights in ((3, None), (5, [1, 0, 1, 0, 1]), (5, [0.5, 0, 0.5, 0, 0.5])):
        with pytest.raises(ArgumentError) as caught:
            NeuBootsRegressor(**QUICK).fit(X[:rows], y[:rows], weights)
        assert caught.value.name == "X"


@pytest.mark.parametrize("method", ["neuboots", "deep-ensemble"])
def test_four_rows_with_several_targets(method: str, tmp_path: Path) -> None:
    X, y = waves(4)
    regressor = NeuBootsRegressor(method, epochs=2, widths=(8,), random_state=0).fit(X, np.stack([y, X[:, 1]], 1))
    regressor.save(tmp_path / "model")
    for level in (0.5, 0.75):
        low, high = regressor.predict_interval(X, level)
        assert np.isfinite(low).all()
        assert (low < high).all()
        assert np.array_equal(NeuBootsRegressor.load(tmp_path / "model").predict_interval(X, level), (low, high))


@pytest.mark.parametrize("n", [15, 150])
def test_intervals_widen_with_level(n: int) -> None:
    """Also where the conformal quantile gives way to another one."""
    X, y = waves(n)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        widths = [np.subtract(*regressor.predict_interval(X, level)[::-1]) for level in (0.5, 0.8, 0.93, 0.95, 0.99)]
    assert (np.diff(widths, axis=0) >= 0).all()


def test_rare_flag_is_scaled_by_its_range() -> None:
    X = np.zeros((100, 3))
    X[0, 0], X[:, 1], X[:, 2] = 1, np.arange(100), 7
    regressor = NeuBootsRegressor(epochs=1, validation_fraction=0).fit(X, X[:, 1])
    assert regressor.x_scale_[0] == 1
    assert np.isclose(regressor.x_scale_[1], np.arange(100).std())
    assert regressor.x_scale_[2] == 1


def test_held_out_rows_were_never_trained_on() -> None:
    """Their targets move the calibration, never the mean."""
    X, y = waves(200)
    regressor = NeuBootsRegressor(epochs=5, early_stopping=False, random_state=0).fit(X, y)
    held_out = regressor.held_out_
    assert held_out.sum() == 40
    assert regressor.scores_.shape == (40, 1)
    errors = np.abs(y - regressor.predict(X))[held_out] / regressor.predict(X, return_std=True)[1][held_out]
    assert np.allclose(np.sort(errors), np.sort(regressor.scores_[:, 0]), rtol=1e-6)
    assert np.mean(regressor.scores_**2) == pytest.approx(1)  # the standard deviation of highest likelihood


def test_targets_of_held_out_rows_do_not_move_mean() -> None:
    X, y = waves(200)
    one = NeuBootsRegressor(epochs=5, random_state=0).fit(X, y)
    other = NeuBootsRegressor(epochs=5, random_state=0).fit(X, y + 3 * one.held_out_)
    assert one.held_out_.sum() == 20
    assert np.array_equal(one.held_out_, other.held_out_)
    assert np.array_equal(one.predict(X), other.predict(X))
    assert not np.array_equal(one.predict_interval(X, 0.8), other.predict_interval(X, 0.8))


def test_constant_predicts_itself() -> None:
    X, _ = waves(60)
    for constant in (0.0, 0.1, 1e-9, -1e12):
        regressor = NeuBootsRegressor(epochs=2, random_state=0).fit(X, np.full(60, constant))
        low, high = regressor.predict_interval(X, 0.8)
        assert np.allclose(regressor.predict(X), constant, rtol=1e-7, atol=1e-7 * (constant == 0))
        assert np.allclose(high, low, rtol=1e-7, atol=1e-7 * (constant == 0))


@pytest.mark.parametrize("scale", [2.0**-900, 2.0**900])  # squares of these are no numbers
def test_targets_of_any_size(scale: float) -> None:
    X, y = waves(60)
    one, other = (NeuBootsRegressor(epochs=3, random_state=0).fit(X, s * y).predict(X) for s in (1.0, scale))
    assert np.array_equal(one * scale, other)


@pytest.mark.parametrize("labels", [["no", "yes", "perhaps"], [-5, 0, 70], [True, False, None]])
def test_labels_of_any_kind(labels: list[Any]) -> None:
    X, y = load_iris(return_X_y=True)
    kinds = labels[:2] if labels[2] is None else labels
    X, y = X[y < len(kinds)], np.array(kinds)[y[y < len(kinds)]]
    classifier = NeuBootsClassifier(**QUICK).fit(X, y)
    assert set(classifier.predict(X).tolist()) <= set(kinds)
    assert list(classifier.classes_) == sorted(kinds)
    probs = classifier.predict_proba(X)
    assert probs.shape == (len(X), len(kinds))
    assert np.allclose(probs.sum(1), 1)
    assert classifier.score(X, y) > 0.85
    samples = classifier.sample(X, 400)
    error = samples.std(0) * np.sqrt(1 / 400 + 1 / classifier.num_samples)
    assert (np.abs(samples.mean(0) - probs) <= standard_errors(probs.size) * error + 1e-6).all()


def test_single_class_is_rejected() -> None:
    with pytest.raises(ArgumentError):
        NeuBootsClassifier().fit(np.zeros((30, 1)), ["a"] * 30)


def test_class_of_one_row_is_trained_on() -> None:
    X, y = load_iris(return_X_y=True)
    y = y.astype("<U4")
    y[0] = "rare"
    classifier = NeuBootsClassifier(**QUICK).fit(X, y)
    assert "rare" in classifier.classes_
    assert not classifier.held_out_[0]


def test_order_of_rows_does_not_matter() -> None:
    X, y = waves(100)
    order = np.random.default_rng(1).permutation(100)
    one, other = NeuBootsRegressor(**QUICK).fit(X, y), NeuBootsRegressor(**QUICK).fit(X[order], y[order])
    assert np.array_equal(one.predict(X), other.predict(X))
    assert np.array_equal(one.held_out_[order], other.held_out_)


def test_whole_weights_are_frequencies_and_ones_are_none() -> None:
    X, y = waves(80)
    weights = np.random.default_rng(0).integers(0, 4, 80)
    weighted = NeuBootsRegressor(**QUICK).fit(X, y, sample_weight=weights)
    repeated = NeuBootsRegressor(**QUICK).fit(np.repeat(X, weights, 0), np.repeat(y, weights))
    assert np.array_equal(weighted.predict(X), repeated.predict(X))
    assert np.array_equal(weighted.predict_interval(X, 0.5), repeated.predict_interval(X, 0.5))
    plain, ones = NeuBootsRegressor(**QUICK).fit(X, y), NeuBootsRegressor(**QUICK).fit(X, y, sample_weight=np.ones(80))
    assert np.array_equal(plain.predict(X), ones.predict(X))


def test_copies_of_row_are_held_out_together() -> None:
    """A net that was trained on one copy knows the other."""
    X, y = waves(100)
    order = np.random.default_rng(0).permutation(300) % 100
    regressor = NeuBootsRegressor(epochs=1, random_state=0).fit(X[order], y[order])
    held_out = [set(order[regressor.held_out_ == side].tolist()) for side in (True, False)]
    assert len(held_out[0]) == len(regressor.score_counts_) == 10
    assert not held_out[0] & held_out[1]
    assert regressor.held_out_.sum() == len(regressor.scores_) == 30
    with pytest.warns(UserWarning, match="10 rows were held out for calibration, and level 0.95 needs 19"):
        regressor.predict_interval(X)
    classifier = NeuBootsClassifier(epochs=1, random_state=0).fit(X, y > 0, sample_weight=np.full(100, 3))
    assert classifier.held_out_.sum() == 10


def test_rows_that_only_look_like_copies_are_split_one_by_one() -> None:
    X = np.array([[0.0]] * 4 + [[1.0]] * 3 + [[2.0]] * 2 + [[3.0]])
    y = np.array([5.0] * 4 + [5.0, 5.0, 6.0] + [7.0] * 2 + [8.0])[:, None]
    assert _duplicate_groups(X, y, max_copies=3).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8]
    X, y = np.arange(400)[:, None] % 4 // 2, np.arange(400) % 2  # four kinds of rows: each in every part
    classifier = NeuBootsClassifier(epochs=1, random_state=0).fit(X, y)
    assert classifier.held_out_.sum() == 40


def test_quantile_counts_rows_and_not_their_copies() -> None:
    regressor = NeuBootsRegressor()
    regressor.scores_ = np.arange(1.0, 61.0)[:, None]
    for counts, rank in ((np.ones(60, dtype=int), 49), (np.full(20, 3), 51)):  # ⌈0.8 · 61⌉, ⌈0.8 · 21 · 3⌉
        regressor.score_counts_ = counts
        assert regressor._score_quantile(0.8) == rank


@pytest.mark.parametrize("method", ["neuboots", "deterministic", "deep-ensemble", "mc-dropout"])
def test_other_weights_multiply_loss(method: str) -> None:
    """Two kinds of rows contradict each other: the heavy ones win."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    y = np.where(np.arange(200) % 2 == 0, 1.0, -1.0)
    weights = np.where(y > 0, 1.95, 0.05)
    options: dict[str, Any] = {**QUICK, "epochs": 10}
    regressor = NeuBootsRegressor(method, **options).fit(X, y, sample_weight=weights)
    assert np.mean(regressor.predict(X)) > 0.5
    classifier = NeuBootsClassifier(method, **options).fit(X, y, sample_weight=weights)
    assert np.mean(classifier.predict(X)) > 0.5


def test_weights_that_cannot_be_used() -> None:
    X, y = waves(50)
    with pytest.raises(ValueError, match="weight"):
        NeuBootsRegressor(**QUICK).fit(X, y, sample_weight=np.zeros(50))
    with pytest.raises(ArgumentError):
        NeuBootsRegressor("laplace", **QUICK).fit(X, y, sample_weight=np.full(50, 0.5))
    with pytest.raises(ArgumentError):
        NeuBootsRegressor(Deterministic(nn.MSELoss()), **QUICK).fit(X, y, sample_weight=np.full(50, 0.5))


def test_weighted_loss_is_weight_times_loss() -> None:
    outputs, y = torch.randn(5, 2), torch.tensor([0, 1, 1, 0, 1])
    w = np.array([1.0, 2.0, 0.5, 0.0, 1.5])
    expected = nn.CrossEntropyLoss(reduction="none")(outputs, y) * torch.from_numpy(w / w.mean())
    assert torch.allclose(_WeightedLoss(nn.CrossEntropyLoss())(outputs, _append_weights(y, w)), expected.float())
    targets = torch.randn(5, 2)
    expected = nn.MSELoss(reduction="none")(outputs, targets) * torch.from_numpy(w / w.mean()).float()[:, None]
    assert torch.allclose(_WeightedLoss(nn.MSELoss())(outputs, _append_weights(targets, w)), expected)


def test_seeds() -> None:
    X, y = waves(60)
    one, other = (NeuBootsRegressor(epochs=3, random_state=seed).fit(X, y).predict(X) for seed in (3, 4))
    assert not np.array_equal(one, other)
    drawn = NeuBootsRegressor(epochs=1, random_state=np.random.RandomState(0)).fit(X, y)
    assert drawn.seed_ == np.random.RandomState(0).randint(2**31 - 1)


def test_global_random_state_is_unchanged() -> None:
    X, y = waves(40)
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    NeuBootsRegressor(epochs=2, random_state=0).fit(X, y).predict(X)
    assert (torch.rand(1), np.random.rand()) == before


def model(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def make_net_of_one(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 1))


def test_custom_net() -> None:
    X, y = waves(200)
    regressor = NeuBootsRegressor(net=model, **QUICK).fit(X, y)
    assert isinstance(regressor.predictor_.net, nn.Sequential)
    assert isinstance(regressor.predictor_.net[1], nn.Tanh)
    assert regressor.gaussian_
    alone = NeuBootsRegressor(net=make_net_of_one, **QUICK).fit(X, y)
    assert not alone.gaussian_
    assert np.isfinite(alone.predict_interval(X, level=0.5)[0]).all()
    classifier = NeuBootsClassifier(net=model, **QUICK).fit(X, y > 0)
    assert classifier.predict_proba(X).shape == (200, 2)
    with pytest.raises(ArgumentError):
        NeuBootsClassifier(net=make_net_of_one, epochs=1).fit(X, y > 0)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_by_name(name: str, tmp_path: Path) -> None:
    """Fits, gives intervals or probabilities, pickles, and loads from a folder, bit for bit."""
    X, y = load_diabetes(return_X_y=True)
    few: dict[str, Any] = {"epochs": 4, "random_state": 0, "widths": (16,), "num_samples": 10}
    X, y = X[:60], y[:60]
    for task, make, target in (
        ("regression", NeuBootsRegressor, y),
        ("classification", NeuBootsClassifier, np.where(y > 140, "high", "low")),
    ):
        estimator: Any = make(name, **few)
        if task not in METHODS[name].tasks:
            with pytest.raises(ArgumentError):
                estimator.fit(X, target)
            continue
        estimator.fit(X, target)
        answer = estimator.predict(X) if task == "regression" else estimator.predict_proba(X)
        assert np.isfinite(answer).all()
        estimator.save(tmp_path / task)
        for other in (pickle.loads(pickle.dumps(estimator)), make.load(tmp_path / task)):
            again = other.predict(X) if task == "regression" else other.predict_proba(X)
            assert np.array_equal(again, answer)
        if task == "regression":
            low, high = estimator.predict_interval(X, level=0.8)
            assert (low <= high).all()


def test_method_with_options() -> None:
    X, y = waves(100)
    method = MCDropout(loss=GaussianNLL(), rate=0.3)
    regressor = clone(NeuBootsRegressor(method, **QUICK)).fit(X, y)
    assert regressor.gaussian_
    assert regressor.predictor_.config()["rate"] == 0.3
    with pytest.raises(ArgumentError):
        NeuBootsRegressor(MCDropout, **QUICK).fit(X, y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "magic"},
        {"epochs": 0},
        {"epochs": 2.5},
        {"learning_rate": -1},
        {"learning_rate": float("inf")},
        {"weight_decay": float("nan")},
        {"validation_fraction": 1.0},
        {"batch_size": float("inf")},
        {"widths": (8, 0)},
        {"batch_size": "big"},
        {"net": nn.Linear(3, 2)},
        {"net": lambda inputs, outputs: 3},
    ],
)
def test_invalid_options(options: dict[str, Any]) -> None:
    X, y = waves(40)
    with pytest.raises(ValueError, match=next(iter(options)).replace("_", ".")):
        NeuBootsRegressor(**options).fit(X, y)


def test_unfitted_estimator_and_invalid_levels() -> None:
    X, y = waves(40)
    for ask in ("predict", "predict_interval", "forecast", "sample", "inputs"):
        with pytest.raises(NotFittedError):
            getattr(NeuBootsRegressor(), ask)(X)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    for kind in ("prediction", "confidence"):
        with pytest.raises(ArgumentError):
            regressor.predict_interval(X, 95, kind)
    with pytest.raises(ArgumentError):
        regressor.predict_interval(X, interval="both")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        regressor.predict(np.full((1, 3), 1e300))


def test_pipeline_with_categories_and_missing_values_in_grid_search() -> None:
    rng = np.random.default_rng(0)
    town = rng.choice(["Bonn", "Rome"], 150)
    age = rng.uniform(20, 60, 150)
    frame = pandas.DataFrame({"age": age, "town": town})
    y = age / 10 + 3 * (town == "Rome") + 0.1 * rng.normal(size=150)
    frame.loc[::10, "age"] = np.nan
    columns = make_column_transformer(
        (SimpleImputer(add_indicator=True), ["age"]), (OneHotEncoder(handle_unknown="ignore"), ["town"])
    )
    pipeline = make_pipeline(columns, NeuBootsRegressor(**QUICK))
    search = GridSearchCV(pipeline, {"neubootsregressor__epochs": [1, 30]}, cv=2).fit(frame, y)
    assert search.best_params_ == {"neubootsregressor__epochs": 30}
    assert search.best_score_ > 0.5
    assert cross_val_score(pipeline, frame, y, cv=2).shape == (2,)


def test_custom_net_is_passed_to_load(tmp_path: Path) -> None:
    X, y = waves(60)
    for name, make in (("two", model), ("one", make_net_of_one)):
        regressor = NeuBootsRegressor(net=make, **QUICK).fit(X, y)
        regressor.save(tmp_path / name)
        loaded = NeuBootsRegressor.load(tmp_path / name, net=make)
        assert np.array_equal(loaded.predict(X), regressor.predict(X))
        assert np.array_equal(loaded.fit(X, y).predict(X), regressor.predict(X))
    with pytest.raises(ArgumentError):
        NeuBootsRegressor.load(tmp_path / "two")
    loaded = NeuBootsRegressor.load(tmp_path / "two", net=model(3, 2))
    with pytest.raises(ArgumentError):
        loaded.fit(X, y)  # not with another net in silence


def test_options_of_numpys_types_and_methods_with_options_are_saved(tmp_path: Path) -> None:
    X, y = waves(400)
    options: dict[str, Any] = {"epochs": np.int64(2), "num_samples": np.int32(5), "learning_rate": np.float32(0.01)}
    options |= {"widths": (np.int64(8),), "batch_size": np.int64(50), "early_stopping": np.bool_(True)}
    classifier = NeuBootsClassifier(MCDropout(rate=0.3), random_state=0, **options).fit(X, y > 0)
    classifier.save(tmp_path / "model")
    loaded = NeuBootsClassifier.load(tmp_path / "model")
    assert np.array_equal(loaded.predict_proba(X), classifier.predict_proba(X))
    assert (loaded.method, loaded.widths, loaded.num_samples) == ("mc-dropout", (8,), 5)
    assert NeuBootsRegressor(random_state=0, **options).fit(X, y).predict(X).shape == (400,)


def test_saved_estimator_loads_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = waves(60)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    classifier = NeuBootsClassifier(**QUICK).fit(frame, np.where(y > 0, "up", "down"))
    classifier.save(tmp_path / "model")
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, None)
    loaded = NeuBootsClassifier.load(tmp_path / "model")
    assert np.array_equal(loaded.predict_proba(frame), classifier.predict_proba(frame))
    assert list(loaded.classes_) == list(classifier.classes_)


def test_folder_that_is_no_estimator(tmp_path: Path) -> None:
    X, y = waves(40)
    with pytest.raises(FileNotFoundError):
        NeuBootsRegressor.load(tmp_path)
    NeuBootsRegressor(**QUICK).fit(X, y).save(tmp_path / "model")
    with pytest.raises(ArtifactError):
        NeuBootsClassifier.load(tmp_path / "model")
