"""Detectors: known facts, overlap of fitting and test data, and what all detectors have in common."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from _nets import MixedInputs, PassPredictor, TwoBranches, Upsampling, noise
from _reference import figures, standard_errors
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from neuboots import DeepEnsemble, Laplace, MCDropout, NeuBoots, Predictor, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.evaluation.ood import (
    Detector,
    Energy,
    Entropy,
    Mahalanobis,
    MahalanobisEnsemble,
    MaxSoftmax,
    MutualInformation,
    Odin,
    PredictiveStd,
    ReplicateDetector,
    holdout_split,
)
from neuboots.methods.deterministic import DeterministicPredictor
from neuboots.metrics import DetectionMetrics

SIMPLE = [MaxSoftmax, Entropy, MutualInformation, PredictiveStd, Energy]
QUIET: dict[str, Any] = {"progress": False}
TRAIN = TensorDataset(noise(60, 4), torch.arange(60) % 3)


@pytest.fixture(scope="module")
def boots() -> Predictor:
    return NeuBoots().fit(TwoBranches, TRAIN, TrainingConfig(epochs=2, batch_size=16, progress=False))


def fit_all(predictor: Predictor) -> list[Detector]:
    a, b = noise(20, 4, seed=8), 3 * noise(20, 4, seed=9)
    few: dict[str, Any] = {"num_samples": 7, "epsilons": (0.1,)}
    detectors: list[Detector] = [kind(predictor, num_samples=7) for kind in SIMPLE]
    detectors += [
        Odin(predictor, temperatures=(10.0,), **few),
        Mahalanobis(predictor),
        MahalanobisEnsemble(predictor, epsilons=(0.1,), layers=("left",)),
        ReplicateDetector(predictor, preprocess=True, **few),
    ]
    return [detector.fit(a, b, train_data=TRAIN, **QUIET) for detector in detectors]


# -- scores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SIMPLE, Odin, ReplicateDetector])
def test_constant_predictor_has_auroc_one_half(kind: type[Detector]) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.init.zeros_(net[2].weight)
    a, b = noise(40, 4), 5 + noise(30, 4, seed=1)
    detector = kind(DeterministicPredictor(net), num_samples=3).fit(a[:10], b[:10], **QUIET)
    for positive in ("in", "out"):
        assert float(detector.evaluate(a[10:], b[10:], positive=positive, **QUIET).auroc) == 0.5


@pytest.mark.parametrize("kind", ["one pass", "passes"])
def test_scores_are_statistics_of_the_samples(boots: Predictor, kind: str) -> None:
    torch.manual_seed(1)
    predictor = boots if kind == "one pass" else PassPredictor([nn.Linear(4, 3) for _ in range(11)])
    x = noise(7, 4, seed=3)
    options: dict[str, Any] = {"num_samples": 11, "seed": 4}
    prediction = predictor.predict(x, 11, seed=4)
    slow = figures(prediction.samples.detach().numpy())
    mean = prediction.mean.detach().double()
    expected = {
        MaxSoftmax: -slow["confidence"],
        Entropy: slow["entropy"],
        MutualInformation: slow["mutual_information"],
        PredictiveStd: prediction.std.detach().double().mean(1),
        Energy: -mean.exp().sum(1).log(),
    }
    for detector, scores in expected.items():
        np.testing.assert_allclose(detector(predictor, **options).score(x, **QUIET), scores, rtol=1e-5, atol=1e-6)
    tempered = Energy(predictor, temperature=3.0, **options).score(x, **QUIET)
    np.testing.assert_allclose(tempered, -3 * (mean / 3).exp().sum(1).log(), rtol=1e-5)


def test_score_of_a_pixel_classifier_is_the_mean_over_pixels() -> None:
    predictor, x = DeterministicPredictor(Upsampling()), noise(3, 2, 8, 8)
    expected = -predictor.summarize(x, 2).confidence.mean((1, 2))
    torch.testing.assert_close(MaxSoftmax(predictor, num_samples=2).score(x, **QUIET), expected)


# -- logistic rule -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fixed() -> Detector:
    return ReplicateDetector(DeterministicPredictor(nn.Identity()), preprocess=True, epsilons=(0.0, 0.1))


def test_candidates_are_judged_on_held_out_rows(fixed: Any) -> None:
    """Forty random statistics separate any forty rows perfectly, but no others; a constant one is ignored."""
    random, signal = noise(80, 40).double(), torch.zeros(80, 40).double()
    signal[:, 0] = noise(80, seed=1) + 2 * (torch.arange(80) >= 40)
    signal[:, 1] = 7
    both = torch.stack([random, signal])  # (G, n, K)
    fitted = fixed._select(both[:, :40], both[:, 40:])
    assert fitted.epsilon == 0.1
    np.testing.assert_array_equal(fitted.rule[-1].coef_[0, 1:], 0)
    right = (fitted.rule.decision_function(signal) > 0) == (np.arange(80) >= 40)
    assert right.mean() > 0.7
    with pytest.raises(ArgumentError, match="id_data"):
        fixed._select(both[:, :1], both[:, 40:])
    both[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        fixed._select(both[:, :40], both[:, 40:])


# -- common behavior -----------------------------------------------------------------------------------


def test_scores_do_not_depend_on_batches(boots: Predictor) -> None:
    x = noise(13, 4, seed=11)
    data = TensorDataset(x, torch.zeros(13))
    for detector in fit_all(boots):
        whole = detector.score(x, **QUIET)
        assert whole.shape == (13,)
        for other in (
            detector.score(x, batch_size=1, **QUIET),
            detector.score(data, batch_size=5, **QUIET),
            detector.score(DataLoader(data, batch_size=4), **QUIET),
            detector.score([(x[9:], torch.zeros(4))], **QUIET),
        ):
            torch.testing.assert_close(other, whole[-len(other) :], rtol=1e-4, atol=1e-5)


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Weights, modes, gradients, hooks and the random state do not change."""

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in net.modules()]
        return hooks, [(p.requires_grad, p.grad is None) for p in net.parameters()], torch.get_rng_state().tolist()

    before, tensors = state(), copy.deepcopy(net.state_dict())
    yield
    assert state() == before
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in net.state_dict().items())


def test_detectors_do_not_change_the_net() -> None:
    net = TwoBranches().train()
    net.right.requires_grad_(False).eval()
    with unchanged(net):
        for detector in fit_all(DeterministicPredictor(net)):
            detector.evaluate(noise(5, 4, seed=12), 2 * noise(5, 4, seed=13), **QUIET)
            with torch.inference_mode():
                detector.score(noise(5, 4), **QUIET)
    with unchanged(net), pytest.raises(RuntimeError):
        fit_all(DeterministicPredictor(net))[-2].score(noise(5, 7), **QUIET)


def test_detectors_accept_several_inputs() -> None:
    predictor = DeterministicPredictor(MixedInputs())
    a, kind = noise(12, 4), torch.arange(12) % 5
    for detector in (
        Odin(predictor, epsilon=0.1),
        Mahalanobis(predictor).fit(train_data=TensorDataset(a, kind, torch.arange(12) % 2), **QUIET),
        ReplicateDetector(predictor, preprocess=True).fit((a, kind), {"a": 3 * a, "kind": kind}, **QUIET),
    ):
        by_position = detector.score((a, kind), batch_size=5, **QUIET)
        torch.testing.assert_close(by_position, detector.score({"a": a, "kind": kind}, **QUIET), rtol=1e-4, atol=1e-5)
    validation, rest = holdout_split({"a": a, "kind": kind}, 5)
    assert (len(validation["kind"]), len(rest["a"])) == (5, 7)


# -- overlap of fitting and test data ------------------------------------------------------------------


FITTED: dict[str, Callable[[Predictor], Detector]] = {
    "odin": lambda p: Odin(p, num_samples=2, temperatures=(1.0,), epsilons=(0.0,)),
    "replicates": ReplicateDetector,
    "mahalanobis": Mahalanobis,
    "mahalanobis ensemble": lambda p: MahalanobisEnsemble(p, layers=("left",), epsilons=(0.0,)),
}


@pytest.mark.parametrize("name", FITTED)
def test_rows_that_were_fitted_on_are_rejected(boots: Predictor, name: str) -> None:
    a, b = noise(200, 4, seed=6), 3 * noise(200, 4, seed=7)
    detector, train = FITTED[name](boots), TRAIN.tensors[0].double()
    fitted = detector.fit(a[:100], b[:100], train_data=TRAIN, **QUIET)
    expected = 200 * (name != "mahalanobis") + 60 * name.startswith("mahalanobis")
    assert (len(fitted.fitted_on), len(detector.fitted_on)) == (expected, 0)
    fitted.evaluate(a[100:], b[100:], **QUIET)
    repeated = [(a, b[100:]), (a[100:], b[50:]), (a[90:], b[90:]), (a[:20], b[100:])] if expected >= 200 else []
    for id_data, ood_data in [*repeated, *[(a[100:], train[-9:])] * name.startswith("mahalanobis")]:
        with pytest.raises(ArgumentError, match="data"):
            fitted.evaluate(id_data, ood_data, **QUIET)
    fitted.evaluate(torch.cat([a[:1], a[100:]]), b[100:], **QUIET)  # a duplicate in the data
    assert fitted.score(a[:5], **QUIET).shape == (5,)


def test_holdout_split_is_a_random_partition() -> None:
    x = torch.arange(50.0)[:, None]
    validation, rest = holdout_split(TensorDataset(x, torch.arange(50)), 20, seed=3)
    first, second = ({int(row[1]) for row in part} for part in (validation, rest))
    assert (len(first), first | second, first & second) == (20, set(range(50)), set())
    tensors = holdout_split(x, 20, seed=3)
    assert sorted(first) == tensors[0].flatten().tolist()
    assert not torch.equal(tensors[0], holdout_split(x, 20, seed=4)[0])


# -- real data -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    """A net trained on the digits 0 – 4, more of these, and 5 – 9."""
    bunch = load_digits()
    x, y = torch.from_numpy(bunch.data / 16).float(), torch.from_numpy(bunch.target)
    low, high = x[y < 5], x[y >= 5]
    train = TensorDataset(low[:450], y[y < 5][:450])

    def make_net() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    predictor = NeuBoots().fit(make_net, train, TrainingConfig(epochs=25, batch_size=32, progress=False))
    (id_val, id_test), (ood_val, ood_test) = holdout_split(low[450:], 150), holdout_split(high, 150)
    return {"predictor": predictor, "train": train, "val": (id_val, ood_val), "test": (id_test, ood_test)}


DIGITS: dict[str, Callable[[Predictor], Detector]] = {
    "max softmax": MaxSoftmax,
    "entropy": Entropy,
    "mutual information": MutualInformation,
    "energy": Energy,
    "odin": lambda p: Odin(p, num_samples=20, temperatures=(1.0, 1000.0), epsilons=(0.0, 0.05)),
    "mahalanobis": Mahalanobis,
    "mahalanobis ensemble": lambda p: MahalanobisEnsemble(p, layers=("1",), epsilons=(0.0, 0.05)),
    "replicates": ReplicateDetector,
    "replicates, preprocessed": lambda p: ReplicateDetector(p, num_samples=20, preprocess=True, epsilons=(0.0, 0.05)),
}


@pytest.mark.parametrize("name", DIGITS)
def test_unseen_digits_are_detected(digits: dict[str, Any], name: str) -> None:
    """The standard error of an AUROC is at most ½ / √(the smaller number of inputs)."""
    detector = DIGITS[name](digits["predictor"]).fit(*digits["val"], train_data=digits["train"], **QUIET)
    found = detector.evaluate(*digits["test"], **QUIET)
    assert float(found.auroc) > 0.5 + standard_errors(len(DIGITS)) * 0.5 / min(map(len, digits["test"])) ** 0.5


@pytest.mark.parametrize(
    "method", [MCDropout(), DeepEnsemble(num_members=2), Laplace()], ids=lambda m: type(m).__name__
)
def test_detectors_accept_any_method(method: Any) -> None:
    predictor = method.fit(TwoBranches, TRAIN, TrainingConfig(epochs=1, progress=False))
    a, b = noise(20, 4, seed=1), 4 * noise(20, 4, seed=2)
    for kind in [*SIMPLE, Odin, ReplicateDetector]:
        options: dict[str, Any] = {} if kind in SIMPLE else {"epsilons": (0.0, 0.1)}
        fitted = kind(predictor, num_samples=6, **options).fit(a[:10], b[:10], **QUIET)
        assert isinstance(fitted.evaluate(a[10:], b[10:], **QUIET), DetectionMetrics)


# -- errors --------------------------------------------------------------------------------------------

NAN = DeterministicPredictor(nn.Threshold(9.0, float("nan")))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda p: MaxSoftmax(p).score(torch.zeros(0, 4), **QUIET), None),
        (lambda p: MaxSoftmax(p).score(torch.full((2, 4), float("nan")), **QUIET), None),
        (lambda p: MaxSoftmax(p).evaluate(noise(2, 4), noise(2, 4), positive="yes", **QUIET), "positive"),
        (lambda p: MaxSoftmax(NAN).score(noise(2, 4), **QUIET), "data"),
        (lambda p: MaxSoftmax(DeterministicPredictor(nn.Linear(4, 3))).score(torch.zeros(4), **QUIET), "got x="),
        (lambda p: Energy(DeterministicPredictor(nn.Linear(4, 1))).score(noise(2, 4), **QUIET), "predictor"),
        (lambda p: Odin(p, num_samples=0), "num_samples"),
        (lambda p: Odin(p).fit(noise(2, 4), **QUIET), "ood_data"),
        (lambda p: ReplicateDetector(p).score(noise(2, 4), **QUIET), "rule"),
        (lambda p: Mahalanobis(p).score(noise(2, 4), **QUIET), "fitted"),
        (lambda p: Mahalanobis(p).fit(noise(2, 4), noise(2, 4), **QUIET), "train_data"),
        (lambda p: Mahalanobis(p).fit(train_data=TensorDataset(noise(9, 4), noise(9)), **QUIET), "train_data"),
        (
            lambda p: Mahalanobis(p).fit(train_data=TensorDataset(noise(9, 4), torch.arange(9) - 9), **QUIET),
            "train_data",
        ),
        (lambda p: MahalanobisEnsemble(p, layers=("fc",)).fit(train_data=TRAIN, **QUIET), "layers"),
        (lambda p: holdout_split((noise(20, 4), noise(10, 4)), 3), "data"),
        (lambda p: holdout_split(noise(5, 4), 5), "num_rows"),
    ],
)
def test_invalid_calls_are_rejected(boots: Predictor, call: Callable[[Predictor], Any], name: str | None) -> None:
    with pytest.raises(ValueError, match=name):
        call(boots)
