"""The dispersion of NeuBoots' law at prediction time, set so that its band is as wide as another one's.

    c:  mean over x of Var_α g(x, α) = mean over x of the other predictor's variance,   α ~ law of concentration c
    Var_α g(x, α) = (v_c − κ_c) Σ_s A_s(x)² + κ_c (Σ_s A_s(x))²,   A_s = what block s adds to the output

The paper takes c = 1. Nothing in eq. 3.1 says so: its band is multiplicative noise whose size falls with the number of
blocks S, that is, with the width of the net, while that of the bootstrap does not. One number sets the mean size right;
where the band is wide and where it is narrow stays as eq. 3.1 has it, and the correlation over x that is reported with
the number tells how far that is from the other predictor's.

The mean of the replicates stays. With the identity link it does not depend on c; with the exp link E exp(−α) does, and
α is shifted by what keeps it.

A family of laws from narrow to wide with one mean factor E h(α), that of the training.

    t ≥ t₀:  concentration e^t          t < t₀:  the widest concentration, stretched: s α + δ,  s = e^(t₀ − t)

Concentration alone goes only so far: positive weights of a fixed sum are at most one block at a time. Below 0.1 (with
the exp link, below the concentration at which exp(−α) varies most) weights are stretched instead, and may be negative.

The variance of replicates at some points, of NeuBoots as a function of its law.

The concentration at which NeuBoots has the variance of another predictor, and what was found on the way.

NeuBoots with its dispersion set from the training data: by a few true replicates, or by the influence bootstrap.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._pytree import count_rows, take_rows
from neuboots._validation import check_int
from neuboots.generator import BootstrapGenerator
from neuboots.head import cast_inputs, check_inputs, eval_mode, load_example
from neuboots.loading import EpochLoader, dataset_length, preserve_rng_state
from neuboots.losses import BrierLoss, GaussianNLL, Loss, as_loss
from neuboots.methods._base import register
from neuboots.methods.ensembles import BayesianBootstrap
from neuboots.methods.influence import MAX_KERNEL_ROWS, InfluenceBootstrap
from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor, compute_mean_weights
from neuboots.prediction import Predictor, SampleStream, summarize_stream
from neuboots.training import TrainingConfig
from neuboots.weights import Dirichlet, Exponential, Link, WeightDistribution, link_moments

_LEAST = 0.1  # of the concentration: below, nearly all of the weight is in a few blocks
_MOST = {"identity": 1e9, "exp": 1e4}  # above, the variance of float32 replicates, or of exp(−α), is rounding
_STRETCH = 1e3


@dataclass(frozen=True)
class StretchedDistribution:
    """s α + δ, with α of another law.

    >>> from neuboots.weights import Exponential
    >>> StretchedDistribution(Exponential(4.0), 2.0, -1.0).covariance(10)  # s² / c
    (1.0, 0.0)
    """

    weight_distribution: WeightDistribution
    scale: float
    shift: float
    name = "stretched"

    @property
    def concentration(self) -> float:
        return cast(float, cast(Any, self.weight_distribution).concentration)

    def sample(self, keys: Tensor, size: int) -> Tensor:
        return self.scale * self.weight_distribution.sample(keys, size) + self.shift

    def covariance(self, size: int) -> tuple[float, float]:
        v, c = self.weight_distribution.covariance(size)
        return self.scale**2 * v, self.scale**2 * c

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        return math.exp(-t * self.shift * min(parts, size)) * self.weight_distribution.laplace_transform(
            t * self.scale, parts, size
        )


def unstretched(weight_distribution: WeightDistribution) -> WeightDistribution:
    """The law inside any stretching."""
    return (
        weight_distribution.weight_distribution
        if isinstance(weight_distribution, StretchedDistribution)
        else weight_distribution
    )


@dataclass(frozen=True)
class DispersionFamily:
    """The laws of another dispersion than this one; a law without a concentration gives way to a Dirichlet."""

    weight_distribution: WeightDistribution  # that of the training
    link: Link
    size: int  # S

    def __call__(self, t: float) -> WeightDistribution:
        """The law at t: the larger, the narrower."""
        return self._law(math.exp(max(t, self._turn)), math.exp(max(0.0, self._turn - t)))

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest t."""
        return self._turn - math.log(_STRETCH), math.log(_MOST[self.link])

    @cached_property
    def _mean(self) -> float:
        return link_moments(self.weight_distribution, self.link, self.size)[0]

    @cached_property
    def _turn(self) -> float:
        """log of the least concentration: with the exp link, that at which the factor varies most beside its mean."""
        if self.link == "identity":
            return math.log(_LEAST)

        def relative(log_c: float) -> float:
            mean, v, c = link_moments(self._law(math.exp(log_c), 1.0), self.link, self.size)
            return (v - c) / mean**2

        grid = torch.linspace(math.log(_LEAST), math.log(10.0), 61, dtype=torch.float64)
        return float(max(grid.tolist(), key=relative))

    def _law(self, concentration: float, scale: float) -> WeightDistribution:
        base: Any = unstretched(self.weight_distribution)
        other: WeightDistribution
        try:
            other = replace(base, concentration=concentration)
        except TypeError:  # a law that has none
            other = Dirichlet(concentration)
        if self.link == "identity":
            return other if scale == 1.0 else StretchedDistribution(other, scale, 1.0 - scale)
        free = StretchedDistribution(other, scale, 0.0)
        return StretchedDistribution(other, scale, math.log(link_moments(free, self.link, self.size)[0] / self._mean))


Batches = Callable[[], Iterator[Any]]  # inputs, some rows at a time, the same at each call
Variance = Callable[[WeightDistribution], Tensor]  # of the generator under a law, at M points of C outputs: (M, C)
Counted = Literal["outputs", "means", "contrasts"]


def compared_outputs(loss: Loss | None) -> Counted:
    """Which figures of the outputs have a meaning under this loss."""
    if isinstance(loss, nn.CrossEntropyLoss | BrierLoss | nn.NLLLoss):
        return "contrasts"
    return "means" if isinstance(loss, GaussianNLL) else "outputs"


def _points(values: Tensor) -> Tensor:
    """(N, C, *) with pixels as further rows: (M, C), double precision."""
    return values.movedim(1, -1).reshape(-1, values.shape[1]).double()


def _means(values: Tensor, counted: Counted, axis: int) -> Tensor:
    """The means alone, of outputs that also hold values of log σ²."""
    return values.narrow(axis, 0, values.shape[axis] // 2) if counted == "means" else values


def replicate_moments(
    predictor: Predictor, batches: Batches, counted: Counted, num_samples: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mean and variance over replicates of what counts, batch by batch: (M, C) each."""
    number = min(num_samples, predictor.num_distinct or num_samples)
    with torch.no_grad():
        for x in batches():
            check_inputs(x)
            stream = predictor.stream(x, number, seed=seed)
            if counted == "contrasts":
                stream = _centred(stream)
            figures = stream.moments or summarize_stream(stream)
            mean, std = (_points(_means(part, counted, 1)).cpu() for part in (figures.mean, figures.std))
            yield mean, std.square()


def _centred(stream: SampleStream) -> SampleStream:
    """Outputs less their mean over classes; exact moments, which know each output alone, are lost."""

    def chunks(size: int) -> Iterator[Tensor]:
        return (chunk - chunk.mean(2, keepdim=True) for chunk in stream.chunks(size))

    return SampleStream(stream.num_samples, stream.replicate_bytes, chunks)


def exact_variance(generator: BootstrapGenerator, batches: Batches, counted: Counted) -> Variance | None:
    """The variance as a function of the law, from one pass; None where what follows the head is not affine."""
    generator = _contrasting(generator) if counted == "contrasts" else generator
    size, link = generator.num_blocks, generator.link
    unit = Exponential()  # under which no two blocks covary, so that its variance is v Σ_s A_s²
    v = link_moments(unit, link, size)[1]
    ends = torch.tensor([1.0, 0.0] if link == "identity" else [0.0, math.inf])  # whose factors are 1 and 0
    found: list[tuple[Tensor, Tensor]] = []
    with eval_mode(generator), torch.no_grad():
        for x in batches():
            at = generator.at(cast_inputs(generator, x))
            try:
                squares = at.moments(unit).std.square() / v
            except ValueError:  # the one sentence of `moments`
                return None
            full, none = (z if z.ndim > 1 else z[:, None] for z in at(ends[:, None].expand(2, size)))
            parts = squares, (full - none).square()
            squares, whole = (_points(_means(part.reshape(full.shape), counted, 1)).cpu() for part in parts)
            found.append((squares, whole))
    squares, whole = (torch.cat(parts) for parts in zip(*found, strict=True))

    def variance(weight_distribution: WeightDistribution) -> Tensor:
        _, v, c = link_moments(weight_distribution, link, size)
        return ((v - c) * squares + c * whole).clamp_min(0.0)

    return variance


def _contrasting(generator: BootstrapGenerator) -> BootstrapGenerator:
    """A copy whose head gives logits less their mean over classes."""
    neutral = 1.0 if generator.link == "identity" else 0.0
    net, name = generator.export(torch.full((generator.num_blocks,), neutral)), generator.split.name
    head = cast(Any, net.get_submodule(name))
    with torch.no_grad():
        for part in (head.weight, head.bias):
            if part is not None:
                part -= part.mean(0, keepdim=True)
    return BootstrapGenerator(net, head=name, num_blocks=generator.num_blocks, link=generator.link)


def sampled_variance(
    predictor: NeuBootsPredictor, batches: Batches, counted: Counted, num_samples: int, seed: int
) -> Variance:
    """The variance as a function of the law, from replicates: one pass for each law."""

    def variance(weight_distribution: WeightDistribution) -> Tensor:
        other = NeuBootsPredictor(predictor.generator, weight_distribution)
        return torch.cat([part for _, part in replicate_moments(other, batches, counted, num_samples, seed)])

    return variance


_EXACT, _SAMPLED = 1e-12, 5e-3  # how near the variances come, as a difference of logarithms
_ROUNDS = 100
_ROWS = 512  # inputs at a time
_NOTHING = 1e-300  # of a variance, for its logarithm


@dataclass(frozen=True)
class Dispersion:
    """What was found. Variances are means over inputs and outputs; of several continuous outputs each counts in units
    of its own spread over the inputs, of classes only differences between logits count, of a Gaussian head the means.

    `variance_correlation` is that over inputs of the two standard deviations, which no concentration changes much;
    the noise of a few true replicates lowers it. None where one of them is the same at all inputs.
    """

    concentration: float
    stretch: float  # s, where no concentration is wide enough and weights are 1 + s (α − 1); else 1
    trained: float | None  # the concentration in training; None for a law without one
    before: float  # variance under the law of the training
    after: float
    like: float  # variance of the other predictor
    correlation: float | None
    num_points: int  # inputs, or pixels of them

    @property
    def reached(self) -> bool:
        """Whether the law could be made as wide, or as narrow, as asked."""
        return math.isclose(self.after, self.like, rel_tol=0.01)

    def __str__(self) -> str:
        was = "" if self.trained is None else f" (training: {self.trained:.4g})"
        was += "" if self.stretch == 1.0 else f", stretched {self.stretch:.4g} times"
        shape = "not known" if self.correlation is None else f"{self.correlation:.2f}"
        return (
            f"concentration {self.concentration:.4g}{was}; mean variance {self.before:.4g} before, {self.after:.4g} "
            f"after, {self.like:.4g} asked for; correlation of the standard deviations over {self.num_points} points "
            f"{shape}"
        )


@dataclass(frozen=True)
class CalibratedNeuBootsPredictor(NeuBootsPredictor):
    """A trained generator under a law of another dispersion, and how that was found."""

    dispersion: Dispersion

    def config(self) -> dict[str, Any]:
        scale, shift = (
            (self.weight_distribution.scale, self.weight_distribution.shift)
            if isinstance(self.weight_distribution, StretchedDistribution)
            else (1.0, 0.0)
        )
        described = NeuBootsPredictor(self.generator, unstretched(self.weight_distribution)).config() | {
            "method": "calibrated-neuboots"
        }
        return described | {"scale": scale, "shift": shift, "dispersion": asdict(self.dispersion)}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "CalibratedNeuBootsPredictor":
        plain = NeuBootsPredictor.from_config(config, net)
        scale, shift = config["scale"], config["shift"]
        weight_distribution = (
            plain.weight_distribution
            if (scale, shift) == (1.0, 0.0)
            else StretchedDistribution(plain.weight_distribution, scale, shift)
        )
        return cls(plain.generator, weight_distribution, Dispersion(**config["dispersion"]))


def calibrate_dispersion(
    predictor: NeuBootsPredictor,
    reference: Predictor,
    x: Any,
    *,
    loss: Loss | None = None,
    num_samples: int = 200,
    seed: int = 0,
) -> CalibratedNeuBootsPredictor:
    """The same generator with the concentration whose mean variance at inputs x is that of another predictor.

    `like` may be a few nets of the Bayesian bootstrap, the influence bootstrap, or any other; where it does not know
    its variance exactly, `num_samples` replicates tell it. `loss` says what the outputs are: with a softmax only
    differences between logits are compared, since a shift of all of them means nothing; of a Gaussian head the means;
    else every output, each in units of its own spread. The variance of NeuBoots is exact, unless something follows the
    head that is not affine: then it is sampled. A law without a concentration gives way to a Dirichlet.

    >>> from neuboots.methods import Laplace, NeuBoots
    >>> from neuboots import TrainingConfig
    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data, config = TensorDataset(x, x[:, 0]), TrainingConfig(epochs=5, progress=False)
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    >>> predictor = NeuBoots.regression().fit(model, data, config)
    >>> like = Laplace(nn.MSELoss()).from_trained(predictor.net, data)
    >>> found = calibrate_dispersion(predictor, like, x)
    >>> bool(torch.isclose(found.moments(x).std.square().mean(), like.predict(x).std.square().mean()))
    True
    """
    check_inputs(x)
    if not count_rows(x):
        raise ValueError("got no inputs; expected at least one at which variances are compared")

    def batches() -> Iterator[Any]:
        return (take_rows(x, slice(start, start + _ROWS)) for start in range(0, count_rows(x), _ROWS))

    return calibrate_on_batches(predictor, reference, batches, loss=loss, num_samples=num_samples, seed=seed)


def calibrate_on_batches(
    predictor: NeuBootsPredictor,
    reference: Predictor,
    batches: Batches,
    *,
    loss: Loss | None = None,
    num_samples: int = 200,
    seed: int = 0,
) -> CalibratedNeuBootsPredictor:
    """`calibrate_dispersion` for inputs that come batch by batch."""
    _check(predictor, reference, num_samples)
    counted = compared_outputs(loss)
    pairs = replicate_moments(reference, batches, counted, num_samples, seed)
    mean, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    scale = _output_scale(mean, counted)
    target = _mean(wanted, scale)
    _check_target(target, reference)
    variance = exact_variance(predictor.generator, batches, counted)
    tolerance = _EXACT
    if variance is None:
        variance, tolerance = sampled_variance(predictor, batches, counted, num_samples, seed), _SAMPLED
    before = variance(predictor.weight_distribution)
    if before.shape != wanted.shape:
        raise ValueError(
            f"got a predictor of {before.shape[1]} outputs at {len(before)} points and one of {wanted.shape[1]} at "
            f"{len(wanted)}; expected the same outputs of both"
        )
    weight_distribution = _solve(predictor, variance, scale, target, tolerance)
    after = variance(weight_distribution)
    found = Dispersion(
        concentration=cast(Any, weight_distribution).concentration,
        stretch=weight_distribution.scale if isinstance(weight_distribution, StretchedDistribution) else 1.0,
        trained=getattr(unstretched(predictor.weight_distribution), "concentration", None),
        before=_mean(before, scale),
        after=_mean(after, scale),
        like=target,
        correlation=_correlation((after * scale).sum(1).sqrt(), (wanted * scale).sum(1).sqrt()),
        num_points=len(wanted),
    )
    if not found.reached:
        warnings.warn(
            f"a mean variance of {found.like:.4g} was asked for, and the law has {found.after:.4g} at the end of its "
            f"range (concentration {found.concentration:.4g}, stretched {found.stretch:.4g} times): the band is not of "
            "the size of the other one; train with another link, or take the other predictor itself",
            UserWarning,
            stacklevel=2,
        )
    return CalibratedNeuBootsPredictor(predictor.generator, weight_distribution, found)


def _check(predictor: Any, like: Any, num_samples: Any) -> None:
    if not isinstance(predictor, NeuBootsPredictor):
        raise ValueError(f"got a {type(predictor).__name__}; expected a predictor of NeuBoots, whose law has a spread")
    if not isinstance(like, Predictor):
        raise ValueError(f"got like of type {type(like).__name__}; expected a predictor, as fit gives one")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 2:
        raise ValueError(f"got num_samples={num_samples!r}; expected a whole number, at least 2")
    if like.num_distinct == 1:
        raise ValueError("got like with a single member, which has no spread; expected at least 2 members")


def _check_target(target: float, like: Predictor) -> None:
    if not math.isfinite(target):
        raise ValueError(f"{type(like).__name__} gives NaN or infinite replicates at x; expected finite numbers")
    if target <= 0.0:
        raise ValueError(
            f"the replicates of {type(like).__name__} are all the same at x, and no concentration makes a spread of "
            "none; expected a predictor whose replicates differ"
        )


def _output_scale(mean: Tensor, counted: Counted) -> Tensor:
    """What the variance of each output is multiplied by: 1 where outputs share a unit, else 1 over its spread: (C,)."""
    ones = torch.ones_like(mean[0])
    if counted == "contrasts" or len(ones) == 1:
        return ones / len(ones)
    spread = mean.var(0, correction=0)
    varies = spread > torch.finfo(torch.float32).eps ** 2 * mean.square().mean(0)
    if not bool(varies.any()):
        return ones / len(ones)
    return (1.0 / spread).where(varies, 0.0) / int(varies.sum())


def _mean(variance: Tensor, scale: Tensor) -> float:
    return float(variance.mean(0) @ scale)


def _correlation(a: Tensor, b: Tensor) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    size = float(a.square().sum() * b.square().sum())
    return float(a @ b) / math.sqrt(size) if len(a) > 2 and size > 0 else None


# -- the concentration ---------------------------------------------------------------------------------


def _solve(
    predictor: NeuBootsPredictor, variance: Variance, scale: Tensor, target: float, tolerance: float
) -> WeightDistribution:
    """The law of the wanted variance; the nearest there is, where none has it.

    The logarithm of the variance is nearly a straight line: regula falsi, with the Illinois rule.
    """
    generator = predictor.generator
    family = DispersionFamily(predictor.weight_distribution, generator.link, generator.num_blocks)

    def excess(t: float) -> float:
        found = _mean(variance(family(t)), scale)
        if not math.isfinite(found):
            raise ValueError("NeuBoots gives NaN or infinite replicates at x; expected finite numbers")
        return math.log(max(found, _NOTHING) / target)

    low, high = family.range
    over, under = excess(low), excess(high)
    if over <= math.log(_NOTHING / target):
        raise ValueError(
            f"the replicates of NeuBoots are the same at x under every law (S = {generator.num_blocks} blocks); "
            "expected weights that move the outputs: give it more blocks, or look for dead features"
        )
    if over <= 0.0 or under >= 0.0:
        return family(low if over <= 0.0 else high)
    side = 0  # on which the last one fell
    for _ in range(_ROUNDS):
        middle = low + (high - low) * over / (over - under)
        value = excess(middle)
        if abs(value) <= tolerance or high - low < 0.01 * tolerance:
            break
        if value > 0:
            low, over, under = middle, value, under / 2 if side > 0 else under
        else:
            high, under, over = middle, value, over / 2 if side < 0 else over
        side = 1 if value > 0 else -1
    return family(middle)


_MOST_POINTS = 1 << 18  # pixels at which variances are compared
_WITHOUT_GRADIENTS = 4  # times the rows of a training step fit in memory


@register(
    "calibrated-neuboots",
    predictor=CalibratedNeuBootsPredictor,
    summary="NeuBoots whose law has the dispersion of the influence bootstrap, or of true replicates",
    predict_cost="O(L + K)",
    reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
)
@dataclass(frozen=True)
class CalibratedNeuBoots:
    """NeuBoots, trained once, with the concentration of its law at prediction time fitted to a reference.

    `reference="influence"` takes the influence bootstrap around the trained net itself, at α = its mean: a pass over
    the data and no further training. `layers` is that of `InfluenceBootstrap`; None is the whole net for continuous
    targets where its kernel can be held, and the head alone otherwise. `reference="bootstrap"` trains `num_members`
    nets of the Bayesian bootstrap, which are the truth but K trainings, and whose mean variance has a relative error of
    about √(2/K) or less. `num_inputs` training inputs, drawn by the seed, are where variances are compared (fewer
    where outputs are maps).

    `neuboots` has the options of the training (None: `NeuBoots` for classes, `NeuBoots.regression()` otherwise). The
    predictor's `dispersion` says what was found, and how well the two bands agree on where they are wide: one number
    cannot mend that, and where it matters the reference itself is the better band.

    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, x[:, 0].sin())
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    >>> method = CalibratedNeuBoots(nn.MSELoss(), reference="bootstrap", num_members=4)
    >>> predictor = method.fit(model, data, TrainingConfig(epochs=5, progress=False))
    >>> predictor.dispersion.reached, predictor.weight_distribution.concentration == predictor.dispersion.concentration
    (True, True)
    """

    loss: Loss = field(default_factory=nn.CrossEntropyLoss)
    neuboots: NeuBoots | None = None
    reference: Literal["influence", "bootstrap"] = "influence"
    layers: int | Literal["all"] | None = None
    num_members: int = 10
    num_inputs: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))
        if self.neuboots is not None and not isinstance(self.neuboots, NeuBoots):
            raise ValueError(f"got neuboots={self.neuboots!r}; expected options such as NeuBoots(), or None")
        if self.neuboots is not None and self.neuboots.loss != self.loss:
            raise ValueError(f"got loss={self.loss!r} and neuboots with {self.neuboots.loss!r}; expected the same loss")
        if self.reference not in ("influence", "bootstrap"):
            raise ValueError(f"got reference={self.reference!r}; expected 'influence' or 'bootstrap'")
        if self.reference == "bootstrap" and self.options.train_head_only:
            raise ValueError(
                "got train_head_only=True with reference='bootstrap', whose nets would train all their layers; expected "
                "reference='influence'"
            )
        if self.layers is not None:
            InfluenceBootstrap(self.loss, layers=self.layers)
        check_int("num_members", self.num_members, minimum=2)
        check_int("rows", self.num_inputs, minimum=2)

    @property
    def options(self) -> NeuBoots:
        """Those of the training."""
        if self.neuboots is not None:
            return self.neuboots
        classes = compared_outputs(self.loss) == "contrasts" or isinstance(self.loss, nn.BCEWithLogitsLoss)
        return NeuBoots(self.loss) if classes else NeuBoots.regression(self.loss)

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> CalibratedNeuBootsPredictor:
        """Train NeuBoots on (x, y) rows, as the recipe says; then the reference, and the concentration."""
        predictor = self.options.fit(model, data, config, val_data=val_data)
        shape = _output_shape(predictor, data, config)
        if self.reference == "bootstrap":
            beside = None if config.folder is None else Path(config.folder) / "reference"
            method = BayesianBootstrap(self.loss, num_members=self.num_members)
            like: Predictor = method.fit(model, data, replace(config, folder=beside), val_data=val_data)
        else:
            like = self._influence(predictor, data, config, shape)
        rows = max(1, min(self.num_inputs, _MOST_POINTS // max(1, shape[2:].numel())))

        def batches() -> Iterator[Any]:
            return _inputs(data, config, rows)

        return calibrate_on_batches(predictor, like, batches, loss=self.loss, seed=config.seed)

    def _influence(
        self, predictor: NeuBootsPredictor, data: Dataset[Any], config: TrainingConfig, shape: torch.Size
    ) -> Predictor:
        generator, layers = predictor.generator, self.layers
        if layers is None:
            n = dataset_length(data)
            single = isinstance(self.loss, nn.MSELoss | GaussianNLL)  # classes: C slopes for each row
            small = single and n is not None and len(shape) == 2 and n * shape[1] <= MAX_KERNEL_ROWS
            one_size = config.batch_size > 1  # rows that train one by one may be of several sizes
            layers = "all" if small and one_size and not self.options.train_head_only else 1
        net = generator.export(
            compute_mean_weights(predictor.weight_distribution, generator.link, generator.num_blocks)
        )
        head = generator.split.name if layers == 1 else None
        return InfluenceBootstrap(self.loss, layers=layers, head=head).make_predictor(net.eval(), data, config)


def _output_shape(predictor: NeuBootsPredictor, data: Dataset[Any], config: TrainingConfig) -> torch.Size:
    """Of two rows: (2, C, *)."""
    generator = predictor.generator
    with eval_mode(generator), torch.no_grad():
        output = generator.at(load_example(generator.net, data, seed=config.seed)).output
    return output.shape if output.ndim > 1 else output[:, None].shape


def _inputs(data: Dataset[Any], config: TrainingConfig, rows: int) -> Iterator[Any]:
    """Up to this many inputs of the training, some at a time, in an order drawn by the seed."""
    several = config.batch_size > 1  # rows that train one by one may be of several sizes
    size = min(rows, _WITHOUT_GRADIENTS * config.batch_size) if several else 1
    shuffle, steps = dataset_length(data) is not None, config.steps_per_epoch  # a stream comes in its own order
    loader = EpochLoader(data, batch_size=size, seed=config.seed, shuffle=shuffle, steps_per_epoch=steps)
    with preserve_rng_state():
        for _, batch, _ in loader.epoch(0):
            x = take_rows(batch.x, slice(rows))
            yield x
            rows -= count_rows(x)
            if rows <= 0:
                return
