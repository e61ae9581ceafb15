"""NeuBoots with its dispersion set from the training data: by a few true replicates, or by the influence bootstrap."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from neuboots.batches import Loader, own_randomness, size_of
from neuboots.keys import whole
from neuboots.losses import BinaryCrossEntropy, CrossEntropy, GaussianNLL, Loss, SquaredError, check_loss
from neuboots.methods.bayesian_bootstrap import BayesianBootstrap
from neuboots.methods.common import example_of
from neuboots.methods.dispersion.calibration import CalibratedNeuBootsPredictor, calibrate_on
from neuboots.methods.dispersion.variance import counted_of
from neuboots.methods.influence import InfluenceBootstrap
from neuboots.methods.inputs import count, take
from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor, mean_weights
from neuboots.prediction import Predictor
from neuboots.surgery import eval_mode
from neuboots.training import Recipe

_MOST_POINTS = 1 << 18  # pixels at which variances are compared
_WITHOUT_GRADIENTS = 4  # times the rows of a training step fit in memory


@dataclass(frozen=True)
class CalibratedNeuBoots:
    """NeuBoots, trained once, with the concentration of its law at prediction time fitted to a reference.

    `reference="influence"` takes the influence bootstrap around the trained net itself, at α = its mean: a pass over
    the data and no further training. `layers` is that of `InfluenceBootstrap`; None is the whole net for continuous
    targets where its kernel can be held, and the head alone otherwise. `reference="bootstrap"` trains `num_members`
    nets of the Bayesian bootstrap, which are the truth but K trainings, and whose mean variance has a relative error of
    about √(2/K) or less. `rows` training inputs, drawn by the seed, are where variances are compared (fewer where
    outputs are maps).

    `neuboots` has the options of the training (None: `NeuBoots` for classes, `NeuBoots.regression()` otherwise). The
    predictor's `dispersion` says what was found, and how well the two bands agree on where they are wide: one number
    cannot mend that, and where it matters the reference itself is the better band.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import SquaredError
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, x[:, 0].sin())
    >>> make_net = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    >>> method = CalibratedNeuBoots(SquaredError(), reference="bootstrap", num_members=4)
    >>> predictor = method.fit(make_net, data, Recipe(epochs=5, progress=False))
    >>> predictor.dispersion.reached, predictor.law.concentration == predictor.dispersion.concentration
    (True, True)
    """

    loss: Loss = field(default_factory=CrossEntropy)
    neuboots: NeuBoots | None = None
    reference: Literal["influence", "bootstrap"] = "influence"
    layers: int | Literal["all"] | None = None
    num_members: int = 10
    rows: int = 512

    def __post_init__(self) -> None:
        check_loss(self.loss)
        if self.neuboots is not None and not isinstance(self.neuboots, NeuBoots):
            raise ValueError(f"got neuboots={self.neuboots!r}; expected options such as NeuBoots(), or None")
        if self.neuboots is not None and self.neuboots.loss != self.loss:
            raise ValueError(f"got loss={self.loss!r} and neuboots with {self.neuboots.loss!r}; expected the same loss")
        if self.reference not in ("influence", "bootstrap"):
            raise ValueError(f"got reference={self.reference!r}; expected 'influence' or 'bootstrap'")
        if self.reference == "bootstrap" and self.options.tune == "head":
            raise ValueError(
                "got tune='head' with reference='bootstrap', whose nets would train all their layers; expected "
                "reference='influence'"
            )
        if self.layers is not None:
            InfluenceBootstrap(self.loss, layers=self.layers)
        whole("num_members", self.num_members, least=2)
        whole("rows", self.rows, least=2)

    @property
    def options(self) -> NeuBoots:
        """Those of the training."""
        if self.neuboots is not None:
            return self.neuboots
        classes = counted_of(self.loss) == "contrasts" or isinstance(
            self.loss, BinaryCrossEntropy | nn.BCEWithLogitsLoss
        )
        return NeuBoots(self.loss) if classes else NeuBoots.regression(self.loss)

    def fit(
        self,
        make_net: Callable[[], nn.Module],
        data: Dataset[Any],
        recipe: Recipe,
        *,
        validation: Dataset[Any] | None = None,
    ) -> CalibratedNeuBootsPredictor:
        """Train NeuBoots on (x, y) rows, as the recipe says; then the reference, and the concentration."""
        predictor = self.options.fit(make_net, data, recipe, validation=validation)
        shape = _output_shape(predictor, data, recipe)
        if self.reference == "bootstrap":
            beside = None if recipe.folder is None else Path(recipe.folder) / "reference"
            method = BayesianBootstrap(self.loss, num_members=self.num_members)
            like: Predictor = method.fit(make_net, data, replace(recipe, folder=beside), validation=validation)
        else:
            like = self._influence(predictor, data, recipe, shape)
        rows = max(1, min(self.rows, _MOST_POINTS // max(1, shape[2:].numel())))

        def batches() -> Iterator[Any]:
            return _inputs(data, recipe, rows)

        return calibrate_on(predictor, like, batches, loss=self.loss, seed=recipe.seed)

    def _influence(
        self, predictor: NeuBootsPredictor, data: Dataset[Any], recipe: Recipe, shape: torch.Size
    ) -> Predictor:
        from neuboots.methods.influence.predictor import MOST_ROWS

        generator, layers = predictor.generator, self.layers
        if layers is None:
            n = size_of(data)
            single = isinstance(self.loss, SquaredError | GaussianNLL | nn.MSELoss)  # classes: C slopes for each row
            small = single and n is not None and len(shape) == 2 and n * shape[1] <= MOST_ROWS
            one_size = recipe.batch_size > 1  # rows that train one by one may be of several sizes
            layers = "all" if small and one_size and self.options.tune == "all" else 1
        net = generator.export(mean_weights(predictor.law, generator.link, generator.num_blocks))
        head = generator.split.name if layers == 1 else None
        return InfluenceBootstrap(self.loss, layers=layers, head=head).around(net.eval(), data, recipe)


def _output_shape(predictor: NeuBootsPredictor, data: Dataset[Any], recipe: Recipe) -> torch.Size:
    """Of two rows: (2, C, *)."""
    generator = predictor.generator
    with eval_mode(generator), torch.no_grad():
        output = generator.at(example_of(generator.net, data, seed=recipe.seed)).output
    return output.shape if output.ndim > 1 else output[:, None].shape


def _inputs(data: Dataset[Any], recipe: Recipe, rows: int) -> Iterator[Any]:
    """Up to this many inputs of the training, some at a time, in an order drawn by the seed."""
    several = recipe.batch_size > 1  # rows that train one by one may be of several sizes
    size = min(rows, _WITHOUT_GRADIENTS * recipe.batch_size) if several else 1
    shuffle, steps = size_of(data) is not None, recipe.steps_per_epoch  # a stream comes in its own order
    loader = Loader(data, batch_size=size, seed=recipe.seed, shuffle=shuffle, steps_per_epoch=steps)
    with own_randomness():
        for _, batch, _ in loader.epoch(0):
            x = take(batch.x, slice(rows))
            yield x
            rows -= count(x)
            if rows <= 0:
                return
