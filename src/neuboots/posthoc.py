"""Post-hoc calibration of any predictor on held-out data: temperature and standard-deviation scaling.

    f_b(x) / T,  T = argmin −Σᵢ log 1/B Σ_b softmax(f_b(Xᵢ)/T)_{yᵢ}           (classification)
    m(x) + s (f_b(x) − m(x)),  s² = 1/n Σᵢ (yᵢ − m(Xᵢ))² / v(Xᵢ)              (regression)

with m and v the predictive mean and variance; both maximize the likelihood of the held-out data. Neither changes the
order of the replicates, and T does not change the predicted class of a single net.

Guo, Pleiss, Sun and Weinberger, On calibration of modern neural networks, ICML 2017 (temperature); Laves, Ihler, Fast,
Kahrs and Ortmaier, Well-calibrated regression uncertainty in medical imaging with deep learning, MIDL 2020 (scale).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError, Positive, check_positive, check_types
from neuboots.loading import FitData, as_dataset, check_length
from neuboots.methods._base import WRAPPERS, find_predictor_class, iterate_batches
from neuboots.prediction import (
    Moments,
    Prediction,
    Predictor,
    SampleStream,
    class_logits,
    class_probabilities,
    split_gaussian,
    summarize_stream,
)
from neuboots.training import TrainingConfig

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.02, 50.0
_GRID_SIZE, _NUM_ZOOMS = 17, 5  # each pass over the data tries 17 temperatures and leaves an eighth of the range
_CENTER_SAMPLES = 100  # replicates whose mean is the center, for methods without an exact mean


@dataclass(frozen=True)
class ScaledPredictor(Predictor):
    """Another predictor with its outputs rescaled.

    Attributes:
        inner: The predictor whose outputs are rescaled.
        temperature: T, which divides the outputs.
        std_scale: s for each mean; None for classification.
        gaussian: Whether the outputs are k means, then k values of log σ².
    """

    inner: Predictor
    temperature: float = 1.0
    std_scale: tuple[float, ...] | None = None
    gaussian: bool = False

    @property
    def net(self) -> nn.Module | None:
        return self.inner.net

    @property
    def module(self) -> nn.Module:
        return self.inner.module

    @property
    def num_distinct(self) -> int | None:
        return self.inner.num_distinct

    @property
    def independent(self) -> bool:  # type: ignore[override]
        return self.inner.independent

    def as_independent(self) -> "ScaledPredictor":
        return replace(self, inner=self.inner.as_independent())

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        inner = self.inner.stream(x, num_samples, seed=seed)
        scale = self._divide if self.std_scale is None else self._make_widening(x, inner, seed)

        def chunks(size: int) -> Iterator[Tensor]:
            return (scale(chunk, False) for chunk in inner.chunks(size))

        moments = inner.moments
        if moments is not None:
            moments = Moments(scale(moments.mean[None], False)[0], scale(moments.std[None], True)[0])
        return SampleStream(num_samples, inner.replicate_bytes, chunks, moments)

    def _divide(self, values: Tensor, is_std: bool) -> Tensor:
        return values / self.temperature

    def _make_widening(self, x: Any, inner: SampleStream, seed: int) -> Callable[[Tensor, bool], Tensor]:
        """A function that moves samples away from the center by s, and multiplies standard deviations by s."""
        if inner.moments is None:
            samples = max(_CENTER_SAMPLES, self.num_distinct or 0)
            center = summarize_stream(self.inner.stream(x, samples, seed=seed)).mean
        else:
            center = inner.moments.mean  # (N, C, *)
        scale, shift = torch.ones_like(center[:1]), torch.zeros_like(center[:1])  # (1, C, *)
        factors = torch.tensor(self.std_scale).to(center)
        outputs = center.shape[1]
        if 2 * len(factors) != outputs and (self.gaussian or len(factors) != outputs):
            raise ArgumentError("std_scale", self.std_scale, f"a factor of each mean, for a net with {outputs} outputs")
        shape = (-1, *[1] * (center.ndim - 2))
        scale[:, : len(factors)] = factors.view(shape)
        if self.gaussian:
            shift[:, len(factors) :] = 2 * factors.log().view(shape)

        def widen(values: Tensor, is_std: bool) -> Tensor:
            return values * scale if is_std else center + scale * (values - center) + shift

        return widen

    def config(self) -> dict[str, Any]:
        options = {"temperature": self.temperature, "std_scale": self.std_scale, "gaussian": self.gaussian}
        return {"method": "scaled", **options, "inner": self.inner.config()}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "ScaledPredictor":
        check_types(
            "predictor",
            config,
            {"temperature": Positive, "std_scale": list[Positive] | None, "gaussian": bool, "inner": dict},
        )
        inner = find_predictor_class(config["inner"]).from_config(config["inner"], net)
        std_scale = None if config["std_scale"] is None else tuple(config["std_scale"])
        return cls(inner, config["temperature"], std_scale, config["gaussian"])


@dataclass(frozen=True)
class _Scaling:
    """Options of a scaling that is fitted on held-out data."""

    num_samples: int = 100
    seed: int = 0
    batch_size: int = 128

    def _predict(self, predictor: Predictor, data: FitData) -> Iterator[tuple[Prediction, Tensor]]:
        """Predictions and targets of the held-out data, in batches."""
        if not isinstance(predictor, Predictor):
            raise ArgumentError("predictor", type(predictor), "a Predictor, as `fit` returns")
        dataset = as_dataset(data)
        check_length(dataset)
        for batch in iterate_batches(dataset, TrainingConfig(epochs=1, batch_size=self.batch_size)):
            yield predictor.predict(batch.x, self.num_samples, seed=self.seed), batch.y


@dataclass(frozen=True)
class TemperatureScaling(_Scaling):
    """Temperature scaling of a classifier.

    T is between 0.02 and 50.

    Args:
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        batch_size: Examples that are predicted at once.
        ignore_index: Label of examples, pixels or tokens that do not count.
        prior_std: Standard deviation of a normal prior of log T around 0, for few examples, which may all be right by
            chance; None for no prior.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> confident = DeterministicPredictor(nn.Linear(2, 2))
        >>> data = 100 * torch.randn(50, 2), torch.arange(50) % 2
        >>> TemperatureScaling().fit(confident, data).temperature > 1  # the labels are noise
        True
    """

    ignore_index: int = -100
    prior_std: float | None = None

    def __post_init__(self) -> None:
        if self.prior_std is not None:
            check_positive("prior_std", self.prior_std)

    def fit(self, predictor: Predictor, data: FitData) -> ScaledPredictor:
        """Find the temperature that maximizes the likelihood of held-out labels.

        Args:
            predictor: A fitted classifier; labels are classes, or 0 and 1 for each of several independent outputs.
            data: Data that it was not trained on, as in the `fit` of a method; they are read five times.

        Returns:
            The predictor with its outputs divided by T.

        Raises:
            ValueError: If no label counts, or the outputs are not finite.
        """
        low, high = math.log(_MIN_TEMPERATURE), math.log(_MAX_TEMPERATURE)
        best = 0.0
        for _ in range(_NUM_ZOOMS):
            grid = torch.linspace(low, high, _GRID_SIZE, dtype=torch.float64)
            total = torch.zeros_like(grid) if self.prior_std is None else -0.5 * (grid / self.prior_std) ** 2
            labelled = False
            for prediction, y in self._predict(predictor, data):
                labelled = labelled or bool((y != self.ignore_index).any())
                samples = class_logits(prediction.samples, 2, independent=prediction.independent)
                total += torch.stack([self._log_likelihood(samples / t, y) for t in grid.exp().tolist()])
            if not labelled:
                raise ArgumentError("data", "labels that are all ignored", "at least one label that counts")
            if not bool(torch.isfinite(total).all()):
                raise ValueError("the outputs on the held-out data are not finite")
            at = int(total.argmax())
            best = float(grid[at])
            low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, _GRID_SIZE - 1)])
        return ScaledPredictor(predictor, temperature=math.exp(best))

    def _log_likelihood(self, samples: Tensor, y: Tensor) -> Tensor:
        """Σᵢ log 1/B Σ_b p_b(yᵢ) over labels that count, in double precision."""
        probs = class_probabilities(samples, 2).mean(0)  # (N, C, *)
        labels = y.to(probs.device).long().reshape(probs.shape[0], *probs.shape[2:])
        counted = labels != self.ignore_index
        if bool(((labels < 0) | (labels >= probs.shape[1]))[counted].any()):
            raise ArgumentError("data", int(labels[counted].max()), f"labels 0 … {probs.shape[1] - 1}")
        picked = probs.gather(1, labels.where(counted, 0)[:, None])[:, 0]
        return picked.double().clamp_min(torch.finfo(picked.dtype).tiny).log()[counted].sum().cpu()


@dataclass(frozen=True)
class StdScaling(_Scaling):
    """Standard-deviation scaling of a regressor.

    Where the net has two outputs for each target (`GaussianNLL`), s scales band and noise alike. Otherwise the scaled
    band also stands for the noise: its `interval` then covers new targets, not the regression function.

    Args:
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        batch_size: Examples that are predicted at once.

    Example:
        >>> from neuboots import NeuBoots, TrainingConfig
        >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        >>> net, data = nn.Linear(2, 1), (x, x[:, :1])
        >>> predictor = NeuBoots.regression().fit(net, data, TrainingConfig(epochs=1, progress=False))
        >>> len(StdScaling().fit(predictor, data).std_scale)
        1
    """

    def fit(self, predictor: Predictor, data: FitData) -> ScaledPredictor:
        """Find the scale of the standard deviation that maximizes the Gaussian likelihood of held-out targets.

        Args:
            predictor: A fitted regressor whose replicates differ.
            data: Data that it was not trained on, as in the `fit` of a method.

        Returns:
            The predictor with its standard deviation times s.

        Raises:
            ValueError: If targets and outputs differ in shape, or the predictive variance is zero.
        """
        squares: Tensor | float = 0.0
        rows = 0
        gaussian = False
        for band, targets in self._predict(predictor, data):
            noise = torch.zeros(())
            y = targets.to(band.mean)
            y = y[:, None] if y.ndim == band.mean.ndim - 1 else y  # (N, k, *)
            gaussian = band.mean.shape[1] == 2 * y.shape[1]
            if gaussian:
                band, noise = split_gaussian(band)
            if y.shape != band.mean.shape:
                expected = f"targets in the shape of the outputs, {tuple(band.mean.shape)}, or half as many"
                raise ArgumentError("data", tuple(targets.shape), expected)
            variance = band.std.double().square() + noise.to(y).double().square()
            if not bool((variance > 0).all()):
                raise ValueError(
                    "the predictive variance is zero for some held-out rows, so it cannot be rescaled; "
                    "use a method whose replicates differ"
                )
            ratio = ((y - band.mean).double().square() / variance).movedim(1, 0).flatten(1)  # (k, …)
            squares = squares + ratio.sum(1)
            rows += ratio.shape[1]
        assert isinstance(squares, Tensor), "the held-out data have at least one row"
        scale = (squares / rows).sqrt().clamp_min(1e-6)
        return ScaledPredictor(predictor, std_scale=tuple(scale.tolist()), gaussian=gaussian)


WRAPPERS["scaled"] = ScaledPredictor
