"""Images and masks that belong together, and what the numbers in masks stand for.

masks of 0, 1, 2 and 255 → three classes and void;    of 0 and 255 → two classes, black and white
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from neuboots.data import Corrupt, DataSet, Missing, Part
from neuboots.data.folders import IMAGENET, IMAGES, MASKS, checked_names
from neuboots.data.listing import Pairs, folder_at, paired_folders, pairs_in
from neuboots.data.pixels import mask_of, pair_of
from neuboots.progress import bar

VOID = 255  # a pixel without a class, once a mask is read
MOST = 64  # numbers that are taken for classes unasked: a mask with smoothed borders holds more
LEAST = 8  # pixels of a side that a net can tell anything about
_IMAGES, _MASKS = ("images",), ("masks", "labels")  # what the folders may be called

# -- files ---------------------------------------------------------------------------------------------


def pairs_of(path: str | Path) -> tuple[Path, dict[str, Pairs]]:
    """(the folder, part → images and masks of the same names), in any layout that has images and masks (or labels)."""
    folder = folder_at(path, "a folder with the folders images and masks")
    parts = paired_folders(folder, _IMAGES, _MASKS)
    return folder, {part: pairs_in(folders, IMAGES, MASKS) for part, folders in parts.items()}


def pairs_to_test(path: str | Path) -> tuple[Path, Pairs, list[str]]:
    """(the folder, images and masks that may be compared with, notes): of several parts, those to test with."""
    folder, parts = pairs_of(path)
    if len(parts) == 1:
        return folder, parts["train"], []
    if "test" not in parts:
        raise Missing(f"got {folder} with the parts {', '.join(parts)}; expected test among them, or one part alone")
    return folder, parts["test"], [f"of {folder} only the part test is read"]


def without_masks(root: Path, files: Iterable[Path]) -> list[Path]:
    """The files that are not in a folder of masks beside one of images."""

    def of_masks(file: Path) -> bool:
        inner = file.relative_to(root).parts[:-1]
        return any(
            name in _MASKS and any(root.joinpath(*inner[:i], images).is_dir() for images in _IMAGES)
            for i, name in enumerate(inner)
        )

    return [file for file in files if not of_masks(file)]


# -- numbers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coding:
    """The number of each class in the files of masks, and that of pixels without one.

    >>> Coding((0, 255), void=9)(torch.tensor([[0, 255, 9]]), "mask.png").tolist()
    [[0, 1, 255]]
    """

    numbers: tuple[int, ...]
    void: int | None = None

    def __call__(self, mask: Tensor, where: str | Path) -> Tensor:
        """Classes 0, 1, … and VOID from the numbers of a file."""
        numbers, classes = torch.tensor(self.numbers).sort()
        places = torch.searchsorted(numbers, mask).clamp(max=len(numbers) - 1)
        known = numbers[places] == mask
        wrong = mask[~known] if self.void is None else mask[~known & (mask != self.void)]
        if len(wrong):
            expected = ", ".join(map(str, self.numbers[:8])) + (" …" if len(self.numbers) > 8 else "")
            void = "" if self.void is None else f", or {self.void} for void"
            raise Corrupt(f"got {where} with the number {int(wrong[0])}; expected one of {expected}{void}")
        return classes[places].where(known, VOID)


@dataclass(frozen=True, eq=False)
class MaskPairs:
    """Files of images and of their masks, as a source of bytes (C, H, W) and classes (H, W)."""

    images: tuple[str, ...] = field(repr=False)
    masks: tuple[str, ...] = field(repr=False)
    channels: int
    coding: Coding

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [pair_of(Path(self.images[row]), Path(self.masks[row]), self.channels) for row in rows]
        masks = [self.coding(mask, self.masks[row]) for (_, mask), row in zip(pairs, rows, strict=True)]
        return [large_enough(image, self.images[row]) for (image, _), row in zip(pairs, rows, strict=True)], masks

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return [self.coding(mask_of(self.masks[row], self.masks[row]), self.masks[row]) for row in rows]


def large_enough(image: Tensor, where: str | Path) -> Tensor:
    """The image (C, H, W), or what to raise for one of a few pixels."""
    height, width = image.shape[-2:]
    if min(height, width) < LEAST:
        raise Corrupt(f"got {where} of {height} × {width} pixels; expected at least {LEAST} on each side")
    return image


def numbers_in(masks: Sequence[str], *, progress: bool) -> set[int]:
    """All numbers in the masks that can be read; if none can, what is wrong with the first."""
    found: set[int] = set()
    faults: list[Corrupt] = []
    with bar("reading masks", len(masks), show=progress) as step:
        for mask in masks:
            try:
                found |= set(np.unique(mask_of(mask, mask).numpy()).tolist())
            except Corrupt as fault:  # it is named when it is read with its image
                faults.append(fault)
            step("reading masks")
    if not found:
        raise faults[0]
    return found


def classes_of(
    found: Iterable[int], classes: Sequence[str] | None = None, void: int | None = None
) -> tuple[tuple[str, ...], Coding]:
    """(names, coding) of the classes in masks that hold these numbers.

    Where `void` is not given, it is 255 if that is found and the others are 0, 1, … or as many as the names; else there
    is none. A class that no mask holds may be named where numbers are 0, 1, …

    >>> classes_of([0, 255])
    (('0', '255'), Coding(numbers=(0, 255), void=None))
    >>> classes_of([0, 1, 255], ["ground", "house"])
    (('ground', 'house'), Coding(numbers=(0, 1), void=255))
    >>> classes_of([0, 2], ["ground", "house", "road"])
    (('ground', 'house', 'road'), Coding(numbers=(0, 1, 2), void=None))
    """
    names = None if classes is None else checked_names(classes)
    everything = sorted(set(found))
    if void is None and VOID in everything and (names is None or len(names) != len(everything)):
        others = [number for number in everything if number != VOID]
        if names is not None or (len(others) > 1 and others[-1] < 2 * len(others)):
            void = VOID
    numbers = [number for number in everything if number != void]
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    shown = (shown or "none") + ("" if void is None else f", besides {void} for void")
    if len(numbers) < 2 or (names is None and len(numbers) > MOST):
        how = "mark at least two in them" if len(numbers) < 2 else "save them without smoothed borders, or name all"
        raise ValueError(f"got masks with the numbers {shown}; expected one for each of 2 to {MOST} classes: {how}")
    if names is not None:
        in_turn = [number for number in range(len(names) + 1) if number != void][: len(names)]
        numbers = in_turn if set(numbers) <= set(in_turn) else numbers
        if len(names) != len(numbers):
            raise ValueError(
                f"got {len(names)} names of classes for masks with the numbers {shown}; expected a name for each number"
            )
        if len(names) > VOID:
            raise ValueError(f"got {len(names)} names of classes; expected at most {VOID}")
    return names or tuple(map(str, numbers)), Coding(tuple(numbers), void)


def data_set(folder: Path, pairs: dict[str, Pairs], names: tuple[str, ...], coding: Coding, channels: int) -> DataSet:
    """The images and masks of a folder, each of its own size."""
    look = IMAGENET[channels]
    parts: dict[str, Part | None] = {
        part: Part(MaskPairs(tuple(found.inputs), tuple(found.targets), channels, coding), look)
        for part, found in pairs.items()
    }
    return DataSet(
        folder.name,
        "segmentation",
        parts["train"],  # type: ignore[arg-type]
        parts.get("validation"),
        parts.get("test"),
        channels,
        names,
        look,
        void=VOID,
    )
