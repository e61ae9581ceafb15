"""One number more, fitted on held-out data, for any predictor: a temperature for classes, a scale for regression.

    f_b(x) / T,  T = argmin −Σᵢ log 1/B Σ_b softmax(f_b(Xᵢ)/T)_{yᵢ}           (classes)
    m(x) + s (f_b(x) − m(x)),  s² = 1/n Σᵢ (yᵢ − m(Xᵢ))² / v(Xᵢ)              (regression)

with m and v the predictive mean and variance; both maximise the likelihood of the held-out rows. Neither changes the
order of the replicates, and T does not change which class a single net finds likeliest.

Guo, Pleiss, Sun and Weinberger, On calibration of modern neural networks, ICML 2017 (temperature); Laves, Ihler, Fast,
Kahrs and Ortmaier, Well-calibrated regression uncertainty in medical imaging with deep learning, MIDL 2020 (scale).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._streaming import class_probabilities
from neuboots.loading import Batch, EpochLoader, dataset_length, preserve_rng_state
from neuboots.methods._base import find_predictor_class
from neuboots.prediction import Moments, Predictor, SampleStream, split_gaussian, summarize_stream

_COLDEST, _HOTTEST = 0.02, 50.0
_GRID, _ZOOMS = 17, 5  # each pass over the data tries 17 temperatures and leaves an eighth of the range
_CENTRE = 100  # replicates whose mean is the centre, where the method does not know its exact mean


@dataclass(frozen=True)
class ScaledPredictor(Predictor):
    """Another predictor with its outputs rescaled; `scale_temperature` and `scale_std` make one."""

    inner: Predictor
    temperature: float = 1.0
    std_scale: tuple[float, ...] | None = None  # one for each mean
    gaussian: bool = False  # the outputs hold k means, then k values of log σ²

    @property
    def net(self) -> nn.Module | None:
        return self.inner.net

    @property
    def module(self) -> nn.Module:
        return self.inner.module

    @property
    def num_distinct(self) -> int | None:
        return self.inner.num_distinct

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        inner = self.inner.stream(x, num_samples, seed=seed)
        scaled = self._hotter if self.std_scale is None else self._wider(x, inner, seed)

        def chunks(size: int) -> Iterator[Tensor]:
            return (scaled(chunk, False) for chunk in inner.chunks(size))

        moments = inner.moments
        if moments is not None:
            moments = Moments(scaled(moments.mean[None], False)[0], scaled(moments.std[None], True)[0])
        return SampleStream(num_samples, inner.replicate_bytes, chunks, moments)

    def _hotter(self, values: Tensor, spread: bool) -> Tensor:
        return values / self.temperature

    def _wider(self, x: Any, inner: SampleStream, seed: int) -> Callable[[Tensor, bool], Tensor]:
        """Samples moved away from the centre by s; standard deviations times s."""
        if inner.moments is None:
            centre = summarize_stream(self.inner.stream(x, max(_CENTRE, self.num_distinct or 0), seed=seed)).mean
        else:
            centre = inner.moments.mean  # (N, C, *)
        scale, shift = torch.ones_like(centre[:1]), torch.zeros_like(centre[:1])  # (1, C, *)
        factors = torch.tensor(self.std_scale).to(centre)
        shape = (-1, *[1] * (centre.ndim - 2))
        scale[:, : len(factors)] = factors.view(shape)
        if self.gaussian:
            shift[:, len(factors) :] = 2 * factors.log().view(shape)

        def scaled(values: Tensor, spread: bool) -> Tensor:
            return values * scale if spread else centre + scale * (values - centre) + shift

        return scaled

    def config(self) -> dict[str, Any]:
        options = {"temperature": self.temperature, "std_scale": self.std_scale, "gaussian": self.gaussian}
        return {"method": "scaled", **options, "inner": self.inner.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "ScaledPredictor":
        inner = find_predictor_class(config["inner"]).from_config(config["inner"], net)
        std_scale = None if config["std_scale"] is None else tuple(config["std_scale"])
        return cls(inner, config["temperature"], std_scale, config["gaussian"])


def _check_predictor(predictor: Predictor) -> None:
    if not isinstance(predictor, Predictor):
        raise ValueError(f"got a {type(predictor).__name__}; expected a predictor, as fit gives one")


def _batches(data: Dataset[Any], batch_size: int) -> Iterator[Batch]:
    if dataset_length(data) is None:
        raise ValueError("got a stream of unknown length; expected held-out rows with a length")
    with preserve_rng_state():
        for _, batch, _ in EpochLoader(data, batch_size=batch_size, seed=0, shuffle=False).epoch(0):
            yield batch


def scale_temperature(
    predictor: Predictor,
    data: Dataset[Any],
    *,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 128,
    ignore_index: int = -100,
    prior_std: float | None = None,
) -> ScaledPredictor:
    """The predictor with its outputs divided by the temperature that gives held-out labels the highest likelihood.

    The rows must not have been trained on. They are read a few times, batch by batch, and never held. T stays between
    0.02 and 50: a predictor that is always right wants none, one that knows nothing wants infinity. Of few rows all may
    be right by luck: with a `prior_std`, log T is drawn to 0 as a normal prior of this standard deviation has it.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> sure = DeterministicPredictor(nn.Linear(2, 2))
    >>> rows = TensorDataset(100 * torch.randn(50, 2), torch.arange(50) % 2)
    >>> scale_temperature(sure, rows).temperature > 1  # labels are noise: it should not be sure
    True
    """
    _check_predictor(predictor)
    if prior_std is not None and not 0 < prior_std < math.inf:
        raise ValueError(f"got prior_std={prior_std}; expected a positive number, or None for no prior")
    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    best = 0.0
    for _ in range(_ZOOMS):
        grid = torch.linspace(low, high, _GRID, dtype=torch.float64)
        total = torch.zeros(_GRID, dtype=torch.float64) if prior_std is None else -0.5 * (grid / prior_std) ** 2
        labelled = False
        for batch in _batches(data, batch_size):
            labelled = labelled or bool((batch.y != ignore_index).any())
            samples = predictor.predict(batch.x, num_samples, seed=seed).samples
            total += torch.stack([_log_likelihood(samples / t, batch.y, ignore_index) for t in grid.exp().tolist()])
        if not labelled:
            raise ValueError("none of the held-out labels counts (all are void); expected rows with labels")
        if not bool(torch.isfinite(total).all()):
            raise ValueError("the outputs on the held-out rows are not finite; expected finite numbers")
        at = int(total.argmax())
        best = float(grid[at])
        low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, _GRID - 1)])
    return ScaledPredictor(predictor, temperature=math.exp(best))


def _log_likelihood(samples: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    """Σᵢ log 1/B Σ_b p_b(yᵢ) over labels that count, in double precision."""
    probs = class_probabilities(samples, 2).mean(0)  # (N, C, *)
    labels = y.to(probs.device).long().reshape(probs.shape[0], *probs.shape[2:])
    counted = labels != ignore_index
    if bool(((labels < 0) | (labels >= probs.shape[1]))[counted].any()):
        raise ValueError(f"got labels outside 0 … {probs.shape[1] - 1}; expected classes of the net")
    picked = probs.gather(1, labels.where(counted, 0)[:, None])[:, 0]
    return picked.double().clamp_min(torch.finfo(picked.dtype).tiny).log()[counted].sum().cpu()


def scale_std(
    predictor: Predictor, data: Dataset[Any], *, num_samples: int = 100, seed: int = 0, batch_size: int = 128
) -> ScaledPredictor:
    """The predictor with its standard deviation times s, so that held-out targets have the highest Gaussian likelihood.

    Where the net has two outputs for each target (GaussianNLL), s scales band and noise alike. Otherwise the scaled
    band also stands for the noise: its `interval` is then where a new y falls, not where the regression function lies.
    """
    _check_predictor(predictor)
    squares: Tensor | float = 0.0
    rows = 0
    gaussian = False
    for batch in _batches(data, batch_size):
        band, noise = predictor.predict(batch.x, num_samples, seed=seed), torch.zeros(())
        y = batch.y.to(band.mean)
        y = y[:, None] if y.ndim == band.mean.ndim - 1 else y  # (N, k, *)
        gaussian = band.mean.shape[1] == 2 * y.shape[1]
        if gaussian:
            band, noise = split_gaussian(band)
        if y.shape != band.mean.shape:
            raise ValueError(
                f"got targets {tuple(batch.y.shape)} for outputs {tuple(band.mean.shape)}; expected the same shape, "
                "or half as many targets as outputs (means and log-variances)"
            )
        variance = band.std.double().square() + noise.to(y).double().square()
        if not bool((variance > 0).all()):
            raise ValueError(
                "the replicates are all the same at some held-out rows, and no factor makes a spread of none; expected "
                "a method whose replicates differ"
            )
        ratio = ((y - band.mean).double().square() / variance).movedim(1, 0).flatten(1)  # (k, …)
        squares = squares + ratio.sum(1)
        rows += ratio.shape[1]
    assert isinstance(squares, Tensor), "the held-out data have at least one row"
    scale = (squares / rows).sqrt().clamp_min(1e-6)
    return ScaledPredictor(predictor, std_scale=tuple(scale.tolist()), gaussian=gaussian)
