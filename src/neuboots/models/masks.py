"""A model of masks: trained on images and masks of the same names, gives a class and an uncertainty to every pixel.

    images/<name>.jpg, masks/<name>.png → labels, entropy, mutual information of each pixel;   a row for each image

A pixel is unsure where its probability is below t: on held-out images, the surer pixels are wrong half as often as all
of them. The model abstains from an image with more unsure pixels than 95 % of the held-out ones, or unlike all of them.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from neuboots.data import CropFlip, Part
from neuboots.data.folders import IMAGENET
from neuboots.keys import whole
from neuboots.losses import CrossEntropy
from neuboots.models.model import Answers, Card, Chunk, Column, Model
from neuboots.models.pairs import (
    VOID,
    Coding,
    MaskPairs,
    classes_of,
    data_set,
    large_enough,
    numbers_in,
    pairs_of,
    pairs_to_test,
    without_masks,
)
from neuboots.models.pictures import (
    Features,
    Look,
    Say,
    check_fit,
    checked_size,
    fitted_size,
    in_chunks,
    median_size,
    method_for,
    named,
    parts_of,
    passed_over,
    pictures_at,
    trained,
)
from neuboots.models.segmented import card_figures, measured, one_by_one, unsure_limits
from neuboots.models.unusual import Unusual
from neuboots.nets import small_deeplab
from neuboots.prediction import Predictor
from neuboots.progress import bar
from neuboots.saving import load, read_tensors, replaced_folder, save
from neuboots.tasks.segmentation import Maps, segment, write_maps
from neuboots.tasks.segmentation.windows import tiles_of, window_for
from neuboots.training import Recipe

LARGEST = 128  # pixels of the longer side of a crop to train on, unless told otherwise
WINDOW = 256  # pixels that the net sees at once of a large image
AT_ONCE = 1 << 18  # pixels of a chunk
LARGE = 1 << 20  # pixels of an image of which only a few are held at once
LOOKS = 6_000  # at crops of 128 × 128 in training, all epochs together
EXAMPLE = (64, 64)  # an image to try the net with
_LONGEST = 120  # bytes of the beginning of a file's name


@dataclass(frozen=True, eq=False)
class MaskModel(Model):
    """A predictor of the class of each pixel, with what its files must become."""

    kind: ClassVar[str] = "masks"
    files: ClassVar[tuple[str, ...]] = ("predictor", "arrays.safetensors")
    writes_folder: ClassVar[bool] = True  # `predict_folder` writes pictures; a table would have one row for each

    card: Card
    fitted: Predictor
    names: tuple[str, ...]
    coding: Coding
    look: Look
    features: Features
    unusual: Unusual
    sure: float = 0.0  # t: the least probability of a pixel that is not unsure
    most_unsure: float = 1.0  # the largest share of unsure pixels of an image that is answered

    @property
    def predictor(self) -> Predictor:
        return self.fitted

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names

    # -- rows

    def read(self, source: str | Path, *, labelled: bool = False) -> Iterator[Chunk]:
        """The images of a folder, in it or below, or of a single file; `labelled`: with their masks. A chunk has images
        of one size, and y the class of each pixel, 255 where there is none: (N, H, W)."""
        if labelled:
            root, pairs, notes = pairs_to_test(source)
            images: Sequence[str | Path] = pairs.inputs
            notes += passed_over(root, pairs.passed_over)
            rows = MaskPairs(tuple(pairs.inputs), tuple(pairs.targets), self.look.channels, self.coding)
        else:
            root, images, notes = self._images_at(source)
            rows = None
        return self._chunks([named(root, image) for image in images], images, rows, notes)

    def _images_at(self, source: str | Path) -> tuple[Path, list[Path], list[str]]:
        root, found = pictures_at(source)
        return root, without_masks(root, found.files), passed_over(root, found.others)

    def _chunks(
        self, names: list[str], images: Sequence[str | Path], masks: MaskPairs | None, notes: list[str]
    ) -> Iterator[Chunk]:
        part = None if masks is None else Part(masks, self.look.normalisation)

        def read(i: int) -> tuple[Tensor, Tensor | None]:
            return (large_enough(self.look(images[i]), images[i]), None) if part is None else part[i]

        def full(rows: Any, row: tuple[Tensor, Tensor | None]) -> bool:
            shape = row[0].shape
            return rows[-1][0].shape != shape or (len(rows) + 1) * shape[1] * shape[2] > AT_ONCE

        for numbers, rows, said in in_chunks(names, read, full=full, notes=notes):
            keys = {"file": np.array([names[i] for i in numbers], dtype=object)}
            y = None if part is None else torch.stack([mask for _, mask in rows])
            yield Chunk(keys, torch.stack([x for x, _ in rows]), y, said)

    def maps(self, chunk: Chunk, *, num_samples: int = 100) -> Maps:
        """Probabilities and uncertainties of each pixel, of large images window by window."""
        num_samples = min(num_samples, self.fitted.num_distinct or num_samples)  # each member once
        return segment(self.fitted, chunk.x, num_samples, seed=self.card.seed, window=WINDOW, batch_size=4)

    def answer(self, chunk: Chunk, *, num_samples: int = 100, level: float = 0.95) -> Answers:
        """One row for each image: how unsure its pixels are, and the share of each class."""
        return self.described(chunk, self.maps(chunk, num_samples=num_samples))

    def described(self, chunk: Chunk, maps: Maps) -> Answers:
        """The rows of images whose maps are known."""
        unsure = np.asarray((maps.confidence < self.sure).double().flatten(1).mean(1))
        score = self.unusual.score(window_features(self.features, chunk.x))
        columns: dict[str, Column] = {
            "mean_entropy": np.asarray(maps.entropy.double().flatten(1).mean(1)),
            "mean_mutual_information": np.asarray(maps.mutual_information.double().flatten(1).mean(1)),
            "unsure_share": unsure,
            "ood_score": score,
            "abstain": (score > 1) | (unsure > self.most_unsure),
        }
        shares = torch.stack([(maps.labels == c).double().flatten(1).mean(1) for c in range(len(self.names))])
        columns |= {f"share_{name}": np.asarray(share) for name, share in zip(self.names, shares, strict=True)}
        return Answers(columns, maps.probs)

    # -- pictures

    def write_maps(self, chunk: Chunk, folder: Path, *, names: Sequence[str], num_samples: int = 100) -> Answers:
        """Labels, an overlay and the uncertainties of each image as PNG files of a folder; gives the rows as well."""
        maps = self.maps(chunk, num_samples=num_samples)
        write_maps(
            maps,
            chunk.x,
            folder,
            names=names,
            labels=chunk.y,
            void=VOID,
            classes=self.names,
            normalisation=self.look.normalisation,
        )
        return self.described(chunk, maps)

    def predict_folder(
        self, source: str | Path, out: str | Path, *, num_samples: int = 100, progress: bool = True
    ) -> dict[str, Any]:
        """Write out/summary.csv, a row for each image, and pictures of all in out/maps; gives what there was.

        The folder appears as a whole at the end. Only an earlier one of this kind is replaced.
        """
        target = Path(out)
        root, images, said = self._images_at(source)
        chunks = self._chunks([named(root, image) for image in images], images, None, said)
        known = ("summary.csv", "maps") if (target / "summary.csv").is_file() else ()
        used: set[str] = set()
        notes: list[str] = []
        abstained, unsure = 0, 0.0
        with replaced_folder(target, known, "an earlier prediction of masks") as aside:
            maps = aside / "maps"
            with (
                (aside / "summary.csv").open("w", newline="", encoding="utf-8") as file,
                bar("segmenting", len(images), show=progress) as step,
            ):
                writer = csv.writer(file)
                for chunk in chunks:
                    stems = [_stem(str(name), used) for name in chunk.keys["file"]]
                    columns = self.write_maps(chunk, maps, names=stems, num_samples=num_samples).columns
                    table = {**chunk.keys, "maps": np.array([f"maps/{stem}-sheet.png" for stem in stems]), **columns}
                    if file.tell() == 0:
                        writer.writerow(table)
                    writer.writerows(zip(*(_cells(column) for column in table.values()), strict=True))
                    notes += chunk.notes
                    abstained += int(columns["abstain"].sum())
                    unsure += float(columns["unsure_share"].sum())
                    for _ in stems:
                        step("segmenting")
        return {
            "images": len(used),
            "abstained": abstained,
            "unsure_share": unsure / len(used),
            "out": str(out),
            "notes": notes,
        }

    # -- files

    def _write(self, folder: Path) -> dict[str, Any]:
        from safetensors.torch import save_file

        save(self.fitted, folder / "predictor")
        save_file(self.unusual.state(), folder / "arrays.safetensors")
        return {
            "classes": self.names,
            "numbers": self.coding.numbers,
            "void": self.coding.void,
            "look": self.look.config(),
            "sure": self.sure,
            "most_unsure": self.most_unsure,
        }

    @classmethod
    def _read(cls, folder: Path, held: dict[str, Any], card: Card) -> "MaskModel":
        fitted, look = load(folder / "predictor"), Look.restore(held["look"])
        names, coding = tuple(held["classes"]), Coding(tuple(held["numbers"]), held["void"])
        features = Features.of(fitted, look.channels, EXAMPLE)
        unusual = Unusual.restore(read_tensors(folder / "arrays.safetensors"))
        check_fit(folder, fitted, features, unusual, len(names), (look.channels, *EXAMPLE))
        return cls(card, fitted, names, coding, look, features, unusual, held["sure"], held["most_unsure"])


def _stem(name: str, used: set[str]) -> str:
    """What the names of an image's pictures begin with: the name of its file as any file system takes it, each once."""
    plain = re.sub(r"[^\w.() -]+", "-", name.rsplit(".", 1)[0]).strip(". -")
    plain = plain.encode()[:_LONGEST].decode(errors="ignore").strip(". -") or "image"
    stem, k = plain, 1
    while stem.casefold() in used:
        k += 1
        stem = f"{plain}-{k}"
    used.add(stem.casefold())
    return stem


def _cells(column: Column) -> list[Any]:
    """As a CSV has them; truth in small letters, as in JSON."""
    return [str(value).lower() for value in column.tolist()] if column.dtype == bool else column.tolist()


def window_features(features: Features, x: Tensor) -> Tensor:
    """The mean of the features over windows of images: (N, C, H, W) → (N, D)."""
    size = x.shape[2:]
    tiles = tiles_of(size, window_for(size, WINDOW, overlap=0.0), overlap=0.0)
    found = [features(x[(slice(None), slice(None), *tile.window)]) for tile in tiles]
    return torch.stack(found).mean(0)


# -- training ------------------------------------------------------------------------------------------


def fit_masks(
    path: str | Path,
    *,
    method: str = "neuboots",
    epochs: int | None = None,
    size: Any = None,
    channels: int = 3,
    classes: Sequence[str] | None = None,
    void: int | None = None,
    test: float = 0.1,
    num_samples: int = 30,
    seed: int = 0,
    command: str = "",
    progress: bool = True,
    say: Say | None = None,
) -> MaskModel:
    """Train on path/images and path/masks, in or above train, val and test; the card has figures of the test part.

    The masks' numbers are classes, named by `classes` in their order, and `void` where a pixel has none; without, 255
    is void where the others are 0, 1, … The net sees crops of `size`, one number or height and width; without, of the
    median of the files, at most 128 pixels. `say` is told what was found and chosen before the training begins.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("images", "masks"):
    ...     (folder / name).mkdir()
    ...     for i in range(8):
    ...         picture = Image.new("L", (20, 16), 0)
    ...         picture.paste(255, (i, 4, i + 9, 12))  # white on black, in both
    ...         picture.save(folder / name / f"{i}.png")
    >>> model = fit_masks(folder, classes=["paper", "ink"], epochs=1, num_samples=2, progress=False)
    >>> model.classes, model.coding.numbers, model.card.rows
    (('paper', 'ink'), (0, 255), {'train': 6, 'held out': 1, 'test': 1})
    """
    maker = method_for(method, "segmentation", CrossEntropy(ignore_index=VOID))
    if channels not in IMAGENET:
        raise ValueError(f"got channels={channels!r}; expected 1 (grey) or 3 (colour)")
    folder, pairs = pairs_of(path)
    found = numbers_in([mask for part in pairs.values() for mask in part.targets], progress=progress)
    names, coding = classes_of(found, classes, None if void is None else whole("void", void, least=0))
    parts = parts_of(
        data_set(folder, pairs, names, coding, channels),
        test,
        seed=seed,
        files=lambda source: source.images,
        progress=progress,
    )
    median = median_size(pairs["train"].inputs)
    size = fitted_size(median, LARGEST, least=16) if size is None else checked_size(size)
    look = Look(channels, IMAGENET[channels])
    crop = CropFlip(size, scale=(0.75, 1.5), fill=look.normalisation.mean, void=VOID)
    recipe = _recipe(len(parts.train), median, size, epochs, seed, progress)
    others = [file for part in pairs.values() for file in part.passed_over]
    notes = [*passed_over(folder, others), *parts.notes, _about(names, coding)]
    chosen = {"net": "small_deeplab", "size": list(size), "epochs": recipe.epochs}
    if say is not None:
        say(chosen, notes)
    predictor = trained(
        method,
        maker,
        partial(small_deeplab, len(names), channels),
        replace(parts.train, augment=crop),
        replace(parts.held_out, augment=replace(crop, scale=(1.0, 1.0), flips=())),
        recipe,
    )
    features = Features.of(predictor, channels, EXAMPLE)
    known, unknown = (
        torch.cat([window_features(features, chunk.x) for chunk in one_by_one(part)])
        for part in (parts.train, parts.held_out)
    )
    card = Card("segmentation", "mask", method, parts.rows, seed, command, version("neuboots"))
    model = MaskModel(card, predictor, names, coding, look, features, Unusual.learn(known, unknown))
    sure, most_unsure = unsure_limits(model, parts.held_out, num_samples)
    model = replace(model, sure=sure, most_unsure=most_unsure)
    figures: dict[str, Any] = {"chosen": chosen, "files": notes}
    if parts.test is not None:
        tested = measured(model, one_by_one(parts.test), num_samples, total=len(parts.test), progress=progress)
        figures = card_figures(tested, names) | figures
    return replace(model, card=replace(card, figures=figures))


def _recipe(
    n: int, image: tuple[int, int], size: tuple[int, int], epochs: int | None, seed: int, progress: bool
) -> Recipe:
    """Many passes over few images, fewer over many or large crops; few large images in memory at once."""
    if epochs is None:
        epochs = max(10, min(60, round(LOOKS * LARGEST**2 / (size[0] * size[1]) / n)))
    epochs = whole("epochs", epochs, least=1)
    return Recipe(
        epochs=epochs,
        batch_size=8 if image[0] * image[1] <= LARGE else 2,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-2),
        seed=seed,
        patience=max(5, epochs // 3),
        progress=progress,
    )


def _about(names: tuple[str, ...], coding: Coding) -> str:
    """What the numbers in the masks were taken for."""
    pairs = zip(coding.numbers, names, strict=True)
    of = ", ".join(name if name == str(number) else f"{number} is {name}" for number, name in pairs)
    void = "no number is void" if coding.void is None else f"{coding.void} is void: its pixels count nowhere"
    return f"classes by their numbers in the masks: {of}; {void}"
