"""`neuboots fit`: from a file to a model, and to an honest word on how good it is."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from neuboots.cli._console import (
    DataPath,
    UsageError,
    collect_warnings,
    columns_in_words,
    echo,
    pictures_in_words,
    print_json,
    summary_in_words,
    user_errors,
)

Kind = Literal["table", "images", "masks"]

_TABLES = ("target", "task", "ignore", "max_categories", "max_width", "max_error")
_PICTURES = ("size", "channels")
OPTIONS: dict[Kind, tuple[str, ...]] = {
    "table": _TABLES,
    "images": (*_PICTURES, "max_error"),
    "masks": (*_PICTURES, "classes", "void"),
}
"""Which options belong to which kind of data; the others belong to all."""


@dataclass(frozen=True)
class Fit:
    """Train on a table or a folder of pictures, and say how far the result can be trusted.

    A table: neuboots fit houses.csv --target price --out houses-model. Whether the target is classes or numbers, and
    what each column is, is found out and said. Some rows are held out of the training, to stop it in time and to
    calibrate the intervals; others are kept for the test, and give the figures that are printed.
    """

    data: DataPath
    """A table with names in its first line (CSV, Parquet or JSON Lines); a folder of folders of images, one for each
    class; or a folder with the folders images and masks."""
    target: str | None = None
    """The column to predict, of a table."""
    out: Path | None = None
    """A folder for the model, which predict, evaluate and next read; an earlier model there is replaced."""
    task: Literal["classification", "regression"] | None = None
    """Classes or numbers; by default what the target looks like."""
    ignore: tuple[str, ...] = ()
    """Columns to leave out, such as names and numbers of rows."""
    method: str = "neuboots"
    """How uncertainty is found; `neuboots methods` lists all."""
    epochs: int | None = None
    """Passes over the training rows at most; by default enough."""
    test: float = 0.1
    """The share of the rows that is kept for the test; 0 for none."""
    max_error: float = 0.05
    """The share of wrong answers to allow where the model does not abstain, of classes."""
    max_width: float | None = None
    """The widest 95 % interval to answer with, of numbers and in their units; by default what says more than the spread
    of the targets."""
    max_categories: int = 256
    """A column of more different texts is no column of categories, and left out."""
    size: tuple[int, ...] = ()
    """Pixels that pictures are brought to: one number, or height and width; by default by their own size."""
    channels: Literal[1, 3] = 3
    """Pictures in grey or in colour."""
    classes: tuple[str, ...] = ()
    """Names of the classes in masks, in the order of their numbers."""
    ignore_index: int | None = None
    """The number of pixels in masks that count nowhere; by default 255, unless it is a class."""
    num_samples: int | None = None
    """Bootstrap replicates B behind each figure; by default 100, and 30 for masks."""
    seed: int = 0
    """Governs the parts, the training and the replicates."""
    json: bool = False
    """One JSON object on standard output, for machines; words go to standard error."""

    @property
    def command(self) -> str:
        """The command line that repeats this run."""
        words = ["neuboots", "fit", self.data]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                option = f"--{field.name.replace('_', '-')}"
                words += (
                    [option] if value is True else [option, *map(str, value if isinstance(value, tuple) else [value])]
                )
        return shlex.join(words)

    def run(self) -> None:
        """Train, print and save."""
        say = partial(echo, aside=self.json)
        with user_errors(), collect_warnings() as notes:
            kind = self._check()
            model = self._fit(kind, say)
            model.save(self._place)
            for line in (*summary_in_words(model), *(f"  note: {note}" for note in notes)):
                say(line)
        say(f"\nSaved to {self.out}. Next: {self._next(kind)}")
        if self.json:
            print_json({"model": str(self.out), "kind": kind, **asdict(model.card), "notes": notes})

    def _fit(self, kind: Kind, say: Callable[..., None]) -> Any:
        common: dict[str, Any] = {
            "method": self.method,
            "epochs": self.epochs,
            "test_fraction": self.test,
            "num_samples": self.num_samples or (30 if kind == "masks" else 100),
            "seed": self.seed,
            "command": self.command,
            "progress": not self.json,
        }
        if kind == "table":
            from neuboots.app.tabular import fit_table

            assert self.target is not None
            return fit_table(
                self.data,
                self.target,
                task=self.task,
                ignore=self.ignore,
                max_categories=self.max_categories,
                max_error=self.max_error,
                max_width=self.max_width,
                on_start=partial(self._describe, say),
                **common,
            )
        size = None if not self.size else self.size[0] if len(self.size) == 1 else self.size
        common |= {"size": size, "channels": self.channels, "on_start": partial(self._describe_pictures, say, kind)}
        if kind == "images":
            from neuboots.app.images import fit_images

            return fit_images(self.data, max_error=self.max_error, **common)
        from neuboots.app.masks import fit_masks

        return fit_masks(self.data, classes=self.classes or None, ignore_index=self.ignore_index, **common)

    def _describe_pictures(
        self, say: Callable[..., None], kind: Kind, chosen: Mapping[str, Any], notes: Sequence[str]
    ) -> None:
        for line in pictures_in_words(self.data, kind, chosen, notes):
            say(line)

    def _describe(self, say: Callable[..., None], schema: Any, notes: Sequence[str]) -> None:
        for line in columns_in_words(self.data, schema, notes, task=self.task, ignore=self.ignore):
            say(line)

    def _next(self, kind: Kind) -> str:
        new = "NEW_IMAGES" if kind != "table" else f"NEW{Path(self.data).suffix or '.csv'}"
        out = "predictions" if kind == "masks" else "predictions.csv"
        return f"neuboots predict {shlex.quote(str(self.out))} {new} --out {out}"

    # -- before anything takes long ----------------------------------------------------------------------

    def _check(self) -> Kind:
        from neuboots.app import check_model_folder
        from neuboots.methods import METHODS

        kind = self._kind()
        for field in fields(self):
            given = getattr(self, field.name) != field.default
            belongs = [name for name, options in OPTIONS.items() if field.name in options]
            if given and belongs and kind not in belongs:
                option = f"--{field.name.replace('_', '-')}"
                raise UsageError(
                    f"{option} is for {' and '.join(belongs)}, but {self.data} is read as {kind}; leave it out"
                )
        for name, least in (("epochs", 1), ("num_samples", 2), ("seed", 0), ("max_categories", 2)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**63:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; give a whole number of at least {least}")
        if not 0 <= self.test < 1:
            raise UsageError(f"--test is {self.test}; give a share of the rows from 0 to below 1, such as 0.1")
        if self.method not in METHODS:
            raise UsageError(f"--method is {self.method}; give one of {', '.join(METHODS)}")
        if kind == "table" and self.target is None:
            raise UsageError("--target is missing; give the name of the column to predict")
        if self.out is None:
            raise UsageError("--out is missing; give a folder for the model, such as --out my-model")
        place = self._place.absolute()
        there = next(path for path in (place, *place.parents) if path.exists())
        if there != place and not (there.is_dir() and os.access(there, os.W_OK)):
            raise UsageError(
                f"--out is {self.out}, but {there} is no folder that can be written to; give another place"
            )
        if there == place and not os.access(place.parent, os.W_OK):
            raise UsageError(f"--out is {self.out}, but {place.parent} may not be written to; give another place")
        check_model_folder(place)
        return kind

    @property
    def _place(self) -> Path:
        assert self.out is not None, "checked before"
        return self.out.expanduser()

    def _kind(self) -> Kind:
        """What the data are: a file is a table, a folder has class folders, or images and masks."""
        if self.data == "-":
            raise UsageError("DATA is -, but training reads its rows several times; save them to a file, and give that")
        path = Path(self.data).expanduser()
        if not path.is_dir():
            return "table"
        if self.target is not None:
            raise UsageError(
                f"--target is {self.target}, but {self.data} is a folder; give the file of a table, or no --target for "
                "pictures"
            )
        from neuboots.data.image_folder import find_split_folders

        for folder in (path, *find_split_folders(path).values()):
            if (folder / "images").is_dir() and ((folder / "masks").is_dir() or (folder / "labels").is_dir()):
                return "masks"
        return "images"
