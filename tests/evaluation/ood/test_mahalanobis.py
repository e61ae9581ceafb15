"""Mahalanobis distances against SciPy and scikit-learn, and the choice of nets and layers."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.covariance
import torch
from _nets import Composed, MixedInputs, TwoBranches, noise, quick_options
from scipy.spatial.distance import mahalanobis as scipy_mahalanobis
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import MCDropout, NeuBoots, Predictor, TrainingConfig, create_method, list_methods
from neuboots._validation import ArgumentError
from neuboots.evaluation.ood import Mahalanobis, MahalanobisEnsemble, MahalanobisScore
from neuboots.evaluation.ood.mahalanobis import ClassMoments, extract_features, find_feature_net, find_stages
from neuboots.head import split_head
from neuboots.methods.deterministic import DeterministicPredictor
from neuboots.nets import resnet8
from neuboots.posthoc import TemperatureScaling

QUIET: dict[str, Any] = {"progress": False}
CONFIG = TrainingConfig(epochs=2, batch_size=16, progress=False)
TRAIN = TensorDataset(noise(60, 4), torch.arange(60) % 3)


def reference_distances(features: np.ndarray, labels: np.ndarray, at: np.ndarray) -> list[float]:
    """Squared distance to the nearest class, with scikit-learn's covariance around the class means."""
    means = [features[labels == c].mean(0) for c in np.unique(labels)]
    centered = np.concatenate([features[labels == c] - mean for c, mean in zip(np.unique(labels), means, strict=True)])
    precision = sklearn.covariance.EmpiricalCovariance().fit(centered).precision_
    return [min(scipy_mahalanobis(phi, mean, precision) ** 2 for mean in means) for phi in at]


# -- Gaussians -----------------------------------------------------------------------------------------


def moments_in_batches(features: Tensor, labels: Tensor, batch_size: int) -> ClassMoments:
    moments = ClassMoments(features[:batch_size])
    for phi, y in zip(features.split(batch_size), labels.split(batch_size), strict=True):
        moments.add(phi, y)
    return moments


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_distances_match_scipy(batch_size: int) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = noise(300, 4).double(), torch.arange(300) % 3
    phi = (x @ net[0].weight.T + net[0].bias).tanh().detach().numpy()
    detector = Mahalanobis(DeterministicPredictor(net))
    detector = detector.fit(train_data=TensorDataset(x, y), batch_size=batch_size, **QUIET)
    expected = reference_distances(phi, y.numpy(), phi[:20])
    np.testing.assert_allclose(detector.score(x[:20], **QUIET), expected, rtol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_do_not_depend_on_batches(offset: float) -> None:
    """Also if classes come late or never, and if features are far from zero."""
    phi = noise(200, 5).double() @ noise(5, 5, seed=1).double() + offset
    y = torch.cat([torch.zeros(100), torch.full((60,), 4), torch.full((40,), 2)]).long()
    for batch_size in (200, 9):
        gaussians = moments_in_batches(phi, y, batch_size).gaussians()
        centered = torch.cat([phi[y == c] - phi[y == c].mean(0) for c in (0, 2, 4)])
        expected = sklearn.covariance.EmpiricalCovariance(assume_centered=True).fit(centered.numpy())
        np.testing.assert_allclose(gaussians.means, torch.stack([phi[y == c].mean(0) for c in (0, 2, 4)]), rtol=1e-12)
        precision = gaussians.whitening @ gaussians.whitening.T
        np.testing.assert_allclose(precision, expected.precision_, rtol=1e-6, atol=1e-8)


def test_constant_and_repeated_features_are_ignored() -> None:
    free, y = noise(300, 4), torch.arange(300) % 2
    phi = torch.cat([free, free @ noise(4, 3, seed=1) + 100, torch.full((300, 2), 3.0)], 1)
    gaussians = moments_in_batches(phi, y, 50).gaussians()
    assert gaussians.whitening.shape == (9, 4)
    expected = reference_distances(free.double().numpy(), y.numpy(), free[:9].double().numpy())
    np.testing.assert_allclose(gaussians.distances(phi[:9]), expected, rtol=1e-4)
    with pytest.raises(ArgumentError, match="train_data"):
        moments_in_batches(torch.ones(300, 3), y, 50).gaussians()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_of_features_do_not_matter(dtype: torch.dtype) -> None:
    columns = [1e6 + 1e5 * noise(500), 1e-1 * noise(500, seed=1), 1e-9 * noise(500, seed=2), 300 + noise(500, seed=3)]
    phi = torch.stack(columns, 1).to(dtype)
    gaussians = moments_in_batches(phi, torch.zeros(500).long(), 100).gaussians()
    assert gaussians.whitening.shape == (4, 4)
    far = phi[:5].clone()
    far[0, 1], far[1, 0], far[2, 2] = 50.0, 5e7, 5e-7  # 500 sigma away
    unit = phi.double().std(0)  # scikit-learn's inverse has one cutoff for all features
    theirs = sklearn.covariance.EmpiricalCovariance().fit((phi.double() / unit).numpy())
    expected = theirs.mahalanobis((far.double() / unit).numpy())
    np.testing.assert_allclose(gaussians.distances(far), expected, rtol=1e-6)
    # tr(Σ⁻¹ Σ) = D: a covariance with a wrong factor would show
    assert float(gaussians.distances(phi).mean()) == pytest.approx(4, rel=1e-6)


def test_labels_of_any_size_and_type_are_accepted() -> None:
    phi, y = noise(60, 3).double(), torch.arange(60) % 3
    expected = moments_in_batches(phi, y, 7).gaussians()
    for labels in (y.float(), y[:, None], torch.tensor([0, 7, 10**9])[y], y.to(torch.uint8)):
        found = moments_in_batches(phi, labels, 7).gaussians()
        assert torch.equal(found.means, expected.means)
        assert torch.equal(found.whitening, expected.whitening)


@pytest.mark.parametrize("width", [3, 600])
def test_score_uses_ledoit_wolf_or_variances(width: int) -> None:
    train, held_out = (noise(n, width, seed=n) * torch.arange(1, width + 1) for n in (400, 200))
    score = MahalanobisScore.fit(train, held_out)
    rows = train.double().numpy()
    if width == 3:
        distances = sklearn.covariance.LedoitWolf().fit(rows).mahalanobis(held_out.double().numpy()) ** 0.5
    else:
        variance = rows.var(0)
        distances = ((held_out.double().numpy() - rows.mean(0)) ** 2 / (variance + 1e-3 * variance.mean())).sum(
            1
        ) ** 0.5
    limit = np.quantile(distances, 0.99, method="higher")
    np.testing.assert_allclose(score(held_out), distances / limit, rtol=1e-4)
    assert score.num_features == width
    again = MahalanobisScore.from_state_dict(score.state_dict())
    assert np.array_equal(again(held_out), score(held_out))
    assert float(MahalanobisScore.fit(torch.ones(9, 2), torch.ones(0, 2))(torch.ones(1, 2))[0]) == 0.0


# -- nets ----------------------------------------------------------------------------------------------


def reference_features(net: Any, x: Tensor) -> Tensor:
    twin = copy.deepcopy(net).eval()
    return torch.cat([twin.left(x), twin.right(x).sigmoid()], 1).detach()


# Other methods predict with weights that none of their nets holds by itself.
ENSEMBLES = {"standard-bootstrap", "bayesian-bootstrap", "deep-ensemble", "adversarial-deep-ensemble"}
WITH_FEATURES = {"deterministic", "neuboots", "calibrated-neuboots", "laplace", "influence", "mc-dropout", *ENSEMBLES}


@pytest.mark.parametrize("name", list_methods(task="classification"))
def test_features_are_those_of_the_predictor_or_rejected(name: str) -> None:
    x = noise(9, 4, seed=5)
    predictor: Any = create_method(name, **quick_options(name)).fit(TwoBranches, TRAIN, CONFIG)
    if name not in WITH_FEATURES:
        with pytest.raises(ArgumentError, match="net"):
            Mahalanobis(predictor).fit(train_data=TRAIN, **QUIET)
        return
    net = predictor.nets[0] if name in ENSEMBLES else predictor.module if name == "mc-dropout" else predictor.net
    phi = reference_features(net, x)
    if name in ENSEMBLES:
        samples = predictor.predict(x, predictor.num_distinct).samples
        assert any(torch.allclose(net.fc(phi), sample, rtol=1e-4, atol=1e-5) for sample in samples)
    elif name != "mc-dropout":
        torch.testing.assert_close(net.fc(phi), predictor.predict(x, 3).mean, rtol=1e-4, atol=1e-5)
    train = reference_features(net, TRAIN.tensors[0]).double().numpy()
    expected = reference_distances(train, TRAIN.tensors[1].numpy(), phi.double().numpy())
    scores = Mahalanobis(predictor).fit(train_data=TRAIN, **QUIET).score(x, **QUIET)
    np.testing.assert_allclose(scores, expected, rtol=1e-2)  # single precision before Σ⁻¹


def test_net_argument_selects_the_features() -> None:
    x = noise(9, 4, seed=5)

    def scores(predictor: Predictor, net: nn.Module | None) -> Tensor:
        return Mahalanobis(predictor, net=net).fit(train_data=TRAIN, **QUIET).score(x, **QUIET)

    other = DeterministicPredictor(nn.Linear(4, 3))
    ensemble: Any = create_method("deep-ensemble", num_members=2).fit(TwoBranches, TRAIN, CONFIG)
    torch.testing.assert_close(scores(other, ensemble.nets[0]), scores(ensemble, None))
    batch: Any = create_method("batch-ensemble", num_members=2).fit(TwoBranches, TRAIN, CONFIG)
    assert scores(batch, batch.export(1)).shape == (9,)
    boots = NeuBoots().fit(TwoBranches, TRAIN, CONFIG)
    scaled = TemperatureScaling().fit(boots, TRAIN)
    assert torch.equal(scores(scaled, None), scores(boots, None))

    def with_dropout() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 3))

    dropout: Any = MCDropout().fit(with_dropout, TRAIN, CONFIG)
    with pytest.raises(ArgumentError, match="net"):
        scores(dropout, None)
    assert scores(dropout, dropout.module).shape == (9,)


# -- layers --------------------------------------------------------------------------------------------


def test_features_of_a_layer_are_channel_means_before_later_layers_overwrite_them() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 2),
    ).eval()
    x = noise(4, 3, 8, 8)
    split = find_feature_net(DeterministicPredictor(net), None, None, x)
    normed = net[1](net[0](x)).detach()
    expected = [net[0](x), normed, normed.relu(), normed.relu()]
    for part, values in zip(extract_features(split, ("0", "1", "2"), x), expected, strict=True):
        torch.testing.assert_close(part, values.mean((2, 3)))


class Sequences(nn.Module):
    """A layer of sequences (N, T, D) or (N, D, T), their mean over T, and a head."""

    def __init__(self, body: nn.Module, axis: int, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.body, self.axis, self.head, self.activation = body, axis, nn.Linear(4, 2), activation

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out = out if isinstance(out, Tensor) else out[0]
        return self.head(self.activation(out.mean(self.axis)))


@pytest.mark.parametrize(
    ("body", "time", "x"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, noise(6, 5, 4)),
        (nn.Conv1d(3, 4, 3), 2, noise(6, 3, 9)),
        (nn.LSTM(3, 4, batch_first=True), 1, noise(6, 5, 3)),
    ],
    ids=["tokens", "channels first", "tuple"],
)
def test_features_of_sequences_are_averaged_over_time(body: nn.Module, time: int, x: Tensor) -> None:
    predictor = DeterministicPredictor(Sequences(body, time))
    split = find_feature_net(predictor, None, None, x)
    with torch.no_grad():
        found = extract_features(split, ("body",), x)[0]
        output = predictor.net.body.eval()(x)
    output = output if isinstance(output, Tensor) else output[0]
    torch.testing.assert_close(found, output.mean(time), rtol=1e-4, atol=1e-5)


class Nested(nn.Module):
    """The head is inside a block; a shared layer is used twice; a layer comes after the head."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"body": nn.Linear(4, 7), "head": nn.Linear(7, 3)})
        self.after = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner["body"](self.twice(self.twice(x)))
        return self.after(self.inner["head"](x.tanh()))


class SharedActivation(nn.Module):
    """One activation module, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, 4), (4, 4), (4, 8)))
        self.relu, self.fc = nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.c(self.relu(self.b(self.relu(self.a(x))))))
        return self.fc(x.mean((2, 3)))


def equal_widths(depth: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3))


def transformer() -> nn.Module:
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 4)
    return Sequences(body, 1, activation=nn.Identity())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda: resnet8(4), (3, 16, 16), ("features.3", "features.4")),
        (Nested, (4,), ("inner.body",)),
        (SharedActivation, (1, 6, 6), ("b", "c")),
        (lambda: equal_widths(2), (4,), ("0", "1", "2")),
        (lambda: equal_widths(5), (4,), ("2", "5", "8")),
        (transformer, (5, 4), ("body.layers.0", "body.layers.1", "body.layers.2")),
        (lambda: nn.Linear(4, 3), (4,), None),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), (4,), None),
    ],
    ids=["residual", "nested", "shared activation", "equal widths", "deep", "transformer", "head only", "no layer"],
)
def test_stages_are_the_last_layers_of_each_shape(make: Any, shape: tuple[int, ...], expected: Any) -> None:
    torch.manual_seed(0)
    x = noise(8, *shape)
    split = find_feature_net(DeterministicPredictor(make().eval()), None, None, x)
    if expected is None:
        with pytest.raises(ArgumentError, match="layers"):
            find_stages(split, x)
        return
    assert find_stages(split, x) == expected
    assert len(extract_features(split, expected, x)) == len(expected) + 1


def test_few_blocks_are_searched_inside() -> None:
    def block() -> nn.Module:
        return Composed(lambda net, x: net.b(net.a(x).tanh()), a=nn.Linear(4, 4), b=nn.Linear(4, 4))

    net = Composed(lambda net, x: net.head(net.two(net.one(x))), one=block(), two=block(), head=nn.Linear(4, 3))
    assert find_stages(split_head(net), noise(9, 4)) == ("one.a", "one.b", "two.a")


def three_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3)
    ).double()


def test_distances_in_layers_match_a_reference() -> None:
    """With a step for each layer, by autograd through that layer alone."""
    net = three_layers().eval()
    train = TensorDataset(noise(200, 4).double(), torch.arange(200) % 3)
    x, y = noise(9, 4, seed=1).double(), train.tensors[1].numpy()
    detector = MahalanobisEnsemble(DeterministicPredictor(net), layers=("1", "3"), epsilons=(0.0, 0.1))
    layers = detector.fit(x, 3 * x, train_data=train, **QUIET).fitted
    assert layers is not None
    found = layers.distances(x, (0.0, 0.1))
    for layer, stop in enumerate([2, 4, 5]):  # the layers "1" and "3", which ReLU overwrites, and the head's input
        part = nn.Sequential(*copy.deepcopy(net)[:stop])
        phi = part(train.tensors[0]).detach().numpy()
        np.testing.assert_allclose(found[0, :, layer], reference_distances(phi, y, part(x).detach().numpy()), rtol=1e-6)
        means = torch.stack([torch.from_numpy(phi[y == c].mean(0)) for c in range(3)])
        whitening = layers.gaussians[layer].whitening
        leaf = x.clone().requires_grad_()
        away = (part(leaf)[:, None] - means) @ whitening
        (slope,) = torch.autograd.grad(away.square().sum(2).amin(1).sum(), leaf)
        moved = part(x - 0.1 * slope.sign()).detach().numpy()
        np.testing.assert_allclose(found[1, :, layer], reference_distances(phi, y, moved), rtol=1e-6)
    before, after = layers.distances(x, (0.0, 1e-6))
    assert bool((after <= before).all())


def test_layer_without_gradient_does_not_move() -> None:
    predictor = DeterministicPredictor(MixedInputs().double())
    a, kind = noise(60, 4).double(), torch.arange(60) % 5
    detector = MahalanobisEnsemble(predictor, layers=("embed", "body"), epsilons=(0.1,))
    train = TensorDataset(a, kind, torch.arange(60) % 2)
    layers = detector.fit((a[:9] + 1, kind[:9]), (3 * a[:9], kind[:9]), train_data=train, **QUIET).fitted
    assert layers is not None
    still, moved = layers.distances((a[:9], kind[:9]), (0.0, 0.1))
    assert torch.equal(still[:, 0], moved[:, 0])
    assert bool((still[:, 1:] != moved[:, 1:]).any(0).all())
    with pytest.raises(ArgumentError, match="x="):
        layers.distances((kind[:9], kind[:9]), (0.1,))
