"""`neuboots predict`: answers for a file, however large, with what is known of how far each can be trusted."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuboots.app import Model, PredictionTable, RowBatch, load_model, unique_name
from neuboots.cli._console import (
    DataPath,
    ModelFolder,
    UsageError,
    collect_warnings,
    echo,
    print_json,
    read_batches,
    silence_stream,
    user_errors,
)
from neuboots.cli._writers import Columns, Format, check_output_path, file_format, is_device, open_writer
from neuboots.training import progress_bar


@dataclass(frozen=True)
class Predict:
    """Answer each row of a table, or each picture of a folder, with what is known of the answer.

    For classes: prediction, probability, std (of that probability over replicates), entropy, mutual_information,
    ood_score (above 1: unlike 99 % of what the model knows) and abstain. For numbers: prediction, low and high (the
    prediction interval), std, confidence_low and confidence_high (of the mean, by the influence bootstrap where the
    method has one net), ood_score and abstain. Rows are read and written some at a time, so that a file may be larger
    than memory.
    """

    model: ModelFolder
    """The folder that neuboots fit wrote."""
    data: DataPath
    """A table (CSV, Parquet or JSON Lines) with the columns that the model was trained on, in any order and among
    others; - reads standard input. For pictures, a folder of them, or one."""
    out: str = "-"
    """A file that ends in .csv, .parquet or .jsonl; - is standard output."""
    format: Format | None = None
    """Instead of what the ending says; standard output is csv otherwise."""
    level: float = 0.95
    """Of the intervals."""
    num_samples: int = 100
    """Bootstrap replicates B behind each answer."""
    keep: tuple[str, ...] = ()
    """Columns of a table to write beside the answers, such as an id; `--keep all` for every one."""
    probabilities: bool = False
    """A column for the probability of each class."""
    json: bool = False
    """A summary as one JSON object on standard output, for machines."""

    def run(self) -> None:
        """Read, answer and write."""
        with user_errors():
            self._check()
            model = load_model(os.path.expanduser(self.model))
            if model.kind == "masks":
                self._write_maps(model)
                return
            check_output_path(self.out, self.data)
            form = file_format(self.out, self.format)
            try:
                found = self._write(model, form)
            except BrokenPipeError:
                if self.out != "-":
                    raise UsageError(f"--out is {self.out}, which takes no more rows") from None
                silence_stream()
                return
        self._say(*found)

    def _write(self, model: Model, form: Format) -> tuple[int, int, list[str]]:
        rows = abstained = 0
        shown = not is_device(self.out) and not self.json
        with (
            collect_warnings() as notes,
            open_writer(self.out, form) as write,
            progress_bar("predicting", None, enabled=shown) as step,
        ):
            for chunk in read_batches(model, self.data, self.keep):
                answers = model.predict(chunk, num_samples=self.num_samples, level=self.level)
                write(self._columns(model, chunk, answers))
                rows, abstained = rows + len(chunk), abstained + int(answers.columns["abstain"].sum())
                notes += [note for note in chunk.notes if note not in notes]
                step(f"predicting, {rows:,} rows")
        return rows, abstained, notes

    def _columns(self, model: Model, chunk: RowBatch, answers: PredictionTable) -> Columns:
        """Keys, kept columns and answers; a kept column of a name that is taken becomes "input …"."""
        said = dict(answers.columns)
        if self.probabilities:
            if answers.probs is None:
                raise UsageError("--probabilities are of classes, but the model answers with numbers; leave it out")
            probs = np.asarray(answers.probs)
            said |= {f"probability of {name}": probs[:, k] for k, name in enumerate(model.classes)}
        found: Columns = {}
        for name, values in chunk.keys.items():
            found[unique_name(name, {*found, *said})] = values
        return found | said

    def _say(self, rows: int, abstained: int, notes: list[str]) -> None:
        for note in notes:
            echo(f"note: {note}", aside=True)
        if self.json:
            print_json({"out": self.out, "rows": rows, "abstained": abstained, "notes": notes})
            return
        where = "standard output" if self.out == "-" else self.out
        share = f"{abstained:,} of them ({abstained / rows:.1%})"
        echo(f"{rows:,} rows, on {where}; abstain is true in {share}", aside=is_device(self.out))

    def _write_maps(self, model: Any) -> None:
        """A folder of pictures, one row of a table for each."""
        if self.out == "-" or self.keep or self.probabilities or self.format is not None:
            raise UsageError(
                f"{self.model} is a model of masks, which answers with pictures; give a new folder as --out, and no "
                "--format, --keep or --probabilities"
            )
        found = model.predict_folder(self.data, self.out, num_samples=self.num_samples, progress=not self.json)
        if self.json:
            print_json(found)
            return
        for note in found["notes"]:
            echo(f"note: {note}", aside=True)
        echo(f"{found['images']:,} images, in {self.out}; abstain is true for {found['abstained']:,} of them")

    def _check(self) -> None:
        if not 0 < self.level < 1:
            raise UsageError(f"--level is {self.level}; give a number between 0 and 1, such as 0.95")
        if not 1 <= self.num_samples < 2**31:
            raise UsageError(f"--num-samples is {self.num_samples}; give a whole number of at least 1")
        if self.json and self.out == "-":
            raise UsageError("--json needs --out to be a file, as standard output has the answers; give one")
