"""Figures under corruption against one-shot metrics, and on digits that get harder to read."""

from typing import Any

import pytest
import torch
from _reference import standard_errors
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from neuboots import NeuBoots, Predictor, TrainingConfig
from neuboots.data.corruptions import CORRUPTIONS, ROTATION, Corruption
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.corruption import CORRUPTION_METRICS, CorruptionReport, evaluate_corruptions
from neuboots.methods import DeterministicPredictor
from neuboots.metrics import accuracy, brier, ece, nll

QUIET: dict[str, Any] = {"progress": False}


def unchanged(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    return images.clone()


def digit_data() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits, 1×8×8 in [0, 1]: to train on, and 797 others."""
    bunch = load_digits()
    x, y = torch.from_numpy(bunch.images / 16).float()[:, None], torch.from_numpy(bunch.target)
    return TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:])


def centred(x: Tensor) -> Tensor:
    return 2 * x - 1


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    train, _ = digit_data()
    rows = TensorDataset(centred(train.tensors[0]), train.tensors[1])

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    return NeuBoots().fit(model, rows, TrainingConfig(epochs=15, batch_size=32, progress=False))


# -- known facts ---------------------------------------------------------------------------------------


def test_no_corruption_gives_the_clean_figures(predictor: Predictor) -> None:
    _, test = digit_data()
    found = evaluate_corruptions(predictor, test, {"none": unchanged}, prepare=centred, num_samples=10, **QUIET)
    for figure in CORRUPTION_METRICS:
        assert getattr(found, figure).tolist() == [[found.clean[figure]] * 5]
    prepared = TensorDataset(centred(test.tensors[0]), test.tensors[1])
    clean = evaluate_calibration(predictor, prepared, num_samples=10, **QUIET).figures
    assert found.clean == {figure: pytest.approx(clean[figure], rel=1e-6) for figure in CORRUPTION_METRICS}


@pytest.mark.parametrize("name", ["gaussian_noise", "impulse_noise", "gaussian_blur"])
def test_digits_get_harder_to_read(predictor: Predictor, name: str) -> None:
    """Severity 1 to 5 of a stronger form of the recipe, since eight pixels bear more than thirty-two."""
    _, test = digit_data()
    config = CORRUPTIONS[name]
    stronger = Corruption(name, tuple(4 * level for level in config.levels), config.apply)
    found = evaluate_corruptions(
        predictor, test, {name: stronger}, severities=(1, 3, 5), prepare=centred, num_samples=10, **QUIET
    )
    right = torch.cat([torch.tensor([found.clean["accuracy"]]), found.accuracy[0]])
    error = (0.25 / found.count) ** 0.5  # at most, of each accuracy
    assert found.clean["accuracy"] > 0.9
    assert bool((right.diff() <= standard_errors(12) * error).all()), "never better by more than chance"
    assert float(right[0] - right[-1]) > standard_errors(12) * 2**0.5 * error
    assert float(found.nll[0, -1]) > found.clean["nll"]


def test_turned_digits(predictor: Predictor) -> None:
    """Rotation has the angles for severities; upside down, most digits are others."""
    _, test = digit_data()
    found = evaluate_corruptions(
        predictor, test, ROTATION, severities=(1, 6, 12), prepare=centred, num_samples=10, **QUIET
    )
    slight, quarter, half = found.accuracy[0].tolist()
    far = standard_errors(3) * (0.5 / found.count) ** 0.5
    assert found.clean["accuracy"] > slight > quarter + far
    assert slight > half + far


# -- computed otherwise --------------------------------------------------------------------------------


def small(num: int = 30) -> TensorDataset:
    rng = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(num, 3, 6, 6, generator=rng), torch.randint(4, (num,), generator=rng))


def small_predictor() -> DeterministicPredictor:
    torch.manual_seed(0)
    return DeterministicPredictor(nn.Sequential(nn.Flatten(), nn.Linear(108, 4)))


SOME = {name: CORRUPTIONS[name] for name in ("shot_noise", "jpeg", "contrast")}


@pytest.mark.parametrize("batch_size", [7, 100])
def test_in_batches_and_at_once(batch_size: int) -> None:
    data, predictor = small(), small_predictor()
    x, y = data.tensors
    options: dict[str, Any] = {"severities": (2, 5), "prepare": centred, "num_samples": 2, "num_bins": 5, "seed": 3}
    found = evaluate_corruptions(predictor, data, SOME, batch_size=batch_size, **options, **QUIET)
    assert found.accuracy.shape == (3, 2)
    for k, corruption in enumerate(SOME.values()):
        for s, severity in enumerate((2, 5)):
            images = corruption(x, severity, seed=3)  # of all rows at once: index 0 … n − 1
            probs = predictor.predict(centred(images), 2).probs
            expected = {"accuracy": accuracy, "nll": nll, "brier": brier}
            for figure, metric in expected.items():
                assert float(getattr(found, figure)[k, s]) == pytest.approx(float(metric(probs, y)), rel=1e-6)
            assert float(found.ece[k, s]) == pytest.approx(float(ece(probs, y, num_bins=5)), rel=1e-5)


def test_other_ways_to_give_the_data() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(small())

    predictor = small_predictor()
    options: dict[str, Any] = {"severities": (1,), "num_samples": 1, **QUIET}
    whole = evaluate_corruptions(predictor, small(), SOME, **options)
    for data in (DataLoader(small(), batch_size=4), Stream()):
        other = evaluate_corruptions(predictor, data, SOME, batch_size=4, **options)
        torch.testing.assert_close(other.nll, whole.nll, rtol=1e-6, atol=0)
        assert other.count == 30
    another = evaluate_corruptions(predictor, small(), SOME, seed=1, **options)
    assert another.nll[0] != whole.nll[0], "the noise is named by the seed"
    assert torch.equal(another.nll[1:], whole.nll[1:])


def test_pixels_without_a_label_count_nowhere() -> None:
    """Segmentation, with a void label; no score is kept for a pixel."""
    torch.manual_seed(0)
    predictor = DeterministicPredictor(nn.Conv2d(3, 4, 1))
    x = small().tensors[0]
    y = torch.randint(4, (30, 6, 6), generator=torch.Generator().manual_seed(1))
    y[:, :2] = 255
    y[-5:] = 255  # the last batch has nothing that counts
    options: dict[str, Any] = {"severities": (2,), "num_samples": 1, "batch_size": 5, **QUIET}
    found = evaluate_corruptions(predictor, TensorDataset(x, y), SOME, ignore_index=255, **options)
    for k, corruption in enumerate(SOME.values()):
        probs = predictor.predict(corruption(x, 2), 1).probs.movedim(1, -1)[y != 255]
        for figure, metric in {"accuracy": accuracy, "nll": nll, "brier": brier, "ece": ece}.items():
            assert float(getattr(found, figure)[k, 0]) == pytest.approx(float(metric(probs, y[y != 255])), rel=1e-5)
    with pytest.raises(ValueError, match="labels run from 0 to 255; expected 0 to 3"):
        evaluate_corruptions(predictor, TensorDataset(x, y), SOME, **options)


def test_one_row() -> None:
    found = evaluate_corruptions(small_predictor(), small(1), SOME, severities=(1,), num_samples=1, **QUIET)
    assert found.count == 1
    assert all(bool(getattr(found, figure).isfinite().all()) for figure in CORRUPTION_METRICS)


# -- the result ----------------------------------------------------------------------------------------


def test_rows_means_and_text() -> None:
    values = torch.tensor([[0.9, 0.5], [0.7, 0.1]], dtype=torch.float64)
    clean = {"accuracy": 1.0, "ece": 0.0, "nll": 0.25, "brier": 0.5}
    found = CorruptionReport(("fog", "snow"), (1, 5), clean, values, values / 2, values * 2, values * 3, 1234, 7, 9)
    assert [(row["corruption"], row["severity"], row["accuracy"]) for row in found.rows] == [
        ("clean", 0, 1.0),
        ("fog", 1, 0.9),
        ("fog", 5, 0.5),
        ("snow", 1, 0.7),
        ("snow", 5, 0.1),
    ]
    assert found.rows[3]["brier"] == pytest.approx(2.1)
    assert str(found).splitlines() == [
        "N = 1,234, B = 7, seed 9; mean over 2 corruptions, severity 0 is clean",
        "severity  accuracy   ece   nll  brier",
        "       0         1     0  0.25    0.5",
        "       1       0.8   0.4   1.6    2.4",
        "       5       0.3  0.15   0.6    0.9",
    ]


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"predictor": nn.Linear(2, 2)}, "got a Linear; expected a predictor"),
        ({"corruptions": {}}, "got 0 corruptions and severities"),
        ({"severities": ()}, "expected at least one of each"),
        ({"severities": (1, 1)}, r"severities \(1, 1\); expected at least one of each, and none twice"),
        ({"severities": (6,)}, "got severity=6; expected a whole number from 1 to 5"),
        ({"severities": 3}, r"got severities=3; expected whole numbers, such as \(1, 3, 5\)"),
        ({"severities": (1.5,)}, "expected whole numbers, such as"),
        ({"corruptions": ["jpeg"]}, "got corruptions of type list; expected a dict of functions by name"),
        ({"corruptions": CORRUPTIONS["jpeg"]}, "got corruptions of type Corruption; expected a dict of functions"),
        ({"corruptions": {"jpeg": "jpeg"}}, "got corruptions of type str; expected a dict of functions by name"),
        (
            {"corruptions": {"none": lambda images, severity, seed, index: None}},
            r"the corruption 'none' made None of \(30, 3, 6, 6\); expected the same",
        ),
        (
            {"data": [({"x": torch.zeros(2, 3, 6, 6)}, torch.zeros(2).long())]},
            r"got inputs of type dict; expected one tensor of images, \(N, C, H, W\)",
        ),
        ({"data": []}, "got data that give no batch"),
        ({"data": [(torch.full((2, 3, 6, 6), -1.0), torch.zeros(2).long())]}, r"expected numbers in \[0, 1\]"),
        ({"data": [(torch.zeros(2, 3, 6, 6), torch.zeros(2) / 0)]}, "got labels that are not whole numbers"),
        (
            {"corruptions": {"crop": lambda images, severity, seed, index: images[..., 1:]}},
            r"the corruption 'crop' made images of shape \(30, 3, 6, 5\) of \(30, 3, 6, 6\); expected the same",
        ),
    ],
)
def test_bad_calls_get_a_sentence(arguments: dict[str, Any], sentence: str) -> None:
    call = {"predictor": small_predictor(), "data": small(), "corruptions": SOME, "num_samples": 1, **QUIET}
    with pytest.raises(ValueError, match=sentence):
        evaluate_corruptions(**{**call, **arguments})
