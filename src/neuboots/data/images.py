"""Decoding of image and mask files: PNG, JPEG, … → uint8 (C, H, W) of an image, class numbers (H, W) of a mask.

Images and masks are rotated by their EXIF tag. With a size, both are scaled to the smallest size that covers it and
cropped at the centre, or stretched to it: images bilinearly, masks by nearest neighbour.

A mask is a grayscale image, or one with a palette, whose values are class numbers. An RGB mask is decoded by the color
of each class, where a data set defines colors; otherwise it is an error, unless its three channels are equal.
"""

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots._validation import import_optional
from neuboots.data._common import CorruptFileError

EncodedImage = Any  # bytes of a file, its path, an opened PIL image, or a value of an image column: {"bytes", "path"}
ImageSize = tuple[int, int]
ColorMap = Callable[[Tensor, str | Path], Tensor]  # colors 0xRRGGBB (H, W) and the file, for errors → class numbers


def decode_image(
    data: EncodedImage, channels: int, where: str | Path, *, size: ImageSize | None = None, stretch: bool = False
) -> Tensor:
    """Decode an image without its transparency; 16-bit values are rounded to 8 bits.

    Args:
        data: Bytes or path of a file, an opened image, or a value of an image column.
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
    mode, picture = {1: "L", 3: "RGB"}[channels], _to_8_bits(open_image(data, where), where)
    try:
        if picture.mode == "P" and "transparency" in picture.info:
            picture = picture.convert("RGBA")  # PIL would warn about a conversion to RGB
        picture = picture if picture.mode == mode else picture.convert(mode)
        pixels = torch.from_numpy(np.array(_resize(picture, size, stretch, "BILINEAR")))  # (H, W) or (H, W, 3)
    except Exception as error:  # a conversion that PIL does not know
        raise CorruptFileError(where, f"cannot be converted to {mode} ({type(error).__name__}: {error})") from None
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def decode_mask(
    data: EncodedImage,
    where: str | Path,
    *,
    size: ImageSize | None = None,
    stretch: bool = False,
    color_map: ColorMap | None = None,
) -> Tensor:
    """Decode a mask.

    Args:
        data: Bytes or path of a file, an opened image, or a value of an image column.
        where: File or row, for error messages.
        size: Height and width to resize to, by nearest neighbour.
        stretch: Whether to stretch to the size rather than crop.
        color_map: Maps the colors of an RGB mask to class numbers.

    Returns:
        Class numbers (H, W), int64.

    Raises:
        CorruptFileError: If it cannot be decoded, or is an RGB image without a color map.
    """
    picture = _resize(open_image(data, where), size, stretch, "NEAREST")
    if picture.mode in ("LA", "RGB", "RGBA"):
        pixels = np.array(picture.convert("RGB")).astype(np.int64)
        if color_map is not None and picture.mode != "LA":
            return color_map(torch.from_numpy(pixels @ np.array([1 << 16, 1 << 8, 1])), where)
        if (pixels == pixels[..., :1]).all():  # a grayscale image saved as RGB
            return torch.from_numpy(pixels[..., 0].copy())
    if picture.mode not in ("1", "L", "P", "I") and not picture.mode.startswith("I;16"):
        hint = "Save it as a grayscale image, or with a palette, whose values are class numbers."
        raise CorruptFileError(where, f"a mask in colors (mode {picture.mode} of PIL)", hint)
    return torch.from_numpy(np.array(picture).astype(np.int64))


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
    width, height = open_image(data, where, load=False).size
    return height, width


def open_image(data: EncodedImage, where: str | Path, *, load: bool = True) -> Any:
    """Open a PIL image; the first one, if a file has several.

    Args:
        data: Bytes or path of a file, an opened image, or a value of an image column.
        where: File or row, for error messages.
        load: Whether to load the image completely, and not only its header.

    Returns:
        The image, rotated by its EXIF tag.

    Raises:
        CorruptFileError: If it cannot be decoded.
    """
    Image, ImageOps = import_optional("PIL.Image"), import_optional("PIL.ImageOps")
    if isinstance(data, Image.Image):
        return data
    try:
        if isinstance(data, dict):
            data = data["bytes"] if data["bytes"] is not None else data["path"]
        if not isinstance(data, bytes) and not stat.S_ISREG(os.stat(data).st_mode):
            raise CorruptFileError(where, "not a regular file", "Remove it.")  # a named pipe would block
        with io.BytesIO(data) if isinstance(data, bytes) else open(data, "rb") as file:
            if not file.read(1):
                raise CorruptFileError(where, "it is empty")
            file.seek(0)
            picture = Image.open(file)
            if load:
                picture.load()
            if picture.getexif():
                ImageOps.exif_transpose(picture, in_place=True)
        return picture
    except CorruptFileError:
        raise
    except FileNotFoundError:
        raise CorruptFileError(where, "the file no longer exists") from None
    except Exception as error:  # each format has its own: OSError, SyntaxError, ValueError, struct.error, …
        raise CorruptFileError(where, f"not a complete image ({type(error).__name__})") from None


def _to_8_bits(picture: Any, where: str | Path) -> Any:
    """Round 16-bit values to their upper 8 bits; PIL itself would clip them at 255."""
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    values = np.array(picture)
    if picture.mode == "F" or values.min(initial=0) < 0 or values.max(initial=0) > 65535:
        raise CorruptFileError(where, f"its pixels have neither 8 nor 16 bits (mode {picture.mode} of PIL)")
    return import_optional("PIL.Image").fromarray(((values.astype(np.int64) + 128) // 257).astype(np.uint8))


def _resize(picture: Any, size: ImageSize | None, stretch: bool, method: str) -> Any:
    if size is None or picture.size == size[::-1]:
        return picture
    resampling = getattr(import_optional("PIL.Image").Resampling, method)
    if stretch:
        return picture.resize(size[::-1], resampling)
    return import_optional("PIL.ImageOps").fit(picture, size[::-1], method=resampling)
