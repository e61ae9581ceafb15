"""U-ResNet: a residual U-Net for volumes (and images): features at several scales, joined by skip connections.

    h_l = down_l(h_{l−1}),   u_l = up_l([h_l, u_{l+1}]),   unit(x) = residual(x) + shortcut(x),   z = W u_0 + b

MONAI's U-Net with residual units is the body. It is asked for D = widths[0] channels instead of classes; normalisation,
PReLU and a 1×1×1 convolution called `head` follow, so that the net ends in a layer which a bootstrap can re-weight.

GroupNorm is used throughout: it works with one or two volumes a batch. Intensities of the input are not normalised
here; that is the data set's business.

Ö. Çiçek, A. Abdulkadir, S. Lienkamp, T. Brox, O. Ronneberger, 3D U-Net: learning dense volumetric segmentation from
sparse annotation, MICCAI 2016. E. Kerfoot et al., Left-ventricle quantification using residual U-Net, STACOM 2018
(LNCS 11395, 2019).
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from neuboots.nets.mlp import check_choice, check_size, check_sizes


class UResNet(nn.Module):
    """z = head(unet(x)): a residual U-Net with a scale for each width and a 1×1×1 head on D = widths[0] channels.

    Each scale after the first halves the volume once more; `units` residual convolutions make a block. The first block
    already halves the volume, as in Kerfoot et al., which is what makes the net quick. Any spatial size is taken: the
    input is padded with zeros to a multiple of the total stride and the features are cropped before the head.
    With dims=2 the same net takes images.

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
        check_size("in_channels", in_channels)
        check_size("num_classes", num_classes)
        check_sizes("widths", widths)
        check_size("units", units)
        check_choice("dims", dims, (2, 3))
        if len(widths) < 2:
            raise ValueError(f"widths is {widths!r}; expected at least two scales: pass a tuple such as (16, 32)")
        self.options: dict[str, Any] = {
            "in_channels": in_channels,
            "num_classes": num_classes,
            "widths": list(widths),
            "units": units,
            "dims": dims,
        }
        try:
            from monai.networks.nets.unet import UNet
        except ModuleNotFoundError as fault:
            if (fault.name or "").split(".")[0] != "monai":
                raise
            raise ModuleNotFoundError(
                "UResNet is built on MONAI, which is not installed; get it with: pip install 'neuboots[volumes]'",
                name="monai",
            ) from None
        width, groups = widths[0], num_groups(math.gcd(*widths))
        self.unet = UNet(
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
        check_grid(x, self.options["in_channels"], self.options["dims"])
        whole = pad_to_multiple(x, 2 ** (len(self.options["widths"]) - 1))
        phi = crop_to_size(self.finish(self.unet(whole)), x.shape[2:])  # (N, D, *)
        out: Tensor = self.head(phi)  # (N, C, *)
        return out


# -- what the nets for volumes share -------------------------------------------------------------------


def num_groups(width: int) -> int:
    """How many groups GroupNorm makes of so many channels: at most 8, each of at least 4 channels where it can be.

    >>> [num_groups(width) for width in (64, 16, 12, 8, 4, 1)]
    [8, 4, 2, 2, 1, 1]
    """
    return max(groups for groups in (8, 4, 2, 1) if groups == 1 or (width % groups == 0 and width // groups >= 4))


def check_grid(x: Tensor, in_channels: int, dims: int) -> None:
    """Refuse anything but a batch of volumes (or images) with so many channels."""
    if x.dim() != dims + 2 or x.shape[1] != in_channels or 0 in x.shape[2:]:
        axes = ", ".join("DHW"[3 - dims :])
        raise ValueError(
            f"the net got an input of shape {tuple(x.shape)}; expected (N, {in_channels}, {axes}): "
            "reshape the input, or build the net with its in_channels"
        )


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """x (N, C, *) with zeros after its end, as convolutions pad, up to a multiple of `multiple` on each axis.

    >>> import torch
    >>> pad_to_multiple(torch.ones(1, 1, 3, 8), 4).shape
    torch.Size([1, 1, 4, 8])
    """
    short = [-size % multiple for size in x.shape[2:]]
    return functional.pad(x, [side for size in reversed(short) for side in (0, size)]) if any(short) else x


def crop_to_size(x: Tensor, size: Sequence[int]) -> Tensor:
    """The first voxels of x (N, C, *), so many on each axis: what undoes `pad_to_multiple`."""
    return x[(slice(None), slice(None), *(slice(length) for length in size))]
