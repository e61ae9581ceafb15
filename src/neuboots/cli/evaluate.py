"""`neuboots evaluate`: metrics, checks and an HTML report of a model on labeled data.

Rows are read in batches. Metrics of classes are of all rows; other metrics are of a uniform sample of at most 500,000.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots._validation import check_fraction, check_int
from neuboots.app.model import load_model
from neuboots.cli._console import (
    DataPath,
    ModelFolder,
    UsageError,
    check_output_path,
    collect_warnings,
    command_line,
    echo,
    echo_table,
    print_json,
)
from neuboots.evaluation.active_learning import RowSelector
from neuboots.serialization import write_text
from neuboots.training import progress_bar

if TYPE_CHECKING:
    from neuboots.app.model import Model, PredictionTable, RowBatch
    from neuboots.report.evaluation import EvaluationReport, Reference

MAX_SAMPLED_ROWS = 500_000
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
MAX_LEVEL_ROWS = 20_000  # rows whose intervals are predicted at every level
_MAX_NOTES = 20
_MAX_METRIC = 1e100
_UNSEEN = "(not in the training data)"
_INTRODUCTION = (
    "Predictions for labeled data. A check *holds* or *does NOT hold* if the data are sufficient to tell, and is *not "
    "resolved* otherwise; intervals have a level of 95 %."
)
_MARKS = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a model on labeled data: on the terminal, and as an HTML report with plots.

    Errors, calibration or coverage, and selective prediction, beside a constant prediction and the test split at
    training time. Failed checks come first: more errors than at training time, wrong calibration, or rows that are out
    of distribution. Rows without a label are counted and excluded; those of a class that is not in the training data
    are counted as errors.

    Args:
        model: Folder that neuboots fit wrote.
        data: A table with the target column, a folder of class folders, or a folder of images and masks; - reads
            standard input.
        out: HTML report; by default MODEL-evaluation.html, and none with --json.
        level: Level of the intervals of a regression.
        num_samples: Bootstrap replicates B.
        json: Print one JSON object on standard output, and text on standard error.
    """

    model: ModelFolder
    data: DataPath
    out: Path | None = None
    level: float = 0.95
    num_samples: int = 100
    json: bool = False

    @property
    def page(self) -> Path | None:
        """The file of the report; None for none."""
        if self.out is not None or self.json:
            return self.out
        return Path(f"{Path(self.model).resolve().name}-evaluation.html")

    def run(self) -> None:
        """Evaluate, print and write."""
        self._check()
        model = load_model(os.path.expanduser(self.model))
        with collect_warnings() as notes:
            report, counts = evaluate_model(
                model, self.data, num_samples=self.num_samples, level=self.level, progress=not self.json
            )
        counts.add_notes(notes)
        if counts.unlabeled:
            counts.notes.insert(0, f"{counts.unlabeled:,} of {counts.rows:,} rows have no label and are excluded")
        if counts.unseen:
            note = (
                f"{counts.unseen:,} of {counts.rows:,} rows have a class that is not in the training data; they count "
            )
            counts.notes.insert(0, note + "as errors, but not in the log loss, which would be infinite")
        noun = "images" if model.card.task == "segmentation" else "rows"
        title = (
            f"{self.model} on {self.data}: {model.card.task} of {model.card.target!r} by {model.card.method}, "
            f"{report.count:,} {noun}, B = {self.num_samples}"
        )
        if not self.json:
            lines = [title, *(f"note: {note}" for note in counts.notes)]
            echo(*lines, *(f"{_MARKS[check.holds]} {check}" for check in report.checks))
            for topic in report.topics:
                for table in topic.tables:
                    echo_table(table)
        if self.page is not None:
            self._write(model, report, counts, title, self.page)
            echo("", f"Report: {self.page}", to_stderr=self.json, optional=True)
        if self.json:
            print_json(
                {
                    "command": command_line(self),
                    "model": self.model,
                    "data": self.data,
                    **{name: getattr(model.card, name) for name in ("task", "target", "method")},
                    "rows": {
                        "read": counts.rows,
                        "without label": counts.unlabeled,
                        "of an unseen class": counts.unseen,
                        "counted": report.count,
                    },
                    "num_samples": self.num_samples,
                    "metrics": report.metrics,
                    "baseline": report.baseline,
                    "at_training": {"rows": model.card.rows, "metrics": model.card.metrics},
                    **report.details,
                    "checks": [asdict(check) for check in report.checks],
                    "notes": counts.notes,
                    "page": None if self.page is None else str(self.page),
                }
            )

    def _write(self, model: "Model", report: "EvaluationReport", counts: "_Rows", title: str, path: Path) -> None:
        from neuboots.report.html import render_html
        from neuboots.report.tables import escape_markdown

        sections = report.sections()
        about = {"command": command_line(self), "neuboots": model.card.version}
        settings = {"model": self.model, "trained by": model.card.command, "data": self.data, "B": self.num_samples}
        sections[-1] = replace(
            sections[-1], about=about, settings=settings, note=escape_markdown(" ".join(counts.notes))
        )
        source = "standard input" if self.data == "-" else Path(self.data).resolve().name
        page_title = f"{Path(self.model).resolve().name} on {source}"
        introduction = f"{escape_markdown(title)}. {_INTRODUCTION}"
        try:
            write_text(path, render_html(sections, title=page_title, introduction=introduction, is_paper=False))
        except OSError as error:
            raise UsageError(f"--out is {path}, which cannot be written ({error.strerror})") from None

    def _check(self) -> None:
        check_int("num_samples", self.num_samples, minimum=1)
        check_fraction("level", self.level)
        if self.page is None:
            return
        if self.page.suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--out is {self.page}; expected a name that ends in .html")
        check_output_path(str(self.page), self.data)
        if find_spec("matplotlib") is None:
            raise ImportError("the report needs matplotlib; use --json, or pip install 'neuboots[tables]'")


@dataclass
class _Rows:
    """Labeled rows of a source, how to predict them, and what was read so far."""

    model: Any
    source: str | Path
    num_samples: int
    level: float
    step: Callable[[str], None]
    rows: int = 0
    unlabeled: int = 0
    unseen: int = 0  # rows of a class that is not in the training data
    notes: list[str] = field(default_factory=list)

    @property
    def reference(self) -> "Reference":
        from neuboots.report.evaluation import Reference

        card = self.model.card
        sizes = card.rows.get("test", 0), card.rows.get("held out", 0)
        numbers = {name: value for name, value in card.metrics.items() if isinstance(value, int | float)}
        metrics = {name: value for name, value in numbers.items() if abs(value) < _MAX_METRIC}  # not NaN
        return Reference(metrics, *sizes, card.target, self.unlabeled)

    def add_notes(self, notes: Iterable[str]) -> None:
        """Add notes, each once; a source may repeat itself from batch to batch."""
        self.notes += [note for note in dict.fromkeys(notes) if note not in self.notes]
        del self.notes[_MAX_NOTES:]

    def read(self) -> Iterator[Any]:
        for batch in self.model.read(self.source, with_labels=True):
            self.add_notes(batch.notes)
            self.rows += len(batch)
            yield batch
            self.step(f"evaluated {self.rows:,} rows")

    def predict(self) -> Iterator[tuple["RowBatch", Tensor, "PredictionTable", Tensor]]:
        """Yield batches, which of their rows have a label (not −1 or NaN), and predictions and labels of those."""
        for batch in self.read():
            flat = batch.y.reshape(len(batch.y), -1)
            known = ~flat.isnan().any(1) if batch.y.is_floating_point() else (flat != -1).all(1)
            self.unlabeled += int((~known).sum())
            self.unseen += 0 if batch.y.is_floating_point() else int((flat < -1).any(1).sum())
            if bool(known.any()):
                predictions = self.model.predict(batch, num_samples=self.num_samples, level=self.level)
                numbers = [column for column in predictions.columns.values() if column.dtype.kind == "f"]
                if any((column != column).any() for column in numbers):  # NaN; an infinite interval is a valid one
                    raise UsageError(f"{self.source} has rows whose predictions are NaN; the model abstains on them")
                yield batch, known, predictions.select(known), batch.y[known]
        if self.rows == self.unlabeled + self.unseen:
            target = self.model.card.target
            unseen = f"; {self.unseen:,} have a class that is not in the training data" if self.unseen else ""
            raise UsageError(f"{self.source} has no known label of {target!r} in {self.rows:,} rows{unseen}")


def evaluate_model(
    model: "Model", source: str | Path, *, num_samples: int = 100, level: float = 0.95, progress: bool = True
) -> tuple["EvaluationReport", _Rows]:
    """Evaluate a model on the labeled rows of a file or folder.

    Args:
        model: The model.
        source: A file or folder as in `Model.read`.
        num_samples: Bootstrap replicates B.
        level: Level of the intervals of a regression.
        progress: Whether to show a progress bar.

    Returns:
        The report, and the rows with their counts.
    """
    evaluate = {
        "classification": _evaluate_classes,
        "regression": _evaluate_regression,
        "segmentation": _evaluate_masks,
    }[model.card.task]
    with progress_bar("evaluating", None, enabled=progress) as step:
        rows = _Rows(model, source, num_samples, level, step)
        return evaluate(rows), rows


def _evaluate_classes(rows: _Rows) -> "EvaluationReport":
    from neuboots.metrics import ClassificationMetrics
    from neuboots.report.classification import SCORES, build_classification_report

    state: Any = 0
    sample, classes = RowSelector(MAX_SAMPLED_ROWS), rows.model.classes
    losses: Any = 0
    for _, _, predictions, labels in rows.predict():
        y, probs = labels.long().flatten(), predictions.probs
        assert probs is not None, "a classifier predicts probabilities"
        seen = y >= 0
        y[~seen] = len(classes)  # a further class, which is never predicted
        state = state + ClassificationMetrics.from_batch(torch.nn.functional.pad(probs, (0, 1)), y)
        losses = losses + ClassificationMetrics.from_batch(probs[seen], y[seen]).log_losses
        confidence, predicted = probs.max(1)
        columns = {name: torch.from_numpy(predictions.columns[name]).float() for name in SCORES}
        columns |= {"confidence": confidence.float(), "wrong": predicted != y}
        if len(classes) == 2:
            columns |= {"second": probs[:, 1].float(), "truth": y}
        add_rows(sample, {**columns, "abstain": torch.from_numpy(predictions.columns["abstain"])})
    if rows.unseen:
        state, classes = replace(state, log_losses=losses), (*classes, _UNSEEN)
    else:
        state = replace(state, matrix=state.matrix[:-1, :-1])
    return build_classification_report(state, sampled_columns(sample), classes, rows.reference)


def _evaluate_regression(rows: _Rows) -> "EvaluationReport":
    from neuboots.metrics import IntervalMetrics
    from neuboots.report.regression import build_regression_report

    by_level: dict[float, Any] = {}
    sample, predicted, level = RowSelector(MAX_SAMPLED_ROWS), 0, rows.level
    for batch, known, predictions, labels in rows.predict():
        y = labels.double().flatten()
        columns = {name: torch.from_numpy(values) for name, values in predictions.columns.items()}
        if predicted < MAX_LEVEL_ROWS:
            predicted += len(y)
            for other in {*LEVELS, level}:
                table = predictions
                if other != level:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        table = rows.model.predict(batch, num_samples=rows.num_samples, level=other).select(known)
                low, high = (torch.from_numpy(table.columns[name]).double() for name in ("low", "high"))
                by_level[other] = by_level.get(other, 0) + IntervalMetrics.from_batch(low, high, y, level=other)
        numbers = {name: columns[name].double() for name in ("prediction", "std", "low", "high", "ood_score")}
        add_rows(sample, {"y": y, "abstain": columns["abstain"], **numbers})
    count = rows.rows - rows.unlabeled
    return build_regression_report(sampled_columns(sample), by_level, level, count, rows.reference)


def _evaluate_masks(rows: _Rows) -> "EvaluationReport":
    from neuboots.app.masks import evaluate_masks
    from neuboots.report.segmentation import build_segmentation_report

    pixels, columns = evaluate_masks(rows.model, rows.read(), rows.num_samples)
    if pixels.count == 0:
        raise UsageError(f"{rows.source} has no labeled pixels")
    return build_segmentation_report(pixels, columns, rows.model.classes, rows.reference)


def add_rows(sample: RowSelector, columns: Mapping[str, Tensor]) -> None:
    """Add rows to a uniform sample: rows of equal scores are kept at random, independently of the batches.

    Args:
        sample: The sample.
        columns: Columns (N,) of N more rows.

    Example:
        >>> sample = RowSelector(3)
        >>> for start in (0, 5):
        ...     add_rows(sample, {"number": torch.arange(start, start + 5)})
        >>> len(sampled_columns(sample)["number"])
        3
    """
    arrays = {name: column.numpy() for name, column in columns.items()}
    sample.add(torch.zeros(len(next(iter(arrays.values())))), columns=arrays)


def sampled_columns(sample: RowSelector) -> dict[str, Tensor]:
    """Return the sampled rows in random order, so that the first n are a uniform sample as well.

    Args:
        sample: The sample.

    Returns:
        Columns by name.
    """
    return {name: torch.from_numpy(column) for name, column in sample.select()[2].items()}
