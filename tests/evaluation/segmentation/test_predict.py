"""Segmentation maps: tiled maps equal those of the whole image, and each pixel has one window."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _nets import noise, quick_options
from _reference import figures
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import ArgumentError, NeuBoots, TrainingConfig, create_method, list_methods
from neuboots.evaluation.segmentation import SegmentationMaps, predict_segmentation
from neuboots.evaluation.segmentation.predict import Tile, _make_spans, clip_window, make_tiles
from neuboots.methods.deterministic import DeterministicPredictor
from neuboots.methods.neuboots import BootstrapGenerator, NeuBootsPredictor

MAPS = ("probs", "entropy", "mutual_information", "std")

# -- windows -------------------------------------------------------------------------------------------

axes = st.integers(1, 23).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))
overlaps = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.95])


def depth(tile: Tile, pixel: tuple[int, ...], size: tuple[int, ...]) -> float:
    """Steps to the nearest border of the window inside the image; −1 outside the window."""
    found = math.inf
    for window, at, length in zip(tile.window, pixel, size, strict=True):
        if not window.start <= at < window.stop:
            return -1
        if window.start > 0:
            found = min(found, at - window.start)
        if window.stop < length:
            found = min(found, window.stop - 1 - at)
    return found


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(axes, min_size=1, max_size=2), overlaps)
def test_each_pixel_is_taken_from_the_window_where_it_is_deepest(sizes: list[tuple[int, int]], overlap: float) -> None:
    size, window = (tuple(part) for part in zip(*sizes, strict=True))
    tiles = make_tiles(size, window, overlap=overlap)
    for pixel in itertools.product(*map(range, size)):
        owners = [t for t in tiles if all(box.start <= at < box.stop for box, at in zip(t.kept, pixel, strict=True))]
        assert len(owners) == 1
        assert depth(owners[0], pixel, size) == max(depth(tile, pixel, size) for tile in tiles)
    image = torch.arange(math.prod(size)).view(size)
    assert all(torch.equal(image[tile.window][tile.inner], image[tile.kept]) for tile in tiles)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(axes, overlaps)
def test_windows_cover_the_axis_with_the_required_overlap(axis: tuple[int, int], overlap: float) -> None:
    length, window = axis
    starts = [start for start, _, _ in _make_spans(length, window, overlap=overlap)]
    assert (starts[0], starts[-1] + window) == (0, length)
    for a, b in itertools.pairwise(starts):
        assert b > a
        assert a + window - b >= min(math.ceil(overlap * window - 1e-9), window - 1)


@pytest.mark.parametrize(
    ("length", "window", "overlap", "starts"),
    [
        (160, 64, 0.25, [0, 48, 96]),  # a multiple of 16
        (192, 96, 0.25, [0, 64, 96]),  # 72 would be no multiple of 16
        (101, 50, 0.0, [0, 50, 51]),
        (7, 7, 0.5, [0]),
        (20, 10, 0.99, list(range(11))),
    ],
)
def test_windows_start_on_the_grid_of_strides(length: int, window: int, overlap: float, starts: list[int]) -> None:
    assert [start for start, _, _ in _make_spans(length, window, overlap=overlap)] == starts


@pytest.mark.parametrize(
    ("window", "overlap", "name"),
    [
        ((64, 64, 64), 0.25, "window"),
        (0, 0.25, "window"),
        ((8, 2.5), 0.25, "window"),
        (64, 1.0, "overlap"),
        (64, math.nan, "overlap"),
    ],
)
def test_invalid_windows_are_rejected(window: Any, overlap: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        clip_window((100, 100), window, overlap=overlap)
    assert clip_window((40, 100), (64, 64), overlap=0.25) == (40, 64)


# -- maps ----------------------------------------------------------------------------------------------


class Convolutional(nn.Module):
    """Convolutions only; with a stride of 2, halved and doubled in between."""

    def __init__(self, dims: int, channels: int = 2, classes: int = 3, *, stride: int = 1) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.first = conv(channels, 6, 3, padding=1, stride=stride)
        self.second = conv(6, 6, 3, padding=1)
        self.head = conv(6, classes, 1)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.second(self.first(x).tanh()).tanh())
        return F.interpolate(z, scale_factor=float(self.stride)) if self.stride > 1 else z


def bootstrapped(net: nn.Module) -> NeuBootsPredictor:
    return NeuBootsPredictor(BootstrapGenerator(net).eval(), NeuBoots().weight_distribution)


def assert_maps_close(ours: SegmentationMaps, theirs: SegmentationMaps, atol: float = 2e-6) -> None:
    for name in MAPS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=atol, rtol=1e-4, msg=name)


def test_maps_are_statistics_of_the_samples() -> None:
    predictor, x = bootstrapped(Convolutional(2)), noise(2, 2, 3, 4)
    maps = predict_segmentation(predictor, x, 7, seed=3)
    expected = figures(predictor.predict(x, 7, seed=3).samples.numpy())
    for name in ("probs", "entropy", "mutual_information", "labels", "confidence"):
        np.testing.assert_allclose(getattr(maps, name).numpy(), expected[name], atol=2e-6, err_msg=name)
    torch.testing.assert_close(maps.std, predictor.predict(x, 7, seed=3).std.mean(1))  # exact moments
    assert (maps.num_samples, maps.seed, maps.num_classes, maps.size) == (7, 3, 3, (3, 4))
    one_logit = predict_segmentation(DeterministicPredictor(nn.Conv2d(2, 1, 1)), x, 5, window=2)
    assert one_logit.probs.shape == (2, 2, 3, 4)


@pytest.mark.parametrize(
    ("size", "window", "overlap", "stride"),
    [
        ((37, 50), 16, 0.25, 1),  # neighbors share 4 pixels, of which 2 to each side are context
        ((17, 25), (9, 7), 0.6, 1),
        ((11, 7), 100, 0.25, 1),
        ((64, 48), 32, 0.25, 2),
        ((40, 72), (24, 24), 0.4, 2),  # a step of 14 would leave the net's grid
        ((13, 18, 9), (13, 8, 20), 0.5, 1),
        ((24, 20, 32), (16, 20, 16), 0.5, 2),
    ],
)
def test_tiled_maps_equal_those_of_the_whole_image(size: Any, window: Any, overlap: float, stride: int) -> None:
    predictor, x = bootstrapped(Convolutional(len(size), stride=stride)), noise(2, 2, *size)
    whole = predict_segmentation(predictor, x, 6, seed=1)
    for batch_size in (1, 5):
        options: dict[str, Any] = {"window": window, "overlap": overlap, "batch_size": batch_size}
        assert_maps_close(predict_segmentation(predictor, x, 6, seed=1, **options), whole)


def test_pixels_without_context_are_not_blended() -> None:
    predictor, x = bootstrapped(Convolutional(2)), noise(2, 2, 21, 30)
    tiled = predict_segmentation(predictor, x, 5, window=8, overlap=0.0)
    for tile in make_tiles((21, 30), (8, 8), overlap=0.0):
        alone = predict_segmentation(predictor, x[(..., *tile.window)], 5)
        for name in MAPS:
            ours = getattr(tiled, name)[(..., *tile.kept)]
            torch.testing.assert_close(ours, getattr(alone, name)[(..., *tile.inner)], atol=2e-6, rtol=1e-4)


def test_net_sees_only_windows() -> None:
    net, shapes, x = nn.Conv3d(1, 3, 1), list[torch.Size](), noise(2, 1, 40, 40, 12)
    net.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    predictor = DeterministicPredictor(net)
    maps = predict_segmentation(predictor, x, 3, window=(16, 16, 16), batch_size=4)
    assert set(shapes[:-1]) == {(4, 1, 16, 16, 12)}
    assert sum(shape[0] for shape in shapes) == 2 * 9
    assert_maps_close(maps, predict_segmentation(predictor, x, 3))


class Halving(nn.Module):
    """As torchvision's nets: a dict with a second output, scaled up from half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.ReLU())
        self.classifier, self.aux = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x)
        heads = {"out": self.classifier, "aux": self.aux}
        return {name: F.interpolate(head(features), scale_factor=2.0) for name, head in heads.items()}


@pytest.mark.parametrize("name", list_methods(task="segmentation"))
def test_every_method_predicts_in_windows(name: str) -> None:
    x = noise(8, 1, 16, 16)
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 0] > 1).long())
    method = create_method(name, loss=nn.CrossEntropyLoss(ignore_index=255), **quick_options(name))
    predictor = method.fit(Halving, data, TrainingConfig(epochs=1, batch_size=4, progress=False))
    whole, tiled = (predict_segmentation(predictor, x[:2], 4, window=window, overlap=0.5) for window in (None, 8))
    torch.testing.assert_close(tiled.probs.sum(1), torch.ones(2, 16, 16))
    assert bool((tiled.mutual_information <= tiled.entropy).all())
    assert (float(tiled.std.max()) > 0) == (name != "deterministic")
    if name != "mc-dropout":  # whose masks depend on the position in the window
        assert_maps_close(tiled, whole, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_maps_are_single_precision_for_any_net(dtype: torch.dtype) -> None:
    x, net = noise(2, 1, 12, 10), Convolutional(2, channels=1)
    expected = predict_segmentation(bootstrapped(net), x, 300)
    found = predict_segmentation(bootstrapped(net.to(dtype)), x, 300)
    for name in MAPS:
        assert getattr(found, name).dtype == torch.float32
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0.1, atol=0.01)


class Skip(nn.Module):
    """A U-Net's skip connection, which an odd size breaks."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)


@pytest.mark.parametrize(
    ("net", "x", "options", "name"),
    [
        (nn.AvgPool2d(2), noise(1, 3, 8, 8), {}, "predictor"),
        (nn.Flatten(), noise(1, 3, 8, 8), {}, "predictor"),
        (nn.Identity(), noise(3, 8, 8), {}, "x"),
        (nn.Identity(), noise(0, 3, 8, 8), {}, "x"),
        (nn.Identity(), np.zeros((1, 3, 8, 8)), {}, "x"),
        (nn.Identity(), noise(1, 3, 8, 8), {"batch_size": 0}, "batch_size"),
        (nn.Threshold(9.0, math.nan), noise(1, 3, 8, 8), {}, "predictor"),
    ],
)
def test_invalid_images_are_rejected(net: nn.Module, x: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        predict_segmentation(DeterministicPredictor(net), x, 2, **options)
    assert error.value.name == name


def test_failure_of_the_net_names_the_window() -> None:
    with pytest.raises(RuntimeError) as caught:
        predict_segmentation(DeterministicPredictor(Skip()), noise(1, 3, 8, 8), 2, window=5)
    assert "(1, 3, 5, 5)" in caught.value.__notes__[0]
