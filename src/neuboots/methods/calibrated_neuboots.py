"""NeuBoots with a calibrated dispersion: its band is made as wide on average as that of a reference predictor.

    c:  mean over x of Var_α g(x, α) = mean over x of the reference's variance,   α ~ distribution of concentration c
    Var_α g(x, α) = (v_c − κ_c) Σ_s A_s(x)² + κ_c (Σ_s A_s(x))²,   A_s = contribution of block s to the output

The paper uses c = 1. Nothing in eq. 3.1 implies that: its band is multiplicative noise whose size falls with the number
of blocks S, that is, with the width of the net, while that of the bootstrap does not. One number corrects the mean
size; where the band is wide or narrow stays as in eq. 3.1, and the correlation over x that is reported with the number
measures how far that is from the reference.

The mean of the replicates stays. With the identity link it does not depend on c; with the exp link E exp(−α) does, and
α is shifted to keep it. Positive weights of a fixed sum have a bounded variance: below the concentration 0.1 (with the
exp link, below the one at which exp(−α) varies most) weights are stretched instead, s α + δ, and may be negative.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, Positive, check_choice, check_int, check_types
from neuboots.head import (
    add_output_axis,
    cast_inputs,
    check_inputs,
    count_rows,
    eval_mode,
    load_example,
    row_slices,
    take_rows,
)
from neuboots.loading import EpochLoader, dataset_length, preserve_rng_state
from neuboots.losses import BrierLoss, GaussianNLL, Loss
from neuboots.methods._base import register
from neuboots.methods.ensembles import BayesianBootstrap
from neuboots.methods.influence import MAX_KERNEL_ROWS, InfluenceBootstrap
from neuboots.methods.neuboots import BootstrapGenerator, NeuBoots, NeuBootsPredictor, compute_mean_weights
from neuboots.prediction import Predictor, SampleStream, summarize_stream
from neuboots.training import BaseMethod, FitInputs, TrainingConfig
from neuboots.weights import Dirichlet, Exponential, Link, WeightDistribution, link_moments

_MIN_CONCENTRATION = 0.1  # below, nearly all of the weight is in a few blocks
_MAX_CONCENTRATION = {"identity": 1e9, "exp": 1e4}  # above, the variance of float32 replicates is rounding error
_MAX_STRETCH = 1e3
_EXACT_TOLERANCE, _SAMPLED_TOLERANCE = 1e-12, 5e-3  # of the logarithm of the variance
_MAX_STEPS = 60
_BATCH_ROWS = 512
_MIN_VARIANCE = 1e-300
_MAX_POINTS = 1 << 18  # pixels at which variances are compared
_BATCH_FACTOR = 4  # batches without gradients may be larger than in training

_Variance = Callable[[WeightDistribution], Tensor]  # of a generator at M points of C outputs: (M, C)
_Compared = Literal["outputs", "means", "contrasts"]


# -- weight distributions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StretchedDistribution:
    """s α + δ, with α of another distribution.

    >>> _StretchedDistribution(Exponential(4.0), 2.0, -1.0).covariance(10)  # s² / c
    (1.0, 0.0)
    """

    inner: WeightDistribution
    scale: float
    shift: float
    name = "stretched"

    @property
    def concentration(self) -> float:
        return cast(float, cast(Any, self.inner).concentration)

    def sample(self, keys: Tensor, size: int) -> Tensor:
        return self.scale * self.inner.sample(keys, size) + self.shift

    def covariance(self, size: int) -> tuple[float, float]:
        v, c = self.inner.covariance(size)
        return self.scale**2 * v, self.scale**2 * c

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        return math.exp(-t * self.shift * min(parts, size)) * self.inner.laplace_transform(t * self.scale, parts, size)


def _unstretched(distribution: WeightDistribution) -> WeightDistribution:
    return distribution.inner if isinstance(distribution, _StretchedDistribution) else distribution


@dataclass(frozen=True)
class _Family:
    """Distributions from wide (small t) to narrow (large t) with the mean factor E h(α) of a given one.

        t ≥ t₀:  concentration e^t          t < t₀:  the smallest concentration, stretched by s = e^(t₀ − t)

    A distribution without a concentration is replaced by a Dirichlet.
    """

    trained: WeightDistribution
    link: Link
    size: int  # S

    def __call__(self, t: float) -> WeightDistribution:
        return self._make(math.exp(max(t, self._turn)), math.exp(max(0.0, self._turn - t)))

    @property
    def range(self) -> tuple[float, float]:
        return self._turn - math.log(_MAX_STRETCH), math.log(_MAX_CONCENTRATION[self.link])

    @cached_property
    def _turn(self) -> float:
        """t₀: with the exp link, where the factor varies most relative to its mean."""
        if self.link == "identity":
            return math.log(_MIN_CONCENTRATION)

        def relative_variance(t: float) -> float:
            mean, v, c = link_moments(self._make(math.exp(t), 1.0), self.link, self.size)
            return (v - c) / mean**2

        grid = torch.linspace(math.log(_MIN_CONCENTRATION), math.log(10.0), 61, dtype=torch.float64)
        return float(max(grid.tolist(), key=relative_variance))

    def _make(self, concentration: float, scale: float) -> WeightDistribution:
        inner: WeightDistribution
        try:
            inner = replace(cast(Any, _unstretched(self.trained)), concentration=concentration)
        except TypeError:  # it has no concentration
            inner = Dirichlet(concentration)
        if self.link == "identity":
            return inner if scale == 1.0 else _StretchedDistribution(inner, scale, 1.0 - scale)
        mean = link_moments(self.trained, self.link, self.size)[0]
        centered = link_moments(_StretchedDistribution(inner, scale, 0.0), self.link, self.size)[0]
        return _StretchedDistribution(inner, scale, math.log(centered / mean))


# -- variances of replicates ---------------------------------------------------------------------------


def _compared_outputs(loss: Loss | None) -> _Compared:
    """Which functions of the outputs are identified under this loss: of logits only their differences."""
    if isinstance(loss, nn.CrossEntropyLoss | BrierLoss | nn.NLLLoss):
        return "contrasts"
    return "means" if isinstance(loss, GaussianNLL) else "outputs"


def _flatten(values: Tensor, compared: _Compared) -> Tensor:
    """(N, C, *) with pixels as further rows, and without log σ² of a Gaussian head: (M, C), double precision."""
    values = values.narrow(1, 0, values.shape[1] // 2) if compared == "means" else values
    return values.movedim(1, -1).reshape(-1, values.shape[1]).double().cpu()


def _replicate_moments(
    predictor: Predictor, batches: list[Any], compared: _Compared, num_samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance over replicates at all points: (M, C) each."""
    number = min(num_samples, predictor.num_distinct or num_samples)
    means, variances = [], []
    with torch.no_grad():
        for x in batches:
            check_inputs(x)
            stream = predictor.copy_for_thread().stream(x, number, seed=seed)
            if compared == "contrasts":
                stream = _center_logits(stream)
            moments = stream.moments or summarize_stream(stream)
            means.append(_flatten(moments.mean, compared))
            variances.append(_flatten(moments.std, compared).square())
    return torch.cat(means), torch.cat(variances)


def _center_logits(stream: SampleStream) -> SampleStream:
    """Outputs minus their mean over classes; exact moments, which are of each output by itself, are dropped."""

    def chunks(size: int) -> Iterator[Tensor]:
        return (chunk - chunk.mean(2, keepdim=True) for chunk in stream.chunks(size))

    return SampleStream(stream.num_samples, stream.replicate_bytes, chunks)


def _exact_variance(generator: BootstrapGenerator, batches: list[Any], compared: _Compared) -> _Variance | None:
    """The variance as a function of the distribution, from one pass; None if what follows the head is not affine."""
    size, link = generator.num_blocks, generator.link
    if compared == "contrasts":
        generator = _center_head(generator)
    unit = Exponential()  # without covariances between blocks: its variance is v Σ_s A_s²
    v = link_moments(unit, link, size)[1]
    ends = torch.tensor([1.0, 0.0] if link == "identity" else [0.0, math.inf])  # with factors 1 and 0
    found: list[tuple[Tensor, Tensor]] = []
    with eval_mode(generator), torch.no_grad():
        for x in batches:
            at = generator.at(cast_inputs(generator, x))
            try:
                squares = at.moments(unit).std.square() / v
            except ValueError:
                return None
            full, none = (add_output_axis(z) for z in at(ends[:, None].expand(2, size)))
            found.append((_flatten(squares.reshape(full.shape), compared), _flatten((full - none).square(), compared)))
    squares, total = (torch.cat(parts) for parts in zip(*found, strict=True))

    def variance(distribution: WeightDistribution) -> Tensor:
        _, v, c = link_moments(distribution, link, size)
        return ((v - c) * squares + c * total).clamp_min(0.0)

    return variance


def _center_head(generator: BootstrapGenerator) -> BootstrapGenerator:
    """A copy whose head gives logits minus their mean over classes."""
    neutral = 1.0 if generator.link == "identity" else 0.0
    net, name = generator.export(torch.full((generator.num_blocks,), neutral)), generator.split.name
    head = cast(Any, net.get_submodule(name))
    with torch.no_grad():
        for part in (head.weight, head.bias):
            if part is not None:
                part -= part.mean(0, keepdim=True)
    return BootstrapGenerator(net, head=name, num_blocks=generator.num_blocks, link=generator.link)


# -- calibration ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispersion:
    """Result of a calibration of the dispersion.

    Variances are means over inputs and outputs: of several continuous outputs each in units of its own variance over
    the inputs, of classes for differences between logits, of a Gaussian head for the means.

    Attributes:
        concentration: The calibrated concentration.
        stretch: s, where no concentration is wide enough and weights are 1 + s (α − 1); else 1.
        training_concentration: The concentration in training; None for a distribution without one.
        variance_before: Variance under the distribution of the training.
        variance_after: Variance under the calibrated distribution.
        reference_variance: Variance of the reference.
        correlation: Correlation over inputs of the two standard deviations, which the concentration hardly changes;
            None if one of them is constant. The noise of a few members lowers it.
        num_points: Number of inputs, or of their pixels.
    """

    concentration: float
    stretch: float
    training_concentration: float | None
    variance_before: float
    variance_after: float
    reference_variance: float
    correlation: float | None
    num_points: int

    @property
    def reached(self) -> bool:
        """Whether the variance of the reference could be reached."""
        return math.isclose(self.variance_after, self.reference_variance, rel_tol=0.01)

    def __str__(self) -> str:
        before = "" if self.training_concentration is None else f" (training: {self.training_concentration:.4g})"
        before += "" if self.stretch == 1.0 else f", stretched by {self.stretch:.4g}"
        correlation = "undefined" if self.correlation is None else f"{self.correlation:.2f}"
        return (
            f"concentration {self.concentration:.4g}{before}; mean variance {self.variance_before:.4g} before, "
            f"{self.variance_after:.4g} after, {self.reference_variance:.4g} of the reference; correlation of the "
            f"standard deviations over {self.num_points} points {correlation}"
        )


@dataclass(frozen=True)
class CalibratedNeuBootsPredictor(NeuBootsPredictor):
    """NeuBoots with a calibrated weight distribution.

    Attributes:
        dispersion: Result of the calibration.
    """

    dispersion: Dispersion

    def config(self) -> dict[str, Any]:
        distribution = self.weight_distribution
        stretched = isinstance(distribution, _StretchedDistribution)
        scale, shift = (distribution.scale, distribution.shift) if stretched else (1.0, 0.0)  # type: ignore[attr-defined]
        config = NeuBootsPredictor(self.generator, _unstretched(distribution)).config()
        options = {"scale": scale, "shift": shift, "dispersion": asdict(self.dispersion)}
        return config | options | {"method": "calibrated-neuboots"}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "CalibratedNeuBootsPredictor":
        check_types("predictor", config, {"scale": Positive, "shift": float, "dispersion": Dispersion})
        plain = NeuBootsPredictor.from_config(config, net)
        distribution, scale, shift = plain.weight_distribution, config["scale"], config["shift"]
        if (scale, shift) != (1.0, 0.0):
            distribution = _StretchedDistribution(distribution, scale, shift)
        return cls(plain.generator, distribution, Dispersion(**config["dispersion"]))


def calibrate_dispersion(
    predictor: NeuBootsPredictor,
    reference: Predictor,
    x: Any,
    *,
    loss: Loss | None = None,
    num_samples: int = 200,
    seed: int = 0,
) -> CalibratedNeuBootsPredictor:
    """Find the concentration at which NeuBoots has the mean variance of another predictor.

    The variance of NeuBoots is exact, unless something follows the head that is not affine: then it is estimated from
    replicates. A distribution without a concentration is replaced by a Dirichlet.

    Args:
        predictor: A fitted NeuBoots.
        reference: The other predictor, such as a few nets of the Bayesian bootstrap or the influence bootstrap.
        x: Inputs at which the variances are compared.
        loss: Loss of the training. With a softmax only differences between logits are compared, of a Gaussian head
            only the means; None compares all outputs.
        num_samples: Number of replicates, where a variance is not known exactly.
        seed: Seed of the replicates.

    Returns:
        The same generator with another weight distribution.

    Raises:
        ValueError: If one of the predictors has no variance at x, or is not finite there.

    Example:
        >>> from neuboots.methods import Laplace
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> data, net = (x, x[:, 0]), nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> predictor = NeuBoots.regression().fit(net, data, TrainingConfig(epochs=5, progress=False))
        >>> reference = Laplace(nn.MSELoss()).from_trained(predictor.net, data)
        >>> calibrated = calibrate_dispersion(predictor, reference, x)
        >>> bool(torch.isclose(calibrated.moments(x).std.square().mean(), reference.predict(x).std.square().mean()))
        True
    """
    check_inputs(x)
    batches = [take_rows(x, rows) for rows in row_slices(count_rows(x), _BATCH_ROWS)]
    if not count_rows(x):
        raise ArgumentError("x", "no inputs", "at least one input")
    return _calibrate(predictor, reference, batches, loss=loss, num_samples=num_samples, seed=seed)


def _calibrate(
    predictor: NeuBootsPredictor,
    reference: Predictor,
    batches: list[Any],
    *,
    loss: Loss | None,
    num_samples: int = 200,
    seed: int,
) -> CalibratedNeuBootsPredictor:
    if not isinstance(predictor, NeuBootsPredictor):
        raise ArgumentError("predictor", type(predictor), "a predictor of NeuBoots")
    if not isinstance(reference, Predictor) or reference.num_distinct == 1:
        raise ArgumentError("reference", type(reference), "a predictor with at least two different replicates")
    check_int("num_samples", num_samples, minimum=2)
    compared = _compared_outputs(loss)
    mean, wanted = _replicate_moments(reference, batches, compared, num_samples, seed)
    scale = _output_scale(mean, compared)
    target = float(wanted.mean(0) @ scale)
    if not 0.0 < target < math.inf:
        raise ArgumentError("reference", f"replicates of variance {target:.4g}", "a positive, finite variance at x")
    variance, tolerance = _exact_variance(predictor.copy_for_thread().generator, batches, compared), _EXACT_TOLERANCE
    if variance is None:
        tolerance = _SAMPLED_TOLERANCE

        def variance(distribution: WeightDistribution) -> Tensor:
            other = NeuBootsPredictor(predictor.generator, distribution)
            return _replicate_moments(other, batches, compared, num_samples, seed)[1]

    before = variance(predictor.weight_distribution)
    if before.shape != wanted.shape:
        expected = f"the outputs of NeuBoots, {before.shape[1]} at {len(before)} points"
        raise ArgumentError("reference", f"{wanted.shape[1]} outputs at {len(wanted)} points", expected)
    distribution = _solve(predictor, variance, scale, target, tolerance)
    after = variance(distribution)
    found = Dispersion(
        concentration=cast(Any, distribution).concentration,
        stretch=distribution.scale if isinstance(distribution, _StretchedDistribution) else 1.0,
        training_concentration=getattr(_unstretched(predictor.weight_distribution), "concentration", None),
        variance_before=float(before.mean(0) @ scale),
        variance_after=float(after.mean(0) @ scale),
        reference_variance=target,
        correlation=_correlation((after * scale).sum(1).sqrt(), (wanted * scale).sum(1).sqrt()),
        num_points=len(wanted),
    )
    if not found.reached:
        advice = "train with another link, or use the reference itself"
        warnings.warn(f"the variance of the reference is out of range: {found}; {advice}", UserWarning, stacklevel=2)
    calibrated = CalibratedNeuBootsPredictor(predictor.generator, distribution, found)
    return calibrated.as_independent() if predictor.independent else calibrated


def _output_scale(mean: Tensor, compared: _Compared) -> Tensor:
    """Weights of the variances of the outputs: equal if they share a unit, else 1 over the variance over x: (C,)."""
    spread = mean.var(0, correction=0)
    varies = spread > torch.finfo(torch.float32).eps ** 2 * mean.square().mean(0)
    if compared == "contrasts" or len(spread) == 1 or not bool(varies.any()):
        return torch.ones_like(spread) / len(spread)
    return (1.0 / spread).where(varies, 0.0) / int(varies.sum())


def _correlation(a: Tensor, b: Tensor) -> float | None:
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1]) if len(a) > 2 else math.nan
    return None if math.isnan(correlation) else correlation


def _solve(
    predictor: NeuBootsPredictor, variance: _Variance, scale: Tensor, target: float, tolerance: float
) -> WeightDistribution:
    """The distribution of the wanted variance, or the nearest one in the family, by bisection."""
    generator = predictor.generator
    family = _Family(predictor.weight_distribution, generator.link, generator.num_blocks)

    def excess(t: float) -> float:
        found = float(variance(family(t)).mean(0) @ scale)
        if not math.isfinite(found):
            raise ValueError("NeuBoots gives NaN or infinite replicates at x")
        return math.log(max(found, _MIN_VARIANCE) / target)

    low, high = family.range
    over, under = excess(low), excess(high)
    if over <= math.log(_MIN_VARIANCE / target):
        size = generator.num_blocks
        raise ValueError(f"replicates are equal at x (S = {size}); use more blocks, or check for dead features")
    if over <= 0.0 or under >= 0.0:
        return family(low if over <= 0.0 else high)
    for _ in range(_MAX_STEPS):
        middle = (low + high) / 2
        value = excess(middle)
        if abs(value) <= tolerance:
            break
        low, high = (middle, high) if value > 0 else (low, middle)
    return family(middle)


# -- the method ----------------------------------------------------------------------------------------


@register(
    "calibrated-neuboots",
    predictor=CalibratedNeuBootsPredictor,
    summary="NeuBoots with the dispersion of the influence bootstrap, or of trained replicates",
    predict_cost="O(L + K)",
    reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
)
@dataclass(frozen=True)
class CalibratedNeuBoots(BaseMethod[CalibratedNeuBootsPredictor]):
    """NeuBoots, trained once, with the concentration at prediction time fitted to a reference.

    The predictor's `dispersion` reports the result, and how well the two bands agree on where they are wide: one number
    cannot correct that, and where it matters the reference itself is the better band.

    Args:
        loss: Loss per example.
        neuboots: Options of the training; None is `NeuBoots(loss)` for classes, `NeuBoots.regression(loss)` otherwise.
        reference: "influence" is the influence bootstrap of the trained net itself, at the mean of α: a pass over the
            data, no further training. "bootstrap" trains `num_members` nets of the Bayesian bootstrap; the relative
            error of their mean variance is about √(2/K) or less.
        layers: Layers of the influence bootstrap; None is the whole net for continuous targets where its kernel fits
            in memory, else the head.
        num_members: Number K of nets of the Bayesian bootstrap.
        num_inputs: Number of training inputs, drawn by the seed, at which variances are compared; fewer for maps.

    Example:
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        >>> method = CalibratedNeuBoots(nn.MSELoss(), reference="bootstrap", num_members=4)
        >>> predictor = method.fit(net, (x, x[:, 0].sin()), TrainingConfig(epochs=5, progress=False))
        >>> predictor.dispersion.reached
        True
    """

    neuboots: NeuBoots | None = None
    reference: Literal["influence", "bootstrap"] = "influence"
    layers: int | Literal["all"] | None = None
    num_members: int = 10
    num_inputs: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neuboots is not None and (not isinstance(self.neuboots, NeuBoots) or self.neuboots.loss != self.loss):
            raise ArgumentError("neuboots", self.neuboots, f"NeuBoots options with the loss {self.loss!r}, or None")
        check_choice("reference", self.reference, ("influence", "bootstrap"))
        if self.reference == "bootstrap" and self.options.train_head_only:
            raise ArgumentError("reference", self.reference, "'influence' with train_head_only=True")
        if self.layers is not None:
            InfluenceBootstrap(self.loss, layers=self.layers)
        check_int("num_members", self.num_members, minimum=2)
        check_int("num_inputs", self.num_inputs, minimum=2)

    @property
    def options(self) -> NeuBoots:
        """Options of the training, with the default resolved."""
        if self.neuboots is not None:
            return self.neuboots
        classes = _compared_outputs(self.loss) == "contrasts" or isinstance(self.loss, nn.BCEWithLogitsLoss)
        return NeuBoots(self.loss) if classes else NeuBoots.regression(self.loss)

    def _fit(self, inputs: FitInputs) -> CalibratedNeuBootsPredictor:
        data, config = inputs.data, inputs.config
        predictor = self.options.fit(inputs.factory, data, config, val_data=inputs.val_data)
        generator = predictor.generator
        with eval_mode(generator), torch.no_grad():
            example = load_example(generator.net, data, seed=config.seed)
            shape = add_output_axis(generator.at(example).output).shape  # (2, C, *)
        if self.reference == "bootstrap":
            folder = None if config.folder is None else Path(config.folder) / "reference"
            method = BayesianBootstrap(self.loss, num_members=self.num_members)
            reference: Predictor = method.fit(
                inputs.member_factory, data, replace(config, folder=folder), val_data=inputs.val_data
            )
        else:
            reference = self._make_influence(predictor, data, config, shape)
        rows = max(1, min(self.num_inputs, _MAX_POINTS // max(1, shape[2:].numel())))
        batches = list(_read_inputs(data, config, rows))
        return _calibrate(predictor, reference, batches, loss=self.loss, seed=config.seed)

    def _row_weights(
        self, predictor: CalibratedNeuBootsPredictor, data: Dataset[Any], num_samples: int, seed: int, fit_seed: int
    ) -> Tensor:
        return self.options._row_weights(predictor, data, num_samples, seed, fit_seed)

    def _make_influence(
        self, predictor: NeuBootsPredictor, data: Dataset[Any], config: TrainingConfig, shape: torch.Size
    ) -> Predictor:
        generator, layers = predictor.generator, self.layers
        if layers is None:
            n = dataset_length(data)
            continuous = isinstance(self.loss, nn.MSELoss | GaussianNLL)  # classes need C slopes for each row
            small = continuous and n is not None and len(shape) == 2 and n * shape[1] <= MAX_KERNEL_ROWS
            one_size = config.batch_size > 1  # single rows may differ in size
            layers = "all" if small and one_size and not self.options.train_head_only else 1
        net = generator.export(
            compute_mean_weights(predictor.weight_distribution, generator.link, generator.num_blocks)
        )
        head = generator.split.name if layers == 1 else None
        return InfluenceBootstrap(self.loss, layers=layers, head=head).make_predictor(net.eval(), data, config)


def _read_inputs(data: Dataset[Any], config: TrainingConfig, rows: int) -> Iterator[Any]:
    """Up to `rows` training inputs, some at a time, in an order drawn by the seed; a stream in its own order."""
    size = min(rows, _BATCH_FACTOR * config.batch_size) if config.batch_size > 1 else 1  # single rows differ in size
    shuffle, steps = dataset_length(data) is not None, config.steps_per_epoch
    loader = EpochLoader(data, batch_size=size, seed=config.seed, shuffle=shuffle, steps_per_epoch=steps)
    with preserve_rng_state():
        for _, batch, _ in loader.epoch(0):
            x = take_rows(batch.x, slice(rows))
            yield x
            rows -= count_rows(x)
            if rows <= 0:
                return
