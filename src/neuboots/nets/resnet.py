"""Residual nets for CIFAR: y = relu(shortcut(x) + residual(x)) (He et al. 2016, eq. 1).

Two published families share one class. The thin nets of He et al. 2016, section 4.2, have depth
6m + 2, widths 16, 32, 64 and shortcuts without parameters: `resnet20`, `resnet110`, or
`thin_resnet` at any such depth. The wide nets are ResNet-18 and ResNet-34 with a 3×3 stem for small
images, widths 64 to 512 and projection shortcuts: `resnet18`, `resnet34`.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from neuboots._validation import ArgumentError, check_choice
from neuboots.serialization import configurable


class PooledNet(nn.Module):
    """Features, global average pooling and a linear head."""

    features: nn.Sequential
    head: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to outputs (N, C)."""
        phi = self.features(x).mean(dim=(2, 3))  # (N, D)
        out: Tensor = self.head(phi)  # (N, C)
        return out


@configurable
class ResNet(PooledNet):
    """A 3×3 stem, stages of basic blocks that halve the image, global average pooling and a linear head.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        blocks: Number of blocks in each stage.
        widths: Channels of each stage; the head reads D = widths[-1] features.
        shortcut: Shortcut where a stage changes the shape: "pad" (subsample and append zero channels, option A of the
            paper) or "projection" (1×1 convolution and BatchNorm, option B).

    Example:
        >>> import torch
        >>> net = ResNet(10, blocks=(1, 1), widths=(8, 16), shortcut="projection")
        >>> net(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        blocks: Sequence[int],
        widths: Sequence[int],
        shortcut: str = "pad",
    ) -> None:
        super().__init__()
        check_choice("shortcut", shortcut, ("pad", "projection"))
        if not widths or len(blocks) != len(widths):
            raise ArgumentError("blocks", blocks, f"one number per stage, as in widths={widths!r}")
        if shortcut == "pad" and list(widths) != sorted(widths):
            hint = "use shortcut='projection' for stages that become narrower"
            raise ArgumentError("widths", widths, "increasing widths with shortcut='pad'", hint=hint)
        before = widths[0]
        layers = [*conv_norm(in_channels, before, 3), nn.ReLU()]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                kind = "identity" if stride == 1 and before == width else shortcut
                layers.append(ResidualBlock(before, width, stride=stride, shortcut=kind))
                before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights as in He et al. 2015."""
        self.apply(he_init)


def resnet8(num_classes: int, in_channels: int = 3) -> ResNet:
    """ResNet-8, D = 64: the smallest thin net, for a CPU (0.08 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.

    Example:
        >>> resnet8(10).head
        Linear(in_features=64, out_features=10, bias=True)
    """
    return thin_resnet(8, num_classes, in_channels)


def resnet20(num_classes: int, in_channels: int = 3) -> ResNet:
    """ResNet-20, D = 64 (0.27 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return thin_resnet(20, num_classes, in_channels)


def resnet110(num_classes: int, in_channels: int = 3) -> ResNet:
    """ResNet-110, D = 64 (1.7 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return thin_resnet(110, num_classes, in_channels)


def resnet18(num_classes: int, in_channels: int = 3) -> ResNet:
    """ResNet-18 with a 3×3 stem, D = 512 (11.17 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return _wide_resnet((2, 2, 2, 2), num_classes, in_channels)


def resnet34(num_classes: int, in_channels: int = 3) -> ResNet:
    """ResNet-34 with a 3×3 stem, D = 512 (21.28 M parameters).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return _wide_resnet((3, 4, 6, 3), num_classes, in_channels)


def thin_resnet(depth: int, num_classes: int, in_channels: int = 3) -> ResNet:
    """The thin net of depth 6m + 2, D = 64: a stem, three stages of m blocks, a head.

    Args:
        depth: Number of layers with weights.
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.

    Example:
        >>> thin_resnet(56, 10).options["blocks"]
        [9, 9, 9]
    """
    m, rest = divmod(depth - 2, 6)
    if m < 1 or rest:
        raise ArgumentError("depth", depth, "6m + 2 with m ≥ 1, such as 8, 20, 32, 44, 56 or 110")
    return ResNet(num_classes, in_channels, blocks=(m, m, m), widths=(16, 32, 64), shortcut="pad")


def _wide_resnet(blocks: Sequence[int], num_classes: int, in_channels: int) -> ResNet:
    widths = (64, 128, 256, 512)
    return ResNet(num_classes, in_channels, blocks=blocks, widths=widths, shortcut="projection")


class ResidualBlock(nn.Module):
    """y = relu(shortcut(x) + residual(x)).

    Args:
        before: Number of input channels.
        width: Number of channels.
        stride: Stride of the first 3×3 convolution.
        shortcut: "identity", "pad" or "projection".
        bottleneck: Whether the residual is a 1×1, a 3×3 and a 1×1 convolution with a quarter of the width inside,
            instead of two 3×3 convolutions.
        dilations: Dilations of the 3×3 convolutions, with and after the stride; a bottleneck has the first one only.
    """

    def __init__(
        self,
        before: int,
        width: int,
        *,
        stride: int,
        shortcut: str,
        bottleneck: bool = False,
        dilations: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        inner = width // 4 if bottleneck else width
        layers = [*conv_norm(before, inner, 1), nn.ReLU()] if bottleneck else []
        layers += [
            *conv_norm(inner if bottleneck else before, inner, 3, stride=stride, dilation=dilations[0]),
            nn.ReLU(),
        ]
        layers += conv_norm(inner, width, 1) if bottleneck else conv_norm(inner, width, 3, dilation=dilations[1])
        self.residual = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if shortcut == "pad":
            self.shortcut = PadShortcut(stride=stride, extra=width - before)
        elif shortcut == "projection":
            self.shortcut = nn.Sequential(*conv_norm(before, width, 1, stride=stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, before, H, W) to (N, width, ⌈H/stride⌉, ⌈W/stride⌉)."""
        out: Tensor = self.relu(self.shortcut(x) + self.residual(x))
        return out


class PadShortcut(nn.Module):
    """Option A: keep every stride-th pixel and append channels of zeros.

    Args:
        stride: Stride.
        extra: Number of zero channels to append.
    """

    def __init__(self, *, stride: int, extra: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, before, H, W) to (N, before + extra, ⌈H/stride⌉, ⌈W/stride⌉)."""
        kept = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(kept, (0, 0, 0, 0, 0, self.extra))


def conv_norm(before: int, width: int, kernel: int, *, stride: int = 1, dilation: int = 1) -> list[nn.Module]:
    """Convolution that keeps the size of the map, up to its stride, and BatchNorm.

    Args:
        before: Number of input channels.
        width: Number of channels.
        kernel: Size of the kernel, an odd number.
        stride: Stride.
        dilation: Dilation.

    Returns:
        Both layers.
    """
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(before, width, kernel, stride, padding=padding, dilation=dilation, bias=False)
    return [conv, nn.BatchNorm2d(width)]


def he_init(layer: nn.Module) -> None:
    """w ~ N(0, 2 / fan-in), b = 0 (He et al. 2015, eq. 10).

    Args:
        layer: A layer.
    """
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
