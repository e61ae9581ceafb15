"""`neuboots fit` and `neuboots predict`: train a model on a table or a folder of images, and predict with it."""

import inspect
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from neuboots._validation import check_fraction, check_int, format_names
from neuboots.app.model import Array, Format, find_not_finite, is_device, load_model, open_writer, unique_name
from neuboots.cli._console import (
    DataPath,
    ModelFolder,
    UsageError,
    check_output_path,
    collect_warnings,
    command_line,
    describe_error,
    echo,
    file_format,
    option_name,
    print_json,
    silence_stream,
)
from neuboots.serialization import check_artifact_folder
from neuboots.training import progress_bar

if TYPE_CHECKING:
    from neuboots.app.model import Model, ModelCard, PredictionTable, RowBatch
    from neuboots.data.tabular import TableSchema

Kind = Literal["table", "images", "masks"]
_MAX_COLUMNS = 12  # columns that are described
_MIN_FREE_BYTES = 1 << 20
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
        decimal: Decimal sign of a CSV file whose numbers do not show it, such as 1,050.
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
    decimal: Literal[".", ","] | None = None
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
        say = partial(echo, to_stderr=self.json, optional=True)
        with collect_warnings() as notes:
            kind = self._kind()
            fit, options = self._prepare(kind)
            out, early, excluded = self._check_out(), list[str](), list[str]()

            def on_start(chosen: Any, found: Sequence[str]) -> None:
                early.extend(found)
                excluded.extend(chosen.excluded if kind == "table" else ())
                describe = self._describe_table if kind == "table" else self._describe_images
                say(*describe(chosen, [f"  note: {note}" for note in found]))

            model = fit(self.data, **options, command=command_line(self), progress=not self.json, on_start=on_start)
            self._save(model, out)
            say(*_describe_card(model.card), *(f"  note: {note}" for note in notes))
        new = "NEW_IMAGES" if kind != "table" else f"NEW{Path(self.data).suffix or '.csv'}"
        target = "predictions" if kind == "masks" else "predictions.csv"
        say("", f"Saved to {self.out}. Next: neuboots predict {shlex.quote(str(self.out))} {new} --out {target}")
        if self.json:
            found = {"excluded": excluded, "notes": [*early, *notes]}
            print_json({"model": str(self.out), "kind": kind, **asdict(model.card), **found})

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
        if self.out is None:
            raise UsageError("--out is missing; give a folder for the model, such as --out my-model")
        path = self.out.expanduser().absolute()
        existing = next(each for each in (path, *path.parents) if each.exists())
        folder = path.parent if existing == path else existing
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise UsageError(f"--out is {self.out}, but {folder} is not a writable folder")
        check_artifact_folder(path)
        if (free := shutil.disk_usage(folder).free) < _MIN_FREE_BYTES:
            raise UsageError(f"--out is {self.out}, but {folder} has {free:,} free bytes; expected {_MIN_FREE_BYTES:,}")
        return path

    def _save(self, model: "Model", out: Path) -> None:
        """Save the model; if that fails, as when the disk is full, elsewhere, so that the training is not lost."""
        try:
            model.save(out)
        except Exception as error:
            other = _save_elsewhere(model)
            hint = (
                f"the trained model is in {other}; move that folder" if other else "give another place and train again"
            )
            reason = describe_error(error)[0]
            raise UsageError(f"--out is {self.out}, which cannot be written ({reason}): {hint}") from error

    def _describe_images(self, chosen: Mapping[str, Any], notes: Sequence[str]) -> Iterator[str]:
        height, width = chosen["size"]
        yield f"{self.data} is a folder of {chosen['content']}."
        yield f"  {chosen['net']} on {height} × {width} pixels (--size), at most {chosen['epochs']} epochs"
        yield from notes

    def _describe_table(self, schema: "TableSchema", notes: Sequence[str]) -> Iterator[str]:
        """Describe the inferred task and columns of a table, line by line."""
        target = schema.target
        other = "regression" if target.classes else "classification"
        yield f"{self.data} is a table; the task is {target.task} of {target.name!r}, {self._reason(target)}."
        if self.task is None and not (target.kind == "text" and other == "regression"):
            yield f"  (For {other} give --task {other}.)"
        if target.classes:
            yield f"  {len(target.classes)} classes: {format_names(target.classes, _MAX_COLUMNS)}"
        else:
            yield f"  mean {target.mean:.4g}, standard deviation {target.std:.4g}"
        yield f"Features: {len(schema.numbers):,} numeric, date or Boolean and {len(schema.categories):,} categorical:"
        columns = (*schema.numbers, *schema.categories)
        yield from (f"  {column}" for column in columns[:_MAX_COLUMNS])
        if len(columns) > _MAX_COLUMNS:
            yield f"  … and {len(columns) - _MAX_COLUMNS:,} more columns"
        yield from notes
        yield "  (To exclude a column give --ignore COLUMN.)"
        reasons = "as they have no name, no value, or more distinct texts than --max-categories"
        for requested, reason in ((True, " as requested"), (False, f", {reasons}")):
            if names := [name for name in schema.excluded if (name in self.ignore) == requested]:
                yield f"  excluded{reason}: {format_names(names, _MAX_COLUMNS)}"

    def _reason(self, target: Any) -> str:
        from neuboots.data.tabular import MAX_INTEGER_CLASSES

        if self.task is not None:
            return "as given by --task"
        if target.kind in ("text", "boolean"):
            return {"text": "because it has texts", "boolean": "because it is Boolean"}[target.kind]
        if target.classes:
            return f"because it has {len(target.classes)} distinct integer values"
        return f"because it has non-integer values, or more than {MAX_INTEGER_CLASSES} distinct ones"


def _save_elsewhere(model: "Model") -> Path | None:
    """Save the model to a new folder in the first of some places that is writable, and return it."""
    for place in (tempfile.gettempdir(), Path.home(), Path.cwd()):
        with suppress(Exception), ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="neuboots-", dir=place))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            model.save(folder / "model")
            stack.pop_all()
            return folder / "model"
    return None


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


# -- prediction ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predict:
    """Predict each row of a table, or each image of a folder, with uncertainty.

    Columns for classification: prediction, probability, std (of that probability over replicates), entropy,
    mutual_information, ood_score (above 1: out of distribution) and abstain. For regression: prediction, low and high
    (prediction interval), std, confidence_low and confidence_high (of the regression function), ood_score and abstain.
    A model of masks writes a folder of images.

    Args:
        model: Folder that neuboots fit wrote.
        data: A table with the columns of the training data, in any order; - reads standard input. Or a folder of
            images, or one image.
        out: File that ends in .csv, .parquet or .jsonl; - is standard output.
        format: Format, if not that of the suffix; standard output is csv by default.
        level: Level of the intervals.
        num_samples: Bootstrap replicates B.
        keep: Columns of the table to copy, such as an id; `--keep all` for every one.
        probabilities: Add a column for the probability of each class.
        raw_cells: Write texts of a CSV as they are. By default, one that a spreadsheet may take for a formula, such as
            =1+1 or @name, gets a leading apostrophe.
        json: Print a summary as one JSON object on standard output.
    """

    model: ModelFolder
    data: DataPath
    out: str = "-"
    format: Format | None = None
    level: float = 0.95
    num_samples: int = 100
    keep: tuple[str, ...] = ()
    probabilities: bool = False
    raw_cells: bool = False
    json: bool = False

    def run(self) -> None:
        """Read, predict and write."""
        check_fraction("level", self.level)
        check_int("num_samples", self.num_samples, minimum=1)
        if self.json and self.out == "-":
            raise UsageError("--json needs a file as --out, since standard output has the predictions")
        model = load_model(os.path.expanduser(self.model))
        if model.kind == "masks":
            self._predict_masks(model)
            return
        check_output_path(self.out, self.data)
        try:
            rows, abstained, notes = self._predict_rows(model, file_format(self.out, self.format))
        except BrokenPipeError:
            if self.out != "-":
                raise UsageError(f"--out is {self.out}, which was closed by its reader") from None
            silence_stream()
            return
        for note in notes:
            echo(f"note: {note}", to_stderr=True)
        if self.json:
            print_json({"out": self.out, "rows": rows, "abstained": abstained, "notes": notes})
            return
        where = "standard output" if self.out == "-" else self.out
        fraction = f"{abstained:,} abstained, {abstained / rows:.1%}"
        echo(f"Wrote {rows:,} rows to {where} ({fraction}).", to_stderr=is_device(self.out), optional=True)

    def _predict_rows(self, model: "Model", form: Format) -> tuple[int, int, list[str]]:
        rows = abstained = broken = 0
        with (
            collect_warnings() as notes,
            open_writer(self.out, form, raw_cells=self.raw_cells) as write,
            progress_bar("predicting", None, enabled=not is_device(self.out) and not self.json) as step,
        ):
            for batch in read_batches(model, self.data, self.keep):
                predictions = model.predict(batch, num_samples=self.num_samples, level=self.level)
                write(self._columns(model, batch, predictions))
                rows, abstained = rows + len(batch), abstained + int(predictions.columns["abstain"].sum())
                broken += int(find_not_finite(predictions.columns).sum())
                notes += [note for note in batch.notes if note not in notes]
                step(f"predicting, {rows:,} rows")
            if broken:
                notes.append(f"{broken:,} of {rows:,} rows have a value that is not finite; the model abstains on them")
        return rows, abstained, notes

    def _columns(self, model: "Model", batch: "RowBatch", predictions: "PredictionTable") -> dict[str, Array]:
        """Keys, copied columns and predictions; a copied column whose name is taken becomes "input …"."""
        predicted = dict(predictions.columns)
        if self.probabilities:
            if predictions.probs is None:
                raise UsageError("--probabilities needs a classification model")
            probs = np.asarray(predictions.probs)
            predicted |= {f"probability of {name}": probs[:, k] for k, name in enumerate(model.classes)}
        columns: dict[str, Array] = {}
        for name, values in batch.keys.items():
            columns[unique_name(name, {*columns, *predicted})] = values
        return columns | predicted

    def _predict_masks(self, model: Any) -> None:
        if self.out == "-" or self.keep or self.probabilities or self.format is not None:
            raise UsageError(
                f"{self.model} is a model of masks, which writes a folder; give a new folder as --out, and no "
                "--format, --keep or --probabilities"
            )
        options = {"num_samples": self.num_samples, "raw_cells": self.raw_cells, "progress": not self.json}
        summary = model.predict_folder(self.data, self.out, **options)
        if self.json:
            print_json(summary)
            return
        for note in summary["notes"]:
            echo(f"note: {note}", to_stderr=True)
        echo(f"Wrote {summary['images']:,} images to {self.out} ({summary['abstained']:,} abstained).", optional=True)


def read_batches(model: "Model", source: str, keep: tuple[str, ...]) -> Any:
    """Read the rows of a source in batches, with the columns of a table to copy.

    Args:
        model: The model.
        source: File or folder.
        keep: Columns to copy.

    Returns:
        Iterator over batches.
    """
    if model.kind == "table":
        return model.read(source, keep="all" if keep == ("all",) else keep)  # type: ignore[call-arg]
    if keep:
        raise UsageError(f"--keep applies to tables, but this is a model of {model.kind}")
    return model.read(source)
