"""Volumes with labels in NIfTI files: two folders of files, and the hippocampus data set of the Decathlon.

    x̂ = (x − mean) / std  for each channel of each volume, as scanners have no unit

A volume is read on demand. Axes keep the order of the file, (X, Y, Z), which the affine maps to millimetres: x is
(C, X, Y, Z) and y is (X, Y, Z).

Antonelli et al., The Medical Segmentation Decathlon, Nature Communications 13, 2022. Cox et al., A (sort of) new image
data format standard: NIfTI-1, NeuroImage 22, 2004.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuboots._validation import ArgumentError, import_optional
from neuboots.data._common import CorruptFileError, check_folder
from neuboots.data.augment import CropFlip
from neuboots.data.dataset import DatasetBundle, FileSource, LazyDataset, LoadOptions, complete_splits, hold_out
from neuboots.data.huggingface import DatasetLocation, find_folder
from neuboots.data.image_folder import (
    IGNORE_INDEX,
    LabelMap,
    check_class_names,
    find_paired_folders,
    list_pairs,
    pairs_to_datasets,
    read_label_map,
)

NIFTI_SUFFIXES = (".nii.gz", ".nii")


@dataclass(frozen=True)
class VolumeDecoder:
    """Decoder of NIfTI files of volumes and of their labels.

    Attributes:
        label_map: Values of the classes in the labels.
        channels: Number of channels of every volume.
    """

    label_map: LabelMap
    channels: int

    def __call__(self, file: str, target: str) -> tuple[Tensor, Tensor]:
        image, label = _open_nifti(file), _open_nifti(target)
        shape, label_shape = _squeeze(image.shape)[:3], _squeeze(label.shape)
        if shape != label_shape:
            raise CorruptFileError(target, f"it has the shape {label_shape}, but {file} has {shape}")
        if not _is_same_grid(image.affine, label.affine, shape):
            hint = "Resample the labels to the grid of the volume, or give them its affine if they were drawn on it."
            raise CorruptFileError(target, f"its affine differs from that of {file}", hint)
        voxels = _read_voxels(image, file)
        voxels = voxels[..., None] if voxels.ndim == 3 else voxels
        if voxels.shape[3] != self.channels:
            raise CorruptFileError(file, f"it has {voxels.shape[3]} channels, but the first volume {self.channels}")
        x = torch.from_numpy(np.ascontiguousarray(np.moveaxis(voxels, 3, 0), dtype=np.float64))  # (C, X, Y, Z)
        if not bool(x.isfinite().all()):
            raise CorruptFileError(file, f"{int((~x.isfinite()).sum())} of its voxels are NaN or infinite")
        return standardize_volumes(x[None])[0].float(), self.label_map(_read_labels(target, label), target)

    def decode_target(self, target: str) -> Tensor:
        """Classes of the voxels (X, Y, Z); see `neuboots.data.dataset.PairDecoder`."""
        return self.label_map(_read_labels(target), target)


def load_volume_folder(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    crop: tuple[int, int, int] | None = None,
) -> DatasetBundle:
    """Load NIfTI volumes with labels of the same names: path/images and path/labels, or imagesTr and labelsTr.

    Args:
        path: The folder; train, val and test may be above or below the two folders.
        classes: Names of the labels 0, 1, …; None takes those of dataset.json or else reads all labels.
        val_fraction: Fraction of the volumes for validation, if there is no folder for it; 0 for none.
        test_fraction: Fraction of the volumes for testing, if there is no folder for it; 0 for none.
        seed: Random seed of the splits.
        crop: Size of the blocks that the augmentation crops and mirrors along X; None for no augmentation.

    Returns:
        The splits; label 255 marks voxels without a class.

    Raises:
        DatasetNotFoundError: If folders or files are missing.
        CorruptFileError: If a file cannot be read.

    Example:
        >>> import tempfile
        >>> import nibabel
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("images", "labels"):
        ...     (folder / name).mkdir()
        ...     for i in range(10):
        ...         voxels = np.random.default_rng(i).integers(0, 2, (6, 7, 8)).astype(np.uint8)
        ...         nibabel.save(nibabel.Nifti1Image(voxels, np.diag([2, 2, 3, 1])), folder / name / f"{i}.nii.gz")
        >>> data = load_volume_folder(folder, classes=["outside", "inside"], crop=(4, 4, 4))
        >>> x, y = data.train[0]
        >>> x.shape, y.shape, abs(round(float(x.mean()), 3)), round(float(x.std(correction=0)), 3)
        (torch.Size([1, 6, 7, 8]), torch.Size([6, 7, 8]), 0.0, 1.0)
        >>> find_volume_file(data.test, 0).name, read_affine(data.test, 0).diagonal().tolist()
        ('8.nii.gz', [2.0, 2.0, 3.0, 1.0])
    """
    folder = check_folder(path, "a folder with the folders images and labels, or imagesTr and labelsTr")
    folders = find_paired_folders(folder, ("images", "imagesTr"), ("labels", "labelsTr", "masks"))
    pairs = {split: list_pairs(pair, NIFTI_SUFFIXES, NIFTI_SUFFIXES) for split, pair in folders.items()}
    classes = _read_class_names(folder / "dataset.json") if classes is None else classes
    files = [file for split_pairs in pairs.values() for file in split_pairs.targets]
    names, label_map = read_label_map(files, _read_labels, classes, IGNORE_INDEX)
    shape = _squeeze(_open_nifti(pairs["train"].inputs[0]).shape)
    channels = shape[3] if len(shape) == 4 else 1
    datasets = pairs_to_datasets(pairs, VolumeDecoder(label_map, channels))
    splits = complete_splits(datasets, val_fraction, test_fraction, seed)
    augmentation = None if crop is None else CropFlip(crop, flips=(0,), ignore_index=IGNORE_INDEX)
    name, transform = folder.resolve().name, standardize_volumes
    return DatasetBundle(name, "segmentation", *splits, channels, names, transform, augmentation, IGNORE_INDEX)


def load_hippocampus3d(root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load task 4 of the Decathlon: brain scans of about 35 × 50 × 36 voxels with two parts of the hippocampus.

    A fixed fifth of the labeled volumes is the test split, because its test labels are not public. Crops of the
    augmentation are 32 × 48 × 32, mirrored left to right only.

    Args:
        root: Data root with the folder hippocampus3d or Task04_Hippocampus.
        options: Options of the splits.

    Returns:
        The splits.

    Raises:
        DatasetNotFoundError: If the folder does not exist.
    """
    hint = "unpack Task04_Hippocampus.tar from medicaldecathlon.com"
    location = DatasetLocation("hippocampus3d", hint=hint, alias="Task04_Hippocampus")
    folder = find_folder(location, root)
    classes = ("background", "anterior", "posterior")
    crop = (32, 48, 32)  # about a volume; divisible by 16
    data = load_volume_folder(folder, classes=classes, val_fraction=0.0, test_fraction=0.2, crop=crop)
    assert isinstance(data.train, LazyDataset), "load_volume_folder does not stream"
    train, validation = hold_out(data.train, options.val_fraction, seed=options.seed)
    data = replace(data, name=location.name, train=train, validation=validation)
    return data.map_splits(LazyDataset.to_stream) if options.streaming else data


def standardize_volumes(x: Tensor) -> Tensor:
    """Standardize each channel of each volume; one without contrast is only shifted.

    Args:
        x: Volumes (N, C, *).

    Returns:
        Standardized volumes (N, C, *).

    Example:
        >>> standardize_volumes(torch.tensor([[[1.0, 3.0]], [[1000.0, 3000.0]]])).tolist()
        [[[-1.0, 1.0]], [[-1.0, 1.0]]]
    """
    axes = list(range(2, x.ndim))
    centred = x.double() - x.double().mean(axes, keepdim=True)
    std = centred.square().mean(axes, keepdim=True).sqrt()
    varies = x.amin(axes, keepdim=True) < x.amax(axes, keepdim=True)  # the computed std of a constant is rounding error
    return (centred / std.where(varies & (std > 0), 1.0)).to(x.dtype)


def read_affine(dataset: Any, i: int) -> NDArray[np.float64]:
    """Read the affine of a volume, which maps voxels to millimetres.

    Args:
        dataset: A split of volumes.
        i: Index of the row.

    Returns:
        The affine (4, 4).
    """
    return np.array(_open_nifti(find_volume_file(dataset, i)).affine, dtype=np.float64)


def find_volume_file(dataset: Any, i: int) -> Path:
    """Find the file of a volume.

    Args:
        dataset: A split of volumes, or a selection of its rows.
        i: Index of the row.

    Returns:
        Path of the file.

    Raises:
        ArgumentError: If the data set is not one of volumes.
    """
    source = getattr(dataset, "source", None)
    if not isinstance(source, FileSource) or not isinstance(source.decoder, VolumeDecoder):
        raise ArgumentError("dataset", type(dataset).__name__, "a split of a data set of volumes, such as data.test")
    rows = range(len(dataset)) if dataset.rows is None else dataset.rows
    return Path(source.files[rows[i]])


def _open_nifti(file: str | Path) -> Any:
    """Open a NIfTI file without reading its voxels."""
    nibabel = import_optional("nibabel")
    try:
        image = nibabel.load(file)
        shape = tuple(image.shape)
    except Exception as error:  # of nibabel, gzip and zlib
        raise CorruptFileError(file, f"not a NIfTI file ({type(error).__name__})") from None
    if len(_squeeze(shape)) not in (3, 4) or 0 in shape:
        raise CorruptFileError(file, f"it has the shape {shape}, not three axes, or four with channels")
    return image


def _squeeze(shape: Sequence[int]) -> tuple[int, ...]:
    """Remove axes of size 1 after the third: (X, Y, Z, 1, C) → (X, Y, Z, C)."""
    return (*shape[:3], *[size for size in shape[3:] if size != 1])


def _is_same_grid(affine: NDArray[Any], other: NDArray[Any], shape: Sequence[int]) -> bool:
    """Whether corners are less than half a voxel apart: the nearest voxel is then the voxel itself."""
    corners = np.array([*np.ndindex(2, 2, 2)]) * (np.array(shape) - 1)  # (8, 3)
    offset = (other - affine)[:3] @ np.column_stack([corners, np.ones(8)]).T  # (3, 8), in millimetres
    try:
        return bool(np.abs(np.linalg.solve(affine[:3, :3], offset)).max() < 0.5)
    except np.linalg.LinAlgError:  # a header without voxel sizes
        return bool(np.array_equal(affine, other))


def _read_voxels(image: Any, file: str | Path) -> NDArray[Any]:
    """Voxels (X, Y, Z) or (X, Y, Z, C), scaled by the header."""
    try:
        voxels: NDArray[Any]
        if str(file).lower().endswith(".gz"):
            with gzip.open(file) as stream:
                voxels = np.asarray(type(image).from_stream(stream).dataobj)
                stream.read()  # verifies the checksum, which nibabel does not
        else:
            voxels = np.asarray(image.dataobj)
    except Exception as error:  # EOFError, zlib.error, OSError: a truncated file
        raise CorruptFileError(file, f"not a complete volume ({type(error).__name__})") from None
    if voxels.dtype.kind not in "buif":
        raise CorruptFileError(file, f"its voxels are of type {voxels.dtype}, not numbers")
    return voxels.reshape(_squeeze(voxels.shape))


def _read_labels(file: str, image: Any = None) -> Tensor:
    """Label of each voxel (X, Y, Z)."""
    voxels = _read_voxels(_open_nifti(file) if image is None else image, file)
    if voxels.ndim != 3:
        raise CorruptFileError(file, f"it has the shape {voxels.shape}, not one label for each voxel")
    y = voxels.astype(np.float64)
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        integers = np.abs(y - np.rint(y)) < 1e-3  # labels scaled by the header are rounded; NaN fails too
    if not integers.all():
        raise CorruptFileError(file, "its labels are not integers")
    return torch.from_numpy(np.ascontiguousarray(np.rint(y)).astype(np.int64))


def _read_class_names(file: Path) -> tuple[str, ...] | None:
    """Class names in dataset.json of the Decathlon, {"0": name, …} or {name: 0, …}; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        labels = json.loads(file.read_text(encoding="utf-8"))["labels"]
        pairs = [(key, value) if str(key).isdigit() else (value, key) for key, value in labels.items()]
        numbered = {int(number): str(name) for number, name in pairs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(file, f"it has no names of labels ({type(error).__name__})") from None
    if sorted(numbered) != list(range(len(numbered))):
        raise CorruptFileError(file, f"its labels are {sorted(numbered)}, not 0, 1, …")
    return check_class_names([numbered[number] for number in sorted(numbered)])
