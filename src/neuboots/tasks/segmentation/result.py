"""What `segmentation` finds: the figures of labels and of uncertainty over a data set, beside those of a constant.

    majority: guess the most frequent class everywhere;   frequencies: p_c = share of the pixels of class c everywhere

Both are known from the counts of labels alone. Their labels are the same; probabilities are those of the frequencies,
whose confidence is by its making as often right as it says.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.keys import whole
from neuboots.metrics import Confusion, Segmentation, Tally
from neuboots.tasks.common import labels_for, table
from neuboots.tasks.segmentation.maps import Maps
from neuboots.tasks.segmentation.spread import MEASURES, Spread, at_borders, ratio, uncertainties

_TOGETHER = 1 << 18  # pixels whose figures are computed at once: what is needed on the way stays small beside the maps


@dataclass(frozen=True, eq=False)
class Times(Tally):
    """Seconds of prediction; and of one window predicted, beside the plain net on the same, where there is a net."""

    seconds: Tensor  # ()
    images: Tensor  # ()
    predicted: Tensor  # ()
    plain: Tensor  # ()

    @classmethod
    def of(cls, images: int, seconds: float = 0.0, predicted: float = 0.0, plain: float = 0.0) -> Self:
        """Of some images that took so many seconds, and of a window and a plain pass over it."""
        total, window, net = torch.tensor([seconds, predicted, plain], dtype=torch.float64)
        return cls(total, torch.tensor(images), window, net)


@dataclass(frozen=True, eq=False)
class Segmented(Tally):
    """Figures over labelled images; parts of a data set add. Pixels without a label (void) count nowhere.

    >>> maps = Maps(torch.tensor([[[[0.9, 0.2]], [[0.1, 0.8]]]]), *3 * [torch.tensor([[[0.3, 0.5]]])], 5, 0)
    >>> found = Segmented.of(maps, torch.tensor([[[0, 0]]]))
    >>> found.count, found.error, found.majority["error"], round(found.entropy_ratio, 3)
    (2, 0.5, 0.0, 1.667)
    """

    pixels: Segmentation
    spread: Spread
    times: Times
    num_samples: int
    seed: int

    @classmethod
    def of(
        cls, maps: Maps, labels: Tensor, *, void: int | None = 255, num_bins: int = 15, times: Times | None = None
    ) -> Self:
        """The figures of the maps of N images and their labels (N, *); `void` is None where every pixel has one."""
        void = None if void is None else whole("void", void)
        labels = labels_for(maps.probs, labels, void=void)
        void = -1 if void is None else void  # −1 is no label now
        border = at_borders(labels, void=void)
        pixels: Segmentation | int = 0
        spread: Spread | int = 0
        for i, truth in enumerate(labels.flatten(1)):
            parts = (maps.probs[i].flatten(1), uncertainties(maps, i).flatten(1), truth, border[i].flatten())
            for probs, values, y, edge in zip(*(part.split(_TOGETHER, -1) for part in parts), strict=True):
                pixels = pixels + Segmentation.of(probs[None], y[None], void=void, num_bins=num_bins)
                counted = y != void
                wrong = (probs.argmax(0) != y)[counted]
                spread = spread + Spread.of(values[:, counted], wrong, edge[counted])
        assert isinstance(pixels, Segmentation), "maps are of at least one image"
        assert isinstance(spread, Spread), "maps are of at least one image"
        return cls(pixels, spread, times or Times.of(len(labels)), maps.num_samples, maps.seed)

    # -- labels

    @property
    def count(self) -> int:
        """Pixels that have a label."""
        return self.pixels.count

    @property
    def num_images(self) -> int:
        return int(self.times.images)

    @property
    def mean_iou(self) -> float:
        """Over the classes that occur as a label or as a guess."""
        return float(self.pixels.mean_iou)

    @property
    def mean_dice(self) -> float:
        """Over the same classes."""
        return _mean_dice(self.pixels.confusion)

    @property
    def iou(self) -> Tensor:
        """Of each class, 0 where it occurs nowhere: (C,)."""
        return self.pixels.iou

    @property
    def dice(self) -> Tensor:
        """Of each class, 0 where it occurs nowhere: (C,)."""
        return self.pixels.dice

    @property
    def error(self) -> float:
        """The share of pixels with a wrong label."""
        return float(self.pixels.error)

    @property
    def ece(self) -> float:
        return float(self.pixels.ece)

    @property
    def majority(self) -> dict[str, float]:
        """What the constant predictors get on the same pixels: labels of the majority, probabilities of frequencies."""
        counts = self.pixels.confusion_matrix.sum(1)  # (C,)
        matrix = torch.zeros_like(self.pixels.confusion_matrix)
        matrix[:, counts.argmax()] = counts
        constant, shares = Confusion(matrix), counts.double() / counts.sum()
        return {
            "mean_iou": float(constant.mean_iou),
            "mean_dice": _mean_dice(constant),
            "error": 1 - float(shares.max()),
            "ece": 0.0,
            "nll": float(-torch.xlogy(shares, shares).sum()),
            "brier": 1 - float(shares.square().sum()),
        }

    # -- uncertainty

    @property
    def entropy_ratio(self) -> float | None:
        """Mean entropy on wrong pixels / on right ones; None where there are none of one kind."""
        return self._ratio("entropy")

    def _ratio(self, measure: str) -> float | None:
        return ratio(self.spread.mean(measure, wrong=True), self.spread.mean(measure, wrong=False))

    def _error_at(self, border: bool) -> float | None:
        count = self.spread.count(border=border)
        return self.spread.count(wrong=True, border=border) / count if count else None

    # -- time

    @property
    def seconds(self) -> float:
        """Of predicting one image, in the mean."""
        return float(self.times.seconds / self.times.images)

    @property
    def relative_time(self) -> float | None:
        """Seconds of B replicates / of a plain pass of the net, at one window; None where that was not measured."""
        return ratio(float(self.times.predicted), float(self.times.plain))

    # -- all of them

    @property
    def figures(self) -> dict[str, Any]:
        """Every figure by name, as JSON takes it: None where there is nothing to divide by, or where a class occurs
        neither as a label nor as a guess. Uncertainties are means over pixels."""
        names = ("mean_iou", "error", "ece", "mce", "nll", "brier")
        found: dict[str, Any] = {name: float(getattr(self.pixels, name)) for name in names}
        found["mean_dice"] = self.mean_dice
        for name in MEASURES:
            mean = self.spread.mean
            border, inside = (mean(name, border=kind) for kind in (True, False))
            found |= {
                name: mean(name),
                f"{name}_right": mean(name, wrong=False),
                f"{name}_wrong": mean(name, wrong=True),
                f"{name}_ratio": self._ratio(name),
                f"{name}_auroc": self.spread.auroc(name),
                f"{name}_border": border,
                f"{name}_inside": inside,
                f"{name}_border_ratio": ratio(border, inside),
            }
        found |= {"error_border": self._error_at(True), "error_inside": self._error_at(False)}
        found |= {"border_share": self.spread.count(border=True) / self.count}
        found |= {"seconds": self.seconds, "relative_time": self.relative_time}
        occurs = self.pixels.confusion.occurs.tolist()
        for name in ("iou", "dice"):
            values = getattr(self.pixels, name).tolist()
            found[name] = [value if there else None for value, there in zip(values, occurs, strict=True)]
        return found

    def __str__(self) -> str:
        figures, constant = self.figures, self.majority
        labels = [{"figure": name, "value": figures[name], "majority": constant[name]} for name in constant]
        columns = ("right", "wrong", "ratio", "auroc", "inside", "border", "border_ratio")
        spread = [{"uncertainty": name} | {c: figures[f"{name}_{c}"] for c in columns} for name in MEASURES]
        spread.append({"uncertainty": "error", "inside": figures["error_inside"], "border": figures["error_border"]})
        head = f"N = {self.num_images:,} images, {self.count:,} pixels, B = {self.num_samples}, seed = {self.seed}"
        time = f"{self.seconds:.3g} s an image"
        if self.relative_time is not None:
            time += f", {self.relative_time:.3g} × a plain pass of the net"
        return "\n".join([head, table(labels), "", table(spread), "", time])


def _mean_dice(confusion: Confusion) -> float:
    return float(confusion.f1[confusion.occurs].mean())
