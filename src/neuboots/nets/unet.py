"""U-ResNet: a residual U-Net for volumes and images.

    h_l = down_l(h_{l−1}),   u_l = up_l([h_l, u_{l+1}]),   unit(x) = residual(x) + shortcut(x),   z = W u_0 + b

The body is MONAI's U-Net with residual units and D = widths[0] output channels. Normalisation, PReLU and a 1×1×1
convolution called `head` follow, so that the net ends in a layer that a bootstrap can re-weight. GroupNorm is used
throughout, since it works with one or two volumes per batch. Intensities are not normalised here.

Ö. Çiçek, A. Abdulkadir, S. Lienkamp, T. Brox, O. Ronneberger, 3D U-Net: learning dense volumetric segmentation from
sparse annotation, MICCAI 2016. E. Kerfoot et al., Left-ventricle quantification using residual U-Net, STACOM 2018
(LNCS 11395, 2019).
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from neuboots._validation import ArgumentError, import_optional
from neuboots.serialization import configurable


@configurable
class UResNet(nn.Module):
    """Residual U-Net with a scale for each width and a 1×1×1 head on D = widths[0] channels.

    The first block halves the volume already, as in Kerfoot et al. The input is padded with zeros to a multiple of the
    total stride and the features are cropped before the head, so that any spatial size is accepted.

    Args:
        in_channels: Number of channels of the volumes.
        num_classes: Number of classes.
        widths: Channels of each scale; each scale after the first halves the volume.
        units: Number of residual convolutions in a block.
        dims: 3 for volumes, 2 for images.

    Example:
        >>> import torch
        >>> net = UResNet(1, 3, widths=(4, 8, 16))
        >>> net(torch.zeros(2, 1, 10, 7, 9)).shape
        torch.Size([2, 3, 10, 7, 9])
        >>> net.head
        Conv3d(4, 3, kernel_size=(1, 1, 1), stride=(1, 1, 1))
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int] = (32, 64, 128, 256),
        units: int = 2,
        dims: int = 3,
    ) -> None:
        super().__init__()
        if dims not in (2, 3):
            raise ArgumentError("dims", dims, "2 or 3")
        if not 2 <= len(widths) <= 32:
            raise ArgumentError("widths", f"{len(widths)} scales", "2 to 32")
        self.in_channels, self.dims, self.stride = in_channels, dims, 2 ** (len(widths) - 1)
        width, groups = widths[0], num_groups(math.gcd(*widths))
        self.unet = import_optional("monai.networks.nets.unet", "volumes").UNet(
            spatial_dims=dims,
            in_channels=in_channels,
            out_channels=width,
            channels=tuple(widths),
            strides=(2,) * (len(widths) - 1),
            num_res_units=units,
            norm=("group", {"num_groups": groups}),
        )
        self.finish = nn.Sequential(nn.GroupNorm(groups, width), nn.PReLU())
        self.head = (nn.Conv2d, nn.Conv3d)[dims - 2](width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map volumes (N, in_channels, *) to logits (N, num_classes, *)."""
        check_grid(x, self.in_channels, self.dims)
        padded = pad_to_multiple(x, self.stride)
        phi = crop_to_size(self.finish(self.unet(padded)), x.shape[2:])  # (N, D, *)
        out: Tensor = self.head(phi)  # (N, C, *)
        return out


# -- helpers of nets for volumes -------------------------------------------------------------------------


def num_groups(width: int) -> int:
    """Return the number of groups for GroupNorm: at most 8, with at least 4 channels each if possible.

    Args:
        width: Number of channels.

    Returns:
        The number of groups.

    Example:
        >>> [num_groups(width) for width in (64, 16, 12, 8, 4, 1)]
        [8, 4, 2, 2, 1, 1]
    """
    return max(groups for groups in (8, 4, 2, 1) if groups == 1 or (width % groups == 0 and width // groups >= 4))


def check_grid(x: Tensor, in_channels: int, dims: int) -> None:
    """Raise ArgumentError unless x is a batch (N, in_channels, *) with `dims` spatial axes.

    Args:
        x: Volumes or images.
        in_channels: Number of channels of the images.
        dims: Number of spatial axes.
    """
    if x.dim() != dims + 2 or x.shape[1] != in_channels or 0 in x.shape[2:]:
        raise ArgumentError("x", tuple(x.shape), f"(N, {in_channels}, {', '.join('DHW'[3 - dims :])})")


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pad x (N, C, *) with zeros at the end of each axis to a multiple of `multiple`.

    Args:
        x: Volumes or images.
        multiple: The multiple.

    Returns:
        The padded tensor.

    Example:
        >>> import torch
        >>> pad_to_multiple(torch.ones(1, 1, 3, 8), 4).shape
        torch.Size([1, 1, 4, 8])
    """
    short = [-size % multiple for size in x.shape[2:]]
    return functional.pad(x, [side for size in reversed(short) for side in (0, size)]) if any(short) else x


def crop_to_size(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return the first `size` voxels of x (N, C, *) on each axis; the inverse of `pad_to_multiple`.

    Args:
        x: Volumes or images.
        size: Spatial size.

    Returns:
        The cropped tensor.
    """
    return x[(slice(None), slice(None), *(slice(length) for length in size))]
