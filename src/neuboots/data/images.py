"""Decoding of image and mask files: PNG, JPEG, … → uint8 (C, H, W) of an image, class numbers (H, W) of a mask.

Images and masks are rotated by their EXIF tag. With a size, both are scaled to the smallest size that covers it and
cropped at the centre, or stretched to it: images bilinearly, masks by nearest neighbour.

A mask is a grayscale image, or one with a palette, whose values are class numbers. An RGB mask is decoded by the color
of each class, where a data set defines colors; otherwise it is an error, unless its three channels are equal.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots._validation import import_optional
from neuboots.data._common import CorruptFileError

EncodedImage = Any  # bytes of a file, its path, or a value of an image column: {"bytes": …, "path": …}
ImageSize = tuple[int, int]
Colors = Sequence[tuple[tuple[int, int, int], int]]
"""Pairs of a color and its class."""

_EXIF_ORIENTATION = 0x0112  # values 5 to 8 swap height and width


def decode_image(
    data: EncodedImage, channels: int, where: str | Path, *, size: ImageSize | None = None, stretch: bool = False
) -> Tensor:
    """Decode an image without its transparency; 16-bit values are rounded to 8 bits.

    Args:
        data: Bytes or path of a file, or a value of an image column.
        channels: 1 for grayscale, 3 for RGB.
        where: File or row, for error messages.
        size: Height and width to resize to.
        stretch: Whether to stretch to the size rather than crop.

    Returns:
        The image (C, H, W), uint8.

    Raises:
        CorruptFileError: If it cannot be decoded.

    Example:
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (4, 2), (10, 20, 30)).save(file, "PNG")
        >>> decode_image(file.getvalue(), 3, "a blue one")[:, 0, 0].tolist()
        [10, 20, 30]
    """
    return _to_image_tensor(_open_image(data, where), channels, where, size, stretch)


def decode_mask(
    data: EncodedImage, where: str | Path, *, size: ImageSize | None = None, stretch: bool = False, colors: Colors = ()
) -> Tensor:
    """Decode a mask.

    Args:
        data: Bytes or path of a file, or a value of an image column.
        where: File or row, for error messages.
        size: Height and width to resize to, by nearest neighbour.
        stretch: Whether to stretch to the size rather than crop.
        colors: Color of each class, for RGB masks.

    Returns:
        Class numbers (H, W), int64.

    Raises:
        CorruptFileError: If it cannot be decoded, or is an RGB image without `colors`.
    """
    return _to_mask_tensor(_open_image(data, where), where, size, stretch, colors)


def read_image_and_mask(
    image: Path, mask: Path, channels: int, *, size: ImageSize | None = None
) -> tuple[Tensor, Tensor]:
    """Decode an image and its mask, which must have the same size in their files.

    Args:
        image: File of the image.
        mask: File of the mask.
        channels: 1 for grayscale, 3 for RGB.
        size: Height and width to resize to.

    Returns:
        Image (C, H, W), uint8, and class numbers (H, W), int64.

    Raises:
        CorruptFileError: If one cannot be decoded, or sizes differ.
    """
    picture, classes = _open_image(image, image), _open_image(mask, mask)
    if picture.size != classes.size:
        mask_size, image_size = (f"{height} × {width}" for width, height in (classes.size, picture.size))
        hint = "Make the mask for the image as rotated by its EXIF tag."
        raise CorruptFileError(mask, f"it is {mask_size}, but {image} is {image_size} pixels", hint)
    return _to_image_tensor(picture, channels, image, size), _to_mask_tensor(classes, mask, size)


def read_image_size(data: EncodedImage, where: str | Path) -> ImageSize:
    """Read the size of an image from the header of its file, after rotation by its EXIF tag.

    Args:
        data: Bytes or path of a file.
        where: File or row, for error messages.

    Returns:
        Height and width.

    Raises:
        CorruptFileError: If it is not an image.

    Example:
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("L", (4, 2)).save(file, "PNG")
        >>> read_image_size(file.getvalue(), "a small one")
        (2, 4)
    """
    Image = import_optional("PIL.Image")
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            width, height = picture.size
            swap = picture.getexif().get(_EXIF_ORIENTATION) in (5, 6, 7, 8)
    except Exception as error:  # each format has its own
        raise CorruptFileError(where, f"not an image ({type(error).__name__})") from None
    return (width, height) if swap else (height, width)


def _open_image(data: EncodedImage, where: str | Path) -> Any:
    """Load a PIL image completely; the first one, if a file has several."""
    Image, ImageOps = import_optional("PIL.Image"), import_optional("PIL.ImageOps")
    encoded: bytes | None = None
    try:
        if isinstance(data, dict):
            data = data["bytes"] if data["bytes"] is not None else data["path"]
        encoded = data if isinstance(data, bytes) else Path(data).read_bytes()
        picture = Image.open(io.BytesIO(encoded))
        picture.load()
        if picture.getexif():
            ImageOps.exif_transpose(picture, in_place=True)
        return picture
    except FileNotFoundError:
        raise CorruptFileError(where, "the file no longer exists") from None
    except Exception as error:  # each format has its own: OSError, SyntaxError, ValueError, struct.error, …
        reason = "it is empty" if encoded == b"" else f"not a complete image ({type(error).__name__})"
        raise CorruptFileError(where, reason) from None


def _to_image_tensor(
    picture: Any, channels: int, where: str | Path, size: ImageSize | None, stretch: bool = False
) -> Tensor:
    mode, picture = {1: "L", 3: "RGB"}[channels], _to_8_bits(picture, where)
    try:
        if picture.mode == "P" and "transparency" in picture.info:
            picture = picture.convert("RGBA")  # PIL would warn about a conversion to RGB
        picture = picture if picture.mode == mode else picture.convert(mode)
        pixels = torch.from_numpy(np.array(_resize(picture, size, stretch, "BILINEAR")))  # (H, W) or (H, W, 3)
    except Exception as error:  # a conversion that PIL does not know
        raise CorruptFileError(where, f"cannot be converted to {mode} ({type(error).__name__}: {error})") from None
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def _to_8_bits(picture: Any, where: str | Path) -> Any:
    """Round 16-bit values to their upper 8 bits; PIL itself would clip them at 255."""
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    values = np.array(picture)
    if picture.mode == "F" or values.min(initial=0) < 0 or values.max(initial=0) > 65535:
        raise CorruptFileError(where, f"its pixels have neither 8 nor 16 bits (mode {picture.mode} of PIL)")
    return import_optional("PIL.Image").fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8))


def _to_mask_tensor(
    picture: Any, where: str | Path, size: ImageSize | None, stretch: bool = False, colors: Colors = ()
) -> Tensor:
    if picture.mode in ("RGB", "RGBA") and colors:
        pixels = np.array(_resize(picture, size, stretch, "NEAREST").convert("RGB"))
        return _map_colors(pixels, colors, where)
    if picture.mode in ("LA", "RGB", "RGBA"):
        pixels = np.array(picture.convert("RGB"))
        if (pixels == pixels[..., :1]).all():  # a grayscale image saved as RGB
            picture = import_optional("PIL.Image").fromarray(pixels[..., 0].copy())
    if picture.mode not in ("1", "L", "P", "I") and not picture.mode.startswith("I;16"):
        hint = "Save it as a grayscale image, or with a palette, whose values are class numbers."
        raise CorruptFileError(where, f"a mask in colors (mode {picture.mode} of PIL)", hint)
    return torch.from_numpy(np.array(_resize(picture, size, stretch, "NEAREST")).astype(np.int64))


def _map_colors(pixels: Any, colors: Colors, where: str | Path) -> Tensor:
    found = pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])  # (H, W)
    known = sorted(((r << 16) | (g << 8) | b, number) for (r, g, b), number in colors)
    codes, classes = (np.array(column) for column in zip(*known, strict=True))
    index = np.searchsorted(codes, found).clip(max=len(codes) - 1)
    if not (codes[index] == found).all():
        raise CorruptFileError(where, "a mask with a color that is not that of a class")
    return torch.from_numpy(classes[index])


def _resize(picture: Any, size: ImageSize | None, stretch: bool, method: str) -> Any:
    if size is None or picture.size == size[::-1]:
        return picture
    resampling = getattr(import_optional("PIL.Image").Resampling, method)
    if stretch:
        return picture.resize(size[::-1], resampling)
    return import_optional("PIL.ImageOps").fit(picture, size[::-1], method=resampling)
