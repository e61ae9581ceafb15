"""Regression metrics against uncertainty-toolbox, scoringrules and scipy, and edge cases."""

import math
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import scoringrules
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuboots._validation import ArgumentError
from neuboots.metrics import (
    IntervalMetrics,
    RegressionMetrics,
    calibration_curve,
    check_score,
    crps,
    crps_samples,
    gaussian_nll,
    interval_coverage,
    interval_score,
    mean_absolute_calibration,
    mean_interval_score,
    mean_width,
    miscalibration_area,
    pinball,
    rms_calibration,
    rmse,
    sharpness,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its docstrings have stray backslashes
    import uncertainty_toolbox as toolbox

many = settings(deadline=None, max_examples=25, derandomize=True)


def random_case(seed: int, num: int, off: float) -> tuple[Tensor, Tensor, Tensor]:
    """Means, standard deviations and targets whose deviations are `off` times as large as predicted: (num,) each."""
    rng = torch.Generator().manual_seed(seed)
    mean, noise = torch.randn(2, num, generator=rng, dtype=torch.float64)
    std = 0.1 + 2 * torch.rand(num, generator=rng, dtype=torch.float64)
    return 10 * mean, std, 10 * mean + off * std * noise


cases = st.builds(random_case, st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([0.0, 0.3, 1.0, 5.0]))

# -- other libraries -----------------------------------------------------------------------------------


@many
@given(cases)
def test_metrics_agree_with_uncertainty_toolbox(case: tuple[Tensor, Tensor, Tensor]) -> None:
    arrays = [part.numpy() for part in case]
    for ours, theirs in [
        (gaussian_nll, toolbox.nll_gaussian),
        (crps, toolbox.crps_gaussian),
        (check_score, toolbox.check_score),
        (mean_interval_score, toolbox.interval_score),
        (mean_absolute_calibration, partial(toolbox.mean_absolute_calibration_error, vectorized=True)),
        (rms_calibration, partial(toolbox.root_mean_squared_calibration_error, vectorized=True)),
        (miscalibration_area, partial(toolbox.miscalibration_area, vectorized=True)),
    ]:
        assert ours(*case).item() == pytest.approx(theirs(*arrays), rel=1e-9)
    assert sharpness(case[1]).item() == pytest.approx(toolbox.sharpness(arrays[1]))
    expected, observed = toolbox.get_proportion_lists_vectorized(*arrays, num_bins=31)
    curve = calibration_curve(*case, num_levels=31)
    np.testing.assert_allclose(curve.expected.numpy(), expected, rtol=1e-14)
    np.testing.assert_allclose(curve.observed.numpy(), observed, rtol=1e-14)


@many
@given(cases)
def test_metrics_agree_with_scoringrules_and_scikit_learn(case: tuple[Tensor, Tensor, Tensor]) -> None:
    mean, std, y = (part.numpy() for part in case)
    assert crps(*case).item() == pytest.approx(scoringrules.crps_normal(y, mean, std).mean())
    assert gaussian_nll(*case).item() == pytest.approx(-scoringrules.logs_normal(y, mean, std, negative=False).mean())
    assert rmse(case[0], case[2]).item() == pytest.approx(sklearn.metrics.root_mean_squared_error(y, mean))


@many
@given(cases, st.sampled_from([0.05, 0.5, 0.9]))
def test_interval_and_quantile_metrics_agree_with_libraries(case: tuple[Tensor, Tensor, Tensor], level: float) -> None:
    mean, std, y = case
    low, high = mean - std, mean + 2 * std
    theirs = scoringrules.interval_score(y.numpy(), low.numpy(), high.numpy(), 1 - level).mean()
    assert interval_score(low, high, y, level=level).item() == pytest.approx(theirs)
    theirs = sklearn.metrics.mean_pinball_loss(y.numpy(), mean.numpy(), alpha=level)
    assert pinball(mean, y, q=level).item() == pytest.approx(theirs)
    theirs = scoringrules.quantile_score(y.numpy(), mean.numpy(), level).mean()
    assert pinball(mean, y, q=level).item() == pytest.approx(theirs)
    assert mean_width(low, high).item() == pytest.approx(3 * std.mean().item())
    within = np.mean((low.numpy() <= y.numpy()) & (y.numpy() <= high.numpy()))
    assert interval_coverage(low, high, y).item() == pytest.approx(within)


@many
@given(cases, st.integers(1, 12))
def test_crps_samples_agrees_with_scoringrules(case: tuple[Tensor, Tensor, Tensor], B: int) -> None:
    mean, std, y = case
    rng = torch.Generator().manual_seed(B)
    samples = mean + std * torch.randn(B, len(y), generator=rng, dtype=torch.float64)
    samples[-1] = samples[0]  # a tie
    theirs = scoringrules.crps_ensemble(y.numpy(), samples.T.numpy(), estimator="nrg").mean()
    assert crps_samples(samples, y).item() == pytest.approx(theirs)


@many
@given(cases, st.sampled_from([0.5, 0.95]))
def test_regression_metrics_match_central_interval(case: tuple[Tensor, Tensor, Tensor], level: float) -> None:
    mean, std, y = case
    low, high = (torch.from_numpy(end) for end in scipy.stats.norm.interval(level, mean.numpy(), std.numpy()))
    state = RegressionMetrics.from_batch(*case, level=level)
    assert state.coverage == interval_coverage(low, high, y)
    assert state.mean_width.item() == pytest.approx(mean_width(low, high).item())
    assert state.interval_score.item() == pytest.approx(interval_score(low, high, y, level=level).item())


# -- no spread -----------------------------------------------------------------------------------------

CERTAIN = (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 1.0]))


@pytest.mark.parametrize("metric", [crps, check_score, mean_interval_score, miscalibration_area])
def test_zero_std_is_limit_of_small_std(metric: Callable[..., Tensor]) -> None:
    """σ = 10⁻⁹ differs from σ = 0 by a few σ. The target at its very mean is inside every interval of either."""
    mean, std, y = CERTAIN
    assert metric(mean, std, y).item() == pytest.approx(metric(mean, std + 1e-9, y).item(), abs=1e-6)


def test_zero_std_by_hand() -> None:
    mean, std, y = CERTAIN
    assert crps(mean, std, y).item() == pytest.approx((0 + 2 + 1) / 3)  # |y − μ|
    assert check_score(mean, std, y).item() == pytest.approx((0 + 2 + 1) / 3 / 2)  # the levels are symmetric
    assert sharpness(std) == 0
    curve = calibration_curve(mean, std, y, num_levels=3)
    assert curve.observed.tolist() == pytest.approx([1 / 3, 1 / 3, 1])


def test_zero_std_has_no_likelihood() -> None:
    mean, std, y = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.ones(2)
    with pytest.raises(ArgumentError, match="std"):
        gaussian_nll(mean, std, y)
    state = RegressionMetrics.from_batch(mean, std, y)
    assert state.rmse == 1
    with pytest.raises(ArgumentError, match="std"):
        _ = state.nll


def test_area_of_a_curve_that_crosses_the_diagonal() -> None:
    """Observed 1/4, 1/4 and 1 at the levels 0, 1/2 and 1: three triangles of base 1/4, 1/4 and 1/2, and height 1/4."""
    y = torch.tensor([0.0, 10.0, 10.0, 10.0])
    area = miscalibration_area(torch.zeros(4), torch.ones(4), y, num_levels=3)
    assert area.item() == pytest.approx((1 / 4 + 1 / 4 + 1 / 2) / 4 / 2)


# -- edges ---------------------------------------------------------------------------------------------


def test_ends_are_inside_the_interval() -> None:
    assert interval_coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])) == 1


def test_infinite_interval() -> None:
    state = IntervalMetrics.from_batch(torch.tensor([-math.inf]), torch.tensor([math.inf]), torch.tensor([3.0]))
    assert (state.coverage, state.mean_width, state.interval_score) == (1, math.inf, math.inf)


def test_elements_count_as_inputs() -> None:
    mean, std, y = random_case(0, 12, 1.0)
    assert crps(mean.view(3, 4), std.view(3, 4), y.view(3, 4)) == crps(mean, std, y)
    samples = torch.randn(5, 12)
    assert crps_samples(samples.view(5, 3, 4), y.view(3, 4)) == crps_samples(samples, y)


def test_integer_targets() -> None:
    assert rmse(torch.tensor([0.0, 0.0]), torch.tensor([3, 4])).item() == pytest.approx(math.sqrt(12.5))


def test_crps_samples_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, y = torch.randn(5, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    whole = crps_samples(samples, y).item()
    monkeypatch.setattr("neuboots.metrics.classification.MAX_CHUNK_ELEMENTS", 35)  # seven inputs at a time
    assert crps_samples(samples, y).item() == pytest.approx(whole, rel=1e-14)


def test_crps_samples_of_large_numbers_is_precise() -> None:
    """At 10⁸ the sum over pairs of samples would cancel."""
    mean, std, y = random_case(0, 30, 1.0)
    samples = mean + std * torch.randn(9, 30, dtype=torch.float64)
    near = crps_samples(samples, y).item()
    assert crps_samples(samples + 1e8, y + 1e8).item() == pytest.approx(near, rel=1e-6)


# -- invalid arguments ---------------------------------------------------------------------------------

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rmse(torch.zeros(3, 1), torch.zeros(3)), "y.shape"),
        (lambda: crps(ONE, -ONE, ONE), "std"),
        (lambda: sharpness(-ONE), "std"),
        (lambda: rmse(torch.tensor([True]), ONE), "mean.dtype"),
        (lambda: interval_coverage(ONE, 0 * ONE, ONE), "low"),
        (lambda: mean_width(math.inf * ONE, math.inf * ONE), "low"),
        (lambda: pinball(ONE, ONE, q=1.0), "q"),
        (lambda: interval_score(ONE, ONE, ONE, level=95), "level"),
        (lambda: RegressionMetrics.from_batch(ONE, ONE, ONE, level="0.9"), "level"),
        (lambda: calibration_curve(ONE, ONE, ONE, num_levels=1), "num_levels"),
        (lambda: calibration_curve(ONE, ONE, ONE, num_levels=10.5), "num_levels"),
        (lambda: crps_samples(torch.zeros(5, 3, 1), torch.zeros(3)), "samples.shape"),
        (lambda: crps_samples(torch.tensor(1.0), torch.tensor(1.0)), "samples.shape"),
        (lambda: crps_samples(torch.ones(0, 1), ONE), "samples.shape"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], Tensor], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
