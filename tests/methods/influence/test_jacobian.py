"""Tests of the Jacobian and the tangent kernel against differentiation row by row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _influence import make_mlp
from _nets import noise
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from neuboots import InfluenceBootstrap
from neuboots.methods.influence import _jacobian
from neuboots.methods.influence._jacobian import Jacobian

# -- nets ----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A net with layers of every kind: convolution, norm, a layer used twice, attention, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.twice = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4))
        self.hidden = nn.Linear(24, 5, bias=False)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x[:, None])).tanh()
        h = self.twice(self.twice(h).tanh())
        h = h.transpose(1, 2)
        h = self.attention(h, h, h, need_weights=False)[0] * self.scale
        return self.head(self.hidden(h.flatten(1)).tanh())


@pytest.fixture
def odd() -> nn.Module:
    torch.manual_seed(3)
    net = Odd()
    net(noise(20, 6))  # sets its running statistics
    return net.eval()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        k = self.second(h)
        k += h
        k.mul_(2.0)
        return self.head(torch.tanh(k))


class Tied(nn.Module):
    """An autoencoder that uses a weight a second time, without calling its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T))


class BiasTwice(nn.Module):
    """A bias that is read a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) + self.first.bias))


class Tokens(nn.Module):
    """A Linear that sees two tokens, however many inputs there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.project, self.head = nn.Parameter(noise(2, 3)), nn.Linear(3, 4), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.project(self.tokens).T)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.backbone(x).relu()
        return self.head(h)


def pruned() -> nn.Module:
    net = make_mlp(nn.ReLU)
    prune.random_unstructured(net[2], "weight", amount=0.5)
    return net


def normed(norm: Any, factor: float = 1.0) -> nn.Module:
    net = make_mlp(nn.Tanh)
    norm(net[2])
    with torch.no_grad():
        next(net[2].parametrizations.weight.parameters()).mul_(factor)  # type: ignore[union-attr,operator]
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "in-place ReLU": lambda: make_mlp(lambda: nn.ReLU(inplace=True)),
    "in-place ELU": lambda: make_mlp(lambda: nn.ELU(inplace=True)),
    "in-place sums": InPlace,
    "tied weights": Tied,
    "a bias used twice": BiasTwice,
    "two tokens": Tokens,
    "no_grad inside": Frozen,
    "pruned": pruned,
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "weight norm": lambda: normed(parametrizations.weight_norm, 2.0),
    "a layer by itself": lambda: nn.Linear(4, 2),
}


# -- tests ---------------------------------------------------------------------------------------------


def exact_rows(net: nn.Module, x: Tensor, names: list[str] | None = None) -> Tensor:
    """J by differentiation, one output of one input at a time: (N·C, P)."""
    weights = [p for name, p in net.named_parameters() if names is None or name in names]
    rows = []
    for i in range(len(x)):
        for output in net(x[i : i + 1]).reshape(-1):
            slopes = torch.autograd.grad(output, weights, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(rows).double()


def check(jacobian: Jacobian, net: nn.Module, x: Tensor, names: list[str] | None = None) -> None:
    """K = J Jᵀ, and J θ̂."""
    J, rows = exact_rows(net, x, names), jacobian.rows(x)
    theta = torch.cat([p.detach().flatten() for name, p in net.named_parameters() if names is None or name in names])
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jacobian.along(rows).flatten(), J @ theta.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_kernel_matches_differentiation(name: str) -> None:
    net, x = NETS[name]().eval(), noise(6, 4)
    check(Jacobian(net, "all", x[:2]), net, x)


@pytest.mark.parametrize("layers", ["all", 1, 2, 3])
def test_kernel_of_last_layers_matches_differentiation(layers: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)).eval()
    x, other = noise(5, 3), noise(4, 3, seed=1)
    names = {"all": None, 1: ["4.weight", "4.bias"], 2: ["2.weight", "4.weight", "4.bias"], 3: None}[layers]
    jacobian = Jacobian(net, layers, x[:2])
    check(jacobian, net, x, names)
    expected = exact_rows(net, x, names) @ exact_rows(net, other, names).T
    torch.testing.assert_close(jacobian.kernel(jacobian.rows(x), jacobian.rows(other)), expected, rtol=1e-5, atol=1e-5)


def test_layers_of_every_type(odd: nn.Module) -> None:
    x = noise(4, 6)
    check(Jacobian(odd, "all", x[:2]), odd, x)
    names = [n for n, _ in odd.named_parameters() if n.split(".")[0] in ("hidden", "head", "attention")]
    check(Jacobian(odd, 3, x[:2]), odd, x, names)  # attention with its uncalled projection, but not the net's own scale


def test_computed_weights_belong_to_the_layer_that_uses_them() -> None:
    x, net = noise(6, 4), normed(parametrizations.weight_norm, 2.0)
    jacobian = Jacobian(net, 2, x[:2])
    J = exact_rows(net[2:], net[:2](x).detach())  # type: ignore[index]
    rows = jacobian.rows(x)
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)


def test_explicit_rows_that_are_not_stored_are_computed_again(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(7, 6)
    jacobian = Jacobian(odd, "all", x[:2])
    rows = jacobian.rows(x)
    kernel, along = jacobian.kernel(rows, rows), jacobian.along(rows)
    assert len(rows.stored) == 1
    monkeypatch.setattr(_jacobian, "_MAX_STORED_ELEMENTS", 700)  # one or two rows at a time
    rows = jacobian.rows(x, batch_rows=3)
    torch.testing.assert_close(jacobian.kernel(rows, rows), kernel, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacobian.along(rows), along, rtol=1e-6, atol=1e-8)


def test_stored_rows_are_differentiated_once(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training rows of a predictor, at the first prediction only."""
    seen = []
    row = Jacobian._explicit_row

    def counted(jacobian: Jacobian, x: Any, outputs: int) -> Tensor:
        seen.append(x)
        return row(jacobian, x, outputs)

    monkeypatch.setattr(Jacobian, "_explicit_row", counted)
    predictor = InfluenceBootstrap(layers="all").from_trained(odd, TensorDataset(noise(12, 6), torch.arange(12) % 2))
    assert len(seen) == 12
    for expected in (12 + 12 + 3, 12 + 12 + 3 + 3):
        predictor.summarize(noise(3, 6))
        assert len(seen) == expected


def test_many_backward_passes_give_a_warning(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(noise(12, 6), torch.arange(12) % 2)
    monkeypatch.setattr(_jacobian, "_MANY_PASSES", 20)
    with pytest.warns(UserWarning, match="about 24 backward passes for 12 rows of 2 outputs"):
        InfluenceBootstrap(layers="all").from_trained(odd, data)
    monkeypatch.setattr(_jacobian, "_MAX_STORED_ELEMENTS", 700)
    with pytest.warns(UserWarning, match=r"about \d{3} backward passes"):
        InfluenceBootstrap(layers="all").from_trained(odd, data)


class SqueezedBefore(nn.Module):
    """Squeezes before a layer that needs the axis of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.tanh(self.first(x[:, None])).mean(2, keepdim=True)
        return self.head(self.norm(pooled.squeeze())).log_softmax(dim=1)


def test_explicit_rows_pass_in_pairs_where_the_net_squeezes() -> None:
    x, net = noise(20, 4), SqueezedBefore()
    predictor = InfluenceBootstrap(layers="all").from_trained(net, TensorDataset(x, torch.arange(20) % 2))
    torch.testing.assert_close(predictor.predict(x[:1], 3).samples, predictor.predict(x, 3).samples[:, :1])
    jacobian = Jacobian(net, "all", x[:2])

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net.eval(), weights, (x,))

    parts = torch.func.jacrev(outputs)(dict(net.named_parameters())).values()
    J = torch.cat([part.flatten(2) for part in parts], 2).flatten(0, 1)
    kernel = jacobian.kernel(jacobian.rows(x), jacobian.rows(x))
    torch.testing.assert_close(kernel, (J @ J.T).double(), rtol=1e-4, atol=1e-5)


class Gated(nn.Module):
    """A weight that is used a second time, for some rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        again = nn.functional.linear(x, self.first.weight) * (x[:, :1] > 0)
        return self.head(torch.tanh(self.first(x)) + again)


def test_layers_are_verified_on_rows_from_the_whole_data_set() -> None:
    """The gate is closed for the first rows."""
    torch.manual_seed(0)
    x = noise(40, 4)
    x = x[x[:, 0].argsort()]
    net, data = Gated(), TensorDataset(x, noise(40, 1, seed=1))
    predictor: Any = InfluenceBootstrap(nn.MSELoss(), layers="all", ridge=0.1).from_trained(net, data)
    jacobian = Jacobian(net, "all", x)
    assert "first.weight" in jacobian._explicit
    assert predictor.tangent.jacobian()[0]._explicit == jacobian._explicit
