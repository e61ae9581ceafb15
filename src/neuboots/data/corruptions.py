"""Corruptions of images, in five severities, by the recipe of CIFAR-C; and rotation.

    x̃ = corrupt(x, severity, seed, row),   x ∈ [0, 1]^(N×C×H×W),  C = 1 (grey) or 3 (colour)

What is drawn is named by (corruption, seed, row number): an image's noise depends neither on the batch around it nor on
the severity, but for counts of photons (shot). Everything is computed in floating point and stays so, where the
published files are cut to 8 bits (np.uint8, which drops the fraction); what passes through JPEG here is rounded. Of
grey images, `brightness` raises the value and `saturate` leaves them as they are: they have no colour, and adding some
would need two channels more.

Hendrycks and Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019
(CIFAR-10-C). Rotation as in Ovadia et al., Can you trust your model's uncertainty? NeurIPS 2019 (rotated MNIST).
"""

import hashlib
import io
import math
import operator
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from neuboots.data._common import identity, import_optional

Draw = Callable[[Callable[[torch.Generator, Tensor], Tensor]], Tensor]  # draws for each image, under its own name

# -- the ten -------------------------------------------------------------------------------------------


def _gaussian_noise(x: Tensor, sigma: float, draw: Draw) -> Tensor:
    """x + σ z"""
    return x + sigma * draw(_normals)


def _shot_noise(x: Tensor, photons: float, draw: Draw) -> Tensor:
    """Poisson(x c) / c"""
    return draw(lambda rng, image: torch.poisson(image * photons, generator=rng)) / photons


def _impulse_noise(x: Tensor, amount: float, draw: Draw) -> Tensor:
    """Of all numbers (each channel by itself) a share becomes 0 or 1, either with the same chance."""
    u = draw(_uniforms)
    return x.where(u >= amount, (u < amount / 2).to(x))


def _speckle_noise(x: Tensor, sigma: float, draw: Draw) -> Tensor:
    """x + x σ z"""
    return x + x * sigma * draw(_normals)


def _gaussian_blur(x: Tensor, sigma: float, draw: Draw) -> Tensor:
    """Convolved with a Gaussian cut off at 4σ; the border's value goes on outside."""
    radius = int(4.0 * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = (-0.5 * (offsets / sigma) ** 2).exp()
    kernel = (kernel / kernel.sum()).to(x)
    maps = F.pad(x.flatten(0, 1)[:, None], [radius] * 4, mode="replicate")  # (N·C, 1, H + 2r, W + 2r)
    maps = F.conv2d(F.conv2d(maps, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))
    return maps.view_as(x)


def _contrast(x: Tensor, factor: float, draw: Draw) -> Tensor:
    """x̄ + c (x − x̄), x̄ the mean of each channel of each image"""
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _brightness(x: Tensor, more: float, draw: Draw) -> Tensor:
    """V + c in HSV; hue and saturation stay, so that all channels grow by one factor. Black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp_max(1.0)
    return (x * (raised / value)).where(value > 0, raised)


def _saturate(x: Tensor, change: tuple[float, float], draw: Draw) -> Tensor:
    """S a + b in HSV; hue and value stay. A grey pixel of a colour image has the hue 0, red, as in the recipe."""
    if x.shape[1] == 1:
        return x.clone()
    factor, more = change
    value = x.amax(1, keepdim=True)
    depth = value - x  # how far each channel lies below the largest: V S times a share that the hue gives
    saturation = depth.amax(1, keepdim=True) / value
    changed = (factor * saturation + more).clamp(0.0, 1.0)
    red = value * changed * torch.tensor([0.0, 1.0, 1.0]).to(x).view(1, 3, 1, 1)
    deeper = (depth * (changed / saturation)).where(saturation > 0, red)
    return (value - deeper).where(value > 0, 0.0)


def _jpeg(x: Tensor, quality: float, draw: Draw) -> Tensor:
    """Written as JPEG of this quality, and read again."""
    Image = import_optional("PIL.Image")

    def once(image: Tensor) -> Tensor:
        pixels = (255.0 * image).round().to(torch.uint8).movedim(0, -1).squeeze(-1).cpu().numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=int(quality))
        return torch.from_numpy(np.array(Image.open(file))).view(*image.shape[1:], -1).movedim(-1, 0)

    return torch.stack([once(image) for image in x]).to(x) / 255.0


def _pixelate(x: Tensor, factor: float, draw: Draw) -> Tensor:
    """Made smaller by the means over boxes, and as large again by repeating pixels: PIL's BOX both times."""
    for axis in (2, 3):
        size = x.shape[axis]
        small = max(1, int(size * factor))
        resize = (_boxes(size, small) @ _boxes(small, size)).to(x)  # (size, size)
        x = torch.tensordot(x, resize, ([axis], [0])).movedim(-1, axis)
    return x


def _boxes(before: int, after: int) -> Tensor:
    """PIL's box filter, which makes `after` pixels of `before`: means over the centres in a box: (before, after)."""
    scale = before / after
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(before, dtype=torch.float64)[:, None] + 0.5 - centres) / max(scale, 1.0)
    inside = ((distance > -0.5) & (distance <= 0.5)).double()
    return inside / inside.sum(0)


# -- rotation ------------------------------------------------------------------------------------------


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Images (N, C, H, W) turned counter-clockwise about their centre; bilinear, with zeros from outside.

    `degrees` is one angle for all images, or a tensor of one for each, (N,).

    >>> images = torch.arange(4.0).view(1, 1, 2, 2) / 3
    >>> bool(torch.allclose(rotate(images, 90), images.rot90(dims=(2, 3)), atol=1e-6))
    True
    """
    _check_images(images)
    angles = _angles(degrees, len(images)).view(-1, 1, 1)
    if len(images) == 0:
        return images.clone()
    height, width = images.shape[2:]
    rows = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    cos, sin = angles.cos(), angles.sin()
    # where each pixel comes from, in units of half an image, as grid_sample counts
    grid = torch.stack([2 * (cos * x - sin * y) / width, 2 * (sin * x + cos * y) / height], -1)  # (1 or N, H, W, 2)
    grid = grid.to(images).expand(len(images), -1, -1, -1)
    return F.grid_sample(images, grid, "bilinear", "zeros", align_corners=False).clamp(0.0, 1.0)


def _rotation(x: Tensor, degrees: float, draw: Draw) -> Tensor:
    """What `rotate` gives: nothing is drawn."""
    return rotate(x, degrees)


def _angles(degrees: Any, n: int) -> Tensor:
    """In radians, double precision: (1,) or (n,)."""
    if isinstance(degrees, Tensor) and degrees.ndim == 1 and not degrees.is_complex():
        if degrees.shape != (n,) or not bool(degrees.isfinite().all()):
            raise ValueError(f"got {len(degrees)} angles for {n} images; expected one finite number for each")
        return degrees.detach().cpu().double().deg2rad()
    if not _is_finite(degrees):
        raise ValueError(f"got degrees={degrees!r}; expected a finite number")
    return torch.tensor([math.radians(degrees)], dtype=torch.float64)


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


# -- a corruption --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corruption:
    """images (N, C, H, W) in [0, 1] → images in [0, 1], at severity 1 … len(levels)."""

    name: str
    levels: tuple[Any, ...]
    apply: Callable[[Tensor, Any, Draw], Tensor]

    def __call__(self, images: Tensor, severity: int, *, seed: int = 0, index: Any = None) -> Tensor:
        """`index` are the row numbers (N,) of the images, tensor or list, which name what is drawn; None: 0 … N − 1.

        >>> images = torch.full((2, 1, 28, 28), 0.5)
        >>> noisy = CORRUPTIONS["gaussian_noise"](images, 3)
        >>> second = CORRUPTIONS["gaussian_noise"](images[1:], 3, index=torch.tensor([1]))
        >>> noisy.shape, bool((noisy[1:] == second).all())
        (torch.Size([2, 1, 28, 28]), True)
        """
        _check_images(images)
        level = self.level(severity)
        seed = check_index("seed", seed)  # one type, so that np.int64(0) names what 0 does
        rows = _row_numbers(index, len(images))
        if len(images) == 0:
            return images.clone()

        def draw(make: Callable[[torch.Generator, Tensor], Tensor]) -> Tensor:
            """In double precision, whatever that of the images: the same noise on every device."""
            each = zip(rows, images.cpu().double(), strict=True)
            return torch.stack([make(_named(self.name, seed, row), image) for row, image in each]).to(images)

        return self.apply(images, level, draw).clamp(0.0, 1.0)

    def level(self, severity: int) -> Any:
        """What the recipe has for this severity."""
        number = check_index("severity", severity, f" from 1 to {len(self.levels)}")
        if not 1 <= number <= len(self.levels):
            raise ValueError(f"got severity={severity!r}; expected a whole number from 1 to {len(self.levels)}")
        return self.levels[number - 1]


def check_index(name: str, value: Any, which: str = "") -> int:
    if not isinstance(value, bool | Tensor):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"got {name}={value!r}; expected a whole number{which}")


def _row_numbers(index: Any, n: int) -> list[int]:
    if index is None:
        return list(range(n))
    try:
        rows = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"got index={index!r}; expected a row number for each of {n} images") from None
    if rows.shape != (n,):
        raise ValueError(f"got index of shape {tuple(rows.shape)} for {n} images; expected one row number for each")
    if n and (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool):
        raise ValueError(f"got index of {rows.dtype}; expected whole numbers: convert it with .long()")
    numbers: list[int] = rows.tolist()
    return numbers


def _named(*name: str | int) -> torch.Generator:
    """A generator of this name: the same on every machine, and no other than its own."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _normals(rng: torch.Generator, image: Tensor) -> Tensor:
    return torch.randn(image.shape, generator=rng, dtype=image.dtype)


def _uniforms(rng: torch.Generator, image: Tensor) -> Tensor:
    return torch.rand(image.shape, generator=rng, dtype=image.dtype)


def _check_images(images: Any) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"got images of shape {got}; expected (N, C, H, W) with C = 1 (grey) or 3 (colour)")
    if not images.is_floating_point():
        raise ValueError(f"got images of {images.dtype}; expected floating-point numbers: use images.float() / 255")
    if len(images) and images.numel() == 0:
        raise ValueError(f"got images of shape {tuple(images.shape)}, without pixels; expected at least one")
    if images.numel() and not bool(((images >= 0) & (images <= 1)).all()):
        low, high = float(images.amin()), float(images.amax())
        raise ValueError(
            f"got images with values from {low:g} to {high:g}; expected numbers in [0, 1]: corrupt images first and "
            "normalise them after"
        )


def _table(corruptions: Iterable[Corruption]) -> dict[str, Corruption]:
    return {corruption.name: corruption for corruption in corruptions}


CORRUPTIONS: dict[str, Corruption] = _table(
    [
        Corruption("gaussian_noise", (0.04, 0.06, 0.08, 0.09, 0.10), _gaussian_noise),
        Corruption("shot_noise", (500, 250, 100, 75, 50), _shot_noise),
        Corruption("impulse_noise", (0.01, 0.02, 0.03, 0.05, 0.07), _impulse_noise),
        Corruption("speckle_noise", (0.06, 0.1, 0.12, 0.16, 0.2), _speckle_noise),
        Corruption("gaussian_blur", (0.4, 0.6, 0.7, 0.8, 1.0), _gaussian_blur),
        Corruption("contrast", (0.75, 0.5, 0.4, 0.3, 0.15), _contrast),
        Corruption("brightness", (0.05, 0.1, 0.15, 0.2, 0.3), _brightness),
        Corruption("jpeg", (80, 65, 58, 50, 40), _jpeg),
        Corruption("pixelate", (0.95, 0.9, 0.85, 0.75, 0.65), _pixelate),
        Corruption("saturate", ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)), _saturate),
    ]
)

# Apart from the ten, since a mean over corruptions is one over CIFAR-C's: severity k turns by 15 k degrees, to 180.
ROTATION: dict[str, Corruption] = _table([Corruption("rotation", tuple(range(15, 181, 15)), _rotation)])


class CorruptedDataset(Dataset[Any]):
    """A data set of (x, y), x an image in [0, 1], with each image corrupted as it is read; `transform` comes after.

    >>> from torch.utils.data import TensorDataset
    >>> clean = TensorDataset(torch.rand(6, 3, 32, 32), torch.arange(6))
    >>> image, label = CorruptedDataset(clean, CORRUPTIONS["jpeg"], 5)[4]
    >>> image.shape, int(label)
    (torch.Size([3, 32, 32]), 4)
    """

    def __init__(
        self,
        data: Dataset[Any],
        corruption: Corruption,
        severity: int,
        *,
        seed: int = 0,
        transform: Callable[[Tensor], Tensor] = identity,  # a lambda could not be sent to a loader's process
    ) -> None:
        if not isinstance(corruption, Corruption):
            raise ValueError(
                f'got a corruption of type {type(corruption).__name__}; expected one such as CORRUPTIONS["jpeg"]'
            )
        corruption.level(severity)  # what it refuses, it refuses here, and not in a loader's process
        self.data, self.corruption, self.severity = data, corruption, severity
        self.seed, self.transform = check_index("seed", seed), transform

    def __len__(self) -> int:
        return len(cast(Sized, self.data))

    def __getitem__(self, row: int) -> tuple[Tensor, Any]:
        if not 0 <= row < len(self):  # what ends a loop over it; −1 would name another draw than the last row
            raise IndexError(f"got row {row}; expected 0 … {len(self) - 1}")
        x, y = self.data[row]
        if not isinstance(x, Tensor):
            raise ValueError(
                f"got a row whose image is of type {type(x).__name__}; expected a tensor (C, H, W) in [0, 1]: give the "
                "data set a transform such as torchvision's ToTensor()"
            )
        whole = self.corruption(x[None], self.severity, seed=self.seed, index=torch.tensor([row]))
        return self.transform(whole[0]), y
