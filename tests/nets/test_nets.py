"""All nets in one table: published sizes, shapes, heads, descriptions, a training step, wrong options."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import ArgumentError, NeuBoots, TrainingConfig, load, nets
from neuboots.head import split_head
from neuboots.nets import (
    MLP,
    DeepLabV3,
    DenseNet,
    ResNet,
    SmallCNN,
    TextTransformer,
    UResNet,
    deeplab_resnet50,
    deeplab_resnet101,
    densenet22,
    densenet40,
    densenet100,
    densenet_bc,
    resnet8,
    resnet18,
    resnet20,
    resnet34,
    resnet110,
    small_deeplab,
    thin_resnet,
)
from neuboots.serialization import ArtifactError, build_net, describe_net

MAPS = (DeepLabV3, UResNet)  # nets with an output for each pixel or voxel


class Case(NamedTuple):
    """A net of 3 classes, the shape of one input (ids of tokens where `tokens`), and the width D of its features."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    width: int
    tokens: bool = False

    def x(self, rows: int) -> Tensor:
        return torch.randint(1, 20, (rows, *self.shape)) if self.tokens else torch.randn(rows, *self.shape)

    def out(self, rows: int) -> tuple[int, ...]:
        """Maps keep the size of the image."""
        return (rows, 3, *self.shape[1:]) if isinstance(self.make(), MAPS) else (rows, 3)


# One member of every kind, small.
NETS = {
    "MLP": Case(lambda: MLP(12, 3), (3, 4), 500),
    "MLP, linear": Case(lambda: MLP(12, 3, widths=()), (12,), 12),
    "MLP, batch norm": Case(lambda: MLP(12, 3, widths=(8, 6), batch_norm=True), (12,), 6),
    "SmallCNN": Case(lambda: SmallCNN(1, 3), (1, 8, 8), 128),
    "resnet8": Case(lambda: resnet8(3), (3, 8, 8), 64),
    "ResNet, projection": Case(lambda: ResNet(3, 1, blocks=(1, 2), widths=(8, 4), shortcut="projection"), (1, 7, 7), 4),
    "densenet22": Case(lambda: densenet22(3), (3, 8, 8), 69),
    "DenseNet, plain": Case(
        lambda: DenseNet(3, 1, growth=4, blocks=(1, 2), bottleneck=False, compression=1), (1, 7, 9), 28
    ),
    "small_deeplab": Case(lambda: small_deeplab(3), (3, 17, 22), 48),
    "DeepLabV3, bottleneck": Case(
        lambda: DeepLabV3(
            3,
            1,
            blocks=(1, 1, 1, 2),
            widths=(8, 8, 16, 16),
            output_stride=8,
            multi_grid=(1, 2),
            aspp_width=8,
            rates=(2,),
        ),
        (1, 33, 18),
        8,
    ),
    "TextTransformer": Case(lambda: TextTransformer(20, 3, width=16, heads=2, dropout=0.0), (6,), 16, tokens=True),
    "TextTransformer, sinusoidal": Case(
        lambda: TextTransformer(20, 3, width=9, depth=1, heads=1, max_length=6, dropout=0, positions="sinusoidal"),
        (6,),
        9,
        tokens=True,
    ),
    "UResNet": Case(lambda: UResNet(1, 3, widths=(4, 8)), (1, 6, 5, 7), 4),
    "UResNet, images": Case(lambda: UResNet(2, 3, widths=(4, 8), units=1, dims=2), (2, 9, 6), 4),
}
every_net = pytest.mark.parametrize("case", NETS.values(), ids=NETS.keys())

# Every public way to a net: a maker, its exact size, D, the shape of inputs. Sizes that others print: He et al. 2016,
# table 6 (thin ResNets); Huang et al. 2017, table 2, and the imgclsmob collection (769,162 for DenseNet-BC-100-12);
# torchvision's num_params less its auxiliary head of 2,365,205 (DeepLab).
IMAGES = (2, 3, 33, 47)
SIZES: dict[str, tuple[Callable[[], nn.Module], int, int, tuple[int, ...]]] = {
    "MLP": (lambda: MLP(7, 2), (7 + 1) * 500 + 2 * (500 + 1) * 500 + (500 + 1) * 2, 500, (2, 7)),
    "SmallCNN": (lambda: SmallCNN(3, 10), 94_762, 128, IMAGES),
    "ResNet": (lambda: ResNet(10, blocks=(3, 3, 3), widths=(16, 32, 64)), 269_722, 64, IMAGES),
    "resnet8": (lambda: resnet8(10), 75_290, 64, IMAGES),
    "resnet20": (lambda: resnet20(10), 269_722, 64, IMAGES),
    "resnet110": (lambda: resnet110(10), 1_727_962, 64, IMAGES),
    "resnet18": (lambda: resnet18(10), 11_173_962, 512, IMAGES),
    "resnet34": (lambda: resnet34(10), 21_282_122, 512, IMAGES),
    "thin_resnet": (lambda: thin_resnet(56, 10), 853_018, 64, IMAGES),
    "DenseNet": (lambda: DenseNet(10, blocks=(6, 6, 6)), 176_122, 132, IMAGES),
    "densenet_bc": (lambda: densenet_bc(22, 10), 71_686, 69, IMAGES),
    "densenet22": (lambda: densenet22(10), 71_686, 69, IMAGES),
    "densenet40": (lambda: densenet40(10), 176_122, 132, IMAGES),
    "densenet100": (lambda: densenet100(10), 769_162, 342, IMAGES),
    "DeepLabV3": (lambda: DeepLabV3(21), 42_004_074 - 2_365_205, 256, IMAGES),
    "deeplab_resnet50": (lambda: deeplab_resnet50(21), 42_004_074 - 2_365_205, 256, IMAGES),
    "deeplab_resnet101": (lambda: deeplab_resnet101(21), 60_996_202 - 2_365_205, 256, IMAGES),
    "small_deeplab": (lambda: small_deeplab(11), 156_331, 48, IMAGES),
    "TextTransformer": (lambda: TextTransformer(1000, 2), 590_338, 128, (2, 7)),
    "UResNet": (lambda: UResNet(1, 3), 4_821_841, 32, (2, 1, 12, 9, 10)),
}
DEEP = {"resnet110", "thin_resnet", "densenet40", "densenet100", "DeepLabV3", "deeplab_resnet101"}
NOT_NETS = {"load_torchvision_weights"}


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in SIZES]
)
def test_size_head_and_output_shape(name: str) -> None:
    make, size, width, given = SIZES[name]
    with torch.device("meta"):  # no memory for 59 million numbers
        net = make()
        split = split_head(net)
        out = net(torch.ones(given, dtype=torch.int64 if isinstance(net, TextTransformer) else None))
    assert count(net) == size
    assert (split.name, split.width) == ("head", width)
    assert out.shape == (2, split.head.weight.shape[0], *(given[2:] if isinstance(net, MAPS) else ()))


def test_every_public_net_is_listed() -> None:
    assert set(SIZES) == set(nets.__all__) - NOT_NETS


@every_net
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_output_has_one_row_per_input(case: Case, batch: int) -> None:
    assert case.make().eval()(case.x(batch)).shape == case.out(batch)


@every_net
def test_head_is_the_last_linear_layer(case: Case) -> None:
    """Upsampling is linear too and comes after the head: features upsampled give the same, within rounding."""
    net = case.make().eval().double()
    x = case.x(2) if case.tokens else case.x(2).double()
    whole = net(x)
    head = net.head
    assert isinstance(head, (nn.Conv2d, nn.Conv3d) if isinstance(net, MAPS) else nn.Linear)
    assert list(net.modules())[-1] is head
    split = split_head(net)
    assert (split.name, split.width) == ("head", case.width)
    assert split_head(net, example=x).name == "head"
    net.head = nn.Identity()
    torch.testing.assert_close(head(net(x)), whole, rtol=0, atol=1e-12)


@every_net
def test_net_trains_predicts_and_saves(case: Case, tmp_path: Path) -> None:
    data = TensorDataset(case.x(6), torch.randint(0, 3, case.out(6)[:1] + case.out(6)[2:]))
    first = case.make()
    torch.manual_seed(0)
    predictor = NeuBoots().fit(case.make, data, TrainingConfig(epochs=1, batch_size=3, progress=False))
    x = case.x(2)
    summary = predictor.summarize(x, 7)
    assert summary.mean.shape == case.out(2)
    assert summary.mean.isfinite().all()
    assert (summary.std > 0).any()
    with torch.no_grad():
        plain = predictor.generator(x, torch.ones(case.width))
    assert torch.equal(plain, predictor.net(x))
    assert type(predictor.net) is type(first)
    predictor.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(x, 3).samples, predictor.predict(x, 3).samples)


@every_net
def test_gradient_reaches_every_parameter(case: Case) -> None:
    """More than rounding: the largest entry is above 1e-9, in float64 with gradients of order 1."""
    torch.manual_seed(0)
    net = case.make().double()
    x = case.x(16)
    net(x if case.tokens else x.double()).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-9, name


def test_resnet_initialization() -> None:
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
def test_describe_and_build_round_trip(case: Case) -> None:
    net = case.make().eval()
    description = describe_net(net)
    assert description is not None
    twin = build_net(json.loads(json.dumps(description))).eval()
    assert describe_net(twin) == description
    assert repr(twin) == repr(net)
    twin.load_state_dict(net.state_dict())
    x = case.x(2)
    assert torch.equal(twin(x), net(x))


def test_describe_net_of_other_nets_is_none() -> None:
    class Mine(MLP):
        pass

    homonym = type("MLP", (nn.Module,), {})
    changed = MLP(4, 2)
    changed.features[1] = nn.Tanh()
    cut = resnet8(10)
    cut.head = nn.Identity()  # type: ignore[assignment]
    for net in (nn.Linear(4, 2), Mine(4, 2), homonym(), changed, cut, nn.Sequential(MLP(4, 2))):
        assert describe_net(net) is None


@pytest.mark.parametrize(
    "description",
    [
        {"name": "MLP"},
        {"net": "os.system", "options": {}},
        {"net": ["MLP"], "options": {}},
        {"net": "MLP", "options": {"in_features": 4, "out_features": 2, "dropout": 0.5}},
        {"net": "SmallCNN", "options": {"in_channels": 1}},
        {"net": "MLP", "options": {"in_features": 4, "out_features": 2, "activation": ["relu"]}},
    ],
)
def test_build_net_rejects_wrong_descriptions(description: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError):
        build_net(description)


# -- wrong options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("activation", lambda: MLP(4, 2, activation="swish")),
        ("widths", lambda: SmallCNN(1, 2, widths=())),
        ("blocks", lambda: ResNet(2, blocks=(1, 1), widths=(8,))),
        ("blocks", lambda: ResNet(2, blocks=(), widths=())),
        ("widths", lambda: ResNet(2, blocks=(1, 1), widths=(16, 8))),
        ("shortcut", lambda: ResNet(2, blocks=(1,), widths=(8,), shortcut="A")),
        ("depth", lambda: thin_resnet(18, 10)),
        ("depth", lambda: thin_resnet(2, 10)),
        ("depth", lambda: densenet_bc(20, 10)),
        ("blocks", lambda: DenseNet(10, blocks=())),
        ("compression", lambda: DenseNet(10, compression=1.5)),
        ("output_stride", lambda: DeepLabV3(2, output_stride=12)),
        ("block", lambda: DeepLabV3(2, block="big")),
        ("stem", lambda: DeepLabV3(2, stem="tall")),
        ("blocks", lambda: DeepLabV3(2, blocks=(1, 1))),
        ("widths", lambda: DeepLabV3(2, blocks=(1,), widths=(10,), output_stride=4)),
        ("multi_grid", lambda: DeepLabV3(2, multi_grid=(1, 2))),
        ("width", lambda: TextTransformer(20, 2, width=16, heads=3)),
        ("positions", lambda: TextTransformer(20, 2, positions="rotary")),
        ("widths", lambda: UResNet(1, 2, widths=(16,))),
        ("dims", lambda: UResNet(1, 2, dims=1)),
        ("x", lambda: UResNet(2, 3, widths=(4, 8))(torch.zeros(1, 1, 4, 4, 4))),
        ("x", lambda: UResNet(2, 3, widths=(4, 8), dims=2)(torch.zeros(1, 2, 4, 4, 4))),
    ],
)
def test_wrong_option_raises(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.name == name
