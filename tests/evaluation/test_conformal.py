"""Conformal sets and intervals: exact distribution of the coverage, brute-force references, invalid arguments."""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from _reference import p_value, standard_errors
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from neuboots._prng import derive_keys, draw_normal, draw_uniform
from neuboots._validation import ArgumentError
from neuboots.evaluation import _batching
from neuboots.evaluation.conformal import (
    ConformalClassifier,
    ConformalRegressor,
    PredictionSets,
    conformal_quantile,
    fit_conformal_classifier,
    fit_conformal_regressor,
)
from neuboots.methods import DeterministicPredictor
from neuboots.metrics import interval_coverage, interval_score, mean_width
from neuboots.nets import MLP
from neuboots.prediction import Predictor, SampleStream, num_bytes

LOGITS = DeterministicPredictor(nn.Identity())  # the input is the output
SETS = ("threshold", "adaptive", "regularised")
INTERVALS = ("absolute", "normalised", "quantile")
quiet: dict[str, Any] = {"progress": False}
one: dict[str, Any] = {"progress": False, "num_samples": 1}


@dataclass(frozen=True)
class Spread(Predictor):
    """f_b(x) = x₀ + x₁ z_b for each output, with z_b standard normal: a mean and a spread that the input names.

    Inputs are (N, 2, C, *); with `gaussian_noise` the input's third part joins as log σ².
    """

    gaussian: bool = False

    @property
    def net(self) -> None:
        return None

    def config(self) -> dict[str, Any]:
        return {}

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        def sample(numbers: Tensor) -> Tensor:
            z = draw_normal(derive_keys(numbers, seed, "z"), 1).to(x).view(-1, *[1] * (x.ndim - 1))
            out = x[:, 0] + x[:, 1] * z
            return torch.cat([out, x[:, 2].expand_as(out)], 2) if self.gaussian else out

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                yield sample(torch.arange(start, min(start + size, num_samples)))

        return SampleStream(num_samples, num_bytes(x[:, 0]), chunks)


CALLS: list[tuple[int, int, int]] = []  # (N, B, seed) of each call of a `Recording`


class Recording(Spread):
    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        CALLS.append((len(x), num_samples, seed))
        return super().stream(x, num_samples, seed=seed)


def seeded_rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def class_rows(seed: int, num: int, classes: int = 6, *, digits: int | None = None) -> TensorDataset:
    """Logits of an overconfident net, and labels. Rounded logits have ties."""
    rng = seeded_rng(seed)
    logits = 2 * torch.randn(num, classes, generator=rng, dtype=torch.float64)
    labels = torch.multinomial((0.5 * logits).softmax(1), 1, generator=rng)[:, 0]
    return TensorDataset(logits if digits is None else logits.round(decimals=digits), labels)


def number_rows(seed: int, num: int, outputs: int = 1) -> TensorDataset:
    """Mean and spread of the replicates, and a y whose noise is neither: (N, 2, C) and (N, C)."""
    rng = seeded_rng(seed)
    mean = torch.randn(num, outputs, generator=rng, dtype=torch.float64)
    spread = 0.2 + torch.rand(num, outputs, generator=rng, dtype=torch.float64)
    noise = torch.randn(num, outputs, generator=rng, dtype=torch.float64)
    return TensorDataset(torch.stack([mean, spread], 1), mean + (0.3 + spread) * noise)


def rank(level: float, n: int, pixels: int = 1) -> int:
    """In exact arithmetic: ⌈level (n + 1) P⌉."""
    return math.ceil(Fraction(str(level)) * (n + 1) * pixels)


# -- distribution of coverage --------------------------------------------------------------------------

DRAWS, FRESH = 80, 100  # enough to tell k from k ± 1


def covered(calibrate: Any, make_rows: Any, n: int) -> np.ndarray:
    """Coverage on fresh rows, for each of many calibration sets."""
    found = []
    for k in range(DRAWS):
        data = make_rows(k, n + FRESH)
        rule = calibrate(TensorDataset(*(part[:n] for part in data.tensors)))
        report = rule.evaluate(TensorDataset(*(part[n:] for part in data.tensors)), **quiet)
        found.append(float(report.coverage))
    return np.array(found)


def error_of_mean(p: float, n: int) -> float:
    """Standard error of the mean of DRAWS coverages, each of FRESH rows: beta-binomial with Beta(k, n + 1 − k)."""
    return math.sqrt(p * (1 - p) * (1 / FRESH + (1 - 1 / FRESH) / (n + 2)) / DRAWS)


@pytest.mark.parametrize(("n", "level"), [(20, 0.9), pytest.param(10, 0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("score", [*SETS, *INTERVALS])
def test_mean_coverage_is_exact(score: Any, n: int, level: float) -> None:
    """Scores have no ties, so the mean coverage is k/(n + 1): no less, and no more."""
    if score in SETS:
        fit, make_rows = partial(fit_conformal_classifier, LOGITS, penalty=0.05, k_reg=2, **one), class_rows
    else:
        fit, make_rows = partial(fit_conformal_regressor, Spread(), num_samples=5, **quiet), number_rows
    p = rank(level, n) / (n + 1)
    miss = covered(partial(fit, level=level, score=score), make_rows, n).mean() - p
    assert abs(miss) < standard_errors(12) * error_of_mean(p, n)


def test_coverage_given_calibration_data_is_beta() -> None:
    """|y − m| is uniform on (0, 1), so the coverage at the quantile q is q itself: a draw from Beta(k, n + 1 − k)."""
    n, level = 30, 0.7
    quantiles = []
    for seed in range(300):
        y = 2 * torch.rand(n, generator=seeded_rng(seed), dtype=torch.float64) - 1
        rule = fit_conformal_regressor(
            LOGITS, TensorDataset(torch.zeros(n, 1), y), level=level, score="absolute", **one
        )
        quantiles.append(rule.quantiles[0])
    k = rank(level, n)
    assert scipy.stats.kstest(quantiles, scipy.stats.beta(k, n + 1 - k).cdf).pvalue > p_value(1)


@pytest.mark.parametrize("score", SETS)
def test_ties_only_increase_coverage(score: Any) -> None:
    n, level = 40, 0.8
    calibrate = partial(fit_conformal_classifier, LOGITS, level=level, score=score, **one)
    found = covered(calibrate, partial(class_rows, digits=0), n).mean()
    assert found > level - standard_errors(3) * error_of_mean(level, n)


def test_targets_at_ends_of_interval_are_inside() -> None:
    """Tenths in doubles: m ± |y − m| misses y by rounding, unless the ends are rounded outwards."""
    for tenths in range(1, 60, 3):
        x = torch.full((20, 1), tenths / 10, dtype=torch.float64)
        for y in (0.3, -0.7, 12.1):
            rows = TensorDataset(x, torch.full((20,), y, dtype=torch.float64))
            rule = fit_conformal_regressor(LOGITS, rows, score="absolute", **one)
            low, high = rule.predict(x[:1], **quiet)
            assert low.item() <= y <= high.item()
            assert high - low == pytest.approx(2 * abs(y - tenths / 10), abs=1e-12)
    points = TensorDataset(x, x[:, 0])  # of intervals without a width
    assert replace(BAND, quantiles=(0.0,)).evaluate(points, **quiet).coverage == 1


def wide_net(seed: int, outputs: int) -> MLP:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(20, outputs, widths=(200, 200))


@pytest.mark.parametrize("score", [*SETS, *INTERVALS])
def test_ties_are_covered_in_batches_of_any_size(score: Any) -> None:
    """A float32 net rounds a row otherwise in another batch: all rows whose score is q must not drop out with that.

    Of 300 rows only 6 differ, and targets are a few integers: few scores, each of many rows.
    """
    needed = rank(0.9, 300)
    for seed in range(6):
        rng = seeded_rng(seed)
        some, which = torch.randn(6, 20, generator=rng), torch.randint(6, (300,), generator=rng)
        y = torch.randint(5 if score in SETS else 3, (300,), generator=rng)
        rows = TensorDataset(some[which], y)
        if score in SETS:
            options: dict[str, Any] = {"score": score, "penalty": 0.05, "k_reg": 1}
            rule: Any = fit_conformal_classifier(DeterministicPredictor(wide_net(seed, 5)), rows, **options, **one)
        else:
            rule = fit_conformal_regressor(Wobbling(wide_net(seed, 1)), rows, score=score, num_samples=3, **quiet)
        assert float(rule.evaluate(rows, batch_size=75, **quiet).coverage) >= needed / 300
        for size in (1, 2, 6):
            answers = rule.predict(some, batch_size=size, **quiet)
            if score in SETS:
                inside = answers.mask[which, y]
            else:
                low, high = (ends[which, 0] for ends in answers)
                inside = (low <= y) & (y <= high)
            assert inside.sum() >= needed, (seed, size)


@dataclass(frozen=True)
class Wobbling(Predictor):
    """Replicates around a float32 net: f_b(x) = (1 + z_b / 4) f(x)."""

    net_itself: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.net_itself

    def config(self) -> dict[str, Any]:
        return {}

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        out = self.net_itself(x)
        z = draw_normal(derive_keys(torch.arange(num_samples), seed, "z"), 1).to(out).view(-1, 1, 1)
        return SampleStream(num_samples, num_bytes(out), lambda size: iter(((1 + z / 4) * out).split(size)))


class Restless(nn.Module):
    """Passes float32 outputs on, but in batches of odd length moves each by up to 16 roundings, up or down."""

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.where(torch.arange(x.shape[1]) % 2 == 0, -1.0, 1.0)
        return x * (1 + len(x) % 2 * 16 * torch.finfo(x.dtype).eps * signs)


@pytest.mark.parametrize("score", SETS)
def test_order_of_equal_classes_ignores_rounding(score: Any) -> None:
    """Two classes are equally likely, the first is always true: in odd batches rounding puts the second before it."""
    x = torch.tensor([[-3.0, 2.0, 2.0, 1.0, -30.0], [9.0, -1.0, 0.5, 0.5, -1e9]]).repeat(60, 1)
    x = x + 1e-3 * torch.arange(120)[:, None]  # rows of their own, with uniforms of their own
    x[::2, 2], x[1::2, 3] = x[::2, 1], x[1::2, 2]
    y = torch.tensor([1, 2]).repeat(60)
    predictor, rows = DeterministicPredictor(Restless()), TensorDataset(x, y)
    rule = fit_conformal_classifier(
        predictor, rows, score=score, level=0.5, penalty=0.1, k_reg=1, batch_size=120, **one
    )
    even, odd = (rule.evaluate(rows, batch_size=size, **quiet).coverage for size in (120, 1))
    assert min(even, odd) >= rank(0.5, 120) / 120
    assert even == odd
    assert score == "threshold" or odd < 1
    masks = [rule.predict(x, batch_size=size, **quiet).mask for size in (120, 1)]
    assert (masks[0] != masks[1]).double().mean() < 0.001


@pytest.mark.parametrize("logit", [0.0, 3.0, -3.0])
def test_classes_within_rounding_are_in_order_of_their_numbers(logit: float) -> None:
    """Where z moves by 64 eps · |z|, log p moves by that and by its own rounding; beyond it the likelier leads."""
    tolerance = 2.0**-46 * (1 + abs(logit))
    for share, first in ((0.0, 1), (0.9, 1), (1.1, 2)):
        x = torch.tensor([[logit + 1.5, logit, logit + share * tolerance, -40.0]], dtype=torch.float64)
        rule = replace(RULE, quantiles=(float(x.softmax(1)[0, :2].sum()),))
        assert rule.predict(x, **quiet).labels == [[0, first]]


@pytest.mark.parametrize("score", ["absolute", "quantile"])
def test_small_outputs_are_covered_despite_rounding_of_large_ones(score: Any) -> None:
    """f(x) near 0 is the difference of numbers near 1: it moves by their rounding, far more than by its own."""

    class Cancelling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - len(x) % 2 * torch.finfo(x.dtype).eps * 4

    x = torch.tensor([1.0, 1e-6, -1.0]).repeat(100)[:, None]
    y = torch.tensor([1.0, 0.01, -1.0]).repeat(100)
    rule = fit_conformal_regressor(
        DeterministicPredictor(Cancelling()), TensorDataset(x, y), score=score, batch_size=300, **one
    )
    for size in (300, 1):
        assert rule.evaluate(TensorDataset(x, y), batch_size=size, **quiet).coverage == 1
    assert rule.quantiles[0] == pytest.approx(0.01, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_tolerance_hardly_changes_quantiles(dtype: torch.dtype) -> None:
    x, y = class_rows(0, 400).tensors
    z, noise = number_rows(0, 400).tensors[0][:, 0], torch.randn(400, 1, generator=seeded_rng(1), dtype=torch.float64)
    exact = fit_conformal_classifier(
        LOGITS, TensorDataset(x.to(dtype).double(), y), score="threshold", **one
    ).quantiles[0]
    rounded = fit_conformal_classifier(LOGITS, TensorDataset(x.to(dtype), y), score="threshold", **one).quantiles[0]
    assert exact - 2 * torch.finfo(dtype).eps < rounded < exact + min(200 * torch.finfo(dtype).eps, 0.03)
    exact = fit_conformal_regressor(LOGITS, TensorDataset(z.to(dtype).double(), z + noise), **one).quantiles[0]
    rounded = fit_conformal_regressor(LOGITS, TensorDataset(z.to(dtype), z + noise), **one).quantiles[0]
    assert exact <= rounded < exact + min(400 * torch.finfo(dtype).eps, 0.05)


def test_class_conditional_coverage() -> None:
    """Class 0 is rare and hard: one quantile for all classes leaves it out, its own does not."""
    level, n = 0.8, 300

    def make_rows(seed: int, num: int) -> TensorDataset:
        rng = seeded_rng(seed)
        labels = (torch.rand(num, generator=rng) > 0.15).long()
        logits = torch.stack([torch.zeros(num), 1 + 0.5 * labels + torch.randn(num, generator=rng)], 1)
        return TensorDataset(logits, labels)

    rates: dict[bool, list[Tensor]] = {True: [], False: []}
    for seed in range(30):
        data = make_rows(seed, 2 * n).tensors
        for class_conditional, found in rates.items():
            rows = TensorDataset(*(part[:n] for part in data))
            rule = fit_conformal_classifier(
                LOGITS, rows, level=level, score="threshold", class_conditional=class_conditional, **one
            )
            found.append(rule.evaluate(TensorDataset(*(part[n:] for part in data)), **quiet).class_coverage)
    alone, together = torch.stack(rates[True]), torch.stack(rates[False])  # (30, 2)
    error = alone.std(0) / math.sqrt(30)
    assert (alone.mean(0) > level - standard_errors(3) * error).all()
    assert together.mean(0)[0] < level - standard_errors(3) * error[0]


IGNORED = 255


def test_images_with_dependent_pixels_are_covered() -> None:
    """14 images of 10 equal pixels: the 14th of 14 covers 14/15 of new images, the 13th only 13/15 < 0.9.

    The rank ⌈0.9 (140 + 1)⌉ = 127 of pixels taken for independent would be the 13th image.
    """
    found = []
    for seed in range(100):
        y = torch.randn(114, 1, 1, 10, generator=seeded_rng(seed))[..., :1].expand(-1, -1, -1, 10)
        x = torch.zeros(114, 1, 1, 10)
        rule = fit_conformal_regressor(LOGITS, TensorDataset(x[:14], y[:14]), level=0.9, score="absolute", **one)
        found.append(rule.evaluate(TensorDataset(x[14:], y[14:]), **quiet).coverage.item())
    error = math.sqrt(14 / 15 / 15 * (1 / 100 + 1 / 16) / 100)
    assert abs(np.mean(found) - 14 / 15) < standard_errors(1) * error


def test_pixels_of_hard_images_are_covered() -> None:
    """Hard images have one label and easy ones ten; among all pixels together the hard ones would hardly count."""
    n, level, found = 20, 0.8, []
    for seed in range(60):
        rng = seeded_rng(seed)
        hard = torch.rand(n + 60, 1, generator=rng) < 0.5
        noise = torch.where(hard, 3.0, 0.5) * torch.randn(n + 60, 1, generator=rng)  # one for all pixels of an image
        missing = hard & (torch.arange(10) > 0)
        x = torch.stack([torch.zeros(n + 60, 10), noise.expand(-1, 10)], 1)
        labels = (torch.rand(n + 60, 1, generator=rng) < 0.5).long().expand(-1, 10).masked_fill(missing, IGNORED)
        y = noise.expand(-1, 10).masked_fill(missing, math.nan)[:, None]
        sets = fit_conformal_classifier(
            LOGITS, TensorDataset(x[:n], labels[:n]), level=level, ignore_index=IGNORED, **one
        )
        rows, fresh = TensorDataset(0 * x[:n, :1], y[:n]), TensorDataset(0 * x[n:, :1], y[n:])
        rule = fit_conformal_regressor(LOGITS, rows, level=level, ignore_index=math.nan, **one)
        covered = sets.evaluate(TensorDataset(x[n:], labels[n:]), ignore_index=IGNORED, **quiet).coverage
        found.append([covered, rule.evaluate(fresh, ignore_index=math.nan, **quiet).coverage.item()])
    for fractions in np.array(found).T:
        error = standard_errors(2) * np.std(fractions) / math.sqrt(60)
        assert level - error < np.mean(fractions) < level + 0.1


def test_images_count_equally_with_ignored_pixels() -> None:
    """Image k has k + 1 of ten pixels; the coverage is the mean over images of the fraction of covered pixels."""
    rng = seeded_rng(0)
    missing = torch.arange(10) > torch.arange(10)[:, None]  # (N, 10)
    x = torch.randn(10, 2, 10, generator=rng)
    labels = torch.randint(2, (10, 10), generator=rng).masked_fill(missing, IGNORED)
    sets = fit_conformal_classifier(LOGITS, TensorDataset(x, labels), level=0.5, ignore_index=IGNORED, **one)
    report: Any = sets.evaluate(TensorDataset(x, labels), ignore_index=IGNORED, **quiet)
    inside = sets.predict(x, **quiet).mask.gather(1, labels.where(~missing, 0)[:, None])[:, 0] & ~missing
    assert report.count == 55
    assert 0.5 <= report.coverage == pytest.approx((inside.sum(1) / (~missing).sum(1)).mean().item())
    y = torch.randn(10, 1, 10, generator=rng).masked_fill(missing[:, None], math.nan)
    rule = fit_conformal_regressor(LOGITS, TensorDataset(x[:, :1], y), level=0.5, ignore_index=math.nan, **one)
    report = rule.evaluate(TensorDataset(x[:, :1], y), ignore_index=math.nan, **quiet)
    low, high = rule.predict(x[:, :1], **quiet)
    inside = ((low <= y) & (y <= high))[:, 0]
    assert 0.5 <= report.coverage.item() == pytest.approx((inside.sum(1) / (~missing).sum(1)).mean().item())


@pytest.mark.parametrize("pixels", [2, 4, 150])
@pytest.mark.parametrize("seed", range(4))
def test_quantile_of_images_is_smallest_that_reaches_level(seed: int, pixels: int) -> None:
    """By trying every score, in fractions; 12 numbers below 150 have no common multiple in 64 bits."""
    rng = seeded_rng(seed)
    n, level = 12, (0.3, 0.5, 0.75, 0.9)[seed]
    counts = torch.randint(pixels // 3, pixels, (n,), generator=rng)
    scores = torch.rand(int(counts.sum()), generator=rng, dtype=torch.float64).round(decimals=1)
    parts = [part.tolist() for part in scores.split(counts.tolist()) if len(part)]
    expected = math.inf
    for q in sorted(scores.tolist(), reverse=True):
        reached = sum(Fraction(sum(s <= q for s in part), len(part)) for part in parts)
        if reached >= Fraction(str(level)) * (len(parts) + 1):
            expected = q
    assert conformal_quantile(scores, counts, level) == expected


def test_ignored_pixels_do_not_count() -> None:
    rng = seeded_rng(0)
    x, labels = 2 * torch.randn(80, 3, 4, generator=rng), torch.randint(3, (80, 4), generator=rng)
    labels[:, 3] = IGNORED
    labels[7] = IGNORED  # an image without any label
    counted = torch.arange(80) != 7
    for score in SETS:
        rule = fit_conformal_classifier(LOGITS, TensorDataset(x, labels), score=score, ignore_index=IGNORED, **one)
        assert rule.count == 79
        if score == "threshold":  # the other kinds' uniforms are named by all numbers of the image
            cut = fit_conformal_classifier(
                LOGITS, TensorDataset(x[counted][..., :3], labels[counted][:, :3]), score=score, **one
            )
            assert cut.quantiles == rule.quantiles
        report = rule.evaluate(TensorDataset(x, labels), ignore_index=IGNORED, **quiet)
        mask = rule.predict(x, **quiet).mask
        inside = [label in mask[i, :, j].nonzero() for i in range(80) for j, label in enumerate(labels[i]) if label < 3]
        assert report.coverage == pytest.approx(np.mean(inside))
        assert (report.count, int(report.class_count.sum()), int(report.size_count.sum())) == (237, 237, 237)
    y = x[:, :1] + 0.1 * torch.randn(80, 1, 4, generator=rng)
    y[:, :, 3], y[7] = -1.0, -1.0
    rule = fit_conformal_regressor(LOGITS, TensorDataset(x[:, :1], y), ignore_index=-1, **one)
    cut = fit_conformal_regressor(LOGITS, TensorDataset(x[counted][:, :1, :3], y[counted][..., :3]), **one)
    assert (rule.count, rule.quantiles) == (79, pytest.approx(cut.quantiles))
    assert_close_reports(
        rule.evaluate(TensorDataset(x[:, :1], y), ignore_index=-1.0, batch_size=7, **quiet),
        rule.evaluate(TensorDataset(x[counted][:, :1, :3], y[counted][..., :3]), **quiet),
    )


def test_outputs_may_have_different_missing_targets() -> None:
    x, y = number_rows(0, 200, 2).tensors
    y[:60, 0], y[150:, 1] = math.nan, math.nan
    rule = fit_conformal_regressor(Spread(), TensorDataset(x, y), ignore_index=math.nan, num_samples=5, **quiet)
    for c, rows in enumerate((slice(60, None), slice(150))):
        alone = TensorDataset(x[rows][:, :, c : c + 1], y[rows][:, c])
        single = fit_conformal_regressor(Spread(), alone, num_samples=5, **quiet)
        assert single.quantiles[0] == pytest.approx(rule.quantiles[c])
        found = rule.evaluate(TensorDataset(x, y), ignore_index=math.nan, **quiet)
        assert found.coverage[c] == single.evaluate(alone, **quiet).coverage[0]
    assert found.count == rule.count == 200
    assert found.bin_count.sum(1).tolist() == [140, 150]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_ignored_number_is_rounded_as_targets_are(dtype: torch.dtype) -> None:
    y = torch.rand(40, generator=seeded_rng(0), dtype=torch.float64)
    y[:15] = -0.1
    rows = TensorDataset(torch.zeros(40, 1), y.to(dtype))
    assert fit_conformal_regressor(LOGITS, rows, ignore_index=-0.1, **one).count == 25


def test_images_may_have_different_sizes() -> None:
    """Each counts the same: q is that of the fractions, whatever the number of pixels."""
    parts = [(torch.zeros(9, 1, k), torch.arange(1.0, 10)[:, None, None].expand(-1, -1, k)) for k in (1, 4)]
    rule = fit_conformal_regressor(LOGITS, parts, level=0.5, **one)
    assert rule.quantiles[0] == pytest.approx(5.0, rel=1e-4)  # 10 of 18 images reach 0.5 · 19
    sets = fit_conformal_classifier(LOGITS, [(torch.rand(9, 2, k), torch.zeros(9, k).long()) for k in (1, 2)], **one)
    assert sets.count == 18


# -- slow oracles --------------------------------------------------------------------------------------


def uniform_of(row: Tensor, seed: int) -> float:
    """From the bytes of the row's numbers."""
    words = b"".join(struct.pack("<d", value) for value in row.flatten().tolist())
    name = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little", signed=True)
    return draw_uniform(derive_keys(torch.tensor([name]), seed, "conformal"), torch.tensor([0])).item()


def slow_scores(logits: Tensor, score: str, penalty: float, k_reg: int, seed: int) -> np.ndarray:
    """s(x, c), one class of one row after another: (N, C)."""
    found = np.zeros(logits.shape)
    for i, row in enumerate(logits):
        weights = [math.exp(z) for z in row.tolist()]
        p = [w / sum(weights) for w in weights]
        u = uniform_of(row, seed)
        for c in range(len(p)):
            if score == "threshold":
                found[i, c] = 1 - p[c]
                continue
            larger = [d for d in range(len(p)) if p[d] > p[c] or (p[d] == p[c] and d < c)]
            found[i, c] = sum(p[d] for d in larger) + u * p[c]
            if score == "regularised":
                found[i, c] += penalty * max(0, len(larger) + 1 - k_reg)
    return found


@pytest.mark.parametrize("score", SETS)
@pytest.mark.parametrize("class_conditional", [False, True])
def test_sets_match_definition(score: Any, class_conditional: bool) -> None:
    n, level, penalty, k_reg, seed = 90, 0.8, 0.07, 2, 5
    (x, y), (fresh, _) = class_rows(0, n, 4).tensors, class_rows(1, 50, 4).tensors
    rows = TensorDataset(x, y)
    options: dict[str, Any] = {"class_conditional": class_conditional, "penalty": penalty, "k_reg": k_reg, "seed": seed}
    rule = fit_conformal_classifier(LOGITS, rows, level=level, score=score, **options, **one)
    scores = slow_scores(x, score, penalty, k_reg, seed)
    limits = []
    for c in range(4):
        group = sorted(scores[i, y[i]] for i in range(n) if not class_conditional or y[i] == c)
        limits.append(group[rank(level, len(group)) - 1])
    expected = [[c for c in range(4) if row[c] <= limits[c]] for row in slow_scores(fresh, score, penalty, k_reg, seed)]
    assert rule.predict(fresh, **quiet).labels == expected


@pytest.mark.parametrize("score", INTERVALS)
def test_intervals_match_definition(score: Any) -> None:
    n, level, B, sigma = 70, 0.8, 9, (0.4, 0.1)
    x, y = number_rows(0, n, 2).tensors
    fresh = number_rows(1, 20, 2).tensors[0]
    rows = TensorDataset(x, y)
    options: dict[str, Any] = {"noise_std": torch.tensor(sigma), "num_samples": B, "seed": 3}
    rule = fit_conformal_regressor(Spread(), rows, level=level, score=score, **options, **quiet)
    low, high = rule.predict(fresh, **quiet)
    samples, targets = (Spread().predict(part, B, seed=3).samples.numpy() for part in (x, fresh))
    for c in range(2):

        def ends(of: np.ndarray, i: int, c: int = c) -> tuple[float, float, float]:
            values = of[:, i, c]
            if score == "quantile":
                return np.quantile(values, (1 - level) / 2), np.quantile(values, (1 + level) / 2), 1.0
            scale = math.hypot(np.std(values, ddof=1), sigma[c]) if score == "normalised" else 1.0
            return values.mean(), values.mean(), scale

        scores = []
        for i in range(n):
            lower, upper, scale = ends(samples, i)
            scores.append(max(lower - y[i, c].item(), y[i, c].item() - upper) / scale)
        q = sorted(scores)[rank(level, n) - 1]
        for i in range(20):
            lower, upper, scale = ends(targets, i)
            assert low[i, c].item() == pytest.approx(lower - q * scale)
            assert high[i, c].item() == pytest.approx(upper + q * scale)


def test_gaussian_head_provides_noise() -> None:
    """y's standard deviation is σ(x), which the head predicts: the factor is then the normal quantile, everywhere."""
    rng = seeded_rng(0)
    sigma = torch.where(torch.rand(8000, 1, generator=rng) < 0.5, 0.1, 3.0)
    x = torch.stack([torch.zeros(8000, 1), torch.zeros(8000, 1), 2 * sigma.log()], 1)
    y = sigma * torch.randn(8000, 1, generator=rng)
    rows, fresh = TensorDataset(x[:4000], y[:4000, 0]), TensorDataset(x[4000:], y[4000:, 0])
    rule = fit_conformal_regressor(Spread(gaussian=True), rows, level=0.9, score="normalised", num_samples=3, **quiet)
    assert rule.gaussian
    z = scipy.stats.norm.ppf(0.95)
    error = math.sqrt(0.9 * 0.1 / 4000) / (2 * scipy.stats.norm.pdf(z))
    assert rule.quantiles[0] == pytest.approx(z, abs=standard_errors(3) * error)
    report = rule.evaluate(fresh, **quiet)
    filled = report.bin_count[0] > 0
    assert report.bin_std[0, filled].tolist() == pytest.approx([0.1, 3.0])
    spread = (0.09 * (1 / report.bin_count[0, filled] + 1 / 4000)).sqrt()
    assert ((report.bin_coverage[0, filled] - 0.9).abs() < standard_errors(3) * spread).all()
    # one width for both would cover all of the narrow half
    same = fit_conformal_regressor(Spread(gaussian=True), rows, level=0.9, score="absolute", num_samples=3, **quiet)
    assert same.evaluate(fresh, **quiet).bin_coverage[0, filled][0] == 1


# -- known facts ---------------------------------------------------------------------------------------


def test_allow_empty_false_fills_only_empty_sets() -> None:
    rows, x = class_rows(0, 100, 4), class_rows(1, 300, 4).tensors[0]
    rules = [fit_conformal_classifier(LOGITS, rows, level=0.3, allow_empty=allow, **one) for allow in (True, False)]
    with_empty, without = (rule.predict(x, **quiet) for rule in rules)
    empty = with_empty.size == 0
    assert 0 < empty.sum() < 300
    assert torch.equal(without.mask[~empty], with_empty.mask[~empty])
    assert (without.size[empty] == 1).all()
    assert torch.equal(without.mask[empty].long().argmax(1), x[empty].argmax(1))


@pytest.mark.parametrize("score", [*SETS, *INTERVALS])
def test_prediction_is_independent_of_batch(score: Any) -> None:
    if score in SETS:
        rule: Any = fit_conformal_classifier(LOGITS, class_rows(0, 100), score=score, **one)
        x, compute = class_rows(1, 60).tensors[0], lambda x, **options: rule.predict(x, **options, **quiet).mask
    else:
        rule = fit_conformal_regressor(Spread(), number_rows(0, 50), score=score, num_samples=7, **quiet)
        x, compute = (
            number_rows(1, 60).tensors[0],
            lambda x, **options: torch.cat(rule.predict(x, **options, **quiet), 1),
        )
    expected, order = compute(x), torch.randperm(60, generator=seeded_rng(0))
    torch.testing.assert_close(compute(x[:7]), expected[:7])  # means over replicates are rounded batch by batch
    torch.testing.assert_close(compute(x[order]), expected[order])
    torch.testing.assert_close(compute(x, batch_size=1), expected)


def test_uniforms_depend_on_row_values_only() -> None:
    """Two classes of equal probability: the likelier (first) is in the set iff u/2 ≤ q."""
    x = torch.rand(500, 3)
    u = torch.tensor([uniform_of(row, 0) for row in x])
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > p_value(1)
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    rule = replace(RULE, predictor=DeterministicPredictor(net), quantiles=(0.2,))
    mask = rule.predict(x, **quiet).mask
    assert mask[:, 0].tolist() == (u / 2 <= 0.2).tolist()
    signed = torch.where(torch.rand(500, 3, generator=seeded_rng(2)) < 0.5, 0.0, x)
    positive = rule.predict(signed, **quiet).mask
    assert torch.equal(rule.predict(torch.where(signed == 0, -0.0, signed), **quiet).mask, positive)
    net.double()  # a copy of the input in double precision has the same numbers
    assert torch.equal(rule.predict(x.double(), **quiet).mask, mask)


def test_tuple_and_dict_inputs() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    logits, labels = class_rows(0, 80).tensors
    some, rest = 0.25 * logits, 0.75 * logits
    rows = TensorDataset(some, rest, labels)
    rule = fit_conformal_classifier(DeterministicPredictor(Sum()), rows, **one)
    mask = rule.predict((some, rest), **quiet).mask
    assert torch.equal(rule.predict((some[:9], rest[:9]), **quiet).mask, mask[:9])
    assert torch.equal(rule.predict({"b": rest, "a": some}, **quiet).mask, mask)
    assert 0.9 <= rule.evaluate(rows, **quiet).coverage < 1


def assert_close_reports(a: Any, b: Any) -> None:
    for name, value in vars(a).items():
        torch.testing.assert_close(value, getattr(b, name), equal_nan=True)


def test_result_is_independent_of_loader_and_batch_size() -> None:
    rows, fresh = class_rows(0, 101), class_rows(1, 53)
    rule = fit_conformal_classifier(LOGITS, rows, **one)
    assert fit_conformal_classifier(LOGITS, rows, batch_size=7, **one) == rule
    assert fit_conformal_classifier(LOGITS, DataLoader(rows, batch_size=10), **one) == rule
    assert_close_reports(*(rule.evaluate(fresh, batch_size=size, **quiet) for size in (8, 53)))
    intervals = fit_conformal_regressor(Spread(), number_rows(0, 50), num_samples=4, **quiet)
    assert fit_conformal_regressor(Spread(), number_rows(0, 50), num_samples=4, batch_size=9, **quiet) == intervals
    assert_close_reports(*(intervals.evaluate(number_rows(1, 40), batch_size=size, **quiet) for size in (3, 40)))


def test_set_report_matches_counts() -> None:
    rows, fresh = class_rows(0, 100), class_rows(1, 200)
    x, y = fresh.tensors
    rule = fit_conformal_classifier(LOGITS, rows, level=0.6, **one)
    sets, report = rule.predict(x, **quiet), rule.evaluate(fresh, **quiet)
    inside = [label in classes for label, classes in zip(y.tolist(), sets.labels, strict=True)]
    sizes = [len(classes) for classes in sets.labels]
    assert sets.size.tolist() == sizes
    assert (report.count, report.level) == (200, 0.6)
    assert report.coverage == pytest.approx(np.mean(inside))
    assert report.size_count.shape == (7,)
    assert report.mean_size == pytest.approx(np.mean(sizes))
    assert report.empty == pytest.approx(np.mean([size == 0 for size in sizes]))
    assert report.singleton == pytest.approx(np.mean([size == 1 for size in sizes]))
    for c in range(6):
        group = [covered for covered, label in zip(inside, y.tolist(), strict=True) if label == c]
        assert int(report.class_count[c]) == len(group)
        assert float(report.class_coverage[c]) == pytest.approx(np.mean(group))
    for k in range(7):
        group = [covered for covered, size in zip(inside, sizes, strict=True) if size == k]
        assert int(report.size_count[k]) == len(group)
        expected = np.mean(group) if group else math.nan
        assert float(report.size_coverage[k]) == pytest.approx(expected, nan_ok=True)
    assert "coverage" in str(report)
    assert "100 calibration examples" in str(rule)


def test_interval_report_matches_metrics() -> None:
    rows, fresh = number_rows(0, 100, 2), number_rows(1, 203, 2)
    x, y = fresh.tensors
    rule = fit_conformal_regressor(Spread(), rows, level=0.6, score="normalised", num_samples=20, **quiet)
    low, high = rule.predict(x, **quiet)
    report = rule.evaluate(fresh, num_bins=4, **quiet)
    std = Spread().summarize(x, 20).std
    for c in range(2):
        assert report.coverage[c] == interval_coverage(low[:, c], high[:, c], y[:, c])
        torch.testing.assert_close(report.mean_width[c], mean_width(low[:, c], high[:, c]))
        torch.testing.assert_close(report.interval_score[c], interval_score(low[:, c], high[:, c], y[:, c], level=0.6))
        order = std[:, c].argsort()
        inside = ((low <= y) & (y <= high))[:, c].double()
        assert report.bin_count[c].tolist() == [51, 51, 51, 50]
        start = 0
        for k, size in enumerate(report.bin_count[c].tolist()):
            group = order[start : start + size]
            assert float(report.bin_coverage[c, k]) == pytest.approx(inside[group].mean().item())
            assert float(report.bin_std[c, k]) == pytest.approx(std[group, c].mean().item())
            start += size
    whole = rule.evaluate(fresh, num_bins=1, **quiet)
    torch.testing.assert_close(whole.bin_coverage[:, 0], report.coverage)
    assert "interval_score" in str(report)
    assert "normalised score" in str(rule)


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line]


def test_reports_print_what_was_counted() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True], [True, False, False]])
    rule = replace(RULE, quantiles=(0.5,), num_samples=1)
    report = rule.evaluate(TensorDataset(*class_rows(1, 200, 3).tensors), **quiet)
    printed = cells(str(report))
    assert printed[:2] == [["N", "=", "200"], ["metric", "value"]]
    values = {row[0]: row[1] for row in printed[2:7]}
    assert values == {name: f"{getattr(report, name):.4g}" for name in values}
    assert list(values) == ["level", "coverage", "mean_size", "empty", "singleton"]
    sizes = [k for k in range(4) if report.size_count[k] > 0]
    assert [row[0] for row in printed[8 : 8 + len(sizes)]] == [str(k) for k in sizes]
    assert [row[2] for row in printed[8 : 8 + len(sizes)]] == [str(int(report.size_count[k])) for k in sizes]
    assert [row[1] for row in printed[-3:]] == [f"{float(value):.4g}" for value in report.class_coverage]
    assert PredictionSets(mask).size.tolist() == [2, 0, 3, 1]
    assert PredictionSets(mask).labels == [[0, 2], [], [0, 1, 2], [0]]

    intervals = fit_conformal_regressor(Spread(), number_rows(0, 60, 2), num_samples=4, **quiet)
    both = intervals.evaluate(number_rows(1, 50, 2), num_bins=2, **quiet)
    printed = cells(str(both))
    assert printed[0] == ["N", "=", "50,", "level", "0.9"]
    assert [row[:2] for row in printed[2:4]] == [[str(c), f"{float(both.coverage[c]):.4g}"] for c in range(2)]
    assert [row[0] for row in printed[5:]] == ["0", "0", "1", "1"]
    assert [int(row[-1]) for row in printed[5:]] == both.bin_count.flatten().tolist()


def test_rules_print_their_quantiles() -> None:
    printed = cells(str(replace(RULE, quantiles=(0.25,), count=1234)))
    assert "1,234" in printed[0]
    assert printed[2] == ["all", "0.25"]
    several = cells(str(replace(RULE, quantiles=(0.25, math.inf, 0.5, math.inf))))
    assert [row[0] for row in several[2:6]] == ["0", "1", "2", "3"]
    assert several[1] == ["class", "quantile"]
    assert several[-1][-2:] == ["1,", "3"]  # in every set
    assert cells(str(replace(BAND, quantiles=(0.25, 0.5))))[1] == ["output", "quantile"]


def test_scores_are_compared_in_double_precision() -> None:
    x = class_rows(3, 20).tensors[0]
    scores = 1 - x.softmax(1)
    for k in range(20):
        for q, inside in ((float(scores[k, 2]), True), (math.nextafter(float(scores[k, 2]), 0), False)):
            rule = replace(RULE, score="threshold", quantiles=(q,))
            assert bool(rule.predict(x[k : k + 1], **quiet).mask[0, 2]) == inside


@pytest.mark.parametrize(
    ("dtype", "allowance"),
    [(torch.float64, 2.0**-46), (torch.float32, 2.0**-17), (torch.float16, 2.0**-7), (torch.bfloat16, 2.0**-7)],
)
def test_allowance_for_rounding_is_that_of_the_documentation(dtype: torch.dtype, allowance: float) -> None:
    """64 eps, at most 2⁻⁷, of the magnitude of the output itself and of the mean magnitude."""
    y = torch.zeros(20, 1, dtype=dtype)
    rule = fit_conformal_regressor(LOGITS, TensorDataset(y + 4.0, y[:, 0]), **one)
    assert rule.quantiles[0] == 4.0 * (1 + 2 * allowance)
    for center in (-4.0, 4.0):
        x = torch.tensor([[center], [1.0]], dtype=dtype).expand(20, 2, 1)
        summary = Spread().summarize(x[:1], 7, quantiles=(0.05, 0.95))
        low, high, std = (float(v) for v in (summary.quantile(0.05), summary.quantile(0.95), summary.std))
        band = fit_conformal_regressor(
            Spread(), TensorDataset(x, torch.full((20,), 10.0)), score="quantile", num_samples=7, **quiet
        )
        expected = 10.0 - high + 2 * allowance * (max(abs(low), abs(high)) + std)
        assert band.quantiles[0] == pytest.approx(expected, rel=1e-9)
    logits = torch.tensor([[0.0, 0.0]], dtype=dtype).expand(20, 2)
    sets = fit_conformal_classifier(LOGITS, TensorDataset(logits, torch.zeros(20).long()), score="threshold", **one)
    of_probabilities = 2.0**-46 if dtype == torch.float64 else 2.0**-17  # which are in single precision at least
    assert sets.quantiles[0] == 0.5 * (1 + of_probabilities) + of_probabilities


def test_config_round_trip_through_json() -> None:
    rows, x = class_rows(0, 12, 6), class_rows(1, 20).tensors[0]
    rule = fit_conformal_classifier(LOGITS, rows, class_conditional=True, **one)  # two rows a class: all infinite
    assert math.inf in rule.quantiles
    assert ConformalClassifier.from_config(json.loads(json.dumps(rule.config(), allow_nan=False)), LOGITS) == rule
    options: dict[str, Any] = {"score": "quantile", "noise_std": 0.1, "num_samples": 4}
    intervals = fit_conformal_regressor(Spread(), number_rows(0, 30, 2), **options, **quiet)
    assert intervals.noise_std == (0.1,)
    again = ConformalRegressor.from_config(json.loads(json.dumps(intervals.config(), allow_nan=False)), Spread())
    assert again == intervals
    assert rule.predict(x, **quiet).mask.shape == (20, 6)


def test_pixels_have_own_sets_and_uniforms() -> None:
    rng = seeded_rng(0)
    logits = 2 * torch.randn(60, 3, 4, 5, generator=rng)
    labels = torch.randint(3, (60, 4, 5), generator=rng)
    rows = TensorDataset(logits[:40], labels[:40])
    for score in SETS:
        rule = fit_conformal_classifier(LOGITS, rows, score=score, **one)
        sets = rule.predict(logits[40:], **quiet)
        assert sets.mask.shape == (20, 3, 4, 5)
        assert torch.equal(rule.predict(logits[40:43], **quiet).mask, sets.mask[:3])
        report = rule.evaluate(TensorDataset(logits[40:], labels[40:]), **quiet)
        assert report.count == 400
        assert report.coverage > 0.85
    equal = torch.zeros(1, 2, 30, 30)
    adaptive = replace(RULE, quantiles=(0.25,))
    assert 300 < adaptive.predict(equal, **quiet).mask[0, 0].sum() < 600  # u ≤ ½ for about half of 900 pixels


def test_no_penalty_is_no_regularisation() -> None:
    options: tuple[dict[str, Any], ...] = ({"score": "adaptive"}, {"score": "regularised", "penalty": 0, "k_reg": 0})
    plain, regularised = (fit_conformal_classifier(LOGITS, class_rows(0, 50), **each, **one) for each in options)
    assert regularised.quantiles == plain.quantiles


def test_quantiles_of_classes_and_outputs_apply_to_pixels() -> None:
    pixels = torch.randn(5, 3, 2, 3, generator=seeded_rng(0))
    rule = replace(RULE, score="threshold", quantiles=(0.3, 0.6, 0.9))
    alone = rule.predict(pixels.movedim(1, -1).flatten(0, 2), **quiet).mask
    assert torch.equal(rule.predict(pixels, **quiet).mask.movedim(1, -1).flatten(0, 2), alone)
    low, high = replace(BAND, quantiles=(0.5, 1.0, 2.0)).predict(pixels, **quiet)
    torch.testing.assert_close(high - low, torch.tensor([1.0, 2.0, 4.0]).double().view(3, 1, 1).expand(5, -1, 2, 3))


def test_single_logit_is_two_classes() -> None:
    x = torch.randn(200, 1, generator=seeded_rng(0))
    y = (torch.rand(200, 1, generator=seeded_rng(1)) < x.sigmoid()).float()
    rule = fit_conformal_classifier(LOGITS, TensorDataset(x, y), **one)
    assert rule.predict(x, **quiet).mask.shape == (200, 2)
    assert rule.evaluate(TensorDataset(x, y), **quiet).coverage >= 0.9


def test_empty_input_has_empty_result() -> None:
    rule = fit_conformal_classifier(LOGITS, class_rows(0, 50), **one)
    assert rule.predict(torch.zeros(0, 6), **quiet).mask.shape == (0, 6)
    assert rule.predict(torch.zeros(0, 6), **quiet).labels == []
    intervals = fit_conformal_regressor(
        LOGITS, TensorDataset(torch.zeros(20, 1), torch.rand(20)), score="absolute", **one
    )
    low, _ = intervals.predict(torch.zeros(0, 1), **quiet)
    assert (low.shape, low.dtype) == ((0, 1), torch.float64)


def test_quantile_band_is_narrowed_to_its_middle_at_most() -> None:
    """Replicates spread over ±10 where y is 0, and over nothing in other places: there only the middle remains."""
    wide = torch.tensor([0.0, 10.0]).view(1, 2, 1).expand(40, 2, 1)
    rule = fit_conformal_regressor(Spread(), TensorDataset(wide, torch.zeros(40)), score="quantile", **quiet)
    assert rule.quantiles[0] < 0
    low, high = rule.predict(torch.tensor([[[3.0], [0.0]], [[0.0], [10.0]]]), **quiet)
    assert low[0].item() == high[0].item() == pytest.approx(3.0)
    assert low[1] <= 0 <= high[1]
    assert (high - low)[1] < 20


@pytest.mark.parametrize("kind", ["classes", "intervals", "gaussian"])
def test_options_reach_the_predictor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(title: str, total: int, *, enabled: bool = True) -> Any:
        shown.append(enabled)
        return nullcontext(lambda text: None)

    shown: list[bool] = []
    monkeypatch.setattr(_batching, "progress_bar", show)
    x, y = number_rows(0, 50).tensors
    rows: dict[str, TensorDataset] = {
        "classes": TensorDataset(x.repeat(1, 1, 3), (y[:, 0] > 0).long()),
        "intervals": TensorDataset(x, y),
        "gaussian": TensorDataset(torch.cat([x, x[:, 1:]], 1), y),
    }
    data, fit = rows[kind], fit_conformal_classifier if kind == "classes" else fit_conformal_regressor
    CALLS.clear()
    rule: Any = fit(Recording(gaussian=kind == "gaussian"), data, num_samples=3, seed=5, batch_size=20, **quiet)
    assert CALLS[-3:] == [(20, 3, 5), (20, 3, 5), (10, 3, 5)]
    for call, first in ((rule.predict, data.tensors[0]), (rule.evaluate, data)):
        CALLS.clear()
        call(first, batch_size=30, **quiet)
        assert CALLS == [(30, 3, 5), (20, 3, 5)]
    assert shown == [False] * 3


@pytest.mark.parametrize("score", ["absolute", "normalised"])
def test_negated_data_have_negated_intervals(score: Any) -> None:
    """To the bit, however large the outputs are."""
    x, y = number_rows(0, 50).tensors
    x[:, 0], y = x[:, 0] + 1e6, y + 1e6
    bands = []
    for sign in (1, -1):
        rule = fit_conformal_regressor(Spread(), TensorDataset(sign * x, sign * y), score=score, num_samples=7, **quiet)
        bands.append(rule.predict(sign * x, **quiet))
    (low, high), (negated_low, negated_high) = bands
    assert torch.equal(low, -negated_high)
    assert torch.equal(high, -negated_low)


# -- invalid arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "needed"), [(0.9, 9), (0.95, 19), (0.07, 1), (0.99, 99)])
def test_minimum_number_of_calibration_examples(level: float, needed: int) -> None:
    assert fit_conformal_classifier(LOGITS, class_rows(0, needed), level=level, **one).count == needed
    if needed > 1:
        match = f"got calibration_data='{needed - 1} examples'.*at least {needed} "
        with pytest.raises(ArgumentError, match=match):
            fit_conformal_classifier(LOGITS, class_rows(0, needed - 1), level=level, **one)
        x, y = number_rows(0, needed + 1, 2).tensors
        y[:2, 1] = math.nan  # of the second output too few count
        options: dict[str, Any] = {"level": level, "ignore_index": math.nan, "num_samples": 2}
        with pytest.raises(ArgumentError, match=match):
            fit_conformal_regressor(Spread(), TensorDataset(x, y), **options, **quiet)


def test_rank_uses_level_as_typed() -> None:
    """0.07 · 100 is a little above 7 in floating point; its rank is 7."""
    y = torch.arange(1.0, 100.0)
    rule = fit_conformal_regressor(LOGITS, TensorDataset(torch.zeros(99, 1), y), level=0.07, score="absolute", **one)
    assert rule.quantiles[0] == pytest.approx(7.0, rel=1e-4)  # and no 8


def test_class_with_few_examples_is_in_every_set() -> None:
    x, y = class_rows(0, 200, 3).tensors
    counted = y != 2
    counted[(y == 2).nonzero()[:5]] = True
    rule = fit_conformal_classifier(LOGITS, TensorDataset(x[counted], y[counted]), class_conditional=True, **one)
    assert [math.isinf(q) for q in rule.quantiles] == [False, False, True]
    assert rule.predict(x, **quiet).mask[:, 2].all()


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + math.inf


RULE = fit_conformal_classifier(LOGITS, class_rows(0, 50), **one)
BAND = fit_conformal_regressor(
    LOGITS, TensorDataset(torch.zeros(20, 1), torch.rand(20, generator=seeded_rng(0))), **one
)

OVERFLOW = DeterministicPredictor(Overflow())
CLASS_ROWS, PIXELS = class_rows(0, 50), TensorDataset(torch.zeros(50, 3, 2), torch.zeros(50, 2).long())
classifier, regressor = (partial(fit, LOGITS, **one) for fit in (fit_conformal_classifier, fit_conformal_regressor))


def constant(outputs: int, y: Tensor) -> TensorDataset:
    return TensorDataset(torch.zeros(50, outputs), y)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: fit_conformal_classifier(nn.Identity(), CLASS_ROWS), "predictor"),
        (lambda: fit_conformal_regressor(nn.Identity(), CLASS_ROWS), "predictor"),
        (lambda: classifier(CLASS_ROWS, level=1.0), "level"),
        (lambda: regressor(CLASS_ROWS, level=0.0), "level"),
        (lambda: classifier(CLASS_ROWS, score="best"), "score"),
        (lambda: regressor(CLASS_ROWS, score="best"), "score"),
        (lambda: classifier(CLASS_ROWS, penalty=-1.0), "penalty"),
        (lambda: classifier(CLASS_ROWS, penalty=math.inf), "penalty"),
        (lambda: classifier(CLASS_ROWS, k_reg=-1), "k_reg"),
        (lambda: classifier(constant(3, torch.full((50,), 9)), ignore_index=9), "calibration_data"),
        (lambda: PredictionSets(torch.ones(2, 3, 4)).labels, "mask"),
        (lambda: fit_conformal_classifier(OVERFLOW, CLASS_ROWS, **one), "predictor"),
        (lambda: fit_conformal_regressor(OVERFLOW, number_rows(0, 50), **one), "predictor"),
        (lambda: RULE.evaluate(constant(6, torch.full((50,), 9)), ignore_index=9, **quiet), "data"),
        (lambda: BAND.evaluate(constant(1, torch.full((50,), math.nan)), ignore_index=math.nan, **quiet), "data"),
        (lambda: BAND.evaluate(constant(1, torch.rand(50)), num_bins=0, **quiet), "num_bins"),
        (lambda: BAND.predict(torch.zeros(5, 2), **quiet), "x"),
        (lambda: classifier(constant(3, torch.full((50,), 3))), "labels"),
        (lambda: classifier(TensorDataset(torch.full((50, 3), math.nan), torch.zeros(50).long())), "x"),
        (lambda: classifier(PIXELS, class_conditional=True), "class_conditional"),
        (lambda: regressor(constant(1, torch.full((50,), math.nan))), "data"),
        (lambda: regressor(constant(1, torch.rand(50)), score="normalised"), "predictor"),
        (lambda: regressor(constant(3, torch.rand(50))), "targets.shape"),
        (lambda: regressor(constant(2, torch.rand(50)), score="quantile"), "score"),
        (lambda: regressor(constant(1, torch.rand(50)), noise_std=-1.0), "noise_std"),
        (lambda: regressor(constant(1, torch.rand(50)), noise_std=math.inf), "noise_std"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
