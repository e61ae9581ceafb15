"""Metrics on corrupted images against functions of all data, and on digits."""

from typing import Any

import pytest
import torch
from _reference import standard_errors
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, Predictor, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.data.corruptions import CORRUPTIONS, Corruption
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


def test_identity_corruption_has_clean_metrics(predictor: Predictor) -> None:
    _, test = digit_data()
    found = evaluate_corruptions(predictor, test, {"none": unchanged}, preprocess=centred, num_samples=10, **QUIET)
    for name in CORRUPTION_METRICS:
        assert getattr(found, name).tolist() == [[found.clean[name]] * 5]
    prepared = TensorDataset(centred(test.tensors[0]), test.tensors[1])
    clean = evaluate_calibration(predictor, prepared, num_samples=10, **QUIET).metrics
    assert found.clean == {name: pytest.approx(clean[name], rel=1e-6) for name in CORRUPTION_METRICS}


@pytest.mark.parametrize("name", ["gaussian_noise", "impulse_noise", "gaussian_blur"])
def test_accuracy_falls_with_severity(predictor: Predictor, name: str) -> None:
    """Severity 1 to 5 of stronger corruptions, since images of 8 × 8 pixels are more robust."""
    _, test = digit_data()
    config = CORRUPTIONS[name]
    stronger = Corruption(name, tuple(4 * level for level in config.levels), config.apply)
    found = evaluate_corruptions(
        predictor, test, {name: stronger}, severities=(1, 3, 5), preprocess=centred, num_samples=10, **QUIET
    )
    scores = torch.cat([torch.tensor([found.clean["accuracy"]]), found.accuracy[0]])
    error = (0.25 / found.count) ** 0.5  # at most, of each accuracy
    assert found.clean["accuracy"] > 0.9
    assert bool((scores.diff() <= standard_errors(12) * error).all()), "never better by more than chance"
    assert float(scores[0] - scores[-1]) > standard_errors(12) * 2**0.5 * error
    assert float(found.nll[0, -1]) > found.clean["nll"]


# -- reference values -----------------------------------------------------------------------------------


def small(num: int = 30) -> TensorDataset:
    rng = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(num, 3, 6, 6, generator=rng), torch.randint(4, (num,), generator=rng))


def small_predictor() -> DeterministicPredictor:
    torch.manual_seed(0)
    return DeterministicPredictor(nn.Sequential(nn.Flatten(), nn.Linear(108, 4)))


SOME = {name: CORRUPTIONS[name] for name in ("shot_noise", "jpeg", "contrast")}


@pytest.mark.parametrize("batch_size", [7, 100])
def test_metrics_are_independent_of_batch_size(batch_size: int) -> None:
    data, predictor = small(), small_predictor()
    x, y = data.tensors
    options: dict[str, Any] = {"severities": (2, 5), "preprocess": centred, "num_samples": 2, "num_bins": 5, "seed": 3}
    found = evaluate_corruptions(predictor, data, SOME, batch_size=batch_size, **options, **QUIET)
    assert found.accuracy.shape == (3, 2)
    for k, corruption in enumerate(SOME.values()):
        for s, severity in enumerate((2, 5)):
            images = corruption(x, severity, seed=3)  # of all rows at once: index 0 … n − 1
            probs = predictor.predict(centred(images), 2).probs
            expected = {"accuracy": accuracy, "nll": nll, "brier": brier}
            for name, metric in expected.items():
                assert float(getattr(found, name)[k, s]) == pytest.approx(float(metric(probs, y)), rel=1e-6)
            assert float(found.ece[k, s]) == pytest.approx(float(ece(probs, y, num_bins=5)), rel=1e-5)


def test_ignored_pixels_do_not_count() -> None:
    """Segmentation with an ignored label."""
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
        for name, metric in {"accuracy": accuracy, "nll": nll, "brier": brier, "ece": ece}.items():
            assert float(getattr(found, name)[k, 0]) == pytest.approx(float(metric(probs, y[y != 255])), rel=1e-5)
    with pytest.raises(ArgumentError, match="labels"):
        evaluate_corruptions(predictor, TensorDataset(x, y), SOME, **options)


# -- the result ----------------------------------------------------------------------------------------


def test_noise_depends_on_the_seed() -> None:
    one, other = (
        evaluate_corruptions(small_predictor(), small(), SOME, severities=(1,), num_samples=1, seed=seed, **QUIET)
        for seed in (0, 1)
    )
    assert one.nll[0] != other.nll[0]
    assert torch.equal(one.nll[1:], other.nll[1:])  # without noise


def test_report_rows_and_table() -> None:
    values = torch.tensor([[0.9, 0.5], [0.7, 0.1]], dtype=torch.float64)
    clean = {"accuracy": 1.0, "ece": 0.0, "nll": 0.25, "brier": 0.5}
    found = CorruptionReport(("fog", "snow"), (1, 5), clean, values, values / 2, values * 2, values * 3, 1234, 7, 9)
    assert [row["accuracy"] for row in found.rows] == [1.0, 0.9, 0.5, 0.7, 0.1]
    assert (found.rows[3]["corruption"], found.rows[3]["severity"]) == ("snow", 1)
    assert str(found).splitlines() == [
        "N = 1,234, B = 7, seed 9; mean over 2 corruptions, severity 0 is clean",
        "severity  accuracy   ece   nll  brier",
        "       0         1     0  0.25    0.5",
        "       1       0.8   0.4   1.6    2.4",
        "       5       0.3  0.15   0.6    0.9",
    ]


# -- invalid arguments ---------------------------------------------------------------------------------


def returns_none(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Any:
    return None


def crops(images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
    return images[..., 1:]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"predictor": nn.Linear(2, 2)}, "predictor"),
        ({"corruptions": {}}, "corruptions"),
        ({"corruptions": ["jpeg"]}, "corruptions"),
        ({"corruptions": {"none": returns_none}}, "corruptions"),
        ({"corruptions": {"crop": crops}}, "corruptions"),
        ({"severities": (1.5,)}, "severities"),
        ({"data": []}, "data"),
        ({"data": [(torch.zeros(2, 3, 6, 6), torch.zeros(2) / 0)]}, "labels"),
    ],
)
def test_invalid_arguments_are_errors(arguments: dict[str, Any], name: str) -> None:
    call = {"predictor": small_predictor(), "data": small(), "corruptions": SOME, "num_samples": 1, **QUIET}
    with pytest.raises(ArgumentError) as error:
        evaluate_corruptions(**{**call, **arguments})
    assert error.value.name == name
