"""Label and uncertainty maps as files: PNG pictures of images, NIfTI volumes in the input's own space.

    (x, y, z, 1)ᵀ = A (i, j, k, 1)ᵀ,   A the affine of the input: voxel (i, j, k) of a map lies where the input's does

Every file is written aside and then renamed, so that nobody sees half of one.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuboots.tasks.common import labels_for
from neuboots.tasks.segmentation.maps import Maps, check_images
from neuboots.tasks.segmentation.pictures import (
    VOID,
    Normalisation,
    Panel,
    class_colours,
    coloured,
    heat,
    in_bytes,
    marked,
    overlaid,
    picture_of,
    sheet,
)

_UNITS = {"entropy": "nats", "mutual_information": "nats", "std": "of the outputs"}
_NAME = re.compile(r'\w(?:[^/\\:*?"<>|]*[^/\\:*?"<>|. ])?')  # that every file system takes
_LONGEST = 150  # bytes of a name, which file systems count


def write_maps(
    maps: Maps,
    x: Tensor,
    folder: str | Path,
    *,
    names: Sequence[str] | None = None,
    labels: Tensor | None = None,
    void: int | None = 255,
    classes: Sequence[str] | None = None,
    normalisation: Normalisation | None = None,
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
    >>> from neuboots import PlainPredictor
    >>> from neuboots.tasks.segmentation import segment
    >>> x = torch.rand(1, 3, 12, 16)
    >>> maps = segment(PlainPredictor(torch.nn.Conv2d(3, 2, 1)), x, 2)
    >>> paths = write_maps(maps, x, tempfile.mkdtemp(), names=["street"])
    >>> [path.name for path in paths][:4]
    ['street-image.png', 'street-labels.png', 'street-overlay.png', 'street-entropy.png']
    """
    if not isinstance(maps, Maps):
        raise ValueError(f"got maps of type {type(maps).__name__}; expected what segment(predictor, x) gives")
    check_images(x)
    if (len(x), *x.shape[2:]) != tuple(maps.entropy.shape):
        raise ValueError(
            f"got x of shape {tuple(x.shape)} and maps of {tuple(maps.entropy.shape)}; expected the images that the "
            "maps are of"
        )
    if normalisation is not None and not callable(getattr(normalisation, "inverse", None)):
        raise ValueError(
            f"got normalisation of type {type(normalisation).__name__}; expected one with a method inverse(x): leave "
            "it out to stretch each image from its least value to its largest"
        )
    if classes is not None and len(classes) != maps.num_classes:
        raise ValueError(f"got {len(classes)} names of classes; expected {maps.num_classes}, one for each")
    volumes = len(maps.size) == 3
    if not volumes and (affine is not None or probs):
        raise ValueError("got an affine or probs=True for images; expected volumes (N, C, D, H, W): leave them out")
    truth = None if labels is None else labels_for(maps.probs, labels, void=void)
    called = _names(names, len(x))
    affines = _affines(affine, len(x)) if volumes else None
    where = _folder(folder)
    artist = _Artist(maps, x, truth, void, classes, normalisation)
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
        maps: Maps,
        x: Tensor,
        truth: Tensor | None,
        void: int | None,
        classes: Sequence[str] | None,
        normalisation: Normalisation | None,
    ) -> None:
        self.maps, self.x, self.truth, self.void, self.normalisation = maps, x, truth, void, normalisation
        self.labels = maps.labels
        self.tops = {name: float(getattr(maps, name).max()) for name in _UNITS}
        self.names = [str(c) for c in range(maps.num_classes)] if classes is None else [str(name) for name in classes]

    def scale(self, name: str) -> str:
        return f"0 to {self.tops[name]:.3g} {_UNITS[name]}"

    def image(self, i: int) -> Tensor:
        """Image i as bytes: (3, *)."""
        return in_bytes(self.x[i], self.normalisation)

    def panels(self, i: int, levels: Tensor, place: tuple[Any, ...] = ()) -> dict[str, Panel]:
        """The pictures of image i, or of a slice of it, by the end of their files' names."""
        at = (i, *place)
        image = picture_of(levels[(slice(None), *place)])
        guessed = coloured(self.labels[at], self.maps.num_classes)
        found = {"image": Panel("image", image)}
        if self.truth is not None:
            found["truth"] = Panel("truth", coloured(self.truth[at], self.maps.num_classes, void=self.void))
        found["prediction"] = Panel("prediction", guessed)
        found["overlay"] = Panel("overlay", overlaid(image, guessed))
        if self.truth is not None:
            wrong = (self.truth[at] != self.labels[at]) & (self.truth[at] != self.void)
            found["errors"] = Panel("wrong pixels", marked(image, wrong))
        for name, top in self.tops.items():
            picture = heat(getattr(self.maps, name)[at], top)
            found[name.replace("_", "-")] = Panel(name.replace("_", " "), picture, self.scale(name))
        return found

    def legend(self, i: int) -> list[tuple[str, tuple[int, ...]]]:
        """The classes that occur in image i."""
        colours, there = class_colours(self.maps.num_classes), set(np.unique(self.labels[i]).tolist())
        if self.truth is not None:
            there |= set(np.unique(self.truth[i]).tolist())
        entries = [(self.names[c], tuple(colours[c].tolist())) for c in range(len(colours)) if c in there]
        return [*entries, ("void", VOID)] if self.truth is not None and self.void in there else entries


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
    write("sheet", sheet([shown[:half], shown[half:]], artist.legend(i)))
    return paths


def _palette(image: Any, labels: Tensor, num_classes: int) -> Any:
    """A PNG whose pixels are the labels, shown in colours; with more than 256 classes, in 16 bits and without."""
    if num_classes > 256:
        return image.fromarray(labels.numpy().astype(np.uint16))
    picture = image.fromarray(labels.numpy().astype(np.uint8))
    picture.putpalette(class_colours(num_classes).flatten().tolist())
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
    page = sheet(rows, artist.legend(i))
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
