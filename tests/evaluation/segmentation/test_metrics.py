"""Segmentation metrics against other libraries and slow references."""

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
from _nets import noise
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_jaccard_index

from neuboots import ArgumentError, NeuBoots, Predictor, TrainingConfig
from neuboots.evaluation.segmentation import SegmentationReport, evaluate_segmentation, metrics, predict_segmentation
from neuboots.evaluation.segmentation.metrics import (
    UNCERTAINTY_MEASURES,
    UncertaintySums,
    find_boundaries,
)
from neuboots.methods.deterministic import DeterministicPredictor

QUIET: dict[str, Any] = {"progress": False}


def discs(count: int, size: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of a bright disc with a dark core: x (n, 1, *) and labels 0, 1, 2; the first row is ignored."""
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


LOSS = nn.CrossEntropyLoss(ignore_index=255)
CONFIG = TrainingConfig(epochs=10, batch_size=4, optimizer=partial(torch.optim.Adam, lr=0.02), progress=False)


@pytest.fixture(scope="module")
def trained() -> Predictor:
    return NeuBoots(LOSS).fit(small_net, TensorDataset(*discs(48, (24, 24), 0)), CONFIG)


class Sizes(Dataset[Any]):
    """Images of several sizes."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.rows = [tuple(part[0] for part in discs(1, size, seed)) for seed, size in enumerate(sizes, 7)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SIZES.rows)


SIZES = Sizes((24, 24), (24, 24), (20, 33), (24, 24), (17, 26))


def assert_same(ours: SegmentationReport, theirs: SegmentationReport, *, rounding: float = 0.0) -> None:
    """All metrics but the times; rounding may carry a confidence over the edge of a bin."""
    expected = theirs.metrics
    for name, value in ours.metrics.items():
        if name != "seconds":
            slack = 500 * rounding if name in ("ece", "mce") or "auroc" in name else rounding
            assert value == pytest.approx(expected[name], rel=1e-9 + 50 * rounding, abs=1e-12 + slack), name


# -- metrics -------------------------------------------------------------------------------------------


def test_trained_net_beats_the_majority_and_knows_its_errors(trained: Predictor) -> None:
    report = evaluate_segmentation(trained, SIZES, num_samples=6, **QUIET)
    assert report.mean_iou > 2 * report.majority["mean_iou"]
    assert report.metrics["error"] < report.majority["error"] / 2
    assert report.metrics["entropy_ratio"] > 2
    assert report.metrics["entropy_auroc"] > 0.8
    assert report.metrics["error_border"] > report.metrics["error_inside"]
    assert report.seconds > 0


def slow_boundaries(y: Tensor) -> Tensor:
    """Pixel by pixel: whether the neighborhood has another label that counts."""
    found = torch.zeros(y.shape, dtype=torch.bool)
    for at in itertools.product(*map(range, y.shape)):
        near = itertools.product(*(range(max(0, k - 1), min(n, k + 2)) for k, n in zip(at, y.shape, strict=True)))
        found[at] = y[at] != 255 and any(y[other] not in (255, y[at]) for other in near)
    return found


@pytest.mark.parametrize("size", [(9, 7), (1, 6), (5, 4, 6)])
def test_boundaries_match_a_slow_reference(size: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(2)
    y = torch.randint(3, (2, *size), generator=rng) // 2  # mostly 0
    y[torch.rand(y.shape, generator=rng) < 0.2] = 255
    found = find_boundaries(y, ignore_index=255)
    assert torch.equal(found, torch.stack([slow_boundaries(each) for each in y]))
    assert 0 < int(found.sum()) < found.numel()


def test_negative_rounding_errors_count_as_zero() -> None:
    values = torch.tensor([-0.0, -1e-9, 0.0, 0.5]).expand(3, 4)
    sums = UncertaintySums.from_pixels(
        values, torch.tensor([True, False, True, True]), torch.zeros(4, dtype=torch.bool)
    )
    assert float(sums.means["_auroc"][0]) == pytest.approx((0.5 + 0.5 + 1) / 3)


def test_metrics_match_other_libraries(trained: Predictor) -> None:
    report = evaluate_segmentation(trained, SIZES, num_samples=6, seed=1, **QUIET)
    parts: list[dict[str, Tensor]] = []
    for x, labels in SIZES.rows:
        prediction, kept = trained.predict(x[None], 6, seed=1), labels != 255
        part = {
            "y": labels[kept],
            "probs": prediction.probs[0].movedim(0, -1)[kept],
            "std": prediction.std.mean(1)[0][kept],
        }
        part |= {name: getattr(prediction, name)[0][kept] for name in ("entropy", "mutual_information", "labels")}
        parts.append(part | {"boundary": slow_boundaries(labels)[kept]})
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    y, predicted, wrong = rows["y"], rows["labels"], rows["labels"] != rows["y"]
    assert (report.count, report.num_images) == (len(y), 5)
    found = report.metrics
    scores = {
        "iou": sklearn.metrics.jaccard_score(y, predicted, average=None),
        "dice": sklearn.metrics.f1_score(y, predicted, average=None),
        "mean_iou": multiclass_jaccard_index(predicted, y, 3),
        "mean_dice": sklearn.metrics.f1_score(y, predicted, average="macro"),
        "error": 1 - sklearn.metrics.accuracy_score(y, predicted),
        "nll": sklearn.metrics.log_loss(y, rows["probs"].double() / rows["probs"].double().sum(1, keepdim=True)),
    }
    for name, theirs in scores.items():
        np.testing.assert_allclose(found[name], theirs, rtol=1e-5, err_msg=name)
    # A confidence at the edge of a bin may fall on either side of it.
    assert found["ece"] == pytest.approx(multiclass_calibration_error(rows["probs"], y, 3, n_bins=15).item(), abs=2e-3)
    for name in UNCERTAINTY_MEASURES:
        values, boundary = rows[name], rows["boundary"]
        means = {
            "": values.mean(),
            "_right": values[~wrong].mean(),
            "_wrong": values[wrong].mean(),
            "_ratio": values[wrong].mean() / values[~wrong].mean(),
            "_border": values[boundary].mean(),
            "_inside": values[~boundary].mean(),
            "_border_ratio": values[boundary].mean() / values[~boundary].mean(),
        }
        for end, theirs in means.items():
            assert found[name + end] == pytest.approx(theirs.item(), rel=1e-4), name + end
        # Values that differ by less than 0.4 % count as equal.
        assert found[f"{name}_auroc"] == pytest.approx(sklearn.metrics.roc_auc_score(wrong, values), abs=2e-3)
    assert found["error_border"] == pytest.approx(wrong[rows["boundary"]].double().mean().item())
    assert found["border_fraction"] == pytest.approx(rows["boundary"].double().mean().item())
    lines = str(report).splitlines()
    assert lines[1].split() == ["metric", "value", "majority"]
    json.dumps(found, allow_nan=False)


def test_metrics_do_not_depend_on_order_and_batches(trained: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    whole = evaluate_segmentation(trained, SIZES, num_samples=4, **QUIET)
    assert torch.equal(torch.get_rng_state(), state)
    sources: list[Any] = [
        SIZES.rows[::-1],
        DataLoader(SIZES, batch_size=1),
        DataLoader(SIZES, batch_size=None),
        Streamed(),
    ]
    for data in sources:
        assert_same(evaluate_segmentation(trained, data, num_samples=4, batch_size=2, **QUIET), whole, rounding=1e-6)
    parts = [evaluate_segmentation(trained, SIZES.rows[a:b], num_samples=4, **QUIET) for a, b in ((0, 2), (2, 5))]
    assert_same(parts[0] + parts[1], whole)
    assert (parts[0] + parts[1]).seconds == pytest.approx(sum(part.seconds * part.num_images for part in parts) / 5)
    monkeypatch.setattr(metrics, "_MAX_PIXELS", 100)
    assert_same(evaluate_segmentation(trained, SIZES, num_samples=4, **QUIET), whole)


def test_windows_and_mask_types(trained: Predictor) -> None:
    x, y = discs(3, (24, 40), 3)
    options: dict[str, Any] = {"num_samples": 4, "window": 16, **QUIET}
    expected = SegmentationReport.from_maps(predict_segmentation(trained, x, 4, window=16), y)
    for masks in (y, y.to(torch.uint8), y.float(), y[:, None]):
        found = evaluate_segmentation(trained, TensorDataset(x, masks), batch_size=2, **options)
        assert_same(found, expected, rounding=1e-6)
    x, y = discs(2, (10, 9, 8), 1)
    volumes = evaluate_segmentation(DeterministicPredictor(nn.Conv3d(1, 3, 1)), TensorDataset(x, y), **options)
    assert volumes.count == 2 * 9 * 9 * 8


def test_majority_is_a_constant_net() -> None:
    """Biases that are the logarithms of the frequencies have the metrics that `majority` states."""
    x, y = discs(4, (24, 24), 5)
    y = torch.where(y == 255, y, 2 - y)  # the last class is the most frequent
    frequencies = torch.bincount(y[y != 255], minlength=4)[:3] / (y != 255).sum()
    net = nn.Conv2d(1, 3, 1)
    net.load_state_dict({"weight": torch.zeros(3, 1, 1, 1), "bias": frequencies.log()})
    report = evaluate_segmentation(DeterministicPredictor(net), TensorDataset(x, y), num_samples=1, **QUIET)
    assert {name: report.metrics[name] for name in report.majority} == pytest.approx(report.majority, abs=1e-6)
    assert report.majority["error"] == pytest.approx(1 - frequencies.max().item())


def test_undefined_metrics_are_none() -> None:
    _, y = discs(2, (12, 12), 5)
    x = 200 * F.one_hot(y.clamp_max(2), 4).movedim(-1, 1).float()
    report = evaluate_segmentation(DeterministicPredictor(nn.Identity()), TensorDataset(x, y), num_samples=2, **QUIET)
    found = report.metrics
    assert (found["mean_iou"], found["mean_dice"], found["error"]) == (1.0, 1.0, 0.0)
    assert found["entropy_wrong"] is found["entropy_ratio"] is found["entropy_auroc"] is found["iou"][3] is None


@pytest.mark.parametrize("ignore_index", [None, 0, -1, 1 << 40])
def test_ignored_pixels_do_not_count(trained: Predictor, ignore_index: int | None) -> None:
    x, y = discs(3, (24, 24), 3)
    y = y.masked_fill(y == 255, 1 if ignore_index is None else ignore_index)
    if ignore_index is not None:
        y[1] = ignore_index  # an image without any label
    report = evaluate_segmentation(trained, TensorDataset(x, y), num_samples=4, ignore_index=ignore_index, **QUIET)
    maps, kept = predict_segmentation(trained, x, 4), torch.ones_like(y, dtype=torch.bool)
    if ignore_index is not None:
        kept = y != ignore_index
    probs, truth = maps.probs.movedim(1, -1)[kept], y[kept]
    assert (report.count, report.num_images) == (len(truth), 3)
    assert report.mean_iou == pytest.approx(multiclass_jaccard_index(probs.argmax(1), truth, 3).item(), rel=1e-5)
    wrong = probs.argmax(1) != truth
    entropy = maps.entropy[kept]
    assert report.metrics["entropy_ratio"] == pytest.approx(
        float(entropy[wrong].mean() / entropy[~wrong].mean()), rel=1e-4
    )


# -- batches and errors --------------------------------------------------------------------------------


def test_small_images_are_batched_and_large_ones_are_not() -> None:
    for size, windows in ((8, [4, 2]), (24, [4, 4, 1] * 6)):
        net, sizes = nn.Identity(), list[int]()
        net.register_forward_pre_hook(lambda module, args, sizes=sizes: sizes.append(len(args[0])))
        data = TensorDataset(noise(6, 2, size, size), torch.zeros(6, size, size))
        options: dict[str, Any] = {"num_samples": 2, "window": 8, "overlap": 0.0, "batch_size": 4, **QUIET}
        evaluate_segmentation(DeterministicPredictor(net), data, **options)
        assert sizes == windows


@pytest.mark.parametrize(
    ("y", "options", "name"),
    [
        (torch.zeros(2, 4, 4), {}, "data"),
        (torch.zeros(2), {}, "data"),
        (torch.full((2, 8, 8), 255), {}, "data"),
        (torch.full((2, 8, 8), 7), {}, None),
        (torch.full((2, 8, 8), 0.5), {}, None),
        (torch.zeros(2, 8, 8), {"window": (4, 4, 4)}, "window"),
        (torch.zeros(2, 8, 8), {"batch_size": 0}, "batch_size"),
        (torch.zeros(2, 8, 8), {"num_bins": 0}, "num_bins"),
    ],
)
def test_invalid_data_are_rejected(y: Tensor, options: dict[str, Any], name: str | None) -> None:
    data = TensorDataset(noise(2, 3, 8, 8), y)
    with pytest.raises(ArgumentError if name else ValueError, match=name):
        evaluate_segmentation(DeterministicPredictor(nn.Identity()), data, **{"num_samples": 2, **QUIET, **options})
