"""Random crop, flip, scale and cutout of images in [0, 1] and volumes, with their masks.

    x̃ᵢ(p) = fill where ‖p − cᵢ‖∞ < cutout / 2, else xᵢ(fᵢ(p) + oᵢ),   oᵢ, cᵢ uniform,  fᵢ a mirror with probability 1/2

All draws come from torch's global random state, independently for each image. Pixels are moved by index, so that a crop
is exact. kornia's RandomCrop and RandomHorizontalFlip move the same pixels (a test compares them) but take milliseconds
per call; its 3D crop interpolates, and its RandomErasing keeps the square inside the image, which cutout does not.

He, Zhang, Ren and Sun, Deep residual learning for image recognition, CVPR 2016 (crop and flip). DeVries and Taylor,
Improved regularization of convolutional neural networks with cutout, arXiv 1708.04552, 2017. Chen, Papandreou, Schroff
and Adam, Rethinking atrous convolution for semantic image segmentation, arXiv 1706.05587, 2017 (scales 0.5 to 2).
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from neuboots._validation import ArgumentError, check_int


@dataclass(frozen=True)
class CropFlipCutout:
    """Random crop of the padded image, horizontal flip and cutout: (N, C, H, W) → (N, C, *size); labels stay.

    Attributes:
        size: Height and width of the crop.
        padding: Black pixels added on each side before cropping.
        flip: Whether images are mirrored with probability 1/2.
        cutout: Side of the square that is erased, centred on any pixel of the crop; 0 for none.
        fill: Value of erased pixels, one for all channels or one for each; the mean that images are standardized by.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> augment = CropFlipCutout((32, 32), padding=4, cutout=16, fill=(0.49, 0.48, 0.45))
        >>> x, y = augment(torch.rand(8, 3, 32, 32), torch.arange(8))
        >>> x.shape, y.tolist()
        (torch.Size([8, 3, 32, 32]), [0, 1, 2, 3, 4, 5, 6, 7])
    """

    size: tuple[int, int]
    _: KW_ONLY
    padding: int = 4
    flip: bool = True
    cutout: int = 0
    fill: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        check_sides("size", self.size, axes=(2,))
        check_int("padding", self.padding, minimum=0)
        check_int("cutout", self.cutout, minimum=0)

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _check_images(x, y, 2, self.fill)
        if y.ndim > 1:
            raise ArgumentError("y", f"masks of shape {tuple(y.shape)}", "labels (N,)", hint="use CropFlip for masks")
        N, C, H, W = x.shape
        (h, w), pad = self.size, self.padding
        if H + 2 * pad < h or W + 2 * pad < w:
            raise ArgumentError(
                "padding", pad, f"enough for a crop of {h} × {w} from an image of {H} × {W}", hint="use a smaller size"
            )
        u = torch.rand(N, 5, dtype=torch.float64)
        top, left = (u[:, 0] * (H + 2 * pad - h + 1)).long(), (u[:, 1] * (W + 2 * pad - w + 1)).long()  # (N,)
        rows, columns = torch.arange(h), torch.arange(w).expand(N, w)
        if self.flip:
            columns = columns.where(u[:, 2:3] < 0.5, w - 1 - columns)
        index = (rows + top[:, None])[:, :, None] * (W + 2 * pad) + (columns + left[:, None])[:, None]  # (N, h, w)
        index = index.view(N, 1, h * w).expand(-1, C, -1).to(x.device)
        padded = F.pad(x, [pad] * 4) if pad else x
        x = padded.flatten(2).gather(2, index).view(N, C, h, w)
        if self.cutout:
            down = rows - (u[:, 3] * h).long()[:, None] + self.cutout // 2  # (N, h)
            across = torch.arange(w) - (u[:, 4] * w).long()[:, None] + self.cutout // 2  # (N, w)
            inside = [(offset >= 0) & (offset < self.cutout) for offset in (down, across)]
            square = (inside[0][:, None, :, None] & inside[1][:, None, None]).to(x.device)  # (N, 1, h, w)
            x = x.new_tensor(self.fill).view(-1, 1, 1).where(square, x)
        return x, y


@dataclass(frozen=True)
class CropFlip:
    """Random scale, crop and flips of images or volumes (N, C, *) with their masks (N, *).

    Images are interpolated linearly, masks by nearest neighbour. An image that is smaller than the crop is placed in it
    at random. Labels (N,) stay.

    Attributes:
        size: Size of the crop along each axis.
        scale: Minimum and maximum scale factor.
        flips: Axes that are mirrored with probability 1/2; −1 is the last one.
        fill: Value of pixels outside the image, one for all channels or one for each.
        ignore_index: Value of mask pixels outside the image.

    Example:
        >>> _ = torch.manual_seed(4)
        >>> augment = CropFlip((96, 128), scale=(0.5, 2.0), fill=(0.485, 0.456, 0.406), ignore_index=255)
        >>> x, mask = augment(torch.rand(4, 3, 120, 160), torch.ones(4, 120, 160, dtype=torch.int64))
        >>> x.shape, mask.shape, mask.unique().tolist()
        (torch.Size([4, 3, 96, 128]), torch.Size([4, 96, 128]), [1, 255])
    """

    size: tuple[int, ...]
    _: KW_ONLY
    scale: tuple[float, float] = (1.0, 1.0)
    flips: tuple[int, ...] = (-1,)
    fill: tuple[float, ...] = (0.0,)
    ignore_index: int = 255

    def __post_init__(self) -> None:
        axes = len(check_sides("size", self.size, axes=(1, 2, 3)))
        if not 0 < self.scale[0] <= self.scale[1] < math.inf:
            raise ArgumentError("scale", self.scale, "minimum and maximum factor, above 0")
        if any(not -axes <= check_int("flips", axis) < axes for axis in self.flips):
            raise ArgumentError("flips", self.flips, f"axes from {-axes} to {axes - 1}")

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        axes = len(self.size)
        _check_images(x, y, axes, self.fill)
        flips = {axis % axes for axis in self.flips}
        draws = torch.rand(len(x), 1 + 2 * axes, dtype=torch.float64).tolist()
        new_x = x.new_tensor(self.fill).view(-1, *[1] * axes).repeat(len(x), x.shape[1] // len(self.fill), *self.size)
        new_y = y.new_full((len(y), *self.size), self.ignore_index) if y.ndim > 1 else y
        for i, (u, *others) in enumerate(draws):
            factor = self.scale[0] + (self.scale[1] - self.scale[0]) * u
            crops = [
                _crop_axis(x.shape[2 + axis], factor, self.size[axis], start, axis in flips and mirror < 0.5)
                for axis, (start, mirror) in enumerate(zip(others[:axes], others[axes:], strict=True))
            ]
            image, mask = x[i], y[i]
            for axis, (source, _) in enumerate(crops):
                image = _interpolate(image, 1 + axis, source.to(x.device))
                if y.ndim > 1:
                    mask = mask.index_select(axis, (source + 0.5).floor().long().to(y.device))
            window: tuple[Any, ...] = tuple(window for _, window in crops)
            new_x[i][(slice(None), *window)] = image
            if y.ndim > 1:
                new_y[i][window] = mask
        return new_x, new_y


def _crop_axis(old: int, factor: float, crop: int, u: float, mirror: bool) -> tuple[Tensor, slice]:
    """Along one axis: source coordinates of the pixels in the image, and their slice of the crop."""
    new = max(1, round(old * factor))
    inside = min(new, crop)
    start = math.floor(u * (abs(new - crop) + 1))  # of the crop in the image, or of the smaller image in the crop
    pixels = torch.arange(inside, dtype=torch.float64) + (start if new > crop else 0)
    source = (pixels + 0.5) * (old / new) - 0.5
    first = 0 if new > crop else start
    return source.flip(0) if mirror else source, slice(first, first + inside)


def _interpolate(image: Tensor, axis: int, source: Tensor) -> Tensor:
    """Linear interpolation along an axis; exact at integer coordinates."""
    last = image.shape[axis] - 1
    source = source.clamp(0, last)
    low = source.floor()
    weight = (source - low).to(image.dtype)
    near = image.index_select(axis, low.long())
    if not bool(weight.any()):
        return near
    far = image.index_select(axis, (low + 1).clamp(max=last).long())
    return near.lerp(far, weight.view(-1, *[1] * (image.ndim - axis - 1)))


def _check_images(x: Tensor, y: Tensor, axes: int, fill: tuple[float, ...]) -> None:
    """Reject shapes that would be broadcast or cropped silently."""
    if x.ndim != 2 + axes or not x.is_floating_point() or 0 in x.shape[1:]:
        expected = f"floating-point images (N, C, *) with {axes} pixel axes"
        raise ArgumentError("x", f"a tensor of shape {tuple(x.shape)} and type {x.dtype}", expected)
    if y.shape != x.shape[:1] and y.shape != x.shape[:1] + x.shape[2:]:
        raise ArgumentError("y", f"a tensor of shape {tuple(y.shape)}", "a label (N,) or a mask (N, *) for each image")
    if len(fill) not in (1, x.shape[1]):
        raise ArgumentError("fill", fill, f"one number, or one for each of {x.shape[1]} channels")


def check_sides(name: str, values: Any, *, axes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the size of an image or volume as a tuple of integers.

    Args:
        name: Name of the argument.
        values: The size along each axis.
        axes: Accepted numbers of axes.

    Returns:
        The size as a tuple of `int`.

    Raises:
        ArgumentError: If it is not a sequence of that many positive integers.
    """
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) not in axes:
        raise ArgumentError(name, values, f"{' or '.join(map(str, axes))} positive integers")
    return tuple(check_int(name, value, minimum=1) for value in values)
