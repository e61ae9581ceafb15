"""Sets of images with one label each: digits, MNIST, Fashion-MNIST, rotated MNIST, CIFAR, SVHN, white blood cells.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuboots.data.augment import CropFlipCutout
from neuboots.data.corruptions import rotate
from neuboots.data.hub import Place, class_names, open_tables
from neuboots.data.parts import Part, Source, Stream, Tensors, in_unit_range
from neuboots.data.pixels import image_of
from neuboots.data.rows import Columns, Row, in_order, parts_of
from neuboots.data.sets import DataSet, Normalisation
from neuboots.data.sources import corrupt, need, split_off
from neuboots.keys import draw_keys, uniforms, whole

TEN_DIGITS = tuple("0123456789")
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
class ImageSet:
    """What is known of a set of images before it is opened."""

    place: Place
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


MNIST = ImageSet(
    Place("mnist", "ylecun/mnist", "mnist"), size=28, mean=(0.1307,), std=(0.3081,), classes=TEN_DIGITS, padding=2
)
FASHION_MNIST = ImageSet(
    Place("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist"),
    size=28,
    mean=(0.2860,),
    std=(0.3530,),
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    padding=2,
    flip=True,
)  # fmt: skip
CIFAR10 = ImageSet(
    Place("cifar10", "uoft-cs/cifar10", "plain_text"),
    size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    flip=True,
    cutout=16,
)
CIFAR100 = ImageSet(
    Place("cifar100", "uoft-cs/cifar100", "cifar100"),
    size=32,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    classes=tuple(_HUNDRED.split()),
    label=("fine_label", "label"),
    flip=True,
    cutout=8,
)
SVHN = ImageSet(
    Place("svhn", "ufldl-stanford/svhn", "cropped_digits"),
    size=32,
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    classes=TEN_DIGITS,
    cutout=20,
)
WBC_CELLS = ImageSet(
    Place(
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
IMAGE_SETS = {spec.place.name: spec for spec in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100, SVHN, WBC_CELLS)}


def load_images(spec: ImageSet, root: Path | None, *, validation: float, seed: int, streaming: bool) -> DataSet:
    """A set of images from a data root or the hub; validation is a share of the training rows, the same of each class.

    Of a stream, it is the rows at even distances.
    """
    tables = open_tables(spec.place, root, [("image", "img"), spec.label], streaming=streaming)
    named = class_names(tables["train"], spec.label[0])
    classes = named if len(named) == len(spec.classes) else spec.classes
    normalisation = Normalisation(spec.mean, spec.std)
    columns = Columns(
        x="image",
        y=spec.label[0],
        decode_x=partial(_image, channels=len(spec.mean), size=spec.size),
        decode_y=partial(_label, classes=len(classes)),
        numbers=True,
    )
    name = spec.place.name
    parts = parts_of(name, tables, columns, normalisation, validation=validation, seed=seed, streaming=streaming)
    return DataSet(
        name=name,
        task="classification",
        **parts,
        channels=len(spec.mean),
        classes=classes,
        normalisation=normalisation,
        augmentation=spec.augmentation,
    )


def _image(value: Any, where: str, *, channels: int, size: int) -> Tensor:
    image = image_of(value, channels, where)
    if image.shape[1:] != (size, size):  # augmentation would cut it to that size, and the test part would not
        height, width = image.shape[1:]
        raise corrupt(where, f"its image has {height} × {width} pixels, where {size} × {size} was expected")
    return image


def _label(value: Any, where: str, *, classes: int) -> Tensor:
    if not isinstance(value, int) or not 0 <= value < classes:
        raise corrupt(where, f"its label is {value!r}, where 0 … {classes - 1} was expected")
    return torch.tensor(int(value))


# -- rotated MNIST -------------------------------------------------------------------------------------


def rotated_mnist(root: Path | None, *, validation: float, seed: int, streaming: bool) -> DataSet:
    """MNIST with each image turned by an angle, uniform on [0°, 360°): a function of (seed, split, row) alone."""
    upright = load_images(MNIST, root, validation=validation, seed=seed, streaming=streaming)
    normalisation = Normalisation(ROTATED_MNIST.mean, ROTATED_MNIST.std)

    def turned(part: Any, split: str) -> Any:
        if isinstance(part, Part):
            return replace(part, source=Turned(part.source, seed, split), normalise=normalisation)
        if isinstance(part, Stream):
            return replace(part, decode=_TurnRow(part.decode, seed, split), normalise=normalisation)
        return None

    return replace(
        upright,
        name="rotated_mnist",
        train=turned(upright.train, "train"),
        validation=turned(upright.validation, "train"),  # whose rows it has, by their numbers there
        test=turned(upright.test, "test"),
        normalisation=normalisation,
        augmentation=ROTATED_MNIST.augmentation,
    )


def angles(rows: Sequence[int], seed: int, split: str) -> Tensor:
    """Degrees for these rows, uniform on [0, 360): (N,)."""
    keys = draw_keys(torch.tensor(list(rows)), whole("seed", seed), "rotated", split)
    return 360.0 * uniforms(keys, torch.zeros(1, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class Turned:
    """A source of images, each turned by its own angle.

    >>> source = Turned(Tensors(torch.ones(3, 1, 8, 8), torch.arange(3)), seed=0, split="train")
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
        return list(rotate(in_unit_range(torch.stack(xs)), angles(rows, self.seed, self.split))), ys

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return self.source.read_targets(rows)


@dataclass(frozen=True, eq=False)
class _TurnRow:
    decode: Any
    seed: int
    split: str

    def __call__(self, row: Row) -> tuple[Tensor, Tensor]:
        x, y = self.decode(row)
        return rotate(in_unit_range(x[None]), angles([row[0]], self.seed, self.split))[0], y


# -- digits --------------------------------------------------------------------------------------------


def digits(root: Path | None = None, *, validation: float, seed: int, streaming: bool) -> DataSet:
    """1,797 digits of 8 × 8 pixels, shipped with scikit-learn; a fifth of each class is the test part, always the same.

    >>> data = digits(validation=0.1, seed=0, streaming=False)
    >>> data
    DataSet('digits', classification, 10 classes, 1 channels; train 1,294, validation 144, test 359)
    """
    bunch = need("sklearn.datasets").load_digits()
    x = torch.from_numpy(bunch.images).float().div(16)[:, None]  # (1797, 1, 8, 8)
    normalisation = Normalisation((0.3051,), (0.3760,))
    every = Part(Tensors(x, torch.from_numpy(bunch.target).long()), normalisation)
    rest, test = split_off(every, 0.2, seed=0, strata=every.targets)
    train, apart = split_off(rest, validation, seed=seed, strata=rest.targets)
    parts: dict[str, Any] = {"train": train, "validation": apart, "test": test}
    if streaming:
        parts = {name: None if part is None else in_order(part) for name, part in parts.items()}
    return DataSet(
        name="digits",
        task="classification",
        **parts,
        channels=1,
        classes=TEN_DIGITS,
        normalisation=normalisation,
        augmentation=CropFlipCutout((8, 8), padding=1, flip=False),
    )
