"""What studies of images share: images made smaller, so that nets can be trained on a CPU, and a DenseNet to match."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from neuboots.data import DataSet
from neuboots.experiments.measure import classifier, held
from neuboots.nets import DenseNet


def image_net(name: str, data: DataSet) -> Callable[[], nn.Module]:
    """What makes the net of this name; "densenet-10" has no bottlenecks (Huang et al. 2017, k = 12, L = 10)."""
    if name == "densenet-10":
        sizes = data.num_classes, data.channels
        return partial(DenseNet, *sizes, growth=12, blocks=(2, 2, 2), bottleneck=False, compression=1.0)
    return classifier(name, data)


@cache  # the units of one process share what they hold
def images(data: DataSet, part: str, n: int, seed: int = 0, *, shrink: int = 1, augment: bool = False) -> Any:
    """So many rows of a part in memory, each pixel the mean of shrink × shrink; all rows if there are fewer."""
    own = getattr(data, part)
    normalise = own.normalise

    def prepare(x: Tensor) -> Tensor:
        return avg_pool2d(normalise(x), shrink) if shrink > 1 else normalise(x)

    return held(replace(own, normalise=prepare, augment=data.augmentation if augment else None), n, seed)
