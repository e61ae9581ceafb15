"""A small convolutional net, quick on a CPU."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from neuboots.nets.mlp import check_size, check_sizes


class SmallCNN(nn.Module):
    """3×3 convolution, BatchNorm and ReLU, once per width; then the mean over pixels and a head.

    The first convolution keeps the image size and each later one halves it, so the default net
    takes 8×8, 28×28 and 32×32 images alike. The feature width D is widths[-1].

    >>> import torch
    >>> net = SmallCNN(1, 10)
    >>> net(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """

    def __init__(self, in_channels: int, out_features: int, *, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        check_size("in_channels", in_channels)
        check_size("out_features", out_features)
        check_sizes("widths", widths)
        if not widths:
            raise ValueError("widths is empty; expected at least one convolution: pass a tuple such as (32, 64)")
        self.options: dict[str, Any] = {
            "in_channels": in_channels,
            "out_features": out_features,
            "widths": list(widths),
        }
        layers: list[nn.Module] = []
        for i, (before, width) in enumerate(zip((in_channels, *widths), widths, strict=False)):
            stride = 1 if i == 0 else 2
            layers += [
                nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to outputs (N, out_features)."""
        check_images(x, self.options["in_channels"])
        phi = self.features(x).mean(dim=(2, 3))  # (N, D)
        out: Tensor = self.head(phi)  # (N, C)
        return out


def check_images(x: Tensor, in_channels: int, *, smallest: int = 1) -> None:
    """Refuse anything but a batch of images with so many channels, and fewer than `smallest` pixels on a side."""
    if x.dim() != 4 or x.shape[1] != in_channels:
        raise ValueError(
            f"the net got an input of shape {tuple(x.shape)}; expected (N, {in_channels}, H, W): "
            "reshape the input, or build the net with its in_channels"
        )
    if min(x.shape[2:]) < smallest:
        raise ValueError(
            f"the net got images of {x.shape[2]}×{x.shape[3]} pixels; expected at least {smallest} on each side: "
            "enlarge or pad them"
        )
