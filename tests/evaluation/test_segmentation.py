"""Segmentation: windows give what the whole gives, figures are other libraries', files say what the maps say."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _reference as oracle
import nibabel
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import torch.nn.functional as F
from _nets import noise
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_jaccard_index

import neuboots
from neuboots import BatchEnsemble, DeepEnsemble, Deterministic, MCDropout, NeuBoots, Predictor, TrainingConfig
from neuboots.evaluation.segmentation import (
    SegmentationMaps,
    SegmentationReport,
    evaluate_segmentation,
    predict_segmentation,
    write_maps,
)
from neuboots.evaluation.segmentation.io import class_colors, colorize_values
from neuboots.evaluation.segmentation.metrics import (
    UNCERTAINTY_MEASURES,
    UncertaintySums,
    find_boundaries,
    make_timing_net,
)
from neuboots.evaluation.segmentation.predict import make_tiles
from neuboots.generator import BootstrapGenerator
from neuboots.methods import METHODS as REGISTRY
from neuboots.methods import DeterministicPredictor, NeuBootsPredictor
from neuboots.prediction import SampleStream, stream_forward_passes

FIGURES = ("probs", "entropy", "mutual_information", "std")


class Seeing(nn.Module):
    """Convolutions only: it sees `radius` pixels to each side; with a stride of 2, halves and doubles in between."""

    def __init__(self, dims: int, channels: int = 2, classes: int = 3, *, stride: int = 1) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.first = conv(channels, 6, 3, padding=1, stride=stride)
        self.second = conv(6, 6, 3, padding=1)
        self.head = conv(6, classes, 1)
        self.stride = stride
        self.radius = 2 if stride == 1 else 4  # 1 + 1; or 1 + 2 · 1, and 1 for the place within the coarse pixel

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.second(self.first(x).tanh()).tanh())
        return F.interpolate(z, scale_factor=float(self.stride)) if self.stride > 1 else z


def bootstrapped(net: nn.Module) -> NeuBootsPredictor:
    return NeuBootsPredictor(BootstrapGenerator(net).eval(), NeuBoots().weight_distribution)


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net: nn.Module = make()
        return net.eval()


def assert_maps_close(ours: SegmentationMaps, theirs: SegmentationMaps, atol: float = 2e-6) -> None:
    for name in FIGURES:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=atol, rtol=1e-4, msg=name)


# -- segment -------------------------------------------------------------------------------------------


def test_without_a_window_the_maps_are_the_figures_of_the_samples() -> None:
    predictor, x = bootstrapped(seeded(lambda: Seeing(2))), noise(2, 2, 3, 4)
    maps = predict_segmentation(predictor, x, 7, seed=3)
    expected = oracle.figures(predictor.predict(x, 7, seed=3).samples.numpy())
    exact = predictor.predict(x, 7, seed=3).std.mean(1)  # of infinitely many, where the method knows it
    for name in ("probs", "entropy", "mutual_information", "labels", "confidence"):
        np.testing.assert_allclose(getattr(maps, name).numpy(), expected[name], atol=2e-6, err_msg=name)
    torch.testing.assert_close(maps.std, exact)
    assert (maps.num_samples, maps.seed, maps.num_classes, maps.size) == (7, 3, 3, (3, 4))


@pytest.mark.parametrize(
    ("size", "window", "overlap", "stride"),
    [
        ((37, 50), 16, 0.25, 1),  # neighbours share 4 pixels, of which 2 to each side are context
        ((37, 50), (16, 64), 0.5, 1),
        ((17, 25), (9, 7), 0.6, 1),
        ((64, 48), 32, 0.25, 2),
        ((40, 72), (24, 24), 0.4, 2),  # a step of 14 would leave the net's grid
        ((13, 18, 9), 8, 0.5, 1),
        ((13, 18, 9), (13, 8, 20), 0.5, 1),
        ((24, 20, 32), (16, 20, 16), 0.5, 2),
    ],
)
def test_with_enough_context_windows_give_what_the_whole_gives(
    size: tuple[int, ...], window: Any, overlap: float, stride: int
) -> None:
    predictor = bootstrapped(seeded(lambda: Seeing(len(size), stride=stride)))
    x = noise(2, 2, *size)
    whole = predict_segmentation(predictor, x, 6, seed=1)
    for batch_size in (1, 5):
        tiled = predict_segmentation(predictor, x, 6, seed=1, window=window, overlap=overlap, batch_size=batch_size)
        assert_maps_close(tiled, whole)


def test_every_pixel_comes_from_the_window_that_owns_it_and_from_no_other() -> None:
    """Without context the windows differ from the whole; each still gives its own pixels, unblended."""
    predictor, x = bootstrapped(seeded(lambda: Seeing(2))), noise(2, 2, 21, 30)
    whole, tiled = (predict_segmentation(predictor, x, 5, window=window, overlap=0.0) for window in (None, 8))
    assert float((whole.entropy - tiled.entropy).abs().max()) > 1e-3
    for tile in make_tiles((21, 30), (8, 8), overlap=0.0):
        alone = predict_segmentation(predictor, x[(..., *tile.window)], 5)
        for name in FIGURES:
            ours = getattr(tiled, name)[(..., *tile.kept)]
            torch.testing.assert_close(ours, getattr(alone, name)[(..., *tile.inner)], atol=2e-6, rtol=1e-4)


def test_a_window_larger_than_the_image_is_the_image() -> None:
    predictor, x = bootstrapped(seeded(lambda: Seeing(2))), noise(3, 2, 11, 7)
    whole, tiled = (
        predict_segmentation(predictor, x, 4),
        predict_segmentation(predictor, x, 4, window=100, batch_size=3),
    )
    assert all(torch.equal(getattr(whole, name), getattr(tiled, name)) for name in FIGURES)


@dataclass(frozen=True)
class Recording(Predictor):
    """Passes one after the other, each with its own noise in the weights; remembers what it was asked."""

    asked: list[tuple[int, ...]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    classes: int = 3

    @property
    def net(self) -> None:
        return None

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        self.asked.append(tuple(x.shape))
        weights = noise(num_samples, self.classes, x.shape[1], seed=seed).to(self.dtype)
        return stream_forward_passes(
            num_samples, lambda b: torch.einsum("kc,nc...->nk...", weights[b], x.to(self.dtype))
        )

    def config(self) -> dict[str, Any]:
        return {}


def test_the_net_never_sees_more_than_its_windows() -> None:
    """512 × 512 × 64 voxels fit because a window is all that is ever computed on at once."""
    predictor, x = Recording(), noise(2, 1, 40, 40, 12)
    maps = predict_segmentation(predictor, x, 3, window=(16, 16, 16), batch_size=4)
    assert set(predictor.asked[:-1]) == {(4, 1, 16, 16, 12)}
    assert predictor.asked[-1][0] <= 4
    assert sum(shape[0] for shape in predictor.asked) == 2 * 9
    assert_maps_close(maps, predict_segmentation(predictor, x, 3))  # a net without context is the same on any window


class Halving(nn.Module):
    """As torchvision's: a dict with a second output, scaled up from half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.ReLU())
        self.classifier, self.aux = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x)
        heads = {"out": self.classifier, "aux": self.aux}
        return {name: F.interpolate(head(features), scale_factor=2.0) for name, head in heads.items()}


@pytest.mark.parametrize("name", [name for name, entry in REGISTRY.items() if "segmentation" in entry.tasks])
def test_every_method_gives_maps_in_windows(name: str) -> None:
    """Of a net like torchvision's; in windows the same as of the whole, but where masks lie by place."""
    x, y = discs(8, (16, 16), 0)
    method = REGISTRY[name].make(loss=nn.CrossEntropyLoss(ignore_index=255))
    predictor = method.fit(Halving, TensorDataset(x, y), TrainingConfig(epochs=1, batch_size=4, progress=False))
    whole, tiled = (predict_segmentation(predictor, x[:2], 4, window=window, overlap=0.5) for window in (None, 8))
    assert tiled.probs.shape == (2, 3, 16, 16)
    torch.testing.assert_close(tiled.probs.sum(1), torch.ones(2, 16, 16))
    assert bool((tiled.mutual_information <= tiled.entropy).all())
    assert (float(tiled.std.max()) > 0) == (name != "deterministic")
    if name != "mc-dropout":
        assert_maps_close(tiled, whole, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_nets_of_any_precision_are_measured(dtype: torch.dtype) -> None:
    """Sums of a hundred replicates in half precision would not be those of probabilities."""
    x, y = discs(2, (12, 10), 1)
    net = seeded(lambda: Seeing(2, channels=1))
    expected = predict_segmentation(bootstrapped(net), x, 300)
    found = predict_segmentation(bootstrapped(net.to(dtype)), x, 300)
    for figure in FIGURES:
        torch.testing.assert_close(getattr(found, figure), getattr(expected, figure), rtol=0.1, atol=0.01)
    assert float(found.mutual_information.mean()) == pytest.approx(float(expected.mutual_information.mean()), rel=0.03)
    assert evaluate_segmentation(bootstrapped(net), TensorDataset(x, y), num_samples=300, progress=False).error < 1


def test_maps_are_single_precision_and_on_the_cpu() -> None:
    maps = predict_segmentation(Recording(dtype=torch.float64), noise(1, 1, 6, 6), 3, window=4)
    assert {(getattr(maps, name).dtype, getattr(maps, name).device.type) for name in FIGURES} == {
        (torch.float32, "cpu")
    }


def test_one_logit_is_two_classes() -> None:
    predictor, x = Recording(classes=1), noise(1, 2, 9, 9)
    maps = predict_segmentation(predictor, x, 5, window=4)
    assert maps.probs.shape == (1, 2, 9, 9)
    samples = predictor.predict(x, 5).samples
    torch.testing.assert_close(maps.probs[:, 1], samples.sigmoid().mean(0)[:, 0])
    assert torch.equal(maps.labels, (maps.probs[:, 1] > 0.5).long())


class Shrinking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)


class Joining(nn.Module):
    """A U-Net's skip, which a size that is not even breaks."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)


@pytest.mark.parametrize(
    ("net", "x", "options", "sentence"),
    [
        (Shrinking(), noise(1, 3, 8, 8), {}, r"outputs of size \(4, 4\) for inputs of size \(8, 8\).*fits its strides"),
        (Shrinking(), noise(1, 3, 8, 8), {"window": 6}, r"outputs of size \(3, 3\) for inputs of size \(6, 6\)"),
        (nn.Flatten(), noise(1, 3, 8, 8), {}, r"outputs of size \(\) for inputs"),
        (nn.Identity(), noise(3, 8, 8), {}, r"got x of shape \(3, 8, 8\).*x\[None\] makes a batch of one"),
        (nn.Identity(), noise(0, 3, 8, 8), {}, r"got x of shape \(0, 3, 8, 8\)"),
        (nn.Identity(), np.zeros((1, 3, 8, 8)), {}, "got x of type ndarray.*torch.as_tensor"),
        (nn.Identity(), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), {}, "got uint8 inputs"),
        (nn.Identity(), torch.full((1, 3, 8, 8), torch.nan), {"window": 4}, "192 NaN or infinite"),
        (nn.Conv2d(3, 2, 1), torch.full((1, 3, 8, 8), 3e38), {}, "the net gives NaN or infinite outputs"),
        (nn.Identity(), noise(1, 3, 8, 8), {"window": (4, 4, 4)}, "a window of 3 axes"),
        (nn.Identity(), noise(1, 3, 8, 8), {"window": 4, "overlap": 1.0}, "got overlap=1.0"),
        (nn.Identity(), noise(1, 3, 8, 8), {"batch_size": 0}, "got batch_size=0"),
        (nn.Identity(), noise(1, 3, 8, 8), {"num_samples": 0}, "got B = 0"),
    ],
)
def test_what_cannot_be_segmented_is_refused(net: nn.Module, x: Any, options: dict[str, Any], sentence: str) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(9.0)
    with pytest.raises(ValueError, match=sentence):
        predict_segmentation(DeterministicPredictor(net), x, **{"num_samples": 2} | options)


def test_a_net_that_breaks_on_a_window_says_on_which() -> None:
    with pytest.raises(RuntimeError) as caught:
        predict_segmentation(DeterministicPredictor(Joining()), noise(1, 3, 8, 8), 2, window=5)
    assert "(1, 3, 5, 5)" in caught.value.__notes__[0]


def test_a_bare_net_is_no_predictor() -> None:
    with pytest.raises(ValueError, match="got a Conv2d; expected a predictor"):
        predict_segmentation(nn.Conv2d(1, 1, 1), noise(1, 1, 4, 4))  # type: ignore[arg-type]


# -- segmentation --------------------------------------------------------------------------------------


def discs(count: int, size: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of a bright disc with a dark core: x (n, 1, *) and labels 0, 1, 2, a void edge around."""
    rng = torch.Generator().manual_seed(seed)
    place = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij")).float()  # (dims, *)
    middle = torch.tensor(size) / 2 + 4 * torch.rand(count, len(size), generator=rng) - 2
    radius = min(size) / 4 * (1 + torch.rand(count, generator=rng))
    distance = (place[None] - middle.view(count, -1, *[1] * len(size))).norm(dim=1)  # (n, *)
    r = radius.view(-1, *[1] * len(size))
    y = (distance < r).long() + (distance < r / 2).long()
    x = torch.tensor([0.0, 1.0, -1.0])[y] + 0.6 * torch.randn(y.shape, generator=rng)
    y[:, 0] = 255
    return x[:, None], y


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 3, 1)
    )


RECIPE = TrainingConfig(epochs=10, batch_size=4, optimizer=partial(torch.optim.Adam, lr=0.02), progress=False)
METHODS = {
    "deterministic": Deterministic(loss=nn.CrossEntropyLoss(ignore_index=255)),
    "neuboots": NeuBoots(loss=nn.CrossEntropyLoss(ignore_index=255)),
    "mc_dropout": MCDropout(loss=nn.CrossEntropyLoss(ignore_index=255)),
    "deep_ensemble": DeepEnsemble(loss=nn.CrossEntropyLoss(ignore_index=255), num_members=2),
    "batch_ensemble": BatchEnsemble(loss=nn.CrossEntropyLoss(ignore_index=255), num_members=2),
}


@pytest.fixture(scope="module", params=METHODS)
def fitted(request: pytest.FixtureRequest) -> Predictor:
    found: Predictor = METHODS[request.param].fit(small_net, TensorDataset(*discs(48, (24, 24), 0)), RECIPE)
    return found


@pytest.fixture(scope="module")
def trained() -> Predictor:
    return METHODS["neuboots"].fit(small_net, TensorDataset(*discs(48, (24, 24), 0)), RECIPE)


class Sizes(Dataset[Any]):
    """Images of several sizes."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.rows = [tuple(part[0] for part in discs(1, size, seed)) for seed, size in enumerate(sizes, 7)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Streamed(IterableDataset[Any]):
    def __init__(self, rows: Dataset[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows[i] for i in range(len(self.rows)))  # type: ignore[arg-type]


SIZES = Sizes((24, 24), (24, 24), (20, 33), (24, 24), (17, 26))


def test_every_method_beats_the_majority_and_knows_where_it_is_wrong(fitted: Predictor) -> None:
    found = evaluate_segmentation(fitted, SIZES, num_samples=6, progress=False)
    assert found.mean_iou > 2 * found.majority["mean_iou"]
    assert found.mean_dice > 1.5 * found.majority["mean_dice"]
    assert found.error < found.majority["error"] / 2
    assert found.entropy_ratio is not None
    assert found.entropy_ratio > 2
    figures = found.figures
    assert figures["entropy_auroc"] > 0.8
    assert figures["entropy_border_ratio"] > 1.5
    assert figures["error_border"] > figures["error_inside"]
    assert found.relative_time is not None
    assert found.relative_time > 0
    assert found.seconds > 0


def test_a_plain_pass_is_one_that_computes(fitted: Predictor) -> None:
    """A method that keeps only the architecture of its net has it filled: on torch's meta device no pass takes time."""
    net = make_timing_net(fitted)
    assert net is not None
    assert not any(tensor.is_meta for tensor in net.parameters())
    assert net(noise(1, 1, 8, 8)).shape == (1, 3, 8, 8)


def flat(predictor: Predictor, data: Dataset[Any], B: int) -> dict[str, Tensor]:
    """Each figure of each pixel that has a label, image by image."""
    parts: list[dict[str, Tensor]] = []
    for i in range(len(data)):  # type: ignore[arg-type]
        x, y = data[i]
        said = predictor.predict(x[None], B, seed=1)
        kept = y != 255
        part = {"y": y[kept], "probs": said.probs[0].movedim(0, -1)[kept], "std": said.std.mean(1)[0][kept]}
        part |= {name: getattr(said, name)[0][kept] for name in ("entropy", "mutual_information", "labels")}
        parts.append(part | {"border": slow_borders(y)[kept]})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def slow_borders(y: Tensor) -> Tensor:
    """Pixel by pixel: does the neighbourhood hold another label that is not void?"""
    found = torch.zeros(y.shape, dtype=torch.bool)
    for at in itertools.product(*map(range, y.shape)):
        near = itertools.product(*(range(max(0, k - 1), min(n, k + 2)) for k, n in zip(at, y.shape, strict=True)))
        found[at] = y[at] != 255 and any(y[other] not in (255, y[at]) for other in near)
    return found


@pytest.mark.parametrize("size", [(9, 7), (1, 6), (5, 4, 6)])
def test_borders_are_found_pixel_by_pixel(size: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(2)
    y = torch.randint(3, (2, *size), generator=rng) // 2  # mostly 0
    y[torch.rand(y.shape, generator=rng) < 0.2] = 255
    found = find_boundaries(y, ignore_index=255)
    assert torch.equal(found, torch.stack([slow_borders(each) for each in y]))
    assert 0 < int(found.sum()) < found.numel()


def test_what_rounding_takes_below_zero_is_zero() -> None:
    values = torch.tensor([-0.0, -1e-9, 0.0, 0.5]).expand(3, 4)
    found = UncertaintySums.of(values, torch.tensor([True, False, True, True]), torch.zeros(4, dtype=torch.bool))
    assert found.auroc("entropy") == pytest.approx((0.5 + 0.5 + 1) / 3)


def test_figures_are_those_of_other_libraries(trained: Predictor) -> None:
    found = evaluate_segmentation(trained, SIZES, num_samples=6, seed=1, progress=False)
    rows = flat(trained, SIZES, 6)
    y, guess, wrong = rows["y"], rows["labels"], rows["labels"] != rows["y"]
    assert (found.count, found.num_images) == (len(y), 5)
    figures = found.figures
    scores = {
        "iou": sklearn.metrics.jaccard_score(y, guess, average=None),
        "dice": sklearn.metrics.f1_score(y, guess, average=None),
        "mean_iou": multiclass_jaccard_index(guess, y, 3),
        "mean_dice": sklearn.metrics.f1_score(y, guess, average="macro"),
        "error": 1 - sklearn.metrics.accuracy_score(y, guess),
        "nll": sklearn.metrics.log_loss(y, rows["probs"].double() / rows["probs"].double().sum(1, keepdim=True)),
    }
    for name, theirs in scores.items():
        np.testing.assert_allclose(figures[name], theirs, rtol=1e-5, err_msg=name)
    # A confidence at the edge of a bin may fall on either side of it.
    assert found.ece == pytest.approx(multiclass_calibration_error(rows["probs"], y, 3, n_bins=15).item(), abs=2e-3)
    assert wrong.any()
    for name in UNCERTAINTY_MEASURES:
        values, border = rows[name], rows["border"]
        means = {
            "": values.mean(),
            "_right": values[~wrong].mean(),
            "_wrong": values[wrong].mean(),
            "_ratio": values[wrong].mean() / values[~wrong].mean(),
            "_border": values[border].mean(),
            "_inside": values[~border].mean(),
            "_border_ratio": values[border].mean() / values[~border].mean(),
        }
        for end, theirs in means.items():
            assert figures[name + end] == pytest.approx(theirs.item(), rel=1e-4), name + end
        # Levels are told apart to 0.4 %: the rank of a pixel is known up to those at its own level.
        assert figures[f"{name}_auroc"] == pytest.approx(sklearn.metrics.roc_auc_score(wrong, values), abs=2e-3)
        for where, place in (("border", border), ("inside", ~border)):
            assert figures[f"error_{where}"] == pytest.approx(wrong[place].double().mean().item())
    assert figures["border_share"] == pytest.approx(rows["border"].double().mean().item())


def assert_same(ours: SegmentationReport, theirs: SegmentationReport, *, rounding: float = 0.0) -> None:
    """Every figure but the times; a confidence that rounding carries over the edge of a bin takes its pixel along."""
    expected = theirs.figures
    for name, value in ours.figures.items():
        if name not in ("seconds", "relative_time"):
            slack = 500 * rounding if name in ("ece", "mce") or "auroc" in name else rounding
            assert value == pytest.approx(expected[name], rel=1e-9 + 50 * rounding, abs=1e-12 + slack), name


def test_figures_depend_neither_on_order_nor_on_batches_nor_on_the_kind_of_data(trained: Predictor) -> None:
    whole = evaluate_segmentation(trained, SIZES, num_samples=4, progress=False)
    backwards = [SIZES[i] for i in (4, 3, 2, 1, 0)]  # single rows
    sources: list[Any] = [backwards, DataLoader(SIZES, batch_size=1), DataLoader(SIZES, batch_size=None)]
    for data in [*sources, Streamed(SIZES)]:
        for batch_size in (1, 2):
            found = evaluate_segmentation(trained, data, num_samples=4, batch_size=batch_size, progress=False)
            assert_same(found, whole, rounding=1e-6)


def test_parts_add(trained: Predictor) -> None:
    both = Sizes((24, 24), (20, 33))
    parts = [evaluate_segmentation(trained, [both[i]], num_samples=4, progress=False) for i in (0, 1)]
    total, whole = sum(parts), evaluate_segmentation(trained, both, num_samples=4, progress=False)
    assert isinstance(total, SegmentationReport)
    assert total.num_images == 2
    assert total.seconds == pytest.approx(sum(part.seconds for part in parts) / 2)
    assert_same(total, whole)
    with pytest.raises(ValueError, match="got num_samples=4 and num_samples=5"):
        _ = parts[0] + evaluate_segmentation(trained, [both[0]], num_samples=5, progress=False)


def test_large_images_are_tallied_in_pieces(trained: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = discs(2, (24, 24), 3)
    maps = predict_segmentation(trained, x, 4)
    whole = SegmentationReport.of(maps, y)
    monkeypatch.setattr("neuboots.evaluation.segmentation.metrics._TOGETHER", 100)
    pieces = SegmentationReport.of(maps, y)
    assert pieces.count == whole.count == 2 * 23 * 24
    assert_same(pieces, whole)


def test_figures_with_windows_are_those_of_the_tiled_maps(trained: Predictor) -> None:
    x, y = discs(3, (24, 40), 3)
    found = evaluate_segmentation(trained, TensorDataset(x, y), num_samples=4, window=16, batch_size=2, progress=False)
    maps = predict_segmentation(trained, x, 4, window=16)
    assert_same(found, SegmentationReport.of(maps, y), rounding=1e-6)


def test_large_images_go_one_by_one_and_small_ones_together() -> None:
    for size, windows in ((8, [4, 2]), (24, [4, 4, 1] * 6)):
        predictor = Recording()
        data = TensorDataset(noise(6, 1, size, size), torch.zeros(6, size, size))
        evaluate_segmentation(predictor, data, num_samples=2, window=8, overlap=0.0, batch_size=4, progress=False)
        assert [shape[0] for shape in predictor.asked] == windows


def test_masks_come_as_bytes_floats_or_with_an_axis_for_their_channel(trained: Predictor) -> None:
    x, y = discs(2, (24, 24), 3)
    whole = evaluate_segmentation(trained, TensorDataset(x, y), num_samples=4, progress=False)
    for masks in (y.to(torch.uint8), y.float(), y[:, None], y[:, None].to(torch.uint8)):
        found = evaluate_segmentation(trained, TensorDataset(x, masks), num_samples=4, progress=False)
        assert_same(found, whole)
    rows = [(image, mask[None]) for image, mask in zip(x, y, strict=True)]
    assert_same(evaluate_segmentation(trained, rows, num_samples=4, progress=False), whole)


def test_volumes_are_measured_as_images_are() -> None:
    x, y = discs(2, (10, 9, 8), 1)
    predictor = bootstrapped(seeded(lambda: Seeing(3, channels=1)))
    found = evaluate_segmentation(predictor, TensorDataset(x, y), num_samples=3, window=6, progress=False)
    assert found.count == 2 * 9 * 9 * 8
    rows = [(x[0], y[0]), (x[1], y[1])]  # (1, D, H, W) and (D, H, W)
    again = evaluate_segmentation(predictor, rows, num_samples=3, window=6, progress=False)
    assert_same(again, found)


def test_the_majority_is_a_constant_net() -> None:
    """Biases that are the logarithms of the frequencies give each figure that `majority` states."""
    x, y = discs(4, (24, 24), 5)
    y = torch.where(y == 255, y, 2 - y)  # the last class is the most frequent
    shares = torch.bincount(y[y != 255], minlength=4)[:3] / (y != 255).sum()
    net = nn.Conv2d(1, 3, 1)
    net.load_state_dict({"weight": torch.zeros(3, 1, 1, 1), "bias": shares.log()})
    found = evaluate_segmentation(DeterministicPredictor(net), TensorDataset(x, y), num_samples=1, progress=False)
    assert {name: found.figures[name] for name in found.majority} == pytest.approx(found.majority, abs=1e-6)
    assert found.majority["error"] == pytest.approx(1 - shares.max().item())
    assert found.majority["mean_iou"] == pytest.approx(shares.max().item() / 3)


def test_an_oracle_is_perfect_and_has_no_ratio() -> None:
    _, y = discs(2, (12, 12), 5)
    x = 200 * F.one_hot(y.clamp_max(2), 3).movedim(-1, 1).float()
    found = evaluate_segmentation(
        DeterministicPredictor(nn.Identity()), TensorDataset(x, y), num_samples=2, progress=False
    )
    figures = json.loads(json.dumps(found.figures, allow_nan=False))
    assert (figures["mean_iou"], figures["mean_dice"], figures["error"]) == (1.0, 1.0, 0.0)
    assert figures["entropy_wrong"] is figures["entropy_ratio"] is figures["entropy_auroc"] is None
    assert found.majority["mean_iou"] < 0.5


def test_classes_that_occur_nowhere_have_no_figure() -> None:
    x = torch.zeros(1, 4, 3, 3)
    x[:, 1] = 1.0
    y = torch.tensor([0, 1, 255]).expand(1, 3, 3)
    found = evaluate_segmentation(
        DeterministicPredictor(nn.Identity()), TensorDataset(x, y), num_samples=1, progress=False
    )
    assert found.figures["iou"] == [0.0, 0.5, None, None]
    assert found.mean_iou == 0.25
    assert found.mean_dice == pytest.approx(1 / 3)
    assert found.count == 6


def test_void_pixels_count_nowhere(trained: Predictor) -> None:
    x, y = discs(3, (24, 24), 3)
    blank = y.clone()
    blank[1] = 255  # an image without any label
    found = evaluate_segmentation(trained, TensorDataset(x, blank), num_samples=4, progress=False)
    rest = evaluate_segmentation(trained, TensorDataset(x[[0, 2]], y[[0, 2]]), num_samples=4, progress=False)
    assert found.num_images == 3
    assert_same(found, rest)
    moved = torch.where(y == 255, 99, y)
    other = evaluate_segmentation(trained, TensorDataset(x, moved), num_samples=4, ignore_index=99, progress=False)
    expected = evaluate_segmentation(trained, TensorDataset(x, y), num_samples=4, progress=False)
    assert_same(other, expected)


@pytest.mark.parametrize("ignore_index", [None, 0, -1, -100, 7, 1 << 40])
def test_void_is_any_number_or_none(trained: Predictor, ignore_index: int | None) -> None:
    x, y = discs(3, (24, 24), 3)
    y = y.masked_fill(y == 255, 1 if ignore_index is None else ignore_index)
    found = evaluate_segmentation(
        trained, TensorDataset(x, y), num_samples=4, ignore_index=ignore_index, progress=False
    )
    said, kept = predict_segmentation(trained, x, 4), y == y if ignore_index is None else y != ignore_index
    probs, truth = said.probs.movedim(1, -1)[kept], y[kept]
    wrong = probs.argmax(1) != truth
    assert found.count == len(truth)
    assert found.mean_iou == pytest.approx(multiclass_jaccard_index(probs.argmax(1), truth, 3).item(), rel=1e-5)
    assert found.ece == pytest.approx(multiclass_calibration_error(probs, truth, 3, n_bins=15).item(), abs=2e-3)
    entropy = scipy.stats.entropy(probs.double().numpy(), axis=1)
    assert found.entropy_ratio == pytest.approx(entropy[wrong].mean() / entropy[~wrong].mean(), rel=1e-4)


@dataclass(frozen=True)
class Ticking(Predictor):
    """Replicates and plain passes that take a time of their own on a clock of their own."""

    ticks: list[float]
    module_: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.module_

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        self.ticks[0] += 6.0
        return stream_forward_passes(num_samples, lambda b: x)

    def config(self) -> dict[str, Any]:
        return {}


class Slow(nn.Module):
    def __init__(self, ticks: list[float]) -> None:
        super().__init__()
        self.ticks = ticks

    def forward(self, x: Tensor) -> Tensor:
        self.ticks[0] += 2.0
        assert not self.training
        return x


def test_time_is_that_of_an_image_and_relative_to_a_plain_pass() -> None:
    ticks = [0.0]
    predictor = Ticking(ticks, Slow(ticks))
    data = TensorDataset(noise(3, 2, 8, 12), torch.zeros(3, 8, 12))
    options: dict[str, Any] = {"num_samples": 2, "clock": lambda: ticks[0], "progress": False}
    found = evaluate_segmentation(predictor, data, **options)
    assert (found.seconds, found.relative_time) == (6.0, 3.0)
    tiled = evaluate_segmentation(predictor, data, window=(8, 8), overlap=0.5, **options)  # two windows an image
    assert (tiled.seconds, tiled.relative_time) == (12.0, 3.0)
    assert evaluate_segmentation(Recording(), data, num_samples=2, progress=False).relative_time is None


def test_printed_it_is_a_small_table(trained: Predictor) -> None:
    found = evaluate_segmentation(trained, SIZES, num_samples=4, seed=2, progress=False)
    lines = str(found).splitlines()
    assert lines[0] == f"N = 5 images, {found.count:,} pixels, B = 4, seed = 2"
    assert lines[1].split() == ["figure", "value", "majority"]
    assert any(line.startswith("entropy ") for line in lines)
    assert lines[-1].endswith("× a plain pass of the net")
    assert max(map(len, lines)) <= 120
    json.dumps(found.figures, allow_nan=False)


@pytest.mark.parametrize(
    ("x", "y", "options", "sentence"),
    [
        (noise(2, 1, 8, 8), torch.zeros(2, 4, 4), {}, r"images of shape \(1, 1, 8, 8\) and masks of shape \(1, 4, 4\)"),
        (noise(2, 1, 8, 8), torch.zeros(2), {}, "a label for each pixel"),
        (noise(2, 1, 8, 8), torch.full((2, 8, 8), 7), {}, "labels run from 7 to 7; expected 0 to 2.*void"),
        (noise(2, 1, 8, 8), torch.full((2, 8, 8), 0.5), {}, "not whole numbers"),
        (noise(2, 1, 8, 8), torch.full((2, 8, 8), 255), {}, r"all void \(255\)"),
        (noise(2, 8), torch.zeros(2, 8), {}, "expected .*a label for each pixel"),
        (noise(2, 1, 8, 8), torch.zeros(2, 8, 8), {"window": (4, 4, 4)}, "a window of 3 axes"),
        (noise(2, 1, 8, 8), torch.zeros(2, 8, 8), {"batch_size": 0}, "got batch_size=0"),
        (noise(2, 1, 8, 8), torch.zeros(2, 8, 8), {"num_bins": 0}, "num_bins"),
        (noise(2, 1, 8, 8), torch.zeros(2, 8, 8), {"ignore_index": "255"}, "got void='255'; expected a whole number"),
        (noise(2, 1, 8, 8), torch.full((2, 8, 8), 255), {"ignore_index": None}, "labels run from 255 to 255"),
        (noise(2, 1, 8, 8).fill_(torch.inf), torch.zeros(2, 8, 8), {}, "NaN or infinite"),
    ],
)
def test_data_that_cannot_be_measured_are_refused(x: Tensor, y: Tensor, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate_segmentation(Recording(), TensorDataset(x, y), **{"num_samples": 2, "progress": False} | options)


def test_the_random_state_is_left_alone(trained: Predictor) -> None:
    before = torch.get_rng_state()
    evaluate_segmentation(trained, SIZES, num_samples=3, window=16, progress=False)
    assert torch.equal(before, torch.get_rng_state())


# -- files ---------------------------------------------------------------------------------------------


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def named(paths: tuple[Path, ...]) -> dict[str, Path]:
    """By the end of their names."""
    return {path.name.split(".")[0].split("-", 1)[1]: path for path in paths}


@pytest.fixture
def painted() -> tuple[SegmentationMaps, Tensor, Tensor]:
    """Two 2 × 3 images of four classes, with labels of which some are wrong and one void."""
    labels = torch.tensor([[[0, 1, 2], [3, 0, 1]], [[1, 1, 1], [1, 1, 1]]])
    probs = F.one_hot(labels, 4).movedim(-1, 1) * 0.6 + 0.1
    values = torch.arange(12.0).view(2, 2, 3) / 10
    truth = torch.tensor([[[0, 1, 1], [3, 255, 0]], [[1, 1, 1], [1, 1, 1]]])
    return SegmentationMaps(probs.float(), values, values / 2, values / 4, 5, 0), noise(2, 3, 2, 3), truth


class Halved:
    """x̂ = (x − ½) · 2."""

    def inverse(self, x: Tensor) -> Tensor:
        return x / 2 + 0.5


def test_pictures_have_the_colours_that_the_maps_say(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor]
) -> None:
    maps, x, truth = painted
    paths = write_maps(maps, x, tmp_path / "new", names=["a", "b"], labels=truth, normalization=Halved())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)
    first = named(paths[:8])
    assert list(first) == ["image", "labels", "overlay", "entropy", "mutual-information", "std", "errors", "sheet"]
    colours = np.array([[0, 0, 0], [230, 159, 0], [86, 180, 233], [0, 158, 115]], np.uint8)
    image = (x[0] / 2 + 0.5).clamp(0, 1).mul(255).round().byte().movedim(0, -1).numpy()
    labels = maps.labels[0].numpy()
    np.testing.assert_array_equal(read(first["image"]), image)
    np.testing.assert_array_equal(read(first["labels"]), labels)  # the pixels are the class numbers
    with Image.open(first["labels"]) as shown:
        np.testing.assert_array_equal(np.asarray(shown.convert("RGB")), colours[labels])
    expected = (image.astype(int) + colours[labels]) // 2
    np.testing.assert_array_equal(read(first["overlay"]), expected)
    wrong = np.array([[False, False, True], [False, False, True]])  # the void pixel is not wrong
    np.testing.assert_array_equal(read(first["errors"]), np.where(wrong[..., None], (213, 94, 0), image))
    for name, unit in (("entropy", "nats"), ("mutual-information", "nats"), ("std", "of the outputs")):
        values = getattr(maps, name.replace("-", "_"))
        top = float(values.max())  # of both images
        np.testing.assert_array_equal(read(first[name]), colorize_values(values[0], top).reshape(2, 3, 3))
        with Image.open(first[name]) as shown:
            assert shown.text["scale"] == f"0 to {top:.3g} {unit}"
    assert tuple(read(first["entropy"])[0, 0]) == (68, 1, 84)
    assert tuple(read(named(paths[8:])["entropy"])[1, 2]) == (253, 231, 37)


def test_a_sheet_shows_every_panel_and_the_classes(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor]
) -> None:
    maps, x, truth = painted
    paths = write_maps(maps, x, tmp_path, labels=truth, class_names=["sky", "Straße", "木", "a b"])
    assert paths[0].name == "image-0000-image.png"
    page = read(named(paths[:8])["0000-sheet"])
    seen = {tuple(colour) for colour in page.reshape(-1, 3).tolist()}
    assert {tuple(colour) for colour in class_colors(4).tolist()} <= seen
    assert {(68, 1, 84), (213, 94, 0), (255, 255, 255)} <= seen
    bare = write_maps(maps, x, tmp_path / "bare")
    assert "0000-errors" not in named(bare[:7])
    assert read(named(bare[:7])["0000-sheet"]).shape[1] < page.shape[1]  # neither truth nor errors


def test_without_a_normalisation_each_image_is_stretched(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor]
) -> None:
    maps, _, _ = painted
    x = torch.stack([torch.linspace(-3, 5, 6).view(1, 2, 3), torch.full((1, 2, 3), 7.0)])
    paths = write_maps(maps, x, tmp_path)
    shown = [read(path) for path in paths if path.name.endswith("-image.png")]
    np.testing.assert_array_equal(shown[0][..., 0].flatten(), [0, 51, 102, 153, 204, 255])
    assert shown[0].shape == (2, 3, 3)  # grey
    assert not shown[1].any()


def test_class_colours_are_fixed_and_differ() -> None:
    colours = class_colors(60)
    assert np.array_equal(colours[:9], class_colors(9))
    assert len(np.unique(colours, axis=0)) == 60
    far = np.abs(colours[:22, None].astype(int) - colours[None, :22]).sum(-1) + 999 * np.eye(22, dtype=int)
    assert far.min() > 30  # the 22 of PASCAL VOC can be told apart


class Whole:
    """What it is given back must be whole: the channels stand before three axes."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def inverse(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return x


AFFINE = np.array([[-1.5, 0, 0, 90], [0, 2, 0.25, -126], [0, -0.5, 3, -72], [0, 0, 0, 1]])


@pytest.fixture
def volumes() -> tuple[SegmentationMaps, Tensor, Tensor]:
    x, y = discs(2, (12, 10, 8), 4)
    return predict_segmentation(bootstrapped(seeded(lambda: Seeing(3, channels=1))), x, 3, window=8), x, y


@pytest.mark.parametrize("each", [False, True])
def test_volumes_lie_where_the_input_does(
    tmp_path: Path, volumes: tuple[SegmentationMaps, Tensor, Tensor], each: bool
) -> None:
    maps, x, y = volumes
    other = np.diag([0.5, 1.0, 2.0, 1.0])
    affine = torch.from_numpy(np.stack([AFFINE, other])) if each else AFFINE
    whole = Whole()
    paths = write_maps(
        maps, x, tmp_path, names=["v", "w"], affine=affine, labels=y, probs=True, normalization=whole if each else None
    )
    assert whole.seen == ([(1, 12, 10, 8)] * 2 if each else [])
    for i, name in enumerate(("v", "w")):
        found = {path.name: nibabel.load(path) for path in paths if path.name.startswith(name) and ".nii" in path.name}
        assert [*found] == [
            f"{name}-{part}.nii.gz" for part in ("labels", "entropy", "mutual-information", "std", "probs")
        ]
        expected = other if each and i == 1 else AFFINE
        for volume in found.values():
            np.testing.assert_array_equal(volume.affine, expected)  # numbers that single precision holds
            zooms = np.sqrt((expected[:3, :3] ** 2).sum(0))
            np.testing.assert_allclose(volume.header.get_zooms()[:3], zooms, rtol=1e-6)
            assert volume.header.get_xyzt_units()[0] == "mm"
        labels = found[f"{name}-labels.nii.gz"]
        assert labels.get_data_dtype() == np.uint8
        np.testing.assert_array_equal(np.asarray(labels.dataobj), maps.labels[i].numpy())
        for part in ("entropy", "mutual-information", "std"):
            volume = found[f"{name}-{part}.nii.gz"]
            assert volume.get_data_dtype() == np.float32
            np.testing.assert_array_equal(np.asarray(volume.dataobj), getattr(maps, part.replace("-", "_"))[i].numpy())
        np.testing.assert_array_equal(
            np.asarray(found[f"{name}-probs.nii.gz"].dataobj), maps.probs[i].movedim(0, -1).numpy()
        )
        assert read(tmp_path / f"{name}-sheet.png").ndim == 3


def test_more_than_256_classes_need_more_bits(tmp_path: Path) -> None:
    probs = torch.full((1, 300, 2, 2, 2), 1 / 300)
    probs[:, 299] = 0.5
    values = torch.zeros(1, 2, 2, 2)
    maps = SegmentationMaps(probs, values, values, values, 2, 0)
    write_maps(maps, torch.zeros(1, 1, 2, 2, 2), tmp_path)
    found = nibabel.load(tmp_path / "image-0000-labels.nii.gz")
    assert found.get_data_dtype() == np.int16
    assert np.unique(found.dataobj).tolist() == [299]
    np.testing.assert_array_equal(found.affine, np.eye(4))
    flat_maps = SegmentationMaps(probs[..., 0], *3 * [values[..., 0]], 2, 0)
    paths = write_maps(flat_maps, torch.zeros(1, 1, 2, 2), tmp_path / "flat")
    assert np.unique(read(paths[1])).tolist() == [299]


def test_a_file_is_whole_or_as_it_was(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, x, _ = painted
    paths = write_maps(maps, x, tmp_path)
    before = {path: path.read_bytes() for path in paths}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        write_maps(maps, x + noise(*x.shape), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before  # and nothing left over


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"names": ["a"]}, "got 1 names for 2 images"),
        ({"names": ["a", "../b"]}, "got the name '../b'; expected the beginning of a file's name"),
        ({"names": ["a", "/tmp/b"]}, "got the name '/tmp/b'"),
        ({"names": ["a", ".hidden"]}, "got the name '.hidden'"),
        ({"names": ["a", ""]}, "got the name ''"),
        ({"names": ["a", "b\n"]}, "got the name"),
        ({"names": ["a", "c:b"]}, "got the name 'c:b'"),
        ({"names": ["a", "b\\c"]}, "got the name"),
        ({"names": ["a", "n" * 200]}, "at most 150 bytes"),
        ({"names": ["a", 3]}, "got the name 3"),
        ({"names": ["a", "b."]}, "got the name 'b.'"),
        ({"names": ["a", "b\udc80"]}, "got the name"),
        ({"names": ["é", "e\u0301"]}, "occur twice"),
        ({"names": ["a", "A"]}, "occur twice"),
        ({"classes": ["one"]}, "got 1 names of classes; expected 4"),
        ({"affine": np.eye(4)}, "got an affine or probs=True for images"),
        ({"probs": True}, "got an affine or probs=True for images"),
        ({"normalisation": lambda x: x}, "expected one with a method inverse"),
        ({"labels": torch.zeros(2, 5, 5)}, "got labels of shape"),
        ({"labels": torch.full((2, 2, 3), 9)}, "labels run from 9 to 9"),
        ({"x": torch.zeros(2, 3, 4, 4)}, "expected the images that the maps are of"),
        ({"x": torch.zeros(1, 3, 2, 3)}, "expected the images that the maps are of"),
        ({"maps": None}, "expected what segment"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor], options: dict[str, Any], sentence: str
) -> None:
    maps, x, _ = painted
    given = {"maps": maps, "x": x} | options
    with pytest.raises(ValueError, match=sentence):
        write_maps(given.pop("maps"), given.pop("x"), tmp_path, **given)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("affine", "sentence"),
    [
        (np.eye(3), r"got an affine of shape \(3, 3\); expected \(4, 4\), or \(2, 4, 4\)"),
        (np.stack([np.eye(4)] * 3), r"got an affine of shape \(3, 4, 4\)"),
        (7, "got an affine of shape"),
        (np.zeros((4, 4)), "maps no volume into space"),
        (np.full((4, 4), np.nan), "maps no volume into space"),
        (np.diag([1.0, 0, 1, 1]), "maps no volume into space"),
    ],
)
def test_an_affine_that_is_none_is_refused(
    tmp_path: Path, volumes: tuple[SegmentationMaps, Tensor, Tensor], affine: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        write_maps(volumes[0], volumes[1], tmp_path, affine=affine)


def test_a_file_is_no_folder(tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor]) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ValueError, match="which is a file; expected a folder"):
        write_maps(painted[0], painted[1], tmp_path / "taken")
    with pytest.raises(ValueError, match=r"cannot make the folder .*below \(Not a directory\)"):
        write_maps(painted[0], painted[1], tmp_path / "taken" / "below")


def test_a_folder_that_is_read_only_is_refused(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # who runs as root may write anywhere
    with pytest.raises(ValueError, match="cannot write to the folder .*read-only"):
        write_maps(painted[0], painted[1], tmp_path)


def test_names_come_in_any_script(tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor]) -> None:
    names = ["हिन्दी, किताब", "Straße (木)"]
    paths = write_maps(painted[0], painted[1], tmp_path, names=names)
    assert all(path.is_file() for path in paths)
    assert {path.name.rsplit("-", 1)[0] for path in paths if path.name.endswith("sheet.png")} == set(names)


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_of_bands_that_are_no_colours_the_first_is_shown(
    tmp_path: Path, painted: tuple[SegmentationMaps, Tensor, Tensor], channels: int
) -> None:
    maps, x, _ = painted
    bands = x[:, :1].repeat(1, channels, 1, 1)
    bands[:, 1:] = 9.0
    shown = read(write_maps(maps, bands, tmp_path)[0])
    alone = read(write_maps(maps, x[:, :1], tmp_path / "alone")[0])
    np.testing.assert_array_equal(shown, alone)
    assert shown.max() == 255


def test_the_package_says_what_it_offers() -> None:
    assert {"segment", "segmentation", "write_maps", "Maps", "Segmented"} == set(
        neuboots.tasks.segmentation.__all__  # type: ignore[attr-defined]
    )
