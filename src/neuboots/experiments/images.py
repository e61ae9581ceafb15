"""What studies of images share: images made smaller, so that many nets can be trained on a CPU, and nets to match."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from neuboots.data import DataSet, Part
from neuboots.experiments.measure import classifier, held
from neuboots.experiments.study import Bench
from neuboots.nets import DenseNet


def image_net(name: str, data: DataSet) -> Callable[[], nn.Module]:
    """What makes the net of this name; "small-cnn/2" is a small-cnn that is given means over 2 × 2 pixels.

    "densenet-10" has no bottlenecks (Huang et al. 2017, k = 12, L = 10).
    """
    net, _, factor = name.partition("/")
    make: Callable[[], nn.Module] = classifier(net, data) if net != "densenet-10" else partial(_densenet10, data)
    return make if not factor else lambda: nn.Sequential(nn.AvgPool2d(int(factor)), make())


def _densenet10(data: DataSet) -> nn.Module:
    return DenseNet(data.num_classes, data.channels, growth=12, blocks=(2, 2, 2), bottleneck=False, compression=1.0)


def called(name: str) -> str:
    """A net's name in words.

    >>> called("small-cnn/2"), called("resnet-18")
    ('small-cnn on images of 1/2 their side', 'resnet-18')
    """
    net, _, factor = name.partition("/")
    return f"{net} on images of 1/{factor} their side" if factor else net


def with_rows(bench: Bench, name: str, n: int) -> DataSet:
    """The set; where n asks for more rows to train on than are left, none are kept apart for validation."""
    data = bench.data(name)
    return data if n <= len(data.train) else bench.data(name, validation=0.0)  # type: ignore[arg-type]


def given(data: DataSet, part: str, *, like: DataSet | None = None, shrink: int = 1, augment: bool = False) -> Part:
    """A part as a net is given it: each pixel the mean of shrink × shrink, in the units of the set `like`, if any.

    A net that was trained on another set knows that set's normalisation alone.
    """
    own: Part = getattr(data, part)
    undo, again = data.normalisation, (like or data).normalisation

    def prepare(x: Tensor) -> Tensor:
        x = own.normalise(x)
        x = x if undo == again else again(undo.inverse(x))  # type: ignore[misc, union-attr]
        return avg_pool2d(x, shrink) if shrink > 1 else x

    return replace(own, normalise=prepare, augment=data.augmentation if augment else None)


@cache  # the units of one process share what they hold
def images(data: DataSet, part: str, n: int | None = None, seed: int = 0, **options: Any) -> Any:
    """So many rows of `given(data, part, …)` in memory, drawn by the seed; all rows if there are fewer."""
    return held(given(data, part, **options), n, seed)
