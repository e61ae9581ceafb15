"""Pixels of encoded images and masks.

    PNG, JPEG, … → (C, H, W) bytes of an image,  (H, W) class numbers of a mask

Both are turned as their EXIF tag says, which is how they look to whoever drew the mask. Given a size, both are made as
small as will cover it, keeping their proportions, and cropped at the centre, or stretched to it: images bilinearly,
masks by the nearest.

A mask is an image whose numbers are classes: grey, or with a palette whose entries are the classes, as PASCAL VOC's. A
mask in colours is read by the colour of each class, where a set has such, and refused otherwise: three channels are no
class, unless all three hold the same, as in a grey picture that was saved in colours.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots.data.sources import Corrupt, corrupt, need

Encoded = Any  # the bytes of a file, its path, or a row of an image column: {"bytes": …, "path": …}
Size = tuple[int, int]
_ORIENTATION = 0x0112  # EXIF's tag; 5 to 8 are turned by a quarter


def image_of(
    data: Encoded, channels: int, where: str | Path, *, size: Size | None = None, stretched: bool = False
) -> Tensor:
    """(C, H, W) bytes: grey if C = 1, colour if C = 3, without transparency, 16 bits rounded to 8. `where` it lies is
    said if it cannot be read.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (4, 2), (10, 20, 30)).save(file, "PNG")
    >>> image_of(file.getvalue(), 3, "a blue one")[:, 0, 0].tolist()
    [10, 20, 30]
    >>> image_of(file.getvalue()[:40], 3, "cifar10, split train, row 7")
    Traceback (most recent call last):
    neuboots.data.sources.Corrupt: cannot read cifar10, split train, row 7: it holds no whole image (...); expected ...
    """
    return _image(_opened(data, where), channels, where, size, stretched)


def _image(picture: Any, channels: int, where: str | Path, size: Size | None, stretched: bool = False) -> Tensor:
    mode = {1: "L", 3: "RGB"}[channels]
    try:
        picture = _in_bytes(picture, where)
        if picture.mode == "P" and "transparency" in picture.info:
            picture = picture.convert("RGBA")  # straight to RGB, PIL would warn
        picture = picture if picture.mode == mode else picture.convert(mode)
        pixels = torch.from_numpy(np.array(_fitted(picture, size, stretched, "BILINEAR")))  # (H, W) or (H, W, 3)
    except Corrupt:
        raise
    except Exception as fault:  # a conversion that PIL does not know
        raise corrupt(where, f"it cannot be made {mode} ({type(fault).__name__}: {fault})") from None
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def size_of(data: Encoded, where: str | Path) -> Size:
    """(H, W) of an image as it will be turned; of a file only the beginning is read.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2)).save(file, "PNG")
    >>> size_of(file.getvalue(), "a small one")
    (2, 4)
    """
    Image = need("PIL.Image")
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            width, height = picture.size
            turned = picture.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    except Exception as fault:  # each format has its own
        raise corrupt(where, f"it holds no image ({type(fault).__name__})") from None
    return (width, height) if turned else (height, width)


def mask_of(
    data: Encoded,
    where: str | Path,
    *,
    size: Size | None = None,
    stretched: bool = False,
    colours: Sequence[tuple[tuple[int, int, int], int]] = (),
) -> Tensor:
    """(H, W) class numbers; `colours` are pairs (colour, class) for a mask in colours."""
    return _mask(_opened(data, where), where, size, stretched, colours)


def pair_of(image: Path, mask: Path, channels: int, *, size: Size | None = None) -> tuple[Tensor, Tensor]:
    """(C, H, W) and (H, W) of two files, which must be of one size before they are fitted to another.

    >>> import tempfile
    >>> from PIL import Image
    >>> image, mask = (Path(tempfile.mkdtemp(), name) for name in ("image.png", "mask.png"))
    >>> Image.new("L", (4, 2)).save(image)
    >>> Image.new("L", (2, 4)).save(mask)
    >>> pair_of(image, mask, 1, size=(2, 2))
    Traceback (most recent call last):
    neuboots.data.sources.Corrupt: got .../mask.png of 4 × 2 for .../image.png of 2 × 4; expected one size: make the ...
    """
    picture, classes = _opened(image, image), _opened(mask, mask)
    if picture.size != classes.size:
        mask_size, image_size = (f"{height} × {width}" for width, height in (classes.size, picture.size))
        raise Corrupt(
            f"got {mask} of {mask_size} for {image} of {image_size}; expected one size: make the mask for the image as "
            "it is turned by its EXIF tag"
        )
    return _image(picture, channels, image, size), _mask(classes, mask, size)


def _mask(
    picture: Any,
    where: str | Path,
    size: Size | None,
    stretched: bool = False,
    colours: Sequence[tuple[tuple[int, int, int], int]] = (),
) -> Tensor:
    coloured = picture.mode in ("RGB", "RGBA") and bool(colours)
    if not coloured and picture.mode in ("LA", "RGB", "RGBA"):
        picture = _grey(picture)
    if not coloured and picture.mode not in ("1", "L", "P", "I") and not picture.mode.startswith("I;16"):
        raise Corrupt(
            f"got {where}, a mask in colours (PIL's mode {picture.mode}); expected the number of a class in each "
            "pixel: save it as a grey picture, or with a palette"
        )
    fitted = _fitted(picture, size, stretched, "NEAREST")
    if coloured:
        return _by_colour(np.array(fitted.convert("RGB")), colours, where)
    return torch.from_numpy(np.array(fitted).astype(np.int64))


def _opened(data: Encoded, where: str | Path) -> Any:
    """The whole picture; its first, if it has several."""
    Image, ImageOps = need("PIL.Image"), need("PIL.ImageOps")
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
        raise corrupt(where, "it is not there any more") from None
    except Exception as fault:  # each format has its own: OSError, SyntaxError, ValueError, struct.error, …
        what = "it is empty" if encoded == b"" else "it holds no whole image"
        raise corrupt(where, f"{what} ({type(fault).__name__})") from None


def _in_bytes(picture: Any, where: str | Path) -> Any:
    """Of 16 bits the upper 8, rounded: PIL itself would cut off at 255."""
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    numbers = np.array(picture)
    if picture.mode == "F" or numbers.min(initial=0) < 0 or numbers.max(initial=0) > 65535:
        raise Corrupt(
            f"got {where}, whose pixels are neither bytes nor of 16 bits (PIL's mode {picture.mode}); expected one of "
            "the two"
        )
    return need("PIL.Image").fromarray(((numbers.astype(np.int64) + 128) // 257).astype(np.uint8))


def _fitted(picture: Any, size: Size | None, stretched: bool, method: str) -> Any:
    if size is None or picture.size == size[::-1]:
        return picture
    resampling = getattr(need("PIL.Image").Resampling, method)
    if stretched:
        return picture.resize(size[::-1], resampling)
    return need("PIL.ImageOps").fit(picture, size[::-1], method=resampling)


def _grey(picture: Any) -> Any:
    """A picture in colours as the grey one that it is, or itself."""
    pixels = np.array(picture.convert("RGB"))
    return need("PIL.Image").fromarray(pixels[..., 0].copy()) if (pixels == pixels[..., :1]).all() else picture


def _by_colour(pixels: Any, colours: Sequence[tuple[tuple[int, int, int], int]], where: str | Path) -> Tensor:
    found = pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])  # (H, W)
    known = sorted(((r << 16) | (g << 8) | b, number) for (r, g, b), number in colours)
    codes, classes = (np.array(column) for column in zip(*known, strict=True))
    places = np.searchsorted(codes, found).clip(max=len(codes) - 1)
    if not (codes[places] == found).all():
        raise corrupt(where, "a mask with colours that stand for no class")
    return torch.from_numpy(classes[places])
