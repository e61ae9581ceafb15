"""Corruptions of images at five severities, as in CIFAR-10-C, and rotation.

    x̃ = corrupt(x, severity, seed, row),   x ∈ [0, 1]^(N×C×H×W),  C = 1 (grayscale) or 3 (RGB)

Random numbers are a function of (corruption, seed, row index): the noise of an image depends neither on its batch nor,
except for photon counts (shot noise), on the severity. Results stay in floating point, where the published files are
truncated to 8 bits; JPEG input is rounded. For grayscale images, `brightness` raises the value and `saturate` does
nothing.

Hendrycks and Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019
(CIFAR-10-C). Rotation as in Ovadia et al., Can you trust your model's uncertainty? NeurIPS 2019 (rotated MNIST).
"""

import hashlib
import io
from collections.abc import Callable, Sized
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, check_int, import_optional

_Draw = Callable[[Callable[[torch.Generator, Tensor], Tensor]], Tensor]  # draws for each image from its own generator


def _gaussian_noise(x: Tensor, sigma: float, draw: _Draw) -> Tensor:
    """x + σ z"""
    return x + sigma * draw(_standard_normal)


def _shot_noise(x: Tensor, photons: float, draw: _Draw) -> Tensor:
    """Poisson(x c) / c"""
    return draw(lambda rng, image: torch.poisson(image * photons, generator=rng)) / photons


def _impulse_noise(x: Tensor, amount: float, draw: _Draw) -> Tensor:
    """A fraction of the values, in each channel independently, becomes 0 or 1 with equal probability."""
    u = draw(lambda rng, image: torch.rand(image.shape, generator=rng, dtype=image.dtype))
    return x.where(u >= amount, (u < amount / 2).to(x))


def _speckle_noise(x: Tensor, sigma: float, draw: _Draw) -> Tensor:
    """x + x σ z"""
    return x + x * sigma * draw(_standard_normal)


def _gaussian_blur(x: Tensor, sigma: float, draw: _Draw) -> Tensor:
    """Convolution with a Gaussian truncated at 4σ; the border is replicated."""
    radius = int(4.0 * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = (-0.5 * (offsets / sigma) ** 2).exp()
    kernel = (kernel / kernel.sum()).to(x)
    maps = F.pad(x.flatten(0, 1)[:, None], [radius] * 4, mode="replicate")  # (N·C, 1, H + 2r, W + 2r)
    maps = F.conv2d(F.conv2d(maps, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))
    return maps.view_as(x)


def _contrast(x: Tensor, factor: float, draw: _Draw) -> Tensor:
    """x̄ + c (x − x̄), x̄ the mean of each channel of each image"""
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _brightness(x: Tensor, offset: float, draw: _Draw) -> Tensor:
    """V + c in HSV: all channels grow by one factor; black becomes gray."""
    value = x.amax(1, keepdim=True)
    raised = (value + offset).clamp_max(1.0)
    return (x * (raised / value)).where(value > 0, raised)


def _saturate(x: Tensor, change: tuple[float, float], draw: _Draw) -> Tensor:
    """S a + b in HSV; a gray pixel of an RGB image has hue 0, red, as in the published code."""
    if x.shape[1] == 1:
        return x.clone()
    factor, offset = change
    value = x.amax(1, keepdim=True)
    depth = value - x  # V S times a factor given by the hue
    saturation = depth.amax(1, keepdim=True) / value
    changed = (factor * saturation + offset).clamp(0.0, 1.0)
    red = value * changed * torch.tensor([0.0, 1.0, 1.0]).to(x).view(1, 3, 1, 1)
    deeper = (depth * (changed / saturation)).where(saturation > 0, red)
    return (value - deeper).where(value > 0, 0.0)


def _jpeg(x: Tensor, quality: float, draw: _Draw) -> Tensor:
    """JPEG compression of this quality."""
    Image = import_optional("PIL.Image")

    def compress(image: Tensor) -> Tensor:
        pixels = (255.0 * image).round().to(torch.uint8).movedim(0, -1).squeeze(-1).cpu().numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=int(quality))
        return torch.from_numpy(np.array(Image.open(file))).view(*image.shape[1:], -1).movedim(-1, 0)

    return torch.stack([compress(image) for image in x]).to(x) / 255.0


def _pixelate(x: Tensor, factor: float, draw: _Draw) -> Tensor:
    """Downsampling and upsampling with PIL's BOX filter."""
    for axis in (2, 3):
        size = x.shape[axis]
        small = max(1, int(size * factor))
        resize = (_box_filter(size, small) @ _box_filter(small, size)).to(x)  # (size, size)
        x = torch.tensordot(x, resize, ([axis], [0])).movedim(-1, axis)
    return x


def _box_filter(before: int, after: int) -> Tensor:
    """PIL's box filter as a matrix (before, after): means over the pixel centres in each box."""
    scale = before / after
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(before, dtype=torch.float64)[:, None] + 0.5 - centres) / max(scale, 1.0)
    inside = ((distance > -0.5) & (distance <= 0.5)).double()
    return inside / inside.sum(0)


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Rotate images counter-clockwise about their centre, bilinearly, with zeros outside.

    Args:
        images: Images (N, C, H, W) in [0, 1].
        degrees: One angle for all images, or one for each, (N,).

    Returns:
        Rotated images (N, C, H, W).

    Raises:
        ArgumentError: If the images are not in [0, 1], or the angles not finite or not one for each image.

    Example:
        >>> images = torch.arange(4.0).view(1, 1, 2, 2) / 3
        >>> bool(torch.allclose(rotate(images, 90), images.rot90(dims=(2, 3)), atol=1e-6))
        True
    """
    _check_images(images)
    angles = torch.as_tensor(degrees, dtype=torch.float64, device="cpu").detach().deg2rad().view(-1, 1, 1)
    if len(angles) not in (1, len(images)) or not bool(angles.isfinite().all()):
        raise ArgumentError("degrees", degrees, f"a finite number, or one for each of {len(images)} images")
    if len(images) == 0:
        return images.clone()
    height, width = images.shape[2:]
    rows = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    cos, sin = angles.cos(), angles.sin()
    # source of each pixel, in grid_sample's units of half an image
    grid = torch.stack([2 * (cos * x - sin * y) / width, 2 * (sin * x + cos * y) / height], -1)  # (1 or N, H, W, 2)
    grid = grid.to(images).expand(len(images), -1, -1, -1)
    return F.grid_sample(images, grid, "bilinear", "zeros", align_corners=False).clamp(0.0, 1.0)


def _rotation(x: Tensor, degrees: float, draw: _Draw) -> Tensor:
    return rotate(x, degrees)


@dataclass(frozen=True)
class Corruption:
    """Corruption of images (N, C, H, W) in [0, 1].

    Attributes:
        name: Name of the corruption, which also names its random numbers.
        levels: Parameter of each severity 1 ... len(levels).
        apply: Function of images, the parameter, and a function that draws random numbers.
    """

    name: str
    levels: tuple[Any, ...]
    apply: Callable[[Tensor, Any, _Draw], Tensor]

    def __call__(self, images: Tensor, severity: int, *, seed: int = 0, index: Any = None) -> Tensor:
        """Corrupt images.

        Args:
            images: Images (N, C, H, W) in [0, 1].
            severity: Severity, from 1 on.
            seed: Random seed.
            index: Row indices (N,) of the images in their data set; None for 0 ... N − 1.

        Returns:
            Corrupted images (N, C, H, W) in [0, 1].

        Raises:
            ArgumentError: If images are not in [0, 1], or the severity or the indices are not valid.

        Example:
            >>> images = torch.full((2, 1, 28, 28), 0.5)
            >>> noisy = CORRUPTIONS["gaussian_noise"](images, 3)
            >>> second = CORRUPTIONS["gaussian_noise"](images[1:], 3, index=torch.tensor([1]))
            >>> noisy.shape, bool((noisy[1:] == second).all())
            (torch.Size([2, 1, 28, 28]), True)
        """
        _check_images(images)
        if not 1 <= check_int("severity", severity) <= len(self.levels):
            raise ArgumentError("severity", severity, f"an integer from 1 to {len(self.levels)}")
        seed = check_int("seed", seed)  # one type, so that np.int64(0) gives the draws of 0
        rows = torch.arange(len(images)) if index is None else torch.as_tensor(index)
        if rows.shape != (len(images),) or (len(rows) and (rows.dtype == torch.bool or rows.is_floating_point())):
            raise ArgumentError("index", index, f"an integer row index for each of {len(images)} images")
        if len(images) == 0:
            return images.clone()

        def draw(sample: Callable[[torch.Generator, Tensor], Tensor]) -> Tensor:
            """Draw in double precision: the same noise on every device."""
            generators = [_named_generator(self.name, seed, row) for row in rows.tolist()]
            return torch.stack(list(map(sample, generators, images.cpu().double()))).to(images)

        return self.apply(images, self.levels[severity - 1], draw).clamp(0.0, 1.0)


def _named_generator(*name: str | int) -> torch.Generator:
    """Generator seeded by a hash of its name, the same on every machine."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _standard_normal(rng: torch.Generator, image: Tensor) -> Tensor:
    return torch.randn(image.shape, generator=rng, dtype=image.dtype)


def _check_images(images: Any) -> None:
    """Reject images whose range or channels would give wrong corruptions silently."""
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ArgumentError("images", got, "a tensor (N, C, H, W) with C = 1 or 3")
    if not images.is_floating_point() or not bool(((images >= 0) & (images <= 1)).all()):
        hint = "use images.float() / 255, and standardize images after corrupting them"
        raise ArgumentError("images", images.dtype, "floating-point values in [0, 1]", hint=hint)


CORRUPTIONS: dict[str, Corruption] = {
    corruption.name: corruption
    for corruption in (
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
    )
}  # of CIFAR-10-C

# rotation by 15 degrees per severity; means over corruptions are those of CIFAR-10-C, without it
ROTATION: dict[str, Corruption] = {"rotation": Corruption("rotation", tuple(range(15, 181, 15)), _rotation)}


@dataclass(frozen=True, eq=False)
class CorruptedDataset(Dataset[Any]):
    """Data set whose images are corrupted when they are read.

    Args:
        data: Data set of (x, y), x an image (C, H, W) in [0, 1] or standardized.
        corruption: The corruption.
        severity: Its severity, from 1 on.
        seed: Random seed.
        standardizer: Standardization of the data, which is undone before and repeated after the corruption.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> clean = TensorDataset(torch.rand(6, 3, 32, 32), torch.arange(6))
        >>> image, label = CorruptedDataset(clean, CORRUPTIONS["jpeg"], 5)[4]
        >>> image.shape, int(label)
        (torch.Size([3, 32, 32]), 4)
    """

    data: Dataset[Any]
    corruption: Corruption
    severity: int
    _: KW_ONLY
    seed: int = 0
    standardizer: Any = None

    def __len__(self) -> int:
        return len(cast(Sized, self.data))

    def __getitem__(self, row: int) -> tuple[Tensor, Any]:
        if not 0 <= row < len(self):  # ends a loop over the data set; −1 would have other draws than the last row
            raise IndexError(f"Row {row} is out of range for {len(self)} rows.")
        x, y = self.data[row]
        raw = x if self.standardizer is None else self.standardizer.inverse(x).clamp(0.0, 1.0)
        corrupted = self.corruption(raw[None], self.severity, seed=self.seed, index=torch.tensor([row]))[0]
        return corrupted if self.standardizer is None else self.standardizer(corrupted), y
