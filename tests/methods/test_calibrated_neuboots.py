"""The dispersion of NeuBoots set from another predictor's variance: by hand, by sampling, and through a whole fit."""

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, TrainingConfig, load, save
from neuboots._prng import derive_keys, draw_normal
from neuboots.generator import BootstrapGenerator
from neuboots.losses import GaussianNLL
from neuboots.methods import (
    BayesianBootstrap,
    CalibratedNeuBoots,
    DeterministicPredictor,
    EnsemblePredictor,
    NeuBootsPredictor,
    calibrate_dispersion,
)
from neuboots.methods.calibrated_neuboots import DispersionFamily
from neuboots.prediction import Moments, Predictor, SampleStream
from neuboots.testing import check_method
from neuboots.weights import (
    Constant,
    Dirichlet,
    Exponential,
    Link,
    Multinomial,
    WeightDistribution,
    apply_link,
    link_moments,
)

RECIPE = TrainingConfig(epochs=3, batch_size=32, progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
                noise = draw_normal(key, std.numel() + 1)[0].to(std)
                yield (std * noise[1:].view(std.shape) + self.common * noise[0])[None]

        return SampleStream(
            num_samples, 4 * std.numel(), chunks, Moments(torch.zeros_like(std), std) if self.exact else None
        )


def body(outputs: int, *, width: int = 12) -> nn.Sequential:
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


def flat(size: float, outputs: int = 1) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full((len(x), outputs), size)


# -- the concentration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight_distribution", [Dirichlet(), Dirichlet(5.0), Exponential(2.0), Multinomial(), Constant()], ids=repr
)
@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("num_blocks", [None, 3, 70])
def test_the_variance_is_the_one_asked_for_and_the_mean_stays(
    weight_distribution: WeightDistribution, link: Link, num_blocks: int
) -> None:
    predictor, x = boots(body(1), weight_distribution, link, num_blocks), rows(40, 4)
    widest = 0.2 * float(boots(body(1), Exponential(), link, num_blocks).moments(x).std.square().mean()) ** 0.5
    for size in (widest, 0.3 * widest):
        found = calibrate_dispersion(predictor, Known(flat(size)), x)
        assert found.dispersion.reached
        variance = float(found.moments(x).std.double().square().mean())
        assert variance == pytest.approx(size**2, rel=2e-5)  # float32 outputs
        assert found.dispersion.after == pytest.approx(found.dispersion.like, rel=1e-6)
        torch.testing.assert_close(found.moments(x).mean, predictor.moments(x).mean, rtol=1e-5, atol=1e-6)
        # and the replicates themselves have it: 3,000 draws, few independent directions, five standard errors
        samples = found.predict(x, 3000, seed=1).samples.double()
        assert float(samples.var(0).mean()) == pytest.approx(size**2, rel=5 * (2 / 3000) ** 0.5)
        gap = (samples.mean(0) - found.moments(x).mean).abs()
        assert bool((gap <= 5 * found.moments(x).std / 3000**0.5 + 1e-6).all())


def test_a_linear_model_by_hand() -> None:
    """g = Σ_d α_d a_d with a = wx: under S × Dirichlet(c) its variance is (S Σ a² − (Σ a)²) / (Sc + 1)."""
    head = nn.Linear(5, 1)
    x = rows(30, 5, seed=1)
    a = (x * head.weight[0]).detach().double()
    top = float((5 * a.square().sum(1) - a.sum(1).square()).mean())
    found = calibrate_dispersion(boots(head), Known(flat(0.2)), x)
    assert found.dispersion.concentration == pytest.approx((top / 0.04 - 1) / 5, rel=1e-5)
    assert found.dispersion.before == pytest.approx(top / 6, rel=1e-5)
    assert isinstance(found.weight_distribution, Dirichlet)
    assert found.weight_distribution.concentration == found.dispersion.concentration
    independent = calibrate_dispersion(boots(head, Exponential()), Known(flat(0.2)), x)
    assert independent.dispersion.concentration == pytest.approx(float(a.square().sum(1).mean()) / 0.04, rel=1e-5)


def test_where_the_band_is_wide_stays_and_is_reported() -> None:
    x = rows(50, 4)
    predictor = boots(body(1))
    own = predictor.moments(x).std
    same = calibrate_dispersion(predictor, Known(lambda x: 0.3 * predictor.moments(x).std), x).dispersion
    assert same.correlation == pytest.approx(1.0, abs=1e-6)
    opposite = calibrate_dispersion(predictor, Known(lambda x: 0.1 * (2 - predictor.moments(x).std)), x).dispersion
    assert opposite.correlation == pytest.approx(-1.0, abs=1e-6)
    flat_one = calibrate_dispersion(predictor, Known(flat(0.1)), x)
    assert flat_one.dispersion.correlation is None
    torch.testing.assert_close(  # one factor at all x
        flat_one.moments(x).std / own, (flat_one.moments(x).std / own).mean().expand(50, 1), rtol=1e-4, atol=0
    )
    assert "concentration" in str(same)
    assert "training: 1" in str(same)
    assert "1.00" in str(same)


def test_calibrating_again_changes_nothing_and_finds_the_way_back() -> None:
    x = rows(30, 4)
    predictor = boots(body(1), Dirichlet(2.0), "exp")
    once = calibrate_dispersion(predictor, Known(flat(0.02)), x)
    twice = calibrate_dispersion(once, Known(flat(0.02)), x)
    assert twice.dispersion.concentration == pytest.approx(once.dispersion.concentration, rel=1e-9)
    back = calibrate_dispersion(once, predictor, x)
    assert back.dispersion.concentration == pytest.approx(2.0, rel=1e-4)
    torch.testing.assert_close(back.predict(x, 5).samples, predictor.predict(x, 5).samples, rtol=1e-3, atol=1e-4)


def test_many_rows_are_those_of_their_parts() -> None:
    """More rows than go in at a time, with a band that differs between them."""
    x = rows(1200, 4)
    like = Known(lambda x: 0.05 + 0.01 * x[:, :1].abs())
    found = calibrate_dispersion(boots(body(1)), like, x)
    assert found.dispersion.num_points == 1200
    wanted = float(like.std(x).double().square().mean())
    assert float(found.moments(x).std.double().square().mean()) == pytest.approx(wanted, rel=1e-5)


# -- what counts of several outputs -----------------------------------------------------------------------


def test_of_classes_a_shift_of_all_logits_does_not_count() -> None:
    x = rows(60, 4)
    predictor = boots(body(3))
    quiet, loud = (Known(flat(0.1, 3), exact=False, common=common) for common in (0.0, 5.0))
    found = [calibrate_dispersion(predictor, like, x, loss=nn.CrossEntropyLoss()) for like in (quiet, loud)]
    assert found[1].dispersion.concentration == pytest.approx(found[0].dispersion.concentration, rel=1e-2)
    # independent logits of variance v, less their mean: v (1 − 1/C)
    assert found[0].dispersion.like == pytest.approx(0.01 * 2 / 3, rel=0.1)
    samples = found[0].predict(x, 2000).samples.double()
    centred = samples - samples.mean(2, keepdim=True)
    assert float(centred.var(0).mean()) == pytest.approx(found[0].dispersion.like, rel=0.15)


def test_the_exact_variance_of_contrasts_is_that_of_a_shifted_head() -> None:
    """Adding one vector to all rows of the head moves all logits together, and nothing else."""
    x = rows(30, 4)
    net, shifted = body(3), body(3)
    with torch.no_grad():
        shifted[2].weight += 4 * rows(12, seed=9)
    for link in ("identity", "exp"):
        found = [
            calibrate_dispersion(
                boots(part, link=link), Known(flat(0.05, 3), exact=False), x, loss=nn.CrossEntropyLoss()
            )
            for part in (net, shifted)
        ]
        assert found[0].dispersion.concentration == pytest.approx(found[1].dispersion.concentration, rel=1e-3)


def test_of_a_gaussian_head_the_means_count() -> None:
    x = rows(30, 4)
    predictor = boots(body(2))
    found = [
        calibrate_dispersion(predictor, Known(lambda x, s=s: torch.tensor([[0.1, s]]).expand(len(x), 2)), x, loss=loss)
        for s, loss in ((0.3, GaussianNLL()), (50.0, GaussianNLL()))
    ]
    assert found[0].dispersion == found[1].dispersion
    assert float(found[0].moments(x).std[:, 0].square().mean()) == pytest.approx(0.01, rel=1e-5)


def test_units_of_outputs_do_not_matter() -> None:
    """Kilometres and metres give one concentration."""
    x = rows(40, 4)
    metres, kilometres = body(2), body(2)
    with torch.no_grad():
        metres[2].weight[1] *= 1000
        metres[2].bias[1] *= 1000
    scale = torch.tensor([1.0, 1000.0])
    like = EnsemblePredictor(nn.ModuleList([body(2), _other(body(2))]), "bayesian-bootstrap")
    small = calibrate_dispersion(boots(kilometres), like, x)
    large = calibrate_dispersion(boots(metres), _Times(like, scale), x)
    assert large.dispersion.concentration == pytest.approx(small.dispersion.concentration, rel=1e-4)


def _other(net: nn.Sequential) -> nn.Sequential:
    with torch.no_grad():
        net[2].weight += 0.05 * rows(2, 12, seed=4)
    return net


@dataclass(frozen=True)
class _Times(Predictor):
    inner: Predictor
    scale: Tensor

    @property
    def net(self) -> nn.Module | None:
        return None

    def config(self) -> dict[str, Any]:
        return {}

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        samples = self.inner.predict(x, num_samples, seed=seed).samples * self.scale
        moments = Moments(samples[:2].mean(0), samples[:2].std(0))
        return SampleStream(num_samples, 1000, lambda size: iter(samples.split(size)), moments)


# -- nets that go on after the head -----------------------------------------------------------------------


class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.head(self.stem(x).relu()), scale_factor=2, mode="bilinear")


def test_maps_after_an_affine_finish() -> None:
    x = rows(4, 2, 6, 6)
    found = calibrate_dispersion(boots(Upsampled()), Known(lambda x: torch.full((len(x), 3, 12, 12), 0.05)), x)
    assert float(found.moments(x).std.square().mean()) == pytest.approx(0.0025, rel=0.6)  # in units of each output
    assert found.dispersion.after == pytest.approx(found.dispersion.like, rel=1e-9)
    assert found.dispersion.num_points == 4 * 144
    contrasts = calibrate_dispersion(
        boots(Upsampled()),
        Known(lambda x: torch.full((len(x), 3, 12, 12), 0.05), exact=False),
        x,
        loss=nn.CrossEntropyLoss(),
    )
    samples = contrasts.predict(x, 2000).samples.double()
    centred = samples - samples.mean(2, keepdim=True)
    assert float(centred.var(0).mean()) == pytest.approx(contrasts.dispersion.like, rel=0.15)


def test_a_finish_that_is_not_affine_is_sampled() -> None:
    x = rows(40, 4)
    net = nn.Sequential(body(1), nn.Softplus())
    found = calibrate_dispersion(boots(net), Known(flat(0.03)), x, num_samples=500)
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
    like = NeuBootsPredictor(predictor.generator, Dirichlet(7.0))
    for x in ((rows(20, 3), rows(20, 2)), {"left": rows(20, 3), "right": rows(20, 2)}):
        found = calibrate_dispersion(predictor, like, x, num_samples=2000)  # past the head, variances are sampled
        assert found.dispersion.concentration == pytest.approx(7.0, rel=5 * (2 / 2000) ** 0.5)


# -- what cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "size", "end"), [("identity", 1e6, 0.1), ("identity", 1e-9, 1e9), ("exp", 1e-9, 1e4)])
def test_a_size_that_no_law_gives_is_said(link: Link, size: float, end: float) -> None:
    with pytest.warns(UserWarning, match="the band is not of the size of the other one"):
        found = calibrate_dispersion(boots(body(1), link=link), Known(flat(size)), rows(20, 4))
    assert not found.dispersion.reached
    assert found.dispersion.concentration == pytest.approx(end)
    assert bool(torch.isfinite(found.predict(rows(5, 4), 20).samples).all())


@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(3.0)], ids=repr)
def test_what_no_concentration_gives_is_stretched(
    link: Link, weight_distribution: WeightDistribution, tmp_path: Path
) -> None:
    x, predictor = rows(20, 4), boots(body(1), weight_distribution, link)
    size = 3.0 if link == "identity" else 0.5
    found = calibrate_dispersion(predictor, Known(flat(size)), x)
    assert found.dispersion.reached
    assert found.dispersion.stretch > 1.5
    assert "stretched" in str(found.dispersion)
    assert float(found.moments(x).std.square().mean()) == pytest.approx(size**2, rel=1e-4)
    torch.testing.assert_close(found.moments(x).mean, predictor.moments(x).mean, rtol=1e-4, atol=1e-4)
    save(found, tmp_path / "model")
    again = load(tmp_path / "model", model=body(1))
    assert torch.equal(again.predict(x, 5).samples, found.predict(x, 5).samples)


@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(), Multinomial()], ids=repr)
@pytest.mark.parametrize("link", ["identity", "exp"])
def test_the_family_goes_from_wide_to_narrow_about_one_mean(
    weight_distribution: WeightDistribution, link: Link
) -> None:
    family = DispersionFamily(weight_distribution, link, 12)
    low, high = family.range
    steps = torch.linspace(low, high, 80, dtype=torch.float64).tolist()
    moments = [link_moments(family(t), link, 12) for t in steps]
    spread = [v - c for _, v, c in moments]
    assert all(wide > narrow for wide, narrow in itertools.pairwise(spread))
    assert all(
        mean == pytest.approx(link_moments(weight_distribution, link, 12)[0], rel=1e-6) for mean, _, _ in moments
    )
    for t in (low + 3.0, steps[40]):  # and the draws have these moments
        factors = apply_link(family(t).sample(derive_keys(torch.arange(20_000), "family"), 12), link)
        mean, v, c = link_moments(family(t), link, 12)
        spread = factors.sub(factors.mean(1, keepdim=True)).square().sum(1) / 11  # of mean v − c
        error = float(spread.std()) / 20_000**0.5
        assert float(spread.mean()) == pytest.approx(v - c, abs=5 * error)
        assert float(factors.mean()) == pytest.approx(mean, abs=5 * (v / 20_000) ** 0.5)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p, x: calibrate_dispersion(p, Known(flat(0.0)), x), "all the same at x"),
        (
            lambda p, x: calibrate_dispersion(p, DeterministicPredictor(body(1)), x),
            "a single member, which has no spread",
        ),
        (lambda p, x: calibrate_dispersion(p, Known(flat(float("nan"))), x), "NaN or infinite replicates"),
        (lambda p, x: calibrate_dispersion(p, Known(flat(0.1, 2)), x), "expected the same outputs of both"),
        (lambda p, x: calibrate_dispersion(p, Known(flat(0.1)), x[:0]), "got no inputs"),
        (lambda p, x: calibrate_dispersion(p, Known(flat(0.1)), x * torch.nan), "NaN or infinite value"),
        (lambda p, x: calibrate_dispersion(p, "influence", x), "got like of type str"),
        (lambda p, x: calibrate_dispersion(DeterministicPredictor(body(1)), p, x), "expected a predictor of NeuBoots"),
        (lambda p, x: calibrate_dispersion(p, Known(flat(0.1)), x, num_samples=1), "got num_samples=1"),
        (lambda p, x: calibrate_dispersion(boots(body(1), num_blocks=1), p, x), "S = 1 blocks"),
        (lambda p, x: CalibratedNeuBoots(nn.MSELoss(), NeuBoots()), "expected the same loss"),
        (lambda p, x: CalibratedNeuBoots(neuboots="paper"), "got neuboots='paper'"),
        (lambda p, x: CalibratedNeuBoots(reference="jackknife"), "got reference='jackknife'"),
        (lambda p, x: CalibratedNeuBoots(layers=0), "got layers=0"),
        (lambda p, x: CalibratedNeuBoots(num_members=1), "got num_members=1"),
        (lambda p, x: CalibratedNeuBoots(num_inputs=1), "got rows=1"),
        (lambda p, x: CalibratedNeuBoots(neuboots=NeuBoots(tune="head"), reference="bootstrap"), "got tune='head'"),
    ],
)
def test_bad_calls_get_a_sentence(call: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(boots(body(1)), rows(10, 4))


# -- the method -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["identity", "exp"])
def test_save_and_load_keep_the_concentration(link: Link, tmp_path: Path) -> None:
    x = rows(20, 4)
    found = calibrate_dispersion(boots(body(1), Exponential(), link), Known(flat(0.03)), x)
    save(found, tmp_path / "model")
    again = load(tmp_path / "model", model=body(1))
    assert again.weight_distribution == found.weight_distribution
    assert again.dispersion == found.dispersion
    assert torch.equal(again.predict(x, 7, seed=2).samples, found.predict(x, 7, seed=2).samples)
    torch.testing.assert_close(again.export(3, seed=2)(x), found.predict(x, 4, seed=2).samples[3])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["method"] == "calibrated-neuboots"
    assert config["law"]["concentration"] == found.dispersion.concentration


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 1},
        {"reference": "bootstrap", "num_members": 3},
        {"reference": "bootstrap", "num_members": 2, "num_inputs": 5},
    ],
    ids=str,
)
def test_contract(options: dict[str, Any]) -> None:
    check_method("calibrated-neuboots", **options)


@pytest.mark.parametrize("options", [{}, {"layers": 1}, {"reference": "bootstrap", "num_members": 40}], ids=str)
def test_least_squares_has_the_variance_of_the_textbook(options: dict[str, Any]) -> None:
    """On a linear model the mean over the n inputs of Var f̂(Xᵢ) is σ² p / n, whatever the law in training."""
    n, inputs, sigma = 400, 3, 0.5
    x = rows(n, inputs, seed=2)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 1.0 + sigma * rows(n, seed=3)
    config = TrainingConfig(epochs=40, batch_size=100, optimizer=partial(torch.optim.SGD, lr=0.1), progress=False)
    method = CalibratedNeuBoots(nn.MSELoss(), NeuBoots(nn.MSELoss(), weight_distribution=Dirichlet(50.0)), **options)
    predictor = method.fit(lambda: nn.Linear(inputs, 1), TensorDataset(x, y), config)
    design = torch.cat([x, torch.ones(n, 1)], 1)
    residual = y - design @ torch.linalg.lstsq(design, y).solution
    wanted = float(residual.square().sum()) / (n - inputs - 1) * (inputs + 1) / n
    # a sandwich over 400 rows, 200 draws or 40 nets of 4 directions: √(2/160) = 11 %
    assert float(predictor.moments(x).std.square().mean()) == pytest.approx(wanted, rel=0.35)
    assert predictor.dispersion.num_points == n
    assert predictor.dispersion.trained == 50.0


def test_the_reference_is_the_bootstrap_of_the_same_recipe() -> None:
    """By hand: NeuBoots, the K nets, the training inputs."""
    x = rows(80, 4)
    data = TensorDataset(x, x[:, 0].sin())
    found = CalibratedNeuBoots(nn.MSELoss(), reference="bootstrap", num_members=3).fit(lambda: body(1), data, RECIPE)
    plain = NeuBoots.regression().fit(lambda: body(1), data, RECIPE)
    members = BayesianBootstrap(nn.MSELoss(), num_members=3).fit(lambda: body(1), data, RECIPE)
    by_hand = calibrate_dispersion(plain, members, x, loss=nn.MSELoss())
    assert found.dispersion.concentration == pytest.approx(by_hand.dispersion.concentration, rel=1e-4)
    few = CalibratedNeuBoots(nn.MSELoss(), reference="bootstrap", num_members=3, num_inputs=10)
    assert few.fit(lambda: body(1), data, RECIPE).dispersion.num_points == 10


def test_options_of_the_training() -> None:
    assert CalibratedNeuBoots().options == NeuBoots()
    assert CalibratedNeuBoots(nn.MSELoss()).options == NeuBoots.regression()
    paper = replace(NeuBoots.paper(nn.MSELoss()), link="exp")
    assert CalibratedNeuBoots(nn.MSELoss(), paper).options is paper
    x = rows(60, 4)
    config = TrainingConfig(epochs=40, batch_size=30, optimizer=partial(torch.optim.Adam, lr=1e-2), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = CalibratedNeuBoots(nn.MSELoss(), paper, layers=1).fit(
            lambda: body(1), TensorDataset(x, x[:, 0] + 0.5 * rows(60, seed=5)), config
        )
    assert found.generator.link == "exp"
    assert found.dispersion.reached
