"""The concentration at which NeuBoots has the variance of another predictor, and what was found on the way."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from neuboots.losses import Loss
from neuboots.methods.dispersion.law import Family, Stretched, inner
from neuboots.methods.dispersion.variance import Batches, Counted, Variance, counted_of, exact, figures, sampled
from neuboots.methods.inputs import count, take
from neuboots.methods.neuboots import NeuBootsPredictor
from neuboots.prediction import Predictor, check_inputs
from neuboots.weights import WeightLaw

_EXACT, _SAMPLED = 1e-12, 5e-3  # how near the variances come, as a difference of logarithms
_ROUNDS = 100
_ROWS = 512  # inputs at a time
_NOTHING = 1e-300  # of a variance, for its logarithm


@dataclass(frozen=True)
class Dispersion:
    """What was found. Variances are means over inputs and outputs; of several continuous outputs each counts in units
    of its own spread over the inputs, of classes only differences between logits count, of a Gaussian head the means.

    `correlation` is that over inputs of the two standard deviations, which no concentration changes much; the noise of
    a few true replicates lowers it. None where one of them is the same at all inputs.
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
        scale, shift = (self.law.scale, self.law.shift) if isinstance(self.law, Stretched) else (1.0, 0.0)
        described = NeuBootsPredictor(self.generator, inner(self.law)).config() | {"method": "calibrated-neuboots"}
        return described | {"scale": scale, "shift": shift, "dispersion": asdict(self.dispersion)}

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "CalibratedNeuBootsPredictor":
        plain = NeuBootsPredictor.restore(config, net)
        scale, shift = config["scale"], config["shift"]
        law = plain.law if (scale, shift) == (1.0, 0.0) else Stretched(plain.law, scale, shift)
        return cls(plain.generator, law, Dispersion(**config["dispersion"]))


def calibrate_dispersion(
    predictor: NeuBootsPredictor,
    like: Predictor,
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
    >>> from neuboots import Recipe, SquaredError
    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data, recipe = TensorDataset(x, x[:, 0]), Recipe(epochs=5, progress=False)
    >>> make_net = lambda: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    >>> predictor = NeuBoots.regression().fit(make_net, data, recipe)
    >>> like = Laplace(SquaredError()).around(predictor.net, data, recipe)
    >>> found = calibrate_dispersion(predictor, like, x)
    >>> bool(torch.isclose(found.moments(x).std.square().mean(), like.predict(x).std.square().mean()))
    True
    """
    check_inputs(x)
    if not count(x):
        raise ValueError("got no inputs; expected at least one at which variances are compared")

    def batches() -> Iterator[Any]:
        return (take(x, slice(start, start + _ROWS)) for start in range(0, count(x), _ROWS))

    return calibrate_on(predictor, like, batches, loss=loss, num_samples=num_samples, seed=seed)


def calibrate_on(
    predictor: NeuBootsPredictor,
    like: Predictor,
    batches: Batches,
    *,
    loss: Loss | None = None,
    num_samples: int = 200,
    seed: int = 0,
) -> CalibratedNeuBootsPredictor:
    """`calibrate_dispersion` for inputs that come batch by batch."""
    _check(predictor, like, num_samples)
    counted = counted_of(loss)
    pairs = figures(like, batches, counted, num_samples, seed)
    mean, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    scale = _output_scale(mean, counted)
    target = _mean(wanted, scale)
    _check_target(target, like)
    variance = exact(predictor.generator, batches, counted)
    tolerance = _EXACT
    if variance is None:
        variance, tolerance = sampled(predictor, batches, counted, num_samples, seed), _SAMPLED
    before = variance(predictor.law)
    if before.shape != wanted.shape:
        raise ValueError(
            f"got a predictor of {before.shape[1]} outputs at {len(before)} points and one of {wanted.shape[1]} at "
            f"{len(wanted)}; expected the same outputs of both"
        )
    law = _solve(predictor, variance, scale, target, tolerance)
    after = variance(law)
    found = Dispersion(
        concentration=cast(Any, law).concentration,
        stretch=law.scale if isinstance(law, Stretched) else 1.0,
        trained=getattr(inner(predictor.law), "concentration", None),
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
    return CalibratedNeuBootsPredictor(predictor.generator, law, found)


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
) -> WeightLaw:
    """The law of the wanted variance; the nearest there is, where none has it.

    The logarithm of the variance is nearly a straight line: regula falsi, with the Illinois rule.
    """
    generator = predictor.generator
    family = Family(predictor.law, generator.link, generator.num_blocks)

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
