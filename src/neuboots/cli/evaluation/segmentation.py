"""What label maps and their uncertainty are worth on images with masks, beside a guess of the commonest class.

Pixels are inputs of their own, and those without a label (void) count nowhere: `neuboots.evaluation.segmentation`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from neuboots.app import ModelCard
from neuboots.app.masks import MaskModel
from neuboots.cli.evaluation import checks
from neuboots.cli.evaluation.checks import percent, short
from neuboots.cli.evaluation.sections import Draw, RowCounts, Show, cell, chapter, counted, figures_table, rows_chapter
from neuboots.data.image_folder import IGNORE_INDEX
from neuboots.evaluation.segmentation import SegmentationReport
from neuboots.evaluation.segmentation.metrics import UNCERTAINTY_MEASURES
from neuboots.report.checks import Check
from neuboots.report.section import Section
from neuboots.report.tables import Cell, Table


@dataclass(frozen=True, eq=False)
class MaskEvaluation:
    """What `measure_masks` found."""

    found: SegmentationReport
    abstained: int  # images
    unusual: int  # images
    names: tuple[str, ...]
    card: ModelCard
    seen: RowCounts

    @property
    def count(self) -> int:
        """Images."""
        return self.found.num_images

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Every figure by name; None where there is nothing to find it from."""
        timed = ("seconds", "relative_time")  # nothing was timed
        figures = {name: value for name, value in self.found.metrics.items() if name not in timed}
        shares = {"answered": 1 - self.abstained / self.count, "unusual": self.unusual / self.count}
        return {**figures, "pixels": self.found.count, **shares}

    @property
    def constant(self) -> dict[str, float]:
        return self.found.majority

    @property
    def classes(self) -> list[dict[str, Any]]:
        """A line for each class that occurs as a label or as a guess."""
        pixels = self.found.pixels.confusion_matrix.sum(1).tolist()
        lines = zip(self.names, pixels, self.figures["iou"], self.figures["dice"], strict=True)
        return [
            {"class": name, "pixels": size, "iou": iou, "dice": dice}
            for name, size, iou, dice in lines
            if iou is not None
        ]

    @property
    def details(self) -> dict[str, Any]:
        """What JSON has besides the figures."""
        return {"classes": self.classes, "confusion": self.found.pixels.confusion_matrix.tolist()}

    @property
    def checks(self) -> list[Check]:
        """The worst first."""
        return checks.worst_first([*self.of_answers, *self.of_calibration, *self.of_spread, *self.of_rows])

    @property
    def of_answers(self) -> list[Check]:
        """Pixels depend on each other, so that no interval is to be had from one set: what is said is of these."""
        iou, constant = self.found.mean_iou, self.constant["mean_iou"]
        found = f"mIoU {percent(iou)} against {percent(constant)} of the commonest class"
        better = Check("better than a constant guess (mIoU)", iou > constant, found)
        before = self.card.figures.get("mean_iou")
        if not isinstance(before, float | int):
            return [better]
        found = f"mIoU {percent(iou)} against {percent(before)}"
        holds = True if iou > before - 0.02 else False if iou < before - 0.1 else None
        return [Check("masks no worse than on the test images at training time", holds, found), better]

    @property
    def of_calibration(self) -> list[Check]:
        ece = self.found.ece
        holds = True if ece < checks.GAP else False if ece > 0.1 else None
        return [Check("it is right as often as it says", holds, f"calibration error {percent(ece)} over pixels")]

    @property
    def of_spread(self) -> list[Check]:
        ratio, auroc = self.found.entropy_ratio, self.figures["entropy_auroc"]
        claim = "it is less sure where it is wrong"
        if ratio is None or auroc is None:
            return [Check(claim, None, "there are no wrong pixels, or no right ones")]
        found = f"mean entropy on wrong pixels is {ratio:.1f} × that on right ones, AUROC {auroc:.3f} (0.5 is chance)"
        return [Check(claim, True if auroc > 0.6 else False if auroc < 0.5 else None, found)]

    @property
    def of_rows(self) -> list[Check]:
        return [checks.usual_rows(self.unusual, self.count, self.card.rows.get("held out", 0))]


def measure_masks(
    model: MaskModel, source: str | Path, seen: RowCounts, *, num_samples: int, advance: Callable[[str], None]
) -> MaskEvaluation:
    """All figures over a folder of images and masks."""
    pixels: SegmentationReport | int = 0
    abstained = unusual = 0
    for chunk in model.read(source, with_labels=True):
        seen.add(chunk.notes)
        seen.rows += len(chunk)
        assert chunk.y is not None, "masks were asked for"
        maps = model.maps(chunk, num_samples=num_samples)
        pixels = pixels + SegmentationReport.from_maps(maps, chunk.y, ignore_index=IGNORE_INDEX)
        columns = model.described(chunk, maps).columns
        abstained, unusual = abstained + int(columns["abstain"].sum()), unusual + int((columns["ood_score"] > 1).sum())
        advance(f"evaluated {counted(seen.rows, 'image')}")
    if not isinstance(pixels, SegmentationReport) or pixels.count == 0:
        raise ValueError(f"got {source}, whose pixels are all void; expected some that have a class")
    return MaskEvaluation(pixels, abstained, unusual, model.classes, model.card, seen)


# -- chapters ------------------------------------------------------------------------------------------


def segmentation_chapters(found: MaskEvaluation, *, figures: bool = True) -> list[Section]:
    """Of a segmentation."""
    reliability: dict[str, Draw] = {}
    confusion: dict[str, Draw] = {}
    if figures:
        from neuboots.report import plots as panels

        pixels = found.found.pixels
        reliability["reliability"] = lambda ax: panels.plot_reliability(ax, {"the model": pixels.reliability_curve})
        confusion["confusion"] = lambda ax: panels.plot_confusion(ax, found.names, pixels.confusion_matrix)
    return [
        chapter(
            "masks",
            "How well does it label pixels?",
            tables=[mask_figures(found), mask_classes(found)],
            checks=found.of_answers,
            drawings=confusion if len(found.names) <= 12 else {},
        ),
        chapter(
            "uncertainty",
            "Is it as often right as it says, and less sure where it is wrong?",
            tables=[mask_spread(found)],
            checks=[*found.of_calibration, *found.of_spread],
            drawings=reliability,
        ),
        rows_chapter(found, {}),
    ]


def mask_summary(found: MaskEvaluation) -> list[Table]:
    return [mask_figures(found), mask_classes(found), mask_spread(found)]


def mask_figures(found: MaskEvaluation) -> Table:
    """The figures of all pixels, beside those of a constant guess and of the test images at training time."""
    shown: list[tuple[str, str, Show]] = [
        ("mean IoU", "mean_iou", percent),
        ("mean Dice", "mean_dice", percent),
        ("pixel error", "error", percent),
        ("log loss, nats", "nll", short),
        ("Brier score", "brier", short),
        ("calibration error, ECE", "ece", percent),
        ("images answered", "answered", percent),
    ]
    title = f"{counted(found.count, 'image')}, {found.found.count:,} pixels with a label, {len(found.names)} classes."
    return figures_table(title, shown, found.figures, found.constant, found.card.figures, {})


def mask_classes(found: MaskEvaluation) -> Table:
    lines = tuple(
        (Cell(line["class"]), Cell(f"{line['pixels']:,}", line["pixels"]), cell(line["iou"], percent),
         cell(line["dice"], percent))
        for line in found.classes
    )  # fmt: skip
    return Table("Each class.", ("class", "pixels", "IoU", "Dice"), lines, num_keys=1)


def mask_spread(found: MaskEvaluation) -> Table:
    """Uncertainty on right and on wrong pixels."""
    columns = ("right", "wrong", "ratio", "auroc")
    lines = tuple(
        (Cell(name.replace("_", " ")), *(cell(found.figures[f"{name}_{column}"], short) for column in columns))
        for name in UNCERTAINTY_MEASURES
    )
    heads = ("uncertainty", "right pixels", "wrong pixels", "ratio", "AUROC")
    return Table("Where is it unsure? Means over pixels.", heads, lines, num_keys=1)
