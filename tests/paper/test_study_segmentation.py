"""Tests of the segmentation studies: downsampling, stored images and checks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from neuboots.data import CropFlip, LazyDataset
from neuboots.data.dataset import TensorSource
from neuboots_paper.studies.segmentation_2d import Segmentation2d
from neuboots_paper.studies.segmentation_3d import Segmentation3d
from neuboots_paper.studies.segmentation_common import (
    IGNORE_INDEX,
    SegmentationStudy,
    decode_png,
    downsample,
    encode_png,
    fullest_slice,
)
from neuboots_paper.study import Rows

STUDIES = (Segmentation2d, Segmentation3d)


def scored(study: SegmentationStudy, score: Callable[[str, str], float]) -> Rows:
    """Rows in which `score(key, method)` is each method's figure, a little more for later seeds."""
    keys = ("mean_iou", "ece", "nll", "entropy_ratio", "constant_iou")
    every: list[dict[str, Any]] = [
        {"net": net, "method": method, "seed": seed}
        for net in study.nets
        for method in study.methods
        for seed in (0, 1, 2)
    ]
    scores = [row | {key: score(key, row["method"]) + row["seed"] / 1e4 for key in keys} for row in every]
    times = [row | {"relative_time": score("relative_time", row["method"])} for row in every]
    return {"scores": scores, "times": times, "bins": [], "pictures": []}


def figure_of(key: str, method: str, *, favoured: str) -> float:
    better = 0.9 if key == "mean_iou" else 0.1
    return better if method == favoured else 0.5


@pytest.mark.parametrize("kind", STUDIES)
def test_checks_follow_the_rows(kind: type[SegmentationStudy]) -> None:
    study = kind.from_preset("cpu")
    for favoured, holds in (("neuboots", True), ("deep-ensemble", False), ("nobody", None)):
        rows = scored(study, lambda key, name, best=favoured: figure_of(key, name, favoured=best))  # type: ignore[misc]
        verdicts = [verdict for verdict in study.checks(rows) if "by Algorithm 1" not in verdict.claim]
        assert len(study.checks(rows)) == 4 + 4 + 1 == len(verdicts) + 4
        found = {verdict.claim.split(",")[0]: verdict for verdict in verdicts}
        for claim in ("highest mIoU of all methods", "lowest ECE of all methods", "predicts faster"):
            verdict = next(verdict for name, verdict in found.items() if claim in name)
            assert verdict.holds is holds
            if favoured == "deep-ensemble":
                assert "against deep-ensemble " in verdict.evidence
        if favoured == "deep-ensemble":  # as good as the plain net
            assert next(verdict for name, verdict in found.items() if "the plain net" in name).holds is None


def test_downsampling_averages_pixels_and_takes_central_labels() -> None:
    x = torch.arange(2 * 5 * 7, dtype=torch.float32).view(1, 2, 5, 7)
    y = torch.arange(5 * 7).view(1, 5, 7)
    small, labels = downsample(LazyDataset(TensorSource(x, y)), 2)[0]
    assert torch.equal(small, x[0, :, :4, :6].view(2, 2, 2, 3, 2).mean((2, 4)))
    assert torch.equal(labels, y[0, 1:4:2, 1:6:2])
    bytes_ = LazyDataset(TensorSource(torch.full((1, 1, 4, 4), 255, dtype=torch.uint8), y[:, :4, :4]))
    assert downsample(bytes_, 2)[0][0].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


def test_downsampled_volumes_keep_their_augmentation() -> None:
    x, y = torch.randn(3, 1, 8, 9, 10), torch.zeros(3, 8, 9, 10, dtype=torch.long)
    part = LazyDataset(TensorSource(x, y), augment=CropFlip((8, 8, 8)))
    small = downsample(part, 2, limit=2, seed=1)
    assert len(small) == 2
    assert [tuple(small[i][0].shape) for i in range(2)] == [(1, 4, 4, 4)] * 2
    assert downsample(LazyDataset(TensorSource(x, y)), 2)[0][1].shape == (4, 4, 5)


@pytest.mark.parametrize("plane", [torch.randint(256, (5, 7)), torch.randint(256, (4, 3, 3))])
def test_png_round_trip(plane: Tensor) -> None:
    assert torch.equal(decode_png(encode_png(plane)).long(), plane)


def test_fullest_slice_has_most_labels() -> None:
    labels = torch.zeros(3, 3, 4, dtype=torch.long)
    labels[..., 0], labels[0, 0, 1], labels[:2, 0, 2] = IGNORE_INDEX, 1, 1
    assert fullest_slice(labels)[2] == 2


def test_ignored_pixels_have_no_effect() -> None:
    study = Segmentation2d.from_preset("smoke")
    losses = {name: study._method(name, 2).loss.ignore_index for name in study.methods}  # type: ignore[attr-defined]
    assert {*losses.values()} == {IGNORE_INDEX}
