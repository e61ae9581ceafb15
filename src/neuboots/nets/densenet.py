"""Densely connected nets for small images: every layer reads all earlier ones of its block.

    xₗ = [xₗ₋₁, Hₗ(xₗ₋₁)],   Hₗ = BatchNorm, ReLU, 3×3 convolution with k outputs

Huang, Liu, van der Maaten and Weinberger, Densely Connected Convolutional Networks, CVPR 2017. The BC nets have a
bottleneck before each 3×3 convolution and halve the channels between blocks: `densenet22`, `densenet40`,
`densenet100`, or `densenet_bc` at any depth 6m + 4.
"""

from collections.abc import Sequence

from torch import Tensor, cat, nn

from neuboots._validation import ArgumentError, check_fraction
from neuboots.nets.resnet import PooledNet, he_init
from neuboots.serialization import configurable


@configurable
class DenseNet(PooledNet):
    """A 3×3 stem, dense blocks with transitions that halve the image, global average pooling and a linear head.

    The stem has 2·growth channels with bottlenecks and 16 without, as in the paper.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        growth: Number of channels that each layer adds.
        blocks: Number of layers in each dense block.
        bottleneck: Whether a 1×1 convolution to 4·growth channels precedes each 3×3 convolution.
        compression: Fraction of the channels that a transition keeps.

    Example:
        >>> import torch
        >>> net = DenseNet(10, growth=4, blocks=(2, 2))
        >>> net(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        growth: int = 12,
        blocks: Sequence[int] = (16, 16, 16),
        bottleneck: bool = True,
        compression: float = 0.5,
    ) -> None:
        super().__init__()
        check_fraction("compression", compression, one=True)
        if not blocks:
            raise ArgumentError("blocks", blocks, "at least one dense block")
        width = 2 * growth if bottleneck else 16
        layers: list[nn.Module] = [nn.Conv2d(in_channels, width, 3, padding=1, bias=False)]
        for i, count in enumerate(blocks):
            if i > 0:
                kept = max(1, int(compression * width))
                layers += [*_norm_relu(width), nn.Conv2d(width, kept, 1, bias=False), nn.AvgPool2d(2)]
                width = kept
            for _ in range(count):
                layers.append(DenseLayer(width, growth, bottleneck=bottleneck))
                width += growth
        self.features = nn.Sequential(*layers, *_norm_relu(width))
        self.head = nn.Linear(width, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights as in He et al. 2015."""
        self.apply(he_init)


def densenet22(num_classes: int, in_channels: int = 3) -> DenseNet:
    """DenseNet-BC-22, k = 12, D = 69: a small member, for a CPU (0.07 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return densenet_bc(22, num_classes, in_channels)


def densenet40(num_classes: int, in_channels: int = 3) -> DenseNet:
    """DenseNet-BC-40, k = 12, D = 132 (0.18 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return densenet_bc(40, num_classes, in_channels)


def densenet100(num_classes: int, in_channels: int = 3) -> DenseNet:
    """DenseNet-BC-100, k = 12, D = 342 (0.77 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.

    Example:
        >>> densenet100(10).head
        Linear(in_features=342, out_features=10, bias=True)
    """
    return densenet_bc(100, num_classes, in_channels)


def densenet_bc(depth: int, num_classes: int, in_channels: int = 3, *, growth: int = 12) -> DenseNet:
    """DenseNet-BC of depth 6m + 4: a stem, three blocks of m layers of two convolutions, two transitions, a head.

    Args:
        depth: Number of layers with weights.
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        growth: Number of channels that each layer adds.

    Returns:
        The net.

    Example:
        >>> densenet_bc(190, 10, growth=40).options["blocks"]
        [31, 31, 31]
    """
    m, rest = divmod(depth - 4, 6)
    if m < 1 or rest:
        raise ArgumentError("depth", depth, "6m + 4 with m ≥ 1, such as 22, 40, 100 or 190")
    return DenseNet(num_classes, in_channels, growth=growth, blocks=(m, m, m))


class DenseLayer(nn.Module):
    """[x, H(x)]: the input with k new channels appended.

    Args:
        before: Number of input channels.
        growth: Number of channels that each layer adds.
        bottleneck: Whether a 1×1 convolution precedes the 3×3 one.
    """

    def __init__(self, before: int, growth: int, *, bottleneck: bool) -> None:
        super().__init__()
        layers = _norm_relu(before)
        if bottleneck:
            inner = 4 * growth
            layers += [nn.Conv2d(before, inner, 1, bias=False), *_norm_relu(inner)]
            before = inner
        self.new = nn.Sequential(*layers, nn.Conv2d(before, growth, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, before, H, W) to (N, before + growth, H, W)."""
        return cat([x, self.new(x)], dim=1)


def _norm_relu(width: int) -> list[nn.Module]:
    """BatchNorm and ReLU, which precede each convolution."""
    return [nn.BatchNorm2d(width), nn.ReLU()]
