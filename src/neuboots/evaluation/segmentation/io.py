"""Files of label and uncertainty maps: PNG pictures of images, NIfTI volumes in the space of the input.

    overlay = ½ image + ½ color of the label,   heat map = ramp(value / largest),
    (x, y, z, 1)ᵀ = A (i, j, k, 1)ᵀ,   A the affine of the input volume, which its maps share

A class has the same color in every picture. The first eight are those of Okabe and Ito, which color-blind readers can
distinguish; further classes have tints and shades of them. The ramp increases in lightness.

M. Okabe, K. Ito, Color universal design, 2008; S. van der Walt, N. Smith, viridis, 2015 (the ramp's anchors).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuboots._validation import ArgumentError, escape_text
from neuboots.evaluation._batching import align_labels
from neuboots.evaluation.segmentation.predict import SegmentationMaps, check_images
from neuboots.serialization import atomic_file

if TYPE_CHECKING:
    from PIL.Image import Image

ImageArray = NDArray[np.uint8]  # (H, W, 3)

_COLORS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_IGNORE_COLOR = (255, 255, 255)
_ERROR_COLOR = (213, 94, 0)
_UNITS = {"entropy": "nats", "mutual_information": "nats", "std": "of the outputs"}
_SIDE = 320  # pixels of a panel's longer side on a sheet
_GAP, _LINE, _BAR = 8, 13, 8  # between panels; a line of text; a color bar


class InvertibleTransform(Protocol):
    """Normalization that can be inverted."""

    def inverse(self, x: Tensor, /) -> Tensor:
        """Return the image before normalization, in [0, 1]: (C, *) → (C, *)."""


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
    """Write the maps of images or volumes to files.

    For an image: the image, its labels (a palette PNG whose pixels are the class numbers), both overlaid, each
    uncertainty as a heat map, the wrong pixels if labels are given, and a sheet of all. Heat maps have one scale for
    all images of the call, which the PNG text "scale" states. For a volume: labels and uncertainties as .nii.gz, and a
    sheet of the middle slices.

    Args:
        maps: Maps of the images.
        x: The images (N, C, H, W) or volumes (N, C, D, H, W).
        folder: Folder, which is created if it does not exist.
        names: Prefixes of the file names, one for each image.
        labels: True labels: (N, *).
        ignore_index: Label of pixels that do not count; None: all count.
        class_names: Class names for the legend.
        normalization: Its `inverse` gives images in [0, 1]; by default each image is scaled to its range.
        affine: Affine of the volumes (4, 4), or one for each (N, 4, 4); the identity by default.
        probs: Whether to write class probabilities of volumes too, the classes on the last axis.

    Returns:
        The paths, image after image.

    Raises:
        ArgumentError: If x, labels, names or affine do not match the maps.

    Example:
        >>> import tempfile
        >>> from neuboots.evaluation.segmentation import predict_segmentation
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> x = torch.rand(1, 3, 12, 16)
        >>> maps = predict_segmentation(DeterministicPredictor(torch.nn.Conv2d(3, 2, 1)), x, 2)
        >>> paths = write_maps(maps, x, tempfile.mkdtemp(), names=["street"])
        >>> [path.name for path in paths][:4]
        ['street-image.png', 'street-labels.png', 'street-overlay.png', 'street-entropy.png']
    """
    check_images(x)
    if (len(x), *x.shape[2:]) != tuple(maps.entropy.shape):
        raise ArgumentError("x", tuple(x.shape), f"the images of the maps {tuple(maps.entropy.shape)}")
    if class_names is not None and len(class_names) != maps.num_classes:
        raise ArgumentError("class_names", len(class_names), f"{maps.num_classes} names, one for each class")
    is_volume = len(maps.size) == 3
    if not is_volume and (affine is not None or probs):
        raise ArgumentError("affine", "images", "volumes (N, C, D, H, W) for affine or probs=True")
    truth = None if labels is None else align_labels(maps.probs, labels, ignore_index=ignore_index)
    prefixes = _check_names(names, len(x))
    affines = np.broadcast_to(np.eye(4) if affine is None else np.asarray(affine, np.float64), (len(x), 4, 4))
    if not np.isfinite(affines).all() or (np.linalg.det(affines[:, :3, :3]) == 0).any():
        raise ArgumentError("affine", affine, "an invertible matrix, such as nibabel.load(file).affine")
    scales = {name: float(getattr(maps, name).max()) for name in _UNITS}
    paths: list[Path] = []
    for i, name in enumerate(prefixes):
        image = _Example(maps, i, to_uint8(x[i], normalization), None if truth is None else truth[i], scales)
        prefix, legend = Path(folder) / name, image.legend(class_names, ignore_index)
        if is_volume:
            paths += _write_volumes(prefix, image, affines[i], probs)
            rows = [
                image.panels(ignore_index, (*[slice(None)] * axis, n // 2), f"slice {n // 2} across axis {axis}")
                for axis, n in enumerate(maps.size)
            ]
        else:
            panels = image.panels(ignore_index)
            paths += _write_pictures(prefix, image, panels)
            half = -(-len(panels) // 2)
            rows = [panels[:half], panels[half:]]
        paths.append(prefix.with_name(f"{name}-sheet.png"))
        with atomic_file(paths[-1]) as file:
            _make_sheet(rows, legend).save(file, format="PNG")
    return tuple(paths)


def _check_names(names: Sequence[str] | None, count: int) -> list[str]:
    """File name prefixes that stay in the folder and differ on every file system."""
    if names is None:
        return [f"image-{i:04d}" for i in range(count)]
    prefixes = [names] if isinstance(names, str) else list(names)
    if len(prefixes) != count or len({prefix.casefold() for prefix in prefixes}) < count:
        raise ArgumentError("names", names, f"{count} different names, one for each image")
    for prefix in prefixes:
        if not prefix.isprintable() or prefix[:1] in ("", ".") or any(c in prefix for c in '/\\:*?"<>|'):
            raise ArgumentError("names", prefix, 'the beginning of a file name, without / \\ : * ? " < > |')
    return prefixes


def _write_pictures(prefix: Path, image: "_Example", panels: "Sequence[_Panel]") -> list[Path]:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    num_classes, paths = image.maps.num_classes, []
    for panel in panels:
        picture, info = Image.fromarray(panel.picture), PngInfo()
        if panel.scale:
            info.add_text("scale", panel.scale)
        if panel.part == "labels":  # the pixels are the class numbers
            picture = Image.fromarray(image.labels.numpy().astype(np.uint8 if num_classes <= 256 else np.uint16))
            if num_classes <= 256:
                picture.putpalette(class_colors(num_classes).flatten().tolist())
        if panel.part != "truth":
            paths.append(prefix.with_name(f"{prefix.name}-{panel.part}.png"))
            with atomic_file(paths[-1]) as file:
                picture.save(file, format="PNG", pnginfo=info)
    return paths


def _write_volumes(prefix: Path, image: "_Example", affine: NDArray[np.float64], probs: bool) -> list[Path]:
    import nibabel

    maps, i = image.maps, image.i
    dtype = np.uint8 if maps.num_classes <= 256 else np.int16 if maps.num_classes <= 1 << 15 else np.int32
    volumes = {"labels": (image.labels.numpy().astype(dtype), f"labels of {maps.num_classes} classes")}
    for name, unit in _UNITS.items():
        volumes[name.replace("_", "-")] = (getattr(maps, name)[i].numpy(), f"{name.replace('_', ' ')}, {unit}")
    if probs:
        volumes["probs"] = (maps.probs[i].movedim(0, -1).numpy(), "class probabilities")
    paths = []
    for part, (values, description) in volumes.items():
        volume = nibabel.Nifti1Image(values, affine)  # type: ignore[no-untyped-call]
        volume.header.set_xyzt_units("mm")  # type: ignore[no-untyped-call]
        volume.header["descrip"] = description.encode()[:79]
        paths.append(prefix.with_name(f"{prefix.name}-{part}.nii.gz"))
        with atomic_file(paths[-1]) as file:
            volume.to_filename(file)
    return paths


# -- pictures ------------------------------------------------------------------------------------------


def class_colors(num_classes: int) -> ImageArray:
    """Return a color for each class; the first is black.

    Args:
        num_classes: Number of classes C.

    Returns:
        Colors: (C, 3).

    Example:
        >>> class_colors(3).tolist()
        [[0, 0, 0], [230, 159, 0], [86, 180, 233]]
    """
    colors = np.zeros((num_classes, 3), np.uint8)
    for c in range(1, num_classes):
        turn, which = divmod(c - 1, len(_COLORS))
        target = 255 if turn % 2 else 0  # first tints, then shades, each between two earlier ones
        k = (turn + 1) // 2
        weight = 0.8 * int(f"{k:b}"[::-1], 2) / 2 ** k.bit_length()  # 0, 1/2, 1/4, 3/4, 1/8, …: mirrored digits
        colors[c] = [round((1 - weight) * value + weight * target) for value in _COLORS[which]]
    return colors


def to_uint8(x: Tensor, normalization: InvertibleTransform | None) -> Tensor:
    """Convert an image or volume to values 0 … 255; of other than three channels the first is shown in gray.

    Args:
        x: (C, *).
        normalization: Its `inverse` gives values in [0, 1]; by default the image is scaled to its range.

    Returns:
        The image: (3, *).
    """
    image = x.detach().float().cpu() if normalization is None else normalization.inverse(x.detach()).float().cpu()
    image = image if len(image) == 3 else image[:1]
    if normalization is None:
        low, high = image.min(), image.max()
        image = (image - low) / (high - low) if high > low else torch.zeros_like(image)
    return image.clamp(0, 1).mul(255).round().to(torch.uint8).expand(3, *image.shape[1:])


def colorize_labels(labels: Tensor, num_classes: int, *, ignore_index: int | None = None) -> ImageArray:
    """Return a picture of labels in the colors of their classes; ignored pixels are white.

    Args:
        labels: (H, W).
        num_classes: Number of classes.
        ignore_index: Label of ignored pixels.

    Returns:
        The picture: (H, W, 3).
    """
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels.numpy() == ignore_index
    picture: ImageArray = class_colors(num_classes)[np.where(ignored, 0, labels.numpy())]
    picture[ignored] = _IGNORE_COLOR
    return picture


def colorize_values(values: Tensor, largest: float) -> ImageArray:
    """Return a heat map of values from 0 to `largest`.

    Args:
        values: (H, W).
        largest: Value of the last color.

    Returns:
        The picture: (H, W, 3).

    Example:
        >>> colorize_values(torch.tensor([[0.0, 1.0, 2.0]]), 2.0).tolist()
        [[[68, 1, 84], [33, 145, 140], [253, 231, 37]]]
    """
    fraction = np.clip(values.numpy() / largest, 0, 1) if largest > 0 else np.zeros(values.shape)
    anchors = np.linspace(0, 1, len(_RAMP))
    channels = [np.interp(fraction, anchors, [color[c] for color in _RAMP]) for c in range(3)]
    picture: ImageArray = np.rint(np.stack(channels, -1)).astype(np.uint8)
    return picture


@dataclass(frozen=True, eq=False)
class _Panel:
    """Picture with its title and the end of its file name; a heat map also has a scale."""

    part: str
    title: str
    picture: ImageArray
    scale: str = ""


@dataclass(frozen=True, eq=False)
class _Example:
    """Image or volume i of the maps, its labels, and the largest value of each uncertainty over all images."""

    maps: SegmentationMaps
    i: int
    image: Tensor  # (3, *)
    truth: Tensor | None  # (*)
    scales: dict[str, float]

    @property
    def labels(self) -> Tensor:
        return self.maps.probs[self.i].argmax(0)  # (*)

    def panels(self, ignore_index: int | None, place: tuple[Any, ...] = (), title: str = "image") -> list[_Panel]:
        """Pictures of the image, or of a slice of it."""
        image: ImageArray = self.image[(slice(None), *place)].movedim(0, -1).contiguous().numpy()
        labels = self.labels[place]
        predicted = colorize_labels(labels, self.maps.num_classes)
        overlay: ImageArray = ((image.astype(np.uint16) + predicted) // 2).astype(np.uint8)
        panels = [
            _Panel("image", title, image),
            _Panel("labels", "prediction", predicted),
            _Panel("overlay", "overlay", overlay),
        ]
        if self.truth is not None:
            truth, errors = self.truth[place], image.copy()
            errors[((truth != labels) & (truth != ignore_index)).numpy()] = _ERROR_COLOR
            colored = colorize_labels(truth, self.maps.num_classes, ignore_index=ignore_index)
            panels += [_Panel("truth", "truth", colored), _Panel("errors", "wrong pixels", errors)]
        for name, largest in self.scales.items():
            picture = colorize_values(getattr(self.maps, name)[(self.i, *place)], largest)
            scale = f"0 to {largest:.3g} {_UNITS[name]}"
            panels.append(_Panel(name.replace("_", "-"), name.replace("_", " "), picture, scale))
        return panels

    def legend(self, names: Sequence[str] | None, ignore_index: int | None) -> list[tuple[str, tuple[int, ...]]]:
        """Names and colors of the classes that occur."""
        present = {*np.unique(self.labels).tolist(), *([] if self.truth is None else np.unique(self.truth).tolist())}
        colors = class_colors(self.maps.num_classes).tolist()
        entries = [(names[c] if names else str(c), tuple(colors[c])) for c in range(len(colors)) if c in present]
        return [*entries, ("ignored", _IGNORE_COLOR)] if ignore_index in present else entries


def _make_sheet(rows: Sequence[Sequence[_Panel]], legend: Sequence[tuple[str, tuple[int, ...]]]) -> "Image":
    """Panels in rows, scaled to a readable size, above a legend of (name, color)."""
    from PIL import Image, ImageDraw

    tiles = [[_draw_panel(panel) for panel in row] for row in rows]
    key = Image.new("RGB", (tiles[0][0].width, _LINE * len(legend)), "white")
    for k, (name, color) in enumerate(legend):
        draw, text = (
            ImageDraw.Draw(key),
            escape_text(name[:100]).encode("latin-1", "replace").decode("latin-1"),
        )  # of the font
        draw.rectangle((0, _LINE * k, _LINE - 4, _LINE * (k + 1) - 4), fill=color, outline="grey")
        draw.text((_LINE, _LINE * k - 1), text, fill="black")
    tiles.append([key])
    width = max(tile.width for row in tiles for tile in row) + _GAP
    heights = [max(tile.height for tile in row) + _GAP for row in tiles]
    page = Image.new("RGB", (_GAP + width * max(map(len, tiles)), _GAP + sum(heights)), "white")
    for i, row in enumerate(tiles):
        for k, tile in enumerate(row):
            page.paste(tile, (_GAP + k * width, _GAP + sum(heights[:i])))
    return page


def _draw_panel(panel: _Panel) -> "Image":
    """A picture below its title, above the colors of its scale."""
    from PIL import Image, ImageDraw, ImageOps

    method = Image.Resampling.NEAREST if max(panel.picture.shape) < _SIDE else Image.Resampling.BOX
    image = ImageOps.contain(Image.fromarray(panel.picture), (_SIDE, _SIDE), method)
    tile = Image.new("RGB", (max(image.width, _SIDE // 2), 2 * _LINE + image.height + 2 * _BAR), "white")
    ImageDraw.Draw(tile).text((0, 0), f"{panel.title}\n{panel.scale}", fill="black")
    tile.paste(image, (0, 2 * _LINE))
    if panel.scale:
        ramp = colorize_values(torch.linspace(0, 1, image.width).expand(_BAR, -1), 1.0)
        tile.paste(Image.fromarray(ramp), (0, 2 * _LINE + image.height + 2))
    return tile
