"""`neuboots predict`: predictions with uncertainty for a file of any size, batch by batch."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from neuboots._validation import check_fraction, check_int
from neuboots.app.model import load_model, unique_name
from neuboots.cli._console import (
    Columns,
    DataPath,
    Format,
    ModelFolder,
    UsageError,
    check_output_path,
    collect_warnings,
    echo,
    file_format,
    is_device,
    open_writer,
    print_json,
    silence_stream,
    user_errors,
)
from neuboots.training import progress_bar

if TYPE_CHECKING:
    from neuboots.app.model import Model, PredictionTable, RowBatch


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
    json: bool = False

    def run(self) -> None:
        """Read, predict and write."""
        with user_errors():
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
        echo(f"Wrote {rows:,} rows to {where} ({fraction}).", to_stderr=is_device(self.out))

    def _predict_rows(self, model: "Model", form: Format) -> tuple[int, int, list[str]]:
        rows = abstained = 0
        with (
            collect_warnings() as notes,
            open_writer(self.out, form) as write,
            progress_bar("predicting", None, enabled=not is_device(self.out) and not self.json) as step,
        ):
            for batch in read_batches(model, self.data, self.keep):
                predictions = model.predict(batch, num_samples=self.num_samples, level=self.level)
                write(self._columns(model, batch, predictions))
                rows, abstained = rows + len(batch), abstained + int(predictions.columns["abstain"].sum())
                notes += [note for note in batch.notes if note not in notes]
                step(f"predicting, {rows:,} rows")
        return rows, abstained, notes

    def _columns(self, model: "Model", batch: "RowBatch", predictions: "PredictionTable") -> Columns:
        """Keys, copied columns and predictions; a copied column whose name is taken becomes "input …"."""
        predicted = dict(predictions.columns)
        if self.probabilities:
            if predictions.probs is None:
                raise UsageError("--probabilities needs a classification model")
            probs = np.asarray(predictions.probs)
            predicted |= {f"probability of {name}": probs[:, k] for k, name in enumerate(model.classes)}
        columns: Columns = {}
        for name, values in batch.keys.items():
            columns[unique_name(name, {*columns, *predicted})] = values
        return columns | predicted

    def _predict_masks(self, model: Any) -> None:
        if self.out == "-" or self.keep or self.probabilities or self.format is not None:
            raise UsageError(
                f"{self.model} is a model of masks, which writes a folder; give a new folder as --out, and no "
                "--format, --keep or --probabilities"
            )
        summary = model.predict_folder(self.data, self.out, num_samples=self.num_samples, progress=not self.json)
        if self.json:
            print_json(summary)
            return
        for note in summary["notes"]:
            echo(f"note: {note}", to_stderr=True)
        echo(f"Wrote {summary['images']:,} images to {self.out} ({summary['abstained']:,} abstained).")


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
