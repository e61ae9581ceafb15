"""What models of images and of masks share: how files are read, how a folder is dealt out, and what is unusual.

A file that cannot be read is passed over and named; where more than a tenth are like that, all are refused, since then
the folder is not what it was taken for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuboots.data import Corrupt, DataSet, Missing, Normalisation, Part
from neuboots.data.folders import IMAGES
from neuboots.data.learning import deal
from neuboots.data.listing import Found, files_in, folders_in, split_folders
from neuboots.data.parts import in_unit_range
from neuboots.data.pixels import image_of, size_of
from neuboots.keys import whole
from neuboots.losses import Loss
from neuboots.methods import METHODS, ScaledPredictor
from neuboots.models.unusual import Unusual
from neuboots.prediction import Method, Predictor
from neuboots.progress import bar
from neuboots.surgery import Split
from neuboots.tasks.ood.features import features_of, trained_net
from neuboots.training import Recipe

BROKEN = 0.1  # the share of broken files that is passed over; one always is
HELD = 1 << 30  # bytes of pictures that are kept in memory while training
HELD_OUT = 0.2  # the share of the training pictures that stops the training and calibrates
SEEN = 256  # files whose sizes are looked at
CELLS = 8  # of each side, whose mean pixels stand for features where a method has no net to take them from
ROWS = 64  # pictures at once

Say = Callable[[Mapping[str, Any], Sequence[str]], None]
"""What is told before a training begins: what was chosen, by name, and notes on the files."""

# -- files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a file becomes an input (C, H, W): in grey or colour, of one size or of its own, normalised."""

    channels: int
    normalisation: Normalisation
    size: tuple[int, int] | None = None

    def __call__(self, file: str | Path) -> Tensor:
        return self.normalisation(in_unit_range(image_of(file, self.channels, file, size=self.size)))

    def config(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "mean": self.normalisation.mean,
            "std": self.normalisation.std,
            "size": self.size,
        }

    @classmethod
    def restore(cls, config: dict[str, Any]) -> "Look":
        size = None if config["size"] is None else (int(config["size"][0]), int(config["size"][1]))
        return cls(int(config["channels"]), Normalisation(tuple(config["mean"]), tuple(config["std"])), size)


def pictures_at(source: str | Path) -> tuple[Path, Found]:
    """(the folder that names are counted from, the files below it), of a folder or of a single file."""
    path = Path(source).expanduser()
    if path.is_file():
        if not path.name.lower().endswith(IMAGES):
            raise Missing(f"got {path}, which is no image by its name; expected one that ends in {', '.join(IMAGES)}")
        return path.parent, Found([path], [])
    if not path.is_dir():
        raise Missing(f"got {str(source)!r}, which is not there; expected a folder of images, or one image")
    found = files_in(path, IMAGES)
    if not found.files:
        others = f" ({len(found.others)} files of other kinds were passed over)" if found.others else ""
        raise Missing(f"got {path} without an image{others}; expected files that end in {', '.join(IMAGES)}")
    return path, found


def part_to_test(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder whose labels may be compared with: its test part, where it has parts; and what to say of that.

    The rest of such a folder is what a model was trained on, and would flatter it.
    """
    splits = split_folders(folder)
    if not splits or not folders_in(splits["train"]):  # a class may be called train: its images lie right in it
        return folder, ()
    if "test" not in splits:
        names = ", ".join(entry.name for entry in splits.values())
        raise Missing(f"got {folder} with the parts {names}; expected one to test with: give {folder}/test, or another")
    return splits["test"], (f"of {folder} only the part {splits['test'].name} is read",)


def in_chunks(
    names: Sequence[str],
    read: Callable[[int], Any],
    *,
    full: Callable[[Sequence[Any], Any], bool],
    notes: Sequence[str] = (),
) -> Iterator[tuple[list[int], list[Any], tuple[str, ...]]]:
    """(numbers of files, what was read of them, notes), some at a time; files that cannot be read are in the notes.

    `full` says whether what was read so far leaves no place for the next. All notes come with some rows, so that
    nobody has to look at a chunk without any.
    """
    numbers: list[int] = []
    rows: list[Any] = []
    said, done = list(notes), 0
    for i, name in enumerate(names):
        try:
            row = read(i)
        except Corrupt as fault:
            said.append(f"passed over {name}: {reason(fault)}")
            continue
        if rows and full(rows, row):
            yield numbers, rows, tuple(said)
            numbers, rows, said = [], [], []
        numbers.append(i)
        rows.append(row)
        done += 1
    if not done:
        raise Corrupt(f"got {len(names)} file(s) of which none can be read ({said[-1]}); expected whole images")
    yield numbers, rows, tuple(said)


def reason(fault: Corrupt) -> str:
    """What is wrong, without what to do about it, which is said once for all files."""
    words = str(fault).split("; expected")[0]
    return words.split(": ", 1)[1] if words.startswith("cannot read ") and ": " in words else words


def few(names: Iterable[str], most: int = 5) -> str:
    """Some of these names, for a sentence.

    >>> few("abc"), few("abc", 2)
    ('a, b, c', 'a, b and 1 more')
    """
    found = list(names)
    return ", ".join(found) if len(found) <= most else f"{', '.join(found[:most])} and {len(found) - most} more"


def passed_over(root: Path, others: Iterable[str | Path]) -> list[str]:
    """A note on files that are no images by their names, if there are any."""
    names = [named(root, file) for file in others]
    return [f"passed over {len(names)} file(s) that are no images by their names: {few(names)}"] if names else []


def named(root: Path, file: str | Path) -> str:
    """The name of a file as seen from the folder, the same on every machine, with � for what is no UTF-8."""
    path = Path(file)
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# -- sizes ---------------------------------------------------------------------------------------------


def median_size(files: Sequence[str | Path]) -> tuple[int, int]:
    """(H, W), each the median over some of the files, at even distances."""
    chosen = [files[int(i)] for i in np.linspace(0, len(files) - 1, min(SEEN, len(files))).round()]
    sizes = []
    for file in chosen:
        try:
            sizes.append(size_of(file, file))
        except Corrupt:
            continue  # it is named when it is read
    if not sizes:
        raise Corrupt(f"got {len(files)} files of which none can be read, such as {files[0]}; expected whole images")
    height, width = np.median(sizes, axis=0)
    return int(height), int(width)


def fitted_size(size: tuple[int, int], most: int, *, step: int = 4, least: int = 8) -> tuple[int, int]:
    """A size of these proportions, whose longer side is at most so long, in multiples of `step`.

    >>> fitted_size((480, 640), 64), fitted_size((28, 28), 64)
    ((48, 64), (28, 28))
    """
    scale = min(1.0, most / max(size))
    height, width = (max(least, round(side * scale / step) * step) for side in size)
    return height, width


def checked_size(size: Any) -> tuple[int, int]:
    """A size that was given: one number for a square, or height and width."""
    sides = (size, size) if not isinstance(size, Sequence) else tuple(size)
    if len(sides) != 2:
        raise ValueError(f"got size={size!r}; expected one number of pixels, or height and width")
    height, width = (whole("size", side, least=8) for side in sides)
    return height, width


# -- parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Held:
    """A source in memory: pictures and targets of any sizes."""

    x: list[Tensor]
    y: list[Tensor]

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        return [self.x[row] for row in rows], self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return [self.y[row].long() for row in rows]


@dataclass(frozen=True)
class Parts:
    """Pictures to train with, those that are held out of that, those to test with, and what is to be said of them."""

    train: Part
    held_out: Part
    test: Part | None
    notes: tuple[str, ...]

    @property
    def rows(self) -> dict[str, int]:
        return {
            "train": len(self.train),
            "held out": len(self.held_out),
            "test": 0 if self.test is None else len(self.test),
        }


def parts_of(data: DataSet, test: float, *, seed: int, files: Callable[[Any], Sequence[str]], progress: bool) -> Parts:
    """The pictures of the folder that can be read, in three parts: those with a folder of their own, others by chance.

    `files` gives the files of a source. Of every class one picture at least is left to train with.
    """
    if isinstance(test, bool) or not isinstance(test, int | float) or not 0 <= test < 1:
        raise ValueError(f"got test={test!r}; expected a share of the images from 0 to below 1")
    given = {name: part for name in ("train", "validation", "test") if isinstance(part := getattr(data, name), Part)}
    total = sum(map(len, given.values()))
    with bar("reading", total, show=progress) as step:
        found = {name: _readable(part, files(part.source), step) for name, part in given.items()}
    faults = [fault for _, some in found.values() for fault in some]
    parts = {name: part for name, (part, _) in found.items()}
    train, labels = parts["train"], parts["train"].targets
    counts = None if labels is None else labels.bincount(minlength=data.num_classes)
    _check_readable(parts, faults, total, data.classes, counts)
    shares = {name: 0.0 if name in parts else share for name, share in (("validation", HELD_OUT), ("test", test))}
    least = (1 if counts is None else len(counts)) + sum(share > 0 for share in shares.values())
    if len(train) < least:
        of = "" if counts is None else f" of {len(counts)} classes"
        raise Missing(
            f"got {len(train)} image(s){of} to train with; expected at least {least}, so that some can be held out and "
            "tested with: add images"
        )
    place = deal(len(train), shares["validation"], shares["test"], seed=seed, strata=labels)
    held_out, tested = (
        parts[name] if name in parts else train.take((place == number).nonzero()[:, 0])
        for number, name in ((1, "validation"), (2, "test"))
    )
    notes = [f"passed over {len(faults)} of {total:,} images that cannot be read: {few(faults)}"] if faults else []
    return Parts(train.take((place == 0).nonzero()[:, 0]), held_out, tested if len(tested) else None, tuple(notes))


def _check_readable(
    parts: Mapping[str, Part], faults: Sequence[str], total: int, classes: Sequence[str], counts: Tensor | None
) -> None:
    """Are there images enough, in every part and of every class?"""
    if len(faults) > max(1, BROKEN * total):
        raise Corrupt(
            f"got {total:,} images of which {len(faults):,} cannot be read, the first of them {faults[0]}; expected at "
            f"most {BROKEN:.0%} broken ones: fetch them again, or remove them"
        )
    empty = [name for name, part in parts.items() if not len(part)]
    if counts is not None and not bool(counts.all()):
        empty.append(repr(classes[int(counts.argmin())]))
    if empty:
        raise Corrupt(f"got no image of {empty[0]} that can be read ({faults[0]}); expected some: add whole ones")


def _readable(part: Part, files: Sequence[str], step: Callable[[str], None]) -> tuple[Part, list[str]]:
    """The rows of a part that can be read, in memory if they are small, and what is wrong with the others."""
    kept: list[int] = []
    held, size = Held([], []), 0
    faults = []
    for row in range(len(part.source)) if part.rows is None else part.rows:
        try:
            (x,), (y,) = part.source.read([row])
        except Corrupt as fault:
            faults.append(f"{files[row]} ({reason(fault)})")
        else:
            y = y.to(torch.uint8) if y.ndim > 1 else y  # of a mask, whose classes and void are bytes
            size += x.nbytes + y.nbytes
            kept.append(row)
            if size <= HELD:
                held.x.append(x)
                held.y.append(y)
        step("reading")
    if size > HELD:
        return replace(part, rows=tuple(kept)), faults
    return Part(held, part.normalise), faults


def rows_of(part: Part, size: int = ROWS) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inputs and targets of a part, some at a time, in its order."""
    for start in range(0, len(part), size):
        rows = part.__getitems__(range(start, min(start + size, len(part))))
        yield [x for x, _ in rows], [y for _, y in rows]


# -- methods -------------------------------------------------------------------------------------------


def method_for(name: str, task: Any, loss: Loss) -> Method:
    """The method of this name, if it can do the task, or a sentence."""
    able = [entry.name for entry in METHODS.values() if task in entry.tasks]
    if name not in able:
        raise ValueError(f"got the method {name!r}; expected one for {task}: {', '.join(able)}")
    return METHODS[name].make(loss=loss)


def trained(
    name: str, method: Any, make_net: Callable[[], nn.Module], train: Part, held_out: Part, recipe: Recipe
) -> Predictor:
    """The method fitted, with the weights that did best on what is held out."""
    if name == "swag":  # its Gaussian is that of the last iterates: it must get there
        recipe = replace(recipe, patience=None)
    predictor: Predictor = method.fit(make_net, train, recipe, validation=held_out)
    return predictor


# -- unusual pictures ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Features:
    """φ of images (N, C, H, W): what the head of the trained net reads, in the mean over pixels; else mean pixels."""

    split: Split | None

    @classmethod
    def of(cls, predictor: Predictor, channels: int, size: tuple[int, int]) -> "Features":
        """Those of a predictor; the same again for the same predictor, saved and loaded."""
        inner = predictor.inner if isinstance(predictor, ScaledPredictor) else predictor
        few = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
        try:
            return cls(trained_net(inner, None, None, few))
        except ValueError:  # it has none whose features are what it predicts by
            return cls(None)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """(N, D)."""
        if self.split is None:
            return functional.adaptive_avg_pool2d(x, CELLS).flatten(1)
        (phi,) = features_of(self.split, (), x)
        return phi.float().cpu()


def check_fit(
    folder: Path,
    predictor: Predictor,
    features: Features,
    unusual: Unusual,
    classes: int,
    shape: tuple[int, int, int],
) -> None:
    """Do the parts of a saved model belong together? Images (C, H, W) of this shape are given to all of them."""
    x = torch.zeros(1, *shape)
    try:
        fits = predictor.summarize(x, 1).probs.shape[1] == classes and len(unusual.score(features(x))) == 1
    except (RuntimeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"the parts of {folder} do not fit together; expected what one neuboots fit wrote")
