"""Tests of the calibrated dispersion of NeuBoots, against closed forms and samples."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _nets import Upsampling, noise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, TrainingConfig, load, save
from neuboots._prng import derive_keys, draw_normal
from neuboots.losses import GaussianNLL
from neuboots.methods import (
    BayesianBootstrap,
    CalibratedNeuBoots,
    DeterministicPredictor,
    NeuBootsPredictor,
    calibrate_dispersion,
)
from neuboots.methods.calibrated_neuboots import _Family
from neuboots.methods.ensembles import EnsemblePredictor
from neuboots.methods.neuboots import BootstrapGenerator
from neuboots.prediction import Moments, Predictor, SampleStream
from neuboots.weights import (
    Constant,
    Dirichlet,
    Exponential,
    Link,
    Multinomial,
    WeightDistribution,
    link_moments,
)

CONFIG = TrainingConfig(epochs=3, batch_size=32, progress=False)


@dataclass(frozen=True)
class Known(Predictor):
    """Normal replicates with a standard deviation that we choose, (N, C, *), with or without exact moments."""

    std: Callable[[Tensor], Tensor]
    exact: bool = True
    common: float = 0.0  # noise that all outputs share

    @property
    def net(self) -> None:
        return None

    def config(self) -> dict[str, Any]:
        return {}

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        std = self.std(x)

        def chunks(size: int) -> Iterator[Tensor]:
            for b in range(num_samples):
                key = derive_keys(torch.tensor([b]), seed, "known")
                drawn = draw_normal(key, std.numel() + 1)[0].to(std)
                yield (std * drawn[1:].view(std.shape) + self.common * drawn[0])[None]

        return SampleStream(
            num_samples, 4 * std.numel(), chunks, Moments(torch.zeros_like(std), std) if self.exact else None
        )


def make_net(outputs: int, *, width: int = 12) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, outputs))


def boots(
    net: nn.Module,
    weight_distribution: WeightDistribution | None = None,
    link: Link = "identity",
    num_blocks: int | None = None,
) -> NeuBootsPredictor:
    return NeuBootsPredictor(
        BootstrapGenerator(net, link=link, num_blocks=num_blocks).eval(), weight_distribution or Dirichlet()
    )


def constant(size: float, outputs: int = 1) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full((len(x), outputs), size)


# -- the concentration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight_distribution", [Dirichlet(), Dirichlet(5.0), Exponential(2.0), Multinomial(), Constant()], ids=repr
)
@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("num_blocks", [None, 3, pytest.param(70, marks=pytest.mark.slow)])
def test_variance_is_reached_and_the_mean_stays(
    weight_distribution: WeightDistribution, link: Link, num_blocks: int
) -> None:
    predictor, x = boots(make_net(1), weight_distribution, link, num_blocks), noise(40, 4)
    widest = 0.2 * float(boots(make_net(1), Exponential(), link, num_blocks).moments(x).std.square().mean()) ** 0.5
    for size in (widest, 0.3 * widest):
        found = calibrate_dispersion(predictor, Known(constant(size)), x)
        assert found.dispersion.reached
        variance = float(found.moments(x).std.double().square().mean())
        assert variance == pytest.approx(size**2, rel=2e-5)  # float32 outputs
        assert found.dispersion.variance_after == pytest.approx(found.dispersion.reference_variance, rel=1e-6)
        torch.testing.assert_close(found.moments(x).mean, predictor.moments(x).mean, rtol=1e-5, atol=1e-6)
        # and the replicates themselves have it: 500 draws, few independent directions, five standard errors
        samples = found.predict(x, 500, seed=1).samples.double()
        assert float(samples.var(0).mean()) == pytest.approx(size**2, rel=5 * (2 / 500) ** 0.5)
        gap = (samples.mean(0) - found.moments(x).mean).abs()
        assert bool((gap <= 5 * found.moments(x).std / 500**0.5 + 1e-6).all())


def test_linear_model_matches_the_closed_form() -> None:
    """g = Σ_d α_d a_d with a = wx: under S × Dirichlet(c) its variance is (S Σ a² − (Σ a)²) / (Sc + 1)."""
    head = nn.Linear(5, 1)
    x = noise(30, 5, seed=1)
    a = (x * head.weight[0]).detach().double()
    top = float((5 * a.square().sum(1) - a.sum(1).square()).mean())
    found = calibrate_dispersion(boots(head), Known(constant(0.2)), x)
    assert found.dispersion.concentration == pytest.approx((top / 0.04 - 1) / 5, rel=1e-5)
    assert found.dispersion.variance_before == pytest.approx(top / 6, rel=1e-5)
    assert isinstance(found.weight_distribution, Dirichlet)
    assert found.weight_distribution.concentration == found.dispersion.concentration
    independent = calibrate_dispersion(boots(head, Exponential()), Known(constant(0.2)), x)
    assert independent.dispersion.concentration == pytest.approx(float(a.square().sum(1).mean()) / 0.04, rel=1e-5)


def test_correlation_of_the_bands_is_reported() -> None:
    x = noise(50, 4)
    predictor = boots(make_net(1))
    own = predictor.moments(x).std
    same = calibrate_dispersion(predictor, Known(lambda x: 0.3 * predictor.moments(x).std), x).dispersion
    assert same.correlation == pytest.approx(1.0, abs=1e-6)
    opposite = calibrate_dispersion(predictor, Known(lambda x: 0.1 * (2 - predictor.moments(x).std)), x).dispersion
    assert opposite.correlation == pytest.approx(-1.0, abs=1e-6)
    uniform = calibrate_dispersion(predictor, Known(constant(0.1)), x)
    assert uniform.dispersion.correlation is None
    torch.testing.assert_close(  # one factor at all x
        uniform.moments(x).std / own, (uniform.moments(x).std / own).mean().expand(50, 1), rtol=1e-4, atol=0
    )


def test_calibration_is_idempotent_and_reversible() -> None:
    x = noise(30, 4)
    predictor = boots(make_net(1), Dirichlet(2.0), "exp")
    once = calibrate_dispersion(predictor, Known(constant(0.02)), x)
    twice = calibrate_dispersion(once, Known(constant(0.02)), x)
    assert twice.dispersion.concentration == pytest.approx(once.dispersion.concentration, rel=1e-9)
    back = calibrate_dispersion(once, predictor, x)
    assert back.dispersion.concentration == pytest.approx(2.0, rel=1e-4)
    torch.testing.assert_close(back.predict(x, 5).samples, predictor.predict(x, 5).samples, rtol=1e-3, atol=1e-4)


# -- several outputs ----------------------------------------------------------------------------------


def test_many_rows_in_batches() -> None:
    """More rows than go in at a time, with a band that differs between them."""
    x = noise(1200, 4)
    reference = Known(lambda x: 0.05 + 0.01 * x[:, :1].abs())
    found = calibrate_dispersion(boots(make_net(1)), reference, x)
    assert found.dispersion.num_points == 1200
    wanted = float(reference.std(x).double().square().mean())
    assert float(found.moments(x).std.double().square().mean()) == pytest.approx(wanted, rel=1e-5)


def test_common_shift_of_logits_does_not_count() -> None:
    x = noise(60, 4)
    predictor = boots(make_net(3))
    quiet, loud = (Known(constant(0.1, 3), exact=False, common=common) for common in (0.0, 5.0))
    found = [calibrate_dispersion(predictor, reference, x, loss=nn.CrossEntropyLoss()) for reference in (quiet, loud)]
    assert found[1].dispersion.concentration == pytest.approx(found[0].dispersion.concentration, rel=1e-2)
    # independent logits of variance v, less their mean: v (1 − 1/C)
    assert found[0].dispersion.reference_variance == pytest.approx(0.01 * 2 / 3, rel=0.1)
    samples = found[0].predict(x, 2000).samples.double()
    centered = samples - samples.mean(2, keepdim=True)
    assert float(centered.var(0).mean()) == pytest.approx(found[0].dispersion.reference_variance, rel=0.15)


def test_gaussian_head_compares_means() -> None:
    x = noise(30, 4)
    predictor = boots(make_net(2))
    found = [
        calibrate_dispersion(predictor, Known(lambda x, s=s: torch.tensor([[0.1, s]]).expand(len(x), 2)), x, loss=loss)
        for s, loss in ((0.3, GaussianNLL()), (50.0, GaussianNLL()))
    ]
    assert found[0].dispersion == found[1].dispersion
    assert float(found[0].moments(x).std[:, 0].square().mean()) == pytest.approx(0.01, rel=1e-5)


def test_units_of_outputs_do_not_matter() -> None:
    """Kilometres and metres give one concentration."""

    def calibrate(unit: float) -> float:
        nets = [make_net(2) for _ in range(3)]
        with torch.no_grad():
            nets[2][2].weight += 0.05 * noise(2, 12, seed=4)
            for net in nets:
                net[2].weight[1] *= unit
                net[2].bias[1] *= unit
        reference = EnsemblePredictor(nn.ModuleList(nets[1:]), "bayesian-bootstrap")
        return calibrate_dispersion(boots(nets[0]), reference, noise(40, 4)).dispersion.concentration

    assert calibrate(1000.0) == pytest.approx(calibrate(1.0), rel=1e-4)


# -- nets with operations after the head ---------------------------------------------------------------


def test_maps_after_an_upsampling() -> None:
    x, predictor = noise(4, 2, 8, 8), boots(Upsampling())
    found = calibrate_dispersion(predictor, Known(lambda x: torch.full((len(x), 4, 8, 8), 0.05)), x)
    assert float(found.moments(x).std.square().mean()) == pytest.approx(0.0025, rel=0.6)  # in units of each output
    assert found.dispersion.variance_after == pytest.approx(found.dispersion.reference_variance, rel=1e-9)
    assert found.dispersion.num_points == 4 * 64
    sampled = Known(lambda x: torch.full((len(x), 4, 8, 8), 0.05), exact=False)
    contrasts = calibrate_dispersion(predictor, sampled, x, loss=nn.CrossEntropyLoss())
    samples = contrasts.predict(x, 2000).samples.double()
    centered = samples - samples.mean(2, keepdim=True)
    assert float(centered.var(0).mean()) == pytest.approx(contrasts.dispersion.reference_variance, rel=0.15)


def test_nonlinear_output_is_sampled() -> None:
    x = noise(40, 4)
    net = nn.Sequential(make_net(1), nn.Softplus())
    found = calibrate_dispersion(boots(net), Known(constant(0.03)), x, num_samples=500)
    assert found.dispersion.reached
    assert float(found.predict(x, 4000, seed=5).samples.var(0).mean()) == pytest.approx(9e-4, rel=0.2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.fc((self.a(left) + self.b(right)).tanh())[:, 0]  # (N,)


def test_several_inputs_and_outputs_without_an_axis() -> None:
    predictor = boots(Two())
    reference = NeuBootsPredictor(predictor.generator, Dirichlet(7.0))
    for x in ((noise(20, 3), noise(20, 2)), {"left": noise(20, 3), "right": noise(20, 2)}):
        found = calibrate_dispersion(predictor, reference, x, num_samples=2000)  # past the head, variances are sampled
        assert found.dispersion.concentration == pytest.approx(7.0, rel=5 * (2 / 2000) ** 0.5)


# -- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "size", "end"), [("identity", 1e6, 0.1), ("identity", 1e-9, 1e9), ("exp", 1e-9, 1e4)])
def test_variance_out_of_range_warns(link: Link, size: float, end: float) -> None:
    with pytest.warns(UserWarning, match="out of range"):
        found = calibrate_dispersion(boots(make_net(1), link=link), Known(constant(size)), noise(20, 4))
    assert not found.dispersion.reached
    assert found.dispersion.concentration == pytest.approx(end)
    assert bool(torch.isfinite(found.predict(noise(5, 4), 20).samples).all())


@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(3.0)], ids=repr)
def test_weights_are_stretched_beyond_the_smallest_concentration(
    link: Link, weight_distribution: WeightDistribution, tmp_path: Path
) -> None:
    x, predictor = noise(20, 4), boots(make_net(1), weight_distribution, link)
    size = 3.0 if link == "identity" else 0.5
    found = calibrate_dispersion(predictor, Known(constant(size)), x)
    assert found.dispersion.reached
    assert found.dispersion.stretch > 1.5
    assert float(found.moments(x).std.square().mean()) == pytest.approx(size**2, rel=1e-4)
    torch.testing.assert_close(found.moments(x).mean, predictor.moments(x).mean, rtol=1e-4, atol=1e-4)
    save(found, tmp_path / "model")
    again = load(tmp_path / "model", model=make_net(1))
    assert torch.equal(again.predict(x, 5).samples, found.predict(x, 5).samples)


@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(), Multinomial()], ids=repr)
@pytest.mark.parametrize("link", ["identity", "exp"])
def test_family_is_monotone_with_one_mean(weight_distribution: WeightDistribution, link: Link) -> None:
    family = _Family(weight_distribution, link, 12)
    low, high = family.range
    steps = torch.linspace(low, high, 80, dtype=torch.float64).tolist()
    moments = [link_moments(family(t), link, 12) for t in steps]
    spread = [v - c for _, v, c in moments]
    assert all(wide > narrow for wide, narrow in itertools.pairwise(spread))
    assert all(
        mean == pytest.approx(link_moments(weight_distribution, link, 12)[0], rel=1e-6) for mean, _, _ in moments
    )


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p, x: calibrate_dispersion(p, Known(constant(0.0)), x), "reference"),
        (lambda p, x: calibrate_dispersion(p, DeterministicPredictor(make_net(1)), x), "reference"),
        (lambda p, x: calibrate_dispersion(p, Known(constant(float("nan"))), x), "reference"),
        (lambda p, x: calibrate_dispersion(p, Known(constant(0.1, 2)), x), "reference"),
        (lambda p, x: calibrate_dispersion(p, "influence", x), "reference"),
        (lambda p, x: calibrate_dispersion(p, Known(constant(0.1)), x[:0]), "x="),
        (lambda p, x: calibrate_dispersion(p, Known(constant(0.1)), x * torch.nan), "NaN"),
        (lambda p, x: calibrate_dispersion(DeterministicPredictor(make_net(1)), p, x), "predictor"),
        (lambda p, x: calibrate_dispersion(p, Known(constant(0.1)), x, num_samples=1), "num_samples"),
        (lambda p, x: calibrate_dispersion(boots(make_net(1), num_blocks=1), p, x), "S = 1"),
        (lambda p, x: CalibratedNeuBoots(neuboots=NeuBoots(train_head_only=True), reference="bootstrap"), "reference"),
    ],
)
def test_arguments_are_checked(call: Callable[..., Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(boots(make_net(1)), noise(10, 4))


# -- the method -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"layers": 1}, {"reference": "bootstrap", "num_members": 40}], ids=str)
def test_least_squares_variance(options: dict[str, Any]) -> None:
    """On a linear model the mean over the n inputs of Var f̂(Xᵢ) is σ² p / n for any distribution in training."""
    n, inputs, sigma = 400, 3, 0.5
    x = noise(n, inputs, seed=2)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 1.0 + sigma * noise(n, seed=3)
    config = TrainingConfig(epochs=40, batch_size=100, optimizer=partial(torch.optim.SGD, lr=0.1), progress=False)
    method = CalibratedNeuBoots(nn.MSELoss(), NeuBoots(nn.MSELoss(), weight_distribution=Dirichlet(50.0)), **options)
    predictor = method.fit(lambda: nn.Linear(inputs, 1), TensorDataset(x, y), config)
    design = torch.cat([x, torch.ones(n, 1)], 1)
    residual = y - design @ torch.linalg.lstsq(design, y).solution
    wanted = float(residual.square().sum()) / (n - inputs - 1) * (inputs + 1) / n
    # a sandwich over 400 rows, 200 draws or 40 nets of 4 directions: √(2/160) = 11 %
    assert float(predictor.moments(x).std.square().mean()) == pytest.approx(wanted, rel=0.35)
    assert predictor.dispersion.num_points == n
    assert predictor.dispersion.training_concentration == 50.0


def test_bootstrap_reference_matches_the_parts() -> None:
    """By hand: NeuBoots, the K nets, the training inputs."""
    x = noise(80, 4)
    data = TensorDataset(x, x[:, 0].sin())
    found = CalibratedNeuBoots(nn.MSELoss(), reference="bootstrap", num_members=3).fit(
        lambda: make_net(1), data, CONFIG
    )
    plain = NeuBoots.regression().fit(lambda: make_net(1), data, CONFIG)
    members = BayesianBootstrap(nn.MSELoss(), num_members=3).fit(lambda: make_net(1), data, CONFIG)
    by_hand = calibrate_dispersion(plain, members, x, loss=nn.MSELoss())
    assert found.dispersion.concentration == pytest.approx(by_hand.dispersion.concentration, rel=1e-4)
    few = CalibratedNeuBoots(nn.MSELoss(), reference="bootstrap", num_members=3, num_inputs=10)
    assert few.fit(lambda: make_net(1), data, CONFIG).dispersion.num_points == 10


def test_training_options() -> None:
    assert CalibratedNeuBoots().options == NeuBoots()
    assert CalibratedNeuBoots(nn.MSELoss()).options == NeuBoots.regression()
    paper = replace(NeuBoots.paper(nn.MSELoss()), link="exp")
    assert CalibratedNeuBoots(nn.MSELoss(), paper).options is paper
