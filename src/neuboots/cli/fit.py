"""`neuboots fit`: train a model on a table or a folder of images, and report its metrics on a test split."""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from neuboots.cli._console import (
    DataPath,
    UsageError,
    collect_warnings,
    command_line,
    echo,
    option_name,
    print_json,
    user_errors,
)

if TYPE_CHECKING:
    from neuboots.app import ModelCard
    from neuboots.data.tabular import TableSchema

Kind = Literal["table", "images", "masks"]
_MAX_COLUMNS = 12  # columns that are described
_MIN_TEST_ROWS = 50  # fewer give unreliable metrics


@dataclass(frozen=True)
class Fit:
    """Train a model on a table or a folder of images, and report how far its predictions can be trusted.

    neuboots fit houses.csv --target price --out houses-model. The task and the type of each column are inferred and
    printed. Held-out rows stop the training early and calibrate the uncertainty; the printed metrics come from a
    separate test split.

    Args:
        data: A table with a header row (CSV, Parquet or JSON Lines); a folder with one folder of images per class; or a
            folder with the folders images and masks.
        target: Column to predict (tables).
        out: Folder of the model, for predict, evaluate and suggest; an earlier model there is replaced.
        task: Task of a table; by default inferred from the target.
        ignore: Columns to exclude, such as names and row numbers.
        method: Method of uncertainty quantification; see `neuboots list methods`.
        epochs: Maximum number of epochs; by default chosen from the size of the data.
        test_fraction: Fraction of the rows for the test split; 0 for none.
        max_error: Error rate of class predictions to guarantee where the model does not abstain.
        max_width: Abstain where the 95 % interval of a regression is wider; by default where the standard deviation
            exceeds that of the targets.
        max_categories: Exclude a text column with more distinct values.
        size: Size of images in pixels: one number, or height and width; by default their median, limited.
        channels: Grey or color images.
        classes: Names of the classes in masks, in the order of their values.
        ignore_index: Value of mask pixels to ignore; by default 255, unless it is a class.
        num_samples: Bootstrap replicates B; by default 100, and 30 for masks.
        seed: Seed of the splits, the training and the replicates.
        json: Print one JSON object on standard output, and text on standard error.
    """

    data: DataPath
    target: str | None = None
    out: Path | None = None
    task: Literal["classification", "regression"] | None = None
    ignore: tuple[str, ...] = ()
    method: str = "neuboots"
    epochs: int | None = None
    test_fraction: float = 0.1
    max_error: float = 0.05
    max_width: float | None = None
    max_categories: int = 256
    size: tuple[int, ...] = ()
    channels: Literal[1, 3] = 3
    classes: tuple[str, ...] = ()
    ignore_index: int | None = None
    num_samples: int | None = None
    seed: int = 0
    json: bool = False

    def run(self) -> None:
        """Train, save and report."""
        say = partial(echo, to_stderr=self.json)
        with user_errors(), collect_warnings() as notes:
            kind = self._kind()
            fit, options = self._prepare(kind)
            out = self._check_out()
            describe = partial(self._describe_table if kind == "table" else self._describe_images, say)
            model = fit(self.data, **options, command=command_line(self), progress=not self.json, on_start=describe)
            model.save(out)
            for line in (*_describe_card(model.card), *(f"  note: {note}" for note in notes)):
                say(line)
        new = "NEW_IMAGES" if kind != "table" else f"NEW{Path(self.data).suffix or '.csv'}"
        target = "predictions" if kind == "masks" else "predictions.csv"
        say(f"\nSaved to {self.out}. Next: neuboots predict {shlex.quote(str(self.out))} {new} --out {target}")
        if self.json:
            print_json({"model": str(self.out), "kind": kind, **asdict(model.card), "notes": notes})

    def _kind(self) -> Kind:
        """A file is a table; a folder has class folders, or images and masks."""
        if self.data == "-":
            raise UsageError("DATA is -, but training reads rows several times; save them to a file")
        path = Path(self.data).expanduser()
        if not path.is_dir():
            return "table"
        from neuboots.data.image_folder import find_split_folders

        for folder in (path, *find_split_folders(path).values()):
            if (folder / "images").is_dir() and ((folder / "masks").is_dir() or (folder / "labels").is_dir()):
                return "masks"
        return "images"

    def _prepare(self, kind: Kind) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the function that fits this kind of data, and the options that differ from their defaults."""
        fit: Callable[..., Any]
        if kind == "table":
            from neuboots.app.tabular import fit_table as fit

            if self.target is None:
                raise UsageError("--target is missing; give the column to predict")
        elif kind == "images":
            from neuboots.app.images import fit_images as fit
        else:
            from neuboots.app.masks import fit_masks as fit
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        options = {name: value for name, value in given.items() if name not in ("data", "out", "json")}
        for name in options:
            if name not in inspect.signature(fit).parameters:
                raise UsageError(f"{option_name(name)} does not apply to {self.data}, which was read as {kind}")
        return fit, options

    def _check_out(self) -> Path:
        """Check before the training that the model can be saved."""
        from neuboots.app import check_model_folder

        if self.out is None:
            raise UsageError("--out is missing; give a folder for the model, such as --out my-model")
        out = self.out.expanduser()
        path = out.absolute()
        existing = next(each for each in (path, *path.parents) if each.exists())
        folder = path.parent if existing == path else existing
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise UsageError(f"--out is {self.out}, but {folder} is not a writable folder")
        check_model_folder(path)
        return out

    def _describe_table(self, say: Callable[[str], None], schema: "TableSchema", notes: Sequence[str]) -> None:
        for line in _describe_schema(self.data, schema, notes, task=self.task, ignore=self.ignore):
            say(line)

    def _describe_images(self, say: Callable[[str], None], chosen: Mapping[str, Any], notes: Sequence[str]) -> None:
        height, width = chosen["size"]
        say(f"{self.data} is a folder of {chosen['content']}.")
        say(f"  {chosen['net']} on {height} × {width} pixels (--size), at most {chosen['epochs']} epochs")
        for note in notes:
            say(f"  note: {note}")


def _describe_schema(
    data: str, schema: "TableSchema", notes: Sequence[str], *, task: str | None, ignore: Sequence[str]
) -> Iterator[str]:
    """Describe the inferred task and columns of a table, line by line."""
    from neuboots._validation import format_names
    from neuboots.data.tabular import NUMBER_LIKE

    target = schema.target
    other = "regression" if target.classes else "classification"
    yield f"{data} is a table; the task is {target.task} of {target.name!r}, {_reason(target, task)}."
    if task is None and not (target.kind == "text" and other == "regression"):
        yield f"  (For {other} give --task {other}.)"
    if target.classes:
        yield f"  {len(target.classes)} classes: {format_names(target.classes, _MAX_COLUMNS)}"
    else:
        yield f"  mean {target.mean:.4g}, standard deviation {target.std:.4g}"
    yield f"Features: {len(schema.numbers):,} numeric, date or Boolean and {len(schema.categories):,} categorical:"
    lines = [line for line in str(schema).splitlines()[1:] if not line.endswith(": excluded")]
    yield from (f"  {line}" for line in islice(lines, _MAX_COLUMNS))
    if len(lines) > _MAX_COLUMNS:
        yield f"  … and {len(lines) - _MAX_COLUMNS:,} more columns"
    texts = [(target.name, target.classes if target.kind == "text" else ())]
    for name, values in (*texts, *((column.name, column.values) for column in schema.categories)):
        numbers = [value for value in values if re.fullmatch(NUMBER_LIKE, value)]
        if 2 * len(numbers) > len(values):
            odd = [value for value in values if value not in numbers]
            besides = f" besides {format_names(odd, 3)}" if odd else ""
            yield (
                f"  note: {name!r} was read as text, but has values such as {numbers[0]!r}{besides}; write numbers as "
                "1.5, dates as 2024-02-29, and missing values as empty fields"
            )
    yield from (f"  note: {note}" for note in notes)
    yield "  (To exclude a column give --ignore COLUMN.)"
    if requested := [name for name in schema.excluded if name in ignore]:
        yield f"  excluded as requested: {format_names(requested, _MAX_COLUMNS)}"
    if others := [name for name in schema.excluded if name not in ignore]:
        names = format_names(others, _MAX_COLUMNS)
        yield f"  excluded, as they have no name, no value, or more distinct texts than --max-categories: {names}"


def _reason(target: Any, task: str | None) -> str:
    from neuboots.data.tabular import MAX_INTEGER_CLASSES

    if task is not None:
        return "as given by --task"
    if target.kind == "text":
        return "because it has texts"
    if target.kind == "boolean":
        return "because it is Boolean"
    if target.classes:
        return f"because it has {len(target.classes)} distinct integer values"
    return f"because it has non-integer values, or more than {MAX_INTEGER_CLASSES} distinct ones"


def _describe_card(card: "ModelCard") -> Iterator[str]:
    """Describe the metrics of the test split, line by line."""
    metrics, splits = card.metrics, ", ".join(f"{count:,} {split}" for split, count in card.rows.items())
    yield ""
    if not {"error", "rmse"} & {*metrics}:
        yield f"Trained ({splits}). There is no test split; use neuboots evaluate on other data."
    else:
        yield f"On {card.rows['test']:,} test rows, not used for training or calibration ({splits}):"
        if card.task == "regression":
            lines = _describe_regression(metrics)
        else:
            lines = _describe_classes(metrics, "pixels" if card.task == "segmentation" else "predictions")
        yield from (f"  {line}" for line in lines)
        if card.rows["test"] < _MIN_TEST_ROWS:
            yield "  The test split is small; other rows may give quite different metrics."
    yield from (f"  {note}" for note in metrics.get("notes", ()))


def _describe_classes(metrics: Mapping[str, Any], noun: str) -> Iterator[str]:
    iou = f"; mean IoU {metrics['mean_iou']:.3f}" if "mean_iou" in metrics else ""
    yield f"{metrics['error']:.1%} of the {noun} are wrong (majority class: {metrics['majority_error']:.1%}){iou}"
    brier = f", Brier score {metrics['brier']:.3f}" if "brier" in metrics else ""
    yield f"expected calibration error {metrics['ece']:.1%}, log loss {metrics['nll']:.3f} nats{brier}"
    error = metrics.get("error_accepted")
    others = "" if error is None else f"; {error:.1%} of the other predictions are wrong"
    yield f"the model abstains on {1 - metrics['accepted']:.1%}{others}"


def _describe_regression(metrics: Mapping[str, Any]) -> Iterator[str]:
    r2 = "" if metrics["r2"] is None else f", R² {metrics['r2']:.3f}"
    constant = f"constant prediction: RMSE {metrics['baseline_rmse']:.4g}"
    yield f"RMSE {metrics['rmse']:.4g}, mean absolute error {metrics['mae']:.4g}{r2} ({constant})"
    width = f"mean width {metrics['mean_width']:.4g}"
    yield f"{metrics['level']:.0%} prediction intervals cover {metrics['coverage']:.1%} of the true values; {width}"
    rmse = metrics["rmse_accepted"]
    others = "" if rmse is None else f"; RMSE {rmse:.4g} on the others"
    yield f"the model abstains on {1 - metrics['accepted']:.1%}{others}"
