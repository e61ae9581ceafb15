"""Statistics of samples against slow references, the stream against all samples at once, and wrong arguments."""

import copy
import math
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from _nets import Stored, noise
from _reference import figures, least_squares, standard_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuboots import ArgumentError, load
from neuboots._prng import derive_keys, draw_uniform
from neuboots.methods import DeterministicPredictor
from neuboots.nets import MLP
from neuboots.prediction import (
    Moments,
    Prediction,
    Predictor,
    SampleStream,
    Summary,
    check_summarized,
    class_logits,
    class_probabilities,
    collect_samples,
    conformal_quantile,
    draw_member_order,
    num_bytes,
    residual_std,
    split_gaussian,
    stream_forward_passes,
    stream_members,
    summarize_stream,
)

STATISTICS = ["mean", "std", "probs", "labels", "confidence", "entropy", "expected_entropy", "mutual_information"]
SHAPES = [(7, 3), (5, 1), (2, 4, 3, 2), (2, 1, 3, 2), (3, 2, 4)]
many = settings(deadline=None, max_examples=40, derandomize=True)
random = partial(noise, dtype=torch.float64)


@dataclass(frozen=True)
class Fake(Predictor):
    """f_b(x) = (x ⊙ a_b) V with a_b drawn by (seed, b); `shape` is that of one output. Nothing is trained."""

    shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float64
    moments: Moments | None = None

    @property
    def net(self) -> nn.Module:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        V = random(x.shape[1], math.prod(self.shape), dtype=self.dtype)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                keys = derive_keys(torch.arange(start, min(start + size, num_samples)), seed)
                a = (4 * draw_uniform(keys[:, None], torch.arange(x.shape[1])) - 2).to(self.dtype)  # (B, D)
                terms = ((a[:, d, None] * x[:, d])[..., None] * V[d] for d in range(x.shape[1]))
                yield sum(terms).view(len(keys), len(x), *self.shape)  # one by one: a product may round by its size

        size = len(x) * math.prod(self.shape) * torch.empty(0, dtype=self.dtype).element_size()
        return SampleStream(num_samples, size, chunks, self.moments)


# -- statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [1, 2, 9, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_match_definitions(shape: tuple[int, ...], B: int) -> None:
    samples = 2 * random(B, *shape, seed=B)
    prediction, expected = Prediction(samples), figures(samples.numpy())
    assert prediction.num_samples == B
    for name in STATISTICS:
        found = getattr(prediction, name)
        torch.testing.assert_close(found.double(), torch.from_numpy(expected[name]), rtol=1e-12, atol=1e-13, msg=name)
    torch.testing.assert_close(prediction.variance, torch.from_numpy(expected["std"] ** 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probabilities_sum_to_one(shape: tuple[int, ...]) -> None:
    for samples in (random(50, *shape, dtype=torch.float32), 1e4 * random(50, *shape, dtype=torch.float32)):
        prediction = Prediction(samples)
        total = prediction.probs.sum(1)
        # fifty float32 roundings, 6e-8 each, of numbers that add up to 1
        assert (total - 1).abs().max() < 50 * torch.finfo(torch.float32).eps
        assert prediction.probs.min() >= 0
        for figure in (prediction.entropy, prediction.expected_entropy, prediction.mutual_information):
            assert figure.isfinite().all()
            assert (figure >= 0).all()


def test_single_output_is_a_binary_logit() -> None:
    samples = random(20, 6, 1)
    one, two = Prediction(samples), Prediction(torch.cat([torch.zeros_like(samples), samples], 2))
    assert one.probs.shape == (6, 2)
    for name in STATISTICS[2:]:
        torch.testing.assert_close(getattr(one, name), getattr(two, name))
    np.testing.assert_allclose(one.probs[:, 1], scipy.special.expit(samples[..., 0].numpy()).mean(0))


@pytest.mark.parametrize("B", [1, 2, 9])
@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 3, 2)], ids=str)
def test_statistics_of_independent_labels_match_definitions(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], B: int
) -> None:
    """From samples in one part and in several, and from sums over chunks and over single replicates."""
    samples = 2 * random(B, *shape, seed=B)
    predictor, x = Stored(samples), torch.arange(shape[0])[:, None]
    found = [Prediction(samples, independent=True), predictor.as_independent().summarize(x, B)]
    assert not predictor.independent
    assert not predictor.predict(x, B).independent
    monkeypatch.setattr("neuboots.prediction._SMALL_BYTES", 1)
    found += [predictor.as_independent().predict(x, B), predictor.as_independent().summarize(x, B)]
    expected = figures(samples.numpy(), independent=True)
    for statistics in found:
        assert statistics.independent
        for name in STATISTICS:
            value = getattr(statistics, name).double()
            torch.testing.assert_close(value, torch.from_numpy(expected[name]), rtol=1e-12, atol=1e-13, msg=name)
        p = statistics.probs
        assert torch.equal(statistics.class_probs, torch.stack([1 - p, p], 1))


def test_samples_of_several_chunks_keep_independent_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuboots.prediction._MAX_BYTES", 1)
    predictor = Fake().as_independent()
    prediction = predictor.predict(random(4, 5), 3)
    torch.testing.assert_close(prediction.probs, prediction.samples.sigmoid().mean(0))


def test_independent_labels_of_extreme_and_half_precision_outputs() -> None:
    samples = torch.tensor([[[-1e4, 1e4, 0.0, torch.nan]]])
    prediction = Prediction(samples, independent=True)
    assert prediction.probs[0, :3].tolist() == [0.0, 1.0, 0.5]
    assert prediction.labels.tolist() == [[0, 1, 0, -1]]
    assert prediction.labels.dtype == torch.int64
    assert Prediction(samples[..., :3], independent=True).entropy.item() == pytest.approx(math.log(2))
    half = random(3, 4, 2, dtype=torch.float16)
    for found in (
        Prediction(half, independent=True),
        Stored(half).as_independent().summarize(torch.arange(4)[:, None], 3),
    ):
        assert found.probs.dtype == torch.float32
        torch.testing.assert_close(found.probs, half.float().sigmoid().mean(0))


def test_a_single_output_is_the_logit_of_two_classes_for_any_loss() -> None:
    samples = random(20, 6, 1)
    predictor, x = Stored(samples).as_independent(), torch.arange(6)[:, None]
    plain = Prediction(samples)
    single = [Prediction(samples, independent=True), predictor.predict(x, 20)]
    for found in (*single, predictor.summarize(x, 20)):
        assert not found.independent
        assert found.class_probs is found.probs
        for name in STATISTICS:
            torch.testing.assert_close(getattr(found, name), getattr(plain, name))


def test_class_logits_of_independent_labels_have_an_axis_of_their_own() -> None:
    z = random(5, 4, 3, 2)
    assert class_logits(z, 2, independent=False) is z
    assert class_logits(z[:, :, :1], 2, independent=True).shape == (5, 4, 1, 2)
    assert class_logits(z[:, :, :2], 2, independent=True).shape == (5, 4, 1, 2, 2)
    probs = class_probabilities(class_logits(z, 2, independent=True), 2)
    torch.testing.assert_close(probs, torch.stack([1 - z.sigmoid(), z.sigmoid()], 2))


def test_classes_are_exclusive_by_default() -> None:
    z = random(5, 4, 3)
    torch.testing.assert_close(class_probabilities(z, 2), z.softmax(2))
    assert not Summary(1, z[0], z[0], z[0], z[0, :, 0]).independent
    assert not SampleStream(5, 1, partial(torch.split, z)).independent
    assert not Prediction(z).independent


def test_mutual_information_is_not_negative() -> None:
    """Nor hides what is there: replicates 10⁻³ apart differ by about 10⁻⁷ nats, far above rounding in float64."""
    for seed in range(20):
        near = random(1, 50, 5, seed=seed) + 1e-3 * random(20, 50, 5, seed=seed + 100)
        for dtype in (torch.float32, torch.float64):
            assert (Prediction(near.to(dtype)).mutual_information >= 0).all()
        assert (Prediction(near).mutual_information > 0).all()


def test_rounding_is_no_mutual_information() -> None:
    """Equal replicates of many classes, whose entropy is large, and of classes that are nearly certain."""
    for scale, classes in ((1.0, 50_000), (8.0, 3), (4.0, 30)):
        samples = (scale * random(1, 40, classes, dtype=torch.float32)).expand(7, -1, -1)
        assert Prediction(samples).mutual_information.max() == 0


def test_no_inputs_have_no_statistics() -> None:
    predictor = DeterministicPredictor(nn.Linear(5, 3))
    for found in (Prediction(torch.zeros(5, 0, 3)), predictor.summarize(X5[:0], 5, quantiles=(0.5,))):
        assert found.mean.shape == found.std.shape == found.probs.shape == found.quantile(0.5).shape == (0, 3)
        assert found.entropy.shape == found.mutual_information.shape == found.labels.shape == (0,)


def test_exact_moments_take_precedence() -> None:
    samples = random(10, 4, 3)
    moments = Moments(random(4, 3, seed=1), random(4, 3, seed=2).abs())
    prediction, without = Prediction(samples, moments), Prediction(samples)
    assert prediction.mean is moments.mean
    assert prediction.std is moments.std
    z = scipy.stats.norm.ppf(0.95)
    low, high = prediction.interval(0.9, method="normal")
    torch.testing.assert_close((low + high) / 2, moments.mean)
    torch.testing.assert_close((high - low) / 2, z * moments.std)
    for name in STATISTICS[2:]:  # classes and quantiles are known from the samples only
        assert torch.equal(getattr(prediction, name), getattr(without, name))
    assert torch.equal(prediction.quantile(0.3), without.quantile(0.3))


# -- intervals -----------------------------------------------------------------------------------------


@many
@given(st.integers(1, 60), st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]))
def test_quantile_matches_numpy_and_torch(B: int, q: float, dtype: torch.dtype) -> None:
    samples = random(B, 3, 2, seed=B, dtype=dtype)
    ours = Prediction(samples).quantile(q)
    assert ours.dtype == dtype
    tolerance = {"rtol": 0, "atol": 100 * torch.finfo(dtype).eps}  # ranks up to 60, samples below 4
    theirs = torch.from_numpy(np.quantile(samples.double().numpy(), q, axis=0))
    torch.testing.assert_close(ours.double(), theirs, **tolerance)
    torch.testing.assert_close(ours, torch.quantile(samples, q, dim=0), **tolerance)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 3, 2)], ids=str)
def test_intervals_match_numpy_and_scipy(shape: tuple[int, ...], level: float) -> None:
    samples = random(41, *shape)
    prediction, array = Prediction(samples), samples.numpy()
    low, high = prediction.interval(level, method="percentile")
    np.testing.assert_allclose(low, np.quantile(array, (1 - level) / 2, axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(high, np.quantile(array, (1 + level) / 2, axis=0), rtol=1e-12, atol=1e-12)
    low, high = prediction.interval(level, method="normal")
    theirs = scipy.stats.norm.interval(level, loc=array.mean(0), scale=array.std(0, ddof=1))
    np.testing.assert_allclose(low, theirs[0])
    np.testing.assert_allclose(high, theirs[1])


@pytest.mark.parametrize("holder", ["Prediction", "Summary"])
def test_noise_per_output_applies_to_all_pixels(holder: str) -> None:
    """σ is (C,), as residual_std gives it, also where there are C × W pixels to mistake it for."""
    predictor, x = Fake((3, 4, 3)), random(2, 5)
    figures = predictor.predict(x, 20) if holder == "Prediction" else predictor.summarize(x, 20)
    noise = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    low, high = figures.prediction_interval(0.9, noise_std=noise)
    assert low.shape == figures.mean.shape
    half = scipy.stats.norm.ppf(0.95) * (figures.std**2 + noise.view(3, 1, 1) ** 2).sqrt()
    torch.testing.assert_close((high - low) / 2, half)
    torch.testing.assert_close(figures.predictive_std(0.0), figures.std)
    assert Prediction(torch.zeros(2, 1, 3)).predictive_std(noise).dtype == torch.float32
    for other in (2, torch.tensor(2.0), torch.full_like(figures.mean, 2.0), torch.full((1,), 2.0)):
        half = scipy.stats.norm.ppf(0.95) * (figures.std**2 + 4).sqrt()
        torch.testing.assert_close(figures.prediction_interval(0.9, noise_std=other)[1] - figures.mean, half)


def test_intervals_cover_at_their_level() -> None:
    """4,000 linear regressions, each with one new x: the normal band covers f(x), the prediction interval y.

    The replicates have the exact sampling covariance σ² (XᵀX)⁻¹, so the coverages are binomial around the level.
    """
    rng = np.random.default_rng(0)
    R, n, sigma = 4000, 15, 0.7
    theta = np.array([1.0, -2.0])
    X = np.column_stack([np.ones(n), rng.normal(size=n)])
    at = np.column_stack([np.ones(R), rng.normal(size=R)])
    Y = X @ theta + sigma * rng.normal(size=(R, n))
    fits = np.array([least_squares(X, y, np.ones(n)) for y in Y])
    std = sigma * np.sqrt(np.einsum("ri,ij,rj->r", at, np.linalg.inv(X.T @ X), at))
    mean = (fits * at).sum(1)
    truth = at @ theta
    new = truth + sigma * rng.normal(size=R)

    moments = Moments(torch.from_numpy(mean)[:, None], torch.from_numpy(std)[:, None])
    prediction = Prediction(moments.mean[None], moments)
    noise = torch.tensor([sigma], dtype=torch.float64)
    levels = [0.5, 0.9, 0.95]
    for level in levels:
        allowed = standard_errors(2 * len(levels)) * math.sqrt(level * (1 - level) / R)
        bands = prediction.interval(level, method="normal"), prediction.prediction_interval(level, noise_std=noise)
        for (low, high), target in zip(bands, (truth, new), strict=True):
            inside = (low[:, 0].numpy() <= target) & (target <= high[:, 0].numpy())
            assert abs(inside.mean() - level) < allowed
        # and the band of f is no interval for y
        inside = (bands[0][0][:, 0].numpy() <= new) & (new <= bands[0][1][:, 0].numpy())
        assert inside.mean() < level - allowed


# -- the stream ----------------------------------------------------------------------------------------


def assert_same_statistics(summary: Summary, prediction: Prediction, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    assert summary.num_samples == prediction.num_samples
    for name in STATISTICS:
        ours, theirs = getattr(summary, name), getattr(prediction, name)
        assert ours.dtype == theirs.dtype, name
        # sums of B terms below about 10, in another order
        torch.testing.assert_close(ours, theirs, rtol=300 * eps, atol=300 * eps, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 2, 7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("shape", [(3,), (1,), (2, 40, 30)], ids=str)
def test_summary_matches_prediction(shape: tuple[int, ...], B: int, dtype: torch.dtype) -> None:
    """Chunks of a few replicates, and all B in one: no B falls on a seam unnoticed."""
    x = random(6, 5, dtype=dtype)
    predictor = Fake(shape, dtype)
    levels = (0.0, 0.025, 0.5, 0.975, 1.0)
    prediction, summary = predictor.predict(x, B, seed=3), predictor.summarize(x, B, seed=3, quantiles=levels)
    assert prediction.samples.shape == (B, 6, *shape)
    assert_same_statistics(summary, prediction, dtype)
    for q in levels:
        assert torch.equal(summary.quantile(q), prediction.quantile(q))
    for ours, theirs in zip(summary.interval(0.8), prediction.interval(0.8), strict=True):  # of one kind by default
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1000 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("B", [1, 2, 3, 10, 51])
def test_summary_independent_of_chunks(monkeypatch: pytest.MonkeyPatch, B: int, chunk: int) -> None:
    monkeypatch.setattr("neuboots.prediction._summary_chunk_size", lambda replicate_bytes: chunk)
    predictor, x = Fake((3, 2)), random(6, 5)
    summary = predictor.summarize(x, B, quantiles=(0.1, 0.6))
    prediction = predictor.predict(x, B)
    assert_same_statistics(summary, prediction, torch.float64)
    assert torch.equal(summary.quantile(0.1), prediction.quantile(0.1))
    assert torch.equal(summary.quantile(0.6), prediction.quantile(0.6))


@pytest.mark.parametrize(
    ("replicate_bytes", "together", "summarized", "passes"),
    [
        (1 << 30, 1, 1, 6),
        (1 << 25, 2, 1, 6),
        (1 << 23, 8, 4, 6),
        (1 << 22, 16, 5, 6),
        ((1 << 26) // 99, 99, 5, 6),
        (1 << 15, 99, 8, 6),
        (1 << 12, 99, 64, 2),
        (1, 99, 1 << 18, 1),
    ],
)
def test_replicates_at_once_fit_into_bounded_memory(
    replicate_bytes: int, together: int, summarized: int, passes: int
) -> None:
    """While predicting 64 MB; in sums five of at most 32 MB, or 256 KB; 32 or as many values for quantiles."""
    samples, sizes = random(99, 2, 3), []

    def chunks(size: int) -> Iterator[Tensor]:
        sizes.append(size)
        return iter(samples.split(size))

    moments = Moments(random(2, 3), random(2, 3).abs())
    stream = SampleStream(99, replicate_bytes, chunks, moments)
    prediction = collect_samples(stream)
    assert torch.equal(prediction.samples, samples)
    assert prediction.moments is moments
    assert sizes == [1, together] if together < 99 else [99]  # the first tells whether all fit
    sizes.clear()
    summary = summarize_stream(stream, (0.3, 0.5))
    assert sizes == [min(summarized, 99), *[summarized] * passes]
    for q in (0.3, 0.5):
        assert torch.equal(summary.quantile(q), Prediction(samples).quantile(q))
    assert (num_bytes(samples), num_bytes(samples[:0])) == (99 * 6 * 8, 1)


def test_forward_passes_are_run_once_and_in_order() -> None:
    samples, passes = random(7, 4, 2), []

    def run(b: int) -> Tensor:
        passes.append(b)
        return samples[b]

    stream = stream_forward_passes(7, run)
    assert [len(chunk) for chunk in stream.chunks(3)] == [3, 3, 1]
    assert passes == [*range(7)]
    assert torch.equal(torch.cat([*stream.chunks(2)]), samples)
    assert (stream.num_samples, stream.replicate_bytes, stream.moments) == (7, 64, None)


@pytest.mark.parametrize("B", [1, 3, 5, 12])
def test_members_are_run_once_and_permuted(B: int) -> None:
    outputs, ran = random(5, 4, 2), []

    def run(numbers: Tensor) -> Tensor:
        ran.extend(numbers.tolist())
        return outputs[numbers]

    stream, order = stream_members(B, 5, run, seed=3), draw_member_order(5, B, seed=3)
    for size in (1, 2, 20):
        assert torch.equal(torch.cat([*stream.chunks(size)]), outputs[order])
    assert ran == sorted(set(order.tolist()))
    assert (stream.num_samples, stream.replicate_bytes) == (B, 64)
    if B < 5:
        assert stream.moments is None
    else:
        assert stream.moments is not None
        torch.testing.assert_close(stream.moments.mean, outputs.mean(0))
        torch.testing.assert_close(stream.moments.std, outputs.std(0))


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_prediction_independent_of_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    predictor, x = Fake((3,)), random(6, 5)
    whole = predictor.predict(x, 10).samples
    monkeypatch.setattr("neuboots.prediction._MAX_BYTES", chunk * 6 * 3 * 8)
    assert torch.equal(predictor.predict(x, 10).samples, whole)
    assert torch.equal(predictor.predict(x, 4).samples, whole[:4])


def test_std_is_accurate_for_a_large_mean() -> None:
    """Merged by Chan's rule; Σx² − (Σx)²/B in float32 would leave nothing of a spread of 1 around 10⁵."""
    samples = 1e5 + random(400, 64, 128, dtype=torch.float32)
    stream = SampleStream(400, num_bytes(samples[0]), partial(torch.split, samples))
    fake = Fake()
    object.__setattr__(fake, "stream", lambda x, num_samples, seed: stream)
    std = fake.summarize(samples[0], 400).std
    exact = samples.double().std(0)
    # to the rounding of the samples themselves, eps · 10⁵ = 0.012
    assert (std - exact).abs().max() < torch.finfo(torch.float32).eps * 1e5


def test_summary_keeps_exact_moments() -> None:
    moments = Moments(random(4, 3), random(4, 3, seed=1).abs())
    summary = Fake(moments=moments).summarize(random(4, 5), 20)
    assert summary.mean is moments.mean
    assert summary.std is moments.std
    torch.testing.assert_close(summary.probs, Fake().predict(random(4, 5), 20).probs)


def test_summary_has_requested_quantiles() -> None:
    summary = Fake().summarize(random(4, 5), 20, quantiles=((1 - 0.9) / 2, 0.95))
    low, high = summary.interval(0.9, method="percentile")
    assert (low < high).all()
    assert summary.quantile(0.05) is low  # (1 − 0.9)/2 is 0.04999…
    with pytest.raises(ArgumentError, match="q="):
        summary.quantile(0.5)
    with pytest.raises(ArgumentError, match="q="):
        Fake().summarize(random(4, 5), 20).interval(method="percentile")
    assert Summary(1, X5, X5, X5, X5).quantiles == {}


# -- progress ---------------------------------------------------------------------------------------


class _Terminal:
    """A standard error stream that is a terminal, with what is visible in it."""

    def __init__(self) -> None:
        self.text = self.visible = ""

    def write(self, text: str) -> None:
        assert self.visible == self.text or not text  # nothing waits in a buffer
        self.text += text

    def flush(self) -> None:
        self.visible = self.text

    def isatty(self) -> bool:
        return True


def timed_stream(num_samples: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> SampleStream:
    """Replicate b is b everywhere, (1, 3); each takes some seconds, and they come one by one."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def run(b: int) -> Tensor:
        clock[0] += seconds
        return torch.full((1, 3), float(b))

    def chunks(size: int) -> Iterator[Tensor]:
        assert size == 1
        return (run(b)[None] for b in range(num_samples))

    return SampleStream(num_samples, 1 << 30, chunks)


def test_long_work_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, after five seconds and then once a second, in a line that is removed at the end."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    stream = timed_stream(35, 0.5, monkeypatch)
    for work in (lambda: collect_samples(stream), lambda: summarize_stream(stream)):
        terminal.text = terminal.visible = ""
        work()
        *lines, end, rest = terminal.visible.split("\033[K")
        assert (end, rest, terminal.text) == ("\r", "", terminal.visible)
        found = [re.fullmatch(r"\rreplicate (\d+) of 35, (\d+) s left", line) for line in lines]
        numbers = [tuple(map(int, match.groups())) for match in found if match]
        assert [done for done, _ in numbers] == list(range(11, 35, 3))
        assert all(abs(left - 0.5 * (35 - done)) <= 0.5 for done, left in numbers)
    terminal.text = terminal.visible = ""
    assert summarize_stream(stream, (0.5,)).quantile(0.5).tolist() == [[17.0] * 3]
    titles = re.findall(r"outputs (\d)–(\d), replicate 11 of 35", terminal.text)
    assert titles == [("1", "2"), ("3", "3")]


@pytest.mark.parametrize("where", ["file", "nowhere", "below a bar", "thread", "at once"])
def test_progress_is_not_shown_elsewhere(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = _Terminal()
    if where == "file":
        terminal.isatty = lambda: False
    if where == "below a bar":
        terminal.rich_proxied_file = None
    monkeypatch.setattr(sys, "stderr", None if where == "nowhere" else terminal)
    stream = timed_stream(20, 0.01 if where == "at once" else 1.0, monkeypatch)
    if where == "thread":
        with ThreadPoolExecutor(1) as pool:
            summary = pool.submit(summarize_stream, stream).result()
    else:
        summary = summarize_stream(stream)
    assert summary.mean.tolist() == [[9.5] * 3]
    assert terminal.text == ""


# -- memory --------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors made under this mode that are alive at once, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def _freed(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                name, size = storage._cdata, storage.nbytes()
                if name not in self.known:
                    self.known.add(name)
                    self.live += size
                    weakref.finalize(storage, self._freed, name, size)
        self.peak = max(self.peak, self.live)
        return out


@pytest.mark.parametrize("quantiles", [(), (0.025, 0.975)], ids=["moments", "quantiles"])
@pytest.mark.parametrize("kind", ["fake", "plain"])
def test_summary_memory_does_not_grow_with_B(kind: str, quantiles: tuple[float, ...]) -> None:
    """The peak of everything alive, intermediate results too, in units of one replicate."""
    x = torch.zeros(2, 5, 1, 1) if kind == "plain" else torch.zeros(2, 5)
    plain = DeterministicPredictor(nn.Sequential(nn.Conv2d(5, 3, 1), nn.Upsample(scale_factor=64)))
    predictor = plain if kind == "plain" else Fake((3, 64, 64), torch.float32)
    replicate = 2 * 3 * 64 * 64 * 4
    peaks = []
    for B in (64, 160):
        with LiveBytes() as memory:
            predictor.summarize(x, B, quantiles=quantiles)
        peaks.append(memory.peak / replicate)
    assert peaks[1] <= peaks[0] + 8  # 96 replicates more, and not even one chunk more in memory
    assert peaks[1] >= 8  # the measure sees a chunk


@dataclass(frozen=True)
class Passing(Fake):
    """Replicates one pass after the other, all alike but for their number."""

    layout: tuple[int, ...] = (0, 1, 2, 3)

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        shape = (len(x), *self.shape)
        laid_out = [shape[axis] for axis in self.layout]
        back = [self.layout.index(axis) for axis in range(len(shape))]
        bits = random(*laid_out, dtype=torch.float32)

        def run(b: int) -> Tensor:
            return (b % 3 * bits).to(self.dtype).permute(back)

        return stream_forward_passes(num_samples, run)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["channels first", "channels last"])
def test_summary_frees_large_replicates(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    """Five are alive at once, the sums, as large as three, and what is made of one: those summed are gone when the next
    come."""
    monkeypatch.setattr("neuboots.prediction._SMALL_BYTES", 1)
    predictor = Passing((4, 64, 64), torch.float32, layout=layout)
    replicate = 4 * 64 * 64 * 4
    peaks = []
    for B in (5, 10, 11, 40):
        with LiveBytes() as memory:
            predictor.summarize(torch.zeros(1, 5), B)
        peaks.append(memory.peak / replicate)
    assert 8 < peaks[0] < 15
    assert max(peaks) < peaks[0] + 2  # one is made beside the sums, where the first five had none
    assert max(peaks[1:]) < min(peaks[1:]) + 0.1


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (3, 0, 1, 2)], ids=str)
def test_summary_independent_of_memory_layout(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    """A linear head over pixels, channels_last and a transposition leave the axes in another order."""
    monkeypatch.setattr("neuboots.prediction._SMALL_BYTES", 1)
    predictor, x = Passing((4, 5, 6), torch.float32, layout=layout), torch.zeros(3, 5)
    summary, prediction = predictor.summarize(x, 7), predictor.predict(x, 7)
    assert_same_statistics(summary, prediction, torch.float32)


# -- half precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_single(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, big: bool
) -> None:
    """Hundreds of replicates: in half precision their sum stops growing, and what they disagree by is lost."""
    if big:
        monkeypatch.setattr("neuboots.prediction._SMALL_BYTES", 1)
    x, B = random(1, 5, dtype=dtype), 400
    for shape in ((4, 3), (1, 3)):
        predictor = Fake(shape, dtype)
        samples = predictor.predict(x, B).samples
        assert samples.dtype == dtype
        exact = figures(samples.double().numpy())
        for found in (predictor.summarize(x, B), Prediction(samples)):
            for name in ("probs", "entropy", "expected_entropy", "mutual_information"):
                assert getattr(found, name).dtype == torch.float32
                np.testing.assert_allclose(getattr(found, name), exact[name], rtol=1e-4, atol=1e-5, err_msg=name)
            for name in ("mean", "std"):  # rounded to the net's own precision, once
                assert getattr(found, name).dtype == dtype
                rounding = 2 * torch.finfo(dtype).eps
                np.testing.assert_allclose(
                    getattr(found, name).float(), exact[name], rtol=rounding, atol=rounding, err_msg=name
                )


# -- the contract --------------------------------------------------------------------------------------


def test_gradients_kept_only_if_x_requires_them() -> None:
    x = random(4, 5)
    predictor = DeterministicPredictor(nn.Linear(5, 3).double())
    assert not predictor.predict(x, 3).samples.requires_grad
    asking = x.clone().requires_grad_()
    prediction = predictor.predict(asking, 3)
    (gradient,) = torch.autograd.grad(prediction.mean.sum(), asking)
    torch.testing.assert_close(gradient, predictor.net.weight.detach().sum(0).expand(4, 5))
    assert not predictor.summarize(asking, 3).mean.requires_grad
    assert not predictor.summarize(asking, 3).probs.requires_grad
    with torch.no_grad():
        assert not predictor.predict(asking, 3).samples.requires_grad
    assert torch.is_grad_enabled()


def test_dict_inputs_are_checked() -> None:
    """A dict, a tuple or a list of tensors asks for gradients, or has a NaN, if one of them does."""

    class Sum(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left + right

    predictor = DeterministicPredictor(Sum())
    for part in (0, 1):
        parts = [random(4, 3), random(4, 3)]
        parts[part].requires_grad_()
        assert predictor.predict({"left": parts[0], "right": parts[1]}, 2).samples.requires_grad
        parts[part] = torch.full((4, 3), math.nan)
        with pytest.raises(ArgumentError, match="x="):
            predictor.predict({"left": parts[0], "right": parts[1]}, 2)


X5 = random(4, 5)
PREDICTION = Prediction(random(5, 4, 2))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("num_samples", lambda B=B: Fake().predict(X5, B)) for B in (2.5, 0, -1)),
        ("seed", lambda: Fake().summarize(X5, 2, seed=0.5)),
        ("num_samples", lambda: check_summarized(2**24 + 1)),
        # 2²⁴ replicates of 98,304 values take a day
        ("num_samples", lambda: DeterministicPredictor(nn.Identity()).summarize(torch.zeros(2**15, 3), 2**24)),
        ("x", lambda: Fake().predict(torch.zeros(4, 5, dtype=torch.uint8), 2)),
        ("x", lambda: DeterministicPredictor(nn.Linear(5, 3)).predict(X5[0], 2)),  # (5,) gives 3 outputs, not 5
        ("x", lambda: DeterministicPredictor(nn.Linear(5, 3)).summarize(X5[0], 2)),
        *(("samples", lambda shape=shape: Prediction(torch.zeros(shape))) for shape in [(3, 4), (3,), (), (0, 4, 2)]),
        *(("level", lambda level=level: PREDICTION.interval(level)) for level in (0.0, 1.0, -0.5, 95.0, math.nan)),
        ("level", lambda: Fake().summarize(X5, 3).interval(1.5, method="percentile")),
        ("level", lambda: PREDICTION.prediction_interval(0.0, noise_std=1.0)),
        ("method", lambda: PREDICTION.interval(method="bootstrap")),
        *(("q", lambda q=q: PREDICTION.quantile(q)) for q in (-0.1, 1.1, math.nan)),
        ("q", lambda: Fake().summarize(X5, 3, quantiles=(0.5, 1.1))),
        ("q", lambda: Fake().summarize(X5, 3, quantiles=(0.5,)).quantile(0.4)),
        ("noise_std", lambda: PREDICTION.prediction_interval(noise_std=torch.tensor([-1.0, 1.0]))),
        ("noise_std", lambda: PREDICTION.prediction_interval(noise_std=torch.tensor([math.nan, 1.0]))),
        *(
            ("noise_std", lambda shape=shape: PREDICTION.prediction_interval(noise_std=torch.ones(shape)))
            for shape in [(4,), (2, 4), (1, 4, 2)]  # (N,) against (N, 1) would give N × N intervals
        ),
        ("noise_std", lambda: Prediction(random(5, 4, 1)).prediction_interval(noise_std=torch.ones(4))),
        ("prediction", lambda: split_gaussian(Prediction(random(9, 5, 3)))),
        *(
            ("y", lambda shape=shape: residual_std(Fake((2,)), random(50, 5), torch.zeros(shape)))
            for shape in [(50, 3), (50,), (2, 50), (49, 2), (100,), (0,)]
        ),
        ("y", lambda: residual_std(Fake((2, 3)), random(50, 5), torch.zeros(50, 3, 2))),
        ("y", lambda: residual_std(Fake((2,)), random(1, 5), torch.zeros(2, 1))),
    ],
)
def test_wrong_argument_raises(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == name


def test_finite_inputs_whose_sum_overflows_are_accepted() -> None:
    predictor = DeterministicPredictor(nn.Identity())
    x = torch.full((4, 5), 3e38)
    assert torch.equal(predictor.predict(x, 2).samples[1], x)
    x[0, 0], x[1, 1] = math.inf, -math.inf
    with pytest.raises(ArgumentError, match="x="):
        predictor.predict(x, 2)


# -- regression helpers --------------------------------------------------------------------------------


@pytest.mark.parametrize("pixels", [(), (3, 2)])
def test_split_gaussian(pixels: tuple[int, ...]) -> None:
    """Means first, then logarithms of variances, whose exponentials are averaged over the replicates."""
    samples = random(9, 5, 4, *pixels)
    means, noise = split_gaussian(Prediction(samples))
    assert torch.equal(means.samples, samples[:, :, :2])
    assert means.moments is None
    np.testing.assert_allclose(noise, np.sqrt(np.exp(samples.numpy()[:, :, 2:]).mean(0)))
    moments = Moments(random(5, 4, *pixels), random(5, 4, *pixels).abs())
    means, _ = split_gaussian(Prediction(samples, moments))
    assert torch.equal(means.mean, moments.mean[:, :2])
    assert torch.equal(means.std, moments.std[:, :2])
    low, high = means.prediction_interval(noise_std=noise)
    assert low.shape == high.shape == (5, 2, *pixels)


@pytest.mark.parametrize("pixels", [(), (3, 2)])
def test_residual_std(pixels: tuple[int, ...]) -> None:
    """√(mean (y − f)²) over inputs and pixels, one for each output."""
    predictor, x = Fake((2, *pixels)), random(50, 5)
    y = random(50, 2, *pixels, seed=1)
    mean = predictor.summarize(x, 100).mean
    error = (y - mean).numpy()
    axes = tuple(axis for axis in range(error.ndim) if axis != 1)
    np.testing.assert_allclose(residual_std(predictor, x, y), np.sqrt((error**2).mean(axes)))


def test_predict_accepts_numpy_arrays() -> None:
    x = random(4, 3)
    predictor = DeterministicPredictor(nn.Linear(3, 2).double())
    assert torch.equal(predictor.predict(x.numpy(), 2).samples, predictor.predict(x, 2).samples)


def test_small_mutual_information_is_not_rounding() -> None:
    samples = torch.tensor([[[0.1, 0.0]], [[-0.1, 0.0]], [[0.0, 0.0]]])
    exact = Prediction(samples.double()).mutual_information
    assert 5e-4 < float(exact) < 2e-3
    torch.testing.assert_close(Prediction(samples).mutual_information.double(), exact, rtol=0.01, atol=0)


def test_order_of_members_depends_on_the_seed() -> None:
    orders = [draw_member_order(4, 10, seed=seed) for seed in range(200)]
    assert all(sorted(order[:4].tolist()) == sorted(order[4:8].tolist()) == [0, 1, 2, 3] for order in orders)
    first = torch.stack(orders)[:, [0, 4, 8]]  # uniform: counts of 200 draws have a standard error of √(200 · 3/16)
    for column in first.T:
        assert (column.bincount(minlength=4) - 50).abs().max() <= standard_errors(12) * (200 * 3 / 16) ** 0.5


# -- values that are not finite ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_statistics_of_samples_that_are_not_finite_are_not_finite(value: float) -> None:
    samples = noise(7, 3, 2)
    samples[4, 1, 0] = value
    rows = torch.arange(3.0)[:, None]
    sampled, summary = Prediction(samples), Stored(samples).summarize(rows, 7, quantiles=(0.025, 0.25, 0.5, 0.975))
    for found in (sampled, summary):
        ends = [end for method in ("normal", "percentile") for end in found.interval(0.95, method=method)]  # type: ignore[arg-type]
        values = [found.mean, found.std, *ends[:2], found.predictive_std(1.0)]
        values += [found.quantile(q) for q in (0.25, 0.5)] + ends[2:] if math.isnan(value) else []
        assert all(each.isfinite().tolist() == [[True, True], [False, True], [True, True]] for each in values)
        for each in (found.confidence, found.entropy, found.mutual_information, found.expected_entropy):
            assert each.isfinite().tolist() == [True, False, True]
        assert found.labels[1] == -1 < found.labels[::2].min()


def test_conformal_quantile_rejects_nan() -> None:
    """NaN would sort as the largest score, and the quantile of the others would be too small."""
    with pytest.raises(ArgumentError) as error:
        conformal_quantile(torch.tensor([1.0, 2.0, torch.nan]), torch.ones(3), 0.5)
    assert error.value.name == "scores"


def test_residual_of_a_single_example() -> None:
    predictor = DeterministicPredictor(nn.Identity())
    for y in (torch.full((1,), 2.0), torch.full((1, 1), 2.0, dtype=torch.float64)):
        assert residual_std(predictor, torch.zeros(1, 1), y).equal(torch.tensor([2.0]))  # in the outputs' precision


def test_used_predictor_is_saved_and_copied(tmp_path: Path) -> None:
    predictor = DeterministicPredictor(MLP(3, 2, widths=(4,)))
    x, unused = noise(5, 3), copy.deepcopy(predictor)
    expected = predictor.predict(x, 1).samples  # makes the copy of this thread, which is no part of the predictor
    assert predictor.copy_for_thread() is predictor.copy_for_thread()
    for same in (copy.deepcopy(predictor), unused):
        assert torch.equal(same.predict(x, 1).samples, expected)
    predictor.save(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 1).samples, expected)


def test_predictions_follow_changes_of_the_predictor() -> None:
    """Of its net's layers, and of what it refers to."""
    predictor, x = DeterministicPredictor(nn.Sequential(nn.Linear(3, 2), nn.ReLU())), noise(5, 3)
    for change in (
        lambda: predictor.net.__setitem__(1, nn.Tanh()),
        lambda: object.__setattr__(predictor, "fitted", nn.Linear(3, 2)),
    ):
        predictor.predict(x, 1)
        change()
        assert torch.equal(predictor.predict(x, 1).samples[0], predictor.net(x))
    other = object.__new__(Fake)
    vars(other).update(vars(Fake((3,))))
    before = other.predict(X5, 2).samples
    object.__setattr__(other, "stream", lambda x, num_samples, seed: Fake((4,)).stream(x, num_samples, seed=seed))
    assert other.predict(X5, 2).samples.shape == (2, 4, 4) != before.shape


def test_names_of_parameters_that_are_not_finite() -> None:
    """A mask may have −∞ and no NaN, a parameter neither."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    predictor = DeterministicPredictor(net)
    assert predictor.find_not_finite() is None
    with torch.no_grad():
        net[0].bias[0] = -torch.inf
        assert predictor.find_not_finite() == "0.bias"
        net[0].bias[0] = 0.0
        net.mask[0] = torch.nan
        assert predictor.find_not_finite() == "mask"


def test_predictor_without_from_config_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Fake"):
        Fake.from_config({}, nn.Linear(1, 1))


# -- quantiles of groups of scores ---------------------------------------------------------------------

PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97]


def smallest_quantile(scores: Tensor, counts: list[int], level: Fraction) -> float:
    """The score at which the fractions of the examples reach level · (n + 1), in exact arithmetic."""
    weights = [Fraction(1, count) for count in counts for _ in range(count)]
    reached = Fraction(0)
    for score, weight in sorted(zip(scores.tolist(), weights, strict=True)):
        reached += weight
        if reached >= level * (len(counts) + 1):
            return score
    return math.inf


@pytest.mark.parametrize("counts", [[1] * 19, [3] * 7, [2, 3, 5, 7], PRIMES[:14], [1, 4] * 9], ids=str)
@pytest.mark.parametrize("level", ["0.07", "0.3", "0.5", "0.7", "0.9", "0.95"])
def test_conformal_quantile_is_exact(counts: list[int], level: str) -> None:
    for seed in range(3):
        scores = noise(sum(counts), dtype=torch.float64, seed=seed)
        scores[:4] = scores[0]  # ties
        found = conformal_quantile(scores, torch.tensor(counts), float(level))
        assert found == smallest_quantile(scores, counts, Fraction(level))


@pytest.mark.parametrize(("n", "below", "level"), [(14, 7, "0.5"), (13, 3, "0.25"), (13, 10, "0.75")])
def test_conformal_quantile_of_whole_examples_is_exact(n: int, below: int, level: str) -> None:
    """Seven examples and the first of two scores of another are exactly half of fifteen: sums of sevenths in floating
    point are not."""
    counts = PRIMES[:n]
    scores = torch.arange(float(sum(counts)), dtype=torch.float64)
    scores[:2] = torch.tensor([100.0, 1000.0])
    scores[2 : 2 + sum(counts[1 : below + 1])] -= 1000.0
    scores[2 + sum(counts[1 : below + 1]) :] += 1000.0
    assert conformal_quantile(scores, torch.tensor(counts), float(level)) == 100.0
    assert smallest_quantile(scores, counts, Fraction(level)) == 100.0


def test_conformal_quantile_never_loses_coverage_by_rounding() -> None:
    """Where the common denominator is beyond integers, a level that is met exactly gives the next score."""
    scores = torch.arange(float(sum(PRIMES)), dtype=torch.float64)
    exact = smallest_quantile(scores, PRIMES, Fraction(1, 2))
    assert conformal_quantile(scores, torch.tensor(PRIMES), 0.5) == exact + 1  # 13 of 26 examples
    for counts in (PRIMES, PRIMES[:16]):
        some, padded = scores[: sum(counts)], torch.tensor([0, *counts, 0])
        assert conformal_quantile(some, padded, 0.49) == smallest_quantile(some, counts, Fraction(49, 100))
    assert conformal_quantile(scores, torch.tensor(PRIMES), 0.97) == math.inf
    assert conformal_quantile(scores, torch.tensor(PRIMES), 0.9615384615) == scores[-1]  # just below 25 of 26


def test_samples_that_are_integers_are_rejected() -> None:
    with pytest.raises(ArgumentError) as raised:
        Prediction(torch.ones(2, 3, 1, dtype=torch.int8))
    assert raised.value.name == "samples.dtype"
