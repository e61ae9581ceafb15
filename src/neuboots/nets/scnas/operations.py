"""What an edge of a cell may do: the candidate operations, each from `width` to `width` channels.

    same: h ↦ o(h) of the same size,   down: of half the size,   up: of twice the size

A convolution is ReLU, convolution and GroupNorm (in DARTS: ReLU, convolution and BatchNorm, which needs larger batches
than volumes allow). "none" is the edge that is not there: by it the search decides on connections, too.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuboots.nets.unet import num_groups

Make = Callable[[int], nn.Module]


class Nothing(nn.Module):
    """h ↦ 0, of the size that any other operation of the edge would give."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        # ⌈size/2⌉ where volumes are halved, as a convolution of stride 2 gives it
        return x.new_zeros(*x.shape[:2], *(-int(-size * self.scale // 1) for size in x.shape[2:]))

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class Enlarge(nn.Module):
    """Twice the size, by trilinear interpolation."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=2.0, mode="trilinear", align_corners=False)


class AveragePool(nn.Module):
    """The mean over the 3×3×3 voxels around that lie inside; torch's own refuses volumes smaller than these."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        total, count = (
            functional.avg_pool3d(functional.pad(part, (1,) * 6), 3, self.stride)
            for part in (x, x.new_ones(1, 1, *x.shape[2:]))
        )
        return total / count

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


class Norm(nn.GroupNorm):
    """GroupNorm that takes a single value, as a net of width 1 has it at its deepest; torch's refuses that."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:].numel() == self.num_groups:
            x = x - x  # each value is its own mean; what rounding leaves of the difference would be divided by √ε
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def norm(width: int) -> Norm:
    return Norm(num_groups(width), width)


def _conv(width: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    layer = nn.Conv3d(width, width, 3, stride, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(nn.ReLU(), layer, norm(width))


def _separable(width: int, *, stride: int = 1) -> nn.Sequential:
    """One filter a channel, then a 1×1×1 convolution over the channels."""
    depthwise = nn.Conv3d(width, width, 3, stride, padding=1, groups=width, bias=False)
    return nn.Sequential(nn.ReLU(), depthwise, nn.Conv3d(width, width, 1, bias=False), norm(width))


def _transposed(width: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.ConvTranspose3d(width, width, 2, 2, bias=False), norm(width))


OPERATIONS: dict[str, dict[str, Make]] = {
    "same": {
        "none": lambda width: Nothing(1.0),
        "identity": lambda width: nn.Identity(),
        "conv": _conv,
        "dilated_conv": lambda width: _conv(width, dilation=2),
        "separable_conv": _separable,
        "average_pool": lambda width: AveragePool(1),
        "max_pool": lambda width: nn.MaxPool3d(3, 1, 1),
    },
    "down": {
        "none": lambda width: Nothing(0.5),
        "conv": lambda width: _conv(width, stride=2),
        "dilated_conv": lambda width: _conv(width, stride=2, dilation=2),
        "separable_conv": lambda width: _separable(width, stride=2),
        "average_pool": lambda width: AveragePool(2),
        "max_pool": lambda width: nn.MaxPool3d(3, 2, 1),
    },
    "up": {
        "none": lambda width: Nothing(2.0),
        "interpolation": lambda width: Enlarge(),
        "interpolation_conv": lambda width: nn.Sequential(Enlarge(), _conv(width)),
        "interpolation_separable_conv": lambda width: nn.Sequential(Enlarge(), _separable(width)),
        "transposed_conv": _transposed,
    },
}


def operation(name: str, size: str, width: int) -> nn.Module:
    """The operation of this name on an edge that keeps ("same"), halves ("down") or doubles ("up") the size.

    >>> operation("max_pool", "down", 8)(torch.zeros(1, 8, 6, 6, 6)).shape
    torch.Size([1, 8, 3, 3, 3])
    """
    return OPERATIONS[size][name](width)
