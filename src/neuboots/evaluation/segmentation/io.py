"""Pictures of an image, its labels and its uncertainty, as bytes (H, W, 3), and sheets of them.

    overlay = ½ image + ½ colour of the label,   heat = ramp(value / largest)

Colours are fixed: a class has the same one in every picture. The first eight are those of Okabe and Ito, which
colour-blind readers can tell apart; further classes take tints and shades of them. The ramp rises in lightness from
violet over green to yellow, so that it can be read in grey too.

M. Okabe, K. Ito, Color universal design, 2008; S. van der Walt, N. Smith, viridis, 2015 (the ramp's anchors).

Label and uncertainty maps as files: PNG pictures of images, NIfTI volumes in the input's own space.

    (x, y, z, 1)ᵀ = A (i, j, k, 1)ᵀ,   A the affine of the input: voxel (i, j, k) of a map lies where the input's does

Every file is written aside and then renamed, so that nobody sees half of one.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuboots.evaluation._batching import align_labels
from neuboots.evaluation.segmentation.predict import SegmentationMaps, check_images

if TYPE_CHECKING:
    from PIL.Image import Image

ImageArray = NDArray[np.uint8]  # (H, W, 3)

_BLACK = (0, 0, 0)
_COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
IGNORE_COLOR = (255, 255, 255)
ERROR_COLOR = (213, 94, 0)

_SMALL, _LARGE = 160, 480  # pixels of a panel's longer side on a sheet
_GAP, _LINE, _BAR = 8, 13, 8  # between panels; a line of text; a colour bar


class InvertibleTransform(Protocol):
    """Whatever can give an image back as it was before it was normalised, in [0, 1]: (C, *) → (C, *)."""

    def inverse(self, x: Tensor, /) -> Tensor: ...


# -- one picture ---------------------------------------------------------------------------------------


def class_colors(num_classes: int) -> ImageArray:
    """A colour for each class: (C, 3). The first is black.

    >>> class_colors(3).tolist()
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


def to_uint8(x: Tensor, normalisation: InvertibleTransform | None) -> Tensor:
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


def to_image_array(levels: Tensor) -> ImageArray:
    """Bytes (3, H, W) as a picture."""
    picture: ImageArray = levels.movedim(0, -1).contiguous().numpy()
    return picture


def colorize_labels(labels: Tensor, num_classes: int, *, ignore_index: int | None = None) -> ImageArray:
    """Labels (H, W) in the colours of their classes; void is white."""
    lost = np.zeros(labels.shape, bool) if ignore_index is None else labels.numpy() == ignore_index
    picture: ImageArray = class_colors(num_classes)[np.where(lost, 0, labels.numpy())]
    picture[lost] = IGNORE_COLOR
    return picture


def overlay(image: ImageArray, colours: ImageArray) -> ImageArray:
    """Half of each."""
    mixed: ImageArray = ((image.astype(np.uint16) + colours) // 2).astype(np.uint8)
    return mixed


def mark_pixels(image: ImageArray, where: Tensor) -> ImageArray:
    """The image with some pixels (H, W) in orange."""
    picture = image.copy()
    picture[where.numpy()] = ERROR_COLOR
    return picture


def colorize_values(values: Tensor, top: float) -> ImageArray:
    """Values (H, W) from 0 to `top` along the ramp.

    >>> colorize_values(torch.tensor([[0.0, 1.0, 2.0]]), 2.0).tolist()
    [[[68, 1, 84], [33, 145, 140], [253, 231, 37]]]
    """
    share = np.clip(values.numpy() / top, 0, 1) if top > 0 else np.zeros(values.shape)
    anchors = np.linspace(0, 1, len(_RAMP))
    channels = [np.interp(share, anchors, [colour[c] for colour in _RAMP]) for c in range(3)]
    picture: ImageArray = np.rint(np.stack(channels, -1)).astype(np.uint8)
    return picture


# -- a sheet -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A picture with its title; a heat map also says how far its scale goes."""

    title: str
    picture: ImageArray
    scale: str = ""


def make_sheet(rows: Sequence[Sequence[Panel]], legend: Sequence[tuple[str, tuple[int, ...]]]) -> "Image":
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
                ramp = colorize_values(torch.linspace(0, 1, image.width).expand(_BAR, -1), 1.0)
                page.paste(Image.fromarray(ramp), (x, y + 2 * _LINE + image.height + 2))
        y += height
    for left, down, name, colour in entries:
        draw.rectangle((left, y + down, left + _LINE - 4, y + down + _LINE - 4), fill=colour, outline="grey")
        draw.text((left + _LINE, y + down - 1), name, fill="black", font=font)
    return page


def _scaled(picture: ImageArray) -> "Image":
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


_UNITS = {"entropy": "nats", "mutual_information": "nats", "std": "of the outputs"}
_NAME = re.compile(r'\w(?:[^/\\:*?"<>|]*[^/\\:*?"<>|. ])?')  # that every file system takes
_LONGEST = 150  # bytes of a name, which file systems count


def write_maps(
    maps: SegmentationMaps,
    x: Tensor,
    folder: str | Path,
    *,
    names: Sequence[str] | None = None,
    labels: Tensor | None = None,
    ignore_index: int | None = 255,
    class_names: Sequence[str] | None = None,
    normalization: InvertibleTransform | None = None,
    affine: Any = None,
    probs: bool = False,
) -> tuple[Path, ...]:
    """The maps of images or volumes x (N, C, *) as files of a folder; their paths, image after image.

    Of an image: the image, its labels (a palette PNG whose pixels are the class numbers), both overlaid, each
    uncertainty as a heat map, the wrong pixels if the true `labels` (N, *) are given, and a sheet of all. Heat maps go
    from 0 to the largest value of the call; the sheet says how far, and so does the text "scale" of each PNG.
    Of a volume: labels and uncertainties as .nii.gz with the affine (4, 4), or one for each (N, 4, 4), of the volumes
    they were read from (the identity if there is none), `probs` with the classes on the last axis if asked for, and a
    sheet of the middle slices across each axis.

    `names` are those of the files, `classes` those of the legend. `normalisation.inverse` gives images back in [0, 1];
    without it, each is stretched from its least value to its largest.

    >>> import tempfile, torch
    >>> from neuboots import DeterministicPredictor
    >>> from neuboots.evaluation.segmentation import segment
    >>> x = torch.rand(1, 3, 12, 16)
    >>> maps = segment(DeterministicPredictor(torch.nn.Conv2d(3, 2, 1)), x, 2)
    >>> paths = write_maps(maps, x, tempfile.mkdtemp(), names=["street"])
    >>> [path.name for path in paths][:4]
    ['street-image.png', 'street-labels.png', 'street-overlay.png', 'street-entropy.png']
    """
    if not isinstance(maps, SegmentationMaps):
        raise ValueError(f"got maps of type {type(maps).__name__}; expected what segment(predictor, x) gives")
    check_images(x)
    if (len(x), *x.shape[2:]) != tuple(maps.entropy.shape):
        raise ValueError(
            f"got x of shape {tuple(x.shape)} and maps of {tuple(maps.entropy.shape)}; expected the images that the "
            "maps are of"
        )
    if normalization is not None and not callable(getattr(normalization, "inverse", None)):
        raise ValueError(
            f"got normalisation of type {type(normalization).__name__}; expected one with a method inverse(x): leave "
            "it out to stretch each image from its least value to its largest"
        )
    if class_names is not None and len(class_names) != maps.num_classes:
        raise ValueError(f"got {len(class_names)} names of classes; expected {maps.num_classes}, one for each")
    volumes = len(maps.size) == 3
    if not volumes and (affine is not None or probs):
        raise ValueError("got an affine or probs=True for images; expected volumes (N, C, D, H, W): leave them out")
    truth = None if labels is None else align_labels(maps.probs, labels, ignore_index=ignore_index)
    called = _names(names, len(x))
    affines = _affines(affine, len(x)) if volumes else None
    where = _folder(folder)
    artist = _Artist(maps, x, truth, ignore_index, class_names, normalization)
    paths: list[Path] = []
    for i, name in enumerate(called):
        if affines is None:
            paths += _write_image(where, name, artist, i)
        else:
            paths += _write_volume(where, name, artist, i, affines[i], probs)
    return tuple(paths)


# -- panels --------------------------------------------------------------------------------------------


class _Artist:
    """Pictures of a slice of image i: one scale for all images, one colour for each class."""

    def __init__(
        self,
        maps: SegmentationMaps,
        x: Tensor,
        truth: Tensor | None,
        ignore_index: int | None,
        classes: Sequence[str] | None,
        normalisation: InvertibleTransform | None,
    ) -> None:
        self.maps, self.x, self.truth, self.ignore_index, self.standardizer = (
            maps,
            x,
            truth,
            ignore_index,
            normalisation,
        )
        self.labels = maps.labels
        self.tops = {name: float(getattr(maps, name).max()) for name in _UNITS}
        self.names = [str(c) for c in range(maps.num_classes)] if classes is None else [str(name) for name in classes]

    def scale(self, name: str) -> str:
        return f"0 to {self.tops[name]:.3g} {_UNITS[name]}"

    def image(self, i: int) -> Tensor:
        """Image i as bytes: (3, *)."""
        return to_uint8(self.x[i], self.standardizer)

    def panels(self, i: int, levels: Tensor, place: tuple[Any, ...] = ()) -> dict[str, Panel]:
        """The pictures of image i, or of a slice of it, by the end of their files' names."""
        at = (i, *place)
        image = to_image_array(levels[(slice(None), *place)])
        guessed = colorize_labels(self.labels[at], self.maps.num_classes)
        found = {"image": Panel("image", image)}
        if self.truth is not None:
            found["truth"] = Panel(
                "truth", colorize_labels(self.truth[at], self.maps.num_classes, ignore_index=self.ignore_index)
            )
        found["prediction"] = Panel("prediction", guessed)
        found["overlay"] = Panel("overlay", overlay(image, guessed))
        if self.truth is not None:
            wrong = (self.truth[at] != self.labels[at]) & (self.truth[at] != self.ignore_index)
            found["errors"] = Panel("wrong pixels", mark_pixels(image, wrong))
        for name, top in self.tops.items():
            picture = colorize_values(getattr(self.maps, name)[at], top)
            found[name.replace("_", "-")] = Panel(name.replace("_", " "), picture, self.scale(name))
        return found

    def legend(self, i: int) -> list[tuple[str, tuple[int, ...]]]:
        """The classes that occur in image i."""
        colours, there = class_colors(self.maps.num_classes), set(np.unique(self.labels[i]).tolist())
        if self.truth is not None:
            there |= set(np.unique(self.truth[i]).tolist())
        entries = [(self.names[c], tuple(colours[c].tolist())) for c in range(len(colours)) if c in there]
        return [*entries, ("void", IGNORE_COLOR)] if self.truth is not None and self.ignore_index in there else entries


# -- images --------------------------------------------------------------------------------------------


def _write_image(folder: Path, name: str, artist: _Artist, i: int) -> list[Path]:
    image, PngInfo = _pillow()
    panels = artist.panels(i, artist.image(i))
    paths = []

    def write(part: str, picture: Any, scale: str = "") -> None:
        info = PngInfo()
        if scale:
            info.add_text("scale", scale)
        path = folder / f"{name}-{part}.png"
        _aside(path, lambda file: picture.save(file, format="PNG", pnginfo=info))
        paths.append(path)

    write("image", image.fromarray(panels["image"].picture))
    write("labels", _palette(image, artist.labels[i], artist.maps.num_classes))
    for part in ("overlay", "entropy", "mutual-information", "std", "errors"):
        if part in panels:
            write(part, image.fromarray(panels[part].picture), panels[part].scale)
    shown, half = list(panels.values()), -(-len(panels) // 2)
    write("sheet", make_sheet([shown[:half], shown[half:]], artist.legend(i)))
    return paths


def _palette(image: Any, labels: Tensor, num_classes: int) -> Any:
    """A PNG whose pixels are the labels, shown in colours; with more than 256 classes, in 16 bits and without."""
    if num_classes > 256:
        return image.fromarray(labels.numpy().astype(np.uint16))
    picture = image.fromarray(labels.numpy().astype(np.uint8))
    picture.putpalette(class_colors(num_classes).flatten().tolist())
    return picture


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, PngImagePlugin
    except ImportError:
        raise ImportError("pictures need Pillow: pip install 'neuboots[data]'") from None
    return Image, PngImagePlugin.PngInfo


# -- volumes -------------------------------------------------------------------------------------------


def _write_volume(
    folder: Path, name: str, artist: _Artist, i: int, affine: NDArray[np.float64], probs: bool
) -> list[Path]:
    maps, paths = artist.maps, []

    def write(part: str, values: NDArray[Any], about: str) -> None:
        path = folder / f"{name}-{part}.nii.gz"
        _write_nifti(path, values, affine, about)
        paths.append(path)

    kind = np.uint8 if maps.num_classes <= 256 else np.int16 if maps.num_classes <= 1 << 15 else np.int32
    write("labels", artist.labels[i].numpy().astype(kind), f"labels of {maps.num_classes} classes")
    for measure, unit in _UNITS.items():
        write(measure.replace("_", "-"), getattr(maps, measure)[i].numpy(), f"{measure.replace('_', ' ')}, {unit}")
    if probs:
        write("probs", maps.probs[i].movedim(0, -1).numpy(), "probabilities of the classes")
    _pillow()
    rows, levels = [], artist.image(i)
    for axis, length in enumerate(maps.size):
        place = tuple(length // 2 if k == axis else slice(None) for k in range(3))
        first, *others = artist.panels(i, levels, place).values()
        rows.append([Panel(f"slice {length // 2} across axis {axis}", first.picture), *others])
    path = folder / f"{name}-sheet.png"
    page = make_sheet(rows, artist.legend(i))
    _aside(path, lambda file: page.save(file, format="PNG"))
    return [*paths, path]


def _write_nifti(path: Path, values: NDArray[Any], affine: NDArray[np.float64], about: str) -> None:
    try:
        import nibabel
    except ImportError:
        raise ImportError("volumes need nibabel: pip install 'neuboots[data]'") from None
    volume = nibabel.Nifti1Image(values, affine)  # type: ignore[no-untyped-call]
    volume.header.set_xyzt_units("mm")  # type: ignore[no-untyped-call]
    volume.header["descrip"] = about.encode()[:79]
    _aside(path, lambda file: volume.to_filename(file))


def _affines(affine: Any, num: int) -> NDArray[np.float64]:
    """One (4, 4) for each volume, or a sentence."""
    if affine is None:
        return np.broadcast_to(np.eye(4), (num, 4, 4))
    one = getattr(affine, "ndim", 0) == 2
    try:
        found = np.asarray(affine if one else [np.asarray(each) for each in affine], np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.shape not in ((4, 4), (num, 4, 4)):
        raise ValueError(
            f"got an affine of shape {found.shape}; expected (4, 4), or ({num}, 4, 4), one for each volume"
        )
    found = np.broadcast_to(found, (num, 4, 4))
    last_row = (found[:, 3] == [0, 0, 0, 1]).all()
    if not np.isfinite(found).all() or not last_row or (np.linalg.det(found[:, :3, :3]) == 0).any():
        raise ValueError(
            "got an affine that maps no volume into space; expected finite numbers that can be inverted, with the last "
            "row 0 0 0 1, as nibabel.load(file).affine gives it"
        )
    return found


# -- files ---------------------------------------------------------------------------------------------


def _names(names: Sequence[str] | None, num: int) -> list[str]:
    """The beginnings of file names: plain words that cannot lead out of the folder, or a sentence."""
    if names is None:
        return [f"image-{i:04d}" for i in range(num)]
    found = [names] if isinstance(names, str) else list(names)
    if len(found) != num:
        raise ValueError(f"got {len(found)} names for {num} images; expected one for each")
    for name in found:
        plain = isinstance(name, str) and name.isprintable() and _NAME.fullmatch(name)
        if not plain or len(name.encode()) > _LONGEST:
            raise ValueError(
                f"got the name {name!r}; expected the beginning of a file's name: a letter or digit first, no dot or "
                f'space last, none of / \\ : * ? " < > |, and at most {_LONGEST} bytes'
            )
    if len({unicodedata.normalize("NFC", name).casefold() for name in found}) < num:
        raise ValueError("got names that occur twice (letters' case does not count); expected another for each image")
    return found


def _folder(folder: str | Path) -> Path:
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"got folder={str(folder)!r}, which is a file; expected a folder, or a name for a new one")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ValueError(f"cannot make the folder {path} ({fault.strerror}); expected one to write to") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"cannot write to the folder {path}; expected one that is not read-only")
    return path


def _aside(path: Path, write: Callable[[Path], Any]) -> None:
    """Written beside, under a name that ends alike, and renamed when it is whole."""
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(aside)
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
