"""Pixels of encoded images and masks.

    PNG, JPEG, … → (C, H, W) bytes of an image,  (H, W) class numbers of a mask

Both are turned as their EXIF tag says, which is how they look to whoever drew the mask. Given a size, both are made as
small as will cover it, keeping their proportions, and cropped at the centre, or stretched to it: images bilinearly,
masks by the nearest.

A mask is an image whose numbers are classes: grey, or with a palette whose entries are the classes, as PASCAL VOC's. A
mask in colours is read by the colour of each class, where a set has such, and refused otherwise: three channels are no
class, unless all three hold the same, as in a grey picture that was saved in colours.

Sets of images with one label each: digits, MNIST, Fashion-MNIST, rotated MNIST, CIFAR, SVHN, white blood cells.

    x̂ = (x − mean) / std,   x ∈ [0, 1]^(C×H×W)

Means and standard deviations are the usual ones, over all pixels of all training images; those of digits, rotated MNIST
and the white blood cells were computed so, from the training rows. Augmentation is that of the cutout paper for CIFAR
(crop of the image padded by 4, flip, cutout 16 for CIFAR-10 and 8 for CIFAR-100) and SVHN (cutout 20; digits are not
mirrored, but cropped here as the others), and a crop, with a flip where a mirrored image is as good, for the others.

LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, Proc. IEEE 1998 (MNIST).
Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv 1708.07747, 2017. Krizhevsky, Learning multiple layers of features from
tiny images, 2009 (CIFAR). Netzer et al., Reading digits in natural images with unsupervised feature learning, NIPS
workshop 2011 (SVHN). Larochelle, Erhan, Courville, Bergstra and Bengio, An empirical evaluation of deep architectures
on problems with many factors of variation, ICML 2007 (rotated MNIST). DeVries and Taylor, Improved regularization of
convolutional neural networks with cutout, arXiv 1708.04552, 2017.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import check_int
from neuboots.data._common import CorruptFileError, corrupt_file_error, import_optional
from neuboots.data.augment import CropFlipCutout
from neuboots.data.corruptions import rotate
from neuboots.data.dataset import (
    DatasetBundle,
    LazyDataset,
    Source,
    Standardizer,
    StreamingDataset,
    TensorSource,
    to_unit_range,
)
from neuboots.data.huggingface import (
    ColumnSpec,
    DatasetLocation,
    NumberedRow,
    build_splits,
    open_tables,
    read_class_names,
    to_stream,
)
from neuboots.data.splits import hold_out

EncodedImage = Any  # the bytes of a file, its path, or a row of an image column: {"bytes": …, "path": …}
ImageSize = tuple[int, int]
_ORIENTATION = 0x0112  # EXIF's tag; 5 to 8 are turned by a quarter


def decode_image(
    data: EncodedImage, channels: int, where: str | Path, *, size: ImageSize | None = None, stretch: bool = False
) -> Tensor:
    """(C, H, W) bytes: grey if C = 1, colour if C = 3, without transparency, 16 bits rounded to 8. `where` it lies is
    said if it cannot be read.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (4, 2), (10, 20, 30)).save(file, "PNG")
    >>> decode_image(file.getvalue(), 3, "a blue one")[:, 0, 0].tolist()
    [10, 20, 30]
    >>> decode_image(file.getvalue()[:40], 3, "cifar10, split train, row 7")
    Traceback (most recent call last):
    neuboots.data._common.CorruptFileError: cannot read cifar10, split train, row 7: it holds no whole image (...); expected ...
    """
    return _to_image_tensor(_opened(data, where), channels, where, size, stretch)


def _to_image_tensor(
    picture: Any, channels: int, where: str | Path, size: ImageSize | None, stretched: bool = False
) -> Tensor:
    mode = {1: "L", 3: "RGB"}[channels]
    try:
        picture = _in_bytes(picture, where)
        if picture.mode == "P" and "transparency" in picture.info:
            picture = picture.convert("RGBA")  # straight to RGB, PIL would warn
        picture = picture if picture.mode == mode else picture.convert(mode)
        pixels = torch.from_numpy(np.array(_fitted(picture, size, stretched, "BILINEAR")))  # (H, W) or (H, W, 3)
    except CorruptFileError:
        raise
    except Exception as fault:  # a conversion that PIL does not know
        raise corrupt_file_error(where, f"it cannot be made {mode} ({type(fault).__name__}: {fault})") from None
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def read_image_size(data: EncodedImage, where: str | Path) -> ImageSize:
    """(H, W) of an image as it will be turned; of a file only the beginning is read.

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
            turned = picture.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    except Exception as fault:  # each format has its own
        raise corrupt_file_error(where, f"it holds no image ({type(fault).__name__})") from None
    return (width, height) if turned else (height, width)


def decode_mask(
    data: EncodedImage,
    where: str | Path,
    *,
    size: ImageSize | None = None,
    stretch: bool = False,
    colors: Sequence[tuple[tuple[int, int, int], int]] = (),
) -> Tensor:
    """(H, W) class numbers; `colours` are pairs (colour, class) for a mask in colours."""
    return _to_mask_tensor(_opened(data, where), where, size, stretch, colors)


def read_image_and_mask(
    image: Path, mask: Path, channels: int, *, size: ImageSize | None = None
) -> tuple[Tensor, Tensor]:
    """(C, H, W) and (H, W) of two files, which must be of one size before they are fitted to another.

    >>> import tempfile
    >>> from PIL import Image
    >>> image, mask = (Path(tempfile.mkdtemp(), name) for name in ("image.png", "mask.png"))
    >>> Image.new("L", (4, 2)).save(image)
    >>> Image.new("L", (2, 4)).save(mask)
    >>> read_image_and_mask(image, mask, 1, size=(2, 2))
    Traceback (most recent call last):
    neuboots.data._common.CorruptFileError: got .../mask.png of 4 × 2 for .../image.png of 2 × 4; expected one size: make the ...
    """
    picture, classes = _opened(image, image), _opened(mask, mask)
    if picture.size != classes.size:
        mask_size, image_size = (f"{height} × {width}" for width, height in (classes.size, picture.size))
        raise CorruptFileError(
            f"got {mask} of {mask_size} for {image} of {image_size}; expected one size: make the mask for the image as "
            "it is turned by its EXIF tag"
        )
    return _to_image_tensor(picture, channels, image, size), _to_mask_tensor(classes, mask, size)


def _to_mask_tensor(
    picture: Any,
    where: str | Path,
    size: ImageSize | None,
    stretched: bool = False,
    colours: Sequence[tuple[tuple[int, int, int], int]] = (),
) -> Tensor:
    coloured = picture.mode in ("RGB", "RGBA") and bool(colours)
    if not coloured and picture.mode in ("LA", "RGB", "RGBA"):
        picture = _grey(picture)
    if not coloured and picture.mode not in ("1", "L", "P", "I") and not picture.mode.startswith("I;16"):
        raise CorruptFileError(
            f"got {where}, a mask in colours (PIL's mode {picture.mode}); expected the number of a class in each "
            "pixel: save it as a grey picture, or with a palette"
        )
    fitted = _fitted(picture, size, stretched, "NEAREST")
    if coloured:
        return _by_colour(np.array(fitted.convert("RGB")), colours, where)
    return torch.from_numpy(np.array(fitted).astype(np.int64))


def _opened(data: EncodedImage, where: str | Path) -> Any:
    """The whole picture; its first, if it has several."""
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
        raise corrupt_file_error(where, "it is not there any more") from None
    except Exception as fault:  # each format has its own: OSError, SyntaxError, ValueError, struct.error, …
        what = "it is empty" if encoded == b"" else "it holds no whole image"
        raise corrupt_file_error(where, f"{what} ({type(fault).__name__})") from None


def _in_bytes(picture: Any, where: str | Path) -> Any:
    """Of 16 bits the upper 8, rounded: PIL itself would cut off at 255."""
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    numbers = np.array(picture)
    if picture.mode == "F" or numbers.min(initial=0) < 0 or numbers.max(initial=0) > 65535:
        raise CorruptFileError(
            f"got {where}, whose pixels are neither bytes nor of 16 bits (PIL's mode {picture.mode}); expected one of "
            "the two"
        )
    return import_optional("PIL.Image").fromarray(((numbers.astype(np.int64) + 128) // 257).astype(np.uint8))


def _fitted(picture: Any, size: ImageSize | None, stretched: bool, method: str) -> Any:
    if size is None or picture.size == size[::-1]:
        return picture
    resampling = getattr(import_optional("PIL.Image").Resampling, method)
    if stretched:
        return picture.resize(size[::-1], resampling)
    return import_optional("PIL.ImageOps").fit(picture, size[::-1], method=resampling)


def _grey(picture: Any) -> Any:
    """A picture in colours as the grey one that it is, or itself."""
    pixels = np.array(picture.convert("RGB"))
    return (
        import_optional("PIL.Image").fromarray(pixels[..., 0].copy()) if (pixels == pixels[..., :1]).all() else picture
    )


def _by_colour(pixels: Any, colours: Sequence[tuple[tuple[int, int, int], int]], where: str | Path) -> Tensor:
    found = pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])  # (H, W)
    known = sorted(((r << 16) | (g << 8) | b, number) for (r, g, b), number in colours)
    codes, classes = (np.array(column) for column in zip(*known, strict=True))
    places = np.searchsorted(codes, found).clip(max=len(codes) - 1)
    if not (codes[places] == found).all():
        raise corrupt_file_error(where, "a mask with colours that stand for no class")
    return torch.from_numpy(classes[places])


DIGIT_CLASSES = tuple("0123456789")
_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class ImageDatasetSpec:
    """What is known of a set of images before it is opened."""

    place: DatasetLocation
    size: int  # of a side
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]  # where the files name none
    label: tuple[str, ...] = ("label",)  # what the column is called
    padding: int = 4
    flip: bool = False
    cutout: int = 0

    @property
    def augmentation(self) -> CropFlipCutout:
        return CropFlipCutout(
            (self.size, self.size), padding=self.padding, flip=self.flip, cutout=self.cutout, fill=self.mean
        )


MNIST = ImageDatasetSpec(
    DatasetLocation("mnist", "ylecun/mnist", "mnist"),
    size=28,
    mean=(0.1307,),
    std=(0.3081,),
    classes=DIGIT_CLASSES,
    padding=2,
)
FASHION_MNIST = ImageDatasetSpec(
    DatasetLocation("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist"),
    size=28,
    mean=(0.2860,),
    std=(0.3530,),
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    padding=2,
    flip=True,
)  # fmt: skip
CIFAR10 = ImageDatasetSpec(
    DatasetLocation("cifar10", "uoft-cs/cifar10", "plain_text"),
    size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    flip=True,
    cutout=16,
)
CIFAR100 = ImageDatasetSpec(
    DatasetLocation("cifar100", "uoft-cs/cifar100", "cifar100"),
    size=32,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    classes=tuple(_HUNDRED.split()),
    label=("fine_label", "label"),
    flip=True,
    cutout=8,
)
SVHN = ImageDatasetSpec(
    DatasetLocation("svhn", "ufldl-stanford/svhn", "cropped_digits"),
    size=32,
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    classes=DIGIT_CLASSES,
    cutout=20,
)
WBC_CELLS = ImageDatasetSpec(
    DatasetLocation(
        "wbc_cells",
        how="cut the cells out of the BCCD images (github.com/Shenggan/BCCD_Dataset) as grey PNG of 80 × 80 pixels, in "
        "wbc_cells/data/train-*.parquet and test-*.parquet with the columns image and label",
    ),
    size=80,
    mean=(0.7142,),
    std=(0.0813,),
    classes=("eosinophil", "monocyte", "lymphocyte", "neutrophil"),
    padding=8,
    flip=True,
)
ROTATED_MNIST = replace(MNIST, mean=(0.1306,), std=(0.2898,))  # turning smooths
IMAGE_DATASETS = {spec.place.name: spec for spec in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100, SVHN, WBC_CELLS)}


def load_image_dataset(
    spec: ImageDatasetSpec, root: Path | None, *, val_fraction: float, seed: int, streaming: bool
) -> DatasetBundle:
    """A set of images from a data root or the hub; validation is a share of the training rows, the same of each class.

    Of a stream, it is the rows at even distances.
    """
    tables = open_tables(spec.place, root, [("image", "img"), spec.label], streaming=streaming)
    named = read_class_names(tables["train"], spec.label[0])
    classes = named if len(named) == len(spec.classes) else spec.classes
    normalisation = Standardizer(spec.mean, spec.std)
    columns = ColumnSpec(
        x="image",
        y=spec.label[0],
        decode_x=partial(_decode_image_column, channels=len(spec.mean), size=spec.size),
        decode_y=partial(_decode_label, classes=len(classes)),
        numbers=True,
    )
    name = spec.place.name
    parts = build_splits(
        name, tables, columns, normalisation, val_fraction=val_fraction, seed=seed, streaming=streaming
    )
    return DatasetBundle(
        name=name,
        task="classification",
        **parts,
        channels=len(spec.mean),
        classes=classes,
        standardizer=normalisation,
        augmentation=spec.augmentation,
    )


def _decode_image_column(value: Any, where: str, *, channels: int, size: int) -> Tensor:
    image = decode_image(value, channels, where)
    if image.shape[1:] != (size, size):  # augmentation would cut it to that size, and the test part would not
        height, width = image.shape[1:]
        raise corrupt_file_error(where, f"its image has {height} × {width} pixels, where {size} × {size} was expected")
    return image


def _decode_label(value: Any, where: str, *, classes: int) -> Tensor:
    if not isinstance(value, int) or not 0 <= value < classes:
        raise corrupt_file_error(where, f"its label is {value!r}, where 0 … {classes - 1} was expected")
    return torch.tensor(int(value))


# -- rotated MNIST -------------------------------------------------------------------------------------


def load_rotated_mnist(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """MNIST with each image turned by an angle, uniform on [0°, 360°): a function of (seed, split, row) alone."""
    upright = load_image_dataset(MNIST, root, val_fraction=val_fraction, seed=seed, streaming=streaming)
    normalisation = Standardizer(ROTATED_MNIST.mean, ROTATED_MNIST.std)

    def turned(part: Any, split: str) -> Any:
        if isinstance(part, LazyDataset):
            return replace(part, source=RotatedSource(part.source, seed, split), transform=normalisation)
        if isinstance(part, StreamingDataset):
            return replace(part, decode=_TurnRow(part.decode, seed, split), transform=normalisation)
        return None

    return replace(
        upright,
        name="rotated_mnist",
        train=turned(upright.train, "train"),
        validation=turned(upright.validation, "train"),  # whose rows it has, by their numbers there
        test=turned(upright.test, "test"),
        standardizer=normalisation,
        augmentation=ROTATED_MNIST.augmentation,
    )


def rotation_angles(rows: Sequence[int], seed: int, split: str) -> Tensor:
    """Degrees for these rows, uniform on [0, 360): (N,)."""
    keys = derive_keys(torch.tensor(list(rows)), check_int("seed", seed), "rotated", split)
    return 360.0 * draw_uniform(keys, torch.zeros(1, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class RotatedSource:
    """A source of images, each turned by its own angle.

    >>> source = RotatedSource(TensorSource(torch.ones(3, 1, 8, 8), torch.arange(3)), seed=0, split="train")
    >>> (x, *_), _ = source.read([2])
    >>> float(x[0, 4, 4]), bool(x[0, 0, 0] < 1)  # the centre stays, zeros turn in from outside
    (1.0, True)
    """

    source: Source
    seed: int
    split: str

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        xs, ys = self.source.read(rows)
        if not xs:
            return xs, ys
        return list(rotate(to_unit_range(torch.stack(xs)), rotation_angles(rows, self.seed, self.split))), ys

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return self.source.read_targets(rows)


@dataclass(frozen=True, eq=False)
class _TurnRow:
    decode: Any
    seed: int
    split: str

    def __call__(self, row: NumberedRow) -> tuple[Tensor, Tensor]:
        x, y = self.decode(row)
        return rotate(to_unit_range(x[None]), rotation_angles([row[0]], self.seed, self.split))[0], y


# -- digits --------------------------------------------------------------------------------------------


def load_digits(root: Path | None = None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """1,797 digits of 8 × 8 pixels, shipped with scikit-learn; a fifth of each class is the test part, always the same.

    >>> data = load_digits(val_data=0.1, seed=0, streaming=False)
    >>> data
    DataSet('digits', classification, 10 classes, 1 channels; train 1,294, validation 144, test 359)
    """
    bunch = import_optional("sklearn.datasets").load_digits()
    x = torch.from_numpy(bunch.images).float().div(16)[:, None]  # (1797, 1, 8, 8)
    normalisation = Standardizer((0.3051,), (0.3760,))
    every = LazyDataset(TensorSource(x, torch.from_numpy(bunch.target).long()), normalisation)
    rest, test = hold_out(every, 0.2, seed=0, strata=every.targets)
    train, apart = hold_out(rest, val_fraction, seed=seed, strata=rest.targets)
    parts: dict[str, Any] = {"train": train, "validation": apart, "test": test}
    if streaming:
        parts = {name: None if part is None else to_stream(part) for name, part in parts.items()}
    return DatasetBundle(
        name="digits",
        task="classification",
        **parts,
        channels=1,
        classes=DIGIT_CLASSES,
        standardizer=normalisation,
        augmentation=CropFlipCutout((8, 8), padding=1, flip=False),
    )
