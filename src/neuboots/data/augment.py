"""Augmentation of images in [0, 1]: random crop, flip and cutout; with masks, and of volumes.

    x̃ᵢ(p) = fill where ‖p − cᵢ‖∞ < cutout / 2, else xᵢ(fᵢ(p) + oᵢ),   oᵢ, cᵢ uniform,  fᵢ mirrors with chance 1/2

Everything is drawn from torch's global random state, and for each image by itself: a loop that seeds that state governs
it all. Pixels are moved by index, so that a crop is exact. kornia's RandomCrop and RandomHorizontalFlip move the same
pixels (a test compares them), but each call of theirs takes milliseconds, which a stream would pay for every row; its
3D crop interpolates, and its RandomErasing keeps the square inside the image, which cutout does not.

He, Zhang, Ren and Sun, Deep residual learning for image recognition, CVPR 2016 (crop and flip). DeVries and Taylor,
Improved regularization of convolutional neural networks with cutout, arXiv 1708.04552, 2017. Chen, Papandreou, Schroff
and Adam, Rethinking atrous convolution for semantic image segmentation, arXiv 1706.05587, 2017 (scales 0.5 to 2).
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class CropFlipCutout:
    """Images (N, C, H, W) → (N, C, *size): padded with black, cropped, mirrored with chance 1/2, a square cut out.

    The square of side `cutout` is centred on any pixel of the crop, so that it may reach over the border, and is filled
    with `fill`, a number for all channels or one for each: the mean that the images are normalised by. 0 cuts nothing.

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
        _set(self, size=_whole("size", self.size, axes=(2,)), fill=_numbers("fill", self.fill), flip=bool(self.flip))
        _set(self, padding=_whole("padding", [self.padding], least=0)[0])
        _set(self, cutout=_whole("cutout", [self.cutout], least=0)[0])

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _check(x, y, axes=2, fill=self.fill)
        if y.ndim == x.ndim - 1:
            raise ValueError("got masks; expected a label for each image: CropFlip moves masks with their images")
        N, C, H, W = x.shape
        (h, w), pad = self.size, self.padding
        if H + 2 * pad < h or W + 2 * pad < w:
            raise ValueError(
                f"got images of {H} × {W} and padding={pad}; expected at least {h} × {w} after padding: take a larger "
                "padding, or a smaller size"
            )
        u = torch.rand(N, 5, dtype=torch.float64)
        top, left = _below(H + 2 * pad - h + 1, u[:, 0]), _below(W + 2 * pad - w + 1, u[:, 1])  # (N,)
        rows, columns = torch.arange(h), torch.arange(w).expand(N, w)
        if self.flip:
            columns = columns.where(u[:, 2:3] < 0.5, w - 1 - columns)
        places = (rows + top[:, None])[:, :, None] * (W + 2 * pad) + (columns + left[:, None])[:, None]  # (N, h, w)
        places = places.view(N, 1, h * w).expand(-1, C, -1).to(x.device)
        padded = F.pad(x, [pad] * 4) if pad else x
        x = padded.flatten(2).gather(2, places).view(N, C, h, w)
        if self.cutout:
            half = self.cutout // 2
            down = _between(rows - _below(h, u[:, 3])[:, None] + half, self.cutout)  # (N, h)
            across = _between(torch.arange(w) - _below(w, u[:, 4])[:, None] + half, self.cutout)  # (N, w)
            square = (down[:, None, :, None] & across[:, None, None]).to(x.device)  # (N, 1, h, w)
            x = x.new_tensor(self.fill).view(-1, 1, 1).where(square, x)
        return x, y


@dataclass(frozen=True)
class CropFlip:
    """Images or volumes (N, C, *) with their masks (N, *) → (N, C, *size), (N, *size): resized, cropped and mirrored.

    Each is resized by a factor drawn from `scale` (linear in images, nearest neighbour in masks), cropped, and mirrored
    along each axis of `flips` with chance 1/2: −1, the last, is left and right of an image. Where it is smaller than
    the crop, it lies in it anywhere, amid `fill` in the image and `ignore_index` in the mask. Labels (N,) stay.

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
        size = _whole("size", self.size, axes=(1, 2, 3))
        scale = _numbers("scale", self.scale)
        if len(scale) != 2 or not 0 < scale[0] <= scale[1]:
            raise ValueError(f"got scale={self.scale!r}; expected the least and the greatest factor, above 0")
        flips = _whole("flips", self.flips, least=-len(size))
        if any(axis >= len(size) for axis in flips):
            raise ValueError(f"got flips={self.flips!r}; expected axes from 0 to {len(size) - 1}, or −1 for the last")
        flips = tuple(sorted({axis % len(size) for axis in flips}))  # one way to write them: equal ones look equal
        ignore_index = _whole("void", [self.ignore_index], least=-(1 << 63))[0]
        _set(self, size=size, scale=scale, flips=flips, fill=_numbers("fill", self.fill), ignore_index=ignore_index)

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        axes = len(self.size)
        _check(x, y, axes=axes, fill=self.fill)
        draws = torch.rand(len(x), 1 + 2 * axes, dtype=torch.float64).tolist()
        new_x = x.new_tensor(self.fill).view(-1, *[1] * axes).repeat(len(x), x.shape[1] // len(self.fill), *self.size)
        new_y = y.new_full((len(y), *self.size), self.ignore_index) if y.ndim > 1 else y
        for i, (u, *others) in enumerate(draws):
            factor = self.scale[0] + (self.scale[1] - self.scale[0]) * u
            places = [
                _places(x.shape[2 + axis], factor, self.size[axis], start, axis in self.flips and mirror < 0.5)
                for axis, (start, mirror) in enumerate(zip(others[:axes], others[axes:], strict=True))
            ]
            part, mask = x[i], y[i]
            for axis, (source, _) in enumerate(places):
                part = _linear(part, 1 + axis, source.to(x.device))
                if y.ndim > 1:
                    mask = mask.index_select(axis, (source + 0.5).floor().long().to(y.device))
            window: tuple[Any, ...] = tuple(window for _, window in places)
            new_x[i][(slice(None), *window)] = part
            if y.ndim > 1:
                new_y[i][window] = mask
        return new_x, new_y


def _places(old: int, factor: float, crop: int, u: float, mirror: bool) -> tuple[Tensor, slice]:
    """Along one axis: where the pixels come from, in pixels of the image, and where in the crop they lie."""
    new = max(1, round(old * factor))
    inside = min(new, crop)
    start = math.floor(u * (abs(new - crop) + 1))  # of the crop in the image, or of the smaller image in the crop
    pixels = torch.arange(inside, dtype=torch.float64) + (start if new > crop else 0)
    source = (pixels + 0.5) * (old / new) - 0.5
    first = 0 if new > crop else start
    return source.flip(0) if mirror else source, slice(first, first + inside)


def _linear(part: Tensor, axis: int, source: Tensor) -> Tensor:
    """Between the two nearest pixels along an axis; at a pixel, that pixel itself."""
    last = part.shape[axis] - 1
    source = source.clamp(0, last)
    low = source.floor()
    share = (source - low).to(part.dtype)
    near = part.index_select(axis, low.long())
    if not bool(share.any()):
        return near
    far = part.index_select(axis, (low + 1).clamp(max=last).long())
    return near.lerp(far, share.view(-1, *[1] * (part.ndim - axis - 1)))


def _below(bound: int, u: Tensor) -> Tensor:
    """Whole numbers 0 … bound − 1 from uniform ones."""
    return (u * bound).long()


def _between(offset: Tensor, length: int) -> Tensor:
    return (offset >= 0) & (offset < length)


# -- what may be given ---------------------------------------------------------------------------------


def _check(x: Any, y: Any, *, axes: int, fill: Sequence[float]) -> None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise ValueError(f"got {type(x).__name__} and {type(y).__name__}; expected tensors of images and labels")
    if x.ndim != 2 + axes or not x.is_floating_point():
        raise ValueError(
            f"got images of shape {tuple(x.shape)} and type {x.dtype}; expected (N, C, *) with {axes} axes of pixels, "
            "in floating point"
        )
    if 0 in x.shape[1:]:
        raise ValueError(f"got images of shape {tuple(x.shape)}, without pixels; expected at least one")
    if y.shape != x.shape[:1] and y.shape != x.shape[:1] + x.shape[2:]:
        raise ValueError(
            f"got images of shape {tuple(x.shape)} with targets of shape {tuple(y.shape)}; expected a label for each "
            "image, (N,), or a mask of its size, (N, *)"
        )
    if len(fill) not in (1, x.shape[1]):
        raise ValueError(f"got fill={tuple(fill)} for {x.shape[1]} channels; expected one number, or one for each")


def _set(augment: Any, **values: Any) -> None:
    """Fields of a frozen dataclass, in one spelling: equal options have equal representations."""
    for name, value in values.items():
        object.__setattr__(augment, name, value)


def _whole(name: str, values: Any, *, least: int = 1, axes: tuple[int, ...] = ()) -> tuple[Any, ...]:
    try:
        found = tuple(int(value) for value in values)
        fits = found == tuple(values) and all(value >= least for value in found)
    except (TypeError, ValueError, OverflowError):
        found, fits = (), False
    if not fits or (axes and len(found) not in axes):
        many = f"{' or '.join(map(str, axes))} " if axes else ""
        at_least = f" from {least} on" if least >= -3 else ""
        raise ValueError(f"got {name}={values!r}; expected {many}whole numbers{at_least}")
    return found


def _numbers(name: str, values: Any) -> tuple[Any, ...]:
    try:
        found = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(f"got {name}={values!r}; expected finite numbers in a tuple, such as (0.5,)")
    return found
