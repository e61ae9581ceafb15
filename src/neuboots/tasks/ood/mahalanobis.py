"""How far the features of an input lie from those of every class.

    plain:  s = min_c (φ − μ_c)ᵀ Σ⁺ (φ − μ_c),   φ what the head reads
    full:   s = w · (d²_1(x̃_1), …, d²_L(x̃_L)) + w₀,   x̃_l = x − ε sign ∇_x d²_l(x),   l over layers of the net

The full form takes several layers, moves the input towards the nearest class of each (ε ≥ 0), and weighs the distances
by logistic regression on a validation part of inputs in and out of distribution.

Lee, Lee, Lee and Shin, A simple unified framework for detecting out-of-distribution samples and adversarial attacks,
NeurIPS 2018. The covariance is theirs: maximum likelihood (1/n), one for all classes, with a pseudo-inverse.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuboots.surgery import Split
from neuboots.tasks.common import Rows, batches_of
from neuboots.tasks.inputs import Inputs
from neuboots.tasks.ood.detector import Detector, LogisticRule, check_data, check_step, choose_rule, distinct, names_of
from neuboots.tasks.ood.features import (
    ClassGaussians,
    ClassSums,
    features_of,
    stages_of,
    trained_net,
)
from neuboots.tasks.ood.odin import leaves_of, moved, slopes_of, with_floats

EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.005, 0.01)


@dataclass(frozen=True, eq=False)
class Layers:
    """Layers of a trained net, the head's features last, and the Gaussians of each."""

    split: Split
    names: tuple[str, ...]
    gaussians: tuple[ClassGaussians, ...]

    def distances(self, x: Any, epsilons: tuple[float, ...]) -> Tensor:
        """d² of each layer, at inputs moved by each ε towards the layer's nearest class: (len(epsilons), N, L)."""
        if not any(epsilons):
            with torch.no_grad():
                found = self._distances(x)
            return torch.stack([torch.stack(found, 1)] * len(epsilons))
        with torch.inference_mode(False), torch.enable_grad():
            leaves = leaves_of(x)
            totals = [distance.sum() for distance in self._distances(with_floats(x, leaves))]
            # A layer that depends on no floating-point input, as an embedding of words does, is measured where it is.
            directions = [[-slope.sign() for slope in slopes] for slopes in slopes_of(totals, leaves)]
        with torch.no_grad():
            return torch.stack([self._moved(x, directions, epsilon) for epsilon in epsilons])

    def _moved(self, x: Any, directions: list[list[Tensor]], epsilon: float) -> Tensor:
        """(N, L); each layer has an input of its own, and so a pass."""
        if epsilon == 0:
            return torch.stack(self._distances(x), 1)
        found = [self._distances(moved(x, mine, epsilon))[layer] for layer, mine in enumerate(directions)]
        return torch.stack(found, 1)

    def _distances(self, x: Any) -> list[Tensor]:
        pairs = zip(self.gaussians, features_of(self.split, self.names, x), strict=True)
        return [gaussians.distances(features) for gaussians, features in pairs]


@dataclass(frozen=True, eq=False, kw_only=True)
class Mahalanobis(Detector):
    """s = min_c d²: the plain form, `fit(train=…)` on the training data.

    The features are those of the predictor's net, where its predictions come from it; of an ensemble, those of its
    first member; of MC dropout, those of its module, where dropout stands before the head alone. Else `net` says which
    net is meant. `head` names its last layer where that is in doubt. B plays no part.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> predictor = PlainPredictor(torch.nn.Linear(2, 2))  # whose head reads the inputs
    >>> detector = Mahalanobis(predictor).fit(train=data, progress=False)
    >>> near, far = detector.score(torch.tensor([[0.5, 0.0], [9.0, 9.0]]), progress=False)
    >>> bool(near < 1), bool(far > 50)
    (True, True)
    """

    net: nn.Module | None = field(default=None, repr=False)
    head: str | None = None
    fitted: Layers | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_net(self.net)

    def scores(self, x: Any) -> Tensor:
        return _fitted(self.fitted).distances(x, (0.0,))[0, :, 0]

    def fit(
        self,
        inside: Inputs | None = None,
        outside: Inputs | None = None,
        *,
        train: Rows | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """Class means and covariance of the features, in one pass over rows (x, y)."""

        def choose(x: Any) -> tuple[Split, tuple[str, ...]]:
            return trained_net(self.predictor, self.net, self.head, x), ()

        layers, names = _layers(choose, train, batch_size, progress)
        return replace(self, fitted=layers, fitted_on=names)


@dataclass(frozen=True, eq=False, kw_only=True)
class MahalanobisEnsemble(Detector):
    """s = the log-odds of being out of distribution, from distances in several layers, with input preprocessing.

    `layers` names them; None takes the last output of each shape on the way to the head, as the stages of a residual
    net give, or where all have one shape, a few at even distances. The head's features always join; which net is meant
    is said as for `Mahalanobis`. `fit` needs the training data and a validation part of both
    kinds, on which ε and the weights of the layers are chosen. One score costs a pass and a gradient for each layer.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> train = TensorDataset(x[:100], (x[:100, 0] > 0).long())
    >>> detector = MahalanobisEnsemble(PlainPredictor(net), layers=("0",))
    >>> detector = detector.fit(x[100:150], x[100:150] + 9, train=train, progress=False)
    >>> float(detector.evaluate(x[150:], x[150:] - 9, progress=False).auroc) > 0.9
    True
    """

    net: nn.Module | None = field(default=None, repr=False)
    head: str | None = None
    layers: tuple[str, ...] | None = None
    epsilons: tuple[float, ...] = EPSILONS  # to choose from, in the units of the inputs
    epsilon: float = 0.0  # the one chosen
    fitted: Layers | None = field(default=None, repr=False)
    rule: LogisticRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_net(self.net)
        check_step(self.epsilons)
        check_step((self.epsilon,))
        layers = self.layers
        names = isinstance(layers, tuple | list) and all(isinstance(name, str) for name in layers)
        if layers is not None and (not names or len(set(layers)) < len(layers)):
            raise ValueError(f"got layers={layers!r}; expected a tuple of names that differ, as of net.named_modules()")

    def scores(self, x: Any) -> Tensor:
        layers = _fitted(self.fitted)
        assert self.rule is not None, "fitted together with the layers"
        return self.rule(layers.distances(x, (self.epsilon,))[0])

    def fit(
        self,
        inside: Inputs | None = None,
        outside: Inputs | None = None,
        *,
        train: Rows | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """Gaussians on the training data; then ε by TNR at 95 % TPR, and the regression, on a validation part."""

        def choose(x: Any) -> tuple[Split, tuple[str, ...]]:
            split = trained_net(self.predictor, self.net, self.head, x)
            return split, stages_of(split, x) if self.layers is None else _known(self.layers, split)

        layers, trained_on = _layers(choose, train, batch_size, progress)

        def measure(x: Any) -> Tensor:
            return layers.distances(x, self.epsilons)

        ours, theirs, names = self._measured(inside, outside, measure, batch_size, progress)
        best, rule = choose_rule(ours, theirs, seed=self.seed)
        names = distinct([names, trained_on])
        return replace(self, fitted=layers, epsilon=self.epsilons[best], rule=rule, fitted_on=names)


def _layers(
    choose: Callable[[Any], tuple[Split, tuple[str, ...]]], train: Rows | None, batch_size: int, progress: bool
) -> tuple[Layers, Tensor]:
    """The Gaussians of every layer, in one pass over the training data, and the names of its rows; `choose` sees the
    first batch."""
    if train is None:
        raise ValueError("got no training data to know the classes by; expected fit(train=…) with rows (x, y)")
    check_data(train)
    names: list[Tensor] = []
    chosen: tuple[Split, tuple[str, ...]] | None = None
    sums: list[ClassSums] = []
    for x, y in batches_of(train, batch_size, title="features of the training data", progress=progress):
        if chosen is None:
            chosen = choose(x)
            sums = [ClassSums() for _ in (*chosen[1], "head")]
        with torch.no_grad():
            found = features_of(*chosen, x)
        for each, features in zip(sums, found, strict=True):
            each.add(features, y)
        names.append(names_of(x))
    assert chosen is not None, "batches_of gives at least one batch"
    return Layers(*chosen, tuple(each.gaussians() for each in sums)), distinct(names)


def _check_net(net: Any) -> None:
    if net is not None and not isinstance(net, nn.Module):
        raise ValueError(f"got net={net!r}; expected a trained torch.nn.Module, or None for the predictor's own")


def _known(names: tuple[str, ...], split: Split) -> tuple[str, ...]:
    modules = dict(split.net.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ValueError(f"got the layer {name!r}; expected a name that net.named_modules() gives")
    return names


def _fitted(layers: Layers | None) -> Layers:
    if layers is None:
        raise ValueError("the detector is not fitted; expected detector.fit(train=…) first")
    return layers
