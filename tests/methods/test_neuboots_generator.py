"""g(x, 1) is the net; B replicates in one product are B separate heads; moments are the limit of samples."""

import copy
from collections.abc import Callable

import pytest
import torch
from _nets import ZOO, Case, Composed, Normalized, SoftCapped, Tied, Tokens, Transposed, TwoBranches, Upsampling, make
from torch import Tensor, nn

from neuboots import ArgumentError
from neuboots._prng import derive_keys
from neuboots.head import call_net, extract_output, unwrap_model
from neuboots.methods.neuboots import BootstrapGenerator
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

by_case = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
DISTRIBUTIONS = [Dirichlet(), Dirichlet(4.0), Exponential(), Exponential(0.5), Multinomial(), Constant()]


def draw(num: int, size: int, weight_distribution: WeightDistribution | None = None, seed: int = 0) -> Tensor:
    return (weight_distribution or Dirichlet()).sample(derive_keys(torch.arange(num), seed), size)


def plain_output(net: nn.Module, x: object) -> Tensor:
    """The net's own output, outputs on axis 1."""
    out = extract_output(call_net(net, x))
    return out.movedim(-1, 1) if isinstance(unwrap_model(net), Tokens) else out


@by_case
@torch.no_grad()
def test_unit_weights_give_the_net(case: Case) -> None:
    net = make(case)
    g = BootstrapGenerator(net, example=case.x)
    expected = plain_output(net, case.x)
    assert expected.shape == case.shape
    assert torch.equal(g(case.x), expected)
    assert torch.equal(g(case.x, torch.ones(g.num_blocks)), expected)
    assert torch.equal(g.at(case.x).output, expected)


@by_case
@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("num_blocks", [None, 3, 40])
@torch.no_grad()
def test_replicates_match_forward(case: Case, link: Link, num_blocks: int | None) -> None:
    g = BootstrapGenerator(make(case), link=link, num_blocks=num_blocks, example=case.x)
    alphas = draw(6, g.num_blocks)
    replicates = g.replicates(case.x, alphas)
    assert replicates.shape == (6, *case.shape)
    # Two orders of summation over D ≤ 12 features in single precision: a few units in the last place.
    torch.testing.assert_close(replicates, torch.stack([g(case.x, alpha) for alpha in alphas]), rtol=1e-5, atol=1e-5)


@by_case
@torch.no_grad()
def test_export_matches_forward(case: Case) -> None:
    net = make(case)
    g = BootstrapGenerator(net, example=case.x)
    before = copy.deepcopy(g.state_dict())
    alpha = draw(1, g.num_blocks)[0]
    exported = g.export(alpha)
    torch.testing.assert_close(plain_output(exported, case.x), g(case.x, alpha), rtol=1e-5, atol=1e-5)
    assert torch.equal(plain_output(g.export(), case.x), g(case.x))
    assert all(torch.equal(value, before[name]) for name, value in g.state_dict().items())


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [Tokens, SoftCapped, Transposed, Normalized])
@torch.no_grad()
def test_outputs_and_tokens_are_distinguished(kind: type[Tokens], tokens: int) -> None:
    """Three classes, and one to five tokens: outputs come to axis 1, also where the shapes are equal."""
    net = kind()
    x = {"input_ids": torch.arange(4 * tokens).view(4, tokens) % 11, "scale": torch.tensor(2.0)}
    phi = net.embed(x["input_ids"]) * 2.0
    logits = net.score(phi).movedim(-1, 1)  # (N, C, T)
    capped, normalized = 30 * torch.tanh(logits / 30), logits.log_softmax(1)
    expected = {Tokens: logits, SoftCapped: capped, Transposed: -0.5 * logits, Normalized: normalized}[kind]
    g = BootstrapGenerator(net, example=x)
    torch.testing.assert_close(g.at(x).output, expected)
    torch.testing.assert_close(g(x), expected)
    torch.testing.assert_close(g.replicates(x, torch.ones(2, 6))[1], expected)


@torch.no_grad()
def test_outputs_of_a_named_head_come_to_axis_1_past_learned_factors() -> None:
    """Which follow the last layer, so that it would not be found."""

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.factor = nn.Linear(4, 3), nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x) * self.factor

    net, x = Factors(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = net(x).mT
    for run in (lambda g: g(x), lambda g: g.at(x).output):
        net = copy.deepcopy(net)  # whose axis is not known yet
        torch.testing.assert_close(run(BootstrapGenerator(net, head="score")), expected)


@pytest.mark.parametrize("outputs", [1, 3])
@torch.no_grad()
def test_a_linear_net_may_keep_any_number_of_axes(outputs: int) -> None:
    """And the same net with another number of them afterwards."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))
    g, x = BootstrapGenerator(net), torch.randn(2, 3, 5, 7, 4, generator=torch.Generator().manual_seed(0))
    for inputs in (x[:, 0, 0], x[:, 0], x, x[:, 0], x[:, 0, 0], x[:, 0, 0, 0]):
        expected = net(inputs).movedim(-1, 1)
        torch.testing.assert_close(g.at(inputs).output, expected)
        torch.testing.assert_close(g(inputs), expected)
        torch.testing.assert_close(g.replicates(inputs, torch.ones(1, 6))[0], expected)


@torch.no_grad()
def test_axes_that_follow_a_head_of_two_axes_stay() -> None:
    """Outputs (N, C) that are made into (N, T, 2) and summed over the steps T."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), Composed(lambda _, z: z.cumsum(1)))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(BootstrapGenerator(net).at(x).output, net(x))


@torch.no_grad()
def test_one_alpha_per_input() -> None:
    for case in ZOO:
        g = BootstrapGenerator(make(case), num_blocks=5, example=case.x)
        rows = case.shape[0]
        alphas = draw(rows, 5)
        together = g(case.x, alphas)
        for i in range(rows):
            torch.testing.assert_close(together[i], g(case.x, alphas[i])[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_distribution", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("num_blocks", [3, 6, 20])
@torch.no_grad()
def test_moments_match_explicit_covariance(
    weight_distribution: WeightDistribution, link: Link, num_blocks: int
) -> None:
    """The oracle builds Cov h(α) of the features as a matrix and takes a Cov aᵀ with a = W diag φ."""
    bias = num_blocks != 20
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=bias)).double()
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phi, head = net[1](net[0](x)), net[2]
    mean, v, c = link_moments(weight_distribution, link, num_blocks)
    blocks = torch.arange(6) % num_blocks
    covariance = torch.where(blocks == blocks[:, None], v, c).double()  # (D, D)
    contributions = head.weight * phi[:, None]  # (N, C, D)
    variance = torch.einsum("nci,ij,ncj->nc", contributions, covariance, contributions)
    moments = BootstrapGenerator(net, link=link, num_blocks=num_blocks).moments(x, weight_distribution)
    torch.testing.assert_close(moments.std, variance.clamp_min(0).sqrt(), rtol=1e-7, atol=1e-7)
    expected = mean * contributions.sum(2) + (head.bias if bias else 0.0)
    torch.testing.assert_close(moments.mean, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_equal_contributions_have_no_variance() -> None:
    """Weights with a constant sum cancel, up to rounding: the variance is not negative."""
    g = BootstrapGenerator(nn.Linear(7, 1))
    g.net[0].weight.fill_(1.0)
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).expand(-1, 7)
    assert bool((g.moments(x, Dirichlet()).std <= 1e-2 * x[:, :1].abs()).all())


@torch.no_grad()
def test_moments_of_many_pixels_are_those_of_each() -> None:
    net = nn.Conv1d(2, 3, 1)
    x = torch.randn(2, 2, 70_000, generator=torch.Generator().manual_seed(0))
    pixels = nn.Linear(2, 3)
    pixels.weight, pixels.bias = nn.Parameter(net.weight[..., 0]), net.bias
    found, rows = BootstrapGenerator(net).moments(x, Dirichlet()), x.movedim(1, 2).reshape(-1, 2)
    expected = BootstrapGenerator(pixels).moments(rows, Dirichlet())
    torch.testing.assert_close(found.mean.movedim(1, 2).reshape(-1, 3), expected.mean)
    torch.testing.assert_close(found.std.movedim(1, 2).reshape(-1, 3), expected.std, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dims", [1, 2, 3])
@torch.no_grad()
def test_moments_after_upsampling(dims: int) -> None:
    g = BootstrapGenerator(Upsampling(dims).double().eval())
    x = torch.randn(2, 2, *[4] * dims, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    samples = g.replicates(x, draw(1000, g.num_blocks))
    moments = g.moments(x, Dirichlet())
    # The standard deviation of 1,000 draws has a relative standard error of about 3 %; 6 of them over all pixels.
    torch.testing.assert_close(samples.std(0), moments.std, rtol=0.18, atol=1e-9)
    torch.testing.assert_close(g(x), moments.mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("finish", [torch.relu, torch.abs, torch.square, lambda z: z - 0.05 * z.abs()])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_moments_after_nonlinear_function_raise(finish: Callable[[Tensor], Tensor], scale: float) -> None:
    class Finished(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            return torch.cat([1e3 * z, finish(scale * z)], 1)  # one output large and affine, one not

    net = Finished(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ArgumentError, match="affine") as caught:
        BootstrapGenerator(net).moments(x, Dirichlet())
    assert caught.value.name == "model"


def test_moments_after_saturating_function_raise() -> None:
    """Affine where α = 1 and not elsewhere: the check must look at other weights too."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Hardtanh(-1.0, 1.0))
    with torch.no_grad():
        net[2].weight.copy_(torch.tensor([[1.0, -1.0] * 4]))
        net[2].bias.zero_()
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ArgumentError, match="affine"):
        BootstrapGenerator(net).moments(x, Dirichlet())


@torch.no_grad()
def test_outputs_that_are_zero_after_upsampling_have_moments() -> None:
    net = Upsampling(2).eval()
    head = BootstrapGenerator(net).split.head
    head.weight[0], head.bias[0] = 0.0, 0.0
    g, x = BootstrapGenerator(net), torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    moments = g.moments(x, Dirichlet())
    assert not bool(moments.mean[:, 0].any() | moments.std[:, 0].any())
    assert bool((moments.std[:, 1:] > 0).any())
    assert bool((g.moments(1e4 * x, Dirichlet()).std >= 1e3 * moments.std).all())  # nor is rounding nonlinear


@torch.no_grad()
def test_a_single_replicate_of_a_single_block() -> None:
    """One weight multiplies all features."""
    net, x = nn.Linear(4, 3), torch.randn(5, 4)
    g = BootstrapGenerator(net, num_blocks=1)
    assert g.at(x)(torch.tensor([[2.0]])).shape == (1, 5, 3)
    torch.testing.assert_close(g.at(x)(torch.tensor([[2.0]]))[0], net(2 * x))


def test_a_row_that_the_net_squeezes_away_is_restored() -> None:
    g = BootstrapGenerator(nn.Sequential(nn.Linear(4, 3), Composed(lambda _, z: z.squeeze())))
    for rows in (1, 2):
        x = torch.ones(rows, 4)
        assert g(x).shape == g.at(x).output.shape == (rows, 3)
        assert g.replicates(x, torch.ones(2, 4)).shape == (2, rows, 3)


def test_modes_are_those_of_the_net() -> None:
    g = BootstrapGenerator(TwoBranches())
    for mode in (False, True):
        assert g.train(mode) is g
        assert {module.training for module in g.modules()} == {mode}
    g.eval().freeze_features()
    for mode in (False, True):
        assert g.training == g.split.head.training == mode
        assert not any(module.training for module in g.net.modules() if module is not g.split.head)
        g.train()


def test_gradients_reach_every_parameter() -> None:
    for case in ZOO:
        g = BootstrapGenerator(make(case), example=case.x)
        g(case.x, draw(1, g.num_blocks)[0]).square().sum().backward()
        assert all(p.grad is not None for p in g.parameters())


@torch.no_grad()
def test_forward_definition() -> None:
    """Written out by hand: M(F(x) ⊙ h(α)), features dealt to the blocks in turn."""
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 2))
    x, alpha = torch.randn(5, 4), torch.rand(3)
    phi = net[1](net[0](x))
    for link in ("identity", "exp"):
        factor = apply_link(alpha, link)[torch.tensor([0, 1, 2, 0, 1, 2, 0])]
        expected = net[2](phi * factor)
        torch.testing.assert_close(BootstrapGenerator(net, num_blocks=3, link=link)(x, alpha), expected)


def test_freeze_features_trains_the_head_only() -> None:
    net = TwoBranches()
    g = BootstrapGenerator(net)
    g.freeze_features()
    g.train()
    assert not net.left[1].training
    assert net.fc.training
    statistics = net.left[1].running_mean.clone()
    g(torch.randn(6, 4), torch.ones(12)).sum().backward()
    assert torch.equal(net.left[1].running_mean, statistics)
    assert {name for name, p in net.named_parameters() if p.grad is not None} == {"fc.weight", "fc.bias"}


def test_freeze_features_of_tied_head_raises() -> None:
    with pytest.raises(ArgumentError) as caught:
        BootstrapGenerator(Tied()).freeze_features()
    assert caught.value.name == "head"


def test_generator_adds_no_parameters() -> None:
    net = TwoBranches()
    g = BootstrapGenerator(net)
    assert [id(p) for p in g.parameters()] == [id(p) for p in net.parameters()]
    assert [name.removeprefix("net.") for name in g.state_dict()] == list(net.state_dict())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_blocks", lambda g: BootstrapGenerator(g.net, num_blocks=0)),
        ("link", lambda g: BootstrapGenerator(g.net, link="log")),
        ("alpha", lambda g: g(torch.zeros(2, 4), torch.ones(5))),
        ("alpha", lambda g: g(torch.zeros(2, 4), torch.ones(3, 12))),
        ("alpha", lambda g: g(torch.zeros(2, 4), torch.ones(2, 1, 12))),
        ("alphas", lambda g: g.replicates(torch.zeros(2, 4), torch.ones(12))),
        ("alphas", lambda g: g.replicates(torch.zeros(2, 4), torch.ones(0, 12))),
    ],
)
def test_wrong_argument_raises(name: str, call: Callable[[BootstrapGenerator], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(BootstrapGenerator(TwoBranches().eval()))
    assert caught.value.name == name
