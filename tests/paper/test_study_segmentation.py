"""Tests of the segmentation studies: downsampling, stored images and checks."""

import pytest
import torch
from torch import Tensor

from neuboots.data import CropFlip, LazyDataset
from neuboots.data.dataset import TensorSource
from neuboots_paper.studies.segmentation_2d import Segmentation2d
from neuboots_paper.studies.segmentation_common import (
    IGNORE_INDEX,
    decode_png,
    downsample,
    encode_png,
    fullest_slice,
)


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
