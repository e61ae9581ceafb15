"""The plain nets: their published sizes, their shapes, and that a description rebuilds them."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuboots.nets import (
    MLP,
    ResNet,
    SmallCNN,
    build,
    describe,
    resnet8,
    resnet18,
    resnet20,
    resnet34,
    resnet110,
    thin_resnet,
)

# One member of every kind, small, with the shape of an input.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: MLP(12, 3), (3, 4)),
    "MLP, linear": (lambda: MLP(12, 3, widths=()), (12,)),
    "MLP, batch norm": (lambda: MLP(12, 3, widths=(8, 6), batch_norm=True), (12,)),
    "SmallCNN": (lambda: SmallCNN(1, 3), (1, 8, 8)),
    "resnet8": (lambda: resnet8(3), (3, 8, 8)),
    "ResNet, projection": (
        lambda: ResNet(3, 1, blocks=(1, 2), widths=(8, 4), shortcut="projection"),
        (1, 7, 7),
    ),
}
every_net = pytest.mark.parametrize(("make", "shape"), NETS.values(), ids=NETS.keys())


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_thin_resnets_have_the_size_of_he_et_al_table_6(depth: int, millions: float) -> None:
    printed = 1 if depth == 110 else 2
    assert round(count(thin_resnet(depth, 10)) / 1e6, printed) == millions


@pytest.mark.parametrize(("make", "size"), [(resnet18, 11_173_962), (resnet34, 21_282_122)])
def test_wide_resnets_have_their_known_size(make: Callable[[int], ResNet], size: int) -> None:
    net = make(10)
    assert count(net) == size
    assert net.head.in_features == 512


def test_thin_resnets_have_64_features() -> None:
    assert {make(10).head.in_features for make in (resnet8, resnet20, resnet110)} == {64}


def test_mlp_is_three_by_500_unless_told_otherwise() -> None:
    assert count(MLP(7, 2)) == (7 + 1) * 500 + 2 * (500 + 1) * 500 + (500 + 1) * 2


@pytest.mark.parametrize("layers", [20, 110])
def test_depth_counts_the_layers_with_weights(layers: int) -> None:
    modules = thin_resnet(layers, 10).modules()
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in modules) == layers


@every_net
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_output_is_one_row_per_input(make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int) -> None:
    assert make().eval()(torch.randn(batch, *shape)).shape == (batch, 3)


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("make", [lambda: SmallCNN(3, 4), lambda: resnet8(4), lambda: resnet18(4)])
def test_image_nets_take_any_image_size(make: Callable[[], nn.Module], size: int) -> None:
    assert make().eval()(torch.randn(2, 3, size, size)).shape == (2, 4)


@every_net
def test_head_is_the_last_layer_and_is_linear(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = make().eval()
    x = torch.randn(2, *shape)
    whole = net(x)
    head = net.head
    assert isinstance(head, nn.Linear)
    assert list(net.modules())[-1] is head
    net.head = nn.Identity()
    assert torch.equal(head(net(x)), whole)


@every_net
def test_gradient_reaches_every_parameter(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """More than rounding: the largest entry is above 1e-9, in float64 with gradients of order 1."""
    torch.manual_seed(0)
    net = make().double()
    net(torch.randn(16, *shape).double()).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-9, name


@every_net
def test_the_seed_governs_the_weights(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(make().parameters())

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_resnet_starts_as_he_et_al_say() -> None:
    """w ~ N(0, 2/fan-in): over n draws the variance has a standard error of √(2/n) of itself."""
    torch.manual_seed(0)
    net = resnet18(10)
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in layers:
        fan_in = layer.weight[0].numel()
        ratio = layer.weight.square().mean().item() * fan_in / 2
        # Four standard errors: a chance of 6e-5 for each of 21 layers.
        assert abs(ratio - 1) < 4 * (2 / layer.weight.numel()) ** 0.5
    assert not net.head.bias.any()


def test_pad_shortcut_subsamples_and_appends_zeros() -> None:
    net = ResNet(2, 1, blocks=(1, 1), widths=(2, 3), shortcut="pad")
    x = torch.randn(1, 2, 5, 5)
    out = net.features[-1].shortcut(x)  # type: ignore[operator]
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert not out[:, 2:].any()
    assert out.shape == (1, 3, 3, 3)


# -- descriptions --------------------------------------------------------------------------------


@every_net
def test_description_survives_json_and_rebuilds_the_net(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = make().eval()
    description = describe(net)
    assert description is not None
    twin = build(json.loads(json.dumps(description))).eval()
    assert describe(twin) == description
    assert repr(twin) == repr(net)
    twin.load_state_dict(net.state_dict())
    x = torch.randn(2, *shape)
    assert torch.equal(twin(x), net(x))


@every_net
def test_every_argument_is_recorded(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = make()
    assert list(vars(net)["options"]) == list(inspect.signature(type(net)).parameters)


@every_net
def test_describing_draws_no_random_number(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = make()
    before = torch.get_rng_state()
    describe(net)
    assert torch.equal(torch.get_rng_state(), before)


def test_description_is_a_copy() -> None:
    net = MLP(4, 2, widths=(3,))
    description = describe(net)
    assert description is not None
    description["options"]["widths"].append(9)
    assert describe(net) == describe(MLP(4, 2, widths=(3,)))


def test_foreign_nets_have_no_description() -> None:
    class Mine(MLP):
        pass

    homonym = type("MLP", (nn.Module,), {})
    changed = MLP(4, 2)
    changed.features[1] = nn.Tanh()
    cut = resnet8(10)
    cut.head = nn.Identity()  # type: ignore[assignment]
    for net in (nn.Linear(4, 2), Mine(4, 2), homonym(), changed, cut, nn.Sequential(MLP(4, 2))):
        assert describe(net) is None


MLP_2 = {"in_features": 4, "out_features": 2}


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        (
            {"net": "os.system", "options": {}},
            "the description names the net 'os.system'; expected one of MLP, SmallCNN, ResNet: "
            "build any other net yourself and load its state dict",
        ),
        (
            {"net": ["MLP"], "options": {}},
            "the description names the net ['MLP']; expected one of MLP, SmallCNN, ResNet: "
            "build any other net yourself and load its state dict",
        ),
        (
            {"name": "MLP"},
            "the description is {'name': 'MLP'}; expected a dict with 'net' and 'options': "
            "pass what describe(net) returned",
        ),
        (
            {"net": "MLP", "options": {**MLP_2, "dropout": 0.5}},
            "the options of MLP do not fit (got an unexpected keyword argument 'dropout'); "
            "expected in_features, out_features, widths, activation, batch_norm: "
            "correct the description",
        ),
        (
            {"net": "SmallCNN", "options": {"in_channels": 1}},
            "the options of SmallCNN do not fit (missing a required argument: 'out_features'); "
            "expected in_channels, out_features, widths: correct the description",
        ),
        (
            {"net": "MLP", "options": {**MLP_2, "widths": 500}},
            "widths is 500; expected a sequence of ints of at least 1: pass a tuple such as (64, 64)",
        ),
        (
            {"net": "MLP", "options": {**MLP_2, "batch_norm": "no"}},
            "batch_norm is 'no'; expected one of False, True: pass one of these",
        ),
        (
            {"net": "MLP", "options": {**MLP_2, "batch_norm": 1}},
            "batch_norm is 1; expected one of False, True: pass one of these",
        ),
        (
            {"net": "MLP", "options": {**MLP_2, "activation": ["relu"]}},
            "activation is ['relu']; expected one of 'relu', 'tanh', 'silu', 'gelu': pass one of these",
        ),
    ],
)
def test_build_says_what_is_wrong(description: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        build(description)
    assert str(caught.value) == sentence


# -- bad arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (
            lambda: resnet20(0),
            "num_classes is 0; expected an int of at least 1: pass such a number",
        ),
        (
            lambda: MLP(4, 2.0),  # type: ignore[arg-type]
            "out_features is 2.0; expected an int of at least 1: pass such a number",
        ),
        (
            lambda: SmallCNN(True, 2),
            "in_channels is True; expected an int of at least 1: pass such a number",
        ),
        (
            lambda: MLP(4, 2, widths=(5, 0)),
            "widths is (5, 0); expected a sequence of ints of at least 1: pass a tuple such as (64, 64)",
        ),
        (
            lambda: MLP(4, 2, activation="swish"),
            "activation is 'swish'; expected one of 'relu', 'tanh', 'silu', 'gelu': pass one of these",
        ),
        (
            lambda: SmallCNN(1, 2, widths=()),
            "widths is empty; expected at least one convolution: pass a tuple such as (32, 64)",
        ),
        (
            lambda: ResNet(2, blocks=(1, 1), widths=(8,)),
            "blocks has 2 stages and widths 1; expected as many of both, at least 1: "
            "pass one number of blocks and one width per stage",
        ),
        (
            lambda: ResNet(2, blocks=(), widths=()),
            "blocks has 0 stages and widths 0; expected as many of both, at least 1: "
            "pass one number of blocks and one width per stage",
        ),
        (
            lambda: ResNet(2, blocks=(1, 1), widths=(16, 8)),
            "widths is (16, 8) with shortcut 'pad'; expected widths that never shrink: "
            "sort them, or pass shortcut='projection'",
        ),
        (
            lambda: ResNet(2, blocks=(1,), widths=(8,), shortcut="A"),
            "shortcut is 'A'; expected one of 'pad', 'projection': pass one of these",
        ),
        (
            lambda: thin_resnet(18, 10),
            "depth is 18; expected 6m + 2 for a whole m of at least 1: pass a depth such as 8, 20, 32, 44, 56 or 110",
        ),
        (
            lambda: thin_resnet(2, 10),
            "depth is 2; expected 6m + 2 for a whole m of at least 1: pass a depth such as 8, 20, 32, 44, 56 or 110",
        ),
        (
            lambda: MLP(4, 2)(torch.zeros(3, 5)),
            "the net got an input of shape (3, 5); expected (N, *) with 4 values per row: "
            "reshape the input, or build the net with its in_features",
        ),
        (
            lambda: MLP(4, 2)(torch.zeros(4)),
            "the net got an input of shape (4,); expected (N, *) with 4 values per row: "
            "reshape the input, or build the net with its in_features",
        ),
        (
            lambda: SmallCNN(1, 2)(torch.zeros(5, 8, 8)),
            "the net got an input of shape (5, 8, 8); expected (N, 1, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
        (
            lambda: resnet8(2)(torch.zeros(5, 1, 8, 8)),
            "the net got an input of shape (5, 1, 8, 8); expected (N, 3, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        act()
    assert str(caught.value) == sentence
