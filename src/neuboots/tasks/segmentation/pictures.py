"""Pictures of an image, its labels and its uncertainty, as bytes (H, W, 3), and sheets of them.

    overlay = ½ image + ½ colour of the label,   heat = ramp(value / largest)

Colours are fixed: a class has the same one in every picture. The first eight are those of Okabe and Ito, which
colour-blind readers can tell apart; further classes take tints and shades of them. The ramp rises in lightness from
violet over green to yellow, so that it can be read in grey too.

M. Okabe, K. Ito, Color universal design, 2008; S. van der Walt, N. Smith, viridis, 2015 (the ramp's anchors).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Picture = NDArray[np.uint8]  # (H, W, 3)

_BLACK = (0, 0, 0)
_COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
VOID = (255, 255, 255)
WRONG = (213, 94, 0)

_SMALL, _LARGE = 160, 480  # pixels of a panel's longer side on a sheet
_GAP, _LINE, _BAR = 8, 13, 8  # between panels; a line of text; a colour bar


class Normalisation(Protocol):
    """Whatever can give an image back as it was before it was normalised, in [0, 1]: (C, *) → (C, *)."""

    def inverse(self, x: Tensor, /) -> Tensor: ...


# -- one picture ---------------------------------------------------------------------------------------


def class_colours(num_classes: int) -> Picture:
    """A colour for each class: (C, 3). The first is black.

    >>> class_colours(3).tolist()
    [[0, 0, 0], [230, 159, 0], [86, 180, 233]]
    """
    colours = np.zeros((num_classes, 3), np.uint8)
    for c in range(1, num_classes):
        turn, which = divmod(c - 1, len(_COLOURS))
        towards = 255 if turn % 2 else 0  # first tints, then shades, each between two that were there before
        share = 0.8 * _halving((turn + 1) // 2)
        colours[c] = [round((1 - share) * value + share * towards) for value in _COLOURS[which]]
    return colours


def _halving(k: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, 5/8, …: the binary digits of k mirrored at the point."""
    return int(f"{k:b}"[::-1], 2) / 2 ** k.bit_length() if k else 0.0


def in_bytes(x: Tensor, normalisation: Normalisation | None) -> Tensor:
    """An image or volume (C, *) as 0 … 255: three channels are colours; of any other number the first is shown in grey.

    With a normalisation, its inverse gives values in [0, 1]; else the least value is black and the largest white:
    (3, *).
    """
    shown = x.detach().float().cpu() if normalisation is None else normalisation.inverse(x.detach()).float().cpu()
    shown = shown if len(shown) == 3 else shown[:1]
    if normalisation is None:
        low, high = shown.min(), shown.max()
        shown = (shown - low) / (high - low) if high > low else torch.zeros_like(shown)
    return shown.clamp(0, 1).mul(255).round().to(torch.uint8).expand(3, *shown.shape[1:])


def picture_of(levels: Tensor) -> Picture:
    """Bytes (3, H, W) as a picture."""
    picture: Picture = levels.movedim(0, -1).contiguous().numpy()
    return picture


def coloured(labels: Tensor, num_classes: int, *, void: int | None = None) -> Picture:
    """Labels (H, W) in the colours of their classes; void is white."""
    lost = np.zeros(labels.shape, bool) if void is None else labels.numpy() == void
    picture: Picture = class_colours(num_classes)[np.where(lost, 0, labels.numpy())]
    picture[lost] = VOID
    return picture


def overlaid(image: Picture, colours: Picture) -> Picture:
    """Half of each."""
    mixed: Picture = ((image.astype(np.uint16) + colours) // 2).astype(np.uint8)
    return mixed


def marked(image: Picture, where: Tensor) -> Picture:
    """The image with some pixels (H, W) in orange."""
    picture = image.copy()
    picture[where.numpy()] = WRONG
    return picture


def heat(values: Tensor, top: float) -> Picture:
    """Values (H, W) from 0 to `top` along the ramp.

    >>> heat(torch.tensor([[0.0, 1.0, 2.0]]), 2.0).tolist()
    [[[68, 1, 84], [33, 145, 140], [253, 231, 37]]]
    """
    share = np.clip(values.numpy() / top, 0, 1) if top > 0 else np.zeros(values.shape)
    anchors = np.linspace(0, 1, len(_RAMP))
    channels = [np.interp(share, anchors, [colour[c] for colour in _RAMP]) for c in range(3)]
    picture: Picture = np.rint(np.stack(channels, -1)).astype(np.uint8)
    return picture


# -- a sheet -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A picture with its title; a heat map also says how far its scale goes."""

    title: str
    picture: Picture
    scale: str = ""


def sheet(rows: Sequence[Sequence[Panel]], legend: Sequence[tuple[str, tuple[int, ...]]]) -> "Image":
    """Panels in rows, small ones enlarged by whole numbers, and a legend of (name, colour) below."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    shown = [[_scaled(panel.picture) for panel in row] for row in rows]
    least = max(int(font.getlength(text)) for row in rows for panel in row for text in (panel.title, panel.scale))
    width = max(least, *(image.width for row in shown for image in row)) + _GAP
    heights = [2 * _LINE + max(image.height for image in row) + _BAR + 2 * _GAP for row in shown]
    entries = _placed(legend, font, width * max(map(len, rows)))
    below = (entries[-1][1] + _LINE + _GAP) if entries else 0
    page = Image.new("RGB", (width * max(map(len, rows)) + _GAP, sum(heights) + below + _GAP), "white")
    draw, y = ImageDraw.Draw(page), _GAP
    for row, images, height in zip(rows, shown, heights, strict=True):
        for k, (panel, image) in enumerate(zip(row, images, strict=True)):
            x = _GAP + k * width
            draw.text((x, y), panel.title, fill="black", font=font)
            draw.text((x, y + _LINE), panel.scale, fill="black", font=font)
            page.paste(image, (x, y + 2 * _LINE))
            if panel.scale:
                ramp = heat(torch.linspace(0, 1, image.width).expand(_BAR, -1), 1.0)
                page.paste(Image.fromarray(ramp), (x, y + 2 * _LINE + image.height + 2))
        y += height
    for left, down, name, colour in entries:
        draw.rectangle((left, y + down, left + _LINE - 4, y + down + _LINE - 4), fill=colour, outline="grey")
        draw.text((left + _LINE, y + down - 1), name, fill="black", font=font)
    return page


def _scaled(picture: Picture) -> "Image":
    from PIL import Image

    image = Image.fromarray(picture)
    longer = max(image.size)
    if longer < _SMALL:
        factor = -(-_SMALL // longer)
        return image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    if longer > _LARGE:
        size = (max(1, image.width * _LARGE // longer), max(1, image.height * _LARGE // longer))
        return image.resize(size, Image.Resampling.BOX)
    return image


def _placed(
    legend: Sequence[tuple[str, tuple[int, ...]]], font: Any, width: int
) -> list[tuple[int, int, str, tuple[int, ...]]]:
    """Entries from left to right, in as many lines as it takes: (x, y, name, colour)."""
    found, x, y = [], _GAP, 0
    for name, colour in legend:
        plain = name.encode("latin-1", "replace").decode("latin-1")  # which every font has
        needed = _LINE + int(font.getlength(plain)) + 2 * _GAP
        if x > _GAP and x + needed > width:
            x, y = _GAP, y + _LINE + 2
        found.append((x, y, plain, colour))
        x += needed
    return found
