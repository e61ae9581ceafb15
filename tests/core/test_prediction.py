"""Every figure of B samples against slow oracles, the stream against the whole, and what a bad question answers."""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from _reference import figures, least_squares, standard_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics.functional.classification import multiclass_accuracy

import neuboots.prediction
from neuboots._prng import derive_keys, draw_uniform
from neuboots.methods import DeterministicPredictor
from neuboots.prediction import (
    Moments,
    Prediction,
    Predictor,
    SampleStream,
    Summary,
    num_bytes,
    residual_std,
    split_gaussian,
    stream_forward_passes,
)

FIGURES = ["mean", "std", "probs", "labels", "confidence", "entropy", "expected_entropy", "mutual_information"]
SHAPES = [(7, 3), (5, 1), (2, 4, 3, 2), (2, 1, 3, 2), (3, 2, 4)]
many = settings(deadline=None, max_examples=40, derandomize=True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


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

    def state(self) -> dict[str, Tensor]:
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


# -- figures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [1, 2, 9, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_figure_is_its_definition(shape: tuple[int, ...], B: int) -> None:
    samples = 2 * random(B, *shape, seed=B)
    prediction, expected = Prediction(samples), figures(samples.numpy())
    assert prediction.num_samples == B
    for name in FIGURES:
        found = getattr(prediction, name)
        torch.testing.assert_close(found.double(), torch.from_numpy(expected[name]), rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 3, 2)], ids=str)
def test_figures_agree_with_numpy_scipy_and_torchmetrics(shape: tuple[int, ...]) -> None:
    samples = 2 * random(30, *shape)
    prediction, array = Prediction(samples), samples.numpy()
    each = scipy.special.softmax(array, axis=2)
    np.testing.assert_allclose(prediction.mean, array.mean(0), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(prediction.std, array.std(0, ddof=1))
    np.testing.assert_allclose(prediction.probs, each.mean(0))
    np.testing.assert_allclose(prediction.entropy, scipy.stats.entropy(each.mean(0), axis=1))
    np.testing.assert_allclose(prediction.expected_entropy, scipy.stats.entropy(each, axis=2).mean(0))
    # I(y; b) = mean Kullback–Leibler divergence of the replicates from their mean
    divergence = scipy.stats.entropy(each, each.mean(0, keepdims=True), axis=2).mean(0)
    np.testing.assert_allclose(prediction.mutual_information, divergence)
    truth = torch.randint(shape[1], prediction.labels.shape, generator=torch.Generator().manual_seed(0))
    theirs = multiclass_accuracy(prediction.probs, truth, shape[1], average="micro")
    assert (prediction.labels == truth).double().mean().item() == pytest.approx(theirs.item())


def test_golden_entropies() -> None:
    """To the printed digits, as torch-uncertainty and baal give them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 4)) * 2
    samples = logits[None] + rng.normal(size=(8, 500, 4)) * 0.7
    prediction = Prediction(torch.from_numpy(samples))
    assert f"{prediction.entropy.mean():.7f}" == "0.8323329"
    assert f"{prediction.expected_entropy.mean():.7f}" == "0.7507586"
    assert f"{prediction.mutual_information.mean():.7f}" == "0.0815744"


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


def test_one_output_is_the_logit_of_the_second_of_two_classes() -> None:
    samples = random(20, 6, 1)
    one, two = Prediction(samples), Prediction(torch.cat([torch.zeros_like(samples), samples], 2))
    assert one.probs.shape == (6, 2)
    for name in FIGURES[2:]:
        torch.testing.assert_close(getattr(one, name), getattr(two, name))
    np.testing.assert_allclose(one.probs[:, 1], scipy.special.expit(samples[..., 0].numpy()).mean(0))


def test_replicates_that_agree_share_no_information() -> None:
    """Rounding makes it neither negative nor more than a few units in the last place of log 5."""
    prediction = Prediction(random(1, 200, 5, dtype=torch.float32).expand(33, 200, 5))
    assert (prediction.mutual_information >= 0).all()
    assert prediction.mutual_information.max() < 50 * torch.finfo(torch.float32).eps
    assert prediction.std.max() < 10 * torch.finfo(torch.float32).eps


def test_rounding_never_makes_information_negative() -> None:
    """Nor hides what is there: replicates 10⁻³ apart differ by about 10⁻⁷ nats, far above rounding in float64."""
    for seed in range(20):
        near = random(1, 50, 5, seed=seed) + 1e-3 * random(20, 50, 5, seed=seed + 100)
        for dtype in (torch.float32, torch.float64):
            assert (Prediction(near.to(dtype)).mutual_information >= 0).all()
        assert (Prediction(near).mutual_information > 0).all()


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
    for name in FIGURES[2:]:  # classes and quantiles are known from the samples only
        assert torch.equal(getattr(prediction, name), getattr(without, name))
    assert torch.equal(prediction.quantile(0.3), without.quantile(0.3))


# -- intervals -----------------------------------------------------------------------------------------


@many
@given(st.integers(1, 60), st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]))
def test_quantiles_are_numpys_and_torchs(B: int, q: float, dtype: torch.dtype) -> None:
    samples = random(B, 3, 2, seed=B, dtype=dtype)
    ours = Prediction(samples).quantile(q)
    assert ours.dtype == dtype
    tolerance = {"rtol": 0, "atol": 100 * torch.finfo(dtype).eps}  # ranks up to 60, samples below 4
    theirs = torch.from_numpy(np.quantile(samples.double().numpy(), q, axis=0))
    torch.testing.assert_close(ours.double(), theirs, **tolerance)
    torch.testing.assert_close(ours, torch.quantile(samples, q, dim=0), **tolerance)


def test_quantiles_at_the_ends_and_on_the_ranks() -> None:
    samples = random(11, 3, 2)
    ordered, prediction = samples.sort(0).values, Prediction(samples)
    for k in range(11):
        torch.testing.assert_close(prediction.quantile(k / 10), ordered[k])
    assert torch.equal(prediction.quantile(0.0), samples.amin(0))
    assert torch.equal(prediction.quantile(1.0), samples.amax(0))
    assert torch.equal(Prediction(samples[:1]).quantile(0.7), samples[0])


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 3, 2)], ids=str)
def test_intervals_are_numpys_and_scipys(shape: tuple[int, ...], level: float) -> None:
    samples = random(41, *shape)
    prediction, array = Prediction(samples), samples.numpy()
    low, high = prediction.interval(level, method="percentile")
    np.testing.assert_allclose(low, np.quantile(array, (1 - level) / 2, axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(high, np.quantile(array, (1 + level) / 2, axis=0), rtol=1e-12, atol=1e-12)
    low, high = prediction.interval(level, method="normal")
    theirs = scipy.stats.norm.interval(level, loc=array.mean(0), scale=array.std(0, ddof=1))
    np.testing.assert_allclose(low, theirs[0])
    np.testing.assert_allclose(high, theirs[1])


@pytest.mark.parametrize("kind", ["percentile", "normal"])
def test_a_single_sample_has_an_interval_of_no_width(kind: str) -> None:
    low, high = Prediction(random(1, 4, 2)).interval(method=kind)
    assert torch.equal(low, high)
    assert low.isfinite().all()


def test_a_prediction_interval_is_wider_and_without_noise_the_same() -> None:
    prediction = Prediction(random(30, 6, 2))
    low, high = prediction.interval(method="normal")
    same = prediction.prediction_interval(noise_std=torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(same, (low, high))
    wide = prediction.prediction_interval(noise_std=torch.tensor([0.1, 5.0], dtype=torch.float64))
    assert (wide[0] < low).all()
    assert (wide[1] > high).all()
    half = scipy.stats.norm.ppf(0.975) * (prediction.std**2 + torch.tensor([0.01, 25.0])).sqrt()
    torch.testing.assert_close(wide[1] - prediction.mean, half)


@pytest.mark.parametrize("holder", ["Prediction", "Summary"])
def test_the_noise_of_each_output_reaches_all_its_pixels(holder: str) -> None:
    """σ is (C,), as residual_std gives it, also where there are C × W pixels to mistake it for."""
    predictor, x = Fake((3, 4, 3)), random(2, 5)
    figures = predictor.predict(x, 20) if holder == "Prediction" else predictor.summarize(x, 20)
    noise = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    low, high = figures.prediction_interval(0.9, noise_std=noise)
    assert low.shape == figures.mean.shape
    half = scipy.stats.norm.ppf(0.95) * (figures.std**2 + noise.view(3, 1, 1) ** 2).sqrt()
    torch.testing.assert_close((high - low) / 2, half)
    for other in (torch.tensor(2.0), torch.full_like(figures.mean, 2.0), torch.full((1,), 2.0)):
        half = scipy.stats.norm.ppf(0.95) * (figures.std**2 + 4).sqrt()
        torch.testing.assert_close(figures.prediction_interval(0.9, noise_std=other)[1] - figures.mean, half)


def test_intervals_cover_what_they_promise() -> None:
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


def assert_same_figures(summary: Summary, prediction: Prediction, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    assert summary.num_samples == prediction.num_samples
    for name in FIGURES:
        ours, theirs = getattr(summary, name), getattr(prediction, name)
        assert ours.dtype == theirs.dtype, name
        # sums of B terms below about 10, in another order
        torch.testing.assert_close(ours, theirs, rtol=300 * eps, atol=300 * eps, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 2, 7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("shape", [(3,), (1,), (2, 40, 30)], ids=str)
def test_a_summary_equals_the_prediction(shape: tuple[int, ...], B: int, dtype: torch.dtype) -> None:
    """Chunks of a few replicates, and all B in one: no B falls on a seam unnoticed."""
    x = random(6, 5, dtype=dtype)
    predictor = Fake(shape, dtype)
    levels = (0.0, 0.025, 0.5, 0.975, 1.0)
    prediction, summary = predictor.predict(x, B, seed=3), predictor.summarize(x, B, seed=3, quantiles=levels)
    assert prediction.samples.shape == (B, 6, *shape)
    assert_same_figures(summary, prediction, dtype)
    for q in levels:
        assert torch.equal(summary.quantile(q), prediction.quantile(q))
        if prediction.samples.numel() < 10**6:
            theirs = torch.quantile(prediction.samples, q, dim=0)
            # torch takes the rank, up to B, in the samples' own precision
            torch.testing.assert_close(summary.quantile(q), theirs, rtol=0, atol=100 * B * torch.finfo(dtype).eps)
    torch.testing.assert_close(
        summary.interval(0.95, method="percentile"), prediction.interval(0.95, method="percentile")
    )
    for ours, theirs in zip(summary.interval(0.8), prediction.interval(0.8), strict=True):  # of one kind by default
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1000 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("B", [1, 2, 3, 10, 51])
def test_a_summary_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, B: int, chunk: int) -> None:
    monkeypatch.setattr("neuboots._streaming.summary_chunk_size", lambda replicate_bytes: chunk)
    predictor, x = Fake((3, 2)), random(6, 5)
    summary = predictor.summarize(x, B, quantiles=(0.1, 0.6))
    prediction = predictor.predict(x, B)
    assert_same_figures(summary, prediction, torch.float64)
    assert torch.equal(summary.quantile(0.1), prediction.quantile(0.1))
    assert torch.equal(summary.quantile(0.6), prediction.quantile(0.6))


@pytest.mark.parametrize("shape", [(3,), (1,), (3, 7), (1, 5, 4), (4, 3, 2, 5)], ids=str)
@pytest.mark.parametrize("B", [1, 2, 12])
def test_big_replicates_are_summed_one_by_one(monkeypatch: pytest.MonkeyPatch, B: int, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr("neuboots._streaming.SMALL_BYTES", 1)
    predictor, x = Fake(shape), random(6, 5)
    sizes = []
    add = neuboots.prediction.sums._Running._add_one
    monkeypatch.setattr(
        neuboots.prediction.sums._Running, "_add_one", lambda run, z: (sizes.append(z.shape), add(run, z))
    )
    summary = predictor.summarize(x, B, quantiles=(0.1,))
    assert sizes == [(6, *shape)] * B
    assert_same_figures(summary, predictor.predict(x, B), torch.float64)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_prediction_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    predictor, x = Fake((3,)), random(6, 5)
    whole = predictor.predict(x, 10).samples
    monkeypatch.setattr("neuboots._streaming.MAX_BYTES_IN_FLIGHT", chunk * 6 * 3 * 8)
    assert torch.equal(predictor.predict(x, 10).samples, whole)
    assert torch.equal(predictor.predict(x, 4).samples, whole[:4])


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 40, 30)], ids=str)
def test_one_replicate_has_no_spread_and_no_nan(shape: tuple[int, ...]) -> None:
    summary = Fake(shape).summarize(random(4, 5), 1, quantiles=(0.5,))
    assert (summary.std == 0).all()
    assert (summary.mutual_information.abs() < 1e-12).all()
    for name in FIGURES:
        assert getattr(summary, name).double().isfinite().all(), name
    assert torch.equal(summary.quantile(0.5), summary.mean)


def test_a_far_off_mean_does_not_drown_the_spread() -> None:
    """Merged by Chan's rule; Σx² − (Σx)²/B in float32 would leave nothing of a spread of 1 around 10⁵."""
    samples = 1e5 + random(400, 64, 128, dtype=torch.float32)
    stream = SampleStream(400, num_bytes(samples[0]), partial(torch.split, samples))
    fake = Fake()
    object.__setattr__(fake, "stream", lambda x, num_samples, seed: stream)
    std = fake.summarize(samples[0], 400).std
    exact = samples.double().std(0)
    # to the rounding of the samples themselves, eps · 10⁵ = 0.012
    assert (std - exact).abs().max() < torch.finfo(torch.float32).eps * 1e5


def test_a_summary_keeps_exact_moments() -> None:
    moments = Moments(random(4, 3), random(4, 3, seed=1).abs())
    summary = Fake(moments=moments).summarize(random(4, 5), 20)
    assert summary.mean is moments.mean
    assert summary.std is moments.std
    torch.testing.assert_close(summary.probs, Fake().predict(random(4, 5), 20).probs)


def test_a_summary_knows_the_quantiles_that_were_asked_for() -> None:
    summary = Fake().summarize(random(4, 5), 20, quantiles=((1 - 0.9) / 2, 0.95))
    low, high = summary.interval(0.9, method="percentile")
    assert (low < high).all()
    assert summary.quantile(0.05) is low  # (1 − 0.9)/2 is 0.04999…
    sentence = r"^quantile 0.5 was not gathered \(gathered: \[0.0499.*, 0.95\]\): ask for it with summarize\(x, B, "
    with pytest.raises(ValueError, match=sentence):
        summary.quantile(0.5)
    with pytest.raises(ValueError, match=r"^quantile 0.025 was not gathered \(gathered: none\): ask for it with "):
        Fake().summarize(random(4, 5), 20).interval(method="percentile")


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


@dataclass(frozen=True)
class Counting(Fake):
    """Says how many replicates were asked for at once, and how many of those it gave are still alive."""

    log: tuple[list[int], list[int]] = ((), ())

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        at_once, sizes = self.log

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                count = min(size, num_samples - start)
                chunk = x.new_full((count, len(x), *self.shape), float(start))
                alive.add(chunk.untyped_storage())
                sizes.append(count)
                at_once.append(sum(s.nbytes() for s in alive) // (chunk[0].numel() * chunk.element_size()))
                yield chunk
                del chunk

        return SampleStream(num_samples, len(x) * math.prod(self.shape) * x.element_size(), chunks)


@pytest.mark.parametrize("quantiles", [(), (0.025, 0.975)], ids=["moments", "quantiles"])
def test_a_summary_holds_a_constant_number_of_replicates(quantiles: tuple[float, ...]) -> None:
    """Whatever B: at most 8 to a chunk, of which three may be alive (this one, the one before, the last of all)."""
    x = torch.zeros(4, 5)
    for B in (8, 9, 50, 100):
        predictor = Counting((2, 64, 64), torch.float32, log=([], []))  # 128 kB for each replicate
        predictor.summarize(x, B, quantiles=quantiles)
        at_once, sizes = predictor.log
        assert sum(sizes) % B == 0
        assert max(sizes) <= 8
        assert max(at_once) <= 24


@pytest.mark.parametrize("quantiles", [(), (0.025, 0.975)], ids=["moments", "quantiles"])
@pytest.mark.parametrize("kind", ["fake", "plain"])
def test_the_memory_of_a_summary_does_not_grow_with_B(kind: str, quantiles: tuple[float, ...]) -> None:
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
def test_big_replicates_come_and_go(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    """Five are alive at once, the sums, as large as three, and what is made of one: those summed are gone when the next
    come."""
    monkeypatch.setattr("neuboots._streaming.SMALL_BYTES", 1)
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
def test_the_layout_in_memory_does_not_matter(monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]) -> None:
    """A linear head over pixels, channels_last and a transposition leave the axes in another order."""
    monkeypatch.setattr("neuboots._streaming.SMALL_BYTES", 1)
    predictor, x = Passing((4, 5, 6), torch.float32, layout=layout), torch.zeros(3, 5)
    summary, prediction = predictor.summarize(x, 7), predictor.predict(x, 7)
    assert_same_figures(summary, prediction, torch.float32)


# -- half precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, big: bool) -> None:
    """A thousand replicates: in half precision their sum stops growing, and what they disagree by is lost."""
    if big:
        monkeypatch.setattr("neuboots._streaming.SMALL_BYTES", 1)
    x, B = random(3, 5, dtype=dtype), 1000
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


def test_gradients_are_kept_only_if_x_asks_for_them() -> None:
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


@pytest.mark.parametrize("large", [1, 1 << 26])
def test_gradients_come_through_every_replicate(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    """Gathered in one piece or in many."""
    monkeypatch.setattr("neuboots._streaming.MAX_BYTES_IN_FLIGHT", large)
    x = random(4, 5).requires_grad_()
    samples = Fake().predict(x, 6).samples
    for b in range(6):
        (gradient,) = torch.autograd.grad(samples[b].sum(), x, retain_graph=True)
        (expected,) = torch.autograd.grad(Fake().predict(x, 6).samples[b].sum(), x)
        assert gradient.abs().min() > 0
        torch.testing.assert_close(gradient, expected)


def test_inputs_of_every_kind_are_looked_through() -> None:
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
        with pytest.raises(ValueError, match=r"^the input has 12 NaN or infinite value\(s\) of 12; expected finite "):
            predictor.predict({"left": parts[0], "right": parts[1]}, 2)


@pytest.mark.parametrize("ask", ["predict", "summarize"])
def test_bad_questions(ask: str) -> None:
    question, x = getattr(Fake(), ask), random(4, 5)
    for B in (0, -1):
        with pytest.raises(ValueError, match=rf"^got B = {B} replicates; expected num_samples ≥ 1, a whole number$"):
            question(x, B)
    for bad in (math.nan, math.inf, -math.inf):
        x = random(4, 5)
        x[1, 2] = x[3, 0] = bad
        sentence = r"^the input has 2 NaN or infinite value\(s\) of 20; expected finite numbers: fill or drop them "
        with pytest.raises(ValueError, match=sentence):
            question(x, 3)


def test_inputs_whose_sum_overflows_are_finite_all_the_same() -> None:
    predictor = DeterministicPredictor(nn.Identity())
    x = torch.full((4, 5), 3e38)
    assert torch.equal(predictor.predict(x, 2).samples[1], x)
    x[0, 0], x[1, 1] = math.inf, -math.inf
    with pytest.raises(ValueError, match=r"^the input has 2 NaN or infinite value\(s\) of 20; expected finite "):
        predictor.predict(x, 2)


def test_inputs_are_tensors() -> None:
    with pytest.raises(ValueError, match=r"^got inputs of type ndarray; expected a tensor \(torch.as_tensor\(x\) "):
        Fake().predict(np.zeros((4, 5)), 2)


@pytest.mark.parametrize("shape", [(3, 4), (3,), (), (0, 4, 2)])
def test_samples_have_three_axes_and_one_replicate(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^got samples of shape \(.*\); expected \(B, N, C, \*\) with B ≥ 1$"):
        Prediction(torch.zeros(shape))


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, 95.0, math.nan])
def test_a_level_lies_between_0_and_1(level: float) -> None:
    prediction, summary = Prediction(random(5, 4, 2)), Fake().summarize(random(4, 5), 3)
    sentence = rf"^got level {level}; expected a number between 0 and 1, such as 0.95$"
    for holder in (prediction, summary):
        for kind in ("percentile", "normal"):
            with pytest.raises(ValueError, match=sentence):
                holder.interval(level, method=kind)
        with pytest.raises(ValueError, match=sentence):
            holder.prediction_interval(level, noise_std=torch.ones(()))


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_lies_from_0_to_1(q: float) -> None:
    with pytest.raises(ValueError, match=rf"^got q = {q}; expected a number from 0 to 1$"):
        Prediction(random(5, 4, 2)).quantile(q)
    with pytest.raises(ValueError, match=rf"^got q = {q}; expected a number from 0 to 1$"):
        Fake().summarize(random(4, 5), 3, quantiles=(0.5, q))


@pytest.mark.parametrize("noise", [[-1.0, 1.0], [math.nan, 1.0]])
def test_noise_is_not_negative(noise: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^got a negative or NaN noise_std; expected standard deviations ≥ 0$"):
        Prediction(random(5, 4, 2)).prediction_interval(noise_std=torch.tensor(noise))


@pytest.mark.parametrize(("outputs", "shape"), [((4, 1), (4,)), ((4, 2), (4,)), ((4, 2), (2, 4)), ((4, 2), (1, 4, 2))])
def test_noise_does_not_broadcast_the_outputs(outputs: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """(N,) against (N, 1) would give N × N intervals."""
    sentence = r"^got noise_std of shape \(.*\) for outputs \(.*\); expected \(C,\), one number for each output, or "
    with pytest.raises(ValueError, match=sentence):
        Prediction(random(5, *outputs)).prediction_interval(noise_std=torch.ones(shape))


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


def test_split_gaussian_needs_pairs() -> None:
    sentence = r"^got 3 outputs; expected an even number: k means, then k logarithms of variances$"
    with pytest.raises(ValueError, match=sentence):
        split_gaussian(Prediction(random(9, 5, 3)))


@pytest.mark.parametrize("pixels", [(), (3, 2)])
def test_residual_std(pixels: tuple[int, ...]) -> None:
    """√(mean (y − f)²) over inputs and pixels, one for each output."""
    predictor, x = Fake((2, *pixels)), random(50, 5)
    y = random(50, 2, *pixels, seed=1)
    mean = predictor.summarize(x, 100).mean
    error = (y - mean).numpy()
    axes = tuple(axis for axis in range(error.ndim) if axis != 1)
    np.testing.assert_allclose(residual_std(predictor, x, y), np.sqrt((error**2).mean(axes)))


def test_residual_std_takes_n_targets_for_n_1_outputs() -> None:
    predictor, x, y = Fake((1,)), random(50, 5), random(50, seed=1)
    assert residual_std(predictor, x, y).shape == (1,)
    assert torch.equal(residual_std(predictor, x, y), residual_std(predictor, x, y[:, None]))


@pytest.mark.parametrize("shape", [(50, 3), (50,), (2, 50), (49, 2), (100,)])
def test_residual_std_needs_targets_like_the_outputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^got targets of shape \(.*\); expected \(50, 2\), as the net's outputs$"):
        residual_std(Fake((2,)), random(50, 5), torch.zeros(shape))


def test_residual_std_does_not_mix_up_the_axes() -> None:
    with pytest.raises(ValueError, match=r"^got targets of shape \(50, 3, 2\); expected \(50, 2, 3\), as the net's "):
        residual_std(Fake((2, 3)), random(50, 5), torch.zeros(50, 3, 2))
    with pytest.raises(ValueError, match=r"^got targets of shape \(2, 1\); expected \(1, 2\), as the net's "):
        residual_std(Fake((2,)), random(1, 5), torch.zeros(2, 1))


def test_residual_std_needs_targets() -> None:
    with pytest.raises(ValueError, match=r"^got no targets; expected at least one held-out point$"):
        residual_std(Fake((2,)), random(50, 5), torch.zeros(0))


def test_an_unknown_kind_of_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="got kind='bootstrap'; expected 'normal' or 'percentile'"):
        Prediction(torch.zeros(2, 1, 1)).interval(method="bootstrap")  # type: ignore[arg-type]
