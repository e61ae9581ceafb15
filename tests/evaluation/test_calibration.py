"""Calibration and regression: streamed figures are those of the whole, and known predictors score as they must."""

import re
from collections.abc import Callable

import pytest
import torch
from _reference import standard_errors
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import neuboots
from neuboots import DeepEnsemble, Deterministic, MCDropout, NeuBoots, TrainingConfig, metrics
from neuboots.evaluation._batching import align_labels, align_targets, iter_batches
from neuboots.evaluation.calibration import CalibrationReport, evaluate_calibration
from neuboots.evaluation.regression import evaluate_regression
from neuboots.losses import GaussianNLL
from neuboots.methods import DeterministicPredictor
from neuboots.nets import MLP

RECIPE = TrainingConfig(epochs=4, batch_size=64, progress=False)


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()


class Lookup(nn.Module):
    """Outputs that are written in the input."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight.data = scale * torch.eye(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def labelled(n: int = 90) -> TensorDataset:
    y = torch.arange(n) % 3
    return TensorDataset(torch.eye(3)[y], y)


def test_an_oracle_scores_perfectly() -> None:
    found = evaluate_calibration(DeterministicPredictor(Lookup(200.0)), labelled(), num_samples=1, progress=False)
    figures = found.figures
    assert figures.pop("accuracy") == 1.0
    assert all(abs(value) < 1e-6 for value in figures.values()), figures


def test_a_constant_predictor_scores_chance() -> None:
    found = evaluate_calibration(DeterministicPredictor(Lookup(0.0)), labelled(), num_samples=1, progress=False)
    assert found.error == pytest.approx(2 / 3)
    assert found.nll == pytest.approx(torch.tensor(3.0).log().item())
    assert found.ece == pytest.approx(0.0, abs=1e-6)  # it says a third, and is right a third of the time
    assert found.figures["aurc"] == pytest.approx(2 / 3)
    assert found.figures["mutual_information"] == pytest.approx(0.0, abs=1e-6)


@pytest.fixture(
    scope="module", params=[Deterministic, NeuBoots, MCDropout, DeepEnsemble], ids=lambda method: method.__name__
)
def fitted(request: pytest.FixtureRequest) -> neuboots.Predictor:
    x, y = digits()
    predictor: neuboots.Predictor = request.param().fit(
        lambda: MLP(64, 10, widths=(32,)), TensorDataset(x[:600], y[:600]), RECIPE
    )
    return predictor


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(zip(self.x, self.y, strict=True))


@pytest.mark.parametrize("batch_size", [1000, 64, 37])
def test_streamed_figures_are_those_of_the_whole(fitted: neuboots.Predictor, batch_size: int) -> None:
    x, y = (part[600:900] for part in digits())
    whole = fitted.predict(x, 20, seed=1)
    sources = [TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size), Rows(x, y)]
    for data in sources:
        found = evaluate_calibration(fitted, data, num_samples=20, seed=1, batch_size=batch_size, progress=False)
        assert found.count == 300
        expected = {
            "error": metrics.error(whole.probs, y),
            "ece": metrics.ece(whole.probs, y),
            "nll": metrics.nll(whole.probs, y),
            "brier": metrics.brier(whole.probs, y),
            "adaptive_ece": metrics.adaptive_ece(whole.probs, y),
            "aurc": metrics.aurc(whole.probs, y),
            "paper_nll": metrics.paper_nll(whole.mean, y),
            "entropy": whole.entropy.mean(),
            "expected_entropy": whole.expected_entropy.mean(),
        }
        for name, value in expected.items():
            # a confidence next to an edge of a bin may fall on its other side
            slack = 5e-3 if "ece" in name else 1e-5
            assert found.figures[name] == pytest.approx(float(value), rel=1e-4, abs=slack), name
        assert int(found.reliability_curve.count.sum()) == 300


def test_a_trained_net_beats_chance_on_digits(fitted: neuboots.Predictor) -> None:
    x, y = (part[600:] for part in digits())
    error = evaluate_calibration(fitted, TensorDataset(x, y), num_samples=20, progress=False).error
    assert error < 0.9 - standard_errors(4) * (0.9 * 0.1 / len(y)) ** 0.5


def test_one_logit_and_float_labels() -> None:
    net = nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 40)[:, None]
    y = (x > 0).float()
    found = evaluate_calibration(DeterministicPredictor(net), TensorDataset(x, y), num_samples=1, progress=False)
    z = net(x).detach()
    expected = nn.functional.binary_cross_entropy_with_logits(z, y)
    assert found.nll == pytest.approx(expected.item(), rel=1e-5)
    assert found.figures["nll_at_mean_logit"] == pytest.approx(expected.item(), rel=1e-5)


def test_pixels_count_as_inputs() -> None:
    net = nn.Conv2d(2, 3, 1)
    x, y = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    found = evaluate_calibration(
        DeterministicPredictor(net), TensorDataset(x, y), num_samples=1, batch_size=3, progress=False
    )
    assert found.count == 100
    assert found.nll == pytest.approx(nn.CrossEntropyLoss()(net(x), y).mean().item(), rel=1e-5)


def test_void_pixels_are_passed_over() -> None:
    net = nn.Conv2d(2, 3, 1)
    x, y = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    y[0] = 255
    y[1, :2] = 255
    data = TensorDataset(x, y.to(torch.uint8))
    found = evaluate_calibration(
        DeterministicPredictor(net), data, num_samples=1, batch_size=1, ignore_index=255, progress=False
    )
    assert found.count == 65
    kept = y != 255
    expected = nn.functional.cross_entropy(net(x), y.where(kept, -100))
    assert found.nll == pytest.approx(expected.item(), rel=1e-5)
    assert found.figures["entropy"] == pytest.approx(
        float(DeterministicPredictor(net).predict(x, 1).entropy[kept].mean()), rel=1e-5
    )
    with pytest.raises(ValueError, match="labels run from 0 to 255; .* name the label of pixels without one"):
        evaluate_calibration(DeterministicPredictor(net), data, num_samples=1, progress=False)
    with pytest.raises(ValueError, match="labels are all void"):
        evaluate_calibration(
            DeterministicPredictor(net), TensorDataset(x[:1], y[:1]), num_samples=1, ignore_index=255, progress=False
        )


def test_nets_of_several_inputs_from_any_source() -> None:
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
    found = [evaluate_calibration(predictor, source, num_samples=1, progress=False).nll for source in sources]
    a, b, y = rows[20:]
    expected = metrics.nll(predictor.predict((a, b), 1).probs, y)
    assert found == pytest.approx([float(expected)] * 2)


class Duck:
    """A data set that is no torch Dataset by name."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i >= 6:
            raise IndexError
        return torch.eye(3)[i % 3], i % 3


def test_rows_by_number_are_a_data_set() -> None:
    assert evaluate_calibration(DeterministicPredictor(Lookup(9.0)), Duck(), num_samples=1, progress=False).count == 6  # type: ignore[arg-type]


def test_whoever_stops_in_the_middle_finds_his_own_randomness() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches = iter_batches(Duck(), 2, title="", progress=False)  # type: ignore[arg-type]
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("probs", "y", "sentence"),
    [
        ((4, 3, 2, 5), (4, 5, 2), "got labels of shape (4, 5, 2); expected (4, 2, 5)"),
        ((4, 3), (2, 2), "got labels of shape (2, 2); expected (4,)"),
        ((4, 3), (4, 3), "got labels of shape (4, 3); expected (4,)"),
    ],
)
def test_labels_of_another_shape_are_refused(probs: tuple[int, ...], y: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        align_labels(torch.rand(probs).softmax(1), torch.zeros(y, dtype=torch.long))


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("got targets of shape (4, 5, 2); expected (4, 2, 5)")):
        align_targets(torch.zeros(4, 2, 5), torch.zeros(4, 5, 2))
    assert align_targets(torch.zeros(4, 1, 2), torch.zeros(4, 2)).shape == (4, 1, 2)


@pytest.mark.parametrize("y", [torch.tensor([0.0, 2.0]), torch.tensor([[0], [2]]), torch.tensor([0, 2]).byte()])
def test_labels_may_be_floats_and_have_an_axis_more(y: Tensor) -> None:
    assert align_labels(torch.rand(2, 3).softmax(1), y).tolist() == [0, 2]


def test_the_report_says_what_it_measured(fitted: neuboots.Predictor) -> None:
    x, y = digits()
    text = str(evaluate_calibration(fitted, TensorDataset(x[:50], y[:50]), num_samples=7, progress=False))
    assert text.startswith("N = 50, B = 7\n")
    assert "adaptive_ece" in text


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: evaluate_calibration(nn.Linear(1, 1), labelled()), "got a Linear; expected a predictor"),  # type: ignore[arg-type]
        (
            lambda: evaluate_calibration(DeterministicPredictor(Lookup(1.0)), 3),
            "got data of type int; expected a data set",
        ),  # type: ignore[arg-type]
        (lambda: evaluate_calibration(DeterministicPredictor(Lookup(1.0)), []), "got data that give no batch"),
        (
            lambda: evaluate_calibration(DeterministicPredictor(Lookup(1.0)), [(torch.eye(3)[0], 0)], progress=False),
            "got single rows .*; expected batches of them",
        ),
        (
            lambda: evaluate_calibration(DeterministicPredictor(Lookup(1.0)), labelled(), batch_size=0),
            "got batch_size=0; expected a whole number",
        ),
        (
            lambda: evaluate_calibration(
                DeterministicPredictor(Lookup(1.0)), TensorDataset(torch.eye(3), torch.rand(3))
            ),
            "got labels that are not whole numbers",
        ),
        (
            lambda: evaluate_calibration(
                DeterministicPredictor(Lookup(1.0)), TensorDataset(torch.eye(3), torch.tensor([0, 1, 5]))
            ),
            "labels run from 0 to 5; expected 0 to 2 for 3 classes",
        ),
        (
            lambda: evaluate_calibration(
                DeterministicPredictor(Lookup(1.0)), [(torch.eye(3) * torch.nan, torch.tensor([0, 1, 2]))]
            ),
            "NaN or infinite",
        ),
    ],
)
def test_bad_calls_get_one_sentence(call: Callable[[], CalibrationReport], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


# -- regression ----------------------------------------------------------------------------------------


def diabetes() -> tuple[Tensor, Tensor]:
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def test_the_regression_report_agrees_with_the_metrics() -> None:
    x, y = diabetes()
    fitted = NeuBoots.regression().fit(
        lambda: MLP(10, 1, widths=(16,)), TensorDataset(x[:300], y[:300]), TrainingConfig(epochs=40, progress=False)
    )
    noise = neuboots.residual_std(fitted, x[300:370], y[300:370])
    found = evaluate_regression(
        fitted, TensorDataset(x[370:], y[370:]), noise_std=noise, num_samples=30, batch_size=20, progress=False
    )
    whole = fitted.predict(x[370:], 30)
    mean, std, truth = whole.mean, whole.predictive_std(noise), y[370:, None]
    low, high = whole.prediction_interval(0.95, noise_std=noise)
    expected = {
        "rmse": metrics.rmse(mean, truth),
        "nll": metrics.gaussian_nll(mean, std, truth),
        "crps": metrics.crps(mean, std, truth),
        "coverage": metrics.coverage(low, high, truth),
        "mean_width": metrics.mean_width(low, high),
        "sharpness": metrics.sharpness(std),
    }
    for name, value in expected.items():
        assert found.figures[name] == pytest.approx(float(value), rel=1e-4), name
    assert found.figures["rmse"] < 1.0  # better than the mean of y
    assert f"N = {len(truth)}, B = 30" in str(found)


def test_a_gaussian_head_brings_its_own_noise() -> None:
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] + 0.3 * torch.randn(400, generator=torch.Generator().manual_seed(1))
    fitted = Deterministic(loss=GaussianNLL()).fit(
        lambda: MLP(2, 2, widths=(16,)), TensorDataset(x[:300], y[:300]), TrainingConfig(epochs=60, progress=False)
    )
    found = evaluate_regression(fitted, TensorDataset(x[300:], y[300:]), num_samples=1, progress=False)
    assert abs(found.figures["coverage"] - 0.95) < standard_errors(1) * (0.95 * 0.05 / 100) ** 0.5


def test_a_gaussian_head_takes_no_noise_besides() -> None:
    rows = TensorDataset(torch.ones(40, 3), torch.ones(40))
    with pytest.raises(ValueError, match="a Gaussian head brings its own noise: leave noise_std out"):
        evaluate_regression(DeterministicPredictor(nn.Linear(3, 2)), rows, noise_std=0.5, progress=False)


def test_the_net_runs_once_a_batch_and_once_for_its_first_row() -> None:
    sizes: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    rows = TensorDataset(torch.randn(50, 3), torch.randn(50, 1))
    evaluate_regression(DeterministicPredictor(Counting(3, 2)), rows, num_samples=4, batch_size=20, progress=False)
    assert sizes == [1, 20, 20, 10]
    sizes.clear()
    evaluate_regression(
        DeterministicPredictor(Counting(3, 1)), rows, noise_std=1.0, num_samples=4, batch_size=25, progress=False
    )
    assert sizes == [1, 25, 25]


def test_a_band_without_noise_is_not_taken_for_that_of_y() -> None:
    with pytest.raises(ValueError, match="got no noise_std for a net without a Gaussian head"):
        evaluate_regression(
            DeterministicPredictor(nn.Linear(2, 1)), TensorDataset(torch.ones(3, 2), torch.ones(3)), progress=False
        )
