"""Detectors against slow computations by hand, against other libraries, and on digits that the net has never seen."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sklearn.covariance
import torch
from _reference import figures, standard_errors
from scipy.spatial.distance import mahalanobis as scipy_mahalanobis
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from neuboots import DeepEnsemble, Deterministic, Laplace, MCDropout, NeuBoots, Predictor, TrainingConfig
from neuboots.evaluation.ood import (
    Detector,
    Energy,
    Entropy,
    LogisticRule,
    Mahalanobis,
    MahalanobisEnsemble,
    MaxSoftmax,
    MutualInformation,
    Odin,
    PredictiveStd,
    ReplicateDetector,
    holdout_split,
)
from neuboots.evaluation.ood.detector import select_logistic_rule
from neuboots.evaluation.ood.mahalanobis import ClassMoments, extract_features, find_stages
from neuboots.evaluation.ood.odin import confidence_direction
from neuboots.methods import METHODS, DeterministicPredictor
from neuboots.metrics import DetectionMetrics
from neuboots.nets import resnet8
from neuboots.posthoc import TemperatureScaling
from neuboots.prediction import SampleStream
from neuboots.testing import TwoBranches, Upsampling

SIMPLE = [MaxSoftmax, Entropy, MutualInformation, PredictiveStd, Energy]
RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
QUIET: dict[str, Any] = {"progress": False}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def identity() -> DeterministicPredictor:
    """Whose inputs are its logits."""
    return DeterministicPredictor(nn.Identity())


def small_data() -> TensorDataset:
    return TensorDataset(rows(60, 4), torch.arange(60) % 3)


def fit(method: Any, data: Any = None, model: Callable[[], nn.Module] | None = None) -> Predictor:
    predictor: Predictor = method.fit(model or (lambda: TwoBranches(3)), data or small_data(), RECIPE)
    return predictor


@pytest.fixture(scope="module")
def boots() -> Predictor:
    return fit(NeuBoots())


class Noisy(Predictor):
    """Replicate b is a pass of its own, through weights of its own; the chunks that were asked for are noted."""

    def __init__(self, nets: list[nn.Module]) -> None:
        self.nets, self.sizes = nets, list[int]()

    @property
    def net(self) -> None:
        return None

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        def chunks(size: int) -> Iterator[Tensor]:
            self.sizes.append(size)
            for start in range(0, num_samples, size):
                passes = range(start, min(start + size, num_samples))
                yield torch.stack([self.nets[b % len(self.nets)](x) for b in passes])

        return SampleStream(num_samples, 1, chunks)

    def config(self) -> dict[str, Any]:
        return {}


def noisy(num: int = 12) -> Noisy:
    torch.manual_seed(1)
    return Noisy([nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(num)])


# -- known facts ---------------------------------------------------------------------------------------


def constant_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.init.zeros_(net[2].weight)
    return net


@pytest.mark.parametrize("kind", [*SIMPLE, Odin, ReplicateDetector])
def test_a_constant_predictor_scores_chance(kind: type[Detector]) -> None:
    a, b = rows(40, 4), 5 + rows(30, 4, seed=1)
    detector = kind(DeterministicPredictor(constant_net()), num_samples=3).fit(a[:10], b[:10], **QUIET)
    for positive in ("in", "out"):
        assert float(detector.evaluate(a[10:], b[10:], positive=positive, **QUIET).auroc) == 0.5


@pytest.mark.parametrize("kind", [MaxSoftmax, Entropy, Energy, Odin, ReplicateDetector])
def test_an_oracle_is_perfect(kind: type[Detector]) -> None:
    """Certain inside, at a loss outside."""
    inside, outside = 9 * torch.eye(4).repeat(10, 1), 0.1 * rows(40, 4)
    inside = inside + 0.1 * rows(40, 4, seed=1)
    detector = kind(identity(), num_samples=2).fit(inside[:20], outside[:20], **QUIET)
    found = detector.evaluate(inside[20:], outside[20:], **QUIET)
    for figure in ("auroc", "aupr_in", "aupr_out", "tnr_at_tpr", "detection_accuracy"):
        assert float(getattr(found, figure)) == 1.0
    assert "positive class: in-distribution (20 in, 20 out)" in str(found)
    reverse = detector.evaluate(outside[20:], inside[20:], positive="out", **QUIET)
    assert "positive class: out-of-distribution" in str(reverse)
    assert float(reverse.auroc) == 0.0


@pytest.mark.parametrize("make", [lambda: fit(NeuBoots()), noisy])
def test_scores_are_figures_of_the_samples(make: Callable[[], Predictor]) -> None:
    predictor = make()
    x = rows(7, 4, seed=3).to(torch.float64 if isinstance(predictor, Noisy) else torch.float32)
    options = {"num_samples": 11, "seed": 4}
    prediction = predictor.predict(x, 11, seed=4)
    by_hand = figures(prediction.samples.numpy())
    mean = prediction.mean.double()  # exact where the method knows it
    expected = {
        MaxSoftmax: -by_hand["confidence"],
        Entropy: by_hand["entropy"],
        MutualInformation: by_hand["mutual_information"],
        PredictiveStd: prediction.std.double().mean(1),
        Energy: -(mean.exp().sum(1).log()),
    }
    for kind, scores in expected.items():
        np.testing.assert_allclose(kind(predictor, **options).score(x, **QUIET), scores, rtol=1e-5, atol=1e-6)
    hot = -3 * (mean / 3).exp().sum(1).log()
    np.testing.assert_allclose(Energy(predictor, temperature=3.0, **options).score(x, **QUIET), hot, rtol=1e-5)


def test_disagreement_raises_the_energy() -> None:
    apart = Noisy([nn.Linear(4, 2), nn.Linear(4, 2)])
    for net, bias in zip(apart.nets, ([4.0, 0.0], [0.0, 4.0]), strict=True):
        net.load_state_dict({"weight": torch.zeros(2, 4), "bias": torch.tensor(bias)})
    alike = Noisy([apart.nets[0]])
    x = rows(1, 4)
    assert float(Energy(apart).score(x, **QUIET)) > float(Energy(alike).score(x, **QUIET)) + 1


def test_one_number_for_an_image_of_pixels() -> None:
    net = Upsampling()
    x = rows(3, 2, 8, 8)
    predictor = DeterministicPredictor(net)
    summary = predictor.summarize(x, 2)
    scores = MaxSoftmax(predictor, num_samples=2).score(x, **QUIET)
    torch.testing.assert_close(scores, -summary.confidence.mean((1, 2)))
    assert Odin(predictor, epsilon=0.01).score(x, **QUIET).shape == (3,)
    train = TensorDataset(rows(20, 2, 8, 8, seed=1), torch.arange(20) % 2)
    detector = Mahalanobis(predictor).fit(train_data=train, **QUIET)
    torch.testing.assert_close(extract_features(detector.fitted.split, (), x)[0], net.eval().stem(x).mean((2, 3)))


# -- ODIN ----------------------------------------------------------------------------------------------


def test_odin_without_heat_and_step_is_the_baseline(boots: Predictor) -> None:
    x = rows(50, 4, seed=3)
    plain = MaxSoftmax(boots, num_samples=20, seed=2).score(x, **QUIET)
    assert torch.equal(Odin(boots, num_samples=20, seed=2, temperature=1.0, epsilon=0.0).score(x, **QUIET), plain)


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_odin_of_one_net_is_the_papers(temperature: float) -> None:
    """Cross-entropy of the predicted class, its gradient by autograd, a step against it."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = rows(20, 4).double().requires_grad_()
    logits = net(x) / temperature
    loss = nn.functional.cross_entropy(logits, logits.argmax(1), reduction="sum")
    (slope,) = torch.autograd.grad(loss, x)
    there = x.detach() - 0.05 * slope.sign()
    expected = -(net(there) / temperature).softmax(1).amax(1)
    detector = Odin(DeterministicPredictor(net), num_samples=1, temperature=temperature, epsilon=0.05)
    torch.testing.assert_close(detector.score(x.detach(), **QUIET), expected.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 100.0])
@pytest.mark.parametrize("kind", ["one pass", "passes"])
def test_the_step_goes_where_confidence_grows(kind: str, temperature: float) -> None:
    """Finite differences of log S, one input number at a time."""
    boots = NeuBoots().fit(lambda: TwoBranches(3), small_data(), RECIPE)
    boots.net.double()
    predictor: Predictor = boots if kind == "one pass" else noisy()
    x, h = rows(6, 4, seed=5).double(), 1e-5

    def log_s(inputs: Tensor) -> Tensor:
        samples = predictor.predict(inputs, 12, seed=3).samples
        return (samples / temperature).softmax(2).mean(0).amax(1).log()

    steps = h * torch.eye(4).double()
    numeric = torch.stack([(log_s(x + step) - log_s(x - step)) / (2 * h) for step in steps], 1)  # (N, 4)
    (found,) = confidence_direction(predictor, x, temperature=temperature, num_samples=12, seed=3)
    clear = numeric.abs() > 1e-6 / temperature
    assert bool(clear.any())
    assert torch.equal(found[clear], numeric.sign()[clear])


def test_passes_are_differentiated_a_few_at_a_time() -> None:
    predictor = noisy(40)
    confidence_direction(predictor, rows(2, 4).double(), temperature=1.0, num_samples=40, seed=0)
    assert max(predictor.sizes) <= 5
    whole = noisy(40)
    samples = whole.predict(x := rows(2, 4).double().requires_grad_(), 40).samples
    (slope,) = torch.autograd.grad(samples.softmax(2).mean(0).amax(1).log().sum(), x)
    (found,) = confidence_direction(predictor, x.detach(), temperature=1.0, num_samples=40, seed=0)
    assert torch.equal(found, slope.sign())


def test_a_confidence_of_almost_one_still_has_a_direction() -> None:
    (found,) = confidence_direction(identity(), torch.tensor([[30.0, 0.0]]), temperature=1.0, num_samples=1, seed=0)
    assert found.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hot_softmax_keeps_inputs_apart(dtype: torch.dtype) -> None:
    """At T = 1000 all probabilities are close to 1/C: those of inputs that differ must still differ."""
    logits = rows(500, 3).to(dtype)
    scores = Odin(identity(), num_samples=1, temperature=1000.0, epsilon=0.0).score(logits, **QUIET)
    expected = -(logits.double() / 1000).softmax(1).amax(1)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=0)
    assert len(scores.unique()) == len(expected.unique()) > 450
    energy = Energy(identity(), num_samples=1, temperature=1000.0).score(logits, **QUIET)
    torch.testing.assert_close(energy, -1000 * (logits.double() / 1000).logsumexp(1), rtol=1e-12, atol=0)


def test_odin_chooses_the_best_of_its_grid(boots: Predictor) -> None:
    a, b = rows(60, 4, seed=6), 1.5 * rows(50, 4, seed=7)
    detector = Odin(boots, num_samples=10, temperatures=(1.0, 50.0), epsilons=(0.0, 0.05, 0.3))
    fitted = detector.fit(a, b, batch_size=17, **QUIET)
    assert len(detector.fitted_on) == 0, "the detector itself is as it was"
    judged = {}
    for temperature in detector.temperatures:
        for epsilon in detector.epsilons:
            one = replace(detector, temperature=temperature, epsilon=epsilon)
            found = DetectionMetrics.from_batch(one.score(a, **QUIET), one.score(b, **QUIET), positive="in")
            judged[temperature, epsilon] = (float(found.tnr_at_tpr), float(found.auroc))
    assert len(set(judged.values())) > 1, "the grid makes a difference"
    assert judged[fitted.temperature, fitted.epsilon] == max(judged.values())


def test_inputs_that_cannot_be_moved_get_a_sentence() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(x).mean(1))
            return out

    words = torch.randint(9, (5, 6))
    predictor = DeterministicPredictor(Words())
    assert MaxSoftmax(predictor).score(words, **QUIET).shape == (5,)
    assert Odin(predictor, epsilon=0.0).score(words, **QUIET).shape == (5,)
    with pytest.raises(ValueError, match="got inputs of whole numbers, which cannot be moved by a small ε"):
        Odin(predictor).score(words, **QUIET)
    hard = DeterministicPredictor(nn.Sequential(nn.Linear(4, 3), nn.Module()))
    hard.net[1].forward = lambda z: z.detach()  # type: ignore[operator,index]
    with pytest.raises(ValueError, match="the outputs have no gradient in the inputs"):
        Odin(hard).score(rows(2, 4), **QUIET)


def test_gradients_where_the_caller_allows_none(boots: Predictor) -> None:
    x = rows(5, 4)
    detector = Odin(boots, num_samples=10, epsilon=0.1)
    expected = detector.score(x, **QUIET)
    with torch.inference_mode():
        torch.testing.assert_close(detector.score(x, **QUIET), expected)
    with torch.no_grad():
        torch.testing.assert_close(detector.score(x, **QUIET), expected)


# -- the paper's detector ------------------------------------------------------------------------------


def test_the_four_statistics(boots: Predictor) -> None:
    x = rows(6, 4, seed=3)
    found = ReplicateDetector(boots, num_samples=13, seed=2).statistics(x)
    prediction = boots.predict(x, 13, seed=2)
    by_hand = figures(prediction.samples.numpy())
    columns = [by_hand["confidence"], prediction.std.mean(1), by_hand["expected_entropy"], by_hand["entropy"]]
    np.testing.assert_allclose(found, np.stack(columns, 1), rtol=1e-5, atol=1e-6)


def test_the_regression_is_scikit_learns(boots: Predictor) -> None:
    a, b, x = rows(60, 4), 2 * rows(50, 4, seed=1), rows(9, 4, seed=2)
    detector = ReplicateDetector(boots, num_samples=13)
    fitted = detector.fit(a, b, **QUIET)
    theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    both = torch.cat([detector.statistics(a), detector.statistics(b)]).numpy()
    theirs.fit(both, [0] * 60 + [1] * 50)
    expected = theirs.decision_function(detector.statistics(x).numpy())
    np.testing.assert_allclose(fitted.score(x, **QUIET), expected, rtol=1e-6)
    assert fitted.epsilon == 0.0


def test_a_rule_of_separable_statistics_is_perfect() -> None:
    a, b = rows(30, 2).double(), rows(30, 2, seed=1).double()
    b[:, 0] += 20
    a[:, 1] = b[:, 1] = 7  # says nothing, and never changes
    rule = LogisticRule.of(a, b)
    assert float(DetectionMetrics.from_batch(rule(a), rule(b), positive="out").auroc) == 1.0
    assert bool((rule(b) > 0).all())
    assert bool((rule(a) < 0).all())


def test_preprocessing_takes_the_statistics_where_odin_goes(boots: Predictor) -> None:
    a, b, x = rows(40, 4), 2 * rows(40, 4, seed=1), rows(9, 4, seed=2)
    options: dict[str, Any] = {"temperature": 1000.0, "num_samples": 10, "seed": 0}
    fitted = ReplicateDetector(boots, num_samples=10, preprocess=True, epsilons=(0.5,)).fit(a, b, **QUIET)
    assert fitted.epsilon == 0.5

    def there(inputs: Tensor) -> Tensor:
        return inputs + 0.5 * confidence_direction(boots, inputs, **options)[0]

    plain = ReplicateDetector(boots, num_samples=10).fit(there(a), there(b), **QUIET)
    torch.testing.assert_close(fitted.score(x, **QUIET), plain.score(there(x), **QUIET), rtol=1e-5, atol=1e-5)


def test_a_useless_step_is_not_chosen() -> None:
    """Inputs are logits, far apart; a step of a thousand makes all of them alike."""
    a, b = 9 * torch.eye(4).repeat(20, 1) + 0.1 * rows(80, 4), 0.1 * rows(80, 4, seed=1)
    fitted = ReplicateDetector(identity(), num_samples=1, preprocess=True, epsilons=(1000.0, 0.0)).fit(a, b, **QUIET)
    assert fitted.epsilon == 0.0


def test_a_candidate_is_judged_on_rows_it_was_not_fitted_on() -> None:
    """Forty statistics of nothing part any forty rows perfectly, and no others; one that tells something does both."""
    noise = rows(80, 40).double()
    signal = torch.zeros(80, 40).double()
    signal[:, 0] = rows(80, seed=1) + 2 * (torch.arange(80) >= 40)
    both = torch.stack([noise, signal])  # (G, n, K)
    best, rule = select_logistic_rule(both[:, :40], both[:, 40:], seed=0)
    assert best == 1
    torch.testing.assert_close(rule.weights, LogisticRule.of(signal[:40], signal[40:]).weights)


# -- Mahalanobis ---------------------------------------------------------------------------------------


def by_scipy(features: np.ndarray, labels: np.ndarray, at: np.ndarray) -> list[float]:
    """The squared distance to the nearest class, with scikit-learn's covariance around the class means."""
    means = [features[labels == c].mean(0) for c in np.unique(labels)]
    centred = np.concatenate([features[labels == c] - mean for c, mean in zip(np.unique(labels), means, strict=True)])
    precision = sklearn.covariance.EmpiricalCovariance().fit(centred).precision_
    return [min(scipy_mahalanobis(phi, mean, precision) ** 2 for mean in means) for phi in at]


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_distances_are_scipys(batch_size: int) -> None:
    """Features by hand, whatever the batches."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = rows(300, 4).double(), torch.randint(3, (300,), generator=torch.Generator().manual_seed(0))
    phi = (x @ net[0].weight.T + net[0].bias).tanh().detach().numpy()
    detector = Mahalanobis(DeterministicPredictor(net)).fit(
        train_data=TensorDataset(x, y), batch_size=batch_size, **QUIET
    )
    expected = by_scipy(phi, y.numpy(), phi[:20])
    np.testing.assert_allclose(detector.score(x[:20], **QUIET), expected, rtol=1e-9)


def sums_of(features: Tensor, labels: Tensor, batch_size: int) -> ClassMoments:
    sums = ClassMoments()
    for phi, y in zip(features.split(batch_size), labels.split(batch_size), strict=True):
        sums.add(phi, y)
    return sums


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_sums_in_parts_are_those_of_the_whole(offset: float) -> None:
    """Also where classes come late or never, and where features lie far from zero."""
    phi = rows(200, 5).double() @ rows(5, 5, seed=1).double() + offset
    y = torch.cat([torch.zeros(100), torch.full((60,), 4), torch.full((40,), 2)]).long()
    whole, parts = (sums_of(phi, y, size).gaussians() for size in (200, 9))
    for gaussians in (whole, parts):
        means = torch.stack([phi[y == c].mean(0) for c in (0, 2, 4)])
        centred = torch.cat([phi[y == c] - phi[y == c].mean(0) for c in (0, 2, 4)])
        covariance = sklearn.covariance.EmpiricalCovariance(assume_centered=True).fit(centred.numpy())
        np.testing.assert_allclose(gaussians.means, means, rtol=1e-12)
        np.testing.assert_allclose(gaussians.covariance, covariance.covariance_, rtol=1e-7, atol=1e-9)
        precision = gaussians.whitening @ gaussians.whitening.T
        np.testing.assert_allclose(precision, covariance.precision_, rtol=1e-6, atol=1e-8)


def test_features_that_never_change_and_features_twice() -> None:
    """Dead units, and units that repeat others up to the rounding of single precision."""
    free = rows(300, 4)
    y = torch.arange(300) % 2
    copies = free @ rows(4, 3, seed=1) + 100
    phi = torch.cat([free, copies, torch.full((300, 2), 3.0)], 1)
    gaussians = sums_of(phi, y, 50).gaussians()
    assert gaussians.whitening.shape == (9, 4)
    expected = by_scipy(free.double().numpy(), y.numpy(), free[:9].double().numpy())
    np.testing.assert_allclose(gaussians.distances(phi[:9]), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="the features of 300 inputs do not vary within their classes"):
        sums_of(torch.ones(300, 3), y, 50).gaussians()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_of_a_feature_does_not_matter(dtype: torch.dtype) -> None:
    """A feature is not lost for being small beside another; scikit-learn agrees."""
    columns = [1e6 + 1e5 * rows(500), 1e-1 * rows(500, seed=1), 1e-9 * rows(500, seed=2), 300 + rows(500, seed=3)]
    phi = torch.stack(columns, 1).to(dtype)
    gaussians = sums_of(phi, torch.zeros(500).long(), 100).gaussians()
    assert gaussians.whitening.shape == (4, 4)
    far = phi[:5].clone()
    far[0, 1], far[1, 0], far[2, 2] = 50.0, 5e7, 5e-7  # 500 sigma away
    # In units of the standard deviation, since scikit-learn's inverse has a cut-off for all features together.
    unit = phi.double().std(0)
    theirs = sklearn.covariance.EmpiricalCovariance().fit((phi.double() / unit).numpy())
    expected = theirs.mahalanobis((far.double() / unit).numpy())
    assert expected[:3].min() > 2e5
    np.testing.assert_allclose(gaussians.distances(far), expected, rtol=1e-6)
    two = sklearn.covariance.EmpiricalCovariance().fit(phi[:, :2].double().numpy())  # as it is
    pair = sums_of(phi[:, :2], torch.zeros(500).long(), 100).gaussians()
    np.testing.assert_allclose(pair.distances(far[:, :2]), two.mahalanobis(far[:, :2].double().numpy()), rtol=1e-6)


def test_labels_of_any_size_and_kind() -> None:
    """As other tasks take them; a label of a billion is a class like any other, and costs no more."""
    phi, y = rows(60, 3).double(), torch.arange(60) % 3
    expected = sums_of(phi, y, 7).gaussians()
    for labels in (y.float(), y[:, None], torch.tensor([0, 7, 10**9])[y], y.to(torch.uint8)):
        found = sums_of(phi, labels, 7).gaussians()
        assert torch.equal(found.means, expected.means)
        assert torch.equal(found.covariance, expected.covariance)


def test_the_mean_distance_of_the_training_data_is_the_dimension() -> None:
    """tr(Σ⁻¹ Σ) = D: a covariance out by a factor would show."""
    phi = rows(500, 6) * torch.arange(1, 7)
    gaussians = sums_of(phi, torch.zeros(500).long(), 100).gaussians()
    assert float(gaussians.distances(phi).mean()) == pytest.approx(6, rel=1e-6)


def features_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    """Of TwoBranches, in evaluation mode, without touching the net."""
    twin = copy.deepcopy(net).eval()
    return torch.cat([twin.left(x), twin.right(x).sigmoid()], 1).detach()


# Other methods predict with weights that no net of theirs holds by itself.
MEMBERS = {"standard-bootstrap", "bayesian-bootstrap", "deep-ensemble", "adversarial-deep-ensemble"}
FEATURES_OF_A_NET = {"deterministic", "neuboots", "calibrated-neuboots", "laplace", "influence", "mc-dropout", *MEMBERS}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_right_or_refused(name: str) -> None:
    entry = METHODS[name]
    data, x = small_data(), rows(9, 4, seed=5)
    if "classification" in entry.tasks:
        predictor = fit(entry.make())
    else:
        predictor = entry.make(steps=2).fit(None, TensorDataset(data.tensors[0], data.tensors[0].sum(1)), RECIPE)
    if name not in FEATURES_OF_A_NET:
        with pytest.raises(
            ValueError, match="; expected (a trained net|one), whose features are compared: "
        ) as refusal:
            Mahalanobis(predictor).fit(train_data=data, **QUIET)
        assert ("predictor.export(0)" in str(refusal.value)) == hasattr(predictor, "export"), "only what it has"
        assert "predictor.module" not in str(refusal.value)
        assert "predictor.nets" not in str(refusal.value)
        return
    net = predictor.nets[0] if name in MEMBERS else predictor.module if name == "mc-dropout" else predictor.net
    phi = features_by_hand(net, x)
    if name in MEMBERS:  # the net that is used gives, through its head, a replicate
        samples = predictor.predict(x, predictor.num_distinct).samples
        assert any(torch.allclose(net.fc(phi), sample, rtol=1e-4, atol=1e-5) for sample in samples)
    elif name != "mc-dropout":  # or what the predictor predicts
        torch.testing.assert_close(net.fc(phi), predictor.predict(x, 3).mean, rtol=1e-4, atol=1e-5)
    train = features_by_hand(net, data.tensors[0])
    expected = by_scipy(train.double().numpy(), data.tensors[1].numpy(), phi.double().numpy())
    scores = Mahalanobis(predictor).fit(train_data=data, **QUIET).score(x, **QUIET)
    np.testing.assert_allclose(scores, expected, rtol=1e-2)  # single precision before Σ⁻¹


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if hasattr(entry.predictor, "nets")])
def test_members_in_turn_have_a_first_net(name: str) -> None:
    predictor = fit(METHODS[name].make(num_members=2, together=False))
    x, data = rows(9, 4, seed=5), small_data()
    scores = Mahalanobis(predictor).fit(train_data=data, **QUIET).score(x, **QUIET)
    plain = Mahalanobis(DeterministicPredictor(predictor.nets[0])).fit(train_data=data, **QUIET)
    assert torch.equal(scores, plain.score(x, **QUIET))


def test_what_a_refusal_proposes_works() -> None:
    data, x = small_data(), rows(9, 4, seed=5)

    def scores(predictor: Predictor, net: nn.Module) -> Tensor:
        return Mahalanobis(predictor, net=net).fit(train_data=data, **QUIET).score(x, **QUIET)

    together = fit(DeepEnsemble(num_members=2))
    expected = scores(identity(), together.nets[0])
    torch.testing.assert_close(scores(together, together.nets[0]), expected)
    batch = fit(METHODS["batch-ensemble"].make(num_members=2))
    member = batch.export(1)
    fitted = Mahalanobis(batch, net=member).fit(train_data=data, **QUIET).fitted
    output = member.fc(extract_features(fitted.split, (), x)[0])
    assert any(torch.allclose(output, replicate, atol=1e-5) for replicate in batch.predict(x, 2).samples)
    dropout = fit(MCDropout())
    twin = TwoBranches(3)
    names = {key.replace(".layer", ""): value for key, value in dropout.module.state_dict().items()}
    twin.load_state_dict(names)
    torch.testing.assert_close(scores(dropout, dropout.module), scores(identity(), twin), rtol=1e-3, atol=1e-3)
    inner = fit(MCDropout(), model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 3)))
    with pytest.raises(ValueError, match=r"such as a plain net trained on the same data or predictor\.module$"):
        Mahalanobis(inner).fit(train_data=data, **QUIET)
    assert scores(inner, inner.module).shape == (9,)


def test_a_wrapper_is_seen_through(boots: Predictor) -> None:
    data, x = small_data(), rows(9, 4, seed=5)
    plain = Mahalanobis(boots).fit(train_data=data, **QUIET).score(x, **QUIET)
    wrapped = Mahalanobis(TemperatureScaling().fit(boots, data)).fit(train_data=data, **QUIET).score(x, **QUIET)
    assert torch.equal(wrapped, plain)


# -- several layers ------------------------------------------------------------------------------------


def three_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3)
    ).double()


def test_layers_are_reduced_to_the_means_of_their_channels() -> None:
    """Each as it left its layer, though a later one wrote into it."""
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 2),
    ).eval()
    x = rows(4, 3, 8, 8)
    detector = Mahalanobis(DeterministicPredictor(net)).fit(
        train_data=TensorDataset(x, torch.tensor([0, 0, 1, 1])), **QUIET
    )
    found = extract_features(detector.fitted.split, ("0", "1", "2"), x)
    normed = net[1](net[0](x)).detach()
    for part, expected in zip(found, [net[0](x), normed, normed.relu(), normed.relu()], strict=True):
        torch.testing.assert_close(part, expected.mean((2, 3)))


class Sequences(nn.Module):
    """A layer of sequences, (N, T, D) or (N, D, T), their mean over T, and a head."""

    def __init__(self, body: nn.Module, axis: int) -> None:
        super().__init__()
        self.body, self.axis, self.head = body, axis, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(self.axis).tanh())
        return out


@pytest.mark.parametrize(
    ("body", "time", "x"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, rows(6, 5, 4)),
        (nn.Conv1d(3, 4, 3), 2, rows(6, 3, 9)),
        (nn.LSTM(3, 4, batch_first=True), 1, rows(6, 5, 3)),
    ],
    ids=["tokens", "channels first", "a tuple"],
)
def test_sequences_are_averaged_over_time(body: nn.Module, time: int, x: Tensor) -> None:
    class First(nn.Module):
        """What the layer gives, if that is more than a tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = body

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            return out if isinstance(out, Tensor) else out[0]

    predictor = DeterministicPredictor(Sequences(First(), time))
    fitted = Mahalanobis(predictor).fit(train_data=TensorDataset(x, torch.arange(6) % 2), **QUIET).fitted
    with torch.no_grad():
        found = extract_features(fitted.split, ("body.layer",), x)[0]
        expected = predictor.net.body.eval()(x).mean(time)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_stages_of_a_residual_net() -> None:
    """The last block of each shape; the last of all gives the features of the head, which join anyway."""
    net = resnet8(4).eval()
    x = torch.rand(6, 3, 16, 16)
    detector = MahalanobisEnsemble(DeterministicPredictor(net), epsilons=(0.0,))
    train = TensorDataset(x, torch.arange(6) % 2)
    fitted = detector.fit(x[:3], 5 * x[:3], train_data=train, **QUIET)
    assert fitted.fitted.names == ("features.3", "features.4")
    assert [part.shape[1] for part in extract_features(fitted.fitted.split, fitted.fitted.names, x)] == [16, 32, 64]


def test_stages_of_other_nets() -> None:
    class Wrapped(nn.Module):
        """The head lies inside a part; a shared layer is used twice; some layers come after the head."""

        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Linear(4, 4)
            self.inner = nn.ModuleDict({"body": nn.Linear(4, 7), "head": nn.Linear(7, 3)})
            self.after = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner["body"](self.twice(self.twice(x)))
            out: Tensor = self.after(self.inner["head"](x.tanh()))
            return out

    predictor = DeterministicPredictor(Wrapped())
    split_at = Mahalanobis(predictor).fit(train_data=small_data(), **QUIET).fitted.split
    assert find_stages(split_at, rows(5, 4)) == ("inner.body",)


def test_a_net_without_layers_to_choose_from_is_refused() -> None:
    """The detector of several layers must not silently be that of one."""
    for net in (nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))):
        with pytest.raises(ValueError, match=r"found no layer before the head .*: name some \(layers=…\)"):
            MahalanobisEnsemble(DeterministicPredictor(net)).fit(
                rows(5, 4), rows(5, 4), train_data=small_data(), **QUIET
            )


class OneReLU(nn.Module):
    """A net of images that uses one activation three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, 4), (4, 4), (4, 8)))
        self.relu, self.fc = nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.c(self.relu(self.b(self.relu(self.a(x))))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


class Pooled(Sequences):
    """Whose head reads the mean of the layer itself."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(self.axis))
        return out


def equal_widths(depth: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (OneReLU, (1, 6, 6), ("b", "c")),
        (lambda: equal_widths(2), (4,), ("0", "1", "2")),
        (lambda: equal_widths(5), (4,), ("2", "5", "8")),
        (
            lambda: Pooled(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 4), 1),
            (5, 4),
            ("body.layers.0", "body.layers.1", "body.layers.2"),
        ),
    ],
    ids=["one activation", "equal widths", "deep", "transformer"],
)
def test_layers_of_nets_whose_shapes_tell_no_stages(
    make: Callable[[], nn.Module], shape: tuple[int, ...], expected: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    net, x = make().eval(), rows(40, *shape)
    train = TensorDataset(x, torch.arange(40) % 2)
    detector = MahalanobisEnsemble(DeterministicPredictor(net), epsilons=(0.0, 0.01))
    fitted = detector.fit(rows(9, *shape, seed=1), 3 * rows(9, *shape, seed=2), train_data=train, **QUIET)
    assert fitted.fitted.names == expected
    assert len(fitted.rule.weights) == len(expected) + 1


def test_a_layer_that_depends_on_no_number_is_measured_where_it_is() -> None:
    """An embedding beside a floating-point input has no slope; the layers after it have."""
    predictor = DeterministicPredictor(TwoInputs().double())
    a, kind = rows(60, 4).double(), torch.arange(60) % 5
    train = TensorDataset(a, kind, torch.arange(60) % 2)
    detector = MahalanobisEnsemble(predictor, layers=("embed", "body"), epsilons=(0.1,))
    fitted = detector.fit((a[:9] + 1, kind[:9]), (3 * a[:9], kind[:9]), train_data=train, **QUIET)
    still, moved = fitted.fitted.distances((a[:9], kind[:9]), (0.0, 0.1))
    assert torch.equal(still[:, 0], moved[:, 0])
    assert bool((still[:, 1:] != moved[:, 1:]).any(0).all())
    with pytest.raises(ValueError, match="got inputs of whole numbers"):
        fitted.fitted.distances((kind[:9], kind[:9]), (0.1,))


def test_distances_in_layers_by_hand() -> None:
    """With a step for each layer, computed with autograd through that layer alone."""
    net = three_layers().eval()
    train = TensorDataset(rows(200, 4).double(), torch.arange(200) % 3)
    x = rows(9, 4, seed=1).double()
    detector = MahalanobisEnsemble(DeterministicPredictor(net), layers=("1", "3"), epsilons=(0.0, 0.1))
    fitted = detector.fit(x, 3 * x, train_data=train, **QUIET)
    found = fitted.fitted.distances(x, (0.0, 0.1))
    for layer, stop in enumerate([2, 4, 5]):  # the layers "1" and "3", which ReLU overwrites, and what the head reads
        part = nn.Sequential(*copy.deepcopy(net)[:stop])
        phi = part(train.tensors[0]).detach().numpy()
        y = train.tensors[1].numpy()
        np.testing.assert_allclose(found[0, :, layer], by_scipy(phi, y, part(x).detach().numpy()), rtol=1e-6)
        means = torch.stack([torch.from_numpy(phi[y == c].mean(0)) for c in range(3)])
        precision = torch.from_numpy(np.linalg.pinv(fitted.fitted.gaussians[layer].covariance.numpy()))
        leaf = x.clone().requires_grad_()
        away = part(leaf)[:, None] - means
        distance = torch.einsum("ncd,de,nce->nc", away, precision, away).amin(1)
        (slope,) = torch.autograd.grad(distance.sum(), leaf)
        there = part(x - 0.1 * slope.sign()).detach().numpy()
        np.testing.assert_allclose(found[1, :, layer], by_scipy(phi, y, there), rtol=1e-6)


def test_a_small_step_comes_nearer() -> None:
    """By finite differences: the distance falls along the step, in every layer."""
    net = three_layers().eval()
    train = TensorDataset(rows(200, 4).double(), torch.arange(200) % 3)
    x = 2 * rows(30, 4, seed=1).double()
    detector = MahalanobisEnsemble(DeterministicPredictor(net), layers=("1", "2"))
    layers = detector.fit(x, 3 * x, train_data=train, **QUIET).fitted
    before, after = layers.distances(x, (0.0, 1e-6))
    assert bool((after[:, :2] < before[:, :2]).all())
    assert bool((after <= before).all()), "where all units after the last layer are off, nothing moves"


def test_layers_are_weighed_on_the_validation_part() -> None:
    net = three_layers()
    train = TensorDataset(rows(200, 4).double(), torch.arange(200) % 3)
    a, b = rows(60, 4, seed=1).double(), rows(60, 4, seed=2).double() + 4
    detector = MahalanobisEnsemble(DeterministicPredictor(net), layers=("1",), epsilons=(0.0, 0.01))
    fitted = detector.fit(a[:30], b[:30], train_data=train, **QUIET)
    distances = fitted.fitted.distances(torch.cat([a[:30], b[:30]]), (fitted.epsilon,))[0]
    rule = LogisticRule.of(distances[:30], distances[30:])
    torch.testing.assert_close(
        rule(fitted.fitted.distances(a[30:], (fitted.epsilon,))[0]), fitted.score(a[30:], **QUIET)
    )
    assert float(fitted.evaluate(a[30:], b[30:], **QUIET).auroc) > 0.9


# -- real data -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    """A net that has seen the digits 0 – 4; others of these, and 5 – 9."""
    bunch = load_digits()
    x, y = torch.from_numpy(bunch.data / 16).float(), torch.from_numpy(bunch.target)
    low, high = x[y < 5], x[y >= 5]
    train, test = TensorDataset(low[:450], y[y < 5][:450]), low[450:]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    config = TrainingConfig(epochs=25, batch_size=32, progress=False)
    predictor = NeuBoots().fit(model, train, config)
    (inside, test_in), (outside, test_out) = holdout_split(test, 150), holdout_split(high, 150)
    return {"predictor": predictor, "train": train, "val": (inside, outside), "test": (test_in, test_out)}


DIGITS: dict[str, Callable[[Predictor], Detector]] = {
    "baseline": MaxSoftmax,
    "entropy": Entropy,
    "mutual information": MutualInformation,
    "energy": Energy,
    "odin": lambda p: Odin(p, num_samples=20, temperatures=(1.0, 1000.0), epsilons=(0.0, 0.01, 0.05)),
    "mahalanobis": Mahalanobis,
    "mahalanobis + calibration": lambda p: MahalanobisEnsemble(p, layers=("1",), epsilons=(0.0, 0.01, 0.05)),
    "replicates": ReplicateDetector,
    "replicates + calibration": lambda p: ReplicateDetector(
        p, num_samples=20, preprocess=True, epsilons=(0.0, 0.01, 0.05)
    ),
}


@pytest.mark.parametrize("name", DIGITS)
def test_unknown_digits_are_told_from_known_ones(digits: dict[str, Any], name: str) -> None:
    """By standard errors: that of an AUROC is at most ½ / √(the smaller number of inputs)."""
    detector = DIGITS[name](digits["predictor"]).fit(*digits["val"], train_data=digits["train"], **QUIET)
    found = detector.evaluate(*digits["test"], **QUIET)
    fewest = min(map(len, digits["test"]))
    assert float(found.auroc) > 0.5 + standard_errors(len(DIGITS)) * 0.5 / fewest**0.5


@pytest.mark.parametrize("make", [MCDropout, lambda: DeepEnsemble(num_members=2), NeuBoots, Laplace, Deterministic])
def test_any_method_will_do(make: Callable[[], Any]) -> None:
    predictor = fit(make())
    a, b = rows(20, 4, seed=1), 4 * rows(20, 4, seed=2)
    for kind in [*SIMPLE, Odin, ReplicateDetector]:
        detector = kind(predictor, num_samples=6)
        if isinstance(detector, Odin | ReplicateDetector):
            detector = replace(detector, epsilons=(0.0, 0.1))
        fitted = detector.fit(a[:10], b[:10], **QUIET)
        assert 0 <= float(fitted.evaluate(a[10:], b[10:], **QUIET).auroc) <= 1


# -- what all detectors promise ------------------------------------------------------------------------


def fitted_ones(predictor: Predictor) -> list[Detector]:
    a, b = rows(20, 4, seed=8), 3 * rows(20, 4, seed=9)
    few: dict[str, Any] = {"num_samples": 7, "epsilons": (0.1,)}
    made: list[Detector] = [kind(predictor, num_samples=7) for kind in SIMPLE]
    made += [
        Odin(predictor, temperatures=(10.0,), **few),
        Mahalanobis(predictor),
        MahalanobisEnsemble(predictor, epsilons=(0.1,), layers=("left",)),
        ReplicateDetector(predictor, preprocess=True, **few),
    ]
    return [detector.fit(a, b, train_data=small_data(), **QUIET) for detector in made]


def test_scores_do_not_depend_on_the_batches(boots: Predictor) -> None:
    x = rows(13, 4, seed=11)
    data = TensorDataset(x, torch.zeros(13))
    for detector in fitted_ones(boots):
        whole = detector.score(x, **QUIET)
        assert whole.shape == (13,)
        for other in (
            detector.score(x, batch_size=1, **QUIET),
            detector.score(data, batch_size=5, **QUIET),
            detector.score(DataLoader(data, batch_size=4), **QUIET),
            detector.score([(x[9:], torch.zeros(4))], **QUIET),
        ):
            torch.testing.assert_close(other, whole[-len(other) :], rtol=1e-4, atol=1e-5)


class TwoInputs(nn.Module):
    """A net of two inputs, by position or by name; one of them whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(5, 3), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, a: Tensor, kind: Tensor) -> Tensor:
        out: Tensor = self.head((self.body(a) + self.embed(kind)).tanh())
        return out


def test_nets_of_several_inputs() -> None:
    predictor = DeterministicPredictor(TwoInputs())
    a, kind = rows(12, 4), torch.arange(12) % 5
    train = TensorDataset(a, kind, torch.arange(12) % 2)
    for detector in (
        Odin(predictor, epsilon=0.1),
        Mahalanobis(predictor).fit(train_data=train, **QUIET),
        ReplicateDetector(predictor, preprocess=True).fit((a, kind), {"a": 3 * a, "kind": kind}, **QUIET),
    ):
        by_place = detector.score((a, kind), batch_size=5, **QUIET)
        torch.testing.assert_close(by_place, detector.score({"a": a, "kind": kind}, **QUIET), rtol=1e-4, atol=1e-5)
    validation, rest = holdout_split({"a": a, "kind": kind}, 5)
    assert len(validation["kind"]) == 5
    assert len(rest["a"]) == 7


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Weights, statistics, modes, gradients, hooks and the random state are afterwards what they were."""

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in net.modules()]
        learning = [(p.requires_grad, p.grad is None) for p in net.parameters()]
        return hooks, learning, torch.get_rng_state().tolist(), sorted(vars(net))

    before, tensors = state(), copy.deepcopy(net.state_dict())
    yield
    assert state() == before
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


def test_nothing_of_the_net_changes() -> None:
    predictor = DeterministicPredictor(TwoBranches(3))
    predictor.net.train()
    predictor.net.right.requires_grad_(False)
    predictor.net.right.eval()
    with unchanged(predictor.net):
        for detector in fitted_ones(predictor):
            detector.score(rows(5, 4), **QUIET)
            detector.evaluate(rows(5, 4, seed=12), 2 * rows(5, 4, seed=13), **QUIET)


def test_hooks_go_when_the_net_fails(boots: Predictor) -> None:
    detector = fitted_ones(boots)[-2]
    with unchanged(boots.net), pytest.raises(RuntimeError):
        detector.score(rows(5, 7), **QUIET)


@pytest.mark.parametrize("kind", [Odin, Mahalanobis])
def test_ten_thousand_inputs_show_a_bar(kind: type[Detector], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    @contextmanager
    def bar(title: str, total: int | None, *, show: bool = True, done: int = 0) -> Iterator[Callable[[str], None]]:
        steps: list[str] = []
        yield steps.append
        shown.append((title, total, len(steps), show))

    predictor = DeterministicPredictor(nn.Linear(4, 3))
    detector = kind(predictor, num_samples=2)
    detector = detector.fit(train_data=small_data(), **QUIET) if kind is Mahalanobis else detector
    monkeypatch.setattr("neuboots.training.progress_bar", bar)
    detector.evaluate(rows(10_000, 4, seed=1), rows(300, 4, seed=2))
    name = kind.__name__
    assert shown == [(f"{name}, inside", 40, 40, True), (f"{name}, outside", 2, 2, True)]


# -- a validation part that is never tested on ---------------------------------------------------------


def test_rows_that_were_fitted_on_are_refused(boots: Predictor) -> None:
    a, b = rows(200, 4), 3 * rows(200, 4, seed=1)
    for detector in (Odin(boots, num_samples=2, temperatures=(1.0,), epsilons=(0.0,)), ReplicateDetector(boots)):
        fitted = detector.fit(a[:100], b[:100], **QUIET)
        assert len(fitted.fitted_on) == 200
        fitted.evaluate(a[100:], b[100:], **QUIET)
        for inside, outside, shared in ((a, b[100:], 100), (a[100:], b[50:], 50), (a[90:], b[90:], 10)):
            with pytest.raises(
                ValueError, match=f"of the 200 inputs that the detector was fitted on, {shared} or more"
            ):
                fitted.evaluate(inside, outside, **QUIET)
        fitted.evaluate(torch.cat([a[:1], a[100:]]), b[100:], **QUIET)  # a data set may have an image twice
        assert fitted.score(a[:5], **QUIET).shape == (5,), "scores may be had of anything"


def test_few_rows_that_were_all_fitted_on_are_refused(boots: Predictor) -> None:
    """Twenty of two thousand are 1 % of what was fitted on, and all of what is tested."""
    a, b = rows(2000, 4), 3 * rows(2000, 4, seed=1)
    fitted = ReplicateDetector(boots, num_samples=2).fit(a, b, **QUIET)
    fresh, many = rows(20, 4, seed=2), rows(3000, 4, seed=3)
    for inside, outside in ((a[:20], fresh), (fresh, b[:20]), (a[:20], many), (many, b[:20])):
        with pytest.raises(ValueError, match="fitted on, 20 or more are among those to test it on; expected others"):
            fitted.evaluate(inside, outside, **QUIET)
    fitted.evaluate(fresh, torch.cat([b[:20], many]), **QUIET)


def test_training_rows_are_remembered_too(boots: Predictor) -> None:
    data, fresh = small_data(), rows(30, 4, seed=5)
    plain = Mahalanobis(boots).fit(train_data=data, **QUIET)
    several = MahalanobisEnsemble(boots, layers=("left",), epsilons=(0.0,))
    several = several.fit(rows(20, 4, seed=6), 3 * rows(20, 4, seed=7), train_data=data, **QUIET)
    assert (len(plain.fitted_on), len(several.fitted_on)) == (60, 100)
    assert plain.fitted_on.dtype == torch.int64, "eight bytes a row"
    for detector in (plain, several):
        detector.evaluate(fresh, 3 * fresh, **QUIET)
        for inside, outside in ((data.tensors[0][:9], fresh), (fresh, data.tensors[0].double()[-9:])):
            with pytest.raises(ValueError, match=" or more are among those to test it on"):
                detector.evaluate(inside, outside, **QUIET)


def test_split_parts_a_data_set_once() -> None:
    x = torch.arange(50.0)[:, None]
    data = TensorDataset(x, torch.arange(50))
    validation, rest = holdout_split(data, 20, seed=3)
    ours, theirs = ({int(row[1]) for row in part} for part in (validation, rest))
    assert (len(ours), ours | theirs, ours & theirs) == (20, set(range(50)), set())
    tensors = holdout_split(x, 20, seed=3)
    assert sorted(ours) == tensors[0].flatten().tolist(), "the same rows of tensors and of a data set"
    assert not torch.equal(tensors[0], holdout_split(x, 20, seed=4)[0])
    detector = ReplicateDetector(DeterministicPredictor(nn.Linear(1, 2))).fit(validation, 99 + x, **QUIET)
    detector.evaluate(rest, 200 + x, **QUIET)
    with pytest.raises(ValueError, match="expected others: part the data with split"):
        detector.evaluate(data, 200 + x, **QUIET)


# -- bad input -----------------------------------------------------------------------------------------


def nothing() -> Predictor:
    """Whose outputs are NaN."""
    return DeterministicPredictor(nn.Threshold(9.0, float("nan")))


class Endless(Dataset[Any]):
    """Rows by their numbers, nobody knows how many."""

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(4), 0


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4), 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: MaxSoftmax(nn.Linear(4, 3)), "got a Linear; expected a predictor"),
        (lambda p: MaxSoftmax(p).score(torch.zeros(0, 4), **QUIET), "got no inputs; expected at least one row"),
        (lambda p: MaxSoftmax(p).score([], **QUIET), "expected at least one row"),
        (lambda p: MaxSoftmax(p).score(torch.full((2, 4), float("nan")), **QUIET), "the input has 8 NaN"),
        (
            lambda p: Mahalanobis(p).fit(train_data=small_data(), **QUIET).score(rows(2, 4) / 0, **QUIET),
            "NaN or infinite",
        ),
        (lambda p: MaxSoftmax(p).score(torch.zeros(2, 4).byte(), **QUIET), "got uint8 inputs"),
        (lambda p: MaxSoftmax(p).evaluate(rows(2, 4), rows(2, 4), positive="yes", **QUIET), "got positive='yes'"),
        (lambda p: MaxSoftmax(nothing()).score(rows(2, 4), **QUIET), "2 of 2 scores are NaN; expected numbers"),
        (lambda p: Energy(p, temperature=0.0), "got temperature=0.0; expected a positive number"),
        (lambda p: Odin(p, temperatures=(1.0, -1.0)), "got temperature=-1.0"),
        (lambda p: Odin(p, epsilon=-0.1), "expected a tuple of distances ≥ 0, in the units of the inputs"),
        (lambda p: Odin(p, epsilons=0.1), "got ε = 0.1; expected a tuple of distances ≥ 0"),
        (lambda p: Odin(p, temperatures=()), r"got temperatures=\(\); expected a tuple of positive numbers"),
        (lambda p: Odin(p, temperatures=1.0), "got temperatures=1.0; expected a tuple of positive numbers"),
        (lambda p: Odin(p, num_samples=0), "got num_samples=0; expected a whole number, at least 1"),
        (lambda p: Odin(p, num_samples=2.5), "got num_samples=2.5; expected a whole number, at least 1"),
        (lambda p: MahalanobisEnsemble(p, epsilons=0.1), "got ε = 0.1; expected a tuple of distances ≥ 0"),
        (lambda p: MahalanobisEnsemble(p, layers=0), "got layers=0; expected a tuple of names that differ"),
        (lambda p: MahalanobisEnsemble(p, layers="left"), "got layers='left'; expected a tuple of names"),
        (lambda p: MahalanobisEnsemble(p, layers=("0", "0")), r"got layers=\('0', '0'\); expected a tuple of names"),
        (lambda p: Mahalanobis(p, net="x"), "got net='x'; expected a trained torch.nn.Module"),
        (lambda p: MahalanobisEnsemble(p, net="x"), "got net='x'; expected a trained torch.nn.Module"),
        (lambda p: MaxSoftmax(p).score(torch.tensor(1.0), **QUIET), r"got inputs of shape \(\); expected the batch on"),
        (
            lambda p: MaxSoftmax(DeterministicPredictor(nn.Linear(4, 3))).score(torch.zeros(4), **QUIET),
            r"got scores of shape \(3,\) for inputs of shape \(4,\); expected one for each row of inputs",
        ),
        (
            lambda p: Odin(DeterministicPredictor(nn.Linear(4, 3)), epsilons=(0.0,)).fit(
                torch.zeros(4), rows(2, 4), **QUIET
            ),
            r"got scores of shape \(3, 1\) for inputs of shape \(4,\); expected one for each row of inputs",
        ),
        (lambda p: MaxSoftmax(p).score(Endless(), **QUIET), "got a Endless without a length; expected a data set with"),
        (
            lambda p: Mahalanobis(p).fit(train_data=Endless(), **QUIET),
            "got a Endless without a length; expected a data set",
        ),
        (
            lambda p: holdout_split((rows(20, 4), rows(10, 4)), 3),
            r"got inputs of shape \(20, 4\) and \(10, 4\); expected the batch on the first axis",
        ),
        (
            lambda p: LogisticRule.of(rows(0, 2), rows(3, 2)),
            r"got statistics of shapes \(0, 2\) and \(3, 2\)",
        ),
        (lambda p: LogisticRule.of(rows(3, 2) / 0, rows(3, 2)), "got 6 NaN or infinite statistics of 12; expected num"),
        (
            lambda p: Mahalanobis(p).fit(train_data=TensorDataset(rows(9, 4), torch.arange(9) - 100), **QUIET),
            "labels run from -100 to -92; expected classes 0 … C − 1: renumber the labels",
        ),
        (
            lambda p: Mahalanobis(p).fit(train_data=TensorDataset(rows(9, 4), torch.zeros(9, 2).long()), **QUIET),
            r"got labels of shape \(9, 2\); expected \(9,\), a class for each input",
        ),
        (lambda p: ReplicateDetector(p, epsilons=()), "expected a tuple of distances ≥ 0"),
        (
            lambda p: Energy(DeterministicPredictor(nn.Linear(4, 1))).score(rows(2, 4), **QUIET),
            "got a net with one output",
        ),
        (
            lambda p: Odin(p).fit(rows(2, 4), **QUIET),
            r"Odin is fitted on a validation part of both kinds; expected fit\(",
        ),
        (
            lambda p: ReplicateDetector(p).score(rows(2, 4), **QUIET),
            "the detector is not fitted; expected detector.fit",
        ),
        (
            lambda p: ReplicateDetector(p, preprocess=True).fit(rows(1, 4), rows(3, 4), **QUIET),
            "got a validation part of one row",
        ),
        (
            lambda p: Mahalanobis(p).score(rows(2, 4), **QUIET),
            r"the detector is not fitted; expected detector.fit\(train",
        ),
        (lambda p: Mahalanobis(p).fit(rows(2, 4), rows(2, 4), **QUIET), "got no training data to know the classes by"),
        (
            lambda p: Mahalanobis(p).fit(train_data=TensorDataset(rows(9, 4), rows(9)), **QUIET),
            "got labels that are not whole numbers; expected classes 0 … C − 1: is this a regression",
        ),
        (
            lambda p: MahalanobisEnsemble(p, layers=("nowhere",)).fit(train_data=small_data(), **QUIET),
            "got the layer 'nowhere'; expected a name that",
        ),
        (
            lambda p: MahalanobisEnsemble(p, layers=("fc",)).fit(train_data=small_data(), **QUIET),
            "the layer 'fc' gives 0 outputs before the head is reached; expected exactly one",
        ),
        (lambda p: holdout_split(DataLoader(small_data()), 3), "got a DataLoader; expected the data set itself"),
        (lambda p: holdout_split(Rows(), 3), "got a stream of unknown length"),
        (lambda p: holdout_split(rows(5, 4), 5), "got num=5; expected a whole number from 1 to 4"),
        (lambda p: holdout_split("rows", 5), "got a str; expected tensors of inputs, or a data set"),
    ],
)
def test_bad_calls_get_a_sentence(boots: Predictor, call: Callable[[Predictor], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(boots)


def test_a_wrong_positive_class_is_refused_before_anything_is_scored() -> None:
    class Never(MaxSoftmax):
        def scores(self, x: Any) -> Tensor:
            raise AssertionError("nothing is to be scored")

    with pytest.raises(ValueError, match="got positive='ood'; expected 'in' or 'out'"):
        Never(identity()).evaluate(rows(2, 4), rows(2, 4), positive="ood", **QUIET)
