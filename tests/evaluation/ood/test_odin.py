"""ODIN and the detector of replicate statistics against slow references."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from _nets import Composed, PassPredictor, TwoBranches, noise
from _reference import figures
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, Predictor, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.evaluation.ood import Energy, MaxSoftmax, Odin, ReplicateDetector
from neuboots.evaluation.ood.odin import confidence_direction
from neuboots.methods.deterministic import DeterministicPredictor
from neuboots.metrics import DetectionMetrics

QUIET: dict[str, Any] = {"progress": False}


def fit_boots() -> Predictor:
    data = TensorDataset(noise(60, 4), torch.arange(60) % 3)
    return NeuBoots().fit(TwoBranches, data, TrainingConfig(epochs=2, batch_size=16, progress=False))


@pytest.fixture(scope="module")
def boots() -> Predictor:
    return fit_boots()


def make_passes(count: int) -> PassPredictor:
    torch.manual_seed(1)
    return PassPredictor([nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(count)])


# -- ODIN ----------------------------------------------------------------------------------------------


def test_odin_without_temperature_and_step_is_max_softmax(boots: Predictor) -> None:
    x = noise(50, 4, seed=3)
    expected = MaxSoftmax(boots, num_samples=20, seed=2).score(x, **QUIET)
    assert torch.equal(Odin(boots, num_samples=20, seed=2, temperature=1.0, epsilon=0.0).score(x, **QUIET), expected)


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_odin_of_a_single_net_is_that_of_the_paper(temperature: float) -> None:
    """A step against the gradient of the cross-entropy of the predicted class."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = noise(20, 4).double().requires_grad_()
    logits = net(x) / temperature
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(logits, logits.argmax(1), reduction="sum"), x)
    expected = -(net(x.detach() - 0.05 * slope.sign()) / temperature).softmax(1).amax(1)
    detector = Odin(DeterministicPredictor(net), num_samples=1, temperature=temperature, epsilon=0.05)
    torch.testing.assert_close(detector.score(x.detach(), **QUIET), expected.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 100.0])
@pytest.mark.parametrize("kind", ["one pass", "passes"])
def test_direction_agrees_with_finite_differences(kind: str, temperature: float) -> None:
    predictor: Predictor = make_passes(12)
    if kind == "one pass":
        predictor = fit_boots()
        predictor.net.double()  # type: ignore[union-attr]
    x, h = noise(6, 4, seed=5).double(), 1e-5

    def log_s(inputs: Tensor) -> Tensor:
        return (predictor.predict(inputs, 12, seed=3).samples / temperature).softmax(2).mean(0).amax(1).log()

    steps = h * torch.eye(4).double()
    numeric = torch.stack([(log_s(x + step) - log_s(x - step)) / (2 * h) for step in steps], 1)  # (N, 4)
    if isinstance(predictor, PassPredictor):
        predictor.sizes.clear()
    (found,) = confidence_direction(predictor, x, temperature=temperature, num_samples=12, seed=3)
    assert not isinstance(predictor, PassPredictor) or max(predictor.sizes) <= 5  # passes stored at a time
    clear = numeric.abs() > 1e-6 / temperature
    assert bool(clear.any())
    assert torch.equal(found[clear], numeric.sign()[clear])


def test_confidence_near_one_has_a_direction() -> None:
    predictor = DeterministicPredictor(nn.Identity())
    (found,) = confidence_direction(predictor, torch.tensor([[30.0, 0.0]]), temperature=1.0, num_samples=1, seed=0)
    assert found.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_high_temperature_keeps_inputs_apart(dtype: torch.dtype) -> None:
    logits, predictor = noise(500, 3).to(dtype), DeterministicPredictor(nn.Identity())
    scores = Odin(predictor, num_samples=1, temperature=1000.0, epsilon=0.0).score(logits, **QUIET)
    expected = -(logits.double() / 1000).softmax(1).amax(1)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=0)
    assert len(scores.unique()) == len(expected.unique()) > 450
    energy = Energy(predictor, num_samples=1, temperature=1000.0).score(logits, **QUIET)
    torch.testing.assert_close(energy, -1000 * (logits.double() / 1000).logsumexp(1), rtol=1e-12, atol=0)


def test_odin_selects_the_best_candidate(boots: Predictor) -> None:
    a, b = noise(60, 4, seed=6), 1.5 * noise(50, 4, seed=7)
    detector = Odin(boots, num_samples=10, temperatures=(1.0, 50.0), epsilons=(0.0, 0.05, 0.3))
    fitted = detector.fit(a, b, batch_size=17, **QUIET)
    judged = {}
    for temperature in detector.temperatures:
        for epsilon in detector.epsilons:
            one = replace(detector, temperature=temperature, epsilon=epsilon)
            found = DetectionMetrics.from_batch(one.score(a, **QUIET), one.score(b, **QUIET), positive="in")
            judged[temperature, epsilon] = (float(found.tnr_at_tpr), float(found.auroc))
    assert len(set(judged.values())) > 1
    assert judged[fitted.temperature, fitted.epsilon] == max(judged.values())


def test_inputs_without_gradient_are_rejected() -> None:
    embedding = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 3))
    tokens, predictor = torch.randint(9, (5, 6)), DeterministicPredictor(embedding)
    assert Odin(predictor, epsilon=0.0).score(tokens, **QUIET).shape == (5,)
    with pytest.raises(ArgumentError, match="x="):
        Odin(predictor).score(tokens, **QUIET)
    detached = DeterministicPredictor(nn.Sequential(nn.Linear(4, 3), nn.Module()))
    detached.net[1].forward = lambda z: z.detach()  # type: ignore[operator,index]
    with pytest.raises(ArgumentError, match="predictor"):
        Odin(detached).score(noise(2, 4), **QUIET)
    rounded = DeterministicPredictor(Composed(lambda net, x: net.head(x.detach()), head=nn.Linear(4, 3)))
    with pytest.raises(ArgumentError, match="predictor"):
        Odin(rounded).score(noise(2, 4), **QUIET)


# -- the detector of replicate statistics --------------------------------------------------------------


def test_regression_on_four_statistics_is_that_of_scikit_learn(boots: Predictor) -> None:
    a, b, x = noise(60, 4), 2 * noise(50, 4, seed=1), noise(9, 4, seed=2)
    detector = ReplicateDetector(boots, num_samples=13, seed=2)
    prediction = boots.predict(x, 13, seed=2)
    slow = figures(prediction.samples.numpy())
    columns = [slow["confidence"], prediction.std.mean(1), slow["expected_entropy"], slow["entropy"]]
    np.testing.assert_allclose(detector.statistics(x), np.stack(columns, 1), rtol=1e-5, atol=1e-6)
    fitted = detector.fit(a, b, **QUIET)
    theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    theirs.fit(torch.cat([detector.statistics(a), detector.statistics(b)]).numpy(), [0] * 60 + [1] * 50)
    expected = theirs.decision_function(detector.statistics(x).numpy())
    np.testing.assert_allclose(fitted.score(x, **QUIET), expected, rtol=1e-6)
    assert fitted.epsilon == 0.0


def test_preprocessing_moves_inputs_as_odin(boots: Predictor) -> None:
    a, b, x = noise(40, 4), 2 * noise(40, 4, seed=1), noise(9, 4, seed=2)
    fitted = ReplicateDetector(boots, num_samples=10, preprocess=True, epsilons=(0.5,)).fit(a, b, **QUIET)
    assert fitted.epsilon == 0.5

    def move(inputs: Tensor) -> Tensor:
        return inputs + 0.5 * confidence_direction(boots, inputs, temperature=1000.0, num_samples=10, seed=0)[0]

    other = ReplicateDetector(boots, num_samples=10).fit(move(a), move(b), **QUIET)
    torch.testing.assert_close(fitted.score(x, **QUIET), other.score(move(x), **QUIET), rtol=1e-5, atol=1e-5)


def test_useless_step_is_not_selected() -> None:
    a, b = 9 * torch.eye(4).repeat(20, 1) + 0.1 * noise(80, 4), 0.1 * noise(80, 4, seed=1)
    detector = ReplicateDetector(DeterministicPredictor(nn.Identity()), num_samples=1, preprocess=True)
    assert replace(detector, epsilons=(1000.0, 0.0)).fit(a, b, **QUIET).epsilon == 0.0
