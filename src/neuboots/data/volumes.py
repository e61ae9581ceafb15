"""Volumes and their labels as NIfTI files: pairs in two folders, and the hippocampus of the Decathlon.

    x̂ = (x − mean) / std,   of each channel of each volume by itself: scanners have no unit

A volume is read when its row is asked for, in a few milliseconds for a small one, and nothing is kept. Axes stay in the
order of the file, (X, Y, Z), which the affine takes to millimetres: x is (C, X, Y, Z) and y is (X, Y, Z).

Antonelli et al., The Medical Segmentation Decathlon, Nature Communications 13, 2022. Cox et al., A (sort of) new image
data format standard: NIfTI-1, NeuroImage 22, 2004.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuboots._validation import check_int
from neuboots.data._common import CorruptFileError, corrupt_file_error, import_optional, not_found_error
from neuboots.data.augment import CropFlip
from neuboots.data.dataset import Augmentation, DatasetBundle, LazyDataset
from neuboots.data.huggingface import to_stream
from neuboots.data.image_folder import (
    FilePairs,
    check_class_names,
    check_folder,
    find_paired_folders,
    infer_class_names,
    list_pairs,
)
from neuboots.data.splits import complete_splits, hold_out

NIFTI_SUFFIXES = (".nii.gz", ".nii")
IGNORE_INDEX = 255  # where a crop reaches over the volume, and where a file says so

HIPPOCAMPUS_TEST = 0.2  # the set has no test labels: a fifth of the labelled volumes, the same for every seed
HIPPOCAMPUS_CROP = (32, 48, 32)  # about a volume; its sides are halved four times without a rest


def load_volume_folder(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    crop: tuple[int, int, int] | None = None,
) -> DatasetBundle:
    """NIfTI volumes and labels of the same names: path/images and path/labels, or the Decathlon's imagesTr, labelsTr.

    `classes` are the names of the labels 0, 1, …; without, those of dataset.json; without that, all labels are read
    once to count them. 255 marks voxels that count nowhere. train, val and test may lie above or below the two folders;
    a split without a folder is a share of the training volumes, drawn by the seed. With a `crop_to_size`, the augmentation cuts
    out such a block and mirrors X; without, there is none.

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
    >>> (
    ...     find_volume_file(data.test, 0).name,
    ...     read_affine(data.test, 0).diagonal().tolist(),
    ...     data.augmented_train[0][0].shape,
    ... )
    ('8.nii.gz', [2.0, 2.0, 3.0, 1.0], torch.Size([1, 4, 4, 4]))
    """
    folder = check_folder(path, "a folder with the folders images and labels, or imagesTr and labelsTr")
    folders = find_paired_folders(folder, ("images", "imagesTr"), ("labels", "labelsTr", "masks"))
    found = {split: list_pairs(pair, NIFTI_SUFFIXES, NIFTI_SUFFIXES) for split, pair in folders.items()}
    given = _described(folder / "dataset.json") or None if classes is None else classes
    names = infer_class_names(given, _numbers_in(found), IGNORE_INDEX)
    channels = _channels(found["train"].inputs[0])
    parts = {split: LazyDataset(_volume_files(pairs, len(names), channels)) for split, pairs in found.items()}
    train, held_out, tested = complete_splits(parts, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed)
    augmentation: Augmentation | None = None if crop is None else CropFlip(crop, flips=(0,), ignore_index=IGNORE_INDEX)
    return DatasetBundle(
        folder.resolve().name,
        "segmentation",
        train,
        held_out,
        tested,
        channels,
        names,
        standardize_volumes,
        augmentation,
        IGNORE_INDEX,
    )


def load_hippocampus3d(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """Task 4 of the Decathlon: crops of brain scans, of about 35 × 50 × 36 voxels of 1 mm, with the two ends of the
    hippocampus. The set has no labels for its test scans: a fifth of the labelled ones are test, for every seed the
    same ones; of the others, a share is validation, drawn by the seed. A crop is 32 × 48 × 32, with void where a volume
    is smaller, and left may become right, but neither front back nor top bottom.

    >>> load_hippocampus3d(None, val_data=0.1, seed=0, streaming=False)
    Traceback (most recent call last):
    neuboots.data._common.DatasetNotFoundError: the data set 'hippocampus3d' is not there: looked in no data root...
    """
    names = ("hippocampus3d", "Task04_Hippocampus")
    folder = None if root is None else next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        nowhere = "no data root, since neither root=… nor the variable NEUBOOTS_DATA was given"
        looked: list[str | Path] = [nowhere] if root is None else [root / name for name in names]
        raise not_found_error(
            names[0],
            looked,
            "fetch Task04_Hippocampus.tar from http://medicaldecathlon.com, unpack it, and give the folder that it "
            "lies in as root=… or in the variable NEUBOOTS_DATA",
        )
    data = load_volume_folder(
        folder,
        classes=("background", "anterior", "posterior"),
        val_fraction=0.0,
        test_fraction=HIPPOCAMPUS_TEST,
        crop=HIPPOCAMPUS_CROP,
    )
    train, held_out = hold_out(_part(data.train), val_fraction, seed=check_int("seed", seed))
    data = replace(data, name=names[0], train=train, validation=held_out)
    if not streaming:
        return data
    flowing = None if held_out is None else to_stream(held_out)
    return replace(data, train=to_stream(train), validation=flowing, test=to_stream(_part(data.test)))


def standardize_volumes(x: Tensor) -> Tensor:
    """(x − mean) / std of each channel of each volume of (N, C, *); one without contrast is only shifted.

    >>> standardize_volumes(torch.tensor([[[1.0, 3.0]], [[1000.0, 3000.0]]])).tolist()
    [[[-1.0, 1.0]], [[-1.0, 1.0]]]
    """
    axes = list(range(2, x.ndim))
    centred = x.double() - x.double().mean(axes, keepdim=True)
    std = centred.square().mean(axes, keepdim=True).sqrt()
    varies = x.amin(axes, keepdim=True) < x.amax(axes, keepdim=True)  # the computed spread of a constant is rounding
    return (centred / std.where(varies & (std > 0), 1.0)).to(x.dtype)


# -- where a row lies ----------------------------------------------------------------------------------


def read_affine(part: Any, i: int) -> NDArray[np.float64]:
    """The affine (4, 4) of row i of a part of volumes: from voxels to millimetres, for the maps that are written."""
    return np.array(_opened(find_volume_file(part, i)).affine, dtype=np.float64)


def find_volume_file(part: Any, i: int) -> Path:
    """The file of row i of a part of volumes, also after `.take(…)`."""
    source = _part(part).source
    if not isinstance(source, VolumeFileSource):
        raise ValueError(f"got a part of {type(source).__name__}; expected one of volumes")
    n = len(part)
    if not -n <= i < n:
        raise IndexError(f"got row {i}; expected 0 … {n - 1}")
    return Path(source.images[range(n)[i] if part.rows is None else part.rows[i]])


def _part(part: Any) -> LazyDataset:
    if not isinstance(part, LazyDataset):
        raise ValueError(f"got {type(part).__name__}; expected a part of a data set, such as data.test")
    return part


# -- files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VolumeFileSource:
    """NIfTI files of volumes and of their labels, as a source."""

    images: tuple[str, ...] = field(repr=False)
    labels: tuple[str, ...] = field(repr=False)
    num_classes: int
    channels: int
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [self._pair(row) for row in rows]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return [self._labels(_opened(self.labels[row]), self.labels[row]) for row in rows]

    def _pair(self, row: int) -> tuple[Tensor, Tensor]:
        file, label_file = self.images[row], self.labels[row]
        image, label = _opened(file), _opened(label_file)
        shape, label_shape = _squeezed(image.shape)[:3], _squeezed(label.shape)
        if shape != label_shape:
            raise CorruptFileError(
                f"got {label_file} of shape {label_shape} for {file} of shape {shape}; expected one shape"
            )
        if not _one_grid(image.affine, label.affine, shape):
            raise CorruptFileError(
                f"got {label_file} and {file}, whose affines differ; expected labels on the grid of their volume: "
                "resample them to it, or give them its affine if they were drawn on it"
            )
        return self._volume(image, file), self._labels(label, label_file)

    def _volume(self, image: Any, file: str) -> Tensor:
        voxels = _voxels(image, file)
        voxels = voxels[..., None] if voxels.ndim == 3 else voxels
        if voxels.shape[3] != self.channels:
            raise CorruptFileError(
                f"got {file} with {voxels.shape[3]} channels; expected {self.channels}, as the first volume"
            )
        x = torch.from_numpy(np.ascontiguousarray(np.moveaxis(voxels, 3, 0), dtype=np.float64))  # (C, X, Y, Z)
        if not bool(x.isfinite().all()):
            raise CorruptFileError(
                f"got {file} with {int((~x.isfinite()).sum())} voxels that are NaN or infinite; expected numbers: mend "
                "it, or remove it"
            )
        return standardize_volumes(x[None])[0].float()

    def _labels(self, label: Any, file: str) -> Tensor:
        y = _label_numbers(label, file)
        wrong = y[((y < 0) | (y >= self.num_classes)) & (y != IGNORE_INDEX)]
        if len(wrong):
            raise CorruptFileError(
                f"got {file} with the label {int(wrong[0])}; expected classes from 0 to {self.num_classes - 1}, or "
                f"{IGNORE_INDEX} for void"
            )
        return y


def _volume_files(pairs: FilePairs, num_classes: int, channels: int) -> VolumeFileSource:
    images, labels, others = map(tuple, pairs)
    return VolumeFileSource(images, labels, num_classes, channels, others)


def _opened(file: str | Path) -> Any:
    """A NIfTI file, without its voxels as yet."""
    nibabel = import_optional("nibabel")
    try:
        found = nibabel.load(file)
        shape = tuple(found.shape)
    except Exception as fault:  # nibabel's, gzip's and zlib's own
        raise corrupt_file_error(file, f"it is no NIfTI file ({type(fault).__name__})") from None
    if len(_squeezed(shape)) not in (3, 4) or 0 in shape:
        raise CorruptFileError(f"got {file} of shape {shape}; expected three axes, or four with channels")
    return found


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Without axes of one entry after the third: (X, Y, Z, 1, C) is (X, Y, Z, C)."""
    return (*shape[:3], *[entry for entry in shape[3:] if entry != 1])


def _one_grid(affine: NDArray[Any], other: NDArray[Any], shape: Sequence[int]) -> bool:
    """Less than half a voxel apart at every corner, as tools round: the nearest voxel is then the voxel itself."""
    corners = np.array([*np.ndindex(2, 2, 2)]) * (np.array(shape) - 1)  # (8, 3)
    apart = (other - affine)[:3] @ np.column_stack([corners, np.ones(8)]).T  # (3, 8), in millimetres
    try:
        return bool(np.abs(np.linalg.solve(affine[:3, :3], apart)).max() < 0.5)
    except np.linalg.LinAlgError:  # a header without a size of its voxels
        return bool(np.array_equal(affine, other))


def _voxels(found: Any, file: str | Path) -> NDArray[Any]:
    """(X, Y, Z) or (X, Y, Z, C), scaled as the header says."""
    try:
        voxels: NDArray[Any]
        if str(file).lower().endswith(".gz"):
            with gzip.open(file) as stream:
                voxels = np.asarray(type(found).from_stream(stream).dataobj)
                stream.read()  # to the checksum at its end, which nibabel itself does not look at
        else:
            voxels = np.asarray(found.dataobj)
    except Exception as fault:  # EOFError, zlib.error, OSError: a file that was cut off
        raise corrupt_file_error(file, f"it holds no whole volume ({type(fault).__name__})") from None
    if voxels.dtype.kind not in "buif":
        raise CorruptFileError(f"got {file} with voxels of type {voxels.dtype}; expected numbers")
    return voxels.reshape(_squeezed(voxels.shape))


def _label_numbers(found: Any, file: str | Path) -> Tensor:
    voxels = _voxels(found, file)
    if voxels.ndim != 3:
        raise CorruptFileError(f"got {file} of shape {voxels.shape}; expected one label for each voxel, (X, Y, Z)")
    y = voxels.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity less itself
        whole_numbers = np.abs(y - np.rint(y)) < 1e-3  # labels that were scaled are not quite whole; NaN fails too
    if not whole_numbers.all():
        raise CorruptFileError(f"got {file} with labels that are no whole numbers; expected 0, 1, …")
    return torch.from_numpy(np.ascontiguousarray(np.rint(y)).astype(np.int64))


def _channels(file: str) -> int:
    shape = _squeezed(_opened(file).shape)
    return shape[3] if len(shape) == 4 else 1


def _numbers_in(found: Mapping[str, FilePairs]) -> Iterator[set[int]]:
    for pairs in found.values():
        for file in pairs.targets:
            yield set(np.unique(_label_numbers(_opened(file), file).numpy()).tolist())


def _described(file: Path) -> tuple[str, ...]:
    """The names of the classes in the Decathlon's dataset.json, {"0": name, …}, or {name: 0, …}; none without it."""
    if not file.is_file():
        return ()
    try:
        labels = json.loads(file.read_text(encoding="utf-8"))["labels"]
        pairs = [(key, value) if str(key).isdigit() else (value, key) for key, value in labels.items()]
        numbered = {int(number): str(name) for number, name in pairs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise corrupt_file_error(file, f"it gives no labels with their names ({type(fault).__name__})") from None
    if sorted(numbered) != list(range(len(numbered))):
        raise CorruptFileError(f"got {file} with the labels {sorted(numbered)}; expected 0, 1, … without a gap")
    return check_class_names([numbered[number] for number in sorted(numbered)])
