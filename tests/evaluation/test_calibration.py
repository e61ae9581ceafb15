"""Calibration metrics over batches against functions of all data, and for predictors of known quality."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import neuboots
from neuboots import DeepEnsemble, Deterministic, MCDropout, NeuBoots, TrainingConfig, metrics
from neuboots._validation import ArgumentError
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.methods import DeterministicPredictor
from neuboots.nets import MLP

CONFIG = TrainingConfig(epochs=4, batch_size=64, progress=False)


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()


def lookup(scale: float) -> DeterministicPredictor:
    """Outputs that are written in the input."""
    net = nn.Linear(3, 3, bias=False)
    net.weight.data = scale * torch.eye(3)
    return DeterministicPredictor(net)


def labelled(n: int = 90) -> TensorDataset:
    y = torch.arange(n) % 3
    return TensorDataset(torch.eye(3)[y], y)


def test_perfect_predictor() -> None:
    found = evaluate_calibration(lookup(200.0), labelled(), num_samples=1, progress=False)
    values = found.metrics
    assert values.pop("accuracy") == 1.0
    assert all(abs(value) < 1e-6 for value in values.values()), values


def test_constant_predictor() -> None:
    found = evaluate_calibration(lookup(0.0), labelled(), num_samples=1, progress=False)
    assert found.metrics["error"] == pytest.approx(2 / 3)
    assert found.metrics["nll"] == pytest.approx(torch.tensor(3.0).log().item())
    assert found.metrics["ece"] == pytest.approx(0.0, abs=1e-6)  # a confidence of 1/3, and an accuracy of 1/3
    assert found.metrics["aurc"] == pytest.approx(2 / 3)
    assert found.metrics["mutual_information"] == pytest.approx(0.0, abs=1e-6)


@pytest.fixture(
    scope="module", params=[Deterministic, NeuBoots, MCDropout, DeepEnsemble], ids=lambda method: method.__name__
)
def fitted(request: pytest.FixtureRequest) -> neuboots.Predictor:
    x, y = digits()
    predictor: neuboots.Predictor = request.param().fit(
        lambda: MLP(64, 10, widths=(32,)), TensorDataset(x[:600], y[:600]), CONFIG
    )
    return predictor


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(zip(self.x, self.y, strict=True))


@pytest.mark.parametrize("batch_size", [1000, 64, 37])
def test_metrics_are_independent_of_source_and_batch_size(fitted: neuboots.Predictor, batch_size: int) -> None:
    x, y = (part[600:900] for part in digits())
    prediction = fitted.predict(x, 20, seed=1)
    sources = [TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size), Rows(x, y)]
    for data in sources:
        found = evaluate_calibration(fitted, data, num_samples=20, seed=1, batch_size=batch_size, progress=False)
        assert found.count == 300
        expected = {
            "error": metrics.error(prediction.probs, y),
            "ece": metrics.ece(prediction.probs, y),
            "nll": metrics.nll(prediction.probs, y),
            "brier": metrics.brier(prediction.probs, y),
            "adaptive_ece": metrics.adaptive_ece(prediction.probs, y),
            "aurc": metrics.aurc(prediction.probs, y),
            "paper_nll": metrics.paper_nll(prediction.mean, y),
            "entropy": prediction.entropy.mean(),
            "expected_entropy": prediction.expected_entropy.mean(),
        }
        for name, value in expected.items():
            # a confidence next to an edge of a bin may fall on its other side
            slack = 5e-3 if "ece" in name else 1e-5
            assert found.metrics[name] == pytest.approx(float(value), rel=1e-4, abs=slack), name
        assert int(found.reliability_curve.count.sum()) == 300


def test_single_logit_and_float_labels() -> None:
    net = nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 40)[:, None]
    y = (x > 0).float()
    found = evaluate_calibration(DeterministicPredictor(net), TensorDataset(x, y), num_samples=1, progress=False)
    z = net(x).detach()
    expected = nn.functional.binary_cross_entropy_with_logits(z, y)
    assert found.metrics["nll"] == pytest.approx(expected.item(), rel=1e-5)
    assert found.metrics["nll_at_mean_logit"] == pytest.approx(expected.item(), rel=1e-5)


def test_ignored_pixels_do_not_count() -> None:
    net = nn.Conv2d(2, 3, 1)
    x, y = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    y[0] = 255
    y[1, :2] = 255
    data = TensorDataset(x, y.to(torch.uint8))
    found = evaluate_calibration(
        DeterministicPredictor(net), data, num_samples=1, batch_size=1, ignore_index=255, progress=False
    )
    assert found.count == 65
    counted = y != 255
    expected = nn.functional.cross_entropy(net(x), y.where(counted, -100))
    assert found.metrics["nll"] == pytest.approx(expected.item(), rel=1e-5)
    assert found.metrics["entropy"] == pytest.approx(
        float(DeterministicPredictor(net).predict(x, 1).entropy[counted].mean()), rel=1e-5
    )
    with pytest.raises(ArgumentError, match="labels"):
        evaluate_calibration(DeterministicPredictor(net), data, num_samples=1, progress=False)


def test_net_of_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.head(torch.cat([a, b], 1))
            return out

    rows = TensorDataset(torch.randn(30, 2), torch.randn(30, 2), torch.arange(30) % 3)
    nested = Subset(Subset(rows, range(29, -1, -1)), range(10))
    predictor = DeterministicPredictor(Two())
    sources = [nested, DataLoader(nested, batch_size=4)]
    found = [
        evaluate_calibration(predictor, source, num_samples=1, progress=False).metrics["nll"] for source in sources
    ]
    a, b, y = rows[20:]
    expected = metrics.nll(predictor.predict((a, b), 1).probs, y)
    assert found == pytest.approx([float(expected)] * 2)


LOOKUP = lookup(1.0)


@pytest.mark.parametrize(
    ("predictor", "data", "options", "name"),
    [
        (nn.Linear(1, 1), labelled(), {}, "predictor"),
        (LOOKUP, 3, {}, "data"),
        (LOOKUP, [], {}, "data"),
        (LOOKUP, [(torch.eye(3)[0], 0)], {}, "data"),
        (LOOKUP, labelled(), {"batch_size": 0}, "batch_size"),
        (LOOKUP, TensorDataset(torch.eye(3), torch.rand(3)), {}, "labels"),
        (LOOKUP, TensorDataset(torch.eye(3), torch.tensor([0, 1, 5])), {}, "labels"),
        (LOOKUP, TensorDataset(torch.eye(3), torch.full((3,), 9)), {"ignore_index": 9}, "data"),
    ],
)
def test_invalid_arguments_are_errors(predictor: Any, data: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        evaluate_calibration(predictor, data, num_samples=1, progress=False, **options)
    assert error.value.name == name
