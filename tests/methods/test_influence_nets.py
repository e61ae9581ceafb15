"""The influence bootstrap of nets that others write: in-place layers, computed weights, parts that are frozen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import Dataset, TensorDataset

from neuboots import CrossEntropy, InfluenceBootstrap, SquaredError, TrainingConfig
from neuboots.methods.influence.jacobian import Jacobian
from neuboots.training import EpochReport
from neuboots.weights import Exponential


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hidden(make: Callable[[], nn.Module], outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), make(), nn.Linear(8, 8), make(), nn.Linear(8, outputs))


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


class Writes(nn.Module):
    """A net that writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(1.0)
        out: Tensor = self.head(x)
        return out


class Tokens(nn.Module):
    """A Linear that sees two tokens, however many inputs there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.project, self.head = nn.Parameter(drawn(2, 3)), nn.Linear(3, 4), nn.Linear(2, 1)

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
    net = hidden(nn.ReLU)
    prune.random_unstructured(net[2], "weight", amount=0.5)
    return net


def normed(norm: Any, factor: float = 1.0) -> nn.Module:
    net = hidden(nn.Tanh)
    norm(net[2])
    with torch.no_grad():
        next(net[2].parametrizations.weight.parameters()).mul_(factor)  # type: ignore[union-attr,operator]
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "in-place ReLU": lambda: hidden(lambda: nn.ReLU(inplace=True)),
    "in-place ELU": lambda: hidden(lambda: nn.ELU(inplace=True)),
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


def exact_rows(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """J by differentiation, input by input, and J θ̂."""
    weights = list(net.parameters())
    rows = []
    for i in range(len(x)):
        for output in net(x[i : i + 1]).reshape(-1):
            slopes = torch.autograd.grad(output, weights, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([slope.flatten() for slope in slopes]))
    J = torch.stack(rows).double()
    return J, J @ torch.cat([weight.detach().flatten() for weight in weights]).double()


@pytest.mark.parametrize("name", NETS)
def test_slopes_are_those_of_differentiation(name: str) -> None:
    net, x = NETS[name]().eval(), drawn(6, 4)
    jacobian = Jacobian(net, "all", x[:2])
    rows = jacobian.rows(x)
    J, along = exact_rows(net, x)
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jacobian.along(rows).flatten(), along, rtol=1e-4, atol=1e-5)


def test_computed_weights_belong_to_the_layer_that_uses_them() -> None:
    x, net = drawn(6, 4), normed(parametrizations.weight_norm, 2.0)
    jacobian = Jacobian(net, 2, x[:2])
    rows = jacobian.rows(x)
    J, _ = exact_rows(net[2:], net[:2](x).detach())  # type: ignore[index]
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)


def test_an_activation_in_place_changes_no_band() -> None:
    net, x = hidden(nn.ReLU, 1), drawn(60, 4)
    data = TensorDataset(x, x[:, :1].sin() + 0.1 * drawn(60, 1, seed=1))
    method = InfluenceBootstrap(SquaredError(), layers="all")
    expected = method.from_trained(net, data).summarize(x, 2).std
    net[1], net[3] = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    torch.testing.assert_close(method.from_trained(net, data).summarize(x, 2).std, expected)


@pytest.mark.parametrize("part", [False, True])
def test_compiled_nets(part: bool) -> None:
    net, x = hidden(nn.Tanh, 1), drawn(30, 4)
    data = TensorDataset(x, x[:, :1].sin())
    method = InfluenceBootstrap(SquaredError(), layers="all")
    expected = method.from_trained(net, data).summarize(x, 2).std
    compiled = (
        nn.Sequential(torch.compile(net[:4], backend="eager"), net[4]) if part else torch.compile(net, backend="eager")
    )
    torch.testing.assert_close(method.from_trained(compiled, data).summarize(x, 2).std, expected)  # type: ignore[arg-type]


def test_inputs_that_the_net_writes_into_stay_as_they_are() -> None:
    x = drawn(30, 4)
    predictor = InfluenceBootstrap(SquaredError(), layers="all").from_trained(
        Writes(), TensorDataset(x.clone(), x[:, :1])
    )
    first = predictor.predict(x.clone(), 5).samples
    assert torch.equal(predictor.predict(x.clone(), 5).samples, first)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x).squeeze()
        return out


def test_no_row_is_left_by_itself() -> None:
    """257 rows, of which 256 pass at once: a net that squeezes would lose the axis of the last one."""
    x = drawn(257, 4)
    predictor = InfluenceBootstrap(SquaredError(), layers="all").from_trained(Squeezed(), TensorDataset(x, x[:, 0]))
    assert predictor.predict(x, 3).samples.shape == (3, 257, 1)


class Stateful(nn.Linear):
    """With a state beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_state_that_is_no_tensor() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Stateful(4, 1)), drawn(20, 4)
    predictor = InfluenceBootstrap(SquaredError(), layers="all").from_trained(net, TensorDataset(x, x[:, :1]))
    assert bool((predictor.predict(x, 3).std > 0).all())


# -- several outputs -----------------------------------------------------------------------------------


class Shared(nn.Module):
    """z₁ = a·x, z₂ = a·x + b·x: two outputs with weights in common."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(a.T)
            self.b.weight.copy_(b.T)

    def forward(self, x: Tensor) -> Tensor:
        u = self.a(x)
        return torch.cat([u, u + self.b(x)], 1)


def test_each_output_has_a_noise_of_its_own() -> None:
    """Noise of 0.01 and 1: the band of the one is not widened by the other's."""
    x, size = drawn(400, 3).double(), torch.tensor([0.01, 1.0]).double()
    y = x @ drawn(3, 2, seed=1).double() + size * drawn(400, 2, seed=2).double()
    fit = torch.linalg.lstsq(x, y).solution
    net = Shared(fit[:, :1], fit[:, 1:] - fit[:, :1]).double()
    leverage = ((x @ torch.linalg.inv(x.T @ x)) * x).sum(1, keepdim=True)
    exact = (leverage * (y - x @ fit).square().sum(0) / 397).sqrt().mean(0)
    method = InfluenceBootstrap(SquaredError(), layers="all", ridge=0.0)
    found = method.from_trained(net, TensorDataset(x, y)).summarize(x, 2).std.mean(0)
    torch.testing.assert_close(found, exact, rtol=0.15, atol=0.0)  # σ² from 400 rows, half of it row by row


def test_an_output_on_a_small_scale_keeps_its_noise() -> None:
    """Two nets in one, the first a thousand times as large: the second has the band that it has by itself."""
    x, small = drawn(80, 4).double(), hidden(nn.Tanh, 1).double()
    large = hidden(nn.Tanh, 1).double()
    y = torch.cat([1000 * large(x), small(x)], 1).detach() + torch.tensor([300.0, 0.3]) * drawn(80, 2, seed=1).double()
    method = InfluenceBootstrap(SquaredError(), layers="all", ridge=0.05)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = large, small

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([1000 * self.large(x), self.small(x)], 1)

    both = method.from_trained(Both(), TensorDataset(x, y)).summarize(x, 2).std[:, 1:]
    alone = method.from_trained(small, TensorDataset(x, y[:, 1:])).summarize(x, 2).std
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=0.0)


# -- rows that are ignored -----------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.05, None])
@pytest.mark.parametrize("layers", [1, 2, "all"])
def test_rows_that_are_ignored_count_for_nothing(layers: Any, ridge: float | None) -> None:
    """Marked as ignored, or left out: the ridge is the same, and with independent weights so is the band."""
    x, y = drawn(60, 3), torch.arange(60) % 3
    kept = torch.arange(60) % 2 == 0
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    method = InfluenceBootstrap(CrossEntropy(), layers=layers, ridge=ridge, weight_distribution=Exponential())
    marked = method.from_trained(net, TensorDataset(x, torch.where(kept, y, -100)))
    left_out = method.from_trained(net, TensorDataset(x[kept], y[kept]))
    assert marked.ridge == pytest.approx(left_out.ridge, rel=1e-4)
    torch.testing.assert_close(marked.summarize(x, 2).std, left_out.summarize(x, 2).std, rtol=1e-3, atol=1e-5)


# -- what cannot be done is said before the training ---------------------------------------------------


class Sizes(Dataset[tuple[Tensor, Tensor]]):
    """Rows of several sizes, which train one by one."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.ones(2 + i % 2, 4), torch.ones(1)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean(1))
        return out


PIXELS = TensorDataset(drawn(8, 1, 4, 4), torch.zeros(8, 4, 4, dtype=torch.long))
POINTS = TensorDataset(drawn(8, 4), drawn(8, 1))


@pytest.mark.parametrize(
    ("options", "model", "data", "said"),
    [
        ({"layers": "all"}, lambda: nn.Conv2d(1, 2, 1), PIXELS, "bootstrap the head"),
        ({"layers": "all", "num_calibration_fits": 1}, lambda: nn.Conv2d(1, 2, 1), PIXELS, "bootstrap the head"),
        ({"loss": SquaredError()}, lambda: nn.Sequential(nn.Linear(4, 1), nn.Softplus()), POINTS, "upsampl"),
        ({"loss": SquaredError(), "head": "nowhere"}, lambda: hidden(nn.ReLU, 1), POINTS, "nowhere"),
        ({"layers": "all", "max_kernel_rows": 5}, lambda: nn.Linear(4, 3), POINTS, "room for two rows"),
        ({"refit": True}, lambda: nn.Linear(4, 1000), POINTS, "numbers to refit"),
        ({"loss": SquaredError()}, lambda: nn.Linear(4, 1), TensorDataset(*POINTS[:1]), "single row"),
    ],
)
def test_a_refusal_comes_before_the_training(
    options: dict[str, Any], model: Callable[[], nn.Module], data: Dataset[Any], said: str
) -> None:
    seen: list[EpochReport] = []
    config = TrainingConfig(epochs=2, batch_size=4, progress=False, on_epoch=seen.append)
    with pytest.raises(ValueError, match=said):
        InfluenceBootstrap(**options).fit(model, data, config)
    assert not seen


def test_inputs_of_several_sizes_are_refused_in_a_sentence() -> None:
    config = TrainingConfig(epochs=1, batch_size=1, progress=False)
    InfluenceBootstrap(SquaredError()).from_trained(Pooled(), Sizes(), config)
    with pytest.raises(ValueError, match="got inputs of several sizes; expected one size"):
        InfluenceBootstrap(SquaredError(), layers="all").from_trained(Pooled(), Sizes(), config)


@pytest.mark.parametrize("loss", [nn.L1Loss(reduction="none"), nn.NLLLoss(reduction="none")])
def test_a_loss_without_curvature_is_refused_at_once(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match="which has no curvature in the outputs"):
        InfluenceBootstrap(loss)


def test_logarithms_of_probabilities_are_as_good_as_logits() -> None:
    """Log-softmax changes neither the loss nor its curvature: the probabilities of replicates move alike."""
    torch.manual_seed(0)
    logits = hidden(nn.Tanh, outputs=3)
    x, y = drawn(30, 4), torch.arange(30) % 3
    nets = (logits, nn.Sequential(logits, nn.LogSoftmax(1)))
    method = InfluenceBootstrap(CrossEntropy(), layers="all", ridge=1e-2)
    one, two = (method.from_trained(net, TensorDataset(x, y)).predict(x, 5).samples for net in nets)
    p = logits(x).softmax(1)
    moved = (one - logits(x)) - ((one - logits(x)) * p).sum(-1, keepdim=True)  # along the slope of log-softmax
    torch.testing.assert_close(two - logits(x).log_softmax(1), moved, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("layers", [1, "all"])
def test_a_loss_that_torch_does_not_differentiate_twice_is_refused_in_a_sentence(layers: Any) -> None:
    """Hinge losses of torch have no second derivative, or a formula for none."""
    method = InfluenceBootstrap(nn.MultiMarginLoss(reduction="none"), layers=layers)
    with pytest.raises(ValueError, match="expected a loss with a Hessian"):
        method.from_trained(hidden(nn.ReLU), TensorDataset(drawn(20, 4), torch.arange(20) % 2))


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(8)])
def test_a_net_and_data_of_an_inference_mode(norm: Callable[[], nn.Module]) -> None:
    """Their tensors cannot stand in a graph; copies of them can."""
    x, y = drawn(20, 4), drawn(20, 1, seed=1)

    def deviations() -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), norm(), nn.ReLU(), nn.Linear(8, 1))
        data = TensorDataset(x.clone(), y.clone())
        predictor = InfluenceBootstrap(SquaredError(), layers="all").from_trained(net, data)
        return predictor.predict(x[:5].clone(), 8).samples

    expected = deviations()
    with torch.inference_mode():
        torch.testing.assert_close(deviations(), expected)


def test_whole_numbers_are_numbers() -> None:
    """The ridge goes by the loss: counts and ratings are no classes, whatever their type."""
    x, y = drawn(40, 4), torch.arange(40)[:, None] % 5
    net = hidden(nn.Tanh, outputs=1)
    for loss in (SquaredError(), nn.PoissonNLLLoss(reduction="none")):
        whole, real = (InfluenceBootstrap(loss).from_trained(net, TensorDataset(x, t)) for t in (y, y.float()))
        assert whole.ridge == real.ridge
        torch.testing.assert_close(whole.predict(x, 5).samples, real.predict(x, 5).samples)


def test_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="got num_blocks=1, all rows under one weight, which has no spread"):
        InfluenceBootstrap(num_blocks=1)


class Placed(nn.Module):
    """An input that is the same for all rows, before the one that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, place: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) + place))


@pytest.mark.parametrize("layers", [1, "all"])
def test_an_input_of_one_row_may_serve_all_rows(layers: Any) -> None:
    torch.manual_seed(0)
    x, place = drawn(20, 4), drawn(1, 8, seed=1)
    data = [((place[0], row), k % 2) for k, row in enumerate(x)]
    predictor = InfluenceBootstrap(layers=layers).from_trained(Placed(), data)  # type: ignore[arg-type]
    once = predictor.predict((place, x[:5]), 3).samples
    torch.testing.assert_close(once, predictor.predict((place.expand(5, -1), x[:5]), 3).samples)
    torch.testing.assert_close(predictor.predict((place, x[:1]), 3).samples, once[:, :1])


class SqueezedBefore(nn.Module):
    """Squeezes before a layer that needs the axis of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.tanh(self.first(x[:, None])).mean(2, keepdim=True)
        return self.head(self.norm(pooled.squeeze())).log_softmax(dim=1)


def test_layers_that_are_differentiated_row_by_row_see_two_rows_if_they_must() -> None:
    x = drawn(20, 4)
    net = SqueezedBefore()
    predictor = InfluenceBootstrap(layers="all").from_trained(net, TensorDataset(x, torch.arange(20) % 2))
    whole = predictor.predict(x, 3).samples
    torch.testing.assert_close(predictor.predict(x[:1], 3).samples, whole[:, :1])
    jacobian = Jacobian(net, "all", x[:2])
    kernel = jacobian.kernel(jacobian.rows(x), jacobian.rows(x))
    parameters = dict(net.named_parameters())

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net.eval(), weights, (x,))

    J = torch.cat([part.flatten(2) for part in torch.func.jacrev(outputs)(parameters).values()], 2).flatten(0, 1)
    torch.testing.assert_close(kernel, (J @ J.T).double(), rtol=1e-4, atol=1e-5)


class Token(nn.Module):
    """A parameter of its own, at the input."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x) + self.token))))


def test_weights_of_the_whole_are_not_its_last_layer() -> None:
    net, x = Token(), drawn(6, 4)
    without = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), net.second, nn.Tanh(), net.head)
    without[0].weight, without[0].bias = net.first.weight, nn.Parameter(net.first.bias + net.token)
    kernels = [(j := Jacobian(each, 2, x)).kernel(j.rows(x), j.rows(x)) for each in (net, without)]
    torch.testing.assert_close(kernels[0], kernels[1])


class Gated(nn.Module):
    """A weight that is used a second time, for some rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        again = nn.functional.linear(x, self.first.weight) * (x[:, :1] > 0)
        return self.head(torch.tanh(self.first(x)) + again)


def test_a_layer_is_tried_on_rows_from_all_over_the_data() -> None:
    """The gate is closed for the first rows."""
    torch.manual_seed(0)
    x = drawn(40, 4)
    x = x[x[:, 0].argsort()]
    net = Gated()
    predictor = InfluenceBootstrap(SquaredError(), layers="all", ridge=0.1, residuals="raw").from_trained(
        net, TensorDataset(x, drawn(40, 1, seed=1))
    )
    jacobian = Jacobian(net, "all", x)
    assert "first.weight" in jacobian._explicit
    assert predictor.tangent.slopes("all", None)[0]._explicit == jacobian._explicit  # type: ignore[attr-defined]


class LastToken(nn.Module):
    """Scores every token, and gives the last one's, as classifiers around language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.Embedding(10, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.words(x))[:, -1]


def test_a_net_that_selects_after_its_head_is_told_what_can_be_done() -> None:
    x = torch.arange(40).view(20, 2) % 10
    data = TensorDataset(x, torch.arange(20) % 2)
    with pytest.raises(
        ValueError, match="pools, selects or crops .* or move more than the head .layers=2, layers='all'"
    ):
        InfluenceBootstrap().from_trained(LastToken(), data)
    assert InfluenceBootstrap(layers="all").from_trained(LastToken(), data).predict(x[:1], 3).samples.shape == (3, 1, 2)


# -- memory --------------------------------------------------------------------------------------------


def test_deviations_that_are_not_held_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many inputs the deviations N × C × S are not kept; samples and moments are the same."""
    from neuboots.methods.influence import tangent

    x, net = drawn(40, 4), hidden(nn.Tanh)
    predictor = InfluenceBootstrap(SquaredError(), layers="all").from_trained(net, TensorDataset(x, x[:, :2]))
    whole = predictor.predict(x, 7)
    monkeypatch.setattr(tangent, "_HELD", 10)
    monkeypatch.setattr(tangent, "_TILE", 40 * 4 * 9)  # nine inputs at a time
    again = predictor.predict(x, 7)
    torch.testing.assert_close(again.samples, whole.samples)
    stream = predictor.stream(x, 7, seed=0)
    assert [len(chunk) for chunk in stream.chunks(3)] == [3, 3, 1]
    monkeypatch.setattr(tangent, "_HELD", 2 * 6 * 80)  # room for six replicates at a time
    assert [len(chunk) for chunk in predictor.stream(x, 13, seed=0).chunks(3)] == [3, 3, 3, 3, 1]
    torch.testing.assert_close(torch.cat([*stream.chunks(3)]), whole.samples)
    torch.testing.assert_close(again.std, whole.std)
