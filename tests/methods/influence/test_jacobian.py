"""Tests of the Jacobian and the tangent kernel against differentiation row by row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _influence import make_mlp
from _nets import Composed, noise
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from neuboots import InfluenceBootstrap
from neuboots.methods.influence import _jacobian
from neuboots.methods.influence._jacobian import Jacobian

# -- nets ----------------------------------------------------------------------------------------------


def layers_of_every_kind(net: Any, x: Tensor) -> Tensor:
    h = net.norm(net.conv(x[:, None])).tanh()
    h = net.twice(net.twice(h).tanh()).transpose(1, 2)
    h = net.attention(h, h, h, need_weights=False)[0] * net.scale
    return net.head(net.hidden(h.flatten(1)).tanh())


@pytest.fixture
def odd() -> nn.Module:
    torch.manual_seed(3)
    net = Composed(
        layers_of_every_kind,
        conv=nn.Conv1d(1, 4, 3, padding=1),
        norm=nn.BatchNorm1d(4),
        twice=nn.Linear(6, 6),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        scale=nn.Parameter(torch.ones(4)),
        hidden=nn.Linear(24, 5, bias=False),
        head=nn.Linear(5, 2),
    )
    net(noise(20, 6))  # sets its running statistics
    return net.eval()


def in_place_sums(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    k = net.second(h)
    k += h
    k.mul_(2.0)
    return net.head(torch.tanh(k))


def tied_autoencoder(net: Any, x: Tensor) -> Tensor:
    """Uses a weight a second time, without calling its layer."""
    return net.head(nn.functional.linear(torch.tanh(net.first(x)), net.first.weight.T))


def bias_twice(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.first(x) + net.first.bias))


def two_tokens(net: Any, x: Tensor) -> Tensor:
    """A Linear that sees two tokens, however many inputs there are."""
    return net.head(x @ net.first(net.tokens).T)


def no_grad_inside(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x).relu()
    return net.head(h)


def two_layers(function: Callable[[Any, Tensor], Tensor], width: int = 8) -> nn.Module:
    return Composed(function, first=nn.Linear(4, 8), second=nn.Linear(8, 8), head=nn.Linear(width, 1))


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
    "in-place sums": lambda: two_layers(in_place_sums),
    "tied weights": lambda: two_layers(tied_autoencoder, 4),
    "a bias used twice": lambda: two_layers(bias_twice),
    "two tokens": lambda: Composed(
        two_tokens, tokens=nn.Parameter(noise(2, 3)), first=nn.Linear(3, 4), head=nn.Linear(2, 1)
    ),
    "no_grad inside": lambda: two_layers(no_grad_inside),
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
    pull = Jacobian._pull_explicit

    def counted(jacobian: Jacobian, x: Tensor, *options: Any) -> list[Tensor]:
        seen.extend([x] if len(x) == 1 else [])
        return pull(jacobian, x, *options)

    monkeypatch.setattr(Jacobian, "_pull_explicit", counted)
    predictor = InfluenceBootstrap(layers="all").from_trained(odd, TensorDataset(noise(12, 6), torch.arange(12) % 2))
    assert len(seen) == 12
    for expected in (12 + 12 + 3, 12 + 12 + 3 + 3):
        predictor.summarize(noise(3, 6))
        assert len(seen) == expected


def test_many_backward_passes_give_a_warning(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(noise(12, 6), torch.arange(12) % 2)
    monkeypatch.setattr(_jacobian, "_MANY_PASSES", 20)
    with pytest.warns(UserWarning, match="about 24 backward passes"):
        InfluenceBootstrap(layers="all").from_trained(odd, data)
    monkeypatch.setattr(_jacobian, "_MAX_STORED_ELEMENTS", 700)
    with pytest.warns(UserWarning, match=r"about \d{3} backward passes"):
        InfluenceBootstrap(layers="all").from_trained(odd, data)


def squeezed_before(net: Any, x: Tensor) -> Tensor:
    """Squeezes before a layer that needs the axis of rows."""
    pooled = torch.tanh(net.first(x[:, None])).mean(2, keepdim=True)
    return net.head(net.norm(pooled.squeeze())).log_softmax(dim=1)


def test_explicit_rows_pass_in_pairs_where_the_net_squeezes() -> None:
    x = noise(20, 4)
    net = Composed(squeezed_before, first=nn.Conv1d(1, 3, 2), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 2))
    predictor = InfluenceBootstrap(layers="all").from_trained(net, TensorDataset(x, torch.arange(20) % 2))
    torch.testing.assert_close(predictor.predict(x[:1], 3).samples, predictor.predict(x, 3).samples[:, :1])
    jacobian = Jacobian(net, "all", x[:2])

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net.eval(), weights, (x,))

    parts = torch.func.jacrev(outputs)(dict(net.named_parameters())).values()
    J = torch.cat([part.flatten(2) for part in parts], 2).flatten(0, 1)
    kernel = jacobian.kernel(jacobian.rows(x), jacobian.rows(x))
    torch.testing.assert_close(kernel, (J @ J.T).double(), rtol=1e-4, atol=1e-5)


def gated(net: Any, x: Tensor) -> Tensor:
    """Uses a weight a second time, for some rows alone."""
    again = nn.functional.linear(x, net.first.weight) * (x[:, :1] > 0)
    return net.head(torch.tanh(net.first(x)) + again)


def test_layers_are_verified_on_rows_from_the_whole_data_set() -> None:
    """The gate is closed for the first rows."""
    torch.manual_seed(0)
    x = noise(40, 4)
    x = x[x[:, 0].argsort()]
    net = Composed(gated, first=nn.Linear(4, 4), head=nn.Linear(4, 1))
    data = TensorDataset(x, noise(40, 1, seed=1))
    predictor: Any = InfluenceBootstrap(nn.MSELoss(), layers="all", ridge=0.1).from_trained(net, data)
    jacobian = Jacobian(net, "all", x)
    assert "first.weight" in jacobian._explicit
    assert predictor.tangent.jacobian()[0]._explicit == jacobian._explicit
