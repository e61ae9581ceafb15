"""Nets that look at images of a fraction of their side: quick on a CPU, for the studies that train many of them."""

from collections.abc import Callable

from torch import nn

from neuboots.data import DataSet
from neuboots.experiments.measure import classifier


def coarse_classifier(name: str, data: DataSet) -> Callable[[], nn.Module]:
    """What makes the net of this name; "small-cnn/2" is a small-cnn that is given means over 2 × 2 pixels."""
    net, _, factor = name.partition("/")
    make = classifier(net, data)
    return make if not factor else lambda: nn.Sequential(nn.AvgPool2d(int(factor)), make())


def called(name: str) -> str:
    """A net's name in words.

    >>> called("small-cnn/2"), called("resnet-18")
    ('small-cnn on images of 1/2 their side', 'resnet-18')
    """
    net, _, factor = name.partition("/")
    return f"{net} on images of 1/{factor} their side" if factor else net
