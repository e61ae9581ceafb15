"""What the pixels of labelled images say of a model of masks.

t = the least probability with P(wrong | p ≥ t) ≤ P(wrong) / 2 on held-out images
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuboots.data import Part
from neuboots.metrics import Ranking
from neuboots.models.model import Chunk, Column
from neuboots.models.pairs import VOID
from neuboots.progress import bar
from neuboots.tasks.segmentation import Segmented
from neuboots.tasks.selective import Selective

if TYPE_CHECKING:
    from neuboots.models.masks import MaskModel

PIXELS = 10_000  # of a held-out image, at even distances, that tell when a pixel is unsure
UNSURE = 0.95  # of the held-out images have no more unsure pixels than are answered


@dataclass(frozen=True, eq=False)
class Measured:
    """Figures of pixels over labelled images, the share of images that the model answers, and notes on the files."""

    pixels: Segmented
    answered: float
    notes: tuple[str, ...]


def measured(
    model: "MaskModel",
    chunks: Iterable[Chunk],
    num_samples: int,
    *,
    total: int | None = None,
    progress: bool = False,
) -> Measured:
    """Of chunks that have labels, so many in all."""
    pixels: Segmented | int = 0
    kept: list[Column] = []
    notes: list[str] = []
    with bar("segmenting", total, show=progress) as step:
        for chunk in chunks:
            assert chunk.y is not None, "labels were asked for"
            maps = model.maps(chunk, num_samples=num_samples)
            pixels = pixels + Segmented.of(maps, chunk.y, void=VOID)
            kept.append(~model.described(chunk, maps).columns["abstain"])
            notes += chunk.notes
            step("segmenting")
    assert isinstance(pixels, Segmented), "there is at least one chunk"
    return Measured(pixels, float(np.concatenate(kept).mean()), tuple(notes))


def one_by_one(part: Part) -> Iterator[Chunk]:
    """The images of a part, each a chunk of its own size."""
    for i in range(len(part)):
        x, y = part[i]
        yield Chunk({"row": np.array([i])}, x[None], y[None])


def unsure_limits(model: "MaskModel", held_out: Part, num_samples: int) -> tuple[float, float]:
    """(t, the share of unsure pixels that 95 % of held-out images stay below)."""
    images: list[Tensor] = []
    ranking: Ranking | int = 0
    for chunk in one_by_one(held_out):
        assert chunk.y is not None, "a held-out image has a mask"
        maps = model.maps(chunk, num_samples=num_samples)
        confidence, right = maps.confidence.flatten(), (maps.labels == chunk.y).flatten()
        counted = (chunk.y.flatten() != VOID).nonzero()[:, 0]
        some = counted[torch.linspace(0, len(counted) - 1, min(PIXELS, len(counted))).long()]
        if len(some):
            ranking = ranking + Ranking.of(confidence[some], right[some])
            images.append(confidence[some])
    if not isinstance(ranking, Ranking):
        return 0.0, 1.0
    curve = Selective(ranking, "confidence", None, num_samples, 0)
    sure = min(1.0, max(0.0, curve.threshold_for(risk=curve.risk / 2)))
    shares = [float((image < sure).double().mean()) for image in images]
    return sure, float(np.quantile(shares, UNSURE, method="higher"))


def card_figures(found: Measured, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the card, beside what one class everywhere would get; of pixels that are all void there are none."""
    if found.pixels.count == 0:
        return {}
    figures, constant = found.pixels.figures, found.pixels.majority
    kept = ("mean_iou", "mean_dice", "error", "ece", "nll", "entropy_right", "entropy_wrong")
    return {
        **{name: figures[name] for name in kept},
        "accuracy": 1 - figures["error"],
        "iou": dict(zip(names, figures["iou"], strict=True)),
        "answered": found.answered,
        "mean_iou_of_commonest": constant["mean_iou"],
        "error_of_commonest": constant["error"],
    }
