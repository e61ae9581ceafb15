"""A small convolutional net for a CPU."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from neuboots._validation import ArgumentError
from neuboots.nets.resnet import PooledNet, conv_norm
from neuboots.serialization import configurable


@configurable
class SmallCNN(PooledNet):
    """3×3 convolution, BatchNorm and ReLU, once per width; then global average pooling and a linear head.

    The first convolution keeps the image size and each later one halves it.

    Args:
        in_channels: Number of channels of the images.
        out_features: Number of outputs.
        widths: Channels of the convolutions; the head reads D = widths[-1] features.

    Example:
        >>> import torch
        >>> net = SmallCNN(1, 10)
        >>> net(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(self, in_channels: int, out_features: int, *, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        if not widths:
            raise ArgumentError("widths", widths, "at least one width")
        layers: list[nn.Module] = []
        for i, (before, width) in enumerate(pairwise((in_channels, *widths))):
            layers += [*conv_norm(before, width, 3, stride=1 if i == 0 else 2), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], out_features)
