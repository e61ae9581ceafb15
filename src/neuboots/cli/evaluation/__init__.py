"""What a model is worth on labelled rows: figures, checks, and the chapters of a page, from one pass over the rows.

`evaluate` gives an evaluation of the model's kind. What is printed, written as JSON and drawn comes from that alone.
"""

from collections.abc import Iterator
from pathlib import Path

from neuboots.app import Model
from neuboots.app.masks import MaskModel
from neuboots.cli.evaluation.classification import (
    ClassEvaluation,
    class_summary,
    classification_chapters,
    measure_classes,
)
from neuboots.cli.evaluation.regression import NumberEvaluation, measure_numbers, number_summary, regression_chapters
from neuboots.cli.evaluation.sections import LabeledBatch, RowCounts, iterate_labeled
from neuboots.cli.evaluation.segmentation import MaskEvaluation, mask_summary, measure_masks, segmentation_chapters
from neuboots.report.section import Section
from neuboots.report.tables import Table
from neuboots.training import progress_bar

Evaluation = ClassEvaluation | NumberEvaluation | MaskEvaluation

__all__ = ["Evaluation", "RowCounts", "chapters_of", "evaluate", "summary_of"]


def evaluate(
    model: Model, source: str | Path, *, num_samples: int = 100, level: float = 0.95, progress: bool = True
) -> Evaluation:
    """All figures of the model on the rows of a source that have a label."""
    seen = RowCounts()
    with progress_bar("evaluating", None, enabled=progress) as advance:

        def parts() -> Iterator[LabeledBatch]:
            for part in iterate_labeled(model, source, seen, num_samples=num_samples, level=level):
                yield part
                advance(f"evaluated {seen.rows:,} rows")

        if isinstance(model, MaskModel):
            return measure_masks(model, source, seen, num_samples=num_samples, advance=advance)
        if model.card.task == "classification":
            return measure_classes(parts(), model.classes, model.card, seen)
        return measure_numbers(parts(), model, seen, level=level, num_samples=num_samples)


def chapters_of(found: Evaluation, *, figures: bool = True) -> list[Section]:
    """Everything there is to say, with diagrams or, in no time, without."""
    if isinstance(found, ClassEvaluation):
        return classification_chapters(found, figures=figures)
    if isinstance(found, NumberEvaluation):
        return regression_chapters(found, figures=figures)
    return segmentation_chapters(found, figures=figures)


def summary_of(found: Evaluation) -> list[Table]:
    """The tables that a terminal has room for."""
    if isinstance(found, ClassEvaluation):
        return class_summary(found)
    return number_summary(found) if isinstance(found, NumberEvaluation) else mask_summary(found)
